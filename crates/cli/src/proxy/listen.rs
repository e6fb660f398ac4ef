//! Accepts connections: one single-threaded runtime per core, each with a listener of its own on the same address.
//!
//! A connection and its upstream connections stay on one core. Threads exchange no parts of them.

use std::convert::Infallible;
use std::error::Error;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::{Method, Request, Response, StatusCode, Version};
use http_body::Body;
use http_body_util::Either;
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::GracefulShutdown;
use oncegate_core::ErrorChain;
use oncegate_engine::LogThrottle;
use oncegate_http::{ResponseBody, WatchedRequest};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tower_service::Service as _;
use tracing::{Instrument as _, Span};

use super::admit::admit;
use super::body::{ProxyBody, WholeBody};
use super::client::{ClientBody, ClientStream, ConnectionState, Delivery, StreamExecutor};
use super::coarse_timer::CoarseTimer;
use super::cross_origin::{CrossOrigin, preflight};
use super::handshakes::RefusedHandshakes;
use super::headers::Peer;
use super::live::{Live, ThreadLive};
use super::published::published_rules;
use super::{MAX_HEAD, MAX_HEAD_U32, MAX_LINES};
use crate::admin::{ADMIN_FIELD, Draining, Metrics};
use crate::config::Config;
use crate::trace::{RequestTrace, Tracer};

/// The interval in which an HTTP/2 client that is silent gets a ping, and the time in which it must answer.
const PING_INTERVAL: Duration = Duration::from_secs(30);

/// The same limit after the process was told to stop: time for bytes in transit to arrive. Such a request has not
/// begun, so nothing is lost with it.
const LAST_HEAD_TIMEOUT: Duration = Duration::from_secs(1);

/// An address that this process has reserved, without accepting connections yet. So a start that fails because an address is
/// taken has created no store, and connections are refused instead of left waiting while a store is opened.
pub(crate) struct BoundAddress {
    pub(crate) address: SocketAddr,
    socket: Socket,
}

impl BoundAddress {
    /// Reserves an address.
    ///
    /// # Errors
    /// If the address is taken, or does not belong to this machine.
    pub(crate) fn new(address: SocketAddr) -> io::Result<Self> {
        let socket = bound(address, false)?;
        let local = socket.local_addr()?.as_socket();
        Ok(Self { address: local.unwrap_or(address), socket })
    }

    /// Accepts connections, on one socket per thread.
    ///
    /// # Errors
    /// If another process has taken the address meanwhile.
    pub(crate) fn listen(self, threads: usize) -> io::Result<Vec<std::net::TcpListener>> {
        // Shared sockets would be shared with other processes of the same user, too. So this one first checks that the address
        // is free.
        self.socket.listen(BACKLOG)?;
        if threads == 1 {
            return Ok(vec![self.socket.into()]);
        }
        drop(self.socket);
        let listener = |_| {
            let socket = bound(self.address, true)?;
            socket.listen(BACKLOG)?;
            Ok(socket.into())
        };
        (0..threads).map(listener).collect()
    }
}

/// The connections that may wait to be accepted, on each socket.
const BACKLOG: i32 = 4096;

fn bound(address: SocketAddr, shared: bool) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    #[cfg(unix)]
    socket.set_reuse_port(shared)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket)
}

/// The most requests in flight on one HTTP/2 connection.
const MAX_STREAMS: u32 = 100;

/// The limit of open client connections, over all threads. All clones share it.
#[derive(Clone, Debug)]
pub(crate) struct ConnectionLimit {
    /// One for each connection that may be open.
    permits: Arc<Semaphore>,
    /// Notified for each connection that waits for a place. The silent connection that waits for the longest time gives up its
    /// place.
    wanted: Arc<Notify>,
    max: usize,
}

/// The time for which a connection may be silent although others wait for a place. Clients that have something to send need less,
/// also over long distances.
const SILENCE: Duration = Duration::from_secs(1);

/// The interval in which a connection that waits asks for a place.
const ASK_AGAIN: Duration = Duration::from_millis(250);

