//! The publisher: a producer of one exchange.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions};
use lapin::types::{FieldTable, ShortString};
use lapin::{Channel, Confirmation, Connection, ErrorKind, ExchangeKind};
use oncegate_core::ErrorChain;
use oncegate_engine::ConfigError;
use oncegate_inbox::{Outgoing, PublishError, PublishFuture, Publisher};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use super::broker::{AmqpBroker, CONNECT_TIMEOUT, goodbye};
use super::fields;

/// The default number of messages that wait for their confirmation.
const DEFAULT_CHANNELS: u16 = 32;

/// Its maximum. RabbitMQ allows 2047 channels per connection.
const MAX_CHANNELS: u16 = 1000;

/// The default timeout of a confirmation.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(30);

/// The default limit of RabbitMQ from 4.0 on; earlier versions allow 128 MiB.
const DEFAULT_MAX_PAYLOAD_BYTES: usize = 16 * 1024 * 1024;

/// The maximum frame size if the connection has no limit.
const MAX_FRAME: usize = 131_072;

/// The pause after a failed attempt to connect.
const PAUSE: Duration = Duration::from_millis(500);

/// The AMQP reply code for something that does not exist.
const NOT_FOUND: u16 = 404;

/// Publishes to an exchange of RabbitMQ, with confirms. Clones share one connection.
///
/// The topic of a message is its routing key. With the default exchange that is the name of a queue. Messages are
/// persistent and mandatory: a message that no queue accepts is refused. The identifier is the property `message-id`
/// and the header [`MESSAGE_ID`](oncegate_inbox::MESSAGE_ID). The order key is the header
/// [`ORDER_KEY`](super::ORDER_KEY).
///
/// Each message that waits for its confirmation has a channel of its own. So concurrent messages have no order. To keep
/// two messages in order, publish the second one after the first one is confirmed.
#[derive(Clone)]
pub struct AmqpPublisher {
    shared: Arc<PublisherInner>,
}

struct PublisherInner {
    broker: AmqpBroker,
    exchange: String,
    settings: Settings,
    /// Permits for channels.
    slots: Semaphore,
    /// Unused channels.
    idle: Mutex<Vec<Channel>>,
    link: tokio::sync::Mutex<Link>,
}

#[derive(Clone, Copy, Debug)]
struct Settings {
    channels: u16,
    confirm_timeout: Duration,
    max_payload_bytes: usize,
}

#[derive(Default)]
struct Link {
    connection: Option<Connection>,
    /// The time and the error of the last failed attempt.
    failed: Option<(Instant, String)>,
}

impl AmqpPublisher {
    /// Creates a publisher to the default exchange, which routes each message to the queue named by its routing key.
    #[must_use]
    pub fn new(broker: AmqpBroker) -> Self {
        let settings = Settings {
            channels: DEFAULT_CHANNELS,
            confirm_timeout: CONFIRM_TIMEOUT,
            max_payload_bytes: DEFAULT_MAX_PAYLOAD_BYTES,
        };
        Self::made(broker, String::new(), settings)
    }

    fn made(broker: AmqpBroker, exchange: String, settings: Settings) -> Self {
        let slots = Semaphore::new(usize::from(settings.channels));
        let shared = PublisherInner {
            broker,
            exchange,
            settings,
            slots,
            idle: Mutex::new(Vec::new()),
            link: tokio::sync::Mutex::new(Link::default()),
        };
        Self { shared: Arc::new(shared) }
    }

    fn again(&self, settings: Settings) -> Self {
        Self::made(self.shared.broker.clone(), self.shared.exchange.clone(), settings)
    }

    /// Sets the exchange, which must exist.
    ///
    /// # Errors
    /// [`ConfigError`] if the name has more than 255 bytes.
    pub fn with_exchange(self, exchange: impl Into<String>) -> Result<Self, ConfigError> {
        let exchange = exchange.into();
        if ShortString::try_new(&*exchange).is_err() {
            return Err(ConfigError::new("the name of an exchange must have at most 255 bytes"));
        }
        Ok(Self::made(self.shared.broker.clone(), exchange, self.shared.settings))
    }

