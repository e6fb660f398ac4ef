//! Faults of real servers and of clocks.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::*;
use oncegate_cache::{Cache, CacheOptions, CachedStore};
use oncegate_core::{
    AuditEntry, Capabilities, Command, Complete, Completion, Forget, ListPage, ListQuery, MemoryStore,
    Outcome, Record, RecordId, Resolution, Resolve, Rewrite, Store, StoreFuture, SystemClock, Timestamp,
};
use oncegate_postgres::{PostgresOptions, PostgresStore, schema};
use oncegate_redis::{RedisOptions, RedisStore};
use oncegate_servers::{
    PostgresServer, RedisOptions as ServerOptions, RedisSentinel, RedisServer, freeze, thaw,
};
use oncegate_testkit::{Fault, FaultyStore, Latch, ManualClock, Operation, until};

/// Options with a timeout that is long enough for a busy machine.
fn options() -> CacheOptions {
    CacheOptions::new().with_timeout(Duration::from_secs(1)).unwrap()
}

async fn redis(url: &str) -> Arc<RedisStore> {
    Arc::new(RedisStore::open(RedisOptions::from_url(url).unwrap()).await.unwrap())
}

/// A store that gives up soon, because the tests make outages.
async fn postgres(server: &PostgresServer) -> Arc<PostgresStore> {
    let options = PostgresOptions::from_url(&server.url()).unwrap();
    schema::apply(
        &options.clone().with_connect_timeout(MINUTE).unwrap().with_statement_timeout(MINUTE).unwrap(),
    )
    .await
    .unwrap();
    let options = options.with_connect_timeout(Duration::from_secs(5)).unwrap();
    Arc::new(PostgresStore::open(options).await.unwrap())
}

async fn until_asked(store: &CachedStore) {
    until("the cache is asked again", async || !counts(store).is_out).await;
}

