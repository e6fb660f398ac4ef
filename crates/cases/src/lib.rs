//! The behaviour of Oncegate's HTTP doors, written down as one table of cases and run
//! against every door and every store: the Tower layer in this process, the sidecar as a process of its own.
//!
//! A [`Case`](table::Case) is what is given (a [`Plan`](plan::Plan)) and what then happens: a list of requests, each
//! with what it must come to, or a function where that does not do. [`cases`](table::cases) is the whole table. A case
//! that makes no sense at a door says why, and is not run there.
//!
//! The service behind a door is the same everywhere ([`Backend`](backend::Backend)): it counts its effects, and every
//! execution answers something else, so that a second one can never pass for a replay.

pub mod backend;
pub mod client;
pub mod coverage;
pub mod places;
pub mod plan;
pub mod table;
pub mod world;

mod cases;
mod remote;
mod sidecar;

pub use remote::{CHILD, child_main};
