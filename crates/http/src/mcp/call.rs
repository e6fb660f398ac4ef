//! Calls of tools, and the responses to them.

use std::fmt;
use std::sync::Arc;

use http::header::{HeaderName, HeaderValue};
use http::{HeaderMap, StatusCode};
use oncegate_core::{IdempotencyKey, KeyError};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::de::{Deserializer as _, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::json::{Members, exact_members, members, position, string};
use super::tools::ToolPolicy;
use crate::carrier::key_in_message;
use crate::credential::hyphenated;
use crate::key::{KeyFormat, KeyGrammar, KeyHeaderError, KeySyntax};
use crate::settings::Settings;

/// The session of a client, in revisions before 2026-07-28.
pub(crate) const SESSION: HeaderName = HeaderName::from_static("mcp-session-id");

/// The sessions that a request names. `_` in the name of the field counts as `-`, because many services treat them alike, and of
/// several lines each service takes its own.
pub(crate) fn sessions(headers: &HeaderMap) -> impl Iterator<Item = &HeaderValue> {
    headers.iter().filter(|(name, _)| hyphenated(name.as_str()) == SESSION.as_str()).map(|(_, value)| value)
}

/// The characters that are encoded in labels, which stand in logs and on terminals.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'_').remove(b'-').remove(b'.').remove(b'/');

/// The JSON-RPC method of calls.
const CALL: &str = "tools/call";

/// The longest `id` of a message, in bytes. Each replay and each refusal repeats it.
const MAX_ID: usize = 256;

/// A call of a tool.
#[derive(Clone, Debug)]
pub(crate) struct ToolCall {
    /// The JSON-RPC `id` of the request, as JSON.
    pub(crate) id: Arc<str>,
    /// The name of the tool, with all characters but those of identifiers percent-encoded.
    pub(crate) tool: String,
    /// The parts of the message that make the call the same call: its method, the tool and the arguments, as JSON.
    pub(crate) compared: String,
    /// True if its key is built from its intent.
    pub(crate) is_by_intent: bool,
    /// The sessions that it may belong to: more than one if the request names several.
    pub(crate) sessions: Vec<HeaderValue>,
}

/// A message in a request.
#[derive(Debug)]
pub(crate) enum Message {
    /// Not a call, or a call of a tool that only reads.
    Passes,
    /// The client gave up a call. Servers may ignore that. If this one stopped the call, its outcome would be unknown, and no
    /// retry would get a result.
    Cancellation,
    /// A call, and its key.
    Call(ToolCall, Result<IdempotencyKey, CallError>),
    /// The request may call tools in a way that cannot be protected. The text is for its client.
    Refused(&'static str),
}

/// The reason why a call has no key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CallError {
    /// The client named none.
    NoKey,
    /// It is invalid.
    Invalid(KeyHeaderError),
    /// The key is built from the intent, and the client named no run of the agent.
    NoRun,
    /// The run of the agent is invalid.
    InvalidRun(KeyHeaderError),
    /// The key is built from the intent, and programs read the arguments in different ways.
    Arguments,
}

const UNREADABLE: &str = "Nothing was executed. The body is not JSON in UTF-8 that all programs read alike, so it is not known if it \
     calls a tool.";
const REPEATED: &str =
    "Nothing was executed. The message has a member twice, and programs differ in which of them counts.";
const BATCH: &str = "Nothing was executed. The body is a batch of messages with a call of a tool or a cancellation in it. \
                     Send each of these in a message of its own.";
const NO_TOOL: &str = "Nothing was executed. The call does not name its tool: params.name is not a text.";
const BAD_ID: &str = "Nothing was executed. The call has no id, or one that is neither a text nor a number or has more than 256 bytes.";

/// The message in this body, whose content coding is undone.
pub(crate) fn read(settings: &Settings, headers: &HeaderMap, body: &[u8]) -> Message {
    // Some clients send a byte order mark, and some services skip it.
    let Ok(text) = std::str::from_utf8(body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body)) else {
        return Message::Refused(UNREADABLE);
    };
    match text.trim_ascii_start().bytes().next() {
        None => Message::Passes,
        Some(b'[') => match calls_in_batch(settings, text) {
            Ok(false) => Message::Passes,
            Ok(true) => Message::Refused(BATCH),
            Err(_) => Message::Refused(UNREADABLE),
        },
        Some(b'{') => match read_object(settings, headers, text) {
            Ok(message) => message,
            Err(text) => Message::Refused(text),
        },
        // A server may be able to read more than JSON; it cannot find a message in other JSON.
        Some(_) => match serde_json::from_str::<IgnoredAny>(text) {
            Ok(_) => Message::Passes,
            Err(_) => Message::Refused(UNREADABLE),
        },
    }
}

