//! Errors of opening a store, and the meaning of database errors for callers.

use std::io::ErrorKind;

use oncegate_core::{ErrorChain, Extent, StoreError};
use sqlx::Error;
use sqlx::error::DatabaseError;

/// An error of opening a store. Its `Display` is a sentence for operators, without the password of the URL.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostgresOpenError {
    /// The URL is invalid or has an unknown part. Its text is not repeated, because it may contain a password.
    #[error("{0}")]
    Url(String),
    /// The database cannot be reached or does not answer. Trying again may help.
    #[error("{database} cannot be used: {why}")]
    Unreachable {
        /// The database, as [`PostgresOptions::database`](crate::PostgresOptions::database) names it.
        database: String,
        /// The reason.
        why: String,
    },
    /// The database refuses.
    #[error("{database} cannot be used: {why}")]
    Connect {
        /// The database.
        database: String,
        /// The reason.
        why: String,
    },
    /// The database has no contract, or an older one.
    #[error("{}", no_contract(database, *.found, *.needed))]
    NoContract {
        /// The database.
        database: String,
        /// The version of the database, if it has one.
        found: Option<i32>,
        /// The version that this program needs.
        needed: i32,
    },
    /// The contract in the database is newer than this program.
    #[error(
        "the schema of {database} is version {found}, and this program knows versions up to {known}; upgrade this program"
    )]
    NewerContract {
        /// The database.
        database: String,
        /// The version of the database.
        found: i32,
        /// The version that this program knows.
        known: i32,
    },
    /// Parts of the contract are bound to objects outside of it. The owners of these objects act with the rights of the
    /// schema's owner.
    #[error(
        "{database}: parts of the schema oncegate are bound to objects outside of it, whose owners act with the rights of \
         the schema's owner: {}. Find out who created these objects. `oncegate schema apply postgres` binds functions \
         and defaults to the server's own. If you just ran it, repair by hand what is named here, as docs/reference/\
         store-contract-postgres.md says under \"Search path and owner\"",
        .bindings.join("; ")
    )]
    ForeignBindings {
        /// The database.
        database: String,
        /// The parts and the objects that they are bound to, at most 20.
        bindings: Vec<String>,
    },
    /// The database is a standby, which takes no writes.
    #[error("{database} is a standby, which takes no writes; use the URL of the primary")]
    Standby {
        /// The database.
        database: String,
    },
}

fn no_contract(database: &str, found: Option<i32>, needed: i32) -> String {
    match found {
        None => format!(
            "{database} has no schema oncegate, or this role may not use it; run `oncegate schema apply postgres --url URL` as the \
             database's owner, and give the role the grants in docs/reference/store-contract-postgres.md"
        ),
        Some(found) => format!(
            "the schema of {database} is version {found}, and this program needs version {needed}; run `oncegate schema apply \
             postgres --url URL`"
        ),
    }
}

/// Tells if the connection is gone or about to end, so that the store needs another one.
pub(crate) fn is_lost(error: &Error) -> bool {
    match error {
        Error::Io(_) | Error::Tls(_) | Error::Protocol(_) => true,
        // Admin shutdown, crash shutdown, idle session timeout, and the conflicts that SQL allows to be tried again.
        Error::Database(error) => {
            matches!(code(&**error).as_str(), "57P01" | "57P02" | "57P05" | "25006" | "40001" | "40P01")
        }
        _ => false,
    }
}

/// Tells if the server has certainly not carried out a statement whose connection [`is_lost`]: it is a standby, the session
/// was idle for too long, or the transaction had a conflict. Any such statement can be sent again.
pub(crate) fn is_undone(error: &Error) -> bool {
    matches!(error, Error::Database(error) if matches!(code(&**error).as_str(), "25006" | "57P05" | "40001" | "40P01"))
}

fn code(error: &dyn DatabaseError) -> String {
    error.code().map(std::borrow::Cow::into_owned).unwrap_or_default()
}

