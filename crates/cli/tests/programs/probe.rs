//! `oncegate probe` as a user runs it: against the sidecar with each profile, and against a service without keys.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::IntoResponse as _;
use axum::routing::{get, post};
use axum::{Json, Router};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio::sync::Notify;

use crate::support::{Process, Sidecar, within};

const OPERATION: &str = r#"
path = "/orders"
body = '{"reference":"{uuid}","amount":{n}}'
[headers]
Authorization = "Bearer one"
[other-caller.headers]
Authorization = "Bearer two"
[count]
url = "/count?reference={uuid}"
pointer = "/total"
settle = "50ms"
"#;
const STATUSES: [u16; 6] = [400, 401, 404, 429, 500, 503];

/// A service that takes 80 ms for an order, counts orders, and knows nothing of keys.
async fn service() -> SocketAddr {
    service_that_hangs(Arc::default()).await
}

/// The same service. It does not respond to a request that asks it to hang, and notifies the test.
async fn service_that_hangs(hangs: Arc<Notify>) -> SocketAddr {
    let effects: Arc<Mutex<HashMap<String, u64>>> = Arc::default();
    let counted = Arc::clone(&effects);
    let order = async move |headers: HeaderMap, body: Bytes| {
        if headers.get("x-fail").is_some_and(|status| status == "hang") {
            hangs.notify_one();
            std::future::pending::<()>().await;
        }
        if let Some(status) = headers.get("x-fail") {
            let status: u16 = status.to_str().unwrap().parse().unwrap();
            return (StatusCode::from_u16(status).unwrap(), Json(json!({"error": "failed"}))).into_response();
        }
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        let reference = body["reference"].as_str().unwrap_or_default().to_owned();
        *effects.lock().unwrap().entry(reference.clone()).or_default() += 1;
        tokio::time::sleep(Duration::from_millis(80)).await;
        let location = [("location", format!("/orders/{reference}"))];
        (StatusCode::CREATED, location, Json(json!({"reference": reference}))).into_response()
    };
    let count = async move |uri: Uri| {
        let reference = uri.query().and_then(|query| query.strip_prefix("reference=")).unwrap_or_default();
        Json(json!({"total": counted.lock().unwrap().get(reference).copied().unwrap_or(0)}))
    };
    let router = Router::new().route("/orders", post(order)).route("/count", get(count));
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

struct End {
    code: Option<i32>,
    out: String,
    words: String,
}

async fn probe(directory: &Path, operation: &str, args: &[&str]) -> End {
    let file = directory.join("operation.toml");
    std::fs::write(&file, operation).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.arg("probe").args(args).arg("--operation").arg(&file).stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(Duration::from_secs(120), command.output()).await;
    let output = output.expect("the probe ends").unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    End { code: output.status.code(), out: text(output.stdout), words: text(output.stderr) }
}

/// A probe that runs, with a JSON report.
fn started(directory: &Path, operation: &str, args: &[&str]) -> Process {
    let file = directory.join("operation.toml");
    std::fs::write(&file, operation).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    Process::start(command.args(["probe", "--json", "--rate=100"]).args(args).arg("--operation").arg(&file))
}

/// The exit code and the report of a probe that ends, and the rows that were interrupted.
async fn ended(mut probe: Process) -> (Option<i32>, Value, Vec<String>) {
    let code = probe.ended().await.code();
    let (report, errors) = (probe.output().await.join("\n"), probe.errors().await);
    let report: Value = serde_json::from_str(&report).unwrap_or_else(|_| panic!("{report}{errors}"));
    let rows = report["rows"].as_array().unwrap().iter();
    let interrupted = rows.filter(|row| {
        row["observation"] == "interrupted" && row["verdict"] == "not-tested" && row["advice"] == ""
    });
    let interrupted = interrupted.map(|row| row["id"].as_str().unwrap().to_owned()).collect();
    (code, report, interrupted)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_probe_reports_the_rows_that_have_ended() {
    let hangs = Arc::new(Notify::new());
    let service = service_that_hangs(Arc::clone(&hangs)).await;
    let sidecar = Sidecar::start(service, &["--profile", "ietf"]).await;
    let operation = OPERATION.to_owned() + "[[status]]\nstatus = 503\nheaders.X-Fail = \"hang\"\n";
    for (address, signal, code, replay) in
        [(sidecar.address, Signal::TERM, 5, "as-expected"), (service, Signal::INT, 1, "dangerous")]
    {
        let directory = tempfile::tempdir().unwrap();
        let (url, html) = (format!("http://{address}"), directory.path().join("probe.html"));
        let args = [&url, "--patience=1h", "--max-time=10m", "--html", html.to_str().unwrap()];
        let probe = started(directory.path(), &operation, &args);
        within("the request without a response", hangs.notified()).await;
        probe.signal(signal);
        let (ended_with, report, interrupted) = ended(probe).await;
        assert_eq!(ended_with, Some(code), "{report:#}");
        assert_eq!(interrupted, ["status-503", "restart", "retry-after", "retention"], "{report:#}");
        let rows = report["rows"].as_array().unwrap();
        assert_eq!((rows.len(), &report["interrupted"]), (21, &json!(true)), "{report:#}");
        assert_eq!((&rows[1]["id"], &rows[1]["verdict"]), (&json!("replay"), &json!(replay)));
        assert!(std::fs::read_to_string(html).unwrap().contains("<strong>INTERRUPTED: "));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interruption_waits_for_the_command_that_restarts_the_api() {
    let service = service().await;
    let sidecar = Sidecar::start(service, &["--profile", "ietf"]).await;
    let directory = tempfile::tempdir().unwrap();
    let url = format!("http://{}", sidecar.address);
    let file = |name: &str| directory.path().join(name).display().to_string();
    let (begun, may_end, done) = (file("begun"), file("may_end"), file("done"));
    let command = format!("touch {begun}; while ! test -e {may_end}; do sleep 0.05; done; touch {done}");
    let mut probe = started(directory.path(), OPERATION, &[&url, "--restart", &command]);
    let begins = async {
        while !Path::new(&begun).exists() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    within("the command", begins).await;
    probe.signal(Signal::INT);
    probe.logs("interrupted: rows that have not ended are not tested").await;
    assert!(!Path::new(&done).exists());
    std::fs::write(&may_end, "").unwrap();
    let (code, report, interrupted) = ended(probe).await;
    assert!(Path::new(&done).exists());
    assert_eq!(code, Some(5), "{report:#}");
    assert_eq!(interrupted, ["restart", "retry-after", "retention"], "{report:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_stops_a_probe_at_once() {
    let service = service().await;
    let directory = tempfile::tempdir().unwrap();
    let begun = directory.path().join("begun");
    let command = format!("touch {}; exec sleep 600", begun.display());
    let mut probe =
        started(directory.path(), OPERATION, &[&format!("http://{service}"), "--restart", &command]);
    let begins = async {
        while !begun.exists() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    within("the command", begins).await;
    probe.signal(Signal::INT);
    probe.logs("interrupted").await;
    // Signals that come at once count as one.
    let ends = async {
        loop {
            probe.signal(Signal::INT);
            if let Ok(status) = tokio::time::timeout(Duration::from_millis(100), probe.ended()).await {
                return status;
            }
        }
    };
    let status = within("the end", ends).await;
    assert_eq!(status.code(), Some(4));
    assert_eq!(probe.output().await, [""; 0]);
    let errors = probe.errors().await;
    assert!(errors.contains("by a second signal: there is no report"), "{errors}");
}

fn with_statuses() -> String {
    let tables =
        STATUSES.map(|status| format!("[[status]]\nstatus = {status}\nheaders.X-Fail = \"{status}\"\n"));
    OPERATION.to_owned() + &tables.join("")
}

/// Each shipped profile, the operation for it, and the rows that cannot be tested because the key is in the body.
fn operations() -> Vec<(&'static str, String, &'static [&'static str])> {
    const IN_BODY: &[&str] =
        &["missing-key", "unclosed-quote", "key-list", "non-ascii-key", "doubled-key", "quoted-and-bare"];
    let in_header = ["ietf", "stripe", "stripe-v2", "acp", "paypal", "adyen", "webhook", "classic"];
    let mut all: Vec<_> =
        in_header.iter().map(|profile| (*profile, with_statuses(), [].as_slice())).collect();
    for (profile, member) in [("square", "idempotency_key"), ("aws", "clientToken")] {
        let body = format!("{{\"{member}\":\"{{key}}\",\"reference\"");
        all.push((profile, with_statuses().replace("{\"reference\"", &body), IN_BODY));
    }
    let dated = "[headers]\nRepeatability-First-Sent = \"{date}\"";
    all.push(("oasis", with_statuses().replacen("[headers]", dated, 1), &[]));
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sidecar_does_what_each_profile_promises() {
    let operations = operations();
    let mut names: Vec<_> = operations.iter().map(|(profile, ..)| *profile).collect();
    // The probe knows no messages in bodies.
    let mut shipped: Vec<_> =
        oncegate_http::Profile::names().into_iter().filter(|name| *name != "mcp").collect();
    names.sort_unstable();
    shipped.sort_unstable();
    assert_eq!(names, shipped, "each profile has its operation");
    let service = service().await;
    let mut probes = Vec::new();
    for (profile, operation, untested) in operations {
        probes.push(tokio::spawn(async move {
            let sidecar = Sidecar::start(service, &["--profile", profile]).await;
            let directory = tempfile::tempdir().unwrap();
            let url = format!("http://{}", sidecar.address);
            let args = [&url, "--profile", profile, "--json", "--rate", "100", "--patience", "3s"];
            (profile, untested, probe(directory.path(), &operation, &args).await)
        }));
    }
    let (mut wrong, mut codes) = (Vec::new(), Vec::new());
    for probed in probes {
        let (profile, untested, end) = probed.await.unwrap();
        let report: Value =
            serde_json::from_str(&end.out).unwrap_or_else(|_| panic!("{profile}: {}", end.words));
        assert_eq!(report["profile"], profile);
        let rows = report["rows"].as_array().unwrap();
        for row in rows {
            let id = row["id"].as_str().unwrap();
            let is_untested = id == "restart" || untested.contains(&id);
            if row["verdict"] != if is_untested { "not-tested" } else { "as-expected" } {
                wrong.push(format!("{profile}: {row:#}"));
            }
        }
        assert_eq!(rows.len(), 20 + STATUSES.len(), "{profile}");
        codes.push((profile, end.code));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(codes.iter().all(|(_, code)| *code == Some(0)), "{codes:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_profile_of_a_file_says_what_is_expected() {
    let service = service().await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ours.toml");
    std::fs::write(&file, "title = \"Ours\"\nextends = \"stripe\"\n[refusal.key-reused]\nstatus = 409\n")
        .unwrap();
    let file = file.to_str().unwrap();
    let sidecar = Sidecar::start(service, &["--profile", "ietf"]).await;
    let url = format!("http://{}", sidecar.address);
    let end = probe(directory.path(), OPERATION, &[&url, "--rate", "100", "--profile", file, "--json"]).await;
    let report: Value = serde_json::from_str(&end.out).unwrap_or_else(|_| panic!("{}", end.words));
    assert_eq!(report["profile"], "ours");
    let rows = report["rows"].as_array().unwrap();
    let row = rows.iter().find(|row| row["id"] == "other-body").unwrap();
    assert_eq!(
        (&row["verdict"], &row["expectation"]),
        (&json!("differs"), &json!("refused with 409, and no effect"))
    );
    assert_eq!(end.code, Some(3), "{}", end.words);
    std::fs::write(file, "title = \"Ours\"\nextend = \"stripe\"\n").unwrap();
    let end = probe(directory.path(), OPERATION, &[&url, "--profile", file]).await;
    assert!(end.code == Some(2) && end.words.contains("ours.toml:2:1"), "{}", end.words);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_without_keys_is_dangerous_in_every_form_of_the_report() {
    let service = service().await;
    let directory = tempfile::tempdir().unwrap();
    let (junit, html) = (directory.path().join("probe.xml"), directory.path().join("probe.html"));
    let url = format!("http://{service}");
    let args = [&url, "--rate", "100", "--junit", junit.to_str().unwrap(), "--html", html.to_str().unwrap()];
    let end = probe(directory.path(), OPERATION, &args).await;
    assert_eq!(end.code, Some(1), "{}{}", end.out, end.words);
    assert!(end.out.contains("DANGEROUS    The same request again"), "{}", end.out);
    assert!(end.words.contains("sending real requests to 127.0.0.1:"), "{}", end.words);
    assert!(std::fs::read_to_string(junit).unwrap().contains("<failure type=\"dangerous\""));
    assert!(std::fs::read_to_string(html).unwrap().contains("class=\"dangerous\""));
    // Credentials are in no form of the report.
    assert!(!(end.out + &end.words).contains("Bearer"));
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_usage_sends_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let table: &[(&str, &[&str], i32, &str)] = &[
        (OPERATION, &["http://192.0.2.1"], 2, "repeat the command with --yes"),
        (OPERATION, &["ftp://127.0.0.1"], 2, "write the whole address"),
        (OPERATION, &["http://127.0.0.1:1", "--profile", "none"], 2, "ietf"),
        (OPERATION, &["http://127.0.0.1:1", "--rate", "100000"], 2, "not in 1..=200"),
        ("path = \"orders\"", &["http://127.0.0.1:1"], 2, "line 1: path"),
        ("[headers]\nA = \"{env:ONCEGATE_NOT_SET}\"", &["http://127.0.0.1:1"], 2, "ONCEGATE_NOT_SET; set it"),
        // Nothing listens on this port.
        (OPERATION, &["http://127.0.0.1:1"], 4, "cannot connect to 127.0.0.1:1"),
    ];
    for (operation, args, code, words) in table {
        let end = probe(directory.path(), operation, args).await;
        assert_eq!(end.code, Some(*code), "{args:?}: {}", end.words);
        assert!(end.words.contains(words), "{args:?}: {}", end.words);
    }
}

#[tokio::test]
async fn the_help_lists_the_exit_codes_of_the_documentation() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    let help = command.args(["probe", "--help"]).output().await.unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/probe.md");
    let page = std::fs::read_to_string(page).unwrap();
    let rows: Vec<_> = page.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" | ")).collect();
    let rows: Vec<_> = rows.into_iter().filter(|(code, _)| code.parse::<u8>().is_ok()).collect();
    assert_eq!(rows.len(), 6);
    for (code, meaning) in rows {
        let line = format!("  {code}  {}", meaning.trim_end_matches(" |"));
        assert!(help.contains(&line), "{line:?} is not in\n{help}");
    }
}
