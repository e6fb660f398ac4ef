//! The state that the callers and the two threads share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use oncegate_core::{
    AuditEntry, Clock, Command, Extent, ListPage, ListQuery, Outcome, RecordId, StoreClock, StoreError, codec,
};
use redb::Database;
use tokio::sync::oneshot;

use crate::database::catch_panics_quietly;
use crate::queue::{PushError, Queue};

/// The inside of a store, shared by the callers, the writer and the reader.
pub(crate) struct StoreInner {
    state: RwLock<State>,
    pub(crate) clock: StoreClock<Arc<dyn Clock>>,
    pub(crate) jobs: Queue<Job>,
    pub(crate) scans: Queue<Scan>,
    /// Damage was found since the file was last verified as a whole.
    has_damage: AtomicBool,
    /// The reason why new keys are refused: a limit is reached, or the disk is nearly full.
    full: Mutex<Option<String>>,
}

/// The state of the file. Only the writer changes it.
pub(crate) enum State {
    Open(Database),
    /// The disk is full. Committed records are readable, and the writer tries to open the file again.
    ReadOnly(Database, Arc<str>),
    /// A read or write failed. The file is closed, and the writer tries to open it again.
    Failing(Arc<str>),
    /// The file is damaged. An operator has to act.
    Damaged(Arc<str>),
    Closed,
}

/// The channel to the caller who waits for a reply.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, StoreError>>;

/// A job for the writer.
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
    /// Accepts the time of day as correct, even if it was set far ahead.
    AcceptClock {
        reply: Reply<Option<Duration>>,
    },
    /// Recovers the file: a reader got an error after which redb refuses further operations.
    Recover,
}

/// A job for the reader.
pub(crate) enum Scan {
    List { query: ListQuery, reply: Reply<ListPage> },
    Audit { before: Option<u64>, limit: usize, reply: Reply<Vec<AuditEntry>> },
}

impl StoreInner {
    pub(crate) fn new(state: State, clock: StoreClock<Arc<dyn Clock>>, max_batch: usize) -> Self {
        Self {
            state: RwLock::new(state),
            clock,
            // Enough for sixteen full batches. A command behind more than that would delay its request for too long.
            jobs: Queue::new(max_batch.saturating_mul(16)),
            scans: Queue::new(64),
            has_damage: AtomicBool::new(false),
            full: Mutex::new(None),
        }
    }

    /// Records that damage was found. From now on a record that is not found counts as possibly hidden.
    pub(crate) fn report_damage(&self) {
        if !self.has_damage.swap(true, Ordering::SeqCst) {
            tracing::error!(
                "a part of the file of the embedded store is damaged: new keys are refused, because damage may hide the \
                 record of a key; stop the program and run `oncegate check`"
            );
        }
    }

    /// The reason why new keys are refused.
    pub(crate) fn full(&self) -> MutexGuard<'_, Option<String>> {
        self.full.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the whole file was verified.
    pub(crate) fn clear_damage(&self) {
        self.has_damage.store(false, Ordering::SeqCst);
    }

    pub(crate) fn has_damage(&self) -> bool {
        self.has_damage.load(Ordering::SeqCst)
    }

    pub(crate) fn is_read_only(&self) -> bool {
        matches!(&*self.state(), State::ReadOnly(..))
    }

    /// Locks the state for reading. It is consistent even after a panic, because the only change is an assignment.
    pub(crate) fn state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, and then closes the file that was open. No reader waits for the closing.
    pub(crate) fn set_state(&self, state: State) {
        let before =
            std::mem::replace(&mut *self.state.write().unwrap_or_else(PoisonError::into_inner), state);
        if catch_panics_quietly(|| drop(before)).is_err() {
            tracing::error!("the database panicked while the file of the embedded store was closed");
        }
    }

