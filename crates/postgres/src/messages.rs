//! Dead letters and messages of the outbox, for operators: listings, and changes that are noted in the audit trail of messages.
//!
//! All rules are in the SQL of the contract. `docs/reference/messages-postgres.md` and `outbox.md` describe them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{RecordId, StoreError, StoreErrorKind, Timestamp};
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{ConnectOptions as _, Connection as _, Error, Row as _};
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::call::{Arg, Call};
use crate::error::{describe, store_error};
use crate::options::PostgresOptions;
use crate::store::is_missing;

/// The functions that an operator's role must be able to call.
const FUNCTIONS: &str = "oncegate.dead_letter_page, oncegate.dead_letter_counts, oncegate.show_dead_letter, \
     oncegate.requeue_dead_letter, oncegate.drop_dead_letter, oncegate.check_opened_dead_letter, \
     oncegate.requeue_opened_dead_letter, oncegate.outbox_page, oncegate.outbox_status, \
     oncegate.show_outbox_message, oncegate.requeue_outbox_message, oncegate.drop_outbox_message, \
     oncegate.message_audit_trail, oncegate.message_seal_counts, oncegate.dead_letters_of_period";

const LETTERS: &str = "SELECT l.* FROM oncegate.dead_letter_page($1, $2, $3, $4, $5) AS l";
const LETTERS_OF_PERIOD: &str =
    "SELECT l.* FROM oncegate.dead_letters_of_period($1, $2, $3, $4, $5, $6, $7) AS l";
const COUNTS: &str = "SELECT c.* FROM oncegate.dead_letter_counts($1) AS c";
const SEALS: &str = "SELECT c.* FROM oncegate.message_seal_counts() AS c";
const SHOW_LETTER: &str = "SELECT l.* FROM oncegate.show_dead_letter($1, $2) AS l";
const REQUEUE_LETTER: &str = "SELECT r.* FROM oncegate.requeue_dead_letter($1, $2, $3, $4, $5) AS r";
const CHECK_OPENED: &str = "SELECT c.* FROM oncegate.check_opened_dead_letter($1, $2, $3, $4) AS c";
const REQUEUE_OPENED: &str =
    "SELECT r.* FROM oncegate.requeue_opened_dead_letter($1, $2, $3, $4, $5, $6, $7) AS r";
const DROP_LETTER: &str = "SELECT d.outcome FROM oncegate.drop_dead_letter($1, $2, $3) AS d";
const OUTBOX: &str = "SELECT o.* FROM oncegate.outbox_page($1, $2, $3) AS o";
const STATUS: &str = "SELECT s.* FROM oncegate.outbox_status() AS s";
const SHOW_MESSAGE: &str = "SELECT o.* FROM oncegate.show_outbox_message($1) AS o";
const REQUEUE_MESSAGE: &str = "SELECT r.* FROM oncegate.requeue_outbox_message($1, $2, $3) AS r";
const DROP_MESSAGE: &str = "SELECT r.* FROM oncegate.drop_outbox_message($1, $2, $3) AS r";
const AUDIT: &str = "SELECT a.* FROM oncegate.message_audit_trail($1, $2) AS a";

/// The time that a reply may take beyond the statement timeout of the server.
const REPLY_MARGIN: Duration = Duration::from_secs(1);

/// The calls of one handle that run at the same time. Others wait.
const MAX_CONCURRENT: usize = 2;

/// The beginning of a sealed error.
const SEALED_ERROR: &str = "ogseal:";

/// The most groups of dead letters that are counted.
const MAX_GROUPS: i32 = 100;

/// The dead letters and the outbox of a database, for operators.
///
/// Each call opens a connection of its own, so a handle that is not used costs nothing.
#[derive(Clone)]
pub struct MessageOperator {
    options: PostgresOptions,
    running: Arc<Semaphore>,
    opener: Option<Arc<dyn OpenDeadLetters>>,
}

/// Opens dead letters whose content and error are sealed (`docs/reference/sealing.md`).
pub trait OpenDeadLetters: Send + Sync + 'static {
    /// Opens the error of a dead letter; `None` if it is in clear.
    ///
    /// # Errors
    /// The reason why it cannot be opened, for operators.
    fn open_error(&self, line: &DeadLetterLine) -> Result<Option<String>, String>;

    /// Opens the header values and the payload of a dead letter; `None` if they are in clear.
    ///
    /// # Errors
    /// The reason why they cannot be opened, for operators.
    fn open_content(
        &self,
        line: &DeadLetterLine,
        content: &MessageContent,
    ) -> Result<Option<MessageContent>, String>;
}

/// Selects dead letters. `None` matches all.
#[derive(Clone, Debug, Default)]
pub struct DeadLetterFilter {
    /// The name of the consumer.
    pub consumer: Option<String>,
    /// The topic.
    pub topic: Option<String>,
    /// The word for the reason, such as `attempts-exhausted`.
    pub reason: Option<String>,
    /// Only dead letters with a smaller number.
    pub before: Option<u64>,
}

