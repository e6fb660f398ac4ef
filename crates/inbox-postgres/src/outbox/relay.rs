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
use oncegate_inbox::{MAX_ERROR_BYTES, PublishError, Publisher};
use oncegate_postgres::sqlx::postgres::PgPool;
use tokio::sync::{Notify, Semaphore};
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, info, warn};

use super::event::{RelayEvent, RelayEventKind, RelayObserver};
use super::lines::{CALL_PATIENCE, Ended, Lease, Lines, Most, Outcome, Run, Waiting};
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
    lines: Lines,
    settings: Settings,
    awake: Arc<Notify>,
}

struct Settings {
    most: Most,
    concurrency: usize,
    poll: Duration,
    backoff: (Duration, Duration),
    publish_timeout: Duration,
    patience: Duration,
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
            .field("lease", &self.lines.lease)
            .field("poll", &self.settings.poll)
            .finish_non_exhaustive()
    }
}

/// The number of failures in a row after which the whole relay pauses.
const FAILURES_MAX: u32 = 8;

/// The longest broker pause, and the number of messages that probe the broker after it.
const AWAY_LAST: Duration = Duration::from_secs(5);
const PROBE_ROWS: usize = 16;

/// The shortest and the longest pause while the database is out of reach.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// The number of halvings of the byte limit after a slow call, and their maximum.
const HALVED_BY: u32 = 4;
const HALVED_MAX: u32 = 16;

/// The time for the final call to the database after the shutdown timeout.
const LAST_WORDS: Duration = Duration::from_secs(5);

impl<P: Publisher> Relay<P> {
    /// Creates a relay from a database to a broker.
    ///
    /// Defaults: up to 1000 messages and 64 MiB held, 64 published at once, runs of 50 messages, leases of 30 s, a poll
    /// every 200 ms, pauses of 100 ms to 30 s after failures, 20 s for a confirmation, and 30 s for a shutdown.
    pub fn new(pool: PgPool, publisher: P) -> Self {
        Self {
            publisher,
            lines: Lines { pool, transaction_pooler: false, lease: Duration::from_secs(30) },
            settings: Settings {
                most: Most { rows: 1000, octets: 64 << 20, run: 50 },
                concurrency: 64,
                poll: Duration::from_millis(200),
                backoff: (Duration::from_millis(100), Duration::from_secs(30)),
                publish_timeout: Duration::from_secs(20),
                patience: Duration::from_secs(30),
                on_refused: OnRefused::Wait,
                observer: Arc::new(()),
            },
            awake: Arc::new(Notify::new()),
        }
    }

    /// Sets how many messages are held, from 1 to 10 000.
    ///
    /// # Errors
    /// [`ConfigError`] if it is out of these bounds.
    pub fn with_max_held(mut self, messages: usize) -> Result<Self, ConfigError> {
        self.settings.most.rows = ConfigError::check("the number of messages held", messages, 1..=10_000)?;
        Ok(self)
    }

    /// Sets how many bytes of messages are held. One message is always allowed, whatever its size.
    pub fn with_max_bytes(mut self, octets: usize) -> Self {
        self.settings.most.octets = octets;
        self
    }

