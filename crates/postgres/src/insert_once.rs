//! A row that is inserted once, by its own unique key: the last line of defence, and often the first.

use std::fmt;

use sqlx::postgres::{PgArguments, PgConnection, PgRow};
use sqlx::query::QueryAs;
use sqlx::{FromRow, Postgres};

/// How often insert and look are tried where the row is deleted each time in between.
const TRIES: u32 = 8;

/// A statement of the caller's with its values bound, whose rows are read as `R`.
pub type Statement<'q, R> = QueryAs<'q, Postgres, R, PgArguments>;

/// A row, and whether it was there before. The same shape for both, so that a retry is answered like the first request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InsertOutcome<R> {
    /// This call inserted it.
    Created(R),
    /// It was there.
    Existing(R),
}

impl<R> InsertOutcome<R> {
    /// The row.
    pub fn into_inner(self) -> R {
        match self {
            Self::Created(row) | Self::Existing(row) => row,
        }
    }

    /// Whether this call inserted it.
    #[must_use]
    pub const fn is_created(&self) -> bool {
        matches!(self, Self::Created(_))
    }
}

/// Why there is no row.
#[derive(Debug)]
#[non_exhaustive]
pub enum InsertError {
    /// The insert met a row, and the look did not find it, eight times: either somebody deletes it each time, or the two
    /// statements do not speak of the same row.
    Vanished,
    /// The database is out of reach, or refuses.
    Database(sqlx::Error),
}

impl fmt::Display for InsertError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vanished => f.write_str(
                "the insert met a row that the look did not find: it is deleted each time, or the two statements do not speak \
                 of the same row",
            ),
            Self::Database(_) => f.write_str("the database did not insert or find the row"),
        }
    }
}

impl std::error::Error for InsertError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Vanished => None,
            Self::Database(error) => Some(error),
        }
    }
}

impl From<sqlx::Error> for InsertError {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(error)
    }
}

/// Inserts a row, or gives the one that is there.
///
/// `insert` ends with `ON CONFLICT … DO NOTHING RETURNING …`, `existing` looks for the row by the same unique key and gives
/// the same columns. Values are bound and never part of a statement.
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
/// # What others do meanwhile
/// Where another transaction has inserted the same key and is still open, the insert waits for its end: for as long as it takes
/// and no longer. Whoever would rather give up says `SET LOCAL lock_timeout = '2s'` before, and gets SQLSTATE 55P03. (The claim
/// of [`Transactor::transact`](crate::Transactor::transact) never waits; this is for tables that have no record beside them.)
///
/// At READ COMMITTED the look sees what the insert met. Where it was deleted in between, both are tried again, eight times at
/// the most. Above that level, a row that was committed after the snapshot of the transaction is SQLSTATE 40001: run the
/// transaction again, as `transact` does.
///
/// # Errors
/// [`InsertError`]. Without `ON CONFLICT` the database's own, for a key that is there.
pub async fn insert_once<'q, R>(
    connection: &mut PgConnection,
    insert: impl Fn() -> Statement<'q, R>,
    existing: impl Fn() -> Statement<'q, R>,
) -> Result<InsertOutcome<R>, InsertError>
where
    R: for<'r> FromRow<'r, PgRow> + Send + Unpin,
{
    for _ in 0..TRIES {
        if let Some(row) = insert().fetch_optional(&mut *connection).await? {
            return Ok(InsertOutcome::Created(row));
        }
        if let Some(row) = existing().fetch_optional(&mut *connection).await? {
            return Ok(InsertOutcome::Existing(row));
        }
    }
    Err(InsertError::Vanished)
}
