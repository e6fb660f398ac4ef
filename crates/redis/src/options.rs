//! The options of a store.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::RedisUrlError;

/// The address of a store, and its options. `Debug` and [`shown`](Self::shown) leave the password out.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisOptions {
    pub(crate) topology: Topology,
    pub(crate) tls: bool,
    pub(crate) hosts: Vec<(String, u16)>,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) database: u32,
    pub(crate) ca: Option<PathBuf>,
    pub(crate) connect_timeout: Duration,
    pub(crate) timeout: Duration,
    pub(crate) danger_allow_eviction: bool,
    pub(crate) wait: Option<Wait>,
}

/// The condition under which a claim and a completion count. At least one of the two is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wait {
    /// The number of replicas that must have it.
    pub(crate) replicas: u32,
    /// True if it must be on the disk of the server itself.
    pub(crate) aof: bool,
    pub(crate) timeout: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Topology {
    Single,
    Cluster,
    /// The name of the service, and the password of the sentinels.
    Sentinel {
        service: String,
    },
}

/// The times to wait for replicas and for disks by default. A server that flushes once a second takes a second.
const WAIT_REPLICAS: Duration = Duration::from_secs(1);
const WAIT_AOF: Duration = Duration::from_secs(3);

const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

/// The schemes of URLs, with the topology and TLS.
const SCHEMES: [(&str, Scheme, bool); 6] = [
    ("redis", Scheme::Single, false),
    ("rediss", Scheme::Single, true),
    ("redis-cluster", Scheme::Cluster, false),
    ("rediss-cluster", Scheme::Cluster, true),
    ("redis-sentinel", Scheme::Sentinel, false),
    ("rediss-sentinel", Scheme::Sentinel, true),
];

#[derive(Clone, Copy)]
enum Scheme {
    Single,
    Cluster,
    Sentinel,
}

impl RedisOptions {
    /// Tells if a text has the scheme of a URL of this store, valid or not.
    #[must_use]
    pub fn is_url(text: &str) -> bool {
        text.split_once("://").is_some_and(|(scheme, _)| SCHEMES.iter().any(|(name, ..)| *name == scheme))
    }

