//! The contract as SQL, and how it gets into a database: forward only, one transaction for each version, one at a time.

use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{ConnectOptions as _, Connection as _, Error, Row as _};

use crate::error::{OpenError, in_words};
use crate::options::PostgresOptions;

/// The version of the contract that this program needs.
pub const VERSION: i32 = 4;

/// What brings a database from one version to the next. What was released is never changed.
const MIGRATIONS: &[(i32, &str)] = &[
    (1, include_str!("../sql/0001_contract.sql")),
    (2, include_str!("../sql/0002_steps_and_reservations.sql")),
    (3, include_str!("../sql/0003_inbox.sql")),
    (4, include_str!("../sql/0004_outbox.sql")),
];

/// Everything that brings an empty database to [`VERSION`], to be run by `psql -v ON_ERROR_STOP=1`.
#[must_use]
pub fn print() -> String {
    MIGRATIONS.iter().map(|(_, sql)| format!("BEGIN;\n{sql}COMMIT;\n")).collect()
}

/// What a database has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// The version of its contract, where it has one.
    pub found: Option<i32>,
    /// The version that this program needs.
    pub needed: i32,
}

/// Looks at what the database has.
///
/// # Errors
/// [`OpenError::Connect`] where it cannot be reached, or the role may not look.
pub async fn status(options: &PostgresOptions) -> Result<Status, OpenError> {
    let mut connection = connect(options).await?;
    let found = found(&mut connection).await.map_err(|error| failed(options, &error))?;
    // It has nothing to lose.
    let _ = connection.close().await;
    Ok(Status { found, needed: VERSION })
}

/// Brings the database to [`VERSION`]. Says what it had before. Several may try at once.
///
/// # Errors
/// [`OpenError::NewerContract`]; [`OpenError::Connect`] where the database cannot be reached, or refuses; nothing was
/// changed then beyond the versions that were completed.
pub async fn apply(options: &PostgresOptions) -> Result<Status, OpenError> {
    let mut connection = connect(options).await?;
    let before = found(&mut connection).await.map_err(|error| failed(options, &error))?;
    if let Some(found) = before.filter(|found| *found > VERSION) {
        return Err(OpenError::NewerContract { database: options.database(), found, known: VERSION });
    }
    for (version, sql) in
        MIGRATIONS.iter().filter(|(version, _)| before.is_none_or(|before| before < *version))
    {
        let result = migrate(&mut connection, *version, sql).await;
        result.map_err(|error| failed(options, &error))?;
    }
    let _ = connection.close().await;
    Ok(Status { found: before, needed: VERSION })
}

async fn migrate(connection: &mut PgConnection, version: i32, sql: &'static str) -> Result<(), Error> {
    let mut transaction = connection.begin().await?;
    // Somebody else's migration is waited for, but not for ever. The SQL takes the same lock when it is run by hand.
    sqlx::raw_sql("SET LOCAL lock_timeout = '60s'; SELECT pg_advisory_xact_lock(7956004179840295781)")
        .execute(&mut *transaction)
        .await?;
    if found(&mut transaction).await?.is_some_and(|found| found >= version) {
        return transaction.rollback().await;
    }
    sqlx::raw_sql(sql).execute(&mut *transaction).await?;
    transaction.commit().await
}

/// The version in the database; `None` where there is no contract.
async fn found(connection: &mut PgConnection) -> Result<Option<i32>, Error> {
    // Read from the tables: what a session remembers of a schema that was not there may be old.
    let there = "SELECT EXISTS (SELECT FROM pg_catalog.pg_proc AS p JOIN pg_catalog.pg_namespace AS n \
                 ON n.oid = p.pronamespace WHERE n.nspname = 'oncegate' AND p.proname = 'contract_version') AS is_there";
    let rows = sqlx::raw_sql(there).fetch_all(&mut *connection).await?;
    let is_there = rows.first().map(|row| row.try_get::<bool, _>("is_there")).transpose()?.unwrap_or(false);
    if !is_there {
        return Ok(None);
    }
    let rows = sqlx::raw_sql("SELECT oncegate.contract_version() AS version").fetch_all(connection).await?;
    rows.first().map(|row| row.try_get::<Option<i32>, _>("version")).transpose().map(Option::flatten)
}

async fn connect(options: &PostgresOptions) -> Result<PgConnection, OpenError> {
    let connect: PgConnectOptions = options.bare_connect_options();
    match tokio::time::timeout(options.connect_timeout, connect.connect()).await {
        Ok(connected) => connected.map_err(|error| failed(options, &error)),
        Err(_) => {
            Err(OpenError::Connect { database: options.database(), why: "no answer in time".to_owned() })
        }
    }
}

fn failed(options: &PostgresOptions, error: &Error) -> OpenError {
    // The owner's own statements: what they say holds nothing of anybody's.
    let why = match error {
        Error::Database(error) => error.message().to_owned(),
        other => in_words(other),
    };
    OpenError::Connect { database: options.database(), why }
}
