//! The endpoints for messages: dead letters and the outbox of a PostgreSQL database, and the audit trail of their changes.
//!
//! The functions here take a [`MessageOperator`]. The endpoints send their results as JSON, and the dashboard renders them as
//! pages. `oncegate dead-letters` and `oncegate outbox` call them without a sidecar, too.

use std::time::Duration;

use axum::extract::{Path, State};
use axum::routing::{MethodRouter, post};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::header::HeaderMap;
use oncegate_core::{ErrorChain, StoreError, StoreErrorKind, Timestamp, limits};
use oncegate_postgres::messages::{
    AuditNote, DeadLetterChange, DeadLetterCount, DeadLetterDetail, DeadLetterFilter, DeadLetterLine,
    MessageAuditEntry, MessageContent, MessageOperator, Obstacle, OutboxChange, OutboxCounts, OutboxDetail,
    OutboxLine, OutboxState, RequeueTerms,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::keys::{AdminResult, AuditTexts, Body, Pairs, from_json, limit, pairs};
use super::listing::{Period, WALK_TIMEOUT, moment};
use super::problem::Problem;
use super::{AdminState, view};
use crate::config::did_you_mean;
use crate::log::OPERATOR;

/// The time for which brokers may drop a message whose identifier they know, unless the operator gives another one: that of a
/// FIFO queue of Amazon SQS, the longest default.
pub(crate) const BROKER_WINDOW: Duration = Duration::from_secs(5 * 60);

/// The longest such time.
pub(crate) const MAX_BROKER_WINDOW: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// The reason why a request about messages failed.
#[derive(Debug)]
pub(crate) enum MessageFailure {
    /// There is no such message.
    Missing(String),
    /// The state of the message does not allow it.
    Refused(String),
    /// A transaction holds the message.
    Locked(String),
    /// The database failed while nothing was to be changed, or before anything was.
    Read(StoreError),
    /// The database failed, and the change may have been made.
    Change(StoreError),
}

impl MessageFailure {
    fn change(error: StoreError) -> Self {
        match error.kind() {
            StoreErrorKind::Sealed => Self::Refused(store_words(&error)),
            _ if error.is_unsent() => Self::Read(error),
            _ => Self::Change(error),
        }
    }
}

impl From<MessageFailure> for Problem {
    fn from(failure: MessageFailure) -> Self {
        match failure {
            MessageFailure::Missing(detail) => Self::no_message(detail),
            MessageFailure::Refused(detail) => Self::message_refused(detail),
            MessageFailure::Locked(detail) => Self::message_locked(detail),
            MessageFailure::Read(error) => Self::message_store(&error, "Nothing was changed."),
            MessageFailure::Change(error) => {
                Self::message_store(&error, "It is not known whether this was done: check before you retry.")
            }
        }
    }
}

/// A place in which messages wait for an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MessageKind {
    DeadLetter,
    Outbox,
}

impl MessageKind {
    /// The name in the log.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::DeadLetter => "dead letter",
            Self::Outbox => "outbox",
        }
    }

    /// The part of an address that means this kind.
    pub(crate) const fn path(self) -> &'static str {
        match self {
            Self::DeadLetter => "dead-letters",
            Self::Outbox => "outbox",
        }
    }
}

/// The name of a change that an operator can make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MessageAction {
    /// The message is published again.
    Requeue,
    /// The message is deleted.
    Drop,
}

impl MessageAction {
    /// The part of an address that means this action.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Requeue => "requeue",
            Self::Drop => "drop",
        }
    }
}

/// A change of a message by an operator.
#[derive(Clone, Debug)]
pub(crate) struct MessageChange {
    pub(crate) kind: MessageKind,
    pub(crate) action: MessageAction,
    /// The conditions for a dead letter that is requeued. Other changes have none.
    pub(crate) terms: RequeueTerms,
}

impl MessageChange {
    pub(crate) fn new(kind: MessageKind, action: MessageAction) -> Self {
        Self { kind, action, terms: RequeueTerms::default() }
    }
}

