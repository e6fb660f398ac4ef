//! A client that reads nothing of a streamed response.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame};
use http_body_util::{BodyExt as _, Full};
use oncegate_core::MemoryStore;
use oncegate_engine::Engine;
use oncegate_http::{IdempotencyLayer, RequestBody, Settings};
use oncegate_testkit::ManualClock;
use tower_layer::Layer;
use tower_service::Service;

const EVENTS: usize = 100;

/// A body of `EVENTS` events that counts how many were taken.
struct Events(Arc<AtomicUsize>);

impl Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let taken = self.0.fetch_add(1, Ordering::Relaxed);
        Poll::Ready((taken < EVENTS).then(|| Ok(Frame::data(Bytes::from_static(b"data: 1\n\n")))))
    }
}

#[derive(Clone)]
struct Handler(Arc<AtomicUsize>);

impl Service<Request<RequestBody<Full<Bytes>>>> for Handler {
    type Response = Response<Events>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<RequestBody<Full<Bytes>>>) -> Self::Future {
        let response = Response::builder().header("content-type", "text/event-stream");
        std::future::ready(Ok(response.body(Events(self.0.clone())).unwrap()))
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_does_not_read_blocks_no_handler_and_its_response_ends_with_an_error() {
    let taken = Arc::new(AtomicUsize::new(0));
    let store = Arc::new(MemoryStore::new(ManualClock::at_millis(1)));
    let settings = Settings::default().with_stream_timeout(Duration::from_secs(5));
    let layer = IdempotencyLayer::new(Engine::new(store)).with_settings(settings).unwrap();
    let mut service = layer.layer(Handler(taken.clone()));
    let request = Request::post("/").header("idempotency-key", "k").body(Full::default()).unwrap();
    let mut body = service.call(request).await.unwrap().into_body();
    tokio::time::sleep(Duration::from_secs(4)).await;
    let before = taken.load(Ordering::Relaxed);
    assert!(before < EVENTS, "at first the handler waits for the client");
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(taken.load(Ordering::Relaxed) > EVENTS, "the response of the handler is read to its end");
    let mut got = 0;
    let error = loop {
        match body.frame().await {
            Some(Ok(_)) => got += 1,
            Some(Err(error)) => break error,
            None => panic!("the body ended without an error after {got} events"),
        }
    };
    assert!(got > 0 && got < EVENTS);
    assert!(error.to_string().contains("took nothing"), "{error}");
    assert!(body.frame().await.is_none());
}
