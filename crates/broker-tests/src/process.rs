//! Processes that are killed, suspended and resumed.

use std::fs::File;
use std::io::{self, Read as _, Seek as _};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A child process. It is killed when it is dropped.
#[derive(Debug)]
pub struct Child {
    child: std::process::Child,
    log: File,
}

impl Child {
    /// Starts an example of the crate under test with these variables.
    pub fn example(name: &str, variables: &[(&str, String)]) -> Self {
        let mut command = Command::new(example(name));
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        Self::start(command)
    }

    /// Starts a program.
    pub fn start(mut command: Command) -> Self {
        let log = tempfile::tempfile().unwrap();
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log.try_clone().unwrap());
        let child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        Self { child, log }
    }

    /// The id of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the output so far.
    pub fn log(&mut self) -> String {
        let mut text = String::new();
        let mut log = &self.log;
        log.rewind().unwrap();
        log.read_to_string(&mut text).unwrap();
        text
    }

    /// Returns the exit status if the process has ended.
    pub fn ended(&mut self) -> Option<std::process::ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Kills the process.
    pub fn kill(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }

    /// Sends SIGTERM, and waits for the end.
    pub fn stop(&mut self) -> io::Result<()> {
        let status = Command::new("kill").args(["-TERM", &self.pid().to_string()]).status()?;
        assert!(status.success());
        let deadline = Instant::now() + super::TIMEOUT;
        loop {
            if let Some(status) = self.ended() {
                assert!(status.success(), "{status}: {}", self.log());
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(io::Error::other(format!("it does not stop: {}", self.log())));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns the path of an example: next to the test program.
fn example(name: &str) -> PathBuf {
    let here = std::env::current_exe().unwrap();
    let path = here.parent().and_then(|deps| deps.parent()).unwrap().join("examples").join(name);
    assert!(path.exists(), "{} is missing: cargo build --examples, of the crate under test", path.display());
    path
}
