//! Time as a store sees it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A point in time by the store's clock: milliseconds since 1970-01-01T00:00:00Z.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The time this many milliseconds after the Unix epoch.
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis)
    }

    /// Milliseconds since the Unix epoch.
    #[must_use]
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// The time `duration` later, at the end of time at the latest. Fractions of a millisecond count as a whole one, so
    /// that no lease is shorter than was asked for.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        let millis = duration.as_nanos().div_ceil(1_000_000);
        Self(self.0.saturating_add(u64::try_from(millis).unwrap_or(u64::MAX)))
    }

    /// How long it is from `earlier` to this time; zero where `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The clock of a store. Nothing in this crate reads a clock by itself.
pub trait Clock: Send + Sync + 'static {
    /// The time now.
    fn now(&self) -> Timestamp;
}

impl<C: Clock + ?Sized> Clock for Arc<C> {
    fn now(&self) -> Timestamp {
        (**self).now()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fraction_of_a_millisecond_counts_as_a_whole_one() {
        let start = Timestamp::from_millis(10);
        assert_eq!(start.after(Duration::from_nanos(1)), Timestamp::from_millis(11));
        assert_eq!(start.after(Duration::from_millis(5)), Timestamp::from_millis(15));
        assert_eq!(start.after(Duration::MAX), Timestamp::from_millis(u64::MAX));
        assert_eq!(start.since(Timestamp::from_millis(12)), Duration::ZERO);
    }
}
