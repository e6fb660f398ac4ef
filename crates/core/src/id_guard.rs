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
//! A successful check counts for [`VALID`] from the moment at which it began, by both clocks of the machine: the monotonic one
//! stands still while the machine is suspended. A claim without a valid check asks first. If the check ends to count while the
//! claim is on its way, a granted claim asks again before it executes. If the mark cannot be read then, a process that has
//! served goes on: on a cluster, the record may be on another node than the mark. It asks again at once, one claim after the
//! other, and a failed check counts no longer than a successful one. A process that has not served yet executes and
//! writes nothing before its first check.
//!
//! A grant that follows a check within [`VALID`] is in the store less than [`TRIAL`] after that check. So a process without a
//! secret that found no mark has stopped, or has written a record, before a process with a secret ends its trial and executes
//! anything. Applications write records in transactions of their own, which may be longer: each began before a check of theirs
//! ended to count, so the trial also waits for all that are open at its end, and then looks for records. A store in this process
//! needs no trial.
//!
//! A process that has found the mark of another secret never serves, not even if that mark is gone later: the store may have lost
//! it and kept the records. An operator who empties a store starts its processes again.
//!
//! The mark is on trial while its retention is [`TRIAL_RETENTION`], and then lapses by itself. The process that ends the trial
//! renews the mark under the token that it had during the trial, so the mark has never been absent in between. It is there for
//! good with the longest retention, [`limits::MAX_RETENTION`]. Each renewal extends that, so the mark outlives every record.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::clock::{Clock, SystemClock, Timestamp};
use crate::decide::{Claim, Command, Grant, OnAbandoned, Outcome, Release, Renew};
use crate::delegate_store;
use crate::id::{CallerTag, FencingToken, RecordId};
use crate::id_secret::{IdScheme, IdSecret, IdSecretName};
use crate::limits;
use crate::record::{Label, Record, State};
use crate::store::{
    Advisory, Extent, IntoStore, ListPage, ListQuery, Store, StoreError, StoreErrorKind, StoreFuture, Survey,
    SurveyQuery,
};

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

/// The shortest time from the beginning of a failed check to that of the next one.
const RETRY_AFTER: Duration = Duration::from_secs(1);

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
         execute again. Configure that id secret, or use another store, and start this process again",
        named(store)
    )]
    Missing {
        /// The secret of the store, if the store names it.
        store: Option<IdSecretName>,
    },
    /// The store belongs to another secret.
    #[error(
        "the store belongs to the id secret {}, and this process has {own}: with it every key would be new, and retries would \
         execute again. Configure the id secret of the store, or use another store, and start this process again",
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
         that marks it, a process that still serves puts it back, and so does `oncegate id-secret restore`; never remove the secret"
    )]
    HasRecords {
        /// The secret of this process.
        own: IdSecretName,
    },
    /// The store is new to the secret, and the first process with it waits for others to notice.
    #[error("the store is new to the id secret {own}, and is used from {} s on, if no process without it writes", left.as_millis().div_ceil(1000))]
    Trial {
        /// The secret of this process.
        own: IdSecretName,
        /// The rest of the trial.
        left: Duration,
    },
    /// The store is new to the secret, and transactions that began before may still write records without it.
    #[error(
        "the store is new to the id secret {own}, and is used as soon as the {count} transactions have ended that were open in its \
         database, if none of them wrote a record without it"
    )]
    OpenTransactions {
        /// The secret of this process.
        own: IdSecretName,
        /// The number of transactions that are still open.
        count: usize,
    },
}

fn named(name: &Option<IdSecretName>) -> String {
    name.map_or_else(|| "of another program".to_owned(), |name| name.to_string())
}

impl IdProblem {
    /// Returns true if it ends by itself.
    #[must_use]
    pub const fn is_temporary(&self) -> bool {
        self.next_check().is_some()
    }

