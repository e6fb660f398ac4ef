//! NATS JetStream: a durable pull consumer as a source, and streams as a destination.
//!
//! # Guarantees of the broker
//! JetStream keeps a message until the limits of its stream remove it. It delivers it to a consumer again until it is
//! acknowledged: at least once. The source waits for the confirmation of each acknowledgement (a double ack). A server
//! that crashes may forget acknowledgements that it confirmed, and its delivery counts. Messages then come again, with
//! smaller counts.
//!
//! **A server that confirms a message has not necessarily written it to disk.** It flushes at an interval
//! (`sync_interval`, two minutes unless set). A machine that loses power loses the messages that it confirmed last; if
//! all replicas lose power at the same time, the messages are gone. A killed process loses nothing. From version 2.10
//! on, `sync_interval: always` flushes before it confirms. For messages that must not be lost, use replicas that fail
//! independently, or that setting.
//!
//! # Requirements for a consumer
//! It must be durable, with `ack_policy` explicit, without `max_deliver`, and without `inactive_threshold`.
//! [`NatsSource::new`] refuses anything else. A server that has delivered a message `max_deliver` times never delivers
//! it again. Crashes, a database out of reach and duplicates in flight are deliveries, too, so the inbox must count the
//! attempts. If the settings are changed later, or the consumer is deleted, the source stops with a fatal error.
//!
//! The limits of the stream (`max_age`, `max_msgs`, `max_bytes` with `discard: old`) remove messages whether they were
//! processed or not. Set them high enough.
//!
//! # Contents of a delivery
//! `topic` is the subject, `broker_id` is `STREAM/SEQUENCE`. A stream that is deleted and created again counts from 1
//! again: give it another name, or use an identifier of the producer. `deliveries` is the server's count, and
//! `is_redelivered` is always true, because the server may have forgotten deliveries. Headers are sorted by name.
//!
//! # Order
//! The source sets the order: messages with the same value of a header ([`ORDER_KEY`] by default), messages
//! with the same subject, or none. The order holds within one process. With several processes at one consumer, the
//! server gives messages of one subject to any of them. After a crash, messages without an acknowledgement come again
//! after `ack_wait`, behind newer ones. Only `max_ack_pending` of 1 keeps the order in these cases. Otherwise use one
//! consumer and one process for each part of the subjects, and check sequence numbers of the producer.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr as _;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::header::{HeaderMap, HeaderName, HeaderValue, NATS_MESSAGE_ID};
use async_nats::jetstream::consumer::pull::BatchConfig;
use async_nats::jetstream::consumer::{AckPolicy, Config, PullConsumer};
use async_nats::jetstream::context::{ConsumerInfoErrorKind, GetStreamByNameErrorKind, PublishErrorKind};
use async_nats::jetstream::{self, ErrorCode};
use async_nats::{Client, Request, StatusCode, Subject, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt as _;
use oncegate_engine::ConfigError;
use oncegate_inbox::{
    Delivery, MESSAGE_ID, Message, Outgoing, PublishError, PublishFuture, Publisher, Source, SourceError,
    SourceInfo,
};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

/// The client library whose types this crate uses.
pub use async_nats;

/// The header with the order key of a message that [`NatsPublisher`] published.
pub const ORDER_KEY: &str = "oncegate-order-key";

/// The timeout of a reply of the server.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// The time that one request for messages stays at the server.
const EXPIRES: Duration = Duration::from_secs(30);

/// The interval of the server's heartbeats meanwhile.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// The interval of checks of the connection.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// The pause after an error.
const PAUSE: Duration = Duration::from_secs(1);

/// The number of times in a row that the server must report a missing consumer: after a start it may not know it yet.
const MAX_MISSES: u32 = 3;

#[derive(Clone, Debug)]
enum Order {
    None,
    Subject,
    Header(String),
}

/// Checks that a consumer cannot lose messages.
fn check(name: &str, config: &Config) -> Result<(), ConfigError> {
    let wrong = |what: String| Err(ConfigError::new(format!("the NATS consumer {name:?} {what}")));
    if config.durable_name.as_ref().is_none_or(String::is_empty) {
        return wrong(
            "is not durable: what it has not delivered yet is forgotten with it; give it a durable_name"
                .into(),
        );
    }
    if config.inactive_threshold > Duration::ZERO {
        return wrong("has an inactive_threshold: the server deletes an idle consumer; leave it out".into());
    }
    if config.ack_policy != AckPolicy::Explicit {
        return wrong(
            "has an ack_policy that acknowledges what was not processed; it must be explicit".into(),
        );
    }
    if config.max_deliver > 0 {
        return wrong(format!(
            "has max_deliver {}: the server stops delivering a message before it was processed; set it to -1",
            config.max_deliver
        ));
    }
    Ok(())
}

/// Returns the shortest redelivery time of the server.
fn redelivery(config: &Config) -> Duration {
    // `backoff` replaces `ack_wait`.
    config.backoff.iter().min().copied().unwrap_or(config.ack_wait)
}

/// A durable pull consumer.
pub struct NatsSource {
    context: jetstream::Context,
    consumer: Arc<PullConsumer>,
    order: Order,
    prefetch: usize,
    redelivery: Duration,
    reading: Option<Reading>,
    is_closed: bool,
}

impl fmt::Debug for NatsSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let info = self.consumer.cached_info();
        f.debug_struct("NatsSource")
            .field("stream", &info.stream_name)
            .field("consumer", &info.name)
            .field("redelivery", &self.redelivery)
            .finish_non_exhaustive()
    }
}

