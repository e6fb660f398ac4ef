//! The workspace's test programs, several at a time: most of what they do is wait for servers, leases and redeliveries.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use serde_json::Value;

use crate::run::{Result, cargo, output};

/// Test programs that run at once. Each has as many threads as the machine has processors.
const AT_ONCE: usize = 3;

/// The programs that take longest start first, so that no processor idles at the end.
const LONGEST: [&str; 9] =
    ["sqs", "amqp", "behaviour", "kafka", "postgres", "transactional", "proxy", "outbox", "nats"];

/// The tests to run.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Selection {
    All,
    /// Tests that need no server: unit tests, [`QUICK`], and the cases on stores of one process.
    Quick,
}

/// Integration tests that need no server.
const QUICK: [&str; 26] = [
    "awaited_answers",
    "behaviour",
    "breaker",
    "clock_set_back",
    "completer",
    "conclude",
    "conformance",
    "consumer",
    "directory",
    "engine",
    "errors",
    "fingerprint_vectors",
    "function",
    "golden_vectors",
    "half_way",
    "hostile",
    "http2",
    "journal",
    "layer",
    "leases",
    "memory",
    "own_errors",
    "policy",
    "slow_body",
    "steps",
    "upstream_completion",
];

/// Packages whose unit tests need a server.
const NEED_A_SERVER: [&str; 3] = ["postgres ", "redis ", "cache conformance"];

/// Stores that need a server, in the names of cases.
const STORES_WITH_A_SERVER: [&str; 4] = ["/redis/", "/redis-cluster/", "/postgres/", "/cached/"];

/// A program with tests.
struct Suite {
    /// The directory of its package, and its name there.
    name: String,
    arguments: Vec<&'static str>,
    program: PathBuf,
    /// The directory of its package, in which it runs.
    package: PathBuf,
}

/// Builds the test programs and runs them all, also after one has failed.
pub(crate) fn run(selection: Selection) -> Result<()> {
    let mut suites = build(selection)?;
    suites.sort_by_key(|suite| {
        let place = LONGEST.iter().position(|name| suite.name.ends_with(&format!(" {name}")));
        (place.unwrap_or(LONGEST.len()), suite.name.clone())
    });
    let count = suites.len();
    let began = Instant::now();
    let waiting = Mutex::new(VecDeque::from(suites));
    let red = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(suite) = next(&waiting) {
                    if let Err(error) = suite.run() {
                        red.lock().unwrap_or_else(PoisonError::into_inner).push(error);
                    }
                }
            });
        }
    });
    let red = red.into_inner().unwrap_or_else(PoisonError::into_inner);
    if red.is_empty() {
        println!("{count} test programs, all green after {} s", began.elapsed().as_secs());
        return Ok(());
    }
    Err(format!("{} of {count} test programs failed:\n  {}", red.len(), red.join("\n  ")))
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
        QUICK.iter().for_each(|name| {
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
        if is_quick && NEED_A_SERVER.iter().any(|start| name.starts_with(start)) {
            continue;
        }
        let is_table = is_quick && name == "cases behaviour";
        let skipped = STORES_WITH_A_SERVER.iter().filter(|_| is_table);
        let arguments = skipped.flat_map(|store| ["--skip", store]).collect();
        suites.push(Suite { name, arguments, program: program.into(), package });
    }
    if suites.is_empty() { Err("cargo built no test programs".into()) } else { Ok(suites) }
}

impl Suite {
    /// Runs the program, and prints its output at the end.
    fn run(&self) -> Result<()> {
        let began = Instant::now();
        let say = |error: &dyn std::fmt::Display| format!("{}: {error}", self.name);
        // Into a file: a process that a test left behind would keep a pipe open.
        let log = self.program.with_extension("log");
        let output = File::create(&log).map_err(|error| say(&error))?;
        let ended = Command::new(&self.program)
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
        if ended.success() { Ok(()) } else { Err(say(&ended)) }
    }
}
