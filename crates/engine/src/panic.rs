//! What somebody else's code may do, and what must not bring us down.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Poll;

/// A future panicked; the panic hook has said where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PanicError;

/// Runs somebody else's future to its end, so that a panic in it can be written down as what it is: an outcome that is not
/// known. Nothing of the future is looked at after a panic.
///
/// # Errors
/// [`PanicError`].
pub async fn catch_panic<F: Future>(future: F) -> Result<F::Output, PanicError> {
    let mut future = Box::pin(future);
    std::future::poll_fn(move |cx| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
        Ok(Poll::Pending) => Poll::Pending,
        Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
        Err(_) => Poll::Ready(Err(PanicError)),
    })
    .await
}
