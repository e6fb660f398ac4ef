//! A service that takes orders from a queue of RabbitMQ, and writes one invoice for each into PostgreSQL, over
//! redeliveries and crashes.
//!
//! Configuration by environment: `AMQP_URL`, `QUEUE` (default `orders`), `DATABASE_URL`. The queue, the table `invoices
//! (number text)` and the schema of Oncegate (`oncegate schema apply`) must exist. The identity of an order is the
//! `message-id` of its producer. A message that cannot be an order becomes a dead letter in the database.
//!
//! `DIE=before-commit` and `DIE=after-commit` end the process there: the effect is written and not committed, or
//! committed and not acknowledged.

use std::env;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use oncegate_amqp::{AmqpBroker, AmqpSource};
use oncegate_engine::ConfigError;
use oncegate_inbox::{
    Consumer, ConsumerName, HandlerError, Identity, Message, Order, ProcessOutcome, Processor, SourceInfo,
};
use oncegate_inbox_postgres::TransactionalInbox;
use oncegate_postgres::sqlx::postgres::{PgConnection, PgPoolOptions};
use oncegate_postgres::sqlx::query;
use tokio::signal::unix::{SignalKind, signal};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let queue = env::var("QUEUE").unwrap_or_else(|_| "orders".to_owned());
    let mut source = AmqpSource::new(AmqpBroker::new(&env::var("AMQP_URL")?)?, queue)?;
    // At the start, an operator sees the error.
    source.connect().await?;
    let pool = PgPoolOptions::new().max_connections(4).connect(&env::var("DATABASE_URL")?).await?;
    let inbox = TransactionalInbox::new(pool, "billing", Identity::header("amqp-message-id"))?;
    let processor = DiesAfterCommit(inbox.batch_processor(invoice));
    let mut terminate = signal(SignalKind::terminate())?;
    let consumer = Consumer::new(source, processor).with_order(Order::None).with_concurrency(2)?;
    consumer.run(terminate.recv()).await?;
    Ok(())
}

/// Writes the effects of all new messages, in the transaction of their receipts.
async fn invoice(connection: &mut PgConnection, orders: &[&Message]) -> Result<(), HandlerError> {
    let mut numbers = Vec::with_capacity(orders.len());
    for order in orders {
        numbers.push(std::str::from_utf8(&order.payload).map_err(HandlerError::reject)?.to_owned());
    }
    query("INSERT INTO invoices SELECT unnest($1::text[])").bind(numbers).execute(connection).await?;
    die_at("before-commit");
    Ok(())
}

fn die_at(place: &str) {
    if env::var("DIE").is_ok_and(|wanted| wanted == place) {
        std::process::abort();
    }
}

/// Crashes between the commit and the acknowledgement.
struct DiesAfterCommit<P>(P);

impl<P: Processor> Processor for DiesAfterCommit<P> {
    fn consumer(&self) -> &ConsumerName {
        self.0.consumer()
    }

    fn max_batch(&self) -> usize {
        self.0.max_batch()
    }

    fn retention(&self) -> Duration {
        self.0.retention()
    }

    fn check(&self, source: &SourceInfo) -> Result<(), ConfigError> {
        self.0.check(source)
    }

    async fn process(&self, messages: &[Arc<Message>]) -> Vec<ProcessOutcome> {
        let handled = self.0.process(messages).await;
        if handled.iter().any(|handled| matches!(handled, ProcessOutcome::Processed { .. })) {
            die_at("after-commit");
        }
        handled
    }
}
