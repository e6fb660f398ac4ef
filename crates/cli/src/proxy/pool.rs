//! The connections of one thread to a service that speaks HTTP/1.1 in the clear.
//!
//! A connection has no task of its own. The request that uses it polls it, until its response is complete:
//!
//! ```text
//! idle ──> polled by its request ──the response is complete──> idle
//!  │             └─ the response began or ended before the request was sent ──> polled by a task ──> idle, or closed
//!  └─ the service closes it, bytes without a request, idle for too long, one too many, another configuration ──> closed
//! ```
//!
//! One task watches all idle connections. It closes those that the service closes, and those that are idle for too long. Before
//! a request is written on a used connection, the socket itself is checked once more, because the runtime may not know of its
//! latest events. Bytes that arrived before a request are never taken for its response.
//!
//! Only a request of which no byte was written is sent on another connection. The HTTP library returns such a request whole.

use std::collections::VecDeque;
use std::future::{Future as _, poll_fn};
use std::io;
use std::mem::MaybeUninit;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use http::header::{self, HeaderValue};
use http::uri::{PathAndQuery, Uri};
use http::{Request, Response};
use http_body::{Body as _, Frame};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_rustls::MaybeHttpsStream;
use hyper_util::client::legacy;
use hyper_util::rt::TokioIo;
use oncegate_core::ErrorChain;
use oncegate_http::{BoxError, RequestBody};
use socket2::SockRef;
use tokio::io::AsyncRead as _;
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::coop::unconstrained;
use tokio::time::{Instant, MissedTickBehavior};
use tower_service::Service as _;

use super::body::{Activity, LATE_SILENCE, ObservedBody, WholeBody};
use super::tls::ToService;
use super::{MAX_HEAD, MAX_LINES};
use crate::config::Upstream;

pub(super) type UpstreamBody = ObservedBody<RequestBody<WholeBody>>;

/// The interval in which idle connections are checked. Those that were idle at the last check are watched meanwhile.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The most bytes that the service may send before its response begins: the head of the response, and interim responses (1xx),
/// which the HTTP library skips without counting them. A read is first charged as if it filled its buffer, which is at most
/// [`MAX_HEAD`]: nearly all responses come with one read, which then need not be counted.
const MAX_BEFORE_RESPONSE: usize = 16 * MAX_HEAD + COUNTED_EXACTLY;

/// While this much or less is left, each read is counted exactly: enough for several heads of the largest size that come in
/// small pieces.
const COUNTED_EXACTLY: usize = 4 * MAX_HEAD;

/// The value of [`SocketState::left`] while no response is awaited.
const UNLIMITED: usize = usize::MAX;

/// The connections of one thread.
pub(super) struct Pool {
    connector: ToService,
    builder: Builder,
    /// The `Host` field for a request that has none.
    host: Option<HeaderValue>,
    idle_timeout: Duration,
    max_idle: usize,
    idle: Mutex<IdleConnections>,
    /// Wakes a request that waits for its connection when another one becomes idle.
    returned: Notify,
}

#[derive(Default)]
struct IdleConnections {
    /// The connection that was used last is the last one.
    connections: VecDeque<IdleConnection>,
    /// The number of connections that are being made without a request.
    spare: usize,
    /// True while a task checks them.
    is_checked: bool,
    /// True if the configuration has another service, so that no connection is kept.
    is_closed: bool,
}

struct IdleConnection {
    connection: Box<PooledConnection>,
    since: Instant,
}

/// The reason why there is no response.
#[derive(Debug)]
pub(super) enum SendError {
    /// No connection was made, so nothing was sent.
    Unreached(BoxError),
    /// The request may have been sent, at least in part.
    Unanswered(BoxError),
}

impl From<legacy::Error> for SendError {
    fn from(error: legacy::Error) -> Self {
        if error.is_connect() { Self::Unreached(error.into()) } else { Self::Unanswered(error.into()) }
    }
}

