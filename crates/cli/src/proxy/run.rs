//! `oncegate proxy`: starts the sidecar from its configuration, and stops it.

use std::io::{ErrorKind, Write as _};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::{ErrorChain, MemoryStore, Store, SystemClock};
use oncegate_embedded::{EmbeddedOptions, EmbeddedStore};
use oncegate_engine::{Breaker, Engine};
use oncegate_postgres::messages::MessageOperator;
use oncegate_postgres::{PostgresOptions, PostgresStore};
use oncegate_redis::{RedisOptions, RedisStore, Severity};
use oncegate_seal::{KeylessStore, SealKeys, SealedStore};
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{oneshot, watch};

use super::late::{self, StoreOpenError};
use super::live::Live;
use super::reconcile::ReconcileClients;
use super::reload::Reloader;
use super::{BoundAddress, ConnectionLimit, DataPath, RequestLimit, cached, server_config};
use crate::access_log::AccessLog;
use crate::activity::Activity;
use crate::admin::{
    self, AbandonedRecords, AdminLive, AdminState, BackupStore, Dashboard, Draining, Expositions,
    MAX_CONNECTIONS, ReadyChecks, RefusedReloads, Rows, Surveys, count_messages, count_records,
};
use crate::check::{existing, has_other_files};
use crate::config::{Config, ProxyArgs, StoreChoice, StoreUrl, duration_text};
use crate::keys::list_unsettled_at;
use crate::otlp::OtlpExporter;
use crate::seal::{self, DeadLetterKeys};
use crate::signals::Signals;
use crate::systemd::ServiceManager;
use crate::trace::Tracer;

/// Runs the sidecar until it is told to stop.
pub(crate) fn run(args: &ProxyArgs) -> Result<(), String> {
    let runtime = |name: &str| {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name(name)
            .enable_all()
            .build();
        runtime.map_err(|error| format!("cannot start a runtime: {error}"))
    };
    let control = runtime("control")?;
    // Apart, so that the computing time of large listings delays neither health checks nor the control of the sidecar.
    let operators = runtime("operators")?;
    // First of all, because before this, SIGHUP ends the process.
    let hangup = {
        let _context = control.enter();
        signal(SignalKind::hangup()).map_err(|error| format!("cannot listen for signals: {error}"))?
    };
    let mut config = Config::load(args).map_err(|problems| problems.to_string())?;
    crate::log::start(config.log_format)?;
    for warning in &config.warnings {
        tracing::warn!("{warning}");
    }
    tracing::info!(config = config.safe_summary(), "starting");
    if config.has_default_scope() {
        tracing::info!("{DEFAULT_SCOPE}");
    }
    if config.compares_hosts_across_sidecars() {
        tracing::info!("{HOSTS_COMPARED}");
    }
    allow_many_files(&mut config);
    let result = control.block_on(serve(config, args, hangup, operators.handle().clone()));
    operators.shutdown_timeout(Duration::from_secs(1));
    control.shutdown_timeout(Duration::from_secs(1));
    result
}

/// The log line for a configuration without a scope.
pub(crate) const DEFAULT_SCOPE: &str = "`scope` is not set: callers are told apart by Authorization. A retry with a renewed token is \
     another caller and executes again. Requests without any credential are one caller: with the same key they get each other's \
     responses. Requests with another credential, such as a cookie, are refused";

/// The log line for sidecars that share keys while hosts are compared.
pub(crate) const HOSTS_COMPARED: &str = "the host and port of a request are compared: if clients send one request to several names or ports \
     of the service, the second is refused (host-differs) until `authority` is ignore";

/// The open files that are reserved for other purposes than connections of clients: those of the admin address, and 64 for the
/// store, logs and certificates.
const RESERVED_FILES: u64 = MAX_CONNECTIONS as u64 + 64;

/// The most idle connections to the service, of all threads together, and the share of the open files that they may use.
const MAX_IDLE: u64 = 1024;
const IDLE_SHARE: u64 = 8;

