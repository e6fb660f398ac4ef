//! The store itself: the type that callers use.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use oncegate_core::{
    Advisory, AuditEntry, Capabilities, Clock, Command, Durability, ErrorChain, Fencing, ListPage, ListQuery,
    Outcome, Record, RecordId, Store, StoreClock, StoreError, StoreFuture, Timestamp, Write, decide,
};
use redb::{Database, ReadableDatabase as _};
use tokio::sync::oneshot;

use crate::database::{self, FileMedium, Medium, OpenSettings, ReadOnlyMedium};
use crate::error::EmbeddedOpenError;
use crate::options::EmbeddedOptions;
use crate::reader;
use crate::schema::{CLOCK_STEP, RECORDS, decode};
use crate::shared::{
    Job, Reply, Scan, State, StoreInner, closed_error, hidden_record_error, is_damage, push_error,
    unreadable_error,
};
use crate::writer::{FileMeta, Writer};

/// The durable store of one node: a file in its own directory, no server. See the [crate's page](crate).
pub struct EmbeddedStore {
    inner: Arc<StoreInner>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl EmbeddedStore {
    /// Opens the store, creating the directory and the file if they are missing.
    ///
    /// Takes [`EmbeddedOptions`], or a path for a store with the defaults.
    ///
    /// Blocks while the disk works. After an unclean stop, it blocks until the whole file is verified.
    ///
    /// # Errors
    /// [`EmbeddedOpenError`] if another process has the store open, the file is damaged or has a newer format, or the disk fails.
    pub fn open(options: impl Into<EmbeddedOptions>) -> Result<Self, EmbeddedOpenError> {
        let options = options.into();
        let medium = FileMedium::acquire(&options.dir)?;
        Self::open_medium(Box::new(medium), options)
    }

    /// Opens the store on any medium.
    pub(crate) fn open_medium(
        medium: Box<dyn Medium>,
        options: EmbeddedOptions,
    ) -> Result<Self, EmbeddedOpenError> {
        let medium: Arc<dyn Medium> = Arc::from(medium);
        let settings = OpenSettings { cache_bytes: options.cache_bytes, verify_bytes: options.verify_bytes };
        let (opened, unwritable) = match database::open(&*medium, settings) {
            Ok(opened) => (opened, None),
            // The store opens for reading anyway: recorded keys can be answered, and requests without a key need no store.
            Err(error @ EmbeddedOpenError::Io { .. }) if error.is_full() => {
                let opened = database::open(&ReadOnlyMedium(medium.clone()), settings)?;
                (opened, Some(ErrorChain(&error).to_string()))
            }
            Err(error) => return Err(error),
        };
        let clock = match opened.last_write {
            Some(last) => {
                wait_for(&*options.clock, last.time);
                StoreClock::resume(options.clock, last)
            }
            None => StoreClock::new(options.clock),
        };
        let file = FileMeta::of(&opened);
        let state = match &unwritable {
            Some(reason) => State::ReadOnly(opened.database, reason.as_str().into()),
            None => State::Open(opened.database),
        };
        let inner = Arc::new(StoreInner::new(state, clock, options.max_batch));
        let store = Self { inner: inner.clone(), threads: Mutex::default() };
        let writer = Writer {
            inner: inner.clone(),
            medium,
            settings,
            max_batch: options.max_batch,
            max_records: options.max_records,
            max_record_bytes: options.max_record_bytes,
            file,
            unwritable,
            reported_skew: None,
            purges: std::collections::VecDeque::new(),
        };
        store.spawn("oncegate-writer", move || writer.run())?;
        store.spawn("oncegate-reader", move || reader::run(&inner))?;
        Ok(store)
    }

    fn spawn(&self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), EmbeddedOpenError> {
        let thread = thread::Builder::new().name(name.to_owned()).spawn(run);
        let thread = thread.map_err(EmbeddedOpenError::io("start a thread"))?;
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        Ok(())
    }

    /// Applies the waiting commands, closes the file and unlocks the directory.
    ///
    /// Blocks until that is done, which takes about as long as one commit. Later commands are refused as unavailable.
    /// Dropping the store does the same.
    pub fn close(&self) {
        self.inner.jobs.close();
        self.inner.scans.close();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            // A thread that panicked has closed its queue, so its result does not matter.
            let _ = thread.join();
        }
    }

