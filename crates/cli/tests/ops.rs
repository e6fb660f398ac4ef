//! What `oncegate check` and `oncegate keys` say to whoever started them: exit codes, and which stream they speak on.

use std::path::Path;
use std::process::{Command, Output};

fn oncegate(dir: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_oncegate")).args(args).env_clear().current_dir(dir).output().unwrap()
}

fn text(octets: &[u8]) -> String {
    String::from_utf8(octets.to_vec()).unwrap()
}

#[test]
fn check_fails_where_there_is_an_error_and_not_where_there_is_a_warning() {
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
    assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none(), "checking leaves nothing behind");
}

#[test]
fn the_sidecar_shows_every_error_and_does_not_start() {
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
fn keys_tells_wrong_usage_from_a_sidecar_that_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    // A port that nobody listens on.
    let gone = oncegate(dir.path(), &["keys", "ls", "--admin", "127.0.0.1:1"]);
    assert_eq!(gone.status.code(), Some(3), "{gone:?}");
    assert!(text(&gone.stderr).starts_with("error: cannot reach the sidecar at "), "{gone:?}");
    assert_eq!(text(&gone.stdout), "");
    let usage = oncegate(dir.path(), &["keys", "ls", "--limit", "0"]);
    assert_eq!(usage.status.code(), Some(2), "{usage:?}");
    let usage = oncegate(dir.path(), &["keys", "resolve", "00", "--reason", "r"]);
    assert_eq!(usage.status.code(), Some(2), "{usage:?}");
}
