//! Messages of brokers that deliver at least once, processed once.
//!
//! A broker that gets no acknowledgement delivers again, and a producer that gets no confirmation sends again. So a
//! consumer must know which messages it has processed, and that knowledge must be as durable as the effect. An
//! [`Inbox`] keeps it on any store. On PostgreSQL, the effect and its receipt can be one transaction.
//!
//! The steps for each message: **claim → process → settle**. A message is acknowledged only after its effect and its
//! receipt are durable. A duplicate of a processed message is acknowledged and skipped. A duplicate of a message that
//! is being processed is not acknowledged, and is delivered again later. A message that fails is tried again; attempts
//! are counted over redeliveries and processes. After the last attempt the message becomes one dead letter with the
//! reason.
//!
//! ```
//! use std::sync::Arc;
//! use oncegate_core::{MemoryStore, OnAbandoned};
//! use oncegate_engine::Engine;
//! use oncegate_inbox::{
//!     DeadLetter, DeadLetterSink, HandlerError, ProcessOutcome, Identity, Inbox, Message, PutFuture,
//! };
//!
//! struct Nowhere;
//! impl DeadLetterSink for Nowhere {
//!     fn put<'a>(&'a self, letter: &'a DeadLetter) -> PutFuture<'a> {
//!         Box::pin(async move { panic!("no letter is expected, but {}", letter.reason) })
//!     }
//! }
//!
//! # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
//! let engine = Engine::new(MemoryStore::default());
//! // A handler that was cut off may run again: the provider takes a key.
//! let inbox = Inbox::new(engine, "billing", Identity::header("event-id"), OnAbandoned::Reexecute, Nowhere)?;
//!
//! let message = Arc::new(Message::new("orders.paid", "order 7").with_header("event-id", "e-41"));
//! let charge = async |attempt: oncegate_engine::Attempt, _: Arc<Message>| {
//!     let _key = attempt.downstream_key("charge"); // … charge the card under this key …
//!     Ok::<_, HandlerError>(())
//! };
//! assert!(matches!(inbox.process(&message, charge).await, ProcessOutcome::Processed { .. }));
//! assert!(matches!(inbox.process(&message, charge).await, ProcessOutcome::Duplicate));
//! # Ok::<_, Box<dyn std::error::Error>>(()) }).unwrap();
//! ```
//!
//! [`Consumer`] is the loop around the inbox. It takes deliveries from a [`Source`], keeps messages with one order key
//! in order, bounds what it holds, asks the broker for more time when processing is slow, acknowledges what is done,
//! and shuts down gracefully. Each broker has an adapter in a crate of its own. An application can write one, too:
//! [`Source`] and [`Delivery`] have seven functions together.
//!
//! # The crates around this one
//! | crate | |
//! |---|---|
//! | `oncegate-inbox` | [`Inbox`], for effects anywhere, on any store; [`Consumer`], the loop |
//! | `oncegate-inbox-postgres` | `TransactionalInbox`: effect and receipt in one transaction; `Streams`, `DeadLetterTable` |
//! | `oncegate-inbox-postgres` | the outbox: `Outbox` and `Relay` |
//! | `oncegate-nats`, `oncegate-amqp` | a `Source` and a `Publisher` each, for NATS JetStream and RabbitMQ |
//! | `oncegate-kafka`, `oncegate-sqs` | the same for Kafka and Amazon SQS; experimental |
//! | `oncegate-webhook` | `WebhookReceiver`, for axum |
//!
//! The guide is `docs/reference/messages.md`. Each crate has a complete program in its `examples`.
//!
//! # Guarantees
//!
//! | place of the effect | happens once |
//! |---|---|
//! | the transaction of the receipt | the effect |
//! | an API that takes a key, called under the [downstream key] | the effect, as long as that API remembers the key |
//! | anywhere else, under [`Park`] | the effect, or a dead letter with an unknown outcome |
//! | anywhere else, under [`Reexecute`] | nothing: after a crash in the middle the effect is repeated |
//!
//! [downstream key]: oncegate_engine::Attempt::downstream_key
//! [`Park`]: oncegate_core::OnAbandoned::Park
//! [`Reexecute`]: oncegate_core::OnAbandoned::Reexecute
//!
//! Duplicates are recognized as long as the receipt is kept ([`Inbox::with_retention`]). A message that is delivered
//! after that is processed again. Dead letters are written at least once, under one identifier.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod consumer;
mod dead_letters;
mod event;
mod identity;
mod inbox;
mod jitter;
mod message;
mod outcome;
mod processor;
mod source;

pub use consumer::{Consumer, ConsumerError, Order};
pub use dead_letters::{DeadLetter, DeadLetterSink, DeadLetterTopic, MAX_ERROR_BYTES, PutFuture};
pub use event::{InboxCounts, InboxEvent, InboxEventKind, InboxObserver};
pub use identity::{ConsumerName, Identity, IdentityError, MessageId};
pub use inbox::{DEFAULT_MAX_ATTEMPTS, Inbox, InboxProcessor};
pub use jitter::jittered;
pub use message::{AmbiguousHeader, Message};
pub use outcome::{DeadReason, HandlerError, ProcessOutcome, Settlement};
pub use processor::Processor;
pub use source::{
    Delivery, MESSAGE_ID, Outgoing, PublishError, PublishFuture, Publisher, Source, SourceError, SourceInfo,
};
