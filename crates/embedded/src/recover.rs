//! Opening: the segments are read from the oldest to the newest, each byte of each batch is verified, and the index is built.
//!
//! 1. The newest valid header says which segment is the oldest that counts. Older files are removed. Each segment from there on
//!    must exist.
//! 2. The batches form a chain. The first batch of a segment may repeat numbers of batches at the end of the segment before it:
//!    then the writer met an error there, and these batches do not count.
//! 3. The chain ends at the first batch that is not valid. If any valid batch of a later number follows, in this or a later
//!    segment, the batch was on the disk and was damaged: the store is not opened. Otherwise a crash has torn it while it was
//!    written. It was never acknowledged, and is overwritten with zeros.
//! 4. The [mark](crate::mark) knows a batch that was on the disk. If the chain does not reach it, or has another batch of its
//!    number, the store is not opened.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use oncegate_core::{ErrorChain, LastWrite, RecordId, Timestamp, limits};
use tracing::{info, warn};

use crate::disk::{Disk, SegmentFile};
use crate::error::EmbeddedOpenError;
use crate::format::{
    BLOCK, ENTRY, EntryHead, FLAG_SEAL, HEADER, Header, Kind, NoHeader, StoreId, entries, segment_blocks,
};
use crate::index::{Index, Place, SHARDS, Slot, prefix};
use crate::inner::{Recovered, Shift, Sizes};
use crate::mark::{Mark, Marks};
use crate::segments::{Segment, Segments, Spare};
use crate::writer::LogEnd;

/// The bytes that are read at once.
const WINDOW: usize = 4 * 1024 * 1024;

/// The version of the format that this program writes, for messages.
pub(crate) const FORMAT: u64 = 1;

/// A store that was read.
pub(crate) struct Opened {
    pub(crate) recovered: Recovered,
    pub(crate) end: LogEnd,
    /// The clocks of the last batch; `None` if the store is new.
    pub(crate) last_write: Option<LastWrite>,
    /// The last batch.
    pub(crate) last: Mark,
    /// The marks before this start.
    pub(crate) marks: Marks,
}

