//! The interface between a consumer's loop and the effect.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use oncegate_engine::ConfigError;

use crate::identity::ConsumerName;
use crate::message::Message;
use crate::outcome::ProcessOutcome;
use crate::source::SourceInfo;

/// Processes each message once. The consumer's loop acknowledges the messages that it reports as durable, and no
/// others.
pub trait Processor: Send + Sync + 'static {
    /// The consumer that processes the messages.
    fn consumer(&self) -> &ConsumerName;

    /// The number of messages that should be processed together.
    fn max_batch(&self) -> usize {
        1
    }

    /// The time for which a processed message is remembered, so that its duplicates are recognized.
    fn retention(&self) -> Duration;

    /// Checks that the processor fits a source.
    ///
    /// The lease of a claim must end before the broker delivers again, and messages of the source must be able to have
    /// the identity that the processor uses ([`Identity::check`](crate::Identity::check)).
    ///
    /// # Errors
    /// The mismatch, and the change that resolves it.
    fn check(&self, source: &SourceInfo) -> Result<(), ConfigError>;

    /// Processes messages and returns the outcome of each.
    ///
    /// Messages with the same order key are processed in the given order. If one of them is to be delivered again,
    /// later ones with its order key are [`NotBegun`](ProcessOutcome::NotBegun).
    fn process(&self, messages: &[Arc<Message>]) -> impl Future<Output = Vec<ProcessOutcome>> + Send;
}
