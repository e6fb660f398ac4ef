//! The queue of responses to write to the cache. It holds only identifiers, each once, so it stays small.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use oncegate_core::{RecordId, RecordMap};
use tokio::sync::Notify;

/// Most records that wait. Each takes a few dozen bytes.
const MAX_WAITING: usize = 4096;

/// Most records that are read from the store at a time: few, because requests need the store more.
const MAX_WORKERS: usize = 4;

#[derive(Default)]
pub(crate) struct PopulateQueue {
    state: Mutex<State>,
    /// Notified when the last worker ends.
    idle: Notify,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<RecordId>,
    /// The records that wait or are being written.
    known: RecordMap<RecordId, ()>,
    workers: usize,
    is_closed: bool,
}

/// The result of adding a record to the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queued {
    /// A running worker will take it.
    Waits,
    /// The caller must start a worker.
    NeedsWorker,
    /// It is in the queue already.
    Known,
    /// The queue is full or closed.
    Refused,
}

impl PopulateQueue {
    pub(crate) fn add(&self, id: RecordId) -> Queued {
        let mut state = self.lock();
        if state.known.contains_key(&id) {
            return Queued::Known;
        }
        if state.is_closed || state.waiting.len() >= MAX_WAITING {
            return Queued::Refused;
        }
        state.waiting.push_back(id);
        state.known.insert(id, ());
        if state.workers == MAX_WORKERS {
            return Queued::Waits;
        }
        state.workers += 1;
        Queued::NeedsWorker
    }

    pub(crate) fn next(&self) -> Option<RecordId> {
        self.lock().waiting.pop_front()
    }

    pub(crate) fn done(&self, id: &RecordId) {
        self.lock().known.remove(id);
    }

    /// Ends a worker, unless a record arrived in the meantime: then it returns true, and the worker continues.
    pub(crate) fn end_worker(&self) -> bool {
        let state = self.lock();
        if !state.waiting.is_empty() && !state.is_closed {
            return true;
        }
        self.remove_worker(state);
        false
    }

    /// Removes a worker that ended in the middle of its work: it panicked, or its runtime stopped.
    pub(crate) fn lose_worker(&self) {
        self.remove_worker(self.lock());
    }

    fn remove_worker(&self, mut state: MutexGuard<'_, State>) {
        state.workers = state.workers.saturating_sub(1);
        if state.workers == 0 {
            drop(state);
            self.idle.notify_waiters();
        }
    }

    /// Closes the queue and drops the records that wait. Returns how many those were.
    pub(crate) fn close(&self) -> usize {
        let mut state = self.lock();
        state.is_closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        for id in &waiting {
            state.known.remove(id);
        }
        waiting.len()
    }

    /// Waits until no worker runs.
    pub(crate) async fn idle(&self) {
        loop {
            let notified = self.idle.notified();
            if self.lock().workers == 0 {
                return;
            }
            notified.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: usize) -> RecordId {
        let mut id = [0; 32];
        id[24..].copy_from_slice(&(n as u64).to_be_bytes());
        RecordId::from_bytes(id)
    }

    #[test]
    fn the_queue_is_bounded_and_holds_each_record_once() {
        let queue = PopulateQueue::default();
        let added: Vec<_> = (0..MAX_WAITING).map(|n| queue.add(id(n))).collect();
        assert_eq!(added.iter().filter(|added| **added == Queued::NeedsWorker).count(), MAX_WORKERS);
        assert_eq!(added.iter().filter(|added| **added == Queued::Waits).count(), MAX_WAITING - MAX_WORKERS);
        assert_eq!(queue.add(id(0)), Queued::Known);
        assert_eq!(queue.add(id(MAX_WAITING)), Queued::Refused);
        let first = queue.next().unwrap();
        assert_eq!((first, queue.add(first)), (id(0), Queued::Known));
        queue.done(&first);
        assert_eq!(queue.add(first), Queued::Waits, "it is done, so it may be added again");
        assert_eq!(queue.close(), MAX_WAITING);
        assert_eq!((queue.next(), queue.add(id(1))), (None, Queued::Refused));
    }
}
