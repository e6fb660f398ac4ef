//! A consumer of a NATS stream: writes one invoice for each order, however often the order is delivered.

use oncegate::inbox::{Consumer, Identity, InboxEvent};
use oncegate::inbox_postgres::TransactionalInbox;
use oncegate::nats::NatsSource;
use oncegate::nats::async_nats::{self, HeaderMap, jetstream, jetstream::consumer::pull};
use oncegate::postgres::sqlx::{self, PgPool};

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
    let source = NatsSource::new(broker, consumer)?;
    let inbox = TransactionalInbox::new(pool, "billing", Identity::header("event-id"))?;
    let processor = inbox.processor(async |connection, message| {
        let order = std::str::from_utf8(&message.payload)?;
        sqlx::query("INSERT INTO invoices VALUES ($1)").bind(order).execute(connection).await?;
        Ok(())
    });
    let print = |event: &InboxEvent<'_>| println!("{:?}", event.kind);
    Consumer::new(source, processor).with_observer(print).run(tokio::signal::ctrl_c()).await?;
    Ok(())
}
