//! Redis: one server, a Cluster, or a primary with a replica and sentinels.

use std::fs;
use std::io::{self, BufReader, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::port::free_port;
use crate::program;

/// The bound on every wait for a server.
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// The options of a server. By default it has no persistence, and every user of this machine may connect.
#[derive(Clone, Debug, Default)]
pub struct RedisOptions {
    lines: Vec<String>,
    is_recent: bool,
    tls: Option<Certificates>,
    login: Option<(String, String)>,
}

impl RedisOptions {
    /// Without persistence, and open to everybody on this machine.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// One more line of its configuration, such as `maxmemory 4mb`.
    #[must_use]
    pub fn with(mut self, line: impl Into<String>) -> Self {
        self.lines.push(line.into());
        self
    }

    /// With an append-only file that is flushed so: `always`, `everysec` or `no`.
    #[must_use]
    pub fn with_appendfsync(self, when: &str) -> Self {
        self.with("appendonly yes").with(format!("appendfsync {when}"))
    }

    /// Allows only this user to log in, with the rights of `rules`, such as `~* &* +@all`.
    ///
    /// The default user keeps its rights, because Redis loads its append-only file in its name.
    #[must_use]
    pub fn with_user(mut self, name: &str, password: &str, rules: &str) -> Self {
        self.login = Some((name.to_owned(), password.to_owned()));
        self.with("user default off ~* &* +@all").with(format!("user {name} on >{password} {rules}"))
    }

    /// A server that knows what came with Redis 7.2, such as `WAITAOF`: the Valkey that `cargo xtask test` gets or the system
    /// has, or else the system's Redis, if that is new enough.
    #[must_use]
    pub const fn recent(mut self) -> Self {
        self.is_recent = true;
        self
    }

    /// Speaks TLS and nothing else, with a certificate for `localhost`.
    #[must_use]
    pub fn with_tls(mut self, certificates: Certificates) -> Self {
        self.tls = Some(certificates);
        self
    }
}

/// The certificate and the key of a server with TLS, in PEM.
#[derive(Clone, Debug)]
pub struct Certificates {
    /// The authority.
    pub ca: String,
    /// The server's certificate.
    pub cert: String,
    /// Its key.
    pub key: String,
}

/// A server in a directory of its own.
#[derive(Debug)]
pub struct RedisServer {
    child: Option<Child>,
    port: u16,
    dir: TempDir,
    options: RedisOptions,
    sentinel: bool,
}

impl RedisServer {
    /// Starts a server, and waits until it answers.
    ///
    /// # Errors
    /// Where there is no `redis-server`, or none that is [`recent`](RedisOptions::recent), or it does not answer in time.
    pub fn start(options: RedisOptions) -> io::Result<Self> {
        Self::start_as(options, false)
    }

    fn start_as(options: RedisOptions, sentinel: bool) -> io::Result<Self> {
        let dir = tempfile::Builder::new().prefix("oncegate-redis-").tempdir()?;
        let mut server = Self { child: None, port: 0, dir, options, sentinel };
        if let Some(tls) = &server.options.tls {
            for (name, text) in [("ca.pem", &tls.ca), ("cert.pem", &tls.cert), ("key.pem", &tls.key)] {
                fs::write(server.dir.path().join(name), text)?;
            }
        }
        // Another process may take the port between the search for a free one and the start of the server.
        let mut last = io::Error::other("not tried");
        for _ in 0..5 {
            server.port = free_port()?;
            fs::write(server.dir.path().join("redis.conf"), server.configuration())?;
            match server.restart() {
                Ok(()) => return Ok(server),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn configuration(&self) -> String {
        let dir = self.dir.path().display();
        let port = self.port;
        let mut text = format!("dir {dir}\nlogfile {dir}/log\nbind 127.0.0.1\ndaemonize no\n");
        if self.options.tls.is_some() {
            text += &format!(
                "port 0\ntls-port {port}\ntls-cert-file {dir}/cert.pem\ntls-key-file {dir}/key.pem\n\
                 tls-ca-cert-file {dir}/ca.pem\ntls-auth-clients no\n"
            );
        } else {
            text += &format!("port {port}\n");
        }
        if !self.sentinel {
            text += "save \"\"\nenable-debug-command local\n";
        }
        for line in &self.options.lines {
            text.push_str(line);
            text.push('\n');
        }
        text
    }

    /// Starts it again on its port and its directory, after [`kill`](Self::kill).
    ///
    /// # Errors
    /// Where it does not answer in time.
    pub fn restart(&mut self) -> io::Result<()> {
        let program = if self.options.is_recent { program::recent()? } else { program::usual() };
        let mut command = Command::new(&program);
        command.arg(self.dir.path().join("redis.conf"));
        if self.sentinel {
            command.arg("--sentinel");
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let child = child.map_err(|error| io::Error::other(format!("{}: {error}", program.display())))?;
        self.child = Some(child);
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while !self.answers() {
            let ended = self.child.as_mut().map(Child::try_wait).transpose()?.flatten();
            if ended.is_some() || Instant::now() > deadline {
                self.kill();
                let log = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
                return Err(io::Error::other(format!("{} does not answer: {log}", program.display())));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn answers(&self) -> bool {
        if self.options.tls.is_some() {
            return TcpStream::connect(("127.0.0.1", self.port)).is_ok();
        }
        self.command(&["PING"]).is_ok_and(|reply| reply.contains("PONG"))
    }

    /// Ends it at once, as `kill -9` does.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _gone_already = child.kill();
            let _status = child.wait();
        }
    }

    /// The process id of the server.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// The port on 127.0.0.1.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Its directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The certificate authority of its TLS.
    #[must_use]
    pub fn ca(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }

    /// Its URL, with the login that it has.
    #[must_use]
    pub fn url(&self) -> String {
        let login = self.options.login.as_ref().map(|(user, password)| format!("{user}:{password}@"));
        let login = login.unwrap_or_default();
        if self.options.tls.is_some() {
            format!("rediss://{login}localhost:{}/0?ca={}", self.port, self.ca().display())
        } else {
            format!("redis://{login}127.0.0.1:{}/0", self.port)
        }
    }

    /// Sends one command in the clear on a connection of its own, and gives the whole reply as it is on the wire.
    ///
    /// # Errors
    /// Where the server does not answer, or with an error.
    pub fn command(&self, parts: &[&str]) -> io::Result<String> {
        let stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let mut from = BufReader::new(stream.try_clone()?);
        if let Some((user, password)) = &self.options.login {
            exchange(&stream, &mut from, &["AUTH", user, password])?;
        }
        exchange(&stream, &mut from, parts)
    }

    /// Waits until a command's reply holds this text.
    ///
    /// # Errors
    /// Where it does not in time.
    pub fn wait_for(&self, parts: &[&str], text: &str) -> io::Result<()> {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let reply = self.command(parts);
            if reply.as_ref().is_ok_and(|reply| reply.contains(text)) {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(io::Error::other(format!("no {text} in time: {reply:?}")));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn exchange(mut to: &TcpStream, from: &mut impl io::BufRead, parts: &[&str]) -> io::Result<String> {
    let mut bytes = format!("*{}\r\n", parts.len());
    for part in parts {
        bytes += &format!("${}\r\n{part}\r\n", part.len());
    }
    to.write_all(bytes.as_bytes())?;
    let mut reply = String::new();
    read_value(from, &mut reply)?;
    if reply.starts_with('-') { Err(io::Error::other(reply)) } else { Ok(reply) }
}

fn read_value(from: &mut impl io::BufRead, to: &mut String) -> io::Result<()> {
    let mut line = String::new();
    if from.read_line(&mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    to.push_str(&line);
    let count = line.get(1..).and_then(|digits| digits.trim().parse::<i64>().ok()).unwrap_or(-1);
    match line.as_bytes().first() {
        Some(b'$') if count >= 0 => {
            let mut bytes = vec![0; usize::try_from(count).unwrap_or(0) + 2];
            from.read_exact(&mut bytes)?;
            to.push_str(&String::from_utf8_lossy(&bytes));
        }
        Some(b'*') => {
            for _ in 0..count {
                read_value(from, to)?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// Three primaries with a replica each.
#[derive(Debug)]
pub struct RedisCluster {
    /// The servers; the first three were made primaries.
    pub servers: Vec<RedisServer>,
}

impl RedisCluster {
    /// Starts six servers, makes them a Cluster, and waits until it is one.
    ///
    /// # Errors
    /// Where they do not become one in time.
    pub fn start() -> io::Result<Self> {
        Self::start_with(&RedisOptions::new().with("cluster-node-timeout 2000"))
    }

    /// The same, of servers with these options.
    ///
    /// # Errors
    /// Where they do not become one in time.
    pub fn start_with(options: &RedisOptions) -> io::Result<Self> {
        let mut servers = Vec::new();
        for _ in 0..6 {
            let options = options
                .clone()
                .with("cluster-enabled yes")
                // Replicas are there at once, and not five seconds later.
                .with("repl-diskless-sync-delay 0")
                .with(format!("cluster-port {}", free_port()?));
            servers.push(RedisServer::start(options)?);
        }
        let addresses: Vec<_> = servers.iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
        let made = Command::new("redis-cli")
            .args(["--cluster", "create"])
            .args(&addresses)
            .args(["--cluster-replicas", "1", "--cluster-yes"])
            .stdin(Stdio::null())
            .output()?;
        if !made.status.success() {
            return Err(io::Error::other(String::from_utf8_lossy(&made.stdout).into_owned()));
        }
        let cluster = Self { servers };
        for server in &cluster.servers {
            server.wait_for(&["CLUSTER", "INFO"], "cluster_state:ok")?;
        }
        for server in cluster.primaries() {
            server.wait_for(&["INFO", "replication"], "state=online")?;
        }
        Ok(cluster)
    }

    /// Those that are primaries now.
    pub fn primaries(&self) -> impl Iterator<Item = &RedisServer> {
        let is_one =
            |server: &&RedisServer| server.command(&["ROLE"]).is_ok_and(|role| role.contains("master\r\n"));
        self.servers.iter().filter(is_one)
    }

    /// Its URL.
    #[must_use]
    pub fn url(&self) -> String {
        let hosts: Vec<_> =
            self.servers.iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
        format!("redis-cluster://{}", hosts.join(","))
    }
}

/// A primary, a replica, and three sentinels that watch them under the name `main`.
#[derive(Debug)]
pub struct RedisSentinel {
    /// The first was made the primary.
    pub servers: Vec<RedisServer>,
    /// The sentinels.
    pub sentinels: Vec<RedisServer>,
}

impl RedisSentinel {
    /// Starts them, and waits until the sentinels know each other and the replica.
    ///
    /// # Errors
    /// Where that takes too long.
    pub fn start() -> io::Result<Self> {
        let primary = RedisServer::start(RedisOptions::new())?;
        let port = primary.port();
        let replica = RedisServer::start(RedisOptions::new().with(format!("replicaof 127.0.0.1 {port}")))?;
        replica.wait_for(&["INFO", "replication"], "master_link_status:up")?;
        let watch = || {
            RedisOptions::new()
                .with(format!("sentinel monitor main 127.0.0.1 {port} 2"))
                .with("sentinel down-after-milliseconds main 1000")
                // On a busy machine, a shorter one ends a failover after the replica was promoted, and the sentinels take that
                // back when the old primary returns.
                .with("sentinel failover-timeout main 15000")
        };
        let sentinels =
            (0..3).map(|_| RedisServer::start_as(watch(), true)).collect::<io::Result<Vec<_>>>()?;
        for sentinel in &sentinels {
            sentinel.wait_for(&["INFO", "sentinel"], "slaves=1,sentinels=3")?;
        }
        Ok(Self { servers: vec![primary, replica], sentinels })
    }

    /// Its URL.
    #[must_use]
    pub fn url(&self) -> String {
        let hosts: Vec<_> =
            self.sentinels.iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
        format!("redis-sentinel://{}/main", hosts.join(","))
    }
}
