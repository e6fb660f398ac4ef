//! `oncegate demo` as a user runs it.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use oncegate_core::{
    AttemptId, Claim, Command as StoreCommand, Fingerprint, Label, OnAbandoned, Outcome, RecordId, Store,
};
use oncegate_postgres::{PostgresOptions, PostgresStore, schema};
use oncegate_redis::RedisStore;
use oncegate_servers::{PostgresServer, RedisOptions, RedisServer};
use serde_json::Value;

fn demo(directory: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.arg("demo").args(arguments).env("TMPDIR", directory).stdin(Stdio::null());
    command
}

fn output(directory: &Path, arguments: &[&str]) -> Output {
    demo(directory, arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn entries(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// The processes that have this directory in their command line.
#[cfg(target_os = "linux")]
fn processes_on(directory: &Path) -> usize {
    let wanted = directory.to_str().unwrap();
    let lines = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
        let line = std::fs::read(entry.ok()?.path().join("cmdline")).ok()?;
        Some(String::from_utf8_lossy(&line).contains(wanted))
    });
    lines.filter(|found| *found).count()
}

#[test]
fn the_same_seed_makes_the_same_plan_and_only_the_run_without_oncegate_has_duplicates() {
    let directory = tempfile::tempdir().unwrap();
    let [first, second] = [(); 2].map(|()| {
        let output = output(directory.path(), &["--seed", "11", "--intents", "24", "--json"]);
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{}\n{stdout}\n{stderr}", output.status);
        assert_eq!(entries(directory.path()), [""; 0], "files are left behind");
        serde_json::from_str::<Value>(&stdout).unwrap()
    });
    assert_eq!(first["seed"], 11);
    assert_eq!(first["plan"]["intents"], 24);
    assert!(first["plan"]["faults"]["response_lost"].as_u64() > Some(0), "{first}");
    assert_eq!(first["plan"], second["plan"]);
    for report in [first, second] {
        let (without, with) = (&report["without_oncegate"], &report["with_oncegate"]);
        let number = |side: &Value, member: &str| match side[member].as_u64() {
            Some(number) => number,
            None => panic!("{member} is no number in {side}"),
        };
        assert!(number(without, "duplicates") > 0, "{without}");
        assert!(number(without, "cents_charged") > number(without, "cents_meant"), "{without}");
        // Without kills all planned payments happen.
        assert_eq!(without["faults"], report["plan"]["faults"]);
        assert_eq!(without["sidecar_kills"], 0);
        for (member, expected) in [
            ("intents", 24),
            ("charges", 24),
            ("duplicates", 0),
            ("missing", 0),
            ("contradictions", 0),
            ("unanswered", 0),
            ("sidecar_kills", 1),
        ] {
            assert_eq!(number(with, member), expected, "{member} in {with}");
        }
        assert_eq!(with["cents_charged"], report["plan"]["cents"]);
        assert!(number(with, "replays") > 0, "{with}");
        assert_eq!(report["clean"], true);
    }
}

#[test]
fn without_a_terminal_the_demo_prints_plain_lines_and_keeps_files_as_asked() {
    let directory = tempfile::tempdir().unwrap();
    let output = output(directory.path(), &["--seed", "3", "--intents", "8", "--keep"]);
    let stdout = text(&output.stdout);
    assert!(output.status.success(), "{stdout}\n{}", text(&output.stderr));
    assert!(!stdout.contains('\x1b'), "{stdout}");
    for line in
        ["Seed 3.", "1 of 2  Without Oncegate", "2 of 2  With Oncegate", "killed ", "charges in the ledger"]
    {
        assert!(stdout.contains(line), "{line} is not in:\n{stdout}");
    }
    let kept = entries(directory.path());
    assert_eq!(kept.len(), 1, "{kept:?}");
    let kept = directory.path().join(&kept[0]);
    assert!(stdout.contains(&format!("Kept: {}", kept.display())), "{stdout}");
    for name in ["store", "sidecar.log", "ledger-without.jsonl", "ledger-with.jsonl"] {
        assert!(kept.join(name).exists(), "{name}");
    }
    let ledger = std::fs::read_to_string(kept.join("ledger-with.jsonl")).unwrap();
    assert_eq!(ledger.lines().count(), 8);
}

/// Claims a record that is never completed, and waits until its outcome is unknown.
async fn foreign_record(store: &dyn Store) -> RecordId {
    let id = RecordId::from_bytes([0x5a; 32]);
    let mut attempt = 0;
    loop {
        attempt += 1;
        let claim = Claim {
            attempt: AttemptId::new(attempt),
            fingerprint: Fingerprint::of_parts("another user", &[b"pay 5"]),
            lease: Duration::from_millis(1),
            retention: Duration::from_secs(3600),
            on_abandoned: OnAbandoned::Park,
            label: Label::default(),
        };
        match store.apply(id, StoreCommand::Claim(claim)).await.unwrap() {
            Outcome::Unknown => return id,
            _ => tokio::time::sleep(Duration::from_millis(2)).await,
        }
    }
}

async fn two_sidecars_on(store: &dyn Store, url: &str) {
    let foreign = foreign_record(store).await;
    let before = store.lookup(foreign).await.unwrap();
    let directory = tempfile::tempdir().unwrap();
    // Two runs with the same keys: records of the first run are not replayed to the second.
    for _ in 0..2 {
        let arguments = ["--seed", "7", "--intents", "60", "--json", "--store", url];
        let mut command = demo(directory.path(), &arguments);
        let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{}\n{stdout}\n{stderr}", output.status);
        let report: Value = serde_json::from_str(&stdout).unwrap();
        let with = &report["with_oncegate"];
        for (member, expected) in [("charges", 60), ("duplicates", 0), ("missing", 0), ("unanswered", 0)] {
            assert_eq!(with[member], expected, "{member} in {with}");
        }
        let two = &with["two_sidecars"];
        for member in ["requests_to_the_killed", "requests_to_the_other", "replayed_by_the_other"] {
            assert!(two[member].as_u64() > Some(0), "{member} in {with}\n{stderr}");
        }
        assert_eq!(with["sidecar_kills"], 1, "{stderr}");
        assert!(!stderr.contains("restarted") && stderr.contains("one of two sidecars is gone"), "{stderr}");
        assert!(report["without_oncegate"].get("two_sidecars").is_none(), "{report}");
        assert!(!stdout.contains("hunter2") && !stderr.contains("hunter2"), "{stderr}");
        assert_eq!(entries(directory.path()), [""; 0], "files are left behind");
    }
    assert_eq!(store.lookup(foreign).await.unwrap(), before, "the demo changed a record of another user");
}

#[tokio::test]
async fn two_sidecars_share_a_redis_server() {
    let server = RedisServer::start(RedisOptions::new().with_user("app", "hunter2", "~* &* +@all")).unwrap();
    let options = oncegate_redis::RedisOptions::from_url(&server.url()).unwrap();
    two_sidecars_on(&RedisStore::open(options).await.unwrap(), &server.url()).await;
}

#[tokio::test]
async fn two_sidecars_share_a_postgresql_database() {
    let server = PostgresServer::start().unwrap();
    let url = server.url();
    let options = PostgresOptions::from_url(&url).unwrap();
    // Without the schema, the program reports what is missing before it shows anything.
    let directory = tempfile::tempdir().unwrap();
    let failed = output(directory.path(), &["--store", &url]);
    assert_eq!((failed.status.code(), text(&failed.stdout)), (Some(1), String::new()));
    let stderr = text(&failed.stderr);
    assert!(stderr.contains("oncegate schema apply postgres"), "{stderr}");
    assert!(!stderr.contains(server.password()), "{stderr}");
    schema::apply(&options).await.unwrap();
    two_sidecars_on(&PostgresStore::open(options).await.unwrap(), &url).await;
}

#[cfg(target_os = "linux")]
#[test]
fn an_interrupted_demo_leaves_no_files_and_no_processes() {
    let directory = tempfile::tempdir().unwrap();
    let mut command = demo(directory.path(), &["--seed", "5", "--intents", "120"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    // The second run lasts longer than the kill needs, and at its first fault its sidecar is running.
    assert!(lines.any(|line| line.starts_with("2 of 2")), "there is no second run");
    assert!(lines.any(|line| line.starts_with("  ")), "the second run shows no event");
    assert_eq!(processes_on(directory.path()), 1, "the sidecar");
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    assert_eq!(lines.last().as_deref(), Some("Interrupted. The sidecar is stopped."));
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(processes_on(directory.path()), 0, "the sidecar still runs");
    assert_eq!(entries(directory.path()), [""; 0]);
}

#[test]
fn the_demo_reports_what_it_cannot_do() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    let failed = output(&missing, &[]);
    assert_eq!(failed.status.code(), Some(1));
    let stderr = text(&failed.stderr);
    assert!(stderr.starts_with("error: cannot create a temporary directory: "), "{stderr}");
    for store in ["memory:", "records"] {
        let failed = output(directory.path(), &["--store", store]);
        assert_eq!(failed.status.code(), Some(2), "{store}");
        let stderr = text(&failed.stderr);
        assert!(stderr.starts_with("error: --store: two sidecars cannot share"), "{stderr}");
    }
    // A sidecar starts without its store; a demonstration of refusals would never end.
    let closed_address = format!("127.0.0.1:{}", oncegate_servers::free_port().unwrap());
    let failed = output(directory.path(), &["--store", &format!("redis://:hunter2@{closed_address}")]);
    assert_eq!((failed.status.code(), text(&failed.stdout)), (Some(1), String::new()));
    let stderr = text(&failed.stderr);
    let said =
        format!("error: --store: redis://{closed_address}/0 cannot be used now: the store is out of reach");
    assert!(stderr.starts_with(&said) && stderr.contains("Connection refused"), "{stderr}");
    for intents in ["0", "10001", "many"] {
        let failed = output(directory.path(), &["--intents", intents]);
        assert_eq!(failed.status.code(), Some(2), "{intents}");
        let stderr = text(&failed.stderr);
        assert!(stderr.contains(intents) && stderr.contains("--intents"), "{stderr}");
    }
}
