//! A producer of one exchange.

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

use super::broker::{AmqpBroker, CONNECT_PATIENCE, goodbye};
use super::fields;

/// How many messages wait for the broker's word at a time.
const CHANNELS: u16 = 32;

/// Most of them. RabbitMQ has 2047 channels for a connection.
const CHANNELS_MAX: u16 = 1000;

/// How long the broker has for its word.
const PATIENCE: Duration = Duration::from_secs(30);

/// What RabbitMQ takes from 4.0 on; earlier ones take 128 MiB.
const PAYLOAD_MAX: usize = 16 * 1024 * 1024;

/// Most that the protocol's own limit of a connection leaves, should there be none.
const FRAME_MAX: usize = 131_072;

/// How long after an attempt to connect that failed nobody tries again.
const PAUSE: Duration = Duration::from_millis(500);

/// What AMQP says where something is not there.
const NOT_FOUND: u16 = 404;

/// Publishes to an exchange of RabbitMQ, with confirms. Clones share one connection.
///
/// The topic of a message is its routing key; with the default exchange that is the name of a queue. It is persistent, and
/// mandatory: one that no queue takes is refused. It has its identifier as `message-id` and as the header
/// [`MESSAGE_ID`](oncegate_inbox::MESSAGE_ID), and its order key as the header [`ORDER_KEY`](super::ORDER_KEY).
///
/// Each message that waits for the broker's word has a channel of its own meanwhile. So messages that are published at the same
/// time are in no order; one that is to follow another is published when that one is confirmed.
#[derive(Clone)]
pub struct AmqpPublisher {
    shared: Arc<Shared>,
}

struct Shared {
    broker: AmqpBroker,
    exchange: String,
    settings: Settings,
    /// Who may take a channel.
    slots: Semaphore,
    /// Channels that nobody uses.
    idle: Mutex<Vec<Channel>>,
    link: tokio::sync::Mutex<Link>,
}

#[derive(Clone, Copy, Debug)]
struct Settings {
    channels: u16,
    patience: Duration,
    max_payload_bytes: usize,
}

#[derive(Default)]
struct Link {
    connection: Option<Connection>,
    /// When the last attempt failed, and why.
    failed: Option<(Instant, String)>,
}

impl AmqpPublisher {
    /// To the default exchange, which hands each message to the queue that is called as its routing key.
    #[must_use]
    pub fn new(broker: AmqpBroker) -> Self {
        let settings = Settings { channels: CHANNELS, patience: PATIENCE, max_payload_bytes: PAYLOAD_MAX };
        Self::made(broker, String::new(), settings)
    }

