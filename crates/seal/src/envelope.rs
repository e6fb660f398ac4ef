//! The sealed form of a response and of a step: see the page of the crate.

use bytes::Bytes;
use oncegate_core::{
    Extent, FencingToken, Record, RecordId, RecordedResponse, ResponseError, State, Step, StepLimitError,
    StoreError, StoredResponse, limits,
};

use crate::key::{SALT_BYTES, SealKeyId, TAG_BYTES};
use crate::keyring::Keyring;

const MAGIC: [u8; 7] = *b"\0ogseal";
const VERSION: u8 = 1;
const HEAD_BYTES: usize = MAGIC.len() + 1 + 8 + 1 + 8 + SALT_BYTES;

/// The bytes by which a sealed response is longer: those of the sealed form, and of a response with one header field.
const RESPONSE_OVERHEAD: usize = HEAD_BYTES + TAG_BYTES + 7 + 6 + StoredResponse::SEALED_FIELD.len() + 1;

/// The status of a sealed response: a program that does not know the seal must not replay a success.
const STATUS: u16 = 500;

/// The part of a record that is sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Part {
    /// The response that the owner of the record gave, under its token.
    OwnersResponse,
    /// The response that an operator gave. An operator has no token.
    OperatorsResponse,
    /// The result of a step.
    Step,
    /// A request that a client keeps in its journal.
    Intent,
    /// The header values and the payload of a dead letter.
    DeadLetter,
    /// The error of a dead letter.
    DeadLetterError,
    /// An event that a stream buffers.
    StreamEvent,
}

impl Part {
    const fn number(self) -> u8 {
        match self {
            Self::OwnersResponse => 1,
            Self::OperatorsResponse => 2,
            Self::Step => 3,
            Self::Intent => 4,
            Self::DeadLetter => 5,
            Self::DeadLetterError => 6,
            Self::StreamEvent => 7,
        }
    }

    fn of_number(number: u8) -> Option<Self> {
        let all = [
            Self::OwnersResponse,
            Self::OperatorsResponse,
            Self::Step,
            Self::Intent,
            Self::DeadLetter,
            Self::DeadLetterError,
            Self::StreamEvent,
        ];
        all.into_iter().find(|part| part.number() == number)
    }
}

/// The readable facts about a sealed part. They are authentic only once the part was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SealInfo {
    /// The key that opens it.
    pub key: SealKeyId,
    /// The part of the record.
    pub part: Part,
    /// The token under which it was written; zero for an operator.
    pub token: FencingToken,
}

impl SealInfo {
    /// The facts about a response; `None` if it is not sealed, or if its seal cannot be read.
    #[must_use]
    pub fn of_response(response: &StoredResponse) -> Option<Self> {
        response
            .is_sealed()
            .then(|| Envelope::read(response.as_body()).ok().flatten())?
            .map(|sealed| sealed.info)
    }

    /// The facts about a sealed form.
    pub(crate) fn read(sealed: &[u8]) -> Result<Self, SealError> {
        Ok(Envelope::read(sealed)?.ok_or(SealError::Broken)?.info)
    }

    /// The facts about each sealed part of a record, as the store behind a [`SealedStore`](crate::SealedStore) has it: its
    /// response and its steps.
    pub fn of_record(record: &Record) -> impl Iterator<Item = Self> {
        let response = match &record.state {
            State::Completed(RecordedResponse::Replayable(response)) => Self::of_response(response),
            _ => None,
        };
        response.into_iter().chain(record.steps.as_slice().iter().filter_map(Self::of_step))
    }

    /// The facts about a step; `None` if it is not sealed, or if its seal cannot be read.
    #[must_use]
    pub fn of_step(step: &Step) -> Option<Self> {
        Envelope::read(step.result()).ok().flatten().map(|sealed| sealed.info)
    }
}

