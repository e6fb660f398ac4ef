//! `oncegate proxy`: from the configuration to a process that serves, and back out of it.

use std::io::{ErrorKind, Write as _};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{ErrorChain, MemoryStore, Store, SystemClock};
use oncegate_embedded::{EmbeddedOptions, EmbeddedStore};
use oncegate_engine::{Breaker, Engine};
use oncegate_postgres::{PostgresOptions, PostgresStore};
use oncegate_redis::{Gravity, RedisOptions, RedisStore};
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{oneshot, watch};

use super::late::{self, NotOpened};
use super::live::Live;
use super::reconcile::Questions;
use super::reload::Reloader;
use super::{BoundAddress, ConnectionLimit, DataPath, server_config, tiered};
use crate::access_log::AccessLog;
use crate::admin::{self, AdminLive, AdminState, Draining, LeftBehind, count_records};
use crate::check::{existing, has_other_things};
use crate::config::{Config, ProxyArgs, StoreChoice, StoreUrl};

/// Runs the sidecar until it is told to stop.
pub(crate) fn run(args: &ProxyArgs) -> Result<(), String> {
    let mut config = Config::load(args).map_err(|problems| problems.to_string())?;
    crate::log::start()?;
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
    let control = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("control")
        .enable_all()
        .build()
        .map_err(|error| format!("cannot start a runtime: {error}"))?;
    let result = control.block_on(serve(config, args));
    control.shutdown_timeout(Duration::from_secs(1));
    result
}

/// What holds while nobody has said how callers are told apart.
pub(crate) const DEFAULT_SCOPE: &str = "`scope` is not set: callers are told apart by Authorization, requests without any credential share \
     one scope (under one key they get each other's answers), and requests with another credential, such as a cookie, are refused";

/// What holds for sidecars that share keys while hosts are compared.
pub(crate) const HOSTS_COMPARED: &str = "the host and port of a request are compared: if clients send one request to several names or ports \
     of the service, the second is refused (host-differs) until `authority` is ignore";

/// Open files that are kept for what is not a connection of a client or to the service: the store, the admin address, logs,
/// certificates.
const RESERVED_FILES: u64 = 64;

/// Raises the limit of open files as far as the system allows. Every request under way takes two. If that is not enough for
/// `max-connections` and `max-in-flight`, both are lowered: clients who open connections must not take the admin address and the
/// store their files.
pub(super) fn allow_many_files(config: &mut Config) {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(error = %ErrorChain(&error), "the limit of open files stays");
    }
    let Some(allowed) = getrlimit(Resource::Nofile).current else { return };
    let (connections, in_flight) = within_files(allowed, config.max_connections, config.max_in_flight);
    if (connections, in_flight) != (config.max_connections, config.max_in_flight) {
        tracing::warn!(
            allowed,
            needed = config.max_connections as u64 + config.max_in_flight as u64 + RESERVED_FILES,
            "the system allows this process too few open files: max-connections is {connections} and max-in-flight {in_flight} in \
             place of {} and {}. Raise the limit (ulimit -n), or set these lower",
            config.max_connections,
            config.max_in_flight,
        );
        (config.max_connections, config.max_in_flight) = (connections, in_flight);
    }
}

/// What `max-connections` and `max-in-flight` may be where so many files may be open.
fn within_files(allowed: u64, connections: usize, in_flight: usize) -> (usize, usize) {
    let available = allowed.saturating_sub(RESERVED_FILES.min(allowed / 2));
    let available = usize::try_from(available).unwrap_or(usize::MAX);
    if connections.saturating_add(in_flight) <= available {
        return (connections, in_flight);
    }
    let in_flight = in_flight.min(available / 2).max(1);
    (connections.min(available - in_flight.min(available)).max(1), in_flight)
}

/// Names the flag, and what most often has the address.
fn cannot_listen(flag: &str, address: SocketAddr, error: &std::io::Error) -> String {
    let hint = match error.kind() {
        ErrorKind::AddrInUse => {
            "; another program has this address, or another sidecar: several on one machine need different ones"
        }
        ErrorKind::AddrNotAvailable => "; it is not an address of this machine",
        ErrorKind::PermissionDenied => "; ports below 1024 need a right of their own",
        _ => "",
    };
    format!("{flag} {address}: cannot listen: {error}{hint}")
}

/// How long a stopping sidecar waits for what is just being put into the front of its store.
const FRONT_PATIENCE: Duration = Duration::from_secs(1);

