//! Publishes what is in an outbox.

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

/// Publishes the messages of an [`Outbox`](super::Outbox), each until it is confirmed, and deletes them then.
///
/// - **Nothing is lost**: a message that was committed is published at least once, whoever dies, and again after a crash or
///   where it is not known whether it was confirmed. It has the same identifier each time, so that an inbox processes it once.
/// - **Order**: a message of a topic and an order key is first published after the one before it was confirmed, whatever
///   happens to relays, of which any number may run at once. What was published already may be published again later, in
///   between others.
/// - **Nobody waits for the broker**: no transaction is open while a message is published. A relay holds what it publishes by
///   leases, and what a relay says of a line that somebody else has taken since counts for nothing.
/// - **Failures**: a message that is not confirmed is tried again after a pause. So is one that panics in the publisher, and
///   one that takes too long. Where several fail in a row, all of the relay pauses. A message that the broker refuses is
///   kept for an operator, see [`OnRefused`].
///
/// The role of the pool needs the right to execute `oncegate.outbox_take`, `oncegate.outbox_renew` and
/// `oncegate.outbox_settle`. One connection is used at a time.
#[must_use = "it publishes when it is run"]
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

/// What becomes of the messages behind one that the broker refuses, in the same topic and with the same order key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnRefused {
    /// They wait until an operator has the message published again, or drops it.
    Wait,
    /// They go on without it.
    Continue,
}

/// Tells a relay in the same process that something was committed, so that it does not wait until it looks again.
#[derive(Clone, Debug)]
pub struct RelayWaker(Arc<Notify>);

impl RelayWaker {
    /// There is something to publish: call it after the commit. Costs next to nothing, and may be called for nothing.
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

/// Failures in a row after which all of the relay pauses.
const FAILURES_MAX: u32 = 8;

/// How long it does so at the longest, and what it tries after it.
const AWAY_LAST: Duration = Duration::from_secs(5);
const PROBE_ROWS: usize = 16;

/// Pauses where the database is out of reach.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// How often what is asked for is halved after a call that took too long, and at the most.
const HALVED_BY: u32 = 4;
const HALVED_MAX: u32 = 16;

/// How long the last words to the database may take after the patience is over.
const LAST_WORDS: Duration = Duration::from_secs(5);

impl<P: Publisher> Relay<P> {
    /// From this database to that broker: up to 1000 messages and 64 MiB held, 64 published at once, runs of 50 messages of
    /// one key, leases of 30 s, a look at the outbox every 200 ms, pauses of 100 ms to 30 s after failures, 20 s for the
    /// broker to confirm, and 30 s to end what is under way.
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

    /// How many messages are held at the most, from 1 to 10 000.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_max_held(mut self, messages: usize) -> Result<Self, ConfigError> {
        self.settings.most.rows = ConfigError::check("the number of messages held", messages, 1..=10_000)?;
        Ok(self)
    }

    /// How many octets of messages are held at the most; one message is, whatever its size.
    pub fn with_max_bytes(mut self, octets: usize) -> Self {
        self.settings.most.octets = octets;
        self
    }

