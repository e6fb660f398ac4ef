//! The thread that writes: group commit, and recovery from failures of the disk.
//!
//! Group commit, one round of [`Writer::run`]:
//!
//! 1. Take all commands that wait in the queue, up to the limits of a batch. Drop those whose caller has gone away.
//! 2. Apply them in order in one transaction, each with [`decide`] ([`Writer::apply_all`]).
//! 3. Commit, which returns when the changes are on disk. Meanwhile the next commands gather in the queue.
//! 4. Check that the path still leads to the file, and only then answer all commands of the batch.
//!
//! The writer never waits for a batch to fill up: the time of a commit is what fills it.
//!
//! States of the file, as [`Writer::recover`] changes them:
//!
//! ```text
//! Open     ── a commit, a read or a flush fails ────────────► Failing
//! Failing  ── the file opens, and a durable commit works ──► Open
//! Failing  ── the disk is full, and no flush has failed ────► ReadOnly
//! ReadOnly ── the disk accepts a write again ──────────────► Failing, until the file is open
//! Failing  ── the file is damaged or of a newer format ────► Damaged: final, an operator has to act
//! any      ── the store is closed ─────────────────────────► Closed
//! ```
//!
//! A store that is opened on a full disk starts in `ReadOnly`. The attempts to open the file again are made at once, then
//! after pauses that grow from 50 ms to 5 s.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use oncegate_core::{Clock as _, ClockSkew, ErrorChain, Outcome, StoreError, Timestamp, limits};
use redb::{Database, WriteTransaction};
use tracing::{error, info, warn};

use crate::batch::{Batch, Capacity};
use crate::database::{self, Medium, OpenFile, OpenSettings, ReadOnlyMedium, catch_panics_quietly, is_full};
use crate::error::EmbeddedOpenError;
use crate::queue::TakeResult;
use crate::schema::{CLOCK_STEP, META, META_BYTES, META_CLOCK, META_LAGGING, META_WALL};
use crate::shared::{Job, Reply, State, StoreInner, closed_error, disk_low_error};

/// The most bytes of responses in one transaction. A single response may be larger.
///
/// This bounds the memory and the duration of a transaction.
const MAX_BATCH_BYTES: usize = 8 * 1024 * 1024;

/// The first pause between attempts to open the file again. Each pause is twice as long as the one before it.
const MIN_RETRY_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause between attempts to open the file again.
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(5);

/// The state of the writer's thread.
pub(crate) struct Writer {
    pub(crate) inner: Arc<StoreInner>,
    pub(crate) medium: Arc<dyn Medium>,
    pub(crate) settings: OpenSettings,
    pub(crate) max_batch: usize,
    pub(crate) max_records: u64,
    pub(crate) max_record_bytes: u64,
    pub(crate) file: FileMeta,
    /// The reason why the file could not be opened for writing at the start.
    pub(crate) unwritable: Option<String>,
    /// The disagreement of the two clocks that the log has reported, until it reports that they agree again.
    pub(crate) reported_skew: Option<ClockSkew>,
    /// Purges that continue in the next transaction.
    pub(crate) purges: VecDeque<Job>,
}

/// The values that the writer keeps about the file, in addition to the records.
#[derive(Clone, Debug)]
pub(crate) struct FileMeta {
    /// The store's clock as it is written in the file.
    clock_floor: Timestamp,
    /// The time since which the clock has not followed the time of day, as it is written in the file.
    lagging_since: Option<Timestamp>,
    /// The number for the next entry of the expiry index.
    next_number: u64,
    /// The total size of all records.
    record_bytes: u64,
    flush_failed: Arc<AtomicBool>,
}

impl FileMeta {
    pub(crate) fn of(opened: &OpenFile) -> Self {
        Self {
            clock_floor: opened.last_write.map_or(Timestamp::default(), |last| last.time),
            lagging_since: opened.last_write.and_then(|last| last.lagging_since),
            next_number: opened.next_number,
            record_bytes: opened.record_bytes,
            flush_failed: opened.flush_failed.clone(),
        }
    }
}

