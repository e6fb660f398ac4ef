//! The contents of the file: four tables, and the encoding of their values.

use oncegate_core::codec::{self, CodecError};
use oncegate_core::{AuditEntry, Record, RecordId, StateName, Timestamp};
use redb::TableDefinition;

/// Record identifier → its key in [`EXPIRY`] (two numbers in 16 bytes), then the record in the encoding of
/// [`oncegate_core::codec`].
pub(crate) const RECORDS: TableDefinition<'_, &[u8; 32], &[u8]> = TableDefinition::new("records");

/// (Due time, number) → record identifier. With this index a purge reads only the records that are due.
///
/// An entry is added when the record is first written. If the record then lives longer (a renewal, a completion), the entry
/// is replaced when it becomes due. If the record ends earlier (a release), the entry is replaced at once. The numbers grow,
/// so the entries of one transaction are neighbours in the file. With the identifiers in their place, which are random,
/// every entry would be on a different page.
pub(crate) const EXPIRY: TableDefinition<'_, (u64, u64), &[u8; 32]> = TableDefinition::new("expiry");

/// Number → audit entry.
pub(crate) const AUDIT: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("audit");

/// Name → number. The names are the `META_…` constants below.
pub(crate) const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");

/// The format version of the file.
pub(crate) const META_FORMAT: &str = "format";

/// A time of the store's clock. Every write so far was made less than [`CLOCK_STEP`] milliseconds after it.
pub(crate) const META_CLOCK: &str = "clock";

/// The time of day at the moment of [`META_CLOCK`].
pub(crate) const META_WALL: &str = "wall";

/// The time since which the store's clock has not followed the time of day. Absent or zero while they agree.
pub(crate) const META_LAGGING: &str = "lagging";

/// The total size of all records when the clock was last written. Absent in a file that never counted it.
pub(crate) const META_BYTES: &str = "bytes";

/// The number of times that the store was opened.
///
/// Opening the store increments it, which proves that the file can be written. It is the upper part of the numbers in the
/// expiry index.
pub(crate) const META_OPENED: &str = "opened";

/// The format version that this program writes.
pub(crate) const FORMAT: u64 = 2;

/// The most milliseconds by which the written clock may be behind. Opening the store again may have to wait that long.
pub(crate) const CLOCK_STEP: u64 = 100;

/// The shift of the number of openings in the numbers of the expiry index.
///
/// The lower part counts from zero, which leaves a million million entries for each opening.
pub(crate) const OPENED_SHIFT: u32 = 40;

/// The granularity of the expiry index, in milliseconds. Entries of the same step are neighbours in the file.
const EXPIRY_STEP: u64 = 2000;

/// A key of [`EXPIRY`].
pub(crate) type ExpiryKey = (u64, u64);

/// Encodes a value of [`RECORDS`].
pub(crate) fn encode(id: &RecordId, (due, number): ExpiryKey, record: &Record) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(512);
    bytes.extend_from_slice(&due.to_be_bytes());
    bytes.extend_from_slice(&number.to_be_bytes());
    bytes.extend_from_slice(&codec::encode(id, record));
    bytes
}

/// Reads a value of [`RECORDS`].
///
/// # Errors
/// The record is damaged, or of an unknown version. The expiry key has no checksum: a wrong one only makes a purge look
/// at the record at the wrong time.
pub(crate) fn decode(id: &RecordId, bytes: &[u8]) -> Result<(ExpiryKey, Record), CodecError> {
    let (due, rest) = bytes.split_first_chunk().ok_or(CodecError::Damaged)?;
    let (number, record) = rest.split_first_chunk().ok_or(CodecError::Damaged)?;
    let note = (u64::from_be_bytes(*due), u64::from_be_bytes(*number));
    Ok((note, codec::decode(id, record)?))
}

/// Returns the due time of a record: the start of the first step at or after its expiry.
pub(crate) fn due_step(expires_at: Timestamp) -> u64 {
    expires_at.as_millis().div_ceil(EXPIRY_STEP).saturating_mul(EXPIRY_STEP)
}

/// Encodes an audit entry. Its number is not included, because it is the key:
///
/// ```text
/// u8 version = 1 | u64 at | 32 bytes record | (u32 length, text) state before, state after, actor, reason
/// ```
pub(crate) fn encode_audit(entry: &AuditEntry) -> Vec<u8> {
    let mut bytes = vec![AUDIT_VERSION];
    bytes.extend_from_slice(&entry.at.as_millis().to_be_bytes());
    bytes.extend_from_slice(entry.id.as_bytes());
    for text in [entry.from.as_str(), entry.to.as_str(), &entry.actor, &entry.reason] {
        bytes.extend_from_slice(&u32::try_from(text.len()).unwrap_or(u32::MAX).to_be_bytes());
        bytes.extend_from_slice(text.as_bytes());
    }
    bytes
}

/// Reads an audit entry. Returns `None` if the bytes are not one.
pub(crate) fn decode_audit(number: u64, bytes: &[u8]) -> Option<AuditEntry> {
    let (&AUDIT_VERSION, rest) = bytes.split_first()? else { return None };
    let (at, rest) = rest.split_first_chunk()?;
    let (id, mut rest) = rest.split_first_chunk()?;
    let mut text = || {
        let (len, after) = rest.split_first_chunk()?;
        let (text, after) = after.split_at_checked(usize::try_from(u32::from_be_bytes(*len)).ok()?)?;
        rest = after;
        std::str::from_utf8(text).ok()
    };
    let (from, to, actor, reason) = (text()?, text()?, text()?, text()?);
    rest.is_empty().then_some(AuditEntry {
        number,
        at: Timestamp::from_millis(u64::from_be_bytes(*at)),
        id: RecordId::from_bytes(*id),
        from: StateName::from_name(from)?,
        to: StateName::from_name(to)?,
        actor: actor.to_owned(),
        reason: reason.to_owned(),
    })
}

const AUDIT_VERSION: u8 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_audit_entry_reads_back_and_a_truncated_one_does_not() {
        let entry = AuditEntry {
            number: 7,
            at: Timestamp::from_millis(1 << 40),
            id: RecordId::from_bytes([9; 32]),
            from: StateName::Unknown,
            to: StateName::Completed,
            actor: "ops@example".to_owned(),
            reason: "bank says paid – é".to_owned(),
        };
        let bytes = encode_audit(&entry);
        assert_eq!(decode_audit(7, &bytes), Some(entry));
        for end in 0..bytes.len() {
            assert_eq!(decode_audit(7, &bytes[..end]), None, "cut at {end}");
        }
    }

    #[test]
    fn a_record_is_due_at_most_two_seconds_after_its_expiry() {
        for (expires_at, due) in [(0, 0), (1, 2000), (2000, 2000), (2001, 4000)] {
            assert_eq!(due_step(Timestamp::from_millis(expires_at)), due);
        }
    }
}