/// The reason why a part was not sealed or not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SealError {
    /// The key is not among those of this process.
    #[error(
        "the record is sealed with the key {0}, which this process does not have: add it to the seal keys"
    )]
    KeyMissing(SealKeyId),
    /// The part is not what was sealed for this place: it was changed, moved or cut.
    #[error("the seal of the record is broken: its content was changed, moved or cut")]
    Broken,
    /// The seal was made by a newer program.
    #[error("the record is sealed in version {0}; this program knows version {VERSION}")]
    UnknownVersion(u8),
    /// The part is not sealed, and it must be.
    #[error("the record is not sealed, and only sealed records are accepted")]
    NotSealed,
    /// The sealed form of the response is too large to be stored.
    #[error("the sealed response is too large")]
    Response(#[source] ResponseError),
    /// The sealed form of the step is too large to be stored.
    #[error("the sealed step is too large")]
    Step(#[source] StepLimitError),
    /// A part of a dead letter, or the name of a stream, is too long.
    #[error("a part of the dead letter or the name of the stream is too long to be sealed")]
    TooLong,
}

impl From<SealError> for StoreError {
    fn from(error: SealError) -> Self {
        match error {
            SealError::KeyMissing(_) | SealError::NotSealed => Self::sealed(error.to_string()),
            SealError::Broken | SealError::UnknownVersion(_) => {
                Self::corrupt(error.to_string()).with_extent(Extent::Record)
            }
            SealError::Response(_) | SealError::Step(_) | SealError::TooLong => {
                Self::invalid(error.to_string()).with_extent(Extent::Record)
            }
        }
    }
}

/// The place of a part: everything that the seal binds it to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    pub(crate) id: RecordId,
    pub(crate) token: FencingToken,
    pub(crate) part: Part,
    pub(crate) name: Name<'a>,
}

/// The name of a part within its place.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Name<'a> {
    /// A response has none.
    None,
    /// The number and the name of a step.
    Step(usize, &'a str),
    /// The name of a file.
    File(&'a str),
    /// The parts in clear of a dead letter, or the place of an event.
    Bytes(&'a [u8]),
}

impl<'a> Place<'a> {
    pub(crate) const fn owner(id: RecordId, token: FencingToken) -> Self {
        Self { id, token, part: Part::OwnersResponse, name: Name::None }
    }

    pub(crate) const fn operator(id: RecordId) -> Self {
        Self { id, token: FencingToken::new(0), part: Part::OperatorsResponse, name: Name::None }
    }

    pub(crate) const fn step(id: RecordId, token: FencingToken, number: usize, name: &'a str) -> Self {
        Self { id, token, part: Part::Step, name: Name::Step(number, name) }
    }

    const fn intent(file: &'a str) -> Self {
        let (id, token) = (RecordId::from_bytes([0; 32]), FencingToken::new(0));
        Self { id, token, part: Part::Intent, name: Name::File(file) }
    }

    fn context(&self) -> Vec<u8> {
        let mut context = Vec::with_capacity(96);
        context.extend_from_slice(b"oncegate-seal-1");
        context.push(self.part.number());
        context.extend_from_slice(self.id.as_bytes());
        context.extend_from_slice(&self.token.get().to_be_bytes());
        match self.name {
            Name::None => {}
            Name::Step(number, name) => {
                context.extend_from_slice(&(number as u32).to_be_bytes());
                context.extend_from_slice(name.as_bytes());
            }
            Name::File(name) => context.extend_from_slice(name.as_bytes()),
            Name::Bytes(bytes) => context.extend_from_slice(bytes),
        }
        context
    }
}

/// Returns true if the bytes begin like a sealed form.
pub(crate) fn is_sealed(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC)
}

/// The parts of a sealed form.
#[derive(Clone, Copy)]
pub(crate) struct Envelope<'a> {
    pub(crate) info: SealInfo,
    salt: &'a [u8; SALT_BYTES],
    ciphertext: &'a [u8],
    tag: [u8; TAG_BYTES],
}

impl<'a> Envelope<'a> {
    /// Takes the sealed form apart. `None` if the bytes do not begin like one.
    pub(crate) fn read(bytes: &'a [u8]) -> Result<Option<Self>, SealError> {
        let Some(rest) = bytes.strip_prefix(&MAGIC) else { return Ok(None) };
        let (&version, rest) = rest.split_first().ok_or(SealError::Broken)?;
        if version != VERSION {
            return Err(SealError::UnknownVersion(version));
        }
        Self::parts(rest).map(Some).ok_or(SealError::Broken)
    }

    fn parts(rest: &'a [u8]) -> Option<Self> {
        let (key, rest) = rest.split_first_chunk::<8>()?;
        let (&part, rest) = rest.split_first()?;
        let (token, rest) = rest.split_first_chunk::<8>()?;
        let (salt, rest) = rest.split_first_chunk::<SALT_BYTES>()?;
        let (ciphertext, tag) = rest.split_last_chunk::<TAG_BYTES>()?;
        let info = SealInfo {
            key: SealKeyId(*key),
            part: Part::of_number(part)?,
            token: FencingToken::new(u64::from_be_bytes(*token)),
        };
        Some(Self { info, salt, ciphertext, tag: *tag })
    }

