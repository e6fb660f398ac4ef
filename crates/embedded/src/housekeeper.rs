//! The thread that keeps house: purges, compaction, deletion of segments, corrections of the clock, the mark. And the one that
//! prepares segments.
//!
//! Segments are deleted and compacted strictly from the oldest. So an old version of a record never outlives a newer one, and no
//! entry has to say that a record is gone: after its retention it counts as absent, whether the log still has it or not.
//!
//! - The oldest segment without live entries is deleted. First a batch says durably that it counts no more.
//! - If the sealed segments take more than twice the bytes of the live entries, and a segment more (less if the disk is nearly
//!   full), the live entries of the oldest are copied to the end of the log. Copies are normal entries of normal batches, at most
//!   [`COPY_BYTES`] in one.
//! - Segments that an operator wants to go ([`EmbeddedStore::begin_compaction`](crate::EmbeddedStore::begin_compaction)) are
//!   compacted however much of them is alive, so that no old version of a record is left.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use oncegate_core::{Clock as _, ClockSkew, ErrorChain, StoreError, codec, limits};
use tracing::{error, info, warn};

use crate::format::{BLOCK, EntryHead, HEADER, Header, Kind, entries, expiry_seconds};
use crate::index::{Place, SHARDS};
use crate::inner::{Chore, Shift, Sizes, StoreInner};
use crate::mark::Marker;
use crate::queue::TakeResult;
use crate::segments::{Segment, Spare};
use crate::shared::closed_error;
use crate::ticket::Ticket;
use crate::writer::prepare;

/// The interval of looks at the disk, the clock and the segments.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// The most bytes of copies in one batch, so that they do not delay other commands.
const COPY_BYTES: usize = 128 * 1024;

/// The pause after each piece of a segment that is prepared ahead of time.
const PREPARE_PAUSE: Duration = Duration::from_millis(25);

/// The pause after a segment could not be prepared.
const PREPARE_RETRY: Duration = Duration::from_millis(200);

/// The time within which a segment is filled quickly.
const QUICKLY: Duration = Duration::from_secs(60);

/// The state of the housekeeper's thread.
pub(crate) struct Housekeeper {
    inner: Arc<StoreInner>,
    /// The shard at which the next purge continues.
    purged_to: usize,
    /// The position in the oldest segment at which its compaction continues.
    copied_to: (u32, u64),
    /// The segment that cannot be compacted because it is damaged.
    damaged: Option<u32>,
    /// The segments that count no more and could not be removed yet.
    unremoved: Vec<u32>,
    /// The last attempt to free a segment failed, and this was logged.
    cannot_free: bool,
    /// The disagreement of the two clocks that the log has reported, until it reports that they agree again.
    reported_skew: Option<ClockSkew>,
    marker: Marker,
}

impl Housekeeper {
    pub(crate) fn new(inner: Arc<StoreInner>, marker: Marker) -> Self {
        Self {
            inner,
            purged_to: 0,
            copied_to: (0, 0),
            damaged: None,
            unremoved: Vec::new(),
            cannot_free: false,
            reported_skew: None,
            marker,
        }
    }

    /// Runs the thread until the store is closed.
    pub(crate) fn run(mut self) {
        let _close_on_drop = CloseOnDrop(self.inner.clone());
        let mut look_at = Instant::now();
        let mut is_busy = false;
        loop {
            let deadline = if is_busy { Instant::now() } else { look_at };
            match self.inner.chores.take(64, usize::MAX, |_| 1, Some(deadline)) {
                TakeResult::Jobs(chores) => chores.into_iter().for_each(|chore| self.answer(chore)),
                TakeResult::TimedOut => {}
                TakeResult::Closed => {
                    // The writer has ended, so this is the last batch.
                    self.write_mark();
                    return;
                }
            }
            if Instant::now() >= look_at {
                self.inner.look_at_capacity();
                self.report_skew();
                if self.marker.is_due(&self.inner.durable()) {
                    self.write_mark();
                }
                look_at = Instant::now() + LOOK_INTERVAL;
            }
            is_busy = match self.free_segments() {
                Ok(is_busy) => {
                    self.cannot_free = false;
                    is_busy
                }
                Err(error) => {
                    if !std::mem::replace(&mut self.cannot_free, true) {
                        warn!(error = %ErrorChain(&error), "old segments of the embedded store cannot be freed now; this is tried again");
                    }
                    false
                }
            };
        }
    }

