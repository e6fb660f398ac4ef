//! The published vectors, and records from a clock that was set back.

mod clock_set_back;
mod decision_vectors;
mod fingerprint_vectors;
mod golden_vectors;
