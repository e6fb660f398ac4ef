//! What can be chosen.

use std::time::Duration;

use oncegate_core::{ConfigError, limits};

use crate::stats::CacheStats;

/// How long before a record of the back ends its answer in the front does, at the least; a thousandth of what was left when
/// the record was read comes to it. The back's clock is known as well as its last answer told it, and what has passed here
/// since: this is more than the two differ by, also where the back has been away ever since.
pub const MARGIN: Duration = Duration::from_secs(5);

/// Clocks of machines differ by less in the time that they measure.
pub(crate) const MARGIN_PART: u32 = 1000;

/// How a [`CachedStore`](crate::CachedStore) treats its front.
#[derive(Clone, Debug)]
pub struct CacheOptions {
    pub(crate) keep: Duration,
    pub(crate) timeout: Duration,
    pub(crate) namespace: String,
    pub(crate) max_response: usize,
    pub(crate) stats: CacheStats,
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl CacheOptions {
    /// Entries are kept for an hour, the front has 25 ms to answer, and answers of up to 1 MiB are put into it.
    #[must_use]
    pub fn new() -> Self {
        Self {
            keep: Duration::from_secs(60 * 60),
            timeout: Duration::from_millis(25),
            namespace: String::new(),
            max_response: 1024 * 1024,
            stats: CacheStats::default(),
        }
    }

    /// How long an entry is kept at the longest. For so long at the most the front gives an answer that the back has lost.
    /// Between a second and [`limits::MAX_RETENTION`].
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_keep(mut self, keep: Duration) -> Result<Self, ConfigError> {
        self.keep = ConfigError::check(
            "the time that an entry is kept",
            keep,
            limits::MIN_RETENTION..=limits::MAX_RETENTION,
        )?;
        Ok(self)
    }

    /// How long a claim waits for the front. Between a millisecond and a second.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_timeout(mut self, timeout: Duration) -> Result<Self, ConfigError> {
        self.timeout = ConfigError::check(
            "the timeout with the front",
            timeout,
            Duration::from_millis(1)..=Duration::from_secs(1),
        )?;
        Ok(self)
    }

    /// Whose answers these are. Stores with the same front and different backs need different names, because a key of one is
    /// not that key of the other; stores with the same back and the same name share their entries.
    #[must_use]
    pub fn with_namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// The largest answer, encoded, that is put into the front, in bytes.
    #[must_use]
    pub const fn with_max_response_bytes(mut self, bytes: usize) -> Self {
        self.max_response = bytes;
        self
    }

    /// Where it is counted what the front is good for; otherwise in numbers of the store's own.
    #[must_use]
    pub fn with_stats(mut self, stats: CacheStats) -> Self {
        self.stats = stats;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_out_of_their_bounds_are_refused() {
        let options = CacheOptions::new;
        assert!(options().with_keep(limits::MIN_RETENTION).is_ok());
        assert!(options().with_keep(limits::MIN_RETENTION / 2).is_err());
        assert!(options().with_keep(limits::MAX_RETENTION * 2).is_err());
        assert!(options().with_timeout(Duration::from_secs(1)).is_ok());
        assert!(options().with_timeout(Duration::from_secs(2)).is_err());
        assert!(options().with_timeout(Duration::ZERO).is_err());
    }
}
