//! Writes Protocol Buffers, as far as OTLP needs it: a message is a sequence of fields, each with its number and its value.
//!
//! Fields with the default value of their type are left out, as proto3 does.

/// A message that is being written.
#[derive(Clone, Debug, Default)]
pub(super) struct MessageWriter(Vec<u8>);

/// The wire types: the form of a value.
const VARINT: u32 = 0;
const FIXED64: u32 = 1;
const LENGTH: u32 = 2;
const FIXED32: u32 = 5;

impl MessageWriter {
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    fn varint(&mut self, mut value: u64) {
        // Seven bits at a time, the lowest first; the highest bit says that more follow.
        while value >= 0x80 {
            self.0.push((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn tag(&mut self, field: u32, kind: u32) {
        self.varint(u64::from(field << 3 | kind));
    }

    /// An integer, an enumeration or a Boolean.
    pub(super) fn number(&mut self, field: u32, value: u64) {
        if value != 0 {
            self.tag(field, VARINT);
            self.varint(value);
        }
    }

    /// A number that is written even if it is zero, because it stands in a `oneof`.
    pub(super) fn number_always(&mut self, field: u32, value: u64) {
        self.tag(field, VARINT);
        self.varint(value);
    }

    pub(super) fn fixed64(&mut self, field: u32, value: u64) {
        if value != 0 {
            self.tag(field, FIXED64);
            self.0.extend(value.to_le_bytes());
        }
    }

    pub(super) fn fixed32(&mut self, field: u32, value: u32) {
        if value != 0 {
            self.tag(field, FIXED32);
            self.0.extend(value.to_le_bytes());
        }
    }

    /// A `double` that is written even if it is zero, because it stands in a `oneof` or is `optional`.
    pub(super) fn double_always(&mut self, field: u32, value: f64) {
        self.tag(field, FIXED64);
        self.0.extend(value.to_le_bytes());
    }

    pub(super) fn bytes(&mut self, field: u32, value: &[u8]) {
        if !value.is_empty() {
            self.tag(field, LENGTH);
            self.varint(value.len() as u64);
            self.0.extend(value);
        }
    }

    pub(super) fn text(&mut self, field: u32, value: &str) {
        self.bytes(field, value.as_bytes());
    }

    /// A text that is written even if it is empty, because it stands in a `oneof`.
    pub(super) fn text_always(&mut self, field: u32, value: &str) {
        self.tag(field, LENGTH);
        self.varint(value.len() as u64);
        self.0.extend(value.as_bytes());
    }

    /// A message inside this one, even if it is empty.
    pub(super) fn message(&mut self, field: u32, write: impl FnOnce(&mut Self)) {
        let mut inner = Self::default();
        write(&mut inner);
        self.tag(field, LENGTH);
        self.varint(inner.0.len() as u64);
        self.0.extend(inner.0);
    }

    /// Numbers of eight bytes each, without tags between them.
    pub(super) fn packed(&mut self, field: u32, values: impl Iterator<Item = [u8; 8]>) {
        let packed: Vec<u8> = values.flatten().collect();
        self.bytes(field, &packed);
    }
}

/// A reader of the fields of a message.
#[derive(Clone, Debug)]
pub(super) struct FieldReader<'a>(pub(super) &'a [u8]);

/// The value of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FieldValue<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// A value of four or eight bytes.
    Fixed,
}

impl<'a> FieldReader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let [byte] = *self.take(1)? else { return None };
            value |= u64::from(byte & 0x7f).checked_shl(shift)?;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }
}

/// Ends at the first field that is not valid.
impl<'a> Iterator for FieldReader<'a> {
    type Item = (u64, FieldValue<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let tag = self.varint()?;
        let value = match u32::try_from(tag & 7).ok()? {
            VARINT => FieldValue::Number(self.varint()?),
            FIXED64 => self.take(8).map(|_| FieldValue::Fixed)?,
            FIXED32 => self.take(4).map(|_| FieldValue::Fixed)?,
            LENGTH => {
                let length = usize::try_from(self.varint()?).ok()?;
                FieldValue::Bytes(self.take(length)?)
            }
            _ => return None,
        };
        Some((tag >> 3, value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_written_as_the_specification_shows_them() {
        let mut message = MessageWriter::default();
        message.number(1, 150);
        message.text(2, "testing");
        message.message(3, |inner| inner.number(1, 150));
        message.fixed32(4, 1);
        message.number(5, 0);
        message.packed(6, [1_u64, 2].into_iter().map(u64::to_le_bytes));
        let expected = [
            &[0x08, 0x96, 0x01][..],
            &[0x12, 0x07],
            b"testing",
            &[0x1a, 0x03, 0x08, 0x96, 0x01],
            &[0x25, 1, 0, 0, 0],
            &[0x32, 16, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0],
        ];
        assert_eq!(message.into_bytes(), expected.concat());
    }

    #[test]
    fn the_largest_number_is_read_back_and_a_torn_message_ends() {
        let mut message = MessageWriter::default();
        message.number(7, u64::MAX);
        message.text(8, "x");
        message.fixed64(9, 1);
        message.fixed32(10, 1);
        let bytes = message.into_bytes();
        let fields: Vec<_> = FieldReader(&bytes).collect();
        let (number, text) = (FieldValue::Number(u64::MAX), FieldValue::Bytes(b"x"));
        assert_eq!(fields, [(7, number), (8, text), (9, FieldValue::Fixed), (10, FieldValue::Fixed)]);
        for end in 0..bytes.len() {
            assert!(FieldReader(&bytes[..end]).count() < 4);
        }
        assert_eq!(FieldReader(&[0xff; 20]).count(), 0);
    }
}
