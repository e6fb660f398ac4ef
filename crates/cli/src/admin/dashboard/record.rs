//! One record: its state and the next step, its timeline, and its response on demand.

use std::time::Duration;

use askama::Template;
use axum::extract::{Extension, Path, Query, State};
use axum::response::Response;
use http::StatusCode;
use http::header::HeaderMap;
use oncegate_core::{ErrorChain, OnAbandoned, Record, RecordId, Timestamp};
use oncegate_http::{Condition, Profile, Settings};

use super::access::{Access, FormFields};
use super::change::Action;
use super::format::{bytes, duration, moment, number, query_text};
use super::keys::searching;
use super::waiting::{ASKED, redirect_page, still_waiting};
use super::{Frame, PageResult, Reveal, RevealedPart, Section, page_with};
use crate::activity::RepeatKind;
use crate::admin::keys::{AuditTexts, Pairs, is_shadow, read_existing, settings_of};
use crate::admin::problem::Problem;
use crate::admin::seal::ReadRecord;
use crate::admin::surveys::{Answer, Hits, Search, Ticket};
use crate::admin::view::{BodyView, Detail, RecordView, StepResultView, time};
use crate::admin::{AdminState, listing, metrics};
use crate::keys::print::printable;
use crate::log::OPERATOR;

/// The entries of the audit trail that are searched for changes of one record.
const AUDIT_ENTRIES: usize = 1000;

#[derive(Template)]
#[template(path = "record.html")]
struct RecordPage {
    frame: Frame,
    record: String,
    state: &'static str,
    view: RecordView,
    facts: Vec<Fact>,
    advice: Advice,
    retry: String,
    actions: Vec<ActionLink>,
    timeline: Vec<Moment>,
    repeats: Vec<Fact>,
    since: String,
    response: Option<ShownResponse>,
    steps: Vec<ShownStep>,
    /// True if the bodies are shown.
    is_revealed: bool,
    /// The result of the last action.
    notice: &'static str,
    error: String,
    reason: String,
}

struct Fact {
    name: &'static str,
    value: String,
    note: String,
    is_code: bool,
}

/// The next step for the operator.
struct Advice {
    title: &'static str,
    text: String,
}

struct ActionLink {
    href: String,
    label: &'static str,
    note: &'static str,
    is_danger: bool,
}

/// An entry of the timeline.
struct Moment {
    at: String,
    title: String,
    note: String,
    tone: &'static str,
}

struct ShownResponse {
    status: u16,
    headers: Vec<(String, String)>,
    trailers: Vec<(String, String)>,
    size: String,
    body: Option<String>,
    is_text: bool,
}

struct ShownStep {
    name: String,
    size: String,
    result: Option<String>,
}

pub(super) async fn show(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    Path(id): Path<String>,
    headers: HeaderMap,
    query: Pairs,
) -> PageResult {
    let pairs = query.map(|Query(pairs)| pairs).unwrap_or_default();
    let parameter = |name| pairs.iter().find(|(own, _)| own == name).map(|(_, text)| text.as_str());
    let ticket = parameter(ASKED).and_then(Ticket::read);
    let id = match find(&state, &id, ticket).await? {
        Ok(found) if ticket.is_none() => found,
        // Its own address, so that what follows needs no search.
        Ok(found) => return Ok(redirect_page(&headers, &format!("/keys/{found}"))),
        Err(next) => {
            let address = format!("/keys/{}", query_text(&id));
            return Ok(
                still_waiting(&headers, ticket).unwrap_or_else(|| searching(&state, &access, &address, next))
            );
        }
    };
    let found = read_existing(&state, id).await?;
    let notice = parameter("done").and_then(Action::named).map_or("", Action::notice);
    let parts = PageParts { notice, ..PageParts::default() };
    Ok(render(&state, &access, (id, &found), parts).await)
}

