//! Claim, business rows and result in one transaction of the application.

mod connection;
mod error;
mod guard;
mod json;
mod mark_store;
mod reservation;
mod transact_fn;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use oncegate_core::{
    AttemptId, CheckTime, Claim, ConfigError, FencingToken, Fingerprint, ID_SECRET_RECORD, IdGuard, IdScheme,
    IdSecret, IdempotencyKey, KeyError, Label, OnAbandoned, Outcome, RecordId, Scope, State, StoreError,
    StoredResponse, limits,
};
use oncegate_seal::{Keyring, SealError, SealKeys, open_claimed_response, seal_owners_response};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::Row as _;
use sqlx::postgres::{PgConnection, PgPool, PgRow};
use tokio::time::Instant;

pub use self::connection::{OpenTransaction, StatementError, TransactionConnection};
pub use self::error::{RunError, TransactError, is_conflict, is_conflict_in, is_lost_in, is_rolled_back};
pub use self::guard::{Guard, GuardClaim, GuardError, GuardHeaderError};
use self::json::{EncodeError, not_json};
use self::mark_store::MarkStore;
use self::reservation::{CompletionResult, Reservation};
pub use self::transact_fn::{TransactFn, TransactFnWith};
use crate::backoff::{Backoff, random_bits};
use crate::call::{Arg, Call};
use crate::error::store_error;
use crate::record::{self, Reply};
use crate::store::{CLAIM, claim_call, lookup_in_transaction_call};

const RESERVE_OR_CLAIM: &str = "SELECT * FROM oncegate.reserve_or_claim($1, $2, $3, $4, $5, $6, $7, $8, $9)";

/// The retention of a completed record by default, as in the layer and the sidecar.
const RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

/// The lease matters only if a guard's transaction commits without completing. Otherwise no other session sees the claim
/// before the transaction ends, and then it is completed or gone.
const LEASE: Duration = limits::MAX_LEASE;

/// Runs business transactions once per key, each on one connection of the application's own pool. Cheap to clone.
///
/// [`transact`](Self::transact) is one transaction: the claim of the key, the rows of the run, and the result for retries are
/// committed together, or none of them is. So there is no lease to lose and nothing to clean up after a crash, which leaves
/// the key free.
///
/// The database must have the contract ([`schema::apply`](crate::schema::apply)). The role of the pool needs the right to
/// execute `oncegate.reserve_or_claim`, `oncegate.complete_reserved`, `oncegate.claim`, `oncegate.complete` and
/// `oncegate.lookup`.
///
/// Results are stored in clear, unless there are [keys](Self::with_seal_keys). A sealed result that cannot be opened is
/// [`TransactError::Sealed`], and never another run.
#[derive(Clone)]
pub struct Transactor {
    pool: PgPool,
    retention: Duration,
    wait: Duration,
    statement_timeout: Duration,
    max_attempts: u32,
    isolation: Option<Isolation>,
    transaction_pooler: bool,
    /// The guard of the identities of records.
    guard: Arc<IdGuard>,
    /// The keys that seal results and open them. Without keys, results are stored in clear.
    keys: SealKeys,
}

/// The isolation level of a transaction, in PostgreSQL's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isolation {
    /// `READ COMMITTED`, the default of PostgreSQL.
    ReadCommitted,
    /// `REPEATABLE READ`.
    RepeatableRead,
    /// `SERIALIZABLE`.
    Serializable,
}

/// A value, executed now or replayed. Both variants have one type, so that a retry is answered like the first request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransactOutcome<T> {
    /// This call ran and committed.
    Executed(T),
    /// An earlier call did; this is its value.
    Replayed(T),
}

impl<T> TransactOutcome<T> {
    /// The value.
    pub fn into_inner(self) -> T {
        match self {
            Self::Executed(value) | Self::Replayed(value) => value,
        }
    }

    /// Tells if the value is that of an earlier call.
    #[must_use]
    pub const fn is_replayed(&self) -> bool {
        matches!(self, Self::Replayed(_))
    }
}

/// One operation under one key.
struct Request {
    record: RecordId,
    fingerprint: Fingerprint,
    label: Label,
}

impl Request {
    fn new<I: Serialize + ?Sized>(
        ids: &IdScheme,
        scope: &Scope<'_>,
        key: &IdempotencyKey,
        input: &I,
    ) -> serde_json::Result<Self> {
        let operation: Vec<_> = scope.operation().iter().map(|part| String::from_utf8_lossy(part)).collect();
        Ok(Self {
            record: ids.record_id(scope, key),
            fingerprint: ids.fingerprint(json::fingerprint(input)?),
            label: ids.label(scope, key, &operation.join(" ")),
        })
    }

