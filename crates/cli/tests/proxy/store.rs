//! The embedded store: its disk fills up, its clock is changed, and its size is limited.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use oncegate_testkit::until;
use rustix::process::Signal;

use crate::OK;
use crate::support::{FixedService, Message, Service, Sidecar, faketime, request, sidecar};

const NEXT: &str = "HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\nno";

fn post(key: &str) -> String {
    request("POST", "/orders", &[&format!("Idempotency-Key: {key}")], "{}")
}

async fn ready(sidecar: &Sidecar) -> Message {
    admin(sidecar, "/readyz").await
}

async fn admin(sidecar: &Sidecar, path: &str) -> Message {
    crate::support::ask(sidecar.admin, &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")).await
}

/// A small file system for one test.
pub(crate) struct Disk {
    directory: tempfile::TempDir,
}

impl Disk {
    pub(crate) fn new(size: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let options = format!("size={size},mode=700");
        run(Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(directory.path()));
        Self { directory }
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    fn fill(&self) {
        let full = fs::write(self.filler(), vec![7; 256 << 20]).unwrap_err();
        assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    }

    fn filler(&self) -> PathBuf {
        self.path().join("filler")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        run(Command::new("umount").args(["--lazy"]).arg(self.path()));
    }
}

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(
        status.success(),
        "{command:?}: {status}; a file system is mounted for this test, which needs root"
    );
}

async fn start_on(disk: &Disk, service: &FixedService) -> Sidecar {
    let store = format!("--store={}", disk.path().join("store").display());
    Sidecar::start(service.address, &[&store]).await
}

#[tokio::test]
async fn a_full_disk_refuses_new_keys_and_replays_stored_ones_even_after_a_restart() {
    let disk = Disk::new("64m");
    let service = Service::new().await.answers(OK);
    let mut sidecar = start_on(&disk, &service).await;
    sidecar.ask(&post("done")).await.has_status(200);
    disk.fill();
    for _ in 0..2 {
        let refused = sidecar.ask(&post("new")).await;
        refused.has_status(503);
        assert!(refused.text().contains("takes no new keys"), "{}", refused.text());
        until("the sidecar is not ready and reports why", async || {
            let refused = ready(&sidecar).await;
            let why = refused.text();
            let is_full = why.contains("the disk is nearly full") || why.contains("No space left on device");
            refused.status() == 503 && is_full
        })
        .await;
        assert!(sidecar.ask(&post("done")).await.has_status(200).is_replay());
        sidecar.ask(&request("POST", "/orders", &[], "{}")).await.has_status(200);
        sidecar.process.kill().await;
        sidecar = start_on(&disk, &service).await;
    }
    let served = service.requests();
    assert_eq!(served, 3, "one request with a key, and two without");
    fs::remove_file(disk.filler()).unwrap();
    until("new keys are accepted again", async || sidecar.ask(&post("new")).await.status() == 200).await;
    assert!(sidecar.ask(&post("done")).await.has_status(200).is_replay());
    assert_eq!(service.requests(), served + 1);
    sidecar.process.signal(Signal::TERM);
    assert!(sidecar.process.ended().await.success());
}

/// The system ends a process that writes beyond its limit of file sizes, unless the process expects that.
#[tokio::test]
async fn a_limit_of_file_sizes_refuses_new_keys_and_ends_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let store = format!("--store={}", directory.path().join("store").display());
    let service = Service::new().await.answers(OK);
    let mut sidecar = Sidecar::start(service.address, &[&store]).await;
    sidecar.ask(&post("done")).await.has_status(200);
    sidecar.process.signal(Signal::TERM);
    assert!(sidecar.process.ended().await.success());
    // In units of 512 or 1024 bytes: less than any segment has.
    let mut command = tokio::process::Command::new("sh");
    command.args(["-c", "ulimit -f 900; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_oncegate"), "proxy"]);
    command.args(["--listen=127.0.0.1:0", "--admin=127.0.0.1:0", &store]);
    command.arg(format!("--to=http://{}", service.address)).env("ONCEGATE_SERVICE", "tests");
    let mut sidecar = Sidecar::run(&mut command).await;
    let mut number = 0;
    until("new keys are refused", async || {
        number += 1;
        sidecar.ask(&post(&format!("new-{number}"))).await.status() == 503
    })
    .await;
    until("the sidecar says why", async || {
        let refused = ready(&sidecar).await;
        refused.status() == 503 && refused.text().contains("File too large")
    })
    .await;
    let served = service.requests();
    sidecar.ask(&post("newer")).await.is_problem(503, "store-unavailable");
    assert!(sidecar.ask(&post("done")).await.has_status(200).is_replay());
    assert_eq!(service.requests(), served);
    sidecar.process.signal(Signal::TERM);
    assert!(sidecar.process.ended().await.success());
}

