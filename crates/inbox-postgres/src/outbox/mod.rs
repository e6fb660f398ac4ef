//! The outbox: messages that are written in the business transaction, and published after its commit.

mod event;
mod relay;
mod table;

use oncegate_core::StoreErrorKind;
use oncegate_inbox::{DeadLetter, DeadLetterSink, Outgoing, PublishError, PutFuture};
use oncegate_postgres::sqlx::postgres::{PgConnection, PgPool};
use oncegate_postgres::sqlx::{self, Error, Row as _};

pub use self::event::{RelayCounts, RelayEvent, RelayEventKind, RelayObserver};
pub use self::relay::{OnRefused, Relay, RelayWaker};
use crate::inbox::STATEMENT_TIMEOUT;
use crate::receipts::alone;

/// Writes messages in the business transaction: they are published if it commits, and only then.
///
/// A [`Relay`] publishes them. Sending inserts a row. It waits for no other transaction, and no other transaction waits
/// for it. The database must have the schema, and the role needs the right to execute `oncegate.send`.
///
/// Messages of one topic with one [`order_key`](Outgoing::order_key) are published in the order of their transactions,
/// if each transaction sends after the one before it has committed. This is the case if both lock the row that they
/// change before they send. Concurrent transactions without such a lock have no order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outbox {
    transaction_pooler: bool,
}

/// The state of an outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutboxStatus {
    /// The number of messages that are not confirmed yet.
    pub waiting: u64,
    /// The age of the oldest waiting message in milliseconds.
    pub oldest_ms: Option<u64>,
    /// The number of waiting messages with a failed attempt.
    pub failing: u64,
    /// The number of messages that the broker refused.
    pub refused: u64,
}

impl Outbox {
    /// Creates an outbox for connections that keep their session.
    #[must_use]
    pub const fn new() -> Self {
        Self { transaction_pooler: false }
    }

    /// Sets whether connections go through a pooler that gives each transaction another session.
    ///
    /// Statements are then not kept prepared, which costs a round trip.
    #[must_use]
    pub const fn with_transaction_pooler(mut self, through_pooler: bool) -> Self {
        self.transaction_pooler = through_pooler;
        self
    }

    /// Writes a message in the current transaction of the connection, and returns its identifier.
    ///
    /// This is the message's own identifier or, if it is empty, a new UUID of version 7. Two messages with one
    /// identifier are two rows. Both are published, and consumers treat them as one message.
    ///
    /// # Errors
    /// Database errors; roll back then. SQLSTATE 22023 if the message exceeds a limit: a topic of 1 to 1024 bytes, an
    /// order key of 1024 bytes, a payload of 64 MiB, 1000 headers, and 1 MiB of headers.
    pub async fn send(&self, connection: &mut PgConnection, message: &Outgoing) -> Result<String, Error> {
        let names: Vec<&str> = message.headers.iter().map(|(name, _)| name.as_str()).collect();
        let values: Vec<&[u8]> = message.headers.iter().map(|(_, value)| &**value).collect();
        let row = sqlx::query("SELECT oncegate.send($1, $2, $3, $4, $5, $6)")
            .persistent(!self.transaction_pooler)
            .bind(&message.topic)
            .bind(&*message.payload)
            .bind(message.order_key.as_deref())
            .bind(names)
            .bind(values)
            .bind(Some(message.id.as_str()).filter(|id| !id.is_empty()))
            .fetch_one(connection)
            .await?;
        row.try_get(0)
    }

    /// Returns the state of the outbox. It counts rows, which takes time if very many messages wait.
    ///
    /// # Errors
    /// Database errors.
    pub async fn status(&self, connection: &mut PgConnection) -> Result<OutboxStatus, Error> {
        let row = sqlx::query("SELECT waiting, oldest_ms, failing, refused FROM oncegate.outbox_status()")
            .persistent(!self.transaction_pooler)
            .fetch_one(connection)
            .await?;
        // Counts and ages are never negative.
        let number = |column| row.try_get::<i64, _>(column).map(i64::unsigned_abs);
        Ok(OutboxStatus {
            waiting: number("waiting")?,
            oldest_ms: row.try_get::<Option<i64>, _>("oldest_ms")?.map(i64::unsigned_abs),
            failing: number("failing")?,
            refused: number("refused")?,
        })
    }
}

/// A sink that writes dead letters to an outbox: they are durable with the database, and its relay publishes them.
///
/// A broker that is down does not delay a consumer that gives up a message. A dead letter that is written twice has one
/// identifier.
#[derive(Clone, Debug)]
pub struct OutboxDeadLetters {
    outbox: Outbox,
    pool: PgPool,
    topic: String,
}

impl OutboxDeadLetters {
    /// Creates a sink for the outbox of a database, with the topic for dead letters.
    #[must_use]
    pub fn new(pool: PgPool, topic: impl Into<String>) -> Self {
        Self { outbox: Outbox::new(), pool, topic: topic.into() }
    }

    /// Sets the options of the outbox.
    #[must_use]
    pub const fn with_outbox(mut self, outbox: Outbox) -> Self {
        self.outbox = outbox;
        self
    }

    /// Writes a dead letter in the current transaction of the connection.
    ///
    /// # Errors
    /// As [`Outbox::send`].
    pub async fn put_in(&self, connection: &mut PgConnection, letter: &DeadLetter) -> Result<(), Error> {
        self.outbox.send(connection, &letter.to_outgoing(&self.topic)).await.map(drop)
    }
}

impl DeadLetterSink for OutboxDeadLetters {
    fn put<'a>(&'a self, letter: &'a DeadLetter) -> PutFuture<'a> {
        Box::pin(async move {
            let written =
                alone(&self.pool, STATEMENT_TIMEOUT, self.outbox.transaction_pooler, async |connection| {
                    self.put_in(connection, letter).await
                });
            written.await.map_err(|error| match error.kind() {
                StoreErrorKind::Invalid => PublishError::refused(error),
                _ => PublishError::unconfirmed(error),
            })
        })
    }
}
