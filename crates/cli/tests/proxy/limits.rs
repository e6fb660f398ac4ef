//! Limits on what clients and services may use of the sidecar: connections, requests, memory, time.

use std::io::Write as _;
use std::time::{Duration, Instant};

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::{Request, StatusCode, Version};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::{TokioExecutor, TokioIo};
use oncegate_testkit::until;
use tokio::net::TcpStream;

use crate::support::{FixedService, Message, Service, Sidecar, Wire, request, within};
use crate::{KEY, OK};

const MIB: usize = 1024 * 1024;

fn with_key(key: usize) -> String {
    request("POST", "/orders", &[&format!("Idempotency-Key: key-{key}")], "{}")
}

/// The peak of the sidecar's resident memory, in bytes.
fn peak(sidecar: &Sidecar) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", sidecar.process.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

#[track_caller]
fn is_overloaded(response: &Message) {
    response.is_problem(503, "overloaded");
    assert_eq!(
        (response.json()["retry"].as_str(), response.get("retry-after")),
        (Some("same-key"), Some("1"))
    );
}

#[tokio::test]
async fn a_connection_beyond_the_limit_waits_until_another_ends() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &["--max-connections=2", "--threads=2"]).await;
    let mut open = Vec::new();
    for _ in 0..2 {
        let mut wire = sidecar.connect().await;
        wire.send(request("GET", "/", &[], "")).await;
        wire.message().await.has_status(200);
        open.push(wire);
    }
    let mut one_more = sidecar.connect().await;
    one_more.send(request("GET", "/", &[], "")).await;
    one_more.stays_silent().await;
    drop(open.pop());
    one_more.message().await.has_status(200);
}

#[tokio::test]
async fn requests_of_clients_that_hung_up_are_bounded() {
    let service = Service::new().await;
    let mut sidecar = Sidecar::start(service.address, &["--max-in-flight=3", "--threads=2"]).await;
    let mut wires = Vec::new();
    for key in 0..3 {
        let mut client = sidecar.connect().await;
        client.send(with_key(key)).await;
        let mut wire = service.accept().await;
        wire.message().await;
        wires.push(wire);
        drop(client);
    }
    for key in 3..6 {
        is_overloaded(&sidecar.ask(&with_key(key)).await);
    }
    service.is_not_called().await;
    sidecar.process.logs("limit=\"max-in-flight\" suppressed=0").await;
    assert_eq!(sidecar.process.error_lines("a limit is reached").len(), 1);
    let mut client = sidecar.connect().await;
    client.send(request("POST", "/", &[], "{}")).await;
    let mut wire = service.accept().await;
    wire.message().await;
    wire.send(OK).await;
    client.message().await.has_status(200);
    for wire in &mut wires {
        wire.send(OK).await;
    }
    // The refused requests claimed no key, and no started request is lost.
    until("there is space again", async || sidecar.ask(&with_key(0)).await.status() == 200).await;
    drop((wires, wire));
    let answering = service.answers(OK);
    assert!(!sidecar.ask(&with_key(3)).await.has_status(200).is_replay());
    assert_eq!(answering.requests(), 1);
}

#[tokio::test]
async fn one_caller_gets_no_more_than_its_share() {
    let service = Service::new().await;
    let mut sidecar = Sidecar::start(service.address, &["--max-in-flight-per-caller=1"]).await;
    let of = |caller: &str, key: usize| {
        let fields = [format!("Idempotency-Key: key-{key}"), format!("Authorization: {caller}")];
        request("POST", "/orders", &[&fields[0], &fields[1]], "{}")
    };
    let mut first = sidecar.connect().await;
    first.send(of("ada", 1)).await;
    let mut wire = service.accept().await;
    wire.message().await;
    is_overloaded(&sidecar.ask(&of("ada", 2)).await);
    sidecar.process.logs("limit=\"max-in-flight-per-caller\" caller=").await;
    let mut second = sidecar.connect().await;
    second.send(of("bob", 2)).await;
    let mut other = service.accept().await;
    other.message().await;
    for (wire, client) in [(&mut wire, &mut first), (&mut other, &mut second)] {
        wire.send(OK).await;
        client.message().await.has_status(200);
    }
}

