//! A record as bytes, for stores that keep bytes.
//!
//! ```text
//! u8 version | u32 CRC-32C, big-endian | CBOR (RFC 8949) map with integer keys
//! ```
//!
//! The checksum covers the version, the record's identifier and the map. So a record that was damaged, cut, or moved to
//! another identifier is refused. Readers skip keys that they do not know. A change that they must not skip gets a new
//! version; an unknown version is an error, never an absent record.
//!
//! | key | value | |
//! |---|---|---|
//! | 0, 1 | fingerprint version, digest (32 bytes) | always |
//! | 2, 3 | fencing token, attempts | always |
//! | 4 | state: 0 in progress, 1 unknown, 2 completed, 3 awaited, 4 tombstone, 5 released | always |
//! | 5, 6, 7 | created, changed, expires: milliseconds since 1970 | always |
//! | 8, 9 | caller mark (8 bytes), operation (text) | always |
//! | 10, 11, 12 | attempt (16 bytes), lease until, after abandoned (bool) | state 0 |
//! | 13 | response ([`StoredResponse::as_encoded`]) | state 2 |
//! | 14 | steps: an array of names (text) and results (bytes), in turn | if there are any |
//! | 15 | tag of the key (8 bytes) | if it is known |
//! | 16 | true: an operator put the record into its state | if one did |

use bytes::Bytes;
use minicbor::data::Type;
use minicbor::{Decoder, Encoder};

use crate::clock::Timestamp;
use crate::fingerprint::Fingerprint;
use crate::id::{AttemptId, CallerTag, FencingToken, KeyTag, RecordId};
use crate::record::{Label, Record, RecordedResponse, State};
use crate::response::StoredResponse;
use crate::step::{Step, Steps};

/// The version that [`encode`] writes and [`decode`] reads.
pub const VERSION: u8 = 1;

const HEAD: usize = 1 + 4;

/// The reason why bytes cannot be read as a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// The record has another version, written by a newer program.
    #[error("the record has format version {0}; this program knows version {VERSION}")]
    UnknownVersion(u8),
    /// The checksum does not match, or the bytes were cut.
    #[error("the record is damaged: its checksum does not match")]
    Damaged,
    /// The checksum matches, but a part is missing or out of range.
    #[error("the record is malformed: a part is missing or out of range")]
    Malformed,
}

/// The bytes of a record that is kept under `id`.
#[must_use]
pub fn encode(id: &RecordId, record: &Record) -> Vec<u8> {
    let response_len = match &record.state {
        State::Completed(RecordedResponse::Replayable(response)) => response.as_encoded().len(),
        _ => 0,
    };
    let mut bytes = Vec::with_capacity(160 + record.label.operation().len() + response_len);
    bytes.extend_from_slice(&[VERSION, 0, 0, 0, 0]);
    // Writing to a vector cannot fail.
    let Ok(()) = encode_map(&mut Encoder::new(&mut bytes), record);
    let sum = checksum(VERSION, id, bytes.get(HEAD..).unwrap_or_default()).to_be_bytes();
    if let Some(place) = bytes.get_mut(1..HEAD) {
        place.copy_from_slice(&sum);
    }
    bytes
}

/// Reads a record that was kept under `id`. Copies the response once, into an allocation of its own.
///
/// # Errors
/// [`CodecError`] if it is damaged or of an unknown version. Such a record must never be treated as absent.
pub fn decode(id: &RecordId, bytes: &[u8]) -> Result<Record, CodecError> {
    let (&version, rest) = bytes.split_first().ok_or(CodecError::Damaged)?;
    if version != VERSION {
        return Err(CodecError::UnknownVersion(version));
    }
    let (sum, map) = rest.split_first_chunk::<4>().ok_or(CodecError::Damaged)?;
    if checksum(version, id, map) != u32::from_be_bytes(*sum) {
        return Err(CodecError::Damaged);
    }
    decode_map(map).ok_or(CodecError::Malformed)
}

fn checksum(version: u8, id: &RecordId, map: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c_append(crc32c::crc32c(&[version]), id.as_bytes()), map)
}

type Infallible = minicbor::encode::Error<core::convert::Infallible>;

fn encode_map(to: &mut Encoder<&mut Vec<u8>>, record: &Record) -> Result<(), core::convert::Infallible> {
    match try_encode_map(to, record) {
        Ok(()) => Ok(()),
        // `Infallible` has no value, and no encoder here raises a custom message.
        Err(_) => Ok(()),
    }
}

