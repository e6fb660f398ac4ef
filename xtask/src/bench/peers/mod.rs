//! Other libraries for the same thing, each as its README shows it, on its own framework, against that framework alone;
//! next to ours. Their programs are in `benches/peers`.

mod behaviour;
mod install;
pub(super) mod probes;

use std::fmt::Write as _;
use std::process::{Command, Stdio};

use self::behaviour::{Target, behaviour};
use self::install::Programs;
use super::client::request;
use super::servers::{Scratch, Server, program, scratch};
use super::table::{Contender, table};
use crate::run::Result;

pub(super) fn run() -> Result<String> {
    let programs = Programs::install()?;
    let redis = Redis::start()?;
    let mut contenders = Vec::new();
    let mut behaviours = String::from(
        "| | 100 equal requests at once | the same again | another body | after a 500 | after hanging up |\n\
         |---|---|---|---|---|---|\n",
    );
    // Everything has to live until the table is done.
    let (mut directories, mut running) = (Vec::new(), Vec::new());
    for framework in ["axum", "Express", "FastAPI", "net/http"] {
        let libraries: &[&str] = match framework {
            "axum" => &["oncegate layer", "axum-idempotent"],
            "Express" => &[
                "oncegate", "express-idempotency", "node-idempotency", "oncegate-redis",
                "node-idempotency-redis",
            ],
            "FastAPI" => &[
                "oncegate",
                "asgi-idempotency-header",
                "oncegate-redis",
                "asgi-idempotency-header-redis",
                "powertools",
            ],
            _ => &["oncegate"],
        };
        let start = |library: &str| programs.start(framework, library, &redis);
        let bare = start("bare")?;
        contenders.push(Contender::reference(&format!("{framework} alone"), &bare, "first")?);
        for library in libraries {
            // One for each load: some get slower with what they remember.
            for (load, name) in [("first", "first request"), ("replay", "replay")] {
                let server = start(library)?;
                let cookies = sessions(library, &server, 256)?;
                let name = match library {
                    // These bear one name in every language.
                    library if library.starts_with("oncegate") && framework != "axum" => {
                        format!("{library} on {framework}, {name}")
                    }
                    library => format!("{library}, {name}"),
                };
                contenders.push(Contender::with_cookies(&name, &server, load, cookies)?);
                running.push(server);
            }
            let server = start(library)?;
            let target = Target {
                address: &server.address,
                service: &server.address,
                cookie: &sessions(library, &server, 1)?,
            };
            let _infallible = writeln!(behaviours, "| {library} on {framework} | {} |", behaviour(&target)?);
        }
        if matches!(framework, "Express" | "FastAPI") {
            let directory = scratch(&format!("peers-{framework}"))?;
            let store = directory.join("store").display().to_string();
            let (memory, embedded) =
                (Server::proxy(&bare.address, "memory:", &[])?, Server::proxy(&bare.address, &store, &[])?);
            for (name, server, load) in [
                ("memory store, first request", &memory, "first"),
                ("memory store, replay", &memory, "replay"),
                ("embedded store, first request", &embedded, "first"),
                ("embedded store, replay", &embedded, "replay"),
            ] {
                let name = format!("oncegate sidecar on {framework}, {name}");
                contenders.push(Contender::new(&name, server, load)?);
            }
            let target = Target { address: &embedded.address, service: &bare.address, cookie: "" };
            let _infallible =
                writeln!(behaviours, "| oncegate sidecar on {framework} | {} |", behaviour(&target)?);
            running.extend([memory, embedded]);
            directories.push(directory);
        }
        running.push(bare);
    }
    eprintln!("{behaviours}");
    let speed =
        table("each library on its own framework, one process, 1 KiB JSON, 64 connections", contenders)?;
    Ok(format!("{speed}\nwhat they do:\n\n{behaviours}"))
}

/// Cookies of new sessions, separated by semicolons, for the library that keeps what it knows in sessions.
fn sessions(library: &str, server: &Server, count: usize) -> Result<String> {
    if library != "axum-idempotent" {
        return Ok(String::new());
    }
    let session = || {
        let response = request(&server.address, "POST /session", "", "")?;
        // This server writes names of fields in lower case.
        let cookie = response.header.lines().find_map(|line| line.strip_prefix("set-cookie: "));
        let cookie = cookie.and_then(|line| line.split(';').next());
        cookie.map(str::to_owned).ok_or_else(|| format!("no session: {}", response.header))
    };
    Ok((0..count).map(|_| session()).collect::<Result<Vec<_>>>()?.join(";"))
}

/// A Redis that keeps nothing, on a socket of its own.
struct Redis {
    child: std::process::Child,
    directory: Scratch,
}

impl Redis {
    fn start() -> Result<Self> {
        let directory = scratch("redis")?;
        let child = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket", "socket", "--dir"])
            .arg(&*directory)
            .stdout(Stdio::null())
            .spawn()
            .map_err(|error| format!("redis-server: {error}"))?;
        Ok(Self { child, directory })
    }

    fn socket(&self) -> String {
        self.directory.join("socket").display().to_string()
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _killed = self.child.kill();
        let _ended = self.child.wait();
    }
}

impl Programs {
    /// The service on a framework, with a library around it.
    fn start(&self, framework: &str, library: &str, redis: &Redis) -> Result<Server> {
        let mut command = match (framework, library) {
            ("axum", "bare") => Command::new(program("oncegate-benches")),
            ("axum", "oncegate layer") => Command::new(program("oncegate-benches")),
            ("axum", _) => Command::new(&self.axum_idempotent),
            ("Express", _) => Command::new("node"),
            ("net/http", _) => Command::new(&self.go),
            _ => Command::new(self.python.join("bin/python")),
        };
        match (framework, library) {
            ("axum", "bare") => command.args(["bare", "0"]),
            ("axum", "oncegate layer") => command.args(["memory", "0"]),
            ("axum", _) => &mut command,
            ("net/http", _) => command.arg(library),
            ("Express", _) => command.arg(self.node.join("server.js")).arg(library).arg(redis.socket()),
            _ => command.arg(self.python.join("main.py")).arg(library).arg(redis.socket()),
        };
        // They print every error that is provoked.
        Server::spawn(command.env("NODE_ENV", "production").stderr(Stdio::null()))
    }
}