type Client = SendRequest<Full<Bytes>>;

/// A client of HTTP/2 that accepts this many bytes of each response before it reads.
async fn http2(sidecar: &Sidecar, window: u32) -> Client {
    let stream = TcpStream::connect(sidecar.address).await.unwrap();
    let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    builder.initial_stream_window_size(window);
    let (client, connection) = within("a connection", builder.handshake(TokioIo::new(stream))).await.unwrap();
    tokio::spawn(connection);
    client
}

fn keyed(key: &str) -> Request<Full<Bytes>> {
    let request = Request::post("http://orders.test/orders").header("idempotency-key", key);
    request.body(Full::from("{}")).unwrap()
}

/// A service whose response has half a megabyte.
async fn large_responses() -> FixedService {
    let response = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{}", MIB / 2, "x".repeat(MIB / 2));
    Service::new().await.answers(response.leak())
}

#[tokio::test]
async fn unread_replays_are_bounded_and_given_up() {
    let service = large_responses().await;
    let flags = ["--response-budget=4MiB", "--write-timeout=1s", "--threads=1"];
    let sidecar = Sidecar::start_in_small_pages(service.address, &flags).await;
    sidecar.ask(&request("POST", "/orders", &["Idempotency-Key: k"], "{}")).await.has_status(200);
    let before = sidecar.resident();
    let mut given_up = 0;
    // A window of one byte lets the first piece of a response into the connection; a window of zero lets in nothing.
    for window in [0, 1] {
        let mut client = http2(&sidecar, window).await;
        let mut replays = Vec::new();
        let mut refused = 0;
        for _ in 0..40 {
            let response = within("a head", client.send_request(keyed("k"))).await.unwrap();
            match response.status() {
                StatusCode::OK => replays.push(response.into_body()),
                StatusCode::SERVICE_UNAVAILABLE => refused += 1,
                other => panic!("{other}"),
            }
        }
        // Some replays may have been given up meanwhile, which frees space.
        assert!(refused > 0 && replays.len() >= 8, "{} replays, {refused} refused", replays.len());
        let held = sidecar.resident().saturating_sub(before);
        assert!(held < 12 * MIB as u64, "{held} bytes are held");
        for mut replay in replays {
            // A stalled stream is reset, and its connection continues.
            until("the response is given up", async || {
                matches!(
                    tokio::time::timeout(Duration::from_millis(10), replay.frame()).await,
                    Ok(Some(Err(_)))
                )
            })
            .await;
            given_up += 1;
        }
        let small = Request::get("http://orders.test/").body(Full::default()).unwrap();
        assert_eq!(within("a head", client.send_request(small)).await.unwrap().status(), 200);
    }
    assert!(given_up > 1);
    until("there is space again", async || {
        let replay = sidecar.ask(&request("POST", "/orders", &["Idempotency-Key: k"], "{}")).await;
        replay.status() == 200 && replay.body.len() == MIB / 2
    })
    .await;
}

#[tokio::test]
async fn a_response_that_is_read_slowly_is_not_given_up() {
    let service = large_responses().await;
    let sidecar = Sidecar::start(service.address, &["--write-timeout=1s", "--threads=1"]).await;
    let mut client = http2(&sidecar, 64 * 1024).await;
    for _ in 0..2 {
        let mut body = within("a head", client.send_request(keyed("k"))).await.unwrap().into_body();
        let mut len = 0;
        let start = tokio::time::Instant::now();
        while let Some(frame) = within("a frame", body.frame()).await {
            len += frame.unwrap().into_data().map_or(0, |data| data.len());
            // Each pause is shorter than the time-out; all pauses together are longer.
            tokio::time::sleep(Duration::from_millis(60)).await;
        }
        assert_eq!(len, MIB / 2);
        assert!(start.elapsed() > Duration::from_secs(1), "{:?}", start.elapsed());
    }
}

