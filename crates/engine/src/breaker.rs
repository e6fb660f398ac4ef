//! A circuit breaker between an engine and a store: while the store is unreachable, commands fail at once instead of after a
//! time-out.
//!
//! ```text
//!          a command fails or is slow: the store is probed
//! closed ──────────────────────────────────────────────────────────────────────▶ open
//!    ▲     a probe fails, or several succeed while all commands fail               │
//!    │                                                                             │ probes, at most
//!    │ one command succeeds, or none fails for a while                             │ one second apart
//!    └───────────────────────── half-open ◀────────────────────────────────────────┘
//!                               one command at a time passes     a probe succeeds
//! ```
//!
//! After failed writes, only a successful write counts: a store that can only read is of no use.
//!
//! One failed command never opens the breaker: a cut connection fails a hundred commands at once, although the store works.
//! A record that is damaged or locked ([`Extent::Record`]) does not open it, and neither does a store that is full
//! ([`Extent::Writes`]), because it still answers reads.
//!
//! Listings, surveys and the audit trail are for operators, and read as much as there is. How long they take, and if they fail,
//! says nothing about a command for one record, so they neither open nor close the breaker. Only if one could not be sent at all,
//! because there is no connection, the store is probed. The same holds for the records of a list, if they are read through
//! [`Breaker::for_lists`].

use std::fmt;
use std::future::{Future, poll_fn};
use std::hash::{BuildHasher as _, RandomState};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::Poll;
use std::time::Duration;

use oncegate_core::{
    AuditEntry, Command, ErrorChain, Extent, IntoStore, ListPage, ListQuery, Outcome, Record, RecordId,
    Store, StoreError, StoreErrorKind, StoreFuture, Survey, SurveyQuery, delegate_store,
};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout};

use crate::single_flight::lock;
use oncegate_core::ConfigError;

/// A store behind a circuit breaker. Cheap to clone; clones share one breaker.
///
/// While the store is unreachable, commands are refused at once as unavailable, with [`StoreError::is_unsent`]. A background
/// task probes the store until it answers, so no restart is necessary. A command that hangs is cancelled when a probe shows
/// that the store is unreachable, and in any case after ten times the probe timeout or 20 seconds, whichever is longer.
///
/// Must be used inside a tokio runtime with time.
///
/// ```
/// # use oncegate_core::MemoryStore;
/// use oncegate_engine::{Breaker, BreakerState, Engine};
///
/// let breaker = Breaker::new(MemoryStore::default());
/// let engine = Engine::new(breaker.clone());
/// assert_eq!(breaker.state(), BreakerState::Closed);
/// # drop(engine);
/// ```
#[derive(Clone)]
pub struct Breaker {
    shared: Arc<Shared>,
    /// The kind of a lookup.
    lookups: Kind,
}

/// The builder of a [`Breaker`].
pub struct BreakerBuilder {
    store: Arc<dyn Store>,
    probe_timeout: Duration,
    runtime: Option<Handle>,
    is_open: bool,
}

/// The state of a [`Breaker`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BreakerState {
    /// Commands pass.
    Closed,
    /// A probe succeeded: one command at a time passes as a trial.
    HalfOpen,
    /// Commands are refused.
    Open,
}

impl BreakerState {
    /// Every state.
    pub const ALL: [Self; 3] = [Self::Closed, Self::HalfOpen, Self::Open];

    /// `closed`, `half-open` or `open`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::HalfOpen => "half-open",
            Self::Open => "open",
        }
    }
}

/// The default of [`BreakerBuilder::with_probe_timeout`].
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// The longest time of a command, even if all probes succeed: this many probe timeouts, and at least this time.
const HANG_PROBE_TIMEOUTS: u32 = 10;
const MIN_HANG_TIMEOUT: Duration = Duration::from_secs(20);

/// The number of times that a command fails after a successful probe, with none that succeeds in between, until it opens.
const MAX_STRIKES: u32 = 3;

/// The first and the longest pause between probes.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// The time without a failed command after which a successful probe closes the breaker, even if no command has succeeded.
const CALM: Duration = Duration::from_secs(5);

/// The identifier of no record, for probes that read.
const UNUSED_RECORD: RecordId = RecordId::from_bytes([0; 32]);

/// The kind of a command.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reads,
    Writes,
    /// Writes, if there is anything to purge.
    Purges,
    /// Reads many records, for an operator or a count.
    Scans,
}

/// The time that a call has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Haste {
    /// A command. If it is slow, the store is probed.
    Command,
    /// A command on trial, or a check: it has at most the probe timeout.
    Trial,
    /// A scan, which takes as long as there are records.
    Scan,
}