    fn claim(&self, retention: Duration, sql: &'static str) -> Result<Call, StoreError> {
        let claim = Claim {
            attempt: AttemptId::new(u128::from(random_bits()) << 64 | u128::from(random_bits())),
            fingerprint: self.fingerprint,
            lease: LEASE,
            retention,
            on_abandoned: OnAbandoned::Park,
            label: self.label.clone(),
        };
        claim_call(sql, &self.record, &claim).ok_or_else(record::unexpected_reply)
    }
}

/// The start of a transaction.
enum ClaimStart {
    /// There is no record, and no other transaction inserts one.
    Reservation(Reservation),
    /// The result of the claim.
    Reply(Reply),
}

/// The right to complete a record.
enum CompletionRight {
    /// There was no record.
    Reservation(Reservation),
    /// There was one, which was free.
    Claim(Guard, FencingToken),
}

/// The result of one attempt.
enum RunResult<T> {
    Done(TransactOutcome<T>),
    /// Another transaction or attempt works on the key.
    Busy {
        lease_left: Duration,
    },
    /// Rolled back, and worth another attempt.
    Again(TransactError),
    /// Nothing was run.
    Unreached(StoreError),
    /// The reply to COMMIT was lost.
    LostCommit(SentCommit),
    Failed(TransactError),
}

/// A COMMIT that may have been carried out.
#[derive(Clone, Copy)]
struct SentCommit {
    token: FencingToken,
    /// Until then the record is certainly there, if it was committed.
    kept_until: RetentionEnd,
}

/// The end of a retention that began at the latest possible moment, by both clocks of this process. The monotonic clock stands
/// still while the machine is suspended, and the clock of the database does not.
#[derive(Clone, Copy)]
struct RetentionEnd {
    monotonic: Instant,
    wall: Option<SystemTime>,
}

impl RetentionEnd {
    fn of(began_at: (Instant, SystemTime), retention: Duration) -> Self {
        Self { monotonic: began_at.0 + retention, wall: began_at.1.checked_add(retention) }
    }

    /// Returns true if the record may be gone by one of the clocks.
    fn is_over(&self) -> bool {
        Instant::now() >= self.monotonic || self.wall.is_some_and(|wall| SystemTime::now() >= wall)
    }
}

/// A COMMIT whose reply was lost.
#[derive(Clone, Copy)]
struct LostCommit {
    sent: SentCommit,
    until: Instant,
}

impl Transactor {
    /// Creates a transactor on the application's own pool, with a retention of 24 hours, no wait, and at most five attempts.
    #[must_use]
    pub fn new(pool: PgPool) -> Self {
        let guard = guard(&pool, false, IdScheme::PLAIN);
        Self {
            pool,
            guard,
            retention: RETENTION,
            wait: Duration::ZERO,
            statement_timeout: Duration::from_secs(10),
            max_attempts: 5,
            isolation: None,
            transaction_pooler: false,
            keys: SealKeys::default(),
        }
    }

    /// Computes the identities of records with this secret, as all other programs on the database must; see [`IdSecret`]. The
    /// role also needs the right to execute `oncegate.renew` and `oncegate.list`.
    ///
    /// Calls are refused until it is known that the database belongs to this secret: call [`verify_ids`](Self::verify_ids) at the
    /// start.
    #[must_use]
    pub fn with_id_secret(self, secret: IdSecret) -> Self {
        Self { guard: guard(&self.pool, self.transaction_pooler, secret.into()), ..self }
    }

    /// Waits until it is known that the database belongs to the id secret of this transactor, or, without one, to none. The first
    /// program with a secret on a new database waits for six seconds.
    ///
    /// # Errors
    /// [`StoreErrorKind::Invalid`](oncegate_core::StoreErrorKind::Invalid) if the database belongs to another secret, or has
    /// records from before. Otherwise the error of the database.
    pub async fn verify_ids(&self) -> Result<(), StoreError> {
        loop {
            let checked = self.guard.verify().await;
            match self.guard.problem().and_then(|problem| problem.next_check()) {
                Some(pause) if checked.is_err() => tokio::time::sleep(pause).await,
                _ => return checked,
            }
        }
    }

    /// The computation of the identities of records.
    #[must_use]
    pub fn ids(&self) -> &IdScheme {
        self.guard.ids()
    }

    /// The pool that it takes its connections from.
    #[must_use]
    pub const fn pool(&self) -> &PgPool {
        &self.pool
    }

    /// Sets the time that a result is kept, counted from its commit, within the bounds of [`limits`]. Default: 24 h.
    ///
    /// # Errors
    /// If the retention is out of bounds.
    pub fn with_retention(self, retention: Duration) -> Result<Self, ConfigError> {
        Ok(Self {
            retention: ConfigError::check(
                "the retention",
                retention,
                limits::MIN_RETENTION..=limits::MAX_RETENTION,
            )?,
            ..self
        })
    }

