//! The configuration of the sidecar, and its messages about mistakes.

use std::fs;

use tokio::process::Command;

use crate::protocols::{Authority, ClientAuthority};
use crate::support::{Process, Service, Sidecar, request, sidecar};
use crate::{KEY, OK};

/// Runs the command, and returns its exit code and its standard error.
async fn refused(command: &mut Command) -> (i32, String) {
    let mut process = Process::start(command);
    let code = process.ended().await.code().expect("an exit code");
    assert_eq!(process.output().await, [""; 0]);
    (code, process.errors().await)
}

#[tokio::test]
async fn an_unknown_setting_is_an_error_with_a_suggestion() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("oncegate.toml");
    let to = "http://127.0.0.1:9";

    let (code, said) = refused(sidecar(to).arg("--leese=5s")).await;
    assert_eq!(code, 2);
    assert!(said.contains("--leese") && said.contains("--lease"), "{said}");

    let (code, said) = refused(sidecar(to).arg("--store=memory:").env("ONCEGATE_RETENTON", "1h")).await;
    assert_eq!(code, 1);
    assert!(said.contains("ONCEGATE_RETENTON") && said.contains("ONCEGATE_RETENTION"), "{said}");

    fs::write(&file, "store = \"memory:\"\nserver-erors = \"replay\"\n").unwrap();
    let (code, said) = refused(sidecar(to).arg("--config").arg(&file)).await;
    assert_eq!(code, 1);
    for word in ["oncegate.toml:2", "server-erors", "server-errors"] {
        assert!(said.contains(word), "no {word} in {said}");
    }

    fs::write(&file, "store = \"memory:\"\n[[route]]\npath = \"/a\"\nrequire_key = true\n").unwrap();
    let (code, said) = refused(sidecar(to).arg("--config").arg(&file)).await;
    assert_eq!(code, 1);
    for word in ["oncegate.toml:4", "require_key", "require-key"] {
        assert!(said.contains(word), "no {word} in {said}");
    }
}

#[tokio::test]
async fn all_mistakes_are_reported_at_once() {
    let mut command = sidecar("http://127.0.0.1:9");
    command.args([
        "--store=memory:",
        "--lease=soon",
        "--wait=-1s",
        "--scope=everybody",
        "--tls-cert=/nowhere.pem",
    ]);
    let (code, said) = refused(&mut command).await;
    assert_eq!(code, 1);
    for word in ["--lease", "soon", "--wait", "--scope", "everybody", "tls-key"] {
        assert!(said.contains(word), "no {word} in {said}");
    }
    let (code, said) = refused(Command::new(env!("CARGO_BIN_EXE_oncegate")).arg("proxy")).await;
    assert!(code != 0 && said.contains("--to"), "{said}");
}

#[tokio::test]
async fn the_store_is_the_same_one_from_every_working_directory() {
    let directory = tempfile::tempdir().unwrap();
    let (here, there) = (directory.path().join("here"), directory.path().join("there"));
    fs::create_dir(&here).unwrap();
    fs::create_dir(&there).unwrap();
    let service = Service::new().await.answers(OK);
    let config = directory.path().join("oncegate.toml");
    let content = format!("to = \"http://{}\"\nstore = \"records\"\n", service.address);
    fs::write(&config, content).unwrap();
    let store = directory.path().join("records");
    const CREATED: &str = "a new, empty store was created";
    for (place, named, is_new) in
        [(&here, "../oncegate.toml", true), (&there, config.to_str().unwrap(), false)]
    {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command.args(["proxy", "--listen=127.0.0.1:0", "--admin=127.0.0.1:0", "--config", named]);
        let mut sidecar = Sidecar::run(command.current_dir(place)).await;
        let line = sidecar.process.first_line().await;
        // The first name has dots in its path.
        let shown = if is_new { place.join("../records") } else { store.clone() };
        assert!(line.ends_with(&format!("store {}", shown.display())), "{line}");
        let response = sidecar.ask(&request("POST", "/orders", &[KEY], "{}")).await;
        assert_eq!(response.has_status(200).is_replay(), !is_new);
        sidecar.process.signal(rustix::process::Signal::TERM);
        assert!(sidecar.process.ended().await.success());
        let said = sidecar.process.errors().await;
        let warning = said.lines().find(|line| line.contains(CREATED));
        assert_eq!(warning.is_some(), is_new, "{said}");
        let names_it = |line: &str| line.contains("WARN") && line.contains(shown.to_str().unwrap());
        assert!(warning.is_none_or(names_it), "{said}");
    }
    assert_eq!(service.requests(), 1);
}

