//! Traps for operators: a wrong address, outcomes under a wrong name, a second effect that leaves no trace, and rights
//! that were taken away.

use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output};

use oncegate_servers::PostgresServer;
use oncegate_testkit::until;

use crate::operations::{admin, series};
use crate::support::{Service, Sidecar, ask, request, sidecar};
use crate::{KEY, OK};

const TOKEN: &str = "a-token-of-an-admin";

async fn oncegate(args: &[&str]) -> Output {
    oncegate_with(args, &[]).await
}

async fn oncegate_with(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(args).env_clear().env("ONCEGATE_ADMIN_TOKEN", TOKEN).envs(variables.iter().copied());
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn oncegate_keys_sends_neither_token_nor_command_to_the_port_of_the_service() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &[]).await;
    let port = sidecar.address.to_string();
    let record = "14".repeat(32);
    let commands: [&[&str]; 4] = [
        &["keys", "ls"],
        &["keys", "audit"],
        &["keys", "resolve", &record, "--tombstone", "--reason", "r"],
        &["clock", "accept", "--reason", "r"],
    ];
    for command in commands {
        let args = [command, &["--admin", &port]].concat();
        let response = async {
            let (mut wire, asked) = service.next(service.accept().await).await;
            // The service may answer whatever it likes.
            let body = "{\"n\":1,\"records\":[],\"entries\":[],\"record\":\"x\",\"ahead_seconds\":null}";
            let length = body.len();
            wire.send(format!(
                "HTTP/1.1 201 Created\r\nOncegate-Admin: 1\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
            ))
            .await;
            asked
        };
        let (said, asked) = tokio::join!(oncegate(&args), response);
        assert_eq!(said.status.code(), Some(3), "{args:?}: {said:?}");
        assert_eq!(text(&said.stdout), "", "{args:?}");
        let words = text(&said.stderr);
        assert!(words.contains("is not the admin API of a sidecar; nothing was done"), "{words}");
        assert!(asked.head.line.starts_with("GET /livez "), "{asked:?}");
        assert_eq!(asked.get("authorization"), None, "{asked:?}");
    }
}

#[tokio::test]
async fn every_response_of_the_admin_api_is_marked() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &[]).await;
    for path in ["/livez", "/readyz", "/metrics", "/v1/keys", "/nowhere"] {
        assert_eq!(admin(&sidecar, path).await.get("oncegate-admin"), Some("1"), "{path}");
    }
    let other_host = request("GET", "/v1/keys", &["Connection: close"], "");
    let refused = ask(sidecar.admin, &other_host).await;
    assert_eq!((refused.status(), refused.get("oncegate-admin")), (403, Some("1")));
}

async fn requests(sidecar: &Sidecar, outcome: &str, class: &str) -> f64 {
    let name = format!("oncegate_requests_total{{outcome=\"{outcome}\",status=\"{class}\"}}");
    series(sidecar, &name).await.unwrap_or_default()
}

#[tokio::test]
async fn requests_that_never_reached_the_service_have_their_own_outcome() {
    let service = Service::new().await;
    let address = service.address;
    drop(service);
    let sidecar = Sidecar::start(address, &["--access-log=text"]).await;
    let away = sidecar.ask(&request("POST", "/orders", &[KEY], "{}")).await;
    away.is_problem(502, "upstream-unreachable");
    assert_eq!(requests(&sidecar, "upstream-unreachable", "5xx").await, 1.0);
    assert_eq!(requests(&sidecar, "executed", "5xx").await, 0.0);
    until("the line is written", async || {
        sidecar
            .process
            .output_lines()
            .iter()
            .any(|line| line.contains("POST /orders 502 upstream-unreachable "))
    })
    .await;

    for (head, outcome, status) in [
        ("POST / HTTP/1.1\r\n", "request-malformed", 400),
        ("POST / HTTP/1.1\r\nHost: a\r\nHost: b\r\n", "request-malformed", 400),
        ("CONNECT a.test:1 HTTP/1.1\r\nHost: a.test:1\r\n", "request-unsupported", 501),
    ] {
        let class = if status < 500 { "4xx" } else { "5xx" };
        let before = requests(&sidecar, outcome, class).await;
        let response = ask(sidecar.address, &format!("{head}Connection: close\r\n\r\n")).await;
        assert_eq!(response.status(), status, "{head}");
        assert_eq!(requests(&sidecar, outcome, class).await, before + 1.0, "{head}");
    }
}

