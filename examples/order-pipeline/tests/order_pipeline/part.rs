//! A process that is started again whenever it ends, as a supervisor does it.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use oncegate_servers::until;

/// One part of the way.
pub(crate) struct Part {
    shared: Arc<Mutex<Shared>>,
    supervisor: Option<JoinHandle<ExitStatus>>,
}

struct Shared {
    child: Child,
    /// The address, after the part has started.
    address: Option<String>,
    is_stopping: bool,
}

impl Part {
    pub(crate) fn start(mut command: Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let child = command.spawn().unwrap();
        let shared = Arc::new(Mutex::new(Shared { child, address: None, is_stopping: false }));
        listen(&shared);
        let kept = shared.clone();
        let supervisor = std::thread::spawn(move || {
            loop {
                std::thread::sleep(Duration::from_millis(10));
                let mut shared = kept.lock().unwrap();
                let Some(status) = shared.child.try_wait().unwrap() else { continue };
                if shared.is_stopping {
                    return status;
                }
                shared.address = None;
                shared.child = command.spawn().unwrap();
                drop(shared);
                listen(&kept);
            }
        });
        Self { shared, supervisor: Some(supervisor) }
    }

    /// Returns the current address.
    pub(crate) fn address(&self) -> String {
        until("it listens", || self.shared.lock().unwrap().address.clone())
    }

    /// As `kill -9` does it. It is started again.
    pub(crate) fn kill(&self) {
        self.shared.lock().unwrap().child.kill().unwrap();
    }

    /// Sends SIGTERM, and waits until it has ended.
    pub(crate) fn stop(mut self) {
        until("it can be told", || {
            let mut shared = self.shared.lock().unwrap();
            shared.address.as_ref()?;
            shared.is_stopping = true;
            let pid = shared.child.id().to_string();
            Command::new("kill").args(["-TERM", &pid]).status().unwrap().success().then_some(())
        });
        until("it is at rest", || self.supervisor.as_ref()?.is_finished().then_some(()));
        let status = self.supervisor.take().unwrap().join().unwrap();
        assert!(status.success(), "{status}");
    }
}

/// Reads the address of a process that was just started.
fn listen(shared: &Arc<Mutex<Shared>>) {
    let (pid, stdout) = {
        let mut shared = shared.lock().unwrap();
        (shared.child.id(), shared.child.stdout.take().unwrap())
    };
    let shared = shared.clone();
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(stdout).read_line(&mut line);
        let Some(address) = read.ok().and_then(|_| line.trim().strip_prefix("listening on http://")) else {
            return;
        };
        let mut shared = shared.lock().unwrap();
        if shared.child.id() == pid {
            shared.address = Some(address.to_owned());
        }
    });
}

impl Drop for Part {
    fn drop(&mut self) {
        let Some(supervisor) = self.supervisor.take() else { return };
        {
            let mut shared = self.shared.lock().unwrap();
            shared.is_stopping = true;
            shared.child.kill().unwrap();
        }
        // A panic of the thread is already reported.
        let _status = supervisor.join();
    }
}
