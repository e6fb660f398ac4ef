//! The store itself: what callers hold.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use oncegate_core::{
    Advisory, Answer, AttemptId, AuditEntry, Capabilities, Claim, Command, Complete, Completion, ErrorChain,
    Fingerprint, IntoStore, ListPage, ListQuery, OnAbandoned, Outcome, Record, RecordId, State, Store,
    StoreError, StoreErrorKind, StoreFuture, StoredResponse, Timestamp, limits,
};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};
use tokio_util::context::TokioContext;
use tracing::{debug, info, warn};

use crate::cache::{Cache, Kind};
use crate::entry;
use crate::fills::{Fills, Put};
use crate::memory::MemoryCache;
use crate::options::{CacheOptions, MARGIN, MARGIN_PART};
use crate::stats::CacheStats;

/// A front before a back. See the [crate's page](crate).
pub struct CachedStore {
    inner: Arc<Inner>,
    /// Opens the front.
    opening: Option<AbortHandle>,
}

struct Inner {
    front: Opened,
    back: Arc<dyn Store>,
    options: CacheOptions,
    stats: CacheStats,
    fills: Fills,
    runtime: Handle,
    /// A purge of the front is under way.
    is_purging: AtomicBool,
    /// Random, drawn once: the upper half of the attempts by which the front is filled.
    origin: u64,
    /// How many there were: the lower half.
    attempts: AtomicU64,
}

enum Opened {
    Memory(MemoryCache),
    /// Nothing, as long as it was not opened.
    Store(OnceLock<Arc<dyn Store>>),
}

/// How long somebody who fills the front owns the entry. One that died of it keeps others off for so long.
const FILL_LEASE: Duration = Duration::from_secs(5);

/// How long one fill, or one question whether the front is there again, may take. Stores end their commands sooner.
const FRONT_LIMIT: Duration = Duration::from_secs(30);

/// Between two questions whether the front is there again: at first, and at the longest.
const ASK_FIRST: Duration = Duration::from_millis(100);
const ASK_LAST: Duration = Duration::from_secs(5);

impl CachedStore {
    /// Puts a front before a back. The runtime that it is called on, with time enabled, fills the front; the store may then
    /// be used from any thread.
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    #[must_use]
    pub fn new(front: Cache, back: impl IntoStore, options: CacheOptions) -> Self {
        let (front, later) = match front.0 {
            Kind::Memory(cache) => (Opened::Memory(cache), None),
            Kind::Store(store) => (Opened::Store(OnceLock::from(store)), None),
            Kind::Later(store) => (Opened::Store(OnceLock::new()), Some(store)),
        };
        let mut origin = [0; 8];
        // Without it, the entry's own lease keeps those who fill it apart for most of the time.
        let _drawn = getrandom::fill(&mut origin);
        let inner = Arc::new(Inner {
            front,
            back: back.into_store(),
            stats: options.stats.clone(),
            options,
            fills: Fills::default(),
            runtime: Handle::current(),
            is_purging: AtomicBool::new(false),
            origin: u64::from_ne_bytes(origin),
            attempts: AtomicU64::new(0),
        });
        let opening = later.map(|later| {
            inner.stats.cells().is_out.store(1, Ordering::SeqCst);
            let weak = Arc::downgrade(&inner);
            let opening = inner.runtime.spawn(async move {
                let store = later.await;
                if let Some(inner) = weak.upgrade()
                    && let Opened::Store(place) = &inner.front
                {
                    let _first = place.set(store);
                    inner.stats.cells().is_out.store(0, Ordering::SeqCst);
                }
            });
            opening.abort_handle()
        });
        Self { inner, opening }
    }

