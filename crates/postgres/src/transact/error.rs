//! Errors of transactions: refused, rolled back, or with an unknown outcome.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use oncegate_core::{FencingToken, KeyError, RecordId, ResponseError, StoreError};
use sqlx::postgres::{PgDatabaseError, PgSeverity};

type Boxed = Box<dyn StdError + Send + Sync>;

/// An error of a run. `?` converts every error into it: those of sqlx, your own, and plain text.
///
/// A run that ends with it is rolled back, as if it had not happened. If a retry has to get the same result, for example a
/// declined card, return a value in `Ok` instead.
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

    /// Returns `true` if the same transaction may be run again: serialization failure or deadlock.
    pub(crate) fn is_conflict(&self) -> bool {
        is_conflict_in(&*self.0)
    }
}

/// Tells if an error of a run is a serialization failure (SQLSTATE 40001) or a deadlock (40P01), after which the same
/// transaction may be run again. It searches the chain of sources.
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

/// Returns `true` if the connection or the server ended. It searches the chain of sources.
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

/// Returns `true` if the same transaction may be run again.
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

/// Tells if a COMMIT with this error has certainly been rolled back. After any other error it may have been committed: a lost
/// connection, a server that shuts down, a pooler that lost its server.
#[must_use]
pub fn is_rolled_back(error: &sqlx::Error) -> bool {
    let Some(error) = error.as_database_error().and_then(|error| error.try_downcast_ref::<PgDatabaseError>())
    else {
        return false;
    };
    match error.code().get(..2) {
        // The server itself does not know.
        _ if error.code() == "40003" => false,
        Some("22" | "23" | "25" | "2D" | "40" | "42" | "OG" | "P0") => true,
        // Codes of poolers and servers about connections, their end, and the server itself.
        Some("08" | "53" | "57" | "58" | "F0" | "HV" | "XX") | None => false,
        // Deferred triggers may raise any code. PostgreSQL answers COMMIT with an error only before the commit.
        Some(_) => error.severity() == PgSeverity::Error,
    }
}

/// An error of [`Transactor::transact`](crate::Transactor::transact).
///
/// Except for [`CommitUnknown`](Self::CommitUnknown), this call committed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransactError {
    /// The key is empty or too long.
    #[error("the key cannot be used")]
    Key(#[source] KeyError),
    /// Another transaction or another attempt works on the key. Try again with the same key.
    #[error("the same operation is in progress")]
    InProgress {
        /// The rest of its lease; zero if it is an open transaction.
        lease_left: Duration,
    },
    /// The key was used with another input.
    #[error("the key was used with another input")]
    Mismatch,
    /// The outcome is not known: an earlier attempt, not one of `transact`, was abandoned, or a run committed its transaction
    /// itself. An operator has to decide.
    #[error(
        "the outcome of record {record} is not known; an operator has to decide (`oncegate keys resolve`)"
    )]
    Unknown {
        /// The record.
        record: RecordId,
    },
    /// The operation was completed before, without a result to return again.
    #[error("the operation of record {record} was completed, and its result is not stored")]
    Unreplayable {
        /// The record.
        record: RecordId,
    },
    /// The operation was completed before, and its stored result cannot be read as this type. It is never run again.
    #[error("the result of record {record} cannot be read: {reason}")]
    Undecodable {
        /// The record.
        record: RecordId,
        /// The mismatch, without the value.
        reason: String,
    },
    /// The operation was completed before, and its sealed result cannot be opened: the key is missing, the result is not sealed
    /// although it must be ([`StoreErrorKind::Sealed`](oncegate_core::StoreErrorKind::Sealed)), or it was changed or moved
    /// ([`StoreErrorKind::Corrupt`](oncegate_core::StoreErrorKind::Corrupt)). It is never run again.
    #[error("the result of record {record} cannot be opened")]
    Sealed {
        /// The record.
        record: RecordId,
        /// The reason. It names the missing key.
        source: StoreError,
    },
    /// The run returned this error. It was rolled back, and the key is free.
    #[error("the run failed, and the transaction was rolled back")]
    Failed(#[source] Box<dyn StdError + Send + Sync>),
    /// The run ended the transaction itself, or another attempt owns the record. Nothing more was committed. If the run
    /// committed, the outcome in its record is unknown.
    #[error(
        "this attempt no longer owns record {record}; nothing more was committed, unless the run itself ended the transaction \
         before"
    )]
    Fenced {
        /// The record.
        record: RecordId,
    },
    /// The reply to COMMIT was lost, and its outcome could not be found out in time. The same call with the same key finds it
    /// out, within the retention.
    #[error(
        "the outcome of COMMIT for attempt {token} of record {record} could not be found out in time; the same call finds it \
         out"
    )]
    CommitUnknown {
        /// The record.
        record: RecordId,
        /// The token of the attempt that may have committed.
        token: FencingToken,
    },
    /// The input or the value cannot be written as JSON.
    #[error("the input or the result cannot be written as JSON")]
    Unserializable(#[source] serde_json::Error),
    /// The value is too large to be stored.
    #[error("the result cannot be stored, and the transaction was rolled back")]
    TooLarge(#[source] ResponseError),
    /// The database is unavailable or refuses, or no connection is free.
    #[error("the store did not carry out the transaction")]
    Store(#[source] StoreError),
}
