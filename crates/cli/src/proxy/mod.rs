//! The sidecar's data path: listeners, the layer, the upstream.
//!
//! The path of a request: `listen` accepts its connection, the layer of `oncegate-http` decides if and under which key it
//! runs, and `forward` sends it to the upstream. The layer stores the response before the client gets it.

mod admit;
mod authorize;
mod body;
mod cached;
pub(crate) mod certificate;
mod client;
mod coarse_timer;
mod cross_origin;
mod forward;
mod framing;
mod handshakes;
mod headers;
mod hosts;
mod id_watch;
pub(crate) mod interim;
mod jwks;
mod late;
mod listen;
mod live;
mod pool;
mod published;
mod reconcile;
mod reload;
mod request_limit;
mod run;
pub(crate) mod tls;

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use oncegate_core::RecordId;
use oncegate_engine::{Engine, LogThrottle};
use tokio::sync::watch;

pub(crate) use headers::{is_always_removed, rewrite};
pub(crate) use jwks::{KeySetSource, read_key_set};
pub(crate) use listen::{BoundAddress, ConnectionLimit};
pub(crate) use request_limit::RequestLimit;
use run::max_idle_connections;
pub(crate) use run::{DEFAULT_SCOPE, HOSTS_COMPARED, run};
pub(crate) use tls::{
    ToService, check_certificate_file, connector, handshake_hint, server_config, trusting_system,
};

use crate::admin::{Draining, Metrics};
use crate::config::{Config, UpstreamProtocol};
use crate::systemd::ThreadHealth;
use crate::trace::Tracer;
use coarse_timer::CoarseTimer;
use forward::UpstreamClient;
use handshakes::RefusedHandshakes;
use listen::{DrainResult, ThreadListener};
use live::{Live, ThreadLive};
use pool::Pool;

/// The most field lines in the head of a request or a response, with any protocol. Verbose services have a hundred.
pub(crate) const MAX_LINES: usize = 1000;

/// The largest head of a request or a response, in bytes, with any protocol: several times the limit of common servers. Also
/// the most bytes that are read from a connection at a time, and so the largest piece that waits in memory.
pub(crate) const MAX_HEAD: usize = 128 * 1024;
const MAX_HEAD_U32: u32 = MAX_HEAD as u32;

/// The size at which the HTTP/2 library rejects the head of a response and reports nothing about it. It is far beyond
/// [`MAX_HEAD`], which is checked afterwards.
pub(crate) const MAX_LIBRARY_HEAD: u32 = 8 * 1024 * 1024;

/// The time after which a silent HTTP/2 service that owes a response gets a ping, and the time in which it must
/// answer the ping. Without it, a lost connection would hold all requests for a long time.
const UPSTREAM_PING: Duration = Duration::from_secs(10);

/// The interval between log lines about a limit that is reached.
const FULL_WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// Everything that the data path needs.
pub(crate) struct DataPath {
    pub(crate) engine: Engine,
    pub(crate) metrics: Metrics,
    pub(crate) tracer: Tracer,
    /// The limit for all threads together.
    pub(crate) connections: ConnectionLimit,
    pub(crate) without_key: RequestLimit,
    /// Set from the first signal to stop on.
    pub(crate) draining: Draining,
    /// The signs of life of the threads, if a service manager expects them.
    pub(crate) health: Option<ThreadHealth>,
    pub(crate) live: watch::Receiver<Live>,
}

/// The threads that serve.
pub(crate) struct Serving(Vec<JoinHandle<io::Result<Unfinished>>>);

/// The requests that still ran at the end of the drain timeout.
#[derive(Clone, Debug, Default)]
struct Unfinished {
    /// The requests of all threads, because each thread waits for all of them.
    requests: usize,
    has_connections: bool,
    /// The records whose results the store has not accepted. Each thread takes its own away when it ends, so these are the
    /// records of all threads together.
    lost: BTreeSet<RecordId>,
}

/// The most records that the log names at the end. An operator settles these one by one.
const MAX_LOST_NAMED: usize = 1000;

/// Logs the results that end with this process.
fn log_lost_results(lost: &BTreeSet<RecordId>) {
    for record in lost.iter().take(MAX_LOST_NAMED) {
        tracing::error!(
            %record,
            "the result of an operation is lost: the service sent it, the store did not accept it, and this process ends; the outcome \
             of its record is unknown"
        );
    }
    if lost.len() >= MAX_LOST_NAMED {
        tracing::error!(named = MAX_LOST_NAMED, "more results may be lost than are named");
    }
}

