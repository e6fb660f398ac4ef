//! The gauges of the sidecar, which show how close it is to its limits.

use http::{Request, StatusCode};
use http_body_util::Full;
use hyper_util::rt::{TokioExecutor, TokioIo};
use oncegate_testkit::until;
use rustix::process::Signal;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use crate::operations::series;
use crate::support::{Service, Sidecar, Wire, request, within};
use crate::{KEY, OK};

const REQUESTS: &str = "oncegate_requests_in_flight";
const CONNECTIONS: &str = "oncegate_connections_open";
const REQUEST_BYTES: &str = "oncegate_request_budget_used_bytes";
const RESPONSE_BYTES: &str = "oncegate_response_budget_used_bytes";

async fn gauge(sidecar: &Sidecar, name: &str) -> f64 {
    series(sidecar, name).await.unwrap_or_else(|| panic!("no {name}"))
}

/// Waits until a gauge has this value.
async fn becomes(sidecar: &Sidecar, name: &str, value: f64) {
    until(format!("{name} is {value}"), async || gauge(sidecar, name).await == value).await;
}

async fn all_is_zero(sidecar: &Sidecar) {
    for name in [REQUESTS, CONNECTIONS, REQUEST_BYTES, RESPONSE_BYTES] {
        becomes(sidecar, name, 0.0).await;
    }
}

fn with_key(key: usize) -> String {
    request("POST", "/orders", &[&format!("Idempotency-Key: key-{key}")], "{}")
}

#[tokio::test]
async fn limits_have_gauges_of_their_own() {
    let service = Service::new().await;
    let flags = [
        "--max-in-flight=7",
        "--max-in-flight-per-caller=5",
        "--max-records=90",
        "--max-store-bytes=1MiB",
        "--max-connections=70",
        "--request-budget=3MiB",
        "--response-budget=5MiB",
        "--threads=2",
    ];
    let sidecar = Sidecar::start(service.address, &flags).await;
    for (name, limit) in [
        ("oncegate_requests_in_flight_limit", 7.0),
        ("oncegate_caller_requests_in_flight_limit", 5.0),
        ("oncegate_store_records_limit", 90.0),
        ("oncegate_store_limit_bytes", f64::from(1 << 20)),
        ("oncegate_connections_limit", 70.0),
        ("oncegate_request_budget_limit_bytes", f64::from(3 << 20)),
        ("oncegate_response_budget_limit_bytes", f64::from(5 << 20)),
    ] {
        assert_eq!(gauge(&sidecar, name).await, limit, "{name}");
    }
    all_is_zero(&sidecar).await;
}

#[tokio::test]
async fn running_requests_are_counted_until_they_end() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--max-in-flight=4", "--threads=2"]).await;
    let (mut clients, mut wires) = (Vec::new(), Vec::new());
    for key in 0..4 {
        let mut client = sidecar.connect().await;
        client.send(with_key(key)).await;
        let mut wire = service.accept().await;
        wire.message().await;
        clients.push(client);
        wires.push(wire);
        assert_eq!(gauge(&sidecar, REQUESTS).await, (key + 1) as f64);
    }
    assert_eq!(gauge(&sidecar, CONNECTIONS).await, 4.0);
    assert_eq!(gauge(&sidecar, "oncegate_store_records").await, 4.0);
    assert!(gauge(&sidecar, "oncegate_store_used_bytes").await > 0.0);
    // Refused requests do not count, and a reload does not reset the gauge.
    for key in 4..8 {
        sidecar.ask(&with_key(key)).await.is_problem(503, "overloaded");
    }
    assert_eq!(gauge(&sidecar, REQUESTS).await, 4.0);
    sidecar.process.signal(Signal::HUP);
    let applied = "oncegate_reloads_total{subject=\"configuration\",result=\"applied\"}";
    becomes(&sidecar, applied, 1.0).await;
    assert_eq!(gauge(&sidecar, REQUESTS).await, 4.0);
    sidecar.ask(&with_key(4)).await.is_problem(503, "overloaded");
    // Half of the clients hang up, which ends no request; the service answers two requests and dies during the others.
    clients.truncate(2);
    becomes(&sidecar, CONNECTIONS, 2.0 + 2.0).await;
    assert_eq!(gauge(&sidecar, REQUESTS).await, 4.0);
    for wire in &mut wires[1..3] {
        wire.send(OK).await;
    }
    becomes(&sidecar, REQUESTS, 2.0).await;
    drop(wires);
    becomes(&sidecar, REQUESTS, 0.0).await;
    clients[0].message().await.is_problem(502, "outcome-unknown");
    clients[1].message().await.has_status(200);
    drop(clients);
    all_is_zero(&sidecar).await;
    // Replays, mismatches and malformed keys leave the gauge with their responses.
    sidecar.ask(&with_key(1)).await.has_status(200);
    sidecar.ask(&with_key(1).replace("{}", "[]")).await.is_problem(422, "key-reused");
    sidecar.ask(&request("POST", "/orders", &["Idempotency-Key: \u{7f}"], "{}")).await;
    all_is_zero(&sidecar).await;
}

