//! Listening for changed records: the loop that every store with notifications runs.

use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::id::RecordId;
use crate::watch::Watchers;

/// The first and the longest pause between attempts to connect.
const PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(5)];

/// The reason why a session ended, if it was not lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionEnd {
    /// No caller waits for a record.
    Idle,
    /// The store is closed.
    Closed,
}

/// A database that notifies a session of changed records.
pub trait ChangeSource: Send + 'static {
    /// The reason why a session was lost.
    type Error: Send;

    /// Connects, watches the records of `watchers`, and passes notifications on to them, until the session ends.
    ///
    /// It sets `is_connected` once the database has accepted to notify it. If the previous session was lost, it then notifies
    /// all watchers, because notifications may have been lost with that session.
    fn session(
        &mut self,
        watchers: &Watchers,
        was_lost: bool,
        is_connected: &mut bool,
    ) -> impl Future<Output = Result<SessionEnd, Self::Error>> + Send;

    /// Reports the loss of a session if `is_news`, and sleeps for `pause`, or longer.
    fn lost(&mut self, error: Self::Error, is_news: bool, pause: Duration)
    -> impl Future<Output = ()> + Send;
}

/// The watchers of a store, and the task that listens for them.
///
/// One task listens for all watchers, and its session is open only while a caller waits. Correctness does not depend on it:
/// if the session is lost, waiting callers ask the store from time to time, as they always do.
#[derive(Debug)]
pub struct ChangeListener {
    watchers: Watchers,
    is_started: AtomicBool,
}

impl ChangeListener {
    /// Creates a listener for at most `max_watchers` waiting callers.
    #[must_use]
    pub fn new(max_watchers: usize) -> Self {
        Self { watchers: Watchers::new(max_watchers), is_started: AtomicBool::new(false) }
    }

    /// Waits for a notification of this record. It never ends if too many callers wait already.
    ///
    /// The first call calls `start`, which spawns [`listen`] on the store's runtime.
    pub fn changed(
        &self,
        id: RecordId,
        start: impl FnOnce(Watchers),
    ) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let Some(watcher) = self.watchers.watch(id) else { return Box::pin(pending()) };
        if !self.is_started.swap(true, Ordering::Relaxed) {
            start(self.watchers.clone());
        }
        Box::pin(watcher)
    }

    /// Ends the task. Waiting callers are not notified any more.
    pub fn close(&self) {
        self.watchers.close();
    }
}

impl Drop for ChangeListener {
    fn drop(&mut self) {
        self.close();
    }
}

/// Listens until the watchers are closed: one session after the other, with growing pauses while sessions are lost.
pub async fn listen(watchers: Watchers, mut source: impl ChangeSource) {
    let [first, longest] = PAUSES;
    let mut pause = first;
    let mut was_lost = false;
    loop {
        while watchers.is_empty() {
            if watchers.changes().await.is_none() {
                return;
            }
        }
        let mut is_connected = false;
        match source.session(&watchers, was_lost, &mut is_connected).await {
            Ok(SessionEnd::Closed) => return,
            // A session that was not connected says nothing about the next one.
            Ok(SessionEnd::Idle) => was_lost &= !is_connected,
            Err(error) => {
                let is_news = is_connected || !was_lost;
                if is_news {
                    pause = first;
                }
                was_lost = true;
                source.lost(error, is_news, pause).await;
                pause = (pause * 2).min(longest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::{Arc, Mutex};
    use std::task::{Context, Poll, Waker};

    use super::*;

    /// Sessions that end as scripted, and the arguments of each session and each loss.
    struct Script {
        ends: Vec<(bool, Result<SessionEnd, ()>)>,
        seen: Arc<Mutex<Vec<String>>>,
    }

    impl ChangeSource for Script {
        type Error = ();

        async fn session(
            &mut self,
            _: &Watchers,
            was_lost: bool,
            is_connected: &mut bool,
        ) -> Result<SessionEnd, ()> {
            self.seen.lock().unwrap().push(format!("session, lost before: {was_lost}"));
            let (connected, end) = self.ends.remove(0);
            *is_connected = connected;
            end
        }

        async fn lost(&mut self, (): (), is_news: bool, pause: Duration) {
            self.seen.lock().unwrap().push(format!("lost, news: {is_news}, {pause:?}"));
        }
    }

    #[test]
    fn pauses_grow_while_no_session_connects_and_a_loss_is_reported_once() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (mut ends, mut expected) = (vec![(false, Err(())); 8], Vec::new());
        ends.extend([
            (true, Err(())),
            (false, Ok(SessionEnd::Idle)),
            (false, Err(())),
            (true, Ok(SessionEnd::Idle)),
            (false, Err(())),
            (false, Ok(SessionEnd::Closed)),
        ]);
        let listener = ChangeListener::new(1);
        let (script, id) = (Script { ends, seen: seen.clone() }, RecordId::from_bytes([1; 32]));
        let mut started = None;
        let _watcher = listener.changed(id, |watchers| started = Some(watchers));
        let mut listening = pin!(listen(started.unwrap(), script));
        assert_eq!(listening.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(()));
        for (number, pause) in
            ["100ms", "200ms", "400ms", "800ms", "1.6s", "3.2s", "5s", "5s"].iter().enumerate()
        {
            expected.push(format!("session, lost before: {}", number > 0));
            expected.push(format!("lost, news: {}, {pause}", number == 0));
        }
        // It was connected in between, so the next loss is news.
        expected.extend(["session, lost before: true", "lost, news: true, 100ms"].map(str::to_owned));
        // A session that ends before it is connected changes nothing.
        expected.extend(["session, lost before: true", "session, lost before: true"].map(str::to_owned));
        expected.extend(["lost, news: false, 200ms", "session, lost before: true"].map(str::to_owned));
        expected.extend(["session, lost before: false", "lost, news: true, 100ms"].map(str::to_owned));
        expected.push("session, lost before: true".to_owned());
        assert_eq!(*seen.lock().unwrap(), expected);
    }

    #[test]
    fn a_closed_listener_ends_its_task_and_takes_no_watcher() {
        let listener = ChangeListener::new(1);
        let watchers = listener.watchers.clone();
        drop(listener);
        let script = Script { ends: Vec::new(), seen: Arc::default() };
        let mut listening = pin!(listen(watchers.clone(), script));
        assert_eq!(listening.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(()));
        assert!(watchers.watch(RecordId::from_bytes([1; 32])).is_none());
    }
}
