//! The thread that writes: group commit, the change to the next segment, and recovery from failed writes.
//!
//! One round of [`Writer::run`]:
//!
//! 1. Take the batch that was filled while the last one was written.
//! 2. Append it to the segment, and return when it is on the disk.
//! 3. Check that the segment's name still leads to its file.
//! 4. Put its entries into the index, and only then answer those who wait for it.
//!
//! Nothing is written after a batch before that batch is on the disk. So a batch on the disk proves that all before it are
//! complete, and only the last one can be torn by a crash. While nothing comes, the writer appends an empty batch within
//! [`PROOF_DELAY`], so that the last acknowledged batch is proved, too.
//!
//! A flush that fails is never tried again on the same file, because the operating system may have dropped the data. The writer
//! appends the batch to a new segment instead. If that fails as well, the callers get an error, the batch is kept, and the
//! writer tries again after pauses that grow from 50 ms to 5 s. Reads of what is on the disk go on.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use oncegate_core::{ErrorChain, LastWrite};
use tracing::{error, info, warn};

use crate::disk::Disk;
use crate::format::{
    BLOCK, FLAG_CLOSED, FLAG_SEAL, HEADER, Header, Kind, batch_len, entries, segment_blocks,
};
use crate::index::{Place, Slot};
use crate::inner::{DurableEnd, StoreInner};
use crate::mark::Mark;
use crate::segments::{Segment, Spare};
use crate::tail::{Batch, Work};

/// The time after which a batch is proved by an empty one after it.
const PROOF_DELAY: Duration = Duration::from_millis(100);

/// The first pause between attempts to write. Each pause is twice as long as the one before it.
const MIN_RETRY_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause between attempts to write.
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(5);

/// The largest buffer that is kept for the next batch.
const MAX_KEPT_BUFFER: usize = 4 * 1024 * 1024;

/// The end of the log: where the next batch goes.
pub(crate) struct LogEnd {
    pub(crate) segment: Arc<Segment>,
    pub(crate) offset: u64,
    /// The number of the next batch.
    pub(crate) sequence: u64,
    /// The checksum of the last header.
    pub(crate) chain: u32,
}

/// The state of the writer's thread.
pub(crate) struct Writer {
    pub(crate) inner: Arc<StoreInner>,
    pub(crate) end: LogEnd,
    /// The clocks of the last batch.
    pub(crate) last_write: LastWrite,
    /// The last write failed: the next one goes to another file.
    pub(crate) has_failed: bool,
    /// The next segment, if it was taken and is not in use yet.
    pub(crate) next: Option<Arc<Segment>>,
}

impl Writer {
    /// Runs the thread until the store is closed and everything that was appended is written.
    pub(crate) fn run(mut self) {
        // Runs even if this thread panics, so that no caller waits forever.
        let _close_on_drop = CloseOnDrop(self.inner.clone());
        // The last batch before this start is proved at once.
        let mut proof_due = Some(Instant::now());
        let mut buffer = Vec::new();
        loop {
            match self.inner.tail.take(proof_due, std::mem::take(&mut buffer), || self.inner.clocks()) {
                Work::Write(batch) => {
                    proof_due = (batch.entries > 0).then(|| Instant::now() + PROOF_DELAY);
                    match self.commit(batch) {
                        Some(bytes) => buffer = bytes,
                        None => return,
                    }
                }
                Work::Idle(batch) => {
                    proof_due = None;
                    if self.commit(batch).is_none() {
                        return;
                    }
                }
                Work::Closed(mut last) => {
                    last.flags = FLAG_CLOSED;
                    if let Err(error) = self.append(&mut last) {
                        warn!(error = %ErrorChain(&error), "the end of the log could not be written when the store was closed");
                    }
                    return;
                }
            }
        }
    }

