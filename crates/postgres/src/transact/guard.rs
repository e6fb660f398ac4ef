//! The right to complete a record in a transaction that the application keeps itself.

use std::fmt;

use oncegate_core::{ConfigError, FencingToken, KeyError, RecordId, StoreError, StoredResponse, limits};
use oncegate_seal::{SealKeys, seal_owners_response};
use serde::Serialize;
use sqlx::postgres::PgConnection;
use std::time::Duration;

use super::error::sqlstate;
use super::json;
use crate::call::{Arg, Call};
use crate::error::store_error;

/// The right to execute once, in your own transaction.
///
/// It comes from [`Transactor::claim`](crate::Transactor::claim), or stands for an attempt that another party claimed: the
/// sidecar in front of the service ([`Guard::from_headers`]) or the layer inside it ([`Guard::of_attempt`]).
/// [`complete`](Self::complete) consumes it. A dropped guard does nothing: a claim of this transaction is rolled back with it,
/// and a claim of another party still stands.
#[must_use = "a guard that is not completed leaves its record in progress"]
pub struct Guard {
    record: RecordId,
    token: FencingToken,
    /// `None`: the retention of the claim, which another party made.
    retention: Option<Duration>,
    persistent: bool,
    /// `None`: the response is stored in clear.
    keys: Option<SealKeys>,
}

/// The result of a claim in your own transaction.
#[derive(Debug)]
#[must_use = "only `Execute` may execute"]
#[non_exhaustive]
pub enum GuardClaim {
    /// Execute in this transaction, complete the guard, commit.
    Execute(Guard),
    /// The operation was completed before; this is its response.
    Replay(StoredResponse),
    /// Another transaction or another attempt works on the key.
    InProgress {
        /// The rest of its lease; zero if it is an open transaction.
        lease_left: Duration,
    },
    /// The key was used with another input.
    Mismatch,
    /// The outcome of the operation is not known.
    Unknown,
    /// The operation was completed before, without a response to replay.
    Unreplayable,
}

