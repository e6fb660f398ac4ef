//! The duties of a reverse proxy besides keys, tested with the real process and real sockets.

#[path = "../support/mod.rs"]
mod support;

mod activity;
mod budget;
mod cached;
mod callers;
mod config;
mod corrections;
mod cors;
mod exposition;
mod fields;
mod frames;
mod framing;
mod gauges;
mod lifecycle;
mod limits;
mod logs;
mod operations;
mod operator;
mod postgres;
mod protocols;
mod reconcile;
mod refusals;
mod reload;
mod resets;
mod store;
mod streams;
mod upstream_connections;
mod watching;

/// The service's response where its content does not matter.
const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
const KEY: &str = "Idempotency-Key: intent-1";
