//! The contract from Node, without any of our packages.

use std::path::Path;
use std::process::Command;

use crate::support::Database;

#[tokio::test(flavor = "multi_thread")]
async fn a_service_in_node_needs_only_the_functions() {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/node");
    assert!(program.join("node_modules").exists(), "its packages are missing; run `cargo xtask test`");
    let database = Database::fresh().await;
    let mut command = Command::new("node");
    command.arg(program.join("contract.js")).arg(database.url());
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.stdout, b"ok\n");
}
