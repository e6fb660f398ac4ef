//! The guard of a store against processes with another id secret, or with none.
//!
//! The id of a record is the only way to find it. A process that computes ids in another way than the others on its store sees
//! only new keys, and executes every retry again. So a store belongs to one id secret, or to none, and it says so itself: a
//! record with a constant id, the *mark*, is claimed with an attempt and a fingerprint that are derived from the secret. By the
//! rules of [`decide`](crate::decide()), a claim with the same secret renews the mark, and one with another secret is a
//! mismatch, atomically on every store and without a command of its own.
//!
//! ```text
//!                    no secret here                        a secret here
//!  no mark           serves                                records: refused
//!                                                          none: claims the mark on trial, waits, looks for records again,
//!                                                                and claims it for good
//!  mark of another   refused                               refused
//!  own mark          -                                     on trial: waits; for good: serves, renews it
//! ```
//!
//! A successful check counts for [`VALID`] from the moment at which it began. A claim without a valid check asks first. If the
//! mark is out of reach then, a process that has served goes on: on a cluster, the record may be on another node than the mark.
//! A process that has not served yet executes nothing before its first check. The
//! trial lasts longer than a check is valid, so a process without a secret that found no mark has stopped, or has written a
//! record, before a process with a secret executes anything. A store in this process needs no trial.
//!
//! The mark is on trial while its retention is [`TRIAL_RETENTION`], and then lapses by itself. The process that ends the trial
//! renews the mark under the token that it had during the trial, so the mark has never been absent in between. It is there for
//! good with the longest retention, [`limits::MAX_RETENTION`]. Each renewal extends that, so the mark outlives every record.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::clock::{Clock, SystemClock};
use crate::decide::{Claim, Command, OnAbandoned, Outcome, Release, Renew};
use crate::delegate_store;
use crate::id::{CallerTag, FencingToken, RecordId};
use crate::id_secret::{IdScheme, IdSecret, IdSecretName};
use crate::limits;
use crate::record::{Label, Record, State};
use crate::store::{Advisory, Extent, IntoStore, ListPage, ListQuery, Store, StoreError, StoreFuture};

/// The record that marks a store as that of one id secret: `SHA-256("oncegate-id-secret-1")`. No request has it.
pub const ID_SECRET_RECORD: RecordId = RecordId::from_bytes([
    0x3a, 0x75, 0x29, 0x7e, 0x59, 0x71, 0x97, 0xee, 0x0c, 0xe1, 0x8f, 0xc3, 0x7d, 0xbf, 0x72, 0x73, 0x15,
    0x93, 0x7c, 0x8c, 0x01, 0xac, 0x21, 0x4d, 0x7c, 0x7b, 0xbc, 0x0a, 0x3c, 0x33, 0x3c, 0xac,
]);

/// The time for which a successful check counts. Under load, one claim in half of this time checks again.
const VALID: Duration = Duration::from_secs(4);

/// The length of a trial: longer than [`VALID`], and than a claim is on its way.
const TRIAL: Duration = Duration::from_secs(6);

/// The lease and the retention of a mark on trial: long enough for a process that checks once a minute.
const TRIAL_LEASE: Duration = Duration::from_secs(30);
const TRIAL_RETENTION: Duration = Duration::from_secs(90);

/// The time after which a process renews the mark: half of its lease.
const RENEW_AFTER: Duration = Duration::from_secs(30 * 60);

/// The time for which a refusal is repeated without asking the store again.
const REFUSED_FOR: Duration = Duration::from_secs(1);

/// The time for which a process that has served goes on without a check after one failed: a node of a cluster that is away
/// answers after seconds only, and most claims do not concern it.
const FAILED_FOR: Duration = Duration::from_secs(10);

/// The most records that one page of the search for records asks for. One is enough to know.
const PAGE: usize = 16;

/// The operation in the label of the mark, around the name of the secret.
const LABEL: (&str, &str) = ("id secret ", " of this store (not a request)");

