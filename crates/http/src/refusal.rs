//! Responses of the layer itself: refusals, with the reason and with advice for the client.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{self, HeaderName, HeaderValue};
use http::{Response, StatusCode};
use oncegate_core::RecordId;

use crate::grpc::{GrpcCode, GrpcForm};
use crate::profile::{Profile, RefusalText};
use crate::service::IDEMPOTENCY_STATUS;
use crate::settings::Settings;

/// The next step for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RetryAdvice {
    /// Send the same request with the same key again, later.
    SameKey,
    /// Take a new key: this is another request.
    NewKey,
    /// Correct the request first.
    FixRequest,
    /// Do not send it again: find out what happened first.
    Stop,
    /// The request had no key: sending it again may take effect twice.
    Unprotected,
}

impl RetryAdvice {
    /// The word in the member `retry`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::SameKey => "same-key",
            Self::NewKey => "new-key",
            Self::FixRequest => "fix-request",
            Self::Stop => "stop",
            Self::Unprotected => "unprotected",
        }
    }

    /// The advice for an agent, in terms of calls of tools.
    pub(crate) fn for_agents(self, retry_after: Option<u64>) -> String {
        match (self, retry_after) {
            (Self::SameKey, Some(seconds)) => {
                let unit = if seconds == 1 { "second" } else { "seconds" };
                format!("Make the same call again, unchanged, in {seconds} {unit}: it takes effect at most once.")
            }
            (Self::SameKey, None) => {
                "Make the same call again, unchanged: it takes effect at most once.".to_owned()
            }
            (Self::NewKey, _) => {
                "If another operation is meant, call the tool with a new key; otherwise make the first call again, unchanged."
                    .to_owned()
            }
            (Self::FixRequest, _) => "Correct the call before you make it again.".to_owned(),
            (Self::Stop | Self::Unprotected, _) => "Do not make this call again, not with a new key and not in other words, before you \
                 know what happened: look it up with another tool, or ask the person for whom you work."
                .to_owned(),
        }
    }
}

/// Declares every condition with its values.
macro_rules! conditions {
    ($(
        $(#[doc = $doc:literal])+
        $condition:ident: $slug:literal, $status:ident, $retry:ident, $grpc:ident, $title:literal, $detail:literal;
    )+) => {
        /// The reason why the layer responds instead of the handler.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Condition {
            $($(#[doc = $doc])+ $condition,)+
        }

        impl Condition {
            /// Every condition, in the order of the reference page.
            pub const ALL: [Self; [$($slug),+].len()] = [$(Self::$condition),+];

            /// The name in problem types, metrics and documents.
            #[must_use]
            pub const fn slug(self) -> &'static str {
                match self { $(Self::$condition => $slug,)+ }
            }

            /// The title, the same at every occurrence (RFC 9457, 3.1.3). Three of them are those of draft-07, to the letter.
            #[must_use]
            pub const fn title(self) -> &'static str {
                match self { $(Self::$condition => $title,)+ }
            }

            /// The meaning of the condition for this caller now.
            #[must_use]
            pub const fn detail(self) -> &'static str {
                match self { $(Self::$condition => $detail,)+ }
            }

            /// The next step for the caller.
            #[must_use]
            pub const fn retry(self) -> RetryAdvice {
                match self { $(Self::$condition => RetryAdvice::$retry,)+ }
            }

            /// The status in the profile `ietf`.
            #[must_use]
            pub const fn status(self) -> StatusCode {
                match self { $(Self::$condition => StatusCode::$status,)+ }
            }

            /// The gRPC status of a call that is refused for this reason, chosen by the reaction of common clients.
            /// `ALREADY_EXISTS` is not used: clients read it as "my earlier try succeeded", which is wrong for a key that another
            /// call used, and for a response that was not kept.
            #[must_use]
            pub const fn grpc_code(self) -> GrpcCode {
                match self { $(Self::$condition => GrpcCode::$grpc,)+ }
            }
        }
    };
}

