//! The common path of `transact`: nothing is written before the run, and the record once, after it.

use std::time::Duration;

use oncegate_core::{FencingToken, StoredResponse};
use sqlx::Row as _;
use sqlx::postgres::{PgConnection, PgRow};

use super::Request;
use crate::call::{Arg, Call};
use crate::record;

/// The right to insert a record, which no other transaction has until the transaction with this number ends.
#[derive(Clone, Copy)]
pub(crate) struct Reservation(i64);

/// The result of a completion.
pub(crate) enum CompletionResult {
    /// The record is completed under this token, if the transaction commits.
    Completed(FencingToken),
    /// The run committed its transaction itself. If this is committed, the outcome in the record is unknown.
    Unknown,
}

impl Reservation {
    /// Reads the right from a row of `oncegate.reserve_or_claim`. `None` if there is a record, or another transaction is about
    /// to insert it: the rest of the row is the result of a claim.
    pub(crate) fn of(row: &PgRow) -> Result<Option<Self>, sqlx::Error> {
        Ok(row.try_get::<Option<i64>, _>("transaction")?.map(Self))
    }

    /// Inserts the completed record. If it must not be inserted, the server raises, so that no later COMMIT can succeed.
    pub(crate) async fn complete(
        self,
        connection: &mut PgConnection,
        request: &Request,
        response: &StoredResponse,
        retention: Duration,
        persistent: bool,
    ) -> Result<CompletionResult, sqlx::Error> {
        let args = [
            Arg::Bytes(request.record.as_bytes().to_vec().into()),
            Arg::Big(self.0),
            Arg::Bytes(record::fingerprint(&request.fingerprint).into()),
            Arg::Bytes(response.as_encoded().clone()),
            Arg::Big(record::millis(retention)),
            record::caller(&request.label),
            Arg::Text(record::operation(&request.label)),
            record::key_tag(&request.label),
        ];
        let call = Call::new("SELECT oncegate.complete_reserved($1, $2, $3, $4, $5, $6, $7, $8)", args);
        let rows = call.in_transaction(connection, persistent).await?;
        let token: Option<i64> = rows.first().ok_or(sqlx::Error::RowNotFound)?.try_get(0)?;
        Ok(token.map_or(CompletionResult::Unknown, |token| {
            CompletionResult::Completed(FencingToken::new(token.unsigned_abs()))
        }))
    }
}
