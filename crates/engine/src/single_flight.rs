//! Single-flight inside one process: of several claims for one record, only the first asks the store.
//!
//! A store that answers at once is asked under the lock of the record's shard, between the look for a flight and the start of
//! one. So a claim that executes has a flight before another claim can look, and a claim with a final outcome needs none.
//!
//! The others follow it and are woken when it ends, so they do not poll. If the attempt of a flight lost its record, or its
//! lease is over and not renewed, the flight cannot share an outcome. The first follower that finds this out removes the
//! flight, and asks the store itself.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use oncegate_core::{
    Extent, Fingerprint, RecordId, RecordMap, Sharded, StoreError, StoreErrorKind, StoredResponse, limits,
};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::attempt::Attempt;
use crate::engine::ClaimOutcome;

/// Every flight of one engine.
#[derive(Debug, Default)]
pub(crate) struct Flights(Sharded<RecordMap<RecordId, Arc<Flight>>>);

/// A record that this process is claiming, executing or waiting for.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) fingerprint: Fingerprint,
    phase: Mutex<(Phase, usize)>,
    changed: Notify,
}

/// The phase of a flight.
#[derive(Clone, Debug)]
pub(crate) enum Phase {
    /// The store was asked and has not answered.
    Claiming,
    /// The record has an owner, which is executing.
    Executing(Owner),
    /// Over, with the outcome for the followers.
    Finished(SharedOutcome),
}

/// The owner of a record that is in progress.
#[derive(Clone, Debug)]
pub(crate) enum Owner {
    /// An attempt of this process.
    Local(Attempt),
    /// An attempt of another process.
    Remote(RemoteOwner),
}

/// The known facts about an attempt of another process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemoteOwner {
    /// The end of its lease, unless it is renewed.
    pub(crate) lease_until: Instant,
    /// The attempt has been running at least since then.
    pub(crate) since: Instant,
}

impl Owner {
    /// The outcome of a claim that finds this owner.
    pub(crate) fn outcome(&self) -> ClaimOutcome {
        match self {
            Self::Local(attempt) => {
                let known = RemoteOwner { lease_until: attempt.lease_until(), since: attempt.0.begun };
                known.outcome()
            }
            Self::Remote(remote) => remote.outcome(),
        }
    }
}

impl RemoteOwner {
    /// The outcome of a claim that finds this owner.
    pub(crate) fn outcome(self) -> ClaimOutcome {
        let now = Instant::now();
        ClaimOutcome::InProgress {
            lease_left: self.lease_until.saturating_duration_since(now),
            running_for: now.saturating_duration_since(self.since),
        }
    }
}

/// The outcome that a flight shares with the claims that waited for it with the same request.
#[derive(Clone, Debug)]
pub(crate) enum SharedOutcome {
    /// The response to replay.
    Replay(StoredResponse),
    /// Completed without a response to replay.
    Unreplayable,
    /// Completed without a response, which could not be found out now.
    ResponseAwaited,
    /// Outcome unknown.
    Unknown,
    /// An attempt of another process owns the record.
    InProgress(RemoteOwner),
    /// The store failed.
    Failed(SharedFailure),
    /// No outcome to share: ask the store.
    AskAgain,
}

/// The facts about a store error that the claims share: a decision about one of them, such as to fail open, is a decision
/// about all.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedFailure {
    kind: StoreErrorKind,
    extent: Extent,
    is_unsent: bool,
}

/// The role of a claim in a record's flight.
#[derive(Debug)]
pub(crate) enum JoinOutcome<T, L> {
    /// There was no flight, and the claim needs none.
    Finished(T),
    /// There was no flight: this claim leads one, and finishes it.
    Leader(Leader, L),
    /// There is a flight.
    Follower(Arc<Flight>),
}

/// The start of a claim without a flight.
pub(crate) enum ClaimStart<T, L> {
    /// It has its outcome.
    Finished(T),
    /// It leads a flight, which begins in this phase.
    Leads(Phase, L),
}

/// Leads a flight. Dropping it finishes the flight without an outcome to share.
#[derive(Debug)]
pub(crate) struct Leader {
    flights: Arc<Flights>,
    id: RecordId,
    flight: Arc<Flight>,
}

