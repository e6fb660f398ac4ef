//! The relay: publishes the messages of an outbox.
//!
//! A relay takes *runs*: consecutive messages of one topic and order key, under one lease. The states of a run:
//!
//! ```text
//!              take                       last row confirmed, or a row was not
//!   in the ──────────▶ held: a task  ─────────────────────────────────────────▶ finished
//!   outbox             publishes its                                               │ settle: confirmed rows are
//!     ▲                rows in order                                               │ deleted, the others wait for
//!     │                    │ lease ended, another relay took the line              │ their pause or an operator
//!     │                    ▼                                                       ▼
//!     └──────────────── lost: its outcomes are dropped                        in the outbox, or gone
//! ```
//!
//! One loop does everything in turn: collect finished tasks, settle them, renew leases, take more. It uses one
//! connection. Two pauses interrupt it. During a *database pause* it makes no calls. During a *broker pause* it takes
//! no runs; afterwards it takes a few messages as a probe. When the relay is stopped, it takes nothing more and settles
//! what its tasks have published.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use oncegate_core::{ErrorChain, StoreError};
use oncegate_engine::{ConfigError, catch_panic};
use oncegate_inbox::{MAX_ERROR_BYTES, PublishError, Publisher, jittered};
use oncegate_postgres::sqlx::postgres::PgPool;
use tokio::sync::{Notify, Semaphore};
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, info, warn};

use super::event::{RelayEvent, RelayEventKind, RelayObserver};
use super::table::{
    CALL_TIMEOUT, FinishedRun, Lease, LineRun, OutboxRow, OutboxTable, RowOutcome, TakeLimits,
};
use crate::receipts;

/// Publishes the messages of an [`Outbox`](super::Outbox) until each is confirmed, and then deletes them.
///
/// - **Nothing is lost**: each committed message is published at least once, also after crashes. It is published again
///   if its confirmation is unknown. It has the same identifier each time, so an inbox processes it once.
/// - **Order**: a message is first published after the message before it in its topic and order key was confirmed. This
///   holds for any number of relays. Only copies of earlier messages may come in between.
/// - **No waiting for the broker**: no transaction is open while a message is published. A relay holds its messages by
///   leases. If another relay has taken over a line, the outcomes of the first relay for it are ignored.
/// - **Failures**: a message that is not confirmed is tried again after a pause. This includes timeouts and panics of
///   the publisher. After several failures in a row the whole relay pauses. A message that the broker refuses is kept
///   for an operator, see [`OnRefused`].
///
/// The role of the pool needs the right to execute `oncegate.outbox_take`, `oncegate.outbox_renew` and
/// `oncegate.outbox_settle`. The relay uses one connection at a time.
#[must_use = "a relay publishes only while `run` is polled"]
pub struct Relay<P> {
    publisher: P,
    table: OutboxTable,
    settings: Settings,
    wake: Arc<Notify>,
}

struct Settings {
    limits: TakeLimits,
    concurrency: usize,
    poll: Duration,
    backoff: (Duration, Duration),
    publish_timeout: Duration,
    shutdown_timeout: Duration,
    on_refused: OnRefused,
    observer: Arc<dyn RelayObserver>,
}

/// The treatment of messages behind a refused one with the same topic and order key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnRefused {
    /// They wait until an operator publishes the refused message again, or drops it.
    Wait,
    /// They are published without it.
    Continue,
}

/// Wakes a relay in the same process after a commit, so that it does not wait for its next poll.
#[derive(Clone, Debug)]
pub struct RelayWaker(Arc<Notify>);

impl RelayWaker {
    /// Wakes the relay. Call it after the commit. It is cheap, and harmless if nothing is to be published.
    pub fn wake(&self) {
        self.0.notify_one();
    }
}

impl<P> fmt::Debug for Relay<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay")
            .field("concurrency", &self.settings.concurrency)
            .field("lease", &self.table.lease)
            .field("poll", &self.settings.poll)
            .finish_non_exhaustive()
    }
}

/// The number of failures in a row after which the whole relay pauses.
const MAX_FAILURES: u32 = 8;

/// The longest broker pause, and the number of messages that probe the broker after it.
const MAX_BROKER_PAUSE: Duration = Duration::from_secs(5);
const PROBE_ROWS: usize = 16;

