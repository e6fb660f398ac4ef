//! Claims in doubt: their reply was lost, so the store may have granted them or may still do so. Nothing is executed under
//! such a claim, so the engine looks for it and releases it. Otherwise the claim would block its key until the lease ends,
//! and then leave an unknown outcome although nothing was executed.
//!
//! ```text
//!  reply lost ──▶ the store does not answer ──▶ not there (yet) ──▶ not there for five minutes ──▶ given up
//!                       │  every 2 s at most        │  three times in a lease   │  every 30 s      after the retention
//!                       ▼                           ▼                           ▼
//!                     found: released          found: released             found: released
//! ```
//!
//! A claim may become visible long after it was sent: a commit may wait for a standby that is away.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{AttemptId, Command, Release, State, StoreError};
use tokio::sync::{Mutex, OwnedSemaphorePermit};
use tokio::time::{Instant, sleep_until};

use crate::attempt::Attempt;
use crate::attempt::again_after;
use crate::engine::{ClaimRequest, Inner};
use crate::event::{Event, EventKind};

/// The pause before the first look. It doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// Longest pause between two looks while the store does not answer.
const MAX_PAUSE_OUT: Duration = Duration::from_secs(2);

/// Longest pause between two looks for a claim that is not there. At first it is at most a third of the lease, so that a
/// claim that arrives late is released before its own lease ends.
const MAX_PAUSE_LATE: Duration = Duration::from_secs(30);

/// The time for which a claim that is not there is looked for often.
const LATE_OFTEN: Duration = Duration::from_secs(5 * 60);

/// The limit on claims that are looked for at a time while the store answers. A further one is left to its lease.
pub(crate) const LATE: usize = 1024;

/// The limit on claims that are still looked for after [`LATE_OFTEN`], until their records would be past the retention.
pub(crate) const VERY_LATE: usize = 4096;

/// A claim in doubt.
pub(crate) struct DoubtfulClaim {
    request: ClaimRequest,
    attempt: AttemptId,
    /// True once the claim is settled. Locked during a look, so that there is one at a time.
    settled: Mutex<bool>,
}

impl DoubtfulClaim {
    /// Hands an unsettled claim over to the caller, and ends the search in the background.
    async fn take(&self) -> Option<AttemptId> {
        let was_settled = std::mem::replace(&mut *self.settled.lock().await, true);
        (!was_settled).then_some(self.attempt)
    }
}

/// The phase of the search for a claim, with its place among those of the same phase.
enum Phase {
    /// The store has not answered yet. The place is that of the claim.
    Unanswered {
        _place: OwnedSemaphorePermit,
    },
    Late {
        _place: OwnedSemaphorePermit,
        since: Instant,
    },
    VeryLate {
        _place: OwnedSemaphorePermit,
    },
}

/// The reason why this process must not claim a record now.
pub(crate) enum EarlierClaimError {
    /// The store did not answer.
    Out(StoreError),
    /// This attempt has ended in this process, but its end cannot be stored.
    Unstored(Attempt),
}

/// The result of a look.
enum LookResult {
    /// The claim was released, or can no longer be granted.
    Settled,
    /// The claim is not there, but may still be on its way.
    NotThere,
    /// The store does not answer.
    Out(StoreError),
}

impl Inner {
    /// Looks for a claim in doubt in the background, and releases it if it was granted. Nothing may be executed under the
    /// claim. The search takes over the place of the claim; without one, there is no search.
    pub(crate) fn retract(
        self: &Arc<Self>,
        request: ClaimRequest,
        attempt: AttemptId,
        place: Option<OwnedSemaphorePermit>,
    ) {
        let Some(place) = place else { return };
        let doubt =
            self.doubts.add(request.id, DoubtfulClaim { request, attempt, settled: Mutex::new(false) });
        let inner = self.clone();
        self.tasks.spawn(async move { inner.look_for(&doubt, place).await });
    }

