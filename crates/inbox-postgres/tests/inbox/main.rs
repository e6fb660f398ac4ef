//! The transactional inbox on a real PostgreSQL server.

mod batch;
mod faults;
mod once;
mod streams;
mod stuck;
mod support;
