//! The store.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use oncegate_core::{
    Advisory, AuditEntry, Capabilities, ChangeListener, Claim, Command, Complete, Durability, ErrorChain,
    Extent, Fencing, FencingToken, Forget, ListPage, ListQuery, Outcome, Record, RecordId, RecordStep,
    Release, Renew, Replacement, Resolution, Resolve, Rewrite, ServerClock, StateName, StateSet, Store,
    StoreError, StoreErrorKind, StoreFuture, StoredResponse, Survey, SurveyQuery, Timestamp, limits, listen,
};
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnection, PgPool, PgPoolOptions, PgRow};
use sqlx::{Connection as _, Error, Postgres, Row as _};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, oneshot};

use crate::batch::{Admission, Job, Lane, SenderRole, is_large, is_large_end};
use crate::call::{Arg, Call};
use crate::error::{PostgresOpenError, describe, is_lost, is_undone, store_error};
use crate::options::PostgresOptions;
use crate::record::{self, Reply, optional, unexpected_reply};
use crate::schema;
use crate::survey;
use crate::watch::{Listener, max_watchers};

/// The pauses between attempts while another open transaction holds the record. Together they are as long as a commit takes,
/// which is shorter than an application's transaction may be.
const LOCKED_PAUSES: [Duration; 4] = [
    Duration::from_millis(3),
    Duration::from_millis(10),
    Duration::from_millis(30),
    Duration::from_millis(80),
];

/// The store on a PostgreSQL primary. See the [crate's documentation](crate).
pub struct PostgresStore {
    shared: Arc<StoreInner>,
    runtime: Handle,
    /// `None` behind a pooler that keeps no session.
    listener: Option<(ChangeListener, Listener)>,
}

struct StoreInner {
    pool: PgPool,
    clock: ServerClock,
    command_timeout: Duration,
    statement_timeout: Duration,
    transaction_pooler: bool,
    flushing: Flushing,
    claims: Arc<Lane>,
    completions: Arc<Lane>,
    /// Permits for replies that are larger than a batch may be.
    large: Semaphore,
}

/// The server's settings about the flush of commits (`fsync`, `synchronous_commit`). They can change while the server runs.
#[derive(Default)]
struct Flushing {
    database: String,
    /// True if the server flushed commits when it was asked last.
    is_synced: AtomicBool,
    /// True if it did so once since the store was opened.
    was_synced: AtomicBool,
}

impl Flushing {
    /// Notes what the server said, and logs a change.
    fn note(&self, is_synced: bool) {
        let was = self.is_synced.swap(is_synced, Ordering::AcqRel);
        self.was_synced.fetch_or(is_synced, Ordering::AcqRel);
        match (was, is_synced) {
            (true, false) => self.warn(),
            (false, true) => tracing::info!(database = %self.database, "the server flushes commits again"),
            _ => {}
        }
    }

    fn warn(&self) {
        tracing::warn!(
            database = %self.database,
            "the server does not flush commits (fsync or synchronous_commit is off): a crash may lose records, and their \
             requests would execute again; turn both on"
        );
    }

    fn durability(&self) -> Durability {
        if self.is_synced.load(Ordering::Acquire) { Durability::Synced } else { Durability::Buffered }
    }

    /// Returns true if the server flushed commits once, and does not now.
    fn is_weakened(&self) -> bool {
        self.was_synced.load(Ordering::Acquire) && !self.is_synced.load(Ordering::Acquire)
    }
}

impl PostgresStore {
    /// Connects, and checks that the database has the contract, takes writes, and flushes commits.
    ///
    /// # Errors
    /// [`PostgresOpenError`] if the database cannot be reached, has no contract or one of another version, or is a standby.
    ///
    /// # Panics
    /// Outside of a Tokio runtime, if the options name none.
    pub async fn open(options: PostgresOptions) -> Result<Self, PostgresOpenError> {
        let runtime = options.runtime.clone().unwrap_or_else(Handle::current);
        let listener = max_watchers(&options).map(|max| (ChangeListener::new(max), Listener::new(&options)));
        let every = options.inspect_interval;
        let opened = runtime.spawn(StoreInner::open(options)).await;
        let shared = opened
            .unwrap_or_else(|_| Err(PostgresOpenError::Url("the runtime is shutting down".to_owned())))?;
        let shared = Arc::new(shared);
        runtime.spawn(inspect_every(every, Arc::downgrade(&shared)));
        Ok(Self { shared, runtime, listener })
    }

    /// Waits for running calls, and closes every connection. Later commands are refused as unavailable.
    pub async fn close(&self) {
        if let Some((listener, _)) = &self.listener {
            listener.close();
        }
        let pool = self.shared.pool.clone();
        // The task fails only if the runtime ends.
        let _ = self.runtime.spawn(async move { pool.close().await }).await;
    }

    /// Runs on the store's own runtime, so that a caller that goes away leaves no connection in the middle of a reply.
    fn on_runtime<T, F>(&self, run: impl FnOnce(Arc<StoreInner>) -> F) -> StoreFuture<'_, T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let task = self.runtime.spawn(run(self.shared.clone()));
        Box::pin(async move { task.await.unwrap_or_else(|_| Err(shutting_down())) })
    }

    /// Sends the command together with waiting commands of its kind.
    fn in_lane(&self, lane: &Arc<Lane>, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        let (reply, received) = oneshot::channel();
        match lane.put(Job { id, command, reply, since: Instant::now() }) {
            Admission::Wait => {}
            Admission::Start => {
                let mut sending = SenderRole::on(lane.clone());
                let shared = self.shared.clone();
                self.runtime.spawn(async move {
                    loop {
                        // The callers of the last batch have their replies and are about to send their next commands. Let them
                        // go first, so that this batch has these, too. It doubles the batches under load, and a lone command is
                        // not measurably slower.
                        tokio::task::yield_now().await;
                        let Some(batch) = sending.next() else { break };
                        let (jobs, begun) = (batch.len(), Instant::now());
                        let left = shared.clone().send_batch(batch).await;
                        sending.took(jobs, begun.elapsed());
                        sending.put_back(left);
                    }
                });
            }
            Admission::Full => {
                let error = StoreError::unavailable("too many commands wait for PostgreSQL");
                let error = error.with_extent(Extent::Record).with_nothing_sent();
                return Box::pin(std::future::ready(Err(error)));
            }
        }
        Box::pin(async move { received.await.unwrap_or_else(|_| Err(shutting_down())) })
    }
}

