//! A settled record as bytes, together with its response, in the memory of this process only.
//!
//! ```text
//! u16 length of the entry | u8 flags | identifier (32) | created, changed, expires (u64 each) | token (u64) | attempts (u32)
//! | version and digest of the fingerprint (1 + 32) | caller (8) | key (8) | u16 length of the operation | u16 start of the body
//! | operation | response ([`StoredResponse::as_encoded`]), to the end            all numbers little-endian
//! ```
//!
//! The [codec](crate::codec) of the stores on disks is not used here: its checksum and its tagged values make it three times
//! as slow to read, and nothing else writes this memory.

use std::sync::Arc;

use bytes::Bytes;

use crate::clock::Timestamp;
use crate::fingerprint::Fingerprint;
use crate::id::{CallerTag, FencingToken, KeyTag, RecordId};
use crate::record::{Label, Record, RecordedResponse, State};
use crate::response::StoredResponse;
use crate::step::Steps;

/// The longest entry. A replay copies the response, which takes longer than to share it once the response is larger.
pub(super) const MAX_ENTRY: usize = 4 * 1024;

const FLAGS: usize = 2;
const ID: usize = FLAGS + 1;
const TIMES: usize = ID + 32;
const TAIL: usize = TIMES + 3 * 8 + 8 + 4 + 1 + 32 + 8 + 8;
const HEAD: usize = TAIL + 2 + 2;

const STATE: u8 = 0b111;
const REPLAYABLE: u8 = 2;
const BY_OPERATOR: u8 = 1 << 3;
const HAS_KEY: u8 = 1 << 4;
/// The entry is of no record any more.
const REMOVED: u8 = 1 << 5;

/// The parts of an entry that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parts {
    All,
    /// Everything but the response, which is empty then.
    Head,
}

/// The length of the record's entry; `None` if the record is open, has steps, or is too large. Such a record is kept whole.
pub(super) fn packed_len(record: &Record) -> Option<usize> {
    let response = match &record.state {
        State::InProgress { .. } => return None,
        State::Completed(RecordedResponse::Replayable(response)) => response.as_encoded().len(),
        _ => 0,
    };
    let len = HEAD + record.label.operation().len() + response;
    (record.steps.is_empty() && len <= MAX_ENTRY).then_some(len)
}

/// Appends the entry of a record, which has this [length](packed_len).
pub(super) fn pack(to: &mut Vec<u8>, id: &RecordId, record: &Record, len: usize) {
    let (state, response) = match &record.state {
        // Never packed. An entry without a valid state reads as damaged, and not as another state.
        State::InProgress { .. } => (0, None),
        State::Unknown => (1, None),
        State::Completed(RecordedResponse::Replayable(response)) => (REPLAYABLE, Some(response)),
        State::Completed(RecordedResponse::Awaited) => (3, None),
        State::Completed(RecordedResponse::Tombstone) => (4, None),
        State::Released => (5, None),
    };
    let key = record.label.key();
    let by_operator = if record.by_operator { BY_OPERATOR } else { 0 };
    let has_key = if key.is_some() { HAS_KEY } else { 0 };
    let operation = record.label.operation();
    let body_at = response.map_or(0, StoredResponse::body_at);
    // No number is cut: an entry is at most MAX_ENTRY long.
    to.extend_from_slice(&(len as u16).to_le_bytes());
    to.push(state | by_operator | has_key);
    to.extend_from_slice(id.as_bytes());
    to.extend_from_slice(&times(record));
    to.extend_from_slice(&record.token.get().to_le_bytes());
    to.extend_from_slice(&record.attempts.to_le_bytes());
    to.push(record.fingerprint.version());
    to.extend_from_slice(record.fingerprint.digest());
    to.extend_from_slice(record.label.caller().as_bytes());
    to.extend_from_slice(key.map_or([0; 8], |key| *key.as_bytes()).as_slice());
    to.extend_from_slice(&(operation.len() as u16).to_le_bytes());
    to.extend_from_slice(&(body_at as u16).to_le_bytes());
    to.extend_from_slice(operation.as_bytes());
    to.extend_from_slice(response.map_or(&[], |response| response.as_encoded()));
}