#[tokio::test]
async fn a_store_that_must_exist_is_not_created() {
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("unmounted");
    let flag = format!("--store={}", store.display());
    for makes in [false, true] {
        if makes {
            // The mount point exists, but nothing is mounted.
            fs::create_dir(&store).unwrap();
        }
        let mut command = sidecar("http://127.0.0.1:9");
        let (code, said) = refused(command.args([&flag, "--store-must-exist"])).await;
        assert_eq!(code, 1);
        assert!(said.contains(store.to_str().unwrap()) && said.contains("there is no store"), "{said}");
    }
    assert!(fs::read_dir(&store).unwrap().next().is_none(), "no store is created");
    let service = Service::new().await.answers(OK);
    let mut first = Sidecar::start(service.address, &[&flag]).await;
    first.process.signal(rustix::process::Signal::TERM);
    assert!(first.process.ended().await.success());
    Sidecar::start(service.address, &[&flag, "--store-must-exist"]).await;
}

#[tokio::test]
async fn the_error_names_a_store_that_is_in_use() {
    let directory = tempfile::tempdir().unwrap();
    let store = format!("--store={}", directory.path().join("store").display());
    let service = Service::new().await;
    let _first = Sidecar::start(service.address, &[&store]).await;
    let (code, said) = refused(sidecar("http://127.0.0.1:9").arg(&store)).await;
    assert_eq!(code, 1);
    assert!(said.contains(directory.path().to_str().unwrap()), "{said}");
    assert!(said.contains("in use") || said.contains("another process"), "{said}");
}

#[tokio::test]
async fn the_error_names_an_address_that_is_in_use() {
    let service = Service::new().await;
    for threads in ["--threads=1", "--threads=2"] {
        let first = Sidecar::start(service.address, &[threads]).await;
        for (flag, address) in [("--listen", first.address), ("--admin", first.admin)] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
            command.args(["proxy", "--to=http://127.0.0.1:9", "--store=memory:", threads]);
            let other = if flag == "--listen" { "--admin=127.0.0.1:0" } else { "--listen=127.0.0.1:0" };
            let (code, said) = refused(command.arg(format!("{flag}={address}")).arg(other)).await;
            assert_eq!(code, 1);
            let expected = format!("error: {flag} {address}: cannot listen: Address already in use");
            assert!(said.contains(&expected), "{said}");
        }
    }
}

/// The warning about a new store comes only with a start that serves requests.
#[tokio::test]
async fn a_start_that_fails_creates_no_store() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let store = format!("--store={}", path.display());
    let service = Service::new().await.answers(OK);
    let first = Sidecar::start(service.address, &[]).await;
    let missing = directory.path().join("missing.pem").display().to_string();
    let (listen, admin) = (format!("--listen={}", first.address), format!("--admin={}", first.admin));
    let any = ("--listen=127.0.0.1:0", "--admin=127.0.0.1:0");
    let starts: [&[&str]; 3] =
        [&[&listen, any.1], &[any.0, &admin], &[any.0, any.1, "--tls-cert", &missing, "--tls-key", &missing]];
    for flags in starts {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        let (code, said) =
            refused(command.args(["proxy", "--to=http://127.0.0.1:9", &store]).args(flags)).await;
        assert_eq!(code, 1, "{said}");
        assert!(!path.exists(), "{flags:?}: {said}");
    }
    // A start without mistakes creates the store.
    let to = format!("http://{}", service.address);
    let mut sidecar = Sidecar::run(sidecar(&to).arg(&store)).await;
    sidecar.ask(&request("POST", "/", &[KEY], "{}")).await.has_status(200);
    sidecar.process.kill().await;
    assert!(sidecar.process.errors().await.contains("a new, empty store was created"));
}

