//! The bodies of requests and responses as they pass the layer.

use std::error::Error as StdError;
use std::fmt;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use pin_project_lite::pin_project;
use tokio::sync::mpsc;

use crate::budget::{BudgetExhausted, BudgetReservation, TIED_RESPONSE, tie};
use crate::tap::{RequestTap, ResponseTap};

/// Any error of a body.
pub type BoxError = Box<dyn StdError + Send + Sync>;

pin_project! {
    /// The body of a request behind the layer: the client's own if no key applies, or the bytes that the layer read.
    pub struct RequestBody<B> {
        #[pin]
        inner: RequestInner<B>,
    }
}

pin_project! {
    #[project = RequestProj]
    enum RequestInner<B> {
        /// Untouched.
        Passing { #[pin] body: B },
        /// Untouched, and observed while the service reads it.
        Observed { #[pin] body: B, tap: Option<Box<RequestTap>> },
        /// Read completely, with its reservation in the budget.
        Whole { body: CompleteBody, held: Option<BudgetReservation> },
    }
}

pin_project! {
    /// The body of a response in front of the layer: the handler's own if no key applies, a stored one, or one that is
    /// too large or too long-lived to be stored and streams through.
    pub struct ResponseBody<B> {
        #[pin]
        inner: ResponseInner<B>,
    }
}

pin_project! {
    #[project = ResponseProj]
    enum ResponseInner<B> {
        /// Untouched.
        Passing { #[pin] body: B },
        /// Untouched, and observed while the client reads it.
        Observed { #[pin] body: B, tap: Option<Box<ResponseTap>> },
        /// Read or stored completely, with its reservation in the budget.
        Whole { body: CompleteBody, held: Option<BudgetReservation> },
        /// Streamed from the handler by a task of its own.
        Streamed { pumped: StreamedBody },
    }
}

/// The client's end of a body that a task of its own streams from the handler.
pub(crate) struct StreamedBody {
    pub(crate) frames: mpsc::Receiver<Result<Frame<Bytes>, BoxError>>,
    pub(crate) size: SizeHint,
    /// True if the frames end before the body does, because the client took nothing for too long.
    pub(crate) is_cut: Arc<AtomicBool>,
    /// The reservation for the first frames, and the number of them that the client has not taken yet.
    pub(crate) ahead: Option<(BudgetReservation, usize)>,
}

impl StreamedBody {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = ready!(self.frames.poll_recv(cx));
        if let Some((_, left)) = &mut self.ahead {
            *left = left.saturating_sub(1);
        }
        self.ahead.take_if(|(_, left)| *left == 0);
        // A truncated body must not look complete.
        if frame.is_none() && self.is_cut.swap(false, Ordering::Acquire) {
            return Poll::Ready(Some(Err("the client took nothing for too long".into())));
        }
        Poll::Ready(frame)
    }
}

/// A complete body: its bytes and trailer fields.
struct CompleteBody {
    data: Option<Bytes>,
    /// Boxed: trailers are rare, and boxing keeps a body small to move.
    trailers: Option<Box<HeaderMap>>,
}

impl CompleteBody {
    fn new(data: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self { data: Some(data), trailers: trailers.map(Box::new) }
    }

    fn next(&mut self) -> Option<Frame<Bytes>> {
        let data = self.data.take().filter(|data| !data.is_empty()).map(Frame::data);
        data.or_else(|| self.trailers.take().map(|trailers| Frame::trailers(*trailers)))
    }

    fn is_end(&self) -> bool {
        self.data.as_ref().is_none_or(Bytes::is_empty) && self.trailers.is_none()
    }

    fn size(&self) -> SizeHint {
        let len = self.data.as_ref().map_or(0, |data| data.len() as u64);
        if self.trailers.is_none() {
            return SizeHint::with_exact(len);
        }
        // HTTP/1.1 allows trailers only after a body of undeclared length.
        let mut size = SizeHint::new();
        size.set_lower(len);
        size
    }
}

impl<B> RequestBody<B> {
    pub(crate) const fn passing(body: B) -> Self {
        Self { inner: RequestInner::Passing { body } }
    }

    pub(crate) const fn observed(body: B, tap: Option<Box<RequestTap>>) -> Self {
        Self { inner: RequestInner::Observed { body, tap } }
    }

    pub(crate) fn whole(data: Bytes, trailers: Option<HeaderMap>, held: Option<BudgetReservation>) -> Self {
        Self { inner: RequestInner::Whole { body: CompleteBody::new(data, trailers), held } }
    }
}

impl<B> ResponseBody<B> {
    pub(crate) const fn passing(body: B) -> Self {
        Self { inner: ResponseInner::Passing { body } }
    }

    pub(crate) const fn observed(body: B, tap: Option<Box<ResponseTap>>) -> Self {
        Self { inner: ResponseInner::Observed { body, tap } }
    }

    /// The body of a refusal: small, so it needs no reservation.
    pub(crate) fn own(data: Bytes) -> Self {
        Self { inner: ResponseInner::Whole { body: CompleteBody::new(data, None), held: None } }
    }

    /// A response with its reservation.
    pub(crate) fn whole(data: Bytes, trailers: Option<HeaderMap>, held: BudgetReservation) -> Self {
        let (data, held) = tie(data, held, TIED_RESPONSE);
        Self { inner: ResponseInner::Whole { body: CompleteBody::new(data, trailers), held } }
    }

    pub(crate) const fn pumped(pumped: StreamedBody) -> Self {
        Self { inner: ResponseInner::Streamed { pumped } }
    }
}

impl<B> Body for RequestBody<B>
where
    B: Body<Error: Into<BoxError>>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.project().inner.project() {
            RequestProj::Passing { body } => poll_passing(body, cx),
            RequestProj::Observed { mut body, tap } => {
                let frame = ready!(poll_passing(body.as_mut(), cx));
                *tap = tap.take().and_then(|tap| tap.see(frame.as_ref(), body.is_end_stream()));
                Poll::Ready(frame)
            }
            RequestProj::Whole { body, .. } => Poll::Ready(body.next().map(Ok)),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            RequestInner::Passing { body } | RequestInner::Observed { body, .. } => body.is_end_stream(),
            RequestInner::Whole { body, .. } => body.is_end(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            RequestInner::Passing { body } | RequestInner::Observed { body, .. } => body.size_hint(),
            RequestInner::Whole { body, .. } => body.size(),
        }
    }
}

impl<B> Body for ResponseBody<B>
where
    B: Body<Error: Into<BoxError>>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.project().inner.project() {
            ResponseProj::Passing { body } => poll_passing(body, cx),
            ResponseProj::Observed { mut body, tap } => {
                let frame = ready!(poll_passing(body.as_mut(), cx));
                *tap = tap.take().and_then(|tap| tap.see(frame.as_ref(), body.is_end_stream()));
                Poll::Ready(frame)
            }
            ResponseProj::Whole { body, .. } => Poll::Ready(body.next().map(Ok)),
            ResponseProj::Streamed { pumped } => pumped.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            ResponseInner::Passing { body } | ResponseInner::Observed { body, .. } => body.is_end_stream(),
            ResponseInner::Whole { body, .. } => body.is_end(),
            ResponseInner::Streamed { .. } => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            ResponseInner::Passing { body } | ResponseInner::Observed { body, .. } => body.size_hint(),
            ResponseInner::Whole { body, .. } => body.size(),
            ResponseInner::Streamed { pumped } => pumped.size,
        }
    }
}

