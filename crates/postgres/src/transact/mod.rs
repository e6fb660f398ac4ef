//! Claim, business rows and result in one transaction of the application's own.

mod connection;
mod error;
mod guard;
mod json;
mod reservation;
mod transact_fn;

use std::fmt;
use std::future::Future;
use std::time::Duration;

use oncegate_core::{
    AttemptId, Claim, ConfigError, FencingToken, Fingerprint, IdempotencyKey, KeyTag, Label, OnAbandoned,
    Outcome, RecordId, Scope, State, StoreError, StoredResponse, limits,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::postgres::{PgConnection, PgPool, PgRow};
use tokio::time::Instant;

pub use self::connection::{OpenTransaction, StatementError, TransactionConnection};
pub use self::error::{RunError, TransactError, is_conflict, is_conflict_in, is_lost_in, is_rolled_back};
pub use self::guard::{Guard, GuardClaim, GuardError, GuardHeaderError};
use self::json::{EncodeError, not_json};
use self::reservation::{CompletionResult, Reservation};
pub use self::transact_fn::{TransactFn, TransactFnWith};
use crate::backoff::{Backoff, random_bits};
use crate::call::{Arg, Call};
use crate::error::store_error;
use crate::record::{self, Reply};
use crate::store::{CLAIM, claim_call};

const RESERVE_OR_CLAIM: &str = "SELECT * FROM oncegate.reserve_or_claim($1, $2, $3, $4, $5, $6, $7, $8, $9)";

/// How long a completed record is kept, unless told otherwise: as every door does it.
const RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

/// Nobody sees the claim of a transaction before its end, and with its end it is completed or gone. The lease counts only
/// where a guard's transaction commits without completing.
const LEASE: Duration = limits::MAX_LEASE;

/// Runs business transactions once per key, each on one connection of the application's own pool. Cheap to clone.
///
/// What [`transact`](Self::transact) does is one transaction: the claim of the key, the rows that the run writes, and the
/// result that a retry gets commit together, or none of them does. So there is no lease to lose, nothing to clean up after a
/// crash, and the key is as free as if nothing had been asked.
///
/// The database must have the contract ([`schema::apply`](crate::schema::apply)), and the role of the pool the right to
/// execute `oncegate.reserve_or_claim`, `oncegate.complete_reserved`, `oncegate.claim`, `oncegate.complete` and
/// `oncegate.lookup`.
#[derive(Clone)]
pub struct Transactor {
    pool: PgPool,
    retention: Duration,
    wait: Duration,
    statement_timeout: Duration,
    max_attempts: u32,
    isolation: Option<Isolation>,
    transaction_pooler: bool,
}

/// How far a transaction is kept apart from others, in PostgreSQL's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isolation {
    /// `READ COMMITTED`, what PostgreSQL does if it is not told otherwise.
    ReadCommitted,
    /// `REPEATABLE READ`.
    RepeatableRead,
    /// `SERIALIZABLE`.
    Serializable,
}

