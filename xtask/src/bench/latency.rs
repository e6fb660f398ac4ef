//! One connection: what the durable store adds to a request.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::ROUNDS;
use super::load::{median, wrk};
use super::servers::{Server, scratch};
use crate::run::Result;

pub(super) fn run() -> Result<String> {
    let upstream = Server::start(&["bare", "0"])?;
    let directory = scratch("latency")?;
    let embedded = Server::proxy(&upstream.address, &directory.join("store").display().to_string(), &[])?;
    let mut p50 = BTreeMap::<&str, Vec<f64>>::new();
    for round in 0..ROUNDS {
        for (name, load) in [("without a key", "none"), ("with a key", "first")] {
            p50.entry(name).or_default().push(wrk(&embedded.url(), load, "", 1, round)?.p50_micros);
        }
    }
    let mut text =
        String::from("sidecar, embedded store, one connection\n\n| request | p50, µs |\n|---|---|\n");
    for (name, values) in p50 {
        let _infallible = writeln!(text, "| {name} | {:.0} |", median(values));
    }
    Ok(text)
}
