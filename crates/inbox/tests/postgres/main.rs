//! The transactional inbox on a real PostgreSQL server.

mod batch;
mod once;
mod support;
