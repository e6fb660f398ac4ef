//! The dashboard on the admin address: the pages for a person who looks for the state of a key.
//!
//! | page | content |
//! |---|---|
//! | `/` | [`overview`]: requests of the last hour, what is in flight, the store and its promises, warnings |
//! | `/keys` | [`keys`]: the newest records, with filters and a search |
//! | `/keys/found` | [`keys`]: the result of a search that took its time |
//! | `/keys/{record}` | [`record`]: one record, its timeline, its response on demand |
//! | `/keys/{record}/{action}` | [`change`]: a form, a preview, and then a change |
//! | `/stuck` | [`keys`]: the unsettled records, the oldest first |
//! | `/dead-letters`, `/outbox` | [`messages`]: messages that wait for an operator, if the store is on PostgreSQL |
//! | `/dead-letters/{number}`, `/outbox/{seq}` | [`messages`]: one message, its payload on demand |
//! | `…/{number}/{action}` | [`messages`]: publishes it again, or deletes it, after a preview |
//! | `/misuse` | [`misuse`]: requests that look like mistakes of clients |
//! | `/routes` | [`routes`]: the settings of each route with their sources |
//! | `/audit` | [`audit`]: changes by operators, and responses that they looked at |
//! | `/playground` | [`playground`]: sends requests to the sidecar itself |
//! | `/login`, `/logout` | [`access`]: the admin token becomes a session |
//!
//! The pages call the same functions as the JSON endpoints. They work without JavaScript; htmx only repeats a request and
//! replaces a part of the page. [`access`] controls who may see and change something. No `GET` changes anything.
//!
//! To add a page: a variant of [`Section`], a route in [`router`], a module, and a template that extends `frame.html`.

mod access;
mod assets;
mod audit;
mod change;
mod format;
mod keys;
mod messages;
mod misuse;
mod overview;
mod playground;
mod record;
mod routes;
mod session;
#[cfg(test)]
mod tests;
mod waiting;

use std::collections::VecDeque;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use askama::Template;
use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http::header::{self, HeaderName, HeaderValue};
use http::{Method, StatusCode, Uri};
use oncegate_core::{RecordId, Timestamp};
use oncegate_engine::LogThrottle;
use tokio::sync::Semaphore;

pub(crate) use self::access::PeerAddress;
use self::access::{Access, is_page_request};
use self::session::{LoginTries, Sessions, random_text};
use self::waiting::WaitNote;
use super::messages::MessageKind;
use super::problem::Problem;
use super::surveys::note_changes;
use super::{AdminState, MAX_LARGE_REQUESTS, MAX_REQUEST, MAX_SMALL_REQUEST, place_for_body};

/// The state of the dashboard. All clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Dashboard(Arc<Inner>);

struct Inner {
    sessions: Sessions,
    tries: LoginTries,
    /// Limits the warnings about refused tries, which cost an attacker nothing.
    refused_tries: LogThrottle,
    /// The form token of requests without a session; `None` without a source of random numbers.
    form_token: Option<String>,
    reveals: Mutex<VecDeque<Reveal>>,
    /// The address for requests, to which the playground sends.
    listen: SocketAddr,
    playing: Semaphore,
    /// The places of requests with large bodies, also those of the API.
    large_bodies: Arc<Semaphore>,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner").finish_non_exhaustive()
    }
}

/// The most reveals that are remembered. The log has all of them.
const MAX_REVEALS: usize = 200;

/// The interval of the warnings about refused tries.
const REFUSED_TRIES_INTERVAL: Duration = Duration::from_secs(60);

/// The most runs of the playground at a time.
const MAX_PLAYING: usize = 4;

/// A look of an operator at a stored response or at a message.
#[derive(Clone, Debug)]
struct Reveal {
    at: Timestamp,
    part: RevealedPart,
    actor: String,
    reason: String,
}

/// The subject of a look.
#[derive(Clone, Copy, Debug)]
enum RevealedPart {
    Record(RecordId),
    Message(MessageKind, u64),
}

impl Dashboard {
    /// The dashboard of a sidecar that accepts requests at this address.
    pub(crate) fn new(listen: SocketAddr) -> Self {
        Self(Arc::new(Inner {
            sessions: Sessions::default(),
            tries: LoginTries::default(),
            refused_tries: LogThrottle::new(REFUSED_TRIES_INTERVAL),
            form_token: random_text(),
            reveals: Mutex::default(),
            listen,
            playing: Semaphore::new(MAX_PLAYING),
            large_bodies: Arc::new(Semaphore::new(MAX_LARGE_REQUESTS)),
        }))
    }

    pub(super) fn large_bodies(&self) -> Arc<Semaphore> {
        self.0.large_bodies.clone()
    }