    /// Sets how many messages of one order key are taken together, from 1 to 10 000.
    ///
    /// They are published one after the other. If the relay crashes, all of them may be published again.
    ///
    /// # Errors
    /// [`ConfigError`] if it is out of these bounds.
    pub fn with_max_run_length(mut self, messages: usize) -> Result<Self, ConfigError> {
        self.settings.most.run =
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
        self.lines.lease = ConfigError::check("the lease", lease, Duration::from_secs(1)..=hour)?;
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
    pub fn with_shutdown_timeout(mut self, patience: Duration) -> Self {
        self.settings.patience = patience;
        self
    }

    /// Sets the treatment of messages behind a refused one.
    pub fn with_on_refused(mut self, on_refused: OnRefused) -> Self {
        self.settings.on_refused = on_refused;
        self
    }

    /// Sets whether the pool goes through a pooler that gives each transaction another session.
    pub fn with_transaction_pooler(mut self, through_pooler: bool) -> Self {
        self.lines.transaction_pooler = through_pooler;
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
        RelayWaker(self.awake.clone())
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
        let Lines { pool, transaction_pooler, .. } = &self.lines;
        receipts::check(pool, CALL_PATIENCE, *transaction_pooler, names, "docs/reference/outbox.md").await
    }

    /// Publishes until `stop` is ready, and then shuts down.
    ///
    /// At shutdown it takes nothing more, finishes the messages that are being published, and gives the rest back. It
    /// waits while the database or the broker is out of reach, also at the start. Dropping the future is like a crash:
    /// other relays take over its messages when their leases end.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let Self { publisher, lines, settings, awake } = self;
        let shared = Shared {
            publisher,
            slots: Semaphore::new(settings.concurrency),
            is_stopping: AtomicBool::new(false),
            is_away: AtomicBool::new(false),
            failures: AtomicU32::new(0),
            backoff: settings.backoff,
            publish_timeout: settings.publish_timeout,
            on_refused: settings.on_refused,
            observer: settings.observer.clone(),
        };
        let now = Instant::now();
        let running = Running {
            shared: Arc::new(shared),
            renew_at: now + lines.lease / 3,
            lines,
            settings,
            awake,
            tasks: JoinSet::new(),
            held: HashMap::new(),
            rows: 0,
            octets: 0,
            ended: Vec::new(),
            after: None,
            is_pass_empty: true,
            take_at: now,
            halved: 0,
            database: Pause::new(PAUSES.0, PAUSES.1),
            broker: Pause::new(PAUSES.0, AWAY_LAST),
        };
        running.until(stop).await;
    }
}

/// The state that all publishing tasks share.
struct Shared<P> {
    publisher: P,
    slots: Semaphore,
    is_stopping: AtomicBool,
    /// Several messages failed in a row, so no further message is started.
    is_away: AtomicBool,
    failures: AtomicU32,
    backoff: (Duration, Duration),
    publish_timeout: Duration,
    on_refused: OnRefused,
    observer: Arc<dyn RelayObserver>,
}

/// The outcomes of a run so far. They are shared with the task, so that they survive its cancellation.
type Outcomes = Arc<Mutex<Vec<(i64, Outcome)>>>;

impl<P: Publisher> Shared<P> {
    /// Publishes the rows of a run, each after the one before it was confirmed.
    async fn publish(self: Arc<Self>, rows: Vec<Waiting>, lease: Arc<Lease>, outcomes: Outcomes) {
        for row in rows {
            // The semaphore is never closed.
            let Ok(_slot) = self.slots.acquire().await else { return };
            let is_halted = self.is_stopping.load(Ordering::Relaxed) || self.is_away.load(Ordering::Relaxed);
            // Publishing after the lease would only cause copies, never a wrong order. Stopping avoids the copies.
            if is_halted || lease.is_over() {
                return;
            }
            let outcome = self.publish_one(&row).await;
            let goes_on = matches!(outcome, Outcome::Confirmed | Outcome::Aside(_));
            outcomes.lock().unwrap_or_else(PoisonError::into_inner).push((row.seq, outcome));
            if !goes_on {
                return;
            }
        }
    }