/// The outcome of one job in a transaction. It is sent to the caller only after the commit.
enum JobOutcome {
    Applied(Outcome),
    Purged {
        count: usize,
        more: bool,
    },
    /// The duration by which the clock moves forward, if it does.
    ClockAccepted(Option<Duration>),
    Checked,
}

/// A batch that is on disk.
struct CommittedBatch {
    done: Vec<Result<JobOutcome, StoreError>>,
    file: FileMeta,
    is_damaged: bool,
    /// The reason why the store takes no new keys.
    full: Option<String>,
}

/// The reason why a batch was not committed, or is not answered.
enum BatchFailure {
    Storage(redb::Error),
    /// redb panicked.
    Panic,
    /// A reader got an error or a panic, and requested recovery.
    ReadFailed,
    /// The path no longer leads to the file.
    Moved(std::io::Error),
}

impl<E: Into<redb::Error>> From<E> for BatchFailure {
    fn from(error: E) -> Self {
        Self::Storage(error.into())
    }
}

impl Writer {
    /// Runs the thread until the queue is closed and empty.
    pub(crate) fn run(mut self) {
        // Runs even if this thread panics, so that no caller waits forever.
        let _close_on_drop = CloseOnDrop(self.inner.clone());
        if let Some(reason) = self.unwritable.take() {
            self.recover(&reason, Vec::new());
        }
        loop {
            let deadline = (!self.purges.is_empty()).then(Instant::now);
            let mut jobs: Vec<Job> = self.purges.drain(..).collect();
            match self.inner.jobs.take(self.max_batch, MAX_BATCH_BYTES, Job::weight, deadline) {
                TakeResult::Jobs(taken) => jobs.extend(taken),
                TakeResult::TimedOut => {}
                // A long purge must not delay closing, so it ends here.
                TakeResult::Closed => {
                    jobs.into_iter().for_each(|job| job.fail(closed_error));
                    return self.write_closing_meta();
                }
            }
            jobs.retain(is_awaited);
            if jobs.is_empty() {
                continue;
            }
            self.accept_clock_correction();
            // A clock correction gets a transaction of its own. Other commands in the same transaction would be
            // written with the old time, and would age by the whole correction at once.
            let (accepting, jobs): (Vec<_>, Vec<_>) =
                jobs.into_iter().partition(|job| matches!(job, Job::AcceptClock { .. }));
            if !jobs.is_empty() {
                self.commit(jobs);
            }
            accepting.into_iter().for_each(|job| self.commit(vec![job]));
        }
    }

    /// Applies the jobs in one transaction and answers them.
    fn commit(&mut self, jobs: Vec<Job>) {
        let inner = self.inner.clone();
        let state = inner.state();
        let State::Open(database) = &*state else {
            drop(state);
            return jobs.into_iter().for_each(|job| self.refuse_job(job));
        };
        let committed = catch_panics_quietly(|| self.apply_all(database, &jobs));
        drop(state);
        // Checked after the commit: an answered command must be in a file that the next start finds.
        let in_place = |committed| match self.medium.check_in_place() {
            Ok(()) => Ok(committed),
            Err(error) => Err(BatchFailure::Moved(error)),
        };
        match committed.unwrap_or(Err(BatchFailure::Panic)).and_then(in_place) {
            // The commit has returned, so everything that is answered here is on disk.
            Ok(CommittedBatch { done, file, is_damaged, full }) => {
                self.file = file;
                if is_damaged {
                    self.inner.report_damage();
                }
                self.report_capacity(full);
                for (job, done) in jobs.into_iter().zip(done) {
                    self.answer(job, done);
                }
            }
            Err(failure) => self.recover(&failure.to_string(), jobs),
        }
    }

