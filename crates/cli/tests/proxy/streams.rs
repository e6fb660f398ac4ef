//! Bodies without end, or too large to hold: they stream at the pace of the reader.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::process::Command;

use crate::support::{Message, Service, Sidecar, Wire, request, within};
use crate::{KEY, OK};

const MIB: usize = 1024 * 1024;
const LARGE: usize = 64 * MIB;
/// The memory that the sidecar may use for a body of [`LARGE`] bytes, in addition to its usual memory.
const HELD: u64 = 8 * MIB as u64;

#[tokio::test]
async fn events_arrive_one_by_one() {
    for fields in [&[][..], &[KEY]] {
        let service = Service::new().await;
        let sidecar = Sidecar::start(service.address, &[]).await;
        let sent = request("POST", "/events", fields, "{}");
        let mut client = sidecar.connect().await;
        client.send(&sent).await;
        let mut wire = service.accept().await;
        wire.message().await;
        wire.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            .await;
        assert_eq!(client.head().await.get("content-type"), Some("text/event-stream"));
        for n in 0..5 {
            // The service continues only after the client has the event.
            let event = format!("data: {n}\n\n");
            wire.send(format!("{:x}\r\n{event}\r\n", event.len())).await;
            assert_eq!(client.chunk().await.0, event.as_bytes());
        }
        wire.send("0\r\n\r\n").await;
        assert_eq!(client.chunk().await.0, b"");
        if !fields.is_empty() {
            sidecar.ask(&sent).await.is_problem(422, "replay-unavailable");
        }
    }
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_stream_without_a_key() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[]).await;
    let mut client = sidecar.connect().await;
    client.send(request("GET", "/events", &[], "")).await;
    let mut wire = service.accept().await;
    wire.message().await;
    wire.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        .await;
    client.head().await;
    drop(client);
    wire.ends().await;
}

#[tokio::test]
async fn a_client_that_ends_its_side_gets_all_of_its_response() {
    let length = 3 * MIB;
    let response = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{}", "x".repeat(length));
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[]).await;
    // The end comes with the request, or while the response is received.
    for n in 0..40 {
        for is_late in [false, true] {
            let key = format!("Idempotency-Key: {n}-{is_late}");
            let keys = [key.as_str()];
            for fields in [&[][..], &keys] {
                let mut client = sidecar.connect().await;
                client.send(request("POST", "/", fields, "{}")).await;
                if !is_late {
                    client.finish().await;
                }
                let mut wire = service.accept().await;
                wire.message().await;
                let (first, second) = response.split_at(100_000);
                wire.send(first).await;
                if is_late {
                    let head = client.head().await;
                    client.finish().await;
                    let ((), message) = tokio::join!(wire.send(second), client.body(head));
                    assert_eq!(message.body.len(), length, "{n} {fields:?}");
                } else {
                    let ((), message) = tokio::join!(wire.send(second), client.message());
                    assert_eq!(message.has_status(200).body.len(), length, "{n} {fields:?}");
                }
            }
        }
    }
}

const UPGRADE: [&str; 4] = [
    "Connection: keep-alive, Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version: 13",
];
const SWITCHING: &str = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                         Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";

async fn upgraded(sidecar: &Sidecar, service: &Service, sent: &str) -> (Wire, Wire) {
    let mut client = sidecar.connect().await;
    client.send(sent).await;
    let mut wire = service.accept().await;
    let seen = wire.message().await;
    assert_eq!(seen.get("connection").map(str::to_ascii_lowercase).as_deref(), Some("upgrade"));
    assert_eq!(seen.get("upgrade"), Some("websocket"));
    assert_eq!(seen.get("sec-websocket-key"), Some("dGhlIHNhbXBsZSBub25jZQ=="));
    // The first frame arrives in one packet with the response.
    wire.send(format!("{SWITCHING}\u{1}first")).await;
    let head = client.head().await;
    assert_eq!(head.status(), 101);
    assert_eq!(head.get("upgrade"), Some("websocket"));
    assert_eq!(head.get("connection").map(str::to_ascii_lowercase).as_deref(), Some("upgrade"));
    assert_eq!(head.get("sec-websocket-accept"), Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
    assert_eq!((head.get("content-length"), head.get("transfer-encoding")), (None, None));
    assert_eq!(client.take(6).await, b"\x01first");
    (client, wire)
}

#[tokio::test]
async fn an_upgraded_connection_carries_bytes_both_ways_until_either_side_closes() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[]).await;
    for client_closes in [true, false] {
        let (mut client, mut wire) =
            upgraded(&sidecar, &service, &request("GET", "/chat", &UPGRADE, "")).await;
        for n in 0..100_u8 {
            client.send([0x81, n, 0, 0xff]).await;
            assert_eq!(wire.take(4).await, [0x81, n, 0, 0xff]);
            wire.send([0x82, n]).await;
            assert_eq!(client.take(2).await, [0x82, n]);
        }
        let (mut one, mut other) = if client_closes { (client, wire) } else { (wire, client) };
        // Each side may send its last bytes after the other has closed.
        one.finish().await;
        other.ends().await;
        other.send("bye").await;
        assert_eq!(one.take(3).await, b"bye");
        other.finish().await;
        one.ends().await;
    }
}

