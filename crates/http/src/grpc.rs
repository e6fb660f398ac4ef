//! Refusals for gRPC clients, which read the gRPC status and neither the HTTP status nor a body.

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use http::{Response, StatusCode};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

use crate::refusal::RetryAdvice;

/// The gRPC status codes that refusals have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u16)]
pub enum GrpcCode {
    /// The outcome of the call is unknown: it may have taken effect.
    Unknown = 2,
    /// The call has to be corrected.
    InvalidArgument = 3,
    /// A rate limit is exceeded: try again later.
    ResourceExhausted = 8,
    /// The key belongs to another call.
    FailedPrecondition = 9,
    /// Another request holds the key: try again.
    Aborted = 10,
    /// The call asks for something that is not supported.
    Unimplemented = 12,
    /// Nothing took effect: try again later.
    Unavailable = 14,
    /// A record cannot be read.
    DataLoss = 15,
    /// The call has no credential.
    Unauthenticated = 16,
}

/// The form of a refusal for a gRPC client: a response without a body that has the status of the call among its
/// header fields ("trailers-only" in gRPC over HTTP/2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrpcForm(&'static str);

impl GrpcForm {
    /// The form for a request with these fields; `None` if it is not a gRPC call.
    #[must_use]
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        const PREFIX: &[u8] = b"application/grpc";
        let (start, rest) = headers.get(CONTENT_TYPE)?.as_bytes().split_at_checked(PREFIX.len())?;
        if !start.eq_ignore_ascii_case(PREFIX) {
            return None;
        }
        // Clients of gRPC-Web expect the media type of their request.
        let starts = |text: &str| {
            rest.get(..text.len()).is_some_and(|start| start.eq_ignore_ascii_case(text.as_bytes()))
        };
        if starts("-web-text") {
            Some(Self("application/grpc-web-text"))
        } else if starts("-web") {
            Some(Self("application/grpc-web"))
        } else {
            Some(Self("application/grpc"))
        }
    }

    /// The response: this status, and a message with the type and the detail of the problem. `retry` is the advice for the
    /// client, and `retry_after` the seconds until it should try again.
    #[must_use]
    pub fn refusal(
        self,
        code: GrpcCode,
        slug: &str,
        detail: &str,
        retry: RetryAdvice,
        retry_after: Option<u64>,
    ) -> Response<Bytes> {
        let mut response = Response::new(Bytes::new());
        *response.status_mut() = StatusCode::OK;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(self.0));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        headers.insert(GRPC_STATUS, HeaderValue::from(code as u16));
        if let Ok(message) = HeaderValue::try_from(message(slug, detail)) {
            headers.insert(GRPC_MESSAGE, message);
        }
        match retry_after {
            Some(seconds) if retry == RetryAdvice::SameKey => {
                headers.insert(PUSHBACK, HeaderValue::from(seconds.saturating_mul(1000)));
            }
            // The client chooses the time.
            None if retry == RetryAdvice::SameKey => {}
            _ => {
                headers.insert(PUSHBACK, HeaderValue::from_static("-1"));
            }
        }
        response
    }
}

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// gRFC A6: the milliseconds after which to send the call again. A negative number means never.
const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");

/// The text of `grpc-message`. gRPC over HTTP/2 percent-encodes all but visible ASCII and spaces, and the percent sign.
fn message(slug: &str, detail: &str) -> String {
    const ENCODED: &AsciiSet = &CONTROLS.add(b'%');
    let text = format!("{}{slug}: {detail}", crate::profile::PROBLEM_TYPES);
    utf8_percent_encode(&text, ENCODED).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_known_by_their_media_type() {
        for (content_type, expected) in [
            ("application/grpc", Some("application/grpc")),
            ("application/grpc+proto", Some("application/grpc")),
            ("Application/GRPC; charset=utf-8", Some("application/grpc")),
            ("application/grpc-web", Some("application/grpc-web")),
            ("application/grpc-web+proto", Some("application/grpc-web")),
            ("application/grpc-Web-Text+proto", Some("application/grpc-web-text")),
            ("application/json", None),
            ("application/grp", None),
            ("", None),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
            assert_eq!(GrpcForm::of(&headers).map(|form| form.0), expected, "{content_type}");
        }
        assert_eq!(GrpcForm::of(&HeaderMap::new()), None);
    }

    #[test]
    fn a_message_is_percent_encoded() {
        assert_eq!(message("a", "50 % ü\n~"), "urn:oncegate:problem:a: 50 %25 %C3%BC%0A~");
    }

    #[test]
    fn a_refusal_tells_whether_and_when_to_retry() {
        let of = |retry, after| {
            let form = GrpcForm("application/grpc");
            let response = form.refusal(GrpcCode::Unknown, "a", "b", retry, after);
            response.headers().get(PUSHBACK).map(|value| value.to_str().unwrap().to_owned())
        };
        assert_eq!(of(RetryAdvice::SameKey, Some(2)).as_deref(), Some("2000"));
        assert_eq!(of(RetryAdvice::SameKey, None), None);
        for retry in [RetryAdvice::NewKey, RetryAdvice::FixRequest, RetryAdvice::Stop] {
            assert_eq!(of(retry, None).as_deref(), Some("-1"));
        }
    }
}
