//! The workspace's test programs, several at a time: most of what they do is wait for servers, leases and redeliveries.

use std::collections::{BTreeSet, VecDeque};
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use serde_json::Value;

use crate::run::{Result, cargo, output};

/// Test programs that run at once. Each has as many threads as the machine has processors, but most threads wait. More programs
/// would end no earlier: the processors are busy, and time limits are passed.
const AT_ONCE: usize = 3;

/// Lines of a failed program that are printed again at the end.
const FAILURE_LINES: usize = 120;

/// The programs that take longest start first, so that no processor idles at the end. Those that need the processors are
/// between those that wait for brokers.
const LONGEST: [&str; 15] = [
    "amqp amqp",
    "cases behaviour",
    "cli programs",
    "cli proxy",
    "postgres postgres",
    "order-pipeline order_pipeline",
    "inbox-postgres outbox",
    "kafka kafka",
    "cli transactional",
    "embedded oncegate_embedded",
    "redis oncegate_redis",
    "sqs sqs",
    "inbox-postgres inbox",
    "nats nats",
    "redis redis",
];

/// Programs whose tests mostly wait, for brokers that start and for connections that time out. More of them run at once.
const WAITING: [&str; 2] = ["amqp amqp", "cli proxy"];

/// The tests to run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Selection {
    All,
    /// Tests that need no server: unit tests but [`NEED_A_SERVER`], [`QUICK`], and the cases without [`SLOW_CASES`].
    Quick,
}

/// Integration tests that need no server: the directory of the package, and the name of the program.
const QUICK: [&str; 12] = [
    "cases behaviour", "cli quick", "client client", "core records", "embedded embedded", "engine engine",
    "http http", "inbox consumer", "oncegate quick", "probe probe", "seal seal", "testkit testkit",
];

/// Programs with unit tests that need a server.
const NEED_A_SERVER: [&str; 2] = ["postgres oncegate_postgres", "redis oncegate_redis"];

/// Parts of the names of cases that need a server, or packages of another language.
const SLOW_CASES: [&str; 7] =
    ["/redis/", "/redis-cluster/", "/postgres/", "/cached/", "fastapi/", "express/", "-library/"];

/// A program with tests.
struct Suite {
    /// The directory of its package, and its name there.
    name: String,
    arguments: Vec<&'static str>,
    program: PathBuf,
    /// The directory of its package, in which it runs.
    package: PathBuf,
    is_integration: bool,
}

/// Builds the test programs and runs them all, also after one has failed. Meanwhile `others` runs in the place of one of them.
pub(crate) fn run(selection: Selection, others: impl FnOnce() -> Result<()> + Send) -> Result<()> {
    let mut suites = build(selection)?;
    suites.sort_by_key(|suite| {
        let place = LONGEST.iter().position(|name| suite.name == *name);
        (place.unwrap_or(LONGEST.len()), suite.name.clone())
    });
    let count = suites.len();
    let began = Instant::now();
    let waiting = Mutex::new(VecDeque::from(suites));
    let red = Mutex::new(Vec::new());
    let fail = |error| red.lock().unwrap_or_else(PoisonError::into_inner).push(error);
    let run_programs = || {
        while let Some(suite) = next(&waiting) {
            suite.run().unwrap_or_else(fail);
        }
    };
    thread::scope(|scope| {
        for _ in 1..AT_ONCE {
            scope.spawn(run_programs);
        }
        others().unwrap_or_else(fail);
        run_programs();
    });
    let red = red.into_inner().unwrap_or_else(PoisonError::into_inner);
    println!("{count} test programs after {} s", began.elapsed().as_secs());
    if red.is_empty() {
        return Ok(());
    }
    Err(format!("{} of {count} test programs and libraries failed:\n  {}", red.len(), red.join("\n  ")))
}

fn next(waiting: &Mutex<VecDeque<Suite>>) -> Option<Suite> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
}

