//! The index in memory: the place of each record, and the records that are not indexed yet or were used recently.
//!
//! The index has [`SHARDS`] shards, each with a lock. A record belongs to the shard that the first bits of its identifier choose,
//! so that the shards are in the order of the identifiers. [`decide`](oncegate_core::decide()) runs under this lock, against the
//! newest state, whether that is on the disk yet or not. A shard has two tables:
//!
//! - `slots`: one slot of 20 bytes for each record on the disk. It has eight bytes of the identifier. A lookup
//!   compares the whole identifier on the disk, because other records may have the same eight bytes.
//! - `recent`: whole records. An entry stays while its batch is not on the disk or not in `slots` yet. After that, it is a cache
//!   of bounded size.

use std::collections::{HashSet, VecDeque};
use std::hash::BuildHasher as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hashbrown::HashTable;
use oncegate_core::{Record, RecordHashState, RecordId, RecordMap, RecordedResponse, State};

use crate::ticket::Ticket;

/// The number of shards. A table that grows is copied under its lock, so there are many small ones.
pub(crate) const SHARDS: usize = 1024;

/// The bytes of memory that a record takes in the index while the tables are as empty as they get.
pub(crate) const SLOT_MEMORY: u64 = 48;

/// The place of an entry: its segment, and its offset there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    pub(crate) segment: u32,
    pub(crate) offset: u32,
}

/// The slot of a record on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    prefix: [u32; 2],
    segment: u32,
    /// The offset in units of eight bytes, 24 bits, and the class of the length, 8 bits.
    offset_and_len: u32,
    /// The time from which the record counts as absent, in seconds, rounded up.
    pub(crate) expires: u32,
}

impl Slot {
    pub(crate) fn new(id: &RecordId, place: Place, len: u64, expires: u32) -> Self {
        let prefix = prefix(id);
        Self {
            prefix: [(prefix >> 32) as u32, prefix as u32],
            segment: place.segment,
            offset_and_len: (place.offset / 8) << 8 | u32::from(len_class(len)),
            expires,
        }
    }

    pub(crate) fn prefix(&self) -> u64 {
        let [high, low] = self.prefix;
        u64::from(high) << 32 | u64::from(low)
    }

    pub(crate) fn place(&self) -> Place {
        Place { segment: self.segment, offset: (self.offset_and_len >> 8) * 8 }
    }

    /// The length of the entry in bytes, rounded up by at most an eighth.
    pub(crate) fn len(&self) -> u64 {
        class_len(self.offset_and_len as u8)
    }
}

/// The first eight bytes of an identifier.
pub(crate) fn prefix(id: &RecordId) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = *id.as_bytes();
    u64::from_be_bytes([a, b, c, d, e, f, g, h])
}

/// The class of a length: three bits of it, and their position.
fn len_class(len: u64) -> u8 {
    if len < 8 {
        return len as u8;
    }
    let mut shift = len.ilog2() - 3;
    let mut mantissa = len.div_ceil(1 << shift);
    if mantissa == 16 {
        (shift, mantissa) = (shift + 1, 8);
    }
    ((shift + 1) << 3) as u8 | (mantissa & 7) as u8
}

fn class_len(class: u8) -> u64 {
    let (position, mantissa) = (u32::from(class >> 3), u64::from(class & 7));
    if position == 0 { mantissa } else { (mantissa | 8) << (position - 1) }
}

/// A record in memory.
pub(crate) struct Recent {
    pub(crate) record: Record,
    /// The end of the batch with this version; `None` once the index has it.
    pub(crate) pending: Option<Arc<Ticket>>,
    /// The place of the version in `slots`.
    pub(crate) indexed: Option<Place>,
}

/// One shard of the index.
#[derive(Default)]
pub(crate) struct Shard {
    slots: HashTable<Slot>,
    recent: RecordMap<RecordId, Recent>,
    /// The identifiers in `recent` that may be dropped, oldest first. One may be there twice, or not in `recent` any more.
    order: VecDeque<RecordId>,
    recent_bytes: usize,
    state: RecordHashState,
    /// No slot expires before this time, in seconds.
    first_expiry: u32,
}

