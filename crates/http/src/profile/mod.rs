//! Profiles: the dialects in which different APIs use the same protocol, as tables of values.
//!
//! A profile has no code of its own on the request's path. It is a file: names of header fields, a grammar, methods, statuses,
//! a shape for errors and a policy. The shipped files are in `profiles/`. Each states its differences from `ietf`, whose values
//! are also those of [`Profile::default`].

mod read;
mod table;
mod template;

use std::borrow::Cow;
use std::time::Duration;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode};
use oncegate_core::RecordId;
use oncegate_core::fingerprint::FingerprintRules;

pub use read::{ProfileError, ProfileErrors, nearest};
pub use table::RefusalRow;
use template::Template;

use crate::carrier::KeyMember;
use crate::key::KeyGrammar;
use crate::mcp::Protocol;
use crate::refusal::{Condition, RetryAdvice};

/// The dialect of one family of APIs. [`Settings`](crate::Settings) start from it.
#[derive(Clone, Debug)]
pub struct Profile {
    pub(crate) name: String,
    title: String,
    sources: Vec<String>,
    deviations: Vec<String>,
    /// The header fields that may carry the key. Responses echo the key under the name that the request used.
    pub(crate) key_headers: Vec<HeaderName>,
    /// The parameters of the query, or of a form, that may carry the key.
    pub(crate) key_query: Vec<String>,
    /// The members of a JSON body that may carry the key.
    pub(crate) key_members: Vec<KeyMember>,
    /// The field with the time at which the client sent the request first, which each request with a key must have.
    pub(crate) first_sent_header: Option<HeaderName>,
    pub(crate) protocol: Protocol,
    /// The members of a call that may name the run of the agent.
    pub(crate) run_members: Vec<KeyMember>,
    pub(crate) grammar: KeyGrammar,
    pub(crate) key_scope: KeyScope,
    /// The header fields whose values are part of a key's scope.
    pub(crate) key_scope_headers: Vec<HeaderName>,
    pub(crate) require_key: bool,
    pub(crate) methods: Vec<Method>,
    pub(crate) uncovered_methods: UncoveredMethods,
    pub(crate) body_comparison: BodyComparison,
    /// The members of JSON bodies that are compared.
    pub(crate) fingerprint: FingerprintRules,
    /// The header fields that are compared.
    pub(crate) fingerprint_headers: Vec<HeaderName>,
    pub(crate) retention: Duration,
    pub(crate) server_errors: ServerErrors,
    pub(crate) release_statuses: Vec<StatusCode>,
    /// The statuses that a replay has instead of those of the first response.
    pub(crate) replay_statuses: Vec<(StatusCode, StatusCode)>,
    pub(crate) replay_marker: (HeaderName, HeaderValue),
    pub(crate) echo_key: bool,
    response_headers: ExtraHeaders,
    kept_server_error_headers: ExtraHeaders,
    refusal_headers: ExtraHeaders,
    /// The fields of refusals for what is wrong with the request itself, so that nothing was executed for it before.
    rejection_headers: ExtraHeaders,
    refusal: RefusalShape,
    /// The beginning of the types of problems.
    pub(crate) problem_base: Cow<'static, str>,
}

/// Header fields that a profile adds to a response.
type ExtraHeaders = Vec<(HeaderName, Template<HeaderPart>)>;

/// A name in the value of a header field.
#[derive(Clone, Debug, PartialEq, Eq)]
enum HeaderPart {
    /// The value of this field of the same response. Without it, the whole field is left out.
    Response(HeaderName),
    /// `true` if the same request with the same key can succeed later, otherwise `false`.
    Retryable,
}

/// The shape of refusals.
#[derive(Clone, Debug)]
struct RefusalShape {
    media_type: HeaderValue,
    body: Template<BodyPart>,
    /// The body of the refusal of a call of a tool, which is the response to it, with the status 200.
    tool_body: Option<Template<BodyPart>>,
    /// The words for conditions without words of their own: for all, for statuses from 400 to 499, and for those from 500.
    default: RefusalWords,
    client_errors: RefusalWords,
    server_errors: RefusalWords,
    rows: Vec<(Condition, RefusalWords)>,
}

/// The words of a refusal that a profile may choose. `None` is the next more general value: that of the class of statuses, that
/// of the profile, that of the condition.
#[derive(Clone, Debug, Default)]
struct RefusalWords {
    status: Option<StatusCode>,
    code: Option<String>,
    kind: Option<String>,
}

/// A name in the body of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BodyPart {
    Type,
    Title,
    Status,
    Detail,
    Retry,
    Slug,
    Code,
    Kind,
    Reason,
    Instance,
    MessageId,
    Advice,
}