/// A mistyped directory name must not become an empty store.
#[tokio::test]
async fn no_store_is_created_in_a_directory_with_other_files() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("ledger.csv"), "").unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let store = format!("--store={}", directory.path().display());
    let back = elsewhere.path().join("records");
    let front = format!("--store=cached(cache={},store={})", directory.path().display(), back.display());
    for store in [&store, &front] {
        let (code, said) = refused(sidecar("http://127.0.0.1:9").arg(store)).await;
        assert_eq!(code, 1);
        assert!(said.contains("contains other files, such as ledger.csv"), "{said}");
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    // The root of a new file system counts as empty.
    let disk = tempfile::tempdir().unwrap();
    fs::create_dir(disk.path().join("lost+found")).unwrap();
    let service = Service::new().await.answers(OK);
    Sidecar::start(service.address, &[&format!("--store={}", disk.path().display())]).await;
}

#[tokio::test]
async fn the_error_names_invalid_tls_files() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = directory.path().join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (empty, garbage) = (file("empty.pem", ""), file("garbage.pem", "-----BEGIN CERTIFICATE-----\n!\n"));
    let missing = directory.path().join("missing.pem").display().to_string();
    for path in [empty, garbage, missing] {
        let mut command = sidecar("http://127.0.0.1:9");
        command.args(["--store=memory:", "--tls-cert", &path, "--tls-key", &path]);
        let (code, said) = refused(&mut command).await;
        assert_eq!(code, 1);
        assert!(said.contains(&path), "{said}");
    }
}

#[tokio::test]
async fn one_line_names_the_listening_address() {
    let service = Service::new().await.answers(OK);
    let mut sidecar = Sidecar::start(service.address, &[]).await;
    sidecar.ask(&request("POST", "/", &[KEY], "{}")).await.has_status(200);
    let line = sidecar.process.first_line().await;
    for part in [sidecar.address, sidecar.admin, service.address] {
        assert!(line.contains(&format!("http://{part}")), "{line}");
    }
    assert!(line.ends_with("store memory:"), "{line}");
    sidecar.process.signal(rustix::process::Signal::TERM);
    assert!(sidecar.process.ended().await.success());
    assert_eq!(sidecar.process.output().await, [line]);
}

#[tokio::test]
async fn a_key_is_never_logged() {
    let service = Service::new().await.answers(OK);
    let mut command = sidecar(&format!("http://{}", service.address));
    let mut sidecar = Sidecar::run(command.arg("--store=memory:").env("ONCEGATE_LOG", "trace")).await;
    let secrets = ["Idempotency-Key: whisper-1", "Authorization: Bearer whisper-2"];
    for body in ["whisper-3", "whisper-3", "whisper-4"] {
        sidecar.ask(&request("POST", "/", &secrets, body)).await;
    }
    sidecar.process.kill().await;
    let said = sidecar.process.errors().await;
    let ours: Vec<_> = said.lines().filter(|line| line.contains("whisper")).collect();
    assert!(ours.is_empty(), "{ours:#?}");
}

