//! The kind of the server, and the records that its configuration can lose.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use oncegate_core::{Capabilities, Durability, Fencing};
use redis::{Value, cmd};

use crate::contract::AUDIT_KEY;
use crate::error::{Failure, RedisOpenError};
use crate::link::{Wire, ask_all};
use crate::options::{RedisOptions, Topology, Wait};
use crate::rights::{MissingCommands, refused};

/// The severity of a [`Finding`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Severity {
    /// The server is configured well.
    Fine,
    /// An operator should know.
    Warning,
}

/// A finding about the server, as a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The severity.
    pub severity: Severity,
    /// The sentence.
    pub text: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The results of an inspection. Of several primaries the worst counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Server {
    pub(crate) name: String,
    pub(crate) policy: Option<String>,
    pub(crate) aof: Option<bool>,
    pub(crate) fsync: Option<String>,
    /// True if the server does not flush while it rewrites its append-only file.
    pub(crate) pauses: bool,
    pub(crate) replicas: Option<u64>,
    /// The number of connected replicas that acknowledged something recently: the fewest and the most of one primary.
    pub(crate) live_replicas: Option<(u64, u64)>,
    /// The commands that the user of this store may not call.
    pub(crate) refused: MissingCommands,
    /// True if the default user may write records. Redis loads its append-only file as that user.
    pub(crate) default_writes: Option<bool>,
    pub(crate) fails_over: bool,
    pub(crate) evicts: bool,
    pub(crate) wait: Option<Wait>,
    /// True if the server may know `WAITAOF`.
    pub(crate) waitaof: bool,
}

/// Asks the server, and refuses one that the scripts cannot run on.
pub(crate) async fn inspect(wire: &Wire, options: &RedisOptions) -> Result<Server, RedisOpenError> {
    let mut worst: Option<Server> = None;
    for node in nodes(wire, options).await? {
        let server = read(&node, options)?;
        worst = Some(match worst {
            None => server,
            Some(other) => other.or_worse(server),
        });
    }
    let mut worst =
        worst.ok_or_else(|| RedisOpenError::Unreachable("the Cluster has no primary".to_owned()))?;
    // A part of a Cluster that is down is no information about rights; other commands find that out.
    worst.refused = refused(wire, options.timeout).await.unwrap_or_default();
    Ok(worst)
}

/// A replica that was silent for longer is not counted. The same as the server's own `min-replicas-max-lag` by default.
const LAG_MAX: Duration = Duration::from_secs(10);

/// The number of replicas of a primary that could acknowledge a write in time. `None` if the primary does not report it.
fn live_replicas(node: &Node, wait: Option<Wait>) -> Option<u64> {
    node.get("connected_slaves")?;
    let most = wait.map_or(LAG_MAX, |wait| wait.timeout.max(LAG_MAX)).as_secs();
    let is_live = |about: &str| {
        let get = |name: &str| about.split(',').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
        let lag = get("lag").and_then(|lag| lag.parse::<u64>().ok());
        get("state") == Some("online") && lag.is_none_or(|lag| lag <= most)
    };
    let is_number = |name: &str| {
        let digits = name.strip_prefix("slave").unwrap_or_default();
        !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit())
    };
    let count = node.iter().filter(|(name, about)| is_number(name) && is_live(about)).count();
    u64::try_from(count).ok()
}

/// Refuses a server whose configuration would lose records although the options do not accept that.
pub(crate) async fn check_fit(
    wire: &Wire,
    options: &RedisOptions,
    server: &Server,
) -> Result<(), RedisOpenError> {
    if server.evicts && !options.danger_allow_eviction {
        let policy = server.policy.as_deref().unwrap_or("?");
        return Err(RedisOpenError::Unfit(format!(
            "the server's maxmemory-policy is {policy}: when its memory is used up it removes records, and each of their keys \
             executes again. Set it to noeviction, or set danger-allow-eviction=true"
        )));
    }
    if let Some(wait) = options.wait {
        waits(wire, options, wait, server).await?;
    }
    Ok(())
}