    fn apply_all(&self, database: &Database, jobs: &[Job]) -> Result<CommittedBatch, BatchFailure> {
        let txn = database::begin_write(database)?;
        // All commands of a transaction see the same time.
        let now = self.inner.clock.now();
        let mut done = Vec::with_capacity(jobs.len());
        let FileMeta { next_number, record_bytes, .. } = self.file;
        let mut batch = Batch::new(&txn, now, self.capacity(), (next_number, record_bytes))?;
        for job in jobs {
            done.push(match job {
                Job::Apply { id, command, .. } => batch.apply(*id, command)?.map(JobOutcome::Applied),
                Job::Purge { limit, purged, .. } => {
                    let (count, more) = batch.purge(limit.saturating_sub(*purged))?;
                    Ok(JobOutcome::Purged { count, more })
                }
                Job::AcceptClock { .. } => Ok(match self.inner.clock.skew().filter(|skew| skew.is_ahead) {
                    Some(skew) => {
                        batch.shift(skew.since, skew.by)?;
                        JobOutcome::ClockAccepted(Some(skew.by))
                    }
                    None => JobOutcome::ClockAccepted(None),
                }),
                Job::Check { .. } if self.medium.is_disk_low() => Err(disk_low_error()),
                Job::Check { .. } => Ok(JobOutcome::Checked),
                Job::Recover => return Err(BatchFailure::ReadFailed),
            });
        }
        let (changed, is_damaged) = (batch.changed, batch.is_damaged());
        let full = batch.full()?.map(|error| ErrorChain(&error).to_string());
        let mut file = FileMeta {
            next_number: batch.next_number,
            record_bytes: batch.record_bytes,
            ..self.file.clone()
        };
        drop(batch);
        if !changed {
            txn.abort()?;
            return Ok(CommittedBatch { done, file, is_damaged, full });
        }
        let accepted = done.iter().find_map(|done| match done {
            Ok(JobOutcome::ClockAccepted(by)) => *by,
            _ => None,
        });
        let since = self.inner.clock.lagging_since().filter(|_| accepted.is_none());
        let now = accepted.map_or(now, |by| now.after(by));
        if since != file.lagging_since
            || now.as_millis() >= file.clock_floor.as_millis().saturating_add(CLOCK_STEP)
        {
            (file.clock_floor, file.lagging_since) = (now, since);
            self.write_meta(&txn, &file)?;
        }
        txn.commit()?;
        if let Some(by) = accepted {
            self.inner.clock.accept(by);
        }
        Ok(CommittedBatch { done, file, is_damaged, full })
    }

    /// Writes the clocks and the sums. The clock in the file then stays less than [`CLOCK_STEP`] behind the last write.
    fn write_meta(&self, txn: &WriteTransaction, file: &FileMeta) -> Result<(), redb::Error> {
        let mut meta = txn.open_table(META)?;
        meta.insert(META_CLOCK, file.clock_floor.as_millis())?;
        meta.insert(META_WALL, self.inner.clock.wall().as_millis())?;
        meta.insert(META_LAGGING, file.lagging_since.map_or(0, Timestamp::as_millis))?;
        meta.insert(META_BYTES, file.record_bytes)?;
        Ok(())
    }

    /// Writes both clocks and the sums when the file is closed.
    ///
    /// Both clocks must be of the same moment. The next process interprets a difference between them as a machine clock that
    /// was set.
    fn write_closing_meta(&self) {
        let state = self.inner.state();
        if let State::Open(database) = &*state {
            let mut file = self.file.clone();
            file.lagging_since = self.inner.clock.lagging_since();
            file.clock_floor = self.inner.clock.now().max(file.clock_floor);
            let written =
                catch_panics_quietly(|| database::write(database, |txn| self.write_meta(txn, &file)));
            if !matches!(written, Ok(Ok(()))) {
                warn!("the clocks could not be written to the file of the embedded store when it was closed");
            }
        }
    }

    fn capacity(&self) -> Capacity {
        Capacity {
            max_records: self.max_records,
            max_record_bytes: self.max_record_bytes,
            is_disk_low: self.medium.is_disk_low(),
            is_damaged: self.inner.has_damage(),
        }
    }

