//! The log line of an operation whose outcome became unknown: one for each record, because an operator has to find out what
//! happened.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_core::{OnAbandoned, Record, RecordId, RecordMap, State};
use tokio::time::Instant;

use crate::attempt::Attempt;
use crate::engine::Inner;
use crate::single_flight::lock;

/// Most records that are remembered as logged. When there are more, all are forgotten, and a record may be logged once more.
const MAX_LOGGED: usize = 10_000;

/// The records whose unknown outcome this process has logged.
#[derive(Debug, Default)]
pub(crate) struct UnknownOutcomes {
    logged: Mutex<RecordMap<RecordId, ()>>,
}

impl UnknownOutcomes {
    /// Returns true if the record was not logged yet. It counts as logged from now on.
    fn is_first(&self, id: RecordId) -> bool {
        let mut logged = lock(&self.logged);
        if logged.len() >= MAX_LOGGED {
            logged.clear();
        }
        logged.insert(id, ()).is_none()
    }

    /// Forgets a record that is executed again: its next unknown outcome is another one.
    pub(crate) fn forget(&self, id: RecordId) {
        let mut logged = lock(&self.logged);
        if !logged.is_empty() {
            logged.remove(&id);
        }
    }

    /// Logs that the outcome of an attempt of this process is unknown.
    pub(crate) fn log(&self, attempt: &Attempt, reason: &str) {
        let id = attempt.record_id();
        self.is_first(id);
        let inner = &attempt.0;
        let duration = Instant::now().saturating_duration_since(inner.begun);
        warn(id, inner.label.operation(), inner.grant.attempts, reason, duration);
    }

    /// As [`log`](Self::log), for an attempt that ended without a record of its end. Under policies other than `park` the next
    /// claim settles it, so its outcome is open, not unknown, and nothing is logged.
    pub(crate) fn log_abandoned(&self, attempt: &Attempt, reason: &str) {
        if attempt.0.policy.on_abandoned == OnAbandoned::Park {
            self.log(attempt, reason);
        }
    }
}

impl Inner {
    /// Logs a record that a claim found unknown, unless this process has logged it: its owner may have crashed without a log
    /// line. Reads the record in a task of its own, so that the client does not wait.
    pub(crate) fn log_found_unknown(self: &Arc<Self>, id: RecordId) {
        if !self.unknown.is_first(id) {
            return;
        }
        let store = self.store.clone();
        self.tasks.spawn(async move {
            if let Ok(Some(Record {
                state: State::Unknown,
                label,
                attempts,
                changed_at,
                created_at,
                by_operator,
                ..
            })) = store.lookup(id).await
            {
                let reason = if by_operator {
                    "an operator parked it"
                } else {
                    "its owner recorded no outcome, or another process recorded that it is unknown"
                };
                warn(id, label.operation(), attempts, reason, changed_at.since(created_at));
            }
        });
    }
}

fn warn(id: RecordId, operation: &str, attempt: u32, reason: &str, duration: Duration) {
    tracing::warn!(
        record = %id,
        operation,
        attempt,
        reason,
        ?duration,
        "the outcome of an operation is unknown; find out what happened, then `oncegate keys resolve`"
    );
}

impl Attempt {
    /// Logs that this attempt executed, but no longer owned its record at its end.
    pub(crate) fn log_fenced(&self) {
        let inner = &self.0;
        tracing::warn!(
            record = %self.record_id(),
            operation = inner.label.operation(),
            attempt = inner.grant.attempts,
            token = %self.token(),
            duration = ?Instant::now().saturating_duration_since(inner.begun),
            "an attempt executed, but another attempt or an operator had taken its record, so its result is not recorded; \
             find out if the effect happened twice"
        );
    }
}
