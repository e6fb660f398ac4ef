//! The source: a consumer of one queue.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt as _;
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions,
};
use lapin::types::{FieldTable, ShortString};
use lapin::{Acker, Channel, Connection, Consumer};
use oncegate_core::ErrorChain;
use oncegate_engine::ConfigError;
use oncegate_inbox::{Delivery, Message, Source, SourceError, SourceInfo, jittered};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::broker::{AmqpBroker, CONNECT_TIMEOUT, goodbye};
use super::fields;

/// The default number of messages that the broker delivers ahead of acknowledgements.
const PREFETCH: u16 = 256;

/// The default acknowledgement timeout of RabbitMQ.
const CONSUMER_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// The minimum of that timeout: RabbitMQ checks it once a minute.
const MIN_CONSUMER_TIMEOUT: Duration = Duration::from_secs(1);

/// The shortest and the longest pause between attempts to connect.
const MIN_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(10);

/// The hold time of an ordered message that is given back without a delay: longer than the shutdown of a consumer.
const STOPPING: Duration = Duration::from_secs(60);

/// A queue of RabbitMQ, read with acknowledgements.
///
/// It declares nothing: queues, exchanges and bindings must exist. It reconnects when the connection, the channel or
/// the consumer ends. Messages without an acknowledgement are delivered again then.
pub struct AmqpSource {
    broker: AmqpBroker,
    queue: String,
    prefetch: u16,
    consumer_timeout: Option<Duration>,
    topic: Topic,
    order: Order,
    state: State,
    failures: u32,
}

#[derive(Clone, Copy, Debug)]
enum Topic {
    Queue,
    RoutingKey,
}

#[derive(Clone, Debug)]
enum Order {
    None,
    RoutingKey,
    Header(String),
}

enum State {
    /// Nothing is tried until this time.
    Waiting(Instant),
    Connecting(AbortOnDropHandle<Result<Link, SourceError>>),
    Connected(Box<Link>),
    Closed,
}

/// A consumer that the broker knows.
struct Link {
    connection: Option<Connection>,
    channel: Channel,
    consumer: Consumer,
    gone: CancellationToken,
}

impl AmqpSource {
    /// Creates a source from a queue.
    ///
    /// # Errors
    /// [`ConfigError`] if the name is empty or has more than 255 bytes.
    pub fn new(broker: AmqpBroker, queue: impl Into<String>) -> Result<Self, ConfigError> {
        let queue = queue.into();
        if queue.is_empty() || ShortString::try_new(&*queue).is_err() {
            return Err(ConfigError::new("the name of a queue must have 1 to 255 bytes"));
        }
        Ok(Self {
            broker,
            queue,
            prefetch: PREFETCH,
            consumer_timeout: Some(CONSUMER_TIMEOUT),
            topic: Topic::Queue,
            order: Order::None,
            state: State::Waiting(Instant::now()),
            failures: 0,
        })
    }

    /// Sets how many messages the broker delivers ahead of acknowledgements. Default: 256.
    ///
    /// Messages that wait to be given back count, too. It must be at least the number that the consumer holds, or that
    /// number is never reached.
    ///
    /// # Errors
    /// [`ConfigError`] for 0, which means no limit.
    pub fn with_prefetch(self, prefetch: u16) -> Result<Self, ConfigError> {
        if prefetch == 0 {
            return Err(ConfigError::new(
                "the prefetch is 0, which means no limit; it must be from 1 to 65535",
            ));
        }
        Ok(Self { prefetch, ..self })
    }

    /// Sets the broker's acknowledgement timeout, its `consumer_timeout`. Default: 30 minutes; `None` if it is turned
    /// off.
    ///
    /// After it the broker closes the channel, and everything that it had delivered comes again.
    ///
    /// # Errors
    /// [`ConfigError`] if it is less than a second.
    pub fn with_consumer_timeout(self, consumer_timeout: Option<Duration>) -> Result<Self, ConfigError> {
        if consumer_timeout.is_some_and(|time| time < MIN_CONSUMER_TIMEOUT) {
            return Err(ConfigError::new("the consumer timeout must be at least one second"));
        }
        Ok(Self { consumer_timeout, ..self })
    }

    /// Takes the routing key as the topic, instead of the queue.
    ///
    /// If messages pass through other queues, such as a retry queue, their routing key may change.
    #[must_use]
    pub fn with_topic_from_routing_key(self) -> Self {
        Self { topic: Topic::RoutingKey, ..self }
    }

    /// Keeps messages with the same value of this header in order. Messages without it have no order.
    #[must_use]
    pub fn with_order_by_header(self, name: impl Into<String>) -> Self {
        Self { order: Order::Header(name.into()), ..self }
    }

    /// Keeps messages with the same routing key in order.
    #[must_use]
    pub fn with_order_by_routing_key(self) -> Self {
        Self { order: Order::RoutingKey, ..self }
    }