/// All shards, and sums over them.
pub(crate) struct Index {
    shards: Box<[Mutex<Shard>]>,
    /// The bytes of recent records that a shard keeps.
    shard_cache: usize,
    /// The records in `slots`, and those that are not there yet.
    records: AtomicU64,
}

impl Index {
    pub(crate) fn new(cache_bytes: usize) -> Self {
        let state = RecordHashState::default();
        let shard = || Mutex::new(Shard { state: state.clone(), ..Shard::default() });
        Self {
            shards: (0..SHARDS).map(|_| shard()).collect(),
            shard_cache: cache_bytes / SHARDS,
            records: AtomicU64::new(0),
        }
    }

    pub(crate) fn shard_of(&self, id: &RecordId) -> MutexGuard<'_, Shard> {
        self.shard(shard_number(prefix(id)))
    }

    /// The shard of a record, for the only owner of the index.
    pub(crate) fn shard_of_mut(&mut self, id: &RecordId) -> &mut Shard {
        match self.shards.get_mut(shard_number(prefix(id)) % SHARDS) {
            Some(shard) => shard.get_mut().unwrap_or_else(PoisonError::into_inner),
            None => unreachable!("there are {SHARDS} shards"),
        }
    }

    /// A shard by its number, modulo their count.
    pub(crate) fn shard(&self, number: usize) -> MutexGuard<'_, Shard> {
        match self.shards.get(number % SHARDS) {
            // The tables are consistent even after a panic: no code of callers runs under the lock.
            Some(shard) => shard.lock().unwrap_or_else(PoisonError::into_inner),
            None => unreachable!("there are {SHARDS} shards"),
        }
    }

    /// The number of records, with those that are not on the disk yet.
    pub(crate) fn records(&self) -> u64 {
        self.records.load(Ordering::Relaxed)
    }

    pub(crate) fn add_record(&self) {
        self.records.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn remove_records(&self, count: u64) {
        self.records.fetch_sub(count, Ordering::Relaxed);
    }

    pub(crate) fn shard_cache(&self) -> usize {
        self.shard_cache
    }
}

/// The shard of identifiers that begin with these bytes.
pub(crate) fn shard_number(prefix: u64) -> usize {
    (prefix >> (64 - SHARDS.ilog2())) as usize
}

impl Shard {
    fn hash(&self, prefix: u64) -> u64 {
        self.state.hash_one(prefix)
    }

    /// The slots that may be of this record, in no order.
    pub(crate) fn candidates(&self, id: &RecordId) -> impl Iterator<Item = Slot> {
        let prefix = prefix(id);
        self.slots.iter_hash(self.hash(prefix)).copied().filter(move |slot| slot.prefix() == prefix)
    }

    /// All slots, in no order.
    pub(crate) fn slots(&self) -> impl Iterator<Item = &Slot> {
        self.slots.iter()
    }

    /// Adds `seconds` to the expiry of each slot.
    pub(crate) fn postpone(&mut self, seconds: u32) {
        self.slots.iter_mut().for_each(|slot| slot.expires = slot.expires.saturating_add(seconds));
        self.first_expiry = self.first_expiry.saturating_add(seconds);
    }

    pub(crate) fn insert(&mut self, slot: Slot) {
        let hash = self.hash(slot.prefix());
        let state = &self.state;
        self.first_expiry =
            if self.slots.is_empty() { slot.expires } else { self.first_expiry.min(slot.expires) };
        self.slots.insert_unique(hash, slot, |slot| state.hash_one(slot.prefix()));
    }

