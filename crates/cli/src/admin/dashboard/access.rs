//! Access control of the dashboard: the same rules as for the API, for browsers.
//!
//! | admin token | reading a page | sending a form |
//! |---|---|---|
//! | none | `Host` names this machine | and the form has the form token of this process |
//! | set | a session, or `Authorization: Bearer` (a proxy may add it) | and the form has the form token of the session |
//!
//! A form must also come from a page of this address: browsers say so in `Origin` or `Sec-Fetch-Site`. So a page of another site
//! can cause no change (CSRF), can read nothing under a name of its own (DNS rebinding), and cannot log an operator in.
//!
//! The login takes the admin token in a form and answers with a cookie, which holds the random identifier of a session
//! ([`session`](super::session)). No token is in a cookie or in an address. If the login page came over TLS, the cookie has the
//! prefix `__Host-`, so that browsers never send it without TLS.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use askama::Template;
use axum::body::{Body, to_bytes};
use axum::extract::{Extension, Form, FromRequest as _, Query, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use http::header::{self, HeaderMap, HeaderValue};
use http::{Method, StatusCode};
use subtle::ConstantTimeEq as _;

use super::session::{SESSION_LIFE, Session, SessionOrigin};
use super::{Frame, MAX_REQUEST, MAX_SMALL_REQUEST, PageError, page_with, place_for_body, redirect};
use crate::admin::keys::{AuditTexts, Pairs};
use crate::admin::problem::Problem;
use crate::admin::{AdminState, guard};
use crate::config::AdminToken;
use crate::log::OPERATOR;

const PLAIN_COOKIE: &str = "oncegate-session";
const SECURE_COOKIE: &str = "__Host-oncegate-session";

/// The largest form of a login, and the longest time for it. It is read before anything is known about its sender, and slow
/// senders must not use up the connections of the admin address.
const MAX_LOGIN: usize = 16 * 1024;
const LOGIN_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest time for any other form.
const FORM_TIMEOUT: Duration = Duration::from_secs(60);

const LOGIN: &str = "/login";

/// The address of the client of an admin connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerAddress(pub(crate) IpAddr);

/// The rights of a request that passed the guard.
#[derive(Clone)]
pub(super) struct Access {
    /// Forms on the page must send it back.
    pub(super) form_token: String,
    /// The name that the operator gave at the login.
    pub(super) actor: Option<String>,
    pub(super) has_session: bool,
    session: Option<Session>,
}

/// The fields of a form that passed the guard.
#[derive(Clone, Debug, Default)]
pub(super) struct FormFields(Vec<(String, String)>);

impl FormFields {
    /// The value of a field, or an empty text.
    pub(super) fn get(&self, name: &str) -> &str {
        self.0.iter().find(|(own, _)| own == name).map_or("", |(_, value)| value)
    }

    /// The values of all fields with this name.
    pub(super) fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(own, _)| own == name).map(|(_, value)| value.as_str())
    }

    /// The operator and the reason that the form gives.
    pub(super) fn audit(&self) -> Result<AuditTexts, Problem> {
        let actor = Some(self.get("actor").trim()).filter(|actor| !actor.is_empty());
        AuditTexts::read(actor, self.get("reason"), &HeaderMap::new())
    }
}

/// Returns true if the client prefers a page: a browser that navigates. Programs ask for JSON, or for anything.
pub(super) fn is_page_request(headers: &HeaderMap) -> bool {
    let accept = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    accept
        .split(',')
        .any(|range| range.trim().get(..9).is_some_and(|range| range.eq_ignore_ascii_case("text/html")))
}

/// Passes a request for a page on, or refuses it.
pub(super) async fn guard(State(state): State<AdminState>, request: Request, next: Next) -> Response {
    match admit(&state, request).await {
        Ok(request) => next.run(request).await,
        Err(response) => response,
    }
}