/// Reads the server's settings at an interval, as long as the store exists.
async fn inspect_every(every: Duration, store: Weak<StoreInner>) {
    loop {
        tokio::time::sleep(every).await;
        let Some(shared) = store.upgrade().filter(|shared| !shared.pool.is_closed()) else { return };
        if let Err(error) = shared.inspect().await {
            tracing::debug!(error = %ErrorChain(&error), "the settings of PostgreSQL could not be read");
        }
    }
}

fn shutting_down() -> StoreError {
    StoreError::unavailable("the store's runtime is shutting down")
}

impl Store for PostgresStore {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        match command {
            Command::Claim(_) => self.in_lane(&self.shared.claims, id, command),
            Command::Complete(_) => self.in_lane(&self.shared.completions, id, command),
            _ => self.on_runtime(|shared| async move { shared.apply(id, command, &always).await }),
        }
    }

    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        self.on_runtime(|shared| async move {
            let call = Call::new(LOOKUP, [id_arg(&id)]);
            let rows = shared.call(call, CallOptions::command(Resend::Always)).await?;
            rows.first().map(record::record).transpose()
        })
    }

    fn open_transactions(&self) -> StoreFuture<'_, Vec<String>> {
        let shared = self.shared.clone();
        Box::pin(async move {
            let rows = shared.call(open_transactions_call(), CallOptions::command(Resend::Always)).await?;
            open_transactions(&rows)
        })
    }

    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage> {
        self.on_runtime(|shared| async move { shared.list(&query).await })
    }

    fn survey(&self, query: SurveyQuery) -> StoreFuture<'_, Option<Survey>> {
        self.on_runtime(|shared| async move {
            let result = shared.try_call(survey::call(&query), CallOptions::long(Resend::Always)).await;
            match result {
                Ok(rows) => survey::read(&rows, query.is_oldest_first).map(Some),
                // An older text of the contract, or a role without the right to this function: records are listed instead.
                Err(Failure::Refused(Error::Database(error))) if is_missing(&*error) => Ok(None),
                Err(failure) => Err(failure.into_store_error()),
            }
        })
    }

    fn purge(&self, limit: usize) -> StoreFuture<'_, usize> {
        self.on_runtime(move |shared| async move {
            let limit = limit.min(limits::MAX_PAGE_RECORDS);
            let args = [Arg::Small(i32::try_from(limit).unwrap_or(i32::MAX))];
            let call = Call::new("SELECT * FROM oncegate.purge($1)", args);
            let rows = shared.call(call, CallOptions::long(Resend::IfUndone)).await?;
            let purged: i32 = record::column(rows.first().ok_or_else(unexpected_reply)?, "purged")?;
            usize::try_from(purged).map_err(|_| unexpected_reply())
        })
    }

    fn audit(&self, before: Option<u64>, limit: usize) -> StoreFuture<'_, Vec<AuditEntry>> {
        self.on_runtime(move |shared| async move {
            let before =
                before.map_or(Arg::NoBig, |number| Arg::Big(i64::try_from(number).unwrap_or(i64::MAX)));
            let most = Arg::Small(i32::try_from(limit.min(limits::MAX_PAGE_RECORDS)).unwrap_or(i32::MAX));
            let call = Call::new("SELECT * FROM oncegate.audit_trail($1, $2)", [before, most]);
            let rows = shared.call(call, CallOptions::long(Resend::Always)).await?;
            rows.iter().map(record::audit_entry).collect()
        })
    }

    fn check(&self) -> StoreFuture<'_, ()> {
        self.on_runtime(|shared| async move {
            let standing = shared.inspect().await?;
            if standing.is_standby {
                return Err(StoreError::unavailable("the database is a standby, which takes no writes"));
            }
            match standing.version {
                Some(version) if version >= schema::VERSION => {}
                _ => {
                    return Err(StoreError::invalid(
                        "the schema of the database is missing or too old: run `oncegate schema apply postgres`",
                    ));
                }
            }
            let waits = Call::new(WAITING_COMMIT, [Arg::Big(record::millis(shared.command_timeout / 2))]);
            let rows = shared.call(waits, CallOptions::command(Resend::Always)).await?;
            if !rows.is_empty() {
                return Err(StoreError::unavailable(
                    "commits wait for a synchronous standby of PostgreSQL that does not confirm them",
                ));
            }
            let rows =
                shared.call(Call::new(MISSING_RIGHTS, []), CallOptions::command(Resend::Always)).await?;
            match optional::<String>(rows.first().ok_or_else(unexpected_reply)?, "missing")? {
                None => Ok(()),
                Some(missing) => Err(StoreError::invalid(format!("the role may not call {missing}"))),
            }
        })
    }

    fn changed(&self, id: RecordId) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        match &self.listener {
            Some((listener, source)) => listener.changed(id, |watchers| {
                self.runtime.spawn(listen(watchers, source.clone()));
            }),
            None => Box::pin(std::future::pending()),
        }
    }

    fn now(&self) -> Timestamp {
        self.shared.clock.now()
    }

    /// `less-durable` while the server does not flush commits, and did so since this store was opened.
    fn advisories(&self) -> Vec<Advisory> {
        let text = "the server of the store keeps less than it did (buffered, and synced before): fsync or synchronous_commit is \
                    off, so a crash of it now may lose the last records, and their keys execute again. Turn both on";
        self.shared
            .flushing
            .is_weakened()
            .then(|| Advisory::new("less-durable", text.to_owned()))
            .into_iter()
            .collect()
    }

    fn capabilities(&self) -> Capabilities {
        let durability = self.shared.flushing.durability();
        let mut capabilities = Capabilities::new("postgres", durability, Fencing::Monotonic);
        capabilities.atomic_with_effect = true;
        capabilities
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore").finish_non_exhaustive()
    }
}

