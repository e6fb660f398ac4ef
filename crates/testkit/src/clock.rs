use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use oncegate_core::{Clock, Timestamp};

/// A clock that moves only by hand, and only ahead.
#[derive(Debug)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// A clock that shows this many milliseconds since the Unix epoch.
    #[must_use]
    pub const fn at_millis(millis: u64) -> Self {
        Self(AtomicU64::new(millis))
    }

    /// Moves the clock ahead.
    pub fn advance(&self, by: Duration) {
        let now = self.now().after(by).as_millis();
        self.0.store(now, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(self.0.load(Ordering::SeqCst))
    }
}