/// A dead letter, without its headers and its payload.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeadLetterLine {
    /// The number of the dead letter.
    pub number: u64,
    /// The receipt of its message.
    pub record: RecordId,
    /// The consumer that gave it up.
    pub consumer: String,
    /// The word for the reason.
    pub reason: String,
    /// The number of failed attempts.
    pub attempts: u32,
    /// The error of the last attempt. If it is sealed and cannot be opened, the reason for that, in brackets.
    pub error: String,
    /// The topic from which it came.
    pub topic: String,
    /// The broker's identifier.
    pub broker_id: Option<String>,
    /// The order key.
    pub order_key: Option<Vec<u8>>,
    /// The number of headers.
    pub headers: usize,
    /// The size of the payload in bytes.
    pub payload_bytes: u64,
    /// The time at which it was given up.
    pub at: Timestamp,
    /// The server's time at this listing.
    pub now: Timestamp,
}

/// The number of dead letters of one consumer and topic with one reason.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeadLetterCount {
    /// The consumer.
    pub consumer: String,
    /// The topic.
    pub topic: String,
    /// The word for the reason.
    pub reason: String,
    /// The number of dead letters.
    pub count: u64,
    /// The time of the oldest.
    pub oldest: Timestamp,
    /// The time of the newest.
    pub newest: Timestamp,
}

/// The number of dead letters, or of events that streams buffer, that one key sealed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MessageSealCount {
    /// True for events that streams buffer, and false for dead letters.
    pub is_buffered_event: bool,
    /// The id of the key, as their sealed forms have it; `None` for those in clear.
    pub key: Option<[u8; 8]>,
    /// The number of messages.
    pub count: u64,
    /// The time of the oldest.
    pub oldest: Timestamp,
}

/// A message as it was delivered or sent. The content of a sealed dead letter is in its payload, and its header values are empty.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MessageContent {
    /// Names and values, in their order.
    pub headers: Vec<(String, Vec<u8>)>,
    /// The payload.
    pub payload: Vec<u8>,
}

impl MessageContent {
    /// A content with these headers and this payload.
    #[must_use]
    pub const fn new(headers: Vec<(String, Vec<u8>)>, payload: Vec<u8>) -> Self {
        Self { headers, payload }
    }
}

/// One dead letter with everything.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct DeadLetterDetail {
    /// The line of a listing.
    pub line: DeadLetterLine,
    /// Its headers and its payload.
    pub content: MessageContent,
    /// The place of its identity, `header NAME` or `broker`; `None` if the receipt does not reveal it.
    pub identity: Option<String>,
    /// The reasons why it should not be published again.
    pub obstacles: Vec<Obstacle>,
    /// True if its content is sealed in the database.
    pub is_sealed: bool,
    /// The reason why its content could not be opened. It is in its sealed form then.
    pub refused: Option<String>,
}

/// A reason why a dead letter should not be published again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Obstacle {
    /// It is so young that the broker may drop it as a copy.
    Recent,
    /// Unchanged, it becomes a dead letter again.
    FailsAgain,
    /// It may have taken effect.
    OutcomeUnknown,
    /// Each publication has another identity for its consumer.
    NewIdentity,
    /// Other consumers of its topic may have forgotten it.
    Old,
    /// Its content is sealed: published like this, no consumer could read it.
    Sealed,
}

impl Obstacle {
    /// All obstacles.
    pub const ALL: [Self; 6] =
        [Self::Recent, Self::FailsAgain, Self::OutcomeUnknown, Self::NewIdentity, Self::Old, Self::Sealed];

    /// The word for it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Recent => "recent",
            Self::FailsAgain => "fails-again",
            Self::OutcomeUnknown => "outcome-unknown",
            Self::NewIdentity => "new-identity",
            Self::Old => "old",
            Self::Sealed => "sealed",
        }
    }

    /// Returns true if an operator can accept it.
    #[must_use]
    pub const fn is_acceptable(self) -> bool {
        !matches!(self, Self::Recent | Self::FailsAgain | Self::Sealed)
    }

    /// The obstacle with this word.
    #[must_use]
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|obstacle| obstacle.as_str() == word)
    }
}

/// The conditions under which a dead letter is published again.
#[derive(Clone, Debug, Default)]
pub struct RequeueTerms {
    /// The obstacles that the operator accepts.
    pub accepted: Vec<Obstacle>,
    /// The time for which the broker drops a message whose identifier it knows. At most 7 days.
    pub broker_window: Duration,
}

/// The actor and the reason of a change, for the audit trail.
#[derive(Clone, Copy, Debug)]
pub struct AuditNote<'a> {
    /// The person or the program, 1 to 1000 bytes.
    pub actor: &'a str,
    /// The reason, 1 to 10 000 bytes.
    pub reason: &'a str,
}

