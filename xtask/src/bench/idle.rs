//! Ten thousand connections that do nothing: what memory the sidecar takes for them, and what active ones notice.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use super::load::resident;
use super::servers::{Server, program};
use super::table::{Contender, table};
use crate::run::Result;

const IDLE: usize = 10_000;

pub(super) fn run() -> Result<String> {
    let upstream = Server::start(&["bare", "0"])?;
    let without = Server::proxy(&upstream.address, "memory:", &[])?;
    let with = Server::proxy(&upstream.address, "memory:", &[])?;
    let started = resident(with.process())?;
    let begun = Instant::now();
    let idle = Idle::hold(&with.address)?;
    let held = resident(with.process())?;
    let mut text = table(
        "sidecar, memory store, 64 active connections, with and without 10 000 idle ones",
        vec![
            Contender::reference("request without a key, no idle connections", &without, "none")?,
            Contender::new("request without a key, 10 000 idle", &with, "none")?,
            Contender::reference("replay, no idle connections", &without, "replay")?,
            Contender::new("replay, 10 000 idle", &with, "replay")?,
        ],
    )?;
    let seconds = begun.elapsed().as_secs();
    let loaded = [resident(without.process())?, resident(with.process())?];
    let open = idle.release()?;
    let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    text.push_str(&format!(
        "\nMiB of memory: just started {:.1}; with {IDLE} connections, each of which had one request, {:.1} ({:.1} KiB \
         each); after the load {:.1}, the other sidecar {:.1}. {open} of {IDLE} were still open after {seconds} s.\n",
        mebibytes(started),
        mebibytes(held),
        (held - started) as f64 / 1024.0 / IDLE as f64,
        mebibytes(loaded[1]),
        mebibytes(loaded[0]),
    ));
    Ok(text)
}

/// A process that keeps idle connections.
struct Idle {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
}

impl Idle {
    fn hold(server: &str) -> Result<Self> {
        // Each connection is an open file.
        let mut child = Command::new("sh")
            .args(["-c", "ulimit -n \"$(ulimit -Hn)\" && exec \"$@\"", "sh"])
            .arg(program("oncegate-benches"))
            .args(["hold", server, &IDLE.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("sh: {error}"))?;
        let said = BufReader::new(child.stdout.take().ok_or("no standard output")?);
        let mut idle = Self { child, said };
        let line = idle.line()?;
        if line.starts_with("holding") { Ok(idle) } else { Err(format!("cannot hold connections: {line:?}")) }
    }

    /// Ends the process. Says how many connections were still open.
    fn release(mut self) -> Result<usize> {
        let end = self.child.stdin.take().map(|mut input| input.write_all(b"\n"));
        end.ok_or("no standard input")?.map_err(|error| error.to_string())?;
        let line = self.line()?;
        line.split(' ').next().and_then(|count| count.parse().ok()).ok_or(format!("said {line:?}"))
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.said.read_line(&mut line).map_err(|error| error.to_string())?;
        Ok(line)
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        // It ends when its standard input does.
        drop(self.child.stdin.take());
        let _ended = self.child.wait();
    }
}
