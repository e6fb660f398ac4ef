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
use oncegate_seal::{
    DeadLetterPlace, Keyring, SealError, SealKeys, open_dead_letter, open_dead_letter_error,
};

use crate::inbox::STATEMENT_TIMEOUT;
use crate::receipts::{Receipts, alone, refused};

const LIST: &str = "SELECT d.* FROM oncegate.list_dead_letters($1, $2, $3) AS d";
const TAKE: &str = "SELECT d.*, txid_current_if_assigned() AS transaction \
     FROM oncegate.take_dead_letter($1) AS d";
const TRANSACTION: &str = "SELECT txid_current_if_assigned()";
const DELETE: &str = "SELECT oncegate.delete_dead_letter($1) AS was_there";

/// The dead letters of every [`TransactionalInbox`](crate::TransactionalInbox) of a database.
#[derive(Clone)]
pub struct DeadLetterTable {
    pool: PgPool,
    statement_timeout: Duration,
    transaction_pooler: bool,
    keys: SealKeys,
}

/// A dead letter in the table.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoredDeadLetter {
    /// The number of the row.
    pub number: u64,
    /// The time at which it was written.
    pub written_at: Timestamp,
    /// The dead letter. If it could not be opened, its error is empty, its payload is in the sealed form, and its headers have no
    /// values.
    pub dead_letter: DeadLetter,
    /// The reason why it could not be opened.
    pub refused: Option<SealError>,
}

/// A dead letter that was taken out, if its transaction commits.
pub(crate) struct TakenDeadLetter {
    /// The receipt of the message.
    pub(crate) id: Vec<u8>,
    pub(crate) consumer: String,
    pub(crate) message: Arc<Message>,
}

impl DeadLetterTable {
    /// Opens the table in the database of a pool.
    #[must_use]
    pub fn new(pool: PgPool) -> Self {
        let keys = SealKeys::default();
        Self { pool, statement_timeout: STATEMENT_TIMEOUT, transaction_pooler: false, keys }
    }

    pub(crate) fn of(receipts: &Receipts) -> Self {
        let Receipts { pool, statement_timeout, transaction_pooler, keys, .. } = receipts;
        Self {
            pool: pool.clone(),
            statement_timeout: *statement_timeout,
            transaction_pooler: *transaction_pooler,
            keys: keys.clone(),
        }
    }

    /// Sets the keys that open sealed dead letters.
    #[must_use]
    pub fn with_seal_keys(self, keys: impl Into<SealKeys>) -> Self {
        Self { keys: keys.into(), ..self }
    }

    /// States that the pool goes through a pooler that gives each transaction another session.
    #[must_use]
    pub fn with_transaction_pooler(self, through_pooler: bool) -> Self {
        Self { transaction_pooler: through_pooler, ..self }
    }

    /// Returns dead letters of one consumer or of all, in the order in which they were written, after a given number.
    ///
    /// A page has at most `most` entries, 1000 entries, and 8 MiB. An empty page is the end.
    ///
    /// # Errors
    /// [`StoreError`] if the database is out of reach or refuses.
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
        let rows = alone(&self.pool, self.statement_timeout, self.transaction_pooler, async |connection| {
            query.fetch_all(connection).await
        });
        let keys = self.keys.get();
        rows.await?.iter().map(|row| kept(row, &keys).map_err(refused)).collect()
    }

    /// Takes a dead letter out: runs `run`, for example to send the message again, and then commits.
    ///
    /// Returns `None` if there is no such dead letter. To process the message in place, use
    /// [`TransactionalInbox::process_dead_letter`](crate::TransactionalInbox::process_dead_letter). Until the commit
    /// the message is in flight for every consumer. If `run` fails, if it ignores an error of one of its own
    /// statements, or if the process ends, the dead letter stays and the message is dead as before. It may have been
    /// sent anyway.
    ///
    /// Send the message under its identity. A broker with a deduplication window drops a message whose broker
    /// identifier it knows from that window.
    ///
    /// # Errors
    /// The error of `run`, or a database error.
    pub async fn take<T, F>(&self, number: u64, run: F) -> Result<Option<T>, HandlerError>
    where
        T: Send,
        F: for<'c> TransactFnWith<&'c mut PgConnection, Arc<Message>, T, HandlerError, Fut: Send> + Send,
    {
        let run = async move |connection: &mut PgConnection, taken: TakenDeadLetter| {
            run(connection, taken.message).await
        };
        self.take_with(number, None, run).await
    }

    /// Takes a dead letter out in a transaction with this isolation, and passes the receipt to `run`.
    pub(crate) async fn take_with<T, F>(
        &self,
        number: u64,
        isolation: Option<Isolation>,
        run: F,
    ) -> Result<Option<T>, HandlerError>
    where
        T: Send,
        F: for<'c> TransactFnWith<&'c mut PgConnection, TakenDeadLetter, T, HandlerError, Fut: Send> + Send,
    {
        let unavailable = |error: StatementError| HandlerError::retry(StoreError::from(error));
        let mut held = TransactionConnection::acquire(&self.pool).await.map_err(unavailable)?;
        let mut open = held.begin(begin(isolation), self.statement_timeout).await.map_err(unavailable)?;
        let query = sqlx::query(TAKE).persistent(!self.transaction_pooler).bind(to_bigint(number));
        let row = open
            .statement(self.statement_timeout, async |connection| query.fetch_optional(connection).await)
            .await;
        let taken = match row {
            Ok(None) => Ok(None),
            Ok(Some(row)) => taken(&row, &self.keys.get()).map(Some),
            Err(error) => Err(unavailable(error)),
        };
        let done = match taken {
            Ok(Some((transaction, taken))) => match run(open.connection(), taken).await {
                // After a failed statement, COMMIT reports success and rolls back. So check that the transaction is
                // intact.
                Ok(done) => self.is_still(&mut open, transaction).await.map(|()| Some(done)),
                Err(failure) => Err(failure),
            },
            Ok(None) => Ok(None),
            Err(failure) => Err(failure),
        };
        if !matches!(done, Ok(Some(_))) {
            open.rollback(self.statement_timeout).await;
            return done;
        }
        open.commit(self.statement_timeout).await.map_err(unavailable)?;
        done
    }

    /// Checks that the session is still in the transaction with this number.
    async fn is_still(&self, open: &mut OpenTransaction<'_>, transaction: i64) -> Result<(), HandlerError> {
        let query = sqlx::query_scalar(TRANSACTION).persistent(!self.transaction_pooler);
        let now = open
            .statement(self.statement_timeout, async |connection| query.fetch_one(connection).await)
            .await;
        let now: Option<i64> = now.map_err(|error| HandlerError::retry(StoreError::from(error)))?;
        if now == Some(transaction) {
            return Ok(());
        }
        Err(HandlerError::unsure("the function ended the transaction itself"))
    }

    /// Deletes a dead letter, and returns `false` if there was none. Its message stays dead as long as its receipt is
    /// kept.
    ///
    /// # Errors
    /// [`StoreError`] if the database is out of reach or refuses.
    pub async fn delete(&self, number: u64) -> Result<bool, StoreError> {
        let query = sqlx::query(DELETE).persistent(!self.transaction_pooler).bind(to_bigint(number));
        let row = alone(&self.pool, self.statement_timeout, self.transaction_pooler, async |connection| {
            query.fetch_one(connection).await
        });
        row.await?.try_get("was_there").map_err(refused)
    }
}

