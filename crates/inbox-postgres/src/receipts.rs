//! The calls of the SQL functions, and their replies.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use oncegate_core::{ErrorChain, RecordId, StoreError};
use oncegate_inbox::{DeadLetter, DeadReason, HandlerError, MAX_ERROR_BYTES};
use oncegate_postgres::sqlx::postgres::{PgArguments, PgConnection, PgPool, PgRow};
use oncegate_postgres::sqlx::query::Query;
use oncegate_postgres::sqlx::{self, Connection as _, Postgres, Row as _};
use oncegate_postgres::transaction::{Backoff, OpenTransaction, StatementError, TransactionConnection};
use oncegate_seal::{DeadLetterPlace, Keyring, SealKeys, seal_dead_letter, seal_dead_letter_error};
use tokio::time::timeout;
use tracing::debug;

/// The interval at which expired receipts are removed.
const PURGE_EVERY: Duration = Duration::from_secs(60);

/// The number of receipts that one call removes.
const PURGE_BATCH: i32 = 1000;

const RECEIVE: &str = "SELECT r.outcome, r.attempts, r.reason, r.at, txid_current_if_assigned() AS transaction \
     FROM oncegate.receive_many($1, $2, $3) AS r";

/// `synchronous_commit` is off because losing such a count in a server crash does no harm.
const BEGIN: &str = "SELECT b.outcome, b.attempts, b.reason, set_config('synchronous_commit', 'off', true) \
     FROM oncegate.begin_messages($1, $2, $3) AS b";

const NOT_BEGUN: &str = "SELECT oncegate.unbegin_message(u.id, $2) FROM unnest($1::bytea[]) AS u (id)";

const FAILED: &str =
    "SELECT f.outcome, f.attempts, NULL::text AS reason FROM oncegate.fail_message($1, $2) AS f";

const DEAD: &str = "SELECT d.outcome, 0 AS attempts, d.known_reason AS reason \
     FROM oncegate.write_dead_letter($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14) AS d";

const MISSING: &str = "SELECT string_agg('oncegate.' || a.name, ', ') AS missing FROM unnest($1::text[]) AS a (name) \
     WHERE NOT EXISTS (SELECT FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace \
     WHERE n.nspname = 'oncegate' AND p.proname = a.name AND has_function_privilege(p.oid, 'EXECUTE') \
     AND has_schema_privilege(n.oid, 'USAGE'))";

const PURGE: &str = "SELECT oncegate.purge_receipts($1) AS purged";

/// The receipts in the database of a pool.
#[derive(Clone)]
pub(crate) struct Receipts {
    pub(crate) pool: PgPool,
    pub(crate) retention: Duration,
    pub(crate) statement_timeout: Duration,
    pub(crate) transaction_pooler: bool,
    pub(crate) purges: bool,
    /// The keys that seal dead letters. Without keys they are stored in clear.
    pub(crate) keys: SealKeys,
    /// A random number of this process. Started messages are recorded under it.
    by: i64,
    /// The time of the last purge in milliseconds after `since`; 0 means never.
    purged: Arc<AtomicU64>,
    since: Instant,
}

/// The reply of the database about a message.
#[derive(Clone, Debug)]
pub(crate) struct ReceiptState {
    pub(crate) status: ReceiptStatus,
    /// The number of attempts that failed before.
    pub(crate) attempts: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReceiptStatus {
    New,
    /// The message must be recorded as started in a call of its own.
    BeginSeparately,
    Processed,
    InFlight,
    Dead(DeadReason),
    IdentityReused,
    /// The failed attempt was counted.
    AttemptFailed,
    /// The dead letter was written.
    DeadLetterWritten,
    /// The message is not processed: the doubtful transaction did not commit it.
    NotCommitted,
}

/// The transaction that claimed messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClaimTransaction {
    /// The transaction number. After a server crash another transaction may get the same number.
    number: i64,
    /// The time of the claim by the server's clock, in milliseconds. It identifies the receipts of this transaction.
    pub(crate) claimed_at: i64,
}

