//! The owner of a key is killed, and the sidecar asks the service for the outcome of the request.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate_testkit::until;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::support::{Head, Message, Sidecar, TIMEOUT, Wire, ask, request, sidecar};

const ASKED_AT: &str = "/oncegate/outcome";
const KEY: &str = "Idempotency-Key: intent-1";
const EXECUTED: &str = "HTTP/1.1 201 Created\r\nContent-Length: 8\r\n\r\nexecuted";

/// The service's reply to a question.
#[derive(Clone)]
enum Reply {
    /// These bytes; `{record}` and `{token}` stand for the values of the question.
    Says(Vec<u8>),
    /// The same, and then the connection closes.
    SaysAndCloses(Vec<u8>),
    /// These bytes, and then chunks for as long as the sidecar reads.
    Floods(Vec<u8>),
    /// No byte; the connection stays open.
    Nothing,
    /// No byte; the connection closes.
    Closes,
    /// This reply, after the channel becomes true.
    Held(watch::Receiver<bool>, Box<Reply>),
}

impl Reply {
    /// A reply with the required fields and these.
    fn marked(status: &str, outcome: &str, fields: &str, body: impl AsRef<[u8]>) -> Self {
        let body = body.as_ref();
        let head = format!(
            "HTTP/1.1 {status}\r\nOncegate-Outcome: {outcome}\r\nOncegate-Record: {{record}}\r\nOncegate-Token: {{token}}\r\n\
             {fields}Content-Length: {}\r\n\r\n",
            body.len()
        );
        Self::Says([head.as_bytes(), body].concat())
    }

    fn says(text: impl Into<String>) -> Self {
        Self::Says(text.into().into_bytes())
    }

    fn happened() -> Self {
        Self::marked("201 Created", "happened", "Content-Type: text/plain\r\n", "found in the ledger")
    }

    fn did_not_happen() -> Self {
        Self::marked("404 Not Found", "did-not-happen", "", "")
    }
}

/// A service that never answers its first request, executes all others, and gives the prepared replies to questions.
#[derive(Clone)]
struct Ledger {
    shared: Arc<Shared>,
}

struct Shared {
    executed: Mutex<Vec<Message>>,
    questions: Mutex<Vec<Message>>,
    /// The replies in their order; the last one is repeated.
    replies: Mutex<Vec<Reply>>,
}

impl Ledger {
    fn serve(listener: TcpListener) -> Self {
        let shared =
            Shared { executed: Mutex::default(), questions: Mutex::default(), replies: Mutex::default() };
        let ledger = Self { shared: Arc::new(shared) };
        let serving = ledger.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let ledger = serving.clone();
                tokio::spawn(async move { ledger.converse(Wire::new(stream)).await });
            }
        });
        ledger
    }

    async fn converse(self, mut wire: Wire) {
        while let Some(head) = wire.try_head().await {
            let message = wire.body(head).await;
            let is_question = message.head.line.contains(ASKED_AT);
            let place = if is_question { &self.shared.questions } else { &self.shared.executed };
            let number = {
                let mut all = place.lock().unwrap();
                all.push(message.clone());
                all.len()
            };
            let response = if is_question {
                let (response, closes, floods) = self.reply(&message).await;
                if closes {
                    let _ended = wire.try_send(response).await;
                    return;
                }
                if floods {
                    let mut sent = wire.try_send(response).await;
                    while sent.is_ok() {
                        sent = wire.try_send("4\r\nmore\r\n".repeat(1000)).await;
                    }
                    return;
                }
                response
            } else if number == 1 {
                // The request takes effect, but its response is lost.
                std::future::pending().await
            } else {
                EXECUTED.into()
            };
            if wire.try_send(response).await.is_err() {
                return;
            }
        }
    }

    /// The bytes of the reply, whether the connection ends after them, and whether more bytes follow without end.
    async fn reply(&self, question: &Message) -> (Vec<u8>, bool, bool) {
        let mut reply = {
            let mut replies = self.shared.replies.lock().unwrap();
            if replies.len() > 1 { replies.remove(0) } else { replies.first().cloned().expect("a reply") }
        };
        loop {
            match reply {
                Reply::Nothing => std::future::pending().await,
                Reply::Closes => return (Vec::new(), true, false),
                Reply::Held(mut until, then) => {
                    let _gone = until.wait_for(|now| *now).await;
                    reply = *then;
                }
                Reply::Says(ref said) | Reply::SaysAndCloses(ref said) | Reply::Floods(ref said) => {
                    let mut bytes = said.clone();
                    for (name, field) in [("{record}", "oncegate-record"), ("{token}", "oncegate-token")] {
                        let value = question.get(field).expect("a question has it").as_bytes();
                        while let Some(at) = bytes.windows(name.len()).position(|w| w == name.as_bytes()) {
                            bytes.splice(at..at + name.len(), value.iter().copied());
                        }
                    }
                    let closes = matches!(reply, Reply::SaysAndCloses(_));
                    return (bytes, closes, matches!(reply, Reply::Floods(_)));
                }
            }
        }
    }

    fn will_say(&self, replies: impl IntoIterator<Item = Reply>) {
        *self.shared.replies.lock().unwrap() = replies.into_iter().collect();
    }

    fn executed(&self) -> Vec<Message> {
        self.shared.executed.lock().unwrap().clone()
    }

    fn questions(&self) -> Vec<Message> {
        self.shared.questions.lock().unwrap().clone()
    }
}

