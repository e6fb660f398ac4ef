//! The record that a store holds for a [`RecordId`](crate::RecordId).

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Timestamp;
use crate::fingerprint::Fingerprint;
use crate::id::{AttemptId, CallerTag, FencingToken, KeyTag};
use crate::limits;
use crate::response::StoredResponse;
use crate::step::Steps;

/// The record that a store holds for a [`RecordId`](crate::RecordId).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Record {
    /// The fingerprint of the request that claimed this record.
    pub fingerprint: Fingerprint,
    /// The token of the newest claim.
    pub token: FencingToken,
    /// The number of granted attempts, the newest included.
    pub attempts: u32,
    /// The state of the record.
    pub state: State,
    /// The part that an operator sees in a listing.
    pub label: Label,
    /// The time of the first claim.
    pub created_at: Timestamp,
    /// The time at which the record entered its state.
    pub changed_at: Timestamp,
    /// The time from which the record counts as absent and may be purged. It moves with each renewal. The retention of a
    /// completed record counts from its completion.
    pub expires_at: Timestamp,
    /// The steps that attempts have finished, so that the next attempt continues after them. The owner's completion removes
    /// them. An operator's completion keeps them, because it may be taken back.
    pub steps: Steps,
    /// True if an operator put the record into its present state. Only such a completion may be amended or parked.
    pub by_operator: bool,
}

/// The states of a record. Expired and abandoned are derived from the clock and never stored.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// An attempt owns the record, until `lease_until` unless it renews.
    InProgress {
        /// The attempt that owns it.
        attempt: AttemptId,
        /// The end of the lease.
        lease_until: Timestamp,
        /// True if an earlier attempt was abandoned, so that its effect may have happened.
        after_abandoned: bool,
    },
    /// It is unknown whether the effect took place, and an operator has to resolve the record.
    Unknown,
    /// The operation took place, with this response.
    Completed(RecordedResponse),
    /// The key is free again. The record stays so that its token continues to grow.
    Released,
}

/// The response of a completed record.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecordedResponse {
    /// The response to replay.
    Replayable(StoredResponse),
    /// Completed inside a transaction of the owner, without the response. The same owner may add the response once.
    Awaited,
    /// The response cannot be replayed (too large, streamed, secret). Even so, the operation never runs again.
    Tombstone,
}

/// The names of the states, as listings, metrics and documents spell them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum StateName {
    /// In progress, and the owner's lease lasts.
    InProgress,
    /// In progress, but the lease has ended.
    Abandoned,
    /// The outcome is unknown.
    Unknown,
    /// Completed with a response to replay.
    Completed,
    /// Completed without a response to replay.
    Tombstone,
    /// Free again.
    Released,
}

impl StateName {
    /// Every name.
    pub const ALL: [Self; 6] =
        [Self::InProgress, Self::Abandoned, Self::Unknown, Self::Completed, Self::Tombstone, Self::Released];

    /// The name as text.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::InProgress => "in-progress",
            Self::Abandoned => "abandoned",
            Self::Unknown => "unknown",
            Self::Completed => "completed",
            Self::Tombstone => "tombstone",
            Self::Released => "released",
        }
    }

    /// The state with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == name)
    }
}

/// A set of states, such as those that a listing asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StateSet(u8);

impl StateSet {
    /// Every state.
    pub const ALL: Self = Self::of(&StateName::ALL);

    /// The states whose outcome an operator has to find out: `abandoned` and `unknown`.
    pub const UNSETTLED: Self = Self::of(&[StateName::Abandoned, StateName::Unknown]);

    /// The states that are not the end: `in-progress`, `abandoned` and `unknown`.
    pub const OPEN: Self = Self::of(&[StateName::InProgress, StateName::Abandoned, StateName::Unknown]);

    /// These states.
    #[must_use]
    pub const fn of(states: &[StateName]) -> Self {
        let (mut bits, mut rest) = (0, states);
        while let [state, others @ ..] = rest {
            bits |= 1 << (*state as u8);
            rest = others;
        }
        Self(bits)
    }

    /// Returns true if the state is in the set.
    #[must_use]
    pub const fn contains(self, state: StateName) -> bool {
        self.0 & (1 << (state as u8)) != 0
    }

    /// The states in the set.
    pub fn iter(self) -> impl Iterator<Item = StateName> {
        StateName::ALL.into_iter().filter(move |state| self.contains(*state))
    }
}

impl From<StateName> for StateSet {
    fn from(state: StateName) -> Self {
        Self::of(&[state])
    }
}

impl FromIterator<StateName> for StateSet {
    fn from_iter<I: IntoIterator<Item = StateName>>(states: I) -> Self {
        states.into_iter().fold(Self(0), |set, state| Self(set.0 | Self::from(state).0))
    }
}

