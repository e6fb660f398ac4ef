//! The services as processes.

#![allow(clippy::unwrap_used)]

mod payments;
mod service;
mod transactional;
