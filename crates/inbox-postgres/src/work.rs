//! The handlers that run in the transaction.

use oncegate_inbox::{HandlerError, Message};
use std::future::Future;
use std::pin::Pin;

use oncegate_postgres::TransactFnWith;
use oncegate_postgres::sqlx::postgres::PgConnection;

/// A handler of one message or of a batch.
pub trait Work: Send + Sync {
    /// Runs the handler for new messages.
    fn run(
        &self,
        connection: &mut PgConnection,
        messages: &[&Message],
    ) -> impl Future<Output = Result<(), HandlerError>> + Send;
}

/// A handler of one message.
#[derive(Debug)]
pub struct PerMessage<F>(pub(crate) F);

/// A handler of a batch.
#[derive(Debug)]
pub struct WholeBatch<F>(pub(crate) F);

impl<F> Work for PerMessage<F>
where
    F: for<'c> TransactFnWith<&'c mut PgConnection, &'c Message, (), HandlerError, Fut: Send>
        + Clone
        + Send
        + Sync,
{
    async fn run(&self, connection: &mut PgConnection, messages: &[&Message]) -> Result<(), HandlerError> {
        for message in messages {
            boxed(self.0.clone(), &mut *connection, *message).await?;
        }
        Ok(())
    }
}

impl<F> Work for WholeBatch<F>
where
    F: for<'c> TransactFnWith<&'c mut PgConnection, &'c [&'c Message], (), HandlerError, Fut: Send>
        + Clone
        + Send
        + Sync,
{
    async fn run(&self, connection: &mut PgConnection, messages: &[&Message]) -> Result<(), HandlerError> {
        boxed(self.0.clone(), connection, messages).await
    }
}

type Running<'c> = Pin<Box<dyn Future<Output = Result<(), HandlerError>> + Send + 'c>>;

/// The future is boxed because otherwise the compiler does not see that the two lifetimes are one.
fn boxed<'c, F, M>(run: F, connection: &'c mut PgConnection, what: M) -> Running<'c>
where
    F: TransactFnWith<&'c mut PgConnection, M, (), HandlerError, Fut: Send + 'c>,
{
    Box::pin(run(connection, what))
}