    /// Opens the form as that of this place.
    pub(crate) fn open(&self, place: &Place<'_>, keys: &Keyring) -> Result<Bytes, SealError> {
        // What the head says is a part of what is sealed only if it is that of the place.
        if (self.info.part, self.info.token) != (place.part, place.token) {
            return Err(SealError::Broken);
        }
        let key = keys.find(self.info.key).ok_or(SealError::KeyMissing(self.info.key))?;
        let mut text = self.ciphertext.to_vec();
        key.decrypt(self.salt, &place.context(), &mut text, self.tag).ok_or(SealError::Broken)?;
        Ok(text.into())
    }
}

/// The sealed form of some bytes.
pub(crate) fn seal(
    place: &Place<'_>,
    key: &crate::key::SealKey,
    plaintext: &[u8],
) -> Result<Vec<u8>, SealError> {
    let context = place.context();
    let salt = key.salt(&context, plaintext);
    let mut form = Vec::with_capacity(HEAD_BYTES + plaintext.len() + TAG_BYTES);
    form.extend_from_slice(&MAGIC);
    form.push(VERSION);
    form.extend_from_slice(key.id().as_bytes());
    form.push(place.part.number());
    form.extend_from_slice(&place.token.get().to_be_bytes());
    form.extend_from_slice(&salt);
    form.extend_from_slice(plaintext);
    let text = form.get_mut(HEAD_BYTES..).unwrap_or_default();
    let tag = key.encrypt(&salt, &context, text).ok_or(SealError::Response(ResponseError::TooLarge))?;
    form.extend_from_slice(&tag);
    Ok(form)
}

/// Seals a response, if there is a key.
pub(crate) fn seal_response(
    place: &Place<'_>,
    response: &StoredResponse,
    keys: &Keyring,
) -> Result<StoredResponse, SealError> {
    let Some(key) = keys.sealing() else { return Ok(response.clone()) };
    // Checked first: to encrypt 64 MiB for nothing takes a tenth of a second.
    if response.as_encoded().len() > limits::MAX_RESPONSE_BYTES - RESPONSE_OVERHEAD {
        return Err(SealError::Response(ResponseError::TooLarge));
    }
    let form = seal(place, key, response.as_encoded())?;
    let field = [(StoredResponse::SEALED_FIELD, &b"1"[..])];
    StoredResponse::new(STATUS, &field, &[form.into()], &[]).map_err(SealError::Response)
}

/// The writer of a response, as far as the reader knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writer {
    /// A claim got the response without the rest of the record.
    NotKnown,
    /// The owner with this token.
    Owner(FencingToken),
    /// An operator.
    Operator,
}

/// Opens the response of a record. A response that is not sealed is returned as it is, unless it must be sealed.
pub(crate) fn open_response(
    id: RecordId,
    writer: Writer,
    response: StoredResponse,
    keys: &Keyring,
) -> Result<StoredResponse, SealError> {
    if !response.is_sealed() {
        return if keys.is_required() { Err(SealError::NotSealed) } else { Ok(response) };
    }
    let sealed = Envelope::read(response.as_body())?.ok_or(SealError::Broken)?;
    let SealInfo { part, token, .. } = sealed.info;
    let is_expected = match writer {
        // The sealed form of a step does not open as a response.
        Writer::NotKnown => true,
        Writer::Owner(owner) => part == Part::OwnersResponse && token == owner,
        Writer::Operator => part == Part::OperatorsResponse,
    };
    if !is_expected {
        return Err(SealError::Broken);
    }
    let opened = sealed.open(&Place { id, token, part, name: Name::None }, keys)?;
    StoredResponse::decode(opened).ok_or(SealError::Broken)
}

/// Seals a step, if there is a key.
pub(crate) fn seal_step(
    id: RecordId,
    token: FencingToken,
    number: usize,
    step: &Step,
    keys: &Keyring,
) -> Result<Step, SealError> {
    let Some(key) = keys.sealing() else { return Ok(step.clone()) };
    let form = seal(&Place::step(id, token, number, step.name()), key, step.result())?;
    Step::new(step.name(), form.into()).map_err(SealError::Step)
}