    /// Answers a claim that changes nothing (a replay, a conflict, a mismatch) from committed records.
    ///
    /// Returns `None` if the claim would change a record. Then the writer has to decide it.
    fn claim_by_reading(&self, id: &RecordId, command: &Command) -> Result<Option<Outcome>, StoreError> {
        let now = self.inner.clock.now();
        let record = self.read_record(id)?;
        if record.is_none() && self.inner.has_damage() {
            return Err(hidden_record_error());
        }
        let decision = decide(record.as_ref(), command, now);
        Ok((decision.write == Write::Keep).then_some(decision.outcome))
    }

    fn read_record(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        let read = |database: &Database| -> Result<_, redb::Error> {
            let records = database.begin_read()?.open_table(RECORDS)?;
            let encoded = records.get(id.as_bytes())?;
            Ok(encoded.map(|encoded| decode(id, encoded.value()).map(|(_, record)| record)))
        };
        self.inner.read(read)?.transpose().map_err(|error| {
            if is_damage(&error) {
                self.inner.report_damage();
            }
            unreadable_error(id, error)
        })
    }

    async fn submit<T>(&self, job: impl FnOnce(Reply<T>) -> Job) -> Result<T, StoreError> {
        self.inner.state().writable()?;
        let (reply, received) = oneshot::channel();
        self.inner.jobs.push(job(reply)).map_err(push_error)?;
        // Checked again: if the file failed in between, and the writer had already refused the waiting commands, this
        // command would wait until the file is open again.
        self.inner.state().writable()?;
        received.await.unwrap_or_else(|_| Err(closed_error()))
    }

    async fn scan<T>(&self, scan: impl FnOnce(Reply<T>) -> Scan) -> Result<T, StoreError> {
        let (reply, received) = oneshot::channel();
        self.inner.scans.push(scan(reply)).map_err(push_error)?;
        received.await.unwrap_or_else(|_| Err(closed_error()))
    }
}

impl Store for EmbeddedStore {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        Box::pin(async move {
            if matches!(command, Command::Claim(_))
                && let Some(outcome) = self.claim_by_reading(&id, &command)?
            {
                return Ok(outcome);
            }
            self.submit(|reply| Job::Apply { id, command, reply }).await
        })
    }

    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        Box::pin(async move {
            let now = self.inner.clock.now();
            Ok(self.read_record(&id)?.filter(|record| !record.is_expired(now)))
        })
    }

    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage> {
        Box::pin(self.scan(|reply| Scan::List { query, reply }))
    }

    fn purge(&self, limit: usize) -> StoreFuture<'_, usize> {
        Box::pin(self.submit(move |reply| Job::Purge { limit, purged: 0, reply }))
    }

    fn audit(&self, before: Option<u64>, limit: usize) -> StoreFuture<'_, Vec<AuditEntry>> {
        Box::pin(self.scan(move |reply| Scan::Audit { before, limit, reply }))
    }

    fn check(&self) -> StoreFuture<'_, ()> {
        Box::pin(self.submit(|reply| Job::Check { reply }))
    }

    fn now(&self) -> Timestamp {
        self.inner.clock.now()
    }

    fn advisories(&self) -> Vec<Advisory> {
        let mut advisories = Vec::new();
        if let Some(skew) = self.inner.clock.skew().filter(|skew| !skew.is_expected) {
            advisories.push(Advisory::new("clock", skew.to_string()));
        }
        if let Err(error) = self.inner.state().writable() {
            advisories.push(Advisory::new("not-writable", ErrorChain(&error).to_string()));
        } else if let Some(reason) = self.inner.full().as_ref() {
            advisories.push(Advisory::new("full", reason.clone()));
        }
        if self.inner.has_damage() {
            advisories.push(Advisory::new("damage", hidden_record_error().to_string()));
        }
        advisories
    }

    fn accept_clock(&self) -> StoreFuture<'_, Option<Duration>> {
        Box::pin(self.submit(|reply| Job::AcceptClock { reply }))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new("embedded", Durability::Synced, Fencing::Monotonic)
    }
}

/// Waits until `clock` reaches `floor`, if it is at most [`CLOCK_STEP`] behind.
///
/// A store that is opened again at once finds its clock that far behind although nothing set it back. Without the wait,
/// the time of the store would move a little further ahead of the time of day with each restart.
fn wait_for(clock: &dyn Clock, floor: Timestamp) {
    let mut last = clock.now();
    while last < floor && floor.since(last) <= Duration::from_millis(CLOCK_STEP) {
        thread::sleep(Duration::from_millis(2));
        let now = clock.now();
        if now == last {
            return; // the clock stands still: a test moves it
        }
        last = now;
    }
}

impl Drop for EmbeddedStore {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for EmbeddedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddedStore").finish_non_exhaustive()
    }
}
