//! A timer for waits that nearly always end long before their deadline.
//!
//! A timer of the runtime costs each request an allocation and two changes of a shared structure, and nearly none ever fires.
//! Here a wait takes a place in a list, and one task looks at the list every [`TICK`].

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use hyper::rt::{Sleep, Timer};
use slab::Slab;
use tokio::runtime::Handle;
use tokio::time::Instant;

/// The interval in which deadlines are checked. A wait ends at most this much after its deadline, if the thread is not busy.
pub(super) const TICK: Duration = Duration::from_millis(250);

/// The timer of one thread.
#[derive(Clone, Debug, Default)]
pub(super) struct CoarseTimer(Arc<Mutex<Waits>>);

#[derive(Debug, Default)]
struct Waits {
    waits: Slab<Wait>,
    /// No deadline is before this time, so the list need not be read before it.
    earliest: Option<Instant>,
    /// True while a task checks the list.
    is_ticking: bool,
}

#[derive(Debug)]
struct Wait {
    deadline: Instant,
    /// `None` after the deadline.
    waker: Option<Waker>,
}

impl CoarseTimer {
    /// A future that ends up to a [`TICK`] after `deadline`.
    pub(super) fn wait_until(&self, deadline: Instant) -> CoarseSleep {
        CoarseSleep { timer: self.clone(), deadline, place: None }
    }

    /// Only one thread takes this lock.
    fn lock(&self) -> MutexGuard<'_, Waits> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks the list until it is empty.
    async fn tick(self) {
        loop {
            tokio::time::sleep(TICK).await;
            let due = {
                let mut waits = self.lock();
                if waits.waits.is_empty() {
                    waits.is_ticking = false;
                    waits.earliest = None;
                    return;
                }
                waits.take_due(Instant::now())
            };
            // After the lock was released, because a waker may drop a wait.
            due.into_iter().for_each(Waker::wake);
        }
    }
}

impl Waits {
    /// Adds a wait, and returns its place.
    fn insert(&mut self, deadline: Instant, waker: &Waker) -> usize {
        self.earliest = Some(self.earliest.map_or(deadline, |earliest| earliest.min(deadline)));
        self.waits.insert(Wait { deadline, waker: Some(waker.clone()) })
    }

    /// The wakers of the waits whose deadline is over.
    fn take_due(&mut self, now: Instant) -> Vec<Waker> {
        if self.earliest.is_some_and(|earliest| now < earliest) {
            return Vec::new();
        }
        let mut due = Vec::new();
        let mut earliest: Option<Instant> = None;
        for (_, wait) in &mut self.waits {
            if wait.deadline <= now {
                due.extend(wait.waker.take());
            } else {
                earliest = Some(earliest.map_or(wait.deadline, |earliest| earliest.min(wait.deadline)));
            }
        }
        self.earliest = earliest;
        due
    }
}

/// A wait. It begins with the first poll.
#[derive(Debug)]
pub(super) struct CoarseSleep {
    timer: CoarseTimer,
    deadline: Instant,
    place: Option<usize>,
}

impl Future for CoarseSleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let timer = self.timer.clone();
        let mut waits = timer.lock();
        if let Some(wait) = self.place.and_then(|place| waits.waits.get_mut(place)) {
            if wait.waker.is_none() {
                return Poll::Ready(());
            }
            let before = wait.waker.replace(cx.waker().clone());
            // The lock first, because a waker may be the last reference to a task with other waits.
            drop(waits);
            drop(before);
            return Poll::Pending;
        }
        self.place = Some(waits.insert(self.deadline, cx.waker()));
        if !waits.is_ticking
            && let Ok(runtime) = Handle::try_current()
        {
            waits.is_ticking = true;
            runtime.spawn(timer.clone().tick());
        }
        Poll::Pending
    }
}

impl Drop for CoarseSleep {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            let _wait = self.timer.lock().waits.try_remove(place);
        }
    }
}

impl Sleep for CoarseSleep {}

impl Timer for CoarseTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        Box::pin(self.wait_until(Instant::now() + duration))
    }

    fn sleep_until(&self, deadline: std::time::Instant) -> Pin<Box<dyn Sleep>> {
        Box::pin(self.wait_until(deadline.into()))
    }

    fn now(&self) -> std::time::Instant {
        Instant::now().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn waits_end_after_their_deadlines_and_leave_nothing_behind() {
        let timer = CoarseTimer::default();
        let mut never = Box::pin(timer.wait_until(Instant::now() + Duration::from_secs(3600)));
        assert!(futures_util::poll!(&mut never).is_pending());
        for millis in [0, 10, 300] {
            let deadline = Instant::now() + Duration::from_millis(millis);
            let mut wait = Box::pin(timer.wait_until(deadline));
            assert!(futures_util::poll!(&mut wait).is_pending());
            // Another task takes it, as a request that its client has left.
            tokio::spawn(wait).await.unwrap();
            assert!(Instant::now() >= deadline, "{millis}");
            assert_eq!(timer.lock().waits.len(), 1);
        }
        drop(never);
        oncegate_testkit::until("the task has ended", async || !timer.lock().is_ticking).await;
        assert!(timer.lock().waits.is_empty());
        timer.wait_until(Instant::now()).await;
    }

    #[test]
    fn only_waits_that_are_due_are_woken() {
        let now = Instant::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        let mut waits = Waits::default();
        for seconds in [3, 1, 2] {
            waits.insert(after(seconds), Waker::noop());
        }
        assert_eq!((waits.take_due(now).len(), waits.earliest), (0, Some(after(1))));
        assert_eq!((waits.take_due(after(2)).len(), waits.earliest), (2, Some(after(3))));
        waits.insert(after(1), Waker::noop());
        assert_eq!((waits.take_due(after(2)).len(), waits.earliest), (1, Some(after(3))));
        assert_eq!((waits.take_due(after(3)).len(), waits.earliest), (1, None));
    }
}
