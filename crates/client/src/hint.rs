//! What an answer says itself of what to do next, beyond its status.

use http::header::CONTENT_TYPE;
use http::{HeaderMap, StatusCode};
use serde_json::Value;

use crate::answers::{At, SIGNAL_RULES, Signal, SignalRule};
use crate::verdict::Advice;

/// Most bytes of an answer that are looked at for a problem. Real ones have some hundred.
const MAX_PROBLEM_BYTES: usize = 64 * 1024;

/// The members that name an error, in most services.
const NAMES: [&str; 5] = ["type", "code", "name", "error.code", "error.type"];

/// What an answer says beyond its status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hint {
    /// The first row of the table that applies.
    pub(crate) signal: Option<Signal>,
    /// The member `retry` of a problem: send the same again (`Ok`), or do not, and do this.
    pub(crate) retry: Option<Result<(), Advice>>,
    /// Whether the answer names its error, in whatever words.
    pub(crate) is_named: bool,
}

/// Whether the answer is marked as one that was given before.
pub(crate) fn is_replay(status: StatusCode, headers: &HeaderMap) -> bool {
    SIGNAL_RULES.iter().any(|row| row.signal == Signal::Replayed && row.applies(status, headers, None))
}

/// The field `Stripe-Should-Retry`.
pub(crate) fn should_retry(headers: &HeaderMap) -> Option<bool> {
    match headers.get("stripe-should-retry")?.as_bytes() {
        b"true" => Some(true),
        b"false" => Some(false),
        _ => None,
    }
}

/// Reads the fields of an answer, and a body of problem details (RFC 9457) or of an error in the shape of a service.
pub(crate) fn read(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Hint {
    let is_json = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).is_some_and(is_json);
    let body = if is_json && body.len() <= MAX_PROBLEM_BYTES {
        serde_json::from_slice::<Value>(body).ok().filter(Value::is_object)
    } else {
        None
    };
    let body = body.as_ref();
    let retry = body.and_then(|body| match body.get("retry")?.as_str()? {
        "same-key" => Some(Ok(())),
        "new-key" => Some(Err(Advice::NewKey)),
        "fix-request" => Some(Err(Advice::FixRequest)),
        "stop" => Some(Err(Advice::Stop)),
        _ => None,
    });
    let signal = SIGNAL_RULES.iter().find(|row| row.applies(status, headers, body)).map(|row| row.signal);
    let is_name = |name: &str| !name.is_empty() && name != "about:blank";
    let is_named = body.is_some_and(|body| NAMES.iter().any(|path| any(body, path, &is_name)));
    Hint { signal, retry, is_named }
}

fn is_json(media_type: &str) -> bool {
    let essence = media_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    essence == "application/json" || essence.ends_with("+json")
}

impl SignalRule {
    fn applies(&self, status: StatusCode, headers: &HeaderMap, body: Option<&Value>) -> bool {
        match self.at {
            At::Field(name, value) => {
                headers.get(name).is_some_and(|field| field.as_bytes().eq_ignore_ascii_case(value.as_bytes()))
            }
            At::FieldUnless(name, other) => status.as_u16() != other && headers.contains_key(name),
            At::Member(path, text) => body.is_some_and(|body| any(body, path, &|value| value == text)),
            At::Name(text) => body.is_some_and(|body| {
                NAMES.iter().any(|path| any(body, path, &|value| value == text || end(value) == text))
            }),
        }
    }
}

/// What tells the URIs of problems apart.
fn end(uri: &str) -> &str {
    uri.rsplit([':', '/', '#']).next().unwrap_or_default()
}

/// Whether one of the texts or numbers at this path passes.
fn any(value: &Value, path: &str, passes: &dyn Fn(&str) -> bool) -> bool {
    let (first, rest) = path.split_once('.').unwrap_or((path, ""));
    if first.is_empty() {
        return match value {
            Value::String(text) => passes(text),
            Value::Number(number) => passes(&number.to_string()),
            _ => false,
        };
    }
    match first.strip_suffix("[]") {
        Some(name) => {
            let elements = value.get(name).and_then(Value::as_array);
            elements.is_some_and(|elements| elements.iter().any(|element| any(element, rest, passes)))
        }
        None => value.get(first).is_some_and(|member| any(member, rest, passes)),
    }
}
