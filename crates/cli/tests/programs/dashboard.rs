//! The dashboard in a browser: every page, every action, in light and dark, on a phone, and as an attacker.

use std::path::Path;

use serde_json::json;
use tokio::process::Command;

use crate::support::{CheckingProgram, Sidecar, sidecar};

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
    let mut command = Command::new("node");
    command.arg("dashboard.mjs").current_dir(directory).env("HOME", home.path());
    let program = CheckingProgram::start(&mut command).await;
    let to = format!("http://{}", program.service);
    let flags = ["--store=memory:", "--upstream-timeout=1s"];
    let mut command = sidecar(&to);
    let open = Sidecar::run(command.args(flags).env("ONCEGATE_WAIT", "5s")).await;
    let mut command = sidecar(&to);
    let guarded = Sidecar::run(command.args(flags).env("ONCEGATE_ADMIN_TOKEN", TOKEN)).await;
    let addresses = |sidecar: &Sidecar| json!({"address": sidecar.address.to_string(), "admin": sidecar.admin.to_string()});
    let given = json!({"open": addresses(&open), "guarded": addresses(&guarded), "token": TOKEN});
    program.check(&given, CHECKS).await;
}
