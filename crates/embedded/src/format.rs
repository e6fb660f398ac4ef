//! The bytes of a segment.
//!
//! A segment is a sequence of batches. Each batch starts on a block of [`BLOCK`] bytes and is padded with zeros to whole blocks,
//! so that no later write touches a sector with acknowledged bytes. The rest of the segment is zeros.
//!
//! ```text
//! header  0 magic "OGL1" │ 4 u16 flags │ 6 u16 blocks of the segment │ 8 store id, 16 bytes │ 24 u32 segment
//!        28 u32 oldest segment │ 32 u64 sequence │ 40 u64 time │ 48 u64 wall │ 56 u64 lagging since │ 64 u32 payload bytes
//!        68 u32 entries │ 72 u32 payload checksum │ 76 u32 checksum of the header before │ 80 u32 zero
//!        84 u32 checksum of bytes 0 to 83
//! entry   0 u8 kind │ 1 u8[3] zero │ 4 u32 body bytes │ 8 u32 expires, seconds │ 12 record id, 32 bytes │ 44 body
//!         zeros up to a multiple of 8 bytes
//! ```
//!
//! Numbers are big-endian, checksums are CRC-32C. Each header has the checksum of the header before it, and so the batches form a
//! chain: none can be missing, doubled, or of another store.
//!
//! | kind | record id | body |
//! |---|---|---|
//! | 1 record | of the record | the record in the encoding of [`oncegate_core::codec`], which has a checksum of its own |
//! | 2 audit | of the record | u64 number, then the entry in the encoding of [`encode_audit`](crate::audit::encode_audit) |
//! | 3 shift | zeros | u64 since, u64 milliseconds: an operator accepted the time of day |

use oncegate_core::{LastWrite, RecordId, Timestamp};

/// The size of a block in bytes.
pub(crate) const BLOCK: u64 = 4096;

/// The size of a batch's header in bytes.
pub(crate) const HEADER: usize = 88;

/// The size of an entry before its body, in bytes.
pub(crate) const ENTRY: usize = 44;

/// Entries start at multiples of so many bytes, so that their offset fits into 24 bits.
pub(crate) const ALIGN: usize = 8;

const MAGIC: [u8; 4] = *b"OGL1";

/// The random identifier of a store.
pub(crate) type StoreId = [u8; 16];

/// No later batch is in this segment: the next one is in the next segment.
pub(crate) const FLAG_SEAL: u16 = 1;
/// The store was closed after this batch.
pub(crate) const FLAG_CLOSED: u16 = 2;

/// The header of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) flags: u16,
    pub(crate) store: StoreId,
    pub(crate) segment: u32,
    /// The length of its file in blocks, so that a file that was cut off is noticed; 0 if it has more than fit here.
    pub(crate) segment_blocks: u16,
    /// The oldest segment that still counts. Older ones may be deleted.
    pub(crate) oldest: u32,
    /// The number of the batch. It grows by one with each batch of the store.
    pub(crate) sequence: u64,
    /// The clocks when the batch was written.
    pub(crate) written: LastWrite,
    pub(crate) payload_len: u32,
    pub(crate) entries: u32,
    pub(crate) payload_sum: u32,
    /// The checksum of the header before; zero in the first batch of a store.
    pub(crate) previous: u32,
}

/// The reason why bytes are not a batch's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoHeader {
    /// All of the header's bytes are zero.
    Empty,
    Invalid,
    /// A newer program wrote it.
    Newer,
}

impl Header {
    /// The bytes of the header, and their checksum.
    pub(crate) fn encode(&self) -> ([u8; HEADER], u32) {
        let mut bytes = [0; HEADER];
        let mut at = 0;
        let mut put = |part: &[u8]| {
            if let Some(place) = bytes.get_mut(at..at + part.len()) {
                place.copy_from_slice(part);
            }
            at += part.len();
        };
        put(&MAGIC);
        put(&self.flags.to_be_bytes());
        put(&self.segment_blocks.to_be_bytes());
        put(&self.store);
        put(&self.segment.to_be_bytes());
        put(&self.oldest.to_be_bytes());
        put(&self.sequence.to_be_bytes());
        put(&self.written.time.as_millis().to_be_bytes());
        put(&self.written.wall.as_millis().to_be_bytes());
        put(&self.written.lagging_since.map_or(0, Timestamp::as_millis).to_be_bytes());
        put(&self.payload_len.to_be_bytes());
        put(&self.entries.to_be_bytes());
        put(&self.payload_sum.to_be_bytes());
        put(&self.previous.to_be_bytes());
        put(&[0; 4]);
        let sum = crc32c::crc32c(bytes.get(..HEADER - 4).unwrap_or_default());
        if let Some(place) = bytes.last_chunk_mut() {
            *place = sum.to_be_bytes();
        }
        (bytes, sum)
    }