    /// What the front was good for.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        self.inner.stats.clone()
    }

    /// Puts nothing more into the front, and waits for what is under way, for so long at the most. The store can be used
    /// after that, too; dropping it without this leaves what is under way to itself.
    pub async fn close(&self, timeout: Duration) {
        self.inner.stop_filling();
        let _in_time = tokio::time::timeout(timeout, self.inner.fills.idle()).await;
    }

    /// Applies a command at the back, and has the front filled where the outcome says that there is an answer to keep.
    fn apply_then_fill(
        &self,
        id: RecordId,
        command: Command,
        is_answered: impl FnOnce(&Outcome) -> bool + Send + 'static,
    ) -> StoreFuture<'_, Outcome> {
        let outcome = self.inner.back.apply(id, command);
        Box::pin(async move {
            let outcome = outcome.await?;
            match &outcome {
                // It would be read from the back for nothing, each time that it is replayed.
                Outcome::Replay(response) if !self.inner.fits(response) => {
                    self.inner.stats.add(|cells| &cells.shed);
                }
                outcome if is_answered(outcome) => self.inner.want(id),
                _ => {}
            }
            Ok(outcome)
        })
    }

    fn claim(&self, id: RecordId, claim: Claim) -> StoreFuture<'_, Outcome> {
        let by_back = |outcome: &Outcome| matches!(outcome, Outcome::Replay(_));
        match &self.inner.front {
            Opened::Memory(cache) => match cache.get(&id, &claim.fingerprint, self.inner.back.now()) {
                Some(response) => {
                    self.inner.stats.add(|cells| &cells.hits);
                    Box::pin(std::future::ready(Ok(Outcome::Replay(response))))
                }
                None => {
                    self.inner.stats.add(|cells| &cells.misses);
                    self.apply_then_fill(id, Command::Claim(claim), by_back)
                }
            },
            Opened::Store(front) => {
                let front = front.get().filter(|_| !self.inner.is_out());
                let Some(front) = front else {
                    self.inner.stats.add(|cells| &cells.skipped);
                    return self.apply_then_fill(id, Command::Claim(claim), by_back);
                };
                Box::pin(async move {
                    if let Some(response) = self.inner.ask(front, &id, &claim.fingerprint).await {
                        return Ok(Outcome::Replay(response));
                    }
                    self.apply_then_fill(id, Command::Claim(claim), by_back).await
                })
            }
        }
    }
}

impl Drop for CachedStore {
    fn drop(&mut self) {
        self.inner.stop_filling();
        if let Some(opening) = &self.opening {
            opening.abort();
        }
    }
}

impl Inner {
    fn is_out(&self) -> bool {
        self.stats.cells().is_out.load(Ordering::Relaxed) != 0
    }

    /// Whether an answer is small enough for the front.
    fn fits(&self, response: &StoredResponse) -> bool {
        let small = response.as_encoded().len() <= self.options.max_response;
        small && !matches!(&self.front, Opened::Memory(cache) if !cache.could_hold(response))
    }

    /// Asks a front that is a store, and waits no longer than its patience.
    async fn ask(
        self: &Arc<Self>,
        front: &Arc<dyn Store>,
        id: &RecordId,
        fingerprint: &Fingerprint,
    ) -> Option<StoredResponse> {
        let entry = entry::id(&self.options.namespace, id, fingerprint);
        let asked = async { timeout(self.options.timeout, front.lookup(entry)).await };
        let found = match self.within(asked).await {
            Ok(Ok(Some(record))) => entry::read(&entry, fingerprint, record, self.back.now())
                .map_err(|_| "it holds something that is no entry".to_owned()),
            Ok(Ok(None)) => Ok(None),
            Ok(Err(error)) if error.kind() == StoreErrorKind::Corrupt => Err(ErrorChain(&error).to_string()),
            Ok(Err(error)) => {
                let why = ErrorChain(&error).to_string();
                self.lose_front(front, &why);
                Err(why)
            }
            Err(_) => {
                self.lose_front(front, "it did not answer in time");
                Err("it did not answer in time".to_owned())
            }
        };
        match &found {
            Ok(Some(_)) => self.stats.add(|cells| &cells.hits),
            Ok(None) => self.stats.add(|cells| &cells.misses),
            Err(why) => {
                self.stats.add(|cells| &cells.errors);
                debug!(why, "the front did not answer a claim");
            }
        }
        found.ok().flatten()
    }

    /// Runs a future with the store's runtime at hand, whoever polls it.
    fn within<F: Future>(&self, future: F) -> TokioContext<F> {
        TokioContext::new(future, self.runtime.clone())
    }

    /// Asks the front no more until it answers again, which is tried in the background.
    fn lose_front(self: &Arc<Self>, front: &Arc<dyn Store>, why: &str) {
        if self.stats.cells().is_out.swap(1, Ordering::SeqCst) == 0 {
            warn!(why, "the front does not answer; every claim goes to the back until it does");
            self.runtime.spawn(ask_again(Arc::downgrade(self), front.clone(), self.options.timeout));
        }
    }

