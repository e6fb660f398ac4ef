//! The expectations of each profile, as data: the verdicts compare what was seen with them, and with nothing else.

use std::time::Duration;

/// The behaviour that a dialect promises to its clients.
#[derive(Clone, Debug)]
pub struct Expectations {
    /// The name of the profile.
    pub name: String,
    /// The header field that carries the key.
    pub key_header: String,
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
    /// True if responses from 500 to 599 are kept and replayed.
    pub keeps_server_errors: bool,
    /// Statuses that free the key.
    pub released: Vec<u16>,
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
            key_header: "Idempotency-Key".to_owned(),
            key_reused: vec![422],
            in_progress: vec![409],
            key_missing: vec![400],
            key_invalid: vec![400],
            raw_keys: false,
            keeps_server_errors: true,
            released: UNDECIDED.to_vec(),
            replay_marker: Some(("Idempotent-Replayed".to_owned(), "true".to_owned())),
            retry_after: true,
            retention: DAY,
        }
    }

    /// The profile `stripe`: Stripe's API, version 1.
    #[must_use]
    pub fn stripe() -> Self {
        let mut released = UNDECIDED.to_vec();
        released.push(400);
        Self {
            name: "stripe".to_owned(),
            key_reused: vec![400],
            raw_keys: true,
            released,
            retry_after: false,
            ..Self::ietf()
        }
    }

    /// The profile `classic`: the middleware of most tutorials.
    #[must_use]
    pub fn classic() -> Self {
        Self {
            name: "classic".to_owned(),
            keeps_server_errors: false,
            replay_marker: Some(("X-Idempotent-Replayed".to_owned(), "true".to_owned())),
            retry_after: false,
            ..Self::ietf()
        }
    }

    /// Every profile that has expectations.
    #[must_use]
    pub fn all() -> [Self; 3] {
        [Self::ietf(), Self::stripe(), Self::classic()]
    }

    /// The expectations of the profile with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|expectations| expectations.name == name)
    }

    /// Returns `true` if a response with this status is kept and replayed.
    pub(crate) fn keeps(&self, status: u16) -> bool {
        !self.released.contains(&status) && (status < 500 || self.keeps_server_errors)
    }
}

/// Statuses as text: `409` or `409 or 423`.
pub(crate) fn any_of(statuses: &[u16]) -> String {
    statuses.iter().map(u16::to_string).collect::<Vec<_>>().join(" or ")
}
