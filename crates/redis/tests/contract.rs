//! The contract from Python, with nothing of ours installed. `cargo xtask test` makes the environment with redis-py.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use oncegate_core::{Answer, RecordId, State, Store as _};
use oncegate_redis::contract::Scripts;
use oncegate_servers::{RedisOptions, RedisServer};
use support::open;

#[tokio::test]
async fn another_language_goes_through_all_of_it_and_rust_reads_what_it_wrote() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("../../target"), PathBuf::from);
    let python = target.join("redis-contract/bin/python");
    assert!(python.exists(), "{} is missing; run `cargo xtask test`, which makes it", python.display());
    let server = RedisServer::start(RedisOptions::new()).unwrap();
    let script = root.join("tests/contract.py");
    let output =
        Command::new(python).arg(script).arg(server.url()).env("LEAVE_FOR_RUST", "1").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let store = open(&server.url()).await;
    let record = store.lookup(RecordId::from_bytes([0xab; 32])).await.unwrap().expect("Python left it");
    let State::Completed(Answer::Replayable(response)) = record.state else { panic!("{record:?}") };
    assert_eq!(response.status(), 201);
    assert_eq!(response.body().len(), 25_600);
    assert_eq!(store.audit(None, 10).await.unwrap().len(), 1);
}

#[test]
fn the_page_names_every_script_as_it_is() {
    let page = include_str!("../../../docs/reference/store-contract-redis.md");
    for (name, script) in Scripts::published().each() {
        let row = format!("| `{name}` | `{}` |", script.sha1());
        assert!(page.contains(&row), "the page lacks {row}");
    }
}
