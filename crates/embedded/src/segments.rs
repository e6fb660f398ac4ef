//! The segments of a store, and the sums that decide when one is deleted or compacted.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use crate::disk::SegmentFile;
use crate::index::Slot;

/// A segment.
pub(crate) struct Segment {
    pub(crate) number: u32,
    pub(crate) file: Arc<dyn SegmentFile>,
    /// The bytes of zeros that were written ahead, and those of batches before them.
    pub(crate) size: u64,
    /// The bytes of its batches.
    pub(crate) used: AtomicU64,
    /// The number of entries that the index or the audit trail has.
    live: AtomicU64,
}

impl Segment {
    pub(crate) fn new(number: u32, file: Arc<dyn SegmentFile>, size: u64) -> Self {
        Self { number, file, size, used: 0.into(), live: 0.into() }
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.live.load(Ordering::Relaxed) == 0
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }
}

/// All segments with batches, by number. The last one is being written.
#[derive(Default)]
pub(crate) struct Segments {
    map: RwLock<BTreeMap<u32, Arc<Segment>>>,
    /// The bytes of all entries that the index has.
    live_bytes: AtomicU64,
}

impl Segments {
    pub(crate) fn get(&self, number: u32) -> Option<Arc<Segment>> {
        self.read().get(&number).cloned()
    }

    pub(crate) fn add(&self, segment: Arc<Segment>) {
        self.write().insert(segment.number, segment);
    }

    pub(crate) fn remove(&self, number: u32) {
        self.write().remove(&number);
    }

    /// All segments, oldest first, with the bytes of their batches.
    pub(crate) fn all(&self) -> Vec<(Arc<Segment>, u64)> {
        self.read().values().map(|segment| (segment.clone(), segment.used())).collect()
    }

    /// The oldest segment, if it is not the one that is being written.
    pub(crate) fn oldest_sealed(&self) -> Option<Arc<Segment>> {
        let map = self.read();
        map.values().next().filter(|_| map.len() > 1).cloned()
    }

    /// The numbers of the oldest segment and of the one that is being written.
    pub(crate) fn range(&self) -> Option<(u32, u32)> {
        let map = self.read();
        Some((*map.keys().next()?, *map.keys().next_back()?))
    }

    /// Counts an entry that the index has now.
    pub(crate) fn count(&self, slot: &Slot) {
        if let Some(segment) = self.read().get(&slot.place().segment) {
            segment.live.fetch_add(1, Ordering::Relaxed);
            self.live_bytes.fetch_add(slot.len(), Ordering::Relaxed);
        }
    }

    /// Sets the counters, for the only owner: the live entries of each segment, and the bytes of all.
    pub(crate) fn set_counts(&self, live: &BTreeMap<u32, u64>, live_bytes: u64) {
        for (number, count) in live {
            if let Some(segment) = self.read().get(number) {
                segment.live.store(*count, Ordering::Relaxed);
            }
        }
        self.live_bytes.store(live_bytes, Ordering::Relaxed);
    }

