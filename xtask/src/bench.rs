//! The benchmarks: everything on this machine, in rounds that alternate, so that only ratios of one round are compared.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::run::{Result, cargo, has, install, output, root, run as command, target};

/// How long one measurement takes, how many rounds there are, how many connections.
const SECONDS: u32 = 3;
const ROUNDS: usize = 5;
const CONNECTIONS: u32 = 64;

/// Runs the benchmarks that are named, or all.
pub(crate) fn run(names: &[&str]) -> Result<()> {
    if !has("wrk", &["--version"]) && !Path::new("/usr/bin/wrk").exists() {
        install(&["wrk"])?;
    }
    if !has("nginx", &["-v"]) && !Path::new("/usr/sbin/nginx").exists() {
        install(&["nginx-light"])?;
    }
    let release = ["build", "--release", "--package", "oncegate-cli", "--package", "oncegate-benches"];
    command(cargo().args(release))?;
    command(cargo().args(["build", "--release", "--package", "oncegate-embedded", "--example", "measure"]))?;
    let wanted = |name: &str| names.is_empty() || names.contains(&name);
    let mut report = String::new();
    let text = |error: std::fmt::Error| error.to_string();
    for (name, bench) in [
        ("layer", layer as fn() -> Result<String>),
        ("sidecar", sidecar),
        ("latency", latency),
        ("record", record_size),
        ("store", store),
    ] {
        if wanted(name) {
            writeln!(report, "\n## {name}\n\n{}", bench()?).map_err(text)?;
        }
    }
    println!("{report}");
    let path = target().join("bench.md");
    fs::write(&path, &report).map_err(|error| format!("{}: {error}", path.display()))?;
    println!("written to {}", path.display());
    Ok(())
}

/// One thing that is measured: a name, a server's address, a load.
type Contender = (&'static str, String, &'static str);

fn layer() -> Result<String> {
    let bare = Server::start(&["bare", "0"])?;
    let memory = Server::start(&["memory", "0"])?;
    table(
        "in-process layer on axum, memory store, 1 KiB JSON, 64 connections",
        "bare axum",
        &[
            ("bare axum", bare.url(), "first"),
            ("layer, request without a key", memory.url(), "none"),
            ("layer, first request", memory.url(), "first"),
            ("layer, replay", memory.url(), "replay"),
        ],
    )
}

fn sidecar() -> Result<String> {
    let upstream = Server::start(&["bare", "0"])?;
    let directory = scratch("sidecar")?;
    let nginx = Server::nginx(&upstream.address, &directory)?;
    let memory = Server::proxy(&upstream.address, "memory:")?;
    let store = directory.join("store");
    let embedded = Server::proxy(&upstream.address, &store.display().to_string())?;
    table(
        "sidecar before the same axum echo, 1 KiB JSON, 64 connections",
        "nginx proxy_pass",
        &[
            ("nginx proxy_pass", nginx.url(), "none"),
            ("sidecar, request without a key", memory.url(), "none"),
            ("sidecar, memory store, first request", memory.url(), "first"),
            ("sidecar, memory store, replay", memory.url(), "replay"),
            ("sidecar, embedded store, first request", embedded.url(), "first"),
            ("sidecar, embedded store, replay", embedded.url(), "replay"),
        ],
    )
}

/// One connection: what the durable store adds to a request.
fn latency() -> Result<String> {
    let upstream = Server::start(&["bare", "0"])?;
    let directory = scratch("latency")?;
    let embedded = Server::proxy(&upstream.address, &directory.join("store").display().to_string())?;
    let mut p50 = BTreeMap::<&str, Vec<f64>>::new();
    for round in 0..ROUNDS {
        for (name, server, load) in [("without a key", &embedded, "none"), ("with a key", &embedded, "first")]
        {
            p50.entry(name).or_default().push(wrk(&server.url(), load, 1, round)?.p50_micros);
        }
    }
    let mut text =
        String::from("sidecar, embedded store, one connection\n\n| request | p50, µs |\n|---|---|\n");
    for (name, values) in p50 {
        let _infallible = writeln!(text, "| {name} | {:.0} |", median(values));
    }
    Ok(text)
}

