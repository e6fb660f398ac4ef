//! One shard of the memory store: the records, the table that finds them, and the order in which they expire.
//!
//! A record has one of two forms:
//!
//! - *Whole*, in an allocation of its own: a record in progress, one with steps, or one with a large response. There are few
//!   of them, or their responses are much larger than the rest.
//! - *Packed*: a settled record and its response, as one entry of bytes in a segment of 64 KiB. This is the form of nearly all
//!   records. It takes no more than their bytes: an allocation for each of them would be rounded up by up to a quarter.
//!
//! A packed record that changes, or is purged, leaves a dead entry. If less than half of a segment is alive, its records move
//! to the newest segment and the memory is free. So segments have at most twice the bytes of their records, and a record moves
//! only after as many bytes have died.
//!
//! The table has twelve bytes for each record: 32 bits of the identifier's hash and the place. A lookup compares the whole
//! identifier in the record, because two of them may have the same hash.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::hash::BuildHasher as _;
use std::mem;
use std::time::Duration;

use hashbrown::HashTable;

use super::packed::{self, Parts};
use super::slab::Slab;
use crate::clock::Timestamp;
use crate::decide::{Command, Decision, Outcome, Write, decide};
use crate::id::RecordId;
use crate::map::RecordHashState;
use crate::record::{Label, Record, RecordedResponse, State};

/// The size of a segment. Larger ones would waste more in a small store, and stop the shard for longer when their records move;
/// in smaller ones more is left over at the end.
const SEGMENT: usize = 64 * 1024;

/// The bytes that a record takes in the table: a slot and its byte of control, in a table that is half full.
const SLOT_BYTES: u64 = 32;

/// The bytes of a whole record next to its response, its operation and its steps: itself, its notes, the rounding of four small
/// allocations, and what the allocator leaves unused next to large ones. Measured: `cargo xtask bench record`.
const WHOLE_BYTES: u64 = size_of::<Whole>() as u64 + 448;

/// The bytes of a step next to its name and its result.
const STEP_BYTES: u64 = 128;

#[derive(Default)]
pub(super) struct Shard {
    table: HashTable<Slot>,
    state: RecordHashState,
    whole: Slab<Box<Whole>>,
    segments: Slab<Segment>,
    /// The segment that entries are added to.
    newest: Option<u32>,
    /// The times to look for expired records, so that a purge reads only what is due. Each whole record and each segment is in
    /// here once, not later than its first expiry.
    due: BTreeSet<(u64, Target)>,
    /// The memory of the records, in bytes.
    bytes: u64,
}

/// The place of a record, as the table has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    hash: u32,
    /// The number of the segment, or of the whole record.
    number: u32,
    /// The start of the entry in its segment; [`WHOLE`] for a whole record.
    offset: u32,
}

const WHOLE: u32 = u32::MAX;

/// A thing that a purge looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Target {
    Whole(u32),
    Segment(u32),
}

struct Whole {
    id: RecordId,
    record: Record,
    /// The step of its note in `due`.
    due: u64,
}

struct Segment {
    /// Never more than its first capacity, so that it is never moved.
    bytes: Vec<u8>,
    /// The bytes of entries that are alive.
    live: usize,
    /// The step of its note in `due`.
    due: u64,
}

impl Shard {
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    /// The memory of the records, in bytes: dead entries count until their segment is free.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Finds a record.
    pub(super) fn find(&self, id: &RecordId) -> Option<Slot> {
        let hash = self.hash(id.as_bytes());
        let is_it = |slot: &Slot| slot.hash == hash && self.id_at(*slot) == Some(id.as_bytes());
        self.table.find(spread(hash), is_it).copied()
    }