impl StoreInner {
    async fn open(options: PostgresOptions) -> Result<Self, PostgresOpenError> {
        let database = options.database();
        let pool = PgPoolOptions::new()
            .max_connections(options.pool_size)
            .acquire_timeout(options.connect_timeout)
            // A test would be one more round trip for each call. The call itself finds a dead connection.
            .test_before_acquire(false)
            .connect_lazy_with(options.connect_options());
        // A third of the connections for each kind of command, so that renewals find a free one.
        let senders = usize::try_from(options.pool_size / 3).unwrap_or(1).clamp(1, 4);
        let queue_timeout = options.connect_timeout + options.statement_timeout.max(options.command_timeout);
        let timeout = options.command_timeout.min(options.statement_timeout);
        let lane = || Lane::new(options.max_batch, senders, queue_timeout, timeout);
        let shared = Self {
            pool,
            clock: ServerClock::new(Timestamp::default()),
            command_timeout: options.command_timeout,
            statement_timeout: options.statement_timeout,
            transaction_pooler: options.transaction_pooler,
            flushing: Flushing { database: database.clone(), ..Flushing::default() },
            claims: Arc::new(lane()),
            completions: Arc::new(lane()),
            large: Semaphore::new(LARGE_AT_ONCE),
        };
        let terms = CallOptions::long(Resend::IfUndone);
        let standing = match shared.send(Call::new(SERVER_STATE, []), terms).await {
            Ok(rows) => rows.first().map(ServerState::read).and_then(Result::ok),
            Err(Failure::Refused(Error::Database(error))) if is_missing(&*error) => {
                return Err(PostgresOpenError::NoContract { database, found: None, needed: schema::VERSION });
            }
            Err(failure) => {
                let why = match &failure {
                    Failure::Unsent(Error::PoolTimedOut) => connect_error(&options).await,
                    _ => None,
                };
                let why = why.unwrap_or_else(|| failure.to_string());
                return Err(if failure.may_pass() {
                    PostgresOpenError::Unreachable { database, why }
                } else {
                    PostgresOpenError::Connect { database, why }
                });
            }
        };
        let standing = standing.ok_or_else(|| PostgresOpenError::Connect {
            database: database.clone(),
            why: "its reply is not one of the contract".to_owned(),
        })?;
        match standing.version {
            Some(found) if found > schema::VERSION => {
                return Err(PostgresOpenError::NewerContract { database, found, known: schema::VERSION });
            }
            Some(schema::VERSION) => {}
            found => {
                let found = found.or(Some(0));
                return Err(PostgresOpenError::NoContract { database, found, needed: schema::VERSION });
            }
        }
        if standing.is_standby {
            return Err(PostgresOpenError::Standby { database });
        }
        let rights = shared.send(Call::new(MISSING_RIGHTS, []), terms).await;
        let missing = rights.map(|rows| rows.first().and_then(|row| row.try_get("missing").ok().flatten()));
        match missing {
            Ok(None::<String>) => {}
            // Otherwise the first requests whose completions are refused would find out.
            Ok(Some(missing)) => {
                let why = format!(
                    "the role may not call {missing}; as the owner of the schema: GRANT EXECUTE ON ALL FUNCTIONS IN \
                     SCHEMA oncegate TO the role"
                );
                return Err(PostgresOpenError::Connect { database, why });
            }
            Err(failure) => {
                let why = failure.to_string();
                return Err(PostgresOpenError::Unreachable { database, why });
            }
        }
        match standing.is_synced {
            true => {
                shared.flushing.is_synced.store(true, Ordering::Release);
                shared.flushing.was_synced.store(true, Ordering::Release);
            }
            false => shared.flushing.warn(),
        }
        Ok(shared)
    }

    /// Reads the state of the server, and notes how durable its commits are.
    async fn inspect(&self) -> Result<ServerState, StoreError> {
        let rows = self.call(Call::new(SERVER_STATE, []), CallOptions::command(Resend::Always)).await?;
        let standing = ServerState::read(rows.first().ok_or_else(unexpected_reply)?)?;
        self.flushing.note(standing.is_synced);
        Ok(standing)
    }