fn record_size() -> Result<String> {
    output(Command::new(program("oncegate-benches")).arg("record-size"))
}

fn store() -> Result<String> {
    let directory = scratch("store")?;
    output(Command::new(target().join("release/examples/measure")).arg(directory))
}

/// Measures all contenders in turn, several times, and sets each against the first of its round.
fn table(title: &str, reference: &str, contenders: &[Contender]) -> Result<String> {
    // On a virtual machine the first touch of a page of memory may cost the host twenty times what it costs later. A
    // program that has run for a while reuses memory; one that has just started would be measured by its host.
    command(Command::new(program("oncegate-benches")).args(["touch", "6"]))?;
    // The first request under each key has to be over before replays are measured.
    for (_, url, load) in contenders.iter().filter(|(_, _, load)| *load == "replay") {
        output(&mut load_command(url, load, 1, 1, 0))?;
    }
    let mut figures: Vec<Vec<Figure>> = contenders.iter().map(|_| Vec::new()).collect();
    for round in 0..ROUNDS {
        for (place, (name, url, load)) in figures.iter_mut().zip(contenders) {
            let figure = wrk(url, load, CONNECTIONS, round)?;
            eprintln!("  round {round}: {name}: {:.0} per second", figure.per_second);
            place.push(figure);
        }
    }
    let mut text = format!(
        "{title}\n\n| | requests per s | of {reference} | range | p99, ms |\n|---|---|---|---|---|\n"
    );
    for ((name, _, _), own) in contenders.iter().zip(&figures) {
        let first = figures.first().map_or(&[][..], Vec::as_slice);
        let ratios: Vec<f64> =
            own.iter().zip(first).map(|(own, first)| own.per_second / first.per_second).collect();
        let low = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let high = ratios.iter().copied().fold(0.0, f64::max);
        let rate = median(own.iter().map(|figure| figure.per_second).collect());
        let p99 = median(own.iter().map(|figure| figure.p99_micros).collect()) / 1000.0;
        let ratio = median(ratios);
        let _infallible =
            writeln!(text, "| {name} | {rate:.0} | {ratio:.2} | {low:.2}–{high:.2} | {p99:.2} |");
    }
    Ok(text)
}

struct Figure {
    per_second: f64,
    p50_micros: f64,
    p99_micros: f64,
}

fn wrk(url: &str, load: &str, connections: u32, round: usize) -> Result<Figure> {
    let text = output(&mut load_command(url, load, connections, SECONDS, round))?;
    if text.contains("Non-2xx") {
        return Err(format!("{url}, {load}: some answers were refusals:\n{text}"));
    }
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(name));
        line.map(str::trim).ok_or_else(|| format!("wrk said nothing of {name}:\n{text}"))
    };
    let per_second = value("Requests/sec:")?.parse().map_err(|_| format!("wrk's figures:\n{text}"))?;
    Ok(Figure { per_second, p50_micros: micros(value("50%")?)?, p99_micros: micros(value("99%")?)? })
}

fn load_command(url: &str, load: &str, connections: u32, seconds: u32, round: usize) -> Command {
    let mut command = Command::new("wrk");
    command
        .args(["--latency", &format!("-t{}", connections.min(2))])
        .args([format!("-c{connections}"), format!("-d{seconds}s"), "-s".to_owned()])
        .arg(root().join("benches/load").join(format!("{load}.lua")))
        .arg(url)
        .env("RUN", format!("{}-{round}-{}", std::process::id(), url.len() + connections as usize));
    command
}