/// Opens a step of a record whose newest token is `newest`. A step that is not sealed is returned as it is, unless it must be
/// sealed.
pub(crate) fn open_step(
    id: RecordId,
    newest: FencingToken,
    number: usize,
    step: &Step,
    keys: &Keyring,
) -> Result<Step, SealError> {
    let Some(sealed) = Envelope::read(step.result())? else {
        return if keys.is_required() { Err(SealError::NotSealed) } else { Ok(step.clone()) };
    };
    // Steps outlive the attempt that recorded them.
    let SealInfo { token, .. } = sealed.info;
    if token > newest {
        return Err(SealError::Broken);
    }
    let opened = sealed.open(&Place::step(id, token, number, step.name()), keys)?;
    Step::new(step.name(), opened).map_err(|_| SealError::Broken)
}

/// Seals a request for the journal of a client, which keeps it in the file with this name. `None` if the keys seal nothing.
///
/// # Errors
/// If the request is too long for the cipher, which needs 64 GiB.
pub fn seal_intent(file: &str, intent: &[u8], keys: &Keyring) -> Result<Option<Vec<u8>>, SealError> {
    keys.sealing().map(|key| seal(&Place::intent(file), key, intent)).transpose()
}

/// Opens a request that [`seal_intent`] sealed for the file with this name.
///
/// # Errors
/// [`SealError::KeyMissing`], [`SealError::UnknownVersion`], or [`SealError::Broken`] if these bytes are not what was sealed
/// for this file.
pub fn open_intent(file: &str, sealed: &[u8], keys: &Keyring) -> Result<Bytes, SealError> {
    Envelope::read(sealed)?.ok_or(SealError::Broken)?.open(&Place::intent(file), keys)
}

/// Seals the response that the owner of a record gives, for a program that completes the record itself: by the functions of
/// the contract, in a transaction of its own. A [`SealedStore`](crate::SealedStore) opens it. If the keys seal nothing, returns
/// the response as it is.
///
/// # Errors
/// [`SealError::Response`] if the sealed form is too large to be stored.
pub fn seal_owners_response(
    record: RecordId,
    token: FencingToken,
    response: &StoredResponse,
    keys: &Keyring,
) -> Result<StoredResponse, SealError> {
    seal_response(&Place::owner(record, token), response, keys)
}

/// Opens the response that a claim of this record returned. A response in clear is returned as it is.
///
/// # Errors
/// [`SealError::KeyMissing`], [`SealError::UnknownVersion`], [`SealError::Broken`] if these bytes are not what was sealed for
/// this record, or [`SealError::NotSealed`] if the keys ask for sealed responses only.
pub fn open_claimed_response(
    record: RecordId,
    response: StoredResponse,
    keys: &Keyring,
) -> Result<StoredResponse, SealError> {
    open_response(record, Writer::NotKnown, response, keys)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::key::SealKey;

    fn bytes(value: &Value) -> Vec<u8> {
        let text = value.as_str().unwrap();
        (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
    }

    /// A program that writes another form would not be understood by those that follow the examples.
    #[test]
    fn the_published_examples_are_written_the_same() {
        let file: Value = serde_json::from_str(include_str!("../vectors/sealed.json")).unwrap();
        let key = SealKey::parse(file["key_text"].as_str().unwrap()).unwrap();
        let id = RecordId::from_bytes(bytes(&file["record"]).try_into().unwrap());
        for part in file["parts"].as_array().unwrap() {
            let token = FencingToken::new(part["token"].as_str().unwrap().parse().unwrap());
            let place = match part["number"].as_u64() {
                Some(number) => Place::step(id, token, number as usize, part["name"].as_str().unwrap()),
                None => Place::owner(id, token),
            };
            assert_eq!(seal(&place, &key, &bytes(&part["plaintext"])).unwrap(), bytes(&part["sealed"]));
        }
    }

    #[test]
    fn the_largest_response_that_can_be_sealed_fits_exactly() {
        let keys = Keyring::new([SealKey::from_bytes([1; 32])]);
        let place = Place::operator(RecordId::from_bytes([7; 32]));
        let response = StoredResponse::new(200, &[], &[], &[]).unwrap();
        let sealed = seal_response(&place, &response, &keys).unwrap();
        assert_eq!(sealed.as_encoded().len(), response.as_encoded().len() + RESPONSE_OVERHEAD);
    }
}
