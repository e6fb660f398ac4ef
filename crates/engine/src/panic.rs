//! Panics in the code of callers, which must not end the engine.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Poll;

/// The error for a future that panicked. The panic hook has printed the place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PanicError;

/// Runs a future of the caller to its end, and catches a panic, so that it can be recorded as an unknown outcome. The future
/// is not used after a panic.
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
