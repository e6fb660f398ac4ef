//! Dead letters in the database, for operators.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::{RecordId, StoreError, Timestamp};
use oncegate_inbox::{ConsumerName, DeadLetter, DeadReason, HandlerError, Message};
use oncegate_postgres::sqlx::postgres::{PgConnection, PgPool, PgRow};
use oncegate_postgres::sqlx::{self, Row as _};
use oncegate_postgres::transaction::{OpenTransaction, StatementError, TransactionConnection, begin};
use oncegate_postgres::{Isolation, TransactFnWith};

use crate::inbox::PATIENCE;
use crate::receipts::{Receipts, alone, refused};

const LIST: &str = "SELECT d.* FROM oncegate.list_dead_letters($1, $2, $3) AS d";
const TAKE: &str = "SELECT d.*, txid_current_if_assigned() AS transaction \
     FROM oncegate.take_dead_letter($1) AS d";
const TRANSACTION: &str = "SELECT txid_current_if_assigned()";
const DELETE: &str = "SELECT oncegate.delete_dead_letter($1) AS was_there";

/// The dead letters of all [`TransactionalInbox`](crate::TransactionalInbox)es of a database.
#[derive(Clone)]
pub struct DeadLetterTable {
    pool: PgPool,
    patience: Duration,
    transaction_pooler: bool,
}

/// A dead letter that is in the table.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoredDeadLetter {
    /// What it is told by here.
    pub number: u64,
    /// When it was written.
    pub written_at: Timestamp,
    /// The letter.
    pub dead_letter: DeadLetter,
}

/// A letter that is out, if its transaction commits.
pub(crate) struct Taken {
    /// Where the receipt of its message is.
    pub(crate) id: Vec<u8>,
    pub(crate) consumer: String,
    pub(crate) message: Arc<Message>,
}

impl DeadLetterTable {
    /// The table in the database of this pool.
    #[must_use]
    pub const fn new(pool: PgPool) -> Self {
        Self { pool, patience: PATIENCE, transaction_pooler: false }
    }

    pub(crate) fn of(receipts: &Receipts) -> Self {
        let Receipts { pool, patience, transaction_pooler, .. } = receipts;
        Self { pool: pool.clone(), patience: *patience, transaction_pooler: *transaction_pooler }
    }

    /// The pool goes through a pooler that gives each transaction another session.
    #[must_use]
    pub fn with_transaction_pooler(self, through_pooler: bool) -> Self {
        Self { transaction_pooler: through_pooler, ..self }
    }

    /// Letters in the order in which they were written, after the one with this number: of one consumer, or of all; at most so
    /// many, 1000, and 8 MiB. There are no more where there is none.
    ///
    /// # Errors
    /// [`StoreError`] where the database is out of reach or refuses.
    pub async fn list(
        &self,
        consumer: Option<&ConsumerName>,
        after: Option<u64>,
        most: usize,
    ) -> Result<Vec<StoredDeadLetter>, StoreError> {
        let query = sqlx::query(LIST)
            .persistent(!self.transaction_pooler)
            .bind(consumer.map(ToString::to_string))
            .bind(after.map(to_bigint))
            .bind(i32::try_from(most).unwrap_or(i32::MAX));
        let rows = alone(&self.pool, self.patience, self.transaction_pooler, async |connection| {
            query.fetch_all(connection).await
        });
        rows.await?.iter().map(|row| kept(row).map_err(refused)).collect()
    }

    /// Takes a letter out: runs `run`, which sends the message again, or keeps it elsewhere, and then commits. To process it in
    /// place is [`TransactionalInbox::process_dead_letter`](crate::TransactionalInbox::process_dead_letter). Says whether there was such a
    /// letter. Until the commit every consumer is told that the message is in flight. Where `run` fails, passes over a
    /// statement of its own that failed, or the process ends, the letter is still there; the message may have been sent all
    /// the same, and is dead as before.
    ///
    /// Send it under its identity. A broker that drops what it has seen (the window of NATS, a FIFO queue of SQS) drops
    /// it within that time if its publisher's identifier is the same, too.
    ///
    /// # Errors
    /// What `run` says; an error of the database.
    pub async fn take<T, F>(&self, number: u64, run: F) -> Result<Option<T>, HandlerError>
    where
        T: Send,
        F: for<'c> RunWith<&'c mut PgConnection, Arc<Message>, T, HandlerError, Fut: Send> + Send,
    {
        let run =
            async move |connection: &mut PgConnection, taken: Taken| run(connection, taken.message).await;
        self.take_with(number, None, run).await
    }