/// The record that an address names, if it is found before the page must answer.
async fn find(
    state: &AdminState,
    text: &str,
    ticket: Option<Ticket>,
) -> Result<Result<RecordId, Ticket>, Problem> {
    let store = state.engine.store();
    if RecordId::from_hex(text).is_some() {
        return listing::find(&**store, text).await.map(Ok);
    }
    let search = Search { beginning: Some(text.to_owned()), key: None };
    match state.surveys.search(search, store, ticket).await? {
        Answer::Found(hits, _) => match *hits {
            Hits::One(id) => Ok(Ok(id)),
            _ => Err(Problem::no_record_like(text)),
        },
        Answer::Running(ticket) => Ok(Err(ticket)),
    }
}

/// The parts of a page that depend on the request and not on the record.
#[derive(Default)]
struct PageParts {
    is_revealed: bool,
    notice: &'static str,
    error: String,
    reason: String,
}

/// Shows the stored response, after the operator and the reason were written down.
pub(super) async fn reveal(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    Path(id): Path<String>,
    Extension(fields): Extension<FormFields>,
) -> PageResult {
    let id = listing::find(&**state.engine.store(), &id).await?;
    let found = read_existing(&state, id).await?;
    let parts = match fields.audit() {
        Ok(AuditTexts { actor, reason }) => {
            tracing::warn!(target: OPERATOR, record = %id, actor, reason, "an operator looked at a stored response");
            let at = state.engine.store().now();
            state.dashboard.add_reveal(Reveal {
                at,
                part: RevealedPart::Record(id),
                actor,
                reason: reason.clone(),
            });
            PageParts { is_revealed: true, reason, ..PageParts::default() }
        }
        Err(problem) => PageParts {
            error: problem.detail().to_owned(),
            reason: fields.get("reason").to_owned(),
            ..PageParts::default()
        },
    };
    Ok(render(&state, &access, (id, &found), parts).await)
}

async fn render(
    state: &AdminState,
    access: &Access,
    (id, found): (RecordId, &ReadRecord),
    parts: PageParts,
) -> Response {
    let detail = if parts.is_revealed { Detail::Body } else { Detail::Whole };
    let (record, view) = (&found.record, found.view(id, state.engine.store().now(), detail));
    let settings = settings_of(state, record);
    let record_text = view.record.clone();
    let actions = Action::allowed(&view).into_iter().map(|action| ActionLink {
        href: format!("/keys/{record_text}/{}", action.slug()),
        label: action.label(&view),
        note: action.note(&view),
        is_danger: action.is_danger(&view),
    });
    let title = format!("Key {}", view.record.get(..8).unwrap_or_default());
    let page = RecordPage {
        frame: Frame::new(state, access, Section::Keys, title),
        record: view.record.clone(),
        state: view.state,
        facts: facts(&view, record, &settings),
        advice: advice(&view, &settings),
        retry: retry(&view, &settings),
        actions: actions.collect(),
        timeline: timeline(state, id, record, &view).await,
        repeats: repeats(state, id, is_shadow(&view.operation)),
        since: moment(&time(state.activity.started_at())),
        response: response(&view),
        steps: steps(&view),
        is_revealed: parts.is_revealed,
        notice: parts.notice,
        reason: parts.reason,
        view,
        error: parts.error.clone(),
    };
    let status = if parts.error.is_empty() { StatusCode::OK } else { StatusCode::BAD_REQUEST };
    page_with(status, &page)
}

