//! Streams of numbered events: each event is applied once and in order, in the transaction of its projection.

use std::fmt;
use std::future::Future;
use std::ops::Range;

use bytes::Bytes;
use oncegate_core::StoreError;
use oncegate_engine::ConfigError;
use oncegate_inbox::{ConsumerName, HandlerError};
use oncegate_postgres::TransactFnWith;
use oncegate_postgres::sqlx::postgres::{PgConnection, PgRow};
use oncegate_postgres::sqlx::{self, Row as _};
use oncegate_seal::{SealError, SealKeys, StreamEventPlace, open_stream_event, seal_stream_event};

/// Streams of events with consecutive numbers, for example those of an aggregate.
///
/// Each event is applied once, and only after the event before it. The position of the stream moves in the transaction
/// that writes the projection. An event that was applied before is skipped. An event that comes too early is a gap. The
/// caller handles it ([`apply`](Self::apply)), fetches the missing events ([`apply_or_fetch`](Self::apply_or_fetch)),
/// or buffers the event until they come ([`apply_or_buffer`](Self::apply_or_buffer)). While a transaction that applied
/// an event is open, other transactions get [`StreamBusy`] for that stream at once. An inbox treats this as a message
/// in flight.
///
/// Use it in the handler of a [`TransactionalInbox`](crate::TransactionalInbox), or in any transaction:
///
/// ```
/// # use oncegate_inbox_postgres::{ApplyOutcome, Streams};
/// # use oncegate_postgres::{PostgresOptions, schema, sqlx};
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = oncegate_servers::PostgresServer::start()?;
/// # schema::apply(&PostgresOptions::from_url(&server.url())?).await?;
/// # let pool = sqlx::PgPool::connect(&server.url()).await?;
/// # sqlx::query("CREATE TABLE history (line text)").execute(&pool).await?;
/// let streams = Streams::new("history")?;
/// let mut transaction = pool.begin().await?;
/// let mut outcomes = Vec::new();
/// for (sequence, event) in [(2, "paid"), (1, "placed"), (2, "paid")] {
///     let one = streams.apply_or_buffer(&mut transaction, "order-17", sequence, event.as_bytes(), async |connection, event| {
///         let line = String::from_utf8_lossy(&event.event).into_owned();
///         sqlx::query("INSERT INTO history VALUES ($1)").bind(line).execute(connection).await?;
///         Ok(())
///     });
///     outcomes.push(one.await.map_err(|failure| failure.to_string())?);
/// }
/// transaction.commit().await?;
/// use ApplyOutcome::{AlreadyApplied, Applied, Buffered};
/// assert_eq!(outcomes, [Buffered { expected: 1 }, Applied { events: 2 }, AlreadyApplied]);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Streams {
    consumer: ConsumerName,
    first: u64,
    max_buffered: u32,
    transaction_pooler: bool,
    keys: SealKeys,
}

/// An event to be applied.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamEvent {
    /// The number of the event in its stream.
    pub sequence: u64,
    /// The content of the event.
    pub event: Bytes,
}

/// The outcome of applying an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an event behind a gap was not applied"]
pub enum ApplyOutcome {
    /// The event was applied now, together with buffered or fetched ones.
    Applied {
        /// The number of applied events.
        events: u64,
    },
    /// The event was applied before.
    AlreadyApplied,
    /// The event is stored until the missing events come.
    Buffered {
        /// The first missing event.
        expected: u64,
    },
    /// Earlier events are missing. Nothing was written.
    Gap {
        /// The first missing event.
        expected: u64,
    },
}

impl ApplyOutcome {
    /// Converts a gap to an error, for a handler whose message is to be delivered again.
    ///
    /// # Errors
    /// [`HandlerError::Retry`] with a [`StreamGap`].
    pub fn or_retry(self) -> Result<(), HandlerError> {
        match self {
            Self::Gap { expected } => Err(HandlerError::retry(StreamGap { expected })),
            _ => Ok(()),
        }
    }
}

/// Another transaction is working on this stream. The message is delivered again, and no failed attempt is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("another transaction is working on this stream")]
pub struct StreamBusy;

/// Events of a stream are missing, and this one could be neither applied, buffered nor preceded by fetched ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("event {expected} of the stream is missing")]
pub struct StreamGap {
    /// The first missing event.
    pub expected: u64,
}

