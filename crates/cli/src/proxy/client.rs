//! The client's side of a connection: detects clients that take no bytes of a response, and clients that have left.
//!
//! A response that the client does not take stays in memory. On HTTP/1.1 it waits for the socket, so a write without progress
//! for too long ends the connection ([`ClientStream`]). On HTTP/2 a client may take no bytes of one response while the connection
//! goes on, so a response without progress resets its stream ([`StreamExecutor`]).

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Version};
use http_body::{Body, Frame, SizeHint};
use hyper::rt::Executor;
use oncegate_http::BoxError;
use pin_project_lite::pin_project;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep};

/// The socket of a client.
pub(super) struct ClientStream {
    stream: TcpStream,
    state: Arc<ConnectionState>,
    write_timeout: Duration,
    /// Runs while a write waits.
    timer: Option<Pin<Box<Sleep>>>,
    /// Runs while the client may have left.
    doubt: Option<Pin<Box<Sleep>>>,
    /// True if the client's side was looked at since its response began.
    has_looked: bool,
    /// True if the end of the client's side is watched. With TLS it cannot be seen.
    watches_end: bool,
    /// Counts the socket as a connection while it is open, also after an upgrade.
    _permit: OwnedSemaphorePermit,
}

/// The state that a socket and the responses on it share. HTTP/1.1 has one response at a time.
#[derive(Debug, Default)]
pub(super) struct ConnectionState {
    phase: AtomicU8,
    /// [`OPEN`], [`ENDED`] or [`ENDED_LATE`].
    client_side: AtomicU8,
}

impl ConnectionState {
    /// Notes that the request is executed under a key, so the client gets its response however long that takes.
    pub(super) fn executes(&self) {
        let (from, to) = (PENDING, EXECUTING);
        // In another phase, its response has begun or its connection is over.
        let _late = self.phase.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
    }
}

const IDLE: u8 = 0;
/// A request was received, and its response has not begun.
const PENDING: u8 = 1;
/// The same for a request that is executed under a key, which continues even if the client leaves.
const EXECUTING: u8 = 2;
/// The response has begun, and its body has not ended.
const ANSWERING: u8 = 3;

/// The client may send more.
const OPEN: u8 = 0;
/// The client ended its side before its response began, or at the same time: which was first cannot be told if both were noticed
/// together. It waits for its response.
const ENDED: u8 = 1;
/// The client ended its side while it received its response. It has left, or its end was late.
const ENDED_LATE: u8 = 2;

/// The time for which a request continues after its client has ended its side, if it has no key or waits for the response of
/// another one. Nearly all services respond sooner, and nearly all clients that do this have left. The same time without any
/// progress ends a response whose client has ended its side meanwhile.
const DOUBT: Duration = Duration::from_secs(5);

impl ClientStream {
    pub(super) fn new(
        stream: TcpStream,
        write_timeout: Duration,
        watches_end: bool,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        // Best effort.
        let _without_delay = stream.set_nodelay(true);
        let state = Arc::default();
        Self {
            stream,
            state,
            write_timeout,
            timer: None,
            doubt: None,
            has_looked: false,
            watches_end,
            _permit: permit,
        }
    }

    pub(super) fn state(&self) -> Arc<ConnectionState> {
        self.state.clone()
    }