    async fn apply(&self, id: RecordId, command: Command, wanted: Wanted<'_>) -> Result<Outcome, StoreError> {
        let unknown = || StoreError::invalid("the PostgreSQL store does not know this command");
        let resend = match command {
            // Its sender has to know that the first claim may be granted later. See decision 0038.
            Command::Claim(_) => Resend::IfUndone,
            // An operator's decision must not be applied twice.
            Command::Resolve(_) => Resend::IfUndone,
            // Sent again, each of these gets the lost reply.
            _ => Resend::Always,
        };
        let is_large = match &command {
            Command::Complete(complete) => is_large_end(complete),
            // No request waits for it.
            Command::Rewrite(_) => true,
            _ => false,
        };
        let terms = if is_large { CallOptions::long(resend) } else { CallOptions::command(resend) };
        let terms = CallOptions { wanted, ..terms };
        let call = match &command {
            Command::Claim(claim) => claim_call(CLAIM_BRIEFLY, &id, claim).ok_or_else(unknown)?,
            Command::Renew(renew) => renew_call(&id, renew),
            Command::Step(RecordStep { token, number, step }) => Call::new(
                "SELECT * FROM oncegate.step($1, $2, $3, $4, $5)",
                [
                    id_arg(&id),
                    token_arg(*token),
                    Arg::Small(i32::try_from(*number).unwrap_or(i32::MAX)),
                    Arg::Text(step.name().to_owned()),
                    Arg::Bytes(step.result().clone()),
                ],
            ),
            Command::Complete(complete) => complete_call(&id, complete).ok_or_else(unknown)?,
            Command::Release(release) => release_call(&id, release),
            Command::Resolve(resolve) => resolve_call(&id, resolve).ok_or_else(unknown)?,
            Command::Rewrite(rewrite) => rewrite_call(&id, rewrite),
            Command::Forget(forget) => forget_call(&id, forget),
            _ => return Err(unknown()),
        };
        for pause in LOCKED_PAUSES.into_iter().map(Some).chain([None]) {
            let rows = self.call(call.clone(), terms).await?;
            match (record::reply(rows.first().ok_or_else(unexpected_reply)?)?, pause) {
                (Reply::Outcome(outcome), _) => return Ok(outcome),
                (Reply::Locked, Some(pause)) => tokio::time::sleep(pause).await,
                (Reply::Locked, None) => break,
                (Reply::Large | Reply::Later, _) => return self.claim_large(&id, &command, wanted).await,
            }
        }
        Err(StoreError::locked("another transaction holds the record"))
    }

    /// Sends a claim whose reply is large, which may take as long as the server allows. Few of them run at the same time.
    async fn claim_large(
        &self,
        id: &RecordId,
        command: &Command,
        wanted: Wanted<'_>,
    ) -> Result<Outcome, StoreError> {
        let Command::Claim(claim) = command else { return Err(unexpected_reply()) };
        let call = claim_call(CLAIM, id, claim).ok_or_else(unexpected_reply)?;
        // The semaphore is never closed.
        let _place = self.large.acquire().await.map_err(|_| unexpected_reply())?;
        let rows = self.call(call, CallOptions { wanted, ..CallOptions::long(Resend::IfUndone) }).await?;
        match record::reply(rows.first().ok_or_else(unexpected_reply)?)? {
            Reply::Outcome(outcome) => Ok(outcome),
            Reply::Locked => Err(StoreError::locked("another transaction holds the record")),
            Reply::Large | Reply::Later => Err(unexpected_reply()),
        }
    }

    /// Sends a batch as one statement, or its only command. Returns the jobs that are still to be sent.
    async fn send_batch(self: Arc<Self>, mut batch: Vec<Job>) -> Vec<Job> {
        let (rows, batch) = loop {
            let call = if batch.len() > 1 { many_call(&batch) } else { None };
            let Some(call) = call else {
                self.send_each(batch).await;
                return Vec::new();
            };
            let wanted = || batch.iter().all(|job| !job.reply.is_closed());
            // The rules of a single command apply.
            let is_claims = matches!(batch.first(), Some(Job { command: Command::Claim(_), .. }));
            let resend = if is_claims { Resend::IfUndone } else { Resend::Always };
            let terms =
                if is_large(&batch) { CallOptions::long(resend) } else { CallOptions::command(resend) };
            let rows = self.try_call(call, CallOptions { wanted: &wanted, ..terms }).await;
            // Nothing was sent. Send the others, without the jobs whose callers have gone.
            if matches!(rows, Err(Failure::Unwanted)) {
                batch.retain(|job| !job.reply.is_closed());
                continue;
            }
            break (rows.map_err(Failure::into_store_error), batch);
        };
        let error = match rows {
            Ok(rows) if rows.len() == batch.len() => {
                let mut left = Vec::new();
                for (job, row) in batch.into_iter().zip(&rows) {
                    match record::reply(row) {
                        Ok(Reply::Later) => left.push(job),
                        // It may take a while, so it must not delay the others.
                        Ok(Reply::Locked | Reply::Large) => {
                            drop(tokio::spawn(self.clone().send_each(vec![job])))
                        }
                        // The caller may have gone, here and below.
                        Ok(Reply::Outcome(outcome)) => drop(job.reply.send(Ok(outcome))),
                        Err(error) => drop(job.reply.send(Err(error))),
                    }
                }
                return left;
            }
            Ok(_) => unexpected_reply(),
            Err(error) => error,
        };
        if error.kind() != StoreErrorKind::Unavailable {
            // The server refused one of them, and with it the whole statement. Send each by itself.
            self.send_each(batch).await;
            return Vec::new();
        }
        for job in batch {
            let each = StoreError::unavailable(ErrorChain(&error).to_string()).with_extent(error.extent());
            let each = if error.is_unsent() { each.with_nothing_sent() } else { each };
            let _ = job.reply.send(Err(each));
        }
        Vec::new()
    }

    async fn send_each(self: Arc<Self>, batch: Vec<Job>) {
        for job in batch {
            let outcome = self.apply(job.id, job.command, &|| !job.reply.is_closed()).await;
            let _ = job.reply.send(outcome);
        }
    }