fn to_bigint(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn kept(row: &PgRow, keys: &Keyring) -> Result<StoredDeadLetter, sqlx::Error> {
    let strange = |what: &str| sqlx::Error::Decode(what.into());
    let unsigned = |column: &str| row.try_get::<i64, _>(column).map(i64::unsigned_abs);
    let id: Vec<u8> = row.try_get("id")?;
    let id: [u8; 32] = id.try_into().map_err(|_| strange("an identifier that does not have 32 bytes"))?;
    let consumer: &str = row.try_get("consumer")?;
    let reason: &str = row.try_get("reason")?;
    let attempts: i32 = row.try_get("attempts")?;
    let (mut message, mut error, mut refused) = (message(row)?, row.try_get("error")?, None);
    if let Err(why) = open(RecordId::from_bytes(id), consumer, &mut message, Some(&mut error), keys) {
        error = String::new();
        refused = Some(why);
    }
    Ok(StoredDeadLetter {
        number: unsigned("number")?,
        written_at: Timestamp::from_millis(unsigned("at")?),
        dead_letter: DeadLetter::new(
            RecordId::from_bytes(id),
            ConsumerName::new(consumer).map_err(|_| strange("an invalid consumer name"))?,
            Arc::new(message),
            // Programs in other languages may use other words.
            DeadReason::from_word(reason).unwrap_or(DeadReason::Rejected),
            attempts.unsigned_abs(),
            error,
        ),
        refused,
    })
}

/// Reads a dead letter that was taken out. If it cannot be opened, the transaction is rolled back, and the dead letter stays.
fn taken(row: &PgRow, keys: &Keyring) -> Result<(i64, TakenDeadLetter), HandlerError> {
    let read = || {
        let (id, consumer): (Vec<u8>, String) = (row.try_get("id")?, row.try_get("consumer")?);
        Ok((id, consumer, message(row)?, row.try_get("transaction")?))
    };
    let (id, consumer, mut message, transaction) =
        read().map_err(|error| HandlerError::retry(refused(error)))?;
    // An identifier of another length has no seal that fits.
    let place = <[u8; 32]>::try_from(&*id).map_or(RecordId::from_bytes([0; 32]), RecordId::from_bytes);
    open(place, &consumer, &mut message, None, keys)
        .map_err(|why| HandlerError::retry(StoreError::from(why)))?;
    Ok((transaction, TakenDeadLetter { id, consumer, message: Arc::new(message) }))
}

/// Opens the content and the error of a dead letter, if they are sealed.
fn open(
    id: RecordId,
    consumer: &str,
    message: &mut Message,
    error: Option<&mut String>,
    keys: &Keyring,
) -> Result<(), SealError> {
    let names: Vec<&str> = message.headers.iter().map(|(name, _)| name.as_str()).collect();
    let place = DeadLetterPlace { id, consumer, topic: &message.topic };
    let Some(content) = open_dead_letter(&place, &names, &message.payload, keys)? else { return Ok(()) };
    if let Some(error) = error
        && let Some(opened) = open_dead_letter_error(&place, error, keys)?
    {
        *error = opened;
    }
    message.payload = content.payload;
    for ((_, value), opened) in message.headers.iter_mut().zip(content.header_values) {
        *value = opened;
    }
    Ok(())
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
