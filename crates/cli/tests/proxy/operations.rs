//! The operator's view: unknown outcomes, and the access log.

use std::time::Duration;

use oncegate_testkit::until;
use rustix::process::Signal;
use socket2::SockRef;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::support::{Message, Service, Sidecar, request};
use crate::{KEY, OK};

const UNKNOWN: &str = "the outcome of an operation is unknown";

pub(crate) async fn admin(sidecar: &Sidecar, path: &str) -> Message {
    let text = request("GET", path, &["Connection: close"], "").replace("orders.test", "localhost");
    crate::support::ask(sidecar.admin, &text).await
}

/// The value of a metric, if it exists.
pub(crate) async fn series(sidecar: &Sidecar, name: &str) -> Option<f64> {
    let metrics = admin(sidecar, "/metrics").await;
    let mut lines = metrics.text().lines();
    lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

fn record_of(problem: &Message) -> String {
    let instance = problem.json()["instance"].as_str().unwrap_or_default().to_owned();
    let record = instance.strip_prefix("urn:oncegate:record:").unwrap_or_else(|| panic!("{instance:?}"));
    assert_eq!(record.len(), 64, "{record}");
    record.to_owned()
}

#[tokio::test]
async fn an_unknown_outcome_is_logged_once_counted_and_named_in_the_response() {
    let service = Service::new().await;
    let mut sidecar = Sidecar::start(service.address, &["--upstream-timeout=200ms"]).await;
    let asked = request("POST", "/orders", &[KEY], "{}");
    let first = sidecar.ask(&asked).await;
    first.is_problem(504, "outcome-unknown");
    let record = record_of(&first);
    for _ in 0..2 {
        let again = sidecar.ask(&asked).await;
        again.is_problem(500, "outcome-unknown");
        assert_eq!(record_of(&again), record);
    }
    sidecar.process.logs(UNKNOWN).await;
    let logged = sidecar.process.error_lines(UNKNOWN);
    assert_eq!(logged.len(), 1, "{logged:#?}");
    let reason = "reason=\"the service did not answer in time\"";
    let record_field = format!("record={record}");
    for part in ["WARN", &record_field, "operation=\"POST /orders\"", "attempt=1", reason, "duration="] {
        assert!(logged[0].contains(part), "no {part} in {}", logged[0]);
    }
    let upstream = sidecar.process.error_lines("the service did not respond within upstream-timeout");
    assert!(upstream.len() == 1 && upstream[0].contains(&record_field), "{upstream:#?}");
    until("the record is counted", async || {
        series(&sidecar, "oncegate_records{state=\"unknown\"}").await == Some(1.0)
    })
    .await;
    assert_eq!(series(&sidecar, "oncegate_records{state=\"abandoned\"}").await, Some(0.0));
    assert!(series(&sidecar, "oncegate_oldest_unsettled_seconds").await.unwrap() >= 0.0);
    let listed = admin(&sidecar, "/v1/keys?state=unsettled").await.json();
    assert_eq!(listed["records"][0]["record"], record, "{listed}");
}

#[tokio::test]
async fn the_log_reports_an_unknown_outcome_before_and_after_its_retention_ends() {
    for store in ["memory:", "directory"] {
        let directory = tempfile::tempdir().unwrap();
        let store = match store {
            "directory" => format!("--store={}", directory.path().join("store").display()),
            _ => format!("--store={store}"),
        };
        let service = Service::new().await;
        let flags = [&*store, "--upstream-timeout=200ms", "--retention=20s"];
        let mut sidecar = Sidecar::start(service.address, &flags).await;
        until("nothing waits", async || {
            series(&sidecar, "oncegate_unsettled_retention_left_seconds").await == Some(f64::INFINITY)
        })
        .await;
        let response = sidecar.ask(&request("POST", "/orders", &[KEY], "{}")).await;
        let record = record_of(&response);
        until("the end of its retention is shown", async || {
            series(&sidecar, "oncegate_unsettled_retention_left_seconds").await.unwrap() <= 20.0
        })
        .await;
        let listed = admin(&sidecar, "/v1/keys?state=unsettled").await.json();
        assert!(listed["records"][0]["expires_in_seconds"].as_u64().unwrap() <= 20, "{listed}");
        sidecar.process.logs("are removed soon").await;
        sidecar.process.logs("no operator had settled it").await;
        let logged = sidecar.process.error_lines("no operator had settled it");
        assert!(logged.len() == 1 && logged[0].contains(&record), "{logged:#?}");
        assert!(logged[0].contains("operation=\"POST /orders\""), "{logged:#?}");
        assert_eq!(sidecar.process.error_lines("are removed soon").len(), 1);
        assert_eq!(series(&sidecar, "oncegate_unsettled_expired_total").await, Some(1.0));
    }
}

#[tokio::test]
async fn records_abandoned_by_a_crash_are_reported_before_any_retry() {
    let directory = tempfile::tempdir().unwrap();
    let store = format!("--store={}", directory.path().join("store").display());
    let service = Service::new().await;
    let flags = [&*store, "--lease=1s"];
    let mut sidecar = Sidecar::start(service.address, &flags).await;
    let mut client = sidecar.connect().await;
    let asked = request("POST", "/orders", &[KEY], "{}");
    client.send(&asked).await;
    let mut wire = service.accept().await;
    wire.message().await;
    sidecar.process.kill().await;

    let mut sidecar = Sidecar::start(service.address, &flags).await;
    until("the abandoned record is counted", async || {
        series(&sidecar, "oncegate_records{state=\"abandoned\"}").await == Some(1.0)
    })
    .await;
    sidecar.process.logs("an unknown outcome wait for an operator").await;
    assert!(series(&sidecar, "oncegate_oldest_unsettled_seconds").await.unwrap() > 0.0);
    assert_eq!(sidecar.process.error_lines(UNKNOWN), [""; 0]);
    let listed = admin(&sidecar, "/v1/keys?state=unsettled").await.json();
    assert_eq!(listed["records"][0]["state"], "abandoned", "{listed}");

    let response = sidecar.ask(&asked).await;
    response.is_problem(500, "outcome-unknown");
    let record = record_of(&response);
    sidecar.process.logs(UNKNOWN).await;
    sidecar.ask(&asked).await.is_problem(500, "outcome-unknown");
    let logged = sidecar.process.error_lines(UNKNOWN);
    assert!(logged.len() == 1 && logged[0].contains(&record), "{logged:#?}");
    assert!(
        logged[0].contains("operation=\"POST /orders\"") && logged[0].contains("attempt=1"),
        "{logged:#?}"
    );
    until("the record is counted as unknown", async || {
        series(&sidecar, "oncegate_records{state=\"unknown\"}").await == Some(1.0)
    })
    .await;

    let body = r#"{"outcome":"completed","tombstone":true,"reason":"in the ledger"}"#;
    let path = format!("/v1/keys/{record}/resolve");
    let fields = ["Content-Type: application/json", "Connection: close"];
    let text = request("POST", &path, &fields, body).replace("orders.test", "localhost");
    crate::support::ask(sidecar.admin, &text).await.has_status(200);
    until("no record waits for an operator", async || {
        series(&sidecar, "oncegate_records{state=\"unknown\"}").await == Some(0.0)
            && series(&sidecar, "oncegate_oldest_unsettled_seconds").await == Some(0.0)
    })
    .await;
}

#[tokio::test]
async fn the_access_log_has_no_terminal_control_characters() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &["--access-log=text", "--require-key"]).await;
    for target in ["/\u{9b}31m", "/\u{85}a", "/\u{202e}b"] {
        sidecar.ask(&request("POST", target, &[], "{}")).await.is_problem(400, "key-missing");
    }
    until("the lines are there", async || sidecar.process.output_lines().len() == 4).await;
    for line in &sidecar.process.output_lines()[1..] {
        assert!(line.is_ascii() && line.contains("/%"), "{line:?}");
    }
}

