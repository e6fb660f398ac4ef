//! Settlements of deliveries, ten per request.

use std::sync::Arc;
use std::time::Duration;

use aws_sdk_sqs::Client;
use aws_sdk_sqs::types::{
    BatchResultErrorEntry, ChangeMessageVisibilityBatchRequestEntry, DeleteMessageBatchRequestEntry,
};
use oncegate_inbox::SourceError;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::{Instant, timeout, timeout_at};

use super::{REPLY_TIMEOUT, said};

/// The maximum number of entries of a request.
const MAX_ENTRIES: usize = 10;

/// The time that a request waits for more entries.
const LINGER: Duration = Duration::from_millis(5);

/// The maximum number of concurrent requests of one kind.
const MAX_REQUESTS: usize = 8;

/// The number of waiting settlements above which callers wait.
const MAX_WAITING: usize = 1000;

/// The error of a settlement.
pub(super) struct SettleError {
    pub(super) error: SourceError,
    /// `true` if SQS reports that the receipt is no longer valid.
    pub(super) is_gone: bool,
}

impl SettleError {
    fn passing(error: impl Into<String>) -> Self {
        Self { error: SourceError::transient(error), is_gone: false }
    }
}

type SettleResult = Result<(), SettleError>;

struct Entry {
    receipt: String,
    /// The new visibility timeout in seconds; `None` to delete the message.
    visibility: Option<i32>,
    reply: oneshot::Sender<SettleResult>,
}

/// Collects settlements. Clones are cheap; it ends with the last one.
#[derive(Clone)]
pub(super) struct Batcher {
    delete: mpsc::Sender<Entry>,
    change: mpsc::Sender<Entry>,
}

impl Batcher {
    pub(super) fn new(client: &Client, queue_url: &str) -> Self {
        let begin = || {
            let (sender, entries) = mpsc::channel(MAX_WAITING);
            tokio::spawn(run(client.clone(), queue_url.into(), entries));
            sender
        };
        Self { delete: begin(), change: begin() }
    }

    /// Deletes a message, or sets its visibility timeout in seconds from now.
    pub(super) async fn settle(&self, receipt: &str, visibility: Option<i32>) -> SettleResult {
        let (reply, answered) = oneshot::channel();
        let entry = Entry { receipt: receipt.to_owned(), visibility, reply };
        let entries = if visibility.is_some() { &self.change } else { &self.delete };
        let ended = || SettleError::passing("the source has ended");
        entries.send(entry).await.map_err(|_| ended())?;
        answered.await.map_err(|_| ended())?
    }
}

async fn run(client: Client, queue_url: Arc<str>, mut entries: mpsc::Receiver<Entry>) {
    let permits = Arc::new(Semaphore::new(MAX_REQUESTS));
    while let Some(first) = entries.recv().await {
        let mut batch = vec![first];
        let until = Instant::now() + LINGER;
        while batch.len() < MAX_ENTRIES
            && let Ok(Some(entry)) = timeout_at(until, entries.recv()).await
        {
            batch.push(entry);
        }
        let Ok(permit) = permits.clone().acquire_owned().await else { return };
        let (client, queue_url) = (client.clone(), queue_url.clone());
        tokio::spawn(async move {
            let asked = timeout(REPLY_TIMEOUT, ask(&client, &queue_url, &batch)).await;
            drop(permit);
            let asked = asked.unwrap_or_else(|_| Err("SQS does not answer".to_owned()));
            for (number, entry) in batch.into_iter().enumerate() {
                let reply = match &asked {
                    Err(why) => Err(SettleError::passing(why.clone())),
                    Ok(answered) => answered.to(&number.to_string()),
                };
                // The caller may be gone.
                let _gone = entry.reply.send(reply);
            }
        });
    }
}

/// The reply of SQS for the entries of a request.
struct BatchReply {
    done: Vec<String>,
    failed: Vec<BatchResultErrorEntry>,
}

impl BatchReply {
    fn to(&self, id: &str) -> SettleResult {
        if let Some(failed) = self.failed.iter().find(|failed| failed.id == id) {
            return Err(refused(failed));
        }
        // Only an explicit success counts.
        let is_done = self.done.iter().any(|done| done == id);
        if is_done { Ok(()) } else { Err(SettleError::passing("SQS did not report the result")) }
    }
}

/// Sends a request, and returns the reply or the error.
async fn ask(client: &Client, queue_url: &str, batch: &[Entry]) -> Result<BatchReply, String> {
    let is_deleting = batch.first().is_some_and(|entry| entry.visibility.is_none());
    if is_deleting {
        let mut request = client.delete_message_batch().queue_url(queue_url);
        for (number, entry) in batch.iter().enumerate() {
            let entry = DeleteMessageBatchRequestEntry::builder()
                .id(number.to_string())
                .receipt_handle(&entry.receipt);
            request = request.entries(entry.build().map_err(|error| error.to_string())?);
        }
        let reply = request.send().await.map_err(|error| said(&error))?;
        let done = reply.successful.into_iter().map(|entry| entry.id).collect();
        Ok(BatchReply { done, failed: reply.failed })
    } else {
        let mut request = client.change_message_visibility_batch().queue_url(queue_url);
        for (number, entry) in batch.iter().enumerate() {
            let entry = ChangeMessageVisibilityBatchRequestEntry::builder()
                .id(number.to_string())
                .receipt_handle(&entry.receipt)
                .set_visibility_timeout(entry.visibility);
            request = request.entries(entry.build().map_err(|error| error.to_string())?);
        }
        let reply = request.send().await.map_err(|error| said(&error))?;
        let done = reply.successful.into_iter().map(|entry| entry.id).collect();
        Ok(BatchReply { done, failed: reply.failed })
    }
}

fn refused(entry: &BatchResultErrorEntry) -> SettleError {
    // `AWS.SimpleQueueService.MessageNotInflight` in the older protocol.
    let code = entry.code.rsplit('.').next().unwrap_or_default();
    let is_gone = matches!(code, "MessageNotInflight" | "ReceiptHandleIsInvalid");
    let why = entry.message.as_deref().unwrap_or_default();
    SettleError { error: SourceError::transient(format!("SQS refused it: {code} {why}")), is_gone }
}
