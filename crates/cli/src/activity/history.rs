//! The last events of records, by shard.

use oncegate_core::{FencingToken, RecordId, Timestamp};
use oncegate_engine::EventKind;
use oncegate_http::{Condition, Disposition, ShadowVerdict};

use super::is_unknown;
use super::recent::{RecentEntry, RecentTable};

/// The ordinary events that a shard keeps: 64 bytes each, and 64 shards.
const ORDINARY: usize = 1024;

/// The rare events that a shard keeps.
const RARE: usize = 512;

/// The sets of records whose repeated requests a shard counts.
const SETS: usize = 32;

/// A key that is sent this often in [`LOOP_WINDOW`] is a tight loop. A client that retries with a backoff sends a few requests.
const LOOP_REQUESTS: u32 = 30;
const LOOP_WINDOW: u64 = 10_000;

/// An event of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TimelineEvent {
    pub(crate) at: Timestamp,
    pub(crate) token: Option<FencingToken>,
    pub(crate) kind: EventKind,
}

/// The request or event that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RepeatKind {
    /// A request got the stored response.
    Replayed,
    /// A request found the first one in progress.
    InProgress,
    /// A request with the key differed from the first one.
    Mismatch,
    /// A request was refused because the outcome is unknown or the response is lost.
    Unknown,
    /// A request was refused for another reason.
    Refused,
    /// The owner renewed its lease.
    Renewed,
}

impl RepeatKind {
    pub(crate) const ALL: [Self; 6] =
        [Self::Replayed, Self::InProgress, Self::Mismatch, Self::Unknown, Self::Refused, Self::Renewed];

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Replayed => "replayed",
            Self::InProgress => "in-progress",
            Self::Mismatch => "mismatch",
            Self::Unknown => "unknown",
            Self::Refused => "refused",
            Self::Renewed => "renewed",
        }
    }

    /// The kind of a request with this outcome; `None` if it has events of its own.
    pub(super) const fn of(disposition: Disposition) -> Option<Self> {
        Some(match disposition {
            Disposition::Replayed => Self::Replayed,
            Disposition::Refused(Condition::RequestInProgress) => Self::InProgress,
            Disposition::Refused(Condition::KeyReused | Condition::HostDiffers) => Self::Mismatch,
            Disposition::Refused(condition) if is_unknown(condition) => Self::Unknown,
            Disposition::Refused(_) => Self::Refused,
            // On the record of an observed request: what would have been.
            Disposition::Shadow(ShadowVerdict::Replayed) => Self::Replayed,
            Disposition::Shadow(ShadowVerdict::Refused(condition)) => {
                return Self::of(Disposition::Refused(condition));
            }
            _ => return None,
        })
    }
}

/// The number of repetitions of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Repeat {
    pub(crate) kind: RepeatKind,
    pub(crate) count: u32,
    pub(crate) last: Timestamp,
}

/// The events of the records of one shard.
#[derive(Debug, Default)]
pub(super) struct History {
    ordinary: Ring<ORDINARY>,
    rare: Ring<RARE>,
    repeats: RecentTable<Repeats, SETS>,
}

impl History {
    pub(super) fn add(&mut self, id: RecordId, event: TimelineEvent) {
        let entry = Entry { id, event };
        match event.kind {
            // Requests are counted with the response that their client got.
            EventKind::Replayed { .. }
            | EventKind::InProgress
            | EventKind::Mismatch
            | EventKind::Unknown
            | EventKind::Unreplayable => {}
            EventKind::Renewed => {
                self.repeat(id, RepeatKind::Renewed, event.at, false);
            }
            EventKind::Executing { after_abandoned: false, .. }
            | EventKind::Executed
            | EventKind::Completed
            | EventKind::Tombstoned
            | EventKind::Released
            | EventKind::CompletedUpstream => self.ordinary.push(entry),
            _ => {
                // The start of a failed attempt is worth as much as its end, so ordinary requests must not replace it either.
                if let Some(start) = self.ordinary.take_start(&entry) {
                    self.rare.push(start);
                }
                self.rare.push(entry);
            }
        }
    }

