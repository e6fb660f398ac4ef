//! The layer through its public interface.

#![allow(clippy::unwrap_used)]

mod awaited_responses;
mod concurrency;
mod request_budget;
mod slow_body;
mod slow_reader;
mod transactional;
mod unfinished_operations;
mod upstream_completion;
