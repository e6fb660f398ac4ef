//! The claim that asks the store, on behalf of all claims of this process for one record.
//!
//! If the store can answer at once ([`Store::try_apply`](oncegate_core::Store::try_apply)), it is asked first while the claim
//! looks for a flight ([`Inner::begin`]). Most claims end there. The others, and those of other stores, go this way:
//!
//! ```text
//!   earlier claims and ends of this process are settled first ──▶ not settled ──────────────────────────┐
//!        │                                                                                              │
//!        ▼                                                                                              │
//!    ┌─▶ Ask ──▶ the store fails ─────────────────────────────────────────────────────────────────────▶ │
//!    │   │ │ └─▶ replay, mismatch, unknown, unreplayable ───────────────────────────────────────────▶ │
//!    │   │ └───▶ in progress elsewhere: Wait ──▶ no wait wanted, or its deadline passed ─────────────▶ Finish
//!    │   │                                │
//!    │   ▼                                ├──▶ the caller is gone: return at once; followers ask for themselves
//!    │ Granted ──▶ lease confirmed: Execute                                                             ▲
//!    │   │    └──▶ the store fails ─────────────────────────────────────────────────────────────────────┘
//!    │   ▼                                │
//!    └── fenced: claim again ◀────────────┴──▶ ask again: the record changed, or a pause is over
//! ```
//!
//! `Finish` shares the outcome with the claims that follow this one ([`SharedOutcome`]).
//!
//! A claim is *doubtful* once the store may have applied it without answering. It may become visible later. So, if nothing
//! is executed under it, the engine looks for it and releases it ([`Inner::retract`]).

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use oncegate_core::{AttemptId, Claim, Command, Outcome, StoreError};
use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::attempt::{Attempt, Permit};
use crate::engine::{ClaimOutcome, ClaimRequest, Inner};
use crate::lease::{ClockReading, LeaseError};
use crate::policy::Policy;
use crate::retract::EarlierClaimError;
use crate::single_flight::{
    ClaimStart, Flight, JoinOutcome, Leader, Owner, Phase, RemoteOwner, SharedOutcome,
};

/// The pause before a claim that got no reply is sent again, once.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(10);

/// The advice for a retry if this process has the response, but the store fails to accept it.
const UNSTORED_AGAIN: Duration = Duration::from_secs(5);

/// The first and the longest pause between two questions of a claim that waits for another process. The pause doubles each
/// time. A change that the store reports ends it early.
const POLL_FIRST: Duration = Duration::from_millis(25);
const POLL_LAST: Duration = Duration::from_millis(500);

/// The bound on the wait of one claim for the present owner: a deadline, or the loss of the caller.
pub(crate) struct WaitLimit {
    pub(crate) deadline: Instant,
    /// Notified when the caller is gone.
    pub(crate) gone: Notify,
    /// True once the claim has waited.
    waited: AtomicBool,
}

impl WaitLimit {
    pub(crate) fn until(deadline: Instant) -> Self {
        Self { deadline, gone: Notify::new(), waited: AtomicBool::new(false) }
    }

    pub(crate) fn is_open(&self) -> bool {
        Instant::now() < self.deadline
    }

    pub(crate) fn set_waited(&self) {
        self.waited.store(true, Ordering::Relaxed);
    }

    pub(crate) fn has_waited(&self) -> bool {
        self.waited.load(Ordering::Relaxed)
    }
}

/// A claim on its way to the store.
struct LeadingClaim {
    inner: Arc<Inner>,
    leader: Leader,
    request: ClaimRequest,
    /// The place for the attempt, or for the search if the claim stays doubtful. `None` once it is handed on.
    place: Option<OwnedSemaphorePermit>,
    number: u64,
    attempt: AttemptId,
    /// The reply to the first sending, if the store gave it at once.
    reply: Option<(ClockReading, Result<Outcome, StoreError>)>,
    /// The store may have applied the claim without answering.
    is_doubtful: bool,
    began_at: Instant,
    /// `None` if the policy does not wait.
    wait: Option<Arc<WaitLimit>>,
    polling: Polling,
}

