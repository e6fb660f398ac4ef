//! The example services behind the real sidecar with a durable store: one table of checks for both.

mod support;

use std::net::SocketAddr;
use std::path::Path;

use oncegate_testkit::until;
use serde_json::{Value, json};
use support::{Message, Process, Sidecar, Wire, ask, express_orders, fastapi_orders, request};
use tempfile::TempDir;
use tokio::net::TcpSocket;
use tokio::process::Command;

/// The differences between the services.
#[derive(Clone, Copy)]
struct Kind {
    /// The status of the response to an invalid order.
    invalid: u16,
    command: fn() -> Command,
}

const EXPRESS: Kind = Kind { invalid: 400, command: || express_orders("server.js") };

const FASTAPI: Kind = Kind { invalid: 422, command: || fastapi_orders("main.py") };

const ORDER: &str = r#"{"customer":"Ada","items":[{"sku":"tea","quantity":2,"price_cents":450}]}"#;
const JSON: &str = "Content-Type: application/json";
const KEY: &str = r#"Idempotency-Key: "7f1d3c1e""#;

/// A service, and the sidecar in front of it.
struct World {
    kind: Kind,
    /// Keeps the service's port while the service is away.
    _reserved: TcpSocket,
    service: Process,
    at: SocketAddr,
    sidecar: Sidecar,
    directory: TempDir,
}

impl World {
    async fn start(kind: Kind, flags: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let reserved = TcpSocket::new_v4().unwrap();
        // The services' own sockets set it as well; so both may bind the port, as long as only one listens.
        reserved.set_reuseaddr(true).unwrap();
        reserved.bind(([127, 0, 0, 1], 0).into()).unwrap();
        let port = reserved.local_addr().unwrap().port();
        let (service, at) = serve(kind, directory.path(), port).await;
        let sidecar = protect(at, directory.path(), flags).await;
        Self { kind, _reserved: reserved, service, at, sidecar, directory }
    }

    async fn restart_sidecar(&mut self, flags: &[&str]) {
        self.sidecar = protect(self.at, self.directory.path(), flags).await;
    }

    async fn restart_service(&mut self) {
        (self.service, self.at) = serve(self.kind, self.directory.path(), self.at.port()).await;
    }

    async fn ask(&self, method: &str, target: &str, fields: &[&str], body: &str) -> Message {
        self.sidecar.ask(&request(method, target, fields, body)).await
    }

    async fn order(&self, fields: &[&str]) -> Message {
        self.ask("POST", "/orders", &[&[JSON], fields].concat(), ORDER).await
    }

    /// Sends an order that takes a while, and waits until it took effect.
    async fn slow_order(&self, delay_ms: u32) -> Wire {
        let mut client = self.sidecar.connect().await;
        client.send(request("POST", &format!("/orders?delay_ms={delay_ms}"), &[JSON, KEY], ORDER)).await;
        until("the order is made", async || self.ledger().await["orders"] == 1).await;
        client
    }

    async fn retry_slow_order(&self, delay_ms: u32) -> Message {
        self.ask("POST", &format!("/orders?delay_ms={delay_ms}"), &[JSON, KEY], ORDER).await
    }

    /// Like [`Self::retry_slow_order`], until the first request is no longer in progress.
    async fn retry_until_settled(&self, delay_ms: u32) -> Message {
        let mut answer = Message::default();
        until("the request is no longer in progress", async || {
            answer = self.retry_slow_order(delay_ms).await;
            answer.status() != 409
        })
        .await;
        answer
    }

    /// The service's own counts.
    async fn ledger(&self) -> Value {
        ask(self.at, &request("GET", "/ledger", &[], "")).await.has_status(200).json()
    }

    async fn holds(&self, orders: u32, charges: u32, notes: u32) {
        assert_eq!(self.ledger().await, json!({"orders": orders, "charges": charges, "notes": notes}));
    }
}

async fn serve(kind: Kind, directory: &Path, port: u16) -> (Process, SocketAddr) {
    let mut command = (kind.command)();
    command.env("PORT", port.to_string()).env("DATABASE", directory.join("o.db"));
    let mut service = Process::start(&mut command);
    let line = service.first_line().await;
    let at = line.strip_prefix("listening on http://").unwrap_or_else(|| panic!("{line}"));
    (service, at.parse().unwrap())
}

