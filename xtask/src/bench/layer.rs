//! The Tower layer on axum.

use super::servers::Server;
use super::table::{Contender, table};
use crate::run::Result;

pub(super) fn run() -> Result<String> {
    let bare = Server::start(&["bare", "0"])?;
    let memory = Server::start(&["memory", "0"])?;
    // About what the layer computes by a profile. The rest of its distance to the bare service is how this machine, which the
    // load generator shares, treats any service that computes as much.
    let three = Server::start(&["busy", "0", "3000"])?;
    let six = Server::start(&["busy", "0", "6000"])?;
    // The same load for both: to make a new key for each request costs the load generator as much as some of what it measures.
    table(
        "in-process layer on axum, memory store, 1 KiB JSON, 64 connections",
        vec![
            Contender::reference("bare axum, requests without a key", &bare, "none")?,
            Contender::new("layer, request without a key", &memory, "none")?,
            Contender::reference("bare axum, a new key each time", &bare, "first")?,
            Contender::new("layer, first request", &memory, "first")?,
            Contender::new("bare axum that computes 6 µs more", &six, "first")?,
            Contender::reference("bare axum, the same keys", &bare, "replay")?,
            Contender::new("layer, replay", &memory, "replay")?,
            Contender::new("bare axum that computes 3 µs more", &three, "replay")?,
        ],
    )
}
