//! Dead letters: messages that were given up.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use oncegate_core::{IdempotencyKey, RecordId, Scope};

use crate::identity::ConsumerName;
use crate::message::Message;
use crate::outcome::DeadReason;
use crate::source::{Outgoing, PublishError, Publisher};

/// A message that was given up, and the reason.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeadLetter {
    /// The identifier of the dead letter: the same each time it is written, and different for each consumer.
    pub id: String,
    /// The consumer that gave the message up.
    pub consumer: ConsumerName,
    /// The message as it was delivered.
    pub message: Arc<Message>,
    /// The reason.
    pub reason: DeadReason,
    /// The number of attempts.
    pub attempts: u32,
    /// The error of the last attempt, at most [`MAX_ERROR_BYTES`] bytes. Handlers write it, so they must keep secrets
    /// out of it.
    pub error: String,
}

/// The maximum length of the error text of a dead letter.
pub const MAX_ERROR_BYTES: usize = 1000;

impl DeadLetter {
    /// Creates a dead letter; its identifier is derived from the record `id`.
    #[must_use]
    pub fn new(
        id: RecordId,
        consumer: ConsumerName,
        message: Arc<Message>,
        reason: DeadReason,
        attempts: u32,
        error: String,
    ) -> Self {
        Self { id: id.downstream_key("dead-letter"), consumer, message, reason, attempts, error }
    }

    /// Returns the record of a dead letter that is recorded apart from its message.
    ///
    /// `id` is the record of the message. `discriminator` separates several dead letters of one message from each
    /// other.
    #[must_use]
    pub fn separate_id(consumer: &ConsumerName, id: RecordId, discriminator: &[u8]) -> RecordId {
        let operation: [&[u8]; 3] = [b"dead letter", consumer.as_str().as_bytes(), discriminator];
        match IdempotencyKey::new(*id.as_bytes()) {
            Ok(key) => RecordId::derive(&Scope::single_tenant().with_operation_parts(&operation), &key),
            Err(_) => unreachable!("a record identifier has 32 bytes"),
        }
    }

    /// Converts the dead letter to a message for a topic.
    ///
    /// It has the payload and the headers of the original message. The headers `oncegate-dead-reason`, `-consumer`,
    /// `-topic`, `-attempts` and `-error` are added.
    #[must_use]
    pub fn to_outgoing(&self, topic: &str) -> Outgoing {
        let mut letter = Outgoing::new(self.id.clone(), topic, self.message.payload.clone());
        letter.order_key.clone_from(&self.message.order_key);
        letter.headers.clone_from(&self.message.headers);
        // A message that was a dead letter before has these headers already. Only the newest ones count.
        letter.headers.retain(|(name, _)| !name.to_ascii_lowercase().starts_with("oncegate-dead-"));
        let error: String = self.error.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let said = [
            ("reason", self.reason.as_str().to_owned()),
            ("consumer", self.consumer.to_string()),
            ("topic", self.message.topic.clone()),
            ("attempts", self.attempts.to_string()),
            ("error", error),
        ];
        for (name, value) in said {
            letter.headers.push((format!("oncegate-dead-{name}"), Bytes::from(value)));
        }
        letter
    }
}

/// A destination of dead letters.
pub trait DeadLetterSink: Send + Sync + 'static {
    /// Writes a dead letter, and returns when it is durable.
    ///
    /// It may be called again with the same dead letter: after a crash, or if the first result was unknown.
    /// [`DeadLetter::id`] is the same then.
    fn put<'a>(&'a self, letter: &'a DeadLetter) -> PutFuture<'a>;
}

/// The future of [`DeadLetterSink::put`].
pub type PutFuture<'a> = Pin<Box<dyn Future<Output = Result<(), PublishError>> + Send + 'a>>;

/// A sink that publishes dead letters as messages of a topic.
#[derive(Clone, Debug)]
pub struct DeadLetterTopic<P> {
    publisher: P,
    topic: String,
}

impl<P: Publisher> DeadLetterTopic<P> {
    /// Creates a sink from a publisher and the topic for dead letters.
    pub fn new(publisher: P, topic: impl Into<String>) -> Self {
        Self { publisher, topic: topic.into() }
    }
}

impl<P: Publisher> DeadLetterSink for DeadLetterTopic<P> {
    fn put<'a>(&'a self, letter: &'a DeadLetter) -> PutFuture<'a> {
        Box::pin(async move { self.publisher.publish(&letter.to_outgoing(&self.topic)).await })
    }
}
