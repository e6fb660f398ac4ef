//! Transactions on connections of an application's pool: for crates that run a transaction on behalf of the application.
//!
//! A transaction that is dropped is rolled back. A connection whose last transaction may still be open is closed, and does not
//! return to the pool.

pub use crate::backoff::Backoff;
pub use crate::error::store_error;
pub use crate::transact::{
    OpenTransaction, StatementError, TransactionConnection, begin, is_conflict, is_conflict_in, is_lost_in,
    is_rolled_back,
};
