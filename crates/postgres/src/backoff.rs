//! Growing pauses between attempts, random so that callers that failed together do not try again together.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::Duration;

use tokio::time::Instant;

/// The pauses between attempts.
#[derive(Debug)]
pub struct Backoff {
    next: Duration,
    longest: Duration,
}

impl Backoff {
    /// Creates pauses from `first` to `longest`; each is twice as long as the one before.
    #[must_use]
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { next: first, longest }
    }

    /// Sleeps for a random part of the pause, at least half of it, but not beyond `until`. The next pause is twice as long.
    pub async fn sleep(&mut self, until: Option<Instant>) {
        let at = Instant::now() + self.next.mul_f64(0.5 + random_fraction() / 2.0);
        self.next = (self.next * 2).min(self.longest);
        tokio::time::sleep_until(until.map_or(at, |until| at.min(until))).await;
    }
}

fn random_fraction() -> f64 {
    // 32 bits are exact in a double.
    f64::from((random_bits() >> 32) as u32) / f64::from(u32::MAX)
}

/// Random bits: the keys of the standard library are random for each thread and change with each call.
pub(crate) fn random_bits() -> u64 {
    RandomState::new().build_hasher().finish()
}
