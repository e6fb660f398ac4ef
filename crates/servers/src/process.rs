//! Stopping a process where it stands, and letting it go on.

use std::fs;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// The bound on the suspension of a process. It may be in the middle of a system call.
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// Stops a process, and waits until every one of its threads stands still: a signal that was sent has not arrived yet, and
/// meanwhile another thread may go on.
///
/// # Errors
/// Where there is no such process, or it does not stop in time.
pub fn freeze(pid: u32) -> io::Result<()> {
    send(pid, Signal::STOP)?;
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while !is_stopped(pid)? {
        if Instant::now() > deadline {
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("process {pid} does not stop")));
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Lets a process go on.
///
/// # Errors
/// Where there is no such process.
pub fn thaw(pid: u32) -> io::Result<()> {
    send(pid, Signal::CONT)
}

fn send(pid: u32, signal: Signal) -> io::Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(kill_process(pid, signal)?)
}

fn is_stopped(pid: u32) -> io::Result<bool> {
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread may have ended since.
        let Ok(stat) = fs::read_to_string(task?.path().join("stat")) else { continue };
        // The name before the state is in parentheses, and may hold anything.
        let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        if state.is_some_and(|state| !matches!(state, 'T' | 't' | 'Z' | 'X')) {
            return Ok(false);
        }
    }
    Ok(true)
}
