//! Renews the leases of running attempts.
//!
//! One task renews all attempts of an engine. Nearly all attempts end before their first renewal, and cost an entry in a map
//! instead of a timer.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_core::{ErrorChain, Sharded, Store, StoreError};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::attempt::{Attempt, Renewal, again_after};
use crate::single_flight::lock;

pub(crate) struct LeaseRenewer {
    shared: Arc<Shared>,
    runtime: Option<Handle>,
    task: Mutex<Option<AbortHandle>>,
}

struct Shared {
    store: Arc<dyn Store>,
    due: Sharded<BTreeMap<(Instant, u64), Attempt>>,
    /// The time of the task's next look at `due`, in milliseconds after `start`. An attempt that is due sooner must ring.
    looks_at: AtomicU64,
    start: Instant,
    ring: Notify,
    running: AtomicBool,
    purge_every: Option<Duration>,
}

impl LeaseRenewer {
    pub(crate) fn new(store: Arc<dyn Store>, purge_every: Option<Duration>, runtime: Option<Handle>) -> Self {
        let shared = Shared {
            store,
            due: Sharded::default(),
            looks_at: AtomicU64::new(u64::MAX),
            start: Instant::now(),
            ring: Notify::new(),
            running: AtomicBool::new(false),
            purge_every,
        };
        Self { shared: Arc::new(shared), runtime, task: Mutex::new(None) }
    }

    /// The runtime that the task runs on; `None` is the one of the first claim.
    pub(crate) fn runtime(&self) -> Option<Handle> {
        self.runtime.clone()
    }

    /// Starts the task if it does not run: for the first time, or because the runtime that it ran on is gone.
    pub(crate) fn ensure_running(&self) {
        // A cheap read on the common path.
        if self.shared.running.load(Ordering::Acquire) {
            return;
        }
        let mut task = lock(&self.task);
        if !self.shared.running.load(Ordering::Acquire) {
            let running = RunningGuard::new(self.shared.clone());
            let runtime = self.runtime.clone().unwrap_or_else(Handle::current);
            *task = Some(runtime.spawn(async move { running.0.run(&running.0).await }).abort_handle());
        }
    }

    /// Renews this attempt's lease until it is stopped.
    pub(crate) fn start(&self, attempt: &Attempt) {
        let lease_until = attempt.lease_until();
        // A third of the lease after the claim, so that two renewals may fail before it ends.
        self.shared.schedule(attempt, lease_until - attempt.0.policy.lease * 2 / 3, true);
    }

    pub(crate) fn stop(&self, attempt: &Attempt) {
        attempt.set_ended();
        let mut due = self.shared.due.of(&attempt.0.id);
        if let Some(at) = lock(&attempt.0.due).take() {
            due.remove(&(at, attempt.0.number));
        }
    }
}

impl Drop for LeaseRenewer {
    fn drop(&mut self) {
        if let Some(task) = lock(&self.task).take() {
            task.abort();
        }
    }
}

/// Marks the task as running until it is dropped, by its end or by the end of its runtime.
struct RunningGuard(Arc<Shared>);

impl RunningGuard {
    fn new(shared: Arc<Shared>) -> Self {
        shared.running.store(true, Ordering::Release);
        Self(shared)
    }
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        self.0.running.store(false, Ordering::Release);
    }
}

impl Shared {
    /// Schedules a renewal, of a new attempt or of one whose renewal has just ended.
    fn schedule(&self, attempt: &Attempt, at: Instant, is_new: bool) {
        let mut due = self.due.of(&attempt.0.id);
        let mut place = lock(&attempt.0.due);
        if !is_new && place.is_none() {
            return; // stopped during its renewal
        }
        *place = Some(at);
        due.insert((at, attempt.0.number), attempt.clone());
        drop(place);
        drop(due);
        if self.millis(at) < self.looks_at.load(Ordering::SeqCst) {
            self.ring.notify_one();
        }
    }

    fn millis(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.start).as_millis()).unwrap_or(u64::MAX)
    }

    async fn run(&self, this: &Arc<Self>) {
        let mut purge_at = self.purge_every.map(|every| Instant::now() + every);
        loop {
            // During the read, every new attempt rings, so that one that is added to a shard already read is not missed.
            self.looks_at.store(u64::MAX, Ordering::SeqCst);
            let first = self.due.each().filter_map(|due| due.first_key_value().map(|((at, _), _)| *at)).min();
            let next = [first, purge_at].into_iter().flatten().min();
            self.looks_at.store(next.map_or(u64::MAX, |next| self.millis(next)), Ordering::SeqCst);
            tokio::select! {
                () = self.ring.notified() => continue,
                () = sleep_until(next) => {}
            }
            let now = Instant::now();
            for attempt in self.take_due(now) {
                tokio::spawn(this.clone().renew(attempt));
            }
            if let (Some(at), Some(every)) = (purge_at, self.purge_every)
                && now >= at
            {
                // If there is more to purge, go on soon, so that purging keeps up with claims. But rest in between for as long
                // as the purge took, within bounds.
                let more = self.purge().await;
                let rest =
                    now.elapsed().clamp(Duration::from_millis(1), (every / 20).max(Duration::from_millis(1)));
                purge_at = Some(Instant::now() + if more { rest } else { every });
            }
        }
    }

    fn take_due(&self, now: Instant) -> Vec<Attempt> {
        let mut all = Vec::new();
        for mut due in self.due.each() {
            let later = due.split_off(&(now, u64::MAX));
            all.extend(std::mem::replace(&mut *due, later).into_values());
        }
        all
    }

    async fn renew(self: Arc<Self>, attempt: Attempt) {
        let lease = attempt.0.policy.lease;
        let next = match attempt.renew().await {
            Ok(Renewal::Renewed) => attempt.lease_until() - lease * 2 / 3,
            Ok(Renewal::Fenced | Renewal::Ended) => return,
            Err(error) => {
                self.warn(&attempt, &error);
                let pause = (lease / 10).min(Duration::from_secs(1));
                Instant::now() + again_after(pause, &error)
            }
        };
        self.schedule(&attempt, next, false);
    }

    fn warn(&self, attempt: &Attempt, error: &StoreError) {
        if !attempt.is_owner() && !attempt.0.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(record = %attempt.record_id(), error = %ErrorChain(&error), "a lease has ended and could not be renewed");
        }
    }

    /// Purges once. Returns true if there is more to do.
    async fn purge(&self) -> bool {
        const STEP: usize = 500;
        match self.store.purge(STEP).await {
            Ok(purged) => purged >= STEP,
            Err(error) => {
                tracing::debug!(error = %ErrorChain(&error), "a purge failed and will be tried again");
                false
            }
        }
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
