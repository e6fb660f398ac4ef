//! Dead letters and the outbox: lists, one message, its payload on demand, and its changes.
//!
//! A change has the steps of that of a record ([`change`](super::change)): a form, a preview, a confirmation with the version of
//! the message that the operator saw. Names, topics, errors and payloads come from other programs: their control
//! characters and marks of direction are shown escaped, so that a text cannot look like another one.

use std::time::Duration;

use askama::Template;
use axum::Router;
use axum::extract::{Extension, Path, State};
use axum::response::Response;
use axum::routing::{get, post};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::StatusCode;
use oncegate_core::Timestamp;
use oncegate_postgres::messages::{
    DeadLetterDetail, DeadLetterLine, MessageContent, Obstacle, OutboxDetail, OutboxLine, OutboxState,
    RequeueTerms,
};

use super::access::{Access, FormFields};
use super::format::{bytes, duration, moment, number, query_text};
use super::{Frame, PageResult, Reveal, RevealedPart, Section, page, page_with, redirect};
use crate::admin::keys::{Pairs, pairs};
use crate::admin::messages::{
    self as operations, BROKER_WINDOW, DeadLetterPage, LETTER_FILTERS, LetterSelection, MessageAction,
    MessageChange, MessageKind, OutboxPage, change_and_log, find_dead_letter, find_outbox_message,
    not_refused, obstacle_text, operator, outbox_state,
};
use crate::admin::problem::Problem;
use crate::admin::{AdminState, view};
use crate::config::duration_text;
use crate::keys::print::printable;
use crate::log::OPERATOR;
use crate::style::cut;

/// The messages of a page.
const PAGE: usize = 50;

/// The characters of an error in a list. The page of the message has all of it.
const MAX_LISTED_ERROR: usize = 160;

/// The bytes of a payload, and of a header, that a page shows. The commands and the API give all of it.
const MAX_SHOWN_PAYLOAD: usize = 256 * 1024;
const MAX_SHOWN_HEADER: usize = 4096;

/// The headers that a page shows.
const MAX_SHOWN_HEADERS: usize = 200;

/// The pages about messages.
pub(super) fn router() -> Router<AdminState> {
    let lists = Router::new().route("/dead-letters", get(dead_letters)).route("/outbox", get(outbox));
    [MessageKind::DeadLetter, MessageKind::Outbox].into_iter().fold(lists, |pages, kind| {
        let at = |rest: &str| format!("/{}/{rest}", kind.path());
        let own = Router::new()
            .route(&at("{number}"), get(show))
            .route(&at("{number}/payload"), post(reveal))
            .route(&at("{number}/{action}"), get(form).post(decide));
        pages.merge(own.layer(Extension(kind)))
    })
}

#[derive(Template)]
#[template(path = "no_messages.html")]
struct NoMessagesPage {
    frame: Frame,
    kind: MessageKind,
    store: &'static str,
}

/// The page that replaces a list if the store is not on PostgreSQL.
fn no_messages(state: &AdminState, access: &Access, kind: MessageKind) -> Response {
    let frame = Frame::new(state, access, Section::Messages, title(kind));
    page(&NoMessagesPage { frame, kind, store: state.engine.store().capabilities().name })
}

const fn title(kind: MessageKind) -> &'static str {
    match kind {
        MessageKind::DeadLetter => "Dead letters",
        MessageKind::Outbox => "Outbox",
    }
}

/// The name of one message.
fn name_of(kind: MessageKind, number: u64) -> String {
    match kind {
        MessageKind::DeadLetter => format!("Dead letter {number}"),
        MessageKind::Outbox => format!("Message {number} of the outbox"),
    }
}

fn action_of(path: &str) -> Option<MessageAction> {
    [MessageAction::Requeue, MessageAction::Drop].into_iter().find(|action| action.as_str() == path)
}

/// A text of a message in one line.
fn line(text: &str) -> String {
    printable(text, false)
}

/// The words after a change, from the parameter `done` such as `requeue-12`.
fn notice(kind: MessageKind, done: Option<&str>) -> String {
    let Some((action, number)) = done.and_then(|done| done.split_once('-')) else { return String::new() };
    let (Some(action), Ok(number)) = (action_of(action), number.parse()) else { return String::new() };
    let name = name_of(kind, number);
    match (kind, action) {
        (MessageKind::DeadLetter, MessageAction::Requeue) => {
            format!(
                "Done: {name} is in the outbox now. A relay publishes it; while none runs, it waits there."
            )
        }
        (MessageKind::Outbox, MessageAction::Requeue) => {
            format!("Done: {name} is published again as soon as a relay runs.")
        }
        (_, MessageAction::Drop) => format!("Done: {name} was deleted."),
    }
}