    /// Sets how many messages may wait for their confirmation. Default: 32. Each needs a channel.
    ///
    /// # Errors
    /// [`ConfigError`] outside 1 to 1000.
    pub fn with_max_channels(self, channels: u16) -> Result<Self, ConfigError> {
        if !(1..=MAX_CHANNELS).contains(&channels) {
            return Err(ConfigError::new(format!(
                "the maximum number of channels must be from 1 to {MAX_CHANNELS}"
            )));
        }
        Ok(self.again(Settings { channels, ..self.shared.settings }))
    }

    /// Sets the timeout of a confirmation. Default: 30 seconds. A broker without memory or disk space does not confirm.
    ///
    /// # Errors
    /// [`ConfigError`] outside 100 milliseconds to an hour.
    pub fn with_confirm_timeout(self, confirm_timeout: Duration) -> Result<Self, ConfigError> {
        if !(Duration::from_millis(100)..=Duration::from_secs(3600)).contains(&confirm_timeout) {
            return Err(ConfigError::new("the confirm timeout must be from 100 milliseconds to an hour"));
        }
        Ok(self.again(Settings { confirm_timeout, ..self.shared.settings }))
    }

    /// Sets the maximum payload: the `max_message_size` of the broker. Default: 16 MiB.
    ///
    /// A larger message is refused here. The broker would close the channel for it, without naming the message.
    #[must_use]
    pub fn with_max_payload_bytes(self, bytes: usize) -> Self {
        self.again(Settings { max_payload_bytes: bytes, ..self.shared.settings })
    }
}

impl Publisher for AmqpPublisher {
    fn publish<'a>(&'a self, message: &'a Outgoing) -> PublishFuture<'a> {
        let (shared, message) = (self.shared.clone(), message.clone());
        Box::pin(async move {
            // The task goes on if the caller is gone, so that a channel never has two waiting messages.
            let task = tokio::spawn(async move { shared.publish(message).await });
            task.await.unwrap_or_else(|error| Err(PublishError::unconfirmed(error)))
        })
    }
}

impl PublisherInner {
    async fn publish(&self, message: Outgoing) -> Result<(), PublishError> {
        if message.payload.len() > self.settings.max_payload_bytes {
            return Err(PublishError::refused(format!(
                "the message has more than {} bytes",
                self.settings.max_payload_bytes
            )));
        }
        let routing_key = ShortString::try_new(&*message.topic)
            .map_err(|_| PublishError::refused("the routing key has more than 255 bytes"))?;
        let (properties, bytes) = fields::properties(&message).map_err(PublishError::refused)?;
        let _slot = self.slots.acquire().await.map_err(PublishError::unconfirmed)?;
        let (channel, frame_max) = self.channel().await?;
        if bytes > frame_max {
            self.put_back(channel);
            return Err(PublishError::refused(format!("the headers have more than {frame_max} bytes")));
        }
        let options = BasicPublishOptions { mandatory: true, immediate: false };
        let exchange = ShortString::try_new(&*self.exchange).unwrap_or_default();
        let published = async {
            let sent = channel.basic_publish(exchange, routing_key, options, &message.payload, properties);
            sent.await?.await
        };
        match timeout(self.settings.confirm_timeout, published).await {
            // A late confirmation must not be taken for that of the next message.
            Err(_) => {
                drop(tokio::spawn(async move { channel.close(200, "OK".into()).await }));
                Err(PublishError::unconfirmed(format!("no word for {:?}", self.settings.confirm_timeout)))
            }
            Ok(Err(error)) => Err(PublishError::unconfirmed(error)),
            Ok(Ok(confirmation)) => {
                self.put_back(channel);
                interpret_confirmation(confirmation, &message)
            }
        }
    }