/// The shortest and the longest pause while the database is out of reach.
const DATABASE_PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// The number of halvings of the byte limit after a slow call, and their maximum.
const HALVINGS_PER_SLOW_CALL: u32 = 4;
const MAX_HALVINGS: u32 = 16;

/// The time for the final call to the database after the shutdown timeout.
const FINAL_SETTLE_TIMEOUT: Duration = Duration::from_secs(5);

impl<P: Publisher> Relay<P> {
    /// Creates a relay from a database to a broker.
    ///
    /// Defaults: up to 1000 messages and 64 MiB held, 64 published at once, runs of 50 messages, leases of 30 s, a poll
    /// every 200 ms, pauses of 100 ms to 30 s after failures, 20 s for a confirmation, and 30 s for a shutdown.
    pub fn new(pool: PgPool, publisher: P) -> Self {
        Self {
            publisher,
            table: OutboxTable { pool, transaction_pooler: false, lease: Duration::from_secs(30) },
            settings: Settings {
                limits: TakeLimits { rows: 1000, bytes: 64 << 20, run: 50 },
                concurrency: 64,
                poll: Duration::from_millis(200),
                backoff: (Duration::from_millis(100), Duration::from_secs(30)),
                publish_timeout: Duration::from_secs(20),
                shutdown_timeout: Duration::from_secs(30),
                on_refused: OnRefused::Wait,
                observer: Arc::new(()),
            },
            wake: Arc::new(Notify::new()),
        }
    }

    /// Sets how many messages are held, from 1 to 10 000.
    ///
    /// # Errors
    /// [`ConfigError`] if it is out of these bounds.
    pub fn with_max_held(mut self, messages: usize) -> Result<Self, ConfigError> {
        self.settings.limits.rows = ConfigError::check("the number of messages held", messages, 1..=10_000)?;
        Ok(self)
    }

    /// Sets how many bytes of messages are held. One message of any size is always allowed.
    pub fn with_max_bytes(mut self, bytes: usize) -> Self {
        self.settings.limits.bytes = bytes;
        self
    }

    /// Sets how many messages of one order key are taken together, from 1 to 10 000.
    ///
    /// They are published one after the other. If the relay crashes, all of them may be published again.
    ///
    /// # Errors
    /// [`ConfigError`] if it is out of these bounds.
    pub fn with_max_run_length(mut self, messages: usize) -> Result<Self, ConfigError> {
        self.settings.limits.run =
            ConfigError::check("the number of messages taken together", messages, 1..=10_000)?;
        Ok(self)
    }

    /// Sets how many messages are published at once, from 1 to 10 000. Of one order key it is always one.
    ///
    /// # Errors
    /// [`ConfigError`] if it is out of these bounds.
    pub fn with_concurrency(mut self, messages: usize) -> Result<Self, ConfigError> {
        self.settings.concurrency =
            ConfigError::check("the number of messages at once", messages, 1..=10_000)?;
        Ok(self)
    }

    /// Sets the lease of taken messages, from 1 s to an hour. It is renewed every third of it.
    ///
    /// After a crash the messages of a relay wait for this time.
    ///
    /// # Errors
    /// [`ConfigError`] if it is out of these bounds.
    pub fn with_lease(mut self, lease: Duration) -> Result<Self, ConfigError> {
        let hour = Duration::from_secs(60 * 60);
        self.table.lease = ConfigError::check("the lease", lease, Duration::from_secs(1)..=hour)?;
        Ok(self)
    }

    /// Sets the interval at which an empty outbox is polled, from 1 ms to an hour.
    ///
    /// # Errors
    /// [`ConfigError`] if it is out of these bounds.
    pub fn with_poll(mut self, poll: Duration) -> Result<Self, ConfigError> {
        let hour = Duration::from_secs(60 * 60);
        self.settings.poll = ConfigError::check("the poll interval", poll, Duration::from_millis(1)..=hour)?;
        Ok(self)
    }

