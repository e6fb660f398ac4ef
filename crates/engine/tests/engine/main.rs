//! The engine through its public interface.

#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

mod breaker;
mod claims;
mod completer;
mod conclude;
mod function;
mod leases;
mod own_errors;
mod steps;
mod support;
