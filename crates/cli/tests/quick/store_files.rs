//! File names in a store's URL are resolved like the other file names of a configuration.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A server that accepts TLS and then hangs up. It records whether the client began with TLS, because for that a client has
/// to read the files of its URL.
struct Server {
    port: u16,
    begun: Arc<Mutex<Vec<bool>>>,
}

impl Server {
    fn start(is_postgres: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let begun = Arc::new(Mutex::new(Vec::new()));
        let noted = begun.clone();
        std::thread::spawn(move || {
            while let Ok((mut stream, _)) = listener.accept() {
                stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                // PostgreSQL's SSLRequest, and its response.
                if is_postgres {
                    let mut ask = [0; 8];
                    let _asked = stream.read_exact(&mut ask).and_then(|()| stream.write_all(b"S"));
                }
                const HANDSHAKE: u8 = 22;
                let mut first = [0];
                let begins = stream.read(&mut first).is_ok_and(|read| read == 1) && first == [HANDSHAKE];
                noted.lock().unwrap_or_else(PoisonError::into_inner).push(begins);
            }
        });
        Self { port, begun }
    }

    /// Returns true if a client began with TLS since the last call. On a busy machine, other attempts may have timed out before.
    fn begun(&self) -> bool {
        let begun = std::mem::take(&mut *self.begun.lock().unwrap_or_else(PoisonError::into_inner));
        begun.contains(&true)
    }
}

/// The output of `check`.
fn check(directory: &Path, args: &[&str], store: Option<&str>) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.arg("check").args(args).env_clear().current_dir(directory).stdin(Stdio::null());
    command.env("ONCEGATE_TO", "http://127.0.0.1:3000").env("ONCEGATE_SERVICE", "shop");
    command.envs(store.map(|store| ("ONCEGATE_STORE", store)));
    let output = command.output().unwrap();
    String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap()
}

fn write_certificates(directory: &Path) {
    fs::create_dir_all(directory).unwrap();
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    fs::write(directory.join("ca.pem"), made.cert.pem()).unwrap();
    fs::write(directory.join("key.pem"), made.signing_key.serialize_pem()).unwrap();
}

fn is_resolved_by_the_configuration(server: &Server, url: &str) {
    let dir = tempfile::tempdir().unwrap();
    let (conf, elsewhere) = (dir.path().join("con f+é"), dir.path().join("elsewhere"));
    fs::create_dir(&elsewhere).unwrap();
    write_certificates(&conf.join("tls"));

    // In the configuration file: relative to the directory of that file.
    let file = conf.join("oncegate.toml");
    let tiered = format!("cached(cache=memory:,store={url})");
    for store in [url, &tiered] {
        fs::write(&file, format!("store = \"{store}\"\n")).unwrap();
        let said = check(&elsewhere, &["--config", file.to_str().unwrap()], None);
        assert!(server.begun(), "{store}: {said}");
        let said = check(&conf, &["--config", "oncegate.toml"], None);
        assert!(server.begun(), "{store}: {said}");
        assert!(!said.contains("tls/"), "{said}");
    }
    // In the environment and in a flag: relative to the working directory, with or without a configuration file.
    fs::write(&file, "lease = \"10s\"\n").unwrap();
    let config = ["--config", file.to_str().unwrap()];
    for args in [&config[..], &[]] {
        assert!(!check(&elsewhere, args, Some(url)).is_empty());
        assert!(!server.begun(), "the program read a file that does not exist");
        let said = check(&conf, args, Some(url));
        assert!(server.begun(), "{said}");
        let said = check(&conf, &[args, &["--store", url]].concat(), None);
        assert!(server.begun(), "{said}");
    }
    // An absolute name is used as it is.
    let absolute =
        url.replace("tls/", &format!("{}/tls/", conf.display()).replace('+', "%2B").replace(' ', "%20"));
    fs::write(&file, format!("store = \"{absolute}\"\n")).unwrap();
    let said = check(&elsewhere, &config, None);
    assert!(server.begun(), "{said}");
}

#[test]
fn files_of_a_redis_url_are_found() {
    let server = Server::start(false);
    let url = format!("rediss://127.0.0.1:{}/0?timeout=500ms&ca=tls/ca.pem", server.port);
    is_resolved_by_the_configuration(&server, &url);
}

#[test]
fn files_of_a_postgres_url_are_found() {
    let server = Server::start(true);
    let files = "sslmode=verify-ca&sslrootcert=tls/c%61.pem&sslcert=tls/ca.pem&sslkey=tls/key.pem";
    let url = format!("postgres://app:p%40ss@127.0.0.1:{}/shop?{files}&application_name=a+b", server.port);
    is_resolved_by_the_configuration(&server, &url);
}

/// The sidecars of a demo are processes of their own.
#[test]
fn files_of_a_demo_store_are_found() {
    let server = Server::start(false);
    let dir = tempfile::tempdir().unwrap();
    write_certificates(&dir.path().join("tls"));
    let url = format!("rediss://127.0.0.1:{}/0?timeout=500ms&ca=tls/ca.pem", server.port);
    let mut demo = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    demo.args(["demo", "--store", &url]).env_clear().current_dir(dir.path()).stdin(Stdio::null());
    let ended = demo.output().unwrap();
    assert!(server.begun(), "{ended:?}");
}
