//! The service as a process: paid twice, killed, started again.

use std::path::Path;
use std::process::Command;

use crate::service::Service;

fn start(data: &Path) -> Service {
    Service::start(Command::new(env!("CARGO_BIN_EXE_axum-payments")).env("DATA", data))
}

const KEY: &str = "\r\nidempotency-key: order-123";
const ADA: &str = r#"{"customer":"ada","cents":500}"#;

fn body(response: &str) -> &str {
    response.split("\r\n\r\n").nth(1).unwrap()
}

#[test]
fn a_payment_is_charged_once_also_over_a_kill() {
    let data = tempfile::tempdir().unwrap();
    let service = start(data.path());
    let first = service.pay(KEY, ADA);
    assert!(first.starts_with("HTTP/1.1 201"), "{first}");
    assert!(!first.contains("idempotent-replayed"), "{first}");
    let again = service.pay(KEY, ADA);
    assert!(again.contains("idempotent-replayed: true"), "{again}");
    assert_eq!(body(&again), body(&first));
    drop(service);

    let service = start(data.path());
    let after_kill = service.pay(KEY, r#"{ "cents": 500, "customer": "ada" }"#);
    assert!(after_kill.contains("idempotent-replayed: true"), "{after_kill}");
    assert_eq!(body(&after_kill), body(&first));
    assert_eq!(service.charges(), r#"{"charges":1}"#);

    let other = service.pay(KEY, r#"{"customer":"ada","cents":900}"#);
    assert!(other.starts_with("HTTP/1.1 422"), "{other}");
    let without = service.pay("", ADA);
    assert!(without.starts_with("HTTP/1.1 400") && without.contains("key-missing"), "{without}");
    assert_eq!(service.charges(), r#"{"charges":1}"#);
}