// Each condition: its slug, its HTTP status, the advice, its gRPC status, its title, its detail. The status 409 is only for
// requests in progress, because common clients retry a 409 by themselves.
conditions! {
    /// A key is required and there is none.
    KeyMissing: "key-missing", BAD_REQUEST, FixRequest, InvalidArgument,
        "Idempotency-Key is missing",
        "This operation requires a key in {place}. Make one per intent, such as a UUID, and send it with every retry.";

    /// The key is malformed.
    KeyInvalid: "key-invalid", BAD_REQUEST, FixRequest, InvalidArgument,
        "Idempotency-Key is invalid",
        "The key is malformed.";

    /// The request was sent first so long ago that its key may have been forgotten.
    KeyExpired: "key-expired", PRECONDITION_FAILED, Stop, FailedPrecondition,
        "The request is too old for its Idempotency-Key",
        "Nothing was executed now. The request was sent first so long ago that its key may have been forgotten, so it may have taken effect then. Find out what happened before you send a new request.";

    /// The request has a key, and requests with its method are not covered.
    KeyUnsupported: "key-unsupported", NOT_IMPLEMENTED, FixRequest, Unimplemented,
        "The operation does not support an Idempotency-Key",
        "Nothing was executed. Requests with this method are not protected by a key; send it without a key if it may take effect twice.";

    /// The body is larger than can be fingerprinted.
    RequestTooLarge: "request-too-large", PAYLOAD_TOO_LARGE, FixRequest, InvalidArgument,
        "The request is too large to be protected by an Idempotency-Key",
        "Nothing was executed. Send a smaller body.";

    /// The request's body ended early.
    RequestIncomplete: "request-incomplete", BAD_REQUEST, SameKey, Unavailable,
        "The request ended before its body was complete",
        "Nothing was executed. Send the request again.";

    /// The memory for requests or responses is used up, or too many requests are in flight.
    Overloaded: "overloaded", SERVICE_UNAVAILABLE, SameKey, Unavailable,
        "The service is at its limit at the moment",
        "Nothing was executed: a limit of the server is reached at the moment. Send the same request with the same key later.";

    /// A rate limit is exceeded.
    RateLimited: "rate-limited", TOO_MANY_REQUESTS, SameKey, ResourceExhausted,
        "Too many requests",
        "Nothing was executed for this request: a rate limit is exceeded. Send the same request with the same key later.";

    /// The request does not identify its caller, or does so twice.
    ScopeUnavailable: "scope-unavailable", BAD_REQUEST, FixRequest, InvalidArgument,
        "The request does not identify its caller",
        "The request lacks the field that identifies its caller, or has it twice. Nothing was executed for this request.";

    /// The keys that verify the caller's token are not available.
    VerificationUnavailable: "verification-unavailable", SERVICE_UNAVAILABLE, SameKey, Unavailable,
        "The caller of the request cannot be verified at the moment",
        "Nothing was executed for this request: the keys that verify tokens are not available. Send the same request with the same key later.";

    /// The request has a credential, and it is not configured that callers are told apart by it.
    ScopeNotSet: "scope-not-set", BAD_REQUEST, FixRequest, InvalidArgument,
        "The service is not configured to tell the callers of this request apart",
        "The request has a credential, and the service is not configured to tell callers apart by it. Nothing was executed for this request.";

    /// The store could not be asked.
    StoreUnavailable: "store-unavailable", SERVICE_UNAVAILABLE, SameKey, Unavailable,
        "The store of the Idempotency-Keys is not available at the moment",
        "Nothing was executed. Send the same request with the same key later.";

    /// The key was used for another request.
    KeyReused: "key-reused", UNPROCESSABLE_ENTITY, NewKey, FailedPrecondition,
        "Idempotency-Key is already used",
        "The key was used for a different request: another body, query or other part. Nothing was executed. Send a new request with a new key.";

    /// The key was used for the same request to another host.
    HostDiffers: "host-differs", UNPROCESSABLE_ENTITY, Stop, FailedPrecondition,
        "The request with this Idempotency-Key was sent to another host",
        "The key was used for the same request to another host (the name or port in Host). It may have taken effect there, and nothing was executed here. Send it again to the host that it was sent to first. With a new key it may take effect twice.";

    /// Another request with this key is in progress.
    RequestInProgress: "request-in-progress", CONFLICT, SameKey, Aborted,
        "A request is outstanding for this Idempotency-Key",
        "The first request with this key is still being processed. Send it again with the same key later to get its response.";

    /// The request was processed, but its response cannot be replayed.
    ReplayUnavailable: "replay-unavailable", UNPROCESSABLE_ENTITY, Stop, Unknown,
        "The request was completed, but its response cannot be given again",
        "The first request with this key was processed and is not processed again. Its response was too large, was streamed, was lost, or must not be kept.";

    /// The request was processed, and the service does not let this caller have its response.
    ReplayDenied: "replay-denied", FORBIDDEN, Stop, Unknown,
        "The request was completed, and its response is not given to this caller",
        "The first request with this key was processed and is not processed again. The service did not allow this caller to get its response: send the same request with the same key and with credentials that are valid now.";

    /// The request was processed, and the service could not be asked if this caller may have its response.
    AuthorizationUnavailable: "authorization-unavailable", SERVICE_UNAVAILABLE, SameKey, Aborted,
        "The request was completed, and its response cannot be given at the moment",
        "The first request with this key was processed and is not processed again. The service could not be asked if this caller may get its response. Send the same request with the same key later to get it.";

    /// The request was processed, and its response is not available yet.
    ResponseAwaited: "response-awaited", SERVICE_UNAVAILABLE, SameKey, Aborted,
        "The request was completed, and its response is not available yet",
        "The first request with this key was processed and is not processed again. Its response is not available at the moment. Send the same request with the same key later to get it.";

    /// The request was processed, and its response is sealed with a key that is missing.
    ResponseSealed: "response-sealed", SERVICE_UNAVAILABLE, SameKey, Aborted,
        "The request was completed, and its response cannot be opened at the moment",
        "The first request with this key was processed and is not processed again. Its response is stored in encrypted form, and the key to it is missing. Send the same request with the same key later to get it.";

    /// The outcome is unknown: the operation may have taken place.
    OutcomeUnknown: "outcome-unknown", INTERNAL_SERVER_ERROR, Stop, Unknown,
        "It is not known whether the request took effect",
        "It is not known how the first request with this key ended. It may have taken effect, so it is not processed again. Find out what happened before you send a new request.";

    /// The record cannot be read.
    RecordCorrupt: "record-corrupt", INTERNAL_SERVER_ERROR, Stop, DataLoss,
        "The record of this Idempotency-Key cannot be read",
        "Nothing was executed for this request. An earlier request with this key may have taken effect: its record cannot be read, and the operator of the service has to look at it. With a new key it may take effect twice.";

    /// The handler ended without a response, and the key is free again.
    HandlerFailed: "handler-failed", INTERNAL_SERVER_ERROR, SameKey, Unavailable,
        "The service failed without a response",
        "The service did not complete the request. The key is free to be used again for it.";

    /// A proxy did not reach its service, and nothing was sent.
    UpstreamUnreachable: "upstream-unreachable", BAD_GATEWAY, SameKey, Unavailable,
        "The service is unreachable",
        "The request did not reach the service. Send it again, with the same key if it has one.";

    /// A proxy sent a request without a key to its service and got no whole response. With a key it is
    /// [`OutcomeUnknown`](Self::OutcomeUnknown) or [`HandlerFailed`](Self::HandlerFailed).
    UpstreamUnanswered: "upstream-unanswered", BAD_GATEWAY, Unprotected, Unknown,
        "The service gave no response",
        "The request was sent to the service, and no complete response came back. It may have taken effect.";

    /// The head of the service's response has too many lines or too many bytes for the proxy.
    UpstreamHeadTooLarge: "upstream-head-too-large", BAD_GATEWAY, Stop, Unknown,
        "The head of the service's response is too large",
        "The request was processed. The head of the service's response has more than 1000 field lines or more than 128 KiB, so that it cannot be passed on.";

    /// The service's response has a transfer coding that the proxy cannot undo.
    UpstreamUnsupported: "upstream-unsupported", BAD_GATEWAY, Stop, Unknown,
        "The service's response is in a form that this proxy does not pass on",
        "The request was processed. The service's response has a transfer coding other than chunked, so that it cannot be passed on.";

    /// The request is malformed, so that no proxy may pass it on.
    RequestMalformed: "request-malformed", BAD_REQUEST, FixRequest, InvalidArgument,
        "The request is malformed",
        "Nothing was executed. The request cannot be passed on.";

    /// The head of the request has too many lines or too many bytes.
    RequestHeadTooLarge: "request-head-too-large", REQUEST_HEADER_FIELDS_TOO_LARGE, FixRequest, InvalidArgument,
        "The head of the request is too large",
        "Nothing was executed. The head of the request has more than 1000 field lines or more than 128 KiB.";

    /// The request asks for something that the proxy does not support.
    RequestUnsupported: "request-unsupported", NOT_IMPLEMENTED, FixRequest, Unimplemented,
        "The request asks for something that this proxy does not do",
        "Nothing was executed.";
}

