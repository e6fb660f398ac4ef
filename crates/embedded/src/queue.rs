//! A bounded queue from many callers to a few threads.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A bounded queue of jobs for threads that take many jobs at once.
pub(crate) struct Queue<T> {
    inner: Mutex<QueueState<T>>,
    wake: Condvar,
    capacity: usize,
}

struct QueueState<T> {
    jobs: VecDeque<T>,
    closed: bool,
}

/// The reason why a job was not queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PushError {
    Full,
    Closed,
}

/// The result of waiting for jobs.
pub(crate) enum TakeResult<T> {
    Jobs(Vec<T>),
    /// No job arrived before the deadline.
    TimedOut,
    /// The queue is empty and closed.
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

    /// Refuses jobs from now on. Jobs that are already queued are still handed out.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.wake.notify_all();
    }

    /// Waits for a job, at most until `deadline`, and takes the queued jobs.
    ///
    /// It takes jobs until there are `count` of them, or until their weights add up to `weight` or more.
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
        // Only the first job of a queue wakes a thread.
        if !inner.jobs.is_empty() {
            self.wake.notify_one();
        }
        TakeResult::Jobs(jobs)
    }

    /// Locks the state. It is consistent even after a panic, because each change is one call.
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
    fn takes_queued_jobs_up_to_count_and_weight() {
        let queue = Queue::new(10);
        (1..=5).for_each(|job| queue.push(job).unwrap());
        assert_eq!(take(&queue, 2, 100), [1, 2]);
        assert_eq!(take(&queue, 9, 7), [3, 4], "3 + 4 reaches the weight");
        assert_eq!(take(&queue, 9, 1), [5], "at least one job, regardless of its weight");
    }

    #[test]
    fn refuses_a_job_when_it_is_full_or_closed() {
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
