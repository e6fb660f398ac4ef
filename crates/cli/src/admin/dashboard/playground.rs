//! The playground: sends requests to the sidecar itself, as a client would, to show what happens to retries.
//!
//! The requests are real: the service executes them as it executes those of clients. They go to the address for requests of this
//! sidecar and nowhere else.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use askama::Template;
use axum::extract::{Extension, State};
use axum::response::Response;
use bytes::Bytes;
use http::header::{self, HeaderName, HeaderValue};
use http::{Method, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use oncegate_core::ErrorChain;
use tokio::net::TcpStream;

use super::access::{Access, FormFields};
use super::change::header_lines;
use super::session::random_text;
use super::{Frame, PageResult, Section, page_with};
use crate::admin::AdminState;
use crate::admin::problem::Problem;
use crate::log::OPERATOR;

/// Limits the time for one request.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The most bytes of a body that is sent, and of a response that is read.
const MAX_BODY: usize = 256 * 1024;
const MAX_RESPONSE: usize = 1024 * 1024;

/// The most bytes of a response that are shown.
const MAX_SHOWN: usize = 4096;

/// The retries after a lost reply, while the first request still runs.
const MAX_RETRIES: usize = 10;
const RETRY_PAUSE: Duration = Duration::from_millis(300);

/// The sequences of requests that can be tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scenario {
    /// The same request, one time after the other.
    Twice,
    /// The same request at the same time, on two connections.
    AtOnce,
    /// The reply to the first request is lost, and the client retries.
    LostReply,
    /// The second request has the same key and another body.
    OtherBody,
    /// One request.
    Once,
}

impl Scenario {
    const ALL: [Self; 5] = [Self::Twice, Self::AtOnce, Self::LostReply, Self::OtherBody, Self::Once];

    const fn slug(self) -> &'static str {
        match self {
            Self::Twice => "twice",
            Self::AtOnce => "at-once",
            Self::LostReply => "lost-reply",
            Self::OtherBody => "other-body",
            Self::Once => "once",
        }
    }

    const fn label(self) -> &'static str {
        match self {
            Self::Twice => "Send it twice",
            Self::AtOnce => "Send it twice at once",
            Self::LostReply => "Cut the reply, then retry",
            Self::OtherBody => "Send it, then another body with the same key",
            Self::Once => "Send it once",
        }
    }
}

/// A request as the form describes it.
struct PlayRequest {
    method: Method,
    path: String,
    headers: Vec<(HeaderName, HeaderValue)>,
    body: String,
}

/// One request and its result.
struct Exchange {
    number: usize,
    title: &'static str,
    status: Option<u16>,
    /// The status in words of the protocol: `Idempotency-Status`, or the mark of a replay.
    outcome: String,
    fields: Vec<(String, String)>,
    body: String,
    is_cut: bool,
    took: String,
    error: String,
}

#[derive(Template)]
#[template(path = "playground.html")]
struct PlaygroundPage {
    frame: Frame,
    /// The reason why nothing can be sent.
    refusal: &'static str,
    target: String,
    methods: Vec<(&'static str, bool)>,
    scenarios: Vec<(&'static str, &'static str, bool)>,
    path: String,
    headers: String,
    body: String,
    /// The routes that only observe.
    shadow_routes: Vec<String>,
    exchanges: Vec<Exchange>,
    conclusion: &'static str,
    error: String,
}

/// The values of the form.
struct Entered {
    method: String,
    path: String,
    headers: String,
    body: String,
    scenario: Scenario,
}

impl Entered {
    fn first() -> Self {
        let key = random_text().and_then(|text| text.get(..12).map(str::to_owned)).unwrap_or_default();
        Self {
            method: "POST".to_owned(),
            path: "/payments".to_owned(),
            headers: format!("Idempotency-Key: \"play-{key}\"\nContent-Type: application/json"),
            body: "{\"amount\": 100}".to_owned(),
            scenario: Scenario::Twice,
        }
    }

    fn read(fields: &FormFields) -> Self {
        let text = |name| fields.get(name).replace("\r\n", "\n");
        let scenario = Scenario::ALL.into_iter().find(|scenario| scenario.slug() == fields.get("scenario"));
        Self {
            method: text("method"),
            path: text("path").trim().to_owned(),
            headers: text("headers"),
            body: text("body"),
            scenario: scenario.unwrap_or(Scenario::Twice),
        }
    }