    /// Lists records in several states. The contract's function takes one state or all, so it is called once for each state.
    /// All calls return records in the order of their identifiers, so the pages are merged up to the shortest one.
    async fn list(&self, query: &ListQuery) -> Result<ListPage, StoreError> {
        if query.states == StateSet::ALL {
            return self.list_state(query, None).await;
        }
        let mut page = ListPage::default();
        for state in query.states.iter() {
            let mut part = self.list_state(query, Some(state)).await?;
            page.records.append(&mut part.records);
            page.unreadable.append(&mut part.unreadable);
            page.next = match (page.next, part.next) {
                (Some(one), Some(other)) => Some(one.min(other)),
                (one, other) => one.or(other),
            };
        }
        // A record whose state changed between two calls is in both pages: the later call is right.
        page.records.reverse();
        page.records.sort_by_key(|(id, _)| *id);
        page.records.dedup_by_key(|(id, _)| *id);
        page.unreadable.sort_unstable();
        page.unreadable.dedup();
        if let Some((last, _)) = page.records.get(query.bounded_limit() - 1)
            && (page.records.len() > query.bounded_limit() || page.next.is_some())
        {
            page.next = Some(page.next.map_or(*last, |next| next.min(*last)));
        }
        if let Some(next) = page.next {
            page.records.retain(|(id, _)| *id <= next);
            page.unreadable.retain(|id| *id <= next);
        }
        Ok(page)
    }

    async fn list_state(&self, query: &ListQuery, state: Option<StateName>) -> Result<ListPage, StoreError> {
        list_page(&self.call(list_call(query, state), CallOptions::long(Resend::Always)).await?)
    }

    async fn call(&self, call: Call, terms: CallOptions<'_>) -> Result<Vec<PgRow>, StoreError> {
        self.try_call(call, terms).await.map_err(Failure::into_store_error)
    }

    async fn try_call(&self, call: Call, terms: CallOptions<'_>) -> Result<Vec<PgRow>, Failure> {
        let result = self.send(call.clone(), terms).await;
        let may_resend = match &result {
            Err(Failure::Undone(_)) => true,
            Err(Failure::Lost(_)) => terms.resend == Resend::Always,
            _ => false,
        };
        if !may_resend {
            return result;
        }
        match (self.send(call, terms).await, result) {
            // The second call was not sent, but the first one may have been carried out.
            (Err(Failure::Unsent(error)), Err(Failure::Lost(_))) => Err(Failure::Lost(error)),
            (Err(Failure::Unwanted), first) => first,
            (sent, _) => sent,
        }
    }

    /// Sends a call once, and takes the server's time from the reply.
    async fn send(&self, call: Call, terms: CallOptions<'_>) -> Result<Vec<PgRow>, Failure> {
        let result = self.exchange(call, terms).await;
        if matches!(result, Err(Failure::Lost(_) | Failure::Undone(_) | Failure::TimedOut)) {
            // The cause of this loss has likely ended the idle connections, too: a restart, a failover, a firewall that forgot
            // them.
            while let Some(idle) = self.pool.try_acquire() {
                drop(idle.detach());
            }
        }
        let rows = result?;
        if let Some(clock) = rows.first().and_then(|row| row.try_get::<i64, _>("clock").ok()) {
            self.clock.saw(Timestamp::from_millis(clock.unsigned_abs()));
        }
        Ok(rows)
    }

    async fn exchange(&self, call: Call, terms: CallOptions<'_>) -> Result<Vec<PgRow>, Failure> {
        let mut connection = self.pool.acquire().await.map_err(Failure::Unsent)?;
        // Getting a connection may have taken as long as an outage. If the caller of a claim was refused meanwhile, and
        // already looked for a record to release, this claim would leave a record without an owner.
        if !(terms.wanted)() {
            return Err(Failure::Unwanted);
        }
        let sent = async {
            if self.transaction_pooler {
                call.in_one_message(&mut connection).await
            } else {
                call.prepared(&mut connection).await
            }
        };
        let by_server = self.statement_timeout + REPLY_MARGIN;
        let limit = if terms.is_long { by_server } else { self.command_timeout.min(by_server) };
        match tokio::time::timeout(limit, sent).await {
            Ok(Ok(rows)) => {
                return_to_pool_within(connection, limit);
                Ok(rows)
            }
            Ok(Err(error)) if is_lost(&error) => {
                drop(connection.detach());
                Err(if is_undone(&error) { Failure::Undone(error) } else { Failure::Lost(error) })
            }
            Ok(Err(error)) => {
                // The server reports an error before it releases the locks of the statement. A caller that asks again at once,
                // on another connection, would meet our own lock. After this ping, the server has released it.
                match tokio::time::timeout(REPLY_MARGIN, connection.ping()).await {
                    Ok(Ok(())) => return_to_pool_within(connection, limit),
                    _ => drop(connection.detach()),
                }
                Err(Failure::Refused(error))
            }
            Err(_) => {
                // The connection is in the middle of a reply, or its other end is dead: it cannot be used again.
                drop(connection.detach());
                Err(Failure::TimedOut)
            }
        }
    }
}

/// Returns a connection to the pool. sqlx asks the server once more before the connection is free, without a timeout: a few
/// connections that a firewall forgot just then would exhaust the pool.
fn return_to_pool_within(mut connection: PoolConnection<Postgres>, limit: Duration) {
    tokio::spawn(async move {
        // A connection without a reply in time is dropped, which frees its place in the pool.
        let _ = tokio::time::timeout(limit, connection.return_to_pool()).await;
    });
}

/// The rule for sending a call a second time because its connection was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Resend {
    /// Only if the server has certainly not carried out the first call.
    IfUndone,
    /// Also if that is not known.
    Always,
}

/// The conditions of a call.
#[derive(Clone, Copy)]
struct CallOptions<'a> {
    resend: Resend,
    /// True if the call may take as long as the server allows. Requests wait for all other calls.
    is_long: bool,
    wanted: Wanted<'a>,
}

impl CallOptions<'static> {
    fn command(resend: Resend) -> Self {
        Self { resend, is_long: false, wanted: &always }
    }

    fn long(resend: Resend) -> Self {
        Self { is_long: true, ..Self::command(resend) }
    }
}

