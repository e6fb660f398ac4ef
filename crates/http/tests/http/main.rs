//! The layer through its public interface.

#![allow(clippy::unwrap_used)]

mod awaited_responses;
mod concurrency;
mod first_sent;
mod request_budget;
mod request_vectors;
mod slow_body;
mod slow_reader;
mod tool_calls;
mod transactional;
mod unfinished_operations;
mod upstream_completion;
mod watched_requests;