    /// Decides about a command; `None` if the record's entry is damaged.
    pub(super) fn decide(&self, slot: Slot, command: &Command, now: Timestamp) -> Option<Decision> {
        if slot.offset == WHOLE {
            return Some(decide(Some(&self.whole.get(slot.number)?.record), command, now));
        }
        let entry = self.entry(slot)?;
        if let Command::Claim(claim) = command {
            // The claim is nearly always of the same operation, whose text is not copied then. Only a replay needs the response.
            let head = packed::unpack(entry, Some(&claim.label), Parts::Head)?;
            let mut decision = decide(Some(&head), command, now);
            // A record that is written must not come from one that was not read as a whole.
            if decision.write == Write::Keep {
                if let Outcome::Replay(response) = &mut decision.outcome {
                    *response = packed::response_of(entry)?;
                }
                return Some(decision);
            }
        }
        Some(decide(Some(&packed::unpack(entry, None, Parts::All)?), command, now))
    }

    /// Reads a record; `None` if its entry is damaged. An operation that equals that of `known` shares its memory.
    pub(super) fn read(&self, slot: Slot, known: Option<&Label>, parts: Parts) -> Option<Cow<'_, Record>> {
        match slot.offset {
            WHOLE => self.whole.get(slot.number).map(|whole| Cow::Borrowed(&whole.record)),
            _ => packed::unpack(self.entry(slot)?, known, parts).map(Cow::Owned),
        }
    }

    /// All records.
    pub(super) fn slots(&self) -> impl Iterator<Item = (Slot, RecordId)> {
        self.table.iter().filter_map(|slot| Some((*slot, RecordId::from_bytes(*self.id_at(*slot)?))))
    }

    /// Writes a record. `before` is its place, if there is one already.
    pub(super) fn put(&mut self, id: &RecordId, before: Option<Slot>, record: Record) {
        let packed_len = packed::packed_len(&record);
        if let (Some(slot), None) = (before, packed_len)
            && slot.offset == WHOLE
        {
            return self.replace_whole(slot.number, record);
        }
        let hash = before.map_or_else(|| self.hash(id.as_bytes()), |slot| slot.hash);
        let slot = match packed_len {
            Some(len) => self.pack(hash, id, &record, len),
            None => self.add_whole(hash, *id, record),
        };
        match before {
            // First the new place, then the old one, whose end may move the new entry.
            Some(before) => {
                self.move_slot(before, slot);
                self.free(before);
            }
            None => {
                self.bytes += SLOT_BYTES;
                self.table.insert_unique(spread(hash), slot, |slot| spread(slot.hash));
            }
        }
    }

    /// Removes at most `limit` records that are past their retention. Returns how many.
    pub(super) fn purge(&mut self, now: Timestamp, limit: usize) -> usize {
        let mut purged = 0;
        while purged < limit
            && let Some((_, target)) = self.due.first().copied().filter(|(due, _)| *due <= now.as_millis())
        {
            self.due.pop_first();
            purged += match target {
                Target::Whole(number) => self.purge_whole(number, now),
                Target::Segment(number) => self.purge_segment(number, now, limit - purged),
            };
        }
        // Most of the table grew for records that are gone now.
        if purged > 0 && self.table.len() < self.table.capacity() / 4 {
            self.table.shrink_to(self.table.len() * 2, |slot| spread(slot.hash));
        }
        purged
    }

    /// Moves the times of all records ahead that changed since then: see [`Record::shifted`].
    pub(super) fn shift(&mut self, since: Timestamp, by: Duration) {
        for whole in self.whole.iter_mut().filter(|whole| whole.record.changed_at >= since) {
            whole.record = whole.record.clone().shifted(by);
        }
        let mut known: Option<Label> = None;
        for segment in self.segments.iter_mut() {
            let mut at = 0;
            while let Some(entry) = packed::entry_at_mut(&mut segment.bytes, at) {
                at += entry.len();
                if packed::is_live(entry)
                    && let Some(record) = packed::unpack(entry, known.as_ref(), Parts::Head)
                {
                    known = Some(record.label.clone());
                    if record.changed_at >= since {
                        packed::set_times(entry, &record.shifted(by));
                    }
                }
            }
        }
    }

    fn hash(&self, id: &[u8; 32]) -> u32 {
        // The upper half: the table spreads it again.
        (self.state.hash_one(RecordId::from_bytes(*id)) >> 32) as u32
    }

    fn entry(&self, slot: Slot) -> Option<&[u8]> {
        packed::entry_at(&self.segments.get(slot.number)?.bytes, slot.offset as usize)
    }

    fn id_at(&self, slot: Slot) -> Option<&[u8; 32]> {
        match slot.offset {
            WHOLE => Some(self.whole.get(slot.number)?.id.as_bytes()),
            _ => packed::id_of(self.entry(slot)?),
        }
    }

    fn replace_whole(&mut self, number: u32, record: Record) {
        let Some(whole) = self.whole.get_mut(number) else { return };
        let due = due_step(record.expires_at);
        // A later expiry is noted when the record is looked at, so that renewals do not touch the notes.
        if due < whole.due {
            self.due.remove(&(whole.due, Target::Whole(number)));
            self.due.insert((due, Target::Whole(number)));
            whole.due = due;
        }
        let before = mem::replace(&mut whole.record, record);
        self.bytes = self.bytes.saturating_sub(whole_bytes(&before)) + whole_bytes(&whole.record);
    }

    fn add_whole(&mut self, hash: u32, id: RecordId, record: Record) -> Slot {
        self.bytes += whole_bytes(&record);
        let due = due_step(record.expires_at);
        let number = self.whole.insert(Box::new(Whole { id, record, due }));
        self.due.insert((due, Target::Whole(number)));
        Slot { hash, number, offset: WHOLE }
    }

    fn pack(&mut self, hash: u32, id: &RecordId, record: &Record, len: usize) -> Slot {
        self.add_entry(hash, len, record.expires_at, |bytes| packed::pack(bytes, id, record, len))
    }

    /// Adds an entry of this length to the newest segment.
    fn add_entry(
        &mut self,
        hash: u32,
        len: usize,
        expires_at: Timestamp,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> Slot {
        let due = due_step(expires_at);
        let newest = self.newest.filter(|number| {
            self.segments.get(*number).is_some_and(|segment| segment.bytes.len() + len <= SEGMENT)
        });
        let number = newest.unwrap_or_else(|| {
            let segment = Segment { bytes: Vec::with_capacity(SEGMENT), live: 0, due };
            let number = self.segments.insert(segment);
            self.due.insert((due, Target::Segment(number)));
            number
        });
        self.newest = Some(number);
        let mut offset = 0;
        if let Some(segment) = self.segments.get_mut(number) {
            offset = segment.bytes.len() as u32;
            write(&mut segment.bytes);
            segment.live += len;
            if due < segment.due {
                self.due.remove(&(segment.due, Target::Segment(number)));
                self.due.insert((due, Target::Segment(number)));
                segment.due = due;
            }
        }
        self.bytes += len as u64;
        Slot { hash, number, offset }
    }

    /// Changes the place of a record in the table.
    fn move_slot(&mut self, from: Slot, to: Slot) {
        if let Some(slot) = self.table.find_mut(spread(from.hash), |slot| *slot == from) {
            *slot = to;
        }
    }

    /// Frees a place that the table does not have any more.
    fn free(&mut self, slot: Slot) {
        if slot.offset == WHOLE {
            if let Some(whole) = self.whole.remove(slot.number) {
                self.due.remove(&(whole.due, Target::Whole(slot.number)));
                self.bytes = self.bytes.saturating_sub(whole_bytes(&whole.record));
            }
            return;
        }
        if let Some(segment) = self.segments.get_mut(slot.number)
            && let Some(entry) = packed::entry_at_mut(&mut segment.bytes, slot.offset as usize)
        {
            packed::set_removed(entry);
            segment.live -= entry.len();
            let due = segment.due;
            if self.evacuate_if_sparse(slot.number) {
                self.due.remove(&(due, Target::Segment(slot.number)));
            }
        }
    }

    /// Frees a segment of which less than half is alive, and moves its records to the newest one. Returns true if it did. The
    /// note of the segment is left to the caller.
    fn evacuate_if_sparse(&mut self, number: u32) -> bool {
        let Some(segment) = self.segments.get_mut(number) else { return false };
        if 2 * segment.live >= segment.bytes.len() {
            return false;
        }
        // The number stays taken until all slots that have it are moved.
        let bytes = mem::take(&mut segment.bytes);
        self.newest.take_if(|newest| *newest == number);
        let mut at = 0;
        while let Some(entry) = packed::entry_at(&bytes, at) {
            if packed::is_live(entry)
                && let (Some(id), Some(expires_at)) = (packed::id_of(entry), packed::expires_at(entry))
            {
                let hash = self.hash(id);
                let to =
                    self.add_entry(hash, entry.len(), expires_at, |bytes| bytes.extend_from_slice(entry));
                self.move_slot(Slot { hash, number, offset: at as u32 }, to);
            }
            at += entry.len();
        }
        self.segments.remove(number);
        self.bytes = self.bytes.saturating_sub(bytes.len() as u64);
        true
    }

    /// Removes a whole record if it has expired, and notes it again otherwise. Its note is removed already.
    fn purge_whole(&mut self, number: u32, now: Timestamp) -> usize {
        let Some(whole) = self.whole.get_mut(number) else { return 0 };
        if !whole.record.is_expired(now) {
            whole.due = due_step(whole.record.expires_at);
            self.due.insert((whole.due, Target::Whole(number)));
            return 0;
        }
        let Some(whole) = self.whole.remove(number) else { return 0 };
        self.bytes = self.bytes.saturating_sub(whole_bytes(&whole.record));
        let hash = self.hash(whole.id.as_bytes());
        self.remove_slot(Slot { hash, number, offset: WHOLE });
        1
    }

    /// Removes at most `limit` expired records of a segment, and notes the segment again unless it is free then. Its note is
    /// removed already.
    fn purge_segment(&mut self, number: u32, now: Timestamp, limit: usize) -> usize {
        let (mut at, mut purged, mut next_due) = (0, 0, u64::MAX);
        while let Some(segment) = self.segments.get_mut(number)
            && let Some(entry) = packed::entry_at_mut(&mut segment.bytes, at)
        {
            let (offset, len) = (at as u32, entry.len());
            at += len;
            if !packed::is_live(entry) {
                continue;
            }
            let (Some(expires_at), Some(id)) = (packed::expires_at(entry), packed::id_of(entry)) else {
                continue;
            };
            if purged == limit || now < expires_at {
                next_due = next_due.min(due_step(expires_at));
                continue;
            }
            let id = *id;
            packed::set_removed(entry);
            segment.live -= len;
            let hash = self.hash(&id);
            self.remove_slot(Slot { hash, number, offset });
            purged += 1;
        }
        if !self.evacuate_if_sparse(number)
            && let Some(segment) = self.segments.get_mut(number)
        {
            segment.due = next_due;
            self.due.insert((next_due, Target::Segment(number)));
        }
        purged
    }

    fn remove_slot(&mut self, slot: Slot) {
        if let Ok(found) = self.table.find_entry(spread(slot.hash), |other| *other == slot) {
            found.remove();
            self.bytes = self.bytes.saturating_sub(SLOT_BYTES);
        }
    }
}

