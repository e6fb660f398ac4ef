//! The PostgreSQL store of Oncegate, and the contract that other languages call without it.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic)]

mod call;
mod error;
mod options;
mod record;
pub mod schema;
mod store;

pub use error::OpenError;
pub use options::PostgresOptions;
pub use store::PostgresStore;