/// The outcome of a change of a dead letter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeadLetterChange {
    /// The message is in the outbox, under this identifier, and the dead letter is gone.
    Requeued(String),
    /// The dead letter is gone.
    Dropped,
    /// There is no such dead letter.
    Missing,
    /// Another transaction holds it. Nothing was changed.
    Locked,
    /// These obstacles were not accepted. Nothing was changed.
    Refused(Vec<Obstacle>),
}

/// The state of a message of the outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OutboxState {
    /// No attempt has failed.
    Waiting,
    /// An attempt has failed; the relay tries again.
    Failing,
    /// The broker will never accept it; it waits for an operator.
    Refused,
}

impl OutboxState {
    /// All states.
    pub const ALL: [Self; 3] = [Self::Waiting, Self::Failing, Self::Refused];

    /// The word for it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Failing => "failing",
            Self::Refused => "refused",
        }
    }

    /// The state with this word.
    #[must_use]
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == word)
    }
}

/// A message of the outbox, without its headers and its payload.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OutboxLine {
    /// Its number.
    pub seq: u64,
    /// Its identifier.
    pub id: String,
    /// Its topic.
    pub topic: String,
    /// Its order key.
    pub order_key: Option<Vec<u8>>,
    /// Its state.
    pub state: OutboxState,
    /// The number of failed attempts.
    pub attempts: u32,
    /// The publisher's error of the last attempt.
    pub error: Option<String>,
    /// The number of headers.
    pub headers: usize,
    /// The size of the payload in bytes.
    pub payload_bytes: u64,
    /// The time at which it was sent.
    pub created_at: Timestamp,
    /// The time at which the broker refused it.
    pub refused_at: Option<Timestamp>,
    /// True while a relay publishes it.
    pub is_held: bool,
    /// True if messages with its order key wait behind it.
    pub blocks_key: bool,
    /// The server's time at this listing.
    pub now: Timestamp,
}

/// One message of the outbox with everything.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OutboxDetail {
    /// The line of a listing.
    pub line: OutboxLine,
    /// Its headers and its payload.
    pub content: MessageContent,
}

/// The numbers of messages in the outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutboxCounts {
    /// Messages that are not published yet, failing ones included.
    pub waiting: u64,
    /// The age of the oldest of them.
    pub oldest: Option<Duration>,
    /// Messages with a failed attempt.
    pub failing: u64,
    /// Messages that wait for an operator.
    pub refused: u64,
}

/// The outcome of a change of a message of the outbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OutboxChange {
    /// A relay publishes it again.
    Requeued,
    /// It was deleted unpublished.
    Dropped,
    /// There is no such message; it may have been published.
    Missing,
    /// It was not refused. Nothing was changed.
    NotRefused(OutboxState),
}

/// An entry of the audit trail of messages.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MessageAuditEntry {
    /// Its number.
    pub number: u64,
    /// Its time.
    pub at: Timestamp,
    /// `dead-letter` or `outbox`.
    pub kind: String,
    /// The number of the dead letter or of the message.
    pub message: u64,
    /// The receipt of the dead letter, or the identifier of the message.
    pub id: String,
    /// The consumer of the dead letter.
    pub consumer: Option<String>,
    /// The topic.
    pub topic: String,
    /// `requeued`, `dropped`, or `taken` by a program.
    pub action: String,
    /// The actor.
    pub actor: String,
    /// The reason; empty for programs that give none.
    pub reason: String,
}

/// One connection, for the calls of one request.
struct Session {
    connection: PgConnection,
    through_pooler: bool,
    limit: Duration,
    database: String,
}

impl MessageOperator {
    /// A handle for the database of these options. It connects at each call.
    #[must_use]
    pub fn new(options: PostgresOptions) -> Self {
        Self { options, running: Arc::new(Semaphore::new(MAX_CONCURRENT)), opener: None }
    }

    /// Opens sealed dead letters with this, to show them and to publish them again. Without it they are shown in their
    /// sealed form and cannot be published.
    #[must_use]
    pub fn with_opener(self, opener: impl OpenDeadLetters) -> Self {
        Self { opener: Some(Arc::new(opener)), ..self }
    }

    /// The database, for messages.
    #[must_use]
    pub fn database(&self) -> String {
        self.options.database()
    }

    /// Lists dead letters, the newest first.
    ///
    /// A page has at most `limit` and at most 1000 of them.
    ///
    /// # Errors
    /// [`StoreError`] if the database is out of reach or refuses.
    pub async fn dead_letters(
        &self,
        filter: &DeadLetterFilter,
        limit: usize,
    ) -> Result<Vec<DeadLetterLine>, StoreError> {
        let args = [
            text_or_null(filter.consumer.as_deref()),
            text_or_null(filter.topic.as_deref()),
            text_or_null(filter.reason.as_deref()),
            number_or_null(filter.before),
            Arg::Small(i32::try_from(limit).unwrap_or(i32::MAX)),
        ];
        let letters = self.read(LETTERS, args, dead_letter).await?;
        Ok(letters.into_iter().map(|line| self.with_error(line)).collect())
    }