/// The default limit of requests without a key is at least this, if files are left: a load balancer may send many requests over
/// a few HTTP/2 connections.
const MIN_WITHOUT_KEY: usize = 1024;

/// The limits that need open files: one file for each connection of a client, and one for each request in flight, for its
/// connection to the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileUse {
    connections: usize,
    in_flight: usize,
    /// `None` is the value of `connections`, but at least [`MIN_WITHOUT_KEY`], or less if fewer files are left.
    without_key: Option<usize>,
}

/// Raises the limit of open files as far as the system allows. If that is not enough, the limits of connections and requests are
/// lowered: clients must not use up the files that the admin address and the store need.
pub(super) fn allow_many_files(config: &mut Config) {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(error = %ErrorChain(&error), "cannot raise the limit of open files");
    }
    let allowed = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let wanted = FileUse {
        connections: config.max_connections,
        in_flight: config.max_in_flight,
        without_key: config.max_in_flight_without_key,
    };
    let granted = wanted.within(allowed);
    let is_less = (granted.connections, granted.in_flight) != (wanted.connections, wanted.in_flight)
        || wanted.without_key.is_some_and(|without_key| Some(without_key) != granted.without_key);
    if is_less {
        tracing::warn!(
            allowed,
            max_connections = granted.connections,
            max_in_flight = granted.in_flight,
            max_in_flight_without_key = granted.without_key,
            "the system allows this process too few open files, so these limits are lower than configured. Raise the limit of \
             open files (ulimit -n), or lower these settings",
        );
    }
    config.max_connections = granted.connections;
    config.max_in_flight = granted.in_flight;
    config.max_in_flight_without_key = granted.without_key;
}

impl FileUse {
    /// The limits for this number of open files.
    fn within(self, allowed: u64) -> Self {
        let other = RESERVED_FILES.min(allowed / 2) + idle_files(allowed);
        let available = usize::try_from(allowed.saturating_sub(other)).unwrap_or(usize::MAX);
        let requests_max = (available / 4).max(1);
        let left = available.saturating_sub(self.connections).saturating_sub(self.in_flight);
        let without_key = self.without_key.unwrap_or_else(|| {
            let wanted = self.connections.max(MIN_WITHOUT_KEY);
            wanted.min(left.max(requests_max))
        });
        let needed = self.connections.saturating_add(self.in_flight).saturating_add(without_key);
        if needed <= available {
            return Self { without_key: Some(without_key), ..self };
        }
        let (in_flight, without_key) = (self.in_flight.min(requests_max), without_key.min(requests_max));
        let left = available.saturating_sub(in_flight).saturating_sub(without_key);
        Self { connections: self.connections.min(left).max(1), in_flight, without_key: Some(without_key) }
    }
}

/// The number of idle connections to the service for this number of open files.
fn idle_files(allowed: u64) -> u64 {
    MAX_IDLE.min(allowed / IDLE_SHARE)
}

/// The number of idle connections to the service for one thread.
pub(super) fn max_idle_connections(config: &Config) -> usize {
    let allowed = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let all = usize::try_from(idle_files(allowed)).unwrap_or(usize::MAX);
    (all / config.threads.unwrap_or_else(cores)).max(1)
}

/// The error for an address, with its flag and the most likely reason.
fn cannot_listen(flag: &str, address: SocketAddr, error: &std::io::Error) -> String {
    let hint = match error.kind() {
        ErrorKind::AddrInUse => {
            "; another program or another sidecar uses this address; each sidecar on a machine needs its own"
        }
        ErrorKind::AddrNotAvailable => "; it is not an address of this machine",
        ErrorKind::PermissionDenied => "; ports below 1024 need a special permission",
        _ => "",
    };
    format!("{flag} {address}: cannot listen: {error}{hint}")
}

/// Limits the time that a stopping sidecar waits for pending writes to the cache.
const CACHE_TIMEOUT: Duration = Duration::from_secs(1);

