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
