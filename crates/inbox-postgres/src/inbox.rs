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

use crate::batch::digest;
use crate::dead_letters::{DeadLetterTable, Taken};
use crate::receipts::Receipts;
use crate::work::{PerMessage, WholeBatch, Work};

/// Processes each message once where its effect is rows in PostgreSQL: the receipt commits with the effect, or neither does.
/// Cheap to clone.
///
/// For each message, or for a batch of them: begin; take the messages, which writes their receipts; run the handler on the same
/// connection; commit; only then say that the broker may forget them. So there is no lease to lose and nothing to clean up, and
/// wherever it is cut in two the message comes again and is either new or a duplicate. A COMMIT whose answer is lost is found
/// out. Nobody waits for a message that another transaction has: it is in flight.
///
/// The database must have the contract ([`schema::apply`](oncegate_postgres::schema::apply)), and the role of
/// the pool the rights that
/// `docs/reference/messages-postgres.md` names.
///
/// ```
/// use std::sync::Arc;
///
/// use oncegate_inbox_postgres::TransactionalInbox;
/// use oncegate_inbox::{ConsumerName, ProcessOutcome, Identity, Message};
/// use oncegate_postgres::{PostgresOptions, schema, sqlx};
///
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = oncegate_servers::PostgresServer::start()?;
/// # let url = server.url();
/// schema::apply(&PostgresOptions::new(&url)?).await?;
/// let pool = sqlx::PgPool::connect(&url).await?;
/// # sqlx::query("CREATE TABLE invoices (order_number text)").execute(&pool).await?;
/// let inbox = TransactionalInbox::new(pool, ConsumerName::new("billing")?, Identity::header("event-id"));
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
    pub(crate) counts_crashes: bool,
    pub(crate) runs: u32,
    pub(crate) isolation: Option<Isolation>,
    pub(crate) max_batch: usize,
}

/// How long is remembered that a message was processed, unless told otherwise.
const RETENTION: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// The least that is remembered: longer than anybody looks for what became of a COMMIT.
const MIN_RETENTION: Duration = Duration::from_secs(60 * 60);

/// How long the database may take for a statement of ours, unless told otherwise, and at the most.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
const PATIENCE_MAX: Duration = Duration::from_secs(10 * 60);

/// How many messages are in one transaction, unless told otherwise, and at the most.
const BATCH: usize = 100;
const BATCH_MAX: usize = 1000;

impl TransactionalInbox {
    /// An inbox of this consumer on the application's own pool, whose messages are told apart by `identity`.
    ///
    /// Receipts are kept for 7 days; a message is tried 10 times; a batch has 100 messages at the most.
    #[must_use]
    pub fn new(pool: PgPool, consumer: ConsumerName, identity: Identity) -> Self {
        let inner = Inner {
            receipts: Receipts::new(pool, RETENTION, PATIENCE),
            consumer,
            identity,
            max_attempts: DEFAULT_MAX_ATTEMPTS,
            compares_payloads: false,
            counts_crashes: true,
            runs: 5,
            isolation: None,
            max_batch: BATCH,
        };
        Self { inner: Arc::new(inner) }
    }

    fn with(mut self, change: impl FnOnce(&mut Inner)) -> Self {
        change(Arc::make_mut(&mut self.inner));
        self
    }

    /// How long is remembered that a message was processed. It should be longer than the broker keeps messages, and than
    /// producers send them again.
    ///
    /// # Errors
    /// [`ConfigError`] where it is not from an hour to 400 days.
    pub fn with_retention(self, retention: Duration) -> Result<Self, ConfigError> {
        if !(MIN_RETENTION..=limits::MAX_RETENTION).contains(&retention) {
            return Err(ConfigError::new(format!(
                "receipts are kept from an hour to 400 days, and not for {retention:?}"
            )));
        }
        Ok(self.with(|inner| inner.receipts.retention = retention))
    }

    /// How often a message is tried before it is a dead letter, from 1. Attempts whose process ended within them count, too.
    ///
    /// # Errors
    /// If it is out of these bounds.
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

    /// Whether it is noted that a message is begun, where it may have been delivered before, so that one that ends its process
    /// is counted and becomes a dead letter in the end. It takes one call more for a batch of such messages, whose commit
    /// does not wait for the disk. On by default.
    #[must_use]
    pub fn with_crashes_counted(self, counts_crashes: bool) -> Self {
        self.with(|inner| inner.counts_crashes = counts_crashes)
    }