fn build(selection: Selection) -> Result<Vec<Suite>> {
    let mut command = cargo();
    command.args([
        "test",
        "--workspace",
        "--all-features",
        "--no-run",
        "--message-format=json-render-diagnostics",
    ]);
    let is_quick = selection == Selection::Quick;
    if is_quick {
        command.args(["--lib", "--bins"]);
        let names: BTreeSet<_> = QUICK.iter().filter_map(|name| name.split(' ').nth(1)).collect();
        names.into_iter().for_each(|name| {
            command.args(["--test", name]);
        });
    }
    let messages = output(&mut command)?;
    let mut suites = Vec::new();
    for line in messages.lines() {
        let line: Value = serde_json::from_str(line)
            .map_err(|error| format!("the output of cargo is not JSON: {error}"))?;
        let is_test = line.pointer("/profile/test").and_then(Value::as_bool) == Some(true);
        let text = |pointer: &str| line.pointer(pointer).and_then(Value::as_str);
        let (Some(program), Some(manifest), Some(name), true) =
            (text("/executable"), text("/manifest_path"), text("/target/name"), is_test)
        else {
            continue;
        };
        let package =
            PathBuf::from(manifest).parent().map(PathBuf::from).ok_or("a manifest without a directory")?;
        let directory = package.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let name = format!("{directory} {name}");
        let is_integration = line.pointer("/target/kind/0").and_then(Value::as_str) == Some("test");
        let is_table = is_quick && name == "cases behaviour";
        let skipped = SLOW_CASES.iter().filter(|_| is_table);
        let arguments = skipped.flat_map(|part| ["--skip", part]).collect();
        suites.push(Suite { name, arguments, program: program.into(), package, is_integration });
    }
    // A program that was renamed must not fall out of a list unnoticed.
    let lists: &[&[&str]] =
        if is_quick { &[&QUICK, &NEED_A_SERVER] } else { &[&QUICK, &NEED_A_SERVER, &LONGEST, &WAITING] };
    let listed = lists.iter().copied().flatten();
    let missing: Vec<_> = listed.filter(|name| suites.iter().all(|suite| suite.name != **name)).collect();
    if !missing.is_empty() {
        return Err(format!("xtask/src/suites.rs names test programs that do not exist: {missing:?}"));
    }
    suites.retain(|suite| !is_quick || suite.is_quick());
    Ok(suites)
}

/// The part of a test program's output that is about its failed tests, at most [`FAILURE_LINES`] lines. It is repeated at the
/// end, because the output of all programs is long, and often only its end is kept.
fn failures(printed: &[u8]) -> String {
    let printed = String::from_utf8_lossy(printed);
    let from = printed.find("\nfailures:\n").unwrap_or_default();
    let lines: Vec<_> = printed[from..].lines().collect();
    let half = FAILURE_LINES / 2;
    if lines.len() <= FAILURE_LINES {
        return lines.join("\n");
    }
    format!("{}\n[...]\n{}", lines[..half].join("\n"), lines[lines.len() - half..].join("\n"))
}

impl Suite {
    fn is_quick(&self) -> bool {
        let name = &self.name.as_str();
        if self.is_integration { QUICK.contains(name) } else { !NEED_A_SERVER.contains(name) }
    }

    /// Runs the program, and prints its output at the end.
    fn run(&self) -> Result<()> {
        let began = Instant::now();
        let say = |error: &dyn std::fmt::Display| format!("{}: {error}", self.name);
        // Into a file: a process that a test left behind would keep a pipe open.
        let log = self.program.with_extension("log");
        let output = File::create(&log).map_err(|error| say(&error))?;
        let mut command = Command::new(&self.program);
        if WAITING.contains(&self.name.as_str()) {
            command.env("RUST_TEST_THREADS", "4");
        }
        let ended = command
            .args(&self.arguments)
            .current_dir(&self.package)
            .env("CARGO_MANIFEST_DIR", &self.package)
            .stdin(Stdio::null())
            .stdout(output.try_clone().map_err(|error| say(&error))?)
            .stderr(output)
            .status()
            .map_err(|error| say(&error))?;
        let printed = fs::read(&log).map_err(|error| say(&error))?;
        // In one call, so that the output of another suite does not come in between.
        print!(
            "\n== {} ({} s)\n{}",
            self.name,
            began.elapsed().as_secs(),
            String::from_utf8_lossy(&printed).trim_start()
        );
        if ended.success() { Ok(()) } else { Err(format!("{}\n{}", say(&ended), failures(&printed))) }
    }
}
