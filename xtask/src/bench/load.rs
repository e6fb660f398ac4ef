//! The load generators.

use std::process::{Command, Stdio};
use std::time::Instant;

use super::{CONNECTIONS, SECONDS};
use crate::run::{Result, output, root};

/// The result of one measurement.
pub(super) struct Figure {
    pub(super) per_second: f64,
    pub(super) p50_micros: f64,
    pub(super) p99_micros: f64,
    /// The computing of the server for one request, in user and system mode; NaN if it is not known.
    pub(super) cpu_micros: f64,
}

/// Loads a server with wrk, which must answer every request with 2xx. `benches/load/payment.lua` names
/// the loads.
pub(super) fn wrk(url: &str, load: &str, cookies: &str, connections: u32, round: usize) -> Result<Figure> {
    let text = output(wrk_command(url, load, connections, SECONDS, round).env("COOKIES", cookies))?;
    if text.contains("Non-2xx") {
        return Err(format!("{url}, {load}: some requests failed:\n{text}"));
    }
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(name));
        line.map(str::trim).ok_or_else(|| format!("wrk said nothing of {name}:\n{text}"))
    };
    let per_second = value("Requests/sec:")?.parse().map_err(|_| format!("wrk's figures:\n{text}"))?;
    let (p50_micros, p99_micros) = (micros(value("50%")?)?, micros(value("99%")?)?);
    Ok(Figure { per_second, p50_micros, p99_micros, cpu_micros: f64::NAN })
}

/// The same, with the computing of a server and its child processes.
pub(super) fn wrk_on(server: u32, url: &str, load: &str, cookies: &str, round: usize) -> Result<Figure> {
    let before = computing(server)?;
    let begun = Instant::now();
    let figure = wrk(url, load, cookies, CONNECTIONS, round)?;
    let requests = figure.per_second * begun.elapsed().as_secs_f64();
    Ok(Figure { cpu_micros: (computing(server)? - before) * 1e6 / requests, ..figure })
}

/// The seconds that a process and its children have computed.
fn computing(process: u32) -> Result<f64> {
    /// The unit of these times, which is the same on every Linux.
    const PER_SECOND: f64 = 100.0;
    let read = |path: String| std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"));
    let stat = read(format!("/proc/{process}/stat"))?;
    // The name of the program is in parentheses, and may have spaces.
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
    let ticks: f64 = fields.skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum();
    let mut seconds = ticks / PER_SECOND;
    for child in read(format!("/proc/{process}/task/{process}/children"))?.split_whitespace() {
        seconds += computing(child.parse().map_err(|_| format!("no process: {child}"))?)?;
    }
    Ok(seconds)
}

pub(super) fn wrk_command(url: &str, load: &str, connections: u32, seconds: u32, round: usize) -> Command {
    let mut command = Command::new("wrk");
    command
        .args(["--latency", &format!("-t{}", connections.min(2))])
        .args([format!("-c{connections}"), format!("-d{seconds}s"), "-s".to_owned()])
        .arg(root().join("benches/load/payment.lua"))
        .arg(url)
        .env("LOAD", load)
        .env("RUN", format!("{}-{round}-{}", std::process::id(), url.len() + connections as usize));
    command
}

fn micros(text: &str) -> Result<f64> {
    let units = [("us", 1.0), ("ms", 1e3), ("s", 1e6)];
    let found =
        units.iter().find_map(|(unit, factor)| Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * factor));
    found.ok_or_else(|| format!("no duration: {text}"))
}

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The bytes of a process in memory.
pub(super) fn resident(process: u32) -> Result<u64> {
    let path = format!("/proc/{process}/status");
    let status = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    let figure = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next());
    let kibibytes = figure.and_then(|text| text.parse::<u64>().ok());
    kibibytes.map(|kibibytes| kibibytes * 1024).ok_or_else(|| format!("{path} has no VmRSS"))
}

/// One h2load for each command, all at the same time. Gives the requests per second of all of them together.
pub(super) fn h2loads(commands: Vec<Command>) -> Result<f64> {
    let start = |mut command: Command| command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let children: Vec<_> = commands
        .into_iter()
        .map(start)
        .collect::<std::io::Result<_>>()
        .map_err(|error| format!("h2load: {error}"))?;
    let mut sum = 0.0;
    for child in children {
        let output = child.wait_with_output().map_err(|error| format!("h2load: {error}"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let line = |start: &str| text.lines().find(|line| line.starts_with(start)).unwrap_or_default();
        let statuses = line("status codes:");
        let good = [" 0 3xx", " 0 4xx", " 0 5xx"].iter().all(|none| statuses.contains(none));
        if !good || !line("requests:").contains(" 0 failed") {
            return Err(format!("h2load: some requests failed:\n{text}"));
        }
        // "finished in 3.00s, 1234.56 req/s, 1.23MB/s"
        let rate = line("finished in").split(", ").nth(1).and_then(|rate| rate.strip_suffix(" req/s"));
        let rate = rate.and_then(|rate| rate.parse::<f64>().ok());
        sum += rate.ok_or_else(|| format!("h2load's figures:\n{text}"))?;
    }
    Ok(sum)
}
