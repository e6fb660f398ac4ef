//! The contract as SQL, and its installation: one text that creates it, upgrades it, or repairs it.
//!
//! The text creates the tables that are missing, replaces every function, and notes its version, all in one transaction under
//! a search path that it sets itself. Whatever a database contained before, and under whatever search path, the functions are
//! bound to the server's own functions and operators afterwards. A later version of the text adds what a table of an earlier
//! version lacks; see decision 0036.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use sqlx::postgres::{PgConnectOptions, PgConnection, PgDatabaseError};
use sqlx::{ConnectOptions as _, Connection as _, Error, Row as _};

use crate::backoff::Backoff;
use crate::error::{PostgresOpenError, describe};
use crate::options::PostgresOptions;
use crate::store::is_passing;

/// The version of the contract that this program needs.
pub const VERSION: i32 = 1;

/// The text, by subject. The order matters: a function with a body after `RETURN` needs the functions that it names.
const SQL: [&str; 10] = [
    include_str!("../../sql/tables.sql"),
    include_str!("../../sql/records.sql"),
    include_str!("../../sql/operators.sql"),
    include_str!("../../sql/batches.sql"),
    include_str!("../../sql/responses.sql"),
    include_str!("../../sql/transactions.sql"),
    include_str!("../../sql/inbox.sql"),
    include_str!("../../sql/outbox.sql"),
    include_str!("../../sql/message_operators.sql"),
    include_str!("../../sql/rights.sql"),
];

/// A version of the contract with its text. Tests upgrade to a version that only they have.
struct Contract {
    version: i32,
    sql: Cow<'static, [&'static str]>,
}

const CURRENT: Contract = Contract { version: VERSION, sql: Cow::Borrowed(&SQL) };

/// READ COMMITTED: a snapshot from before the lock would not show the objects that another run created meanwhile.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";

/// The time for which [`apply`] tries to get the lock of a table that another transaction holds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);

/// The first and the longest pause between these tries. Claims go on meanwhile.
const LOCK_PAUSES: [Duration; 2] = [Duration::from_millis(300), Duration::from_secs(2)];

/// The SQL of [`apply`], which brings a database to [`VERSION`]. Run it with `psql -v ON_ERROR_STOP=1` as the schema's owner.
#[must_use]
pub fn print() -> String {
    format!("{BEGIN};\n{}COMMIT;\n", SQL.concat())
}

/// The state of the contract in a database.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// The version of the database, if it has the contract.
    pub found: Option<i32>,
    /// The version that this program needs.
    pub needed: i32,
    /// Parts of the contract that are bound to an object outside of it, at most 20, such as `function oncegate.now_ms() uses
    /// operator public.*(numeric,integer)`. The owner of that object can act with the rights of the schema's owner. [`apply`]
    /// binds functions and defaults to the server's own objects again.
    pub foreign_bindings: Vec<String>,
}

/// Reads the state of the contract.
///
/// It changes nothing. The role needs the right to connect and to call `oncegate.contract_version`.
///
/// # Errors
/// [`PostgresOpenError::Unreachable`] if the database cannot be reached; [`PostgresOpenError::Connect`] if it refuses the
/// role, or if the schema `oncegate` was not created by Oncegate.
pub async fn status(options: &PostgresOptions) -> Result<Status, PostgresOpenError> {
    let mut connection = connect(options).await?;
    let status = look(&mut connection, options).await?;
    // An error here loses nothing.
    let _ = connection.close().await;
    Ok(status)
}

/// Brings the database to [`VERSION`] and replaces its functions, in one transaction. Returns the state from before.
///
/// Several programs may call it at the same time. An upgrade that changes a table waits for other transactions only for a
/// moment at a time, because claims wait behind it, and tries again for a minute.
///
/// # Errors
/// - [`PostgresOpenError::NewerContract`] if the database has a later version;
/// - [`PostgresOpenError::Unreachable`] if the database cannot be reached;
/// - [`PostgresOpenError::Connect`] if it refuses, or is kept locked by other transactions; nothing was changed;
/// - [`PostgresOpenError::ForeignBindings`] if a part of the contract other than a function or a default is bound to an object
///   outside of it, such as an index that was added by hand.
pub async fn apply(options: &PostgresOptions) -> Result<Status, PostgresOpenError> {
    apply_contract(options, &CURRENT).await
}