#[tokio::test]
async fn one_connection_may_run_a_hundred_requests_at_once() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--threads=1"]).await;
    let mut wire = sidecar.connect().await;
    // The preface, and an empty SETTINGS frame.
    wire.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await;
    let head = wire.take(9).await;
    let settings = wire.take(usize::from(head[2])).await;
    assert_eq!(head[3], 4, "the settings come first");
    let of = |id: u8| {
        let found = settings.chunks(6).find(|setting| setting[..2] == [0, id]);
        found.map(|setting| u32::from_be_bytes(setting[2..].try_into().unwrap()))
    };
    // SETTINGS_MAX_CONCURRENT_STREAMS and SETTINGS_MAX_HEADER_LIST_SIZE.
    assert_eq!((of(3), of(6)), (Some(100), Some(128 * 1024)));
}

/// Sends without end; returns when the other side reads nothing more.
async fn pour(mut wire: Wire) -> usize {
    let piece = vec![b'x'; 64 * 1024];
    let mut poured = 0;
    while poured < 256 * MIB && wire.try_send(&piece).await.is_ok() {
        poured += piece.len();
    }
    poured
}

#[tokio::test]
async fn a_client_that_does_not_read_is_disconnected() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--write-timeout=1s", "--threads=1"]).await;
    let mut client = sidecar.connect().await;
    client.send(request("GET", "/", &[], "")).await;
    let mut wire = service.accept().await;
    wire.message().await;
    wire.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10000000\r\n").await;
    let poured = within("the end of the connection", pour(wire)).await;
    assert!(poured < 64 * MIB, "{poured}");
    drop(client);
}

#[tokio::test]
async fn a_client_that_does_not_read_a_streamed_response_blocks_no_service() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--write-timeout=1s", "--threads=1"]).await;
    let mut client = sidecar.connect().await;
    let sent = request("POST", "/", &[KEY], "{}");
    client.send(&sent).await;
    let mut wire = service.accept().await;
    wire.message().await;
    wire.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", 256 * MIB)).await;
    // The sidecar reads the response to its end, although the client does not.
    assert_eq!(within("the end of the response", pour(wire)).await, 256 * MIB);
    sidecar.ask(&sent).await.is_problem(422, "replay-unavailable");
    let rest = within("the end of the connection", client.raw_rest()).await;
    assert!(rest.len() < 64 * MIB, "{}", rest.len());
}

#[tokio::test]
async fn a_small_body_with_a_large_canonical_form_costs_little_memory() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start_in_small_pages(service.address, &["--threads=1"]).await;
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all("=&".repeat(MIB).as_bytes().split_last().unwrap().1).unwrap();
    let bomb = encoder.finish().unwrap();
    assert!(bomb.len() < 4096);
    sidecar.ask(&with_key(1)).await.has_status(200);
    let before = peak(&sidecar);
    for key in 0..3 {
        let mut client = sidecar.connect().await;
        let fields = [
            "Content-Type: application/x-www-form-urlencoded".to_owned(),
            "Content-Encoding: gzip".to_owned(),
            format!("Idempotency-Key: bomb-{key}"),
            format!("Content-Length: {}", bomb.len()),
        ];
        let fields: Vec<_> = fields.iter().map(String::as_str).collect();
        client.send(request("POST", "/", &fields, "")).await;
        client.send(&bomb).await;
        client.message().await.has_status(200);
    }
    let grown = peak(&sidecar) - before;
    assert!(grown < 10 * MIB as u64, "{grown} bytes for {} bytes of request", bomb.len());
}

fn lines(count: usize) -> String {
    (0..count).map(|number| format!("X-{number}: v\r\n")).collect()
}