/// A record is due in the first step of two seconds that starts at its expiry or after it.
fn due_step(expires_at: Timestamp) -> u64 {
    expires_at.as_millis().div_ceil(2000).saturating_mul(2000)
}

/// The hash for the table, which chooses by the first and the last bits.
fn spread(hash: u32) -> u64 {
    u64::from(hash).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The approximate memory of a whole record, in bytes.
fn whole_bytes(record: &Record) -> u64 {
    let response = match &record.state {
        State::Completed(RecordedResponse::Replayable(response)) => {
            rounded(response.as_encoded().len() as u64)
        }
        _ => 0,
    };
    let steps = record.steps.size() as u64 + STEP_BYTES * record.steps.len() as u64;
    WHOLE_BYTES + record.label.operation().len() as u64 + response + steps
}

/// The size of an allocation: allocators have four sizes between a power of two and the next one.
fn rounded(bytes: u64) -> u64 {
    let step = bytes.checked_ilog2().map_or(1, |log| 1 << log.saturating_sub(2));
    bytes.div_ceil(step) * step
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;
    use crate::decide::{Claim, OnAbandoned};
    use crate::fingerprint::Fingerprint;
    use crate::id::{AttemptId, CallerTag, FencingToken};
    use crate::response::StoredResponse;
    use crate::step::Step;

    /// An identifier that shares its last eight bytes, and so its hash, with every fourth one.
    fn id(number: u8) -> RecordId {
        let mut bytes = [number; 32];
        bytes[24..].fill(number % 4);
        RecordId::from_bytes(bytes)
    }

    fn completed(body: usize) -> State {
        let body = [Bytes::from(vec![b'x'; body])];
        State::Completed(RecordedResponse::Replayable(StoredResponse::new(200, &[], &body, &[]).unwrap()))
    }

    fn record(state: State, expires_at: u64) -> Record {
        let label = Label::new(CallerTag::default(), "POST /pay");
        let fingerprint = Fingerprint::of_parts("test", &[&expires_at.to_be_bytes()]);
        let created_at = Timestamp::from_millis(expires_at / 2);
        let record = Record::new(fingerprint, FencingToken::new(expires_at), state, label, created_at);
        Record { expires_at: Timestamp::from_millis(expires_at), ..record }
    }

    fn put(shard: &mut Shard, number: u8, record: Record) {
        let before = shard.find(&id(number));
        shard.put(&id(number), before, record);
    }

    fn get(shard: &Shard, number: u8) -> Option<Record> {
        let slot = shard.find(&id(number))?;
        Some(shard.read(slot, None, Parts::All).unwrap().into_owned())
    }

    /// Checks all sums and notes of a shard.
    fn check(shard: &Shard) {
        let (mut notes, mut bytes) = (BTreeSet::new(), SLOT_BYTES * shard.table.len() as u64);
        let numbers = |count: usize| 0..u32::try_from(count).unwrap();
        let mut records = 0;
        for number in numbers(1000) {
            let Some(whole) = shard.whole.get(number) else { continue };
            assert!(whole.due <= due_step(whole.record.expires_at));
            notes.insert((whole.due, Target::Whole(number)));
            bytes += whole_bytes(&whole.record);
            records += 1;
        }
        for number in numbers(1000) {
            let Some(segment) = shard.segments.get(number) else { continue };
            let (mut at, mut live) = (0, 0);
            while let Some(entry) = packed::entry_at(&segment.bytes, at) {
                at += entry.len();
                if packed::is_live(entry) {
                    live += entry.len();
                    records += 1;
                    assert!(segment.due <= due_step(packed::expires_at(entry).unwrap()));
                }
            }
            assert_eq!((at, live), (segment.bytes.len(), segment.live));
            assert!(live > 0 && 2 * live >= at && at <= SEGMENT, "{live} of {at} bytes are alive");
            assert_eq!(segment.bytes.capacity(), SEGMENT);
            notes.insert((segment.due, Target::Segment(number)));
            bytes += at as u64;
        }
        assert_eq!(shard.due, notes);
        assert_eq!((shard.bytes, shard.len()), (bytes, records));
    }

    #[test]
    fn records_with_the_same_hash_are_told_apart() {
        let mut shard = Shard::default();
        for number in [1, 5, 9] {
            assert_eq!(get(&shard, number), None);
            put(&mut shard, number, record(completed(usize::from(number)), 5000));
        }
        assert_eq!(shard.hash(id(1).as_bytes()), shard.hash(id(5).as_bytes()));
        for number in [1, 5, 9] {
            assert_eq!(get(&shard, number), Some(record(completed(usize::from(number)), 5000)));
        }
        assert_eq!(get(&shard, 13), None);
        put(&mut shard, 5, record(State::Released, 3000));
        assert_eq!((shard.purge(Timestamp::from_millis(4000), 10), get(&shard, 5)), (1, None));
        assert_eq!(get(&shard, 1), Some(record(completed(1), 5000)));
    }

    #[test]
    fn a_replay_keeps_no_segment_in_memory() {
        let mut shard = Shard::default();
        put(&mut shard, 1, record(completed(1000), 5000));
        let claim = Command::Claim(Claim {
            attempt: AttemptId::new(1),
            fingerprint: record(State::Unknown, 5000).fingerprint,
            lease: Duration::from_secs(1),
            retention: Duration::from_secs(1),
            on_abandoned: OnAbandoned::Park,
            label: Label::default(),
        });
        let decision = shard.decide(shard.find(&id(1)).unwrap(), &claim, Timestamp::default()).unwrap();
        let Outcome::Replay(response) = decision.outcome else { panic!("{decision:?}") };
        assert!(response.as_encoded().is_unique());
        assert_eq!(response.body(), vec![b'x'; 1000]);
    }

    #[test]
    fn a_sparse_segment_is_freed_and_its_records_move() {
        let mut shard = Shard::default();
        // Ten of eleven expire early.
        let expiry = |number: u8| if number.is_multiple_of(11) { 90_000 } else { 3000 };
        (0..=250).for_each(|number| put(&mut shard, number, record(completed(1000), expiry(number))));
        let full = shard.bytes();
        assert_eq!(shard.purge(Timestamp::from_millis(4000), usize::MAX), 228);
        check(&shard);
        assert!(shard.bytes() < full / 5, "{} of {full}", shard.bytes());
        for number in (0..=250).filter(|number: &u8| number.is_multiple_of(11)) {
            assert_eq!(get(&shard, number), Some(record(completed(1000), 90_000)));
        }
        assert_eq!(shard.purge(Timestamp::from_millis(90_000), usize::MAX), 23);
        check(&shard);
        assert_eq!((shard.bytes(), shard.len(), shard.due.len()), (0, 0, 0));
        assert!(shard.table.capacity() < 64, "the table shrinks, too");
    }

    #[derive(Clone, Debug)]
    enum Change {
        Put(u8, Record),
        Purge { now: u64, limit: usize },
        Shift { since: u64, by: u64 },
    }

    fn change() -> impl Strategy<Value = Change> {
        let open = State::InProgress {
            attempt: AttemptId::new(1),
            lease_until: Timestamp::from_millis(7),
            after_abandoned: true,
        };
        let state = prop_oneof![
            Just(open),
            Just(State::Unknown),
            Just(State::Released),
            (0..5000_usize).prop_map(completed),
            (0..500_usize).prop_map(completed),
        ];
        let record =
            (state, 0..60_000_u64, prop::bool::weighted(0.1)).prop_map(|(state, expires_at, has_steps)| {
                let step = has_steps.then(|| Step::new("charge", Bytes::new()).unwrap());
                Record { steps: step.into_iter().collect(), ..record(state, expires_at) }
            });
        prop_oneof![
            20 => (0..60_u8, record).prop_map(|(number, record)| Change::Put(number, record)),
            2 => (0..70_000_u64, 0..20_usize).prop_map(|(now, limit)| Change::Purge { now, limit }),
            1 => (0..40_000_u64, 1..5000_u64).prop_map(|(since, by)| Change::Shift { since, by }),
        ]
    }

    proptest! {
        #[test]
        fn a_shard_is_a_map_with_a_purge(changes in prop::collection::vec(change(), 1..200)) {
            let (mut shard, mut model) = (Shard::default(), BTreeMap::new());
            for change in changes {
                match change {
                    Change::Put(number, record) => {
                        put(&mut shard, number, record.clone());
                        model.insert(number, record);
                    }
                    Change::Purge { now, limit } => {
                        let now = Timestamp::from_millis(now);
                        let purged = shard.purge(now, limit);
                        let before = model.len();
                        model.retain(|number, record| {
                            let is_there = shard.find(&id(*number)).is_some();
                            assert!(is_there || record.is_expired(now));
                            is_there
                        });
                        assert_eq!(before - model.len(), purged);
                        assert!(purged <= limit);
                        let is_due = |record: &Record| due_step(record.expires_at) <= now.as_millis();
                        assert!(purged == limit || !model.values().any(is_due));
                    }
                    Change::Shift { since, by } => {
                        let (since, by) = (Timestamp::from_millis(since), Duration::from_millis(by));
                        shard.shift(since, by);
                        for record in model.values_mut().filter(|record| record.changed_at >= since) {
                            *record = record.clone().shifted(by);
                        }
                    }
                }
                check(&shard);
                assert_eq!(shard.slots().count(), model.len());
                for (number, record) in &model {
                    assert_eq!(get(&shard, *number).as_ref(), Some(record));
                }
            }
        }
    }
}
