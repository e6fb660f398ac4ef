//! Routes that only observe: every request reaches the service, and what would have been done with it is counted.

use std::collections::BTreeMap;
use std::fs;

use oncegate_servers::{PostgresServer, RedisOptions, RedisServer};
use oncegate_testkit::until;
use rustix::process::Signal;
use serde_json::json;
use tokio::process::Command;

use crate::operations::{admin, series};
use crate::support::{FixedService, Message, Service, Sidecar, Wire, request, sidecar};
use crate::{KEY, OK};

/// The number of requests with this verdict.
async fn would(sidecar: &Sidecar, verdict: &str) -> u64 {
    series(sidecar, &format!("oncegate_shadow_requests_total{{would=\"{verdict}\"}}")).await.unwrap() as u64
}

/// The verdicts that were given, with their numbers.
async fn verdicts(sidecar: &Sidecar) -> BTreeMap<String, u64> {
    let metrics = admin(sidecar, "/metrics").await;
    let counts = metrics.text().lines().filter_map(|line| {
        let (verdict, count) =
            line.strip_prefix("oncegate_shadow_requests_total{would=\"")?.split_once("\"} ")?;
        Some((verdict.to_owned(), count.parse().ok()?))
    });
    counts.filter(|(_, count)| *count > 0).collect()
}

/// Waits for these verdicts, and for no others.
async fn counts(sidecar: &Sidecar, expected: &[(&str, u64)]) {
    let expected: BTreeMap<_, _> =
        expected.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
    let mut seen = BTreeMap::new();
    until(format!("the verdicts are {expected:?}"), async || {
        seen = verdicts(sidecar).await;
        seen == expected || seen.values().sum::<u64>() > expected.values().sum()
    })
    .await;
    assert_eq!(seen, expected);
}

/// Waits until the next request finds what was observed: a verdict is counted before the response is recorded.
async fn is_recorded(sidecar: &Sidecar) {
    until("no record is in progress", async || {
        let listed = admin(sidecar, "/v1/keys").await.json();
        listed["records"].as_array().unwrap().iter().all(|record| record["state"] != "in-progress")
    })
    .await;
}

fn post(fields: &[&str], body: &str) -> String {
    request("POST", "/orders", fields, body)
}

/// Asserts that a response is the service's own.
#[track_caller]
fn is_passed(response: &Message) {
    assert_eq!(response.has_status(200).text(), "ok");
    for field in ["idempotency-status", "idempotent-replayed", "idempotency-key"] {
        assert_eq!(response.get(field), None, "{response:?}");
    }
}

/// Sends requests of all kinds, and checks that each passes and is counted.
async fn observes(service: &FixedService, sidecar: &Sidecar) {
    let large = "x".repeat(200);
    let token = "Authorization: Bearer one";
    let requests = [
        (&[KEY, token][..], "{\"a\":1}", "executed"),
        (&[KEY, token], "{ \"a\" : 1 }", "replayed"),
        (&[KEY, token], "{\"a\":2}", "key-reused"),
        (&[KEY, "Authorization: Bearer two"], "{\"a\":2}", "executed"),
        (&["Idempotency-Key: \"\"", token], "{}", "key-invalid"),
        (&[token], "{}", "key-missing"),
        (&[KEY, "Cookie: sid=1"], "{}", "scope-not-set"),
        (&["Idempotency-Key: large", token], &large, "request-too-large"),
    ];
    for (at, (fields, body, verdict)) in requests.into_iter().enumerate() {
        let before = would(sidecar, verdict).await;
        let fields = [fields, &["Content-Type: application/json"]].concat();
        is_passed(&sidecar.ask(&post(&fields, body)).await);
        assert_eq!(service.requests(), at + 1, "{verdict}");
        until(format!("it is counted as {verdict}"), async || would(sidecar, verdict).await == before + 1)
            .await;
        is_recorded(sidecar).await;
    }
    let expected = [
        ("executed", 2),
        ("replayed", 1),
        ("key-reused", 1),
        ("key-invalid", 1),
        ("key-missing", 1),
        ("scope-not-set", 1),
        ("request-too-large", 1),
    ];
    counts(sidecar, &expected).await;
    assert_eq!(
        series(sidecar, "oncegate_requests_total{outcome=\"shadow\",status=\"2xx\"}").await,
        Some(8.0),
        "each request has one outcome"
    );
    let mut records = Vec::new();
    until("the records are complete", async || {
        let listed = admin(sidecar, "/v1/keys").await.json();
        records = listed["records"].as_array().unwrap().clone();
        records.iter().all(|record| record["state"] == "completed")
    })
    .await;
    assert_eq!(records.len(), 2, "{records:?}");
    for record in records {
        assert_eq!(record["operation"], "(shadow) POST /orders");
        let path = format!("/v1/keys/{}?body=true", record["record"].as_str().unwrap());
        let record = admin(sidecar, &path).await.json();
        assert!(!record.to_string().contains("ok\""), "a shadow record holds no response: {record}");
    }
    // The events of records are those of requests that are protected.
    assert_eq!(series(sidecar, "oncegate_events_total{event=\"executing\"}").await, Some(0.0));
}