    /// Sets the time that a call waits for another call with the same key before it returns [`TransactError::InProgress`], at
    /// most an hour. Default: no wait. It holds no connection while it waits.
    ///
    /// # Errors
    /// If the time is out of bounds.
    pub fn with_wait(self, wait: Duration) -> Result<Self, ConfigError> {
        Ok(Self { wait: ConfigError::check("the wait", wait, Duration::ZERO..=limits::MAX_LEASE)?, ..self })
    }

    /// Sets the time for a claim, for a completion and for `COMMIT`, from 100 ms to an hour. Default: 10 s.
    ///
    /// It also bounds the time to find out the outcome of a `COMMIT` whose reply was lost. The statements of the run are
    /// bounded by the application's own `statement_timeout`.
    ///
    /// # Errors
    /// If the time is out of bounds.
    pub fn with_statement_timeout(self, statement_timeout: Duration) -> Result<Self, ConfigError> {
        Ok(Self {
            statement_timeout: ConfigError::check(
                "the statement_timeout with the database",
                statement_timeout,
                limits::MIN_LEASE..=limits::MAX_LEASE,
            )?,
            ..self
        })
    }

    /// Sets the most attempts at a transaction, from 1 to 100. Default: 5. It is tried again after a serialization failure
    /// (SQLSTATE 40001) or a deadlock (40P01), and if a `COMMIT` without a reply was not carried out.
    ///
    /// # Errors
    /// If the number is out of bounds.
    pub fn with_max_attempts(self, max_attempts: u32) -> Result<Self, ConfigError> {
        Ok(Self {
            max_attempts: ConfigError::check("the number of attempts", max_attempts, 1..=100)?,
            ..self
        })
    }

    /// Sets the isolation level of the transaction. Default: that of the connection or the server.
    #[must_use]
    pub fn with_isolation(self, isolation: Isolation) -> Self {
        Self { isolation: Some(isolation), ..self }
    }

    /// Set it if the pool goes through a pooler that gives each transaction another session, such as PgBouncer in transaction
    /// mode. Statements of this crate are then prepared without a name, with one more round trip each. Use
    /// `.persistent(false)` for your own statements.
    #[must_use]
    pub fn with_transaction_pooler(self, through_pooler: bool) -> Self {
        let guard = guard(&self.pool, through_pooler, self.ids().clone());
        Self { transaction_pooler: through_pooler, guard, ..self }
    }

    /// Seals results with the first of these keys, as a [`SealedStore`](oncegate_seal::SealedStore) does, and opens results with
    /// all of them, whichever program sealed them. Guards that [`claim`](Self::claim) returns seal, too. Default: no keys.
    ///
    /// A sealed result is bound to the token of its attempt. So the record is claimed before the run and completed after it,
    /// which writes it twice. Results in clear are replayed, unless the keys are [required](Keyring::with_required).
    #[must_use]
    pub fn with_seal_keys(self, keys: impl Into<SealKeys>) -> Self {
        Self { keys: keys.into(), ..self }
    }