    /// Counts entries that the index has no more.
    pub(crate) fn discount<'a>(&self, slots: impl IntoIterator<Item = &'a Slot>) {
        let map = self.read();
        for slot in slots {
            if let Some(segment) = map.get(&slot.place().segment) {
                segment.live.fetch_sub(1, Ordering::Relaxed);
                self.live_bytes.fetch_sub(slot.len(), Ordering::Relaxed);
            }
        }
    }

    /// The bytes of all entries that the index has.
    pub(crate) fn live_bytes(&self) -> u64 {
        self.live_bytes.load(Ordering::Relaxed)
    }

    /// The filled part of the segment that is being written: bytes, of bytes.
    pub(crate) fn filled(&self) -> (u64, u64) {
        self.read().values().next_back().map_or((1, 1), |segment| (segment.used(), segment.size))
    }

    /// The bytes of all segments but the one that is being written.
    pub(crate) fn sealed_bytes(&self) -> u64 {
        self.read().values().rev().skip(1).map(|segment| segment.used()).sum()
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<u32, Arc<Segment>>> {
        self.map.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<u32, Arc<Segment>>> {
        self.map.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The segment that is prepared for when the present one is full.
pub(crate) enum Spare {
    /// The preparing thread makes the segment with this number.
    Wanted(u32),
    Ready(Arc<Segment>),
    /// It could not be prepared. It is tried again later.
    Failed(u32),
    /// The writer prepares the segment itself.
    Taken,
    /// The preparing thread has ended.
    Gone,
}

/// Hands spare segments to the writer.
pub(crate) struct SpareSlot {
    spare: Mutex<Spare>,
    changed: Condvar,
    /// The last attempt failed.
    has_failed: AtomicBool,
    /// The reason of the last failure.
    failure: Mutex<String>,
    /// The writer waits for the segment that is being prepared.
    is_awaited: AtomicBool,
}

impl SpareSlot {
    pub(crate) fn new(spare: Spare) -> Self {
        Self {
            spare: Mutex::new(spare),
            changed: Condvar::new(),
            has_failed: AtomicBool::new(false),
            failure: Mutex::default(),
            is_awaited: AtomicBool::new(false),
        }
    }

    /// Takes the spare. Waits while it is being prepared. `None` means that the writer must prepare one.
    pub(crate) fn take(&self) -> Option<Arc<Segment>> {
        let spare = self.lock();
        self.is_awaited.store(matches!(*spare, Spare::Wanted(_)), Ordering::SeqCst);
        self.changed.notify_all();
        let mut spare = self
            .changed
            .wait_while(spare, |spare| matches!(spare, Spare::Wanted(_)))
            .unwrap_or_else(PoisonError::into_inner);
        self.is_awaited.store(false, Ordering::SeqCst);
        match std::mem::replace(&mut *spare, Spare::Taken) {
            Spare::Ready(segment) => {
                *spare = Spare::Wanted(segment.number + 1);
                drop(spare);
                self.changed.notify_all();
                Some(segment)
            }
            Spare::Gone => {
                *spare = Spare::Gone;
                None
            }
            Spare::Wanted(_) | Spare::Failed(_) | Spare::Taken => None,
        }
    }

    /// Asks for the next spare, after the writer has prepared a segment itself, or has failed to.
    pub(crate) fn give_back(&self, spare: Spare) {
        let mut slot = self.lock();
        if matches!(*slot, Spare::Taken) {
            *slot = spare;
            drop(slot);
            self.changed.notify_all();
        }
    }

    /// Waits until a segment is wanted, and returns its number. Tries again `retry` after a failure. `None` once the store is
    /// closed.
    pub(crate) fn wait_wanted(&self, retry: Duration) -> Option<u32> {
        let mut spare = self.lock();
        loop {
            let failed = match &*spare {
                Spare::Wanted(number) => return Some(*number),
                Spare::Gone => return None,
                Spare::Failed(number) => Some(*number),
                Spare::Ready(_) | Spare::Taken => None,
            };
            let Some(number) = failed else {
                spare = self.changed.wait(spare).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let (later, timeout) =
                self.changed.wait_timeout(spare, retry).unwrap_or_else(PoisonError::into_inner);
            spare = later;
            // Only if the writer has not taken over meanwhile.
            if timeout.timed_out() && matches!(&*spare, Spare::Failed(_)) {
                *spare = Spare::Wanted(number);
            }
        }
    }

    /// Pauses the preparation of a segment, at most until the writer waits for it or the store is closed.
    pub(crate) fn pause(&self, pause: Duration) {
        let goes_on =
            |spare: &mut Spare| matches!(spare, Spare::Wanted(_)) && !self.is_awaited.load(Ordering::SeqCst);
        drop(self.changed.wait_timeout_while(self.lock(), pause, goes_on));
    }

    /// Ends the preparation of segments.
    pub(crate) fn close(&self) {
        self.set(Spare::Gone);
    }

    /// The end of an attempt to prepare a segment.
    pub(crate) fn set(&self, result: Spare) {
        self.has_failed.store(matches!(result, Spare::Failed(_)), Ordering::SeqCst);
        let mut spare = self.lock();
        if !matches!(*spare, Spare::Gone) {
            *spare = result;
        }
        drop(spare);
        self.changed.notify_all();
    }

    /// The end of an attempt that failed.
    pub(crate) fn set_failed(&self, number: u32, reason: String) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = reason;
        self.set(Spare::Failed(number));
    }

    /// The reason, if the last attempt to prepare a segment failed.
    pub(crate) fn failure(&self) -> Option<String> {
        let reason = || self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.has_failed().then(reason)
    }

    /// True if the last attempt to prepare a segment failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::SeqCst)
    }

    fn lock(&self) -> MutexGuard<'_, Spare> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
