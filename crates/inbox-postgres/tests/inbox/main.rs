//! The transactional inbox on a real PostgreSQL server.

#[path = "../common/database.rs"]
mod common;

mod batch;
mod faults;
mod once;
mod operators;
mod sealed;
mod streams;
mod stuck;
mod support;
