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
    /// The parameter of the query that may carry the key.
    pub(crate) key_query: Option<String>,
    /// The members of a JSON body that may carry the key: the first that is there.
    pub(crate) key_members: Vec<KeyMember>,
    /// The field with the time at which the client sent the request first, which each request with a key must have.
    pub(crate) first_sent_header: Option<HeaderName>,
    pub(crate) grammar: KeyGrammar,
    pub(crate) key_scope: KeyScope,
    pub(crate) require_key: bool,
    pub(crate) methods: Vec<Method>,
    pub(crate) uncovered_methods: UncoveredMethods,
    pub(crate) body_comparison: BodyComparison,
    /// The members of JSON bodies that are compared.
    pub(crate) fingerprint: FingerprintRules,
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
}

impl BodyPart {
    const ALL: [(&'static str, Self); 10] = [
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
const SHIPPED: [(&str, &str); 11] = [
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
            key_query: None,
            key_members: Vec::new(),
            first_sent_header: None,
            grammar: KeyGrammar::default(),
            key_scope: KeyScope::Endpoint,
            require_key: false,
            methods: vec![Method::POST, Method::PATCH],
            uncovered_methods: UncoveredMethods::Pass,
            body_comparison: BodyComparison::Canonical,
            fingerprint: FingerprintRules::new(),
            retention: DAY,
            server_errors: ServerErrors::Replay,
            release_statuses: Vec::new(),
            replay_statuses: Vec::new(),
            replay_marker: (HeaderName::from_static("idempotent-replayed"), HeaderValue::from_static("true")),
            echo_key: true,
            response_headers: Vec::new(),
            kept_server_error_headers: Vec::new(),
            refusal_headers: Vec::new(),
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
            default: RefusalWords::default(),
            client_errors: RefusalWords::default(),
            server_errors: RefusalWords::default(),
            rows: Vec::new(),
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
        !self.key_headers.is_empty() || self.key_query.is_some() || !self.key_members.is_empty()
    }

    pub(crate) fn set_body_comparison(&mut self, comparison: BodyComparison) {
        self.body_comparison = comparison;
        if comparison == BodyComparison::Raw {
            self.fingerprint = std::mem::take(&mut self.fingerprint).with_raw_bodies();
        }
    }

    /// The status of the refusal for a condition.
    pub(crate) fn refusal_status(&self, condition: Condition) -> StatusCode {
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

    /// The body of the refusal for a condition.
    pub(crate) fn refusal_body(
        &self,
        condition: Condition,
        status: StatusCode,
        detail: &str,
        record: Option<RecordId>,
    ) -> String {
        self.refusal.body.render(|part, body| match part {
            BodyPart::Type => push_escaped(body, &self.problem_type(condition)),
            BodyPart::Title => push_escaped(body, condition.title()),
            BodyPart::Status => body.push_str(status.as_str()),
            BodyPart::Detail => push_escaped(body, detail),
            BodyPart::Retry => push_escaped(body, condition.retry().as_str()),
            BodyPart::Slug => push_escaped(body, condition.slug()),
            BodyPart::Code => push_escaped(body, &self.refusal_code(condition, status)),
            BodyPart::Kind => push_escaped(body, self.refusal_kind(condition, status)),
            BodyPart::Reason => push_escaped(body, status.canonical_reason().unwrap_or("Error")),
            BodyPart::Instance => {
                if let Some(record) = record {
                    body.extend([",\"instance\":\"", RECORD_URN, &record.to_string(), "\""]);
                }
            }
        })
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
    pub(crate) fn mark_refusal(&self, headers: &mut HeaderMap, retry: RetryAdvice) {
        add(&self.refusal_headers, headers, retry == RetryAdvice::SameKey);
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

fn push_escaped(body: &mut String, text: &str) {
    let quoted = serde_json::Value::from(text).to_string();
    body.push_str(quoted.get(1..quoted.len() - 1).unwrap_or_default());
}

#[cfg(test)]
mod tests;
