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

/// Those that take longest begin first, so that no processor waits for them at the end.
const LONGEST: [&str; 9] =
    ["sqs", "amqp", "doors", "kafka", "postgres", "transactional", "proxy", "outbox", "nats"];

/// A program with tests.
struct Suite {
    /// Its package, and its name there.
    name: String,
    program: PathBuf,
    /// Where its package is, which is where it runs.
    package: PathBuf,
}

/// Builds every test program and runs them all, whatever becomes of one.
pub(crate) fn run() -> Result<()> {
    let mut suites = build()?;
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

fn build() -> Result<Vec<Suite>> {
    let mut command = cargo();
    command.args([
        "test",
        "--workspace",
        "--all-features",
        "--no-run",
        "--message-format=json-render-diagnostics",
    ]);
    let said = output(&mut command)?;
    let mut suites = Vec::new();
    for line in said.lines() {
        let line: Value = serde_json::from_str(line).map_err(|error| format!("what cargo says: {error}"))?;
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
        suites.push(Suite { name: format!("{directory} {name}"), program: program.into(), package });
    }
    if suites.is_empty() { Err("cargo built no test programs".into()) } else { Ok(suites) }
}

impl Suite {
    /// Runs it to its end, and then prints what it printed.
    fn run(&self) -> Result<()> {
        let began = Instant::now();
        let say = |error: &dyn std::fmt::Display| format!("{}: {error}", self.name);
        // Into a file: a pipe is open for as long as any process has it that a test left behind.
        let log = self.program.with_extension("log");
        let output = File::create(&log).map_err(|error| say(&error))?;
        let ended = Command::new(&self.program)
            .current_dir(&self.package)
            .env("CARGO_MANIFEST_DIR", &self.package)
            .stdin(Stdio::null())
            .stdout(output.try_clone().map_err(|error| say(&error))?)
            .stderr(output)
            .status()
            .map_err(|error| say(&error))?;
        let said = fs::read(&log).map_err(|error| say(&error))?;
        // One piece, so that no other suite's words come in between.
        print!(
            "\n== {} ({} s)\n{}",
            self.name,
            began.elapsed().as_secs(),
            String::from_utf8_lossy(&said).trim_start()
        );
        if ended.success() { Ok(()) } else { Err(say(&ended)) }
    }
}
