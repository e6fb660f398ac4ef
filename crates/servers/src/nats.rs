//! NATS with JetStream.

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::port::free_port;

/// The bound on the start of a server.
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// A server with JetStream in a directory of its own.
#[derive(Debug)]
pub struct NatsServer {
    child: Option<Child>,
    port: u16,
    dir: TempDir,
}

impl NatsServer {
    /// Starts a server, and waits until it answers.
    ///
    /// # Errors
    /// Where there is no `nats-server`, or it does not answer in time.
    pub fn start() -> io::Result<Self> {
        let dir = tempfile::Builder::new().prefix("oncegate-nats-").tempdir()?;
        let mut server = Self { child: None, port: 0, dir };
        // Another process may take the port between the search for a free one and the start of the server.
        let mut last = io::Error::other("not tried");
        for _ in 0..5 {
            server.port = free_port()?;
            match server.restart() {
                Ok(()) => return Ok(server),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Starts it again on its port and its directory, after [`kill`](Self::kill).
    ///
    /// # Errors
    /// Where it does not answer in time.
    pub fn restart(&mut self) -> io::Result<()> {
        let log = self.dir.path().join("log");
        let mut command = Command::new("nats-server");
        command.args(["--addr", "127.0.0.1", "--port", &self.port.to_string(), "--jetstream", "--store_dir"]);
        command.arg(self.dir.path()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&log)?);
        let child = command.spawn().map_err(|error| io::Error::other(format!("nats-server: {error}")))?;
        self.child = Some(child);
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while !self.answers() {
            let ended = self.child.as_mut().map(Child::try_wait).transpose()?.flatten();
            if ended.is_some() || Instant::now() > deadline {
                self.kill();
                let log = fs::read_to_string(log).unwrap_or_default();
                return Err(io::Error::other(format!("nats-server does not answer: {log}")));
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// It greets who connects when what it stores is read.
    fn answers(&self) -> bool {
        let greeting = || -> io::Result<String> {
            let connection = TcpStream::connect(("127.0.0.1", self.port))?;
            connection.set_read_timeout(Some(Duration::from_secs(5)))?;
            let mut line = String::new();
            BufReader::new(connection).read_line(&mut line)?;
            Ok(line)
        };
        greeting().is_ok_and(|line| line.starts_with("INFO "))
    }

    /// Ends it at once, as `kill -9` does.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _gone_already = child.kill();
            let _status = child.wait();
        }
    }

    /// The process id of the server.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// The URL of the server: `nats://127.0.0.1:PORT`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        self.kill();
    }
}