    /// Lists dead letters that died at the first time or later, and before the second, the newest first.
    ///
    /// A page has at most `limit` and at most 1000 of them. `None` if the database has the functions of an earlier version, or if
    /// the role may not call this one: then [`dead_letters`](Self::dead_letters) lists them, and the caller compares their times.
    ///
    /// # Errors
    /// As for [`dead_letters`](Self::dead_letters).
    pub async fn dead_letters_of_period(
        &self,
        filter: &DeadLetterFilter,
        (since, until): (Option<Timestamp>, Option<Timestamp>),
        limit: usize,
    ) -> Result<Option<Vec<DeadLetterLine>>, StoreError> {
        let time = |time: Option<Timestamp>| number_or_null(time.map(Timestamp::as_millis));
        let args = [
            text_or_null(filter.consumer.as_deref()),
            text_or_null(filter.topic.as_deref()),
            text_or_null(filter.reason.as_deref()),
            time(since),
            time(until),
            number_or_null(filter.before),
            Arg::Small(i32::try_from(limit).unwrap_or(i32::MAX)),
        ];
        let _permit = self.permit().await?;
        let mut session = Session::open(&self.options).await?;
        let reply = session.send(Call::new(LETTERS_OF_PERIOD, args)).await?;
        session.close().await;
        let rows = match reply {
            Err(Error::Database(error)) if is_missing(&*error) => return Ok(None),
            reply => reply.map_err(|error| explained(&self.options.database(), &error))?,
        };
        let letters = rows.iter().map(dead_letter).collect::<Result<Vec<_>, _>>();
        let letters = letters.map_err(|error| store_error(&error))?;
        Ok(Some(letters.into_iter().map(|line| self.with_error(line)).collect()))
    }

    /// Counts dead letters by consumer, topic and reason, the largest number first, at most 100 groups.
    ///
    /// # Errors
    /// As for [`dead_letters`](Self::dead_letters).
    pub async fn dead_letter_counts(&self) -> Result<Vec<DeadLetterCount>, StoreError> {
        self.read(COUNTS, [Arg::Small(MAX_GROUPS)], |row| {
            Ok(DeadLetterCount {
                consumer: row.try_get("consumer")?,
                topic: row.try_get("topic")?,
                reason: row.try_get("reason")?,
                count: unsigned(row, "letters")?,
                oldest: time(row, "oldest")?,
                newest: time(row, "newest")?,
            })
        })
        .await
    }

    /// Counts dead letters, and events that streams buffer, by the key that sealed them.
    ///
    /// # Errors
    /// As for [`dead_letters`](Self::dead_letters).
    pub async fn seal_counts(&self) -> Result<Vec<MessageSealCount>, StoreError> {
        self.read(SEALS, [], |row| {
            let key: Option<Vec<u8>> = row.try_get("seal_key")?;
            // A form that was cut belongs to no key, and opens with none.
            let key = key.map(|key| <[u8; 8]>::try_from(key).unwrap_or_default());
            Ok(MessageSealCount {
                is_buffered_event: row.try_get::<&str, _>("kind")? == "buffered-event",
                key,
                count: unsigned(row, "messages")?,
                oldest: time(row, "oldest")?,
            })
        })
        .await
    }

    /// Reads one dead letter. Its obstacles depend on the window for duplicates of the broker.
    ///
    /// # Errors
    /// As for [`dead_letters`](Self::dead_letters).
    pub async fn dead_letter(
        &self,
        number: u64,
        broker_window: Duration,
    ) -> Result<Option<DeadLetterDetail>, StoreError> {
        let Some(mut detail) = self.stored_dead_letter(number, broker_window).await? else { return Ok(None) };
        detail.is_sealed = detail.obstacles.contains(&Obstacle::Sealed);
        if !detail.is_sealed {
            return Ok(Some(detail));
        }
        match self.open(&detail) {
            Ok(content) => {
                let checked = self.check_opened_dead_letter(number, &content, broker_window).await?;
                // It was published or dropped meanwhile.
                let Some((identity, obstacles)) = checked else { return Ok(None) };
                (detail.content, detail.identity, detail.obstacles) = (content, identity, obstacles);
                detail.line.payload_bytes = detail.content.payload.len() as u64;
            }
            Err(why) => detail.refused = Some(why),
        }
        detail.line = self.with_error(detail.line);
        Ok(Some(detail))
    }