    /// Fails a write without progress for too long.
    fn timed<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.timer = None;
            self.doubt = None;
            return written;
        }
        let timeout = self.write_timeout;
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
        ready!(timer.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client took nothing for too long")))
    }

    /// Checks if the client has ended its side. HTTP allows that: it may wait for the response, or for the rest of it. If it has
    /// left, the next bytes are answered with a reset, but there may be none for a long time.
    fn check_end(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let phase = self.state.phase.load(Ordering::Relaxed);
        let had_looked = std::mem::replace(&mut self.has_looked, phase == ANSWERING);
        if !self.watches_end || phase == IDLE {
            self.doubt = None;
            return Ok(());
        }
        let mut side = self.state.client_side.load(Ordering::Relaxed);
        if side == OPEN {
            let mut byte = [0; 1];
            match self.stream.poll_peek(cx, &mut ReadBuf::new(&mut byte)) {
                Poll::Ready(Ok(0)) => {
                    side = if phase == ANSWERING && had_looked { ENDED_LATE } else { ENDED };
                    self.state.client_side.store(side, Ordering::Relaxed);
                }
                Poll::Ready(Err(error)) => return Err(error),
                // More requests, or nothing.
                Poll::Ready(Ok(_)) | Poll::Pending => return Ok(()),
            }
        }
        if phase == PENDING || (phase == ANSWERING && side == ENDED_LATE) {
            let doubt = self.doubt.get_or_insert_with(|| Box::pin(tokio::time::sleep(DOUBT)));
            if doubt.as_mut().poll(cx).is_ready() {
                return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the client has left"));
            }
        } else {
            self.doubt = None;
        }
        Ok(())
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.timed(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.timed(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// Called whenever the connection is polled and has nothing left to write.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        Poll::Ready(self.check_end(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// A response that an HTTP/1.1 client waits for or gets, until this is dropped.
struct PendingResponse(Arc<ConnectionState>);

impl PendingResponse {
    fn new(state: Arc<ConnectionState>) -> Self {
        state.client_side.store(OPEN, Ordering::Relaxed);
        state.phase.store(PENDING, Ordering::Relaxed);
        Self(state)
    }

    fn begins(&self) {
        self.0.phase.store(ANSWERING, Ordering::Relaxed);
    }
}

impl Drop for PendingResponse {
    fn drop(&mut self) {
        self.0.phase.store(IDLE, Ordering::Relaxed);
    }
}

/// The delivery of one response to its client.
pub(super) struct Delivery(Option<PendingResponse>);

impl Delivery {
    /// The delivery for a request that was just received.
    pub(super) fn of(version: Version, state: &Arc<ConnectionState>) -> Self {
        Self((version != Version::HTTP_2).then(|| PendingResponse::new(state.clone())))
    }

    /// Begins the delivery of a body. To be called in the task of the request.
    pub(super) fn begin<B>(self, body: B) -> ClientBody<B> {
        let tracking = match (self.0, PROGRESS.try_with(Arc::clone)) {
            (Some(response), _) => {
                response.begins();
                DeliveryTracking::Http1 { _response: response }
            }
            (None, Ok(progress)) => DeliveryTracking::Http2 { pieces: Pieces::new(progress) },
            (None, Err(_)) => DeliveryTracking::Unwatched,
        };
        ClientBody { body, tracking }
    }
}

pin_project! {
    /// The body of a response on its way to the client.
    pub(super) struct ClientBody<B> {
        #[pin]
        body: B,
        tracking: DeliveryTracking,
    }
}

enum DeliveryTracking {
    Http1 {
        _response: PendingResponse,
    },
    Http2 {
        pieces: Pieces,
    },
    /// Not in the task of a stream.
    Unwatched,
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>>> Body for ClientBody<B> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.project();
        match this.tracking {
            DeliveryTracking::Http2 { pieces } => pieces.poll_next(cx, this.body),
            DeliveryTracking::Http1 { .. } | DeliveryTracking::Unwatched => {
                this.body.poll_frame(cx).map(|frame| frame.map(|frame| frame.map_err(Into::into)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.tracking {
            DeliveryTracking::Http2 { pieces } => pieces.are_at_end(&self.body),
            DeliveryTracking::Http1 { .. } | DeliveryTracking::Unwatched => self.body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        // It is asked for before the first piece.
        self.body.size_hint()
    }
}

/// The largest piece of a response that is given to an HTTP/2 connection at a time. A client that takes one piece within the
/// write timeout is not cut off.
const MAX_PIECE: usize = 64 * 1024;

/// A body in pieces. Its end is reported only after all pieces were written: a stream that has ended cannot be reset, and its
/// remaining pieces would stay in memory until its connection ends.
struct Pieces {
    progress: Arc<Progress>,
    rest: Bytes,
    end: Option<Option<HeaderMap>>,
}

impl Pieces {
    fn new(progress: Arc<Progress>) -> Self {
        Self { progress, rest: Bytes::new(), end: None }
    }

    fn poll_next<B: Body<Data = Bytes, Error: Into<BoxError>>>(
        &mut self,
        cx: &mut Context<'_>,
        mut body: Pin<&mut B>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        loop {
            if !self.rest.is_empty() {
                let piece = self.rest.split_to(self.rest.len().min(MAX_PIECE));
                return Poll::Ready(Some(Ok(Frame::data(self.progress.give(piece)))));
            }
            if let Some(trailers) = &mut self.end {
                ready!(self.progress.poll_written(cx));
                return Poll::Ready(trailers.take().map(|trailers| Ok(Frame::trailers(trailers))));
            }
            match ready!(body.as_mut().poll_frame(cx)) {
                None => self.end = Some(None),
                Some(Err(error)) => return Poll::Ready(Some(Err(error.into()))),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(frame) => self.end = Some(frame.into_trailers().ok()),
                },
            }
        }
    }

    fn are_at_end(&self, body: &impl Body) -> bool {
        let is_read = match &self.end {
            Some(trailers) => trailers.is_none(),
            None => body.is_end_stream(),
        };
        is_read && self.rest.is_empty() && self.progress.is_written()
    }
}

tokio::task_local! {
    /// The progress of the stream whose task this is.
    static PROGRESS: Arc<Progress>;
}

/// The progress of the pieces of one response.
#[derive(Debug, Default)]
struct Progress(Mutex<ProgressState>);

#[derive(Debug, Default)]
struct ProgressState {
    /// The time since which pieces wait for the client without progress.
    waits_since: Option<Instant>,
    /// The number of pieces that are not written yet.
    unwritten: usize,
    waker: Option<Waker>,
}

impl Progress {
    fn state(&self) -> MutexGuard<'_, ProgressState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waits_since(&self) -> Option<Instant> {
        self.state().waits_since
    }

    fn is_written(&self) -> bool {
        self.state().unwritten == 0
    }

    /// Gives a piece to the connection.
    fn give(self: &Arc<Self>, piece: Bytes) -> Bytes {
        let mut state = self.state();
        state.unwritten += 1;
        state.waits_since = Some(Instant::now());
        Bytes::from_owner(Piece { data: piece, progress: self.clone() })
    }

    fn written(&self) {
        let mut state = self.state();
        state.unwritten -= 1;
        state.waits_since = (state.unwritten > 0).then(Instant::now);
        let waker = if state.unwritten == 0 { state.waker.take() } else { None };
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn poll_written(&self, cx: &Context<'_>) -> Poll<()> {
        let mut state = self.state();
        if state.unwritten == 0 {
            return Poll::Ready(());
        }
        state.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

/// A piece that was given to a connection. It is dropped when it was written or given up.
struct Piece {
    data: Bytes,
    progress: Arc<Progress>,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.progress.written();
    }
}

/// Runs the streams of HTTP/2 connections. Drops a stream whose client takes no bytes for too long, which resets it.
#[derive(Clone, Debug)]
pub(super) struct StreamExecutor {
    pub(super) write_timeout: Duration,
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for StreamExecutor {
    fn execute(&self, stream: F) {
        let timeout = self.write_timeout;
        let progress = Arc::<Progress>::default();
        let watched = WatchedStream { stream, progress: progress.clone(), timeout, timer: None };
        tokio::spawn(PROGRESS.scope(progress, watched));
    }
}

pin_project! {
    struct WatchedStream<F> {
        #[pin]
        stream: F,
        progress: Arc<Progress>,
        timeout: Duration,
        timer: Option<Pin<Box<Sleep>>>,
    }
}

impl<F: Future<Output = ()>> Future for WatchedStream<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        if this.stream.poll(cx).is_ready() {
            return Poll::Ready(());
        }
        loop {
            let Some(since) = this.progress.waits_since() else {
                *this.timer = None;
                return Poll::Pending;
            };
            let deadline = since + *this.timeout;
            let timer = this.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
            if timer.deadline() < deadline && timer.is_elapsed() {
                timer.as_mut().reset(deadline);
            }
            ready!(timer.as_mut().poll(cx));
            if this.progress.waits_since().is_none_or(|since| since + *this.timeout > timer.deadline()) {
                continue;
            }
            tracing::debug!("a client took nothing of a response for too long");
            return Poll::Ready(());
        }
    }
}