/// The time that we wait for a reply after the server's own timeout.
const REPLY_MARGIN: Duration = Duration::from_millis(500);

/// Returns true as long as a caller waits for the reply.
type Wanted<'a> = &'a (dyn Fn() -> bool + Send + Sync);

const fn always() -> bool {
    true
}

pub(crate) const CLAIM: &str = "SELECT * FROM oncegate.claim($1, $2, $3, $4, $5, $6, $7, $8, $9)";

/// As [`CLAIM`], but without a response that is larger than the responses of a batch may be together.
const CLAIM_BRIEFLY: &str = "SELECT c.outcome, c.token, c.attempts, c.lease_until, c.after_abandoned, c.lease_left_ms, \
     CASE WHEN pg_catalog.octet_length(c.response) <= 8388608 THEN c.response END AS response, c.clock \
     FROM oncegate.claim($1, $2, $3, $4, $5, $6, $7, $8, $9) AS c";

const CLAIM_MANY_BRIEFLY: &str = "SELECT c.outcome, c.token, c.attempts, c.lease_until, c.after_abandoned, c.lease_left_ms, \
     CASE WHEN pg_catalog.octet_length(c.response) <= 8388608 THEN c.response END AS response, c.clock \
     FROM oncegate.claim_many($1, $2, $3, $4, $5, $6, $7, $8, $9) WITH ORDINALITY AS c ORDER BY c.ordinality";

/// The number of large replies that are received at the same time.
const LARGE_AT_ONCE: usize = 2;

/// Reads a record with its steps by one statement: an attempt must not see its steps of another moment.
const LOOKUP: &str = "SELECT * FROM oncegate.lookup($1)";

/// A lookup that also returns a row if there is no record, and that tells if its snapshot is that of this statement.
const LOOKUP_IN_TRANSACTION: &str = "SELECT current_setting('transaction_isolation') = 'read committed' AS is_current, l.* \
     FROM (SELECT) AS one LEFT JOIN oncegate.lookup($1) AS l ON true";

/// The open transactions of clients in this database, and its prepared ones. Every role sees all of these columns.
const OPEN_TRANSACTIONS: &str = "SELECT l.virtualtransaction AS name FROM pg_locks AS l JOIN pg_stat_activity AS a ON a.pid = l.pid \
     WHERE l.locktype = 'virtualxid' AND l.mode = 'ExclusiveLock' AND l.granted AND a.datname = current_database() \
     AND a.usesysid IS NOT NULL AND l.pid <> pg_backend_pid() \
     UNION ALL SELECT 'prepared ' || p.gid FROM pg_prepared_xacts AS p WHERE p.database = current_database()";

const LIST: &str =
    "SELECT * FROM oncegate.list($1, $2, $3, $4, $5, $6, $7) WITH ORDINALITY AS r ORDER BY r.ordinality";

/// The state of the server, which is read when the store is opened, when it is checked, and at an interval.
const SERVER_STATE: &str = "SELECT oncegate.contract_version() AS version, pg_is_in_recovery() AS is_standby, \
     current_setting('synchronous_commit') <> 'off' AND current_setting('fsync') = 'on' AS is_synced, \
     oncegate.now_ms() AS clock";

/// The functions of a store that its role may not call; null if there is none.
const MISSING_RIGHTS: &str = "SELECT string_agg(DISTINCT 'oncegate.' || p.proname::text, ', ') AS missing FROM pg_proc p \
     JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = 'oncegate' AND p.proname IN ('claim', 'claim_many', \
     'renew', 'step', 'complete_if_owner', 'complete_many', 'release', 'resolve', 'lookup', \
     'list', 'purge', 'audit_trail', 'watch', 'unwatch') AND NOT has_function_privilege(p.oid, 'EXECUTE')";

/// Finds a session of this role whose commit has waited for a standby for this time. Such a session stays until the standby is
/// back, even if its caller has gone. So this check has to write nothing, and loses no further session.
const WAITING_COMMIT: &str = "SELECT 1 FROM pg_stat_activity WHERE usename = session_user AND wait_event = 'SyncRep' \
     AND query_start < clock_timestamp() - $1 * interval '1 millisecond' LIMIT 1";

struct ServerState {
    version: Option<i32>,
    is_standby: bool,
    is_synced: bool,
}

impl ServerState {
    fn read(row: &PgRow) -> Result<Self, StoreError> {
        Ok(Self {
            version: optional(row, "version")?,
            is_standby: record::column(row, "is_standby")?,
            is_synced: record::column(row, "is_synced")?,
        })
    }
}

/// Tells if the schema or the function does not exist, or the role has no right to it.
pub(crate) fn is_missing(error: &dyn sqlx::error::DatabaseError) -> bool {
    matches!(error.code().as_deref(), Some("3F000" | "42883" | "42P01" | "42501"))
}

/// Returns the reason why the server cannot be reached. A pool tries again until its timeout, and does not report it.
async fn connect_error(options: &PostgresOptions) -> Option<String> {
    let connect_options = options.connect_options();
    let connect = PgConnection::connect_with(&connect_options);
    match tokio::time::timeout(options.connect_timeout, connect).await {
        Ok(Ok(_)) => None,
        Ok(Err(error)) => Some(describe(&error)),
        Err(_) => Some(format!("no connection to PostgreSQL: no reply within {:?}", options.connect_timeout)),
    }
}

/// A call without a reply.
enum Failure {
    /// The connection is gone; the call may have been carried out.
    Lost(Error),
    /// The connection cannot be used any more; the call was not carried out.
    Undone(Error),
    /// The server did not answer in time; the call may have been carried out.
    TimedOut,
    /// The server refused the call.
    Refused(Error),
    /// There was no connection to send the call on.
    Unsent(Error),
    /// There was a connection, but the caller had gone. Nothing was sent.
    Unwanted,
}

