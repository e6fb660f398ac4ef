//! The inside of a store, shared by the callers and the threads: the decision about a command, and reading.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use oncegate_core::codec;
use oncegate_core::{
    AuditEntry, Clock, Command, LastWrite, Outcome, Record, RecordId, StoreClock, StoreError, StoreUsage,
    Timestamp, Write, decide, limits,
};

use crate::disk::Disk;
use crate::format::{ENTRY, EntryHead, Kind, StoreId, expiry_seconds};
use crate::index::{Index, Place, Recent, SLOT_MEMORY, Slot};
use crate::mark::{Failure, Mark};
use crate::queue::Queue;
use crate::segments::{Segment, Segments, SpareSlot};
use crate::shared::{
    Reply, Scan, closed_error, disk_low_error, full_error, is_damage, unprepared_error, unreadable_error,
};
use crate::tail::Tail;
use crate::ticket::Ticket;

/// A time of day that an operator accepted: the records before this place that were written since `since` are so much older.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shift {
    /// `None` until the entry is on the disk: all records in the index are before it.
    pub(crate) place: Option<Place>,
    pub(crate) since: Timestamp,
    pub(crate) by: Duration,
}

impl Shift {
    /// Reads the content of an entry at this place.
    pub(crate) fn decode(place: Place, body: &[u8]) -> Option<Self> {
        let (since, by) = body.split_first_chunk()?;
        let by = Duration::from_millis(u64::from_be_bytes(by.try_into().ok()?));
        Some(Self { place: Some(place), since: Timestamp::from_millis(u64::from_be_bytes(*since)), by })
    }

    /// The seconds by which the expiry of slots moves, rounded up.
    pub(crate) fn seconds(&self) -> u32 {
        u32::try_from(self.by.as_millis().div_ceil(1000)).unwrap_or(u32::MAX)
    }

    /// Moves the times of a record at this place, if it was written before the correction and since it became necessary.
    pub(crate) fn apply(&self, record: Record, at: Place) -> Record {
        let concerns = self.place.is_none_or(|place| at < place) && record.changed_at >= self.since;
        if concerns { record.shifted(self.by) } else { record }
    }
}

/// A job for the housekeeper.
pub(crate) enum Chore {
    Purge {
        limit: usize,
        reply: Reply<usize>,
    },
    AcceptClock {
        reply: Reply<Option<Duration>>,
    },
    /// Something may be to do.
    Look,
}

/// The inside of a store.
pub(crate) struct StoreInner {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) sizes: Sizes,
    pub(crate) store: StoreId,
    pub(crate) clock: StoreClock<Arc<dyn Clock>>,
    pub(crate) index: Index,
    pub(crate) tail: Tail,
    pub(crate) segments: Segments,
    pub(crate) spare: SpareSlot,
    /// The audit trail: number and place of each entry, oldest first.
    pub(crate) audits: Mutex<VecDeque<(u64, Slot)>>,
    pub(crate) shifts: RwLock<Vec<Shift>>,
    pub(crate) scans: Queue<Scan>,
    pub(crate) chores: Queue<Chore>,
    /// The oldest segment that counts, as the next batch will say it.
    pub(crate) oldest: AtomicU32,
    /// The next batch begins a new segment, if there can be one.
    pub(crate) wants_segment: AtomicBool,
    /// True while an operator's compaction begins.
    pub(crate) begins_compaction: AtomicBool,
    /// The segments below this one are compacted, however much of them is alive.
    pub(crate) compacted_below: AtomicU32,
    /// The segments that count no more, and whose files are still there.
    pub(crate) unremoved: AtomicU32,
    /// The end of what is on the disk.
    durable: Mutex<DurableEnd>,
    /// Set while the mark cannot be written.
    mark_failure: Mutex<Option<Failure>>,
    pub(crate) max_records: u64,
    pub(crate) max_record_bytes: u64,
    /// The directory may have another owner.
    pub(crate) is_closed: AtomicBool,
    is_disk_low: AtomicBool,
    /// The time of the last look at the disk, in milliseconds.
    looked_at: AtomicU64,
    has_damage: AtomicBool,
    /// The reason why new keys are refused, as it was logged.
    full: Mutex<Option<String>>,
}

