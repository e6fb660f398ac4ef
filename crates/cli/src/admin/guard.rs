//! Access control of the admin API.
//!
//! Without a token only this machine can reach it, and every program on this machine can, browsers included. So pages of
//! other sites must be refused. Such a page can use a host name of its own that it points at this machine (DNS rebinding,
//! which the `Host` field shows), or a form or a fetch that a browser sends without asking (which its media type, `Origin` and
//! `Sec-Fetch-Site` show).

use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::Method;
use http::header::{self, HeaderMap};
use http::uri::Authority;
use http_body::Frame;
use subtle::ConstantTimeEq as _;

use tokio::sync::watch;

use super::AdminLive;
use super::problem::Problem;
use crate::config::AdminToken;

/// Passes a request on, or refuses it.
pub(super) async fn guard(
    State(live): State<watch::Receiver<AdminLive>>,
    request: Request,
    next: Next,
) -> Response {
    let (token, metrics_token) = {
        let live = live.borrow();
        (live.token.clone(), live.metrics_token.clone())
    };
    let is_open = matches!(request.uri().path(), "/livez" | "/readyz");
    let is_api = request.uri().path().starts_with("/v1/");
    let (method, headers) = (request.method(), request.headers());
    // Only reading, and only this path: not one below it, and no other spelling of it.
    let is_metrics = method.is_safe() && request.uri().path() == "/metrics";
    let is_reader = is_metrics && metrics_token.is_some_and(|token| check_token(&token, headers).is_ok());
    let needed = token.as_ref().filter(|_| !is_open && !is_reader);
    match check(needed, token.is_some(), is_api, method, headers) {
        Ok(()) if is_open => next.run(request).await,
        Ok(()) => while_token_holds(live, token, next.run(request).await),
        Err(problem) => problem.into_response(),
    }
}

/// Ends a response that goes on, such as the live feed, as soon as the admin token is another one than that of its request.
fn while_token_holds(
    mut live: watch::Receiver<AdminLive>,
    token: Option<AdminToken>,
    response: Response,
) -> Response {
    response.map(|body| {
        // A response that is ready as a whole has nothing left to end.
        if body.size_hint().exact().is_some() {
            return body;
        }
        let revoked = async move { drop(live.wait_for(|live| live.token != token).await) };
        Body::new(RevocableBody { body, revoked: Box::pin(revoked) })
    })
}

struct RevocableBody {
    body: Body,
    revoked: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl HttpBody for RevocableBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.revoked.as_mut().poll(cx).is_ready() {
            // An error, so that no reader takes the part for the whole.
            return Poll::Ready(Some(Err(axum::Error::new("the admin token was replaced"))));
        }
        Pin::new(&mut self.body).poll_frame(cx)
    }
}

fn check(
    token: Option<&AdminToken>,
    has_token: bool,
    is_api: bool,
    method: &Method,
    headers: &HeaderMap,
) -> Result<(), Problem> {
    if let Some(token) = token {
        check_token(token, headers)?;
    }
    if !has_token {
        check_host(headers)?;
    }
    // Some answers are expensive or take one of few places, so another site's page must not cause them either.
    if !method.is_safe() || is_api {
        check_origin(headers)?;
    }
    // Only these change something. Other methods are refused by their paths.
    if [Method::POST, Method::PUT].contains(method) {
        check_media_type(headers)?;
    }
    Ok(())
}

pub(super) fn check_token(token: &AdminToken, headers: &HeaderMap) -> Result<(), Problem> {
    let detail = "Send the token in the field Authorization: Bearer TOKEN.";
    let shown = headers.get(header::AUTHORIZATION).ok_or_else(|| Problem::unauthorized(detail))?;
    let (scheme, shown) =
        shown.as_bytes().split_at_checked(7).ok_or_else(|| Problem::unauthorized(detail))?;
    // In constant time, so that the time tells nothing about the token.
    let is_right: bool = shown.trim_ascii().ct_eq(token.as_bytes()).into();
    if scheme.eq_ignore_ascii_case(b"Bearer ") && is_right {
        Ok(())
    } else {
        Err(Problem::unauthorized(detail))
    }
}

pub(super) fn check_host(headers: &HeaderMap) -> Result<(), Problem> {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let host: Option<Authority> = host.and_then(|host| host.parse().ok());
    if host.is_some_and(|host| is_loopback_name(host.host())) {
        return Ok(());
    }
    Err(Problem::forbidden("The field Host must name this machine: localhost, 127.0.0.1 or [::1]."))
}

fn is_loopback_name(host: &str) -> bool {
    let ip = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    host.eq_ignore_ascii_case("localhost") || ip.is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// Refuses a request for a page that another site's page made, unless the operator followed a link: a page in a frame, an
/// image or a script makes this program read its store for that site.
pub(super) fn check_page_origin(headers: &HeaderMap) -> Result<(), Problem> {
    let is = |name: &str, value: &[u8]| headers.get(name).is_some_and(|field| field.as_bytes() == value);
    let is_followed_link = is("sec-fetch-mode", b"navigate") && is("sec-fetch-dest", b"document");
    if is_from_elsewhere(headers) && !is_followed_link {
        return Err(Problem::forbidden("A page of another site must not read anything here."));
    }
    Ok(())
}

/// Returns true if a browser says that a page of another site made the request.
fn is_from_elsewhere(headers: &HeaderMap) -> bool {
    let site = headers.get("sec-fetch-site");
    site.is_some_and(|site| !matches!(site.as_bytes(), b"same-origin" | b"none"))
}

pub(super) fn check_origin(headers: &HeaderMap) -> Result<(), Problem> {
    let origin_is_other = headers.get(header::ORIGIN).is_some_and(|origin| {
        let host = headers.get(header::HOST).map(|host| host.as_bytes());
        let origin = origin.as_bytes();
        let origin = origin.strip_prefix(b"http://").or(origin.strip_prefix(b"https://"));
        origin.is_none() || origin != host
    });
    if is_from_elsewhere(headers) || origin_is_other {
        return Err(Problem::forbidden("A page of another site must not change anything here."));
    }
    Ok(())
}

fn check_media_type(headers: &HeaderMap) -> Result<(), Problem> {
    let media_type = headers.get(header::CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    let media_type = media_type.split(|b| *b == b';').next().unwrap_or_default().trim_ascii();
    if media_type.eq_ignore_ascii_case(b"application/json") { Ok(()) } else { Err(Problem::media_type()) }
}