async fn serve(config: Config, args: &ProxyArgs) -> Result<(), String> {
    let config = Arc::new(config);
    // First of all: until then, each of them ends the process.
    let mut signals = Signals::new().map_err(|error| format!("cannot listen for signals: {error}"))?;
    let hangup =
        signal(SignalKind::hangup()).map_err(|error| format!("cannot listen for signals: {error}"))?;
    let tls = config.tls.as_ref().map(|files| server_config(&files.cert, &files.key)).transpose()?;
    let threads = config.threads.unwrap_or_else(cores);
    // Before a store is created: a start that fails leaves nothing behind.
    let listen =
        BoundAddress::new(config.listen).map_err(|error| cannot_listen("--listen", config.listen, &error))?;
    let admin =
        BoundAddress::new(config.admin).map_err(|error| cannot_listen("--admin", config.admin, &error))?;
    let (listen_address, admin_address) = (listen.address, admin.address);
    let opened = late::open(&config).await?;
    let tier = tiered::open(&config).await?;
    let sockets =
        listen.listen(threads).map_err(|error| cannot_listen("--listen", listen_address, &error))?;
    let admin = admin
        .listen(1)
        .and_then(|mut sockets| sockets.pop().map_or_else(|| Err(ErrorKind::AddrNotAvailable.into()), Ok))
        .and_then(tokio::net::TcpListener::from_std)
        .map_err(|error| cannot_listen("--admin", admin_address, &error))?;
    let metrics = tiered::metrics(opened.store.clone(), tier.as_ref());
    let control = tokio::runtime::Handle::current();
    let breaker = Breaker::builder(metrics.measured(opened.store)).with_runtime(control.clone());
    let breaker = if opened.is_there { breaker } else { breaker.opened() };
    let breaker = breaker.with_patience(config.store_patience).map_err(|error| error.to_string())?.build();
    let (store, tiered) = tiered::before(Arc::new(breaker.clone()), tier);
    let left = LeftBehind::default();
    let builder = Engine::builder(store).with_runtime(control);
    let builder = match config.service.clone() {
        Some(service) => builder.with_service(service),
        None => builder,
    };
    #[cfg(feature = "failpoints")]
    let builder =
        builder.with_observer(((metrics.clone(), left.clone()), crate::failpoint::Failpoint::from_env()));
    #[cfg(not(feature = "failpoints"))]
    let builder = builder.with_observer((metrics.clone(), left.clone()));
    let engine = builder.build();
    tokio::spawn(count_records(engine.store().clone(), left, metrics.clone()));
    let access_log = config.access_log.map(|format| AccessLog::start(format, &metrics));
    let access_log =
        access_log.transpose().map_err(|error| format!("cannot start the access log: {error}"))?;
    let questions = Questions::new(config.clone(), metrics.clone())?;
    let layer = config.layer(engine.clone(), |route| questions.settings(route));
    let layer =
        layer.map_err(|error| error.to_string())?.with_observer((metrics.clone(), access_log.clone()));

    let (stop, stopped) = watch::channel(false);
    let draining = Draining::default();
    let (live, live_changes) = watch::channel(Live { config: config.clone(), layer: layer.clone(), tls });
    let admin_live = AdminLive { layer: layer.clone(), token: config.admin_token.clone() };
    let (admin_live, admin_changes) = watch::channel(admin_live);
    let connections = ConnectionLimit::new(config.max_connections);
    let state = AdminState {
        engine: engine.clone(),
        breaker,
        metrics: metrics.clone(),
        draining: draining.clone(),
        connections: connections.clone(),
        live: admin_changes,
    };
    let (close, closed) = oneshot::channel::<()>();
    let admin = tokio::spawn(admin::serve(admin, state, async { drop(closed.await) }));
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    let line = format!(
        "oncegate listening on {scheme}://{listen_address}, admin http://{admin_address}, upstream {}, store {}",
        config.to, config.store
    );
    let reloader = Reloader::new(args.clone(), metrics.clone(), layer, live, admin_live);
    let path = DataPath { engine, metrics, connections, live: live_changes.clone() };
    let serving = path.serve(sockets, &stopped)?;
    tokio::spawn(reloader.run(hangup));
    // The one line on the standard output; whoever does not read it loses nothing.
    let _unread = writeln!(std::io::stdout(), "{line}");

    let mut ended = tokio::task::spawn_blocking(move || serving.join());
    tokio::select! {
        result = &mut ended => return flatten(result),
        () = signals.next() => {}
    }
    draining.begin();
    let (delay, drain) = {
        let live = live_changes.borrow();
        (live.config.shutdown_delay, live.config.drain_timeout)
    };
    if !delay.is_zero() {
        tracing::info!(?delay, "not ready any more; requests are still taken");
        tokio::select! {
            result = &mut ended => return flatten(result),
            () = tokio::time::sleep(delay) => {}
            () = signals.next() => return Err(SECOND_SIGNAL.into()),
        }
    }
    tracing::info!(?drain, "stopping; running requests are finished");
    let _nobody_listens = stop.send(true);
    tokio::select! {
        result = ended => {
            // Last, so that somebody can watch it drain.
            drop(close);
            let _cancelled = admin.await;
            if let Some(access_log) = access_log {
                access_log.close();
            }
            if let Some(tiered) = tiered {
                tiered.close(FRONT_PATIENCE).await;
            }
            flatten(result)
        }
        () = signals.next() => Err(SECOND_SIGNAL.into()),
    }
}

