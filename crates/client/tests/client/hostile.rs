//! Real connections to a service that breaks them.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{End, Hostile, WireResponse, quick, response};
use bytes::Bytes;
use http_body_util::Full;
use hyper_util::client::legacy::{Client as HyperClient, Error as HyperError, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use oncegate_client::reqwest::{IntentMiddleware, ReqwestTransport, send_error};
use oncegate_client::tower::TowerTransport;
use oncegate_client::{
    Api, AttemptFailureKind, Client, IdempotencyKey, Intent, Report, RetryBudget, SendErrorKind,
    ServerErrorPolicy, Transport, Verdict,
};
use tokio::net::TcpSocket;

fn reqwest_client() -> Client<ReqwestTransport> {
    let transport = ReqwestTransport::build(reqwest::Client::builder().no_proxy()).unwrap();
    Client::new(transport).with_policy(quick())
}

type Hyper = TowerTransport<HyperClient<HttpConnector, Full<Bytes>>, Full<Bytes>>;

fn hyper_client() -> Client<Hyper> {
    let client = HyperClient::builder(TokioExecutor::new()).build_http();
    let transport =
        TowerTransport::new(client).with_error_classifier(|error| match error.downcast_ref::<HyperError>() {
            Some(error) if error.is_connect() => AttemptFailureKind::NotSent,
            _ => AttemptFailureKind::Doubtful,
        });
    Client::new(transport).with_policy(quick())
}

fn pay(service: &Hostile) -> Intent {
    Intent::post(service.url("/payments")).unwrap().with_json(r#"{"amount":5}"#)
}

/// An address without a listener, as long as the socket is held.
fn closed_address() -> (TcpSocket, SocketAddr) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

/// A service that honours keys: each takes effect once. The first response never arrives complete, and is replayed.
struct Ledger {
    effects: Mutex<HashMap<String, usize>>,
}

impl Ledger {
    /// Counts an attempt, and returns `true` if the key is new.
    fn take(&self, key: &str) -> bool {
        let mut effects = self.effects.lock().unwrap();
        let times = effects.entry(key.to_owned()).or_insert(0);
        *times += 1;
        *times == 1
    }
}

async fn cut_everywhere<T: Transport>(client: Client<T>) {
    const LENGTH: &str =
        "HTTP/1.1 201 Created\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n{\"paid\":5}";
    const CHUNKS: &str =
        "HTTP/1.1 201 Created\r\ntransfer-encoding: chunked\r\n\r\n4\r\n{\"pa\r\n6\r\nid\":5}\r\n0\r\n\r\n";
    let client = client.with_budget(Arc::new(RetryBudget::new(u32::MAX, 1)));
    for whole in [LENGTH, CHUNKS] {
        for end in [End::Close, End::Reset] {
            let ledger = Arc::new(Ledger { effects: Mutex::default() });
            let cut_at = Arc::new(AtomicUsize::new(0));
            let (book, at) = (Arc::clone(&ledger), Arc::clone(&cut_at));
            let service = Hostile::new(move |_, request| {
                if book.take(request.key.as_ref().expect("a key")) {
                    let bytes = whole.as_bytes()[..at.load(Ordering::SeqCst)].to_vec();
                    return WireResponse { bytes, end };
                }
                response(201, "idempotent-replayed: true\r\n", r#"{"paid":5}"#)
            })
            .await;
            for cut in 0..whole.len() {
                cut_at.store(cut, Ordering::SeqCst);
                let intent = pay(&service);
                let outcome = client.send(&intent).await.unwrap();
                assert_eq!((outcome.attempts, outcome.replayed), (2, true), "cut at {cut} of {whole:?}");
                assert_eq!(outcome.verdict, Verdict::Done);
                assert_eq!(outcome.response.body(), r#"{"paid":5}"#);
                assert_eq!(service.take(), vec![Some(intent.key().as_str().unwrap().to_owned()); 2]);
            }
            cut_at.store(whole.len(), Ordering::SeqCst);
            if end == End::Close {
                let outcome = client.send(&pay(&service)).await.unwrap();
                assert_eq!((outcome.attempts, outcome.replayed), (1, false));
            }
            assert!(ledger.effects.lock().unwrap().len() >= whole.len());
        }
    }
}

#[tokio::test]
async fn a_response_that_is_cut_at_any_byte_is_requested_again_with_reqwest() {
    cut_everywhere(reqwest_client()).await;
}

#[tokio::test]
async fn a_response_that_is_cut_at_any_byte_is_requested_again_with_hyper() {
    cut_everywhere(hyper_client()).await;
}

/// A response of a verbose service.
fn many_lines(count: usize) -> WireResponse {
    let lines: String = (0..count).map(|number| format!("x-{number}: v\r\n")).collect();
    response(201, &lines, r#"{"paid":5}"#)
}

#[tokio::test]
async fn a_response_may_have_many_field_lines() {
    for count in [98, 99, 150, 990] {
        let service = Hostile::new(move |_, _| many_lines(count)).await;
        let outcome = reqwest_client().send(&pay(&service)).await.unwrap();
        assert_eq!((outcome.attempts, outcome.verdict), (1, Verdict::Done), "{count}");
        assert_eq!(outcome.response.headers()[format!("x-{}", count - 1)], "v");
    }
}

#[tokio::test]
async fn a_response_with_too_many_field_lines_leaves_a_doubt_with_its_cause() {
    let service = Hostile::new(|_, _| many_lines(1001)).await;
    let policy = quick().with_max_attempts(2).unwrap();
    let open = reqwest_client().with_policy(policy.clone()).send(&pay(&service)).await.unwrap_err();
    assert!(open.may_have_taken_effect() && service.take().len() == 2);
    assert!(chain(&open).contains("message head is too large"), "{}", chain(&open));
    // The application builds the client under the middleware, and has to set its limit.
    let service = Hostile::new(|_, _| many_lines(150)).await;
    for (builder, is_done) in
        [(reqwest::Client::builder(), false), (reqwest::Client::builder().http1_max_headers(1000), true)]
    {
        let client = builder.no_proxy().build().unwrap();
        let middleware = IntentMiddleware::new().with_policy(policy.clone());
        let client = reqwest_middleware::ClientBuilder::new(client).with(middleware).build();
        let sent = client.post(service.url("/")).header("Idempotency-Key", "order-1").body("5").send().await;
        match sent {
            Ok(response) => assert!(is_done && response.status() == 201),
            Err(error) => {
                assert!(!is_done && send_error(&error).unwrap().may_have_taken_effect());
                assert!(chain(&error).contains("message head is too large"), "{}", chain(&error));
            }
        }
    }
}

/// An error and everything below it.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        text.push_str(&format!(": {error}"));
        next = error.source();
    }
    text
}

#[tokio::test]
async fn a_plain_api_gets_one_request_if_its_response_is_cut() {
    let whole = "HTTP/1.1 201 Created\r\ncontent-length: 10\r\n\r\n{\"paid\":5}";
    let service = Hostile::new(move |_, request| {
        let cut: usize = request.path.rsplit('/').next().unwrap().parse().unwrap();
        WireResponse { bytes: whole.as_bytes()[..cut].to_vec(), end: End::Close }
    })
    .await;
    let client = reqwest_client().with_policy(quick().with_api(Api::Plain));
    for cut in 0..whole.len() {
        let intent = Intent::post(service.url(&format!("/{cut}"))).unwrap();
        let open = client.send(&intent).await.unwrap_err();
        assert_eq!((open.kind(), open.attempts()), (SendErrorKind::Unknown, 1));
        assert!(open.may_have_taken_effect());
        assert_eq!(service.take(), [None], "cut at {cut}");
    }
}

#[tokio::test]
async fn every_status_ends_or_continues_as_the_table_requires() {
    let service = Hostile::new(|_, request| {
        let status: u16 = request.path.rsplit('/').next().unwrap().parse().unwrap();
        response(status, "content-type: application/json\r\n", "{}")
    })
    .await;
    let policy = quick().with_max_attempts(2).unwrap();
    let budget = Arc::new(RetryBudget::new(u32::MAX, 1));
    let client = reqwest_client().with_policy(policy).with_budget(budget);
    for status in 200..=599_u16 {
        let intent = Intent::post(service.url(&format!("/{status}"))).unwrap();
        let sent = client.send(&intent).await;
        let again = matches!(status, 408 | 409 | 423 | 425 | 429 | 500 | 502..=504 | 506..=510 | 512..);
        assert_eq!(
            service.take(),
            vec![Some(intent.key().as_str().unwrap().to_owned()); 1 + usize::from(again)],
            "{status}"
        );
        match sent {
            Ok(outcome) => {
                assert!(!again, "{status}");
                assert_eq!(outcome.response.status(), status);
                let done = status < 300 || status == 303;
                assert_eq!(outcome.verdict == Verdict::Done, done, "{status}");
                let body: &str = if status == 204 { "" } else { "{}" };
                assert_eq!(outcome.response.body(), body, "{status}");
            }
            Err(open) if matches!(status, 301 | 302 | 304) => {
                assert_eq!(
                    (open.kind(), open.may_have_taken_effect()),
                    (SendErrorKind::Unknown, true),
                    "{status}"
                );
            }
            Err(open) => {
                assert!(again, "{status}");
                assert_eq!(
                    (open.kind(), open.response().unwrap().status().as_u16()),
                    (SendErrorKind::Attempts, status)
                );
                assert_eq!(open.may_have_taken_effect(), !matches!(status, 425 | 429), "{status}");
            }
        }
    }
}

#[tokio::test]
async fn a_service_that_stops_answering_is_asked_again() {
    for silent_after in ["", "HTTP/1.1 201 Cre", "HTTP/1.1 201 Created\r\ncontent-length: 10\r\n\r\n{\"pa"] {
        let service = Hostile::new(move |number, _| match number {
            0 => WireResponse { bytes: silent_after.into(), end: End::Hang },
            _ => response(201, "idempotent-replayed: true\r\n", "{}"),
        })
        .await;
        let client = reqwest_client().with_policy(quick().with_attempt_timeout(Duration::from_secs(2)));
        let outcome = client.send(&pay(&service)).await.unwrap();
        assert_eq!((outcome.attempts, outcome.replayed), (2, true), "{silent_after:?}");
        let keys = service.take();
        assert_eq!(keys[0], keys[1]);
    }
}

#[tokio::test]
async fn a_refused_connection_had_no_effect_and_is_tried_again_even_by_a_plain_api() {
    let (_held, address) = closed_address();
    for api in [Api::Idempotent, Api::Plain] {
        let intent = Intent::post(format!("http://{address}/")).unwrap();
        let policy = quick().with_api(api).with_max_attempts(3).unwrap();
        for open in [
            reqwest_client().with_policy(policy.clone()).send(&intent).await.unwrap_err(),
            hyper_client().with_policy(policy).send(&intent).await.unwrap_err(),
        ] {
            assert_eq!((open.kind(), open.attempts()), (SendErrorKind::Attempts, 3));
            assert!(!open.may_have_taken_effect());
            assert!(!format!("{open:?}").contains(&format!("http://{address}")), "{open:?}");
        }
    }
    let nothing_speaks_this = Intent::post("gopher://127.0.0.1/").unwrap();
    let open = reqwest_client().send(&nothing_speaks_this).await.unwrap_err();
    assert_eq!((open.kind(), open.may_have_taken_effect()), (SendErrorKind::Unsendable, false));
}

#[tokio::test]
async fn an_absurd_retry_after_ends_the_sending_at_once() {
    for value in ["31536000", "999999999999999999999", "Fri, 31 Dec 9999 23:59:59 GMT"] {
        let field = format!("retry-after: {value}\r\n");
        let service = Hostile::new(move |_, _| response(503, &field, "")).await;
        let open = reqwest_client().send(&pay(&service)).await.unwrap_err();
        assert_eq!((open.kind(), service.attempts()), (SendErrorKind::ComeBackLater, 1), "{value}");
    }
    for value in ["-1", "soon", "1e3", "Fri, 99 Dec 2026 00:00:00 GMT", "Sun, 06 Nov 1994 08:49:37 GMT"] {
        let field = format!("retry-after: {value}\r\n");
        let service = Hostile::new(move |number, _| match number {
            0 => response(503, &field, ""),
            _ => response(200, "", ""),
        })
        .await;
        assert_eq!(reqwest_client().send(&pay(&service)).await.unwrap().attempts, 2, "{value}");
    }
}

#[tokio::test]
async fn redirections_are_responses_and_not_followed() {
    let service = Hostile::new(|_, _| response(303, "location: /done\r\n", "")).await;
    let outcome = reqwest_client().send(&pay(&service)).await.unwrap();
    assert_eq!(
        (outcome.verdict, outcome.response.status().as_u16(), service.attempts()),
        (Verdict::Done, 303, 1)
    );
}

#[tokio::test]
async fn a_refusal_that_an_earlier_attempt_may_have_caused_does_not_count() {
    for (method, status) in [("DELETE", 410), ("PUT", 412), ("PUT", 409)] {
        let service = Hostile::new(move |number, _| match number {
            0 => WireResponse { bytes: Vec::new(), end: End::Close },
            _ => response(status, "", ""),
        })
        .await;
        let intent = Intent::new(method.parse().unwrap(), service.url("/")).unwrap();
        let plain = reqwest_client().with_policy(quick().with_api(Api::Plain));
        let open = plain.send(&intent).await.unwrap_err();
        assert_eq!((open.kind(), open.attempts()), (SendErrorKind::TurnedAway, 2), "{method} {status}");
        assert!(open.may_have_taken_effect());
        // As the first response it counts.
        let again = plain.send(&intent).await.unwrap();
        assert!(matches!(again.verdict, Verdict::Refused(_)), "{method} {status}");
    }
}

// The middleware

fn with_middleware(
    builder: reqwest::ClientBuilder,
    middleware: IntentMiddleware,
) -> reqwest_middleware::ClientWithMiddleware {
    let client = builder.no_proxy().build().unwrap();
    reqwest_middleware::ClientBuilder::new(client).with(middleware.with_policy(quick())).build()
}

#[tokio::test]
async fn the_middleware_sends_requests_with_a_key_again_and_passes_the_response_on() {
    let service = Hostile::new(|number, _| match number {
        0 => WireResponse {
            bytes: b"HTTP/1.1 201 Created\r\ncontent-length: 10\r\n\r\n{\"pa".to_vec(),
            end: End::Close,
        },
        1 => response(503, "", "busy"),
        _ => response(201, "idempotent-replayed: true\r\nx-shop: 7\r\n", r#"{"paid":5}"#),
    })
    .await;
    let client = with_middleware(reqwest::Client::builder(), IntentMiddleware::new());
    let url = service.url("/payments");
    let response = client.post(&url).header("Idempotency-Key", "order-1").body("5").send().await.unwrap();
    let report = *response.extensions().get::<Report>().unwrap();
    assert_eq!((report.verdict, report.attempts, report.replayed), (Verdict::Done, 3, true));
    assert_eq!(response.url().as_str(), url);
    assert_eq!((response.status().as_u16(), &response.headers()["x-shop"]), (201, &"7".parse().unwrap()));
    assert_eq!(response.content_length(), Some(10));
    assert_eq!(response.bytes().await.unwrap(), r#"{"paid":5}"#);
    assert_eq!(service.take(), vec![Some("order-1".to_owned()); 3]);

    let key = IdempotencyKey::derived("order", ["2"]);
    client.post(&url).with_extension(key.clone()).body("5").send().await.unwrap();
    assert_eq!(service.take().last().unwrap().as_deref(), key.as_str());
}

#[tokio::test]
async fn the_middleware_sends_requests_without_a_key_once() {
    for middleware in [IntentMiddleware::new, || IntentMiddleware::new().with_redirects_off()] {
        let service = Hostile::new(|_, request| match &*request.path {
            "/cut" => WireResponse { bytes: b"HTTP/1.1 201 Cre".to_vec(), end: End::Reset },
            path => response(path[1..].parse().unwrap(), "retry-after: 0\r\n", "the service's own"),
        })
        .await;
        let client = with_middleware(reqwest::Client::builder(), middleware());
        for method in [http::Method::POST, http::Method::PATCH] {
            for status in [408, 409, 425, 429, 500, 502, 503, 504] {
                let url = service.url(&format!("/{status}"));
                let response = client.request(method.clone(), &url).body("5").send().await.unwrap();
                assert_eq!(response.status(), status);
                assert!(response.extensions().get::<Report>().is_none());
                assert_eq!(response.text().await.unwrap(), "the service's own");
                assert_eq!(service.take(), [None], "{method} {status}");
            }
            client.request(method, service.url("/cut")).body("5").send().await.unwrap_err();
            assert_eq!(service.take(), [None]);
        }
        // An empty key does not count, and neither do two keys.
        for keys in [&[""][..], &["a", "b"]] {
            let mut request = client.post(service.url("/503")).body("5");
            for key in keys {
                request = request.header("idempotency-key", *key);
            }
            assert_eq!(request.send().await.unwrap().status(), 503);
            assert_eq!(service.take().len(), 1, "{keys:?}");
        }
    }
}

#[tokio::test]
async fn the_middleware_creates_one_key_per_call_if_it_is_configured_to() {
    let service = Hostile::new(|number, _| response(if number % 2 == 0 { 503 } else { 201 }, "", "")).await;
    let client = with_middleware(reqwest::Client::builder(), IntentMiddleware::new().with_new_keys());
    for _ in 0..2 {
        client.post(service.url("/")).body("5").send().await.unwrap();
    }
    let keys = service.take();
    assert!(keys[0].is_some() && keys[0] == keys[1] && keys[2] == keys[3] && keys[1] != keys[2], "{keys:?}");
    assert_eq!(client.get(service.url("/")).send().await.unwrap().status(), 503);
    assert_eq!(service.take(), [None]);
}

/// A stream of events arrives as it is sent, and is not requested again if it stops.
#[tokio::test]
async fn a_response_without_a_key_streams_through_the_middleware_and_is_requested_once() {
    for method in [http::Method::GET, http::Method::HEAD, http::Method::PUT, http::Method::DELETE] {
        let service = Hostile::new(|_, _| WireResponse {
            bytes:
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n\
                      9\r\ndata: 1\n\n\r\n"
                    .to_vec(),
            end: End::Hang,
        })
        .await;
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let policy = quick().with_attempt_timeout(Duration::from_millis(200));
        let middleware = IntentMiddleware::new().with_policy(policy);
        let client = reqwest_middleware::ClientBuilder::new(client).with(middleware).build();
        let mut response = client.request(method.clone(), service.url("/events")).send().await.unwrap();
        if method != http::Method::HEAD {
            assert_eq!(response.chunk().await.unwrap().unwrap(), "data: 1\n\n", "{method}");
        }
        assert_eq!(service.take(), [None], "{method}");
    }
    // With keyless retries, idempotent methods are sent again.
    let service = Hostile::new(|number, _| response(if number % 2 == 0 { 503 } else { 200 }, "", "")).await;
    let again = IntentMiddleware::new().with_keyless_retries();
    let client = with_middleware(reqwest::Client::builder(), again);
    for method in [http::Method::GET, http::Method::PUT, http::Method::DELETE] {
        assert_eq!(client.request(method.clone(), service.url("/")).send().await.unwrap().status(), 200);
        assert_eq!(service.take(), [None, None], "{method}");
    }
    assert_eq!(client.post(service.url("/")).send().await.unwrap().status(), 503);
    assert_eq!(service.take(), [None]);
}

#[tokio::test]
async fn a_streamed_body_is_sent_once() {
    let service = Hostile::new(|_, _| response(503, "", "")).await;
    let client = with_middleware(reqwest::Client::builder(), IntentMiddleware::new());
    let stream = reqwest::Body::wrap(Full::new(Bytes::from("5")));
    let request = client.post(service.url("/")).header("idempotency-key", "k").body(stream);
    let error = request.send().await.unwrap_err();
    let open = send_error(&error).unwrap();
    assert_eq!((open.kind(), service.attempts()), (SendErrorKind::Body, 1));
    assert!(open.may_have_taken_effect() && open.is_resumable());
    assert_eq!(open.response().unwrap().status(), 503);
}

/// For a safe method a redirection is the response. For others it does not tell if the request took effect.
#[tokio::test]
async fn a_redirection_is_a_response_to_safe_methods_only() {
    for status in [301, 302] {
        let service = Hostile::new(move |_, _| response(status, "location: /elsewhere\r\n", "")).await;
        for api in [Api::Idempotent, Api::Plain] {
            let policy = quick().with_api(api);
            let builder = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none());
            let client = builder.no_proxy().build().unwrap();
            let middleware =
                IntentMiddleware::new().with_policy(policy).with_redirects_off().with_keyless_retries();
            let client = reqwest_middleware::ClientBuilder::new(client).with(middleware).build();
            let ask = client.get(service.url("/")).header("idempotency-key", "k");
            assert_eq!(ask.send().await.unwrap().status(), status);
            for method in [reqwest::Method::POST, reqwest::Method::DELETE] {
                let act = client.request(method.clone(), service.url("/")).header("idempotency-key", "k");
                let error = act.body("5").send().await.unwrap_err();
                let open = send_error(&error).unwrap();
                assert_eq!((open.kind(), open.attempts()), (SendErrorKind::Unknown, 1), "{method} {status}");
                assert!(open.may_have_taken_effect());
            }
        }
    }
}

#[tokio::test]
async fn a_redirection_to_a_closed_address_leaves_the_outcome_unknown() {
    let (_held, nowhere) = closed_address();
    let location = format!("location: http://{nowhere}/receipt\r\n");
    let service = Hostile::new(move |_, _| response(303, &location, "")).await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let plain = IntentMiddleware::new().with_policy(quick().with_api(Api::Plain)).with_keyless_retries();
    let client = reqwest_middleware::ClientBuilder::new(client).with(plain).build();
    let error = client.post(service.url("/")).body("5").send().await.unwrap_err();
    let open = send_error(&error).unwrap();
    assert_eq!((open.kind(), service.attempts()), (SendErrorKind::Unknown, 1));
    assert!(open.may_have_taken_effect());
}

#[tokio::test]
async fn a_refusal_at_the_end_of_a_redirection_is_not_a_refusal_of_the_operation() {
    let service = Hostile::new(|number, request| match (&*request.path, number) {
        ("/receipt", 0..=3) => response(404, "", ""),
        ("/receipt", _) => response(200, "", "5"),
        _ => response(303, "location: /receipt\r\n", ""),
    })
    .await;
    let client = with_middleware(reqwest::Client::builder(), IntentMiddleware::new());
    let response =
        client.post(service.url("/")).header("idempotency-key", "k").body("5").send().await.unwrap();
    assert_eq!(response.extensions().get::<Report>().unwrap().attempts, 3);
    assert_eq!(response.url().path(), "/receipt");
}

#[tokio::test]
async fn a_response_beyond_the_limit_streams_through_the_middleware_whole() {
    let long = "0123456789".repeat(100_000);
    let body = long.clone();
    let service = Hostile::new(move |_, _| response(200, "", &body)).await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let policy = quick().with_max_response_bytes(10).with_server_errors(ServerErrorPolicy::Final);
    let middleware = IntentMiddleware::new().with_policy(policy);
    let client = reqwest_middleware::ClientBuilder::new(client).with(middleware).build();
    let response = client.post(service.url("/")).header("idempotency-key", "k").send().await.unwrap();
    assert_eq!(response.content_length(), Some(1_000_000));
    assert_eq!(response.text().await.unwrap(), long);
}
