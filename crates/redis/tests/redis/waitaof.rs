//! `wait-aof`: a write counts when it is on disk. Needs a server with `WAITAOF`, which Debian's Redis 7.0 lacks.

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::*;
use oncegate_core::{Durability, Extent, Outcome, Store as _, StoreErrorKind};
use oncegate_redis::{RedisOpenError, RedisStore};
use oncegate_servers::{RedisCluster, RedisOptions as ServerOptions, RedisServer};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};

fn start(options: ServerOptions) -> RedisServer {
    RedisServer::start(options.recent()).unwrap()
}

fn flushing(when: &str) -> RedisServer {
    start(ServerOptions::new().with_appendfsync(when))
}

fn url(server: &RedisServer, query: &str) -> String {
    format!("{}?timeout=20s&connect-timeout=20s&{query}", server.url())
}

/// The number of waits for disks since the last call.
fn waits(server: &RedisServer) -> usize {
    let calls = calls_of(server, "waitaof");
    server.command(&["CONFIG", "RESETSTAT"]).unwrap();
    calls
}

/// Returns the reason why the store does not open.
async fn refusal(url: &str) -> String {
    match RedisStore::open(options(url)).await {
        Err(RedisOpenError::Unfit(what)) => what,
        other => panic!("{other:?}"),
    }
}

/// A proxy to a server that reports the state of its disk correctly. It answers `WAITAOF` once a second, as Redis 8 does
/// under `everysec`, and not at all while the disk is held. It forwards everything else.
struct TruthfulProxy {
    port: u16,
    disk_stands_still: Arc<AtomicBool>,
}

impl TruthfulProxy {
    async fn before(server: &RedisServer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (port, to) = (listener.local_addr().unwrap().port(), server.port());
        let disk_stands_still = Arc::new(AtomicBool::new(false));
        let (stands_still, started) = (disk_stands_still.clone(), Instant::now());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(("127.0.0.1", to)).await else { continue };
                tokio::spawn(forward(client, server, stands_still.clone(), started));
            }
        });
        Self { port, disk_stands_still }
    }

    fn url(&self, query: &str) -> String {
        format!("redis://127.0.0.1:{}?timeout=20s&connect-timeout=20s&{query}", self.port)
    }
}