/// A claim that leads a flight and has no outcome yet.
pub(crate) struct PreparedClaim {
    place: OwnedSemaphorePermit,
    number: u64,
    attempt: AttemptId,
    /// The reply of a store that answered at once, with the time at which it was asked.
    reply: Option<(ClockReading, Result<Outcome, StoreError>)>,
}

/// The first part of a claim, which never waits.
pub(crate) enum BegunClaim {
    /// The claim has its outcome.
    Finished(Result<ClaimOutcome, StoreError>),
    /// The claim leads a flight.
    Leads(Leader, PreparedClaim),
    /// Another claim of this process leads the flight.
    Follows(Arc<Flight>),
}

/// The pauses between the questions of a claim that waits.
struct Polling {
    pause: Duration,
    /// The store's notice of a change. It is kept from one question to the next, so that a notice that comes while the store
    /// is asked is not lost.
    changed: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    /// Notices before this time wait until then: a store may notify for nothing, again and again.
    heed_from: Instant,
}

/// The next state of a [`LeadingClaim`]: see the diagram at the top of the module.
enum LeadState {
    Ask,
    Granted(Attempt),
    Wait(RemoteOwner, Duration),
    FindResponse,
    Finish(SharedOutcome, Result<ClaimOutcome, StoreError>),
    /// Returns without an outcome for the followers: they ask the store themselves.
    Leave(ClaimOutcome),
}

impl LeadState {
    fn fail(error: StoreError) -> Self {
        Self::Finish(SharedOutcome::Failed((&error).into()), Err(error))
    }
}

impl Inner {
    /// Begins a claim: it follows the flight of the record, or asks a store that answers at once, or leads a flight. `waits` is
    /// true if the policy waits for the owner.
    pub(crate) fn begin(self: &Arc<Self>, request: &ClaimRequest, waits: bool) -> BegunClaim {
        match self.flights.join(request.id, request.fingerprint, || self.start(request, waits)) {
            JoinOutcome::Follower(flight) => BegunClaim::Follows(flight),
            JoinOutcome::Leader(leader, StartedClaim::Prepared(claim)) => BegunClaim::Leads(leader, claim),
            JoinOutcome::Leader(leader, StartedClaim::Granted(attempt, place)) => {
                self.unknown.forget(request.id);
                let permit = Permit::new(self.clone(), attempt, leader, Some(place));
                BegunClaim::Finished(Ok(ClaimOutcome::Execute(permit)))
            }
            JoinOutcome::Finished(result) => {
                if matches!(result, Ok(ClaimOutcome::Unknown)) {
                    self.log_found_unknown(request.id);
                }
                BegunClaim::Finished(result)
            }
        }
    }

    /// Asks the store, if it answers at once. Called under the lock of the flights.
    fn start(
        &self,
        request: &ClaimRequest,
        waits: bool,
    ) -> ClaimStart<Result<ClaimOutcome, StoreError>, StartedClaim> {
        let place = match self.place() {
            Ok(place) => place,
            Err(error) => return ClaimStart::Finished(Err(error)),
        };
        let (number, attempt) = self.new_attempt();
        let prepared = |place, reply| {
            let claim = PreparedClaim { place, number, attempt, reply };
            ClaimStart::Leads(Phase::Claiming, StartedClaim::Prepared(claim))
        };
        // Earlier claims and ends of this process are settled first, which takes time. They are added before their flights end.
        if self.unstored.has(&request.id) || self.doubts.has(&request.id) {
            return prepared(place, None);
        }
        let asked_at = ClockReading::now();
        let Some(reply) = self.store.try_apply(request.id, &claim_command(request, attempt)) else {
            return prepared(place, None);
        };
        ClaimStart::Finished(Ok(match reply {
            Ok(Outcome::Execute(grant)) => {
                let ClaimRequest { id, ref label, policy, .. } = *request;
                let granted = Attempt::new(self, id, label.clone(), grant, policy, number, asked_at);
                if !granted.is_owner() {
                    return prepared(place, Some((asked_at, Ok(Outcome::Execute(grant)))));
                }
                let phase = Phase::Executing(Owner::Local(granted.clone()));
                return ClaimStart::Leads(phase, StartedClaim::Granted(granted, place));
            }
            Ok(Outcome::Replay(response)) if response.is_sealed() => {
                return ClaimStart::Finished(Err(still_sealed()));
            }
            Ok(Outcome::Replay(response)) => ClaimOutcome::Replay(response),
            Ok(Outcome::Mismatch) => ClaimOutcome::Mismatch,
            Ok(Outcome::Unknown) => ClaimOutcome::Unknown,
            Ok(Outcome::Unreplayable) if !request.policy.recovers_responses => ClaimOutcome::Unreplayable,
            Ok(Outcome::InProgress { lease_left }) if !waits => {
                let asked_at = asked_at.monotonic;
                remote_owner(&request.policy, asked_at, lease_left, asked_at).outcome()
            }
            // These may have to ask again.
            reply => return prepared(place, Some((asked_at, reply))),
        }))
    }

