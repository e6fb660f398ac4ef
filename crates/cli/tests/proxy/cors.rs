//! Pages of other origins: the headers that a browser needs to read replays and refusals, and its preflight requests.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::response::Html;
use axum::routing::{get, post};
use rustix::process::Signal;
use tokio::process::Command;
use tokio::sync::mpsc;

use crate::support::{FixedService, Message, Process, Service, Sidecar, request};
use crate::{KEY, OK};

const SHOP: &str = "Origin: https://shop.example";
const OTHER: &str = "Origin: https://other.example";
/// A service that handles CORS itself.
const OWN: &str = "HTTP/1.1 201 Created\r\nAccess-Control-Allow-Origin: *\r\nAccess-Control-Allow-Headers: *\r\n\
    Access-Control-Expose-Headers: X-Order\r\nX-Order: 7\r\nContent-Length: 4\r\n\r\npaid";

async fn start(response: &'static str, flags: &[&str]) -> (FixedService, Sidecar) {
    let service = Service::new().await.answers(response);
    let sidecar = Sidecar::start(service.address, flags).await;
    (service, sidecar)
}

fn post_from(origin: &str, body: &str) -> String {
    request("POST", "/orders", &[origin, KEY], body)
}

fn exposed(response: &Message) -> Vec<String> {
    let lines = response.head.all("access-control-expose-headers");
    lines.iter().flat_map(|line| line.split(", ")).map(str::to_owned).collect()
}

#[tokio::test]
async fn allowed_pages_can_read_every_response() {
    let flags = [
        "--cors-allowed-origins=https://shop.example,https://admin.example",
        "--cors-exposed-headers=X-Order",
    ];
    let (service, sidecar) = start(OK, &flags).await;
    let first = sidecar.ask(&post_from(SHOP, "{}")).await;
    let replay = sidecar.ask(&post_from(SHOP, "{}")).await;
    assert!(!first.is_replay() && replay.is_replay());
    let reused = sidecar.ask(&post_from(SHOP, "[]")).await;
    reused.is_problem(422, "key-reused");
    let malformed = sidecar.ask(&request("POST", "/orders", &[SHOP, "Host: x"], "")).await;
    malformed.is_problem(400, "request-malformed");
    let passed = sidecar.ask(&request("GET", "/orders", &[SHOP], "")).await;
    for response in [&first, &replay, &reused, &malformed, &passed] {
        assert_eq!(response.get("access-control-allow-origin"), Some("https://shop.example"), "{response:?}");
        assert_eq!(response.get("vary"), Some("origin"), "{response:?}");
        assert_eq!(response.get("access-control-allow-credentials"), None, "{response:?}");
        for name in ["idempotency-key", "idempotent-replayed", "idempotency-status", "retry-after", "x-order"]
        {
            assert!(exposed(response).iter().any(|exposed| exposed == name), "{name}: {response:?}");
        }
    }
    let stripe = ["--profile=stripe", "--cors-allowed-origins=*"];
    let (_service, stripe) = start(OK, &stripe).await;
    let response = stripe.ask(&post_from(SHOP, "{}")).await;
    for name in ["stripe-should-retry", "original-request", "ratelimit", "ratelimit-policy"] {
        assert!(exposed(&response).iter().any(|exposed| exposed == name), "{name}: {response:?}");
    }
    for fields in [&[OTHER, KEY][..], &["Origin: null", KEY], &[KEY]] {
        let replay = sidecar.ask(&request("POST", "/orders", fields, "{}")).await;
        assert!(replay.is_replay());
        assert_eq!(replay.get("access-control-allow-origin"), None, "{replay:?}");
        assert_eq!(replay.get("vary"), Some("origin"), "a cache must not give it to the shop: {replay:?}");
    }
    assert_eq!(service.requests(), 2);
}

#[tokio::test]
async fn cors_headers_of_the_service_take_precedence() {
    let (_service, sidecar) = start(OWN, &["--cors-allowed-origins=https://shop.example"]).await;
    let first = sidecar.ask(&post_from(SHOP, "{}")).await;
    assert_eq!(first.head.all("access-control-allow-origin"), ["*"]);
    assert_eq!(first.get("vary"), None);
    assert!(exposed(&first).contains(&"X-Order".to_owned()), "{first:?}");
    assert!(exposed(&first).contains(&"idempotent-replayed".to_owned()), "{first:?}");
    let replay = sidecar.ask(&post_from(SHOP, "{}")).await;
    assert_eq!(replay.head.all("access-control-allow-origin"), ["https://shop.example"]);
}

