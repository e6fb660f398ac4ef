//! Writes each message of a Kafka topic to a table of PostgreSQL once.
//!
//! ```text
//! psql "$DATABASE_URL" -c 'CREATE TABLE ledger (id text NOT NULL)'
//! KAFKA_BROKERS=127.0.0.1:9092 KAFKA_TOPIC=orders KAFKA_GROUP=billing DATABASE_URL=postgres://… \
//!     cargo run -p oncegate-kafka --example kafka
//! ```
//!
//! The identity of a message is the header `oncegate-message-id`, as `KafkaPublisher` writes it. `KAFKA_CONFIG` has further
//! settings of the client, `name=value` with commas between them. With `DIE=before-commit` or `DIE=before-ack` the process
//! kills itself at message number `DIE_AT`: start it again, and count the rows.

use std::env;
use std::error::Error;
use std::time::Duration;

use oncegate_broker_tests::consumer;
use oncegate_inbox::Order;
use oncegate_kafka::rdkafka::ClientConfig;
use oncegate_kafka::{KafkaOptions, KafkaSource};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", env::var("KAFKA_BROKERS")?)
        .set("group.id", env::var("KAFKA_GROUP")?)
        // A member that joins or leaves does not stop the others.
        .set("partition.assignment.strategy", "cooperative-sticky");
    for setting in env::var("KAFKA_CONFIG").unwrap_or_default().split(',').filter(|text| !text.is_empty()) {
        let (name, value) = setting.split_once('=').ok_or("KAFKA_CONFIG: name=value")?;
        config.set(name, value);
    }
    let options = KafkaOptions::default().with_revoke_timeout(Duration::from_secs(2))?;
    consumer::run(KafkaSource::new(&config, &[&env::var("KAFKA_TOPIC")?], options)?, Order::PerKey).await
}
