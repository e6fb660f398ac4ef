//! The budget that the bodies of requests with a key share.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::OK;
use crate::support::{Message, Service, Sidecar, TIMEOUT, Wire, request};
use oncegate_testkit::until;

const BUDGET: usize = 100_000;
const FLAGS: [&str; 3] = ["--request-budget=100000B", "--max-request-body=100000B", "--threads=1"];

fn key() -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    format!("Idempotency-Key: key-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A request with a body of this size, and a key of its own.
fn post(bytes: usize) -> String {
    request("POST", "/orders", &[&key()], &"x".repeat(bytes))
}

fn is_overloaded(response: &Message) {
    response.is_problem(503, "overloaded");
    assert_eq!(response.json()["retry"], "same-key");
    assert_eq!(response.get("retry-after"), Some("1"));
    assert_eq!(response.get("cache-control"), Some("no-store"));
}

/// A client that has sent this many bytes of an unfinished body.
async fn holding(sidecar: &Sidecar, bytes: usize) -> Wire {
    let give_up = Instant::now() + TIMEOUT;
    loop {
        let mut wire = sidecar.connect().await;
        let head = format!(
            "POST /orders HTTP/1.1\r\nHost: orders.test\r\n{}\r\nContent-Length: {BUDGET}\r\n\r\n{}",
            key(),
            "x".repeat(bytes)
        );
        wire.send(head).await;
        // The budget holds the body as soon as a body that exceeds the rest is refused. If that one came first, this
        // one is refused.
        loop {
            assert!(Instant::now() < give_up, "the budget never holds the body");
            if sidecar.ask(&post(BUDGET - bytes + 1)).await.status() == 503 {
                return wire;
            }
            if tokio::time::timeout(Duration::from_millis(20), wire.try_head()).await.is_ok() {
                break;
            }
        }
    }
}

/// Asserts that the whole budget is free.
async fn budget_is_free(sidecar: &Sidecar) {
    until("the whole budget is free", async || sidecar.ask(&post(BUDGET)).await.status() == 200).await;
}

#[tokio::test]
async fn a_body_that_fills_the_budget_is_accepted_and_one_byte_more_is_refused() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &FLAGS).await;
    sidecar.ask(&post(BUDGET)).await.has_status(200);
    let mut held = holding(&sidecar, 60_000).await;
    let asked = service.requests();
    for _ in 0..3 {
        sidecar.ask(&post(40_000)).await.has_status(200);
        let refused = post(40_001);
        is_overloaded(&sidecar.ask(&refused).await);
    }
    assert_eq!(service.requests(), asked + 3);
    // A request without a key, or without a body, uses no budget.
    sidecar.ask(&request("POST", "/orders", &[], &"x".repeat(50_000))).await.has_status(200);
    sidecar.ask(&request("POST", "/orders", &[&key()], "")).await.has_status(200);
    // The refused request claimed no key: the same key is free for another request.
    let taken = key();
    is_overloaded(&sidecar.ask(&request("POST", "/orders", &[&taken], &"x".repeat(40_001))).await);
    sidecar.ask(&request("POST", "/orders", &[&taken], "{}")).await.has_status(200);
    held.send("x".repeat(40_000)).await;
    held.message().await.has_status(200);
    budget_is_free(&sidecar).await;
    let metrics =
        crate::support::ask(sidecar.admin, "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n").await;
    assert!(metrics.text().contains("oncegate_requests_total{outcome=\"overloaded\",status=\"5xx\"}"));
}

#[tokio::test]
async fn every_end_of_a_request_gives_its_budget_back() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &FLAGS).await;
    let chunked = |chunks: &str| {
        format!(
            "POST /orders HTTP/1.1\r\nHost: orders.test\r\n{}\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}",
            key()
        )
    };
    let chunk = format!("ea60\r\n{}\r\n", "x".repeat(60_000));
    let again = post(60_000);
    for _ in 0..5 {
        // A client that hangs up, one that breaks the framing, and one whose body is too long.
        drop(holding(&sidecar, 60_000).await);
        budget_is_free(&sidecar).await;
        sidecar.ask(&chunked(&format!("{chunk}zz\r\n"))).await.has_status(400);
        sidecar.ask(&chunked(&format!("{chunk}{chunk}0\r\n\r\n"))).await;
        budget_is_free(&sidecar).await;
        // A replay, a mismatch, and a refusal.
        sidecar.ask(&again).await.has_status(200);
        sidecar.ask(&again.replace("xx", "yy")).await.is_problem(422, "key-reused");
        budget_is_free(&sidecar).await;
    }
    let gone = Service::new().await;
    let address = gone.address;
    drop(gone);
    let sidecar = Sidecar::start(address, &FLAGS).await;
    for _ in 0..10 {
        sidecar.ask(&post(60_000)).await.is_problem(502, "upstream-unreachable");
    }
}

