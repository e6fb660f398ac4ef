//! The scripts' replies, read strictly: an unexpected reply is an error and never an outcome.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::{
    AttemptId, AuditEntry, CallerTag, FencingToken, Fingerprint, Grant, KeyTag, Label, Outcome, Record,
    RecordId, RecordedResponse, State, StateName, Step, StoreError, StoredResponse, Timestamp,
};
use redis::Value;

use crate::contract::VERSION;

/// The reply of a script: a word, the server's time, and the rest.
pub(crate) struct Reply {
    word: String,
    pub(crate) now: Timestamp,
    rest: std::vec::IntoIter<Value>,
}

impl Reply {
    pub(crate) fn read(value: Value) -> Option<Self> {
        let Value::Array(parts) = value else { return None };
        let mut rest = parts.into_iter();
        let word = String::from_utf8(bytes(rest.next()?)?).ok()?;
        let now = Timestamp::from_millis(integer(&rest.next()?)?);
        Some(Self { word, now, rest })
    }

    fn bytes(&mut self) -> Option<Vec<u8>> {
        bytes(self.rest.next()?)
    }

    fn number(&mut self) -> Option<u64> {
        integer(&self.rest.next()?)
    }

    fn state(&mut self) -> Option<StateName> {
        StateName::from_name(std::str::from_utf8(&self.bytes()?).ok()?)
    }

    /// A state, or the empty text of a record that is not there.
    fn optional_state(&mut self) -> Option<Option<StateName>> {
        match self.bytes()?.as_slice() {
            b"" => Some(None),
            name => StateName::from_name(std::str::from_utf8(name).ok()?).map(Some),
        }
    }

    /// The values after the time.
    pub(crate) fn values(self) -> Vec<Value> {
        self.rest.collect()
    }

    /// The outcome of a command. A response that cannot be read is a record that cannot be read.
    pub(crate) fn outcome(mut self) -> Result<Outcome, StoreError> {
        if self.word == "replay" {
            let response = self.bytes().and_then(response);
            return response.map(Outcome::Replay).ok_or_else(unreadable);
        }
        self.other_outcome().ok_or_else(unexpected_reply)
    }

    fn other_outcome(&mut self) -> Option<Outcome> {
        Some(match self.word.as_str() {
            "execute" => Outcome::Execute(Grant {
                token: FencingToken::new(self.number()?),
                attempts: u32::try_from(self.number()?).ok()?,
                lease_until: Timestamp::from_millis(self.number()?),
                after_abandoned: flag(self.number()?)?,
            }),
            "in-progress" => Outcome::InProgress { lease_left: Duration::from_millis(self.number()?) },
            "mismatch" => Outcome::Mismatch,
            "unknown" => Outcome::Unknown,
            "unreplayable" => Outcome::Unreplayable,
            "renewed" => Outcome::Renewed { lease_until: Timestamp::from_millis(self.number()?) },
            "recorded" => Outcome::StepRecorded,
            "differs" => Outcome::StepDiffers,
            "full" => Outcome::StepsFull,
            "completed" => Outcome::Completed,
            "released" => Outcome::Released,
            "fenced" => Outcome::Fenced,
            "resolved" => Outcome::Resolved { from: self.state()? },
            "not-resolvable" => Outcome::NotResolvable { state: self.optional_state()? },
            "rewritten" => Outcome::Rewritten,
            "not-rewritten" => Outcome::NotRewritten { state: self.optional_state()? },
            "forgotten" => Outcome::Forgotten { from: self.state()? },
            "not-forgotten" => Outcome::NotForgotten { state: self.optional_state()? },
            _ => return None,
        })
    }

    /// The state after a change by an operator, which follows the one before.
    pub(crate) fn changed_to(&self) -> Option<StateName> {
        match self.rest.as_slice() {
            [_, Value::BulkString(to)] if matches!(self.word.as_str(), "resolved" | "forgotten") => {
                StateName::from_name(std::str::from_utf8(to).ok()?)
            }
            _ => None,
        }
    }

    /// The record of a lookup, without its response if the lookup left it out.
    pub(crate) fn record(mut self) -> Result<Option<FoundRecord>, StoreError> {
        match self.word.as_str() {
            "absent" => Ok(None),
            "found" => {
                let mut fields = HashMap::new();
                while let Some(name) = self.rest.next() {
                    let (name, value) = bytes(name).zip(self.rest.next()).ok_or_else(unexpected_reply)?;
                    fields.insert(name, value);
                }
                FoundRecord::read(fields).ok_or_else(unreadable).map(Some)
            }
            _ => Err(unexpected_reply()),
        }
    }
}

/// A record, possibly without its response.
pub(crate) struct FoundRecord {
    pub(crate) record: Record,
    pub(crate) is_head: bool,
}