    fn add_reveal(&self, reveal: Reveal) {
        let mut reveals = self.0.reveals.lock().unwrap_or_else(PoisonError::into_inner);
        if reveals.len() == MAX_REVEALS {
            reveals.pop_back();
        }
        reveals.push_front(reveal);
    }

    /// The reveals since the start, the newest first.
    fn reveals(&self) -> Vec<Reveal> {
        self.0.reveals.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// An entry of the navigation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Section {
    Overview,
    Keys,
    Stuck,
    Messages,
    Misuse,
    Routes,
    Audit,
    Playground,
}

impl Section {
    const ALL: [Self; 8] = [
        Self::Overview,
        Self::Keys,
        Self::Stuck,
        Self::Messages,
        Self::Misuse,
        Self::Routes,
        Self::Audit,
        Self::Playground,
    ];

    const fn href(self) -> &'static str {
        match self {
            Self::Overview => "/",
            Self::Keys => "/keys",
            Self::Stuck => "/stuck",
            Self::Messages => "/dead-letters",
            Self::Misuse => "/misuse",
            Self::Routes => "/routes",
            Self::Audit => "/audit",
            Self::Playground => "/playground",
        }
    }

    const fn label(self) -> &'static str {
        match self {
            Self::Overview => "Overview",
            Self::Keys => "Keys",
            Self::Stuck => "Stuck",
            Self::Messages => "Messages",
            Self::Misuse => "Misuse",
            Self::Routes => "Routes",
            Self::Audit => "Audit",
            Self::Playground => "Playground",
        }
    }
}

/// The parts around the content of a page: navigation, title, session.
struct Frame {
    title: String,
    section: Option<Section>,
    has_navigation: bool,
    /// The unsettled records, if they were counted.
    stuck: Option<u64>,
    form_token: String,
    actor: String,
    has_session: bool,
    stylesheet: &'static str,
    script: &'static str,
    version: &'static str,
    /// The address that the browser loads after so many seconds if it has no JavaScript.
    next_load: Option<(u32, String)>,
}

impl Frame {
    fn new(state: &AdminState, access: &Access, section: Section, title: impl Into<String>) -> Self {
        let counts = state.metrics.unsettled();
        Self {
            title: title.into(),
            section: Some(section),
            has_navigation: true,
            stuck: counts.map(|counts| counts.abandoned + counts.unknown).filter(|count| *count > 0),
            form_token: access.form_token.clone(),
            actor: access.actor.clone().unwrap_or_default(),
            has_session: access.has_session,
            ..Self::bare("")
        }
    }

    /// A frame without a session, for pages that anyone may see.
    fn bare(title: impl Into<String>) -> Self {
        Self {
            title: title.into(),
            section: None,
            has_navigation: false,
            stuck: None,
            form_token: String::new(),
            actor: String::new(),
            has_session: false,
            stylesheet: assets::stylesheet_path(),
            script: assets::script_path(),
            version: env!("CARGO_PKG_VERSION"),
            next_load: None,
        }
    }

    /// The frame of a page that loads itself again if it waits.
    fn waiting(self, wait: Option<&WaitNote>) -> Self {
        match wait {
            Some(wait) => self.loads(&wait.address, 1),
            None => self,
        }
    }

    /// The frame of a page that loads this address after so many seconds.
    fn loads(self, address: &str, seconds: u32) -> Self {
        Self { next_load: Some((seconds, address.to_owned())), ..self }
    }

    fn sections(&self) -> impl Iterator<Item = NavEntry> {
        Section::ALL.into_iter().map(|section| NavEntry {
            href: section.href(),
            label: section.label(),
            is_current: self.section == Some(section),
            count: self.stuck.filter(|_| section == Section::Stuck),
        })
    }
}

struct NavEntry {
    href: &'static str,
    label: &'static str,
    is_current: bool,
    count: Option<u64>,
}

/// Renders a page.
fn page(template: &impl Template) -> Response {
    page_with(StatusCode::OK, template)
}

fn page_with(status: StatusCode, template: &impl Template) -> Response {
    match template.render() {
        Ok(text) => {
            let html = HeaderValue::from_static("text/html; charset=utf-8");
            (status, [(header::CONTENT_TYPE, html)], text).into_response()
        }
        Err(_) => Problem::internal("The page could not be written.").into_response(),
    }
}

#[derive(Template)]
#[template(path = "error.html")]
struct ErrorPage<'a> {
    frame: Frame,
    status: u16,
    title: &'a str,
    detail: &'a str,
    advice: &'a str,
    /// The address that is loaded again by itself; empty if that is of no use.
    again: &'a str,
}

/// A refusal as a page.
#[derive(Clone)]
struct PageError(Problem);

impl From<Problem> for PageError {
    fn from(problem: Problem) -> Self {
        Self(problem)
    }
}

impl IntoResponse for PageError {
    fn into_response(self) -> Response {
        let mut response = self.page("");
        response.extensions_mut().insert(self);
        response
    }
}

