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
    /// A claim got the stored answer.
    Replayed {
        /// True if the claim waited for the owner first.
        waited: bool,
    },
    /// A claim found the record in progress.
    InProgress,
    /// A claim came with another request.
    Mismatch,
    /// A claim heard that the outcome is unknown.
    Unknown,
    /// A claim heard that there is no answer to replay, or none yet.
    Unreplayable,
    /// A claim failed in the store.
    ClaimFailed(StoreErrorKind),
    /// A claim was granted, but its sender had gone away or been told that the store is out of reach; the key was released.
    /// Nothing was executed. Where the sender had gone away, the claim has no other outcome.
    ClaimCancelled,
    /// A handler ended; what came of it is about to be written.
    Executed,
    /// An attempt was completed with an answer to replay.
    Completed,
    /// An attempt was completed without an answer to replay.
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
    /// Beside the end of an attempt: the operation's own transaction had completed the record, and there was nothing to add.
    CompletedUpstream,
    /// The operation's own transaction had completed the record without an answer, and the answer was added: beside the end of
    /// the attempt, or later, by a claim that found it out.
    AnswerAdded,
    /// The operation gave another answer than the record has: beside the end of the attempt, or later, when it was asked for
    /// it.
    AnswerDiffers,
    /// Beside the end of an attempt: the operation reported a success, and its own transaction had not completed the record
    /// as it should have. A crash before the answer was stored would have let it execute again.
    CompletionMissing,
}

/// Hears every [`Event`]. Called on the request's path: it must be quick and must not block.
pub trait Observer: Send + Sync + 'static {
    /// Takes note.
    fn observe(&self, event: &Event);
}

/// Hears nothing.
impl Observer for () {
    fn observe(&self, _: &Event) {}
}

/// Two hear in turn.
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
