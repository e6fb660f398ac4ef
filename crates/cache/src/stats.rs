//! The counters of a cache.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The counters of a cache. Cheap to clone; all clones share the same counters.
#[derive(Clone, Debug, Default)]
pub struct CacheStats(Arc<Cells>);

#[derive(Debug, Default)]
pub(crate) struct Cells {
    pub(crate) hits: AtomicU64,
    pub(crate) misses: AtomicU64,
    pub(crate) errors: AtomicU64,
    pub(crate) skipped: AtomicU64,
    pub(crate) populated: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) shed: AtomicU64,
    pub(crate) pending: AtomicU64,
    pub(crate) is_out: AtomicBool,
}

/// The values of a [`CacheStats`] at one time, counted since the start of the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheCounts {
    /// Claims that the cache answered, without a round trip to the store.
    pub hits: u64,
    /// Claims that the cache had no entry for.
    pub misses: u64,
    /// Claims for which the cache failed, was too slow, or held an entry that cannot be read.
    pub errors: u64,
    /// Claims for which the cache was not asked, because it had failed before.
    pub skipped: u64,
    /// Responses that were written to the cache.
    pub populated: u64,
    /// Responses that the cache refused, or that could not be read from the store.
    pub failed: u64,
    /// Responses that were not written to the cache: too many were waiting, the cache was failing, or they are too large.
    pub shed: u64,
    /// Responses that wait to be written to the cache, or are being written: now, not since the start.
    pub pending: u64,
    /// True while the cache is not asked because it failed.
    pub is_out: bool,
}

impl CacheStats {
    /// The values now.
    #[must_use]
    pub fn counts(&self) -> CacheCounts {
        let read = |cell: &AtomicU64| cell.load(Ordering::Relaxed);
        let cells = &self.0;
        CacheCounts {
            hits: read(&cells.hits),
            misses: read(&cells.misses),
            errors: read(&cells.errors),
            skipped: read(&cells.skipped),
            populated: read(&cells.populated),
            failed: read(&cells.failed),
            shed: read(&cells.shed),
            pending: cells.pending.load(Ordering::SeqCst),
            is_out: cells.is_out.load(Ordering::SeqCst),
        }
    }

    pub(crate) fn add(&self, cell: impl FnOnce(&Cells) -> &AtomicU64) {
        cell(&self.0).fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn cells(&self) -> &Cells {
        &self.0
    }
}
