//! The dashboard in a browser: every page, every action, in light and dark, on a phone, and as an attacker.

use std::path::Path;
use std::process::Stdio;

use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::Command;

use crate::support::{Sidecar, sidecar, within};

const TOKEN: &str = "a-token-for-operators";

/// The checks that the program of the browser makes.
const CHECKS: usize = 19;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_uses_the_dashboard_in_a_browser() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/dashboard");
    assert!(
        directory.join("node_modules").exists(),
        "the browser's library is missing; run `cargo xtask test`"
    );
    let home = tempfile::tempdir().unwrap();
    let mut program = Command::new("node")
        .arg("dashboard.mjs")
        .current_dir(directory)
        .env("HOME", home.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut output = BufReader::new(program.stdout.take().unwrap());
    let mut port = String::new();
    within("the port of the service", output.read_line(&mut port)).await.unwrap();
    let to = format!("http://127.0.0.1:{}", port.trim());
    let flags = ["--store=memory:", "--upstream-timeout=1s"];
    let mut command = sidecar(&to);
    let open = Sidecar::run(command.args(flags).env("ONCEGATE_WAIT", "5s")).await;
    let mut command = sidecar(&to);
    let guarded = Sidecar::run(command.args(flags).env("ONCEGATE_ADMIN_TOKEN", TOKEN)).await;
    let addresses = |sidecar: &Sidecar| json!({"address": sidecar.address.to_string(), "admin": sidecar.admin.to_string()});
    let given = json!({"open": addresses(&open), "guarded": addresses(&guarded), "token": TOKEN});
    program.stdin.take().unwrap().write_all(format!("{given}\n").as_bytes()).await.unwrap();
    let (mut checked, mut errors) = (String::new(), String::new());
    within("the end of the checks", output.read_to_string(&mut checked)).await.unwrap();
    program.stderr.take().unwrap().read_to_string(&mut errors).await.unwrap();
    let status = within("the end of the program", program.wait()).await.unwrap();
    assert!(status.success(), "{checked}\n{errors}");
    assert_eq!(checked.lines().count(), CHECKS, "{checked}");
}
