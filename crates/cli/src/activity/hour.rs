//! The counters of requests over the last hour.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use oncegate_core::Timestamp;
use oncegate_http::{Condition, Disposition};

use super::{is_unknown, wall_clock};
use crate::admin::PLAIN_DISPOSITIONS;

/// The outcomes of requests in the groups in which an operator thinks of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutcomeGroup {
    Executed,
    Replayed,
    /// The first request with the key was in progress.
    InProgress,
    /// The key was used for another request.
    Mismatch,
    /// The outcome is unknown, the response is lost, or there may be a second effect.
    Unknown,
    /// Refused for another reason, or its client left before it had an outcome.
    Refused,
    /// Passed on without protection.
    Unprotected,
    /// Passed on, because its route only observes.
    Shadow,
}

pub(crate) const OUTCOME_GROUPS: [OutcomeGroup; 8] = [
    OutcomeGroup::Executed,
    OutcomeGroup::Replayed,
    OutcomeGroup::InProgress,
    OutcomeGroup::Mismatch,
    OutcomeGroup::Unknown,
    OutcomeGroup::Refused,
    OutcomeGroup::Unprotected,
    OutcomeGroup::Shadow,
];

impl OutcomeGroup {
    pub(crate) const fn of(disposition: Disposition) -> Self {
        match disposition {
            Disposition::Executed => Self::Executed,
            Disposition::Replayed => Self::Replayed,
            Disposition::Fenced => Self::Unknown,
            Disposition::NotCovered | Disposition::Unprotected | Disposition::FailedOpen => Self::Unprotected,
            Disposition::Shadow(_) => Self::Shadow,
            Disposition::Refused(Condition::RequestInProgress) => Self::InProgress,
            Disposition::Refused(Condition::KeyReused | Condition::HostDiffers) => Self::Mismatch,
            Disposition::Refused(condition) if is_unknown(condition) => Self::Unknown,
            _ => Self::Refused,
        }
    }

    /// The group of the outcome with this name; `None` if this version does not know it.
    pub(crate) fn of_outcome(name: &str) -> Option<Self> {
        let refusals = Condition::ALL.into_iter().map(Disposition::Refused);
        PLAIN_DISPOSITIONS.into_iter().chain(refusals).find(|known| known.as_str() == name).map(Self::of)
    }

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Executed => "executed",
            Self::Replayed => "replayed",
            Self::InProgress => "in-progress",
            Self::Mismatch => "mismatch",
            Self::Unknown => "unknown",
            Self::Refused => "refused",
            Self::Unprotected => "unprotected",
            Self::Shadow => "shadow",
        }
    }
}

/// Numbers of requests, in the order of [`OUTCOME_GROUPS`].
pub(crate) type OutcomeCounts = [u64; OUTCOME_GROUPS.len()];

/// The interval of the samples.
const INTERVAL: Duration = Duration::from_secs(10);

/// An hour of them, and the one before.
const SAMPLES: usize = 361;

/// The minutes that are shown.
pub(crate) const MINUTES: usize = 60;

const MINUTE: u64 = 60_000;

/// The counters, sampled every ten seconds for an hour.
#[derive(Debug, Default)]
pub(crate) struct LastHour(Mutex<VecDeque<(Timestamp, OutcomeCounts)>>);

/// The requests of one minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Minute {
    /// Its start.
    pub(crate) at: Timestamp,
    pub(crate) counts: OutcomeCounts,
}

impl LastHour {
    /// Samples until it is dropped. `read` returns the counters since the start.
    pub(crate) async fn sample(&self, read: impl Fn() -> OutcomeCounts) {
        let mut tick = tokio::time::interval(INTERVAL);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            self.add(wall_clock(), read());
        }
    }

    pub(super) fn add(&self, at: Timestamp, counts: OutcomeCounts) {
        let mut samples = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A clock that was set back would mix up the minutes.
        while samples.back().is_some_and(|(last, _)| *last > at) {
            samples.pop_back();
        }
        if samples.len() == SAMPLES {
            samples.pop_front();
        }
        samples.push_back((at, counts));
    }

    /// The requests of each of the last sixty minutes, the oldest first; `now` are the counters at this moment. A minute before
    /// the start has no requests.
    pub(crate) fn minutes(&self, now: OutcomeCounts) -> Vec<Minute> {
        self.minutes_at(wall_clock(), now)
    }

    pub(super) fn minutes_at(&self, at: Timestamp, now: OutcomeCounts) -> Vec<Minute> {
        let samples = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let this_minute = at.as_millis() / MINUTE;
        let first = this_minute.saturating_sub(MINUTES as u64 - 1);
        let mut minutes: Vec<_> = (first..=this_minute)
            .map(|minute| Minute {
                at: Timestamp::from_millis(minute * MINUTE),
                counts: [0; OUTCOME_GROUPS.len()],
            })
            .collect();
        let samples: Vec<_> = samples.into_iter().chain([(at, now)]).collect();
        for pair in samples.windows(2) {
            let [(_, before), (at, after)] = pair else { continue };
            // Requests since the previous sample count in the minute of the middle between both; ten seconds are little.
            let minute = at.as_millis().saturating_sub(INTERVAL.as_millis() as u64 / 2) / MINUTE;
            let Some(place) = minute.checked_sub(first).and_then(|place| usize::try_from(place).ok()) else {
                continue;
            };
            if let Some(minute) = minutes.get_mut(place) {
                for (count, (after, before)) in minute.counts.iter_mut().zip(after.iter().zip(before)) {
                    *count += after.saturating_sub(*before);
                }
            }
        }
        minutes
    }
}
