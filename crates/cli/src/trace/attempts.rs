//! The traces of recent attempts, so that a replay can link to the one whose response it repeats.

use std::collections::VecDeque;

use oncegate_core::{RecordId, RecordMap, Sharded};

use super::SpanContext;

/// The most attempts that are known, over all shards: about 2 MB. Most retries come within a minute.
const MAX_ATTEMPTS: usize = 16 * 1024;

const MAX_IN_SHARD: usize = MAX_ATTEMPTS / Sharded::<Shard>::COUNT;

/// The spans of the attempts that were recorded last, by record.
#[derive(Debug, Default)]
pub(super) struct Attempts(Sharded<Shard>);

#[derive(Debug, Default)]
struct Shard {
    spans: RecordMap<RecordId, SpanContext>,
    /// The records, the oldest first.
    order: VecDeque<RecordId>,
}

impl Attempts {
    /// Notes the attempt that executes now. Replaces an earlier one of the record.
    pub(super) fn note(&self, id: RecordId, span: SpanContext) {
        let mut shard = self.0.of(&id);
        if shard.spans.insert(id, span).is_none() {
            shard.order.push_back(id);
            if shard.order.len() > MAX_IN_SHARD
                && let Some(oldest) = shard.order.pop_front()
            {
                shard.spans.remove(&oldest);
            }
        }
    }

    pub(super) fn of(&self, id: &RecordId) -> Option<SpanContext> {
        self.0.of(id).spans.get(id).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_attempts_are_forgotten() {
        let attempts = Attempts::default();
        let id = |n: usize| {
            let mut bytes = [0; 32];
            bytes[8..16].copy_from_slice(&n.to_be_bytes());
            RecordId::from_bytes(bytes)
        };
        let span = SpanContext::root(true);
        for n in 0..=MAX_IN_SHARD {
            attempts.note(id(n), SpanContext::root(true));
        }
        attempts.note(id(1), span);
        assert_eq!(attempts.of(&id(0)), None);
        assert_eq!(attempts.of(&id(1)), Some(span));
        assert!(attempts.of(&id(MAX_IN_SHARD)).is_some());
    }
}
