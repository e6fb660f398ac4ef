//! A database for each test, on one server for all tests of a program.

use std::ops::Deref;
use std::time::Duration;

use oncegate_postgres::sqlx::postgres::{PgConnection, PgRow};
use oncegate_postgres::sqlx::{self, AssertSqlSafe, Connection as _};
use oncegate_postgres::{PostgresOptions, schema};
use oncegate_servers::PostgresDatabase;

/// A database with the schema.
pub(crate) struct Database(PostgresDatabase);

impl Deref for Database {
    type Target = PostgresDatabase;

    fn deref(&self) -> &PostgresDatabase {
        &self.0
    }
}

impl Database {
    pub(crate) async fn with_schema() -> Self {
        let database = Self(tokio::task::spawn_blocking(PostgresDatabase::fresh).await.unwrap().unwrap());
        apply_schema(&database.url()).await;
        database
    }

    pub(crate) async fn connect(&self) -> PgConnection {
        let mut connection = PgConnection::connect(&self.url()).await.unwrap();
        // A wait for a lock that should be free must be an error, not a hang.
        run(&mut connection, "SET statement_timeout = '30s'").await;
        connection
    }
}

pub(crate) async fn apply_schema(url: &str) {
    let options =
        PostgresOptions::from_url(url).unwrap().with_connect_timeout(Duration::from_secs(60)).unwrap();
    schema::apply(&options).await.unwrap();
}

pub(crate) async fn run(connection: &mut PgConnection, sql: &str) -> Vec<PgRow> {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).fetch_all(connection).await.unwrap()
}
