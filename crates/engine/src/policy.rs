//! The lease, the retention, the wait and the rule for abandoned attempts.

use std::time::Duration;

use oncegate_core::{ConfigError, OnAbandoned, limits};

/// The rules of a claim: the lease, the retention, the wait of duplicates, and the action if an earlier owner is gone or left
/// no response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    pub(crate) lease: Duration,
    pub(crate) retention: Duration,
    pub(crate) wait: Duration,
    pub(crate) on_abandoned: OnAbandoned,
    pub(crate) recovers_responses: bool,
}

/// See [`Policy::released_retention`].
const RELEASED_LEASES: u32 = 4;

impl Default for Policy {
    /// A lease of 30 seconds, a retention of 24 hours, a wait of 2 seconds, and `park`.
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(30),
            retention: Duration::from_secs(24 * 60 * 60),
            wait: Duration::from_secs(2),
            on_abandoned: OnAbandoned::Park,
            recovers_responses: false,
        }
    }
}

impl Policy {
    /// Sets the time that a claim owns its record without a renewal. The engine renews after a third of it. So this is the time
    /// that a key stays blocked after its owner crashed, not a limit on handlers.
    ///
    /// # Errors
    /// Outside [`limits::MIN_LEASE`] to [`limits::MAX_LEASE`].
    pub fn with_lease(self, lease: Duration) -> Result<Self, ConfigError> {
        let lease = ConfigError::check("lease", lease, limits::MIN_LEASE..=limits::MAX_LEASE)?;
        Ok(Self { lease, ..self })
    }

    /// Sets the time that a completed record is kept, counted from its completion.
    ///
    /// # Errors
    /// Outside [`limits::MIN_RETENTION`] to [`limits::MAX_RETENTION`].
    pub fn with_retention(self, retention: Duration) -> Result<Self, ConfigError> {
        let bounds = limits::MIN_RETENTION..=limits::MAX_RETENTION;
        Ok(Self { retention: ConfigError::check("retention", retention, bounds)?, ..self })
    }

    /// Sets the time that a duplicate waits for the owner's response until it gets `InProgress`: 2 seconds by default, so that
    /// a double click gets the response. With zero it does not wait.
    ///
    /// # Errors
    /// Longer than [`limits::MAX_LEASE`].
    pub fn with_wait(self, wait: Duration) -> Result<Self, ConfigError> {
        let wait = ConfigError::check("wait", wait, Duration::ZERO..=limits::MAX_LEASE)?;
        Ok(Self { wait, ..self })
    }

    /// Sets the action of a claim if an earlier owner's lease has ended.
    #[must_use]
    pub const fn with_on_abandoned(self, on_abandoned: OnAbandoned) -> Self {
        Self { on_abandoned, ..self }
    }

    /// Lets a claim add the response of a record that was completed without it
    /// ([`ClaimOutcome::AddResponse`](crate::ClaimOutcome::AddResponse)), for callers that can find it out. By default such a
    /// claim gets `Unreplayable`. This costs one more read for such a record, and nothing for all others.
    #[must_use]
    pub const fn with_response_recovery(self, recovers_responses: bool) -> Self {
        Self { recovers_responses, ..self }
    }

    /// The length of the lease.
    #[must_use]
    pub const fn lease(&self) -> Duration {
        self.lease
    }

    /// The time that a completed record is kept.
    #[must_use]
    pub const fn retention(&self) -> Duration {
        self.retention
    }

    /// The time that the record of a released key is kept for its token: a few leases, in which an earlier owner may still
    /// write. It is shorter than the retention, because refused requests would fill the store.
    #[must_use]
    pub fn released_retention(&self) -> Duration {
        (self.lease * RELEASED_LEASES).clamp(limits::MIN_RETENTION, self.retention.max(limits::MIN_RETENTION))
    }

    /// The time that a duplicate waits.
    #[must_use]
    pub const fn wait(&self) -> Duration {
        self.wait
    }

    /// Returns true if a claim may add the missing response of a completed record.
    #[must_use]
    pub const fn recovers_responses(&self) -> bool {
        self.recovers_responses
    }

    /// The action of a claim if an earlier owner's lease has ended.
    #[must_use]
    pub const fn on_abandoned(&self) -> OnAbandoned {
        self.on_abandoned
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BIT: Duration = Duration::from_nanos(1);

    #[test]
    fn every_duration_is_bounded() {
        let policy = Policy::default();
        for (min, max, set) in [
            (limits::MIN_LEASE, limits::MAX_LEASE, Policy::with_lease as fn(_, _) -> _),
            (limits::MIN_RETENTION, limits::MAX_RETENTION, Policy::with_retention),
        ] {
            assert!(set(policy, min).is_ok() && set(policy, max).is_ok());
            assert!(set(policy, min - BIT).is_err() && set(policy, max + BIT).is_err());
        }
        assert!(policy.with_wait(Duration::ZERO).is_ok() && policy.with_wait(limits::MAX_LEASE).is_ok());
        assert!(policy.with_wait(limits::MAX_LEASE + BIT).is_err());
    }

    #[test]
    fn an_error_names_the_setting_and_its_bounds() {
        let error = Policy::default().with_lease(Duration::ZERO).unwrap_err();
        assert_eq!(error.to_string(), "lease is 0ns; it must be from 100ms to 3600s");
    }
}