/// A sidecar on the store of its predecessor, which was killed while the service worked on a request.
struct World {
    directory: TempDir,
    ledger: Ledger,
    to: std::net::SocketAddr,
    sidecar: Sidecar,
}

impl World {
    async fn after_a_crash(flags: &[&str], first: &str) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let to = listener.local_addr().unwrap();
        let ledger = Ledger::serve(listener);
        let directory = tempfile::tempdir().unwrap();
        let sidecar = start(&directory, to, flags).await;
        let mut world = Self { directory, ledger, to, sidecar };
        let mut client = world.sidecar.connect().await;
        client.send(first).await;
        until("the service has the request", async || world.ledger.executed().len() == 1).await;
        world.restart(flags).await;
        world
    }

    /// With a path for questions, a short lease, and the request that every test retries.
    async fn new(flags: &[&str]) -> Self {
        Self::after_a_crash(flags, &keyed_order()).await
    }

    async fn restart(&mut self, flags: &[&str]) {
        self.sidecar.process.kill().await;
        self.sidecar = start(&self.directory, self.to, flags).await;
    }

    /// Retries until the request is no longer in progress.
    async fn settled(&self) -> Message {
        settled(self.sidecar.address, keyed_order()).await
    }

    async fn metric(&self, line: &str) -> bool {
        ask(self.sidecar.admin, "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            .await
            .text()
            .contains(line)
    }
}

async fn start(directory: &TempDir, to: std::net::SocketAddr, flags: &[&str]) -> Sidecar {
    let store = format!("--store={}", directory.path().join("store").display());
    let reconcile = format!("--reconcile-path={ASKED_AT}");
    let all = ["--on-abandoned=reconcile", &reconcile, "--reconcile-timeout=700ms", "--lease=300ms", &store];
    let mut all = all.to_vec();
    // A later flag of a test takes precedence.
    all.retain(|flag| !flags.iter().any(|own| own.split('=').next() == flag.split('=').next()));
    Sidecar::start(to, &[&all, flags].concat()).await
}

fn keyed_order() -> String {
    request("POST", "/orders?shop=1", &[KEY, "Authorization: Bearer t"], "{\"item\":1}")
}

