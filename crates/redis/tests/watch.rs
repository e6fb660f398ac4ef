//! Who waits for a record is told by the server. Nothing here asks again by itself: whoever hears was told.

mod support;

use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use oncegate_core::{Command, Outcome, Resolution, Resolve, Store as _};
use oncegate_redis::RedisStore;
use oncegate_servers::{RedisCluster, RedisOptions as ServerOptions, RedisSentinel, RedisServer};
use support::*;

const PATIENCE: Duration = Duration::from_secs(60);

fn start(options: ServerOptions) -> RedisServer {
    RedisServer::start(options).unwrap()
}

async fn told(changed: impl Future<Output = ()>) {
    tokio::time::timeout(PATIENCE, changed).await.expect("told");
}

fn is_told(changed: &mut Pin<Box<dyn Future<Output = ()> + Send + '_>>) -> bool {
    changed.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

/// Waits until so many channels are subscribed to, on these servers together.
async fn until_watched(servers: &[RedisServer], count: usize) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let channels = |server: &RedisServer| {
            server
                .command(&["PUBSUB", "SHARDCHANNELS"])
                .map_or(0, |answer| answer.matches("oncegate:{").count())
        };
        let found: usize = servers.iter().map(channels).sum();
        if found == count {
            return;
        }
        assert!(Instant::now() < deadline, "{found} are watched and not {count}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn complete(store: &RedisStore, n: u64) {
    let grant = until_ok(|| try_claim(store, n, n)).await;
    let Outcome::Execute(grant) = grant else { panic!("{grant:?}") };
    let outcome = until_ok(|| store.apply(id(n), completion(grant.token, n))).await;
    assert_eq!(outcome, Outcome::Completed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_waits_is_told_of_every_end_in_another_process() {
    let servers = [start(ServerOptions::new())];
    let (owner, other) = (open(&servers[0].url()).await, open(&servers[0].url()).await);
    let mut granted = Vec::new();
    for n in 0..60 {
        granted.push(owner_of(&owner, n).await);
    }
    until_watched(&servers, 0).await;
    // Two wait for the first one.
    let again = other.changed(id(0));
    let mut waiting: Vec<_> = (0..60).map(|n| other.changed(id(n))).collect();
    until_watched(&servers, 60).await;
    owner.apply(id(0), completion(granted[0], 0)).await.unwrap();
    told(again).await;
    told(waiting.remove(0)).await;
    owner.apply(id(1), release(granted[1])).await.unwrap();
    told(waiting.remove(0)).await;
    let resolve = Resolve {
        resolution: Resolution::Release,
        retention: MINUTE,
        force: true,
        amend: false,
        actor: "operator".to_owned(),
        reason: "found".to_owned(),
    };
    owner.apply(id(2), Command::Resolve(resolve)).await.unwrap();
    told(waiting.remove(0)).await;
    until_watched(&servers, 57).await;
    for n in 3..59 {
        owner.apply(id(n), completion(granted[n as usize], n)).await.unwrap();
        told(waiting.remove(0)).await;
    }
    assert!(!is_told(&mut waiting[0]), "nothing happened to this one");
    until_watched(&servers, 1).await;
    let listeners = servers[0].command(&["CLIENT", "LIST", "TYPE", "pubsub"]).unwrap();
    assert_eq!(listeners.matches("id=").count(), 1, "one connection for all: {listeners}");
}

async fn owner_of(store: &RedisStore, n: u64) -> oncegate_core::FencingToken {
    granted(store, n, n).await.token
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_goes_away_leaves_nothing_and_a_store_that_is_gone_neither() {
    let servers = [start(ServerOptions::new())];
    let store = open(&servers[0].url()).await;
    let (one, two, other) = (store.changed(id(1)), store.changed(id(1)), store.changed(id(2)));
    until_watched(&servers, 2).await;
    drop((one, other));
    until_watched(&servers, 1).await;
    drop(two);
    until_watched(&servers, 0).await;
    drop(store);
    let deadline = Instant::now() + PATIENCE;
    while servers[0].command(&["CLIENT", "LIST", "TYPE", "normal"]).unwrap().contains("lib-name=oncegate") {
        assert!(Instant::now() < deadline, "its connections are still there");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_was_ended_is_made_again_and_tells_what_it_may_have_missed() {
    let mut servers = [start(ServerOptions::new())];
    let store = open(&servers[0].url()).await;
    for _ in 0..3 {
        let changed = store.changed(id(1));
        until_watched(&servers, 1).await;
        assert_eq!(servers[0].command(&["CLIENT", "KILL", "TYPE", "pubsub"]).unwrap(), ":1\r\n");
        told(changed).await;
        // Or the next one would look at what is left of this one.
        until_watched(&servers, 0).await;
    }
    let changed = store.changed(id(1));
    until_watched(&servers, 1).await;
    servers[0].kill();
    servers[0].restart().unwrap();
    told(changed).await;
    until_watched(&servers, 0).await;
    // From then on as before.
    let changed = store.changed(id(1));
    until_watched(&servers, 1).await;
    complete(&store, 1).await;
    told(changed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_may_not_listen_is_not_told_and_all_else_works() {
    let server = start(ServerOptions::new().with_user("app", "secret", "~* resetchannels +@all"));
    let store = open(&server.url()).await;
    let mut changed = store.changed(id(1));
    // The server has refused it by then.
    server.wait_for(&["ACL", "LOG"], "channel").unwrap();
    complete(&store, 1).await;
    assert!(!is_told(&mut changed));
    assert_eq!(try_claim(&store, 1, 2).await.unwrap(), Outcome::Replay(response(1)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_failover_the_next_primary_tells() {
    let mut world = RedisSentinel::start().unwrap();
    let store = open(&format!("{}?timeout=1s", world.url())).await;
    let changed = store.changed(id(1));
    until_watched(&world.servers, 1).await;
    complete(&store, 1).await;
    told(changed).await;
    until_watched(&world.servers, 0).await;
    let changed = store.changed(id(2));
    until_watched(&world.servers, 1).await;
    world.servers[0].kill();
    // It may have missed something.
    told(changed).await;
    until_watched(&world.servers, 0).await;
    let changed = store.changed(id(2));
    until_watched(&world.servers[1..], 1).await;
    complete(&store, 2).await;
    told(changed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_node_of_a_cluster_tells_of_its_own_records() {
    let mut cluster = RedisCluster::start().unwrap();
    let store = open(&format!("{}?timeout=1s", cluster.url())).await;
    let waiting: Vec<_> = (0..40).map(|n| store.changed(id(n))).collect();
    until_watched(&cluster.servers, 40).await;
    for (n, changed) in (0..).zip(waiting) {
        complete(&store, n).await;
        told(changed).await;
    }
    until_watched(&cluster.servers, 0).await;
    // The connections to all nodes are cut.
    let waiting: Vec<_> = (100..140).map(|n| store.changed(id(n))).collect();
    until_watched(&cluster.servers, 40).await;
    for server in &cluster.servers {
        server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]).unwrap();
    }
    for changed in waiting {
        told(changed).await;
    }
    until_watched(&cluster.servers, 0).await;
    // One of them is gone for good, and another takes its part.
    let waiting: Vec<_> = (100..140).map(|n| store.changed(id(n))).collect();
    until_watched(&cluster.servers, 40).await;
    let lost = cluster
        .servers
        .iter()
        .position(|server| server.command(&["ROLE"]).is_ok_and(|role| role.contains("master")))
        .unwrap();
    cluster.servers[lost].kill();
    for changed in waiting {
        told(changed).await;
    }
    until_watched(&cluster.servers, 0).await;
    let waiting: Vec<_> = (100..140).map(|n| store.changed(id(n))).collect();
    until_watched(&cluster.servers, 40).await;
    for (n, changed) in (100..).zip(waiting) {
        complete(&store, n).await;
        told(changed).await;
    }
    assert!(cluster.servers[lost].command(&["PING"]).is_err());
    assert!(matches!(try_claim(&store, 100, 1).await, Ok(Outcome::Replay(_))));
}