#[tokio::test]
async fn a_body_uses_the_budget_until_a_slow_service_has_read_it() {
    const LARGE: usize = 40 * 1024 * 1024;
    let service = Service::new().await;
    let budget = format!("--request-budget={LARGE}B");
    let body = format!("--max-request-body={LARGE}B");
    let sidecar = Sidecar::start(service.address, &[&budget, &body, "--threads=1"]).await;
    let mut client = sidecar.connect().await;
    client.send(post(LARGE)).await;
    // The service reads only the head at first. The sidecar keeps what the sockets cannot hold.
    let mut wire = service.accept().await;
    let head = wire.head().await;
    let small = post(1024 * 1024);
    for _ in 0..3 {
        is_overloaded(&sidecar.ask(&small).await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    wire.body(head).await;
    wire.send(OK).await;
    client.message().await.has_status(200);
    let mut client = sidecar.connect().await;
    client.send(&small).await;
    let (mut wire, seen) = service.next(wire).await;
    assert_eq!(seen.body.len(), 1024 * 1024);
    wire.send(OK).await;
    client.message().await.has_status(200);
}

#[tokio::test]
async fn many_tiny_pieces_use_the_budget_of_their_bytes() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &FLAGS).await;
    let pieces = |count: usize| {
        format!(
            "POST /orders HTTP/1.1\r\nHost: orders.test\r\n{}\r\nTransfer-Encoding: chunked\r\n\r\n{}0\r\n\r\n",
            key(),
            "1\r\nx\r\n".repeat(count)
        )
    };
    // The memory is in proportion to the bytes, so tiny pieces cannot use up the budget of others.
    sidecar.ask(&pieces(20_000)).await.has_status(200);
    budget_is_free(&sidecar).await;
}

/// The pieces of a response are copied together while it is read. Otherwise each piece keeps its framing and a place in a list,
/// which is dozens of times the size of its byte.
#[tokio::test]
async fn a_response_in_tiny_pieces_needs_memory_in_proportion_to_its_bytes() {
    const PIECES: usize = 1_000_000;
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--threads=1", "--max-response-body=4MiB"]).await;
    let mut client = sidecar.connect().await;
    client.send(post(10)).await;
    let mut wire = service.accept().await;
    wire.message().await;
    let before = sidecar.resident();
    wire.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").await;
    for _ in 0..PIECES / 1_000 {
        wire.send("1\r\nx\r\n".repeat(1_000)).await;
    }
    let line = format!("oncegate_response_budget_used_bytes {PIECES}\n");
    let ask = "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";
    until("all pieces are read", async || {
        crate::support::ask(sidecar.admin, ask).await.text().contains(&line)
    })
    .await;
    let used = sidecar.resident().saturating_sub(before);
    assert!(used < 10 * PIECES as u64, "{used} bytes");
    wire.send("0\r\n\r\n").await;
    assert_eq!(client.message().await.has_status(200).body.len(), PIECES);
}

#[tokio::test]
async fn threads_share_the_budget() {
    let service = Service::new().await.answers(OK);
    let flags = ["--request-budget=8MiB", "--max-request-body=1MiB", "--threads=4"];
    let sidecar = Sidecar::start(service.address, &flags).await;
    let part = 1_000_000;
    let mut wires = Vec::new();
    for _ in 0..16 {
        let mut wire = sidecar.connect().await;
        let head = format!(
            "POST /orders HTTP/1.1\r\nHost: orders.test\r\n{}\r\nContent-Length: {}\r\n\r\n",
            key(),
            part + 1
        );
        wire.send(head + &"x".repeat(part)).await;
        wires.push(wire);
    }
    // Some requests have space, on any thread; the others are refused before their bodies end.
    let mut refused = 0;
    let give_up = Instant::now() + TIMEOUT;
    while refused < 8 {
        assert!(Instant::now() < give_up, "{refused} refused");
        let mut wire = wires.remove(0);
        match tokio::time::timeout(Duration::from_millis(20), wire.message()).await {
            Ok(response) => {
                is_overloaded(&response);
                refused += 1;
            }
            Err(_) => wires.push(wire),
        }
    }
    let mut taken = 0;
    for mut wire in wires {
        let _refused_before = wire.try_send("x").await;
        match wire.message().await.status() {
            200 => taken += 1,
            503 => refused += 1,
            other => panic!("{other}"),
        }
    }
    assert!((1..=8).contains(&taken), "{taken} taken, {refused} refused");
    until("the whole budget is free", async || sidecar.ask(&post(1_000_000)).await.status() == 200).await;
}
