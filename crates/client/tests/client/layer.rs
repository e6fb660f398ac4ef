//! The layer over a service of Tower.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use crate::support::quick;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Full};
use oncegate_client::tower::IntentLayer;
use oncegate_client::{Api, AttemptFailureKind, IdempotencyKey, Report, SendErrorKind, Verdict};
use tower::{Layer, Service, ServiceExt, service_fn};

/// A body that may hide its length.
#[derive(Debug)]
struct TestBody {
    data: Full<Bytes>,
    has_length: bool,
    trailers: Option<HeaderMap>,
}

impl From<Bytes> for TestBody {
    fn from(data: Bytes) -> Self {
        Self { data: Full::new(data), has_length: true, trailers: None }
    }
}

impl Body for TestBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match Pin::new(&mut self.data).poll_frame(cx) {
            Poll::Ready(None) => {
                Poll::Ready(self.trailers.take().map(|trailers| Ok(Frame::trailers(trailers))))
            }
            frame => frame,
        }
    }

    fn size_hint(&self) -> SizeHint {
        if self.has_length { self.data.size_hint() } else { SizeHint::default() }
    }
}

type Seen = Arc<Mutex<Vec<(Option<String>, Bytes)>>>;

/// A service that fails this many times with this status, and then succeeds. With status 0 it returns no response.
fn service(
    status: u16,
    times: usize,
) -> (
    Seen,
    impl Service<Request<TestBody>, Response = Response<TestBody>, Error = &'static str, Future: Send> + Clone,
) {
    let seen = Seen::default();
    let log = Arc::clone(&seen);
    let service = service_fn(move |request: Request<TestBody>| {
        let log = Arc::clone(&log);
        async move {
            let key = request.headers().get("idempotency-key").map(|key| key.to_str().unwrap().to_owned());
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let number = {
                let mut log = log.lock().unwrap();
                log.push((key, body));
                log.len()
            };
            match status {
                0 if number <= times => Err("no response"),
                _ => {
                    let status = if number <= times { status } else { 201 };
                    let mut body = TestBody::from(Bytes::from("done"));
                    body.trailers =
                        Some([("grpc-status".parse().unwrap(), "0".parse().unwrap())].into_iter().collect());
                    Ok(Response::builder().status(status).body(body).unwrap())
                }
            }
        }
    });
    (seen, service)
}

fn layer() -> IntentLayer {
    IntentLayer::new().with_policy(quick())
}

fn request(method: Method, key: Option<&str>) -> Request<TestBody> {
    let mut request = Request::new(TestBody::from(Bytes::from("5")));
    *request.method_mut() = method;
    if let Some(key) = key {
        request.extensions_mut().insert(IdempotencyKey::new(key).unwrap());
    }
    request
}

#[tokio::test]
async fn a_request_with_a_key_is_sent_until_the_response_is_definite() {
    for status in [0, 503] {
        let (seen, service) = service(status, 2);
        let response = layer().layer(service).oneshot(request(Method::POST, Some("k"))).await.unwrap();
        let report = *response.extensions().get::<Report>().unwrap();
        assert_eq!((report.verdict, report.attempts), (Verdict::Done, 3));
        let body = response.into_body().collect().await.unwrap();
        assert_eq!(body.trailers().unwrap()["grpc-status"], "0");
        assert_eq!(body.to_bytes(), "done");
        assert_eq!(*seen.lock().unwrap(), vec![(Some("k".to_owned()), Bytes::from("5")); 3]);
    }
}

#[tokio::test]
async fn a_request_without_a_key_is_sent_once() {
    for method in [Method::POST, Method::PATCH, Method::GET, Method::PUT, Method::DELETE] {
        let (seen, failing) = service(503, 9);
        let response = layer().layer(failing).oneshot(request(method.clone(), None)).await.unwrap();
        assert_eq!((response.status().as_u16(), seen.lock().unwrap().len()), (503, 1));
        assert!(response.extensions().get::<Report>().is_none());
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "done");

        for (kind, may) in [(AttemptFailureKind::NotSent, false), (AttemptFailureKind::Doubtful, true)] {
            let (seen, failing) = service(0, 9);
            let failing = layer().with_error_classifier(move |_| kind).layer(failing);
            let open = failing.oneshot(request(method.clone(), None)).await.unwrap_err();
            assert_eq!((open.may_have_taken_effect(), seen.lock().unwrap().len()), (may, 1));
        }
    }
    let (seen, failing) = service(503, 1);
    let again = layer().with_keyless_retries();
    let response = again.layer(failing).oneshot(request(Method::PUT, None)).await.unwrap();
    assert_eq!((response.status().as_u16(), seen.lock().unwrap().len()), (201, 2));
}

#[tokio::test]
async fn a_streamed_body_is_sent_once_and_a_body_within_the_limit_again() {
    let with_body = |bytes: usize, has_length| {
        let mut sent = request(Method::POST, Some("k"));
        *sent.body_mut() = TestBody::from(Bytes::from(vec![b'x'; bytes]));
        sent.body_mut().has_length = has_length;
        sent
    };
    for (bytes, has_length, again) in [(16, true, true), (17, true, false), (1, false, false)] {
        let (seen, failing) = service(503, 1);
        let sent = layer().with_max_body_bytes(16).layer(failing).oneshot(with_body(bytes, has_length)).await;
        if again {
            assert_eq!(sent.unwrap().status(), 201);
        } else {
            let open = sent.map(|_| ()).unwrap_err();
            assert_eq!((open.kind(), open.may_have_taken_effect()), (SendErrorKind::Body, true));
        }
        let seen = seen.lock().unwrap();
        assert_eq!(seen.len(), 1 + usize::from(again));
        assert!(seen.iter().all(|(_, body)| body.len() == bytes));
    }
}

#[tokio::test]
async fn a_plain_api_gets_a_request_again_that_was_certainly_not_processed() {
    for (kind, attempts) in [
        (AttemptFailureKind::NotSent, 2),
        (AttemptFailureKind::NotProcessed, 2),
        (AttemptFailureKind::Doubtful, 1),
    ] {
        let (seen, failing) = service(0, 1);
        let plain =
            IntentLayer::new().with_policy(quick().with_api(Api::Plain)).with_error_classifier(move |_| kind);
        let plain = plain.with_keyless_retries();
        let sent = plain.layer(failing).oneshot(request(Method::POST, None)).await;
        assert_eq!((sent.is_ok(), seen.lock().unwrap().len()), (attempts == 2, attempts), "{kind:?}");
    }
}