    async fn publish_one(&self, row: &Waiting) -> Outcome {
        let published = catch_panic(self.publisher.publish(&row.message));
        let failed = match timeout(self.publish_timeout, published).await {
            Ok(Ok(Ok(()))) => {
                self.failures.store(0, Ordering::Relaxed);
                self.is_away.store(false, Ordering::Relaxed);
                self.tell(row, RelayEventKind::Confirmed);
                return Outcome::Confirmed;
            }
            Ok(Ok(Err(PublishError::Refused(error)))) => {
                let error = in_short(&ErrorChain(&*error).to_string());
                warn!(
                    topic = row.message.topic,
                    seq = row.seq,
                    error,
                    "the broker refuses a message of the outbox"
                );
                self.tell(row, RelayEventKind::Refused);
                return match self.on_refused {
                    OnRefused::Wait => Outcome::Refused(error),
                    OnRefused::Continue => Outcome::Aside(error),
                };
            }
            Ok(Ok(Err(error))) => in_short(&ErrorChain(&error).to_string()),
            Ok(Err(_panicked)) => "the publisher panicked".to_owned(),
            Err(_) => "the broker did not confirm the message in time".to_owned(),
        };
        debug!(
            topic = row.message.topic,
            seq = row.seq,
            error = failed,
            "a message of the outbox was not confirmed"
        );
        if self.failures.fetch_add(1, Ordering::Relaxed).saturating_add(1) >= FAILURES_MAX {
            self.is_away.store(true, Ordering::Relaxed);
        }
        self.tell(row, RelayEventKind::Unconfirmed);
        let pause = self.backoff.0.saturating_mul(2_u32.saturating_pow(row.attempts.min(30)));
        Outcome::Again(jittered(pause.min(self.backoff.1)), failed)
    }

    fn tell(&self, row: &Waiting, kind: RelayEventKind) {
        self.observer.observe(&RelayEvent { topic: &row.message.topic, seq: Some(row.seq), kind });
    }
}

/// A run that is being published.
struct Held {
    token: i64,
    line: i64,
    first: i64,
    rows: usize,
    octets: usize,
    lease: Arc<Lease>,
    outcomes: Outcomes,
    /// Another call took the line since, so this run no longer holds it.
    is_lost: bool,
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

struct Running<P> {
    shared: Arc<Shared<P>>,
    lines: Lines,
    settings: Settings,
    awake: Arc<Notify>,
    tasks: JoinSet<()>,
    held: HashMap<Id, Held>,
    rows: usize,
    octets: usize,
    ended: Vec<Ended>,
    /// The position in the lines at which the next call goes on.
    after: Option<i64>,
    is_pass_empty: bool,
    take_at: Instant,
    /// The number of halvings of the byte limit. A call that took too long may have carried too many bytes.
    halved: u32,
    renew_at: Instant,
    database: Pause,
    broker: Pause,
}

impl<P: Publisher> Running<P> {
    async fn until(mut self, stop: impl Future<Output = ()>) {
        let mut stop = pin!(stop);
        let mut give_up_at = None;
        loop {
            while let Some(ended) = self.tasks.try_join_next_with_id() {
                self.end(ended);
            }
            if !self.database.is_on() {
                self.settle().await;
                self.renew().await;
                if give_up_at.is_none() {
                    self.take().await;
                }
            }
            if give_up_at.is_some() && self.tasks.is_empty() && self.ended.is_empty() {
                return;
            }
            let next = self.next_at(give_up_at);
            tokio::select! {
                biased;
                () = &mut stop, if give_up_at.is_none() => {
                    self.shared.is_stopping.store(true, Ordering::Relaxed);
                    give_up_at = Some(Instant::now() + self.settings.patience);
                }
                Some(ended) = self.tasks.join_next_with_id() => self.end(ended),
                () = self.awake.notified() => self.take_at = Instant::now(),
                () = sleep_until(next) => {}
            }
            if give_up_at.is_some_and(|at| Instant::now() >= at) {
                return self.give_up().await;
            }
        }
    }

    /// Returns the time of the next action if no event comes before.
    fn next_at(&mut self, give_up_at: Option<Instant>) -> Instant {
        let database = self.database.until;
        let broker = self.broker.until;
        let mut next = self.renew_at;
        if !self.ended.is_empty() {
            next = Instant::now();
        }
        if give_up_at.is_none() && self.has_room() && (!self.is_away() || self.tasks.is_empty()) {
            next = next.min(broker.map_or(self.take_at, |until| until.max(self.take_at)));
        }
        next = database.map_or(next, |until| until.max(next));
        give_up_at.map_or(next, |at| at.min(next))
    }

