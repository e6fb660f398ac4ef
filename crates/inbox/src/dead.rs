//! Messages that are given up.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use oncegate_core::{IdempotencyKey, RecordId, Scope};

use crate::handled::DeadReason;
use crate::identity::ConsumerName;
use crate::message::Message;
use crate::source::{Outgoing, PublishError, Publisher};

/// A message that is given up, and why.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeadLetter {
    /// What it is told by: the same however often it is written. It differs from consumer to consumer.
    pub id: String,
    /// Who gives it up.
    pub consumer: ConsumerName,
    /// The message, as it was delivered.
    pub message: Arc<Message>,
    /// Why.
    pub reason: DeadReason,
    /// How many attempts there were.
    pub attempts: u32,
    /// What the last attempt failed of, in at most [`ERROR_MAX`] octets. Handlers write it; it should name no secret.
    pub error: String,
}

/// Most octets of what a dead letter says of its error.
pub const ERROR_MAX: usize = 1000;

impl DeadLetter {
    /// A dead letter with the record `id`, from which its identifier is derived.
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

    /// The record of a dead letter that has a record of its own, apart from the record of its message.
    ///
    /// `id` is the record of the message. `discriminator` separates several dead letters of one message from each other.
    #[must_use]
    pub fn separate_id(consumer: &ConsumerName, id: RecordId, discriminator: &[u8]) -> RecordId {
        let operation: [&[u8]; 3] = [b"dead letter", consumer.as_str().as_bytes(), discriminator];
        match IdempotencyKey::new(*id.as_bytes()) {
            Ok(key) => RecordId::derive(&Scope::single_tenant().within(&operation), &key),
            Err(_) => unreachable!("a record identifier has 32 bytes"),
        }
    }

    /// The letter as a message to that topic: the payload and the headers that the message has, and what happened to it in
    /// headers `oncegate-dead-reason`, `-consumer`, `-topic`, `-attempts` and `-error`.
    #[must_use]
    pub fn to_outgoing(&self, topic: &str) -> Outgoing {
        let mut letter = Outgoing::new(self.id.clone(), topic, self.message.payload.clone());
        letter.order_key.clone_from(&self.message.order_key);
        letter.headers.clone_from(&self.message.headers);
        // Of a letter that was a dead letter before, the last word counts.
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

/// Where dead letters go.
pub trait DeadLetters: Send + Sync + 'static {
    /// Writes a letter down. Returns when it is durable. It may be called again with the same letter: after a crash, or where
    /// it was not known whether it was written; [`DeadLetter::id`] tells then.
    fn put<'a>(&'a self, letter: &'a DeadLetter) -> PutFuture<'a>;
}

/// What [`DeadLetters::put`] returns.
pub type PutFuture<'a> = Pin<Box<dyn Future<Output = Result<(), PublishError>> + Send + 'a>>;

/// Dead letters are published as messages of a topic.
#[derive(Clone, Debug)]
pub struct DeadLetterTopic<P> {
    publisher: P,
    topic: String,
}

impl<P: Publisher> DeadLetterTopic<P> {
    /// Published here, to that topic.
    pub fn new(publisher: P, topic: impl Into<String>) -> Self {
        Self { publisher, topic: topic.into() }
    }
}

impl<P: Publisher> DeadLetters for DeadLetterTopic<P> {
    fn put<'a>(&'a self, letter: &'a DeadLetter) -> PutFuture<'a> {
        Box::pin(async move { self.publisher.publish(&letter.to_outgoing(&self.topic)).await })
    }
}
