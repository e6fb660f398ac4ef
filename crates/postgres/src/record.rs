//! Conversions between rows of the contract and types of the core.

use std::time::Duration;

use bytes::Bytes;
use oncegate_core::{
    AttemptId, AuditEntry, CallerTag, Completion, FencingToken, Fingerprint, Grant, KeyTag, Label,
    OnAbandoned, Outcome, Record, RecordId, RecordedResponse, State, StateName, Step, StoreError,
    StoredResponse, Timestamp, limits,
};
use sqlx::postgres::PgRow;
use sqlx::{Decode, Postgres, Row as _, Type};

use crate::call::Arg;
use crate::error::store_error;

/// The result of a function, read from its row.
pub(crate) enum Reply {
    Outcome(Outcome),
    /// Another open transaction holds the record.
    Locked,
    /// The replies before it in its batch reached their limit. Nothing was done.
    Later,
    /// There is a response that is too large to be sent together with others.
    Large,
}

/// Reads a column that may be null.
pub(crate) fn optional<'r, T>(row: &'r PgRow, column: &str) -> Result<Option<T>, StoreError>
where
    T: Decode<'r, Postgres> + Type<Postgres>,
{
    row.try_get(column).map_err(|error| store_error(&error))
}

/// Reads a column that must not be null.
pub(crate) fn column<'r, T>(row: &'r PgRow, column: &str) -> Result<T, StoreError>
where
    T: Decode<'r, Postgres> + Type<Postgres>,
{
    optional(row, column)?.ok_or_else(unexpected_reply)
}

pub(crate) fn unexpected_reply() -> StoreError {
    StoreError::invalid("the reply of PostgreSQL is not one of the contract")
}

/// Names the column, but not its content.
fn corrupt(column: &str) -> StoreError {
    StoreError::corrupt(format!(
        "the record in PostgreSQL is damaged, or was written by a newer program: its {column} cannot be read"
    ))
}

pub(crate) fn number(row: &PgRow, name: &str) -> Result<u64, StoreError> {
    u64::try_from(column::<i64>(row, name)?).map_err(|_| corrupt(name))
}

fn time(row: &PgRow, name: &str) -> Result<Timestamp, StoreError> {
    number(row, name).map(Timestamp::from_millis)
}

fn bytes<const N: usize>(row: &PgRow, name: &str) -> Result<[u8; N], StoreError> {
    column::<Vec<u8>>(row, name)?.try_into().map_err(|_| corrupt(name))
}

fn response(row: &PgRow) -> Result<StoredResponse, StoreError> {
    decode(column::<Vec<u8>>(row, "response")?)
}

fn decode(bytes: Vec<u8>) -> Result<StoredResponse, StoreError> {
    StoredResponse::decode(Bytes::from(bytes)).ok_or_else(|| corrupt("response"))
}

/// Reads a row by the word in `outcome`.
pub(crate) fn reply(row: &PgRow) -> Result<Reply, StoreError> {
    let outcome = match column::<&str>(row, "outcome")? {
        "execute" => Outcome::Execute(Grant {
            token: FencingToken::new(number(row, "token")?),
            attempts: u32::try_from(number(row, "attempts")?).unwrap_or(u32::MAX),
            lease_until: time(row, "lease_until")?,
            after_abandoned: column(row, "after_abandoned")?,
        }),
        "replay" => match optional::<Vec<u8>>(row, "response")? {
            Some(bytes) => Outcome::Replay(decode(bytes)?),
            None => return Ok(Reply::Large),
        },
        "in-progress" => {
            Outcome::InProgress { lease_left: Duration::from_millis(number(row, "lease_left_ms")?) }
        }
        "mismatch" => Outcome::Mismatch,
        "unknown" => Outcome::Unknown,
        "unreplayable" => Outcome::Unreplayable,
        "renewed" => Outcome::Renewed { lease_until: time(row, "lease_until")? },
        "recorded" => Outcome::StepRecorded,
        "differs" => Outcome::StepDiffers,
        "full" => Outcome::StepsFull,
        "completed" => Outcome::Completed,
        "released" => Outcome::Released,
        "fenced" => Outcome::Fenced,
        "resolved" => Outcome::Resolved { from: state_before(row)?.ok_or_else(unexpected_reply)? },
        "not-resolvable" => Outcome::NotResolvable { state: state_before(row)? },
        "rewritten" => Outcome::Rewritten,
        "not-rewritten" => Outcome::NotRewritten { state: state_before(row)? },
        "forgotten" => Outcome::Forgotten { from: state_before(row)?.ok_or_else(unexpected_reply)? },
        "not-forgotten" => Outcome::NotForgotten { state: state_before(row)? },
        "locked" => return Ok(Reply::Locked),
        "later" => return Ok(Reply::Later),
        _ => return Err(unexpected_reply()),
    };
    Ok(Reply::Outcome(outcome))
}

