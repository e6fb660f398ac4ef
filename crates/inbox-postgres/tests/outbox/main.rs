//! The outbox and its relays, on a PostgreSQL server of the tests' own, against a broker that fails in every way.

#[path = "../common/database.rs"]
mod common;

mod broker;
mod contract;
mod database;
mod faults;
mod messages;
mod order;
mod processes;
mod refused;
mod slow;
