//! Profiles: the dialects in which different APIs use the same protocol, as tables of values.
//!
//! A profile has no code of its own on the request's path. It is data: a header field, a grammar, methods, statuses, a shape
//! for errors and a policy.

use std::time::Duration;

use http::header::{HeaderName, HeaderValue};
use http::{Method, StatusCode};
use oncegate_core::RecordId;

use crate::key::KeySyntax;
use crate::refusal::{Condition, RetryAdvice};

/// The dialect of one family of APIs.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Profile {
    /// Its name in configurations.
    pub name: &'static str,
    /// The header field that carries the key.
    pub key_header: HeaderName,
    /// The members of a JSON body that carry the key instead of the header field, as JSON pointers. See
    /// [`Settings::with_natural_key`](crate::Settings::with_natural_key).
    pub key_members: &'static [&'static str],
    /// The syntax of the key in its header field.
    pub key_syntax: KeySyntax,
    /// The methods that are covered; others pass through and their key is ignored.
    pub methods: &'static [Method],
    /// True if a covered request must have a key.
    pub require_key: bool,
    /// The scope within which a caller's key is unique.
    pub key_scope: KeyScope,
    /// The policy for responses from 500 to 599.
    pub server_errors: ServerErrors,
    /// Statuses of responses that free the key, in addition to those that always do (401, 403, 407, 408, 421, 425, 429).
    pub release_statuses: &'static [StatusCode],
    /// The time for which completed records are kept.
    pub retention: Duration,
    /// The field that marks a replay, with the value `true`.
    pub replay_marker: HeaderName,
    /// The media type of errors.
    pub error_content_type: &'static str,
    /// The shape of errors. Names in braces are replaced: `type` (of the problem), `title`, `detail`, `retry`, `slug`,
    /// `code`, `kind`, `reason` (of the status) as the inside of a JSON string, `status` as a number. `instance` is replaced by
    /// a whole member with a comma in front, `,"instance":"urn:oncegate:record:…"`, or by nothing if no record is known.
    pub error_template: &'static str,
    /// Conditions whose values differ from those of the profile `ietf`.
    pub errors: &'static [(Condition, ErrorValues)],
    /// A field that tells a client whether to send the request again, with its values for yes and no.
    pub should_retry: Option<(HeaderName, &'static str, &'static str)>,
}

/// The status, code and class of the error for one condition.
#[derive(Clone, Copy, Debug)]
pub struct ErrorValues {
    /// The status.
    pub status: StatusCode,
    /// The code of the error, for shapes that have one.
    pub code: &'static str,
    /// The class of the error, for shapes that have one.
    pub kind: &'static str,
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

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

const STRIPE_ERRORS: &[(Condition, ErrorValues)] = {
    const fn values(status: StatusCode, kind: &'static str, code: &'static str) -> ErrorValues {
        ErrorValues { status, code, kind }
    }
    const BAD: StatusCode = StatusCode::BAD_REQUEST;
    const INVALID: &str = "invalid_request_error";
    &[
        (Condition::KeyMissing, values(BAD, INVALID, "idempotency_key_missing")),
        (Condition::KeyInvalid, values(BAD, INVALID, "idempotency_key_invalid")),
        (Condition::RequestTooLarge, values(StatusCode::PAYLOAD_TOO_LARGE, INVALID, "request_too_large")),
        (Condition::RequestIncomplete, values(BAD, INVALID, "request_incomplete")),
        (Condition::ScopeUnavailable, values(BAD, INVALID, "idempotency_scope_unavailable")),
        (Condition::ScopeNotSet, values(BAD, INVALID, "idempotency_scope_not_set")),
        (Condition::KeyReused, values(BAD, "idempotency_error", "idempotency_key_reused")),
        (Condition::HostDiffers, values(BAD, "idempotency_error", "idempotency_host_differs")),
        (Condition::RequestInProgress, values(StatusCode::CONFLICT, INVALID, "idempotency_key_in_use")),
        (Condition::ReplayUnavailable, values(BAD, "idempotency_error", "idempotency_replay_unavailable")),
        (Condition::RequestMalformed, values(BAD, INVALID, "request_malformed")),
        (
            Condition::RequestHeadTooLarge,
            values(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, INVALID, "request_head_too_large"),
        ),
        (Condition::RequestUnsupported, values(StatusCode::NOT_IMPLEMENTED, INVALID, "request_unsupported")),
    ]
};

const PROBLEM: &str = r#"{"type":"{type}","title":"{title}","status":{status},"detail":"{detail}","retry":"{retry}"{instance}}"#;

impl Profile {
    /// The semantics of draft-ietf-httpapi-idempotency-key-header-07, and errors by RFC 9457. The default.
    #[must_use]
    pub const fn ietf() -> Self {
        Self {
            name: "ietf",
            key_header: HeaderName::from_static("idempotency-key"),
            key_members: &[],
            key_syntax: KeySyntax::Lenient,
            methods: &[Method::POST, Method::PATCH],
            require_key: false,
            key_scope: KeyScope::Endpoint,
            server_errors: ServerErrors::Replay,
            release_statuses: &[],
            retention: DAY,
            replay_marker: HeaderName::from_static("idempotent-replayed"),
            error_content_type: "application/problem+json",
            error_template: PROBLEM,
            errors: &[],
            should_retry: None,
        }
    }

