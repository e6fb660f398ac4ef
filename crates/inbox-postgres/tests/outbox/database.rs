//! A server for all tests of this program, a database for each; relays on it.

use std::str::FromStr as _;
use std::time::Duration;

use oncegate_inbox::{Outgoing, Publisher};
use oncegate_inbox_postgres::{Outbox, OutboxStatus, Relay};
use oncegate_postgres::sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions, PgRow};
use oncegate_postgres::sqlx::{self, AssertSqlSafe, Connection as _};
use oncegate_testkit::until;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

pub(crate) use crate::common::{Database, apply_schema, run};

impl Database {
    pub(crate) fn pool(&self) -> PgPool {
        pool(&self.url())
    }

    /// Sends messages in one transaction.
    pub(crate) async fn send(&self, messages: &[Outgoing]) {
        let mut connection = self.connect().await;
        let mut transaction = connection.begin().await.unwrap();
        for message in messages {
            Outbox::new().send(&mut transaction, message).await.unwrap();
        }
        transaction.commit().await.unwrap();
    }

    pub(crate) async fn status(&self) -> OutboxStatus {
        Outbox::new().status(&mut self.connect().await).await.unwrap()
    }

    /// Waits until nothing is left that waits.
    pub(crate) async fn is_drained(&self) {
        let mut connection = self.connect().await;
        until("no message waits in the outbox", async || {
            Outbox::new().status(&mut connection).await.unwrap().waiting == 0
        })
        .await;
    }
}

pub(crate) fn pool(url: &str) -> PgPool {
    // A pooler does not know the setting.
    let options = PgConnectOptions::from_str(url).unwrap().extra_float_digits(None);
    let pool = PgPoolOptions::new().max_connections(2).acquire_timeout(Duration::from_secs(30));
    pool.connect_lazy_with(options)
}

pub(crate) async fn try_run(connection: &mut PgConnection, sql: &str) -> Result<Vec<PgRow>, sqlx::Error> {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).fetch_all(connection).await
}

/// A message of this key; the identifier is `KEY/PAYLOAD`.
pub(crate) fn message(key: Option<&str>, payload: impl std::fmt::Display) -> Outgoing {
    let payload = payload.to_string();
    let mut message = Outgoing::new(format!("{}/{payload}", key.unwrap_or_default()), "orders", payload);
    message.order_key = key.map(|key| key.to_owned().into());
    message
}

/// A relay that tries again soon.
pub(crate) fn relay<P: Publisher>(pool: PgPool, publisher: P) -> Relay<P> {
    Relay::new(pool, publisher)
        .with_poll(Duration::from_millis(20))
        .unwrap()
        .with_backoff(Duration::from_millis(5), Duration::from_millis(100))
        .unwrap()
}

/// A relay that runs until it is stopped, or dropped like a process that crashes.
pub(crate) struct Running {
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl Running {
    pub(crate) fn start<P: Publisher>(relay: Relay<P>) -> Self {
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(relay.run(async {
            stopped.await.ok();
        }));
        Self { stop: Some(stop), task }
    }

    pub(crate) async fn stop(mut self) {
        self.stop.take().unwrap().send(()).ok();
        (&mut self.task).await.unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}