/// The values in the body of a refusal.
pub(crate) struct RefusalText<'a> {
    pub(crate) condition: Condition,
    pub(crate) status: StatusCode,
    pub(crate) detail: &'a str,
    pub(crate) record: Option<RecordId>,
    /// In seconds.
    pub(crate) retry_after: Option<u64>,
    /// The JSON-RPC `id` of the call that is refused, as JSON.
    pub(crate) message_id: Option<&'a str>,
}

impl BodyPart {
    const ALL: [(&'static str, Self); 12] = [
        ("type", Self::Type),
        ("title", Self::Title),
        ("status", Self::Status),
        ("detail", Self::Detail),
        ("retry", Self::Retry),
        ("slug", Self::Slug),
        ("code", Self::Code),
        ("kind", Self::Kind),
        ("reason", Self::Reason),
        ("instance", Self::Instance),
        ("message-id", Self::MessageId),
        ("advice", Self::Advice),
    ];

    fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|(own, _)| *own == name).map(|(_, part)| part)
    }
}

/// The scope within which a caller's key is unique.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeyScope {
    /// Method and path: the same key on another endpoint is another key.
    Endpoint,
    /// Nothing else: the same key on another endpoint is a mismatch.
    Caller,
}

/// The policy for responses from 500 to 599, panics and timeouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ServerErrors {
    /// Kept and replayed: the effect may have happened. If there is no response to keep, the outcome is unknown.
    Replay,
    /// The key is free again: the service undoes everything before it answers so.
    Release,
}

/// The policy for requests with a key whose method is not covered, but may have an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UncoveredMethods {
    /// They pass, and their key is ignored.
    Pass,
    /// They are refused, so that no client takes its request for protected.
    Refuse,
}

/// The comparison of the bodies of two requests with one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BodyComparison {
    /// JSON by value (RFC 8785), forms and multipart by their parts, others byte by byte.
    Canonical,
    /// Byte by byte.
    Raw,
    /// Not at all: the key alone identifies the request.
    Nothing,
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The shipped profiles, in the order of the documentation.
const SHIPPED: [(&str, &str); 12] = [
    ("ietf", include_str!("../../profiles/ietf.toml")),
    ("stripe", include_str!("../../profiles/stripe.toml")),
    ("stripe-v2", include_str!("../../profiles/stripe-v2.toml")),
    ("acp", include_str!("../../profiles/acp.toml")),
    ("paypal", include_str!("../../profiles/paypal.toml")),
    ("adyen", include_str!("../../profiles/adyen.toml")),
    ("square", include_str!("../../profiles/square.toml")),
    ("oasis", include_str!("../../profiles/oasis.toml")),
    ("aws", include_str!("../../profiles/aws.toml")),
    ("webhook", include_str!("../../profiles/webhook.toml")),
    ("classic", include_str!("../../profiles/classic.toml")),
    ("mcp", include_str!("../../profiles/mcp.toml")),
];

impl Default for Profile {
    /// The values of the profile `ietf`.
    fn default() -> Self {
        Self {
            name: "ietf".to_owned(),
            title: String::new(),
            sources: Vec::new(),
            deviations: Vec::new(),
            key_headers: vec![HeaderName::from_static("idempotency-key")],
            key_query: Vec::new(),
            key_members: Vec::new(),
            first_sent_header: None,
            protocol: Protocol::Http,
            run_members: Vec::new(),
            grammar: KeyGrammar::default(),
            key_scope: KeyScope::Endpoint,
            key_scope_headers: Vec::new(),
            require_key: false,
            methods: vec![Method::POST, Method::PATCH],
            uncovered_methods: UncoveredMethods::Pass,
            body_comparison: BodyComparison::Canonical,
            fingerprint: FingerprintRules::new(),
            fingerprint_headers: Vec::new(),
            retention: DAY,
            server_errors: ServerErrors::Replay,
            release_statuses: Vec::new(),
            replay_statuses: Vec::new(),
            replay_marker: (HeaderName::from_static("idempotent-replayed"), HeaderValue::from_static("true")),
            echo_key: true,
            response_headers: Vec::new(),
            kept_server_error_headers: Vec::new(),
            refusal_headers: Vec::new(),
            rejection_headers: Vec::new(),
            refusal: RefusalShape::problem(),
            problem_base: Cow::Borrowed(PROBLEM_TYPES),
        }
    }
}

