//! The loop between a broker and a processor.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::ErrorChain;
use oncegate_engine::{ConfigError, Panicked, catch_panic};
use tokio::task::{AbortHandle, Id, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout, timeout_at};
use tokio_util::time::DelayQueue;
use tracing::{Instrument as _, debug, error, info_span, warn};

use crate::event::{Event, EventKind, Observer};
use crate::message::Message;
use crate::outcome::{DeadReason, ProcessOutcome, Settlement};
use crate::processor::Processor;
use crate::source::{Delivery, Source, SourceError};

/// Takes messages from a source, has them processed, and acknowledges what is durable.
///
/// - **Order**: under [`Order::PerKey`] messages with one [`order_key`](Message::order_key) are processed one after the
///   other. One that fails is tried again in place, and holds up its key and no other. Messages without a key have no order.
/// - **Bounds**: so many messages and octets are held at the most, and so many batches run at once. Where the bound is reached,
///   nothing more is asked for.
/// - **Time**: what is held is extended at the broker every third of its redelivery time.
/// - **Something is wrong**: after so many dead letters in a row, and no message that was processed, it ends with
///   [`ConsumerError::OnlyDeadLetters`], and leaves the rest with the broker.
/// - **Stopping**: nothing more is asked for, what runs is ended and acknowledged, what was not begun is given back.
#[must_use = "it consumes when it is run"]
pub struct Consumer<S, P> {
    source: S,
    processor: P,
    settings: Settings,
}

struct Settings {
    concurrency: usize,
    max_held: usize,
    max_bytes: usize,
    order: Order,
    backoff: (Duration, Duration),
    patience: Duration,
    max_dead_in_a_row: Option<u32>,
    observer: Arc<dyn Observer>,
}

impl<S, P> fmt::Debug for Consumer<S, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer")
            .field("concurrency", &self.settings.concurrency)
            .field("max_held", &self.settings.max_held)
            .field("order", &self.settings.order)
            .finish_non_exhaustive()
    }
}

/// Which messages are processed in the order in which they came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Order {
    /// Those with one order key. A message that fails is tried again in place.
    PerKey,
    /// None. A message that fails is given back to a broker that takes it.
    None,
}

/// Why a consumer ended by itself.
#[derive(Debug)]
#[non_exhaustive]
pub enum ConsumerError {
    /// Settings that don't fit together. Nothing was consumed.
    Config(ConfigError),
    /// The source will not give anything any more. What ran was ended first.
    Source(SourceError),
    /// So many messages in a row became dead letters, and none was processed in between: a table is missing, the identity is
    /// named wrongly, the producer changed. What is left stays with the broker. What ran was ended first.
    OnlyDeadLetters {
        /// How many there were.
        in_a_row: u32,
        /// Why the last one is a dead letter.
        reason: DeadReason,
        /// What an attempt failed of last, if one did.
        failure: Option<String>,
    },
}

impl fmt::Display for ConsumerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(_) => f.write_str("the settings of the consumer do not fit together"),
            Self::Source(_) => f.write_str("the source of messages cannot be used any more"),
            Self::OnlyDeadLetters { in_a_row, reason, failure } => {
                write!(
                    f,
                    "the last {in_a_row} messages became dead letters, and none was processed in between ({reason}"
                )?;
                if let Some(failure) = failure {
                    write!(f, "; the last failure was: {failure}")?;
                }
                f.write_str(
                    "); nothing more is consumed: look at the dead letters, mend the cause, and start again",
                )
            }
        }
    }
}

impl std::error::Error for ConsumerError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Config(error) => Some(error),
            Self::Source(error) => Some(error),
            Self::OnlyDeadLetters { .. } => None,
        }
    }
}

/// How long the source may take to close: long enough to tell a broker what was acknowledged.
const CLOSE_PATIENCE: Duration = Duration::from_secs(10);

/// How long it takes to cut off what does not block its thread.
const CUT_PATIENCE: Duration = Duration::from_secs(1);

