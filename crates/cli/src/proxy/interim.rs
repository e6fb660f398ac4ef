//! Bounds what a server may send before its response: interim responses (1xx), which the HTTP library skips without an end.
//!
//! | connection | bound |
//! |---|---|
//! | HTTP/1.1 of the [pool](super::pool) | the bytes that are read before the response |
//! | HTTP/1.1 of the library's client | [`send`] counts interim responses, and the connection fails |
//! | HTTP/2 | [`BoundedStream`] counts heads by stream, and fails the connection |
//!
//! Each request has a limit of time besides. Without this, a server could keep a core busy until then.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use http::{Extensions, Request, Response, Uri};
use http_body::Body;
use hyper::body::Incoming;
use hyper::ext::on_informational;
use hyper::rt::{Read, ReadBuf, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{
    CaptureConnection, Connect, Connected, Connection, capture_connection,
};
use hyper_util::client::legacy::{self, Client};
use oncegate_http::BoxError;
use tower_service::Service;

/// The most bytes of interim responses before one response, where each counts as at least [`LEAST`].
const MAX_INTERIM: usize = 2 * 1024 * 1024;

/// The cost of one interim response besides its fields: with HTTP/2, a head of one byte may stand for a large one.
const LEAST: usize = 256;

/// The most streams of a connection that are counted. Those of this client that wait for a response are fewer.
const MAX_STREAMS: usize = 4096;

fn too_much() -> io::Error {
    let what = "the service sent too much before its response: interim responses (1xx) without end";
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Sends a request on connections of a [`BoundedConnector`], and returns the head of its response.
///
/// # Errors
/// If there is none, or if interim responses do not end.
pub(crate) async fn send<C, B>(
    client: &Client<C, B>,
    mut request: Request<B>,
) -> Result<Response<Incoming>, legacy::Error>
where
    C: Connect + Clone + Send + Sync + 'static,
    B: Body<Data: Send, Error: Into<BoxError>> + Send + Unpin + 'static,
{
    let captured = capture_connection(&mut request);
    send_captured(client, request, captured).await
}

/// The same for a request whose connection is captured already: the last capture counts.
pub(crate) async fn send_captured<C, B>(
    client: &Client<C, B>,
    mut request: Request<B>,
    captured: CaptureConnection,
) -> Result<Response<Incoming>, legacy::Error>
where
    C: Connect + Clone + Send + Sync + 'static,
    B: Body<Data: Send, Error: Into<BoxError>> + Send + Unpin + 'static,
{
    let seen = AtomicUsize::new(0);
    on_informational(&mut request, move |interim| {
        let fields = interim.headers().iter().map(|(name, value)| name.as_str().len() + value.len());
        let bytes = LEAST + fields.sum::<usize>();
        if seen.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes) > MAX_INTERIM
            && let Some(connected) = &*captured.connection_metadata()
        {
            // The library reads as long as something comes, so the next read has to fail.
            let mut extras = Extensions::new();
            connected.get_extras(&mut extras);
            if let Some(gate) = extras.get::<ReadGate>() {
                gate.0.store(true, Ordering::Relaxed);
            }
        }
    });
    client.request(request).await
}

/// True if nothing more is read from a connection.
#[derive(Clone, Debug, Default)]
struct ReadGate(Arc<AtomicBool>);

/// A client whose interim responses are bounded, as a service.
#[derive(Clone, Debug)]
pub(crate) struct BoundedClient<C, B>(pub(crate) Client<C, B>);

impl<C, B> Service<Request<B>> for BoundedClient<C, B>
where
    C: Connect + Clone + Send + Sync + 'static,
    B: Body<Data: Send, Error: Into<BoxError>> + Send + Unpin + 'static,
{
    type Response = Response<Incoming>;
    type Error = legacy::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, legacy::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), legacy::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let client = self.0.clone();
        Box::pin(async move { send(&client, request).await })
    }
}

/// Makes connections whose interim responses are bounded.
#[derive(Clone, Debug)]
pub(crate) struct BoundedConnector<C>(pub(crate) C);

impl<C> Service<Uri> for BoundedConnector<C>
where
    C: Service<Uri, Future: Send + 'static>,
{
    type Response = BoundedStream<C::Response>;
    type Error = C::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, C::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), C::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let connecting = self.0.call(to);
        Box::pin(async { connecting.await.map(BoundedStream::new) })
    }
}

/// A connection to a server, which fails when the server sends too many interim responses.
#[derive(Debug)]
pub(crate) struct BoundedStream<S> {
    stream: S,
    gate: ReadGate,
    /// The state of the bytes that are read; `None` with HTTP/1.1, and before the first write, which tells.
    frames: Option<Box<ReadFrames>>,
    has_written: bool,
}

/// The first bytes of a client that speaks HTTP/2 (RFC 9113, 3.4). No request has this method and version.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n";

/// The size of a read.
const BUFFER: usize = 16 * 1024;

#[derive(Debug)]
struct ReadFrames {
    buffer: Vec<u8>,
    limit: FrameLimit,
}

impl<S> BoundedStream<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, gate: ReadGate::default(), frames: None, has_written: false }
    }

    /// The connection itself.
    pub(crate) fn into_inner(self) -> S {
        self.stream
    }

    fn note_write(&mut self, bytes: &[u8]) {
        if !self.has_written && !bytes.is_empty() {
            self.has_written = true;
            if bytes.starts_with(PREFACE) {
                let (buffer, limit) = (vec![0; BUFFER], FrameLimit::default());
                self.frames = Some(Box::new(ReadFrames { buffer, limit }));
            }
        }
    }
}

impl<S: Connection> Connection for BoundedStream<S> {
    fn connected(&self) -> Connected {
        self.stream.connected().extra(self.gate.clone())
    }
}

