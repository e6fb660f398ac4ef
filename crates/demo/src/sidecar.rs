//! The sidecar, as a process of its own: `oncegate proxy`.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, header};
use http_body_util::Full;
use tokio::time::timeout;

use crate::exchange::exchange;
use crate::shared::{RETENTION, SERVICE, SharedStore};

/// The time for which the keys of a killed process stay blocked. Short, so that the audience does not wait.
pub(crate) const LEASE: &str = "2s";

/// The longest start of a sidecar. After a crash it checks its whole store.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// The longest wait for a store that cannot be reached, before anything is shown.
const STORE_TIMEOUT: Duration = Duration::from_secs(5);

/// The number of log lines that are shown after a failure.
const LOG_LINES: usize = 20;

/// A running sidecar.
pub(crate) struct Sidecar {
    pub(crate) listen: SocketAddr,
    pub(crate) admin: SocketAddr,
    to: SocketAddr,
    config: SidecarConfig,
    process: Process,
}

/// The program and the directory of a demonstration.
#[derive(Clone)]
pub(crate) struct Home {
    /// The executable that is started as the sidecar.
    pub(crate) program: PathBuf,
    /// The temporary directory.
    pub(crate) dir: PathBuf,
}

/// The home, the log and the store of one sidecar.
#[derive(Clone)]
pub(crate) struct SidecarConfig {
    home: Home,
    /// The name of its log in the directory.
    log: &'static str,
    /// Its store; `None` is a directory of its own.
    shared: Option<SharedStore>,
}

impl SidecarConfig {
    /// The configuration of the only sidecar.
    pub(crate) fn single(home: &Home) -> Self {
        Self { home: home.clone(), log: "sidecar.log", shared: None }
    }

    /// The configurations of two sidecars that share their store.
    pub(crate) fn pair(home: &Home, shared: &SharedStore) -> [Self; 2] {
        ["sidecar-1.log", "sidecar-2.log"].map(|log| Self {
            home: home.clone(),
            log,
            shared: Some(shared.clone()),
        })
    }

    fn log(&self) -> PathBuf {
        self.home.dir.join(self.log)
    }
}

/// A process that ends no later than this value.
struct Process {
    child: Child,
    /// Kept open, because a process may end if it cannot write its standard output.
    stdout: Option<BufReader<ChildStdout>>,
}

impl Sidecar {
    /// Starts it on free ports in front of the service `to`.
    pub(crate) async fn start(to: SocketAddr, config: SidecarConfig) -> Result<Self, String> {
        let mut failure = String::new();
        // Another process may take a port between the check and the start.
        for _ in 0..3 {
            let (listen, admin) = free_ports()?;
            match launch(listen, admin, to, &config).await {
                Ok(process) => return Ok(Self { listen, admin, to, config, process }),
                Err(error) => failure = error,
            }
            // The log must contain only the last failure.
            let _not_there = std::fs::remove_file(config.log());
        }
        Err(failure)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.child.id()
    }

    /// Kills it as `kill -9` does, and waits until it is gone.
    pub(crate) fn kill(&mut self) -> Result<(), String> {
        self.process.kill().map(|_| ()).map_err(|error| format!("cannot kill the sidecar: {error}"))
    }

    /// Starts it again, on the same store and the same ports.
    pub(crate) async fn restart(&mut self) -> Result<(), String> {
        self.process = launch(self.listen, self.admin, self.to, &self.config).await?;
        Ok(())
    }

    /// Returns an error if the sidecar has ended by itself.
    pub(crate) fn check(&mut self) -> Result<(), String> {
        match self.process.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(ended(status, &self.config)),
            Err(error) => Err(format!("cannot check that the sidecar still runs: {error}")),
        }
    }
}

/// Checks that a sidecar can use this store, before anything is shown.
pub(crate) async fn try_store(home: &Home, shared: &SharedStore) -> Result<(), String> {
    let config = SidecarConfig { home: home.clone(), log: "store.log", shared: Some(shared.clone()) };
    // Nothing listens on port 9 (discard), and no request is sent there.
    let mut sidecar = Sidecar::start((Ipv4Addr::LOCALHOST, 9).into(), config).await?;
    // A sidecar starts without its database, too, and waits for it.
    let deadline = tokio::time::Instant::now() + STORE_TIMEOUT;
    while let Err(why) = readiness(sidecar.admin).await {
        if tokio::time::Instant::now() >= deadline {
            let reason = first_error(&sidecar.config).map_or(String::new(), |reason| format!(" ({reason})"));
            return Err(format!("--store: {} cannot be used now: {why}{reason}", shared.shown));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    sidecar.kill()
}

/// Checks that the sidecar would accept requests with a key. An error is the reason why it would not.
async fn readiness(admin: SocketAddr) -> Result<(), String> {
    let ask = Request::get("/readyz").header(header::HOST, admin.to_string()).body(Full::new(Bytes::new()));
    let ask = ask.map_err(|error| error.to_string())?;
    let answer = timeout(STORE_TIMEOUT, exchange(admin, ask)).await.map_err(|_| "it does not answer")?;
    let answer = answer.map_err(|error| error.to_string())?;
    if answer.status().is_success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(answer.body()).trim_end().to_owned())
}

impl Process {
    /// Kills the process and waits until it has ended. Does nothing if it has ended already.
    fn kill(&mut self) -> io::Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Waits for its end, because its directory is about to be removed.
        let _gone_already = self.kill();
    }
}

