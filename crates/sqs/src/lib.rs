//! Amazon SQS: a queue as a source, and queues as destinations, standard and FIFO.
//!
//! **Experimental:** the tests run against a server that speaks the protocol of SQS. The real service was not tried.
//!
//! # Guarantees of the broker
//! A received message is invisible to others for its visibility timeout, and visible again afterwards unless it was
//! deleted: at least once. A standard queue also delivers some messages twice, and in any order. A FIFO queue delivers
//! the messages of a group in order, one after the other. Messages that SQS has confirmed are on several machines in
//! several data centres.
//!
//! An acknowledgement is a deletion that SQS has confirmed. With an outdated receipt, it may confirm a deletion without
//! carrying it out. The message then comes again and is a duplicate.
//!
//! # Requirements for a queue
//! **A redrive policy removes messages before the inbox has given them up.** A message that was received
//! `maxReceiveCount` times moves to the dead-letter queue. Crashes, a database out of reach and duplicates in flight
//! are receives, too. So [`SqsSource::open`] refuses a queue with a policy, unless
//! [`SqsSourceOptions::with_redrive_after`] allows it. The retention period of the queue deletes messages whether they
//! were processed or not.
//!
//! # Contents of a delivery
//! `topic` is the name of the queue, `broker_id` is the message identifier of SQS, and `deliveries` is its approximate
//! receive count. `is_redelivered` is always true, because that count is not exact. `order_key` is the message group of
//! a FIFO queue. Headers are message attributes, sorted by name.
//!
//! # Limits
//! A message can be held for at most 12 hours, with all extensions. About 120 000 messages of a queue (20 000 of a FIFO
//! queue) can be in flight at once; beyond that SQS delivers no more until some are settled.

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

/// The client library whose types this crate uses.
pub use aws_sdk_sqs;
pub use publish::SqsPublisher;

/// The timeout of a reply, in addition to the long-polling time.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// The maximum number of messages per request.
const BATCH: usize = 10;

/// The pause after an error.
const PAUSE: Duration = Duration::from_secs(1);

/// The number of times in a row that SQS must report a missing queue: a new queue is not visible everywhere at once.
const MAX_MISSES: u32 = 3;

/// The maximum visibility timeout in seconds.
const MAX_VISIBILITY: u64 = 12 * 60 * 60;

/// The options of a source.
#[derive(Clone, Debug)]
pub struct SqsSourceOptions {
    visibility: u64,
    wait: u64,
    receivers: usize,
    redrive_min: Option<u32>,
}

impl SqsSourceOptions {
    /// The maximum number of concurrent requests for messages.
    pub const MAX_RECEIVERS: usize = 64;

    /// Creates options: a visibility timeout of 60 seconds, two concurrent requests of 5 seconds each, and no redrive
    /// policy.
    #[must_use]
    pub const fn new() -> Self {
        Self { visibility: 60, wait: 5, receivers: 2, redrive_min: None }
    }

    /// Sets how long a message is invisible to others after it was received or extended, in whole seconds.
    ///
    /// Each request sets it, so the setting of the queue does not count.
    ///
    /// # Errors
    /// [`ConfigError`] outside 2 seconds to 12 hours.
    pub fn with_visibility_timeout(self, visibility: Duration) -> Result<Self, ConfigError> {
        let visibility = visibility.as_secs();
        if !(2..=MAX_VISIBILITY).contains(&visibility) {
            return Err(ConfigError::new("the visibility timeout must be from 2 seconds to 12 hours"));
        }
        Ok(Self { visibility, ..self })
    }

    /// Sets how long a request waits for messages (long polling), in whole seconds. Closing the source waits for it.
    ///
    /// # Errors
    /// [`ConfigError`] if it is more than 20 seconds, the maximum of SQS.
    pub fn with_wait(self, wait: Duration) -> Result<Self, ConfigError> {
        let wait = wait.as_secs();
        if wait > 20 {
            return Err(ConfigError::new("the wait must be at most 20 seconds"));
        }
        Ok(Self { wait, ..self })
    }

