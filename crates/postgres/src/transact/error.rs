//! Why a transaction did not take place, or is not known to have.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use oncegate_core::{FencingToken, RecordId, ResponseError, StoreError};
use sqlx::postgres::{PgDatabaseError, PgSeverity};

type Boxed = Box<dyn StdError + Send + Sync>;

/// Why a run was not finished. Every error becomes one by `?`: of sqlx, of yours, or a plain text.
///
/// A run that ends with one is rolled back as if it had not been. What is to be remembered, such as that a card was declined,
/// is no error but a value: return it in `Ok`.
pub struct RunError(Boxed);

impl<E: Into<Boxed>> From<E> for RunError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl fmt::Debug for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl RunError {
    pub(crate) fn into_boxed(self) -> Boxed {
        self.0
    }

    /// Whether the database says that the same transaction may be run again: serialization failure, deadlock.
    pub(crate) fn is_conflict(&self) -> bool {
        is_conflict_in(&*self.0)
    }
}

/// Whether an error of a run is one by which the database says that the same transaction may be run again: a serialization
/// failure (SQLSTATE 40001) or a deadlock (40P01). It is looked for behind whatever it was made into.
#[must_use]
pub fn is_conflict_in(error: &(dyn StdError + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let code = match (error.downcast_ref::<sqlx::Error>(), error.downcast_ref::<PgDatabaseError>()) {
            (Some(sqlx), _) => return is_conflict(sqlx),
            (_, Some(database)) => Some(database.code()),
            _ => error
                .downcast_ref::<Box<dyn sqlx::error::DatabaseError>>()
                .and_then(|database| database.try_downcast_ref::<PgDatabaseError>())
                .map(PgDatabaseError::code),
        };
        if let Some(code) = code {
            return is_conflict_code(code);
        }
        next = error.source();
    }
    false
}

/// Whether an error of a run says that its connection ended, or the server with it. It is looked for behind whatever it was
/// made into.
#[must_use]
pub fn is_lost_in(error: &(dyn StdError + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(sqlx) = error.downcast_ref::<sqlx::Error>() {
            return crate::error::is_lost(sqlx) && !is_conflict(sqlx);
        }
        next = error.source();
    }
    false
}

/// Whether the database says that the same transaction may be run again.
#[must_use]
pub fn is_conflict(error: &sqlx::Error) -> bool {
    sqlstate(error).is_some_and(|code| is_conflict_code(&code))
}

fn is_conflict_code(code: &str) -> bool {
    matches!(code, "40001" | "40P01")
}

pub(crate) fn sqlstate(error: &sqlx::Error) -> Option<String> {
    Some(error.as_database_error()?.code()?.into_owned())
}

/// Whether a COMMIT that was answered so has certainly been rolled back. Everything else may have been committed: a connection
/// that ended, a server that shuts down, a pooler that lost its server.
#[must_use]
pub fn is_rolled_back(error: &sqlx::Error) -> bool {
    let Some(error) = error.as_database_error().and_then(|error| error.try_downcast_ref::<PgDatabaseError>())
    else {
        return false;
    };
    match error.code().get(..2) {
        // It says itself that it does not know.
        _ if error.code() == "40003" => false,
        Some("22" | "23" | "25" | "2D" | "40" | "42" | "OG" | "P0") => true,
        // What poolers and servers say of connections, of their end and of themselves.
        Some("08" | "53" | "57" | "58" | "F0" | "HV" | "XX") | None => false,
        // Triggers that were put off raise what they like. PostgreSQL answers a COMMIT by an error only in front of it.
        Some(_) => error.severity() == PgSeverity::Error,
    }
}

/// Why [`Transactor::transact`](crate::Transactor::transact) has no value to give.
///
/// But for [`CommitUnknown`](Self::CommitUnknown), nothing was committed by this call.
#[derive(Debug)]
#[non_exhaustive]
pub enum TransactError {
    /// Another transaction, or another attempt, is at it. Try again with the same key.
    InProgress {
        /// What is left of its lease; zero where it is a transaction that is still open.
        lease_left: Duration,
    },
    /// The key was used with another input.
    Mismatch,
    /// An earlier attempt, not one of `transact`, was abandoned, or a run had committed its transaction itself: whether the
    /// effect took place is not known. An operator has to say.
    Unknown {
        /// Which record.
        record: RecordId,
    },
    /// Done before, without a result that could be given again.
    Unreplayable {
        /// Which record.
        record: RecordId,
    },
    /// Done before, and what is stored cannot be read as this type any more. It is never run again.
    Undecodable {
        /// Which record.
        record: RecordId,
        /// What does not fit. Shows nothing of the value.
        reason: String,
    },
    /// The run ended with this error; it was rolled back and the key is free.
    Failed(Box<dyn StdError + Send + Sync>),
    /// The run ended the transaction itself, or somebody else owns the record by now; nothing more was committed. Where the run
    /// committed, its record is unknown from now on.
    Fenced {
        /// Which record.
        record: RecordId,
    },
    /// COMMIT was sent, its answer was lost, and what came of it could not be found out in time. The same call with the same
    /// key finds it out, within the retention.
    CommitUnknown {
        /// Which record.
        record: RecordId,
        /// Of the attempt that may have committed.
        token: FencingToken,
    },
    /// The input or the value cannot be written as JSON.
    Unserializable(serde_json::Error),
    /// The value is too large to be kept.
    TooLarge(ResponseError),
    /// The database is out of reach, refuses, or has no connection free.
    Store(StoreError),
}

impl fmt::Display for TransactError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InProgress { .. } => f.write_str("the same operation is in progress"),
            Self::Mismatch => f.write_str("the key was used with another input"),
            Self::Unknown { record } => {
                write!(
                    f,
                    "whether the operation of record {record} took place is not known; an operator has to say"
                )
            }
            Self::Unreplayable { record } => {
                write!(f, "the operation of record {record} took place, and its result is not kept")
            }
            Self::Undecodable { record, reason } => {
                write!(f, "the result of record {record} cannot be read: {reason}")
            }
            Self::Failed(_) => f.write_str("the transaction was rolled back"),
            Self::Fenced { record } => write!(
                f,
                "record {record} is not this attempt's any more; nothing more was committed, but the run may have committed \
                 before, if it ended the transaction itself"
            ),
            Self::CommitUnknown { record, token } => write!(
                f,
                "whether attempt {token} of record {record} was committed could not be found out in time; the same call \
                 finds it out"
            ),
            Self::Unserializable(_) => f.write_str("the input or the result cannot be written as JSON"),
            Self::TooLarge(_) => {
                f.write_str("the result cannot be kept, and the transaction was rolled back")
            }
            Self::Store(_) => f.write_str("the store did not carry out the transaction"),
        }
    }
}

impl StdError for TransactError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Unserializable(error) => Some(error),
            Self::Failed(error) => Some(&**error),
            Self::TooLarge(error) => Some(error),
            Self::Store(error) => Some(error),
            _ => None,
        }
    }
}
