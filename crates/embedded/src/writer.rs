//! The thread that writes: natural group commit, and what to do when the disk fails.
//!
//! It takes every command that is waiting, applies [`decide`] to each in order inside one transaction, commits it, and
//! only then answers all of them. While it commits, the next commands gather; it never waits for more of them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use oncegate_core::{Clock as _, ErrorChain, Outcome, StoreError, Timestamp};
use redb::{Database, WriteTransaction};
use tracing::{error, info, warn};

use crate::batch::{Batch, Capacity};
use crate::database::{self, Medium, OpenFile, OpenSettings, ReadOnlyMedium, catch_panics_quietly, is_full};
use crate::error::OpenError;
use crate::queue::TakeResult;
use crate::schema::{CLOCK_STEP, META, META_BYTES, META_CLOCK, META_LAGGING, META_WALL};
use crate::shared::{AdvisoryFlag, Job, Reply, State, StoreInner, closed_error, disk_low_error};

/// The most octets of responses in one transaction, but for one response that is larger: it bounds what a transaction
/// holds in memory and how long it takes.
const MAX_BATCH_BYTES: usize = 8 * 1024 * 1024;

const MIN_RETRY_PAUSE: Duration = Duration::from_millis(50);
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(5);

pub(crate) struct Writer {
    pub(crate) inner: Arc<StoreInner>,
    pub(crate) medium: Arc<dyn Medium>,
    pub(crate) settings: OpenSettings,
    pub(crate) max_batch: usize,
    pub(crate) max_records: u64,
    pub(crate) max_record_bytes: u64,
    pub(crate) file: FileMeta,
    /// Why the file cannot be written to from the beginning.
    pub(crate) unwritable: Option<String>,
    /// Purges that go on in the next transaction.
    pub(crate) purges: VecDeque<Job>,
}