/// An error of completing a record. The transaction has failed: roll back, or commit nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuardError {
    /// The key is empty or too long.
    #[error("the key cannot be used")]
    Key(#[source] KeyError),
    /// Another attempt owns the record, or its outcome is settled. The effect must not take place.
    #[error("the attempt no longer owns its record, so its effect must not take place")]
    Fenced,
    /// Another open transaction held the record for a quarter of a second.
    #[error("another transaction holds the record")]
    Locked,
    /// The snapshot of the transaction is older than the record (`REPEATABLE READ`, `SERIALIZABLE`): run the transaction again.
    #[error("the transaction's snapshot is older than the record; run it again")]
    Conflict,
    /// The operation was completed before, and its sealed response cannot be opened; the source names the missing key. It must
    /// not be executed again.
    #[error("the stored response cannot be opened")]
    Sealed(#[source] StoreError),
    /// The response cannot be stored.
    #[error("the input or the response cannot be stored")]
    Response(#[source] StoreError),
    /// The database is unavailable, or refuses. It also refuses after an earlier statement failed and its error was ignored.
    #[error("the store did not complete the record")]
    Store(#[source] StoreError),
}

/// Header fields that a sidecar did not write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GuardHeaderError {
    /// `Oncegate-Record` is not 64 hexadecimal digits.
    #[error("Oncegate-Record must be 64 hexadecimal digits")]
    Record,
    /// `Oncegate-Token` is not a number from 0 to 2^63 − 1 in decimal digits.
    #[error("Oncegate-Token must be a decimal number")]
    Token,
}

impl Guard {
    pub(crate) const fn new(
        record: RecordId,
        token: FencingToken,
        retention: Option<Duration>,
        persistent: bool,
    ) -> Self {
        Self { record, token, retention, persistent, keys: None }
    }

    /// Creates the guard of an attempt that the layer in this process claimed: `attempt.record_id()` and `attempt.token()` of
    /// its context.
    ///
    /// Complete it [without a response](Self::complete_without_response): the layer adds the one that it sees.
    pub const fn of_attempt(record: RecordId, token: FencingToken) -> Self {
        Self::new(record, token, None, true)
    }

    /// Creates the guard of an attempt that the sidecar claimed, from the header fields `Oncegate-Record` and `Oncegate-Token`.
    ///
    /// The sidecar removes these fields from requests of clients. If clients can reach the service past the sidecar, do not
    /// trust them.
    ///
    /// ```
    /// use oncegate_postgres::{Guard, GuardHeaderError};
    ///
    /// let record = "0b5a".repeat(16);
    /// let guard = Guard::from_headers(&record, "1767225600000")?;
    /// assert_eq!(guard.token().get(), 1_767_225_600_000);
    /// assert_eq!(Guard::from_headers(&record, "-1").unwrap_err(), GuardHeaderError::Token);
    /// # Ok::<(), GuardHeaderError>(())
    /// ```
    ///
    /// # Errors
    /// [`GuardHeaderError`] if a sidecar did not write them.
    pub fn from_headers(record: impl AsRef<[u8]>, token: impl AsRef<[u8]>) -> Result<Self, GuardHeaderError> {
        let record = std::str::from_utf8(record.as_ref()).ok().and_then(RecordId::from_hex);
        let record = record.ok_or(GuardHeaderError::Record)?;
        let digits = std::str::from_utf8(token.as_ref()).ok().filter(|token| {
            // `parse` accepts a sign, too.
            token.bytes().all(|byte| byte.is_ascii_digit())
        });
        let token = digits.and_then(|digits| digits.parse::<i64>().ok()).ok_or(GuardHeaderError::Token)?;
        Ok(Self::of_attempt(record, FencingToken::new(token.unsigned_abs())))
    }

    /// Sets the retention of the completed record, within the bounds of [`limits`]. Default: the retention of the claim.
    ///
    /// # Errors
    /// If the retention is out of bounds.
    pub fn with_retention(self, retention: Duration) -> Result<Self, ConfigError> {
        let retention =
            ConfigError::check("the retention", retention, limits::MIN_RETENTION..=limits::MAX_RETENTION)?;
        Ok(Self { retention: Some(retention), ..self })
    }

    /// Set it if the connection goes through a pooler that gives each transaction another session: no statement is prepared by
    /// name.
    pub fn with_transaction_pooler(self, through_pooler: bool) -> Self {
        Self { persistent: !through_pooler, ..self }
    }

    /// Seals the response with the first of these keys, as a [`SealedStore`](oncegate_seal::SealedStore) does. The sidecar or the
    /// layer that claimed the record needs the key, too, or it refuses retries.
    ///
    /// A guard that [`Transactor::claim`](crate::Transactor::claim) returns has the keys of the transactor. Default otherwise:
    /// the response is stored in clear.
    pub fn with_seal_keys(self, keys: impl Into<SealKeys>) -> Self {
        Self { keys: Some(keys.into()), ..self }
    }

    /// The record that is completed.
    #[must_use]
    pub const fn record_id(&self) -> RecordId {
        self.record
    }

    /// The token to show to a resource that refuses stale owners.
    #[must_use]
    pub const fn token(&self) -> FencingToken {
        self.token
    }

    /// Derives the key for a call of another API on behalf of this record; see [`RecordId::downstream_key`].
    #[must_use]
    pub fn downstream_key(&self, step: &str) -> String {
        self.record.downstream_key(step)
    }

    /// Completes the record in this transaction with the response that retries get. Call it last, before `COMMIT`.
    ///
    /// Do not call it inside of a savepoint: if the savepoint is rolled back, so is the completion or its refusal, and the
    /// rest is committed.
    ///
    /// # Errors
    /// [`GuardError`]. The transaction has failed then, so a later `COMMIT` commits nothing. After [`GuardError::Response`],
    /// nothing was sent to the database, so roll back.
    pub async fn complete(
        self,
        connection: &mut PgConnection,
        response: &StoredResponse,
    ) -> Result<(), GuardError> {
        self.end(connection, Some(response)).await
    }

    /// Completes the record with a value as JSON, as [`Transactor::transact`](crate::Transactor::transact) does.
    ///
    /// # Errors
    /// As [`Guard::complete`]; [`GuardError::Response`] if the value cannot be stored. Nothing was sent to the database then,
    /// so roll back.
    pub async fn complete_json<T: Serialize>(
        self,
        connection: &mut PgConnection,
        value: &T,
    ) -> Result<(), GuardError> {
        let response = json::encode(value).map_err(|error| GuardError::Response(error.into()))?;
        self.end(connection, Some(&response)).await
    }

    /// Completes the record without a response.
    ///
    /// The sidecar or the layer that claimed it adds the response that it sees, once. Until then a retry is told that there is
    /// no response, and is never executed.
    ///
    /// # Errors
    /// As [`Guard::complete`].
    pub async fn complete_without_response(self, connection: &mut PgConnection) -> Result<(), GuardError> {
        self.end(connection, None).await
    }

    async fn end(
        self,
        connection: &mut PgConnection,
        response: Option<&StoredResponse>,
    ) -> Result<(), GuardError> {
        let sealed = match (response, &self.keys) {
            (Some(response), Some(keys)) => {
                let sealed = seal_owners_response(self.record, self.token, response, &keys.get());
                Some(sealed.map_err(|error| GuardError::Response(error.into()))?)
            }
            (response, _) => response.cloned(),
        };
        let ended = self.try_end(connection, sealed.as_ref()).await;
        ended.map_err(|error| match sqlstate(&error).as_deref() {
            Some("OG001") => GuardError::Fenced,
            Some("OG002") => GuardError::Locked,
            Some("40001" | "40P01") => GuardError::Conflict,
            Some("25P02") => GuardError::Store(StoreError::invalid(
                "a statement of the transaction failed before, and its error was ignored",
            )),
            _ => GuardError::Store(store_error(&error)),
        })
    }

    /// Calls `oncegate.complete` with the response as it is. It raises if another attempt owns the record, so that no later
    /// COMMIT can succeed.
    pub(crate) async fn try_end(
        self,
        connection: &mut PgConnection,
        response: Option<&StoredResponse>,
    ) -> Result<(), sqlx::Error> {
        let args = [
            Arg::Bytes(self.record.as_bytes().to_vec().into()),
            Arg::Big(i64::try_from(self.token.get()).unwrap_or(-1)),
            response.map_or(Arg::NoBytes, |response| Arg::Bytes(response.as_encoded().clone())),
            self.retention.map_or(Arg::NoBig, |retention| Arg::Big(crate::record::millis(retention))),
        ];
        let call = Call::new("SELECT oncegate.complete($1, $2, $3, $4)", args);
        call.in_transaction(connection, self.persistent).await.map(drop)
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("record", &self.record)
            .field("token", &self.token.get())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_fields_of_a_sidecar_are_accepted() {
        let record = "a5".repeat(32);
        let guard = Guard::from_headers(&record, "9223372036854775807").unwrap();
        assert_eq!(
            (guard.record_id().to_string(), guard.token().get()),
            (record.clone(), i64::MAX.unsigned_abs())
        );
        for token in ["", "+1", "-1", " 1", "1 ", "0x1", "9223372036854775808", "1,1", "\u{661}"] {
            assert_eq!(Guard::from_headers(&record, token).unwrap_err(), GuardHeaderError::Token, "{token}");
        }
        for record in ["", "a5", &"g5".repeat(32), &"a5".repeat(33), &format!(" {record}")] {
            assert_eq!(Guard::from_headers(record, "1").unwrap_err(), GuardHeaderError::Record, "{record}");
        }
        assert_eq!(Guard::from_headers([0xff; 64], "1").unwrap_err(), GuardHeaderError::Record);
    }
}
