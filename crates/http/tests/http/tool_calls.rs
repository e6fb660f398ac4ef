//! Calls of tools in MCP, whose responses are streams of events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{BodyExt as _, Full};
use oncegate_core::MemoryStore;
use oncegate_engine::Engine;
use oncegate_http::{
    BoxError, CallerScope, Idempotency, IdempotencyLayer, Profile, RequestBody, ResponseBody, Settings,
    ToolPolicies, ToolPolicy,
};
use oncegate_testkit::ManualClock;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tower_layer::Layer;
use tower_service::Service;

/// A body whose pieces a test sends. It ends with its sender, and breaks off with an error.
struct Pieces(mpsc::UnboundedReceiver<Result<&'static str, &'static str>>);

impl Body for Pieces {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let piece = std::task::ready!(self.0.poll_recv(cx));
        Poll::Ready(piece.map(|piece| match piece {
            Ok(text) => Ok(Frame::data(Bytes::from_static(text.as_bytes()))),
            Err(error) => Err(error.into()),
        }))
    }
}

type Sender = mpsc::UnboundedSender<Result<&'static str, &'static str>>;

/// Answers with the next response of the test, and keeps the fields of each request.
#[derive(Clone, Default)]
struct Server {
    responses: Arc<Mutex<VecDeque<Response<Pieces>>>>,
    requests: Arc<Mutex<Vec<HeaderMap>>>,
}

impl Server {
    fn will_respond(&self, content_type: &str) -> Sender {
        let (sender, pieces) = mpsc::unbounded_channel();
        let response = Response::builder().header("content-type", content_type).body(Pieces(pieces)).unwrap();
        self.responses.lock().unwrap().push_back(response);
        sender
    }

    /// Answers the next request with this whole message.
    fn will_answer(&self, status: u16, fields: &[(&'static str, &str)], text: &str) {
        let pieces = self.will_respond("application/json");
        let mut responses = self.responses.lock().unwrap();
        let response = responses.back_mut().unwrap();
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        for (name, value) in fields {
            response.headers_mut().insert(*name, value.parse().unwrap());
        }
        pieces.send(Ok(text.to_owned().leak())).unwrap();
    }

    fn runs(&self) -> usize {
        self.requests.lock().unwrap().len()
    }
}

impl Service<Request<RequestBody<Full<Bytes>>>> for Server {
    type Response = Response<Pieces>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody<Full<Bytes>>>) -> Self::Future {
        self.requests.lock().unwrap().push(request.headers().clone());
        ready(Ok(self.responses.lock().unwrap().pop_front().expect("a response of the test")))
    }
}

fn settings() -> Settings {
    Settings::new(Profile::named("mcp").unwrap()).with_caller(CallerScope::single_tenant())
}

fn service(settings: Settings) -> (Server, Idempotency<Server>) {
    let server = Server::default();
    let layer = IdempotencyLayer::new(Engine::new(MemoryStore::new(ManualClock::at_millis(1))));
    let service = layer.with_settings(settings).unwrap().layer(server.clone());
    (server, service)
}

async fn send(service: &mut Idempotency<Server>, body: &Value) -> Response<ResponseBody<Pieces>> {
    let request = Request::post("/mcp").header("accept-encoding", "gzip").body(Full::from(body.to_string()));
    service.call(request.unwrap()).await.unwrap()
}

fn pay(id: u32, key: &str) -> Value {
    let params = json!({"name": "pay", "arguments": {"amount": 1}, "_meta": {"idempotencyKey": key}});
    json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params})
}

async fn next(body: &mut ResponseBody<Pieces>) -> Option<String> {
    let frame =
        tokio::time::timeout(Duration::from_secs(60), body.frame()).await.expect("a frame in time")?;
    Some(String::from_utf8(frame.unwrap().into_data().unwrap().to_vec()).unwrap())
}

async fn whole(response: Response<ResponseBody<Pieces>>) -> Value {
    let body = response.into_body().collect().await.unwrap().to_bytes();
    serde_json::from_slice(&body).unwrap_or_else(|_| panic!("{body:?}"))
}