async fn serve(
    config: Config,
    args: &ProxyArgs,
    hangup: Signal,
    operators: tokio::runtime::Handle,
) -> Result<(), String> {
    let config = Arc::new(config);
    // Before this, each of these signals ends the process.
    let mut signals = Signals::new().map_err(|error| format!("cannot listen for signals: {error}"))?;
    let tls = config.tls.as_ref().map(server_config).transpose()?;
    let threads = config.threads.unwrap_or_else(cores);
    // Before a store is created: a start that fails leaves nothing behind.
    let listen =
        BoundAddress::new(config.listen).map_err(|error| cannot_listen("--listen", config.listen, &error))?;
    let admin =
        BoundAddress::new(config.admin).map_err(|error| cannot_listen("--admin", config.admin, &error))?;
    let (listen_address, admin_address) = (listen.address, admin.address);
    let backup = BackupStore::default();
    let opening = async {
        let seal_keys = match &config.seal {
            Some(settings) => Some(seal::load(settings, |line| tracing::warn!("{line}")).await?),
            None => None,
        };
        Ok::<_, String>((seal_keys, late::open(&config, &backup).await?, cached::open(&config).await?))
    };
    let (seal_keys, opened, cache) = tokio::select! {
        opened = opening => opened?,
        // Nothing is served yet, so nothing is drained.
        () = signals.first() => {
            tracing::info!("stopped during the start");
            return Ok(());
        }
    };
    let sockets =
        listen.listen(threads).map_err(|error| cannot_listen("--listen", listen_address, &error))?;
    let admin = admin
        .listen(1)
        .and_then(|mut sockets| sockets.pop().map_or_else(|| Err(ErrorKind::AddrNotAvailable.into()), Ok))
        .and_then(tokio::net::TcpListener::from_std)
        .map_err(|error| cannot_listen("--admin", admin_address, &error))?;
    let metrics = cached::metrics(opened.store.clone(), cache.as_ref());
    let control = tokio::runtime::Handle::current();
    let breaker = Breaker::builder(metrics.measured(opened.store)).with_runtime(control.clone());
    let breaker = if opened.is_open { breaker } else { breaker.opened() };
    let breaker =
        breaker.with_probe_timeout(config.store_timeout).map_err(|error| error.to_string())?.build();
    let (store, cached) = cached::before(Arc::new(breaker.clone()), cache);
    // Counting needs no response, so it decrypts none.
    let counted = store.clone();
    // Before the cache, which so has sealed responses only.
    let seal = seal_keys.map(|keys| {
        tracing::info!("sealing: {}", seal::describe(&keys));
        // It runs no steps itself, and services may record theirs in clear.
        Arc::new(SealedStore::new(store.clone(), keys).without_steps())
    });
    // Without keys, it counts what it refuses.
    let (store, seal_refusals): (Arc<dyn Store>, _) = match seal.clone() {
        Some(seal) => (seal.clone(), seal.refusals()),
        None => {
            let keyless = KeylessStore::new(store);
            let refusals = keyless.refusals();
            (Arc::new(keyless), refusals)
        }
    };
    let keys_in_use = seal.as_ref().map_or_else(SealKeys::default, |seal| seal.keys());
    tokio::spawn(seal::watch(counted.clone(), seal_refusals.clone(), keys_in_use.clone()));
    let left = AbandonedRecords::default();
    let builder = Engine::builder(store).with_runtime(control);
    let builder = match config.service.clone() {
        Some(service) => builder.with_service(service),
        None => builder,
    };
    let builder = match config.id_secret.clone() {
        Some(secret) => {
            tracing::info!("the id secret {} keys the identities of records", secret.name());
            builder.with_id_secret(secret)
        }
        None => builder,
    };
    let activity = Activity::default();
    let observers = ((metrics.clone(), activity.clone()), left.clone());
    #[cfg(feature = "failpoints")]
    let builder = builder.with_observer((observers, crate::failpoint::Failpoint::from_env()));
    #[cfg(not(feature = "failpoints"))]
    let builder = builder.with_observer(observers);
    let engine = builder.build();
    tokio::spawn(super::id_watch::run(engine.id_guard().clone()));
    tokio::spawn(count_records(counted, left.clone(), metrics.clone(), list_unsettled_at(admin_address)));
    if let Some(messages) = messages(&config) {
        tokio::spawn(count_messages(messages, metrics.clone()));
    }
    let (sampled, counters) = (activity.clone(), metrics.clone());
    tokio::spawn(async move { sampled.hour().sample(|| counters.outcome_counts()).await });
    let access_log = config.access_log.map(|format| AccessLog::start(format, &metrics));
    let access_log =
        access_log.transpose().map_err(|error| format!("cannot start the access log: {error}"))?;
    let questions = ReconcileClients::new(config.clone(), metrics.clone())?;
    let layer = config.layer(engine.clone(), |route| questions.settings(route));
    let observers = ((metrics.clone(), activity.clone()), access_log.clone());
    let layer = layer.map_err(|error| error.to_string())?.with_observer(observers);

    let (stop, stopped) = watch::channel(false);
    let draining = Draining::default();
    let (live, live_changes) = watch::channel(Live { config: config.clone(), layer: layer.clone(), tls });
    let admin_live = AdminLive {
        config: config.clone(),
        layer: layer.clone(),
        token: config.admin_token.clone(),
        metrics_token: config.metrics_token.clone(),
        jwt: config.jwt.clone(),
        refused_reloads: RefusedReloads::default(),
    };
    let (admin_live, admin_changes) = watch::channel(admin_live);
    let connections = ConnectionLimit::new(config.max_connections);
    let without_key = RequestLimit::new(config.max_in_flight_without_key.unwrap_or(config.max_connections));
    // They do not pass the cache, which has responses for replays, and need not keep these.
    let rows = Rows::new(&breaker, seal.as_ref().map(|seal| seal.keys()));
    let state = AdminState {
        engine: engine.clone(),
        breaker,
        metrics: metrics.clone(),
        activity: activity.clone(),
        draining: draining.clone(),
        connections: connections.clone(),
        without_key: without_key.clone(),
        dashboard: Dashboard::new(listen_address),
        messages: messages(&config).map(|messages| messages.with_opener(DeadLetterKeys(keys_in_use.clone()))),
        left,
        live: admin_changes,
        seal: seal.clone(),
        seal_refusals,
        ready_checks: ReadyChecks::default(),
        rows,
        surveys: Surveys::default(),
        expositions: Expositions::default(),
        backup,
    };
    let (otlp, tracer) = match config.otlp.clone() {
        Some(options) => {
            let started = OtlpExporter::start(options, state.clone());
            let (exporter, tracer) =
                started.map_err(|error| format!("cannot send to otlp-endpoint: {error}"))?;
            (Some(exporter), tracer)
        }
        None => (None, Tracer::silent()),
    };
    let (close, closed) = oneshot::channel::<()>();
    let admin = tokio::spawn(admin::serve(admin, state, operators, async { drop(closed.await) }));
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    let line = format!(
        "oncegate listening on {scheme}://{listen_address}, admin http://{admin_address}, upstream {}, store {}",
        config.to, config.store
    );
    if let Some(verifier) = config.jwt.clone() {
        metrics.watch(&verifier);
        tokio::spawn(async move { verifier.refresh().await });
    }
    let manager = ServiceManager::from_env();
    let reloader = Reloader::new(args.clone(), metrics.clone(), layer, live, admin_live, manager.clone())
        .with_seal_keys(seal.map(|seal| seal.keys()));
    let health = manager.thread_health();
    let path = DataPath {
        engine,
        metrics: metrics.clone(),
        tracer,
        connections,
        without_key,
        draining: draining.clone(),
        health: health.clone(),
        live: live_changes.clone(),
    };
    let serving = path.serve(sockets, &stopped)?;
    tokio::spawn(reloader.run(hangup));
    // The only line on the standard output, except the access log. An error is ignored.
    let _unread = writeln!(std::io::stdout(), "{line}");
    manager.ready(&line);
    if let Some(health) = health {
        tokio::spawn(manager.clone().watch(health));
    }

    let mut ended = tokio::task::spawn_blocking(move || serving.join());
    tokio::select! {
        result = &mut ended => return flatten(result),
        () = signals.first() => {}
    }
    let stopping_at = Instant::now();
    draining.begin();
    manager.stopping("Stopping: waiting for running requests");
    let (delay, drain) = {
        let live = live_changes.borrow();
        (live.config.shutdown_delay, live.config.drain_timeout)
    };
    if !delay.is_zero() {
        tracing::info!(
            delay = duration_text(delay),
            "stopping soon: /readyz is 503, and requests are still accepted for shutdown-delay"
        );
        tokio::select! {
            result = &mut ended => return flatten(result),
            () = tokio::time::sleep(delay) => {}
            () = signals.second() => return Err(SECOND_SIGNAL.into()),
        }
    }
    tracing::info!(
        drain = duration_text(drain),
        "stopping: no new connections; waiting for running requests, at most for drain-timeout"
    );
    let _all_stopped = stop.send(true);
    tokio::select! {
        result = ended => {
            // Last, so that an operator can watch the drain.
            drop(close);
            let _cancelled = admin.await;
            if let Some(access_log) = access_log {
                access_log.close();
            }
            if let Some(otlp) = otlp {
                otlp.close().await;
            }
            if let Some(cached) = cached {
                cached.close(CACHE_TIMEOUT).await;
            }
            let result = flatten(result);
            if result.is_ok() {
                let (spans_lost, log_lines_dropped) = (metrics.lost_spans(), crate::log::dropped().get());
                tracing::info!(
                    took = duration_text(Duration::from_millis(stopping_at.elapsed().as_millis() as u64)),
                    spans_lost,
                    log_lines_dropped,
                    "stopped"
                );
            }
            result
        }
        () = signals.second() => Err(SECOND_SIGNAL.into()),
    }
}