/// Reads the record of an entry; `None` if the entry is damaged. An operation that equals that of `known` shares its memory.
pub(super) fn unpack(entry: &[u8], known: Option<&Label>, parts: Parts) -> Option<Record> {
    let (_, rest) = entry.split_first_chunk::<FLAGS>()?;
    let ([flags], rest) = rest.split_first_chunk::<1>()?;
    let (_, rest) = rest.split_first_chunk::<32>()?; // the identifier
    let (created_at, rest) = time(rest)?;
    let (changed_at, rest) = time(rest)?;
    let (expires_at, rest) = time(rest)?;
    let (token, rest) = rest.split_first_chunk()?;
    let (attempts, rest) = rest.split_first_chunk()?;
    let ([version], rest) = rest.split_first_chunk::<1>()?;
    let (digest, rest) = rest.split_first_chunk()?;
    let (caller, rest) = rest.split_first_chunk()?;
    let (key, rest) = rest.split_first_chunk()?;
    let (operation, response, body_at) = tail(rest)?;
    let state = match flags & STATE {
        1 => State::Unknown,
        REPLAYABLE => State::Completed(RecordedResponse::Replayable(match parts {
            Parts::All => StoredResponse::from_parts(Bytes::copy_from_slice(response), body_at),
            Parts::Head => StoredResponse::from_parts(Bytes::new(), 0),
        })),
        3 => State::Completed(RecordedResponse::Awaited),
        4 => State::Completed(RecordedResponse::Tombstone),
        5 => State::Released,
        _ => return None,
    };
    let operation = match known.filter(|known| known.operation().as_bytes() == operation) {
        Some(known) => known.shared_operation(),
        None => Arc::from(std::str::from_utf8(operation).ok()?),
    };
    let key = Some(KeyTag::from_bytes(*key)).filter(|_| flags & HAS_KEY != 0);
    Some(Record {
        fingerprint: Fingerprint::from_parts(*version, *digest)?,
        token: FencingToken::new(u64::from_le_bytes(*token)),
        attempts: u32::from_le_bytes(*attempts),
        state,
        label: Label::from_parts(CallerTag::from_bytes(*caller), key, operation),
        created_at,
        changed_at,
        expires_at,
        steps: Steps::NONE,
        by_operator: flags & BY_OPERATOR != 0,
    })
}

/// A copy of the response of an entry; `None` if it has none.
pub(super) fn response_of(entry: &[u8]) -> Option<StoredResponse> {
    let (_, response, body_at) = tail(entry.get(TAIL..)?)?;
    let has_response = entry.get(FLAGS)? & STATE == REPLAYABLE;
    has_response.then(|| StoredResponse::from_parts(Bytes::copy_from_slice(response), body_at))
}

/// The operation, the response, and the start of its body.
fn tail(rest: &[u8]) -> Option<(&[u8], &[u8], usize)> {
    let (operation_len, rest) = rest.split_first_chunk()?;
    let (body_at, rest) = rest.split_first_chunk()?;
    let (operation, response) = rest.split_at_checked(usize::from(u16::from_le_bytes(*operation_len)))?;
    Some((operation, response, usize::from(u16::from_le_bytes(*body_at))))
}

fn time(from: &[u8]) -> Option<(Timestamp, &[u8])> {
    let (millis, rest) = from.split_first_chunk()?;
    Some((Timestamp::from_millis(u64::from_le_bytes(*millis)), rest))
}

fn times(record: &Record) -> [u8; 3 * 8] {
    let mut bytes = [0; 3 * 8];
    let times = [record.created_at, record.changed_at, record.expires_at];
    for (to, time) in bytes.as_chunks_mut().0.iter_mut().zip(times) {
        *to = time.as_millis().to_le_bytes();
    }
    bytes
}

/// The entry that starts there; `None` at the end.
pub(super) fn entry_at(bytes: &[u8], at: usize) -> Option<&[u8]> {
    let rest = bytes.get(at..)?;
    rest.get(..entry_len(rest)?)
}

/// The entry that starts there, to be changed in place; `None` at the end.
pub(super) fn entry_at_mut(bytes: &mut [u8], at: usize) -> Option<&mut [u8]> {
    let rest = bytes.get_mut(at..)?;
    let len = entry_len(rest)?;
    rest.get_mut(..len)
}

/// The length of an entry. Never zero, so that a walk over entries ends.
fn entry_len(entry: &[u8]) -> Option<usize> {
    let len = usize::from(u16::from_le_bytes(*entry.first_chunk()?));
    Some(len).filter(|len| *len >= HEAD)
}

/// The identifier of an entry's record.
pub(super) fn id_of(entry: &[u8]) -> Option<&[u8; 32]> {
    entry.get(ID..)?.first_chunk()
}

/// The time from which the record of an entry counts as absent.
pub(super) fn expires_at(entry: &[u8]) -> Option<Timestamp> {
    Some(time(entry.get(TIMES + 2 * 8..)?)?.0)
}

/// Writes the times of a record into its entry.
pub(super) fn set_times(entry: &mut [u8], record: &Record) {
    if let Some(place) = entry.get_mut(TIMES..).and_then(|rest| rest.first_chunk_mut()) {
        *place = times(record);
    }
}

/// Returns true if the entry is of a record, and false if the record was removed or is elsewhere by now.
pub(super) fn is_live(entry: &[u8]) -> bool {
    entry.get(FLAGS).is_some_and(|flags| flags & REMOVED == 0)
}

