//! One execution under one token: the view of its handler, and the permit that ends it.

use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use oncegate_core::{
    AttemptId, Command, Complete, Completion, ErrorChain, Extent, FencingToken, Grant, Label, OnAbandoned,
    Outcome, Record, RecordId, Release, Renew, Store, StoreError, StoredResponse, Timestamp, limits,
};
use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::time::{Duration, Instant};

use crate::engine::{ClaimRequest, Inner};
use crate::event::{Event, EventKind, Observer};
use crate::function::ErrorFate;
use crate::lease::{ClockReading, LeaseEnd, LeaseError};
use crate::policy::Policy;
use crate::single_flight::{Leader, SharedFailure, SharedOutcome, lock};
use crate::step::Progress;

/// One execution under one token, as seen by its handler. Cheap to clone.
#[derive(Clone)]
pub struct Attempt(pub(crate) Arc<AttemptInner>);

pub(crate) struct AttemptInner {
    pub(crate) id: RecordId,
    pub(crate) label: Label,
    /// The time at which its claim was sent.
    pub(crate) begun: Instant,
    pub(crate) grant: Grant,
    pub(crate) policy: Policy,
    /// Tells attempts with the same due time apart in the renewer.
    pub(crate) number: u64,
    /// The time of the next renewal; `None` once the attempt has ended. Guarded by the lock of the
    /// `LeaseRenewer`.
    pub(crate) due: Mutex<Option<Instant>>,
    lease: Mutex<LeaseEnd>,
    /// The number of failed renewals that [`Attempt::confirm_lease`] asked for.
    failures: AtomicU64,
    /// The last such failure. Held during the renewal, so that one asks at a time.
    last_failure: tokio::sync::Mutex<Option<SharedFailure>>,
    ended: AtomicBool,
    lost: AtomicBool,
    lost_notify: Notify,
    pub(crate) store: Arc<dyn Store>,
    observer: Arc<dyn Observer>,
    /// The progress of its steps.
    pub(crate) progress: tokio::sync::Mutex<Progress>,
    /// True if the log already has a line that the lease ran out.
    pub(crate) warned: AtomicBool,
}

impl Attempt {
    pub(crate) fn new(
        inner: &Inner,
        id: RecordId,
        label: Label,
        grant: Grant,
        policy: Policy,
        number: u64,
        claimed_at: ClockReading,
    ) -> Self {
        Self(Arc::new(AttemptInner {
            id,
            label,
            begun: claimed_at.monotonic,
            grant,
            policy,
            number,
            due: Mutex::new(None),
            lease: Mutex::new(LeaseEnd::after(claimed_at, policy.lease)),
            failures: AtomicU64::new(0),
            last_failure: tokio::sync::Mutex::default(),
            ended: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            lost_notify: Notify::new(),
            store: inner.store.clone(),
            observer: inner.observer.clone(),
            progress: tokio::sync::Mutex::default(),
            warned: AtomicBool::new(false),
        }))
    }

    /// The attempt that completed this record.
    pub(crate) fn completed(
        inner: &Inner,
        id: RecordId,
        record: &Record,
        policy: Policy,
        number: u64,
    ) -> Self {
        let grant = Grant {
            token: record.token,
            attempts: record.attempts,
            lease_until: record.changed_at,
            after_abandoned: false,
        };
        let now = ClockReading::now();
        let attempt = Self::new(inner, id, record.label.clone(), grant, policy, number, now);
        *lock(&attempt.0.lease) = LeaseEnd::after(now, Duration::ZERO);
        attempt
    }

    /// The record that this attempt owns.
    #[must_use]
    pub fn record_id(&self) -> RecordId {
        self.0.id
    }

