//! The callers that wait for changes of records, for stores that get notifications and for the wrappers around them.

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::mem::take;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use crate::id::RecordId;
use crate::map::{RecordMap, lock};

/// All watchers of records in this process. Clones share the same watchers.
///
/// Callers wait for a record with [`watch`](Self::watch). One task of the store listens to the database. It gets the list of
/// watched records from [`changes`](Self::changes), and passes notifications on with [`notify`](Self::notify). This needs no
/// async runtime.
///
/// ```
/// use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
/// use oncegate_core::{RecordId, Watchers};
///
/// let watchers = Watchers::new(100);
/// let id = RecordId::from_bytes([7; 32]);
/// let mut context = Context::from_waker(Waker::noop());
///
/// let mut watcher = watchers.watch(id).expect("there are fewer than 100 watchers");
/// assert!(pin!(&mut watcher).poll(&mut context).is_pending());
/// assert_eq!(pin!(watchers.changes()).poll(&mut context), Poll::Ready(Some(vec![(id, true)])));
/// watchers.notify(&id);
/// assert!(pin!(&mut watcher).poll(&mut context).is_ready());
/// assert_eq!(pin!(watchers.changes()).poll(&mut context), Poll::Ready(Some(vec![(id, false)])));
/// ```
#[derive(Clone, Debug)]
pub struct Watchers {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    max_watchers: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    watched: RecordMap<RecordId, HashMap<u64, Option<Waker>>>,
    watchers: usize,
    /// The number of the newest watcher. Numbers tell a watcher that was notified from a later one of the same record.
    number: u64,
    /// The records that were watched or unwatched since the listener last asked.
    changed: RecordMap<RecordId, ()>,
    listener: Option<Waker>,
    closed: bool,
}

impl Watchers {
    /// An empty set of at most `max_watchers` watchers.
    #[must_use]
    pub fn new(max_watchers: usize) -> Self {
        Self { shared: Arc::new(Shared { max_watchers, state: Mutex::default() }) }
    }

    /// Watches this record until the watcher is dropped. `None` if there are too many watchers, or if this is closed.
    #[must_use]
    pub fn watch(&self, id: RecordId) -> Option<Watcher> {
        let mut state = self.lock();
        if state.closed || state.watchers >= self.shared.max_watchers {
            return None;
        }
        state.watchers += 1;
        state.number += 1;
        let number = state.number;
        let watchers = state.watched.entry(id).or_default();
        watchers.insert(number, None);
        let is_first = watchers.len() == 1;
        let listener = if is_first { state.change(id) } else { None };
        drop(state);
        wake(listener);
        Some(Watcher { watchers: self.clone(), id, number })
    }

    /// Notifies all watchers of this record.
    pub fn notify(&self, id: &RecordId) {
        let mut state = self.lock();
        let Some(watchers) = state.watched.remove(id) else { return };
        state.watchers = state.watchers.saturating_sub(watchers.len());
        let listener = state.change(*id);
        drop(state);
        watchers.into_values().for_each(wake);
        wake(listener);
    }

    /// Notifies all watchers of all records, because notifications may have been lost.
    pub fn notify_all(&self) {
        let ids: Vec<_> = self.lock().watched.keys().copied().collect();
        for id in ids {
            self.notify(&id);
        }
    }

    /// Waits until records are watched or unwatched, for the task that listens. Returns each such record, and whether it is
    /// watched now; `None` after [`close`](Self::close). A record may be reported again although nothing changed.
    pub fn changes(&self) -> impl Future<Output = Option<Vec<(RecordId, bool)>>> + Send + '_ {
        poll_fn(|context| {
            let mut state = self.lock();
            if state.closed {
                return Poll::Ready(None);
            }
            if state.changed.is_empty() {
                state.listener = Some(context.waker().clone());
                return Poll::Pending;
            }
            let changed = take(&mut state.changed);
            let is_watched = |id: &RecordId| state.watched.contains_key(id);
            Poll::Ready(Some(changed.into_keys().map(|id| (id, is_watched(&id))).collect()))
        })
    }

    /// All records that are watched now, for a listener that starts again. [`changes`](Self::changes) continues from there.
    #[must_use]
    pub fn watched(&self) -> Vec<RecordId> {
        let mut state = self.lock();
        state.changed.clear();
        state.watched.keys().copied().collect()
    }

    /// Returns true if there is no watcher.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lock().watched.is_empty()
    }

    /// Ends the task that listens. Watchers are not notified.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let listener = state.listener.take();
        drop(state);
        wake(listener);
    }

    /// A panic does not damage the state, because no code of callers (wakers, destructors) runs under this lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.shared.state)
    }
}

