//! The sidecar as a child process.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use oncegate_testkit::until;
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::watch;

use crate::client::{Connection, Request, within};
use crate::plan::Plan;

/// `oncegate proxy`, running. It is killed when this is dropped.
pub struct Sidecar {
    /// The address on which it listens.
    pub address: SocketAddr,
    /// The admin address.
    pub admin: SocketAddr,
    child: Child,
    output: Output,
}

/// The output of a process.
#[derive(Clone)]
pub(crate) struct Output {
    lines: watch::Sender<Vec<String>>,
}

impl Output {
    pub(crate) fn new() -> Self {
        Self { lines: watch::Sender::new(Vec::new()) }
    }

    /// Reads a pipe of a process to its end.
    pub(crate) fn read(&self, pipe: impl Read + Send + 'static) {
        let lines = self.lines.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                lines.send_modify(|all| all.push(line));
            }
        });
    }

    /// Waits for a line with this text.
    pub(crate) async fn line(&self, text: &str) -> Option<String> {
        let mut seen = self.lines.subscribe();
        let find = |lines: &Vec<String>| lines.iter().find(|line| line.contains(text)).cloned();
        let lines = within(seen.wait_for(|lines| find(lines).is_some())).await?.ok()?;
        find(&lines)
    }

    /// All lines so far.
    pub(crate) fn text(&self) -> String {
        self.lines.borrow().join("\n")
    }
}

/// The path of the binary, in the directory into which the tests were built.
fn binary() -> PathBuf {
    let tests = std::env::current_exe().expect("the path of this program");
    let dir = tests.ancestors().nth(2).expect("a target directory");
    let path = dir.join(format!("oncegate{}", std::env::consts::EXE_SUFFIX));
    assert!(
        path.exists(),
        "no {}: run `cargo build -p oncegate-cli --features failpoints` first",
        path.display()
    );
    path
}

impl Sidecar {
    /// Starts it and waits until it listens.
    pub(crate) async fn start(plan: &Plan, upstream: SocketAddr, store: &str, dir: &Path) -> Self {
        let mut command = Command::new(binary());
        command
            .args(["proxy", "--listen=127.0.0.1:0", "--admin=127.0.0.1:0"])
            .arg(format!("--to=http://{upstream}"))
            .arg(format!("--store={store}"))
            .arg("--service=cases")
            // The servers share this machine with all other tests.
            .arg("--store-timeout=15s")
            .args(plan.flags(dir))
            .env_remove("ONCEGATE_FAILPOINT")
            // These are for tests, and no settings of the sidecar.
            .env_remove("ONCEGATE_PYTHON_ENV")
            .env_remove("ONCEGATE_GO_SERVICE")
            .env_remove("ONCEGATE_CASES_SHOW")
            .env_remove("ONCEGATE_SEAL_KEYS")
            .envs(plan.seal_keys().map(|keys| ("ONCEGATE_SEAL_KEYS", keys)))
            .envs(plan.failpoint.map(|point| ("ONCEGATE_FAILPOINT", point)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().expect("the sidecar can be started");
        let output = Output::new();
        output.read(child.stdout.take().expect("a pipe"));
        output.read(child.stderr.take().expect("a pipe"));
        let mut sidecar =
            Self { address: ([127, 0, 0, 1], 0).into(), admin: ([127, 0, 0, 1], 0).into(), child, output };
        let listening = "oncegate listening on ";
        until("the sidecar listens", async || {
            sidecar.exited().is_some() || sidecar.output.text().contains(listening)
        })
        .await;
        let all = sidecar.output.text();
        let Some(line) = all.lines().find_map(|line| line.strip_prefix(listening)) else {
            panic!("the sidecar does not listen; its output: {all}");
        };
        let mut parts = line.split(", ");
        let mut address = |prefix: &str| {
            let part = parts.next().and_then(|part| part.strip_prefix(prefix)).and_then(|at| at.parse().ok());
            part.unwrap_or_else(|| panic!("no address after {prefix:?} in {line:?}"))
        };
        sidecar.address = address("http://");
        sidecar.admin = address("admin http://");
        sidecar
    }

    /// Waits until it stops at the failpoint.
    pub async fn at_failpoint(&self, point: &str) {
        let line = self.output.line(&format!("failpoint {point}")).await;
        assert!(
            line.is_some(),
            "never at {point} (built with `--features failpoints`?): {}",
            self.output.text()
        );
    }

    /// The output so far.
    #[must_use]
    pub fn printed(&self) -> String {
        self.output.text()
    }

    /// The value of a series in its metrics.
    pub async fn metric(&self, series: &str) -> Option<f64> {
        let request = Request::new("GET", "/metrics").host("127.0.0.1");
        let response = Connection::open(self.admin).await.exchange(&request).await.expect("a response");
        let text = String::from_utf8_lossy(&response.body).into_owned();
        text.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok())
    }

    /// Kills the process, as a power cut would.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Suspends the process.
    pub fn stop(&self) {
        oncegate_servers::freeze(self.child.id()).expect("it stands still");
    }

    /// Resumes the process.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Asks the process to end.
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// The exit status, if the process ended.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child of this process")
    }

    fn signal(&self, signal: Signal) {
        signal_child(&self.child, signal);
    }
}

/// Sends a signal to a child of this process.
pub(crate) fn signal_child(child: &Child, signal: Signal) {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process id");
    kill_process(pid, signal).expect("a child that is not reaped yet");
}

impl Drop for Sidecar {
    fn drop(&mut self) {
        self.kill();
    }
}
