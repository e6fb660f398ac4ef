//! Messages through the consumer's loop into PostgreSQL: the transactional inbox, compared with the same consumer
//! without it, and with a row and a transaction for each message. The source is in memory and costs almost nothing, so
//! the result is that of the database.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use oncegate_engine::ConfigError;
use oncegate_inbox::{
    Consumer, ConsumerName, Delivery, HandlerError, Identity, Message, ProcessOutcome, Processor, Source,
    SourceError,
};
use oncegate_inbox_postgres::TransactionalInbox;
use oncegate_postgres::{PostgresOptions, schema};
use oncegate_servers::PostgresServer;
use sqlx::postgres::{PgConnection, PgPool, PgPoolOptions};
use tokio::sync::Notify;

use crate::records::Result;
use crate::shared::{ROUNDS, Rounds, durable, fresh};

const BATCH: usize = 100;
const IN_FLIGHT: usize = 8;

pub(crate) async fn measure() -> Result<()> {
    let server = PostgresServer::start_with(durable())?;
    schema::apply(&PostgresOptions::from_url(&server.url())?).await?;
    let pool = PgPoolOptions::new().max_connections(32).connect(&server.url()).await?;
    for table in [
        "CREATE TABLE effects (id bigserial PRIMARY KEY, customer text NOT NULL, cents bigint NOT NULL)",
        "CREATE TABLE processed_events (event_id text PRIMARY KEY, processed_at timestamptz NOT NULL DEFAULT now())",
    ] {
        sqlx::query(table).execute(&pool).await?;
    }
    let inbox = || -> Result<_> {
        Ok(TransactionalInbox::new(pool.clone(), "benchmark", Identity::header("id"))?
            .with_max_batch(BATCH)?)
    };
    for (title, each, count, again) in [
        ("one statement for each message", true, 20_000, 0),
        ("one statement for each batch", false, 60_000, 0),
        ("one statement for each batch, 30 % come twice", false, 60_000, 30),
    ] {
        let mut rounds = Rounds::default();
        for round in 0..=ROUNDS {
            let messages = Messages::new(count, again);
            let with = if each {
                consume(
                    messages.clone(),
                    inbox()?.processor(async |connection, message| pay(connection, message).await),
                )
                .await?
            } else {
                let run = async |connection: &mut PgConnection, messages: &[&Message]| {
                    pay_all(connection, messages).await
                };
                consume(messages.clone(), inbox()?.batch_processor(run)).await?
            };
            let how = |how| ByHand { name: name(), pool: pool.clone(), how };
            let bare =
                consume(Messages::new(count, again), how(if each { How::Each } else { How::Together }))
                    .await?;
            let rows = Messages::new(count.min(6_000), again);
            // Scaled to the number of messages of the others.
            let scale = count as f64 / count.min(6_000) as f64;
            let rows = consume(rows, how(How::RowForEach)).await? * scale;
            if round > 0 {
                rounds.note("against no inbox", [with, bare]);
                rounds.note("against a transaction with a row for each message", [with, rows]);
            }
        }
        rounds.print(
            &format!("Transactional inbox, batches of {BATCH}, {IN_FLIGHT} at a time, {title}"),
            "by hand",
            count,
        );
    }
    Ok(())
}

fn name() -> ConsumerName {
    ConsumerName::new("by-hand").unwrap_or_else(|_| unreachable!("a good name"))
}

async fn pay(connection: &mut PgConnection, message: &Message) -> std::result::Result<(), HandlerError> {
    let insert = sqlx::query("INSERT INTO effects (customer, cents) VALUES ($1, $2)");
    insert.bind(customer(message)).bind(4999_i64).execute(connection).await?;
    Ok(())
}

async fn pay_all(
    connection: &mut PgConnection,
    messages: &[&Message],
) -> std::result::Result<(), HandlerError> {
    let customers: Vec<String> = messages.iter().map(|message| customer(message)).collect();
    let insert = sqlx::query("INSERT INTO effects (customer, cents) SELECT unnest($1::text[]), 4999");
    insert.bind(customers).execute(connection).await?;
    Ok(())
}

fn customer(message: &Message) -> String {
    String::from_utf8_lossy(&message.payload).into_owned()
}

/// Returns the seconds until all messages are acknowledged.
async fn consume(messages: Messages, processor: impl Processor) -> Result<f64> {
    let all = messages.0.clone();
    let start = Instant::now();
    let consumer = Consumer::new(messages, processor)
        .with_concurrency(IN_FLIGHT)?
        .with_max_held(BATCH * IN_FLIGHT * 2)?;
    consumer.run(async { all.is_done().await }).await?;
    Ok(start.elapsed().as_secs_f64())
}

