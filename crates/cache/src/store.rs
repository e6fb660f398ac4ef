//! The store with a cache before it.

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use oncegate_core::{
    AttemptId, Capabilities, Claim, Command, Complete, Completion, ErrorChain, Fingerprint, IntoStore,
    OnAbandoned, Outcome, RecordId, RecordedResponse, Rewrite, State, Store, StoreError, StoreErrorKind,
    StoreFuture, StoredResponse, Timestamp, delegate_store, limits,
};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};
use tokio_util::context::TokioContext;
use tracing::{debug, info, warn};

use crate::cache::{Cache, Kind};
use crate::entry;
use crate::memory::MemoryCache;
use crate::options::{CacheOptions, MARGIN, MARGIN_PART};
use crate::populate::{PopulateQueue, Queued};
use crate::stats::CacheStats;

/// A cache before a store. See the [crate's page](crate).
pub struct CachedStore {
    inner: Arc<Inner>,
    /// The task that opens the cache.
    opening: Option<AbortHandle>,
}

struct Inner {
    cache: Opened,
    store: Arc<dyn Store>,
    options: CacheOptions,
    stats: CacheStats,
    queue: PopulateQueue,
    runtime: Handle,
    /// True while a purge of the cache runs.
    is_purging: AtomicBool,
    /// The upper half of the attempt identifiers of writes to the cache: random, drawn once.
    origin: u64,
    /// The number of writes to the cache: the lower half.
    attempts: AtomicU64,
    /// The number of commands that replaced or removed the content of a record. A write to the cache that began before one of
    /// them may have old content.
    content_changes: AtomicU64,
}

enum Opened {
    Memory(MemoryCache),
    /// Empty until the store of the cache is open.
    Store(OnceLock<Arc<dyn Store>>),
}

/// The lease of a writer on an entry. After a writer died, no other one writes the entry until the lease ends.
const WRITE_LEASE: Duration = Duration::from_secs(5);

/// The longest time of one background operation on the cache. Stores end their commands sooner.
const BACKGROUND_TIMEOUT: Duration = Duration::from_secs(30);

/// The first and the longest pause between two probes of a cache that failed.
const FIRST_PROBE_PAUSE: Duration = Duration::from_millis(100);
const MAX_PROBE_PAUSE: Duration = Duration::from_secs(5);

impl CachedStore {
    /// Puts a cache before a store. Writes to the cache run on the current Tokio runtime, which needs time enabled. The
    /// cached store may be used from any thread.
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    #[must_use]
    pub fn new(cache: Cache, store: impl IntoStore, options: CacheOptions) -> Self {
        let (cache, later) = match cache.0 {
            Kind::Memory(cache) => (Opened::Memory(cache), None),
            Kind::Store(store) => (Opened::Store(OnceLock::from(store)), None),
            Kind::Later(store) => (Opened::Store(OnceLock::new()), Some(store)),
        };
        let mut origin = [0; 8];
        // If this fails, writers of two processes may share an origin. The lease on the entry still keeps most of them apart.
        let _drawn = getrandom::fill(&mut origin);
        let inner = Arc::new(Inner {
            cache,
            store: store.into_store(),
            stats: options.stats.clone(),
            options,
            queue: PopulateQueue::default(),
            runtime: Handle::current(),
            is_purging: AtomicBool::new(false),
            origin: u64::from_ne_bytes(origin),
            attempts: AtomicU64::new(0),
            content_changes: AtomicU64::new(0),
        });
        let opening = later.map(|later| {
            inner.set_out(true);
            let weak = Arc::downgrade(&inner);
            let opening = inner.runtime.spawn(async move {
                let store = later.await;
                if let Some(inner) = weak.upgrade()
                    && let Opened::Store(cell) = &inner.cache
                {
                    let _first = cell.set(store);
                    inner.set_out(false);
                }
            });
            opening.abort_handle()
        });
        Self { inner, opening }
    }

