//! The contract from Python and Node, without any of our packages. `cargo xtask test` installs redis-py and ioredis.

use std::path::Path;
use std::process::Command;

use crate::support::open;
use oncegate_core::{RecordId, RecordedResponse, State, Store as _};
use oncegate_redis::contract::Scripts;
use oncegate_servers::{RedisCluster, RedisOptions, RedisServer};

#[tokio::test]
async fn a_python_service_uses_the_whole_contract_and_rust_reads_its_records() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let server = RedisServer::start(RedisOptions::new()).unwrap();
    let (script, lua) = (root.join("tests/contract.py"), lua());
    let mut command = oncegate_servers::python("redis-contract").unwrap();
    let output =
        command.arg(script).arg(server.url()).arg(lua.path()).env("LEAVE_FOR_RUST", "1").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let store = open(&server.url()).await;
    let record = store.lookup(RecordId::from_bytes([0xab; 32])).await.unwrap().expect("Python left it");
    let State::Completed(RecordedResponse::Replayable(response)) = record.state else { panic!("{record:?}") };
    assert_eq!(response.status(), 201);
    assert_eq!(response.body().len(), 25_600);
    assert_eq!(store.audit(None, 10).await.unwrap().len(), 1);
}

/// A directory with the scripts in full, as `oncegate schema print redis NAME` prints them.
fn lua() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (name, script) in Scripts::published().each() {
        std::fs::write(directory.path().join(format!("{name}.lua")), script.code()).unwrap();
    }
    directory
}

fn in_node(url: &str) {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/node");
    assert!(program.join("node_modules").exists(), "its packages are missing; run `cargo xtask test`");
    let lua = lua();
    let output =
        Command::new("node").arg(program.join("contract.js")).arg(url).arg(lua.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.stdout, b"contract: all as it is written down\n");
}

#[test]
fn a_node_service_uses_the_whole_contract_on_one_server() {
    in_node(&RedisServer::start(RedisOptions::new()).unwrap().url());
}

#[test]
fn a_node_service_uses_the_whole_contract_on_a_cluster() {
    in_node(&RedisCluster::start().unwrap().url());
}

#[test]
fn the_page_shows_how_node_calls_a_script() {
    let page = include_str!("../../../../docs/reference/store-contract-redis.md");
    let program = include_str!("../node/contract.js");
    let (_, rest) = program.split_once("// [docs:begin]\n").unwrap();
    let (example, _) = rest.split_once("// [docs:end]").unwrap();
    assert!(page.contains(example), "the page lacks {example}");
}

/// A response that no sidecar could read or send must not be stored: its key would be useless until it expires.
#[test]
fn a_response_that_cannot_be_read_back_is_refused() {
    let server = RedisServer::start(RedisOptions::new()).unwrap();
    let mut connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    let scripts = Scripts::published();
    let key = format!("oncegate:{{{}}}", "ab".repeat(32));
    let mut call = |script: &str, arguments: &[&[u8]]| {
        redis::cmd("EVAL")
            .arg(script)
            .arg(1)
            .arg(&key)
            .arg(arguments)
            .query::<Vec<redis::Value>>(&mut connection)
    };
    let (attempt, fingerprint, caller) = ("1".repeat(16), "2".repeat(33), "3".repeat(8));
    let claim = [fingerprint.as_str(), "60000", "60000", "park", &caller, ""].map(str::as_bytes);
    let granted = call(scripts.claim.code(), &[&[attempt.as_bytes()], &claim[..]].concat()).unwrap();
    let redis::Value::Int(token) = granted[2] else { panic!("{granted:?}") };
    let token = token.to_string();
    let token = token.as_bytes();
    let unreadable: [&[u8]; 11] = [
        b"\x01\0\0\0\0\0\0",                            // status 0
        b"\x01\0\x67\0\0\0\0",                          // 103
        b"\x01\x03\xe8\0\0\0\0",                        // 1000
        b"\x01\xc9\0\0\0\0\0",                          // 201 in the wrong order
        b"\x02\0\xc8\0\0\0\0",                          // version 2
        b"\x01\0\xc8\0\0\0",                            // truncated
        b"\x01\0\xc8\0\xff\x01\x02",                    // 257 trailer fields and more
        b"\x01\0\xc8\0\x01\0\0",                        // one field, but it is missing
        b"\x01\0\xc8\0\x01\0\0\0\x01\0\0\0\x01a",       // truncated in its value
        b"\x01\0\xc8\0\x01\0\0\0\x01\xff\xff\xff\xffa", // a value of 4 GiB
        b"\x01\0\xc8\0\0\0\x01\0\x01\0\0\0\x01\xffa",   // a trailer whose name is not ASCII
    ];
    for bytes in unreadable {
        let resolve: [&[u8]; 7] = [b"complete", b"60000", b"0", b"0", b"ann", b"why", bytes];
        let complete: [&[u8]; 4] = [token, b"completed", b"60000", bytes];
        for refused in [call(scripts.complete.code(), &complete), call(scripts.resolve.code(), &resolve)] {
            let error = refused.unwrap_err();
            assert_eq!(error.code(), Some("INVALID"), "{bytes:?}: {error}");
        }
    }
    let whole = b"\x01\x03\xe7\0\x01\0\x01\0\x01\0\0\0\x01a\xff\0\x01\0\0\0\0bbody";
    let completed = call(scripts.complete.code(), &[token, b"completed", b"60000", whole]).unwrap();
    assert_eq!(completed[0], redis::Value::BulkString(b"completed".to_vec()));
}