#[derive(Template)]
#[template(path = "dead_letters.html")]
struct DeadLettersPage {
    frame: Frame,
    kind: MessageKind,
    filters: Filters,
    rows: Vec<LetterRow>,
    /// The groups of all dead letters; `None` if counting takes too long.
    groups: Option<Vec<GroupRow>>,
    total: String,
    is_complete: bool,
    is_continued: bool,
    first_page: String,
    next_page: Option<String>,
    notice: String,
    error: String,
}

/// The filters as they were given.
#[derive(Default)]
struct Filters(Vec<(String, String)>);

impl Filters {
    fn get(&self, name: &str) -> &str {
        self.0.iter().find(|(own, _)| own == name).map_or("", |(_, value)| value)
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The address of the list with these filters, from a place on.
    fn address(&self, before: Option<u64>) -> String {
        let pairs = self.0.iter().map(|(name, value)| format!("{name}={}", query_text(value)));
        let query: Vec<_> = pairs.chain(before.map(|before| format!("before={before}"))).collect();
        if query.is_empty() {
            "/dead-letters".to_owned()
        } else {
            format!("/dead-letters?{}", query.join("&"))
        }
    }
}

struct LetterRow {
    number: u64,
    age: String,
    at: String,
    consumer: String,
    topic: String,
    reason: String,
    attempts: u32,
    size: String,
    error: String,
}

impl LetterRow {
    fn new(letter: &DeadLetterLine) -> Self {
        Self {
            number: letter.number,
            age: age(letter.now, letter.at),
            at: time(letter.at),
            consumer: line(&letter.consumer),
            topic: line(&letter.topic),
            reason: line(&letter.reason),
            attempts: letter.attempts,
            size: size(letter.payload_bytes),
            error: cut(&line(&letter.error), MAX_LISTED_ERROR),
        }
    }
}

/// The dead letters of one consumer, topic and reason.
struct GroupRow {
    href: String,
    consumer: String,
    topic: String,
    reason: String,
    count: String,
    oldest: String,
    newest: String,
}

fn age(now: Timestamp, at: Timestamp) -> String {
    duration(now.since(at).as_secs())
}

fn time(at: Timestamp) -> String {
    moment(&view::time(at))
}

fn size(count: u64) -> String {
    bytes(usize::try_from(count).unwrap_or(usize::MAX))
}

async fn dead_letters(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    query: Pairs,
) -> PageResult {
    let kind = MessageKind::DeadLetter;
    if state.messages.is_none() {
        return Ok(no_messages(&state, &access, kind));
    }
    let (mut selection, mut filters) = (LetterSelection::default(), Filters::default());
    let (mut is_continued, mut done, mut error) = (false, None, String::new());
    for (name, text) in pairs(query, &[&LETTER_FILTERS[..], &["done"]].concat())? {
        if name == "done" {
            done = Some(text);
            continue;
        }
        let text = text.trim().to_owned();
        if let Err(words) = selection.add(&name, &text, state.engine.store().now()) {
            error = words;
        }
        if name == "before" {
            is_continued = true;
        } else {
            filters.0.push((name, text));
        }
    }
    let empty =
        DeadLetterPage { letters: Vec::new(), counts: Some(Vec::new()), next: None, is_complete: true };
    let listed = if error.is_empty() {
        DeadLetterPage::read(operator(&state)?, &selection, PAGE).await.map_err(Problem::from)?
    } else {
        empty
    };
    let total = listed.counts.iter().flatten().map(|group| group.count).sum();
    let groups = listed.counts.map(|groups| {
        let row = |group: oncegate_postgres::messages::DeadLetterCount| GroupRow {
            href: format!(
                "/dead-letters?consumer={}&topic={}&reason={}",
                query_text(&group.consumer),
                query_text(&group.topic),
                query_text(&group.reason)
            ),
            consumer: line(&group.consumer),
            topic: line(&group.topic),
            reason: line(&group.reason),
            count: number(group.count),
            oldest: time(group.oldest),
            newest: time(group.newest),
        };
        groups.into_iter().map(row).collect()
    });
    let template = DeadLettersPage {
        frame: Frame::new(&state, &access, Section::Messages, title(kind)),
        kind,
        rows: listed.letters.iter().map(LetterRow::new).collect(),
        groups,
        total: number(total),
        is_complete: listed.is_complete,
        is_continued,
        first_page: filters.address(None),
        next_page: listed.next.map(|next| filters.address(Some(next))),
        filters,
        notice: notice(kind, done.as_deref()),
        error,
    };
    let status = if template.error.is_empty() { StatusCode::OK } else { StatusCode::BAD_REQUEST };
    Ok(page_with(status, &template))
}

#[derive(Template)]
#[template(path = "outbox.html")]
struct OutboxListPage {
    frame: Frame,
    kind: MessageKind,
    /// The states that can be chosen, and true for the chosen one.
    states: Vec<(&'static str, bool)>,
    /// The title if the list is empty.
    nothing: String,
    rows: Vec<OutboxRow>,
    /// The numbers of messages in words; empty if counting takes too long.
    status: String,
    is_continued: bool,
    first_page: String,
    next_page: Option<String>,
    notice: String,
}

struct OutboxRow {
    seq: u64,
    state: &'static str,
    age: String,
    at: String,
    topic: String,
    order_key: String,
    blocks_key: bool,
    attempts: u32,
    size: String,
    error: String,
}

impl OutboxRow {
    fn new(message: &OutboxLine) -> Self {
        Self {
            seq: message.seq,
            state: message.state.as_str(),
            age: age(message.now, message.created_at),
            at: time(message.created_at),
            topic: line(&message.topic),
            order_key: cut(&order_key(message.order_key.as_deref()), 24),
            blocks_key: message.blocks_key,
            attempts: message.attempts,
            size: size(message.payload_bytes),
            error: cut(&line(message.error.as_deref().unwrap_or_default()), MAX_LISTED_ERROR),
        }
    }
}

/// An order key as text, or in base64 if it is not text.
fn order_key(key: Option<&[u8]>) -> String {
    match key.map(std::str::from_utf8) {
        None => String::new(),
        Some(Ok(text)) => line(text),
        Some(Err(_)) => format!("{} (base64)", STANDARD.encode(key.unwrap_or_default())),
    }
}

async fn outbox(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    query: Pairs,
) -> PageResult {
    let kind = MessageKind::Outbox;
    if state.messages.is_none() {
        return Ok(no_messages(&state, &access, kind));
    }
    let (mut only, mut after, mut done) = (Some(OutboxState::Refused), None, None);
    for (name, text) in pairs(query, &["state", "after", "done"])? {
        match name.as_str() {
            "state" => only = outbox_state(&text).map_err(Problem::bad_request)?,
            "after" => after = Some(operations::number(&name, &text)?),
            _ => done = Some(text),
        }
    }
    let listed = OutboxPage::read(operator(&state)?, only, after, PAGE).await.map_err(Problem::from)?;
    let chosen = only.map_or("all", OutboxState::as_str);
    let status = listed.counts.map_or_else(String::new, |counts| {
        let oldest = counts
            .oldest
            .map(|age| format!(", the oldest for {}", duration(age.as_secs())))
            .unwrap_or_default();
        format!(
            "{} waiting{oldest}, {} of them failing; {} refused",
            number(counts.waiting),
            number(counts.failing),
            number(counts.refused)
        )
    });
    Ok(page(&OutboxListPage {
        frame: Frame::new(&state, &access, Section::Messages, title(kind)),
        kind,
        nothing: match only {
            Some(state) => format!("No message is {}", state.as_str()),
            None => "The outbox is empty".to_owned(),
        },
        states: ["refused", "failing", "waiting", "all"].map(|state| (state, state == chosen)).into(),
        rows: listed.messages.iter().map(OutboxRow::new).collect(),
        status,
        is_continued: after.is_some(),
        first_page: format!("/outbox?state={chosen}"),
        next_page: listed.next.map(|next| format!("/outbox?state={chosen}&after={next}")),
        notice: notice(kind, done.as_deref()),
    }))
}

/// One message of either kind.
enum Message {
    DeadLetter(Box<DeadLetterDetail>),
    Outbox(Box<OutboxDetail>),
}

impl Message {
    /// Reads the message that an address names. `window` is the time for which the broker drops copies.
    async fn find(
        state: &AdminState,
        kind: MessageKind,
        number: u64,
        window: Duration,
    ) -> Result<Self, Problem> {
        let operator = operator(state)?;
        Ok(match kind {
            MessageKind::DeadLetter => {
                Self::DeadLetter(Box::new(find_dead_letter(operator, number, window).await?))
            }
            MessageKind::Outbox => Self::Outbox(Box::new(find_outbox_message(operator, number).await?)),
        })
    }