    /// Writes the mark of the last batch that is on the disk.
    pub(crate) fn write_mark(&mut self) {
        let failure = self.marker.write(&*self.inner.disk, self.inner.durable());
        *self.inner.mark_failure() = failure;
    }

    fn answer(&mut self, chore: Chore) {
        // A send fails if the caller has gone away.
        match chore {
            Chore::Purge { limit, reply } => {
                if !reply.is_closed() {
                    let _ = reply.send(Ok(self.purge(limit)));
                }
            }
            Chore::AcceptClock { reply } => {
                let _ = reply.send(self.accept_clock());
            }
            Chore::Look => {}
        }
    }

    /// Removes records past their retention from the index. Visits each shard at most once.
    fn purge(&mut self, limit: usize) -> usize {
        let now = u32::try_from(self.inner.clock.now().as_millis() / 1000).unwrap_or(u32::MAX);
        let mut purged = 0;
        for _ in 0..SHARDS {
            if purged >= limit {
                break;
            }
            let (slots, continued) =
                self.inner.index.shard(self.purged_to).remove_expired(now, limit - purged);
            self.inner.index.remove_records((slots.len() as u64).saturating_sub(continued));
            self.inner.segments.discount(&slots);
            purged += slots.len();
            if purged < limit {
                self.purged_to = (self.purged_to + 1) % SHARDS;
            }
        }
        purged
    }

    /// Deletes or compacts the oldest segments. Returns true if there is more to do.
    fn free_segments(&mut self) -> Result<bool, StoreError> {
        while let Some(number) = self.unremoved.last() {
            let io = |error| StoreError::unavailable("a segment cannot be removed").with_source(error);
            self.inner.disk.remove(*number).map_err(io)?;
            self.unremoved.pop();
            self.count_unremoved();
        }
        let Some(oldest) = self.inner.segments.oldest_sealed() else { return Ok(false) };
        if oldest.is_dead() {
            self.delete(&oldest)?;
            return Ok(true);
        }
        let live = self.inner.segments.live_bytes();
        // The lengths in the index are rounded up, by an eighth at most.
        let slack = match self.inner.disk.free() {
            _ if self.inner.is_disk_low() => 0,
            Some(free) => self.inner.sizes.slack.min(free / 4),
            None => self.inner.sizes.slack,
        };
        let enough = live / 9 * 16 + slack;
        let is_forced = oldest.number < self.inner.compacted_below.load(Ordering::SeqCst);
        if !is_forced && self.inner.segments.sealed_bytes() <= enough || self.damaged == Some(oldest.number) {
            return Ok(false);
        }
        self.compact(&oldest)
    }