impl Failure {
    fn into_store_error(self) -> StoreError {
        match self {
            Self::Lost(error) => {
                let extent = store_error(&error).extent();
                StoreError::unavailable(describe(&error)).with_extent(extent)
            }
            Self::Refused(error) | Self::Undone(error) => store_error(&error),
            Self::Unsent(error) => store_error(&error).with_nothing_sent(),
            Self::TimedOut => StoreError::unavailable("PostgreSQL did not answer within the command timeout"),
            Self::Unwanted => {
                StoreError::unavailable("the caller no longer waits for the reply").with_nothing_sent()
            }
        }
    }
}

impl Failure {
    /// Tells if the failure concerns the way to the server, or a server that starts or stops, and not the call itself.
    fn may_pass(&self) -> bool {
        match self {
            Self::Lost(_) | Self::Undone(_) | Self::TimedOut | Self::Unwanted => true,
            Self::Unsent(error) | Self::Refused(error) => is_passing(error),
        }
    }
}

/// Tells if an error concerns the way to the server, or a server that starts, stops or has no connection left.
pub(crate) fn is_passing(error: &Error) -> bool {
    match error {
        Error::PoolTimedOut | Error::Io(_) => true,
        Error::Database(error) => {
            error.code().is_some_and(|code| code.starts_with("57P") || code.starts_with("53"))
        }
        _ => false,
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(error) | Self::Undone(error) | Self::Refused(error) | Self::Unsent(error) => {
                f.write_str(&describe(error))
            }
            Self::TimedOut => f.write_str("it did not answer within the timeout"),
            Self::Unwanted => f.write_str("the caller no longer waits for the reply"),
        }
    }
}

/// The listing of the records in this state, or in any.
pub(crate) fn list_call(query: &ListQuery, state: Option<StateName>) -> Call {
    let text =
        |value: Option<&str>| value.map_or(Arg::NoText, |value| Arg::Text(record::text(value, usize::MAX)));
    let bytes = |value: Option<&[u8]>| value.map_or(Arg::NoBytes, |value| Arg::Bytes(value.to_vec().into()));
    let args = [
        text(state.map(|state| state.as_str())),
        bytes(query.caller.as_ref().map(|caller| &caller.as_bytes()[..])),
        bytes(query.key.as_ref().map(|key| &key.as_bytes()[..])),
        text(query.operation.as_deref()),
        Arg::Big(record::millis(query.min_age)),
        bytes(query.after.as_ref().map(|id| &id.as_bytes()[..])),
        Arg::Small(i32::try_from(query.bounded_limit()).unwrap_or(i32::MAX)),
    ];
    Call::new(LIST, args)
}

/// The page in the reply to a [`list_call`].
pub(crate) fn list_page(rows: &[PgRow]) -> Result<ListPage, StoreError> {
    let mut page = ListPage::default();
    for row in rows {
        let id = record::record_id(row)?;
        if optional::<&str>(row, "state")?.is_none() {
            page.next = Some(id);
            continue;
        }
        match record::record(row) {
            Ok(record) => page.records.push((id, record)),
            Err(_) => page.unreadable.push(id),
        }
    }
    Ok(page)
}

/// Reads a record.
pub(crate) fn lookup_call(id: &RecordId) -> Call {
    Call::new(LOOKUP, [id_arg(id)])
}

pub(crate) fn lookup_in_transaction_call(id: &RecordId) -> Call {
    Call::new(LOOKUP_IN_TRANSACTION, [id_arg(id)])
}

/// The call that returns the open transactions; [`open_transactions`] reads the reply.
pub(crate) fn open_transactions_call() -> Call {
    Call::new(OPEN_TRANSACTIONS, [])
}

pub(crate) fn open_transactions(rows: &[PgRow]) -> Result<Vec<String>, StoreError> {
    let name = |row: &PgRow| row.try_get("name").map_err(|error| store_error(&error));
    rows.iter().map(name).collect()
}

fn id_arg(id: &RecordId) -> Arg {
    Arg::Bytes(id.as_bytes().to_vec().into())
}

fn token_arg(token: FencingToken) -> Arg {
    Arg::Big(token_number(token))
}

/// A granted token is never beyond the range, so an invented one becomes a token that no attempt owns.
fn token_number(token: FencingToken) -> i64 {
    i64::try_from(token.get()).unwrap_or(-1)
}

fn duration_arg(duration: Duration) -> Arg {
    Arg::Big(record::millis(duration))
}

/// Builds a call with the arguments of a claim.
pub(crate) fn claim_call(sql: &'static str, id: &RecordId, claim: &Claim) -> Option<Call> {
    let args = [
        id_arg(id),
        Arg::Bytes(claim.attempt.get().to_be_bytes().to_vec().into()),
        Arg::Bytes(record::fingerprint(&claim.fingerprint).into()),
        duration_arg(claim.lease),
        duration_arg(claim.retention),
        Arg::Text(record::on_abandoned(claim.on_abandoned)?.to_owned()),
        record::caller(&claim.label),
        Arg::Text(record::operation(&claim.label)),
        record::key_tag(&claim.label),
    ];
    Some(Call::new(sql, args))
}

/// Builds the statement of a batch: claims or completions.
fn many_call(batch: &[Job]) -> Option<Call> {
    match batch.first()?.command {
        Command::Claim(_) => claim_many_call(batch),
        _ => complete_many_call(batch),
    }
}