    /// Sets the pause after the first failure of a message, and the longest pause; from 1 ms to an hour.
    ///
    /// Each pause is twice the one before, less a random part of up to half of it.
    ///
    /// # Errors
    /// [`ConfigError`] if it is out of these bounds.
    pub fn with_backoff(mut self, first: Duration, longest: Duration) -> Result<Self, ConfigError> {
        let hour = Duration::from_secs(60 * 60);
        let first = ConfigError::check("the first pause", first, Duration::from_millis(1)..=hour)?;
        self.settings.backoff = (first, ConfigError::check("the longest pause", longest, first..=hour)?);
        Ok(self)
    }

    /// Sets how long the broker may take to confirm a message; at least 1 ms. Afterwards the message counts as not
    /// confirmed.
    ///
    /// # Errors
    /// [`ConfigError`] if it is less.
    pub fn with_publish_timeout(mut self, timeout: Duration) -> Result<Self, ConfigError> {
        self.settings.publish_timeout =
            ConfigError::check("the publish timeout", timeout, Duration::from_millis(1)..=Duration::MAX)?;
        Ok(self)
    }

    /// Sets how long a shutdown may take. Messages that are not confirmed by then are published again.
    pub fn with_shutdown_timeout(mut self, timeout: Duration) -> Self {
        self.settings.shutdown_timeout = timeout;
        self
    }

    /// Sets the treatment of messages behind a refused one.
    pub fn with_on_refused(mut self, on_refused: OnRefused) -> Self {
        self.settings.on_refused = on_refused;
        self
    }

    /// Sets whether the pool goes through a pooler that gives each transaction another session.
    pub fn with_transaction_pooler(mut self, through_pooler: bool) -> Self {
        self.table.transaction_pooler = through_pooler;
        self
    }

    /// Sets the observer of all events.
    pub fn with_observer(mut self, observer: impl RelayObserver) -> Self {
        self.settings.observer = Arc::new(observer);
        self
    }

    /// Returns a handle that wakes this relay.
    #[must_use]
    pub fn waker(&self) -> RelayWaker {
        RelayWaker(self.wake.clone())
    }

    /// Checks that the database has the schema and that the role may call the relay's functions. Call it when a program
    /// starts.
    ///
    /// If the check fails, [`run`](Self::run) logs a warning and waits until the cause is removed.
    ///
    /// # Errors
    /// [`StoreError`] with the missing functions, or if the database is out of reach.
    pub async fn check(&self) -> Result<(), StoreError> {
        let names = vec!["outbox_take", "outbox_renew", "outbox_settle"];
        let OutboxTable { pool, transaction_pooler, .. } = &self.table;
        receipts::check(pool, CALL_TIMEOUT, *transaction_pooler, names, "docs/reference/outbox.md").await
    }

    /// Publishes until `stop` is ready, for example `tokio::signal::ctrl_c()`, and then shuts down.
    ///
    /// At shutdown it takes nothing more, finishes the messages that are being published, and gives the rest back. It
    /// waits while the database or the broker is out of reach, also at the start. Dropping the future is like a crash:
    /// other relays take over its messages when their leases end.
    pub async fn run(self, stop: impl Future) {
        let Self { publisher, table, settings, wake } = self;
        let shared = Publishing {
            publisher,
            slots: Semaphore::new(settings.concurrency),
            is_stopping: AtomicBool::new(false),
            is_broker_down: AtomicBool::new(false),
            failures: AtomicU32::new(0),
            backoff: settings.backoff,
            publish_timeout: settings.publish_timeout,
            on_refused: settings.on_refused,
            observer: settings.observer.clone(),
        };
        let now = Instant::now();
        let running = RelayLoop {
            shared: Arc::new(shared),
            next_renewal: now + table.lease / 3,
            table,
            settings,
            wake,
            tasks: JoinSet::new(),
            held: HashMap::new(),
            rows: 0,
            bytes: 0,
            ended: Vec::new(),
            after: None,
            is_pass_empty: true,
            next_take: now,
            halvings: 0,
            database: Pause::new(DATABASE_PAUSES.0, DATABASE_PAUSES.1),
            broker: Pause::new(DATABASE_PAUSES.0, MAX_BROKER_PAUSE),
        };
        running.run_until(stop).await;
    }
}