/// Returns true if the outcome required a write.
const fn is_written(outcome: &Outcome) -> bool {
    matches!(
        outcome,
        Outcome::Execute(_)
            | Outcome::Renewed { .. }
            | Outcome::StepRecorded
            | Outcome::Completed
            | Outcome::Released
            | Outcome::Resolved { .. }
    )
}

struct Shared {
    store: Arc<dyn Store>,
    probe_timeout: Duration,
    runtime: Option<Handle>,
    /// Read by every command; changed under the lock of `watch`.
    state: AtomicU8,
    /// True if a success must take the lock.
    is_suspected: AtomicBool,
    is_degraded: AtomicBool,
    openings: AtomicU64,
    watch: Mutex<Watch>,
}

/// The state while something is wrong.
#[derive(Default)]
struct Watch {
    /// True while the task that probes the store runs.
    probing: bool,
    /// True if there was a reason for another probe since the last one began.
    again: bool,
    /// True if a probe succeeded, and no command failed since.
    excused: bool,
    strikes: u32,
    /// True if a write failed, and none succeeded since.
    writes_fail: bool,
    /// True while a trial command runs in the half-open state.
    trying: bool,
    /// The time of the last failed command.
    failed_at: Option<Instant>,
    /// The time of the last refused write.
    refused_at: Option<Instant>,
    /// The time since which it is degraded.
    since: Option<Instant>,
    /// The error for which it opened, or with which the last probe failed.
    reason: Option<String>,
}

impl BreakerBuilder {
    /// Sets the time after which a slow command causes a probe, and the longest time of a probe: 2 seconds by default, from 10
    /// milliseconds to a minute.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_probe_timeout(self, probe_timeout: Duration) -> Result<Self, ConfigError> {
        let bounds = Duration::from_millis(10)..=Duration::from_secs(60);
        Ok(Self { probe_timeout: ConfigError::check("the probe timeout", probe_timeout, bounds)?, ..self })
    }

    /// Sets the runtime of the probes. By default it is the runtime of the command that caused the probe.
    #[must_use]
    pub fn with_runtime(self, runtime: Handle) -> Self {
        Self { runtime: Some(runtime), ..self }
    }

    /// Begins open, for a store that is known to be unreachable.
    #[must_use]
    pub fn opened(self) -> Self {
        Self { is_open: true, ..self }
    }

    /// The breaker.
    #[must_use]
    pub fn build(self) -> Breaker {
        let state = if self.is_open { BreakerState::Open } else { BreakerState::Closed };
        let shared = Arc::new(Shared {
            store: self.store,
            probe_timeout: self.probe_timeout,
            runtime: self.runtime,
            state: AtomicU8::new(state as u8),
            is_suspected: AtomicBool::new(self.is_open),
            is_degraded: AtomicBool::new(self.is_open),
            openings: AtomicU64::new(self.is_open.into()),
            watch: Mutex::new(Watch { since: self.is_open.then(Instant::now), ..Watch::default() }),
        });
        if self.is_open {
            shared.suspect();
        }
        Breaker { shared, lookups: Kind::Reads }
    }
}

impl fmt::Debug for BreakerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BreakerBuilder").field("probe_timeout", &self.probe_timeout).finish_non_exhaustive()
    }
}

impl Breaker {
    /// A closed breaker for this store, with the defaults.
    #[must_use]
    pub fn new(store: impl IntoStore) -> Self {
        Self::builder(store).build()
    }

    /// A builder for a breaker for this store.
    #[must_use]
    pub fn builder(store: impl IntoStore) -> BreakerBuilder {
        BreakerBuilder {
            store: store.into_store(),
            probe_timeout: PROBE_TIMEOUT,
            runtime: None,
            is_open: false,
        }
    }

    /// The same breaker, for a program that shows operators many records: how long a lookup takes, and if it fails, neither opens
    /// nor closes it, and a lookup passes while the breaker is half-open. Commands are as before.
    #[must_use]
    pub fn for_lists(&self) -> Self {
        Self { shared: self.shared.clone(), lookups: Kind::Scans }
    }

    /// The state.
    #[must_use]
    pub fn state(&self) -> BreakerState {
        self.shared.state()
    }

    /// The number of times that the breaker opened.
    #[must_use]
    pub fn openings(&self) -> u64 {
        self.shared.openings.load(Ordering::Relaxed)
    }

    /// The error for which commands are refused, with its causes; that of the last probe, if one has failed. `None` while the
    /// breaker is closed, and if it [began open](BreakerBuilder::opened), before the first probe.
    #[must_use]
    pub fn reason(&self) -> Option<String> {
        lock(&self.shared.watch).reason.clone()
    }