/// Marks an entry as one without a record.
pub(super) fn set_removed(entry: &mut [u8]) {
    if let Some(flags) = entry.get_mut(FLAGS) {
        *flags |= REMOVED;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits;
    use crate::step::Step;

    const ID: RecordId = RecordId::from_bytes([7; 32]);

    fn record(state: State) -> Record {
        Record {
            fingerprint: Fingerprint::of_parts("test", &[b"x"]),
            token: FencingToken::new(1 << 41),
            attempts: u32::MAX,
            state,
            label: Label::new(CallerTag::from_bytes([1; 8]), "POST /pay"),
            created_at: Timestamp::from_millis(1),
            changed_at: Timestamp::from_millis(2),
            expires_at: Timestamp::from_millis(u64::MAX),
            steps: Steps::NONE,
            by_operator: false,
        }
    }

    fn replayable(body: usize) -> State {
        let body = [Bytes::from(vec![3; body])];
        let response = StoredResponse::new(201, &[("a", &b"b"[..])], &body, &[("c", b"")]).unwrap();
        State::Completed(RecordedResponse::Replayable(response))
    }

    fn entry(record: &Record) -> Vec<u8> {
        let mut bytes = Vec::new();
        let len = packed_len(record).unwrap();
        pack(&mut bytes, &ID, record, len);
        assert_eq!(bytes.len(), len);
        bytes
    }

    #[test]
    fn every_settled_record_reads_back() {
        let named = |text: &str, key| Label::new(CallerTag::from_bytes([9; 8]), text).with_key(key);
        let longest = "x".repeat(limits::MAX_OPERATION_BYTES);
        for state in [
            State::Unknown,
            replayable(0),
            replayable(1000),
            State::Completed(RecordedResponse::Awaited),
            State::Completed(RecordedResponse::Tombstone),
            State::Released,
        ] {
            for (by_operator, label) in [
                (false, Label::default()),
                (true, named("POST /pay", Some(KeyTag::from_bytes([0; 8])))),
                (false, named(&longest, Some(KeyTag::from_bytes([5; 8])))),
            ] {
                let record = Record { by_operator, label, ..record(state.clone()) };
                let entry = entry(&record);
                assert_eq!(unpack(&entry, None, Parts::All).as_ref(), Some(&record));
                for known in [&record.label, &named("POST /other", None)] {
                    assert_eq!(unpack(&entry, Some(known), Parts::All).as_ref(), Some(&record));
                }
                let response = match &record.state {
                    State::Completed(RecordedResponse::Replayable(response)) => Some(response),
                    _ => None,
                };
                assert_eq!(response_of(&entry).as_ref(), response);
                let head = unpack(&entry, Some(&record.label), Parts::Head).unwrap();
                assert_eq!(Record { state: record.state.clone(), ..head }, record);
                assert_eq!((id_of(&entry), is_live(&entry)), (Some(ID.as_bytes()), true));
                assert_eq!(expires_at(&entry), Some(record.expires_at));
            }
        }
    }

    #[test]
    fn a_record_is_packed_up_to_a_size_and_without_steps() {
        let open = State::InProgress {
            attempt: crate::id::AttemptId::new(1),
            lease_until: Timestamp::from_millis(9),
            after_abandoned: false,
        };
        assert_eq!(packed_len(&record(open)), None);
        let steps = [Step::new("charge", Bytes::new()).unwrap()].into_iter().collect();
        assert_eq!(packed_len(&Record { steps, ..record(State::Unknown) }), None);
        let smallest = packed_len(&record(replayable(0))).unwrap();
        let largest = record(replayable(MAX_ENTRY - smallest));
        assert_eq!(unpack(&entry(&largest), None, Parts::All), Some(largest));
        assert_eq!(packed_len(&record(replayable(MAX_ENTRY - smallest + 1))), None);
    }

    #[test]
    fn a_walk_finds_every_entry_and_ends() {
        let mut bytes = Vec::new();
        for state in [State::Unknown, replayable(77), State::Released] {
            let record = record(state);
            let len = packed_len(&record).unwrap();
            pack(&mut bytes, &ID, &record, len);
        }
        let (mut at, mut states) = (0, Vec::new());
        while let Some(entry) = entry_at_mut(&mut bytes, at) {
            states.push(unpack(entry, None, Parts::Head).unwrap().state_name(Timestamp::default()));
            set_removed(entry);
            assert!(!is_live(entry));
            at += entry.len();
        }
        use crate::record::StateName::{Completed, Released, Unknown};
        assert_eq!((at, states), (bytes.len(), vec![Unknown, Completed, Released]));
        assert_eq!(entry_at(&[0; 500], 0), None);
    }

    #[test]
    fn an_entry_that_is_cut_or_has_no_state_is_not_read() {
        let mut whole = entry(&record(State::Released));
        for end in 0..whole.len() {
            assert_eq!(unpack(&whole[..end], None, Parts::All), None, "cut at {end}");
            assert_eq!(response_of(&whole[..end]), None, "cut at {end}");
        }
        whole[FLAGS] = 0;
        assert_eq!(unpack(&whole, None, Parts::All), None);
    }

    #[test]
    fn times_are_changed_in_place() {
        let record = record(State::Unknown);
        let mut bytes = entry(&record);
        let shifted = Record { expires_at: Timestamp::from_millis(5), ..record }
            .shifted(std::time::Duration::from_millis(3));
        set_times(&mut bytes, &shifted);
        assert_eq!(unpack(&bytes, None, Parts::All), Some(shifted));
    }
}
