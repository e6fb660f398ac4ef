//! The bytes of a record, read without a script. Only scripts write them. The reference has the table.

use oncegate_core::{
    AttemptId, CallerTag, FencingToken, Fingerprint, KeyTag, Label, Record, RecordedResponse, State,
    StoredResponse, Timestamp,
};

use crate::contract::VERSION;

/// No head of a record is larger: 125 bytes, the tag of the key, the operation, and the last resolution with its actor and its
/// reason are less than 2500.
pub(crate) const MAX_HEAD: usize = 2500;

/// The part of a record that shows which command was applied to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head<'a> {
    pub(crate) state: &'a [u8],
    pub(crate) lease_until: u64,
    pub(crate) attempt: u128,
    pub(crate) token: u64,
    pub(crate) resolution: Option<ResolutionPart<'a>>,
    /// The bytes after the head: the steps and the response.
    pub(crate) rest: &'a [u8],
}

/// The bytes of a record before its operation, at most: with the longest state, `in-progress`, and a tag of the key.
pub(crate) const MAX_BEFORE_OPERATION: usize = 131;

/// Reads a record without its steps, from the first bytes of it. Without all bytes of its operation, the operation is empty.
/// `response` takes the place of a response, which is at the end.
pub(crate) fn record_without_content(head: &[u8], response: &StoredResponse) -> Option<Record> {
    let mut bytes = Reader(head);
    if bytes.array::<1>()? != [VERSION] {
        return None;
    }
    let _response_bytes: [u8; 4] = bytes.array()?;
    let state = bytes.sized::<1>()?;
    let (by_operator, after_abandoned) = (bytes.flag()?, bytes.flag()?);
    let (changed_at, expires_at, lease_until) = (bytes.time()?, bytes.time()?, bytes.time()?);
    let attempt = AttemptId::new(u128::from_be_bytes(bytes.array()?));
    let token = FencingToken::new(u64::from_be_bytes(bytes.array()?));
    let attempts = u32::from_be_bytes(bytes.array()?);
    let created_at = bytes.time()?;
    let [fingerprint_version] = bytes.array()?;
    let fingerprint = Fingerprint::from_parts(fingerprint_version, bytes.array()?)?;
    let caller = CallerTag::from_bytes(bytes.array()?);
    let key = match bytes.sized::<1>()? {
        [] => None,
        tag => Some(KeyTag::from_bytes(tag.try_into().ok()?)),
    };
    let operation = bytes.sized::<2>().unwrap_or_default();
    let state = match state {
        b"in-progress" => State::InProgress { attempt, lease_until, after_abandoned },
        b"unknown" => State::Unknown,
        b"completed" => State::Completed(RecordedResponse::Replayable(response.clone())),
        b"awaited" => State::Completed(RecordedResponse::Awaited),
        b"tombstone" => State::Completed(RecordedResponse::Tombstone),
        b"released" => State::Released,
        _ => return None,
    };
    let label = Label::new(caller, &String::from_utf8_lossy(operation)).with_key(key);
    let mut record = Record::new(fingerprint, token, state, label, created_at);
    (record.attempts, record.by_operator) = (attempts, by_operator);
    (record.changed_at, record.expires_at) = (changed_at, expires_at);
    Some(record)
}

/// The last resolution of an operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ResolutionPart<'a> {
    pub(crate) to: &'a [u8],
    pub(crate) actor: &'a [u8],
    pub(crate) reason: &'a [u8],
}

impl<'a> Head<'a> {
    pub(crate) fn read(record: &'a [u8]) -> Option<Self> {
        let mut bytes = Reader(record);
        if bytes.array::<1>()? != [VERSION] {
            return None;
        }
        let _response_bytes: [u8; 4] = bytes.array()?;
        let state = bytes.sized::<1>()?;
        // The two flags, and the times of the last change and of the expiry.
        let _: [u8; 18] = bytes.array()?;
        let lease_until = u64::from_be_bytes(bytes.array()?);
        let attempt = u128::from_be_bytes(bytes.array()?);
        let token = u64::from_be_bytes(bytes.array()?);
        // The attempts, the time of creation, the fingerprint and the caller.
        let _: [u8; 53] = bytes.array()?;
        let (_key_tag, _operation) = (bytes.sized::<1>()?, bytes.sized::<2>()?);
        let resolution = ResolutionPart::read(bytes.sized::<2>()?);
        Some(Self { state, lease_until, attempt, token, resolution, rest: bytes.0 })
    }

    /// The number of steps, if the record has no response and was read to its end.
    pub(crate) fn steps(&self) -> Option<u64> {
        let (mut bytes, mut count) = (Reader(self.rest), 0);
        while !bytes.0.is_empty() {
            let (_name, _result) = (bytes.sized::<2>()?, bytes.sized::<4>()?);
            count += 1;
        }
        Some(count)
    }

    /// Returns true if these are the results of all steps, and the response after them, of a record that was read to its end.
    pub(crate) fn has_content(&self, results: &[impl AsRef<[u8]>], response: &[u8]) -> bool {
        let mut bytes = Reader(self.rest);
        let has_results = results.iter().all(|expected| {
            let (_name, result) = (bytes.sized::<2>(), bytes.sized::<4>());
            result == Some(expected.as_ref())
        });
        has_results && bytes.0 == response
    }
}

impl<'a> ResolutionPart<'a> {
    fn read(part: &'a [u8]) -> Option<Self> {
        let mut bytes = Reader(part);
        let (_at, _from): ([u8; 8], _) = (bytes.array()?, bytes.sized::<1>()?);
        let (to, actor, reason) = (bytes.sized::<1>()?, bytes.sized::<2>()?, bytes.sized::<2>()?);
        Some(Self { to, actor, reason })
    }
}

/// The bytes that were not read yet.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*array)
    }

    fn flag(&mut self) -> Option<bool> {
        match self.array()? {
            [0] => Some(false),
            [1] => Some(true),
            _ => None,
        }
    }

    fn time(&mut self) -> Option<Timestamp> {
        Some(Timestamp::from_millis(u64::from_be_bytes(self.array()?)))
    }

    /// Bytes after their size, which has this many bytes.
    fn sized<const N: usize>(&mut self) -> Option<&'a [u8]> {
        let size = self.array::<N>()?.iter().fold(0, |size, byte| size << 8 | usize::from(*byte));
        let (sized, rest) = self.0.split_at_checked(size)?;
        self.0 = rest;
        Some(sized)
    }
}