    fn request(&self) -> Result<PlayRequest, Problem> {
        let bad = |what: String| Problem::bad_request(what);
        let method =
            self.method.parse().map_err(|_| bad(format!("method: {:?} is not a method.", self.method)))?;
        let is_path = self.path.starts_with('/') && self.path.parse::<http::uri::PathAndQuery>().is_ok();
        if !is_path {
            return Err(bad(format!("path: {:?} is not a path such as /payments.", self.path)));
        }
        if self.body.len() > MAX_BODY {
            return Err(Problem::too_large(format!("At most {MAX_BODY} bytes of a body are sent.")));
        }
        let headers = header_lines(&self.headers)?.into_iter().map(|(name, value)| {
            let is_own = ["content-length", "transfer-encoding", "connection"]
                .iter()
                .any(|own| name.eq_ignore_ascii_case(own));
            if is_own {
                return Err(bad(format!("headers: the playground sets {name} itself; leave it out.")));
            }
            let field = name.parse::<HeaderName>().ok().zip(HeaderValue::from_str(&value).ok());
            field.ok_or_else(|| {
                bad(format!(
                    "headers: {name:?} is not the name of a field, or its value has a control character."
                ))
            })
        });
        Ok(PlayRequest {
            method,
            path: self.path.clone(),
            headers: headers.collect::<Result<_, _>>()?,
            body: self.body.clone(),
        })
    }
}

/// The address of this machine under which the sidecar accepts requests.
fn target(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

/// The reason why this sidecar has no playground, or an empty text.
fn refusal(state: &AdminState) -> &'static str {
    let live = state.live.borrow();
    if !live.config.has_playground() {
        return "The playground sends requests to the service. It is switched off, because other machines can reach this address, or by the \
                setting `playground`. Set `playground = \"on\"` to allow it.";
    }
    if live.config.tls.is_some() {
        return "The address for requests speaks TLS, and the playground does not. Use curl or `oncegate call` with the certificate's name.";
    }
    ""
}

/// The routes that only observe: their patterns, and in words the requests without a route.
fn shadow_routes(state: &AdminState) -> Vec<String> {
    let live = state.live.borrow();
    let routes = live.config.routes.iter().filter(|route| route.config.settings.is_shadow());
    let mut shown: Vec<_> = routes.map(|route| route.pattern.as_str().to_owned()).collect();
    if live.config.default.settings.is_shadow() {
        let rest = if live.config.routes.is_empty() { "all requests" } else { "all other requests" };
        shown.push(rest.to_owned());
    }
    shown
}

/// Returns true if the route of the request only observes.
fn is_observed(state: &AdminState, request: &PlayRequest) -> bool {
    let live = state.live.borrow();
    let path = request.path.split('?').next().unwrap_or_default();
    let route =
        live.config.route_number(&request.method, path).and_then(|number| live.config.routes.get(number));
    route.map_or(&live.config.default, |route| &route.config).settings.is_shadow()
}

/// The results of a sequence of requests.
struct Played {
    exchanges: Vec<Exchange>,
    /// True if the route of the requests only observes.
    is_observed: bool,
}

fn render(
    state: &AdminState,
    access: &Access,
    entered: &Entered,
    (played, status, error): (Option<Played>, StatusCode, String),
) -> Response {
    let methods = ["POST", "PUT", "PATCH", "DELETE", "GET"].map(|method| (method, method == entered.method));
    let scenarios =
        Scenario::ALL.map(|scenario| (scenario.slug(), scenario.label(), scenario == entered.scenario));
    let page = PlaygroundPage {
        frame: Frame::new(state, access, Section::Playground, "Playground"),
        refusal: refusal(state),
        target: target(state.dashboard.0.listen).to_string(),
        methods: methods.into(),
        scenarios: scenarios.into(),
        path: entered.path.clone(),
        headers: entered.headers.clone(),
        body: entered.body.clone(),
        shadow_routes: shadow_routes(state),
        conclusion: played.as_ref().map_or("", |played| conclusion(entered.scenario, played)),
        exchanges: played.map_or_else(Vec::new, |played| played.exchanges),
        error,
    };
    page_with(status, &page)
}

pub(super) async fn form(State(state): State<AdminState>, Extension(access): Extension<Access>) -> Response {
    render(&state, &access, &Entered::first(), (None, StatusCode::OK, String::new()))
}

pub(super) async fn run(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    Extension(fields): Extension<FormFields>,
) -> PageResult {
    let why = refusal(&state);
    if !why.is_empty() {
        return Err(Problem::switched_off(why).into());
    }
    let Ok(_running) = state.dashboard.0.playing.try_acquire() else {
        return Err(Problem::busy("Other operators use the playground. Try again in a moment.").into());
    };
    let entered = Entered::read(&fields);
    let request = match entered.request() {
        Ok(request) => request,
        Err(problem) => {
            let result = (None, problem.status(), problem.detail().to_owned());
            return Ok(render(&state, &access, &entered, result));
        }
    };
    tracing::info!(target: OPERATOR, scenario = entered.scenario.slug(), "an operator sends requests from the playground");
    let is_observed = is_observed(&state, &request);
    let mut exchanges = play(target(state.dashboard.0.listen), entered.scenario, &request).await;
    for (place, exchange) in exchanges.iter_mut().enumerate() {
        exchange.number = place + 1;
    }
    let played = Some(Played { exchanges, is_observed });
    Ok(render(&state, &access, &entered, (played, StatusCode::OK, String::new())))
}

async fn play(target: SocketAddr, scenario: Scenario, request: &PlayRequest) -> Vec<Exchange> {
    let send = |title, body: String| exchange(target, request, title, body, false);
    let body = || request.body.clone();
    match scenario {
        Scenario::Once => vec![send("The request", body()).await],
        Scenario::Twice => {
            vec![send("The request", body()).await, send("The same request again", body()).await]
        }
        Scenario::OtherBody => {
            let other = other_body(&request.body);
            vec![send("The request", body()).await, send("Another body with the same key", other).await]
        }
        Scenario::AtOnce => {
            let (one, other) =
                tokio::join!(send("On one connection", body()), send("At the same time on another", body()));
            vec![one, other]
        }
        Scenario::LostReply => {
            let mut exchanges = vec![
                exchange(target, request, "The request, whose reply is thrown away", body(), true).await,
            ];
            for _ in 0..MAX_RETRIES {
                let retry = send("The retry", body()).await;
                let is_over = retry.status != Some(StatusCode::CONFLICT.as_u16());
                exchanges.push(retry);
                if is_over {
                    break;
                }
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            exchanges
        }
    }
}

/// A body that differs from this one also by its meaning.
fn other_body(body: &str) -> String {
    match serde_json::from_str::<serde_json::Value>(body) {
        Ok(serde_json::Value::Object(mut members)) => {
            members.insert("playground".to_owned(), "another body".into());
            serde_json::Value::Object(members).to_string()
        }
        _ => format!("{body}another body"),
    }
}

/// Sends one request on a connection of its own. With `is_cut` the connection is closed when the reply begins.
async fn exchange(
    target: SocketAddr,
    request: &PlayRequest,
    title: &'static str,
    body: String,
    is_cut: bool,
) -> Exchange {
    let began = Instant::now();
    let received = match tokio::time::timeout(TIMEOUT, receive(target, request, body, is_cut)).await {
        Ok(received) => received,
        Err(_) => Err(format!("no response within {} seconds", TIMEOUT.as_secs())),
    };
    let took = format!("{:.1} ms", began.elapsed().as_secs_f64() * 1000.0);
    let empty = Exchange {
        number: 0,
        title,
        status: None,
        outcome: String::new(),
        fields: Vec::new(),
        body: String::new(),
        is_cut,
        took,
        error: String::new(),
    };
    match received {
        Err(error) => Exchange { error, ..empty },
        Ok(_) if is_cut => Exchange { outcome: "the client saw a broken connection".to_owned(), ..empty },
        Ok(reply) => Exchange {
            status: Some(reply.status.as_u16()),
            outcome: reply.outcome(),
            fields: reply.fields,
            body: reply.body,
            ..empty
        },
    }
}

struct Reply {
    status: StatusCode,
    fields: Vec<(String, String)>,
    body: String,
}

impl Reply {
    /// The sidecar's word about the request, if it says one.
    fn outcome(&self) -> String {
        let field = |wanted: &str| {
            self.fields.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.as_str())
        };
        if let Some(status) = field("idempotency-status") {
            return status.to_owned();
        }
        let is_marker = |(name, value): &&(String, String)| name.contains("replay") && value == "true";
        if self.fields.iter().any(|field| is_marker(&field)) { "replayed".to_owned() } else { String::new() }
    }
}

async fn receive(
    target: SocketAddr,
    request: &PlayRequest,
    body: String,
    is_cut: bool,
) -> Result<Reply, String> {
    let stream =
        TcpStream::connect(target).await.map_err(|error| format!("cannot connect to {target}: {error}"))?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| ErrorChain(&error).to_string())?;
    let driver = tokio::spawn(connection);
    let result = async {
        let mut built = http::Request::builder().method(request.method.clone()).uri(&request.path);
        if !request.headers.iter().any(|(name, _)| name == header::HOST) {
            built = built.header(header::HOST, target.to_string());
        }
        for (name, value) in &request.headers {
            built = built.header(name, value);
        }
        let built = built.body(Full::new(Bytes::from(body))).map_err(|error| error.to_string())?;
        let response = sender.send_request(built).await.map_err(|error| ErrorChain(&error).to_string())?;
        let (parts, body) = response.into_parts();
        if is_cut {
            return Ok(Reply { status: parts.status, fields: Vec::new(), body: String::new() });
        }
        let fields = parts.headers.iter().map(|(name, value)| {
            (name.as_str().to_owned(), String::from_utf8_lossy(value.as_bytes()).into_owned())
        });
        let fields = fields.collect();
        let body = match Limited::new(body, MAX_RESPONSE).collect().await {
            Ok(body) => shown(&body.to_bytes()),
            Err(_) => format!("the body broke off, or has more than {MAX_RESPONSE} bytes"),
        };
        Ok(Reply { status: parts.status, fields, body })
    }
    .await;
    driver.abort();
    result
}