/// The end of what is on the disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DurableEnd {
    /// The last batch.
    pub(crate) mark: Mark,
    /// True if this batch is the last one of its segment, and the next segment has none yet.
    pub(crate) is_sealed: bool,
}

/// The sizes of the parts of a store, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    /// Of memory: the index, and recent records.
    pub(crate) memory: usize,
    /// Of the first segment of a store. Each next one is four times as large while they fill up quickly.
    pub(crate) first_segment: u64,
    /// Of the largest segment.
    pub(crate) max_segment: u64,
    /// Of dead entries that are left alone, beyond as many as there are of live ones.
    pub(crate) slack: u64,
}

impl Sizes {
    /// The sizes of a store with this much memory.
    pub(crate) const fn with_memory(memory: usize) -> Self {
        let max_segment = 64 * 1024 * 1024;
        Self { memory, first_segment: 1024 * 1024, max_segment, slack: max_segment }
    }

    /// The memory for recent records.
    pub(crate) const fn cache(&self) -> usize {
        self.memory / 8
    }

    /// The records whose slots fit into the rest of the memory.
    const fn most_records(&self) -> u64 {
        (self.memory - self.cache()) as u64 / SLOT_MEMORY
    }
}

/// The limits of a store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) max_records: u64,
    pub(crate) max_record_bytes: u64,
}

impl Limits {
    /// The limit that this many records with so many bytes have reached, in words.
    pub(crate) fn reached(
        &self,
        sizes: Sizes,
        records: u64,
        live_bytes: impl FnOnce() -> u64,
    ) -> Option<String> {
        let Self { max_records, max_record_bytes } = self;
        let wait = "raise the limit, or wait until records expire";
        if records >= *max_records {
            Some(format!("it has reached its limit of {max_records} records: {wait}"))
        } else if records >= sizes.most_records() {
            Some(format!(
                "the index of {records} records fills the memory that it may use: raise store-memory, or wait until records expire"
            ))
        } else if live_bytes() >= *max_record_bytes {
            Some(format!("its records have reached their limit of {max_record_bytes} bytes: {wait}"))
        } else {
            None
        }
    }
}

/// The parts of a store that recovery makes.
pub(crate) struct Recovered {
    pub(crate) store: StoreId,
    pub(crate) index: Index,
    pub(crate) segments: Segments,
    pub(crate) audits: VecDeque<(u64, Slot)>,
    pub(crate) shifts: Vec<Shift>,
    pub(crate) oldest: u32,
    pub(crate) spare: crate::segments::Spare,
}

/// The bytes at the place of a slot.
enum Found {
    Record(Record),
    /// A record whose identifier begins with the same bytes.
    Other,
    /// The segment was deleted: the record is elsewhere now.
    Moved,
}

/// The shortest time between two looks at the free space of the disk, in milliseconds. A look is a system call.
const LOOK_INTERVAL_MILLIS: u64 = 5;

/// A record, and the batch that has to be on the disk before it may be shown.
pub(crate) type Version = (Record, Option<Arc<Ticket>>);

/// The bytes of an entry: its head, if they have one, and its body.
pub(crate) type EntryBytes = (Option<EntryHead>, Vec<u8>);

/// The same with the body in a buffer of the reader.
pub(crate) type BorrowedEntry<'a> = (Option<EntryHead>, &'a [u8]);

/// The reply to a command, and the batch that has to be on the disk before it is given.
pub(crate) type Decided = (Outcome, Option<Arc<Ticket>>);

