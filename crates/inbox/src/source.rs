//! The interface of a broker adapter: a source of deliveries, and a destination of messages.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::message::Message;

/// A source of messages: a consumer of one broker.
pub trait Source: Send + 'static {
    /// The type of a delivered message.
    type Delivery: Delivery;

    /// Describes the redelivery time and the properties of the messages.
    fn info(&self) -> SourceInfo;

    /// Returns the next delivery.
    ///
    /// The future may be dropped and the function called again at any time, without losing a message. The source
    /// reconnects by itself. An error goes to the log, and the function is called again after a pause.
    fn next(&mut self) -> impl Future<Output = Result<Self::Delivery, SourceError>> + Send;

    /// Closes the source. The broker knows of all acknowledgements when this returns; all other messages are delivered
    /// again.
    fn close(&mut self) -> impl Future<Output = Result<(), SourceError>> + Send;
}

/// The redelivery time of a source, and the properties of its messages.
///
/// With it, a consumer whose settings do not fit is refused before it turns every message into a dead letter.
#[derive(Clone, Copy)]
pub struct SourceInfo {
    redelivery: Option<Duration>,
    has_broker_ids: bool,
    is_header_name: fn(&str) -> bool,
}

impl SourceInfo {
    /// Describes a source whose broker delivers a message again after this time without an acknowledgement.
    ///
    /// The time is a visibility timeout or an acknowledgement wait. `None` means that the broker delivers again only
    /// when the connection or the assignment ends. Messages have a [`broker_id`](Message::broker_id), and headers with
    /// any name.
    #[must_use]
    pub const fn new(redelivery: Option<Duration>) -> Self {
        Self { redelivery, has_broker_ids: true, is_header_name: |_| true }
    }

    /// States that messages have no [`broker_id`](Message::broker_id).
    #[must_use]
    pub const fn without_broker_ids(self) -> Self {
        Self { has_broker_ids: false, ..self }
    }

    /// Sets the header names that messages can have.
    #[must_use]
    pub const fn with_header_names(self, is_header_name: fn(&str) -> bool) -> Self {
        Self { is_header_name, ..self }
    }

    /// The time after which the broker delivers a message again.
    #[must_use]
    pub const fn redelivery(&self) -> Option<Duration> {
        self.redelivery
    }

    /// Returns `true` if messages have an identifier of the broker.
    #[must_use]
    pub const fn has_broker_ids(&self) -> bool {
        self.has_broker_ids
    }

    /// Returns `true` if a message can have a header with this name.
    #[must_use]
    pub fn is_header_name(&self, name: &str) -> bool {
        !name.is_empty() && (self.is_header_name)(name)
    }
}

impl fmt::Debug for SourceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SourceInfo")
            .field("redelivery", &self.redelivery)
            .field("has_broker_ids", &self.has_broker_ids)
            .finish_non_exhaustive()
    }
}

/// A delivered message, until it is acknowledged or given back.
///
/// If it is dropped without either, the broker delivers the message again when its redelivery time is over.
pub trait Delivery: Send + Sync + 'static {
    /// `true` if a message that is [given back](Self::give_back) is delivered again while the assignment lasts.
    ///
    /// If it is `false`, for example for a log that is read by offsets, the consumer keeps the message and tries it
    /// again itself.
    const GIVES_BACK: bool;

    /// The delivered message.
    fn message(&self) -> &Arc<Message>;

    /// Returns `true` if the broker certainly delivers the message to another consumer by now.
    ///
    /// The reason is that its partition was assigned to another consumer, or that its connection is gone. Such a
    /// message is not started, and neither acknowledged nor given back. Return `false` if the message has an order key
    /// and a later message with the same key may not be lost: the later one would overtake it. The message is then
    /// started, and found to be a duplicate or in flight if another consumer has it.
    fn is_lost(&self) -> bool {
        false
    }

    /// Asks the broker for another [redelivery time](SourceInfo::redelivery).
    fn extend(&self) -> impl Future<Output = Result<(), SourceError>> + Send;

    /// Acknowledges the message: the broker may forget it.
    ///
    /// Returns when the broker has confirmed this, or when a lost acknowledgement can lead only to another delivery.
    fn ack(&self) -> impl Future<Output = Result<(), SourceError>> + Send;

    /// Asks the broker to deliver the message again, after this time if the broker supports a delay.
    fn give_back(&self, after: Duration) -> impl Future<Output = Result<(), SourceError>> + Send;
}

/// An error of a broker, or of the connection to it.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct SourceError {
    is_fatal: bool,
    message: String,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl SourceError {
    /// Creates an error that may pass: the consumer tries again.
    pub fn transient(message: impl Into<String>) -> Self {
        Self { is_fatal: false, message: message.into(), source: None }
    }

    /// Creates an error that will not pass: the consumer stops and reports it.
    pub fn fatal(message: impl Into<String>) -> Self {
        Self { is_fatal: true, message: message.into(), source: None }
    }

    /// Adds the cause. It must not contain a password, because logs show it.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Returns `true` if the consumer has to stop.
    #[must_use]
    pub const fn is_fatal(&self) -> bool {
        self.is_fatal
    }
}

/// A message to be published.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outgoing {
    /// The identifier, the same each time the message is published: at most 255 bytes of printable ASCII.
    ///
    /// It is sent as the header [`MESSAGE_ID`], and also in the broker's own field for identifiers if there is one.
    pub id: String,
    /// The destination: a topic, a queue, a routing key or a subject.
    pub topic: String,
    /// The order key.
    pub order_key: Option<Bytes>,
    /// The headers.
    pub headers: Vec<(String, Bytes)>,
    /// The content.
    pub payload: Bytes,
}

/// The header with the identifier of a message that Oncegate published.
pub const MESSAGE_ID: &str = "oncegate-message-id";

impl Outgoing {
    /// Creates a message from its identifier, destination and content.
    #[must_use]
    pub fn new(id: impl Into<String>, topic: impl Into<String>, payload: impl Into<Bytes>) -> Self {
        Self {
            id: id.into(),
            topic: topic.into(),
            order_key: None,
            headers: Vec::new(),
            payload: payload.into(),
        }
    }
}

impl fmt::Debug for Outgoing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outgoing")
            .field("topic", &self.topic)
            .field("headers", &self.headers.len())
            .field("bytes", &self.payload.len())
            .finish_non_exhaustive()
    }
}

/// A destination of messages: a producer of one broker.
pub trait Publisher: Send + Sync + 'static {
    /// Publishes a message.
    ///
    /// Returns when the broker has confirmed it; the confirmation is as durable as the destination. After an error the
    /// message may have been published anyway. It is then published again under the same identifier.
    fn publish<'a>(&'a self, message: &'a Outgoing) -> PublishFuture<'a>;
}

/// The future of [`Publisher::publish`].
pub type PublishFuture<'a> = Pin<Box<dyn Future<Output = Result<(), PublishError>> + Send + 'a>>;

/// The reason why a message was not published, as far as it is known.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// The broker will never accept the message: it is too large, its destination does not exist, or it is not allowed.
    #[error("the broker refuses the message")]
    Refused(#[source] Box<dyn Error + Send + Sync>),
    /// The broker did not confirm the message. It may have it.
    #[error("the broker did not confirm the message")]
    Unconfirmed(#[source] Box<dyn Error + Send + Sync>),
}

impl PublishError {
    /// Creates an error for a message that the broker will never accept.
    pub fn refused(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Refused(error.into())
    }

    /// Creates an error for a message that the broker did not confirm.
    pub fn unconfirmed(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Unconfirmed(error.into())
    }
}
