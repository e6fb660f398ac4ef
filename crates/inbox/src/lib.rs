//! Messages of brokers that deliver at least once, processed once.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod dead;
mod handled;
mod identity;
#[cfg(feature = "kafka")]
pub mod kafka;
mod message;
mod processor;
mod source;

pub use dead::{DeadLetter, DeadLetterTopic, DeadLetters, ERROR_MAX, PutFuture};
pub use handled::{DeadReason, Failure, Handled, Settlement};
pub use identity::{BadName, ConsumerName, Identity, MessageId, NoIdentity};
pub use message::{Ambiguous, Message};
pub use processor::Processor;
pub use source::{
    Delivery, MESSAGE_ID, Outgoing, PublishError, PublishFuture, Publisher, Source, SourceError,
};