fn state_before(row: &PgRow) -> Result<Option<StateName>, StoreError> {
    optional::<&str>(row, "state_before")?
        .map(|name| StateName::from_name(name).ok_or_else(unexpected_reply))
        .transpose()
}

/// A record: a row of `lookup` or `list`.
pub(crate) fn record(row: &PgRow) -> Result<Record, StoreError> {
    let state = match column::<&str>(row, "state")? {
        "in-progress" => State::InProgress {
            attempt: AttemptId::new(u128::from_be_bytes(bytes(row, "attempt")?)),
            lease_until: time(row, "lease_until")?,
            after_abandoned: column(row, "after_abandoned")?,
        },
        "unknown" => State::Unknown,
        "completed" => State::Completed(RecordedResponse::Replayable(response(row)?)),
        "awaited" => State::Completed(RecordedResponse::Awaited),
        "tombstone" => State::Completed(RecordedResponse::Tombstone),
        "released" => State::Released,
        _ => return Err(corrupt("state")),
    };
    let [version, digest @ ..] = bytes::<33>(row, "fingerprint")?;
    let label = Label::new(CallerTag::from_bytes(bytes(row, "caller")?), column(row, "operation")?);
    let fingerprint = Fingerprint::from_parts(version, digest).ok_or_else(|| corrupt("fingerprint"))?;
    let token = FencingToken::new(number(row, "token")?);
    let mut record = Record::new(fingerprint, token, state, label, time(row, "created_at")?);
    record.attempts = u32::try_from(number(row, "attempts")?).unwrap_or(u32::MAX);
    record.changed_at = time(row, "changed_at")?;
    record.expires_at = time(row, "expires_at")?;
    record.by_operator = column(row, "by_operator")?;
    let key = optional::<Vec<u8>>(row, "key_tag")?.map(|tag| tag.try_into().map_err(|_| corrupt("key_tag")));
    record.label = record.label.with_key(key.transpose()?.map(KeyTag::from_bytes));
    if let Some(names) = optional::<Vec<String>>(row, "step_names")? {
        let results = column::<Vec<Vec<u8>>>(row, "step_results")?;
        if names.len() != results.len() {
            return Err(corrupt("step_results"));
        }
        let step = |(name, result): (String, Vec<u8>)| {
            Step::new(&name, result.into()).map_err(|_| corrupt("step_names"))
        };
        record.steps = names.into_iter().zip(results).map(step).collect::<Result<_, _>>()?;
    }
    Ok(record)
}

pub(crate) fn record_id(row: &PgRow) -> Result<RecordId, StoreError> {
    bytes(row, "id").map(RecordId::from_bytes)
}

pub(crate) fn audit_entry(row: &PgRow) -> Result<AuditEntry, StoreError> {
    let state = |name| {
        column::<&str>(row, name).and_then(|name| StateName::from_name(name).ok_or_else(unexpected_reply))
    };
    Ok(AuditEntry {
        number: number(row, "number")?,
        at: time(row, "at")?,
        id: record_id(row)?,
        from: state("state_before")?,
        to: state("state_after")?,
        actor: column(row, "actor")?,
        reason: column(row, "reason")?,
    })
}

/// The tag of the caller as an argument.
pub(crate) fn caller(label: &Label) -> Arg {
    Arg::Bytes(label.caller().as_bytes().to_vec().into())
}

/// The tag of the key as an argument.
pub(crate) fn key_tag(label: &Label) -> Arg {
    label.key().map_or(Arg::NoBytes, |tag| Arg::Bytes(tag.as_bytes().to_vec().into()))
}

pub(crate) const fn on_abandoned(policy: OnAbandoned) -> Option<&'static str> {
    match policy {
        OnAbandoned::Park => Some("park"),
        OnAbandoned::Reexecute => Some("reexecute"),
        OnAbandoned::Reconcile => Some("reconcile"),
        _ => None,
    }
}

/// Returns the state of a completed record, and its response.
pub(crate) const fn end(completion: &Completion) -> Option<(&'static str, Option<&StoredResponse>)> {
    match completion {
        Completion::Replayable(response) => Some(("completed", Some(response))),
        Completion::Awaited => Some(("awaited", None)),
        Completion::Tombstone => Some(("tombstone", None)),
        Completion::Unknown => Some(("unknown", None)),
        _ => None,
    }
}

/// Whole milliseconds, rounded up as [`Timestamp::after`] does.
pub(crate) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(i64::MAX)
}

pub(crate) fn fingerprint(fingerprint: &Fingerprint) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(33);
    bytes.push(fingerprint.version());
    bytes.extend_from_slice(fingerprint.digest());
    bytes
}

/// Converts text for a column: PostgreSQL cannot store NUL, and the length is bounded. Such text is for people only.
pub(crate) fn text(text: &str, max: usize) -> String {
    let text = text.replace('\0', "\u{2400}");
    let end = text.floor_char_boundary(max);
    text.get(..end).unwrap_or_default().to_owned()
}

pub(crate) fn operation(label: &Label) -> String {
    text(label.operation(), limits::MAX_OPERATION_BYTES)
}