/// A change that was made.
#[derive(Clone, Debug)]
pub(crate) struct ChangedMessage {
    kind: MessageKind,
    number: u64,
    outcome: &'static str,
    /// The identifier of the message in the outbox, if a dead letter was requeued.
    message_id: Option<String>,
}

impl ChangedMessage {
    pub(crate) fn json(&self) -> Value {
        let number = match self.kind {
            MessageKind::DeadLetter => "number",
            MessageKind::Outbox => "seq",
        };
        let mut members = Map::new();
        members.insert(number.to_owned(), self.number.into());
        members.insert("outcome".to_owned(), self.outcome.into());
        if let Some(id) = &self.message_id {
            members.insert("message_id".to_owned(), id.as_str().into());
        }
        Value::Object(members)
    }
}

/// Dead letters, the newest first.
#[derive(Clone, Debug)]
pub(crate) struct DeadLetterPage {
    pub(crate) letters: Vec<DeadLetterLine>,
    /// The numbers of all dead letters by consumer, topic and reason; `None` if counting takes too long.
    pub(crate) counts: Option<Vec<DeadLetterCount>>,
    /// The value of `before` for the next page; `None` if there is none.
    pub(crate) next: Option<u64>,
    /// False if the time was over before the page was full or the table was read.
    pub(crate) is_complete: bool,
}

impl DeadLetterPage {
    /// Reads a page. A database whose functions are of an earlier version cannot select by time: there, all dead letters are
    /// read, for at most [`WALK_TIMEOUT`].
    pub(crate) async fn read(
        operator: &MessageOperator,
        selection: &LetterSelection,
        limit: usize,
    ) -> Result<Self, MessageFailure> {
        let LetterSelection { mut filter, period } = selection.clone();
        let until = Instant::now() + WALK_TIMEOUT;
        let has_period = period != Period::default();
        let at_once = if has_period { limits::MAX_PAGE_RECORDS } else { limit };
        let mut page = Self { letters: Vec::new(), counts: None, next: None, is_complete: true };
        let times = (period.since, period.until);
        let of_period = match has_period {
            true => {
                operator.dead_letters_of_period(&filter, times, limit).await.map_err(MessageFailure::Read)?
            }
            false => None,
        };
        if let Some(letters) = of_period {
            page.next = letters.last().filter(|_| letters.len() >= limit).map(|last| last.number);
            page.letters = letters;
            page.counts = in_time(operator.dead_letter_counts().await)?;
            return Ok(page);
        }
        loop {
            let letters = operator.dead_letters(&filter, at_once).await.map_err(MessageFailure::Read)?;
            let is_last = letters.len() < at_once;
            filter.before = letters.last().map(|letter| letter.number);
            let left = limit.saturating_sub(page.letters.len());
            page.letters.extend(letters.into_iter().filter(|letter| period.includes(letter.at)).take(left));
            if page.letters.len() >= limit {
                page.next = page.letters.last().map(|letter| letter.number);
                break;
            }
            if is_last {
                break;
            }
            if Instant::now() >= until {
                (page.next, page.is_complete) = (filter.before, false);
                break;
            }
        }
        page.counts = in_time(operator.dead_letter_counts().await)?;
        Ok(page)
    }

    pub(crate) fn json(&self) -> Value {
        let total = |count: &DeadLetterCount| {
            json!({
                "consumer": count.consumer,
                "topic": count.topic,
                "reason": count.reason,
                "count": count.count,
                "oldest": view::time(count.oldest),
                "newest": view::time(count.newest),
            })
        };
        let totals: Option<Vec<_>> = self.counts.as_ref().map(|counts| counts.iter().map(total).collect());
        let letters = self.letters.iter().map(|line| Value::Object(dead_letter_line(line)));
        json!({
            "dead_letters": letters.collect::<Vec<_>>(),
            "totals": totals,
            "next": self.next,
            "complete": self.is_complete,
        })
    }
}