#[tokio::test]
async fn check_warns_of_a_full_disk() {
    let disk = Disk::new("64m");
    let service = Service::new().await.answers(OK);
    let mut sidecar = start_on(&disk, &service).await;
    sidecar.ask(&post("done")).await.has_status(200);
    sidecar.process.signal(Signal::TERM);
    assert!(sidecar.process.ended().await.success());
    let store = disk.path().join("store").display().to_string();
    let check = async || {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command.args(["check", "--to=http://127.0.0.1:9", "--store", &store]);
        let output = command.output().await.unwrap();
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("sound; "), "{text}");
        text.lines().any(|line| line.starts_with("warn  ") && line.contains("the disk is nearly full"))
    };
    assert!(!check().await);
    disk.fill();
    assert!(check().await);
}

#[tokio::test]
async fn a_sidecar_started_on_a_full_disk_without_a_store_serves_requests_without_a_key() {
    let disk = Disk::new("32m");
    let service = Service::new().await.answers(OK);
    disk.fill();
    let sidecar = start_on(&disk, &service).await;
    sidecar.ask(&request("POST", "/orders", &[], "{}")).await.has_status(200);
    sidecar.ask(&post("new")).await.has_status(503);
    fs::remove_file(disk.filler()).unwrap();
    until("new keys are accepted", async || sidecar.ask(&post("new")).await.status() == 200).await;
}

#[tokio::test]
async fn a_store_keeps_its_limit_of_records_and_freed_keys_make_space_soon() {
    let directory = tempfile::tempdir().unwrap();
    let store = format!("--store={}", directory.path().join("store").display());
    let flags = [&*store, "--max-records=2", "--lease=250ms"];
    let service = Service::new().await.answers(NEXT);
    let sidecar = Sidecar::start(service.address, &flags).await;
    // The service refused the requests, so their keys are free again; but the store remembers them for a moment.
    for key in ["a", "b"] {
        sidecar.ask(&post(key)).await.has_status(429);
    }
    sidecar.ask(&post("c")).await.has_status(503);
    assert!(ready(&sidecar).await.has_status(200).text().contains("it has reached its limit of 2 records"));
    sidecar.ask(&post("a")).await.has_status(429);
    until("there is space again", async || sidecar.ask(&post("c")).await.status() == 429).await;
}

#[tokio::test]
async fn a_full_store_executes_nothing_new_even_with_danger_fail_open() {
    let directory = tempfile::tempdir().unwrap();
    let on_disk = format!("--store={}", directory.path().join("store").display());
    for store in ["--store=memory:", &*on_disk] {
        let service = Service::new().await.answers(OK);
        let flags = [store, "--max-records=2", "--store-outage=open"];
        let sidecar = Sidecar::start(service.address, &flags).await;
        for key in ["a", "b"] {
            sidecar.ask(&post(key)).await.has_status(200);
        }
        for key in ["c", "d"] {
            sidecar.ask(&post(key)).await.is_problem(503, "store-unavailable");
        }
        assert!(sidecar.ask(&post("a")).await.has_status(200).is_replay());
        assert_eq!(service.requests(), 2, "{store}");
        let ready = ready(&sidecar).await.has_status(200).text().to_owned();
        assert!(ready.contains("it has reached its limit of 2 records: raise the limit"), "{store}: {ready}");
        let metrics = admin(&sidecar, "/metrics").await;
        assert!(metrics.text().contains("oncegate_store_advisory{name=\"full\"} 1"), "{store}");
    }
}