async fn admit(state: &AdminState, request: Request) -> Result<Request, Response> {
    let token = state.live.borrow().token.clone();
    let refused = |problem: Problem| refusal(request.headers(), problem);
    let is_login = request.uri().path() == LOGIN;
    if token.is_none() {
        guard::check_host(request.headers()).map_err(refused)?;
    }
    if request.method().is_safe() {
        guard::check_page_origin(request.headers()).map_err(refused)?;
    } else {
        check_form_origin(request.headers()).map_err(refused)?;
    }
    let access = match &token {
        None => Some(Access::of_anyone(state)),
        Some(token) => Access::of(state, token, request.headers()),
    };
    if is_login {
        let mut request = read_form(state, request, None).await?;
        if let Some(access) = access {
            request.extensions_mut().insert(access);
        }
        return Ok(request);
    }
    let Some(access) = access else { return Err(to_login(&request)) };
    let mut request = read_form(state, request, Some(&access.form_token)).await?;
    request.extensions_mut().insert(access);
    Ok(request)
}

impl Access {
    /// The access of every request if there is no admin token.
    fn of_anyone(state: &AdminState) -> Self {
        let form_token = state.dashboard.0.form_token.clone().unwrap_or_default();
        Self { form_token, actor: None, has_session: false, session: None }
    }

    fn of(state: &AdminState, token: &AdminToken, headers: &HeaderMap) -> Option<Self> {
        if headers.contains_key(header::AUTHORIZATION) {
            // A proxy that adds the token may know the operator, too.
            let actor = headers.get("oncegate-actor").and_then(|actor| actor.to_str().ok());
            let access = Self { actor: actor.map(str::to_owned), ..Self::of_anyone(state) };
            return guard::check_token(token, headers).is_ok().then_some(access);
        }
        let session = session(state, token, headers)?;
        Some(Self {
            form_token: session.form_token.clone(),
            actor: session.actor.clone(),
            has_session: true,
            session: Some(session),
        })
    }
}

/// The valid session that a cookie of the request names.
fn session(state: &AdminState, token: &AdminToken, headers: &HeaderMap) -> Option<Session> {
    let host = headers.get(header::HOST)?.to_str().ok()?;
    let fields = headers.get_all(header::COOKIE).iter().filter_map(|field| field.to_str().ok());
    let pairs = fields.flat_map(|field| field.split(';')).filter_map(|pair| pair.trim().split_once('='));
    // Other services on this host may have set a cookie of the same name.
    let is_secure = |name: &str| match name {
        SECURE_COOKIE => Some(true),
        PLAIN_COOKIE => Some(false),
        _ => None,
    };
    pairs.take(100).find_map(|(name, value)| {
        let origin = SessionOrigin { host, is_secure: is_secure(name)? };
        state.dashboard.0.sessions.find(value, origin, token, Instant::now())
    })
}

/// Refuses a form that no browser sent from a page of this address.
fn check_form_origin(headers: &HeaderMap) -> Result<(), Problem> {
    guard::check_origin(headers)?;
    if headers.contains_key(header::ORIGIN) || headers.contains_key("sec-fetch-site") {
        return Ok(());
    }
    Err(Problem::forbidden("The request has no Origin. Programs use the API: see /v1/keys."))
}

/// Returns true for the forms with a response for retries, and with a request to send.
fn may_be_large(path: &str) -> bool {
    path == "/playground" || path.starts_with("/keys/") && path.ends_with("/resolve")
}

