//! Messages of a Kafka topic, each written into a table of PostgreSQL once, however often it comes.
//!
//! ```text
//! psql "$DATABASE_URL" -c 'CREATE TABLE ledger (id text NOT NULL)'
//! KAFKA_BROKERS=127.0.0.1:9092 KAFKA_TOPIC=orders KAFKA_GROUP=billing DATABASE_URL=postgres://… \
//!     cargo run -p oncegate-inbox --features kafka,postgres --example kafka
//! ```
//!
//! Messages are told apart by the header `oncegate-message-id`, as `KafkaPublisher` writes it. `KAFKA_CONFIG` has further
//! settings of the client, `name=value` with commas between them. With `DIE=before-commit` or `DIE=before-ack` the process
//! kills itself in the middle of the message whose number `DIE_AT` says: start it again, and count.

use std::env;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use oncegate_inbox::kafka::rdkafka::ClientConfig;
use oncegate_inbox::kafka::{KafkaOptions, KafkaSource};
use oncegate_inbox::postgres::TransactionalInbox;
use oncegate_inbox::{Consumer, ConsumerName, Event, EventKind, Failure, Identity, MESSAGE_ID, Observer};
use oncegate_postgres::sqlx::postgres::PgPoolOptions;
use oncegate_postgres::{PostgresOptions, schema, sqlx};
use tokio::signal::unix::{SignalKind, signal};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("DATABASE_URL")?;
    schema::apply(&PostgresOptions::new(&url)?).await?;
    let pool = PgPoolOptions::new().max_connections(6).connect(&url).await?;

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
    let options = KafkaOptions::default().with_revoke_patience(Duration::from_secs(2))?;
    let source = KafkaSource::new(&config, &[&env::var("KAFKA_TOPIC")?], options)?;

    let die = Die::from_env();
    let before_commit = die.clone();
    let inbox = TransactionalInbox::new(pool, ConsumerName::new("billing")?, Identity::message_id());
    let processor = inbox.batch_processor(async move |connection, messages| {
        let mut ids = Vec::with_capacity(messages.len());
        for message in messages {
            let id =
                message.header(MESSAGE_ID).ok().flatten().ok_or_else(|| Failure::reject("no identifier"))?;
            ids.push(String::from_utf8(id.to_vec())?);
        }
        sqlx::query("INSERT INTO ledger (id) SELECT unnest($1::text[])")
            .bind(ids)
            .execute(connection)
            .await?;
        before_commit.at("before-commit", messages.len() as u64);
        Ok(())
    });

    let mut terminated = signal(SignalKind::terminate())?;
    let stop = async move {
        terminated.recv().await;
    };
    Consumer::new(source, processor).with_concurrency(4).with_observer(die).run(stop).await?;
    Ok(())
}

/// Where the process kills itself.
#[derive(Clone)]
struct Die {
    place: String,
    at: u64,
    seen: Arc<AtomicU64>,
}

impl Die {
    fn from_env() -> Self {
        let at = env::var("DIE_AT").ok().and_then(|at| at.parse().ok()).unwrap_or(1);
        Self { place: env::var("DIE").unwrap_or_default(), at, seen: Arc::default() }
    }

    fn at(&self, place: &str, messages: u64) {
        if place == self.place && self.seen.fetch_add(messages, Ordering::Relaxed) + messages >= self.at {
            // As `kill -9` would: nothing is closed, nobody is told.
            std::process::abort();
        }
    }
}

impl Observer for Die {
    fn observe(&self, event: &Event<'_>) {
        // What is told as processed is committed, and not acknowledged yet.
        if event.kind == EventKind::Processed {
            self.at("before-ack", 1);
        }
    }
}