    /// How many messages of one order key are taken together, from 1 to 10 000. They are published one after the other, and are
    /// published again together if the relay dies among them.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_max_run_length(mut self, messages: usize) -> Result<Self, ConfigError> {
        self.settings.most.run =
            ConfigError::check("the number of messages taken together", messages, 1..=10_000)?;
        Ok(self)
    }

    /// How many messages are published at once, from 1 to 10 000; of one order key always one.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_concurrency(mut self, messages: usize) -> Result<Self, ConfigError> {
        self.settings.concurrency =
            ConfigError::check("the number of messages at once", messages, 1..=10_000)?;
        Ok(self)
    }

    /// How long what a relay took is its own without a word from it, from 1 s to an hour; it renews every third of it. After a
    /// crash that is how long its messages wait.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_lease(mut self, lease: Duration) -> Result<Self, ConfigError> {
        let hour = Duration::from_secs(60 * 60);
        self.lines.lease = ConfigError::check("the lease", lease, Duration::from_secs(1)..=hour)?;
        Ok(self)
    }

    /// How often it looks for messages where there were none, from 1 ms to an hour.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_poll(mut self, poll: Duration) -> Result<Self, ConfigError> {
        let hour = Duration::from_secs(60 * 60);
        self.settings.poll =
            ConfigError::check("the pause between looks", poll, Duration::from_millis(1)..=hour)?;
        Ok(self)
    }

    /// The pause after the first failure of a message, and the longest one; each is twice the one before, less a random part
    /// of up to half of it. Between 1 ms and an hour.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_backoff(mut self, first: Duration, longest: Duration) -> Result<Self, ConfigError> {
        let hour = Duration::from_secs(60 * 60);
        let first = ConfigError::check("the first pause", first, Duration::from_millis(1)..=hour)?;
        self.settings.backoff = (first, ConfigError::check("the longest pause", longest, first..=hour)?);
        Ok(self)
    }

    /// How long the broker may take to confirm a message; at least 1 ms. After it the message counts as not confirmed.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_publish_timeout(mut self, timeout: Duration) -> Result<Self, ConfigError> {
        self.settings.publish_timeout =
            ConfigError::check("the time to publish", timeout, Duration::from_millis(1)..=Duration::MAX)?;
        Ok(self)
    }

    /// How long what is under way may take when the relay is stopped. What is not confirmed by then is published again.
    pub fn with_shutdown_timeout(mut self, patience: Duration) -> Self {
        self.settings.patience = patience;
        self
    }

    /// What becomes of messages behind one that is refused.
    pub fn with_on_refused(mut self, on_refused: OnRefused) -> Self {
        self.settings.on_refused = on_refused;
        self
    }

    /// Whether the pool goes through a pooler that gives each transaction another session.
    pub fn with_transaction_pooler(mut self, through_pooler: bool) -> Self {
        self.lines.transaction_pooler = through_pooler;
        self
    }

    /// Who hears of everything that happens.
    pub fn with_observer(mut self, observer: impl RelayObserver) -> Self {
        self.settings.observer = Arc::new(observer);
        self
    }

    /// Wakes it from elsewhere.
    #[must_use]
    pub fn waker(&self) -> RelayWaker {
        RelayWaker(self.awake.clone())
    }

    /// Whether the database has the contract and the role of the pool may call what a relay calls: to be asked when a program
    /// starts. Without, [`run`](Self::run) waits, with a warning, for as long as that is so.
    ///
    /// # Errors
    /// [`StoreError`] that says what is missing, or that the database is out of reach.
    pub async fn check(&self) -> Result<(), StoreError> {
        let names = vec!["outbox_take", "outbox_renew", "outbox_settle"];
        let Lines { pool, transaction_pooler, .. } = &self.lines;
        receipts::check(pool, CALL_PATIENCE, *transaction_pooler, names, "docs/reference/outbox.md").await
    }

    /// Publishes until `stop` is ready, and then comes to rest: nothing more is taken, what is under way is ended, and what
    /// was not begun is given back. Whatever is out of reach is waited for, the database also when it starts.
    ///
    /// Dropping this future is as if the process died: its messages are taken over when their lease is over.
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

/// What the tasks that publish have in common.
struct Shared<P> {
    publisher: P,
    slots: Semaphore,
    is_stopping: AtomicBool,
    /// Several messages failed in a row: nothing more is begun.
    is_away: AtomicBool,
    failures: AtomicU32,
    backoff: (Duration, Duration),
    publish_timeout: Duration,
    on_refused: OnRefused,
    observer: Arc<dyn RelayObserver>,
}

/// What came of a run so far: also of one that is cut off.
type Outcomes = Arc<Mutex<Vec<(i64, Outcome)>>>;

