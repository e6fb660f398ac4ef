//! The cache before real and simulated stores.

mod conformance;
mod faults;
mod random;
mod support;
