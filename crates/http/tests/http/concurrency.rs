//! The number of requests with a key that run at the same time, and the bytes that their responses hold together.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use oncegate_core::MemoryStore;
use oncegate_engine::Engine;
use oncegate_http::{
    Authorization, Authorize, CallerScope, Idempotency, IdempotencyLayer, RequestBody, ResponseBody, Settings,
};
use oncegate_testkit::ManualClock;
use tokio::sync::Notify;
use tower_layer::Layer;
use tower_service::Service;

/// Answers with as many bytes as the path names, or waits until the test lets it continue.
#[derive(Clone, Default)]
struct Handler {
    go_on: Arc<Notify>,
    runs: Arc<AtomicUsize>,
}

impl Service<Request<RequestBody<Full<Bytes>>>> for Handler {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody<Full<Bytes>>>) -> Self::Future {
        let Self { go_on, runs } = self.clone();
        Box::pin(async move {
            runs.fetch_add(1, Ordering::Relaxed);
            let path = request.uri().path().trim_matches('/').to_owned();
            if path == "waits" {
                go_on.notified().await;
            }
            Ok(Response::new(Full::from(vec![b'x'; path.parse().unwrap_or(2)])))
        })
    }
}

fn layer() -> IdempotencyLayer {
    IdempotencyLayer::new(Engine::new(MemoryStore::new(ManualClock::at_millis(1))))
}

type ServiceResponse = Response<ResponseBody<Full<Bytes>>>;

async fn send(service: &mut Idempotency<Handler>, path: &str, caller: &str, key: &str) -> ServiceResponse {
    let mut request = Request::post(path).header("idempotency-key", key);
    if !caller.is_empty() {
        request = request.header("authorization", caller);
    }
    service.call(request.body(Full::default()).unwrap()).await.unwrap()
}

#[track_caller]
fn is_overloaded(response: &ServiceResponse) {
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.headers()["retry-after"], "1");
}

/// Sends a request that waits, and hangs up.
async fn hang_up(service: &mut Idempotency<Handler>, caller: &str, key: &str) {
    let sent = tokio::time::timeout(Duration::from_secs(1), send(service, "/waits", caller, key)).await;
    assert!(sent.is_err(), "{:?}", sent.unwrap());
}

#[tokio::test(start_paused = true)]
async fn handlers_of_clients_that_hung_up_count_until_they_end() {
    let handler = Handler::default();
    let layer = layer().with_max_in_flight(3).unwrap();
    let mut service = layer.layer(handler.clone());
    // A clone of the service, as for another thread, counts with it.
    let mut other = layer.copy_for_core().layer(handler.clone());
    hang_up(&mut service, "1", "1").await;
    hang_up(&mut other, "2", "2").await;
    hang_up(&mut service, "3", "3").await;
    is_overloaded(&send(&mut service, "/2", "4", "4").await);
    is_overloaded(&send(&mut other, "/2", "4", "4").await);
    assert_eq!(handler.runs.load(Ordering::Relaxed), 3);
    // A request without a key is not detached, so it does not count.
    let plain = Request::post("/2").body(Full::default()).unwrap();
    assert_eq!(service.call(plain).await.unwrap().status(), StatusCode::OK);
    handler.go_on.notify_waiters();
    tokio::time::sleep(Duration::from_secs(1)).await;
    // The refused request claimed no key.
    assert_eq!(send(&mut service, "/2", "4", "4").await.status(), StatusCode::OK);
    assert_eq!(send(&mut service, "/waits", "1", "1").await.headers()["idempotent-replayed"], "true");
}

#[tokio::test(start_paused = true)]
async fn one_caller_gets_no_more_than_its_share() {
    let handler = Handler::default();
    let layer = layer().with_max_in_flight_per_caller(2).unwrap();
    let mut service = layer.copy_for_core().layer(handler.clone());
    let mut other = layer.copy_for_core().layer(handler.clone());
    for key in ["1", "2"] {
        hang_up(&mut service, "ada", key).await;
    }
    for service in [&mut service, &mut other] {
        is_overloaded(&send(service, "/2", "ada", "3").await);
        assert_eq!(send(service, "/2", "bob", "3").await.status(), StatusCode::OK);
        // Callers without a credential count as one caller.
        assert_eq!(send(service, "/2", "", "3").await.status(), StatusCode::OK);
    }
    for key in ["1", "2"] {
        hang_up(&mut other, "", key).await;
    }
    is_overloaded(&send(&mut service, "/2", "", "4").await);
    handler.go_on.notify_waiters();
}

#[tokio::test(start_paused = true)]
async fn a_single_caller_may_use_the_whole_limit() {
    let settings = Settings::default().with_caller(CallerScope::single_tenant());
    let layer = layer().with_settings(settings).unwrap().with_max_in_flight_per_caller(1).unwrap();
    let mut service = layer.layer(Handler::default());
    for key in ["1", "2", "3"] {
        hang_up(&mut service, "ada", key).await;
    }
}

