//! The adapter for RabbitMQ, against RabbitMQ.

mod consumer;
mod line;
mod processes;
mod publisher;
mod setting;
mod source;