    /// The token to show to a resource that refuses stale owners: greater than that of every earlier attempt.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.0.grant.token
    }

    /// The number of this attempt at the record, from 1.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.0.grant.attempts
    }

    /// Returns true if an earlier attempt was abandoned, so that its effect may have happened.
    #[must_use]
    pub fn is_after_abandoned(&self) -> bool {
        self.0.grant.after_abandoned
    }

    /// Returns true if the attempt still owns its record, as far as this process knows: its lease lasts by the clocks of this
    /// process, and no other attempt is known to have taken over.
    #[must_use]
    pub fn is_owner(&self) -> bool {
        !self.is_lost() && !self.is_lease_over()
    }

    /// Waits until another attempt owns the record. A handler that can stop should stop then. For most attempts this never
    /// ends.
    pub async fn lost(&self) {
        loop {
            let notified = self.0.lost_notify.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if self.is_lost() {
                return;
            }
            notified.await;
        }
    }

    /// The key for a call of another API, so that this call, too, takes effect once. It is the same for every attempt at this
    /// record, and differs for each `step`. See [`RecordId::downstream_key`].
    #[must_use]
    pub fn downstream_key(&self, step: &str) -> String {
        self.0.id.downstream_key(step)
    }

    /// Ensures that the lease lasts, right before an effect that must not begin without it.
    ///
    /// While the lease lasts, this only reads two clocks. If the lease is over by one of them (the process was stopped, the
    /// machine was suspended), it is renewed under its token. That fails if another attempt took over in the meantime.
    ///
    /// The engine calls this when a claim is granted, and entry points call it right before they execute. Call it before an
    /// effect of your own that comes long after the attempt began.
    ///
    /// # Errors
    /// [`LeaseError`]. The effect must not begin.
    pub async fn confirm_lease(&self) -> Result<(), LeaseError> {
        if self.is_owner() {
            return Ok(());
        }
        let failures = self.0.failures.load(Ordering::Acquire);
        let mut last_failure = self.0.last_failure.lock().await;
        // Another caller tried while this one waited for the lock: share its failure.
        if let Some(failure) = *last_failure
            && self.0.failures.load(Ordering::Acquire) != failures
        {
            return Err(LeaseError::Store(failure.into()));
        }
        let result = self.renew_until_it_lasts().await;
        if let Err(LeaseError::Store(error)) = &result {
            *last_failure = Some(error.into());
            self.0.failures.fetch_add(1, Ordering::Release);
        }
        result
    }

    async fn renew_until_it_lasts(&self) -> Result<(), LeaseError> {
        for _ in 0..MAX_RENEWALS {
            if self.is_lost() {
                return Err(LeaseError::Fenced);
            }
            if !self.is_lease_over() {
                return Ok(());
            }
            match self.renew().await {
                Ok(Renewal::Renewed) => {}
                Ok(Renewal::Fenced | Renewal::Ended) => return Err(LeaseError::Fenced),
                Err(error) => return Err(LeaseError::Store(error)),
            }
        }
        if !self.is_lease_over() {
            return Ok(());
        }
        Err(LeaseError::Store(StoreError::unavailable("a renewal takes longer than the lease")))
    }

    /// Renews the lease under the same token.
    pub(crate) async fn renew(&self) -> Result<Renewal, StoreError> {
        let Policy { lease, retention, .. } = self.0.policy;
        let asked_at = ClockReading::now();
        let command = Command::Renew(Renew { token: self.token(), lease, retention });
        let result = self.0.store.apply(self.record_id(), command).await;
        if self.has_ended() {
            return Ok(Renewal::Ended); // the reply does not matter any more
        }
        match result {
            Ok(Outcome::Renewed { .. }) => {
                *lock(&self.0.lease) = LeaseEnd::after(asked_at, lease);
                self.emit(EventKind::Renewed);
                Ok(Renewal::Renewed)
            }
            Ok(_) => {
                if !self.is_lost() {
                    self.set_lost();
                    self.log_lease_lost();
                    self.emit(EventKind::LeaseLost);
                }
                Ok(Renewal::Fenced)
            }
            Err(error) => {
                self.emit(EventKind::RenewalFailed(error.kind()));
                Err(error)
            }
        }
    }

    fn log_lease_lost(&self) {
        tracing::warn!(
            record = %self.record_id(),
            operation = self.0.label.operation(),
            attempt = self.number(),
            "a running attempt no longer owns its record, because another attempt or an operator has taken it: two executions of \
             one operation may overlap"
        );
    }

    fn emit(&self, kind: EventKind) {
        self.0.observer.observe(&Event::new(self.record_id(), Some(self.token()), kind));
    }

    /// The end of the lease by the monotonic clock.
    pub(crate) fn lease_until(&self) -> Instant {
        lock(&self.0.lease).monotonic
    }

    pub(crate) fn is_lease_over(&self) -> bool {
        lock(&self.0.lease).is_over()
    }

    /// Returns true if another attempt is known to own the record.
    pub(crate) fn is_lost(&self) -> bool {
        self.0.lost.load(Ordering::Acquire)
    }

    /// Returns true if its handler has ended, so that its lease is not renewed any more.
    pub(crate) fn has_ended(&self) -> bool {
        self.0.ended.load(Ordering::Acquire)
    }

    pub(crate) fn set_ended(&self) {
        self.0.ended.store(true, Ordering::Release);
    }

    pub(crate) fn set_lost(&self) {
        self.0.lost.store(true, Ordering::Release);
        self.0.lost_notify.notify_waiters();
    }
}