const SECOND_SIGNAL: &str = "stopped at once, by a second signal";

fn flatten(result: Result<Result<(), String>, tokio::task::JoinError>) -> Result<(), String> {
    result.unwrap_or_else(|error| Err(ErrorChain(&error).to_string()))
}

/// The default limits of a store in memory.
const MEMORY_MAX_RECORDS: u64 = 10_000_000;
const MEMORY_MAX_BYTES: u64 = 1 << 30;

/// Opens the store, or the store behind a cache.
pub(super) async fn open(config: &Config, backup: &BackupStore) -> Result<Arc<dyn Store>, StoreOpenError> {
    Ok(match config.store.store() {
        StoreChoice::Memory => Arc::new(
            MemoryStore::new(SystemClock::new())
                .with_max_records(config.max_records.unwrap_or(MEMORY_MAX_RECORDS))
                .with_max_record_bytes(config.max_store_bytes.unwrap_or(MEMORY_MAX_BYTES)),
        ),
        StoreChoice::Directory(directory) => {
            let found = existing(directory);
            if config.store_must_exist {
                found.clone().map_err(StoreOpenError::Unfit)?;
            }
            let options = EmbeddedOptions::new(directory)
                .with_memory_bytes(config.store_memory)
                .with_max_records(config.max_records.unwrap_or(u64::MAX))
                .with_max_record_bytes(config.max_store_bytes.unwrap_or(u64::MAX));
            let store = open_directory(directory, options)?;
            if found.is_err() {
                tracing::warn!(
                    directory = %directory.display(),
                    "a new, empty store was created: it has no key of an earlier store, whose retries would execute again. \
                     After the first start, set store-must-exist"
                );
            }
            let store = Arc::new(store);
            backup.set(&store);
            store
        }
        StoreChoice::Postgres(url) => Arc::new(open_postgres(url, config.store_timeout).await?),
        StoreChoice::Redis(options) => Arc::new(open_redis(options).await?),
        StoreChoice::Cached(_) => {
            return Err(StoreOpenError::Unfit("a cached store cannot contain another one".to_owned()));
        }
    })
}