    /// The time after which another check may find that it has ended. `None` if it does not end by itself.
    #[must_use]
    pub const fn next_check(&self) -> Option<Duration> {
        match self {
            Self::Trial { left, .. } => Some(*left),
            Self::OpenTransactions { .. } => Some(Duration::from_millis(500)),
            _ => None,
        }
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

/// The [mark](ID_SECRET_RECORD) of a store, as a process sees it that may have an id secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IdMark {
    /// It is that of the secret of this process.
    Own,
    /// It is the own one, and on trial: a store that is new to the secret, or on which a trial has failed, until it lapses.
    Trial,
    /// It is that of another secret, with the name if it has one.
    Other(Option<IdSecretName>),
    /// There is none.
    Missing {
        /// True if the store has records.
        has_records: bool,
    },
    /// Its record is damaged: nothing tells whose it is.
    Damaged,
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
    /// The time from which a claim checks again, in milliseconds of the clock's `elapsed`.
    check_from: AtomicU64,
    /// The time from which the last check no longer counts.
    valid_until: Deadline,
    /// The time until which a process that has served goes on after a failed check, and from which one claim asks again.
    failed_until: Deadline,
    retry_from: AtomicU64,
    /// True if a check has succeeded, and none has found another secret since.
    has_passed: AtomicBool,
    /// True while a claim checks again, and the others go on.
    is_checking: AtomicBool,
    state: Mutex<GuardState>,
}

/// A moment by both clocks.
#[derive(Clone, Copy, Debug)]
pub struct CheckTime {
    elapsed: Duration,
    wall: Timestamp,
}

/// A moment in the future, by both clocks, in milliseconds: whichever shows it first. The monotonic clock stands still while the
/// machine is suspended, and the wall clock may be set back.
#[derive(Debug, Default)]
struct Deadline {
    elapsed: AtomicU64,
    wall: AtomicU64,
}

impl Deadline {
    /// Sets it to this time after a moment, unless it is later.
    fn extend(&self, begun: CheckTime, by: Duration) {
        let elapsed = millis(begun.elapsed + by);
        // The wall clock may have been set back, so the later of two readings is not the newer one.
        if self.elapsed.fetch_max(elapsed, Ordering::AcqRel) <= elapsed {
            self.wall.store(begun.wall.after(by).as_millis(), Ordering::Release);
        }
    }

    fn clear(&self) {
        self.elapsed.store(0, Ordering::Release);
    }

