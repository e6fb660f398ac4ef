//! The service behind the deployment: it counts its executions, and follows the script of a request.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper_util::rt::{TokioExecutor, TokioIo};
use oncegate_http::{Authorization, Authorize};
use oncegate_testkit::Latch;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tower_service::Service;

use crate::client::{Request as Sent, within};
use crate::plan::{FOUND, ReconcileReport};

/// The header that names a script. No deployment interprets it.
const SCRIPT: &str = "x-script";

/// The path at which the sidecar asks for the outcome of an attempt.
pub(crate) const ASKED_AT: &str = "/oncegate/outcome";

/// The path at which the sidecar asks if a caller may get a replay.
pub(crate) const MAY_SEE: &str = "/oncegate/may-see";

/// A path whose requests have no effect.
pub(crate) const PROBE: &str = "/probe";

/// The header that names the decision about a replay. No deployment interprets it.
const DECISION: &str = "x-may-see";

/// A decision about a replay, which the request itself asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    Allow,
    Deny,
    /// The caller does not learn that there is a response.
    Hide,
    /// The service cannot decide now.
    Away,
    /// The service knows nothing of such questions, and has the same page for all paths.
    None,
}

impl Decision {
    const ALL: [Self; 5] = [Self::Allow, Self::Deny, Self::Hide, Self::Away, Self::None];

    /// The request, with this decision about its replay.
    pub(crate) fn asked_by(self, request: Sent) -> Sent {
        request.field(DECISION, format!("{self:?}"))
    }

    fn asked(request: &HeaderMap) -> Self {
        let named = request.get(DECISION).expect("a request with a decision");
        Self::ALL.into_iter().find(|decision| format!("{decision:?}") == *named).expect("a decision")
    }

    fn told(self) -> Response<ScriptedBody> {
        let (status, word) = match self {
            Self::Allow => (204, Some("allow")),
            Self::Deny => (403, None),
            Self::Hide => (404, Some("deny")),
            Self::Away => (503, None),
            Self::None => (200, None),
        };
        let script = Script::empty(status);
        word.into_iter().fold(script, |script, word| script.field("oncegate-authorize", word)).respond(0)
    }
}

/// The service of a layer, which decides in this process.
pub(crate) struct AskedDecision;

impl Authorize for AskedDecision {
    fn authorize<'a>(
        &'a self,
        request: &'a http::request::Parts,
    ) -> Pin<Box<dyn Future<Output = Authorization> + Send + 'a>> {
        let decision = match Decision::asked(&request.headers) {
            Decision::Allow => Authorization::Allowed,
            Decision::Deny => Authorization::Denied(StatusCode::FORBIDDEN),
            Decision::Hide => Authorization::Denied(StatusCode::NOT_FOUND),
            Decision::Away => Authorization::CannotTell(StatusCode::SERVICE_UNAVAILABLE),
            Decision::None => Authorization::CannotTell(StatusCode::OK),
        };
        Box::pin(std::future::ready(decision))
    }
}

/// The behaviour of one execution. By default it answers 201 with a unique receipt.
#[derive(Clone)]
pub struct Script {
    status: u16,
    fields: Vec<(String, Vec<u8>)>,
    response: Content,
    trailers: Vec<(String, String)>,
    held: Option<Latch>,
    end: End,
    early: bool,
}

#[derive(Clone)]
enum Content {
    Receipt,
    Whole(Bytes),
    Pieces(Vec<BodyPart>),
}

/// A part of a body of unknown length.
#[derive(Clone)]
pub enum BodyPart {
    /// Bytes.
    Data(Bytes),
    /// Waits until the latch opens.
    Wait(Latch),
    /// Ends the body with an error.
    Break,
}

#[derive(Clone, Copy, PartialEq)]
enum End {
    ScriptedBody,
    Panic,
    Fail,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            status: 201,
            fields: Vec::new(),
            response: Content::Receipt,
            trailers: Vec::new(),
            held: None,
            end: End::ScriptedBody,
            early: false,
        }
    }
}

impl Script {
    /// Answers with a receipt and this status.
    #[must_use]
    pub fn status(status: u16) -> Self {
        Self { status, ..Self::default() }
    }