/// Checks that replicas and disks can be waited for: first by the server's report, then by trying it.
async fn waits(
    wire: &Wire,
    options: &RedisOptions,
    wait: Wait,
    server: &Server,
) -> Result<(), RedisOpenError> {
    let unfit = |what: String| Err(RedisOpenError::Unfit(what));
    let refused = |failure: Failure, name: &str, words: &str| match failure {
        Failure::Refused(code) if code == "ERR" => RedisOpenError::Unfit(format!("{name}: {words}")),
        Failure::Forbidden(_) => {
            RedisOpenError::Unfit(format!("{name}: the server's ACL does not allow it; grant it to the user"))
        }
        failure => failure.into(),
    };
    if wait.aof {
        if !server.waitaof {
            return unfit(format!(
                "wait-aof: needs Redis from 7.2 on, or Valkey, and the server is {}; take a newer one, or leave wait-aof out",
                server.name
            ));
        }
        if server.aof == Some(false) {
            return unfit(
                "wait-aof: the server's appendonly is no, and nothing is on its disk before it counts; set appendonly \
                 yes, or leave wait-aof out"
                    .to_owned(),
            );
        }
        let mut command = cmd("WAITAOF");
        command.arg(1).arg(0).arg(1);
        ask_all(wire, &command, options.timeout).await.map_err(|failure| {
            let words = "needs Redis from 7.2 on, or Valkey, and appendonly yes; or leave it out";
            refused(failure, "wait-aof (WAITAOF)", words)
        })?;
    }
    if wait.replicas > 0 {
        let mut command = cmd("WAIT");
        command.arg(0).arg(1);
        ask_all(wire, &command, options.timeout)
            .await
            .map_err(|failure| refused(failure, "wait-replicas (WAIT)", "the server does not know it"))?;
    }
    Ok(())
}

type Node = HashMap<String, String>;

/// The reports of all primaries about themselves.
async fn nodes(wire: &Wire, options: &RedisOptions) -> Result<Vec<Node>, RedisOpenError> {
    let limit = options.timeout;
    let mut info = cmd("INFO");
    info.arg("everything");
    let infos = match ask_all(wire, &info, limit).await {
        Ok(infos) => infos,
        // Forbidden or renamed. The findings name what cannot be known.
        Err(failure) if failure.is("NOPERM") || failure.is("ERR") => vec![Value::Nil],
        Err(failure) => return Err(failure.into()),
    };
    let mut config = cmd("CONFIG");
    config.arg("GET").arg("append*").arg(PAUSES);
    let configs = match ask_all(wire, &config, limit).await {
        Ok(configs) => configs,
        Err(Failure::Refused(_) | Failure::Forbidden(_)) => Vec::new(),
        Err(failure) => return Err(failure.into()),
    };
    let default_writes = default_writes(wire, options).await?;
    // The replies of a Cluster have no order, so the worst setting counts for all primaries.
    let mut nodes: Vec<Node> = infos.into_iter().map(info_of).collect();
    for config in configs {
        let pairs: HashMap<String, String> = redis::from_redis_value(config).unwrap_or_default();
        if pairs.get(PAUSES).is_some_and(|pauses| pauses == "yes") {
            for node in &mut nodes {
                node.insert(PAUSES.to_owned(), "yes".to_owned());
            }
        }
        if let Some(fsync) = pairs.get("appendfsync") {
            for node in &mut nodes {
                let known = node.entry("appendfsync".to_owned()).or_insert_with(|| fsync.clone());
                if fsync != "always" {
                    known.clone_from(fsync);
                }
            }
        }
    }
    if let Some(writes) = default_writes {
        for node in &mut nodes {
            node.insert(DEFAULT_WRITES.to_owned(), writes.to_string());
        }
    }
    Ok(nodes)
}

/// With `yes`, nothing is flushed while the append-only file is rewritten.
const PAUSES: &str = "no-appendfsync-on-rewrite";

/// The name under which the result for the default user is stored among the server's own reports.
const DEFAULT_WRITES: &str = "oncegate:default";

/// Tells if the default user may do what the scripts do. Without the fix of redis/redis#14541 and valkey-io/valkey#3983, a
/// server that loads its append-only file skips every write of a script that the default user may not do.
async fn default_writes(wire: &Wire, options: &RedisOptions) -> Result<Option<bool>, RedisOpenError> {
    if options.user.as_deref().is_none_or(|user| user == "default") {
        return Ok(Some(true));
    }
    let mut command = cmd("ACL");
    command.arg("DRYRUN").arg("default").arg("SET").arg(AUDIT_KEY).arg("value");
    match ask_all(wire, &command, options.timeout).await {
        Ok(replies) => Ok(Some(replies.iter().all(|reply| *reply == Value::Okay))),
        Err(Failure::Refused(_) | Failure::Forbidden(_)) => Ok(None),
        Err(failure) => Err(failure.into()),
    }
}

fn info_of(info: Value) -> Node {
    let text: String = redis::from_redis_value(info).unwrap_or_default();
    let pair =
        |line: &str| line.trim_end().split_once(':').map(|(name, value)| (name.to_owned(), value.to_owned()));
    text.lines().filter_map(pair).collect()
}