    /// Sets the number of concurrent requests. Each returns up to 10 messages, and as many are held ahead.
    ///
    /// # Errors
    /// [`ConfigError`] outside 1 to [`MAX_RECEIVERS`](Self::MAX_RECEIVERS).
    pub fn with_receivers(self, receivers: usize) -> Result<Self, ConfigError> {
        if !(1..=Self::MAX_RECEIVERS).contains(&receivers) {
            return Err(ConfigError::new(format!(
                "the number of receivers must be from 1 to {}",
                Self::MAX_RECEIVERS
            )));
        }
        Ok(Self { receivers, ..self })
    }

    /// Allows a redrive policy whose `maxReceiveCount` is at least this number.
    ///
    /// The inbox does not know of the messages that the policy moves. An operator has to look after that dead-letter
    /// queue.
    #[must_use]
    pub const fn with_redrive_after(mut self, receives: u32) -> Self {
        self.redrive_min = Some(receives);
        self
    }

    /// Checks the redrive policy of the queue.
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
    /// The part of the URL after the last slash.
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
    /// Opens the queue with this URL, after checking it.
    ///
    /// The client's timeouts must be longer than [the long-polling time](SqsSourceOptions::with_wait).
    ///
    /// # Errors
    /// A fatal error if the queue does not exist, or its redrive policy [removes
    /// messages](self#requirements-for-a-queue). A transient error if SQS is out of reach.
    pub async fn open(
        client: Client,
        queue_url: impl Into<String>,
        options: SqsSourceOptions,
    ) -> Result<Self, SourceError> {
        let url = queue_url.into();
        let asked =
            client.get_queue_attributes().queue_url(&url).attribute_names(QueueAttributeName::All).send();
        let asked =
            timeout(REPLY_TIMEOUT, asked).await.map_err(|_| SourceError::transient("SQS does not answer"))?;
        let attributes = match asked {
            Ok(reply) => reply.attributes.unwrap_or_default(),
            Err(error) if is_missing(&error) => {
                return Err(SourceError::fatal("there is no such SQS queue").with_source(said(&error)));
            }
            Err(error) => {
                return Err(
                    SourceError::transient("SQS did not describe the queue").with_source(said(&error))
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
                    reading.capacity.add_permits(1);
                    // It waited here so long that it is visible to others again.
                    if !delivery.is_lost() {
                        return Ok(delivery);
                    }
                }
                Some(Err(error)) => return Err(error),
                None => return Err(SourceError::fatal("the reading tasks of the SQS queue have ended")),
            }
        }
    }

    async fn close(&mut self) -> Result<(), SourceError> {
        self.is_closed = true;
        // Every acknowledgement was answered. Received messages that were not started are visible to others at once.
        match self.reading.take() {
            Some(reading) => reading.end().await,
            None => Ok(()),
        }
    }
}

/// The tasks that request messages, and the messages that they received.
struct Reading {
    arrived: mpsc::Receiver<Result<SqsDelivery, SourceError>>,
    capacity: Arc<Semaphore>,
    stop: CancellationToken,
    receivers: JoinSet<()>,
    wait: Duration,
}

impl Reading {
    fn begin(queue: &Arc<Queue>, options: &SqsSourceOptions) -> Self {
        let capacity = options.receivers * BATCH;
        // One more place per receiver for an error.
        let (sender, arrived) = mpsc::channel(capacity + options.receivers);
        let capacity = Arc::new(Semaphore::new(capacity));
        let stop = CancellationToken::new();
        let mut receivers = JoinSet::new();
        for _ in 0..options.receivers {
            let receiver = Receiver {
                queue: queue.clone(),
                wait: options.wait,
                capacity: capacity.clone(),
                sender: sender.clone(),
                stop: stop.clone(),
            };
            receivers.spawn(receiver.run());
        }
        Self { arrived, capacity, stop, receivers, wait: Duration::from_secs(options.wait) }
    }