const FLAGS: [&str; 3] = ["--shadow", "--require-key", "--max-request-body=100B"];

#[tokio::test]
async fn all_requests_pass_and_are_counted_by_what_would_have_been_done() {
    let directory = tempfile::tempdir().unwrap();
    let directory = format!("--store={}", directory.path().join("store").display());
    for store in ["--store=memory:", &directory] {
        let service = Service::new().await.answers(OK);
        let sidecar = Sidecar::start(service.address, &[&[store], &FLAGS[..]].concat()).await;
        observes(&service, &sidecar).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_requests_pass_on_redis_also_while_it_is_away() {
    let mut server =
        tokio::task::spawn_blocking(|| RedisServer::start(RedisOptions::new()).unwrap()).await.unwrap();
    let service = Service::new().await.answers(OK);
    let store = format!("--store={}", server.url());
    let sidecar = Sidecar::start(service.address, &[&[&*store], &FLAGS[..]].concat()).await;
    observes(&service, &sidecar).await;
    server.kill();
    passes_without_its_store(&service, &sidecar).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_requests_pass_on_postgres_also_while_it_is_away() {
    let mut server = tokio::task::spawn_blocking(|| PostgresServer::start().unwrap()).await.unwrap();
    let url = server.url();
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(["schema", "apply", "postgres"]).env("ONCEGATE_STORE", &url);
    assert!(command.output().await.unwrap().status.success());
    let service = Service::new().await.answers(OK);
    let mut command = sidecar(&format!("http://{}", service.address));
    let sidecar = Sidecar::run(command.args(FLAGS).env("ONCEGATE_STORE", &url)).await;
    observes(&service, &sidecar).await;
    server.stop_immediately().unwrap();
    passes_without_its_store(&service, &sidecar).await;
}

async fn passes_without_its_store(service: &FixedService, sidecar: &Sidecar) {
    let (before, counted) = (service.requests(), would(sidecar, "store-unavailable").await);
    for number in 0..5 {
        is_passed(&sidecar.ask(&post(&[&format!("Idempotency-Key: {number}")], "{}")).await);
    }
    assert_eq!(service.requests(), before + 5);
    until("they are counted", async || would(sidecar, "store-unavailable").await == counted + 5).await;
}

#[tokio::test]
async fn a_body_passes_while_it_arrives_and_a_duplicate_passes_at_once() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--shadow"]).await;
    let head = post(&[KEY, "Content-Length: 4"], "");
    let mut first = sidecar.connect().await;
    first.send(format!("{head}ab")).await;
    let mut at_service = service.accept().await;
    let received = at_service.head().await;
    assert_eq!(at_service.take(2).await, b"ab", "the sidecar held the body back");
    first.send("cd").await;
    assert_eq!(at_service.take(2).await, b"cd");
    assert_eq!(received.get("idempotency-key"), Some("intent-1"));
    // The first one runs. On a route that protects, the second one would be refused.
    until("the first one owns its record", async || {
        admin(&sidecar, "/v1/keys").await.json()["records"][0]["state"] == "in-progress"
    })
    .await;
    let mut second = sidecar.connect().await;
    second.send(post(&[KEY], "abcd")).await;
    let mut other = service.accept().await;
    other.message().await;
    other.send(OK).await;
    is_passed(&second.message().await);
    counts(&sidecar, &[("request-in-progress", 1)]).await;
    at_service.send(OK).await;
    is_passed(&first.message().await);
    counts(&sidecar, &[("request-in-progress", 1), ("executed", 1)]).await;
}

#[tokio::test]
async fn outcomes_decide_about_later_requests_as_on_a_route_that_protects() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--shadow", "--upstream-timeout=300ms"]).await;
    let mut wire: Option<Wire> = None;
    let ask = async |wire: &mut Option<Wire>, key: &str, response: &str| {
        let mut client = sidecar.connect().await;
        client.send(post(&[&format!("Idempotency-Key: {key}")], "{}")).await;
        let (mut at_service, _) = match wire.take() {
            Some(wire) => service.next(wire).await,
            None => {
                let mut accepted = service.accept().await;
                let message = accepted.message().await;
                (accepted, message)
            }
        };
        if !response.is_empty() {
            at_service.send(response).await;
            *wire = Some(at_service);
            return client.message().await;
        }
        let response = client.message().await;
        drop(at_service);
        response
    };
    // A 429 frees the key, so the next one would have been executed.
    ask(&mut wire, "free", "HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n")
        .await
        .has_status(429);
    counts(&sidecar, &[("executed", 1)]).await;
    settled(&sidecar, "released").await;
    is_passed(&ask(&mut wire, "free", OK).await);
    counts(&sidecar, &[("executed", 2)]).await;
    // No response: the outcome would be unknown, and no operator is asked about it.
    assert_eq!(ask(&mut wire, "lost", "").await.status(), 504);
    counts(&sidecar, &[("executed", 3)]).await;
    settled(&sidecar, "completed").await;
    is_passed(&ask(&mut wire, "lost", OK).await);
    counts(&sidecar, &[("executed", 3), ("outcome-unknown", 1)]).await;
    assert_eq!(admin(&sidecar, "/v1/keys?state=unsettled").await.json()["records"], json!([]));
}

/// Waits until the newest record is in this state.
async fn settled(sidecar: &Sidecar, state: &str) {
    until(format!("the newest record is {state}"), async || {
        admin(sidecar, "/v1/keys?order=newest").await.json()["records"][0]["state"] == state
    })
    .await;
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_request_and_its_retry_would_be_a_replay() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--shadow"]).await;
    let mut client = sidecar.connect().await;
    client.send(post(&[KEY], "{}")).await;
    let mut at_service = service.accept().await;
    at_service.message().await;
    until("it owns its record", async || {
        admin(&sidecar, "/v1/keys").await.json()["records"][0]["state"] == "in-progress"
    })
    .await;
    drop(client);
    // As without a sidecar, the service notices that.
    at_service.ends().await;
    counts(&sidecar, &[("executed", 1)]).await;
    settled(&sidecar, "completed").await;
    let mut client = sidecar.connect().await;
    client.send(post(&[KEY], "{}")).await;
    let mut at_service = service.accept().await;
    at_service.message().await;
    at_service.send(OK).await;
    is_passed(&client.message().await);
    counts(&sidecar, &[("executed", 1), ("replayed", 1)]).await;
}

#[tokio::test]
async fn limits_are_counted_and_hold_nothing_back_also_not_on_routes_that_protect() {
    let service = Service::new().await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("oncegate.toml");
    let text = format!(
        "to = \"http://{}\"\nstore = \"memory:\"\nmax-in-flight = 1\nrate-limit.key = \"1/m\"\n[[route]]\npath = \"/orders\"\nshadow = true\n",
        service.address
    );
    fs::write(&path, text).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(["proxy", "--listen=127.0.0.1:0", "--admin=127.0.0.1:0", "--config"]).arg(&path);
    let sidecar = Sidecar::run(&mut command).await;
    let mut running = Vec::new();
    for number in 0..3 {
        let mut client = sidecar.connect().await;
        client.send(post(&[&format!("Idempotency-Key: {number}")], "{}")).await;
        let mut at_service = service.accept().await;
        at_service.message().await;
        running.push((client, at_service));
    }
    counts(&sidecar, &[("overloaded", 2)]).await;
    // A protected request does not meet the limit that observed ones have reached.
    let mut client = sidecar.connect().await;
    client.send(request("POST", "/payments", &[KEY], "{}")).await;
    let mut at_service = service.accept().await;
    at_service.message().await;
    at_service.send(OK).await;
    client.message().await.has_status(200);
    for (client, at_service) in &mut running {
        at_service.send(OK).await;
        is_passed(&client.message().await);
    }
    counts(&sidecar, &[("overloaded", 2), ("executed", 1)]).await;
    drop(at_service);
    drop(running);
    // The rate of one key.
    let mut client = sidecar.connect().await;
    client.send(post(&["Idempotency-Key: 0"], "{}")).await;
    let mut at_service = service.accept().await;
    at_service.message().await;
    at_service.send(OK).await;
    is_passed(&client.message().await);
    counts(&sidecar, &[("overloaded", 2), ("executed", 1), ("rate-limited", 1)]).await;
}

/// A sidecar with a configuration file, and its service.
struct Switch {
    directory: tempfile::TempDir,
    service: std::net::SocketAddr,
    sidecar: Sidecar,
}

impl Switch {
    async fn start(service: std::net::SocketAddr, is_shadow: bool) -> Self {
        let directory = tempfile::tempdir().unwrap();
        write(&directory, service, is_shadow);
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        let flags = ["proxy", "--listen=127.0.0.1:0", "--admin=127.0.0.1:0", "--threads=1", "--config"];
        command.args(flags).arg(directory.path().join("oncegate.toml"));
        Self { sidecar: Sidecar::run(&mut command).await, directory, service }
    }

    async fn to(&mut self, is_shadow: bool) {
        const RELOADED: &str = "the configuration was reloaded";
        let before = self.sidecar.process.error_lines(RELOADED).len();
        write(&self.directory, self.service, is_shadow);
        self.sidecar.process.signal(Signal::HUP);
        until("it is reloaded", async || self.sidecar.process.error_lines(RELOADED).len() > before).await;
        // The thread applies it a moment later: a request without a key shows it.
        until("it is in force", async || {
            let (shadow, sent) = (would(&self.sidecar, "key-missing").await, post(&[], "{}"));
            let response = self.sidecar.ask(&sent).await;
            match is_shadow {
                true => response.status() == 200 && would(&self.sidecar, "key-missing").await > shadow,
                false => response.status() == 400,
            }
        })
        .await;
    }
}

fn write(directory: &tempfile::TempDir, service: std::net::SocketAddr, is_shadow: bool) {
    let path = directory.path().join("oncegate.toml");
    let text = format!(
        "to = \"http://{service}\"\nstore = \"memory:\"\nwait = \"0s\"\n[[route]]\npath = \"/orders\"\nrequire-key = true\nshadow = {is_shadow}\n"
    );
    fs::write(path, text).unwrap();
}

#[tokio::test]
async fn a_switch_never_replays_what_was_only_observed() {
    let service = Service::new().await.answers(OK);
    let mut world = Switch::start(service.address, true).await;
    let order = post(&[KEY], "{}");
    is_passed(&world.sidecar.ask(&order).await);
    counts(&world.sidecar, &[("executed", 1)]).await;

    world.to(false).await;
    let before = service.requests();
    let first = world.sidecar.ask(&order).await;
    assert!(!first.has_status(200).is_replay(), "an observed response was replayed");
    assert!(world.sidecar.ask(&order).await.is_replay());
    assert_eq!(service.requests(), before + 1);
    let changed = "the reload changed how requests of one operation are recognised (POST /orders: shadow)";
    assert_eq!(world.sidecar.process.error_lines(changed).len(), 1);

    // Back: the record of the protected request does not answer either.
    world.to(true).await;
    let before = service.requests();
    is_passed(&world.sidecar.ask(&order).await);
    assert_eq!(service.requests(), before + 1);
    world.to(false).await;
    assert!(
        world.sidecar.ask(&order).await.is_replay(),
        "the response of the protected request is still there"
    );
}

#[tokio::test]
async fn requests_in_flight_at_a_switch_end_as_they_began() {
    let service = Service::new().await;
    let mut world = Switch::start(service.address, true).await;
    let mut client = world.sidecar.connect().await;
    client.send(post(&[KEY], "{}")).await;
    let mut at_service = service.accept().await;
    at_service.message().await;
    write(&world.directory, world.service, false);
    world.sidecar.process.signal(Signal::HUP);
    world.sidecar.process.logs("the configuration was reloaded").await;
    until("it is in force", async || {
        let mut probe = world.sidecar.connect().await;
        probe.send(post(&[], "")).await;
        tokio::select! {
            response = probe.message() => response.status() == 400,
            mut passed = service.accept() => {
                passed.message().await;
                passed.send(OK).await;
                false
            }
        }
    })
    .await;
    // A retry is protected from now on. It does not know of the observed request, so it executes.
    let mut retry = world.sidecar.connect().await;
    retry.send(post(&[KEY], "{}")).await;
    let mut second = service.accept().await;
    second.message().await;
    world.sidecar.ask(&post(&[KEY], "{}")).await.is_problem(409, "request-in-progress");
    at_service.send(OK).await;
    is_passed(&client.message().await);
    world.sidecar.ask(&post(&[KEY], "{}")).await.is_problem(409, "request-in-progress");
    second.send(OK).await;
    assert!(!retry.message().await.has_status(200).is_replay());
    assert!(world.sidecar.ask(&post(&[KEY], "{}")).await.is_replay());
}

#[tokio::test]
async fn the_access_log_and_the_configuration_say_what_is_observed() {
    let service = Service::new().await.answers(OK);
    let mut sidecar = Sidecar::start(service.address, &["--shadow", "--access-log=json"]).await;
    sidecar.process.logs("requests are only observed").await;
    sidecar.ask(&post(&[KEY], "{}")).await;
    counts(&sidecar, &[("executed", 1)]).await;
    is_recorded(&sidecar).await;
    sidecar.ask(&post(&[KEY], "{}")).await;
    counts(&sidecar, &[("executed", 1), ("replayed", 1)]).await;
    sidecar.process.signal(Signal::TERM);
    assert!(sidecar.process.ended().await.success());
    let lines = sidecar.process.output().await;
    for (line, would) in lines.iter().skip(1).zip(["executed", "replayed"]) {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!((&line["outcome"], &line["would"]), (&json!("shadow"), &json!(would)), "{line}");
        assert_eq!((&line["status"], &line["path"]), (&json!(200), &json!("/orders")), "{line}");
    }
    assert_eq!(lines.len(), 3, "{lines:?}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(["check", "--to=http://127.0.0.1:9", "--store=memory:", "--shadow", "--profile=mcp"]);
    let output = command.output().await.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(!output.status.success() && text.contains("calls of tools"), "{text}");
}
