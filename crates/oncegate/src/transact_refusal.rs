//! The HTTP response for an error of a transaction. It is here because the PostgreSQL crate knows no HTTP, and the HTTP crate
//! names no store.

use std::sync::Arc;

use axum_core::body::Body;
use axum_core::response::{IntoResponse, Response};
use oncegate_core::StoreErrorKind;
use oncegate_http::{Condition, Refusal, Settings};
use oncegate_postgres::TransactError;
use oncegate_postgres::transaction::is_lost_in;

/// A [`TransactError`] as an HTTP response: a problem document that tells the client how to retry.
///
/// | error | status | `retry` |
/// |---|---|---|
/// | [`Key`](TransactError::Key) | 400 `key-invalid` | `fix-request` |
/// | [`InProgress`](TransactError::InProgress) | 409 `request-in-progress` | `same-key` |
/// | [`Mismatch`](TransactError::Mismatch) | 422 `key-reused` | `new-key` |
/// | [`Unreplayable`](TransactError::Unreplayable) | 422 `replay-unavailable` | `stop` |
/// | [`Undecodable`](TransactError::Undecodable) | 422 `replay-unavailable` | `stop` |
/// | [`Unknown`](TransactError::Unknown), [`Fenced`](TransactError::Fenced) | 500 `outcome-unknown` | `stop` |
/// | [`CommitUnknown`](TransactError::CommitUnknown) | 503 `store-unavailable` | `same-key` |
/// | [`Store`](TransactError::Store) | 503 `store-unavailable` | `same-key` |
/// | [`Sealed`](TransactError::Sealed), as the key is missing or the result must be sealed | 503 `response-sealed` | `same-key` |
/// | [`Sealed`](TransactError::Sealed), because the seal is broken | 500 `record-corrupt` | `stop` |
/// | [`Failed`](TransactError::Failed), because the connection was lost | 503 `store-unavailable` | `same-key` |
/// | any other | 500 `handler-failed` | `same-key` |
///
/// If your own errors have a status of their own, match [`TransactError::Failed`] first. The response shows nothing of the
/// error; for your log, it has an `Arc<TransactError>` in its extensions.
///
/// ```
/// use oncegate::postgres::sqlx;
/// use oncegate::{IdempotencyKey, TransactRefusal, Transactor, core::Scope};
///
/// async fn pay(transactor: Transactor, key: IdempotencyKey, cents: i64) -> Result<String, TransactRefusal> {
///     let scope = Scope::caller("customer", "42").with_operation("POST /payments");
///     let paid = transactor.transact(&scope, &key, &cents, async |connection| {
///         let insert = sqlx::query_scalar("INSERT INTO payments (cents) VALUES ($1) RETURNING id");
///         let id: i64 = insert.bind(cents).fetch_one(connection).await?;
///         Ok(format!("payment {id}"))
///     });
///     Ok(paid.await?.into_inner())
/// }
/// ```
#[derive(Debug)]
pub struct TransactRefusal(pub TransactError);

impl From<TransactError> for TransactRefusal {
    fn from(error: TransactError) -> Self {
        Self(error)
    }
}

impl IntoResponse for TransactRefusal {
    fn into_response(self) -> Response {
        let refusal = match &self.0 {
            TransactError::InProgress { .. } => {
                Refusal::new(Condition::RequestInProgress).with_retry_after(1)
            }
            TransactError::Key(_) => Refusal::new(Condition::KeyInvalid),
            TransactError::Mismatch => Refusal::new(Condition::KeyReused),
            TransactError::Unreplayable { .. } | TransactError::Undecodable { .. } => {
                Refusal::new(Condition::ReplayUnavailable)
            }
            TransactError::Unknown { .. } | TransactError::Fenced { .. } => {
                Refusal::new(Condition::OutcomeUnknown)
            }
            TransactError::CommitUnknown { .. } | TransactError::Store(_) => {
                Refusal::new(Condition::StoreUnavailable).with_retry_after(1)
            }
            TransactError::Sealed { source, .. } => match source.kind() {
                StoreErrorKind::Sealed => Refusal::new(Condition::ResponseSealed).with_retry_after(30),
                _ => Refusal::new(Condition::RecordCorrupt),
            },
            TransactError::Failed(error) if is_lost_in(&**error) => {
                Refusal::new(Condition::StoreUnavailable).with_retry_after(1)
            }
            _ => Refusal::new(Condition::HandlerFailed),
        };
        let mut response = refusal.into_response(&Settings::default(), None).map(Body::from);
        response.extensions_mut().insert(Arc::new(self.0));
        response
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use oncegate_core::{KeyError, RecordId, StoreError};
    use oncegate_postgres::sqlx;

    use super::*;

    #[test]
    fn each_error_says_how_to_retry() {
        let lost = || sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into());
        let sealed = |source| TransactError::Sealed { record: RecordId::from_bytes([1; 32]), source };
        let table = [
            (sealed(StoreError::sealed("the key is missing")), 503, Some("30")),
            (sealed(StoreError::corrupt("the seal is broken")), 500, None),
            (TransactError::InProgress { lease_left: Duration::ZERO }, 409, Some("1")),
            (TransactError::Key(KeyError::Empty), 400, None),
            (TransactError::Mismatch, 422, None),
            (TransactError::Store(StoreError::unavailable("away")), 503, Some("1")),
            (TransactError::Failed(Box::new(lost())), 503, Some("1")),
            (TransactError::Failed("declined".into()), 500, None),
        ];
        for (error, status, retry_after) in table {
            let shown = format!("{error:?}");
            let response = TransactRefusal(error).into_response();
            let header = response.headers().get("retry-after").map(|value| value.to_str().unwrap());
            assert_eq!((response.status().as_u16(), header), (status, retry_after), "{shown}");
            assert!(response.extensions().get::<Arc<TransactError>>().is_some());
        }
    }
}
