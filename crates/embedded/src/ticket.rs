//! The end of a batch, for the callers who wait for it.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};

/// The end of a batch: it is on the disk, or it failed.
#[derive(Default)]
pub(crate) struct Ticket {
    end: OnceLock<Result<(), Arc<str>>>,
    wakers: Mutex<Vec<Option<Waker>>>,
}

impl Ticket {
    /// Ends the batch, once. An `Err` has the reason.
    pub(crate) fn end(&self, end: Result<(), Arc<str>>) {
        if self.end.set(end).is_err() {
            return;
        }
        let wakers = std::mem::take(&mut *self.wakers());
        wakers.into_iter().flatten().for_each(Waker::wake);
    }

    /// Returns true if the batch is on the disk.
    pub(crate) fn is_durable(&self) -> bool {
        matches!(self.end.get(), Some(Ok(())))
    }

    /// Waits for the end on this thread.
    pub(crate) fn wait_blocking(&self) -> Result<(), Arc<str>> {
        self.end.wait().clone()
    }

    fn wakers(&self) -> MutexGuard<'_, Vec<Option<Waker>>> {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for the end of a batch.
pub(crate) struct Wait {
    ticket: Arc<Ticket>,
    /// The position of the waker in the ticket.
    position: Option<usize>,
}

impl Wait {
    pub(crate) fn new(ticket: Arc<Ticket>) -> Self {
        Self { ticket, position: None }
    }
}

impl Future for Wait {
    type Output = Result<(), Arc<str>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(end) = self.ticket.end.get() {
            return Poll::Ready(end.clone());
        }
        let this = &mut *self;
        let mut wakers = this.ticket.wakers();
        // Again under the lock: the end takes all wakers under it, and is set before.
        if let Some(end) = this.ticket.end.get() {
            return Poll::Ready(end.clone());
        }
        match this.position.and_then(|position| wakers.get_mut(position)) {
            Some(place) => match place {
                Some(waker) => waker.clone_from(context.waker()),
                None => *place = Some(context.waker().clone()),
            },
            None => {
                this.position = Some(wakers.len());
                wakers.push(Some(context.waker().clone()));
            }
        }
        Poll::Pending
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        if let Some(position) = self.position
            && self.ticket.end.get().is_none()
            && let Some(place) = self.ticket.wakers().get_mut(position)
        {
            *place = None;
        }
    }
}