impl ConnectionLimit {
    pub(crate) fn new(max: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(max)), wanted: Arc::default(), max }
    }

    /// Waits for a place, if need be that of a connection that has sent no request.
    async fn admit(&self) -> Option<OwnedSemaphorePermit> {
        if let Ok(place) = self.permits.clone().try_acquire_owned() {
            return Some(place);
        }
        let mut place = pin!(self.permits.clone().acquire_owned());
        loop {
            self.wanted.notify_one();
            tokio::select! {
                place = &mut place => return place.ok(),
                () = tokio::time::sleep(ASK_AGAIN) => {}
            }
        }
    }

    /// Ready if another connection needs the place of one that is silent.
    fn needed(&self) -> impl Future<Output = ()> + Send + use<> {
        let wanted = self.wanted.clone();
        async move {
            tokio::time::sleep(SILENCE).await;
            wanted.notified().await;
        }
    }

    pub(crate) const fn max(&self) -> usize {
        self.max
    }

    /// The number of open connections.
    pub(crate) fn used(&self) -> usize {
        self.max.saturating_sub(self.permits.available_permits())
    }
}

/// The listener of one thread.
pub(super) struct ThreadListener {
    pub(super) current: Arc<ThreadLive>,
    /// Receives reloads.
    pub(super) live: watch::Receiver<Live>,
    pub(super) connections: ConnectionLimit,
    pub(super) metrics: Metrics,
    pub(super) draining: Draining,
    pub(super) tracer: Tracer,
    pub(super) handshakes: Arc<RefusedHandshakes>,
    /// Limits the log lines about the limit of connections.
    pub(super) full_warnings: Arc<LogThrottle>,
    pub(super) timers: CoarseTimer,
}

/// The end of one thread's service.
#[derive(Clone, Copy, Debug)]
pub(super) struct DrainResult {
    /// The end of the drain timeout.
    pub(super) until: Instant,
    /// True if all its connections were closed before that.
    pub(super) is_closed: bool,
}

type Builder = auto::Builder<StreamExecutor>;