    /// Counts a repetition. True if it makes the requests with this key a tight loop, once in each [`LOOP_WINDOW`].
    ///
    /// A request that executed belongs to a loop, too, but repeats nothing: its execution has events of its own.
    pub(super) fn repeat(
        &mut self,
        id: RecordId,
        kind: RepeatKind,
        at: Timestamp,
        has_executed: bool,
    ) -> bool {
        let at = at.as_millis();
        let is_it = |repeats: &Repeats| repeats.id == id;
        let Some(repeats) = self.repeats.entry(hash(&id), is_it, || Repeats::new(id)) else { return false };
        repeats.last = at;
        if let Some((count, last)) = repeats.counts.get_mut(kind as usize).filter(|_| !has_executed) {
            *count = count.saturating_add(1);
            *last = at;
        }
        if kind == RepeatKind::Renewed {
            return false;
        }
        if at.saturating_sub(repeats.window) > LOOP_WINDOW {
            (repeats.window, repeats.in_window) = (at, 0);
        }
        repeats.in_window = repeats.in_window.saturating_add(1);
        repeats.in_window == LOOP_REQUESTS
    }

    pub(super) fn timeline(&self, id: &RecordId) -> super::Timeline {
        let events = self.ordinary.entries.iter().chain(&self.rare.entries);
        let mut events: Vec<_> = events.filter(|entry| entry.id == *id).map(|entry| entry.event).collect();
        // The sort is stable, and the entries of each ring are in order after this, except that a ring may begin in its middle.
        events.sort_by_key(|event| (event.at, rank(event.kind)));
        let counts = self.repeats.get(hash(id), |repeats| repeats.id == *id).map(|repeats| repeats.counts);
        let repeats = RepeatKind::ALL.into_iter().zip(counts.unwrap_or_default());
        let repeats = repeats.filter(|(_, (count, _))| *count > 0).map(|(kind, (count, last))| Repeat {
            kind,
            count,
            last: Timestamp::from_millis(last),
        });
        super::Timeline { events, repeats: repeats.collect() }
    }
}

/// The order of events of the same millisecond: an attempt begins before it ends.
const fn rank(kind: EventKind) -> u8 {
    match kind {
        EventKind::Executing { .. } => 0,
        EventKind::Executed => 1,
        _ => 2,
    }
}

/// The first byte chooses the shard.
fn hash(id: &RecordId) -> usize {
    let [_, second, ..] = *id.as_bytes();
    usize::from(second)
}

/// The repetitions of one record.
#[derive(Debug)]
struct Repeats {
    id: RecordId,
    counts: [(u32, u64); RepeatKind::ALL.len()],
    last: u64,
    /// The start of the window in which requests are counted, and their number.
    window: u64,
    in_window: u32,
}

impl Repeats {
    const fn new(id: RecordId) -> Self {
        Self { id, counts: [(0, 0); RepeatKind::ALL.len()], last: 0, window: 0, in_window: 0 }
    }
}

impl RecentEntry for Repeats {
    fn last(&self) -> u64 {
        self.last
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    id: RecordId,
    event: TimelineEvent,
}

/// The last `N` entries. The memory is allocated with the first one.
#[derive(Debug, Default)]
struct Ring<const N: usize> {
    entries: Vec<Entry>,
    /// The place of the oldest entry, once all are taken.
    next: usize,
}

impl<const N: usize> Ring<N> {
    fn push(&mut self, entry: Entry) {
        if self.entries.len() < N {
            if self.entries.is_empty() {
                self.entries.reserve_exact(N);
            }
            self.entries.push(entry);
        } else if let Some(oldest) = self.entries.get_mut(self.next) {
            *oldest = entry;
            self.next = (self.next + 1) % N;
        }
    }

    /// Removes and returns the start of the attempt to which this entry belongs.
    fn take_start(&mut self, of: &Entry) -> Option<Entry> {
        let is_start = |entry: &&mut Entry| {
            matches!(entry.event.kind, EventKind::Executing { .. })
                && entry.id == of.id
                && entry.event.token == of.event.token
        };
        let start = self.entries.iter_mut().find(is_start)?;
        let taken = *start;
        // Its place is replaced like any other; no record has this identifier.
        start.id = RecordId::from_bytes([0; 32]);
        Some(taken)
    }
}