impl StoreInner {
    pub(crate) fn new(
        disk: Arc<dyn Disk>,
        clock: StoreClock<Arc<dyn Clock>>,
        recovered: Recovered,
        limits: Limits,
        sizes: Sizes,
        durable: Mark,
    ) -> Self {
        let next_audit = recovered.audits.back().map_or(1, |(number, _)| number + 1);
        let is_disk_low = disk.is_low().into();
        Self {
            disk,
            sizes,
            store: recovered.store,
            clock,
            index: recovered.index,
            tail: Tail::new(next_audit),
            segments: recovered.segments,
            spare: SpareSlot::new(recovered.spare),
            audits: Mutex::new(recovered.audits),
            shifts: RwLock::new(recovered.shifts),
            scans: Queue::new(64),
            chores: Queue::new(1024),
            wants_segment: AtomicBool::new(false),
            begins_compaction: AtomicBool::new(false),
            compacted_below: AtomicU32::new(0),
            unremoved: AtomicU32::new(0),
            oldest: AtomicU32::new(recovered.oldest),
            durable: Mutex::new(DurableEnd { mark: durable, is_sealed: false }),
            mark_failure: Mutex::new(None),
            max_records: limits.max_records,
            max_record_bytes: limits.max_record_bytes,
            is_closed: AtomicBool::new(false),
            is_disk_low,
            looked_at: AtomicU64::new(0),
            has_damage: AtomicBool::new(false),
            full: Mutex::new(None),
        }
    }

    /// Decides about a command, and appends what it writes.
    pub(crate) fn decide(&self, id: &RecordId, command: &Command) -> Result<Decided, StoreError> {
        self.check_open()?;
        if self.clock.is_ahead() {
            self.follow_clock();
        }
        loop {
            let shard = self.index.shard_of(id);
            if let Some(recent) = shard.recent(id) {
                let recent = RecentVersion {
                    record: recent.record.clone(),
                    pending: recent.pending.clone(),
                    indexed: recent.indexed,
                };
                return self.decide_locked(shard, id, command, Some(recent));
            }
            let candidates: Vec<Slot> = shard.candidates(id).collect();
            if candidates.is_empty() {
                return self.decide_locked(shard, id, command, None);
            }
            drop(shard);
            let Some(found) = self.read_candidates(id, &candidates)? else { continue };
            let mut shard = self.index.shard_of(id);
            // Another caller may have changed the record while it was read.
            if shard.recent(id).is_some() || !shard.candidates(id).eq(candidates) {
                continue;
            }
            let Some((record, place)) = found else {
                return self.decide_locked(shard, id, command, None);
            };
            shard.cache(*id, record.clone(), place, self.index.shard_cache());
            let recent = RecentVersion { record, pending: None, indexed: Some(place) };
            return self.decide_locked(shard, id, command, Some(recent));
        }
    }

    /// The reply to a claim that changes nothing and depends only on a recent record that is on the disk.
    pub(crate) fn reply_from_memory(&self, id: &RecordId, command: &Command) -> Option<Outcome> {
        if !matches!(command, Command::Claim(_)) || self.check_open().is_err() || self.clock.is_ahead() {
            return None;
        }
        let shard = self.index.shard_of(id);
        let recent = shard.recent(id)?;
        if recent.pending.as_ref().is_some_and(|ticket| !ticket.is_durable()) {
            return None;
        }
        let decision = decide(Some(&recent.record), command, self.clock.now());
        (decision.write == Write::Keep).then_some(decision.outcome)
    }

    fn decide_locked(
        &self,
        mut shard: MutexGuard<'_, crate::index::Shard>,
        id: &RecordId,
        command: &Command,
        recent: Option<RecentVersion>,
    ) -> Result<Decided, StoreError> {
        let now = self.clock.now();
        let record = recent.as_ref().map(|recent| &recent.record);
        let decision = decide(record, command, now);
        let Write::Put(after) = decision.write else {
            let pending = recent.and_then(|recent| recent.pending).filter(|ticket| !ticket.is_durable());
            return Ok((decision.outcome, pending));
        };
        let is_new = record.is_none();
        if matches!(command, Command::Claim(_)) {
            if now.as_millis().abs_diff(self.looked_at.load(Ordering::Relaxed)) >= LOOK_INTERVAL_MILLIS {
                self.look_at_disk(now);
            }
            self.check_capacity(is_new)?;
        }
        // Maintenance must not use up the rest of the disk, which is reserved for requests that are running. A `forget` may: it
        // makes the record smaller.
        if matches!(command, Command::Rewrite(_))
            && let Some(error) = self.disk_refusal()
        {
            return Err(error);
        }
        let audit = AuditEntry::of(*id, command, &decision.outcome, after.state_name(now), now);
        let body = codec::encode(id, &after);
        let head = EntryHead {
            kind: Kind::Record,
            body_len: body.len() as u32,
            expires: expiry_seconds(after.expires_at),
            id: *id,
        };
        let ticket = self.tail.append(&head, &body, audit)?;
        if is_new {
            self.index.add_record();
        }
        let indexed = recent.and_then(|recent| recent.indexed);
        shard.pin(*id, Recent { record: after, pending: Some(ticket.clone()), indexed });
        Ok((decision.outcome, Some(ticket)))
    }