fn read_object(settings: &Settings, headers: &HeaderMap, text: &str) -> Result<Message, &'static str> {
    let Members { values: [id, method, params], is_repeated } =
        members(text, ["id", "method", "params"]).map_err(|_| UNREADABLE)?;
    if is_repeated {
        return Err(REPEATED);
    }
    match method.and_then(string).as_deref() {
        Some(CALL) => {}
        Some("notifications/cancelled") if id.is_none() => return Ok(Message::Cancellation),
        _ => return Ok(Message::Passes),
    }
    let params = params.map_or("{}", RawValue::get);
    let Ok(Members { values: [name, arguments], is_repeated }) = members(params, ["name", "arguments"])
    else {
        return Err(NO_TOOL);
    };
    if is_repeated {
        return Err(REPEATED);
    }
    let Some(tool) = name.and_then(string) else { return Err(NO_TOOL) };
    let policy = settings.tools.of(&tool);
    if policy == ToolPolicy::ReadOnly {
        return Ok(Message::Passes);
    }
    // A notification has no id. The protocol knows no such call, and some servers make it anyway.
    let is_id = |id: &&RawValue| {
        id.get().len() <= MAX_ID && matches!(id.get().bytes().next(), Some(b'"' | b'-' | b'0'..=b'9'))
    };
    let id = id.filter(is_id).ok_or(BAD_ID)?;
    let arguments = arguments.map(RawValue::get).filter(|arguments| *arguments != "null").unwrap_or("{}");
    let quoted = name.map_or("\"\"", RawValue::get);
    // The key of an intent has its arguments: two spellings of them are one call.
    let compared_arguments = if policy == ToolPolicy::ByIntent { "null" } else { arguments };
    let call = ToolCall {
        id: id.get().into(),
        tool: utf8_percent_encode(&tool, ENCODED).to_string(),
        compared: format!(
            r#"{{"method":"{CALL}","params":{{"name":{quoted},"arguments":{compared_arguments}}}}}"#
        ),
        is_by_intent: policy == ToolPolicy::ByIntent,
        sessions: sessions(headers).cloned().collect(),
    };
    let key = match policy {
        ToolPolicy::ByIntent => intent_key(settings, headers, text, (&tool, arguments)),
        _ => own_key(settings, text),
    };
    Ok(Message::Call(call, key))
}

/// The key that the client named.
fn own_key(settings: &Settings, text: &str) -> Result<IdempotencyKey, CallError> {
    let profile = &settings.profile;
    match key_in_message(&profile.key_members, &profile.grammar, text.as_bytes()) {
        None => Err(CallError::NoKey),
        Some(key) => key.map_err(CallError::Invalid),
    }
}

/// The key of a call of this tool with these arguments in the run that the client named. Without one, a session is one run.
fn intent_key(
    settings: &Settings,
    headers: &HeaderMap,
    text: &str,
    (tool, arguments): (&str, &str),
) -> Result<IdempotencyKey, CallError> {
    let grammar = KeyGrammar { syntax: KeySyntax::Raw, format: KeyFormat::Any };
    let members = &settings.profile.run_members;
    let in_body = key_in_message(members, &grammar, text.as_bytes());
    let in_head = || match sessions(headers).nth(1) {
        Some(_) => Some(Err(KeyHeaderError::SeveralFields)),
        None => grammar.read(headers, &[SESSION]).map(|read| read.map(|(run, ..)| run)),
    };
    let run = in_body.or_else(in_head);
    let run = run.ok_or(CallError::NoRun)?.map_err(CallError::InvalidRun)?;
    let run = run.as_str().ok_or(CallError::InvalidRun(KeyHeaderError::BadByte))?;
    IdempotencyKey::for_tool_call(SERVER, tool, arguments, run).map_err(|error| match error {
        KeyError::NotJson => CallError::Arguments,
        _ => CallError::NoRun,
    })
}

/// The server in the keys of intents. The path and the host of a request tell servers apart already, as for all keys.
const SERVER: &str = "mcp";

/// Returns true if one of the messages of a batch may call a tool that does not only read, or cancels a request.
fn calls_in_batch(settings: &Settings, text: &str) -> serde_json::Result<bool> {
    struct Batch<'s>(&'s Settings);

    impl<'de> Visitor<'de> for Batch<'_> {
        type Value = bool;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a batch")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut batch: A) -> Result<bool, A::Error> {
            let mut calls = false;
            while let Some(message) = batch.next_element::<&RawValue>()? {
                let message = message.get();
                calls |= match message.starts_with('{') {
                    true => !matches!(read_object(self.0, &HeaderMap::new(), message), Ok(Message::Passes)),
                    false => message.starts_with('['),
                };
            }
            Ok(calls)
        }
    }

    let mut json = serde_json::Deserializer::from_str(text);
    let calls = json.deserialize_seq(Batch(settings))?;
    json.end()?;
    Ok(calls)
}

/// The outcome of a call, by its response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallOutcome {
    /// The tool has a result.
    Complete,
    /// The call failed, in the tool or in the server. It may have had an effect.
    Failed,
    /// The tool did not run to its end: the server refused the request before it called the tool, or asks for more input first.
    NotCalled,
}

/// The outcome in a JSON-RPC response with this status; `None` if the text is another message, or none.
///
/// If programs may read the text in different ways, the call is complete: then the response is kept, and the key never freed.
fn outcome_of(text: &str, status: StatusCode) -> Option<CallOutcome> {
    let Members { values: [method, result, error], is_repeated } =
        exact_members(text, ["method", "result", "error"]).ok()?;
    let is_set = |value: &&RawValue| value.get() != "null";
    // Some servers send both members, and `null` in one of them.
    match (method, result, error.filter(is_set)) {
        (Some(_), ..) | (None, None, None) => None,
        (None, _, Some(_)) if is_repeated || result.is_some_and(|result| is_set(&result)) => {
            Some(CallOutcome::Complete)
        }
        (None, _, Some(error)) => Some(match is_refused_before_call(error, status) {
            true => CallOutcome::NotCalled,
            false => CallOutcome::Failed,
        }),
        (None, Some(_), None) if is_repeated => Some(CallOutcome::Complete),
        (None, Some(result), None) => Some(outcome_of_result(result, status)),
    }
}

/// The outcome in a result. The type `input_required` counts only in a response that is nothing else: with the status 200, and
/// without the members of a result that is complete.
fn outcome_of_result(result: &RawValue, status: StatusCode) -> CallOutcome {
    let Ok(Members { values: [kind, is_error, content, structured], is_repeated: false }) =
        exact_members(result.get(), ["resultType", "isError", "content", "structuredContent"])
    else {
        return CallOutcome::Complete;
    };
    let is_complete = is_error.or(content).or(structured).is_some() || status != StatusCode::OK;
    match kind.and_then(string).as_deref() {
        Some("input_required") if !is_complete => CallOutcome::NotCalled,
        _ if is_error.is_some_and(|value| value.get() == "true") => CallOutcome::Failed,
        _ => CallOutcome::Complete,
    }
}