    const fn kind(&self) -> MessageKind {
        match self {
            Self::DeadLetter(_) => MessageKind::DeadLetter,
            Self::Outbox(_) => MessageKind::Outbox,
        }
    }

    const fn number(&self) -> u64 {
        match self {
            Self::DeadLetter(found) => found.line.number,
            Self::Outbox(found) => found.line.seq,
        }
    }

    fn href(&self) -> String {
        format!("/{}/{}", self.kind().path(), self.number())
    }

    fn topic(&self) -> String {
        line(match self {
            Self::DeadLetter(found) => &found.line.topic,
            Self::Outbox(found) => &found.line.topic,
        })
    }

    const fn content(&self) -> &MessageContent {
        match self {
            Self::DeadLetter(found) => &found.content,
            Self::Outbox(found) => &found.content,
        }
    }

    /// The state as a word and its class.
    fn state(&self) -> (String, &'static str) {
        match self {
            Self::DeadLetter(found) => (line(&found.line.reason), "unknown"),
            Self::Outbox(found) => (found.line.state.as_str().to_owned(), found.line.state.as_str()),
        }
    }

    /// The version of the message. Each change has another one.
    fn version(&self) -> String {
        match self {
            Self::DeadLetter(found) => format!("{}-{}", found.line.at.as_millis(), found.line.attempts),
            Self::Outbox(found) => format!(
                "{}-{}-{}",
                found.line.state.as_str(),
                found.line.attempts,
                found.line.refused_at.map_or(0, Timestamp::as_millis)
            ),
        }
    }

