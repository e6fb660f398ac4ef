//! `wait-replicas`, with a primary and a replica that stops.

mod support;

use std::process::Command as Process;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use oncegate_core::{Extent, Outcome, Store as _, StoreError, StoreErrorKind};
use oncegate_servers::{RedisOptions as ServerOptions, RedisServer};
use support::*;
use tokio::net::{TcpListener, TcpStream};

/// Longer than anything here takes that does not wait for a replica.
const WAIT: Duration = Duration::from_secs(40);

struct World {
    primary: RedisServer,
    replica: RedisServer,
}

impl World {
    fn start() -> Self {
        let primary = RedisServer::start(ServerOptions::new()).unwrap();
        let replica = ServerOptions::new().with(format!("replicaof 127.0.0.1 {}", primary.port()));
        let replica = RedisServer::start(replica).unwrap();
        primary.wait_for(&["INFO", "replication"], "state=online").unwrap();
        Self { primary, replica }
    }

    fn url(&self, wait: Duration) -> String {
        let wait = wait.as_millis();
        format!(
            "{}?wait-replicas=1&wait-timeout={wait}ms&timeout=20s&connect-timeout=20s",
            self.primary.url()
        )
    }

    fn signal(&self, signal: &str) {
        let pid = self.replica.pid().unwrap().to_string();
        assert!(Process::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    /// How many clients wait for replicas.
    fn waiting(&self) -> usize {
        self.primary.command(&["CLIENT", "LIST"]).unwrap().matches("cmd=wait").count()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.signal("-CONT");
    }
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_stops_holds_up_only_those_who_wait_for_it() {
    let world = World::start();
    let store = Arc::new(open(&world.url(WAIT)).await);
    let (owned, done) = (granted(&store, 1, 1).await, granted(&store, 2, 2).await);
    assert_eq!(store.apply(id(2), completion(done.token, 2)).await.unwrap(), Outcome::Completed);
    world.signal("-STOP");
    let waiters: Vec<_> = (10..20)
        .map(|n| {
            let store = store.clone();
            tokio::spawn(async move { granted(&store, n, n).await })
        })
        .collect();
    until("somebody waits for the replica", || world.waiting() > 0).await;
    let since = Instant::now();
    assert!(matches!(store.apply(id(1), renewal(owned.token)).await, Ok(Outcome::Renewed { .. })));
    assert_eq!(try_claim(&store, 2, 22).await.unwrap(), Outcome::Replay(response(2)));
    assert!(matches!(try_claim(&store, 1, 11).await, Ok(Outcome::InProgress { .. })));
    assert!(store.lookup(id(10)).await.unwrap().is_some());
    store.check().await.unwrap();
    assert!(since.elapsed() < WAIT / 2, "{:?}", since.elapsed());
    assert_eq!(world.waiting(), 1, "one for all");
    assert!(waiters.iter().all(|waiter| !waiter.is_finished()), "nothing is granted that one server has");
    world.signal("-CONT");
    for waiter in waiters {
        waiter.await.unwrap();
    }
    // Three before, and those ten in few rounds.
    let calls = world.primary.command(&["INFO", "commandstats"]).unwrap();
    let calls = calls.split("cmdstat_wait:calls=").nth(1).unwrap().split(',').next().unwrap().to_owned();
    assert!(calls.parse::<usize>().unwrap() <= 8, "{calls}");
}

fn too_few(error: &StoreError) {
    assert_eq!((error.kind(), error.extent()), (StoreErrorKind::Unavailable, Extent::Writes), "{error}");
    assert!(!error.is_unsent(), "it was written: {error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_too_few_replicas_have_does_not_count_and_may_be_sent_again() {
    let world = World::start();
    let store = open(&world.url(Duration::from_millis(300))).await;
    // On a busy machine a replica that runs may be too slow, too.
    let Outcome::Execute(done) = until_ok(|| try_claim(&store, 1, 1)).await else { panic!() };
    world.signal("-STOP");
    too_few(&try_claim(&store, 2, 2).await.unwrap_err());
    too_few(&store.apply(id(1), completion(done.token, 1)).await.unwrap_err());
    // The answer is there, and giving it keeps a client from asking another time.
    assert_eq!(try_claim(&store, 1, 11).await.unwrap(), Outcome::Replay(response(1)));
    world.signal("-CONT");
    let again = until_ok(|| try_claim(&store, 2, 2)).await;
    assert!(matches!(again, Outcome::Execute(_)), "{again:?}");
    let again = until_ok(|| store.apply(id(1), completion(done.token, 1))).await;
    assert_eq!(again, Outcome::Completed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_that_come_and_connections_that_break_are_waited_for_again() {
    let mut world = World::start();
    let store = open(&world.url(Duration::from_secs(20))).await;
    granted(&store, 1, 1).await;
    for (n, kind) in [(2, "normal"), (3, "replica")] {
        world.primary.command(&["CLIENT", "KILL", "TYPE", kind]).unwrap();
        assert!(matches!(until_ok(|| try_claim(&store, n, n)).await, Outcome::Execute(_)));
    }
    world.primary.kill();
    world.primary.restart().unwrap();
    assert!(matches!(until_ok(|| try_claim(&store, 4, 4)).await, Outcome::Execute(_)));
}

/// Connections go to where it points when they are made.
async fn pointer(to: u16) -> (u16, Arc<AtomicU16>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (port, to) = (listener.local_addr().unwrap().port(), Arc::new(AtomicU16::new(to)));
    let pointed = to.clone();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let Ok(mut server) = TcpStream::connect(("127.0.0.1", to.load(Ordering::SeqCst))).await else {
                continue;
            };
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut client, &mut server).await });
        }
    });
    (port, pointed)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_replicas_of_another_server_do_not_count() {
    let alone = RedisServer::start(ServerOptions::new()).unwrap();
    let world = World::start();
    let (port, to) = pointer(alone.port()).await;
    let url =
        world.url(Duration::from_millis(300)).replace(&world.primary.port().to_string(), &port.to_string());
    let store = open(&url).await;
    // To nobody, and to somebody else.
    to.store(1, Ordering::SeqCst);
    too_few(&try_claim(&store, 1, 1).await.unwrap_err());
    to.store(world.primary.port(), Ordering::SeqCst);
    too_few(&try_claim(&store, 1, 1).await.unwrap_err());
    assert_eq!(
        world.primary.command(&["EXISTS", &oncegate_redis::contract::record_key(&id(1))]).unwrap().trim(),
        ":0"
    );
    // Then both go to where it points now.
    assert!(matches!(until_ok(|| try_claim(&store, 1, 1)).await, Outcome::Execute(_)));
}