    /// Answers with exactly these bytes and `Content-Length`.
    #[must_use]
    pub fn whole(status: u16, content_type: &str, body: impl Into<Bytes>) -> Self {
        let script = Self { status, response: Content::Whole(body.into()), ..Self::default() };
        if content_type.is_empty() { script } else { script.field("content-type", content_type) }
    }

    /// Answers without a body and without headers.
    #[must_use]
    pub fn empty(status: u16) -> Self {
        Self::whole(status, "", Bytes::new())
    }

    /// Answers in parts, without a length.
    #[must_use]
    pub fn pieces(status: u16, content_type: &str, pieces: Vec<BodyPart>) -> Self {
        Self { status, response: Content::Pieces(pieces), ..Self::default() }
            .field("content-type", content_type)
    }

    /// Adds a header line to the response.
    #[must_use]
    pub fn field(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.fields.push((name.to_owned(), value.as_ref().to_vec()));
        self
    }

    /// Adds a trailer field; only for a response in parts.
    #[must_use]
    pub fn trailer(mut self, name: &str, value: &str) -> Self {
        self.trailers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Waits for the latch after the effect, before the response.
    #[must_use]
    pub fn held(mut self, latch: &Latch) -> Self {
        self.held = Some(latch.clone());
        self
    }

    /// Panics after the effect, and after the latch if it is held.
    #[must_use]
    pub fn panics() -> Self {
        Self { end: End::Panic, ..Self::default() }
    }

    /// Ends with an error after the effect: on a socket, the connection is closed without a response.
    #[must_use]
    pub fn fails() -> Self {
        Self { end: End::Fail, ..Self::default() }
    }

    /// Does not wait for the body of the request.
    #[must_use]
    pub fn early(mut self) -> Self {
        self.early = true;
        self
    }
}

/// A request as the backend received it.
#[derive(Clone, Debug)]
pub struct ReceivedRequest {
    /// The method.
    pub method: String,
    /// Path and query.
    pub target: String,
    /// The headers.
    pub fields: HeaderMap,
    /// The body.
    pub body: Bytes,
}

impl ReceivedRequest {
    /// The value of the header of this name, if there is one.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        let values: Vec<_> = self.fields.get_all(name).iter().collect();
        assert!(values.len() <= 1, "{} field lines {name} in {self:?}", values.len());
        values.first().map(|value| value.to_str().expect("a field value in ASCII"))
    }
}

/// The fencing token with which the service received a request.
pub(crate) fn token(seen: &ReceivedRequest) -> u64 {
    let token = seen.get("oncegate-token").and_then(|text| text.parse().ok());
    token.unwrap_or_else(|| panic!("no token: {seen:?}"))
}

/// The number of the attempt with which the service received a request.
pub(crate) fn attempt(seen: &ReceivedRequest) -> u64 {
    let number = seen.get("oncegate-attempt").and_then(|text| text.parse().ok());
    number.unwrap_or_else(|| panic!("no attempt: {seen:?}"))
}

/// The service and its ledger. All clones share them.
#[derive(Clone)]
pub struct Backend {
    shared: Arc<Shared>,
}

struct Shared {
    scripts: Mutex<Vec<Script>>,
    seen: Mutex<Vec<ReceivedRequest>>,
    begun: watch::Sender<usize>,
    ended: watch::Sender<usize>,
    word: Mutex<Option<ReconcileReport>>,
    /// The answers to requests that were sent in the background.
    answers: Mutex<Vec<String>>,
}

impl Default for Backend {
    fn default() -> Self {
        let shared = Shared {
            scripts: Mutex::default(),
            seen: Mutex::default(),
            begun: watch::Sender::new(0),
            ended: watch::Sender::new(0),
            word: Mutex::default(),
            answers: Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }
}

impl Backend {
    /// Registers a script, and returns the header that requests it.
    pub(crate) fn order(&self, script: Script) -> (Vec<u8>, Vec<u8>) {
        let mut scripts = lock(&self.shared.scripts);
        scripts.push(script);
        (SCRIPT.into(), (scripts.len() - 1).to_string().into())
    }

    /// Sets the report on questions about the outcome of an attempt.
    pub(crate) fn set_reconcile_reply(&self, word: Option<ReconcileReport>) {
        *lock(&self.shared.word) = word;
    }

    /// The number of executions that took effect.
    #[must_use]
    pub fn effects(&self) -> usize {
        *self.shared.begun.borrow()
    }