    /// The reason why its content cannot be opened.
    fn seal_refused(&self) -> Option<&str> {
        match self {
            Self::DeadLetter(found) => found.refused.as_deref(),
            Self::Outbox(_) => None,
        }
    }

    /// The reasons against publishing it again.
    fn obstacles(&self) -> &[Obstacle] {
        match self {
            Self::DeadLetter(found) => &found.obstacles,
            Self::Outbox(_) => &[],
        }
    }

    /// Refuses a change that the state of the message does not allow.
    fn check(&self) -> Result<(), Problem> {
        match self {
            Self::Outbox(found) if found.line.state != OutboxState::Refused => {
                Err(not_refused(found.line.seq, found.line.state).into())
            }
            _ => Ok(()),
        }
    }

    /// The next step for the operator, as a title and a text.
    fn advice(&self) -> (&'static str, String) {
        match self {
            Self::DeadLetter(found) => (
                "Find out why it failed",
                format!("{} Mend the cause, then choose below.", letter_reason(&found.line)),
            ),
            Self::Outbox(found) if found.line.is_held => {
                ("Nothing to do", "A relay publishes it now.".to_owned())
            }
            Self::Outbox(found) => match found.line.state {
                OutboxState::Refused => {
                    let blocks = if found.line.blocks_key {
                        " Messages with its topic and order key wait behind it."
                    } else {
                        ""
                    };
                    (
                        "The broker will not take it",
                        format!(
                            "A relay tries it no more.{blocks} Read the error, mend the cause at the broker or in the program that sends, then \
                             choose below."
                        ),
                    )
                }
                OutboxState::Failing => (
                    "Look at the broker",
                    "An attempt has failed, and a relay tries it again by itself.".to_owned(),
                ),
                _ => (
                    "Nothing to do",
                    "A relay publishes it as soon as it can. If none runs, it waits.".to_owned(),
                ),
            },
        }
    }