/// What the writer knows of the file beyond the records.
#[derive(Clone, Debug)]
pub(crate) struct FileMeta {
    /// The clock as it stands in the file.
    clock_floor: Timestamp,
    /// From when on the clock has not followed the time of day, as it stands in the file.
    lagging_since: Option<Timestamp>,
    /// The number for the next entry of the expiry index.
    next_number: u64,
    /// How many bytes all records have.
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

/// What one job came to in a transaction that is not yet committed.
enum JobOutcome {
    Applied(Outcome),
    Purged {
        now: usize,
        more: bool,
    },
    /// By how much the clock moves ahead.
    ClockAccepted(Option<Duration>),
    Checked,
}

/// A batch that is on disk.
struct CommittedBatch {
    done: Vec<Result<JobOutcome, StoreError>>,
    file: FileMeta,
    is_damaged: bool,
}

/// Why a batch came to nothing.
enum BatchFailure {
    Storage(redb::Error),
    /// redb panicked.
    Panic,
    /// A reader saw an error or a panic.
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
    /// Until the queue is closed and empty.
    pub(crate) fn run(mut self) {
        // Also when this thread panics: nobody may be left waiting for it.
        let _close_on_drop = CloseOnDrop(self.inner.clone());
        if let Some(why) = self.unwritable.take() {
            self.recover(&why, Vec::new());
        }
        loop {
            let deadline = (!self.purges.is_empty()).then(Instant::now);
            let mut jobs: Vec<Job> = self.purges.drain(..).collect();
            match self.inner.jobs.take(self.max_batch, MAX_BATCH_BYTES, Job::weight, deadline) {
                TakeResult::Jobs(taken) => jobs.extend(taken),
                TakeResult::TimedOut => {}
                // A purge that goes on and on must not hold up the end.
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
            // By itself: what met it in one transaction would be written by the time before, and age by the whole step.
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
        // After the commit, so that what is answered was written to a file that the next start finds.
        let in_place = |committed| match self.medium.check_in_place() {
            Ok(()) => Ok(committed),
            Err(error) => Err(BatchFailure::Moved(error)),
        };
        match committed.unwrap_or(Err(BatchFailure::Panic)).and_then(in_place) {
            // M17: the commit has returned, so what is answered here is on disk.
            Ok(CommittedBatch { done, file, is_damaged }) => {
                self.file = file;
                if is_damaged {
                    self.inner.report_damage();
                }
                let is_full = done.iter().any(|done| {
                    done.as_ref().is_err_and(|error| error.extent() == oncegate_core::Extent::Writes)
                });
                self.report_capacity(&jobs, is_full);
                for (job, done) in jobs.into_iter().zip(done) {
                    self.answer(job, done);
                }
            }
            Err(failure) => self.recover(&failure.to_string(), jobs),
        }
    }

    fn apply_all(&self, database: &Database, jobs: &[Job]) -> Result<CommittedBatch, BatchFailure> {
        let txn = database::begin_write(database)?;
        // One time for the whole transaction.
        let now = self.inner.clock.now();
        let mut done = Vec::with_capacity(jobs.len());
        let FileMeta { next_number, record_bytes, .. } = self.file;
        let mut batch = Batch::new(&txn, now, self.capacity(), (next_number, record_bytes))?;
        for job in jobs {
            done.push(match job {
                Job::Apply { id, command, .. } => batch.apply(*id, command)?.map(JobOutcome::Applied),
                Job::Purge { limit, purged, .. } => {
                    let (now, more) = batch.purge(limit.saturating_sub(*purged))?;
                    Ok(JobOutcome::Purged { now, more })
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
        let mut file = FileMeta {
            next_number: batch.next_number,
            record_bytes: batch.record_bytes,
            ..self.file.clone()
        };
        drop(batch);
        if !changed {
            txn.abort()?;
            return Ok(CommittedBatch { done, file, is_damaged });
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
        Ok(CommittedBatch { done, file, is_damaged })
    }

    /// Keeps the clock in the file less than [`CLOCK_STEP`] behind what was written.
    fn write_meta(&self, txn: &WriteTransaction, file: &FileMeta) -> Result<(), redb::Error> {
        let mut meta = txn.open_table(META)?;
        meta.insert(META_CLOCK, file.clock_floor.as_millis())?;
        meta.insert(META_WALL, self.inner.clock.wall().as_millis())?;
        meta.insert(META_LAGGING, file.lagging_since.map_or(0, Timestamp::as_millis))?;
        meta.insert(META_BYTES, file.record_bytes)?;
        Ok(())
    }

    /// Writes both clocks and the sums when the file is closed. The two clocks have to be of one moment: the next process
    /// takes their difference for a clock that was set.
    fn write_closing_meta(&self) {
        let state = self.inner.state();
        if let State::Open(database) = &*state {
            let mut file = self.file.clone();
            file.lagging_since = self.inner.clock.lagging_since();
            file.clock_floor = self.inner.clock.now().max(file.clock_floor);
            let written =
                catch_panics_quietly(|| database::write(database, |txn| self.write_meta(txn, &file)));
            if !matches!(written, Ok(Ok(()))) {
                warn!("the file of the embedded store could not be written to when it was closed");
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

    /// Says once when new keys begin to be refused, and once when they no longer are.
    fn report_capacity(&self, jobs: &[Job], is_full: bool) {
        let claims = jobs.iter().any(Job::is_claim);
        if !claims || is_full == self.inner.has_advisory(AdvisoryFlag::Full) {
            return;
        }
        self.inner.set_advisory(AdvisoryFlag::Full, is_full);
        if is_full {
            warn!(
                "the embedded store has no room: new keys are refused until records are purged or the limit is raised"
            );
        } else {
            info!("the embedded store has room again");
        }
    }

    /// Accepts the time of day by itself when it was known to be wrong at the start and is set right; and says so when the
    /// two clocks begin to disagree.
    fn accept_clock_correction(&mut self) {
        let skew = self.inner.clock.skew();
        match skew {
            Some(skew) if skew.is_expected => {
                let (reply, _answer) = tokio::sync::oneshot::channel();
                info!(
                    seconds = skew.by.as_secs(),
                    "the clock was set right: the time of the store goes on from it"
                );
                self.commit(vec![Job::AcceptClock { reply }]);
            }
            Some(skew) if !self.inner.has_advisory(AdvisoryFlag::Clock) => {
                warn!(seconds = skew.by.as_secs(), "{skew}");
                self.inner.set_advisory(AdvisoryFlag::Clock, true);
            }
            None if self.inner.has_advisory(AdvisoryFlag::Clock) => {
                info!("the clock of this machine and the time of the store agree again");
                self.inner.set_advisory(AdvisoryFlag::Clock, false);
            }
            _ => {}
        }
    }

    fn answer(&mut self, job: Job, done: Result<JobOutcome, StoreError>) {
        match (job, done) {
            (Job::Apply { reply, .. }, Ok(JobOutcome::Applied(outcome))) => drop(reply.send(Ok(outcome))),
            (Job::Purge { limit, purged, reply }, Ok(JobOutcome::Purged { now, more })) => {
                let purged = purged + now;
                if more && purged < limit {
                    self.purges.push_back(Job::Purge { limit, purged, reply });
                } else {
                    let _ = reply.send(Ok(purged));
                }
            }
            (Job::Check { reply }, Ok(JobOutcome::Checked)) => drop(reply.send(Ok(()))),
            (Job::AcceptClock { reply }, Ok(JobOutcome::ClockAccepted(by))) => drop(reply.send(Ok(by))),
            (job, Err(error)) => job.fail(|| error),
            (job, Ok(_)) => job.fail(|| StoreError::unavailable("the embedded store lost an answer")),
        }
    }

    /// Closes the file and opens it again, with growing pauses, until it can be written or turns out to be damaged. While
    /// the disk is full, what was committed is read.
    ///
    /// After an error redb answers nothing any more, and the operating system may have dropped what it could not write.
    /// [`database::open`] says why the file is safe to go on with after that.
    fn recover(&mut self, what: &str, jobs: Vec<Job>) {
        error!(
            error = what,
            "the file of the embedded store failed; every write is refused until it can be used again"
        );
        if !self.inner.is_read_only() {
            self.set_failing(what);
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
                Err(error @ (OpenError::Damaged { .. } | OpenError::NewerFormat { .. })) => {
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

    fn reopen(&self) -> Result<OpenFile, OpenError> {
        self.medium.check_in_place().map_err(OpenError::io("find the file of the store"))?;
        let io = |source| OpenError::Io { what: "write to its directory".to_owned(), source };
        self.medium.probe().map_err(io)?;
        // One handle at a time has the file.
        self.set_failing("it is being opened again");
        // Whatever its size: a page that makes no sense may be the reason.
        database::open(&*self.medium, OpenSettings { verify_bytes: u64::MAX, ..self.settings })
    }

    /// Answers what is known while nothing can be written, if that is because the disk is full.
    ///
    /// Not after a flush that failed: what the operating system shows then need not be on the disk, and must not be answered
    /// with.
    fn try_read_only(&self, error: &OpenError) {
        let OpenError::Io { source, .. } = error else {
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

    fn set_failing(&self, what: &str) {
        self.inner.set_state(State::Failing(what.into()));
    }

    fn refuse_job(&self, job: Job) {
        job.fail(|| self.inner.state().writable().err().unwrap_or_else(closed_error));
    }

    /// Refuses all that comes, for this long. Says whether to go on.
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
            Self::Panic => f.write_str("a page makes no sense to the database"),
            Self::ReadFailed => f.write_str("a read failed"),
            Self::Moved(error) => error.fmt(f),
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
        // Once begun, it is done: the operator may have hung up.
        Job::AcceptClock { .. } | Job::Recover => true,
    }
}

/// Closes the file when the writer ends, however it ends.
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
