//! RabbitMQ, and what else speaks AMQP 0-9-1.

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
