//! The end of a lease by the clocks of this process.
//!
//! The store's clock measures a lease. This process counts the lease from before it sent the command, and less of it by
//! [`margin`], so that it never ends later here than in the store. The monotonic clock stops while the machine is suspended; the
//! wall clock does not. So both are checked before an effect that needs the lease, and the one that has moved more counts. A
//! wall clock that was set ahead only costs an unnecessary renewal.

use std::time::{Duration, SystemTime};

use oncegate_core::StoreError;
use tokio::time::Instant;

/// A moment by both clocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClockReading {
    pub(crate) monotonic: Instant,
    wall: SystemTime,
}

impl ClockReading {
    pub(crate) fn now() -> Self {
        Self { monotonic: Instant::now(), wall: SystemTime::now() }
    }
}

/// The part of a lease that its owner does not use.
///
/// Stores count whole milliseconds, rounded down: a lease that was granted late in a millisecond is shorter by almost this
/// millisecond. And two clocks do not run equally fast: time synchronization speeds up or slows down each of them by up to
/// 500 parts per million.
fn margin(lease: Duration) -> Duration {
    Duration::from_millis(1) + lease / 1000
}

/// The end of a lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeaseEnd {
    /// The end for others, who may wait until then.
    pub(crate) monotonic: Instant,
    /// The end for the owner, by both clocks. The wall clock's is `None` if the clock cannot show it.
    owner: (Instant, Option<SystemTime>),
}

impl LeaseEnd {
    /// The end of a lease that was requested at this moment.
    pub(crate) fn after(asked_at: ClockReading, lease: Duration) -> Self {
        let used = lease.saturating_sub(margin(lease));
        let owner = (asked_at.monotonic + used, asked_at.wall.checked_add(used));
        Self { monotonic: asked_at.monotonic + lease, owner }
    }

    /// Returns true if the lease is over for its owner by one of the clocks.
    pub(crate) fn is_over(&self) -> bool {
        let (monotonic, wall) = self.owner;
        Instant::now() >= monotonic || wall.is_some_and(|wall| SystemTime::now() >= wall)
    }
}

/// The reason why an execution must not begin or continue.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// The attempt no longer owns its record: another attempt does, or an operator has decided about it.
    #[error("the attempt no longer owns its record")]
    Fenced,
    /// The lease was over, and the store did not renew it in time. The attempt may still own its record.
    #[error("the lease is over, and the store did not renew it")]
    Store(#[source] StoreError),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_lease_ends_by_either_clock() {
        let lease = Duration::from_secs(30);
        let now = ClockReading::now();
        assert!(!LeaseEnd::after(now, lease).is_over());
        // The machine was suspended: only the wall clock went on.
        let suspended = ClockReading { wall: now.wall - Duration::from_secs(31), ..now };
        assert!(LeaseEnd::after(suspended, lease).is_over());
        tokio::time::advance(lease - margin(lease)).await;
        assert!(LeaseEnd::after(now, lease).is_over());
    }
}