    /// Opens the content of a sealed dead letter, or returns the reason why it cannot be opened.
    fn open(&self, detail: &DeadLetterDetail) -> Result<MessageContent, String> {
        let opener =
            self.opener.as_ref().ok_or_else(|| "it is sealed, and there are no seal keys".to_owned())?;
        let opened = opener.open_content(&detail.line, &detail.content)?;
        opened.ok_or_else(|| "it is sealed in another way".to_owned())
    }

    /// The line with its error, or with the reason why that cannot be opened.
    fn with_error(&self, line: DeadLetterLine) -> DeadLetterLine {
        let error = match &self.opener {
            Some(opener) => opener.open_error(&line),
            None if line.error.starts_with(SEALED_ERROR) => {
                Err("it is sealed, and there are no seal keys".to_owned())
            }
            None => Ok(None),
        };
        match error {
            Ok(None) => line,
            Ok(Some(error)) => DeadLetterLine { error, ..line },
            Err(why) => DeadLetterLine { error: format!("[{why}]"), ..line },
        }
    }

    /// Reads one dead letter as it is stored.
    async fn stored_dead_letter(
        &self,
        number: u64,
        broker_window: Duration,
    ) -> Result<Option<DeadLetterDetail>, StoreError> {
        let args = [big(number), Arg::Big(millis(broker_window))];
        let found = self.read(SHOW_LETTER, args, |row| {
            let content = content(row)?;
            let line = DeadLetterLine {
                number,
                record: record(row)?,
                consumer: row.try_get("consumer")?,
                reason: row.try_get("reason")?,
                attempts: attempts(row)?,
                error: row.try_get("error")?,
                topic: row.try_get("topic")?,
                broker_id: row.try_get("broker_id")?,
                order_key: row.try_get("order_key")?,
                headers: content.headers.len(),
                payload_bytes: content.payload.len() as u64,
                at: time(row, "at")?,
                now: time(row, "clock")?,
            };
            Ok(DeadLetterDetail {
                line,
                content,
                identity: row.try_get("identity")?,
                obstacles: obstacles(row)?,
                is_sealed: false,
                refused: None,
            })
        });
        Ok(found.await?.into_iter().next())
    }

    /// Publishes the message of a dead letter again: it goes through the outbox, to its topic, and its consumer processes it as a
    /// new message. The dead letter is gone in the same transaction.
    ///
    /// A sealed one is opened first, and is in clear in the outbox until a relay has published it.
    ///
    /// # Errors
    /// As for [`dead_letters`](Self::dead_letters). If the error is
    /// [`Unavailable`](oncegate_core::StoreErrorKind::Unavailable), it may have been done.
    /// [`Sealed`](oncegate_core::StoreErrorKind::Sealed) if the dead letter cannot be opened; nothing was changed.
    pub async fn requeue_dead_letter(
        &self,
        number: u64,
        terms: &RequeueTerms,
        note: AuditNote<'_>,
    ) -> Result<DeadLetterChange, StoreError> {
        let accepted = terms.accepted.iter().map(|obstacle| obstacle.as_str().to_owned()).collect();
        let args = [
            big(number),
            Arg::ManyText(accepted),
            Arg::Big(millis(terms.broker_window)),
            Arg::Text(note.actor.to_owned()),
            Arg::Text(note.reason.to_owned()),
        ];
        let change = only(self.read(REQUEUE_LETTER, args, requeued).await?)?;
        let is_sealed =
            matches!(&change, DeadLetterChange::Refused(obstacles) if obstacles.contains(&Obstacle::Sealed));
        if !is_sealed || self.opener.is_none() {
            return Ok(change);
        }
        let Some(detail) = self.stored_dead_letter(number, terms.broker_window).await? else {
            return Ok(DeadLetterChange::Missing);
        };
        let content = self.open(&detail).map_err(|why| {
            let words = format!("dead letter {number} cannot be opened, and was kept: {why}");
            StoreError::sealed(words).with_nothing_sent()
        })?;
        self.requeue_opened_dead_letter(number, &content, terms, note).await
    }

    /// Finds the identity and the obstacles of a sealed dead letter whose content was opened. `None` if there is no such dead
    /// letter.
    ///
    /// # Errors
    /// As for [`dead_letters`](Self::dead_letters); [`Invalid`](StoreErrorKind::Invalid) if the dead letter is not sealed or has
    /// another number of headers.
    pub async fn check_opened_dead_letter(
        &self,
        number: u64,
        content: &MessageContent,
        broker_window: Duration,
    ) -> Result<Option<(Option<String>, Vec<Obstacle>)>, StoreError> {
        let [payload, values] = opened(content);
        let args = [big(number), payload, values, Arg::Big(millis(broker_window))];
        let found = self.read(CHECK_OPENED, args, |row| Ok((row.try_get("identity")?, obstacles(row)?)));
        Ok(found.await?.into_iter().next())
    }