fn facts(view: &RecordView, record: &Record, settings: &Settings) -> Vec<Fact> {
    let fact = |name, value: String, note: String| Fact { name, value, note, is_code: false };
    let code = |name, value: String, note: &str| Fact { name, value, note: note.to_owned(), is_code: true };
    let tag = view.key_tag.clone();
    let mut facts = vec![
        code("Operation", view.operation.clone(), ""),
        code("Caller", view.caller.clone(), "a hash, not the credential"),
    ];
    facts.push(match tag {
        Some(tag) => code("Key tag", tag, "a hash, not the key"),
        None => fact("Key tag", "–".to_owned(), "the program that claimed it gave none".to_owned()),
    });
    facts.extend([
        code("Request digest", record.fingerprint.to_string(), "requests with another digest are refused"),
        fact("Attempts", number(view.attempts.into()), format!("token of the last one: {}", view.token)),
        fact("First claim", moment(&view.created_at), String::new()),
        fact("In this state", duration(view.age_seconds), format!("since {}", moment(&view.changed_at))),
        fact(
            "Kept until",
            moment(&view.expires_at),
            format!("{} left; after that the key executes again", duration(view.expires_in_seconds)),
        ),
    ]);
    if let Some(lease) = &view.lease_until {
        facts.push(fact("Lease until", moment(lease), "unless its owner renews it".to_owned()));
    }
    if let (None, Some(why)) = (&view.sealed_with, &view.seal_refused) {
        facts.push(fact("Sealed", "no".to_owned(), format!("and refused: {why}")));
    }
    if let Some(key) = &view.sealed_with {
        let note = match (&view.seal_refused, &view.sealed) {
            (Some(why), Some(sealed)) => {
                format!("{} that cannot be opened: {why}", bytes(sealed.sealed_bytes))
            }
            (Some(why), None) => format!("a part cannot be opened: {why}"),
            (None, _) => "opened here".to_owned(),
        };
        facts.push(Fact { name: "Sealed with key", value: key.clone(), note, is_code: true });
    }
    facts.push(code("Profile", settings.profile().name().to_owned(), settings.profile().title()));
    facts
}

/// The next step for the operator.
fn advice(view: &RecordView, settings: &Settings) -> Advice {
    let (title, text) = match (view.state, view.by_operator) {
        _ if is_shadow(&view.operation) => (
            "Nothing to do",
            "Its route only observes: every request passed to the service. The record only tells what a route that protects would have done."
                .to_owned(),
        ),
        ("in-progress", _) => (
            "Wait",
            "A request runs and renews its lease. If its process is gone, the lease ends by itself, and the state becomes abandoned."
                .to_owned(),
        ),
        ("abandoned", _) => {
            let next = match settings.policy().on_abandoned() {
                OnAbandoned::Reexecute => "The next request with the key executes again, as the route says (on-abandoned = reexecute).",
                OnAbandoned::Reconcile => "The next request with the key asks the service what happened (on-abandoned = reconcile).",
                _ => "The next request with the key is refused, because the outcome is unknown (on-abandoned = park).",
            };
            (
                "Find out if it took effect",
                format!(
                    "The owner is gone: its lease ended without a result. {next} Look into the service for this operation, then choose below."
                ),
            )
        }
        ("unknown", _) => (
            "Find out if it took effect",
            "The request was sent to the service, and no certain result came back. Nothing executes under this key until you choose. Look \
             into the service (its database, its log, the provider) for this operation, then choose below."
                .to_owned(),
        ),
        ("completed", _) if view.seal_refused.is_some() => (
            "Make the response readable",
            format!(
                "It cannot be opened here: {}. Nothing executes under the key, and a retry gets the response from a sidecar that can open it.",
                view.seal_refused.as_deref().unwrap_or_default()
            ),
        ),
        ("completed" | "tombstone", false) => (
            "Nothing to do",
            "The service itself answered. Its response never changes before the retention ends, and no operator can change it.".to_owned(),
        ),
        ("completed" | "tombstone", true) => (
            "An operator gave this outcome",
            "It can be replaced or taken back. Clients may have got it already, and do not ask again.".to_owned(),
        ),
        ("released", true) => (
            "Free, by an operator",
            "The next request with the key executes. If that is wrong, block the key first, then find out.".to_owned(),
        ),
        ("released", _) => (
            "Free",
            "The service refused the request without an effect, or was not reached. The next request with the key executes.".to_owned(),
        ),
        _ => ("Look at the timeline", String::new()),
    };
    Advice { title, text }
}