#[test]
fn a_limit_of_zero_is_refused() {
    assert!(layer().with_max_in_flight(0).is_err());
    assert!(layer().with_max_in_flight_per_caller(0).is_err());
    assert!(layer().with_max_in_flight(1).is_ok());
}

#[tokio::test(start_paused = true)]
async fn replays_are_sent_while_the_response_budget_has_space() {
    let handler = Handler::default();
    let mut service = layer().with_response_budget(100_000).layer(handler.clone());
    for (len, key) in [("/30000", "1"), ("/10", "2")] {
        let first = send(&mut service, len, "", key).await;
        assert_eq!(
            first.into_body().collect().await.unwrap().to_bytes().len(),
            len[1..].parse::<usize>().unwrap()
        );
    }
    let mut held: Vec<_> = Vec::new();
    for _ in 0..3 {
        let replay = send(&mut service, "/30000", "", "1").await;
        assert_eq!(replay.headers()["idempotent-replayed"], "true");
        held.push(replay.into_body());
    }
    is_overloaded(&send(&mut service, "/30000", "", "1").await);
    assert_eq!(send(&mut service, "/10", "", "2").await.status(), StatusCode::OK);
    // A body that was read but is still referenced, as by a connection that has not written it yet, is held.
    let frame = held.pop().unwrap().frame().await.unwrap().unwrap().into_data().unwrap();
    is_overloaded(&send(&mut service, "/30000", "", "1").await);
    drop(frame);
    assert_eq!(send(&mut service, "/30000", "", "1").await.status(), StatusCode::OK);
    assert_eq!(handler.runs.load(Ordering::Relaxed), 2);
}

#[tokio::test(start_paused = true)]
async fn a_finished_request_gets_its_response_and_a_full_budget_blocks_new_ones() {
    let handler = Handler::default();
    let mut service = layer().with_response_budget(100_000).layer(handler.clone());
    let large = send(&mut service, "/150000", "", "1").await;
    assert_eq!(large.status(), StatusCode::OK);
    is_overloaded(&send(&mut service, "/2", "", "2").await);
    assert_eq!(handler.runs.load(Ordering::Relaxed), 1);
    assert_eq!(large.into_body().collect().await.unwrap().to_bytes().len(), 150_000);
    assert_eq!(send(&mut service, "/2", "", "2").await.status(), StatusCode::OK);
    // The response is stored, but its replay would be larger than the whole budget.
    is_overloaded(&send(&mut service, "/150000", "", "1").await);
}

/// Allows each replay after the test lets it continue.
#[derive(Clone, Default)]
struct Judge {
    go_on: Arc<Notify>,
    questions: Arc<AtomicUsize>,
}

impl Authorize for Judge {
    fn authorize<'a>(&'a self, _: &'a Parts) -> Pin<Box<dyn Future<Output = Authorization> + Send + 'a>> {
        Box::pin(async move {
            self.questions.fetch_add(1, Ordering::Relaxed);
            self.go_on.notified().await;
            Authorization::Allowed
        })
    }
}

#[tokio::test(start_paused = true)]
async fn a_replay_that_waits_for_a_decision_counts_for_the_budgets_and_limits() {
    let (handler, judge) = (Handler::default(), Judge::default());
    let mut service = layer()
        .with_settings(Settings::default().with_authorize(judge.clone()))
        .unwrap()
        .with_response_budget(100_000)
        .with_request_budget(50_000)
        .unwrap()
        .with_max_in_flight(2)
        .unwrap()
        .layer(handler.clone());
    let large_body = |path: &str, key: &str| {
        let request = Request::post(path).header("idempotency-key", key);
        request.body(Full::from(vec![b'x'; 30_000])).unwrap()
    };
    for (path, key) in [("/60000", "1"), ("/10", "2")] {
        drop(service.call(large_body(path, key)).await.unwrap());
    }
    let waiting = tokio::spawn(service.call(large_body("/60000", "1")));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(judge.questions.load(Ordering::Relaxed), 1);
    // The response is in memory, so the service is not asked about another one for which there is no space.
    let refused = tokio::time::timeout(Duration::from_secs(1), service.call(large_body("/60000", "1"))).await;
    is_overloaded(&refused.expect("no question").unwrap());
    assert_eq!(judge.questions.load(Ordering::Relaxed), 1);
    // The body of the request is not.
    assert_eq!(service.call(large_body("/9", "3")).await.unwrap().status(), StatusCode::OK);
    let other = tokio::spawn(service.call(large_body("/10", "2")));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(judge.questions.load(Ordering::Relaxed), 2);
    is_overloaded(&send(&mut service, "/2", "", "4").await);
    judge.go_on.notify_waiters();
    for (replay, len) in [(waiting, 60_000), (other, 10)] {
        let body = replay.await.unwrap().unwrap().into_body();
        assert_eq!(body.collect().await.unwrap().to_bytes().len(), len);
    }
    assert_eq!(send(&mut service, "/2", "", "4").await.status(), StatusCode::OK);
    assert_eq!(handler.runs.load(Ordering::Relaxed), 4);
}
