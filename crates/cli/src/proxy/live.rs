//! The state that a reload replaces while requests are served.
//!
//! The control thread sends a new [`Live`]. Each serving thread builds its own [`ThreadLive`] from it, which each connection
//! uses from its next request on. A running request keeps the configuration that it began with.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::uri::Scheme;
use oncegate_http::{Idempotency, IdempotencyLayer};
use tokio_rustls::TlsAcceptor;
use tower_layer::Layer as _;

use super::body::Uploads;
use super::client::ConnectionState;
use super::coarse_timer::CoarseTimer;
use super::forward::{Forward, Upstream};
use super::headers::{HeadFields, Peer};
use super::hosts::HostLimit;
use super::request_limit::RequestLimit;
use super::tls::ListenerTls;
use super::{client_of, max_idle_connections, pool_of};
use crate::admin::Metrics;
use crate::config::{Config, UpstreamProtocol};

/// The configuration in force, and the objects that all threads share.
#[derive(Clone)]
pub(crate) struct Live {
    pub(crate) config: Arc<Config>,
    pub(crate) layer: IdempotencyLayer,
    pub(crate) tls: Option<ListenerTls>,
}

/// The live configuration of one thread.
pub(super) struct ThreadLive {
    /// Grows with each reload, so that a connection can check cheaply if it is up to date.
    generation: AtomicU64,
    current: Mutex<Current>,
}

struct Current {
    layer: IdempotencyLayer,
    upstream: Arc<Upstream>,
    tls: Option<TlsAcceptor>,
}

impl ThreadLive {
    pub(super) fn new(
        live: &Live,
        metrics: &Metrics,
        without_key: &RequestLimit,
        timers: &CoarseTimer,
    ) -> Result<Self, String> {
        let upstream = upstream_of(live, (metrics, without_key, timers), None)?;
        Ok(Self { generation: AtomicU64::new(0), current: Mutex::new(Current::of(live, upstream)) })
    }

    /// Switches to a new configuration. After an error, the previous one stays in force.
    pub(super) fn replace(&self, live: &Live) -> Result<(), String> {
        let mut current = self.lock();
        let before = current.upstream.clone();
        let shared = (&before.metrics, &before.without_key, &before.timers);
        let upstream = upstream_of(live, shared, Some(&before))?;
        *current = Current::of(live, upstream);
        // Open connections of clients keep the upstream of their last request until their next one.
        if let Some(pool) = &before.pool
            && !current.upstream.pool.as_ref().is_some_and(|kept| Arc::ptr_eq(kept, pool))
        {
            pool.close();
        }
        self.generation.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    pub(super) fn tls(&self) -> Option<TlsAcceptor> {
        self.lock().tls.clone()
    }

    /// The service of a connection.
    pub(super) fn service(
        self: &Arc<Self>,
        peer: Arc<Peer>,
        connection: Arc<ConnectionState>,
    ) -> ConnectionService {
        let made = self.make(&peer, &connection);
        ConnectionService { thread: self.clone(), peer, connection, made }
    }

    fn make(&self, peer: &Arc<Peer>, connection: &Arc<ConnectionState>) -> ConnectionParts {
        let current = self.lock();
        let forward = Forward::new(current.upstream.clone(), peer.clone(), connection.clone());
        ConnectionParts {
            generation: self.generation.load(Ordering::Relaxed),
            config: current.upstream.config.clone(),
            service: current.layer.layer(forward),
        }
    }

    /// Only one thread takes this lock, so no thread ever waits for it.
    fn lock(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Current {
    fn of(live: &Live, upstream: Upstream) -> Self {
        // Threads share no object whose references every request counts: all cores would contend for the count.
        let tls = live.tls.clone().map(|tls| TlsAcceptor::from(tls.config));
        Self { layer: live.layer.copy_for_core(), upstream: Arc::new(upstream), tls }
    }
}

/// The upstream of a thread. Connections of the previous one are kept if the service and the settings of connections are the
/// same.
fn upstream_of(
    live: &Live,
    (metrics, without_key, timers): (&Metrics, &RequestLimit, &CoarseTimer),
    before: Option<&Upstream>,
) -> Result<Upstream, String> {
    let config = live.config.clone();
    let (metrics, without_key, timers) = (metrics.clone(), without_key.clone(), timers.clone());
    let head_fields = HeadFields::new(config.clone());
    let uploads = Arc::new(Uploads { head_fields, limit: without_key.clone() });
    let is_same = |before: &&Upstream| before.config.reaches_the_same_upstream(&config);
    if let Some(Upstream { pool, client, http1, hosts, .. }) = before.filter(is_same) {
        let (pool, client, http1, hosts) = (pool.clone(), client.clone(), http1.clone(), hosts.clone());
        return Ok(Upstream { pool, client, http1, hosts, without_key, config, uploads, metrics, timers });
    }
    let protocol = config.upstream_protocol;
    let is_plain_http1 = !config.may_speak_http2() && config.to.scheme == Scheme::HTTP;
    let pool = is_plain_http1.then(|| pool_of(&config)).transpose()?.map(Arc::new);
    let client = client_of(&config, protocol)?;
    let http1 = (protocol == UpstreamProtocol::Auto && config.may_speak_http2())
        .then(|| client_of(&config, UpstreamProtocol::Http1));
    let hosts = Arc::new(HostLimit::new(max_idle_connections(&config), config.upstream_idle_timeout));
    let http1 = http1.transpose()?;
    Ok(Upstream { pool, client, http1, hosts, without_key, config, uploads, metrics, timers })
}

/// The service of one connection, which follows a reload from the next request on.
pub(super) struct ConnectionService {
    thread: Arc<ThreadLive>,
    peer: Arc<Peer>,
    connection: Arc<ConnectionState>,
    made: ConnectionParts,
}

/// The objects that are built from one configuration for one connection.
struct ConnectionParts {
    generation: u64,
    config: Arc<Config>,
    service: Idempotency<Forward>,
}

impl ConnectionService {
    /// The configuration in force, and the service that follows it.
    pub(super) fn up_to_date(&mut self) -> (&Config, &mut Idempotency<Forward>) {
        if self.made.generation != self.thread.generation.load(Ordering::Relaxed) {
            self.made = self.thread.make(&self.peer, &self.connection);
        }
        (&self.made.config, &mut self.made.service)
    }
}