    /// Runs `run` in a transaction if this is the first call with this key in this scope. Otherwise returns the value that the
    /// first call committed. The key is an [`IdempotencyKey`], or text.
    ///
    /// Two calls with one key must have the same `input`: another input is [`TransactError::Mismatch`]. The value is stored as
    /// JSON.
    ///
    /// ```
    /// use oncegate_core::Scope;
    /// use oncegate_postgres::{TransactOutcome, Transactor, sqlx};
    ///
    /// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let server = oncegate_servers::PostgresServer::start()?;
    /// # oncegate_postgres::schema::apply(&oncegate_postgres::PostgresOptions::from_url(&server.url())?).await?;
    /// let pool = sqlx::PgPool::connect(&server.url()).await?;
    /// # sqlx::query("CREATE TABLE payments (id bigserial, customer text, cents bigint)").execute(&pool).await?;
    /// let transactor = Transactor::new(pool);
    ///
    /// let pay = async || {
    ///     let scope = Scope::caller("customer", "ada").with_operation("POST /payments");
    ///     let done = transactor.transact(&scope, "order-123", &("ada", 500), async |connection| {
    ///         let id: i64 = sqlx::query_scalar("INSERT INTO payments (customer, cents) VALUES ($1, $2) RETURNING id")
    ///             .bind("ada")
    ///             .bind(500_i64)
    ///             .fetch_one(connection)
    ///             .await?;
    ///         Ok(id)
    ///     });
    ///     Ok::<_, Box<dyn std::error::Error>>(done.await?)
    /// };
    /// assert_eq!(pay().await?, TransactOutcome::Executed(1));
    /// assert_eq!(pay().await?, TransactOutcome::Replayed(1));
    /// # Ok(()) }
    /// ```
    ///
    /// # The run
    /// - It is an async closure of the shape `async |connection| { …; Ok(value) }`. It may borrow from outside, and is cloned
    ///   for each attempt.
    /// - It may do anything in this transaction, including savepoints (`connection.begin()`). It must not commit or roll back
    ///   by its own statements.
    /// - An error rolls everything back and frees the key. If a retry has to get the same result, for example a declined card,
    ///   return a value.
    /// - It may run several times (see [`with_max_attempts`](Self::with_max_attempts)), so it must have no effect outside of
    ///   the transaction. If it calls another API, give that call a key of its own: [`RecordId::downstream_key`] of
    ///   [`RecordId::derive`].
    ///
    /// # Failures
    /// - The future is dropped, the run panics, or the process dies: the transaction is rolled back. During `COMMIT` it may
    ///   have been committed; the next call with the key finds that out.
    /// - The reply to `COMMIT` is lost: the key is claimed again until the outcome is known. If the transaction was committed,
    ///   its value is returned; otherwise the run starts again.
    ///
    /// # Errors
    /// [`TransactError`].
    pub fn transact<'t, K, I, T, F>(
        &'t self,
        scope: &Scope<'_>,
        key: K,
        input: &I,
        run: F,
    ) -> impl Future<Output = Result<TransactOutcome<T>, TransactError>> + Send + use<'t, K, I, T, F>
    where
        K: TryInto<IdempotencyKey, Error: Into<KeyError>>,
        I: Serialize + ?Sized,
        T: Serialize + DeserializeOwned + Send + 't,
        F: for<'c> TransactFn<&'c mut PgConnection, T, Fut: Send> + Clone + Send + Sync + 't,
    {
        let key = key.try_into().map_err(|error| TransactError::Key(error.into()));
        let request = key.and_then(|key| {
            Request::new(self.ids(), scope, &key, input).map_err(TransactError::Unserializable)
        });
        async move {
            let request = request?;
            self.guard.admit().await.map_err(TransactError::Store)?;
            self.try_until_known(&request, &run).await
        }
    }

    async fn try_until_known<T, F>(
        &self,
        request: &Request,
        run: &F,
    ) -> Result<TransactOutcome<T>, TransactError>
    where
        T: Serialize + DeserializeOwned + Send,
        F: for<'c> TransactFn<&'c mut PgConnection, T, Fut: Send> + Clone + Send + Sync,
    {
        let record = request.record;
        let mut attempts_left = self.max_attempts;
        let mut lost: Option<LostCommit> = None;
        let until = Instant::now() + self.wait;
        let mut pause = Backoff::new(Duration::from_millis(5), Duration::from_millis(250));
        loop {
            let tried = self.try_once(request, run, attempts_left > 0, &mut lost).await;
            let until = lost.map_or(until, |lost| lost.until);
            let error = match tried {
                RunResult::Done(done) => return Ok(done),
                RunResult::Failed(error) => return Err(error),
                RunResult::Busy { lease_left } => TransactError::InProgress { lease_left },
                RunResult::Unreached(error) if lost.is_some() => TransactError::Store(error),
                RunResult::Unreached(error) => return Err(TransactError::Store(error)),
                RunResult::Again(error) if lost.is_some() => error,
                RunResult::Again(error) => {
                    attempts_left -= 1;
                    if attempts_left == 0 {
                        return Err(error);
                    }
                    pause.sleep(None).await;
                    continue;
                }
                RunResult::LostCommit(sent) => {
                    attempts_left -= 1;
                    tracing::warn!(%record, "the reply to COMMIT was lost; asking the database if it was committed");
                    lost = Some(LostCommit { sent, until: Instant::now() + self.statement_timeout });
                    continue;
                }
            };
            if Instant::now() >= until {
                return Err(match lost {
                    Some(LostCommit { sent, .. }) => {
                        TransactError::CommitUnknown { record, token: sent.token }
                    }
                    None => error,
                });
            }
            pause.sleep(Some(until)).await;
        }
    }

    async fn try_once<T, F>(
        &self,
        request: &Request,
        run: &F,
        may_run: bool,
        lost: &mut Option<LostCommit>,
    ) -> RunResult<T>
    where
        T: Serialize + DeserializeOwned + Send,
        F: for<'c> TransactFn<&'c mut PgConnection, T, Fut: Send> + Clone + Send + Sync,
    {
        let mut held = match TransactionConnection::acquire(&self.pool).await {
            Ok(held) => held,
            Err(error) => return RunResult::Unreached(error.into()),
        };
        let mut open = match held.begin(self.begin(), self.statement_timeout).await {
            Ok(open) => open,
            Err(error) => return RunResult::Unreached(error.into()),
        };
        if let Err(refused) = self.admit_in(&mut open).await {
            open.rollback(self.statement_timeout).await;
            return refused;
        }
        let record = request.record;
        let keys = self.keys.get();
        // Only a claim finds out the outcome of a COMMIT: above READ COMMITTED, a record may exist although this snapshot does
        // not show it. And only a claim returns the token, to which a sealed result is bound, before the record is written.
        let claimed = match lost {
            None if !keys.seals() => self.reserve_or_claim_on(&mut open, request).await,
            _ => self.claim_on(&mut open, request).await.map(ClaimStart::Reply),
        };
        let claimed = match claimed {
            Ok(ClaimStart::Reservation(reserved)) => {
                let right = CompletionRight::Reservation(reserved);
                return self.run_and_commit(open, request, run, right, &keys).await;
            }
            Ok(ClaimStart::Reply(said)) => Ok(said),
            Err(tried) => Err(tried),
        };
        let claimed = match claimed {
            Ok(claimed) => claimed,
            Err(tried) => {
                open.rollback(self.statement_timeout).await;
                return tried;
            }
        };
        let grant = match claimed {
            Reply::Outcome(Outcome::Execute(grant)) => grant,
            Reply::Outcome(Outcome::Unknown) => {
                // The claim may have made the outcome unknown just now. Keep that.
                let _ = open.commit(self.statement_timeout).await;
                return RunResult::Failed(TransactError::Unknown { record });
            }
            Reply::Outcome(Outcome::Replay(response)) => {
                let is_ours = match lost {
                    Some(lost) => self.is_token(&mut open, record, lost.sent.token).await,
                    None => false,
                };
                open.rollback(self.statement_timeout).await;
                return replay(record, response, is_ours, &keys);
            }
            other => {
                open.rollback(self.statement_timeout).await;
                return match other {
                    Reply::Outcome(Outcome::InProgress { lease_left }) => RunResult::Busy { lease_left },
                    Reply::Locked => RunResult::Busy { lease_left: Duration::ZERO },
                    Reply::Outcome(Outcome::Mismatch) => RunResult::Failed(TransactError::Mismatch),
                    Reply::Outcome(Outcome::Unreplayable) => {
                        RunResult::Failed(TransactError::Unreplayable { record })
                    }
                    Reply::Outcome(_) | Reply::Large | Reply::Later => {
                        RunResult::Failed(TransactError::Store(record::unexpected_reply()))
                    }
                };
            }
        };
        if let Some(LostCommit { sent, .. }) = lost.take() {
            // It may have been committed, and its record removed since then.
            if sent.kept_until.is_over() {
                open.rollback(self.statement_timeout).await;
                return RunResult::Failed(TransactError::CommitUnknown { record, token: sent.token });
            }
            // It was not committed, or this claim would have found the record.
            if !may_run {
                open.rollback(self.statement_timeout).await;
                return RunResult::Failed(TransactError::Store(StoreError::unavailable(
                    "the connection to PostgreSQL ended before the commit; nothing was committed",
                )));
            }
        }
        let guard = Guard::new(record, grant.token, Some(self.retention), !self.transaction_pooler);
        let right = CompletionRight::Claim(guard, grant.token);
        self.run_and_commit(open, request, run, right, &keys).await
    }

    async fn run_and_commit<T, F>(
        &self,
        mut open: OpenTransaction<'_>,
        request: &Request,
        run: &F,
        right: CompletionRight,
        keys: &Keyring,
    ) -> RunResult<T>
    where
        T: Serialize + DeserializeOwned + Send,
        F: for<'c> TransactFn<&'c mut PgConnection, T, Fut: Send> + Clone + Send + Sync,
    {
        match self.run_on(&mut open, request, run, right, keys).await {
            Ok((value, CompletionResult::Completed(token), ended_at)) => {
                let kept_until = RetentionEnd::of(ended_at, self.retention);
                let sent = SentCommit { token, kept_until };
                self.commit(open, value, sent).await
            }
            Ok((_, CompletionResult::Unknown, _)) => {
                // Keep the unknown outcome.
                let _ = open.commit(self.statement_timeout).await;
                RunResult::Failed(TransactError::Fenced { record: request.record })
            }
            Err(tried) => {
                open.rollback(self.statement_timeout).await;
                tried
            }
        }
    }

    /// Runs, and completes the record. The time in the result is before the end of the record.
    async fn run_on<T, F>(
        &self,
        open: &mut OpenTransaction<'_>,
        request: &Request,
        run: &F,
        right: CompletionRight,
        keys: &Keyring,
    ) -> Result<(T, CompletionResult, (Instant, SystemTime)), RunResult<T>>
    where
        T: Serialize + DeserializeOwned + Send,
        F: for<'c> TransactFn<&'c mut PgConnection, T, Fut: Send> + Clone + Send + Sync,
    {
        let record = request.record;
        let value = run.clone()(open.connection()).await.map_err(|error| {
            let again = error.is_conflict();
            let error = TransactError::Failed(error.into_boxed());
            if again { RunResult::Again(error) } else { RunResult::Failed(error) }
        })?;
        let response = json::encode(&value).map_err(|error| {
            RunResult::Failed(match error {
                EncodeError::Json(error) => TransactError::Unserializable(error),
                EncodeError::Response(error) => TransactError::TooLarge(error),
            })
        })?;
        let response = match &right {
            // There is one only if no key seals.
            CompletionRight::Reservation(_) => response,
            CompletionRight::Claim(_, token) => seal_owners_response(record, *token, &response, keys)
                .map_err(|error| {
                    RunResult::Failed(match error {
                        SealError::Response(error) => TransactError::TooLarge(error),
                        error => TransactError::Store(error.into()),
                    })
                })?,
        };
        let ended_at = (Instant::now(), SystemTime::now());
        let persistent = !self.transaction_pooler;
        let ended = open
            .statement(self.statement_timeout, async |connection| match right {
                CompletionRight::Reservation(reserved) => {
                    reserved.complete(connection, request, &response, self.retention, persistent).await
                }
                CompletionRight::Claim(guard, token) => {
                    guard.try_end(connection, Some(&response)).await?;
                    Ok(CompletionResult::Completed(token))
                }
            })
            .await;
        match ended {
            Ok(inserted) => Ok((value, inserted, ended_at)),
            Err(StatementError::Refused(error)) => Err(match error::sqlstate(&error).as_deref() {
                Some("OG001") => RunResult::Failed(TransactError::Fenced { record }),
                Some("25P02") => RunResult::Failed(TransactError::Failed(
                    "a statement of the run failed, and the run ignored its error".into(),
                )),
                _ if is_conflict(&error) => RunResult::Again(TransactError::Store(store_error(&error))),
                _ => RunResult::Failed(TransactError::Store(store_error(&error))),
            }),
            Err(timed_out) => Err(RunResult::Failed(TransactError::Store(timed_out.into()))),
        }
    }

    async fn commit<T>(&self, open: OpenTransaction<'_>, value: T, sent: SentCommit) -> RunResult<T> {
        match open.commit(self.statement_timeout).await {
            Ok(()) => RunResult::Done(TransactOutcome::Executed(value)),
            Err(StatementError::Refused(error)) if is_conflict(&error) => {
                RunResult::Again(TransactError::Store(store_error(&error)))
            }
            // For example a deferred constraint.
            Err(StatementError::Refused(error)) if is_rolled_back(&error) => {
                RunResult::Failed(TransactError::Failed(Box::new(error)))
            }
            Err(_) => RunResult::LostCommit(sent),
        }
    }

    async fn reserve_or_claim_on<T>(
        &self,
        open: &mut OpenTransaction<'_>,
        request: &Request,
    ) -> Result<ClaimStart, RunResult<T>> {
        let rows = self.ask_on(open, request, RESERVE_OR_CLAIM).await?;
        match rows.first().map(Reservation::of).transpose() {
            Ok(Some(Some(reserved))) => Ok(ClaimStart::Reservation(reserved)),
            Ok(_) => first_reply(&rows).map(ClaimStart::Reply),
            Err(_) => Err(RunResult::Failed(TransactError::Store(record::unexpected_reply()))),
        }
    }

    async fn claim_on<T>(
        &self,
        open: &mut OpenTransaction<'_>,
        request: &Request,
    ) -> Result<Reply, RunResult<T>> {
        first_reply(&self.ask_on(open, request, CLAIM).await?)
    }

    async fn ask_on<T>(
        &self,
        open: &mut OpenTransaction<'_>,
        request: &Request,
        sql: &'static str,
    ) -> Result<Vec<PgRow>, RunResult<T>> {
        let call = request.claim(self.retention, sql).map_err(RunResult::Unreached)?;
        let persistent = !self.transaction_pooler;
        open.statement(self.statement_timeout, async |connection| {
            call.in_transaction(connection, persistent).await
        })
        .await
        .map_err(unreached)
    }

    /// Tells if the record is that of the attempt with this token.
    async fn is_token(&self, open: &mut OpenTransaction<'_>, record: RecordId, token: FencingToken) -> bool {
        let call =
            Call::new("SELECT * FROM oncegate.lookup($1)", [Arg::Bytes(record.as_bytes().to_vec().into())]);
        let persistent = !self.transaction_pooler;
        let rows = open
            .statement(self.statement_timeout, async |connection| {
                call.in_transaction(connection, persistent).await
            })
            .await;
        // If the lookup fails, report a replay: the value is the same.
        let Ok(rows) = rows else { return false };
        rows.first()
            .and_then(|row| record::record(row).ok())
            .is_some_and(|record| record.token == token && matches!(record.state, State::Completed(_)))
    }

    /// Claims in your own transaction, on its connection. [`GuardClaim::Execute`] has a guard, which you complete as the last
    /// statement of the same transaction.
    ///
    /// ```
    /// # use oncegate_core::Scope;
    /// use oncegate_postgres::{GuardClaim, Transactor, sqlx};
    /// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let server = oncegate_servers::PostgresServer::start()?;
    /// # oncegate_postgres::schema::apply(&oncegate_postgres::PostgresOptions::from_url(&server.url())?).await?;
    /// # let pool = sqlx::PgPool::connect(&server.url()).await?;
    /// # sqlx::query("CREATE TABLE payments (cents bigint)").execute(&pool).await?;
    /// # let scope = Scope::single_tenant();
    /// let transactor = Transactor::new(pool.clone());
    ///
    /// let mut transaction = pool.begin().await?;
    /// match transactor.claim(&mut transaction, &scope, "order-123", &500).await? {
    ///     GuardClaim::Execute(guard) => {
    ///         sqlx::query("INSERT INTO payments VALUES (500)").execute(&mut *transaction).await?;
    ///         guard.complete_json(&mut transaction, &"paid").await?;
    ///         transaction.commit().await?;
    ///     }
    ///     GuardClaim::Replay(response) => println!("replay {:?}", response.body()),
    ///     other => println!("refuse: {other:?}"),
    /// }
    /// # let again = transactor.claim(&mut *pool.acquire().await?, &scope, "order-123", &500).await?;
    /// # assert!(matches!(again, GuardClaim::Replay(_)));
    /// # Ok(()) }
    /// ```
    ///
    /// Outside of a transaction, the claim is committed at once, with a lease of an hour that is never renewed. If the process
    /// dies before it completes the record, the outcome is unknown.
    ///
    /// # Errors
    /// [`GuardError::Store`] and [`GuardError::Conflict`]: the transaction has failed. [`GuardError::Key`]: the key is
    /// invalid. [`GuardError::Response`]: the input cannot be written as JSON.
    pub async fn claim<I: Serialize + ?Sized>(
        &self,
        connection: &mut PgConnection,
        scope: &Scope<'_>,
        key: impl TryInto<IdempotencyKey, Error: Into<KeyError>>,
        input: &I,
    ) -> Result<GuardClaim, GuardError> {
        let key = key.try_into().map_err(|error| GuardError::Key(error.into()))?;
        let request = Request::new(self.ids(), scope, &key, input)
            .map_err(|error| GuardError::Response(not_json(error)))?;
        self.admit_on(connection).await?;
        let call = request.claim(self.retention, CLAIM).map_err(GuardError::Store)?;
        let persistent = !self.transaction_pooler;
        let rows = call.in_transaction(connection, persistent).await.map_err(|error| {
            if is_conflict(&error) { GuardError::Conflict } else { GuardError::Store(store_error(&error)) }
        })?;
        Ok(match said(rows.first()).map_err(GuardError::Store)? {
            Reply::Outcome(Outcome::Execute(grant)) => {
                let guard = Guard::new(request.record, grant.token, Some(self.retention), persistent);
                GuardClaim::Execute(guard.with_seal_keys(self.keys.clone()))
            }
            Reply::Outcome(Outcome::Replay(response)) => {
                let opened = open_claimed_response(request.record, response, &self.keys.get());
                GuardClaim::Replay(opened.map_err(|error| GuardError::Sealed(error.into()))?)
            }
            Reply::Outcome(Outcome::InProgress { lease_left }) => GuardClaim::InProgress { lease_left },
            Reply::Locked => GuardClaim::InProgress { lease_left: Duration::ZERO },
            Reply::Outcome(Outcome::Mismatch) => GuardClaim::Mismatch,
            Reply::Outcome(Outcome::Unknown) => GuardClaim::Unknown,
            Reply::Outcome(Outcome::Unreplayable) => GuardClaim::Unreplayable,
            Reply::Outcome(_) | Reply::Large | Reply::Later => {
                return Err(GuardError::Store(record::unexpected_reply()));
            }
        })
    }

    /// Checks that the database belongs to the id secret, on a connection of the application, which may be the last one of its
    /// pool.
    async fn admit_on(&self, connection: &mut PgConnection) -> Result<(), GuardError> {
        let Some(begun) = self.guard.begin_judgement() else { return Ok(()) };
        let call = lookup_in_transaction_call(&ID_SECRET_RECORD);
        let rows = call.in_transaction(connection, !self.transaction_pooler).await.map_err(|error| {
            if is_conflict(&error) { GuardError::Conflict } else { GuardError::Store(store_error(&error)) }
        })?;
        self.judge(begun, &rows).map_err(GuardError::Store)
    }

    /// Checks again in the transaction of an attempt, if the last check no longer counts: the call may have waited for another
    /// one, or for a connection.
    async fn admit_in<T>(&self, open: &mut OpenTransaction<'_>) -> Result<(), RunResult<T>> {
        let Some(begun) = self.guard.begin_judgement() else { return Ok(()) };
        let (call, persistent) = (lookup_in_transaction_call(&ID_SECRET_RECORD), !self.transaction_pooler);
        let asked = open.statement(self.statement_timeout, async |connection| {
            call.in_transaction(connection, persistent).await
        });
        let rows = asked.await.map_err(unreached)?;
        self.judge(begun, &rows).map_err(RunResult::Unreached)
    }

    /// Checks the mark that a transaction looked up. Under a snapshot of the transaction, which may be older, the result holds
    /// for this transaction alone: the first program with a secret waits for its end.
    fn judge(&self, begun: CheckTime, rows: &[PgRow]) -> Result<(), StoreError> {
        let row = rows.first().ok_or_else(record::unexpected_reply)?;
        let read =
            || Ok::<_, sqlx::Error>((row.try_get("is_current")?, row.try_get::<Option<&str>, _>("state")?));
        let (is_current, state): (bool, _) = read().map_err(|error| store_error(&error))?;
        let mark = state.map(|_| record::record(row)).transpose()?;
        self.guard.judge(is_current.then_some(begun), mark.as_ref())
    }

    const fn begin(&self) -> &'static str {
        begin(self.isolation)
    }
}

