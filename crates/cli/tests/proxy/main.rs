//! The duties of a reverse proxy besides keys, tested with the real process and real sockets.

#[path = "../support/mod.rs"]
mod support;

mod activity;
mod admin_address;
mod backup;
mod budget;
mod cached;
mod callers;
mod config;
mod content;
mod corrections;
mod cors;
mod dashboard;
mod exposition;
mod fields;
mod frames;
mod framing;
mod gauges;
mod idle;
mod interim;
mod lifecycle;
mod limits;
mod logs;
mod notify;
mod operations;
mod operator;
mod postgres;
mod protocols;
mod reconcile;
mod redaction;
mod redis;
mod refusals;
mod reload;
mod resets;
mod rolling;
mod sealing;
mod shadow;
mod store;
mod streams;
mod traces;
mod transactions;
mod upstream_connections;
mod watching;

/// The service's response where its content does not matter.
const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
const KEY: &str = "Idempotency-Key: intent-1";
