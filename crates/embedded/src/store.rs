//! The store itself: the type that callers use.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use oncegate_core::{
    Advisory, AuditEntry, Capabilities, Clock, ClockSkew, Command, Durability, ErrorChain, Extent, Fencing,
    LastWrite, ListPage, ListQuery, Outcome, Record, RecordId, Store, StoreClock, StoreError, StoreFuture,
    StoreUsage, Timestamp,
};
use tokio::sync::oneshot;

use crate::disk::{DirectoryDisk, Disk};
use crate::error::EmbeddedOpenError;
use crate::housekeeper::{Housekeeper, prepare_segments};
use crate::inner::{Chore, Limits, Sizes, StoreInner};
use crate::mark::Marker;
use crate::options::EmbeddedOptions;
use crate::reader;
use crate::recover;
use crate::salvage::unaccepted;
use crate::shared::{Reply, Scan, closed_error, push_error};
use crate::tail::Tail;
use crate::ticket::{Ticket, Wait};
use crate::writer::Writer;

/// The durable store of one node: a log in its own directory, no server.
pub struct EmbeddedStore {
    inner: Arc<StoreInner>,
    threads: Mutex<Threads>,
}

#[derive(Default)]
struct Threads {
    writer: Option<JoinHandle<()>>,
    others: Vec<JoinHandle<()>>,
}

impl EmbeddedStore {
    /// Opens the store, creating the directory and the log if they are missing.
    ///
    /// Takes [`EmbeddedOptions`], or a path for a store with the defaults.
    ///
    /// Blocks while the disk works: it reads the whole log, and verifies it.
    ///
    /// # Errors
    /// [`EmbeddedOpenError`] if another process has the store open, the log is damaged or has a newer format, the store is a
    /// salvaged copy whose losses were not accepted, or the disk fails.
    pub fn open(options: impl Into<EmbeddedOptions>) -> Result<Self, EmbeddedOpenError> {
        let options = options.into();
        let disk = DirectoryDisk::acquire(&options.dir)?;
        if let Some(file) = unaccepted(&options.dir) {
            return Err(EmbeddedOpenError::Salvaged { file });
        }
        let sizes = Sizes::with_memory(options.memory_bytes);
        Self::open_disk(Arc::new(disk), options, sizes)
    }

    /// Opens the store on any disk.
    pub(crate) fn open_disk(
        disk: Arc<dyn Disk>,
        options: EmbeddedOptions,
        sizes: Sizes,
    ) -> Result<Self, EmbeddedOpenError> {
        let wall = options.clock.now();
        let now = LastWrite { time: wall, wall, lagging_since: None };
        let opened = recover::open(&*disk, now, random_id, sizes)?;
        let (clock, last_write) = match opened.last_write {
            Some(last) => {
                // Later than everything that was written, so that records of this process can be told from those.
                let last = LastWrite { time: last.time.after(Duration::from_millis(1)), ..last };
                (StoreClock::resume(options.clock, last), last)
            }
            None => (StoreClock::new(options.clock), now),
        };
        opened.recovered.remove_expired(clock.now());
        let limits = Limits { max_records: options.max_records, max_record_bytes: options.max_record_bytes };
        let inner = Arc::new(StoreInner::new(disk, clock, opened.recovered, limits, sizes, opened.last));
        let mut housekeeper = Housekeeper::new(inner.clone(), Marker::new(&opened.marks));
        // After what was read is durable, and before anything is written.
        housekeeper.write_mark();
        let store = Self { inner: inner.clone(), threads: Mutex::default() };
        let preparing = inner.clone();
        store.add(spawn("oncegate-segments", move || prepare_segments(&preparing))?);
        store.add(spawn("oncegate-housekeeper", move || housekeeper.run())?);
        for _ in 0..reader::READERS {
            let reading = inner.clone();
            store.add(spawn("oncegate-reader", move || reader::run(&reading))?);
        }
        let writer = Writer { inner, end: opened.end, last_write, has_failed: false, next: None };
        let writer = spawn("oncegate-writer", move || writer.run())?;
        store.threads.lock().unwrap_or_else(PoisonError::into_inner).writer = Some(writer);
        Ok(store)
    }

    /// The inside of the store.
    pub(crate) fn inside(&self) -> &StoreInner {
        &self.inner
    }