/// Returns true for an error by which a server refuses the request before it calls the tool.
fn is_refused_before_call(error: &RawValue, status: StatusCode) -> bool {
    let Ok(Members { values: [code, data], is_repeated: false }) =
        exact_members(error.get(), ["code", "data"])
    else {
        return false;
    };
    match code.and_then(integer) {
        Some(QUESTION_FIRST) => status == StatusCode::OK && data.is_some_and(has_elicitations),
        Some(code) => status == StatusCode::BAD_REQUEST && REFUSED.contains(&code),
        None => false,
    }
}

/// Returns true if the data of an error lists the pages that the user has to visit, as revision 2025-11-25 demands.
fn has_elicitations(data: &RawValue) -> bool {
    let Ok(Members { values: [Some(list)], is_repeated: false }) =
        exact_members(data.get(), ["elicitations"])
    else {
        return false;
    };
    serde_json::from_str::<Vec<&RawValue>>(list.get()).is_ok_and(|list| !list.is_empty())
}

fn integer(value: &RawValue) -> Option<i64> {
    value.get().parse().ok()
}

/// The codes by which a server refuses a request before it calls a tool, with the status 400: its header fields do not fit its
/// body, or its revision is not supported. The client sends the same call again, in a better form.
///
/// Other codes say less than they seem to: libraries pass on the error of a question that a tool asked after its effect (-32600,
/// -32601, -32602, -32021), and choose the status by the code.
const REFUSED: [i64; 2] = [-32020, -32022];

/// The code by which a server of revision 2025-11-25 demands that the user visits a page before it processes the request. Its
/// data names the pages: before that revision, servers were free to use the code for something else.
const QUESTION_FIRST: i64 = -32042;

/// The codes of a transport that does not take a message, in an error without an `id`: the message cannot be read, it is no
/// request, or its session has ended. The last two are those of common libraries.
const NOT_TAKEN: [i64; 4] = [-32700, -32600, -32000, -32001];

/// The response to another request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OtherRequest;

impl ToolCall {
    /// The response to this call in the data of an event: its outcome and its text.
    ///
    /// In revision 2025-03-26 the data may be a batch.
    pub(crate) fn find_response(&self, data: &str, status: StatusCode) -> Option<(CallOutcome, String)> {
        let of = |message: &str| Some((self.outcome_in_stream(message, status)?, message.to_owned()));
        match data.trim_ascii_start().starts_with('[') {
            true => {
                let batch: Vec<&RawValue> = serde_json::from_str(data).ok()?;
                let mut own = batch.into_iter().filter_map(|message| of(message.get()));
                let (outcome, message) = own.next()?;
                // Programs differ in which of two responses counts.
                Some((own.next().map_or(outcome, |_| CallOutcome::Complete), message))
            }
            false => of(data),
        }
    }

    /// The outcome of this call in a message of a stream; `None` if it is another message, also the response to another request.
    pub(crate) fn outcome_in_stream(&self, message: &str, status: StatusCode) -> Option<CallOutcome> {
        let Members { values: [id], is_repeated } = members(message, ["id"]).ok()?;
        let outcome = outcome_of(message, status).filter(|_| id.is_some_and(|id| self.has_id(id)))?;
        Some(if is_repeated { CallOutcome::Complete } else { outcome })
    }

    /// The outcome of this call in the body of a response; `None` if the body is not a JSON-RPC response. `problem` is the
    /// problem in the head of the response, if the head is that of a refusal of another layer behind this one.
    ///
    /// # Errors
    /// If it is the response to another request.
    pub(crate) fn outcome_in_body(
        &self,
        body: &[u8],
        status: StatusCode,
        problem: Option<&str>,
    ) -> Result<Option<CallOutcome>, OtherRequest> {
        let text = std::str::from_utf8(body).unwrap_or_default();
        if problem.is_some_and(|problem| self.is_refusal(text, status, problem)) {
            return Ok(Some(CallOutcome::NotCalled));
        }
        let own = self.outcome_in_stream(text, status);
        if own.is_some() {
            return Ok(own);
        }
        match outcome_of(text, status) {
            // The transport refuses the message with a page or an object of its own.
            None if is_not_taken(status) && (is_object(text) || !may_be_json(body)) => {
                Ok(Some(CallOutcome::NotCalled))
            }
            None => Ok(None),
            // A server that could not read the `id` says null.
            Some(CallOutcome::Failed) if has_no_id(text) => {
                Ok(Some(match is_not_taken_error(text, status) {
                    true => CallOutcome::NotCalled,
                    false => CallOutcome::Failed,
                }))
            }
            Some(_) => Err(OtherRequest),
        }
    }

    /// Returns true if this message is the refusal of this call by another layer: it names this problem where a refusal does.
    /// The field alone is no proof, because a service may pass it on from an API that it called after an effect.
    ///
    /// A layer that refuses a request before it has read the body does not know the `id`. Such a refusal has the status of an
    /// error.
    fn is_refusal(&self, text: &str, status: StatusCode, problem: &str) -> bool {
        let Ok(Members { values: [method, id, result, error], is_repeated: false }) =
            exact_members(text, ["method", "id", "result", "error"])
        else {
            return false;
        };
        let is_unread =
            id.is_some_and(|id| id.get() == "null") && (status.is_client_error() || status.is_server_error());
        let is_own = id.is_some_and(|id| self.has_id(id));
        let named = match (method, result, error) {
            (None, Some(result), None) if is_own => problem_of_result(result),
            (None, None, Some(error)) if is_own || is_unread => {
                member(error, "data").and_then(|data| member(data, "type"))
            }
            _ => None,
        };
        // The beginning of a type may be the URL of a documentation.
        let named = named.and_then(string);
        let beginning = named.as_deref().and_then(|named| named.strip_suffix(problem));
        beginning.is_some_and(|beginning| beginning.ends_with([':', '/', '#']))
    }

