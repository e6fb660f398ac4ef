//! The sidecar's data path: listeners, the layer, the upstream.
//!
//! A request's way: `listen` takes its connection, the layer of `oncegate-http` decides whether and under which key it
//! runs, `forward` sends it to the upstream and brings the answer back, which the layer stores before the client sees it.

mod admit;
mod body;
mod cross_origin;
mod forward;
mod headers;
mod late;
mod listen;
mod live;
mod reconcile;
mod reload;
mod run;
mod tiered;
pub(crate) mod tls;

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use oncegate_engine::Engine;
use tokio::sync::watch;

pub(crate) use listen::bind;
pub(crate) use run::{DEFAULT_SCOPE, run};
pub(crate) use tls::server_config;

use crate::admin::Metrics;
use crate::config::{Config, UpstreamProtocol};
use forward::UpstreamClient;
use listen::Front;
use live::{Live, ThreadLive};

/// How long an unused upstream connection is kept. Shorter than the five seconds after which common servers close theirs,
/// so that a request is seldom sent into a connection that is just being closed.
const UPSTREAM_IDLE: Duration = Duration::from_secs(4);

/// What is read of a service's answer at a time, and so the largest head and the largest piece that waits for a client.
const UPSTREAM_BUFFER: usize = 128 * 1024;

/// How long a service that speaks HTTP/2 may be silent while it owes an answer before it is asked whether it is there, and
/// how long it may take to say so. Otherwise a connection that was lost on the way would take all requests for a long time.
const UPSTREAM_PING: Duration = Duration::from_secs(10);

/// Everything that the data path needs.
pub(crate) struct DataPath {
    pub(crate) engine: Engine,
    pub(crate) metrics: Metrics,
    pub(crate) live: watch::Receiver<Live>,
}

/// The threads that serve.
pub(crate) struct Serving(Vec<JoinHandle<io::Result<()>>>);

impl DataPath {
    /// Serves on these sockets, one thread each, until `stop` turns true.
    pub(crate) fn serve(
        self,
        sockets: Vec<std::net::TcpListener>,
        stop: &watch::Receiver<bool>,
    ) -> Result<Serving, String> {
        let mut threads = Vec::new();
        for (number, socket) in sockets.into_iter().enumerate() {
            let mut live = self.live.clone();
            let current = ThreadLive::new(&live.borrow_and_update(), self.metrics.clone())?;
            let front = Front { current: Arc::new(current), live };
            let (engine, stop) = (self.engine.clone(), stop.clone());
            let thread = std::thread::Builder::new().name(format!("proxy-{number}")).spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                runtime.block_on(async {
                    let until = front.serve(socket, stop).await?;
                    // Handlers whose clients have gone run on the threads that took them.
                    let left = engine.drain(until.saturating_duration_since(Instant::now())).await;
                    if left > 0 {
                        tracing::warn!(left, "requests were still running; their outcome will be unknown");
                    }
                    Ok(())
                })
            });
            threads.push(thread.map_err(|error| format!("cannot start a thread: {error}"))?);
        }
        Ok(Serving(threads))
    }
}

fn client_of(config: &Config, protocol: UpstreamProtocol) -> Result<UpstreamClient, String> {
    let connector = tls::connector(&config.to, protocol, config.connect_timeout)?;
    Ok(Client::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(UPSTREAM_IDLE)
        .http1_max_buf_size(UPSTREAM_BUFFER)
        .http2_keep_alive_interval(UPSTREAM_PING)
        .http2_keep_alive_timeout(UPSTREAM_PING)
        .http2_only(protocol == UpstreamProtocol::Http2)
        .build(connector))
}

impl Serving {
    /// Waits until all have stopped.
    pub(crate) fn join(self) -> Result<(), String> {
        for thread in self.0 {
            match thread.join() {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return Err(format!("cannot serve: {error}")),
                Err(_) => return Err("a serving thread panicked".into()),
            }
        }
        Ok(())
    }
}