fn read(node: &Node, options: &RedisOptions) -> Result<Server, RedisOpenError> {
    let get = |name: &str| node.get(name).cloned();
    let valkey = get("valkey_version");
    let version = valkey.clone().or_else(|| get("redis_version"));
    let product =
        if valkey.is_some() || get("server_name").as_deref() == Some("valkey") { "Valkey" } else { "Redis" };
    let major = version.as_deref().and_then(|version| version.split('.').next()?.parse::<u32>().ok());
    if major.is_some_and(|major| major < 7) {
        let version = version.unwrap_or_default();
        return Err(RedisOpenError::Unfit(format!(
            "the server is {product} {version}; 7.0 is the oldest that can be used"
        )));
    }
    // The scripts spell numbers through a C `long`, which has to hold a time in milliseconds.
    if get("arch_bits").as_deref() == Some("32") {
        return Err(RedisOpenError::Unfit(format!(
            "the server is a 32-bit {product}; a 64-bit one is needed"
        )));
    }
    match (get("redis_mode").or_else(|| get("server_mode")).as_deref(), &options.topology) {
        (Some("sentinel"), _) => {
            return Err(RedisOpenError::Unfit(
                "the address is that of a sentinel; write redis-sentinel://…/service".to_owned(),
            ));
        }
        (Some("cluster"), Topology::Single | Topology::Sentinel { .. }) => {
            return Err(RedisOpenError::Unfit(
                "the server is part of a Cluster; write redis-cluster://".to_owned(),
            ));
        }
        (Some("standalone"), Topology::Cluster) => {
            return Err(RedisOpenError::Unfit(
                "the server is not part of a Cluster; write redis://".to_owned(),
            ));
        }
        _ => {}
    }
    if get("role").as_deref() == Some("slave") {
        return Err(RedisOpenError::Unreachable("the server is a replica".to_owned()));
    }
    let policy = get("maxmemory_policy");
    let minor = version.as_deref().and_then(|version| version.split('.').nth(1)?.parse::<u32>().ok());
    let waitaof = product == "Valkey" || major.zip(minor).is_none_or(|version| version >= (7, 2));
    Ok(Server {
        name: version.map_or_else(
            || "a server of an unknown version".to_owned(),
            |version| format!("{product} {version}"),
        ),
        evicts: policy.as_deref().is_some_and(|policy| policy != "noeviction"),
        policy,
        aof: get("aof_enabled").map(|enabled| enabled == "1"),
        fsync: get("appendfsync"),
        pauses: get(PAUSES).is_some(),
        replicas: get("connected_slaves").and_then(|count| count.parse().ok()),
        live_replicas: live_replicas(node, options.wait).map(|count| (count, count)),
        refused: MissingCommands::default(),
        default_writes: node.get(DEFAULT_WRITES).map(|writes| writes == "true"),
        fails_over: options.topology != Topology::Single,
        wait: options.wait,
        waitaof,
    })
}

impl Server {
    fn or_worse(mut self, other: Self) -> Self {
        if self.name != other.name {
            self.name = format!("{}, {}", self.name, other.name);
        }
        if !self.evicts {
            (self.policy, self.evicts) = (self.policy.and(other.policy), other.evicts);
        }
        self.waitaof &= other.waitaof;
        self.pauses |= other.pauses;
        self.aof = self.aof.zip(other.aof).map(|(one, two)| one && two);
        if other.fsync.as_deref() != Some("always") {
            self.fsync = other.fsync;
        }
        self.replicas = self.replicas.zip(other.replicas).map(|(one, two)| one.max(two));
        let live = self.live_replicas.zip(other.live_replicas);
        self.live_replicas = live.map(|(one, two)| (one.0.min(two.0), one.1.max(two.1)));
        self
    }

    fn is_synced(&self) -> bool {
        self.aof == Some(true)
            && self.fsync.as_deref() == Some("always")
            && !self.pauses
            && self.replicas == Some(0)
            && self.default_writes == Some(true)
            && !self.fails_over
            && !self.evicts
            && self.policy.is_some()
    }

    /// Returns true if what the server wrote is there again after a restart, but for the last of it. What could not be read
    /// counts as missing, as in the findings.
    fn is_logged(&self) -> bool {
        self.aof == Some(true) && self.default_writes != Some(false)
    }

    pub(crate) fn durability(&self) -> Durability {
        match (self.is_synced(), self.is_logged()) {
            (true, _) => Durability::Synced,
            (false, true) => Durability::Buffered,
            (false, false) => Durability::Unlogged,
        }
    }

