//! Single-flight inside one process: who is at which record, and who waits for whom.
//!
//! Of several claims for one record in one process only the first asks the store; the others hear from it. They are woken
//! when it ends, so nobody polls.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use oncegate_core::{Fingerprint, RecordId, RecordMap, Sharded, StoreErrorKind, StoredResponse, limits};
use tokio::sync::Notify;
use tokio::time::Instant;

/// Every flight of one engine.
#[derive(Debug, Default)]
pub(crate) struct Flights(Sharded<RecordMap<RecordId, Arc<Flight>>>);

/// One record that somebody in this process is at.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) fingerprint: Fingerprint,
    phase: Mutex<(Phase, usize)>,
    changed: Notify,
}

/// How far a flight is.
#[derive(Clone, Debug)]
pub(crate) enum Phase {
    /// The store was asked and has not answered.
    Claiming,
    /// The handler runs; its lease lasts at least so long.
    Executing(Instant),
    /// Over, with what there is to tell those who came along.
    Landed(Landing),
}

/// What a flight leaves behind for those who came along with the same request.
#[derive(Clone, Debug)]
pub(crate) enum Landing {
    /// The answer to replay.
    Replay(StoredResponse),
    /// Completed without an answer to replay.
    Unreplayable,
    /// Completed without an answer, which nobody could say now.
    AnswerAwaited,
    /// Outcome unknown.
    Unknown,
    /// Another process is at it, for so long at least.
    InProgress(Instant),
    /// The store failed.
    Failed(StoreErrorKind),
    /// Nothing to tell: ask the store.
    AskAgain,
}

/// What joining a record's flight comes to.
#[derive(Debug)]
pub(crate) enum Joined {
    /// Nobody was at it: go and ask the store, then land.
    Leader(Leader),
    /// Somebody is at it.
    Follower(Arc<Flight>),
}

/// Leads a flight. Dropping it lands with nothing to tell.
#[derive(Debug)]
pub(crate) struct Leader {
    flights: Arc<Flights>,
    id: RecordId,
    flight: Arc<Flight>,
}

impl Flights {
    pub(crate) fn join(self: &Arc<Self>, id: RecordId, fingerprint: Fingerprint) -> Joined {
        let mut shard = self.0.of(&id);
        if let Some(flight) = shard.get(&id) {
            return Joined::Follower(flight.clone());
        }
        let flight =
            Arc::new(Flight { fingerprint, phase: Mutex::new((Phase::Claiming, 0)), changed: Notify::new() });
        shard.insert(id, flight.clone());
        drop(shard);
        Joined::Leader(Leader { flights: self.clone(), id, flight })
    }

    pub(crate) fn len(&self) -> usize {
        self.0.each().map(|shard| shard.len()).sum()
    }
}

impl Leader {
    pub(crate) fn set_executing(&self, lease_until: Instant) {
        self.flight.set(Phase::Executing(lease_until));
    }

    pub(crate) fn land(self, landing: Landing) {
        self.flight.set(Phase::Landed(landing));
        // Dropping takes the flight off the map.
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        self.flights.0.of(&self.id).remove(&self.id);
        let mut phase = lock(&self.flight.phase);
        if !matches!(phase.0, Phase::Landed(_)) {
            phase.0 = Phase::Landed(Landing::AskAgain);
        }
        drop(phase);
        self.flight.changed.notify_waiters();
    }
}

impl Flight {
    pub(crate) fn phase(&self) -> Phase {
        lock(&self.phase).0.clone()
    }

    /// Waits until the flight is in a phase that `wanted` accepts, or until the deadline; then says the phase it is in.
    /// Says at once where too many wait already.
    pub(crate) async fn wait_until(
        &self,
        deadline: Option<Instant>,
        wanted: impl Fn(&Phase) -> bool,
    ) -> Phase {
        {
            let mut phase = lock(&self.phase);
            if wanted(&phase.0) || phase.1 >= limits::WAITERS_MAX {
                return phase.0.clone();
            }
            phase.1 += 1;
        }
        let _one_less = WaiterGuard(self);
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Registered before the look, so that no change falls between the two.
            changed.as_mut().enable();
            let phase = self.phase();
            if wanted(&phase) {
                return phase;
            }
            match deadline {
                None => changed.await,
                Some(deadline) => {
                    if tokio::time::timeout_at(deadline, changed).await.is_err() {
                        return self.phase();
                    }
                }
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

/// Every change under these locks is one assignment or one map call, so a panic elsewhere leaves them whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