impl PageError {
    fn page(&self, again: &str) -> Response {
        let Self(problem) = self;
        let is_about_message = problem.slug().starts_with("message") || problem.slug() == "no-message";
        let advice = match problem.status().as_u16() {
            404 | 409 if is_about_message => {
                "Look at the list again: another operator, or a relay, may have been faster."
            }
            404 if problem.slug() == "no-messages" => "Use the commands that the message names.",
            400 => "Go back, change what the message names, and try again.",
            403 => "Open the dashboard at its own address, and try again from there.",
            404 => "Search for the key, or look at the list of the newest ones.",
            409 => "Load the page of the key again: it may have changed since you opened it.",
            429 => {
                "Wait for the time that the message names. `oncegate keys` and the API accept the token meanwhile."
            }
            503 => "Look at the overview for the state of the store, and try again.",
            _ if problem.slug() == "record-corrupt" => {
                "Look at the record in the store itself, as the page that is named above says."
            }
            _ => "Look into the log of the sidecar.",
        };
        let frame = Frame { has_navigation: true, ..Frame::bare(problem.title()) };
        let page = ErrorPage {
            frame: if again.is_empty() { frame } else { frame.loads(again, ERROR_PAUSE_SECONDS) },
            status: problem.status().as_u16(),
            title: problem.title(),
            detail: problem.detail(),
            advice,
            again,
        };
        page_with(problem.status(), &page)
    }
}

/// The time after which a page that could not be read is loaded again, in seconds.
const ERROR_PAUSE_SECONDS: u32 = 15;

/// Lets a page that could not be read load itself again, so that an open page goes on by itself when the store is back.
async fn load_again(request: Request, next: Next) -> Response {
    let again = request.method().is_safe().then(|| waiting::without_ticket(request.uri()));
    let mut response = next.run(request).await;
    let error = response.extensions_mut().remove::<PageError>();
    match (error, again) {
        (Some(error), Some(again)) if response.status() == StatusCode::SERVICE_UNAVAILABLE => {
            error.page(&again)
        }
        _ => response,
    }
}

type PageResult = Result<Response, PageError>;

/// Sends the browser to another page of the dashboard, with `GET`.
fn redirect(to: &str) -> Response {
    match HeaderValue::from_str(to) {
        Ok(to) => (StatusCode::SEE_OTHER, [(header::LOCATION, to)]).into_response(),
        Err(_) => PageError(Problem::internal("The address of the next page is invalid.")).into_response(),
    }
}

/// The content security policy: nothing but the own stylesheet, the own script, and requests and forms to this address.
const CONTENT_POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; \
     form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// Adds the fields that protect a page in a browser.
async fn harden(mut response: Response) -> Response {
    let headers = response.headers_mut();
    // With `no-referrer`, browsers would send forms with `Origin: null`.
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, CONTENT_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "same-origin"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (HeaderName::from_static("permissions-policy"), "camera=(), geolocation=(), microphone=()"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    if !headers.contains_key(header::CACHE_CONTROL) {
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    }
    response
}

/// The pages. Other paths stay with the API.
pub(super) fn router(state: &AdminState) -> Router<AdminState> {
    let guard = axum::middleware::from_fn_with_state(state.clone(), access::guard);
    let changes = axum::middleware::from_fn_with_state(state.surveys.clone(), note_changes);
    Router::new()
        .route("/", get(overview::show))
        .route("/keys", get(keys::list))
        .route("/keys/search", post(keys::search))
        .route("/keys/found", get(keys::found))
        .route("/keys/{record}", get(record::show))
        .route("/keys/{record}/response", post(record::reveal))
        .route("/keys/{record}/{action}", get(change::form).post(change::decide))
        .route("/stuck", get(keys::stuck))
        .merge(messages::router())
        .route("/misuse", get(misuse::show))
        .route("/routes", get(routes::list))
        .route("/routes/{route}", get(routes::show))
        .route("/audit", get(audit::show))
        .route("/playground", get(playground::form).post(playground::run))
        .route("/login", get(access::login_form).post(access::log_in))
        .route("/logout", post(access::log_out))
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            PageError(Problem::no_such_method(&method, uri.path()))
        })
        .layer(axum::middleware::from_fn(load_again))
        .layer(changes)
        .layer(guard)
        .layer(DefaultBodyLimit::max(MAX_REQUEST))
        .route("/assets/{name}", get(assets::send))
        .layer(axum::middleware::map_response(harden))
}

/// The response to a path that neither the API nor the dashboard has: a page for browsers, a problem for programs.
pub(super) async fn no_such_path(headers: http::HeaderMap, uri: Uri) -> Response {
    let problem = Problem::no_such_path(uri.path());
    if is_page_request(&headers) {
        return harden(PageError(problem).into_response()).await;
    }
    problem.into_response()
}
