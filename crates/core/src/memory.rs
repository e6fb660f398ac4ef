//! The memory store: the executable specification of a store, and enough for one process whose records need not survive it.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::{Clock, StoreClock, SystemClock, Timestamp};
use crate::decide::{Command, Decision, Outcome, Write, decide};
use crate::id::RecordId;
use crate::limits;
use crate::map::{RecordMap, Sharded, lock};
use crate::record::{Record, RecordedResponse, State};
use crate::store::{
    Advisory, AuditEntry, Capabilities, Durability, Extent, Fencing, ListPage, ListQuery, Store, StoreError,
    StoreFuture,
};

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

/// The time until a record is first checked for purging.
const FIRST_LOOK: Duration = Duration::from_secs(600);

#[derive(Default)]
struct Shard {
    records: RecordMap<RecordId, Box<Record>>,
    /// The times to check records for purging, in coarse steps, so that a purge reads only records that are due. Each record
    /// is in here once. It is added with its first write, due after at most [`FIRST_LOOK`], and again if it is due but has
    /// not expired. So a record that is released and expires early does not stay for the retention of its claim.
    due: BTreeMap<u64, Vec<RecordId>>,
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

    /// Sets the maximum size of all records together, in bytes; by default there is none. At the limit, claims of new keys
    /// are refused as unavailable, but running attempts still complete.
    #[must_use]
    pub fn with_max_record_bytes(mut self, bytes: u64) -> Self {
        self.capacity.max_bytes = bytes;
        self
    }

    /// The number of records, expired ones included.
    pub fn len(&self) -> usize {
        self.shards.each().map(|shard| shard.records.len()).sum()
    }

    /// Returns true if there is no record.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn apply_now(&self, id: RecordId, command: &Command) -> Result<Outcome, StoreError> {
        let mut shard = self.shards.of(&id);
        // Read under the lock, because `accept_now` changes the time while it holds all locks.
        let now = self.clock.now();
        let Decision { outcome, write } = decide(shard.records.get(&id).map(Box::as_ref), command, now);
        match write {
            Write::Keep => {}
            Write::Put(record) => {
                let bytes = bytes_of(&record);
                if !shard.records.contains_key(&id) {
                    if !self.capacity.admit() {
                        let reason = self.capacity.exhausted().unwrap_or_else(|| "it was full".to_owned());
                        let full = StoreError::unavailable(reason);
                        return Err(full.with_extent(Extent::Writes).with_nothing_sent());
                    }
                    shard.note(due_step(record.expires_at.min(now.after(FIRST_LOOK))), id);
                }
                if let (Command::Resolve(resolve), Outcome::Resolved { from }) = (command, &outcome) {
                    lock(&self.audit).add(AuditEntry {
                        number: 0,
                        at: now,
                        id,
                        from: *from,
                        to: record.state_name(now),
                        actor: resolve.actor.clone(),
                        reason: resolve.reason.clone(),
                    });
                }
                match shard.records.get_mut(&id) {
                    Some(place) => {
                        self.capacity.resize(bytes_of(place), bytes);
                        **place = record;
                    }
                    None => {
                        self.capacity.resize(0, bytes);
                        shard.records.insert(id, Box::new(record));
                    }
                }
            }
        }
        Ok(outcome)
    }

    fn accept_now(&self) -> Option<Duration> {
        // All locks at once: a record written in the meantime would be neither shifted nor have the new time.
        let mut shards: Vec<_> = self.shards.each().collect();
        let skew = self.clock.skew().filter(|skew| skew.is_ahead)?;
        for record in shards.iter_mut().flat_map(|shard| shard.records.values_mut()) {
            if record.changed_at >= skew.since {
                **record = (**record).clone().shifted(skew.by);
            }
        }
        self.clock.accept(skew.by);
        Some(skew.by)
    }

    fn list_now(&self, query: &ListQuery) -> ListPage {
        let now = self.clock.now();
        let mut records = Vec::new();
        for shard in self.shards.each() {
            records.extend(
                shard
                    .records
                    .iter()
                    .filter(|(id, record)| {
                        query.after.is_none_or(|after| **id > after) && query.matches(record, now)
                    })
                    .map(|(id, record)| (*id, (**record).clone())),
            );
        }
        records.sort_unstable_by_key(|(id, _)| *id);
        let limit = query.bounded_limit();
        let more = records.len() > limit;
        records.truncate(limit);
        let next = records.last().map(|(id, _)| *id).filter(|_| more);
        ListPage { records, unreadable: Vec::new(), next }
    }

    fn purge_now(&self, limit: usize) -> usize {
        let now = self.clock.now();
        let mut purged = 0;
        for mut shard in self.shards.each() {
            while purged < limit {
                let Some(id) = shard.next_due(now) else { break };
                match shard.records.get(&id).map(|record| (record.is_expired(now), record.expires_at)) {
                    Some((true, _)) => {
                        if let Some(record) = shard.records.remove(&id) {
                            self.capacity.leave(&record);
                        }
                        purged += 1;
                    }
                    Some((false, expires_at)) => shard.note(due_step(expires_at), id),
                    None => {}
                }
            }
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
        let now = self.clock.now();
        let record =
            self.shards.of(&id).records.get(&id).filter(|r| !r.is_expired(now)).map(|r| (**r).clone());
        Box::pin(std::future::ready(Ok(record)))
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
        Capabilities::new("memory", Durability::Volatile, Fencing::Monotonic)
    }
}

impl<C> fmt::Debug for MemoryStore<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}

impl Capacity {
    /// Counts one more record, if the limits allow it. Its bytes are counted when it is inserted.
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

    fn leave(&self, record: &Record) {
        self.resize(bytes_of(record), 0);
        self.records.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The approximate memory of a record: itself, its entries in the tables, its response and its steps.
fn bytes_of(record: &Record) -> u64 {
    const TABLES: usize = 256;
    let response = match &record.state {
        State::Completed(RecordedResponse::Replayable(response)) => response.as_encoded().len(),
        _ => 0,
    };
    (size_of::<Record>() + TABLES + response + record.steps.size()) as u64
}

impl Shard {
    fn note(&mut self, step: u64, id: RecordId) {
        self.due.entry(step).or_default().push(id);
    }

    /// Removes and returns a record that is due by now.
    fn next_due(&mut self, now: Timestamp) -> Option<RecordId> {
        loop {
            let mut first = self.due.first_entry().filter(|first| *first.key() <= now.as_millis())?;
            match first.get_mut().pop() {
                Some(id) => return Some(id),
                None => drop(first.remove()),
            }
        }
    }
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

/// A record is due in the first step of two seconds that starts at its expiry or after it.
fn due_step(expires_at: Timestamp) -> u64 {
    expires_at.as_millis().div_ceil(2000).saturating_mul(2000)
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