    /// Settles the open items of this process at a record before it claims the record again: claims in doubt, and ends of
    /// attempts that are not stored. Otherwise the new claim could find one of them after its lease, and park or execute an
    /// operation whose outcome this process knows.
    ///
    /// Returns the attempt of a claim of the same request that is still in doubt. The caller then claims under that attempt: if
    /// the earlier claim becomes visible later, with its lease over, the store recognises it and does not park the record.
    ///
    /// # Errors
    /// If the record must not be claimed: the store failed, or the end of an attempt cannot be stored.
    pub(crate) async fn settle_earlier(
        self: &Arc<Self>,
        request: &ClaimRequest,
    ) -> Result<Option<AttemptId>, EarlierClaimError> {
        for end in self.unstored.of(&request.id) {
            match self.store_end(&end).await {
                Err(error) if error.kind().may_pass() => {
                    // If the record is not open, this end or another process has decided it.
                    let record = self.store.lookup(request.id).await.map_err(EarlierClaimError::Out)?;
                    let attempt = end.attempt();
                    let is_open = record.is_some_and(|record| {
                        record.token == attempt.token()
                            && record.fingerprint == request.fingerprint
                            && matches!(record.state, State::InProgress { .. })
                    });
                    if is_open {
                        return Err(EarlierClaimError::Unstored(attempt.clone()));
                    }
                }
                _ => {}
            }
        }
        let mut open = None;
        for doubt in self.doubts.of(&request.id) {
            match self.look(&doubt).await {
                LookResult::Settled => {}
                LookResult::NotThere => open = open.or(Some(doubt)),
                LookResult::Out(error) => return Err(EarlierClaimError::Out(error)),
            }
        }
        match open {
            Some(doubt) if doubt.request.fingerprint == request.fingerprint => Ok(doubt.take().await),
            _ => Ok(None),
        }
    }

    async fn look_for(&self, doubt: &DoubtfulClaim, place: OwnedSemaphorePermit) {
        let policy = doubt.request.policy;
        let lease_over = Instant::now() + policy.lease;
        let give_up = lease_over + policy.retention;
        let often = (policy.lease / 3).min(MAX_PAUSE_LATE);
        let mut phase = Phase::Unanswered { _place: place };
        let mut pause = FIRST_PAUSE;
        loop {
            let at = give_up.min(Instant::now() + pause);
            let may_end = !matches!(phase, Phase::Unanswered { .. }) || Instant::now() >= lease_over;
            let is_closing = tokio::select! {
                () = sleep_until(at) => false,
                // A claim that most likely never arrives must not keep the engine from ending.
                () = self.closing.cancelled(), if may_end => true,
            };
            let seen = self.look(doubt).await;
            if matches!(seen, LookResult::Settled) || is_closing || at == give_up {
                return;
            }
            if let LookResult::Out(error) = seen {
                pause = again_after((pause * 2).min(MAX_PAUSE_OUT), &error);
                continue;
            }
            (phase, pause) = match phase {
                Phase::Unanswered { .. } => {
                    let Ok(place) = self.late.clone().try_acquire_owned() else { return };
                    (Phase::Late { _place: place, since: Instant::now() }, FIRST_PAUSE)
                }
                Phase::Late { since, .. } if since.elapsed() >= LATE_OFTEN => {
                    let Ok(place) = self.very_late.clone().try_acquire_owned() else { return };
                    (Phase::VeryLate { _place: place }, MAX_PAUSE_LATE)
                }
                late @ Phase::Late { .. } => (late, (pause * 2).min(often)),
                very_late @ Phase::VeryLate { .. } => (very_late, MAX_PAUSE_LATE),
            };
        }
    }

    /// One look, and the release of what it finds. One at a time for each doubt.
    async fn look(&self, doubt: &DoubtfulClaim) -> LookResult {
        let mut settled = doubt.settled.lock().await;
        if *settled {
            return LookResult::Settled;
        }
        let seen = self.look_now(&doubt.request, doubt.attempt).await;
        *settled = matches!(seen, LookResult::Settled);
        seen
    }

    async fn look_now(&self, request: &ClaimRequest, attempt: AttemptId) -> LookResult {
        let token = match self.store.lookup(request.id).await {
            Err(error) if error.kind().may_pass() => return LookResult::Out(error),
            Err(_) => return LookResult::Settled,
            Ok(None) => return LookResult::NotThere,
            Ok(Some(record)) => match record.state {
                // Nothing was begun under this claim, but an earlier one was abandoned: the lease has to end.
                State::InProgress { attempt: holder, after_abandoned: true, .. } if holder == attempt => {
                    return LookResult::Settled;
                }
                State::InProgress { attempt: holder, .. } if holder == attempt => record.token,
                // A claim that arrives late does not change these.
                State::Completed(_) | State::Unknown => return LookResult::Settled,
                _ => return LookResult::NotThere,
            },
        };
        // Release it by its token: another claim may fail for the same reason as before, such as a replica that is away.
        let release = Release { token, retention: request.policy.released_retention() };
        match self.store.apply(request.id, Command::Release(release)).await {
            Ok(_) => {
                self.emit(Event::new(request.id, Some(token), EventKind::ClaimCancelled));
                LookResult::Settled
            }
            Err(error) if error.kind().may_pass() => LookResult::Out(error),
            Err(_) => LookResult::Settled,
        }
    }
}