#[tokio::test]
async fn an_upgrade_under_a_key_happens_once() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[]).await;
    let sent = request("POST", "/chat", &[&UPGRADE[..], &[KEY]].concat(), "");
    let (mut client, mut wire) = upgraded(&sidecar, &service, &sent).await;
    client.send("ping").await;
    assert_eq!(wire.take(4).await, b"ping");
    sidecar.ask(&sent).await.is_problem(422, "replay-unavailable");
    service.is_not_called().await;
}

#[tokio::test]
async fn a_refused_upgrade_is_a_response_like_any_other() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[]).await;
    let mut client = sidecar.connect().await;
    client.send(request("GET", "/chat", &UPGRADE, "")).await;
    let mut wire = service.accept().await;
    wire.message().await;
    wire.send(
        "HTTP/1.1 426 Upgrade Required\r\nConnection: upgrade\r\nUpgrade: foo\r\nContent-Length: 2\r\n\r\nno",
    )
    .await;
    assert_eq!(client.message().await.has_status(426).text(), "no");
}

#[tokio::test]
async fn an_upgrade_to_http_2_does_not_bypass_the_keys() {
    let service = Service::new().await;
    for protocol in ["h2c", "H2C", "websocket, h2c"] {
        let sidecar = Sidecar::start(service.address, &[]).await;
        let mut client = sidecar.connect().await;
        let upgrade = format!("Upgrade: {protocol}");
        let fields = ["Connection: Upgrade, HTTP2-Settings", &upgrade, "HTTP2-Settings: AAMAAABkAAQAAP__"];
        client.send(request("GET", "/", &fields, "")).await;
        let mut wire = service.accept().await;
        let seen = wire.message().await;
        for name in ["upgrade", "connection", "http2-settings"] {
            assert_eq!(seen.get(name), None, "{protocol}");
        }
        wire.send(OK).await;
        client.message().await.has_status(200);
    }
}

#[tokio::test]
async fn a_100_continue_is_sent_only_when_the_body_is_needed() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--max-request-body=1KiB"]).await;
    for fields in [&[][..], &[KEY]] {
        let mut client = sidecar.connect().await;
        client
            .send(request(
                "POST",
                "/",
                &[fields, &["Expect: 100-continue", "Content-Length: 3"]].concat(),
                "",
            ))
            .await;
        assert_eq!(client.head().await.status(), 100);
        client.send("abc").await;
        let mut wire = service.accept().await;
        let seen = wire.message().await;
        assert_eq!((seen.text(), seen.get("expect")), ("abc", None));
        wire.send(OK).await;
        client.message().await.has_status(200);
    }
    for (key, length, status, slug) in
        [("k2", 1025, 413, "request-too-large"), ("", 3, 400, "key-invalid"), ("a b", 3, 400, "key-invalid")]
    {
        let mut client = sidecar.connect().await;
        let fields = [format!("Idempotency-Key: {key}"), format!("Content-Length: {length}")];
        client.send(request("POST", "/", &["Expect: 100-continue", &fields[0], &fields[1]], "")).await;
        // The sidecar sends no 100 first, and the connection does not wait for a body that will not be read.
        client.message().await.is_problem(status, slug);
        client.ends().await;
    }
    service.is_not_called().await;
}