#[tokio::test]
async fn routes_have_settings_of_their_own() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("oncegate.toml");
    let routes = r#"
        store = "memory:"

        [[route]]
        path = "/payments/{id}/capture"
        require-key = true

        [[route]]
        path = "/v1/{*rest}"
        profile = "stripe"

        [[route]]
        methods = ["PUT"]
        path = "/documents/{id}"

        [[route]]
        path = "/uploads"
        max-request-body = "4B"

        [[route]]
        path = "/slow"
        upstream-timeout = "200ms"
    "#;
    fs::write(&file, routes).unwrap();
    let service = Service::new().await.answers(OK);
    let mut command = sidecar(&format!("http://{}", service.address));
    let sidecar = Sidecar::run(command.arg("--config").arg(&file)).await;
    let ask = async |method: &str, target: &str, fields: &[&str], body: &str| {
        sidecar.ask(&request(method, target, fields, body)).await
    };

    ask("POST", "/payments/7/capture", &[], "{}").await.is_problem(400, "key-missing");
    ask("POST", "/payments/7/capture", &[KEY], "{}").await.has_status(200);
    ask("POST", "/payments/7", &[], "{}").await.has_status(200);

    ask("POST", "/v1/charges", &[KEY], "a=1").await.has_status(200);
    let mismatch = ask("POST", "/v1/charges", &[KEY], "a=2").await;
    assert_eq!(mismatch.has_status(400).json()["error"]["type"], "idempotency_error");
    ask("POST", "/other", &[KEY], "a=1").await.has_status(200);
    ask("POST", "/other", &[KEY], "a=2").await.is_problem(422, "key-reused");

    for (target, replays) in [("/documents/7", true), ("/elsewhere/7", false)] {
        assert!(!ask("PUT", target, &[KEY], "{}").await.has_status(200).is_replay());
        assert_eq!(ask("PUT", target, &[KEY], "{}").await.has_status(200).is_replay(), replays, "{target}");
    }

    ask("POST", "/uploads", &[KEY], "12345").await.is_problem(413, "request-too-large");
    ask("POST", "/uploads", &[KEY], "1234").await.has_status(200);
}

/// The settings that an example of `oncegate init` needs besides itself: the names of other examples, and lines.
const COMPANIONS: &[(&str, &[&str], &str)] = &[
    ("metrics-token-file", &["admin-token-file"], ""),
    ("tls-cert", &["tls-key"], ""),
    ("tls-key", &["tls-cert"], ""),
    ("tls-client-ca", &["tls-cert", "tls-key"], ""),
    ("tls-client-crl", &["tls-cert", "tls-key", "tls-client-ca"], ""),
    ("jwt-algorithms", &["jwt-keys"], ""),
    ("jwt-issuer", &["jwt-keys"], ""),
    ("jwt-audience", &["jwt-keys"], ""),
    ("natural-key", &["scope"], ""),
    ("read-only-tools", &[], "profile = \"mcp\"\n"),
    ("intent-tools", &["scope"], "profile = \"mcp\"\n"),
];