impl NatsSource {
    /// The maximum number of messages that a source requests ahead.
    pub const MAX_PREFETCH: usize = 10_000;

    /// Creates a source from a consumer that was looked up with this context.
    ///
    /// Its settings are those of the lookup. They are checked again whenever reading begins. Defaults: order by the
    /// header [`ORDER_KEY`], which [`NatsPublisher`] sends, and 100 messages ahead. Messages without the header have no
    /// order.
    ///
    /// # Errors
    /// [`ConfigError`] if the consumer may lose messages: see [the requirements](self#requirements-for-a-consumer).
    pub fn new(context: jetstream::Context, consumer: PullConsumer) -> Result<Self, ConfigError> {
        let info = consumer.cached_info();
        let config = &info.config;
        check(&info.name, config)?;
        let redelivery = redelivery(config);
        let consumer = Arc::new(consumer);
        let order = Order::Header(ORDER_KEY.to_owned());
        Ok(Self { context, consumer, order, prefetch: 100, redelivery, reading: None, is_closed: false })
    }

    /// Keeps messages with the same subject in order. A message that fails blocks its subject.
    #[must_use]
    pub fn with_order_by_subject(self) -> Self {
        Self { order: Order::Subject, ..self }
    }

    /// Keeps messages with the same value of this header in order. Messages without it have no order.
    #[must_use]
    pub fn with_order_by_header(self, name: impl Into<String>) -> Self {
        Self { order: Order::Header(name.into()), ..self }
    }

    /// Keeps no order.
    #[must_use]
    pub fn without_order(self) -> Self {
        Self { order: Order::None, ..self }
    }

    /// Sets how many messages are requested before they are needed.
    ///
    /// They are held in memory, no other process gets them, and their `ack_wait` runs. So choose a number that is
    /// processed within a small part of `ack_wait`.
    ///
    /// # Errors
    /// [`ConfigError`] outside 1 to [`MAX_PREFETCH`](Self::MAX_PREFETCH).
    pub fn with_prefetch(self, messages: usize) -> Result<Self, ConfigError> {
        let prefetch = ConfigError::check("the prefetch", messages, 1..=Self::MAX_PREFETCH)?;
        Ok(Self { prefetch, ..self })
    }
}

impl Source for NatsSource {
    type Delivery = NatsDelivery;

    fn info(&self) -> SourceInfo {
        SourceInfo::new(Some(self.redelivery)).with_header_names(|name| HeaderName::from_str(name).is_ok())
    }