    pub(crate) fn check_open(&self) -> Result<(), StoreError> {
        if self.is_closed.load(Ordering::SeqCst) { Err(closed_error().with_nothing_sent()) } else { Ok(()) }
    }

    /// Reads the newest version of a record, and the batch that has to be on the disk before it may be shown.
    pub(crate) fn read(&self, id: &RecordId) -> Result<Option<Version>, StoreError> {
        self.check_open()?;
        loop {
            let shard = self.index.shard_of(id);
            if let Some(recent) = shard.recent(id) {
                let pending = recent.pending.clone().filter(|ticket| !ticket.is_durable());
                return Ok(Some((recent.record.clone(), pending)));
            }
            let candidates: Vec<Slot> = shard.candidates(id).collect();
            drop(shard);
            let Some(found) = self.read_candidates(id, &candidates)? else { continue };
            return Ok(found.map(|(record, _)| (record, None)));
        }
    }

    /// Reads the record with this identifier from one of these slots. The outer `None` means that the slots are outdated.
    fn read_candidates(
        &self,
        id: &RecordId,
        candidates: &[Slot],
    ) -> Result<Option<Option<(Record, Place)>>, StoreError> {
        for slot in candidates {
            match self.read_slot(id, slot)? {
                Found::Record(record) => return Ok(Some(Some((record, slot.place())))),
                Found::Other => {}
                Found::Moved => return Ok(None),
            }
        }
        Ok(Some(None))
    }

    fn read_slot(&self, id: &RecordId, slot: &Slot) -> Result<Found, StoreError> {
        let place = slot.place();
        let Some((head, body)) = self.read_entry(slot)? else { return Ok(Found::Moved) };
        let decoded = match head {
            Some(head) if head.kind == Kind::Record => {
                // With its own identifier: a record of another key has the right checksum, and a damaged identifier has not.
                codec::decode(&head.id, &body).map(|record| (head.id == *id).then_some(record))
            }
            _ => Err(codec::CodecError::Damaged),
        };
        match decoded {
            Ok(Some(record)) => Ok(Found::Record(self.shifted(record, place))),
            Ok(None) => Ok(Found::Other),
            Err(error) => {
                if is_damage(&error) {
                    self.report_damage();
                }
                Err(unreadable_error(id, error))
            }
        }
    }

    /// Reads the entry of a slot. The outer `None` means that its segment was deleted, the inner one that the bytes are no entry.
    pub(crate) fn read_entry(&self, slot: &Slot) -> Result<Option<EntryBytes>, StoreError> {
        let mut buffer = Vec::new();
        let found = self.read_entry_into(slot, &mut buffer)?;
        Ok(found.map(|(head, body)| (head, body.to_vec())))
    }

