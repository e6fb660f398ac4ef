//! Handlers that complete their records themselves: the layer's behaviour if they fail, stream, or answer something else.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::transactional::Transactional;
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use oncegate_core::{Command, Complete, Completion, MemoryStore, Outcome, Store as _, StoredResponse};
use oncegate_engine::Engine;
use oncegate_http::{
    Idempotency, IdempotencyContext, IdempotencyLayer, NoUpstreamResponse, RequestBody, ResponseBody,
    Settings, StoreDirective,
};
use oncegate_testkit::ManualClock;
use tower_layer::Layer;
use tower_service::Service;

/// Completes its record as the first path segment names, and ends as the second one names.
#[derive(Clone)]
struct Handler(Arc<Transactional>);

impl Service<Request<RequestBody<Full<Bytes>>>> for Handler {
    type Response = Response<Full<Bytes>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<io::Result<()>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody<Full<Bytes>>>) -> Self::Future {
        let store = self.0.clone();
        Box::pin(async move {
            let attempt =
                IdempotencyContext::from_extensions(request.extensions()).unwrap().attempt().clone();
            let path = request.uri().path().to_owned();
            let (commits, ends) = path[1..].split_once('/').unwrap();
            let completion = match commits {
                "with" => {
                    let fields = [("content-type", &b"text/x"[..])];
                    Some(Completion::Replayable(
                        StoredResponse::new(201, &fields, &["mine".into()], &[]).unwrap(),
                    ))
                }
                "without" => Some(Completion::Awaited),
                _ => None,
            };
            if let Some(completion) = completion {
                let complete =
                    Complete { token: attempt.token(), completion, retention: Duration::from_secs(60) };
                let done = store.apply(attempt.record_id(), Command::Complete(complete)).await.unwrap();
                assert_eq!(done, Outcome::Completed);
            }
            let mut response = Response::new(Full::from("said"));
            match ends {
                "panics" => std::panic::resume_unwind(Box::new("as ordered")),
                "fails" => return Err(io::Error::other("as ordered")),
                "is-lost" => {
                    response.extensions_mut().insert(NoUpstreamResponse(StatusCode::GATEWAY_TIMEOUT));
                }
                "streams" => {
                    response.headers_mut().insert("content-type", "text/event-stream".parse().unwrap());
                }
                "is-large" => *response.body_mut() = Full::from(vec![b'x'; 100]),
                "is-secret" => {
                    response.extensions_mut().insert(StoreDirective::Tombstone);
                }
                "does-not-know" => {
                    response.extensions_mut().insert(StoreDirective::Unknown);
                }
                status => *response.status_mut() = status.parse().unwrap(),
            }
            Ok(response)
        })
    }
}

type ProtectedHandler = Idempotency<Handler>;

fn service() -> ProtectedHandler {
    let store = Arc::new(Transactional(MemoryStore::new(ManualClock::at_millis(1_000_000).into())));
    let settings = Settings::default().with_max_response_body(50).unwrap().with_upstream_completion();
    let layer = IdempotencyLayer::new(Engine::new(store.clone())).with_settings(settings).unwrap();
    layer.layer(Handler(store))
}

async fn send(
    service: &mut ProtectedHandler,
    path: &str,
) -> io::Result<(Response<ResponseBody<Full<Bytes>>>, bool)> {
    let request = Request::post(path).header("Idempotency-Key", "k").body(Full::default()).unwrap();
    let response = service.call(request).await?;
    let replayed = response.headers().contains_key("idempotent-replayed");
    Ok((response, replayed))
}

/// The status, the type of a problem or the body, and whether the response is marked as a replay.
async fn ask(service: &mut ProtectedHandler, path: &str) -> (u16, String, bool) {
    match send(service, path).await {
        Ok((response, replayed)) => {
            let status = response.status().as_u16();
            let body = response.into_body().collect().await.unwrap().to_bytes();
            let problem: Option<serde_json::Value> = serde_json::from_slice(&body).ok();
            let slug = problem.as_ref().and_then(|problem| problem["type"].as_str()?.rsplit(':').next());
            let text = slug.map_or_else(|| String::from_utf8_lossy(&body).into_owned(), str::to_owned);
            (status, text, replayed)
        }
        Err(error) => (0, error.to_string(), false),
    }
}

#[tokio::test]
async fn commits_and_responses_end_as_the_table_says() {
    let large = "x".repeat(100);
    let done = || (422, "replay-unavailable".to_owned(), false);
    let mine = |replayed| (201, "mine".to_owned(), replayed);
    let said = |status| (status, "said".to_owned(), false);
    let again = |status| (status, "said".to_owned(), true);
    let failed = |status| (status, "handler-failed".to_owned(), false);
    for (path, first, second) in [
        // No commit: a definite response is stored, and everything else frees the key.
        ("/not/200", said(200), again(200)),
        ("/not/404", said(404), again(404)),
        ("/not/500", said(500), said(500)),
        ("/not/429", said(429), said(429)),
        ("/not/panics", failed(500), failed(500)),
        ("/not/fails", (0, "as ordered".to_owned(), false), (0, "as ordered".to_owned(), false)),
        ("/not/is-lost", failed(504), failed(504)),
        ("/not/does-not-know", said(200), said(200)),
        ("/not/streams", said(200), done()),
        ("/not/is-large", (200, large.clone(), false), done()),
        // A commit without a response: a definite response is added, if there is one.
        ("/without/200", said(200), again(200)),
        ("/without/404", said(404), again(404)),
        ("/without/500", said(500), done()),
        ("/without/429", said(429), done()),
        ("/without/panics", done(), done()),
        ("/without/is-lost", done(), done()),
        ("/without/does-not-know", said(200), done()),
        ("/without/streams", said(200), done()),
        ("/without/is-large", (200, large, false), done()),
        ("/without/is-secret", said(200), done()),
        // A commit with a response: every request gets it.
        ("/with/200", mine(false), mine(true)),
        ("/with/404", mine(false), mine(true)),
        ("/with/500", mine(false), mine(true)),
        ("/with/429", mine(false), mine(true)),
        ("/with/panics", mine(true), mine(true)),
        ("/with/fails", mine(true), mine(true)),
        ("/with/is-lost", mine(true), mine(true)),
        ("/with/does-not-know", mine(false), mine(true)),
        ("/with/streams", mine(false), mine(true)),
        ("/with/is-large", mine(false), mine(true)),
        ("/with/is-secret", mine(false), mine(true)),
    ] {
        let mut service = service();
        assert_eq!(ask(&mut service, path).await, first, "{path}");
        assert_eq!(ask(&mut service, path).await, second, "{path}, again");
    }
}

#[test]
fn upstream_completion_refuses_a_store_without_transactions() {
    let layer = || IdempotencyLayer::new(Engine::new(MemoryStore::new(ManualClock::at_millis(1_000_000))));
    let upstream = || Settings::default().with_upstream_completion();
    let error = layer().with_settings(upstream()).unwrap_err().to_string();
    assert!(error.contains("the store memory cannot commit a completion together with an effect"), "{error}");
    assert!(layer().with_route(None, "/orders", upstream()).is_err());
    assert!(layer().with_route(None, "/orders", Settings::default()).is_ok());
    assert!(
        layer().with_route(Some(vec![]), "/orders", Settings::default()).is_err(),
        "it would match nothing"
    );
}
