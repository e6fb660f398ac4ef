//! The counts of a run.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::plan::{Fault, FaultCounts};

/// One number to which many tasks add.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The requests that one sidecar has received, and the number that it has now.
#[derive(Debug, Default)]
pub(crate) struct Passages {
    begun: Count,
    ended: Count,
}

impl Passages {
    pub(crate) fn begin(&self) {
        self.begun.add();
    }

    pub(crate) fn end(&self) {
        self.ended.add();
    }

    pub(crate) fn get(&self) -> u64 {
        self.begun.get()
    }

    pub(crate) fn now(&self) -> u64 {
        // In this order, so that none is missing. A request that ends in between is still counted.
        let ended = self.ended.get();
        self.begun.get().saturating_sub(ended)
    }
}

/// The counts of one run. Figures of the ledger are counted from the ledger, afterwards.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    /// Intents that a client has begun.
    pub(crate) begun: Count,
    /// Intents whose clients all have a definite answer, or have given up.
    pub(crate) ended: Count,
    /// Requests sent.
    pub(crate) attempts: Count,
    /// Answers that were marked as replays.
    pub(crate) replays: Count,
    /// 409: the first request is still being executed.
    pub(crate) in_progress: Count,
    /// Refusals because the outcome of the first request is unknown.
    pub(crate) outcome_unknown: Count,
    /// Records that the operator resolved with the answer found in the ledger.
    pub(crate) resolved_completed: Count,
    /// Records that the operator released, because the ledger has no charge.
    pub(crate) resolved_released: Count,
    /// Requests that reached each server behind the network.
    pub(crate) through: [Passages; 2],
    /// Replays by one of two sidecars of requests that the other had executed.
    pub(crate) replayed_by_the_other: Count,
    /// The number of times that the sidecar was killed.
    pub(crate) kills: Count,
    faults: [Count; Fault::ALL.len()],
}

impl Tally {
    pub(crate) fn fault(&self, fault: Fault) {
        if let Some(count) = self.faults.get(fault as usize) {
            count.add();
        }
    }

    pub(crate) fn faults(&self) -> FaultCounts {
        FaultCounts::of(|fault| self.faults.get(fault as usize).map_or(0, Count::get))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_has_a_place_of_its_own() {
        for fault in Fault::ALL {
            let tally = Tally::default();
            tally.fault(fault);
            assert_eq!(tally.faults(), FaultCounts::of(|f| u64::from(f == fault)));
        }
    }
}