/// The problem in the refusal of a call.
#[track_caller]
fn problem(refusal: &Value) -> &str {
    assert_eq!(refusal["result"]["isError"], true, "{refusal}");
    let slug = refusal["result"]["_meta"]["oncegate/problem"]["type"].as_str().unwrap();
    slug.strip_prefix("urn:oncegate:problem:").unwrap()
}

const PROGRESS: &str =
    "event: message\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",\"params\":{}}\n\n";
const RESULT: &str = "data: {\"jsonrpc\":\"2.0\",\"id\":1,\ndata: \"result\":{\"content\":[]}}\n\n";

#[tokio::test(start_paused = true)]
async fn events_arrive_at_once_and_the_response_once_it_is_stored() {
    let (server, mut service) = service(settings());
    let events = server.will_respond("text/event-stream");
    let response = send(&mut service, &pay(1, "a")).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    assert_eq!(server.requests.lock().unwrap()[0]["accept-encoding"], "identity");
    let mut body = response.into_body();
    for piece in [": ping\n\n", PROGRESS] {
        events.send(Ok(piece)).unwrap();
        assert_eq!(next(&mut body).await.as_deref(), Some(piece));
    }
    assert_eq!(problem(&whole(send(&mut service, &pay(2, "a")).await).await), "request-in-progress");
    // The response arrives in pieces, and something follows it.
    let (start, end) = RESULT.split_at(20);
    events.send(Ok(start)).unwrap();
    events.send(Ok(end)).unwrap();
    assert_eq!(next(&mut body).await.as_deref(), Some(RESULT));
    // The stream is open, and the result is there already.
    let again = send(&mut service, &pay(3, "a")).await;
    assert_eq!(again.headers()["content-type"], "application/json");
    assert_eq!(again.headers()["idempotent-replayed"], "true");
    let again = whole(again).await;
    assert_eq!(again["id"], 3);
    let result = json!({"resultType": "complete", "_meta": {"oncegate/replayed": true}, "content": []});
    assert_eq!(again["result"], result);
    events.send(Ok(": end\n\n")).unwrap();
    drop(events);
    assert_eq!(next(&mut body).await.as_deref(), Some(": end\n\n"));
    assert_eq!(next(&mut body).await, None);
    assert_eq!(server.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_does_not_stop_the_call() {
    let (server, mut service) = service(settings());
    let events = server.will_respond("text/event-stream");
    drop(send(&mut service, &pay(1, "a")).await);
    for _ in 0..100 {
        events.send(Ok(PROGRESS)).unwrap();
    }
    // Longer than the time for which the rest of a response without a client is read.
    tokio::time::sleep(Duration::from_secs(3600)).await;
    events.send(Ok(RESULT)).unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let again = whole(send(&mut service, &pay(2, "a")).await).await;
    assert_eq!((&again["id"], &again["result"]["content"]), (&json!(2), &json!([])));
    assert_eq!(server.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_stream_without_a_response_has_an_unknown_outcome() {
    for (last, is_told) in [
        (Ok(PROGRESS), true),
        (Err("cut"), true),
        (Ok("data: {\"id\":1"), true),
        (Ok("id: 7\ndata:\n\n"), false),
    ] {
        let (server, mut service) = service(settings());
        let events = server.will_respond("text/event-stream");
        let mut body = send(&mut service, &pay(1, "a")).await.into_body();
        events.send(last).unwrap();
        drop(events);
        let mut seen = String::new();
        while let Some(piece) = next(&mut body).await {
            seen.push_str(&piece);
        }
        // A client that has the identifier of an event resumes the stream.
        let told = seen.split("data: ").last().and_then(|data| serde_json::from_str::<Value>(data).ok());
        let told = told.filter(|message| message["id"] == 1);
        assert_eq!(
            told.as_ref().map(|message| problem(message)),
            is_told.then_some("outcome-unknown"),
            "{seen}"
        );
        assert_eq!(
            problem(&whole(send(&mut service, &pay(2, "a")).await).await),
            "outcome-unknown",
            "{seen}"
        );
        assert_eq!(server.runs(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_response_that_is_too_large_reaches_the_client_and_is_not_executed_again() {
    let (server, mut service) = service(settings().with_max_response_body(100).unwrap());
    let events = server.will_respond("text/event-stream");
    let mut body = send(&mut service, &pay(1, "a")).await.into_body();
    let large =
        Box::leak(format!("data: {{\"id\":1,\"result\":{{\"x\":\"{}\"", "x".repeat(200)).into_boxed_str());
    events.send(Ok(large)).unwrap();
    assert_eq!(next(&mut body).await.as_deref(), Some(&*large));
    events.send(Ok("}}\n\n")).unwrap();
    drop(events);
    assert_eq!(next(&mut body).await.as_deref(), Some("}}\n\n"));
    assert_eq!(problem(&whole(send(&mut service, &pay(2, "a")).await).await), "replay-unavailable");
    assert_eq!(server.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_response_decides_whether_the_key_is_free() {
    const INPUT: &str =
        r#"{"jsonrpc":"2.0","id":1,"result":{"resultType":"input_required","inputRequests":{}}}"#;
    const MISMATCH: &str = r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32020,"message":"x"}}"#;
    const FAILED: &str = r#"{"jsonrpc":"2.0","id":1,"result":{"content":[],"isError":true}}"#;
    const INTERNAL: &str = r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32603,"message":"x"}}"#;
    let released =
        Profile::parse("ours", "title = \"Ours\"\nextends = \"mcp\"\nserver-errors = \"release\"").unwrap();
    let released = Settings::new(released).with_caller(CallerScope::single_tenant());
    for (message, kept, kept_if_released) in
        [(INPUT, false, false), (MISMATCH, true, false), (FAILED, true, false), (INTERNAL, true, false)]
    {
        for (settings, kept) in [(settings(), kept), (released.clone(), kept_if_released)] {
            for content_type in ["application/json", "text/event-stream"] {
                let (server, mut service) = service(settings.clone());
                for _ in 0..2 {
                    let pieces = server.will_respond(content_type);
                    let text = match content_type {
                        "application/json" => message,
                        _ => Box::leak(format!("data: {message}\n\n").into_boxed_str()),
                    };
                    pieces.send(Ok(text)).unwrap();
                }
                for id in [1, 1] {
                    send(&mut service, &pay(id, "a")).await.into_body().collect().await.unwrap();
                }
                assert_eq!(server.runs(), if kept { 1 } else { 2 }, "{content_type} {message}");
            }
        }
    }
}

/// Returns true if the second of two calls with one key gets the response to the first, which is this one.
async fn is_kept(settings: Settings, status: u16, fields: &[(&'static str, &str)], text: &str) -> bool {
    let (server, mut service) = service(settings);
    for _ in 0..2 {
        server.will_answer(status, fields, text);
    }
    for _ in 0..2 {
        send(&mut service, &pay(1, "a")).await.into_body().collect().await.unwrap();
    }
    server.runs() == 1
}

#[tokio::test(start_paused = true)]
async fn a_request_that_the_server_refuses_before_the_call_frees_the_key() {
    const MISMATCH: &str = r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32020,"message":"x"}}"#;
    const PARAMS: &str = r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32602,"message":"x"}}"#;
    const NO_SESSION: &str =
        r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32001,"message":"Session not found"}}"#;
    const INTERNAL: &str = r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32603,"message":"x"}}"#;
    const OTHER: &str = r#"{"jsonrpc":"2.0","id":2,"error":{"code":-32000,"message":"x"}}"#;
    for (status, text, expected) in [
        (400, MISMATCH, false),
        (400, PARAMS, true),
        (404, NO_SESSION, false),
        (406, "", false),
        (413, "{\"error\":\"too large\"}", false),
        (404, "<html>", true),
        (422, "{\"detail\":1}", true),
        (500, NO_SESSION, true),
        (400, INTERNAL, true),
        (404, INTERNAL, true),
        (404, "{\"error\":\"no order\"}", true),
        (413, INTERNAL, true),
        (413, OTHER, true),
        (413, RESULT_TEXT, true),
    ] {
        assert_eq!(is_kept(settings(), status, &[], text).await, expected, "{status} {text}");
    }
}