/// A source with all messages in memory.
#[derive(Clone)]
struct Messages(Arc<All>);

struct All {
    from: u64,
    count: u64,
    /// The percentage of messages that come twice.
    again: u64,
    next: AtomicU64,
    acknowledged: AtomicU64,
    done: Notify,
}

impl Messages {
    fn new(count: u64, again: u64) -> Self {
        Self(Arc::new(All {
            from: fresh(count),
            count,
            again,
            next: AtomicU64::new(0),
            acknowledged: AtomicU64::new(0),
            done: Notify::new(),
        }))
    }
}

impl All {
    async fn is_done(&self) {
        while self.acknowledged.load(Ordering::SeqCst) < self.count {
            self.done.notified().await;
        }
    }
}

struct Taken {
    all: Arc<All>,
    message: Arc<Message>,
}

impl Source for Messages {
    type Delivery = Taken;

    fn info(&self) -> oncegate_inbox::SourceInfo {
        oncegate_inbox::SourceInfo::new(None)
    }

    async fn next(&mut self) -> std::result::Result<Taken, SourceError> {
        let at = self.0.next.fetch_add(1, Ordering::Relaxed);
        if at >= self.0.count {
            return std::future::pending().await;
        }
        // A duplicate comes some batches later, in the place of a new message.
        let number = if at % 100 < self.0.again && at >= 1000 { at - 1000 + self.0.again } else { at };
        let id = format!("message-{}", self.0.from + number);
        let message =
            Message::new("orders", "customer-17").with_header("id", id).with_deliveries(Some(1), false);
        Ok(Taken { all: self.0.clone(), message: Arc::new(message) })
    }

    async fn close(&mut self) -> std::result::Result<(), SourceError> {
        Ok(())
    }
}

impl Delivery for Taken {
    const GIVES_BACK: bool = false;

    fn message(&self) -> &Arc<Message> {
        &self.message
    }

    async fn extend(&self) -> std::result::Result<(), SourceError> {
        Ok(())
    }

    async fn ack(&self) -> std::result::Result<(), SourceError> {
        if self.all.acknowledged.fetch_add(1, Ordering::SeqCst) + 1 == self.all.count {
            self.all.done.notify_one();
        }
        Ok(())
    }

    async fn give_back(&self, _: Duration) -> std::result::Result<(), SourceError> {
        Ok(())
    }
}

/// The usual solution without an inbox.
struct ByHand {
    name: ConsumerName,
    pool: PgPool,
    how: How,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// One transaction per batch, without a check for duplicates.
    Each,
    Together,
    /// One transaction per message, with a row that records that it was processed.
    RowForEach,
}

impl ByHand {
    async fn handle(&self, messages: &[Arc<Message>]) -> std::result::Result<(), HandlerError> {
        let mut transaction = self.pool.begin().await?;
        match self.how {
            How::Each => {
                for message in messages {
                    pay(&mut transaction, message).await?;
                }
            }
            How::Together => {
                let messages: Vec<&Message> = messages.iter().map(|message| &**message).collect();
                pay_all(&mut transaction, &messages).await?;
            }
            How::RowForEach => {
                for message in messages {
                    let insert = "INSERT INTO processed_events (event_id) VALUES ($1) ON CONFLICT DO NOTHING";
                    let id = message.header("id").ok().flatten().cloned().unwrap_or_default();
                    let id = String::from_utf8_lossy(&id).into_owned();
                    if sqlx::query(insert).bind(id).execute(&mut *transaction).await?.rows_affected() == 1 {
                        pay(&mut transaction, message).await?;
                    }
                }
            }
        }
        transaction.commit().await?;
        Ok(())
    }
}

impl Processor for ByHand {
    fn consumer(&self) -> &ConsumerName {
        &self.name
    }

    fn max_batch(&self) -> usize {
        if self.how == How::RowForEach { 1 } else { BATCH }
    }

    fn retention(&self) -> Duration {
        Duration::MAX
    }

    fn check(&self, _: &oncegate_inbox::SourceInfo) -> std::result::Result<(), ConfigError> {
        Ok(())
    }

    async fn process(&self, messages: &[Arc<Message>]) -> Vec<ProcessOutcome> {
        let done = self.handle(messages).await;
        let said =
            |failed: &str| ProcessOutcome::Failed { attempts: 1, failure: HandlerError::retry(failed) };
        messages
            .iter()
            .map(|_| match &done {
                Ok(()) => ProcessOutcome::Processed { attempts: 1 },
                Err(failure) => said(&failure.to_string()),
            })
            .collect()
    }
}