/// The state that all publishing tasks share.
struct Publishing<P> {
    publisher: P,
    slots: Semaphore,
    is_stopping: AtomicBool,
    /// Several messages failed in a row, so no further message is started.
    is_broker_down: AtomicBool,
    failures: AtomicU32,
    backoff: (Duration, Duration),
    publish_timeout: Duration,
    on_refused: OnRefused,
    observer: Arc<dyn RelayObserver>,
}

/// The outcomes of a run so far. They are shared with the task, so that they survive its cancellation.
type SharedOutcomes = Arc<Mutex<Vec<(i64, RowOutcome)>>>;

impl<P: Publisher> Publishing<P> {
    /// Publishes the rows of a run, each after the one before it was confirmed.
    async fn publish(self: Arc<Self>, rows: Vec<OutboxRow>, lease: Arc<Lease>, outcomes: SharedOutcomes) {
        for row in rows {
            // The semaphore is never closed.
            let Ok(_slot) = self.slots.acquire().await else { return };
            let is_halted =
                self.is_stopping.load(Ordering::Relaxed) || self.is_broker_down.load(Ordering::Relaxed);
            // Publishing after the lease would only cause copies, never a wrong order. Stopping avoids the copies.
            if is_halted || lease.is_over() {
                return;
            }
            let outcome = self.publish_one(&row).await;
            let goes_on = matches!(outcome, RowOutcome::Confirmed | RowOutcome::SetAside(_));
            outcomes.lock().unwrap_or_else(PoisonError::into_inner).push((row.seq, outcome));
            if !goes_on {
                return;
            }
        }
    }

    async fn publish_one(&self, row: &OutboxRow) -> RowOutcome {
        let published = catch_panic(self.publisher.publish(&row.message));
        let failed = match timeout(self.publish_timeout, published).await {
            Ok(Ok(Ok(()))) => {
                self.failures.store(0, Ordering::Relaxed);
                self.is_broker_down.store(false, Ordering::Relaxed);
                self.emit(row, RelayEventKind::Confirmed);
                return RowOutcome::Confirmed;
            }
            Ok(Ok(Err(PublishError::Refused(error)))) => {
                let error = shorten(&ErrorChain(&*error).to_string());
                warn!(
                    topic = row.message.topic,
                    seq = row.seq,
                    error,
                    "the broker refuses a message of the outbox"
                );
                self.emit(row, RelayEventKind::Refused);
                return match self.on_refused {
                    OnRefused::Wait => RowOutcome::Refused(error),
                    OnRefused::Continue => RowOutcome::SetAside(error),
                };
            }
            Ok(Ok(Err(error))) => shorten(&ErrorChain(&error).to_string()),
            Ok(Err(_panicked)) => "the publisher panicked".to_owned(),
            Err(_) => "the broker did not confirm the message in time".to_owned(),
        };
        debug!(
            topic = row.message.topic,
            seq = row.seq,
            error = failed,
            "a message of the outbox was not confirmed"
        );
        if self.failures.fetch_add(1, Ordering::Relaxed).saturating_add(1) >= MAX_FAILURES {
            self.is_broker_down.store(true, Ordering::Relaxed);
        }
        self.emit(row, RelayEventKind::Unconfirmed);
        let pause = self.backoff.0.saturating_mul(2_u32.saturating_pow(row.attempts.min(30)));
        RowOutcome::Retry(jittered(pause.min(self.backoff.1)), failed)
    }

    fn emit(&self, row: &OutboxRow, kind: RelayEventKind) {
        self.observer.observe(&RelayEvent { topic: &row.message.topic, seq: Some(row.seq), kind });
    }
}

/// The claim of this relay to a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HoldState {
    /// The lease is this relay's, as far as it knows.
    Held,
    /// Another call took the line since. The outcomes of this run no longer count.
    Lost,
}

/// A run that is being published.
struct HeldRun {
    token: i64,
    line: i64,
    first: i64,
    rows: usize,
    bytes: usize,
    lease: Arc<Lease>,
    outcomes: SharedOutcomes,
    state: HoldState,
}

/// A pause with exponential backoff, for a database or broker that is out of reach.
struct Pause {
    first: Duration,
    last: Duration,
    times: u32,
    until: Option<Instant>,
}

