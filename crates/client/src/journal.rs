//! Where intents survive their process.

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
use crate::report::{Answer, SendError, SendErrorKind};

/// What a [`Journal`] returns.
pub type JournalFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Keeps intents over the end of their process: whoever starts again finds those that have no definite answer, and sends
/// them again. `JournalDir`, with the feature `journal`, keeps them in a directory.
pub trait Journal: Send + Sync + 'static {
    /// Writes the intent down, before it is sent for the first time, or takes up the one that is there under its key. When
    /// this returns, the intent has to be where a crash does not reach it, and nobody else may have it open until the
    /// [`JournalEntry`] is dropped.
    ///
    /// # Errors
    /// [`JournalOpenError`]. Then it is not sent.
    fn open<'a>(&'a self, intent: &'a Intent)
    -> JournalFuture<'a, Result<JournaledIntent, JournalOpenError>>;
}

/// An intent in a [`Journal`] that is being sent. Dropping it leaves the intent there, for whoever takes it up: so ends an
/// intent without a definite answer, and one whose future was dropped.
pub trait JournalEntry: Send + Sync {
    /// Notes that the intent has a definite answer and need not be sent again.
    ///
    /// A journal should remember for some time that the intent was done ([`JournaledIntent::done_before`]). Otherwise a caller
    /// that makes the same intent again, after the service has forgotten the key, would have it done twice.
    ///
    /// # Errors
    /// If it could not be noted. The answer counts anyway.
    fn close<'a>(self: Box<Self>, answer: &'a Answer) -> JournalFuture<'a, Result<(), BoxError>>;

    /// It is certain that the intent was never processed, by this process or by an earlier one: no attempt arrived, or the
    /// service turned it away ([`Verdict::TurnedAway`](crate::Verdict::TurnedAway)). It stays, and may be noted as one that
    /// was never sent.
    ///
    /// # Errors
    /// Where it could not be noted.
    fn never_sent<'a>(self: Box<Self>) -> JournalFuture<'a, Result<(), BoxError>> {
        Box::pin(async { Ok(()) })
    }
}

/// An intent that a [`Journal`] has.
pub struct JournaledIntent {
    pub(crate) entry: Box<dyn JournalEntry>,
    pub(crate) sent_before: bool,
    pub(crate) created_at: Option<Timestamp>,
    pub(crate) key_lifetime: Option<Duration>,
    pub(crate) done_before: bool,
}

impl JournaledIntent {
    /// An intent that was not there.
    #[must_use]
    pub fn new(entry: Box<dyn JournalEntry>) -> Self {
        Self { entry, sent_before: false, created_at: None, key_lifetime: None, done_before: false }
    }

    /// An intent that was there, of a process that ended or gave up: whether it may have been sent, when it came to be, and
    /// for how long its key was said to be good.
    #[must_use]
    pub fn again(
        entry: Box<dyn JournalEntry>,
        sent_before: bool,
        created_at: Timestamp,
        key_lifetime: Option<Duration>,
    ) -> Self {
        Self { entry, sent_before, created_at: Some(created_at), key_lifetime, done_before: false }
    }

    /// An intent that was done before, and whose answer is not there any more: when it came to be, and for how long its key
    /// was said to be good. Within that time it is sent again, for the same answer; after it, it is not sent
    /// ([`SendErrorKind::DoneBefore`]).
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

/// Why a [`Journal`] has not opened an intent. Nothing was sent by this call.
#[derive(Debug)]
#[non_exhaustive]
pub enum JournalOpenError {
    /// It could not be written down: no room, no permission. Nothing is known of an earlier sending.
    NotWritten(BoxError),
    /// It is being sent just now, by another process or by another task of this one.
    InFlight,
    /// What the journal has under the key is another request, or is damaged; or the intent that this one replaces has no
    /// definite answer. A person has to look.
    Conflict(BoxError),
    /// The intent may have been sent with other credentials than these. It can be sent with those.
    OtherCredentials(BoxError),
    /// The journal may have the intent, and its file could not be opened, locked or read: no permission, an error of the disk.
    /// It can be sent when that is mended.
    Unreadable(BoxError),
}

impl JournalOpenError {
    pub(crate) fn send_error(self, sent_before: bool) -> SendError {
        match self {
            Self::NotWritten(error) => {
                SendError::new(SendErrorKind::Journal, 0, sent_before).with_source(Some(error))
            }
            Self::InFlight => SendError::new(SendErrorKind::InFlight, 0, true),
            Self::Conflict(error) => {
                SendError::new(SendErrorKind::JournalConflict, 0, true).with_source(Some(error))
            }
            Self::OtherCredentials(error) => {
                SendError::new(SendErrorKind::OtherCredentials, 0, true).with_source(Some(error))
            }
            Self::Unreadable(error) => {
                SendError::new(SendErrorKind::JournalUnreadable, 0, true).with_source(Some(error))
            }
        }
    }
}
