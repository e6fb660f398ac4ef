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

use crate::batch::{Batch, Room};
use crate::database::{self, Medium, OpenSettings, Opened, Unwritten, is_full, quietly};
use crate::error::OpenError;
use crate::queue::Taken;
use crate::schema::{CLOCK_STEP, META, META_BYTES, META_CLOCK, META_LAGGING, META_WALL};
use crate::shared::{Advice, Job, Reply, Shared, State, closed, nearly_full};

/// The most octets of responses in one transaction, but for one response that is larger: it bounds what a transaction
/// holds in memory and how long it takes.
const BATCH_BYTES: usize = 8 * 1024 * 1024;

const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_LAST: Duration = Duration::from_secs(5);

pub(crate) struct Writer {
    pub(crate) shared: Arc<Shared>,
    pub(crate) medium: Arc<dyn Medium>,
    pub(crate) settings: OpenSettings,
    pub(crate) max_batch: usize,
    pub(crate) max_records: u64,
    pub(crate) max_record_bytes: u64,
    pub(crate) file: FileState,
    /// Why the file cannot be written to from the beginning.
    pub(crate) unwritable: Option<String>,
    /// Purges that go on in the next transaction.
    pub(crate) purges: VecDeque<Job>,
}

/// What the writer knows of the file beyond the records.
#[derive(Clone, Debug)]
pub(crate) struct FileState {
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

impl FileState {
    pub(crate) fn of(opened: &Opened) -> Self {
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
enum Done {
    Applied(Outcome),
    Purged {
        now: usize,
        more: bool,
    },
    /// By how much the clock moves ahead.
    Accepted(Option<Duration>),
    Checked,
}

/// A batch that is on disk.
struct Committed {
    done: Vec<Result<Done, StoreError>>,
    file: FileState,
    is_damaged: bool,
}

/// Why a batch came to nothing.
enum Failure {
    Storage(redb::Error),
    /// redb panicked.
    Panic,
    /// A reader saw an error or a panic.
    Suspect,
    /// The path no longer leads to the file.
    Moved(std::io::Error),
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
        if let Some(why) = self.unwritable.take() {
            self.recover(&why, Vec::new());
        }
        loop {
            let deadline = (!self.purges.is_empty()).then(Instant::now);
            let mut jobs: Vec<Job> = self.purges.drain(..).collect();
            match self.shared.jobs.take(self.max_batch, BATCH_BYTES, Job::weight, deadline) {
                Taken::Jobs(taken) => jobs.extend(taken),
                Taken::Nothing => {}
                // A purge that goes on and on must not hold up the end.
                Taken::Closed => {
                    jobs.into_iter().for_each(|job| job.fail(closed));
                    return self.write_last();
                }
            }
            jobs.retain(is_awaited);
            if jobs.is_empty() {
                continue;
            }
            self.accept_correction();
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
        let shared = self.shared.clone();
        let state = shared.state();
        let State::Open(database) = &*state else {
            drop(state);
            return jobs.into_iter().for_each(|job| self.fail(job));
        };
        let committed = quietly(|| self.apply_all(database, &jobs));
        drop(state);
        // After the commit, so that what is answered was written to a file that the next start finds.
        let in_place = |committed| match self.medium.check_in_place() {
            Ok(()) => Ok(committed),
            Err(error) => Err(Failure::Moved(error)),
        };
        match committed.unwrap_or(Err(Failure::Panic)).and_then(in_place) {
            // M17: the commit has returned, so what is answered here is on disk.
            Ok(Committed { done, file, is_damaged }) => {
                self.file = file;
                if is_damaged {
                    self.shared.doubt();
                }
                let is_full = done.iter().any(|done| {
                    done.as_ref().is_err_and(|error| error.extent() == oncegate_core::Extent::Writes)
                });
                self.tell_of_room(&jobs, is_full);
                for (job, done) in jobs.into_iter().zip(done) {
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
        let FileState { next_number, record_bytes, .. } = self.file;
        let mut batch = Batch::new(&txn, now, self.room(), (next_number, record_bytes))?;
        for job in jobs {
            done.push(match job {
                Job::Apply { id, command, .. } => batch.apply(*id, command)?.map(Done::Applied),
                Job::Purge { limit, purged, .. } => {
                    let (now, more) = batch.purge(limit.saturating_sub(*purged))?;
                    Ok(Done::Purged { now, more })
                }
                Job::AcceptClock { .. } => Ok(match self.shared.clock.skew().filter(|skew| skew.is_ahead) {
                    Some(skew) => {
                        batch.shift(skew.since, skew.by)?;
                        Done::Accepted(Some(skew.by))
                    }
                    None => Done::Accepted(None),
                }),
                Job::Check { .. } if self.medium.is_low() => Err(nearly_full()),
                Job::Check { .. } => Ok(Done::Checked),
                Job::Suspect => return Err(Failure::Suspect),
            });
        }
        let (changed, is_damaged) = (batch.changed, batch.is_damaged());
        let mut file = FileState {
            next_number: batch.next_number,
            record_bytes: batch.record_bytes,
            ..self.file.clone()
        };
        drop(batch);
        if !changed {
            txn.abort()?;
            return Ok(Committed { done, file, is_damaged });
        }
        let accepted = done.iter().find_map(|done| match done {
            Ok(Done::Accepted(by)) => *by,
            _ => None,
        });
        let since = self.shared.clock.lagging_since().filter(|_| accepted.is_none());
        let now = accepted.map_or(now, |by| now.after(by));
        if since != file.lagging_since
            || now.as_millis() >= file.clock_floor.as_millis().saturating_add(CLOCK_STEP)
        {
            (file.clock_floor, file.lagging_since) = (now, since);
            self.write_meta(&txn, &file)?;
        }
        txn.commit()?;
        if let Some(by) = accepted {
            self.shared.clock.accept(by);
        }
        Ok(Committed { done, file, is_damaged })
    }

    /// Keeps the clock in the file less than [`CLOCK_STEP`] behind what was written.
    fn write_meta(&self, txn: &WriteTransaction, file: &FileState) -> Result<(), redb::Error> {
        let mut meta = txn.open_table(META)?;
        meta.insert(META_CLOCK, file.clock_floor.as_millis())?;
        meta.insert(META_WALL, self.shared.clock.wall().as_millis())?;
        meta.insert(META_LAGGING, file.lagging_since.map_or(0, Timestamp::as_millis))?;
        meta.insert(META_BYTES, file.record_bytes)?;
        Ok(())
    }

    /// Writes both clocks and the sums when the file is closed. The two clocks have to be of one moment: the next process
    /// takes their difference for a clock that was set.
    fn write_last(&self) {
        let state = self.shared.state();
        if let State::Open(database) = &*state {
            let mut file = self.file.clone();
            file.lagging_since = self.shared.clock.lagging_since();
            file.clock_floor = self.shared.clock.now().max(file.clock_floor);
            let written = quietly(|| database::write(database, |txn| self.write_meta(txn, &file)));
            if !matches!(written, Ok(Ok(()))) {
                warn!("the file of the embedded store could not be written to when it was closed");
            }
        }
    }

    fn room(&self) -> Room {
        Room {
            max_records: self.max_records,
            max_record_bytes: self.max_record_bytes,
            is_disk_low: self.medium.is_low(),
            is_damaged: self.shared.is_in_doubt(),
        }
    }

    /// Says once when new keys begin to be refused, and once when they no longer are.
    fn tell_of_room(&self, jobs: &[Job], is_full: bool) {
        let claims = jobs.iter().any(Job::is_claim);
        if !claims || is_full == self.shared.advises(Advice::Full) {
            return;
        }
        self.shared.advise(Advice::Full, is_full);
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
    fn accept_correction(&mut self) {
        let skew = self.shared.clock.skew();
        match skew {
            Some(skew) if skew.is_expected => {
                let (reply, _answer) = tokio::sync::oneshot::channel();
                info!(
                    seconds = skew.by.as_secs(),
                    "the clock was set right: the time of the store goes on from it"
                );
                self.commit(vec![Job::AcceptClock { reply }]);
            }
            Some(skew) if !self.shared.advises(Advice::Clock) => {
                warn!(seconds = skew.by.as_secs(), "{skew}");
                self.shared.advise(Advice::Clock, true);
            }
            None if self.shared.advises(Advice::Clock) => {
                info!("the clock of this machine and the time of the store agree again");
                self.shared.advise(Advice::Clock, false);
            }
            _ => {}
        }
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
            (Job::AcceptClock { reply }, Ok(Done::Accepted(by))) => drop(reply.send(Ok(by))),
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
        if !self.shared.is_read_only() {
            self.refuse(what);
        }
        jobs.into_iter().for_each(|job| self.fail(job));
        let mut pause = Duration::ZERO;
        while self.refuse_for(pause) {
            match self.reopen() {
                Ok(opened) => {
                    self.file = FileState::of(&opened);
                    self.shared.set_state(State::Open(opened.database));
                    self.shared.trust();
                    info!("the file of the embedded store can be used again");
                    return;
                }
                Err(error @ (OpenError::Damaged { .. } | OpenError::NewerFormat { .. })) => {
                    error!(error = %ErrorChain(&error), "the file of the embedded store is damaged; every command is refused");
                    self.shared.set_state(State::Damaged(ErrorChain(&error).to_string().into()));
                    return;
                }
                Err(error) => {
                    warn!(error = %ErrorChain(&error), "the file of the embedded store still fails");
                    self.read_only(&error);
                }
            }
            pause = (pause * 2).clamp(RETRY_FIRST, RETRY_LAST);
        }
    }

    fn reopen(&self) -> Result<Opened, OpenError> {
        self.medium.check_in_place().map_err(OpenError::io("find the file of the store"))?;
        let io = |source| OpenError::Io { what: "write to its directory".to_owned(), source };
        self.medium.probe().map_err(io)?;
        // One handle at a time has the file.
        self.refuse("it is being opened again");
        // Whatever its size: a page that makes no sense may be the reason.
        database::open(&*self.medium, OpenSettings { verify_bytes: u64::MAX, ..self.settings })
    }

    /// Answers what is known while nothing can be written, if that is because the disk is full.
    ///
    /// Not after a flush that failed: what the operating system shows then need not be on the disk, and must not be answered
    /// with.
    fn read_only(&self, error: &OpenError) {
        let OpenError::Io { source, .. } = error else { return self.refuse(&ErrorChain(error).to_string()) };
        if self.shared.is_read_only() {
            return;
        }
        if !is_full(source) || self.file.flush_failed.load(Ordering::SeqCst) {
            return self.refuse(&ErrorChain(error).to_string());
        }
        match database::open(&Unwritten(self.medium.clone()), self.settings) {
            Ok(opened) => {
                warn!("the disk is full: keys that are recorded are answered, and nothing new is executed");
                self.shared.set_state(State::ReadOnly(opened.database, ErrorChain(error).to_string().into()));
            }
            Err(unreadable) => self.refuse(&ErrorChain(&unreadable).to_string()),
        }
    }

    fn refuse(&self, what: &str) {
        self.shared.set_state(State::Failing(what.into()));
    }

    fn fail(&self, job: Job) {
        job.fail(|| self.shared.state().writable().err().unwrap_or_else(closed));
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
            Self::Storage(error) => ErrorChain(error).fmt(f),
            Self::Panic => f.write_str("a page makes no sense to the database"),
            Self::Suspect => f.write_str("a read failed"),
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
        Job::AcceptClock { .. } | Job::Suspect => true,
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