impl<S: Read + Unpin> Read for BoundedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { stream, gate, frames, .. } = &mut *self;
        if gate.0.load(Ordering::Relaxed) {
            return Poll::Ready(Err(too_much()));
        }
        let Some(ReadFrames { buffer, limit }) = frames.as_deref_mut() else {
            return Pin::new(stream).poll_read(cx, buf);
        };
        let len = buffer.len().min(buf.remaining());
        let mut read = ReadBuf::new(buffer.get_mut(..len).unwrap_or_default());
        ready!(Pin::new(stream).poll_read(cx, read.unfilled()))?;
        limit.read(read.filled())?;
        buf.put_slice(read.filled());
        Poll::Ready(Ok(()))
    }
}

impl<S: Write + Unpin> Write for BoundedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.note_write(buf);
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let Some(first) = bufs.iter().find(|buf| !buf.is_empty()) {
            self.note_write(first);
        }
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

/// Follows the frames of a server (RFC 9113, 4.1), and counts the heads of each stream before its body or its end.
///
/// The head of a response without a body, and trailers, end their stream. Interim responses do not.
#[derive(Debug, Default)]
struct FrameLimit {
    /// The head of a frame, as far as it has come.
    head: [u8; 9],
    head_len: usize,
    /// The rest of the payload of a frame.
    payload_left: usize,
    /// The bytes of heads by stream.
    streams: BTreeMap<u32, usize>,
}

impl FrameLimit {
    fn read(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            if self.payload_left > 0 {
                let skipped = self.payload_left.min(bytes.len());
                self.payload_left -= skipped;
                bytes = bytes.get(skipped..).unwrap_or_default();
                continue;
            }
            let rest = self.head.get_mut(self.head_len..).unwrap_or_default();
            let taken = rest.len().min(bytes.len());
            let (now, later) = bytes.split_at(taken);
            rest.iter_mut().zip(now).for_each(|(to, from)| *to = *from);
            bytes = later;
            self.head_len += taken;
            if self.head_len == self.head.len() {
                self.head_len = 0;
                self.frame()?;
            }
        }
        Ok(())
    }

    fn frame(&mut self) -> io::Result<()> {
        const DATA: u8 = 0;
        const HEADERS: u8 = 1;
        const RST_STREAM: u8 = 3;
        const CONTINUATION: u8 = 9;
        const END_STREAM: u8 = 1;
        let [a, b, c, kind, flags, id @ ..] = self.head;
        self.payload_left = usize::try_from(u32::from_be_bytes([0, a, b, c])).unwrap_or(usize::MAX);
        let stream = u32::from_be_bytes(id) & 0x7fff_ffff;
        match kind {
            DATA | RST_STREAM => {
                self.streams.remove(&stream);
            }
            HEADERS if flags & END_STREAM != 0 => {
                self.streams.remove(&stream);
            }
            HEADERS => {
                let bytes = self.streams.entry(stream).or_default();
                if *bytes > MAX_INTERIM {
                    return Err(too_much());
                }
                *bytes += LEAST + self.payload_left;
                if self.streams.len() > MAX_STREAMS {
                    // The oldest one.
                    self.streams.pop_first();
                }
            }
            CONTINUATION => {
                if let Some(bytes) = self.streams.get_mut(&stream) {
                    *bytes += self.payload_left;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, stream: u32, payload: usize) -> Vec<u8> {
        let len = u32::try_from(payload).unwrap().to_be_bytes();
        let mut bytes = vec![len[1], len[2], len[3], kind, flags];
        bytes.extend(stream.to_be_bytes());
        bytes.resize(9 + payload, 0xff);
        bytes
    }

    fn heads_of(stream: u32) -> Vec<u8> {
        frame(1, 4, stream, 5)
    }

    /// The number of these bytes that pass.
    fn passed(bytes: impl Iterator<Item = Vec<u8>>, piece: usize) -> usize {
        let mut limit = FrameLimit::default();
        let read = |bytes: Vec<u8>| bytes.chunks(piece).all(|piece| limit.read(piece).is_ok());
        bytes.map(read).take_while(|is_read| *is_read).count()
    }

    #[test]
    fn heads_of_one_stream_are_bounded_however_they_are_cut() {
        let most = MAX_INTERIM / (LEAST + 5) + 1;
        for piece in [1, 2, 9, 10, 4096] {
            assert_eq!(passed((0..2 * most).map(|_| heads_of(1)), piece), most, "{piece}");
        }
        // Other frames in between do not change that.
        let noise = |n: usize| if n.is_multiple_of(2) { heads_of(7) } else { frame(6, 0, 0, 8) };
        assert_eq!(passed((0..4 * most).map(noise), 64), 2 * most);
        let in_parts = |n: usize| if n.is_multiple_of(2) { frame(1, 0, 7, 5) } else { frame(9, 4, 7, 5) };
        assert!(passed((0..4 * most).map(in_parts), 64) < 2 * most);
    }

    #[test]
    fn responses_one_after_another_are_not_bounded() {
        let ends: [fn(u32) -> Vec<u8>; 3] =
            [|n| frame(0, 0, n, 100), |n| frame(1, 5, n, 5), |n| frame(3, 0, n, 4)];
        for end in ends {
            let count = 3 * MAX_INTERIM / LEAST;
            let frames = (0..count).flat_map(|_| [heads_of(1), heads_of(1), end(1)]);
            assert_eq!(passed(frames, 4096), 3 * count);
        }
        let streams = (0..100_000).map(|n| heads_of(2 * n + 1));
        let mut limit = FrameLimit::default();
        streams.for_each(|bytes| limit.read(&bytes).unwrap());
        assert_eq!(limit.streams.len(), MAX_STREAMS);
    }
}
