//! The setup: tables, a stream, a consumer.

use std::time::Duration;

use oncegate::PostgresOptions;
use oncegate::nats::async_nats::jetstream::consumer::{AckPolicy, pull};
use oncegate::nats::async_nats::jetstream::stream;
use oncegate::postgres::{schema, sqlx};

use crate::order::PLACED;
use crate::{Broker, Database, Result};

/// The options of the setup.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    database: Database,
    #[command(flatten)]
    broker: Broker,
    /// The time in milliseconds after which the broker delivers a message again without an acknowledgement of a projector.
    #[arg(long, default_value_t = 30_000)]
    ack_wait_ms: u64,
    /// The time in milliseconds for which the broker recognizes a message that is published again.
    #[arg(long, default_value_t = 120_000)]
    duplicate_window_ms: u64,
}

/// The stream, and its consumer that all projectors share.
pub(crate) const STREAM: &str = "ORDERS";
pub(crate) const CONSUMER: &str = "totals";

/// `customers` and `orders` belong to the API, `totals` to the projectors; they could be in different databases.
const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS customers (customer text PRIMARY KEY, orders bigint NOT NULL);
    CREATE TABLE IF NOT EXISTS orders (
        id bigserial PRIMARY KEY, customer text NOT NULL, sequence bigint NOT NULL, cents bigint NOT NULL,
        UNIQUE (customer, sequence)
    );
    CREATE TABLE IF NOT EXISTS totals (
        customer text PRIMARY KEY, orders bigint NOT NULL, cents bigint NOT NULL, last_sequence bigint NOT NULL
    );";

/// Creates what does not exist yet.
pub(crate) async fn run(options: Options) -> Result<()> {
    schema::apply(&PostgresOptions::from_url(&options.database.database)?).await?;
    sqlx::raw_sql(TABLES).execute(&options.database.pool()?).await?;

    let jetstream = options.broker.jetstream().await?;
    let orders = stream::Config {
        name: STREAM.to_owned(),
        subjects: vec![PLACED.to_owned()],
        duplicate_window: Duration::from_millis(options.duplicate_window_ms),
        ..stream::Config::default()
    };
    let orders = jetstream.get_or_create_stream(orders).await?;
    // No `max_deliver`: the inbox counts attempts, and writes a dead letter after the last one.
    let totals = pull::Config {
        durable_name: Some(CONSUMER.to_owned()),
        ack_policy: AckPolicy::Explicit,
        ack_wait: Duration::from_millis(options.ack_wait_ms),
        ..pull::Config::default()
    };
    orders.get_or_create_consumer(CONSUMER, totals).await?;
    Ok(())
}