    /// Asks the store until the claim has an outcome: at once, or, if another process owns the record and the policy waits,
    /// again until the deadline.
    pub(crate) async fn lead(
        self: Arc<Self>,
        leader: Leader,
        request: ClaimRequest,
        prepared: PreparedClaim,
        wait: Option<Arc<WaitLimit>>,
    ) -> Result<ClaimOutcome, StoreError> {
        let PreparedClaim { place, number, attempt, reply } = prepared;
        let now = Instant::now();
        let mut claim = LeadingClaim {
            inner: self,
            leader,
            request,
            place: Some(place),
            number,
            attempt,
            reply,
            is_doubtful: false,
            began_at: now,
            wait,
            polling: Polling { pause: POLL_FIRST, changed: None, heed_from: now },
        };
        // If the store was asked already, nothing earlier was open.
        let mut state = match claim.reply {
            Some(_) => LeadState::Ask,
            None => claim.settle_earlier().await,
        };
        // The claim waits for another process from now on, not while this process settles its own affairs.
        claim.began_at = Instant::now();
        loop {
            state = match state {
                LeadState::Ask => claim.ask().await,
                LeadState::Wait(owner, lease_left) => claim.wait(owner, lease_left).await,
                LeadState::Granted(attempt) => match claim.begin(attempt).await {
                    Ok(result) => return result,
                    Err(fenced) => {
                        claim = fenced;
                        LeadState::Ask
                    }
                },
                LeadState::FindResponse => {
                    let LeadingClaim { inner, leader, request, number, .. } = claim;
                    return inner.find_response(leader, &request, number).await;
                }
                LeadState::Finish(shared, result) => {
                    claim.leader.finish(shared);
                    return result;
                }
                LeadState::Leave(outcome) => return Ok(outcome),
            };
        }
    }

    /// The number of a claim that was never made before, and the identifier of its attempt.
    fn new_attempt(&self) -> (u64, AttemptId) {
        let number = self.claims.fetch_add(1, Ordering::Relaxed);
        (number, AttemptId::new(u128::from(self.origin) << 64 | u128::from(number)))
    }

    /// The number of the claim that an attempt of this engine was first made for.
    const fn number_of(attempt: AttemptId) -> u64 {
        attempt.get() as u64 // the origin is in the upper half
    }

    /// Sends a claim, unless there is a reply to its first sending. Sends it once more if only the reply may have been lost:
    /// the store recognises it. Returns the outcome, and whether the first sending may still reach the store.
    async fn send_claim(
        &self,
        request: &ClaimRequest,
        attempt: AttemptId,
        reply: Option<Result<Outcome, StoreError>>,
    ) -> Result<(Outcome, bool), AskError> {
        let first = match reply {
            Some(reply) => reply,
            None => self.store.apply(request.id, claim_command(request, attempt)).await,
        };
        match first {
            Err(error) if may_have_applied(&error) => {
                tokio::time::sleep(ASK_AGAIN_AFTER).await;
                let again = self.store.apply(request.id, claim_command(request, attempt)).await;
                // Even if nothing was sent the second time: the first one may have been applied.
                again
                    .map(|outcome| (outcome, true))
                    .map_err(|error| AskError { maybe_applied: error.kind().may_pass(), error })
            }
            first => first
                .map(|outcome| (outcome, false))
                .map_err(|error| AskError { error, maybe_applied: false }),
        }
    }
}

