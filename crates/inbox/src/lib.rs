//! Messages of brokers that deliver at least once, processed once.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod consumer;
mod dead;
mod event;
mod handled;
mod identity;
mod inbox;
#[cfg(feature = "kafka")]
pub mod kafka;
mod message;
mod processor;
mod source;

pub use consumer::{Consumer, ConsumerError, Order};
pub use dead::{DeadLetter, DeadLetterTopic, DeadLetters, ERROR_MAX, PutFuture};
pub use event::{Counts, Event, EventKind, Observer};
pub use handled::{DeadReason, Failure, Handled, Settlement};
pub use identity::{BadName, ConsumerName, Identity, MessageId, NoIdentity};
pub use inbox::{Inbox, InboxProcessor};
pub use message::{Ambiguous, Message};
pub use processor::Processor;
pub use source::{
    Delivery, MESSAGE_ID, Outgoing, PublishError, PublishFuture, Publisher, Source, SourceError,
};
