//! What goes wrong with real servers, and with time.

mod support;

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_cache::{Cache, CacheOptions, CachedStore};
use oncegate_core::{
    AuditEntry, Capabilities, Command, Complete, Completion, ListPage, ListQuery, MemoryStore, Outcome,
    Record, RecordId, Resolution, Resolve, Store, StoreFuture, SystemClock, Timestamp,
};
use oncegate_postgres::{PostgresOptions, PostgresStore, schema};
use oncegate_redis::{RedisOptions, RedisStore};
use oncegate_servers::{
    PostgresServer, RedisOptions as ServerOptions, RedisSentinel, RedisServer, freeze, thaw,
};
use oncegate_testkit::{Fault, FaultyStore, Latch, ManualClock, Operation};
use support::*;

/// On a busy machine, too.
fn options() -> CacheOptions {
    CacheOptions::new().with_timeout(Duration::from_secs(1)).unwrap()
}

async fn redis(url: &str) -> Arc<RedisStore> {
    Arc::new(RedisStore::open(RedisOptions::from_url(url).unwrap()).await.unwrap())
}

/// Gives up soon: an outage is what is tested.
async fn postgres(server: &PostgresServer) -> Arc<PostgresStore> {
    let options = PostgresOptions::new(&server.url()).unwrap();
    schema::apply(
        &options.clone().with_connect_timeout(MINUTE).unwrap().with_statement_timeout(MINUTE).unwrap(),
    )
    .await
    .unwrap();
    let options = options.with_connect_timeout(Duration::from_secs(5)).unwrap();
    Arc::new(PostgresStore::open(options).await.unwrap())
}

async fn until_asked(store: &CachedStore) {
    until("the front is asked again", async || !counts(store).is_out).await;
}

