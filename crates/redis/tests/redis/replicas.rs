//! `wait-replicas`: a primary with a replica that stops, and a Cluster.

use std::io::Write as _;
use std::process::Command as Process;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use crate::support::*;
use oncegate_core::{
    Command, Extent, Forget, Outcome, RecordStep, Rewrite, StateName, Step, Store as _, StoreError,
    StoreErrorKind,
};
use oncegate_servers::{RedisCluster, RedisOptions as ServerOptions, RedisServer};
use oncegate_testkit::until;
use tokio::net::{TcpListener, TcpStream};

/// A time that nothing here exceeds unless it waits for a replica.
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
        let Some(pid) = self.replica.pid().map(|pid| pid.to_string()) else { return };
        assert!(Process::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    /// The number of clients that wait for replicas.
    fn waiting(&self) -> usize {
        let clients = self.primary.command(&["CLIENT", "LIST"]).unwrap();
        clients.lines().filter(|line| line.contains("cmd=wait") && line.contains("flags=b")).count()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.signal("-CONT");
    }
}

/// A change of content counts once the replica has it, and a check of the record finds it: with steps, and with a response.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_of_content_wait_for_the_replica() {
    let world = World::start();
    let store = open(&world.url(WAIT)).await;
    let grant = granted(&store, 1, 1).await;
    let step = Step::new("charge", b"in clear"[..].into()).unwrap();
    let step = Command::Step(RecordStep { token: grant.token, number: 0, step });
    assert_eq!(store.apply(id(1), step).await.unwrap(), Outcome::StepRecorded);
    let rewrite = async |change: fn(&mut Rewrite)| {
        let mut rewrite = Rewrite::of(&store.lookup(id(1)).await.unwrap().unwrap());
        change(&mut rewrite);
        assert_eq!(store.apply(id(1), Command::Rewrite(rewrite)).await.unwrap(), Outcome::Rewritten);
    };
    rewrite(|rewrite| rewrite.step_results[0].to = b"sealed"[..].into()).await;
    assert_eq!(store.apply(id(1), completion(grant.token, 1)).await.unwrap(), Outcome::Completed);
    rewrite(|rewrite| rewrite.response.as_mut().unwrap().to = response(2)).await;
    let forget = Command::Forget(Forget { actor: "ann".to_owned(), reason: "asked for".to_owned() });
    // The replica stops, and the removal is acknowledged only when it goes on.
    world.signal("-STOP");
    let removal = store.apply(id(1), forget);
    tokio::pin!(removal);
    tokio::select! {
        outcome = &mut removal => panic!("acknowledged without the replica: {outcome:?}"),
        () = until("the removal waits", async || world.waiting() > 0) => {}
    }
    world.signal("-CONT");
    assert_eq!(removal.await.unwrap(), Outcome::Forgotten { from: StateName::Completed });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_replica_delays_only_commands_that_wait_for_it() {
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
    until("a client waits for the replica", async || world.waiting() > 0).await;
    let since = Instant::now();
    assert!(matches!(store.apply(id(1), renewal(owned.token)).await, Ok(Outcome::Renewed { .. })));
    assert_eq!(try_claim(&store, 2, 22).await.unwrap(), Outcome::Replay(response(2)));
    assert!(matches!(try_claim(&store, 1, 11).await, Ok(Outcome::InProgress { .. })));
    assert!(store.lookup(id(10)).await.unwrap().is_some());
    store.check().await.unwrap();
    assert!(since.elapsed() < WAIT / 2, "{:?}", since.elapsed());
    assert_eq!(world.waiting(), 1, "all claims share one wait");
    assert!(
        waiters.iter().all(|waiter| !waiter.is_finished()),
        "a claim was granted that only one server has"
    );
    world.signal("-CONT");
    for waiter in waiters {
        waiter.await.unwrap();
    }
    // One for each check of the server, three before, and those ten in few rounds.
    let calls = calls_of(&world.primary, "wait");
    assert!(calls <= 9, "{calls}");
}