impl LeadingClaim {
    /// Settles earlier claims and ends of this process first: see [`Inner::settle_earlier`].
    async fn settle_earlier(&mut self) -> LeadState {
        match self.inner.settle_earlier(&self.request).await {
            Ok(None) => LeadState::Ask,
            Ok(Some(earlier)) => {
                (self.number, self.attempt) = (Inner::number_of(earlier), earlier);
                self.is_doubtful = true;
                LeadState::Ask
            }
            Err(EarlierClaimError::Out(error)) => LeadState::fail(error),
            Err(EarlierClaimError::Unstored(attempt)) => {
                // This process knows the outcome, the store does not. So the request must not be executed, even if the
                // policy for an outage of the store would allow that.
                let until = Instant::now() + UNSTORED_AGAIN;
                let owner = RemoteOwner { lease_until: until, since: attempt.0.begun };
                LeadState::Finish(SharedOutcome::InProgress(owner), Ok(owner.outcome()))
            }
        }
    }

    async fn ask(&mut self) -> LeadState {
        let (asked_at, reply) = match self.reply.take() {
            Some((asked_at, reply)) => (asked_at, Some(reply)),
            None => (ClockReading::now(), None),
        };
        let outcome = match self.inner.send_claim(&self.request, self.attempt, reply).await {
            Ok((outcome, maybe_applied)) => {
                self.is_doubtful |= maybe_applied;
                outcome
            }
            Err(AskError { error, maybe_applied }) => {
                self.is_doubtful |= maybe_applied;
                self.retract_if_doubtful();
                return LeadState::fail(error);
            }
        };
        match outcome {
            Outcome::Execute(grant) => {
                self.inner.unknown.forget(self.request.id);
                let ClaimRequest { id, ref label, policy, .. } = self.request;
                LeadState::Granted(Attempt::new(
                    &self.inner,
                    id,
                    label.clone(),
                    grant,
                    policy,
                    self.number,
                    asked_at,
                ))
            }
            Outcome::Replay(response) if response.is_sealed() => LeadState::fail(still_sealed()),
            Outcome::Replay(response) => {
                LeadState::Finish(SharedOutcome::Replay(response.clone()), Ok(ClaimOutcome::Replay(response)))
            }
            Outcome::InProgress { lease_left } => {
                let policy = &self.request.policy;
                LeadState::Wait(
                    remote_owner(policy, asked_at.monotonic, lease_left, self.began_at),
                    lease_left,
                )
            }
            Outcome::Mismatch => {
                // Another attempt owns the record, or our own first sending, which may still be on its way.
                self.retract_if_doubtful();
                LeadState::Finish(SharedOutcome::AskAgain, Ok(ClaimOutcome::Mismatch))
            }
            Outcome::Unknown => {
                self.inner.log_found_unknown(self.request.id);
                LeadState::Finish(SharedOutcome::Unknown, Ok(ClaimOutcome::Unknown))
            }
            Outcome::Unreplayable if self.request.policy.recovers_responses => LeadState::FindResponse,
            Outcome::Unreplayable => {
                LeadState::Finish(SharedOutcome::Unreplayable, Ok(ClaimOutcome::Unreplayable))
            }
            other => LeadState::fail(StoreError::invalid(format!("the store answered {other:?} to a claim"))),
        }
    }