    /// Reads a URL:
    ///
    /// ```text
    /// redis://[user[:password]@]host[:6379][/database]
    /// redis-cluster://[user[:password]@]host[:6379][,host…]
    /// redis-sentinel://[user[:password]@]host[:26379][,host…]/service[/database]
    /// ```
    ///
    /// `rediss…` uses TLS. A password without a user is `:password@`. User and password may be percent-encoded, and must be if
    /// they contain one of `:@/?#%`. Parameters follow `?`, separated by `&`:
    ///
    /// | | default | |
    /// |---|---|---|
    /// | `timeout=2s` | 2s | the time for a command, from 10 ms to 60 s |
    /// | `connect-timeout=5s` | 5s | the time to connect |
    /// | `ca=FILE` | those of the system | the certificate authorities for TLS, in PEM |
    /// | `wait-replicas=1` | 0 | a claim and a completion count once this many replicas have them |
    /// | `wait-aof=local` | none | … once they are on the server's own disk; a server that reports it too early is refused |
    /// | `wait-timeout=1s` | 1s; with `wait-aof` 3s | the time to wait for each of the two; twice that if other callers wait |
    /// | `danger-allow-eviction=true` | false | accept a server that evicts records, which then execute again |
    ///
    /// # Errors
    /// [`RedisUrlError`], which does not repeat the password.
    pub fn from_url(url: &str) -> Result<Self, RedisUrlError> {
        let bad = |what: &str| RedisUrlError(what.to_owned());
        let (scheme, rest) = url.split_once("://").ok_or_else(|| bad("a Redis URL starts with redis://"))?;
        let (_, scheme, tls) = SCHEMES.into_iter().find(|(name, ..)| *name == scheme).ok_or_else(|| {
            bad("a Redis URL starts with redis://, rediss://, redis-cluster:// or redis-sentinel://")
        })?;
        if rest.contains('#') {
            return Err(bad("a Redis URL has no part after #; write %23 for it in a password"));
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(login), hosts),
            None => (None, authority),
        };
        let (user, password) = match login.map(|login| login.split_once(':').unwrap_or((login, ""))) {
            Some((user, password)) => (decoded(user)?, decoded(password)?),
            None => (None, None),
        };
        let port = if matches!(scheme, Scheme::Sentinel) { SENTINEL_PORT } else { PORT };
        let hosts = hosts.split(',').map(|host| host_of(host, port)).collect::<Result<Vec<_>, _>>()?;
        if matches!(scheme, Scheme::Single) && hosts.len() > 1 {
            return Err(bad("redis:// has one host; use redis-cluster:// or redis-sentinel:// for several"));
        }
        let database = |text: &str| match text {
            "" => Ok(0),
            text => text
                .parse()
                .map_err(|_| bad("the path of a Redis URL is the number of a database, such as /0")),
        };
        let (topology, database) = match scheme {
            Scheme::Single => (Topology::Single, database(path)?),
            Scheme::Cluster if path.is_empty() => (Topology::Cluster, 0),
            Scheme::Cluster => return Err(bad("a Cluster has no databases; leave the path out")),
            Scheme::Sentinel => {
                let (service, path) = path.split_once('/').unwrap_or((path, ""));
                let service = decoded(service)?
                    .ok_or_else(|| bad("redis-sentinel:// names the service behind the hosts: …/service"))?;
                (Topology::Sentinel { service }, database(path)?)
            }
        };
        let mut options = Self {
            topology,
            tls,
            hosts,
            user,
            password,
            database,
            ca: None,
            connect_timeout: Duration::from_secs(5),
            timeout: Duration::from_secs(2),
            danger_allow_eviction: false,
            wait: None,
        };
        options.read_query(query)?;
        Ok(options)
    }

    fn read_query(&mut self, query: &str) -> Result<(), RedisUrlError> {
        let (mut replicas, mut aof, mut wait_timeout) = (0, false, None);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let bad = |what: &str| RedisUrlError(format!("{name}: {what}"));
            match name {
                "timeout" => self.timeout = duration_of(value).ok_or_else(|| bad(DURATION))?,
                "connect-timeout" => {
                    self.connect_timeout = duration_of(value).ok_or_else(|| bad(DURATION))?
                }
                "wait-timeout" => wait_timeout = Some(duration_of(value).ok_or_else(|| bad(DURATION))?),
                "wait-replicas" => {
                    replicas = replicas_of(value).ok_or_else(|| bad("write a number of replicas"))?;
                }
                "wait-aof" => aof = value == "local" || return Err(bad(AOF)),
                "ca" => self.ca = decoded(value)?.map(PathBuf::from),
                "danger-allow-eviction" => {
                    self.danger_allow_eviction = value.parse().map_err(|_| bad("write true or false"))?;
                }
                _ => {
                    return Err(RedisUrlError(format!(
                        "{} the parameters of a Redis URL: timeout, connect-timeout, ca, wait-replicas, wait-aof, \
                         wait-timeout and danger-allow-eviction",
                        unknown_parameter(name)
                    )));
                }
            }
        }
        let usual = if aof { WAIT_AOF } else { WAIT_REPLICAS };
        let wait = Wait { replicas, aof, timeout: wait_timeout.unwrap_or(usual) };
        self.wait = (replicas > 0 || aof).then_some(wait);
        Ok(())
    }

    /// Sets the file of the certificate authorities for TLS, in PEM.
    #[must_use]
    pub fn with_ca(mut self, file: impl Into<PathBuf>) -> Self {
        self.ca = Some(file.into());
        self
    }

    /// The file of the certificate authorities for TLS; `None` for those of the system.
    #[must_use]
    pub fn ca(&self) -> Option<&Path> {
        self.ca.as_deref()
    }

    /// Accepts a server that evicts records when its memory is used up. An evicted record is absent: **its key executes
    /// again.**
    #[must_use]
    pub const fn with_danger_allow_eviction(mut self, allow: bool) -> Self {
        self.danger_allow_eviction = allow;
        self
    }

    pub(crate) fn is_cluster(&self) -> bool {
        self.topology == Topology::Cluster
    }

    /// The URL without user and password, for messages.
    #[must_use]
    pub fn shown(&self) -> String {
        let name = match (&self.topology, self.tls) {
            (Topology::Single, false) => "redis",
            (Topology::Single, true) => "rediss",
            (Topology::Cluster, false) => "redis-cluster",
            (Topology::Cluster, true) => "rediss-cluster",
            (Topology::Sentinel { .. }, false) => "redis-sentinel",
            (Topology::Sentinel { .. }, true) => "rediss-sentinel",
        };
        let hosts: Vec<_> = self
            .hosts
            .iter()
            .map(
                |(host, port)| {
                    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
                },
            )
            .collect();
        let path = match &self.topology {
            Topology::Single => format!("/{}", self.database),
            Topology::Cluster => String::new(),
            Topology::Sentinel { service } => format!("/{service}/{}", self.database),
        };
        format!("{name}://{}{path}", hosts.join(","))
    }
}

