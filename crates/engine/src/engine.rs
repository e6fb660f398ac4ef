//! Claims, and what they come to.

use std::fmt;
use std::future::Future;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use oncegate_core::{
    AttemptId, Claim, Command, Fingerprint, IntoStore, Label, Outcome, RecordId, Scope, ServiceName, Store,
    StoreError, StoreErrorKind, StoredResponse,
};
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::answer::AnswerPermit;
use crate::attempt::{Attempt, DEFERRED, Permit, Unstored};
use crate::conclude::COMPLETION_MISSING_INTERVAL;
use crate::event::{Event, EventKind, Observer};
use crate::flight::{Elsewhere, Flight, Flights, Joined, Landing, Leader, Owner, Phase, shared_failure};
use crate::keeper::Keeper;
use crate::lease::{LeaseError, Moment};
use crate::log_throttle::LogThrottle;
use crate::pending::Pending;
use crate::policy::Policy;
use crate::retract::{Doubt, LATE, NotSettled, VERY_LATE};
use crate::unknown::UnknownOutcomes;

/// Drives one store: claims, renews, waits, completes. Cheap to clone; all clones are one engine.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) observer: Arc<dyn Observer>,
    pub(crate) service: Option<ServiceName>,
    pub(crate) keeper: Keeper,
    pub(crate) tasks: TaskTracker,
    pub(crate) deferred: Arc<Semaphore>,
    /// Claims whose answer was lost.
    pub(crate) doubts: Pending<Doubt>,
    /// Ends of attempts that the store did not take before the lease was over.
    pub(crate) unstored: Pending<Unstored>,
    /// Places for those who look for a claim that may come late, and very late.
    pub(crate) late: Arc<Semaphore>,
    pub(crate) very_late: Arc<Semaphore>,
    /// Nobody begins anything more.
    pub(crate) closing: CancellationToken,
    pub(crate) completion_missing: LogThrottle,
    pub(crate) unknown: UnknownOutcomes,
    flights: Arc<Flights>,
    /// Random, drawn once: the upper half of every attempt's identifier.
    origin: u64,
    /// How many claims were made: the lower half.
    claims: AtomicU64,
}

/// One claim.
#[derive(Clone, Debug)]
pub struct ClaimRequest {
    /// The record to own.
    pub id: RecordId,
    /// What makes two requests the same request.
    pub fingerprint: Fingerprint,
    /// What an operator sees of the record.
    pub label: Label,
    /// How long things last.
    pub policy: Policy,
}

/// What a claim comes to.
#[derive(Debug)]
#[non_exhaustive]
pub enum ClaimOutcome {
    /// Execute, once, and then complete or release the permit.
    Execute(Permit),
    /// Completed before: this is the answer.
    Replay(StoredResponse),
    /// Another attempt owns the record.
    InProgress {
        /// What is left of the owner's lease, unless the owner renews it.
        lease_left: Duration,
        /// How long that attempt has been running, as far as this process can tell. An attempt of another process may have been
        /// running longer.
        running_for: Duration,
    },
    /// The key was used for another request.
    Mismatch,
    /// It is not known whether the operation took place.
    Unknown,
    /// Completed before, but the answer cannot be replayed.
    Unreplayable,
    /// Completed before by the operation's own transaction, without the answer: whoever can find it out may add it. Only
    /// under a policy that [asks for answers](Policy::with_answers_asked_for).
    AddAnswer(AnswerPermit),
    /// The same, but the answer could not be found out now, by another claim of this process or because the store could
    /// not be read. Ask again later. Only under such a policy.
    AnswerAwaited,
}

/// How an engine is put together.
pub struct EngineBuilder {
    store: Arc<dyn Store>,
    observer: Arc<dyn Observer>,
    service: Option<ServiceName>,
    purge_every: Option<Duration>,
    runtime: Option<Handle>,
}

impl EngineBuilder {
    /// The runtime that renews leases and purges; by default the one that the first claim is made on. A program with
    /// several runtimes keeps a busy handler from delaying renewals with it.
    #[must_use]
    pub fn with_runtime(self, runtime: Handle) -> Self {
        Self { runtime: Some(runtime), ..self }
    }

    /// Who hears of everything that happens.
    #[must_use]
    pub fn with_observer(self, observer: impl Observer) -> Self {
        Self { observer: Arc::new(observer), ..self }
    }