    /// Reads a header, and returns it with its checksum.
    pub(crate) fn decode(bytes: &[u8]) -> Result<(Self, u32), NoHeader> {
        let bytes: &[u8; HEADER] = bytes.first_chunk().ok_or(NoHeader::Invalid)?;
        let (content, sum) = bytes.split_last_chunk::<4>().ok_or(NoHeader::Invalid)?;
        let sum = u32::from_be_bytes(*sum);
        if crc32c::crc32c(content) != sum {
            return Err(if bytes.iter().all(|byte| *byte == 0) {
                NoHeader::Empty
            } else {
                NoHeader::Invalid
            });
        }
        let mut from = Reader(content);
        let magic: [u8; 4] = from.array().ok_or(NoHeader::Invalid)?;
        if magic != MAGIC {
            return Err(if magic.starts_with(b"OGL") { NoHeader::Newer } else { NoHeader::Invalid });
        }
        let header = from.header().ok_or(NoHeader::Invalid)?;
        Ok((header, sum))
    }

    /// The size of the whole batch in bytes, with its padding.
    pub(crate) fn batch_len(&self) -> u64 {
        batch_len(u64::from(self.payload_len))
    }
}

/// The size of a batch with a payload of this size, in bytes.
pub(crate) const fn batch_len(payload_len: u64) -> u64 {
    (HEADER as u64 + payload_len).next_multiple_of(BLOCK)
}

/// The length of a segment, as its headers have it.
pub(crate) fn segment_blocks(size: u64) -> u16 {
    u16::try_from(size / BLOCK).unwrap_or(0)
}

/// Reads numbers from the front of bytes.
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl Reader<'_> {
    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    pub(crate) fn time(&mut self) -> Option<Timestamp> {
        self.u64().map(Timestamp::from_millis)
    }

    fn header(&mut self) -> Option<Header> {
        let flags = self.u16()?;
        let segment_blocks = self.u16()?;
        Some(Header {
            flags,
            store: self.array()?,
            segment: self.u32()?,
            segment_blocks,
            oldest: self.u32()?,
            sequence: self.u64()?,
            written: LastWrite {
                time: self.time()?,
                wall: self.time()?,
                lagging_since: self.time().map(|time| (time > Timestamp::default()).then_some(time))?,
            },
            payload_len: self.u32()?,
            entries: self.u32()?,
            payload_sum: self.u32()?,
            previous: self.u32()?,
        })
    }
}

/// The kinds of entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Record,
    Audit,
    Shift,
}

impl Kind {
    const fn byte(self) -> u8 {
        match self {
            Self::Record => 1,
            Self::Audit => 2,
            Self::Shift => 3,
        }
    }

    const fn of(byte: u8) -> Option<Self> {
        match byte {
            1 => Some(Self::Record),
            2 => Some(Self::Audit),
            3 => Some(Self::Shift),
            _ => None,
        }
    }
}

/// The part of an entry before its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryHead {
    pub(crate) kind: Kind,
    pub(crate) body_len: u32,
    /// The time from which the record counts as absent, rounded up to seconds.
    pub(crate) expires: u32,
    pub(crate) id: RecordId,
}

impl EntryHead {
    pub(crate) fn encode(&self) -> [u8; ENTRY] {
        let mut bytes = [0; ENTRY];
        let parts: [&[u8]; 5] = [
            &[self.kind.byte()],
            &[0; 3],
            &self.body_len.to_be_bytes(),
            &self.expires.to_be_bytes(),
            self.id.as_bytes(),
        ];
        let mut at = 0;
        for part in parts {
            if let Some(place) = bytes.get_mut(at..at + part.len()) {
                place.copy_from_slice(part);
            }
            at += part.len();
        }
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        let [kind, ..] = from.array::<4>()?;
        Some(Self {
            kind: Kind::of(kind)?,
            body_len: from.u32()?,
            expires: from.u32()?,
            id: RecordId::from_bytes(from.array()?),
        })
    }