    /// The same with the body in a buffer, which many reads can share.
    pub(crate) fn read_entry_into<'a>(
        &self,
        slot: &Slot,
        buffer: &'a mut Vec<u8>,
    ) -> Result<Option<BorrowedEntry<'a>>, StoreError> {
        let place = slot.place();
        let Some(segment) = self.segments.get(place.segment) else { return Ok(None) };
        let io =
            |error| StoreError::unavailable("the embedded store cannot read its files").with_source(error);
        buffer.resize(slot.len().max(ENTRY as u64) as usize, 0);
        let count = segment.file.read(buffer, place.offset.into()).map_err(io)?;
        let bytes = buffer.get(..count).unwrap_or_default();
        let head = EntryHead::decode(bytes)
            .filter(|head| head.len() <= bytes.len().next_multiple_of(crate::format::ALIGN));
        let end = head.map_or(0, |head| ENTRY + head.body_len as usize);
        let body = bytes.get(ENTRY..end);
        Ok(Some((head.filter(|_| body.is_some()), body.unwrap_or_default())))
    }

    /// The record at this place, as the operators' corrections of the clock have changed it.
    pub(crate) fn shifted(&self, record: Record, at: Place) -> Record {
        let shifts = self.shifts.read().unwrap_or_else(PoisonError::into_inner);
        shifts.iter().fold(record, |record, shift| shift.apply(record, at))
    }

    /// Refuses a claim that the protocol grants but the capacity does not allow.
    fn check_capacity(&self, is_new: bool) -> Result<(), StoreError> {
        let error = if is_new { self.exhausted() } else { self.disk_refusal() };
        error.map_or(Ok(()), Err)
    }

    /// The error for a claim of a new key if the disk or a limit is exhausted.
    fn exhausted(&self) -> Option<StoreError> {
        if let Some(error) = self.disk_refusal() {
            return Some(error);
        }
        let limits = Limits { max_records: self.max_records, max_record_bytes: self.max_record_bytes };
        limits
            .reached(self.sizes, self.index.records(), || self.segments.live_bytes())
            .map(|reason| full_error(&reason))
    }

    /// Puts a record that is on the disk into the index. `copy_of` is the place of the old entry if this one is its copy.
    pub(crate) fn publish_record(&self, id: &RecordId, mut slot: Slot, copy_of: Option<Place>) {
        let mut shard = self.index.shard_of(id);
        // Corrections of the clock that were appended after this entry have moved the slots that were there then.
        let shifts = self.shifts.read().unwrap_or_else(PoisonError::into_inner);
        for shift in shifts.iter().filter(|shift| shift.place.is_none()) {
            slot.expires = slot.expires.saturating_add(shift.seconds());
        }
        drop(shifts);
        let old = match copy_of {
            Some(old) => Some(old),
            None => shard.recent(id).and_then(|recent| recent.indexed),
        };
        let replaced = old.and_then(|old| shard.replace(old, slot));
        match (copy_of, replaced) {
            // The record has changed, or is gone: the copy is dead.
            (Some(_), None) => return,
            (Some(old), Some(_)) => {
                if let Some(recent) = shard.recent_mut(id).filter(|recent| recent.indexed == Some(old)) {
                    recent.indexed = Some(slot.place());
                }
            }
            (None, replaced) => {
                if replaced.is_none() {
                    shard.insert(slot);
                }
                if let Some(recent) = shard.recent_mut(id) {
                    recent.indexed = Some(slot.place());
                }
            }
        }
        drop(shard);
        self.segments.count(&slot);
        self.segments.discount(&replaced);
    }

    /// Adds an audit entry that is on the disk to the audit trail, and forgets the oldest beyond the limit.
    pub(crate) fn publish_audit(&self, slot: Slot, body: &[u8], copy_of: Option<Place>) {
        let mut audits = self.audits();
        if let Some(old) = copy_of {
            let Some((_, place)) = audits.iter_mut().find(|(_, audit)| audit.place() == old) else { return };
            let old = std::mem::replace(place, slot);
            drop(audits);
            self.segments.count(&slot);
            return self.segments.discount([&old]);
        }
        let number = body.first_chunk().map_or(0, |number| u64::from_be_bytes(*number));
        audits.push_back((number, slot));
        let forgotten =
            if audits.len() as u64 > limits::MAX_AUDIT_ENTRIES { audits.pop_front() } else { None };
        drop(audits);
        self.segments.count(&slot);
        self.segments.discount(forgotten.iter().map(|(_, slot)| slot));
    }

    /// Sets the place of a correction of the clock that is on the disk.
    pub(crate) fn publish_shift(&self, at: Place) {
        let mut shifts = self.shifts.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(shift) = shifts.iter_mut().find(|shift| shift.place.is_none()) {
            shift.place = Some(at);
        }
    }

    /// The clocks, for the header of a batch.
    pub(crate) fn clocks(&self) -> LastWrite {
        let clock = &self.clock;
        LastWrite { time: clock.now(), wall: clock.wall(), lagging_since: clock.lagging_since() }
    }

    /// Has the housekeeper look if there is something to do.
    pub(crate) fn look(&self) {
        // If the queue is full, the housekeeper is about to look anyway.
        let _ = self.chores.push(Chore::Look);
    }

    fn look_at_disk(&self, now: Timestamp) {
        self.looked_at.store(now.as_millis(), Ordering::Relaxed);
        self.is_disk_low.store(self.disk.is_low(), Ordering::Relaxed);
    }

    /// Looks if new keys are refused, and logs when that begins and ends.
    pub(crate) fn look_at_capacity(&self) {
        self.look_at_disk(self.clock.now());
        let now = self.exhausted().map(|error| error.to_string());
        let mut before = self.full();
        match (&*before, &now) {
            (before, Some(reason)) if before.as_ref() != Some(reason) => tracing::warn!("{reason}"),
            (Some(_), None) => tracing::info!("the embedded store takes new keys again"),
            _ => {}
        }
        *before = now;
    }

    /// The use of the limits. The memory for the index always limits the records.
    pub(crate) fn usage(&self) -> StoreUsage {
        StoreUsage {
            records: self.index.records(),
            max_records: Some(self.max_records.min(self.sizes.most_records())),
            bytes: self.segments.live_bytes(),
            max_bytes: Some(self.max_record_bytes).filter(|max| *max != u64::MAX),
        }
    }

    /// The reason why new keys are refused.
    pub(crate) fn full(&self) -> MutexGuard<'_, Option<String>> {
        self.full.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error for a claim while the rest of the disk is reserved for requests that are running.
    pub(crate) fn disk_refusal(&self) -> Option<StoreError> {
        if self.is_disk_low.load(Ordering::Relaxed) {
            return Some(disk_low_error());
        }
        self.spare.failure().map(|reason| unprepared_error(&reason))
    }

    /// True if the rest of the disk is reserved for requests that are running.
    pub(crate) fn is_disk_low(&self) -> bool {
        self.is_disk_low.load(Ordering::Relaxed) || self.spare.has_failed()
    }

    /// Takes note of the last batch that is on the disk, and of the end of its segment.
    pub(crate) fn set_end(&self, end: DurableEnd, segment: &Segment, used: u64) {
        let mut durable = self.durable.lock().unwrap_or_else(PoisonError::into_inner);
        segment.used.store(used, Ordering::Release);
        *durable = end;
    }

    /// The last batch that is on the disk.
    pub(crate) fn durable(&self) -> Mark {
        self.with_end(|end| end.mark)
    }

    /// Looks at the end of what is on the disk, which does not move meanwhile.
    pub(crate) fn with_end<T>(&self, look: impl FnOnce(&DurableEnd) -> T) -> T {
        look(&self.durable.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The reason why the mark cannot be written, if it cannot.
    pub(crate) fn mark_failure(&self) -> MutexGuard<'_, Option<Failure>> {
        self.mark_failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn audits(&self) -> MutexGuard<'_, VecDeque<(u64, Slot)>> {
        self.audits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn report_damage(&self) {
        if !self.has_damage.swap(true, Ordering::Relaxed) {
            tracing::error!(
                "a record of the embedded store is damaged: its key is refused, all others are served; run `oncegate check`"
            );
        }
    }

    pub(crate) fn has_damage(&self) -> bool {
        self.has_damage.load(Ordering::Relaxed)
    }
}

/// A copy of [`Recent`], so that the shard can be changed.
struct RecentVersion {
    record: Record,
    pending: Option<Arc<Ticket>>,
    indexed: Option<Place>,
}
