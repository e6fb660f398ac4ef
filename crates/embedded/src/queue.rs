//! The way from many callers to one thread.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A bounded queue of jobs for one thread, which takes all that are there at once.
pub(crate) struct Queue<T> {
    inner: Mutex<QueueState<T>>,
    wake: Condvar,
    capacity: usize,
}

struct QueueState<T> {
    jobs: VecDeque<T>,
    closed: bool,
}

/// Why a job was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PushError {
    Full,
    Closed,
}

/// What the thread finds.
pub(crate) enum TakeResult<T> {
    Jobs(Vec<T>),
    /// Nothing came in time.
    TimedOut,
    /// There is nothing, and nothing will come.
    Closed,
}

impl<T> Queue<T> {
    pub(crate) fn new(capacity: usize) -> Self {
        let inner = Mutex::new(QueueState { jobs: VecDeque::new(), closed: false });
        Self { inner, wake: Condvar::new(), capacity }
    }

    pub(crate) fn push(&self, job: T) -> Result<(), PushError> {
        let mut inner = self.lock();
        if inner.closed {
            return Err(PushError::Closed);
        }
        if inner.jobs.len() >= self.capacity {
            return Err(PushError::Full);
        }
        inner.jobs.push_back(job);
        let first = inner.jobs.len() == 1;
        drop(inner);
        if first {
            self.wake.notify_one();
        }
        Ok(())
    }

    /// No job is taken any more; those that are there are still handed out.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.wake.notify_all();
    }

    /// Waits for a job, until `deadline` where one is given, and takes with it those that are there, as long as there
    /// are fewer than `count` and they weigh less than `weight` in all.
    pub(crate) fn take(
        &self,
        count: usize,
        weight: usize,
        weigh: impl Fn(&T) -> usize,
        deadline: Option<Instant>,
    ) -> TakeResult<T> {
        let mut inner = self.lock();
        while inner.jobs.is_empty() {
            if inner.closed {
                return TakeResult::Closed;
            }
            inner = match deadline {
                None => self.wake.wait(inner).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left == Duration::ZERO {
                        return TakeResult::TimedOut;
                    }
                    self.wake.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        let mut jobs = Vec::with_capacity(inner.jobs.len().min(count));
        let mut taken = 0;
        while jobs.len() < count && taken < weight {
            let Some(job) = inner.jobs.pop_front() else { break };
            taken += weigh(&job);
            jobs.push(job);
        }
        TakeResult::Jobs(jobs)
    }

    /// Whole after every panic: each change is one call.
    fn lock(&self) -> MutexGuard<'_, QueueState<T>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(queue: &Queue<usize>, count: usize, weight: usize) -> Vec<usize> {
        match queue.take(count, weight, |job| *job, Some(Instant::now())) {
            TakeResult::Jobs(jobs) => jobs,
            TakeResult::TimedOut | TakeResult::Closed => Vec::new(),
        }
    }

    #[test]
    fn takes_what_is_there_within_count_and_weight() {
        let queue = Queue::new(10);
        (1..=5).for_each(|job| queue.push(job).unwrap());
        assert_eq!(take(&queue, 2, 100), [1, 2]);
        assert_eq!(take(&queue, 9, 7), [3, 4], "3 + 4 reaches the weight");
        assert_eq!(take(&queue, 9, 1), [5], "one job at least, whatever it weighs");
    }

    #[test]
    fn refuses_a_job_beyond_its_capacity_and_after_it_was_closed() {
        let queue = Queue::new(2);
        queue.push(1).unwrap();
        queue.push(2).unwrap();
        assert_eq!(queue.push(3), Err(PushError::Full));
        queue.close();
        assert_eq!(queue.push(3), Err(PushError::Closed));
        assert_eq!(take(&queue, 9, 9), [1, 2]);
        assert!(matches!(queue.take(9, 9, |_| 1, None), TakeResult::Closed));
    }
}
