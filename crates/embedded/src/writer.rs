//! The thread that writes: natural group commit, and what to do when the disk fails.
//!
//! It takes every command that is waiting, applies [`decide`] to each in order inside one transaction, commits it, and
//! only then answers all of them. While it commits, the next commands gather; it never waits for more of them.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::{
    AuditEntry, Clock as _, Command, Outcome, RecordId, StoreError, Timestamp, Write, codec, decide, limits,
};
use redb::{Database, ReadableTable as _, ReadableTableMetadata as _, StorageError, Table, WriteTransaction};
use tracing::{error, info, warn};

use crate::database::{self, Medium, OpenSettings, Opened};
use crate::error::OpenError;
use crate::queue::Taken;
use crate::schema::{AUDIT, CLOCK_STEP, EXPIRY, META, META_CLOCK, RECORDS, due_step, encode_audit};
use crate::shared::{Job, Reply, Shared, State, closed, damaged_page};

/// The most octets of responses in one transaction, but for one response that is larger: it bounds what a transaction
/// holds in memory and how long it takes.
const BATCH_BYTES: usize = 8 * 1024 * 1024;

/// The most entries of the expiry index that one transaction looks at, so that a purge does not hold up the commands
/// that arrive meanwhile.
const PURGE_STEP: usize = 256;

/// When an unreadable record is looked at again by a purge. It is never removed.
const UNREADABLE_AGAIN: Duration = Duration::from_secs(24 * 60 * 60);

const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_LAST: Duration = Duration::from_secs(5);

pub(crate) struct Writer {
    pub(crate) shared: Arc<Shared>,
    pub(crate) medium: Box<dyn Medium>,
    pub(crate) settings: OpenSettings,
    pub(crate) max_batch: usize,
    /// The clock as it stands in the file.
    pub(crate) clock_floor: Timestamp,
    /// The number for the next entry of the expiry index.
    pub(crate) next_number: u64,
    /// Purges that go on in the next transaction.
    pub(crate) purges: VecDeque<Job>,
}

/// What one job came to in a transaction that is not yet committed.
enum Done {
    Applied(Outcome),
    Purged { now: usize, more: bool },
    Checked,
}

/// A batch that is on disk.
struct Committed {
    done: Vec<Result<Done, StoreError>>,
    clock_floor: Timestamp,
    next_number: u64,
}

/// Why a batch came to nothing.
enum Failure {
    Storage(redb::Error),
    /// redb panicked.
    Panic,
    /// A reader saw an error or a panic.
    Suspect,
}

impl<E: Into<redb::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Storage(error.into())
    }
}

impl Writer {
    /// Until the queue is closed and empty.
    pub(crate) fn run(mut self) {
        // Also when this thread panics: nobody may be left waiting for it.
        let _last = Last(self.shared.clone());
        loop {
            let deadline = (!self.purges.is_empty()).then(Instant::now);
            let mut jobs: Vec<Job> = self.purges.drain(..).collect();
            match self.shared.jobs.take(self.max_batch, BATCH_BYTES, Job::weight, deadline) {
                Taken::Jobs(taken) => jobs.extend(taken),
                Taken::Nothing => {}
                // A purge that goes on and on must not hold up the end.
                Taken::Closed => return jobs.into_iter().for_each(|job| job.fail(closed)),
            }
            jobs.retain(is_awaited);
            if !jobs.is_empty() {
                self.commit(jobs);
            }
        }
    }

    /// Applies the jobs in one transaction and answers them.
    fn commit(&mut self, jobs: Vec<Job>) {
        let shared = self.shared.clone();
        let state = shared.state();
        let State::Open(database) = &*state else {
            let damaged = || state.database().err().unwrap_or_else(closed);
            return jobs.into_iter().for_each(|job| job.fail(damaged));
        };
        let committed = catch_unwind(AssertUnwindSafe(|| self.apply_all(database, &jobs)));
        drop(state);
        match committed.unwrap_or(Err(Failure::Panic)) {
            // M17: the commit has returned, so what is answered here is on disk.
            Ok(committed) => {
                (self.clock_floor, self.next_number) = (committed.clock_floor, committed.next_number);
                for (job, done) in jobs.into_iter().zip(committed.done) {
                    self.answer(job, done);
                }
            }
            Err(failure) => self.recover(&failure.to_string(), jobs),
        }
    }

    fn apply_all(&self, database: &Database, jobs: &[Job]) -> Result<Committed, Failure> {
        let txn = database::begin_write(database)?;
        // One time for the whole transaction.
        let now = self.shared.clock.now();
        let mut done = Vec::with_capacity(jobs.len());
        let mut batch = Batch::new(&txn, now, self.next_number)?;
        for job in jobs {
            done.push(match job {
                Job::Apply { id, command, .. } => batch.apply(*id, command)?.map(Done::Applied),
                Job::Purge { limit, purged, .. } => {
                    let (now, more) = batch.purge(limit.saturating_sub(*purged))?;
                    Ok(Done::Purged { now, more })
                }
                Job::Check { .. } => Ok(Done::Checked),
                Job::Suspect => return Err(Failure::Suspect),
            });
        }
        let (changed, next_number) = (batch.changed, batch.next_number);
        drop(batch);
        if !changed {
            txn.abort()?;
            return Ok(Committed { done, clock_floor: self.clock_floor, next_number });
        }
        let clock_floor = self.write_clock(&txn, now)?;
        txn.commit()?;
        Ok(Committed { done, clock_floor, next_number })
    }