/// Messages of the outbox, the oldest first.
#[derive(Clone, Debug)]
pub(crate) struct OutboxPage {
    pub(crate) messages: Vec<OutboxLine>,
    /// The numbers of messages by state; `None` if counting takes too long.
    pub(crate) counts: Option<OutboxCounts>,
    /// The value of `after` for the next page; `None` if there is none.
    pub(crate) next: Option<u64>,
}

impl OutboxPage {
    pub(crate) async fn read(
        operator: &MessageOperator,
        state: Option<OutboxState>,
        after: Option<u64>,
        limit: usize,
    ) -> Result<Self, MessageFailure> {
        let messages = operator.outbox(state, after, limit).await.map_err(MessageFailure::Read)?;
        let counts = in_time(operator.outbox_counts().await)?;
        let next = messages.last().filter(|_| messages.len() >= limit).map(|last| last.seq);
        Ok(Self { messages, counts, next })
    }

    pub(crate) fn json(&self) -> Value {
        let messages = self.messages.iter().map(|line| Value::Object(outbox_line(line)));
        json!({
            "messages": messages.collect::<Vec<_>>(),
            "status": self.counts.map(|counts| json!({
                "waiting": counts.waiting,
                "oldest_seconds": counts.oldest.map(|age| age.as_secs()),
                "failing": counts.failing,
                "refused": counts.refused,
            })),
            "next": self.next,
        })
    }
}

/// Reads one dead letter, which must exist.
pub(crate) async fn find_dead_letter(
    operator: &MessageOperator,
    number: u64,
    broker_window: Duration,
) -> Result<DeadLetterDetail, MessageFailure> {
    let found = operator.dead_letter(number, broker_window).await.map_err(MessageFailure::Read)?;
    found.ok_or_else(|| no_dead_letter(number))
}

/// The JSON form of a dead letter; its headers and its payload only on demand.
pub(crate) fn dead_letter_json(found: &DeadLetterDetail, with_payload: bool) -> Value {
    let mut members = dead_letter_line(&found.line);
    members.insert("identity".to_owned(), found.identity.as_deref().into());
    members.insert("sealed".to_owned(), found.is_sealed.into());
    if let Some(refused) = &found.refused {
        members.insert("seal_refused".to_owned(), refused.as_str().into());
    }
    let obstacles = found.obstacles.iter().map(|obstacle| {
        json!({"name": obstacle.as_str(), "acceptable": obstacle.is_acceptable(), "text": obstacle_text(*obstacle)})
    });
    members.insert("obstacles".to_owned(), obstacles.collect());
    insert_content(&mut members, &found.content, with_payload);
    Value::Object(members)
}

/// Reads one message of the outbox, which must exist.
pub(crate) async fn find_outbox_message(
    operator: &MessageOperator,
    seq: u64,
) -> Result<OutboxDetail, MessageFailure> {
    let found = operator.outbox_message(seq).await.map_err(MessageFailure::Read)?;
    found.ok_or_else(|| no_outbox_message(seq))
}

/// The JSON form of a message of the outbox; its headers and its payload only on demand.
pub(crate) fn outbox_message_json(found: &OutboxDetail, with_payload: bool) -> Value {
    let mut members = outbox_line(&found.line);
    insert_content(&mut members, &found.content, with_payload);
    Value::Object(members)
}

/// Publishes a message again, or deletes it.
pub(crate) async fn change(
    operator: &MessageOperator,
    number: u64,
    change: &MessageChange,
    note: AuditNote<'_>,
) -> Result<ChangedMessage, MessageFailure> {
    use MessageAction::{Drop, Requeue};
    use MessageKind::{DeadLetter, Outbox};
    let in_doubt = MessageFailure::change;
    let (outcome, message_id) = match (change.kind, change.action) {
        (DeadLetter, action) => {
            let done = match action {
                Requeue => operator.requeue_dead_letter(number, &change.terms, note).await,
                Drop => operator.drop_dead_letter(number, note).await,
            };
            dead_letter_outcome(number, done.map_err(in_doubt)?)?
        }
        (Outbox, action) => {
            let done = match action {
                Requeue => operator.requeue_outbox_message(number, note).await,
                Drop => operator.drop_outbox_message(number, note).await,
            };
            (outbox_outcome(number, done.map_err(in_doubt)?)?, None)
        }
    };
    Ok(ChangedMessage { kind: change.kind, number, outcome, message_id })
}

