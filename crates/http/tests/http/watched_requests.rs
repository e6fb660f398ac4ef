//! A request that carries a watch: its phases, its outcome, and the end of the layer's interest in it.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use oncegate_core::MemoryStore;
use oncegate_engine::Engine;
use oncegate_http::{
    IdempotencyLayer, RequestBody, RequestEvent, RequestPhase, RequestWatch, Settings, TraceRef,
    WatchedRequest,
};
use oncegate_testkit::{ManualClock, until};
use tokio::sync::Notify;
use tower_layer::Layer as _;
use tower_service::Service;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

/// Answers at once, or on `/waits` when the test says so.
#[derive(Clone, Default)]
struct Handler {
    go_on: Arc<Notify>,
}

impl Service<Request<RequestBody<Full<Bytes>>>> for Handler {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody<Full<Bytes>>>) -> Self::Future {
        // The service behind the layer sees the watch, too.
        assert!(request.extensions().get::<WatchedRequest>().is_some());
        let go_on = self.go_on.clone();
        Box::pin(async move {
            if request.uri().path() == "/waits" {
                go_on.notified().await;
            }
            Ok(Response::new(Full::default()))
        })
    }
}

/// Notes what the layer reports, also that it has dropped its last reference.
#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<String>>>);

impl Notes {
    fn add(&self, note: String) {
        self.0.lock().unwrap().push(note);
    }

    fn all(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

struct Watch(Notes);

impl RequestWatch for Watch {
    fn begins(&self, phase: RequestPhase) {
        self.0.add(format!("begins {phase:?}"));
    }

    fn ends(&self, phase: RequestPhase) {
        self.0.add(format!("ends {phase:?}"));
    }

    fn finished(&self, event: &RequestEvent<'_>) {
        self.0.add(format!("{} {} {}", event.method, event.disposition.as_str(), event.tag));
    }

    fn trace(&self) -> Option<TraceRef<'_>> {
        Some(TraceRef { trace_id: TRACE, is_sampled: true })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.add("dropped".to_owned());
    }
}

fn request(path: &str, key: Option<&str>, notes: &Notes) -> Request<Full<Bytes>> {
    let mut request = Request::post(path);
    if let Some(key) = key {
        request = request.header("idempotency-key", key);
    }
    let mut request = request.body(Full::default()).unwrap();
    request.extensions_mut().insert(WatchedRequest(Arc::new(Watch(notes.clone()))));
    request
}

fn layer(observed: &Notes) -> IdempotencyLayer {
    let observed = observed.clone();
    let layer = IdempotencyLayer::new(Engine::new(MemoryStore::new(ManualClock::at_millis(1))));
    layer.with_route(None, "/tagged", Settings::default().with_tag(7)).unwrap().with_observer(
        move |event: &RequestEvent<'_>| {
            let trace = event.trace.map_or("none", |trace| trace.trace_id).to_owned();
            observed.add(format!("{} {trace}", event.disposition.as_str()));
        },
    )
}

#[tokio::test]
async fn a_watch_gets_the_phases_and_the_outcome() {
    let observed = Notes::default();
    let mut service = layer(&observed).layer(Handler::default());
    for (path, key, expected) in [
        (
            "/tagged",
            Some("a"),
            &["begins Claim", "ends Claim", "begins Settle", "ends Settle", "POST executed 7", "dropped"][..],
        ),
        ("/tagged", Some("a"), &["begins Claim", "ends Claim", "POST replayed 7", "dropped"]),
        ("/", None, &["POST unprotected 0", "dropped"]),
        ("/", Some(" "), &["POST key-invalid 0", "dropped"]),
    ] {
        let notes = Notes::default();
        service.call(request(path, key, &notes)).await.unwrap();
        assert_eq!(notes.all(), expected);
    }
    let expected =
        ["executed", "replayed", "unprotected", "key-invalid"].map(|name| format!("{name} {TRACE}"));
    assert_eq!(observed.all(), expected);
}

/// A client that leaves does not end the watch: the execution goes on in another task, and so does the watch.
#[tokio::test]
async fn a_watch_follows_an_execution_whose_client_left() {
    let handler = Handler::default();
    let mut service = layer(&Notes::default()).layer(handler.clone());
    let notes = Notes::default();
    {
        let response = service.call(request("/waits", Some("a"), &notes));
        tokio::select! {
            biased;
            _ = response => panic!("the handler waits"),
            () = tokio::task::yield_now() => {}
        }
    }
    assert_eq!(notes.all(), ["begins Claim", "ends Claim"]);
    handler.go_on.notify_one();
    until("the execution has ended", async || notes.all().last().is_some_and(|note| note == "dropped")).await;
    let rest = ["begins Settle", "ends Settle", "POST executed 0", "dropped"];
    assert_eq!(notes.all()[2..], rest);
}
