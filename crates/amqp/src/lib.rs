//! RabbitMQ: a queue as a source, and an exchange as a destination, over AMQP 0-9-1.
//!
//! # What the broker promises
//! What was delivered and not acknowledged is delivered again when its channel ends, for whatever reason. The broker does not
//! answer an acknowledgement; one that is lost is another delivery. Whether a message outlives the broker is the queue's
//! affair: durable, and better a quorum queue on three nodes, without a delivery limit (20 unless set to -1, from 4.0 on),
//! above which the broker drops messages by itself.
//!
//! # What a delivery says
//! `topic` is the queue, or the routing key where that is chosen. There is no `broker_id`: messages are told by what their
//! producer sets. `is_redelivered` is false only where the broker has not delivered the message before, and `deliveries` is
//! known where a quorum queue counts them. Headers of the message are headers; properties are headers called
//! `amqp-message-id`, `-correlation-id`, `-content-type`, `-content-encoding`, `-type`, `-app-id`, `-user-id`,
//! `-reply-to`, `-expiration`, `-timestamp`, `-priority`; so are `amqp-exchange` and `amqp-routing-key`.
//!
//! # Time
//! The broker waits for an acknowledgement, 30 minutes unless told otherwise, and cannot be asked for more. Then it ends the
//! channel, and all that it had delivered comes again.
//!
//! # Order
//! None unless a header or the routing key is chosen for it; and then within one process. A queue with
//! `x-single-active-consumer` keeps it over processes.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod broker;
mod fields;
mod publisher;
mod source;

pub use lapin;

pub use broker::AmqpBroker;
pub use publisher::AmqpPublisher;
pub use source::{AmqpDelivery, AmqpSource};

/// The header with the order key of a message that was published here.
pub const ORDER_KEY: &str = "oncegate-order-key";
