//! Panics in the code of callers, which must not end the engine.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll};

use pin_project_lite::pin_project;

/// The error for a future that panicked. The panic hook has printed the place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PanicError;

pin_project! {
    /// See [`catch_panic`]. It holds the future in place.
    struct CatchPanic<F> {
        #[pin]
        future: F,
    }
}

impl<F: Future> Future for CatchPanic<F> {
    type Output = Result<F::Output, PanicError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let future = self.project().future;
        match catch_unwind(AssertUnwindSafe(|| future.poll(cx))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
            Err(_) => Poll::Ready(Err(PanicError)),
        }
    }
}

/// Runs a future of the caller to its end, and catches a panic, so that it can be recorded as an unknown outcome. The future
/// is not used after a panic.
///
/// # Errors
/// [`PanicError`].
pub fn catch_panic<F: Future>(future: F) -> impl Future<Output = Result<F::Output, PanicError>> {
    CatchPanic { future }
}