    fn made(broker: AmqpBroker, exchange: String, settings: Settings) -> Self {
        let slots = Semaphore::new(usize::from(settings.channels));
        let shared = Shared {
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

    /// To this exchange, which is there before.
    ///
    /// # Errors
    /// Where its name has more than 255 octets.
    pub fn with_exchange(self, exchange: impl Into<String>) -> Result<Self, ConfigError> {
        let exchange = exchange.into();
        if ShortString::try_new(&*exchange).is_err() {
            return Err(ConfigError::new("the name of an exchange has at most 255 octets"));
        }
        Ok(Self::made(self.shared.broker.clone(), exchange, self.shared.settings))
    }

    /// How many messages may wait for the broker's word at a time: 32 where nothing is said. Each has a channel.
    ///
    /// # Errors
    /// Outside of 1 to 1000.
    pub fn with_max_channels(self, channels: u16) -> Result<Self, ConfigError> {
        if !(1..=CHANNELS_MAX).contains(&channels) {
            return Err(ConfigError::new(format!("a publisher has 1 to {CHANNELS_MAX} channels")));
        }
        Ok(self.again(Settings { channels, ..self.shared.settings }))
    }

    /// How long the broker has for its word: 30 seconds where nothing is said. A broker that has no more memory or disk says
    /// nothing.
    ///
    /// # Errors
    /// For less than 100 milliseconds or more than an hour.
    pub fn with_confirm_timeout(self, patience: Duration) -> Result<Self, ConfigError> {
        if !(Duration::from_millis(100)..=Duration::from_secs(3600)).contains(&patience) {
            return Err(ConfigError::new("the patience of a publisher is 100 milliseconds to an hour"));
        }
        Ok(self.again(Settings { patience, ..self.shared.settings }))
    }

    /// How many octets a message may say: what the broker has as `max_message_size`, 16 MiB where nothing is said. The broker
    /// ends the channel for a larger one without telling which one it was, so a larger one is refused here.
    #[must_use]
    pub fn with_max_payload_bytes(self, octets: usize) -> Self {
        self.again(Settings { max_payload_bytes: octets, ..self.shared.settings })
    }
}

impl Publisher for AmqpPublisher {
    fn publish<'a>(&'a self, message: &'a Outgoing) -> PublishFuture<'a> {
        let (shared, message) = (self.shared.clone(), message.clone());
        Box::pin(async move {
            // What was begun is ended, so that a channel never has two messages that wait. Nobody may wait any more.
            let task = tokio::spawn(async move { shared.publish(message).await });
            task.await.unwrap_or_else(|error| Err(PublishError::unconfirmed(error)))
        })
    }
}

impl Shared {
    async fn publish(&self, message: Outgoing) -> Result<(), PublishError> {
        if message.payload.len() > self.settings.max_payload_bytes {
            return Err(PublishError::refused(format!(
                "the message has more than {} octets",
                self.settings.max_payload_bytes
            )));
        }
        let routing_key = ShortString::try_new(&*message.topic)
            .map_err(|_| PublishError::refused("the routing key has more than 255 octets"))?;
        let (properties, octets) = fields::properties(&message).map_err(PublishError::refused)?;
        let _slot = self.slots.acquire().await.map_err(PublishError::unconfirmed)?;
        let (channel, frame_max) = self.channel().await?;
        if octets > frame_max {
            self.put_back(channel);
            return Err(PublishError::refused(format!("the headers have more than {frame_max} octets")));
        }
        let options = BasicPublishOptions { mandatory: true, immediate: false };
        let exchange = ShortString::try_new(&*self.exchange).unwrap_or_default();
        let published = async {
            let sent = channel.basic_publish(exchange, routing_key, options, &message.payload, properties);
            sent.await?.await
        };
        match timeout(self.settings.patience, published).await {
            // A word that comes late must not be taken for the next message's.
            Err(_) => {
                drop(tokio::spawn(async move { channel.close(200, "OK".into()).await }));
                Err(PublishError::unconfirmed(format!("no word for {:?}", self.settings.patience)))
            }
            Ok(Err(error)) => Err(PublishError::unconfirmed(error)),
            Ok(Ok(confirmation)) => {
                self.put_back(channel);
                understood(confirmation, &message)
            }
        }
    }

    /// A channel that nobody uses, and how large a message's headers may be.
    async fn channel(&self) -> Result<(Channel, usize), PublishError> {
        let opening = async {
            let mut link = self.link.lock().await;
            let connection = self.connected(&mut link).await?;
            let frame_max = match connection.configuration().frame_max() {
                0 => FRAME_MAX,
                octets => usize::try_from(octets).unwrap_or(FRAME_MAX),
            };
            if let Some(channel) = self.taken() {
                return Ok((channel, frame_max));
            }
            let channel = connection.create_channel().await.map_err(PublishError::unconfirmed)?;
            let confirming = channel.confirm_select(ConfirmSelectOptions::default());
            confirming.await.map_err(PublishError::unconfirmed)?;
            Ok((channel, frame_max))
        };
        let opened = timeout(CONNECT_PATIENCE, opening).await;
        opened.unwrap_or_else(|_| Err(PublishError::unconfirmed("the broker does not answer")))
    }

    fn taken(&self) -> Option<Channel> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        // Those of a connection that was lost, or that the broker closed, are let go.
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
        link.connection.as_ref().ok_or_else(|| PublishError::unconfirmed("there is no connection"))
    }

    /// A message to an exchange that is not there would end its channel, and nobody could tell from it that nothing takes it.
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

/// What the broker said of the one message that waited on its channel.
fn understood(confirmation: Confirmation, message: &Outgoing) -> Result<(), PublishError> {
    match confirmation {
        Confirmation::Ack(None) => Ok(()),
        Confirmation::Ack(Some(back)) | Confirmation::Nack(Some(back)) => {
            Err(PublishError::refused(format!(
                "no queue takes messages with the routing key {}: {} {}",
                message.topic, back.reply_code, back.reply_text
            )))
        }
        Confirmation::Nack(None) => Err(PublishError::unconfirmed("the broker did not take the message")),
        Confirmation::NotRequested => Err(PublishError::unconfirmed("the channel has no confirms")),
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
