//! Corrections by an operator: `oncegate keys park`, `resolve --amend` and `find --key`, on the running process.

use std::process::Command;

use crate::support::{FixedService, Message, Service, Sidecar, request};
use crate::{KEY, OK};

/// The response of a service that does not know the outcome.
const UNKNOWN: &str =
    "HTTP/1.1 500 Internal Server Error\r\nIdempotency-Store: unknown\r\nContent-Length: 2\r\n\r\nno";
const BUSY: &str = "HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nbusy";

/// The output of a command that succeeded, or the error output of one that failed.
async fn run_keys(sidecar: &Sidecar, args: &[&str]) -> Result<String, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.arg("keys").args(args).env_clear().env("ONCEGATE_ADMIN", sidecar.admin.to_string());
    command.env("USER", "ada");
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    match output.status.code() {
        Some(0) => Ok(text(output.stdout)),
        Some(1) => Err(text(output.stderr)),
        _ => panic!("{args:?}: {output:?}"),
    }
}

/// The only record of the key, found by the key alone.
async fn find_record(sidecar: &Sidecar) -> String {
    let listed = run_keys(sidecar, &["find", "--key", "intent-1"]).await.unwrap();
    let lines: Vec<_> = listed.lines().collect();
    assert!(lines.len() == 3 && lines[1].contains("POST /orders"), "{listed}");
    assert!(lines[2].contains("another key may share"), "{listed}");
    lines[1].split_whitespace().last().unwrap().to_owned()
}

struct Case {
    sidecar: Sidecar,
    service: FixedService,
    record: String,
}

impl Case {
    async fn new(store: &str, response: &'static str) -> Self {
        let service = Service::new().await.answers(response);
        let sidecar = Sidecar::start(service.address, &[&format!("--store={store}")]).await;
        ask(&sidecar).await;
        assert_eq!(service.requests(), 1);
        let record = find_record(&sidecar).await;
        Self { sidecar, service, record }
    }

    async fn ask(&self) -> Message {
        ask(&self.sidecar).await
    }

    async fn run_keys(&self, command: &str, args: &[&str]) -> Result<String, String> {
        let args = [&[command, &self.record[..8]], args, &["--reason", "looked it up"]].concat();
        run_keys(&self.sidecar, &args).await
    }

    /// Asserts that retries get this response, and that the service is not called.
    async fn replays(&self, body: &str) {
        let requests = self.service.requests();
        for _ in 0..3 {
            let response = self.ask().await;
            response.has_status(201);
            assert!(response.is_replay() && response.text() == body, "{response:?}");
        }
        assert_eq!(self.service.requests(), requests);
    }

    async fn is_unknown(&self) {
        let requests = self.service.requests();
        for _ in 0..3 {
            self.ask().await.is_problem(500, "outcome-unknown");
        }
        assert_eq!(self.service.requests(), requests, "something executed");
    }

    async fn shows(&self, text: &str) {
        let shown = run_keys(&self.sidecar, &["show", &self.record]).await.unwrap();
        assert!(shown.contains(text), "no {text:?} in {shown}");
    }
}