fn micros(text: &str) -> Result<f64> {
    let units = [("us", 1.0), ("ms", 1e3), ("s", 1e6)];
    let found =
        units.iter().find_map(|(unit, factor)| Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * factor));
    found.ok_or_else(|| format!("no duration: {text}"))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn program(name: &str) -> PathBuf {
    target().join("release").join(name)
}

fn scratch(name: &str) -> Result<PathBuf> {
    let directory = target().join("bench").join(format!("{name}-{}", std::process::id()));
    fs::create_dir_all(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    Ok(directory)
}

/// A server as a child process, ended when it is dropped.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    /// One of the servers of `benches`.
    fn start(arguments: &[&str]) -> Result<Self> {
        let mut command = Command::new(program("oncegate-benches"));
        Self::spawn(command.args(arguments), "listening on ")
    }

    fn proxy(upstream: &str, store: &str) -> Result<Self> {
        let mut command = Command::new(program("oncegate"));
        command.args(["proxy", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--store", store]);
        Self::spawn(command.args(["--to", &format!("http://{upstream}")]), "oncegate listening on http://")
    }

    /// Starts a program that says where it listens in the first line that it prints.
    fn spawn(command: &mut Command, before: &str) -> Result<Self> {
        let mut child =
            command.stdout(Stdio::piped()).spawn().map_err(|error| format!("{command:?}: {error}"))?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line).map_err(|error| error.to_string())?;
        }
        let rest = line.trim().strip_prefix(before).unwrap_or_default();
        let address = rest.split([',', ' ']).next().unwrap_or_default().to_owned();
        let server = Self { child, address };
        if server.address.is_empty() {
            return Err(format!("{command:?} did not say where it listens: {line:?}"));
        }
        Ok(server)
    }

    fn nginx(upstream: &str, directory: &Path) -> Result<Self> {
        // A port that was free a moment ago.
        let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
        let address = free.map_err(|error| error.to_string())?.to_string();
        let text = format!(
            "worker_processes 2;\ndaemon off;\npid {pid};\nerror_log /dev/null;\n\
             events {{ worker_connections 4096; }}\n\
             http {{\n  access_log off;\n  client_body_temp_path {temp};\n  proxy_temp_path {temp};\n\
             \x20 fastcgi_temp_path {temp};\n  uwsgi_temp_path {temp};\n  scgi_temp_path {temp};\n\
             \x20 keepalive_requests 1000000;\n\
             \x20 upstream up {{ server {upstream}; keepalive 128; keepalive_requests 1000000; }}\n\
             \x20 server {{ listen {address} reuseport backlog=4096;\n    location / {{ proxy_pass http://up; proxy_http_version 1.1; \
             proxy_set_header Connection \"\"; client_max_body_size 8m; client_body_buffer_size 64k; }} }}\n}}\n",
            pid = directory.join("nginx.pid").display(),
            temp = directory.join("temp").display(),
        );
        let path = directory.join("nginx.conf");
        fs::write(&path, text).map_err(|error| error.to_string())?;
        let nginx = if has("nginx", &["-v"]) { "nginx" } else { "/usr/sbin/nginx" };
        let child = Command::new(nginx)
            .arg("-p")
            .arg(directory)
            .arg("-c")
            .arg(path)
            .spawn()
            .map_err(|error| format!("nginx: {error}"))?;
        let server = Self { child, address };
        let deadline = Instant::now() + Duration::from_secs(5);
        while std::net::TcpStream::connect(&server.address).is_err() {
            if Instant::now() > deadline {
                return Err("nginx does not listen".into());
            }
            std::thread::yield_now();
        }
        Ok(server)
    }

    fn url(&self) -> String {
        format!("http://{}/pay", self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // nginx's workers end with their master when it is asked to stop, and not when it is killed.
        let _asked = Command::new("kill").arg(self.child.id().to_string()).status();
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::yield_now();
        }
        let _killed = self.child.kill();
        let _ended = self.child.wait();
    }
}