#[tokio::test]
async fn request_heads_have_the_same_limit_in_every_version() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &["--threads=1"]).await;
    let large = "v".repeat(100 * 1024);
    let larger = "v".repeat(140 * 1024);
    // `Host` is a line, too.
    for (fields, status) in [
        (lines(999), 200),
        (lines(1000), 431),
        (format!("X-A: {large}\r\n"), 200),
        (format!("X-A: {larger}\r\n"), 431),
    ] {
        let mut wire = sidecar.connect().await;
        let _unread = wire.try_send(format!("GET / HTTP/1.1\r\nHost: a\r\n{fields}\r\n")).await;
        wire.message().await.has_status(status);

        let mut client = http2(&sidecar, 65_535).await;
        let mut asked = Request::get("http://a/");
        for (name, value) in fields.lines().map(|line| line.split_once(": ").unwrap()) {
            asked = asked.header(name, value);
        }
        // Only HTTP/1.1 sends the authority as a line.
        let asked = if status == 431 { asked.header("x-one-more", "v") } else { asked };
        let got = within("a head", client.send_request(asked.body(Full::default()).unwrap())).await.unwrap();
        assert_eq!(got.status(), status, "{:.20}", fields);
    }
}

#[tokio::test]
async fn a_response_with_a_large_head_is_replayed_and_one_beyond_the_limit_is_refused() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--threads=1"]).await;
    for (key, fields, fits) in [
        (1, lines(900), true),
        (2, format!("X-A: {}\r\n", "v".repeat(100 * 1024)), true),
        (3, lines(1001), false),
        (4, format!("X-A: {}\r\n", "v".repeat(140 * 1024)), false),
    ] {
        let mut client = sidecar.connect().await;
        client.send(with_key(key)).await;
        let mut wire = service.accept().await;
        wire.message().await;
        let _unread = wire
            .try_send(format!(
                "HTTP/1.1 201 Created\r\nConnection: close\r\nContent-Length: 2\r\n{fields}\r\nok"
            ))
            .await;
        let first = client.message().await;
        let again = sidecar.ask(&with_key(key)).await;
        if fits {
            assert!(first.has_status(201).head.fields.len() >= fields.lines().count());
            assert!(again.has_status(201).is_replay());
        } else {
            first.is_problem(502, "upstream-head-too-large");
            assert_eq!(first.json()["retry"], "stop");
            again.is_problem(422, "replay-unavailable");
        }
    }
}

/// A service that speaks HTTP/2 only, and whose responses have as many header lines as the path names.
async fn many_lines(service: Service) {
    while let Ok((stream, _)) = service.listener().accept().await {
        let response = hyper::service::service_fn(|request: Request<hyper::body::Incoming>| async move {
            let lines: usize = request.uri().path().trim_matches('/').parse().unwrap();
            let mut response = http::Response::builder().status(201);
            for number in 0..lines {
                response = response.header(format!("x-{number}"), "v");
            }
            Ok::<_, std::convert::Infallible>(response.body(Full::new(Bytes::from("ok"))).unwrap())
        });
        let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        tokio::spawn(server.serve_connection(TokioIo::new(stream), response));
    }
}

#[tokio::test]
async fn response_heads_have_the_same_limit_over_http_2() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--upstream-protocol=http2", "--threads=1"]).await;
    tokio::spawn(many_lines(service));
    let sent = |lines: usize| request("POST", &format!("/{lines}"), &[KEY], "{}");
    // The library's own limit of 16 KiB would already refuse 450 lines.
    for lines in [100, 900] {
        assert!(sidecar.ask(&sent(lines)).await.has_status(201).head.fields.len() >= lines);
        assert!(sidecar.ask(&sent(lines)).await.has_status(201).is_replay());
    }
    sidecar.ask(&sent(1001)).await.is_problem(502, "upstream-head-too-large");
    sidecar.ask(&sent(1001)).await.is_problem(422, "replay-unavailable");
}

#[tokio::test]
async fn a_client_that_closed_its_sending_side_gets_its_response() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--threads=1"]).await;
    for fields in [&[][..], &[KEY]] {
        let mut client = sidecar.connect().await;
        client.send(request("POST", "/", fields, "{}")).await;
        client.finish().await;
        let mut wire = service.accept().await;
        wire.message().await;
        // By now the sidecar has seen the end of the client's sending side.
        wire.stays_silent().await;
        wire.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n").await;
        wire.stays_silent().await;
        wire.send("2\r\n!!\r\n0\r\n\r\n").await;
        assert_eq!(client.message().await.has_status(200).text(), "ok!!");
        client.ends().await;
    }
}