/// The beginning of a body.
fn shown(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let end = text.floor_char_boundary(MAX_SHOWN);
    match text.get(..end) {
        Some(start) if start.len() < text.len() => format!("{start}…"),
        _ => text.into_owned(),
    }
}

/// The meaning of the results.
fn conclusion(scenario: Scenario, played: &Played) -> &'static str {
    let exchanges = played.exchanges.as_slice();
    let is_replayed = exchanges.last().is_some_and(|last| last.outcome == "replayed");
    let is_refused = |exchange: &Exchange| exchange.outcome.starts_with("refused;");
    let is_running = |exchange: &&Exchange| exchange.outcome.contains("problem=request-in-progress");
    match scenario {
        _ if exchanges.is_empty() => "",
        _ if exchanges.iter().any(|exchange| !exchange.error.is_empty()) => {
            "A request failed. Look at the message, and at the overview for the state of the sidecar."
        }
        _ if played.is_observed && !exchanges.iter().any(is_refused) => {
            "The route of this request only observes (shadow = true): each of these requests went to the service, and it executed them all. \
             What protection would have done with them is in `oncegate tap` and in oncegate_shadow_requests_total."
        }
        Scenario::LostReply if is_replayed => {
            "The first reply was lost, and the retry got the stored response: the service executed once."
        }
        Scenario::Twice | Scenario::AtOnce
            if exchanges.iter().any(|exchange| exchange.outcome == "replayed") =>
        {
            "One request executed, and the other one got its stored response."
        }
        Scenario::OtherBody if exchanges.last().is_some_and(|last| last.outcome.contains("key-reused")) => {
            "The second request was refused: its key belongs to the first one."
        }
        // Both may be refused, but then not because the other one runs.
        _ if exchanges.iter().filter(is_running).count() == 1 && exchanges.len() > 1 => {
            "One request was refused because the other one was still running. Sent again later, it gets the stored response."
        }
        _ if exchanges.iter().any(is_refused) => {
            "A request was refused, for the reason in Idempotency-Status and in its body. The body says what to do."
        }
        Scenario::Once => "Send it again with the same key to see a replay.",
        _ => {
            "No replay was seen. Is the method covered, does the request have a key, and did the service give a final response? See Routes."
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_go_to_this_machine() {
        for (listen, to) in [
            ("0.0.0.0:8080", "127.0.0.1:8080"),
            ("[::]:8080", "[::1]:8080"),
            ("127.0.0.1:1", "127.0.0.1:1"),
            ("192.0.2.1:80", "192.0.2.1:80"),
        ] {
            assert_eq!(target(listen.parse().unwrap()), to.parse().unwrap());
        }
    }

    #[test]
    fn a_refusal_with_a_known_cause_is_no_missing_replay() {
        let exchange = |outcome: &str| Exchange {
            number: 1,
            title: "",
            status: None,
            outcome: outcome.to_owned(),
            fields: Vec::new(),
            body: String::new(),
            is_cut: false,
            took: String::new(),
            error: String::new(),
        };
        let running = "refused; problem=request-in-progress; retry=same-key";
        let no_scope = "refused; problem=scope-not-set; retry=fix-request";
        let of = |scenario, outcomes: &[&str]| {
            let exchanges = outcomes.iter().map(|outcome| exchange(outcome)).collect();
            conclusion(scenario, &Played { exchanges, is_observed: false })
        };
        assert!(of(Scenario::AtOnce, &["", running]).contains("still running"));
        assert!(of(Scenario::LostReply, &["", running]).contains("still running"));
        assert!(of(Scenario::Twice, &[no_scope, no_scope]).contains("was refused, for the reason"));
        assert!(of(Scenario::Once, &[no_scope]).contains("was refused, for the reason"));
        assert!(
            of(Scenario::OtherBody, &["", "refused; problem=key-reused; retry=new-key"]).contains("belongs")
        );
        assert!(of(Scenario::AtOnce, &["", "replayed"]).contains("One request executed"));
        assert!(of(Scenario::Twice, &["", ""]).contains("No replay was seen"));
    }

    #[test]
    fn another_body_has_another_meaning() {
        assert_eq!(other_body("{\"a\": 1}"), "{\"a\":1,\"playground\":\"another body\"}");
        assert_eq!(other_body("a=1"), "a=1another body");
        assert_eq!(shown(&vec![b'a'; MAX_SHOWN + 1]).chars().count(), MAX_SHOWN + 1);
        assert_eq!(shown(b"a\xff"), "a\u{fffd}");
    }
}