impl Flights {
    /// Finds the flight of a record. If there is none, `start` begins the claim, while no other claim of this process can look
    /// for the flight or start one. It must not wait, and must not use the flights.
    pub(crate) fn join<T, L>(
        self: &Arc<Self>,
        id: RecordId,
        fingerprint: Fingerprint,
        start: impl FnOnce() -> ClaimStart<T, L>,
    ) -> JoinOutcome<T, L> {
        let mut shard = self.0.of(&id);
        if let Some(flight) = shard.get(&id) {
            return JoinOutcome::Follower(flight.clone());
        }
        let (phase, claim) = match start() {
            ClaimStart::Finished(outcome) => return JoinOutcome::Finished(outcome),
            ClaimStart::Leads(phase, claim) => (phase, claim),
        };
        let flight = Arc::new(Flight { fingerprint, phase: Mutex::new((phase, 0)), changed: Notify::new() });
        shard.insert(id, flight.clone());
        drop(shard);
        JoinOutcome::Leader(Leader { flights: self.clone(), id, flight }, claim)
    }

    /// Removes this flight from the map, if it is still there: the next claim asks the store.
    pub(crate) fn detach(&self, id: &RecordId, flight: &Arc<Flight>) {
        let mut shard = self.0.of(id);
        // The map may hold a later flight by now.
        if shard.get(id).is_some_and(|present| Arc::ptr_eq(present, flight)) {
            shard.remove(id);
        }
    }

    /// The attempt of this process that executes under this record.
    pub(crate) fn running(&self, id: &RecordId) -> Option<Attempt> {
        let flight = self.0.of(id).get(id).cloned()?;
        match flight.phase() {
            Phase::Executing(Owner::Local(attempt)) => Some(attempt),
            _ => None,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.0.each().map(|shard| shard.len()).sum()
    }
}

impl Leader {
    pub(crate) fn set_executing(&self, owner: Owner) {
        self.flight.set(Phase::Executing(owner));
    }

    pub(crate) fn finish(self, outcome: SharedOutcome) {
        self.flight.set(Phase::Finished(outcome));
        // Dropping removes the flight from the map.
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        self.flights.detach(&self.id, &self.flight);
        let mut phase = lock(&self.flight.phase);
        if !matches!(phase.0, Phase::Finished(_)) {
            phase.0 = Phase::Finished(SharedOutcome::AskAgain);
        }
        drop(phase);
        self.flight.changed.notify_waiters();
    }
}

impl Flight {
    pub(crate) fn phase(&self) -> Phase {
        lock(&self.phase).0.clone()
    }

    /// Waits until the flight is in a phase that `wanted` accepts, or until the deadline, and returns the phase then. `None` if
    /// too many claims wait already.
    pub(crate) async fn wait_until(
        &self,
        deadline: Instant,
        wanted: impl Fn(&Phase) -> bool,
    ) -> Option<Phase> {
        {
            let mut phase = lock(&self.phase);
            if wanted(&phase.0) {
                return Some(phase.0.clone());
            }
            if phase.1 >= limits::MAX_WAITERS {
                return None;
            }
            phase.1 += 1;
        }
        let _one_less = WaiterGuard(self);
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Registered before the phase is read, so that no change is missed.
            changed.as_mut().enable();
            let phase = self.phase();
            if wanted(&phase) {
                return Some(phase);
            }
            if tokio::time::timeout_at(deadline, changed).await.is_err() {
                return Some(self.phase());
            }
        }
    }

    fn set(&self, phase: Phase) {
        lock(&self.phase).0 = phase;
        self.changed.notify_waiters();
    }
}

struct WaiterGuard<'a>(&'a Flight);

impl Drop for WaiterGuard<'_> {
    fn drop(&mut self) {
        lock(&self.0.phase).1 -= 1;
    }
}

impl From<&StoreError> for SharedFailure {
    fn from(error: &StoreError) -> Self {
        Self { kind: error.kind(), extent: error.extent(), is_unsent: error.is_unsent() }
    }
}

impl From<SharedFailure> for StoreError {
    fn from(failure: SharedFailure) -> Self {
        let error = match failure.kind {
            StoreErrorKind::Corrupt => Self::corrupt("the record cannot be read"),
            StoreErrorKind::Sealed => Self::sealed("the response of the record cannot be opened"),
            StoreErrorKind::Invalid => Self::invalid("the store refused the claim"),
            StoreErrorKind::Locked => Self::locked("another transaction holds the record"),
            _ => Self::unavailable("the store failed for another command of this record"),
        };
        let error = error.with_extent(failure.extent);
        if failure.is_unsent { error.with_nothing_sent() } else { error }
    }
}

/// A panic does not damage the data: every change under these locks is one assignment or one map call.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
