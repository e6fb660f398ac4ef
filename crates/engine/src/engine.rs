//! Claims and their outcomes.

use std::fmt;
use std::future::Future;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use oncegate_core::{
    ConfigError, Fingerprint, IdGuard, IdScheme, IdSecret, IntoStore, Label, RecordId, Scope, ServiceName,
    Store, StoreError, StoredResponse, limits,
};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::attempt::{Attempt, Permit, UnstoredEnd};
use crate::conclude::COMPLETION_MISSING_INTERVAL;
use crate::event::{Event, EventKind, Observer};
use crate::lead::{BegunClaim, PreparedClaim, WaitLimit};
use crate::lease::LeaseError;
use crate::log_throttle::LogThrottle;
use crate::pending::Pending;
use crate::policy::Policy;
use crate::renewal::LeaseRenewer;
use crate::response::ResponsePermit;
use crate::retract::{DoubtfulClaim, LATE, VERY_LATE};
use crate::shield::{ShieldRest, Shielded};
use crate::single_flight::{Flight, Flights, Leader, Owner, Phase, SharedOutcome};
use crate::unknown::UnknownOutcomes;

/// Drives one store: claims, renews, waits, completes. Cheap to clone; clones share one engine.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) store: Arc<dyn Store>,
    /// The same store, as the guard of its identities.
    guard: Arc<IdGuard>,
    pub(crate) observer: Arc<dyn Observer>,
    pub(crate) service: Option<ServiceName>,
    pub(crate) renewer: LeaseRenewer,
    pub(crate) tasks: TaskTracker,
    /// The places of claims and attempts that are not settled with the store.
    pub(crate) places: Arc<Semaphore>,
    /// The KiB of responses that the store has not accepted yet.
    pub(crate) deferred_kib: Arc<Semaphore>,
    /// Claims whose reply was lost.
    pub(crate) doubts: Pending<DoubtfulClaim>,
    /// Ends of attempts that could not be stored before the lease was over.
    pub(crate) unstored: Pending<UnstoredEnd>,
    /// Ends of attempts that the store has not accepted yet, those in `unstored` included. Only this process knows them.
    pub(crate) deferred: Pending<()>,
    /// The limits on searches for claims that may reach the store late, and very late.
    pub(crate) late: Arc<Semaphore>,
    pub(crate) very_late: Arc<Semaphore>,
    /// Cancelled when the engine drains.
    pub(crate) closing: CancellationToken,
    pub(crate) completion_missing: LogThrottle,
    pub(crate) unknown: UnknownOutcomes,
    pub(crate) flights: Arc<Flights>,
    /// Random, drawn once: the upper half of every attempt's identifier.
    pub(crate) origin: u64,
    /// The number of claims so far: the lower half.
    pub(crate) claims: AtomicU64,
}

/// One claim.
#[derive(Clone, Debug)]
pub struct ClaimRequest {
    /// The record to own. [`Engine::ids`] computes it, and the tags in the label.
    pub id: RecordId,
    /// The fingerprint of the request: equal fingerprints mean the same request. It goes through
    /// [`IdScheme::fingerprint`](oncegate_core::IdScheme::fingerprint).
    pub fingerprint: Fingerprint,
    /// The part of the record that an operator sees.
    pub label: Label,
    /// The lease, the retention and the other rules of the claim.
    pub policy: Policy,
}

/// The outcome of a claim.
#[derive(Debug)]
#[non_exhaustive]
pub enum ClaimOutcome {
    /// The caller must execute once, and then complete or release the permit.
    Execute(Permit),
    /// Completed before: this is the response.
    Replay(StoredResponse),
    /// Another attempt owns the record.
    InProgress {
        /// The rest of the owner's lease, unless the owner renews it.
        lease_left: Duration,
        /// The time that the attempt has been running. For an attempt of another process, this is a lower bound.
        running_for: Duration,
    },
    /// The key was used for another request.
    Mismatch,
    /// It is unknown whether the operation took place.
    Unknown,
    /// Completed before, but the response cannot be replayed.
    Unreplayable,
    /// Completed before by the operation's own transaction, without the response. The caller may add it. Only under a policy
    /// that [recovers responses](Policy::with_response_recovery).
    AddResponse(ResponsePermit),
    /// As `AddResponse`, but another claim of this process could not find out the response, or the store could not be read. Ask
    /// again later.
    ResponseAwaited,
}