    /// Publishes the message of a sealed dead letter again, with the content that was opened: as
    /// [`requeue_dead_letter`](Self::requeue_dead_letter). The content is in clear in the outbox until a relay has published it.
    ///
    /// # Errors
    /// As for [`requeue_dead_letter`](Self::requeue_dead_letter), and as for
    /// [`check_opened_dead_letter`](Self::check_opened_dead_letter).
    pub async fn requeue_opened_dead_letter(
        &self,
        number: u64,
        content: &MessageContent,
        terms: &RequeueTerms,
        note: AuditNote<'_>,
    ) -> Result<DeadLetterChange, StoreError> {
        let accepted = terms.accepted.iter().map(|obstacle| obstacle.as_str().to_owned()).collect();
        let [payload, values] = opened(content);
        let args = [
            big(number),
            payload,
            values,
            Arg::ManyText(accepted),
            Arg::Big(millis(terms.broker_window)),
            Arg::Text(note.actor.to_owned()),
            Arg::Text(note.reason.to_owned()),
        ];
        only(self.read(REQUEUE_OPENED, args, requeued).await?)
    }

    /// Deletes a dead letter. Its message stays dead as long as its receipt is kept.
    ///
    /// # Errors
    /// As for [`requeue_dead_letter`](Self::requeue_dead_letter).
    pub async fn drop_dead_letter(
        &self,
        number: u64,
        note: AuditNote<'_>,
    ) -> Result<DeadLetterChange, StoreError> {
        let outcome = self.read(DROP_LETTER, change_args(number, note), |row| {
            Ok(match row.try_get("outcome")? {
                "dropped" => DeadLetterChange::Dropped,
                "none" => DeadLetterChange::Missing,
                "locked" => DeadLetterChange::Locked,
                _ => return Err(strange()),
            })
        });
        only(outcome.await?)
    }

    /// Lists messages of the outbox in the order of their numbers, after a given one, at most `limit` and at most 1000.
    ///
    /// Refused messages have an index. For other states the whole outbox is read.
    ///
    /// # Errors
    /// As for [`dead_letters`](Self::dead_letters).
    pub async fn outbox(
        &self,
        state: Option<OutboxState>,
        after: Option<u64>,
        limit: usize,
    ) -> Result<Vec<OutboxLine>, StoreError> {
        let args = [
            text_or_null(state.map(OutboxState::as_str)),
            number_or_null(after),
            Arg::Small(i32::try_from(limit).unwrap_or(i32::MAX)),
        ];
        self.read(OUTBOX, args, |row| {
            outbox_line(row, unsigned(row, "seq")?, count(row, "headers")?, unsigned(row, "bytes")?)
        })
        .await
    }

    /// Counts the messages of the outbox.
    ///
    /// # Errors
    /// As for [`dead_letters`](Self::dead_letters).
    pub async fn outbox_counts(&self) -> Result<OutboxCounts, StoreError> {
        let counts = self.read(STATUS, [], |row| {
            let oldest: Option<i64> = row.try_get("oldest_ms")?;
            Ok(OutboxCounts {
                waiting: unsigned(row, "waiting")?,
                oldest: oldest.map(|ms| Duration::from_millis(ms.unsigned_abs())),
                failing: unsigned(row, "failing")?,
                refused: unsigned(row, "refused")?,
            })
        });
        only(counts.await?)
    }

    /// Reads one message of the outbox.
    ///
    /// # Errors
    /// As for [`dead_letters`](Self::dead_letters).
    pub async fn outbox_message(&self, seq: u64) -> Result<Option<OutboxDetail>, StoreError> {
        let found = self.read(SHOW_MESSAGE, [big(seq)], |row| {
            let content = content(row)?;
            let line = outbox_line(row, seq, content.headers.len(), content.payload.len() as u64)?;
            Ok(OutboxDetail { line, content })
        });
        Ok(found.await?.into_iter().next())
    }

    /// Publishes a refused message again, at its place among those with its order key.
    ///
    /// # Errors
    /// As for [`requeue_dead_letter`](Self::requeue_dead_letter).
    pub async fn requeue_outbox_message(
        &self,
        seq: u64,
        note: AuditNote<'_>,
    ) -> Result<OutboxChange, StoreError> {
        only(self.read(REQUEUE_MESSAGE, change_args(seq, note), outbox_change).await?)
    }

    /// Deletes a refused message, which is then never published.
    ///
    /// # Errors
    /// As for [`requeue_dead_letter`](Self::requeue_dead_letter).
    pub async fn drop_outbox_message(
        &self,
        seq: u64,
        note: AuditNote<'_>,
    ) -> Result<OutboxChange, StoreError> {
        only(self.read(DROP_MESSAGE, change_args(seq, note), outbox_change).await?)
    }

