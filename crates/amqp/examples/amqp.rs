//! Writes each message of a RabbitMQ queue to a table of PostgreSQL once.
//!
//! ```text
//! psql "$DATABASE_URL" -c 'CREATE TABLE ledger (id text NOT NULL)'
//! AMQP_URL=amqp://127.0.0.1:5672 AMQP_QUEUE=orders DATABASE_URL=postgres://… cargo run -p oncegate-amqp --example amqp
//! ```
//!
//! The identity of a message is the header `oncegate-message-id`, as `AmqpPublisher` writes it. With `DIE=before-commit`
//! or `DIE=before-ack` the process kills itself at message number `DIE_AT`: start it again, and count the rows.

use std::env;
use std::error::Error;

use oncegate_amqp::{AmqpBroker, AmqpSource};
use oncegate_broker_tests::consumer;
use oncegate_inbox::Order;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut source = AmqpSource::new(AmqpBroker::new(&env::var("AMQP_URL")?)?, env::var("AMQP_QUEUE")?)?;
    // At the start, the operator sees the error.
    source.connect().await?;
    consumer::run(source, Order::None).await
}
