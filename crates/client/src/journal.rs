//! Journals, in which intents survive their process.

#[cfg(all(unix, feature = "journal"))]
mod directory;
#[cfg(all(unix, feature = "journal"))]
mod entry;
#[cfg(all(unix, feature = "journal"))]
mod files;
#[cfg(all(unix, feature = "journal"))]
mod finished;
#[cfg(all(unix, feature = "journal"))]
mod resume;
#[cfg(all(unix, feature = "journal"))]
mod sealing;
#[cfg(test)]
#[cfg(all(unix, feature = "journal"))]
mod tests;

use std::fmt;
use std::pin::Pin;
use std::time::Duration;

use oncegate_core::Timestamp;

#[cfg(all(unix, feature = "journal"))]
pub use self::directory::{DamagedFile, JournalDir, PendingIntent};
#[cfg(all(unix, feature = "journal"))]
pub use self::resume::{Resume, ResumeError, ResumedIntent};
use crate::failure::BoxError;
use crate::intent::Intent;
use crate::report::{DefiniteResponse, SendError, SendErrorKind};

/// The future of a call of a [`Journal`].
pub type JournalFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Keeps intents beyond the end of their process. The next process finds the intents without a definite response and sends them
/// again. `JournalDir`, with the feature `journal`, keeps them in a directory.
pub trait Journal: Send + Sync + 'static {
    /// Stores the intent before it is sent for the first time, or opens the stored intent of its key.
    ///
    /// When this returns, the intent must survive a crash. No other task or process may have it open until the
    /// [`JournalEntry`] is dropped.
    ///
    /// # Errors
    /// [`JournalOpenError`]. The intent is then not sent.
    fn open<'a>(&'a self, intent: &'a Intent)
    -> JournalFuture<'a, Result<JournaledIntent, JournalOpenError>>;
}

/// An intent in a [`Journal`] that is being sent.
///
/// Dropping the entry leaves the intent in the journal for a later process. That happens to an intent without a definite
/// response, and to one whose future was dropped.
pub trait JournalEntry: Send + Sync {
    /// Notes that the intent has a definite response and need not be sent again.
    ///
    /// A journal should remember for some time that the intent was done ([`JournaledIntent::done_before`]). Otherwise a caller
    /// that makes the same intent again, after the service has forgotten the key, would have it done twice.
    ///
    /// # Errors
    /// If the journal could not store this. The response counts anyway.
    fn close<'a>(self: Box<Self>, response: &'a DefiniteResponse) -> JournalFuture<'a, Result<(), BoxError>>;

    /// Notes that no attempt of the intent was ever processed, by this process or an earlier one: no attempt arrived, or the
    /// service turned it away ([`Verdict::TurnedAway`](crate::Verdict::TurnedAway)).
    ///
    /// The intent stays in the journal, and may be marked as never sent.
    ///
    /// # Errors
    /// If the journal could not store this.
    fn never_sent<'a>(self: Box<Self>) -> JournalFuture<'a, Result<(), BoxError>> {
        Box::pin(async { Ok(()) })
    }
}

/// An intent that is open in a [`Journal`].
pub struct JournaledIntent {
    pub(crate) entry: Box<dyn JournalEntry>,
    pub(crate) sent_before: bool,
    pub(crate) created_at: Option<Timestamp>,
    pub(crate) key_lifetime: Option<Duration>,
    pub(crate) done_before: bool,
}

impl JournaledIntent {
    /// An intent that was not in the journal before.
    #[must_use]
    pub fn new(entry: Box<dyn JournalEntry>) -> Self {
        Self { entry, sent_before: false, created_at: None, key_lifetime: None, done_before: false }
    }

    /// An intent that was in the journal, from a process that ended or gave up: if it may have been sent, the time of its
    /// creation, and the lifetime of its key.
    #[must_use]
    pub fn again(
        entry: Box<dyn JournalEntry>,
        sent_before: bool,
        created_at: Timestamp,
        key_lifetime: Option<Duration>,
    ) -> Self {
        Self { entry, sent_before, created_at: Some(created_at), key_lifetime, done_before: false }
    }

    /// An intent that was done before, without its response: the time of its creation, and the lifetime of its key. Within that
    /// lifetime it is sent again for the same response. After it, it is not sent ([`SendErrorKind::DoneBefore`]).
    #[must_use]
    pub fn done_before(
        entry: Box<dyn JournalEntry>,
        created_at: Timestamp,
        key_lifetime: Option<Duration>,
    ) -> Self {
        Self { done_before: true, ..Self::again(entry, true, created_at, key_lifetime) }
    }
}

impl fmt::Debug for JournaledIntent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JournaledIntent").field("sent_before", &self.sent_before).finish_non_exhaustive()
    }
}

/// A [`Journal`] could not open an intent. Nothing was sent by this call.
#[derive(Debug)]
#[non_exhaustive]
pub enum JournalOpenError {
    /// The intent could not be stored, as on a full disk or without a permission. It is not known if it was sent earlier.
    NotWritten(BoxError),
    /// Another process, or another task of this one, is sending the intent now.
    InFlight,
    /// The journal has another request or a damaged file under this key, or the intent that this one replaces has no definite
    /// response. A person must look at it.
    Conflict(BoxError),
    /// The journal has another request under this key, and no attempt of that one was processed. This request needs another key,
    /// or the stored intent must be removed.
    UnsentConflict(BoxError),
    /// The intent may have been sent with other credentials. It can be sent with those.
    OtherCredentials(BoxError),
    /// The file of the intent could not be opened, locked or read: a missing permission, or an error of the disk. The intent
    /// can be sent when that is fixed.
    Unreadable(BoxError),
}

impl JournalOpenError {
    pub(crate) fn send_error(self, sent_before: bool) -> SendError {
        let (kind, may_have_taken_effect, source) = match self {
            Self::NotWritten(error) => (SendErrorKind::Journal, sent_before, Some(error)),
            Self::InFlight => (SendErrorKind::InFlight, true, None),
            Self::Conflict(error) => (SendErrorKind::JournalConflict, true, Some(error)),
            Self::UnsentConflict(error) => (SendErrorKind::JournalConflict, false, Some(error)),
            Self::OtherCredentials(error) => (SendErrorKind::OtherCredentials, true, Some(error)),
            Self::Unreadable(error) => (SendErrorKind::JournalUnreadable, true, Some(error)),
        };
        SendError::new(kind, 0, may_have_taken_effect).with_source(source)
    }
}