#[tokio::test]
async fn a_memory_store_keeps_its_limit_of_bytes() {
    const LARGE: usize = 512 * 1024;
    let service = Service::new().await;
    let flags = ["--store=memory:", "--max-store-bytes=1MiB"];
    let sidecar = Sidecar::start(service.address, &flags).await;
    let mut client = sidecar.connect().await;
    client.send(post("a")).await;
    let mut wire = service.accept().await;
    let response = format!("HTTP/1.1 200 OK\r\nContent-Length: {LARGE}\r\n\r\n{}", "x".repeat(LARGE));
    for key in ["b", "c"] {
        wire.message().await;
        wire.send(&response).await;
        client.message().await.has_status(200);
        client.send(post(key)).await;
    }
    client.message().await.is_problem(503, "store-unavailable");
    assert!(sidecar.ask(&post("b")).await.has_status(200).is_replay());
}

/// A sidecar whose clock shows the time in a file.
async fn timed(directory: &Path, service: &FixedService, clock: &Path) -> Sidecar {
    let mut command = sidecar(&format!("http://{}", service.address));
    command
        .arg(format!("--store={}", directory.join("store").display()))
        .env("LD_PRELOAD", faketime())
        .env("FAKETIME_TIMESTAMP_FILE", clock)
        .env("FAKETIME_NO_CACHE", "1")
        // Time passes at its usual speed; only the displayed time is set.
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    Sidecar::run(&mut command).await
}

/// Replaces the file as a whole, because the sidecar reads it all the time.
fn set(clock: &Path, to: &str) {
    let new = clock.with_extension("new");
    fs::write(&new, format!("{to}\n")).unwrap();
    fs::rename(new, clock).unwrap();
}

/// The output of `oncegate clock`.
async fn oncegate_clock(sidecar: &Sidecar, args: &[&str]) -> String {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
    let admin = sidecar.admin.to_string();
    let output = command.arg("clock").args(args).args(["--admin", &admin]).output().await.unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn a_clock_jump_ahead_expires_nothing_and_is_reported_until_accepted() {
    let directory = tempfile::tempdir().unwrap();
    let clock = directory.path().join("clock");
    set(&clock, "+0");
    let service = Service::new().await.answers(OK);
    let mut sidecar = timed(directory.path(), &service, &clock).await;
    sidecar.ask(&post("done")).await.has_status(200);
    assert_eq!(ready(&sidecar).await.has_status(200).text(), "ready\n");
    let json = oncegate_clock(&sidecar, &["show", "--json"]).await;
    let agreeing: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(agreeing["direction"].is_null() && agreeing["seconds"] == 0, "{json}");
    set(&clock, "+40d");
    assert!(sidecar.ask(&post("done")).await.has_status(200).is_replay());
    sidecar.ask(&post("meanwhile")).await.has_status(200);
    assert!(
        ready(&sidecar)
            .await
            .has_status(200)
            .text()
            .contains("note: the clock of this machine was set ahead")
    );
    sidecar.process.logs("oncegate clock show").await;
    let metrics = admin(&sidecar, "/metrics").await;
    assert!(metrics.text().contains("oncegate_store_advisory{name=\"clock\"} 1"), "{}", metrics.text());
    // A restart does not take the jump for passed time either.
    sidecar.process.kill().await;
    sidecar = timed(directory.path(), &service, &clock).await;
    assert!(sidecar.ask(&post("done")).await.has_status(200).is_replay());
    let shown = oncegate_clock(&sidecar, &["show"]).await;
    assert!(shown.contains("ahead of the time of the store (the machine has"), "{shown}");
    assert!(shown.contains("the retention of 1 of 2 records ends at once"), "{shown}");
    // The members are the same in every state.
    let json = oncegate_clock(&sidecar, &["show", "--json"]).await;
    let ahead: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(
        ahead["direction"] == "ahead" && ahead["records_ending"] == 1 && ahead["complete"] == true,
        "{json}"
    );
    let names = |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&ahead), names(&agreeing));
    // Another step than the one that was seen is refused, and so is one without a reason.
    let step = "{\"reason\":\"r\",\"ahead_seconds\":1000}";
    let post_clock = async |body: &str| {
        let fields = ["Content-Type: application/json", "Connection: close"];
        let text = request("POST", "/v1/clock/accept", &fields, body).replace("orders.test", "localhost");
        crate::support::ask(sidecar.admin, &text).await
    };
    let refused = post_clock(step).await;
    assert!(refused.has_status(400).text().contains("s ahead, not 1000 s"), "{}", refused.text());
    let refused = post_clock("{}").await;
    assert!(refused.has_status(400).text().contains("reason"), "{}", refused.text());
    let accept = &["accept", "--reason", "the machine was paused", "--actor", "ada"];
    let accepted = oncegate_clock(&sidecar, accept).await;
    assert!(accepted.starts_with("accepted: the time of the store is 34"), "{accepted}");
    let words = "an operator accepted the time of this machine's clock";
    sidecar.process.logs(words).await;
    let line = sidecar.process.error_lines(words).concat();
    assert!(line.contains("ada") && line.contains("the machine was paused"), "{line}");
    let again = oncegate_clock(&sidecar, accept).await;
    assert!(
        again.starts_with("nothing to accept: the clock of the machine and the time of the store agree"),
        "{again}"
    );
    assert!(sidecar.ask(&post("meanwhile")).await.has_status(200).is_replay());
    assert!(!sidecar.ask(&post("done")).await.has_status(200).is_replay(), "40 days later the key is new");
    assert_eq!(service.requests(), 3);
}

