//! Tests of the store and the contract, on real servers.

mod batches;
mod conformance;
mod contract;
mod faults;
mod flushing;
mod guards;
mod id_secret;
mod lost_claims;
mod lost_commits;
mod node;
mod pooler;
mod python;
mod reserved;
mod rows;
mod schema;
mod sealed;
mod settings;
mod support;
mod survey;
mod transact;
mod transactions;
mod watch;
