//! The adapter for RabbitMQ, against RabbitMQ.

mod line;
mod publisher;
mod setting;
mod source;
