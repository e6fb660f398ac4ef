//! Hints in a response, beyond its status, about the next step.

use http::header::CONTENT_TYPE;
use http::{HeaderMap, StatusCode};
use serde_json::Value;

use crate::signals::{At, SIGNAL_RULES, Signal, SignalRule};
use crate::verdict::Advice;

/// The largest body that is searched for a problem. Real problems have some hundred bytes.
const MAX_PROBLEM_BYTES: usize = 64 * 1024;

/// The usual members for the name of an error.
const NAMES: [&str; 5] = ["type", "code", "name", "error.code", "error.type"];

/// The hints in a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hint {
    /// The signal of the first rule that applies.
    pub(crate) signal: Option<Signal>,
    /// The member `retry` of a problem: `Ok` is to send the same request again, `Err` is other advice.
    pub(crate) retry: Option<Result<(), Advice>>,
    /// The response names its error.
    pub(crate) is_named: bool,
}

/// Returns `true` if the response is marked as a replay.
pub(crate) fn is_replay(status: StatusCode, headers: &HeaderMap) -> bool {
    SIGNAL_RULES.iter().any(|row| row.signal == Signal::Replayed && row.applies(status, headers, None))
}

/// The value of the header `Stripe-Should-Retry`.
pub(crate) fn should_retry(headers: &HeaderMap) -> Option<bool> {
    match headers.get("stripe-should-retry")?.as_bytes() {
        b"true" => Some(true),
        b"false" => Some(false),
        _ => None,
    }
}

/// Reads the hints from the headers of a response and from a JSON body: problem details (RFC 9457), or a service's own format.
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

/// The last part of the URI of a problem, which is its name.
fn end(uri: &str) -> &str {
    uri.rsplit([':', '/', '#']).next().unwrap_or_default()
}

/// Returns `true` if a text or number at this path passes.
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
