//! The adapter for Kafka, on the cluster that librdkafka has for tests.

#[allow(dead_code, reason = "other brokers use all of it")]
#[path = "../support/suite.rs"]
mod suite;
#[path = "../support/mod.rs"]
mod support;

mod consumer;
#[cfg(feature = "postgres")]
mod processes;
mod raw;
mod source;
mod unreadable;