fn claim_many_call(batch: &[Job]) -> Option<Call> {
    let (mut ids, mut attempts, mut fingerprints) = (Vec::new(), Vec::new(), Vec::new());
    let (mut leases, mut retentions, mut policies) = (Vec::new(), Vec::new(), Vec::new());
    let (mut callers, mut operations, mut key_tags) = (Vec::new(), Vec::new(), Vec::new());
    for job in batch {
        let Command::Claim(claim) = &job.command else { return None };
        ids.push(Some(job.id.as_bytes().to_vec()));
        attempts.push(Some(claim.attempt.get().to_be_bytes().to_vec()));
        fingerprints.push(Some(record::fingerprint(&claim.fingerprint)));
        leases.push(record::millis(claim.lease));
        retentions.push(record::millis(claim.retention));
        policies.push(record::on_abandoned(claim.on_abandoned)?.to_owned());
        callers.push(Some(claim.label.caller().as_bytes().to_vec()));
        operations.push(record::operation(&claim.label));
        key_tags.push(claim.label.key().map(|tag| tag.as_bytes().to_vec()));
    }
    let args = [
        Arg::ManyBytes(ids),
        Arg::ManyBytes(attempts),
        Arg::ManyBytes(fingerprints),
        Arg::ManyBig(leases),
        Arg::ManyBig(retentions),
        Arg::ManyText(policies),
        Arg::ManyBytes(callers),
        Arg::ManyText(operations),
        Arg::ManyBytes(key_tags),
    ];
    Some(Call::new(CLAIM_MANY_BRIEFLY, args))
}

fn complete_many_call(batch: &[Job]) -> Option<Call> {
    let (mut ids, mut tokens, mut states) = (Vec::new(), Vec::new(), Vec::new());
    let (mut responses, mut retentions) = (Vec::new(), Vec::new());
    for job in batch {
        let Command::Complete(complete) = &job.command else { return None };
        let (state, response) = record::end(&complete.completion)?;
        ids.push(Some(job.id.as_bytes().to_vec()));
        tokens.push(token_number(complete.token));
        states.push(state.to_owned());
        responses.push(response.map(|response| response.as_encoded().to_vec()));
        retentions.push(record::millis(complete.retention));
    }
    let args = [
        Arg::ManyBytes(ids),
        Arg::ManyBig(tokens),
        Arg::ManyText(states),
        Arg::ManyBytes(responses),
        Arg::ManyBig(retentions),
    ];
    Some(Call::new("SELECT * FROM oncegate.complete_many($1, $2, $3, $4, $5)", args))
}

pub(crate) fn renew_call(id: &RecordId, renew: &Renew) -> Call {
    let args = [id_arg(id), token_arg(renew.token), duration_arg(renew.lease), duration_arg(renew.retention)];
    Call::new("SELECT * FROM oncegate.renew($1, $2, $3, $4)", args)
}

fn complete_call(id: &RecordId, complete: &Complete) -> Option<Call> {
    let (state, response) = record::end(&complete.completion)?;
    let args = [
        id_arg(id),
        token_arg(complete.token),
        Arg::Text(state.to_owned()),
        response.map_or(Arg::NoBytes, |response| Arg::Bytes(response.as_encoded().clone())),
        duration_arg(complete.retention),
    ];
    Some(Call::new("SELECT * FROM oncegate.complete_if_owner($1, $2, $3, $4, $5)", args))
}

fn release_call(id: &RecordId, release: &Release) -> Call {
    let args = [id_arg(id), token_arg(release.token), duration_arg(release.retention)];
    Call::new("SELECT * FROM oncegate.release($1, $2, $3)", args)
}

fn resolve_call(id: &RecordId, resolve: &Resolve) -> Option<Call> {
    let (resolution, response) = match &resolve.resolution {
        Resolution::Complete(response) => ("complete", response.as_ref()),
        Resolution::Release => ("release", None),
        Resolution::Park => ("park", None),
        _ => return None,
    };
    let args = [
        id_arg(id),
        Arg::Text(resolution.to_owned()),
        response.map_or(Arg::NoBytes, |response| Arg::Bytes(response.as_encoded().clone())),
        duration_arg(resolve.retention),
        Arg::Flag(resolve.force),
        Arg::Flag(resolve.amend),
        Arg::Text(record::text(&resolve.actor, limits::MAX_AUDIT_TEXT_BYTES)),
        Arg::Text(record::text(&resolve.reason, limits::MAX_AUDIT_TEXT_BYTES)),
    ];
    Some(Call::new("SELECT * FROM oncegate.resolve($1, $2, $3, $4, $5, $6, $7, $8)", args))
}

fn rewrite_call(id: &RecordId, rewrite: &Rewrite) -> Call {
    let response = |part: Option<&StoredResponse>| {
        part.map_or(Arg::NoBytes, |response| Arg::Bytes(response.as_encoded().clone()))
    };
    let results = |part: fn(&Replacement<Bytes>) -> &Bytes| {
        Arg::ManyBytes(rewrite.step_results.iter().map(|both| Some(part(both).to_vec())).collect())
    };
    let args = [
        id_arg(id),
        token_arg(rewrite.token),
        response(rewrite.response.as_ref().map(|both| &both.from)),
        response(rewrite.response.as_ref().map(|both| &both.to)),
        results(|both| &both.from),
        results(|both| &both.to),
    ];
    Call::new("SELECT * FROM oncegate.rewrite($1, $2, $3, $4, $5, $6)", args)
}

fn forget_call(id: &RecordId, forget: &Forget) -> Call {
    let args = [
        id_arg(id),
        Arg::Text(record::text(&forget.actor, limits::MAX_AUDIT_TEXT_BYTES)),
        Arg::Text(record::text(&forget.reason, limits::MAX_AUDIT_TEXT_BYTES)),
    ];
    Call::new("SELECT * FROM oncegate.forget($1, $2, $3)", args)
}