/// The reason why a process may not use a store with its id secret, or without one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IdProblem {
    /// The store belongs to a secret, and this process has none.
    #[error(
        "the store belongs to the id secret {}, and this process has none: without it every key would be new, and retries would \
         execute again. Configure that id secret, or use another store",
        named(store)
    )]
    Missing {
        /// The secret of the store, if the store names it.
        store: Option<IdSecretName>,
    },
    /// The store belongs to another secret.
    #[error(
        "the store belongs to the id secret {}, and this process has {own}: with it every key would be new, and retries would \
         execute again. Configure the id secret of the store, or use another store",
        named(store)
    )]
    Other {
        /// The secret of the store, if the store names it.
        store: Option<IdSecretName>,
        /// The secret of this process.
        own: IdSecretName,
    },
    /// The store has records from before the secret.
    #[error(
        "the store has records without the id secret {own}: with it their keys would be new, and retries would execute again. Use an \
         empty store (another schema, prefix or directory). If the records are of this secret, and the store has lost the record \
         that marks it, start this process again after one that still serves has put it back; never remove the secret"
    )]
    HasRecords {
        /// The secret of this process.
        own: IdSecretName,
    },
    /// The store is new to the secret, and the first process with it waits for others to notice.
    #[error("the store is new to the id secret {own}, and is used from {} s on, if no process without it writes", left.as_secs() + 1)]
    Trial {
        /// The secret of this process.
        own: IdSecretName,
        /// The rest of the trial.
        left: Duration,
    },
}

fn named(name: &Option<IdSecretName>) -> String {
    name.map_or_else(|| "of another program".to_owned(), |name| name.to_string())
}

impl IdProblem {
    /// Returns true if it ends by itself.
    #[must_use]
    pub const fn is_temporary(&self) -> bool {
        matches!(self, Self::Trial { .. })
    }
}

impl From<IdProblem> for StoreError {
    /// Neither is an outage of the store, so none lets a request pass without protection.
    fn from(problem: IdProblem) -> Self {
        let error = match problem.is_temporary() {
            true => Self::unavailable(problem.to_string()).with_extent(Extent::Record),
            false => Self::invalid(problem.to_string()),
        };
        error.with_nothing_sent()
    }
}

impl IdScheme {
    /// The reason why a process with these identities may not use a store, by the [mark](ID_SECRET_RECORD) of the store and by
    /// whether it has other records: for programs that examine a store without using it.
    #[must_use]
    pub fn problem_with(&self, mark: Option<&Record>, has_records: bool) -> Option<IdProblem> {
        match (self.secret(), mark.filter(|mark| binds(mark))) {
            (None, Some(mark)) => Some(IdProblem::Missing { store: name_in(mark) }),
            (Some(secret), Some(mark)) if mark.fingerprint != secret.mark_fingerprint() => {
                Some(IdProblem::Other { store: name_in(mark), own: secret.name() })
            }
            (Some(secret), None) if has_records => Some(IdProblem::HasRecords { own: secret.name() }),
            _ => None,
        }
    }
}

/// The reason why a check failed.
enum CheckError {
    Problem(IdProblem),
    Store(StoreError),
}

impl From<IdProblem> for CheckError {
    fn from(problem: IdProblem) -> Self {
        Self::Problem(problem)
    }
}

impl From<StoreError> for CheckError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// A store that refuses claims until it is known that its records have the ids that this process computes. See the
/// page of its module.
///
/// The engine puts it around its store. It hides the mark from listings, and no operator can resolve it.
pub struct IdGuard {
    store: Arc<dyn Store>,
    ids: IdScheme,
    clock: Arc<dyn Clock>,
    /// The times, in milliseconds of the clock's `elapsed`, from which a claim checks again, and from which the last check no
    /// longer counts.
    check_from: AtomicU64,
    valid_until: AtomicU64,
    /// The time until which a failed check is not repeated.
    failed_until: AtomicU64,
    /// True if a check has succeeded, and none has found another secret since.
    has_passed: AtomicBool,
    /// True while a claim checks again before the last check ends to count.
    is_checking: AtomicBool,
    state: Mutex<GuardState>,
}

