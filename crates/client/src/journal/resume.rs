//! What a process sends again that starts after one that ended.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use http::header::{HeaderMap, HeaderName};
use oncegate_core::{ConfigError, ErrorChain};
use tokio::task::JoinSet;

use super::directory::{DamagedFile, JournalDir, OTHER_CREDENTIALS, PendingIntent, TakeError};
use crate::client::{Client, Transport};
use crate::failure::BoxError;
use crate::report::{Answer, SendError};

/// How many are sent at once, where nothing else is said: one, because a later one may need an earlier one.
const AT_ONCE: usize = 1;

type Fields = Arc<dyn Fn(&PendingIntent) -> Result<HeaderMap, BoxError> + Send + Sync>;

/// Intents that are sent again, oldest first. Dropping it stops the sending; what has no answer then stays in the journal.
pub struct Resume<T> {
    journal: JournalDir,
    client: Client<T>,
    left: VecDeque<Result<PendingIntent, DamagedFile>>,
    running: JoinSet<ResumedIntent>,
    at_once: usize,
    fields: Option<Fields>,
}

/// How one of them ended.
#[derive(Debug)]
#[non_exhaustive]
pub struct ResumedIntent {
    /// Which one.
    pub pending: PendingIntent,
    /// Its definite answer, if there is one; then it is no longer in the journal.
    pub end: Result<Answer, ResumeError>,
}

/// Why an intent of the journal has no definite answer.
#[derive(Debug)]
#[non_exhaustive]
pub enum ResumeError {
    /// As for any other intent. [`SendErrorKind::InFlight`](crate::SendErrorKind::InFlight): somebody else is sending it.
    SendError(SendError),
    /// It is no longer in the journal: somebody else has its answer.
    Gone,
    /// It was not sent, because these fields are missing. They were left out of the journal, and
    /// [`Resume::with_fields`] has not brought them.
    Fields(Vec<HeaderName>),
    /// It was not sent, because it may have been sent before, under other credentials than [`Resume::with_fields`] has
    /// brought. See [`JournalDir::with_other_credentials`].
    OtherCredentials,
    /// It was not sent, because [`Resume::with_fields`] failed.
    NoFields(BoxError),
}

impl fmt::Display for ResumeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SendError(open) => open.fmt(f),
            Self::Gone => f.write_str("somebody else has its answer"),
            Self::Fields(names) => {
                f.write_str("not sent: the journal does not hold its credentials; give these fields again:")?;
                names.iter().try_for_each(|name| write!(f, " {name}"))
            }
            Self::OtherCredentials => write!(f, "not sent: {OTHER_CREDENTIALS}"),
            Self::NoFields(_) => f.write_str("not sent: its credentials could not be had"),
        }
    }
}

impl std::error::Error for ResumeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::SendError(open) => open.source(),
            Self::NoFields(error) => Some(&**error),
            Self::Gone | Self::Fields(_) | Self::OtherCredentials => None,
        }
    }
}

impl<T: Transport + Clone + 'static> Resume<T> {
    pub(super) fn new(
        journal: JournalDir,
        client: Client<T>,
        found: Vec<Result<PendingIntent, DamagedFile>>,
    ) -> Self {
        Self { journal, client, left: found.into(), running: JoinSet::new(), at_once: AT_ONCE, fields: None }
    }

    /// How many are sent at once: 1 by default, at most 1024. With more than one the service gets them in any order.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_concurrency(self, at_once: usize) -> Result<Self, ConfigError> {
        Ok(Self {
            at_once: ConfigError::check("the number of intents that are sent at once", at_once, 1..=1024)?,
            ..self
        })
    }

    /// What brings the fields that the journal leaves out, such as `Authorization`. They must be those that the intent
    /// was sent with, unless [`JournalDir::with_other_credentials`] says that others of the same account will do.
    #[must_use]
    pub fn with_fields(
        self,
        fields: impl Fn(&PendingIntent) -> Result<HeaderMap, BoxError> + Send + Sync + 'static,
    ) -> Self {
        Self { fields: Some(Arc::new(fields)), ..self }
    }

    /// The next one that ended, or that cannot be read; `None` after the last.
    pub async fn next(&mut self) -> Option<Result<ResumedIntent, DamagedFile>> {
        loop {
            while self.running.len() < self.at_once {
                match self.left.pop_front() {
                    Some(Ok(pending)) => {
                        let (journal, client) = (self.journal.clone(), self.client.clone());
                        let fields = self.fields.clone();
                        self.running.spawn(async move {
                            let end = send(&journal, &client, &pending, fields).await;
                            ResumedIntent { pending, end }
                        });
                    }
                    Some(Err(damaged)) => return Some(Err(damaged)),
                    None => break,
                }
            }
            match self.running.join_next().await? {
                Ok(resumed) => return Some(Ok(resumed)),
                Err(error) => {
                    // A transport that panicked. Its intent is where it was.
                    tracing::error!(error = %ErrorChain(&error), "an intent of the journal was not sent to its end");
                }
            }
        }
    }
}

async fn send<T: Transport>(
    journal: &JournalDir,
    client: &Client<T>,
    pending: &PendingIntent,
    fields: Option<Fields>,
) -> Result<Answer, ResumeError> {
    let brought = match fields {
        Some(fields) => fields(pending).map_err(ResumeError::NoFields)?,
        None => HeaderMap::new(),
    };
    // What is there, and nothing new: since it was listed somebody else may have closed it, or sent it.
    let taken = journal.take(pending.path.clone(), brought).await;
    let (intent, opened) = taken.map_err(|why| match why {
        TakeError::Gone => ResumeError::Gone,
        TakeError::Fields(names) => ResumeError::Fields(names),
        TakeError::OtherCredentials => ResumeError::OtherCredentials,
        TakeError::JournalOpenError(why) => ResumeError::SendError(why.send_error(pending.maybe_sent)),
    })?;
    client.send_opened(&intent, Some(opened)).await.map_err(ResumeError::SendError)
}

impl<T> fmt::Debug for Resume<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resume")
            .field("journal", &self.journal)
            .field("left", &self.left.len())
            .field("running", &self.running.len())
            .finish_non_exhaustive()
    }
}