    /// Waits for the owner in another process, if the policy waits, and until it is worth asking again.
    async fn wait(&mut self, owner: RemoteOwner, lease_left: Duration) -> LeadState {
        let Some(wait) = self.wait.clone().filter(|wait| wait.is_open()) else {
            // Another attempt owns the record, or our own first sending, which may still be on its way.
            self.retract_if_doubtful();
            return LeadState::Finish(SharedOutcome::InProgress(owner), Ok(owner.outcome()));
        };
        wait.set_waited();
        self.leader.set_executing(Owner::Remote(owner));
        let Polling { pause, changed, heed_from } = &mut self.polling;
        // If the lease is over, an open transaction holds the record, and its end is not known.
        let longest = if lease_left.is_zero() { *pause } else { (*pause).min(lease_left) };
        let again = Instant::now() + longest.max(Duration::from_millis(1));
        let changed_now = changed.get_or_insert_with(|| {
            let (store, id) = (self.inner.store.clone(), self.request.id);
            Box::pin(async move { store.changed(id).await })
        });
        let notice = async {
            sleep_until(*heed_from).await;
            changed_now.await;
        };
        let is_notified = tokio::select! {
            notice = timeout_at(again.min(wait.deadline), notice) => notice.is_ok(),
            () = wait.gone.notified() => {
                self.retract_if_doubtful();
                return LeadState::Leave(owner.outcome());
            }
        };
        if is_notified {
            *changed = None;
            *heed_from = Instant::now() + POLL_FIRST;
        } else {
            *pause = (*pause * 2).min(POLL_LAST);
        }
        LeadState::Ask
    }

    /// Ends a granted claim. The grant may have arrived after the lease was over, and another attempt may have been granted in
    /// the meantime. Then the claim is returned, to be made again.
    async fn begin(mut self, granted: Attempt) -> Result<Result<ClaimOutcome, StoreError>, Self> {
        match granted.confirm_lease().await {
            Ok(()) => {
                self.leader.set_executing(Owner::Local(granted.clone()));
                let mut permit = Permit::new(self.inner, granted, self.leader, self.place);
                if self.is_doubtful {
                    permit.claimed_in_doubt(self.request, self.attempt);
                }
                Ok(Ok(ClaimOutcome::Execute(permit)))
            }
            Err(LeaseError::Fenced) => {
                if self.is_doubtful {
                    self.retract_if_doubtful();
                    match self.inner.place() {
                        Ok(place) => self.place = Some(place),
                        Err(error) => {
                            self.leader.finish(SharedOutcome::Failed((&error).into()));
                            return Ok(Err(error));
                        }
                    }
                }
                self.is_doubtful = false;
                (self.number, self.attempt) = self.inner.new_attempt();
                Err(self)
            }
            Err(LeaseError::Store(error)) => {
                self.leader.finish(SharedOutcome::Failed((&error).into()));
                self.inner.retract(self.request, self.attempt, self.place);
                Ok(Err(error))
            }
        }
    }

    /// Looks for the claim in the background and releases it, if the store may have applied it.
    fn retract_if_doubtful(&mut self) {
        if self.is_doubtful {
            self.inner.retract(self.request.clone(), self.attempt, self.place.take());
        }
    }
}

/// The error for a response that another process has sealed, in a store that opens none: a client must not get its encrypted
/// form.
pub(crate) fn still_sealed() -> StoreError {
    StoreError::sealed("the response is sealed, and this process opens no sealed responses")
}

/// Derives the facts about an attempt of another process from the store's reply. Stores do not report when it began. But
/// its lease was longer at its last renewal or when it began, and it existed all the time that this claim waited.
fn remote_owner(policy: &Policy, asked_at: Instant, lease_left: Duration, began_at: Instant) -> RemoteOwner {
    let since = asked_at.checked_sub(policy.lease.saturating_sub(lease_left)).unwrap_or(asked_at);
    RemoteOwner { lease_until: asked_at + lease_left, since: since.min(began_at) }
}

/// A claim that has begun to lead a flight.
enum StartedClaim {
    /// It is granted, and the lease lasts.
    Granted(Attempt, OwnedSemaphorePermit),
    Prepared(PreparedClaim),
}

/// A claim without a reply.
struct AskError {
    error: StoreError,
    /// True if the store may have granted the claim, so that it has to be released.
    maybe_applied: bool,
}

fn may_have_applied(error: &StoreError) -> bool {
    error.kind().may_pass() && !error.is_unsent()
}

fn claim_command(request: &ClaimRequest, attempt: AttemptId) -> Command {
    Command::Claim(Claim {
        attempt,
        fingerprint: request.fingerprint,
        lease: request.policy.lease,
        retention: request.policy.retention,
        on_abandoned: request.policy.on_abandoned,
        label: request.label.clone(),
    })
}
