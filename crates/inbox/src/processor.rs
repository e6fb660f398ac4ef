//! What stands between a consumer's loop and the effect.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use oncegate_engine::ConfigError;

use crate::handled::Handled;
use crate::identity::ConsumerName;
use crate::message::Message;
use crate::source::SourceInfo;

/// Processes messages once each. The consumer's loop acknowledges what it says is durable, and nothing else.
pub trait Processor: Send + Sync + 'static {
    /// Whose messages these are.
    fn consumer(&self) -> &ConsumerName;

    /// How many messages are best processed together.
    fn batch_max(&self) -> usize {
        1
    }

    /// How long is remembered that a message was processed: for so long its duplicates are known.
    fn retention(&self) -> Duration;

    /// Whether it fits a source: a claim's lease must end before the broker delivers again, and the source must be able to
    /// have the identity that messages are told by ([`Identity::check`](crate::Identity::check)).
    ///
    /// # Errors
    /// What does not fit, and what to do.
    fn check(&self, source: &SourceInfo) -> Result<(), ConfigError>;

    /// Processes messages, in this order where they have the same order key, and says for each what became of it. Where a
    /// message is to come again, later ones with the same order key are [`NotBegun`](Handled::NotBegun).
    fn process(&self, messages: &[Arc<Message>]) -> impl Future<Output = Vec<Handled>> + Send;
}