fn guard(pool: &PgPool, transaction_pooler: bool, ids: IdScheme) -> Arc<IdGuard> {
    Arc::new(IdGuard::new(MarkStore::new(pool.clone(), transaction_pooler), ids))
}

/// The statement that begins a transaction. `None` takes the isolation level of the connection or the server.
#[must_use]
pub const fn begin(isolation: Option<Isolation>) -> &'static str {
    match isolation {
        None => "BEGIN",
        Some(Isolation::ReadCommitted) => "BEGIN ISOLATION LEVEL READ COMMITTED",
        Some(Isolation::RepeatableRead) => "BEGIN ISOLATION LEVEL REPEATABLE READ",
        Some(Isolation::Serializable) => "BEGIN ISOLATION LEVEL SERIALIZABLE",
    }
}

/// Converts the error of an attempt that ran nothing.
fn unreached<T>(error: StatementError) -> RunResult<T> {
    match error {
        StatementError::Refused(error) if is_conflict(&error) => {
            RunResult::Again(TransactError::Store(store_error(&error)))
        }
        other => RunResult::Unreached(other.into()),
    }
}

fn first_reply<T>(rows: &[PgRow]) -> Result<Reply, RunResult<T>> {
    said(rows.first()).map_err(|error| RunResult::Failed(TransactError::Store(error)))
}