/// Replays until the cache gives the response.
async fn until_hit(store: &CachedStore, n: u64, response: u64) {
    let before = counts(store).hits;
    until("the cache knows the response", async || {
        replays(store, n, response).await;
        settled(store).await;
        counts(store).hits > before
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_before_postgres_when_either_is_lost() {
    let mut cache_server = RedisServer::start(ServerOptions::new()).unwrap();
    let mut backing_server = PostgresServer::start().unwrap();
    let backing = postgres(&backing_server).await;
    let cache = redis(&cache_server.url()).await;
    let store = CachedStore::new(Cache::on(cache.clone()), backing.clone(), options());
    let capabilities = store.capabilities();
    assert_eq!((capabilities.name, capabilities.atomic_with_effect), ("cached", true));
    assert_eq!(capabilities.fencing, backing.capabilities().fencing);

    for n in 0..20 {
        complete(&store, n, n).await;
    }
    until_hit(&store, 19, 19).await;
    let before = counts(&store);
    for n in 0..20 {
        replays(&store, n, n).await;
    }
    assert_eq!(counts(&store).hits, before.hits + 20, "{:?}", counts(&store));
    // The store decides about another request under the same key.
    let other = store.apply(id(0), Command::Claim(claim_of(1, b"pay 9"))).await.unwrap();
    assert_eq!(other, Outcome::Mismatch);

    // The store is lost.
    let running = execute(&store, 100, 100).await;
    backing_server.stop_immediately().unwrap();
    for n in 0..20 {
        replays(&store, n, n).await;
    }
    unavailable(claim(&store, 200, 1).await);
    unavailable(claim(&store, 100, 101).await);
    unavailable(store.apply(id(0), Command::Claim(claim_of(1, b"pay 9"))).await);
    unavailable(store.check().await);
    backing_server.start_again().unwrap();
    until("the store answers again", async || store.check().await.is_ok()).await;
    assert_eq!(store.apply(id(100), completion(running, 100, MINUTE)).await.unwrap(), Outcome::Completed);
    replays(&store, 100, 100).await;

    // The cache is lost with all its entries.
    cache_server.kill();
    for n in 0..20 {
        replays(&store, n, n).await;
    }
    assert!(counts(&store).is_out);
    complete(&store, 21, 21).await;
    assert!(counts(&store).shed > 0 && counts(&store).skipped > 0, "{:?}", counts(&store));
    cache_server.restart().unwrap();
    until_asked(&store).await;
    for n in 0..22 {
        if n != 20 {
            until_hit(&store, n, n).await;
        }
    }

    cache_server.command(&["FLUSHALL"]).unwrap();
    for n in 0..20 {
        replays(&store, n, n).await;
    }
    until_hit(&store, 3, 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_one_request_waits_for_a_cache_that_hangs() {
    let server = RedisServer::start(ServerOptions::new()).unwrap();
    let cache = redis(&format!("{}?timeout=500ms&connect-timeout=500ms", server.url())).await;
    let backing = Arc::new(MemoryStore::new(SystemClock::new()));
    let store = CachedStore::new(Cache::on(cache), backing, options());
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
async fn a_slow_cache_is_not_asked_until_it_is_fast() {
    let clock = Arc::new(ManualClock::at_millis(1_000_000));
    let (cache, faults) = FaultyStore::new(MemoryStore::new(clock.clone()));
    let store = CachedStore::new(
        Cache::on(Arc::new(cache)),
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
async fn damaged_or_exchanged_entries_are_not_used() {
    let server = RedisServer::start(ServerOptions::new()).unwrap();
    let backing = Arc::new(MemoryStore::new(SystemClock::new()));
    let store = CachedStore::new(Cache::on(redis(&server.url()).await), backing, options());
    for n in 0..6 {
        complete(&store, n, n).await;
        until_hit(&store, n, n).await;
    }
    let keys = server.command(&["KEYS", "oncegate:*"]).unwrap();
    let keys: Vec<_> = keys.lines().map(str::trim).filter(|line| line.starts_with("oncegate:")).collect();
    assert_eq!(keys.len(), 6, "{keys:?}");
    let entry = server.command(&["GET", keys[0]]).unwrap();
    assert!(entry.contains("cache 1 until "), "{entry}");
    // Parts of the entry are damaged, then the whole of it is: the version, the state, the expiry, the token, the end.
    let mut errors = counts(&store).errors;
    for at in ["0", "6", "25", "57", "1000"] {
        for key in &keys {
            server.command(&["SETRANGE", key, at, "garbage"]).unwrap();
        }
        for n in 0..6 {
            replays(&store, n, n).await;
        }
        assert!(counts(&store).errors >= errors + 6, "{at}: {:?}", counts(&store));
        errors = counts(&store).errors;
        assert!(!counts(&store).is_out, "one damaged entry is not an outage");
    }
    for key in &keys {
        server.command(&["SET", key, "garbage"]).unwrap();
    }
    for n in 0..6 {
        replays(&store, n, n).await;
    }
    assert!(counts(&store).errors >= errors + 6);
    // Two entries change places.
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
async fn a_cache_fails_over_to_an_older_copy() {
    let mut cache = RedisSentinel::start().unwrap();
    let url = cache.url();
    let backing = Arc::new(MemoryStore::new(SystemClock::new()));
    let store = CachedStore::new(Cache::on(redis(&url).await), backing, options());
    complete(&store, 1, 1).await;
    until_hit(&store, 1, 1).await;
    cache.servers[0].kill();
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

/// A backing store that can be replaced.
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

    /// Reports a change at once, which shows that the cached store asks this one.
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
async fn a_record_that_the_store_lost_replays_until_its_entry_ends() {
    let clock = Arc::new(ManualClock::at_millis(1_000_000));
    let backing = Arc::new(Switch(Mutex::new(Arc::new(MemoryStore::new(clock.clone())))));
    let store =
        CachedStore::new(Cache::in_memory(1 << 20), backing.clone(), options().with_keep(MINUTE).unwrap());
    complete(&store, 1, 1).await;
    settled(&store).await;
    *backing.0.lock().unwrap() = Arc::new(MemoryStore::new(clock.clone()));
    replays(&store, 1, 1).await;
    // Changes are reported by the backing store.
    tokio::time::timeout(TIMEOUT, store.changed(id(2))).await.unwrap();
    // The record itself is gone, as it would be without a cache.
    assert_eq!(store.lookup(id(1)).await.unwrap(), None);
    clock.advance(MINUTE);
    execute(&store, 1, 9).await;
}

#[tokio::test]
async fn an_entry_that_arrives_late_is_not_used_for_the_next_life_of_its_key() {
    let (cache_clock, clock) =
        (Arc::new(ManualClock::at_millis(1)), Arc::new(ManualClock::at_millis(1_000_000)));
    let (cache, faults) = FaultyStore::new(MemoryStore::new(cache_clock));
    let backing = Arc::new(MemoryStore::new(clock.clone()));
    let store = CachedStore::new(Cache::on(Arc::new(cache)), backing, options());
    let latch = Latch::new();
    faults.next(1, Operation::Complete, Fault::StallBefore(latch.clone()));
    complete(&store, 1, 1).await;
    until("the cache is being written", async || faults.calls(Operation::Complete) == 1).await;
    // The record ends, and its key begins another life.
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
async fn an_entry_ends_before_its_record_by_the_clock_of_the_store() {
    let clock = Arc::new(ManualClock::at_millis(1_000_000));
    let (backing, faults) = FaultyStore::new(MemoryStore::new(clock.clone()));
    let still = Arc::new(ManualClock::at_millis(1));
    let caches = [Cache::in_memory(1 << 20), Cache::on(Arc::new(MemoryStore::new(still)))];
    let backing: Arc<dyn Store> = Arc::new(backing);
    for (n, cache) in (1..).zip(caches) {
        let store = CachedStore::new(cache, backing.clone(), options().with_keep(100 * MINUTE).unwrap());
        let token = execute(&store, n, n).await;
        store.apply(id(n), completion(token, n, Duration::from_secs(1000))).await.unwrap();
        settled(&store).await;
        // The margin: five seconds and a thousandth.
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
async fn two_processes_never_replay_a_response_of_an_earlier_life() {
    let clock = Arc::new(ManualClock::at_millis(1_000_000));
    let backing = Arc::new(MemoryStore::new(clock.clone()));
    let process = || CachedStore::new(Cache::in_memory(1 << 20), backing.clone(), options());
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
async fn stores_of_different_names_share_a_cache_but_no_entries() {
    let clock = || SystemClock::new();
    let cache: Arc<dyn Store> = Arc::new(MemoryStore::new(clock()));
    let named = |name: &str, backing: Arc<dyn Store>| {
        CachedStore::new(Cache::on(cache.clone()), backing, options().with_namespace(name))
    };
    let shared: Arc<dyn Store> = Arc::new(MemoryStore::new(clock()));
    let other: Arc<dyn Store> = Arc::new(MemoryStore::new(clock()));
    let (one, same, other) = (named("a", shared.clone()), named("a", shared), named("b", other));
    complete(&one, 1, 1).await;
    settled(&one).await;
    replays(&same, 1, 1).await;
    assert_eq!(counts(&same).hits, 1, "it never saw the key before");
    execute(&other, 1, 1).await;
    // The cache also holds records of its own: records and entries never mix.
    execute(&*cache, 1, 1).await;
    replays(&one, 1, 1).await;
}

#[tokio::test]
async fn only_responses_are_cached() {
    let clock = Arc::new(ManualClock::at_millis(1_000_000));
    let (backing, faults) = FaultyStore::new(MemoryStore::new(clock.clone()));
    let store = CachedStore::new(Cache::in_memory(1 << 20), Arc::new(backing), options());
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
    assert_eq!(counts(&store).populated, 0);
    assert_eq!(claim(&store, 1, 11).await.unwrap(), Outcome::Unreplayable);
    assert_eq!(claim(&store, 2, 12).await.unwrap(), Outcome::Unknown);
    assert_eq!(claim(&store, 3, 13).await.unwrap(), Outcome::Unreplayable);

    // The awaited response arrives.
    store.apply(id(3), completion(awaited, 3, MINUTE)).await.unwrap();
    settled(&store).await;
    assert_eq!(counts(&store).populated, 1);
    faults.outage();
    replays(&store, 3, 3).await;
    unavailable(claim(&store, 4, 14).await);
    faults.heal();

    // Responses that are too large for the cache are not read from the store again.
    for (cache, options) in [
        (Cache::in_memory(1 << 20), options().with_max_response_bytes(10)),
        (Cache::in_memory(64), options()),
        (Cache::on(Arc::new(MemoryStore::new(clock.clone()))), options().with_max_response_bytes(10)),
    ] {
        let (backing, faults) = FaultyStore::new(MemoryStore::new(clock.clone()));
        let small = CachedStore::new(cache, Arc::new(backing), options);
        complete(&small, 1, 1).await;
        settled(&small).await;
        replays(&small, 1, 1).await;
        settled(&small).await;
        assert_eq!((counts(&small).populated, counts(&small).shed), (0, 2));
        assert_eq!(faults.calls(Operation::Lookup), 0);
    }
}

/// An operator may take the response of an operator back, through any process. So no cache keeps it.
#[tokio::test]
async fn the_response_of_an_operator_is_not_cached() {
    let shared: Arc<dyn Store> = Arc::new(MemoryStore::new(SystemClock::new()));
    for cache in
        [|_: &Arc<dyn Store>| Cache::in_memory(1 << 20), |shared: &Arc<dyn Store>| Cache::on(shared.clone())]
    {
        let backing: Arc<dyn Store> = Arc::new(MemoryStore::new(SystemClock::new()));
        // Two processes before one store.
        let stores = [0; 2].map(|_| CachedStore::new(cache(&shared), backing.clone(), options()));
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
        let result = |n| Resolution::Complete(Some(response(n)));
        for (n, command) in [(2, resolve(result(2), false)), (3, resolve(result(3), true))] {
            resolved(one, command).await;
            for store in &stores {
                // If the response were cached, the second replay would come from the cache.
                for _ in 0..2 {
                    replays(store, 1, n).await;
                    settled(store).await;
                }
                assert_eq!((counts(store).populated, counts(store).hits), (0, 0));
            }
        }
        resolved(other, resolve(Resolution::Park, false)).await;
        for store in &stores {
            assert_eq!(claim(store, 1, 9).await.unwrap(), Outcome::Unknown);
        }
    }
}

/// Content that is rewritten or forgotten leaves the cache, also one that several processes share, and does not come back by a
/// write to the cache that had begun before.
#[tokio::test]
async fn content_that_is_rewritten_or_forgotten_leaves_the_cache() {
    let shared: Arc<dyn Store> = Arc::new(MemoryStore::new(SystemClock::new()));
    for cache in
        [|_: &Arc<dyn Store>| Cache::in_memory(1 << 20), |shared: &Arc<dyn Store>| Cache::on(shared.clone())]
    {
        let (backing, faults) = FaultyStore::new(MemoryStore::new(SystemClock::new()));
        let backing: Arc<dyn Store> = Arc::new(backing);
        let store = CachedStore::new(cache(&shared), backing.clone(), options());
        let is_shared = Arc::strong_count(&shared) > 1;
        let other = CachedStore::new(cache(&shared), backing.clone(), options());
        let rewrite = async |n, to| {
            let record = backing.lookup(id(n)).await.unwrap().unwrap();
            let mut rewrite = Rewrite::of(&record);
            rewrite.response.as_mut().unwrap().to = response(to);
            assert_eq!(store.apply(id(n), Command::Rewrite(rewrite)).await.unwrap(), Outcome::Rewritten);
        };
        let forget = async |n| {
            let forget = Forget { actor: "ann".to_owned(), reason: "asked for".to_owned() };
            let outcome = store.apply(id(n), Command::Forget(forget)).await.unwrap();
            assert!(matches!(outcome, Outcome::Forgotten { .. }), "{outcome:?}");
        };
        for n in [1, 2] {
            complete(&store, n, n).await;
            settled(&store).await;
            until_hit(&store, n, n).await;
        }
        rewrite(1, 7).await;
        forget(2).await;
        for _ in 0..3 {
            replays(&store, 1, 7).await;
            assert_eq!(claim(&store, 2, 9).await.unwrap(), Outcome::Unreplayable);
            if is_shared {
                replays(&other, 1, 7).await;
                assert_eq!(claim(&other, 2, 9).await.unwrap(), Outcome::Unreplayable);
            }
            settled(&store).await;
        }
        // The write to the cache has read the old content, and is slower than the removal.
        for n in [3, 4] {
            let latch = Latch::new();
            let calls = faults.calls(Operation::Lookup);
            faults.next(1, Operation::Lookup, Fault::StallAfter(latch.clone()));
            complete(&store, n, n).await;
            until("the record is read for the cache", async || faults.calls(Operation::Lookup) > calls).await;
            if n == 3 {
                rewrite(n, 7).await
            } else {
                forget(n).await
            }
            latch.open();
            settled(&store).await;
            match n {
                3 => replays(&store, n, 7).await,
                _ => assert_eq!(claim(&store, n, 9).await.unwrap(), Outcome::Unreplayable),
            }
        }
    }
}

#[tokio::test]
async fn a_cache_that_comes_later_and_one_that_is_closed() {
    let backing = Arc::new(MemoryStore::new(SystemClock::new()));
    let (send, receive) = tokio::sync::oneshot::channel::<Arc<dyn Store>>();
    let later = Cache::later(async { receive.await.unwrap() });
    let store = CachedStore::new(later, backing.clone(), options());
    complete(&store, 1, 1).await;
    replays(&store, 1, 1).await;
    let before = counts(&store);
    assert_eq!((before.is_out, before.skipped, before.shed), (true, 2, 2));
    let cache = Arc::new(MemoryStore::new(SystemClock::new()));
    assert!(send.send(cache.clone()).is_ok());
    until_asked(&store).await;
    until_hit(&store, 1, 1).await;
    assert_eq!(cache.len(), 1);

    store.close(MINUTE).await;
    complete(&store, 2, 2).await;
    replays(&store, 2, 2).await;
    replays(&store, 1, 1).await;
    let after = counts(&store);
    assert_eq!((after.pending, after.shed, cache.len()), (0, 4, 1), "{after:?}");
}

#[tokio::test]
async fn a_purge_reaches_both_and_returns_the_count_of_the_store() {
    let clock = Arc::new(ManualClock::at_millis(1_000_000));
    let cache = Arc::new(MemoryStore::new(clock.clone()));
    let store =
        CachedStore::new(Cache::on(cache.clone()), Arc::new(MemoryStore::new(clock.clone())), options());
    for n in 0..3 {
        complete(&store, n, n).await;
    }
    settled(&store).await;
    assert_eq!(cache.len(), 3);
    clock.advance(10 * MINUTE);
    assert_eq!(store.purge(100).await.unwrap(), 3);
    until("the cache is purged", async || cache.is_empty()).await;
}