async fn ask(sidecar: &Sidecar) -> Message {
    sidecar.ask(&request("POST", "/orders", &[KEY], "{}")).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_response_is_parked_and_amended() {
    let directory = tempfile::tempdir().unwrap();
    let dir = |name: &str| directory.path().join(name).display().to_string();
    let tiered = format!("cached(cache=memory:64MiB,store={})", dir("back"));
    for store in ["memory:", &dir("store"), &tiered] {
        let case = Case::new(store, UNKNOWN).await;
        case.is_unknown().await;
        case.run_keys("resolve", &["--status=201", "--body=wrong"]).await.unwrap();
        case.replays("wrong").await;
        case.shows("resolved by     an operator\n").await;
        case.shows(&format!("\noncegate keys park {}", case.record)).await;

        let said = case.run_keys("park", &[]).await.unwrap();
        assert_eq!(said, format!("{}: completed → unknown\n", case.record));
        case.is_unknown().await;
        case.shows("parked by       an operator\n").await;
        let again = case.run_keys("park", &[]).await.unwrap_err();
        assert!(again.contains("It is unknown already"), "{again}");
        let nothing = case.run_keys("resolve", &["--amend", "--released"]).await.unwrap_err();
        assert!(nothing.contains("there is no response of an operator to amend"), "{nothing}");

        case.run_keys("resolve", &["--status=201", "--body=right"]).await.unwrap();
        case.replays("right").await;
        // Another operator, who does not know of the correction.
        let raced = case.run_keys("resolve", &["--status=201", "--body=raced"]).await.unwrap_err();
        assert!(raced.contains("An operator resolved it already") && raced.contains("--amend"), "{raced}");
        case.replays("right").await;
        case.run_keys("resolve", &["--amend", "--status=201", "--body=better"]).await.unwrap();
        case.replays("better").await;

        // Released by mistake, and corrected before the retry.
        case.run_keys("resolve", &["--amend", "--released"]).await.unwrap();
        case.shows("resolved by     an operator\n").await;
        case.run_keys("park", &[]).await.unwrap();
        case.is_unknown().await;
        case.run_keys("resolve", &["--released"]).await.unwrap();
        case.ask().await;
        assert_eq!(case.service.requests(), 2, "a released key executes");

        let trail = run_keys(&case.sidecar, &["audit"]).await.unwrap();
        let trail: Vec<_> =
            trail.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
        let states: Vec<_> = trail.iter().rev().map(|entry| (entry[3], entry[4])).collect();
        assert_eq!(
            states,
            [
                ("unknown", "completed"),
                ("completed", "unknown"),
                ("unknown", "completed"),
                ("completed", "completed"),
                ("completed", "released"),
                ("released", "unknown"),
                ("unknown", "released"),
            ]
        );
        assert!(trail.iter().all(|entry| entry[2] == "ada" && entry[6..] == ["looked", "it", "up"]));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_of_the_service_cannot_be_corrected() {
    let case = Case::new("memory:", OK).await;
    for (command, args) in [
        ("park", &[][..]),
        ("resolve", &["--status=201", "--body=other"]),
        ("resolve", &["--amend", "--status=201", "--body=other"]),
        ("resolve", &["--amend", "--released"]),
        ("release", &["--force"]),
    ] {
        let refused = case.run_keys(command, args).await.unwrap_err();
        assert!(refused.contains("by its service's own response"), "{command} {args:?}: {refused}");
    }
    let response = case.ask().await;
    assert!(response.is_replay() && response.text() == "ok", "{response:?}");
    assert_eq!(run_keys(&case.sidecar, &["audit"]).await.unwrap(), "no entries\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_the_service_released_can_be_parked() {
    let case = Case::new("memory:", BUSY).await;
    case.shows("Nothing executes until an operator resolves it").await;
    case.run_keys("park", &[]).await.unwrap();
    case.is_unknown().await;
    case.run_keys("resolve", &["--released"]).await.unwrap();
    case.ask().await.has_status(429);
    assert_eq!(case.service.requests(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn find_shows_the_records_of_a_key_for_all_callers_and_both_letter_cases() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &[]).await;
    let callers = ["Authorization: Bearer one", "Authorization: Bearer two"];
    for (path, caller, key) in [
        ("/orders", callers[0], "Order-7"),
        ("/orders", callers[1], "Order-7"),
        ("/refunds", callers[0], "\"order-7\""),
        ("/orders", callers[0], "order-8"),
    ] {
        let key = format!("Idempotency-Key: {key}");
        sidecar.ask(&request("POST", path, &[&key, caller], "{}")).await.has_status(200);
    }
    for key in ["order-7", "ORDER-7", "\"Order-7\""] {
        let listed = run_keys(&sidecar, &["find", "--key", key]).await.unwrap();
        assert_eq!(listed.matches(" POST /").count(), 3, "{key}: {listed}");
        assert!(!listed.to_lowercase().contains("order-7"), "{listed}");
        let listed = run_keys(&sidecar, &["ls", "--key", key, "--operation", "POST /refunds"]).await.unwrap();
        assert!(listed.contains(" POST /refunds ") && !listed.contains(" POST /orders "), "{listed}");
        assert!(listed.ends_with("1 record (1 completed)\n"), "{listed}");
    }
    let json = run_keys(&sidecar, &["find", "--key", "order-8", "--json"]).await.unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["records"].as_array().unwrap().len(), 1, "{json}");
    let none = run_keys(&sidecar, &["find", "--key", "order-9"]).await.unwrap_err();
    assert!(none.contains("no record has this key"), "{none}");
    let none = run_keys(&sidecar, &["find", "--key", "order-9", "--json"]).await.unwrap_err();
    assert!(none.contains("no record has this key"), "{none}");
}

/// A sidecar with this many records whose outcome is unknown, and their identifiers.
async fn unknown_records(count: usize) -> (Sidecar, FixedService, Vec<String>) {
    let service = Service::new().await.answers(UNKNOWN);
    let sidecar = Sidecar::start(service.address, &["--store=memory:"]).await;
    for number in 0..count {
        let key = format!("Idempotency-Key: \"many-{number}\"");
        sidecar.ask(&request("POST", "/orders", &[&key], "{}")).await;
    }
    let listed = run_keys(&sidecar, &["ls", "--state", "unknown", "--json"]).await.unwrap();
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    let records = listed["records"].as_array().unwrap().iter();
    let records: Vec<_> = records.map(|record| record["record"].as_str().unwrap().to_owned()).collect();
    assert_eq!(records.len(), count);
    (sidecar, service, records)
}

/// The exit code and the two outputs of a command.
async fn run_to_end(sidecar: &Sidecar, args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.arg("keys").args(args).env_clear().env("ONCEGATE_ADMIN", sidecar.admin.to_string());
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[tokio::test(flavor = "multi_thread")]
async fn several_records_are_changed_with_one_command() {
    let (sidecar, service, records) = unknown_records(4).await;
    let [a, b, c, d] = [0, 1, 2, 3].map(|at| records[at].as_str());
    let why = ["--reason", "looked them up"];
    // One record twice counts once.
    let args = [&["resolve", a, b, a, "--status=201", "--body=right"][..], &why].concat();
    let (code, out, err) = run_to_end(&sidecar, &args).await;
    let lines = format!("{a}: unknown → completed\n{b}: unknown → completed\n2 of 2 records were changed\n");
    assert_eq!((code, out, err), (Some(0), lines, String::new()));

    // One that is refused does not keep the others, and the exit code says so.
    let args = [&["resolve", a, "feedfacefeed", c, "--tombstone"][..], &why].concat();
    let (code, out, err) = run_to_end(&sidecar, &args).await;
    assert_eq!(code, Some(1), "{out}{err}");
    assert_eq!(out, format!("{c}: unknown → tombstone\n1 of 3 records were changed\n"));
    let lines: Vec<_> = err.lines().collect();
    assert!(
        lines[0].starts_with(&format!("error: {a}: ")) && lines[0].contains("resolve it with --amend"),
        "{err}"
    );
    assert!(lines[1].starts_with("error: feedfacefeed: There is no such record"), "{err}");
    assert_eq!(lines[2..], ["error: 2 of 3 records were not changed"]);

    // For programs: one object for each record.
    let args = [&["park", a, c, d, "--json"][..], &why].concat();
    let (code, out, err) = run_to_end(&sidecar, &args).await;
    assert_eq!(code, Some(1), "{out}{err}");
    let objects = serde_json::Deserializer::from_str(&out).into_iter::<serde_json::Value>();
    let objects: Vec<_> = objects.map(Result::unwrap).collect();
    assert_eq!(objects.len(), 3, "{out}");
    assert_eq!((&objects[0]["record"], &objects[0]["state"]), (&a.into(), &"unknown".into()));
    assert_eq!(objects[2]["record"], *d);
    assert!(objects[2]["error"].as_str().unwrap().contains("It is unknown already"), "{out}");

    let args = [&["release", a, c, d, "--force"][..], &why].concat();
    let (code, out, _) = run_to_end(&sidecar, &args).await;
    assert!(code == Some(0) && out.ends_with("3 of 3 records were changed\n"), "{out}");
    assert_eq!(service.requests(), 4);

    // The sidecar is gone: nothing else is tried.
    let mut gone = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    gone.args(["keys", "release", a, b, "--json", "--admin", "127.0.0.1:1"]).args(why).env_clear();
    let output = tokio::task::spawn_blocking(move || gone.output().unwrap()).await.unwrap();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let out = String::from_utf8(output.stdout).unwrap();
    let objects = serde_json::Deserializer::from_str(&out).into_iter::<serde_json::Value>();
    let objects: Vec<_> = objects.map(Result::unwrap).collect();
    assert!(objects.len() == 2 && objects[1]["record"] == *b, "{out}");
    assert!(objects[1]["error"].as_str().unwrap().starts_with("not tried"), "{out}");
}
