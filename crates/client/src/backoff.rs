//! Pauses between attempts.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

/// The distribution of pauses. It prevents clients that failed together from retrying together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Jitter {
    /// From zero to `min(cap, base · 2^n)`. By the simulations of AWS this is the least load for the service.
    #[default]
    Full,
    /// From `base` to three times the previous pause, at most `cap`.
    Decorrelated,
}

/// A source of random bits for the pauses. Tests replace it to be repeatable. Keys do not use it.
pub trait Random: Send + Sync + 'static {
    /// 64 random bits.
    fn bits(&self) -> u64;
}

/// The random bits of the system.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SystemRandom;

impl Random for SystemRandom {
    fn bits(&self) -> u64 {
        // Each state has another seed, which is random enough for pauses.
        RandomState::new().build_hasher().finish()
    }
}

/// The pauses of one intent.
#[derive(Debug)]
pub(crate) struct Backoff {
    jitter: Jitter,
    base: Duration,
    cap: Duration,
    last: Duration,
    doubled: u32,
}

impl Backoff {
    pub(crate) const fn new(jitter: Jitter, base: Duration, cap: Duration) -> Self {
        Self { jitter, base, cap, last: base, doubled: 0 }
    }

    pub(crate) fn next(&mut self, random: &dyn Random) -> Duration {
        let pause = match self.jitter {
            Jitter::Full => {
                let most = self.base.saturating_mul(1_u32.checked_shl(self.doubled).unwrap_or(u32::MAX));
                self.doubled += 1;
                between(Duration::ZERO, most.min(self.cap), random)
            }
            Jitter::Decorrelated => between(self.base, self.last.saturating_mul(3), random).min(self.cap),
        };
        self.last = pause;
        pause
    }
}

/// A duration from `low` to `high`, evenly distributed.
fn between(low: Duration, high: Duration, random: &dyn Random) -> Duration {
    let range = high.saturating_sub(low);
    let fraction = random.bits() as f64 / u64::MAX as f64;
    low + range.mul_f64(fraction).min(range)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixed(u64);
    impl Random for Fixed {
        fn bits(&self) -> u64 {
            self.0
        }
    }

    const BASE: Duration = Duration::from_millis(100);
    const CAP: Duration = Duration::from_millis(1500);

    fn pauses(jitter: Jitter, bits: u64) -> Vec<u128> {
        let mut backoff = Backoff::new(jitter, BASE, CAP);
        (0..6).map(|_| backoff.next(&Fixed(bits)).as_millis()).collect()
    }

    #[test]
    fn full_jitter_lies_between_nothing_and_what_doubles_up_to_the_cap() {
        assert_eq!(pauses(Jitter::Full, 0), [0; 6]);
        assert_eq!(pauses(Jitter::Full, u64::MAX), [100, 200, 400, 800, 1500, 1500]);
        assert_eq!(pauses(Jitter::Full, u64::MAX / 2), [50, 100, 200, 400, 750, 750]);
        let mut long = Backoff::new(Jitter::Full, BASE, Duration::MAX);
        for _ in 0..200 {
            long.next(&Fixed(u64::MAX)); // neither overflows nor panics
        }
    }

    #[test]
    fn decorrelated_jitter_lies_between_base_and_three_times_the_last() {
        assert_eq!(pauses(Jitter::Decorrelated, 0), [100; 6]);
        assert_eq!(pauses(Jitter::Decorrelated, u64::MAX), [300, 900, 1500, 1500, 1500, 1500]);
    }

    #[test]
    fn the_system_draws_other_bits_each_time() {
        let drawn: std::collections::HashSet<_> = (0..100).map(|_| SystemRandom.bits()).collect();
        assert!(drawn.len() > 90);
    }
}