    /// Returns an unused channel, and the maximum size of headers.
    async fn channel(&self) -> Result<(Channel, usize), PublishError> {
        let opening = async {
            let mut link = self.link.lock().await;
            let connection = self.connected(&mut link).await?;
            let frame_max = match connection.configuration().frame_max() {
                0 => MAX_FRAME,
                bytes => usize::try_from(bytes).unwrap_or(MAX_FRAME),
            };
            if let Some(channel) = self.taken() {
                return Ok((channel, frame_max));
            }
            let channel = connection.create_channel().await.map_err(PublishError::unconfirmed)?;
            let confirming = channel.confirm_select(ConfirmSelectOptions::default());
            confirming.await.map_err(PublishError::unconfirmed)?;
            Ok((channel, frame_max))
        };
        let opened = timeout(CONNECT_TIMEOUT, opening).await;
        opened.unwrap_or_else(|_| Err(PublishError::unconfirmed("the broker does not answer")))
    }

    fn taken(&self) -> Option<Channel> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        // Drop channels that were closed by the broker or lost with their connection.
        std::iter::from_fn(|| idle.pop()).find(|channel| channel.status().connected())
    }

    fn put_back(&self, channel: Channel) {
        if channel.status().connected() {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(channel);
        }
    }

    async fn connected<'l>(&self, link: &'l mut Link) -> Result<&'l Connection, PublishError> {
        if link.connection.as_ref().is_some_and(|connection| !connection.status().connected()) {
            link.connection = None;
        }
        if link.connection.is_none() {
            if let Some((at, why)) = &link.failed
                && at.elapsed() < PAUSE
            {
                return Err(PublishError::unconfirmed(why.clone()));
            }
            match self.broker.connect().await {
                Ok(connection) => {
                    let connection = self.checked(connection).await?;
                    link.failed = None;
                    link.connection = Some(connection);
                }
                Err(error) => {
                    link.failed = Some((Instant::now(), ErrorChain(&error).to_string()));
                    return Err(PublishError::unconfirmed(error));
                }
            }
        }
        link.connection
            .as_ref()
            .ok_or_else(|| PublishError::unconfirmed("there is no connection to the broker"))
    }

    /// Checks that the exchange exists. Publishing to a missing one would close the channel with an unspecific error.
    async fn checked(&self, connection: Connection) -> Result<Connection, PublishError> {
        if self.exchange.is_empty() {
            return Ok(connection);
        }
        let asked = async {
            let channel = connection.create_channel().await?;
            let name = ShortString::try_new(&*self.exchange).unwrap_or_default();
            let options = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
            channel.exchange_declare(name, ExchangeKind::Direct, options, FieldTable::default()).await?;
            channel.close(200, "OK".into()).await
        };
        match asked.await {
            Ok(()) => Ok(connection),
            Err(error) => {
                goodbye(connection).await;
                let is_missing =
                    matches!(error.kind(), ErrorKind::ProtocolError(said) if said.get_id() == NOT_FOUND);
                Err(if is_missing { PublishError::refused(error) } else { PublishError::unconfirmed(error) })
            }
        }
    }
}

/// Interprets the confirmation of the only message that waits on its channel.
fn interpret_confirmation(confirmation: Confirmation, message: &Outgoing) -> Result<(), PublishError> {
    match confirmation {
        Confirmation::Ack(None) => Ok(()),
        Confirmation::Ack(Some(back)) | Confirmation::Nack(Some(back)) => {
            Err(PublishError::refused(format!(
                "no queue takes messages with the routing key {}: {} {}",
                message.topic, back.reply_code, back.reply_text
            )))
        }
        Confirmation::Nack(None) => Err(PublishError::unconfirmed("the broker rejected the message")),
        Confirmation::NotRequested => Err(PublishError::unconfirmed("the channel is not in confirm mode")),
    }
}

impl fmt::Debug for AmqpPublisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AmqpPublisher")
            .field("exchange", &self.shared.exchange)
            .field("settings", &self.shared.settings)
            .finish_non_exhaustive()
    }
}