    /// The service that the program is part of, for a store that several services share: the HTTP layer and the functions
    /// on this engine share their keys with programs of the same name, and with no other. Without a name they share them
    /// with every program that gives none.
    #[must_use]
    pub fn with_service(self, service: ServiceName) -> Self {
        Self { service: Some(service), ..self }
    }

    /// How often records past their retention are removed; `None` leaves that to somebody else. Every second by default.
    #[must_use]
    pub fn with_purge_interval(self, purge_every: Option<Duration>) -> Self {
        Self { purge_every, ..self }
    }

    /// The engine.
    #[must_use]
    pub fn build(self) -> Engine {
        Engine {
            inner: Arc::new(Inner {
                keeper: Keeper::new(self.store.clone(), self.purge_every, self.runtime),
                store: self.store,
                observer: self.observer,
                service: self.service,
                tasks: TaskTracker::new(),
                deferred: Arc::new(Semaphore::new(DEFERRED)),
                doubts: Pending::default(),
                unstored: Pending::default(),
                late: Arc::new(Semaphore::new(LATE)),
                very_late: Arc::new(Semaphore::new(VERY_LATE)),
                closing: CancellationToken::new(),
                completion_missing: LogThrottle::new(COMPLETION_MISSING_INTERVAL),
                unknown: UnknownOutcomes::default(),
                flights: Arc::default(),
                origin: random_bits(),
                claims: AtomicU64::new(0),
            }),
        }
    }
}

/// A claim that got no answer is sent again once, after so long.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(10);

/// When a request is to come again whose answer this process has, and the store does not take.
const UNSTORED_AGAIN: Duration = Duration::from_secs(5);

/// A claim that waits for another process asks again when the store is told of something, and after so long in any case:
/// at first, doubled each time, and at last.
const POLL_FIRST: Duration = Duration::from_millis(25);
const POLL_LAST: Duration = Duration::from_millis(500);

/// How long a claim waits for another claim of the same process that is asking the store. A store answers sooner.
const CLAIMING_PATIENCE: Duration = Duration::from_secs(30);

impl Engine {
    /// An engine on this store, with the defaults.
    #[must_use]
    pub fn new(store: impl IntoStore) -> Self {
        Self::builder(store).build()
    }

    /// Puts an engine together.
    #[must_use]
    pub fn builder(store: impl IntoStore) -> EngineBuilder {
        EngineBuilder {
            store: store.into_store(),
            observer: Arc::new(()),
            service: None,
            purge_every: Some(Duration::from_secs(1)),
            runtime: None,
        }
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.inner.store
    }