    /// Keeps the clock in the file less than [`CLOCK_STEP`] behind what was written.
    fn write_clock(&self, txn: &WriteTransaction, now: Timestamp) -> Result<Timestamp, redb::Error> {
        if now.as_millis() < self.clock_floor.as_millis().saturating_add(CLOCK_STEP) {
            return Ok(self.clock_floor);
        }
        txn.open_table(META)?.insert(META_CLOCK, now.as_millis())?;
        Ok(now)
    }

    fn answer(&mut self, job: Job, done: Result<Done, StoreError>) {
        match (job, done) {
            (Job::Apply { reply, .. }, Ok(Done::Applied(outcome))) => drop(reply.send(Ok(outcome))),
            (Job::Purge { limit, purged, reply }, Ok(Done::Purged { now, more })) => {
                let purged = purged + now;
                if more && purged < limit {
                    self.purges.push_back(Job::Purge { limit, purged, reply });
                } else {
                    let _ = reply.send(Ok(purged));
                }
            }
            (Job::Check { reply }, Ok(Done::Checked)) => drop(reply.send(Ok(()))),
            (job, Err(error)) => job.fail(|| error),
            (job, Ok(_)) => job.fail(|| StoreError::unavailable("the embedded store lost an answer")),
        }
    }

    /// Closes the file and opens it again, with growing pauses, until it can be written or turns out to be damaged.
    ///
    /// After an error redb answers nothing any more, and the operating system may have dropped what it could not write.
    /// [`database::open`] says why the file is safe to go on with after that.
    fn recover(&mut self, what: &str, jobs: Vec<Job>) {
        error!(
            error = what,
            "the file of the embedded store failed; every command is refused until it can be used again"
        );
        self.refuse(what);
        jobs.into_iter().for_each(|job| self.fail(job));
        let mut pause = Duration::ZERO;
        while self.refuse_for(pause) {
            match self.reopen() {
                Ok(Opened { database, clock_floor, next_number }) => {
                    (self.clock_floor, self.next_number) = (clock_floor, next_number);
                    self.shared.set_state(State::Open(database));
                    info!("the file of the embedded store can be used again");
                    return;
                }
                Err(error @ (OpenError::Damaged { .. } | OpenError::NewerFormat { .. })) => {
                    error!(%error, "the file of the embedded store is damaged; every command is refused");
                    self.shared.set_state(State::Damaged(error.to_string().into()));
                    return;
                }
                Err(error) => {
                    warn!(%error, "the file of the embedded store still fails");
                    self.refuse(&error.to_string());
                }
            }
            pause = (pause * 2).clamp(RETRY_FIRST, RETRY_LAST);
        }
    }

    fn reopen(&self) -> Result<Opened, OpenError> {
        let io = |source| OpenError::Io { what: "write to its directory".to_owned(), source };
        self.medium.probe().map_err(io)?;
        // Whatever its size: a page that makes no sense may be the reason.
        database::open(&*self.medium, OpenSettings { verify_bytes: u64::MAX, ..self.settings })
    }

    fn refuse(&self, what: &str) {
        self.shared.set_state(State::Failing(what.into()));
    }

    fn fail(&self, job: Job) {
        job.fail(|| self.shared.state().database().err().unwrap_or_else(closed));
    }

    /// Refuses all that comes, for this long. Says whether to go on.
    fn refuse_for(&self, pause: Duration) -> bool {
        let deadline = Instant::now() + pause;
        loop {
            match self.shared.jobs.take(usize::MAX, usize::MAX, |_| 1, Some(deadline)) {
                Taken::Jobs(jobs) => jobs.into_iter().for_each(|job| self.fail(job)),
                Taken::Nothing => return true,
                Taken::Closed => return false,
            }
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Storage(error) => error.fmt(f),
            Self::Panic => f.write_str("a page makes no sense to the database"),
            Self::Suspect => f.write_str("a read failed"),
        }
    }
}

/// A command that nobody waits for any more is not carried out: it would only leave a record without an owner.
fn is_awaited(job: &Job) -> bool {
    fn awaited<T>(reply: &Reply<T>) -> bool {
        !reply.is_closed()
    }
    match job {
        Job::Apply { reply, .. } => awaited(reply),
        Job::Purge { reply, .. } => awaited(reply),
        Job::Check { reply } => awaited(reply),
        Job::Suspect => true,
    }
}

/// Closes the file when the writer ends, however it ends.
struct Last(Arc<Shared>);

