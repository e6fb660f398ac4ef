//! RabbitMQ: a queue as a source, and an exchange as a destination, over AMQP 0-9-1.
//!
//! # Guarantees of the broker
//! Messages that were delivered and not acknowledged are delivered again when their channel ends, for any reason. The
//! broker does not answer acknowledgements, so a lost one leads to another delivery. The queue decides if messages
//! survive a broker failure. Use durable queues, better quorum queues on three nodes. Set no delivery limit (from 4.0
//! on it is 20 unless set to -1): above it the broker drops messages by itself.
//!
//! # Contents of a delivery
//! `topic` is the queue, or the routing key if that is set. There is no `broker_id`: use an identifier of the producer.
//! `is_redelivered` is false only if the broker has not delivered the message before, and `deliveries` is known if a
//! quorum queue counts them. Headers of the message are headers. Properties are headers with the names
//! `amqp-message-id`, `-correlation-id`, `-content-type`, `-content-encoding`, `-type`, `-app-id`, `-user-id`,
//! `-reply-to`, `-expiration`, `-timestamp`, `-priority`; so are `amqp-exchange` and `amqp-routing-key`.
//!
//! # Time
//! The broker waits 30 minutes for an acknowledgement unless set otherwise, and cannot be asked for more. Then it ends
//! the channel, and everything that it had delivered comes again.
//!
//! # Order
//! None unless a header or the routing key is set as the order key, and then within one process. A queue with
//! `x-single-active-consumer` keeps the order over processes.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod broker;
mod fields;
mod publisher;
mod source;

pub use lapin;

pub use broker::AmqpBroker;
pub use publisher::AmqpPublisher;
pub use source::{AmqpDelivery, AmqpSource};

/// The header with the order key of a message that was published by this crate.
pub const ORDER_KEY: &str = "oncegate-order-key";
