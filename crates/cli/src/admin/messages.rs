//! The endpoints for messages: dead letters and the outbox of a PostgreSQL database, and the audit trail of their changes.
//!
//! The functions here take a [`MessageOperator`] and return what the endpoints send. `oncegate dead-letters` and `oncegate
//! outbox` call them without a sidecar, too.

use std::time::Duration;

use axum::extract::{Path, State};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::header::HeaderMap;
use oncegate_core::{ErrorChain, StoreError, StoreErrorKind, Timestamp};
use oncegate_postgres::messages::{
    AuditNote, DeadLetterChange, DeadLetterCount, DeadLetterDetail, DeadLetterFilter, DeadLetterLine,
    MessageContent, MessageOperator, Obstacle, OutboxChange, OutboxLine, OutboxState, RequeueTerms,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::keys::{AdminResult, AuditTexts, Body, Pairs, from_json, limit, pairs};
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

/// Lists dead letters, the newest first, with their numbers by consumer, topic and reason, unless counting takes too long.
pub(crate) async fn list_dead_letters(
    operator: &MessageOperator,
    filter: &DeadLetterFilter,
    limit: usize,
) -> Result<Value, MessageFailure> {
    let letters = operator.dead_letters(filter, limit).await.map_err(MessageFailure::Read)?;
    let counts = in_time(operator.dead_letter_counts().await)?;
    let next = letters.last().filter(|_| letters.len() >= limit).map(|last| last.number);
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
    let totals: Option<Vec<_>> = counts.map(|counts| counts.iter().map(total).collect());
    Ok(json!({
        "dead_letters": letters.iter().map(|line| Value::Object(dead_letter_line(line))).collect::<Vec<_>>(),
        "totals": totals,
        "next": next,
    }))
}

/// Shows one dead letter; its headers and its payload only on demand.
pub(crate) async fn show_dead_letter(
    operator: &MessageOperator,
    number: u64,
    broker_window: Duration,
    with_payload: bool,
) -> Result<Value, MessageFailure> {
    let found = operator.dead_letter(number, broker_window).await.map_err(MessageFailure::Read)?;
    let DeadLetterDetail { line, content, identity, obstacles, is_sealed, refused, .. } =
        found.ok_or_else(|| no_dead_letter(number))?;
    let mut members = dead_letter_line(&line);
    members.insert("identity".to_owned(), identity.into());
    members.insert("sealed".to_owned(), is_sealed.into());
    if let Some(refused) = refused {
        members.insert("seal_refused".to_owned(), refused.into());
    }
    let obstacles = obstacles.iter().map(|obstacle| {
        json!({"name": obstacle.as_str(), "acceptable": obstacle.is_acceptable(), "text": obstacle_text(*obstacle)})
    });
    members.insert("obstacles".to_owned(), obstacles.collect());
    insert_content(&mut members, &content, with_payload);
    Ok(Value::Object(members))
}

/// Publishes the message of a dead letter again, through the outbox.
pub(crate) async fn requeue_dead_letter(
    operator: &MessageOperator,
    number: u64,
    terms: &RequeueTerms,
    note: AuditNote<'_>,
) -> Result<Value, MessageFailure> {
    let change = operator.requeue_dead_letter(number, terms, note).await.map_err(MessageFailure::change)?;
    match change {
        DeadLetterChange::Requeued(id) => {
            Ok(json!({"number": number, "outcome": "requeued", "message_id": id}))
        }
        DeadLetterChange::Refused(obstacles) => {
            let texts: Vec<_> = obstacles.iter().map(|obstacle| obstacle_advice(*obstacle)).collect();
            Err(MessageFailure::Refused(format!("Dead letter {number}: {}", texts.join(" "))))
        }
        other => Err(dead_letter_failure(number, &other)),
    }
}

/// Deletes a dead letter.
pub(crate) async fn drop_dead_letter(
    operator: &MessageOperator,
    number: u64,
    note: AuditNote<'_>,
) -> Result<Value, MessageFailure> {
    match operator.drop_dead_letter(number, note).await.map_err(MessageFailure::change)? {
        DeadLetterChange::Dropped => Ok(json!({"number": number, "outcome": "dropped"})),
        other => Err(dead_letter_failure(number, &other)),
    }
}

/// Lists messages of the outbox, the oldest first, with their numbers by state, unless counting takes too long.
pub(crate) async fn list_outbox(
    operator: &MessageOperator,
    state: Option<OutboxState>,
    after: Option<u64>,
    limit: usize,
) -> Result<Value, MessageFailure> {
    let messages = operator.outbox(state, after, limit).await.map_err(MessageFailure::Read)?;
    let counts = in_time(operator.outbox_counts().await)?;
    let next = messages.last().filter(|_| messages.len() >= limit).map(|last| last.seq);
    Ok(json!({
        "messages": messages.iter().map(|line| Value::Object(outbox_line(line))).collect::<Vec<_>>(),
        "status": counts.map(|counts| json!({
            "waiting": counts.waiting,
            "oldest_seconds": counts.oldest.map(|age| age.as_secs()),
            "failing": counts.failing,
            "refused": counts.refused,
        })),
        "next": next,
    }))
}

/// Shows one message of the outbox; its headers and its payload only on demand.
pub(crate) async fn show_outbox_message(
    operator: &MessageOperator,
    seq: u64,
    with_payload: bool,
) -> Result<Value, MessageFailure> {
    let found = operator.outbox_message(seq).await.map_err(MessageFailure::Read)?;
    let found = found.ok_or_else(|| no_outbox_message(seq))?;
    let mut members = outbox_line(&found.line);
    insert_content(&mut members, &found.content, with_payload);
    Ok(Value::Object(members))
}

/// Publishes a refused message of the outbox again.
pub(crate) async fn requeue_outbox_message(
    operator: &MessageOperator,
    seq: u64,
    note: AuditNote<'_>,
) -> Result<Value, MessageFailure> {
    outbox_outcome(seq, operator.requeue_outbox_message(seq, note).await.map_err(MessageFailure::change)?)
}

/// Deletes a refused message of the outbox.
pub(crate) async fn drop_outbox_message(
    operator: &MessageOperator,
    seq: u64,
    note: AuditNote<'_>,
) -> Result<Value, MessageFailure> {
    outbox_outcome(seq, operator.drop_outbox_message(seq, note).await.map_err(MessageFailure::change)?)
}

/// The changes that operators made to messages, the newest first.
pub(crate) async fn message_audit(
    operator: &MessageOperator,
    before: Option<u64>,
    limit: usize,
) -> Result<Value, MessageFailure> {
    let entries = operator.audit(before, limit).await.map_err(MessageFailure::Read)?;
    let next = entries.last().filter(|_| entries.len() >= limit).map(|last| last.number);
    let entries = entries.iter().map(|entry| {
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
    Ok(json!({"entries": entries.collect::<Vec<_>>(), "next": next}))
}

/// Numbers that took too long to count are left out: the listing is what an operator needs, most of all if there are many.
fn in_time<T>(counted: Result<T, StoreError>) -> Result<Option<T>, MessageFailure> {
    match counted {
        Ok(counts) => Ok(Some(counts)),
        Err(error) if error.kind() == StoreErrorKind::Unavailable => Ok(None),
        Err(error) => Err(MessageFailure::Read(error)),
    }
}

fn outbox_outcome(seq: u64, change: OutboxChange) -> Result<Value, MessageFailure> {
    match change {
        OutboxChange::Requeued => Ok(json!({"seq": seq, "outcome": "requeued"})),
        OutboxChange::Dropped => Ok(json!({"seq": seq, "outcome": "dropped"})),
        OutboxChange::NotRefused(state) => {
            let why = match state {
                OutboxState::Failing => "a relay tries it again by itself",
                _ => "a relay publishes it as soon as it can",
            };
            Err(MessageFailure::Refused(format!(
                "Message {seq} is {}: {why}. Only a message that the broker has refused can be requeued or dropped.",
                state.as_str()
            )))
        }
        _ => Err(no_outbox_message(seq)),
    }
}

fn dead_letter_failure(number: u64, change: &DeadLetterChange) -> MessageFailure {
    match change {
        DeadLetterChange::Locked => MessageFailure::Locked(format!(
            "Another transaction holds dead letter {number} or its message. Nothing was changed: try again when it has ended."
        )),
        _ => no_dead_letter(number),
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
fn operator(state: &AdminState) -> Result<&MessageOperator, Problem> {
    state.messages.as_ref().ok_or_else(Problem::no_messages)
}

pub(super) async fn dead_letters(State(state): State<AdminState>, query: Pairs) -> AdminResult {
    let mut filter = DeadLetterFilter::default();
    let mut most = 100;
    for (name, text) in pairs(query, &["consumer", "topic", "reason", "before", "limit"])? {
        match name.as_str() {
            "consumer" => filter.consumer = Some(text),
            "topic" => filter.topic = Some(text),
            "reason" => filter.reason = Some(text),
            "before" => filter.before = Some(number(&name, &text)?),
            _ => most = limit(&name, &text)?,
        }
    }
    Ok(view::json(&list_dead_letters(operator(&state)?, &filter, most).await?))
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
    Ok(view::json(&show_dead_letter(operator(&state)?, letter, window, with_payload).await?))
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

pub(super) async fn requeue_letter(
    State(state): State<AdminState>,
    Path(letter): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> AdminResult {
    let letter = number("number", &letter)?;
    let request: RequeueRequest = from_json(body)?;
    let texts = AuditTexts::read(request.actor.as_deref(), &request.reason, &headers)?;
    let window = request.broker_window.as_deref().map_or(Ok(BROKER_WINDOW), broker_window)?;
    let terms = RequeueTerms {
        accepted: accepted(&request.accept).map_err(Problem::bad_request)?,
        broker_window: window,
    };
    let done = requeue_dead_letter(operator(&state)?, letter, &terms, texts.note()).await?;
    Ok(changed("dead letter", letter, &done, &texts))
}

/// A change that needs only its reason.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReasonRequest {
    reason: String,
    actor: Option<String>,
}

impl ReasonRequest {
    fn read(headers: &HeaderMap, body: Body) -> Result<AuditTexts, Problem> {
        let request: Self = from_json(body)?;
        AuditTexts::read(request.actor.as_deref(), &request.reason, headers)
    }
}

pub(super) async fn drop_letter(
    State(state): State<AdminState>,
    Path(letter): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> AdminResult {
    let letter = number("number", &letter)?;
    let texts = ReasonRequest::read(&headers, body)?;
    let done = drop_dead_letter(operator(&state)?, letter, texts.note()).await?;
    Ok(changed("dead letter", letter, &done, &texts))
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
    Ok(view::json(&list_outbox(operator(&state)?, only, after, most).await?))
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
    Ok(view::json(&show_outbox_message(operator(&state)?, seq, with_payload).await?))
}

pub(super) async fn requeue_outbox(
    State(state): State<AdminState>,
    Path(seq): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> AdminResult {
    let seq = number("seq", &seq)?;
    let texts = ReasonRequest::read(&headers, body)?;
    let done = requeue_outbox_message(operator(&state)?, seq, texts.note()).await?;
    Ok(changed("outbox", seq, &done, &texts))
}

pub(super) async fn drop_outbox(
    State(state): State<AdminState>,
    Path(seq): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> AdminResult {
    let seq = number("seq", &seq)?;
    let texts = ReasonRequest::read(&headers, body)?;
    let done = drop_outbox_message(operator(&state)?, seq, texts.note()).await?;
    Ok(changed("outbox", seq, &done, &texts))
}

pub(super) async fn audit(State(state): State<AdminState>, query: Pairs) -> AdminResult {
    let (mut before, mut most) = (None, 100);
    for (name, text) in pairs(query, &["before", "limit"])? {
        match name.as_str() {
            "before" => before = Some(number(&name, &text)?),
            _ => most = limit(&name, &text)?,
        }
    }
    Ok(view::json(&message_audit(operator(&state)?, before, most).await?))
}

/// Logs a change, and answers with it.
fn changed(kind: &str, number: u64, done: &Value, texts: &AuditTexts) -> Response {
    let note = texts.note();
    tracing::info!(
        target: OPERATOR,
        kind,
        number,
        outcome = done["outcome"].as_str().unwrap_or_default(),
        actor = note.actor,
        reason = note.reason,
        "an operator changed a message"
    );
    view::json(done)
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

fn broker_window(text: &str) -> Result<Duration, Problem> {
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

fn number(name: &str, text: &str) -> Result<u64, Problem> {
    let number = text.parse().ok().filter(|number| i64::try_from(*number).is_ok());
    number.ok_or_else(|| Problem::bad_request(format!("{name}: {text:?} is not the number of a message.")))
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
