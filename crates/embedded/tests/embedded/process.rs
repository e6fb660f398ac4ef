//! Real processes: a process that is killed again and again loses nothing that it acknowledged, and a second process

//! cannot open its store.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command as Process, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use oncegate_core::{
    Command, Complete, Completion, Outcome, RecordedResponse, State, Store as _, StoreErrorKind,
    StoredResponse,
};
use oncegate_embedded::{EmbeddedOpenError, EmbeddedOptions, EmbeddedStore};
use oncegate_testkit::{block_on, record_id as id};

const DIR: &str = "ONCEGATE_TEST_DIR";
const FIRST: &str = "ONCEGATE_TEST_FIRST";

/// The program of the child processes below. Without their environment it does nothing.
#[test]
fn child() {
    let Some(dir) = std::env::var_os(DIR).map(PathBuf::from) else { return };
    let next = AtomicU64::new(std::env::var(FIRST).unwrap().parse().unwrap());
    let store = EmbeddedStore::open(EmbeddedOptions::new(dir)).unwrap();
    // Written directly to stdout, because the test harness captures `print!`. One write for each line, so that a kill cuts
    // no line.
    let print = |line: String| std::io::stdout().lock().write_all(line.as_bytes()).unwrap();
    print("\nopen\n".to_owned());
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    let Outcome::Execute(grant) = block_on(store.apply(id(n), claim(n))).unwrap() else {
                        panic!("record {n} is not new");
                    };
                    print(format!("claimed {n} {}\n", grant.token));
                    let complete = Complete {
                        token: grant.token,
                        completion: Completion::Replayable(response(n)),
                        retention: DAY,
                    };
                    let outcome = block_on(store.apply(id(n), Command::Complete(complete))).unwrap();
                    assert_eq!(outcome, Outcome::Completed);
                    print(format!("completed {n} {}\n", grant.token));
                }
            });
        }
    });
}

