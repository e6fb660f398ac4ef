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

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use crate::run::{Result, cargo, has, install, output, root, run as command, target};

/// The duration of one measurement, the number of rounds, and the number of connections.
const SECONDS: u32 = 3;
const ROUNDS: usize = 5;
const CONNECTIONS: u32 = 64;

/// The chart of the performance page, which is drawn by a run of all benchmarks that it shows.
const CHART: &str = "docs/performance.svg";

const HELP: &str = "\
cargo xtask bench [NAME…] [records=N] [profile=NAME]

Measures on this machine and writes tables with ratios. Without names, all of them run, which takes more than an hour.
Sections of an earlier run that are not measured again stay in the report.

layer      the Tower layer on axum, against axum alone
sidecar    the sidecar with its stores, against nginx
carriers   keys in the query and in the body
options    sealing, redaction, traces and shadow, against the same sidecar without them
latency    one request at a time
record     memory of a record in the memory store
functions  a wrapped function
store      the embedded store, against bare redb
shared     Redis, PostgreSQL, transact, inbox; starts its own servers
client     the client, against the HTTP client below it
tls        TLS and HTTP/2
idle       ten thousand idle connections
peers      other libraries on their frameworks; installs Node, Redis and the libraries
growth     ten million records (records=N: so many) against ten thousand
probes     no measurement: what other libraries do, by `oncegate probe`

The programs are built with the profile dist, as they are shipped; profile=release measures cargo's default.
A run of layer, sidecar, store, shared and peers together also draws docs/performance.svg.";

/// The profile that the run names.
static PROFILE: OnceLock<String> = OnceLock::new();

/// The profile with which the programs are built.
fn profile() -> &'static str {
    PROFILE.get().map_or("dist", String::as_str)
}

/// Runs the benchmarks that are named, or all.
pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    if arguments.iter().any(|argument| matches!(*argument, "help" | "--help" | "-h")) {
        println!("{HELP}");
        return Ok(());
    }
    // It measures nothing, so it needs neither the load generators nor optimised programs.
    if arguments == ["probes"] {
        return peers::probes::run().map(|page| println!("{page}"));
    }
    let (settings, names): (Vec<&str>, Vec<&str>) = arguments.iter().partition(|text| text.contains('='));
    let mut records = 10_000_000;
    for setting in settings {
        if let Some(name) = setting.strip_prefix("profile=") {
            PROFILE.get_or_init(|| name.to_owned());
            continue;
        }
        let number = setting.strip_prefix("records=").and_then(|number| number.parse().ok());
        records = number
            .ok_or_else(|| format!("{setting}: no such setting; there are records=N and profile=NAME"))?;
    }
    let growth = || growth::run(records);
    let benches: [(&str, &dyn Fn() -> Result<String>); 14] = [
        ("layer", &layer::run),
        ("sidecar", &sidecar::run),
        ("carriers", &sidecar::carriers),
        ("options", &sidecar::options),
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
    let path = target().join("bench.md");
    let mut report = Report::read(&path);
    let mut measured = String::new();
    let conditions = conditions();
    for (name, bench) in benches.iter().filter(|(name, _)| names.is_empty() || names.contains(name)) {
        let before = load_average();
        let text = bench()?;
        let load = format!("load average of the machine before {before}, after {}", load_average());
        let section = format!("\n## {name}\n\n{text}\n{load}\n\n{conditions}\n");
        println!("{section}");
        measured.push_str(&section);
        // After each, so that nothing is lost with the next.
        report.replace(name, section);
        fs::write(&path, report.text()).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    println!("\nwritten to {}", path.display());
    if profile() == "dist" && chart::sections().all(|section| names.is_empty() || names.contains(&section)) {
        let path = root().join(CHART);
        fs::write(&path, chart::chart(&measured)?).map_err(|error| format!("{CHART}: {error}"))?;
        println!("written to {CHART}");
    }
    Ok(())
}

/// The report on disk: the last measurement of each benchmark.
struct Report(Vec<(String, String)>);

impl Report {
    /// The report of earlier runs; empty if there is none.
    fn read(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap_or_default();
        let sections = text.split("\n## ").skip(1);
        let named = |section: &str| {
            let name = section.lines().next().unwrap_or_default().to_owned();
            (name, format!("\n## {section}"))
        };
        Self(sections.map(named).collect())
    }

    fn replace(&mut self, name: &str, section: String) {
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some((_, old)) => *old = section,
            None => self.0.push((name.to_owned(), section)),
        }
    }

    fn text(&self) -> String {
        self.0.iter().map(|(_, section)| section.as_str()).collect()
    }
}

/// The commit, the processor and the versions under which a section was measured.
fn conditions() -> String {
    let said = |program: &str, arguments: &[&str]| {
        let text = output(Command::new(program).args(arguments)).unwrap_or_default();
        text.lines().next().unwrap_or_default().trim().to_owned()
    };
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let models: Vec<&str> = cpus.lines().filter_map(|line| line.strip_prefix("model name")).collect();
    let model = models.first().map_or("", |model| model.trim_start_matches([' ', '\t', ':']));
    format!(
        "profile {}, {} × {model}, Linux {}, {}, commit {}",
        profile(),
        models.len(),
        said("uname", &["-r"]),
        said("rustc", &["--version"]),
        said("git", &["rev-parse", "--short", "HEAD"])
    )
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
    command(cargo().args(["build", "--profile", profile()]).args(programs))?;
    command(cargo().args([
        "build",
        "--profile",
        profile(),
        "--package",
        "oncegate-embedded",
        "--example",
        "measure",
    ]))
}

/// The load of other processes on this machine.
fn load_average() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or_default().to_owned()
}
