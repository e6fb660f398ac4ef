//! A server that speaks the protocol of Amazon SQS.

use std::fs::{self, File};
use std::io;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::port::free_port;

/// The bound on the start of a server.
const WAIT_TIMEOUT: Duration = Duration::from_secs(300);

/// A server in Node, which keeps its queues in memory: they are gone when it ends. Its packages are those that `cargo
/// xtask test` puts next to it.
#[derive(Debug)]
pub struct SqsServer {
    child: Child,
    port: u16,
    dir: TempDir,
}

impl SqsServer {
    /// Starts a server, and waits until it answers.
    ///
    /// # Errors
    /// Where there is no `node`, its packages are not there, or it does not answer in time.
    pub fn start() -> io::Result<Self> {
        let place = Path::new(env!("CARGO_MANIFEST_DIR")).join("sqs");
        if !place.join("node_modules").exists() {
            return Err(io::Error::other("run `cargo xtask test`, or `npm ci` in crates/servers/sqs"));
        }
        // Another process may take the port between the search for a free one and the start of the server.
        let mut last = io::Error::other("not tried");
        for _ in 0..5 {
            let port = free_port()?;
            let dir = tempfile::Builder::new().prefix("oncegate-sqs-").tempdir()?;
            let child = Command::new("node")
                .arg(place.join("server.js"))
                .arg(port.to_string())
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(File::create(dir.path().join("log"))?)
                .spawn()
                .map_err(|error| io::Error::other(format!("node: {error}")))?;
            match (Self { child, port, dir }).answering() {
                Ok(server) => return Ok(server),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn answering(mut self) -> io::Result<Self> {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            if self.child.try_wait()?.is_some() || Instant::now() > deadline {
                let log = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
                return Err(io::Error::other(format!("the SQS server does not answer: {log}")));
            }
            thread::sleep(Duration::from_millis(20));
        }
        // The server of another process, on the same port, after ours has failed.
        match self.child.try_wait()? {
            Some(status) => Err(io::Error::other(format!("the SQS server has ended: {status}"))),
            None => Ok(self),
        }
    }

    /// The process id of the server.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The URL of the server: `http://127.0.0.1:PORT`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

impl Drop for SqsServer {
    fn drop(&mut self) {
        let _gone_already = self.child.kill();
        let _status = self.child.wait();
    }
}