async fn protect(at: SocketAddr, directory: &Path, flags: &[&str]) -> Sidecar {
    let store = format!("--store={}", directory.join("store").display());
    Sidecar::start(at, &[&[&*store], flags].concat()).await
}

/// Asserts that the second response is the first one, replayed.
fn assert_replayed(first: &Message, second: &Message) {
    assert!(!first.is_replay(), "{:?}", first.head);
    assert!(second.is_replay(), "{:?} {}", second.head, second.text());
    assert_eq!(first.status(), second.status());
    assert_eq!(first.body, second.body);
    for name in ["content-type", "location", "etag"] {
        assert_eq!(first.get(name), second.get(name), "{name}");
    }
}

async fn without_a_key_a_retry_is_another_order(kind: Kind) {
    let world = World::start(kind, &[]).await;
    let (first, second) = (world.order(&[]).await, world.order(&[]).await);
    assert_eq!((first.get("location"), second.get("location")), (Some("/orders/1"), Some("/orders/2")));
    assert!(!first.is_replay() && !second.is_replay());
    world.holds(2, 0, 0).await;
}

async fn with_a_key_a_retry_gets_the_first_response(kind: Kind) {
    let world = World::start(kind, &[]).await;
    let (first, second) = (world.order(&[KEY]).await, world.order(&[KEY]).await);
    assert_replayed(first.has_status(201), &second);
    assert_eq!(second.get("location"), Some("/orders/1"));
    // The spelling of the JSON does not matter; its content does.
    let respelled = r#"{"items": [{"price_cents": 450, "quantity": 2.0, "sku": "tea"}], "customer": "Ada"}"#;
    assert_replayed(&first, &world.ask("POST", "/orders", &[JSON, KEY], respelled).await);
    let other = ORDER.replace("Ada", "Eve");
    world.ask("POST", "/orders", &[JSON, KEY], &other).await.is_problem(422, "key-reused");
    world.holds(1, 0, 0).await;
}

async fn fifty_requests_at_once_make_one_order(kind: Kind) {
    let world = World::start(kind, &["--wait=20s"]).await;
    let text = request("POST", "/orders?delay_ms=300", &[JSON, KEY], ORDER);
    let asked = (0..50).map(|_| {
        let (at, text) = (world.sidecar.address, text.clone());
        tokio::spawn(async move { ask(at, &text).await })
    });
    let mut answers = Vec::new();
    for task in asked.collect::<Vec<_>>() {
        answers.push(task.await.unwrap());
    }
    let (made, replayed): (Vec<_>, Vec<_>) = answers.iter().partition(|answer| !answer.is_replay());
    assert_eq!((made.len(), replayed.len()), (1, 49));
    for answer in replayed {
        assert_replayed(made[0].has_status(201), answer);
    }
    world.holds(1, 0, 0).await;
}

/// The duration of an order that must still run when it is requested again, even on a busy machine.
const SLOW_MS: u32 = 6000;

async fn a_client_that_hangs_up_gets_the_response_later(kind: Kind) {
    let world = World::start(kind, &[]).await;
    drop(world.slow_order(SLOW_MS).await);
    world.retry_slow_order(SLOW_MS).await.is_problem(409, "request-in-progress");
    let answer = world.retry_until_settled(SLOW_MS).await;
    assert!(answer.has_status(201).is_replay());
    assert_eq!(answer.get("location"), Some("/orders/1"));
    world.holds(1, 0, 0).await;
}

async fn a_note_and_a_charge_are_added_once(kind: Kind) {
    let world = World::start(kind, &[]).await;
    world.order(&[]).await.has_status(201);
    let note = r#"{"add_note":"gift wrap"}"#;
    let first = world.ask("PATCH", "/orders/1", &[JSON, KEY], note).await;
    assert_replayed(first.has_status(200), &world.ask("PATCH", "/orders/1", &[JSON, KEY], note).await);
    // The same key on another path is another key.
    let first = world.ask("POST", "/orders/1/pay", &[KEY], "").await;
    assert_replayed(first.has_status(201), &world.ask("POST", "/orders/1/pay", &[KEY], "").await);
    world.holds(1, 1, 1).await;
}