async fn forward(
    client: TcpStream,
    server: TcpStream,
    stands_still: Arc<AtomicBool>,
    started: Instant,
) -> io::Result<()> {
    let (mut client, mut server) = (BufReader::new(client), BufReader::new(server));
    loop {
        let command = value(&mut client).await?;
        let text = String::from_utf8_lossy(&command).into_owned();
        let reply = if text.contains("WAITAOF") {
            let millis = text.trim_end().rsplit("\r\n").next().unwrap().parse().unwrap();
            let until = Instant::now() + Duration::from_millis(millis);
            let flushes = |since: Instant| since.elapsed().as_secs();
            let before = flushes(started);
            let is_flushed = || flushes(started) > before && !stands_still.load(Ordering::SeqCst);
            while !is_flushed() && Instant::now() < until {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            format!("*2\r\n:{}\r\n:0\r\n", u8::from(is_flushed())).into_bytes()
        } else {
            server.write_all(&command).await?;
            value(&mut server).await?
        };
        client.write_all(&reply).await?;
    }
}

/// Reads one value of the protocol.
async fn value(from: &mut BufReader<TcpStream>) -> io::Result<Vec<u8>> {
    let (mut bytes, mut left) = (Vec::new(), 1_i64);
    while left > 0 {
        left -= 1;
        let start = bytes.len();
        if from.read_until(b'\n', &mut bytes).await? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let count = || String::from_utf8_lossy(&bytes[start + 1..]).trim().parse::<i64>().unwrap_or(-1);
        match bytes[start] {
            b'*' => left += count().max(0),
            b'$' if count() >= 0 => {
                let mut text = vec![0; usize::try_from(count()).unwrap() + 2];
                from.read_exact(&mut text).await?;
                bytes.extend(text);
            }
            _ => {}
        }
    }
    Ok(bytes)
}

#[tokio::test]
async fn only_deciding_commands_wait_for_the_disk() {
    let server = flushing("always");
    let store = open(&url(&server, "wait-aof=local")).await;
    assert_eq!(waits(&server), 1, "the check of the server");
    let (grant, other) = (granted(&store, 1, 1).await, granted(&store, 2, 2).await);
    assert_eq!(waits(&server), 2);
    assert!(matches!(store.apply(id(1), renewal(grant.token)).await, Ok(Outcome::Renewed { .. })));
    assert!(matches!(try_claim(&store, 1, 11).await, Ok(Outcome::InProgress { .. })));
    assert!(store.lookup(id(1)).await.unwrap().is_some());
    assert_eq!(waits(&server), 0);
    assert_eq!(store.apply(id(1), completion(grant.token, 1)).await.unwrap(), Outcome::Completed);
    assert_eq!(store.apply(id(2), release(other.token)).await.unwrap(), Outcome::Released);
    assert_eq!(waits(&server), 2);
    assert_eq!(try_claim(&store, 1, 12).await.unwrap(), Outcome::Replay(response(1)));
    assert_eq!(store.apply(id(1), renewal(grant.token)).await.unwrap(), Outcome::Fenced);
    assert_eq!(waits(&server), 0);
}

#[tokio::test]
async fn a_server_that_confirms_unflushed_writes_is_refused() {
    let server = flushing("everysec");
    server.command(&["SET", "x", ""]).unwrap();
    let why = RedisStore::open(options(&url(&server, "wait-aof=local"))).await;
    let Err(why) = why else {
        // This server reports correctly, so it cannot show the refusal.
        assert!(!server.command(&["INFO", "server"]).unwrap().contains("valkey_version:8.0"));
        return;
    };
    assert!(matches!(&why, RedisOpenError::Unfit(what) if what.contains("set appendfsync always")), "{why}");
    // Under `always` even this server is correct, until the setting is changed.
    server.command(&["CONFIG", "SET", "appendfsync", "always"]).unwrap();
    let store = open(&url(&server, "wait-aof=local")).await;
    granted(&store, 1, 1).await;
    server.command(&["CONFIG", "SET", "appendfsync", "everysec"]).unwrap();
    does_not_count(try_claim(&store, 2, 2).await, Extent::Writes);
    let why = does_not_count(try_claim(&store, 2, 2).await, Extent::Writes);
    assert!(why.contains("set appendfsync always"), "{why}");
    server.command(&["CONFIG", "SET", "appendfsync", "always"]).unwrap();
    let Outcome::Execute(grant) = try_claim(&store, 2, 2).await.unwrap() else { panic!() };
    assert_eq!(grant.attempts, 1, "it is the same claim");
    // Without the right to read the setting, such a server cannot be distinguished from a correct one.
    let rules = "~* &* +@all -config";
    let server = start(ServerOptions::new().with_appendfsync("always").with_user("app", "secret", rules));
    let why = refusal(&url(&server, "wait-aof=local")).await;
    assert!(why.contains("allow CONFIG GET"), "{why}");
}

#[tokio::test]
async fn a_server_that_flushes_once_a_second_delays_claims_until_the_flush() {
    let server = flushing("everysec");
    let proxy = TruthfulProxy::before(&server).await;
    let store = open(&proxy.url("wait-aof=local&wait-timeout=30s")).await;
    let since = Instant::now();
    let grant = granted(&store, 1, 1).await;
    assert_eq!(store.apply(id(1), completion(grant.token, 1)).await.unwrap(), Outcome::Completed);
    granted(&store, 2, 2).await;
    assert!(since.elapsed() > Duration::from_secs(2), "{:?}", since.elapsed());
    // Renewals do not wait for the disk.
    assert_eq!(store.capabilities().durability, Durability::Buffered);
    let findings = store.findings();
    assert!(findings.iter().any(|f| f.text.contains("on disk before they count")), "{findings:?}");
}

#[tokio::test]
async fn a_claim_that_a_rewrite_keeps_from_the_disk_is_an_error() {
    let options = ServerOptions::new().with_appendfsync("always").with("no-appendfsync-on-rewrite yes");
    let server = start(options);
    let store = open(&url(&server, "wait-aof=local&wait-timeout=500ms")).await;
    assert_eq!(store.capabilities().durability, Durability::Buffered);
    assert!(store.findings().iter().any(|f| f.text.starts_with("no-appendfsync-on-rewrite")));
    // A rewrite that takes long, because each key costs it a pause.
    for n in 0..50 {
        server.command(&["SET", &format!("other:{n}"), ""]).unwrap();
    }
    server.command(&["CONFIG", "SET", "rdb-key-save-delay", "1000000"]).unwrap();
    server.command(&["BGREWRITEAOF"]).unwrap();
    server.wait_for(&["INFO", "persistence"], "aof_rewrite_in_progress:1").unwrap();
    let why = does_not_count(try_claim(&store, 1, 1).await, Extent::Writes);
    assert!(why.contains("did not get to the server's disk in time"), "{why}");
    assert!(server.command(&["INFO", "persistence"]).unwrap().contains("aof_rewrite_in_progress:1"));
    server.command(&["CONFIG", "SET", "no-appendfsync-on-rewrite", "no"]).unwrap();
    assert!(matches!(until_ok(|| try_claim(&store, 1, 1)).await, Outcome::Execute(_)));
    // Ends the child of the rewrite.
    server.command(&["CONFIG", "SET", "rdb-key-save-delay", "0"]).unwrap();
}

#[tokio::test]
async fn a_claim_that_is_not_flushed_in_time_is_an_error() {
    let server = flushing("everysec");
    let proxy = TruthfulProxy::before(&server).await;
    let store = open(&proxy.url("wait-aof=local&wait-timeout=2s")).await;
    proxy.disk_stands_still.store(true, Ordering::SeqCst);
    let why = does_not_count(try_claim(&store, 1, 1).await, Extent::Writes);
    assert!(why.contains("did not get to the server's disk in time"), "{why}");
    proxy.disk_stands_still.store(false, Ordering::SeqCst);
    let Outcome::Execute(grant) = until_ok(|| try_claim(&store, 1, 1)).await else { panic!() };
    assert_eq!(grant.attempts, 1, "it is the same claim");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_at_the_same_time_share_one_wait_for_the_disk() {
    let server = flushing("everysec");
    let proxy = TruthfulProxy::before(&server).await;
    let store = Arc::new(open(&proxy.url("wait-aof=local&wait-timeout=30s")).await);
    let since = Instant::now();
    let claims: Vec<_> = (0..200)
        .map(|n| {
            let store = store.clone();
            tokio::spawn(async move { granted(&store, n, n).await })
        })
        .collect();
    for claim in claims {
        claim.await.unwrap();
    }
    // Each round takes at most a second.
    assert!(since.elapsed() < Duration::from_secs(20), "{:?}", since.elapsed());
}

#[tokio::test]
async fn without_an_append_only_file_nothing_counts() {
    let server = flushing("always");
    let store = open(&url(&server, "wait-aof=local&wait-timeout=20s")).await;
    granted(&store, 1, 1).await;
    server.command(&["CONFIG", "SET", "appendonly", "no"]).unwrap();
    does_not_count(try_claim(&store, 2, 2).await, Extent::Writes);
    let error = store.check().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Invalid);
    assert!(error.to_string().contains("set appendonly yes"), "{error}");
    server.command(&["CONFIG", "SET", "appendonly", "yes"]).unwrap();
    // A check of the store notices the new setting at once. Without a check, the store notices it within a minute.
    until_ok(|| store.check()).await;
    until_ok(|| try_claim(&store, 2, 2)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_waits_for_both_the_disk_and_the_replicas() {
    let primary = flushing("always");
    let replica = start(ServerOptions::new().with(format!("replicaof 127.0.0.1 {}", primary.port())));
    replica.wait_for(&["INFO", "replication"], "master_link_status:up").unwrap();
    let store = open(&url(&primary, "wait-aof=local&wait-replicas=1&wait-timeout=20s")).await;
    granted(&store, 1, 1).await;
    let hasty = open(&url(&primary, "wait-aof=local&wait-replicas=1&wait-timeout=300ms")).await;
    let stopped = Stopped::new(&replica);
    let why = does_not_count(try_claim(&hasty, 2, 2).await, Extent::Writes);
    assert!(why.contains("only 0 of 1 replicas got the record in time"), "{why}");
    drop(stopped);
    assert!(matches!(until_ok(|| try_claim(&store, 2, 2)).await, Outcome::Execute(_)));
}

#[tokio::test]
async fn a_server_that_cannot_confirm_writes_is_refused() {
    let server = start(ServerOptions::new());
    let why = refusal(&url(&server, "wait-aof=local")).await;
    assert!(why.contains("set appendonly yes"), "{why}");
    server.command(&["CONFIG", "SET", "appendonly", "yes"]).unwrap();
    server.command(&["CONFIG", "SET", "appendfsync", "no"]).unwrap();
    let why = refusal(&url(&server, "wait-aof=local")).await;
    assert!(why.contains("set everysec or always"), "{why}");
    let rules = "~* &* +@all -waitaof -wait";
    let server = start(ServerOptions::new().with_appendfsync("always").with_user("app", "secret", rules));
    for query in ["wait-aof=local", "wait-replicas=1"] {
        let why = refusal(&url(&server, query)).await;
        assert!(why.contains("ACL") && why.contains(query.split('=').next().unwrap()), "{why}");
    }
    open(&url(&server, "")).await;
    // The installed server, which may be older.
    let server = RedisServer::start(ServerOptions::new().with_appendfsync("always")).unwrap();
    if server.command(&["INFO", "server"]).unwrap().contains("redis_version:7.0.") {
        let why = refusal(&url(&server, "wait-aof=local")).await;
        assert!(why.contains("needs Redis from 7.2 on") && why.contains("Redis 7.0."), "{why}");
    } else {
        open(&url(&server, "wait-aof=local")).await;
    }
    let rules = "~* &* +@all -info";
    let server = start(ServerOptions::new().with_user("app", "secret", rules));
    let why = refusal(&url(&server, "wait-aof=local")).await;
    assert!(why.contains("Redis from 7.2") && why.contains("appendonly yes"), "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_cluster_claims_wait_for_the_disk_of_their_primary() {
    let options = ServerOptions::new().recent().with_appendfsync("always").with("cluster-node-timeout 60000");
    let cluster = RedisCluster::start_with(&options).unwrap();
    let store = open(&format!("{}?timeout=20s&connect-timeout=20s&wait-aof=local", cluster.url())).await;
    for n in 0..60 {
        let grant = granted(&store, n, n).await;
        assert_eq!(store.apply(id(n), completion(grant.token, n)).await.unwrap(), Outcome::Completed);
    }
    let one = cluster.primaries().next().unwrap();
    one.command(&["CONFIG", "SET", "appendfsync", "everysec"]).unwrap();
    let mut refused = 0;
    for n in 100..160 {
        if let Err(error) = try_claim(&store, n, n).await {
            does_not_count(Err(error), Extent::Record);
            refused += 1;
        }
    }
    let is_honest = !one.command(&["INFO", "server"]).unwrap().contains("valkey_version:8.0");
    assert!(is_honest || (5..50).contains(&refused), "{refused} of 60");
}
