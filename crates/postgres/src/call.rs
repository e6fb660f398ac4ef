//! Calls of functions of the contract: as prepared statements, or as one message without preparation.

use std::fmt::Write as _;

use bytes::Bytes;
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Error};

/// A statement with its arguments. `$1` to `$n`, each once and in order.
#[derive(Clone)]
pub(crate) struct Call {
    sql: &'static str,
    args: Vec<Arg>,
}

/// The argument of a statement. There is no other kind, so text is never a part of a statement.
#[derive(Clone)]
pub(crate) enum Arg {
    Bytes(Bytes),
    NoBytes,
    Big(i64),
    NoBig,
    Small(i32),
    Flag(bool),
    Text(String),
    NoText,
    ManyBytes(Vec<Option<Vec<u8>>>),
    ManyBig(Vec<i64>),
    ManyText(Vec<String>),
    NoManyText,
}

impl Call {
    pub(crate) fn new(sql: &'static str, args: impl IntoIterator<Item = Arg>) -> Self {
        Self { sql, args: args.into_iter().collect() }
    }

    /// Sends the call in one round trip. The first call on a connection takes one more, to prepare the statement.
    pub(crate) async fn prepared(self, connection: &mut PgConnection) -> Result<Vec<PgRow>, Error> {
        self.in_transaction(connection, true).await
    }

    /// As [`Call::prepared`]. If the statement is not `persistent`, it is prepared without a name each time, which takes two
    /// round trips and, behind a pooler, an open transaction.
    pub(crate) async fn in_transaction(
        self,
        connection: &mut PgConnection,
        persistent: bool,
    ) -> Result<Vec<PgRow>, Error> {
        let mut query = sqlx::query(self.sql).persistent(persistent);
        for arg in self.args {
            query = match arg {
                Arg::Bytes(bytes) => query.bind(bytes.to_vec()),
                Arg::NoBytes => query.bind(None::<Vec<u8>>),
                Arg::Big(number) => query.bind(number),
                Arg::NoBig => query.bind(None::<i64>),
                Arg::Small(number) => query.bind(number),
                Arg::Flag(flag) => query.bind(flag),
                Arg::Text(text) => query.bind(text),
                Arg::NoText => query.bind(None::<String>),
                Arg::ManyBytes(list) => query.bind(list),
                Arg::ManyBig(list) => query.bind(list),
                Arg::ManyText(list) => query.bind(list),
                Arg::NoManyText => query.bind(None::<Vec<String>>),
            };
        }
        query.fetch_all(connection).await
    }

    /// Sends the call as one message of the simple protocol, in one round trip; nothing outlives the transaction.
    ///
    /// The whole message is one transaction at READ COMMITTED, whatever the default of the role or the database is: above that
    /// level, a call fails or sees an old snapshot. Replies in this protocol are text, and bytes in them are hexadecimal,
    /// whatever the default is.
    pub(crate) async fn in_one_message(self, connection: &mut PgConnection) -> Result<Vec<PgRow>, Error> {
        let sql = format!(
            "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SET LOCAL bytea_output = hex; {}",
            self.written_out()
        );
        // All input is in here as hexadecimal digits only.
        sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(connection).await
    }

    fn written_out(&self) -> String {
        let mut sql = String::with_capacity(self.sql.len() + 64 * self.args.len());
        let mut args = self.args.iter();
        let mut rest = self.sql;
        while let Some((before, after)) = rest.split_once('$') {
            sql.push_str(before);
            if let Some(arg) = args.next() {
                arg.write_out(&mut sql);
            }
            rest = after.trim_start_matches(|c: char| c.is_ascii_digit());
        }
        sql.push_str(rest);
        sql
    }
}

impl Arg {
    fn write_out(&self, to: &mut String) {
        // Writing to a string cannot fail.
        let _ = match self {
            Self::Bytes(bytes) => return write_bytes(bytes, to),
            Self::NoBytes => write!(to, "null::bytea"),
            Self::Big(number) => write!(to, "({number}::bigint)"),
            Self::NoBig => write!(to, "null::bigint"),
            Self::Small(number) => write!(to, "({number}::integer)"),
            Self::Flag(flag) => write!(to, "{flag}"),
            Self::Text(text) => return write_text(text, to),
            Self::NoText => write!(to, "null::text"),
            Self::NoManyText => write!(to, "null::text[]"),
            Self::ManyBytes(list) => {
                return write_list(list, "bytea", to, |bytes, to| match bytes {
                    Some(bytes) => write_bytes(bytes, to),
                    None => to.push_str("null"),
                });
            }
            Self::ManyBig(list) => {
                return write_list(list, "bigint", to, |number, to| {
                    let _ = write!(to, "{number}");
                });
            }
            Self::ManyText(list) => return write_list(list, "text", to, |text, to| write_text(text, to)),
        };
    }
}

fn write_bytes(bytes: &[u8], to: &mut String) {
    to.push_str("pg_catalog.decode('");
    for byte in bytes {
        for digit in [byte >> 4, byte & 15] {
            to.push(char::from_digit(digit.into(), 16).unwrap_or('0'));
        }
    }
    to.push_str("','hex')");
}

/// Names the server's function: behind a pooler the search path is that of the role, and another schema may have a function of
/// this name whose arguments fit better.
fn write_text(text: &str, to: &mut String) {
    to.push_str("pg_catalog.convert_from(");
    write_bytes(text.as_bytes(), to);
    to.push_str(",'UTF8')");
}

fn write_list<T>(list: &[T], of: &str, to: &mut String, mut write_one: impl FnMut(&T, &mut String)) {
    to.push_str("array[");
    for (number, item) in list.iter().enumerate() {
        if number > 0 {
            to.push(',');
        }
        write_one(item, to);
    }
    to.push_str("]::");
    to.push_str(of);
    to.push_str("[]");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_is_written_as_digits() {
        let call = Call::new(
            "SELECT * FROM f($1, $2, $3, $4, $5)",
            [
                Arg::Bytes(Bytes::from_static(b"\x00'\xff")),
                Arg::Text("'); DROP".to_owned()),
                Arg::Big(-1),
                Arg::ManyBytes(vec![None, Some(vec![1])]),
                Arg::ManyText(vec!["$1".to_owned()]),
            ],
        );
        assert_eq!(
            call.written_out(),
            "SELECT * FROM f(pg_catalog.decode('0027ff','hex'), \
             pg_catalog.convert_from(pg_catalog.decode('27293b2044524f50','hex'),'UTF8'), (-1::bigint), \
             array[null,pg_catalog.decode('01','hex')]::bytea[], \
             array[pg_catalog.convert_from(pg_catalog.decode('2431','hex'),'UTF8')]::text[])"
        );
    }
}
