//! What the file holds: four tables, and the octets of an audit entry.

use oncegate_core::codec::{self, CodecError};
use oncegate_core::{AuditEntry, Record, RecordId, StateName, Timestamp};
use redb::TableDefinition;

/// Identifier → its key in [`EXPIRY`], two numbers in 16 bytes, and the record, as [`oncegate_core::codec`] writes it.
pub(crate) const RECORDS: TableDefinition<'_, &[u8; 32], &[u8]> = TableDefinition::new("records");

/// (When to look at a record again, number) → its identifier, so that purging reads only what is due. A record is noted
/// when it is first written; if it then lives longer than it was noted for (a renewal, a completion), it is noted again
/// when it is due, and at once if it is to go earlier (a release). The numbers grow, so that what is noted in one
/// transaction stands together in the file; by the
/// identifiers, which are random, each would be on a page of its own.
pub(crate) const EXPIRY: TableDefinition<'_, (u64, u64), &[u8; 32]> = TableDefinition::new("expiry");

/// Number → audit entry.
pub(crate) const AUDIT: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("audit");

/// Name → number; the names are below.
pub(crate) const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");

/// The version of all of this.
pub(crate) const META_FORMAT: &str = "format";

/// A time that every write so far is earlier than, but for less than [`CLOCK_STEP`] milliseconds.
pub(crate) const META_CLOCK: &str = "clock";

/// The time of day at the time of [`META_CLOCK`].
pub(crate) const META_WALL: &str = "wall";

/// From when on the store's clock has not followed the time of day; absent or zero while they agree.
pub(crate) const META_LAGGING: &str = "lagging";

/// How many bytes all records have, as it was when the clock was last written. Absent in a file that never counted them.
pub(crate) const META_BYTES: &str = "bytes";

/// How often the store was opened: what is written to prove that it can be, and the upper part of the numbers in the
/// expiry index.
pub(crate) const META_OPENED: &str = "opened";

/// The version that this program writes.
pub(crate) const FORMAT: u64 = 2;

/// How far, in milliseconds, the written clock may be behind: as long as opening the store again may have to wait.
pub(crate) const CLOCK_STEP: u64 = 100;

/// How far the number of openings is shifted in the numbers of the expiry index. The lower part counts from zero: a
/// million million records for each opening.
pub(crate) const OPENED_SHIFT: u32 = 40;

/// How coarse the expiry index is, in milliseconds. Coarse, so that what expires together stands together.
const EXPIRY_STEP: u64 = 2000;

/// A key of [`EXPIRY`].
pub(crate) type ExpiryKey = (u64, u64);

/// A value of [`RECORDS`].
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
/// Where the record cannot be read. Its note has no checksum; one that is wrong costs a look at the wrong time.
pub(crate) fn decode(id: &RecordId, bytes: &[u8]) -> Result<(ExpiryKey, Record), CodecError> {
    let (due, rest) = bytes.split_first_chunk().ok_or(CodecError::Damaged)?;
    let (number, record) = rest.split_first_chunk().ok_or(CodecError::Damaged)?;
    let note = (u64::from_be_bytes(*due), u64::from_be_bytes(*number));
    Ok((note, codec::decode(id, record)?))
}

/// A record is due in the first step that starts at its expiry or after it.
pub(crate) fn due_step(expires_at: Timestamp) -> u64 {
    expires_at.as_millis().div_ceil(EXPIRY_STEP).saturating_mul(EXPIRY_STEP)
}

/// The octets of an audit entry, whose number is its key:
///
/// ```text
/// u8 version = 1 | u64 at | 32 octets record | (u32 length, text) state before, state after, actor, reason
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

/// Reads an audit entry. `None` where the octets are not one.
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
    fn an_audit_entry_reads_back_and_a_cut_one_does_not() {
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
    fn a_record_is_due_at_its_expiry_or_in_the_two_seconds_after_it() {
        for (expires_at, due) in [(0, 0), (1, 2000), (2000, 2000), (2001, 4000)] {
            assert_eq!(due_step(Timestamp::from_millis(expires_at)), due);
        }
    }
}
