//! The log in bad times: a service that is away, a reader that hangs, too few open files.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use oncegate_testkit::until;
use rustix::process::{Pid, Signal, kill_process};
use tokio::net::TcpStream;
use tokio::task::block_in_place;

use crate::OK;
use crate::support::{Process, Service, Sidecar, Wire, ask, request, sidecar};

/// Ends a process that a test started.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ended_already = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn an_unreachable_service_is_logged_now_and_then_and_not_for_each_request() {
    let unused = Service::new().await.address; // dropped, so nothing listens there
    let sidecar = Sidecar::start(unused, &[]).await;
    for n in 0..100 {
        let key = format!("Idempotency-Key: k{n}");
        let key = if n % 2 == 0 { &[&*key][..] } else { &[] };
        sidecar.ask(&request("POST", "/", key, "{}")).await.is_problem(502, "upstream-unreachable");
    }
    until("the log reports the service", async || {
        !sidecar.process.error_lines("cannot be reached").is_empty()
    })
    .await;
    let lines = sidecar.process.error_lines("cannot be reached");
    // At most one line every ten seconds: on a busy machine there may be several.
    assert!(lines.len() < 10, "{} lines for 100 requests: {lines:?}", lines.len());
}

/// A log shipper that hangs, or a terminal that was stopped: the other end of the pipe is open, but reads nothing.
#[tokio::test(flavor = "multi_thread")]
async fn an_unread_log_blocks_neither_requests_nor_the_shutdown() {
    let service = Service::new().await.answers(OK);
    let (unread, stderr) = std::io::pipe().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(["proxy", "--listen=127.0.0.1:0", "--admin=127.0.0.1:0", "--store=memory:"]);
    command.arg(format!("--to=http://{}", service.address)).env("ONCEGATE_LOG", "trace");
    let mut child = Killed(command.stdout(Stdio::piped()).stderr(stderr).spawn().unwrap());
    drop(command);
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = |before: &str| {
        let rest = line.split_once(before).unwrap_or_else(|| panic!("no {before:?} in {line:?}")).1;
        rest.split([',', '\n']).next().unwrap().parse().unwrap()
    };
    let (address, admin) = (address("listening on http://"), address("admin http://"));
    let mut client = Wire::connect(address).await;
    // More lines than the pipe and the queue before it can hold.
    let dropped = async || {
        for _ in 0..100 {
            client.send(request("GET", "/", &[], "")).await;
            client.message().await.has_status(200);
        }
        let page = ask(admin, &request("GET", "/metrics", &[], "").replace("orders.test", "localhost")).await;
        let line = page
            .text()
            .lines()
            .find(|line| line.starts_with("oncegate_log_lines_dropped_total "))
            .unwrap()
            .to_owned();
        line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() > 0.0
    };
    until("lines are dropped and counted", dropped).await;
    let pid = Pid::from_raw(child.0.id().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    let ended = block_in_place(|| child.0.wait().unwrap());
    assert!(ended.success(), "{ended:?}");
    drop(unread);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_standard_error_changes_no_exit_code() {
    let (unread, stderr) = std::io::pipe().unwrap();
    drop(unread);
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    // An address of no interface: the program reports it and exits.
    command.args([
        "proxy",
        "--listen=192.0.2.1:1",
        "--admin=127.0.0.1:0",
        "--store=memory:",
        "--to=http://127.0.0.1:1",
    ]);
    let mut child = Killed(command.stdout(Stdio::null()).stderr(stderr).spawn().unwrap());
    let ended = block_in_place(|| child.0.wait().unwrap());
    assert_eq!(ended.code(), Some(1), "{ended:?}");
}

#[tokio::test]
async fn clients_with_all_connections_leave_open_files_to_the_admin_address() {
    let service = Service::new().await.answers(OK);
    let mut command = tokio::process::Command::new("sh");
    command.args(["-c", "ulimit -n 64; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_oncegate"), "proxy"]);
    command.args(["--listen=127.0.0.1:0", "--admin=127.0.0.1:0", "--store=memory:"]);
    let mut sidecar = Sidecar::run(command.arg(format!("--to=http://{}", service.address))).await;
    sidecar.process.logs("Raise the limit of open files (ulimit -n)").await;
    let mut clients = Vec::new();
    for _ in 0..120 {
        clients.push(TcpStream::connect(sidecar.address).await.unwrap());
    }
    for path in ["/livez", "/readyz", "/metrics"] {
        let admin = request("GET", path, &[], "").replace("orders.test", "localhost");
        ask(sidecar.admin, &admin).await.has_status(200);
    }
    assert!(sidecar.process.error_lines("Too many open files").is_empty());
    drop(clients);
    sidecar.ask(&request("GET", "/", &[], "")).await.has_status(200);
}

#[tokio::test]
async fn an_invalid_log_level_is_refused() {
    let mut command = sidecar("http://127.0.0.1:1");
    let mut process = Process::start(command.arg("--store=memory:").env("ONCEGATE_LOG", "debgu"));
    let errors = process.errors().await;
    assert!(errors.contains("ONCEGATE_LOG") && errors.contains("\"debgu\" is not a level"), "{errors}");
    let output = Command::new(env!("CARGO_BIN_EXE_oncegate"))
        .args(["check", "--to=http://127.0.0.1:1", "--store=memory:"])
        .env("ONCEGATE_LOG", "verbose")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stdout).contains("\"verbose\" is not a level"));
}