    /// The number of executions that were not dropped before their end.
    #[must_use]
    pub fn ended(&self) -> usize {
        *self.shared.ended.borrow()
    }

    /// Every execution, in the order of the effects.
    #[must_use]
    pub fn seen(&self) -> Vec<ReceivedRequest> {
        lock(&self.shared.seen).clone()
    }

    /// Waits until this many executions took effect.
    pub async fn until_effects(&self, count: usize) {
        let mut begun = self.shared.begun.subscribe();
        let in_time = within(begun.wait_for(|&n| n >= count)).await.is_some();
        let answers = lock(&self.shared.answers);
        assert!(
            in_time,
            "waited in vain for effect {count}; there are {}, and the answers so far are {answers:?}",
            self.effects()
        );
    }

    /// Notes an answer, for the message of a wait for an effect that does not come.
    pub(crate) fn note_answer(&self, answer: String) {
        lock(&self.shared.answers).push(answer);
    }

    /// Waits until this many executions ended.
    pub async fn until_ended(&self, count: usize) {
        let mut ended = self.shared.ended.subscribe();
        let in_time = within(ended.wait_for(|&n| n >= count)).await.is_some();
        assert!(in_time, "waited in vain for end {count}; there are {}", self.ended());
    }

    /// Serves on a new socket.
    pub async fn serve(&self) -> HttpServer {
        HttpServer::start(self.clone()).await
    }

    /// Serves on this socket.
    #[must_use]
    pub fn serve_on(&self, listener: TcpListener) -> HttpServer {
        HttpServer::on(self.clone(), listener)
    }

