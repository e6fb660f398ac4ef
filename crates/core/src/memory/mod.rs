//! The memory store: the executable specification of a store, and enough for one process whose records need not survive it.

mod packed;
mod shard;
mod slab;

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::{Clock, StoreClock, SystemClock, Timestamp};
use crate::decide::{Command, Decision, Outcome, Write, decide};
use crate::id::RecordId;
use crate::limits;
use crate::map::{Sharded, lock};
use crate::record::{Label, Record};
use crate::store::{
    Advisory, AuditEntry, Capabilities, Durability, Extent, Fencing, ListPage, ListQuery, Store, StoreError,
    StoreFuture,
};

use self::packed::Parts;
use self::shard::Shard;

/// A store in memory. Nothing survives the process; within the process, all guarantees of the protocol hold.
pub struct MemoryStore<C = SystemClock> {
    clock: StoreClock<C>,
    shards: Sharded<Shard>,
    audit: Mutex<Audit>,
    capacity: Capacity,
}

/// The use and the limits of all shards together.
struct Capacity {
    records: AtomicU64,
    max_records: u64,
    bytes: AtomicU64,
    max_bytes: u64,
}

#[derive(Default)]
struct Audit {
    entries: VecDeque<AuditEntry>,
    last: u64,
}

impl Default for MemoryStore {
    /// An empty store on the clocks of this machine: see [`MemoryStore::new`].
    fn default() -> Self {
        Self::new(SystemClock::new())
    }
}

impl<C: Clock> MemoryStore<C> {
    /// An empty store on this clock, for at most ten million records.
    pub fn new(clock: C) -> Self {
        let capacity = Capacity {
            records: AtomicU64::new(0),
            max_records: 10_000_000,
            bytes: AtomicU64::new(0),
            max_bytes: u64::MAX,
        };
        Self { clock: StoreClock::new(clock), shards: Sharded::default(), audit: Mutex::default(), capacity }
    }

    /// Sets the maximum number of records. Expired records count until they are purged. At the limit, claims of new keys are
    /// refused as unavailable: the store never evicts a record, because that would free its key.
    #[must_use]
    pub fn with_max_records(mut self, records: u64) -> Self {
        self.capacity.max_records = records;
        self
    }

    /// Sets the maximum memory of all records together, in bytes; by default there is none. At the limit, claims of new keys
    /// are refused as unavailable, but running attempts still complete. Records with a small response are kept close together,
    /// and their memory is free once half of their neighbours are gone, too.
    #[must_use]
    pub fn with_max_record_bytes(mut self, bytes: u64) -> Self {
        self.capacity.max_bytes = bytes;
        self
    }

    /// The number of records, expired ones included.
    pub fn len(&self) -> usize {
        self.shards.each().map(|shard| shard.len()).sum()
    }

    /// Returns true if there is no record.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn apply_now(&self, id: RecordId, command: &Command) -> Result<Outcome, StoreError> {
        let mut shard = self.shards.of(&id);
        // Read under the lock, because `accept_now` changes the time while it holds all locks.
        let now = self.clock.now();
        let place = shard.find(&id);
        let Decision { outcome, write } = match place {
            None => decide(None, command, now),
            Some(place) => shard.decide(place, command, now).ok_or_else(damaged)?,
        };
        if let Write::Put(record) = write {
            if place.is_none() && !self.capacity.admit() {
                let reason = self.capacity.exhausted().unwrap_or_else(|| "it was full".to_owned());
                let full = StoreError::unavailable(reason);
                return Err(full.with_extent(Extent::Writes).with_nothing_sent());
            }
            if let Some(entry) = AuditEntry::of(id, command, &outcome, record.state_name(now), now) {
                lock(&self.audit).add(entry);
            }
            let before = shard.bytes();
            shard.put(&id, place, record);
            self.capacity.resize(before, shard.bytes());
        }
        Ok(outcome)
    }

    fn lookup_now(&self, id: &RecordId) -> Result<Option<Record>, StoreError> {
        let shard = self.shards.of(id);
        let now = self.clock.now();
        let Some(place) = shard.find(id) else { return Ok(None) };
        let record = shard.read(place, None, Parts::All).ok_or_else(damaged)?;
        Ok(Some(record).filter(|record| !record.is_expired(now)).map(Cow::into_owned))
    }

    fn accept_now(&self) -> Option<Duration> {
        // All locks at once: a record written in the meantime would be neither shifted nor have the new time.
        let mut shards: Vec<_> = self.shards.each().collect();
        let skew = self.clock.skew().filter(|skew| skew.is_ahead)?;
        for shard in &mut shards {
            shard.shift(skew.since, skew.by);
        }
        self.clock.accept(skew.by);
        Some(skew.by)
    }

    fn list_now(&self, query: &ListQuery) -> ListPage {
        let now = self.clock.now();
        let limit = query.bounded_limit();
        // The first identifiers, and one more: it shows that there is a next page. Only their records are copied.
        let mut first: Vec<RecordId> = Vec::new();
        let from = query.after.map_or(0, |after| first_byte(&after));
        // The first byte of an identifier chooses its shard, so a page reads only the shards of its own part of the order.
        for byte in from..=u8::MAX {
            let shard = self.shards.of(&RecordId::from_bytes([byte; 32]));
            let mut known: Option<Label> = None;
            let is_listed =
                |id: &RecordId| first_byte(id) == byte && query.after.is_none_or(|after| *id > after);
            for (place, id) in shard.slots().filter(|(_, id)| is_listed(id)) {
                let record = shard.read(place, known.as_ref(), Parts::Head);
                // A damaged one is listed, too.
                if record.as_ref().is_none_or(|record| query.matches(record, now)) {
                    first.push(id);
                }
                if let Some(Cow::Owned(record)) = record {
                    known = Some(record.label);
                }
                if first.len() > 2 * limit {
                    keep_first(&mut first, limit + 1);
                }
            }
            if first.len() > limit {
                break;
            }
        }
        keep_first(&mut first, limit + 1);
        let more = first.len() > limit;
        first.truncate(limit);
        let mut page = ListPage { next: first.last().copied().filter(|_| more), ..ListPage::default() };
        for id in first {
            match self.lookup_now(&id) {
                // It may have changed meanwhile.
                Ok(record) => page.records.extend(record.filter(|r| query.matches(r, now)).map(|r| (id, r))),
                Err(_) => page.unreadable.push(id),
            }
        }
        page
    }

    fn purge_now(&self, limit: usize) -> usize {
        let now = self.clock.now();
        let mut purged = 0;
        for mut shard in self.shards.each() {
            let before = shard.bytes();
            let count = shard.purge(now, limit - purged);
            self.capacity.resize(before, shard.bytes());
            self.capacity.leave(count as u64);
            purged += count;
        }
        purged
    }
}