async fn launch(
    listen: SocketAddr,
    admin: SocketAddr,
    to: SocketAddr,
    config: &SidecarConfig,
) -> Result<Process, String> {
    let Home { program, dir } = &config.home;
    let log = File::options().create(true).append(true).open(config.log());
    let log = log.map_err(|error| format!("cannot write the sidecar's log in {}: {error}", dir.display()))?;
    let mut command = Command::new(program);
    command
        .arg("proxy")
        .args(["--to", &format!("http://{to}")])
        .args(["--listen", &listen.to_string()])
        .args(["--admin", &admin.to_string()])
        .args(["--lease", LEASE])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log);
    // The configuration of other sidecars must not change the demonstration.
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("ONCEGATE_") {
            command.env_remove(name);
        }
    }
    match &config.shared {
        None => command.current_dir(dir).arg("--store").arg(dir.join("store")),
        // Not as an argument, which every user of this machine can read. Its URL may name files by relative paths, so the
        // sidecar has the same working directory as this process.
        Some(shared) => {
            let flags = ["--service", SERVICE, "--retention", RETENTION];
            command.args(flags).env("ONCEGATE_STORE", &shared.url)
        }
    };
    let child = command.spawn().map_err(|error| format!("cannot start {}: {error}", program.display()))?;
    let mut process = Process { child, stdout: None };
    let stdout = process.child.stdout.take().ok_or("the sidecar has no standard output")?;
    // The task ends at the latest with the process, which owns the other end.
    let line = tokio::task::spawn_blocking(|| first_line(stdout));
    let Ok(line) = timeout(START_TIMEOUT, line).await else {
        return Err(failed(
            &format!("the sidecar did not listen within {} s", START_TIMEOUT.as_secs()),
            config,
        ));
    };
    let (line, stdout) = line
        .map_err(io::Error::from)
        .and_then(|line| line)
        .map_err(|error| failed(&format!("cannot read the output of the sidecar: {error}"), config))?;
    if line.is_empty() {
        return Err(match process.kill() {
            Ok(status) => ended(status, config),
            Err(error) => failed(&format!("the sidecar does not print its address: {error}"), config),
        });
    }
    if !line.contains(" listening on ") {
        return Err(failed(
            &format!("the sidecar printed {:?} instead of its address", line.trim_end()),
            config,
        ));
    }
    process.stdout = Some(stdout);
    Ok(process)
}

fn first_line(stdout: ChildStdout) -> io::Result<(String, BufReader<ChildStdout>)> {
    let (mut line, mut stdout) = (String::new(), BufReader::new(stdout));
    stdout.read_line(&mut line)?;
    Ok((line, stdout))
}

fn ended(status: ExitStatus, config: &SidecarConfig) -> String {
    failed(&format!("the sidecar ended by itself ({status})"), config)
}

/// The failure, with the last lines of the sidecar's log.
fn failed(what: &str, config: &SidecarConfig) -> String {
    let log = std::fs::read_to_string(config.log()).unwrap_or_default();
    let lines: Vec<_> = log.lines().collect();
    if lines.is_empty() {
        return format!("{what}; its log is empty");
    }
    let last = lines.get(lines.len().saturating_sub(LOG_LINES)..).unwrap_or_default();
    format!("{what}; its log:\n  {}", last.join("\n  "))
}

/// The first error that the sidecar logged, without its time and place.
fn first_error(config: &SidecarConfig) -> Option<String> {
    let log = std::fs::read_to_string(config.log()).ok()?;
    let error = log.lines().find_map(|line| line.split_once(" ERROR "))?.1;
    let error = error.split_once(": ").map_or(error, |(_, error)| error);
    // A sidecar continues without its store, but the demonstration does not.
    Some(error.split("; starting without").next().unwrap_or(error).to_owned())
}

/// Two free ports below the range of outgoing connections: the same ports are needed again after the kill, and no connection
/// of the demonstration may have taken one by then.
fn free_ports() -> Result<(SocketAddr, SocketAddr), String> {
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    let first = since.subsec_nanos() ^ std::process::id().rotate_left(16);
    let mut candidates =
        (0..PORTS).map(|n| FIRST_PORT + (first.wrapping_add(u32::from(n)) % u32::from(PORTS)) as u16);
    let mut free = || {
        candidates.find_map(|port| {
            let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            TcpListener::bind(address).is_ok().then_some(address)
        })
    };
    match (free(), free()) {
        (Some(listen), Some(admin)) => Ok((listen, admin)),
        _ => Err(format!(
            "no port from {FIRST_PORT} to {} on 127.0.0.1 is free for the sidecar",
            FIRST_PORT + PORTS - 1
        )),
    }
}

const FIRST_PORT: u16 = 20_000;
const PORTS: u16 = 12_000;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn config(dir: &Path) -> SidecarConfig {
        let program = std::env::current_exe().unwrap();
        SidecarConfig::single(&Home { program, dir: dir.to_owned() })
    }

    #[test]
    fn ports_are_free_and_different() {
        let (listen, admin) = free_ports().unwrap();
        assert_ne!(listen, admin);
        assert!(TcpListener::bind(listen).is_ok() && TcpListener::bind(admin).is_ok());
    }

    #[test]
    fn the_log_of_the_sidecar_is_shown() {
        let dir = tempfile::tempdir().unwrap();
        let home = config(dir.path());
        assert_eq!(failed("it ended", &home), "it ended; its log is empty");
        let written: String = (0..50).map(|n| format!("line {n}\n")).collect();
        std::fs::write(home.log(), written).unwrap();
        let text = failed("it ended", &home);
        assert!(text.starts_with("it ended; its log:\n  line 30\n") && text.ends_with("  line 49"), "{text}");
    }

    #[tokio::test]
    async fn a_failed_start_has_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        // Here, the program that is to be the sidecar is the one that runs the tests, which knows no such flag.
        let Err(error) = Sidecar::start(([127, 0, 0, 1], 9).into(), config(dir.path())).await else {
            panic!("it started")
        };
        assert!(error.contains("the sidecar ended by itself") && error.contains("option"), "{error}");
    }
}
