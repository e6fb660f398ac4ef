//! The loop between a broker and a processor.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::ErrorChain;
use oncegate_engine::{ConfigError, PanicError, catch_panic};
use tokio::task::{AbortHandle, Id, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout, timeout_at};
use tokio_util::time::DelayQueue;
use tracing::{Instrument as _, debug, error, info_span, warn};

use crate::event::{InboxEvent, InboxEventKind, InboxObserver};
use crate::jitter::jittered;
use crate::message::Message;
use crate::outcome::{DeadReason, ProcessOutcome, Settlement};
use crate::processor::Processor;
use crate::source::{Delivery, Source, SourceError};

/// Takes messages from a source, passes them to a processor, and acknowledges what is durable.
///
/// - **Order**: under [`Order::PerKey`] messages with one [`order_key`](Message::order_key) are processed one after the
///   other. A message that fails is tried again in place, and blocks only its own key. Messages without a key have no
///   order.
/// - **Limits**: the number and the bytes of held messages, and the number of concurrent batches, are limited. At a
///   limit the consumer requests nothing more.
/// - **Time**: the consumer extends held messages at the broker every third of the redelivery time.
/// - **Systematic failure**: after a number of dead letters in a row without a processed message, it ends with
///   [`ConsumerError::OnlyDeadLetters`], and leaves the rest with the broker.
/// - **Shutdown**: it requests nothing more, finishes and acknowledges what runs, and gives the rest back.
#[must_use = "a consumer works only while `run` is polled"]
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
    shutdown_timeout: Duration,
    max_dead_in_a_row: Option<u32>,
    observer: Arc<dyn InboxObserver>,
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

/// The order in which messages are processed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Order {
    /// Messages with one order key stay in order. A message that fails is tried again in place.
    PerKey,
    /// No order. A message that fails is given back, if the broker supports it.
    None,
}

/// The reason why a consumer ended by itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConsumerError {
    /// The settings do not fit together. Nothing was consumed.
    #[error("the settings of the consumer do not fit together")]
    Config(#[source] ConfigError),
    /// The source cannot be used any more. Running messages were finished first.
    #[error("the source cannot be used any more")]
    Source(#[source] SourceError),
    /// Too many messages in a row became dead letters, and none was processed in between.
    ///
    /// Typical causes are a missing table, a wrong identity, or a changed producer. The rest stays with the broker.
    /// Running messages were finished first.
    #[error(
        "the last {in_a_row} messages became dead letters, and none was processed in between ({reason}{}); nothing more is \
         consumed: look at the dead letters, remove the cause, and start again",
        .failure.as_ref().map(|failure| format!("; the last failure was: {failure}")).unwrap_or_default()
    )]
    OnlyDeadLetters {
        /// The number of dead letters in a row.
        in_a_row: u32,
        /// The reason of the last dead letter.
        reason: DeadReason,
        /// The last error of an attempt, if there was one.
        failure: Option<String>,
    },
}

/// The timeout for closing the source: long enough to send the last acknowledgements.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// The time that the cancellation of tasks takes, unless one of them blocks its thread.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(1);

/// The default number of dead letters in a row after which a consumer ends.
///
/// A producer that sends some broken messages does not reach it. A consumer that cannot process anything reaches it
/// soon.
const MAX_DEAD_IN_A_ROW: u32 = 100;

/// The maximum number of concurrent extensions.
const MAX_EXTENDING: usize = 32;

impl<S: Source, P: Processor> Consumer<S, P> {
    /// Creates a consumer.
    ///
    /// Defaults: eight concurrent batches, at most 1000 messages and 64 MiB held, order per key, pauses of 100 ms to 30
    /// s after failures, an end after 100 dead letters in a row, and 30 s for a shutdown.
    pub fn new(source: S, processor: P) -> Self {
        let settings = Settings {
            concurrency: 8,
            max_held: 1000,
            max_bytes: 64 << 20,
            order: Order::PerKey,
            backoff: (Duration::from_millis(100), Duration::from_secs(30)),
            shutdown_timeout: Duration::from_secs(30),
            max_dead_in_a_row: Some(MAX_DEAD_IN_A_ROW),
            observer: Arc::new(()),
        };
        Self { source, processor, settings }
    }

