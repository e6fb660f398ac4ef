//! The options of a store.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use oncegate_core::Clock;

use crate::clock::MachineClock;

/// The directory, the clock and the limits of a store.
#[derive(Clone)]
#[non_exhaustive]
pub struct EmbeddedOptions {
    pub(crate) dir: PathBuf,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) memory_bytes: usize,
    pub(crate) max_records: u64,
    pub(crate) max_record_bytes: u64,
}

impl EmbeddedOptions {
    /// Options for a store in this directory, which is created if it is missing.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            clock: Arc::new(MachineClock::default()),
            memory_bytes: 512 * 1024 * 1024,
            max_records: u64::MAX,
            max_record_bytes: u64::MAX,
        }
    }

    /// Sets the clock that measures leases and retentions. Default: the clocks of the machine.
    ///
    /// [`StoreClock`](oncegate_core::StoreClock) describes the effect of setting the time of day.
    #[must_use]
    pub fn with_clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Sets the most memory, in bytes: the index takes up to 48 bytes for each record, and recent records an eighth of the whole.
    /// Default: 512 MiB, for nine million records.
    ///
    /// A claim of one more record is refused. Records that are not recent are read from the disk, in the best case from the cache
    /// of the operating system.
    #[must_use]
    pub fn with_memory_bytes(mut self, bytes: usize) -> Self {
        self.memory_bytes = bytes;
        self
    }

    /// Sets the most records. Default: no limit but the memory and the disk.
    ///
    /// Records past their retention count until they are purged. A claim of one more record is refused. No record is evicted
    /// to make space, because that would free its key.
    #[must_use]
    pub fn with_max_records(mut self, records: u64) -> Self {
        self.max_records = records;
        self
    }

    /// Sets the most bytes of all records together. Default: no limit but the disk.
    ///
    /// When the limit is reached, a claim of one more record is refused. Lengths count rounded up, by an eighth at most. The
    /// directory takes up to twice as much, and up to four segments more.
    #[must_use]
    pub fn with_max_record_bytes(mut self, bytes: u64) -> Self {
        self.max_record_bytes = bytes;
        self
    }
}

impl From<&str> for EmbeddedOptions {
    fn from(dir: &str) -> Self {
        Self::new(dir)
    }
}

impl From<&Path> for EmbeddedOptions {
    fn from(dir: &Path) -> Self {
        Self::new(dir)
    }
}

impl From<PathBuf> for EmbeddedOptions {
    fn from(dir: PathBuf) -> Self {
        Self::new(dir)
    }
}

impl fmt::Debug for EmbeddedOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddedOptions")
            .field("dir", &self.dir)
            .field("memory_bytes", &self.memory_bytes)
            .field("max_records", &self.max_records)
            .field("max_record_bytes", &self.max_record_bytes)
            .finish_non_exhaustive()
    }
}