/// Fills the front with the answers that it should have, and sees that it gives them.
async fn until_hit(store: &CachedStore, n: u64, answer: u64) {
    let before = counts(store).hits;
    until("the front knows the answer", async || {
        replays(store, n, answer).await;
        settled(store).await;
        counts(store).hits > before
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_before_a_postgres_and_either_is_lost() {
    let mut front_server = RedisServer::start(ServerOptions::new()).unwrap();
    let mut back_server = PostgresServer::start().unwrap();
    let back = postgres(&back_server).await;
    let front = redis(&front_server.url()).await;
    let store = CachedStore::new(Cache::on(front.clone()), back.clone(), options());
    let capabilities = store.capabilities();
    assert_eq!((capabilities.name, capabilities.atomic_with_effect), ("cached", true));
    assert_eq!(capabilities.fencing, back.capabilities().fencing);

    for n in 0..20 {
        complete(&store, n, n).await;
    }
    until_hit(&store, 19, 19).await;
    let before = counts(&store);
    for n in 0..20 {
        replays(&store, n, n).await;
    }
    assert_eq!(counts(&store).hits, before.hits + 20, "{:?}", counts(&store));
    // Another request under the same key is the back's business.
    let other = store.apply(id(0), Command::Claim(claim_of(1, b"pay 9"))).await.unwrap();
    assert_eq!(other, Outcome::Mismatch);

    // The back is lost.
    let running = execute(&store, 100, 100).await;
    back_server.stop_immediately().unwrap();
    for n in 0..20 {
        replays(&store, n, n).await;
    }
    unavailable(claim(&store, 200, 1).await);
    unavailable(claim(&store, 100, 101).await);
    unavailable(store.apply(id(0), Command::Claim(claim_of(1, b"pay 9"))).await);
    unavailable(store.check().await);
    back_server.start_again().unwrap();
    until("the back is there again", async || store.check().await.is_ok()).await;
    assert_eq!(store.apply(id(100), completion(running, 100, MINUTE)).await.unwrap(), Outcome::Completed);
    replays(&store, 100, 100).await;

    // The front is lost, and its memory with it.
    front_server.kill();
    for n in 0..20 {
        replays(&store, n, n).await;
    }
    assert!(counts(&store).is_out);
    complete(&store, 21, 21).await;
    assert!(counts(&store).shed > 0 && counts(&store).skipped > 0, "{:?}", counts(&store));
    front_server.restart().unwrap();
    until_asked(&store).await;
    for n in 0..22 {
        if n != 20 {
            until_hit(&store, n, n).await;
        }
    }

    front_server.command(&["FLUSHALL"]).unwrap();
    for n in 0..20 {
        replays(&store, n, n).await;
    }
    until_hit(&store, 3, 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_front_that_hangs_costs_one_request_its_patience() {
    let server = RedisServer::start(ServerOptions::new()).unwrap();
    let front = redis(&format!("{}?timeout=500ms&connect-timeout=500ms", server.url())).await;
    let back = Arc::new(MemoryStore::new(SystemClock::new()));
    let store = CachedStore::new(Cache::on(front), back, options());
    complete(&store, 1, 1).await;
    until_hit(&store, 1, 1).await;
    freeze(server.pid().unwrap()).unwrap();
    let before = counts(&store);
    for n in 2..200 {
        replays(&store, 1, 1).await;
        complete(&store, n, n).await;
    }
    let after = counts(&store);
    assert!(after.is_out && after.hits == before.hits, "{after:?}");
    assert_eq!(after.errors - before.errors, 1, "only one waited: {after:?}");
    thaw(server.pid().unwrap()).unwrap();
    until_asked(&store).await;
    for n in 1..200 {
        replays(&store, n, n).await;
    }
    until_hit(&store, 150, 150).await;
}

#[tokio::test]
async fn a_front_that_is_slow_is_left_alone_until_it_is_quick() {
    let clock = Arc::new(ManualClock::at_millis(1_000_000));
    let (front, faults) = FaultyStore::new(MemoryStore::new(clock.clone()));
    let store = CachedStore::new(
        Cache::on(Arc::new(front)),
        Arc::new(MemoryStore::new(clock)),
        CacheOptions::new().with_timeout(Duration::from_millis(20)).unwrap(),
    );
    complete(&store, 1, 1).await;
    settled(&store).await;
    let latch = Latch::new();
    faults.always(Operation::Lookup, Fault::StallBefore(latch.clone()));
    for _ in 0..50 {
        replays(&store, 1, 1).await;
    }
    let counts = self::counts(&store);
    assert_eq!((counts.errors, counts.skipped, counts.is_out), (1, 49, true), "{counts:?}");
    faults.heal();
    latch.open();
    until_hit(&store, 1, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_front_that_lies_is_not_believed() {
    let server = RedisServer::start(ServerOptions::new()).unwrap();
    let back = Arc::new(MemoryStore::new(SystemClock::new()));
    let store = CachedStore::new(Cache::on(redis(&server.url()).await), back, options());
    for n in 0..6 {
        complete(&store, n, n).await;
        until_hit(&store, n, n).await;
    }
    let keys = server.command(&["KEYS", "oncegate:*"]).unwrap();
    let keys: Vec<_> = keys.lines().map(str::trim).filter(|line| line.starts_with("oncegate:")).collect();
    assert_eq!(keys.len(), 6, "{keys:?}");
    let fields = server.command(&["HGETALL", keys[0]]).unwrap();
    assert!(fields.contains("front 1 until "), "{fields}");
    // Damaged in every field, then something else altogether, then half of it.
    let names = ["state", "response", "fingerprint", "operation", "expires_at", "token"];
    let mut errors = counts(&store).errors;
    for name in names {
        let found = server.command(&["HEXISTS", keys[0], name]).unwrap();
        if found.trim() != ":1" {
            continue;
        }
        for key in &keys {
            server.command(&["HSET", key, name, "garbage"]).unwrap();
        }
        for n in 0..6 {
            replays(&store, n, n).await;
        }
        assert!(counts(&store).errors >= errors + 6, "{name}: {:?}", counts(&store));
        errors = counts(&store).errors;
        assert!(!counts(&store).is_out, "one bad record is no outage");
    }
    assert!(errors >= 12, "the fields have other names than these: {fields}");
    for key in &keys {
        server.command(&["SET", key, "garbage"]).unwrap();
    }
    for n in 0..6 {
        replays(&store, n, n).await;
    }
    assert!(counts(&store).errors >= errors + 6);
    // Answers that change places.
    server.command(&["FLUSHALL"]).unwrap();
    for n in 0..6 {
        until_hit(&store, n, n).await;
    }
    server.command(&["RENAME", keys[0], "aside"]).unwrap();
    server.command(&["RENAME", keys[1], keys[0]]).unwrap();
    server.command(&["RENAME", "aside", keys[1]]).unwrap();
    for n in 0..6 {
        replays(&store, n, n).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_front_fails_over_to_an_older_copy() {
    let mut front = RedisSentinel::start().unwrap();
    let url = front.url();
    let back = Arc::new(MemoryStore::new(SystemClock::new()));
    let store = CachedStore::new(Cache::on(redis(&url).await), back, options());
    complete(&store, 1, 1).await;
    until_hit(&store, 1, 1).await;
    front.servers[0].kill();
    for n in 2..50 {
        complete(&store, n, n).await;
        replays(&store, 1, 1).await;
    }
    until_asked(&store).await;
    for n in 1..50 {
        replays(&store, n, n).await;
    }
    until_hit(&store, 40, 40).await;
}

/// A back that can be taken away and replaced.
struct Switch(Mutex<Arc<dyn Store>>);

impl Switch {
    fn with<'a, T: Send + 'static>(
        &self,
        act: impl FnOnce(Arc<dyn Store>) -> StoreFuture<'static, T>,
    ) -> StoreFuture<'a, T> {
        act(self.0.lock().unwrap().clone())
    }
}

impl Store for Switch {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        self.with(|store| Box::pin(async move { store.apply(id, command).await }))
    }

    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        self.with(|store| Box::pin(async move { store.lookup(id).await }))
    }

    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage> {
        self.with(|store| Box::pin(async move { store.list(query).await }))
    }

    fn purge(&self, limit: usize) -> StoreFuture<'_, usize> {
        self.with(|store| Box::pin(async move { store.purge(limit).await }))
    }

    fn audit(&self, before: Option<u64>, limit: usize) -> StoreFuture<'_, Vec<AuditEntry>> {
        self.with(|store| Box::pin(async move { store.audit(before, limit).await }))
    }

    fn check(&self) -> StoreFuture<'_, ()> {
        self.with(|store| Box::pin(async move { store.check().await }))
    }

    /// Something always has.
    fn changed(&self, _: RecordId) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(std::future::ready(()))
    }

    fn now(&self) -> Timestamp {
        self.0.lock().unwrap().now()
    }

    fn capabilities(&self) -> Capabilities {
        self.0.lock().unwrap().capabilities()
    }
}

#[tokio::test]
async fn what_a_failover_of_the_back_lost_replays_as_long_as_the_front_keeps_it() {
    let clock = Arc::new(ManualClock::at_millis(1_000_000));
    let back = Arc::new(Switch(Mutex::new(Arc::new(MemoryStore::new(clock.clone())))));
    let store =
        CachedStore::new(Cache::in_memory(1 << 20), back.clone(), options().with_keep(MINUTE).unwrap());
    complete(&store, 1, 1).await;
    settled(&store).await;
    *back.0.lock().unwrap() = Arc::new(MemoryStore::new(clock.clone()));
    replays(&store, 1, 1).await;
    // Who waits for an owner is told by the back.
    tokio::time::timeout(PATIENCE, store.changed(id(2))).await.unwrap();
    // What only the back knew is gone, as it would be without a front.
    assert_eq!(store.lookup(id(1)).await.unwrap(), None);
    clock.advance(MINUTE);
    execute(&store, 1, 9).await;
}

#[tokio::test]
async fn an_entry_that_arrives_late_is_not_given_for_the_keys_next_life() {
    let (front_clock, clock) =
        (Arc::new(ManualClock::at_millis(1)), Arc::new(ManualClock::at_millis(1_000_000)));
    let (front, faults) = FaultyStore::new(MemoryStore::new(front_clock));
    let back = Arc::new(MemoryStore::new(clock.clone()));
    let store = CachedStore::new(Cache::on(Arc::new(front)), back, options());
    let latch = Latch::new();
    faults.next(1, Operation::Complete, Fault::StallBefore(latch.clone()));
    complete(&store, 1, 1).await;
    until("the front is being filled", async || faults.calls(Operation::Complete) == 1).await;
    // The record ends, and its key has another life.
    clock.advance(3 * MINUTE);
    complete(&store, 1, 2).await;
    latch.open();
    settled(&store).await;
    for _ in 0..3 {
        replays(&store, 1, 2).await;
        settled(&store).await;
    }
}

#[tokio::test]
async fn an_entry_ends_before_its_record_and_by_the_clock_of_the_back() {
    let clock = Arc::new(ManualClock::at_millis(1_000_000));
    let (back, faults) = FaultyStore::new(MemoryStore::new(clock.clone()));
    let still = Arc::new(ManualClock::at_millis(1));
    let fronts = [Cache::in_memory(1 << 20), Cache::on(Arc::new(MemoryStore::new(still)))];
    let back: Arc<dyn Store> = Arc::new(back);
    for (n, front) in (1..).zip(fronts) {
        let store = CachedStore::new(front, back.clone(), options().with_keep(100 * MINUTE).unwrap());
        let token = execute(&store, n, n).await;
        store.apply(id(n), completion(token, n, Duration::from_secs(1000))).await.unwrap();
        settled(&store).await;
        // Five seconds and one in a thousand.
        clock.advance(Duration::from_millis(993_990));
        faults.outage();
        replays(&store, n, n).await;
        clock.advance(Duration::from_millis(20));
        unavailable(claim(&store, n, 9).await);
        faults.heal();
        replays(&store, n, n).await;
    }
}

#[tokio::test]
async fn of_two_processes_neither_gives_an_answer_of_a_former_life() {
    let clock = Arc::new(ManualClock::at_millis(1_000_000));
    let back = Arc::new(MemoryStore::new(clock.clone()));
    let process = || CachedStore::new(Cache::in_memory(1 << 20), back.clone(), options());
    let (one, other) = (process(), process());
    complete(&one, 1, 1).await;
    settled(&one).await;
    replays(&one, 1, 1).await;
    assert_eq!(counts(&one).hits, 1);
    clock.advance(2 * MINUTE);
    let token = execute(&other, 1, 7).await;
    assert!(matches!(claim(&one, 1, 8).await, Ok(Outcome::InProgress { .. })));
    other.apply(id(1), completion(token, 2, MINUTE)).await.unwrap();
    settled(&other).await;
    replays(&one, 1, 2).await;
    replays(&other, 1, 2).await;
    settled(&one).await;
    replays(&one, 1, 2).await;
    assert_eq!(counts(&one).hits, 2);
}

#[tokio::test]
async fn backs_of_different_names_share_a_front_and_no_answer() {
    let clock = || SystemClock::new();
    let front: Arc<dyn Store> = Arc::new(MemoryStore::new(clock()));
    let named = |name: &str, back: Arc<dyn Store>| {
        CachedStore::new(Cache::on(front.clone()), back, options().with_namespace(name))
    };
    let shared: Arc<dyn Store> = Arc::new(MemoryStore::new(clock()));
    let other: Arc<dyn Store> = Arc::new(MemoryStore::new(clock()));
    let (one, same, other) = (named("a", shared.clone()), named("a", shared), named("b", other));
    complete(&one, 1, 1).await;
    settled(&one).await;
    replays(&same, 1, 1).await;
    assert_eq!(counts(&same).hits, 1, "the first that it ever heard of it");
    execute(&other, 1, 1).await;
    // A store of records that serves as a front too: neither is taken for the other.
    execute(&*front, 1, 1).await;
    replays(&one, 1, 1).await;
}

#[tokio::test]
async fn only_answers_are_kept() {
    let clock = Arc::new(ManualClock::at_millis(1_000_000));
    let (back, faults) = FaultyStore::new(MemoryStore::new(clock.clone()));
    let store = CachedStore::new(Cache::in_memory(1 << 20), Arc::new(back), options());
    let end = |token, completion| Command::Complete(Complete { token, completion, retention: 10 * MINUTE });
    let tombstone = execute(&store, 1, 1).await;
    store.apply(id(1), end(tombstone, Completion::Tombstone)).await.unwrap();
    let unknown = execute(&store, 2, 2).await;
    store.apply(id(2), end(unknown, Completion::Unknown)).await.unwrap();
    let awaited = execute(&store, 3, 3).await;
    store.apply(id(3), end(awaited, Completion::Awaited)).await.unwrap();
    let short = execute(&store, 4, 4).await;
    store.apply(id(4), completion(short, 4, Duration::from_secs(5))).await.unwrap();
    settled(&store).await;
    replays(&store, 4, 4).await;
    settled(&store).await;
    assert_eq!(counts(&store).fills, 0);
    assert_eq!(claim(&store, 1, 11).await.unwrap(), Outcome::Unreplayable);
    assert_eq!(claim(&store, 2, 12).await.unwrap(), Outcome::Unknown);
    assert_eq!(claim(&store, 3, 13).await.unwrap(), Outcome::Unreplayable);

    // The answer that was awaited.
    store.apply(id(3), completion(awaited, 3, MINUTE)).await.unwrap();
    settled(&store).await;
    assert_eq!(counts(&store).fills, 1);
    faults.outage();
    replays(&store, 3, 3).await;
    unavailable(claim(&store, 4, 14).await);
    faults.heal();

    // Too large for the front: the back has it, and is not asked for it once more.
    for (front, options) in [
        (Cache::in_memory(1 << 20), options().with_max_response_bytes(10)),
        (Cache::in_memory(64), options()),
        (Cache::on(Arc::new(MemoryStore::new(clock.clone()))), options().with_max_response_bytes(10)),
    ] {
        let (back, faults) = FaultyStore::new(MemoryStore::new(clock.clone()));
        let small = CachedStore::new(front, Arc::new(back), options);
        complete(&small, 1, 1).await;
        settled(&small).await;
        replays(&small, 1, 1).await;
        settled(&small).await;
        assert_eq!((counts(&small).fills, counts(&small).shed), (0, 2));
        assert_eq!(faults.calls(Operation::Lookup), 0);
    }
}

/// An operator may take back an operator's answer, in whatever process. So no front keeps one, and its end is seen at once.
#[tokio::test]
async fn an_answer_that_an_operator_gave_is_not_kept() {
    let shared: Arc<dyn Store> = Arc::new(MemoryStore::new(SystemClock::new()));
    for front in
        [|_: &Arc<dyn Store>| Cache::in_memory(1 << 20), |shared: &Arc<dyn Store>| Cache::on(shared.clone())]
    {
        let back: Arc<dyn Store> = Arc::new(MemoryStore::new(SystemClock::new()));
        // Two processes before one store.
        let stores = [0; 2].map(|_| CachedStore::new(front(&shared), back.clone(), options()));
        let [one, other] = &stores;
        let resolve = |resolution, amend| {
            let (actor, reason) = ("test".to_owned(), "test".to_owned());
            Command::Resolve(Resolve { resolution, retention: MINUTE, force: false, amend, actor, reason })
        };
        let resolved = async |store: &CachedStore, command| {
            let outcome = store.apply(id(1), command).await.unwrap();
            assert!(matches!(outcome, Outcome::Resolved { .. }), "{outcome:?}");
        };
        let token = execute(one, 1, 1).await;
        let unknown = Complete { token, completion: Completion::Unknown, retention: MINUTE };
        one.apply(id(1), Command::Complete(unknown)).await.unwrap();
        let said = |n| Resolution::Complete(Some(response(n)));
        for (n, command) in [(2, resolve(said(2), false)), (3, resolve(said(3), true))] {
            resolved(one, command).await;
            for store in &stores {
                // The second replay would be the front's.
                for _ in 0..2 {
                    replays(store, 1, n).await;
                    settled(store).await;
                }
                assert_eq!((counts(store).fills, counts(store).hits), (0, 0));
            }
        }
        resolved(other, resolve(Resolution::Park, false)).await;
        for store in &stores {
            assert_eq!(claim(store, 1, 9).await.unwrap(), Outcome::Unknown);
        }
    }
}

#[tokio::test]
async fn a_front_that_comes_later_and_one_that_is_closed() {
    let back = Arc::new(MemoryStore::new(SystemClock::new()));
    let (send, receive) = tokio::sync::oneshot::channel::<Arc<dyn Store>>();
    let later = Cache::later(async { receive.await.unwrap() });
    let store = CachedStore::new(later, back.clone(), options());
    complete(&store, 1, 1).await;
    replays(&store, 1, 1).await;
    let before = counts(&store);
    assert_eq!((before.is_out, before.skipped, before.shed), (true, 2, 2));
    let front = Arc::new(MemoryStore::new(SystemClock::new()));
    assert!(send.send(front.clone()).is_ok());
    until_asked(&store).await;
    until_hit(&store, 1, 1).await;
    assert_eq!(front.len(), 1);

    store.close(MINUTE).await;
    complete(&store, 2, 2).await;
    replays(&store, 2, 2).await;
    replays(&store, 1, 1).await;
    let after = counts(&store);
    assert_eq!((after.pending, after.shed, front.len()), (0, 4, 1), "{after:?}");
}

#[tokio::test]
async fn a_purge_reaches_both_and_counts_the_back() {
    let clock = Arc::new(ManualClock::at_millis(1_000_000));
    let front = Arc::new(MemoryStore::new(clock.clone()));
    let store =
        CachedStore::new(Cache::on(front.clone()), Arc::new(MemoryStore::new(clock.clone())), options());
    for n in 0..3 {
        complete(&store, n, n).await;
    }
    settled(&store).await;
    assert_eq!(front.len(), 3);
    clock.advance(10 * MINUTE);
    assert_eq!(store.purge(100).await.unwrap(), 3);
    until("the front is purged", async || front.is_empty()).await;
}