impl fmt::Display for StateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Record {
    /// A record for a store that keeps the fields of records instead of their [bytes](crate::codec). It is a first attempt, and
    /// all its times are `created_at`: the store sets the other fields next.
    #[must_use]
    pub const fn new(
        fingerprint: Fingerprint,
        token: FencingToken,
        state: State,
        label: Label,
        created_at: Timestamp,
    ) -> Self {
        Self {
            fingerprint,
            token,
            attempts: 1,
            state,
            label,
            created_at,
            changed_at: created_at,
            expires_at: created_at,
            steps: Steps::NONE,
            by_operator: false,
        }
    }

    /// Returns true if the record is past its retention and counts as absent.
    #[must_use]
    pub fn is_expired(&self, now: Timestamp) -> bool {
        now >= self.expires_at
    }

    /// The record with all its times moved ahead by this much: for a store whose clock was
    /// [set](crate::StoreClock::accept) after the record was written.
    #[must_use]
    pub fn shifted(mut self, by: Duration) -> Self {
        self.created_at = self.created_at.after(by);
        self.changed_at = self.changed_at.after(by);
        self.expires_at = self.expires_at.after(by);
        if let State::InProgress { lease_until, .. } = &mut self.state {
            *lease_until = lease_until.after(by);
        }
        self
    }

    /// The response that a replay returns, if there is one.
    #[must_use]
    pub const fn response(&self) -> Option<&StoredResponse> {
        match &self.state {
            State::Completed(RecordedResponse::Replayable(response)) => Some(response),
            _ => None,
        }
    }

    /// The state as seen at `now`.
    #[must_use]
    pub fn state_name(&self, now: Timestamp) -> StateName {
        match &self.state {
            State::InProgress { lease_until, .. } if now >= *lease_until => StateName::Abandoned,
            State::InProgress { .. } => StateName::InProgress,
            State::Unknown => StateName::Unknown,
            State::Completed(RecordedResponse::Replayable(_)) => StateName::Completed,
            State::Completed(RecordedResponse::Awaited | RecordedResponse::Tombstone) => StateName::Tombstone,
            State::Released => StateName::Released,
        }
    }
}

/// The part of a record that an operator sees: the operation, and marks of the caller and the key that reveal neither. Cheap
/// to clone.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Label {
    caller: CallerTag,
    key: Option<KeyTag>,
    operation: Arc<str>,
}

impl Label {
    /// A label without the tag of a key. An operation longer than [`limits::MAX_OPERATION_BYTES`] bytes is cut.
    #[must_use]
    pub fn new(caller: CallerTag, operation: &str) -> Self {
        let end = operation.floor_char_boundary(limits::MAX_OPERATION_BYTES);
        Self { caller, key: None, operation: operation.get(..end).unwrap_or_default().into() }
    }

    /// The same label with the tag of the record's key, by which an operator finds it.
    #[must_use]
    pub fn with_key(self, key: impl Into<Option<KeyTag>>) -> Self {
        Self { key: key.into(), ..self }
    }

    /// A label of parts that were one before.
    pub(crate) const fn from_parts(caller: CallerTag, key: Option<KeyTag>, operation: Arc<str>) -> Self {
        Self { caller, key, operation }
    }

    /// The operation, without a copy.
    pub(crate) fn shared_operation(&self) -> Arc<str> {
        self.operation.clone()
    }

    /// The caller's mark.
    #[must_use]
    pub const fn caller(&self) -> CallerTag {
        self.caller
    }

    /// The tag of the key; `None` if the claim did not have it.
    #[must_use]
    pub const fn key(&self) -> Option<KeyTag> {
        self.key
    }

    /// The operation, such as `POST /payments`.
    #[must_use]
    pub fn operation(&self) -> &str {
        &self.operation
    }
}

impl fmt::Debug for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.caller, self.operation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_operation_is_cut_at_a_character_boundary() {
        let cut = |text: String| Label::new(CallerTag::default(), &text).operation().len();
        assert_eq!(cut("a".repeat(limits::MAX_OPERATION_BYTES)), limits::MAX_OPERATION_BYTES);
        assert_eq!(cut("a".repeat(limits::MAX_OPERATION_BYTES + 1)), limits::MAX_OPERATION_BYTES);
        assert_eq!(
            cut(format!("{}é", "a".repeat(limits::MAX_OPERATION_BYTES - 1))),
            limits::MAX_OPERATION_BYTES - 1
        );
    }

    #[test]
    fn state_names_read_back() {
        for state in StateName::ALL {
            assert_eq!(StateName::from_name(state.as_str()), Some(state));
        }
    }

    #[test]
    fn a_set_contains_the_states_that_it_was_made_of() {
        for state in StateName::ALL {
            assert!(StateSet::ALL.contains(state));
            assert_eq!(StateSet::from(state).iter().collect::<Vec<_>>(), [state]);
            let is_unsettled = matches!(state, StateName::Abandoned | StateName::Unknown);
            assert_eq!(StateSet::UNSETTLED.contains(state), is_unsettled, "{state}");
            assert_eq!(StateSet::OPEN.contains(state), is_unsettled || state == StateName::InProgress);
        }
        assert_eq!(StateName::ALL.into_iter().collect::<StateSet>(), StateSet::ALL);
        assert_eq!(std::iter::empty().collect::<StateSet>().iter().count(), 0);
    }
}
