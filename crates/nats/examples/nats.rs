//! Writes each message of a NATS JetStream stream to a table of PostgreSQL once.
//!
//! ```text
//! psql "$DATABASE_URL" -c 'CREATE TABLE ledger (id text NOT NULL)'
//! nats stream add ORDERS --subjects 'orders.>' --defaults
//! NATS_URL=nats://127.0.0.1:4222 NATS_STREAM=ORDERS DATABASE_URL=postgres://… \
//!     cargo run -p oncegate-nats --example nats
//! ```
//!
//! The identity of a message is the header `oncegate-message-id`, as `NatsPublisher` writes it. With `DIE=before-commit`
//! or `DIE=before-ack` the process kills itself at message number `DIE_AT`: start it again, and count the rows.

use std::env;
use std::error::Error;
use std::time::Duration;

use oncegate_broker_tests::consumer;
use oncegate_inbox::Order;
use oncegate_nats::NatsSource;
use oncegate_nats::async_nats::jetstream::consumer::AckPolicy;
use oncegate_nats::async_nats::jetstream::consumer::pull::Config;
use oncegate_nats::async_nats::{connect, jetstream};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let context = jetstream::new(connect(env::var("NATS_URL")?).await?);
    let stream = context.get_stream(env::var("NATS_STREAM")?).await?;
    let config = Config {
        durable_name: Some("billing".to_owned()),
        ack_policy: AckPolicy::Explicit,
        ack_wait: consumer::seconds("REDELIVERY")?.unwrap_or(Duration::from_secs(30)),
        max_ack_pending: 10_000,
        ..Config::default()
    };
    let consumer = stream.get_or_create_consumer("billing", config).await?;
    let source = NatsSource::new(context, consumer)?.without_order().with_prefetch(500)?;
    consumer::run(source, Order::None).await
}
