//! The contract from Python, without any of our packages.

use std::path::Path;

use crate::support::Database;

async fn run(script: &str) {
    let database = Database::fresh().await;
    let mut command = oncegate_servers::python("psycopg").unwrap();
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