    /// Returns true if the store is known to be unreachable or to refuse writes.
    #[must_use]
    pub fn is_degraded(&self) -> bool {
        self.shared.is_degraded.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Breaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Breaker")
            .field("store", &self.shared.store.capabilities().name)
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

impl Store for Breaker {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        Box::pin(self.shared.pass(Kind::Writes, is_written, move |store| store.apply(id, command)))
    }

    fn try_apply(&self, id: RecordId, command: &Command) -> Option<Result<Outcome, StoreError>> {
        // A refusal or a trial is not for the common path.
        if self.state() != BreakerState::Closed {
            return None;
        }
        let reply = self.shared.store.try_apply(id, command)?;
        self.shared.note(&reply, Kind::Writes, is_written, None);
        Some(reply)
    }

    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        Box::pin(self.shared.pass(self.lookups, |_| false, move |store| store.lookup(id)))
    }

    /// Refused at once while open. Its result does not matter to the breaker.
    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage> {
        Box::pin(self.shared.pass(Kind::Scans, |_| false, move |store| store.list(query)))
    }

    fn survey(&self, query: SurveyQuery) -> StoreFuture<'_, Option<Survey>> {
        Box::pin(self.shared.pass(Kind::Scans, |_| false, move |store| store.survey(query)))
    }

    /// As the other commands, but a success does not count, because the store may have had nothing to do.
    fn purge(&self, limit: usize) -> StoreFuture<'_, usize> {
        Box::pin(self.shared.pass(Kind::Purges, |_| false, move |store| store.purge(limit)))
    }

    fn audit(&self, before: Option<u64>, limit: usize) -> StoreFuture<'_, Vec<AuditEntry>> {
        Box::pin(self.shared.pass(Kind::Scans, |_| false, move |store| store.audit(before, limit)))
    }

    /// Refused at once while open; otherwise the store's own result.
    fn check(&self) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            if self.state() == BreakerState::Open {
                return Err(self.shared.refusal());
            }
            let reply = self.shared.bounded(self.shared.store.check(), Haste::Trial).await;
            if reply.is_err() {
                self.shared.suspect();
            }
            reply
        })
    }

    delegate_store!(
        self, self.shared.store =>
        changed open_transactions advisories usage clock_skew accept_clock now capabilities
    );
}

impl Shared {
    fn state(&self) -> BreakerState {
        match self.state.load(Ordering::Acquire) {
            0 => BreakerState::Closed,
            1 => BreakerState::HalfOpen,
            _ => BreakerState::Open,
        }
    }

    /// Must be called with the lock of `watch` held.
    fn set_state(&self, state: BreakerState) {
        self.state.store(state as u8, Ordering::Release);
    }

    fn refusal(self: &Arc<Self>) -> StoreError {
        // The task of the probes may have ended with its runtime.
        self.suspect();
        StoreError::unavailable("the store is unreachable; it is probed in the background until it answers")
            .with_nothing_sent()
    }

    /// Sends a command, if it may pass. `is_written` returns true if the result required a write.
    async fn pass<'a, T>(
        self: &'a Arc<Self>,
        kind: Kind,
        is_written: impl Fn(&T) -> bool,
        call: impl FnOnce(&'a dyn Store) -> StoreFuture<'a, T>,
    ) -> Result<T, StoreError> {
        let trial = match self.state() {
            BreakerState::Closed => None,
            // It may not take the place of a command that shows if the store works again.
            BreakerState::HalfOpen if kind == Kind::Scans => None,
            BreakerState::HalfOpen if kind != Kind::Purges => {
                Some(Trial::begin(self).ok_or_else(|| self.refusal())?)
            }
            _ => return Err(self.refusal()),
        };
        let haste = match (kind, &trial) {
            (Kind::Scans, _) => Haste::Scan,
            (_, Some(_)) => Haste::Trial,
            (_, None) => Haste::Command,
        };
        let reply = self.bounded(call(&*self.store), haste).await;
        self.note(&reply, kind, is_written, trial);
        reply
    }

    /// Notes the reply to a command that passed.
    fn note<T>(
        self: &Arc<Self>,
        reply: &Result<T, StoreError>,
        kind: Kind,
        is_written: impl Fn(&T) -> bool,
        trial: Option<Trial<'_>>,
    ) {
        match reply {
            Err(error) if kind == Kind::Scans => {
                if error.kind() == StoreErrorKind::Unavailable
                    && error.extent() == Extent::Store
                    && error.is_unsent()
                {
                    self.suspect();
                }
            }
            Ok(_) if matches!(kind, Kind::Purges | Kind::Scans) => {}
            Ok(reply) => self.succeeded(is_written(reply), trial),
            // The store works: it refused this command.
            Err(error) if error.kind() != StoreErrorKind::Unavailable => {
                self.succeeded(kind == Kind::Writes, trial);
            }
            Err(error) => match error.extent() {
                Extent::Record => {}
                Extent::Writes => {
                    self.refused_a_write(error);
                    self.succeeded(true, trial);
                }
                _ => self.failed(error, kind, trial),
            },
        }
    }

