//! The threads for long reads: listings and the audit trail.
//!
//! These reads have threads of their own because one page may take tens of milliseconds, which must not block the caller's
//! executor. There are two, so that a caller can read two parts of the store at the same time.

use std::sync::Arc;

use oncegate_core::codec;
use oncegate_core::{
    AuditEntry, Clock as _, ListPage, ListQuery, Record, RecordId, StoreError, Timestamp, limits,
};

use crate::audit::decode_audit;
use crate::format::{EntryHead, Kind};
use crate::index::{SHARDS, Slot, prefix, shard_number};
use crate::inner::StoreInner;
use crate::queue::TakeResult;
use crate::shared::{Scan, closed_error};

/// The number of these threads.
pub(crate) const READERS: usize = 2;

/// The most records that one listing call reads.
const MAX_LIST_VISITS: usize = 10_000;

/// The most bytes of records in one page. A single record may be larger.
const MAX_LIST_BYTES: usize = 16 * 1024 * 1024;

/// Runs one of the threads until the queue is closed and empty.
pub(crate) fn run(inner: &Arc<StoreInner>) {
    let _close_on_drop = CloseOnDrop(inner.clone());
    loop {
        match inner.scans.take(1, usize::MAX, |_| 1, None) {
            TakeResult::Jobs(scans) => scans.into_iter().for_each(|scan| answer(inner, scan)),
            TakeResult::TimedOut => {}
            TakeResult::Closed => return,
        }
    }
}

fn answer(inner: &StoreInner, scan: Scan) {
    // The send fails if the caller has gone away.
    match scan {
        Scan::List { query, reply } => drop(reply.send(list(inner, &query))),
        Scan::Audit { before, limit, reply } => drop(reply.send(audit(inner, before, limit))),
    }
}

/// Lists records as they are on the disk, in the order of their identifiers: shard by shard, each sorted.
fn list(inner: &StoreInner, query: &ListQuery) -> Result<ListPage, StoreError> {
    let mut listing = Listing {
        inner,
        query,
        now: inner.clock.now(),
        page: ListPage::default(),
        after: query.after,
        buffer: Vec::new(),
        fresh: Vec::new(),
        has_capacity: false,
        bytes: 0,
        visited: 0,
    };
    for number in shard_number(listing.first_prefix())..SHARDS {
        loop {
            match listing.add_shard(number)? {
                Added::All => break,
                // The rest of the shard is read again, from where the segment went.
                Added::UntilMoved => {}
                Added::UntilFull => return Ok(listing.page),
            }
        }
    }
    Ok(listing.page)
}

struct Listing<'a> {
    inner: &'a StoreInner,
    query: &'a ListQuery,
    now: Timestamp,
    page: ListPage,
    /// The last record that was visited.
    after: Option<RecordId>,
    /// The bytes of the last record that was read.
    buffer: Vec<u8>,
    /// Records of one shard that were read from the disk, and may be kept in memory.
    fresh: Vec<(RecordId, Record, Slot)>,
    /// True if the cache of the shard is not full.
    has_capacity: bool,
    bytes: usize,
    visited: usize,
}

/// The part of a shard that was added to a page.
enum Added {
    All,
    /// Up to a record whose segment was deleted meanwhile.
    UntilMoved,
    UntilFull,
}

