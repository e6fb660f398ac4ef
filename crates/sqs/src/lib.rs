//! Amazon SQS: a queue as a source, and queues as destinations, standard and FIFO.
//!
//! **Experimental:** the tests run against an imitation. A real service was not tried.
//!
//! # What the broker promises
//! A message that was received is not seen by others for its visibility time-out, and is seen again after that unless it was
//! deleted: at least once. A standard queue also delivers a message twice now and then, and in any order. A FIFO queue gives
//! the messages of a group in order, and none of them while an earlier one is with somebody. What SQS has confirmed is on
//! several machines of several data centres.
//!
//! An acknowledgement is a deletion that SQS has confirmed. It may confirm one with a receipt that is too old and not delete
//! the message; then it comes again and is a duplicate.
//!
//! # What the queue must be
//! **A redrive policy takes messages away before the inbox has given them up**: what was received `maxReceiveCount`
//! times is moved to the queue of dead letters, and a crash, a database out of reach and a duplicate in flight are
//! receives, too. So [`SqsSource::open`] refuses a queue with one, unless [`SqsSourceOptions::with_redrive_after`]
//! says that it is meant. The retention period of the queue deletes messages whether or not they were processed.
//!
//! # What a delivery says
//! `topic` is the name of the queue, `broker_id` the message identifier of SQS, `deliveries` its approximate receive
//! count, which is why `is_redelivered` is always true. `order_key` is the message group of a FIFO queue. Headers are
//! message attributes, in the order of their names.
//!
//! # Limits
//! A message is with somebody for 12 hours at the most, however often it is extended. At most about 120 000 messages
//! of a queue are with somebody at once (20 000 of a FIFO queue); beyond that no more come until some are settled.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod batch;
mod publish;
mod wire;

use std::error::Error;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aws_sdk_sqs::Client;
use aws_sdk_sqs::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_sqs::types::{self, MessageSystemAttributeName, QueueAttributeName};
use bytes::Bytes;
use oncegate_core::ErrorChain;
use oncegate_engine::ConfigError;
use oncegate_inbox::{Delivery, Message, Source, SourceError, SourceInfo};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use batch::Batcher;

/// The client library, as the types of this module use it.
pub use aws_sdk_sqs;
pub use publish::SqsPublisher;

/// How long an answer is waited for, beside the time that SQS was asked to wait.
const ANSWER: Duration = Duration::from_secs(30);

/// Most messages of one request.
const BATCH: usize = 10;

/// How long to wait after an error.
const PAUSE: Duration = Duration::from_secs(1);

/// How often in a row SQS has to say that there is no such queue: one that was just made is not known everywhere at once.
const MISSES: u32 = 3;

/// The longest that a message is with somebody, in seconds.
const VISIBILITY_MAX: u64 = 12 * 60 * 60;

/// How a source reads.
#[derive(Clone, Debug)]
pub struct SqsSourceOptions {
    visibility: u64,
    wait: u64,
    receivers: usize,
    redrive_min: Option<u32>,
}

impl SqsSourceOptions {
    /// Most requests for messages that are under way at once.
    pub const MAX_RECEIVERS: usize = 64;

    /// A visibility time-out of 60 seconds, two requests under way, each of which waits 5 seconds, and no redrive policy.
    #[must_use]
    pub const fn new() -> Self {
        Self { visibility: 60, wait: 5, receivers: 2, redrive_min: None }
    }

    /// How long a message is not seen by others after it was received or extended. It is asked for with each request, so the
    /// setting of the queue does not count. In whole seconds; fractions are cut off.
    ///
    /// # Errors
    /// Outside 2 seconds to 12 hours.
    pub fn with_visibility_timeout(self, visibility: Duration) -> Result<Self, ConfigError> {
        let visibility = visibility.as_secs();
        if !(2..=VISIBILITY_MAX).contains(&visibility) {
            return Err(ConfigError::new("visibility: between 2 seconds and 12 hours"));
        }
        Ok(Self { visibility, ..self })
    }