    /// The counters of the cache.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        self.inner.stats.clone()
    }

    /// Stops writing to the cache, and waits up to `timeout` for the writes that run. The store remains usable. Dropping the
    /// store also stops further writes, but waits for none.
    pub async fn close(&self, timeout: Duration) {
        self.inner.stop_populating();
        let _in_time = tokio::time::timeout(timeout, self.inner.queue.idle()).await;
    }

    /// Applies a claim, or a completion with a response, to the store. The response is written to the cache later.
    fn apply_then_populate(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        let outcome = self.inner.store.apply(id, command);
        Box::pin(async move {
            let outcome = outcome.await?;
            match &outcome {
                // Each replay would read it from the store again, for nothing.
                Outcome::Replay(response) if !self.inner.fits(response) => {
                    self.inner.stats.add(|cells| &cells.shed);
                }
                Outcome::Replay(_) | Outcome::Completed => self.inner.populate_later(id),
                _ => {}
            }
            Ok(outcome)
        })
    }

    /// Applies a command that replaces or removes the content of a record, and removes the entry of the cache. Entries in the
    /// memory of other processes stay for as long as [`CacheOptions`] says.
    fn change_content(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        let outcome = self.inner.store.apply(id, command);
        Box::pin(async move {
            let outcome = outcome.await;
            // Also after an error: the store may have applied the command.
            self.inner.content_changes.fetch_add(1, Ordering::SeqCst);
            self.inner.remove_entry(&id).await;
            outcome
        })
    }

    fn claim(&self, id: RecordId, claim: Claim) -> StoreFuture<'_, Outcome> {
        match &self.inner.cache {
            Opened::Memory(cache) => match cache.get(&id, &claim.fingerprint, self.inner.store.now()) {
                Some(response) => {
                    self.inner.stats.add(|cells| &cells.hits);
                    Box::pin(std::future::ready(Ok(Outcome::Replay(response))))
                }
                None => {
                    self.inner.stats.add(|cells| &cells.misses);
                    self.apply_then_populate(id, Command::Claim(claim))
                }
            },
            Opened::Store(cache) => {
                let cache = cache.get().filter(|_| !self.inner.is_out());
                let Some(cache) = cache else {
                    self.inner.stats.add(|cells| &cells.skipped);
                    return self.apply_then_populate(id, Command::Claim(claim));
                };
                Box::pin(async move {
                    if let Some(response) = self.inner.ask(cache, &id, &claim.fingerprint).await {
                        return Ok(Outcome::Replay(response));
                    }
                    self.apply_then_populate(id, Command::Claim(claim)).await
                })
            }
        }
    }
}

impl Drop for CachedStore {
    fn drop(&mut self) {
        self.inner.stop_populating();
        if let Some(opening) = &self.opening {
            opening.abort();
        }
    }
}

impl Inner {
    fn is_out(&self) -> bool {
        self.stats.cells().is_out.load(Ordering::Relaxed)
    }

    fn set_out(&self, is_out: bool) {
        self.stats.cells().is_out.store(is_out, Ordering::SeqCst);
    }

    /// True if a response is small enough for the cache.
    fn fits(&self, response: &StoredResponse) -> bool {
        let is_small = response.as_encoded().len() <= self.options.max_response;
        is_small && !matches!(&self.cache, Opened::Memory(cache) if !cache.could_hold(response))
    }

