//! The publisher: the idempotent producer, and nothing less.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use oncegate_core::ErrorChain;
use oncegate_engine::ConfigError;
use oncegate_inbox::{MESSAGE_ID, Outgoing, PublishError, PublishFuture, Publisher};
use rdkafka::ClientConfig;
use rdkafka::client::ClientContext;
use rdkafka::config::{FromClientConfigAndContext as _, RDKafkaLogLevel};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{DeliveryFuture, FutureProducer, FutureRecord, Producer as _};

use super::{RECORD_KEY, TOMBSTONE, UNREADABLE, settings};

/// How long a message waits for a place among those that are on their way, and how long between two looks.
const QUEUE_PATIENCE: Duration = Duration::from_secs(10);
const QUEUE_LOOK: Duration = Duration::from_millis(20);

/// How long the client is waited for beyond the time that it has for a message itself.
const SLACK: Duration = Duration::from_secs(10);

/// Publishes to topics, each message confirmed by all replicas that are in sync.
///
/// The producer is idempotent: what it sends again itself is not there twice. What is published again after an error, or by
/// another process, is there twice, under one identifier, which is the header [`MESSAGE_ID`]; consumers go by it.
#[derive(Debug)]
pub struct KafkaPublisher {
    config: ClientConfig,
    patience: Duration,
    producer: Mutex<Live>,
}

type Client = FutureProducer<Context>;

struct Live(Client);

impl std::fmt::Debug for Live {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Live")
    }
}

impl KafkaPublisher {
    /// A publisher with these settings of the client. `acks` is `all` and `enable.idempotence` is on, and cannot be changed.
    /// A message is given up after `message.timeout.ms`, 30 s if nobody says otherwise. It does not wait for the broker.
    ///
    /// Which partition a key goes to is the client's `partitioner`; that of Java's clients is `murmur2_random`.
    ///
    /// # Errors
    /// A setting that is unknown to the client, or would lose messages.
    pub fn new(config: &ClientConfig) -> Result<Self, ConfigError> {
        let config = settings::producer(config)?;
        let patience = settings::producer_patience(&config)? + SLACK;
        let producer = client(&config).map_err(settings::refused)?;
        Ok(Self { config, patience, producer: Mutex::new(Live(producer)) })
    }

    /// The client, a new one where the last one says that it cannot go on.
    fn producer(&self) -> Result<Client, KafkaError> {
        let mut producer = self.producer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((code, reason)) = producer.0.client().fatal_error() {
            tracing::warn!(%code, "the producer is replaced: {reason}");
            producer.0 = client(&self.config)?;
        }
        Ok(producer.0.clone())
    }

    /// Hands it to the client, and returns what it says when it knows.
    async fn hand_over(&self, message: &Outgoing) -> Result<DeliveryFuture, PublishError> {
        let producer = self.producer().map_err(PublishError::unconfirmed)?;
        let deadline = tokio::time::Instant::now() + QUEUE_PATIENCE;
        let mut headers = OwnedHeaders::new_with_capacity(message.headers.len() + 1);
        headers = headers.insert(Header { key: MESSAGE_ID, value: Some(message.id.as_bytes()) });
        let (mut key, mut is_tombstone) = (message.order_key.as_deref(), false);
        for (name, value) in &message.headers {
            match name.as_str() {
                RECORD_KEY => key = Some(value),
                TOMBSTONE => is_tombstone = message.payload.is_empty(),
                UNREADABLE => {}
                name if name.eq_ignore_ascii_case(MESSAGE_ID) => {}
                name if name.contains('\0') => {
                    return Err(PublishError::refused("the name of a header has a zero octet in it"));
                }
                name => headers = headers.insert(Header { key: name, value: Some(&**value) }),
            }
        }
        let mut record = FutureRecord::<[u8], [u8]>::to(&message.topic).headers(headers);
        record.key = key;
        record.payload = (!is_tombstone).then_some(&*message.payload);
        loop {
            match producer.send_result(record) {
                Ok(delivery) => return Ok(delivery),
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), again))
                    if tokio::time::Instant::now() < deadline =>
                {
                    record = again;
                }
                Err((error, _)) => return Err(told(error)),
            }
            tokio::time::sleep(QUEUE_LOOK).await;
        }
    }
}

impl Publisher for KafkaPublisher {
    fn publish<'a>(&'a self, message: &'a Outgoing) -> PublishFuture<'a> {
        Box::pin(async move {
            if message.topic.contains('\0') {
                return Err(PublishError::refused("the name of the topic has a zero octet in it"));
            }
            let delivery = self.hand_over(message).await?;
            match tokio::time::timeout(self.patience, delivery).await {
                Ok(Ok(Ok(_))) => Ok(()),
                Ok(Ok(Err((error, _)))) => Err(told(error)),
                Ok(Err(_)) => Err(PublishError::unconfirmed("the producer was replaced meanwhile")),
                Err(_) => Err(PublishError::unconfirmed("the client did not say in time what became of it")),
            }
        })
    }
}

fn client(config: &ClientConfig) -> Result<Client, KafkaError> {
    FutureProducer::from_config_and_context(config, Context)
}

/// What the client said, as everybody else knows it.
fn told(error: KafkaError) -> PublishError {
    use RDKafkaErrorCode as Code;
    match error.rdkafka_error_code() {
        Some(
            Code::MessageSizeTooLarge
            | Code::MessageBatchTooLarge
            | Code::InvalidTopic
            | Code::InvalidRecord
            | Code::PolicyViolation
            | Code::UnknownTopic
            | Code::UnknownPartition
            | Code::TopicAuthorizationFailed
            | Code::ClusterAuthorizationFailed,
        ) => PublishError::refused(error),
        _ => PublishError::unconfirmed(error),
    }
}

/// What the client has to say goes to the log.
struct Context;

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        super::reader::log(level, facility, message);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::warn!(error = %ErrorChain(&error), "{reason}");
    }

    fn stats_raw(&self, _: &[u8]) {}
}
