//! Hints in a response, beyond its status, about the next step.

use http::header::CONTENT_TYPE;
use http::{HeaderMap, StatusCode};
use serde_json::Value;

use crate::refusal::{OwnRefusal, is_usual_status};
use crate::signals::{At, SIGNAL_RULES, Signal, SignalRule};
use crate::verdict::Advice;

/// The largest body that is searched for a problem. Real problems have some hundred bytes.
const MAX_PROBLEM_BYTES: usize = 64 * 1024;

/// The usual members for the name of an error.
const NAMES: [&str; 5] = ["type", "code", "name", "error.code", "error.type"];

/// The type of a problem in an error of JSON-RPC, as the profile for MCP shapes it.
const MCP_TYPE: &str = "error.data.type";

/// The places of a code in the shapes of the shipped profiles.
const CODES: [&str; 7] =
    ["code", "error.code", "errorCode", "__type", "details[].issue", "errors[].code", MCP_TYPE];

/// The problems whose codes count, too: after them a request with a new key may be a second effect, and no other service uses
/// these words for something else, as it may `key_expired`.
const CODED: [&str; 4] = ["outcome-unknown", "record-corrupt", "host-differs", "replay-unavailable"];

/// The usual beginning of the types of Oncegate's problems.
const PROBLEM_TYPES: &str = "urn:oncegate:problem:";

/// The hints in a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hint {
    /// The signal of the first rule that applies.
    pub(crate) signal: Option<Signal>,
    /// The advice of a problem: `Ok` is to send the same request again, `Err` is other advice.
    pub(crate) retry: Option<Result<(), Advice>>,
    /// The response names its error.
    pub(crate) is_named: bool,
    /// The body names a problem of Oncegate after which nothing was executed, and the status is one that the problem has.
    pub(crate) has_usual_status: bool,
}

/// The advice in the member `retry` of a problem.
pub(crate) fn advice(word: &str) -> Option<Result<(), Advice>> {
    match word {
        "same-key" => Some(Ok(())),
        "new-key" => Some(Err(Advice::NewKey)),
        "fix-request" => Some(Err(Advice::FixRequest)),
        "stop" => Some(Err(Advice::Stop)),
        _ => None,
    }
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
    if let Some(own) = OwnRefusal::read(headers) {
        let rule = SIGNAL_RULES.iter().find(|row| row.at.is_problem(own.problem));
        let signal = rule.map(|row| row.signal);
        return Hint { signal, retry: own.retry, is_named: true, has_usual_status: false };
    }
    let body = json(headers, body);
    let body = body.as_ref();
    let retry = body.and_then(|body| advice(body.get("retry")?.as_str()?));
    let rule = SIGNAL_RULES.iter().find(|row| row.applies(status, headers, body));
    let is_name = |name: &str| !name.is_empty() && name != "about:blank";
    let is_named = body.is_some_and(|body| NAMES.iter().any(|path| any(body, path, &is_name)));
    let has_usual_status =
        rule.is_some_and(|row| matches!(row.at, At::Problem(problem) if is_usual_status(problem, status)));
    Hint { signal: rule.map(|row| row.signal), retry, is_named, has_usual_status }
}

/// The JSON object in a body that is short enough for a problem.
pub(crate) fn json(headers: &HeaderMap, body: &[u8]) -> Option<Value> {
    let media_type = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    if !is_json(media_type) || body.len() > MAX_PROBLEM_BYTES {
        return None;
    }
    serde_json::from_slice::<Value>(body).ok().filter(Value::is_object)
}

fn is_json(media_type: &str) -> bool {
    let essence = media_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    // The JSON protocols of AWS have media types of their own.
    essence == "application/json"
        || essence.ends_with("+json")
        || essence.starts_with("application/x-amz-json-")
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
            At::Problem(problem) => body.is_some_and(|body| {
                let is_surely_ours =
                    any(body, "type", &|uri| uri.strip_prefix(PROBLEM_TYPES) == Some(problem));
                let is_named = || {
                    NAMES
                        .iter()
                        .chain([&MCP_TYPE])
                        .any(|path| any(body, path, &|value| end(value) == problem))
                        && (self.signal != Signal::NotExecuted || says_same_key(body))
                };
                let has_code = || {
                    CODED.contains(&problem)
                        && CODES.iter().any(|path| any(body, path, &|code| is_code_of(end(code), problem)))
                };
                is_surely_ours || is_named() || has_code()
            }),
        }
    }
}

/// Returns `true` for a problem that advises to send the same request again.
fn says_same_key(body: &Value) -> bool {
    body.get("retry").and_then(Value::as_str) == Some("same-key")
}

/// Returns `true` if a code is the name of this problem in another spelling: `replay_unavailable`, `REPLAY_UNAVAILABLE`,
/// `ReplayUnavailable`.
fn is_code_of(code: &str, problem: &str) -> bool {
    let plain = |byte: &u8| !b"-_".contains(byte);
    let code = code.bytes().filter(plain).map(|byte| byte.to_ascii_lowercase());
    code.eq(problem.bytes().filter(plain))
}

/// The last part of the URI of a problem, which is its name.
pub(crate) fn end(uri: &str) -> &str {
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