/// Dead letters in a row after which a consumer ends, unless told otherwise. A producer that sends some broken messages does
/// not come to it; a consumer that can process nothing comes to it soon.
const MAX_DEAD_IN_A_ROW: u32 = 100;

/// Extensions that are under way at once.
const MAX_EXTENDING: usize = 32;

impl<S: Source, P: Processor> Consumer<S, P> {
    /// Eight batches at a time, at most 1000 messages and 64 MiB held, order per key, pauses of 100 ms to 30 s after failures,
    /// 100 dead letters in a row, and 30 s to end what runs.
    pub fn new(source: S, processor: P) -> Self {
        let settings = Settings {
            concurrency: 8,
            max_held: 1000,
            max_bytes: 64 << 20,
            order: Order::PerKey,
            backoff: (Duration::from_millis(100), Duration::from_secs(30)),
            patience: Duration::from_secs(30),
            max_dead_in_a_row: Some(MAX_DEAD_IN_A_ROW),
            observer: Arc::new(()),
        };
        Self { source, processor, settings }
    }

    /// How many batches are processed at a time, from 1 to 1024.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_concurrency(mut self, batches: usize) -> Result<Self, ConfigError> {
        self.settings.concurrency = ConfigError::check("the number of batches at a time", batches, 1..=1024)?;
        Ok(self)
    }

    /// How many messages are held at the most, from 1 to 100 000: waiting, being processed, and to be tried again.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_max_held(mut self, messages: usize) -> Result<Self, ConfigError> {
        self.settings.max_held = ConfigError::check("the number of messages held", messages, 1..=100_000)?;
        Ok(self)
    }

    /// How many octets of messages are held at the most; one message is, whatever its size.
    pub fn with_max_bytes(mut self, octets: usize) -> Self {
        self.settings.max_bytes = octets;
        self
    }

    /// Which messages stay in order.
    pub fn with_order(mut self, order: Order) -> Self {
        self.settings.order = order;
        self
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

    /// How long what runs may take when the consumer is stopped. What has not ended by then is cut off, and comes again. A
    /// handler that blocks its thread cannot be cut off: [`run`](Self::run) returns without it, and tokio's runtime waits for it
    /// when it is dropped. Blocking work belongs into `spawn_blocking`.
    pub fn with_shutdown_timeout(mut self, patience: Duration) -> Self {
        self.settings.patience = patience;
        self
    }

    /// After how many dead letters in a row, with no message processed in between, the consumer ends with
    /// [`ConsumerError::OnlyDeadLetters`]; `None` for never. Duplicates and letters that were known before do not count. What
    /// runs at the same time may add some. A program that starts the consumer again at once turns as many more into dead
    /// letters: it should wait, and alert.
    ///
    /// # Errors
    /// If it is zero.
    pub fn with_max_dead_in_a_row(mut self, messages: Option<u32>) -> Result<Self, ConfigError> {
        if messages == Some(0) {
            return Err(ConfigError::new("max_dead_in_a_row: at least 1, or None for never"));
        }
        self.settings.max_dead_in_a_row = messages;
        Ok(self)
    }

    /// Who hears of everything that happens.
    pub fn with_observer(mut self, observer: impl Observer) -> Self {
        self.settings.observer = Arc::new(observer);
        self
    }

    /// Consumes until `stop` is ready, and then comes to rest.
    ///
    /// Dropping this future is as if the process died: what runs is cut off, and what was not acknowledged comes again.
    ///
    /// # Errors
    /// [`ConsumerError`].
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<(), ConsumerError> {
        let Self { source, processor, settings } = self;
        let info = source.info();
        processor.check(&info).map_err(ConsumerError::Config)?;
        let run = Run {
            source,
            processor: Arc::new(processor),
            settings,
            lanes: HashMap::new(),
            ready: VecDeque::new(),
            parked: DelayQueue::new(),
            batches: HashMap::new(),
            running: JoinSet::new(),
            settling: JoinSet::new(),
            extending: None,
            held: 0,
            octets: 0,
            number: 0,
            away: Pause::default(),
            source_away: Pause::default(),
            dead_in_a_row: DeadInARow::default(),
            extend_every: info.redelivery().map(|time| (time / 3).max(Duration::from_millis(10))),
        };
        run.until(stop).await
    }
}