    async fn end(mut self) -> Result<(), SourceError> {
        // A cancelled request may still receive messages, which would be invisible until their timeout. So wait for it.
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
        let mut all = ended.map_err(|_| SourceError::transient("SQS did not answer at the close"));
        while let Some(given_back) = given_back.join_next().await {
            if let Ok(Err(error)) = given_back {
                all = Err(error);
            }
        }
        all
    }
}

/// Requests messages as long as there is space.
struct Receiver {
    queue: Arc<Queue>,
    wait: u64,
    capacity: Arc<Semaphore>,
    sender: mpsc::Sender<Result<SqsDelivery, SourceError>>,
    stop: CancellationToken,
}

impl Receiver {
    async fn run(self) {
        let mut misses = 0;
        loop {
            let capacity = tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                capacity = self.capacity.acquire_many(BATCH as u32) => capacity,
            };
            let Ok(capacity) = capacity else { return };
            match self.receive(&mut misses).await {
                Ok(messages) => {
                    // Each message keeps its permit until it is taken. Unused permits are released.
                    capacity.forget();
                    let at = Instant::now();
                    // A message without a receipt cannot be settled.
                    let came: Vec<_> = messages
                        .into_iter()
                        .filter_map(|message| SqsDelivery::new(message, &self.queue, at))
                        .collect();
                    self.capacity.add_permits(BATCH.saturating_sub(came.len()));
                    for delivery in came {
                        if self.sender.try_send(Ok(delivery)).is_err() {
                            return;
                        }
                    }
                }
                Err(error) => {
                    drop(capacity);
                    let is_fatal = error.is_fatal();
                    // After the stop no receiver takes messages any more.
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
        let asked = timeout(REPLY_TIMEOUT + Duration::from_secs(self.wait), asked).await;
        match asked.map_err(|_| SourceError::transient("SQS does not answer"))? {
            Ok(reply) => {
                *misses = 0;
                Ok(reply.messages.unwrap_or_default())
            }
            Err(error) => {
                *misses = if is_missing(&error) { *misses + 1 } else { 0 };
                let said = said(&error);
                Err(if *misses >= MAX_MISSES {
                    SourceError::fatal("the SQS queue does not exist any more").with_source(said)
                } else {
                    SourceError::transient("SQS returned no messages").with_source(said)
                })
            }
        }
    }
}

/// Returns `true` if the queue does not exist.
fn is_missing<E: ProvideErrorMetadata, R>(error: &SdkError<E, R>) -> bool {
    // The older protocol has the longer code.
    matches!(error.code(), Some("QueueDoesNotExist" | "AWS.SimpleQueueService.NonExistentQueue"))
}

/// Formats an error: the code and message of SQS, and nothing of the request.
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
        // Its cause may contain the response.
        _ => error.to_string(),
    }
}

/// A received message.
pub struct SqsDelivery {
    message: Arc<Message>,
    queue: Arc<Queue>,
    receipt: String,
    received: Instant,
    /// The time at which it is visible to others again.
    until: Mutex<Instant>,
    /// `true` if SQS reported that the receipt is no longer valid.
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
        // A standard queue has groups for fairness only, without order.
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

    /// Returns `true` if the visibility timeout is over and the message has no group.
    ///
    /// A message of a group is never lost: skipped here, it would come again behind later messages of its group that
    /// are not lost.
    fn is_lost(&self) -> bool {
        // The time of SQS began before ours, so it is over, too.
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
        // SQS counts seconds, and 12 hours from the first receive.
        let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
        let left = MAX_VISIBILITY.saturating_sub(self.received.elapsed().as_secs() + 1);
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
        for good in [2, MAX_VISIBILITY] {
            assert!(options.clone().with_visibility_timeout(seconds(good)).is_ok());
        }
        for bad in [1, MAX_VISIBILITY + 1] {
            assert!(options.clone().with_visibility_timeout(seconds(bad)).is_err());
        }
        assert!(options.clone().with_wait(seconds(20)).is_ok());
        assert!(options.clone().with_wait(seconds(21)).is_err());
        assert!(options.clone().with_receivers(0).is_err());
        assert!(options.with_receivers(SqsSourceOptions::MAX_RECEIVERS + 1).is_err());
    }
}