#[tokio::test]
async fn the_busiest_caller_has_a_gauge() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--scope=header:x-tenant"]).await;
    let mut held = Vec::new();
    for (key, tenant) in [(1, "ada"), (2, "ada"), (3, "bob")] {
        let mut client = sidecar.connect().await;
        let fields = [&*format!("Idempotency-Key: key-{key}"), &*format!("X-Tenant: {tenant}")];
        client.send(request("POST", "/orders", &fields, "{}")).await;
        let mut wire = service.accept().await;
        wire.message().await;
        held.push((client, wire));
    }
    assert_eq!(gauge(&sidecar, "oncegate_caller_requests_in_flight").await, 2.0);
    drop(held);
    becomes(&sidecar, "oncegate_caller_requests_in_flight", 0.0).await;
}

#[tokio::test]
async fn an_embedded_store_shows_its_use_and_the_limit_of_its_memory() {
    let directory = tempfile::tempdir().unwrap();
    let service = Service::new().await.answers(OK);
    let store = format!("--store={}", directory.path().join("records").display());
    let sidecar = Sidecar::start(service.address, &[&*store, "--store-memory=64MiB"]).await;
    sidecar.ask(&with_key(1)).await.has_status(200);
    assert_eq!(gauge(&sidecar, "oncegate_store_records").await, 1.0);
    let limit = gauge(&sidecar, "oncegate_store_records_limit").await;
    assert!((1e6..3e6).contains(&limit), "{limit}");
    assert!(gauge(&sidecar, "oncegate_store_used_bytes").await > 100.0);
    assert_eq!(series(&sidecar, "oncegate_store_limit_bytes").await, None);
}

/// A client that has sent the head of a request and this many bytes of its body.
async fn begun(sidecar: &Sidecar, key: &str, bytes: usize) -> Wire {
    let mut wire = sidecar.connect().await;
    let head = format!(
        "POST /orders HTTP/1.1\r\nHost: orders.test\r\nIdempotency-Key: {key}\r\nContent-Length: {}\r\n\r\n",
        bytes + 1
    );
    wire.send(head + &"x".repeat(bytes)).await;
    wire
}

#[tokio::test]
async fn request_bytes_are_counted_across_threads_and_given_back() {
    let service = Service::new().await.answers(OK);
    let flags = ["--request-budget=400KiB", "--max-request-body=400KiB", "--threads=4"];
    let sidecar = Sidecar::start(service.address, &flags).await;
    let mut wires = Vec::new();
    for (count, key) in ["a", "b", "c", "d"].into_iter().enumerate() {
        wires.push(begun(&sidecar, key, 50_000).await);
        becomes(&sidecar, REQUEST_BYTES, 50_000.0 * (count + 1) as f64).await;
    }
    // A body that is refused for lack of space leaves no bytes in the gauge.
    let mut refused = begun(&sidecar, "e", 300_000).await;
    refused.message().await.is_problem(503, "overloaded");
    drop(refused);
    becomes(&sidecar, REQUEST_BYTES, 200_000.0).await;
    // One client hangs up, one breaks off, one finishes.
    drop(wires.pop());
    becomes(&sidecar, REQUEST_BYTES, 150_000.0).await;
    let mut ended = wires.pop().unwrap();
    ended.send("x").await;
    ended.message().await.has_status(200);
    becomes(&sidecar, REQUEST_BYTES, 100_000.0).await;
    drop((wires, ended));
    all_is_zero(&sidecar).await;
}

