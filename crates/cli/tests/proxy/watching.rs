//! `oncegate tap` and `oncegate top`, next to a running sidecar.

use std::process::Stdio;

use oncegate_testkit::until;
use rustix::process::Signal;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;

use crate::support::{Process, Service, Sidecar, request, sidecar, within};
use crate::{KEY, OK};

fn oncegate(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(args).env_clear();
    command
}

/// Sends requests until the tap has a line: it may have subscribed after the first ones.
async fn until_shown(tap: &Process, text: &str, send: impl AsyncFn()) {
    until("the tap shows a request", async || {
        send().await;
        tap.output_lines().iter().any(|line| line.contains(text))
    })
    .await;
}

#[tokio::test]
async fn tap_shows_requests_by_outcome_and_connects_again() {
    let service = Service::new().await.answers(OK);
    let mut running = Sidecar::start(service.address, &[]).await;
    let admin = running.admin.to_string();
    let all = Process::start(&mut oncegate(&["tap", "--admin", &admin]));
    let mut refused =
        Process::start(&mut oncegate(&["tap", "--admin", &admin, "--outcome", "refused", "--json"]));
    let other = Process::start(&mut oncegate(&["tap", "--admin", &admin, "--operation", "POST /other"]));
    for (tap, path) in [(&all, "/orders"), (&refused, "/orders"), (&other, "/other")] {
        until_shown(tap, path, async || {
            for body in ["{}", "{\"other\":1}"] {
                running.ask(&request("POST", path, &[KEY], body)).await;
            }
        })
        .await;
    }
    let is_row = |line: &String, outcome: &str| {
        line.contains(&format!("  {outcome}")) && line.contains("POST /orders")
    };
    until("each outcome has a line", async || {
        running.ask(&request("POST", "/orders", &[KEY], "{}")).await;
        let lines = all.output_lines();
        ["replayed", "key-reused"].iter().all(|outcome| lines.iter().any(|line| is_row(line, outcome)))
    })
    .await;
    assert!(all.output_lines().iter().all(|line| !line.contains('\u{1b}')));
    let lines = refused.output_lines();
    let outcomes: Vec<Value> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(outcomes.iter().all(|line| line["outcome"] == "key-reused"), "{lines:?}");
    assert!(other.output_lines().iter().all(|line| line.contains("POST /other")));

    // A sidecar that goes away and comes back on its address.
    let listen = format!("--admin={admin}");
    running.process.signal(Signal::TERM);
    running.process.ended().await;
    let mut all = all;
    all.logs("connecting again").await;
    let to = format!("http://{}", service.address);
    let mut again = oncegate(&["proxy", "--listen=127.0.0.1:0", &listen, "--to", &to, "--store=memory:"]);
    let restarted = Sidecar::run(&mut again).await;
    all.logs("connected again").await;
    until_shown(&all, "/later", async || {
        restarted.ask(&request("POST", "/later", &[KEY], "{}")).await;
    })
    .await;
    refused.kill().await;
}

#[tokio::test]
async fn tap_shows_and_selects_what_would_have_been_done() {
    let service = Service::new().await.answers(OK);
    let running = Sidecar::start(service.address, &["--shadow"]).await;
    let admin = running.admin.to_string();
    let all = Process::start(&mut oncegate(&["tap", "--admin", &admin]));
    let mut reused = Process::start(&mut oncegate(&["tap", "--admin", &admin, "--would", "mismatch"]));
    for (tap, text) in [(&all, "would executed  POST /orders"), (&reused, "would key-reused  POST /orders")] {
        let mut number = 0;
        until("the tap shows a request", async || {
            number += 1;
            let key = format!("Idempotency-Key: key-{}-{number}", text.len());
            for body in ["{}", "{\"other\":1}"] {
                running.ask(&request("POST", "/orders", &[&key], body)).await;
            }
            tap.output_lines().iter().any(|line| line.contains(text))
        })
        .await;
    }
    assert!(reused.output_lines().iter().all(|line| line.contains("would key-reused")));
    assert!(all.output_lines().iter().all(|line| line.contains("  shadow ")));
    reused.kill().await;
    let mut wrong = Process::start(&mut oncegate(&["tap", "--would", "replaid"]));
    assert_eq!(wrong.ended().await.code(), Some(2));
}

