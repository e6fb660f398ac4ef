//! What an answer says itself of what to do next, beyond its status.

use http::HeaderMap;
use http::header::CONTENT_TYPE;
use serde_json::Value;

use crate::verdict::Advice;

/// Most octets of an answer that are looked at for a problem. Real ones have some hundred.
const PROBLEM_MAX: usize = 64 * 1024;

/// The fields by which services mark a replay, with the value `true`: those of the profiles, and of other implementations.
const MARKERS: [&str; 4] =
    ["idempotent-replayed", "x-idempotent-replayed", "idempotency-replayed", "idempotency-replay"];

/// How services name a request that is still being processed under this key.
const IN_PROGRESS: [&str; 4] = [
    "request-in-progress",
    "idempotency_key_in_use",       // Stripe
    "idempotency_in_flight",        // ACP
    "PREVIOUS_REQUEST_IN_PROGRESS", // PayPal
];

/// The title that draft-ietf-httpapi-idempotency-key-header-07 has for it.
const IN_PROGRESS_TITLE: &str = "A request is outstanding for this Idempotency-Key";

/// How services name a key that belongs to another request.
const KEY_REUSED: [&str; 5] = [
    "key-reused",
    "idempotency_key_reused",
    "idempotency_error",                  // Stripe
    "idempotency_conflict",               // ACP
    "idempotency_key_already_used_error", // Increase
];

/// What the types of Oncegate's own problems start with.
const PROBLEM_TYPES: &str = "urn:oncegate:problem:";

/// Problems of Oncegate that say that nothing was executed, and that the same request may be sent again.
const NOT_EXECUTED: [&str; 4] =
    ["store-unavailable", "overloaded", "request-incomplete", "upstream-unreachable"];

/// What kind of problem an answer names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// None.
    Unnamed,
    /// One that says nothing to this client.
    Other,
    InProgress,
    KeyReused,
    NotExecuted,
    OutcomeUnknown,
    ReplayUnavailable,
    ScopeUnavailable,
}

/// What a problem says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    /// The member `retry`: send the same again (`Ok`), or do not, and do this.
    pub(crate) retry: Option<Result<(), Advice>>,
    pub(crate) kind: Kind,
}

/// Whether the answer is marked as one that was given before.
pub(crate) fn is_replay(headers: &HeaderMap) -> bool {
    MARKERS
        .iter()
        .any(|name| headers.get(*name).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"true")))
}

/// The field `Stripe-Should-Retry`.
pub(crate) fn should_retry(headers: &HeaderMap) -> Option<bool> {
    match headers.get("stripe-should-retry")?.as_bytes() {
        b"true" => Some(true),
        b"false" => Some(false),
        _ => None,
    }
}

/// Reads a body of problem details (RFC 9457), or an error in the shape of Stripe, ACP or PayPal.
pub(crate) fn problem(headers: &HeaderMap, body: &[u8]) -> Problem {
    let none = Problem { retry: None, kind: Kind::Unnamed };
    let is_json = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).is_some_and(is_json);
    if !is_json || body.len() > PROBLEM_MAX {
        return none;
    }
    let Ok(value @ Value::Object(_)) = serde_json::from_slice::<Value>(body) else { return none };
    let retry = value.get("retry").and_then(Value::as_str).and_then(|word| match word {
        "same-key" => Some(Ok(())),
        "new-key" => Some(Err(Advice::NewKey)),
        "fix-request" => Some(Err(Advice::FixRequest)),
        "stop" => Some(Err(Advice::Stop)),
        _ => None,
    });
    Problem { retry, kind: kind(&value) }
}

fn is_json(media_type: &str) -> bool {
    let essence = media_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    essence == "application/json" || essence.ends_with("+json")
}

fn kind(body: &Value) -> Kind {
    let text = |value: Option<&Value>| value.and_then(Value::as_str).unwrap_or_default().to_owned();
    let error = body.get("error");
    let in_error = |member: &str| text(error.and_then(|error| error.get(member)));
    // A problem's type is a URI; what tells problems apart is its end.
    let kind = text(body.get("type"));
    // Of whom it is, counts where it is to be certain.
    let ours = kind.strip_prefix(PROBLEM_TYPES);
    let kind = kind.rsplit([':', '/', '#']).next().unwrap_or_default();
    let names =
        [kind.to_owned(), text(body.get("code")), text(body.get("name")), in_error("code"), in_error("type")];
    let any_of = |words: &[&str]| names.iter().any(|name| words.contains(&name.as_str()));
    if any_of(&IN_PROGRESS) || text(body.get("title")) == IN_PROGRESS_TITLE {
        Kind::InProgress
    } else if any_of(&["outcome-unknown", "record-corrupt"]) {
        // A record that cannot be read may be that of this request.
        Kind::OutcomeUnknown
    } else if any_of(&["replay-unavailable", "idempotency_replay_unavailable"]) {
        Kind::ReplayUnavailable
    } else if any_of(&KEY_REUSED) {
        Kind::KeyReused
    } else if ours.is_some_and(|name| NOT_EXECUTED.contains(&name)) {
        Kind::NotExecuted
    } else if any_of(&["scope-unavailable"]) {
        Kind::ScopeUnavailable
    } else if names.iter().any(|name| !name.is_empty() && name != "blank") {
        Kind::Other
    } else {
        Kind::Unnamed
    }
}