    /// Logs when new keys begin to be refused, for each reason, and when they are accepted again.
    fn report_capacity(&self, full: Option<String>) {
        let mut before = self.inner.full();
        if full == *before {
            return;
        }
        match &full {
            Some(reason) => warn!("{reason}"),
            None => info!("the embedded store has space again"),
        }
        *before = full;
    }

    /// Follows a correction of the machine's clock if that is safe, and logs when the two clocks begin or cease to disagree,
    /// or when the clock was set once more.
    ///
    /// The correction is safe if the clock was known to be wrong when the store was opened. Otherwise an operator has to
    /// accept it.
    fn accept_clock_correction(&mut self) {
        let skew = self.inner.clock.skew();
        match skew {
            Some(skew) if skew.is_expected => {
                let (reply, _received) = tokio::sync::oneshot::channel();
                info!(
                    seconds = skew.by.as_secs(),
                    "the clock of this machine was corrected: the time of the store follows it"
                );
                self.commit(vec![Job::AcceptClock { reply }]);
            }
            Some(skew) => {
                let is_reported = self.reported_skew.is_some_and(|reported| {
                    reported.is_ahead == skew.is_ahead
                        && reported.by.abs_diff(skew.by) <= limits::MAX_CLOCK_STEP
                });
                if !is_reported {
                    warn!(seconds = skew.by.as_secs(), "{skew}");
                    self.reported_skew = Some(skew);
                }
            }
            None => {
                if self.reported_skew.take().is_some() {
                    info!("the clock of this machine and the time of the store agree again");
                }
            }
        }
    }

    fn answer(&mut self, job: Job, done: Result<JobOutcome, StoreError>) {
        match (job, done) {
            (Job::Apply { reply, .. }, Ok(JobOutcome::Applied(outcome))) => drop(reply.send(Ok(outcome))),
            (Job::Purge { limit, purged, reply }, Ok(JobOutcome::Purged { count, more })) => {
                let purged = purged + count;
                if more && purged < limit {
                    self.purges.push_back(Job::Purge { limit, purged, reply });
                } else {
                    let _ = reply.send(Ok(purged));
                }
            }
            (Job::Check { reply }, Ok(JobOutcome::Checked)) => drop(reply.send(Ok(()))),
            (Job::AcceptClock { reply }, Ok(JobOutcome::ClockAccepted(by))) => drop(reply.send(Ok(by))),
            (job, Err(error)) => job.fail(|| error),
            (job, Ok(_)) => job.fail(|| StoreError::unavailable("the embedded store lost a reply")),
        }
    }

    /// Closes the file and opens it again, with growing pauses, until it can be written or turns out to be damaged.
    ///
    /// While the disk is full, committed records are still read. After an error, redb refuses every further operation, and
    /// the operating system may have dropped pages that it could not write. [`database::open`] explains why the file is
    /// safe to use after that.
    fn recover(&mut self, reason: &str, jobs: Vec<Job>) {
        error!(
            error = reason,
            "the file of the embedded store failed; every write is refused until it can be used again"
        );
        if !self.inner.is_read_only() {
            self.set_failing(reason);
        }
        jobs.into_iter().for_each(|job| self.refuse_job(job));
        let mut pause = Duration::ZERO;
        while self.refuse_jobs_during(pause) {
            match self.reopen() {
                Ok(opened) => {
                    self.file = FileMeta::of(&opened);
                    self.inner.set_state(State::Open(opened.database));
                    self.inner.clear_damage();
                    info!("the file of the embedded store can be used again");
                    return;
                }
                Err(error @ (EmbeddedOpenError::Damaged { .. } | EmbeddedOpenError::NewerFormat { .. })) => {
                    error!(error = %ErrorChain(&error), "the file of the embedded store is damaged; every command is refused");
                    self.inner.set_state(State::Damaged(ErrorChain(&error).to_string().into()));
                    return;
                }
                Err(error) => {
                    warn!(error = %ErrorChain(&error), "the file of the embedded store still fails");
                    self.try_read_only(&error);
                }
            }
            pause = (pause * 2).clamp(MIN_RETRY_PAUSE, MAX_RETRY_PAUSE);
        }
    }

