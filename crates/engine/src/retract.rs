//! A claim whose answer was lost: looked for, and taken back where it was granted after all.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{AttemptId, Command, Outcome, Release, State, StoreError};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, sleep_until};

use crate::attempt::again_after;
use crate::engine::{ClaimRequest, Inner, claim_command};
use crate::event::{Event, EventKind};

/// Before the first look; doubled each time.
const PAUSE_FIRST: Duration = Duration::from_millis(50);

/// Between two looks at the longest, as long as the store does not answer.
const PAUSE_OUT: Duration = Duration::from_secs(2);

/// How long a claim that was not there at the first look is looked for at the longest, however long a lease lasts.
const LATE_LONGEST: Duration = Duration::from_secs(5 * 60);

/// How many claims that were not there at the first look may be looked for at a time. More are left to their leases.
pub(crate) const LATE: usize = 1024;

/// What a look comes to.
enum Seen {
    /// It was taken back, or nothing can come of it any more.
    Over,
    /// It is not there; it may still be on its way.
    NotThere,
    /// The store does not answer.
    Out(StoreError),
}

impl Inner {
    /// Takes back a claim whose answer never came. Its sender was told that nothing was executed, so the key must not stay
    /// blocked and end as an unknown outcome. It may reach the store after the first look, so that there are more of them,
    /// ever more seldom, for as long as a lease lasts, and five minutes at the longest.
    pub(crate) fn retract(self: &Arc<Self>, request: ClaimRequest, attempt: AttemptId) {
        let Ok(place) = self.deferred.clone().try_acquire_owned() else { return };
        let inner = self.clone();
        self.tasks.spawn(async move { inner.look_for(&request, attempt, place).await });
    }

    async fn look_for(&self, request: &ClaimRequest, attempt: AttemptId, place: OwnedSemaphorePermit) {
        let mut give_up = Instant::now() + request.policy.lease;
        let mut early = Some(place);
        let mut late = None;
        let mut pause = PAUSE_FIRST;
        loop {
            let at = give_up.min(Instant::now() + pause);
            let is_closing = tokio::select! {
                () = sleep_until(at) => false,
                // What most likely never comes keeps nobody from ending.
                () = self.closing.cancelled(), if late.is_some() => true,
            };
            let is_last = is_closing || at == give_up;
            pause *= 2;
            match self.look(request, attempt).await {
                Seen::Over => return,
                _ if is_last => return,
                Seen::Out(error) => pause = again_after(pause.min(PAUSE_OUT), &error),
                Seen::NotThere if late.is_some() => {}
                Seen::NotThere => {
                    let Ok(place) = self.late.clone().try_acquire_owned() else { return };
                    late = Some(place);
                    // Completions that are put off do not lack it.
                    early.take();
                    give_up = give_up.min(Instant::now() + LATE_LONGEST);
                    pause = PAUSE_FIRST;
                }
            }
        }
    }

    async fn look(&self, request: &ClaimRequest, attempt: AttemptId) -> Seen {
        // Where it was never granted there is nothing to take back, and to claim it for that would get in the way of those
        // who come again.
        match self.store.lookup(request.id).await {
            Err(error) if error.kind().may_pass() => return Seen::Out(error),
            Err(_) => return Seen::Over,
            Ok(record) => match record.map(|record| record.state) {
                Some(State::InProgress { attempt: holder, .. }) if holder == attempt => {}
                // Nothing changes these for a claim that comes late.
                Some(State::Completed(_) | State::Unknown) => return Seen::Over,
                _ => return Seen::NotThere,
            },
        }
        match self.store.apply(request.id, claim_command(request, attempt)).await {
            // Nothing was begun under this claim, but under an earlier one: the lease has to run out.
            Ok(Outcome::Execute(grant)) if grant.after_abandoned => Seen::Over,
            Ok(Outcome::Execute(grant)) => {
                let release = Release { token: grant.token, retention: request.policy.retention };
                match self.store.apply(request.id, Command::Release(release)).await {
                    Ok(_) => {
                        self.emit(Event::new(request.id, Some(grant.token), EventKind::ClaimCancelled));
                        Seen::Over
                    }
                    Err(error) => Seen::Out(error),
                }
            }
            Err(error) if error.kind().may_pass() => Seen::Out(error),
            // Somebody else has it, or it cannot be read.
            _ => Seen::Over,
        }
    }
}