    /// As Stripe's API does it: a key belongs to the account, another endpoint is a mismatch, a mismatch is a 400, a response 400
    /// frees the key, server errors are replayed, and `Stripe-Should-Retry` tells its clients what to do.
    #[must_use]
    pub fn stripe() -> Self {
        Self {
            name: "stripe",
            methods: &[Method::POST],
            key_scope: KeyScope::Caller,
            // Stripe keeps nothing of a request whose parameters were refused.
            release_statuses: &[StatusCode::BAD_REQUEST],
            error_content_type: "application/json",
            error_template: r#"{"error":{"type":"{kind}","code":"{code}","message":"{detail}"}}"#,
            errors: STRIPE_ERRORS,
            should_retry: Some((HeaderName::from_static("stripe-should-retry"), "true", "false")),
            ..Self::ietf()
        }
    }

    /// As the common middleware does it: `X-Idempotent-Replayed`, PUT covered too, server errors free the key.
    #[must_use]
    pub fn classic() -> Self {
        Self {
            name: "classic",
            methods: &[Method::POST, Method::PUT, Method::PATCH],
            server_errors: ServerErrors::Release,
            replay_marker: HeaderName::from_static("x-idempotent-replayed"),
            error_content_type: "application/json",
            // Old clients ignore `type` and `retry`; without them, new clients could not tell one 422 from another.
            error_template: r#"{"error":"{reason}","message":"{detail}","type":"{type}","retry":"{retry}"}"#,
            ..Self::ietf()
        }
    }

    /// Every profile there is.
    #[must_use]
    pub fn all() -> [Self; 3] {
        [Self::ietf(), Self::classic(), Self::stripe()]
    }

    /// The profile of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|profile| profile.name == name)
    }

    pub(crate) fn error_values(&self, condition: Condition) -> ErrorValues {
        let own = self.errors.iter().find(|(c, _)| *c == condition).map(|(_, values)| *values);
        own.unwrap_or(ErrorValues { status: condition.status(), code: condition.slug(), kind: "api_error" })
    }

    pub(crate) fn retry_headers(&self, retry: RetryAdvice) -> Option<(HeaderName, HeaderValue)> {
        let (name, yes, no) = self.should_retry.as_ref()?;
        let value = if retry == RetryAdvice::SameKey { yes } else { no };
        Some((name.clone(), HeaderValue::from_static(value)))
    }

    /// The body of an error.
    pub(crate) fn render(
        &self,
        condition: Condition,
        values: &ErrorValues,
        detail: &str,
        record: Option<RecordId>,
    ) -> String {
        let mut body = String::with_capacity(self.error_template.len() + 256);
        let mut rest = self.error_template;
        // In a template, a name follows a brace that is replaced; a quote follows a brace of JSON.
        while let Some((before, after)) = rest.split_once('{') {
            body.push_str(before);
            let member =
                after.split_once('}').filter(|(name, _)| name.bytes().all(|b| b.is_ascii_lowercase()));
            let Some((name, next)) = member else {
                body.push('{');
                rest = after;
                continue;
            };
            match name {
                "status" => body.push_str(values.status.as_str()),
                "type" => push_escaped(&mut body, &format!("{PROBLEM_TYPES}{}", condition.slug())),
                "title" => push_escaped(&mut body, condition.title()),
                "detail" => push_escaped(&mut body, detail),
                "retry" => push_escaped(&mut body, condition.retry().as_str()),
                "slug" => push_escaped(&mut body, condition.slug()),
                "code" => push_escaped(&mut body, &values.code.replace('-', "_")),
                "kind" => push_escaped(&mut body, values.kind),
                "instance" => {
                    if let Some(record) = record {
                        body.extend([",\"instance\":\"", RECORD_URN, &record.to_string(), "\""]);
                    }
                }
                "reason" => push_escaped(&mut body, values.status.canonical_reason().unwrap_or("Error")),
                _ => {}
            }
            rest = next;
        }
        body.push_str(rest);
        body
    }
}