    /// Writes a batch, tries until that succeeds, and answers it. Returns its buffer; `None` if the store was closed before.
    fn commit(&mut self, batch: Batch) -> Option<Vec<u8>> {
        let mut batches = VecDeque::from([batch]);
        let mut pause = Duration::ZERO;
        loop {
            let batch = batches.front_mut()?;
            match self.write(batch) {
                Ok(()) => {
                    let mut bytes = batches.pop_front().map(|batch| batch.bytes).unwrap_or_default();
                    if batches.is_empty() {
                        if self.inner.tail.recover() {
                            info!("the embedded store can be written to again");
                        }
                        if bytes.capacity() > MAX_KEPT_BUFFER {
                            bytes = Vec::new();
                        }
                        return Some(bytes);
                    }
                }
                Err(error) if pause.is_zero() => {
                    warn!(error = %ErrorChain(&error), "a write to the embedded store failed and is tried again");
                    pause = MIN_RETRY_PAUSE;
                }
                Err(error) => {
                    let reason: Arc<str> = ErrorChain(&error).to_string().into();
                    let ticket = batch.ticket.clone();
                    if pause == MIN_RETRY_PAUSE {
                        error!(%reason, "the embedded store cannot be written to: recorded keys are answered, and nothing new is executed");
                    }
                    // Its commands were decided, and follow as soon as this batch is written.
                    batches.extend(self.inner.tail.fail(&reason, || self.inner.clocks()));
                    // Who gets this error finds the store refusing writes.
                    ticket.end(Err(reason));
                    if !self.inner.tail.pause(pause) {
                        return None;
                    }
                    pause = (pause * 2).min(MAX_RETRY_PAUSE);
                }
            }
        }
    }

    /// Writes a batch and answers it. After an error, the next call tries again in another segment.
    fn write(&mut self, batch: &mut Batch) -> io::Result<()> {
        if self.has_failed {
            self.advance()?;
            self.has_failed = false;
        }
        if batch.offset.is_none() {
            self.has_failed = true;
            batch.offset = Some(self.append(batch)?);
            self.has_failed = false;
        }
        // If the file was moved, its batches are found again once it is moved back.
        self.inner.disk.check_in_place(self.end.segment.number, &*self.end.segment.file)?;
        self.publish(batch);
        batch.ticket.end(Ok(()));
        Ok(())
    }

    /// Appends a batch, and returns its offset when it is on the disk.
    fn append(&mut self, batch: &mut Batch) -> io::Result<u64> {
        let len = batch_len((batch.bytes.len() - HEADER) as u64);
        let is_full = self.end.offset + len + BLOCK > self.end.segment.size;
        let is_wanted = self.inner.wants_segment.swap(false, Ordering::SeqCst);
        // A segment that is only wanted must not fail the batch.
        let next = match self.end.offset > 0 && (is_full || is_wanted) {
            true => match self.next_segment() {
                Err(error) if !is_full => {
                    warn!(error = %ErrorChain(&error), "the embedded store cannot begin the segment that a compaction needs");
                    None
                }
                next => Some(next?),
            },
            false => None,
        };
        if let Some(next) = next {
            // The next segment is there before this one says so: a start refuses a log that ends with a seal.
            self.next = Some(next.clone());
            let mut seal = Batch::new(Vec::new());
            seal.flags = FLAG_SEAL;
            self.append_here(&mut seal)?;
            self.continue_in(next);
        }
        self.append_here(batch)
    }

    fn append_here(&mut self, batch: &mut Batch) -> io::Result<u64> {
        let written = batch.written.unwrap_or(self.last_write);
        self.last_write = LastWrite { time: written.time.max(self.last_write.time), ..written };
        let payload = batch.bytes.get(HEADER..).unwrap_or_default();
        let header = Header {
            flags: batch.flags,
            store: self.inner.store,
            segment: self.end.segment.number,
            segment_blocks: segment_blocks(self.end.segment.size),
            oldest: self.inner.oldest.load(Ordering::SeqCst),
            sequence: self.end.sequence,
            written: self.last_write,
            payload_len: payload.len() as u32,
            entries: batch.entries,
            payload_sum: crc32c::crc32c(payload),
            previous: self.end.chain,
        };
        let (encoded, sum) = header.encode();
        if let Some(place) = batch.bytes.first_chunk_mut() {
            *place = encoded;
        }
        let (len, offset) = (batch.bytes.len(), self.end.offset);
        batch.bytes.resize(header.batch_len() as usize, 0);
        let written = self.end.segment.file.write_durably(&batch.bytes, offset);
        batch.bytes.truncate(len);
        written?;
        self.end.offset += header.batch_len();
        self.end.sequence += 1;
        self.end.chain = sum;
        let end = DurableEnd { mark: Mark::of(&header, sum), is_sealed: header.flags & FLAG_SEAL != 0 };
        self.inner.set_end(end, &self.end.segment, self.end.offset);
        Ok(offset)
    }

