//! The lease, the retention, the wait and the rule for abandoned attempts.

use std::time::Duration;

use oncegate_core::{ConfigError, OnAbandoned, limits};

/// How long a claim owns its record, how long the record is kept, how long a duplicate waits, and what a claim does
/// where an earlier owner is gone or left no answer behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    pub(crate) lease: Duration,
    pub(crate) retention: Duration,
    pub(crate) wait: Duration,
    pub(crate) on_abandoned: OnAbandoned,
    pub(crate) asks_for_answers: bool,
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
            asks_for_answers: false,
        }
    }
}

impl Policy {
    /// How long a claim owns its record without a renewal. The engine renews at a third of it, so this is how long a key
    /// stays blocked after its owner crashed, not how long a handler may take.
    ///
    /// # Errors
    /// Outside [`limits::MIN_LEASE`] to [`limits::MAX_LEASE`].
    pub fn with_lease(self, lease: Duration) -> Result<Self, ConfigError> {
        bounded("lease", lease, limits::MIN_LEASE, limits::MAX_LEASE)?;
        Ok(Self { lease, ..self })
    }

    /// Sets the time that a completed record is kept, counted from its completion.
    ///
    /// # Errors
    /// Outside [`limits::MIN_RETENTION`] to [`limits::MAX_RETENTION`].
    pub fn with_retention(self, retention: Duration) -> Result<Self, ConfigError> {
        bounded("retention", retention, limits::MIN_RETENTION, limits::MAX_RETENTION)?;
        Ok(Self { retention, ..self })
    }

    /// How long a duplicate waits for the owner's answer before it is told that the request is in progress: 2 seconds by
    /// default, so that a double click gets the answer. Zero does not wait.
    ///
    /// # Errors
    /// Longer than [`limits::MAX_LEASE`].
    pub fn with_wait(self, wait: Duration) -> Result<Self, ConfigError> {
        bounded("wait", wait, Duration::ZERO, limits::MAX_LEASE)?;
        Ok(Self { wait, ..self })
    }

    /// The action of a claim if an earlier owner's lease ran out.
    #[must_use]
    pub const fn with_on_abandoned(self, on_abandoned: OnAbandoned) -> Self {
        Self { on_abandoned, ..self }
    }

    /// Whether a claim that finds a record that was completed without its answer gets the right to add it
    /// ([`ClaimOutcome::AddAnswer`](crate::ClaimOutcome::AddAnswer)), for callers who can find it out. By default it hears
    /// that the answer cannot be replayed. Costs one read more for such a record, and nothing for all others.
    #[must_use]
    pub const fn with_answers_asked_for(self, asks_for_answers: bool) -> Self {
        Self { asks_for_answers, ..self }
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

    /// How long a key that was freed is remembered for its token: a few leases, in which whoever owned it before may still
    /// write. Not for the retention: requests that are refused would fill the store.
    #[must_use]
    pub fn released_retention(&self) -> Duration {
        (self.lease * RELEASED_LEASES).clamp(limits::MIN_RETENTION, self.retention.max(limits::MIN_RETENTION))
    }

    /// The time that a duplicate waits.
    #[must_use]
    pub const fn wait(&self) -> Duration {
        self.wait
    }

    /// Returns true if a claim may get the right to add the missing answer of a completed record.
    #[must_use]
    pub const fn asks_for_answers(&self) -> bool {
        self.asks_for_answers
    }

    /// The action of a claim if an earlier owner's lease ran out.
    #[must_use]
    pub const fn on_abandoned(&self) -> OnAbandoned {
        self.on_abandoned
    }
}

fn bounded(name: &str, value: Duration, min: Duration, max: Duration) -> Result<(), ConfigError> {
    if (min..=max).contains(&value) {
        Ok(())
    } else {
        Err(ConfigError::new(format!("{name} is {value:?}; it must be from {min:?} to {max:?}")))
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