    /// How long SQS waits for a message before it says that there is none (long polling). A source that is closed waits for
    /// that. In whole seconds; fractions are cut off.
    ///
    /// # Errors
    /// More than 20 seconds, which is the most that SQS waits.
    pub fn with_wait(self, wait: Duration) -> Result<Self, ConfigError> {
        let wait = wait.as_secs();
        if wait > 20 {
            return Err(ConfigError::new("wait: at most 20 seconds"));
        }
        Ok(Self { wait, ..self })
    }

    /// How many requests for messages are under way at once; each brings up to 10, and so many are held ahead.
    ///
    /// # Errors
    /// Outside 1 to [`MAX_RECEIVERS`](Self::MAX_RECEIVERS).
    pub fn with_receivers(self, receivers: usize) -> Result<Self, ConfigError> {
        if !(1..=Self::MAX_RECEIVERS).contains(&receivers) {
            return Err(ConfigError::new(format!("receivers: between 1 and {}", Self::MAX_RECEIVERS)));
        }
        Ok(Self { receivers, ..self })
    }

    /// The queue may have a redrive policy whose `maxReceiveCount` is at least this. Messages that it moves were given up by
    /// nobody: the inbox knows nothing of it, and whoever looks after the queue of dead letters must.
    #[must_use]
    pub const fn with_redrive_after(mut self, receives: u32) -> Self {
        self.redrive_min = Some(receives);
        self
    }

    /// Whether the queue may have this redrive policy.
    fn check(&self, policy: &str) -> Result<(), SourceError> {
        let policy: serde_json::Value = serde_json::from_str(policy).unwrap_or_default();
        // A number, or the same in quotation marks.
        let found = match policy.get("maxReceiveCount") {
            None => return Ok(()),
            Some(count) => count.as_u64().or_else(|| count.as_str()?.parse().ok()),
        };
        match (self.redrive_min, found) {
            (Some(least), Some(found)) if found >= u64::from(least) => Ok(()),
            (least, found) => {
                let found = found.map_or_else(|| "what is no number".to_owned(), |found| found.to_string());
                let least = least.map_or_else(|| "nothing".to_owned(), |least| least.to_string());
                Err(SourceError::fatal(format!(
                    "the SQS queue has a redrive policy: it takes messages away after maxReceiveCount receives, which is {found}, \
                     and {least} is allowed for by with_redrive_after"
                )))
            }
        }
    }
}

impl Default for SqsSourceOptions {
    fn default() -> Self {
        Self::new()
    }
}

/// A queue.
pub struct SqsSource {
    queue: Arc<Queue>,
    options: SqsSourceOptions,
    reading: Option<Reading>,
    is_closed: bool,
}

struct Queue {
    client: Client,
    url: String,
    /// What comes after the last slash.
    name: String,
    is_fifo: bool,
    visibility: u64,
    batcher: Batcher,
}

impl fmt::Debug for SqsSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqsSource")
            .field("queue", &self.queue.name)
            .field("is_fifo", &self.queue.is_fifo)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl SqsSource {
    /// Reads from the queue with this URL, once it was seen to be one that fits. The client's time-outs must be longer than
    /// [the source waits](SqsSourceOptions::with_wait).
    ///
    /// # Errors
    /// A fatal one where there is no such queue, or its redrive policy [takes messages
    /// away](self#what-the-queue-must-be); a passing one where SQS cannot be asked.
    pub async fn open(
        client: Client,
        queue_url: impl Into<String>,
        options: SqsSourceOptions,
    ) -> Result<Self, SourceError> {
        let url = queue_url.into();
        let asked =
            client.get_queue_attributes().queue_url(&url).attribute_names(QueueAttributeName::All).send();
        let asked =
            timeout(ANSWER, asked).await.map_err(|_| SourceError::transient("SQS does not answer"))?;
        let attributes = match asked {
            Ok(answer) => answer.attributes.unwrap_or_default(),
            Err(error) if is_missing(&error) => {
                return Err(SourceError::fatal("there is no such SQS queue").with_source(said(&error)));
            }
            Err(error) => {
                return Err(
                    SourceError::transient("SQS does not tell of the queue").with_source(said(&error))
                );
            }
        };
        if let Some(policy) = attributes.get(&QueueAttributeName::RedrivePolicy) {
            options.check(policy)?;
        }
        let is_fifo = attributes.get(&QueueAttributeName::FifoQueue).is_some_and(|is| is == "true");
        let batcher = Batcher::new(&client, &url);
        let name = url.rsplit('/').next().unwrap_or_default().to_owned();
        let visibility = options.visibility;
        let queue = Arc::new(Queue { client, url, name, is_fifo, visibility, batcher });
        Ok(Self { queue, options, reading: None, is_closed: false })
    }
}