/// The reply to a renewal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Renewal {
    /// The lease lasts longer.
    Renewed,
    /// The attempt no longer owns its record.
    Fenced,
    /// The attempt ended while the store was asked.
    Ended,
}

impl fmt::Debug for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempt")
            .field("record", &self.0.id)
            .field("token", &self.0.grant.token.get())
            .field("number", &self.0.grant.attempts)
            .finish_non_exhaustive()
    }
}

/// The right to execute once.
///
/// It comes only from [`Engine::claim`](crate::Engine::claim) and cannot be copied. [`complete`](Self::complete) and
/// [`release`](Self::release) use it up. While it lives, its lease is renewed. Dropping it leaves the record in progress until
/// the lease ends, and then to its abandon policy. Dropping never frees the key, because the effect may have happened.
///
/// Run the methods that end the attempt in a task of its own, so that a caller that goes away does not cancel them.
#[must_use = "a permit that is dropped leaves its record to the abandon policy"]
pub struct Permit(pub(crate) Option<HeldPermit>);

/// The content of a permit that is not used up.
pub(crate) struct HeldPermit {
    pub(crate) inner: Arc<Inner>,
    pub(crate) attempt: Attempt,
    pub(crate) leader: Leader,
    /// The claim, if a reply to it was lost: it may reach the store again after the attempt has ended.
    claim: Option<Box<(ClaimRequest, AttemptId)>>,
    /// Held until the end of the attempt is stored. `None` once a search for the claim has taken it over.
    place: Option<OwnedSemaphorePermit>,
}

/// The outcome of storing the end of an attempt.
#[derive(Debug)]
#[non_exhaustive]
pub enum SettleOutcome {
    /// The end is stored.
    Done,
    /// Another attempt owns the record. Nothing was changed. Both attempts may have had an effect.
    Fenced,
    /// The store failed. The engine tries again in the background until the record's retention ends. After the lease, a
    /// claim of another process finds an abandoned record. If that claim parks it, this end can still be stored.
    Deferred(StoreError),
    /// An effect without a record may have happened: in a [step](Attempt::step) of this attempt, or in an abandoned attempt. So
    /// the key is not freed, and the record is left to its lease, as after a crash.
    LeftToLease,
}

impl Permit {
    /// The permit of an attempt that its flight names as the owner.
    pub(crate) fn new(
        inner: Arc<Inner>,
        attempt: Attempt,
        leader: Leader,
        place: Option<OwnedSemaphorePermit>,
    ) -> Self {
        inner.renewer.start(&attempt);
        Self(Some(HeldPermit { inner, attempt, leader, claim: None, place }))
    }

    /// Notes that a reply to the claim was lost before it was granted.
    pub(crate) fn claimed_in_doubt(&mut self, request: ClaimRequest, attempt: AttemptId) {
        if let Some(held) = &mut self.0 {
            held.claim = Some(Box::new((request, attempt)));
        }
    }

    /// The attempt, as its handler sees it.
    #[must_use]
    pub fn attempt(&self) -> Attempt {
        match &self.0 {
            Some(held) => held.attempt.clone(),
            None => unreachable!("a permit is used up by value"),
        }
    }

