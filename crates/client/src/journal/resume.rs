//! The sending of the intents that an earlier process left without a definite response.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use http::header::{HeaderMap, HeaderName};
use oncegate_core::{ConfigError, ErrorChain};
use tokio::task::JoinSet;

use super::directory::{DamagedFile, JournalDir, OTHER_CREDENTIALS, PendingIntent};
use crate::client::{Client, Transport};
use crate::failure::BoxError;
use crate::report::{DefiniteResponse, SendError};

type Fields = Arc<dyn Fn(&PendingIntent) -> Result<HeaderMap, BoxError> + Send + Sync>;

/// The sending of pending intents, oldest first. Dropping it stops the sending; intents without a response stay in the journal.
pub struct Resume<T> {
    journal: JournalDir,
    client: Client<T>,
    left: VecDeque<Result<PendingIntent, DamagedFile>>,
    running: JoinSet<ResumedIntent>,
    concurrency: usize,
    fields: Option<Fields>,
}

/// A pending intent that was sent again, and its result.
#[derive(Debug)]
#[non_exhaustive]
pub struct ResumedIntent {
    /// The intent.
    pub pending: PendingIntent,
    /// Its definite response, or the error. With a response, it is no longer in the journal.
    pub end: Result<DefiniteResponse, ResumeError>,
}

/// An intent of the journal got no definite response.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResumeError {
    /// The error that any other intent would get, too. With [`SendErrorKind::InFlight`](crate::SendErrorKind::InFlight),
    /// another process or task is sending it.
    #[error(transparent)]
    Sending(SendError),
    /// It is no longer in the journal: another process has its response.
    #[error("another process has its response")]
    Gone,
    /// It was not sent, because these headers are missing. The journal left them out, and [`Resume::with_fields`] did not
    /// return them.
    #[error("not sent: the journal does not store credentials; give these headers again: {}", .0.join(" "))]
    MissingFields(Vec<HeaderName>),
    /// It was not sent, because it may have been sent before with other credentials than those of [`Resume::with_fields`].
    /// See [`JournalDir::with_other_credentials`].
    #[error("not sent: {OTHER_CREDENTIALS}")]
    OtherCredentials,
    /// It was not sent, because the function of [`Resume::with_fields`] failed.
    #[error("not sent: its credentials are not available")]
    FieldsFailed(#[source] BoxError),
}

impl<T: Transport + Clone + 'static> Resume<T> {
    pub(super) fn new(
        journal: JournalDir,
        client: Client<T>,
        found: Vec<Result<PendingIntent, DamagedFile>>,
    ) -> Self {
        Self { journal, client, left: found.into(), running: JoinSet::new(), concurrency: 1, fields: None }
    }

    /// Sets how many intents are sent at once: 1 by default, at most 1024. With more, the service gets them in any order.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_concurrency(self, intents: usize) -> Result<Self, ConfigError> {
        let concurrency =
            ConfigError::check("the number of intents that are sent at once", intents, 1..=1024)?;
        Ok(Self { concurrency, ..self })
    }

    /// Sets the function that returns the headers that the journal leaves out, such as `Authorization`.
    ///
    /// They must be those that the intent was sent with, unless [`JournalDir::with_other_credentials`] allows others.
    #[must_use]
    pub fn with_fields(
        self,
        fields: impl Fn(&PendingIntent) -> Result<HeaderMap, BoxError> + Send + Sync + 'static,
    ) -> Self {
        Self { fields: Some(Arc::new(fields)), ..self }
    }

    /// Returns the next result, or the next file that cannot be read; `None` after the last.
    pub async fn next(&mut self) -> Option<Result<ResumedIntent, DamagedFile>> {
        loop {
            while self.running.len() < self.concurrency {
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
                    // The transport panicked. Its intent is still in the journal.
                    tracing::error!(error = %ErrorChain(&error), "sending an intent of the journal panicked; it stays in the journal");
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
) -> Result<DefiniteResponse, ResumeError> {
    let brought = match fields {
        Some(fields) => fields(pending).map_err(ResumeError::FieldsFailed)?,
        None => HeaderMap::new(),
    };
    // Take only an intent that still exists: another process may have sent or closed it since the listing.
    let (intent, opened) = journal.take(pending, brought).await?;
    client.send_opened(&intent, Some(opened)).await.map_err(ResumeError::Sending)
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
