//! Message framing: well-formed messages pass, and messages that can be read in two ways do not.

use crate::support::{Message, Service, Sidecar, request, within};
use crate::{KEY, OK};

#[tokio::test]
async fn ambiguous_messages_are_refused_and_never_forwarded() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[]).await;
    for (fields, body) in [
        ("Content-Length: 4\r\nContent-Length: 5\r\n", "abcde"),
        ("Content-Length: 4, 5\r\n", "abcde"),
        ("Content-Length: 5, 5\r\n", "abcde"),
        ("Content-Length: +5\r\n", "abcde"),
        ("Content-Length: 0x5\r\n", "abcde"),
        ("Content-Length: -1\r\n", ""),
        ("Content-Length: 18446744073709551617\r\n", "a"),
        ("Content-Length:\r\n", ""),
        ("Transfer-Encoding: gzip\r\n", "abcde"),
        ("Transfer-Encoding: chunked, gzip\r\n", "0\r\n\r\n"),
        ("Transfer-Encoding: gzip, chunked\r\n", "0\r\n\r\n"),
        ("Transfer-Encoding: chunked, chunked\r\n", "0\r\n\r\n"),
        ("Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"),
        ("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", "0\r\n\r\n"),
        ("Transfer-Encoding: xchunked\r\n", "0\r\n\r\n"),
        ("Transfer-Encoding: \"chunked\"\r\n", "0\r\n\r\n"),
        ("Transfer-Encoding : chunked\r\n", "0\r\n\r\n"),
        ("Transfer-Encoding\u{b}: chunked\r\n", "0\r\n\r\n"),
        ("X-A: b\r\n folded\r\n", ""),
        (" X-A: b\r\n", ""),
        ("X A: b\r\n", ""),
        (": b\r\n", ""),
        ("X-A\r\n", ""),
        ("X-A: b\0c\r\n", ""),
        ("X-A: b\rContent-Length: 5\r\n", "abcde"),
    ] {
        for key in ["", "Idempotency-Key: k\r\n"] {
            let mut client = sidecar.connect().await;
            // The bytes after the message must not be read as another request.
            let inner = "GET /smuggled HTTP/1.1\r\nHost: orders.test\r\n\r\n";
            let head = format!("POST / HTTP/1.1\r\nHost: orders.test\r\n{key}{fields}\r\n");
            client.send(head + body + inner).await;
            let response = client.message().await;
            assert!(matches!(response.status(), 400 | 501), "{fields:?}: {:?}", response.head);
            client.ends().await;
        }
    }
    let mut client = sidecar.connect().await;
    client.send("POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n").await;
    client.message().await.has_status(400);
    service.is_not_called().await;
}

#[tokio::test]
async fn with_two_lengths_the_chunks_count_and_the_connection_ends() {
    // RFC 9112, 6.3: the length is removed, and bytes after the chunks are not read as a request.
    for fields in [
        "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n",
    ] {
        let service = Service::new().await;
        let sidecar = Sidecar::start(service.address, &[]).await;
        let mut client = sidecar.connect().await;
        let inner = "GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n";
        client
            .send(format!("POST / HTTP/1.1\r\nHost: a\r\n{fields}\r\n5\r\nabcde\r\n0\r\n\r\n{inner}"))
            .await;
        let mut wire = service.accept().await;
        let seen = wire.message().await;
        assert_eq!((seen.get("content-length"), seen.text()), (None, "abcde"));
        wire.send(OK).await;
        client.message().await.has_status(200);
        client.ends().await;
        wire.stays_silent().await;
        service.is_not_called().await;
    }
}

const BAD_CHUNKS: [&str; 9] = [
    "5x\r\nabcde\r\n0\r\n\r\n",
    "0x5\r\nabcde\r\n0\r\n\r\n",
    "-5\r\nabcde\r\n0\r\n\r\n",
    "\r\nabcde\r\n0\r\n\r\n",
    "5\r\nabcdefg\r\n0\r\n\r\n",
    "5\r\nabcde0\r\n\r\n",
    "FFFFFFFFFFFFFFFFF\r\nabcde\r\n0\r\n\r\n",
    "5\nabcde\r\n0\r\n\r\n",
    "0\r\nX-A: b\r\n folded\r\n\r\n",
];

