//! Futures that run to their end, even if their caller drops them.
//!
//! A caller that stays polls the work in place, which costs no task and no wake-up between tasks. Only if the caller drops it
//! unfinished does the work move to a task of its own.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tracing::Instrument as _;

/// The work that is left after a [shielded](crate::Engine::shield) future, if no caller takes its output.
pub type ShieldRest = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A future that runs to its end even if it is dropped: see [`Engine::shield`](crate::Engine::shield).
pub(crate) struct Shielded<'a, T: 'static> {
    pub(crate) tasks: &'a TaskTracker,
    /// `None` at the end, and during a poll, so that work that panicked is not polled again.
    pub(crate) work: Option<Pin<Box<dyn Future<Output = T> + Send>>>,
    /// The work that is left to do if no caller takes the output.
    pub(crate) rest: fn(T) -> Option<ShieldRest>,
    /// The runtime for the rest of the work, once a poll was pending. Because of the token, a drain waits for the work as for
    /// a task.
    pub(crate) pending: Option<(Handle, TaskTrackerToken)>,
}

impl<T: 'static> Future for Shielded<'_, T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let Some(mut work) = self.work.take() else { return Poll::Pending };
        let poll = work.as_mut().poll(cx);
        if poll.is_pending() {
            if self.pending.is_none() {
                self.pending = Some((Handle::current(), self.tasks.token()));
            }
            self.work = Some(work);
        }
        poll
    }
}

impl<T: 'static> Drop for Shielded<'_, T> {
    fn drop(&mut self) {
        // Work that was never polled has not begun, and ends here.
        let (Some(work), Some((runtime, _token))) = (self.work.take(), self.pending.take()) else { return };
        let rest = self.rest;
        let task = async move {
            if let Some(rest) = rest(work.await) {
                rest.await;
            }
        };
        // The log lines of the rest belong to the same request.
        self.tasks.spawn_on(task.in_current_span(), &runtime);
    }
}