/// The response that a client gets if it sends the request again now.
fn retry(view: &RecordView, settings: &Settings) -> String {
    let profile = settings.profile();
    match view.state {
        _ if is_shadow(&view.operation) => "a new execution, because its route only observes".to_owned(),
        "completed" if view.seal_refused.is_some() => refusal(profile, Condition::ResponseSealed),
        "completed" => match &view.response {
            Some(response) => {
                let status = replay_status(profile, response.status);
                let (name, value) = profile.replay_marker();
                format!("{status} with the stored response, marked with {name}: {value}")
            }
            None => "the stored response".to_owned(),
        },
        "tombstone" => refusal(profile, Condition::ReplayUnavailable),
        "unknown" => refusal(profile, Condition::OutcomeUnknown),
        "in-progress" => {
            let wait = settings.policy().wait();
            let refused = refusal(profile, Condition::RequestInProgress);
            if wait.is_zero() {
                refused
            } else {
                format!(
                    "the response of the running request, if it comes within {}; otherwise {refused}",
                    duration(wait.as_secs())
                )
            }
        }
        "abandoned" => match settings.policy().on_abandoned() {
            OnAbandoned::Reexecute => "a new execution".to_owned(),
            OnAbandoned::Reconcile => {
                "the result of the service's answer about the abandoned attempt".to_owned()
            }
            _ => refusal(profile, Condition::OutcomeUnknown),
        },
        "released" if view.steps.is_empty() => "a new execution".to_owned(),
        "released" => "an execution that continues after the recorded steps".to_owned(),
        _ => "–".to_owned(),
    }
}

/// The refusal of a condition in a few words.
pub(super) fn refusal(profile: &Profile, condition: Condition) -> String {
    format!("{} {}: {}", profile.refusal_status(condition).as_u16(), condition.slug(), condition.title())
}

/// The status of the replay of a response.
pub(super) fn replay_status(profile: &Profile, status: u16) -> u16 {
    StatusCode::from_u16(status).map_or(status, |status| profile.replay_status(status).as_u16())
}

fn response(view: &RecordView) -> Option<ShownResponse> {
    let response = view.response.as_ref()?;
    let (body, is_text) = match &response.body {
        Some(BodyView::Text(text)) => (Some(printable(text, true)), true),
        Some(BodyView::Base64(text)) => (Some(text.clone()), false),
        None => (None, true),
    };
    Some(ShownResponse {
        status: response.status,
        headers: shown_fields(response.headers.as_deref()),
        trailers: shown_fields(response.trailers.as_deref()),
        size: bytes(response.body_bytes),
        body,
        is_text,
    })
}

/// Header fields with the characters escaped that would change what a page shows.
fn shown_fields(fields: Option<&[(String, String)]>) -> Vec<(String, String)> {
    let fields = fields.unwrap_or_default().iter();
    fields.map(|(name, value)| (name.clone(), printable(value, false))).collect()
}

fn steps(view: &RecordView) -> Vec<ShownStep> {
    let steps = view.steps.iter().map(|step| ShownStep {
        name: step.name.clone(),
        size: bytes(step.result_bytes),
        result: step.result.as_ref().map(|result| match result {
            StepResultView::Text(text) => printable(text, true),
            StepResultView::Base64(text) => format!("{text} (base64)"),
        }),
    });
    steps.collect()
}

/// The known events of a record, the oldest first: its creation, the events in this sidecar, the changes by operators, and its
/// present state.
async fn timeline(state: &AdminState, id: RecordId, record: &Record, view: &RecordView) -> Vec<Moment> {
    let mut moments: Vec<(Timestamp, Moment)> = Vec::new();
    for event in state.activity.timeline(&id).events {
        let (title, tone) = event_words(metrics::event_name(event.kind));
        let token = event.token.map(|token| format!("attempt with the token {}", token.get()));
        moments.push((event.at, Moment::new(event.at, title.to_owned(), token.unwrap_or_default(), tone)));
    }
    match state.engine.store().audit(None, AUDIT_ENTRIES).await {
        Ok(entries) => {
            for entry in entries.into_iter().filter(|entry| entry.id == id) {
                let title = format!("{} changed it from {} to {}", entry.actor, entry.from, entry.to);
                let reason = format!("Reason: {}", entry.reason);
                moments.push((entry.at, Moment::new(entry.at, title, reason, "operator")));
            }
        }
        Err(error) => {
            tracing::debug!(error = %ErrorChain(&error), "the audit trail cannot be read for a timeline")
        }
    }
    // Stable, so events of the same millisecond stay in their order.
    moments.sort_by_key(|(at, _)| *at);
    let created = record.created_at;
    let first = Moment::new(created, "First claim".to_owned(), "The key was new.".to_owned(), "");
    // The store has a clock of its own: the events of the first attempt may seem to come a moment before its claim.
    let place = moments.iter().position(|(at, _)| at.after(CLOCK_DIFFERENCE) >= created);
    moments.insert(place.unwrap_or(moments.len()), (created, first));
    let by = if view.by_operator { ", by an operator" } else { "" };
    // With the time of the page: the record is a moment older than the event of its change, which would seem to come later.
    let since = format!("since {}{by}", moment(&time(record.changed_at)));
    let now = Moment::new(state.engine.store().now(), format!("Now {}", view.state), since, tone(view.state));
    moments.into_iter().map(|(_, moment)| moment).chain([now]).collect()
}