/// The count of unsettled records runs every few seconds, and the acceptance may be faster.
#[tokio::test]
async fn an_unknown_outcome_that_ends_by_an_accepted_clock_is_reported_however_young_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let clock = directory.path().join("clock");
    set(&clock, "+0");
    let silent = Service::new().await;
    let mut command = sidecar(&format!("http://{}", silent.address));
    command
        .args(["--upstream-timeout=100ms", &format!("--store={}", directory.path().join("store").display())])
        .env("LD_PRELOAD", faketime())
        .env("FAKETIME_TIMESTAMP_FILE", &clock)
        .env("FAKETIME_NO_CACHE", "1")
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    let mut sidecar = Sidecar::run(&mut command).await;
    sidecar.ask(&post("lost")).await.is_problem(504, "outcome-unknown");
    set(&clock, "+40d");
    until("the jump is noticed", async || ready(&sidecar).await.text().contains("was set ahead")).await;
    let accepted = oncegate_clock(&sidecar, &["accept", "--reason", "the machine was paused"]).await;
    assert!(accepted.starts_with("accepted: "), "{accepted}");
    sidecar.process.logs("a record was removed at the end of its retention").await;
    let metrics = admin(&sidecar, "/metrics").await;
    assert!(metrics.text().contains("oncegate_unsettled_expired_total 1"), "{}", metrics.text());
}

#[tokio::test]
async fn each_jump_of_the_clock_is_logged() {
    let directory = tempfile::tempdir().unwrap();
    let clock = directory.path().join("clock");
    set(&clock, "+0");
    let service = Service::new().await.answers(OK);
    let mut sidecar = timed(directory.path(), &service, &clock).await;
    for (to, log) in [
        ("-1h", "s behind the time of the store"),
        ("+2h", "the clock of this machine was set ahead by 7"),
        ("+9h", "the clock of this machine was set ahead by 32"),
        ("+0", "the time of the store agree again"),
    ] {
        set(&clock, to);
        sidecar.ask(&post(&format!("at{to}"))).await.has_status(200);
        sidecar.process.logs(log).await;
    }
}

#[tokio::test]
async fn a_clock_that_was_behind_at_the_start_and_is_corrected_expires_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let clock = directory.path().join("clock");
    set(&clock, "+0");
    let service = Service::new().await.answers(OK);
    let mut sidecar = timed(directory.path(), &service, &clock).await;
    sidecar.ask(&post("before")).await.has_status(200);
    sidecar.process.kill().await;
    set(&clock, "-400d");
    sidecar = timed(directory.path(), &service, &clock).await;
    assert!(sidecar.ask(&post("before")).await.has_status(200).is_replay());
    sidecar.ask(&post("meanwhile")).await.has_status(200);
    set(&clock, "+0");
    until("the correction is seen", async || ready(&sidecar).await.text() == "ready\n").await;
    for key in ["before", "meanwhile"] {
        assert!(sidecar.ask(&post(key)).await.has_status(200).is_replay(), "{key}");
    }
    assert_eq!(service.requests(), 2);
}