#[tokio::test]
async fn a_body_of_unknown_length_is_refused_when_it_grows_too_large() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--max-request-body=1KiB"]).await;
    let mut client = sidecar.connect().await;
    client.send(request("POST", "/", &[KEY, "Transfer-Encoding: chunked"], "")).await;
    client.send(format!("400\r\n{}\r\n", "a".repeat(1024))).await;
    client.stays_silent().await;
    client.send("1\r\na\r\n").await;
    client.message().await.is_problem(413, "request-too-large");
    service.is_not_called().await;
}

/// Sends this many bytes, and counts how many were accepted.
fn pour(mut wire: Wire, bytes: usize) -> (Arc<AtomicUsize>, tokio::task::JoinHandle<Wire>) {
    let poured = Arc::new(AtomicUsize::new(0));
    let counter = poured.clone();
    let task = tokio::spawn(async move {
        let piece = vec![b'x'; MIB / 16];
        while counter.load(Ordering::Relaxed) < bytes {
            wire.try_send(&piece).await.expect("the other side still reads");
            counter.fetch_add(piece.len(), Ordering::Relaxed);
        }
        wire
    });
    (poured, task)
}

/// Waits until no more bytes are accepted, and returns their number.
async fn until_stalled(poured: &AtomicUsize) -> usize {
    let mut before = usize::MAX;
    loop {
        let now = poured.load(Ordering::Relaxed);
        if now == before {
            return now;
        }
        before = now;
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}

/// Growth of the resident memory after an upload that counts as none: a five-hundredth of the upload.
const NO_GROWTH: u64 = (LARGE / 512) as u64;

#[tokio::test]
async fn a_large_upload_streams_and_is_not_held() {
    let service = Service::new().await;
    let sidecar = Sidecar::start_in_small_pages(service.address, &["--threads=1"]).await;
    let before = sidecar.resident();
    upload(&sidecar, &service, Some(before)).await;
    upload(&sidecar, &service, Some(before)).await;
    // Freed memory is used again: three uploads in a row need no new memory. The first uploads do, and how many they are
    // depends on how sending and reading overlap. If the sidecar kept something of each upload, the growth would not
    // end.
    let (mut most, mut uploads, mut needed_nothing) = (sidecar.resident(), 0, 0);
    while needed_nothing < 3 {
        upload(&sidecar, &service, None).await;
        uploads += 1;
        let now = sidecar.resident();
        needed_nothing = if now <= most + NO_GROWTH { needed_nothing + 1 } else { 0 };
        most = most.max(now);
        assert!(uploads <= 20, "{} bytes are kept after {uploads} uploads", most.saturating_sub(before));
    }
    assert!(most.saturating_sub(before) < HELD, "{} bytes are kept", most.saturating_sub(before));
}

/// Uploads [`LARGE`] bytes. If `before` has the resident memory before, the service stops reading for a while, and the
/// sidecar must not hold many bytes then.
async fn upload(sidecar: &Sidecar, service: &Service, before: Option<u64>) {
    let mut client = sidecar.connect().await;
    client.send(request("POST", "/", &[&format!("Content-Length: {LARGE}")], "")).await;
    client.send([b'x'; 1]).await;
    // The service receives the first byte before the client sends the second.
    let mut wire = service.accept().await;
    assert_eq!(wire.head().await.get("content-length"), Some(LARGE.to_string().as_str()));
    assert_eq!(wire.take(1).await, b"x");
    client.send(vec![b'x'; MIB / 16 - 1]).await;
    let (poured, task) = pour(client, LARGE - MIB / 16);
    if let Some(before) = before {
        assert!(until_stalled(&poured).await < LARGE / 2, "the sidecar does not slow the client down");
        let held = sidecar.resident().saturating_sub(before);
        assert!(held < HELD, "{held} bytes are held");
    }
    let mut left = LARGE - 1;
    while left > 0 {
        left -= wire.take(left.min(MIB)).await.len();
    }
    wire.send(OK).await;
    let mut client = within("the end of the upload", task).await.unwrap();
    client.message().await.has_status(200);
}

#[tokio::test]
async fn a_large_download_streams_and_is_not_held() {
    for fields in [&[][..], &[KEY]] {
        let service = Service::new().await;
        let sidecar = Sidecar::start_in_small_pages(service.address, &["--threads=1"]).await;
        let before = sidecar.resident();
        let sent = request("POST", "/", fields, "{}");
        let mut client = sidecar.connect().await;
        client.send(&sent).await;
        let mut wire = service.accept().await;
        wire.message().await;
        wire.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {LARGE}\r\n\r\n")).await;
        let (poured, task) = pour(wire, LARGE);
        assert_eq!(client.head().await.get("content-length"), Some(LARGE.to_string().as_str()));
        assert!(until_stalled(&poured).await < LARGE / 2, "the sidecar does not slow the service down");
        let held = sidecar.resident().saturating_sub(before);
        assert!(held < HELD, "{held} bytes are held, {fields:?}");
        let mut left = LARGE;
        while left > 0 {
            left -= client.take(left.min(MIB)).await.len();
        }
        within("the end of the download", task).await.unwrap();
        if !fields.is_empty() {
            sidecar.ask(&sent).await.is_problem(422, "replay-unavailable");
        }
    }
}

#[tokio::test]
async fn both_directions_run_at_once() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[]).await;
    let mut client = sidecar.connect().await;
    client.send(request("POST", "/echo", &["Transfer-Encoding: chunked"], "")).await;
    let mut wire = service.accept().await;
    wire.head().await;
    wire.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").await;
    assert_eq!(client.head().await.status(), 200);
    for n in 0..10 {
        let chunk = format!("2\r\n{n:02}\r\n");
        client.send(&chunk).await;
        assert_eq!(wire.chunk().await.0, format!("{n:02}").as_bytes());
        wire.send(&chunk).await;
        assert_eq!(client.chunk().await.0, format!("{n:02}").as_bytes());
    }
    client.send("0\r\n\r\n").await;
    assert_eq!(wire.chunk().await.0, b"");
    wire.send("0\r\n\r\n").await;
    assert_eq!(client.chunk().await.0, b"");
}