#[tokio::test]
async fn responses_that_arrived_while_the_sidecar_was_suspended_are_in_time() {
    const REQUESTS: usize = 30;
    const TIMEOUT: Duration = Duration::from_secs(2);
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--upstream-timeout=2s", "--threads=1"]).await;
    let mut keys = 0..;
    for streams in [false, true] {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut pairs = loop {
            let mut pairs = Vec::new();
            let began = Instant::now();
            for number in keys.by_ref().take(REQUESTS) {
                let mut client = sidecar.connect().await;
                client.send(with_key(number)).await;
                let mut wire = service.accept().await;
                wire.message().await;
                if streams {
                    wire.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no").await;
                }
                pairs.push((client, wire));
            }
            sidecar.process.freeze();
            // On a busy machine, the first request may have timed out before the last one was sent. Then nothing is tested yet.
            if began.elapsed() < TIMEOUT {
                break pairs;
            }
            assert!(
                Instant::now() < deadline,
                "this machine never sends {REQUESTS} requests within {TIMEOUT:?}"
            );
            sidecar.process.signal(rustix::process::Signal::CONT);
        };
        for (_, wire) in &mut pairs {
            wire.send(if streams { "k" } else { OK }).await;
        }
        tokio::time::sleep(TIMEOUT + Duration::from_millis(500)).await;
        sidecar.process.signal(rustix::process::Signal::CONT);
        for (client, _) in &mut pairs {
            client.message().await.has_status(200);
        }
    }
}

#[tokio::test]
async fn a_service_that_does_not_answer_times_out() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--upstream-timeout=200ms"]).await;
    let mut client = sidecar.connect().await;
    client.send(with_key(1)).await;
    let mut wire = service.accept().await;
    wire.message().await;
    client.message().await.is_problem(504, "outcome-unknown");
}

#[tokio::test]
async fn a_response_that_ends_with_its_connection_cannot_be_replayed() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--threads=1"]).await;
    // A complete response and a dead sender look the same.
    for (key, head) in [
        (1, "HTTP/1.1 200 OK"),
        (2, "HTTP/1.0 200 OK"),
        // The coding `identity`, which old services send.
        (4, "HTTP/1.1 200 OK\r\nTransfer-Encoding: identity"),
    ] {
        let mut client = sidecar.connect().await;
        client.send(with_key(key)).await;
        let mut wire = service.accept().await;
        wire.message().await;
        wire.send(format!("{head}\r\nConnection: close\r\n\r\n{{\"id\":")).await;
        drop(wire);
        let got = client.message().await;
        assert_eq!(got.has_status(200).text(), "{\"id\":");
        // The sidecar sends its own version.
        assert_eq!(
            (got.head.line.as_str(), got.get("transfer-encoding")),
            ("HTTP/1.1 200 OK", Some("chunked"))
        );
        sidecar.ask(&with_key(key)).await.is_problem(422, "replay-unavailable");
    }
    // A response without a body is complete.
    let mut client = sidecar.connect().await;
    client.send(with_key(3)).await;
    let mut wire = service.accept().await;
    wire.message().await;
    wire.send("HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n").await;
    client.message().await.has_status(204);
    assert!(sidecar.ask(&with_key(3)).await.has_status(204).is_replay());
}