    /// Replaces the slot of a record at this place. Returns the one before; `None` if there is none, and then nothing is changed.
    pub(crate) fn replace(&mut self, at: Place, slot: Slot) -> Option<Slot> {
        let (hash, prefix) = (self.hash(slot.prefix()), slot.prefix());
        let found = self.slots.find_mut(hash, |slot| slot.prefix() == prefix && slot.place() == at)?;
        self.first_expiry = self.first_expiry.min(slot.expires);
        Some(std::mem::replace(found, slot))
    }

    /// Removes the slots whose records are past their retention, at most `limit`. Returns them, and how many of these records
    /// have a newer version that is not on the disk yet.
    pub(crate) fn remove_expired(&mut self, now: u32, limit: usize) -> (Vec<Slot>, u64) {
        if now < self.first_expiry || limit == 0 {
            return (Vec::new(), 0);
        }
        let (mut left, mut first_expiry) = (limit, u32::MAX);
        let removed: Vec<Slot> = self
            .slots
            .extract_if(|slot| {
                let due = left > 0 && slot.expires <= now;
                left -= usize::from(due);
                first_expiry = if due { first_expiry } else { first_expiry.min(slot.expires) };
                due
            })
            .collect();
        self.first_expiry = first_expiry;
        let mut continued = 0;
        if !removed.is_empty() {
            let places: HashSet<_> = removed.iter().map(|slot| (slot.segment, slot.place().offset)).collect();
            let gone = |place: Option<Place>| {
                place.is_some_and(|place| places.contains(&(place.segment, place.offset)))
            };
            let mut freed = 0;
            self.recent.retain(|_, recent| {
                if !gone(recent.indexed) {
                    return true;
                }
                recent.indexed = None;
                continued += u64::from(recent.pending.is_some());
                freed += if recent.pending.is_none() { weight(&recent.record) } else { 0 };
                recent.pending.is_some()
            });
            self.recent_bytes = self.recent_bytes.saturating_sub(freed);
            // Much of what grew for records that are gone now.
            if self.slots.len() < self.slots.capacity() / 4 {
                let state = &self.state;
                self.slots.shrink_to(self.slots.len() * 2, |slot| state.hash_one(slot.prefix()));
            }
        }
        (removed, continued)
    }

    /// The records in memory whose newest version is on the disk, with the place of that, from these first bytes on.
    pub(crate) fn recent_on_disk(&self, from: u64) -> Vec<(Place, RecordId, Record)> {
        let on_disk =
            self.recent.iter().filter(|(id, recent)| recent.pending.is_none() && prefix(id) >= from);
        on_disk.filter_map(|(id, recent)| Some((recent.indexed?, *id, recent.record.clone()))).collect()
    }

    pub(crate) fn recent(&self, id: &RecordId) -> Option<&Recent> {
        self.recent.get(id)
    }

    pub(crate) fn recent_mut(&mut self, id: &RecordId) -> Option<&mut Recent> {
        self.recent.get_mut(id)
    }

    pub(crate) fn recent_values_mut(&mut self) -> impl Iterator<Item = &mut Recent> {
        self.recent.values_mut()
    }

    /// Sets the newest version of a record, which stays until [`Shard::unpin`].
    pub(crate) fn pin(&mut self, id: RecordId, recent: Recent) {
        if let Some(before) = self.recent.insert(id, recent)
            && before.pending.is_none()
        {
            self.recent_bytes = self.recent_bytes.saturating_sub(weight(&before.record));
        }
    }

    /// The index has the versions of this batch now. If that is the newest one of this record, it becomes an entry of the cache.
    pub(crate) fn unpin(&mut self, id: &RecordId, batch: &Arc<Ticket>, budget: usize) {
        if let Some(recent) = self.recent.get_mut(id)
            && recent.pending.as_ref().is_some_and(|pending| Arc::ptr_eq(pending, batch))
        {
            recent.pending = None;
            self.recent_bytes += weight(&recent.record);
            self.order.push_back(*id);
            self.evict(budget);
        }
    }