#[tokio::test]
async fn a_response_before_the_end_of_the_upload_reaches_the_client() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[]).await;
    let mut client = sidecar.connect().await;
    client.send(request("POST", "/", &["Content-Length: 100000"], "")).await;
    client.send("x").await;
    let mut wire = service.accept().await;
    wire.head().await;
    wire.send("HTTP/1.1 413 Content Too Large\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno").await;
    drop(wire);
    assert_eq!(client.message().await.has_status(413).text(), "no");
}

#[tokio::test]
async fn requests_share_a_connection_and_may_be_pipelined() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--threads=1"]).await;
    let mut client = sidecar.connect().await;
    let requests: String = (0..5)
        .map(|n| {
            let key = format!("Idempotency-Key: k{n}");
            if n % 2 == 0 {
                request("GET", &format!("/{n}"), &[], "")
            } else {
                request("POST", &format!("/{n}"), &[&key], "{}")
            }
        })
        .collect();
    client.send(requests).await;
    let mut wire = service.accept().await;
    for n in 0..5 {
        let seen;
        (wire, seen) = service.next(wire).await;
        assert!(seen.head.line.contains(&format!(" /{n} ")), "{:?}", seen.head.line);
        wire.send(format!("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{n}")).await;
    }
    for n in 0..5 {
        assert_eq!(client.message().await.has_status(200).text(), n.to_string());
    }
    client.send(request("GET", "/last", &["Connection: close"], "")).await;
    (wire, _) = service.next(wire).await;
    wire.send(OK).await;
    client.message().await.has_status(200);
    client.ends().await;
}

#[tokio::test]
async fn a_few_connections_to_the_service_carry_many_requests() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &["--threads=2"]).await;
    for n in 0..100 {
        let key = format!("Idempotency-Key: k{n}");
        // On any connection, and for any host.
        let text = request("POST", "/", &[&key], "{}").replace("orders.test", &format!("h{n}.test"));
        sidecar.ask(&text).await.has_status(200);
    }
    assert_eq!(service.requests(), 100);
    assert!(service.connections() <= 2, "{} connections", service.connections());
}

#[tokio::test]
async fn an_idle_connection_that_the_service_closes_fails_no_request() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--threads=1"]).await;
    let mut client = sidecar.connect().await;
    for n in 0..10 {
        let key = format!("Idempotency-Key: k{n}");
        client.send(request("POST", "/", &[&key], "{}")).await;
        let mut wire = service.accept().await;
        wire.message().await;
        wire.send(OK).await;
        client.message().await.has_status(200);
        wire.finish().await;
        // The sidecar has noticed the close.
        wire.ends().await;
    }
}