    fn has_room(&self) -> bool {
        // Take more only when half is free, so that each call is worth its cost.
        self.rows <= self.settings.most.rows / 2
            && (self.rows == 0 || self.octets <= self.settings.most.octets / 2)
            && self.ended.is_empty()
    }

    fn is_away(&self) -> bool {
        self.shared.is_away.load(Ordering::Relaxed)
    }

    async fn take(&mut self) {
        if self.is_away() {
            if !self.tasks.is_empty() {
                return;
            }
            // All tasks have ended. From here on one more failure starts the next pause.
            self.shared.failures.store(FAILURES_MAX - 1, Ordering::Relaxed);
            self.shared.is_away.store(false, Ordering::Relaxed);
            if self.broker.times == 0 {
                warn!("the broker does not confirm messages; the relay pauses");
            }
            self.broker.begin();
        } else if self.broker.times > 0 && self.shared.failures.load(Ordering::Relaxed) == 0 {
            info!("the broker confirms messages again");
            self.broker.over();
        }
        if self.broker.is_on() || !self.has_room() || Instant::now() < self.take_at {
            return;
        }
        let mut most = Most {
            rows: self.settings.most.rows - self.rows,
            octets: (self.settings.most.octets.saturating_sub(self.octets) >> self.halved).max(1),
            run: self.settings.most.run,
        };
        if self.broker.times > 0 {
            most.rows = most.rows.min(PROBE_ROWS);
        }
        let asked = Instant::now();
        // If even one message may be too large for the timeout, the call gets more time. The lease is then longer, too,
        // so that it has not ended when the answer comes. No other lease needs renewal meanwhile, because nothing else
        // is held.
        let patience = CALL_PATIENCE * if self.held.is_empty() { 1 + self.halved / HALVED_BY } else { 1 };
        let lease =
            if patience > CALL_PATIENCE { self.lines.lease.max(patience * 2) } else { self.lines.lease };
        let taken = match self.lines.take(self.after, &most, patience, lease).await {
            Ok(taken) => taken,
            Err(error) => {
                if asked.elapsed() >= CALL_PATIENCE {
                    self.halved = (self.halved + HALVED_BY).min(HALVED_MAX);
                }
                return self.failed(&error);
            }
        };
        self.reached();
        if asked.elapsed() < CALL_PATIENCE / 4 {
            self.halved = self.halved.saturating_sub(1);
        }
        self.is_pass_empty &= taken.runs.is_empty();
        self.after = taken.next;
        if taken.next.is_none() {
            if self.is_pass_empty {
                // A long-running transaction keeps deleted rows visible, which makes this call slow. Poll less often
                // then, to spare the database.
                self.take_at = Instant::now() + self.settings.poll.max(asked.elapsed() * 4);
            }
            self.is_pass_empty = true;
        }
        let firsts: HashMap<_, _> = taken.runs.iter().map(|run| (run.line, run.first)).collect();
        for old in self.held.values_mut() {
            // A lease that was not renewed in time: the line was free, and was taken again. Rows that were committed in
            // front of a run do not make it lost.
            if firsts.get(&old.line).is_some_and(|first| *first >= old.first) {
                old.is_lost = true;
                old.lease.set(Instant::now());
            }
        }
        for run in taken.runs {
            self.spawn(run, asked + lease);
        }
    }

