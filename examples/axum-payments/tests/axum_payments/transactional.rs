//! The transactional service as a process, killed at every point of its transaction: exactly one payment, and the retry gets

//! the response.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::service::Service;
use oncegate_servers::{Fault, FaultProxy, PostgresServer};

const KEY: &str = "\r\nidempotency-key: order-123";
const ADA: &str = r#"{"customer":"ada","cents":500}"#;

fn start(url: &str) -> Service {
    Service::start(Command::new(env!("CARGO_BIN_EXE_transactional-payments")).env("DATABASE_URL", url))
}

fn body(response: &str) -> &str {
    response.split("\r\n\r\n").nth(1).unwrap()
}

/// Asks until the request is no longer in progress: a server takes a moment to see that its client is gone.
fn settled(service: &Service) -> String {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let response = service.pay(KEY, ADA);
        if !response.starts_with("HTTP/1.1 409") || Instant::now() > deadline {
            return response;
        }
        assert!(response.contains("retry-after: 1"), "{response}");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_payment_is_made_once_and_its_response_given_again() {
    let server = PostgresServer::start().unwrap();
    let service = start(&server.url());
    let first = service.pay(KEY, ADA);
    assert!(first.starts_with("HTTP/1.1 201") && !first.contains("idempotent-replayed"), "{first}");
    let again = service.pay("\r\nidempotency-key: \"order-123\"", r#"{ "cents": 500, "customer": "ada" }"#);
    assert!(again.starts_with("HTTP/1.1 201") && again.contains("idempotent-replayed: true"), "{again}");
    assert_eq!(body(&again), body(&first));
    let other = service.pay(KEY, r#"{"customer":"ada","cents":900}"#);
    assert!(other.starts_with("HTTP/1.1 422"), "{other}");
    let other_customer = service.pay(KEY, r#"{"customer":"eve","cents":500}"#);
    assert!(other_customer.starts_with("HTTP/1.1 201"), "{other_customer}");
    let without = service.pay("", ADA);
    assert!(without.starts_with("HTTP/1.1 400"), "{without}");
    assert_eq!(service.charges(), r#"{"charges":2}"#);
}

/// A moment to kill the service: the message to the database, its fate, and whether the payment is made.
const POINTS: [(&[u8], Fault, bool); 6] = [
    // Before the lock, after it, after the row, after the completion.
    (b"oncegate.reserve", Fault::Hold, false),
    (b"INSERT INTO payments", Fault::Hold, false),
    (b"oncegate.complete", Fault::Hold, false),
    (b"COMMIT", Fault::Hold, false),
    // COMMIT arrives when the service is dead.
    (b"COMMIT", Fault::Slow, true),
    // After the COMMIT, before the reply.
    (b"COMMIT", Fault::Silent, true),
];

#[test]
fn killed_at_every_point_it_makes_exactly_one_payment() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    for (message, how, is_made) in POINTS {
        let point = format!("{} {how:?}", String::from_utf8_lossy(message));
        let server = PostgresServer::start().unwrap();
        let proxy = runtime.block_on(FaultProxy::start(server.port())).unwrap();
        let through = server.url().replace(&format!(":{}/", server.port()), &format!(":{}/", proxy.port()));
        let service = start(&format!("{through}?sslmode=disable"));
        proxy.arm(message, how);
        thread::scope(|scope| {
            let asked = scope.spawn(|| service.pay(KEY, ADA));
            runtime.block_on(proxy.broken());
            service.kill();
            let response = asked.join().unwrap();
            assert!(response.is_empty(), "{point}: {response}");
        });
        proxy.go_on();

        let service = start(&server.url());
        let response = settled(&service);
        assert!(response.starts_with("HTTP/1.1 201"), "{point}: {response}");
        assert_eq!(response.contains("idempotent-replayed: true"), is_made, "{point}: {response}");
        assert_eq!(service.charges(), r#"{"charges":1}"#, "{point}");
        let again = service.pay(KEY, ADA);
        assert!(again.contains("idempotent-replayed: true"), "{point}: {again}");
        assert_eq!(body(&again), body(&response), "{point}");
    }
}