    /// Sets the number of concurrent batches, from 1 to 1024.
    ///
    /// # Errors
    /// [`ConfigError`] if it is out of these bounds.
    pub fn with_concurrency(mut self, batches: usize) -> Result<Self, ConfigError> {
        self.settings.concurrency = ConfigError::check("the number of batches at a time", batches, 1..=1024)?;
        Ok(self)
    }

    /// Sets how many messages are held, from 1 to 100 000: waiting, being processed, or to be tried again.
    ///
    /// # Errors
    /// [`ConfigError`] if it is out of these bounds.
    pub fn with_max_held(mut self, messages: usize) -> Result<Self, ConfigError> {
        self.settings.max_held = ConfigError::check("the number of messages held", messages, 1..=100_000)?;
        Ok(self)
    }

    /// Sets how many bytes of messages are held. One message of any size is always allowed.
    pub fn with_max_bytes(mut self, bytes: usize) -> Self {
        self.settings.max_bytes = bytes;
        self
    }

    /// Sets the order in which messages are processed.
    pub fn with_order(mut self, order: Order) -> Self {
        self.settings.order = order;
        self
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

    /// Sets how long running messages may take at a shutdown. Those that have not ended by then are cancelled, and come
    /// again.
    ///
    /// A handler that blocks its thread cannot be cancelled: [`run`](Self::run) returns without it, and tokio's runtime
    /// waits for it when it is dropped. Use `spawn_blocking` for blocking work.
    pub fn with_shutdown_timeout(mut self, timeout: Duration) -> Self {
        self.settings.shutdown_timeout = timeout;
        self
    }

    /// Sets how many dead letters in a row, without a processed message in between, end the consumer; `None` for no
    /// limit.
    ///
    /// The end is [`ConsumerError::OnlyDeadLetters`]. Duplicates and known dead letters do not count. Concurrent
    /// messages may add some. A program that restarts the consumer at once turns as many messages into dead letters
    /// again. So it should wait before a restart, and alert.
    ///
    /// # Errors
    /// [`ConfigError`] if it is zero.
    pub fn with_max_dead_in_a_row(mut self, messages: Option<u32>) -> Result<Self, ConfigError> {
        if messages == Some(0) {
            return Err(ConfigError::new(
                "max_dead_in_a_row is 0; it must be at least 1, or None for no limit",
            ));
        }
        self.settings.max_dead_in_a_row = messages;
        Ok(self)
    }

    /// Sets the observer of all events.
    pub fn with_observer(mut self, observer: impl InboxObserver) -> Self {
        self.settings.observer = Arc::new(observer);
        self
    }

    /// Consumes until `stop` is ready, for example `tokio::signal::ctrl_c()`, and then shuts down.
    ///
    /// Dropping this future is like a crash: running messages are cancelled, and messages without an acknowledgement
    /// come again.
    ///
    /// # Errors
    /// [`ConsumerError`].
    pub async fn run(self, stop: impl Future) -> Result<(), ConsumerError> {
        let Self { source, processor, settings } = self;
        let info = source.info();
        processor.check(&info).map_err(ConsumerError::Config)?;
        let run = Run {
            source,
            processor: Arc::new(processor),
            settings,
            lanes: HashMap::new(),
            ready: VecDeque::new(),
            delayed: DelayQueue::new(),
            batches: HashMap::new(),
            running: JoinSet::new(),
            settling: JoinSet::new(),
            extending: None,
            held: 0,
            bytes: 0,
            number: 0,
            away: Pause::default(),
            source_pause: Pause::default(),
            dead_in_a_row: DeadInARow::default(),
            extend_every: info.redelivery().map(|time| (time / 3).max(Duration::from_millis(10))),
        };
        run.until(stop).await
    }
}

/// The key of messages that are processed one after the other.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum LaneKey {
    /// Messages of a topic with an order key.
    Ordered(String, Bytes),
    /// A message without order.
    Single(u64),
}

/// The messages of one key.
struct Lane<D> {
    waiting: VecDeque<HeldDelivery<D>>,
    /// `true` if the lane is in `ready`, in `batches` or in `delayed`. A lane with messages is in exactly one of them.
    is_placed: bool,
}

/// A message that is neither acknowledged nor given back.
struct HeldDelivery<D> {
    delivery: Arc<D>,
    /// The time at which the broker last granted time for it.
    since: Instant,
    /// The number of failures since it was delivered.
    failures: u32,
}

impl<D: Delivery> HeldDelivery<D> {
    fn message(&self) -> &Arc<Message> {
        self.delivery.message()
    }
}