/// Describes an error without anything that was sent. The texts of the server may quote it.
pub(crate) fn describe(error: &Error) -> String {
    match error {
        Error::Database(error) => {
            let code = code(&**error);
            if code == "08P01" && error.message().contains("startup parameter") {
                return "a pooler before PostgreSQL takes no settings; add pooler=transaction to the URL"
                    .to_owned();
            }
            let is_mixed = code == "08P01" && error.message().contains("bind message supplies");
            if is_mixed || matches!(code.as_str(), "42P05" | "26000") {
                return format!(
                    "a pooler before PostgreSQL mixes the prepared statements of its clients (SQLSTATE {code}); add \
                     pooler=transaction to the URL"
                );
            }
            match code.get(..2) {
                // These are about the connection, the role, the database and the server's resources; never about data.
                Some("08" | "28" | "3D" | "53" | "57" | "58") => {
                    format!("PostgreSQL: {} (SQLSTATE {code})", error.message())
                }
                _ if code == "42501" => format!(
                    "the role lacks a right (SQLSTATE {code}): see \"Grants\" in docs/reference/store-contract-postgres.md"
                ),
                _ if matches!(code.as_str(), "3F000" | "42883" | "42P01" | "42704") => format!(
                    "a schema, a table or a function is missing (SQLSTATE {code}): run `oncegate schema apply postgres --url URL`"
                ),
                _ if code == "OG003" => "the record in PostgreSQL cannot be read: it is damaged, or was written by a newer program \
                                         (SQLSTATE OG003)"
                    .to_owned(),
                _ => format!("PostgreSQL refuses with SQLSTATE {code}"),
            }
        }
        // Only a file can be missing: one for TLS, or the socket of a local server.
        Error::Io(error) if error.kind() == ErrorKind::NotFound => format!(
            "no connection to PostgreSQL: the file of sslrootcert, sslcert or sslkey, or the server's socket, does not exist: {}",
            ErrorChain(&error)
        ),
        Error::Io(error) => format!("no connection to PostgreSQL: {}", ErrorChain(&error)),
        Error::Tls(error) => format!("no TLS with PostgreSQL: {}", ErrorChain(&**error)),
        Error::PoolTimedOut => {
            "no connection to PostgreSQL in time: it cannot be reached, or all connections are in use"
                .to_owned()
        }
        Error::PoolClosed => "the store is closed".to_owned(),
        Error::Protocol(_) => "PostgreSQL answered out of order".to_owned(),
        Error::Configuration(_) => "the settings of the connection are invalid".to_owned(),
        Error::ColumnDecode { .. } | Error::ColumnNotFound(_) | Error::Decode(_) | Error::RowNotFound => {
            "the reply of PostgreSQL is not one of the contract".to_owned()
        }
        _ => "the call of PostgreSQL failed".to_owned(),
    }
}

/// Returns the part of the store that this SQLSTATE concerns.
fn extent(code: &str) -> Extent {
    match code {
        // The disk is full, or the transaction is read-only. The contract still answers calls that change nothing.
        "53100" | "25006" => Extent::Writes,
        // A conflict with another transaction, or the end of this session: other records are not affected.
        "40001" | "40P01" | "55P03" | "57P05" => Extent::Record,
        _ => Extent::Store,
    }
}

/// Converts an error for callers. The text contains nothing that was sent.
///
/// A missing right, function or table (classes 42, 3F, 0A and 26) is an error that may pass: an operator renews the grants,
/// repairs the schema or adds a pooler while programs run. An attempt that ends meanwhile must not give its end up.
#[must_use]
pub fn store_error(error: &Error) -> StoreError {
    let words = describe(error);
    match error {
        Error::Database(error) => {
            let code = code(&**error);
            match code.get(..2) {
                Some("22" | "23") => StoreError::invalid(words),
                Some("XX") if code != "XX000" => StoreError::corrupt(words),
                _ if code == "OG003" => StoreError::corrupt(words),
                _ => StoreError::unavailable(words).with_extent(extent(&code)),
            }
        }
        Error::ColumnDecode { .. } | Error::ColumnNotFound(_) | Error::Decode(_) | Error::RowNotFound => {
            StoreError::invalid(words)
        }
        _ => StoreError::unavailable(words),
    }
}
