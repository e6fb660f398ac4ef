//! The budget of request bodies is given back, whatever the end of the request is. The limits hold for bodies that lie about
//! their length.

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt as _, Full};
use oncegate_core::MemoryStore;
use oncegate_engine::Engine;
use oncegate_http::{Idempotency, IdempotencyLayer, RequestBody, ResponseBody, Settings};
use oncegate_testkit::ManualClock;
use tower_layer::Layer;
use tower_service::Service;

const BUDGET: usize = 200_000;

#[derive(Clone, Copy)]
enum End {
    Ends,
    Breaks,
    Stalls,
}

/// Pieces that are available at once, and the end after them.
struct Pieces(VecDeque<Bytes>, End);

fn pieces(lengths: &[usize], end: End) -> Pieces {
    Pieces(lengths.iter().map(|length| Bytes::from(vec![b'x'; *length])).collect(), end)
}

impl Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        match (self.0.pop_front(), self.1) {
            (Some(data), _) => Poll::Ready(Some(Ok(Frame::data(data)))),
            (None, End::Ends) => Poll::Ready(None),
            (None, End::Breaks) => Poll::Ready(Some(Err(io::Error::other("as ordered")))),
            (None, End::Stalls) => Poll::Pending,
        }
    }
}

/// Behaves as the path names.
#[derive(Clone)]
struct Handler;

impl Service<Request<RequestBody<Pieces>>> for Handler {
    type Response = Response<Full<Bytes>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody<Pieces>>) -> Self::Future {
        Box::pin(async move {
            match request.uri().path() {
                "/panics" => std::panic::resume_unwind(Box::new("as ordered")),
                "/fails" => Err(io::Error::other("as ordered")),
                "/ignores" => Ok(Response::new(Full::from("not read"))),
                "/hangs" => std::future::pending().await,
                _ => {
                    let len = request.into_body().collect().await.unwrap().to_bytes().len();
                    Ok(Response::new(Full::from(len.to_string())))
                }
            }
        })
    }
}

struct World {
    service: Idempotency<Handler>,
    keys: usize,
}

impl World {
    fn new() -> Self {
        let store = Arc::new(MemoryStore::new(ManualClock::at_millis(1)));
        let layer = IdempotencyLayer::new(Engine::new(store))
            .with_settings(Settings::default().with_body_timeout(Duration::from_secs(5)))
            .unwrap()
            .with_request_budget(BUDGET)
            .unwrap();
        Self { service: layer.layer(Handler), keys: 0 }
    }

    fn send(
        &mut self,
        path: &str,
        body: Pieces,
    ) -> impl Future<Output = io::Result<Response<ResponseBody<Full<Bytes>>>>> + use<> {
        self.keys += 1;
        let request = Request::post(path).header("idempotency-key", self.keys.to_string());
        self.service.call(request.body(body).unwrap())
    }

    async fn status(&mut self, path: &str, lengths: &[usize]) -> StatusCode {
        self.send(path, pieces(lengths, End::Ends)).await.unwrap().status()
    }