/// A value, and where it comes from. The same type for both, so that a retry is answered like the first request.
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

    /// Whether an earlier call made the value.
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
        scope: &Scope<'_>,
        key: &IdempotencyKey,
        input: &I,
    ) -> serde_json::Result<Self> {
        let operation: Vec<_> = scope.operation().iter().map(|part| String::from_utf8_lossy(part)).collect();
        Ok(Self {
            record: RecordId::derive(scope, key),
            fingerprint: json::fingerprint(input)?,
            label: Label::new(scope.caller_tag(), &operation.join(" ")).with_key(KeyTag::of(key)),
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
        claim_call(sql, &self.record, &claim).ok_or_else(record::unexpected_answer)
    }
}

/// How a transaction begins.
enum ClaimStart {
    /// There is no record, and nobody else inserts one.
    Reservation(Reservation),
    /// What its claim came to.
    GuardClaim(Reply),
}

/// What a run may complete its record with.
enum CompletionRight {
    /// There was no record.
    Reservation(Reservation),
    /// There was one, which was free.
    GuardClaim(Guard, FencingToken),
}

/// What one try came to.
enum RunResult<T> {
    Done(TransactOutcome<T>),
    /// Somebody else is at it.
    Busy {
        lease_left: Duration,
    },
    /// Rolled back, and worth another run.
    Again(TransactError),
    /// Nothing was run.
    Unreached(StoreError),
    /// COMMIT was sent, and its answer lost.
    LostCommit(SentCommit),
    Failed(TransactError),
}

/// What may have been committed.
#[derive(Clone, Copy)]
struct SentCommit {
    token: FencingToken,
    /// Until then the record is certainly there, if it was committed.
    kept_until: Instant,
}

/// A COMMIT whose answer was lost.
#[derive(Clone, Copy)]
struct LostCommit {
    sent: SentCommit,
    until: Instant,
}

impl Transactor {
    /// On the application's own pool: one retention of 24 hours, no waiting, five runs at the most.
    #[must_use]
    pub const fn new(pool: PgPool) -> Self {
        Self {
            pool,
            retention: RETENTION,
            wait: Duration::ZERO,
            statement_timeout: Duration::from_secs(10),
            max_attempts: 5,
            isolation: None,
            transaction_pooler: false,
        }
    }

    /// The pool that it takes its connections from.
    #[must_use]
    pub const fn pool(&self) -> &PgPool {
        &self.pool
    }

    /// How long a result is kept, counted from its commit, within the bounds of [`limits`]. Default: 24 h.
    ///
    /// # Errors
    /// If it is out of these bounds.
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

    /// How long a call waits for another one that is at it, before it says [`TransactError::InProgress`]; an hour at the most.
    /// It holds no connection while it waits. Default: not at all.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_wait(self, wait: Duration) -> Result<Self, ConfigError> {
        Ok(Self { wait: ConfigError::check("the wait", wait, Duration::ZERO..=limits::MAX_LEASE)?, ..self })
    }

    /// How long the database may take for a claim, for a completion and for `COMMIT`, and how long it is tried after that to
    /// find out what became of a `COMMIT` whose answer was lost; from 100 ms to an hour. Default: 10 s. What the run itself
    /// asks is bounded by the application's own `statement_timeout`.
    ///
    /// # Errors
    /// If it is out of these bounds.
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

    /// How often the transaction is tried at the most, from 1 to 100, where the database says that it may be tried again
    /// (SQLSTATE 40001 and 40P01), or where a lost `COMMIT` turns out not to have been carried out. Default: 5.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_max_attempts(self, max_attempts: u32) -> Result<Self, ConfigError> {
        Ok(Self {
            max_attempts: ConfigError::check("the number of attempts", max_attempts, 1..=100)?,
            ..self
        })
    }

    /// The isolation level of the transaction. Default: what the connection or the server says.
    #[must_use]
    pub fn with_isolation(self, isolation: Isolation) -> Self {
        Self { isolation: Some(isolation), ..self }
    }

    /// The pool goes through a pooler that gives each transaction another session, such as PgBouncer in transaction mode:
    /// statements of ours are prepared without a name, in one more round trip each. Those of the run say `.persistent(false)`.
    #[must_use]
    pub fn with_transaction_pooler(self, through_pooler: bool) -> Self {
        Self { transaction_pooler: through_pooler, ..self }
    }

    /// Runs `run` in a transaction if this is the first call with this key in this scope, and gives the value that the first
    /// one committed if it is not.
    ///
    /// `input` is what makes two calls the same call: another input under the same key is [`TransactError::Mismatch`]. The
    /// value is kept as JSON.
    ///
    /// ```
    /// use oncegate_core::{IdempotencyKey, Scope};
    /// use oncegate_postgres::{TransactOutcome, Transactor, sqlx};
    ///
    /// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let server = oncegate_servers::PostgresServer::start()?;
    /// # oncegate_postgres::schema::apply(&oncegate_postgres::PostgresOptions::new(&server.url())?).await?;
    /// let pool = sqlx::PgPool::connect(&server.url()).await?;
    /// # sqlx::query("CREATE TABLE payments (id bigserial, customer text, cents bigint)").execute(&pool).await?;
    /// let transactor = Transactor::new(pool);
    ///
    /// let pay = async || {
    ///     let scope = Scope::caller("customer", "ada").within("POST /payments");
    ///     let key = IdempotencyKey::new(b"order-123")?;
    ///     let done = transactor.transact(&scope, &key, &("ada", 500), async |connection| {
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
    /// # What the run may do
    /// - It is an async closure of this shape, `async |connection| { …; Ok(value) }`. It may refer to what is outside, and is
    ///   cloned for each time that it runs.
    /// - Anything in this transaction, savepoints (`connection.begin()`) too. It must not commit or roll back by statements of
    ///   its own.
    /// - An error that it returns rolls everything back and frees the key. What is to be remembered, such as that a card was
    ///   declined, it returns as a value.
    /// - It is run again where the database says so (see [`with_max_attempts`](Self::with_max_attempts)), so it has no effect
    ///   outside of the transaction. Where it calls somebody else's API, that call takes a key of its own:
    ///   [`RecordId::downstream_key`] of [`RecordId::derive`].
    ///
    /// # What becomes of it when things break
    /// - The future is dropped, or the run panics: rolled back. Dropped while `COMMIT` is under way it may have been
    ///   committed; the next call with the key finds that out.
    /// - The process dies: as above.
    /// - The answer to `COMMIT` is lost: the key is claimed anew until the database says what became of it. If it was
    ///   committed, its value is given; if it was not, the run is started again.
    ///
    /// # Errors
    /// [`TransactError`].
    pub fn transact<'t, I, T, F>(
        &'t self,
        scope: &Scope<'_>,
        key: &IdempotencyKey,
        input: &I,
        run: F,
    ) -> impl Future<Output = Result<TransactOutcome<T>, TransactError>> + Send + use<'t, I, T, F>
    where
        I: Serialize + ?Sized,
        T: Serialize + DeserializeOwned + Send + 't,
        F: for<'c> TransactFn<&'c mut PgConnection, T, Fut: Send> + Clone + Send + Sync + 't,
    {
        let request = Request::new(scope, key, input).map_err(TransactError::Unserializable);
        async move { self.try_until_known(&request?, &run).await }
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
                    tracing::warn!(%record, "the answer to COMMIT was lost; finding out what became of it");
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
        let record = request.record;
        // To find out what became of a COMMIT takes a claim: above READ COMMITTED, what is not seen may be there.
        let claimed = match lost {
            None => self.reserve_or_claim_on(&mut open, request).await,
            Some(_) => self.claim_on(&mut open, request).await.map(ClaimStart::GuardClaim),
        };
        let claimed = match claimed {
            Ok(ClaimStart::Reservation(reserved)) => {
                return self.run_and_commit(open, request, run, CompletionRight::Reservation(reserved)).await;
            }
            Ok(ClaimStart::GuardClaim(said)) => Ok(said),
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
                // It may have been told apart just now; that is kept.
                let _ = open.commit(self.statement_timeout).await;
                return RunResult::Failed(TransactError::Unknown { record });
            }
            Reply::Outcome(Outcome::Replay(response)) => {
                let is_ours = match lost {
                    Some(lost) => self.is_token(&mut open, record, lost.sent.token).await,
                    None => false,
                };
                open.rollback(self.statement_timeout).await;
                return replay(record, &response, is_ours);
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
                        RunResult::Failed(TransactError::Store(record::unexpected_answer()))
                    }
                };
            }
        };
        if let Some(LostCommit { sent, .. }) = lost.take() {
            // It may have been committed, and forgotten since then.
            if Instant::now() >= sent.kept_until {
                open.rollback(self.statement_timeout).await;
                return RunResult::Failed(TransactError::CommitUnknown { record, token: sent.token });
            }
            // It did not commit, or this claim would have found it.
            if !may_run {
                open.rollback(self.statement_timeout).await;
                return RunResult::Failed(TransactError::Store(StoreError::unavailable(
                    "the connection to PostgreSQL ended before the commit; nothing was committed",
                )));
            }
        }
        let guard = Guard::new(record, grant.token, Some(self.retention), !self.transaction_pooler);
        self.run_and_commit(open, request, run, CompletionRight::GuardClaim(guard, grant.token)).await
    }

    async fn run_and_commit<T, F>(
        &self,
        mut open: OpenTransaction<'_>,
        request: &Request,
        run: &F,
        right: CompletionRight,
    ) -> RunResult<T>
    where
        T: Serialize + DeserializeOwned + Send,
        F: for<'c> TransactFn<&'c mut PgConnection, T, Fut: Send> + Clone + Send + Sync,
    {
        match self.run_on(&mut open, request, run, right).await {
            Ok((value, CompletionResult::Completed(token), ended_at)) => {
                let sent = SentCommit { token, kept_until: ended_at + self.retention };
                self.commit(open, value, sent).await
            }
            Ok((_, CompletionResult::Unknown, _)) => {
                // That it is not known is kept.
                let _ = open.commit(self.statement_timeout).await;
                RunResult::Failed(TransactError::Fenced { record: request.record })
            }
            Err(tried) => {
                open.rollback(self.statement_timeout).await;
                tried
            }
        }
    }

    /// The run, and the completion of its record, with a time before which the record did not end.
    async fn run_on<T, F>(
        &self,
        open: &mut OpenTransaction<'_>,
        request: &Request,
        run: &F,
        right: CompletionRight,
    ) -> Result<(T, CompletionResult, Instant), RunResult<T>>
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
        let ended_at = Instant::now();
        let persistent = !self.transaction_pooler;
        let ended = open
            .statement(self.statement_timeout, async |connection| match right {
                CompletionRight::Reservation(reserved) => {
                    reserved.complete(connection, request, &response, self.retention, persistent).await
                }
                CompletionRight::GuardClaim(guard, token) => {
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
                    "a statement of the run had failed, and the run passed over its error".into(),
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
            // Such as a constraint that is checked at the end.
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
            Ok(_) => first_reply(&rows).map(ClaimStart::GuardClaim),
            Err(_) => Err(RunResult::Failed(TransactError::Store(record::unexpected_answer()))),
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

    /// Whether the record is that of the attempt with this token.
    async fn is_token(&self, open: &mut OpenTransaction<'_>, record: RecordId, token: FencingToken) -> bool {
        let call =
            Call::new("SELECT * FROM oncegate.lookup($1)", [Arg::Octets(record.as_bytes().to_vec().into())]);
        let persistent = !self.transaction_pooler;
        let rows = open
            .statement(self.statement_timeout, async |connection| {
                call.in_transaction(connection, persistent).await
            })
            .await;
        // Where it cannot be told, it is a replay: the value is the same.
        let Ok(rows) = rows else { return false };
        rows.first()
            .and_then(|row| record::record(row).ok())
            .is_some_and(|record| record.token == token && matches!(record.state, State::Completed(_)))
    }

    /// Claims in a transaction of one's own, on the connection that it is open on. [`GuardClaim::Execute`] comes with a
    /// guard, to be completed last of all in the same transaction.
    ///
    /// ```
    /// # use oncegate_core::{IdempotencyKey, Scope};
    /// use oncegate_postgres::{GuardClaim, Transactor, sqlx};
    /// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let server = oncegate_servers::PostgresServer::start()?;
    /// # oncegate_postgres::schema::apply(&oncegate_postgres::PostgresOptions::new(&server.url())?).await?;
    /// # let pool = sqlx::PgPool::connect(&server.url()).await?;
    /// # sqlx::query("CREATE TABLE payments (cents bigint)").execute(&pool).await?;
    /// # let (scope, key) = (Scope::single_tenant(), IdempotencyKey::new(b"order-123")?);
    /// let transactor = Transactor::new(pool.clone());
    ///
    /// let mut transaction = pool.begin().await?;
    /// match transactor.claim(&mut transaction, &scope, &key, &500).await? {
    ///     GuardClaim::Execute(guard) => {
    ///         sqlx::query("INSERT INTO payments VALUES (500)").execute(&mut *transaction).await?;
    ///         guard.complete_json(&mut transaction, &"paid").await?;
    ///         transaction.commit().await?;
    ///     }
    ///     GuardClaim::Replay(response) => println!("answer again with {:?}", response.body()),
    ///     other => println!("refuse: {other:?}"),
    /// }
    /// # assert!(matches!(transactor.claim(&mut *pool.acquire().await?, &scope, &key, &500).await?, GuardClaim::Replay(_)));
    /// # Ok(()) }
    /// ```
    ///
    /// Outside of a transaction the claim is committed at once, and has a lease of an hour that nobody renews: what dies in
    /// between leaves a record whose outcome is unknown.
    ///
    /// # Errors
    /// [`GuardError::Store`], [`GuardError::Conflict`]; the transaction has failed then. [`GuardError::Response`] where the
    /// input cannot be written as JSON.
    pub async fn claim<I: Serialize + ?Sized>(
        &self,
        connection: &mut PgConnection,
        scope: &Scope<'_>,
        key: &IdempotencyKey,
        input: &I,
    ) -> Result<GuardClaim, GuardError> {
        let request =
            Request::new(scope, key, input).map_err(|error| GuardError::Response(not_json(error)))?;
        let call = request.claim(self.retention, CLAIM).map_err(GuardError::Store)?;
        let persistent = !self.transaction_pooler;
        let rows = call.in_transaction(connection, persistent).await.map_err(|error| {
            if is_conflict(&error) { GuardError::Conflict } else { GuardError::Store(store_error(&error)) }
        })?;
        Ok(match said(rows.first()).map_err(GuardError::Store)? {
            Reply::Outcome(Outcome::Execute(grant)) => {
                GuardClaim::Execute(Guard::new(request.record, grant.token, Some(self.retention), persistent))
            }
            Reply::Outcome(Outcome::Replay(response)) => GuardClaim::Replay(response),
            Reply::Outcome(Outcome::InProgress { lease_left }) => GuardClaim::InProgress { lease_left },
            Reply::Locked => GuardClaim::InProgress { lease_left: Duration::ZERO },
            Reply::Outcome(Outcome::Mismatch) => GuardClaim::Mismatch,
            Reply::Outcome(Outcome::Unknown) => GuardClaim::Unknown,
            Reply::Outcome(Outcome::Unreplayable) => GuardClaim::Unreplayable,
            Reply::Outcome(_) | Reply::Large | Reply::Later => {
                return Err(GuardError::Store(record::unexpected_answer()));
            }
        })
    }

    const fn begin(&self) -> &'static str {
        begin(self.isolation)
    }
}

/// The statement that begins a transaction; `None` is what the connection or the server says.
#[must_use]
pub const fn begin(isolation: Option<Isolation>) -> &'static str {
    match isolation {
        None => "BEGIN",
        Some(Isolation::ReadCommitted) => "BEGIN ISOLATION LEVEL READ COMMITTED",
        Some(Isolation::RepeatableRead) => "BEGIN ISOLATION LEVEL REPEATABLE READ",
        Some(Isolation::Serializable) => "BEGIN ISOLATION LEVEL SERIALIZABLE",
    }
}

/// Where nothing was run.
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
    record::said(row.ok_or_else(record::unexpected_answer)?)
}

fn replay<T: DeserializeOwned>(record: RecordId, response: &StoredResponse, is_ours: bool) -> RunResult<T> {
    match json::decode(response) {
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
            .finish_non_exhaustive()
    }
}
