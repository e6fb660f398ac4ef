//! The rights of pages of other origins (the CORS protocol of the Fetch standard), with header fields that are built once.

use std::time::Duration;

use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request};
use oncegate_http::Settings;

use super::units::Origin;

/// The rights of pages of other origins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cors {
    /// `None`: every origin.
    origins: Option<Vec<HeaderValue>>,
    expose: HeaderValue,
    /// `None`: the fields that a preflight request asks for.
    headers: Option<HeaderValue>,
    /// `None`: the method that a preflight request asks for.
    methods: Option<HeaderValue>,
    credentials: bool,
    max_age: HeaderValue,
}

const EMPTY: HeaderValue = HeaderValue::from_static("");
const IDEMPOTENCY_STATUS: HeaderName = HeaderName::from_static("idempotency-status");
static IDEMPOTENCY_REDACTED: HeaderName = HeaderName::from_static("idempotency-redacted");
const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

impl Cors {
    pub(crate) fn new(origins: &[Origin]) -> Self {
        let named = origins.iter().map(|origin| match origin {
            Origin::Any => None,
            Origin::Named(origin) => Some(origin.clone()),
        });
        Self {
            origins: named.collect(),
            expose: EMPTY,
            headers: None,
            methods: None,
            credentials: false,
            max_age: HeaderValue::from(0),
        }
    }

    /// Lets pages read these fields, and those of Oncegate: the key, the replay marker, the status, `Retry-After`, the fields of
    /// rate limits, and those that the profile adds.
    pub(crate) fn with_exposed(self, settings: &Settings, more: &[HeaderName]) -> Self {
        let own = [
            settings.replay_marker(),
            &IDEMPOTENCY_STATUS,
            &header::RETRY_AFTER,
            &RATE_LIMIT,
            &RATE_LIMIT_POLICY,
        ];
        let redacted = settings.redacted_members().next().map(|_| &IDEMPOTENCY_REDACTED);
        let own = settings.key_headers().iter().chain(own).chain(redacted).chain(settings.profile_headers());
        let mut names: Vec<&str> = own.chain(more).map(HeaderName::as_str).collect();
        let mut seen = Vec::new();
        names.retain(|name| {
            !seen.contains(name) && {
                seen.push(*name);
                true
            }
        });
        Self { expose: list(&names).unwrap_or(EMPTY), ..self }
    }

    pub(crate) fn with_headers(self, names: &[HeaderName]) -> Self {
        Self { headers: list(&names.iter().map(HeaderName::as_str).collect::<Vec<_>>()), ..self }
    }

    pub(crate) fn with_methods(self, methods: &[Method]) -> Self {
        Self { methods: list(&methods.iter().map(Method::as_str).collect::<Vec<_>>()), ..self }
    }

    pub(crate) fn with_credentials(self) -> Self {
        Self { credentials: true, ..self }
    }

    pub(crate) fn with_max_age(self, max_age: Duration) -> Self {
        Self { max_age: HeaderValue::from(max_age.as_secs()), ..self }
    }

    /// Adds the fields to a response that let this origin read it. An `Access-Control-Allow-Origin` of the service is kept.
    pub(crate) fn write(&self, origin: Option<&HeaderValue>, headers: &mut HeaderMap) {
        let is_decided = headers.contains_key(header::ACCESS_CONTROL_ALLOW_ORIGIN);
        if self.origins.is_some() && !is_decided {
            headers.append(header::VARY, HeaderValue::from_static("origin"));
        }
        let Some(allowed) = origin.and_then(|origin| self.allowed(origin)) else { return };
        if !is_decided {
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
            if self.credentials {
                headers.insert(header::ACCESS_CONTROL_ALLOW_CREDENTIALS, TRUE);
            }
        }
        headers.append(header::ACCESS_CONTROL_EXPOSE_HEADERS, self.expose.clone());
    }

    /// The header fields of the response to a preflight request; `None` if its origin is not allowed.
    pub(crate) fn preflight<B>(&self, request: &Request<B>) -> Option<HeaderMap> {
        let asked = request.headers();
        let allowed = self.allowed(asked.get(header::ORIGIN)?)?;
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
        if self.credentials {
            headers.insert(header::ACCESS_CONTROL_ALLOW_CREDENTIALS, TRUE);
        }
        let methods = self.methods.as_ref().or(asked.get(header::ACCESS_CONTROL_REQUEST_METHOD));
        let names = self.headers.as_ref().or(asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS));
        for (name, value) in [
            (header::ACCESS_CONTROL_ALLOW_METHODS, methods),
            (header::ACCESS_CONTROL_ALLOW_HEADERS, names),
            (header::ACCESS_CONTROL_MAX_AGE, Some(&self.max_age)),
        ] {
            if let Some(value) = value {
                headers.insert(name, value.clone());
            }
        }
        const VARY: &str = "origin, access-control-request-method, access-control-request-headers";
        headers.insert(header::VARY, HeaderValue::from_static(VARY));
        Some(headers)
    }

    /// The `Access-Control-Allow-Origin` for this origin, if it may read the response.
    fn allowed(&self, origin: &HeaderValue) -> Option<HeaderValue> {
        match &self.origins {
            None => Some(HeaderValue::from_static("*")),
            Some(origins) => origins.contains(origin).then(|| origin.clone()),
        }
    }
}

const TRUE: HeaderValue = HeaderValue::from_static("true");

fn list(names: &[&str]) -> Option<HeaderValue> {
    if names.is_empty() {
        return None;
    }
    HeaderValue::try_from(names.join(", ")).ok()
}

/// The method of a preflight request: the one that a browser asks for before it sends the request.
pub(crate) fn asked_method<B>(request: &Request<B>) -> Option<Method> {
    if request.method() != Method::OPTIONS || !request.headers().contains_key(header::ORIGIN) {
        return None;
    }
    let method = request.headers().get(header::ACCESS_CONTROL_REQUEST_METHOD)?;
    Method::from_bytes(method.as_bytes()).ok()
}
