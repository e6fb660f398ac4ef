//! Records to fill a store with.

use std::error::Error;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::{
    AttemptId, CallerTag, Claim, Command, Complete, Completion, FencingToken, Fingerprint, Label,
    OnAbandoned, Outcome, RecordId, Store, StoredResponse,
};

/// An error. It ends the benchmark.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The lease of a claim.
pub(crate) const LEASE: Duration = Duration::from_secs(30);

/// Claims record `number`, which has to be a new one.
pub(crate) async fn claim(store: &dyn Store, number: u64, retention: Duration) -> Result<FencingToken> {
    match store.apply(id(number), command(number, retention)).await? {
        Outcome::Execute(grant) => Ok(grant.token),
        other => Err(format!("record {number} is not new: {other:?}").into()),
    }
}

/// Completes record `number`.
pub(crate) async fn complete(
    store: &dyn Store,
    number: u64,
    token: FencingToken,
    body: &Bytes,
    retention: Duration,
) -> Result<()> {
    let body = [body.clone()];
    let response = StoredResponse::new(201, &[("content-type", b"application/json")], &body, &[])?;
    let completion = Completion::Replayable(response);
    store.apply(id(number), Command::Complete(Complete { token, completion, retention })).await?;
    Ok(())
}

/// Claims record `number`, which has to be completed.
pub(crate) async fn replay(store: &dyn Store, number: u64) -> Result<()> {
    match store.apply(id(number), command(number, Duration::from_secs(60))).await? {
        Outcome::Replay(_) => Ok(()),
        other => Err(format!("record {number} is not replayed: {other:?}").into()),
    }
}

fn command(number: u64, retention: Duration) -> Command {
    claim_of(number, Fingerprint::of_parts("bench", &[&number.to_be_bytes()]), retention)
}

/// A claim with this fingerprint.
pub(crate) fn claim_of(number: u64, fingerprint: Fingerprint, retention: Duration) -> Command {
    Command::Claim(Claim {
        attempt: AttemptId::new(u128::from(number)),
        fingerprint,
        lease: LEASE,
        retention,
        on_abandoned: OnAbandoned::Park,
        label: Label::new(CallerTag::default(), "POST /v1/payments"),
    })
}

/// As scattered as the digests that identifiers are, and different for every number.
pub(crate) fn id(number: u64) -> RecordId {
    let mut bytes = [0; 32];
    for (at, chunk) in (0_u64..).zip(bytes.chunks_mut(8)) {
        chunk.copy_from_slice(&scatter(number ^ at << 60).to_be_bytes());
    }
    RecordId::from_bytes(bytes)
}

/// Another number for every number (SplitMix64).
pub(crate) fn scatter(number: u64) -> u64 {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// Bytes of this process in memory, now (`VmRSS`) or at the most so far (`VmHWM`).
pub(crate) fn resident(line: &str) -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let found = status.lines().find_map(|text| text.strip_prefix(line)?.strip_prefix(':'));
    let kibibytes = found.and_then(|text| text.split_whitespace().next()).ok_or("no such figure")?;
    Ok(kibibytes.parse::<u64>()? * 1024)
}