    /// The time of the claim by the store's clock, which also decides when records end.
    #[must_use]
    pub fn claimed_at(&self) -> Timestamp {
        let attempt = self.attempt();
        let lease = u64::try_from(attempt.0.policy.lease.as_millis()).unwrap_or(u64::MAX);
        Timestamp::from_millis(attempt.0.grant.lease_until.as_millis().saturating_sub(lease))
    }

    /// Ends the attempt with a result. Returns when the store has made it durable, or has failed.
    pub async fn complete(mut self, completion: Completion) -> SettleOutcome {
        match self.0.take() {
            Some(held) => {
                held.attempt.seal();
                let ending = match completion {
                    Completion::Unknown => AttemptEnd::park("the operation ended without an outcome"),
                    completion => AttemptEnd::Complete(completion),
                };
                held.settle(ending).await
            }
            None => SettleOutcome::Fenced,
        }
    }

    /// Ends the attempt with [`Completion::Unknown`] and logs a reason for the operator. The reason must not contain a key, a
    /// credential or a body.
    pub async fn park(mut self, reason: impl Into<Cow<'static, str>>) -> SettleOutcome {
        match self.0.take() {
            Some(held) => {
                held.attempt.seal();
                held.settle(AttemptEnd::park(reason)).await
            }
            None => SettleOutcome::Fenced,
        }
    }

    /// Ends an attempt that its steps leave [half-way](Attempt::is_half_way), and keeps its recorded steps for the next one.
    ///
    /// Under `reexecute`, [`StepError::fate`](crate::StepError::fate) of the failed step decides: the key is free again for the
    /// same request, or the record is left to its lease. Under `park`, or if the step needs an operator, the outcome is
    /// unknown.
    pub async fn stop(mut self) -> SettleOutcome {
        let Some(held) = self.0.take() else { return SettleOutcome::Fenced };
        let sealed = held.attempt.seal();
        let reexecutes = held.attempt.0.policy.on_abandoned == OnAbandoned::Reexecute;
        match sealed.half_way {
            Some(ErrorFate::Park) => {
                held.settle(AttemptEnd::park("a step failed and needs an operator")).await
            }
            Some(ErrorFate::Release) if reexecutes && !sealed.is_open => {
                held.settle(AttemptEnd::Release).await
            }
            _ => held.leave().await,
        }
    }

    /// Cancels a claim whose sender is gone: nothing was begun.
    pub(crate) async fn cancel(mut self) {
        if let Some(held) = self.0.take() {
            held.cancel().await;
        }
    }

    /// Ends the attempt and frees the key. Call it only if it is certain that nothing was decided.
    ///
    /// The key stays taken, and the record is left to its abandon policy, if a [step](Attempt::step) may have taken place
    /// without being recorded, or if an earlier attempt was abandoned under `reexecute`.
    pub async fn release(mut self) -> SettleOutcome {
        match self.0.take() {
            Some(held) if held.attempt.seal().is_open => held.leave().await,
            Some(held) => held.settle(AttemptEnd::Release).await,
            None => SettleOutcome::Fenced,
        }
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Permit").field(&self.0.as_ref().map(|held| &held.attempt)).finish()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(held) = self.0.take() {
            held.attempt.seal();
            held.inner.renewer.stop(&held.attempt);
            held.inner.unknown.log_abandoned(&held.attempt, "the attempt was dropped before it ended");
            held.emit(EventKind::Abandoned);
        }
    }
}

enum AttemptEnd {
    /// An end with a known outcome.
    Complete(Completion),
    /// An end without a known outcome, for this reason.
    Park(Cow<'static, str>),
    Release,
}

impl AttemptEnd {
    /// Logs that another attempt or an operator had taken the record before this end. A release is not logged: it has no effect.
    fn log_fenced(&self, attempt: &Attempt) {
        if !matches!(self, Self::Release) {
            attempt.log_fenced();
        }
    }

    fn park(reason: impl Into<Cow<'static, str>>) -> Self {
        Self::Park(reason.into())
    }

