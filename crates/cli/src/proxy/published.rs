//! Answers requests for the published rules.

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::{Method, Request, Response, StatusCode};

use super::body::ProxyBody;
use crate::config::Config;
use crate::rules::PublishedRules;

/// Answers a request for the rules, if they are published.
///
/// # Errors
/// The response, so that the request is not passed on.
pub(super) fn published_rules<B>(
    request: &Request<B>,
    config: &Config,
) -> Result<(), Box<Response<ProxyBody>>> {
    let Some(rules) = &config.published_rules else { return Ok(()) };
    let is_read = [Method::GET, Method::HEAD].contains(request.method());
    if !is_read || request.uri().path() != PublishedRules::PATH {
        return Ok(());
    }
    let known = request.headers().get(header::IF_NONE_MATCH);
    let is_known = known.and_then(|known| known.to_str().ok()).is_some_and(|known| {
        known.split(',').map(str::trim).any(|tag| tag == "*" || tag.trim_start_matches("W/") == rules.etag)
    });
    // Of a HEAD, the server sends no body.
    let body = if is_known { Bytes::new() } else { rules.body.clone() };
    let mut response = Response::new(ProxyBody::own(body));
    let headers = response.headers_mut();
    headers.insert(header::ETAG, rules.etag.clone());
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("public, max-age=300"));
    // The rules are the same for all callers.
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    if is_known {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
    } else {
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    }
    Err(Box::new(response))
}