    /// Waits for a result. A slow command is cancelled once the store is known to be unreachable.
    async fn bounded<T>(self: &Arc<Self>, call: StoreFuture<'_, T>, haste: Haste) -> Result<T, StoreError> {
        let mut call = pin!(call);
        // A result that is ready at once needs no timer.
        if let Poll::Ready(reply) = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await {
            return reply;
        }
        let begun = Instant::now();
        let give_up = match haste {
            Haste::Trial => self.probe_timeout,
            Haste::Command | Haste::Scan => (self.probe_timeout * HANG_PROBE_TIMEOUTS).max(MIN_HANG_TIMEOUT),
        };
        let step = (self.probe_timeout / 8).max(Duration::from_millis(1));
        loop {
            if let Ok(reply) = timeout(step, &mut call).await {
                return reply;
            }
            if haste != Haste::Scan && begun.elapsed() >= self.probe_timeout {
                self.suspect();
            }
            let is_away = match self.state() {
                BreakerState::Closed => false,
                BreakerState::HalfOpen => haste == Haste::Command,
                BreakerState::Open => true,
            };
            if is_away || begun.elapsed() >= give_up {
                return Err(StoreError::unavailable("the store did not answer in time"));
            }
        }
    }

    /// Notes a command that succeeded, or that the store refused. `proves_writes` is true if it shows that writes succeed.
    fn succeeded(&self, proves_writes: bool, trial: Option<Trial<'_>>) {
        // A cheap read first: the common path writes no memory that threads share.
        if !self.is_suspected.load(Ordering::Relaxed) {
            return;
        }
        let mut watch = lock(&self.watch);
        if proves_writes || watch.failed_at.is_none_or(|at| at.elapsed() >= CALM) {
            watch.writes_fail = false;
        }
        match self.state() {
            // Reads do not show that writes succeed again.
            _ if watch.writes_fail => {}
            BreakerState::Closed => {
                watch.strikes = 0;
                watch.excused = false;
                self.is_suspected.store(watch.probing, Ordering::Relaxed);
            }
            BreakerState::HalfOpen if trial.is_some() => self.close(&mut watch),
            // It was sent before the breaker opened.
            _ => {}
        }
        drop(watch);
        drop(trial);
    }

    fn failed(self: &Arc<Self>, error: &StoreError, kind: Kind, trial: Option<Trial<'_>>) {
        {
            let mut watch = lock(&self.watch);
            watch.failed_at = Some(Instant::now());
            watch.writes_fail |= kind != Kind::Reads;
            match self.state() {
                BreakerState::HalfOpen if trial.is_some() => self.open(&mut watch, error),
                BreakerState::Closed if watch.excused => {
                    watch.excused = false;
                    watch.strikes += 1;
                    if watch.strikes >= MAX_STRIKES {
                        self.open(&mut watch, error);
                    }
                }
                _ => {}
            }
        }
        drop(trial);
        self.suspect();
    }

    fn refused_a_write(self: &Arc<Self>, error: &StoreError) {
        {
            let mut watch = lock(&self.watch);
            watch.refused_at = Some(Instant::now());
            self.degrade(&mut watch, error);
        }
        self.suspect();
    }

    fn open(&self, watch: &mut Watch, why: &StoreError) {
        let before = self.state();
        self.set_state(BreakerState::Open);
        watch.reason = Some(ErrorChain(why).to_string());
        watch.strikes = 0;
        watch.excused = false;
        if before == BreakerState::Closed {
            self.openings.fetch_add(1, Ordering::Relaxed);
            tracing::error!(error = %ErrorChain(why), "the store is unreachable; commands are refused until it answers a probe");
            watch.since.get_or_insert_with(Instant::now);
            self.is_degraded.store(true, Ordering::Relaxed);
        }
    }

    fn close(&self, watch: &mut Watch) {
        self.set_state(BreakerState::Closed);
        watch.reason = None;
        watch.strikes = 0;
        watch.excused = false;
        watch.writes_fail = false;
        if watch.refused_at.is_none() {
            self.restore(watch);
        }
    }