#[tokio::test]
async fn a_json_log_has_one_object_a_line_with_the_trace_and_the_record() {
    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    let service = Service::new().await;
    let mut sidecar =
        Sidecar::start(service.address, &["--log-format=json", "--upstream-timeout=200ms"]).await;
    let parent = format!("Traceparent: 00-{TRACE}-00f067aa0ba902b7-01");
    let asked = request("POST", "/orders", &["Idempotency-Key: whisper", &parent], "{}");
    let problem = sidecar.ask(&asked).await;
    problem.is_problem(504, "outcome-unknown");
    let instance = problem.json()["instance"].as_str().unwrap().to_owned();
    sidecar.process.logs("the outcome of an operation is unknown").await;
    sidecar.process.signal(Signal::TERM);
    assert!(sidecar.process.ended().await.success());
    let lines = sidecar.process.errors().await;
    assert!(!lines.contains("whisper"), "{lines}");
    let mut has_unknown = false;
    for line in lines.lines() {
        let line: serde_json::Value =
            serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        for name in ["time", "level", "target", "message"] {
            assert!(line[name].as_str().is_some_and(|text| !text.is_empty()), "{name}: {line}");
        }
        if line["message"].as_str().unwrap().starts_with("the outcome of an operation is unknown") {
            has_unknown = true;
            assert_eq!(line["level"], "warn");
            assert!(instance.ends_with(line["record"].as_str().unwrap()), "{line}");
            assert_eq!(
                (&line["trace_id"], &line["span_id"]),
                (&TRACE.into(), &"00f067aa0ba902b7".into()),
                "{line}"
            );
            assert_eq!((&line["attempt"], &line["operation"]), (&1.into(), &"POST /orders".into()), "{line}");
        }
    }
    assert!(has_unknown, "{lines}");
}

async fn level(sidecar: &Sidecar, method: &str, body: &str) -> crate::support::Message {
    let fields = ["Content-Type: application/json", "Connection: close"];
    let text = request(method, "/v1/log-level", &fields, body).replace("orders.test", "localhost");
    ask(sidecar.admin, &text).await
}

