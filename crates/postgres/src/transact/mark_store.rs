//! The record that marks a database as that of one id secret, on the application's own pool.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{
    AuditEntry, Capabilities, Clock as _, Command, Durability, Fencing, ListPage, ListQuery, Outcome, Record,
    RecordId, Store, StoreError, StoreFuture, SystemClock, Timestamp,
};
use sqlx::postgres::{PgPool, PgRow};

use crate::call::Call;
use crate::error::store_error;
use crate::record::{self, Reply};
use crate::store::{
    CLAIM, claim_call, list_call, list_page, lookup_call, open_transactions, open_transactions_call,
    renew_call,
};

/// Limits the time of a statement.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A store that only reads and renews the mark. An [`IdGuard`](oncegate_core::IdGuard) needs no more.
pub(super) struct MarkStore {
    pool: PgPool,
    transaction_pooler: bool,
    clock: SystemClock,
}

impl MarkStore {
    pub(super) fn new(pool: PgPool, transaction_pooler: bool) -> Arc<Self> {
        Arc::new(Self { pool, transaction_pooler, clock: SystemClock::new() })
    }

    async fn ask(&self, call: Call) -> Result<Vec<PgRow>, StoreError> {
        let asked = async {
            let mut connection = self.pool.acquire().await?;
            match self.transaction_pooler {
                false => call.prepared(&mut connection).await,
                // It keeps no prepared statement.
                true => call.in_one_message(&mut connection).await,
            }
        };
        match tokio::time::timeout(TIMEOUT, asked).await {
            Ok(rows) => rows.map_err(|error| store_error(&error)),
            Err(_) => Err(StoreError::unavailable("PostgreSQL did not answer within the timeout")),
        }
    }
}

fn not_here<T>() -> Result<T, StoreError> {
    Err(StoreError::invalid("this store has only the mark of the id secret"))
}

impl Store for MarkStore {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        Box::pin(async move {
            let call = match &command {
                Command::Claim(claim) => {
                    claim_call(CLAIM, &id, claim).ok_or_else(record::unexpected_reply)?
                }
                Command::Renew(renew) => renew_call(&id, renew),
                _ => return not_here(),
            };
            let rows = self.ask(call).await?;
            match record::reply(rows.first().ok_or_else(record::unexpected_reply)?)? {
                Reply::Outcome(outcome) => Ok(outcome),
                Reply::Locked => Err(StoreError::locked("another transaction holds the record")),
                Reply::Large | Reply::Later => Err(record::unexpected_reply()),
            }
        })
    }

    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        Box::pin(async move { self.ask(lookup_call(&id)).await?.first().map(record::record).transpose() })
    }

    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage> {
        Box::pin(async move { list_page(&self.ask(list_call(&query, None)).await?) })
    }

    fn open_transactions(&self) -> StoreFuture<'_, Vec<String>> {
        Box::pin(async move { open_transactions(&self.ask(open_transactions_call()).await?) })
    }

    fn purge(&self, _: usize) -> StoreFuture<'_, usize> {
        Box::pin(std::future::ready(not_here()))
    }

    fn audit(&self, _: Option<u64>, _: usize) -> StoreFuture<'_, Vec<AuditEntry>> {
        Box::pin(std::future::ready(not_here()))
    }

    fn check(&self) -> StoreFuture<'_, ()> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn now(&self) -> Timestamp {
        self.clock.now()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new("postgres", Durability::Buffered, Fencing::Monotonic)
    }
}