/// What is processed one after the other.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum LaneKey {
    /// Messages of a topic with an order key.
    Ordered(String, Bytes),
    /// A message by itself.
    Single(u64),
}

/// Messages of one key.
struct Lane<D> {
    waiting: VecDeque<Held<D>>,
    /// In `ready`, in `batches` or in `parked`: in one of them, as long as there is anything in it.
    is_placed: bool,
}

/// A message that is neither acknowledged nor given back.
struct Held<D> {
    delivery: Arc<D>,
    /// When the broker last gave time for it.
    since: Instant,
    /// How often it came to nothing since it was delivered.
    failures: u32,
}

impl<D: Delivery> Held<D> {
    fn message(&self) -> &Arc<Message> {
        self.delivery.message()
    }
}

/// What is being processed, and what it was taken from.
struct Batch<D> {
    lanes: Vec<(LaneKey, Vec<Held<D>>)>,
    began: Instant,
}

/// Dead letters since a message was processed.
#[derive(Default)]
struct DeadInARow {
    count: u32,
    reason: Option<DeadReason>,
    failure: Option<String>,
}

impl DeadInARow {
    fn note(&mut self, handled: &ProcessOutcome) {
        match handled {
            ProcessOutcome::Processed { .. } => *self = Self::default(),
            ProcessOutcome::Dead { reason, is_known: false } => {
                self.count = self.count.saturating_add(1);
                self.reason = Some(*reason);
            }
            ProcessOutcome::Failed { failure, .. } => self.failure = Some(failure.to_error_text()),
            _ => {}
        }
    }

    /// The end of the consumer, if there are as many.
    fn is_enough(&self, max: Option<u32>) -> Option<ConsumerError> {
        let reason = self.reason.filter(|_| max.is_some_and(|max| self.count >= max))?;
        // Other reasons have nothing to do with what handlers say.
        let failure = self.failure.clone().filter(|_| reason == DeadReason::AttemptsExhausted);
        Some(ConsumerError::OnlyDeadLetters { in_a_row: self.count, reason, failure })
    }
}

/// How long to leave something alone that is out of reach.
#[derive(Default)]
struct Pause {
    until: Option<Instant>,
    times: u32,
}

impl Pause {
    fn is_on(&self) -> bool {
        self.until.is_some()
    }

    fn again(&mut self) {
        let pause = Duration::from_millis(100) * 2_u32.saturating_pow(self.times.min(6));
        self.times = self.times.saturating_add(1);
        self.until = Some(Instant::now() + jittered(pause.min(Duration::from_secs(5))));
    }

    async fn over(&mut self) {
        match self.until {
            Some(until) => {
                sleep_until(until).await;
                self.until = None;
            }
            None => std::future::pending().await,
        }
    }
}

/// Between half of it and all of it.
fn jittered(pause: Duration) -> Duration {
    let mut bits = [0; 4];
    // Without random numbers all of it is as good.
    let part =
        getrandom::fill(&mut bits).map_or(1.0, |()| f64::from(u32::from_ne_bytes(bits)) / 4_294_967_296.0);
    pause.mul_f64(0.5 + part / 2.0)
}

struct Run<S: Source, P> {
    source: S,
    processor: Arc<P>,
    settings: Settings,
    lanes: HashMap<LaneKey, Lane<S::Delivery>>,
    ready: VecDeque<LaneKey>,
    parked: DelayQueue<LaneKey>,
    batches: HashMap<Id, Batch<S::Delivery>>,
    running: JoinSet<Vec<ProcessOutcome>>,
    /// Tells how many octets it frees.
    settling: JoinSet<usize>,
    extending: Option<AbortHandle>,
    held: usize,
    octets: usize,
    number: u64,
    /// What processes messages is out of reach.
    away: Pause,
    source_away: Pause,
    dead_in_a_row: DeadInARow,
    extend_every: Option<Duration>,
}