#[tokio::test]
async fn bad_chunks_under_a_key_are_refused_and_never_forwarded() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[]).await;
    for chunks in BAD_CHUNKS {
        let mut client = sidecar.connect().await;
        let head = request("POST", "/", &[KEY, "Transfer-Encoding: chunked"], "");
        client.send(format!("{head}{chunks}GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n")).await;
        let response = client.message().await;
        assert_eq!(response.status(), 400, "{chunks:?}: {:?}", response.head);
        client.ends().await;
    }
    service.is_not_called().await;
}

#[tokio::test]
async fn bad_chunks_without_a_key_never_reach_the_service_as_a_whole_request() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[]).await;
    for chunks in BAD_CHUNKS {
        let mut client = sidecar.connect().await;
        client.send(request("POST", "/", &["Transfer-Encoding: chunked"], "") + chunks).await;
        // The service may have received the head already; then its request ends early.
        let response = client.message().await;
        assert!(response.status() >= 400, "{chunks:?}: {:?}", response.head);
        client.ends().await;
    }
    let mut last = sidecar.connect().await;
    last.send(request("GET", "/last", &[], "")).await;
    loop {
        let mut wire = service.accept().await;
        let Some(head) = wire.try_head().await else { continue };
        if head.line.starts_with("GET /last") {
            break;
        }
        let rest = within("the end of the cut request", wire.rest()).await;
        assert!(!rest.ends_with(b"0\r\n\r\n"), "{:?}", String::from_utf8_lossy(&rest));
    }
}

#[tokio::test]
async fn a_response_with_two_lengths_is_forwarded_with_one() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[]).await;
    let mut client = sidecar.connect().await;
    client.send(request("GET", "/", &[], "")).await;
    let mut wire = service.accept().await;
    wire.message().await;
    wire.send(
        "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
    )
    .await;
    assert_eq!(client.message().await.has_status(200).text(), "abcde");
}

#[tokio::test]
async fn a_response_that_breaks_off_stays_incomplete_for_the_client() {
    for response in [
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
    ] {
        let service = Service::new().await;
        let sidecar = Sidecar::start(service.address, &[]).await;
        let mut client = sidecar.connect().await;
        client.send(request("GET", "/", &[], "")).await;
        let mut wire = service.accept().await;
        wire.message().await;
        wire.send(response).await;
        let head = client.head().await;
        assert_eq!(head.status(), 200);
        drop(wire);
        let rest = client.rest().await;
        assert!(!rest.ends_with(b"0\r\n\r\n") && rest.len() < 10, "{:?}", String::from_utf8_lossy(&rest));
    }
}

#[tokio::test]
async fn an_invalid_response_is_a_bad_gateway() {
    for response in [
        "",
        "SSH-2.0-OpenSSH_9.9\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nab",
        "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    ] {
        for fields in [&[][..], &[KEY]] {
            let service = Service::new().await;
            let sidecar = Sidecar::start(service.address, &[]).await;
            let mut client = sidecar.connect().await;
            client.send(request("POST", "/", fields, "{}")).await;
            let mut wire = service.accept().await;
            wire.message().await;
            wire.send(response).await;
            drop(wire);
            let got = client.message().await;
            let slug = if fields.is_empty() { "upstream-unanswered" } else { "outcome-unknown" };
            assert_eq!(got.status(), 502, "{response:?}: {:?}", got.head);
            got.is_problem(502, slug);
        }
    }
}

#[tokio::test]
async fn the_final_response_after_interim_responses_is_awaited() {
    for fields in [&[][..], &[KEY]] {
        let hints = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n";
        let service = Service::new().await;
        let sidecar = Sidecar::start(service.address, &[]).await;
        let mut client = sidecar.connect().await;
        client.send(request("POST", "/", fields, "{}")).await;
        let mut wire = service.accept().await;
        wire.message().await;
        wire.send(format!("{hints}{OK}")).await;
        let mut head = client.head().await;
        while head.status() < 200 {
            head = client.head().await;
        }
        assert_eq!(client.body(head).await.has_status(200).text(), "ok");
    }
}