fn try_encode_map(to: &mut Encoder<&mut Vec<u8>>, record: &Record) -> Result<(), Infallible> {
    let extra = match &record.state {
        State::InProgress { .. } => 3,
        State::Completed(RecordedResponse::Replayable(_)) => 1,
        _ => 0,
    };
    let optional = [!record.steps.is_empty(), record.label.key().is_some(), record.by_operator];
    to.map(10 + extra + optional.map(u64::from).iter().sum::<u64>())?;
    to.u8(0)?.u8(record.fingerprint.version())?;
    to.u8(1)?.bytes(record.fingerprint.digest())?;
    to.u8(2)?.u64(record.token.get())?;
    to.u8(3)?.u32(record.attempts)?;
    to.u8(4)?.u8(match &record.state {
        State::InProgress { .. } => 0,
        State::Unknown => 1,
        State::Completed(RecordedResponse::Replayable(_)) => 2,
        State::Completed(RecordedResponse::Awaited) => 3,
        State::Completed(RecordedResponse::Tombstone) => 4,
        State::Released => 5,
    })?;
    to.u8(5)?.u64(record.created_at.as_millis())?;
    to.u8(6)?.u64(record.changed_at.as_millis())?;
    to.u8(7)?.u64(record.expires_at.as_millis())?;
    to.u8(8)?.bytes(record.label.caller().as_bytes())?;
    to.u8(9)?.str(record.label.operation())?;
    match &record.state {
        State::InProgress { attempt, lease_until, after_abandoned } => {
            to.u8(10)?.bytes(&attempt.get().to_be_bytes())?;
            to.u8(11)?.u64(lease_until.as_millis())?;
            to.u8(12)?.bool(*after_abandoned)?;
        }
        State::Completed(RecordedResponse::Replayable(response)) => {
            to.u8(13)?.bytes(response.as_encoded())?;
        }
        _ => {}
    }
    let steps = record.steps.as_slice();
    if !steps.is_empty() {
        to.u8(14)?.array(2 * steps.len() as u64)?;
        for step in steps {
            to.str(step.name())?.bytes(step.result())?;
        }
    }
    if let Some(key) = record.label.key() {
        to.u8(15)?.bytes(key.as_bytes())?;
    }
    if record.by_operator {
        to.u8(16)?.bool(true)?;
    }
    Ok(())
}

#[derive(Default)]
struct Parts<'a> {
    fingerprint_version: Option<u8>,
    fingerprint_digest: Option<[u8; 32]>,
    token: Option<u64>,
    attempts: Option<u32>,
    state: Option<u8>,
    created_at: Option<u64>,
    changed_at: Option<u64>,
    expires_at: Option<u64>,
    caller: Option<[u8; 8]>,
    operation: Option<&'a str>,
    attempt: Option<[u8; 16]>,
    lease_until: Option<u64>,
    after_abandoned: Option<bool>,
    response: Option<&'a [u8]>,
    steps: Steps,
    key: Option<[u8; 8]>,
    by_operator: bool,
}

fn decode_map(map: &[u8]) -> Option<Record> {
    let mut from = Decoder::new(map);
    let mut parts = Parts::default();
    let entries = from.map().ok()??;
    for _ in 0..entries {
        if !matches!(from.datatype().ok()?, Type::U8 | Type::U16 | Type::U32 | Type::U64) {
            return None;
        }
        match from.u64().ok()? {
            0 => parts.fingerprint_version = Some(from.u8().ok()?),
            1 => parts.fingerprint_digest = Some(from.bytes().ok()?.try_into().ok()?),
            2 => parts.token = Some(from.u64().ok()?),
            3 => parts.attempts = Some(from.u32().ok()?),
            4 => parts.state = Some(from.u8().ok()?),
            5 => parts.created_at = Some(from.u64().ok()?),
            6 => parts.changed_at = Some(from.u64().ok()?),
            7 => parts.expires_at = Some(from.u64().ok()?),
            8 => parts.caller = Some(from.bytes().ok()?.try_into().ok()?),
            9 => parts.operation = Some(from.str().ok()?),
            10 => parts.attempt = Some(from.bytes().ok()?.try_into().ok()?),
            11 => parts.lease_until = Some(from.u64().ok()?),
            12 => parts.after_abandoned = Some(from.bool().ok()?),
            13 => parts.response = Some(from.bytes().ok()?),
            14 => parts.steps = decode_steps(&mut from)?,
            15 => parts.key = Some(from.bytes().ok()?.try_into().ok()?),
            16 => parts.by_operator = from.bool().ok()?,
            _ => from.skip().ok()?,
        }
    }
    if from.position() != map.len() {
        return None;
    }
    let state = match parts.state? {
        0 => State::InProgress {
            attempt: AttemptId::new(u128::from_be_bytes(parts.attempt?)),
            lease_until: Timestamp::from_millis(parts.lease_until?),
            after_abandoned: parts.after_abandoned?,
        },
        1 => State::Unknown,
        2 => State::Completed(RecordedResponse::Replayable(StoredResponse::decode(Bytes::copy_from_slice(
            parts.response?,
        ))?)),
        3 => State::Completed(RecordedResponse::Awaited),
        4 => State::Completed(RecordedResponse::Tombstone),
        5 => State::Released,
        _ => return None,
    };
    Some(Record {
        fingerprint: Fingerprint::from_parts(parts.fingerprint_version?, parts.fingerprint_digest?)?,
        token: FencingToken::new(parts.token?),
        attempts: parts.attempts?,
        state,
        label: Label::new(CallerTag::from_bytes(parts.caller?), parts.operation?)
            .with_key(parts.key.map(KeyTag::from_bytes)),
        created_at: Timestamp::from_millis(parts.created_at?),
        changed_at: Timestamp::from_millis(parts.changed_at?),
        expires_at: Timestamp::from_millis(parts.expires_at?),
        steps: parts.steps,
        by_operator: parts.by_operator,
    })
}