impl<C: Clock> Store for MemoryStore<C> {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        let outcome = self.apply_now(id, &command);
        Box::pin(std::future::ready(outcome))
    }

    fn try_apply(&self, id: RecordId, command: &Command) -> Option<Result<Outcome, StoreError>> {
        Some(self.apply_now(id, command))
    }

    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        Box::pin(std::future::ready(self.lookup_now(&id)))
    }

    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage> {
        Box::pin(async move { Ok(self.list_now(&query)) })
    }

    fn purge(&self, limit: usize) -> StoreFuture<'_, usize> {
        Box::pin(async move { Ok(self.purge_now(limit)) })
    }

    fn audit(&self, before: Option<u64>, limit: usize) -> StoreFuture<'_, Vec<AuditEntry>> {
        let audit = lock(&self.audit);
        let newest_first = audit.entries.iter().rev();
        let entries =
            newest_first.filter(|e| before.is_none_or(|b| e.number < b)).take(limit).cloned().collect();
        Box::pin(std::future::ready(Ok(entries)))
    }

    fn check(&self) -> StoreFuture<'_, ()> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn now(&self) -> Timestamp {
        self.clock.now()
    }

    fn advisories(&self) -> Vec<Advisory> {
        let clock = self.clock.skew().map(|skew| Advisory::new("clock", skew.to_string()));
        let full = self.capacity.exhausted().map(|reason| Advisory::new("full", reason));
        clock.into_iter().chain(full).collect()
    }

    fn accept_clock(&self) -> StoreFuture<'_, Option<Duration>> {
        Box::pin(async move { Ok(self.accept_now()) })
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new("memory", Durability::Volatile, Fencing::Monotonic);
        capabilities.is_shared = false;
        capabilities
    }
}

impl<C> fmt::Debug for MemoryStore<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}

impl Capacity {
    /// Counts one more record, if the limits allow it. Its bytes are counted when it is written.
    fn admit(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) < self.max_bytes
            && self
                .records
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |records| {
                    (records < self.max_records).then_some(records + 1)
                })
                .is_ok()
    }

    /// The reason why a new record is refused.
    fn exhausted(&self) -> Option<String> {
        let limit = if self.records.load(Ordering::Relaxed) >= self.max_records {
            format!("it has reached its limit of {} records", self.max_records)
        } else if self.bytes.load(Ordering::Relaxed) >= self.max_bytes {
            format!("its records have reached their limit of {} bytes", self.max_bytes)
        } else {
            return None;
        };
        Some(format!(
            "the memory store takes no new keys: {limit}: raise the limit, or wait until records expire"
        ))
    }

    fn resize(&self, before: u64, after: u64) {
        if after > before {
            self.bytes.fetch_add(after - before, Ordering::Relaxed);
        } else if after < before {
            self.bytes.fetch_sub(before - after, Ordering::Relaxed);
        }
    }

    fn leave(&self, records: u64) {
        self.records.fetch_sub(records, Ordering::Relaxed);
    }
}

fn damaged() -> StoreError {
    StoreError::corrupt("the record in memory is damaged").with_extent(Extent::Record)
}

const fn first_byte(id: &RecordId) -> u8 {
    let [first, ..] = *id.as_bytes();
    first
}

/// Keeps the first `count` identifiers, sorted.
fn keep_first(ids: &mut Vec<RecordId>, count: usize) {
    ids.sort_unstable();
    ids.truncate(count);
}

impl Audit {
    fn add(&mut self, entry: AuditEntry) {
        self.last += 1;
        self.entries.push_back(AuditEntry { number: self.last, ..entry });
        if self.entries.len() as u64 > limits::MAX_AUDIT_ENTRIES {
            self.entries.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::StateName;

    #[test]
    fn the_oldest_audit_entries_are_dropped() {
        let mut audit = Audit::default();
        let entry = AuditEntry {
            number: 0,
            at: Timestamp::default(),
            id: RecordId::from_bytes([0; 32]),
            from: StateName::Unknown,
            to: StateName::Released,
            actor: String::new(),
            reason: String::new(),
        };
        for _ in 0..=limits::MAX_AUDIT_ENTRIES {
            audit.add(entry.clone());
        }
        assert_eq!(audit.entries.len() as u64, limits::MAX_AUDIT_ENTRIES);
        assert_eq!(audit.entries.front().map(|entry| entry.number), Some(2));
        assert_eq!(audit.entries.back().map(|entry| entry.number), Some(limits::MAX_AUDIT_ENTRIES + 1));
    }
}
