//! The benchmarks: everything on this machine, in rounds that alternate, so that only ratios of one round are compared.

mod chart;
mod client;
mod growth;
mod idle;
mod latency;
mod layer;
mod load;
mod peers;
mod servers;
mod sidecar;
mod store;
mod table;
mod tls;

use std::fmt::Write as _;
use std::fs;

use crate::run::{Result, cargo, has, install, root, run as command, target};

/// The duration of one measurement, the number of rounds, and the number of connections.
const SECONDS: u32 = 3;
const ROUNDS: usize = 5;
const CONNECTIONS: u32 = 64;

/// The chart of the performance page, which is drawn by a run of all benchmarks that it shows.
const CHART: &str = "docs/performance.svg";

/// Runs the benchmarks that are named, or all. `records=N` says how large the large store of `growth` is.
pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    // It measures nothing, so it needs neither the load generators nor optimised programs.
    if arguments == ["probes"] {
        return peers::probes::run().map(|page| println!("{page}"));
    }
    let (settings, names): (Vec<&str>, Vec<&str>) = arguments.iter().partition(|text| text.contains('='));
    let mut records = 10_000_000;
    for setting in settings {
        let number = setting.strip_prefix("records=").and_then(|number| number.parse().ok());
        records = number.ok_or_else(|| format!("{setting}: no such setting; there is records=N"))?;
    }
    let growth = || growth::run(records);
    let benches: [(&str, &dyn Fn() -> Result<String>); 13] = [
        ("layer", &layer::run),
        ("sidecar", &sidecar::run),
        ("carriers", &sidecar::carriers),
        ("latency", &latency::run),
        ("record", &store::record_size),
        ("functions", &store::functions),
        ("store", &store::run),
        ("shared", &store::shared),
        ("client", &store::caller),
        ("tls", &tls::run),
        ("idle", &idle::run),
        ("peers", &peers::run),
        ("growth", &growth),
    ];
    if let Some(name) = names.iter().find(|name| !benches.iter().any(|(known, _)| known == *name)) {
        let known: Vec<&str> = benches.iter().map(|(known, _)| *known).collect();
        return Err(format!("no benchmark is called {name}; there are {}", known.join(", ")));
    }
    prepare()?;
    let mut report = String::new();
    for (name, bench) in benches.iter().filter(|(name, _)| names.is_empty() || names.contains(name)) {
        let before = load_average();
        let text = bench()?;
        let load = format!("load average of the machine before {before}, after {}", load_average());
        println!("\n## {name}\n\n{text}\n{load}");
        let _infallible = writeln!(report, "\n## {name}\n\n{text}\n{load}");
        // After each, so that nothing is lost with the next.
        let path = target().join("bench.md");
        fs::write(&path, &report).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    println!("\nwritten to {}", target().join("bench.md").display());
    if chart::sections().all(|section| names.is_empty() || names.contains(&section)) {
        let path = root().join(CHART);
        fs::write(&path, chart::chart(&report)?).map_err(|error| format!("{CHART}: {error}"))?;
        println!("written to {CHART}");
    }
    Ok(())
}

fn prepare() -> Result<()> {
    for (program, version, package) in [
        ("wrk", "--version", "wrk"),
        ("nginx", "-v", "nginx-light"),
        ("h2load", "--version", "nghttp2-client"),
    ] {
        // wrk answers with an exit code of 1; nginx is not on everybody's path.
        let there = ["/usr/bin", "/usr/sbin"]
            .iter()
            .any(|folder| fs::exists(format!("{folder}/{program}")).is_ok_and(|there| there));
        if !there && !has(program, &[version]) {
            install(&[package])?;
        }
    }
    let programs = ["--package", "oncegate-cli", "--package", "oncegate-benches"];
    command(cargo().args(["build", "--profile", "dist"]).args(programs))?;
    command(
        cargo()
            .args(["build", "--profile", "dist", "--package", "oncegate-embedded", "--example", "measure"]),
    )
}

/// The load of other processes on this machine.
fn load_average() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or_default().to_owned()
}