impl fmt::Debug for RedisOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisOptions").field("url", &self.shown()).finish_non_exhaustive()
    }
}

const DURATION: &str = "write a number and ms or s, such as 500ms or 2s, from 10ms to 60s";

const AOF: &str = "write local, for the server's own disk; those of replicas cannot be waited for (wait-replicas waits until \
                   they have it in memory)";

/// Names an unknown parameter, unless it may be a part of a password with `?` or `&` in it.
fn unknown_parameter(name: &str) -> String {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if name.len() <= 32 && name.chars().all(is_name) {
        format!("{name} is not one of")
    } else {
        "the URL has a parameter that is not one of".to_owned()
    }
}

/// No server has more replicas, and every version of it accepts this number.
const MAX_REPLICAS: u32 = 1000;

fn replicas_of(text: &str) -> Option<u32> {
    text.parse().ok().filter(|count| *count <= MAX_REPLICAS)
}

fn duration_of(text: &str) -> Option<Duration> {
    let (digits, unit) = match text.strip_suffix("ms") {
        Some(digits) => (digits, 1),
        None => (text.strip_suffix('s')?, 1000),
    };
    let millis = digits.parse::<u64>().ok()?.checked_mul(unit)?;
    (10..=60_000).contains(&millis).then(|| Duration::from_millis(millis))
}

fn host_of(text: &str, port: u16) -> Result<(String, u16), RedisUrlError> {
    let bad =
        || RedisUrlError("a host of a Redis URL is written host, host:port or [address]:port".to_owned());
    let (host, rest) = match text.strip_prefix('[') {
        Some(text) => text.split_once(']').ok_or_else(bad)?,
        None => text.split_at(text.find(':').unwrap_or(text.len())),
    };
    let port = match rest.strip_prefix(':') {
        Some(digits) => digits.parse().map_err(|_| bad())?,
        None if rest.is_empty() => port,
        None => return Err(bad()),
    };
    if host.is_empty() || host.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return Err(bad());
    }
    Ok((host.to_owned(), port))
}