async fn apply_contract(options: &PostgresOptions, contract: &Contract) -> Result<Status, PostgresOpenError> {
    let mut connection = connect(options).await?;
    let before = look(&mut connection, options).await?;
    if let Some(found) = before.found.filter(|found| *found > contract.version) {
        return Err(PostgresOpenError::NewerContract {
            database: options.database(),
            found,
            known: contract.version,
        });
    }
    let until = Instant::now() + LOCK_TIMEOUT;
    let [first, longest] = LOCK_PAUSES;
    let mut pause = Backoff::new(first, longest);
    while let Err(error) = run(&mut connection, contract).await {
        if !is_blocked(&error) {
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
        return Err(PostgresOpenError::ForeignBindings { database, bindings });
    }
    Ok(before)
}

/// Names the foreign bindings, too: PostgreSQL replaces no function whose result type changes, so a foreign type stops the SQL.
fn not_applied(options: &PostgresOptions, error: &Error, before: &Status) -> PostgresOpenError {
    match failed(options, error) {
        PostgresOpenError::Connect { database, why } if !before.foreign_bindings.is_empty() => {
            let bindings = before.foreign_bindings.join("; ");
            let why = format!(
                "nothing was changed: {why}. Parts of the schema oncegate are bound to objects outside of it, which may be the reason: \
                 {bindings}. docs/reference/store-contract-postgres.md, under \"Search path and owner\", explains how to repair them by \
                 hand"
            );
            PostgresOpenError::Connect { database, why }
        }
        error => error,
    }
}

async fn run(connection: &mut PgConnection, contract: &Contract) -> Result<(), Error> {
    let mut transaction = connection.begin_with(BEGIN).await?;
    for part in contract.sql.iter() {
        sqlx::raw_sql(*part).execute(&mut *transaction).await?;
    }
    transaction.commit().await
}

/// Tells if another transaction blocked the SQL, so that nothing was changed.
fn is_blocked(error: &Error) -> bool {
    let Some(error) = error.as_database_error() else { return false };
    match error.code().as_deref() {
        Some("55P03" | "40P01" | "40001") => true,
        // A `GRANT` or `REVOKE` that commits at the same moment. The server has no code of its own for it, and its message is
        // in the language of `lc_messages`. The routine that raised it is the same in every language.
        Some("XX000") => error.try_downcast_ref::<PgDatabaseError>().is_some_and(|error| {
            error.routine() == Some("simple_heap_update") || error.routine() == Some("simple_heap_delete")
        }),
        _ => false,
    }
}

/// The sessions that hold a lock on a table of the contract, as far as this role may see them.
const HOLDERS: &str = "SELECT pg_catalog.string_agg(DISTINCT a.pid::pg_catalog.text, ', ') AS pids \
     FROM pg_catalog.pg_locks AS l JOIN pg_catalog.pg_class AS c ON c.oid = l.relation \
     JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace \
     JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid \
     WHERE n.nspname = 'oncegate' AND l.granted AND a.datname = pg_catalog.current_database() \
     AND a.pid <> pg_catalog.pg_backend_pid()";

async fn locked(options: &PostgresOptions, connection: &mut PgConnection) -> PostgresOpenError {
    let rows = sqlx::raw_sql(HOLDERS).fetch_all(connection).await;
    let pids = rows.ok().and_then(|rows| rows.first().and_then(|row| row.try_get::<String, _>("pids").ok()));
    let sessions = pids.map_or(String::new(), |pids| format!(" (sessions {pids} in pg_stat_activity)"));
    let why = format!(
        "nothing was changed: for a minute other transactions{sessions} kept a table locked, or another apply is running; \
         end them, or try again when fewer run"
    );
    PostgresOpenError::Connect { database: options.database(), why }
}

/// Looks for the schema and its function that returns the version. The function is called only if it runs with the rights of
/// its own owner, because another role may have created a schema with this name.
const IS_THERE: &str = "SELECT pg_catalog.bool_and(p.prosecdef) AS is_ours FROM pg_catalog.pg_proc AS p \
     JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace \
     WHERE n.nspname = 'oncegate' AND p.proname = 'contract_version'";

/// The objects outside of the schema that its parts depend on. The server tracks no dependency on its own objects, because they
/// cannot be dropped.
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

async fn look(connection: &mut PgConnection, options: &PostgresOptions) -> Result<Status, PostgresOpenError> {
    let status = read_status(connection).await.map_err(|error| failed(options, &error))?;
    status.ok_or_else(|| PostgresOpenError::Connect {
        database: options.database(),
        why: "its schema oncegate was not created by Oncegate: find out who created it".to_owned(),
    })
}

/// Returns `None` if there is a schema with this name that was not created by Oncegate.
async fn read_status(connection: &mut PgConnection) -> Result<Option<Status>, Error> {
    let mut transaction = connection.begin().await?;
    // Operators cannot be qualified conveniently, and the role may have a statement timeout that is meant for other
    // statements. Both settings end with the transaction, behind a pooler as well.
    let settings = "SET LOCAL statement_timeout = '60s'; SET LOCAL search_path = pg_catalog, pg_temp";
    sqlx::raw_sql(settings).execute(&mut *transaction).await?;
    let mut status = Status { found: None, needed: VERSION, foreign_bindings: Vec::new() };
    // Read from the catalog tables: the session may have cached that the schema does not exist.
    let rows = sqlx::raw_sql(IS_THERE).fetch_all(&mut *transaction).await?;
    match rows.first().map(|row| row.try_get::<Option<bool>, _>("is_ours")).transpose()?.flatten() {
        None => return Ok(Some(status)),
        Some(false) => return Ok(None),
        Some(true) => {}
    }
    let rows =
        sqlx::raw_sql("SELECT oncegate.contract_version() AS version").fetch_all(&mut *transaction).await?;
    // Without a version, the schema is there and incomplete.
    status.found = rows.first().map(|row| row.try_get("version")).transpose()?.flatten().or(Some(0));
    for row in sqlx::raw_sql(FOREIGN_BINDINGS).fetch_all(&mut *transaction).await? {
        status.foreign_bindings.push(row.try_get("binding")?);
    }
    transaction.rollback().await?;
    Ok(Some(status))
}

async fn connect(options: &PostgresOptions) -> Result<PgConnection, PostgresOpenError> {
    let connect: PgConnectOptions = options.bare_connect_options();
    match tokio::time::timeout(options.connect_timeout, connect.connect()).await {
        Ok(connected) => connected.map_err(|error| match failed(options, &error) {
            PostgresOpenError::Connect { database, why } if is_passing(&error) => {
                PostgresOpenError::Unreachable { database, why }
            }
            failed => failed,
        }),
        Err(_) => Err(PostgresOpenError::Unreachable {
            database: options.database(),
            why: "no reply within the connect timeout".to_owned(),
        }),
    }
}

fn failed(options: &PostgresOptions, error: &Error) -> PostgresOpenError {
    // The statements are the owner's own, so the messages contain no data of other roles.
    let why = match error {
        Error::Database(error) => error.message().to_owned(),
        other => describe(other),
    };
    PostgresOpenError::Connect { database: options.database(), why }
}

#[cfg(test)]
mod tests;