impl ThreadListener {
    /// Serves until `stop` turns true. Then it stops accepting, and waits for running requests until the drain timeout.
    pub(super) async fn serve(
        mut self,
        socket: std::net::TcpListener,
        mut stop: watch::Receiver<bool>,
    ) -> io::Result<DrainResult> {
        let listener = TcpListener::from_std(socket)?;
        let mut builders = self.builders();
        let graceful = GracefulShutdown::new();
        let (connections, full_warnings) = (self.connections.clone(), self.full_warnings.clone());
        loop {
            // Stays over a reload: it may hold a connection that waits for a place, and would reset it.
            let mut accepting = pin!(accept(&listener, &connections, &full_warnings));
            let accepted = loop {
                tokio::select! {
                    accepted = &mut accepting => break Some(accepted),
                    _ = stop.wait_for(|stop| *stop) => break None,
                    Ok(()) = self.live.changed() => {
                        if let Err(error) = self.current.replace(&self.live.borrow_and_update()) {
                            tracing::error!(error, "a thread keeps the previous configuration");
                        }
                        builders = self.builders();
                    }
                }
            };
            match accepted {
                Some(Some(accepted)) => self.begin(accepted, &builders, &graceful, &stop),
                Some(None) => {}
                None => break,
            }
        }
        // Connections that the system has accepted already would be reset with the listener.
        let listener = listener.into_std()?;
        while let Ok((stream, address)) = listener.accept() {
            let Ok(permit) = self.connections.permits.clone().try_acquire_owned() else { break };
            let stream = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream))?;
            self.begin((stream, address, permit), &builders, &graceful, &stop);
        }
        drop(listener);
        let drain = self.live.borrow().config.drain_timeout;
        let until = Instant::now() + drain;
        let is_closed = tokio::time::timeout_at(until.into(), graceful.shutdown()).await.is_ok();
        Ok(DrainResult { until, is_closed })
    }

    /// Serves a connection in a task of its own.
    fn begin(
        &self,
        (stream, address, permit): (TcpStream, SocketAddr, OwnedSemaphorePermit),
        builders: &(Arc<Builder>, Arc<Builder>),
        graceful: &GracefulShutdown,
        stop: &watch::Receiver<bool>,
    ) {
        let acceptor = self.current.tls();
        let config = self.live.borrow().config.clone();
        let peer = Arc::new(Peer::new(address, acceptor.is_some(), config.trusts(address.ip())));
        let stream = ClientStream::new(stream, config.write_timeout, acceptor.is_none(), permit);
        let begun = Arc::new(AtomicBool::new(false));
        let service = self.service(peer.clone(), stream.state(), begun.clone());
        let watcher = graceful.watcher();
        let (in_the_clear, over_tls) = builders.clone();
        match acceptor {
            None => {
                let builder = in_the_clear;
                let connection =
                    builder.serve_connection_with_upgrades(TokioIo::new(stream), service).into_owned();
                let needed = self.connections.needed();
                tokio::spawn(run(
                    watcher.watch(connection),
                    begun,
                    config.client_idle_timeout,
                    stop.clone(),
                    needed,
                ));
            }
            Some(acceptor) => {
                let handshakes = self.handshakes.clone();
                let connection = async move {
                    let accepted = acceptor.accept(stream).await;
                    let stream = accepted.inspect_err(|error| handshakes.note(address, error))?;
                    peer.note_certificates(stream.get_ref().1.peer_certificates());
                    let connection = over_tls.serve_connection_with_upgrades(TokioIo::new(stream), service);
                    watcher.watch(connection).await
                };
                let needed = self.connections.needed();
                tokio::spawn(run(connection, begun, config.client_idle_timeout, stop.clone(), needed));
            }
        }
    }

    /// The connection builders for clear text and for TLS. In clear text, an HTTP/1.1 client may end its side and
    /// still gets its response. Below TLS this cannot be distinguished from a client that leaves.
    fn builders(&self) -> (Arc<Builder>, Arc<Builder>) {
        let config = self.live.borrow().config.clone();
        let builder = |half_close| Arc::new(builder(&config, half_close, &self.timers));
        (builder(true), builder(false))
    }

    /// The service for the requests of one connection. `begun` turns true with the first request.
    fn service(
        &self,
        peer: Arc<Peer>,
        state: Arc<ConnectionState>,
        begun: Arc<AtomicBool>,
    ) -> impl Service<
        Request<Incoming>,
        Response = Response<ClientBody<Either<ResponseBody<ProxyBody>, ProxyBody>>>,
        Error = Infallible,
        Future: Send,
    > + Send
    + use<> {
        let service = self.current.service(peer.clone(), state.clone());
        // One thread serves the requests of one connection, so no thread ever waits for this lock.
        let service = Mutex::new(service);
        let (metrics, draining) = (self.metrics.clone(), self.draining.clone());
        let tracer = self.tracer.clone();
        service_fn(move |mut request: Request<Incoming>| {
            begun.store(true, Ordering::Relaxed);
            let mut service = lock(&service);
            let (config, service) = service.up_to_date();
            let trace = tracer.begin(&mut request, peer.is_trusted(), peer.scheme(), config);
            let followed = Followed(trace);
            let span = followed.span(&mut request);
            let entered = span.enter();
            let delivery = Delivery::of(request.version(), &state);
            let cross_origin = CrossOrigin::of(&request, config);
            let is_head = request.method() == Method::HEAD;
            // A client that gets this does not use the connection again, so it is not closed under a request.
            let is_last = draining.is_set() && request.version() != Version::HTTP_2;
            let admitted = admit(&mut request, &peer, config, &metrics)
                .and_then(|()| published_rules(&request, config, &metrics))
                .and_then(|()| preflight(&request, config));
            let admitted = admitted.map(|()| {
                let version = request.version();
                service.call(request.map(|body| WholeBody::new(body, version)))
            });
            drop(entered);
            let answer = async move {
                let mut response: Response<_> = match admitted {
                    Ok(response) => response.await?.map(Either::Left),
                    Err(refusal) => refusal.map(Either::Right),
                };
                if let Some(cross_origin) = cross_origin {
                    cross_origin.write(response.headers_mut());
                }
                if is_last && response.status() != StatusCode::SWITCHING_PROTOCOLS {
                    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
                }
                // `oncegate keys` sends the admin token to the sender of this field.
                response.headers_mut().remove(ADMIN_FIELD);
                if is_head {
                    remove_body(&mut response);
                }
                followed.answered(response.status());
                Ok::<_, Infallible>(response.map(|body| delivery.begin(body)))
            };
            answer.instrument(span)
        })
    }
}