impl Pause {
    const fn new(first: Duration, last: Duration) -> Self {
        Self { first, last, times: 0, until: None }
    }

    fn begin(&mut self) {
        let pause = self.first.saturating_mul(2_u32.saturating_pow(self.times.min(16))).min(self.last);
        self.times = self.times.saturating_add(1);
        self.until = Some(Instant::now() + jittered(pause));
    }

    /// Returns `true` during the pause. The pause ends by itself.
    fn is_on(&mut self) -> bool {
        self.until = self.until.filter(|until| Instant::now() < *until);
        self.until.is_some()
    }

    const fn over(&mut self) {
        self.times = 0;
        self.until = None;
    }
}

/// The phase of the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Takes and publishes messages.
    Running,
    /// Finishes the messages that are being published, until this time at the latest.
    Stopping { until: Instant },
}

impl Phase {
    fn is_over(self) -> bool {
        matches!(self, Self::Stopping { until } if Instant::now() >= until)
    }
}

struct RelayLoop<P> {
    shared: Arc<Publishing<P>>,
    table: OutboxTable,
    settings: Settings,
    wake: Arc<Notify>,
    tasks: JoinSet<()>,
    held: HashMap<Id, HeldRun>,
    rows: usize,
    bytes: usize,
    ended: Vec<FinishedRun>,
    /// The position in the lines at which the next call goes on.
    after: Option<i64>,
    is_pass_empty: bool,
    next_take: Instant,
    /// The number of halvings of the byte limit. A call that took too long may have carried too many bytes.
    halvings: u32,
    next_renewal: Instant,
    database: Pause,
    broker: Pause,
}

impl<P: Publisher> RelayLoop<P> {
    async fn run_until(mut self, stop: impl Future) {
        let mut stop = pin!(stop);
        let mut phase = Phase::Running;
        loop {
            while let Some(ended) = self.tasks.try_join_next_with_id() {
                self.end(ended);
            }
            if !self.database.is_on() {
                self.settle().await;
                self.renew().await;
                if phase == Phase::Running {
                    self.take().await;
                }
            }
            if phase != Phase::Running && self.tasks.is_empty() && self.ended.is_empty() {
                return;
            }
            let next = self.next_at(phase);
            tokio::select! {
                biased;
                _ = &mut stop, if phase == Phase::Running => {
                    self.shared.is_stopping.store(true, Ordering::Relaxed);
                    phase = Phase::Stopping { until: Instant::now() + self.settings.shutdown_timeout };
                }
                Some(ended) = self.tasks.join_next_with_id() => self.end(ended),
                () = self.wake.notified() => self.next_take = Instant::now(),
                () = sleep_until(next) => {}
            }
            if phase.is_over() {
                return self.give_up().await;
            }
        }
    }

    /// Returns the time of the next action if no event comes before.
    fn next_at(&self, phase: Phase) -> Instant {
        let database = self.database.until;
        let broker = self.broker.until;
        let mut next = self.next_renewal;
        if !self.ended.is_empty() {
            next = Instant::now();
        }
        if phase == Phase::Running && self.has_space() && (!self.is_broker_down() || self.tasks.is_empty()) {
            next = next.min(broker.map_or(self.next_take, |until| until.max(self.next_take)));
        }
        next = database.map_or(next, |until| until.max(next));
        match phase {
            Phase::Running => next,
            Phase::Stopping { until } => until.min(next),
        }
    }

    fn has_space(&self) -> bool {
        // Take more only when half is free, so that each call is worth its cost.
        self.rows <= self.settings.limits.rows / 2
            && (self.rows == 0 || self.bytes <= self.settings.limits.bytes / 2)
            && self.ended.is_empty()
    }

    fn is_broker_down(&self) -> bool {
        self.shared.is_broker_down.load(Ordering::Relaxed)
    }