    /// # Errors
    /// If the store is closed.
    pub(crate) fn check_open(&self) -> Result<(), StoreError> {
        self.inner.check_open()
    }

    /// The batch that is being filled.
    pub(crate) fn tail(&self) -> &Tail {
        &self.inner.tail
    }

    fn add(&self, thread: JoinHandle<()>) {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).others.push(thread);
    }

    /// Writes what was accepted, closes the files and unlocks the directory.
    ///
    /// Blocks until that is done, which takes about as long as one commit. Later commands are refused as unavailable.
    /// Dropping the store does the same.
    pub fn close(&self) {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        self.inner.is_closed.store(true, Ordering::SeqCst);
        // A thread that panicked has ended its waits, so its result does not matter. The writer ends first, because it may need a
        // segment. The housekeeper ends after it, with the mark of the last batch.
        self.inner.tail.close();
        if let Some(writer) = threads.writer.take() {
            let _ = writer.join();
        }
        self.inner.spare.close();
        self.inner.chores.close();
        self.inner.scans.close();
        for thread in threads.others.drain(..) {
            let _ = thread.join();
        }
        self.inner.disk.release();
    }

    /// Begins to remove the older versions of all records from the log. What is alive is copied to new segments, and the old ones
    /// are deleted, in the background. Returns the number that [`is_compacted`](Self::is_compacted) takes.
    ///
    /// # Errors
    /// If one runs already, the disk has no space for the copies, the log is damaged, or nothing can be written.
    pub async fn begin_compaction(&self) -> Result<u32, StoreError> {
        self.inner.check_open()?;
        if self.inner.has_damage() {
            return Err(StoreError::invalid(
                "the log is damaged, so old segments are kept: run `oncegate check`",
            ));
        }
        let running =
            || StoreError::unavailable("a compaction runs already; begin another one when it has ended");
        if self.inner.begins_compaction.swap(true, Ordering::SeqCst) {
            return Err(running().with_extent(Extent::Writes).with_nothing_sent());
        }
        let _turn = Turn(&self.inner.begins_compaction);
        if self.running_compaction()?.is_some() {
            return Err(running().with_extent(Extent::Writes).with_nothing_sent());
        }
        let needed = self.inner.segments.live_bytes().saturating_add(self.inner.sizes.max_segment);
        if self.inner.is_disk_low() || self.inner.disk.free().is_some_and(|free| free < needed) {
            let error =
                format!("a compaction needs {needed} bytes on the disk for a while, and there are less");
            return Err(StoreError::unavailable(error).with_extent(Extent::Writes).with_nothing_sent());
        }
        let newest = || self.inner.segments.range().map_or(0, |(_, newest)| newest);
        let below = newest() + 1;
        self.inner.wants_segment.store(true, Ordering::SeqCst);
        wait(Some(self.inner.tail.want_batch()?)).await?;
        if newest() < below {
            return Err(StoreError::unavailable(
                "the log cannot begin a new segment, which a compaction needs",
            ));
        }
        self.inner.compacted_below.fetch_max(below, Ordering::SeqCst);
        self.inner.look();
        Ok(below)
    }

    /// The number of the compaction that runs, if one does.
    ///
    /// # Errors
    /// As for [`is_compacted`](Self::is_compacted).
    pub fn running_compaction(&self) -> Result<Option<u32>, StoreError> {
        let below = self.inner.compacted_below.load(Ordering::SeqCst);
        Ok(if below == 0 || self.is_compacted(below)? { None } else { Some(below) })
    }

    /// Returns true if no segment from before [`begin_compaction`](Self::begin_compaction) is left, and no file of one.
    ///
    /// # Errors
    /// If the log is damaged, so that old segments are kept, or if the store is closed.
    pub fn is_compacted(&self, below: u32) -> Result<bool, StoreError> {
        self.inner.check_open()?;
        if self.inner.has_damage() {
            return Err(StoreError::invalid(
                "the log is damaged, so old segments are kept: run `oncegate check`",
            ));
        }
        let is_gone = self.inner.segments.range().is_none_or(|(oldest, _)| oldest >= below);
        Ok(is_gone && self.inner.unremoved.load(Ordering::SeqCst) == 0)
    }

    async fn scan<T>(&self, scan: impl FnOnce(Reply<T>) -> Scan) -> Result<T, StoreError> {
        let (reply, received) = oneshot::channel();
        self.inner.scans.push(scan(reply)).map_err(push_error)?;
        received.await.unwrap_or_else(|_| Err(closed_error()))
    }

    async fn chore<T>(&self, chore: impl FnOnce(Reply<T>) -> Chore) -> Result<T, StoreError> {
        let (reply, received) = oneshot::channel();
        self.inner.chores.push(chore(reply)).map_err(push_error)?;
        received.await.unwrap_or_else(|_| Err(closed_error()))
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, EmbeddedOpenError> {
    thread::Builder::new().name(name.to_owned()).spawn(run).map_err(EmbeddedOpenError::io("start a thread"))
}

/// Lowers a flag when it is dropped.
struct Turn<'a>(&'a AtomicBool);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// The identifier of a new store.
pub(crate) fn random_id() -> Result<[u8; 16], EmbeddedOpenError> {
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(|error| EmbeddedOpenError::Io {
        operation: "get random bytes".to_owned(),
        source: std::io::Error::other(error),
    })?;
    Ok(id)
}

