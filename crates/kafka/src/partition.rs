//! The offsets of a partition while it is assigned to this member.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A partition during one assignment. If it is revoked and assigned again, that is another value.
#[derive(Debug)]
pub(super) struct Partition {
    pub(super) topic: Arc<str>,
    pub(super) number: i32,
    is_lost: AtomicBool,
    /// `true` if the client has paused it. Only the reading thread uses it.
    is_paused: AtomicBool,
    track: Mutex<Track>,
}

impl Partition {
    pub(super) fn new(topic: Arc<str>, number: i32, next: Option<i64>) -> Self {
        let track = Mutex::new(Track::new(next));
        Self { topic, number, is_lost: AtomicBool::new(false), is_paused: AtomicBool::new(false), track }
    }

    pub(super) fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::Relaxed)
    }

    pub(super) fn set_paused(&self, is_paused: bool) {
        self.is_paused.store(is_paused, Ordering::Relaxed);
    }

    /// Returns `true` if another member may read the partition by now.
    pub(super) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    /// Locks the offsets. After [`lose`](Self::lose) they do not change any more.
    pub(super) fn track(&self) -> MutexGuard<'_, Track> {
        self.track.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the assignment: from now on no offset is settled any more.
    pub(super) fn lose(&self) {
        let _track = self.track();
        self.is_lost.store(true, Ordering::Release);
    }

    /// Settles an offset.
    pub(super) fn settle(&self, offset: i64) {
        let mut track = self.track();
        // The check is under the lock, so that no offset is settled after the last commit was computed.
        if !self.is_lost() {
            track.settle(offset);
        }
    }
}

/// The offsets that were read and are not settled. The reading thread bounds it: it stops at the window.
#[derive(Debug)]
pub(super) struct Track {
    /// The lowest offset that was not read; `None` if it is unknown.
    next: Option<i64>,
    /// The offsets from the lowest unsettled one on, and `true` for those that are settled.
    open: VecDeque<(i64, bool)>,
    /// The number of messages that the consumer has: handed over, and neither settled nor given back.
    in_hand: usize,
    /// The offset of the last commit request.
    asked: Option<i64>,
}

impl Track {
    pub(super) const fn new(next: Option<i64>) -> Self {
        Self { next, open: VecDeque::new(), in_hand: 0, asked: None }
    }

    /// Records that an offset was read, and returns `false` if it was read before.
    pub(super) fn read(&mut self, offset: i64) -> bool {
        if self.next.is_some_and(|next| offset < next) {
            return false;
        }
        self.next = Some(offset.saturating_add(1));
        self.open.push_back((offset, false));
        true
    }

    /// The number of messages from the lowest unsettled one on.
    pub(super) fn window(&self) -> usize {
        self.open.len()
    }

    pub(super) const fn in_hand(&self) -> usize {
        self.in_hand
    }

    pub(super) fn hand_over(&mut self) {
        self.in_hand += 1;
    }

    pub(super) fn take_back(&mut self) {
        self.in_hand = self.in_hand.saturating_sub(1);
    }

    fn settle(&mut self, offset: i64) {
        self.take_back();
        if let Ok(at) = self.open.binary_search_by_key(&offset, |(offset, _)| *offset)
            && let Some((_, is_settled)) = self.open.get_mut(at)
        {
            *is_settled = true;
        }
        while self.open.front().is_some_and(|(_, is_settled)| *is_settled) {
            self.open.pop_front();
        }
    }

    /// The offset to commit: everything before it is settled.
    pub(super) fn position(&self) -> Option<i64> {
        self.open.front().map(|(offset, _)| *offset).or(self.next)
    }

    /// Returns the offset to commit if it is new, and records it as requested.
    pub(super) fn next_commit(&mut self) -> Option<i64> {
        let position = self.position()?;
        if self.asked.is_some_and(|asked| asked >= position) {
            return None;
        }
        self.asked = Some(position);
        Some(position)
    }

    /// Requests the commit again, because it failed or its result is unknown.
    pub(super) fn commit_again(&mut self) {
        self.asked = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn partition(offsets: &[i64]) -> Partition {
        let partition = Partition::new("t".into(), 0, None);
        for offset in offsets {
            assert!(partition.track().read(*offset));
            partition.track().hand_over();
        }
        partition
    }

    #[test]
    fn nothing_is_committed_beyond_what_is_not_settled() {
        // Logs have gaps: transaction markers, and records that compaction removed.
        let partition = partition(&[3, 4, 9, 10]);
        assert_eq!(partition.track().next_commit(), Some(3));
        partition.settle(4);
        partition.settle(10);
        assert_eq!(partition.track().next_commit(), None);
        partition.settle(3);
        assert_eq!(partition.track().next_commit(), Some(9));
        assert_eq!(partition.track().window(), 2);
        partition.settle(9);
        assert_eq!(partition.track().next_commit(), Some(11));
        assert_eq!(partition.track().window(), 0);
        assert_eq!(partition.track().in_hand(), 0);
    }

    #[test]
    fn what_was_read_is_not_read_again() {
        let partition = partition(&[3, 4]);
        let read = [3, 4, 5].map(|offset| partition.track().read(offset));
        assert_eq!(read, [false, false, true]);
        assert_eq!(partition.track().window(), 3);
    }

    #[test]
    fn what_is_settled_after_the_revocation_counts_for_nothing() {
        let partition = partition(&[3, 4]);
        partition.settle(3);
        partition.lose();
        partition.settle(4);
        assert_eq!(partition.track().position(), Some(4));
        assert_eq!(partition.track().in_hand(), 1);
    }

    #[test]
    fn a_commit_that_failed_is_asked_for_again() {
        let partition = partition(&[3]);
        partition.settle(3);
        assert_eq!(partition.track().next_commit(), Some(4));
        assert_eq!(partition.track().next_commit(), None);
        partition.track().commit_again();
        assert_eq!(partition.track().next_commit(), Some(4));
    }

    #[test]
    fn an_unknown_offset_is_settled_without_harm() {
        let partition = partition(&[3, 4]);
        partition.settle(7);
        assert_eq!(partition.track().position(), Some(3));
    }
}