#[tokio::test]
async fn a_response_with_an_unknown_transfer_coding_is_not_forwarded_as_plain() {
    for (codings, body) in [
        ("gzip", "cut off"),
        ("gzip, chunked", "2\r\nok\r\n0\r\n\r\n"),
        ("chunked, gzip", "2\r\nok\r\n0\r\n\r\n"),
        ("gzip\r\nTransfer-Encoding: chunked", "2\r\nok\r\n0\r\n\r\n"),
        ("chunked, identity", "2\r\nok\r\n0\r\n\r\n"),
        ("chunked, chunked", "2\r\nok\r\n0\r\n\r\n"),
        ("xchunked", "ok"),
    ] {
        let service = Service::new().await;
        let sidecar = Sidecar::start(service.address, &[]).await;
        for request in [with_key(1), request("GET", "/", &[], "")] {
            let mut client = sidecar.connect().await;
            client.send(&request).await;
            let mut wire = service.accept().await;
            wire.message().await;
            wire.send(format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: {codings}\r\n\r\n{body}")).await;
            drop(wire);
            let got = client.message().await;
            got.is_problem(502, "upstream-unsupported");
            assert_eq!(got.json()["retry"], "stop", "{codings}");
        }
        // The operation took place anyway.
        sidecar.ask(&with_key(1)).await.is_problem(422, "replay-unavailable");
    }
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[]).await;
    let mut client = sidecar.connect().await;
    client.send(with_key(1)).await;
    let mut wire = service.accept().await;
    wire.message().await;
    wire.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: identity, Chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n").await;
    assert_eq!(client.message().await.has_status(200).text(), "ok");
    assert!(sidecar.ask(&with_key(1)).await.has_status(200).is_replay());
}

#[tokio::test]
async fn a_malformed_body_without_a_key_is_a_client_error() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[]).await;
    let mut client = sidecar.connect().await;
    client.send(request("POST", "/", &["Transfer-Encoding: chunked"], "") + "2\r\nab\r\n").await;
    let mut wire = service.accept().await;
    wire.head().await;
    client.send("zz\r\n").await;
    client.message().await.is_problem(400, "request-malformed");
    client.ends().await;
}

#[tokio::test]
async fn a_repeated_length_is_refused_over_http_2_too() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[]).await;
    let mut client = http2(&sidecar, 65_535).await;
    for key in [false, true] {
        let mut asked = Request::post("http://orders.test/").version(Version::HTTP_2);
        if key {
            asked = asked.header("idempotency-key", "k");
        }
        let asked = asked.header("content-length", "2").header("content-length", "2");
        let got = within("a head", client.send_request(asked.body(Full::from("{}")).unwrap())).await.unwrap();
        assert_eq!(got.status(), 400);
        let body = within("a body", got.into_body().collect()).await.unwrap().to_bytes();
        assert!(String::from_utf8_lossy(&body).contains("request-malformed"));
    }
    service.is_not_called().await;
}

#[tokio::test]
async fn trailers_cannot_forge_fields_of_the_sidecar() {
    let service = Service::new().await;
    let flags = ["--threads=1", "--scope=header:x-tenant", "--fingerprint-headers=x-version"];
    let sidecar = Sidecar::start(service.address, &flags).await;
    for fields in [&[][..], &[KEY, "X-Tenant: 1"]] {
        let mut client = sidecar.connect().await;
        let named = "Trailer: X-Sum, Oncegate-Token, oncegate_record, X-Forwarded-For, Forwarded, Content-Length, X-Tenant";
        let ask = ["TE: trailers", "Connection: TE", "Transfer-Encoding: chunked", named];
        let head = request("POST", "/", &[&ask[..], fields].concat(), "");
        let trailers = "Oncegate-Token: 9\r\noncegate_record: x\r\nX-Forwarded-For: 192.0.2.1\r\nForwarded: for=192.0.2.1\r\n\
                        Content-Length: 3\r\nX-Tenant: 2\r\nX_Tenant: 2\r\nX-Version: 2\r\nX-Api-Key: 2\r\n\
                        X-HTTP-Method-Override: DELETE\r\nX-Sum: 1\r\n";
        client.send(format!("{head}3\r\nabc\r\n0\r\n{trailers}\r\n")).await;
        let mut wire = service.accept().await;
        let seen = wire.message().await;
        assert_eq!(seen.trailers, [("x-sum".to_owned(), "1".to_owned())]);
        wire.send(OK).await;
        client.message().await.has_status(200);
    }
}

