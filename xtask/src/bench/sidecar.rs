//! The sidecar compared with nginx.

use std::process::Command;

use super::servers::{Server, program, scratch};
use super::table::{Contender, table};
use crate::run::Result;

/// The header fields that the sidecar writes into each request, for nginx.
const FIELDS: &str = "proxy_set_header Host $http_host; proxy_set_header Via \"1.1 nginx\"; \
                      proxy_set_header Forwarded \"for=$remote_addr;host=$http_host;proto=$scheme\"; \
                      proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for; \
                      proxy_set_header X-Forwarded-Host $http_host; proxy_set_header X-Forwarded-Proto $scheme;";

pub(super) fn run() -> Result<String> {
    let upstream = Server::start(&["bare", "0"])?;
    let directory = scratch("sidecar")?;
    let nginx = Server::nginx(&upstream.address, &directory.join("nginx"), "")?;
    let forwarding = Server::nginx(&upstream.address, &directory.join("forwarding"), FIELDS)?;
    let memory = Server::proxy(&upstream.address, "memory:", &[])?;
    let embedded = Server::proxy(&upstream.address, &directory.join("store").display().to_string(), &[])?;
    table(
        "sidecar before the same axum echo, 1 KiB JSON, 64 connections",
        vec![
            Contender::reference("nginx proxy_pass, requests without a key", &nginx, "none")?,
            Contender::new("sidecar, request without a key", &memory, "none")?,
            Contender::new("nginx that writes the same header fields", &forwarding, "none")?,
            Contender::reference("nginx proxy_pass, a new key each time", &nginx, "first")?,
            Contender::new("sidecar, memory store, first request", &memory, "first")?,
            Contender::new("sidecar, embedded store, first request", &embedded, "first")?,
            Contender::reference("nginx proxy_pass, the same keys", &nginx, "replay")?,
            Contender::new("sidecar, memory store, replay", &memory, "replay")?,
            Contender::new("sidecar, embedded store, replay", &embedded, "replay")?,
        ],
    )
}

/// The cost of a key in the query or in the body, against one in a header field.
pub(super) fn carriers() -> Result<String> {
    let upstream = Server::start(&["bare", "0"])?;
    let header = Server::proxy(&upstream.address, "memory:", &["--scope=single-tenant"])?;
    let member =
        Server::proxy(&upstream.address, "memory:", &["--scope=single-tenant", "--key-member=/key"])?;
    let query = Server::proxy(&upstream.address, "memory:", &["--scope=single-tenant", "--key-query=Key"])?;
    table(
        "the sidecar with keys in other places, memory store, 1 KiB JSON, 64 connections",
        vec![
            Contender::reference("key in a header field, first request", &header, "first")?,
            Contender::new("key in a member of the body", &member, "member")?,
            Contender::new("key in the query", &query, "query")?,
            Contender::reference("request without a key", &header, "none")?,
            Contender::new("the same, where the body may have a key", &member, "none")?,
        ],
    )
}

/// The cost of what is off by default, for each request.
pub(super) fn options() -> Result<String> {
    let upstream = Server::start(&["bare", "0"])?;
    // The collector takes everything; it is a process of its own, as it is elsewhere.
    let collector = Server::start(&["bare", "0"])?;
    let directory = scratch("options")?;
    let keys = directory.join("seal-keys");
    let made = Command::new(program("oncegate")).args(["seal-key", "new", "--append"]).arg(&keys).output();
    if !made.as_ref().is_ok_and(|made| made.status.success()) {
        return Err(format!("oncegate seal-key new: {made:?}"));
    }
    let sidecar = |more: &[&str]| Server::proxy(&upstream.address, "memory:", more);
    let endpoint = format!("--otlp-endpoint=http://{}", collector.address);
    let plain = sidecar(&[])?;
    let sealing = sidecar(&[&format!("--seal-keys-file={}", keys.display())])?;
    let redacting = sidecar(&["--redact-response=/card/number"])?;
    let unsampled = sidecar(&[&endpoint, "--trace-sample-ratio=0"])?;
    let sampled = sidecar(&[&endpoint, "--trace-sample-ratio=1"])?;
    let shadow = sidecar(&["--shadow"])?;
    table(
        "the sidecar with options, memory store, 1 KiB JSON, 64 connections",
        vec![
            Contender::reference("first request", &plain, "first")?,
            Contender::new("its response sealed", &sealing, "first")?,
            Contender::new("a member of its response redacted", &redacting, "first")?,
            Contender::new("traces, not sampled", &unsampled, "first")?,
            Contender::new("traces, every request sampled", &sampled, "first")?,
            Contender::new("on a shadow route", &shadow, "first")?,
            Contender::reference("replay", &plain, "replay")?,
            Contender::new("of a sealed response", &sealing, "replay")?,
            Contender::new("traces, not sampled", &unsampled, "replay")?,
            Contender::new("traces, every request sampled", &sampled, "replay")?,
        ],
    )
}