    /// Looks a response up in a cache that is a store, within the timeout.
    async fn ask(
        self: &Arc<Self>,
        cache: &Arc<dyn Store>,
        id: &RecordId,
        fingerprint: &Fingerprint,
    ) -> Option<StoredResponse> {
        let entry = entry::id(&self.options.namespace, id, fingerprint);
        let asked = async { timeout(self.options.timeout, cache.lookup(entry)).await };
        let found = match self.within(asked).await {
            Ok(Ok(Some(record))) => entry::read(&entry, fingerprint, record, self.store.now())
                .map_err(|_| "its record is not an entry of the cache".to_owned()),
            Ok(Ok(None)) => Ok(None),
            Ok(Err(error)) if error.kind() == StoreErrorKind::Corrupt => Err(ErrorChain(&error).to_string()),
            Ok(Err(error)) => {
                let why = ErrorChain(&error).to_string();
                self.lose_cache(cache, &why);
                Err(why)
            }
            Err(_) => {
                let why = "it did not answer in time";
                self.lose_cache(cache, why);
                Err(why.to_owned())
            }
        };
        match &found {
            Ok(Some(_)) => self.stats.add(|cells| &cells.hits),
            Ok(None) => self.stats.add(|cells| &cells.misses),
            Err(why) => {
                self.stats.add(|cells| &cells.errors);
                debug!(why, "the cache did not answer a claim");
            }
        }
        found.ok().flatten()
    }

    /// Runs a future in the context of the store's runtime, on whichever thread it is polled.
    fn within<F: Future>(&self, future: F) -> TokioContext<F> {
        TokioContext::new(future, self.runtime.clone())
    }

    /// Stops asking the cache until it answers a probe in the background.
    fn lose_cache(self: &Arc<Self>, cache: &Arc<dyn Store>, why: &str) {
        if !self.stats.cells().is_out.swap(true, Ordering::SeqCst) {
            warn!(why, "the cache does not answer; every claim goes to the store until it does");
            self.runtime.spawn(probe(Arc::downgrade(self), cache.clone(), self.options.timeout));
        }
    }

    /// Has a worker write this record's response to the cache.
    fn populate_later(self: &Arc<Self>, id: RecordId) {
        if self.is_out() {
            return self.stats.add(|cells| &cells.shed);
        }
        let pending = &self.stats.cells().pending;
        // Counted before it is queued: otherwise a worker could finish it first, and `pending` would be below zero.
        pending.fetch_add(1, Ordering::SeqCst);
        match self.queue.add(id) {
            Queued::Waits => return,
            Queued::NeedsWorker => {
                let worker = Worker { inner: self.clone(), is_done: false };
                self.runtime.spawn(worker.run());
                return;
            }
            Queued::Known => {}
            Queued::Refused => self.stats.add(|cells| &cells.shed),
        }
        pending.fetch_sub(1, Ordering::SeqCst);
    }

    fn stop_populating(&self) {
        let dropped = self.queue.close() as u64;
        self.stats.cells().pending.fetch_sub(dropped, Ordering::SeqCst);
    }

    async fn populate(&self, id: RecordId) {
        if self.is_out() {
            return self.stats.add(|cells| &cells.shed);
        }
        let result = tokio::time::timeout(BACKGROUND_TIMEOUT, self.try_populate(id)).await;
        match result.unwrap_or_else(|_| Err(StoreError::unavailable("no reply in time"))) {
            Ok(Populated::Yes) => self.stats.add(|cells| &cells.populated),
            Ok(Populated::TooLarge) => self.stats.add(|cells| &cells.shed),
            Ok(Populated::NotNeeded) => {}
            Err(error) => {
                self.stats.add(|cells| &cells.failed);
                debug!(error = %ErrorChain(&error), "a response was not written to the cache");
            }
        }
    }

    /// Removes the entry of a record, as far as that is possible now. A failure is not an error: the entry ends by itself.
    async fn remove_entry(&self, id: &RecordId) {
        let cache = match &self.cache {
            Opened::Memory(cache) => return cache.remove(id),
            Opened::Store(cache) => cache.get().filter(|_| !self.is_out()),
        };
        let Some(cache) = cache else { return };
        let removed = async { timeout(BACKGROUND_TIMEOUT, self.void_entry(cache, id)).await };
        let removed = self.within(removed).await;
        if let Err(error) = removed.unwrap_or_else(|_| Err(StoreError::unavailable("no reply in time"))) {
            self.stats.add(|cells| &cells.failed);
            debug!(error = %ErrorChain(&error), "an entry of the cache could not be removed");
        }
    }