/// The parts of the log, in its order.
pub(crate) enum Item<'a> {
    Batch { header: &'a Header, offset: u64 },
    Entry { place: Place, head: EntryHead, body: &'a [u8] },
}

/// The chain of batches, as far as it is valid.
pub(crate) struct Scan {
    pub(crate) store: StoreId,
    pub(crate) oldest: u32,
    /// The segments with batches, oldest first: number, file, length, and the bytes of batches.
    pub(crate) segments: Vec<ScannedSegment>,
    /// The last valid batch.
    pub(crate) last: Header,
    pub(crate) chain: u32,
    /// The bytes after the last batch are not all zero.
    pub(crate) is_torn: bool,
    pub(crate) marks: Marks,
}

pub(crate) struct ScannedSegment {
    pub(crate) number: u32,
    pub(crate) file: Arc<dyn SegmentFile>,
    pub(crate) len: u64,
    pub(crate) used: u64,
    /// The first batch, if it is valid.
    first: Option<Header>,
}

fn io(disk: &dyn Disk, number: u32, operation: &str) -> impl FnOnce(std::io::Error) -> EmbeddedOpenError {
    EmbeddedOpenError::io(format!("{operation} {}", disk.path(number).display()))
}

fn damaged(disk: &dyn Disk, number: u32, damage: String) -> EmbeddedOpenError {
    EmbeddedOpenError::Damaged { file: disk.path(number), damage }
}

fn bad_mark(disk: &dyn Disk) -> impl FnOnce(String) -> EmbeddedOpenError {
    let file = disk.mark_path();
    move |damage| EmbeddedOpenError::Damaged { file, damage }
}

/// Opens the store on a disk, or creates it if there are no segments.
pub(crate) fn open(
    disk: &dyn Disk,
    now: LastWrite,
    store_id: impl FnOnce() -> Result<StoreId, EmbeddedOpenError>,
    sizes: Sizes,
) -> Result<Opened, EmbeddedOpenError> {
    let numbers = disk.segments().map_err(io(disk, 1, "list the segments next to"))?;
    if numbers.is_empty() {
        let marks = Marks::read(disk)?;
        marks.check_no_segments().map_err(bad_mark(disk))?;
        return create(disk, now, store_id()?, sizes, marks);
    }
    let mut builder = Builder::new(sizes.cache());
    let scan = scan(disk, &numbers, &mut |item, segment| builder.take(disk, item, segment))?;
    builder.add_pending(disk)?;
    let Builder { index, segments, audits, shifts, counts, .. } = builder;
    counts.publish(&segments);
    let Some(active) = scan.segments.last() else {
        return Err(damaged(disk, scan.oldest, "it has no batch".to_owned()));
    };
    if let Some(weakness) = scan.marks.weakness(disk, &scan.last) {
        warn!("{weakness}");
    }
    secure(disk, &scan)?;
    let (number, mut offset) = (active.number, active.used);
    // A segment whose first batch was torn has none yet.
    let mut end_segment = segments.get(number).unwrap_or_else(|| {
        let segment = Arc::new(Segment::new(number, active.file.clone(), active.len));
        segments.add(segment.clone());
        segment
    });
    if scan.is_torn {
        warn!(
            segment = number,
            offset,
            "the log of the embedded store ends with a write that is not complete, and that is removed: torn by a crash, it was never acknowledged; if the disk was damaged, acknowledged records may be missing"
        );
        clear(disk, active)?;
    }
    // Files after the last segment hold nothing but zeros, or a torn batch.
    let mut spare = Spare::Wanted(number + 1);
    let mut next = None;
    for later in numbers.iter().copied().filter(|later| *later > number) {
        if later == number + 1 {
            let file = disk.open(later).map_err(io(disk, later, "open"))?;
            let len = file.len().map_err(io(disk, later, "read the length of"))?;
            clear(disk, &ScannedSegment { number: later, file: file.clone(), len, used: 0, first: None })?;
            next = Some(Arc::new(Segment::new(later, file, len)));
        } else {
            remove(disk, later);
        }
    }
    // Unless the next segment has begun with a batch that was torn.
    if scan.last.flags & FLAG_SEAL != 0 && scan.last.segment == number {
        let Some(segment) = next.take() else {
            return Err(damaged(disk, number + 1, "the segment is missing".to_owned()));
        };
        spare = Spare::Wanted(segment.number + 1);
        segments.add(segment.clone());
        (end_segment, offset) = (segment, 0);
    }
    if let Some(next) = next {
        spare = Spare::Ready(next);
    }
    // Not those that only a torn batch calls dead: they must be there until a batch on the disk says so, too.
    for old in numbers.iter().copied().filter(|old| *old < scan.last.oldest) {
        remove(disk, old);
    }
    let recovered =
        Recovered { store: scan.store, index, segments, audits, shifts, oldest: scan.oldest, spare };
    let end = LogEnd { segment: end_segment, offset, sequence: scan.last.sequence + 1, chain: scan.chain };
    let last = Mark::of(&scan.last, scan.chain);
    Ok(Opened { recovered, end, last_write: Some(scan.last.written), last, marks: scan.marks })
}

/// Makes durable what was read.
///
/// A process may have been killed between a write and its flush. What it wrote can be read, but is lost if power fails. Only
/// the last batch and the names of the files can be in this state.
fn secure(disk: &dyn Disk, scan: &Scan) -> Result<(), EmbeddedOpenError> {
    disk.sync_names().map_err(io(disk, scan.oldest, "flush the directory of"))?;
    let Some(segment) = scan.segments.iter().rev().find(|segment| segment.used > 0) else { return Ok(()) };
    let len = scan.last.batch_len();
    let mut bytes = vec![0; len as usize];
    let offset = segment.used - len;
    // It is written again, because the operating system may count it as flushed after a flush that failed.
    let count = segment.file.read(&mut bytes, offset).map_err(io(disk, segment.number, "read"))?;
    if count as u64 != len || !matches!(Header::decode(&bytes), Ok((header, _)) if header == scan.last) {
        return Err(damaged(
            disk,
            segment.number,
            format!("the batch at {offset} changed while it was read"),
        ));
    }
    segment.file.write_durably(&bytes, offset).map_err(io(disk, segment.number, "write"))
}

/// Removes a segment that does not count. If that fails, the next start tries again.
fn remove(disk: &dyn Disk, number: u32) {
    if let Err(error) = disk.remove(number) {
        warn!(segment = number, error = %ErrorChain(&error), "an old segment of the embedded store could not be removed now");
    }
}

/// Creates a store: its first segment with an empty batch. The segment gets its name when that is on the disk.
fn create(
    disk: &dyn Disk,
    now: LastWrite,
    store: StoreId,
    sizes: Sizes,
    marks: Marks,
) -> Result<Opened, EmbeddedOpenError> {
    let header = Header {
        flags: 0,
        store,
        segment: 1,
        segment_blocks: segment_blocks(sizes.first_segment),
        oldest: 1,
        sequence: 1,
        written: now,
        payload_len: 0,
        entries: 0,
        payload_sum: crc32c::crc32c(&[]),
        previous: 0,
    };
    let (mut bytes, chain) = {
        let (encoded, sum) = header.encode();
        (encoded.to_vec(), sum)
    };
    bytes.resize(BLOCK as usize, 0);
    let mut make = || {
        let file = disk.create(1)?;
        // The rest of the zeros follows in the background, in the next segment.
        bytes.resize(sizes.first_segment as usize, 0);
        file.write(&bytes, 0)?;
        file.sync()?;
        disk.publish(1)?;
        Ok(Arc::new(Segment::new(1, file, sizes.first_segment)))
    };
    let segment = make().map_err(io(disk, 1, "create"))?;
    info!(dir = %disk.directory().display(), "created a new store");
    segment.used.store(BLOCK, Ordering::Release);
    let segments = Segments::default();
    segments.add(segment.clone());
    let recovered = Recovered {
        store,
        index: Index::new(sizes.cache()),
        segments,
        audits: VecDeque::new(),
        shifts: Vec::new(),
        oldest: 1,
        spare: Spare::Wanted(2),
    };
    let end = LogEnd { segment, offset: BLOCK, sequence: 2, chain };
    Ok(Opened { recovered, end, last_write: None, last: Mark::of(&header, chain), marks })
}

/// Reads the chain of batches, and passes each batch and entry on. Changes nothing.
///
/// # Errors
/// [`EmbeddedOpenError::Damaged`] if a batch that was on the disk is missing or was changed.
pub(crate) fn scan(
    disk: &dyn Disk,
    numbers: &[u32],
    take: &mut dyn FnMut(Item<'_>, &ScannedSegment) -> Result<(), EmbeddedOpenError>,
) -> Result<Scan, EmbeddedOpenError> {
    let marks = Marks::read(disk)?;
    let mut segments = Vec::new();
    for number in numbers.iter().copied() {
        let file = disk.open(number).map_err(io(disk, number, "open"))?;
        let len = file.len().map_err(io(disk, number, "read the length of"))?;
        let first = match read_header(&*file, 0).map_err(io(disk, number, "read"))? {
            Ok((header, _)) if header.segment == number => Some(header),
            Ok((header, _)) => {
                return Err(damaged(disk, number, format!("it holds segment {}", header.segment)));
            }
            Err(NoHeader::Newer) => {
                return Err(EmbeddedOpenError::NewerFormat {
                    dir: disk.directory(),
                    found: FORMAT + 1,
                    known: FORMAT,
                });
            }
            Err(NoHeader::Empty | NoHeader::Invalid) => None,
        };
        let full = first.map_or(BLOCK, |first| u64::from(first.segment_blocks) * BLOCK);
        if len < full {
            return Err(damaged(disk, number, format!("it has {len} bytes of at least {full}")));
        }
        segments.push(ScannedSegment { number, file, len, used: 0, first });
    }
    // Older segments than the newest header knows may be there, because their removal was not durable. The chain then begins
    // later.
    let Some(newest) = newest_header(disk, &segments)? else {
        let number = numbers.first().copied().unwrap_or(1);
        return Err(damaged(disk, number, "no batch in any segment can be read".to_owned()));
    };
    // Those that are older than the oldest one are removed when the store is opened.
    if let Some(other) =
        segments.iter().find(|segment| segment.first.is_some_and(|first| first.store != newest.store))
    {
        let text = "it is of another store than the newest segment: segments of two stores are in one directory. Restore the \
                    directory from a copy, or keep the segments of one store only";
        return Err(damaged(disk, other.number, text.to_owned()));
    }
    segments.retain(|segment| segment.number >= newest.oldest);
    let (store, oldest) = (newest.store, newest.oldest);
    marks.check_store(store).map_err(bad_mark(disk))?;
    let mut state: Option<(Header, u32)> = None;
    let mut is_torn = false;
    let mut used = 0;
    for position in 0..segments.len() {
        let expected = oldest + position as u32;
        // A later segment that begins with a lower number replaces what follows here.
        let cut = segments.get(position + 1..).unwrap_or_default().iter();
        let cut =
            cut.filter_map(|segment| segment.first.map(|first| first.sequence)).min().unwrap_or(u64::MAX);
        let Some(segment) = segments.get_mut(position) else { break };
        if segment.number != expected {
            return Err(damaged(disk, expected, "the segment is missing".to_owned()));
        }
        let Some(first) = segment.first else {
            // Prepared, or torn at its first batch.
            break;
        };
        let follows = match &state {
            None => position == 0,
            Some((last, chain)) => {
                first.store == store && first.sequence == last.sequence + 1 && first.previous == *chain
            }
        };
        if !follows || first.store != store {
            let text = format!(
                "its first batch has the number {}, and does not follow the batch {} before it",
                first.sequence,
                state.map_or(0, |(last, _)| last.sequence)
            );
            return Err(damaged(disk, segment.number, text));
        }
        is_torn = read_segment(disk, segment, cut, &marks, &mut state, take)?;
        used = position + 1;
    }
    let Some((last, chain)) = state else {
        return Err(damaged(disk, oldest, "its first batch cannot be read".to_owned()));
    };
    let later = segments.get(used.saturating_sub(1)..).unwrap_or_default();
    find_later_batch(disk, later, &last, store)?;
    if last.flags & FLAG_SEAL != 0 && !numbers.contains(&(last.segment + 1)) {
        return Err(damaged(disk, last.segment + 1, "the segment is missing".to_owned()));
    }
    marks.check_end(&last).map_err(|damage| damaged(disk, last.segment, damage))?;
    segments.truncate(used);
    Ok(Scan { store, oldest, segments, last, chain, is_torn, marks })
}

/// Reads the batches of a segment whose numbers are below `cut`. Returns true if anything but zeros follows the last one.
fn read_segment(
    disk: &dyn Disk,
    segment: &mut ScannedSegment,
    cut: u64,
    marks: &Marks,
    state: &mut Option<(Header, u32)>,
    take: &mut dyn FnMut(Item<'_>, &ScannedSegment) -> Result<(), EmbeddedOpenError>,
) -> Result<bool, EmbeddedOpenError> {
    let number = segment.number;
    let mut window = Window::new(segment.file.clone());
    loop {
        let offset = segment.used;
        let bytes = window.get(offset, HEADER).map_err(io(disk, number, "read"))?;
        let decoded = Header::decode(bytes);
        let (header, sum) = match decoded {
            Ok((header, sum)) => (header, sum),
            Err(NoHeader::Empty) => return Ok(false),
            Err(NoHeader::Invalid | NoHeader::Newer) => return Ok(true),
        };
        let follows = match &*state {
            None => true,
            Some((last, chain)) => {
                header.sequence == last.sequence + 1
                    && header.previous == *chain
                    && header.store == last.store
            }
        };
        if !follows || header.segment != number || header.sequence >= cut {
            return Ok(true);
        }
        let len = header.batch_len() as usize;
        let batch = window.get(offset, len).map_err(io(disk, number, "read"))?;
        let Some(payload) = batch.get(HEADER..HEADER + header.payload_len as usize) else { return Ok(true) };
        if crc32c::crc32c(payload) != header.payload_sum {
            return Ok(true);
        }
        marks.check_batch(&header, sum).map_err(|damage| damaged(disk, number, damage))?;
        take(Item::Batch { header: &header, offset }, segment)?;
        let mut count = 0;
        for entry in entries(payload) {
            let Some((at, head, body)) = entry else {
                return Err(damaged(
                    disk,
                    number,
                    format!("the batch at {offset} has an entry of an unknown kind"),
                ));
            };
            let place = Place { segment: number, offset: offset as u32 + HEADER as u32 + at };
            take(Item::Entry { place, head, body }, segment)?;
            count += 1;
        }
        if count != header.entries {
            return Err(damaged(
                disk,
                number,
                format!("the batch at {offset} has {count} entries, and should have {}", header.entries),
            ));
        }
        segment.used = offset + header.batch_len();
        let is_sealed = header.flags & FLAG_SEAL != 0;
        *state = Some((header, sum));
        if is_sealed {
            return Ok(false);
        }
    }
}

/// Looks for a batch that can only have been written after a batch which is missing.
fn find_later_batch(
    disk: &dyn Disk,
    segments: &[ScannedSegment],
    last: &Header,
    store: StoreId,
) -> Result<(), EmbeddedOpenError> {
    for segment in segments {
        let mut window = Window::new(segment.file.clone());
        let mut offset = segment.used;
        while offset < segment.len {
            let bytes = window.get(offset, HEADER).map_err(io(disk, segment.number, "read"))?;
            if let Ok((header, _)) = Header::decode(bytes)
                && header.store == store
                && header.sequence > last.sequence
            {
                // Only the header of a torn batch may be there. A whole one was the next if the chain led to it.
                let is_torn = header.sequence == last.sequence + 1 && {
                    let batch = window.get(offset, header.batch_len() as usize);
                    let batch = batch.map_err(io(disk, segment.number, "read"))?;
                    let payload = batch.get(HEADER..HEADER + header.payload_len as usize);
                    payload.is_none_or(|payload| crc32c::crc32c(payload) != header.payload_sum)
                };
                if !is_torn {
                    let text = format!(
                        "the batches after {} cannot be read, although batch {} is at {offset}",
                        last.sequence, header.sequence
                    );
                    return Err(damaged(disk, segment.number, text));
                }
            }
            offset += BLOCK;
        }
    }
    Ok(())
}

/// The last header that can be reached from the start of the newest segment with a valid one. It knows the oldest segment that
/// counts.
fn newest_header(disk: &dyn Disk, segments: &[ScannedSegment]) -> Result<Option<Header>, EmbeddedOpenError> {
    let newest = segments.iter().rev().find_map(|segment| segment.first.map(|first| (segment, first)));
    let Some((segment, mut header)) = newest else { return Ok(None) };
    let mut offset = header.batch_len();
    loop {
        let next = read_header(&*segment.file, offset).map_err(io(disk, segment.number, "read"))?;
        match next {
            Ok((next, _)) if next.sequence == header.sequence + 1 && next.store == header.store => {
                offset += next.batch_len();
                header = next;
            }
            _ => return Ok(Some(header)),
        }
    }
}

fn read_header(file: &dyn SegmentFile, offset: u64) -> std::io::Result<Result<(Header, u32), NoHeader>> {
    let mut bytes = [0; HEADER];
    file.read(&mut bytes, offset)?;
    Ok(Header::decode(&bytes))
}

/// Overwrites everything after the last batch with zeros.
fn clear(disk: &dyn Disk, segment: &ScannedSegment) -> Result<(), EmbeddedOpenError> {
    let number = segment.number;
    let mut window = Window::new(segment.file.clone());
    let mut offset = segment.used;
    while offset < segment.len {
        let bytes = window.get(offset, BLOCK as usize).map_err(io(disk, number, "read"))?;
        if bytes.iter().any(|byte| *byte != 0) {
            let zeros = [0; BLOCK as usize];
            segment.file.write(&zeros, offset).map_err(io(disk, number, "write"))?;
        }
        offset += BLOCK;
    }
    // Zeros, too, that an earlier start wrote and did not flush.
    segment.file.sync().map_err(io(disk, number, "write"))
}

/// A window that moves forward through a file.
struct Window {
    file: Arc<dyn SegmentFile>,
    bytes: Vec<u8>,
    start: u64,
    /// The end of the valid bytes; zeros follow.
    len: usize,
}

impl Window {
    fn new(file: Arc<dyn SegmentFile>) -> Self {
        Self { file, bytes: Vec::new(), start: 0, len: 0 }
    }

    /// The bytes at an offset; beyond the end of the file, fewer.
    fn get(&mut self, offset: u64, len: usize) -> std::io::Result<&[u8]> {
        let inside = |start: u64, held: usize| offset >= start && offset + len as u64 <= start + held as u64;
        if !inside(self.start, self.len) {
            if self.bytes.len() < WINDOW.max(len) {
                self.bytes = vec![0; WINDOW.max(len)];
            }
            self.start = offset;
            self.len = self.file.read(&mut self.bytes, offset)?;
        }
        let from = (offset - self.start) as usize;
        let to = (from + len).min(self.len);
        Ok(self.bytes.get(from.min(to)..to).unwrap_or_default())
    }
}

/// Builds the index from the entries of the log.
struct Builder {
    index: Index,
    segments: Segments,
    audits: VecDeque<(u64, Slot)>,
    shifts: Vec<Shift>,
    /// Identifiers that were read recently, by the last bits of their prefix. Most versions follow each other within
    /// milliseconds, so that few have to be compared on the disk.
    known: Vec<Option<(Place, RecordId)>>,
    /// The records that are added next.
    pending: Vec<(Place, EntryHead)>,
    counts: Counts,
}

/// The live entries. Counted here, because the counters of the store are for many threads.
#[derive(Default)]
struct Counts {
    live: BTreeMap<u32, u64>,
    live_bytes: u64,
    /// The segment that is being read, and its live entries that are not in `live` yet.
    current: (u32, u64),
}

impl Counts {
    fn add(&mut self, slot: &Slot) {
        let number = slot.place().segment;
        if self.current.0 != number {
            self.flush();
            self.current.0 = number;
        }
        self.current.1 += 1;
        self.live_bytes += slot.len();
    }

    fn remove(&mut self, slot: &Slot) {
        let number = slot.place().segment;
        if self.current.0 == number && self.current.1 > 0 {
            self.current.1 -= 1;
        } else if let Some(count) = self.live.get_mut(&number) {
            *count = count.saturating_sub(1);
        }
        self.live_bytes = self.live_bytes.saturating_sub(slot.len());
    }

    fn flush(&mut self) {
        let (number, count) = std::mem::take(&mut self.current);
        *self.live.entry(number).or_default() += count;
    }

    fn publish(mut self, segments: &Segments) {
        self.flush();
        segments.set_counts(&self.live, self.live_bytes);
    }
}

/// The number of identifiers that recovery keeps to compare.
const KNOWN: usize = 1 << 16;

/// The records that are looked up together.
const PENDING: usize = 24;

impl Builder {
    fn new(cache_bytes: usize) -> Self {
        Self {
            index: Index::new(cache_bytes),
            segments: Segments::default(),
            audits: VecDeque::new(),
            shifts: Vec::new(),
            known: vec![None; KNOWN],
            pending: Vec::with_capacity(PENDING),
            counts: Counts::default(),
        }
    }

    fn take(
        &mut self,
        disk: &dyn Disk,
        item: Item<'_>,
        segment: &ScannedSegment,
    ) -> Result<(), EmbeddedOpenError> {
        match item {
            Item::Batch { header, offset } => {
                let current = self.segments.get(segment.number).unwrap_or_else(|| {
                    let new = Arc::new(Segment::new(segment.number, segment.file.clone(), segment.len));
                    self.segments.add(new.clone());
                    new
                });
                current.used.store(offset + header.batch_len(), Ordering::Release);
                Ok(())
            }
            Item::Entry { place, head, body } => {
                match head.kind {
                    Kind::Record => {
                        self.pending.push((place, head));
                        if self.pending.len() >= PENDING {
                            self.add_pending(disk)?;
                        }
                    }
                    Kind::Audit => {
                        self.audit(Slot::new(&head.id, place, head.len() as u64, head.expires), body)
                    }
                    Kind::Shift => {
                        // It concerns the records before it.
                        self.add_pending(disk)?;
                        self.shift(place, body);
                    }
                }
                Ok(())
            }
        }
    }

    /// Adds the records that wait.
    fn add_pending(&mut self, disk: &dyn Disk) -> Result<(), EmbeddedOpenError> {
        let mut pending = std::mem::take(&mut self.pending);
        // The index is larger than the caches of the processor. It waits for the memory of several records at once if nothing
        // between their lookups depends on the one before.
        let touch = |(_, head): &(Place, EntryHead)| {
            let known = self.known.get(prefix(&head.id) as usize % KNOWN);
            let found = self.index.shard_of_mut(&head.id).candidates(&head.id).next();
            found.map_or(0, |slot| slot.expires) ^ known.is_some_and(Option::is_some) as u32
        };
        std::hint::black_box(pending.iter().map(touch).fold(0, |all, one| all ^ one));
        for (place, head) in pending.drain(..) {
            self.record(disk, head.id, Slot::new(&head.id, place, head.len() as u64, head.expires))?;
        }
        self.pending = pending;
        Ok(())
    }

    fn record(&mut self, disk: &dyn Disk, id: RecordId, slot: Slot) -> Result<(), EmbeddedOpenError> {
        let known = prefix(&id) as usize % KNOWN;
        let shard = self.index.shard_of_mut(&id);
        let mut replaced = None;
        let candidates: Vec<Slot> = shard.candidates(&id).collect();
        for old in candidates {
            let old_id = match self.known.get(known) {
                Some(Some((place, id))) if *place == old.place() => *id,
                _ => id_at(disk, &self.segments, old.place())?,
            };
            if old_id == id {
                replaced = shard.replace(old.place(), slot);
            }
        }
        if replaced.is_none() {
            shard.insert(slot);
            self.index.add_record();
        }
        self.counts.add(&slot);
        if let Some(replaced) = replaced {
            self.counts.remove(&replaced);
        }
        if let Some(known) = self.known.get_mut(known) {
            *known = Some((slot.place(), id));
        }
        Ok(())
    }

    fn audit(&mut self, slot: Slot, body: &[u8]) {
        let number = body.first_chunk().map_or(0, |number| u64::from_be_bytes(*number));
        let mut old = None;
        match self.audits.binary_search_by_key(&number, |(number, _)| *number) {
            Ok(found) => {
                old = self.audits.get_mut(found).map(|(_, place)| std::mem::replace(place, slot));
            }
            Err(position) => self.audits.insert(position, (number, slot)),
        }
        self.counts.add(&slot);
        if self.audits.len() as u64 > limits::MAX_AUDIT_ENTRIES {
            old = self.audits.pop_front().map(|(_, slot)| slot);
        }
        if let Some(old) = old {
            self.counts.remove(&old);
        }
    }

    fn shift(&mut self, place: Place, body: &[u8]) {
        let Some(shift) = Shift::decode(place, body) else { return };
        let seconds = shift.seconds();
        self.shifts.push(shift);
        (0..SHARDS).for_each(|number| self.index.shard(number).postpone(seconds));
    }
}

/// The identifier of the entry at this place.
fn id_at(disk: &dyn Disk, segments: &Segments, place: Place) -> Result<RecordId, EmbeddedOpenError> {
    let mut bytes = [0; ENTRY];
    if let Some(segment) = segments.get(place.segment) {
        segment.file.read(&mut bytes, place.offset.into()).map_err(io(disk, place.segment, "read"))?;
    }
    match EntryHead::decode(&bytes) {
        Some(head) => Ok(head.id),
        None => Err(damaged(
            disk,
            place.segment,
            format!("the entry at {} changed while it was read", place.offset),
        )),
    }
}

impl Recovered {
    /// Removes the records that are past their retention.
    pub(crate) fn remove_expired(&self, now: Timestamp) {
        let now = u32::try_from(now.as_millis() / 1000).unwrap_or(u32::MAX);
        for number in 0..SHARDS {
            let (removed, _) = self.index.shard(number).remove_expired(now, usize::MAX);
            self.index.remove_records(removed.len() as u64);
            self.segments.discount(&removed);
        }
    }
}
