//! Calls of gRPC over HTTP/2: refusals have the form that its clients read.

use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Body as _;
use hyper_util::rt::{TokioExecutor, TokioIo};
use oncegate_servers::unused_port;
use oncegate_testkit::{Latch, Operation, until};
use tokio::net::TcpStream;

use crate::backend::{BodyPart, MARK, Script};
use crate::client::within;
use crate::plan::Plan;
use crate::table::{Case, Target};
use crate::world::{Deployment, World};

pub(super) fn cases() -> Vec<Case> {
    let required = Plan { require_key: true, max_request_body: Some(64), ..Plan::default() };
    let mut all = cases! {
        "grpc-refusals": "a call is refused with a status of gRPC and nothing else"
            .given(required.clone())
            => run (refusals);
        "grpc-refusals-stripe": "gRPC: a refusal does not depend on the profile"
            .given(Plan { profile: "stripe", ..required })
            => run (refusals);
        "grpc-failed": "a service's own response of trailers only passes unchanged"
            => run (failed);
        "grpc-in-progress": "a call that is being processed gets a status with the time to try again"
            => run (in_progress);
        "grpc-unknown": "a call with an unknown outcome is UNKNOWN"
            => run (unknown);
        "grpc-store-unavailable": "without the store: UNAVAILABLE, with the time to try again"
            .only_layer("the sidecar's store cannot be told to fail")
            => run (store_down);
        "grpc-unreachable": "a call that did not reach the service is UNAVAILABLE"
            .only_sidecar("the service behind the layer is in its process")
            => start (unreachable);
        "grpc-not-json": "other requests over HTTP/2 get problem details"
            .given(Plan { require_key: true, ..Plan::default() })
            => run (not_json);
    };
    for case in &mut all {
        case.excluded.push((Target::Libraries, "no library has refusals in the form of gRPC"));
    }
    all
}

/// The result of a call.
#[derive(Debug)]
struct Response {
    status: StatusCode,
    fields: HeaderMap,
    /// `true` if the stream ended with the headers.
    trailers_only: bool,
    body: Bytes,
    trailers: HeaderMap,
}

impl Response {
    fn get(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(|value| value.to_str().expect("ASCII"))
    }
}

async fn call(world: &World, media_type: &str, key: Option<&str>, body: &str, script: Script) -> Response {
    let stream = TcpStream::connect(world.address()).await.expect("a connection");
    let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
    let (mut client, connection) = handshake.await.expect("HTTP/2");
    tokio::spawn(connection);
    let (name, order) = world.backend.order(script);
    let mut request = Request::post("http://cases.test/payments.Payments/Pay")
        .header("te", "trailers")
        .header("content-type", media_type)
        .header(name, order);
    if let Some(key) = key {
        request = request.header("idempotency-key", key);
    }
    let request = request.body(Full::<Bytes>::from(body.to_owned())).expect("a request");
    let response = within(client.send_request(request)).await.expect("in time").expect("a response");
    let (head, body) = response.into_parts();
    let trailers_only = body.is_end_stream();
    let body = within(body.collect()).await.expect("in time").expect("a whole response");
    let trailers = body.trailers().cloned().unwrap_or_default();
    Response { status: head.status, fields: head.headers, trailers_only, body: body.to_bytes(), trailers }
}

const GRPC: &str = "application/grpc";

async fn pay(world: &World, key: Option<&str>, body: &str) -> Response {
    call(world, GRPC, key, body, paid()).await
}

/// A service's own response to a call.
fn paid() -> Script {
    let message = [&b"\0\0\0\0\x16"[..], MARK.as_bytes()].concat();
    Script::pieces(200, GRPC, vec![BodyPart::Data(message.into())])
        .trailer("grpc-status", "0")
        .field("trailer", "grpc-status")
}

fn assert_refused(response: &Response, slug: &str, code: u8, pushback: Option<&str>) {
    assert_eq!(response.status, StatusCode::OK, "{response:?}");
    assert!(response.trailers_only && response.body.is_empty(), "{response:?}");
    assert_eq!(response.get("content-type"), Some(GRPC), "{response:?}");
    assert_eq!(response.get("cache-control"), Some("no-store"), "{response:?}");
    assert_eq!(response.get("grpc-status"), Some(&*code.to_string()), "{response:?}");
    assert_eq!(response.get("grpc-retry-pushback-ms"), pushback, "{response:?}");
    let message = response.get("grpc-message").expect("a message");
    assert!(message.starts_with(&format!("urn:oncegate:problem:{slug}: ")), "{response:?}");
    assert!(!message.contains(MARK) && message.len() > 40, "{response:?}");
    assert_eq!(response.get("idempotent-replayed"), None, "{response:?}");
}