#[tokio::test]
async fn the_access_log_has_one_line_per_keyed_request_and_no_key() {
    let secrets = ["Idempotency-Key: whisper-1", "Authorization: Bearer whisper-2"];
    for form in ["text", "json"] {
        let service = Service::new().await.answers(OK);
        let log = format!("--access-log={form}");
        let mut sidecar = Sidecar::start(service.address, &[&log]).await;
        sidecar.ask(&request("POST", "/orders?whisper=3", &secrets, "{}")).await.has_status(200);
        sidecar.ask(&request("POST", "/orders?whisper=3", &secrets, "{}")).await.has_status(200);
        sidecar
            .ask(&request("POST", "/orders?whisper=3", &secrets, "[]"))
            .await
            .is_problem(422, "key-reused");
        sidecar.ask(&request("POST", "/a", &["Idempotency-Key: a b c, d"], "{}")).await.has_status(400);
        sidecar.ask(&request("POST", "/b", &[], "{}")).await.has_status(200);
        until("the lines are there", async || sidecar.process.output_lines().len() == 5).await;
        sidecar.process.signal(Signal::TERM);
        assert!(sidecar.process.ended().await.success());
        let lines = sidecar.process.output().await;
        assert!(!lines.iter().any(|line| line.contains("whisper")), "{lines:#?}");
        let outcomes = ["executed", "replayed", "key-reused", "key-invalid"];
        let statuses = [200, 200, 422, 400];
        assert_eq!(lines.len(), 5, "{lines:#?}");
        for ((line, outcome), status) in lines[1..].iter().zip(outcomes).zip(statuses) {
            let path = if status == 400 { "/a" } else { "/orders" };
            if form == "text" {
                let words: Vec<_> = line.split(' ').collect();
                assert_eq!(words[1..5], ["POST", path, &status.to_string(), outcome], "{line}");
                let attempt = if outcome == "executed" { "attempt=1" } else { "attempt=-" };
                assert_eq!(words[6], attempt, "{line}");
                assert_eq!(line.contains("record=-"), status == 400, "{line}");
            } else {
                let line: serde_json::Value = serde_json::from_str(line).unwrap();
                assert_eq!((&line["method"], &line["path"]), (&"POST".into(), &path.into()), "{line}");
                assert_eq!((&line["status"], &line["outcome"]), (&status.into(), &outcome.into()), "{line}");
                assert_eq!(line["record"].as_str().map_or(0, str::len), if status == 400 { 0 } else { 64 });
                assert!(line["duration_ms"].as_f64().unwrap() > 0.0 && line["time"].is_string(), "{line}");
                assert_eq!(line["attempt"].as_u64(), (outcome == "executed").then_some(1), "{line}");
            }
        }
    }
}