    /// The same with what tells the letter's message, in a transaction of this isolation.
    pub(crate) async fn take_with<T, F>(
        &self,
        number: u64,
        isolation: Option<Isolation>,
        run: F,
    ) -> Result<Option<T>, HandlerError>
    where
        T: Send,
        F: for<'c> RunWith<&'c mut PgConnection, Taken, T, HandlerError, Fut: Send> + Send,
    {
        let unavailable = |error: StepError| HandlerError::retry(StoreError::from(error));
        let mut held = Held::acquire(&self.pool).await.map_err(unavailable)?;
        let mut open = held.begin(begin(isolation), self.patience).await.map_err(unavailable)?;
        let query = sqlx::query(TAKE).persistent(!self.transaction_pooler).bind(to_bigint(number));
        let row = open.step(self.patience, async |connection| query.fetch_optional(connection).await).await;
        let taken = match row {
            Ok(None) => Ok(None),
            Ok(Some(row)) => taken(&row).map(Some).map_err(|error| HandlerError::retry(refused(error))),
            Err(error) => Err(unavailable(error)),
        };
        let done = match taken {
            Ok(Some((transaction, taken))) => match run(open.connection(), taken).await {
                // A COMMIT after a statement that failed says that all is well, and rolls back.
                Ok(done) => self.is_still(&mut open, transaction).await.map(|()| Some(done)),
                Err(failure) => Err(failure),
            },
            Ok(None) => Ok(None),
            Err(failure) => Err(failure),
        };
        if !matches!(done, Ok(Some(_))) {
            open.rollback(self.patience).await;
            return done;
        }
        open.commit(self.patience).await.map_err(unavailable)?;
        done
    }

    /// Whether this transaction is still the one with that number, and may commit.
    async fn is_still(&self, open: &mut Open<'_>, transaction: i64) -> Result<(), HandlerError> {
        let query = sqlx::query_scalar(TRANSACTION).persistent(!self.transaction_pooler);
        let now = open.step(self.patience, async |connection| query.fetch_one(connection).await).await;
        let now: Option<i64> = now.map_err(|error| HandlerError::retry(StoreError::from(error)))?;
        if now == Some(transaction) {
            return Ok(());
        }
        Err(HandlerError::unsure("what was run ended the transaction itself"))
    }

    /// Deletes a letter. Says whether there was one. Its message stays dead for as long as its receipt is kept.
    ///
    /// # Errors
    /// [`StoreError`] where the database is out of reach or refuses.
    pub async fn delete(&self, number: u64) -> Result<bool, StoreError> {
        let query = sqlx::query(DELETE).persistent(!self.transaction_pooler).bind(to_bigint(number));
        let row = alone(&self.pool, self.patience, self.transaction_pooler, async |connection| {
            query.fetch_one(connection).await
        });
        row.await?.try_get("was_there").map_err(refused)
    }
}

fn to_bigint(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn kept(row: &PgRow) -> Result<StoredDeadLetter, sqlx::Error> {
    let strange = |what: &str| sqlx::Error::Decode(what.into());
    let unsigned = |column: &str| row.try_get::<i64, _>(column).map(i64::unsigned_abs);
    let id: Vec<u8> = row.try_get("id")?;
    let id: [u8; 32] = id.try_into().map_err(|_| strange("an identifier without 32 octets"))?;
    let consumer: &str = row.try_get("consumer")?;
    let reason: &str = row.try_get("reason")?;
    let attempts: i32 = row.try_get("attempts")?;
    Ok(StoredDeadLetter {
        number: unsigned("number")?,
        written_at: Timestamp::from_millis(unsigned("at")?),
        dead_letter: DeadLetter::new(
            RecordId::from_bytes(id),
            ConsumerName::new(consumer).map_err(|_| strange("no name of a consumer"))?,
            Arc::new(message(row)?),
            // Other programs have words of their own.
            DeadReason::from_word(reason).unwrap_or(DeadReason::Rejected),
            attempts.unsigned_abs(),
            row.try_get("error")?,
        ),
    })
}

fn taken(row: &PgRow) -> Result<(i64, Taken), sqlx::Error> {
    let taken = Taken {
        id: row.try_get("id")?,
        consumer: row.try_get("consumer")?,
        message: Arc::new(message(row)?),
    };
    Ok((row.try_get("transaction")?, taken))
}

fn message(row: &PgRow) -> Result<Message, sqlx::Error> {
    let names: Vec<String> = row.try_get("header_names")?;
    let values: Vec<Vec<u8>> = row.try_get("header_values")?;
    let payload: Vec<u8> = row.try_get("payload")?;
    let mut message = Message::new(row.try_get::<String, _>("topic")?, payload);
    message.headers = names.into_iter().zip(values.into_iter().map(Bytes::from)).collect();
    message.broker_id = row.try_get("broker_id")?;
    message.order_key = row.try_get::<Option<Vec<u8>>, _>("order_key")?.map(Bytes::from);
    Ok(message)
}

impl fmt::Debug for DeadLetterTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeadLetterTable").finish_non_exhaustive()
    }
}
