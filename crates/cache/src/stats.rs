//! What the front was good for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a front was good for so far. Cheap to clone; all clones count the same.
#[derive(Clone, Debug, Default)]
pub struct CacheStats(Arc<Cells>);

#[derive(Debug, Default)]
pub(crate) struct Cells {
    pub(crate) hits: AtomicU64,
    pub(crate) misses: AtomicU64,
    pub(crate) errors: AtomicU64,
    pub(crate) skipped: AtomicU64,
    pub(crate) fills: AtomicU64,
    pub(crate) failed_fills: AtomicU64,
    pub(crate) shed: AtomicU64,
    pub(crate) pending: AtomicU64,
    pub(crate) is_out: AtomicU64,
}

/// The numbers of a [`CacheStats`] at one time. Each counts from the start of the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheCounts {
    /// Claims that the front answered, without a trip to the back.
    pub hits: u64,
    /// Claims that it knew nothing of.
    pub misses: u64,
    /// Claims that it did not answer, not in time, or with something that cannot be read.
    pub errors: u64,
    /// Claims for which it was not asked, because it did not answer before.
    pub skipped: u64,
    /// Answers that were put into it.
    pub fills: u64,
    /// Answers that it did not take, or that could not be read from the back.
    pub failed_fills: u64,
    /// Answers that nobody tried to put into it: too many were waiting, it was not answering, or they are too large.
    pub shed: u64,
    /// Answers that wait to be put into it, or are just being put: now, not since the start.
    pub pending: u64,
    /// Whether it is not asked at present.
    pub is_out: bool,
}

impl CacheStats {
    /// The numbers now.
    #[must_use]
    pub fn counts(&self) -> CacheCounts {
        let read = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        let cells = &self.0;
        CacheCounts {
            hits: read(&cells.hits),
            misses: read(&cells.misses),
            errors: read(&cells.errors),
            skipped: read(&cells.skipped),
            fills: read(&cells.fills),
            failed_fills: read(&cells.failed_fills),
            shed: read(&cells.shed),
            pending: cells.pending.load(Ordering::SeqCst),
            is_out: cells.is_out.load(Ordering::SeqCst) != 0,
        }
    }

    pub(crate) fn add(&self, cell: impl FnOnce(&Cells) -> &AtomicU64) {
        cell(&self.0).fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn cells(&self) -> &Cells {
        &self.0
    }
}