    /// Replaces the response of an entry by an empty one, which does not fit its checksum. So it is no entry any more, for every
    /// process that shares the cache, and it is not written again before it has ended.
    async fn void_entry(&self, cache: &Arc<dyn Store>, id: &RecordId) -> Result<(), StoreError> {
        let Some(record) = self.store.lookup(*id).await? else { return Ok(()) };
        let entry = entry::id(&self.options.namespace, id, &record.fingerprint);
        let Some(found) = cache.lookup(entry).await? else { return Ok(()) };
        let mut rewrite = Rewrite::of(&found);
        if let Some(part) = &mut rewrite.response {
            part.to = StoredResponse::new(500, &[], &[], &[])
                .map_err(|_| StoreError::invalid("an empty response is refused"))?;
            cache.apply(entry, Command::Rewrite(rewrite)).await?;
        }
        Ok(())
    }

    async fn try_populate(&self, id: RecordId) -> Result<Populated, StoreError> {
        let changes = self.content_changes.load(Ordering::SeqCst);
        let populated = self.populate_from_store(id).await;
        if self.content_changes.load(Ordering::SeqCst) != changes {
            self.remove_entry(&id).await;
        }
        populated
    }

    async fn populate_from_store(&self, id: RecordId) -> Result<Populated, StoreError> {
        let Some(record) = self.store.lookup(id).await? else { return Ok(Populated::NotNeeded) };
        let State::Completed(RecordedResponse::Replayable(response)) = record.state else {
            return Ok(Populated::NotNeeded);
        };
        // An operator may take the response of an operator back, and the caches of other processes would not learn of it. The
        // response of an owner never changes.
        if record.by_operator {
            return Ok(Populated::NotNeeded);
        }
        if !self.fits(&response) {
            return Ok(Populated::TooLarge);
        }
        let now = self.store.now();
        let remaining = record.expires_at.since(now);
        let left = remaining.saturating_sub(MARGIN + remaining / MARGIN_PART).min(self.options.keep);
        let until = now.after(left);
        if left.is_zero() {
            return Ok(Populated::NotNeeded);
        }
        match &self.cache {
            Opened::Memory(cache) => {
                let fits = cache.put(id, record.fingerprint, &response, until, left);
                Ok(if fits { Populated::Yes } else { Populated::TooLarge })
            }
            Opened::Store(cache) => {
                let Some(cache) = cache.get() else { return Ok(Populated::NotNeeded) };
                self.write(cache, &id, record.fingerprint, response, until, left).await
            }
        }
    }

    /// Writes an entry to a cache that is a store: claims its record and completes it.
    async fn write(
        &self,
        cache: &Arc<dyn Store>,
        id: &RecordId,
        fingerprint: Fingerprint,
        response: StoredResponse,
        until: Timestamp,
        left: Duration,
    ) -> Result<Populated, StoreError> {
        let entry = entry::id(&self.options.namespace, id, &fingerprint);
        let number = self.attempts.fetch_add(1, Ordering::Relaxed);
        let claim = Claim {
            attempt: AttemptId::new(u128::from(self.origin) << 64 | u128::from(number)),
            fingerprint,
            lease: WRITE_LEASE,
            retention: limits::MIN_RETENTION,
            on_abandoned: OnAbandoned::Reexecute,
            label: entry::label(&entry, until, &response),
        };
        let token = match cache.apply(entry, Command::Claim(claim)).await? {
            Outcome::Execute(grant) => grant.token,
            // The entry exists, or another process is writing it.
            _ => return Ok(Populated::NotNeeded),
        };
        let completion = Completion::Replayable(response);
        let complete = Command::Complete(Complete { token, completion, retention: left });
        match cache.apply(entry, complete).await? {
            Outcome::Completed => Ok(Populated::Yes),
            _ => Ok(Populated::NotNeeded),
        }
    }

