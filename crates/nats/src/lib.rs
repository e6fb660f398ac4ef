//! NATS JetStream: a durable pull consumer as a source, and streams as a destination.
//!
//! # What the broker promises
//! JetStream keeps a message until its stream's limits say otherwise, and delivers it to a consumer again until it is
//! acknowledged: at least once. An acknowledgement is asked to be confirmed (a double ack). A server that crashes may forget
//! acknowledgements that it confirmed, and how often it has delivered what; then messages come again, with smaller numbers.
//!
//! **A server that confirms a message has not necessarily written it to its disk.** It flushes at an interval
//! (`sync_interval`, two minutes unless that is set), so a machine that loses its power loses what it confirmed last; where
//! all replicas do so at the same time, all of it. A killed process loses nothing. From version 2.10 on
//! `sync_interval: always` flushes before it confirms. Use several replicas that fail apart from each other, or that
//! setting, for what may not be lost.
//!
//! # What a consumer must be
//! Durable, with `ack_policy` explicit, without `max_deliver`, and without `inactive_threshold`. [`NatsSource::new`] refuses
//! anything else: a server that has delivered a message `max_deliver` times never delivers it again, and a crash, a database
//! out of reach and a duplicate in flight count, too. How often a message is attempted is the inbox's to say. Where the
//! settings are changed later, the source stops with an error that is fatal, and so it does when the consumer was deleted.
//!
//! The stream's own limits (`max_age`, `max_msgs`, `max_bytes` with `discard: old`) take messages away whether or not
//! they were processed. Choose them so that they do not.
//!
//! # What a delivery says
//! `topic` is its subject, `broker_id` is `STREAM/SEQUENCE`. A stream that is deleted and made again counts from 1
//! again: give it another name then, or use an identity that the producer gives. `deliveries` is what the server
//! counts, and `is_redelivered` is always true, because the server may have forgotten. Headers come in the order of
//! their names.
//!
//! # Order
//! [`NatsSourceOptions`] say what stays in order: messages with the same value of a header ([`ORDER_KEY`], unless
//! something else is said), with the same subject, or none.
//! That holds within one process. A server gives the messages of one subject to whoever asks, so
//! with several processes at one consumer, and after a crash, when what was not acknowledged comes again after
//! `ack_wait` and newer messages before that, only `max_ack_pending` of 1 keeps the order. Where the processing must
//! be in order all the same, have one consumer for each part of the subjects, with one process each, and check
//! sequence numbers of the producer's own.

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

/// The client library, as the types of this module use it.
pub use async_nats;

/// The header with the order key of a message that [`NatsPublisher`] published: a subject alone does not say it.
pub const ORDER_KEY: &str = "oncegate-order-key";

/// How long an answer of the server is waited for.
const ANSWER: Duration = Duration::from_secs(10);

/// How long one request for messages stays at the server.
const EXPIRES: Duration = Duration::from_secs(30);

/// How often the server says meanwhile that it is there.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// How often the connection is looked at.
const LOOK: Duration = Duration::from_millis(250);

/// How long to wait after an error.
const PAUSE: Duration = Duration::from_secs(1);

/// How often in a row the server has to say that there is no such consumer: a server that has just started may not know yet.
const MISSES: u32 = 3;

/// How a source reads: what stays in order, and how many messages it asks for ahead.
#[derive(Clone, Debug)]
pub struct NatsSourceOptions {
    order: Order,
    prefetch: usize,
}

#[derive(Clone, Debug)]
enum Order {
    None,
    Subject,
    Header(String),
}

impl NatsSourceOptions {
    /// Most messages that a source holds ahead.
    pub const MAX_PREFETCH: usize = 10_000;

    /// Messages with the same value of the header [`ORDER_KEY`], which [`NatsPublisher`] sends, stay in order; those without
    /// it, in none. 100 messages are held ahead.
    #[must_use]
    pub fn new() -> Self {
        Self { order: Order::Header(ORDER_KEY.to_owned()), prefetch: 100 }
    }

    /// Messages with the same subject stay in order. They are then processed one after the other, and one that fails holds up
    /// all of its subject.
    #[must_use]
    pub fn with_order_by_subject(self) -> Self {
        Self { order: Order::Subject, ..self }
    }

    /// Messages with the same value of this header stay in order; those without it, in none.
    #[must_use]
    pub fn with_order_by_header(self, name: impl Into<String>) -> Self {
        Self { order: Order::Header(name.into()), ..self }
    }

    /// Nothing stays in order.
    #[must_use]
    pub fn without_order(self) -> Self {
        Self { order: Order::None, ..self }
    }

