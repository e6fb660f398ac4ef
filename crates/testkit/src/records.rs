//! Identifiers, claims and responses for tests.

use std::time::Duration;

use bytes::Bytes;
use oncegate_core::{AttemptId, CallerTag, Claim, Fingerprint, Label, OnAbandoned, RecordId, StoredResponse};

/// Returns the identifier of this number. The first bytes are spread, as those of a digest are.
#[must_use]
pub fn record_id(n: u64) -> RecordId {
    let mut bytes = [0x5a; 32];
    bytes[..8].copy_from_slice(&(n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
    bytes[8..16].copy_from_slice(&n.to_be_bytes());
    RecordId::from_bytes(bytes)
}

/// Returns a claim for this input, with a lease of 30 seconds and a retention of a day.
#[must_use]
pub fn claim(attempt: impl Into<u128>, input: &[u8]) -> Claim {
    Claim {
        attempt: AttemptId::new(attempt.into()),
        fingerprint: Fingerprint::of_parts("test", &[input]),
        lease: Duration::from_secs(30),
        retention: Duration::from_secs(86_400),
        on_abandoned: OnAbandoned::Park,
        label: Label::new(CallerTag::from_bytes([7; 8]), "POST /payments"),
    }
}

/// Returns a 201 with the body `receipt N`.
#[must_use]
pub fn response(n: u64) -> StoredResponse {
    let body = [Bytes::from(format!("receipt {n}"))];
    StoredResponse::new(201, &[("content-type", &b"text/plain"[..])], &body, &[]).expect("within the limits")
}
