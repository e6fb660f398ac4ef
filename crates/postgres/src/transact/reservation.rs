//! The way that most calls of `transact` take: nothing is written before the run, and the record once, after it.

use std::time::Duration;

use oncegate_core::{FencingToken, StoredResponse};
use sqlx::Row as _;
use sqlx::postgres::{PgConnection, PgRow};

use super::Request;
use crate::call::{Arg, Call};
use crate::record;

/// The right to insert a record, which nobody else has until the transaction with this number ends.
#[derive(Clone, Copy)]
pub(crate) struct Reservation(i64);

/// What came of a completion.
pub(crate) enum CompletionResult {
    /// Under this token, if the transaction commits.
    Completed(FencingToken),
    /// The run had committed its transaction itself. The record is unknown now, if this is committed.
    Unknown,
}

impl Reservation {
    /// The right that `oncegate.reserve_or_claim` gave. `None` where there is a record, or where somebody else is at it: then
    /// the rest of the row is what a claim said.
    pub(crate) fn of(row: &PgRow) -> Result<Option<Self>, sqlx::Error> {
        Ok(row.try_get::<Option<i64>, _>("transaction")?.map(Self))
    }

    /// Inserts the completed record. The server raises where it must not be, so that nothing can be committed after it.
    pub(crate) async fn complete(
        self,
        connection: &mut PgConnection,
        request: &Request,
        response: &StoredResponse,
        retention: Duration,
        persistent: bool,
    ) -> Result<CompletionResult, sqlx::Error> {
        let args = [
            Arg::Octets(request.record.as_bytes().to_vec().into()),
            Arg::Big(self.0),
            Arg::Octets(record::fingerprint(&request.fingerprint).into()),
            Arg::Octets(response.as_encoded().clone()),
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