/// The changes that operators made to messages, the newest first.
#[derive(Clone, Debug)]
pub(crate) struct MessageAudit {
    pub(crate) entries: Vec<MessageAuditEntry>,
    /// The value of `before` for the next page; `None` if there is none.
    pub(crate) next: Option<u64>,
}

impl MessageAudit {
    pub(crate) async fn read(
        operator: &MessageOperator,
        before: Option<u64>,
        limit: usize,
    ) -> Result<Self, MessageFailure> {
        let entries = operator.audit(before, limit).await.map_err(MessageFailure::Read)?;
        let next = entries.last().filter(|_| entries.len() >= limit).map(|last| last.number);
        Ok(Self { entries, next })
    }

    pub(crate) fn json(&self) -> Value {
        let entries = self.entries.iter().map(|entry| {
            json!({
                "number": entry.number,
                "at": view::time(entry.at),
                "kind": entry.kind,
                "message": entry.message,
                "id": entry.id,
                "consumer": entry.consumer,
                "topic": entry.topic,
                "action": entry.action,
                "actor": entry.actor,
                "reason": entry.reason,
            })
        });
        json!({"entries": entries.collect::<Vec<_>>(), "next": self.next})
    }
}

/// Numbers that took too long to count are left out: the listing is what an operator needs, most of all if there are many.
fn in_time<T>(counted: Result<T, StoreError>) -> Result<Option<T>, MessageFailure> {
    match counted {
        Ok(counts) => Ok(Some(counts)),
        Err(error) if error.kind() == StoreErrorKind::Unavailable => Ok(None),
        Err(error) => Err(MessageFailure::Read(error)),
    }
}

fn outbox_outcome(seq: u64, change: OutboxChange) -> Result<&'static str, MessageFailure> {
    match change {
        OutboxChange::Requeued => Ok("requeued"),
        OutboxChange::Dropped => Ok("dropped"),
        OutboxChange::NotRefused(state) => Err(not_refused(seq, state)),
        _ => Err(no_outbox_message(seq)),
    }
}

/// The refusal of a change of a message that the relay still publishes.
pub(crate) fn not_refused(seq: u64, state: OutboxState) -> MessageFailure {
    let why = match state {
        OutboxState::Failing => "a relay tries it again by itself",
        _ => "a relay publishes it as soon as it can",
    };
    MessageFailure::Refused(format!(
        "Message {seq} is {}: {why}. Only a message that the broker has refused can be requeued or dropped.",
        state.as_str()
    ))
}

fn dead_letter_outcome(
    number: u64,
    change: DeadLetterChange,
) -> Result<(&'static str, Option<String>), MessageFailure> {
    match change {
        DeadLetterChange::Requeued(id) => Ok(("requeued", Some(id))),
        DeadLetterChange::Dropped => Ok(("dropped", None)),
        DeadLetterChange::Refused(obstacles) => {
            let texts: Vec<_> = obstacles.iter().map(|obstacle| obstacle_advice(*obstacle)).collect();
            Err(MessageFailure::Refused(format!("Dead letter {number}: {}", texts.join(" "))))
        }
        DeadLetterChange::Locked => Err(MessageFailure::Locked(format!(
            "Another transaction holds dead letter {number} or its message. Nothing was changed: try again when it has ended."
        ))),
        _ => Err(no_dead_letter(number)),
    }
}