    /// Asserts that the whole budget is free: a body of exactly this size passes, one byte more does not.
    async fn all_is_free(&mut self, what: &str) {
        assert_eq!(self.status("/", &[BUDGET]).await, StatusCode::OK, "{what}");
        assert_eq!(self.status("/", &[BUDGET, 1]).await, StatusCode::SERVICE_UNAVAILABLE, "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn every_end_of_a_request_gives_the_budget_back() {
    let mut world = World::new();
    world.all_is_free("at first").await;
    for (small, large) in [(1_000, 1_500), (50_000, 100_000)] {
        let lengths = [small, large - small];
        for path in ["/", "/ignores"] {
            assert_eq!(world.status(path, &lengths).await, StatusCode::OK);
            world.all_is_free(path).await;
        }
        assert_eq!(world.status("/panics", &lengths).await, StatusCode::INTERNAL_SERVER_ERROR);
        world.all_is_free("a panic").await;
        assert!(world.send("/fails", pieces(&lengths, End::Ends)).await.is_err());
        world.all_is_free("an error").await;
        let broken = world.send("/", pieces(&lengths, End::Breaks)).await.unwrap();
        assert_eq!(broken.status(), StatusCode::BAD_REQUEST);
        world.all_is_free("a body that breaks off").await;
        let late = world.send("/", pieces(&lengths, End::Stalls)).await.unwrap();
        assert_eq!(late.status(), StatusCode::BAD_REQUEST);
        world.all_is_free("a body that never ends").await;
        // A client that leaves while its body arrives.
        let mut gone = Box::pin(world.send("/", pieces(&lengths, End::Stalls)));
        assert!(tokio::time::timeout(Duration::from_secs(1), &mut gone).await.is_err());
        assert_eq!(world.status("/", &[BUDGET - large + 1]).await, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(world.status("/", &[BUDGET - large]).await, StatusCode::OK);
        drop(gone);
        world.all_is_free("a client that left").await;
        // The same request again.
        world.keys = 1_000_000 + small;
        for _ in 0..2 {
            assert_eq!(world.status("/", &lengths).await, StatusCode::OK);
            world.keys -= 1;
        }
        world.keys += 2;
        world.all_is_free("a replay").await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_counts_until_the_handler_has_read_it() {
    let mut world = World::new();
    let mut held = Box::pin(world.send("/hangs", pieces(&[150_000], End::Ends)));
    assert!(tokio::time::timeout(Duration::from_secs(1), &mut held).await.is_err());
    // This handler keeps its request, including the body.
    assert_eq!(world.status("/", &[50_001]).await, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(world.status("/", &[50_000]).await, StatusCode::OK);
}

/// A body that declares a length other than its own.
struct Lying {
    pieces: Pieces,
    declared: u64,
    taken: Arc<AtomicUsize>,
}

impl Body for Lying {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        self.taken.fetch_add(1, Ordering::Relaxed);
        Pin::new(&mut self.pieces).poll_frame(cx)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.declared)
    }
}

/// Counts its calls, and answers with a body that is longer than it declares.
#[derive(Clone)]
struct LyingHandler(Arc<AtomicUsize>);

impl Service<Request<RequestBody<Lying>>> for LyingHandler {
    type Response = Response<Lying>;
    type Error = io::Error;
    type Future = std::future::Ready<io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<RequestBody<Lying>>) -> Self::Future {
        self.0.fetch_add(1, Ordering::Relaxed);
        let pieces = pieces(&[100; 30], End::Ends);
        std::future::ready(Ok(Response::new(Lying { pieces, declared: 100, taken: Arc::default() })))
    }
}

#[tokio::test(start_paused = true)]
async fn the_limits_of_bodies_count_what_arrives_and_not_what_is_declared() {
    let settings = Settings::default().with_max_request_body(1_000).unwrap();
    let settings = settings.with_max_response_body(1_000).unwrap();
    let store = Arc::new(MemoryStore::new(ManualClock::at_millis(1)));
    let layer = IdempotencyLayer::new(Engine::new(store)).with_settings(settings).unwrap();
    let calls = Arc::<AtomicUsize>::default();
    let mut service = layer.layer(LyingHandler(calls.clone()));
    for (declared, lengths, status, frames, called) in [
        (10, &[100; 30][..], StatusCode::PAYLOAD_TOO_LARGE, 11, 0),
        (1_001, &[1], StatusCode::PAYLOAD_TOO_LARGE, 0, 0),
        (11, &[10], StatusCode::BAD_REQUEST, 2, 0),
        (10, &[500, 500], StatusCode::OK, 3, 1),
    ] {
        let taken = Arc::<AtomicUsize>::default();
        let body = Lying { pieces: pieces(lengths, End::Ends), declared, taken: taken.clone() };
        let request = Request::post("/").header("idempotency-key", "k").body(body).unwrap();
        let response = service.call(request).await.unwrap();
        assert_eq!(response.status(), status, "{declared}");
        assert_eq!(taken.load(Ordering::Relaxed), frames, "{declared}");
        assert_eq!(calls.load(Ordering::Relaxed), called, "{declared}");
        if called == 1 {
            // The client gets the whole response, which is too large to be kept.
            assert_eq!(response.into_body().collect().await.unwrap().to_bytes().len(), 3_000);
        }
    }
    let body = Lying { pieces: pieces(&[500, 500], End::Ends), declared: 1_000, taken: Arc::default() };
    let request = Request::post("/").header("idempotency-key", "k").body(body).unwrap();
    let again = service.call(request).await.unwrap();
    assert_eq!(again.headers()["idempotency-status"], "refused; problem=replay-unavailable; retry=stop");
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}
