//! The source: the group as a consumer's loop sees it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use oncegate_engine::ConfigError;
use oncegate_inbox::{Delivery, Message, Source, SourceError, SourceInfo};
use rdkafka::ClientConfig;
use tokio::sync::oneshot;

use super::reader;
use super::settings::{self, KafkaOptions};
use super::shared::{BufferedMessage, SourceState, TakeResult};

/// A member of a consumer group that reads topics.
///
/// A thread of its own polls the client, so that the group gets its heartbeats even if the consumer requests nothing.
/// Messages that do not fit into the buffer stay with the broker. If it is dropped without [`close`](Source::close), it
/// still commits and leaves the group, in the background.
#[derive(Debug)]
pub struct KafkaSource {
    shared: Arc<SourceState>,
    /// The result of the thread after it has left the group.
    left: Option<oneshot::Receiver<Result<(), String>>>,
}

impl KafkaSource {
    /// Creates a member of the group in `config`, for these topics. A topic that begins with `^` is a regular
    /// expression.
    ///
    /// `enable.auto.commit` and `enable.auto.offset.store` are off and cannot be turned on. `auto.offset.reset` only
    /// sets the start of a group without a committed offset: `earliest` unless set, so that nothing is lost; `latest`,
    /// which skips existing messages; or `error`, which is fatal then. For a truncated log,
    /// [`KafkaOptions::with_on_truncation`] counts. The function does not wait for the broker: connection errors are
    /// transient errors of [`next`](Source::next).
    ///
    /// # Errors
    /// A setting that is missing, unknown to the client, or could lose messages; an empty list of topics.
    pub fn new(config: &ClientConfig, topics: &[&str], options: KafkaOptions) -> Result<Self, ConfigError> {
        let (config, start) = settings::consumer(config, &options)?;
        if topics.is_empty() {
            return Err(ConfigError::new("Kafka: the list of topics is empty"));
        }
        let shared = Arc::new(SourceState::new(options));
        let left = reader::start(&config, topics, start, Arc::clone(&shared))?;
        Ok(Self { shared, left: Some(left) })
    }
}

impl Source for KafkaSource {
    type Delivery = KafkaDelivery;

    /// There is no redelivery time: a message is delivered again only when its partition is assigned again.
    fn info(&self) -> SourceInfo {
        SourceInfo::new(None)
    }

    async fn next(&mut self) -> Result<KafkaDelivery, SourceError> {
        loop {
            // Register before the check, so that no notification is missed.
            let arrived = self.shared.arrived();
            match self.shared.take() {
                TakeResult::Message(held) => {
                    let shared = Arc::clone(&self.shared);
                    return Ok(KafkaDelivery { held, shared, is_settled: AtomicBool::new(false) });
                }
                TakeResult::Error(error) => return Err(error),
                TakeResult::Until(at) => {
                    let at = tokio::time::Instant::from_std(at);
                    let _ = tokio::time::timeout_at(at, arrived).await;
                }
                TakeResult::Nothing => arrived.await,
            }
        }
    }

    async fn close(&mut self) -> Result<(), SourceError> {
        self.shared.close();
        let Some(left) = self.left.as_mut() else { return Ok(()) };
        let told = tokio::time::timeout(self.shared.options.close_timeout, left).await;
        self.left = None;
        match told {
            Ok(Ok(Ok(()))) => Ok(()),
            Ok(Ok(Err(what))) => {
                Err(SourceError::transient(format!("the last offsets were not committed: {what}")))
            }
            Ok(Err(_)) => Err(SourceError::transient("the reading thread ended before it committed")),
            Err(_) => Err(SourceError::transient("the broker did not confirm the last offsets in time")),
        }
    }
}

impl Drop for KafkaSource {
    fn drop(&mut self) {
        self.shared.close();
    }
}

/// A message of a partition. If it is dropped without an acknowledgement, it is taken again, as if it was given back.
#[derive(Debug)]
pub struct KafkaDelivery {
    held: BufferedMessage,
    shared: Arc<SourceState>,
    is_settled: AtomicBool,
}

impl KafkaDelivery {
    /// Returns the partition.
    #[must_use]
    pub fn partition(&self) -> i32 {
        self.held.partition.number
    }

    /// Returns the offset in the partition.
    #[must_use]
    pub const fn offset(&self) -> i64 {
        self.held.offset
    }

    /// Returns `true` the first time.
    fn settle(&self) -> bool {
        !self.is_settled.swap(true, Ordering::AcqRel)
    }
}

impl Delivery for KafkaDelivery {
    const GIVES_BACK: bool = false;

    fn message(&self) -> &Arc<Message> {
        &self.held.message
    }

    /// Returns `true` if the partition was revoked or is assigned to another member.
    fn is_lost(&self) -> bool {
        self.held.partition.is_lost()
    }

    /// Does nothing: a partition stays assigned while the source is alive.
    async fn extend(&self) -> Result<(), SourceError> {
        Ok(())
    }

    /// Settles the message. Its offset is committed with the next commit after everything before it is settled.
    async fn ack(&self) -> Result<(), SourceError> {
        if self.settle() {
            self.held.partition.settle(self.held.offset);
        }
        Ok(())
    }

    /// Gives the message back to the source, which delivers it again after the delay. Only commits wait for it, later
    /// messages do not.
    async fn give_back(&self, after: Duration) -> Result<(), SourceError> {
        if self.settle() {
            self.shared.give_back(&self.held, after);
        }
        Ok(())
    }
}

impl Drop for KafkaDelivery {
    fn drop(&mut self) {
        if self.settle() {
            self.shared.give_back(&self.held, Duration::ZERO);
        }
    }
}