    /// Has the front filled with this record's answer, some time.
    fn want(self: &Arc<Self>, id: RecordId) {
        if self.is_out() {
            return self.stats.add(|cells| &cells.shed);
        }
        let pending = &self.stats.cells().pending;
        // Counted first, so that it never looks as if there were nothing to do.
        pending.fetch_add(1, Ordering::SeqCst);
        match self.fills.put(id) {
            Put::Waits => return,
            Put::Start => {
                let worker = Worker { inner: self.clone(), is_done: false };
                self.runtime.spawn(worker.run());
                return;
            }
            Put::Known => {}
            Put::Full => self.stats.add(|cells| &cells.shed),
        }
        pending.fetch_sub(1, Ordering::SeqCst);
    }

    fn stop_filling(&self) {
        let forgotten = self.fills.close() as u64;
        self.stats.cells().pending.fetch_sub(forgotten, Ordering::SeqCst);
    }

    async fn fill(&self, id: RecordId) {
        if self.is_out() {
            return self.stats.add(|cells| &cells.shed);
        }
        let result = tokio::time::timeout(FRONT_LIMIT, self.try_fill(id)).await;
        match result.unwrap_or_else(|_| Err(StoreError::unavailable("no answer in time"))) {
            Ok(Filled::Yes) => self.stats.add(|cells| &cells.fills),
            Ok(Filled::Unfit) => self.stats.add(|cells| &cells.shed),
            Ok(Filled::Needless) => {}
            Err(error) => {
                self.stats.add(|cells| &cells.failed_fills);
                debug!(error = %ErrorChain(&error), "an answer was not put into the front");
            }
        }
    }

    async fn try_fill(&self, id: RecordId) -> Result<Filled, StoreError> {
        let Some(record) = self.back.lookup(id).await? else { return Ok(Filled::Needless) };
        let State::Completed(Answer::Replayable(response)) = record.state else {
            return Ok(Filled::Needless);
        };
        // An operator may take it back, and no front of another process would learn of that. What its owner completed never
        // changes.
        if record.by_operator {
            return Ok(Filled::Needless);
        }
        if !self.fits(&response) {
            return Ok(Filled::Unfit);
        }
        let now = self.back.now();
        let lasts = record.expires_at.since(now);
        let left = lasts.saturating_sub(MARGIN + lasts / MARGIN_PART).min(self.options.keep);
        let until = now.after(left);
        if left.is_zero() {
            return Ok(Filled::Needless);
        }
        match &self.front {
            Opened::Memory(cache) => {
                let fits = cache.put(id, record.fingerprint, &response, until, left);
                Ok(if fits { Filled::Yes } else { Filled::Unfit })
            }
            Opened::Store(front) => {
                let Some(front) = front.get() else { return Ok(Filled::Needless) };
                self.write(front, &id, record.fingerprint, response, until, left).await
            }
        }
    }

    /// Writes an entry into a store, with the commands that there are.
    async fn write(
        &self,
        front: &Arc<dyn Store>,
        id: &RecordId,
        fingerprint: Fingerprint,
        response: StoredResponse,
        until: Timestamp,
        left: Duration,
    ) -> Result<Filled, StoreError> {
        let entry = entry::id(&self.options.namespace, id, &fingerprint);
        let number = self.attempts.fetch_add(1, Ordering::Relaxed);
        let claim = Claim {
            attempt: AttemptId::new(u128::from(self.origin) << 64 | u128::from(number)),
            fingerprint,
            lease: FILL_LEASE,
            retention: limits::MIN_RETENTION,
            on_abandoned: OnAbandoned::Reexecute,
            label: entry::label(&entry, until, &response),
        };
        let token = match front.apply(entry, Command::Claim(claim)).await? {
            Outcome::Execute(grant) => grant.token,
            // It is there, or somebody else is putting it there.
            _ => return Ok(Filled::Needless),
        };
        let completion = Completion::Replayable(response);
        let complete = Command::Complete(Complete { token, completion, retention: left });
        match front.apply(entry, complete).await? {
            Outcome::Completed => Ok(Filled::Yes),
            _ => Ok(Filled::Needless),
        }
    }