impl Drop for Last {
    fn drop(&mut self) {
        self.0.jobs.close();
        self.0.set_state(State::Closed);
        while let Taken::Jobs(jobs) = self.0.jobs.take(usize::MAX, usize::MAX, |_| 1, None) {
            jobs.into_iter().for_each(|job| job.fail(closed));
        }
    }
}

/// One transaction.
struct Batch<'txn> {
    txn: &'txn WriteTransaction,
    records: Table<'txn, &'static [u8; 32], &'static [u8]>,
    expiry: Table<'txn, (u64, u64), &'static [u8; 32]>,
    now: Timestamp,
    next_number: u64,
    changed: bool,
}

impl<'txn> Batch<'txn> {
    fn new(txn: &'txn WriteTransaction, now: Timestamp, next_number: u64) -> Result<Self, redb::Error> {
        let (records, expiry) = (txn.open_table(RECORDS)?, txn.open_table(EXPIRY)?);
        Ok(Self { txn, records, expiry, now, next_number, changed: false })
    }

    /// Applies one command. The inner error is this command's alone, and nothing was changed for it.
    fn apply(&mut self, id: RecordId, command: &Command) -> Result<Result<Outcome, StoreError>, redb::Error> {
        let record = match self.records.get(id.as_bytes()) {
            Ok(None) => None,
            Ok(Some(octets)) => match codec::decode(&id, octets.value()) {
                Ok(record) => Some(record),
                Err(error) => return Ok(Err(unreadable(&id, error))),
            },
            Err(StorageError::Corrupted(what)) => return Ok(Err(damaged_page(&what))),
            Err(error) => return Err(error.into()),
        };
        let decision = decide(record.as_ref(), command, self.now);
        match &decision.write {
            Write::Keep => return Ok(Ok(decision.outcome)),
            Write::Put(after) => {
                self.records.insert(id.as_bytes(), codec::encode(&id, after).as_slice())?;
                if record.is_none() {
                    self.note(after.expires_at, id.as_bytes())?;
                }
                if let (Command::Resolve(resolve), Outcome::Resolved { from }) = (command, &decision.outcome)
                {
                    self.add_audit(AuditEntry {
                        number: 0,
                        at: self.now,
                        id,
                        from: *from,
                        to: after.state_name(self.now),
                        actor: resolve.actor.clone(),
                        reason: resolve.reason.clone(),
                    })?;
                }
            }
            Write::Delete => drop(self.records.remove(id.as_bytes())?),
        }
        self.changed = true;
        Ok(Ok(decision.outcome))
    }

    fn add_audit(&self, entry: AuditEntry) -> Result<(), redb::Error> {
        let mut audit = self.txn.open_table(AUDIT)?;
        let number = audit.last()?.map_or(0, |(number, _)| number.value()) + 1;
        audit.insert(number, encode_audit(&entry).as_slice())?;
        while audit.len()? > limits::AUDIT_ENTRIES_MAX {
            audit.pop_first()?;
        }
        Ok(())
    }

    /// Removes at most `limit` expired records, looking at no more than [`PURGE_STEP`]. Says how many, and whether there
    /// may be more.
    fn purge(&mut self, limit: usize) -> Result<(usize, bool), redb::Error> {
        let count = limit.min(PURGE_STEP);
        let mut due = Vec::with_capacity(count);
        for entry in self.expiry.range(..=(self.now.as_millis(), u64::MAX))?.take(count) {
            let (key, id) = entry?;
            due.push((key.value(), *id.value()));
        }
        let mut purged = 0;
        for (key, id) in &due {
            self.changed = true;
            self.expiry.remove(key)?;
            match self.expires_at(id)? {
                Some(expires_at) if self.now >= expires_at => {
                    self.records.remove(id)?;
                    purged += 1;
                }
                Some(expires_at) => self.note(expires_at, id)?,
                None => {}
            }
        }
        Ok((purged, due.len() == count && count > 0))
    }

    /// Notes in the expiry index when to look at a record again.
    fn note(&mut self, expires_at: Timestamp, id: &[u8; 32]) -> Result<(), redb::Error> {
        self.expiry.insert((due_step(expires_at), self.next_number), id)?;
        self.next_number += 1;
        Ok(())
    }

    /// When the record expires; `None` where there is none.
    fn expires_at(&self, id: &[u8; 32]) -> Result<Option<Timestamp>, redb::Error> {
        let Some(octets) = self.records.get(id)? else { return Ok(None) };
        let id = RecordId::from_bytes(*id);
        Ok(Some(match codec::decode(&id, octets.value()) {
            Ok(record) => record.expires_at,
            Err(error) => {
                error!(%id, %error, "a record cannot be read and is kept; run `oncegate check`");
                self.now.after(UNREADABLE_AGAIN)
            }
        }))
    }
}

pub(crate) fn unreadable(id: &RecordId, error: codec::CodecError) -> StoreError {
    StoreError::corrupt(format!("record {id:?}… cannot be read")).with_source(error)
}