/// The receipt of a message.
#[derive(Clone, Debug)]
pub(crate) struct Receipt {
    pub(crate) id: RecordId,
    pub(crate) digest: Option<[u8; 32]>,
}

type Ask<'q> = Query<'q, Postgres, PgArguments>;

impl Receipts {
    pub(crate) fn new(pool: PgPool, retention: Duration, statement_timeout: Duration) -> Self {
        let mut by = [0; 8];
        // Without random numbers the time is good enough.
        if getrandom::fill(&mut by).is_err() {
            let now = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
            by = (now.as_nanos() as u64).to_ne_bytes();
        }
        Self {
            pool,
            retention,
            statement_timeout,
            transaction_pooler: false,
            purges: true,
            keys: SealKeys::default(),
            by: i64::from_ne_bytes(by),
            purged: Arc::new(AtomicU64::new(0)),
            since: Instant::now(),
        }
    }

    fn ask(&self, sql: &'static str) -> Ask<'static> {
        sqlx::query(sql).persistent(!self.transaction_pooler)
    }

    fn retention_ms(&self) -> i64 {
        i64::try_from(self.retention.as_millis()).unwrap_or(i64::MAX)
    }

    /// Claims messages in this transaction. Also returns the transaction if it wrote anything.
    pub(crate) async fn receive(
        &self,
        open: &mut OpenTransaction<'_>,
        receipts: &[Receipt],
    ) -> Result<(Vec<ReceiptState>, Option<ClaimTransaction>), StatementError> {
        let ids: Vec<Vec<u8>> = receipts.iter().map(|receipt| receipt.id.as_bytes().to_vec()).collect();
        let digests: Option<Vec<Vec<u8>>> =
            receipts.iter().map(|receipt| receipt.digest.map(|digest| digest.to_vec())).collect();
        let query = self.ask(RECEIVE).bind(ids).bind(self.retention_ms()).bind(digests);
        let rows = open
            .statement(self.statement_timeout, async |connection| query.fetch_all(connection).await)
            .await?;
        let transaction = match rows.first() {
            Some(row) => transaction(row).map_err(StatementError::Refused)?,
            None => None,
        };
        Ok((all(&rows, receipts.len()).map_err(StatementError::Refused)?, transaction))
    }

    /// Claims a message whose receipt was removed by the same transaction.
    pub(crate) async fn receive_again(
        &self,
        connection: &mut PgConnection,
        id: Vec<u8>,
        digest: Option<[u8; 32]>,
    ) -> Result<(), HandlerError> {
        let query = sqlx::query_scalar("SELECT outcome FROM oncegate.receive($1, $2, $3)")
            .persistent(!self.transaction_pooler)
            .bind(id)
            .bind(self.retention_ms())
            .bind(digest.map(|digest| digest.to_vec()));
        let outcome: String = timeout(self.statement_timeout, query.fetch_one(connection)).await??;
        if outcome == "process" {
            return Ok(());
        }
        Err(HandlerError::retry(format!("the message of the dead letter is {outcome} by now")))
    }

    /// Returns `true` if the session is still in that transaction, so that it may commit.
    pub(crate) async fn is_still(
        &self,
        open: &mut OpenTransaction<'_>,
        transaction: Option<ClaimTransaction>,
    ) -> Result<bool, StatementError> {
        let query = self.ask("SELECT txid_current_if_assigned() AS transaction");
        let row = open
            .statement(self.statement_timeout, async |connection| query.fetch_one(connection).await)
            .await?;
        let now: Option<i64> = row.try_get("transaction").map_err(StatementError::Refused)?;
        Ok(now.is_some() && now == transaction.map(|transaction| transaction.number))
    }

    /// Returns `true` if the transaction was committed, or may still be.
    ///
    /// Its own session is asked first, and another session if that one has ended. After a server crash the number may
    /// belong to another transaction. If no session can answer, the result is `false`.
    pub(crate) async fn may_be_committed(
        &self,
        mut held: TransactionConnection,
        transaction: ClaimTransaction,
    ) -> bool {
        const STATUS: &str = "SELECT txid_status($1) AS status";
        let ask = || self.ask(STATUS).bind(transaction.number);
        let query = ask();
        let mut said = held
            .statement(self.statement_timeout, async |connection| query.fetch_all(connection).await)
            .await;
        drop(held);
        let until = tokio::time::Instant::now() + self.statement_timeout;
        let mut pause = Backoff::new(Duration::from_millis(5), Duration::from_millis(250));
        loop {
            match said {
                Ok(rows) => {
                    let status = rows.first().and_then(|row| row.try_get("status").ok().flatten());
                    return matches!(status, Some("committed" | "in progress"));
                }
                // The server does not know the number: the transaction was lost in a crash.
                Err(StatementError::Refused(error)) if has_code(&error, "22023") => return false,
                Err(_) if tokio::time::Instant::now() >= until => return false,
                Err(_) => {}
            }
            pause.sleep(Some(until)).await;
            said = self.alone(ask()).await;
        }
    }

    /// Records that messages are started.
    pub(crate) async fn begin(&self, ids: Vec<Vec<u8>>) -> Result<Vec<ReceiptState>, StatementError> {
        let count = ids.len();
        let query = self.ask(BEGIN).bind(ids).bind(self.by).bind(self.retention_ms());
        let rows = self.alone(query).await?;
        all(&rows, count).map_err(StatementError::Refused)
    }

    /// Withdraws the record of a start for messages that did not run. If this fails, one attempt too many may be
    /// counted.
    pub(crate) async fn not_begun(&self, ids: &[RecordId]) {
        let ids: Vec<Vec<u8>> = ids.iter().map(|id| id.as_bytes().to_vec()).collect();
        let query = self.ask(NOT_BEGUN).bind(ids).bind(self.by);
        if let Err(error) = self.alone(query).await {
            debug!(error = %StoreError::from(error), "a message that did not run still counts as started");
        }
    }

    /// Checks that all functions that the inbox calls exist and may be called.
    pub(crate) async fn check(&self) -> Result<(), StoreError> {
        let mut names =
            vec!["receive_many", "begin_messages", "unbegin_message", "fail_message", "write_dead_letter"];
        names.extend(self.purges.then_some("purge_receipts"));
        check(
            &self.pool,
            self.statement_timeout,
            self.transaction_pooler,
            names,
            "docs/reference/messages-postgres.md",
        )
        .await
    }

    /// Counts a failed attempt.
    pub(crate) async fn failed(&self, id: RecordId) -> Result<ReceiptState, StoreError> {
        let query = self.ask(FAILED).bind(id.as_bytes().to_vec()).bind(self.retention_ms());
        one(&self.alone(query).await?)
    }

    /// Writes a dead letter, and marks its message as dead.
    ///
    /// `doubtful_at` is the time of a transaction whose result is in doubt. It limits the call to messages that this
    /// transaction processed.
    pub(crate) async fn dead(
        &self,
        receipt: &Receipt,
        letter: &DeadLetter,
        doubtful_at: Option<i64>,
    ) -> Result<ReceiptState, StoreError> {
        let DeadLetterColumns { names, values, payload, error, topic } =
            DeadLetterColumns::of(receipt.id, letter, &self.keys.get())?;
        let message = &letter.message;
        let query = self
            .ask(DEAD)
            .bind(receipt.id.as_bytes().to_vec())
            .bind(letter.consumer.to_string())
            .bind(letter.reason.as_str())
            .bind(i32::try_from(letter.attempts).unwrap_or(i32::MAX))
            .bind(error)
            .bind(topic)
            .bind(message.broker_id.as_deref().map(text))
            .bind(message.order_key.as_ref().map(|key| key.to_vec()))
            .bind(names)
            .bind(values)
            .bind(payload)
            .bind(self.retention_ms())
            .bind(receipt.digest.map(|digest| digest.to_vec()))
            .bind(doubtful_at);
        one(&self.alone(query).await?)
    }

    /// Runs one statement in a transaction of its own.
    async fn alone(&self, query: Ask<'_>) -> Result<Vec<PgRow>, StatementError> {
        try_alone(&self.pool, self.statement_timeout, self.transaction_pooler, async |connection| {
            query.fetch_all(connection).await
        })
        .await
    }

    /// Removes all expired receipts.
    pub(crate) async fn purge(&self) -> Result<u64, StoreError> {
        let mut purged = 0;
        loop {
            let rows = self.alone(self.ask(PURGE).bind(PURGE_BATCH)).await?;
            let gone: i32 = rows.first().map_or(Ok(0), |row| row.try_get("purged")).map_err(refused)?;
            purged += u64::from(gone.unsigned_abs());
            if gone < PURGE_BATCH {
                return Ok(purged);
            }
        }
    }

    /// Starts a purge in the background if it is due.
    pub(crate) fn purge_if_due(&self) {
        let now = u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX).max(1);
        let before = self.purged.load(Ordering::Relaxed);
        let every = u64::try_from(PURGE_EVERY.as_millis()).unwrap_or(u64::MAX);
        if !self.purges || before > 0 && now.saturating_sub(before) < every {
            return;
        }
        if self.purged.compare_exchange(before, now, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            let receipts = self.clone();
            tokio::spawn(async move {
                if let Err(error) = receipts.purge().await {
                    debug!(error = %ErrorChain(&error), "expired receipts were not removed; trying again");
                }
            });
        }
    }
}