#[derive(Default)]
struct GuardState {
    /// The result of the last check, and its time, if it was a refusal.
    problem: Option<(IdProblem, Duration)>,
    /// The time at which this process saw the mark on trial first, and the mark's token.
    trial: Option<(Duration, FencingToken)>,
    /// The time at which this process renewed the mark last.
    renewed_at: Option<Duration>,
}

impl IdGuard {
    /// Guards a store whose records have these identities.
    #[must_use]
    pub fn new(store: impl IntoStore, ids: IdScheme) -> Self {
        Self::with_clock(store, ids, SystemClock::new())
    }

    /// The same, with another clock, of which only the elapsed time counts.
    #[must_use]
    pub fn with_clock(store: impl IntoStore, ids: IdScheme, clock: impl Clock) -> Self {
        Self {
            store: store.into_store(),
            ids,
            clock: Arc::new(clock),
            check_from: AtomicU64::new(0),
            valid_until: AtomicU64::new(0),
            failed_until: AtomicU64::new(0),
            has_passed: AtomicBool::new(false),
            is_checking: AtomicBool::new(false),
            state: Mutex::default(),
        }
    }

    /// The identities of the records.
    #[must_use]
    pub const fn ids(&self) -> &IdScheme {
        &self.ids
    }

    /// The reason why the last check refused claims; `None` if it succeeded, or if there was none.
    #[must_use]
    pub fn problem(&self) -> Option<IdProblem> {
        self.state().problem.map(|(problem, _)| problem)
    }

