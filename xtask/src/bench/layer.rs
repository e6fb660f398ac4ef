//! The Tower layer on axum.

use super::servers::Server;
use super::table::{Contender, table};
use crate::run::Result;

pub(super) fn run() -> Result<String> {
    let bare = Server::start(&["bare", "0"])?;
    let memory = Server::start(&["memory", "0"])?;
    table(
        "in-process layer on axum, memory store, 1 KiB JSON, 64 connections",
        vec![
            Contender::reference("bare axum", bare.url(), "first")?,
            Contender::new("layer, request without a key", memory.url(), "none")?,
            Contender::new("layer, first request", memory.url(), "first")?,
            Contender::new("layer, replay", memory.url(), "replay")?,
        ],
    )
}