    async fn next(&mut self) -> Result<NatsDelivery, SourceError> {
        if self.is_closed {
            return Err(SourceError::fatal("the source is closed"));
        }
        let pump =
            || Reading::begin(&self.context, &self.consumer, (&self.order, self.prefetch), self.redelivery);
        let reading = self.reading.get_or_insert_with(pump);
        loop {
            match reading.arrived.recv().await {
                Some(Ok(delivery)) => {
                    reading.capacity.add_permits(1);
                    // It waited here so long that the server delivers it again.
                    if !delivery.is_lost() {
                        return Ok(delivery);
                    }
                }
                Some(Err(error)) => return Err(error),
                None => return Err(SourceError::fatal("the reading task of the NATS consumer has ended")),
            }
        }
    }

    async fn close(&mut self) -> Result<(), SourceError> {
        self.is_closed = true;
        // Every acknowledgement was answered. Requested messages that were not started go to other consumers at once.
        match self.reading.take() {
            Some(reading) => reading.end().await,
            None => Ok(()),
        }
    }
}

/// The task that requests messages, and the messages that it received.
struct Reading {
    arrived: mpsc::Receiver<Result<NatsDelivery, SourceError>>,
    capacity: Arc<Semaphore>,
    client: Client,
    stop: CancellationToken,
    task: AbortOnDropHandle<()>,
}

impl Reading {
    fn begin(
        context: &jetstream::Context,
        consumer: &Arc<PullConsumer>,
        (order, prefetch): (&Order, usize),
        redelivery: Duration,
    ) -> Self {
        let config = &consumer.cached_info().config;
        let bounds = [config.max_batch, config.max_ack_pending].into_iter();
        let bounds = bounds.filter_map(|bound| usize::try_from(bound).ok()).filter(|bound| *bound > 0);
        let prefetch = bounds.fold(prefetch, usize::min);
        let expires = match config.max_expires {
            Duration::ZERO => EXPIRES,
            bound => EXPIRES.min(bound),
        };
        // One more place for an error.
        let (sender, arrived) = mpsc::channel(prefetch + 1);
        let capacity = Arc::new(Semaphore::new(prefetch));
        let stop = CancellationToken::new();
        let client = context.client();
        let pump = Pump {
            context: context.clone(),
            client: client.clone(),
            consumer: consumer.clone(),
            order: order.clone(),
            redelivery,
            expires,
            // The server requires less than half of the expiry.
            heartbeat: HEARTBEAT.min(expires / 3),
            half: prefetch.div_ceil(2),
            capacity: capacity.clone(),
            sender,
            stop: stop.clone(),
        };
        let task = AbortOnDropHandle::new(tokio::spawn(pump.run()));
        Self { arrived, capacity, client, stop, task }
    }

    async fn end(mut self) -> Result<(), SourceError> {
        self.stop.cancel();
        let ended = timeout(REPLY_TIMEOUT, &mut self.task).await.is_ok();
        let mut left = VecDeque::new();
        while let Ok(arrived) = self.arrived.try_recv() {
            left.extend(arrived.ok());
        }
        for delivery in left {
            let _comes_again_later = delivery.tell(nak(Duration::ZERO)).await;
        }
        match timeout(REPLY_TIMEOUT, self.client.flush()).await {
            Ok(Ok(())) if ended => Ok(()),
            Ok(Err(error)) => {
                Err(SourceError::transient("NATS did not get the end of the subscription").with_source(error))
            }
            _ => Err(SourceError::transient("NATS did not answer at the close")),
        }
    }
}

/// Requests messages as long as there is space.
struct Pump {
    context: jetstream::Context,
    consumer: Arc<PullConsumer>,
    client: Client,
    order: Order,
    redelivery: Duration,
    expires: Duration,
    heartbeat: Duration,
    half: usize,
    capacity: Arc<Semaphore>,
    sender: mpsc::Sender<Result<NatsDelivery, SourceError>>,
    stop: CancellationToken,
}