/// A user removes the mark of a comment from a line, and the configuration works.
#[tokio::test]
async fn each_example_of_a_new_file_works_without_its_mark() {
    let directory = tempfile::tempdir().unwrap();
    let etc = directory.path().join("etc");
    fs::create_dir(&etc).unwrap();
    let (server, clients) = (Authority::new(), ClientAuthority::new());
    let key_set = r#"{"keys":[{"kty":"OKP","crv":"Ed25519","alg":"EdDSA","kid":"a","x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}"#;
    let seal_key =
        Command::new(env!("CARGO_BIN_EXE_oncegate")).args(["seal-key", "new"]).output().await.unwrap();
    for (name, content) in [
        ("tls-cert.pem", fs::read_to_string(server.file("cert.pem")).unwrap()),
        ("tls-key.pem", fs::read_to_string(server.file("key.pem")).unwrap()),
        ("tls-client-ca.pem", clients.issuer.pem()),
        ("tls-client-crl.pem", clients.list(&[], (4096, 1, 1))),
        ("admin-token-file", "0123456789abcdef".to_owned()),
        ("metrics-token-file", "fedcba9876543210".to_owned()),
        ("seal-keys-file", String::from_utf8(seal_key.stdout).unwrap()),
        ("id-secret-file", oncegate_core::IdSecret::from_bytes([1; 32]).to_secret_text().to_string()),
        ("jwt-keys", key_set.to_owned()),
    ] {
        let file = etc.join(name);
        fs::write(&file, content).unwrap();
        fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    }
    let made = Command::new(env!("CARGO_BIN_EXE_oncegate")).args(["init", "-"]).output().await.unwrap();
    let made =
        String::from_utf8(made.stdout).unwrap().replace("/etc/oncegate/", &format!("{}/", etc.display()));
    // The examples of routes are tested as a whole.
    let (settings, _) = made.split_once("# ==== Routes").unwrap();
    let name_of = |line: &str| {
        let (name, _) = line.strip_prefix('#')?.split_once(" = ")?;
        let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
        name.chars().all(is_name).then(|| name.to_owned())
    };
    let names: Vec<String> = settings.lines().filter_map(name_of).collect();
    assert!(names.len() > 80, "{names:?}");
    for (wanted, others, _) in COMPANIONS {
        assert!(
            [wanted].into_iter().chain(*others).all(|name| names.contains(&(*name).to_owned())),
            "{wanted}"
        );
    }
    let mut faults = Vec::new();
    for name in &names {
        let (others, more) = COMPANIONS
            .iter()
            .find(|(wanted, ..)| wanted == name)
            .map_or((&[][..], ""), |(_, others, more)| (*others, *more));
        let is_wanted = |line: &str| name_of(line).is_some_and(|own| own == *name || others.contains(&&*own));
        let lines = settings.lines().map(|line| if is_wanted(line) { &line[1..] } else { line });
        let file = directory.path().join("oncegate.toml");
        fs::write(&file, more.to_owned() + &lines.collect::<Vec<_>>().join("\n")).unwrap();
        let mut check = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        let output = check.args(["check", "--config"]).arg(&file).env_clear().output().await.unwrap();
        if !output.status.success() {
            faults.push(format!("{name}: {}", String::from_utf8_lossy(&output.stdout)));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// The environment of an operator's shell, in which both are started.
#[tokio::test]
async fn one_environment_serves_the_sidecar_and_the_commands() {
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let [config, token] = ["oncegate.toml", "token"].map(|name| directory.path().join(name));
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let admin = format!("http://127.0.0.1:{port}");
    let text = format!(
        "to = \"http://{}\"\nlisten = \"127.0.0.1:0\"\nstore = \"memory:\"\nadmin-token-file = {:?}\n",
        service.address,
        token.display().to_string()
    );
    fs::write(&config, text).unwrap();
    fs::write(&token, "the-token-of-the-file").unwrap();
    let path = token.display().to_string();
    let in_file = ("ONCEGATE_ADMIN_TOKEN_FILE", path.as_str());
    for variable in [("ONCEGATE_ADMIN_TOKEN", "a-token-of-the-environment"), in_file] {
        let command = |args: &[&str]| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
            command.args(args).env_clear().env("ONCEGATE_ADMIN", &admin).env(variable.0, variable.1);
            command
        };
        let file = config.display().to_string();
        let check = command(&["check", "--config", &file]).output().await.unwrap();
        assert!(check.status.success(), "{check:?}");
        let sidecar = Sidecar::run(&mut command(&["proxy", "--config", &file])).await;
        assert_eq!(sidecar.admin.port(), port);
        for args in [&["keys", "ls"][..], &["health"], &["top", "--once"]] {
            let output = command(args).output().await.unwrap();
            assert!(output.status.success(), "{args:?}: {output:?}");
        }
        let warned = sidecar.process.error_lines("ONCEGATE_ADMIN_TOKEN: another token than that in");
        assert_eq!(warned.len(), usize::from(variable != in_file), "{warned:?}");
    }
    let mut both = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    both.args(["keys", "ls"]).env_clear().env("ONCEGATE_ADMIN_TOKEN", "a").env(in_file.0, in_file.1);
    let output = both.output().await.unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("must come from one source"), "{output:?}");
}