/// Checks that functions exist and may be called.
pub(crate) async fn check(
    pool: &PgPool,
    statement_timeout: Duration,
    transaction_pooler: bool,
    names: Vec<&str>,
    page: &str,
) -> Result<(), StoreError> {
    let query = sqlx::query_scalar(MISSING).persistent(!transaction_pooler).bind(names);
    let ask = async |connection: &mut PgConnection| query.fetch_one(connection).await;
    let missing: Option<String> = alone(pool, statement_timeout, transaction_pooler, ask).await?;
    missing.map_or(Ok(()), |missing| {
        Err(StoreError::invalid(format!(
            "these functions are missing, or the role may not call them: {missing}; run `oncegate schema apply postgres`; \
             {page} has the grants"
        )))
    })
}

/// Runs one statement in a transaction of its own.
pub(crate) async fn alone<T>(
    pool: &PgPool,
    statement_timeout: Duration,
    transaction_pooler: bool,
    step: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
) -> Result<T, StoreError> {
    Ok(try_alone(pool, statement_timeout, transaction_pooler, step).await?)
}

/// Runs one statement, and returns the error of the server.
///
/// Behind a pooler it takes a BEGIN and a COMMIT, so that the statement runs in the session that prepared it.
async fn try_alone<T>(
    pool: &PgPool,
    statement_timeout: Duration,
    transaction_pooler: bool,
    step: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
) -> Result<T, StatementError> {
    let mut held = TransactionConnection::acquire(pool).await?;
    if !transaction_pooler {
        let done = held.statement(statement_timeout, step).await;
        if matches!(done, Err(StatementError::Refused(_))) {
            // The server reports the error before it releases the locks of the statement. The ping returns after they
            // are released.
            drop(held.statement(statement_timeout, async |connection| connection.ping().await).await);
        }
        return done;
    }
    let mut open = held.begin("BEGIN", statement_timeout).await?;
    match open.statement(statement_timeout, step).await {
        Ok(done) => {
            open.commit(statement_timeout).await?;
            Ok(done)
        }
        Err(error) => {
            open.rollback(statement_timeout).await;
            Err(error)
        }
    }
}

