//! The options of a [`CachedStore`](crate::CachedStore).

use std::time::Duration;

use oncegate_core::{ConfigError, limits};

use crate::stats::CacheStats;

/// The minimum time by which an entry of the cache ends before its record. A thousandth of the record's remaining retention
/// is added to it.
///
/// The store's time is known as its last reply plus the time that has passed here since. The margin is more than the error
/// of that, even if the store has been unreachable all the time.
pub const MARGIN: Duration = Duration::from_secs(5);

/// The clocks of two machines drift apart by less than this fraction (1/1000).
pub(crate) const MARGIN_PART: u32 = 1000;

/// The options of a [`CachedStore`](crate::CachedStore).
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
    /// The defaults: entries are kept for an hour, the cache has 25 ms to reply, and responses of up to 1 MiB are cached.
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

    /// Sets the maximum age of an entry. If the store loses a record, the cache gives its response until then. From one
    /// second to [`limits::MAX_RETENTION`].
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_keep(mut self, keep: Duration) -> Result<Self, ConfigError> {
        self.keep = ConfigError::check(
            "the time that a cache entry is kept",
            keep,
            limits::MIN_RETENTION..=limits::MAX_RETENTION,
        )?;
        Ok(self)
    }

    /// Sets the maximum time that a claim waits for the cache. From one millisecond to one second.
    ///
    /// # Errors
    /// If it is out of these bounds.
    pub fn with_timeout(mut self, timeout: Duration) -> Result<Self, ConfigError> {
        self.timeout = ConfigError::check(
            "the timeout of the cache",
            timeout,
            Duration::from_millis(1)..=Duration::from_secs(1),
        )?;
        Ok(self)
    }

    /// Sets the name that keeps this store's entries apart in a shared cache. Different stores that share a cache need
    /// different names, because they hold different keys. Processes that use the same store and name share their entries.
    #[must_use]
    pub fn with_namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// Sets the size of the largest response that is cached, encoded, in bytes.
    #[must_use]
    pub const fn with_max_response_bytes(mut self, bytes: usize) -> Self {
        self.max_response = bytes;
        self
    }

    /// Sets the counters to use, so that the caller can read them. By default the store makes its own.
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