    fn spawn(&mut self, run: Run, until: Instant) {
        let Run { token, line, first, rows } = run;
        let octets = rows.iter().map(|row| row.octets()).sum();
        let lease = Arc::new(Lease::new(until));
        let outcomes = Outcomes::default();
        let held = Held {
            token,
            line,
            first,
            rows: rows.len(),
            octets,
            lease: lease.clone(),
            outcomes: outcomes.clone(),
            is_lost: false,
        };
        self.rows += held.rows;
        self.octets += octets;
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
        self.octets -= held.octets;
        if held.is_lost {
            return self.tell(RelayEventKind::Lost);
        }
        let outcomes = std::mem::take(&mut *held.outcomes.lock().unwrap_or_else(PoisonError::into_inner));
        self.ended.push(Ended { token: held.token, line: held.line, first: held.first, outcomes });
    }

    async fn settle(&mut self) {
        if self.ended.is_empty() {
            return;
        }
        // Settle one run of a line at a time, because the database matches rows to runs by their line.
        let mut lines = HashSet::new();
        let (ended, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.ended).into_iter().partition(|ended| lines.insert(ended.line));
        let settled = self.lines.settle(&ended).await;
        self.ended = later;
        let ours = match settled {
            Ok(ours) => ours,
            Err(error) => {
                self.ended.splice(..0, ended);
                return self.failed(&error);
            }
        };
        self.reached();
        let ours: HashSet<_> = ours.into_iter().collect();
        for ended in ended {
            if !ours.contains(&ended.line) {
                self.tell(RelayEventKind::Lost);
            } else if ended.line < 0 && matches!(ended.outcomes.last(), Some((_, Outcome::Confirmed))) {
                // There may be more messages in this line.
                self.take_at = Instant::now();
            }
        }
    }

    async fn renew(&mut self) {
        if Instant::now() < self.renew_at {
            return;
        }
        // Renew one run of a line, the earlier one, because the reply names lines and not runs. The lease of the other
        // run ends.
        let mut firsts: HashMap<i64, (i64, i64)> = HashMap::new();
        for held in self.held.values().filter(|held| !held.is_lost) {
            let first = firsts.entry(held.line).or_insert((held.token, held.first));
            if held.first < first.1 {
                *first = (held.token, held.first);
            }
        }
        let runs: Vec<_> = firsts.iter().map(|(line, (token, first))| (*token, *line, *first)).collect();
        let asked = Instant::now();
        self.renew_at = asked + self.lines.lease / 3;
        if runs.is_empty() {
            return;
        }
        let ours = match self.lines.renew(&runs).await {
            Ok(ours) => ours,
            Err(error) => {
                self.renew_at = asked;
                return self.failed(&error);
            }
        };
        self.reached();
        let ours: HashSet<_> = ours.into_iter().collect();
        for held in self.held.values().filter(|held| !held.is_lost) {
            let is_asked = firsts.get(&held.line).is_some_and(|(token, _)| *token == held.token);
            match (is_asked, ours.contains(&held.line)) {
                (true, true) => held.lease.set(asked + self.lines.lease),
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
        let settled = timeout(LAST_WORDS, async {
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
        self.tell(RelayEventKind::DatabaseFailed);
        self.database.begin();
    }

    fn reached(&mut self) {
        if self.database.times > 0 {
            info!("the outbox can be read and written again");
        }
        self.database.over();
    }

    fn tell(&self, kind: RelayEventKind) {
        self.settings.observer.observe(&RelayEvent { topic: "", seq: None, kind });
    }
}

/// Returns the error without control characters, at most as long as the error of a dead letter.
fn in_short(error: &str) -> String {
    let mut short: String = error.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    short.truncate(short.floor_char_boundary(MAX_ERROR_BYTES));
    short
}

/// Returns a random duration between half of the pause and the whole.
fn jittered(pause: Duration) -> Duration {
    let mut bits = [0; 4];
    // Without random numbers the whole pause is used.
    let part =
        getrandom::fill(&mut bits).map_or(1.0, |()| f64::from(u32::from_ne_bytes(bits)) / 4_294_967_296.0);
    pause.mul_f64(0.5 + part / 2.0)
}
