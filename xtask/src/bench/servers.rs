//! The servers that are measured, as child processes.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use crate::run::{Result, has, target};

/// A program of this workspace, as it is shipped unless the run names another profile.
pub(super) fn program(name: &str) -> PathBuf {
    target().join(super::profile()).join(name)
}

/// A new directory under the target directory.
pub(super) fn scratch(name: &str) -> Result<Scratch> {
    let directory = target().join("bench").join(format!("{name}-{}", std::process::id()));
    fs::create_dir_all(&directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    Ok(Scratch(directory))
}

/// A directory that is deleted when it is dropped.
pub(super) struct Scratch(PathBuf);

impl std::ops::Deref for Scratch {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _best_effort = fs::remove_dir_all(&self.0);
    }
}

/// A server as a child process, ended when it is dropped.
pub(super) struct Server {
    child: Child,
    pub(super) address: String,
    pub(super) scheme: &'static str,
    /// Its further output, which is not read.
    _said: Option<BufReader<ChildStdout>>,
}

impl Server {
    /// One of the servers of `benches`.
    pub(super) fn start(arguments: &[&str]) -> Result<Self> {
        Self::spawn(Command::new(program("oncegate-benches")).args(arguments))
    }

    /// The sidecar.
    pub(super) fn proxy(upstream: &str, store: &str, more: &[&str]) -> Result<Self> {
        let mut command = Command::new(program("oncegate"));
        command.env("ONCEGATE_LOG", "error");
        command.args([
            "proxy", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--store", store, "--service",
            "bench",
        ]);
        Self::spawn(command.args(["--to", &format!("http://{upstream}")]).args(more))
    }

    /// Starts a program that says in the first line that it prints where it is listening on.
    pub(super) fn spawn(command: &mut Command) -> Result<Self> {
        let mut child =
            command.stdout(Stdio::piped()).spawn().map_err(|error| format!("{command:?}: {error}"))?;
        let mut line = String::new();
        let mut said = child.stdout.take().map(BufReader::new);
        if let Some(said) = &mut said {
            said.read_line(&mut line).map_err(|error| error.to_string())?;
        }
        let place = line.split_once("listening on ").map_or("", |(_, place)| place.trim());
        let (scheme, place) = match place.split_once("://") {
            Some(("https", place)) => ("https", place),
            Some((_, place)) => ("http", place),
            None => ("http", place),
        };
        let address = place.split([',', ' ']).next().unwrap_or_default().to_owned();
        let server = Self { child, address, scheme, _said: said };
        if server.address.is_empty() {
            return Err(format!("{command:?} did not say where it listens: {line:?}"));
        }
        Ok(server)
    }

    /// nginx as a proxy; `fields` are its directives for the header fields of requests.
    pub(super) fn nginx(upstream: &str, directory: &Path, fields: &str) -> Result<Self> {
        fs::create_dir_all(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
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
             proxy_set_header Connection \"\"; {fields} client_max_body_size 8m; client_body_buffer_size 64k; }} }}\n}}\n",
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
        let server = Self { child, address, scheme: "http", _said: None };
        let deadline = Instant::now() + Duration::from_secs(5);
        while std::net::TcpStream::connect(&server.address).is_err() {
            if Instant::now() > deadline {
                return Err("nginx does not listen".into());
            }
            std::thread::yield_now();
        }
        Ok(server)
    }

    pub(super) fn url(&self) -> String {
        format!("{}://{}/pay", self.scheme, self.address)
    }

    /// The process.
    pub(super) fn process(&self) -> u32 {
        self.child.id()
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