/// The builder of an [`Engine`].
pub struct EngineBuilder {
    store: Arc<dyn Store>,
    observer: Arc<dyn Observer>,
    service: Option<ServiceName>,
    ids: IdScheme,
    purge_every: Option<Duration>,
    runtime: Option<Handle>,
}

impl EngineBuilder {
    /// Sets the runtime that renews leases and purges. By default it is the runtime of the first claim. A runtime of its own
    /// keeps renewals on time while handlers are busy.
    #[must_use]
    pub fn with_runtime(self, runtime: Handle) -> Self {
        Self { runtime: Some(runtime), ..self }
    }

    /// Sets the observer that gets every [`Event`].
    #[must_use]
    pub fn with_observer(self, observer: impl Observer) -> Self {
        Self { observer: Arc::new(observer), ..self }
    }

    /// Sets the service that the program is part of, for a store that several services share. The HTTP layer and the functions
    /// on this engine share keys only with programs of the same service. Programs without a service share keys with each other.
    #[must_use]
    pub fn with_service(self, service: ServiceName) -> Self {
        Self { service: Some(service), ..self }
    }

    /// Computes the identities of records with this secret, so that a reader of the store who guesses a key, a caller or a
    /// request cannot confirm the guess. By default they are plain hashes.
    ///
    /// A store belongs to one secret, or to none: all programs on it need the same one, and it can neither be changed nor added
    /// to a store that has records. Claims are refused until the engine has found that the store belongs to this secret
    /// ([`Engine::verify_ids`]). See [`IdSecret`] and [`IdGuard`].
    #[must_use]
    pub fn with_id_secret(self, secret: IdSecret) -> Self {
        Self { ids: secret.into(), ..self }
    }

    /// Sets the interval at which records past their retention are removed: a second by default, from 1 ms to a day. `None`
    /// leaves that to another process.
    ///
    /// # Errors
    /// If the interval is out of these bounds.
    pub fn with_purge_interval(self, interval: Option<Duration>) -> Result<Self, ConfigError> {
        let bounds = Duration::from_millis(1)..=Duration::from_secs(24 * 60 * 60);
        let check = |interval| ConfigError::check("the interval of purges", interval, bounds);
        Ok(Self { purge_every: interval.map(check).transpose()?, ..self })
    }

    /// The engine.
    #[must_use]
    pub fn build(self) -> Engine {
        let guard = Arc::new(IdGuard::new(self.store.clone(), self.ids.clone()));
        self.build_with(guard)
    }