    /// Tries once to open the file again for writing.
    fn reopen(&self) -> Result<OpenFile, EmbeddedOpenError> {
        self.medium.check_in_place().map_err(EmbeddedOpenError::io("find the file of the store"))?;
        let io = |source| EmbeddedOpenError::Io { operation: "write to its directory".to_owned(), source };
        self.medium.probe().map_err(io)?;
        // Closes the old handle, because only one handle at a time can have the file open.
        self.set_failing("it is being opened again");
        // Verifies the file regardless of its size, because a damaged page may be the cause of the failure.
        database::open(&*self.medium, OpenSettings { verify_bytes: u64::MAX, ..self.settings })
    }

    /// Makes recorded keys readable if the reason of the failure is a full disk.
    ///
    /// After a failed flush it does not: the data that the operating system shows then may not be on the disk, and must not
    /// be returned to a caller.
    fn try_read_only(&self, error: &EmbeddedOpenError) {
        let EmbeddedOpenError::Io { source, .. } = error else {
            return self.set_failing(&ErrorChain(error).to_string());
        };
        if self.inner.is_read_only() {
            return;
        }
        if !is_full(source) || self.file.flush_failed.load(Ordering::SeqCst) {
            return self.set_failing(&ErrorChain(error).to_string());
        }
        match database::open(&ReadOnlyMedium(self.medium.clone()), self.settings) {
            Ok(opened) => {
                warn!("the disk is full: keys that are recorded are answered, and nothing new is executed");
                self.inner.set_state(State::ReadOnly(opened.database, ErrorChain(error).to_string().into()));
            }
            Err(unreadable) => self.set_failing(&ErrorChain(&unreadable).to_string()),
        }
    }

    fn set_failing(&self, reason: &str) {
        self.inner.set_state(State::Failing(reason.into()));
    }

    fn refuse_job(&self, job: Job) {
        job.fail(|| self.inner.state().writable().err().unwrap_or_else(closed_error));
    }

    /// Refuses all jobs that arrive during `pause`. Returns `false` if the store is being closed.
    fn refuse_jobs_during(&self, pause: Duration) -> bool {
        let deadline = Instant::now() + pause;
        loop {
            match self.inner.jobs.take(usize::MAX, usize::MAX, |_| 1, Some(deadline)) {
                TakeResult::Jobs(jobs) => jobs.into_iter().for_each(|job| self.refuse_job(job)),
                TakeResult::TimedOut => return true,
                TakeResult::Closed => return false,
            }
        }
    }
}

impl std::fmt::Display for BatchFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Storage(error) => ErrorChain(error).fmt(f),
            Self::Panic => f.write_str("the database panicked, probably on a damaged page"),
            Self::ReadFailed => f.write_str("a read failed"),
            Self::Moved(error) => error.fmt(f),
        }
    }
}

/// Returns `false` if the caller has gone away. Applying the command would only leave a record without an owner.
fn is_awaited(job: &Job) -> bool {
    fn awaited<T>(reply: &Reply<T>) -> bool {
        !reply.is_closed()
    }
    match job {
        Job::Apply { reply, .. } => awaited(reply),
        Job::Purge { reply, .. } => awaited(reply),
        Job::Check { reply } => awaited(reply),
        // Applied even if the operator's connection has ended, because the operator has decided.
        Job::AcceptClock { .. } | Job::Recover => true,
    }
}

/// Closes the file and refuses the waiting jobs when the writer ends, also by a panic.
struct CloseOnDrop(Arc<StoreInner>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.jobs.close();
        self.0.set_state(State::Closed);
        while let TakeResult::Jobs(jobs) = self.0.jobs.take(usize::MAX, usize::MAX, |_| 1, None) {
            jobs.into_iter().for_each(|job| job.fail(closed_error));
        }
    }
}
