//! The sidecar, as a process of its own: `oncegate proxy`.

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use http::Method;
use tokio::time::{Instant, sleep};

use crate::exchange::ask_admin;

/// The time for which the keys of a killed process stay blocked. Short, so that the audience does not wait.
const LEASE: &str = "2s";

/// The longest start of a sidecar. After a crash it checks its whole store.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// The longest wait for a store that cannot be reached, before anything is shown.
const STORE_TIMEOUT: Duration = Duration::from_secs(5);

/// The number of log lines that are shown after a failure.
const LOG_LINES: usize = 20;

/// The service name that keeps records in a shared store apart from those of real services.
const SERVICE: &str = "oncegate-demo";

/// The retention of records in a shared store. It is short, because they stay there after the demonstration.
const RETENTION: &str = "1h";

/// A store on a server, for two sidecars. It does not belong to the demonstration, so the demonstration changes only its
/// own records.
#[derive(Clone)]
pub struct SharedStore {
    /// The URL. It may contain a password, so it is passed to the sidecars in their environment and nowhere else.
    url: String,
    /// The URL without its password.
    pub(crate) shown: String,
    /// A path that no other run uses, so that each record under it belongs to this run.
    pub(crate) path: String,
}

impl SharedStore {
    /// Uses the store at `url`. `shown` is printed instead of the URL and must not contain a password.
    pub fn new(url: impl Into<String>, shown: impl Into<String>) -> Self {
        let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let path = format!("/demo-{:x}-{:x}/payments", since.as_micros(), std::process::id());
        Self { url: url.into(), shown: shown.into(), path }
    }
}

/// The program, the directory, the log and the store of a sidecar.
#[derive(Clone)]
pub(crate) struct SidecarConfig {
    /// The executable that is started as the sidecar.
    pub(crate) program: PathBuf,
    /// The temporary directory of the demonstration.
    pub(crate) dir: PathBuf,
    /// The name of its log in the directory.
    pub(crate) log: &'static str,
    /// Its store; `None` is a directory of its own.
    pub(crate) shared: Option<SharedStore>,
}

/// A running sidecar. Ends when dropped.
pub(crate) struct Sidecar {
    pub(crate) listen: SocketAddr,
    pub(crate) admin: SocketAddr,
    to: SocketAddr,
    config: SidecarConfig,
    process: Process,
}

/// A process that ends no later than this value.
struct Process(Child);

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
        self.process.0.id()
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
        self.process.check(&self.config)
    }
}

/// Checks that a sidecar can use this store, before anything is shown.
pub(crate) async fn try_store(config: SidecarConfig, shown: &str) -> Result<(), String> {
    // Nothing listens on port 9 (discard), and no request is sent there.
    let sidecar = Sidecar::start((Ipv4Addr::LOCALHOST, 9).into(), config).await?;
    // A sidecar starts without its database, too, and waits for it.
    let deadline = Instant::now() + STORE_TIMEOUT;
    loop {
        let ready = ask_admin(sidecar.admin, Method::GET, "/readyz", String::new()).await?;
        if ready.status().is_success() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let why = String::from_utf8_lossy(ready.body());
            let failure = format!("--store: {shown} cannot be used now: {}", why.trim_end());
            return Err(sidecar.config.failed(&failure));
        }
        sleep(Duration::from_millis(100)).await;
    }
}

impl Process {
    /// Kills the process and waits until it has ended. Does nothing if it has ended already.
    fn kill(&mut self) -> io::Result<ExitStatus> {
        self.0.kill()?;
        self.0.wait()
    }

    fn check(&mut self, config: &SidecarConfig) -> Result<(), String> {
        match self.0.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(config.failed(&format!("the sidecar ended by itself ({status})"))),
            Err(error) => Err(format!("cannot check that the sidecar still runs: {error}")),
        }
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
    let SidecarConfig { program, dir, shared, .. } = config;
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
        .stdout(Stdio::null())
        .stderr(log);
    // The configuration of other sidecars must not change the demonstration.
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("ONCEGATE_") {
            command.env_remove(name);
        }
    }
    match shared {
        None => command.current_dir(dir).arg("--store").arg(dir.join("store")),
        // Not as an argument, which every user of this machine can read. Its URL may name files by relative paths, so the
        // sidecar has the same working directory as this process.
        Some(shared) => {
            let flags = ["--service", SERVICE, "--retention", RETENTION];
            command.args(flags).env("ONCEGATE_STORE", &shared.url)
        }
    };
    let child = command.spawn().map_err(|error| format!("cannot start {}: {error}", program.display()))?;
    let mut process = Process(child);
    let deadline = Instant::now() + START_TIMEOUT;
    // Its admin API responds as soon as it listens for requests.
    while ask_admin(admin, Method::GET, "/livez", String::new()).await.is_err() {
        process.check(config)?;
        if Instant::now() >= deadline {
            let failure = format!("the sidecar did not listen within {} s", START_TIMEOUT.as_secs());
            return Err(config.failed(&failure));
        }
        sleep(Duration::from_millis(5)).await;
    }
    process.check(config)?;
    Ok(process)
}

impl SidecarConfig {
    fn log(&self) -> PathBuf {
        self.dir.join(self.log)
    }

    /// The failure, with the last lines of the sidecar's log.
    fn failed(&self, failure: &str) -> String {
        let log = std::fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        if lines.is_empty() {
            return format!("{failure}; its log is empty");
        }
        let last = lines.get(lines.len().saturating_sub(LOG_LINES)..).unwrap_or_default();
        format!("{failure}; its log:\n  {}", last.join("\n  "))
    }
}

/// Two free ports below the range of outgoing connections: the same ports are needed again after the kill, and no connection
/// of the demonstration may have taken one by then.
fn free_ports() -> Result<(SocketAddr, SocketAddr), String> {
    const PORTS: std::ops::Range<u16> = 20_000..32_000;
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    let first = (since.subsec_nanos() ^ std::process::id().rotate_left(16)) as usize % PORTS.len();
    let candidates = PORTS.cycle().skip(first).take(PORTS.len());
    let addresses = candidates.map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    let mut free = addresses.filter(|address| TcpListener::bind(address).is_ok());
    free.next().zip(free.next()).ok_or_else(|| {
        format!("no port from {} to {} on 127.0.0.1 is free for the sidecar", PORTS.start, PORTS.end - 1)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_failed_start_has_a_reason_and_the_end_of_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let program = std::env::current_exe().unwrap();
        let config = SidecarConfig { program, dir: dir.path().to_owned(), log: "sidecar.log", shared: None };
        assert_eq!(config.failed("it ended"), "it ended; its log is empty");
        // Here, the program that is to be the sidecar is the one that runs the tests, which knows no such flag.
        let Err(error) = Sidecar::start(([127, 0, 0, 1], 9).into(), config.clone()).await else {
            panic!("it started")
        };
        assert!(error.contains("the sidecar ended by itself") && error.contains("option"), "{error}");
        std::fs::write(config.log(), (0..50).map(|n| format!("line {n}\n")).collect::<String>()).unwrap();
        let text = config.failed("it ended");
        assert!(text.starts_with("it ended; its log:\n  line 30\n") && text.ends_with("  line 49"), "{text}");
    }
}
