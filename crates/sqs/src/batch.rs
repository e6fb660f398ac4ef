//! Deliveries are settled ten at a time.

use std::sync::Arc;
use std::time::Duration;

use aws_sdk_sqs::Client;
use aws_sdk_sqs::types::{
    BatchResultErrorEntry, ChangeMessageVisibilityBatchRequestEntry, DeleteMessageBatchRequestEntry,
};
use oncegate_inbox::SourceError;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::{Instant, timeout, timeout_at};

use super::{ANSWER, said};

/// Most entries of a request.
const MAX: usize = 10;

/// How long a request that is not full waits for more.
const LINGER: Duration = Duration::from_millis(5);

/// How many requests of one kind are under way at once.
const UNDER_WAY: usize = 8;

/// How many deliveries wait to be settled before others have to wait for that.
const WAITING: usize = 1000;

/// Why something did not happen to a delivery.
pub(super) struct Failed {
    pub(super) error: SourceError,
    /// Whether SQS says that the receipt stands for nothing any more.
    pub(super) is_gone: bool,
}

impl Failed {
    fn passing(error: impl Into<String>) -> Self {
        Self { error: SourceError::transient(error), is_gone: false }
    }
}

type Answer = Result<(), Failed>;

struct Entry {
    receipt: String,
    /// How long it is not to be seen, in seconds; `None` to delete it.
    visibility: Option<i32>,
    answer: oneshot::Sender<Answer>,
}

/// Where deliveries are settled. Cheap to clone; ends with the last clone.
#[derive(Clone)]
pub(super) struct Batcher {
    delete: mpsc::Sender<Entry>,
    change: mpsc::Sender<Entry>,
}

impl Batcher {
    pub(super) fn new(client: &Client, queue_url: &str) -> Self {
        let begin = || {
            let (sender, entries) = mpsc::channel(WAITING);
            tokio::spawn(run(client.clone(), queue_url.into(), entries));
            sender
        };
        Self { delete: begin(), change: begin() }
    }

    /// Deletes a message, or keeps it from being seen for so many seconds from now on.
    pub(super) async fn settle(&self, receipt: &str, visibility: Option<i32>) -> Answer {
        let (answer, answered) = oneshot::channel();
        let entry = Entry { receipt: receipt.to_owned(), visibility, answer };
        let entries = if visibility.is_some() { &self.change } else { &self.delete };
        let ended = || Failed::passing("the source of messages has ended");
        entries.send(entry).await.map_err(|_| ended())?;
        answered.await.map_err(|_| ended())?
    }
}

async fn run(client: Client, queue_url: Arc<str>, mut entries: mpsc::Receiver<Entry>) {
    let room = Arc::new(Semaphore::new(UNDER_WAY));
    while let Some(first) = entries.recv().await {
        let mut batch = vec![first];
        let until = Instant::now() + LINGER;
        while batch.len() < MAX
            && let Ok(Some(entry)) = timeout_at(until, entries.recv()).await
        {
            batch.push(entry);
        }
        let Ok(permit) = room.clone().acquire_owned().await else { return };
        let (client, queue_url) = (client.clone(), queue_url.clone());
        tokio::spawn(async move {
            let asked = timeout(ANSWER, ask(&client, &queue_url, &batch)).await;
            drop(permit);
            let asked = asked.unwrap_or_else(|_| Err("SQS does not answer".to_owned()));
            for (number, entry) in batch.into_iter().enumerate() {
                let answer = match &asked {
                    Err(why) => Err(Failed::passing(why.clone())),
                    Ok(answered) => answered.to(&number.to_string()),
                };
                // Whoever asked may have gone.
                let _gone = entry.answer.send(answer);
            }
        });
    }
}

/// What SQS says of the entries of a request.
struct Answered {
    done: Vec<String>,
    failed: Vec<BatchResultErrorEntry>,
}

impl Answered {
    fn to(&self, id: &str) -> Answer {
        if let Some(failed) = self.failed.iter().find(|failed| failed.id == id) {
            return Err(refused(failed));
        }
        // Only what it says counts.
        let is_done = self.done.iter().any(|done| done == id);
        if is_done { Ok(()) } else { Err(Failed::passing("SQS does not say whether it did it")) }
    }
}

/// The answer, or why there is none.
async fn ask(client: &Client, queue_url: &str, batch: &[Entry]) -> Result<Answered, String> {
    let is_deleting = batch.first().is_some_and(|entry| entry.visibility.is_none());
    if is_deleting {
        let mut request = client.delete_message_batch().queue_url(queue_url);
        for (number, entry) in batch.iter().enumerate() {
            let entry = DeleteMessageBatchRequestEntry::builder()
                .id(number.to_string())
                .receipt_handle(&entry.receipt);
            request = request.entries(entry.build().map_err(|error| error.to_string())?);
        }
        let answer = request.send().await.map_err(|error| said(&error))?;
        let done = answer.successful.into_iter().map(|entry| entry.id).collect();
        Ok(Answered { done, failed: answer.failed })
    } else {
        let mut request = client.change_message_visibility_batch().queue_url(queue_url);
        for (number, entry) in batch.iter().enumerate() {
            let entry = ChangeMessageVisibilityBatchRequestEntry::builder()
                .id(number.to_string())
                .receipt_handle(&entry.receipt)
                .set_visibility_timeout(entry.visibility);
            request = request.entries(entry.build().map_err(|error| error.to_string())?);
        }
        let answer = request.send().await.map_err(|error| said(&error))?;
        let done = answer.successful.into_iter().map(|entry| entry.id).collect();
        Ok(Answered { done, failed: answer.failed })
    }
}

fn refused(entry: &BatchResultErrorEntry) -> Failed {
    // `AWS.SimpleQueueService.MessageNotInflight` in the older protocol.
    let code = entry.code.rsplit('.').next().unwrap_or_default();
    let is_gone = matches!(code, "MessageNotInflight" | "ReceiptHandleIsInvalid");
    let why = entry.message.as_deref().unwrap_or_default();
    Failed { error: SourceError::transient(format!("SQS did not do it: {code} {why}")), is_gone }
}