/// The trace of a request until its response begins, or its client leaves.
struct Followed(Option<Arc<RequestTrace>>);

impl Followed {
    /// The span that marks the log lines of the request, if it belongs to a trace. Shows the trace to all who handle the request.
    fn span<B>(&self, request: &mut Request<B>) -> Span {
        let Some(trace) = &self.0 else { return Span::none() };
        request.extensions_mut().insert(WatchedRequest(trace.clone()));
        request.extensions_mut().insert(trace.clone());
        // Of the level of errors, so that no level of the log hides it.
        tracing::error_span!("request", trace_id = %trace.trace_id(), span_id = %trace.span_id())
    }

    fn answered(&self, status: http::StatusCode) {
        if let Some(trace) = &self.0 {
            trace.answered(status);
        }
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        if let Some(trace) = &self.0 {
            trace.client_left();
        }
    }
}

/// Removes the body of a response to HEAD, and keeps its length. The HTTP/2 library sends a body that it gets, which is a
/// protocol error; a response of the service has none.
fn remove_body(response: &mut Response<Either<ResponseBody<ProxyBody>, ProxyBody>>) {
    let length = match response.body() {
        Either::Left(body) => body.size_hint().exact(),
        Either::Right(body) => body.size_hint().exact(),
    };
    let Some(length @ 1..) = length else { return };
    response.headers_mut().entry(header::CONTENT_LENGTH).or_insert_with(|| length.into());
    *response.body_mut() = Either::Right(ProxyBody::own(Bytes::new()));
}

fn builder(config: &Config, half_close: bool, timers: &CoarseTimer) -> Builder {
    let mut builder = auto::Builder::new(StreamExecutor { write_timeout: config.write_timeout });
    builder
        .http1()
        .timer(timers.clone())
        // Begins with the end of the response before it.
        .header_read_timeout(config.client_idle_timeout)
        .half_close(half_close)
        .max_headers(MAX_LINES)
        .max_buf_size(MAX_HEAD);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEAD_U32)
        .keep_alive_interval(PING_INTERVAL);
    builder
}

/// Limits the log lines about connections that cannot be accepted, because a retry follows every few milliseconds.
static UNACCEPTED: LazyLock<LogThrottle> = LazyLock::new(|| LogThrottle::new(Duration::from_secs(10)));

