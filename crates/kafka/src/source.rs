//! The source itself: what a consumer's loop sees of the group.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use oncegate_engine::ConfigError;
use oncegate_inbox::{Delivery, Message, Source, SourceError, SourceInfo};
use rdkafka::ClientConfig;
use tokio::sync::oneshot;

use super::reader;
use super::settings::{self, KafkaOptions};
use super::shared::{Held, Shared, Taken};

/// A member of a consumer group that reads topics.
///
/// A thread of its own polls the client, so that the group has its heartbeats and nobody is thrown out of it while nothing
/// is asked for; what does not fit into the buffer then stays with the broker. Dropped without [`close`](Source::close) it
/// commits and leaves the group all the same, and nobody waits for that.
#[derive(Debug)]
pub struct KafkaSource {
    shared: Arc<Shared>,
    /// Told by the thread when it has left the group.
    left: Option<oneshot::Receiver<Result<(), String>>>,
}

impl KafkaSource {
    /// A member of the group that `config` names, for these topics; one that begins with `^` is a regular expression. Of the
    /// client's settings, `enable.auto.commit` and `enable.auto.offset.store` are off and cannot be turned on.
    /// `auto.offset.reset` says where a group begins that has committed nothing, and nothing else: `earliest` if nobody says
    /// otherwise, so that nothing is lost; `latest`, which skips what is there already; `error`, which is fatal then. Where
    /// the log is truncated, [`KafkaOptions::with_on_truncation`] counts.
    ///
    /// It does not wait for the broker. Errors on the way there come from [`next`](Source::next), and pass.
    ///
    /// # Errors
    /// A setting that is missing, unknown to the client, or would lose messages; no topic.
    pub fn new(config: &ClientConfig, topics: &[&str], options: KafkaOptions) -> Result<Self, ConfigError> {
        let (config, start) = settings::consumer(config, &options)?;
        if topics.is_empty() {
            return Err(ConfigError::new("Kafka: no topic to read"));
        }
        let shared = Arc::new(Shared::new(options));
        let left = reader::start(&config, topics, start, Arc::clone(&shared))?;
        Ok(Self { shared, left: Some(left) })
    }
}

impl Source for KafkaSource {
    type Delivery = KafkaDelivery;

    /// No redelivery time: a message is delivered again when its partition is assigned again, and not sooner.
    fn info(&self) -> SourceInfo {
        SourceInfo::new(None)
    }

    async fn next(&mut self) -> Result<KafkaDelivery, SourceError> {
        loop {
            // Before looking, so that nothing arrives in between unseen.
            let arrived = self.shared.arrived();
            match self.shared.take() {
                Taken::Message(held) => {
                    let shared = Arc::clone(&self.shared);
                    return Ok(KafkaDelivery { held, shared, is_settled: AtomicBool::new(false) });
                }
                Taken::Error(error) => return Err(error),
                Taken::Until(at) => {
                    let at = tokio::time::Instant::from_std(at);
                    let _ = tokio::time::timeout_at(at, arrived).await;
                }
                Taken::Nothing => arrived.await,
            }
        }
    }

    async fn close(&mut self) -> Result<(), SourceError> {
        self.shared.close();
        let Some(left) = self.left.as_mut() else { return Ok(()) };
        let told = tokio::time::timeout(self.shared.options.close_patience, left).await;
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

/// A message of a partition. Dropped without being acknowledged it is taken again, as if it had been given back.
#[derive(Debug)]
pub struct KafkaDelivery {
    held: Held,
    shared: Arc<Shared>,
    is_settled: AtomicBool,
}

impl KafkaDelivery {
    /// The partition.
    #[must_use]
    pub fn partition(&self) -> i32 {
        self.held.partition.number
    }

    /// The offset in it.
    #[must_use]
    pub const fn offset(&self) -> i64 {
        self.held.offset
    }

    /// `true` the first time.
    fn settle(&self) -> bool {
        !self.is_settled.swap(true, Ordering::AcqRel)
    }
}

impl Delivery for KafkaDelivery {
    const GIVES_BACK: bool = false;

    fn message(&self) -> &Arc<Message> {
        &self.held.message
    }

    /// Whether its partition was revoked, or is with somebody else in any other way that the group said.
    fn is_lost(&self) -> bool {
        self.held.partition.is_lost()
    }

    /// Nothing: a partition stays assigned while the source is alive.
    async fn extend(&self) -> Result<(), SourceError> {
        Ok(())
    }

    /// It is committed with the next commit, as soon as everything before it is settled.
    async fn ack(&self) -> Result<(), SourceError> {
        if self.settle() {
            self.held.partition.settle(self.held.offset);
        }
        Ok(())
    }

    /// The source itself hands it over again, after so long. Later messages do not wait for it, but what is committed does.
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
