//! The program without a server.

#[path = "../support/mod.rs"]
mod support;

mod deploy;
mod errors;
mod explain;
mod files;
mod hints;
mod ops;
mod store_files;