    /// Adds a record that was read from the disk to the cache.
    pub(crate) fn cache(&mut self, id: RecordId, record: Record, place: Place, budget: usize) {
        let bytes = weight(&record);
        if bytes > budget || self.recent.contains_key(&id) {
            return;
        }
        self.recent.insert(id, Recent { record, pending: None, indexed: Some(place) });
        self.recent_bytes += bytes;
        self.order.push_back(id);
        self.evict(budget);
    }

    /// The bytes that records can be added to the cache before one is evicted.
    pub(crate) fn cache_capacity(&self, budget: usize) -> usize {
        budget.saturating_sub(self.recent_bytes)
    }

    /// Adds a record that a listing has read to the cache, if it is still the newest version and the cache is not full: a listing
    /// says nothing about which records will be used, so no other record has to go.
    pub(crate) fn cache_listed(&mut self, id: RecordId, record: Record, slot: &Slot, budget: usize) {
        let is_current = self.candidates(&id).any(|candidate| candidate == *slot);
        if is_current && weight(&record) <= self.cache_capacity(budget) {
            self.cache(id, record, slot.place(), budget);
        }
    }

    fn evict(&mut self, budget: usize) {
        while self.recent_bytes > budget {
            let Some(oldest) = self.order.pop_front() else { return };
            if let Some(recent) = self.recent.get(&oldest)
                && recent.pending.is_none()
            {
                self.recent_bytes = self.recent_bytes.saturating_sub(weight(&recent.record));
                self.recent.remove(&oldest);
            }
        }
        // Entries of records that changed again, or are gone, must not pile up.
        if self.order.len() > 2 * self.recent.len() + 16 {
            let (recent, mut seen) = (&self.recent, HashSet::new());
            self.order.retain(|id| recent.contains_key(id) && seen.insert(*id));
        }
    }
}

/// The approximate memory of a recent record, in bytes.
fn weight(record: &Record) -> usize {
    let response = match &record.state {
        State::Completed(RecordedResponse::Replayable(response)) => response.as_encoded().len(),
        _ => 0,
    };
    let steps: usize = record.steps.as_slice().iter().map(|step| 128 + step.result().len()).sum();
    480 + response + record.label.operation().len() + steps
}

#[cfg(test)]
mod tests {
    use oncegate_core::{Command, Timestamp, Write, decide};

    use super::*;

    #[test]
    fn a_class_is_at_most_an_eighth_too_long() {
        for len in (0..5000).chain((13..27).flat_map(|bit| [(1 << bit) - 1, 1 << bit, (1 << bit) + 1])) {
            let class = class_len(len_class(len));
            assert!(class >= len && class <= len + len / 8 + 1, "{len}: {class}");
        }
    }

    #[test]
    fn a_slot_keeps_its_parts() {
        let id = RecordId::from_bytes([0xab; 32]);
        let place = Place { segment: u32::MAX, offset: (1 << 27) - 8 };
        let slot = Slot::new(&id, place, 300, 77);
        assert_eq!((slot.prefix(), slot.place(), slot.expires), (prefix(&id), place, 77));
        assert!((300..=338).contains(&slot.len()));
        assert_eq!(size_of::<Slot>(), 20);
    }