    /// The size of the whole entry in bytes, with its padding.
    pub(crate) const fn len(&self) -> usize {
        (ENTRY + self.body_len as usize).next_multiple_of(ALIGN)
    }
}

/// The entries of a payload, each with its offset in the payload. Ends with `None` if the payload is malformed.
pub(crate) fn entries(payload: &[u8]) -> impl Iterator<Item = Option<(u32, EntryHead, &[u8])>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = payload.get(at..).filter(|rest| !rest.is_empty())?;
        let entry = EntryHead::decode(rest).and_then(|head| {
            let body = rest.get(ENTRY..ENTRY.checked_add(head.body_len as usize)?)?;
            Some((at as u32, head, body)).filter(|_| rest.len() >= head.len())
        });
        at = entry.map_or(payload.len(), |(_, head, _)| at + head.len());
        Some(entry)
    })
}

/// The time of an expiry in the unit of the index: seconds, rounded up.
pub(crate) fn expiry_seconds(expires_at: Timestamp) -> u32 {
    u32::try_from(expires_at.as_millis().div_ceil(1000)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            flags: FLAG_SEAL,
            store: [7; 16],
            segment: 3,
            segment_blocks: 16 * 1024,
            oldest: 2,
            sequence: u64::MAX - 3,
            written: LastWrite {
                time: Timestamp::from_millis(5),
                wall: Timestamp::from_millis(6),
                lagging_since: Some(Timestamp::from_millis(4)),
            },
            payload_len: 100,
            entries: 2,
            payload_sum: 9,
            previous: 10,
        }
    }

    #[test]
    fn a_header_reads_back_and_no_flipped_bit_goes_unnoticed() {
        let (bytes, sum) = header().encode();
        assert_eq!(Header::decode(&bytes), Ok((header(), sum)));
        for bit in 0..HEADER * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::decode(&damaged), Err(NoHeader::Invalid), "bit {bit}");
        }
        assert_eq!(Header::decode(&[0; HEADER]), Err(NoHeader::Empty));
        assert_eq!(Header::decode(&bytes[1..]), Err(NoHeader::Invalid));
    }

    #[test]
    fn a_batch_has_whole_blocks() {
        let fits = BLOCK - HEADER as u64;
        assert_eq!([0, fits, fits + 1].map(batch_len), [BLOCK, BLOCK, 2 * BLOCK]);
    }

    #[test]
    fn entries_read_back_and_a_malformed_one_ends_them() {
        let head =
            |kind, body_len| EntryHead { kind, body_len, expires: 5, id: RecordId::from_bytes([1; 32]) };
        let mut payload = Vec::new();
        for (kind, body) in [(Kind::Record, &b"abc"[..]), (Kind::Shift, b"")] {
            payload.extend_from_slice(&head(kind, body.len() as u32).encode());
            payload.extend_from_slice(body);
            payload.resize(payload.len().next_multiple_of(ALIGN), 0);
        }
        let read: Vec<_> = entries(&payload).collect();
        let second = (ENTRY + 3).next_multiple_of(ALIGN) as u32;
        assert_eq!(
            read,
            [Some((0, head(Kind::Record, 3), &b"abc"[..])), Some((second, head(Kind::Shift, 0), &b""[..]))]
        );
        assert_eq!(entries(&payload[..ENTRY + 2]).collect::<Vec<_>>(), [None]);
        payload[0] = 9;
        assert_eq!(entries(&payload).collect::<Vec<_>>(), [None]);
        assert_eq!(entries(&[]).count(), 0);
    }

    #[test]
    fn an_expiry_is_rounded_up() {
        let seconds = |millis| expiry_seconds(Timestamp::from_millis(millis));
        assert_eq!([0, 1, 1000, 1001, u64::MAX].map(seconds), [0, 1, 1, 2, u32::MAX]);
    }
}
