//! The clock of a store that lives in this process.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use oncegate_core::{Clock, Timestamp};

use crate::schema::CLOCK_STEP;

/// The wall clock, made to never run backwards and never stand still within a process.
///
/// A wall clock that is set ahead is followed at once. One that is set back is not: from there on, time goes on from
/// where it was, at the pace of the monotonic clock, until the process ends. So no lease is ever lengthened by a clock
/// that was corrected, and no token ever shrinks.
pub struct SystemClock {
    start: Instant,
    /// Microseconds from the epoch to `start`: the greatest that was ever seen.
    start_at: AtomicU64,
}

impl SystemClock {
    /// A clock that shows the time of the wall clock.
    #[must_use]
    pub fn new() -> Self {
        Self { start: Instant::now(), start_at: AtomicU64::new(0) }
    }

    /// The time, where the wall clock shows `wall` and `elapsed` passed since the start.
    ///
    /// `wall` has to be read before `elapsed`: a pause in between then makes the start look earlier than it was, which
    /// the greatest one outweighs, and never later.
    fn at(&self, wall: u64, elapsed: u64) -> Timestamp {
        let start_at = wall.saturating_sub(elapsed);
        let start_at = self.start_at.fetch_max(start_at, Ordering::SeqCst).max(start_at);
        Timestamp::from_millis(start_at.saturating_add(elapsed) / 1000)
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        let wall = micros(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
        self.at(wall, micros(self.start.elapsed()))
    }
}

impl fmt::Debug for SystemClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SystemClock").finish_non_exhaustive()
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// The clock of one store: the given clock, moved ahead where the store was last written at a later time than that
/// clock shows.
///
/// Without it, a machine that starts with its clock behind would give out tokens that are smaller than those of records
/// that were purged (I6), and would take every lease and retention in the file to last until the clock has caught up.
/// All durations stay right; only the date is that of the greater clock.
pub(crate) struct StoreClock {
    clock: Arc<dyn Clock>,
    ahead: AtomicU64,
}

impl StoreClock {
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, ahead: AtomicU64::new(0) }
    }

    /// Waits, where the clock is only as far behind `floor` as one that was not set back can be: a store that is opened
    /// again at once. To move the clock ahead then would end leases and retentions early, a little with each restart.
    pub(crate) fn wait_for(&self, floor: Timestamp) {
        let mut last = self.now();
        while last < floor && floor.since(last) <= Duration::from_millis(CLOCK_STEP) {
            std::thread::sleep(Duration::from_millis(2));
            let now = self.now();
            if now == last {
                return; // a clock that is moved by hand
            }
            last = now;
        }
    }

    /// Moves the clock ahead, if it is behind `floor`, and says by how much.
    pub(crate) fn not_before(&self, floor: Timestamp) -> Duration {
        let behind = floor.since(self.now());
        self.ahead.fetch_add(u64::try_from(behind.as_millis()).unwrap_or(u64::MAX), Ordering::SeqCst);
        behind
    }
}

impl Clock for StoreClock {
    fn now(&self) -> Timestamp {
        let ahead = self.ahead.load(Ordering::Relaxed);
        Timestamp::from_millis(self.clock.now().as_millis().saturating_add(ahead))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: u64 = 3_600_000_000;

    #[test]
    fn a_wall_clock_set_ahead_is_followed_and_one_set_back_is_not() {
        let clock = SystemClock::new();
        let start = 500_000 * HOUR;
        let at = |wall, elapsed| clock.at(wall, elapsed).as_millis() * 1000;
        assert_eq!(at(start, 0), start);
        assert_eq!(at(start + HOUR + 1000, 1000), start + HOUR + 1000);
        assert_eq!(at(start + 2000, 2000), start + HOUR + 2000); // corrected: goes on, at the same pace
        assert_eq!(at(start + 9000, 9000), start + HOUR + 9000);
    }

    #[test]
    fn a_pause_between_the_two_readings_does_not_move_the_clock_ahead() {
        let clock = SystemClock::new();
        let start = 500_000 * HOUR;
        clock.at(start, 0);
        let paused = clock.at(start + 1000, HOUR);
        assert_eq!(paused.as_millis() * 1000, start + HOUR);
        assert_eq!(clock.at(start + HOUR + 1000, HOUR + 1000).as_millis() * 1000, start + HOUR + 1000);
    }

    #[test]
    fn shows_the_wall_clock() {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let shown = Duration::from_millis(SystemClock::new().now().as_millis());
        assert!(shown + Duration::from_millis(1) >= wall && shown < wall + Duration::from_secs(60));
    }
}
