//! The contract as SQL, and how it gets into a database: one text that brings a database of any earlier version to this one.
//!
//! The tables are made where they are missing, the functions are made anew each time, and all of it happens in one
//! transaction under a search path of the text's own. So whatever a database got earlier, and under whatever search path, the
//! functions are bound to the server's own functions and operators afterwards.

use std::time::{Duration, Instant};

use sqlx::postgres::{PgConnectOptions, PgConnection, PgDatabaseError};
use sqlx::{ConnectOptions as _, Connection as _, Error, Row as _};

use crate::error::{OpenError, in_words};
use crate::options::PostgresOptions;
use crate::pause::Pause;

/// The version of the contract that this program needs.
pub const VERSION: i32 = 6;

/// The parts of the text, in their order.
const SQL: [&str; 7] = [
    include_str!("../sql/0_tables.sql"),
    include_str!("../sql/1_records.sql"),
    include_str!("../sql/1_responses.sql"),
    include_str!("../sql/2_steps.sql"),
    include_str!("../sql/3_inbox.sql"),
    include_str!("../sql/4_outbox.sql"),
    include_str!("../sql/5_rights.sql"),
];

/// A snapshot that is taken before the lock would not see what was made meanwhile.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";

/// How long [`apply`] tries to get the lock of a table that another transaction holds.
const LOCKS_WITHIN: Duration = Duration::from_secs(60);

/// The pauses between these tries, in which claims go on.
const LOCK_PAUSES: [Duration; 2] = [Duration::from_millis(300), Duration::from_secs(2)];

/// The SQL that brings a database to [`VERSION`], be it empty, of an earlier version, or of this one; to be run by
/// `psql -v ON_ERROR_STOP=1` as the schema's owner.
#[must_use]
pub fn print() -> String {
    format!("{BEGIN};\n{}COMMIT;\n", SQL.concat())
}

/// The state of the contract in a database.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// The version of its contract, if it has one.
    pub found: Option<i32>,
    /// The version that this program needs.
    pub needed: i32,
    /// Parts of the contract that are bound to an object outside of it, such as `function oncegate.now_ms() uses operator
    /// public.*(numeric,integer)`; 20 at most. Whoever owns that object acts with the rights of the schema's owner. [`apply`]
    /// binds functions and defaults to the server's own.
    pub foreign_bindings: Vec<String>,
}

/// Reads the state of the contract; changes nothing, and needs no right but that to connect and to call
/// `oncegate.contract_version`.
///
/// # Errors
/// [`OpenError::Connect`] if the database cannot be reached, if the role may not look, or if its schema `oncegate` is not
/// Oncegate's.
pub async fn status(options: &PostgresOptions) -> Result<Status, OpenError> {
    let mut connection = connect(options).await?;
    let status = look(&mut connection, options).await?;
    // It has nothing to lose.
    let _ = connection.close().await;
    Ok(status)
}

/// Brings the database to [`VERSION`] and makes its functions anew, in one transaction. Returns what it had before. Several
/// may try at once.
///
/// An upgrade that changes a table waits for other transactions only for a moment at a time, because claims wait behind it,
/// and tries again for a minute.
///
/// # Errors
/// [`OpenError::NewerContract`]; [`OpenError::Connect`] if the database cannot be reached, refuses, or is kept locked by other
/// transactions, and nothing was changed; [`OpenError::ForeignBindings`] if a part of the contract that is not a function or a
/// default is bound to an object outside of it, such as an index that was added by hand.
pub async fn apply(options: &PostgresOptions) -> Result<Status, OpenError> {
    let mut connection = connect(options).await?;
    let before = look(&mut connection, options).await?;
    if let Some(found) = before.found.filter(|found| *found > VERSION) {
        return Err(OpenError::NewerContract { database: options.database(), found, known: VERSION });
    }
    let until = Instant::now() + LOCKS_WITHIN;
    let [first, longest] = LOCK_PAUSES;
    let mut pause = Pause::new(first, longest);
    while let Err(error) = migrate(&mut connection).await {
        if !is_in_the_way(&error) {
            return Err(not_applied(options, &error, &before));
        }
        if Instant::now() >= until {
            return Err(locked(options, &mut connection).await);
        }
        pause.sleep(None).await;
    }
    let after = look(&mut connection, options).await?;
    let _ = connection.close().await;
    if !after.foreign_bindings.is_empty() {
        let (database, bindings) = (options.database(), after.foreign_bindings);
        return Err(OpenError::ForeignBindings { database, bindings });
    }
    Ok(before)
}

/// A function or a column whose type is bound to another schema stops the SQL: what has another result is not replaced.
fn not_applied(options: &PostgresOptions, error: &Error, before: &Status) -> OpenError {
    match failed(options, error) {
        OpenError::Connect { database, why } if !before.foreign_bindings.is_empty() => {
            let bindings = before.foreign_bindings.join("; ");
            let why = format!(
                "nothing was changed: {why}. Parts of the schema oncegate are bound to objects outside of it, which may be the reason: \
                 {bindings}. How they are mended by hand stands in docs/reference/store-contract-postgres.md under \
                 \"Search path and owner\""
            );
            OpenError::Connect { database, why }
        }
        error => error,
    }
}

async fn migrate(connection: &mut PgConnection) -> Result<(), Error> {
    let mut transaction = connection.begin_with(BEGIN).await?;
    for part in SQL {
        sqlx::raw_sql(part).execute(&mut *transaction).await?;
    }
    transaction.commit().await
}

