//! Why a store does not open, and what an error of the database means to a caller.

use std::fmt;
use std::io::ErrorKind;

use oncegate_core::{ErrorChain, Extent, StoreError};
use sqlx::Error;
use sqlx::error::DatabaseError;

/// Why a store does not open. Its `Display` is a sentence for whoever runs the program, without the URL's password.
#[derive(Debug)]
#[non_exhaustive]
pub enum PostgresOpenError {
    /// The URL is not one, or has a part that is not known. Its text is not repeated: there may be a password in it.
    Url(String),
    /// The database cannot be reached, or does not answer. Trying again may help.
    Unreachable {
        /// Which database.
        database: String,
        /// Why, in words.
        why: String,
    },
    /// The database refuses.
    Connect {
        /// Which database.
        database: String,
        /// Why, in words.
        why: String,
    },
    /// The database has no contract, or an older one.
    NoContract {
        /// Which database.
        database: String,
        /// Its version, where there is one.
        found: Option<i32>,
        /// The version that this program needs.
        needed: i32,
    },
    /// The database has a newer contract than this program knows.
    NewerContract {
        /// Which database.
        database: String,
        /// Its version.
        found: i32,
        /// The version that this program knows.
        known: i32,
    },
    /// Parts of the contract are bound to objects outside of it, whose owners act with the rights of the schema's owner.
    ForeignBindings {
        /// Which database.
        database: String,
        /// Which part is bound to which object, 20 at most.
        bindings: Vec<String>,
    },
    /// It is a standby, which takes no writes.
    Standby {
        /// Which database.
        database: String,
    },
}

impl fmt::Display for PostgresOpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Url(what) => f.write_str(what),
            Self::Unreachable { database, why } | Self::Connect { database, why } => {
                write!(f, "{database} cannot be used: {why}")
            }
            Self::NoContract { database, found: None, .. } => write!(
                f,
                "{database} has no Oncegate schema, or this role may not use it; run `oncegate schema apply postgres \
                 --url URL` as the database's owner, and grant the role what docs/reference/store-contract-postgres.md says"
            ),
            Self::NoContract { database, found: Some(found), needed } => write!(
                f,
                "{database} has version {found} of the contract, and this program needs {needed}; run `oncegate schema \
                 apply postgres --url URL`"
            ),
            Self::NewerContract { database, found, known } => write!(
                f,
                "{database} has version {found} of the contract, and this program knows versions up to {known}; upgrade \
                 this program"
            ),
            Self::ForeignBindings { database, bindings } => write!(
                f,
                "{database}: parts of the schema oncegate are bound to objects outside of it, whose owners act with the rights of \
                 the schema's owner: {}. Find out who made these objects. `oncegate schema apply postgres` binds functions and \
                 defaults to the server's own; what it names afterwards is mended by hand, as docs/reference/\
                 store-contract-postgres.md says under \"Search path and owner\"",
                bindings.join("; ")
            ),
            Self::Standby { database } => {
                write!(f, "{database} is a standby, which takes no writes; give the primary")
            }
        }
    }
}

impl std::error::Error for PostgresOpenError {}

/// Whether the connection is gone or at its end, so that another one is needed.
pub(crate) fn is_lost(error: &Error) -> bool {
    match error {
        Error::Io(_) | Error::Tls(_) | Error::Protocol(_) => true,
        // Admin shutdown, crash shutdown, idle session timed out, and the conflicts that SQL says to try again.
        Error::Database(error) => {
            matches!(code(&**error).as_str(), "57P01" | "57P02" | "57P05" | "25006" | "40001" | "40P01")
        }
        _ => false,
    }
}

/// Whether the server has certainly not carried out a statement for whose connection [`is_lost`] holds, so that it can be
/// sent again whatever it was: it is a standby, the session was idle for too long, or the transaction was in conflict with
/// another one.
pub(crate) fn is_undone(error: &Error) -> bool {
    matches!(error, Error::Database(error) if matches!(code(&**error).as_str(), "25006" | "57P05" | "40001" | "40P01"))
}

fn code(error: &dyn DatabaseError) -> String {
    error.code().map(std::borrow::Cow::into_owned).unwrap_or_default()
}

/// In words that hold nothing of what was sent: the server's own may quote it.
pub(crate) fn describe(error: &Error) -> String {
    match error {
        Error::Database(error) => {
            let code = code(&**error);
            if code == "08P01" && error.message().contains("startup parameter") {
                return "a pooler between here and PostgreSQL takes no settings; add pooler=transaction to the URL"
                    .to_owned();
            }
            match code.get(..2) {
                // About the connection, the role, the database and the server's resources; never about data.
                Some("08" | "28" | "3D" | "53" | "57" | "58") => {
                    format!("PostgreSQL says: {} (SQLSTATE {code})", error.message())
                }
                _ if code == "42501" => format!(
                    "the role may not do this (SQLSTATE {code}): what it needs stands under \"Grants\" in docs/reference"
                ),
                _ if matches!(code.as_str(), "3F000" | "42883") => format!(
                    "a schema or a function is missing (SQLSTATE {code}): is Oncegate's in this database, and new enough? \
                     `oncegate schema` says so, and applies it"
                ),
                _ => format!("PostgreSQL refuses with SQLSTATE {code}"),
            }
        }
        // Only a file can be missing: of TLS, or the socket of a server on this machine.
        Error::Io(error) if error.kind() == ErrorKind::NotFound => format!(
            "no connection to PostgreSQL: a file is missing, which is that of sslrootcert, sslcert or sslkey, or the server's \
             socket: {}",
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
        Error::Configuration(_) => "the settings of the connection do not fit".to_owned(),
        Error::ColumnDecode { .. } | Error::ColumnNotFound(_) | Error::Decode(_) | Error::RowNotFound => {
            "PostgreSQL gave an answer that is not that of the contract".to_owned()
        }
        _ => "the call of PostgreSQL failed".to_owned(),
    }
}

/// How much of the store does not work where the server says this.
fn extent(code: &str) -> Extent {
    match code {
        // The disk is full; the transaction may only read. The contract answers what changes nothing all the same.
        "53100" | "25006" => Extent::Writes,
        // Another transaction was in the way, or the session was ended: others were not.
        "40001" | "40P01" | "55P03" | "57P05" => Extent::Record,
        _ => Extent::Store,
    }
}

/// What a caller can do about an error, in words that hold nothing of what was sent.
#[must_use]
pub fn store_error(error: &Error) -> StoreError {
    let words = describe(error);
    match error {
        Error::Database(error) => {
            let code = code(&**error);
            match code.get(..2) {
                Some("22" | "23" | "42" | "3F" | "0A") => StoreError::invalid(words),
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
