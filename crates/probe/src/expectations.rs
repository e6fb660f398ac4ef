//! The expectations, as data: the verdicts compare what was seen with them, and with nothing else.

use std::time::Duration;

/// The behaviour that a dialect promises to its clients.
#[derive(Clone, Debug)]
pub struct Expectations {
    /// The name of the profile.
    pub name: String,
    /// The header field that carries the key; `None` if it is in the body or in the query.
    pub key_header: Option<String>,
    /// True if a request without a key must be refused.
    pub requires_key: bool,
    /// True if another body under a used key must be refused. Otherwise it gets the first response.
    pub compares_bodies: bool,
    /// Statuses that refuse another request under a used key.
    pub key_reused: Vec<u16>,
    /// Statuses that refuse a duplicate while the first request runs.
    pub in_progress: Vec<u16>,
    /// Statuses that refuse a request without a key, if keys are required.
    pub key_missing: Vec<u16>,
    /// Statuses that refuse an invalid key.
    pub key_invalid: Vec<u16>,
    /// True if a key is any text: quotes and commas belong to it, and a quoted key is not the bare one.
    pub raw_keys: bool,
    /// Statuses that free the key. Responses with another status are kept and replayed.
    pub released: Vec<u16>,
    /// Statuses of first responses whose replays have another status, and that status.
    pub replay_statuses: Vec<(u16, u16)>,
    /// The header field that marks a replay, and its value.
    pub replay_marker: Option<(String, String)>,
    /// True if a refusal of a running request must have `Retry-After`.
    pub retry_after: bool,
    /// The time for which a key is remembered.
    pub retention: Duration,
}

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// Responses that decide nothing about the operation.
const UNDECIDED: [u16; 7] = [401, 403, 407, 408, 421, 425, 429];

impl Expectations {
    /// The profile `ietf`: draft-ietf-httpapi-idempotency-key-header-07, and marked replays.
    #[must_use]
    pub fn ietf() -> Self {
        Self {
            name: "ietf".to_owned(),
            key_header: Some("Idempotency-Key".to_owned()),
            requires_key: false,
            compares_bodies: true,
            key_reused: vec![422],
            in_progress: vec![409],
            key_missing: vec![400],
            key_invalid: vec![400],
            raw_keys: false,
            released: UNDECIDED.to_vec(),
            replay_statuses: Vec::new(),
            replay_marker: Some(("Idempotent-Replayed".to_owned(), "true".to_owned())),
            retry_after: true,
            retention: DAY,
        }
    }

    /// Returns `true` if a response with this status is kept and replayed.
    pub(crate) fn keeps(&self, status: u16) -> bool {
        !self.released.contains(&status)
    }

    /// The status of a replay of a response with this status.
    pub(crate) fn replayed(&self, first: u16) -> u16 {
        self.replay_statuses.iter().find(|(own, _)| *own == first).map_or(first, |(_, replay)| *replay)
    }
}

/// Statuses as text: `409` or `409 or 423`.
pub(crate) fn any_of(statuses: &[u16]) -> String {
    statuses.iter().map(u16::to_string).collect::<Vec<_>>().join(" or ")
}