/// Another transaction was in the way; nothing was changed.
fn is_in_the_way(error: &Error) -> bool {
    let Some(error) = error.as_database_error() else { return false };
    match error.code().as_deref() {
        Some("55P03" | "40P01" | "40001") => true,
        // A `GRANT` or `REVOKE` that commits at the same moment. The server has no code of its own for it, and says it in the
        // language of `lc_messages`: which file it comes from is the same in all of them.
        Some("XX000") => error.try_downcast_ref::<PgDatabaseError>().is_some_and(|error| {
            error.routine() == Some("simple_heap_update") || error.routine() == Some("simple_heap_delete")
        }),
        _ => false,
    }
}

/// Which sessions hold a table of the contract, as far as this role may know.
const HOLDERS: &str = "SELECT pg_catalog.string_agg(DISTINCT a.pid::pg_catalog.text, ', ') AS pids \
     FROM pg_catalog.pg_locks AS l JOIN pg_catalog.pg_class AS c ON c.oid = l.relation \
     JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace \
     JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid \
     WHERE n.nspname = 'oncegate' AND l.granted AND a.datname = pg_catalog.current_database() \
     AND a.pid <> pg_catalog.pg_backend_pid()";

async fn locked(options: &PostgresOptions, connection: &mut PgConnection) -> OpenError {
    let rows = sqlx::raw_sql(HOLDERS).fetch_all(connection).await;
    let pids = rows.ok().and_then(|rows| rows.first().and_then(|row| row.try_get::<String, _>("pids").ok()));
    let who = pids.map_or(String::new(), |pids| format!(" (in the sessions {pids}, by pg_stat_activity)"));
    let why = format!(
        "nothing was changed: for a minute other transactions{who} did not let go of a table, or another apply is running; \
         end them, or try again when fewer run"
    );
    OpenError::Connect { database: options.database(), why }
}

/// The schema, and its function that says the version: called only if it runs with the rights of its own owner, whoever that
/// is, because another role may have made a schema by this name.
const IS_THERE: &str = "SELECT pg_catalog.bool_and(p.prosecdef) AS is_ours FROM pg_catalog.pg_proc AS p \
     JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace \
     WHERE n.nspname = 'oncegate' AND p.proname = 'contract_version'";

/// What the parts of the schema depend on that is not a part of it. The server's own objects are in no such list, because it
/// does not track what nobody can drop.
const FOREIGN_BINDINGS: &str = "WITH RECURSIVE parts AS ( \
       SELECT d.classid, d.objid FROM pg_catalog.pg_depend AS d JOIN pg_catalog.pg_namespace AS n ON n.oid = d.refobjid \
       WHERE n.nspname = 'oncegate' AND d.refclassid = 'pg_catalog.pg_namespace'::pg_catalog.regclass \
     UNION \
       SELECT d.classid, d.objid FROM pg_catalog.pg_depend AS d JOIN parts AS p \
       ON d.refclassid = p.classid AND d.refobjid = p.objid \
       WHERE d.deptype IN ('a', 'i') AND d.classid <> 'pg_catalog.pg_trigger'::pg_catalog.regclass) \
     SELECT DISTINCT pg_catalog.concat(pg_catalog.pg_describe_object(d.classid, d.objid, d.objsubid), ' uses ', \
       pg_catalog.pg_describe_object(d.refclassid, d.refobjid, d.refobjsubid)) AS binding \
     FROM pg_catalog.pg_depend AS d JOIN parts AS p ON p.classid = d.classid AND p.objid = d.objid \
     WHERE d.refclassid NOT IN ('pg_catalog.pg_namespace'::pg_catalog.regclass, 'pg_catalog.pg_language'::pg_catalog.regclass) \
       AND NOT EXISTS (SELECT FROM parts AS o WHERE o.classid = d.refclassid AND o.objid = d.refobjid) \
     ORDER BY binding LIMIT 20";

async fn look(connection: &mut PgConnection, options: &PostgresOptions) -> Result<Status, OpenError> {
    let status = read_status(connection).await.map_err(|error| failed(options, &error))?;
    status.ok_or_else(|| OpenError::Connect {
        database: options.database(),
        why: "its schema oncegate is not Oncegate's: find out who made it".to_owned(),
    })
}

/// `None` if there is a schema by this name that is not Oncegate's.
async fn read_status(connection: &mut PgConnection) -> Result<Option<Status>, Error> {
    let mut transaction = connection.begin().await?;
    // Operators cannot be named as functions can, and a role may have a bound on its statements that is made for others. With the
    // transaction both are over: behind a pooler, too.
    let settings = "SET LOCAL statement_timeout = '60s'; SET LOCAL search_path = pg_catalog, pg_temp";
    sqlx::raw_sql(settings).execute(&mut *transaction).await?;
    let mut status = Status { found: None, needed: VERSION, foreign_bindings: Vec::new() };
    // Read from the tables: what a session remembers of a schema that was not there may be old.
    let rows = sqlx::raw_sql(IS_THERE).fetch_all(&mut *transaction).await?;
    match rows.first().map(|row| row.try_get::<Option<bool>, _>("is_ours")).transpose()?.flatten() {
        None => return Ok(Some(status)),
        Some(false) => return Ok(None),
        Some(true) => {}
    }
    let rows =
        sqlx::raw_sql("SELECT oncegate.contract_version() AS version").fetch_all(&mut *transaction).await?;
    status.found = rows.first().map(|row| row.try_get("version")).transpose()?.flatten();
    for row in sqlx::raw_sql(FOREIGN_BINDINGS).fetch_all(&mut *transaction).await? {
        status.foreign_bindings.push(row.try_get("binding")?);
    }
    transaction.rollback().await?;
    Ok(Some(status))
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