    fn command(&self, attempt: &Attempt) -> Command {
        let (token, retention) = (attempt.token(), attempt.0.policy.retention);
        match self {
            Self::Complete(completion) => {
                Command::Complete(Complete { token, completion: completion.clone(), retention })
            }
            Self::Park(_) => {
                Command::Complete(Complete { token, completion: Completion::Unknown, retention })
            }
            Self::Release => {
                let retention = attempt.0.policy.released_retention();
                Command::Release(Release { token, retention })
            }
        }
    }

    const fn event(&self) -> EventKind {
        match self {
            Self::Complete(Completion::Replayable(_)) => EventKind::Completed,
            Self::Park(_) | Self::Complete(Completion::Unknown) => EventKind::Parked,
            Self::Complete(_) => EventKind::Tombstoned,
            Self::Release => EventKind::Released,
        }
    }

    /// The outcome for claims of the same request that wait in this process.
    fn shared(self) -> SharedOutcome {
        match self {
            Self::Complete(Completion::Replayable(response)) => SharedOutcome::Replay(response),
            Self::Park(_) | Self::Complete(Completion::Unknown) => SharedOutcome::Unknown,
            Self::Complete(_) => SharedOutcome::Unreplayable,
            Self::Release => SharedOutcome::AskAgain,
        }
    }
}

impl HeldPermit {
    pub(crate) fn emit(&self, kind: EventKind) {
        self.inner.emit(Event::new(self.attempt.record_id(), Some(self.attempt.token()), kind));
    }

    async fn cancel(mut self) {
        if self.attempt.is_after_abandoned() {
            // Nothing was begun under this claim, but an earlier one was abandoned. To free the key would forget that.
            self.inner.renewer.stop(&self.attempt);
            return self.emit(EventKind::Abandoned);
        }
        match self.try_settle(&AttemptEnd::Release).await {
            Err(SettleError::Failed(_)) => self.defer(AttemptEnd::Release),
            _ => {
                self.inner.renewer.stop(&self.attempt);
                self.emit(EventKind::ClaimCancelled);
                self.retract_late_claim();
            }
        }
    }

    /// Ends an attempt whose effect is unknown. Under `park`, the record is parked now. Under other policies it is left to its
    /// lease, as after a crash.
    async fn leave(self) -> SettleOutcome {
        if self.attempt.0.policy.on_abandoned == OnAbandoned::Park {
            return self.settle(AttemptEnd::park("a step may have taken place without being recorded")).await;
        }
        self.inner.renewer.stop(&self.attempt);
        self.emit(EventKind::Abandoned);
        SettleOutcome::LeftToLease
    }

    async fn settle(self, ending: AttemptEnd) -> SettleOutcome {
        self.emit(EventKind::Executed);
        match self.try_settle(&ending).await {
            Ok(()) => {
                self.finish(ending);
                SettleOutcome::Done
            }
            Err(SettleError::Fenced) => {
                self.log_fenced(&ending);
                self.fenced();
                SettleOutcome::Fenced
            }
            Err(SettleError::Failed(error)) => {
                self.emit(EventKind::SettlementDeferred(error.kind()));
                self.defer(ending);
                SettleOutcome::Deferred(error)
            }
        }
    }

    async fn try_settle(&self, ending: &AttemptEnd) -> Result<(), SettleError> {
        self.inner.end(&self.attempt, ending).await
    }

    fn finish(mut self, ending: AttemptEnd) {
        self.inner.renewer.stop(&self.attempt);
        if let AttemptEnd::Park(reason) = &ending {
            self.inner.unknown.log(&self.attempt, reason);
        }
        self.emit(ending.event());
        if matches!(ending, AttemptEnd::Release) {
            self.retract_late_claim();
        }
        self.leader.finish(ending.shared());
    }

    /// Looks for a claim that may still reach the store after a release, because a reply to it was lost. The store would
    /// grant it.
    pub(crate) fn retract_late_claim(&mut self) {
        if let Some(claim) = self.claim.take() {
            let (request, attempt) = *claim;
            self.inner.retract(request, attempt, self.place.take());
        }
    }

    fn log_fenced(&self, ending: &AttemptEnd) {
        ending.log_fenced(&self.attempt);
    }

    pub(crate) fn fenced(self) {
        self.inner.renewer.stop(&self.attempt);
        self.attempt.set_lost();
        self.emit(EventKind::Fenced);
    }

