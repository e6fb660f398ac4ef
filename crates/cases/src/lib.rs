//! The behaviour of Oncegate over HTTP as one table of cases. Each case runs with several deployments (the Tower layer, the
//! sidecar, two sidecars, a sidecar of a service in another language, a service with a library in another language) on
//! several stores.
//!
//! A [`Case`](table::Case) has settings (a [`Plan`](plan::Plan)) and actions: a list of requests, each with its expected
//! result, or a function. [`cases`](table::cases) is the whole table. A target on which a case is not run has a
//! [reason](table::Case::reason_against): the case makes no sense there, or another target shows the same.
//!
//! The service is the same for all cases ([`Backend`](backend::Backend)): it counts its effects, and each execution
//! gives another response, so that a second execution cannot look like a replay.

pub mod backend;
pub mod client;
pub mod coverage;
pub mod databases;
pub mod framework;
pub mod library;
pub mod plan;
pub mod table;
pub mod together;
pub mod world;

mod cases;
mod faulty_wire;
mod process;
mod remote;
mod sidecar;
mod tokens;

pub use remote::{CHILD, child_main};