/// A lease or a retention of nothing would free the key at once, and a very long one would keep it for ever.
#[test]
fn a_lease_and_a_retention_out_of_their_bounds_are_refused() {
    let server = RedisServer::start(RedisOptions::new()).unwrap();
    let mut connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    let scripts = Scripts::published();
    let key = format!("oncegate:{{{}}}", "ab".repeat(32));
    let (attempt, fingerprint, caller) = ("1".repeat(16), "2".repeat(33), "3".repeat(8));
    let (longest_lease, longest_retention) = ("3600000", "34560000000");
    let mut word = |script: &str, arguments: &[&str]| {
        let reply = redis::cmd("EVAL").arg(script).arg(1).arg(&key).arg(arguments).query(&mut connection);
        reply.map_or_else(
            |error: redis::RedisError| error.code().unwrap_or_default().to_owned(),
            |reply: Vec<redis::Value>| redis::from_redis_value(reply[0].clone()).unwrap(),
        )
    };
    for (lease, retention) in
        [("0", "1"), ("1", "0"), ("3600001", "1"), ("1", "34560000001"), ("-1", "1"), ("1", ""), ("1.5", "1")]
    {
        let claim = [&attempt, &fingerprint, lease, retention, "park", &caller, ""];
        assert_eq!(word(scripts.claim.code(), &claim), "INVALID", "{lease} {retention}");
        assert_eq!(word(scripts.renew.code(), &["1", lease, retention]), "INVALID", "{lease} {retention}");
    }
    for retention in ["0", "34560000001"] {
        assert_eq!(word(scripts.release.code(), &["1", retention]), "INVALID", "{retention}");
        assert_eq!(word(scripts.complete.code(), &["1", "tombstone", retention]), "INVALID", "{retention}");
        let resolve = ["release", retention, "0", "0", "ann", "why"];
        assert_eq!(word(scripts.resolve.code(), &resolve), "INVALID", "{retention}");
    }
    let claim = [&attempt, &fingerprint, longest_lease, longest_retention, "park", &caller, ""];
    assert_eq!(word(scripts.claim.code(), &claim), "execute");
}

/// The arguments of `rewrite` and `forget` that could lose content or confuse its parts.
#[test]
fn malformed_changes_of_content_are_refused() {
    let server = RedisServer::start(RedisOptions::new()).unwrap();
    let mut connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    let scripts = Scripts::published();
    let key = format!("oncegate:{{{}}}", "ab".repeat(32));
    let mut word = |script: &str, arguments: &[&[u8]]| {
        let reply = redis::cmd("EVAL").arg(script).arg(1).arg(&key).arg(arguments).query(&mut connection);
        reply.map_or_else(
            |error: redis::RedisError| error.code().unwrap_or_default().to_owned(),
            |reply: Vec<redis::Value>| redis::from_redis_value(reply[0].clone()).unwrap(),
        )
    };
    let whole: &[u8] = b"\x01\0\xc8\0\0\0\0";
    let wrong: [&[&[u8]]; 9] = [
        &[],
        &[b"1", b"", b""],
        &[b"1", b"", b"", b"1"],
        &[b"1", b"", b"", b"1", b"a"],
        &[b"1", b"", b"", b"0", b"a", b"b"],
        &[b"1", b"", b"", b"01", b"a", b"b"],
        &[b"1", whole, b"", b"0"],
        &[b"1", b"", whole, b"0"],
        &[b"1", whole, b"no response", b"0"],
    ];
    for arguments in wrong {
        assert_eq!(word(scripts.rewrite.code(), arguments), "INVALID", "{arguments:?}");
    }
    assert_eq!(word(scripts.rewrite.code(), &[b"1", whole, whole, b"0"]), "not-rewritten");
    let long = [b'r'; 1001];
    let wrong: [&[&[u8]]; 4] = [&[], &[b"ann"], &[b"ann", &long], &[&long, b"why"]];
    for arguments in wrong {
        assert_eq!(word(scripts.forget.code(), arguments), "INVALID");
    }
    assert_eq!(word(scripts.forget.code(), &[b"ann", &long[1..]]), "not-forgotten");
}

#[test]
fn the_page_names_every_script_correctly() {
    let page = include_str!("../../../../docs/reference/store-contract-redis.md");
    for (name, script) in Scripts::published().each() {
        let row = format!("| `{name}` | `{}` |", script.sha1());
        assert!(page.contains(&row), "the page lacks {row}");
    }
}
