//! Events of streams, each applied once and in order, in the transaction of their projection.

use std::fmt;
use std::future::Future;
use std::ops::Range;

use bytes::Bytes;
use oncegate_engine::ConfigError;
use oncegate_inbox::{ConsumerName, HandlerError};
use oncegate_postgres::RunWith;
use oncegate_postgres::sqlx::postgres::{PgConnection, PgRow};
use oncegate_postgres::sqlx::{self, Row as _};

/// Streams of events that are numbered one by one, such as those of an aggregate: each event is applied once, and none before
/// the one before it. The position moves in the transaction that writes the projection.
///
/// An event that was applied is passed over. One that comes too early is a gap, which is left to the caller
/// ([`apply`](Self::apply)), filled in ([`apply_or_fetch`](Self::apply_or_fetch)), or waited for
/// ([`apply_or_buffer`](Self::apply_or_buffer)). While a transaction that applied an event is open, nobody else applies one of that
/// stream: the others are told at once that it is busy ([`StreamBusy`]), which an inbox takes for a message in flight.
///
/// In the handler of a [`TransactionalInbox`](crate::TransactionalInbox), or in any transaction:
///
/// ```
/// # use oncegate_inbox_postgres::{ApplyOutcome, Streams};
/// # use oncegate_inbox::ConsumerName;
/// # use oncegate_postgres::{PostgresOptions, schema, sqlx};
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = oncegate_servers::PostgresServer::start()?;
/// # schema::apply(&PostgresOptions::new(&server.url())?).await?;
/// # let pool = sqlx::PgPool::connect(&server.url()).await?;
/// # sqlx::query("CREATE TABLE history (line text)").execute(&pool).await?;
/// let streams = Streams::new(ConsumerName::new("history")?);
/// let mut transaction = pool.begin().await?;
/// let mut applied = Vec::new();
/// for (sequence, event) in [(2, "paid"), (1, "placed"), (2, "paid")] {
///     let one = streams.apply_or_buffer(&mut transaction, "order-17", sequence, event.as_bytes(), async |connection, event| {
///         let line = String::from_utf8_lossy(&event.event).into_owned();
///         sqlx::query("INSERT INTO history VALUES ($1)").bind(line).execute(connection).await?;
///         Ok(())
///     });
///     applied.push(one.await.map_err(|failure| failure.to_string())?);
/// }
/// transaction.commit().await?;
/// assert_eq!(applied, [ApplyOutcome::Buffered { expected: 1 }, ApplyOutcome::Applied { events: 2 }, ApplyOutcome::AlreadyApplied]);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Streams {
    consumer: ConsumerName,
    first: u64,
    max_buffered: u32,
    transaction_pooler: bool,
}

/// An event to be applied.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamEvent {
    /// Its number.
    pub sequence: u64,
    /// What it says.
    pub event: Bytes,
}

/// What became of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a gap was not applied"]
pub enum ApplyOutcome {
    /// It was applied now, with those that waited for it or that it waited for.
    Applied {
        /// How many were applied.
        events: u64,
    },
    /// It was applied before.
    AlreadyApplied,
    /// It is kept until the missing ones are there.
    Buffered {
        /// The first one that is missing.
        expected: u64,
    },
    /// Events before it are missing. Nothing was written.
    Gap {
        /// The first one that is missing.
        expected: u64,
    },
}

impl ApplyOutcome {
    /// A gap as a failure, for a handler whose message is to come again.
    ///
    /// # Errors
    /// [`HandlerError::Retry`] of a [`StreamGap`].
    pub fn or_retry(self) -> Result<(), HandlerError> {
        match self {
            Self::Gap { expected } => Err(HandlerError::retry(StreamGap { expected })),
            _ => Ok(()),
        }
    }
}

/// Another transaction is at this stream. The message comes again, and that is no attempt that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamBusy;

impl fmt::Display for StreamBusy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("another transaction is at this stream")
    }
}

impl std::error::Error for StreamBusy {}

/// Events of a stream are missing: it cannot be applied, kept, or filled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamGap {
    /// The first one that is missing.
    pub expected: u64,
}

impl fmt::Display for StreamGap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the stream lacks event {}", self.expected)
    }
}

impl std::error::Error for StreamGap {}

const EVENT: &str =
    "SELECT e.outcome, e.expected, e.is_more FROM oncegate.stream_event($1, $2, $3, $4, $5, $6) AS e";
const TAKE: &str = "SELECT t.sequence, t.event, t.is_more FROM oncegate.take_buffered($1, $2) AS t";

/// What the database says of an event.
enum Turn {
    Apply { is_more: bool },
    AlreadyApplied,
    Gap { expected: u64 },
    Buffered { expected: u64 },
}