    /// Tries again in the background until the record is past its retention. The lease is no longer renewed. Until it ends,
    /// all claims of this process find the request in progress. After that, each of them first tries to store this end. The
    /// store accepts it under the current token, even for a record that was parked in the meantime.
    fn defer(self, ending: AttemptEnd) {
        self.inner.renewer.stop(&self.attempt);
        let (ending, held) = self.inner.hold(ending, &self.attempt);
        let inner = self.inner.clone();
        let deferred = inner.deferred.add(self.attempt.record_id(), ());
        inner.tasks.spawn(async move {
            let _held = (held, deferred);
            let lease_until = self.attempt.lease_until();
            let mut pause = FIRST_PAUSE;
            loop {
                let again = (Instant::now() + pause).min(lease_until);
                tokio::time::sleep_until(again).await;
                match self.try_settle(&ending).await {
                    Ok(()) => return self.finish(ending),
                    Err(SettleError::Fenced) => {
                        self.log_fenced(&ending);
                        return self.fenced();
                    }
                    Err(SettleError::Failed(error)) if !error.kind().may_pass() || again >= lease_until => {
                        return self.outlast(ending, error).await;
                    }
                    Err(SettleError::Failed(error)) => {
                        pause = again_after((pause * 2).min(MAX_PAUSE), &error)
                    }
                }
            }
        });
    }

    /// Tries again after the lease. Waiting claims ask the store themselves.
    async fn outlast(self, ending: AttemptEnd, mut error: StoreError) {
        let Self { inner, attempt, leader, claim, place } = self;
        let record = attempt.record_id();
        let give_up = Instant::now() + attempt.0.policy.retention;
        let unstored = UnstoredEnd {
            attempt,
            ending,
            claim: Mutex::new(claim),
            place: Mutex::new(place),
            stored: tokio::sync::Mutex::default(),
        };
        let unstored = inner.unstored.add(record, unstored);
        drop(leader);
        if error.kind().may_pass() {
            tracing::warn!(
                %record,
                error = %ErrorChain(&error),
                "the end of an attempt could not be stored before its lease was over; the engine tries again until the \
                 retention of the record is over"
            );
        }
        while error.kind().may_pass() && Instant::now() < give_up {
            tokio::time::sleep(again_after(MAX_PAUSE, &error)).await;
            match inner.store_end(&unstored).await {
                Ok(()) => return,
                Err(again) => error = again,
            }
        }
        tracing::error!(%record, error = %ErrorChain(&error), "the end of an attempt could not be stored; the engine gives up");
        inner.unknown.log_abandoned(&unstored.attempt, "its end could not be stored");
        inner.emit(Event::new(record, Some(unstored.attempt.token()), EventKind::SettlementLost));
    }
}

/// The end of an attempt that could not be stored before the lease was over.
pub(crate) struct UnstoredEnd {
    attempt: Attempt,
    ending: AttemptEnd,
    claim: Mutex<Option<Box<(ClaimRequest, AttemptId)>>>,
    place: Mutex<Option<OwnedSemaphorePermit>>,
    /// True once the store has accepted or refused the end. Locked while the end is sent, so that it is sent by one task only.
    stored: tokio::sync::Mutex<bool>,
}

impl UnstoredEnd {
    /// The attempt that has ended.
    pub(crate) const fn attempt(&self) -> &Attempt {
        &self.attempt
    }
}

/// The reason why the end of an attempt is not stored.
enum SettleError {
    /// Another attempt owns the record.
    Fenced,
    /// The store failed.
    Failed(StoreError),
}

impl Inner {
    /// Takes a place for a claim and the attempt that may follow.
    ///
    /// It is held until the store has accepted the end of the attempt, or until the search for a doubtful claim is over. An
    /// end that is known must never be given up for want of space: without it, an attempt after the lease would execute
    /// again. So the space is taken before the claim is sent.
    ///
    /// # Errors
    /// [`limits::MAX_UNSETTLED`] attempts run or wait for the store. Nothing was sent.
    pub(crate) fn place(&self) -> Result<OwnedSemaphorePermit, StoreError> {
        self.places.clone().try_acquire_owned().map_err(|_| {
            let reason =
                format!("{} attempts run, or wait for the store to accept their end", limits::MAX_UNSETTLED);
            // As a store that is full: a client that takes all places must not look like an outage of the store.
            StoreError::unavailable(reason).with_extent(Extent::Writes).with_nothing_sent()
        })
    }

