//! The inbox whose receipts commit with their effects.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::limits;
use oncegate_engine::ConfigError;
use oncegate_inbox::{
    ConsumerName, DEFAULT_MAX_ATTEMPTS, HandlerError, Identity, Message, ProcessOutcome, Processor,
    SourceInfo,
};
use oncegate_postgres::sqlx::postgres::{PgConnection, PgPool};
use oncegate_postgres::{Isolation, TransactFnWith};
use oncegate_seal::SealKeys;

use crate::batch::digest;
use crate::dead_letters::{DeadLetterTable, TakenDeadLetter};
use crate::receipts::Receipts;
use crate::work::{PerMessage, WholeBatch, Work};

/// Processes each message once if its effect is rows in PostgreSQL: the receipt and the effect commit together.
///
/// Clones are cheap. The steps for each message or batch: begin a transaction; claim the messages, which writes their
/// receipts; run the handler on the same connection; commit; only then report that the broker may forget the messages.
/// So there is no lease to lose and nothing to clean up. After a crash at any point the message is delivered again, and
/// is either new or a duplicate. If the reply to a COMMIT is lost, the inbox finds out whether it succeeded. A message
/// that another transaction holds is reported as in flight at once, without waiting.
///
/// The database must have the schema ([`schema::apply`](oncegate_postgres::schema::apply)). The role of the pool needs
/// the rights in `docs/reference/messages-postgres.md`.
///
/// ```
/// use std::sync::Arc;
///
/// use oncegate_inbox_postgres::TransactionalInbox;
/// use oncegate_inbox::{ProcessOutcome, Identity, Message};
/// use oncegate_postgres::{PostgresOptions, schema, sqlx};
///
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = oncegate_servers::PostgresServer::start()?;
/// # let url = server.url();
/// schema::apply(&PostgresOptions::from_url(&url)?).await?;
/// let pool = sqlx::PgPool::connect(&url).await?;
/// # sqlx::query("CREATE TABLE invoices (order_number text)").execute(&pool).await?;
/// let inbox = TransactionalInbox::new(pool, "billing", Identity::header("event-id"))?;
///
/// let message = Message::new("orders", "order 17").with_header("event-id", "evt-1");
/// let handle = async || {
///     inbox.process(&message, async |connection, message| {
///         let order = std::str::from_utf8(&message.payload)?;
///         sqlx::query("INSERT INTO invoices VALUES ($1)").bind(order).execute(connection).await?;
///         Ok(())
///     }).await
/// };
/// assert!(matches!(handle().await, ProcessOutcome::Processed { attempts: 1 }));
/// assert!(matches!(handle().await, ProcessOutcome::Duplicate));
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct TransactionalInbox {
    inner: Arc<Inner>,
}

#[derive(Clone)]
pub(crate) struct Inner {
    pub(crate) receipts: Receipts,
    pub(crate) consumer: ConsumerName,
    pub(crate) identity: Identity,
    pub(crate) max_attempts: u32,
    pub(crate) compares_payloads: bool,
    pub(crate) max_runs: u32,
    pub(crate) isolation: Option<Isolation>,
    pub(crate) max_batch: usize,
}

/// The default retention of receipts.
const RETENTION: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// The minimum retention: longer than any search for the result of a COMMIT.
const MIN_RETENTION: Duration = Duration::from_secs(60 * 60);

/// The default and the maximum timeout of a statement.
pub(crate) const STATEMENT_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_STATEMENT_TIMEOUT: Duration = Duration::from_secs(10 * 60);

/// The default and the maximum number of messages in one transaction.
const BATCH: usize = 100;
const MAX_BATCH: usize = 1000;

