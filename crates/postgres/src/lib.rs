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
//! let options = PostgresOptions::new(&url)?; // postgres://USER:PASSWORD@HOST/DATABASE?sslmode=verify-full
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
//! # Exactly-once effects in one's own tables
//! [`Transactor::transact`] runs a business transaction once per key: claim, rows and result commit together. [`Guard`]
//! completes a record in a transaction that the application keeps itself, be it claimed there, by the layer, or by a sidecar.
//! `docs/reference/transactions.md` says which to take.
//!
//! # What the store promises, and when
//!
//! 1. Each command is one call of one function in one transaction; the functions translate
//!    [`decide`](oncegate_core::decide()), and the suite of the testkit holds them to it. Any number of stores, and services
//!    in other languages, share a database.
//! 2. A command is answered after its commit. It is as durable as the server's commits are, which
//!    [`capabilities`](oncegate_core::Store::capabilities) tell.
//! 3. A call takes one round trip; the first of its kind on a connection one more. Claims that are ready together are
//!    sent together, completions likewise: the first at once and alone, those that come while it is away as the next
//!    batch. None is held back to wait for others, and no record is twice in a batch.
//! 4. Nobody waits for somebody else's open transaction. Where one holds the record, a claim hears that it is in progress;
//!    any other command is tried for an eighth of a second and is `Unavailable` then.
//! 5. Every call is bounded: by the connect timeout, and by the command timeout or, for listings and purges, the statement
//!    timeout. A call that is sent and gets no answer is `Unavailable`: it may have been carried out. Its connection is given
//!    up, and those that are idle with it.
//! 6. The time is the server's. [`now`](oncegate_core::Store::now) is that time as it was last seen, and what has passed
//!    here since.
//! 7. A claim is never sent again by the store, unless the server has certainly not carried out the first one: while that one
//!    commits, the answer to the second one would be that another attempt is in progress. An engine sends it again, and knows.
//! 8. A claim or completion whose future is dropped before its turn, or before there is a connection for it, is not sent; every
//!    other call runs to its end, on the store's own runtime, so that no connection is left in the middle of an answer.
//!
//! # What fails, and how
//!
//! | what happens | what callers hear | what an operator does |
//! |---|---|---|
//! | the server is away, starting, or full | `Unavailable` | nothing: the store connects again by itself |
//! | a connection died | a claim: `Unavailable`, and its sender sends it again; other commands: nothing | |
//! | connections get no answer any more, and no end | as above, after the command timeout | |
//! | no connection comes free in time | `Unavailable` | a larger pool, or a faster server |
//! | the server became a standby | `Unavailable` | points the URL at the primary |
//! | a record cannot be read | on that record: `Corrupt` | looks at it; it is never executed |
//! | the role may not call a function, or the arguments do not fit | `Invalid` | the grants, the configuration |
//!
//! No error and no log line holds a key, a body, or a password.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod backoff;
mod batch;
mod batch_size;
mod call;
mod error;
mod insert_once;
mod options;
mod record;
mod row_version;
pub mod schema;
mod store;
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

/// The library that connections and errors come from, in the version that this crate was built with.
pub use sqlx;