    async fn execute<B>(self, request: Request<B>) -> io::Result<Response<ScriptedBody>>
    where
        B: Body<Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
    {
        let (parts, body) = request.into_parts();
        let word = *lock(&self.shared.word);
        if let Some(word) = word.filter(|_| parts.uri.path() == ASKED_AT) {
            return Ok(word.told(&parts.headers));
        }
        if parts.uri.path() == MAY_SEE {
            assert_eq!(parts.method, http::Method::HEAD);
            return Ok(Decision::asked(&parts.headers).told());
        }
        if parts.uri.path() == PROBE {
            return Ok(Script::empty(200).respond(0));
        }
        let number =
            parts.headers.get(SCRIPT).and_then(|v| v.to_str().ok()).and_then(|v| v.parse::<usize>().ok());
        let script = number.and_then(|n| lock(&self.shared.scripts).get(n).cloned()).unwrap_or_default();
        let body = if script.early {
            Bytes::new()
        } else {
            let read = body.collect().await.map_err(|error| io::Error::other(error.into()))?;
            read.to_bytes()
        };
        let target = parts.uri.path_and_query().map_or("/", |target| target.as_str()).to_owned();
        let seen = ReceivedRequest { method: parts.method.to_string(), target, fields: parts.headers, body };
        let effect = {
            let mut all = lock(&self.shared.seen);
            all.push(seen);
            self.shared.begun.send_replace(all.len());
            all.len()
        };
        if let Some(latch) = &script.held {
            latch.opened().await;
        }
        self.shared.ended.send_modify(|n| *n += 1);
        match script.end {
            // Without the panic hook, which would print a message.
            End::Panic => std::panic::resume_unwind(Box::new("as ordered")),
            End::Fail => return Err(io::Error::other("as ordered")),
            End::ScriptedBody => {}
        }
        Ok(script.respond(effect))
    }
}

impl Script {
    fn respond(self, effect: usize) -> Response<ScriptedBody> {
        let mut response = Response::new(ScriptedBody::default());
        *response.status_mut() = StatusCode::from_u16(self.status).expect("a status");
        for (name, value) in &self.fields {
            let name = HeaderName::from_bytes(name.as_bytes()).expect("a field name");
            response.headers_mut().append(name, HeaderValue::from_bytes(value).expect("a field value"));
        }
        let scripted = response.body_mut();
        match self.response {
            Content::Receipt => {
                let receipt = format!(r#"{{"effect":{effect},"mark":"{MARK}"}}"#);
                scripted.pieces = [BodyPart::Data(receipt.into())].into();
                scripted.sized = true;
                let json = HeaderValue::from_static("application/json");
                response.headers_mut().entry("content-type").or_insert(json);
            }
            Content::Whole(body) => {
                scripted.sized = true;
                if !body.is_empty() {
                    scripted.pieces = [BodyPart::Data(body)].into();
                }
            }
            Content::Pieces(pieces) => {
                scripted.pieces = pieces.into();
                if !self.trailers.is_empty() {
                    let field = |(name, value): &(String, String)| {
                        (
                            HeaderName::try_from(name.as_str()).unwrap(),
                            HeaderValue::try_from(value.as_str()).unwrap(),
                        )
                    };
                    scripted.trailers = Some(self.trailers.iter().map(field).collect());
                }
            }
        }
        response
    }
}

impl ReconcileReport {
    /// The response to a question about the outcome of an attempt.
    fn told(self, asked: &HeaderMap) -> Response<ScriptedBody> {
        let (outcome, script) = match self {
            Self::Found => ("happened", Script::whole(202, "text/plain", FOUND)),
            Self::NotFound => ("did-not-happen", Script::empty(404)),
            Self::Unclear => ("unknown", Script::empty(200)),
        };
        let repeated = |script: Script, name| script.field(name, asked.get(name).expect("a question has it"));
        let script = repeated(repeated(script, "oncegate-record"), "oncegate-token");
        script.field("oncegate-outcome", outcome).respond(0)
    }
}

/// A text in every receipt, which no refusal may contain.
pub const MARK: &str = "what-the-first-one-got";

impl<B> Service<Request<B>> for Backend
where
    B: Body<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static,
{
    type Response = Response<ScriptedBody>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Response<ScriptedBody>>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        Box::pin(self.clone().execute(request))
    }
}

/// The body of a response, part by part.
#[derive(Default)]
pub struct ScriptedBody {
    pieces: VecDeque<BodyPart>,
    waiting: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    trailers: Option<HeaderMap>,
    sized: bool,
}

impl Body for ScriptedBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        loop {
            if let Some(waiting) = &mut self.waiting {
                ready!(waiting.as_mut().poll(cx));
                self.waiting = None;
            }
            match self.pieces.pop_front() {
                Some(BodyPart::Data(data)) => return Poll::Ready(Some(Ok(Frame::data(data)))),
                Some(BodyPart::Wait(latch)) => {
                    self.waiting = Some(Box::pin(async move { latch.opened().await }));
                }
                Some(BodyPart::Break) => return Poll::Ready(Some(Err(io::Error::other("as ordered")))),
                None => return Poll::Ready(self.trailers.take().map(|fields| Ok(Frame::trailers(fields)))),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.pieces.is_empty() && self.waiting.is_none() && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        if !self.sized {
            return SizeHint::default();
        }
        let left = self
            .pieces
            .iter()
            .map(|piece| if let BodyPart::Data(data) = piece { data.len() as u64 } else { 0 });
        SizeHint::with_exact(left.sum())
    }
}

/// An HTTP server on a loopback socket. Dropping it stops the server.
pub struct HttpServer {
    /// The address of the server.
    pub address: SocketAddr,
    accepting: tokio::task::JoinHandle<()>,
}

impl HttpServer {
    /// Serves HTTP/1.1 and HTTP/2 (with prior knowledge) on a free port.
    pub async fn start<S, RB>(service: S) -> Self
    where
        S: Service<Request<hyper::body::Incoming>, Response = Response<RB>, Future: Send>
            + Clone
            + Send
            + 'static,
        S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
        RB: Body<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static,
    {
        // The same backlog as the sidecar has: a case opens hundreds of connections at once on a busy machine.
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind(([127, 0, 0, 1], 0).into()).expect("a free port");
        Self::on(service, socket.listen(4096).expect("a socket that listens"))
    }

    fn on<S, RB>(service: S, listener: TcpListener) -> Self
    where
        S: Service<Request<hyper::body::Incoming>, Response = Response<RB>, Future: Send>
            + Clone
            + Send
            + 'static,
        S::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
        RB: Body<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static,
    {
        let address = listener.local_addr().expect("an address");
        let accepting = tokio::spawn(async move {
            // The connections end with the listener.
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let _ = stream.set_nodelay(true);
                let service = hyper_util::service::TowerToHyperService::new(service.clone());
                connections.spawn(async move {
                    let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                    // Many cases break the connection on purpose.
                    let _ = server.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { address, accepting }
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
