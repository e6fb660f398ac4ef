//! The header fields that a record keeps.

use http::HeaderMap;
use http::header::{self, HeaderName, HeaderValue};
use oncegate_engine::ConfigError;

use crate::redaction::REDACTED;

/// Fields that are kept by default: they describe the response, and not its time or its connection.
const KEPT: [HeaderName; 16] = [
    header::CONTENT_TYPE,
    header::CONTENT_ENCODING,
    header::CONTENT_LANGUAGE,
    header::CONTENT_DISPOSITION,
    header::CONTENT_LOCATION,
    header::LOCATION,
    header::ETAG,
    header::LAST_MODIFIED,
    header::LINK,
    header::CACHE_CONTROL,
    // Without `Vary` a cache would serve the response to other clients; without `Content-Range` a part would look complete.
    header::VARY,
    header::CONTENT_RANGE,
    HeaderName::from_static("accept-patch"),
    HeaderName::from_static("preference-applied"),
    HeaderName::from_static("deprecation"),
    HeaderName::from_static("sunset"),
];

/// Fields that are never kept, even if they are configured: hop-by-hop (RFC 9110, 7.6.1), recomputed, secret, or temporary.
const NEVER: [&str; 39] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "content-length",
    "date",
    "age",
    "expires",
    "set-cookie",
    "set-cookie2",
    "authorization",
    "www-authenticate",
    "authentication-info",
    "authentication-control",
    "optional-www-authenticate",
    "proxy-authenticate",
    "proxy-authentication-info",
    "proxy-authorization",
    "clear-site-data",
    "strict-transport-security",
    "alt-svc",
    "via",
    "server",
    "traceparent",
    "tracestate",
    "baggage",
    "b3",
    "x-request-id",
    "request-id",
    "x-correlation-id",
    "x-trace-id",
    "server-timing",
    "retry-after",
    "idempotency-key",
    "idempotency-store",
    "idempotency-status",
];

/// Fields in which clouds, networks and tracers name the request or the trace of a response. Never kept: a replay would point
/// support staff and dashboards to the first request.
const REQUEST_IDS: &[&str] = &[
    "traceresponse",
    "grpc-trace-bin",
    "uber-trace-id",
    "sentry-trace",
    "newrelic",
    "elastic-apm-traceparent",
    "x-ot-span-context",
    "x-cloud-trace-context",
    "x-guploader-uploadid",
    "x-amzn-trace-id",
    "x-amzn-requestid",
    "x-amzn-request-id",
    "x-amz-request-id",
    "x-amz-id-2",
    "x-amz-apigw-id",
    "apigw-requestid",
    "x-ms-request-id",
    "x-ms-client-request-id",
    "x-ms-correlation-request-id",
    "x-ms-routing-request-id",
    "x-msedge-ref",
    "x-azure-ref",
    "request-context",
    "x-correlationid",
    "correlation-id",
    "x-oss-request-id",
    "eagleeye-traceid",
    "cf-ray",
    "cf-request-id",
    "fly-request-id",
    "x-vercel-id",
    "x-nf-request-id",
    "x-akamai-request-id",
    "x-served-by",
    "x-timer",
    "x-github-request-id",
    "x-gitlab-meta",
    "paypal-debug-id",
    "x-shopify-request-id",
    "x-runtime",
];

/// Prefixes of fields that are never kept.
const NEVER_PREFIXES: [&str; 10] = [
    "access-control-", "oncegate-", "ratelimit", "x-ratelimit-", "x-b3-", "x-datadog-", "x-instana-",
    "x-envoy-", "x-amz-cf-", "x-newrelic-",
];

/// The fields that a record keeps.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeptHeaders {
    more: Vec<HeaderName>,
}

impl KeptHeaders {
    /// Keeps this field as well.
    pub(crate) fn add(&mut self, name: HeaderName) -> Result<(), ConfigError> {
        if is_never_kept(&name) {
            return Err(ConfigError::new(format!("the header field {name} must not be stored and replayed")));
        }
        self.more.push(name);
        Ok(())
    }