    fn build_with(self, guard: Arc<IdGuard>) -> Engine {
        let store: Arc<dyn Store> = guard.clone();
        Engine {
            inner: Arc::new(Inner {
                renewer: LeaseRenewer::new(store.clone(), self.purge_every, self.runtime),
                store,
                guard,
                observer: self.observer,
                service: self.service,
                tasks: TaskTracker::new(),
                places: Arc::new(Semaphore::new(limits::MAX_UNSETTLED)),
                deferred_kib: Arc::new(Semaphore::new(limits::MAX_DEFERRED_BYTES / 1024)),
                doubts: Pending::default(),
                unstored: Pending::default(),
                deferred: Pending::default(),
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

/// The bound on the wait for another claim of the same process that is asking the store. A store answers sooner.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(30);

impl Engine {
    /// An engine on this store, with the defaults.
    #[must_use]
    pub fn new(store: impl IntoStore) -> Self {
        Self::builder(store).build()
    }

    /// A builder for an engine on this store.
    #[must_use]
    pub fn builder(store: impl IntoStore) -> EngineBuilder {
        EngineBuilder {
            store: store.into_store(),
            observer: Arc::new(()),
            service: None,
            ids: IdScheme::PLAIN,
            purge_every: Some(Duration::from_secs(1)),
            runtime: None,
        }
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.inner.store
    }

    /// Another engine on the same store, for the same service, for records that only observe requests. It shares no claims,
    /// limits or observer with this engine, reports nothing to an observer, and does not purge.
    #[must_use]
    pub fn apart(&self) -> Self {
        let builder = EngineBuilder {
            store: self.inner.store.clone(),
            observer: Arc::new(()),
            service: self.inner.service.clone(),
            ids: self.ids().clone(),
            purge_every: None,
            runtime: self.inner.renewer.runtime(),
        };
        builder.build_with(self.inner.guard.clone())
    }

    /// The computation of the identities of records, which every claim on this engine must use.
    #[must_use]
    pub fn ids(&self) -> &IdScheme {
        self.inner.guard.ids()
    }

    /// The guard of the store, which refuses claims until the id secret is verified. It is the [store](Self::store) of the
    /// engine.
    #[must_use]
    pub fn id_guard(&self) -> &Arc<IdGuard> {
        &self.inner.guard
    }

    /// Waits until it is known that the store belongs to the [id secret](EngineBuilder::with_id_secret) of this engine, or,
    /// without one, to none. The first process with a secret on a new store waits for six seconds.
    /// Without this call, claims are refused until then.
    ///
    /// # Errors
    /// [`StoreErrorKind::Invalid`](oncegate_core::StoreErrorKind::Invalid) if the store belongs to another secret, or has records
    /// from before. Otherwise the error of the store.
    pub async fn verify_ids(&self) -> Result<(), StoreError> {
        let guard = &self.inner.guard;
        loop {
            let checked = guard.verify().await;
            match guard.problem().and_then(|problem| problem.next_check()) {
                Some(pause) if checked.is_err() => tokio::time::sleep(pause).await,
                _ => return checked,
            }
        }
    }

    /// The scope within the service of this engine.
    #[must_use]
    pub fn service_scope<'a>(&self, scope: Scope<'a>) -> Scope<'a> {
        match &self.inner.service {
            Some(service) => scope.with_service(service),
            None => scope,
        }
    }

    /// The number of records that this process is claiming, executing or waiting for.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.inner.flights.len()
    }

    /// The number of results that the store has not accepted yet, for example because it is out of reach. Only this process has
    /// them: if it ends now, the outcome of these operations is unknown.
    #[must_use]
    pub fn pending_settlements(&self) -> usize {
        self.inner.deferred.len()
    }

    /// The records of those results, at most `limit` of them.
    #[must_use]
    pub fn records_pending_settlement(&self, limit: usize) -> Vec<RecordId> {
        self.inner.deferred.records(limit)
    }

    /// Claims a record, and waits for its present owner as long as the policy says. Must be called inside a tokio runtime.
    ///
    /// Dropping the future is safe: the claim still runs to its end, and is released if it was granted.
    ///
    /// # Errors
    /// The error of the store. Nothing may be executed then.
    pub async fn claim(&self, request: ClaimRequest) -> Result<ClaimOutcome, StoreError> {
        let inner = &self.inner;
        inner.renewer.ensure_running();
        let id = request.id;
        let wait = request.policy.wait;
        let wait = (!wait.is_zero()).then(|| Arc::new(WaitLimit::until(Instant::now() + wait)));
        let result = loop {
            match inner.begin(&request, wait.is_some()) {
                BegunClaim::Finished(result) => break result,
                BegunClaim::Leads(leader, prepared) => {
                    break self.lead(leader, request, prepared, wait.clone()).await;
                }
                BegunClaim::Follows(flight) => {
                    // Boxed: duplicates are rare, and boxing keeps the common future small.
                    match Box::pin(inner.follow(&flight, &request, wait.as_deref())).await {
                        Some(result) => break result,
                        None => continue,
                    }
                }
            }
        };
        inner.emit_claim(id, &result, wait.is_some_and(|wait| wait.has_waited()));
        result
    }

    /// Runs a future to its end, even if the caller goes away. [`drain`](Self::drain) waits for it.
    pub fn spawn<F>(&self, future: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.inner.tasks.spawn(future)
    }

    /// Runs a future to its end, even if the caller goes away. Unlike [`spawn`](Self::spawn), it runs as a part of the caller. It
    /// moves to a task of its own if the returned future is dropped unfinished, after it was polled. Then `rest` gets the output,
    /// and returns the work that is left because no caller takes the output. [`drain`](Self::drain) waits for it in either case.
    ///
    /// # Panics
    /// The returned future, if it has to wait outside of a tokio runtime.
    pub fn shield<T: 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
        rest: fn(T) -> Option<ShieldRest>,
    ) -> impl Future<Output = T> + Send {
        Shielded { tasks: &self.inner.tasks, work: Some(Box::pin(future)), rest, pending: None }
    }

    /// Waits until all spawned tasks have ended, for at most `timeout`. Returns how many still run then. Their records are
    /// left to their abandon policy.
    pub async fn drain(&self, timeout: Duration) -> usize {
        self.inner.closing.cancel();
        self.inner.tasks.close();
        let _ = tokio::time::timeout(timeout, self.inner.tasks.wait()).await;
        self.inner.tasks.len()
    }

    /// The attempt of this process that executes under this record.
    pub(crate) fn running(&self, id: &RecordId) -> Option<Attempt> {
        self.inner.flights.running(id)
    }

    /// Waits until the engine [drains](Self::drain).
    pub(crate) async fn closing(&self) {
        self.inner.closing.cancelled().await;
    }

    /// Asks a store that could not answer by [`Store::try_apply`]. If the caller goes away meanwhile, the claim goes on, and a
    /// granted claim is cancelled, because nothing was begun. So the caller leaves no record in progress.
    async fn lead(
        &self,
        leader: Leader,
        request: ClaimRequest,
        prepared: PreparedClaim,
        wait: Option<Arc<WaitLimit>>,
    ) -> Result<ClaimOutcome, StoreError> {
        let _gone = wait.clone().map(GoneGuard);
        let cancel = |result| match result {
            Ok(ClaimOutcome::Execute(permit)) => Some(Box::pin(Permit::cancel(permit)) as ShieldRest),
            _ => None,
        };
        self.shield(self.inner.clone().lead(leader, request, prepared, wait), cancel).await
    }
}

/// Tells a claim that waits for another owner that its caller is gone. At the end of the claim, this has no effect.
struct GoneGuard(Arc<WaitLimit>);

impl Drop for GoneGuard {
    fn drop(&mut self) {
        self.0.gone.notify_one();
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

/// True if an attempt of this process still owns its record. If its lease is over, this tries to renew it: the handler is
/// alive, so to claim the record would turn an outcome that will be known into an unknown one.
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
    /// Gets the outcome from an earlier claim of this process; `None` if this claim has to ask the store itself.
    async fn follow(
        &self,
        flight: &Arc<Flight>,
        request: &ClaimRequest,
        wait: Option<&WaitLimit>,
    ) -> Option<Result<ClaimOutcome, StoreError>> {
        let same = flight.fingerprint == request.fingerprint;
        let give_up = Instant::now() + CLAIM_TIMEOUT;
        let phase = flight.wait_until(give_up, |phase| !matches!(phase, Phase::Claiming)).await;
        let mut phase = phase.unwrap_or(Phase::Claiming);
        while let Phase::Executing(owner) = &phase {
            if let Owner::Local(attempt) = owner {
                match owns(attempt).await {
                    Ok(true) => {}
                    // A fenced handler no longer acts for this key.
                    Ok(false) => {
                        self.flights.detach(&request.id, flight);
                        return None;
                    }
                    // The store failed, and the handler is alive: its request is in progress.
                    Err(_) => return Some(Ok(owner.outcome())),
                }
            }
            if !same {
                return Some(Ok(ClaimOutcome::Mismatch));
            }
            let Some(wait) = wait.filter(|wait| wait.is_open()) else { break };
            wait.set_waited();
            let finished = |phase: &Phase| matches!(phase, Phase::Finished(_));
            let next = match owner {
                Owner::Local(attempt) if !attempt.has_ended() => {
                    // An attempt that loses its record, or is not renewed in time, will not share an outcome.
                    let until = wait.deadline.min(attempt.lease_until());
                    tokio::select! {
                        biased;
                        next = flight.wait_until(until, finished) => next,
                        () = attempt.lost() => Some(flight.phase()),
                    }
                }
                _ => flight.wait_until(wait.deadline, finished).await,
            };
            // Too many claims wait already.
            let Some(next) = next else { break };
            phase = next;
        }
        let outcome = match phase {
            Phase::Claiming => {
                ClaimOutcome::InProgress { lease_left: Duration::ZERO, running_for: Duration::ZERO }
            }
            Phase::Executing(owner) => owner.outcome(),
            // Another request: only the store can compare it with the record.
            Phase::Finished(_) if !same => return None,
            Phase::Finished(SharedOutcome::Replay(response)) => ClaimOutcome::Replay(response),
            Phase::Finished(SharedOutcome::Unreplayable) => ClaimOutcome::Unreplayable,
            Phase::Finished(SharedOutcome::ResponseAwaited) => ClaimOutcome::ResponseAwaited,
            Phase::Finished(SharedOutcome::Unknown) => ClaimOutcome::Unknown,
            Phase::Finished(SharedOutcome::InProgress(elsewhere)) => elsewhere.outcome(),
            Phase::Finished(SharedOutcome::Failed(failure)) => return Some(Err(failure.into())),
            Phase::Finished(SharedOutcome::AskAgain) => return None,
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
            Ok(ClaimOutcome::Unreplayable | ClaimOutcome::AddResponse(_) | ClaimOutcome::ResponseAwaited) => {
                (None, EventKind::Unreplayable)
            }
            Err(error) => (None, EventKind::ClaimFailed(error.kind())),
        };
        self.emit(Event::new(id, token, kind));
    }
}

/// 64 random bits, different in each engine. They include the time, so they differ even in a copy of a whole machine.
fn random_bits() -> u64 {
    let mut bits = [0; 8];
    // If this fails, the time and the hasher's seed still tell engines apart.
    let _drawn = getrandom::fill(&mut bits);
    let mut hasher = RandomState::new().build_hasher();
    hasher.write_u64(u64::from_ne_bytes(bits));
    hasher.write_u128(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos()));
    hasher.finish()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use oncegate_core::{
        Extent, Fingerprint, IdempotencyKey, Label, MemoryStore, RecordId, Scope, Store as _, StoreErrorKind,
    };

