//! Kafka and compatible brokers: a source on consumer groups, and a publisher.
//!
//! **Experimental:** the tests run on the in-memory cluster of librdkafka. A real cluster was not tried.
//!
//! Kafka is a log that is read by offsets, not a queue: single messages are not acknowledged. The progress of a group
//! is one offset for each partition. The source commits the offset of the lowest message that is not settled, and never
//! beyond it. Messages above it that are settled are delivered again after a crash, and are duplicates then. The client
//! is [`rdkafka`]; its settings, TLS and credentials are those of its [`ClientConfig`](rdkafka::ClientConfig).
//! `docs/reference/kafka.md` has the guarantees of Kafka and their limits.

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

/// The header of a tombstone: a record without a payload, which is not an empty payload. It is not on the wire.
///
/// A message that is published with this header and an empty payload is published as a tombstone.
pub const TOMBSTONE: &str = "oncegate-kafka-tombstone";

/// The header with the record's key, if [`KafkaOrder`] does not make it the order key. It is not on the wire.
///
/// A message that is published with this header gets it as its key.
pub const RECORD_KEY: &str = "oncegate-kafka-key";

/// The header of a message whose headers cannot be read because a name is not UTF-8. It is not on the wire.
///
/// The message has no other header then.
pub const UNREADABLE: &str = "oncegate-kafka-unreadable";