impl FoundRecord {
    fn read(fields: HashMap<Vec<u8>, Value>) -> Option<Self> {
        let mut fields = Fields(fields);
        if fields.number("version")? != u64::from(VERSION) {
            return None;
        }
        let mut is_head = false;
        let state = match fields.bytes("state")?.as_slice() {
            b"in-progress" => State::InProgress {
                attempt: AttemptId::new(u128::from_be_bytes(fields.array("attempt")?)),
                lease_until: fields.time("lease_until")?,
                after_abandoned: flag(fields.number("after_abandoned")?)?,
            },
            b"unknown" => State::Unknown,
            b"completed" => match fields.bytes("response") {
                Some(bytes) => State::Completed(RecordedResponse::Replayable(response(bytes)?)),
                None => {
                    is_head = true;
                    State::Completed(RecordedResponse::Replayable(
                        StoredResponse::new(200, &[], &[], &[]).ok()?,
                    ))
                }
            },
            b"awaited" => State::Completed(RecordedResponse::Awaited),
            b"tombstone" => State::Completed(RecordedResponse::Tombstone),
            b"released" => State::Released,
            _ => return None,
        };
        let fingerprint = fields.bytes("fingerprint")?;
        let (version, digest) = fingerprint.split_first()?;
        let fingerprint = Fingerprint::from_parts(*version, digest.try_into().ok()?)?;
        let caller = CallerTag::from_bytes(fields.array("caller")?);
        // It is for people, and other clients may write any bytes.
        let operation = fields.bytes("operation")?;
        let key = match fields.bytes("key_tag") {
            Some(tag) => Some(KeyTag::from_bytes(tag.try_into().ok()?)),
            None => None,
        };
        let label = Label::new(caller, &String::from_utf8_lossy(&operation)).with_key(key);
        let token = FencingToken::new(fields.number("token")?);
        let mut record = Record::new(fingerprint, token, state, label, fields.time("created_at")?);
        record.attempts = u32::try_from(fields.number("attempts")?).ok()?;
        record.changed_at = fields.time("changed_at")?;
        record.expires_at = fields.time("expires_at")?;
        record.by_operator = flag(fields.number("by_operator")?)?;
        if let Some(count) = fields.number("steps") {
            record.steps = (0..count)
                .map(|at| {
                    let name = fields.bytes(&format!("step:{at}"))?;
                    let result = fields.bytes(&format!("result:{at}"))?;
                    Step::new(&String::from_utf8_lossy(&name), result.into()).ok()
                })
                .collect::<Option<_>>()?;
        }
        Some(Self { record, is_head })
    }
}

/// The fields of a lookup's reply that were not read yet.
struct Fields(HashMap<Vec<u8>, Value>);

impl Fields {
    fn bytes(&mut self, name: &str) -> Option<Vec<u8>> {
        bytes(self.0.remove(name.as_bytes())?)
    }

    fn array<const N: usize>(&mut self, name: &str) -> Option<[u8; N]> {
        self.bytes(name)?.try_into().ok()
    }

    fn number(&mut self, name: &str) -> Option<u64> {
        integer(&self.0.remove(name.as_bytes())?)
    }

    fn time(&mut self, name: &str) -> Option<Timestamp> {
        self.number(name).map(Timestamp::from_millis)
    }
}

/// An entry of the audit trail: a stream's identifier and its fields.
pub(crate) fn audit_entry(entry: Value) -> Option<AuditEntry> {
    let Value::Array(parts) = entry else { return None };
    let mut parts = parts.into_iter();
    let number_digits = bytes(parts.next()?)?;
    let number = number(number_digits.split(|byte| *byte == b'-').next()?)?;
    let Value::Array(pairs) = parts.next()? else { return None };
    let mut fields = HashMap::new();
    let mut pairs = pairs.into_iter();
    while let Some(name) = pairs.next() {
        fields.insert(bytes(name)?, bytes(pairs.next()?)?);
    }
    let mut take = |name: &str| fields.remove(name.as_bytes());
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let state = |bytes: Vec<u8>| StateName::from_name(std::str::from_utf8(&bytes).ok()?);
    Some(AuditEntry {
        number,
        at: Timestamp::from_millis(self::number(&take("at")?)?),
        id: id(&take("record")?)?,
        from: state(take("state_before")?)?,
        to: state(take("state_after")?)?,
        actor: text(take("actor")?),
        reason: text(take("reason")?),
    })
}

pub(crate) fn unreadable() -> StoreError {
    StoreError::corrupt("the record in Redis cannot be read; nothing was changed")
}

/// The command may have been applied: its reply counts as lost.
pub(crate) fn unexpected_reply() -> StoreError {
    StoreError::unavailable("Redis: the server's reply is not one of the contract")
}

pub(crate) fn bytes(value: Value) -> Option<Vec<u8>> {
    match value {
        Value::BulkString(bytes) => Some(bytes),
        Value::SimpleString(text) => Some(text.into_bytes()),
        _ => None,
    }
}

pub(crate) fn number(digits: &[u8]) -> Option<u64> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

fn integer(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}

const fn flag(number: u64) -> Option<bool> {
    match number {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}

fn response(bytes: Vec<u8>) -> Option<StoredResponse> {
    StoredResponse::decode(Bytes::from(bytes))
}

/// Reads 32 bytes in hexadecimal digits.
fn id(digits: &[u8]) -> Option<RecordId> {
    RecordId::from_hex(std::str::from_utf8(digits).ok()?)
}
