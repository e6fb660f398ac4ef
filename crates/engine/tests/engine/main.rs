//! The engine through its public interface.

#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

mod breaker;
mod claims;
mod completer;
mod conclude;
mod function;
mod leases;
mod own_errors;
mod sealed;
mod shield;
mod steps;
mod support;

/// The same tests on stores without `try_apply`: see `support::store_of`.
#[allow(clippy::duplicate_mod, reason = "the name of the module chooses the store")]
#[path = "breaker.rs"]
mod breaker_never_at_once;
#[allow(clippy::duplicate_mod, reason = "the name of the module chooses the store")]
#[path = "claims.rs"]
mod claims_never_at_once;
#[allow(clippy::duplicate_mod, reason = "the name of the module chooses the store")]
#[path = "function.rs"]
mod function_never_at_once;
#[allow(clippy::duplicate_mod, reason = "the name of the module chooses the store")]
#[path = "leases.rs"]
mod leases_never_at_once;
