//! TLS and HTTP/2 in front of the sidecar, against plain HTTP/1.1.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::load::{Figure, h2loads};
use super::servers::{Server, scratch};
use super::table::{Contender, table};
use super::{CONNECTIONS, SECONDS};
use crate::run::{Result, run as command};

/// More paths than one connection gets to in one measurement.
const PATHS: usize = 10_000;

pub(super) fn run() -> Result<String> {
    let directory = scratch("tls")?;
    let (certificate, key) = (directory.join("cert.pem"), directory.join("key.pem"));
    command(
        Command::new("openssl")
            .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"])
            .args(["-days", "7", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"])
            .arg("-keyout")
            .arg(&key)
            .arg("-out")
            .arg(&certificate),
    )?;
    let upstream = Server::start(&["bare", "0"])?;
    let plain = Server::proxy(&upstream.address, "memory:", &[])?;
    let [certificate, key] = [certificate, key].map(|path| path.display().to_string());
    let tls = Server::proxy(&upstream.address, "memory:", &["--tls-cert", &certificate, "--tls-key", &key])?;
    let load = Load { body: directory.join("body.json") };
    write(&load.body, &format!(r#"{{"amount":4999,"description":"{}"}}"#, "x".repeat(990)))?;
    let mut contenders = Vec::new();
    for kind in [Kind::NoKey, Kind::First, Kind::Replay] {
        for (protocol, server, http1) in [
            ("HTTP/1.1", &plain, true),
            ("HTTP/1.1 over TLS", &tls, true),
            ("HTTP/2", &plain, false),
            ("HTTP/2 over TLS", &tls, false),
        ] {
            let (url, paths) = (server.url(), directory.join(server.scheme));
            let list: Vec<String> = (0..PATHS).map(|path| format!("{url}/{path}\n")).collect();
            write(&paths, &list.concat())?;
            if kind == Kind::Replay {
                // The first one has to be over before replays are measured.
                h2loads(vec![load.replays(&url, http1, 1, &["-n", "1"])])?;
            }
            let (load, name) = (load.clone(), format!("{}, {protocol}", kind.name()));
            let measure = move |round| load.measure(kind, &url, &paths, http1, round);
            contenders.push(Contender::by(&name, http1 && server.scheme == "http", measure));
        }
    }
    table(
        "sidecar, memory store, 1 KiB JSON, 64 connections, one request at a time on each; by h2load",
        contenders,
    )
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    NoKey,
    First,
    Replay,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::NoKey => "request without a key",
            Self::First => "first request",
            Self::Replay => "replay",
        }
    }
}

#[derive(Clone)]
struct Load {
    body: PathBuf,
}

impl Load {
    fn measure(&self, kind: Kind, url: &str, paths: &Path, http1: bool, round: usize) -> Result<Figure> {
        let span = format!("-D{SECONDS}");
        let commands = match kind {
            Kind::NoKey => {
                let mut command = self.command(http1, CONNECTIONS);
                command.args([&span, url]);
                vec![command]
            }
            Kind::Replay => vec![self.replays(url, http1, CONNECTIONS, &[&span])],
            // h2load sends the same fields with every request, and a key is another one on another path. As each of its
            // connections goes through all paths, each is a process with a key of its own.
            Kind::First => (0..CONNECTIONS)
                .map(|connection| {
                    let mut command = self.command(http1, 1);
                    let key = format!("Idempotency-Key: {connection}-{round}-{http1}");
                    command.args([&span, "--header", &key, "-i"]).arg(paths);
                    command
                })
                .collect(),
        };
        Ok(Figure {
            per_second: h2loads(commands)?,
            p50_micros: f64::NAN,
            p99_micros: f64::NAN,
            cpu_micros: f64::NAN,
        })
    }

    fn replays(&self, url: &str, http1: bool, connections: u32, span: &[&str]) -> Command {
        let mut command = self.command(http1, connections);
        command.args(span).args(["--header", "Idempotency-Key: replayed", url]);
        command
    }

    fn command(&self, http1: bool, connections: u32) -> Command {
        let mut command = Command::new("h2load");
        command.args(["-m1", &format!("-t{}", connections.min(2)), &format!("-c{connections}"), "-d"]);
        command.arg(&self.body).args(["--header", "Content-Type: application/json"]);
        if http1 {
            command.arg("--h1");
        }
        command
    }
}
