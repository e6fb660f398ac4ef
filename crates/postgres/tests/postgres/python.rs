//! The contract from Python, without any of our packages.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::Database;

/// The build directory, as `cargo xtask test` uses it.
fn target() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), |named| root.join(named))
}

async fn run(script: &str) {
    let python = target().join("psycopg/bin/python");
    assert!(python.exists(), "{} is missing; run `cargo xtask test`", python.display());
    let database = Database::fresh().await;
    let mut command = Command::new(python);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python").join(script);
    command.arg(script).arg(database.url());
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.stdout, b"ok\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_in_python_needs_only_the_functions() {
    run("contract.py").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_with_asyncpg_needs_only_the_functions() {
    run("contract_asyncpg.py").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_in_python_processes_each_message_once() {
    run("messages.py").await;
}
