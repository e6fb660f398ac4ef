//! Messages of brokers that deliver at least once, processed once.
//!
//! A broker that hears no acknowledgement delivers again, and a producer that hears no confirmation sends again. So a
//! consumer has to know what it has processed, and that has to be known as surely as the effect is. An [`Inbox`] knows it on
//! any store; on PostgreSQL effect and receipt can be one transaction.
//!
//! For each message: **claim → process → settle**. It is acknowledged only after its effect and its receipt are durable. A
//! duplicate of what was processed is acknowledged and skipped; a duplicate of what is being processed is not acknowledged, and
//! comes back later. What fails is tried again, counted over redeliveries and processes, and after the last attempt it is
//! one dead letter that says why.
//!
//! ```
//! use std::sync::Arc;
//! use oncegate_core::{Clock, MemoryStore, OnAbandoned, Timestamp};
//! use oncegate_engine::Engine;
//! use oncegate_inbox::{
//!     ConsumerName, DeadLetter, DeadLetters, Failure, Handled, Identity, Inbox, Message, PutFuture,
//! };
//!
//! struct Wall;
//! impl Clock for Wall {
//!     fn now(&self) -> Timestamp {
//!         let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
//!         Timestamp::from_millis(since.as_millis() as u64)
//!     }
//! }
//!
//! struct Nowhere;
//! impl DeadLetters for Nowhere {
//!     fn put<'a>(&'a self, letter: &'a DeadLetter) -> PutFuture<'a> {
//!         Box::pin(async move { panic!("no letter is expected, but {}", letter.reason) })
//!     }
//! }
//!
//! # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
//! let engine = Engine::new(Arc::new(MemoryStore::new(Wall)));
//! let billing = ConsumerName::new("billing")?;
//! // A handler that was cut off may run again: the provider takes a key.
//! let inbox = Inbox::new(engine, billing, Identity::header("event-id"), OnAbandoned::Reexecute, Nowhere);
//!
//! let message = Arc::new(Message::new("orders.paid", "order 7").with_header("event-id", "e-41"));
//! let charge = async |attempt: oncegate_engine::Attempt, _: Arc<Message>| {
//!     let _key = attempt.downstream_key("charge"); // … charge the card under this key …
//!     Ok::<_, Failure>(())
//! };
//! assert!(matches!(inbox.process(&message, charge).await, Handled::Processed { .. }));
//! assert!(matches!(inbox.process(&message, charge).await, Handled::Duplicate));
//! # Ok::<_, Box<dyn std::error::Error>>(()) }).unwrap();
//! ```
//!
//! [`Consumer`] is the loop around it: it takes deliveries from a [`Source`], keeps those in order that have one order key,
//! bounds what it holds, extends what takes long, acknowledges what is done, and comes to rest when it is told to. What a broker
//! needs is an adapter, each a crate of its own; an application can write one, too: [`Source`] and [`Delivery`]
//! have seven functions between them.
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
//! The guide is `docs/reference/messages.md`; each crate has a whole program in its `examples`.
//!
//! # What is promised
//!
//! | where the effect is | what happens once |
//! |---|---|
//! | in the transaction of the receipt | the effect |
//! | in an API that takes a key, called under the [downstream key] | the effect, as long as that API remembers the key |
//! | anywhere else, under [`Park`] | the effect, or a dead letter that says that nobody knows |
//! | anywhere else, under [`Reexecute`] | nothing: a crash in the middle does it again |
//!
//! [downstream key]: oncegate_engine::Attempt::downstream_key
//! [`Park`]: oncegate_core::OnAbandoned::Park
//! [`Reexecute`]: oncegate_core::OnAbandoned::Reexecute
//!
//! A message is known for as long as its receipt is kept ([`Inbox::with_retention`]): one that comes after that is processed
//! again. Dead letters are written at least once, under one identifier.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod consumer;
mod dead;
mod event;
mod handled;
mod identity;
mod inbox;
mod message;
mod processor;
mod source;

pub use consumer::{Consumer, ConsumerError, Order};
pub use dead::{DeadLetter, DeadLetterTopic, DeadLetters, ERROR_MAX, PutFuture};
pub use event::{Counts, Event, EventKind, Observer};
pub use handled::{DeadReason, Failure, Handled, Settlement};
pub use identity::{BadName, ConsumerName, Identity, MessageId, NoIdentity};
pub use inbox::{DEFAULT_MAX_ATTEMPTS, Inbox, InboxProcessor};
pub use message::{Ambiguous, Message};
pub use processor::Processor;
pub use source::{
    Delivery, MESSAGE_ID, Outgoing, PublishError, PublishFuture, Publisher, Source, SourceError, SourceInfo,
};