    /// Reads the audit trail of messages, the newest entry first, before a given number, at most `limit` and at most 1000.
    ///
    /// # Errors
    /// As for [`dead_letters`](Self::dead_letters).
    pub async fn audit(
        &self,
        before: Option<u64>,
        limit: usize,
    ) -> Result<Vec<MessageAuditEntry>, StoreError> {
        let args = [number_or_null(before), Arg::Small(i32::try_from(limit).unwrap_or(i32::MAX))];
        self.read(AUDIT, args, |row| {
            Ok(MessageAuditEntry {
                number: unsigned(row, "number")?,
                at: time(row, "at")?,
                kind: row.try_get("kind")?,
                message: unsigned(row, "message")?,
                id: row.try_get("id")?,
                consumer: row.try_get("consumer")?,
                topic: row.try_get("topic")?,
                action: row.try_get("action")?,
                actor: row.try_get("actor")?,
                reason: row.try_get("reason")?,
            })
        })
        .await
    }

    /// Sends one call on a connection of its own.
    async fn read<T>(
        &self,
        sql: &'static str,
        args: impl IntoIterator<Item = Arg>,
        row: impl Fn(&PgRow) -> Result<T, Error>,
    ) -> Result<Vec<T>, StoreError> {
        let call = Call::new(sql, args);
        let _permit = self.permit().await?;
        let mut session = Session::open(&self.options).await?;
        let rows = session.call(call).await?;
        session.close().await;
        rows.iter().map(row).collect::<Result<_, _>>().map_err(|error| store_error(&error))
    }
}

impl MessageOperator {
    /// The turn of a call.
    async fn permit(&self) -> Result<SemaphorePermit<'_>, StoreError> {
        self.running.acquire().await.map_err(|_| StoreError::unavailable("it is shutting down"))
    }
}

impl Session {
    async fn open(options: &PostgresOptions) -> Result<Self, StoreError> {
        let database = options.database();
        let away = |why: String| {
            StoreError::unavailable(format!("{database} cannot be used: {why}")).with_nothing_sent()
        };
        let connect = options.connect_options();
        let connection = match tokio::time::timeout(options.connect_timeout, connect.connect()).await {
            Ok(connected) => connected.map_err(|error| away(describe(&error)))?,
            Err(_) => return Err(away(format!("no reply within {:?}", options.connect_timeout))),
        };
        let limit = options.statement_timeout + REPLY_MARGIN;
        Ok(Self { connection, through_pooler: options.transaction_pooler, limit, database })
    }

    async fn call(&mut self, call: Call) -> Result<Vec<PgRow>, StoreError> {
        let reply = self.send(call).await?;
        reply.map_err(|error| explained(&self.database, &error))
    }

    /// Sends a call. The inner error is that of the server.
    async fn send(&mut self, call: Call) -> Result<Result<Vec<PgRow>, Error>, StoreError> {
        let sent = async {
            if self.through_pooler {
                call.in_one_message(&mut self.connection).await
            } else {
                call.prepared(&mut self.connection).await
            }
        };
        let database = &self.database;
        match tokio::time::timeout(self.limit, sent).await {
            Ok(reply) => Ok(reply),
            Err(_) => Err(StoreError::unavailable(format!("{database}: no reply within {:?}", self.limit))),
        }
    }

    /// Ends the session. An error here loses nothing.
    async fn close(self) {
        let _ = tokio::time::timeout(REPLY_MARGIN, self.connection.close()).await;
    }
}

/// The arguments for a content that was opened.
fn opened(content: &MessageContent) -> [Arg; 2] {
    let values = content.headers.iter().map(|(_, value)| Some(value.clone())).collect();
    [Arg::Bytes(content.payload.clone().into()), Arg::ManyBytes(values)]
}

fn requeued(row: &PgRow) -> Result<DeadLetterChange, Error> {
    Ok(match row.try_get("outcome")? {
        "requeued" => DeadLetterChange::Requeued(row.try_get("message_id")?),
        "none" => DeadLetterChange::Missing,
        "locked" => DeadLetterChange::Locked,
        "refused" => DeadLetterChange::Refused(obstacles(row)?),
        _ => return Err(strange()),
    })
}

/// The error for an operator, who may lack the rights of a consumer.
fn explained(database: &str, error: &Error) -> StoreError {
    let code = error.as_database_error().and_then(|error| error.code()).unwrap_or_default();
    match &*code {
        "42501" => StoreError::invalid(format!(
            "{database}: this role may not do that. As the owner of the schema: GRANT USAGE ON SCHEMA oncegate TO role; \
             GRANT EXECUTE ON FUNCTION {FUNCTIONS} TO role"
        )),
        "3F000" | "42883" | "42P01" => StoreError::invalid(format!(
            "{database} has no schema oncegate, or an older one without these functions: run `oncegate schema apply postgres --url URL` \
             as its owner"
        )),
        "57014" => StoreError::unavailable(format!("{database}: the statement took longer than its timeout")),
        _ => {
            let error = store_error(error);
            let words = format!("{database}: {error}");
            match error.kind() {
                StoreErrorKind::Unavailable => StoreError::unavailable(words),
                StoreErrorKind::Corrupt => StoreError::corrupt(words),
                _ => StoreError::invalid(words),
            }
        }
    }
}