    /// How long the database may take for a statement of ours, and how long it is tried to find out what became of a COMMIT
    /// whose answer was lost; from 100 ms to 10 minutes. Default: 10 s. What the handler asks is bounded by the application's
    /// own `statement_timeout`.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_statement_timeout(self, patience: Duration) -> Result<Self, ConfigError> {
        let patience =
            ConfigError::check("the patience with the database", patience, limits::MIN_LEASE..=PATIENCE_MAX)?;
        Ok(self.with(|inner| inner.receipts.patience = patience))
    }

    /// How often the transaction of a single message is run at the most, from 1 to 100, where the database says that
    /// it may be run
    /// again (SQLSTATE 40001 and 40P01), before that counts as an attempt that failed. Default: 5.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_max_runs(self, runs: u32) -> Result<Self, ConfigError> {
        let runs = ConfigError::check("the number of runs", runs, 1..=100)?;
        Ok(self.with(|inner| inner.runs = runs))
    }

    /// The isolation level of the transaction. Default: what the connection or the server says.
    #[must_use]
    pub fn with_isolation(self, isolation: Isolation) -> Self {
        self.with(|inner| inner.isolation = Some(isolation))
    }

    /// The pool goes through a pooler that gives each transaction another session, such as PgBouncer in transaction mode:
    /// statements of ours are prepared without a name. Those of the handler say `.persistent(false)`.
    #[must_use]
    pub fn with_transaction_pooler(self, through_pooler: bool) -> Self {
        self.with(|inner| inner.receipts.transaction_pooler = through_pooler)
    }

    /// How many messages are processed in one transaction at the most, from 1 to 1000. Default: 100. Each takes a place in the
    /// server's table of locks until the transaction ends.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_max_batch(self, messages: usize) -> Result<Self, ConfigError> {
        let messages = ConfigError::check("the size of a batch", messages, 1..=BATCH_MAX)?;
        Ok(self.with(|inner| inner.max_batch = messages))
    }

    /// Whether receipts whose retention is over are removed beside the work, at first and once a minute. On by
    /// default; where it is off,
    /// somebody else calls `oncegate.purge_receipts`.
    #[must_use]
    pub fn with_purge(self, purges: bool) -> Self {
        self.with(|inner| inner.receipts.purges = purges)
    }

    /// Whose messages these are.
    #[must_use]
    pub fn consumer(&self) -> &ConsumerName {
        &self.inner.consumer
    }

    /// Whether the database has the contract and the role of the pool may call what this inbox calls: to be asked when a program
    /// starts. Without, each message is [`Unavailable`](ProcessOutcome::Unavailable) for as long as that is so.
    ///
    /// # Errors
    /// [`StoreError`](oncegate_core::StoreError) that says what is missing, or that the database is out of reach.
    pub async fn check(&self) -> Result<(), oncegate_core::StoreError> {
        self.inner.receipts.check().await
    }

    /// Processes a message, if nobody has and nobody is at it, in a transaction of its own.
    ///
    /// `run` is an async closure of this shape, `async |connection, message| { …; Ok(()) }`, and is cloned for each time that
    /// it runs. What it writes on the connection commits with the receipt. It must not commit or roll back by statements of
    /// its own. It has no effect elsewhere: it runs again where the database says so. An error that it returns by `?` rolls
    /// everything back, and is an attempt that failed. Dropping this rolls back.
    pub async fn process<F>(&self, message: &Message, run: F) -> ProcessOutcome
    where
        F: for<'c> RunWith<&'c mut PgConnection, &'c Message, (), HandlerError, Fut: Send>
            + Clone
            + Send
            + Sync,
    {
        let handled = self.inner.process(&[message], &PerMessage(run)).await;
        handled.into_iter().next().unwrap_or(ProcessOutcome::NotBegun)
    }

    /// Processes several messages and returns the outcome of each, in their order.
    ///
    /// The new ones among them share one transaction. `run` gets all of them at once, for statements that write many rows. If
    /// it fails, everything is rolled back, and it runs again for each message alone, in order, as a list of one. After a
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
    /// # use oncegate_inbox::{ConsumerName, ProcessOutcome, Identity, Message};
    /// # use oncegate_postgres::{PostgresOptions, schema, sqlx};
    /// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let server = oncegate_servers::PostgresServer::start()?;
    /// # schema::apply(&PostgresOptions::new(&server.url())?).await?;
    /// # let pool = sqlx::PgPool::connect(&server.url()).await?;
    /// # sqlx::query("CREATE TABLE invoices (order_number text)").execute(&pool).await?;
    /// # let inbox = TransactionalInbox::new(pool, ConsumerName::new("billing")?, Identity::payload());
    /// let messages: Vec<_> = ["17", "18", "17"].map(|order| Arc::new(Message::new("orders", order))).into();
    /// let handled = inbox.process_batch(&messages, async |connection, messages| {
    ///     let orders: Vec<_> = messages.iter().map(|m| String::from_utf8_lossy(&m.payload).into_owned()).collect();
    ///     sqlx::query("INSERT INTO invoices SELECT unnest($1::text[])").bind(orders).execute(connection).await?;
    ///     Ok(())
    /// });
    /// let handled = handled.await;
    /// assert!(matches!(handled[..], [ProcessOutcome::Processed { .. }, ProcessOutcome::Processed { .. }, ProcessOutcome::Duplicate]));
    /// # Ok(()) }
    /// ```
    pub async fn process_batch<F>(&self, messages: &[Arc<Message>], run: F) -> Vec<ProcessOutcome>
    where
        F: for<'c> RunWith<&'c mut PgConnection, &'c [&'c Message], (), HandlerError, Fut: Send>
            + Clone
            + Send
            + Sync,
    {
        self.inner.process_all(messages, &WholeBatch(run)).await
    }

    /// Processes the message of a dead letter of this consumer, once: the letter is deleted, the receipt written and the effect
    /// made in one transaction. A copy that comes later is a duplicate. Says what `run` said, or that there is no such letter.
    /// Where `run` fails, or the process ends, the letter is still there.
    ///
    /// # Errors
    /// What `run` says; a letter of another consumer; one that somebody else holds; an error of the database.
    pub async fn process_dead_letter<T, F>(&self, number: u64, run: F) -> Result<Option<T>, HandlerError>
    where
        T: Send,
        F: for<'c> RunWith<&'c mut PgConnection, Arc<Message>, T, HandlerError, Fut: Send> + Send,
    {
        let inner = &self.inner;
        let process = async move |connection: &mut PgConnection, taken: Taken| {
            if taken.consumer != inner.consumer.as_str() {
                return Err(HandlerError::retry(format!(
                    "the letter is one of the consumer {}",
                    taken.consumer
                )));
            }
            let digest = inner.compares_payloads.then(|| digest(&taken.message));
            inner.receipts.receive_again(connection, taken.id, digest).await?;
            run(connection, taken.message).await
        };
        DeadLetterTable::of(&inner.receipts).take_with(number, inner.isolation, process).await
    }

    /// A processor for a consumer's loop, as [`process_batch`](Self::process_batch).
    pub fn processor<F>(self, run: F) -> TransactionalProcessor<PerMessage<F>>
    where
        F: for<'c> RunWith<&'c mut PgConnection, &'c Message, (), HandlerError, Fut: Send>
            + Clone
            + Send
            + Sync
            + 'static,
    {
        TransactionalProcessor { inbox: self, work: PerMessage(run) }
    }

    /// A processor for a consumer's loop, as [`process_batch`](Self::process_batch).
    pub fn batch_processor<F>(self, run: F) -> TransactionalProcessor<WholeBatch<F>>
    where
        F: for<'c> RunWith<&'c mut PgConnection, &'c [&'c Message], (), HandlerError, Fut: Send>
            + Clone
            + Send
            + Sync
            + 'static,
    {
        TransactionalProcessor { inbox: self, work: WholeBatch(run) }
    }

    /// Removes receipts whose retention is over, until there are none left; says how many. Beside the work that happens by
    /// itself.
    ///
    /// # Errors
    /// [`StoreError`](oncegate_core::StoreError) where the database is out of reach or refuses.
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

    /// Any redelivery time will do: what the broker delivers again while the transaction is open is in flight.
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
