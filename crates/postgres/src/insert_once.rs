//! Rows that are inserted once, by their own unique key.

use sqlx::postgres::{PgArguments, PgConnection, PgRow};
use sqlx::query::QueryAs;
use sqlx::{FromRow, Postgres};

/// The number of attempts if the row is deleted between insert and look each time.
const MAX_ATTEMPTS: u32 = 8;

/// A statement with bound values, whose rows are read as `R`.
pub type Statement<'q, R> = QueryAs<'q, Postgres, R, PgArguments>;

/// A row, inserted now or found. Both variants have one type, so that a retry is answered like the first request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InsertOutcome<R> {
    /// This call inserted it.
    Created(R),
    /// The row existed already.
    Existing(R),
}

impl<R> InsertOutcome<R> {
    /// The row.
    pub fn into_inner(self) -> R {
        match self {
            Self::Created(row) | Self::Existing(row) => row,
        }
    }

    /// Tells if this call inserted the row.
    #[must_use]
    pub const fn is_created(&self) -> bool {
        matches!(self, Self::Created(_))
    }
}

/// An error of [`insert_once`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InsertError {
    /// The insert met a row, and the look did not find it, eight times. Either another transaction deletes it each time, or
    /// the two statements are about different rows.
    #[error(
        "the insert met a row that the look did not find: another transaction deletes it each time, or the two statements \
         are about different rows"
    )]
    Vanished,
    /// The database is out of reach, or refuses.
    #[error("the database did not insert or find the row")]
    Database(#[from] sqlx::Error),
}

/// Inserts a row, or returns the existing one.
///
/// `insert` ends with `ON CONFLICT … DO NOTHING RETURNING …`. `existing` selects the row by the same unique key and returns the
/// same columns. Values are bound and never part of a statement.
///
/// ```
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = oncegate_servers::PostgresServer::start()?;
/// use oncegate_postgres::{InsertOutcome, insert_once, sqlx};
/// use sqlx::Connection as _;
///
/// let mut connection = sqlx::PgConnection::connect(&server.url()).await?;
/// sqlx::query("CREATE TABLE orders (id bigserial, customer text, cart text, UNIQUE (customer, cart))")
///     .execute(&mut connection)
///     .await?;
///
/// let mut order = async |customer: &str, cart: &str| {
///     let insert = "INSERT INTO orders (customer, cart) VALUES ($1, $2)
///                   ON CONFLICT (customer, cart) DO NOTHING RETURNING id";
///     let existing = "SELECT id FROM orders WHERE customer = $1 AND cart = $2";
///     insert_once::<(i64,)>(
///         &mut connection,
///         || sqlx::query_as(insert).bind(customer.to_owned()).bind(cart.to_owned()),
///         || sqlx::query_as(existing).bind(customer.to_owned()).bind(cart.to_owned()),
///     )
///     .await
/// };
/// assert_eq!(order("ada", "cart-7").await?, InsertOutcome::Created((1,)));
/// assert_eq!(order("ada", "cart-7").await?, InsertOutcome::Existing((1,)));
/// # Ok(()) }
/// ```
///
/// # Concurrent transactions
/// If another open transaction has inserted the same key, the insert waits until that transaction ends. To bound the wait, run
/// `SET LOCAL lock_timeout = '2s'` first; the insert then fails with SQLSTATE 55P03. (The claim of
/// [`Transactor::transact`](crate::Transactor::transact) never waits; this function is for tables without records.)
///
/// At READ COMMITTED the look sees the row that the insert met. If that row was deleted in between, both are tried again, at
/// most eight times. Above that level, a row that was committed after the snapshot of the transaction is SQLSTATE 40001: run
/// the transaction again, as `transact` does.
///
/// # Errors
/// [`InsertError`]. An insert without `ON CONFLICT` fails with the database's own error if the key exists.
pub async fn insert_once<'q, R>(
    connection: &mut PgConnection,
    insert: impl Fn() -> Statement<'q, R>,
    existing: impl Fn() -> Statement<'q, R>,
) -> Result<InsertOutcome<R>, InsertError>
where
    R: for<'r> FromRow<'r, PgRow> + Send + Unpin,
{
    for _ in 0..MAX_ATTEMPTS {
        if let Some(row) = insert().fetch_optional(&mut *connection).await? {
            return Ok(InsertOutcome::Created(row));
        }
        if let Some(row) = existing().fetch_optional(&mut *connection).await? {
            return Ok(InsertOutcome::Existing(row));
        }
    }
    Err(InsertError::Vanished)
}
