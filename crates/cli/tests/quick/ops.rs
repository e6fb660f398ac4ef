//! The output of `oncegate check` and `oncegate keys`: exit codes, and the stream that each text goes to.

use std::path::Path;
use std::process::{Command, Output};

fn oncegate(dir: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_oncegate")).args(args).env_clear().current_dir(dir).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn check_fails_for_errors_and_succeeds_with_warnings() {
    let dir = tempfile::tempdir().unwrap();
    let good = oncegate(dir.path(), &["check", "--to", "http://127.0.0.1:3000"]);
    assert_eq!(good.status.code(), Some(0), "{good:?}");
    assert!(text(&good.stdout).lines().all(|line| line.starts_with("ok    ")), "{good:?}");
    let warned = oncegate(dir.path(), &["check", "--to", "http://127.0.0.1:3000", "--store", "memory:"]);
    assert_eq!(warned.status.code(), Some(0), "{warned:?}");
    assert!(text(&warned.stdout).starts_with("warn  --store: "), "{warned:?}");
    let bad = oncegate(dir.path(), &["check", "--lease", "30"]);
    assert_eq!(bad.status.code(), Some(1), "{bad:?}");
    assert_eq!(text(&bad.stdout).lines().filter(|line| line.starts_with("error ")).count(), 2, "{bad:?}");
    let unknown = oncegate(dir.path(), &["check", "--leese", "30s"]);
    assert_eq!(unknown.status.code(), Some(2), "{unknown:?}");
    assert!(text(&unknown.stderr).contains("'--lease'"), "{unknown:?}");
    assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none(), "check leaves no file behind");
}

#[test]
fn check_calls_the_service_on_request() {
    use std::io::{Read as _, Write as _};
    let dir = tempfile::tempdir().unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let to = format!("http://{}", listener.local_addr().unwrap());
    let service = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        // As many header lines as the sidecar accepts, and more than its libraries accept by default.
        let lines: String = (0..150).map(|number| format!("X-{number}: v\r\n")).collect();
        write!(stream, "HTTP/1.1 404 Not Found\r\n{lines}Content-Length: 0\r\n\r\n").unwrap();
        text(&head)
    });
    let said = oncegate(dir.path(), &["check", "--online", "--to", &to]);
    assert_eq!(said.status.code(), Some(0), "{said:?}");
    let line = format!("ok    service {to}: reached; it answers GET / with 404 Not Found (HTTP/1.1)");
    assert!(text(&said.stdout).lines().any(|other| other == line), "{said:?}");
    let asked = service.join().unwrap();
    assert!(
        asked.starts_with("GET / HTTP/1.1\r\n") && !asked.to_lowercase().contains("idempotency-key"),
        "{asked}"
    );

    // Nothing listens there any more.
    let said = oncegate(dir.path(), &["check", "--online", "--json", "--to", &to]);
    assert_eq!(said.status.code(), Some(1), "{said:?}");
    let report: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
    assert_eq!(report["verdict"], "error", "{report}");
    let lines = report["lines"].as_array().unwrap();
    let is_it = |line: &&serde_json::Value| line["text"].as_str().unwrap().contains("cannot be reached: ");
    assert_eq!(lines.iter().find(is_it).expect("a line of the service")["verdict"], "error");
    let said = oncegate(dir.path(), &["check", "--json", "--to", &to, "--store", "memory:"]);
    assert_eq!(said.status.code(), Some(0), "{said:?}");
    let report: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
    assert_eq!(report["verdict"], "warn", "{report}");
}

#[test]
fn the_sidecar_prints_every_error_and_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let bad = oncegate(dir.path(), &["proxy", "--lease", "30", "--wait", "1"]);
    assert_eq!(bad.status.code(), Some(1), "{bad:?}");
    let errors = text(&bad.stderr);
    for start in ["error: --lease: ", "error: --wait: ", "error: nothing to protect: "] {
        assert!(errors.lines().any(|line| line.starts_with(start)), "{errors}");
    }
    assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none());
}

#[test]
fn a_warning_about_a_readable_password_stops_no_command() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("oncegate.toml");
    // Nothing listens on this port.
    let settings =
        "to = \"http://127.0.0.1:9\"\nstore = \"redis://:pass-word@127.0.0.1:1\"\nservice = \"shop\"\n";
    std::fs::write(&file, settings).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    for command in [&["explain", "/orders"][..], &["rules"], &["openapi"]] {
        let said = oncegate(dir.path(), &[command, &["--config", "oncegate.toml"]].concat());
        assert_eq!(said.status.code(), Some(0), "{command:?}: {said:?}");
        assert!(!said.stdout.is_empty(), "{command:?}");
    }
}

#[test]
fn keys_separates_wrong_usage_from_an_unreachable_sidecar() {
    let dir = tempfile::tempdir().unwrap();
    // A port on which nothing listens.
    let gone = oncegate(dir.path(), &["keys", "ls", "--admin", "127.0.0.1:1"]);
    assert_eq!(gone.status.code(), Some(3), "{gone:?}");
    assert!(text(&gone.stderr).starts_with("error: cannot reach the sidecar at "), "{gone:?}");
    assert_eq!(text(&gone.stdout), "");
    let database = "--url=postgres://owner@127.0.0.1:1/shop";
    for command in [["schema", "status", "postgres"], ["schema", "apply", "postgres"]] {
        let gone = oncegate(dir.path(), &[&command[..], &[database]].concat());
        assert_eq!(gone.status.code(), Some(3), "{gone:?}");
        assert!(
            text(&gone.stderr).starts_with("error: postgres://127.0.0.1:1/shop cannot be used"),
            "{gone:?}"
        );
    }
    let wrong = oncegate(dir.path(), &["schema", "status", "postgres", "--url=postgres://owner@/?x=y"]);
    assert_eq!(wrong.status.code(), Some(1), "{wrong:?}");
    let usage = oncegate(dir.path(), &["tap", "--outcome", "bogus"]);
    assert_eq!(usage.status.code(), Some(2), "{usage:?}");
    assert!(text(&usage.stderr).contains("failed-open"), "{usage:?}");
    let usage = oncegate(dir.path(), &["keys", "ls", "--limit", "0"]);
    assert_eq!(usage.status.code(), Some(2), "{usage:?}");
    let usage = oncegate(dir.path(), &["keys", "resolve", "00", "--reason", "r"]);
    assert_eq!(usage.status.code(), Some(2), "{usage:?}");
}