    /// Keeps these fields as well, which the layer adds itself.
    pub(crate) fn with_own<'a>(mut self, names: impl Iterator<Item = &'a HeaderName>) -> Self {
        self.more.extend(names.cloned());
        self
    }

    /// Returns true if fields of this name are kept.
    pub(crate) fn keeps(&self, name: &HeaderName) -> bool {
        KEPT.contains(name) || self.more.contains(name)
    }

    /// The fields of a response that are kept, in their order.
    pub(crate) fn of<'a>(&'a self, headers: &'a HeaderMap) -> Vec<(&'a str, &'a [u8])> {
        headers
            .iter()
            .filter(move |(name, _)| self.keeps(name) && !is_nominated(headers, name))
            .map(|(name, value)| (name.as_str(), value.as_bytes()))
            .collect()
    }
}

/// The trailer fields of a response that are kept: all that may be.
pub(crate) fn kept_trailers(trailers: Option<&HeaderMap>) -> Vec<(&str, &[u8])> {
    trailers
        .into_iter()
        .flatten()
        .filter(|(name, _)| !is_never_kept(name) && name.as_str() != REDACTED)
        .map(|(name, value)| (name.as_str(), value.as_bytes()))
        .collect()
}

/// Reads kept fields back, without invalid ones and those that are never kept: a service that completes its record itself may
/// have put any field there, such as a length that is not that of the body.
pub(crate) fn restore<'a>(fields: impl Iterator<Item = (&'a str, &'a [u8])>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        if let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_bytes(value))
            // Nearly all fields are of the first list, which takes a tenth of the time to search.
            && (KEPT.contains(&name) || !is_never_kept(&name))
        {
            headers.append(name, value);
        }
    }
    headers
}

/// Returns true if the layer uses this response field for another purpose.
pub(crate) fn is_reserved(name: &HeaderName) -> bool {
    KEPT.contains(name) || is_never_kept(name)
}

fn is_never_kept(name: &HeaderName) -> bool {
    let name = name.as_str();
    NEVER.contains(&name)
        || REQUEST_IDS.contains(&name)
        || NEVER_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Returns true if a `Connection` field names this field as hop-by-hop.
fn is_nominated(headers: &HeaderMap, name: &HeaderName) -> bool {
    headers.get_all(header::CONNECTION).iter().any(|value| {
        value
            .as_bytes()
            .split(|b| *b == b',')
            .any(|token| token.trim_ascii().eq_ignore_ascii_case(name.as_str().as_bytes()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_only_fields_of_the_response() {
        let mut headers = HeaderMap::new();
        for name in ["content-type", "location", "etag", "link", "x-order"] {
            headers.insert(HeaderName::from_static(name), HeaderValue::from_static("v"));
        }
        for name in NEVER.iter().copied().chain([
            "access-control-allow-origin",
            "oncegate-record",
            "ratelimit-limit",
            "x-other",
        ]) {
            headers.insert(HeaderName::from_static(name), HeaderValue::from_static("v"));
        }
        headers.append("link", HeaderValue::from_static("second"));
        let mut kept = KeptHeaders::default();
        kept.add(HeaderName::from_static("x-order")).unwrap();
        let mut names: Vec<_> = kept.of(&headers).into_iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        assert_eq!(names, ["content-type", "etag", "link", "link", "location", "x-order"]);
    }

    #[test]
    fn no_field_is_both_kept_and_never_kept() {
        assert!(!KEPT.iter().any(is_never_kept));
    }

    #[test]
    fn a_field_that_connection_names_is_hop_by_hop() {
        let mut headers = HeaderMap::new();
        headers.insert("etag", HeaderValue::from_static("v"));
        headers.insert("connection", HeaderValue::from_static("close, ETag"));
        assert_eq!(KeptHeaders::default().of(&headers), []);
    }

    #[test]
    fn fields_that_are_never_kept_cannot_be_configured() {
        let by_prefix =
            ["x-datadog-trace-id", "x-amz-cf-id", "x-envoy-upstream-service-time", "x-b3-traceid"];
        for name in NEVER.iter().chain(REQUEST_IDS).chain(&by_prefix) {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            let error = KeptHeaders::default().add(name.clone()).unwrap_err();
            assert!(error.to_string().contains(name.as_str()));
        }
    }
}