    /// The scope within the service of this engine.
    #[must_use]
    pub fn in_service<'a>(&self, scope: Scope<'a>) -> Scope<'a> {
        match &self.inner.service {
            Some(service) => scope.with_service(service),
            None => scope,
        }
    }

    /// How many records somebody in this process is at.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.inner.flights.len()
    }

    /// Claims a record, and waits for its present owner as long as the policy says. Must be called inside a tokio runtime.
    ///
    /// Dropping the future is safe: a claim that was under way is carried to its end, and released if it was granted.
    ///
    /// # Errors
    /// What the store said. Nothing may be executed then.
    pub async fn claim(&self, request: ClaimRequest) -> Result<ClaimOutcome, StoreError> {
        let inner = &self.inner;
        inner.keeper.ensure_running();
        let id = request.id;
        let deadline = (!request.policy.wait.is_zero()).then(|| Instant::now() + request.policy.wait);
        let mut waited = false;
        let result = loop {
            match inner.flights.join(id, request.fingerprint) {
                Joined::Leader(leader) => break self.lead(leader, request, deadline, &mut waited).await,
                Joined::Follower(flight) => {
                    match inner.follow(&flight, &request, deadline, &mut waited).await {
                        Some(result) => break result,
                        None => continue,
                    }
                }
            }
        };
        inner.emit_claim(id, &result, waited);
        result
    }

    /// Runs a future to its end whatever becomes of the caller; [`drain`](Self::drain) waits for it.
    pub fn spawn<F>(&self, future: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.inner.tasks.spawn(future)
    }

    /// Waits until everything that was spawned has ended, but no longer than `patience`. Says how much is still running
    /// then: its records are left to their abandon policy.
    pub async fn drain(&self, patience: Duration) -> usize {
        self.inner.closing.cancel();
        self.inner.tasks.close();
        let _ = tokio::time::timeout(patience, self.inner.tasks.wait()).await;
        self.inner.tasks.len()
    }

    /// The attempt of this process that executes under this record.
    pub(crate) fn running(&self, id: &RecordId) -> Option<Attempt> {
        self.inner.flights.running(id)
    }

    /// Waits until the engine is told to [end](Self::drain).
    pub(crate) async fn closing(&self) {
        self.inner.closing.cancelled().await;
    }

    /// Asks the store. Where it does not answer at once, it is asked in a task of its own, so that a caller who goes away
    /// leaves no record in progress behind.
    async fn lead(
        &self,
        leader: Leader,
        request: ClaimRequest,
        deadline: Option<Instant>,
        waited: &mut bool,
    ) -> Result<ClaimOutcome, StoreError> {
        let patience = deadline.map(|deadline| Arc::new(Patience::until(deadline)));
        let result = self.lead_on(leader, request, patience.clone()).await;
        *waited |= patience.is_some_and(|patience| patience.waited.load(Ordering::Relaxed));
        result
    }

    async fn lead_on(
        &self,
        leader: Leader,
        request: ClaimRequest,
        patience: Option<Arc<Patience>>,
    ) -> Result<ClaimOutcome, StoreError> {
        let waiting = patience.clone();
        let mut work: Pin<Box<dyn Future<Output = _> + Send>> =
            Box::pin(self.inner.clone().lead(leader, request, patience));
        if let Poll::Ready(result) = std::future::poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await {
            return result;
        }
        let (mut send, receive) = oneshot::channel();
        let runtime = Handle::current();
        self.spawn(async move {
            if let Some(waiting) = waiting {
                let done = tokio::select! {
                    biased;
                    result = &mut work => Some(result),
                    () = send.closed() => None,
                };
                if let Some(result) = done {
                    let _gone = send.send(Undelivered { result: Some(result), runtime });
                    return;
                }
                waiting.gone.notify_one();
            }
            // A caller that is gone drops it here; one that goes just now drops it unread.
            let _gone = send.send(Undelivered { result: Some(work.await), runtime });
        });
        match receive.await {
            Ok(delivered) => delivered.take(),
            Err(_) => Err(StoreError::unavailable("the engine is shutting down")),
        }
    }
}

/// How long a claim waits for another process: until then, or until its caller is gone.
struct Patience {
    deadline: Instant,
    gone: Notify,
    /// It did wait.
    waited: AtomicBool,
}

impl Patience {
    fn until(deadline: Instant) -> Self {
        Self { deadline, gone: Notify::new(), waited: AtomicBool::new(false) }
    }
}

/// The outcome of a claim on its way to the caller. Dropped unread, a claim that was granted is taken back: its caller is
/// gone, and nothing was begun.
struct Undelivered {
    result: Option<Result<ClaimOutcome, StoreError>>,
    runtime: Handle,
}

impl Undelivered {
    fn take(mut self) -> Result<ClaimOutcome, StoreError> {
        self.result.take().unwrap_or_else(|| Err(StoreError::unavailable("the claim was taken back")))
    }
}

impl Drop for Undelivered {
    fn drop(&mut self) {
        if let Some(Ok(ClaimOutcome::Execute(permit))) = self.result.take() {
            self.runtime.spawn(permit.cancel());
        }
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("store", &self.inner.store.capabilities().name).finish_non_exhaustive()
    }
}

impl fmt::Debug for EngineBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EngineBuilder")
            .field("store", &self.store.capabilities().name)
            .finish_non_exhaustive()
    }
}

/// Whether an attempt of this process still owns its record. If its lease is over and not renewed, the store is asked: the
/// handler is alive, so to claim the record would make an unknown outcome of one that will be known.
async fn owns(attempt: &Attempt) -> Result<bool, StoreError> {
    if attempt.has_ended() {
        return Ok(true); // its end is being written
    }
    match attempt.confirm_lease().await {
        Ok(()) => Ok(true),
        Err(LeaseError::Fenced) => Ok(attempt.has_ended()),
        Err(LeaseError::Store(error)) => Err(error),
    }
}