fn no_dead_letter(number: u64) -> MessageFailure {
    MessageFailure::Missing(format!(
        "There is no dead letter {number}: it was requeued, dropped or taken out."
    ))
}

fn no_outbox_message(seq: u64) -> MessageFailure {
    MessageFailure::Missing(format!("There is no message {seq} in the outbox: it was published or dropped."))
}

/// An obstacle in one sentence.
pub(crate) const fn obstacle_text(obstacle: Obstacle) -> &'static str {
    match obstacle {
        Obstacle::Recent => {
            "It is younger than the time for which the broker drops a message whose identifier it knows: if it is published now, it \
             may be lost."
        }
        Obstacle::FailsAgain => {
            "It has no identity, or that of another message: unchanged, it becomes a dead letter again."
        }
        Obstacle::OutcomeUnknown => "It may have taken effect: if it did, it takes effect twice.",
        Obstacle::NewIdentity => {
            "Its consumer identifies messages by what the broker gives anew to each publication: the outbox may publish it twice, and \
             then it takes effect twice."
        }
        Obstacle::Sealed => {
            "Its content is sealed, and there are no keys to open it: published like this, no consumer could read it."
        }
        Obstacle::Old => {
            "It is older than 7 days: other consumers of its topic, which get it too, may have forgotten that they processed it."
        }
        _ => "This program does not know the reason.",
    }
}

/// An obstacle with the next step. Members of requests are between backticks: the command line shows its flags instead.
fn obstacle_advice(obstacle: Obstacle) -> String {
    let text = obstacle_text(obstacle);
    match obstacle {
        Obstacle::Recent => format!(
            "{text} Wait. If the broker has another window for duplicates, give it in `broker_window`; 0s if it has none."
        ),
        Obstacle::Sealed => format!("{text} Give the seal keys to the sidecar or to the command."),
        Obstacle::FailsAgain => format!(
            "{text} Process it in place (docs/reference/messages-postgres.md, \"Dead letters\"), or drop it."
        ),
        Obstacle::OutcomeUnknown => {
            format!("{text} Find out. If it did not, `accept` {}; if it did, drop it.", obstacle.as_str())
        }
        other => format!("{text} If that does no harm, `accept` {}.", other.as_str()),
    }
}

fn dead_letter_line(line: &DeadLetterLine) -> Map<String, Value> {
    let mut members = Map::new();
    let mut add = |name: &str, value: Value| members.insert(name.to_owned(), value);
    add("number", line.number.into());
    add("record", line.record.to_string().into());
    add("consumer", line.consumer.as_str().into());
    add("topic", line.topic.as_str().into());
    add("reason", line.reason.as_str().into());
    add("attempts", line.attempts.into());
    add("error", line.error.as_str().into());
    add("broker_id", line.broker_id.as_deref().into());
    add("header_count", line.headers.into());
    add("payload_bytes", line.payload_bytes.into());
    add("at", view::time(line.at).into());
    add("age_seconds", line.now.since(line.at).as_secs().into());
    insert_order_key(&mut members, line.order_key.as_deref());
    members
}

fn outbox_line(line: &OutboxLine) -> Map<String, Value> {
    let time = |at: Option<Timestamp>| Value::from(at.map(view::time));
    let mut members = Map::new();
    let mut add = |name: &str, value: Value| members.insert(name.to_owned(), value);
    add("seq", line.seq.into());
    add("id", line.id.as_str().into());
    add("topic", line.topic.as_str().into());
    add("state", line.state.as_str().into());
    add("attempts", line.attempts.into());
    add("error", line.error.as_deref().into());
    add("header_count", line.headers.into());
    add("payload_bytes", line.payload_bytes.into());
    add("created_at", time(Some(line.created_at)));
    add("age_seconds", line.now.since(line.created_at).as_secs().into());
    add("refused_at", time(line.refused_at));
    add("held", line.is_held.into());
    add("blocks_key", line.blocks_key.into());
    insert_order_key(&mut members, line.order_key.as_deref());
    members
}

