//! The service as a process: paid twice, killed, started again.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

struct Service {
    child: Child,
    address: String,
}

impl Service {
    fn start(data: &Path) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_axum-payments"))
            .env("PORT", "0")
            .env("DATA", data)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on http://").unwrap().to_owned();
        Self { child, address }
    }

    /// Sends a request and gives the answer whole.
    fn send(&self, head: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let length = body.len();
        write!(
            stream,
            "{head}\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn pay(&self, key: &str, body: &str) -> String {
        self.send(&format!("POST /payments HTTP/1.1\r\ncontent-type: application/json{key}"), body)
    }

    fn charges(&self) -> String {
        let answer = self.send("GET /charges HTTP/1.1", "");
        answer.split("\r\n\r\n").nth(1).unwrap().to_owned()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

const KEY: &str = "\r\nidempotency-key: order-123";
const ADA: &str = r#"{"customer":"ada","cents":500}"#;

fn body(answer: &str) -> &str {
    answer.split("\r\n\r\n").nth(1).unwrap()
}

#[test]
fn a_payment_is_charged_once_also_over_a_kill() {
    let data = tempfile::tempdir().unwrap();
    let service = Service::start(data.path());
    let first = service.pay(KEY, ADA);
    assert!(first.starts_with("HTTP/1.1 201"), "{first}");
    assert!(!first.contains("idempotent-replayed"), "{first}");
    let again = service.pay(KEY, ADA);
    assert!(again.contains("idempotent-replayed: true"), "{again}");
    assert_eq!(body(&again), body(&first));
    drop(service);

    let service = Service::start(data.path());
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
