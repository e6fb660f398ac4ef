//! Sealed dead letters: the header values and the payload of a message that was given up, and the error of its last attempt.

use bytes::Bytes;
use oncegate_core::{FencingToken, RecordId};

use crate::envelope::{self, Envelope, Name, Part, Place, SealError, SealInfo};
use crate::keyring::Keyring;

/// The beginning of a sealed error, which is stored as a text. The rest is the sealed form in hexadecimal digits.
const ERROR_PREFIX: &str = "ogseal:";

/// The parts of a dead letter that stay in clear, and to which the sealed ones are bound: as they are stored.
#[derive(Clone, Copy, Debug)]
pub struct DeadLetterPlace<'a> {
    /// The receipt of the message.
    pub id: RecordId,
    /// The consumer that gave it up.
    pub consumer: &'a str,
    /// The topic from which it came, and to which it is published again.
    pub topic: &'a str,
}

/// The header values and the payload of a dead letter.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeadLetterContent {
    /// The values of the headers, in the order of their names.
    pub header_values: Vec<Bytes>,
    /// The payload.
    pub payload: Bytes,
}

/// Without the values.
impl std::fmt::Debug for DeadLetterContent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeadLetterContent")
            .field("header_values", &self.header_values.len())
            .field("payload_bytes", &self.payload.len())
            .finish()
    }
}

impl SealInfo {
    /// The facts about the payload of a dead letter; `None` if it is not sealed, or if its seal cannot be read.
    #[must_use]
    pub fn of_dead_letter(payload: &[u8]) -> Option<Self> {
        Envelope::read(payload).ok().flatten().map(|sealed| sealed.info)
    }
}

/// Seals the header values and the payload of a dead letter. `None` if the keys seal nothing.
///
/// The sealed form takes the place of the payload, and the header values are stored empty.
///
/// # Errors
/// If a value has 4 GiB or more, or all of it is too long for the cipher.
pub fn seal_dead_letter(
    place: &DeadLetterPlace<'_>,
    headers: &[(&str, &[u8])],
    payload: &[u8],
    keys: &Keyring,
) -> Result<Option<Vec<u8>>, SealError> {
    let Some(key) = keys.sealing() else { return Ok(None) };
    let values: usize = headers.iter().map(|(_, value)| 4 + value.len()).sum();
    let mut plaintext = Vec::with_capacity(values + payload.len());
    for (_, value) in headers {
        put(&mut plaintext, value)?;
    }
    plaintext.extend_from_slice(payload);
    let names: Vec<&str> = headers.iter().map(|(name, _)| *name).collect();
    let bound = place.content(&names)?;
    envelope::seal(&place.part(Part::DeadLetter, &bound), key, &plaintext).map(Some)
}

/// Opens the payload of a dead letter whose headers have these names. `None` if it is not sealed.
///
/// # Errors
/// [`SealError::KeyMissing`], [`SealError::UnknownVersion`], [`SealError::Broken`] if these bytes are not what was sealed for
/// this place, or [`SealError::NotSealed`] if the keys ask for sealed parts only.
pub fn open_dead_letter(
    place: &DeadLetterPlace<'_>,
    header_names: &[&str],
    payload: &[u8],
    keys: &Keyring,
) -> Result<Option<DeadLetterContent>, SealError> {
    let Some(sealed) = Envelope::read(payload)? else {
        return if keys.is_required() { Err(SealError::NotSealed) } else { Ok(None) };
    };
    let bound = place.content(header_names)?;
    let mut rest = sealed.open(&place.part(Part::DeadLetter, &bound), keys)?;
    let mut header_values = Vec::with_capacity(header_names.len());
    for _ in header_names {
        let (len, _) = rest.split_first_chunk::<4>().ok_or(SealError::Broken)?;
        let end = 4_usize.saturating_add(u32::from_be_bytes(*len) as usize);
        if end > rest.len() {
            return Err(SealError::Broken);
        }
        header_values.push(rest.split_to(end).slice(4..));
    }
    Ok(Some(DeadLetterContent { header_values, payload: rest }))
}

/// Seals the error of a dead letter as a text. `None` if the keys seal nothing.
///
/// # Errors
/// If it is too long for the cipher.
pub fn seal_dead_letter_error(
    place: &DeadLetterPlace<'_>,
    error: &str,
    keys: &Keyring,
) -> Result<Option<String>, SealError> {
    use std::fmt::Write as _;
    let Some(key) = keys.sealing() else { return Ok(None) };
    let bound = place.bound()?;
    let form = envelope::seal(&place.part(Part::DeadLetterError, &bound), key, error.as_bytes())?;
    let mut text = String::with_capacity(ERROR_PREFIX.len() + 2 * form.len());
    text.push_str(ERROR_PREFIX);
    for byte in form {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    Ok(Some(text))
}

/// Opens the error of a dead letter. `None` if it is not sealed.
///
/// # Errors
/// As for [`open_dead_letter`].
pub fn open_dead_letter_error(
    place: &DeadLetterPlace<'_>,
    text: &str,
    keys: &Keyring,
) -> Result<Option<String>, SealError> {
    let Some(digits) = text.strip_prefix(ERROR_PREFIX) else {
        return if keys.is_required() { Err(SealError::NotSealed) } else { Ok(None) };
    };
    let form = bytes_of(digits).ok_or(SealError::Broken)?;
    let sealed = Envelope::read(&form)?.ok_or(SealError::Broken)?;
    let bound = place.bound()?;
    let opened = sealed.open(&place.part(Part::DeadLetterError, &bound), keys)?;
    String::from_utf8(opened.into()).map(Some).map_err(|_| SealError::Broken)
}

impl DeadLetterPlace<'_> {
    /// The bytes to which both parts are bound.
    fn bound(&self) -> Result<Vec<u8>, SealError> {
        let mut bound = Vec::with_capacity(128);
        put(&mut bound, self.consumer.as_bytes())?;
        put(&mut bound, self.topic.as_bytes())?;
        Ok(bound)
    }

    /// The bytes to which the content is bound.
    fn content(&self, names: &[&str]) -> Result<Vec<u8>, SealError> {
        let mut bound = self.bound()?;
        let count = u32::try_from(names.len()).map_err(|_| SealError::TooLong)?;
        bound.extend_from_slice(&count.to_be_bytes());
        for name in names {
            put(&mut bound, name.as_bytes())?;
        }
        Ok(bound)
    }

    const fn part<'a>(&self, part: Part, bound: &'a [u8]) -> Place<'a> {
        Place { id: self.id, token: FencingToken::new(0), part, name: Name::Bytes(bound) }
    }
}

/// Appends bytes after their length.
pub(crate) fn put(to: &mut Vec<u8>, bytes: &[u8]) -> Result<(), SealError> {
    let len = u32::try_from(bytes.len()).map_err(|_| SealError::TooLong)?;
    to.extend_from_slice(&len.to_be_bytes());
    to.extend_from_slice(bytes);
    Ok(())
}

/// The bytes of hexadecimal digits.
fn bytes_of(digits: &str) -> Option<Vec<u8>> {
    let digits: Vec<u8> =
        digits.chars().map(|digit| Some(digit.to_digit(16)? as u8)).collect::<Option<_>>()?;
    let pairs = digits.chunks(2);
    pairs.map(|pair| if let [high, low] = *pair { Some(high << 4 | low) } else { None }).collect()
}
