//! The conformance suite on a store that is right, and on stores that are wrong.

mod memory;
mod mutants;