    fn has_id(&self, id: &RawValue) -> bool {
        is_same_id(id.get(), &self.id)
    }

    /// The stored response to an earlier request for this call, as the response to this request: with its `id`, and with
    /// `"oncegate/replayed": true` in the `_meta` of a result. `None` if it is not a JSON-RPC response.
    pub(crate) fn replayed(&self, stored: &[u8]) -> Option<Vec<u8>> {
        let text = std::str::from_utf8(stored).ok()?;
        outcome_of(text, StatusCode::OK)?;
        let Members { values: [id, result], .. } = members(text, ["id", "result"]).ok()?;
        let mut edits = Vec::new();
        match id {
            Some(id) => {
                let at = position(text, id)?;
                edits.push((at..at + id.get().len(), self.id.to_string()));
            }
            None => {
                let at = text.find('{')? + 1;
                edits.push((at..at, format!("\"id\":{},", self.id)));
            }
        }
        let marks = result.map_or_else(Vec::new, |result| marks(text, result));
        edits.extend(marks.into_iter().map(|(at, mark)| (at..at, mark)));
        edits.sort_by_key(|(range, _)| range.start);
        let mut replayed = String::with_capacity(text.len() + 64);
        let mut copied = 0;
        for (range, new) in edits {
            replayed.push_str(text.get(copied..range.start)?);
            replayed.push_str(&new);
            copied = range.end;
        }
        replayed.push_str(text.get(copied..)?);
        Some(replayed.into_bytes())
    }
}

/// The type of the problem in a result that is a refusal.
fn problem_of_result(result: &RawValue) -> Option<&RawValue> {
    let Members { values: [is_error, meta], is_repeated: false } =
        exact_members(result.get(), ["isError", "_meta"]).ok()?
    else {
        return None;
    };
    is_error.filter(|value| value.get() == "true")?;
    member(member(meta?, "oncegate/problem")?, "type")
}

/// The only member of this name.
fn member<'a>(object: &'a RawValue, name: &str) -> Option<&'a RawValue> {
    match exact_members(object.get(), [name]).ok()? {
        Members { values: [value], is_repeated: false } => value,
        Members { .. } => None,
    }
}

/// Returns true for the statuses of a transport that did not take the message.
///
/// Other errors may come from the tool: frameworks choose a status such as 404, 409 or 422 for errors after an effect.
const fn is_not_taken(status: StatusCode) -> bool {
    matches!(status.as_u16(), 405 | 406 | 411 | 413 | 414 | 415 | 431)
}

/// Returns true for an error without an `id` by which the transport says that it did not take the message: it is no message that
/// the server knows, or its session has ended. Under the statuses of such refusals, an error may also have the form of a
/// framework instead of JSON-RPC.
fn is_not_taken_error(text: &str, status: StatusCode) -> bool {
    let Ok(Members { values: [version, error], is_repeated: false }) =
        exact_members(text, ["jsonrpc", "error"])
    else {
        return false;
    };
    let code = error.and_then(|error| member(error, "code")).and_then(integer);
    let may_refuse =
        is_not_taken(status) || matches!(status, StatusCode::BAD_REQUEST | StatusCode::NOT_FOUND);
    match code {
        Some(code) => may_refuse && NOT_TAKEN.contains(&code),
        None => is_not_taken(status) && version.is_none(),
    }
}

fn has_no_id(message: &str) -> bool {
    match members(message, ["id"]) {
        Ok(Members { values: [id], is_repeated: false }) => id.is_none_or(|id| id.get() == "null"),
        _ => false,
    }
}

fn is_object(text: &str) -> bool {
    exact_members::<0>(text, []).is_ok()
}

/// Returns true if a body begins as a JSON object or a list of them. It may hold a result even if it cannot be read.
fn may_be_json(body: &[u8]) -> bool {
    let body = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
    matches!(body.trim_ascii_start().first(), Some(b'{' | b'['))
}

/// Returns true if two ids are one value.
fn is_same_id(one: &str, other: &str) -> bool {
    let value = |text: &str| serde_json::from_str::<serde_json::Value>(text).ok();
    one == other
        || match (value(one), value(other)) {
            (Some(one), Some(other)) if one.is_number() => one.as_f64() == other.as_f64(),
            (one, other) => one.is_some() && one == other,
        }
}