    /// Reserves memory for the response of an end that the store has not accepted, until the reservation is dropped. If there
    /// is no memory left, the end loses its response, so that the record at least shows that the operation took place.
    fn hold(&self, ending: AttemptEnd, attempt: &Attempt) -> (AttemptEnd, Option<OwnedSemaphorePermit>) {
        let AttemptEnd::Complete(Completion::Replayable(response)) = &ending else { return (ending, None) };
        match self.hold_response(response) {
            Some(held) => (ending, Some(held)),
            None => {
                tracing::error!(
                    record = %attempt.record_id(),
                    "too many responses wait for the store: this attempt is recorded as done, without its response"
                );
                (AttemptEnd::Complete(Completion::Tombstone), None)
            }
        }
    }

    /// Reserves memory for a response that the store has not accepted, if there is any left.
    pub(crate) fn hold_response(&self, response: &StoredResponse) -> Option<OwnedSemaphorePermit> {
        let kib = u32::try_from(response.as_encoded().len().div_ceil(1024)).ok()?;
        self.deferred_kib.clone().try_acquire_many_owned(kib).ok()
    }

    /// Sends the end of an attempt to the store, once.
    async fn end(&self, attempt: &Attempt, ending: &AttemptEnd) -> Result<(), SettleError> {
        let (id, command) = (attempt.record_id(), ending.command(attempt));
        let reply = match self.store.try_apply(id, &command) {
            Some(reply) => reply,
            None => self.store.apply(id, command).await,
        };
        match reply {
            Ok(Outcome::Completed | Outcome::Released) => Ok(()),
            Ok(Outcome::Fenced) => Err(SettleError::Fenced),
            Ok(other) => {
                let error =
                    StoreError::invalid(format!("the store answered {other:?} to the end of an attempt"));
                Err(SettleError::Failed(error))
            }
            Err(error) => Err(SettleError::Failed(error)),
        }
    }

    /// Tries to store an end whose lease is over.
    ///
    /// # Errors
    /// The error of the store.
    pub(crate) async fn store_end(self: &Arc<Self>, unstored: &UnstoredEnd) -> Result<(), StoreError> {
        let mut stored = unstored.stored.lock().await;
        if *stored {
            return Ok(());
        }
        let kind = match self.end(&unstored.attempt, &unstored.ending).await {
            Ok(()) => unstored.ending.event(),
            Err(SettleError::Fenced) => {
                unstored.ending.log_fenced(&unstored.attempt);
                unstored.attempt.set_lost();
                EventKind::Fenced
            }
            Err(SettleError::Failed(error)) => return Err(error),
        };
        *stored = true;
        if let (EventKind::Parked, AttemptEnd::Park(reason)) = (kind, &unstored.ending) {
            self.unknown.log(&unstored.attempt, reason);
        }
        self.emit(Event::new(unstored.attempt.record_id(), Some(unstored.attempt.token()), kind));
        let claim = lock(&unstored.claim).take();
        if let (EventKind::Released, Some(claim)) = (kind, claim) {
            let (request, attempt) = *claim;
            self.retract(request, attempt, lock(&unstored.place).take());
        }
        Ok(())
    }
}

/// The first and the longest pause between two tries to store the end of an attempt. The longest is short, because a claim of
/// another process may come first after the store is back, and park the record.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const MAX_PAUSE: Duration = Duration::from_secs(2);

/// The pause before a store that failed is asked again: at most `pause`. It is short if nothing was sent, because such a try
/// costs nothing.
pub(crate) fn again_after(pause: Duration, error: &StoreError) -> Duration {
    const SOON: Duration = Duration::from_millis(250);
    if error.is_unsent() { pause.min(SOON) } else { pause }
}

/// The limit on renewals in [`Attempt::confirm_lease`] if each lease is over before it could be used.
const MAX_RENEWALS: usize = 3;