#[tokio::test]
async fn a_request_that_was_refused_on_its_way_is_not_counted_as_executed() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--max-in-flight-without-key=1"]).await;
    let mut first = sidecar.connect().await;
    first.send(request("GET", "/", &[], "")).await;
    let mut wire = service.accept().await;
    wire.message().await;
    // An upgraded connection outlives its request, so it counts as a request without a key.
    let upgrade = request("POST", "/orders", &[KEY, "Connection: Upgrade", "Upgrade: tunnel"], "");
    sidecar.ask(&upgrade).await.is_problem(503, "overloaded");
    assert_eq!(requests(&sidecar, "overloaded", "5xx").await, 1.0);
    assert_eq!(requests(&sidecar, "executed", "5xx").await, 0.0);
    service.is_not_called().await;
    // No metric exists that could never count.
    let metrics = admin(&sidecar, "/metrics").await;
    assert!(!metrics.text().contains("outcome=\"upstream-unanswered\""), "{metrics:?}");
}

#[tokio::test]
async fn no_response_of_the_service_looks_like_one_of_the_admin_api() {
    const MARKED: &str = "HTTP/1.1 200 OK\r\nOncegate-Admin: 1\r\nContent-Length: 2\r\n\r\nok";
    let service = Service::new().await.answers(MARKED);
    let sidecar = Sidecar::start(service.address, &[]).await;
    for fields in [&[][..], &[KEY], &[KEY]] {
        let response = sidecar.ask(&request("POST", "/orders", fields, "{}")).await;
        assert_eq!((response.status(), response.get("oncegate-admin")), (200, None), "{response:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_that_came_too_late_is_logged_with_its_record() {
    let service = Service::new().await;
    let mut sidecar = Sidecar::start(service.address, &["--access-log=text"]).await;
    let mut client = sidecar.connect().await;
    client.send(request("POST", "/orders", &[KEY], "{}")).await;
    let (mut wire, _) = service.next(service.accept().await).await;
    let listed = admin(&sidecar, "/v1/keys").await.json();
    let record = listed["records"][0]["record"].as_str().unwrap().to_owned();
    let admin_address = sidecar.admin.to_string();
    let release = ["keys", "release", &record, "--force", "--reason", "gone", "--admin", &admin_address];
    let released = oncegate(&release).await;
    assert!(released.status.success(), "{released:?}");
    sidecar.process.logs("an operator changed a record").await;
    let changed = sidecar.process.error_lines("an operator changed a record");
    for part in
        [&*format!("record={record}"), "from=in-progress", "to=released", "forced=true", "reason=\"gone\""]
    {
        assert!(changed.len() == 1 && changed[0].contains(part), "no {part} in {changed:?}");
    }
    wire.send(OK).await;
    let response = client.message().await;
    assert_eq!((response.status(), response.get("idempotency-status")), (200, Some("fenced")));

    sidecar.process.logs("find out if the effect happened twice").await;
    let logged = sidecar.process.error_lines("find out if the effect happened twice");
    assert_eq!(logged.len(), 1, "{logged:#?}");
    for part in ["WARN", &format!("record={record}"), "operation=\"POST /orders\"", "attempt=1"] {
        assert!(logged[0].contains(part), "no {part} in {}", logged[0]);
    }
    assert_eq!(requests(&sidecar, "fenced", "2xx").await, 1.0);
    assert_eq!(requests(&sidecar, "executed", "2xx").await, 0.0);
    until("the line is written", async || {
        sidecar.process.output_lines().iter().any(|line| line.contains("POST /orders 200 fenced "))
    })
    .await;
}

/// The service has not answered yet, and may never do. So the log must not wait for its response.
#[tokio::test(flavor = "multi_thread")]
async fn a_running_attempt_that_lost_its_record_is_logged_with_it() {
    let service = Service::new().await;
    let mut sidecar = Sidecar::start(service.address, &["--lease=3s"]).await;
    let mut client = sidecar.connect().await;
    client.send(request("POST", "/orders", &[KEY], "{}")).await;
    let (_wire, _) = service.next(service.accept().await).await;
    let listed = admin(&sidecar, "/v1/keys").await.json();
    let record = listed["records"][0]["record"].as_str().unwrap().to_owned();
    let admin_address = sidecar.admin.to_string();
    let release = ["keys", "release", &record, "--force", "--reason", "gone", "--admin", &admin_address];
    assert!(oncegate(&release).await.status.success());
    let words = "a running attempt no longer owns its record";
    sidecar.process.logs(words).await;
    let logged = sidecar.process.error_lines(words);
    assert_eq!(logged.len(), 1, "{logged:#?}");
    for part in ["WARN", &format!("record={record}"), "operation=\"POST /orders\"", "attempt=1"] {
        assert!(logged[0].contains(part), "no {part} in {}", logged[0]);
    }
    let metrics = admin(&sidecar, "/metrics").await;
    assert!(metrics.text().contains("oncegate_events_total{event=\"lease-lost\"} 1"), "{}", metrics.text());
}

/// If the service completes its record in its own transaction, an attempt that lost its record cannot commit. A service that
/// reports a success anyway has no such transaction.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_success_without_a_commit_is_logged_with_its_record() {
    let server = tokio::task::spawn_blocking(|| PostgresServer::start().unwrap()).await.unwrap();
    let url = server.url();
    let applied = oncegate_with(&["schema", "apply", "postgres"], &[("ONCEGATE_STORE", &url)]).await;
    assert!(applied.status.success(), "{applied:?}");
    let service = Service::new().await;
    let mut command = sidecar(&format!("http://{}", service.address));
    command.args(["--completion=upstream", "--on-abandoned=reexecute"]).env("ONCEGATE_STORE", &url);
    let mut sidecar = Sidecar::run(&mut command).await;
    let admin_address = sidecar.admin.to_string();
    for (response, is_logged) in [(FAILED, false), (OK, true)] {
        let mut client = sidecar.connect().await;
        client.send(request("POST", "/orders", &[KEY], "{}")).await;
        let (mut wire, _) = service.next(service.accept().await).await;
        let listed = admin(&sidecar, "/v1/keys?state=in-progress").await.json();
        let record = listed["records"][0]["record"].as_str().unwrap().to_owned();
        let release = ["keys", "release", &record, "--force", "--reason", "gone", "--admin", &admin_address];
        let released = oncegate(&release).await;
        assert!(released.status.success(), "{released:?}");
        wire.send(response).await;
        client.message().await;
        if is_logged {
            sidecar.process.logs("find out if the effect happened twice").await;
        }
        let logged = sidecar.process.error_lines("find out if the effect happened twice");
        assert_eq!(logged.len(), usize::from(is_logged), "{logged:?}");
        assert!(logged.iter().all(|line| line.contains(&format!("record={record}"))), "{logged:?}");
    }
    assert_eq!(requests(&sidecar, "fenced", "2xx").await, 1.0);
}

const FAILED: &str = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\nno";

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_right_is_reported_before_requests_are_refused() {
    let server = tokio::task::spawn_blocking(|| PostgresServer::start().unwrap()).await.unwrap();
    let url = server.url();
    let applied = oncegate_with(&["schema", "apply", "postgres"], &[("ONCEGATE_STORE", &url)]).await;
    assert!(applied.status.success(), "{applied:?}");
    server
        .sql("CREATE ROLE clerk LOGIN PASSWORD 'clerk-secret'; GRANT USAGE ON SCHEMA oncegate TO clerk; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate TO clerk")
        .unwrap();
    let clerk = url.replacen("oncegate", "clerk", 1).replacen(server.password(), "clerk-secret", 1);
    let check = ["check", "--to=http://127.0.0.1:9", "--service=tests", "--store", &clerk];
    let checked = oncegate(&check).await;
    let words = text(&checked.stdout);
    // This server runs without fsync.
    let is_warned =
        words.lines().any(|line| line.starts_with("warn  ") && line.contains("its commits are NOT flushed"));
    assert!(checked.status.success() && is_warned, "{words}");
    let service = Service::new().await.answers(OK);
    let mut command = sidecar(&format!("http://{}", service.address));
    command.env("ONCEGATE_STORE", &clerk).env("ONCEGATE_SERVICE", "tests");
    let sidecar = Sidecar::run(&mut command).await;
    let ready = async || admin(&sidecar, "/readyz").await;
    until("the sidecar is ready", async || ready().await.status() == 200).await;
    server.sql("REVOKE EXECUTE ON FUNCTION oncegate.claim FROM clerk").unwrap();
    // On a busy machine the store sometimes answers too late, which is another reason.
    let reason = "the role may not call oncegate.claim";
    until("the sidecar is not ready", async || {
        let refused = ready().await;
        refused.status() == 503 && refused.text().contains(reason)
    })
    .await;
    until("the sidecar is degraded", async || series(&sidecar, "oncegate_degraded").await == Some(1.0)).await;
    server.sql("GRANT EXECUTE ON FUNCTION oncegate.claim TO clerk").unwrap();
    until("the sidecar is ready", async || admin(&sidecar, "/readyz").await.status() == 200).await;
    until("the sidecar is not degraded any more", async || {
        series(&sidecar, "oncegate_degraded").await == Some(0.0)
    })
    .await;
    sidecar.ask(&request("POST", "/orders", &[KEY], "{}")).await.has_status(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_password_on_the_command_line_causes_a_warning() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("oncegate.toml");
    let settings = "to = \"http://127.0.0.1:9\"\nscope = \"single-tenant\"\nservice = \"tests\"\n";
    let warned = async |store: &str, mode| {
        std::fs::write(&file, format!("{settings}store = \"{store}\"\n")).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        let said = text(&oncegate(&["check", "--config", file.to_str().unwrap()]).await.stdout);
        assert!(!said.contains("pass-word"), "{said}");
        said.lines().any(|line| line.starts_with("warn  ") && line.contains("this URL contains a password"))
    };
    assert!(warned("redis://:pass-word@127.0.0.1:1", 0o644).await);
    assert!(warned("cached(cache=memory:1MiB,store=postgres://u:pass-word@127.0.0.1:1/d)", 0o644).await);
    assert!(!warned("redis://:pass-word@127.0.0.1:1", 0o640).await);
    assert!(!warned("redis://127.0.0.1:1", 0o644).await);

    for name in ["content-type", "Authorization", "If-Match", "X-Forwarded-For"] {
        let check = ["check", "--to=http://127.0.0.1:9", "--store=memory:", "--key-header", name];
        let said = oncegate(&check).await;
        let words = text(&said.stdout);
        assert_eq!(said.status.code(), Some(1), "{name}: {words}");
        assert!(words.contains("has another purpose"), "{name}: {words}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_recognises_done_and_refused_in_every_profile() {
    // A streamed response is not stored.
    const STREAM: &str =
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9\r\n\r\ndata: 1\n\n";
    for profile in ["ietf", "classic", "stripe"] {
        let service = Service::new().await.answers(STREAM);
        let sidecar = Sidecar::start(service.address, &["--profile", profile]).await;
        let url = format!("http://{}/orders", sidecar.address);
        let call = ["call", "POST", &url, "--intent=payout-7", "--json=1"];
        let cases: [(&[&str], i32); 3] = [(&[], 0), (&[], 5), (&["-H", "Cookie: sid=1"], 7)];
        for (flags, code) in cases {
            let said = oncegate(&[&call, flags].concat()).await;
            assert_eq!(said.status.code(), Some(code), "{profile} {flags:?}: {said:?}");
            assert_eq!(text(&said.stderr).contains("it was processed"), code == 5, "{profile}: {said:?}");
        }
        assert_eq!(service.requests(), 1, "{profile}");
    }
}