#[tokio::test]
async fn preflight_requests_of_allowed_pages_are_answered_and_others_are_forwarded() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("oncegate.toml");
    let routes = r#"
        cors = { allowed-origins = ["https://shop.example"], allow-credentials = true, max-age = "5m" }
        [[route]]
        path = "/narrow"
        cors = { allowed-headers = ["Idempotency-Key"], allowed-methods = ["POST", "GET"] }
        [[route]]
        path = "/none"
        cors = { allowed-origins = [] }
    "#;
    std::fs::write(&file, routes).unwrap();
    let (service, sidecar) = start(OWN, &[&format!("--config={}", file.display())]).await;
    let ask = async |path: &str, fields: &[&str]| {
        let mut wire = sidecar.connect().await;
        wire.send(request("OPTIONS", path, fields, "")).await;
        Message::of(wire.head().await)
    };
    let method = "Access-Control-Request-Method: PATCH";
    let headers = "Access-Control-Request-Headers: content-type,idempotency-key";

    let response = ask("/orders", &[SHOP, method, headers]).await;
    for (name, value) in [
        ("access-control-allow-origin", "https://shop.example"),
        ("access-control-allow-methods", "PATCH"),
        ("access-control-allow-headers", "content-type,idempotency-key"),
        ("access-control-allow-credentials", "true"),
        ("access-control-max-age", "300"),
        ("vary", "origin, access-control-request-method, access-control-request-headers"),
    ] {
        assert_eq!(response.get(name), Some(value), "{response:?}");
    }
    response.has_status(204);
    let response = ask("/narrow", &[SHOP, method, headers]).await;
    assert_eq!(response.get("access-control-allow-methods"), Some("POST, GET"));
    assert_eq!(response.get("access-control-allow-headers"), Some("idempotency-key"));
    assert_eq!(service.requests(), 0);

    let elsewhere: [(&str, &[&str]); 4] = [
        ("/orders", &[OTHER, method]),
        ("/none", &[SHOP, method]),
        ("/orders", &[SHOP]),
        ("/orders", &[method]),
    ];
    for (path, fields) in elsewhere {
        ask(path, fields).await.has_status(201);
    }
    assert_eq!(service.requests(), 4);
}

/// The time that a browser may take to start on a busy machine.
const BROWSER_TIMEOUT: Duration = Duration::from_secs(120);

/// Fetches as a page does, and reports to the test what the page could read.
const PAGE: &str = r#"<!doctype html><script type="module">
const send = async (api, body) => {
  const headers = {"Content-Type": "application/json", "Idempotency-Key": "intent-1"};
  try {
    const response = await fetch(api + "/orders", {method: "POST", headers, body});
    const field = (name) => response.headers.get(name);
    return {
      status: response.status, replayed: field("Idempotent-Replayed"), key: field("Idempotency-Key"),
      order: field("X-Order"), text: await response.text(),
    };
  } catch (error) {
    return {error: String(error)};
  }
};
const told = [];
for (const api of APIS)
  told.push([await send(api, '{"a":1}'), await send(api, '{"a":1}'), await send(api, '{"a":2}')]);
await fetch("/told", {method: "POST", body: JSON.stringify(told)});
</script>"#;

/// Serves the page, and passes its reports on.
async fn serve_page(apis: &[SocketAddr]) -> (SocketAddr, mpsc::Receiver<String>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let apis: Vec<_> = apis.iter().map(|api| format!("http://{api}")).collect();
    let page = PAGE.replace("APIS", &serde_json::to_string(&apis).unwrap());
    let (told, hear) = mpsc::channel(1);
    let told = Arc::new(Mutex::new(Some(told)));
    let routes = Router::new().route("/", get(async move || Html(page))).route(
        "/told",
        post(async move |text: String| {
            let told = told.lock().unwrap().take();
            told.expect("the page reports once").send(text).await.expect("the test waits for the report");
        }),
    );
    tokio::spawn(async move { axum::serve(listener, routes).await });
    (address, hear)
}

/// The same test in a browser. The second sidecar has no CORS settings: it shows that without them the page can read neither
/// replays nor refusals, although the service lets every page read.
#[tokio::test]
async fn a_page_in_a_browser_reads_replays_and_refusals() {
    let service = Service::new().await.answers(OWN);
    // The origin of the page is known only after the sidecars start, so all origins may read.
    let open =
        Sidecar::start(service.address, &["--cors-allowed-origins=*", "--cors-exposed-headers=X-Order"])
            .await;
    let closed = Sidecar::start(service.address, &[]).await;
    let (page, mut told) = serve_page(&[open.address, closed.address]).await;
    let profile = tempfile::tempdir().unwrap();
    let mut command = Command::new("chromium");
    command.args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]);
    command.arg(format!("--user-data-dir={}", profile.path().display())).env("HOME", profile.path());
    let mut browser = Process::start(command.arg(format!("http://{page}/")));
    let told = tokio::time::timeout(BROWSER_TIMEOUT, told.recv()).await;
    let told = told.expect("the report of the page did not arrive in time").expect("the page reports");
    browser.signal(Signal::TERM);
    browser.ended().await;

    let told: serde_json::Value = serde_json::from_str(&told).unwrap();
    let [first, replay, reused] = [0, 1, 2].map(|at| &told[0][at]);
    assert_eq!((&first["status"], &first["text"]), (&201.into(), &"paid".into()), "{told:#}");
    assert_eq!(first["replayed"], serde_json::Value::Null, "{told:#}");
    assert_eq!((&replay["status"], &replay["text"]), (&201.into(), &"paid".into()), "{told:#}");
    assert_eq!((&replay["replayed"], &replay["key"]), (&"true".into(), &"intent-1".into()), "{told:#}");
    assert_eq!(first["order"], "7", "{told:#}");
    assert_eq!(reused["status"], 422, "{told:#}");
    assert!(reused["text"].as_str().unwrap().contains("urn:oncegate:problem:key-reused"), "{told:#}");

    let [first, replay, reused] = [0, 1, 2].map(|at| &told[1][at]);
    assert_eq!(first["status"], 201, "{told:#}");
    for hidden in [replay, reused] {
        assert!(hidden["error"].as_str().is_some_and(|error| error.contains("Failed to fetch")), "{told:#}");
    }
}
