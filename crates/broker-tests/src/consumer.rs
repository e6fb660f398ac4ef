//! The body of the example consumers: each message writes one row, in a table without a unique key.
//!
//! The receipt is in the same transaction.

use std::env;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use oncegate_inbox::{
    Consumer, HandlerError, Identity, InboxEvent, InboxEventKind, InboxObserver, MESSAGE_ID, Order, Source,
};
use oncegate_inbox_postgres::TransactionalInbox;
use oncegate_postgres::sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use oncegate_postgres::{PostgresOptions, schema, sqlx};
use tokio::signal::unix::{SignalKind, signal};

/// Consumes until the process gets SIGTERM.
pub async fn run(source: impl Source, order: Order) -> Result<(), Box<dyn Error>> {
    let url = env::var("DATABASE_URL")?;
    schema::apply(&PostgresOptions::from_url(&url)?).await?;
    // The database ends the transaction of a process that is suspended, so that others can have its messages.
    let connect = url.parse::<PgConnectOptions>()?.options([("idle_in_transaction_session_timeout", "5s")]);
    let pool = PgPoolOptions::new().max_connections(6).connect_with(connect).await?;

    let die = Die::from_env();
    let before_commit = die.clone();
    let inbox = TransactionalInbox::new(pool, "billing", Identity::message_id())?;
    let processor = inbox.batch_processor(async move |connection, messages| {
        let mut ids = Vec::with_capacity(messages.len());
        for message in messages {
            let id = message
                .header(MESSAGE_ID)
                .ok()
                .flatten()
                .ok_or_else(|| HandlerError::reject("no identifier"))?;
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
    let consumer = Consumer::new(source, processor).with_concurrency(4)?.with_order(order);
    consumer.with_observer(die).run(terminated.recv()).await?;
    Ok(())
}

/// Reads a number of seconds from a variable, if it is set.
pub fn seconds(variable: &str) -> Result<Option<Duration>, Box<dyn Error>> {
    Ok(match env::var(variable) {
        Ok(text) => Some(Duration::from_secs(text.parse()?)),
        Err(_) => None,
    })
}

/// The point at which the process kills itself.
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
            // Like `kill -9`: nothing is closed, and no peer is notified.
            std::process::abort();
        }
    }
}

impl InboxObserver for Die {
    fn observe(&self, event: &InboxEvent<'_>) {
        // A message that is reported as processed is committed, and not acknowledged yet.
        if event.kind == InboxEventKind::Processed {
            self.at("before-ack", 1);
        }
    }
}