/// The space of a request that no message has taken yet.
struct OpenRequest<'a> {
    capacity: &'a Semaphore,
    messages: usize,
}

impl Drop for OpenRequest<'_> {
    fn drop(&mut self) {
        self.capacity.add_permits(self.messages);
    }
}

impl Pump {
    async fn run(self) {
        let mut misses = 0;
        loop {
            let read = tokio::select! {
                () = self.stop.cancelled() => return,
                read = self.begin(&mut misses) => read,
            };
            let ended = match read {
                Ok((name, inbox)) => self.read(&name, inbox).await,
                Err(error) => Err(error),
            };
            // The receiver is gone, or the error was delivered.
            let Err(error) = ended else { return };
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

    /// Waits for the connection, checks the consumer, and subscribes for its messages.
    async fn begin(&self, misses: &mut u32) -> Result<(Subject, Subscriber), SourceError> {
        while self.client.connection_state() != State::Connected {
            sleep(CHECK_INTERVAL).await;
        }
        let info = timeout(REPLY_TIMEOUT, self.consumer.get_info()).await;
        let info = info.map_err(|_| SourceError::transient("NATS does not answer"))?;
        let config = match info {
            Ok(info) => info.config,
            Err(error) => {
                let is_gone = matches!(
                    error.kind(),
                    ConsumerInfoErrorKind::NotFound | ConsumerInfoErrorKind::StreamNotFound
                );
                *misses = if is_gone { *misses + 1 } else { 0 };
                let error = if *misses >= MAX_MISSES {
                    let info = self.consumer.cached_info();
                    let (name, stream) = (&info.name, &info.stream_name);
                    let gone = format!(
                        "the NATS consumer {name:?} of the stream {stream:?} does not exist any more"
                    );
                    SourceError::fatal(gone).with_source(error)
                } else {
                    SourceError::transient("NATS did not describe the consumer").with_source(error)
                };
                return Err(error);
            }
        };
        *misses = 0;
        check(&self.consumer.cached_info().name, &config)
            .map_err(|error| SourceError::fatal(error.to_string()))?;
        if redelivery(&config) < self.redelivery {
            return Err(SourceError::fatal(
                "the NATS consumer has a shorter ack_wait than it had: start again",
            ));
        }
        let name = Subject::from(self.client.new_inbox());
        let inbox = self.client.subscribe(name.clone()).await;
        Ok((name, inbox.map_err(|error| passing("NATS refused a subscription", error))?))
    }

    /// Reads until an error or the stop.
    async fn read(&self, name: &Subject, mut inbox: Subscriber) -> Result<(), SourceError> {
        // After a reconnection the library subscribes again, but the server has forgotten the requests.
        let connection = self.client.statistics().connects.load(Relaxed);
        loop {
            let asked = tokio::select! {
                () = self.stop.cancelled() => return self.give_up(inbox).await,
                asked = self.acquire_capacity() => asked?,
            };
            self.ask(name, asked.messages).await?;
            tokio::select! {
                () = self.stop.cancelled() => return self.give_up(inbox).await,
                answered = self.read_messages(&mut inbox, asked, connection) => answered?,
            }
        }
    }

    async fn acquire_capacity(&self) -> Result<OpenRequest<'_>, SourceError> {
        let closed = || SourceError::fatal("the source is closed");
        let half = u32::try_from(self.half).unwrap_or(u32::MAX);
        self.capacity.acquire_many(half).await.map_err(|_| closed())?.forget();
        let mut asked = OpenRequest { capacity: &self.capacity, messages: self.half };
        while let Ok(one) = self.capacity.try_acquire() {
            one.forget();
            asked.messages += 1;
        }
        Ok(asked)
    }

    async fn ask(&self, inbox: &Subject, messages: usize) -> Result<(), SourceError> {
        let request = BatchConfig {
            batch: messages,
            expires: Some(self.expires),
            idle_heartbeat: self.heartbeat,
            ..BatchConfig::default()
        };
        let asked = timeout(REPLY_TIMEOUT, self.consumer.request_batch(request, inbox.clone())).await;
        asked
            .map_err(|_| SourceError::transient("NATS refused a request"))?
            .map_err(|error| passing("NATS refused a request", error))
    }

    /// Reads until all requested messages came, or the server ends the request.
    async fn read_messages(
        &self,
        inbox: &mut Subscriber,
        mut asked: OpenRequest<'_>,
        connection: u64,
    ) -> Result<(), SourceError> {
        let mut heard = Instant::now();
        while asked.messages > 0 {
            let Ok(message) = timeout(CHECK_INTERVAL, inbox.next()).await else {
                let is_same = self.client.statistics().connects.load(Relaxed) == connection;
                if !is_same || self.client.connection_state() != State::Connected {
                    return Err(SourceError::transient("the connection to NATS was lost"));
                }
                if heard.elapsed() > self.heartbeat * 3 {
                    return Err(SourceError::transient("NATS is silent"));
                }
                continue;
            };
            let Some(message) = message else {
                return Err(SourceError::transient("the subscription at NATS ended"));
            };
            heard = Instant::now();
            match message.status {
                None | Some(StatusCode::OK) => {
                    // A message that belongs to no request returns its space.
                    if self.take(message) {
                        asked.messages -= 1;
                    }
                }
                Some(StatusCode::IDLE_HEARTBEAT) => {}
                Some(StatusCode::TIMEOUT | StatusCode::NOT_FOUND) => return Ok(()),
                Some(StatusCode::REQUEST_TERMINATED)
                    if message.description.as_deref() == Some("Batch Completed") =>
                {
                    return Ok(());
                }
                // The consumer was deleted, its server stops, or its leader changes. The next check finds out.
                Some(status) => {
                    let why = message.description.unwrap_or_default();
                    return Err(SourceError::transient(format!("NATS ended a request: {status} {why}")));
                }
            }
        }
        Ok(())
    }

    /// Stores a message for the source, and returns `false` if it was dropped.
    ///
    /// It is dropped without space, which no request is made without, or if it is not of JetStream. It comes again
    /// then.
    fn take(&self, message: async_nats::Message) -> bool {
        let at = Instant::now();
        let message = jetstream::Message { message, context: self.context.clone() };
        let delivery = NatsDelivery::new(message, &self.client, &self.order, at, self.redelivery);
        delivery.is_some_and(|delivery| self.sender.try_send(Ok(delivery)).is_ok())
    }

    /// Takes messages that are on their way, and requests no more.
    async fn give_up(&self, mut inbox: Subscriber) -> Result<(), SourceError> {
        let ended = inbox.drain().await;
        ended.map_err(|error| passing("NATS refused the end of a subscription", error))?;
        let until = Instant::now() + REPLY_TIMEOUT / 2;
        while let Ok(Some(message)) = tokio::time::timeout_at(until, inbox.next()).await {
            if matches!(message.status, None | Some(StatusCode::OK)) {
                self.take(message);
            }
        }
        Ok(())
    }
}

fn passing(what: &str, error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> SourceError {
    SourceError::transient(what).with_source(error)
}

/// A message that JetStream delivered.
pub struct NatsDelivery {
    message: Arc<Message>,
    client: Client,
    /// The subject for its settlement.
    reply: Subject,
    /// The latest time at which the server may have begun to wait.
    since: Mutex<Instant>,
    redelivery: Duration,
}

impl fmt::Debug for NatsDelivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsDelivery").field("message", &self.message).finish_non_exhaustive()
    }
}

