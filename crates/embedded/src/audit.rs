//! The encoding of audit entries.

use oncegate_core::{AuditEntry, RecordId, StateName, Timestamp};

/// Encodes an audit entry. Its number is not included, because it stands before it:
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
}
