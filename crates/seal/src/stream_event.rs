//! Sealed events: those that a stream buffers until earlier events come.

use bytes::Bytes;
use oncegate_core::{FencingToken, RecordId};

use crate::dead_letter::put;
use crate::envelope::{self, Envelope, Name, Part, Place, SealError};
use crate::keyring::Keyring;

/// The place of a buffered event, to which it is bound.
#[derive(Clone, Copy, Debug)]
pub struct StreamEventPlace<'a> {
    /// The consumer that buffers it.
    pub consumer: &'a str,
    /// The stream.
    pub stream: &'a str,
    /// The number of the event in its stream.
    pub sequence: u64,
}

/// Seals an event. `None` if the keys seal nothing.
///
/// # Errors
/// If it, or the name of the stream, is too long for the cipher.
pub fn seal_stream_event(
    place: &StreamEventPlace<'_>,
    event: &[u8],
    keys: &Keyring,
) -> Result<Option<Vec<u8>>, SealError> {
    let Some(key) = keys.sealing() else { return Ok(None) };
    let bound = place.bound()?;
    envelope::seal(&part(&bound), key, event).map(Some)
}

/// Opens a buffered event. `None` if it is not sealed.
///
/// # Errors
/// [`SealError::KeyMissing`], [`SealError::UnknownVersion`], [`SealError::Broken`] if these bytes are not what was sealed for
/// this place, or [`SealError::NotSealed`] if the keys ask for sealed parts only.
pub fn open_stream_event(
    place: &StreamEventPlace<'_>,
    event: &[u8],
    keys: &Keyring,
) -> Result<Option<Bytes>, SealError> {
    let Some(sealed) = Envelope::read(event)? else {
        return if keys.is_required() { Err(SealError::NotSealed) } else { Ok(None) };
    };
    let bound = place.bound()?;
    sealed.open(&part(&bound), keys).map(Some)
}

impl StreamEventPlace<'_> {
    fn bound(&self) -> Result<Vec<u8>, SealError> {
        let mut bound = Vec::with_capacity(128);
        put(&mut bound, self.consumer.as_bytes())?;
        put(&mut bound, self.stream.as_bytes())?;
        bound.extend_from_slice(&self.sequence.to_be_bytes());
        Ok(bound)
    }
}

const fn part(bound: &[u8]) -> Place<'_> {
    let (id, token) = (RecordId::from_bytes([0; 32]), FencingToken::new(0));
    Place { id, token, part: Part::StreamEvent, name: Name::Bytes(bound) }
}