fn dead_letter(row: &PgRow) -> Result<DeadLetterLine, Error> {
    Ok(DeadLetterLine {
        number: unsigned(row, "number")?,
        record: record(row)?,
        consumer: row.try_get("consumer")?,
        reason: row.try_get("reason")?,
        attempts: attempts(row)?,
        error: row.try_get("error")?,
        topic: row.try_get("topic")?,
        broker_id: row.try_get("broker_id")?,
        order_key: row.try_get("order_key")?,
        headers: count(row, "headers")?,
        payload_bytes: unsigned(row, "bytes")?,
        at: time(row, "at")?,
        now: time(row, "clock")?,
    })
}

fn outbox_line(row: &PgRow, seq: u64, headers: usize, payload_bytes: u64) -> Result<OutboxLine, Error> {
    let refused_at: Option<i64> = row.try_get("refused_at")?;
    Ok(OutboxLine {
        seq,
        id: row.try_get("id")?,
        topic: row.try_get("topic")?,
        order_key: row.try_get("order_key")?,
        state: OutboxState::from_word(row.try_get("state")?).ok_or_else(strange)?,
        attempts: attempts(row)?,
        error: row.try_get("error")?,
        headers,
        payload_bytes,
        created_at: time(row, "created_at")?,
        refused_at: refused_at.map(|at| Timestamp::from_millis(at.unsigned_abs())),
        is_held: row.try_get("is_held")?,
        blocks_key: row.try_get("blocks_key")?,
        now: time(row, "clock")?,
    })
}

fn outbox_change(row: &PgRow) -> Result<OutboxChange, Error> {
    Ok(match row.try_get("outcome")? {
        "requeued" => OutboxChange::Requeued,
        "dropped" => OutboxChange::Dropped,
        "none" => OutboxChange::Missing,
        "not-refused" => {
            OutboxChange::NotRefused(OutboxState::from_word(row.try_get("state")?).ok_or_else(strange)?)
        }
        _ => return Err(strange()),
    })
}

fn content(row: &PgRow) -> Result<MessageContent, Error> {
    let names: Vec<String> = row.try_get("header_names")?;
    let values: Vec<Vec<u8>> = row.try_get("header_values")?;
    Ok(MessageContent { headers: names.into_iter().zip(values).collect(), payload: row.try_get("payload")? })
}

fn obstacles(row: &PgRow) -> Result<Vec<Obstacle>, Error> {
    let words: Vec<String> = row.try_get("obstacles")?;
    words.iter().map(|word| Obstacle::from_word(word).ok_or_else(strange)).collect()
}

fn record(row: &PgRow) -> Result<RecordId, Error> {
    let id: Vec<u8> = row.try_get("id")?;
    Ok(RecordId::from_bytes(id.try_into().map_err(|_| strange())?))
}

fn attempts(row: &PgRow) -> Result<u32, Error> {
    row.try_get::<i32, _>("attempts").map(i32::unsigned_abs)
}

fn count(row: &PgRow, column: &str) -> Result<usize, Error> {
    Ok(usize::try_from(row.try_get::<i32, _>(column)?).unwrap_or_default())
}

fn unsigned(row: &PgRow, column: &str) -> Result<u64, Error> {
    row.try_get::<i64, _>(column).map(i64::unsigned_abs)
}

fn time(row: &PgRow, column: &str) -> Result<Timestamp, Error> {
    unsigned(row, column).map(Timestamp::from_millis)
}

/// A reply that the contract does not have.
fn strange() -> Error {
    Error::Decode("a reply that is not one of the contract".into())
}

fn only<T>(rows: Vec<T>) -> Result<T, StoreError> {
    rows.into_iter().next().ok_or_else(|| store_error(&Error::RowNotFound))
}

fn change_args(number: u64, note: AuditNote<'_>) -> [Arg; 3] {
    [big(number), Arg::Text(note.actor.to_owned()), Arg::Text(note.reason.to_owned())]
}

fn big(number: u64) -> Arg {
    Arg::Big(i64::try_from(number).unwrap_or(i64::MAX))
}

fn number_or_null(number: Option<u64>) -> Arg {
    number.map_or(Arg::NoBig, big)
}

fn text_or_null(text: Option<&str>) -> Arg {
    text.map_or(Arg::NoText, |text| Arg::Text(text.to_owned()))
}

fn millis(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

impl fmt::Debug for MessageOperator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MessageOperator").field("database", &self.database()).finish_non_exhaustive()
    }
}
