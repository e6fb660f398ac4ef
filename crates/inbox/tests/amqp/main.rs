//! The adapter for RabbitMQ, against RabbitMQ.

mod consumer;
mod line;
mod processes;
mod publisher;
mod setting;
mod source;
#[allow(dead_code, reason = "other brokers use all of it")]
#[path = "../support/suite.rs"]
mod suite;