const EVENT: &str =
    "SELECT e.outcome, e.expected, e.is_more FROM oncegate.stream_event($1, $2, $3, $4, $5, $6) AS e";
const TAKE: &str = "SELECT t.sequence, t.event, t.is_more FROM oncegate.take_buffered($1, $2) AS t";

/// The reply of the database about an event.
enum Turn {
    Apply { is_more: bool },
    AlreadyApplied,
    Gap { expected: u64 },
    Buffered { expected: u64 },
}

impl Streams {
    /// Creates streams of a consumer. Events are counted from 1, and at most 1000 of a stream are buffered or fetched.
    ///
    /// # Errors
    /// [`ConfigError`] for an invalid [name](ConsumerName::new).
    pub fn new(consumer: impl TryInto<ConsumerName, Error: Into<ConfigError>>) -> Result<Self, ConfigError> {
        let consumer = consumer.try_into().map_err(Into::into)?;
        Ok(Self {
            consumer,
            first: 1,
            max_buffered: 1000,
            transaction_pooler: false,
            keys: SealKeys::default(),
        })
    }

    /// Sets the number of the first event of each stream, usually 0 or 1.
    #[must_use]
    pub fn with_first(self, first: u64) -> Self {
        Self { first, ..self }
    }

    /// Sets how many events of one stream are buffered, or fetched for one gap; at most 100 000.
    ///
    /// # Errors
    /// [`ConfigError`] if it is more.
    pub fn with_max_buffered(self, events: u32) -> Result<Self, ConfigError> {
        Ok(Self {
            max_buffered: ConfigError::check("the maximum number of buffered events", events, 0..=100_000)?,
            ..self
        })
    }

    /// States that the connection goes through a pooler that gives each transaction another session.
    #[must_use]
    pub fn with_transaction_pooler(self, through_pooler: bool) -> Self {
        Self { transaction_pooler: through_pooler, ..self }
    }

    /// Seals the events that are [buffered](Self::apply_or_buffer) with the first of these keys, and opens them with all of them.
    /// Default: no keys, and they are stored in clear.
    ///
    /// If a buffered event cannot be opened, nothing is applied: the call fails with a [`HandlerError::Retry`] that names the
    /// missing key, and after the rollback the event is buffered as before.
    #[must_use]
    pub fn with_seal_keys(self, keys: impl Into<SealKeys>) -> Self {
        Self { keys: keys.into(), ..self }
    }

    /// Applies an event if it is the next one, and then the buffered events that follow it.
    ///
    /// # Errors
    /// [`StreamBusy`] as a [`HandlerError::Retry`]; a database error; the error of `apply`. Roll back after an error.
    pub async fn apply<F>(
        &self,
        connection: &mut PgConnection,
        stream: &str,
        sequence: u64,
        event: &[u8],
        apply: F,
    ) -> Result<ApplyOutcome, HandlerError>
    where
        F: for<'c> TransactFnWith<&'c mut PgConnection, StreamEvent, (), HandlerError, Fut: Send>
            + Clone
            + Send
            + Sync,
    {
        self.run(connection, stream, sequence, event, false, &apply).await
    }

    /// Applies an event as [`apply`](Self::apply), or stores it in this transaction until the missing events come.
    ///
    /// # Errors
    /// As [`apply`](Self::apply); [`StreamGap`] as a [`HandlerError::Retry`] if the buffer of the stream is full.
    pub async fn apply_or_buffer<F>(
        &self,
        connection: &mut PgConnection,
        stream: &str,
        sequence: u64,
        event: &[u8],
        apply: F,
    ) -> Result<ApplyOutcome, HandlerError>
    where
        F: for<'c> TransactFnWith<&'c mut PgConnection, StreamEvent, (), HandlerError, Fut: Send>
            + Clone
            + Send
            + Sync,
    {
        match self.run(connection, stream, sequence, event, true, &apply).await? {
            ApplyOutcome::Gap { expected } => Err(HandlerError::retry(StreamGap { expected })),
            applied => Ok(applied),
        }
    }