/// Like `World::settled`, for a task of its own.
async fn settled(address: std::net::SocketAddr, request: String) -> Message {
    let give_up = Instant::now() + TIMEOUT;
    loop {
        let response = ask(address, &request).await;
        if response.status() != 409 {
            return response;
        }
        assert!(Instant::now() < give_up, "the request is still in progress");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Like [`settled`], but only the head; `None` if a connection ends without one.
async fn settled_head(address: std::net::SocketAddr) -> Option<Head> {
    loop {
        let mut wire = Wire::connect(address).await;
        wire.send(keyed_order()).await;
        match wire.try_head().await {
            Some(head) if head.status() == 409 => {}
            other => return other,
        }
    }
}

fn token(message: &Message) -> u64 {
    message.get("oncegate-token").and_then(|text| text.parse().ok()).expect("a token")
}

#[tokio::test]
async fn a_reconciled_response_is_stored_and_replayed_byte_for_byte() {
    let world = World::new(&["--stored-headers=X-Order"]).await;
    let body: Vec<u8> = (0..=255).cycle().take(70_000).collect();
    let fields = "Content-Type: application/byte-stream\r\nLocation: /orders/7\r\nX-Order: 7\r\nX-Other: no\r\n\
                  Set-Cookie: a=b\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n";
    world.ledger.will_say([Reply::marked("202 Accepted", "happened", fields, &body)]);
    for _ in 0..3 {
        let response = world.settled().await;
        assert!(response.has_status(202).is_replay());
        assert_eq!(response.body, body);
        assert_eq!(response.get("content-type"), Some("application/byte-stream"));
        assert_eq!((response.get("location"), response.get("x-order")), (Some("/orders/7"), Some("7")));
        assert_eq!(response.get("idempotency-key"), Some("intent-1"));
        for name in ["x-other", "set-cookie", "oncegate-outcome", "oncegate-record", "oncegate-token"] {
            assert_eq!(response.get(name), None, "{name}");
        }
    }
    // Another process finds the response in the store.
    let mut world = world;
    world.restart(&[]).await;
    assert_eq!(world.settled().await.body, body);
    assert_eq!((world.ledger.executed().len(), world.ledger.questions().len()), (1, 1));
}

#[tokio::test]
async fn replies_with_chunks_and_trailers_or_without_a_body_are_accepted() {
    let head = "Oncegate-Outcome: happened\r\nOncegate-Record: {record}\r\nOncegate-Token: {token}\r\n";
    for (reply, status, body) in [
        (
            format!(
                "HTTP/1.1 200 OK\r\n{head}Transfer-Encoding: chunked\r\nTrailer: x-sum\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\nx-sum: 1\r\n\r\n"
            ),
            200,
            "abc",
        ),
        (format!("HTTP/1.1 204 No Content\r\n{head}\r\n"), 204, ""),
        (format!("HTTP/1.1 402 Payment Required\r\n{head}Content-Length: 2\r\n\r\nno"), 402, "no"),
        (format!("HTTP/1.1 303 See Other\r\n{head}Location: /o\r\nContent-Length: 0\r\n\r\n"), 303, ""),
        (
            format!("HTTP/1.1 200 OK\r\n{head}Idempotency-Store: replay\r\nContent-Length: 1\r\n\r\nx"),
            200,
            "x",
        ),
    ] {
        let world = World::new(&[]).await;
        world.ledger.will_say([Reply::says(reply)]);
        for _ in 0..2 {
            let response = world.settled().await;
            assert!(response.has_status(status).is_replay());
            assert_eq!((response.text(), response.get("idempotency-store")), (body, None));
        }
        assert_eq!(world.ledger.executed().len(), 1);
    }
}

#[tokio::test]
async fn the_question_names_record_and_caller_and_carries_no_forged_fields() {
    let first = request(
        "POST",
        "/orders?shop=1",
        &[
            KEY,
            "Authorization: Bearer t",
            "Cookie: session=s",
            "X-Tenant: acme",
            "Accept: text/plain",
            "Content-Type: application/json",
            "Content-Language: en",
            "If-None-Match: *",
            "If-Match: \"a\"",
            "Range: bytes=0-1",
            "X-HTTP-Method-Override: DELETE",
            "X-Forwarded-For: 203.0.113.1",
            "Forwarded: for=203.0.113.1",
            "Cache-Control: max-age=60",
            "Connection: close, X-Hop",
            "X-Hop: 1",
            "Oncegate-Record: 00",
            "Oncegate-Token: 1",
            "Oncegate-Target: /elsewhere",
            "Oncegate_Outcome: happened",
        ],
        "{\"item\":1}",
    );
    let world = World::after_a_crash(&[], &first).await;
    world.ledger.will_say([Reply::happened()]);
    settled(world.sidecar.address, first).await.has_status(201);
    let (executed, questions) = (world.ledger.executed(), world.ledger.questions());
    let (execution, question) = (&executed[0], &questions[0]);
    assert_eq!(question.head.line, format!("GET {ASKED_AT} HTTP/1.1"));
    assert_eq!(question.body, b"");
    for (name, value) in [
        ("host", "orders.test"),
        ("authorization", "Bearer t"),
        ("cookie", "session=s"),
        ("x-tenant", "acme"),
        ("accept", "text/plain"),
        ("idempotency-key", "intent-1"),
        ("oncegate-method", "POST"),
        ("oncegate-target", "/orders?shop=1"),
        ("oncegate-attempt", "2"),
        ("cache-control", "no-cache, no-store"),
        // The client is a trusted proxy: it is on this machine.
        ("x-forwarded-for", "203.0.113.1, 127.0.0.1"),
        ("via", "1.1 oncegate"),
    ] {
        assert_eq!(question.get(name), Some(value), "{name}");
    }
    for name in ["oncegate-record", "x-forwarded-for", "forwarded", "x-forwarded-host", "x-forwarded-proto"] {
        assert_eq!(question.get(name), execution.get(name), "{name}");
    }
    assert!(token(question) > token(execution));
    for name in [
        "content-type", "content-length", "content-language", "transfer-encoding", "if-none-match",
        "if-match", "range", "x-http-method-override", "x-hop", "oncegate_outcome", "oncegate-outcome",
    ] {
        assert_eq!(question.get(name), None, "{name}");
    }
}

#[tokio::test]
async fn the_question_names_a_key_of_the_body_or_the_query_in_a_header_field() {
    const CALLER: &str = "Authorization: Bearer t";
    for (flags, path, fields, body, name, expected) in [
        (
            &["--profile=square"][..],
            "/orders",
            &[CALLER][..],
            r#"{"idempotency_key":"a \"b\""}"#,
            "idempotency-key",
            r#""a \"b\"""#,
        ),
        // The profile reads no header field, so this is not the key.
        (
            &["--profile=square"],
            "/orders",
            &[CALLER, KEY],
            r#"{"idempotency_key":"a"}"#,
            "idempotency-key",
            "\"a\"",
        ),
        (
            &["--key-header=x-key,idempotency-key", "--key-query=Token"],
            "/orders?Token=f%c3%bc",
            &[CALLER],
            "{}",
            "x-key",
            "%\"f%c3%bc\"",
        ),
        (
            &["--key-query=Token"],
            "/orders?Token=intent-1",
            &[CALLER, KEY],
            "{}",
            "idempotency-key",
            "intent-1",
        ),
        (
            &["--natural-key=/customer,/cart"],
            "/orders",
            &[CALLER, KEY],
            r#"{"customer":"ada","cart":7}"#,
            "idempotency-key",
            "\"json-91636101d618a12d7fdcc20edd65ddebe849e4b2475da130d2f3ff9d6f386d08\"",
        ),
    ] {
        let flags = [flags, &["--scope=required-header:authorization"]].concat();
        let fields = [fields, &["Content-Type: application/json"]].concat();
        let first = request("POST", path, &fields, body);
        let world = World::after_a_crash(&flags, &first).await;
        world.ledger.will_say([Reply::happened()]);
        settled(world.sidecar.address, first).await.has_status(201);
        let questions = world.ledger.questions();
        assert_eq!(questions[0].get(name), Some(expected), "{path} {body}");
    }
}

#[tokio::test]
async fn a_request_that_did_not_happen_is_executed_once_under_a_higher_token() {
    let world = World::new(&["--threads=2"]).await;
    world.ledger.will_say([Reply::did_not_happen()]);
    let address = world.sidecar.address;
    let all: Vec<_> =
        (0..20).map(|_| tokio::spawn(async move { settled(address, keyed_order()).await })).collect();
    let mut fresh = 0;
    for one in all {
        let response = one.await.unwrap();
        assert_eq!(response.has_status(201).text(), "executed");
        fresh += usize::from(!response.is_replay());
    }
    assert_eq!(fresh, 1);
    let (executed, questions) = (world.ledger.executed(), world.ledger.questions());
    assert_eq!((executed.len(), questions.len()), (2, 1));
    assert!(token(&executed[1]) > token(&executed[0]));
    // The client that caused the question is the one whose request is executed.
    assert_eq!(executed[1].get("oncegate-token"), questions[0].get("oncegate-token"));
    assert_eq!(executed[1].text(), "{\"item\":1}");
    assert!(world.metric("oncegate_reconciled_total{result=\"did-not-happen\"} 1\n").await);
}

/// Replies that are no response, or none that can be relied on.
fn unclear() -> Vec<(&'static str, Reply)> {
    let bare = |status: &str, fields: &str| {
        Reply::says(format!("HTTP/1.1 {status}\r\n{fields}Content-Length: 2\r\n\r\nno"))
    };
    let with = |outcome: &str, record: &str, token: &str| {
        let fields = format!(
            "Oncegate-Outcome: {outcome}\r\nOncegate-Record: {record}\r\nOncegate-Token: {token}\r\n"
        );
        bare("404 Not Found", &fields)
    };
    let marked = |status: &str, outcome: &str| Reply::marked(status, outcome, "", "x");
    let (record, token) = ("{record}", "{token}");
    let cut = |text: String| Reply::SaysAndCloses(text.into_bytes());
    let happened = "Oncegate-Outcome: happened\r\nOncegate-Record: {record}\r\nOncegate-Token: {token}\r\n";
    vec![
        ("a router that does not know the path", bare("404 Not Found", "")),
        ("a page for every path", bare("200 OK", "Content-Type: text/html\r\n")),
        ("a login", bare("302 Found", "Location: /login\r\n")),
        ("a proxy's error page", bare("502 Bad Gateway", "")),
        ("a service in trouble", bare("500 Internal Server Error", "")),
        ("a service error that reports did-not-happen anyway", marked("500 Oops", "did-not-happen")),
        ("a service error that reports happened anyway", marked("503 Oops", "happened")),
        ("a caller who is not known", marked("401 Unauthorized", "did-not-happen")),
        ("a caller who may not ask", marked("403 Forbidden", "happened")),
        ("too many questions", marked("429 Slow", "did-not-happen")),
        ("a redirection that did not happen", marked("302 Found", "did-not-happen")),
        ("nothing new since", Reply::marked("304 Not Modified", "happened", "", "")),
        ("unknown", marked("200 OK", "unknown")),
        ("an unknown outcome", marked("404 Not Found", "not-found")),
        ("the wrong case", marked("404 Not Found", "Did-Not-Happen")),
        ("an empty outcome", marked("404 Not Found", "")),
        ("two words", with("did-not-happen, did-not-happen", record, token)),
        ("two lines", with("did-not-happen\r\nOncegate-Outcome: did-not-happen", record, token)),
        (
            "two lines that contradict each other",
            with("did-not-happen\r\nOncegate-Outcome: happened", record, token),
        ),
        (
            "without the record",
            bare("404 Not Found", "Oncegate-Outcome: did-not-happen\r\nOncegate-Token: {token}\r\n"),
        ),
        (
            "without the token",
            bare("404 Not Found", "Oncegate-Outcome: did-not-happen\r\nOncegate-Record: {record}\r\n"),
        ),
        ("about another record", with("did-not-happen", &"0".repeat(64), token)),
        ("to an earlier question", with("did-not-happen", record, "1")),
        ("the record twice", with("did-not-happen", "{record}\r\nOncegate-Record: {record}", token)),
        (
            "happened, and not to be kept",
            Reply::marked("200 OK", "happened", "Idempotency-Store: release\r\n", "x"),
        ),
        (
            "happened, and a directive that is none",
            Reply::marked("200 OK", "happened", "Idempotency-Store: x\r\n", "x"),
        ),
        (
            "a body that is cut short",
            cut(format!("HTTP/1.1 200 OK\r\n{happened}Content-Length: 5\r\n\r\nab")),
        ),
        ("a body without a known end", cut(format!("HTTP/1.1 200 OK\r\n{happened}\r\nab"))),
        (
            "a body that never ends",
            Reply::says(format!("HTTP/1.1 200 OK\r\n{happened}Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n")),
        ),
        ("garbage", Reply::says("SSH-2.0-OpenSSH_9.6\r\n\r\n")),
        (
            "a head without an end",
            Reply::says(format!("HTTP/1.1 200 OK\r\n{happened}X-Long: {}", "x".repeat(300_000))),
        ),
        ("half a head", cut("HTTP/1.1 404 Not Found\r\nOncegate-Outcome: did-not-h".to_owned())),
        ("nothing", Reply::Nothing),
        ("a closed connection", Reply::Closes),
    ]
}

#[tokio::test]
async fn an_unusable_reply_leaves_the_outcome_unknown_and_executes_nothing() {
    // A few at a time: each needs one or two processes.
    let left = std::cell::RefCell::new(unclear().into_iter());
    let some = async || {
        loop {
            let next = left.borrow_mut().next();
            let Some((what, reply)) = next else { return };
            is_unclear(what, reply).await;
        }
    };
    tokio::join!(some(), some(), some(), some());
}

async fn is_unclear(what: &str, reply: Reply) {
    // Long enough for a reply on a busy machine, and short enough to wait for its end this often.
    let world = World::new(&["--reconcile-timeout=1500ms"]).await;
    world.ledger.will_say([reply]);
    let response = world.settled().await;
    assert_eq!(response.status(), 500, "{what}: {response:?}");
    response.is_problem(500, "outcome-unknown");
    assert_eq!(response.json()["retry"], "stop");
    assert!(!world.ledger.questions().is_empty(), "{what}");
    // The record is parked, so the service is not asked again. A question that was given up may still arrive late.
    world.ledger.will_say([Reply::did_not_happen()]);
    for _ in 0..3 {
        world.settled().await.is_problem(500, "outcome-unknown");
    }
    let questions = world.ledger.questions();
    assert!(questions.iter().all(|question| token(question) == token(&questions[0])), "{what}");
    assert_eq!(world.ledger.executed().len(), 1, "{what}");
    assert!(world.metric("oncegate_reconciled_total{result=\"cannot-tell\"} 1\n").await, "{what}");
    assert!(world.metric("oncegate_events_total{event=\"parked\"} 1\n").await, "{what}");
}

#[tokio::test]
async fn a_request_that_happened_is_never_executed_again_even_if_it_cannot_be_replayed() {
    for reply in [
        Reply::marked("200 OK", "happened", "", vec![b'x'; 101]),
        Reply::marked("200 OK", "happened", "Content-Type: text/event-stream\r\n", "data: x\n\n"),
        Reply::marked("200 OK", "happened", "Idempotency-Store: tombstone\r\n", "x"),
        Reply::says(format!(
            "HTTP/1.1 200 OK\r\nOncegate-Outcome: happened\r\nOncegate-Record: {{record}}\r\nOncegate-Token: {{token}}\r\n\
             Transfer-Encoding: chunked\r\n\r\n65\r\n{}\r\n0\r\n\r\n",
            "x".repeat(101)
        )),
    ] {
        let world = World::new(&["--max-response-body=100B"]).await;
        world.ledger.will_say([reply]);
        for _ in 0..2 {
            world.settled().await.is_problem(422, "replay-unavailable");
        }
        assert_eq!((world.ledger.executed().len(), world.ledger.questions().len()), (1, 1));
    }
    // A reply without an end is read only up to the limit.
    let world = World::new(&["--reconcile-timeout=1m"]).await;
    world.ledger.will_say([Reply::Floods(
        b"HTTP/1.1 200 OK\r\nOncegate-Outcome: happened\r\nOncegate-Record: {record}\r\nOncegate-Token: {token}\r\n\
          Transfer-Encoding: chunked\r\n\r\n"
            .to_vec(),
    )]);
    world.settled().await.is_problem(422, "replay-unavailable");
    // A reply at the limit is stored.
    let world = World::new(&["--max-response-body=100B"]).await;
    world.ledger.will_say([Reply::marked("200 OK", "happened", "", vec![b'x'; 100])]);
    assert_eq!(world.settled().await.has_status(200).body.len(), 100);
}

#[tokio::test]
async fn a_starting_service_is_asked_again_until_the_time_out() {
    let world = World::new(&["--reconcile-timeout=20s"]).await;
    world.ledger.will_say([
        Reply::Closes,
        Reply::says("HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"),
        Reply::marked("200 OK", "unknown", "", ""),
        Reply::happened(),
    ]);
    assert_eq!(world.settled().await.has_status(201).text(), "found in the ledger");
    let questions = world.ledger.questions();
    assert_eq!((world.ledger.executed().len(), questions.len()), (1, 4));
    // All questions belong to one attempt.
    assert!(questions.iter().all(|question| token(question) == token(&questions[0])));
}

#[tokio::test]
async fn a_service_that_contradicts_itself_is_not_believed() {
    let world = World::new(&["--reconcile-timeout=2s"]).await;
    let half = b"HTTP/1.1 200 OK\r\nOncegate-Outcome: happened\r\nOncegate-Record: {record}\r\nOncegate-Token: {token}\r\n\r\nhalf";
    world.ledger.will_say([Reply::SaysAndCloses(half.to_vec()), Reply::did_not_happen()]);
    world.settled().await.is_problem(500, "outcome-unknown");
    assert!(world.ledger.questions().len() > 1);
    assert_eq!(world.ledger.executed().len(), 1);
}

#[tokio::test]
async fn the_lease_is_renewed_during_questions_and_questions_end() {
    let world = World::new(&["--reconcile-timeout=1500ms", "--lease=200ms"]).await;
    world.ledger.will_say([Reply::Nothing]);
    let address = world.sidecar.address;
    let asking = tokio::spawn(async move { settled(address, keyed_order()).await });
    until("the service is asked", async || !world.ledger.questions().is_empty()).await;
    let begun = Instant::now();
    let mut response = world.sidecar.ask(&keyed_order()).await;
    while begun.elapsed() < Duration::from_millis(1000) {
        response.is_problem(409, "request-in-progress");
        // The key is not free for another request either.
        let other = request("POST", "/orders?shop=1", &[KEY, "Authorization: Bearer t"], "{}");
        world.sidecar.ask(&other).await.is_problem(422, "key-reused");
        response = world.sidecar.ask(&keyed_order()).await;
    }
    assert_eq!(world.ledger.questions().len(), 1);
    asking.await.unwrap().is_problem(500, "outcome-unknown");
    world.settled().await.is_problem(500, "outcome-unknown");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert_eq!(world.ledger.executed().len(), 1);
}

#[tokio::test]
async fn a_service_that_cannot_be_reached_leaves_the_outcome_unknown() {
    let mut world = World::new(&[]).await;
    let gone = TcpListener::bind(("127.0.0.1", 0)).await.unwrap().local_addr().unwrap();
    world.sidecar.process.kill().await;
    world.sidecar = start(&world.directory, gone, &[]).await;
    world.settled().await.is_problem(500, "outcome-unknown");
}

#[tokio::test]
async fn a_sidecar_killed_during_a_question_asks_again_under_a_higher_token() {
    let mut world = World::new(&["--reconcile-timeout=1m"]).await;
    world.ledger.will_say([Reply::Nothing]);
    for killed in 1..3 {
        let address = world.sidecar.address;
        let asking = tokio::spawn(settled_head(address));
        until("the service is asked", async || world.ledger.questions().len() == killed).await;
        world.restart(&["--reconcile-timeout=1m"]).await;
        assert!(asking.await.unwrap().is_none(), "a killed process sent a response");
    }
    world.ledger.will_say([Reply::happened()]);
    assert_eq!(world.settled().await.has_status(201).text(), "found in the ledger");
    let questions = world.ledger.questions();
    assert_eq!((world.ledger.executed().len(), questions.len()), (1, 3));
    for pair in questions.windows(2) {
        assert!(token(&pair[1]) > token(&pair[0]));
        assert_eq!(pair[0].get("oncegate-record"), pair[1].get("oncegate-record"));
    }
    assert_eq!(questions[2].get("oncegate-attempt"), Some("4"));
}

#[cfg(feature = "failpoints")]
#[tokio::test]
async fn a_sidecar_killed_between_reply_and_record_asks_again() {
    for reply in [Reply::happened(), Reply::did_not_happen()] {
        let did_not = matches!(&reply, Reply::Says(bytes) if bytes.starts_with(b"HTTP/1.1 404"));
        let mut world = World::new(&[]).await;
        world.ledger.will_say([reply]);
        world.sidecar.process.kill().await;
        let mut command = sidecar(&format!("http://{}", world.to));
        command.args(["--on-abandoned=reconcile", "--lease=300ms", "--reconcile-path", ASKED_AT, "--store"]);
        command.arg(world.directory.path().join("store")).env("ONCEGATE_FAILPOINT", "executed");
        world.sidecar = Sidecar::run(&mut command).await;
        let address = world.sidecar.address;
        let asking = tokio::spawn(settled_head(address));
        world.sidecar.process.logs("failpoint executed").await;
        // The service knows what it executed, and would report it.
        assert_eq!(world.ledger.executed().len(), 1 + usize::from(did_not));
        world.ledger.will_say([Reply::happened()]);
        world.restart(&[]).await;
        assert!(asking.await.unwrap().is_none(), "a killed process sent a response");
        let response = world.settled().await;
        assert!(response.has_status(201).is_replay());
        assert_eq!(response.text(), "found in the ledger");
        assert_eq!(
            (world.ledger.executed().len(), world.ledger.questions().len()),
            (1 + usize::from(did_not), 2)
        );
    }
}

#[tokio::test]
async fn a_sidecar_that_lost_the_record_during_a_question_executes_nothing() {
    let world = World::new(&["--reconcile-timeout=1m", "--lease=300ms"]).await;
    let (open, held) = watch::channel(false);
    world.ledger.will_say([Reply::Held(held, Box::new(Reply::did_not_happen()))]);
    let address = world.sidecar.address;
    let asking = tokio::spawn(async move { settled(address, keyed_order()).await });
    until("the service is asked", async || world.ledger.questions().len() == 1).await;
    let record = world.ledger.questions()[0].get("oncegate-record").unwrap().to_owned();
    let body = r#"{"force":true,"reason":"test"}"#;
    let fields = ["Content-Type: application/json"];
    let release = request("POST", &format!("/v1/keys/{record}/release"), &fields, body)
        .replace("Host: orders.test", "Host: 127.0.0.1");
    let released = ask(world.sidecar.admin, &release).await;
    assert!(released.status() < 300, "{released:?}");
    until("the sidecar notices the loss", async || {
        world.metric("oncegate_events_total{event=\"lease-lost\"} 1\n").await
    })
    .await;
    open.send(true).unwrap();
    asking.await.unwrap().is_problem(503, "store-unavailable");
    assert_eq!(world.ledger.executed().len(), 1);
    // The operator freed the key, so the next request executes.
    assert_eq!(world.settled().await.has_status(201).text(), "executed");
    assert_eq!(world.ledger.executed().len(), 2);
}

#[tokio::test]
async fn a_route_may_have_its_own_path_for_questions() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("oncegate.toml");
    let text = format!(
        "[[route]]\npath = \"/orders\"\non-abandoned = \"reconcile\"\nreconcile-path = \"{ASKED_AT}/orders\"\n"
    );
    std::fs::write(&file, text).unwrap();
    let config = format!("--config={}", file.display());
    let world = World::new(&[&config, "--on-abandoned=park", "--reconcile-path=/elsewhere"]).await;
    world.ledger.will_say([Reply::happened()]);
    world.settled().await.has_status(201);
    assert_eq!(world.ledger.questions()[0].head.line, format!("GET {ASKED_AT}/orders HTTP/1.1"));
}

#[tokio::test]
async fn the_sidecar_does_not_start_without_a_path_for_questions() {
    let mut command = sidecar("http://127.0.0.1:9");
    command.args(["--store=memory:", "--on-abandoned=reconcile"]);
    let mut process = crate::support::Process::start(&mut command);
    assert_eq!(process.ended().await.code(), Some(1));
    let said = process.errors().await;
    assert!(
        said.contains("--on-abandoned: the service cannot be asked without a path; set reconcile-path"),
        "{said}"
    );
}
