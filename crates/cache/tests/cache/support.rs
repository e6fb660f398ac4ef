//! Helpers of the tests of the cached store.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate_cache::{CacheCounts, CachedStore};
use oncegate_core::{
    AuditEntry, Capabilities, Claim, Clock as _, Command, Complete, Completion, Durability, FencingToken,
    ListPage, ListQuery, Outcome, Record, RecordId, Store, StoreError, StoreErrorKind, StoreFuture,
    Timestamp,
};
use oncegate_testkit::{ManualClock, until};
pub(crate) use oncegate_testkit::{record_id as id, response};

pub(crate) const MINUTE: Duration = Duration::from_secs(60);
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) fn claim_of(attempt: u64, input: &[u8]) -> Claim {
    Claim { lease: MINUTE, retention: MINUTE, ..oncegate_testkit::claim(attempt, input) }
}

pub(crate) fn completion(token: FencingToken, n: u64, retention: Duration) -> Command {
    let completion = Completion::Replayable(response(n));
    Command::Complete(Complete { token, completion, retention })
}

pub(crate) async fn claim(store: &dyn Store, n: u64, attempt: u64) -> Result<Outcome, StoreError> {
    store.apply(id(n), Command::Claim(claim_of(attempt, b"pay 5"))).await
}

pub(crate) async fn execute(store: &dyn Store, n: u64, attempt: u64) -> FencingToken {
    match claim(store, n, attempt).await {
        Ok(Outcome::Execute(grant)) => grant.token,
        other => panic!("record {n}: {other:?}"),
    }
}

/// Executes, and completes with the response of this number.
pub(crate) async fn complete(store: &dyn Store, n: u64, seed: u64) {
    let token = execute(store, n, 1_000_000 + seed).await;
    let outcome = store.apply(id(n), completion(token, seed, 2 * MINUTE)).await.unwrap();
    assert_eq!(outcome, Outcome::Completed);
}

pub(crate) async fn replays(store: &dyn Store, n: u64, seed: u64) {
    assert_eq!(claim(store, n, 2_000_000 + n).await.unwrap(), Outcome::Replay(response(seed)));
}

pub(crate) fn unavailable<T: std::fmt::Debug>(result: Result<T, StoreError>) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
}

pub(crate) fn counts(store: &CachedStore) -> CacheCounts {
    store.stats().counts()
}

/// Waits until the cache has been populated.
pub(crate) async fn settled(store: &CachedStore) {
    until("the cache is populated", async || counts(store).pending == 0).await;
}

/// A cached store that answers a command only when the cache is populated. The suite has no runtime to wait for that.
pub(crate) struct Settled {
    pub(crate) store: CachedStore,
    /// The clock of the suite, if the backing store gets its time before each command.
    pub(crate) clock: Option<Arc<ManualClock>>,
    pub(crate) tell_time: Box<dyn Fn() + Send + Sync>,
    /// Closes the backing store, so that it can be opened again.
    pub(crate) close: Box<dyn Fn() + Send + Sync>,
    /// The counts of all stores; this one adds its own when it is dropped.
    pub(crate) total: Total,
}

pub(crate) type Total = Arc<Mutex<CacheCounts>>;

impl Settled {
    pub(crate) fn new(store: CachedStore, total: &Total) -> Self {
        let nothing = || Box::new(|| ());
        Self { store, clock: None, tell_time: nothing(), close: nothing(), total: total.clone() }
    }

    fn settle(&self) {
        let deadline = Instant::now() + TIMEOUT;
        while counts(&self.store).pending > 0 {
            assert!(Instant::now() < deadline, "the cache is not populated in time");
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn ask<'a, T: Send + 'a>(
        &'a self,
        act: impl FnOnce(&'a CachedStore) -> StoreFuture<'a, T>,
    ) -> StoreFuture<'a, T> {
        (self.tell_time)();
        let response = act(&self.store);
        Box::pin(async move {
            let response = response.await;
            self.settle();
            response
        })
    }
}

impl Drop for Settled {
    fn drop(&mut self) {
        let counts = counts(&self.store);
        let mut total = self.total.lock().unwrap();
        total.hits += counts.hits;
        total.populated += counts.populated;
        (self.close)();
    }
}

impl Store for Settled {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        self.ask(|store| store.apply(id, command))
    }

    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        self.ask(|store| store.lookup(id))
    }

    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage> {
        self.ask(|store| store.list(query))
    }

    fn purge(&self, limit: usize) -> StoreFuture<'_, usize> {
        self.ask(|store| store.purge(limit))
    }

    fn audit(&self, before: Option<u64>, limit: usize) -> StoreFuture<'_, Vec<AuditEntry>> {
        self.ask(|store| store.audit(before, limit))
    }

    fn check(&self) -> StoreFuture<'_, ()> {
        self.ask(|store| store.check())
    }

    fn now(&self) -> Timestamp {
        self.clock.as_ref().map_or_else(|| self.store.now(), |clock| clock.now())
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.store.capabilities();
        if self.clock.is_some() {
            // The test server flushes nothing, but it keeps running while the suite closes the store and opens it again.
            capabilities.durability = Durability::Synced;
        }
        capabilities
    }
}