    fn delete(&mut self, segment: &Segment) -> Result<(), StoreError> {
        // Once a batch says so, a start does not miss the segment.
        self.inner.oldest.store(segment.number + 1, Ordering::SeqCst);
        let said = self.inner.tail.want_batch()?;
        wait(&said)?;
        // Counted first, so that no one finds the segment gone and its file still there.
        self.inner.unremoved.fetch_add(1, Ordering::SeqCst);
        self.inner.segments.remove(segment.number);
        self.inner
            .shifts
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|shift| shift.place.is_none_or(|place| place.segment > segment.number));
        self.unremoved.push(segment.number);
        self.count_unremoved();
        Ok(())
    }

    fn count_unremoved(&self) {
        let count = u32::try_from(self.unremoved.len()).unwrap_or(u32::MAX);
        self.inner.unremoved.store(count, Ordering::SeqCst);
    }

    /// Copies live entries of a segment to the end of the log, at most [`COPY_BYTES`], or those of one batch. Returns
    /// true if there is more to do now.
    fn compact(&mut self, segment: &Arc<Segment>) -> Result<bool, StoreError> {
        if self.copied_to.0 != segment.number {
            self.copied_to = (segment.number, 0);
        }
        let mut copied = 0;
        let mut ticket = None;
        while copied < COPY_BYTES && self.copied_to.1 < segment.used() {
            let Some((header, payload)) = read_batch(segment, self.copied_to.1)? else {
                error!(
                    segment = segment.number,
                    offset = self.copied_to.1,
                    "a segment of the embedded store is damaged and is kept: run `oncegate check`"
                );
                self.damaged = Some(segment.number);
                self.inner.report_damage();
                break;
            };
            let base = self.copied_to.1 as u32 + HEADER as u32;
            for (at, head, body) in entries(&payload).flatten() {
                let place = Place { segment: segment.number, offset: base + at };
                if let Some(end) = self.copy(place, &head, body)? {
                    copied += head.len();
                    ticket = Some(end);
                }
            }
            self.copied_to.1 += header.batch_len();
        }
        if let Some(ticket) = ticket {
            wait(&ticket)?;
        }
        if self.copied_to.1 < segment.used() {
            return Ok(true);
        }
        self.copied_to = (0, 0);
        // If entries are alive nevertheless, their newer versions were not on the disk yet. The next look finds them there.
        Ok(segment.is_dead())
    }

    /// Copies the entry at this place if it is alive.
    fn copy(&self, place: Place, head: &EntryHead, body: &[u8]) -> Result<Option<Arc<Ticket>>, StoreError> {
        let inner = &*self.inner;
        match head.kind {
            Kind::Record => {
                // The lock is held until the copy is appended. So no newer version can get in front of it.
                let shard = inner.index.shard_of(&head.id);
                let is_indexed = shard.candidates(&head.id).any(|slot| slot.place() == place);
                let is_outdated = shard.recent(&head.id).is_some_and(|recent| recent.pending.is_some());
                if !is_indexed || is_outdated {
                    return Ok(None);
                }
                let mut head = *head;
                let mut shifted = None;
                if !inner.shifts.read().unwrap_or_else(PoisonError::into_inner).is_empty()
                    && let Ok(record) = codec::decode(&head.id, body)
                {
                    let record = inner.shifted(record, place);
                    let body = shifted.insert(codec::encode(&head.id, &record));
                    head = EntryHead {
                        body_len: body.len() as u32,
                        expires: expiry_seconds(record.expires_at),
                        ..head
                    };
                }
                let body = shifted.as_deref().unwrap_or(body);
                inner.tail.append_copy(&head, body, place).map(Some)
            }
            Kind::Audit => {
                let is_kept = inner.audits().iter().any(|(_, slot)| slot.place() == place);
                if is_kept { inner.tail.append_copy(head, body, place).map(Some) } else { Ok(None) }
            }
            // The records before it are copied with their new times.
            Kind::Shift => Ok(None),
        }
    }

    fn accept_clock(&self) -> Result<Option<Duration>, StoreError> {
        let Some((by, ticket)) = self.inner.accept_clock()? else { return Ok(None) };
        wait(&ticket)?;
        Ok(Some(by))
    }

    /// Logs when the two clocks begin or cease to disagree, or when the clock was set once more.
    fn report_skew(&mut self) {
        match self.inner.clock.skew() {
            Some(skew) if skew.is_expected => self.inner.follow_clock(),
            Some(skew) => {
                let is_reported = self.reported_skew.is_some_and(|reported| {
                    reported.is_ahead == skew.is_ahead
                        && reported.by.abs_diff(skew.by) <= limits::MAX_CLOCK_STEP
                });
                if !is_reported {
                    warn!(seconds = skew.by.as_secs(), "{skew}");
                    self.reported_skew = Some(skew);
                }
            }
            None => {
                if self.reported_skew.take().is_some() {
                    info!("the clock of this machine and the time of the store agree again");
                }
            }
        }
    }
}

impl StoreInner {
    /// Follows a correction of the machine's clock if the clock was known to be wrong when the store was opened. Otherwise an
    /// operator has to accept it.
    pub(crate) fn follow_clock(&self) {
        if self.clock.skew().is_some_and(|skew| skew.is_expected) {
            match self.accept_clock() {
                Ok(Some((by, _))) => info!(
                    seconds = by.as_secs(),
                    "the clock of this machine was corrected: the time of the store follows it"
                ),
                Ok(None) => {}
                Err(error) => {
                    warn!(error = %ErrorChain(&error), "the time of the store cannot follow the clock now")
                }
            }
        }
    }