impl DataPath {
    /// Serves on these sockets, one thread each, until `stop` turns true.
    pub(crate) fn serve(
        self,
        sockets: Vec<std::net::TcpListener>,
        stop: &watch::Receiver<bool>,
    ) -> Result<Serving, String> {
        let full_warnings = Arc::new(LogThrottle::new(FULL_WARNING_INTERVAL));
        let handshakes = Arc::new(RefusedHandshakes::new(self.metrics.clone()));
        let mut threads = Vec::new();
        for (number, socket) in sockets.into_iter().enumerate() {
            let mut live = self.live.clone();
            let timers = CoarseTimer::default();
            let current =
                ThreadLive::new(&live.borrow_and_update(), &self.metrics, &self.without_key, &timers)?;
            let front = ThreadListener {
                current: Arc::new(current),
                live,
                connections: self.connections.clone(),
                metrics: self.metrics.clone(),
                draining: self.draining.clone(),
                tracer: self.tracer.clone(),
                handshakes: handshakes.clone(),
                full_warnings: full_warnings.clone(),
                timers,
            };
            let (engine, stop, health) = (self.engine.clone(), stop.clone(), self.health.clone());
            let thread = std::thread::Builder::new().name(format!("proxy-{number}")).spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                runtime.block_on(async {
                    if let Some(health) = health {
                        tokio::spawn(health.beat());
                    }
                    let DrainResult { until, is_closed } = front.serve(socket, stop).await?;
                    // Handlers whose clients have gone run on the threads that took them.
                    let left = engine.drain(until.saturating_duration_since(Instant::now())).await;
                    // A result that waits for the store is a task, too, and no request: its record is named.
                    let requests = left.saturating_sub(engine.pending_settlements());
                    let lost = engine.records_pending_settlement(MAX_LOST_NAMED).into_iter().collect();
                    Ok(Unfinished { requests, has_connections: !is_closed, lost })
                })
            });
            threads.push(thread.map_err(|error| format!("cannot start a thread: {error}"))?);
        }
        Ok(Serving(threads))
    }
}

fn pool_of(config: &Config) -> Result<Pool, String> {
    let connector = tls::connector(&config.to, UpstreamProtocol::Http1, config.upstream_connect_timeout)?;
    Ok(Pool::new(&config.to, connector, config.upstream_idle_timeout, max_idle_connections(config)))
}

fn client_of(config: &Config, protocol: UpstreamProtocol) -> Result<UpstreamClient, String> {
    let connector = tls::connector(&config.to, protocol, config.upstream_connect_timeout)?;
    // For the library, 0 means that each connection carries only one request.
    let max_idle = if config.upstream_idle_timeout.is_zero() { 0 } else { max_idle_connections(config) };
    Ok(Client::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(config.upstream_idle_timeout)
        .pool_max_idle_per_host(max_idle)
        .http1_max_buf_size(MAX_HEAD)
        .http1_max_headers(MAX_LINES)
        .http2_max_header_list_size(MAX_LIBRARY_HEAD)
        .http2_keep_alive_interval(UPSTREAM_PING)
        .http2_keep_alive_timeout(UPSTREAM_PING)
        .http2_only(protocol == UpstreamProtocol::Http2)
        .build(connector))
}

impl Serving {
    /// Waits until all threads have stopped.
    pub(crate) fn join(self) -> Result<(), String> {
        let mut all = Unfinished::default();
        for thread in self.0 {
            match thread.join() {
                Ok(Ok(unfinished)) => {
                    all.requests = all.requests.max(unfinished.requests);
                    all.has_connections |= unfinished.has_connections;
                    all.lost.extend(unfinished.lost);
                }
                Ok(Err(error)) => return Err(format!("cannot serve: {error}")),
                Err(_) => return Err("a serving thread panicked".into()),
            }
        }
        if all.has_connections {
            tracing::warn!("connections were still open when drain-timeout was over");
        }
        if all.requests > 0 {
            tracing::warn!(
                left = all.requests,
                "requests were still running when drain-timeout was over; their outcome will be unknown"
            );
        }
        log_lost_results(&all.lost);
        Ok(())
    }
}