/// Accepts the next connection, as soon as the limit allows it.
async fn accept(
    listener: &TcpListener,
    connections: &ConnectionLimit,
    full_warnings: &LogThrottle,
) -> Option<(TcpStream, SocketAddr, OwnedSemaphorePermit)> {
    match listener.accept().await {
        Ok((stream, address)) => {
            if connections.permits.available_permits() == 0 && full_warnings.pass().is_some() {
                tracing::warn!(
                    "max-connections is reached: a new connection waits until another one ends; those that have sent no request are closed"
                );
            }
            let permit = connections.admit().await?;
            Some((stream, address, permit))
        }
        Err(error) => {
            // Most likely too many files are open, so others have to close first.
            if let Some(suppressed) = UNACCEPTED.pass() {
                tracing::warn!(suppressed, error = %ErrorChain(&error), "cannot accept a connection");
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            None
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves a connection to its end, or until the timeout of its first request, or until another connection needs the place of
/// one that has sent no request. The library has no timeout before it knows the client's protocol version. And after a stop,
/// its HTTP/1.1 would wait for the rest of a head that has begun.
async fn run(
    connection: impl Future<Output = Result<(), Box<dyn Error + Send + Sync>>>,
    begun: Arc<AtomicBool>,
    idle_timeout: Duration,
    mut stop: watch::Receiver<bool>,
    needed: impl Future<Output = ()>,
) {
    let silent = async {
        let late = async {
            if tokio::time::timeout(idle_timeout, stop.wait_for(|stop| *stop)).await.is_ok() {
                tokio::time::sleep(LAST_HEAD_TIMEOUT).await;
            }
        };
        tokio::select! {
            () = late => "no request came in time",
            () = needed => "no request came, and another connection needs the place",
        }
    };
    let (mut connection, mut silent) = (pin!(connection), pin!(Some(silent)));
    poll_fn(|cx| {
        if let Poll::Ready(result) = connection.as_mut().poll(cx) {
            if let Err(error) = result {
                tracing::debug!(error = %ErrorChain(&*error), "connection closed");
            }
            return Poll::Ready(());
        }
        if begun.load(Ordering::Relaxed) {
            // Otherwise it would take notifications that are for silent connections.
            silent.set(None);
        }
        match silent.as_mut().as_pin_mut() {
            Some(silent) => silent.poll(cx).map(|why| tracing::debug!("{why}")),
            None => Poll::Pending,
        }
    })
    .await;
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::config::{Draft, parse_flags};

    /// The default has to be longer than the time after which load balancers close idle connections: 60 s.
    #[tokio::test(start_paused = true)]
    async fn a_head_that_does_not_come_ends_the_connection_after_75_seconds_by_default() {
        let args = parse_flags(&["--to", "http://127.0.0.1:1", "--store", "memory:"]).unwrap();
        let config = Draft::read(&args, []).config.unwrap();
        let builder = builder(&config, true, &CoarseTimer::default());
        // With nothing, and with a part of it, also after a request.
        let whole = "GET / HTTP/1.1\r\nHost: a\r\n\r\n";
        for sent in ["".to_owned(), "GET / HT".to_owned(), whole.to_owned(), format!("{whole}GET / HT")] {
            let (mut near, far) = tokio::io::duplex(4096);
            let (_stop, stopped) = watch::channel(false);
            let begun = Arc::new(AtomicBool::new(false));
            let notes = begun.clone();
            let service = service_fn(move |_: Request<Incoming>| {
                notes.store(true, Ordering::Relaxed);
                async { Ok::<_, Infallible>(Response::new(String::new())) }
            });
            let connection = builder.serve_connection_with_upgrades(TokioIo::new(far), service).into_owned();
            tokio::spawn(run(connection, begun, config.client_idle_timeout, stopped, std::future::pending()));
            near.write_all(sent.as_bytes()).await.unwrap();
            let since = tokio::time::Instant::now();
            let mut received = Vec::new();
            near.read_to_end(&mut received).await.unwrap();
            let (took, expected) = (since.elapsed(), Duration::from_secs(75));
            assert!(took >= expected && took < expected + Duration::from_secs(1), "{sent:?}: {took:?}");
            assert_eq!(received.starts_with(b"HTTP/1.1 200 OK"), sent.starts_with(whole), "{sent:?}");
        }
    }

    /// At the limit, a connection that has sent no request gives its place to a new one. One with a request stays.
    #[tokio::test]
    async fn silent_connections_give_their_places_to_new_ones() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (limit, warnings) = (ConnectionLimit::new(2), LogThrottle::new(Duration::from_secs(60)));
        let (_stop, stopped) = watch::channel(false);
        let mut clients = Vec::new();
        let mut served = Vec::new();
        // The first one has sent a request, and is the oldest.
        for begun in [true, false, false, false] {
            clients.push(TcpStream::connect(address).await.unwrap());
            let accepted =
                tokio::time::timeout(Duration::from_secs(60), accept(&listener, &limit, &warnings));
            let (stream, _, permit) = accepted.await.expect("a place").unwrap();
            let connection = async move {
                let _held = (stream, permit);
                std::future::pending().await
            };
            let begun = Arc::new(AtomicBool::new(begun));
            let needed = limit.needed();
            let idle = Duration::from_secs(75);
            served.push(tokio::spawn(run(connection, begun, idle, stopped.clone(), needed)));
        }
        for index in [1, 2] {
            let ended = tokio::time::timeout(Duration::from_secs(60), &mut served[index]).await;
            assert!(ended.is_ok(), "connection {index}");
        }
        assert!(!served[0].is_finished() && !served[3].is_finished());
        assert_eq!(limit.used(), 2);
        for task in served {
            task.abort();
        }
    }
}
