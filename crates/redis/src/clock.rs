//! The server's clock, as far as it is known here.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use oncegate_core::Timestamp;

/// The server's time as last seen, and what has passed since.
pub(crate) struct ServerClock {
    start: Instant,
    /// What the server's clock showed at `start`.
    start_at: AtomicU64,
}

impl ServerClock {
    pub(crate) fn new(now: Timestamp) -> Self {
        Self { start: Instant::now(), start_at: AtomicU64::new(now.as_millis()) }
    }

    /// Every answer says the time. The newest word counts: the server's clock is the one that decides, also where it was
    /// set back or another server has taken over.
    pub(crate) fn seen(&self, now: Timestamp) {
        let start_at = now.as_millis().saturating_sub(self.elapsed());
        self.start_at.store(start_at, Ordering::Relaxed);
    }

    pub(crate) fn now(&self) -> Timestamp {
        Timestamp::from_millis(self.start_at.load(Ordering::Relaxed).saturating_add(self.elapsed()))
    }

    fn elapsed(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn follows_the_server_ahead_and_back() {
        let clock = ServerClock::new(Timestamp::from_millis(1_000_000));
        for seen in [2_000_000, 500_000] {
            let seen = Timestamp::from_millis(seen);
            clock.seen(seen);
            assert!(clock.now() >= seen && clock.now().since(seen) < Duration::from_secs(60));
        }
    }
}
