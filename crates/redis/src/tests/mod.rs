//! Tests on real servers that need a clock to move by hand.

mod conformance;
