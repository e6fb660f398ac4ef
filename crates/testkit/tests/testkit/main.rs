//! The conformance suite on a store that is right, and on stores that are wrong.

mod id_guard;
mod memory;
mod mutants;
