//! Rows with a version, which an update has to match.

use std::num::NonZeroU32;
use std::time::Duration;

use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{Error, FromRow};

use crate::backoff::Backoff;
use crate::insert_once::Statement;

/// The first and the longest pause between tries.
const PAUSES: [Duration; 2] = [Duration::from_millis(2), Duration::from_millis(100)];

/// The result of changing a row with a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "only `Updated` changed anything"]
pub enum UpdateOutcome<R> {
    /// Changed; the row as it is now.
    Updated(R),
    /// The caller wanted no change; the row as it was read.
    Unchanged(R),
    /// Another update was faster; the row as it was last read.
    Conflict(R),
    /// There is no such row.
    NotFound,
}

/// Changes a row if it still has the version that the caller saw, such as that of an `If-Match`. It is tried once.
///
/// `update` is `UPDATE … SET …, version = version + 1 WHERE id = … AND version = … RETURNING …`. `current` selects the row by
/// its identifier alone, and returns the same columns. That second look tells a conflict from a missing row, so under load a
/// conflict may come with a newer row than the one that caused it.
///
/// ```
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = oncegate_servers::PostgresServer::start()?;
/// use oncegate_postgres::{UpdateOutcome, sqlx, update_version};
/// use sqlx::Connection as _;
///
/// let mut connection = sqlx::PgConnection::connect(&server.url()).await?;
/// sqlx::raw_sql("CREATE TABLE accounts (id bigint, cents bigint, version bigint); INSERT INTO accounts VALUES (1, 500, 1)")
///     .execute(&mut connection)
///     .await?;
///
/// let mut set = async |id: i64, cents: i64, version: i64| {
///     let update = "UPDATE accounts SET cents = $2, version = version + 1 WHERE id = $1 AND version = $3 RETURNING cents, version";
///     let current = "SELECT cents, version FROM accounts WHERE id = $1";
///     update_version::<(i64, i64)>(
///         &mut connection,
///         || sqlx::query_as(update).bind(id).bind(cents).bind(version),
///         || sqlx::query_as(current).bind(id),
///     )
///     .await
/// };
/// assert_eq!(set(1, 400, 1).await?, UpdateOutcome::Updated((400, 2)));
/// assert_eq!(set(1, 300, 1).await?, UpdateOutcome::Conflict((400, 2)));
/// assert_eq!(set(9, 300, 1).await?, UpdateOutcome::NotFound);
/// # Ok(()) }
/// ```
///
/// # Errors
/// The errors of the database. Above READ COMMITTED, a conflict with a transaction that committed after the snapshot is
/// SQLSTATE 40001.
pub async fn update_version<'q, R>(
    connection: &mut PgConnection,
    update: impl Fn() -> Statement<'q, R>,
    current: impl Fn() -> Statement<'q, R>,
) -> Result<UpdateOutcome<R>, Error>
where
    R: for<'r> FromRow<'r, PgRow> + Send + Unpin,
{
    if let Some(row) = update().fetch_optional(&mut *connection).await? {
        return Ok(UpdateOutcome::Updated(row));
    }
    Ok(current().fetch_optional(connection).await?.map_or(UpdateOutcome::NotFound, UpdateOutcome::Conflict))
}

/// Reads a row and changes it. If another update was faster, it tries again, at most `max_attempts` times in total, with
/// growing random pauses.
///
/// `read` selects the row. `change` returns the `UPDATE … WHERE id = … AND version = … RETURNING …` for the row as it was
/// read, or `None` to change nothing.
///
/// It works outside of a transaction, and inside one at READ COMMITTED, whose locks it then keeps while it pauses. Above that
/// level the database itself fails with SQLSTATE 40001, and the transaction has to be run again.
///
/// ```
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = oncegate_servers::PostgresServer::start()?;
/// # use std::num::NonZeroU32;
/// # use oncegate_postgres::{UpdateOutcome, sqlx, update_latest};
/// # use sqlx::Connection as _;
/// # let mut connection = sqlx::PgConnection::connect(&server.url()).await?;
/// # sqlx::raw_sql("CREATE TABLE accounts (id bigint, cents bigint, version bigint); INSERT INTO accounts VALUES (1, 500, 1)")
/// #     .execute(&mut connection).await?;
/// let withdraw = update_latest::<(i64, i64)>(
///     &mut connection,
///     NonZeroU32::new(5).expect("it is not 0"),
///     || sqlx::query_as("SELECT cents, version FROM accounts WHERE id = $1").bind(1_i64),
///     |(cents, version)| {
///         let update = "UPDATE accounts SET cents = $2, version = version + 1 WHERE id = $1 AND version = $3 \
///                       RETURNING cents, version";
///         (*cents >= 100).then(|| sqlx::query_as(update).bind(1_i64).bind(cents - 100).bind(*version))
///     },
/// );
/// assert_eq!(withdraw.await?, UpdateOutcome::Updated((400, 2)));
/// # Ok(()) }
/// ```
///
/// # Errors
/// The errors of the database.
pub async fn update_latest<'q, R>(
    connection: &mut PgConnection,
    max_attempts: NonZeroU32,
    read: impl Fn() -> Statement<'q, R>,
    change: impl Fn(&R) -> Option<Statement<'q, R>>,
) -> Result<UpdateOutcome<R>, Error>
where
    R: for<'r> FromRow<'r, PgRow> + Send + Unpin,
{
    let [first, longest] = PAUSES;
    let mut pause = Backoff::new(first, longest);
    let mut attempts_left = max_attempts.get();
    loop {
        let Some(row) = read().fetch_optional(&mut *connection).await? else {
            return Ok(UpdateOutcome::NotFound);
        };
        let Some(update) = change(&row) else { return Ok(UpdateOutcome::Unchanged(row)) };
        if let Some(row) = update.fetch_optional(&mut *connection).await? {
            return Ok(UpdateOutcome::Updated(row));
        }
        attempts_left -= 1;
        if attempts_left == 0 {
            return Ok(UpdateOutcome::Conflict(row));
        }
        pause.sleep(None).await;
    }
}