    /// Continues in the next segment, or in a new file for this one if nothing in it counts.
    fn advance(&mut self) -> io::Result<()> {
        let next = self.next_segment()?;
        self.continue_in(next);
        Ok(())
    }

    fn next_segment(&self) -> io::Result<Arc<Segment>> {
        if let Some(next) = &self.next {
            return Ok(next.clone());
        }
        let is_replaced = self.end.offset == 0;
        let number = self.end.segment.number + u32::from(!is_replaced);
        let spare = if is_replaced { None } else { self.inner.spare.take() };
        if let Some(spare) = spare {
            return Ok(spare);
        }
        // Batches wait for it, so without pauses.
        let made = prepare(&*self.inner.disk, number, self.inner.sizes.first_segment, |_| {});
        if !is_replaced {
            self.inner.spare.give_back(match &made {
                Ok(_) => Spare::Wanted(number + 1),
                Err(_) => Spare::Failed(number),
            });
        }
        made
    }

    fn continue_in(&mut self, segment: Arc<Segment>) {
        self.next = None;
        self.inner.segments.add(segment.clone());
        self.end.segment = segment;
        self.end.offset = 0;
        self.inner.look();
    }

    /// Puts the entries of a batch that is on the disk into the index.
    fn publish(&self, batch: &Batch) {
        let inner = &*self.inner;
        let base = batch.offset.unwrap_or_default();
        let segment = self.end.segment.number;
        let place = |offset: u32| Place { segment, offset: base as u32 + offset };
        let payload = batch.bytes.get(HEADER..).unwrap_or_default();
        let mut copies = batch.copies.iter().peekable();
        let found = || entries(payload).flatten().map(|(at, head, body)| (at + HEADER as u32, head, body));
        for (offset, head, body) in found() {
            let slot = Slot::new(&head.id, place(offset), head.len() as u64, head.expires);
            let copy_of = copies.next_if(|(at, _)| *at == offset).map(|(_, old)| *old);
            match head.kind {
                Kind::Record => inner.publish_record(&head.id, slot, copy_of),
                Kind::Audit => inner.publish_audit(slot, body, copy_of),
                Kind::Shift => inner.publish_shift(place(offset)),
            }
        }
        for (_, head, _) in found().filter(|(_, head, _)| head.kind == Kind::Record) {
            inner.index.shard_of(&head.id).unpin(&head.id, &batch.ticket, inner.index.shard_cache());
        }
    }
}

/// Makes a segment of zeros.
///
/// Zeros, because the file system would otherwise journal the length of the file, or the first write to each block, with each
/// batch. They are flushed in pieces, because flushes of batches wait behind them. `pace` is called between them, with the bytes
/// so far.
pub(crate) fn prepare(
    disk: &dyn Disk,
    number: u32,
    size: u64,
    mut pace: impl FnMut(u64),
) -> io::Result<Arc<Segment>> {
    static ZEROS: [u8; 1024 * 1024] = [0; 1024 * 1024];
    let file = disk.create(number)?;
    let mut offset = 0;
    while offset < size {
        let count = (size - offset).min(ZEROS.len() as u64);
        file.write(ZEROS.get(..count as usize).unwrap_or(&ZEROS), offset)?;
        offset += count;
        if offset < size {
            file.sync()?;
            pace(offset);
        }
    }
    file.sync()?;
    disk.publish(number)?;
    Ok(Arc::new(Segment::new(number, file, size)))
}

/// Ends all waits when the writer ends, also by a panic.
struct CloseOnDrop(Arc<StoreInner>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.tail.abandon(&"the embedded store is closed".into());
    }
}
