//! The response that a record keeps.

use std::fmt;

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::limits;

/// A stored response: a status, header fields, a body and trailer fields, in one allocation of exactly their size.
///
/// It is a copy, because a record must not keep the network buffers in memory that its parts came in. The format of the bytes
/// is published (`vectors/responses.json`), because stores keep them as they are:
///
/// ```text
/// u8 version = 1 | u16 status | u16 header fields | u16 trailer fields
/// | (u16 name length, u32 value length, name, value)*  headers, then trailers
/// | body, to the end                                     all numbers big-endian
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct StoredResponse {
    encoded: Bytes,
    /// The start of the body in `encoded`.
    body_at: usize,
}

/// The reason why a response cannot be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ResponseError {
    /// The status is not from 200 to 999, so it is not the final response to a request.
    #[error("the status of the response is not from 200 to 999")]
    NotFinal,
    /// A field's name is not ASCII.
    #[error("the response has a field name that is not ASCII")]
    NotAscii,
    /// More than [`limits::MAX_HEADER_FIELDS`] header or trailer fields.
    #[error("the response has more than {} header or trailer fields", limits::MAX_HEADER_FIELDS)]
    TooManyFields,
    /// A field's name is longer than 65 535 bytes.
    #[error("the response has a field name longer than 65535 bytes")]
    FieldTooLong,
    /// Larger than [`limits::MAX_RESPONSE_BYTES`] bytes in all.
    #[error("the response is larger than {} bytes", limits::MAX_RESPONSE_BYTES)]
    TooLarge,
}

const VERSION: u8 = 1;
const HEAD: usize = 1 + 2 + 2 + 2;
const FIELD_HEAD: usize = 2 + 4;

/// The statuses of final responses: 1xx announce another response, and a status has three digits.
const STATUSES: std::ops::RangeInclusive<u16> = 200..=999;

impl StoredResponse {
    /// The name of the only header field of a sealed response: its body is the encrypted form of another response. Entry
    /// points keep no field with this prefix, so no response of a service has it.
    pub const SEALED_FIELD: &str = "oncegate-sealed";

