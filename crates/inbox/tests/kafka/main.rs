//! The adapter for Kafka, on the cluster that librdkafka has for tests.

#[path = "../support/mod.rs"]
mod support;

mod source;