impl NatsDelivery {
    fn new(
        delivered: jetstream::Message,
        client: &Client,
        order: &Order,
        since: Instant,
        redelivery: Duration,
    ) -> Option<Self> {
        let info = delivered.info().ok()?;
        let id = format!("{}/{}", info.stream, info.stream_sequence);
        let deliveries = u32::try_from(info.delivered).ok();
        let delivered = delivered.message;
        let mut message = Message::new(delivered.subject.as_str(), delivered.payload)
            .with_broker_id(id)
            .with_deliveries(deliveries, true);
        for (name, values) in delivered.headers.iter().flat_map(HeaderMap::iter) {
            for value in values {
                message = message.with_header(name.to_string(), value.as_str().to_owned());
            }
        }
        // The sort is stable, so values of one name keep their order.
        message.headers.sort_by(|(one, _), (other, _)| one.cmp(other));
        message.order_key = match order {
            Order::None => None,
            Order::Subject => Some(Bytes::from(message.topic.clone())),
            // If there are several values, the first one counts.
            Order::Header(name) => {
                message.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.clone())
            }
        };
        let since = Mutex::new(since);
        let client = client.clone();
        Some(Self { message: Arc::new(message), client, reply: delivered.reply?, since, redelivery })
    }

    /// Sends a settlement, and waits for its confirmation.
    async fn ask(&self, what: Bytes) -> Result<(), SourceError> {
        let request = Request::new().payload(what).timeout(Some(REPLY_TIMEOUT));
        let reply = self.client.send_request(self.reply.clone(), request).await;
        reply.map(drop).map_err(|error| passing("NATS did not confirm the settlement", error))
    }

    /// Sends a settlement.
    async fn tell(&self, what: Bytes) -> Result<(), SourceError> {
        let told = self.client.publish(self.reply.clone(), what).await;
        told.map_err(|error| passing("NATS was not told", error))
    }
}

