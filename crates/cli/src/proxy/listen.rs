//! Takes connections: one single-threaded runtime per core, each with a listener of its own on the same address.
//!
//! A connection lives on one core, its upstream connections too, and nothing of it is handed between threads.

use std::convert::Infallible;
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use http_body_util::Either;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tower_service::Service as _;

use super::admit::admit;
use super::cross_origin::{CrossOrigin, preflight};
use super::headers::Peer;
use super::live::{Live, ThreadLive};

/// How long a client may take for a TLS handshake, and for the head of a request.
const PATIENCE: Duration = Duration::from_secs(30);

/// How long it may take when the process is told to stop: as long as what is on its way needs to arrive. Nothing of it has
/// begun, so nothing is lost with it.
const LAST_PATIENCE: Duration = Duration::from_secs(1);

/// Sockets on one address, as many as there are threads.
pub(crate) fn bind(
    address: SocketAddr,
    threads: usize,
) -> io::Result<(SocketAddr, Vec<std::net::TcpListener>)> {
    // Sockets that share an address would be shared with another process of the same user as well; so this one first
    // finds out whether the address is free.
    let first = listener(address, false)?;
    let address = first.local_addr()?;
    if threads == 1 {
        return Ok((address, vec![first]));
    }
    drop(first);
    let sockets = (0..threads).map(|_| listener(address, true)).collect::<io::Result<_>>()?;
    Ok((address, sockets))
}

fn listener(address: SocketAddr, shared: bool) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    #[cfg(unix)]
    socket.set_reuse_port(shared)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(4096)?;
    Ok(socket.into())
}

/// What one thread serves.
pub(super) struct Front {
    pub(super) current: Arc<ThreadLive>,
    /// Tells of reloads.
    pub(super) live: watch::Receiver<Live>,
}

impl Front {
    /// Serves until `stop` turns true; then stops accepting and finishes what runs, for the drain time-out at the longest.
    /// Returns when that time is over.
    pub(super) async fn serve(
        mut self,
        socket: std::net::TcpListener,
        mut stop: watch::Receiver<bool>,
    ) -> io::Result<Instant> {
        let listener = TcpListener::from_std(socket)?;
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder.http1().timer(TokioTimer::new()).header_read_timeout(PATIENCE);
        builder.http2().timer(TokioTimer::new()).max_concurrent_streams(1024).keep_alive_interval(PATIENCE);
        let builder = Arc::new(builder);
        let graceful = GracefulShutdown::new();
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                _ = stop.wait_for(|stop| *stop) => break,
                Ok(()) = self.live.changed() => {
                    if let Err(error) = self.current.replace(&self.live.borrow_and_update()) {
                        tracing::error!(%error, "a thread goes on with the configuration before");
                    }
                    continue;
                }
            };
            let (stream, address) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Too many open files, most likely: others have to close first.
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let _best_effort = stream.set_nodelay(true);
            let acceptor = self.current.tls();
            let peer = Arc::new(Peer::new(address, acceptor.is_some()));
            let service = Mutex::new(self.current.service(peer));
            // One connection's requests are taken by one thread: nobody ever waits for this lock.
            let begun = Arc::new(AtomicBool::new(false));
            let requests = begun.clone();
            let service = service_fn(move |mut request| {
                requests.store(true, Ordering::Relaxed);
                let mut service = lock(&service);
                let (config, service) = service.up_to_date();
                let cross_origin = CrossOrigin::of(&request, config);
                let admitted = admit(&mut request, config).and_then(|()| preflight(&request, config));
                let admitted = admitted.map(|()| service.call(request));
                async move {
                    let mut response = match admitted {
                        Ok(answer) => answer.await.map(|response| response.map(Either::Left))?,
                        Err(refusal) => refusal.map(Either::Right),
                    };
                    if let Some(cross_origin) = cross_origin {
                        cross_origin.write(response.headers_mut());
                    }
                    Ok::<_, Infallible>(response)
                }
            });
            let (builder, watcher) = (builder.clone(), graceful.watcher());
            match acceptor {
                None => {
                    let connection =
                        builder.serve_connection_with_upgrades(TokioIo::new(stream), service).into_owned();
                    tokio::spawn(run(watcher.watch(connection), begun, stop.clone()));
                }
                Some(acceptor) => {
                    let connection = async move {
                        let stream = acceptor.accept(stream).await?;
                        let connection =
                            builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
                        watcher.watch(connection).await
                    };
                    tokio::spawn(run(connection, begun, stop.clone()));
                }
            }
        }
        drop(listener);
        let drain = self.live.borrow().config.drain_timeout;
        let until = Instant::now() + drain;
        if tokio::time::timeout_at(until.into(), graceful.shutdown()).await.is_err() {
            tracing::warn!(?drain, "connections are still open");
        }
        Ok(until)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves a connection to its end, or until its first request has not come in time: before it is known which version a
/// client speaks, nobody else looks at the clock. And a head of which a part has come is nothing idle to HTTP/1.1, which
/// would wait for the rest of it although it was told to stop.
async fn run<E: fmt::Display>(
    connection: impl Future<Output = Result<(), E>>,
    begun: Arc<AtomicBool>,
    mut stop: watch::Receiver<bool>,
) {
    let silent = async {
        if tokio::time::timeout(PATIENCE, stop.wait_for(|stop| *stop)).await.is_ok() {
            tokio::time::sleep(LAST_PATIENCE).await;
        }
    };
    let (mut connection, mut silent) = (pin!(connection), pin!(silent));
    poll_fn(|cx| {
        if let Poll::Ready(result) = connection.as_mut().poll(cx) {
            if let Err(error) = result {
                tracing::debug!(%error, "connection closed");
            }
            return Poll::Ready(());
        }
        if begun.load(Ordering::Relaxed) {
            return Poll::Pending;
        }
        silent.as_mut().poll(cx).map(|()| tracing::debug!("no request came in time"))
    })
    .await;
}