fn insert_order_key(members: &mut Map<String, Value>, order_key: Option<&[u8]>) {
    match order_key {
        Some(key) => view::insert_bytes(members, "order_key", key),
        None => drop(members.insert("order_key".to_owned(), Value::Null)),
    }
}

/// Headers with their values, and the payload, which may both hold data of customers.
fn insert_content(members: &mut Map<String, Value>, content: &MessageContent, with_payload: bool) {
    let headers = content.headers.iter().map(|(name, value)| {
        let mut header = Map::new();
        header.insert("name".to_owned(), name.as_str().into());
        header.insert("value_bytes".to_owned(), value.len().into());
        if with_payload {
            match std::str::from_utf8(value) {
                Ok(text) => header.insert("value".to_owned(), text.into()),
                Err(_) => header.insert("value_base64".to_owned(), STANDARD.encode(value).into()),
            };
        }
        Value::Object(header)
    });
    members.insert("headers".to_owned(), headers.collect());
    if with_payload {
        view::insert_bytes(members, "payload", &content.payload);
    }
}

/// The messages of the sidecar's store.
pub(super) fn operator(state: &AdminState) -> Result<&MessageOperator, Problem> {
    state.messages.as_ref().ok_or_else(Problem::no_messages)
}

/// The parameters that select dead letters.
pub(crate) const LETTER_FILTERS: [&str; 6] = ["consumer", "topic", "reason", "since", "until", "before"];

/// A selection of dead letters.
#[derive(Clone, Debug, Default)]
pub(crate) struct LetterSelection {
    filter: DeadLetterFilter,
    period: Period,
}

impl LetterSelection {
    /// Reads one of [`LETTER_FILTERS`].
    ///
    /// # Errors
    /// The text is not a time, or not a number.
    pub(crate) fn add(&mut self, name: &str, text: &str, now: Timestamp) -> Result<(), String> {
        let time = |text: &str| moment(text, now).map_err(|what| format!("{name}: {text:?} {what}"));
        match name {
            "consumer" => self.filter.consumer = Some(text.to_owned()),
            "topic" => self.filter.topic = Some(text.to_owned()),
            "reason" => self.filter.reason = Some(text.to_owned()),
            "since" => self.period.since = Some(time(text)?),
            "until" => self.period.until = Some(time(text)?),
            _ => self.filter.before = Some(read_number(name, text)?),
        }
        Ok(())
    }
}

pub(super) async fn dead_letters(State(state): State<AdminState>, query: Pairs) -> AdminResult {
    let mut selection = LetterSelection::default();
    let mut most = 100;
    for (name, text) in pairs(query, &[&LETTER_FILTERS[..], &["limit"]].concat())? {
        match name.as_str() {
            "limit" => most = limit(&name, &text)?,
            _ => selection.add(&name, &text, state.engine.store().now()).map_err(Problem::bad_request)?,
        }
    }
    let page = DeadLetterPage::read(operator(&state)?, &selection, most).await?;
    Ok(view::json(&page.json()))
}

pub(super) async fn dead_letter(
    State(state): State<AdminState>,
    Path(letter): Path<String>,
    query: Pairs,
) -> AdminResult {
    let letter = number("number", &letter)?;
    let (mut with_payload, mut window) = (false, BROKER_WINDOW);
    for (name, text) in pairs(query, &["payload", "broker_window"])? {
        match name.as_str() {
            "payload" => with_payload = boolean(&name, &text)?,
            _ => window = broker_window(&text)?,
        }
    }
    let found = find_dead_letter(operator(&state)?, letter, window).await?;
    Ok(view::json(&dead_letter_json(&found, with_payload)))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RequeueRequest {
    reason: String,
    actor: Option<String>,
    #[serde(default)]
    accept: Vec<String>,
    broker_window: Option<String>,
}

/// A change that needs only its reason.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReasonRequest {
    reason: String,
    actor: Option<String>,
}