    /// Begins or ends the broker pause. Returns `false` while tasks must end first.
    fn update_broker_pause(&mut self) -> bool {
        if self.is_broker_down() {
            if !self.tasks.is_empty() {
                return false;
            }
            // All tasks have ended. From here on one more failure starts the next pause.
            self.shared.failures.store(MAX_FAILURES - 1, Ordering::Relaxed);
            self.shared.is_broker_down.store(false, Ordering::Relaxed);
            if self.broker.times == 0 {
                warn!("the broker does not confirm messages; the relay pauses");
            }
            self.broker.begin();
        } else if self.broker.times > 0 && self.shared.failures.load(Ordering::Relaxed) == 0 {
            info!("the broker confirms messages again");
            self.broker.over();
        }
        true
    }

    async fn take(&mut self) {
        if !self.update_broker_pause() {
            return;
        }
        if self.broker.is_on() || !self.has_space() || Instant::now() < self.next_take {
            return;
        }
        let mut limits = TakeLimits {
            rows: self.settings.limits.rows - self.rows,
            bytes: (self.settings.limits.bytes.saturating_sub(self.bytes) >> self.halvings).max(1),
            run: self.settings.limits.run,
        };
        if self.broker.times > 0 {
            limits.rows = limits.rows.min(PROBE_ROWS);
        }
        let asked = Instant::now();
        // If even one message may be too large for the timeout, the call gets more time. The lease is then longer, too,
        // so that it has not ended when the reply comes. No other lease needs renewal meanwhile, because nothing else
        // is held.
        let call_timeout =
            CALL_TIMEOUT * if self.held.is_empty() { 1 + self.halvings / HALVINGS_PER_SLOW_CALL } else { 1 };
        let lease = if call_timeout > CALL_TIMEOUT {
            self.table.lease.max(call_timeout * 2)
        } else {
            self.table.lease
        };
        let taken = match self.table.take(self.after, &limits, call_timeout, lease).await {
            Ok(taken) => taken,
            Err(error) => {
                if asked.elapsed() >= CALL_TIMEOUT {
                    self.halvings = (self.halvings + HALVINGS_PER_SLOW_CALL).min(MAX_HALVINGS);
                }
                return self.failed(&error);
            }
        };
        self.reached();
        if asked.elapsed() < CALL_TIMEOUT / 4 {
            self.halvings = self.halvings.saturating_sub(1);
        }
        self.is_pass_empty &= taken.runs.is_empty();
        self.after = taken.next;
        if taken.next.is_none() {
            if self.is_pass_empty {
                // A long-running transaction keeps deleted rows visible, which makes this call slow. Poll less often
                // then, to spare the database.
                self.next_take = Instant::now() + self.settings.poll.max(asked.elapsed() * 4);
            }
            self.is_pass_empty = true;
        }
        let firsts: HashMap<_, _> = taken.runs.iter().map(|run| (run.line, run.first)).collect();
        for old in self.held.values_mut() {
            // A lease that was not renewed in time: the line was free, and was taken again. Rows that were committed in
            // front of a run do not make it lost.
            if firsts.get(&old.line).is_some_and(|first| *first >= old.first) {
                old.state = HoldState::Lost;
                old.lease.set(Instant::now());
            }
        }
        for run in taken.runs {
            self.spawn(run, asked + lease);
        }
    }

    fn spawn(&mut self, run: LineRun, until: Instant) {
        let LineRun { token, line, first, rows } = run;
        let bytes = rows.iter().map(|row| row.bytes()).sum();
        let lease = Arc::new(Lease::new(until));
        let outcomes = SharedOutcomes::default();
        let held = HeldRun {
            token,
            line,
            first,
            rows: rows.len(),
            bytes,
            lease: lease.clone(),
            outcomes: outcomes.clone(),
            state: HoldState::Held,
        };
        self.rows += held.rows;
        self.bytes += bytes;
        let task = self.tasks.spawn(self.shared.clone().publish(rows, lease, outcomes));
        self.held.insert(task.id(), held);
    }

    fn end(&mut self, ended: Result<(Id, ()), JoinError>) {
        let id = match &ended {
            Ok((id, ())) => *id,
            // The task was cancelled, or the observer panicked. The outcomes before that count.
            Err(error) => error.id(),
        };
        let Some(held) = self.held.remove(&id) else { return };
        self.rows -= held.rows;
        self.bytes -= held.bytes;
        if held.state == HoldState::Lost {
            return self.emit(RelayEventKind::Lost);
        }
        let outcomes = std::mem::take(&mut *held.outcomes.lock().unwrap_or_else(PoisonError::into_inner));
        self.ended.push(FinishedRun { token: held.token, line: held.line, first: held.first, outcomes });
    }

