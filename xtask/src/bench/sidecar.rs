//! The sidecar compared with nginx.

use super::servers::{Server, scratch};
use super::table::{Contender, table};
use crate::run::Result;

pub(super) fn run() -> Result<String> {
    let upstream = Server::start(&["bare", "0"])?;
    let directory = scratch("sidecar")?;
    let nginx = Server::nginx(&upstream.address, &directory)?;
    let memory = Server::proxy(&upstream.address, "memory:", &[])?;
    let embedded = Server::proxy(&upstream.address, &directory.join("store").display().to_string(), &[])?;
    table(
        "sidecar before the same axum echo, 1 KiB JSON, 64 connections",
        vec![
            Contender::reference("nginx proxy_pass, requests without a key", nginx.url(), "none")?,
            Contender::new("sidecar, request without a key", memory.url(), "none")?,
            Contender::reference("nginx proxy_pass, a new key each time", nginx.url(), "first")?,
            Contender::new("sidecar, memory store, first request", memory.url(), "first")?,
            Contender::new("sidecar, embedded store, first request", embedded.url(), "first")?,
            Contender::reference("nginx proxy_pass, the same keys", nginx.url(), "replay")?,
            Contender::new("sidecar, memory store, replay", memory.url(), "replay")?,
            Contender::new("sidecar, embedded store, replay", embedded.url(), "replay")?,
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
            Contender::reference("key in a header field, first request", header.url(), "first")?,
            Contender::new("key in a member of the body", member.url(), "member")?,
            Contender::new("key in the query", query.url(), "query")?,
            Contender::reference("request without a key", header.url(), "none")?,
            Contender::new("the same, where the body may have a key", member.url(), "none")?,
        ],
    )
}