impl<P: Publisher> Shared<P> {
    /// Publishes the rows of a run, each after the one before was confirmed.
    async fn publish(self: Arc<Self>, rows: Vec<Waiting>, lease: Arc<Lease>, outcomes: Outcomes) {
        for row in rows {
            // The semaphore is never closed.
            let Ok(_slot) = self.slots.acquire().await else { return };
            let is_halted = self.is_stopping.load(Ordering::Relaxed) || self.is_away.load(Ordering::Relaxed);
            // A lease that is over is no reason to be wrong about the order, only to publish twice; but a good one to stop.
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
    /// It was taken again since, so it was not ours any more.
    is_lost: bool,
}

/// How long to leave something alone that is out of reach.
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

    /// Whether it is on; it ends by itself.
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
    /// Where the look through the lines goes on.
    after: Option<i64>,
    is_pass_empty: bool,
    take_at: Instant,
    /// How often half as many octets are asked for: what took too long may have been too much for the way.
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

    /// When there is something to do, if nothing happens before.
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
        // Half of it, so that what is taken is worth the call.
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
            // All have ended. One more failure is enough from here on.
            self.shared.failures.store(FAILURES_MAX - 1, Ordering::Relaxed);
            self.shared.is_away.store(false, Ordering::Relaxed);
            if self.broker.times == 0 {
                warn!("the broker does not confirm what is published; the relay pauses");
            }
            self.broker.begin();
        } else if self.broker.times > 0 && self.shared.failures.load(Ordering::Relaxed) == 0 {
            info!("the broker confirms again what is published");
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
        // Where even one message may be too much, it has more time, and a lease that is not over when it comes. Nothing else is
        // held then that would have to be renewed meanwhile.
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
                // Where an old transaction keeps what was deleted, a look takes long: the database has something else to do.
                self.take_at = Instant::now() + self.settings.poll.max(asked.elapsed() * 4);
            }
            self.is_pass_empty = true;
        }
        let firsts: HashMap<_, _> = taken.runs.iter().map(|run| (run.line, run.first)).collect();
        for old in self.held.values_mut() {
            // A lease that could not be renewed in time: the line was nobody's. What was committed in front of a run takes
            // nothing away from it.
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
            // Cut off, or the observer panicked; what was confirmed before counts.
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
        // One run of a line at a time: whose a row is that something is said of is told by its line.
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
                // There may be more in it.
                self.take_at = Instant::now();
            }
        }
    }

    async fn renew(&mut self) {
        if Instant::now() < self.renew_at {
            return;
        }
        // One run of a line, the earlier one: the answer tells lines, and not runs. The other one's lease ends.
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

    /// The patience is over: what is under way is cut off, and what is known is written down.
    async fn give_up(mut self) {
        warn!(
            runs = self.tasks.len(),
            "the relay stops before all that it published was confirmed; it will be published again"
        );
        self.tasks.abort_all();
        while let Some(ended) = self.tasks.join_next_with_id().await {
            self.end(ended);
        }
        let settled = timeout(LAST_WORDS, async {
            // Runs of one line one after the other.
            let mut left = usize::MAX;
            while self.ended.len() < left {
                left = self.ended.len();
                self.settle().await;
            }
        });
        if settled.await.is_err() || !self.ended.is_empty() {
            warn!("what the relay published could not be written down; it will be published again");
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

/// Without control characters, and not longer than an error in a dead letter.
fn in_short(error: &str) -> String {
    let mut short: String = error.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    short.truncate(short.floor_char_boundary(MAX_ERROR_BYTES));
    short
}

/// Between half of it and all of it.
fn jittered(pause: Duration) -> Duration {
    let mut bits = [0; 4];
    // Without random numbers all of it is as good.
    let part =
        getrandom::fill(&mut bits).map_or(1.0, |()| f64::from(u32::from_ne_bytes(bits)) / 4_294_967_296.0);
    pause.mul_f64(0.5 + part / 2.0)
}
