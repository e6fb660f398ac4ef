//! The contract from Python and Node, with nothing of ours installed. `cargo xtask test` installs redis-py and ioredis.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use oncegate_core::{Answer, RecordId, State, Store as _};
use oncegate_redis::contract::Scripts;
use oncegate_servers::{RedisCluster, RedisOptions, RedisServer};
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

fn in_node(url: &str) {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/node");
    assert!(program.join("node_modules").exists(), "its packages are missing; run `cargo xtask test`");
    let output = Command::new("node").arg(program.join("contract.js")).arg(url).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.stdout, b"contract: all as it is written down\n");
}

#[test]
fn a_service_in_node_goes_through_all_of_it_on_one_server() {
    in_node(&RedisServer::start(RedisOptions::new()).unwrap().url());
}

#[test]
fn a_service_in_node_goes_through_all_of_it_on_a_cluster() {
    in_node(&RedisCluster::start().unwrap().url());
}

#[test]
fn the_page_shows_how_node_calls_a_script() {
    let page = include_str!("../../../docs/reference/store-contract-redis.md");
    let program = include_str!("node/contract.js");
    let (_, rest) = program.split_once("// [docs:begin]\n").unwrap();
    let (example, _) = rest.split_once("// [docs:end]").unwrap();
    assert!(page.contains(example), "the page lacks {example}");
}

#[test]
fn the_page_names_every_script_as_it_is() {
    let page = include_str!("../../../docs/reference/store-contract-redis.md");
    for (name, script) in Scripts::published().each() {
        let row = format!("| `{name}` | `{}` |", script.sha1());
        assert!(page.contains(&row), "the page lacks {row}");
    }
}