    async fn settle(&mut self) {
        if self.ended.is_empty() {
            return;
        }
        // Settle one run of a line at a time, because the database matches rows to runs by their line.
        let mut lines = HashSet::new();
        let (ended, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.ended).into_iter().partition(|ended| lines.insert(ended.line));
        let settled = self.table.settle(&ended).await;
        self.ended = later;
        let held_lines = match settled {
            Ok(held_lines) => held_lines,
            Err(error) => {
                self.ended.splice(..0, ended);
                return self.failed(&error);
            }
        };
        self.reached();
        let held_lines: HashSet<_> = held_lines.into_iter().collect();
        for ended in ended {
            if !held_lines.contains(&ended.line) {
                self.emit(RelayEventKind::Lost);
            } else if ended.line < 0 && matches!(ended.outcomes.last(), Some((_, RowOutcome::Confirmed))) {
                // There may be more messages in this line.
                self.next_take = Instant::now();
            }
        }
    }

    async fn renew(&mut self) {
        if Instant::now() < self.next_renewal {
            return;
        }
        // Renew one run of a line, the earlier one, because the reply names lines and not runs. The lease of the other
        // run ends.
        let mut firsts: HashMap<i64, (i64, i64)> = HashMap::new();
        for held in self.held.values().filter(|held| held.state == HoldState::Held) {
            let first = firsts.entry(held.line).or_insert((held.token, held.first));
            if held.first < first.1 {
                *first = (held.token, held.first);
            }
        }
        let runs: Vec<_> = firsts.iter().map(|(line, (token, first))| (*token, *line, *first)).collect();
        let asked = Instant::now();
        self.next_renewal = asked + self.table.lease / 3;
        if runs.is_empty() {
            return;
        }
        let held_lines = match self.table.renew(&runs).await {
            Ok(held_lines) => held_lines,
            Err(error) => {
                self.next_renewal = asked;
                return self.failed(&error);
            }
        };
        self.reached();
        let held_lines: HashSet<_> = held_lines.into_iter().collect();
        for held in self.held.values().filter(|held| held.state == HoldState::Held) {
            let is_asked = firsts.get(&held.line).is_some_and(|(token, _)| *token == held.token);
            match (is_asked, held_lines.contains(&held.line)) {
                (true, true) => held.lease.set(asked + self.table.lease),
                (true, false) => held.lease.set(asked),
                (false, _) => {}
            }
        }
    }

    /// Ends the shutdown: cancels the tasks, and settles the outcomes that are known.
    async fn give_up(mut self) {
        warn!(
            runs = self.tasks.len(),
            "the relay stops before the broker has confirmed all messages; they will be published again"
        );
        self.tasks.abort_all();
        while let Some(ended) = self.tasks.join_next_with_id().await {
            self.end(ended);
        }
        let settled = timeout(FINAL_SETTLE_TIMEOUT, async {
            // Runs of one line are settled one after the other.
            let mut left = usize::MAX;
            while self.ended.len() < left {
                left = self.ended.len();
                self.settle().await;
            }
        });
        if settled.await.is_err() || !self.ended.is_empty() {
            warn!(
                "the outcomes of the last messages could not be written; these messages will be published again"
            );
        }
    }

    fn failed(&mut self, error: &StoreError) {
        if self.database.times == 0 {
            warn!(error = %ErrorChain(&error), "the outbox cannot be read or written; the relay tries again");
        }
        self.emit(RelayEventKind::DatabaseFailed);
        self.database.begin();
    }

    fn reached(&mut self) {
        if self.database.times > 0 {
            info!("the outbox can be read and written again");
        }
        self.database.over();
    }

    fn emit(&self, kind: RelayEventKind) {
        self.settings.observer.observe(&RelayEvent { topic: "", seq: None, kind });
    }
}

/// Returns the error without control characters, at most as long as the error of a dead letter.
fn shorten(error: &str) -> String {
    let mut short: String = error.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    short.truncate(short.floor_char_boundary(MAX_ERROR_BYTES));
    short
}