impl Listing<'_> {
    fn first_prefix(&self) -> u64 {
        self.after.map_or(0, |after| prefix(&after))
    }

    fn add_shard(&mut self, number: usize) -> Result<Added, StoreError> {
        let added = self.read_shard(number);
        if !self.fresh.is_empty() {
            let budget = self.inner.index.shard_cache();
            let mut shard = self.inner.index.shard(number);
            for (id, record, slot) in self.fresh.drain(..) {
                shard.cache_listed(id, record, &slot, budget);
            }
        }
        added
    }

    fn read_shard(&mut self, number: usize) -> Result<Added, StoreError> {
        let first = self.first_prefix();
        let shard = self.inner.index.shard(number);
        self.has_capacity = shard.cache_capacity(self.inner.index.shard_cache()) > 0;
        let mut slots: Vec<Slot> = shard.slots().filter(|slot| slot.prefix() >= first).copied().collect();
        // A record in memory needs no read. It has the corrections of the clock already.
        let mut recent = shard.recent_on_disk(first);
        drop(shard);
        slots.sort_unstable_by_key(Slot::prefix);
        recent.sort_unstable_by_key(|(_, id, _)| prefix(id));
        let (mut slots, mut recent) = (slots.into_iter().peekable(), recent.into_iter().peekable());
        // Those with the same first bytes are few. They are read together, and sorted by the whole identifier.
        let (mut known, mut found) = (Vec::new(), Vec::new());
        while let Some(first) = slots.next() {
            let is_same = |slot: &Slot| slot.prefix() == first.prefix();
            while recent.next_if(|(_, id, _)| prefix(id) < first.prefix()).is_some() {}
            while let Some(record) = recent.next_if(|(_, id, _)| prefix(id) == first.prefix()) {
                known.push(record);
            }
            let mut next = Some(first);
            while let Some(slot) = next {
                match known.iter().position(|(place, ..)| *place == slot.place()) {
                    Some(at) => {
                        let (_, id, record) = known.swap_remove(at);
                        found.push((id, Some(record), slot.len() as usize));
                    }
                    None => match self.read(&slot)? {
                        Some(read) => found.push(read),
                        None => return Ok(Added::UntilMoved),
                    },
                }
                self.visited += 1;
                next = slots.next_if(is_same);
            }
            known.clear();
            found.sort_by_key(|(id, ..)| *id);
            for (id, record, len) in found.drain(..) {
                if self.after.is_none_or(|after| id > after) && self.add(id, record, len) {
                    return Ok(Added::UntilFull);
                }
            }
        }
        Ok(Added::All)
    }

    /// Reads a record from the disk, with its size; without the record if it cannot be read. `None` if its segment was deleted.
    fn read(&mut self, slot: &Slot) -> Result<Option<(RecordId, Option<Record>, usize)>, StoreError> {
        let Some((head, body)) = self.inner.read_entry_into(slot, &mut self.buffer)? else { return Ok(None) };
        let is_it = |head: &EntryHead| head.kind == Kind::Record && prefix(&head.id) == slot.prefix();
        Ok(Some(match head.filter(is_it) {
            Some(head) => {
                let record = codec::decode(&head.id, body).ok();
                let record = record.map(|record| self.inner.shifted(record, slot.place()));
                if self.has_capacity {
                    self.fresh.extend(record.clone().map(|record| (head.id, record, *slot)));
                }
                (head.id, record, body.len())
            }
            None => (padded(slot.prefix()), None, 0),
        }))
    }

    /// Adds a record if it matches. Returns true if the page is full then.
    fn add(&mut self, id: RecordId, record: Option<Record>, len: usize) -> bool {
        self.after = Some(id);
        match record {
            Some(record) if self.query.matches(&record, self.now) => {
                self.bytes += len;
                self.page.records.push((id, record));
            }
            Some(_) => {}
            None => self.page.unreadable.push(id),
        }
        let count = self.page.records.len() + self.page.unreadable.len();
        let is_full = count >= self.query.bounded_limit()
            || self.bytes >= MAX_LIST_BYTES
            || self.visited >= MAX_LIST_VISITS;
        if is_full {
            self.page.next = Some(id);
        }
        is_full
    }
}

/// The identifier of a record of which only the first bytes can be read.
fn padded(prefix: u64) -> RecordId {
    let mut id = [0; 32];
    if let Some(place) = id.first_chunk_mut() {
        *place = prefix.to_be_bytes();
    }
    RecordId::from_bytes(id)
}

fn audit(inner: &StoreInner, before: Option<u64>, limit: usize) -> Result<Vec<AuditEntry>, StoreError> {
    let before = before.unwrap_or(u64::MAX);
    let limit = limit.min(limits::MAX_PAGE_RECORDS);
    loop {
        let slots: Vec<(u64, Slot)> =
            inner.audits().iter().rev().filter(|(number, _)| *number < before).take(limit).copied().collect();
        if let Some(entries) = read_audit(inner, &slots)? {
            return Ok(entries);
        }
    }
}

/// Reads audit entries, up to one that cannot be read. `None` if the segment of one was deleted meanwhile.
fn read_audit(inner: &StoreInner, slots: &[(u64, Slot)]) -> Result<Option<Vec<AuditEntry>>, StoreError> {
    let mut entries = Vec::with_capacity(slots.len());
    for (number, slot) in slots {
        let Some((head, body)) = inner.read_entry(slot)? else { return Ok(None) };
        let decoded = head.filter(|head| head.kind == Kind::Audit).and_then(|_| {
            let (found, body) = body.split_first_chunk()?;
            (u64::from_be_bytes(*found) == *number).then(|| decode_audit(*number, body))?
        });
        match decoded {
            Some(entry) => entries.push(entry),
            // A caller can read older entries with `before` set to this number.
            None if entries.is_empty() => {
                return Err(StoreError::corrupt(format!("audit entry {number} cannot be read")));
            }
            None => break,
        }
    }
    Ok(Some(entries))
}

/// Closes the queue and answers waiting callers when the thread ends, also by a panic.
struct CloseOnDrop(Arc<StoreInner>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.scans.close();
        while let TakeResult::Jobs(scans) = self.0.scans.take(usize::MAX, usize::MAX, |_| 1, None) {
            for scan in scans {
                match scan {
                    Scan::List { reply, .. } => drop(reply.send(Err(closed_error()))),
                    Scan::Audit { reply, .. } => drop(reply.send(Err(closed_error()))),
                }
            }
        }
    }
}