#[tokio::test]
async fn forwarding_fields_of_trusted_hops_are_kept() {
    for (flags, trusted) in [
        (&[][..], true),
        (&["--trusted-proxies=10.0.0.0/8,127.0.0.1"], true),
        (&["--trusted-proxies=none"], false),
        (&["--trusted-proxies=10.0.0.0/8"], false),
    ] {
        let service = Service::new().await;
        let sidecar = Sidecar::start(service.address, flags).await;
        let mut client = sidecar.connect().await;
        client
            .send(request("GET", "/", &["X-Forwarded-For: 192.0.2.1", "X-Forwarded-Proto: https"], ""))
            .await;
        let mut wire = service.accept().await;
        let seen = wire.message().await;
        let expected = if trusted { ("192.0.2.1, 127.0.0.1", "https") } else { ("127.0.0.1", "http") };
        assert_eq!(
            (seen.get("x-forwarded-for"), seen.get("x-forwarded-proto")),
            (Some(expected.0), Some(expected.1)),
            "{flags:?}"
        );
        wire.send(OK).await;
        client.message().await.has_status(200);
    }
}

#[tokio::test]
async fn fields_of_an_untrusted_hop_are_ignored() {
    let fields = [
        "X-Forwarded-User: alice",
        "X-Forwarded-Host: shop.test",
        "X-Real-IP: 192.0.2.1",
        "X_Forwarded_User: alice",
    ];
    let post = |fields: &[&str]| request("POST", "/orders", &[&[KEY], fields].concat(), "{}");
    // The hop is not trusted: a client that names a user in such a field has no user.
    for scope in ["x-forwarded-user", "x-forwarded-host", "x-real-ip"] {
        let service = Service::new().await.answers(OK);
        let scope = format!("--scope=required-header:{scope}");
        let mut sidecar = Sidecar::start(service.address, &["--trusted-proxies=none", &scope]).await;
        let forged = [&fields[..], &["Oncegate-User: alice", "Proxy-Authorization: alice"]].concat();
        sidecar.ask(&post(&forged)).await.is_problem(400, "scope-unavailable");
        assert_eq!(service.requests(), 0, "{scope}");
        // The log tells an operator who forgot to list the gateway what is missing.
        sidecar.process.logs("is not one of trusted-proxies").await;
    }
    // Two requests that the service cannot tell apart count as the same request.
    let service = Service::new().await.answers(OK);
    let compared = "--fingerprint-headers=x-forwarded-user";
    let sidecar = Sidecar::start(service.address, &["--trusted-proxies=none", compared]).await;
    sidecar.ask(&post(&["X-Forwarded-User: alice"])).await.has_status(200);
    assert!(sidecar.ask(&post(&["X-Forwarded-User: bob"])).await.has_status(200).is_replay());
    // A trusted hop names the user.
    let scope = "--scope=required-header:x-forwarded-user";
    let sidecar = Sidecar::start(service.address, &["--trusted-proxies=127.0.0.1", scope]).await;
    sidecar.ask(&post(&["X-Forwarded-User: alice"])).await.has_status(200);
    assert!(sidecar.ask(&post(&["X-Forwarded-User: alice"])).await.has_status(200).is_replay());
    assert!(!sidecar.ask(&post(&["X-Forwarded-User: bob"])).await.has_status(200).is_replay());
}

#[tokio::test]
async fn unread_responses_keep_new_keys_from_being_executed() {
    let service = large_responses().await;
    let flags = ["--response-budget=4MiB", "--threads=1"];
    let sidecar = Sidecar::start_in_small_pages(service.address, &flags).await;
    let mut client = http2(&sidecar, 0).await;
    // The budget that this thread reserved ahead for the request stays with the thread.
    let small = request("POST", "/orders", &["Idempotency-Key: small"], "{}");
    sidecar.ask(&small).await.has_status(200);
    let (mut executed, mut refused) = (Vec::new(), 0);
    for key in 0..60 {
        let response = within("a head", client.send_request(keyed(&format!("new-{key}")))).await.unwrap();
        match response.status() {
            StatusCode::OK => executed.push(response.into_body()),
            StatusCode::SERVICE_UNAVAILABLE => refused += 1,
            other => panic!("{other}"),
        }
    }
    // Eight responses of half a MiB fill the budget. A response that starts while a little space is left is kept, too.
    assert!(executed.len() <= 10, "{} executed, {refused} refused", executed.len());
    drop((executed, client));
    until("there is space again", async || sidecar.ask(&small).await.status() == 200).await;
}

