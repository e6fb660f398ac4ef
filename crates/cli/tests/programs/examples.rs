//! The example services behind the sidecar: every route, and the orders on their pages.
//!
//! The behaviour of the sidecar in front of both frameworks is tested by the cases.

use std::net::SocketAddr;

use crate::support::{Message, Process, Sidecar, ask, express_orders, fastapi_orders, request};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;

/// The command that starts a service.
type Service = fn() -> Command;

const EXPRESS: Service = || express_orders("server.js");

const FASTAPI: Service = || fastapi_orders("main.py");

const ORDER: &str = r#"{"customer":"Ada","items":[{"sku":"tea","quantity":2,"price_cents":450}]}"#;
const JSON: &str = "Content-Type: application/json";
const KEY: &str = r#"Idempotency-Key: "7f1d3c1e""#;

/// A service, and the sidecar in front of it.
struct World {
    _service: Process,
    at: SocketAddr,
    sidecar: Sidecar,
    _directory: TempDir,
}

impl World {
    async fn start(service: Service) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut service =
            Process::start(service().env("PORT", "0").env("DATABASE", directory.path().join("o.db")));
        let line = service.first_line().await;
        let at =
            line.strip_prefix("listening on http://").unwrap_or_else(|| panic!("{line}")).parse().unwrap();
        let store = format!("--store={}", directory.path().join("store").display());
        let sidecar = Sidecar::start(at, &[&store]).await;
        Self { _service: service, at, sidecar, _directory: directory }
    }

    async fn ask(&self, method: &str, target: &str, fields: &[&str], body: &str) -> Message {
        self.sidecar.ask(&request(method, target, fields, body)).await
    }

    async fn order(&self) -> Message {
        self.ask("POST", "/orders", &[JSON], ORDER).await
    }

    /// Asserts the counts in the service's own ledger.
    async fn holds(&self, orders: u32, charges: u32, notes: u32) {
        let ledger = ask(self.at, &request("GET", "/ledger", &[], "")).await;
        assert_eq!(
            ledger.has_status(200).json(),
            json!({"orders": orders, "charges": charges, "notes": notes})
        );
    }
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

/// The pages of the examples show a valid order.
async fn the_pages_show_a_valid_order(service: Service) {
    let pages = [
        include_str!("../../../../examples/express-orders/README.md"),
        include_str!("../../../../examples/fastapi-orders/README.md"),
    ];
    let world = World::start(service).await;
    for (number, page) in (1..).zip(pages) {
        let order = page.lines().find_map(|line| line.strip_prefix("order='")?.strip_suffix('\''));
        let order = order.expect("a line with an order");
        let key = format!("Idempotency-Key: order-{number}");
        let first = world.ask("POST", "/orders", &[JSON, &key], order).await;
        assert_replayed(first.has_status(201), &world.ask("POST", "/orders", &[JSON, &key], order).await);
        world.holds(number, 0, 0).await;
    }
}

async fn an_import_with_another_boundary_is_the_same_import(service: Service) {
    let world = World::start(service).await;
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

async fn an_export_streams(service: Service) {
    let world = World::start(service).await;
    for _ in 0..3 {
        world.order().await.has_status(201);
    }
    let response = world.ask("GET", "/orders/export", &[KEY], "").await;
    assert_eq!(response.has_status(200).get("transfer-encoding"), Some("chunked"));
    assert_eq!(
        response.get("content-type").map(|t| t.split(';').next().unwrap()),
        Some("application/x-ndjson")
    );
    let ids: Vec<_> = response
        .text()
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["id"].clone())
        .collect();
    assert_eq!(ids, [1, 2, 3]);
}

async fn events_arrive_one_by_one_and_only_once(service: Service) {
    let world = World::start(service).await;
    world.order().await.has_status(201);
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

async fn every_route_works_without_a_key(service: Service) {
    let world = World::start(service).await;
    world.order().await.has_status(201);
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
    the_pages_show_a_valid_order
    an_import_with_another_boundary_is_the_same_import
    an_export_streams
    events_arrive_one_by_one_and_only_once
    every_route_works_without_a_key
}