#[tokio::test]
async fn idle_connections_to_the_service_are_closed_before_the_service_closes_them() {
    // Kept for less than the two seconds of gunicorn, or not kept at all.
    for (flags, connections) in
        [(&["--threads=1"][..], 1), (&["--threads=1", "--upstream-idle-timeout=0s"], 2)]
    {
        let service = Service::new().await.answers(OK);
        let sidecar = Sidecar::start(service.address, flags).await;
        for _ in 0..2 {
            sidecar.ask(&request("GET", "/", &[], "")).await.has_status(200);
        }
        assert_eq!(service.connections(), connections, "{flags:?}");
    }
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--threads=1"]).await;
    let mut client = sidecar.connect().await;
    client.send(request("GET", "/", &[], "")).await;
    let mut wire = service.accept().await;
    wire.message().await;
    wire.send(OK).await;
    client.message().await.has_status(200);
    let answered = std::time::Instant::now();
    wire.ends().await;
    assert!(answered.elapsed() < std::time::Duration::from_millis(1900), "{:?}", answered.elapsed());
}

#[tokio::test]
async fn a_silent_service_times_out_and_a_slow_one_does_not() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--upstream-timeout=2s"]).await;
    for (fields, slug) in [(&[][..], "upstream-unanswered"), (&[KEY], "outcome-unknown")] {
        let mut client = sidecar.connect().await;
        client.send(request("POST", "/silent", fields, "{}")).await;
        let mut wire = service.accept().await;
        wire.message().await;
        client.message().await.is_problem(504, slug);
        wire.ends().await;
    }
    // Longer than the time-out as a whole, but never silent for nearly that long.
    let mut client = sidecar.connect().await;
    client.send(request("GET", "/slow", &[], "")).await;
    let mut wire = service.accept().await;
    wire.message().await;
    wire.send("HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n").await;
    for _ in 0..30 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        wire.send("x").await;
    }
    assert_eq!(client.message().await.has_status(200).text(), "x".repeat(30));
    // A response that begins and does not continue.
    client.send(request("GET", "/stuck", &[], "")).await;
    (wire, _) = service.next(wire).await;
    wire.send("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n012").await;
    client.head().await;
    assert_eq!(client.rest().await, b"012");
}

#[tokio::test]
async fn a_thousand_idle_connections_do_not_block_requests() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
    let service = Service::new().await.answers(OK);
    // The sidecar raises its own limit of open files if it starts with a low one, as under systemd.
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -Sn 256; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_oncegate"), "proxy"]);
    command.args(["--listen=127.0.0.1:0", "--admin=127.0.0.1:0", "--store=memory:"]);
    let sidecar = Sidecar::run(command.arg(format!("--to=http://{}", service.address))).await;
    let mut clients = Vec::new();
    for _ in 0..1000 {
        clients.push(sidecar.connect().await);
    }
    for round in 0..2 {
        for (n, client) in clients.iter_mut().enumerate() {
            let key = format!("Idempotency-Key: k{n}");
            client.send(request("POST", "/", &[&key], "{}")).await;
        }
        for client in &mut clients {
            let got: Message = client.message().await;
            assert_eq!(got.has_status(200).is_replay(), round == 1);
        }
    }
    sidecar.ask(&request("GET", "/", &[], "")).await.has_status(200);
    assert_eq!(service.requests(), 1001);
}

/// Longer than the time that clients get here.
const SLOW: Duration = Duration::from_secs(60);

#[tokio::test]
async fn clients_that_send_no_complete_request_are_disconnected() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--client-idle-timeout=3s"]).await;
    let beginnings =
        ["", "G", "PRI * HTTP", "GET / HTTP/1.1\r\nHost: a\r\n", "GET / HTTP/1.1\r\nHost: a\r\nX-A: "];
    let mut waiting = Vec::new();
    for beginning in beginnings {
        let mut client = sidecar.connect().await;
        client.send(beginning).await;
        waiting.push((
            beginning,
            tokio::spawn(tokio::time::timeout(SLOW, async move { client.raw_rest().await })),
        ));
    }
    for (beginning, end) in waiting {
        assert!(end.await.unwrap().is_ok(), "{beginning:?} keeps a connection");
    }
    service.is_not_called().await;
}
