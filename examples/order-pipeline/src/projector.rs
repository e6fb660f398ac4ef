//! Adds up the orders of each customer. The sum, the position in the customer's stream and the receipt of the message
//! commit together.

use axum::Router;
use axum::routing::get;
use oncegate::core::ErrorChain;
use oncegate::inbox::{Consumer, ConsumerName, HandlerError, Identity, InboxCounts, Message};
use oncegate::inbox_postgres::{ApplyOutcome, DeadLetterTable, Streams, TransactionalInbox};
use oncegate::nats::NatsSource;
use oncegate::postgres::sqlx::{self, PgConnection, PgPool};

use crate::faults::{Faults, Mortal, Point};
use crate::order::OrderPlaced;
use crate::setup::{CONSUMER, STREAM};
use crate::{Broker, Database, Result, serve, stopped};

/// The options of the projector.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    database: Database,
    #[command(flatten)]
    broker: Broker,
    #[command(flatten)]
    faults: Faults,
    #[command(flatten)]
    version: Version,
    /// The port of its metrics; 0 means a free one.
    #[arg(long, default_value_t = 0)]
    port: u16,
}

/// The options of the retry.
#[derive(clap::Args)]
pub(crate) struct RetryOptions {
    #[command(flatten)]
    database: Database,
    #[command(flatten)]
    version: Version,
}

/// The features of a projector version.
#[derive(clap::Args, Clone, Copy)]
struct Version {
    /// Supports orders with a negative amount, which are refunds. An older version without it rejects them.
    #[arg(long)]
    refunds: bool,
}

/// Processes one message, in the transaction of its receipt.
async fn project(
    connection: &mut PgConnection,
    message: &Message,
    streams: &Streams,
    version: Version,
) -> std::result::Result<ApplyOutcome, HandlerError> {
    let placed: OrderPlaced = serde_json::from_slice(&message.payload).map_err(HandlerError::reject)?;
    // Checked before the event is buffered, because a buffered event is acknowledged and can no longer be rejected.
    if placed.cents < 0 && !version.refunds {
        return Err(HandlerError::reject("a negative amount"));
    }
    let (customer, sequence) = (&placed.customer, placed.sequence);
    // Two projectors, or a crash, may reverse the order of the broker.
    let applied =
        streams.apply_or_buffer(connection, customer, sequence, &message.payload, async |to, event| {
            add(to, &serde_json::from_slice(&event.event)?).await
        });
    // Applied now, applied before, or buffered: each is a success.
    applied.await
}

/// Adds the next order of its customer.
async fn add(connection: &mut PgConnection, placed: &OrderPlaced) -> std::result::Result<(), HandlerError> {
    let add = "INSERT INTO totals VALUES ($1, 1, $2, $3) ON CONFLICT (customer) DO UPDATE
        SET orders = totals.orders + 1, cents = totals.cents + excluded.cents, last_sequence = excluded.last_sequence";
    let sequence = i64::try_from(placed.sequence)?;
    sqlx::query(add).bind(&placed.customer).bind(placed.cents).bind(sequence).execute(connection).await?;
    Ok(())
}

fn inbox(pool: &PgPool) -> Result<TransactionalInbox> {
    Ok(TransactionalInbox::new(pool.clone(), CONSUMER, Identity::message_id())?)
}

/// Consumes until the process gets a signal.
pub(crate) async fn run(options: Options) -> Result<()> {
    let Options { database, broker, faults, version, port } = options;
    let name = ConsumerName::new(CONSUMER)?;
    let streams = Streams::new(&name)?;
    let inbox = inbox(&database.pool()?)?;
    let at = faults.clone();
    let processor = inbox.processor(async move |connection, message| {
        project(connection, message, &streams, version).await.map(drop)?;
        at.at(Point::BeforeProjectionCommit);
        Ok(())
    });

    let jetstream = broker.jetstream().await?;
    let consumer = jetstream.get_consumer_from_stream(CONSUMER, STREAM).await;
    let consumer =
        consumer.map_err(|error| format!("{}: was `order-pipeline setup` run?", ErrorChain(&error)))?;
    let source = NatsSource::new(jetstream, consumer)?;

    let counts = InboxCounts::default();
    let consumer = Consumer::new(Mortal::new(source, faults.clone()), Mortal::new(processor, faults))
        .with_observer(counts.clone());
    let metrics = async move || counts.to_prometheus(&name);
    let router = Router::new().route("/metrics", get(metrics));
    tokio::select! {
        // It ends by itself if the source cannot be used any more.
        ended = consumer.run(stopped()?) => Ok(ended?),
        Err(error) = serve(port, router) => Err(error),
    }
}

/// Processes every dead letter again, each in one transaction with its deletion and its receipt.
pub(crate) async fn retry(options: RetryOptions) -> Result<()> {
    let name = ConsumerName::new(CONSUMER)?;
    let streams = Streams::new(&name)?;
    let pool = options.database.pool()?;
    let inbox = inbox(&pool)?;
    let letters = DeadLetterTable::new(pool);
    let mut after = None;
    loop {
        let page = letters.list(Some(&name), after, 100).await?;
        let Some(last) = page.last() else { return Ok(()) };
        after = Some(last.number);
        for letter in page {
            let (number, streams) = (letter.number, streams.clone());
            let done = inbox.process_dead_letter(number, async move |connection, message| {
                project(connection, &message, &streams, options.version).await
            });
            match done.await {
                Ok(Some(ApplyOutcome::AlreadyApplied)) => {
                    println!("dead letter {number}: it was skipped, and is not counted")
                }
                Ok(Some(_)) => println!("dead letter {number}: processed"),
                Ok(None) => println!("dead letter {number}: another process took it"),
                Err(failure) => {
                    println!("dead letter {number}: still dead: {}", ErrorChain(failure.error()));
                }
            }
        }
    }
}
