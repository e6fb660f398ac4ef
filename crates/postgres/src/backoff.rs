//! Pauses between tries, which grow and are never the same for two that failed together.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::Duration;

use tokio::time::Instant;

/// The next pause.
#[derive(Debug)]
pub struct Backoff {
    most: Duration,
    longest: Duration,
}

impl Backoff {
    /// Pauses that begin with this one; each is twice as long as the one before, up to the longest.
    #[must_use]
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self { most: first, longest }
    }

    /// Sleeps for a random part of the pause, not beyond `until`; the next pause is twice as long.
    pub async fn sleep(&mut self, until: Option<Instant>) {
        let at = Instant::now() + self.most.mul_f64(0.5 + random_fraction() / 2.0);
        self.most = (self.most * 2).min(self.longest);
        tokio::time::sleep_until(until.map_or(at, |until| at.min(until))).await;
    }
}

fn random_fraction() -> f64 {
    // 32 bits are exact in a double.
    f64::from((random_bits() >> 32) as u32) / f64::from(u32::MAX)
}

/// The standard library's keys are random for each thread, and change with each call.
pub(crate) fn random_bits() -> u64 {
    RandomState::new().build_hasher().finish()
}