    /// Applies an event as [`apply`](Self::apply), and before it the missing events, which `fetch` returns in order.
    ///
    /// # Errors
    /// As [`apply`](Self::apply); the error of `fetch`; [`StreamGap`] as a [`HandlerError::Retry`] if `fetch` returns
    /// another number of events, or if more are missing than [`with_max_buffered`](Self::with_max_buffered) allows.
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
        F: for<'c> TransactFnWith<&'c mut PgConnection, StreamEvent, (), HandlerError, Fut: Send>
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
            // A fetched event may be buffered, too. The fetched copy is applied.
            if let Turn::Apply { .. } = self.ask(connection, stream, sequence, None).await? {
                apply.clone()(&mut *connection, StreamEvent::new(sequence, event)).await?;
                events += 1;
            }
        }
        events += self.apply_buffered(connection, stream, &apply).await?;
        Ok(ApplyOutcome::Applied { events })
    }

    /// Applies an event if it is the next one, and then the buffered events that follow it.
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
        F: for<'c> TransactFnWith<&'c mut PgConnection, StreamEvent, (), HandlerError, Fut: Send>
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
                // The event was one of the buffered ones.
                Turn::AlreadyApplied if earlier > 0 => Ok(ApplyOutcome::Applied { events: earlier }),
                Turn::AlreadyApplied => Ok(ApplyOutcome::AlreadyApplied),
                turn @ (Turn::Buffered { expected } | Turn::Gap { expected }) => {
                    // An operator may have set the stream to a buffered event. No producer sends that one again, so
                    // apply it here.
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

    /// Applies buffered events as long as each is the next one, and returns their number.
    async fn apply_buffered<F>(
        &self,
        connection: &mut PgConnection,
        stream: &str,
        apply: &F,
    ) -> Result<u64, HandlerError>
    where
        F: for<'c> TransactFnWith<&'c mut PgConnection, StreamEvent, (), HandlerError, Fut: Send>
            + Clone
            + Send
            + Sync,
    {
        let (consumer, keys) = (self.consumer.to_string(), self.keys.get());
        let mut events = 0;
        loop {
            let query = sqlx::query(TAKE).persistent(!self.transaction_pooler);
            let query = query.bind(&consumer).bind(stream);
            let row = query.fetch_one(&mut *connection).await?;
            let Some(sequence) = row.try_get::<Option<i64>, _>("sequence")? else { return Ok(events) };
            let sequence = sequence.unsigned_abs();
            let stored = row.try_get::<&[u8], _>("event")?;
            let opened =
                open_stream_event(&StreamEventPlace { consumer: &consumer, stream, sequence }, stored, &keys);
            let event = opened.map_err(unopened)?.unwrap_or_else(|| Bytes::copy_from_slice(stored));
            apply.clone()(&mut *connection, StreamEvent { sequence, event }).await?;
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
        let consumer = self.consumer.to_string();
        // Sealed before it is known if it is buffered at all: the database decides that in the same call that stores it.
        let event = event.map(|event| {
            let sealed = seal_stream_event(
                &StreamEventPlace { consumer: &consumer, stream, sequence },
                event,
                &self.keys.get(),
            );
            Ok::<_, HandlerError>(sealed.map_err(unopened)?.unwrap_or_else(|| event.to_vec()))
        });
        let query = sqlx::query(EVENT)
            .persistent(!self.transaction_pooler)
            .bind(consumer)
            .bind(stream)
            .bind(number(sequence))
            .bind(number(self.first))
            .bind(event.transpose()?)
            .bind(i32::try_from(self.max_buffered).unwrap_or(i32::MAX));
        turn(&query.fetch_one(connection).await?)
    }
}

/// Converts the error of an event that was not sealed or opened. The message is delivered again.
fn unopened(error: SealError) -> HandlerError {
    HandlerError::retry(StoreError::from(error))
}

fn turn(row: &PgRow) -> Result<Turn, HandlerError> {
    let expected = row.try_get::<Option<i64>, _>("expected")?.unwrap_or_default().unsigned_abs();
    match row.try_get("outcome")? {
        "apply" => Ok(Turn::Apply { is_more: row.try_get("is_more")? }),
        "applied" => Ok(Turn::AlreadyApplied),
        "gap" | "full" => Ok(Turn::Gap { expected }),
        "buffered" => Ok(Turn::Buffered { expected }),
        "busy" => Err(HandlerError::retry(StreamBusy)),
        _ => Err(HandlerError::retry(
            "PostgreSQL returned an unknown outcome: run `oncegate schema apply postgres`",
        )),
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
            .field("bytes", &self.event.len())
            .finish()
    }
}