pub(super) fn open_directory(
    directory: &Path,
    options: EmbeddedOptions,
) -> Result<EmbeddedStore, StoreOpenError> {
    if let Some(what) = has_other_files(directory) {
        return Err(StoreOpenError::Unfit(format!("--store {}: {what}", directory.display())));
    }
    EmbeddedStore::open(options).map_err(|error| {
        let what = format!("--store {}: {}", directory.display(), ErrorChain(&error));
        if error.is_full() { StoreOpenError::Unreachable(what) } else { StoreOpenError::Unfit(what) }
    })
}

async fn open_postgres(url: &StoreUrl, timeout: Duration) -> Result<PostgresStore, StoreOpenError> {
    let options = PostgresOptions::from_url(url.reveal())
        .map_err(|error| StoreOpenError::Unfit(ErrorChain(&error).to_string()))?;
    // After this time the breaker treats the store as out of reach, so the connection is given up, too.
    let options = options
        .with_command_timeout(timeout)
        .map_err(|error| StoreOpenError::Unfit(ErrorChain(&error).to_string()))?;
    PostgresStore::open(options).await.map_err(|error| match error {
        oncegate_postgres::PostgresOpenError::Unreachable { .. } => {
            StoreOpenError::Unreachable(ErrorChain(&error).to_string())
        }
        _ => StoreOpenError::Unfit(ErrorChain(&error).to_string()),
    })
}