/// `oncegate tap | head -1` ends, also if no further request comes.
#[tokio::test]
async fn tap_and_top_end_when_their_reader_does() {
    let service = Service::new().await.answers(OK);
    let running = Sidecar::start(service.address, &[]).await;
    let admin = running.admin.to_string();
    for args in [&["tap", "--admin", &admin][..], &["top", "--admin", &admin, "--interval", "500ms"]] {
        let mut command = oncegate(args);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = async {
            loop {
                running.ask(&request("POST", "/orders", &[KEY], "{}")).await;
                let line =
                    tokio::time::timeout(std::time::Duration::from_millis(100), lines.next_line()).await;
                if let Ok(line) = line {
                    break line.unwrap().unwrap();
                }
            }
        };
        within("the first line", first).await;
        drop(lines);
        let ended = within("its end", child.wait_with_output()).await.unwrap();
        assert_eq!((ended.status.code(), ended.stderr.len()), (Some(0), 0), "{args:?}: {ended:?}");
    }
}

#[tokio::test]
async fn tap_and_top_report_a_wrong_address_and_a_wrong_token() {
    let service = Service::new().await.answers(OK);
    let mut with_token = sidecar(&format!("http://{}", service.address));
    with_token.arg("--store=memory:").env("ONCEGATE_ADMIN_TOKEN", "a-token-of-an-admin");
    let running = Sidecar::run(&mut with_token).await;
    let (listening, admin) = (running.address.to_string(), running.admin.to_string());
    let (_socket, unused) = oncegate_servers::unused_port().unwrap();
    let unused = unused.to_string();
    for command in ["tap", "top"] {
        for (address, token, code, words) in [
            (&listening, "a-token-of-an-admin", 3, "is not the admin API of a sidecar"),
            (&unused, "a-token-of-an-admin", 3, "cannot reach the sidecar"),
            (&admin, "wrong-wrong-wrong-wrong", 1, "the admin token is wrong"),
            (&admin, "", 1, "the admin token is missing"),
        ] {
            let mut command = oncegate(&[command, "--admin", address]);
            command.env("ONCEGATE_ADMIN_TOKEN", token);
            let mut process = Process::start(&mut command);
            let (status, errors) = (process.ended().await, process.errors().await);
            assert_eq!(status.code(), Some(code), "{errors}");
            assert!(errors.contains(words), "{errors}");
        }
    }
    for wrong in [&["tap", "--outcome", "replaid"][..], &["top", "--interval", "1ms"]] {
        let mut process = Process::start(&mut oncegate(wrong));
        assert_eq!(process.ended().await.code(), Some(2), "{wrong:?}");
    }
}

#[tokio::test]
async fn top_shows_rates_operations_and_mistakes() {
    let service = Service::new().await.answers(OK);
    let running = Sidecar::start(service.address, &[]).await;
    let admin = running.admin.to_string();
    for body in ["{}", "{}", "{\"other\":1}"] {
        running.ask(&request("POST", "/orders", &[KEY], body)).await;
    }
    let once = within("a summary", oncegate(&["top", "--once", "--admin", &admin]).output()).await.unwrap();
    assert!(once.status.success(), "{once:?}");
    let page = String::from_utf8(once.stdout).unwrap();
    assert!(page.starts_with("oncegate ") && page.contains("  ready\n"), "{page}");
    let total = |page: &str, group: &str| {
        let row = page.lines().find(|line| line.starts_with(group)).unwrap_or_else(|| panic!("{page}"));
        row.split_whitespace().last().unwrap().to_owned()
    };
    let totals = ["executed", "replayed", "mismatch"].map(|group| total(&page, group));
    assert_eq!(totals, ["1", "1", "1"], "{page}");
    assert!(page.contains("mismatch 1  POST /orders  caller "), "{page}");

    let json = within("a summary", oncegate(&["top", "--once", "--json", "--admin", &admin]).output()).await;
    let json: Value = serde_json::from_slice(&json.unwrap().stdout).unwrap();
    assert_eq!(json["summary"]["requests"]["groups"]["executed"], 1);
    assert!(json["per_second"]["executed"].is_number() && json["misuse"].is_array());

    let top = Process::start(&mut oncegate(&["top", "--json", "--interval", "500ms", "--admin", &admin]));
    until("the busiest operation is counted", async || {
        running.ask(&request("POST", "/orders", &[KEY], "{}")).await;
        top.output_lines().iter().any(|line| {
            let line: Value = serde_json::from_str(line).unwrap();
            line["busiest"][0]["operation"] == "POST /orders"
                && line["per_second"]["replayed"].as_f64().unwrap() > 0.0
        })
    })
    .await;
}
