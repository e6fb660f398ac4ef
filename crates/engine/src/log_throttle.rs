//! A limit on log lines that clients could cause in great numbers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Lets one log line through in each interval, and counts the others. For lines that any client can cause.
///
/// ```
/// use std::time::Duration;
/// use oncegate_engine::LogThrottle;
///
/// let throttle = LogThrottle::new(Duration::from_secs(60));
/// for _ in 0..3 {
///     if let Some(suppressed) = throttle.pass() {
///         println!("a request was refused; {suppressed} lines before this one were left out");
///     }
/// }
/// ```
#[derive(Debug)]
pub struct LogThrottle {
    start: Instant,
    interval: Duration,
    /// The time of the next line that may pass, in milliseconds after `start`.
    next: AtomicU64,
    suppressed: AtomicU64,
}

impl LogThrottle {
    /// A throttle whose first line passes.
    #[must_use]
    pub fn new(interval: Duration) -> Self {
        Self { start: Instant::now(), interval, next: AtomicU64::new(0), suppressed: AtomicU64::new(0) }
    }

    /// Returns how many lines were suppressed since the last one, if this one may pass.
    pub fn pass(&self) -> Option<u64> {
        self.pass_at(self.start.elapsed())
    }

    fn pass_at(&self, elapsed: Duration) -> Option<u64> {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let next = self.next.load(Ordering::Relaxed);
        let later = millis(elapsed.saturating_add(self.interval));
        let passes = millis(elapsed) >= next
            && self.next.compare_exchange(next, later, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if passes {
            return Some(self.suppressed.swap(0, Ordering::Relaxed));
        }
        self.suppressed.fetch_add(1, Ordering::Relaxed);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_passes_in_each_interval_and_the_others_are_counted() {
        let throttle = LogThrottle::new(Duration::from_secs(60));
        let passed = [0, 1, 59_999, 60_000, 60_001, 200_000]
            .map(|millis| throttle.pass_at(Duration::from_millis(millis)));
        assert_eq!(passed, [Some(0), None, None, Some(2), None, Some(1)]);
    }
}
