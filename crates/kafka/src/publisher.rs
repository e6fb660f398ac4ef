//! The publisher: an idempotent producer.

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

/// The time that a message waits for a place in the client's queue, and the interval of the checks.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(10);
const QUEUE_LOOK: Duration = Duration::from_millis(20);

/// The time that the client gets beyond its own timeout for a message.
const SLACK: Duration = Duration::from_secs(10);

/// Publishes to topics. Each message is confirmed by all replicas in sync.
///
/// The producer is idempotent: its own retries make no copies. A message that is published again after an error, or by
/// another process, is in the log twice, under one identifier in the header [`MESSAGE_ID`]. Consumers find the copy by
/// it.
#[derive(Debug)]
pub struct KafkaPublisher {
    config: ClientConfig,
    timeout: Duration,
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
    /// Creates a publisher with settings of the client. It does not wait for the broker.
    ///
    /// `acks` is `all` and `enable.idempotence` is on; both cannot be changed. `message.timeout.ms` is 30 s unless set.
    /// The client's `partitioner` chooses the partition of a key; that of Java's clients is `murmur2_random`.
    ///
    /// # Errors
    /// A setting that the client does not know, or that could lose messages.
    pub fn new(config: &ClientConfig) -> Result<Self, ConfigError> {
        let config = settings::producer(config)?;
        let timeout = settings::producer_timeout(&config)? + SLACK;
        let producer = client(&config).map_err(settings::refused)?;
        Ok(Self { config, timeout, producer: Mutex::new(Live(producer)) })
    }

    /// Returns the client, or a new one if the last one had a fatal error.
    fn producer(&self) -> Result<Client, KafkaError> {
        let mut producer = self.producer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((code, reason)) = producer.0.client().fatal_error() {
            tracing::warn!(%code, "the producer is replaced after a fatal error: {reason}");
            producer.0 = client(&self.config)?;
        }
        Ok(producer.0.clone())
    }

    /// Passes a message to the client, and returns the future of its confirmation.
    async fn hand_over(&self, message: &Outgoing) -> Result<DeliveryFuture, PublishError> {
        let producer = self.producer().map_err(PublishError::unconfirmed)?;
        let deadline = tokio::time::Instant::now() + QUEUE_TIMEOUT;
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
                    return Err(PublishError::refused("a header name contains a zero byte"));
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
                Err((error, _)) => return Err(publish_error(error)),
            }
            tokio::time::sleep(QUEUE_LOOK).await;
        }
    }
}

impl Publisher for KafkaPublisher {
    fn publish<'a>(&'a self, message: &'a Outgoing) -> PublishFuture<'a> {
        Box::pin(async move {
            if message.topic.contains('\0') {
                return Err(PublishError::refused("the topic name contains a zero byte"));
            }
            let delivery = self.hand_over(message).await?;
            match tokio::time::timeout(self.timeout, delivery).await {
                Ok(Ok(Ok(_))) => Ok(()),
                Ok(Ok(Err((error, _)))) => Err(publish_error(error)),
                Ok(Err(_)) => Err(PublishError::unconfirmed("the producer was replaced meanwhile")),
                Err(_) => Err(PublishError::unconfirmed("the client did not report the result in time")),
            }
        })
    }
}

fn client(config: &ClientConfig) -> Result<Client, KafkaError> {
    FutureProducer::from_config_and_context(config, Context)
}

/// Converts an error of the client.
fn publish_error(error: KafkaError) -> PublishError {
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

/// Passes the client's messages to the log.
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
