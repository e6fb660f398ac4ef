//! Who waits to be told of a record: for stores that are told when one changes, and the wrappers around them.

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::mem::take;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::id::RecordId;
use crate::map::RecordMap;

/// Everybody in this process who waits to be told of a record. All clones are one.
///
/// On one side are those who wait ([`watch`](Self::watch)); on the other is the one task of a store that listens to the
/// database. It hears which records are watched ([`changes`](Self::changes)), and passes on what it is told
/// ([`tell`](Self::tell)). Nothing here knows a runtime.
///
/// ```
/// use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
/// use oncegate_core::{RecordId, Watchers};
///
/// let watchers = Watchers::new(100);
/// let id = RecordId::from_bytes([7; 32]);
/// let mut context = Context::from_waker(Waker::noop());
///
/// let mut watcher = watchers.watch(id).expect("there is room");
/// assert!(pin!(&mut watcher).poll(&mut context).is_pending());
/// assert_eq!(pin!(watchers.changes()).poll(&mut context), Poll::Ready(Some(vec![(id, true)])));
/// watchers.tell(&id);
/// assert!(pin!(&mut watcher).poll(&mut context).is_ready());
/// assert_eq!(pin!(watchers.changes()).poll(&mut context), Poll::Ready(Some(vec![(id, false)])));
/// ```
#[derive(Clone, Debug)]
pub struct Watchers {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    most: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    watched: RecordMap<RecordId, HashMap<u64, Option<Waker>>>,
    watchers: usize,
    /// Drawn by each watcher, so that one who was told is not taken for one who came after.
    number: u64,
    /// The records that somebody began or ceased to watch since the listener looked.
    changed: RecordMap<RecordId, ()>,
    listener: Option<Waker>,
    closed: bool,
}

impl Watchers {
    /// Nobody yet, and so many at once at the most.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { shared: Arc::new(Shared { most, state: Mutex::default() }) }
    }

    /// Waits to be told of this record, until the watcher is dropped. `None` where too many wait already, or where nobody
    /// listens any more.
    #[must_use]
    pub fn watch(&self, id: RecordId) -> Option<Watcher> {
        let mut state = self.lock();
        if state.closed || state.watchers >= self.shared.most {
            return None;
        }
        state.watchers += 1;
        state.number += 1;
        let number = state.number;
        let of_this = state.watched.entry(id).or_default();
        of_this.insert(number, None);
        let is_first = of_this.len() == 1;
        let listener = if is_first { state.change(id) } else { None };
        drop(state);
        wake(listener);
        Some(Watcher { watchers: self.clone(), id, number })
    }

    /// Tells everybody who watches this record.
    pub fn tell(&self, id: &RecordId) {
        let mut state = self.lock();
        let Some(told) = state.watched.remove(id) else { return };
        state.watchers = state.watchers.saturating_sub(told.len());
        let listener = state.change(*id);
        drop(state);
        told.into_values().for_each(wake);
        wake(listener);
    }

    /// Tells everybody, because what there was to tell may have been lost.
    pub fn tell_all(&self) {
        let ids: Vec<_> = self.lock().watched.keys().copied().collect();
        for id in ids {
            self.tell(&id);
        }
    }

    /// For the one that listens: waits until somebody began or ceased to watch, and says which records are watched now and
    /// which are not. `None` once it was closed. A record may be told of that the listener heard the same of before.
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

    /// For a listener that begins anew: every record that is watched now. [`changes`](Self::changes) goes on from there.
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

    /// Nobody will listen any more: the listener ends. Those who wait are not told.
    pub fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let listener = state.listener.take();
        drop(state);
        wake(listener);
    }

    /// Every change under this lock leaves it whole, and nothing of anybody else's runs under it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Whom to wake, once the lock is gone.
    fn change(&mut self, id: RecordId) -> Option<Waker> {
        self.changed.insert(id, ());
        self.listener.take()
    }
}

/// Not under the lock: whoever is woken may run at once, and may drop watchers.
fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// Waits to be told of a record. Dropped, it waits no more.
#[derive(Debug)]
#[must_use = "it watches only as long as it is there"]
pub struct Watcher {
    watchers: Watchers,
    id: RecordId,
    number: u64,
}

impl Future for Watcher {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut state = self.watchers.lock();
        let mine = state.watched.get_mut(&self.id).and_then(|of_this| of_this.get_mut(&self.number));
        let Some(mine) = mine else { return Poll::Ready(()) };
        let before = mine.replace(context.waker().clone());
        drop(state);
        // Its destructor is somebody else's code.
        drop(before);
        Poll::Pending
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let mut state = self.watchers.lock();
        let Some(of_this) = state.watched.get_mut(&self.id) else { return };
        let Some(waker) = of_this.remove(&self.number) else { return };
        let is_last = of_this.is_empty();
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
    fn those_who_wait_are_told_and_nobody_else() {
        let watchers = Watchers::new(10);
        let (mut one, mut two, mut other) =
            (watchers.watch(id(1)).unwrap(), watchers.watch(id(1)).unwrap(), watchers.watch(id(2)).unwrap());
        assert_eq!(changes(&watchers), Poll::Ready(Some(vec![(id(1), true), (id(2), true)])));
        assert!(changes(&watchers).is_pending());
        watchers.tell(&id(1));
        let mut late = watchers.watch(id(1)).unwrap();
        assert!(is_ready(&mut one) && is_ready(&mut two) && !is_ready(&mut other) && !is_ready(&mut late));
        // It went and came between two looks.
        assert_eq!(changes(&watchers), Poll::Ready(Some(vec![(id(1), true)])));
        // Those who were told are not those who wait now.
        drop((one, two));
        assert!(changes(&watchers).is_pending() && !is_ready(&mut late));
        // What the listener has not heard of yet, it hears of all the same.
        let mut new = watchers.watch(id(3)).unwrap();
        watchers.tell_all();
        let newer = watchers.watch(id(4)).unwrap();
        watchers.tell_all();
        assert!(is_ready(&mut new) && is_ready(newer));
        assert!(is_ready(&mut other) && is_ready(&mut late) && watchers.is_empty());
        let ended = (1..=4).map(|n| (id(n), false)).collect();
        assert_eq!(changes(&watchers), Poll::Ready(Some(ended)));
    }

    #[test]
    fn whoever_goes_leaves_nothing() {
        let watchers = Watchers::new(2);
        let (mut one, two) = (watchers.watch(id(1)).unwrap(), watchers.watch(id(1)).unwrap());
        assert!(watchers.watch(id(2)).is_none(), "there is no more room");
        assert!(!is_ready(&mut one));
        drop(one);
        assert_eq!(watchers.watched(), [id(1)]);
        assert!(changes(&watchers).is_pending());
        drop(two);
        assert!(watchers.is_empty());
        assert_eq!(changes(&watchers), Poll::Ready(Some(vec![(id(1), false)])));
        // The room is free again, also that of those who were told.
        for n in 0..10 {
            let told = watchers.watch(id(n)).unwrap();
            watchers.tell(&id(n));
            drop(told);
        }
        assert!(watchers.watch(id(1)).is_some());
    }

    #[test]
    fn a_closed_one_takes_nobody_and_lets_its_listener_go() {
        let watchers = Watchers::new(2);
        let mut one = watchers.watch(id(1)).unwrap();
        watchers.close();
        assert_eq!(changes(&watchers), Poll::Ready(None));
        assert!(watchers.watch(id(1)).is_none() && !is_ready(&mut one));
    }
}
