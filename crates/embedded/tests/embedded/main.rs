//! The embedded store on a real disk.

mod conformance;
mod directory;
mod process;