/// The messages in the database of the store, if it is PostgreSQL.
fn messages(config: &Config) -> Option<MessageOperator> {
    match config.store.store() {
        StoreChoice::Postgres(url) => PostgresOptions::from_url(url.reveal()).ok().map(MessageOperator::new),
        _ => None,
    }
}

async fn open_redis(options: &RedisOptions) -> Result<RedisStore, StoreOpenError> {
    let shown = options.shown();
    let store = RedisStore::open(options.clone()).await.map_err(|error| match error {
        oncegate_redis::RedisOpenError::Unreachable(what) => {
            StoreOpenError::Unreachable(format!("store {shown}: {what}"))
        }
        error => StoreOpenError::Unfit(format!("store {shown}: {}", ErrorChain(&error))),
    })?;
    for finding in store.findings() {
        match finding.severity {
            Severity::Fine => tracing::info!("store {shown}: {finding}"),
            _ => tracing::warn!("store {shown}: {finding}"),
        }
    }
    Ok(store)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_files_for_the_store_and_the_admin_address() {
        let within = |allowed, connections, in_flight, without_key| {
            let wanted = FileUse { connections, in_flight, without_key };
            let granted = wanted.within(allowed);
            (granted.connections, granted.in_flight, granted.without_key.unwrap())
        };
        assert_eq!(within(1 << 20, 10_000, 2048, None), (10_000, 2048, 10_000));
        assert_eq!(within(1 << 20, 10_000, 2048, Some(20_000)), (10_000, 2048, 20_000));
        // A limit that is not configured uses the remaining files.
        assert_eq!(within(20_000, 10_000, 2048, None), (10_000, 2048, 6_736));
        assert_eq!(within(20_000, 10_000, 2048, Some(6_736)), (10_000, 2048, 6_736));
        assert_eq!(within(20_000, 10_000, 2048, Some(6_737)), (10_000, 2048, 4_696));
        assert_eq!(within(1024, 10_000, 2048, None), (352, 176, 176));
        assert_eq!(within(64, 10_000, 2048, None), (12, 6, 6));
        assert_eq!(within(64, 10, 1, None), (10, 1, 13));
        assert_eq!(within(1 << 20, 10, 1, None), (10, 1, 1024));
        assert_eq!(within(1 << 20, 10, 1, Some(20)), (10, 1, 20));
        assert_eq!(within(2, 10, 1, None), (1, 1, 1));
        for allowed in [64, 100, 1024, 4096, 20_000, 65_536] {
            for without_key in [None, Some(1), Some(5_000), Some(1_000_000)] {
                let (connections, in_flight, without_key) = within(allowed, 10_000, 2048, without_key);
                let used = (connections + in_flight + without_key) as u64;
                assert!(used + idle_files(allowed) + RESERVED_FILES.min(allowed / 2) <= allowed);
            }
        }
    }
}