impl<S: Source, P: Processor> Run<S, P> {
    async fn until(mut self, stop: impl Future<Output = ()>) -> Result<(), ConsumerError> {
        let mut stop = pin!(stop);
        let mut extend = interval(self.extend_every.unwrap_or(Duration::from_secs(3600)));
        extend.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let ended = loop {
            if let Some(error) = self.dead_in_a_row.is_enough(self.settings.max_dead_in_a_row) {
                break Err(error);
            }
            self.dispatch();
            let has_room = self.has_room();
            tokio::select! {
                biased;
                () = &mut stop => break Ok(()),
                Some(done) = self.running.join_next_with_id() => self.done(done),
                Some(settled) = self.settling.join_next() => self.freed(settled.ok()),
                Some(lane) = poll_fn(|cx| self.parked.poll_expired(cx)), if !self.parked.is_empty() => {
                    self.ready.push_back(lane.into_inner());
                }
                _ = extend.tick(), if self.extend_every.is_some() => self.extend(),
                () = self.away.over(), if self.away.is_on() => {}
                () = self.source_away.over(), if self.source_away.is_on() => {}
                delivery = self.source.next(), if has_room && !self.source_away.is_on() => {
                    if let Err(error) = self.took(delivery).await {
                        break Err(ConsumerError::Source(error));
                    }
                }
            }
        };
        if let Err(error @ ConsumerError::OnlyDeadLetters { .. }) = &ended {
            error!(consumer = self.processor.consumer().as_str(), error = %ErrorChain(&error), "the consumer stops");
        }
        self.rest(extend).await;
        match timeout(CLOSE_PATIENCE, self.source.close()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                warn!(error = %ErrorChain(&error), "the source of messages was not closed; some may come again")
            }
            Err(_) => warn!("the source of messages was not closed in time; some may come again"),
        }
        ended
    }

    fn has_room(&self) -> bool {
        self.held < self.settings.max_held && (self.held == 0 || self.octets < self.settings.max_bytes)
    }

    /// Takes what came, and what else is there already, so that batches are as full as they can be.
    async fn took(&mut self, mut delivery: Result<S::Delivery, SourceError>) -> Result<(), SourceError> {
        loop {
            match delivery {
                Ok(delivery) => {
                    self.source_away.times = 0;
                    self.accept(delivery);
                }
                Err(error) => {
                    self.emit("", EventKind::SourceFailed, Duration::ZERO);
                    if error.is_fatal() {
                        return Err(error);
                    }
                    warn!(error = %ErrorChain(&error), "no messages come; it is tried again");
                    self.source_away.again();
                    return Ok(());
                }
            }
            if !self.has_room() {
                return Ok(());
            }
            delivery = tokio::select! {
                biased;
                delivery = self.source.next() => delivery,
                () = std::future::ready(()) => return Ok(()),
            };
        }
    }

    fn accept(&mut self, delivery: S::Delivery) {
        let delivery = Arc::new(delivery);
        let message = delivery.message();
        self.held += 1;
        self.octets += weight(message);
        let key = match (&self.settings.order, &message.order_key) {
            (Order::PerKey, Some(key)) => LaneKey::Ordered(message.topic.clone(), key.clone()),
            _ => {
                self.number += 1;
                LaneKey::Single(self.number)
            }
        };
        let lane = self
            .lanes
            .entry(key.clone())
            .or_insert_with(|| Lane { waiting: VecDeque::new(), is_placed: false });
        lane.waiting.push_back(Held { delivery, since: Instant::now(), failures: 0 });
        if !lane.is_placed {
            lane.is_placed = true;
            self.ready.push_back(key);
        }
    }

    /// Begins as many batches as may run.
    fn dispatch(&mut self) {
        let max_batch = self.processor.max_batch().max(1);
        while self.running.len() < self.settings.concurrency && !self.away.is_on() {
            let mut batch = Batch { lanes: Vec::new(), began: Instant::now() };
            let mut messages = Vec::new();
            while messages.len() < max_batch
                && let Some(key) = self.ready.pop_front()
            {
                let taken = self.take(&key, max_batch - messages.len());
                if taken.is_empty() {
                    self.place(key, None);
                } else {
                    messages.extend(taken.iter().map(|held| held.message().clone()));
                    batch.lanes.push((key, taken));
                }
            }
            if messages.is_empty() {
                return;
            }
            let processor = self.processor.clone();
            let span = info_span!(
                "oncegate.messages",
                consumer = processor.consumer().as_str(),
                topic = messages.first().map_or("", |message| message.topic.as_str()),
                messages = messages.len(),
            );
            let task = async move { processor.process(&messages).await };
            let id = self.running.spawn(task.instrument(span)).id();
            self.batches.insert(id, batch);
        }
    }

    /// The first messages of a lane, without those that are somebody else's by now.
    fn take(&mut self, key: &LaneKey, most: usize) -> Vec<Held<S::Delivery>> {
        let mut taken = Vec::new();
        let mut lost = Vec::new();
        if let Some(lane) = self.lanes.get_mut(key) {
            while taken.len() < most
                && let Some(held) = lane.waiting.pop_front()
            {
                if held.delivery.is_lost() { lost.push(held) } else { taken.push(held) }
            }
        }
        for held in lost {
            self.forget(&held, EventKind::Lost);
        }
        taken
    }

    /// Puts a lane where it belongs: nowhere if it is empty.
    fn place(&mut self, key: LaneKey, after: Option<Duration>) {
        let Some(lane) = self.lanes.get_mut(&key) else { return };
        if lane.waiting.is_empty() {
            self.lanes.remove(&key);
            return;
        }
        match after {
            Some(after) => {
                self.parked.insert(key, after);
            }
            None => self.ready.push_back(key),
        }
    }

    fn forget(&mut self, held: &Held<S::Delivery>, kind: EventKind) {
        self.held -= 1;
        self.octets -= weight(held.message());
        self.emit(&held.message().topic, kind, Duration::ZERO);
    }

    /// A batch has ended.
    fn done(&mut self, done: Result<(Id, Vec<ProcessOutcome>), tokio::task::JoinError>) {
        let (id, handled) = match done {
            Ok((id, handled)) => (id, Some(handled)),
            Err(error) => (error.id(), None),
        };
        let Some(batch) = self.batches.remove(&id) else { return };
        let took = batch.began.elapsed();
        let panicked = handled.is_none();
        if panicked {
            warn!("what processes messages panicked; they are tried again");
            self.emit("", EventKind::Panicked, took);
        }
        let mut handled = handled.into_iter().flatten();
        let mut is_away = false;
        for (key, taken) in batch.lanes {
            // What is tried again in place, and after how long.
            let mut kept: Vec<Held<S::Delivery>> = Vec::new();
            let mut after = None;
            for mut held in taken {
                let settlement = match handled.next() {
                    Some(handled) => {
                        // What was given back comes again as one that has not failed; its attempts are counted elsewhere, too.
                        let before = match &handled {
                            ProcessOutcome::Failed { attempts, .. } => attempts.saturating_sub(1),
                            _ => 0,
                        };
                        let backoff = self.backoff(held.failures.max(before));
                        self.emit(&held.message().topic, EventKind::of(&handled), took);
                        self.tell(held.message(), &handled);
                        self.dead_in_a_row.note(&handled);
                        match &handled {
                            ProcessOutcome::Unavailable(_) => is_away = true,
                            ProcessOutcome::Failed { .. } => held.failures = held.failures.saturating_add(1),
                            _ => {}
                        }
                        let may_go =
                            !matches!(handled, ProcessOutcome::Unavailable(_) | ProcessOutcome::NotBegun);
                        (handled.settlement(backoff), may_go)
                    }
                    None => {
                        let backoff = self.backoff(held.failures);
                        held.failures = held.failures.saturating_add(u32::from(panicked));
                        (Settlement::RedeliverAfter(backoff), false)
                    }
                };
                match settlement {
                    (Settlement::Acknowledge, _) => self.settle(held, None),
                    (Settlement::RedeliverAfter(_), _) if held.delivery.is_lost() => {
                        self.forget(&held, EventKind::Lost)
                    }
                    (Settlement::RedeliverAfter(wait), true)
                        if S::Delivery::GIVES_BACK && matches!(key, LaneKey::Single(_)) =>
                    {
                        self.settle(held, Some(wait));
                    }
                    (Settlement::RedeliverAfter(wait), _) => {
                        // Those behind it wait as long as the first one.
                        after.get_or_insert(wait);
                        kept.push(held);
                    }
                }
            }
            match self.lanes.get_mut(&key) {
                Some(lane) => {
                    for held in kept.into_iter().rev() {
                        lane.waiting.push_front(held);
                    }
                    self.place(key, after.filter(|after| !after.is_zero()));
                }
                // The consumer comes to rest.
                None => kept.into_iter().for_each(|held| self.leave(held)),
            }
        }
        if is_away {
            self.away.again();
        } else {
            self.away.times = 0;
        }
    }

    /// Tells the log. What a handler says of its failures is its own affair; nothing else here comes from a message.
    fn tell(&self, message: &Message, handled: &ProcessOutcome) {
        let (consumer, topic) = (self.processor.consumer().as_str(), message.topic.as_str());
        match handled {
            ProcessOutcome::Failed { attempts, failure } => {
                let failure = ErrorChain(failure.error());
                warn!(consumer, topic, attempts, %failure, "a message was not processed; it is tried again");
            }
            ProcessOutcome::Dead { reason, is_known: false } => {
                warn!(consumer, topic, %reason, "a message is a dead letter now");
            }
            ProcessOutcome::Unavailable(error) => {
                warn!(consumer, topic, error = %ErrorChain(&error), "a message cannot be processed now; it is tried again");
            }
            handled => {
                debug!(consumer, topic, outcome = EventKind::of(handled).as_str(), "a message was handled")
            }
        }
    }

    fn backoff(&self, failures: u32) -> Duration {
        let (first, longest) = self.settings.backoff;
        jittered(first.saturating_mul(2_u32.saturating_pow(failures.min(20))).min(longest))
    }

    /// Acknowledges a delivery, or gives it back after so long.
    fn settle(&mut self, held: Held<S::Delivery>, give_back: Option<Duration>) {
        if held.delivery.is_lost() {
            return self.forget(&held, EventKind::Lost);
        }
        let (observer, processor) = (self.settings.observer.clone(), self.processor.clone());
        self.settling.spawn(async move {
            let began = Instant::now();
            let message = held.message().clone();
            let (told, kind) = match give_back {
                Some(after) => (catch_panic(held.delivery.give_back(after)).await, EventKind::GivenBack),
                None => (catch_panic(held.delivery.ack()).await, EventKind::Acknowledged),
            };
            let kind = match told {
                Ok(Ok(())) => kind,
                Ok(Err(error)) => {
                    debug!(error = %ErrorChain(&error), "the broker was not told of a message; it comes again");
                    EventKind::SettlementFailed
                }
                Err(Panicked) => EventKind::SettlementFailed,
            };
            let consumer = processor.consumer().as_str();
            observer.observe(&Event::new(consumer, &message.topic, kind, began.elapsed()));
            weight(&message)
        });
    }

    /// A message was settled. `None` where that was cut off.
    fn freed(&mut self, octets: Option<usize>) {
        self.held = self.held.saturating_sub(1);
        self.octets = self.octets.saturating_sub(octets.unwrap_or_default());
    }

    /// Asks the broker for more time for what is held.
    fn extend(&mut self) {
        let Some(every) = self.extend_every else { return };
        if self.extending.as_ref().is_some_and(|task| !task.is_finished()) {
            return;
        }
        let now = Instant::now();
        let waiting = self.lanes.values_mut().flat_map(|lane| lane.waiting.iter_mut());
        let running = self.batches.values_mut().flat_map(|batch| &mut batch.lanes).flat_map(|(_, held)| held);
        let mut due: Vec<Arc<S::Delivery>> = Vec::new();
        for held in waiting.chain(running) {
            // The next look may come a little late.
            if now.duration_since(held.since) * 2 >= every && !held.delivery.is_lost() {
                held.since = now;
                due.push(held.delivery.clone());
            }
        }
        if due.is_empty() {
            return;
        }
        let (observer, processor) = (self.settings.observer.clone(), self.processor.clone());
        let task = tokio::spawn(async move {
            let mut under_way = JoinSet::new();
            for delivery in due {
                if under_way.len() >= MAX_EXTENDING {
                    under_way.join_next().await;
                }
                let (observer, processor) = (observer.clone(), processor.clone());
                under_way.spawn(async move {
                    let began = Instant::now();
                    if let Err(error) = delivery.extend().await {
                        debug!(error = %ErrorChain(&error), "the broker did not give more time for a message");
                        let (consumer, topic) = (processor.consumer().as_str(), &delivery.message().topic);
                        let kind = EventKind::ExtensionFailed;
                        observer.observe(&Event::new(consumer, topic, kind, began.elapsed()));
                    }
                });
            }
            while under_way.join_next().await.is_some() {}
        });
        self.extending = Some(task.abort_handle());
    }

    /// Ends what runs, gives back what was not begun.
    async fn rest(&mut self, mut extend: tokio::time::Interval) {
        let until = Instant::now() + self.settings.patience;
        let lanes = std::mem::take(&mut self.lanes);
        // What is in the middle of a batch comes back to a lane that is not there any more, and goes with it.
        self.ready.clear();
        self.parked.clear();
        for held in lanes.into_values().flat_map(|lane| lane.waiting) {
            self.leave(held);
        }
        while !self.running.is_empty() {
            tokio::select! {
                biased;
                Some(done) = self.running.join_next_with_id() => self.done(done),
                Some(settled) = self.settling.join_next() => self.freed(settled.ok()),
                _ = extend.tick(), if self.extend_every.is_some() => self.extend(),
                () = sleep_until(until) => {
                    let batches = self.running.len();
                    warn!(batches, "what runs did not end in time; it is cut off, and comes again");
                    self.running.abort_all();
                    self.batches.clear();
                    break;
                }
            }
        }
        let until = Instant::now() + CUT_PATIENCE;
        while let Ok(Some(_)) = timeout_at(until, self.running.join_next()).await {}
        if !self.running.is_empty() {
            warn!("a handler blocks its thread and cannot be cut off; it is left to itself");
            self.running.detach_all();
        }
        let until = Instant::now() + CLOSE_PATIENCE;
        while let Ok(Some(settled)) = timeout_at(until, self.settling.join_next()).await {
            self.freed(settled.ok());
        }
        self.settling.shutdown().await;
        if let Some(extending) = self.extending.take() {
            extending.abort();
        }
    }

    /// Has a message come again that was not processed, and forgets it.
    fn leave(&mut self, held: Held<S::Delivery>) {
        if S::Delivery::GIVES_BACK {
            self.settle(held, Some(Duration::ZERO));
        } else {
            self.forget(&held, EventKind::GivenBack);
        }
    }

    fn emit(&self, topic: &str, kind: EventKind, took: Duration) {
        let consumer = self.processor.consumer().as_str();
        self.settings.observer.observe(&Event::new(consumer, topic, kind, took));
    }
}

/// What a message takes, roughly.
fn weight(message: &Message) -> usize {
    let headers: usize = message.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
    256 + message.payload.len() + headers
}