    /// Returns true if this is the sealed form of a response, which must be opened before a client gets it.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.headers().next().is_some_and(|(name, _)| name == Self::SEALED_FIELD)
    }

    /// Copies a response into one allocation. `body` is a list of chunks in their order.
    ///
    /// # Errors
    /// [`ResponseError`] if it exceeds a limit.
    pub fn new(
        status: u16,
        headers: &[(&str, &[u8])],
        body: &[Bytes],
        trailers: &[(&str, &[u8])],
    ) -> Result<Self, ResponseError> {
        if !STATUSES.contains(&status) {
            return Err(ResponseError::NotFinal);
        }
        if headers.len() > limits::MAX_HEADER_FIELDS || trailers.len() > limits::MAX_HEADER_FIELDS {
            return Err(ResponseError::TooManyFields);
        }
        let fields = || headers.iter().chain(trailers);
        if fields().any(|(name, _)| name.len() > usize::from(u16::MAX)) {
            return Err(ResponseError::FieldTooLong);
        }
        if !fields().all(|(name, _)| name.is_ascii()) {
            return Err(ResponseError::NotAscii);
        }
        let fields_len: usize = fields().map(|(name, value)| FIELD_HEAD + name.len() + value.len()).sum();
        let body_len: usize = body.iter().map(Bytes::len).sum();
        let total = HEAD.saturating_add(fields_len).saturating_add(body_len);
        if total > limits::MAX_RESPONSE_BYTES {
            return Err(ResponseError::TooLarge);
        }
        let mut to = BytesMut::with_capacity(total);
        to.put_u8(VERSION);
        to.put_u16(status);
        // No number is cut: all were checked above.
        to.put_u16(headers.len() as u16);
        to.put_u16(trailers.len() as u16);
        for (name, value) in fields() {
            to.put_u16(name.len() as u16);
            to.put_u32(value.len() as u32);
            to.put_slice(name.as_bytes());
            to.put_slice(value);
        }
        for chunk in body {
            to.put_slice(chunk);
        }
        Ok(Self { encoded: to.freeze(), body_at: HEAD + fields_len })
    }

    /// Reads the published bytes back; `None` if they are incomplete, invalid or of an unknown version.
    #[must_use]
    pub fn decode(encoded: Bytes) -> Option<Self> {
        if *encoded.first()? != VERSION || encoded.len() > limits::MAX_RESPONSE_BYTES {
            return None;
        }
        if !STATUSES.contains(&u16_at(&encoded, 1)?) {
            return None;
        }
        let fields = usize::from(u16_at(&encoded, 3)?) + usize::from(u16_at(&encoded, 5)?);
        if fields > 2 * limits::MAX_HEADER_FIELDS {
            return None;
        }
        let mut at = HEAD;
        for _ in 0..fields {
            let (_, _, next) = field_at(&encoded, at)?;
            at = next;
        }
        Some(Self { encoded, body_at: at })
    }

    /// A response of parts that were one before.
    pub(crate) const fn from_parts(encoded: Bytes, body_at: usize) -> Self {
        Self { encoded, body_at }
    }

    /// The start of the body in the published bytes.
    pub(crate) const fn body_at(&self) -> usize {
        self.body_at
    }

    /// The published bytes.
    #[must_use]
    pub const fn as_encoded(&self) -> &Bytes {
        &self.encoded
    }

    /// The status code, from 200 to 999. Entry points that are not HTTP give it their own meaning.
    #[must_use]
    pub fn status(&self) -> u16 {
        u16_at(&self.encoded, 1).unwrap_or_default()
    }

    /// The header fields in their order.
    pub fn headers(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.fields().take(self.count(3))
    }

    /// The trailer fields in their order.
    pub fn trailers(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.fields().skip(self.count(3)).take(self.count(5))
    }

    /// The body, which shares the allocation of this response.
    #[must_use]
    pub fn body(&self) -> Bytes {
        self.encoded.slice(self.body_at.min(self.encoded.len())..)
    }

    /// The body as a slice. Unlike [`body`](Self::body) it takes no reference, so it needs no memory.
    #[must_use]
    pub fn as_body(&self) -> &[u8] {
        self.encoded.get(self.body_at..).unwrap_or_default()
    }

    /// The body. It takes over the allocation of this response.
    #[must_use]
    pub fn into_body(mut self) -> Bytes {
        self.encoded.advance(self.body_at.min(self.encoded.len()));
        self.encoded
    }

    fn count(&self, at: usize) -> usize {
        usize::from(u16_at(&self.encoded, at).unwrap_or_default())
    }

    fn fields(&self) -> impl Iterator<Item = (&str, &[u8])> {
        let mut at = HEAD;
        std::iter::from_fn(move || {
            let (name, value, next) = field_at(&self.encoded, at)?;
            at = next;
            Some((name, value))
        })
    }
}

/// Shows no header value and no body.
impl fmt::Debug for StoredResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredResponse")
            .field("status", &self.status())
            .field("body_len", &(self.encoded.len().saturating_sub(self.body_at)))
            .finish_non_exhaustive()
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|b| u16::from_be_bytes(*b))
}