#[tokio::test]
async fn unread_response_bytes_are_counted_and_given_back() {
    const RESPONSE: usize = 1 << 20;
    let response = format!("HTTP/1.1 200 OK\r\nContent-Length: {RESPONSE}\r\n\r\n{}", "x".repeat(RESPONSE));
    let service = Service::new().await.answers(response.leak());
    // A little more than three responses: budget that one thread reserves ahead is not available to another.
    let flags =
        ["--response-budget=3200KiB", "--max-response-body=1MiB", "--write-timeout=1h", "--threads=2"];
    let sidecar = Sidecar::start(service.address, &flags).await;
    sidecar.ask(&request("POST", "/", &[KEY], "{}")).await.has_status(200);
    all_is_zero(&sidecar).await;
    let stream = TcpStream::connect(sidecar.address).await.unwrap();
    let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    builder.initial_stream_window_size(0);
    let (mut client, connection) =
        within("a connection", builder.handshake(TokioIo::new(stream))).await.unwrap();
    let connection = tokio::spawn(connection);
    let mut unread = Vec::new();
    let mut replay = async || {
        let asked = Request::post("http://orders.test/").header("idempotency-key", "intent-1");
        let asked = asked.body(Full::<bytes::Bytes>::from("{}")).unwrap();
        within("a head", client.send_request(asked)).await.unwrap()
    };
    for count in 1..=3 {
        let response = replay().await;
        assert_eq!(response.status(), StatusCode::OK);
        unread.push(response.into_body());
        becomes(&sidecar, RESPONSE_BYTES, (count * RESPONSE) as f64).await;
    }
    let refused = replay().await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    let problem = refused.into_body();
    assert_eq!(gauge(&sidecar, RESPONSE_BYTES).await, (3 * RESPONSE) as f64);
    // One stream is reset, and the others end with their connection.
    drop((unread.pop(), problem));
    becomes(&sidecar, RESPONSE_BYTES, (2 * RESPONSE) as f64).await;
    connection.abort();
    drop((unread, client));
    all_is_zero(&sidecar).await;
}

/// A client of HTTP/2 that waits for a response, and the runtime that its connection ends with.
fn waiting_over_http2(sidecar: &Sidecar, body: String) -> (Runtime, JoinHandle<()>) {
    let address = sidecar.address;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let request = runtime.spawn(async move {
        let stream = TcpStream::connect(address).await.unwrap();
        let builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
        let (mut client, connection) = builder.handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let asked = Request::post("http://orders.test/").header("idempotency-key", "intent-1");
        let asked = asked.body(Full::<bytes::Bytes>::from(body)).unwrap();
        drop(client.send_request(asked).await);
    });
    (runtime, request)
}

#[tokio::test]
async fn a_waiting_duplicate_that_hangs_up_gives_its_budget_back() {
    const BODY: usize = 10_000;
    let service = Service::new().await;
    let flags = ["--wait=1h", "--upstream-timeout=none", "--write-timeout=1h", "--threads=2"];
    let sidecar = Sidecar::start(service.address, &flags).await;
    let body = "x".repeat(BODY);
    let asked = request("POST", "/", &[KEY], &body);
    let mut owner = sidecar.connect().await;
    owner.send(&asked).await;
    // The client has closed its sending side, and still gets its response later.
    owner.finish().await;
    let mut wire = service.accept().await;
    wire.message().await;
    let mut patient = sidecar.connect().await;
    patient.send(&asked).await;
    let are_waiting = async |waiting: usize| {
        becomes(&sidecar, REQUESTS, 2.0 + waiting as f64).await;
        becomes(&sidecar, REQUEST_BYTES, (BODY * (1 + waiting)) as f64).await;
    };
    are_waiting(0).await;
    for reset in [false, true] {
        let mut waiting = Vec::new();
        for _ in 0..3 {
            let mut stream = TcpStream::connect(sidecar.address).await.unwrap();
            stream.write_all(asked.as_bytes()).await.unwrap();
            stream.set_zero_linger().unwrap();
            waiting.push(stream);
        }
        are_waiting(3).await;
        if !reset {
            for stream in &mut waiting {
                stream.shutdown().await.unwrap();
            }
            are_waiting(0).await;
        }
        drop(waiting);
        are_waiting(0).await;
        becomes(&sidecar, CONNECTIONS, 2.0).await;
    }
    for is_whole_connection in [false, true] {
        let (runtime, request) = waiting_over_http2(&sidecar, body.clone());
        are_waiting(1).await;
        if !is_whole_connection {
            request.abort();
            are_waiting(0).await;
        }
        runtime.shutdown_background();
        are_waiting(0).await;
        becomes(&sidecar, CONNECTIONS, 2.0).await;
    }
    wire.send(OK).await;
    assert!(!owner.message().await.has_status(200).is_replay());
    assert!(patient.message().await.has_status(200).is_replay());
    drop((owner, patient, wire));
    all_is_zero(&sidecar).await;
}
