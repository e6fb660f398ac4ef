//! Test helpers: one server for all tests of this program, and one database for each test.

use std::ops::Deref;
use std::str::FromStr as _;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::{
    Claim, Command, Complete, Completion, FencingToken, Outcome, RecordId, Renew, StoredResponse,
};
use oncegate_postgres::{PostgresOptions, PostgresStore, schema};
use oncegate_servers::PostgresDatabase;
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions, PgRow, PgSslMode};
use sqlx::{AssertSqlSafe, Connection as _};

/// A test's own database.
pub(crate) struct Database(PostgresDatabase);

impl Deref for Database {
    type Target = PostgresDatabase;

    fn deref(&self) -> &PostgresDatabase {
        &self.0
    }
}

impl Database {
    /// Creates an empty database.
    pub(crate) async fn empty() -> Self {
        Self(tokio::task::spawn_blocking(PostgresDatabase::fresh).await.unwrap().unwrap())
    }

    /// Creates a database with the contract.
    pub(crate) async fn fresh() -> Self {
        let database = Self::empty().await;
        schema::apply(&database.options()).await.unwrap();
        database
    }

    /// Options with longer timeouts than the defaults, because test machines are busy.
    pub(crate) fn options(&self) -> PostgresOptions {
        let timeout = Duration::from_secs(20);
        let options = PostgresOptions::from_url(&self.url()).unwrap();
        let options = options.with_connect_timeout(timeout).unwrap().with_statement_timeout(timeout).unwrap();
        options.with_command_timeout(timeout).unwrap()
    }

    /// An application's pool, with a table of payments in the same database.
    pub(crate) async fn payments(&self, connections: u32) -> PgPool {
        self.payments_at(self.server.port(), connections).await
    }

    /// The same, through a proxy on the given port.
    pub(crate) async fn payments_at(&self, port: u16, connections: u32) -> PgPool {
        let mut direct = self.connect().await;
        run(
            &mut direct,
            "CREATE TABLE IF NOT EXISTS public.payments (id bigserial PRIMARY KEY, cents bigint NOT NULL)",
        )
        .await;
        let options = PgConnectOptions::from_str(&self.url()).unwrap();
        PgPoolOptions::new()
            .max_connections(connections)
            .acquire_timeout(Duration::from_secs(60))
            .connect_with(options.port(port).ssl_mode(PgSslMode::Disable))
            .await
            .unwrap()
    }

    /// The number of committed payments.
    pub(crate) async fn paid(&self) -> i64 {
        let count = sqlx::query_scalar("SELECT count(*) FROM payments");
        count.fetch_one(&mut self.connect().await).await.unwrap()
    }

    pub(crate) async fn store(&self) -> PostgresStore {
        PostgresStore::open(self.options()).await.unwrap()
    }

    /// A connection of an application.
    pub(crate) async fn connect(&self) -> PgConnection {
        let mut connection = PgConnection::connect(&self.url()).await.unwrap();
        // A wait for a lock that should not happen becomes an error instead of a hang.
        run(&mut connection, "SET statement_timeout = '20s'").await;
        connection
    }
}

/// Runs statements of the test.
pub(crate) async fn run(connection: &mut PgConnection, sql: &str) {
    try_run(connection, sql).await.unwrap();
}

pub(crate) async fn try_run(connection: &mut PgConnection, sql: &str) -> Result<Vec<PgRow>, sqlx::Error> {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).fetch_all(connection).await
}

pub(crate) fn sqlstate(error: &sqlx::Error) -> String {
    error.as_database_error().and_then(|error| error.code()).map(|code| code.into_owned()).unwrap_or_default()
}

pub(crate) fn id(number: u8) -> RecordId {
    RecordId::from_bytes([number; 32])
}

/// The identifier as an SQL literal.
pub(crate) fn sql_id(id: RecordId) -> String {
    format!("decode('{id}', 'hex')")
}

pub(crate) fn claim(attempt: u128) -> Claim {
    Claim { retention: Duration::from_secs(3600), ..oncegate_testkit::claim(attempt, b"same") }
}

pub(crate) fn claims(attempt: u128) -> Command {
    Command::Claim(claim(attempt))
}

pub(crate) fn renews(token: FencingToken) -> Command {
    Command::Renew(Renew { token, lease: Duration::from_secs(30), retention: Duration::from_secs(3600) })
}

pub(crate) fn completes(token: FencingToken, completion: Completion) -> Command {
    Command::Complete(Complete { token, completion, retention: Duration::from_secs(3600) })
}

pub(crate) fn response(body: &'static [u8]) -> StoredResponse {
    StoredResponse::new(201, &[("content-type", &b"text/plain"[..])], &[Bytes::from_static(body)], &[])
        .unwrap()
}

pub(crate) fn token(outcome: &Outcome) -> FencingToken {
    match outcome {
        Outcome::Execute(grant) => grant.token,
        other => panic!("{other:?}"),
    }
}
