//! A consumer of a NATS stream: writes one invoice for each order, however often the order is delivered.

use oncegate::inbox::{Consumer, ConsumerName, Event, Identity, Observer};
use oncegate::inbox_postgres::TransactionalInbox;
use oncegate::nats::async_nats::jetstream::{self, consumer::pull};
use oncegate::nats::async_nats::{self, HeaderMap};
use oncegate::nats::{NatsSource, NatsSourceOptions};
use oncegate::postgres::sqlx::{self, PgPool};

struct Print;
impl Observer for Print {
    fn observe(&self, event: &Event<'_>) {
        println!("{:?}", event.kind);
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let broker = jetstream::new(async_nats::connect(std::env::var("NATS_URL")?).await?);
    let stream = broker.get_or_create_stream("ORDERS").await?;
    if let Some(id) = std::env::args().nth(1) {
        let headers = HeaderMap::from_iter([("event-id".parse()?, id.parse()?)]);
        broker.publish_with_headers("ORDERS", headers, id.into()).await?.await?;
        return Ok(());
    }
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    sqlx::query("CREATE TABLE IF NOT EXISTS invoices (order_id text)").execute(&pool).await?;
    let billing = pull::Config { durable_name: Some("billing".into()), ..Default::default() };
    let consumer = stream.get_or_create_consumer("billing", billing).await?;
    let source = NatsSource::new(broker, consumer, NatsSourceOptions::new())?;

    let inbox = TransactionalInbox::new(pool, ConsumerName::new("billing")?, Identity::header("event-id"));
    let processor = inbox.processor(async |connection, message| {
        let order = std::str::from_utf8(&message.payload)?;
        sqlx::query("INSERT INTO invoices VALUES ($1)").bind(order).execute(connection).await?;
        Ok(())
    });
    let stop = async { drop(tokio::signal::ctrl_c().await) };
    Consumer::new(source, processor).with_observer(Print).run(stop).await?;
    Ok(())
}