    fn facts(&self) -> Vec<Fact> {
        let fact = |name, value: String| Fact { name, value, note: "" };
        let mut facts = match self {
            Self::DeadLetter(found) => {
                let (letter, identity) = (&found.line, &found.identity);
                vec![
                    fact("Consumer", line(&letter.consumer)),
                    fact("Topic", line(&letter.topic)),
                    fact("Reason", line(&letter.reason)),
                    fact("Error", line(&letter.error)),
                    fact("Failed attempts", number(letter.attempts.into())),
                    fact(
                        "Given up",
                        format!("{} ago, at {} UTC", age(letter.now, letter.at), time(letter.at)),
                    ),
                    Fact {
                        name: "Identity",
                        value: identity.as_deref().map_or_else(|| "–".to_owned(), line),
                        note: "the place from which its consumer takes the identity of a message",
                    },
                    Fact { name: "Receipt", value: letter.record.to_string(), note: "" },
                    fact(
                        "Sealed",
                        match (found.is_sealed, &found.refused) {
                            (false, _) => String::new(),
                            (true, None) => "yes, and opened here".to_owned(),
                            (true, Some(why)) => format!("yes, and not opened: {}", line(why)),
                        },
                    ),
                    fact("Broker's identifier", line(letter.broker_id.as_deref().unwrap_or_default())),
                    fact("Order key", order_key(letter.order_key.as_deref())),
                ]
            }
            Self::Outbox(found) => {
                let message = &found.line;
                vec![
                    fact("Identifier", line(&message.id)),
                    fact("Topic", line(&message.topic)),
                    fact("Order key", order_key(message.order_key.as_deref())),
                    fact("Failed attempts", number(message.attempts.into())),
                    fact("Error", line(message.error.as_deref().unwrap_or_default())),
                    fact(
                        "Sent",
                        format!(
                            "{} ago, at {} UTC",
                            age(message.now, message.created_at),
                            time(message.created_at)
                        ),
                    ),
                    fact(
                        "Refused at",
                        message.refused_at.map_or_else(String::new, |at| format!("{} UTC", time(at))),
                    ),
                ]
            }
        };
        facts.retain(|fact| !fact.value.is_empty());
        facts
    }
}

/// The reason of a dead letter in a sentence.
fn letter_reason(letter: &DeadLetterLine) -> String {
    match letter.reason.as_str() {
        "attempts-exhausted" => {
            format!("Its consumer tried it {} times, and each attempt failed.", number(letter.attempts.into()))
        }
        "rejected" => "Its consumer rejected it: it cannot be processed as it is.".to_owned(),
        "no-identity" => "It has no identity, so its consumer cannot tell whether it was processed before.".to_owned(),
        "identity-reused" => "Another payload was processed under its identity.".to_owned(),
        "outcome-unknown" => {
            "It may have taken effect: its consumer committed by itself, or ended in the middle. Look into its database.".to_owned()
        }
        other => format!("Its consumer gave it up, with a reason of its own: {}.", line(other)),
    }
}

struct Fact {
    name: &'static str,
    value: String,
    note: &'static str,
}

struct ShownHeader {
    name: String,
    value: String,
}

/// An obstacle, and true if the operator can accept it.
struct ShownObstacle {
    word: &'static str,
    text: &'static str,
    is_acceptable: bool,
    is_accepted: bool,
}

#[derive(Template)]
#[template(path = "message.html")]
struct MessagePage {
    frame: Frame,
    kind: MessageKind,
    name: String,
    href: String,
    topic: String,
    state: (String, &'static str),
    advice: (&'static str, String),
    obstacles: Vec<ShownObstacle>,
    has_actions: bool,
    facts: Vec<Fact>,
    headers: Vec<ShownHeader>,
    more_headers: usize,
    payload_size: String,
    /// The reason why the content cannot be opened.
    seal_refused: Option<String>,
    /// The payload, if it is shown.
    payload: Option<String>,
    is_text: bool,
    is_cut: bool,
    reason: String,
    error: String,
}

/// The beginning of some bytes as text, or in base64 if they are not text. The flags are true if they are text, and if something
/// is missing.
fn shown(content: &[u8], max: usize, with_lines: bool) -> (String, bool, bool) {
    let is_cut = content.len() > max;
    match std::str::from_utf8(content) {
        Ok(text) => {
            let end = text.floor_char_boundary(max);
            (printable(text.get(..end).unwrap_or(text), with_lines), true, is_cut)
        }
        Err(_) => (STANDARD.encode(content.get(..max).unwrap_or(content)), false, is_cut),
    }
}

impl MessagePage {
    fn new(state: &AdminState, access: &Access, message: &Message, reveal: Option<&Revealing>) -> Self {
        let name = name_of(message.kind(), message.number());
        let content = message.content();
        // A sealed form tells nothing, and is not the content.
        let is_revealed = matches!(reveal, Some(Revealing::Shown { .. })) && message.seal_refused().is_none();
        let headers = content.headers.iter().take(MAX_SHOWN_HEADERS).map(|(name, value)| {
            let value = if is_revealed {
                let (text, is_text, is_cut) = shown(value, MAX_SHOWN_HEADER, false);
                format!("{text}{}{}", if is_cut { "…" } else { "" }, if is_text { "" } else { " (base64)" })
            } else {
                bytes(value.len())
            };
            ShownHeader { name: line(name), value }
        });
        let (payload, is_text, is_cut) = if is_revealed {
            let (text, is_text, is_cut) = shown(&content.payload, MAX_SHOWN_PAYLOAD, true);
            (Some(text), is_text, is_cut)
        } else {
            (None, true, false)
        };
        let (reason, error) = match reveal {
            Some(Revealing::Shown { reason }) => (reason.clone(), String::new()),
            Some(Revealing::Refused { reason, error }) => (reason.clone(), error.clone()),
            None => Default::default(),
        };
        Self {
            frame: Frame::new(state, access, Section::Messages, name.clone()),
            kind: message.kind(),
            name,
            href: message.href(),
            topic: message.topic(),
            state: message.state(),
            advice: message.advice(),
            obstacles: shown_obstacles(message.obstacles(), &[]),
            has_actions: message.check().is_ok(),
            facts: message.facts(),
            headers: headers.collect(),
            more_headers: content.headers.len().saturating_sub(MAX_SHOWN_HEADERS),
            payload_size: bytes(content.payload.len()),
            seal_refused: message.seal_refused().map(line),
            payload,
            is_text,
            is_cut,
            reason,
            error,
        }
    }
}

fn shown_obstacles(obstacles: &[Obstacle], accepted: &[Obstacle]) -> Vec<ShownObstacle> {
    let shown = obstacles.iter().map(|obstacle| ShownObstacle {
        word: obstacle.as_str(),
        text: obstacle_text(*obstacle),
        is_acceptable: obstacle.is_acceptable(),
        is_accepted: accepted.contains(obstacle),
    });
    shown.collect()
}

async fn show(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    Extension(kind): Extension<MessageKind>,
    Path(number): Path<String>,
) -> PageResult {
    let number = operations::number("number", &number)?;
    let message = Message::find(&state, kind, number, BROKER_WINDOW).await?;
    Ok(page(&MessagePage::new(&state, &access, &message, None)))
}

/// The result of a request for the payload.
enum Revealing {
    Shown { reason: String },
    Refused { reason: String, error: String },
}

/// Shows the headers and the payload, after the operator and the reason were written down.
async fn reveal(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    Extension(kind): Extension<MessageKind>,
    Path(number): Path<String>,
    Extension(fields): Extension<FormFields>,
) -> PageResult {
    let number = operations::number("number", &number)?;
    let message = Message::find(&state, kind, number, BROKER_WINDOW).await?;
    let (revealing, status) = match fields.audit() {
        Ok(texts) => {
            let (actor, reason) = (texts.actor, texts.reason);
            tracing::warn!(
                target: OPERATOR,
                kind = kind.as_str(),
                number,
                actor,
                reason,
                "an operator looked at a message"
            );
            let at = state.engine.store().now();
            let part = RevealedPart::Message(kind, number);
            state.dashboard.add_reveal(Reveal { at, part, actor, reason: reason.clone() });
            (Revealing::Shown { reason }, StatusCode::OK)
        }
        Err(problem) => {
            let (reason, error) = (fields.get("reason").to_owned(), problem.detail().to_owned());
            (Revealing::Refused { reason, error }, StatusCode::BAD_REQUEST)
        }
    };
    Ok(page_with(status, &MessagePage::new(&state, &access, &message, Some(&revealing))))
}

#[derive(Template)]
#[template(path = "message_change.html")]
struct MessageChangePage {
    frame: Frame,
    is_preview: bool,
    name: String,
    href: String,
    topic: String,
    state: (String, &'static str),
    action: MessageAction,
    label: &'static str,
    note: String,
    /// The consequences of the change.
    consequences: Vec<String>,
    obstacles: Vec<ShownObstacle>,
    has_window: bool,
    seen: String,
    entered: Entered,
    error: String,
}

/// The values of the form.
struct Entered {
    actor: String,
    reason: String,
    window: String,
    accepted: Vec<Obstacle>,
}

impl Entered {
    fn first(access: &Access) -> Self {
        Self {
            actor: access.actor.clone().unwrap_or_default(),
            reason: String::new(),
            window: duration_text(BROKER_WINDOW),
            accepted: Vec::new(),
        }
    }

    fn read(fields: &FormFields) -> Self {
        Self {
            actor: fields.get("actor").to_owned(),
            reason: fields.get("reason").to_owned(),
            window: fields.get("broker_window").trim().to_owned(),
            accepted: fields.all("accept").filter_map(Obstacle::from_word).collect(),
        }
    }

    /// The window for duplicates of the broker.
    fn window(&self) -> Result<Duration, Problem> {
        if self.window.is_empty() { Ok(BROKER_WINDOW) } else { operations::broker_window(&self.window) }
    }
}

/// A message, and what is to be done with it.
struct Subject {
    message: Message,
    action: MessageAction,
}

impl Subject {
    async fn find(
        state: &AdminState,
        (kind, number, action): (MessageKind, &str, &str),
        window: Duration,
    ) -> Result<Self, Problem> {
        let path = || format!("/{}/{number}/{action}", kind.path());
        let action = action_of(action).ok_or_else(|| Problem::no_such_path(&path()))?;
        let number = operations::number("number", number)?;
        Ok(Self { message: Message::find(state, kind, number, window).await?, action })
    }

    const fn label(&self) -> &'static str {
        match self.action {
            MessageAction::Requeue => "Publish it again",
            MessageAction::Drop => "Delete it",
        }
    }

    fn note(&self) -> String {
        match (&self.message, self.action) {
            (Message::DeadLetter(_), MessageAction::Requeue) => {
                "The message goes into the outbox, and the dead letter is gone. Its consumer processes it as a new one."
            }
            (Message::DeadLetter(_), MessageAction::Drop) => {
                "The dead letter and its payload are deleted. The message is not processed."
            }
            (Message::Outbox(_), MessageAction::Requeue) => {
                "A relay publishes it again, at its place among those with its order key."
            }
            (Message::Outbox(_), MessageAction::Drop) => "It is deleted, and never published. Those behind it go on.",
        }
        .to_owned()
    }

    fn consequences(&self) -> Vec<String> {
        let topic = self.message.topic();
        match (&self.message, self.action) {
            (Message::DeadLetter(found), MessageAction::Requeue) => {
                let mut lines = vec![
                format!("The message is written into the outbox for the topic {topic}, and the dead letter is removed, in one transaction."),
                "A relay of this outbox publishes it. If none runs, the message waits.".to_owned(),
                format!("The consumer {} processes it as a new message, once.", line(&found.line.consumer)),
                "Every other consumer of the topic gets it, too. Those that processed it recognise it, as long as they keep its receipt."
                    .to_owned(),
            ];
                if found.is_sealed {
                    let clear = "Its content is sealed here. It is in clear in the outbox until a relay has published it.";
                    lines.push(clear.to_owned());
                }
                lines
            }
            (Message::DeadLetter(found), MessageAction::Drop) => vec![
                format!("The payload ({}) is deleted for ever. There is no way back.", size(found.line.payload_bytes)),
                "The message stays dead: if the broker delivers it again, it is not processed, as long as its receipt is kept.".to_owned(),
            ],
            (Message::Outbox(_), MessageAction::Requeue) => vec![
                format!("A relay publishes it to the topic {topic} as soon as it can."),
                "If the broker refuses it again, it comes back to this list.".to_owned(),
            ],
            (Message::Outbox(found), MessageAction::Drop) => {
                let mut lines = vec![format!(
                    "The message ({}) is deleted for ever, and no consumer gets it. There is no way back.",
                    size(found.line.payload_bytes)
                )];
                if found.line.blocks_key {
                    lines.push("The messages with its topic and order key that wait behind it go on without it.".to_owned());
                }
                lines
            }
        }
    }

    /// Refuses a requeue against which something stands that the operator did not accept, or that no one can.
    fn check_obstacles(&self, accepted: &[Obstacle]) -> Result<(), Problem> {
        if self.action == MessageAction::Drop {
            return Ok(());
        }
        let left: Vec<_> = self.message.obstacles().iter().filter(|one| !accepted.contains(one)).collect();
        if let Some(final_one) = left.iter().find(|obstacle| !obstacle.is_acceptable()) {
            let next = match final_one {
                Obstacle::Recent => "Wait, or correct the window of the broker below.",
                Obstacle::Sealed => {
                    "Give the seal keys to the sidecar (docs/reference/sealing.md), or delete it."
                }
                _ => {
                    "Process it in place (docs/reference/messages-postgres.md, \"Dead letters\"), or delete it."
                }
            };
            return Err(Problem::bad_request(format!("{} {next}", obstacle_text(**final_one))));
        }
        match left[..] {
            [] => Ok(()),
            _ => Err(Problem::bad_request(
                "Check what stands against it, and tick each box that you have checked.",
            )),
        }
    }

    fn page(
        &self,
        state: &AdminState,
        access: &Access,
        entered: Entered,
        result: Result<bool, Problem>,
    ) -> Response {
        let (is_preview, status, error) = match result {
            Ok(is_preview) => (is_preview, StatusCode::OK, String::new()),
            Err(problem) => (false, problem.status(), problem.detail().to_owned()),
        };
        let is_requeue = self.action == MessageAction::Requeue;
        let obstacles = if is_requeue { self.message.obstacles() } else { &[] };
        page_with(
            status,
            &MessageChangePage {
                frame: Frame::new(state, access, Section::Messages, self.label()),
                is_preview,
                name: name_of(self.message.kind(), self.message.number()),
                href: self.message.href(),
                topic: self.message.topic(),
                state: self.message.state(),
                action: self.action,
                label: self.label(),
                note: self.note(),
                consequences: self.consequences(),
                obstacles: shown_obstacles(obstacles, &entered.accepted),
                has_window: is_requeue && self.message.kind() == MessageKind::DeadLetter,
                seen: self.message.version(),
                entered,
                error,
            },
        )
    }
}

/// Shows the form of a change.
async fn form(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    Extension(kind): Extension<MessageKind>,
    Path((number, action)): Path<(String, String)>,
) -> PageResult {
    let subject = Subject::find(&state, (kind, &number, &action), BROKER_WINDOW).await?;
    subject.message.check()?;
    Ok(subject.page(&state, &access, Entered::first(&access), Ok(false)))
}

/// Shows the preview of a change, or makes it after the confirmation.
async fn decide(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    Extension(kind): Extension<MessageKind>,
    Path((number, action)): Path<(String, String)>,
    Extension(fields): Extension<FormFields>,
) -> PageResult {
    let entered = Entered::read(&fields);
    let window = entered.window();
    let at = (kind, number.as_str(), action.as_str());
    let subject = Subject::find(&state, at, window.as_ref().copied().unwrap_or(BROKER_WINDOW)).await?;
    if fields.get("seen") != subject.message.version() {
        let detail = "The message has changed since you opened the form. Nothing was changed by you.";
        return Err(Problem::message_refused(detail).into());
    }
    subject.message.check()?;
    if fields.get("step") == "edit" {
        return Ok(subject.page(&state, &access, entered, Ok(false)));
    }
    let read = window.and_then(|window| {
        subject.check_obstacles(&entered.accepted)?;
        Ok((window, fields.audit()?))
    });
    let (window, texts) = match read {
        Ok(read) => read,
        Err(problem) => return Ok(subject.page(&state, &access, entered, Err(problem))),
    };
    if fields.get("step") != "confirm" {
        return Ok(subject.page(&state, &access, entered, Ok(true)));
    }
    let number = subject.message.number();
    // Only what stands against it: another obstacle that comes up meanwhile is refused.
    let accepted = subject.message.obstacles().iter().filter(|one| entered.accepted.contains(one)).copied();
    let terms = RequeueTerms { accepted: accepted.collect(), broker_window: window };
    let change = MessageChange { terms, ..MessageChange::new(kind, subject.action) };
    change_and_log(&state, number, &change, &texts).await?;
    Ok(redirect(&format!("/{}?done={}-{number}", kind.path(), subject.action.as_str())))
}