fn poll_passing<B: Body<Error: Into<BoxError>>>(
    body: Pin<&mut B>,
    cx: &mut Context<'_>,
) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
    let frame = ready!(body.poll_frame(cx));
    Poll::Ready(frame.map(|frame| frame.map(into_bytes).map_err(Into::into)))
}

/// The frame with its data as [`Bytes`], without a copy if they are `Bytes` already.
pub(crate) fn into_bytes<D: Buf>(frame: Frame<D>) -> Frame<Bytes> {
    frame.map_data(|mut data| data.copy_to_bytes(data.remaining()))
}

impl<B> fmt::Debug for RequestBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestBody").finish_non_exhaustive()
    }
}

impl<B> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseBody").finish_non_exhaustive()
    }
}

/// The chunks of a body. Most bodies have one, which needs no list.
#[derive(Clone)]
pub(crate) enum Chunks {
    One(Bytes),
    Many(Vec<Bytes>),
}

impl Chunks {
    pub(crate) const NONE: Self = Self::Many(Vec::new());

    fn push(&mut self, chunk: Bytes) {
        match self {
            Self::Many(chunks) if chunks.is_empty() => *self = Self::One(chunk),
            Self::Many(chunks) => chunks.push(chunk),
            Self::One(first) => *self = Self::Many(vec![std::mem::take(first), chunk]),
        }
    }

    pub(crate) const fn as_slice(&self) -> &[Bytes] {
        match self {
            Self::One(chunk) => std::slice::from_ref(chunk),
            Self::Many(chunks) => chunks.as_slice(),
        }
    }

    /// The chunks as one, without a copy if there is only one.
    pub(crate) fn join(self) -> Bytes {
        match self {
            Self::One(chunk) => chunk,
            Self::Many(chunks) => {
                let mut all = BytesMut::with_capacity(chunks.iter().map(Bytes::len).sum());
                chunks.iter().for_each(|chunk| all.extend_from_slice(chunk));
                all.freeze()
            }
        }
    }
}

/// Chunks that are smaller than this are copied together. A chunk keeps the buffer of the connection that it came in, with the
/// framing around it, so a body of many tiny chunks would need far more memory than its bytes.
const COPIED_BELOW: usize = 4 * 1024;

/// Collects the chunks of a body in memory that is in proportion to its bytes. The first chunk is never copied.
pub(crate) struct ChunkCollector {
    chunks: Chunks,
    /// Small chunks that follow `chunks`.
    small: BytesMut,
}

