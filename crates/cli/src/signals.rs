//! The signals that stop a program: the first one asks it to end, a second one ends it at once. And those that must not end it.

use std::future::poll_fn;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use rustix::process::Signal as SignalNumber;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signals within this time after the first one count as the same: `timeout`, shells and supervisors send one to the process
/// and one to its group.
const SAME_SIGNAL: Duration = Duration::from_millis(250);

/// Keeps signals from ending the process. A handler of a signal stays when its listener is gone, and programs that this one
/// starts do not inherit it.
///
/// - SIGXFSZ: a write beyond the limit of file sizes (`ulimit -f`, `LimitFSIZE=`) returns an error, as one to a full disk does.
/// - SIGHUP, for a sidecar that starts: hooks of certificates send it at any time. One that arrives before the configuration is
///   read needs no reload; [`run`](crate::proxy::run) listens for later ones.
///
/// # Errors
/// The system refuses.
pub(crate) fn keep_running(is_sidecar: bool) -> std::io::Result<()> {
    // Signals are registered within a runtime, and there is none yet.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let _context = runtime.enter();
    drop(signal(SignalKind::from_raw(SignalNumber::XFSZ.as_raw()))?);
    if is_sidecar {
        drop(signal(SignalKind::hangup())?);
    }
    Ok(())
}

/// SIGTERM and SIGINT: the signals that stop a program.
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    /// The time until which signals count as a repetition of the first one.
    repeats_until: Option<Instant>,
}

impl Signals {
    /// Listens for the signals. They do not end the process any more.
    ///
    /// # Errors
    /// The system refuses.
    pub(crate) fn new() -> std::io::Result<Self> {
        let (terminate, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        Ok(Self { terminate, interrupt, repeats_until: None })
    }

    /// Waits for the first signal.
    pub(crate) async fn first(&mut self) {
        poll_fn(|cx| self.poll(cx)).await;
        self.repeats_until = Some(Instant::now() + SAME_SIGNAL);
    }

    /// Waits for a second signal. May be cancelled and called again.
    pub(crate) async fn second(&mut self) {
        if let Some(until) = self.repeats_until {
            // Signals of this time are taken at its end: on a busy machine, their exact time is unknown.
            tokio::time::sleep_until(until.into()).await;
            let _ = poll_fn(|cx| Poll::Ready(self.poll(cx))).await;
            self.repeats_until = None;
        }
        poll_fn(|cx| self.poll(cx)).await;
    }

    /// Takes the signals that have arrived. Ready if there was one.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let is_there = self.terminate.poll_recv(cx).is_ready() | self.interrupt.poll_recv(cx).is_ready();
        if is_there { Poll::Ready(()) } else { Poll::Pending }
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::{getpid, kill_process};

    use super::*;

    /// The process of this test would end otherwise.
    #[test]
    fn a_hangup_and_a_file_that_is_too_large_end_no_sidecar() {
        keep_running(true).unwrap();
        for signal in [SignalNumber::HUP, SignalNumber::XFSZ] {
            kill_process(getpid(), signal).unwrap();
        }
    }
}