async fn a_refusal_of_the_service_is_replayed(kind: Kind) {
    let world = World::start(kind, &[]).await;
    let without_customer = r#"{"customer":"","items":[]}"#;
    let first = world.ask("POST", "/orders", &[JSON, KEY], without_customer).await;
    assert_replayed(
        first.has_status(kind.invalid),
        &world.ask("POST", "/orders", &[JSON, KEY], without_customer).await,
    );
    world.holds(0, 0, 0).await;
}

async fn a_refused_order_can_be_corrected_under_its_key(kind: Kind) {
    let world = World::start(kind, &[&format!("--release-statuses={}", kind.invalid)]).await;
    let without_customer = ORDER.replace("Ada", "");
    world.ask("POST", "/orders", &[JSON, KEY], &without_customer).await.has_status(kind.invalid);
    let first = world.order(&[KEY]).await;
    assert_replayed(first.has_status(201), &world.order(&[KEY]).await);
    world.holds(1, 0, 0).await;
}

/// The pages of the examples show a valid order.
async fn the_pages_show_a_valid_order(kind: Kind) {
    let pages = [
        include_str!("../../../examples/express-orders/README.md"),
        include_str!("../../../examples/fastapi-orders/README.md"),
    ];
    let world = World::start(kind, &[]).await;
    for (number, page) in (1..).zip(pages) {
        let order = page.lines().find_map(|line| line.strip_prefix("order='")?.strip_suffix('\''));
        let order = order.expect("a line with an order");
        let key = format!("Idempotency-Key: order-{number}");
        let first = world.ask("POST", "/orders", &[JSON, &key], order).await;
        assert_replayed(first.has_status(201), &world.ask("POST", "/orders", &[JSON, &key], order).await);
        world.holds(number, 0, 0).await;
    }
}

async fn an_import_with_another_boundary_is_the_same_import(kind: Kind) {
    let world = World::start(kind, &[]).await;
    let import = async |boundary: &str, customer: &str| {
        let body = format!(
            "--{boundary}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"orders.csv\"\r\n\
             Content-Type: text/csv\r\n\r\ncustomer,sku,quantity,price_cents\nAda,tea,2,450\n{customer},pot,1,900\n\
             \r\n--{boundary}--\r\n"
        );
        let content_type = format!("Content-Type: multipart/form-data; boundary={boundary}");
        world.ask("POST", "/orders/import", &[&content_type, KEY], &body).await
    };
    let first = import("one", "Bob").await;
    assert_eq!(first.has_status(201).json(), json!({"imported": 2, "ids": [1, 2]}));
    assert_replayed(&first, &import("----another", "Bob").await);
    import("one", "Eve").await.is_problem(422, "key-reused");
    world.holds(2, 0, 0).await;
}

async fn an_export_streams(kind: Kind) {
    let world = World::start(kind, &[]).await;
    for _ in 0..3 {
        world.order(&[]).await.has_status(201);
    }
    let answer = world.ask("GET", "/orders/export", &[KEY], "").await;
    assert_eq!(answer.has_status(200).get("transfer-encoding"), Some("chunked"));
    assert_eq!(
        answer.get("content-type").map(|t| t.split(';').next().unwrap()),
        Some("application/x-ndjson")
    );
    let ids: Vec<_> = answer
        .text()
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["id"].clone())
        .collect();
    assert_eq!(ids, [1, 2, 3]);
}

async fn events_arrive_one_by_one_and_only_once(kind: Kind) {
    let world = World::start(kind, &[]).await;
    world.order(&[]).await.has_status(201);
    let text = request("POST", "/orders/1/events", &[KEY], "");
    let mut client = world.sidecar.connect().await;
    client.send(&text).await;
    let head = client.head().await;
    assert_eq!(head.status(), 200);
    assert!(head.get("content-type").unwrap().starts_with("text/event-stream"), "{head:?}");
    // The service makes the last event 200 ms after the first.
    let mut events = String::new();
    while !events.contains("accepted") {
        events.push_str(std::str::from_utf8(&client.chunk().await.0).unwrap());
    }
    assert!(!events.contains("shipped"), "held back: {events:?}");
    while !events.contains("shipped") {
        events.push_str(std::str::from_utf8(&client.chunk().await.0).unwrap());
    }
    world.sidecar.ask(&text).await.is_problem(422, "replay-unavailable");
    world.holds(1, 0, 1).await;
}

