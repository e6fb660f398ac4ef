//! Messages of brokers that deliver at least once, processed once.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

#[cfg(feature = "amqp")]
mod amqp;
mod dead;
mod handled;
mod identity;
mod message;
mod processor;
mod source;

#[cfg(feature = "amqp")]
pub use amqp::{AMQP_ORDER_KEY, AmqpBroker, AmqpDelivery, AmqpPublisher, AmqpSource};
pub use dead::{DeadLetter, DeadLetterTopic, DeadLetters, ERROR_MAX, PutFuture};
pub use handled::{DeadReason, Failure, Handled, Settlement};
pub use identity::{BadName, ConsumerName, Identity, MessageId, NoIdentity};
#[cfg(feature = "amqp")]
pub use lapin;
pub use message::{Ambiguous, Message};
pub use processor::Processor;
pub use source::{
    Delivery, MESSAGE_ID, Outgoing, PublishError, PublishFuture, Publisher, Source, SourceError,
};
