//! What the callers and the two threads share.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use oncegate_core::{AuditEntry, Command, Extent, ListPage, ListQuery, Outcome, RecordId, StoreError};
use redb::Database;
use tokio::sync::oneshot;

use crate::clock::StoreClock;
use crate::queue::{Queue, Refused};

pub(crate) struct Shared {
    state: RwLock<State>,
    pub(crate) clock: StoreClock,
    pub(crate) jobs: Queue<Job>,
    pub(crate) scans: Queue<Scan>,
}

/// Whether the file can be used. Only the writer changes this.
pub(crate) enum State {
    Open(Database),
    /// A read or write failed. The file is closed, and the writer tries to open it again.
    Failing(Arc<str>),
    /// The file is not whole. An operator has to look.
    Damaged(Arc<str>),
    Closed,
}

/// Where an answer goes.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, StoreError>>;

/// What the writer is asked to do.
pub(crate) enum Job {
    Apply {
        id: RecordId,
        command: Command,
        reply: Reply<Outcome>,
    },
    Purge {
        limit: usize,
        purged: usize,
        reply: Reply<usize>,
    },
    Check {
        reply: Reply<()>,
    },
    /// A reader found the database in a state that it does not come out of by itself.
    Suspect,
}

/// What the reader is asked to do.
pub(crate) enum Scan {
    List { query: ListQuery, reply: Reply<ListPage> },
    Audit { before: Option<u64>, limit: usize, reply: Reply<Vec<AuditEntry>> },
}

impl Shared {
    pub(crate) fn new(database: Database, clock: StoreClock, max_batch: usize) -> Self {
        Self {
            state: RwLock::new(State::Open(database)),
            clock,
            // Enough for sixteen full batches. A command that waits for longer would hold its request for too long.
            jobs: Queue::new(max_batch.saturating_mul(16)),
            scans: Queue::new(64),
        }
    }

    /// Whole after every panic: the one change is an assignment.
    pub(crate) fn state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state. What was open is closed after that, with nobody waiting for it.
    pub(crate) fn set_state(&self, state: State) {
        let before =
            std::mem::replace(&mut *self.state.write().unwrap_or_else(PoisonError::into_inner), state);
        if catch_unwind(AssertUnwindSafe(|| drop(before))).is_err() {
            tracing::error!("closing the file failed");
        }
    }

    /// Reads from the database on this thread.
    pub(crate) fn read<T>(
        &self,
        read: impl FnOnce(&Database) -> Result<T, redb::Error>,
    ) -> Result<T, StoreError> {
        let state = self.state();
        let database = state.database()?;
        match catch_unwind(AssertUnwindSafe(|| read(database))) {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(redb::Error::Corrupted(what))) => Err(damaged_page(&what)),
            Ok(Err(error)) => {
                self.suspect();
                Err(StoreError::unavailable(format!("the embedded store cannot read its file: {error}")))
            }
            Err(_) => {
                self.suspect();
                Err(damaged_page("a page makes no sense to the database"))
            }
        }
    }

    fn suspect(&self) {
        // Where the queue is full or closed, the writer will find out by itself.
        let _ = self.jobs.push(Job::Suspect);
    }
}

impl State {
    /// The database, where it can be used.
    pub(crate) fn database(&self) -> Result<&Database, StoreError> {
        match self {
            Self::Open(database) => Ok(database),
            Self::Failing(what) => Err(StoreError::unavailable(format!(
                "the embedded store cannot use its file and tries to open it again: {what}"
            ))),
            Self::Damaged(what) => Err(StoreError::corrupt(&**what)),
            Self::Closed => Err(closed()),
        }
    }
}

impl Job {
    pub(crate) fn fail(self, why: impl FnOnce() -> StoreError) {
        // Nobody may be waiting any more, here and below.
        match self {
            Self::Apply { reply, .. } => drop(reply.send(Err(why()))),
            Self::Purge { reply, .. } => drop(reply.send(Err(why()))),
            Self::Check { reply } => drop(reply.send(Err(why()))),
            Self::Suspect => {}
        }
    }

    /// About how many octets the job brings into a transaction.
    pub(crate) fn weight(&self) -> usize {
        use oncegate_core::{Completion, Resolution};
        if let Self::Apply { command: Command::Step(command), .. } = self {
            return 256 + command.step.result().len();
        }
        let response = match self {
            Self::Apply { command: Command::Complete(complete), .. } => match &complete.completion {
                Completion::Replayable(response) => Some(response),
                _ => None,
            },
            Self::Apply { command: Command::Resolve(resolve), .. } => match &resolve.resolution {
                Resolution::Complete(response) => response.as_ref(),
                _ => None,
            },
            _ => None,
        };
        256 + response.map_or(0, |response| response.as_encoded().len())
    }
}

pub(crate) fn refused(why: Refused) -> StoreError {
    match why {
        Refused::Full => StoreError::unavailable("the embedded store has too many commands waiting")
            .with_extent(Extent::Record)
            .with_nothing_sent(),
        Refused::Closed => closed(),
    }
}

pub(crate) fn closed() -> StoreError {
    StoreError::unavailable("the embedded store is closed")
}

/// Damage that redb came across while it looked for a record.
pub(crate) fn damaged_page(what: &str) -> StoreError {
    StoreError::corrupt(format!(
        "the file of the embedded store is damaged; stop the program and run `oncegate check`: {what}"
    ))
}