async fn refusals(world: World) {
    assert_refused(&pay(&world, None, "1").await, "key-missing", 3, Some("-1"));
    assert_refused(&pay(&world, Some(&"k".repeat(256)), "1").await, "key-invalid", 3, Some("-1"));
    assert_refused(&pay(&world, Some("a"), &"1".repeat(65)).await, "request-too-large", 3, Some("-1"));
    assert_eq!(world.backend.effects(), 0);
    let first = pay(&world, Some("a"), "1").await;
    assert_eq!((first.status, first.body.len()), (StatusCode::OK, 5 + MARK.len()), "{first:?}");
    assert_eq!((first.trailers["grpc-status"].as_bytes(), first.get("grpc-status")), (&b"0"[..], None));
    // The refusal contains nothing of the first response, which was not kept, not even its status.
    let again = pay(&world, Some("a"), "1").await;
    assert_refused(&again, "replay-unavailable", 2, Some("-1"));
    assert_eq!(again.get("idempotency-key"), Some("a"), "{again:?}");
    let other = pay(&world, Some("a"), "2").await;
    assert_refused(&other, "key-reused", 9, Some("-1"));
    for (media_type, answered) in [
        ("application/grpc+proto", GRPC),
        ("Application/gRPC; charset=x", GRPC),
        ("application/grpc-web+proto", "application/grpc-web"),
        ("application/grpc-web-text", "application/grpc-web-text"),
    ] {
        let response = call(&world, media_type, Some(&"k".repeat(256)), "1", paid()).await;
        assert_eq!((response.get("content-type"), response.get("grpc-status")), (Some(answered), Some("3")));
        assert!(response.trailers_only, "{response:?}");
    }
    assert_eq!(world.backend.effects(), 1);
}

async fn failed(world: World) {
    let script = || Script::empty(200).field("content-type", GRPC).field("grpc-status", "5");
    for key in [None, Some("a")] {
        let response = call(&world, GRPC, key, "1", script()).await;
        assert_eq!(response.get("grpc-status"), Some("5"), "{response:?}");
        assert!(response.trailers_only, "{response:?}");
    }
    assert_refused(&pay(&world, Some("a"), "1").await, "replay-unavailable", 2, Some("-1"));
    assert_eq!(world.backend.effects(), 2);
}

async fn in_progress(world: World) {
    let done = Latch::new();
    let (first, ()) = tokio::join!(call(&world, GRPC, Some("a"), "1", paid().held(&done)), async {
        world.backend.until_effects(1).await;
        let response = pay(&world, Some("a"), "1").await;
        let seconds: u64 = response.get("retry-after").and_then(|text| text.parse().ok()).expect("seconds");
        let millis = (seconds * 1000).to_string();
        assert!(seconds >= 1);
        assert_refused(&response, "request-in-progress", 10, Some(&millis));
        done.open();
    });
    assert_eq!(first.trailers["grpc-status"], "0");
}

async fn unknown(world: World) {
    let script = if world.deployment == Deployment::Layer { Script::panics() } else { Script::fails() };
    for script in [script, paid()] {
        let response = call(&world, GRPC, Some("a"), "1", script).await;
        assert_refused(&response, "outcome-unknown", 2, Some("-1"));
    }
    assert_eq!(world.backend.effects(), 1);
    if world.deployment == Deployment::Sidecar {
        // Without a key it may have taken effect as well, and a retry would not be safe.
        let response = call(&world, GRPC, None, "1", Script::fails()).await;
        assert_refused(&response, "upstream-unanswered", 2, Some("-1"));
    }
}

async fn store_down(world: World) {
    world.store_goes_away().await;
    let response = pay(&world, Some("a"), "1").await;
    assert_refused(&response, "store-unavailable", 14, Some("1000"));
    world.faults.heal();
    until("the store is back", async || pay(&world, Some("a"), "1").await.get("grpc-status").is_none()).await;
    assert_eq!(world.backend.effects(), 1);
    world.faults.always(Operation::Claim, oncegate_testkit::Fault::Corrupt);
    assert_refused(&pay(&world, Some("b"), "1").await, "record-corrupt", 15, Some("-1"));
}

async fn unreachable(mut world: World) {
    let (_socket, address) = unused_port().expect("a port");
    world.start_in_front_of(address).await;
    for key in [Some("a"), Some("a"), None] {
        assert_refused(&pay(&world, key, "1").await, "upstream-unreachable", 14, None);
    }
}

async fn not_json(world: World) {
    for media_type in ["application/json", "application/grp", "text/plain"] {
        let response = call(&world, media_type, None, "1", Script::default()).await;
        assert_eq!(response.status, StatusCode::BAD_REQUEST, "{response:?}");
        assert_eq!(response.get("content-type"), Some("application/problem+json"), "{response:?}");
        assert_eq!(response.get("grpc-status"), None, "{response:?}");
    }
}
