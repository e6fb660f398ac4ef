//! The form of a cached response in a store that serves as a cache: a record with an identifier of its own, whose operation
//! holds the end of the entry and a checksum.

use oncegate_core::{
    CallerTag, Fingerprint, Label, Record, RecordId, RecordedResponse, State, StoredResponse, Timestamp,
};
use sha2::{Digest as _, Sha256};

/// The time until which an entry may be used, by the store's clock, and its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seal {
    until: Timestamp,
    sum: u32,
}

/// The identifier of the entry for this request under this record. No record of a key has such an identifier, so a store that
/// serves as a cache may also hold records of keys.
pub(crate) fn id(namespace: &str, record: &RecordId, fingerprint: &Fingerprint) -> RecordId {
    let mut hash = Sha256::new();
    hash.update(b"oncegate cache 1");
    hash.update((namespace.len() as u64).to_be_bytes());
    hash.update(namespace);
    hash.update(record.as_bytes());
    hash.update([fingerprint.version()]);
    hash.update(fingerprint.digest());
    RecordId::from_bytes(hash.finalize().into())
}

pub(crate) fn label(id: &RecordId, until: Timestamp, response: &StoredResponse) -> Label {
    let sum = sum(id, until, response);
    Label::new(CallerTag::default(), &format!("cache 1 until {} sum {sum:08x}", until.as_millis()))
}

/// Reads the response of an entry; `None` if it has ended or is still being written.
///
/// # Errors
/// If it is not an entry of this record and request, or damaged.
pub(crate) fn read(
    id: &RecordId,
    fingerprint: &Fingerprint,
    record: Record,
    now: Timestamp,
) -> Result<Option<StoredResponse>, Unreadable> {
    let seal = seal(record.label.operation()).ok_or(Unreadable)?;
    if record.fingerprint != *fingerprint {
        return Err(Unreadable);
    }
    // Another process is writing it, or died while it did.
    let State::Completed(recorded) = record.state else { return Ok(None) };
    let RecordedResponse::Replayable(response) = recorded else { return Err(Unreadable) };
    if seal.sum != sum(id, seal.until, &response) {
        return Err(Unreadable);
    }
    Ok((now < seal.until).then_some(response))
}

/// The error for a record that is not the entry that was looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unreadable;

fn seal(text: &str) -> Option<Seal> {
    let (until, sum) = text.strip_prefix("cache 1 until ")?.split_once(" sum ")?;
    Some(Seal { until: Timestamp::from_millis(until.parse().ok()?), sum: u32::from_str_radix(sum, 16).ok()? })
}

/// The checksum of an entry. It protects against accidents, not against a program that may write to the cache.
fn sum(id: &RecordId, until: Timestamp, response: &StoredResponse) -> u32 {
    let sum = crc32c::crc32c(id.as_bytes());
    let sum = crc32c::crc32c_append(sum, &until.as_millis().to_be_bytes());
    crc32c::crc32c_append(sum, response.as_encoded())
}

#[cfg(test)]
mod tests {
    use oncegate_core::{AttemptId, FencingToken};

    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_000);
    const UNTIL: Timestamp = Timestamp::from_millis(2_000);

    fn fingerprint(input: &[u8]) -> Fingerprint {
        Fingerprint::of_parts("test", &[input])
    }

    fn response(body: &'static [u8]) -> StoredResponse {
        StoredResponse::new(201, &[], &[body.into()], &[]).unwrap()
    }

    fn completed(label: Label, response: StoredResponse) -> Record {
        let state = State::Completed(RecordedResponse::Replayable(response));
        Record::new(fingerprint(b"a"), FencingToken::new(1), state, label, NOW)
    }

    #[test]
    fn an_entry_ends_by_the_clock_of_the_store() {
        let id = id("name", &RecordId::from_bytes([1; 32]), &fingerprint(b"a"));
        let entry = || completed(label(&id, UNTIL, &response(b"x")), response(b"x"));
        let at = |millis| read(&id, &fingerprint(b"a"), entry(), Timestamp::from_millis(millis));
        assert_eq!(at(1_999), Ok(Some(response(b"x"))));
        assert_eq!(at(2_000), Ok(None));
    }

    #[test]
    fn a_record_that_is_not_this_entry_is_refused() {
        let (a, b) = (fingerprint(b"a"), fingerprint(b"b"));
        let record = RecordId::from_bytes([1; 32]);
        let own = id("name", &record, &a);
        let sealed = label(&own, UNTIL, &response(b"x"));
        let cases = [
            ("another response", own, a, completed(sealed.clone(), response(b"y"))),
            ("another request", own, b, completed(sealed.clone(), response(b"x"))),
            ("another record", id("name", &record, &b), a, completed(sealed.clone(), response(b"x"))),
            ("a later end", own, a, {
                let later = sealed.operation().replace("2000", "9000");
                completed(Label::new(CallerTag::default(), &later), response(b"x"))
            }),
            ("a record", own, a, {
                completed(Label::new(CallerTag::default(), "POST /payments"), response(b"x"))
            }),
            ("no response", own, a, {
                let state = State::Completed(RecordedResponse::Tombstone);
                Record::new(a, FencingToken::new(1), state, sealed.clone(), NOW)
            }),
        ];
        for (name, id, fingerprint, record) in cases {
            assert_eq!(read(&id, &fingerprint, record, NOW), Err(Unreadable), "{name}");
        }
        let state =
            State::InProgress { attempt: AttemptId::new(1), lease_until: UNTIL, after_abandoned: false };
        let begun = Record::new(a, FencingToken::new(1), state, sealed, NOW);
        assert_eq!(read(&own, &a, begun, NOW), Ok(None));
    }

    #[test]
    fn identifiers_differ_for_each_request_and_namespace() {
        let (one, two) = (RecordId::from_bytes([1; 32]), RecordId::from_bytes([2; 32]));
        let (a, b) = (fingerprint(b"a"), fingerprint(b"b"));
        let ids =
            [id("", &one, &a), id("", &one, &b), id("", &two, &a), id("x", &one, &a), id("y", &one, &a), one];
        for (n, id) in ids.iter().enumerate() {
            assert!(!ids[..n].contains(id), "{n}");
        }
    }
}