impl State {
    /// Notes that a record was watched or unwatched. Returns the listener, to be woken after the lock is released.
    fn change(&mut self, id: RecordId) -> Option<Waker> {
        self.changed.insert(id, ());
        self.listener.take()
    }
}

/// Must not run under the lock: the woken task may run at once and drop watchers.
fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// A future that ends when its record is notified. Dropping it ends the watch.
#[derive(Debug)]
#[must_use = "the record is watched only until this is dropped"]
pub struct Watcher {
    watchers: Watchers,
    id: RecordId,
    number: u64,
}

impl Future for Watcher {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.watchers.lock();
        let waker = state.watched.get_mut(&self.id).and_then(|watchers| watchers.get_mut(&self.number));
        let Some(waker) = waker else { return Poll::Ready(()) };
        let old_waker = waker.replace(context.waker().clone());
        drop(state);
        // After the lock is released: its destructor is not our code.
        drop(old_waker);
        Poll::Pending
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let mut state = self.watchers.lock();
        let Some(watchers) = state.watched.get_mut(&self.id) else { return };
        let Some(waker) = watchers.remove(&self.number) else { return };
        let is_last = watchers.is_empty();
        state.watchers = state.watchers.saturating_sub(1);
        let listener = if is_last {
            state.watched.remove(&self.id);
            state.change(self.id)
        } else {
            None
        };
        drop(state);
        drop(waker);
        wake(listener);
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    fn id(n: u8) -> RecordId {
        RecordId::from_bytes([n; 32])
    }

    fn is_ready(future: impl Future<Output = ()>) -> bool {
        pin!(future).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    fn changes(watchers: &Watchers) -> Poll<Option<Vec<(RecordId, bool)>>> {
        pin!(watchers.changes()).poll(&mut Context::from_waker(Waker::noop())).map(|changes| {
            changes.map(|mut changes| {
                changes.sort_unstable();
                changes
            })
        })
    }

    #[test]
    fn only_watchers_of_the_record_are_notified() {
        let watchers = Watchers::new(10);
        let (mut one, mut two, mut other) =
            (watchers.watch(id(1)).unwrap(), watchers.watch(id(1)).unwrap(), watchers.watch(id(2)).unwrap());
        assert_eq!(changes(&watchers), Poll::Ready(Some(vec![(id(1), true), (id(2), true)])));
        assert!(changes(&watchers).is_pending());
        watchers.notify(&id(1));
        let mut late = watchers.watch(id(1)).unwrap();
        assert!(is_ready(&mut one) && is_ready(&mut two) && !is_ready(&mut other) && !is_ready(&mut late));
        // The record was unwatched and watched again in between.
        assert_eq!(changes(&watchers), Poll::Ready(Some(vec![(id(1), true)])));
        // Dropping notified watchers does not end the later watch.
        drop((one, two));
        assert!(changes(&watchers).is_pending() && !is_ready(&mut late));
        // Watchers are notified even if the listener does not know them yet, and it still learns of their records.
        let mut new = watchers.watch(id(3)).unwrap();
        watchers.notify_all();
        let newer = watchers.watch(id(4)).unwrap();
        watchers.notify_all();
        assert!(is_ready(&mut new) && is_ready(newer));
        assert!(is_ready(&mut other) && is_ready(&mut late) && watchers.is_empty());
        let ended = (1..=4).map(|n| (id(n), false)).collect();
        assert_eq!(changes(&watchers), Poll::Ready(Some(ended)));
    }

    #[test]
    fn a_dropped_watcher_leaves_nothing_behind() {
        let watchers = Watchers::new(2);
        let (mut one, two) = (watchers.watch(id(1)).unwrap(), watchers.watch(id(1)).unwrap());
        assert!(watchers.watch(id(2)).is_none(), "two is the limit");
        assert!(!is_ready(&mut one));
        drop(one);
        assert_eq!(watchers.watched(), [id(1)]);
        assert!(changes(&watchers).is_pending());
        drop(two);
        assert!(watchers.is_empty());
        assert_eq!(changes(&watchers), Poll::Ready(Some(vec![(id(1), false)])));
        // Dropped and notified watchers no longer count.
        for n in 0..10 {
            let notified = watchers.watch(id(n)).unwrap();
            watchers.notify(&id(n));
            drop(notified);
        }
        assert!(watchers.watch(id(1)).is_some());
    }

    #[test]
    fn closing_refuses_new_watchers_and_ends_the_listener() {
        let watchers = Watchers::new(2);
        let mut one = watchers.watch(id(1)).unwrap();
        watchers.close();
        assert_eq!(changes(&watchers), Poll::Ready(None));
        assert!(watchers.watch(id(1)).is_none() && !is_ready(&mut one));
    }
}