impl TransactionalInbox {
    /// Creates an inbox for a consumer on the application's own pool. `identity` identifies the messages.
    ///
    /// Receipts are kept for 7 days, a message is tried 10 times, and a batch has at most 100 messages.
    ///
    /// # Errors
    /// [`ConfigError`] for an invalid [name](ConsumerName::new).
    pub fn new(
        pool: PgPool,
        consumer: impl TryInto<ConsumerName, Error: Into<ConfigError>>,
        identity: Identity,
    ) -> Result<Self, ConfigError> {
        let inner = Inner {
            receipts: Receipts::new(pool, RETENTION, STATEMENT_TIMEOUT),
            consumer: consumer.try_into().map_err(Into::into)?,
            identity,
            max_attempts: DEFAULT_MAX_ATTEMPTS,
            compares_payloads: false,
            max_runs: 5,
            isolation: None,
            max_batch: BATCH,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    fn with(mut self, change: impl FnOnce(&mut Inner)) -> Self {
        change(Arc::make_mut(&mut self.inner));
        self
    }

    /// Sets how long a processed message is remembered.
    ///
    /// It should be longer than the broker keeps messages, and longer than producers send them again.
    ///
    /// # Errors
    /// [`ConfigError`] if it is not from an hour to 400 days.
    pub fn with_retention(self, retention: Duration) -> Result<Self, ConfigError> {
        if !(MIN_RETENTION..=limits::MAX_RETENTION).contains(&retention) {
            return Err(ConfigError::new(format!(
                "the retention is {retention:?}; it must be from an hour to 400 days"
            )));
        }
        Ok(self.with(|inner| inner.receipts.retention = retention))
    }

    /// Sets how many attempts a message gets before it becomes a dead letter; at least 1.
    ///
    /// Attempts whose process ended in the middle count, too.
    ///
    /// # Errors
    /// [`ConfigError`] if it is zero.
    pub fn with_max_attempts(self, attempts: u32) -> Result<Self, ConfigError> {
        let attempts = ConfigError::check("the number of attempts", attempts, 1..=i32::MAX.unsigned_abs())?;
        Ok(self.with(|inner| inner.max_attempts = attempts))
    }

    /// Compares payloads: a message with a known identity and another payload becomes a dead letter, not a duplicate.
    ///
    /// Its reason is [`DeadReason::IdentityReused`](oncegate_inbox::DeadReason::IdentityReused). Off by default, because
    /// some producers serialize a message anew when they send it again. Each receipt takes 33 bytes more.
    #[must_use]
    pub fn with_payloads_compared(self, compares_payloads: bool) -> Self {
        self.with(|inner| inner.compares_payloads = compares_payloads)
    }

    /// Sets the timeout of the inbox's own statements, from 100 ms to 10 minutes. Default: 10 s.
    ///
    /// It also bounds the search for the result of a COMMIT whose reply was lost. Statements of the handler are
    /// bounded by the application's own `statement_timeout`.
    ///
    /// # Errors
    /// [`ConfigError`] if it is out of these bounds.
    pub fn with_statement_timeout(self, timeout: Duration) -> Result<Self, ConfigError> {
        let timeout =
            ConfigError::check("the statement timeout", timeout, limits::MIN_LEASE..=MAX_STATEMENT_TIMEOUT)?;
        Ok(self.with(|inner| inner.receipts.statement_timeout = timeout))
    }

    /// Sets how often the transaction of a single message runs, from 1 to 100. Default: 5.
    ///
    /// It runs again after a conflict (SQLSTATE 40001 and 40P01). After the last run the conflict counts as a failed
    /// attempt.
    ///
    /// # Errors
    /// [`ConfigError`] if it is out of these bounds.
    pub fn with_max_runs(self, runs: u32) -> Result<Self, ConfigError> {
        let runs = ConfigError::check("the number of runs", runs, 1..=100)?;
        Ok(self.with(|inner| inner.max_runs = runs))
    }

    /// Sets the isolation level of the transaction. Default: the level of the connection or the server.
    #[must_use]
    pub fn with_isolation(self, isolation: Isolation) -> Self {
        self.with(|inner| inner.isolation = Some(isolation))
    }

    /// States that the pool goes through a pooler that gives each transaction another session, for example PgBouncer.
    ///
    /// The inbox then prepares its statements without a name. Statements of the handler must use `.persistent(false)`.
    #[must_use]
    pub fn with_transaction_pooler(self, through_pooler: bool) -> Self {
        self.with(|inner| inner.receipts.transaction_pooler = through_pooler)
    }

    /// Sets how many messages are processed in one transaction, from 1 to 1000. Default: 100.
    ///
    /// Each message takes a place in the server's lock table until the transaction ends.
    ///
    /// # Errors
    /// [`ConfigError`] if it is out of these bounds.
    pub fn with_max_batch(self, messages: usize) -> Result<Self, ConfigError> {
        let messages = ConfigError::check("the size of a batch", messages, 1..=MAX_BATCH)?;
        Ok(self.with(|inner| inner.max_batch = messages))
    }

    /// Sets whether the inbox removes expired receipts, at first use and then once a minute. On by default.
    ///
    /// If it is off, call [`purge`](Self::purge) or `oncegate.purge_receipts`.
    #[must_use]
    pub fn with_purge(self, purges: bool) -> Self {
        self.with(|inner| inner.receipts.purges = purges)
    }

    /// Seals the header values, the payload and the error of dead letters with these keys, and opens them for
    /// [`process_dead_letter`](Self::process_dead_letter). Without keys, dead letters are in clear.
    ///
    /// `oncegate dead-letters` and a sidecar need the same keys to show them and to publish them again. Receipts, buffered
    /// events and the outbox stay in clear.
    #[must_use]
    pub fn with_seal_keys(self, keys: impl Into<SealKeys>) -> Self {
        self.with(|inner| inner.receipts.keys = keys.into())
    }

    /// Returns the consumer's name.
    #[must_use]
    pub fn consumer(&self) -> &ConsumerName {
        &self.inner.consumer
    }

    /// Checks that the database has the schema and that the role may call its functions. Call it when a program starts.
    ///
    /// If the check fails, each message is [`Unavailable`](ProcessOutcome::Unavailable) until the cause is removed.
    ///
    /// # Errors
    /// [`StoreError`](oncegate_core::StoreError) with the missing functions, or if the database is out of reach.
    pub async fn check(&self) -> Result<(), oncegate_core::StoreError> {
        self.inner.receipts.check().await
    }

    /// Processes a message in a transaction of its own, unless it was processed before or another transaction holds it.
    ///
    /// `run` is an async closure of the form `async |connection, message| { …; Ok(()) }`, and is cloned for each run.
    /// Its writes on the connection commit with the receipt. It must not commit or roll back by itself. It must have no
    /// effect elsewhere, because it runs again after a conflict. If it returns an error, everything is rolled back, and
    /// the attempt counts as failed. Dropping the future rolls back, too.
    pub async fn process<F>(&self, message: &Message, run: F) -> ProcessOutcome
    where
        F: for<'c> TransactFnWith<&'c mut PgConnection, &'c Message, (), HandlerError, Fut: Send>
            + Clone
            + Send
            + Sync,
    {
        let handled = self.inner.process(&[message], &PerMessage(run)).await;
        handled.into_iter().next().unwrap_or(ProcessOutcome::NotBegun)
    }

    /// Processes the message of a dead letter of this consumer, once.
    ///
    /// One transaction deletes the dead letter, writes the receipt and makes the effect. A copy that is delivered later
    /// is a duplicate. Returns the result of `run`, or `None` if there is no such dead letter. If `run` fails or the
    /// process ends, the dead letter stays.
    ///
    /// # Errors
    /// The error of `run`; a dead letter of another consumer; a dead letter that another transaction holds; a database
    /// error.
    pub async fn process_dead_letter<T, F>(&self, number: u64, run: F) -> Result<Option<T>, HandlerError>
    where
        T: Send,
        F: for<'c> TransactFnWith<&'c mut PgConnection, Arc<Message>, T, HandlerError, Fut: Send> + Send,
    {
        let inner = &self.inner;
        let process = async move |connection: &mut PgConnection, taken: TakenDeadLetter| {
            if taken.consumer != inner.consumer.as_str() {
                return Err(HandlerError::retry(format!(
                    "the dead letter belongs to the consumer {}",
                    taken.consumer
                )));
            }
            let digest = inner.compares_payloads.then(|| digest(&taken.message));
            inner.receipts.receive_again(connection, taken.id, digest).await?;
            run(connection, taken.message).await
        };
        DeadLetterTable::of(&inner.receipts).take_with(number, inner.isolation, process).await
    }

    /// Creates a processor for a consumer's loop with a handler of one message.
    ///
    /// The new messages of a batch share one transaction, and `run` is called for one after the other. Otherwise it
    /// behaves as [`batch_processor`](Self::batch_processor).
    pub fn processor<F>(self, run: F) -> TransactionalProcessor<PerMessage<F>>
    where
        F: for<'c> TransactFnWith<&'c mut PgConnection, &'c Message, (), HandlerError, Fut: Send>
            + Clone
            + Send
            + Sync
            + 'static,
    {
        TransactionalProcessor { inbox: self, work: PerMessage(run) }
    }

    /// Creates a processor for a consumer's loop with a handler of the whole batch.
    ///
    /// The new messages of a batch share one transaction. `run` gets all of them at once, for statements that write many rows.
    /// If it fails, everything is rolled back, and it runs again for each message alone, in order, as a list of one. After a
    /// message that is to be delivered again, later ones with its order key are [`NotBegun`](ProcessOutcome::NotBegun).
    ///
    /// A handler that commits by a statement of its own commits the receipts of the whole batch. If that is found out, all of
    /// these messages become dead letters with an unknown outcome.
    ///
    /// More messages than [`with_max_batch`](Self::with_max_batch) allows are processed as several batches.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use oncegate_inbox_postgres::TransactionalInbox;
    /// # use oncegate_inbox::{ProcessOutcome, Processor as _, Identity, Message};
    /// # use oncegate_postgres::{PostgresOptions, schema, sqlx};
    /// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let server = oncegate_servers::PostgresServer::start()?;
    /// # schema::apply(&PostgresOptions::from_url(&server.url())?).await?;
    /// # let pool = sqlx::PgPool::connect(&server.url()).await?;
    /// # sqlx::query("CREATE TABLE invoices (order_number text)").execute(&pool).await?;
    /// # let inbox = TransactionalInbox::new(pool, "billing", Identity::payload())?;
    /// let processor = inbox.batch_processor(async |connection, messages| {
    ///     let orders: Vec<_> = messages.iter().map(|m| String::from_utf8_lossy(&m.payload).into_owned()).collect();
    ///     sqlx::query("INSERT INTO invoices SELECT unnest($1::text[])").bind(orders).execute(connection).await?;
    ///     Ok(())
    /// });
    /// let messages = ["17", "18", "17"].map(|order| Arc::new(Message::new("orders", order)));
    /// let outcomes = processor.process(&messages).await;
    /// use ProcessOutcome::{Duplicate, Processed};
    /// assert!(matches!(outcomes[..], [Processed { .. }, Processed { .. }, Duplicate]));
    /// # Ok(()) }
    /// ```
    pub fn batch_processor<F>(self, run: F) -> TransactionalProcessor<WholeBatch<F>>
    where
        F: for<'c> TransactFnWith<&'c mut PgConnection, &'c [&'c Message], (), HandlerError, Fut: Send>
            + Clone
            + Send
            + Sync
            + 'static,
    {
        TransactionalProcessor { inbox: self, work: WholeBatch(run) }
    }

    /// Removes all expired receipts now, and returns their number.
    ///
    /// # Errors
    /// [`StoreError`](oncegate_core::StoreError) if the database is out of reach or refuses.
    pub async fn purge(&self) -> Result<u64, oncegate_core::StoreError> {
        self.inner.receipts.purge().await
    }
}

impl fmt::Debug for TransactionalInbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransactionalInbox")
            .field("consumer", &self.inner.consumer)
            .field("identity", &self.inner.identity)
            .field("max_attempts", &self.inner.max_attempts)
            .field("max_batch", &self.inner.max_batch)
            .finish_non_exhaustive()
    }
}

/// A [`TransactionalInbox`] with its handler.
pub struct TransactionalProcessor<W> {
    inbox: TransactionalInbox,
    work: W,
}

impl<W: Work + 'static> Processor for TransactionalProcessor<W> {
    fn consumer(&self) -> &ConsumerName {
        self.inbox.consumer()
    }

    fn retention(&self) -> Duration {
        self.inbox.inner.receipts.retention
    }

    fn max_batch(&self) -> usize {
        self.inbox.inner.max_batch
    }

    /// Accepts any redelivery time: a message that is delivered again while its transaction is open is in flight.
    fn check(&self, source: &SourceInfo) -> Result<(), ConfigError> {
        self.inbox.inner.identity.check(source)
    }

    async fn process(&self, messages: &[Arc<Message>]) -> Vec<ProcessOutcome> {
        self.inbox.inner.process_all(messages, &self.work).await
    }
}

impl<W> fmt::Debug for TransactionalProcessor<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TransactionalProcessor").field(&self.inbox).finish()
    }
}
