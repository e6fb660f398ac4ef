//! A server for all tests of this program, a database for each, and effects that are counted without the inbox.

use std::str::FromStr as _;
use std::sync::Arc;
use std::time::Duration;

use oncegate_inbox::{HandlerError, Identity, Message, ProcessOutcome, Processor as _};
use oncegate_inbox_postgres::TransactionalInbox;
use oncegate_postgres::TransactFnWith;
use oncegate_postgres::sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions, PgSslMode};
use oncegate_postgres::sqlx::{self, AssertSqlSafe, Connection as _};

use crate::common::apply_schema;
pub(crate) use crate::common::{Database, run};

/// Machines of tests are busy.
pub(crate) const LONG: Duration = Duration::from_secs(60);

impl Database {
    /// Creates a database with the schema and a table of effects.
    pub(crate) async fn fresh() -> Self {
        let database = Self::with_schema().await;
        create_effects(&database.url()).await;
        database
    }

    pub(crate) async fn pool(&self, connections: u32) -> PgPool {
        pool(&self.url(), self.server.port(), connections).await
    }

    pub(crate) async fn inbox(&self, connections: u32) -> TransactionalInbox {
        inbox(self.pool(connections).await)
    }

    /// Returns the effects, in the order of their commits within one consumer.
    pub(crate) async fn effects(&self) -> Vec<String> {
        let effects = sqlx::query_scalar("SELECT message FROM effects ORDER BY number");
        effects.fetch_all(&mut self.connect().await).await.unwrap()
    }

    pub(crate) async fn number(&self, sql: &str) -> i64 {
        let number = sqlx::query_scalar(AssertSqlSafe(sql.to_owned()));
        number.fetch_one(&mut self.connect().await).await.unwrap()
    }

    pub(crate) async fn receipts(&self) -> i64 {
        self.number("SELECT count(*) FROM oncegate.receipts").await
    }
}

/// Creates the schema, and a table of effects without a unique key.
pub(crate) async fn prepare(url: &str) {
    apply_schema(url).await;
    create_effects(url).await;
}

async fn create_effects(url: &str) {
    let table = "CREATE TABLE public.effects (number bigserial, message text NOT NULL, transaction bigint DEFAULT txid_current())";
    run(&mut PgConnection::connect(url).await.unwrap(), table).await;
}

/// A pool as an application has it, perhaps through a proxy.
pub(crate) async fn pool(url: &str, port: u16, connections: u32) -> PgPool {
    let options = PgConnectOptions::from_str(url).unwrap();
    let pool = PgPoolOptions::new().max_connections(connections).acquire_timeout(LONG);
    pool.connect_with(options.port(port).ssl_mode(PgSslMode::Disable)).await.unwrap()
}

pub(crate) fn inbox(pool: PgPool) -> TransactionalInbox {
    inbox_of(pool, "billing")
}

pub(crate) fn inbox_of(pool: PgPool, consumer: &str) -> TransactionalInbox {
    let inbox = TransactionalInbox::new(pool, consumer, Identity::header("event-id")).unwrap();
    inbox.with_statement_timeout(LONG).unwrap()
}

/// A message that is delivered for the first time, for certain.
pub(crate) fn new(id: &str) -> Arc<Message> {
    Arc::new(
        Message::new("orders", id.to_owned())
            .with_header("event-id", id.to_owned())
            .with_deliveries(Some(1), false),
    )
}

/// A message that may have been delivered before.
pub(crate) fn again(id: &str) -> Arc<Message> {
    Arc::new(Message::clone(&new(id)).with_deliveries(None, true))
}

/// The same in order with others.
pub(crate) fn ordered(id: &str, key: &'static str) -> Arc<Message> {
    Arc::new(Message::clone(&new(id)).with_order_key(key))
}

/// A handler: the effect is a row with the payload. It fails after the effect if the payload begins with `poison`.
pub(crate) async fn effect(connection: &mut PgConnection, message: &Message) -> Result<(), HandlerError> {
    let text = std::str::from_utf8(&message.payload)?;
    sqlx::query("INSERT INTO effects (message) VALUES ($1)").bind(text).execute(connection).await?;
    if text.starts_with("poison") {
        return Err(HandlerError::retry("it is poison"));
    }
    Ok(())
}

/// Processes a batch with a handler of one message, as a consumer's loop does.
pub(crate) async fn process_each<F>(
    inbox: &TransactionalInbox,
    batch: &[Arc<Message>],
    run: F,
) -> Vec<ProcessOutcome>
where
    F: for<'c> TransactFnWith<&'c mut PgConnection, &'c Message, (), HandlerError, Fut: Send>
        + Clone
        + Send
        + Sync
        + 'static,
{
    inbox.clone().processor(run).process(batch).await
}

/// As an outcome in one word.
pub(crate) fn word(handled: &ProcessOutcome) -> String {
    match handled {
        ProcessOutcome::Processed { attempts } => format!("processed {attempts}"),
        ProcessOutcome::Duplicate => "duplicate".to_owned(),
        ProcessOutcome::InFlight { .. } => "in-flight".to_owned(),
        ProcessOutcome::Failed { attempts, .. } => format!("failed {attempts}"),
        ProcessOutcome::Dead { reason, is_known } => {
            format!("dead {reason}{}", if *is_known { " known" } else { "" })
        }
        ProcessOutcome::Unavailable(error) => format!("unavailable: {error}"),
        ProcessOutcome::NotBegun => "not begun".to_owned(),
        other => format!("{other:?}"),
    }
}

pub(crate) fn words(handled: &[ProcessOutcome]) -> Vec<String> {
    handled.iter().map(word).collect()
}