fn too_few(error: &StoreError) {
    assert_eq!((error.kind(), error.extent()), (StoreErrorKind::Unavailable, Extent::Writes), "{error}");
    assert!(!error.is_unsent(), "it was written: {error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_on_too_few_replicas_is_an_error_and_can_be_sent_again() {
    let world = World::start();
    let store = open(&world.url(Duration::from_millis(300))).await;
    // On a busy machine, even a running replica may be too slow once.
    let Outcome::Execute(done) = until_ok(|| try_claim(&store, 1, 1)).await else { panic!() };
    world.signal("-STOP");
    too_few(&try_claim(&store, 2, 2).await.unwrap_err());
    too_few(&store.apply(id(1), completion(done.token, 1)).await.unwrap_err());
    // The response is stored, and returning it saves a second request.
    assert_eq!(try_claim(&store, 1, 11).await.unwrap(), Outcome::Replay(response(1)));
    world.signal("-CONT");
    let again = until_ok(|| try_claim(&store, 2, 2)).await;
    assert!(matches!(again, Outcome::Execute(_)), "{again:?}");
    let again = until_ok(|| store.apply(id(1), completion(done.token, 1))).await;
    assert_eq!(again, Outcome::Completed);
}

/// Nothing can be executed without replicas, so a check must fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_check_reports_missing_replicas() {
    let mut world = World::start();
    let more = world.url(Duration::from_secs(1)).replace("wait-replicas=1", "wait-replicas=2");
    let error = open(&more).await.check().await.unwrap_err();
    too_few(&error);
    assert!(error.to_string().contains("wait-replicas is 2, and the server has 1 replicas"), "{error}");
    let store = open(&world.url(Duration::from_secs(1))).await;
    until_ok(|| store.check()).await;
    world.replica.kill();
    let deadline = Instant::now() + Duration::from_secs(30);
    let error = loop {
        match store.check().await {
            Err(error) => break error,
            Ok(()) => assert!(Instant::now() < deadline, "the check did not report the missing replica"),
        }
    };
    too_few(&error);
    let expected = "wait-replicas is 1, and the server has 0 replicas";
    assert!(error.to_string().contains(expected), "{error}");
    assert!(store.findings().iter().any(|finding| finding.text.contains(expected)), "{:?}", store.findings());
    // Reads are still answered.
    assert!(store.lookup(id(1)).await.unwrap().is_none());
    world.replica.restart().unwrap();
    until_ok(|| store.check()).await;
    let granted = until_ok(|| try_claim(&store, 1, 1)).await;
    assert!(matches!(granted, Outcome::Execute(_)), "{granted:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_works_again_after_a_replica_or_a_connection_was_lost() {
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

/// Starts a proxy. New connections go to the port that the returned number names at that time.
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
    // This server has no replica. Then the waiting connection is cut: its successor finds no server at first, and then
    // another one than the commands go to.
    too_few(&try_claim(&store, 1, 1).await.unwrap_err());
    to.store(1, Ordering::SeqCst);
    let clients = alone.command(&["CLIENT", "LIST"]).unwrap();
    let waits = clients.lines().find(|line| line.contains("cmd=wait")).unwrap();
    let number = waits.split_once("id=").unwrap().1.split(' ').next().unwrap();
    alone.command(&["CLIENT", "KILL", "ID", number]).unwrap();
    for _ in 0..2 {
        too_few(&try_claim(&store, 1, 1).await.unwrap_err());
    }
    to.store(world.primary.port(), Ordering::SeqCst);
    let error = try_claim(&store, 1, 1).await.unwrap_err();
    too_few(&error);
    assert!(error.to_string().contains("another server took the place"), "{error}");
    assert_eq!(
        world.primary.command(&["EXISTS", &oncegate_redis::contract::record_key(&id(1))]).unwrap().trim(),
        ":0"
    );
    // Then both connections go to the new server.
    assert!(matches!(until_ok(|| try_claim(&store, 1, 1)).await, Outcome::Execute(_)));
}

/// Three primaries, each with a replica. The timeout is long, so no stopped node is failed over.
fn cluster() -> RedisCluster {
    RedisCluster::start_with(&ServerOptions::new().with("cluster-node-timeout 60000")).unwrap()
}

fn cluster_url(cluster: &RedisCluster, wait: Duration) -> String {
    let wait = wait.as_millis();
    format!("{}?wait-replicas=1&wait-timeout={wait}ms&timeout=20s&connect-timeout=20s", cluster.url())
}

/// A primary and its replica.
fn pair(cluster: &RedisCluster) -> (&RedisServer, &RedisServer) {
    let master_of = |server: &RedisServer| {
        let info = server.command(&["INFO", "replication"]).unwrap();
        info.lines().find_map(|line| line.strip_prefix("master_port:")?.trim().parse::<u16>().ok())
    };
    let (replica, port) =
        cluster.servers.iter().find_map(|server| Some((server, master_of(server)?))).unwrap();
    (cluster.servers.iter().find(|server| server.port() == port).unwrap(), replica)
}

fn has(server: &RedisServer, n: u64) -> bool {
    let key = oncegate_redis::contract::record_key(&id(n));
    server.command(&["EXISTS", &key]).is_ok_and(|reply| reply.trim() == ":1")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_cluster_each_record_waits_for_the_replica_of_its_primary() {
    let cluster = cluster();
    let patient = Arc::new(open(&cluster_url(&cluster, WAIT)).await);
    let claims: Vec<_> = (0..200)
        .map(|n| {
            let store = patient.clone();
            tokio::spawn(async move { granted(&store, n, n).await })
        })
        .collect();
    for (n, claim) in (0..).zip(claims) {
        let grant = claim.await.unwrap();
        assert_eq!(patient.apply(id(n), completion(grant.token, n)).await.unwrap(), Outcome::Completed);
    }
    let store = open(&cluster_url(&cluster, Duration::from_millis(500))).await;
    let (primary, replica) = pair(&cluster);
    assert!((0..200).any(|n| has(primary, n)));
    let stopped = Stopped::new(replica);
    let of_others = |n: &u64| !has(primary, *n);
    let (mut refused, mut granted_to) = (Vec::new(), Vec::new());
    for n in 300..340 {
        match try_claim(&store, n, n).await {
            Ok(outcome) => {
                assert!(matches!(outcome, Outcome::Execute(_)), "{outcome:?}");
                granted_to.push(n);
            }
            error => {
                let why = does_not_count(error, Extent::Record);
                assert!(why.contains("0 of 1 replicas") || of_others(&n), "{why}");
                refused.push(n);
            }
        }
    }
    assert!(granted_to.iter().all(of_others), "none counts that one server has");
    assert!(refused.iter().any(|n| has(primary, *n)));
    assert!(granted_to.len() > 10, "the other primaries have their replicas: {granted_to:?}");
    // Replays are answered.
    for n in 0..200 {
        assert_eq!(try_claim(&store, n, 1000).await.unwrap(), Outcome::Replay(response(n)));
    }
    drop(stopped);
    for n in refused {
        assert!(matches!(until_ok(|| try_claim(&store, n, n)).await, Outcome::Execute(_)));
    }
    for server in cluster.primaries() {
        // Two for each check of the servers. Claims at the same time share a wait.
        let calls = calls_of(server, "wait");
        assert!((2..=160).contains(&calls), "{calls}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_cluster_a_claim_that_a_failover_lost_is_an_error() {
    let cluster = cluster();
    let store = Arc::new(open(&cluster_url(&cluster, WAIT)).await);
    for n in 0..60 {
        granted(&store, n, n).await;
    }
    let (primary, replica) = pair(&cluster);
    // The replica no longer receives anything, and does not notice it.
    let stopped = Stopped::new(replica);
    primary.command(&["CLIENT", "KILL", "TYPE", "replica"]).unwrap();
    let claims: Vec<_> = (100..130)
        .map(|n| {
            let store = store.clone();
            (n, tokio::spawn(async move { try_claim(&store, n, n).await }))
        })
        .collect();
    let blocked = || {
        let clients = primary.command(&["CLIENT", "LIST"]).unwrap();
        clients.lines().any(|line| line.contains("cmd=wait") && line.contains("flags=b"))
    };
    until("a client waits for the replica", async || blocked()).await;
    until("the records are written", async || (100..130).any(|n| has(primary, n))).await;
    let lost: Vec<u64> = (100..130).filter(|n| has(primary, *n)).collect();
    // Then the replica takes over, without a vote and without the lost records. The command waits in its socket, so the
    // replica reads it before it can reconnect to its primary.
    let mut order = std::net::TcpStream::connect(("127.0.0.1", replica.port())).unwrap();
    order.write_all(b"CLUSTER FAILOVER TAKEOVER\r\n").unwrap();
    drop(stopped);
    until("the replica takes over", async || {
        replica.command(&["ROLE"]).is_ok_and(|role| role.contains("master"))
    })
    .await;
    until("the old primary is a replica", async || {
        primary.command(&["ROLE"]).is_ok_and(|role| role.contains("slave"))
    })
    .await;
    let kept: Vec<u64> = lost.iter().copied().filter(|n| has(replica, *n)).collect();
    for (n, claim) in claims {
        let outcome = claim.await.unwrap();
        if lost.contains(&n) && !kept.contains(&n) {
            does_not_count(outcome, Extent::Record);
        }
    }
    assert!(kept.len() < lost.len(), "something was lost: {lost:?}");
    for n in lost {
        assert!(matches!(until_ok(|| try_claim(&store, n, n)).await, Outcome::Execute(_)));
        assert!(has(replica, n));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_record_moves_to_another_primary_can_be_sent_again() {
    let cluster = cluster();
    let store = open(&cluster_url(&cluster, WAIT)).await;
    for n in 0..30 {
        granted(&store, n, n).await;
    }
    let primaries: Vec<_> = cluster.primaries().collect();
    let name = |server: &RedisServer| {
        let name = server.command(&["CLUSTER", "MYID"]).unwrap();
        name.lines().nth(1).unwrap().to_owned()
    };
    let from = *primaries.iter().find(|server| has(server, 1)).unwrap();
    let to = *primaries.iter().find(|server| server.port() != from.port()).unwrap();
    // An unclaimed record, in the slot of an existing one.
    let key = oncegate_redis::contract::record_key(&id(1));
    let slot = from.command(&["CLUSTER", "KEYSLOT", &key]).unwrap();
    let slot = slot.trim().trim_start_matches(':').to_owned();
    from.command(&["DEL", &key]).unwrap();
    to.command(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &name(from)]).unwrap();
    from.command(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &name(to)]).unwrap();
    let why = does_not_count(try_claim(&store, 1, 101).await, Extent::Record);
    assert!(why.contains("moves to another part of the Cluster"), "{why}");
    // Claims of other slots are not delayed.
    for n in 31..60 {
        assert!(matches!(until_ok(|| try_claim(&store, n, n)).await, Outcome::Execute(_)));
    }
    for server in [to, from] {
        server.command(&["CLUSTER", "SETSLOT", &slot, "NODE", &name(to)]).unwrap();
    }
    let Outcome::Execute(grant) = until_ok(|| try_claim(&store, 1, 101)).await else { panic!() };
    assert_eq!(grant.attempts, 1, "it is the same claim");
    assert!(has(to, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_cluster_waiting_works_without_the_right_to_info() {
    let options = ServerOptions::new().with("cluster-node-timeout 60000");
    let cluster = RedisCluster::start_with(&options).unwrap();
    for server in &cluster.servers {
        let rules = ["~*", "&*", "+@all", "-info", "-config"];
        let user = [&["ACL", "SETUSER", "app", "on", ">secret"], &rules[..]].concat();
        server.command(&user).unwrap();
    }
    let url = cluster_url(&cluster, WAIT).replace("redis-cluster://", "redis-cluster://app:secret@");
    let store = open(&url).await;
    for n in 0..30 {
        let grant = granted(&store, n, n).await;
        assert_eq!(store.apply(id(n), completion(grant.token, n)).await.unwrap(), Outcome::Completed);
    }
}
