//! The store and the contract, on real servers.

mod batches;
mod conformance;
mod contract;
mod cut;
mod faults;
mod guards;
mod lost_commits;
mod python;
mod schema;
mod support;
mod transact;
mod transactions;