#[tokio::test]
async fn a_clock_that_was_ahead_at_the_start_and_is_corrected_needs_no_action() {
    let directory = tempfile::tempdir().unwrap();
    let clock = directory.path().join("clock");
    set(&clock, "+3d");
    let service = Service::new().await.answers(OK);
    let sidecar = timed(directory.path(), &service, &clock).await;
    sidecar.ask(&post("before")).await.has_status(200);
    set(&clock, "+0");
    until("the correction is seen", async || {
        let ready = ready(&sidecar).await;
        let words = ready.text();
        ready.status() == 200
            && words.contains("s behind the time of the store")
            && words.contains("If it was ahead before and is right now, do nothing")
    })
    .await;
    let said = oncegate_clock(&sidecar, &["accept", "--reason", "r"]).await;
    assert!(said.starts_with("nothing to accept: the clock of the machine is"), "{said}");
    assert!(
        said.contains("behind the time of the store (the machine has") && said.contains("do nothing"),
        "{said}"
    );
    // No operator is needed, so there is no alert.
    let metrics = admin(&sidecar, "/metrics").await.text().to_owned();
    assert!(metrics.contains("oncegate_store_advisory{name=\"clock-behind\"} 1"), "{metrics}");
    assert!(!metrics.contains("name=\"clock\""), "{metrics}");
    assert!(sidecar.ask(&post("before")).await.has_status(200).is_replay());
    sidecar.ask(&post("meanwhile")).await.has_status(200);
    assert!(sidecar.ask(&post("meanwhile")).await.has_status(200).is_replay());
    assert_eq!(service.requests(), 2);
}

/// A disk that returns zeros where a completion was. The sidecar does not start. On the copy, nothing executes again.
#[tokio::test]
async fn what_can_be_read_of_a_damaged_store_is_salvaged() {
    let directory = tempfile::tempdir().unwrap();
    let (store, copy) = (directory.path().join("store"), directory.path().join("copy"));
    let flag = |path: &Path| format!("--store={}", path.display());
    let service = Service::new().await.answers(OK);
    let mut running = Sidecar::start(service.address, &[&flag(&store)]).await;
    let post = |name: &str| {
        request("POST", &format!("/orders/{name}"), &[&format!("Idempotency-Key: {name}")], "{}")
    };
    for name in ["before", "damaged", "after"] {
        running.ask(&post(name)).await.has_status(200);
    }
    running.process.kill().await;
    let segment = store.join("00000001.log");
    let mut bytes = fs::read(&segment).unwrap();
    let text = b"/orders/damaged";
    let completed = bytes.windows(text.len()).rposition(|window| window == text).unwrap() / 4096 * 4096;
    bytes[completed..completed + 4096].fill(0);
    fs::write(&segment, &bytes).unwrap();

    let mut command = sidecar("http://127.0.0.1:9");
    let refused = command.arg(flag(&store)).output().await.unwrap();
    assert!(!refused.status.success(), "{refused:?}");
    let check = |salvage: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command.args(["check", "--to=http://127.0.0.1:9", &flag(&store), "--salvage"]).arg(salvage);
        let ended = command.output().unwrap();
        assert_eq!(ended.status.code(), Some(1), "{ended:?}");
        String::from_utf8(ended.stdout).unwrap()
    };
    let said = check(&copy);
    assert!(said.contains("copied 3 records and 0 entries"), "{said}");
    assert!(said.contains("is unknown in the copy"), "{said}");
    assert!(said.contains("lost: ") && said.contains("00000001.log: batches before byte"), "{said}");
    assert!(check(&copy).contains("directory not empty"), "it is not overwritten");
    assert_eq!(fs::read(&segment).unwrap(), bytes, "the damaged store is left as it was");

    // The copy waits until an operator accepts the losses.
    let mut command = sidecar("http://127.0.0.1:9");
    let refused = command.arg(flag(&copy)).output().await.unwrap();
    let list = copy.join("salvaged");
    assert!(!refused.status.success(), "{refused:?}");
    assert!(String::from_utf8(refused.stderr).unwrap().contains(list.to_str().unwrap()));
    assert!(fs::read_to_string(&list).unwrap().contains("00000001.log: batches before byte"));
    fs::remove_file(list).unwrap();
    let running = Sidecar::start(service.address, &[&flag(&copy)]).await;
    for name in ["before", "after"] {
        assert!(running.ask(&post(name)).await.has_status(200).is_replay(), "{name}");
    }
    let unknown = running.ask(&post("damaged")).await;
    assert!(unknown.has_status(500).text().contains("outcome-unknown"), "{}", unknown.text());
    assert_eq!(service.requests(), 3);
}