impl Condition {
    /// Returns true if the request itself is refused, for what is wrong with it or because it is too old. Then no earlier request
    /// of the same content has taken effect within the retention.
    pub(crate) const fn rejects(self) -> bool {
        matches!(
            self,
            Self::KeyMissing
                | Self::KeyInvalid
                | Self::KeyExpired
                | Self::KeyUnsupported
                | Self::KeyReused
                | Self::RequestTooLarge
                | Self::RequestMalformed
                | Self::RequestHeadTooLarge
                | Self::RequestUnsupported
        )
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.slug())
    }
}

/// A response of the layer itself, or of a proxy around it. Also in the extensions of the response, for layers outside.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// The reason.
    pub condition: Condition,
    detail: Option<Box<str>>,
    retry_after: Option<u64>,
    status: Option<StatusCode>,
    record: Option<RecordId>,
    /// The header field that the detail is about, if it is not the one of the key.
    subject: Option<Box<HeaderName>>,
    /// The value of `WWW-Authenticate` in a 401.
    challenge: Option<&'static str>,
    /// The JSON-RPC `id` of the call that is refused, as JSON.
    message_id: Option<Arc<str>>,
}

impl Refusal {
    /// A refusal for this condition, with its usual status and detail.
    #[must_use]
    pub const fn new(condition: Condition) -> Self {
        Self {
            condition,
            detail: None,
            retry_after: None,
            status: None,
            record: None,
            subject: None,
            challenge: None,
            message_id: None,
        }
    }