/// Decodes percent-encoding. Empty text becomes `None`.
fn decoded(text: &str) -> Result<Option<String>, RedisUrlError> {
    let bad = || {
        RedisUrlError(
            "a % in a Redis URL must be followed by two hexadecimal digits; write %25 for it".to_owned(),
        )
    };
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let mut digit = || rest.next().and_then(|byte| char::from(byte).to_digit(16)).ok_or_else(bad);
        bytes.push(if byte == b'%' {
            let value = digit()? << 4 | digit()?;
            u8::try_from(value).map_err(|_| bad())?
        } else {
            byte
        });
    }
    let text = String::from_utf8(bytes).map_err(|_| bad())?;
    Ok((!text.is_empty()).then_some(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(url: &str) -> RedisOptions {
        RedisOptions::from_url(url).unwrap()
    }

    #[test]
    fn reads_every_topology() {
        let one = read("redis://localhost");
        assert_eq!(
            (one.shown().as_str(), &one.user, &one.password),
            ("redis://localhost:6379/0", &None, &None)
        );
        let one =
            read("rediss://app:p%40ss%3a@[::1]:7000/3?timeout=500ms&connect-timeout=1s&ca=/etc/ca%20x.pem");
        assert_eq!(one.shown(), "rediss://[::1]:7000/3");
        assert_eq!((one.user.as_deref(), one.password.as_deref()), (Some("app"), Some("p@ss:")));
        assert_eq!((one.timeout, one.connect_timeout), (Duration::from_millis(500), Duration::from_secs(1)));
        assert_eq!(one.ca, Some("/etc/ca x.pem".into()));
        let cluster = read("redis-cluster://:secret@a:1,b,c:3");
        assert_eq!(cluster.shown(), "redis-cluster://a:1,b:6379,c:3");
        assert_eq!((cluster.user, cluster.password.as_deref()), (None, Some("secret")));
        assert_eq!(read("redis-sentinel://a,b:1/main/2").shown(), "redis-sentinel://a:26379,b:1/main/2");
        assert!(read("redis://h?danger-allow-eviction=true").danger_allow_eviction);
    }

    #[test]
    fn reads_what_is_waited_for() {
        let wait =
            |replicas, aof, millis| Some(Wait { replicas, aof, timeout: Duration::from_millis(millis) });
        for (query, expected) in [
            ("", None),
            ("wait-timeout=2s", None),
            ("wait-replicas=0", None),
            ("wait-replicas=2", wait(2, false, 1000)),
            ("wait-replicas=2&wait-timeout=100ms", wait(2, false, 100)),
            ("wait-aof=local", wait(0, true, 3000)),
            ("wait-timeout=5s&wait-aof=local&wait-replicas=1", wait(1, true, 5000)),
        ] {
            for scheme in ["redis", "redis-cluster"] {
                assert_eq!(read(&format!("{scheme}://h?{query}")).wait, expected, "{scheme} {query}");
            }
        }
    }

    #[test]
    fn an_invalid_url_is_refused_without_repeating_the_password() {
        let table = [
            "redis://u:hunter2@",
            "redis://u:hunter2@h:x",
            "redis://u:hunter2@h:70000",
            "redis://u:hunter2@a,b",
            "redis://u:hunter2@h/x",
            "redis://u:hunter2%@h",
            "redis://u:hunter2%zz@h",
            "redis://u:hunter2#@h",
            "redis://u:hunter2@h?timeout=0s",
            "redis://u:hunter2@h?timeout=5",
            "redis://u:hunter2@h?wait-replicas=x",
            "redis://u:p@h?password=hunter2",
            "redis-cluster://u:hunter2@h/1",
            "redis://u:hunter2@h?wait-replicas=1001",
            "redis://u:hunter2@h?wait-aof=",
            "redis://u:hunter2@h?wait-aof=1",
            "redis://u:hunter2@h?wait-aof=hunter2",
            "redis-sentinel://u:hunter2@h/main?wait-aof=yes",
            "redis-sentinel://u:hunter2@h",
            "postgres://u:hunter2@h",
            "hunter2",
        ];
        for url in table {
            let error = RedisOptions::from_url(url).unwrap_err().to_string();
            assert!(!error.contains("hunter2"), "{url}: {error}");
        }
        let options = read("redis://u:hunter2@h");
        assert!(!format!("{options:?}{}", options.shown()).contains("hunter2"));
    }

    #[test]
    fn knows_its_urls() {
        for (url, is_one) in
            [("redis://", true), ("rediss-cluster://x", true), ("postgres://x", false), ("x", false)]
        {
            assert_eq!(RedisOptions::is_url(url), is_one, "{url}");
        }
    }
}