/// The usual difference between the clocks of a store and of this machine.
const CLOCK_DIFFERENCE: Duration = Duration::from_secs(1);

impl Moment {
    fn new(at: Timestamp, title: String, note: String, tone: &'static str) -> Self {
        Self { at: moment(&time(at)), title, note, tone }
    }
}

fn tone(state: &str) -> &'static str {
    match state {
        "unknown" | "abandoned" => "bad",
        "completed" | "tombstone" => "good",
        _ => "",
    }
}

/// An event in words, and its tone.
fn event_words(event: &'static str) -> (&'static str, &'static str) {
    match event {
        "executing" => ("An execution began", ""),
        "executed" => ("The execution ended", ""),
        "completed" => ("The response was stored", "good"),
        "tombstoned" => ("Done, and the response was not kept", "good"),
        "released" => ("The key was freed", ""),
        "parked" => ("It ended with an unknown outcome", "bad"),
        "fenced" => (
            "The result was not stored: another attempt or an operator had taken the record. A second effect is possible",
            "bad",
        ),
        "abandoned" => ("The execution was dropped without a result", "bad"),
        "renewed" => ("The lease was renewed", ""),
        "renewal-failed" => ("A renewal of the lease failed in the store", "warn"),
        "lease-lost" => ("The attempt no longer owned its record. Two executions may overlap", "bad"),
        "settlement-deferred" => ("The result could not be stored yet", "warn"),
        "settlement-lost" => ("Storing the result was given up", "bad"),
        "completed-upstream" => ("The service had completed the record itself", "good"),
        "response-added" => ("The response was added to the record", "good"),
        "response-differs" => ("The service sent another response than it had stored", "bad"),
        "completion-missing" => ("The service reported a success and had not completed the record", "bad"),
        "claim-failed" => ("A claim failed in the store", "warn"),
        "claim-cancelled" => ("A claim came too late for its client, and nothing was executed", ""),
        other => (other, ""),
    }
}

/// The requests and renewals that are counted and not kept one by one.
fn repeats(state: &AdminState, id: RecordId, is_observed: bool) -> Vec<Fact> {
    let repeats = state.activity.timeline(&id).repeats.into_iter().map(|repeat| Fact {
        name: match repeat.kind {
            RepeatKind::Replayed if is_observed => "Would be replayed",
            RepeatKind::InProgress if is_observed => "Would find it in progress",
            RepeatKind::Mismatch if is_observed => "Would be another request",
            RepeatKind::Unknown | RepeatKind::Refused if is_observed => "Would be refused",
            RepeatKind::Replayed => "Replayed",
            RepeatKind::InProgress => "Found it in progress",
            RepeatKind::Mismatch => "Sent another request",
            RepeatKind::Unknown => "Found it unknown",
            RepeatKind::Refused => "Refused for another reason",
            RepeatKind::Renewed => "Lease renewed",
        },
        value: format!("{} ×", number(repeat.count.into())),
        note: format!("last {}", moment(&time(repeat.last))),
        is_code: false,
    });
    repeats.collect()
}