    /// Replaces the detail of the condition by one for this caller and request.
    #[must_use]
    pub fn with_detail(self, detail: impl fmt::Display) -> Self {
        Self { detail: Some(detail.to_string().into()), ..self }
    }

    /// Adds a `Retry-After` of this many seconds.
    #[must_use]
    pub fn with_retry_after(self, seconds: u64) -> Self {
        Self { retry_after: Some(seconds), ..self }
    }

    /// Replaces the status of the condition, if there is another one: a proxy uses 502 and 504.
    #[must_use]
    pub fn with_status(self, status: Option<StatusCode>) -> Self {
        Self { status, ..self }
    }

    /// Adds the record that the refusal is about, so that an operator finds it by the response of the client.
    pub(crate) fn with_record(self, record: Option<RecordId>) -> Self {
        Self { record, ..self }
    }

    /// Names the call that is refused, so that the refusal can be the response to it.
    pub(crate) fn with_message_id(self, message_id: Arc<str>) -> Self {
        Self { message_id: Some(message_id), ..self }
    }

    /// Begins the detail with the name of this header field, which is not the one of the key.
    pub(crate) fn about(self, subject: HeaderName) -> Self {
        Self { subject: Some(Box::new(subject)), ..self }
    }

    /// Replaces the `WWW-Authenticate` of a 401.
    #[cfg(feature = "jwt")]
    pub(crate) fn with_challenge(self, challenge: Option<&'static str>) -> Self {
        Self { challenge, ..self }
    }

