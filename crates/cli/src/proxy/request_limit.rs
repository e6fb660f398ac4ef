//! Limits the requests in flight without a key.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The limit of requests without a key, and of upgraded connections, over all threads. All clones share it.
///
/// A counter, because releasing a permit of a semaphore takes a lock that all threads share.
#[derive(Clone, Debug)]
pub(crate) struct RequestLimit {
    used: Arc<AtomicUsize>,
    max: usize,
}

/// Counts one request until it is dropped.
#[derive(Debug)]
pub(super) struct RequestPermit(Arc<AtomicUsize>);

impl RequestLimit {
    pub(crate) fn new(max: usize) -> Self {
        Self { used: Arc::default(), max }
    }

    pub(crate) const fn max(&self) -> usize {
        self.max
    }

    /// The number of requests now.
    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Counts one more request. `None` at the limit.
    pub(super) fn try_enter(&self) -> Option<RequestPermit> {
        self.enter_below(self.max)
    }

    /// Counts a request that has its response, unless half of the limit is in use: new ones come first.
    pub(super) fn try_enter_late(&self) -> Option<RequestPermit> {
        self.enter_below(self.max / 2)
    }

    fn enter_below(&self, max: usize) -> Option<RequestPermit> {
        // The counter guards no memory.
        let entered = self
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| (used < max).then_some(used + 1));
        entered.is_ok().then(|| RequestPermit(self.used.clone()))
    }
}

impl Drop for RequestPermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_full_at_the_limit_and_gives_back() {
        let limit = RequestLimit::new(2);
        for _ in 0..3 {
            let permits = (limit.try_enter().unwrap(), limit.clone().try_enter().unwrap());
            assert!(limit.try_enter().is_none());
            assert_eq!((limit.used(), limit.max()), (2, 2));
            drop(permits);
            assert_eq!(limit.used(), 0);
        }
        assert!(RequestLimit::new(0).try_enter().is_none());
    }
}
