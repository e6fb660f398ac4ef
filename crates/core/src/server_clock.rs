//! The clock of a database server, as its client knows it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::clock::Timestamp;

/// The server's time as it was last seen, plus the time that has passed since.
#[derive(Debug)]
pub struct ServerClock {
    start: Instant,
    /// The server's time at `start`.
    start_at: AtomicU64,
}

impl ServerClock {
    /// Starts at the server's time `now`.
    #[must_use]
    pub fn new(now: Timestamp) -> Self {
        Self { start: Instant::now(), start_at: AtomicU64::new(now.as_millis()) }
    }

    /// Sets the server's time from a reply. The newest reply counts even if the clock was set back or another server took
    /// over, because the server's clock decides.
    pub fn saw(&self, now: Timestamp) {
        let start_at = now.as_millis().saturating_sub(self.elapsed());
        self.start_at.store(start_at, Ordering::Relaxed);
    }

    /// The server's time now.
    #[must_use]
    pub fn now(&self) -> Timestamp {
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
            clock.saw(seen);
            assert!(clock.now() >= seen && clock.now().since(seen) < Duration::from_secs(60));
        }
    }
}
