//! Answers requests for the published rules.

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderValue};
use http::{Method, Request, Response, StatusCode};

use super::body::ProxyBody;
use crate::admin::Metrics;
use crate::config::{Config, asked_method};
use crate::rules::PublishedRules;

/// Answers a request for the rules, and the preflight of one, if they are published.
///
/// # Errors
/// The response, so that the request is not passed on.
pub(super) fn published_rules<B>(
    request: &Request<B>,
    config: &Config,
    metrics: &Metrics,
) -> Result<(), Box<Response<ProxyBody>>> {
    let Some(rules) = &config.published_rules else { return Ok(()) };
    let is_read = |method: &Method| [Method::GET, Method::HEAD].contains(method);
    let preflight = asked_method(request).filter(is_read);
    if request.uri().path() != PublishedRules::PATH || !(is_read(request.method()) || preflight.is_some()) {
        return Ok(());
    }
    let response = if preflight.is_some() {
        allow()
    } else {
        metrics.observe_published_rules();
        answer(rules, request.headers())
    };
    Err(Box::new(response))
}

fn answer(rules: &PublishedRules, asked: &HeaderMap) -> Response<ProxyBody> {
    let known = asked.get(header::IF_NONE_MATCH);
    let is_known = known.and_then(|known| known.to_str().ok()).is_some_and(|known| {
        known.split(',').map(str::trim).any(|tag| tag == "*" || tag.trim_start_matches("W/") == rules.etag)
    });
    let body = if is_known { Bytes::new() } else { rules.body.clone() };
    let mut response = Response::new(ProxyBody::own(body));
    let headers = response.headers_mut();
    headers.insert(header::ETAG, rules.etag.clone());
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("public, max-age=300"));
    // The rules are the same for all callers.
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, EVERY_ORIGIN);
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("etag"));
    if is_known {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
    } else {
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    }
    response
}

/// Lets a page of any origin ask with `If-None-Match`.
fn allow() -> Response<ProxyBody> {
    let mut response = Response::new(ProxyBody::own(Bytes::new()));
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    for (name, value) in [
        (header::ACCESS_CONTROL_ALLOW_ORIGIN, EVERY_ORIGIN),
        (header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, HEAD")),
        (header::ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static("if-none-match")),
        (header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("86400")),
    ] {
        headers.insert(name, value);
    }
    response
}

const EVERY_ORIGIN: HeaderValue = HeaderValue::from_static("*");