/// Encodes a negative acknowledgement with a delay.
fn nak(after: Duration) -> Bytes {
    if after.is_zero() {
        return Bytes::from_static(b"-NAK");
    }
    // A year is long enough, and fits.
    let nanoseconds = after.min(Duration::from_secs(365 * 24 * 60 * 60)).as_nanos();
    Bytes::from(format!("-NAK {{\"delay\": {nanoseconds}}}"))
}

impl Delivery for NatsDelivery {
    const GIVES_BACK: bool = true;

    fn message(&self) -> &Arc<Message> {
        &self.message
    }

    /// Returns `true` if the redelivery time is over and the message has no order.
    ///
    /// An ordered message is never lost: skipped here, it would come again behind later messages that are not lost. The
    /// server accepts late acknowledgements.
    fn is_lost(&self) -> bool {
        // The server's time began before ours, so it is over, too.
        let is_over =
            || self.since.lock().unwrap_or_else(PoisonError::into_inner).elapsed() >= self.redelivery;
        self.message.order_key.is_none() && is_over()
    }

    async fn extend(&self) -> Result<(), SourceError> {
        // Measured before the server gets it.
        let at = Instant::now();
        self.ask(Bytes::from_static(b"+WPI")).await?;
        *self.since.lock().unwrap_or_else(PoisonError::into_inner) = at;
        Ok(())
    }

    async fn ack(&self) -> Result<(), SourceError> {
        self.ask(Bytes::from_static(b"+ACK")).await
    }

    async fn give_back(&self, after: Duration) -> Result<(), SourceError> {
        self.ask(nak(after)).await
    }
}

/// Publishes into streams. The topic of a message is its subject.
///
/// The identifier is also in `Nats-Msg-Id`. A stream that got it within its `duplicate_window` (two minutes unless set)
/// confirms the message and does not store it again. A later copy is another message of the stream; consumers find it
/// by [`MESSAGE_ID`]. The order key is in the header [`ORDER_KEY`]. A confirmation is as durable as the stream: see
/// [the guarantees of the broker](self#guarantees-of-the-broker).
///
/// Headers whose names begin with `Nats-` are dropped, because they are instructions to the server. Header values must
/// be text of one line; a message with others is refused.
///
/// To publish messages with the same order key in order, wait for each before the next.
#[derive(Clone)]
pub struct NatsPublisher {
    context: jetstream::Context,
}

impl fmt::Debug for NatsPublisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsPublisher").finish_non_exhaustive()
    }
}