/// The marks of a replay in this result, and their places in the text.
///
/// A result of an older revision gets its type, too, without which clients of the current one refuse it.
fn marks(text: &str, result: &RawValue) -> Vec<(usize, String)> {
    const MARK: &str = "\"oncegate/replayed\":true";
    let Ok(Members { values: [meta, kind], is_repeated: false }) =
        members(result.get(), ["_meta", "resultType"])
    else {
        return Vec::new();
    };
    let kind = kind.is_none().then(|| "\"resultType\":\"complete\"".to_owned());
    let own = meta.is_none().then(|| format!("\"_meta\":{{{MARK}}}"));
    let in_result = [kind, own].into_iter().flatten().collect::<Vec<_>>().join(",");
    let in_meta = meta.filter(|meta| {
        matches!(members(meta.get(), ["oncegate/replayed"]), Ok(Members { values: [None], .. }))
    });
    [(Some(result), in_result), (in_meta, MARK.to_owned())]
        .into_iter()
        .filter(|(_, mark)| !mark.is_empty())
        .filter_map(|(object, mark)| {
            let object = object?;
            let inside = object.get().strip_prefix('{')?;
            let comma = if inside.trim_ascii_start().starts_with('}') { "" } else { "," };
            Some((position(text, object)? + 1, format!("{mark}{comma}")))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mcp::tools::ToolPolicies;
    use crate::profile::Profile;

    fn settings() -> Settings {
        let tools = ToolPolicies::default().with(ToolPolicy::ReadOnly, ["get_*"]).unwrap();
        let tools = tools.with(ToolPolicy::ByIntent, ["order"]).unwrap();
        Settings::new(Profile::named("mcp").unwrap()).with_tools(tools)
    }

    fn read_text(text: &str) -> Message {
        read(&settings(), &HeaderMap::new(), text.as_bytes())
    }

    fn key(text: &str) -> Result<String, CallError> {
        match read_text(text) {
            Message::Call(_, key) => key.map(|key| key.as_str().unwrap().to_owned()),
            other => panic!("{text}: {other:?}"),
        }
    }

    fn call(tool: &str, rest: &str) -> String {
        format!(r#"{{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{{"name":"{tool}"{rest}}}}}"#)
    }

    #[test]
    fn the_client_names_the_key_of_a_call() {
        for name in ["idempotencyKey", "idempotency-key", "idempotency_key", "IdempotencyKey"] {
            let text = call("pay", &format!(r#","arguments":{{}},"_meta":{{"{name}":"k 1"}}"#));
            assert_eq!(key(&text), Ok("k 1".to_owned()), "{name}");
        }
        assert_eq!(key(&call("pay", "")), Err(CallError::NoKey));
        assert_eq!(key(&call("pay", r#","_meta":{}"#)), Err(CallError::NoKey));
        let number = call("pay", r#","_meta":{"idempotencyKey":7}"#);
        assert_eq!(key(&number), Err(CallError::Invalid(KeyHeaderError::NotText)));
        let twice = call("pay", r#","_meta":{"idempotencyKey":"a"},"_meta":{"idempotencyKey":"b"}"#);
        assert_eq!(key(&twice), Err(CallError::Invalid(KeyHeaderError::SeveralFields)));
    }

    #[test]
    fn the_key_of_an_intent_is_that_of_tool_arguments_and_run() {
        let run = |arguments: &str, meta: &str| {
            key(&call("order", &format!(r#","arguments":{arguments},"_meta":{meta}"#)))
        };
        let first = run(r#"{"a":1,"b":2.0}"#, r#"{"runId":"r"}"#).unwrap();
        assert_eq!(run(r#"{"b":2,"a":1}"#, r#"{"run_id":"r","idempotencyKey":"x"}"#), Ok(first.clone()));
        assert_ne!(run(r#"{"b":2,"a":1}"#, r#"{"runId":"s"}"#), Ok(first.clone()));
        assert_ne!(run(r#"{"b":2}"#, r#"{"runId":"r"}"#), Ok(first.clone()));
        assert_eq!(run("{}", "{}"), Err(CallError::NoRun));
        assert_eq!(run("{}", r#"{"runId":""}"#), Err(CallError::InvalidRun(KeyHeaderError::Empty)));
        assert_eq!(run(r#"{"a":1,"a":2}"#, r#"{"runId":"r"}"#), Err(CallError::Arguments));
        assert!(run(r#"{"a":9007199254740993,"b":0.30000000000000004}"#, r#"{"runId":"r"}"#).is_ok());
        // Without arguments, they are empty.
        assert_eq!(run("null", r#"{"runId":"r"}"#), run("{}", r#"{"runId":"r"}"#));
        assert_eq!(key(&call("order", r#","_meta":{"runId":"r"}"#)), run("{}", r#"{"runId":"r"}"#));
    }

    #[test]
    fn a_session_is_a_run() {
        let text = call("order", "");
        let of = |session: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for session in session {
                headers.append(SESSION, session.parse().unwrap());
            }
            match read(&settings(), &headers, text.as_bytes()) {
                Message::Call(_, key) => key,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(of(&["a"]).unwrap(), of(&["a"]).unwrap());
        assert_ne!(of(&["a"]).unwrap(), of(&["b"]).unwrap());
        assert_eq!(of(&["a", "b"]), Err(CallError::InvalidRun(KeyHeaderError::SeveralFields)));
        let mut headers = HeaderMap::new();
        headers.append(SESSION, HeaderValue::from_static("a"));
        headers.append("mcp_session_id", HeaderValue::from_static("b"));
        assert!(matches!(
            read(&settings(), &headers, text.as_bytes()),
            Message::Call(_, Err(CallError::InvalidRun(KeyHeaderError::SeveralFields)))
        ));
    }

    #[test]
    fn other_messages_pass() {
        for text in [
            "",
            " ",
            "7",
            "null",
            "{}",
            "[]",
            r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#,
            r#"{"jsonrpc":"2.0","method":"tools/call","params":{"name":"get_order"}}"#,
            r#"{"jsonrpc":"2.0","id":1,"result":{}}"#,
            r#"[{"jsonrpc":"2.0","id":1,"method":"tools/list"},7]"#,
            &call("get_order", r#","_meta":{"idempotencyKey":"k"}"#),
        ] {
            assert!(matches!(read_text(text), Message::Passes), "{text}");
        }
    }

    #[test]
    fn a_cancellation_is_not_passed_on() {
        let text = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}"#;
        assert!(matches!(read_text(text), Message::Cancellation));
    }

    #[test]
    fn calls_that_cannot_be_protected_are_refused() {
        let pay = call("pay", "");
        for (text, why) in [
            ("{", UNREADABLE),
            ("x", UNREADABLE),
            ("[1", UNREADABLE),
            (r#"{"method":"tools/call","id":1,"params":{"x":NaN}}"#, UNREADABLE),
            (r#"{"method":"tools/list","method":"tools/call","id":1}"#, REPEATED),
            (r#"{"method":"tools/list","Method":"tools/call","id":1}"#, REPEATED),
            (r#"{"method":"tools/call","id":1,"params":{"name":"get_a","Name":"pay"}}"#, REPEATED),
            (r#"{"method":"tools/call","id":1}"#, NO_TOOL),
            (r#"{"method":"tools/call","id":1,"params":{"name":7}}"#, NO_TOOL),
            (r#"{"method":"tools/call","id":1,"params":["pay"]}"#, NO_TOOL),
            (r#"{"method":"tools/call","id":null,"params":{"name":"pay"}}"#, BAD_ID),
            (r#"{"method":"tools/call","id":{},"params":{"name":"pay"}}"#, BAD_ID),
            (r#"{"method":"tools/call","params":{"name":"pay"}}"#, BAD_ID),
            (&format!("[{pay}]"), BATCH),
            (r#"[{"method":"notifications/cancelled","params":{}}]"#, BATCH),
            ("[[1]]", BATCH),
        ] {
            assert!(
                matches!(read_text(text), Message::Refused(own) if own == why),
                "{text}: {:?}",
                read_text(text)
            );
        }
        let long = pay.replace('7', &format!("\"{}\"", "x".repeat(300)));
        assert!(matches!(read_text(&long), Message::Refused(BAD_ID)));
        for body in [&b"\xff\xfe{\0}\0"[..], b"{\"a\":\"\xff\"}"] {
            assert!(matches!(read(&settings(), &HeaderMap::new(), body), Message::Refused(UNREADABLE)));
        }
    }

    #[test]
    fn the_id_and_the_metadata_of_a_message_are_not_compared() {
        let compared = |text: &str| match read_text(text) {
            Message::Call(call, _) => call.compared,
            other => panic!("{other:?}"),
        };
        let first = compared(&call("pay", r#","arguments":{"a":1},"_meta":{"progressToken":1}"#));
        let second = call("pay", r#","arguments":{"a":1},"_meta":{"progressToken":2},"requestState":"x""#);
        assert_eq!(compared(&second.replace("\"id\":7", "\"id\":\"b\"")), first);
        assert_ne!(compared(&call("pay2", r#","arguments":{"a":1}"#)), first);
        assert_ne!(compared(&call("pay", r#","arguments":{"a":2}"#)), first);
        let tool = |name: &str| match read_text(&call(name, "")) {
            Message::Call(call, _) => call.tool,
            other => panic!("{other:?}"),
        };
        assert_eq!(tool("a_b-c.D/7"), "a_b-c.D/7");
        assert_eq!(tool("a b\\u001b#é"), "a%20b%1B%23%C3%A9");
    }

    #[test]
    fn the_outcome_of_a_response() {
        use CallOutcome::{Complete, Failed, NotCalled};
        for (text, expected) in [
            (r#"{"id":1,"result":{"content":[]}}"#, Some(Complete)),
            (r#"{"id":1,"result":{"resultType":"complete","isError":false}}"#, Some(Complete)),
            (r#"{"id":1,"result":{"resultType":"task","task":{}}}"#, Some(Complete)),
            (r#"{"id":1,"result":{"resultType":"input_required"}}"#, Some(NotCalled)),
            (r#"{"id":1,"result":{"content":[],"isError":true}}"#, Some(Failed)),
            (r#"{"id":1,"error":{"code":-32602,"message":"x"}}"#, Some(Failed)),
            (r#"{"id":1,"error":{"code":-32020,"message":"x"}}"#, Some(Failed)),
            (r#"{"id":1,"error":{"code":-32042,"data":{"elicitations":[{}]}}}"#, Some(NotCalled)),
            (r#"{"id":1,"error":{"code":-32603,"message":"x"}}"#, Some(Failed)),
            (r#"{"id":1,"error":{"code":"x"}}"#, Some(Failed)),
            (
                r#"{"id":1,"result":{"isError":true,"_meta":{"oncegate/problem":{"retry":"stop"}}}}"#,
                Some(Failed),
            ),
            (r#"{"id":1,"error":7}"#, Some(Failed)),
            (r#"{"id":1,"result":{"resultTYPE":"input_required"}}"#, Some(Complete)),
            (r#"{"id":1,"error":null,"result":{}}"#, Some(Complete)),
            (r#"{"id":1,"method":"sampling/createMessage","params":{"result":1}}"#, None),
            (r#"{"method":"notifications/progress","params":{}}"#, None),
            ("[]", None),
            ("", None),
        ] {
            assert_eq!(outcome_of(text, StatusCode::OK), expected, "{text}");
        }
        for (code, expected) in [(-32020, NotCalled), (-32022, NotCalled), (-32602, Failed), (-32601, Failed)]
        {
            let text = format!(r#"{{"id":1,"error":{{"code":{code},"message":"x"}}}}"#);
            assert_eq!(outcome_of(&text, StatusCode::BAD_REQUEST), Some(expected), "{text}");
        }
    }

    #[test]
    fn a_question_counts_only_in_its_own_form() {
        use CallOutcome::{Complete, Failed};
        let error = |data: &str| format!(r#"{{"id":1,"error":{{"code":-32042{data}}}}}"#);
        let asks = r#""code":-32042,"data":{"elicitations":[{}]}"#;
        for (text, expected) in [
            (error(""), Failed),
            (error(r#","data":{}"#), Failed),
            (error(r#","data":{"elicitations":[]}"#), Failed),
            (error(r#","data":{"elicitations":{}}"#), Failed),
            (format!(r#"{{"id":1,"error":{{{asks},"code":-32603}}}}"#), Failed),
            (format!(r#"{{"id":1,"error":{{{asks}}},"result":{{}}}}"#), Complete),
            (format!(r#"{{"id":1,"error":{{{asks}}},"error":{{{asks}}}}}"#), Complete),
            (format!(r#"{{"id":1,"error":{{{asks}}},"Error":null}}"#), Complete),
            (r#"{"id":1,"result":{"resultType":"complete","resultType":"input_required"}}"#.into(), Complete),
            (r#"{"id":1,"result":{"resultType":"input_required","ResultType":"complete"}}"#.into(), Complete),
            (r#"{"id":1,"result":{},"result":{"resultType":"input_required"}}"#.into(), Complete),
            (r#"{"id":1,"result":{"resultType":"input_required","content":[]}}"#.into(), Complete),
            (r#"{"id":1,"result":{"resultType":"input_required","structuredContent":{}}}"#.into(), Complete),
            (r#"{"id":1,"result":{"resultType":"input_required","isError":true}}"#.into(), Failed),
        ] {
            assert_eq!(outcome_of(&text, StatusCode::OK), Some(expected), "{text}");
        }
        for text in [
            error(r#","data":{"elicitations":[{}]}"#),
            r#"{"result":{"resultType":"input_required"}}"#.into(),
        ] {
            assert_eq!(outcome_of(&text, StatusCode::OK), Some(CallOutcome::NotCalled), "{text}");
            for status in [StatusCode::ACCEPTED, StatusCode::BAD_REQUEST, StatusCode::INTERNAL_SERVER_ERROR] {
                let outcome = outcome_of(&text, status);
                assert!(matches!(outcome, Some(Complete | Failed)), "{status} {text}: {outcome:?}");
            }
        }
    }

    fn call_with_id(id: &str) -> ToolCall {
        ToolCall {
            id: id.into(),
            tool: String::new(),
            compared: String::new(),
            is_by_intent: false,
            sessions: Vec::new(),
        }
    }

    /// The outcome of call 7 in a body.
    fn outcome_in_body(status: u16, body: &str) -> Result<Option<CallOutcome>, OtherRequest> {
        let status = StatusCode::from_u16(status).unwrap();
        call_with_id("7").outcome_in_body(body.as_bytes(), status, None)
    }

    #[test]
    fn only_the_response_to_the_call_counts() {
        let ok = StatusCode::OK;
        for (own, id, is_same) in [
            ("7", "7", true),
            ("7", "7.0", true),
            ("7", "\"7\"", false),
            ("\"a\"", r#""\u0061""#, true),
            ("\"a\"", "\"b\"", false),
            ("12345678901234567890", "12345678901234567890", true),
        ] {
            let text = format!(r#"{{"id":{id},"result":{{}}}}"#);
            let (call, expected) = (call_with_id(own), is_same.then_some(CallOutcome::Complete));
            assert_eq!(call.outcome_in_stream(&text, ok), expected, "{text}");
            assert_eq!(call.outcome_in_body(text.as_bytes(), ok, None).ok().flatten(), expected, "{text}");
        }
        assert_eq!(
            outcome_in_body(400, r#"{"id":7,"error":{"code":-32602}}"#),
            Ok(Some(CallOutcome::Failed))
        );
        assert_eq!(outcome_in_body(200, r#"{"id":8,"result":{}}"#), Err(OtherRequest));
        assert_eq!(outcome_in_body(200, r#"{"result":{}}"#), Err(OtherRequest));
        assert_eq!(outcome_in_body(200, "<html>"), Ok(None));
        // Programs differ in which of them counts.
        let asks = r#"{"resultType":"input_required"}"#;
        let twice = format!(r#"{{"id":8,"id":7,"result":{asks}}}"#);
        assert_eq!(outcome_in_body(200, &twice), Ok(Some(CallOutcome::Complete)));
        let both = format!(r#"[{{"id":7,"result":{asks}}},{{"id":7,"result":{{}}}}]"#);
        let found = call_with_id("7").find_response(&both, ok).map(|(outcome, _)| outcome);
        assert_eq!(found, Some(CallOutcome::Complete));
    }

    #[test]
    fn a_transport_says_that_it_did_not_take_a_message() {
        const FAILED: Result<Option<CallOutcome>, OtherRequest> = Ok(Some(CallOutcome::Failed));
        const NOT_TAKEN: Result<Option<CallOutcome>, OtherRequest> = Ok(Some(CallOutcome::NotCalled));
        let unread = r#"{"id":null,"error":{"code":-32700}}"#;
        assert_eq!(call_with_id("7").outcome_in_stream(unread, StatusCode::OK), None);
        for (status, body, expected) in [
            (400, unread, NOT_TAKEN),
            (200, unread, FAILED),
            (400, r#"{"error":{"code":-32600}}"#, NOT_TAKEN),
            (404, r#"{"id":null,"error":{"code":-32600}}"#, NOT_TAKEN),
            (400, r#"{"id":null,"error":{"code":-32000}}"#, NOT_TAKEN),
            (404, r#"{"id":null,"error":{"code":-32001}}"#, NOT_TAKEN),
            (409, r#"{"id":null,"error":{"code":-32000}}"#, FAILED),
            (400, r#"{"id":null,"error":{"code":-32603}}"#, FAILED),
            (404, r#"{"id":null,"error":{"code":-32603}}"#, FAILED),
            (404, r#"{"id":null,"error":{"code":-32602}}"#, FAILED),
            (404, r#"{"id":null,"error":{"code":-32001,"code":-32603}}"#, FAILED),
            (400, r#"{"error":"Bad Request"}"#, FAILED),
            (404, r#"{"error":{"message":"no order"}}"#, FAILED),
            (400, r#"{"detail":"x"}"#, Ok(None)),
            (404, "", Ok(None)),
            (422, r#"{"detail":"x"}"#, Ok(None)),
            (406, "", NOT_TAKEN),
            (415, "<html>", NOT_TAKEN),
            (413, r#"{"error":"Payload Too Large","status":413}"#, NOT_TAKEN),
            (413, r#"{"error":{"message":"too large"}}"#, NOT_TAKEN),
            (405, r#"{"detail":"x"}"#, NOT_TAKEN),
            (405, r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32000}}"#, NOT_TAKEN),
            (413, r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32603}}"#, FAILED),
            (413, r#"{"jsonrpc":"2.0","id":null,"error":{}}"#, FAILED),
            (413, r#"{"id":7,"error":{"code":-32000}}"#, FAILED),
            (413, r#"{"id":7,"result":{}}"#, Ok(Some(CallOutcome::Complete))),
            (413, r#"{"id":8,"error":{"code":-32000}}"#, Err(OtherRequest)),
            (413, r#"{"id":8,"id":null,"error":{"code":-32000}}"#, Err(OtherRequest)),
            (413, r#"{"id":null,"result":{}}"#, Err(OtherRequest)),
            (413, r#"[{"id":7,"result":{}}]"#, Ok(None)),
            (413, r#"{"id":7,"result":{"#, Ok(None)),
        ] {
            assert_eq!(outcome_in_body(status, body), expected, "{status} {body}");
        }
        let status = StatusCode::PAYLOAD_TOO_LARGE;
        let spoilt = b"\xef\xbb\xbf {\"id\":7,\"result\":\"\xff\"}";
        assert_eq!(call_with_id("7").outcome_in_body(spoilt, status, None), Ok(None));
    }

    #[test]
    fn a_refusal_names_the_problem_of_its_field() {
        let is_refusal = |status: u16, body: &str| {
            call_with_id("7").is_refusal(body, StatusCode::from_u16(status).unwrap(), "overloaded")
        };
        let result = |id: &str, is_error: &str, problem: &str| {
            format!(
                r#"{{"id":{id},"result":{{"isError":{is_error},"_meta":{{"oncegate/problem":{{"type":"{problem}"}}}}}}}}"#
            )
        };
        let error = |id: &str, problem: &str| {
            format!(r#"{{"id":{id},"error":{{"code":-32603,"data":{{"type":"{problem}"}}}}}}"#)
        };
        let ours = "urn:oncegate:problem:overloaded";
        for (status, body) in [
            (200, result("7", "true", ours)),
            (200, result("7", "true", "https://developer.example/retry#overloaded")),
            (200, error("7", ours)),
            (503, error("null", ours)),
        ] {
            assert!(is_refusal(status, &body), "{status} {body}");
        }
        for (status, body) in [
            (200, result("8", "true", ours)),
            (200, result("null", "true", ours)),
            (503, result("null", "true", ours)),
            (200, result("7", "false", ours)),
            (200, result("7", "true", "urn:oncegate:problem:key-reused")),
            (200, result("7", "true", "x-overloaded")),
            (200, result("7", "true", ours).replace("oncegate/problem", "problem")),
            (200, result("7", "true,\"isError\":false", ours)),
            (200, error("null", ours)),
            (503, error("8", ours)),
            (503, error("7,\"id\":null", ours)),
            (503, error("7,\"result\":{}", ours)),
            (503, error("7", ours).replace("data", "Data")),
            (503, String::new()),
        ] {
            assert!(!is_refusal(status, &body), "{status} {body}");
        }
    }

    #[test]
    fn a_replay_has_the_id_of_its_request_and_a_mark() {
        let call = call_with_id("\"new\"");
        for (stored, expected) in [
            (
                r#"{"jsonrpc":"2.0","id":1,"result":{"content":[]}}"#,
                r#"{"jsonrpc":"2.0","id":"new","result":{"resultType":"complete","_meta":{"oncegate/replayed":true},"content":[]}}"#,
            ),
            (
                r#"{"result":{"x":"\"id\":1","_meta":{"a":1},"resultType":"task"},"id":"old"}"#,
                r#"{"result":{"x":"\"id\":1","_meta":{"oncegate/replayed":true,"a":1},"resultType":"task"},"id":"new"}"#,
            ),
            (
                r#"{"id":1,"result":{}}"#,
                r#"{"id":"new","result":{"resultType":"complete","_meta":{"oncegate/replayed":true}}}"#,
            ),
            (
                r#"{"id":1,"result":{"_meta":{ }}}"#,
                r#"{"id":"new","result":{"resultType":"complete","_meta":{"oncegate/replayed":true }}}"#,
            ),
            (r#"{"id":null,"error":{"code":1}}"#, r#"{"id":"new","error":{"code":1}}"#),
            (r#" {"error":{"code":1}}"#, r#" {"id":"new","error":{"code":1}}"#),
            (r#"{"id":1,"result":7}"#, r#"{"id":"new","result":7}"#),
        ] {
            let replayed = call.replayed(stored.as_bytes()).map(|text| String::from_utf8(text).unwrap());
            assert_eq!(replayed.as_deref(), Some(expected));
            // A sidecar behind another one has marked it.
            let again = call.replayed(expected.as_bytes()).map(|text| String::from_utf8(text).unwrap());
            assert_eq!(again.as_deref(), Some(expected));
        }
        for stored in ["", "{}", "paid", r#"{"id":1,"method":"x"}"#] {
            assert_eq!(call.replayed(stored.as_bytes()), None, "{stored}");
        }
    }
}