pub(crate) fn refused(error: sqlx::Error) -> StoreError {
    StatementError::Refused(error).into()
}

fn one(rows: &[PgRow]) -> Result<ReceiptState, StoreError> {
    let said = all(rows, 1).map_err(refused)?;
    said.into_iter().next().ok_or_else(|| refused(sqlx::Error::RowNotFound))
}

/// Reads the replies for `count` messages.
fn all(rows: &[PgRow], count: usize) -> Result<Vec<ReceiptState>, sqlx::Error> {
    if rows.len() != count {
        return Err(sqlx::Error::RowNotFound);
    }
    rows.iter().map(said).collect()
}

pub(crate) fn has_code(error: &sqlx::Error, code: &str) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|said| said == code)
}

fn transaction(row: &PgRow) -> Result<Option<ClaimTransaction>, sqlx::Error> {
    let number: Option<i64> = row.try_get("transaction")?;
    let claimed_at = row.try_get("at")?;
    Ok(number.map(|number| ClaimTransaction { number, claimed_at }))
}

fn said(row: &PgRow) -> Result<ReceiptState, sqlx::Error> {
    let outcome: &str = row.try_get("outcome")?;
    let attempts: i32 = row.try_get("attempts")?;
    let status = match outcome {
        "process" => ReceiptStatus::New,
        "alone" => ReceiptStatus::BeginSeparately,
        "processed" => ReceiptStatus::Processed,
        "in-flight" => ReceiptStatus::InFlight,
        "reused" => ReceiptStatus::IdentityReused,
        "failed" => ReceiptStatus::AttemptFailed,
        "written" => ReceiptStatus::DeadLetterWritten,
        "open" => ReceiptStatus::NotCommitted,
        "dead" => {
            let reason: Option<&str> = row.try_get("reason")?;
            // Programs in other languages may use other words.
            ReceiptStatus::Dead(reason.and_then(DeadReason::from_word).unwrap_or(DeadReason::Rejected))
        }
        _ => {
            return Err(sqlx::Error::Decode(
                "an outcome that this version of the program does not know".into(),
            ));
        }
    };
    Ok(ReceiptState { status, attempts: attempts.unsigned_abs() })
}

