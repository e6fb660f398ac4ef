//! Where intents survive their process.

use std::pin::Pin;

use crate::failure::BoxError;
use crate::intent::Intent;
use crate::report::Answer;

/// What a [`Journal`] returns.
pub type JournalFuture<'a> = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send + 'a>>;

/// Keeps intents over the end of their process: whoever starts again finds those that have no definite answer, and sends
/// them again with [`Intent::sent_before`].
pub trait Journal: Send + Sync + 'static {
    /// Writes the intent down, before it is sent for the first time. When this returns, the intent has to be where a crash
    /// does not reach it. An intent that is already there stays as it is.
    ///
    /// # Errors
    /// Where it could not be written down. Then it is not sent.
    fn open<'a>(&'a self, intent: &'a Intent) -> JournalFuture<'a>;

    /// The intent has a definite answer and need not be sent again. It is not called for an intent that ended without one,
    /// nor for one whose future was dropped: those stay.
    ///
    /// # Errors
    /// Where it could not be noted. The answer counts all the same.
    fn close<'a>(&'a self, intent: &'a Intent, answer: &'a Answer) -> JournalFuture<'a>;
}