/// Reads the fields of a form. With a form token, they must contain it.
async fn read_form(
    state: &AdminState,
    request: Request,
    form_token: Option<&str>,
) -> Result<Request, Response> {
    if request.method().is_safe() {
        return Ok(request);
    }
    let (mut parts, body) = request.into_parts();
    let refused = |problem| refusal(&parts.headers, problem);
    let (max, timeout) = match form_token {
        Some(_) if may_be_large(parts.uri.path()) => (MAX_REQUEST, FORM_TIMEOUT),
        Some(_) => (MAX_SMALL_REQUEST, FORM_TIMEOUT),
        None => (MAX_LOGIN, LOGIN_TIMEOUT),
    };
    if max == MAX_REQUEST {
        // It is free when the request has ended.
        let place = place_for_body(state, &parts.headers).map_err(refused)?;
        parts.extensions.insert(Arc::new(place));
    }
    let body = match tokio::time::timeout(timeout, to_bytes(body, max)).await {
        Ok(Ok(body)) => body,
        Ok(Err(_)) => return Err(refused(Problem::too_large(format!("At most {max} bytes are accepted.")))),
        Err(_) => {
            let seconds = timeout.as_secs();
            return Err(refused(Problem::bad_request(format!(
                "The form did not arrive in {seconds} seconds."
            ))));
        }
    };
    let copy = Request::from_parts(parts.clone(), Body::from(body));
    let Form(fields) = Form::<Vec<(String, String)>>::from_request(copy, &())
        .await
        .map_err(|error| refused(Problem::bad_request(format!("The form: {error}."))))?;
    let fields = FormFields(fields);
    if let Some(form_token) = form_token {
        let is_right: bool = fields.get("form_token").as_bytes().ct_eq(form_token.as_bytes()).into();
        if form_token.is_empty() || !is_right {
            return Err(refused(Problem::forbidden(
                "The form is from an earlier session, or from another site. Load the page again, and send it once more.",
            )));
        }
    }
    parts.extensions.insert(fields);
    Ok(Request::from_parts(parts, Body::empty()))
}

fn refusal(headers: &HeaderMap, problem: Problem) -> Response {
    if is_page_request(headers) { PageError(problem).into_response() } else { problem.into_response() }
}

/// Sends a browser to the login, and refuses other clients as the API does.
fn to_login(request: &Request) -> Response {
    let headers = request.headers();
    // htmx would put the login into a part of the page. This makes it load the whole page again.
    if headers.contains_key("hx-request") {
        let refresh = [("hx-refresh", HeaderValue::from_static("true"))];
        return (StatusCode::UNAUTHORIZED, refresh).into_response();
    }
    if !is_page_request(headers) {
        let detail = "Send the token in the field Authorization: Bearer TOKEN, or open /login in a browser.";
        return Problem::unauthorized(detail).into_response();
    }
    let next = request.uri().path_and_query().map_or("/", |path| path.as_str());
    let next = if *request.method() == Method::GET { safe_next(next) } else { "/" };
    redirect(&format!("{LOGIN}?next={}", super::format::query_text(next)))
}

/// The page to continue with after the login: one of this address, or else the overview.
fn safe_next(next: &str) -> &str {
    let is_own = next.starts_with('/')
        && !next.starts_with("//")
        && !next.starts_with("/log")
        && next.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\');
    if is_own { next } else { "/" }
}

#[derive(Template)]
#[template(path = "login.html")]
struct LoginPage<'a> {
    frame: Frame,
    next: &'a str,
    actor: &'a str,
    error: &'a str,
}

pub(super) async fn login_form(
    State(state): State<AdminState>,
    access: Option<Extension<Access>>,
    query: Pairs,
) -> Response {
    let next = query.ok().and_then(|Query(pairs)| pairs.into_iter().find(|(name, _)| name == "next"));
    let next = next.map_or_else(|| "/".to_owned(), |(_, next)| safe_next(&next).to_owned());
    let needs_none = state.live.borrow().token.is_none();
    if needs_none || access.is_some_and(|Extension(access)| access.has_session) {
        return redirect(&next);
    }
    login_page(StatusCode::OK, &next, "", "")
}

fn login_page(status: StatusCode, next: &str, actor: &str, error: &str) -> Response {
    page_with(status, &LoginPage { frame: Frame::bare("Log in"), next, actor, error })
}