    /// How many messages are asked for before they are needed. They are held in memory, nobody else gets them, and their
    /// `ack_wait` runs: as many as are processed within a small part of it.
    ///
    /// # Errors
    /// Outside 1 to [`MAX_PREFETCH`](Self::MAX_PREFETCH).
    pub fn with_prefetch(self, messages: usize) -> Result<Self, ConfigError> {
        if !(1..=Self::MAX_PREFETCH).contains(&messages) {
            return Err(ConfigError::new(format!("prefetch: between 1 and {}", Self::MAX_PREFETCH)));
        }
        Ok(Self { prefetch: messages, ..self })
    }
}

impl Default for NatsSourceOptions {
    fn default() -> Self {
        Self::new()
    }
}

/// Whether a consumer is one that loses nothing.
fn check(name: &str, config: &Config) -> Result<(), ConfigError> {
    let wrong = |what: String| Err(ConfigError::new(format!("the NATS consumer {name:?} {what}")));
    if config.durable_name.as_ref().is_none_or(String::is_empty) {
        return wrong(
            "is not durable: what it has not delivered yet is forgotten with it; give it a durable_name"
                .into(),
        );
    }
    if config.inactive_threshold > Duration::ZERO {
        return wrong(
            "has an inactive_threshold: it is deleted when nobody asks for so long; leave that out".into(),
        );
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

/// How long after a delivery the server delivers again, at the earliest.
fn redelivery(config: &Config) -> Duration {
    // With `backoff` that takes the place of `ack_wait`.
    config.backoff.iter().min().copied().unwrap_or(config.ack_wait)
}

/// A durable pull consumer.
pub struct NatsSource {
    context: jetstream::Context,
    consumer: Arc<PullConsumer>,
    options: NatsSourceOptions,
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
    /// Reads from this consumer, which was looked up through this context. Its settings are those that the server told then;
    /// they are looked at again whenever reading begins.
    ///
    /// # Errors
    /// Where the consumer may lose messages: see [what a consumer must be](self#what-a-consumer-must-be).
    pub fn new(
        context: jetstream::Context,
        consumer: PullConsumer,
        options: NatsSourceOptions,
    ) -> Result<Self, ConfigError> {
        let info = consumer.cached_info();
        let config = &info.config;
        check(&info.name, config)?;
        let redelivery = redelivery(config);
        let consumer = Arc::new(consumer);
        Ok(Self { context, consumer, options, redelivery, reading: None, is_closed: false })
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
        let pump = || Reading::begin(&self.context, &self.consumer, &self.options, self.redelivery);
        let reading = self.reading.get_or_insert_with(pump);
        loop {
            match reading.arrived.recv().await {
                Some(Ok(delivery)) => {
                    reading.room.add_permits(1);
                    // It waited here for so long that the server delivers it again.
                    if !delivery.is_lost() {
                        return Ok(delivery);
                    }
                }
                Some(Err(error)) => return Err(error),
                None => return Err(SourceError::fatal("the NATS consumer is read no more")),
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

/// The task that asks for messages, and what it has got.
struct Reading {
    arrived: mpsc::Receiver<Result<NatsDelivery, SourceError>>,
    room: Arc<Semaphore>,
    client: Client,
    stop: CancellationToken,
    task: AbortOnDropHandle<()>,
}

impl Reading {
    fn begin(
        context: &jetstream::Context,
        consumer: &Arc<PullConsumer>,
        options: &NatsSourceOptions,
        redelivery: Duration,
    ) -> Self {
        let config = &consumer.cached_info().config;
        let bounds = [config.max_batch, config.max_ack_pending].into_iter();
        let bounds = bounds.filter_map(|bound| usize::try_from(bound).ok()).filter(|bound| *bound > 0);
        let prefetch = bounds.fold(options.prefetch, usize::min);
        let expires = match config.max_expires {
            Duration::ZERO => EXPIRES,
            bound => EXPIRES.min(bound),
        };
        // One place more: for an error.
        let (sender, arrived) = mpsc::channel(prefetch + 1);
        let room = Arc::new(Semaphore::new(prefetch));
        let stop = CancellationToken::new();
        let client = context.client();
        let pump = Pump {
            context: context.clone(),
            client: client.clone(),
            consumer: consumer.clone(),
            order: options.order.clone(),
            redelivery,
            expires,
            // The server wants it to be less than half of that.
            heartbeat: HEARTBEAT.min(expires / 3),
            half: prefetch.div_ceil(2),
            room: room.clone(),
            sender,
            stop: stop.clone(),
        };
        let task = AbortOnDropHandle::new(tokio::spawn(pump.run()));
        Self { arrived, room, client, stop, task }
    }

    async fn end(mut self) -> Result<(), SourceError> {
        self.stop.cancel();
        let ended = timeout(ANSWER, &mut self.task).await.is_ok();
        let mut left = VecDeque::new();
        while let Ok(arrived) = self.arrived.try_recv() {
            left.extend(arrived.ok());
        }
        for delivery in left {
            let _comes_again_later = delivery.tell(nak(Duration::ZERO)).await;
        }
        match timeout(ANSWER, self.client.flush()).await {
            Ok(Ok(())) if ended => Ok(()),
            Ok(Err(error)) => Err(SourceError::transient("NATS did not hear the end").with_source(error)),
            _ => Err(SourceError::transient("NATS did not answer at the end")),
        }
    }
}

/// Asks for messages, where there is room for them.
struct Pump {
    context: jetstream::Context,
    consumer: Arc<PullConsumer>,
    client: Client,
    order: Order,
    redelivery: Duration,
    expires: Duration,
    heartbeat: Duration,
    half: usize,
    room: Arc<Semaphore>,
    sender: mpsc::Sender<Result<NatsDelivery, SourceError>>,
    stop: CancellationToken,
}

/// Room that a request was made for, and that nothing has come into yet.
struct Asked<'a> {
    room: &'a Semaphore,
    messages: usize,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.room.add_permits(self.messages);
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
            // There is nobody who wants to know, or it was told.
            let Err(error) = ended else { return };
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

    /// Waits for the connection, looks at the consumer and makes a place for its messages.
    async fn begin(&self, misses: &mut u32) -> Result<(Subject, Subscriber), SourceError> {
        while self.client.connection_state() != State::Connected {
            sleep(LOOK).await;
        }
        let info = timeout(ANSWER, self.consumer.get_info()).await;
        let info = info.map_err(|_| SourceError::transient("NATS does not answer"))?;
        let config = match info {
            Ok(info) => info.config,
            Err(error) => {
                let is_gone = matches!(
                    error.kind(),
                    ConsumerInfoErrorKind::NotFound | ConsumerInfoErrorKind::StreamNotFound
                );
                *misses = if is_gone { *misses + 1 } else { 0 };
                let error = if *misses >= MISSES {
                    let info = self.consumer.cached_info();
                    let (name, stream) = (&info.name, &info.stream_name);
                    let gone =
                        format!("the NATS consumer {name:?} of the stream {stream:?} is not there any more");
                    SourceError::fatal(gone).with_source(error)
                } else {
                    SourceError::transient("NATS does not tell of the consumer").with_source(error)
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
        Ok((name, inbox.map_err(|error| passing("NATS takes no subscription", error))?))
    }

    /// Reads until something is wrong, or it is told to stop.
    async fn read(&self, name: &Subject, mut inbox: Subscriber) -> Result<(), SourceError> {
        // The library subscribes again after a reconnection, but what was asked for is forgotten then.
        let connection = self.client.statistics().connects.load(Relaxed);
        loop {
            let asked = tokio::select! {
                () = self.stop.cancelled() => return self.give_up(inbox).await,
                asked = self.room() => asked?,
            };
            self.ask(name, asked.messages).await?;
            tokio::select! {
                () = self.stop.cancelled() => return self.give_up(inbox).await,
                answered = self.answers(&mut inbox, asked, connection) => answered?,
            }
        }
    }

    async fn room(&self) -> Result<Asked<'_>, SourceError> {
        let closed = || SourceError::fatal("the source is closed");
        let half = u32::try_from(self.half).unwrap_or(u32::MAX);
        self.room.acquire_many(half).await.map_err(|_| closed())?.forget();
        let mut asked = Asked { room: &self.room, messages: self.half };
        while let Ok(one) = self.room.try_acquire() {
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
        let asked = timeout(ANSWER, self.consumer.request_batch(request, inbox.clone())).await;
        asked
            .map_err(|_| SourceError::transient("NATS takes no request"))?
            .map_err(|error| passing("NATS takes no request", error))
    }

    /// Until as many messages came as were asked for, or the server says that there are no more of them for now.
    async fn answers(
        &self,
        inbox: &mut Subscriber,
        mut asked: Asked<'_>,
        connection: u64,
    ) -> Result<(), SourceError> {
        let mut heard = Instant::now();
        while asked.messages > 0 {
            let Ok(message) = timeout(LOOK, inbox.next()).await else {
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
                    // What is not counted as asked for has its room given back.
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
                // The consumer was deleted, its server stops, its leader changes: looking at it again tells.
                Some(status) => {
                    let why = message.description.unwrap_or_default();
                    return Err(SourceError::transient(format!("NATS ended a request: {status} {why}")));
                }
            }
        }
        Ok(())
    }

    /// Puts a message where the source finds it. Where there is no room, which no request was made without, or it is none
    /// of JetStream's, it is left: it comes again.
    fn take(&self, message: async_nats::Message) -> bool {
        let at = Instant::now();
        let message = jetstream::Message { message, context: self.context.clone() };
        let delivery = NatsDelivery::new(message, &self.client, &self.order, at, self.redelivery);
        delivery.is_some_and(|delivery| self.sender.try_send(Ok(delivery)).is_ok())
    }

    /// Takes what is on its way, and asks for nothing more.
    async fn give_up(&self, mut inbox: Subscriber) -> Result<(), SourceError> {
        let ended = inbox.drain().await;
        ended.map_err(|error| passing("NATS takes no end of a subscription", error))?;
        let until = Instant::now() + ANSWER / 2;
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
    /// Where what becomes of it is told.
    reply: Subject,
    /// When the server began to wait, at the latest.
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
        // Values of one name stay as they are.
        message.headers.sort_by(|(one, _), (other, _)| one.cmp(other));
        message.order_key = match order {
            Order::None => None,
            Order::Subject => Some(Bytes::from(message.topic.clone())),
            // Of several the first, rather than none.
            Order::Header(name) => {
                message.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v.clone())
            }
        };
        let since = Mutex::new(since);
        let client = client.clone();
        Some(Self { message: Arc::new(message), client, reply: delivered.reply?, since, redelivery })
    }

    /// Tells the server, and waits until it has said that it heard.
    async fn ask(&self, what: Bytes) -> Result<(), SourceError> {
        let request = Request::new().payload(what).timeout(Some(ANSWER));
        let answer = self.client.send_request(self.reply.clone(), request).await;
        answer.map(drop).map_err(|error| passing("NATS did not confirm it", error))
    }

    /// Tells the server.
    async fn tell(&self, what: Bytes) -> Result<(), SourceError> {
        let told = self.client.publish(self.reply.clone(), what).await;
        told.map_err(|error| passing("NATS was not told", error))
    }
}

/// It is not processed, and comes again after so long.
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

    /// Whether its time is over, and it is in no order. One that is in order stays with whoever has it: left out here, it would
    /// come again behind those that came after it and are not lost. The server takes an acknowledgement that is late.
    fn is_lost(&self) -> bool {
        // The server's time began before ours, so its time is over, too.
        let is_over =
            || self.since.lock().unwrap_or_else(PoisonError::into_inner).elapsed() >= self.redelivery;
        self.message.order_key.is_none() && is_over()
    }

    async fn extend(&self) -> Result<(), SourceError> {
        // From before the server hears of it.
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

/// Publishes into streams, the topic of a message being its subject.
///
/// The identifier of a message is in `Nats-Msg-Id`, too: a stream that has it already, since no longer than its
/// `duplicate_window` (two minutes unless that is set), confirms it and does not keep it a second time. What is
/// published again later is another message of the stream; [`MESSAGE_ID`] tells a consumer. The order key is in the
/// header [`ORDER_KEY`]. What a stream confirms is as durable as the stream is: see [what the broker
/// promises](self#what-the-broker-promises).
///
/// Headers whose names begin with `Nats-` are not passed on, because they are instructions to the server. Values of headers
/// are text of one line here; a message with others is refused.
///
/// Messages with the same order key are published in the order in which they are given only where each is waited for.
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
    /// Publishes through this context, whose time-out is how long a confirmation is waited for.
    #[must_use]
    pub const fn new(context: jetstream::Context) -> Self {
        Self { context }
    }

    async fn send(&self, message: &Outgoing) -> Result<(), PublishError> {
        let subject = Subject::validated(message.topic.as_str()).map_err(PublishError::refused)?;
        if subject.split('.').any(|token| matches!(token, "*" | ">")) {
            return Err(PublishError::refused("a subject with a wildcard is no destination"));
        }
        let publish = jetstream::message::PublishMessage::build()
            .payload(message.payload.clone())
            .headers(headers(message)?);
        let confirmed = match self.context.send_publish(subject, publish).await {
            Ok(confirmation) => confirmation.await,
            Err(error) => Err(error),
        };
        // That it is a duplicate is as good: the stream has it.
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

    /// Nobody was there who would have taken it. While the replicas of a stream elect a leader that is so, too, so the
    /// server is asked whether there is a stream at all.
    async fn has_no_stream(&self, message: &Outgoing) -> bool {
        let asked = timeout(ANSWER, self.context.stream_by_subject(message.topic.clone())).await;
        matches!(asked, Ok(Err(error)) if error.kind() == GetStreamByNameErrorKind::NotFound)
    }
}

/// The headers of a message as NATS has them.
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