impl Source for SqsSource {
    type Delivery = SqsDelivery;

    fn info(&self) -> SourceInfo {
        SourceInfo::new(Some(Duration::from_secs(self.options.visibility)))
    }

    async fn next(&mut self) -> Result<SqsDelivery, SourceError> {
        if self.is_closed {
            return Err(SourceError::fatal("the source is closed"));
        }
        let reading = self.reading.get_or_insert_with(|| Reading::begin(&self.queue, &self.options));
        loop {
            match reading.arrived.recv().await {
                Some(Ok(delivery)) => {
                    reading.room.add_permits(1);
                    // It waited here for so long that others see it again.
                    if !delivery.is_lost() {
                        return Ok(delivery);
                    }
                }
                Some(Err(error)) => return Err(error),
                None => return Err(SourceError::fatal("the SQS queue is read no more")),
            }
        }
    }

    async fn close(&mut self) -> Result<(), SourceError> {
        self.is_closed = true;
        // Every acknowledgement was answered. What was asked for and not begun is given to others at once.
        match self.reading.take() {
            Some(reading) => reading.end().await,
            None => Ok(()),
        }
    }
}

/// The tasks that ask for messages, and what they have got.
struct Reading {
    arrived: mpsc::Receiver<Result<SqsDelivery, SourceError>>,
    room: Arc<Semaphore>,
    stop: CancellationToken,
    receivers: JoinSet<()>,
    wait: Duration,
}

impl Reading {
    fn begin(queue: &Arc<Queue>, options: &SqsSourceOptions) -> Self {
        let room = options.receivers * BATCH;
        // One place more for each receiver: for an error.
        let (sender, arrived) = mpsc::channel(room + options.receivers);
        let room = Arc::new(Semaphore::new(room));
        let stop = CancellationToken::new();
        let mut receivers = JoinSet::new();
        for _ in 0..options.receivers {
            let receiver = Receiver {
                queue: queue.clone(),
                wait: options.wait,
                room: room.clone(),
                sender: sender.clone(),
                stop: stop.clone(),
            };
            receivers.spawn(receiver.run());
        }
        Self { arrived, room, stop, receivers, wait: Duration::from_secs(options.wait) }
    }

    async fn end(mut self) -> Result<(), SourceError> {
        // A request that is cut off may still bring messages, which nobody would see until their time is over: so it is
        // waited for.
        self.stop.cancel();
        let receivers = &mut self.receivers;
        let ended = timeout(self.wait + PAUSE * 3, async { while receivers.join_next().await.is_some() {} });
        let ended = ended.await;
        let mut given_back = JoinSet::new();
        while let Ok(arrived) = self.arrived.try_recv() {
            if let Ok(delivery) = arrived {
                given_back.spawn(async move { delivery.give_back(Duration::ZERO).await });
            }
        }
        let mut all = ended.map_err(|_| SourceError::transient("SQS did not answer at the end"));
        while let Some(given_back) = given_back.join_next().await {
            if let Ok(Err(error)) = given_back {
                all = Err(error);
            }
        }
        all
    }
}

/// Asks for messages again and again, where there is room for them.
struct Receiver {
    queue: Arc<Queue>,
    wait: u64,
    room: Arc<Semaphore>,
    sender: mpsc::Sender<Result<SqsDelivery, SourceError>>,
    stop: CancellationToken,
}