impl Pool {
    pub(super) fn new(to: &Upstream, connector: ToService, idle_timeout: Duration, max_idle: usize) -> Self {
        let mut builder = Builder::new();
        builder.max_buf_size(MAX_HEAD).max_headers(MAX_LINES);
        let authority = &to.authority;
        let host = match authority.port_u16() {
            Some(port) if port != 80 => HeaderValue::try_from(format!("{}:{port}", authority.host())),
            _ => HeaderValue::from_str(authority.host()),
        };
        Self {
            connector,
            builder,
            host: host.ok(),
            idle_timeout,
            max_idle: if idle_timeout.is_zero() { 0 } else { max_idle },
            idle: Mutex::default(),
            returned: Notify::new(),
        }
    }

    /// Sends a request and returns the head of its response, and the connection if the body is not complete.
    ///
    /// `is_connected` is false while it is certain that nothing was sent.
    ///
    /// # Errors
    /// If there is no connection, or no response on it.
    pub(super) async fn send(
        self: &Arc<Self>,
        mut request: Request<UpstreamBody>,
        activity: &Activity,
        is_connected: &AtomicBool,
    ) -> Result<(Response<Incoming>, Option<StreamingConnection>), SendError> {
        self.prepare(&mut request);
        loop {
            let (mut connection, is_reused) = self.connection().await?;
            is_connected.store(true, Ordering::Relaxed);
            tracing::trace!(is_reused, "a request takes a connection to the service");
            match connection.exchange(request).await {
                Ok(response) => {
                    let (pool, activity) = (self.clone(), activity.clone());
                    let streaming = StreamingConnection { pool, activity, connection: Some(connection) };
                    return Ok(streaming.begin(response));
                }
                Err(mut error) => match error.take_message() {
                    // The service closed the connection before a byte was written.
                    Some(unwritten) if is_reused => {
                        is_connected.store(false, Ordering::Relaxed);
                        request = unwritten;
                    }
                    _ => return Err(SendError::Unanswered(error.into_error().into())),
                },
            }
        }
    }