    /// Purges the front in the background, once at a time. The back's purge is what callers ask for.
    fn purge_front(self: &Arc<Self>, limit: usize) {
        let Opened::Store(front) = &self.front else { return };
        let Some(front) = front.get().filter(|_| !self.is_out()) else { return };
        if self.is_purging.swap(true, Ordering::SeqCst) {
            return;
        }
        let (front, inner) = (front.clone(), self.clone());
        self.runtime.spawn(async move {
            if let Ok(Err(error)) = tokio::time::timeout(FRONT_LIMIT, front.purge(limit)).await {
                debug!(error = %ErrorChain(&error), "the front was not purged");
            }
            inner.is_purging.store(false, Ordering::SeqCst);
        });
    }
}

/// What became of a fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Filled {
    /// The answer is in the front.
    Yes,
    /// There is no answer to keep (any more), or it is there already.
    Needless,
    /// It is too large.
    Unfit,
}

/// Fills the front as long as there is something to fill it with.
struct Worker {
    inner: Arc<Inner>,
    is_done: bool,
}

impl Worker {
    async fn run(mut self) {
        loop {
            while let Some(id) = self.inner.fills.next() {
                let filling = Filling { inner: &self.inner, id };
                self.inner.fill(id).await;
                drop(filling);
            }
            if !self.inner.fills.end_worker() {
                self.is_done = true;
                return;
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if !self.is_done {
            self.inner.fills.lose_worker();
        }
    }
}

/// One record that is being filled, until it is dropped.
struct Filling<'a> {
    inner: &'a Inner,
    id: RecordId,
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        self.inner.fills.done(&self.id);
        self.inner.stats.cells().pending.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Asks a front that was lost, more and more seldom, until it answers in time. Each question may take as long as the store
/// itself gives it: that is how it finds out that its connection is dead, and makes another one.
async fn ask_again(inner: Weak<Inner>, front: Arc<dyn Store>, timeout: Duration) {
    let nobody = RecordId::from_bytes([0; 32]);
    let mut pause = ASK_FIRST;
    loop {
        sleep(pause).await;
        if inner.strong_count() == 0 {
            return;
        }
        let asked = Instant::now();
        let answer = tokio::time::timeout(FRONT_LIMIT, front.lookup(nobody)).await;
        if matches!(answer, Ok(Ok(_))) && asked.elapsed() <= timeout {
            break;
        }
        pause = (pause * 2).min(ASK_LAST);
    }
    if let Some(inner) = inner.upgrade() {
        inner.stats.cells().is_out.store(0, Ordering::SeqCst);
        info!("the front answers again");
    }
}

impl Store for CachedStore {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        match command {
            Command::Claim(claim) => self.claim(id, claim),
            Command::Complete(Complete { completion: Completion::Replayable(ref response), .. }) => {
                if !self.inner.fits(response) {
                    self.inner.stats.add(|cells| &cells.shed);
                    return self.inner.back.apply(id, command);
                }
                self.apply_then_fill(id, command, |outcome| *outcome == Outcome::Completed)
            }
            // The answer of an operator is not put into the front: see `try_fill`.
            _ => self.inner.back.apply(id, command),
        }
    }

    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        self.inner.back.lookup(id)
    }

    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage> {
        self.inner.back.list(query)
    }

    fn purge(&self, limit: usize) -> StoreFuture<'_, usize> {
        self.inner.purge_front(limit);
        self.inner.back.purge(limit)
    }

    fn audit(&self, before: Option<u64>, limit: usize) -> StoreFuture<'_, Vec<AuditEntry>> {
        self.inner.back.audit(before, limit)
    }

    fn check(&self) -> StoreFuture<'_, ()> {
        self.inner.back.check()
    }

    fn changed(&self, id: RecordId) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        self.inner.back.changed(id)
    }

    fn advisories(&self) -> Vec<Advisory> {
        self.inner.back.advisories()
    }

    fn accept_clock(&self) -> StoreFuture<'_, Option<Duration>> {
        self.inner.back.accept_clock()
    }

    fn now(&self) -> Timestamp {
        self.inner.back.now()
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.inner.back.capabilities();
        capabilities.name = "cached";
        capabilities
    }
}

impl fmt::Debug for CachedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedStore")
            .field("back", &self.inner.back.capabilities().name)
            .finish_non_exhaustive()
    }
}