/// The prefix of problem types. It is not an address: a client tells problems apart without a lookup.
pub(crate) const PROBLEM_TYPES: &str = "urn:oncegate:problem:";

/// The prefix of the names of records in problems.
const RECORD_URN: &str = "urn:oncegate:record:";

fn push_escaped(body: &mut String, text: &str) {
    let quoted = serde_json::Value::from(text).to_string();
    body.push_str(quoted.get(1..quoted.len() - 1).unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn rendered(profile: &Profile, condition: Condition) -> Value {
        let values = profile.error_values(condition);
        serde_json::from_str(&profile.render(condition, &values, condition.detail(), None)).unwrap()
    }

    #[test]
    fn ietf_errors_are_problem_details_with_the_titles_of_the_draft() {
        let problem = rendered(&Profile::ietf(), Condition::KeyMissing);
        assert_eq!(problem["title"], "Idempotency-Key is missing");
        assert_eq!(problem["status"], 400);
        assert_eq!(problem["type"], "urn:oncegate:problem:key-missing");
        assert_eq!(problem["retry"], "fix-request");
        assert!(problem["instance"].is_null());
        let (values, record) =
            (Profile::ietf().error_values(Condition::OutcomeUnknown), RecordId::from_bytes([0xab; 32]));
        let text = Profile::ietf().render(Condition::OutcomeUnknown, &values, "why", Some(record));
        let problem: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(problem["instance"], format!("urn:oncegate:record:{}", "ab".repeat(32)));
        assert_eq!(
            rendered(&Profile::ietf(), Condition::KeyReused)["title"],
            "Idempotency-Key is already used"
        );
        assert_eq!(
            rendered(&Profile::ietf(), Condition::RequestInProgress)["title"],
            "A request is outstanding for this Idempotency-Key"
        );
    }

    #[test]
    fn every_profile_renders_every_condition_as_complete_json() {
        for profile in Profile::all() {
            for condition in Condition::ALL {
                let text = rendered(&profile, condition).to_string();
                assert!(!text.contains("{}"), "{} {condition}: {text}", profile.name);
                assert!(text.contains(condition.detail()), "{} {condition}: {text}", profile.name);
            }
        }
    }

    #[test]
    fn every_profile_names_members_of_a_body_by_pointers() {
        for profile in Profile::all() {
            for member in profile.key_members {
                assert!(oncegate_core::JsonPointer::parse(member).is_ok(), "{} {member}", profile.name);
            }
        }
    }

    #[test]
    fn stripe_errors_have_stripes_shape() {
        let error = rendered(&Profile::stripe(), Condition::KeyReused);
        assert_eq!(error["error"]["type"], "idempotency_error");
        assert_eq!(Profile::stripe().error_values(Condition::KeyReused).status, 400);
        assert_eq!(
            rendered(&Profile::stripe(), Condition::RequestInProgress)["error"]["code"],
            "idempotency_key_in_use"
        );
    }

    #[test]
    fn errors_of_classic_have_its_shape() {
        let expected = json!({
            "error": "Conflict",
            "message": Condition::RequestInProgress.detail(),
            "type": "urn:oncegate:problem:request-in-progress",
            "retry": "same-key",
        });
        assert_eq!(rendered(&Profile::classic(), Condition::RequestInProgress), expected);
    }

    #[test]
    fn no_problem_type_is_used_twice() {
        let slugs: std::collections::HashSet<_> = Condition::ALL.map(Condition::slug).into();
        assert_eq!(slugs.len(), Condition::ALL.len());
    }
}