#[tokio::test]
async fn the_level_of_the_log_changes_while_requests_run_and_falls_back() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &[]).await;
    let shown = level(&sidecar, "GET", "").await.json();
    assert_eq!(shown, serde_json::json!({ "level": "info", "configured": "info", "until": null }));
    let address = sidecar.address;
    let traffic = tokio::spawn(async move {
        for n in 0..100 {
            ask(address, &request("POST", "/", &[&format!("Idempotency-Key: {n}")], "{}"))
                .await
                .has_status(200);
        }
    });
    let debug = level(&sidecar, "PUT", r#"{"level":"debug","for":"2s"}"#).await;
    debug.has_status(200);
    assert_eq!(debug.json()["level"], "debug");
    assert!(debug.json()["until"].as_str().unwrap().ends_with('Z'));
    // A client that breaks off is a line of the level debug.
    let broken = async || {
        let mut wire = Wire::connect(sidecar.address).await;
        wire.send("POST / HTTP/1.1\r\nHost: a\r\nIdempotency-Key: cut\r\nContent-Length: 9\r\n\r\n{").await;
        wire.finish().await;
        wire.rest().await;
    };
    until("the log has lines of the level debug", async || {
        broken().await;
        !sidecar.process.error_lines("DEBUG").is_empty()
    })
    .await;
    traffic.await.unwrap();
    until("the level fell back", async || level(&sidecar, "GET", "").await.json()["level"] == "info").await;
    until("the log says so", async || sidecar.process.error_lines("falls back").len() == 1).await;
    let lines = sidecar.process.error_lines("DEBUG").len();
    broken().await;
    level(&sidecar, "PUT", r#"{"level":"trace","for":"1h"}"#).await.has_status(200);
    let ended = level(&sidecar, "DELETE", "").await;
    assert_eq!(
        (&ended.has_status(200).json()["level"], &ended.json()["until"]),
        (&"info".into(), &serde_json::Value::Null)
    );
    let trace = sidecar.process.error_lines("DEBUG").len();
    assert!(trace >= lines);
    for (body, why) in [
        (r#"{"level":"debgu"}"#, "level: \"debgu\" is not a level"),
        (r#"{"level":"debug","for":"25h"}"#, "for: 25h is not from 1s to 24h"),
        (r#"{"level":"debug","for":"10"}"#, "for: \"10\" has no unit"),
        (r#"{"level":"debug","until":"10s"}"#, "unknown field"),
        ("{}", "missing field `level`"),
    ] {
        let refused = level(&sidecar, "PUT", body).await;
        refused.is_problem(400, "bad-request");
        assert!(refused.json()["detail"].as_str().unwrap().contains(why), "{body}: {}", refused.text());
    }
    let long = format!("{{\"level\":\"{}\"}}", "debug,".repeat(10_000));
    level(&sidecar, "PUT", &long).await.is_problem(400, "bad-request");
    level(&sidecar, "PUT", r#"{"level":"warn"}"#).await.has_status(200);
    let changes = "an operator changes the level of the log";
    until("the change is logged", async || sidecar.process.error_lines(changes).len() == 3).await;
    let refused: Vec<_> = sidecar.process.error_lines("debgu");
    assert!(refused.is_empty(), "the log tells of a change that was refused: {refused:?}");
}

/// A frame of HTTP/2 with the fields of a request, in the form of HPACK that needs no table.
fn headers_frame(stream: u8, fields: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        for text in [name, value] {
            block.push(u8::try_from(text.len()).unwrap());
            block.extend(text.as_bytes());
        }
    }
    let mut frame = vec![0, 0, u8::try_from(block.len()).unwrap(), 1, 0x5, 0, 0, 0, stream];
    frame.extend(block);
    frame
}

/// The HTTP library writes what it refuses into its debug lines.
#[tokio::test(flavor = "multi_thread")]
async fn heads_that_are_refused_are_at_no_level_in_the_log() {
    let service = Service::new().await.answers(OK);
    let mut command = sidecar(&format!("http://{}", service.address));
    let mut sidecar = Sidecar::run(command.arg("--store=memory:").env("ONCEGATE_LOG", "trace")).await;
    for (method, path, authority) in [
        ("GET", "/s?token=SeCrEt <", "orders.test"),
        ("GET", "s?token=SeCrEt", "orders.test"),
        ("GET", "/", "user:SeCrEt@ho st"),
        ("P SeCrEt", "/", "orders.test"),
    ] {
        let mut client = sidecar.connect().await;
        client.send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
        client.send([0, 0, 0, 4, 0, 0, 0, 0, 0]).await;
        let fields = [(":method", method), (":scheme", "http"), (":path", path), (":authority", authority)];
        client.send(headers_frame(1, &fields)).await;
        client.finish().await;
        client.raw_rest().await;
        // The head of HTTP/1.1 is refused, too.
        let mut client = sidecar.connect().await;
        client.send(format!("{method} {path} HTTP/1.1\r\nHost: {authority}\r\nbad SeCrEt: x\r\n\r\n")).await;
        client.finish().await;
        client.raw_rest().await;
    }
    sidecar.process.signal(Signal::TERM);
    let log = sidecar.process.errors().await;
    assert!(log.contains("DEBUG") && !log.contains("SeCrEt"), "{log}");
}