async fn a_killed_sidecar_leaves_an_unknown_outcome(kind: Kind) {
    let flags = ["--lease=1s"];
    let mut world = World::start(kind, &flags).await;
    let mut client = world.slow_order(30_000).await;
    world.sidecar.process.kill().await;
    client.ends().await;
    world.restart_sidecar(&flags).await;
    let answer = world.retry_until_settled(30_000).await;
    answer.is_problem(500, "outcome-unknown");
    assert_eq!(answer.json()["retry"], "stop");
    world.holds(1, 0, 0).await;
}

async fn a_stored_response_survives_a_killed_sidecar(kind: Kind) {
    let mut world = World::start(kind, &[]).await;
    let first = world.order(&[KEY]).await;
    world.sidecar.process.kill().await;
    world.restart_sidecar(&[]).await;
    assert_replayed(&first, &world.order(&[KEY]).await);
    world.holds(1, 0, 0).await;
}

async fn a_killed_service_leaves_an_unknown_outcome(kind: Kind) {
    let mut world = World::start(kind, &[]).await;
    let mut client = world.slow_order(30_000).await;
    world.service.kill().await;
    client.message().await.is_problem(502, "outcome-unknown");
    // The service is away, and the sidecar does not call it.
    world.retry_slow_order(30_000).await.is_problem(500, "outcome-unknown");
    world.restart_service().await;
    world.retry_slow_order(30_000).await.is_problem(500, "outcome-unknown");
    world.holds(1, 0, 0).await;
}

async fn a_service_that_is_away_frees_the_key(kind: Kind) {
    let mut world = World::start(kind, &[]).await;
    world.service.kill().await;
    world.order(&[KEY]).await.is_problem(502, "upstream-unreachable");
    world.restart_service().await;
    let first = world.order(&[KEY]).await;
    assert_replayed(first.has_status(201), &world.order(&[KEY]).await);
    world.holds(1, 0, 0).await;
}

async fn requests_without_a_key_pass(kind: Kind) {
    let world = World::start(kind, &[]).await;
    world.order(&[]).await.has_status(201);
    let note = r#"{"add_note":"gift wrap"}"#;
    for _ in 0..2 {
        world.ask("PATCH", "/orders/1", &[JSON], note).await.has_status(200);
        world.ask("POST", "/orders/1/pay", &[], "").await.has_status(201);
    }
    let orders = world.ask("GET", "/orders", &[], "").await;
    assert_eq!(orders.has_status(200).json()[0]["notes"], json!(["gift wrap", "gift wrap"]));
    assert_eq!(world.ask("GET", "/orders/1", &[], "").await.has_status(200).json()["status"], "paid");
    world.ask("GET", "/orders/2", &[], "").await.has_status(404);
    world.ask("GET", "/nowhere", &[], "").await.has_status(404);
    world.holds(1, 2, 2).await;
    // A method that is not covered passes with and without a key.
    world.ask("DELETE", "/orders/1", &[KEY], "").await.has_status(204);
    world.ask("DELETE", "/orders/1", &[KEY], "").await.has_status(404);
    world.ask("GET", "/healthz", &[], "").await.has_status(200);
}

macro_rules! checks {
    ($($check:ident)+) => {
        mod express {
            $(#[tokio::test]
            async fn $check() {
                super::$check(super::EXPRESS).await;
            })+
        }
        mod fastapi {
            $(#[tokio::test]
            async fn $check() {
                super::$check(super::FASTAPI).await;
            })+
        }
    };
}

checks! {
    without_a_key_a_retry_is_another_order
    with_a_key_a_retry_gets_the_first_response
    fifty_requests_at_once_make_one_order
    a_client_that_hangs_up_gets_the_response_later
    a_note_and_a_charge_are_added_once
    a_refusal_of_the_service_is_replayed
    a_refused_order_can_be_corrected_under_its_key
    the_pages_show_a_valid_order
    an_import_with_another_boundary_is_the_same_import
    an_export_streams
    events_arrive_one_by_one_and_only_once
    a_killed_sidecar_leaves_an_unknown_outcome
    a_stored_response_survives_a_killed_sidecar
    a_killed_service_leaves_an_unknown_outcome
    a_service_that_is_away_frees_the_key
    requests_without_a_key_pass
}
