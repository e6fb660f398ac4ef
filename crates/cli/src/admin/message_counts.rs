//! Counts dead letters and the messages of the outbox for metrics, if the store is in their database.
//!
//! The database counts rows for that, so the task rests [`REST_FACTOR`] times as long as a count took, and at least
//! [`INTERVAL`]. Scrapes read the last count.

use std::time::Duration;

use oncegate_core::{ErrorChain, StoreError};
use oncegate_postgres::messages::{MessageOperator, OutboxCounts};
use tokio::time::Instant;

use super::Metrics;

/// The shortest rest between two counts.
const INTERVAL: Duration = Duration::from_secs(15);

/// The rest after a count, as a multiple of the time that it took.
const REST_FACTOR: u32 = 100;

/// The numbers of messages that wait for someone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MessageCounts {
    pub(super) dead_letters: u64,
    pub(super) outbox: OutboxCounts,
}

/// Counts until it is dropped.
pub(crate) async fn run(operator: MessageOperator, metrics: Metrics) {
    let mut has_failed = false;
    loop {
        let started = Instant::now();
        let counted = count(&operator).await;
        if let Err(error) = &counted
            && !has_failed
        {
            tracing::info!(
                error = %ErrorChain(error),
                "dead letters and the outbox cannot be counted, so they have no metrics until they can be"
            );
        }
        has_failed = counted.is_err();
        metrics.set_message_counts(counted.ok());
        tokio::time::sleep((started.elapsed() * REST_FACTOR).max(INTERVAL)).await;
    }
}

async fn count(operator: &MessageOperator) -> Result<MessageCounts, StoreError> {
    let groups = operator.dead_letter_counts().await?;
    let dead_letters = groups.iter().map(|group| group.count).sum();
    Ok(MessageCounts { dead_letters, outbox: operator.outbox_counts().await? })
}