/// The endpoint of a change.
pub(super) fn change_endpoint(kind: MessageKind, action: MessageAction) -> MethodRouter<AdminState> {
    let wanted = MessageChange::new(kind, action);
    post(
        async move |State(state): State<AdminState>,
                    Path(text): Path<String>,
                    headers: HeaderMap,
                    body: Body|
                    -> AdminResult {
            let number = number(if kind == MessageKind::Outbox { "seq" } else { "number" }, &text)?;
            let (wanted, texts) = read_change(wanted, &headers, body)?;
            Ok(view::json(&change_and_log(&state, number, &wanted, &texts).await?.json()))
        },
    )
}

fn read_change(
    mut change: MessageChange,
    headers: &HeaderMap,
    body: Body,
) -> Result<(MessageChange, AuditTexts), Problem> {
    let (actor, reason) = if (change.kind, change.action) == (MessageKind::DeadLetter, MessageAction::Requeue)
    {
        let request: RequeueRequest = from_json(body)?;
        change.terms = RequeueTerms {
            accepted: accepted(&request.accept).map_err(Problem::bad_request)?,
            broker_window: request.broker_window.as_deref().map_or(Ok(BROKER_WINDOW), broker_window)?,
        };
        (request.actor, request.reason)
    } else {
        let request: ReasonRequest = from_json(body)?;
        (request.actor, request.reason)
    };
    Ok((change, AuditTexts::read(actor.as_deref(), &reason, headers)?))
}

/// Makes a change in the database of the sidecar, and logs it.
pub(super) async fn change_and_log(
    state: &AdminState,
    number: u64,
    wanted: &MessageChange,
    texts: &AuditTexts,
) -> Result<ChangedMessage, Problem> {
    let note = texts.note();
    let changed = change(operator(state)?, number, wanted, note).await?;
    tracing::info!(
        target: OPERATOR,
        kind = wanted.kind.as_str(),
        number,
        outcome = changed.outcome,
        actor = note.actor,
        reason = note.reason,
        "an operator changed a message"
    );
    Ok(changed)
}

pub(super) async fn outbox(State(state): State<AdminState>, query: Pairs) -> AdminResult {
    let (mut only, mut after, mut most) = (Some(OutboxState::Refused), None, 100);
    for (name, text) in pairs(query, &["state", "after", "limit"])? {
        match name.as_str() {
            "state" => only = outbox_state(&text).map_err(Problem::bad_request)?,
            "after" => after = Some(number(&name, &text)?),
            _ => most = limit(&name, &text)?,
        }
    }
    Ok(view::json(&OutboxPage::read(operator(&state)?, only, after, most).await?.json()))
}

pub(super) async fn outbox_message(
    State(state): State<AdminState>,
    Path(seq): Path<String>,
    query: Pairs,
) -> AdminResult {
    let seq = number("seq", &seq)?;
    let mut with_payload = false;
    for (name, text) in pairs(query, &["payload"])? {
        with_payload = boolean(&name, &text)?;
    }
    let found = find_outbox_message(operator(&state)?, seq).await?;
    Ok(view::json(&outbox_message_json(&found, with_payload)))
}

pub(super) async fn audit(State(state): State<AdminState>, query: Pairs) -> AdminResult {
    let (mut before, mut most) = (None, 100);
    for (name, text) in pairs(query, &["before", "limit"])? {
        match name.as_str() {
            "before" => before = Some(number(&name, &text)?),
            _ => most = limit(&name, &text)?,
        }
    }
    Ok(view::json(&MessageAudit::read(operator(&state)?, before, most).await?.json()))
}