const RESULT_TEXT: &str = r#"{"jsonrpc":"2.0","id":1,"result":{"content":[]}}"#;

#[tokio::test(start_paused = true)]
async fn a_question_frees_the_key_only_in_a_response_that_is_nothing_else() {
    const ASKS: &str = r#""error":{"code":-32042,"message":"x","data":{"elicitations":[{}]}}"#;
    let of = |rest: &str| format!(r#"{{"jsonrpc":"2.0","id":1,{rest}}}"#);
    let input = |rest: &str| of(&format!(r#""result":{{"resultType":"input_required"{rest}}}"#));
    for (status, text, expected) in [
        (200, of(ASKS), false),
        (200, input(""), false),
        (200, of(&format!(r#"{ASKS},"result":{{"content":[]}}"#)), true),
        (500, of(ASKS), true),
        (400, of(ASKS), true),
        (200, of(r#""error":{"code":-32042,"message":"x"}"#), true),
        (200, input(r#","resultType":"complete""#), true),
        (200, of(r#""result":{"resultType":"complete","resultType":"input_required"}"#), true),
        (200, of(&format!(r#""error":{{"code":-32603}},{ASKS}"#)), true),
        (200, format!(r#"{{"id":2,"id":1,{ASKS}}}"#), true),
        (200, input(r#","content":[]"#), true),
        (500, input(""), true),
    ] {
        assert_eq!(is_kept(settings(), status, &[], &text).await, expected, "{status} {text}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_result_of_the_call_is_kept_whatever_its_status() {
    for status in [401, 403, 408, 425, 429] {
        assert!(is_kept(settings(), status, &[], RESULT_TEXT).await, "{status}");
        for other in [
            "",
            "{\"error\":\"slow down\"}",
            r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"x"}}"#,
            r#"{"jsonrpc":"2.0","id":1,"result":{"content":[],"isError":true}}"#,
        ] {
            assert!(!is_kept(settings(), status, &[], other).await, "{status} {other}");
        }
    }
}

const IN_PROGRESS: &str = "refused; problem=request-in-progress; retry=same-key";

/// The refusal of call 1 by another layer.
const REFUSED: &str = r#"{"jsonrpc":"2.0","id":1,"result":{"content":[],"isError":true,"_meta":{"oncegate/problem":{"type":"urn:oncegate:problem:request-in-progress","retry":"same-key"}}}}"#;

#[tokio::test(start_paused = true)]
async fn the_refusal_of_another_sidecar_behind_this_one_is_not_kept() {
    for (field, expected) in [
        (IN_PROGRESS, false),
        ("refused; problem=outcome-unknown; retry=stop", true),
        ("refused; problem=request-in-progress; retry=stop", true),
        ("refused; retry=same-key", true),
        ("refused; problem=; retry=same-key", true),
        ("retry=same-key", true),
    ] {
        let fields = [("idempotency-status", field)];
        assert_eq!(is_kept(settings(), 200, &fields, REFUSED).await, expected, "{field}");
    }
}

/// A service passes on the fields of an API that it called after its effect.
#[tokio::test(start_paused = true)]
async fn the_field_of_a_refusal_alone_does_not_free_the_key() {
    let fields = [("idempotency-status", IN_PROGRESS)];
    for text in [
        RESULT_TEXT,
        r#"{"jsonrpc":"2.0","id":1,"result":{"content":[],"isError":true}}"#,
        r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32603,"message":"x"}}"#,
        &REFUSED.replace("\"id\":1", "\"id\":2"),
        &REFUSED.replace("\"isError\":true", "\"isError\":false"),
        &REFUSED.replace("request-in-progress", "overloaded"),
        &REFUSED.replace("oncegate/problem", "problem"),
        "<html>",
    ] {
        for status in [200, 500] {
            assert!(is_kept(settings(), status, &fields, text).await, "{status} {text}");
        }
    }
}

/// The refusals that a layer sends, as another layer gets them.
#[tokio::test(start_paused = true)]
async fn every_refusal_that_advises_to_retry_frees_the_key_of_a_layer_in_front() {
    let linked = || settings().with_problem_base_url("https://developer.example/how#").unwrap();
    let mut seen = Vec::new();
    for (inner, begins, body) in [
        (settings(), true, pay(1, "a")),
        (linked(), true, pay(1, "a")),
        (
            settings().with_required_key(true),
            false,
            json!({"id": 1, "method": "tools/call", "params": {"name": "pay"}}),
        ),
        // The body is not read, so the refusal has no id.
        (settings().with_max_request_body(10).unwrap(), false, pay(1, "a")),
    ] {
        let (server, mut inner) = service(inner);
        let events = server.will_respond("text/event-stream");
        if begins {
            drop(send(&mut inner, &pay(1, "a")).await);
        }
        let refusal = send(&mut inner, &body).await;
        drop(events);
        let (status, fields) = (refusal.status().as_u16(), refusal.headers().clone());
        let field = fields["idempotency-status"].to_str().unwrap();
        let text = whole(refusal).await.to_string();
        assert!(
            !is_kept(settings(), status, &[("idempotency-status", field)], &text).await,
            "{field} {text}"
        );
        seen.push((status, field.split("; ").nth(1).unwrap().to_owned()));
    }
    let expected = [
        (200, "problem=request-in-progress"),
        (200, "problem=request-in-progress"),
        (200, "problem=key-missing"),
        (413, "problem=request-too-large"),
    ];
    assert_eq!(seen, expected.map(|(status, problem)| (status, problem.to_owned())));
    // A layer without memory for the body.
    let overloaded = r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32603,"message":"x","data":{"type":"urn:oncegate:problem:overloaded"}}}"#;
    let fields = [("idempotency-status", "refused; problem=overloaded; retry=same-key")];
    assert!(!is_kept(settings(), 503, &fields, overloaded).await);
    assert!(is_kept(settings(), 503, &[], overloaded).await);
    assert!(is_kept(settings(), 200, &fields, overloaded).await);
}

#[tokio::test(start_paused = true)]
async fn an_intent_is_one_call_whatever_the_spelling_of_its_arguments_and_its_query() {
    let tools = ToolPolicies::default().with(ToolPolicy::ByIntent, ["pay"]).unwrap();
    let (server, mut service) = service(settings().with_tools(tools));
    for (path, arguments) in [
        ("/mcp", r#"{"a":0.30000000000000004,"b":"é"}"#),
        ("/mcp?x=1", "{\"b\": \"\\u00e9\", \"a\": 0.30000000000000004}"),
    ] {
        let pieces = server.will_respond("application/json");
        pieces.send(Ok(r#"{"jsonrpc":"2.0","id":1,"result":{"content":[]}}"#)).unwrap();
        drop(pieces);
        let params = format!(r#"{{"name":"pay","arguments":{arguments},"_meta":{{"runId":"r"}}}}"#);
        let body = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{params}}}"#);
        let answer =
            whole(service.call(Request::post(path).body(Full::from(body)).unwrap()).await.unwrap()).await;
        assert_eq!(answer["result"]["content"], json!([]), "{answer}");
    }
    assert_eq!(server.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_service_may_say_that_any_response_is_kept() {
    const MISMATCH: &str =
        r#"{"jsonrpc":"2.0","id":1,"error":{"code":-32042,"message":"x","data":{"elicitations":[{}]}}}"#;
    for (content_type, text) in
        [("application/json", MISMATCH), ("text/event-stream", &*format!("data: {MISMATCH}\n\n").leak())]
    {
        let (server, mut service) = service(settings());
        let pieces = server.will_respond(content_type);
        let directive = "replay".parse().unwrap();
        server.responses.lock().unwrap()[0].headers_mut().insert("idempotency-store", directive);
        pieces.send(Ok(text)).unwrap();
        drop(pieces);
        for _ in 0..2 {
            send(&mut service, &pay(1, "a")).await.into_body().collect().await.unwrap();
        }
        assert_eq!(server.runs(), 1, "{content_type}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_session_is_not_ended_while_a_call_runs_in_it() {
    let (server, mut service) = service(settings());
    let events = server.will_respond("text/event-stream");
    let with_session = |method: &str, body: &Value| {
        let request = Request::builder().method(method).uri("/mcp").header("mcp-session-id", "s");
        request.body(Full::from(body.to_string())).unwrap()
    };
    let response = service.call(with_session("POST", &pay(1, "a"))).await.unwrap();
    drop(response);
    let refused = service.call(with_session("DELETE", &Value::Null)).await.unwrap();
    assert_eq!(refused.status(), StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(server.runs(), 1);
    events.send(Ok(RESULT)).unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(whole(send(&mut service, &pay(2, "a")).await).await["result"]["content"], json!([]));
    drop(server.will_respond("application/json"));
    assert_eq!(service.call(with_session("DELETE", &Value::Null)).await.unwrap().status(), StatusCode::OK);
    assert_eq!(server.runs(), 2);
}

/// Of several lines, and of two spellings of their name, each server takes its own.
#[tokio::test(start_paused = true)]
async fn a_session_is_not_ended_under_another_spelling_while_a_call_runs_in_it() {
    type Lines = &'static [(&'static str, &'static str)];
    const PLAIN: &str = "mcp-session-id";
    const FOLDED: &str = "mcp_session_id";
    let with = |method: &str, lines: Lines, body: &Value| {
        let request = Request::builder().method(method).uri("/mcp");
        let request = lines.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        request.body(Full::from(body.to_string())).unwrap()
    };
    let cases: [(Lines, &str, Lines, bool); 9] = [
        (&[(PLAIN, "s")], "DELETE", &[(PLAIN, "x"), (PLAIN, "s")], true),
        (&[(PLAIN, "s")], "DELETE", &[(PLAIN, "s"), (PLAIN, "x")], true),
        (&[(PLAIN, "s")], "DELETE", &[(FOLDED, "s")], true),
        (&[(PLAIN, "s")], "DELETE", &[(PLAIN, "x"), (FOLDED, "s")], true),
        (&[(PLAIN, "s")], "DELETE", &[(PLAIN, "x, s")], true),
        (&[(PLAIN, "s")], "delete", &[(PLAIN, "s")], true),
        (&[(PLAIN, "s")], "POST", &[(PLAIN, "s"), ("x-http-method-override", "DELETE")], true),
        (&[(PLAIN, "x"), (PLAIN, "y"), (FOLDED, "s")], "DELETE", &[(PLAIN, "s")], true),
        (&[(PLAIN, "s")], "DELETE", &[(PLAIN, "x"), (FOLDED, "y")], false),
    ];
    for (lines, method, ending, is_refused) in cases {
        let (server, mut service) = service(settings());
        let events = server.will_respond("text/event-stream");
        drop(service.call(with("POST", lines, &pay(1, "a"))).await.unwrap());
        drop(server.will_respond("application/json"));
        let answer = service.call(with(method, ending, &Value::Null)).await.unwrap();
        let expected = if is_refused { StatusCode::METHOD_NOT_ALLOWED } else { StatusCode::OK };
        assert_eq!(answer.status(), expected, "{lines:?} {method} {ending:?}");
        assert_eq!(server.runs(), if is_refused { 1 } else { 2 }, "{lines:?} {method} {ending:?}");
        // The session can be ended after the call.
        events.send(Ok(RESULT)).unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        if is_refused {
            let ended = service.call(with(method, ending, &Value::Null)).await.unwrap();
            assert_eq!(ended.status(), StatusCode::OK, "{lines:?} {method} {ending:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_response_to_another_request_is_not_the_result() {
    let (server, mut service) = service(settings());
    let events = server.will_respond("text/event-stream");
    let mut body = send(&mut service, &pay(1, "a")).await.into_body();
    for other in [
        "data: {\"id\":null,\"error\":{\"code\":-32042}}\n\n",
        "data: {\"id\":999,\"result\":{\"content\":[1]}}\n\n",
    ] {
        events.send(Ok(other)).unwrap();
        assert_eq!(next(&mut body).await.as_deref(), Some(other));
        assert_eq!(problem(&whole(send(&mut service, &pay(2, "a")).await).await), "request-in-progress");
    }
    let batch = "data: [{\"method\":\"a\"},{\"id\":1,\"result\":{\"content\":[]}}]\n\n";
    events.send(Ok(batch)).unwrap();
    assert_eq!(next(&mut body).await.as_deref(), Some(batch));
    let again = whole(send(&mut service, &pay(3, "a")).await).await;
    assert_eq!((&again["id"], &again["result"]["content"]), (&json!(3), &json!([])));

    // A success that is no response to the call at all.
    let pieces = server.will_respond("text/html");
    pieces.send(Ok("<html>")).unwrap();
    drop(pieces);
    send(&mut service, &pay(1, "c")).await.into_body().collect().await.unwrap();
    assert_eq!(problem(&whole(send(&mut service, &pay(2, "c")).await).await), "replay-unavailable");

    let pieces = server.will_respond("application/json");
    pieces.send(Ok(r#"{"id":999,"result":{}}"#)).unwrap();
    drop(pieces);
    send(&mut service, &pay(1, "b")).await.into_body().collect().await.unwrap();
    assert_eq!(problem(&whole(send(&mut service, &pay(2, "b")).await).await), "replay-unavailable");
    assert_eq!(server.runs(), 3);
}

#[tokio::test(start_paused = true)]
async fn an_encoded_response_is_not_replayed_with_the_id_of_another_request() {
    let (server, mut service) = service(settings());
    let pieces = server.will_respond("application/json");
    server.responses.lock().unwrap()[0].headers_mut().insert("content-encoding", "br".parse().unwrap());
    pieces.send(Ok("?")).unwrap();
    drop(pieces);
    send(&mut service, &pay(1, "a")).await.into_body().collect().await.unwrap();
    assert_eq!(problem(&whole(send(&mut service, &pay(2, "a")).await).await), "replay-unavailable");
}

#[tokio::test(start_paused = true)]
async fn arguments_are_compared_even_if_they_have_no_canonical_form() {
    let (server, mut service) = service(settings());
    for id in [1, 2, 3] {
        let amount = if id == 3 { "9007199254740995" } else { "9007199254740993" };
        let pieces = server.will_respond("application/json");
        pieces.send(Ok(r#"{"jsonrpc":"2.0","id":1,"result":{"content":[]}}"#)).unwrap();
        drop(pieces);
        let body = pay(id, "a").to_string().replace("\"amount\":1", &format!("\"amount\":{amount}"));
        let request = Request::post("/mcp").body(Full::from(body)).unwrap();
        let answer = whole(service.call(request).await.unwrap()).await;
        match id {
            1 => assert_eq!(answer["result"], json!({"content": []})),
            2 => assert_eq!(answer["result"]["_meta"]["oncegate/replayed"], true),
            _ => assert_eq!(problem(&answer), "key-reused"),
        }
    }
    assert_eq!(server.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn calls_without_a_key_are_refused_if_one_is_required_and_other_messages_pass() {
    let tools = ToolPolicies::default().with(ToolPolicy::ReadOnly, ["get_*"]).unwrap();
    let (server, mut service) = service(settings().with_required_key(true).with_tools(tools));
    let call =
        |tool: &str| json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool}});
    let refused = whole(send(&mut service, &call("pay")).await).await;
    assert_eq!(problem(&refused), "key-missing");
    let text = refused["result"]["content"][0]["text"].as_str().unwrap();
    assert!(text.contains("/params/_meta/idempotencyKey"), "{text}");
    for (at, message) in
        [call("get_order"), json!({"jsonrpc": "2.0", "id": 2, "method": "tools/list"})].iter().enumerate()
    {
        drop(server.will_respond("application/json"));
        assert_eq!(send(&mut service, message).await.status(), StatusCode::OK);
        assert_eq!(server.runs(), at + 1);
    }
    let cancelled =
        json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}});
    assert_eq!(send(&mut service, &cancelled).await.status(), StatusCode::ACCEPTED);
    assert_eq!(server.runs(), 2);
}

#[tokio::test]
async fn policies_that_protect_nothing_are_refused() {
    let layer = || IdempotencyLayer::new(Engine::new(MemoryStore::new(ManualClock::at_millis(1))));
    let tools = |policy| ToolPolicies::default().with(policy, ["pay"]).unwrap();
    for settings in [
        Settings::default().with_tools(tools(ToolPolicy::ReadOnly)),
        Settings::new(Profile::named("mcp").unwrap()).with_tools(tools(ToolPolicy::ByIntent)),
    ] {
        let error = layer().with_settings(settings).unwrap_err().to_string();
        assert!(error.contains("intent-tools"), "{error}");
    }
    assert!(layer().with_settings(settings().with_tools(tools(ToolPolicy::ByIntent))).is_ok());
}