fn decode_steps(from: &mut Decoder<'_>) -> Option<Steps> {
    let entries = from.array().ok()??;
    if entries == 0 || entries % 2 != 0 {
        return None;
    }
    (0..entries / 2)
        .map(|_| {
            let name = from.str().ok()?;
            let result = Bytes::copy_from_slice(from.bytes().ok()?);
            Step::new(name, result).ok()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> RecordId {
        RecordId::from_bytes([7; 32])
    }

    fn records() -> Vec<Record> {
        records_without_steps().into_iter().chain([with_steps(), by_operator()]).collect()
    }

    fn by_operator() -> Record {
        let record = with_steps();
        let label = record.label.clone().with_key(KeyTag::from_bytes([9; 8]));
        Record { state: State::Unknown, by_operator: true, label, ..record }
    }

    fn records_without_steps() -> Vec<Record> {
        let response =
            StoredResponse::new(201, &[("a", &b"b"[..])], &[Bytes::from_static(b"\x00")], &[]).unwrap();
        let in_progress = State::InProgress {
            attempt: AttemptId::new(u128::MAX - 5),
            lease_until: Timestamp::from_millis(9),
            after_abandoned: true,
        };
        [
            in_progress,
            State::Unknown,
            State::Completed(RecordedResponse::Replayable(response)),
            State::Completed(RecordedResponse::Awaited),
            State::Completed(RecordedResponse::Tombstone),
            State::Released,
        ]
        .map(|state| Record {
            fingerprint: Fingerprint::of_parts("test", &[b"x"]),
            token: FencingToken::new(1 << 41),
            attempts: 3,
            state,
            label: Label::new(CallerTag::from_bytes([1; 8]), "POST /pay"),
            created_at: Timestamp::from_millis(1),
            changed_at: Timestamp::from_millis(2),
            expires_at: Timestamp::from_millis(u64::MAX),
            steps: Steps::default(),
            by_operator: false,
        })
        .into()
    }

    fn with_steps() -> Record {
        let step = |name, result| Step::new(name, Bytes::from_static(result)).unwrap();
        Record {
            steps: [step("charge", b"\x00\xff"), step("ship", b"")].into_iter().collect(),
            ..records_without_steps().remove(0)
        }
    }

    #[test]
    fn reads_back_every_state() {
        for record in records() {
            assert_eq!(decode(&id(), &encode(&id(), &record)), Ok(record));
        }
    }

    #[test]
    fn refuses_every_flipped_bit_every_cut_and_another_identifier() {
        for record in records() {
            let whole = encode(&id(), &record);
            for bit in 0..whole.len() * 8 {
                let mut damaged = whole.clone();
                damaged[bit / 8] ^= 1 << (bit % 8);
                assert!(decode(&id(), &damaged).is_err(), "bit {bit}");
            }
            for end in 0..whole.len() {
                assert!(decode(&id(), &whole[..end]).is_err(), "cut at {end}");
            }
            assert_eq!(decode(&RecordId::from_bytes([8; 32]), &whole), Err(CodecError::Damaged));
        }
    }

    #[test]
    fn an_unknown_version_differs_from_damage() {
        let mut newer = encode(&id(), &records()[0]);
        for version in [0, VERSION + 1] {
            newer[0] = version;
            assert_eq!(decode(&id(), &newer), Err(CodecError::UnknownVersion(version)));
        }
    }

    #[test]
    fn skips_keys_of_a_later_minor_change() {
        let record = &records()[1];
        let mut bytes = encode(&id(), record);
        bytes[HEAD] += 1; // one entry more
        bytes.extend_from_slice(&[0x18, 99, 0x63, b'n', b'e', b'w']);
        let sum = checksum(bytes[0], &id(), &bytes[HEAD..]).to_be_bytes();
        bytes[1..HEAD].copy_from_slice(&sum);
        assert_eq!(decode(&id(), &bytes).as_ref(), Ok(record));
    }
}