/// Reads the obstacles that an operator accepts.
///
/// # Errors
/// A word is unknown, or its obstacle cannot be accepted.
pub(crate) fn accepted(words: &[String]) -> Result<Vec<Obstacle>, String> {
    let acceptable = Obstacle::ALL.into_iter().filter(|obstacle| obstacle.is_acceptable());
    let names: Vec<_> = acceptable.map(Obstacle::as_str).collect();
    let read = |word: &String| match Obstacle::from_word(word) {
        Some(obstacle) if obstacle.is_acceptable() => Ok(obstacle),
        Some(obstacle) => Err(format!("accept: {word:?} cannot be accepted. {}", obstacle_text(obstacle))),
        None => {
            let hint = did_you_mean(word, names.iter().copied());
            Err(format!("accept: {word:?} is not one of {}{hint}", names.join(", ")))
        }
    };
    words.iter().map(read).collect()
}

/// Reads the state of messages of the outbox; `all` is `None`.
///
/// # Errors
/// The text is none of the states.
pub(crate) fn outbox_state(text: &str) -> Result<Option<OutboxState>, String> {
    if text == "all" {
        return Ok(None);
    }
    OutboxState::from_word(text).map(Some).ok_or_else(|| {
        let names: Vec<_> = OutboxState::ALL.into_iter().map(OutboxState::as_str).chain(["all"]).collect();
        let hint = did_you_mean(text, names.iter().copied());
        format!("state: {text:?} is not one of {}{hint}", names.join(", "))
    })
}

pub(super) fn broker_window(text: &str) -> Result<Duration, Problem> {
    read_broker_window(text).map_err(|what| Problem::bad_request(format!("broker_window: {what}")))
}

/// Reads the window for duplicates of a broker.
///
/// # Errors
/// It is no duration, or is longer than 7 days.
pub(crate) fn read_broker_window(text: &str) -> Result<Duration, String> {
    let window = crate::config::duration(text)?;
    if window > MAX_BROKER_WINDOW { Err(format!("{text:?} is longer than 7d")) } else { Ok(window) }
}

pub(super) fn number(name: &str, text: &str) -> Result<u64, Problem> {
    read_number(name, text).map_err(Problem::bad_request)
}

fn read_number(name: &str, text: &str) -> Result<u64, String> {
    let number = text.parse().ok().filter(|number| i64::try_from(*number).is_ok());
    number.ok_or_else(|| format!("{name}: {text:?} is not the number of a message."))
}

fn boolean(name: &str, text: &str) -> Result<bool, Problem> {
    text.parse().map_err(|_| Problem::bad_request(format!("{name}: {text:?} is neither true nor false")))
}

impl AuditTexts {
    pub(super) fn note(&self) -> AuditNote<'_> {
        AuditNote { actor: &self.actor, reason: &self.reason }
    }
}

/// The words of a database error, for the command line.
pub(crate) fn store_words(error: &StoreError) -> String {
    ErrorChain(error).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbers_that_take_too_long_are_left_out() {
        assert!(matches!(in_time(Ok(1)), Ok(Some(1))));
        assert!(matches!(in_time::<u8>(Err(StoreError::unavailable("late"))), Ok(None)));
        assert!(matches!(in_time::<u8>(Err(StoreError::invalid("no right"))), Err(MessageFailure::Read(_))));
    }

    #[test]
    fn a_change_that_was_never_sent_is_not_in_doubt() {
        let unsent = StoreError::unavailable("away").with_nothing_sent();
        assert!(matches!(MessageFailure::change(unsent), MessageFailure::Read(_)));
        let sent = MessageFailure::change(StoreError::unavailable("no reply"));
        assert!(matches!(sent, MessageFailure::Change(_)));
    }

    #[test]
    fn obstacles_are_accepted_by_name() {
        let words =
            |words: &[&str]| accepted(&words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
        assert_eq!(words(&["old", "new-identity"]), Ok(vec![Obstacle::Old, Obstacle::NewIdentity]));
        assert!(words(&["recent"]).unwrap_err().contains("cannot be accepted"));
        assert!(words(&["outcom-unknown"]).unwrap_err().contains("did you mean `outcome-unknown`?"));
        assert!(read_broker_window("8d").unwrap_err().contains("longer than 7d"));
        assert_eq!(read_broker_window("0s"), Ok(Duration::ZERO));
    }
}
