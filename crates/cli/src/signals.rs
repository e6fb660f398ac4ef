//! The signals that stop a program: the first one asks it to end, a second one ends it at once.

use std::future::poll_fn;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signals within this time after the first one count as the same: `timeout`, shells and supervisors send one to the process
/// and one to its group.
const SAME_SIGNAL: Duration = Duration::from_millis(250);

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
