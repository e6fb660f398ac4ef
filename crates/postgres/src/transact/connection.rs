//! A transaction on a connection of the application's pool, which never returns to the pool with an open transaction.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use oncegate_core::StoreError;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnection, PgPool};
use sqlx::{Connection as _, Error, PgTransaction, Postgres};

use crate::error::store_error;

/// A connection of the pool. If its last transaction may still be open, it is closed and does not return to the pool.
pub struct TransactionConnection {
    connection: PoolConnection<Postgres>,
    is_doubtful: bool,
}

/// An open transaction. Dropped before its end it is rolled back.
pub struct OpenTransaction<'c> {
    transaction: PgTransaction<'c>,
    is_doubtful: &'c mut bool,
}

/// A statement of a transaction without a result.
#[derive(Debug)]
pub enum StatementError {
    /// The server or the driver refused it.
    Refused(Error),
    /// The server did not answer in time. The connection is closed.
    TimedOut,
}

impl From<StatementError> for StoreError {
    fn from(error: StatementError) -> Self {
        match error {
            StatementError::Refused(error) => store_error(&error),
            StatementError::TimedOut => Self::unavailable("PostgreSQL did not answer within the timeout"),
        }
    }
}

impl fmt::Debug for TransactionConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransactionConnection")
            .field("is_doubtful", &self.is_doubtful)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for OpenTransaction<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenTransaction").field("is_doubtful", &self.is_doubtful).finish_non_exhaustive()
    }
}

impl TransactionConnection {
    /// Takes a connection. The pool bounds the wait.
    ///
    /// # Errors
    /// [`StatementError::Refused`], by the pool or by the server.
    pub async fn acquire(pool: &PgPool) -> Result<Self, StatementError> {
        let connection = pool.acquire().await.map_err(StatementError::Refused)?;
        Ok(Self { connection, is_doubtful: false })
    }

    /// Begins a transaction by the statement `begin`, within `timeout`.
    ///
    /// # Errors
    /// [`StatementError`]. If the server did not answer, the connection is closed.
    pub async fn begin(
        &mut self,
        begin: &'static str,
        timeout: Duration,
    ) -> Result<OpenTransaction<'_>, StatementError> {
        let Self { connection, is_doubtful } = self;
        // If this future is dropped here, the driver does not roll back: it counts a transaction only after the reply to
        // BEGIN.
        *is_doubtful = true;
        let transaction = with_timeout(timeout, connection.begin_with(begin)).await?;
        *is_doubtful = false;
        Ok(OpenTransaction { transaction, is_doubtful })
    }
}

impl TransactionConnection {
    /// Runs one statement outside of a transaction. If the server does not answer within `timeout`, or this future is dropped,
    /// the connection is closed.
    ///
    /// # Errors
    /// [`StatementError`].
    pub async fn statement<T>(
        &mut self,
        timeout: Duration,
        statement: impl AsyncFnOnce(&mut PgConnection) -> Result<T, Error>,
    ) -> Result<T, StatementError> {
        self.is_doubtful = true;
        let result = with_timeout(timeout, statement(&mut self.connection)).await;
        self.is_doubtful = matches!(result, Err(StatementError::TimedOut));
        result
    }
}

impl Drop for TransactionConnection {
    fn drop(&mut self) {
        if self.is_doubtful {
            self.connection.close_on_drop();
        }
    }
}

impl OpenTransaction<'_> {
    /// The connection that the transaction is open on.
    pub fn connection(&mut self) -> &mut PgConnection {
        &mut self.transaction
    }

    /// Runs one statement in the transaction. If the server does not answer within `timeout`, the connection is closed.
    ///
    /// # Errors
    /// [`StatementError`].
    pub async fn statement<T>(
        &mut self,
        timeout: Duration,
        statement: impl AsyncFnOnce(&mut PgConnection) -> Result<T, Error>,
    ) -> Result<T, StatementError> {
        let result = with_timeout(timeout, statement(&mut self.transaction)).await;
        *self.is_doubtful |= matches!(result, Err(StatementError::TimedOut));
        result
    }

    /// Sends COMMIT. After an error it may have been carried out, unless [`is_rolled_back`](super::error::is_rolled_back) says
    /// otherwise; the connection is closed then.
    ///
    /// # Errors
    /// [`StatementError`].
    pub async fn commit(self, timeout: Duration) -> Result<(), StatementError> {
        let Self { transaction, is_doubtful } = self;
        let result = with_timeout(timeout, transaction.commit()).await;
        *is_doubtful = result.is_err();
        result
    }

    /// Rolls back, and waits until the server has released everything. If it does not confirm that within `timeout`, the
    /// connection is closed, and the server notices it.
    pub async fn rollback(self, timeout: Duration) {
        let Self { transaction, is_doubtful } = self;
        if !*is_doubtful {
            *is_doubtful = with_timeout(timeout, transaction.rollback()).await.is_err();
        }
    }
}

async fn with_timeout<T>(
    timeout: Duration,
    statement: impl Future<Output = Result<T, Error>>,
) -> Result<T, StatementError> {
    match tokio::time::timeout(timeout, statement).await {
        Ok(result) => result.map_err(StatementError::Refused),
        Err(_) => Err(StatementError::TimedOut),
    }
}
