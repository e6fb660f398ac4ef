//! Events for metrics, logs and histories.

use oncegate_core::{FencingToken, RecordId, StoreErrorKind};

/// Something that happened to a record. Carries neither key nor request nor response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Event {
    /// The record.
    pub id: RecordId,
    /// The token of the attempt, if there is one.
    pub token: Option<FencingToken>,
    /// The kind of event.
    pub kind: EventKind,
}

impl Event {
    pub(crate) const fn new(id: RecordId, token: Option<FencingToken>, kind: EventKind) -> Self {
        Self { id, token, kind }
    }
}

/// The kind of an [`Event`].
///
/// Every claim that is waited for ends in exactly one of the first seven, so that they add up to the number of claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EventKind {
    /// A claim was granted: an execution begins.
    Executing {
        /// The number of attempts at the record.
        attempts: u32,
        /// True if an earlier attempt was abandoned.
        after_abandoned: bool,
    },
    /// A claim got the stored response.
    Replayed {
        /// True if the claim waited for the owner first.
        waited: bool,
    },
    /// A claim found the record in progress.
    InProgress,
    /// A claim came with another request.
    Mismatch,
    /// A claim found that the outcome is unknown.
    Unknown,
    /// A claim found that there is no response to replay, or none yet.
    Unreplayable,
    /// A claim failed in the store.
    ClaimFailed(StoreErrorKind),
    /// A claim was granted, but its sender had gone away or had got an error of the store. The key was released, and nothing
    /// was executed. If the sender had gone away, the claim has no other outcome.
    ClaimCancelled,
    /// A handler ended; its result is about to be written.
    Executed,
    /// An attempt was completed with a response to replay.
    Completed,
    /// An attempt was completed without a response to replay.
    Tombstoned,
    /// An attempt ended and its owner does not know its outcome.
    Parked,
    /// An attempt ended and freed its key.
    Released,
    /// A stale owner tried to write; nothing was changed.
    Fenced,
    /// An attempt was dropped without an end. Its record stays in progress until its lease ends.
    Abandoned,
    /// A lease was renewed.
    Renewed,
    /// A renewal failed in the store and is tried again.
    RenewalFailed(StoreErrorKind),
    /// Another attempt owns the record of a running attempt.
    LeaseLost,
    /// A completion or release failed in the store and is tried again in the background.
    SettlementDeferred(StoreErrorKind),
    /// A completion or release was given up: the record ends as abandoned.
    SettlementLost,
    /// The operation's own transaction had completed the record, and there was nothing to add. In addition to the end of the
    /// attempt.
    CompletedUpstream,
    /// The operation's own transaction had completed the record without a response, and the response was added. In addition to
    /// the end of the attempt, or later by a claim that found the response out.
    ResponseAdded,
    /// The operation gave another response than the record has. In addition to the end of the attempt, or later when the
    /// service was asked.
    ResponseDiffers,
    /// The operation reported a success, but its own transaction had not completed the record. After a crash before the
    /// response was stored, it would have run again. In addition to the end of the attempt.
    CompletionMissing,
}

/// An observer of every [`Event`]. It is called on the request's path, so it must be fast and must not block.
pub trait Observer: Send + Sync + 'static {
    /// Receives an event.
    fn observe(&self, event: &Event);
}

/// Ignores all events.
impl Observer for () {
    fn observe(&self, _: &Event) {}
}

/// Passes each event to both observers, in this order.
impl<A: Observer, B: Observer> Observer for (A, B) {
    fn observe(&self, event: &Event) {
        self.0.observe(event);
        self.1.observe(event);
    }
}

/// Calls the closure with each event.
impl<F: Fn(&Event) + Send + Sync + 'static> Observer for F {
    fn observe(&self, event: &Event) {
        self(event);
    }
}