#[tokio::test]
async fn requests_whose_clients_leave_are_counted_and_logged() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--access-log=text", "--wait=20s"]).await;
    let counted = async |outcome: &str, status: &str, count: f64| {
        let name = format!("oncegate_requests_total{{outcome=\"{outcome}\",status=\"{status}\"}}");
        until(format!("{count} requests are {outcome}"), async || {
            series(&sidecar, &name).await == Some(count)
        })
        .await;
    };
    let leave = |client: tokio::net::TcpStream| {
        SockRef::from(&client).set_linger(Some(Duration::ZERO)).unwrap();
    };
    let connect = async |text: &str| {
        let mut client = tokio::net::TcpStream::connect(sidecar.address).await.unwrap();
        client.write_all(text.as_bytes()).await.unwrap();
        client
    };
    let keyed = request("POST", "/orders", &[KEY], "{}");
    let executing = connect(&keyed).await;
    let mut wire = service.accept().await;
    wire.message().await;
    // Waits for the response of the first one.
    let waiting = connect(&keyed).await;
    let in_flight = async |count: f64| {
        until(format!("{count} requests are in flight"), async || {
            series(&sidecar, "oncegate_requests_in_flight").await == Some(count)
        })
        .await;
    };
    in_flight(2.0).await;
    leave(waiting);
    counted("client-left", "none", 1.0).await;
    // It is counted before it ends.
    in_flight(1.0).await;
    // Half a request. A reset connection loses what was not read yet, so it waits until the sidecar asks for the body.
    let head = "POST /half HTTP/1.1\r\nHost: a\r\nIdempotency-Key: half\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n";
    let mut sending = connect(head).await;
    let mut interim = [0; 12];
    sending.read_exact(&mut interim).await.unwrap();
    assert_eq!(&interim, b"HTTP/1.1 100");
    leave(sending);
    counted("request-incomplete", "4xx", 1.0).await;
    // Its execution goes on.
    leave(executing);
    wire.send(OK).await;
    counted("executed", "2xx", 1.0).await;
    sidecar.ask(&keyed).await.is_replay();
    until("the lines are there", async || sidecar.process.output_lines().len() == 5).await;
    let lines = &sidecar.process.output_lines()[1..];
    let outcomes: Vec<_> =
        lines.iter().map(|line| line.split(' ').collect::<Vec<_>>()[1..5].join(" ")).collect();
    let expected = [
        "POST /orders - client-left",
        "POST /half 400 request-incomplete",
        "POST /orders 200 executed",
        "POST /orders 200 replayed",
    ];
    assert_eq!(outcomes, expected);
}