    /// Connects now and returns the error, for the start of a program.
    ///
    /// Without this call the first request for a message connects, and errors only go to the log.
    ///
    /// # Errors
    /// The error of the broker or of the connection.
    pub async fn connect(&mut self) -> Result<(), SourceError> {
        while !matches!(self.state, State::Connected(_) | State::Closed) {
            self.go_on().await?;
        }
        Ok(())
    }

    /// Makes one step towards a consumer. If it is cancelled, the next call goes on.
    async fn go_on(&mut self) -> Result<(), SourceError> {
        match &mut self.state {
            State::Waiting(until) => {
                sleep_until(*until).await;
                let connecting = connect(self.broker.clone(), self.queue.clone(), self.prefetch);
                self.state = State::Connecting(AbortOnDropHandle::new(tokio::spawn(connecting)));
                Ok(())
            }
            State::Connecting(task) => {
                let linked = task.await.unwrap_or_else(|error| {
                    Err(SourceError::transient("connecting to the broker was cancelled").with_source(error))
                });
                match linked {
                    Ok(link) => {
                        self.state = State::Connected(Box::new(link));
                        Ok(())
                    }
                    Err(error) => {
                        self.wait();
                        Err(error)
                    }
                }
            }
            State::Connected(_) | State::Closed => Ok(()),
        }
    }

    /// Begins a growing pause after the end of a consumer; the first one is short.
    fn wait(&mut self) {
        let pause = MIN_PAUSE.saturating_mul(1 << self.failures.min(10)).min(MAX_PAUSE);
        self.failures = self.failures.saturating_add(1);
        self.state = State::Waiting(Instant::now() + jittered(pause));
    }

    fn delivery(&self, delivery: lapin::message::Delivery, gone: CancellationToken) -> AmqpDelivery {
        let lapin::message::Delivery { exchange, routing_key, redelivered, properties, data, acker, .. } =
            delivery;
        let topic = match self.topic {
            Topic::Queue => self.queue.clone(),
            Topic::RoutingKey => routing_key.to_string(),
        };
        let mut message = Message::new(topic, data)
            .with_deliveries(fields::deliveries(&properties, redelivered), redelivered);
        message.headers = fields::headers(&properties, exchange.as_str(), routing_key.as_str());
        message.order_key = match &self.order {
            Order::None => None,
            Order::RoutingKey => Some(Bytes::from(routing_key.to_string())),
            // A table has unique names. Names that differ only in case are the same here, and the first one counts.
            Order::Header(name) => message
                .headers
                .iter()
                .find(|(n, _)| n.eq_ignore_ascii_case(name))
                .map(|(_, value)| value.clone()),
        };
        let max_hold = self.consumer_timeout.map(|time| time / 4);
        AmqpDelivery { message: Arc::new(message), acker, gone, max_hold, is_settled: AtomicBool::new(false) }
    }
}

async fn connect(broker: AmqpBroker, queue: String, prefetch: u16) -> Result<Link, SourceError> {
    let failed = |what: &str, error| SourceError::transient(format!("{what} ({queue})")).with_source(error);
    let connecting = async {
        let connection = broker
            .connect()
            .await
            .map_err(|error| failed("cannot connect to the broker of the queue", error))?;
        let opened = async {
            let channel = connection.create_channel().await?;
            channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
            let name = ShortString::try_new(&*queue).unwrap_or_default();
            let consumer = channel
                .basic_consume(
                    name,
                    ShortString::default(),
                    BasicConsumeOptions::default(),
                    FieldTable::default(),
                )
                .await?;
            Ok((channel, consumer))
        };
        match opened.await {
            Ok((channel, consumer)) => {
                Ok(Link { connection: Some(connection), channel, consumer, gone: CancellationToken::new() })
            }
            Err(error) => {
                goodbye(connection).await;
                Err(failed("cannot consume the queue", error))
            }
        }
    };
    let linked = timeout(CONNECT_TIMEOUT, connecting).await;
    linked.unwrap_or_else(|_| {
        Err(SourceError::transient(format!("the broker of the queue does not answer ({queue})")))
    })
}

impl Source for AmqpSource {
    type Delivery = AmqpDelivery;

    /// Header names are short strings of AMQP.
    fn info(&self) -> SourceInfo {
        let info = SourceInfo::new(self.consumer_timeout).without_broker_ids();
        info.with_header_names(|name| name.len() <= 255)
    }

    async fn next(&mut self) -> Result<AmqpDelivery, SourceError> {
        loop {
            let link = match &mut self.state {
                State::Connected(link) => link,
                State::Closed => return std::future::pending().await,
                State::Waiting(_) | State::Connecting(_) => {
                    self.go_on().await?;
                    continue;
                }
            };
            match link.consumer.next().await {
                // The delivery was buffered when its channel ended.
                Some(Ok(delivery)) if delivery.poisoned() => {}
                Some(Ok(delivery)) => {
                    self.failures = 0;
                    let gone = link.gone.clone();
                    return Ok(self.delivery(delivery, gone));
                }
                ended => {
                    self.wait();
                    let error =
                        SourceError::transient(format!("the broker ended the consumer of {}", self.queue));
                    return Err(match ended {
                        Some(Err(why)) => error.with_source(why),
                        _ => error,
                    });
                }
            }
        }
    }