    /// The reason why no request with a new key can be executed now, if it is known.
    pub(crate) fn stopped(&self) -> Option<String> {
        let refused = &self.refused.of_requests;
        if !refused.is_empty() {
            let names = refused.join(", ");
            return Some(format!(
                "the server's ACL does not allow the user {names} on oncegate:*, and no request with a key can be executed; \
                 grant it (docs/reference/store-contract-redis.md lists all commands)"
            ));
        }
        let wanted = self.wait.map_or(0, |wait| wait.replicas);
        let (_, most) = self.live_replicas.filter(|(_, most)| *most < u64::from(wanted))?;
        Some(format!(
            "wait-replicas is {wanted}, and the server has {most} replicas that are connected and keep up: no request with a new \
             key can be executed until there are enough"
        ))
    }

    /// The promises of the store on this server.
    pub(crate) fn capabilities(&self) -> Capabilities {
        let fencing = if self.is_synced() { Fencing::Monotonic } else { Fencing::Equality };
        Capabilities::new("redis", self.durability(), fencing)
    }

    /// The findings, as sentences.
    pub(crate) fn findings(&self) -> Vec<Finding> {
        let fine = |text: String| Finding { severity: Severity::Fine, text };
        let warning = |text: &str| Finding { severity: Severity::Warning, text: text.to_owned() };
        let mut found = vec![fine(self.name.clone())];
        found.push(match (&self.policy, self.evicts) {
            (None, _) => warning(
                "maxmemory-policy could not be read (INFO is not allowed); anything but noeviction removes records, and \
                 their keys execute again",
            ),
            (Some(policy), true) => Finding {
                severity: Severity::Warning,
                text: format!(
                    "maxmemory-policy is {policy}: when memory is used up, records are removed, and their keys EXECUTE AGAIN"
                ),
            },
            (Some(_), false) => fine("maxmemory-policy noeviction: when memory is used up, requests with a key are refused".to_owned()),
        });
        found.push(match (self.aof, self.fsync.as_deref()) {
            (None, _) => warning(
                "appendonly could not be read (INFO is not allowed); expect to lose every record \
                 when the server stops",
            ),
            (Some(false), _) => warning(
                "appendonly no: a server that stops loses every record since its last snapshot, and their keys execute again",
            ),
            (Some(true), Some("always")) if self.pauses => warning(
                "no-appendfsync-on-rewrite yes: while the append-only file is rewritten, nothing is flushed; a machine that fails \
                 then loses what came since, and its keys execute again (with wait-aof nothing is granted meanwhile)",
            ),
            (Some(true), Some("always")) => fine("appendonly yes, appendfsync always: on disk before it counts".to_owned()),
            (Some(true), Some("everysec")) if self.wait.is_some_and(|wait| wait.aof) => warning(
                "appendfsync everysec, and wait-aof: a claim and a completion are on disk before they count; a machine that \
                 fails loses about the last second of renewals, so that an owner's lease may end early, and responses \
                 that were replayed before they counted",
            ),
            (Some(true), Some("everysec")) => warning(
                "appendfsync everysec: a machine that fails loses about the last second of records, and their keys execute \
                 again; a server process that is killed loses nothing",
            ),
            (Some(true), Some(_)) => warning(
                "appendfsync no: a machine that fails loses what the operating system had not written yet, often half a \
                 minute of records, and their keys execute again",
            ),
            (Some(true), None) => warning(
                "appendonly yes, but appendfsync could not be read (CONFIG is not allowed); anything but always loses the \
                 last records when the machine fails, and their keys execute again",
            ),
        });
        match (self.aof, self.default_writes) {
            (Some(false), _) | (_, Some(true)) => {}
            (_, Some(false)) => found.push(warning(
                "the default user may not write: a server without the fix of redis/redis#14541 (valkey-io/valkey#3983) SKIPS \
                 EVERY RECORD when it loads its append-only file, and their keys execute again; write \
                 `user default off ~* &* +@all`, which does not allow a login either",
            )),
            (_, None) => found.push(warning(
                "the rights of the default user could not be read (ACL DRYRUN is not allowed); if it may not write, a server \
                 without the fix of redis/redis#14541 (valkey-io/valkey#3983) skips every record when it loads its \
                 append-only file",
            )),
        }
        if self.fails_over || self.replicas.is_some_and(|count| count > 0) {
            found.push(warning(if self.wait.is_some_and(|wait| wait.replicas > 0) {
                "replicas: a failover may lose records that too few replicas had; those that were waited for are lost only \
                 where the sentinels or the Cluster promote another replica"
            } else {
                "replicas: they are behind, and a failover loses what they had not got yet, though it was acknowledged; \
                 their keys execute again"
            }));
        }
        if let Some(why) = self.stopped() {
            found.push(warning(&why));
        } else if let (Some(wait), Some((fewest, _))) = (self.wait, self.live_replicas)
            && fewest < u64::from(wait.replicas)
        {
            found.push(warning(&format!(
                "wait-replicas is {}, and a primary of the Cluster has {fewest} replicas that are connected and keep up: no request \
                 with a new key of its part can be executed until there are enough",
                wait.replicas
            )));
        }
        if !self.refused.of_operators.is_empty() {
            let names = self.refused.of_operators.join(", ");
            found.push(warning(&format!(
                "the server's ACL does not allow the user {names} on oncegate:{{audit}}: operators can resolve no record"
            )));
        }
        if self.replicas.is_none() {
            found.push(warning("the number of replicas could not be read (INFO is not allowed)"));
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server() -> Server {
        Server {
            name: "Redis 7.0.15".to_owned(),
            policy: Some("noeviction".to_owned()),
            aof: Some(true),
            fsync: Some("always".to_owned()),
            replicas: Some(0),
            live_replicas: Some((0, 0)),
            default_writes: Some(true),
            waitaof: true,
            ..Server::default()
        }
    }

    #[test]
    fn the_promise_follows_the_configuration() {
        let promise = |server: &Server| {
            let found = server.capabilities();
            (found.durability, found.fencing)
        };
        assert_eq!(promise(&server()), (Durability::Synced, Fencing::Monotonic));
        assert!(server().findings().iter().all(|finding| finding.severity == Severity::Fine));
        let buffered = [
            Server { policy: None, ..server() },
            Server { evicts: true, ..server() },
            Server { fsync: Some("everysec".to_owned()), ..server() },
            Server { fsync: Some("no".to_owned()), ..server() },
            Server { fsync: None, ..server() },
            Server { pauses: true, ..server() },
            Server { replicas: Some(1), ..server() },
            Server { replicas: None, ..server() },
            Server { fails_over: true, ..server() },
            Server { default_writes: None, ..server() },
        ];
        let unlogged = [
            Server { aof: Some(false), ..server() },
            Server { aof: None, ..server() },
            Server { default_writes: Some(false), ..server() },
        ];
        let buffered = buffered.into_iter().map(|server| (server, Durability::Buffered));
        let unlogged = unlogged.into_iter().map(|server| (server, Durability::Unlogged));
        for (server, durability) in buffered.chain(unlogged) {
            assert_eq!(promise(&server), (durability, Fencing::Equality), "{server:?}");
            let warnings = server.findings().iter().filter(|f| f.severity == Severity::Warning).count();
            assert_eq!(warnings, 1, "{server:?}");
        }
    }

    #[test]
    fn a_server_that_the_scripts_do_not_run_on_is_refused() {
        let options = RedisOptions::from_url("redis://127.0.0.1").unwrap();
        let read = |pairs: &[(&str, &str)]| {
            let pairs = [("redis_version", "7.0.15"), ("redis_mode", "standalone")].iter().chain(pairs);
            read(&pairs.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(), &options)
        };
        assert!(read(&[]).is_ok());
        for (version, knows) in [("7.0.15", false), ("7.2.0", true), ("8.0.1", true), ("next", true)] {
            assert_eq!(read(&[("redis_version", version)]).unwrap().waitaof, knows, "{version}");
        }
        assert!(read(&[("valkey_version", "7.2.5")]).unwrap().waitaof);
        assert!(read(&[("arch_bits", "64")]).is_ok());
        for unfit in [
            ("arch_bits", "32"),
            ("redis_version", "6.2.9"),
            ("redis_mode", "cluster"),
            ("redis_mode", "sentinel"),
        ] {
            assert!(matches!(read(&[unfit]), Err(RedisOpenError::Unfit(_))), "{unfit:?}");
        }
    }

    #[test]
    fn the_worst_of_several_primaries_counts() {
        let worse = [
            Server { aof: Some(false), ..server() },
            Server { fsync: Some("no".to_owned()), ..server() },
            Server { pauses: true, ..server() },
            Server { waitaof: false, ..server() },
            Server { evicts: true, policy: Some("allkeys-lru".to_owned()), ..server() },
        ];
        for worse in worse {
            assert_eq!(server().or_worse(worse.clone()), worse);
            assert_eq!(worse.clone().or_worse(server()), worse);
        }
    }
}