impl Inner {
    /// What a claim is told by another one of this process that came first; `None` if it has to ask the store itself.
    async fn follow(
        &self,
        flight: &Arc<Flight>,
        request: &ClaimRequest,
        deadline: Option<Instant>,
        waited: &mut bool,
    ) -> Option<Result<ClaimOutcome, StoreError>> {
        let same = flight.fingerprint == request.fingerprint;
        let patience = Instant::now() + CLAIMING_PATIENCE;
        let phase = flight.wait_until(patience, |phase| !matches!(phase, Phase::Claiming)).await;
        let mut phase = phase.unwrap_or(Phase::Claiming);
        while let Phase::Executing(owner) = &phase {
            if let Owner::Here(attempt) = owner {
                match owns(attempt).await {
                    Ok(true) => {}
                    // What the fenced handler still does is not for this key any more.
                    Ok(false) => {
                        self.flights.detach(&request.id, flight);
                        return None;
                    }
                    // The store cannot say, and the handler lives: its request is in progress.
                    Err(_) => return Some(Ok(owner.outcome())),
                }
            }
            if !same {
                return Some(Ok(ClaimOutcome::Mismatch));
            }
            let Some(deadline) = deadline.filter(|deadline| Instant::now() < *deadline) else { break };
            *waited = true;
            let landed = |phase: &Phase| matches!(phase, Phase::Landed(_));
            let next = match owner {
                Owner::Here(attempt) if !attempt.has_ended() => {
                    // An attempt that loses its record, or is not renewed in time, will not land for those who wait.
                    let until = deadline.min(attempt.lease_until());
                    tokio::select! {
                        biased;
                        next = flight.wait_until(until, landed) => next,
                        () = attempt.lost() => Some(flight.phase()),
                    }
                }
                _ => flight.wait_until(deadline, landed).await,
            };
            // Too many wait already.
            let Some(next) = next else { break };
            phase = next;
        }
        let outcome = match phase {
            Phase::Claiming => {
                ClaimOutcome::InProgress { lease_left: Duration::ZERO, running_for: Duration::ZERO }
            }
            Phase::Executing(owner) => owner.outcome(),
            // Another request: whether it fits the record, only the store can say.
            Phase::Landed(_) if !same => return None,
            Phase::Landed(Landing::Replay(response)) => ClaimOutcome::Replay(response),
            Phase::Landed(Landing::Unreplayable) => ClaimOutcome::Unreplayable,
            Phase::Landed(Landing::AnswerAwaited) => ClaimOutcome::AnswerAwaited,
            Phase::Landed(Landing::Unknown) => ClaimOutcome::Unknown,
            Phase::Landed(Landing::InProgress(elsewhere)) => elsewhere.outcome(),
            Phase::Landed(Landing::Failed(kind)) => return Some(Err(shared_failure(kind))),
            Phase::Landed(Landing::AskAgain) => return None,
        };
        Some(Ok(outcome))
    }

    pub(crate) fn emit(&self, event: Event) {
        self.observer.observe(&event);
    }

    fn emit_claim(&self, id: RecordId, result: &Result<ClaimOutcome, StoreError>, waited: bool) {
        let (token, kind) = match result {
            Ok(ClaimOutcome::Execute(permit)) => {
                let attempt = permit.attempt();
                let kind = EventKind::Executing {
                    attempts: attempt.number(),
                    after_abandoned: attempt.is_after_abandoned(),
                };
                (Some(attempt.token()), kind)
            }
            Ok(ClaimOutcome::Replay(_)) => (None, EventKind::Replayed { waited }),
            Ok(ClaimOutcome::InProgress { .. }) => (None, EventKind::InProgress),
            Ok(ClaimOutcome::Mismatch) => (None, EventKind::Mismatch),
            Ok(ClaimOutcome::Unknown) => (None, EventKind::Unknown),
            Ok(ClaimOutcome::Unreplayable | ClaimOutcome::AddAnswer(_) | ClaimOutcome::AnswerAwaited) => {
                (None, EventKind::Unreplayable)
            }
            Err(error) => (None, EventKind::ClaimFailed(error.kind())),
        };
        self.emit(Event::new(id, token, kind));
    }