    async fn close(&mut self) -> Result<(), SourceError> {
        let State::Connected(mut link) = std::mem::replace(&mut self.state, State::Closed) else {
            return Ok(());
        };
        // Messages that wait to be given back come again with the end of the channel.
        link.gone.cancel();
        let ended = async {
            link.channel.basic_cancel(link.consumer.tag(), BasicCancelOptions::default()).await?;
            // The reply to this call comes after everything that was sent before.
            link.channel.close(200, "OK".into()).await
        };
        let ended = timeout(CONNECT_TIMEOUT, ended).await;
        if let Some(connection) = link.connection.take() {
            goodbye(connection).await;
        }
        match ended {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => {
                Err(SourceError::transient("the consumer was not closed cleanly").with_source(error))
            }
            Err(_) => Err(SourceError::transient("the broker did not answer when the consumer ended")),
        }
    }
}

impl fmt::Debug for AmqpSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AmqpSource")
            .field("queue", &self.queue)
            .field("prefetch", &self.prefetch)
            .field("consumer_timeout", &self.consumer_timeout)
            .field("topic", &self.topic)
            .field("order", &self.order)
            .finish_non_exhaustive()
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.gone.cancel();
        if let Some(connection) = self.connection.take()
            && let Ok(runtime) = Handle::try_current()
        {
            // As long as the connection is open, the broker keeps messages delivered to it reserved.
            drop(runtime.spawn(goodbye(connection)));
        }
    }
}

/// A message of a queue. If it is dropped without a settlement, it is given back at once.
pub struct AmqpDelivery {
    message: Arc<Message>,
    acker: Acker,
    /// Cancelled when the channel has ended.
    gone: CancellationToken,
    /// The longest time to hold it before it is given back.
    max_hold: Option<Duration>,
    /// `true` after it was settled.
    is_settled: AtomicBool,
}

const REQUEUE: BasicNackOptions = BasicNackOptions { multiple: false, requeue: true };

impl Delivery for AmqpDelivery {
    const GIVES_BACK: bool = true;

    fn message(&self) -> &Arc<Message> {
        &self.message
    }

    fn is_lost(&self) -> bool {
        self.gone.is_cancelled() || self.acker.poisoned()
    }

    /// AMQP has no extension: the timeout runs from the delivery to the acknowledgement.
    async fn extend(&self) -> Result<(), SourceError> {
        Ok(())
    }

    async fn ack(&self) -> Result<(), SourceError> {
        self.is_settled.store(true, Ordering::Relaxed);
        said(self.acker.ack(BasicAckOptions::default()).await)
    }

    /// Gives the message back after the delay.
    ///
    /// A queue has no delay, and would deliver the message again at once. So it is held here for the delay, at most a
    /// quarter of the consumer timeout, and counts as delivered meanwhile. A message with an order key that is given
    /// back without a delay, as at a shutdown, is held until the source is closed, or for a minute: a quorum queue
    /// delivers returned messages in the order of their returns, but messages of a closed channel in their old order.
    async fn give_back(&self, after: Duration) -> Result<(), SourceError> {
        self.is_settled.store(true, Ordering::Relaxed);
        let after = if after.is_zero() && self.message.order_key.is_some() { STOPPING } else { after };
        let after = self.max_hold.map_or(after, |most| after.min(most));
        if after.is_zero() {
            return said(self.acker.nack(REQUEUE).await);
        }
        if self.is_lost() {
            return said(Ok(false));
        }
        let (acker, gone) = (self.acker.clone(), self.gone.clone());
        tokio::spawn(async move {
            tokio::select! {
                // The end of the channel gives it back.
                () = gone.cancelled() => {}
                () = sleep(after) => tell(&acker).await,
            }
        });
        Ok(())
    }
}

/// Converts the result of a settlement. On another channel than that of the delivery, it would settle another message.
fn said(told: lapin::Result<bool>) -> Result<(), SourceError> {
    match told {
        Ok(true) => Ok(()),
        Ok(false) => {
            Err(SourceError::transient("the channel that delivered the message is gone; it comes again"))
        }
        Err(error) => Err(SourceError::transient("the broker did not get a settlement").with_source(error)),
    }
}

/// Gives a message back. If this fails, the channel has ended, which gives it back, too.
async fn tell(acker: &Acker) {
    if let Err(error) = acker.nack(REQUEUE).await {
        tracing::debug!(error = %ErrorChain(&error), "a message was not given back");
    }
}

impl Drop for AmqpDelivery {
    fn drop(&mut self) {
        if !*self.is_settled.get_mut()
            && !self.is_lost()
            && let Ok(runtime) = Handle::try_current()
        {
            let acker = self.acker.clone();
            drop(runtime.spawn(async move { tell(&acker).await }));
        }
    }
}

impl fmt::Debug for AmqpDelivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AmqpDelivery").field("message", &self.message).finish_non_exhaustive()
    }
}