struct ChildProcess {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl ChildProcess {
    fn start(dir: &Path, first: u64) -> Self {
        let mut child = Process::new(std::env::current_exe().unwrap())
            .args(["--exact", "process::child", "--nocapture", "--test-threads", "1"])
            .env(DIR, dir)
            .env(FIRST, first.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    fn wait_until_open(&mut self) {
        let mut line = String::new();
        while line != "open\n" {
            line.clear();
            assert!(
                self.lines.read_line(&mut line).unwrap() > 0,
                "the child ended before it opened the store"
            );
        }
    }

    /// Reads the given number of lines from the child.
    fn read(&mut self, lines: u64) -> String {
        let mut output = String::new();
        for _ in 0..lines {
            assert!(self.lines.read_line(&mut output).unwrap() > 0, "the child ended by itself");
        }
        output
    }

    /// Kills the child with SIGKILL. Returns the rest of its output.
    fn kill(mut self) -> String {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        let mut output = String::new();
        self.lines.read_to_string(&mut output).unwrap();
        output
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Record number → its acknowledged token, and `true` if its completion was acknowledged.
type Acknowledged = BTreeMap<u64, (u64, bool)>;

fn add(to: &mut Acknowledged, output: &str) {
    // The last line may be incomplete.
    for line in output.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
        let mut words = line.split_whitespace();
        let completed = match words.next() {
            Some("claimed") => false,
            Some("completed") => true,
            _ => continue,
        };
        let mut number = || words.next().unwrap().parse::<u64>().unwrap();
        to.insert(number(), (number(), completed));
    }
}

#[test]
fn a_killed_process_loses_nothing_that_it_acknowledged() {
    let rounds = std::env::var("ONCEGATE_KILL_ROUNDS").map_or(60, |text| text.parse().expect("a number"));
    let dir = tempfile::tempdir().unwrap();
    let mut acknowledged = Acknowledged::new();
    let mut killed_while_opening = 0;
    let mut seed = u64::from(std::process::id());
    for round in 0..rounds {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut child = ChildProcess::start(dir.path(), round * 1_000_000);
        if round % 5 == 4 {
            // Kills the child at any moment after its start.
            std::thread::sleep(Duration::from_micros(seed >> 32 & 0x3fff));
            killed_while_opening += 1;
        } else {
            child.wait_until_open();
            let output = child.read(seed >> 32 & 0xff);
            add(&mut acknowledged, &output);
        }
        add(&mut acknowledged, &child.kill());

        let store = EmbeddedStore::open(EmbeddedOptions::new(dir.path())).unwrap();
        for (n, (token, completed)) in &acknowledged {
            let record =
                block_on(store.lookup(id(*n))).unwrap().unwrap_or_else(|| panic!("record {n} is lost"));
            assert_eq!(record.token.get(), *token, "record {n}");
            match record.state {
                // The child may have been killed before it could print the completion.
                State::Completed(RecordedResponse::Replayable(found)) => assert_eq!(found, response(*n)),
                State::InProgress { .. } => assert!(!completed, "the completion of record {n} is lost"),
                other => panic!("record {n} is {other:?}"),
            }
        }
    }
    let completed = acknowledged.values().filter(|(_, completed)| *completed).count();
    assert!(completed > 500 && killed_while_opening > 0, "the rounds prove nothing: {completed} completions");
}

#[test]
fn a_second_process_gets_the_owners_pid_and_opens_the_store_after_the_owner_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = ChildProcess::start(dir.path(), 0);
    child.wait_until_open();
    let pid = child.child.id();
    let error = EmbeddedStore::open(EmbeddedOptions::new(dir.path())).unwrap_err();
    assert!(matches!(error, EmbeddedOpenError::InUse { pid: Some(found), .. } if found == pid), "{error}");
    assert!(error.to_string().contains(&format!("in use by the process with pid {pid}")), "{error}");
    child.kill();
    drop(EmbeddedStore::open(EmbeddedOptions::new(dir.path())).unwrap());
}

/// A file system of a few megabytes that is full, and then gets free space again.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_loses_nothing_and_the_store_recovers_without_a_restart() {
    let Some(disk) = SmallDisk::mount() else {
        // Written directly to stderr, because the test harness would hide it. A test that did not run must not look as if
        // it had passed.
        let _ = writeln!(
            std::io::stderr(),
            "\n*** a_full_disk_loses_nothing_and_the_store_recovers_without_a_restart DID NOT RUN: a tmpfs cannot be \
             mounted here (it takes root)"
        );
        return;
    };
    let filler = disk.path.join("filler");
    std::fs::write(&filler, vec![1; 4 << 20]).unwrap();
    let store = Arc::new(EmbeddedStore::open(EmbeddedOptions::new(disk.path.join("store"))).unwrap());
    let mut acknowledged = Vec::new();
    let mut n = 0;
    let refused = loop {
        match complete_one(&store, n) {
            Ok(()) => acknowledged.push(n),
            Err(error) => break error,
        }
        n += 1;
        assert!(n < 1_000_000, "the disk was never full");
    };
    assert_eq!(refused.kind(), StoreErrorKind::Unavailable, "{refused}");
    assert!(acknowledged.len() > 50, "{} before the disk was full", acknowledged.len());
    assert_eq!(block_on(store.check()).unwrap_err().kind(), StoreErrorKind::Unavailable);

    std::fs::remove_file(&filler).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while let Err(error) = block_on(store.check()) {
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
        assert!(
            Instant::now() < deadline,
            "the disk has free space again, but the store still refuses: {error}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    for n in &acknowledged {
        let outcome = block_on(store.apply(id(*n), claim(u64::MAX))).unwrap();
        assert_eq!(outcome, Outcome::Replay(response(*n)), "record {n}");
    }
    complete_one(&store, 2_000_000).unwrap();
}

fn complete_one(store: &EmbeddedStore, n: u64) -> Result<(), oncegate_core::StoreError> {
    let outcome = block_on(store.apply(id(n), claim(n)))?;
    let Outcome::Execute(grant) = outcome else { panic!("record {n} answers {outcome:?}") };
    let completion = Completion::Replayable(response(n));
    let complete = Complete { token: grant.token, completion, retention: DAY };
    let outcome = block_on(store.apply(id(n), Command::Complete(complete)))?;
    assert_eq!(outcome, Outcome::Completed, "record {n}");
    Ok(())
}

#[cfg(target_os = "linux")]
struct SmallDisk {
    path: PathBuf,
    _dir: tempfile::TempDir,
}

#[cfg(target_os = "linux")]
impl SmallDisk {
    fn mount() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().to_owned();
        let mounted = Process::new("mount")
            .args(["-t", "tmpfs", "-o", "size=9m", "tmpfs"])
            .arg(&path)
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
        mounted.then_some(Self { path, _dir: dir })
    }
}

#[cfg(target_os = "linux")]
impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Process::new("umount").arg("-l").arg(&self.path).status();
    }
}

const DAY: Duration = Duration::from_secs(86_400);

fn claim(n: u64) -> Command {
    Command::Claim(oncegate_testkit::claim(n, b"input"))
}

fn response(n: u64) -> StoredResponse {
    let body = [Bytes::from(n.to_be_bytes().repeat(64))];
    StoredResponse::new(201, &[("content-type", &b"application/json"[..])], &body, &[]).unwrap()
}