    /// Asks the store until there is something to say: at once, or, where another process owns the record and the policy
    /// says to wait, again until the deadline.
    async fn lead(
        self: Arc<Self>,
        mut leader: Leader,
        mut request: ClaimRequest,
        patience: Option<Arc<Patience>>,
    ) -> Result<ClaimOutcome, StoreError> {
        let (mut number, mut identifier) = self.new_attempt();
        let mut is_doubtful = false;
        match self.settle_earlier(&request).await {
            Ok(None) => {}
            Ok(Some(earlier)) => {
                (number, identifier) = (Self::number_of(earlier), earlier);
                is_doubtful = true;
            }
            Err(NotSettled::Out(error)) => {
                leader.land(Landing::Failed(error.kind()));
                return Err(error);
            }
            Err(NotSettled::Unstored(attempt)) => {
                // Known here, and not to the store: not to be executed, even where the store's outage would allow that.
                let until = Instant::now() + UNSTORED_AGAIN;
                let owner = Elsewhere { lease_until: until, since: attempt.0.begun };
                leader.land(Landing::InProgress(owner));
                return Ok(owner.outcome());
            }
        }
        let store = self.store.clone();
        let mut pause = POLL_FIRST;
        let mut changed = None;
        let began_at = Instant::now();
        let mut heed_from = began_at;
        loop {
            let asked_at = Moment::now();
            let outcome = match self.ask(&request, identifier).await {
                Ok((outcome, maybe_applied)) => {
                    is_doubtful |= maybe_applied;
                    outcome
                }
                Err(Unanswered { error, maybe_applied }) => {
                    leader.land(Landing::Failed(error.kind()));
                    if maybe_applied || is_doubtful {
                        self.retract(request, identifier);
                    }
                    return Err(error);
                }
            };
            let (landing, outcome) = match outcome {
                Outcome::Execute(grant) => {
                    self.unknown.forget(request.id);
                    let (label, policy) = (request.label.clone(), request.policy);
                    let granted = Attempt::new(&self, request.id, label, grant, policy, number, asked_at);
                    match self.begin(leader, request, granted, identifier, is_doubtful).await {
                        Ok(result) => return result,
                        Err(fenced) => (leader, request) = fenced,
                    }
                    is_doubtful = false;
                    (number, identifier) = self.new_attempt();
                    continue;
                }
                Outcome::Replay(response) => {
                    (Landing::Replay(response.clone()), ClaimOutcome::Replay(response))
                }
                Outcome::InProgress { lease_left } => {
                    let owner = elsewhere(&request.policy, asked_at.monotonic, lease_left, began_at);
                    let patience = patience.as_deref().filter(|patience| Instant::now() < patience.deadline);
                    if let Some(Patience { deadline, gone, waited }) = patience {
                        waited.store(true, Ordering::Relaxed);
                        leader.set_executing(Owner::Elsewhere(owner));
                        // Nothing left: somebody's open transaction holds the record, nobody knows for how long.
                        let most = if lease_left.is_zero() { pause } else { pause.min(lease_left) };
                        let again = Instant::now() + most.max(Duration::from_millis(1));
                        // Kept from one turn to the next: what it is told while the store is asked is not lost.
                        let told = changed.get_or_insert_with(|| store.changed(request.id));
                        let heard = async {
                            sleep_until(heed_from).await;
                            told.await;
                        };
                        let is_told = tokio::select! {
                            heard = timeout_at(again.min(*deadline), heard) => heard.is_ok(),
                            // Those who came along ask for themselves.
                            () = gone.notified() => {
                                if is_doubtful {
                                    self.retract(request, identifier);
                                }
                                return Ok(owner.outcome());
                            }
                        };
                        if is_told {
                            changed = None;
                            // It may have been for nothing, and go on so.
                            heed_from = Instant::now() + POLL_FIRST;
                        } else {
                            pause = (pause * 2).min(POLL_LAST);
                        }
                        continue;
                    }
                    (Landing::InProgress(owner), owner.outcome())
                }
                Outcome::Mismatch => (Landing::AskAgain, ClaimOutcome::Mismatch),
                Outcome::Unknown => {
                    self.log_found_unknown(request.id);
                    (Landing::Unknown, ClaimOutcome::Unknown)
                }
                Outcome::Unreplayable if request.policy.asks_for_answers => {
                    return self.look_for_answer(leader, &request, number).await;
                }
                Outcome::Unreplayable => (Landing::Unreplayable, ClaimOutcome::Unreplayable),
                other => {
                    leader.land(Landing::Failed(StoreErrorKind::Invalid));
                    return Err(StoreError::invalid(format!("the store answered {other:?} to a claim")));
                }
            };
            // Another attempt owns the record, or our own first try, which may still be on its way.
            if is_doubtful && matches!(outcome, ClaimOutcome::InProgress { .. } | ClaimOutcome::Mismatch) {
                self.retract(request, identifier);
            }
            leader.land(landing);
            return Ok(outcome);
        }
    }

