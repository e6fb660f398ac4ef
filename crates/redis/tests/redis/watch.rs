//! Notifications: the server reports changes to callers that wait for a record. No test here polls, so a result proves that a

//! notification arrived.

use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use crate::support::*;
use oncegate_core::{Command, Outcome, Resolution, Resolve, Store as _};
use oncegate_redis::RedisStore;
use oncegate_servers::{RedisCluster, RedisOptions as ServerOptions, RedisSentinel, RedisServer};

const NOTIFICATION_TIMEOUT: Duration = Duration::from_secs(60);

fn start(options: ServerOptions) -> RedisServer {
    RedisServer::start(options).unwrap()
}

async fn notified(changed: impl Future<Output = ()>) {
    tokio::time::timeout(NOTIFICATION_TIMEOUT, changed).await.expect("no notification");
}

fn is_notified(changed: &mut Pin<Box<dyn Future<Output = ()> + Send + '_>>) -> bool {
    changed.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

/// Waits until the given number of channels is subscribed to, on all these servers together.
async fn until_watched(servers: &[RedisServer], count: usize) {
    let deadline = Instant::now() + NOTIFICATION_TIMEOUT;
    loop {
        let channels = |server: &RedisServer| {
            server
                .command(&["PUBSUB", "SHARDCHANNELS"])
                .map_or(0, |reply| reply.matches("oncegate:{").count())
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
async fn a_waiter_is_notified_of_every_end_in_another_process() {
    let servers = [start(ServerOptions::new())];
    let (owner, other) = (open(&servers[0].url()).await, open(&servers[0].url()).await);
    let mut granted = Vec::new();
    for n in 0..60 {
        granted.push(owner_of(&owner, n).await);
    }
    until_watched(&servers, 0).await;
    // Two callers wait for the first record.
    let again = other.changed(id(0));
    let mut waiting: Vec<_> = (0..60).map(|n| other.changed(id(n))).collect();
    until_watched(&servers, 60).await;
    owner.apply(id(0), completion(granted[0], 0)).await.unwrap();
    notified(again).await;
    notified(waiting.remove(0)).await;
    owner.apply(id(1), release(granted[1])).await.unwrap();
    notified(waiting.remove(0)).await;
    let resolve = Resolve {
        resolution: Resolution::Release,
        retention: MINUTE,
        force: true,
        amend: false,
        actor: "operator".to_owned(),
        reason: "found".to_owned(),
    };
    owner.apply(id(2), Command::Resolve(resolve)).await.unwrap();
    notified(waiting.remove(0)).await;
    until_watched(&servers, 57).await;
    for n in 3..59 {
        owner.apply(id(n), completion(granted[n as usize], n)).await.unwrap();
        notified(waiting.remove(0)).await;
    }
    assert!(!is_notified(&mut waiting[0]), "nothing happened to this one");
    until_watched(&servers, 1).await;
    let listeners = servers[0].command(&["CLIENT", "LIST", "TYPE", "pubsub"]).unwrap();
    assert_eq!(listeners.matches("id=").count(), 1, "one connection for all: {listeners}");
}

async fn owner_of(store: &RedisStore, n: u64) -> oncegate_core::FencingToken {
    granted(store, n, n).await.token
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_waiter_and_a_dropped_store_leave_no_subscription() {
    let servers = [start(ServerOptions::new())];
    let store = open(&servers[0].url()).await;
    let (one, two, other) = (store.changed(id(1)), store.changed(id(1)), store.changed(id(2)));
    until_watched(&servers, 2).await;
    drop((one, other));
    until_watched(&servers, 1).await;
    drop(two);
    until_watched(&servers, 0).await;
    drop(store);
    let deadline = Instant::now() + NOTIFICATION_TIMEOUT;
    while servers[0].command(&["CLIENT", "LIST", "TYPE", "normal"]).unwrap().contains("lib-name=oncegate") {
        assert!(Instant::now() < deadline, "its connections are still there");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_connection_is_replaced_and_wakes_waiters_for_missed_changes() {
    let mut servers = [start(ServerOptions::new())];
    let store = open(&servers[0].url()).await;
    for _ in 0..3 {
        let changed = store.changed(id(1));
        until_watched(&servers, 1).await;
        assert_eq!(servers[0].command(&["CLIENT", "KILL", "TYPE", "pubsub"]).unwrap(), ":1\r\n");
        notified(changed).await;
        // Otherwise the next round would see the rest of this one.
        until_watched(&servers, 0).await;
    }
    let changed = store.changed(id(1));
    until_watched(&servers, 1).await;
    servers[0].kill();
    servers[0].restart().unwrap();
    notified(changed).await;
    until_watched(&servers, 0).await;
    // From then on, notifications work as before.
    let changed = store.changed(id(1));
    until_watched(&servers, 1).await;
    complete(&store, 1).await;
    notified(changed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_right_to_subscribe_everything_except_notifications_works() {
    let server = start(ServerOptions::new().with_user("app", "secret", "~* resetchannels +@all"));
    let store = open(&server.url()).await;
    let mut changed = store.changed(id(1));
    // By now the server has refused the subscription.
    server.wait_for(&["ACL", "LOG"], "channel").unwrap();
    complete(&store, 1).await;
    assert!(!is_notified(&mut changed));
    assert_eq!(try_claim(&store, 1, 2).await.unwrap(), Outcome::Replay(response(1)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_failover_the_new_primary_notifies() {
    let mut world = RedisSentinel::start().unwrap();
    let store = open(&format!("{}?timeout=1s", world.url())).await;
    let changed = store.changed(id(1));
    until_watched(&world.servers, 1).await;
    complete(&store, 1).await;
    notified(changed).await;
    until_watched(&world.servers, 0).await;
    let changed = store.changed(id(2));
    until_watched(&world.servers, 1).await;
    world.servers[0].kill();
    // The waiter is woken, because a notification may have been missed.
    notified(changed).await;
    until_watched(&world.servers, 0).await;
    let changed = store.changed(id(2));
    until_watched(&world.servers[1..], 1).await;
    complete(&store, 2).await;
    notified(changed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_node_of_a_cluster_notifies_of_its_own_records() {
    let mut cluster = RedisCluster::start().unwrap();
    let store = open(&format!("{}?timeout=1s", cluster.url())).await;
    let waiting: Vec<_> = (0..40).map(|n| store.changed(id(n))).collect();
    until_watched(&cluster.servers, 40).await;
    for (n, changed) in (0..).zip(waiting) {
        complete(&store, n).await;
        notified(changed).await;
    }
    until_watched(&cluster.servers, 0).await;
    // The connections to all nodes are cut.
    let waiting: Vec<_> = (100..140).map(|n| store.changed(id(n))).collect();
    until_watched(&cluster.servers, 40).await;
    for server in &cluster.servers {
        server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]).unwrap();
    }
    for changed in waiting {
        notified(changed).await;
    }
    until_watched(&cluster.servers, 0).await;
    // One node is lost for good, and another one takes over its slots.
    let waiting: Vec<_> = (100..140).map(|n| store.changed(id(n))).collect();
    until_watched(&cluster.servers, 40).await;
    let lost = cluster
        .servers
        .iter()
        .position(|server| server.command(&["ROLE"]).is_ok_and(|role| role.contains("master")))
        .unwrap();
    cluster.servers[lost].kill();
    for changed in waiting {
        notified(changed).await;
    }
    until_watched(&cluster.servers, 0).await;
    let waiting: Vec<_> = (100..140).map(|n| store.changed(id(n))).collect();
    until_watched(&cluster.servers, 40).await;
    for (n, changed) in (100..).zip(waiting) {
        complete(&store, n).await;
        notified(changed).await;
    }
    assert!(cluster.servers[lost].command(&["PING"]).is_err());
    assert!(matches!(try_claim(&store, 100, 1).await, Ok(Outcome::Replay(_))));
}
