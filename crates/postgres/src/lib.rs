//! The PostgreSQL store of Oncegate, and the contract that other languages call without it.
//!
//! ```
//! # use std::time::Duration;
//! use oncegate_core::{AttemptId, Claim, Command, Fingerprint, Label, OnAbandoned, Outcome, RecordId, Store};
//! use oncegate_postgres::{PostgresOpenError, PostgresOptions, PostgresStore, schema};
//!
//! # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let server = oncegate_servers::PostgresServer::start()?;
//! # let url = server.url();
//! let options = PostgresOptions::from_url(&url)?; // postgres://USER:PASSWORD@HOST/DATABASE?sslmode=verify-full
//!
//! // A database without the contract is refused.
//! let error = PostgresStore::open(options.clone()).await.unwrap_err();
//! assert!(matches!(error, PostgresOpenError::NoContract { found: None, .. }));
//! schema::apply(&options).await?; // as `oncegate schema apply postgres` does
//! let store = PostgresStore::open(options).await?;
//!
//! let claim = |attempt| Command::Claim(Claim {
//!     attempt: AttemptId::new(attempt),
//!     fingerprint: Fingerprint::of_parts("example", &[b"pay 5"]),
//!     lease: Duration::from_secs(30),
//!     retention: Duration::from_secs(86_400),
//!     on_abandoned: OnAbandoned::Park,
//!     label: Label::default(),
//! });
//! let id = RecordId::from_bytes([7; 32]);
//! assert!(matches!(store.apply(id, claim(1)).await?, Outcome::Execute(_)));
//! assert!(matches!(store.apply(id, claim(2)).await?, Outcome::InProgress { .. }));
//! # Ok(()) }
//! ```
//!
//! The contract, with every function, outcome and SQLSTATE, is `docs/reference/store-contract-postgres.md`.
//!
//! # Exactly-once effects in your own tables
//! [`Transactor::transact`] runs a business transaction once per key: claim, rows and result are committed together. [`Guard`]
//! completes a record in a transaction that the application keeps itself. The application, the layer or a sidecar may have
//! claimed that record. `docs/reference/transactions.md` compares them.
//!
//! # Promises of the store
//!
//! 1. Each command is one call of one function in one transaction. The functions translate
//!    [`decide`](oncegate_core::decide()), and the test suite of the testkit compares them. Any number of stores, and services
//!    in other languages, share a database.
//! 2. A command is answered after its commit. It is as durable as the server's commits; see
//!    [`capabilities`](oncegate_core::Store::capabilities).
//! 3. A call takes one round trip; the first of its kind on a connection takes one more. Claims that are ready at the same
//!    time are sent together, and so are completions: the first one at once and alone, those that arrive meanwhile as the
//!    next batch. No command waits for a batch to fill, and no record is twice in a batch.
//! 4. No call waits for the open transaction of another session. If such a transaction holds the record, a claim is told that
//!    it is in progress. Any other command is tried for an eighth of a second and is `Unavailable` after that.
//! 5. Every call is bounded: by the connect timeout, and by the command timeout or, for listings and purges, the statement
//!    timeout. A call without a reply is `Unavailable`: it may have been carried out. The store gives up its connection, and
//!    idle connections with it.
//! 6. The server's time counts. [`now`](oncegate_core::Store::now) is that time as it was last seen, plus the time since.
//! 7. The store never sends a claim again by itself, unless the server has certainly not carried out the first one: while the
//!    first one commits, the second one would be told that another attempt is in progress. The engine sends it again, and takes
//!    that into account.
//! 8. If the future of a claim or completion is dropped before its turn, or before it has a connection, the command is not
//!    sent. Every other call runs to its end on the store's own runtime, so that no connection is left in the middle of a
//!    reply.
//!
//! # Failures
//!
//! | failure | result for callers | action of an operator |
//! |---|---|---|
//! | the server is down, starting, or full | `Unavailable` | none: the store connects again by itself |
//! | a connection died | a claim: `Unavailable`, and its sender sends it again; other commands: no effect | |
//! | connections get neither a reply nor an end | as above, after the command timeout | |
//! | no connection becomes free in time | `Unavailable` | a larger pool, or a faster server |
//! | the server became a standby | `Unavailable` | point the URL at the primary |
//! | a record cannot be read | on that record: `Corrupt` | look at it; it is never executed |
//! | the role may not call a function, or an argument is invalid | `Invalid` | check the grants and the configuration |
//!
//! No error and no log line contains a key, a body, or a password.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod backoff;
mod batch;
mod batch_size;
mod call;
mod error;
mod insert_once;
pub mod messages;
mod options;
mod record;
mod row_version;
pub mod schema;
mod store;
mod survey;
mod transact;
pub mod transaction;
mod watch;

pub use error::PostgresOpenError;
pub use insert_once::{InsertError, InsertOutcome, Statement, insert_once};
pub use oncegate_core::ConfigError;
pub use options::PostgresOptions;
pub use row_version::{UpdateOutcome, update_latest, update_version};
pub use store::PostgresStore;
pub use transact::{
    Guard, GuardClaim, GuardError, GuardHeaderError, Isolation, RunError, TransactError, TransactFn,
    TransactFnWith, TransactOutcome, Transactor,
};

/// The library of connections and errors, in the version that this crate was built with.
pub use sqlx;