    /// Sets the form of the address that a service expects (RFC 9112, 3.2.1), and `Host` if the client sent none.
    fn prepare(&self, request: &mut Request<UpstreamBody>) {
        let path = request.uri().path_and_query().filter(|path| path.as_str() != "/").cloned();
        *request.uri_mut() = Uri::from(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
        if let Some(host) = &self.host {
            request.headers_mut().entry(header::HOST).or_insert_with(|| host.clone());
        }
    }

    /// A connection for one request, and true if it was used or idle before.
    async fn connection(self: &Arc<Self>) -> Result<(Box<PooledConnection>, bool), SendError> {
        if let Some(connection) = self.take() {
            return Ok((connection, true));
        }
        let mut connecting = Box::pin(self.clone().connect());
        loop {
            tokio::select! {
                biased;
                made = &mut connecting => return made.map(|connection| (connection, false)),
                () = self.returned.notified() => if let Some(connection) = self.take() {
                    if self.begin_spare() {
                        let pool = self.clone();
                        tokio::spawn(async move {
                            let made = connecting.await;
                            pool.end_spare(made.ok());
                        });
                    }
                    return Ok((connection, true));
                }
            }
        }
    }

    /// Returns true if a connection that is being made, and that its request no longer needs, may be finished and kept.
    fn begin_spare(&self) -> bool {
        let mut idle = self.lock();
        let may_begin = idle.connections.len() + idle.spare < self.max_idle;
        idle.spare += usize::from(may_begin);
        may_begin
    }

    fn end_spare(self: &Arc<Self>, made: Option<Box<PooledConnection>>) {
        self.lock().spare -= 1;
        if let Some(connection) = made {
            self.put(connection);
        }
    }

    async fn connect(self: Arc<Self>) -> Result<Box<PooledConnection>, SendError> {
        let mut connector = self.connector.clone();
        poll_fn(|cx| connector.poll_ready(cx)).await.map_err(SendError::Unreached)?;
        // The connector knows the address.
        let connected = connector.call(Uri::default()).await.map_err(SendError::Unreached)?;
        let stream = match connected.into_inner() {
            MaybeHttpsStream::Http(stream) => stream,
            MaybeHttpsStream::Https(_) => {
                return Err(SendError::Unreached("a connection in the clear is encrypted".into()));
            }
        };
        let socket = Arc::<SocketState>::default();
        let stream = ServiceStream { stream, state: socket.clone() };
        let made = self.builder.handshake(stream).await;
        let (sender, connection) = made.map_err(|error| SendError::Unreached(error.into()))?;
        let target = Arc::<WakeTarget>::default();
        let waker = Waker::from(target.clone());
        Ok(Box::new(PooledConnection { sender, connection: Some(connection), socket, target, waker }))
    }

    /// Takes the connection that was used last, if it is not idle for too long.
    fn take(&self) -> Option<Box<PooledConnection>> {
        let mut idle = self.lock();
        let IdleConnection { connection, since } = idle.connections.pop_back()?;
        if since.elapsed() >= self.idle_timeout {
            // The others are idle for even longer.
            let too_old = std::mem::take(&mut idle.connections);
            drop(idle);
            drop(too_old);
            return None;
        }
        drop(idle);
        connection.target.0.take();
        connection.socket.is_reused.store(true, Ordering::Relaxed);
        Some(connection)
    }

    /// Keeps a connection without a request.
    fn put(self: &Arc<Self>, connection: Box<PooledConnection>) {
        connection.target.0.take();
        let mut idle = self.lock();
        if self.max_idle == 0 || idle.is_closed {
            return;
        }
        let oldest =
            if idle.connections.len() >= self.max_idle { idle.connections.pop_front() } else { None };
        tracing::trace!("a connection to the service is idle");
        idle.connections.push_back(IdleConnection { connection, since: Instant::now() });
        if !idle.is_checked
            && let Ok(runtime) = Handle::try_current()
        {
            idle.is_checked = true;
            runtime.spawn(check_idle(Arc::downgrade(self)));
        }
        drop(idle);
        drop(oldest);
        self.returned.notify_one();
    }

    /// Closes the idle connections, and from now on keeps none.
    pub(super) fn close(&self) {
        let mut idle = self.lock();
        idle.is_closed = true;
        let connections = std::mem::take(&mut idle.connections);
        drop(idle);
        drop(connections);
    }

    /// Closes the connections that are idle for too long or that the service has closed, and watches the others. Returns
    /// true if there are others.
    fn check(&self, cx: &Context<'_>) -> bool {
        let now = Instant::now();
        let mut idle = self.lock();
        idle.connections.retain_mut(|IdleConnection { connection, since }| {
            now.saturating_duration_since(*since) < self.idle_timeout && connection.poll(cx).is_pending()
        });
        idle.is_checked = !idle.connections.is_empty();
        idle.is_checked
    }

    /// Only one thread takes this lock.
    fn lock(&self) -> MutexGuard<'_, IdleConnections> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Checks idle connections until there are none.
async fn check_idle(pool: Weak<Pool>) {
    let mut interval = tokio::time::interval(CHECK_INTERVAL);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    poll_fn(|cx| {
        loop {
            if !pool.upgrade().is_some_and(|pool| pool.check(cx)) {
                return Poll::Ready(());
            }
            ready!(interval.poll_tick(cx));
        }
    })
    .await;
}

struct PooledConnection {
    sender: SendRequest<UpstreamBody>,
    /// `None` when it is over.
    connection: Option<Connection<ServiceStream, UpstreamBody>>,
    socket: Arc<SocketState>,
    target: Arc<WakeTarget>,
    /// Wakes the target.
    waker: Waker,
}

/// The state that a connection shares with its socket.
struct SocketState {
    /// Set before the connection is used again.
    is_reused: AtomicBool,
    /// The bytes that the service may still send before its response begins; [`UNLIMITED`] if none is awaited.
    left: AtomicUsize,
}

impl Default for SocketState {
    fn default() -> Self {
        Self { is_reused: AtomicBool::new(false), left: AtomicUsize::new(UNLIMITED) }
    }
}

/// The task that polls a connection at present.
///
/// The parts of a connection wake each other when a request is given to it or its response is taken. Without this, they would in
/// vain wake the task of the request before, or the task that is just polling.
#[derive(Default)]
struct WakeTarget(AtomicWaker);

impl Wake for WakeTarget {
    fn wake(self: Arc<Self>) {
        self.0.wake();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.wake();
    }
}

impl PooledConnection {
    /// Moves bytes in both directions. Ready when the connection is over.
    fn poll(&mut self, cx: &Context<'_>) -> Poll<()> {
        let Some(connection) = &mut self.connection else { return Poll::Ready(()) };
        self.target.0.register(cx.waker());
        let result = ready!(Pin::new(connection).poll(&mut Context::from_waker(&self.waker)));
        if let Err(error) = result {
            tracing::debug!(error = %ErrorChain(&error), "the connection to the service failed");
        }
        // A request that it did not take returns to its sender.
        self.connection = None;
        Poll::Ready(())
    }

    /// Sends a request and receives the head of its response.
    async fn exchange(
        &mut self,
        request: Request<UpstreamBody>,
    ) -> Result<Response<Incoming>, TrySendError<Request<UpstreamBody>>> {
        self.socket.left.store(MAX_BEFORE_RESPONSE, Ordering::Relaxed);
        // Unconstrained: if the budget of the task were used up, this would wait for a wake-up that cannot come.
        let mut response = pin!(unconstrained(self.sender.try_send_request(request)));
        let result = poll_fn(|cx| {
            let _over = self.poll(cx);
            // Only the connection brings the response, and it wakes this task.
            response.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        })
        .await;
        self.socket.left.store(UNLIMITED, Ordering::Relaxed);
        result
    }

    /// Polls the connection until it is idle, and returns it. `None` if it is over, or if the service has responded and does not
    /// read what it was sent. The body of the request limits the time in which the client sends it.
    async fn finish(self: Box<Self>, activity: &Activity) -> Option<Box<Self>> {
        let mut idle = pin!(self.become_idle());
        let mut is_sent = false;
        loop {
            if let Ok(connection) = tokio::time::timeout(LATE_SILENCE, idle.as_mut()).await {
                return connection;
            }
            if is_sent {
                return None;
            }
            is_sent = activity.is_over() && activity.is_request_taken();
        }
    }

    /// Polls the connection until it is idle, and returns it, or until it is over.
    async fn become_idle(mut self: Box<Self>) -> Option<Box<Self>> {
        poll_fn(|cx| {
            if self.poll(cx).is_ready() || self.sender.is_ready() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        self.connection.is_some().then_some(self)
    }
}

/// A connection while the body of a response comes from it.
pub(super) struct StreamingConnection {
    pool: Arc<Pool>,
    activity: Activity,
    /// `None` when nothing is left to read.
    connection: Option<Box<PooledConnection>>,
}

impl StreamingConnection {
    fn begin(mut self, response: Response<Incoming>) -> (Response<Incoming>, Option<Self>) {
        // A client that reads nothing before it has sent everything must not wait for itself.
        self.settle(response.body().is_end_stream() || !self.activity.is_request_taken());
        let streaming = self.connection.is_some().then_some(self);
        (response, streaming)
    }

    /// Gives the connection up when the body no longer needs it: it is over, it is idle, or a task polls it from now on.
    fn settle(&mut self, needs_task: bool) {
        let Some(connection) = self.connection.take() else { return };
        if connection.connection.is_none() {
            // It is over, and the body has what it brought.
        } else if connection.sender.is_ready() {
            self.pool.put(connection);
        } else if needs_task {
            let (pool, activity) = (self.pool.clone(), self.activity.clone());
            tokio::spawn(async move {
                if let Some(connection) = connection.finish(&activity).await {
                    pool.put(connection);
                }
            });
        } else {
            self.connection = Some(connection);
        }
    }

    /// The next frame of the body.
    pub(super) fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
        mut body: Pin<&mut WholeBody>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let Some(connection) = &mut self.connection else { return body.poll_frame(cx) };
        // Taking a frame wakes the connection, but it is polled only for the next frame.
        connection.target.0.take();
        let mut frame = body.as_mut().poll_frame(cx);
        if frame.is_pending() {
            let _over = connection.poll(cx);
            self.settle(false);
            frame = body.as_mut().poll_frame(cx);
        }
        if matches!(frame, Poll::Ready(None)) || body.is_end_stream() {
            self.settle(true);
        }
        frame
    }
}

/// The socket of a connection to the service.
struct ServiceStream {
    stream: TokioIo<TcpStream>,
    state: Arc<SocketState>,
}

impl ServiceStream {
    /// Returns false if the service has ended its side. Asks the socket itself: the runtime learns of its events only after other
    /// tasks have run.
    ///
    /// # Errors
    /// If the connection has failed, or has bytes that belong to no request.
    fn is_still_open(&self) -> io::Result<bool> {
        match SockRef::from(self.stream.inner()).peek(&mut [MaybeUninit::uninit()]) {
            Ok(0) => Ok(false),
            Ok(_) => {
                Err(io::Error::new(io::ErrorKind::InvalidData, "the service sent bytes without a request"))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(true),
            Err(error) => Err(error),
        }
    }
}

impl Read for ServiceStream {
    /// The HTTP library reads before it writes a request, and writes it only if there is nothing to read.
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        if self.state.is_reused.load(Ordering::Relaxed) {
            self.state.is_reused.store(false, Ordering::Relaxed);
            if !self.is_still_open()? {
                return Poll::Ready(Ok(()));
            }
        }
        let left = self.state.left.load(Ordering::Relaxed);
        if left == UNLIMITED {
            return Pin::new(&mut self.stream).poll_read(cx, buf);
        }
        if left == 0 {
            let what = "the service sent too much before its response: interim responses (1xx) without end";
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, what)));
        }
        if left > COUNTED_EXACTLY {
            let read = Pin::new(&mut self.stream).poll_read(cx, buf);
            if read.is_ready() {
                self.state.left.store(left.saturating_sub(MAX_HEAD), Ordering::Relaxed);
            }
            return read;
        }
        let mut bytes = [0; 4096];
        let len = bytes.len().min(buf.remaining()).min(left);
        let mut counted = tokio::io::ReadBuf::new(&mut bytes[..len]);
        ready!(Pin::new(self.stream.inner_mut()).poll_read(cx, &mut counted))?;
        self.state.left.store(left - counted.filled().len(), Ordering::Relaxed);
        buf.put_slice(counted.filled());
        Poll::Ready(Ok(()))
    }
}