impl Streams {
    /// Streams of this consumer, whose events are counted from 1. At most 1000 events of a stream are kept or fetched.
    #[must_use]
    pub const fn new(consumer: ConsumerName) -> Self {
        Self { consumer, first: 1, max_buffered: 1000, transaction_pooler: false }
    }

    /// The number of the first event of each stream: 0 or 1, mostly.
    #[must_use]
    pub fn with_first(self, first: u64) -> Self {
        Self { first, ..self }
    }

    /// How many events of one stream are kept, or fetched for one gap, at the most; up to 100 000.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_max_buffered(self, events: u32) -> Result<Self, ConfigError> {
        Ok(Self {
            max_buffered: ConfigError::check("the number of events kept", events, 0..=100_000)?,
            ..self
        })
    }

    /// The connection goes through a pooler that gives each transaction another session: statements are prepared without a
    /// name.
    #[must_use]
    pub fn with_transaction_pooler(self, through_pooler: bool) -> Self {
        Self { transaction_pooler: through_pooler, ..self }
    }

    /// Applies an event if it is the next one; then those that are parked behind it.
    ///
    /// # Errors
    /// [`StreamBusy`] as a [`HandlerError::Retry`]; an error of the database; what `apply` says. Roll back, then.
    pub async fn apply<F>(
        &self,
        connection: &mut PgConnection,
        stream: &str,
        sequence: u64,
        event: &[u8],
        apply: F,
    ) -> Result<ApplyOutcome, HandlerError>
    where
        F: for<'c> RunWith<&'c mut PgConnection, StreamEvent, (), HandlerError, Fut: Send>
            + Clone
            + Send
            + Sync,
    {
        self.run(connection, stream, sequence, event, false, &apply).await
    }

    /// As [`apply`](Self::apply); an event that comes too early is kept in the database in this transaction, and applied when
    /// the missing ones are there.
    ///
    /// # Errors
    /// As [`apply`](Self::apply); [`StreamGap`] as a [`HandlerError::Retry`] where as many are kept as may be.
    pub async fn apply_or_buffer<F>(
        &self,
        connection: &mut PgConnection,
        stream: &str,
        sequence: u64,
        event: &[u8],
        apply: F,
    ) -> Result<ApplyOutcome, HandlerError>
    where
        F: for<'c> RunWith<&'c mut PgConnection, StreamEvent, (), HandlerError, Fut: Send>
            + Clone
            + Send
            + Sync,
    {
        match self.run(connection, stream, sequence, event, true, &apply).await? {
            ApplyOutcome::Gap { expected } => Err(HandlerError::retry(StreamGap { expected })),
            applied => Ok(applied),
        }
    }

    /// As [`apply`](Self::apply); where events are missing, `fetch` brings those with these numbers, in order, and they are
    /// applied before it in the same transaction.
    ///
    /// # Errors
    /// As [`apply`](Self::apply); what `fetch` says; [`StreamGap`] as a [`HandlerError::Retry`] where it does not bring as many as are
    /// missing, or where these are more than may be.
    pub async fn apply_or_fetch<F, G, Fut>(
        &self,
        connection: &mut PgConnection,
        stream: &str,
        sequence: u64,
        event: &[u8],
        apply: F,
        fetch: G,
    ) -> Result<ApplyOutcome, HandlerError>
    where
        F: for<'c> RunWith<&'c mut PgConnection, StreamEvent, (), HandlerError, Fut: Send>
            + Clone
            + Send
            + Sync,
        G: FnOnce(Range<u64>) -> Fut + Send,
        Fut: Future<Output = Result<Vec<Bytes>, HandlerError>> + Send,
    {
        let expected = match self.run(connection, stream, sequence, event, false, &apply).await? {
            ApplyOutcome::Gap { expected } => expected,
            applied => return Ok(applied),
        };
        let missing = sequence.saturating_sub(expected);
        if missing > u64::from(self.max_buffered) {
            return Err(HandlerError::retry(StreamGap { expected }));
        }
        let fetched = fetch(expected..sequence).await?;
        if fetched.len() as u64 != missing {
            let expected = expected.saturating_add(fetched.len() as u64);
            return Err(HandlerError::retry(StreamGap { expected }));
        }
        let mut events = 0;
        for (sequence, event) in (expected..).zip(fetched.iter().map(|event| &event[..]).chain([event])) {
            // One of them may have been parked; it is applied as it was fetched.
            if let Turn::Apply { .. } = self.ask(connection, stream, sequence, None).await? {
                apply.clone()(&mut *connection, StreamEvent::new(sequence, event)).await?;
                events += 1;
            }
        }
        events += self.apply_buffered(connection, stream, &apply).await?;
        Ok(ApplyOutcome::Applied { events })
    }

    /// Applies it if it is its turn, and those that are parked behind it.
    async fn run<F>(
        &self,
        connection: &mut PgConnection,
        stream: &str,
        sequence: u64,
        event: &[u8],
        buffers: bool,
        apply: &F,
    ) -> Result<ApplyOutcome, HandlerError>
    where
        F: for<'c> RunWith<&'c mut PgConnection, StreamEvent, (), HandlerError, Fut: Send>
            + Clone
            + Send
            + Sync,
    {
        let mut earlier = 0;
        loop {
            return match self.ask(connection, stream, sequence, buffers.then_some(event)).await? {
                Turn::Apply { is_more } => {
                    apply.clone()(&mut *connection, StreamEvent::new(sequence, event)).await?;
                    let buffered =
                        if is_more { self.apply_buffered(connection, stream, apply).await? } else { 0 };
                    Ok(ApplyOutcome::Applied { events: earlier + 1 + buffered })
                }
                // It was among those that were parked.
                Turn::AlreadyApplied if earlier > 0 => Ok(ApplyOutcome::Applied { events: earlier }),
                Turn::AlreadyApplied => Ok(ApplyOutcome::AlreadyApplied),
                turn @ (Turn::Buffered { expected } | Turn::Gap { expected }) => {
                    // Where an operator has set the stream to an event that is parked, nobody else brings that one.
                    if buffers && earlier == 0 {
                        earlier = self.apply_buffered(connection, stream, apply).await?;
                        if earlier > 0 {
                            continue;
                        }
                    }
                    match turn {
                        Turn::Buffered { .. } => Ok(ApplyOutcome::Buffered { expected }),
                        _ => Ok(ApplyOutcome::Gap { expected }),
                    }
                }
            };
        }
    }

    /// Applies what is parked, as far as it is the next one.
    async fn apply_buffered<F>(
        &self,
        connection: &mut PgConnection,
        stream: &str,
        apply: &F,
    ) -> Result<u64, HandlerError>
    where
        F: for<'c> RunWith<&'c mut PgConnection, StreamEvent, (), HandlerError, Fut: Send>
            + Clone
            + Send
            + Sync,
    {
        let mut events = 0;
        loop {
            let query = sqlx::query(TAKE).persistent(!self.transaction_pooler);
            let query = query.bind(self.consumer.to_string()).bind(stream);
            let row = query.fetch_one(&mut *connection).await?;
            let Some(sequence) = row.try_get::<Option<i64>, _>("sequence")? else { return Ok(events) };
            let event = row.try_get::<&[u8], _>("event")?;
            apply.clone()(&mut *connection, StreamEvent::new(sequence.unsigned_abs(), event)).await?;
            events += 1;
            if !row.try_get::<bool, _>("is_more")? {
                return Ok(events);
            }
        }
    }

    async fn ask(
        &self,
        connection: &mut PgConnection,
        stream: &str,
        sequence: u64,
        event: Option<&[u8]>,
    ) -> Result<Turn, HandlerError> {
        let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        let query = sqlx::query(EVENT)
            .persistent(!self.transaction_pooler)
            .bind(self.consumer.to_string())
            .bind(stream)
            .bind(number(sequence))
            .bind(number(self.first))
            .bind(event.map(<[u8]>::to_vec))
            .bind(i32::try_from(self.max_buffered).unwrap_or(i32::MAX));
        turn(&query.fetch_one(connection).await?)
    }
}

fn turn(row: &PgRow) -> Result<Turn, HandlerError> {
    let expected = row.try_get::<Option<i64>, _>("expected")?.unwrap_or_default().unsigned_abs();
    match row.try_get("outcome")? {
        "apply" => Ok(Turn::Apply { is_more: row.try_get("is_more")? }),
        "applied" => Ok(Turn::AlreadyApplied),
        "gap" | "full" => Ok(Turn::Gap { expected }),
        "buffered" => Ok(Turn::Buffered { expected }),
        "busy" => Err(HandlerError::retry(StreamBusy)),
        _ => Err(HandlerError::retry("PostgreSQL gave an answer that is not that of the contract")),
    }
}

impl StreamEvent {
    fn new(sequence: u64, event: &[u8]) -> Self {
        Self { sequence, event: Bytes::copy_from_slice(event) }
    }
}

impl fmt::Debug for StreamEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamEvent")
            .field("sequence", &self.sequence)
            .field("octets", &self.event.len())
            .finish()
    }
}