impl NatsPublisher {
    /// Creates a publisher from a context. Its timeout is that of a confirmation.
    #[must_use]
    pub const fn new(context: jetstream::Context) -> Self {
        Self { context }
    }

    async fn send(&self, message: &Outgoing) -> Result<(), PublishError> {
        let subject = Subject::validated(message.topic.as_str()).map_err(PublishError::refused)?;
        if subject.split('.').any(|token| matches!(token, "*" | ">")) {
            return Err(PublishError::refused("a subject with a wildcard cannot be a destination"));
        }
        let publish = jetstream::message::PublishMessage::build()
            .payload(message.payload.clone())
            .headers(headers(message)?);
        let confirmed = match self.context.send_publish(subject, publish).await {
            Ok(confirmation) => confirmation.await,
            Err(error) => Err(error),
        };
        // A duplicate is a success: the stream has the message.
        let Err(error) = confirmed else { return Ok(()) };
        let is_refused = match error.kind() {
            PublishErrorKind::MaxPayloadExceeded => true,
            PublishErrorKind::StreamNotFound => self.has_no_stream(message).await,
            _ => std::error::Error::source(&error)
                .and_then(|source| source.downcast_ref::<jetstream::Error>())
                .is_some_and(|said| said.error_code() == ErrorCode::STREAM_MESSAGE_EXCEEDS_MAXIMUM),
        };
        Err(if is_refused { PublishError::refused(error) } else { PublishError::unconfirmed(error) })
    }

    /// Returns `true` if no stream has this subject.
    ///
    /// No server answered the message. That also happens while replicas elect a leader, so ask for the stream itself.
    async fn has_no_stream(&self, message: &Outgoing) -> bool {
        let asked = timeout(REPLY_TIMEOUT, self.context.stream_by_subject(message.topic.clone())).await;
        matches!(asked, Ok(Err(error)) if error.kind() == GetStreamByNameErrorKind::NotFound)
    }
}

/// Converts the headers of a message.
fn headers(message: &Outgoing) -> Result<HeaderMap, PublishError> {
    let mut headers = HeaderMap::new();
    for (name, value) in &message.headers {
        let is_ours = [MESSAGE_ID, ORDER_KEY].iter().any(|ours| name.eq_ignore_ascii_case(ours));
        let is_instruction = name.get(..5).is_some_and(|start| start.eq_ignore_ascii_case("nats-"));
        if is_ours || is_instruction {
            continue;
        }
        let name = HeaderName::from_str(name).map_err(PublishError::refused)?;
        headers.append(name, text(value)?);
    }
    let id = HeaderValue::from_str(&message.id).map_err(PublishError::refused)?;
    headers.insert(NATS_MESSAGE_ID, id.clone());
    headers.insert(MESSAGE_ID, id);
    if let Some(key) = &message.order_key {
        headers.insert(ORDER_KEY, text(key)?);
    }
    Ok(headers)
}

fn text(value: &[u8]) -> Result<HeaderValue, PublishError> {
    let text = std::str::from_utf8(value).map_err(PublishError::refused)?;
    HeaderValue::from_str(text).map_err(PublishError::refused)
}

impl Publisher for NatsPublisher {
    fn publish<'a>(&'a self, message: &'a Outgoing) -> PublishFuture<'a> {
        Box::pin(self.send(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_redelivery_counts() {
        let second = Duration::from_secs(1);
        let config = Config { ack_wait: second * 30, ..Config::default() };
        assert_eq!(redelivery(&config), second * 30);
        let config = Config { backoff: vec![second * 9, second * 2, second * 60], ..config };
        assert_eq!(redelivery(&config), second * 2);
    }

    #[test]
    fn a_delay_is_in_nanoseconds() {
        assert_eq!(nak(Duration::ZERO), "-NAK");
        assert_eq!(nak(Duration::from_millis(1500)), "-NAK {\"delay\": 1500000000}");
        assert_eq!(nak(Duration::MAX), "-NAK {\"delay\": 31536000000000000}");
    }
}