/// The field that starts at `at`, and the start of the next one.
fn field_at(bytes: &[u8], at: usize) -> Option<(&str, &[u8], usize)> {
    let name_len = usize::from(u16_at(bytes, at)?);
    let value_len = u32::from_be_bytes(*bytes.get(at.checked_add(2)?..)?.first_chunk()?);
    let name_at = at.checked_add(FIELD_HEAD)?;
    let value_at = name_at.checked_add(name_len)?;
    let end = value_at.checked_add(usize::try_from(value_len).ok()?)?;
    let name = bytes.get(name_at..value_at).filter(|name| name.is_ascii())?;
    let name = std::str::from_utf8(name).ok()?;
    Some((name, bytes.get(value_at..end)?, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADERS: [(&str, &[u8]); 2] = [("content-type", b"application/json"), ("x-raw", b"\xff\x00")];
    const TRAILERS: [(&str, &[u8]); 1] = [("grpc-status", b"0")];

    fn response() -> StoredResponse {
        let body = [Bytes::from_static(b"\x00\xff"), Bytes::from_static(b"tail")];
        StoredResponse::new(201, &HEADERS, &body, &TRAILERS).unwrap()
    }

    #[test]
    fn a_response_reads_back_as_it_was_written() {
        let read = StoredResponse::decode(response().as_encoded().clone()).unwrap();
        assert_eq!(read, response());
        assert_eq!(read.status(), 201);
        assert_eq!(read.headers().collect::<Vec<_>>(), HEADERS);
        assert_eq!(read.trailers().collect::<Vec<_>>(), TRAILERS);
        assert_eq!(read.body(), &b"\x00\xfftail"[..]);
        assert_eq!(read.as_body(), &b"\x00\xfftail"[..]);
        assert_eq!(read.into_body(), &b"\x00\xfftail"[..]);
        let empty = StoredResponse::new(204, &HEADERS, &[], &[]).unwrap();
        assert_eq!((empty.as_body(), empty.clone().into_body()), (&b""[..], Bytes::new()));
    }

    #[test]
    fn takes_one_allocation_of_exactly_its_size() {
        let encoded = response().encoded;
        assert_eq!(encoded.len(), HEAD + 3 * FIELD_HEAD + 12 + 16 + 5 + 2 + 11 + 1 + 6);
    }

    #[test]
    fn bytes_that_are_cut_before_the_body_or_of_another_version_are_refused() {
        let whole = response().encoded;
        let body_at = response().body_at;
        for end in 0..body_at {
            assert_eq!(StoredResponse::decode(whole.slice(..end)), None, "cut at {end}");
        }
        let mut other = whole.to_vec();
        other[0] = 2;
        assert_eq!(StoredResponse::decode(other.into()), None);
    }

    /// All stores check the same, so that no store accepts a response that another one cannot read.
    #[test]
    fn a_response_that_is_not_final_or_not_ascii_is_refused() {
        for status in [0, 99, 100, 103, 199, 1000, 51456] {
            assert_eq!(StoredResponse::new(status, &[], &[], &[]), Err(ResponseError::NotFinal), "{status}");
            let mut bytes = response().encoded.to_vec();
            bytes[1..3].copy_from_slice(&status.to_be_bytes());
            assert_eq!(StoredResponse::decode(bytes.into()), None, "{status}");
        }
        assert!([200, 999].into_iter().all(|status| StoredResponse::new(status, &[], &[], &[]).is_ok()));
        assert_eq!(StoredResponse::new(200, &[("ü", b"")], &[], &[]), Err(ResponseError::NotAscii));
        assert_eq!(StoredResponse::new(200, &[], &[], &[("ü", b"")]), Err(ResponseError::NotAscii));
        let bytes = b"\x01\x00\xc8\x00\x01\x00\x00\x00\x02\x00\x00\x00\x00\xc3\xbc";
        assert_eq!(StoredResponse::decode(Bytes::from_static(bytes)), None);
    }

    #[test]
    fn is_bounded_in_fields_and_size() {
        let fields = |n| vec![("a", &b"b"[..]); n];
        assert!(StoredResponse::new(200, &fields(limits::MAX_HEADER_FIELDS), &[], &[]).is_ok());
        let beyond = StoredResponse::new(200, &fields(limits::MAX_HEADER_FIELDS + 1), &[], &[]);
        assert_eq!(beyond, Err(ResponseError::TooManyFields));
        let fits = Bytes::from(vec![0; limits::MAX_RESPONSE_BYTES - HEAD]);
        assert!(StoredResponse::new(200, &[], &[fits], &[]).is_ok());
        let beyond = Bytes::from(vec![0; limits::MAX_RESPONSE_BYTES - HEAD + 1]);
        assert_eq!(StoredResponse::new(200, &[], &[beyond], &[]), Err(ResponseError::TooLarge));
    }

    #[test]
    fn debug_output_shows_no_content() {
        assert_eq!(format!("{:?}", response()), "StoredResponse { status: 201, body_len: 6, .. }");
    }
}