const SECOND_SIGNAL: &str = "stopped at once, by a second signal";

/// The signals that stop the sidecar.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        let (terminate, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        Ok(Self { terminate, interrupt })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

fn flatten(result: Result<Result<(), String>, tokio::task::JoinError>) -> Result<(), String> {
    result.unwrap_or_else(|error| Err(ErrorChain(&error).to_string()))
}

/// Opens the store, or the back of a tiered one.
pub(super) async fn open(config: &Config) -> Result<Arc<dyn Store>, NotOpened> {
    Ok(match config.store.back() {
        StoreChoice::Memory => {
            let clock = SystemClock::new();
            match config.max_records {
                Some(records) => {
                    let records = usize::try_from(records).unwrap_or(usize::MAX);
                    Arc::new(MemoryStore::with_capacity(clock, records))
                }
                None => Arc::new(MemoryStore::new(clock)),
            }
        }
        StoreChoice::Directory(directory) => {
            let found = existing(directory);
            if config.store_must_exist {
                found.clone().map_err(NotOpened::Unfit)?;
            }
            let options = EmbeddedOptions::new(directory)
                .with_cache_bytes(config.store_cache)
                .with_max_records(config.max_records.unwrap_or(u64::MAX))
                .with_max_record_bytes(config.max_store_bytes.unwrap_or(u64::MAX));
            let store = open_directory(directory, options)?;
            if found.is_err() {
                tracing::warn!(
                    directory = %directory.display(),
                    "a new, empty store was created: no key of an earlier store is known, and its retries execute again. \
                     After the first start, set store-must-exist"
                );
            }
            Arc::new(store)
        }
        StoreChoice::Postgres(url) => Arc::new(open_postgres(url, config.store_patience).await?),
        StoreChoice::Redis(options) => Arc::new(open_redis(options).await?),
        StoreChoice::Tiered(_) => {
            return Err(NotOpened::Unfit("a tiered store has no other one in it".to_owned()));
        }
    })
}

pub(super) fn open_directory(directory: &Path, options: EmbeddedOptions) -> Result<EmbeddedStore, NotOpened> {
    if let Some(what) = has_other_things(directory) {
        return Err(NotOpened::Unfit(format!("--store {}: {what}", directory.display())));
    }
    EmbeddedStore::open(options).map_err(|error| {
        let what = format!("--store {}: {}", directory.display(), ErrorChain(&error));
        if error.is_full() { NotOpened::Unreachable(what) } else { NotOpened::Unfit(what) }
    })
}

async fn open_postgres(url: &StoreUrl, patience: Duration) -> Result<PostgresStore, NotOpened> {
    let options = PostgresOptions::new(url.reveal())
        .map_err(|error| NotOpened::Unfit(ErrorChain(&error).to_string()))?;
    // What takes longer is out of reach to the breaker, so its connection is of no use either.
    let options = options.with_command_timeout(patience);
    PostgresStore::open(options).await.map_err(|error| match error {
        oncegate_postgres::OpenError::Unreachable { .. } => {
            NotOpened::Unreachable(ErrorChain(&error).to_string())
        }
        _ => NotOpened::Unfit(ErrorChain(&error).to_string()),
    })
}

async fn open_redis(options: &RedisOptions) -> Result<RedisStore, NotOpened> {
    let shown = options.shown();
    let store = RedisStore::open(options.clone()).await.map_err(|error| match error {
        oncegate_redis::OpenError::Unreachable(what) => {
            NotOpened::Unreachable(format!("store {shown}: {what}"))
        }
        error => NotOpened::Unfit(format!("store {shown}: {}", ErrorChain(&error))),
    })?;
    for finding in store.findings() {
        match finding.gravity {
            Gravity::Fine => tracing::info!("store {shown}: {finding}"),
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
        assert_eq!(within_files(1 << 20, 10_000, 1024), (10_000, 1024));
        assert_eq!(within_files(11_088, 10_000, 1024), (10_000, 1024));
        assert_eq!(within_files(11_087, 10_000, 1024), (9_999, 1024));
        assert_eq!(within_files(1024, 10_000, 1024), (480, 480));
        assert_eq!(within_files(64, 10_000, 1024), (16, 16));
        assert_eq!(within_files(64, 10, 1), (10, 1));
        assert_eq!(within_files(2, 10, 1), (1, 1));
    }
}
