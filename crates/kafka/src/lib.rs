//! Kafka, and what speaks its protocol: a source on consumer groups, and a publisher.
//!
//! **Experimental:** the tests run against an imitation. A real cluster was not tried.
//!
//! Kafka is a log that is read by offsets, and not a queue: nothing is acknowledged by itself. What a group has processed is
//! one number for each partition. It is committed here up to the lowest message that is not settled, and never beyond; what
//! is settled above it is processed again by whoever reads the partition after a crash, and found to be a duplicate there.
//! The client is [`rdkafka`], and its settings, TLS and credentials are those of its
//! [`ClientConfig`](rdkafka::ClientConfig). `docs/reference/kafka.md` says what Kafka promises, and what it does not.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod partition;
mod publisher;
mod reader;
mod settings;
mod shared;
mod source;

pub use publisher::KafkaPublisher;
pub use rdkafka;
pub use settings::{KafkaOptions, KafkaOrder, OnTruncation};
pub use source::{KafkaDelivery, KafkaSource};

/// A header of messages from Kafka that is not on the wire: the message is a tombstone, which is no payload at all and not
/// an empty one. A message that is published with it and an empty payload is published as a tombstone.
pub const TOMBSTONE: &str = "oncegate-kafka-tombstone";

/// A header of messages from Kafka that is not on the wire: the record's key, where [`KafkaOrder`] does not make it the
/// order key. A message that is published with it has it as its key.
pub const RECORD_KEY: &str = "oncegate-kafka-key";

/// A header of messages from Kafka that is not on the wire: their headers cannot be read, because a name is not UTF-8. The
/// message has no other header then.
pub const UNREADABLE: &str = "oncegate-kafka-unreadable";