    #[test]
    fn records_with_the_same_prefix_have_slots_of_their_own() {
        let mut shard = Shard::default();
        let at = |offset| Place { segment: 1, offset };
        let id = RecordId::from_bytes([7; 32]);
        shard.insert(Slot::new(&id, at(8), 10, 5));
        shard.insert(Slot::new(&id, at(16), 10, 9));
        assert_eq!(shard.candidates(&id).count(), 2);
        assert!(shard.replace(at(24), Slot::new(&id, at(32), 10, 5)).is_none());
        assert!(shard.replace(at(8), Slot::new(&id, at(32), 10, 5)).is_some());
        assert_eq!(shard.remove_expired(4, 10).0, []);
        assert_eq!(shard.remove_expired(5, 10).0.len(), 1);
        assert_eq!(shard.candidates(&id).map(|slot| slot.place()).collect::<Vec<_>>(), [at(16)]);
    }
    #[test]
    fn every_slot_is_removed_when_it_expires() {
        let mut shard = Shard::default();
        let slot = |number: u32, expires| {
            let id = RecordId::from_bytes([number as u8; 32]);
            Slot::new(&id, Place { segment: 1, offset: number * 8 }, 10, expires)
        };
        let expiries = [9, 4, 7, 7, 3, 20];
        (0..).zip(expiries).for_each(|(number, expires)| shard.insert(slot(number, expires)));
        let old = slot(0, 9).place();
        shard.replace(old, slot(0, 2)).unwrap();
        shard.postpone(100);
        let removed = |shard: &mut Shard, now, limit| shard.remove_expired(now, limit).0.len();
        assert_eq!(removed(&mut shard, 101, 10), 0);
        assert_eq!(removed(&mut shard, 104, 1), 1);
        assert_eq!(removed(&mut shard, 104, 10), 2);
        assert_eq!(removed(&mut shard, 106, 10), 0);
        shard.insert(slot(9, 50));
        assert_eq!(removed(&mut shard, 107, 10), 3);
        assert_eq!(removed(&mut shard, 119, 10), 0);
        assert_eq!(removed(&mut shard, 120, 10), 1);
        shard.insert(slot(10, 60));
        assert_eq!(removed(&mut shard, 60, 10), 1);
    }

    #[test]
    fn every_cached_record_can_be_evicted() {
        let mut shard = Shard::default();
        let id = |byte| RecordId::from_bytes([byte; 32]);
        let change = |shard: &mut Shard, byte| {
            let ticket = Arc::new(Ticket::default());
            let (pending, record) = (Some(ticket.clone()), record());
            shard.pin(id(byte), Recent { record, pending, indexed: None });
            shard.unpin(&id(byte), &ticket, usize::MAX);
        };
        (1..=10).for_each(|byte| change(&mut shard, byte));
        (0..26).for_each(|_| change(&mut shard, 1));
        change(&mut shard, 10);
        // As if they had expired.
        shard.recent.retain(|of, _| *of == id(1) || *of == id(9));
        (11..=12).for_each(|byte| change(&mut shard, byte));
        shard.evict(0);
        assert_eq!((shard.recent.len(), shard.order.len()), (0, 0));
    }

    #[test]
    fn a_listing_fills_the_cache_and_evicts_nothing() {
        let mut shard = Shard::default();
        let id = |byte| RecordId::from_bytes([byte; 32]);
        let slot = |byte: u8, offset| Slot::new(&id(byte), Place { segment: 1, offset }, 300, 5);
        let budget = 2 * weight(&record());
        for byte in 1..=3 {
            shard.insert(slot(byte, 8 * u32::from(byte)));
        }
        shard.cache(id(1), record(), slot(1, 8).place(), budget);
        // Another version than that of the index.
        shard.cache_listed(id(2), record(), &slot(2, 80), budget);
        assert!(shard.recent(&id(2)).is_none());
        shard.cache_listed(id(2), record(), &slot(2, 16), budget);
        shard.cache_listed(id(3), record(), &slot(3, 24), budget);
        let kept: Vec<_> = (1..=3).filter(|byte| shard.recent(&id(*byte)).is_some()).collect();
        assert_eq!((kept, shard.cache_capacity(budget)), (vec![1, 2], 0));
        let listed = shard.recent_on_disk(prefix(&id(2)));
        assert_eq!(
            listed.iter().map(|(place, of, _)| (*place, *of)).collect::<Vec<_>>(),
            [(slot(2, 16).place(), id(2))]
        );
    }

    fn record() -> Record {
        let claim = Command::Claim(oncegate_testkit::claim(1_u32, b"input"));
        match decide(None, &claim, Timestamp::from_millis(0)).write {
            Write::Put(record) => record,
            Write::Keep => unreachable!("a first claim is written"),
        }
    }
}