    use super::*;
    use crate::{Permit, Policy};

    fn numbered(number: u8) -> ClaimRequest {
        ClaimRequest {
            id: RecordId::derive(&Scope::single_tenant(), &IdempotencyKey::new([number]).unwrap()),
            fingerprint: Fingerprint::of_parts("test", &[b"a"]),
            label: Label::default(),
            policy: Policy::default(),
        }
    }

    async fn permit(engine: &Engine, number: u8) -> Permit {
        match engine.claim(numbered(number)).await.unwrap() {
            ClaimOutcome::Execute(permit) => permit,
            other => panic!("expected to execute, got {other:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_beyond_the_limit_of_unsettled_attempts_is_refused_before_it_is_sent() {
        let store = Arc::new(MemoryStore::default());
        let engine = Engine::new(store.clone());
        // All places but two are taken without attempts, because tens of thousands of claims take half a minute here.
        let taken = u32::try_from(limits::MAX_UNSETTLED).unwrap() - 2;
        let _taken = engine.inner.places.clone().try_acquire_many_owned(taken).unwrap();
        let _first = permit(&engine, 1).await;
        let second = permit(&engine, 2).await;
        let error = engine.claim(numbered(3)).await.unwrap_err();
        assert!(error.is_unsent() && error.kind() == StoreErrorKind::Unavailable, "{error}");
        assert_eq!(error.extent(), Extent::Writes, "not an outage, which may open a route");
        assert!(store.lookup(numbered(3).id).await.unwrap().is_none());
        second.release().await;
        drop(permit(&engine, 3).await);
    }
}