    /// Moves the store's clock ahead to the time of day, and with it the times of the records that were written since the two
    /// disagree.
    pub(crate) fn accept_clock(&self) -> Result<Option<(Duration, Arc<Ticket>)>, StoreError> {
        // Nothing is decided meanwhile, by the old time or by the new one.
        let mut shards: Vec<_> = (0..SHARDS).map(|number| self.index.shard(number)).collect();
        let Some(skew) = self.clock.skew().filter(|skew| skew.is_ahead) else { return Ok(None) };
        let millis = u64::try_from(skew.by.as_millis()).unwrap_or(u64::MAX);
        let body = [skew.since.as_millis().to_be_bytes(), millis.to_be_bytes()].concat();
        // Locked before the entry is appended, because the writer sets its place as soon as it is on the disk.
        let mut shifts = self.shifts.write().unwrap_or_else(PoisonError::into_inner);
        let ticket = self.tail.append_shift(&body, || self.clock.accept(skew.by))?;
        shifts.push(Shift { place: None, since: skew.since, by: skew.by });
        drop(shifts);
        for shard in &mut shards {
            shard.postpone(u32::try_from(millis.div_ceil(1000)).unwrap_or(u32::MAX));
            for recent in shard.recent_values_mut().filter(|recent| recent.record.changed_at >= skew.since) {
                recent.record = recent.record.clone().shifted(skew.by);
            }
        }
        Ok(Some((skew.by, ticket)))
    }
}

/// Reads a batch of a segment. `None` if it is damaged.
fn read_batch(segment: &Segment, offset: u64) -> Result<Option<(Header, Vec<u8>)>, StoreError> {
    let io = |error| StoreError::unavailable("the embedded store cannot read its files").with_source(error);
    let mut bytes = [0; HEADER];
    segment.file.read(&mut bytes, offset).map_err(io)?;
    let Ok((header, _)) = Header::decode(&bytes) else { return Ok(None) };
    let mut payload = vec![0; header.payload_len as usize];
    let count = segment.file.read(&mut payload, offset + HEADER as u64).map_err(io)?;
    let is_sound = count == payload.len() && crc32c::crc32c(&payload) == header.payload_sum;
    Ok(is_sound.then_some((header, payload)))
}

fn wait(ticket: &Ticket) -> Result<(), StoreError> {
    ticket.wait_blocking().map_err(|reason| StoreError::unavailable(&*reason))
}

/// Prepares segments ahead, until the store is closed.
pub(crate) fn prepare_segments(inner: &StoreInner) {
    let Sizes { first_segment, max_segment, .. } = inner.sizes;
    let _gone_on_drop = GoneOnDrop(inner);
    let (mut bytes, mut began) = (first_segment, Instant::now());
    while let Some(number) = inner.spare.wait_wanted(PREPARE_RETRY) {
        if began.elapsed() < QUICKLY {
            bytes = (bytes * 4).min(max_segment);
        }
        // On a small disk, space that is prepared for later is missing now.
        let free = inner.disk.free().unwrap_or(u64::MAX);
        bytes = bytes.min((free / 8).next_multiple_of(BLOCK)).max(first_segment);
        // Ready when half of the segment that is being written is full, or after some seconds if little is written.
        let pace = |done: u64| {
            let (used, size) = inner.segments.filled();
            if u128::from(done) * u128::from(size) > 2 * u128::from(used) * u128::from(bytes) {
                inner.spare.pause(PREPARE_PAUSE);
            }
        };
        match prepare(&*inner.disk, number, bytes, pace) {
            Ok(segment) => inner.spare.set(Spare::Ready(segment)),
            Err(error) => {
                // A smaller one may still find space.
                bytes = (bytes / 16).max(first_segment);
                if !inner.spare.has_failed() {
                    warn!(error = %ErrorChain(&error), "the embedded store cannot prepare its next segment: new keys are refused");
                }
                inner.spare.set_failed(number, ErrorChain(&error).to_string());
            }
        }
        began = Instant::now();
        inner.look();
    }
}

struct GoneOnDrop<'a>(&'a StoreInner);

impl Drop for GoneOnDrop<'_> {
    fn drop(&mut self) {
        self.0.spare.set(Spare::Gone);
    }
}

/// Closes the queue and answers waiting callers when the thread ends, also by a panic.
struct CloseOnDrop(Arc<StoreInner>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.chores.close();
        while let TakeResult::Jobs(chores) = self.0.chores.take(usize::MAX, usize::MAX, |_| 1, None) {
            for chore in chores {
                match chore {
                    Chore::Purge { reply, .. } => drop(reply.send(Err(closed_error()))),
                    Chore::AcceptClock { reply } => drop(reply.send(Err(closed_error()))),
                    Chore::Look => {}
                }
            }
        }
    }
}
