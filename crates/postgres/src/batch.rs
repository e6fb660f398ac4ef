//! Batching of commands that are ready at the same time.
//!
//! The first command is sent at once, alone. The next ones gather while it is on its way, and are sent together when it is
//! answered. No command waits for a batch to fill: a sender only lets the tasks that can run go first, once. A batch is one
//! statement and one commit, so under load many commands share one flush.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use oncegate_core::{Command, Complete, Completion, Outcome, RecordId, StoreError};
use tokio::sync::oneshot;

use crate::batch_size::BatchSize;

/// The most bytes of responses in one batch, unless a single response is larger. In the contract, the replies to a batch of
/// claims have the same bound.
const MAX_BATCH_BYTES: usize = 8 * 1024 * 1024;

/// The size of responses from which a statement may take as long as the server allows: a slow network is not a dead one.
const LARGE_BYTES: usize = 1024 * 1024;

/// Tells if the response of a completion is large.
pub(crate) fn is_large_end(complete: &Complete) -> bool {
    matches!(&complete.completion, Completion::Replayable(response) if response.as_encoded().len() >= LARGE_BYTES)
}

/// Tells if the responses of a batch are large together.
pub(crate) fn is_large(batch: &[Job]) -> bool {
    batch.iter().map(|job| weight(&job.command)).sum::<usize>() >= LARGE_BYTES
}

/// The maximum number of full batches that may wait, and the minimum number of jobs that may wait with small batches.
const MAX_WAITING_BATCHES: usize = 16;
const MIN_WAITING_JOBS: usize = 1024;

/// A command, and the sender for its reply.
pub(crate) struct Job {
    pub(crate) id: RecordId,
    pub(crate) command: Command,
    pub(crate) reply: oneshot::Sender<Result<Outcome, StoreError>>,
    pub(crate) since: Instant,
}

/// The commands of one kind.
pub(crate) struct Lane {
    inner: Mutex<Inner>,
    max_jobs: usize,
    max_senders: usize,
    queue_timeout: Duration,
}

struct Inner {
    jobs: VecDeque<Job>,
    senders: usize,
    size: BatchSize,
}

/// The role of a sender, which it holds as long as it runs.
pub(crate) struct SenderRole(Option<Arc<Lane>>);

impl SenderRole {
    pub(crate) const fn on(lane: Arc<Lane>) -> Self {
        Self(Some(lane))
    }

    /// Takes the next batch. After the last one, the role ends.
    pub(crate) fn next(&mut self) -> Option<Vec<Job>> {
        let batch = self.0.as_ref()?.take();
        if batch.is_none() {
            self.0 = None;
        }
        batch
    }
}

impl SenderRole {
    /// Notes the time that a batch took, for the size of the next batches.
    pub(crate) fn took(&self, jobs: usize, took: Duration) {
        if let Some(lane) = &self.0 {
            lane.lock().size.took(jobs, took);
        }
    }

    /// Puts jobs back in front of all others, in their order.
    pub(crate) fn put_back(&self, jobs: Vec<Job>) {
        if let Some(lane) = &self.0 {
            let mut inner = lane.lock();
            for job in jobs.into_iter().rev() {
                inner.jobs.push_front(job);
            }
        }
    }
}

impl Drop for SenderRole {
    fn drop(&mut self) {
        if let Some(lane) = &self.0 {
            lane.abandon();
        }
    }
}

/// The result of adding a job.
pub(crate) enum Admission {
    /// One more sender is needed.
    Start,
    /// The running senders will send it.
    Wait,
    /// Too many jobs wait.
    Full,
}

impl Lane {
    /// Creates a lane for batches of `max_jobs`, of which `max_senders` send at the same time. A batch is given up after
    /// `timeout`, and a job that is not sent within `queue_timeout`, too.
    pub(crate) fn new(
        max_jobs: usize,
        max_senders: usize,
        queue_timeout: Duration,
        timeout: Duration,
    ) -> Self {
        let size = BatchSize::new(max_jobs, timeout);
        let inner = Mutex::new(Inner { jobs: VecDeque::new(), senders: 0, size });
        Self { inner, max_jobs, max_senders, queue_timeout }
    }

    pub(crate) fn put(&self, job: Job) -> Admission {
        let mut inner = self.lock();
        if inner.jobs.len() >= self.max_jobs.saturating_mul(MAX_WAITING_BATCHES).max(MIN_WAITING_JOBS) {
            return Admission::Full;
        }
        inner.jobs.push_back(job);
        if inner.senders >= self.max_senders {
            return Admission::Wait;
        }
        inner.senders += 1;
        Admission::Start
    }

