//! Pages of other origins: answers their preflight requests, and adds the fields that let them read responses.
//!
//! A record keeps no `Access-Control-*` field of the service, because these fields belong to the request that got them. So
//! replays and refusals have none. Without the fields that are added here, a browser hides both from its page.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderValue};
use http::{Request, Response, StatusCode};

use super::body::ProxyBody;
use crate::config::{Config, Cors, asked_method};

/// The fields to write on the response to one request.
pub(super) struct CrossOrigin {
    cors: Arc<Cors>,
    origin: Option<HeaderValue>,
}

impl CrossOrigin {
    /// The fields for a request; `None` if no page of another origin may read the response, or for a [`preflight`] request.
    pub(super) fn of<B>(request: &Request<B>, config: &Config) -> Option<Self> {
        if !config.has_cors() || asked_method(request).is_some() {
            return None;
        }
        let cors = config.route(request.method(), request.uri().path()).cors.clone()?;
        Some(Self { cors, origin: request.headers().get(header::ORIGIN).cloned() })
    }

    pub(super) fn write(&self, headers: &mut HeaderMap) {
        self.cors.write(self.origin.as_ref(), headers);
    }
}

/// Answers a preflight request of an allowed origin. The service answers other ones.
///
/// # Errors
/// The response, so that the request is not passed on.
pub(super) fn preflight<B>(request: &Request<B>, config: &Config) -> Result<(), Box<Response<ProxyBody>>> {
    let Some(method) = asked_method(request).filter(|_| config.has_cors()) else { return Ok(()) };
    let route = config.route(&method, request.uri().path());
    let Some(headers) = route.cors.as_ref().and_then(|cors| cors.preflight(request)) else { return Ok(()) };
    let mut response = Response::new(ProxyBody::own(Bytes::new()));
    *response.status_mut() = StatusCode::NO_CONTENT;
    *response.headers_mut() = headers;
    Err(Box::new(response))
}