impl Receiver {
    async fn run(self) {
        let mut misses = 0;
        loop {
            let room = tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                room = self.room.acquire_many(BATCH as u32) => room,
            };
            let Ok(room) = room else { return };
            match self.receive(&mut misses).await {
                Ok(messages) => {
                    // What comes has its room until it is taken, and what does not leaves it to others.
                    room.forget();
                    let at = Instant::now();
                    // Without a receipt there is nothing to be done with a message.
                    let came: Vec<_> = messages
                        .into_iter()
                        .filter_map(|message| SqsDelivery::new(message, &self.queue, at))
                        .collect();
                    self.room.add_permits(BATCH.saturating_sub(came.len()));
                    for delivery in came {
                        if self.sender.try_send(Ok(delivery)).is_err() {
                            return;
                        }
                    }
                }
                Err(error) => {
                    drop(room);
                    let is_fatal = error.is_fatal();
                    // Nobody takes anything any more once it is told to stop.
                    tokio::select! {
                        () = self.stop.cancelled() => return,
                        told = self.sender.send(Err(error)) => if told.is_err() || is_fatal { return },
                    }
                    tokio::select! {
                        () = self.stop.cancelled() => return,
                        () = sleep(PAUSE) => {}
                    }
                }
            }
        }
    }

    async fn receive(&self, misses: &mut u32) -> Result<Vec<types::Message>, SourceError> {
        let queue = &self.queue;
        let asked = queue
            .client
            .receive_message()
            .queue_url(&queue.url)
            .max_number_of_messages(BATCH as i32)
            .visibility_timeout(queue.visibility as i32)
            .wait_time_seconds(self.wait as i32)
            .message_system_attribute_names(MessageSystemAttributeName::All)
            .message_attribute_names("All")
            .send();
        let asked = timeout(ANSWER + Duration::from_secs(self.wait), asked).await;
        match asked.map_err(|_| SourceError::transient("SQS does not answer"))? {
            Ok(answer) => {
                *misses = 0;
                Ok(answer.messages.unwrap_or_default())
            }
            Err(error) => {
                *misses = if is_missing(&error) { *misses + 1 } else { 0 };
                let said = said(&error);
                Err(if *misses >= MISSES {
                    SourceError::fatal("the SQS queue is not there any more").with_source(said)
                } else {
                    SourceError::transient("SQS gives no messages").with_source(said)
                })
            }
        }
    }
}

/// Whether there is no such queue.
fn is_missing<E: ProvideErrorMetadata, R>(error: &SdkError<E, R>) -> bool {
    // The older protocol has the longer word.
    matches!(error.code(), Some("QueueDoesNotExist" | "AWS.SimpleQueueService.NonExistentQueue"))
}

/// What went wrong: in SQS's words where it answered, and nothing of what was sent.
fn said<E: ProvideErrorMetadata + Error + 'static, R: fmt::Debug>(error: &SdkError<E, R>) -> String {
    if let Some(code) = error.code() {
        return match error.message() {
            Some(message) => format!("{code}: {message}"),
            None => code.to_owned(),
        };
    }
    match error {
        SdkError::ConstructionFailure(_) | SdkError::TimeoutError(_) | SdkError::DispatchFailure(_) => {
            ErrorChain(error).to_string()
        }
        // Its cause may hold what was answered.
        _ => error.to_string(),
    }
}

/// A message that was received.
pub struct SqsDelivery {
    message: Arc<Message>,
    queue: Arc<Queue>,
    receipt: String,
    received: Instant,
    /// When others see it again.
    until: Mutex<Instant>,
    /// Whether SQS said that the receipt stands for nothing any more.
    is_gone: AtomicBool,
}

impl fmt::Debug for SqsDelivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqsDelivery").field("message", &self.message).finish_non_exhaustive()
    }
}