    /// Checks now.
    ///
    /// # Errors
    /// An [`IdProblem`] as [`Invalid`](crate::StoreErrorKind::Invalid), or, if it ends by itself, as
    /// [`Unavailable`](crate::StoreErrorKind::Unavailable). Otherwise the error of the store.
    pub fn verify(&self) -> StoreFuture<'_, ()> {
        Box::pin(async { self.check_now().await.map_err(store_error) })
    }

    /// Checks unless the last check still counts, as a claim does. For programs that claim without this store.
    ///
    /// # Errors
    /// As for [`verify`](Self::verify).
    pub fn admit(&self) -> StoreFuture<'_, ()> {
        Box::pin(async { self.ensure().await.map_err(store_error) })
    }

    /// The time of a lookup that [`judge`](Self::judge) gets; `None` if the last check still counts, so that none is needed.
    #[must_use]
    pub fn begin_judgement(&self) -> Option<Duration> {
        (!self.is_fresh()).then(|| self.clock.elapsed())
    }

    /// Checks the [mark](ID_SECRET_RECORD) that a program looked up itself, for example on a connection that it holds. It begins
    /// no trial: if the store is new to the secret, [`verify`](Self::verify) it first.
    ///
    /// # Errors
    /// As for [`verify`](Self::verify).
    pub fn judge(&self, begun: Duration, mark: Option<&Record>) -> Result<(), StoreError> {
        let mark = mark.filter(|mark| binds(mark));
        let problem = match (self.ids.problem_with(mark, false), self.ids.secret()) {
            (None, Some(secret)) if !mark.is_some_and(is_for_good) => {
                Some(IdProblem::Trial { own: secret.name(), left: TRIAL })
            }
            (problem, _) => problem,
        };
        match problem {
            Some(problem) => Err(problem.into()),
            None => {
                self.permit(begun);
                Ok(())
            }
        }
    }

    /// Returns true if a check of this process has succeeded once, and none has found another secret since.
    fn has_passed(&self) -> bool {
        self.has_passed.load(Ordering::Acquire)
    }

    /// Lets claims pass because of a check that began at this time.
    fn permit(&self, begun: Duration) {
        self.has_passed.store(true, Ordering::Release);
        let until = |time: Duration| u64::try_from((begun + time).as_millis()).unwrap_or(u64::MAX);
        self.failed_until.store(0, Ordering::Release);
        self.valid_until.fetch_max(until(VALID), Ordering::AcqRel);
        self.check_from.fetch_max(until(VALID / 2), Ordering::AcqRel);
    }

    fn state(&self) -> std::sync::MutexGuard<'_, GuardState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn millis(&self) -> u64 {
        u64::try_from(self.clock.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Returns true if the last check counts, and no claim needs to check again.
    fn is_fresh(&self) -> bool {
        self.millis() < self.check_from.load(Ordering::Acquire)
    }

    fn is_valid(&self) -> bool {
        self.millis() < self.valid_until.load(Ordering::Acquire)
    }

    /// Checks if necessary.
    async fn ensure(&self) -> Result<(), CheckError> {
        if self.is_fresh() {
            return Ok(());
        }
        if self.is_valid() {
            // One claim checks, and the others go on.
            if self.is_checking.swap(true, Ordering::AcqRel) {
                return Ok(());
            }
            let _turn = Turn(&self.is_checking);
            return match self.check_now().await {
                Err(CheckError::Store(_)) => Ok(()),
                checked => checked,
            };
        }
        if self.has_passed() && self.millis() < self.failed_until.load(Ordering::Acquire) {
            return Ok(());
        }
        let refused = self.state().problem;
        if let Some((problem, at)) = refused
            && self.clock.elapsed() < at + REFUSED_FOR
        {
            return Err(problem.into());
        }
        self.check_now().await
    }

    async fn check_now(&self) -> Result<(), CheckError> {
        let begun = self.clock.elapsed();
        let checked = match self.ids.secret() {
            None => self.check_without_secret().await,
            Some(secret) => self.check_with(secret).await,
        };
        match &checked {
            Ok(()) => {
                self.permit(begun);
                let mut state = self.state();
                (state.problem, state.trial) = (None, None);
            }
            // Two checks ran at once, and the other one has ended the trial since this one looked at the clock.
            Err(CheckError::Problem(problem)) if problem.is_temporary() && self.is_valid() => return Ok(()),
            Err(CheckError::Problem(problem)) => {
                self.has_passed.store(false, Ordering::Release);
                self.check_from.store(0, Ordering::Release);
                self.valid_until.store(0, Ordering::Release);
                self.state().problem = Some((*problem, self.clock.elapsed()));
            }
            // After a success in between, the next check must not be left out.
            Err(CheckError::Store(_)) if !self.is_valid() => {
                let until = self.clock.elapsed() + FAILED_FOR;
                self.failed_until
                    .store(u64::try_from(until.as_millis()).unwrap_or(u64::MAX), Ordering::Release);
            }
            Err(CheckError::Store(_)) => {}
        }
        checked
    }

    async fn check_without_secret(&self) -> Result<(), CheckError> {
        match self.mark().await? {
            Some(mark) => Err(IdProblem::Missing { store: name_in(&mark) }.into()),
            None => Ok(()),
        }
    }

    /// The mark, if it is there and binds the store.
    async fn mark(&self) -> Result<Option<Record>, StoreError> {
        Ok(self.store.lookup(ID_SECRET_RECORD).await?.filter(binds))
    }

    async fn check_with(&self, secret: &IdSecret) -> Result<(), CheckError> {
        let (own, has_passed) = (secret.name(), self.has_passed());
        match self.mark().await? {
            Some(mark) if mark.fingerprint != secret.mark_fingerprint() => {
                Err(IdProblem::Other { store: name_in(&mark), own }.into())
            }
            Some(mark) if is_for_good(&mark) => self.renew(secret).await,
            // The store lost the mark, or an older state of it came back. It is not new to the secret.
            _ if has_passed => self.claim_for_good(secret).await,
            Some(mark) => self.end_trial(secret, mark.token).await,
            None if self.has_records().await? => self.check_other_trial(secret).await,
            None if !self.store.capabilities().is_shared => self.claim_for_good(secret).await,
            None => {
                let token = self.claim_mark(secret, TRIAL_LEASE, TRIAL_RETENTION).await?;
                self.end_trial(secret, token).await
            }
        }
    }

    /// Succeeds if another process with the secret has ended the trial. Then the records in the store may be its own.
    async fn check_other_trial(&self, secret: &IdSecret) -> Result<(), CheckError> {
        let own = secret.name();
        match self.mark().await? {
            Some(mark) if mark.fingerprint != secret.mark_fingerprint() => {
                Err(IdProblem::Other { store: name_in(&mark), own }.into())
            }
            Some(mark) if is_for_good(&mark) => Ok(()),
            _ => Err(IdProblem::HasRecords { own }.into()),
        }
    }

    /// Ends the trial if it is over and no records came.
    async fn end_trial(&self, secret: &IdSecret, token: FencingToken) -> Result<(), CheckError> {
        let (own, now) = (secret.name(), self.clock.elapsed());
        let since = match &mut self.state().trial {
            Some((since, of)) if *of == token => *since,
            trial => trial.insert((now, token)).0,
        };
        let left = TRIAL.saturating_sub(now.saturating_sub(since));
        if !left.is_zero() {
            return Err(IdProblem::Trial { own, left }.into());
        }
        if self.has_records().await? {
            return self.check_other_trial(secret).await;
        }
        let renew = Renew { token, lease: limits::MAX_LEASE, retention: limits::MAX_RETENTION };
        match self.store.apply(ID_SECRET_RECORD, Command::Renew(renew)).await? {
            Outcome::Renewed { .. } => Ok(()),
            // It has lapsed meanwhile. The next check begins another trial.
            _ => Err(IdProblem::Trial { own, left: TRIAL }.into()),
        }
    }

    /// Returns true if the store has a record other than the mark.
    async fn has_records(&self) -> Result<bool, StoreError> {
        let mut query = ListQuery { limit: PAGE, ..ListQuery::default() };
        loop {
            let page = self.store.list(query.clone()).await?;
            let ids = page.records.iter().map(|(id, _)| *id).chain(page.unreadable);
            if ids.into_iter().any(|id| id != ID_SECRET_RECORD) {
                return Ok(true);
            }
            query.after = page.next;
            if query.after.is_none() {
                return Ok(false);
            }
        }
    }

    /// Extends the life of a mark that is there for good, now and then. If the store takes no writes, the mark stays as it is,
    /// and so do the records.
    async fn renew(&self, secret: &IdSecret) -> Result<(), CheckError> {
        let (now, renewed_at) = (self.clock.elapsed(), self.state().renewed_at);
        if renewed_at.is_some_and(|at| now < at + RENEW_AFTER) {
            return Ok(());
        }
        match self.claim_for_good(secret).await {
            Err(CheckError::Store(_)) => Ok(()),
            renewed => renewed,
        }
    }

    async fn claim_for_good(&self, secret: &IdSecret) -> Result<(), CheckError> {
        let begun = self.clock.elapsed();
        self.claim_mark(secret, limits::MAX_LEASE, limits::MAX_RETENTION).await?;
        self.state().renewed_at = Some(begun);
        Ok(())
    }

    async fn claim_mark(
        &self,
        secret: &IdSecret,
        lease: Duration,
        retention: Duration,
    ) -> Result<FencingToken, CheckError> {
        let operation = format!("{}{}{}", LABEL.0, secret.name(), LABEL.1);
        let claim = Claim {
            attempt: secret.mark_attempt(),
            fingerprint: secret.mark_fingerprint(),
            lease,
            retention,
            on_abandoned: OnAbandoned::Park,
            label: Label::new(CallerTag::default(), &operation),
        };
        match self.store.apply(ID_SECRET_RECORD, Command::Claim(claim)).await? {
            Outcome::Execute(grant) => Ok(grant.token),
            Outcome::Mismatch => {
                let store = self.mark().await?.and_then(|mark| name_in(&mark));
                Err(IdProblem::Other { store, own: secret.name() }.into())
            }
            // A claim of the same attempt is granted, unless the first one is still being committed.
            Outcome::InProgress { .. } => {
                let what = "another process with the same id secret is marking the store at this moment";
                Err(StoreError::unavailable(what).with_extent(Extent::Record).into())
            }
            _ => {
                let what = "the record that marks the id secret of the store was changed by another program";
                Err(StoreError::invalid(what).into())
            }
        }
    }

    async fn claim_checked(&self, id: RecordId, command: Command) -> Result<Outcome, StoreError> {
        match self.ensure().await {
            Ok(()) => self.store.apply(id, command).await,
            // The mark is out of reach, and the record may not be: on a cluster they are on two nodes. A store that was the right
            // one when this process last asked still is.
            Err(CheckError::Store(error)) if error.kind().may_pass() && self.has_passed() => {
                self.store.apply(id, command).await
            }
            // A cache before the store may still replay. Nothing executes before the first check.
            Err(CheckError::Store(error)) if error.kind().may_pass() => {
                let retention = match &command {
                    Command::Claim(claim) => claim.retention,
                    _ => limits::MIN_RETENTION,
                };
                let outcome = self.store.apply(id, command).await?;
                let Outcome::Execute(grant) = &outcome else { return Ok(outcome) };
                let Err(error) = self.check_now().await else { return Ok(outcome) };
                // To free the key would forget that an earlier attempt may have taken effect.
                if !grant.after_abandoned {
                    let release = Command::Release(Release { token: grant.token, retention });
                    // If this fails, the record is left to its lease.
                    let _released = self.store.apply(id, release).await;
                }
                let why = store_error(error);
                let what = "nothing was executed: the id secret could not be checked";
                Err(StoreError::unavailable(what).with_source(why).with_extent(Extent::Record))
            }
            Err(error) => Err(store_error(error)),
        }
    }
}

