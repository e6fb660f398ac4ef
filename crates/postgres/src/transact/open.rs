//! A transaction on a connection of the application's pool, which never goes back to the pool open.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use oncegate_core::StoreError;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnection, PgPool};
use sqlx::{Connection as _, Error, PgTransaction, Postgres};

use crate::error::store_error;

/// A connection of the pool. Where it is not known how its last transaction stands it is closed, and does not go back.
pub struct Held {
    connection: PoolConnection<Postgres>,
    is_doubtful: bool,
}

/// An open transaction. Dropped before its end it is rolled back.
pub struct Open<'c> {
    transaction: PgTransaction<'c>,
    is_doubtful: &'c mut bool,
}

/// Why a step of a transaction has no answer.
#[derive(Debug)]
pub enum StepError {
    /// The server or the driver says so.
    Refused(Error),
    /// The server did not answer in time. The connection is given up.
    TimedOut,
}

impl From<StepError> for StoreError {
    fn from(error: StepError) -> Self {
        match error {
            StepError::Refused(error) => store_error(&error),
            StepError::TimedOut => Self::unavailable("PostgreSQL did not answer in time"),
        }
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").field("is_doubtful", &self.is_doubtful).finish_non_exhaustive()
    }
}

impl fmt::Debug for Open<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Open").field("is_doubtful", &self.is_doubtful).finish_non_exhaustive()
    }
}

impl Held {
    /// Takes a connection, which waits for as long as the pool says.
    ///
    /// # Errors
    /// [`StepError::Refused`], of the pool or of the server.
    pub async fn acquire(pool: &PgPool) -> Result<Self, StepError> {
        let connection = pool.acquire().await.map_err(StepError::Refused)?;
        Ok(Self { connection, is_doubtful: false })
    }

    /// Begins a transaction by this statement, which takes no longer than `patience`.
    ///
    /// # Errors
    /// [`StepError`]; the connection is given up where it was not answered.
    pub async fn begin(&mut self, begin: &'static str, patience: Duration) -> Result<Open<'_>, StepError> {
        let Self { connection, is_doubtful } = self;
        // Dropped in here, the driver would not roll back: it counts a transaction only when BEGIN is answered.
        *is_doubtful = true;
        let transaction = within(patience, connection.begin_with(begin)).await?;
        *is_doubtful = false;
        Ok(Open { transaction, is_doubtful })
    }
}

impl Held {
    /// One statement of ours outside of a transaction. Where the server does not answer within `patience`, or this
    /// is dropped, the
    /// connection is given up.
    ///
    /// # Errors
    /// [`StepError`].
    pub async fn alone<T>(
        &mut self,
        patience: Duration,
        step: impl AsyncFnOnce(&mut PgConnection) -> Result<T, Error>,
    ) -> Result<T, StepError> {
        self.is_doubtful = true;
        let result = within(patience, step(&mut self.connection)).await;
        self.is_doubtful = matches!(result, Err(StepError::TimedOut));
        result
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.is_doubtful {
            self.connection.close_on_drop();
        }
    }
}

impl Open<'_> {
    /// The connection that the transaction is open on.
    pub fn connection(&mut self) -> &mut PgConnection {
        &mut self.transaction
    }

    /// One statement of ours. Where the server does not answer within `patience`, the connection is given up.
    ///
    /// # Errors
    /// [`StepError`].
    pub async fn step<T>(
        &mut self,
        patience: Duration,
        step: impl AsyncFnOnce(&mut PgConnection) -> Result<T, Error>,
    ) -> Result<T, StepError> {
        let result = within(patience, step(&mut self.transaction)).await;
        *self.is_doubtful |= matches!(result, Err(StepError::TimedOut));
        result
    }

    /// Sends COMMIT. On an error it may have been carried out, unless
    /// [`is_rolled_back`](super::error::is_rolled_back) says otherwise; the
    /// connection is given up then.
    ///
    /// # Errors
    /// [`StepError`].
    pub async fn commit(self, patience: Duration) -> Result<(), StepError> {
        let Self { transaction, is_doubtful } = self;
        let result = within(patience, transaction.commit()).await;
        *is_doubtful = result.is_err();
        result
    }

    /// Waits until everything that the transaction wrote and held is gone. Where that cannot be said, the connection is
    /// given up, and the server finds that out by itself.
    pub async fn rollback(self, patience: Duration) {
        let Self { transaction, is_doubtful } = self;
        if !*is_doubtful {
            *is_doubtful = within(patience, transaction.rollback()).await.is_err();
        }
    }
}

async fn within<T>(patience: Duration, step: impl Future<Output = Result<T, Error>>) -> Result<T, StepError> {
    match tokio::time::timeout(patience, step).await {
        Ok(result) => result.map_err(StepError::Refused),
        Err(_) => Err(StepError::TimedOut),
    }
}