    /// Reads from the database on this thread.
    pub(crate) fn read<T>(
        &self,
        read: impl FnOnce(&Database) -> Result<T, redb::Error>,
    ) -> Result<T, StoreError> {
        let state = self.state();
        let database = state.database()?;
        match catch_panics_quietly(|| read(database)) {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(redb::Error::Corrupted(damage))) => {
                self.report_damage();
                Err(damaged_page_error(&damage))
            }
            Ok(Err(error)) => {
                self.request_recovery();
                Err(StoreError::unavailable("the embedded store cannot read its file").with_source(error))
            }
            Err(_) => {
                self.request_recovery();
                Err(damaged_page_error("the database panicked, probably on a damaged page"))
            }
        }
    }

    fn request_recovery(&self) {
        // If the queue is full or closed, the push fails. The writer then meets the error itself.
        let _ = self.jobs.push(Job::Recover);
    }
}

impl State {
    /// Returns the database if it can be read.
    pub(crate) fn database(&self) -> Result<&Database, StoreError> {
        match self {
            Self::Open(database) | Self::ReadOnly(database, _) => Ok(database),
            Self::Failing(reason) => Err(StoreError::unavailable(format!(
                "the embedded store cannot use its file and tries to open it again: {reason}"
            ))),
            Self::Damaged(reason) => Err(StoreError::corrupt(&**reason)),
            Self::Closed => Err(closed_error()),
        }
    }

    /// Returns the error for a write, or `Ok` if the file can be written.
    pub(crate) fn writable(&self) -> Result<(), StoreError> {
        match self {
            Self::ReadOnly(_, reason) => Err(unwritten_error(&format!(
                "the embedded store takes no writes, because its file cannot be written to: {reason}"
            ))),
            state => state.database().map(drop),
        }
    }
}

impl Job {
    pub(crate) fn fail(self, error: impl FnOnce() -> StoreError) {
        // A send fails if the caller has gone away.
        match self {
            Self::Apply { reply, .. } => drop(reply.send(Err(error()))),
            Self::Purge { reply, .. } => drop(reply.send(Err(error()))),
            Self::Check { reply } => drop(reply.send(Err(error()))),
            Self::AcceptClock { reply } => drop(reply.send(Err(error()))),
            Self::Recover => {}
        }
    }

    /// The approximate number of bytes that the job adds to a transaction.
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

pub(crate) fn push_error(error: PushError) -> StoreError {
    match error {
        PushError::Full => StoreError::unavailable("the embedded store has too many commands waiting")
            .with_extent(Extent::Record)
            .with_nothing_sent(),
        PushError::Closed => closed_error(),
    }
}

/// The error for a claim that a limit or a full disk refuses. The claim was not applied. Other commands still work.
pub(crate) fn full_error(reason: &str) -> StoreError {
    unwritten_error(&format!("the embedded store takes no new keys: {reason}"))
}

fn unwritten_error(text: &str) -> StoreError {
    StoreError::unavailable(text.to_owned()).with_extent(Extent::Writes).with_nothing_sent()
}

/// The error for a claim on a nearly full disk.
pub(crate) fn disk_low_error() -> StoreError {
    full_error(
        "the disk is nearly full, and the rest is reserved for requests that are running: free space on it",
    )
}

/// The error for a record that was not found but may be hidden by damage.
pub(crate) fn hidden_record_error() -> StoreError {
    StoreError::corrupt(
        "no record was found, but a part of the file of the embedded store is damaged and may hide one; stop the program and run \
         `oncegate check`",
    )
}

/// Returns `true` if the record was changed, and `false` if a newer program wrote it.
pub(crate) const fn is_damage(error: &codec::CodecError) -> bool {
    !matches!(error, codec::CodecError::UnknownVersion(_))
}

pub(crate) fn unreadable_error(id: &RecordId, error: codec::CodecError) -> StoreError {
    StoreError::corrupt(format!("record {id:?}… cannot be read")).with_source(error)
}

pub(crate) fn closed_error() -> StoreError {
    StoreError::unavailable("the embedded store is closed")
}

/// The error for damage that redb found while it looked for a record.
pub(crate) fn damaged_page_error(damage: &str) -> StoreError {
    StoreError::corrupt(format!(
        "the file of the embedded store is damaged; stop the program and run `oncegate check`: {damage}"
    ))
}
