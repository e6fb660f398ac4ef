//! The store and the contract, on real servers.

mod batches;
mod conformance;
mod contract;
mod faults;
mod python;
mod schema;
mod support;
mod transactions;
mod watch;
