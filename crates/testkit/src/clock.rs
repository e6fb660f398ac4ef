use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use oncegate_core::{Clock, Timestamp};
use tokio::time::Instant;

/// A clock that moves only by hand.
#[derive(Debug)]
pub struct ManualClock {
    wall: AtomicU64,
    elapsed: AtomicU64,
}

impl ManualClock {
    /// A clock that shows this many milliseconds since the Unix epoch.
    #[must_use]
    pub const fn at_millis(millis: u64) -> Self {
        Self { wall: AtomicU64::new(millis), elapsed: AtomicU64::new(0) }
    }

    /// Lets time pass.
    pub fn advance(&self, by: Duration) {
        let millis = by.as_nanos().div_ceil(1_000_000) as u64;
        // In the order in which no other thread sees the time of day ahead: those who read both read the time of day first.
        self.elapsed.fetch_add(millis, Ordering::SeqCst);
        self.wall.fetch_add(millis, Ordering::SeqCst);
    }

    /// Sets the time of day, ahead or back, without any time passing.
    pub fn set_millis(&self, millis: u64) {
        self.wall.store(millis, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(self.wall.load(Ordering::SeqCst))
    }

    fn elapsed(&self) -> Duration {
        Duration::from_millis(self.elapsed.load(Ordering::SeqCst))
    }
}

/// A clock that follows tokio's time, which a test can pause and advance.
#[derive(Clone, Copy, Debug)]
pub struct TokioClock {
    start: Timestamp,
    since: Instant,
}

impl TokioClock {
    /// A clock that shows this many milliseconds since the Unix epoch now.
    #[must_use]
    pub fn at_millis(millis: u64) -> Self {
        Self { start: Timestamp::from_millis(millis), since: Instant::now() }
    }
}

impl Clock for TokioClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(self.start.as_millis() + self.since.elapsed().as_millis() as u64)
    }
}
