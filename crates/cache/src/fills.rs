//! What waits to be put into the front: identifiers only, each once, so that the queue is small whatever the answers are.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use oncegate_core::{RecordId, RecordMap};
use tokio::sync::Notify;

/// Most that wait. Each is a few dozen bytes.
const WAITING_MAX: usize = 4096;

/// Most that are read from the back at a time: few, because requests need it more.
const WORKERS_MAX: usize = 4;

#[derive(Default)]
pub(crate) struct Fills {
    state: Mutex<State>,
    /// Told when the last worker is done.
    idle: Notify,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<RecordId>,
    /// What waits or is just being filled.
    known: RecordMap<RecordId, ()>,
    workers: usize,
    is_closed: bool,
}

/// What became of a record that was to be filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Put {
    /// A worker will come to it.
    Waits,
    /// It is the first one: somebody has to start a worker.
    Start,
    /// It waits already.
    Known,
    /// There is no room.
    Full,
}

impl Fills {
    pub(crate) fn put(&self, id: RecordId) -> Put {
        let mut state = self.lock();
        if state.known.contains_key(&id) {
            return Put::Known;
        }
        if state.is_closed || state.waiting.len() >= WAITING_MAX {
            return Put::Full;
        }
        state.waiting.push_back(id);
        state.known.insert(id, ());
        if state.workers == WORKERS_MAX {
            return Put::Waits;
        }
        state.workers += 1;
        Put::Start
    }

    pub(crate) fn next(&self) -> Option<RecordId> {
        self.lock().waiting.pop_front()
    }

    pub(crate) fn done(&self, id: &RecordId) {
        self.lock().known.remove(id);
    }

    /// A worker ends. Whether there is something to do for another one, because it came just now.
    pub(crate) fn end_worker(&self) -> bool {
        let mut state = self.lock();
        if !state.waiting.is_empty() && !state.is_closed {
            return true;
        }
        state.workers -= 1;
        let is_idle = state.workers == 0;
        drop(state);
        if is_idle {
            self.idle.notify_waiters();
        }
        false
    }

    /// A worker ends in the middle of its work: it panicked, or its runtime is gone.
    pub(crate) fn lose_worker(&self) {
        let mut state = self.lock();
        state.workers = state.workers.saturating_sub(1);
        let is_idle = state.workers == 0;
        drop(state);
        if is_idle {
            self.idle.notify_waiters();
        }
    }

    /// Takes nothing more, and forgets what waits. Says how many that were.
    pub(crate) fn close(&self) -> usize {
        let mut state = self.lock();
        state.is_closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        for id in &waiting {
            state.known.remove(id);
        }
        waiting.len()
    }

    pub(crate) async fn idle(&self) {
        loop {
            let told = self.idle.notified();
            if self.lock().workers == 0 {
                return;
            }
            told.await;
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
    fn what_waits_is_bounded_and_waits_once() {
        let fills = Fills::default();
        let puts: Vec<_> = (0..WAITING_MAX).map(|n| fills.put(id(n))).collect();
        assert_eq!(puts.iter().filter(|put| **put == Put::Start).count(), WORKERS_MAX);
        assert_eq!(puts.iter().filter(|put| **put == Put::Waits).count(), WAITING_MAX - WORKERS_MAX);
        assert_eq!(fills.put(id(0)), Put::Known);
        assert_eq!(fills.put(id(WAITING_MAX)), Put::Full);
        let first = fills.next().unwrap();
        assert_eq!((first, fills.put(first)), (id(0), Put::Known));
        fills.done(&first);
        assert_eq!(fills.put(first), Put::Waits, "there is room for one, and it may be read again");
        assert_eq!(fills.close(), WAITING_MAX);
        assert_eq!((fills.next(), fills.put(id(1))), (None, Put::Full));
    }
}