pub(super) async fn log_in(
    State(state): State<AdminState>,
    peer: Option<Extension<PeerAddress>>,
    headers: HeaderMap,
    Extension(fields): Extension<FormFields>,
) -> Response {
    let next = safe_next(fields.get("next"));
    let actor = fields.get("actor").trim();
    let Some(token) = state.live.borrow().token.clone() else { return redirect(next) };
    let address = peer.map_or(IpAddr::from([0, 0, 0, 0]), |Extension(PeerAddress(address))| address);
    // In constant time, so that the time tells nothing about the token.
    let is_right: bool = fields.get("token").trim().as_bytes().ct_eq(token.as_bytes()).into();
    // The right token is always accepted: behind a proxy all clients have one address, and wrong tokens must not lock operators
    // out.
    if !is_right && let Err(wait) = state.dashboard.0.tries.begin(address, Instant::now()) {
        let seconds = wait.as_secs() + 1;
        if let Some(suppressed) = state.dashboard.0.refused_tries.pass() {
            tracing::warn!(target: OPERATOR, client = %address, suppressed, "too many attempts to log in to the dashboard");
        }
        let error = format!(
            "The token is wrong, and there were too many attempts. The right token is accepted at any time; this answer lasts for {seconds} seconds."
        );
        let mut response = login_page(StatusCode::TOO_MANY_REQUESTS, next, actor, &error);
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        return response;
    }
    if !is_right {
        tracing::warn!(target: OPERATOR, client = %address, "a wrong token was sent to the login of the dashboard");
        let error = "The token is wrong. It is in the file of admin-token-file, or in ONCEGATE_ADMIN_TOKEN.";
        return login_page(StatusCode::UNAUTHORIZED, next, actor, error);
    }
    let actor_text = match actor {
        "" => None,
        text => match oncegate_engine::audit_text(text) {
            Ok(text) => Some(text.to_owned()),
            Err(error) => {
                let error = format!("Your name: {error}.");
                return login_page(StatusCode::BAD_REQUEST, next, "", &error);
            }
        },
    };
    state.dashboard.0.tries.succeed(address);
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    // The browser says how the page was loaded; a proxy may have removed the TLS.
    let is_secure =
        headers.get(header::ORIGIN).is_some_and(|origin| origin.as_bytes().starts_with(b"https:"));
    let origin = SessionOrigin { host, is_secure };
    let begun = state.dashboard.0.sessions.begin(&token, origin, actor_text, Instant::now());
    let Some(cookie) = begun else {
        return PageError(Problem::internal("The system has no random numbers.")).into_response();
    };
    tracing::info!(target: OPERATOR, client = %address, actor, "an operator logged in to the dashboard");
    let life = SESSION_LIFE.as_secs();
    with_cookie(redirect(next), is_secure, &cookie, life)
}

fn with_cookie(mut response: Response, is_secure: bool, value: &str, life: u64) -> Response {
    let (name, secure) = if is_secure { (SECURE_COOKIE, "; Secure") } else { (PLAIN_COOKIE, "") };
    let cookie = format!("{name}={value}; Path=/; HttpOnly; SameSite=Strict; Max-Age={life}{secure}");
    match HeaderValue::from_str(&cookie) {
        Ok(mut cookie) => {
            cookie.set_sensitive(true);
            response.headers_mut().append(header::SET_COOKIE, cookie);
            response
        }
        Err(_) => PageError(Problem::internal("The cookie is invalid.")).into_response(),
    }
}

pub(super) async fn log_out(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
) -> Response {
    if let Some(session) = &access.session {
        state.dashboard.0.sessions.end(session);
    }
    // Only what was deleted under both names is gone for sure.
    let response = with_cookie(redirect(LOGIN), false, "", 0);
    with_cookie(response, true, "", 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_page_is_one_of_this_address() {
        for next in ["/", "/keys?state=unknown", "/keys/4f0c"] {
            assert_eq!(safe_next(next), next);
        }
        for next in [
            "", "//evil.example", "/\\evil.example", "https://evil.example", "javascript:alert(1)", "/login",
            "/logout", "/a\r\nSet-Cookie: a=b", "keys", "/keys\u{e4}",
        ] {
            assert_eq!(safe_next(next), "/", "{next:?}");
        }
    }

    #[test]
    fn only_browsers_that_navigate_get_pages() {
        for (accept, is_page) in [
            ("text/html,application/xhtml+xml,*/*;q=0.8", true),
            ("application/json, text/html;q=0.1", true),
            ("*/*", false),
            ("application/json", false),
            ("", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::ACCEPT, HeaderValue::from_str(accept).unwrap());
            assert_eq!(is_page_request(&headers), is_page, "{accept}");
        }
    }
}