async fn wait(ticket: Option<Arc<Ticket>>) -> Result<(), StoreError> {
    match ticket {
        None => Ok(()),
        Some(ticket) => Wait::new(ticket).await.map_err(|reason| {
            StoreError::unavailable(format!("the embedded store could not write: {reason}"))
        }),
    }
}

impl Store for EmbeddedStore {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        Box::pin(async move {
            let (outcome, ticket) = self.inner.decide(&id, &command)?;
            wait(ticket).await?;
            Ok(outcome)
        })
    }

    /// Answers claims that change nothing if their record is in memory and on the disk.
    fn try_apply(&self, id: RecordId, command: &Command) -> Option<Result<Outcome, StoreError>> {
        self.inner.reply_from_memory(&id, command).map(Ok)
    }

    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        Box::pin(async move {
            let Some((record, ticket)) = self.inner.read(&id)? else { return Ok(None) };
            wait(ticket).await?;
            let now = self.inner.clock.now();
            Ok(Some(record).filter(|record| !record.is_expired(now)))
        })
    }

    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage> {
        Box::pin(self.scan(|reply| Scan::List { query, reply }))
    }

    fn purge(&self, limit: usize) -> StoreFuture<'_, usize> {
        Box::pin(self.chore(move |reply| Chore::Purge { limit, reply }))
    }

    fn audit(&self, before: Option<u64>, limit: usize) -> StoreFuture<'_, Vec<AuditEntry>> {
        Box::pin(self.scan(move |reply| Scan::Audit { before, limit, reply }))
    }

    fn check(&self) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            if let Some(error) = self.inner.disk_refusal() {
                return Err(error);
            }
            let ticket = self.inner.tail.want_batch()?;
            wait(Some(ticket)).await
        })
    }

    fn now(&self) -> Timestamp {
        self.inner.clock.now()
    }

    fn advisories(&self) -> Vec<Advisory> {
        let mut advisories = Vec::new();
        if let Some(skew) = self.inner.clock.skew().filter(|skew| !skew.is_expected) {
            advisories.push(skew.advisory());
        }
        if let Err(error) = self.inner.tail.writable() {
            advisories.push(Advisory::new("not-writable", ErrorChain(&error).to_string()));
        } else {
            self.inner.look_at_capacity();
            advisories.extend(self.inner.full().as_ref().map(|reason| Advisory::new("full", reason.clone())));
        }
        if let Some(failure) = self.inner.mark_failure().as_ref().filter(|failure| failure.lasts()) {
            let text = format!(
                "the mark of the log cannot be written: {}. Until it can, a start cannot notice if the end of the log is missing",
                failure.error
            );
            advisories.push(Advisory::new("mark", text));
        }
        if self.inner.has_damage() {
            let text = "a record or a segment is damaged: stop the program and run `oncegate check`";
            advisories.push(Advisory::new("damage", text));
        }
        advisories
    }

    fn usage(&self) -> Option<StoreUsage> {
        Some(self.inner.usage())
    }

    fn clock_skew(&self) -> Option<ClockSkew> {
        self.inner.clock.skew()
    }

    fn accept_clock(&self) -> StoreFuture<'_, Option<Duration>> {
        Box::pin(self.chore(|reply| Chore::AcceptClock { reply }))
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new("embedded", Durability::Synced, Fencing::Monotonic);
        capabilities.is_shared = false;
        capabilities
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