#[tokio::test]
async fn responses_without_a_body_keep_their_length_fields() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--threads=1"]).await;
    let mut client = sidecar.connect().await;
    let mut last = None;
    for (method, response, length) in [
        ("HEAD", "HTTP/1.1 200 OK\r\nContent-Length: 12345\r\n\r\n", Some("12345")),
        ("HEAD", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", None),
        ("GET", "HTTP/1.1 204 No Content\r\n\r\n", None),
        ("POST", "HTTP/1.1 204 No Content\r\n\r\n", None),
        ("GET", "HTTP/1.1 304 Not Modified\r\nETag: \"a\"\r\n\r\n", None),
        ("GET", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", Some("0")),
        ("GET", OK, Some("2")),
    ] {
        client.send(request(method, "/", &[], "")).await;
        let wire = match last.take() {
            Some(wire) => wire,
            None => service.accept().await,
        };
        let (mut wire, seen) = service.next(wire).await;
        assert_eq!(seen.head.line, format!("{method} / HTTP/1.1"));
        wire.send(response).await;
        last = Some(wire);
        let head = client.head().await;
        assert_eq!(head.line, response.split("\r\n").next().unwrap());
        assert_eq!(head.get("content-length"), length, "{response:?}");
        let got = if method == "HEAD" { Message::of(head) } else { client.body(head).await };
        assert_eq!(got.text(), if response == OK { "ok" } else { "" });
    }
}

#[tokio::test]
async fn a_body_passes_with_every_method() {
    for (method, fields) in
        [("GET", &[][..]), ("DELETE", &[]), ("POST", &[]), ("POST", &[KEY]), ("PATCH", &[KEY])]
    {
        let service = Service::new().await;
        let sidecar = Sidecar::start(service.address, &[]).await;
        let mut client = sidecar.connect().await;
        client.send(request(method, "/", fields, "{\"a\": 1}")).await;
        let mut wire = service.accept().await;
        let seen = wire.message().await;
        assert_eq!((seen.get("content-length"), seen.text()), (Some("8"), "{\"a\": 1}"), "{method}");
        wire.send(OK).await;
        client.message().await.has_status(200);
    }
}

#[tokio::test]
async fn an_empty_body_is_forwarded_with_length_zero() {
    for fields in [&[][..], &[KEY]] {
        let service = Service::new().await;
        let sidecar = Sidecar::start(service.address, &[]).await;
        let mut client = sidecar.connect().await;
        client.send(request("POST", "/", &[fields, &["Content-Length: 0"]].concat(), "")).await;
        let mut wire = service.accept().await;
        let seen = wire.message().await;
        assert_eq!((seen.get("content-length"), seen.get("transfer-encoding")), (Some("0"), None));
        wire.send(OK).await;
        client.message().await.has_status(200);
    }
}

#[tokio::test]
async fn heads_that_are_too_large_are_refused_without_harm_to_other_requests() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &[]).await;
    let lines = "X-A: b\r\n".repeat(1000);
    let value = "v".repeat(1024 * 1024);
    for (head, status) in [
        (format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "a".repeat(70_000)), 414),
        (format!("GET / HTTP/1.1\r\nHost: a\r\n{lines}\r\n"), 431),
        (format!("GET / HTTP/1.1\r\nHost: a\r\nX-A: {value}\r\n\r\n"), 431),
        (format!("GET / HTTP/1.1\r\nHost: a\r\nIdempotency-Key: {value}\r\n\r\n"), 431),
    ] {
        let mut client = sidecar.connect().await;
        // The sidecar need not read a refused head to its end.
        let _unread = client.try_send(&head).await;
        client.message().await.has_status(status);
    }
    sidecar.ask(&format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "a".repeat(8000))).await.has_status(200);
    assert_eq!(service.requests(), 1);
}

#[tokio::test]
async fn trailers_pass_in_both_directions() {
    for fields in [&[][..], &[KEY]] {
        let service = Service::new().await;
        let sidecar = Sidecar::start(service.address, &[]).await;
        let mut client = sidecar.connect().await;
        let ask = ["TE: trailers", "Connection: TE", "Trailer: X-Sum", "Transfer-Encoding: chunked"];
        let head = request("POST", "/", &[&ask[..], fields].concat(), "");
        client.send(head + "3\r\nabc\r\n0\r\nX-Sum: 1\r\n\r\n").await;
        let mut wire = service.accept().await;
        let seen = wire.message().await;
        assert_eq!(seen.text(), "abc");
        assert_eq!(seen.trailers, [("x-sum".to_owned(), "1".to_owned())]);
        // Many services send trailers only if the request has `TE: trailers`.
        assert_eq!((seen.get("te"), seen.get("connection")), (Some("trailers"), Some("te")));
        wire.send("HTTP/1.1 200 OK\r\nTrailer: X-Check\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Check: 2\r\n\r\n").await;
        let got = client.message().await;
        assert_eq!(got.has_status(200).text(), "ok");
        assert_eq!(got.trailers, [("x-check".to_owned(), "2".to_owned())]);
    }
}
