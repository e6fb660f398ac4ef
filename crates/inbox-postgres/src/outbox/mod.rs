//! Messages that are written in the business transaction, and published after it.

mod event;
mod lines;
mod relay;

use oncegate_core::StoreErrorKind;
use oncegate_inbox::{DeadLetter, DeadLetterSink, Outgoing, PublishError, PutFuture};
use oncegate_postgres::sqlx::postgres::{PgConnection, PgPool};
use oncegate_postgres::sqlx::{self, Error, Row as _};

pub use self::event::{RelayCounts, RelayEvent, RelayEventKind, RelayObserver};
pub use self::relay::{OnRefused, Relay, RelayWaker};
use crate::inbox::PATIENCE;
use crate::receipts::alone;

/// Writes messages into the transaction that they are about: they are published if it commits, and not if it does not.
///
/// A [`Relay`] publishes them. To send is to insert a row; it waits for nobody, and no other transaction waits for it.
/// The connection's database must have the contract, and its role the right to execute `oncegate.send`.
///
/// Messages of one topic with one [`order_key`](Outgoing::order_key) are published in the order in which they were sent by
/// transactions that ran one after the other: the later one sent after the earlier one had committed. So it is where both
/// lock the row that they change before they send. Transactions that ran at the same time without any such lock have no
/// order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outbox {
    transaction_pooler: bool,
}

/// How an outbox stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutboxStatus {
    /// Messages that are not confirmed yet.
    pub waiting: u64,
    /// For how many milliseconds the oldest of them has waited.
    pub oldest_ms: Option<u64>,
    /// How many of them have failed before.
    pub failing: u64,
    /// Messages that the broker refused.
    pub refused: u64,
}

impl Outbox {
    /// On connections that keep their session.
    #[must_use]
    pub const fn new() -> Self {
        Self { transaction_pooler: false }
    }

    /// Whether connections go through a pooler that gives each transaction another session. No statement is kept prepared
    /// then, which costs a round trip.
    #[must_use]
    pub const fn with_transaction_pooler(mut self, through_pooler: bool) -> Self {
        self.transaction_pooler = through_pooler;
        self
    }

    /// Writes a message, in the transaction that the connection is in. Gives its identifier: the message's own or, where that
    /// is empty, a new one (a UUID of version 7).
    ///
    /// Two messages with one identifier are two rows, and are published as two messages that consumers take for one.
    ///
    /// # Errors Those of the database; the transaction is to be rolled back. SQLSTATE 22023 where the message is not as it
    /// must be: a topic of 1 to 1024 octets, an order key of 1024 octets, a payload of 64 MiB, 1000 headers, and 1 MiB of
    /// them at the most.
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

    /// How the outbox stands. It counts, which takes a while where very many messages wait.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn status(&self, connection: &mut PgConnection) -> Result<OutboxStatus, Error> {
        let row = sqlx::query("SELECT waiting, oldest_ms, failing, refused FROM oncegate.outbox_status()")
            .persistent(!self.transaction_pooler)
            .fetch_one(connection)
            .await?;
        // Counts and ages are not negative.
        let number = |column| row.try_get::<i64, _>(column).map(i64::unsigned_abs);
        Ok(OutboxStatus {
            waiting: number("waiting")?,
            oldest_ms: row.try_get::<Option<i64>, _>("oldest_ms")?.map(i64::unsigned_abs),
            failing: number("failing")?,
            refused: number("refused")?,
        })
    }
}

/// Dead letters are messages of an outbox: durable with the database, published by its relay.
///
/// A broker that is down then holds nobody up who has a message to give up. What is written twice has one identifier.
#[derive(Clone, Debug)]
pub struct OutboxDeadLetters {
    outbox: Outbox,
    pool: PgPool,
    topic: String,
}

impl OutboxDeadLetters {
    /// In the outbox of this database, to that topic.
    #[must_use]
    pub fn new(pool: PgPool, topic: impl Into<String>) -> Self {
        Self { outbox: Outbox::new(), pool, topic: topic.into() }
    }

    /// With the options of this outbox.
    #[must_use]
    pub const fn with_outbox(mut self, outbox: Outbox) -> Self {
        self.outbox = outbox;
        self
    }

    /// Writes a letter in the transaction that the connection is in, such as the one that says that its message is given up.
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
            let written = alone(&self.pool, PATIENCE, self.outbox.transaction_pooler, async |connection| {
                self.put_in(connection, letter).await
            });
            written.await.map_err(|error| match error.kind() {
                StoreErrorKind::Invalid => PublishError::refused(error),
                _ => PublishError::unconfirmed(error),
            })
        })
    }
}