impl Write for ServiceStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    async fn pair() -> (ServiceStream, std::net::TcpStream) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TokioIo::new(TcpStream::connect(listener.local_addr().unwrap()).await.unwrap());
        let (service, _) = listener.accept().unwrap();
        (ServiceStream { stream, state: Arc::default() }, service)
    }

    /// Reads, without a turn for the runtime in which it could learn of events. `None` if there is nothing.
    fn read(stream: &mut ServiceStream) -> Option<io::Result<usize>> {
        let mut bytes = [0; 8];
        let mut buf = hyper::rt::ReadBuf::new(&mut bytes);
        match Pin::new(stream).poll_read(&mut Context::from_waker(Waker::noop()), buf.unfilled()) {
            Poll::Ready(result) => Some(result.map(|()| buf.filled().len())),
            Poll::Pending => None,
        }
    }

    #[tokio::test]
    async fn a_socket_is_asked_before_its_connection_is_used_again() {
        for sends in [true, false] {
            let (mut stream, mut service) = pair().await;
            assert!(read(&mut stream).is_none());
            stream.state.is_reused.store(true, Ordering::Relaxed);
            assert!(read(&mut stream).is_none(), "an open connection is used");
            if sends {
                service.write_all(b"HTTP/1.1 200 OK").unwrap();
            } else {
                service.shutdown(std::net::Shutdown::Write).unwrap();
            }
            assert!(read(&mut stream).is_none(), "the runtime does not know of it");
            stream.state.is_reused.store(true, Ordering::Relaxed);
            match read(&mut stream) {
                Some(Err(error)) => assert!(sends && error.kind() == io::ErrorKind::InvalidData),
                Some(Ok(read)) => assert!(!sends && read == 0),
                None => panic!("not noticed: {sends}"),
            }
        }
    }
}
