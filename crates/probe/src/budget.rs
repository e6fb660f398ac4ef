//! The limits of a probe: the number of requests, and their rate.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::error::Untested;

/// Counts requests, and spaces them.
pub(crate) struct Budget {
    max_requests: u32,
    interval: Duration,
    state: Mutex<State>,
}

struct State {
    used: u32,
    /// The time from which the next request may be sent.
    next: Instant,
}

/// Requests that wait for their share of the rate. Those that are given up meanwhile are not counted.
struct Waiting<'a> {
    budget: &'a Budget,
    requests: u32,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.budget.state().used -= self.requests;
    }
}

impl Budget {
    pub(crate) fn new(max_requests: u32, rate: u32) -> Self {
        let interval = Duration::from_secs(1) / rate.max(1);
        Self { max_requests, interval, state: Mutex::new(State { used: 0, next: Instant::now() }) }
    }

    /// Waits until this number of requests may be sent together.
    ///
    /// # Errors
    /// The reason for the row if the requests would exceed the limit. Nothing is counted then.
    pub(crate) async fn take(&self, requests: u32) -> Result<(), Untested> {
        let start = {
            let mut state = self.state();
            if requests > self.max_requests.saturating_sub(state.used) {
                return Err(Untested::new(format!("the limit of {} requests is reached", self.max_requests)));
            }
            state.used += requests;
            // A group waits for its whole share first, so that no second has more requests than the rate.
            let start = state.next.max(Instant::now()) + self.interval * (requests - 1);
            state.next = start + self.interval;
            start
        };
        let mut waiting = Waiting { budget: self, requests };
        tokio::time::sleep_until(start).await;
        waiting.requests = 0;
        Ok(())
    }

    /// The number of requests so far.
    pub(crate) fn used(&self) -> u32 {
        self.state().used
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn requests_are_spaced_and_end_at_the_limit() {
        let (budget, began) = (Budget::new(7, 100), Instant::now());
        budget.take(1).await.unwrap();
        budget.take(5).await.unwrap();
        assert!(began.elapsed() >= Duration::from_millis(49), "{:?}", began.elapsed());
        assert!(budget.take(2).await.unwrap_err().0.contains("limit of 7 requests"));
        budget.take(1).await.unwrap();
        assert!(budget.take(1).await.is_err());
        assert_eq!(budget.used(), 7);
    }

    #[tokio::test]
    async fn requests_that_are_given_up_before_they_are_sent_do_not_count() {
        let budget = Budget::new(9, 1);
        budget.take(1).await.unwrap();
        let waiting = tokio::time::timeout(Duration::from_millis(10), budget.take(3));
        assert!(waiting.await.is_err());
        assert_eq!(budget.used(), 1);
    }
}