/// The columns of a dead letter that are sealed if there are keys, and those to which their seal is bound.
struct DeadLetterColumns {
    names: Vec<String>,
    values: Vec<Vec<u8>>,
    payload: Vec<u8>,
    error: String,
    topic: String,
}

impl DeadLetterColumns {
    fn of(id: RecordId, letter: &DeadLetter, keys: &Keyring) -> Result<Self, StoreError> {
        let message = &letter.message;
        let topic = text(&message.topic);
        let names: Vec<String> = message.headers.iter().map(|(name, _)| text(name)).collect();
        let values = message.headers.iter().map(|(_, value)| &value[..]);
        let headers: Vec<(&str, &[u8])> = names.iter().map(String::as_str).zip(values.clone()).collect();
        let place = DeadLetterPlace { id, consumer: letter.consumer.as_str(), topic: &topic };
        let sealed = seal_dead_letter(&place, &headers, &message.payload, keys)?;
        let (payload, values) = match sealed {
            Some(sealed) => (sealed, vec![Vec::new(); names.len()]),
            None => (message.payload.to_vec(), values.map(<[u8]>::to_vec).collect()),
        };
        // Its sealed form is twice as long, and the column has an end.
        let end = letter.error.floor_char_boundary(MAX_ERROR_BYTES);
        let error = letter.error.get(..end).unwrap_or_default();
        let error = seal_dead_letter_error(&place, error, keys)?.unwrap_or_else(|| text(&letter.error));
        Ok(Self { names, values, payload, error, topic })
    }
}

/// Replaces NUL characters, which PostgreSQL text cannot contain.
pub(crate) fn text(text: &str) -> String {
    text.replace('\0', "␀")
}
