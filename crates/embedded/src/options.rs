//! How a store is opened.

use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use oncegate_core::Clock;

use crate::clock::MachineClock;

/// How a store is opened.
#[derive(Clone)]
#[non_exhaustive]
pub struct EmbeddedOptions {
    pub(crate) dir: PathBuf,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) cache_bytes: usize,
    pub(crate) max_batch: usize,
    pub(crate) verify_bytes: u64,
    pub(crate) max_records: u64,
    pub(crate) max_record_bytes: u64,
}

impl EmbeddedOptions {
    /// A store in this directory, which is created if it is missing.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            clock: Arc::new(MachineClock::default()),
            cache_bytes: 64 * 1024 * 1024,
            max_batch: 1024,
            verify_bytes: 256 * 1024 * 1024,
            max_records: u64::MAX,
            max_record_bytes: u64::MAX,
        }
    }

    /// Leases and retentions are measured by this clock. Default: the clocks of the machine. When its time of day is set,
    /// see [`StoreClock`](oncegate_core::StoreClock).
    #[must_use]
    pub fn with_clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// The most memory, in bytes, that the store keeps pages of its file in. Default: 64 MiB. What does not fit is read
    /// again from the file, in the best case from the memory of the operating system.
    #[must_use]
    pub fn with_cache_bytes(mut self, bytes: usize) -> Self {
        self.cache_bytes = bytes;
        self
    }

    /// The most commands in one transaction. Default: 1024. Commands are never held back to fill one.
    #[must_use]
    pub fn with_max_batch(mut self, commands: NonZeroUsize) -> Self {
        self.max_batch = commands.get();
        self
    }

    /// The most records, those past their retention included until they are purged. A claim of one more is refused; nothing
    /// is pushed out, because that would free its key. Default: no limit but the disk.
    #[must_use]
    pub fn with_max_records(mut self, records: u64) -> Self {
        self.max_records = records;
        self
    }

    /// The most bytes that all records have together. A claim of one more is refused when there are as many. The file takes
    /// two to three times as much. Default: no limit but the disk.
    #[must_use]
    pub fn with_max_record_bytes(mut self, bytes: u64) -> Self {
        self.max_record_bytes = bytes;
        self
    }

    /// A file of at most so many bytes is verified as a whole whenever it is opened, page by page. Default: 256 MiB,
    /// which takes about a second. After a stop that was not clean, a file of any size is verified.
    #[must_use]
    pub fn with_verify_bytes(mut self, bytes: u64) -> Self {
        self.verify_bytes = bytes;
        self
    }
}

impl fmt::Debug for EmbeddedOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddedOptions")
            .field("dir", &self.dir)
            .field("cache_bytes", &self.cache_bytes)
            .field("max_batch", &self.max_batch)
            .field("verify_bytes", &self.verify_bytes)
            .field("max_records", &self.max_records)
            .field("max_record_bytes", &self.max_record_bytes)
            .finish_non_exhaustive()
    }
}