fn store_error(error: CheckError) -> StoreError {
    match error {
        CheckError::Problem(problem) => problem.into(),
        CheckError::Store(error) => error,
    }
}

/// The turn of a claim to check again.
struct Turn<'a>(&'a AtomicBool);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Returns true unless a program released the mark: then any claim is granted.
fn binds(mark: &Record) -> bool {
    mark.state != State::Released
}

/// Returns true if the mark is not on trial.
fn is_for_good(mark: &Record) -> bool {
    match mark.state {
        State::InProgress { lease_until, .. } => mark.expires_at.since(lease_until) > 2 * TRIAL_RETENTION,
        _ => true,
    }
}

/// The name of the secret in the label of a mark.
fn name_in(mark: &Record) -> Option<IdSecretName> {
    let rest = mark.label.operation().strip_prefix(LABEL.0)?;
    IdSecretName::from_hex(rest.strip_suffix(LABEL.1)?)
}

impl Store for IdGuard {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        if id == ID_SECRET_RECORD {
            let what = "this record marks the id secret of the store, and is no request: nothing changes it";
            return Box::pin(std::future::ready(Err(StoreError::invalid(what).with_extent(Extent::Record))));
        }
        match command {
            Command::Claim(_) if !self.is_fresh() => Box::pin(self.claim_checked(id, command)),
            command => self.store.apply(id, command),
        }
    }

    fn try_apply(&self, id: RecordId, command: &Command) -> Option<Result<Outcome, StoreError>> {
        if id == ID_SECRET_RECORD || (matches!(command, Command::Claim(_)) && !self.is_fresh()) {
            return None;
        }
        self.store.try_apply(id, command)
    }

    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage> {
        let page = self.store.list(query);
        Box::pin(async move {
            let mut page = page.await?;
            page.records.retain(|(id, _)| *id != ID_SECRET_RECORD);
            Ok(page)
        })
    }

    /// Also checks that claims are not refused.
    fn check(&self) -> StoreFuture<'_, ()> {
        Box::pin(async {
            self.store.check().await?;
            self.verify().await
        })
    }

    fn advisories(&self) -> Vec<Advisory> {
        let problem = self.problem().map(|problem| Advisory::new("id-secret", problem.to_string()));
        self.store.advisories().into_iter().chain(problem).collect()
    }

    delegate_store!(self, self.store => lookup purge audit changed usage clock_skew accept_clock now capabilities);
}

impl fmt::Debug for IdGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdGuard")
            .field("store", &self.store.capabilities().name)
            .field("ids", &self.ids)
            .field("problem", &self.problem())
            .finish_non_exhaustive()
    }
}