    fn is_ahead_of(&self, now: CheckTime) -> bool {
        millis(now.elapsed) < self.elapsed.load(Ordering::Acquire)
            && now.wall.as_millis() < self.wall.load(Ordering::Acquire)
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[derive(Default)]
struct GuardState {
    /// The result of the last check, if it was a refusal.
    problem: Option<Refused>,
    /// The problem of the mark of another secret, if the store had one that was there for good.
    foreign: Option<IdProblem>,
    /// The mark on trial.
    trial: Option<Trial>,
    /// The time at which this process renewed the mark last.
    renewed_at: Option<Duration>,
}

/// A check that was a refusal, with the times of its beginning and its end.
#[derive(Clone, Copy)]
struct Refused {
    problem: IdProblem,
    begun: Duration,
    ended: Duration,
}

/// A mark on trial, as this process saw it.
struct Trial {
    token: FencingToken,
    /// The time at which this process saw it first.
    since: Duration,
    /// The transactions that were open when the time of the trial was over and have not ended since; `None` before.
    open: Option<Vec<String>>,
}

impl IdGuard {
    /// Guards a store whose records have these identities.
    #[must_use]
    pub fn new(store: impl IntoStore, ids: IdScheme) -> Self {
        Self::with_clock(store, ids, SystemClock::new())
    }

    /// The same, with another clock.
    #[must_use]
    pub fn with_clock(store: impl IntoStore, ids: IdScheme, clock: impl Clock) -> Self {
        Self {
            store: store.into_store(),
            ids,
            clock: Arc::new(clock),
            check_from: AtomicU64::new(0),
            valid_until: Deadline::default(),
            failed_until: Deadline::default(),
            retry_from: AtomicU64::new(0),
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
        self.state().problem.map(|refused| refused.problem)
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

    /// The mark of the store.
    ///
    /// # Errors
    /// Those of the store.
    pub fn find_mark(&self) -> StoreFuture<'_, IdMark> {
        Box::pin(async {
            let mark = match self.store.lookup(ID_SECRET_RECORD).await {
                Err(error) if error.kind() == StoreErrorKind::Corrupt => return Ok(IdMark::Damaged),
                found => found?.filter(binds),
            };
            Ok(match (mark, self.ids.secret()) {
                (None, _) => IdMark::Missing { has_records: self.has_records().await? },
                (Some(mark), Some(secret)) if mark.fingerprint == secret.mark_fingerprint() => {
                    if is_for_good(&mark) { IdMark::Own } else { IdMark::Trial }
                }
                (Some(mark), _) => IdMark::Other(name_in(&mark)),
            })
        })
    }

    /// Puts a lost mark back on a store with records, after which this process and all others with its secret serve, and no other
    /// ones. Returns false if the mark is there.
    ///
    /// **Only for an operator who knows that the records are of this secret.** If they are not, each of their keys is new, and
    /// its retry executes again. A record that is found by a key that was used before ([`IdScheme::key_tag`]) proves it.
    ///
    /// # Errors
    /// [`Invalid`](crate::StoreErrorKind::Invalid) if this process has no secret, if the store has the mark of another one, a
    /// damaged mark or no records, or if a trial runs. Nothing was changed. Otherwise the error of the store.
    pub fn restore_mark(&self) -> StoreFuture<'_, bool> {
        Box::pin(async {
            let refused = |why: &str| Err(StoreError::invalid(format!("the mark was not put back: {why}")));
            let Some(secret) = self.ids.secret() else { return refused("this process has no id secret") };
            match self.find_mark().await? {
                IdMark::Missing { has_records: true } => {}
                IdMark::Own => return Ok(false),
                IdMark::Missing { has_records: false } => {
                    return refused(
                        "the store has no records, and is marked when a process with the secret starts",
                    );
                }
                IdMark::Trial => return refused("the store is on trial; ask again in two minutes"),
                IdMark::Other(store) => {
                    return Err(IdProblem::Other { store, own: secret.name() }.into());
                }
                IdMark::Damaged => {
                    return refused(
                        "its record is damaged, and no command replaces a record that cannot be read",
                    );
                }
            }
            // Another secret that was faster is a mismatch.
            self.claim_for_good(secret).await.map_err(store_error)?;
            self.verify().await?;
            Ok(true)
        })
    }

    /// The time of a lookup that [`judge`](Self::judge) gets; `None` if the last check still counts, so that none is needed.
    #[must_use]
    pub fn begin_judgement(&self) -> Option<CheckTime> {
        (!self.is_fresh()).then(|| self.time())
    }

    /// Checks the [mark](ID_SECRET_RECORD) that a program looked up itself, for example on a connection that it holds. It begins
    /// no trial: if the store is new to the secret, [`verify`](Self::verify) it first.
    ///
    /// `begun` is the time of the lookup; `None` if its snapshot may be older. Then the result holds for this claim alone, in the
    /// transaction that looked: the trial of another process waits for that transaction.
    ///
    /// # Errors
    /// As for [`verify`](Self::verify).
    pub fn judge(&self, begun: Option<CheckTime>, mark: Option<&Record>) -> Result<(), StoreError> {
        let mark = mark.filter(|mark| binds(mark));
        self.note_foreign(mark)?;
        let problem = match (self.ids.problem_with(mark, false), self.ids.secret()) {
            (None, Some(secret)) if !mark.is_some_and(is_for_good) => {
                Some(IdProblem::Trial { own: secret.name(), left: TRIAL })
            }
            (problem, _) => problem,
        };
        match problem {
            Some(problem) => Err(problem.into()),
            None => {
                if let Some(begun) = begun {
                    self.permit(begun);
                }
                Ok(())
            }
        }
    }

    /// Returns true if a check of this process has succeeded once, and none has found another secret since.
    fn has_passed(&self) -> bool {
        self.has_passed.load(Ordering::Acquire)
    }

    /// Returns true if a check that began at this time or later has succeeded, and none has found a problem since.
    fn has_passed_since(&self, begun: CheckTime) -> bool {
        self.has_passed() && millis(begun.elapsed + VALID) <= self.valid_until.elapsed.load(Ordering::Acquire)
    }

    /// Lets claims pass because of a check that began at this time.
    fn permit(&self, begun: CheckTime) {
        self.has_passed.store(true, Ordering::Release);
        self.failed_until.clear();
        self.valid_until.extend(begun, VALID);
        self.check_from.fetch_max(millis(begun.elapsed + VALID / 2), Ordering::AcqRel);
    }

    fn state(&self) -> std::sync::MutexGuard<'_, GuardState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn time(&self) -> CheckTime {
        CheckTime { elapsed: self.clock.elapsed(), wall: self.clock.now() }
    }

    /// Returns true if the last check counts, and no claim needs to check again.
    fn is_fresh(&self) -> bool {
        let now = self.time();
        millis(now.elapsed) < self.check_from.load(Ordering::Acquire) && self.valid_until.is_ahead_of(now)
    }

    fn is_valid(&self) -> bool {
        self.valid_until.is_ahead_of(self.time())
    }

    /// Returns true if a claim may execute without a further check: the last one succeeded, or this process has served and could
    /// not read the mark a moment ago.
    fn may_go_on(&self) -> bool {
        self.is_valid() || (self.has_passed() && self.failed_until.is_ahead_of(self.time()))
    }

    fn millis(&self) -> u64 {
        millis(self.clock.elapsed())
    }

    /// Checks if necessary.
    async fn ensure(&self) -> Result<(), CheckError> {
        if self.is_fresh() {
            return Ok(());
        }
        if self.may_go_on() {
            // One claim checks, and the others go on.
            let is_early = !self.is_valid() && self.millis() < self.retry_from.load(Ordering::Acquire);
            if is_early || self.is_checking.swap(true, Ordering::AcqRel) {
                return Ok(());
            }
            let _turn = Turn(&self.is_checking);
            return match self.check_now().await {
                Err(CheckError::Store(_)) => Ok(()),
                checked => checked,
            };
        }
        let refused = self.state().problem;
        if let Some(Refused { problem, ended, .. }) = refused
            && self.clock.elapsed() < ended + REFUSED_FOR
        {
            return Err(problem.into());
        }
        self.check_now().await
    }

    async fn check_now(&self) -> Result<(), CheckError> {
        let begun = self.time();
        let checked = match self.ids.secret() {
            None => self.check_without_secret().await,
            Some(secret) => self.check_with(secret).await,
        };
        match &checked {
            Ok(()) => {
                let mut state = self.state();
                // A check that began later has found another secret since, and this one was only slow.
                if let Some(Refused { problem, begun: refused, .. }) = state.problem
                    && refused > begun.elapsed
                    && !problem.is_temporary()
                {
                    return Err(problem.into());
                }
                self.permit(begun);
                (state.problem, state.trial) = (None, None);
            }
            // Two checks ran at once, and the other one has ended the trial since this one looked at the clock.
            Err(CheckError::Problem(problem)) if problem.is_temporary() && self.is_valid() => return Ok(()),
            // The other one succeeded longer ago, and what this one found is older still.
            Err(CheckError::Problem(
                IdProblem::Trial { .. } | IdProblem::OpenTransactions { .. } | IdProblem::HasRecords { .. },
            )) if self.has_passed_since(begun) => {}
            Err(CheckError::Problem(problem)) => {
                let mut state = self.state();
                self.has_passed.store(false, Ordering::Release);
                self.check_from.store(0, Ordering::Release);
                self.valid_until.clear();
                let (problem, ended) = (*problem, self.clock.elapsed());
                state.problem = Some(Refused { problem, begun: begun.elapsed, ended });
            }
            Err(CheckError::Store(_)) => {
                self.failed_until.extend(begun, VALID);
                self.retry_from.fetch_max(millis(begun.elapsed + RETRY_AFTER), Ordering::AcqRel);
            }
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
    ///
    /// # Errors
    /// Also if it was that of another secret before, and is gone.
    async fn mark(&self) -> Result<Option<Record>, CheckError> {
        let mark = self.store.lookup(ID_SECRET_RECORD).await.map_err(of_the_mark)?.filter(binds);
        self.note_foreign(mark.as_ref())?;
        Ok(mark)
    }

    /// Notes the mark of another secret. A mark on trial may lapse, and is not noted.
    ///
    /// # Errors
    /// The problem of such a mark, if it is gone.
    fn note_foreign(&self, mark: Option<&Record>) -> Result<(), IdProblem> {
        let mut state = self.state();
        let Some(mark) = mark else { return state.foreign.map_or(Ok(()), Err) };
        let problem = self.ids.problem_with(Some(mark), false);
        if problem.is_none() || is_for_good(mark) {
            state.foreign = problem;
        }
        Ok(())
    }

    async fn check_with(&self, secret: &IdSecret) -> Result<(), CheckError> {
        let own = secret.name();
        match self.mark().await? {
            Some(mark) if mark.fingerprint != secret.mark_fingerprint() => {
                Err(IdProblem::Other { store: name_in(&mark), own }.into())
            }
            Some(mark) if is_for_good(&mark) => self.renew(secret).await,
            // The store lost the mark, or an older state of it came back. It is not new to the secret.
            _ if self.has_passed() => self.claim_for_good(secret).await,
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
            // A check of this process has ended the trial meanwhile, and the store has lost the mark since.
            _ if self.has_passed() => self.claim_for_good(secret).await,
            _ => Err(IdProblem::HasRecords { own }.into()),
        }
    }

    /// Ends the trial if it is over and no records came.
    async fn end_trial(&self, secret: &IdSecret, token: FencingToken) -> Result<(), CheckError> {
        let (own, now) = (secret.name(), self.clock.elapsed());
        let since = match &mut self.state().trial {
            Some(trial) if trial.token == token => trial.since,
            trial => trial.insert(Trial { token, since: now, open: None }).since,
        };
        let left = TRIAL.saturating_sub(now.saturating_sub(since));
        if !left.is_zero() {
            return Err(IdProblem::Trial { own, left }.into());
        }
        let count = self.still_open(token).await?;
        if count > 0 {
            let renew = Renew { token, lease: TRIAL_LEASE, retention: TRIAL_RETENTION };
            return match self.store.apply(ID_SECRET_RECORD, Command::Renew(renew)).await? {
                Outcome::Renewed { .. } => Err(IdProblem::OpenTransactions { own, count }.into()),
                _ => Err(IdProblem::Trial { own, left: TRIAL }.into()),
            };
        }
        if self.has_records().await? {
            return self.check_other_trial(secret).await;
        }
        let renew = Renew { token, lease: limits::MAX_LEASE, retention: limits::MAX_RETENTION };
        match self.store.apply(ID_SECRET_RECORD, Command::Renew(renew)).await.map_err(of_the_mark)? {
            Outcome::Renewed { .. } => Ok(()),
            // It has lapsed meanwhile. The next check begins another trial.
            _ => Err(IdProblem::Trial { own, left: TRIAL }.into()),
        }
    }

    /// The number of transactions that were open when the time of the trial was over, and are still open.
    async fn still_open(&self, token: FencingToken) -> Result<usize, StoreError> {
        let open = self.store.open_transactions().await?;
        let mut state = self.state();
        // Another check may have begun another trial, or ended this one.
        let Some(trial) = state.trial.as_mut().filter(|trial| trial.token == token) else {
            return Ok(open.len());
        };
        let waiting = match &mut trial.open {
            Some(waiting) => {
                waiting.retain(|name| open.contains(name));
                waiting
            }
            first => first.insert(open),
        };
        Ok(waiting.len())
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
        match self.store.apply(ID_SECRET_RECORD, Command::Claim(claim)).await.map_err(of_the_mark)? {
            Outcome::Execute(grant) => Ok(grant.token),
            Outcome::Mismatch => {
                let store = self.store.lookup(ID_SECRET_RECORD).await?.and_then(|mark| name_in(&mark));
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

    /// Claims after a check.
    async fn claim_checked(&self, id: RecordId, claim: Claim) -> Result<Outcome, StoreError> {
        match self.ensure().await {
            Ok(()) => {}
            // The mark is out of reach, and the record may not be: on a cluster they are on two nodes. A store that was the right
            // one when this process last asked still is.
            Err(CheckError::Store(error)) if error.kind().may_pass() && self.has_passed() => {}
            // Nothing executes before the first check, and nothing that would is claimed: each claim counts as an attempt. What
            // is completed may be replayed. If the record cannot be read either, a cache before the store may still replay.
            Err(CheckError::Store(error)) if error.kind().may_pass() => match self.store.lookup(id).await {
                Ok(Some(record)) if matches!(record.state, State::Completed(_)) => {}
                Ok(_) => return Err(unchecked(error)),
                Err(_) => {}
            },
            Err(error) => return Err(store_error(error)),
        }
        self.claim_and_confirm(id, claim).await
    }

    /// Claims, and checks again if the check no longer counts when the claim is granted: it may have waited for a connection, or
    /// the machine was suspended.
    async fn claim_and_confirm(&self, id: RecordId, claim: Claim) -> Result<Outcome, StoreError> {
        let retention = claim.retention;
        let outcome = self.store.apply(id, Command::Claim(claim)).await?;
        match &outcome {
            // Boxed: this is rare, and boxing keeps the common future small.
            Outcome::Execute(grant) if !self.may_go_on() => {
                Box::pin(self.confirm(id, grant, retention)).await?;
            }
            _ => {}
        }
        Ok(outcome)
    }

    /// Checks again after a grant, and gives it back if nothing may execute.
    async fn confirm(&self, id: RecordId, grant: &Grant, retention: Duration) -> Result<(), StoreError> {
        let error = match self.ensure().await {
            Ok(()) => return Ok(()),
            Err(CheckError::Store(error)) if error.kind().may_pass() && self.has_passed() => return Ok(()),
            Err(error) => error,
        };
        // To free the key would forget that an earlier attempt may have taken effect.
        if !grant.after_abandoned {
            let release = Command::Release(Release { token: grant.token, retention });
            // If this fails, the record is left to its lease.
            let _released = self.store.apply(id, release).await;
        }
        Err(unchecked(store_error(error)))
    }
}

/// The error of a command to the mark. If the mark cannot be read, that says nothing about the record of a request.
fn of_the_mark(error: StoreError) -> StoreError {
    if error.kind() != StoreErrorKind::Corrupt {
        return error;
    }
    let what = format!(
        "the record that marks the id secret of the store ({ID_SECRET_RECORD}) is damaged and cannot be read, and no request is \
         at fault: docs/reference/sealing.md says how it is replaced"
    );
    StoreError::unavailable(what).with_source(error).with_extent(Extent::Record)
}

fn unchecked(why: StoreError) -> StoreError {
    let what = "nothing was executed: the id secret could not be checked";
    StoreError::unavailable(what).with_source(why).with_extent(Extent::Record)
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
            Command::Claim(claim) if self.is_fresh() => Box::pin(self.claim_and_confirm(id, claim)),
            Command::Claim(claim) => Box::pin(self.claim_checked(id, claim)),
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

    fn survey(&self, query: SurveyQuery) -> StoreFuture<'_, Option<Survey>> {
        self.store.survey(SurveyQuery { except_id: Some(ID_SECRET_RECORD), ..query })
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

    delegate_store!(
        self, self.store => lookup purge audit changed open_transactions
            usage clock_skew accept_clock now capabilities
    );
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_names_the_seconds_that_are_left() {
        let own = IdSecret::from_bytes([1; 32]).name();
        for (millis, seconds) in [(6000, "6 s"), (5001, "6 s"), (5000, "5 s"), (1, "1 s")] {
            let text = IdProblem::Trial { own, left: Duration::from_millis(millis) }.to_string();
            assert!(text.contains(&format!("is used from {seconds} on")), "{text}");
        }
    }
}
