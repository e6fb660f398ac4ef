//! The publisher: queues as destinations.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use aws_sdk_sqs::Client;
use aws_sdk_sqs::error::{ProvideErrorMetadata, SdkError};
use oncegate_inbox::{Outgoing, PublishError, PublishFuture, Publisher};
use tokio::time::timeout;

use super::{REPLY_TIMEOUT, is_missing, said, wire};

/// The maximum number of queue URLs that are cached by name.
const MAX_CACHED_URLS: usize = 1000;

/// Publishes to queues. The topic of a message is the URL or the name of a queue.
///
/// - Headers are message attributes. SQS accepts ten. Headers that are invalid as attributes, or too many, are together
///   in one attribute `oncegate-headers` (JSON), and [`SqsSource`](super::SqsSource) takes it apart again.
/// - Bodies are text. Another payload is sent in Base64, and an empty one as `-`. The attribute `oncegate-encoding`
///   marks it, and the source decodes it.
/// - For a FIFO queue the identifier is the `MessageDeduplicationId`: the queue accepts a message once within five
///   minutes. The group is the order key, or the identifier if there is none. Both have at most 128 letters, digits and
///   signs; any other value is replaced by its SHA-256.
/// - A standard queue stores every copy. Its consumer finds duplicates by [`MESSAGE_ID`](oncegate_inbox::MESSAGE_ID).
pub struct SqsPublisher {
    client: Client,
    urls: Mutex<HashMap<String, String>>,
}

impl fmt::Debug for SqsPublisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqsPublisher").finish_non_exhaustive()
    }
}

impl SqsPublisher {
    /// Creates a publisher from a client.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client, urls: Mutex::default() }
    }

    async fn url(&self, topic: &str) -> Result<String, PublishError> {
        if topic.contains("://") {
            return Ok(topic.to_owned());
        }
        let urls = || self.urls.lock().unwrap_or_else(PoisonError::into_inner);
        let known = urls().get(topic).cloned();
        if let Some(url) = known {
            return Ok(url);
        }
        let asked = timeout(REPLY_TIMEOUT, self.client.get_queue_url().queue_name(topic).send()).await;
        let reply = asked.map_err(PublishError::unconfirmed)?.map_err(|error| failed(&error))?;
        let url = reply
            .queue_url
            .ok_or_else(|| PublishError::unconfirmed("SQS did not return the URL of the queue"))?;
        let mut urls = urls();
        if urls.len() >= MAX_CACHED_URLS {
            urls.clear();
        }
        urls.insert(topic.to_owned(), url.clone());
        Ok(url)
    }

    async fn send(&self, message: &Outgoing) -> Result<(), PublishError> {
        let url = self.url(&message.topic).await?;
        let (body, encoding) = wire::body(&message.payload);
        let attributes = wire::attributes(message, encoding)?;
        let is_fifo = url.ends_with(".fifo");
        let mut request = self
            .client
            .send_message()
            .queue_url(url)
            .message_body(body)
            .set_message_attributes(Some(attributes));
        if is_fifo {
            let group = message.order_key.as_deref().unwrap_or(message.id.as_bytes());
            request = request
                .message_group_id(wire::token(group))
                .message_deduplication_id(wire::token(message.id.as_bytes()));
        }
        let asked = timeout(REPLY_TIMEOUT, request.send()).await.map_err(PublishError::unconfirmed)?;
        let reply = asked.map_err(|error| failed(&error))?;
        match reply.message_id {
            Some(_) => Ok(()),
            None => Err(PublishError::unconfirmed("SQS did not report the result for the message")),
        }
    }
}

/// Decides if SQS refuses the message, or did not confirm it.
fn failed<E: ProvideErrorMetadata + std::error::Error + 'static, R: fmt::Debug>(
    error: &SdkError<E, R>,
) -> PublishError {
    let is_refused = is_missing(error)
        || error.code().is_some_and(|code| {
            matches!(
                code.rsplit('.').next().unwrap_or_default(),
                "AccessDenied"
                    | "AccessDeniedException"
                    | "InvalidAddress"
                    | "InvalidMessageContents"
                    | "InvalidParameterValue"
                    | "InvalidParameterValueException"
                    | "KmsAccessDenied"
                    | "KmsNotFound"
                    | "MissingParameter"
                    | "UnsupportedOperation"
            )
        });
    let said = said(error);
    if is_refused { PublishError::refused(said) } else { PublishError::unconfirmed(said) }
}

impl Publisher for SqsPublisher {
    fn publish<'a>(&'a self, message: &'a Outgoing) -> PublishFuture<'a> {
        Box::pin(self.send(message))
    }
}
