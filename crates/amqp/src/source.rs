//! A consumer of one queue.

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
use oncegate_inbox::{Delivery, Message, Source, SourceError, SourceInfo};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::broker::{AmqpBroker, CONNECT_PATIENCE, goodbye};
use super::fields;

/// How many messages the broker hands over before it hears of one.
const PREFETCH: u16 = 256;

/// What RabbitMQ waits for an acknowledgement.
const CONSUMER_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// The shortest time that makes sense: RabbitMQ looks once a minute.
const CONSUMER_TIMEOUT_MIN: Duration = Duration::from_secs(1);

/// Between two attempts to connect.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// How long a message in order is held that is given back at once: longer than a consumer takes to stop.
const STOPPING: Duration = Duration::from_secs(60);

/// A queue of RabbitMQ, read with acknowledgements.
///
/// It declares nothing: queues, exchanges and bindings are there before. It connects again whenever the connection, the
/// channel or the consumer ends; what was delivered and not acknowledged comes again then.
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
    /// Until then nothing is tried.
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
    /// What this queue holds.
    ///
    /// # Errors
    /// Where the queue's name is empty or has more than 255 octets.
    pub fn new(broker: AmqpBroker, queue: impl Into<String>) -> Result<Self, ConfigError> {
        let queue = queue.into();
        if queue.is_empty() || ShortString::try_new(&*queue).is_err() {
            return Err(ConfigError::new("the name of a queue has 1 to 255 octets"));
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

    /// How many messages the broker hands over before it hears of one: 256 where nothing is said. Those that wait to be given
    /// back count among them. At least as many as the consumer holds at a time, or it never gets that many.
    ///
    /// # Errors
    /// For 0, which would be no bound.
    pub fn with_prefetch(self, prefetch: u16) -> Result<Self, ConfigError> {
        if prefetch == 0 {
            return Err(ConfigError::new("a prefetch of 0 is no bound: it has to be 1 to 65535"));
        }
        Ok(Self { prefetch, ..self })
    }

    /// How long the broker waits for an acknowledgement: what it has as `consumer_timeout`, 30 minutes where nothing is said;
    /// `None` where that is turned off. The broker closes the channel then, and everything that it had delivered comes again.
    ///
    /// # Errors
    /// Below one second.
    pub fn with_consumer_timeout(self, consumer_timeout: Option<Duration>) -> Result<Self, ConfigError> {
        if consumer_timeout.is_some_and(|time| time < CONSUMER_TIMEOUT_MIN) {
            return Err(ConfigError::new("the consumer's time-out is at least one second"));
        }
        Ok(Self { consumer_timeout, ..self })
    }

    /// The topic of a message is its routing key, and not the queue. Where messages pass through other queues on their way, as
    /// with a queue for those that wait, their routing key may change.
    #[must_use]
    pub fn with_topic_from_routing_key(self) -> Self {
        Self { topic: Topic::RoutingKey, ..self }
    }

    /// Messages with the same value of this header are in order; those without it are in none.
    #[must_use]
    pub fn with_order_by_header(self, name: impl Into<String>) -> Self {
        Self { order: Order::Header(name.into()), ..self }
    }

    /// Messages with the same routing key are in order.
    #[must_use]
    pub fn with_order_by_routing_key(self) -> Self {
        Self { order: Order::RoutingKey, ..self }
    }

    /// Connects now, and says what is wrong: at the start of a program, where somebody looks. Otherwise the first message that
    /// is asked for connects, and what is wrong is told to the log, again and again.
    ///
    /// # Errors
    /// What the broker, or the way to it, says.
    pub async fn connect(&mut self) -> Result<(), SourceError> {
        while !matches!(self.state, State::Connected(_) | State::Closed) {
            self.go_on().await?;
        }
        Ok(())
    }

    /// One step towards a consumer. Dropped in the middle it goes on with the next call.
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
                    Err(SourceError::transient("connecting to the broker was cut off").with_source(error))
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

    /// The consumer is no more, or there was none: a pause that grows, the first one short.
    fn wait(&mut self) {
        let pause = PAUSE_MIN.saturating_mul(1 << self.failures.min(10)).min(PAUSE_MAX);
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
            // A table has a name once; names that differ in their case only are the same here, and the first one counts.
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

/// Somewhere in the second half of the pause, so that the consumers of a broker that was away don't come back together.
fn jittered(pause: Duration) -> Duration {
    let mut octet = [0; 1];
    // Without it they come back together.
    let _ = getrandom::fill(&mut octet);
    pause / 2 + pause.mul_f64(f64::from(u8::from_ne_bytes(octet)) / 512.0)
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
    let linked = timeout(CONNECT_PATIENCE, connecting).await;
    linked.unwrap_or_else(|_| {
        Err(SourceError::transient(format!("the broker of the queue does not answer ({queue})")))
    })
}

impl Source for AmqpSource {
    type Delivery = AmqpDelivery;

    /// Names of headers are short strings of AMQP.
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
                // It was here already when the channel ended.
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
        // What waits to be given back comes again with the end of the channel.
        link.gone.cancel();
        let ended = async {
            link.channel.basic_cancel(link.consumer.tag(), BasicCancelOptions::default()).await?;
            // The answer to this one comes after everything that was said before.
            link.channel.close(200, "OK".into()).await
        };
        let ended = timeout(CONNECT_PATIENCE, ended).await;
        if let Some(connection) = link.connection.take() {
            goodbye(connection).await;
        }
        match ended {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => {
                Err(SourceError::transient("the consumer did not end in order").with_source(error))
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
            // While it lasts the broker waits for what it has delivered here.
            drop(runtime.spawn(goodbye(connection)));
        }
    }
}

/// A message of a queue. Dropped without a word it is given back at once.
pub struct AmqpDelivery {
    message: Arc<Message>,
    acker: Acker,
    /// Told when the channel is of no more use.
    gone: CancellationToken,
    /// How long it may wait to be given back.
    max_hold: Option<Duration>,
    /// Whether something was said of it.
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

    /// AMQP has nothing to say it with: the time runs from the delivery to the acknowledgement.
    async fn extend(&self) -> Result<(), SourceError> {
        Ok(())
    }

    async fn ack(&self) -> Result<(), SourceError> {
        self.is_settled.store(true, Ordering::Relaxed);
        said(self.acker.ack(BasicAckOptions::default()).await)
    }

    /// A queue has no delay, and would deliver it again at once. So it is held here that long, at most a quarter of the
    /// consumer's time-out, and then given back; until then it counts as one of those handed over.
    ///
    /// One that has an order key and is given back at once, as by a consumer that stops, is held until the source is closed,
    /// or for a minute. A quorum queue delivers what was given back in the order in which it heard of it; what comes back with
    /// the end of a channel it delivers in its old order.
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

/// Whether the broker was told. On another channel than the one that delivered it, it would be told of another message.
fn said(told: lapin::Result<bool>) -> Result<(), SourceError> {
    match told {
        Ok(true) => Ok(()),
        Ok(false) => {
            Err(SourceError::transient("the channel that delivered the message is gone; it comes again"))
        }
        Err(error) => {
            Err(SourceError::transient("the broker could not be told of a message").with_source(error))
        }
    }
}

/// Gives back what nobody waits for any more. Where that fails the channel is gone, and it is given back so.
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