fn said(row: Option<&PgRow>) -> Result<Reply, StoreError> {
    record::reply(row.ok_or_else(record::unexpected_reply)?)
}

/// Returns the stored value. A response that cannot be opened is an error, also without any keys.
fn replay<T: DeserializeOwned>(
    record: RecordId,
    response: StoredResponse,
    is_ours: bool,
    keys: &Keyring,
) -> RunResult<T> {
    let response = match open_claimed_response(record, response, keys) {
        Ok(response) => response,
        Err(error) => return RunResult::Failed(TransactError::Sealed { record, source: error.into() }),
    };
    match json::decode(&response) {
        Ok(value) if is_ours => RunResult::Done(TransactOutcome::Executed(value)),
        Ok(value) => RunResult::Done(TransactOutcome::Replayed(value)),
        Err(reason) => RunResult::Failed(TransactError::Undecodable { record, reason }),
    }
}

impl fmt::Debug for Transactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transactor")
            .field("retention", &self.retention)
            .field("wait", &self.wait)
            .field("statement_timeout", &self.statement_timeout)
            .field("max_attempts", &self.max_attempts)
            .field("isolation", &self.isolation)
            .field("transaction_pooler", &self.transaction_pooler)
            .field("keys", &self.keys)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_may_be_gone_by_either_clock() {
        let (hour, now) = (Duration::from_secs(3600), (Instant::now(), SystemTime::now()));
        assert!(!RetentionEnd::of(now, hour).is_over());
        // The machine was suspended: only the wall clock went on.
        assert!(RetentionEnd::of((now.0, now.1 - 2 * hour), hour).is_over());
        // The wall clock was set back.
        assert!(RetentionEnd::of((now.0, now.1 + hour), Duration::ZERO).is_over());
    }
}