impl ChunkCollector {
    pub(crate) fn new() -> Self {
        Self { chunks: Chunks::NONE, small: BytesMut::new() }
    }

    pub(crate) fn push(&mut self, chunk: Bytes) {
        if chunk.len() >= COPIED_BELOW || self.chunks.as_slice().is_empty() {
            self.end_small();
            self.chunks.push(chunk);
            return;
        }
        self.small.extend_from_slice(&chunk);
        if self.small.len() >= COPIED_BELOW {
            self.end_small();
        }
    }

    fn end_small(&mut self) {
        if !self.small.is_empty() {
            self.chunks.push(std::mem::take(&mut self.small).freeze());
        }
    }

    pub(crate) fn finish(mut self) -> Chunks {
        self.end_small();
        self.chunks
    }
}

/// The result of reading a request's body up to a limit.
pub(crate) enum RequestRead {
    /// All of it.
    Whole { data: Bytes, trailers: Option<HeaderMap> },
    /// There is more than the limit.
    TooLarge,
    /// It broke off.
    Broken(BoxError),
}

/// Reads the body of a request, but not beyond `limit` bytes and the chunk that crosses it. `charge` gets the length of each
/// chunk, and returns false if the budget is used up.
pub(crate) async fn read_request<B>(body: B, limit: usize, charge: impl FnMut(usize) -> bool) -> RequestRead
where
    B: Body<Error: Into<BoxError>>,
{
    let mut chunks = ChunkCollector::new();
    // In place: if there is more than the limit, the rest is not needed.
    let body = pin!(body);
    match read(body, &mut chunks, limit, charge).await {
        Ok(BodyEnd::Whole { trailers }) => RequestRead::Whole { data: chunks.finish().join(), trailers },
        Ok(BodyEnd::More) => RequestRead::TooLarge,
        Err(error) => RequestRead::Broken(error),
    }
}

/// The result of reading a response's body up to a limit.
pub(crate) enum ResponseRead<B> {
    /// All of it.
    Whole { chunks: Chunks, trailers: Option<HeaderMap> },
    /// There is more than the limit: the chunks that were read, and the rest.
    More { chunks: Chunks, rest: Pin<Box<B>> },
    /// It broke off.
    Broken(BoxError),
}

/// Reads the body of a response, but not beyond `limit` bytes and the chunk that crosses it. `charge` gets the length of each
/// chunk.
pub(crate) async fn read_response<B>(body: B, limit: usize, mut charge: impl FnMut(usize)) -> ResponseRead<B>
where
    B: Body<Error: Into<BoxError>>,
{
    let mut chunks = ChunkCollector::new();
    let charge = |bytes| {
        charge(bytes);
        true
    };
    let mut body = Box::pin(body);
    match read(body.as_mut(), &mut chunks, limit, charge).await {
        Ok(BodyEnd::Whole { trailers }) => ResponseRead::Whole { chunks: chunks.finish(), trailers },
        Ok(BodyEnd::More) => ResponseRead::More { chunks: chunks.finish(), rest: body },
        Err(error) => ResponseRead::Broken(error),
    }
}

/// The end of reading a body.
enum BodyEnd {
    Whole { trailers: Option<HeaderMap> },
    More,
}

/// Reads a body into `chunks`. The limit counts what arrives, because a body may be longer than it declares.
async fn read<B>(
    mut body: Pin<&mut B>,
    chunks: &mut ChunkCollector,
    limit: usize,
    mut charge: impl FnMut(usize) -> bool,
) -> Result<BodyEnd, BoxError>
where
    B: Body<Error: Into<BoxError>>,
{
    let mut trailers: Option<HeaderMap> = None;
    let mut len = 0_usize;
    let announced = body.size_hint().lower();
    if announced > limit as u64 {
        return Ok(BodyEnd::More);
    }
    loop {
        let frame = match body.frame().await {
            // An HTTP/2 stream that is reset with NO_ERROR looks like one that ended.
            None if (len as u64) < announced => {
                return Err("it is shorter than its declared length".into());
            }
            None => return Ok(BodyEnd::Whole { trailers }),
            Some(Err(error)) => return Err(error.into()),
            Some(Ok(frame)) => into_bytes(frame),
        };
        match frame.into_data() {
            Ok(data) => {
                if data.is_empty() {
                    continue;
                }
                if !charge(data.len()) {
                    return Err(BudgetExhausted.into());
                }
                len = len.saturating_add(data.len());
                chunks.push(data);
                if len > limit {
                    return Ok(BodyEnd::More);
                }
            }
            Err(frame) => {
                if let Ok(more) = frame.into_trailers() {
                    trailers.get_or_insert_default().extend(more);
                }
            }
        }
    }
}

/// The next frame of a body, with `Bytes` and a boxed error.
pub(crate) async fn next_frame<B>(body: &mut Pin<Box<B>>) -> Option<Result<Frame<Bytes>, BoxError>>
where
    B: Body<Error: Into<BoxError>>,
{
    body.frame().await.map(|frame| frame.map(into_bytes).map_err(Into::into))
}