    fn degrade(&self, watch: &mut Watch, why: &StoreError) {
        if !self.is_degraded.swap(true, Ordering::Relaxed) {
            watch.since = Some(Instant::now());
            tracing::error!(error = %ErrorChain(why), "the store refuses writes or new keys; recorded keys are still answered");
        }
    }

    fn restore(&self, watch: &mut Watch) {
        watch.refused_at = None;
        if self.is_degraded.swap(false, Ordering::Relaxed) {
            let after = watch.since.take().map(|since| since.elapsed()).unwrap_or_default();
            tracing::info!(?after, "the store works again");
        }
    }

    /// Starts the task that probes the store, if it does not run.
    fn suspect(self: &Arc<Self>) {
        let mut watch = lock(&self.watch);
        watch.again = true;
        if watch.probing {
            return;
        }
        let Some(runtime) = self.runtime.clone().or_else(|| Handle::try_current().ok()) else { return };
        watch.probing = true;
        self.is_suspected.store(true, Ordering::Relaxed);
        drop(watch);
        let probing = ProbeTask { shared: Arc::downgrade(self), is_done: false };
        runtime.spawn(async move { probing.run().await });
    }

    /// Probes the store, for at most the probe timeout.
    async fn probe(&self) -> Result<(), StoreError> {
        let asked = async {
            self.store.check().await?;
            // The check may succeed while records cannot be read, for example because their table is locked.
            self.store.lookup(UNUSED_RECORD).await.map(drop)
        };
        match timeout(self.probe_timeout, asked).await {
            Ok(reply) => reply,
            Err(_) => Err(StoreError::unavailable("the store did not answer a probe in time")),
        }
    }

    /// Notes the result of a probe. Returns true if no further probe is needed.
    fn probed(&self, reply: &Result<(), StoreError>) -> bool {
        let mut watch = lock(&self.watch);
        let is_away = |error: &StoreError| {
            error.kind() == StoreErrorKind::Unavailable && error.extent() == Extent::Store
        };
        match (self.state(), reply) {
            (_, Err(error)) if is_away(error) => self.open(&mut watch, error),
            (BreakerState::Open, _) => self.set_state(BreakerState::HalfOpen),
            // A trial command runs and will decide.
            (BreakerState::HalfOpen, _) if watch.trying => {}
            (BreakerState::HalfOpen, Ok(())) => {
                if watch.failed_at.is_none_or(|at| at.elapsed() >= CALM) {
                    self.close(&mut watch);
                }
            }
            (_, Err(error)) => {
                self.set_state(BreakerState::Closed);
                watch.reason = None;
                self.degrade(&mut watch, error);
            }
            (_, Ok(())) => {
                watch.excused = true;
                if watch.refused_at.is_none_or(|at| at.elapsed() >= CALM) {
                    self.restore(&mut watch);
                }
            }
        }
        let is_done = self.state() == BreakerState::Closed
            && !self.is_degraded.load(Ordering::Relaxed)
            && !std::mem::take(&mut watch.again);
        if is_done {
            watch.probing = false;
        }
        is_done
    }
}

/// The only command that passes in the half-open state.
struct Trial<'a>(&'a Shared);

impl<'a> Trial<'a> {
    fn begin(shared: &'a Shared) -> Option<Self> {
        let mut watch = lock(&shared.watch);
        if watch.trying || shared.state() == BreakerState::Open {
            return None;
        }
        watch.trying = true;
        Some(Self(shared))
    }
}

impl Drop for Trial<'_> {
    fn drop(&mut self) {
        lock(&self.0.watch).trying = false;
    }
}

/// The task that probes the store until it works or the breaker is dropped. If the task is dropped with its runtime, another
/// one may start.
struct ProbeTask {
    shared: Weak<Shared>,
    is_done: bool,
}

impl ProbeTask {
    async fn run(mut self) {
        let jitter = RandomState::new();
        let mut pause = FIRST_PAUSE;
        for number in 0_u64.. {
            {
                let Some(shared) = self.shared.upgrade() else { return };
                lock(&shared.watch).again = false;
                let reply = shared.probe().await;
                if shared.probed(&reply) {
                    // Another task may start from now on.
                    self.is_done = true;
                    return;
                }
            }
            // Random, from half the pause to the whole, so that many processes do not probe at the same time.
            let part = u32::try_from(jitter.hash_one(number) % 512).unwrap_or(0) + 512;
            sleep(pause * part / 1024).await;
            // The pause never shrinks, so a store that comes and goes is not probed in haste.
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }
}

impl Drop for ProbeTask {
    fn drop(&mut self) {
        if let (false, Some(shared)) = (self.is_done, self.shared.upgrade()) {
            lock(&shared.watch).probing = false;
        }
    }
}