#[tokio::test]
async fn requests_without_a_key_are_bounded_until_their_responses_end() {
    let service = Service::new().await;
    let flags = ["--max-in-flight-without-key=2", "--threads=2"];
    let sidecar = Sidecar::start(service.address, &flags).await;
    let get = request("GET", "/slow", &[], "");
    let (mut clients, mut wires) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let mut client = sidecar.connect().await;
        client.send(&get).await;
        let mut wire = service.accept().await;
        wire.message().await;
        clients.push(client);
        wires.push(wire);
    }
    let gauge = "oncegate_requests_without_key_in_flight";
    assert_eq!(crate::operations::series(&sidecar, gauge).await, Some(2.0));
    let limit = "oncegate_requests_without_key_in_flight_limit";
    assert_eq!(crate::operations::series(&sidecar, limit).await, Some(2.0));
    for _ in 0..3 {
        is_overloaded(&sidecar.ask(&get).await);
    }
    // Requests with a key have a limit of their own.
    let mut client = sidecar.connect().await;
    client.send(with_key(1)).await;
    let mut wire = service.accept().await;
    wire.message().await;
    wire.send(OK).await;
    client.message().await.has_status(200);
    // A response that has begun counts until it ends; a client that hangs up does not count.
    wires[0].send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no").await;
    clients[0].head().await;
    is_overloaded(&sidecar.ask(&get).await);
    drop((clients, wires));
    until("there is space again", async || crate::operations::series(&sidecar, gauge).await == Some(0.0))
        .await;
}

#[tokio::test]
async fn an_upgraded_connection_counts_until_it_ends() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--max-in-flight-without-key=1", "--threads=1"]).await;
    let upgrade = request("GET", "/chat", &["Connection: upgrade", "Upgrade: websocket"], "");
    let mut client = sidecar.connect().await;
    client.send(&upgrade).await;
    let mut wire = service.accept().await;
    assert_eq!(wire.message().await.get("upgrade"), Some("websocket"));
    wire.send("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n").await;
    client.head().await;
    wire.send("hello").await;
    assert_eq!(client.take(5).await, b"hello");
    is_overloaded(&sidecar.ask(&request("GET", "/", &[], "")).await);
    // The same with a key: the key stays free.
    let keyed = request("POST", "/chat", &["Connection: upgrade", "Upgrade: websocket", KEY], "");
    is_overloaded(&sidecar.ask(&keyed).await);
    drop((client, wire));
    let service = service.answers(OK);
    until("there is space again", async || sidecar.ask(&request("GET", "/", &[], "")).await.status() == 200)
        .await;
    assert!(!sidecar.ask(&keyed).await.has_status(200).is_replay());
    drop(service);
}

#[tokio::test]
async fn connections_to_the_service_are_kept_for_the_configured_time() {
    let get = request("GET", "/", &[], "");
    for (flag, connections) in [("0s", 3), ("10m", 1)] {
        let service = Service::new().await.answers(OK);
        let flag = format!("--upstream-idle-timeout={flag}");
        let sidecar = Sidecar::start(service.address, &[&flag, "--threads=1"]).await;
        for _ in 0..3 {
            sidecar.ask(&get).await.has_status(200);
        }
        assert_eq!(service.connections(), connections, "{flag}");
    }
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &["--upstream-idle-timeout=100ms", "--threads=1"]).await;
    for connections in 1..3 {
        sidecar.ask(&get).await.has_status(200);
        assert_eq!(service.connections(), connections);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
