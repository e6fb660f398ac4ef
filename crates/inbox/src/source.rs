//! What an adapter is: a source of deliveries, and a destination of messages.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::message::Message;

/// Where messages come from: a consumer of one broker.
pub trait Source: Send + 'static {
    /// One message that was delivered.
    type Delivery: Delivery;

    /// When its messages come again, and what they can carry.
    fn info(&self) -> SourceInfo;

    /// The next delivery. It is dropped and called again at any time, and must lose nothing then. It reconnects by itself;
    /// what it returns as an error is told to the log, and it is called again after a pause.
    fn next(&mut self) -> impl Future<Output = Result<Self::Delivery, SourceError>> + Send;

    /// Nothing more is asked for. What was acknowledged is told to the broker before this returns; what was not comes again.
    fn close(&mut self) -> impl Future<Output = Result<(), SourceError>> + Send;
}

/// When the messages of a source come again, and what they can carry: so a consumer whose settings do not fit is refused
/// before it turns every message into a dead letter.
#[derive(Clone, Copy)]
pub struct SourceInfo {
    redelivery: Option<Duration>,
    has_broker_ids: bool,
    is_header_name: fn(&str) -> bool,
}

impl SourceInfo {
    /// A source whose broker delivers a message again after this time if it hears nothing of it: a visibility time-out, a wait
    /// for acknowledgement. `None` if it does so only when the connection or the assignment ends. Its messages have a
    /// [`broker_id`](Message::broker_id), and headers of any name.
    #[must_use]
    pub const fn new(redelivery: Option<Duration>) -> Self {
        Self { redelivery, has_broker_ids: true, is_header_name: |_| true }
    }

    /// Its messages have no [`broker_id`](Message::broker_id).
    #[must_use]
    pub const fn without_broker_ids(self) -> Self {
        Self { has_broker_ids: false, ..self }
    }

    /// The names that headers of its messages can have.
    #[must_use]
    pub const fn with_header_names(self, is_header_name: fn(&str) -> bool) -> Self {
        Self { is_header_name, ..self }
    }

    /// After which time the broker delivers a message again.
    #[must_use]
    pub const fn redelivery(&self) -> Option<Duration> {
        self.redelivery
    }

    /// Whether its messages have an identifier of the broker's.
    #[must_use]
    pub const fn has_broker_ids(&self) -> bool {
        self.has_broker_ids
    }

    /// Whether a message of it can have a header of this name.
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

/// One message that was delivered, until it is acknowledged or given back. Dropped without either it comes again when the
/// broker's time is over.
pub trait Delivery: Send + Sync + 'static {
    /// Whether [`give_back`](Self::give_back) makes it come again while the assignment lasts. Where it does not, as with a
    /// log that is read by offsets, the consumer keeps the message and tries it again itself.
    const GIVES_BACK: bool;

    /// What was delivered.
    fn message(&self) -> &Arc<Message>;

    /// Whether it is certain that the broker delivers it to somebody else by now, because its partition was assigned to
    /// another consumer or its connection is gone. It is not begun then, and neither acknowledged nor given back. Where a
    /// message with an order key can be lost and a later one with the same key not be, it is not lost in this sense: it would be
    /// overtaken. It is begun then, and found to be a duplicate or in flight if somebody else has it.
    fn is_lost(&self) -> bool {
        false
    }

    /// Asks the broker for another [redelivery time](SourceInfo::redelivery).
    fn extend(&self) -> impl Future<Output = Result<(), SourceError>> + Send;

    /// The broker may forget it. Returns when the broker has said so, or has it in hand in a way that a lost
    /// acknowledgement is only another delivery.
    fn ack(&self) -> impl Future<Output = Result<(), SourceError>> + Send;

    /// It has to come again, after so long where the broker can wait.
    fn give_back(&self, after: Duration) -> impl Future<Output = Result<(), SourceError>> + Send;
}

/// What a broker, or the way to it, said.
#[derive(Debug)]
pub struct SourceError {
    is_fatal: bool,
    message: String,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl SourceError {
    /// Something that may pass: it is tried again.
    pub fn passing(message: impl Into<String>) -> Self {
        Self { is_fatal: false, message: message.into(), source: None }
    }

    /// Something that will not: the consumer stops, and says so.
    pub fn fatal(message: impl Into<String>) -> Self {
        Self { is_fatal: true, message: message.into(), source: None }
    }

    /// Adds its cause. It holds no password: logs show it.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Whether it makes no sense to go on.
    #[must_use]
    pub const fn is_fatal(&self) -> bool {
        self.is_fatal
    }
}

impl fmt::Display for SourceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for SourceError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

/// A message to be published.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outgoing {
    /// What it is told by, the same however often it is published: at most 255 octets, printable ASCII. Sent along as a
    /// header ([`MESSAGE_ID`]) and, where the broker has a field of its own for it, there, too.
    pub id: String,
    /// Where it goes: a topic, a queue or routing key, a subject.
    pub topic: String,
    /// What must stay in order.
    pub order_key: Option<Bytes>,
    /// Its headers.
    pub headers: Vec<(String, Bytes)>,
    /// What it says.
    pub payload: Bytes,
}

/// The header with the identifier of a message that was published here.
pub const MESSAGE_ID: &str = "oncegate-message-id";

impl Outgoing {
    /// A message with this identifier and content, to go there.
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
            .field("octets", &self.payload.len())
            .finish_non_exhaustive()
    }
}

/// Where messages go: a producer of one broker.
pub trait Publisher: Send + Sync + 'static {
    /// Publishes a message. Returns when the broker has confirmed that it has it, as durably as the destination is. After
    /// an error it may have been published all the same; it is published again under the same identifier.
    fn publish<'a>(&'a self, message: &'a Outgoing) -> PublishFuture<'a>;
}

/// What [`Publisher::publish`] returns.
pub type PublishFuture<'a> = Pin<Box<dyn Future<Output = Result<(), PublishError>> + Send + 'a>>;

/// Why a message was not published, as far as is known.
#[derive(Debug)]
#[non_exhaustive]
pub enum PublishError {
    /// It will never be taken: too large, a destination that does not exist and is not made, not allowed.
    Refused(Box<dyn Error + Send + Sync>),
    /// The broker did not confirm it. It may have it.
    Unconfirmed(Box<dyn Error + Send + Sync>),
}

impl PublishError {
    /// It will never be taken.
    pub fn refused(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Refused(error.into())
    }

    /// The broker did not confirm it.
    pub fn unconfirmed(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Unconfirmed(error.into())
    }
}

impl fmt::Display for PublishError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Refused(_) => "the broker refuses the message",
            Self::Unconfirmed(_) => "the broker did not confirm the message",
        })
    }
}

impl Error for PublishError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Refused(error) | Self::Unconfirmed(error) => Some(&**error),
        }
    }
}
