//! A client that never finishes the body of a request with a key.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::Full;
use oncegate_core::MemoryStore;
use oncegate_engine::Engine;
use oncegate_http::{IdempotencyLayer, RequestBody, Settings};
use oncegate_testkit::ManualClock;
use tower_layer::Layer;
use tower_service::Service;

/// A body that never yields anything.
struct Stalled;

impl Body for Stalled {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Pending
    }
}

#[derive(Clone, Default)]
struct Counting(Arc<AtomicUsize>);

impl Service<Request<RequestBody<Stalled>>> for Counting {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<RequestBody<Stalled>>) -> Self::Future {
        self.0.fetch_add(1, Ordering::Relaxed);
        std::future::ready(Ok(Response::new(Full::from("done"))))
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_body_stalls_is_refused_in_time_and_not_executed() {
    let timeout = Duration::from_secs(5);
    let store = Arc::new(MemoryStore::new(ManualClock::at_millis(1)));
    let layer = IdempotencyLayer::new(Engine::new(store.clone()))
        .with_settings(Settings::default().with_body_timeout(timeout))
        .unwrap();
    let handler = Counting::default();
    let asked = tokio::time::Instant::now();
    let request = Request::post("/pay").header("idempotency-key", "a").body(Stalled).unwrap();
    let response = layer.layer(handler.clone()).call(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    assert_eq!(asked.elapsed(), timeout);
    assert_eq!(handler.0.load(Ordering::Relaxed), 0);
    assert!(store.is_empty(), "no key was claimed");
}
