//! Error messages of the program: the whole chain of causes, and no part of it twice.

use std::fs;
use std::net::TcpListener;
use std::process::Stdio;

use crate::support::{Process, within};
use tokio::process::Command;

/// The only line with this text on the standard error of a program, which must fail.
async fn failure(command: &mut Command, text: &str) -> String {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    command.env("NO_COLOR", "1").env_remove("ONCEGATE_LOG").env_remove("ONCEGATE_JOURNAL");
    let ended = within("the end of the program", command.output()).await.unwrap();
    assert!(!ended.status.success(), "{ended:?}");
    let stderr = String::from_utf8(ended.stderr).unwrap();
    let mut lines = stderr.lines().filter(|line| line.contains(text));
    let line = lines.next().unwrap_or_else(|| panic!("no line with {text:?}: {stderr}"));
    assert!(lines.next().is_none(), "more than one line with {text:?}: {stderr}");
    line.to_owned()
}

fn oncegate(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(args);
    command
}

#[track_caller]
fn prints_each_cause_once(line: &str, causes: &[&str]) {
    assert!(line.ends_with(&causes.join(": ")), "{line:?} does not end with {causes:?}");
    let parts: Vec<_> = line.split(": ").collect();
    for part in &parts {
        assert_eq!(parts.iter().filter(|other| *other == part).count(), 1, "{part:?} is twice in {line:?}");
    }
}

/// An address of this machine on which nothing listens.
fn unused_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

const REFUSED: [&str; 3] =
    ["client error (Connect)", "tcp connect error", "Connection refused (os error 111)"];

#[tokio::test]
async fn a_call_that_is_refused_prints_why() {
    let url = format!("http://{}/pay", unused_address());
    let line =
        failure(&mut oncegate(&["call", "--attempts", "1", "POST", &url]), "no definite response").await;
    prints_each_cause_once(&line, &REFUSED);
}

#[tokio::test]
async fn an_admin_address_that_refuses_prints_why() {
    let admin = format!("http://{}", unused_address());
    let line = failure(&mut oncegate(&["keys", "--admin", &admin, "ls"]), "cannot reach the sidecar").await;
    prints_each_cause_once(&line, &REFUSED);
}

#[tokio::test]
async fn a_service_that_refuses_is_checked_and_prints_why() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let to = format!("http://{}", unused_address());
    let args = ["check", "--online", "--to", &to, "--store", store.to_str().unwrap()];
    let mut check = oncegate(&args);
    check.stdout(Stdio::piped());
    let ended = within("the end of the check", check.output()).await.unwrap();
    let stderr = String::from_utf8(ended.stdout).unwrap();
    let line =
        stderr.lines().find(|line| line.contains("cannot be reached")).unwrap_or_else(|| panic!("{stderr}"));
    prints_each_cause_once(line, &REFUSED);
}

#[tokio::test]
async fn a_database_that_refuses_the_connection_prints_why() {
    let dir = tempfile::tempdir().unwrap();
    let to = format!("http://{}", unused_address());
    let store = format!("postgres://app@{}/shop", unused_address());
    let mut check = oncegate(&["check", "--to", &to, "--store", &store, "--service=shop"]);
    check.stdout(Stdio::piped()).current_dir(dir.path());
    let ended = within("the end of the check", check.output()).await.unwrap();
    let stderr = String::from_utf8(ended.stdout).unwrap();
    assert!(stderr.contains("Connection refused"), "{stderr}");
    // The sidecar starts without it, and logs the same error.
    let mut proxy = oncegate(&["proxy", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
    proxy.args(["--to", &to, "--store", &store, "--service=shop"]);
    let mut proxy = Process::start(&mut proxy);
    proxy.logs("Connection refused").await;
}

#[tokio::test]
async fn a_store_that_cannot_be_opened_prints_why() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    fs::create_dir_all(store.join("00000001.log")).unwrap();
    let to = format!("http://{}", unused_address());
    let store = store.to_str().unwrap();
    let mut proxy = oncegate(&["proxy", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
    proxy.args(["--to", &to, "--store", store]);
    let line = failure(&mut proxy, "cannot open").await;
    prints_each_cause_once(&line, &["Is a directory (os error 21)"]);
}