    /// Takes the next batch, in which each record occurs once. `None` if there is no job: the sender ends.
    fn take(&self) -> Option<Vec<Job>> {
        let mut inner = self.lock();
        let mut batch: Vec<Job> = Vec::new();
        let mut ids = HashSet::new();
        let mut left = VecDeque::new();
        let mut bytes = 0;
        while batch.len() < inner.size.now() && bytes < MAX_BATCH_BYTES {
            let Some(job) = inner.jobs.pop_front() else { break };
            // The caller does not wait any more. A claim that is sent now would leave a record without an owner.
            if job.reply.is_closed() {
                continue;
            }
            if job.since.elapsed() > self.queue_timeout {
                // The caller may have gone meanwhile.
                let slow = StoreError::unavailable(
                    "PostgreSQL is too slow: the command was not sent within the queue timeout",
                );
                let _ = job.reply.send(Err(slow.with_nothing_sent()));
                continue;
            }
            if !ids.insert(job.id) {
                left.push_back(job);
                continue;
            }
            bytes += weight(&job.command);
            batch.push(job);
        }
        // They go back in their order, before the later ones.
        while let Some(job) = left.pop_back() {
            inner.jobs.push_front(job);
        }
        if batch.is_empty() {
            inner.senders = inner.senders.saturating_sub(1);
            return None;
        }
        Some(batch)
    }

    /// Handles a sender that ended early, with its runtime. If it was the last one, the waiting callers get an error.
    fn abandon(&self) {
        let mut inner = self.lock();
        inner.senders = inner.senders.saturating_sub(1);
        if inner.senders == 0 {
            inner.jobs.clear();
        }
    }

    /// The state is consistent after a panic, because each change is one call.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn weight(command: &Command) -> usize {
    match command {
        Command::Complete(complete) => match &complete.completion {
            Completion::Replayable(response) => response.as_encoded().len(),
            _ => 0,
        },
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use oncegate_core::{FencingToken, Release};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(2);

    fn job(id: u8) -> (Job, oneshot::Receiver<Result<Outcome, StoreError>>) {
        let (reply, received) = oneshot::channel();
        let id = RecordId::from_bytes([id; 32]);
        let release = Release { token: FencingToken::new(1), retention: TIMEOUT };
        (Job { id, command: Command::Release(release), reply, since: Instant::now() }, received)
    }

    fn ids(batch: Option<Vec<Job>>) -> Option<Vec<u8>> {
        batch.map(|batch| batch.iter().map(|job| job.id.as_bytes()[0]).collect())
    }

    #[test]
    fn each_record_is_once_in_a_batch_and_the_order_is_kept() {
        let lane = Lane::new(3, 1, Duration::from_secs(60), TIMEOUT);
        let mut replies = Vec::new();
        for id in [1, 2, 1, 3, 1, 2] {
            let (job, reply) = job(id);
            lane.put(job);
            replies.push(reply);
        }
        assert_eq!(ids(lane.take()), Some(vec![1, 2, 3]));
        assert_eq!(ids(lane.take()), Some(vec![1, 2]));
        assert_eq!(ids(lane.take()), Some(vec![1]));
        assert_eq!(ids(lane.take()), None);
    }

    #[test]
    fn abandoned_jobs_are_not_sent_and_late_jobs_are_given_up() {
        let lane = Lane::new(3, 1, Duration::ZERO, TIMEOUT);
        let (first, reply) = job(1);
        drop(reply);
        let (second, mut reply) = job(2);
        assert!(matches!((lane.put(first), lane.put(second)), (Admission::Start, Admission::Wait)));
        std::thread::yield_now();
        assert_eq!(ids(lane.take()), None);
        assert!(reply.try_recv().unwrap().is_err());
        assert!(matches!(lane.put(job(3).0), Admission::Start), "the sender has ended");
    }

    #[test]
    fn a_full_lane_takes_no_more_jobs() {
        let lane = Lane::new(1, 1, Duration::from_secs(60), TIMEOUT);
        for number in 0..MIN_WAITING_JOBS {
            assert!(!matches!(lane.put(job(1).0), Admission::Full), "{number}");
        }
        assert!(matches!(lane.put(job(1).0), Admission::Full));
    }
}