    /// Ends a claim that was granted. I4: the grant may have come after the lease was over, and another attempt may have come
    /// meanwhile. Then the claim has to be made anew.
    async fn begin(
        self: &Arc<Self>,
        leader: Leader,
        request: ClaimRequest,
        granted: Attempt,
        attempt: AttemptId,
        is_doubtful: bool,
    ) -> Result<Result<ClaimOutcome, StoreError>, (Leader, ClaimRequest)> {
        match granted.confirm_lease().await {
            Ok(()) => {
                let mut permit = Permit::new(self.clone(), granted, leader);
                if is_doubtful {
                    permit.claimed_in_doubt(request, attempt);
                }
                Ok(Ok(ClaimOutcome::Execute(permit)))
            }
            Err(LeaseError::Fenced) => {
                if is_doubtful {
                    self.retract(request.clone(), attempt);
                }
                Err((leader, request))
            }
            Err(LeaseError::Store(error)) => {
                leader.land(Landing::Failed(error.kind()));
                self.retract(request, attempt);
                Ok(Err(error))
            }
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

    /// Sends a claim, and sends it again where it may only be the answer that was lost: the store recognises it. Says beside the
    /// outcome whether the first one may still come to the store.
    async fn ask(&self, request: &ClaimRequest, attempt: AttemptId) -> Result<(Outcome, bool), Unanswered> {
        let first = self.store.apply(request.id, claim_command(request, attempt)).await;
        match first {
            Err(error) if may_have_applied(&error) => {
                tokio::time::sleep(ASK_AGAIN_AFTER).await;
                let again = self.store.apply(request.id, claim_command(request, attempt)).await;
                // However sure it is of the second time: the first one may have been.
                again
                    .map(|outcome| (outcome, true))
                    .map_err(|error| Unanswered { maybe_applied: error.kind().may_pass(), error })
            }
            first => first
                .map(|outcome| (outcome, false))
                .map_err(|error| Unanswered { error, maybe_applied: false }),
        }
    }
}

/// What the store's answer tells of an attempt of another process. Stores do not tell when it began. But its lease was longer at
/// its last renewal or when it began, and it was there all the time that this claim waited.
fn elsewhere(policy: &Policy, asked_at: Instant, lease_left: Duration, began_at: Instant) -> Elsewhere {
    let since = asked_at.checked_sub(policy.lease.saturating_sub(lease_left)).unwrap_or(asked_at);
    Elsewhere { lease_until: asked_at + lease_left, since: since.min(began_at) }
}

/// A claim without an answer.
struct Unanswered {
    error: StoreError,
    /// Whether the store may have granted it, so that it has to be taken back.
    maybe_applied: bool,
}

fn may_have_applied(error: &StoreError) -> bool {
    error.kind().may_pass() && !error.is_unsent()
}

pub(crate) fn claim_command(request: &ClaimRequest, attempt: AttemptId) -> Command {
    Command::Claim(Claim {
        attempt,
        fingerprint: request.fingerprint,
        lease: request.policy.lease,
        retention: request.policy.retention,
        on_abandoned: request.policy.on_abandoned,
        label: request.label.clone(),
    })
}

/// 64 random bits, different in each engine: also in one that was copied with its whole machine, because the time goes in.
fn random_bits() -> u64 {
    let mut bits = [0; 8];
    // Where the system has no random numbers, the time and the hasher's seed tell engines apart.
    let _drawn = getrandom::fill(&mut bits);
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u64(u64::from_ne_bytes(bits));
    hasher.write_u128(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos()));
    hasher.finish()
}
