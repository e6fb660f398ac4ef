//! Transactions on connections of an application's pool, for those who keep one for somebody else: what they
//! run, how they end, and
//! what an error says about it.
//!
//! A transaction that is dropped is rolled back, and a connection of which it is not known how its last transaction stands is
//! closed and does not go back to the pool.

pub use crate::backoff::Backoff;
pub use crate::error::store_error;
pub use crate::transact::{
    OpenTransaction, StatementError, TransactionConnection, begin, is_conflict, is_conflict_in, is_lost_in,
    is_rolled_back,
};