impl RefusalShape {
    /// Problem details by RFC 9457, with the member `retry`.
    fn problem() -> Self {
        const BODY: [(&str, Option<BodyPart>); 7] = [
            (r#"{"type":""#, Some(BodyPart::Type)),
            (r#"","title":""#, Some(BodyPart::Title)),
            (r#"","status":"#, Some(BodyPart::Status)),
            (r#","detail":""#, Some(BodyPart::Detail)),
            (r#"","retry":""#, Some(BodyPart::Retry)),
            (r#"""#, Some(BodyPart::Instance)),
            ("}", None),
        ];
        Self {
            media_type: HeaderValue::from_static("application/problem+json"),
            body: Template::of(BODY),
            tool_body: None,
            default: RefusalWords::default(),
            client_errors: RefusalWords::default(),
            server_errors: RefusalWords::default(),
            rows: Vec::new(),
        }
    }

    fn is_json(&self) -> bool {
        self.media_type.to_str().is_ok_and(|text| text.to_ascii_lowercase().contains("json"))
    }

    /// The function that writes a text into a body of this media type.
    fn escape(&self) -> fn(&mut String, &str) {
        let media_type = self.media_type.to_str().unwrap_or_default().to_ascii_lowercase();
        match media_type {
            text if text.contains("json") => push_json,
            text if text.contains("xml") || text.contains("html") => push_xml,
            _ => String::push_str,
        }
    }

    /// A word of the refusal for a condition: that of its row, of the class of its status, or of all.
    fn word(
        &self,
        condition: Condition,
        status: StatusCode,
        of: fn(&RefusalWords) -> Option<&String>,
    ) -> Option<&str> {
        let class = if status.is_client_error() { &self.client_errors } else { &self.server_errors };
        let row = self.row(condition).and_then(of);
        row.or_else(|| of(class)).or_else(|| of(&self.default)).map(String::as_str)
    }

    fn row(&self, condition: Condition) -> Option<&RefusalWords> {
        self.rows.iter().find(|(own, _)| *own == condition).map(|(_, row)| row)
    }
}

impl Profile {
    /// The names of the shipped profiles.
    #[must_use]
    pub fn names() -> [&'static str; SHIPPED.len()] {
        SHIPPED.map(|(name, _)| name)
    }

    /// The shipped profile of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let (name, text) = SHIPPED.into_iter().find(|(own, _)| *own == name)?;
        Self::parse(name, text).ok()
    }

    /// The profile in this TOML text, under this name. The page about profiles lists the keys.
    ///
    /// # Errors
    /// Each mistake in the text, with its line and column.
    pub fn parse(name: &str, text: &str) -> Result<Self, ProfileErrors> {
        read::read(name, text)
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The API or specification that it is for.
    #[must_use]
    pub fn title(&self) -> &str {
        &self.title
    }

    /// The addresses of the documents that it follows.
    #[must_use]
    pub fn sources(&self) -> &[String] {
        &self.sources
    }

    /// The differences from the API or specification that it is for.
    #[must_use]
    pub fn deviations(&self) -> &[String] {
        &self.deviations
    }

    /// Returns true if something in a request may carry the key.
    pub(crate) fn has_carrier(&self) -> bool {
        !self.key_headers.is_empty()
            || !self.key_query.is_empty()
            || !self.key_members.is_empty()
            || self.protocol == Protocol::Mcp
    }

    pub(crate) fn set_body_comparison(&mut self, comparison: BodyComparison) {
        self.body_comparison = comparison;
        if comparison == BodyComparison::Raw {
            self.fingerprint = std::mem::take(&mut self.fingerprint).with_raw_bodies();
        }
    }

    /// The usual status of the refusal for a condition. A proxy may use another one for the first request with a key.
    #[must_use]
    pub fn refusal_status(&self, condition: Condition) -> StatusCode {
        let row = self.refusal.row(condition);
        row.and_then(|row| row.status).or(self.refusal.default.status).unwrap_or(condition.status())
    }

    /// The type of the problem for a condition (RFC 9457, 3.1.1).
    #[must_use]
    pub fn problem_type(&self, condition: Condition) -> String {
        format!("{}{}", self.problem_base, condition.slug())
    }

    /// The code of the refusal for a condition.
    fn refusal_code(&self, condition: Condition, status: StatusCode) -> String {
        let code = self.refusal.word(condition, status, |words| words.code.as_ref());
        code.map_or_else(|| condition.slug().replace('-', "_"), ToOwned::to_owned)
    }

    /// The kind of the refusal for a condition.
    fn refusal_kind(&self, condition: Condition, status: StatusCode) -> &str {
        self.refusal.word(condition, status, |words| words.kind.as_ref()).unwrap_or("api_error")
    }

    /// The media type of refusals.
    pub(crate) const fn refusal_type(&self) -> &HeaderValue {
        &self.refusal.media_type
    }

    /// The body of a refusal. True if it is the response to a call of a tool.
    pub(crate) fn refusal_body(&self, text: &RefusalText<'_>) -> (String, bool) {
        let tool_body = self.refusal.tool_body.as_ref().filter(|_| text.message_id.is_some());
        let RefusalText { condition, status, .. } = *text;
        let escape = if tool_body.is_some() { push_json } else { self.refusal.escape() };
        let body = tool_body.unwrap_or(&self.refusal.body).render(|part, body| match part {
            BodyPart::Type => escape(body, &self.problem_type(condition)),
            BodyPart::Title => escape(body, condition.title()),
            BodyPart::Status => body.push_str(status.as_str()),
            BodyPart::Detail => escape(body, text.detail),
            BodyPart::Retry => escape(body, condition.retry().as_str()),
            BodyPart::Slug => escape(body, condition.slug()),
            BodyPart::Code => escape(body, &self.refusal_code(condition, status)),
            BodyPart::Kind => escape(body, self.refusal_kind(condition, status)),
            BodyPart::Reason => escape(body, status.canonical_reason().unwrap_or("Error")),
            BodyPart::Instance => {
                if let Some(record) = text.record {
                    body.extend([",\"instance\":\"", RECORD_URN, &record.to_string(), "\""]);
                }
            }
            BodyPart::MessageId => body.push_str(text.message_id.unwrap_or("null")),
            BodyPart::Advice => escape(body, &condition.retry().for_agents(text.retry_after)),
        });
        (body, tool_body.is_some())
    }

    /// Adds the fields of an executed request's response. They are stored and replayed with it.
    pub(crate) fn mark_executed(&self, headers: &mut HeaderMap) {
        add(&self.response_headers, headers, false);
    }

    /// Adds the fields of a server error that is kept: the same key gives the same error again.
    pub(crate) fn mark_kept_server_error(&self, headers: &mut HeaderMap) {
        add(&self.kept_server_error_headers, headers, false);
    }

    /// Adds the marker of a replay, and the fields of an executed response if the service stored the response without them.
    pub(crate) fn mark_replay(&self, headers: &mut HeaderMap) {
        if self.response_headers.iter().any(|(name, _)| !headers.contains_key(name)) {
            add(&self.response_headers, headers, false);
        }
        let (name, value) = self.replay_marker.clone();
        headers.insert(name, value);
    }

    /// Adds the fields of a refusal.
    pub(crate) fn mark_refusal(&self, headers: &mut HeaderMap, condition: Condition) {
        let is_retryable = condition.retry() == RetryAdvice::SameKey;
        add(&self.refusal_headers, headers, is_retryable);
        if condition.rejects() {
            add(&self.rejection_headers, headers, is_retryable);
        }
    }

    /// The names of all fields that the profile adds.
    pub(crate) fn added_headers(&self) -> impl Iterator<Item = &HeaderName> {
        self.stored_headers().chain(self.refusal_headers.iter().map(|(name, _)| name))
    }

    /// The names of the fields that are stored with responses because the profile adds them.
    pub(crate) fn stored_headers(&self) -> impl Iterator<Item = &HeaderName> {
        self.response_headers.iter().chain(&self.kept_server_error_headers).map(|(name, _)| name)
    }
}

/// Adds these fields. A field whose value needs another field that is not there is left out.
fn add(fields: &ExtraHeaders, headers: &mut HeaderMap, is_retryable: bool) {
    for (name, value) in fields {
        let mut is_complete = true;
        let value = value.render(|part, text| match part {
            HeaderPart::Response(name) => match headers.get(name).and_then(|value| value.to_str().ok()) {
                Some(value) => text.push_str(value),
                None => is_complete = false,
            },
            HeaderPart::Retryable => text.push_str(if is_retryable { "true" } else { "false" }),
        });
        if let (true, Ok(value)) = (is_complete, HeaderValue::try_from(value)) {
            headers.insert(name.clone(), value);
        }
    }
}

/// The usual beginning of problem types. It is not an address: a client tells problems apart without a lookup.
pub(crate) const PROBLEM_TYPES: &str = "urn:oncegate:problem:";

/// The prefix of the names of records in problems.
const RECORD_URN: &str = "urn:oncegate:record:";

fn push_json(body: &mut String, text: &str) {
    let quoted = serde_json::Value::from(text).to_string();
    body.push_str(quoted.get(1..quoted.len() - 1).unwrap_or_default());
}

fn push_xml(body: &mut String, text: &str) {
    for letter in text.chars() {
        match letter {
            '<' => body.push_str("&lt;"),
            '>' => body.push_str("&gt;"),
            '&' => body.push_str("&amp;"),
            '"' => body.push_str("&quot;"),
            '\'' => body.push_str("&apos;"),
            _ => body.push(letter),
        }
    }
}

#[cfg(test)]
mod tests;