/// A running batch, and the lanes of its messages.
struct Batch<D> {
    lanes: Vec<(LaneKey, Vec<HeldDelivery<D>>)>,
    began: Instant,
}

/// The dead letters since the last processed message.
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

    /// Returns the end of the consumer if the limit is reached.
    fn is_enough(&self, max: Option<u32>) -> Option<ConsumerError> {
        let reason = self.reason.filter(|_| max.is_some_and(|max| self.count >= max))?;
        // With other reasons, the last error of a handler is not the cause.
        let failure = self.failure.clone().filter(|_| reason == DeadReason::AttemptsExhausted);
        Some(ConsumerError::OnlyDeadLetters { in_a_row: self.count, reason, failure })
    }
}

/// A pause with exponential backoff, for a store or broker that is out of reach.
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

struct Run<S: Source, P> {
    source: S,
    processor: Arc<P>,
    settings: Settings,
    lanes: HashMap<LaneKey, Lane<S::Delivery>>,
    ready: VecDeque<LaneKey>,
    delayed: DelayQueue<LaneKey>,
    batches: HashMap<Id, Batch<S::Delivery>>,
    running: JoinSet<Vec<ProcessOutcome>>,
    /// Each task returns the bytes that it frees.
    settling: JoinSet<usize>,
    extending: Option<AbortHandle>,
    held: usize,
    bytes: usize,
    number: u64,
    /// The processor is out of reach.
    away: Pause,
    source_pause: Pause,
    dead_in_a_row: DeadInARow,
    extend_every: Option<Duration>,
}

