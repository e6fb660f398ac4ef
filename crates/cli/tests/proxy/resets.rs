//! Streams of HTTP/2 that are reset with `NO_ERROR` before they end, as Envoy does when its own client goes away.

use bytes::Bytes;
use h2::Reason;
use http::{HeaderMap, Request, Response};
use tokio::net::{TcpListener, TcpStream};

use crate::OK;
use crate::support::{Service, Sidecar, request, within};

const BODY: &str = "amount=1000";

/// Sends half of a body and resets the stream.
async fn cut(sidecar: &Sidecar, key: &str, length: Option<&str>, reason: Reason) {
    let stream = TcpStream::connect(sidecar.address).await.unwrap();
    let (client, mut connection) = within("a connection", h2::client::handshake(stream)).await.unwrap();
    let mut ping = connection.ping_pong().unwrap();
    tokio::spawn(connection);
    let mut client = within("a stream", client.ready()).await.unwrap();
    let mut head = Request::post("http://orders.test/pay").header("idempotency-key", key);
    if let Some(length) = length {
        head = head.header("content-length", length);
    }
    let (_response, mut body) = client.send_request(head.body(()).unwrap(), false).unwrap();
    body.send_data(Bytes::from(&BODY[..9]), false).unwrap();
    // The sidecar sends its response to the ping after it has read the first half.
    within("a reply to a ping", ping.ping(h2::Ping::opaque())).await.unwrap();
    body.send_reset(reason);
    drop(body);
    within("a reply to a ping", ping.ping(h2::Ping::opaque())).await.unwrap();
}

#[tokio::test]
async fn half_a_request_is_never_executed_for_any_reset_reason() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &[]).await;
    for (n, reason) in [Reason::NO_ERROR, Reason::CANCEL, Reason::INTERNAL_ERROR].into_iter().enumerate() {
        for length in [None, Some("11")] {
            let key = format!("cut-{n}-{}", length.is_some());
            cut(&sidecar, &key, length, reason).await;
            // No key was claimed: the whole request is the first one.
            let field = format!("Idempotency-Key: {key}");
            let before = service.requests();
            let whole = sidecar.ask(&request("POST", "/pay", &[&field], BODY)).await;
            assert!(!whole.has_status(200).is_replay(), "{key} {reason:?}");
            assert_eq!(service.requests(), before + 1, "{key} {reason:?}");
        }
    }
    assert_eq!(service.requests(), 6, "nothing else was executed");
}

#[tokio::test]
async fn half_a_response_is_never_stored_for_any_reset_reason() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut connection = h2::server::handshake(stream).await.unwrap();
                while let Some(Ok((request, mut respond))) = connection.accept().await {
                    let mut head = Response::builder().status(201);
                    if request.uri().path() == "/length" {
                        head = head.header("content-length", "10");
                    }
                    let mut body = respond.send_response(head.body(()).unwrap(), false).unwrap();
                    body.send_data(Bytes::from("abc"), false).unwrap();
                    match request.uri().path() {
                        "/whole" => body.send_trailers(HeaderMap::new()).unwrap(),
                        _ => {
                            tokio::spawn(async move {
                                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                                body.send_reset(Reason::NO_ERROR);
                            });
                        }
                    }
                }
            });
        }
    });
    let sidecar = Sidecar::start(address, &["--upstream-protocol=http2"]).await;
    let ask = async |path: &str| {
        let field = format!("Idempotency-Key: {}", &path[1..]);
        sidecar.ask(&request("POST", path, &[&field], "{}")).await
    };
    assert_eq!(ask("/whole").await.has_status(201).text(), "abc");
    assert!(ask("/whole").await.has_status(201).is_replay());
    for path in ["/cut", "/length"] {
        ask(path).await.is_problem(502, "outcome-unknown");
        ask(path).await.is_problem(500, "outcome-unknown");
    }
}