    /// Purges the cache in the background, one purge at a time. Callers wait for the purge of the store only.
    fn purge_cache(self: &Arc<Self>, limit: usize) {
        let Opened::Store(cache) = &self.cache else { return };
        let Some(cache) = cache.get().filter(|_| !self.is_out()) else { return };
        if self.is_purging.swap(true, Ordering::SeqCst) {
            return;
        }
        let (cache, inner) = (cache.clone(), self.clone());
        self.runtime.spawn(async move {
            if let Ok(Err(error)) = tokio::time::timeout(BACKGROUND_TIMEOUT, cache.purge(limit)).await {
                debug!(error = %ErrorChain(&error), "the cache was not purged");
            }
            inner.is_purging.store(false, Ordering::SeqCst);
        });
    }
}

/// The result of a write to the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Populated {
    /// The response is in the cache.
    Yes,
    /// The record has no response to cache (any more), or the cache has it already.
    NotNeeded,
    /// The response is too large.
    TooLarge,
}

/// A task that writes responses to the cache until the queue is empty.
struct Worker {
    inner: Arc<Inner>,
    is_done: bool,
}

impl Worker {
    async fn run(mut self) {
        loop {
            while let Some(id) = self.inner.queue.next() {
                let populating = Populating { inner: &self.inner, id };
                self.inner.populate(id).await;
                drop(populating);
            }
            if !self.inner.queue.end_worker() {
                self.is_done = true;
                return;
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if !self.is_done {
            self.inner.queue.lose_worker();
        }
    }
}

/// A record whose response is being written to the cache, until this is dropped.
struct Populating<'a> {
    inner: &'a Inner,
    id: RecordId,
}

impl Drop for Populating<'_> {
    fn drop(&mut self) {
        self.inner.queue.done(&self.id);
        self.inner.stats.cells().pending.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Probes a cache that failed, with growing pauses, until it answers in time. A probe may take longer than the timeout of
/// claims, because the cache's store needs that time to notice a dead connection and open a new one.
async fn probe(inner: Weak<Inner>, cache: Arc<dyn Store>, timeout: Duration) {
    let no_record = RecordId::from_bytes([0; 32]);
    let mut pause = FIRST_PROBE_PAUSE;
    loop {
        sleep(pause).await;
        if inner.strong_count() == 0 {
            return;
        }
        let asked = Instant::now();
        let reply = tokio::time::timeout(BACKGROUND_TIMEOUT, cache.lookup(no_record)).await;
        if matches!(reply, Ok(Ok(_))) && asked.elapsed() <= timeout {
            break;
        }
        pause = (pause * 2).min(MAX_PROBE_PAUSE);
    }
    if let Some(inner) = inner.upgrade() {
        inner.set_out(false);
        info!("the cache answers again");
    }
}

impl Store for CachedStore {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        match command {
            Command::Claim(claim) => self.claim(id, claim),
            Command::Complete(Complete { completion: Completion::Replayable(ref response), .. }) => {
                if !self.inner.fits(response) {
                    self.inner.stats.add(|cells| &cells.shed);
                    return self.inner.store.apply(id, command);
                }
                self.apply_then_populate(id, command)
            }
            Command::Rewrite(_) | Command::Forget(_) => self.change_content(id, command),
            // The response of an operator is not cached: see `populate_from_store`.
            _ => self.inner.store.apply(id, command),
        }
    }

    fn purge(&self, limit: usize) -> StoreFuture<'_, usize> {
        self.inner.purge_cache(limit);
        self.inner.store.purge(limit)
    }

    delegate_store!(
        self, self.inner.store => lookup list survey audit check changed open_transactions
            advisories usage clock_skew accept_clock now
    );

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.inner.store.capabilities();
        capabilities.name = "cached";
        capabilities
    }
}

impl fmt::Debug for CachedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedStore")
            .field("store", &self.inner.store.capabilities().name)
            .finish_non_exhaustive()
    }
}