    /// The response: in the shape of the profile of these settings, or as a gRPC status for a [gRPC call](GrpcForm::of). In every
    /// shape, the field `Idempotency-Status` names the condition and the next step.
    #[must_use]
    pub fn into_response(self, settings: &Settings, grpc: Option<GrpcForm>) -> Response<Bytes> {
        let (condition, profile) = (self.condition, &settings.profile);
        let status = self.status.unwrap_or_else(|| profile.refusal_status(condition));
        let detail = match (&self.detail, condition) {
            (Some(detail), _) if self.subject.is_some() => {
                format!("{} {detail}.", self.subject.as_deref().map(shown).unwrap_or_default())
            }
            (Some(detail), Condition::KeyInvalid) => {
                let names: Vec<_> = key_places(profile).into_iter().map(|(_, name)| name).collect();
                format!("{}: {detail}.", names.join(" or "))
            }
            (Some(detail), _) => detail.to_string(),
            (None, Condition::KeyMissing) => {
                let places: Vec<_> = key_places(profile)
                    .into_iter()
                    .map(|(kind, name)| format!("the {kind} {name}"))
                    .collect();
                condition.detail().replace("{place}", &places.join(" or "))
            }
            (None, _) => condition.detail().to_owned(),
        };
        let mut response = match grpc {
            None => self.problem(settings, status, &detail),
            Some(form) => {
                let code = match status {
                    StatusCode::UNAUTHORIZED => GrpcCode::Unauthenticated,
                    _ => condition.grpc_code(),
                };
                form.refusal(code, condition.slug(), &detail, condition.retry(), self.retry_after)
            }
        };
        let headers = response.headers_mut();
        if status == StatusCode::UNAUTHORIZED {
            // RFC 9110, 11.6.1: a 401 names a scheme. The layer does not know the scheme of the service; this is the usual one.
            headers.insert(
                header::WWW_AUTHENTICATE,
                HeaderValue::from_static(self.challenge.unwrap_or("Bearer")),
            );
        }
        if status == StatusCode::METHOD_NOT_ALLOWED {
            // RFC 9110, 15.5.6. Only the end of a session is refused so.
            headers.insert(header::ALLOW, HeaderValue::from_static("GET, POST"));
        }
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        profile.mark_refusal(headers, condition);
        let status = format!("refused; problem={}; retry={}", condition.slug(), condition.retry().as_str());
        if let Ok(status) = HeaderValue::try_from(status) {
            headers.insert(IDEMPOTENCY_STATUS, status);
        }
        response.extensions_mut().insert(self);
        response
    }

    fn problem(&self, settings: &Settings, status: StatusCode, detail: &str) -> Response<Bytes> {
        let profile = &settings.profile;
        // A client of MCP signs in when it gets a 401, whatever the body.
        let message_id = self.message_id.as_deref().filter(|_| status != StatusCode::UNAUTHORIZED);
        let (body, is_message) = profile.refusal_body(&RefusalText {
            condition: self.condition,
            status,
            detail,
            record: self.record,
            retry_after: self.retry_after,
            message_id,
        });
        let mut response = Response::new(Bytes::from(body));
        *response.status_mut() = if is_message { StatusCode::OK } else { status };
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, profile.refusal_type().clone());
        headers.insert(header::CONTENT_LANGUAGE, HeaderValue::from_static("en"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(link) = &settings.documentation {
            headers.insert(header::LINK, link.clone());
        }
        response
    }
}

/// The places that may carry the key: the kind of each, and its name.
fn key_places(profile: &Profile) -> Vec<(&'static str, String)> {
    let fields = profile.key_headers.iter().map(|name| ("header field", shown(name)));
    let parameter = profile.key_query.iter().map(|name| ("parameter", name.clone()));
    let members = profile.key_members.iter().map(|member| ("member", member.pointer.to_string()));
    fields.chain(parameter).chain(members).collect()
}

/// The name of a header field as people write it, `Idempotency-Key`.
pub(crate) fn shown(name: &HeaderName) -> String {
    let mut starts_word = true;
    let capitalised = name.as_str().chars().map(|letter| {
        let letter = if starts_word { letter.to_ascii_uppercase() } else { letter };
        starts_word = letter == '-';
        letter
    });
    capitalised.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_named_as_people_write_it() {
        assert_eq!(shown(&HeaderName::from_static("idempotency-key")), "Idempotency-Key");
        assert_eq!(shown(&HeaderName::from_static("x-id")), "X-Id");
    }
}
