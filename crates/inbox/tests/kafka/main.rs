//! The adapter for Kafka, on the cluster that librdkafka has for tests.

<<<<<<< HEAD
#[allow(dead_code, reason = "other brokers use all of it")]
=======
#[allow(dead_code, reason = "other brokers are tried with more of it")]
>>>>>>> kafka
#[path = "../support/suite.rs"]
mod suite;
#[path = "../support/mod.rs"]
mod support;

mod consumer;
#[cfg(feature = "postgres")]
mod processes;
mod source;
