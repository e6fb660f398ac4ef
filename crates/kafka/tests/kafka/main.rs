//! The adapter for Kafka, on the cluster that librdkafka has for tests.

mod cluster;
mod consumer;
mod processes;
mod raw;
mod source;
mod unreadable;
