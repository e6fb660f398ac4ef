//! The items that this process still has to settle with the store, by record.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use oncegate_core::{RecordId, RecordMap, Sharded};

/// Items by record. A record nearly never has one, so looking for them is one read while there are none.
pub(crate) struct Pending<T>(Arc<Items<T>>);

struct Items<T> {
    count: AtomicUsize,
    by_record: Sharded<RecordMap<RecordId, Vec<Arc<T>>>>,
}

impl<T> Default for Pending<T> {
    fn default() -> Self {
        Self(Arc::new(Items { count: AtomicUsize::new(0), by_record: Sharded::default() }))
    }
}

impl<T> Pending<T> {
    /// Adds an item, which is there until the entry is dropped.
    pub(crate) fn add(&self, id: RecordId, item: T) -> Entry<T> {
        let item = Arc::new(item);
        self.0.count.fetch_add(1, Ordering::AcqRel);
        self.0.by_record.of(&id).entry(id).or_default().push(item.clone());
        Entry { items: self.0.clone(), id, item }
    }

    /// Returns true if the record has an item.
    pub(crate) fn has(&self, id: &RecordId) -> bool {
        self.0.count.load(Ordering::Acquire) != 0 && self.0.by_record.of(id).contains_key(id)
    }

    /// The number of items.
    pub(crate) fn len(&self) -> usize {
        self.0.count.load(Ordering::Acquire)
    }

    /// The records that have an item, at most `limit` of them.
    pub(crate) fn records(&self, limit: usize) -> Vec<RecordId> {
        let mut records = Vec::new();
        for shard in self.0.by_record.each() {
            records.extend(shard.keys().take(limit.saturating_sub(records.len())).copied());
        }
        records
    }

    /// The items of a record.
    pub(crate) fn of(&self, id: &RecordId) -> Vec<Arc<T>> {
        if self.0.count.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        self.0.by_record.of(id).get(id).cloned().unwrap_or_default()
    }
}

/// An item that is pending.
pub(crate) struct Entry<T> {
    items: Arc<Items<T>>,
    id: RecordId,
    item: Arc<T>,
}

impl<T> Deref for Entry<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.item
    }
}

impl<T> Drop for Entry<T> {
    fn drop(&mut self) {
        let mut shard = self.items.by_record.of(&self.id);
        if let Some(all) = shard.get_mut(&self.id) {
            all.retain(|other| !Arc::ptr_eq(other, &self.item));
            if all.is_empty() {
                shard.remove(&self.id);
            }
        }
        drop(shard);
        self.items.count.fetch_sub(1, Ordering::AcqRel);
    }
}
