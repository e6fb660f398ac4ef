//! Bodies of responses that were read before they are passed on.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;

/// The body of a response: the part that was read, and the rest if it is larger than the limit of the policy. It is passed on
/// byte for byte.
#[derive(Debug)]
pub struct ReceivedBody<B> {
    read: Bytes,
    trailers: Option<HeaderMap>,
    rest: Option<Pin<Box<B>>>,
}

impl<B: Body<Data = Bytes>> ReceivedBody<B> {
    /// Reads a body to its end, or until more than `limit` bytes were read.
    pub(crate) async fn read(body: B, limit: usize) -> Result<Self, B::Error> {
        let mut body = Box::pin(body);
        let mut read = Bytes::new();
        let mut joined: Option<BytesMut> = None;
        let mut trailers = None;
        while let Some(frame) = body.as_mut().frame().await.transpose()? {
            match frame.into_data() {
                Ok(data) if read.is_empty() && joined.is_none() => read = data,
                Ok(data) => {
                    let joined = joined.get_or_insert_with(|| BytesMut::from(&read[..]));
                    joined.extend_from_slice(&data);
                }
                Err(frame) => trailers = frame.into_trailers().ok(),
            }
            if joined.as_ref().map_or(read.len(), BytesMut::len) > limit {
                let read = joined.map_or(read, BytesMut::freeze);
                return Ok(Self { read, trailers, rest: Some(body) });
            }
        }
        Ok(Self { read: joined.map_or(read, BytesMut::freeze), trailers, rest: None })
    }

    /// A body that was not read yet.
    #[cfg(feature = "tower")]
    pub(crate) fn unread(body: B) -> Self {
        Self { read: Bytes::new(), trailers: None, rest: Some(Box::pin(body)) }
    }

    /// The whole body; `None` if a part was not read.
    pub(crate) fn whole(&self) -> Option<&Bytes> {
        self.rest.is_none().then_some(&self.read)
    }
}

impl<B: Body<Data = Bytes>> Body for ReceivedBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if !self.read.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.read)))));
        }
        if let Some(rest) = &mut self.rest {
            return rest.as_mut().poll_frame(cx);
        }
        Poll::Ready(self.trailers.take().map(|trailers| Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.read.is_empty()
            && self.trailers.is_none()
            && self.rest.as_ref().is_none_or(|rest| rest.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        let read = self.read.len() as u64;
        let rest = self.rest.as_ref().map_or_else(|| SizeHint::with_exact(0), |rest| rest.size_hint());
        let mut hint = SizeHint::new();
        // Upper first: a lower bound above it is refused by a panic.
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper.saturating_add(read));
        }
        hint.set_lower(rest.lower().saturating_add(read));
        hint
    }
}