impl SqsDelivery {
    fn new(received: types::Message, queue: &Arc<Queue>, at: Instant) -> Option<Self> {
        let system = received.attributes.unwrap_or_default();
        let (headers, encoding) = wire::headers(received.message_attributes);
        let payload = wire::payload(received.body.unwrap_or_default(), encoding.as_deref());
        let deliveries = system.get(&MessageSystemAttributeName::ApproximateReceiveCount);
        let mut message = Message::new(queue.name.clone(), payload)
            .with_deliveries(deliveries.and_then(|count| count.parse().ok()), true);
        message.headers = headers;
        message.broker_id = received.message_id;
        // A standard queue has groups, too, for fairness among them, and no order.
        let group = system.get(&MessageSystemAttributeName::MessageGroupId).filter(|_| queue.is_fifo);
        message.order_key = group.map(|group| Bytes::from(group.clone()));
        Some(Self {
            message: Arc::new(message),
            queue: queue.clone(),
            receipt: received.receipt_handle?,
            received: at,
            until: Mutex::new(at + Duration::from_secs(queue.visibility)),
            is_gone: AtomicBool::new(false),
        })
    }

    async fn settle(&self, visibility: Option<u64>) -> Result<(), SourceError> {
        let visibility = visibility.map(|seconds| i32::try_from(seconds).unwrap_or(i32::MAX));
        let settled = self.queue.batcher.settle(&self.receipt, visibility).await;
        settled.map_err(|failed| {
            if failed.is_gone {
                self.is_gone.store(true, Relaxed);
            }
            failed.error
        })
    }
}

impl Delivery for SqsDelivery {
    const GIVES_BACK: bool = true;

    fn message(&self) -> &Arc<Message> {
        &self.message
    }

    /// Whether its time is over, and it is in no group. One of a group stays with whoever has it: left out here, it would come
    /// again behind those of the group that are here, too, and not lost.
    fn is_lost(&self) -> bool {
        // SQS's time began before ours, so its time is over, too.
        let until = *self.until.lock().unwrap_or_else(PoisonError::into_inner);
        let is_over = Instant::now() >= until || self.is_gone.load(Relaxed);
        self.message.order_key.is_none() && is_over
    }

    async fn extend(&self) -> Result<(), SourceError> {
        let at = Instant::now();
        self.settle(Some(self.queue.visibility)).await?;
        let until = at + Duration::from_secs(self.queue.visibility);
        *self.until.lock().unwrap_or_else(PoisonError::into_inner) = until;
        Ok(())
    }

    async fn ack(&self) -> Result<(), SourceError> {
        self.settle(None).await
    }

    async fn give_back(&self, after: Duration) -> Result<(), SourceError> {
        // SQS counts in seconds, and 12 hours from the time that it was received.
        let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
        let left = VISIBILITY_MAX.saturating_sub(self.received.elapsed().as_secs() + 1);
        self.settle(Some(seconds.min(left))).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_redrive_policy_is_allowed_for_or_refused() {
        let policy =
            |count: &str| format!("{{\"deadLetterTargetArn\": \"a\", \"maxReceiveCount\": {count}}}");
        let none = SqsSourceOptions::new();
        assert!(none.check("{}").is_ok());
        assert!(none.check(&policy("1000")).unwrap_err().is_fatal());
        let some = SqsSourceOptions::new().with_redrive_after(50);
        assert!(some.check(&policy("49")).is_err());
        assert!(some.check(&policy("50")).is_ok());
        assert!(some.check(&policy("\"50\"")).is_ok());
        assert!(some.check(&policy("\"many\"")).is_err());
    }

    #[test]
    fn settings_have_bounds() {
        let options = SqsSourceOptions::new();
        let seconds = Duration::from_secs;
        for good in [2, VISIBILITY_MAX] {
            assert!(options.clone().with_visibility_timeout(seconds(good)).is_ok());
        }
        for bad in [1, VISIBILITY_MAX + 1] {
            assert!(options.clone().with_visibility_timeout(seconds(bad)).is_err());
        }
        assert!(options.clone().with_wait(seconds(20)).is_ok());
        assert!(options.clone().with_wait(seconds(21)).is_err());
        assert!(options.clone().with_receivers(0).is_err());
        assert!(options.with_receivers(SqsSourceOptions::MAX_RECEIVERS + 1).is_err());
    }
}