impl<S: Source, P: Processor> Run<S, P> {
    async fn until(mut self, stop: impl Future) -> Result<(), ConsumerError> {
        let mut stop = pin!(stop);
        let mut extend = interval(self.extend_every.unwrap_or(Duration::from_secs(3600)));
        extend.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let ended = loop {
            if let Some(error) = self.dead_in_a_row.is_enough(self.settings.max_dead_in_a_row) {
                break Err(error);
            }
            self.dispatch();
            let has_capacity = self.has_capacity();
            tokio::select! {
                biased;
                _ = &mut stop => break Ok(()),
                Some(done) = self.running.join_next_with_id() => self.finish(done),
                Some(settled) = self.settling.join_next() => self.release(settled.ok()),
                Some(lane) = poll_fn(|cx| self.delayed.poll_expired(cx)), if !self.delayed.is_empty() => {
                    self.ready.push_back(lane.into_inner());
                }
                _ = extend.tick(), if self.extend_every.is_some() => self.extend(),
                () = self.away.over(), if self.away.is_on() => {}
                () = self.source_pause.over(), if self.source_pause.is_on() => {}
                delivery = self.source.next(), if has_capacity && !self.source_pause.is_on() => {
                    if let Err(error) = self.took(delivery).await {
                        break Err(ConsumerError::Source(error));
                    }
                }
            }
        };
        if let Err(error @ ConsumerError::OnlyDeadLetters { .. }) = &ended {
            error!(consumer = self.processor.consumer().as_str(), error = %ErrorChain(&error), "the consumer stops");
        }
        self.shut_down(extend).await;
        match timeout(CLOSE_TIMEOUT, self.source.close()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                warn!(error = %ErrorChain(&error), "the source was not closed; some messages may be delivered again")
            }
            Err(_) => warn!("the source was not closed in time; some messages may be delivered again"),
        }
        ended
    }

    fn has_capacity(&self) -> bool {
        self.held < self.settings.max_held && (self.held == 0 || self.bytes < self.settings.max_bytes)
    }

    /// Accepts a delivery, and all others that are ready, so that batches are as full as possible.
    async fn took(&mut self, mut delivery: Result<S::Delivery, SourceError>) -> Result<(), SourceError> {
        loop {
            match delivery {
                Ok(delivery) => {
                    self.source_pause.times = 0;
                    self.accept(delivery);
                }
                Err(error) => {
                    self.emit("", InboxEventKind::SourceFailed, Duration::ZERO);
                    if error.is_fatal() {
                        return Err(error);
                    }
                    warn!(error = %ErrorChain(&error), "the source returned an error; trying again");
                    self.source_pause.again();
                    return Ok(());
                }
            }
            if !self.has_capacity() {
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
        self.bytes += weight(message);
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
        lane.waiting.push_back(HeldDelivery { delivery, since: Instant::now(), failures: 0 });
        if !lane.is_placed {
            lane.is_placed = true;
            self.ready.push_back(key);
        }
    }

    /// Starts batches up to the limit.
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

    /// Takes the first messages of a lane, without those that the broker delivers to another consumer by now.
    fn take(&mut self, key: &LaneKey, most: usize) -> Vec<HeldDelivery<S::Delivery>> {
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
            self.forget(&held, InboxEventKind::Lost);
        }
        taken
    }

    /// Puts a lane into the ready queue or into the delay queue, or removes it if it is empty.
    fn place(&mut self, key: LaneKey, after: Option<Duration>) {
        let Some(lane) = self.lanes.get_mut(&key) else { return };
        if lane.waiting.is_empty() {
            self.lanes.remove(&key);
            return;
        }
        match after {
            Some(after) => {
                self.delayed.insert(key, after);
            }
            None => self.ready.push_back(key),
        }
    }

    fn forget(&mut self, held: &HeldDelivery<S::Delivery>, kind: InboxEventKind) {
        self.held -= 1;
        self.bytes -= weight(held.message());
        self.emit(&held.message().topic, kind, Duration::ZERO);
    }

    /// Settles the messages of a finished batch.
    fn finish(&mut self, done: Result<(Id, Vec<ProcessOutcome>), tokio::task::JoinError>) {
        let (id, handled) = match done {
            Ok((id, handled)) => (id, Some(handled)),
            Err(error) => (error.id(), None),
        };
        let Some(batch) = self.batches.remove(&id) else { return };
        let took = batch.began.elapsed();
        let panicked = handled.is_none();
        if panicked {
            warn!("the processor panicked; its messages are tried again");
            self.emit("", InboxEventKind::Panicked, took);
        }
        let mut handled = handled.into_iter().flatten();
        let mut is_away = false;
        for (key, taken) in batch.lanes {
            // The messages to try again in place, and the pause before it.
            let mut kept: Vec<HeldDelivery<S::Delivery>> = Vec::new();
            let mut after = None;
            for mut held in taken {
                let settlement = match handled.next() {
                    Some(handled) => {
                        // A message that was given back comes with a new failure count. The store counts its attempts,
                        // too.
                        let before = match &handled {
                            ProcessOutcome::Failed { attempts, .. } => attempts.saturating_sub(1),
                            _ => 0,
                        };
                        let backoff = self.backoff(held.failures.max(before));
                        self.emit(&held.message().topic, InboxEventKind::of(&handled), took);
                        self.log(held.message(), &handled);
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
                        self.forget(&held, InboxEventKind::Lost)
                    }
                    (Settlement::RedeliverAfter(wait), true)
                        if S::Delivery::GIVES_BACK && matches!(key, LaneKey::Single(_)) =>
                    {
                        self.settle(held, Some(wait));
                    }
                    (Settlement::RedeliverAfter(wait), _) => {
                        // Later messages of the lane wait as long as the first one.
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
                // The consumer is shutting down.
                None => kept.into_iter().for_each(|held| self.leave(held)),
            }
        }
        if is_away {
            self.away.again();
        } else {
            self.away.times = 0;
        }
    }

    /// Writes an outcome to the log. The text of a failure is the handler's own; nothing else here comes from a
    /// message.
    fn log(&self, message: &Message, handled: &ProcessOutcome) {
        let (consumer, topic) = (self.processor.consumer().as_str(), message.topic.as_str());
        match handled {
            ProcessOutcome::Failed { attempts, failure } => {
                let failure = ErrorChain(failure.error());
                warn!(consumer, topic, attempts, %failure, "a message failed; it is tried again");
            }
            ProcessOutcome::Dead { reason, is_known: false } => {
                warn!(consumer, topic, %reason, "a message became a dead letter");
            }
            ProcessOutcome::Unavailable(error) => {
                warn!(consumer, topic, error = %ErrorChain(&error), "a message cannot be processed now; it is tried again");
            }
            handled => {
                debug!(
                    consumer,
                    topic,
                    outcome = InboxEventKind::of(handled).as_str(),
                    "a message was handled"
                )
            }
        }
    }

    fn backoff(&self, failures: u32) -> Duration {
        let (first, longest) = self.settings.backoff;
        jittered(first.saturating_mul(2_u32.saturating_pow(failures.min(20))).min(longest))
    }

    /// Acknowledges a delivery, or gives it back with a delay.
    fn settle(&mut self, held: HeldDelivery<S::Delivery>, give_back: Option<Duration>) {
        if held.delivery.is_lost() {
            return self.forget(&held, InboxEventKind::Lost);
        }
        let (observer, processor) = (self.settings.observer.clone(), self.processor.clone());
        self.settling.spawn(async move {
            let began = Instant::now();
            let message = held.message().clone();
            let (told, kind) = match give_back {
                Some(after) => (catch_panic(held.delivery.give_back(after)).await, InboxEventKind::GivenBack),
                None => (catch_panic(held.delivery.ack()).await, InboxEventKind::Acknowledged),
            };
            let kind = match told {
                Ok(Ok(())) => kind,
                Ok(Err(error)) => {
                    debug!(error = %ErrorChain(&error), "the broker did not confirm a settlement; the message is delivered again");
                    InboxEventKind::SettlementFailed
                }
                Err(PanicError) => InboxEventKind::SettlementFailed,
            };
            let consumer = processor.consumer().as_str();
            observer.observe(&InboxEvent::new(consumer, &message.topic, kind, began.elapsed()));
            weight(&message)
        });
    }

    /// Releases the budget of a settled message. `None` means that the task was cancelled.
    fn release(&mut self, bytes: Option<usize>) {
        self.held = self.held.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes.unwrap_or_default());
    }

    /// Asks the broker for more time for held messages.
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
            // The factor 2 allows for a late timer tick.
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
                        debug!(error = %ErrorChain(&error), "the broker did not extend the time of a message");
                        let (consumer, topic) = (processor.consumer().as_str(), &delivery.message().topic);
                        let kind = InboxEventKind::ExtensionFailed;
                        observer.observe(&InboxEvent::new(consumer, topic, kind, began.elapsed()));
                    }
                });
            }
            while under_way.join_next().await.is_some() {}
        });
        self.extending = Some(task.abort_handle());
    }

    /// Finishes running batches, and gives back messages that were not started.
    async fn shut_down(&mut self, mut extend: tokio::time::Interval) {
        let until = Instant::now() + self.settings.shutdown_timeout;
        let lanes = std::mem::take(&mut self.lanes);
        // The messages of running batches return to lanes that no longer exist. They are settled or given back
        // directly.
        self.ready.clear();
        self.delayed.clear();
        for held in lanes.into_values().flat_map(|lane| lane.waiting) {
            self.leave(held);
        }
        while !self.running.is_empty() {
            tokio::select! {
                biased;
                Some(done) = self.running.join_next_with_id() => self.finish(done),
                Some(settled) = self.settling.join_next() => self.release(settled.ok()),
                _ = extend.tick(), if self.extend_every.is_some() => self.extend(),
                () = sleep_until(until) => {
                    let batches = self.running.len();
                    warn!(batches, "batches did not end within the shutdown timeout; they are cancelled, and their messages are delivered again");
                    self.running.abort_all();
                    self.batches.clear();
                    break;
                }
            }
        }
        let until = Instant::now() + CANCEL_TIMEOUT;
        while let Ok(Some(_)) = timeout_at(until, self.running.join_next()).await {}
        if !self.running.is_empty() {
            warn!("a handler blocks its thread and cannot be cancelled; use spawn_blocking");
            self.running.detach_all();
        }
        let until = Instant::now() + CLOSE_TIMEOUT;
        while let Ok(Some(settled)) = timeout_at(until, self.settling.join_next()).await {
            self.release(settled.ok());
        }
        self.settling.shutdown().await;
        if let Some(extending) = self.extending.take() {
            extending.abort();
        }
    }

    /// Gives back a message that was not processed, and forgets it.
    fn leave(&mut self, held: HeldDelivery<S::Delivery>) {
        if S::Delivery::GIVES_BACK {
            self.settle(held, Some(Duration::ZERO));
        } else {
            self.forget(&held, InboxEventKind::GivenBack);
        }
    }

    fn emit(&self, topic: &str, kind: InboxEventKind, took: Duration) {
        let consumer = self.processor.consumer().as_str();
        self.settings.observer.observe(&InboxEvent::new(consumer, topic, kind, took));
    }
}

/// The approximate size of a message.
fn weight(message: &Message) -> usize {
    let headers: usize = message.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
    256 + message.payload.len() + headers
}
