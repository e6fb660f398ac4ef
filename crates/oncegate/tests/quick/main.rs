//! The package without a server.

#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

mod errors;
mod idempotent;
