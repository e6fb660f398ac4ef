//! Bodies that are observed while they pass: of requests for their fingerprint, of responses for their end.
//!
//! A tap never delays or changes a body. It stops when its listener is gone, when it has seen enough, or at its limit.

use bytes::Bytes;
use http_body::{Body, Frame};
use tokio::sync::oneshot;

use crate::body::ChunkCollector;
use crate::budget::BudgetReservation;

/// The end of an observed request body. If the sender is dropped, the body was not read to its end.
pub(crate) enum TappedRequest {
    /// All of it, with its reservation in the budget.
    Whole(Bytes, BudgetReservation),
    /// There is more than the limit.
    TooLarge,
    /// It broke off.
    Broken,
    /// The budget is used up.
    OverBudget,
}

/// Collects the body of a request while the service reads it.
pub(crate) struct RequestTap {
    chunks: ChunkCollector,
    len: usize,
    limit: usize,
    announced: u64,
    held: BudgetReservation,
    listener: oneshot::Sender<TappedRequest>,
}

impl RequestTap {
    /// A tap for this body. `None` if nothing of it needs to be seen.
    pub(crate) fn new<B: Body>(
        body: &B,
        limit: usize,
        held: BudgetReservation,
        listener: oneshot::Sender<TappedRequest>,
    ) -> Option<Box<Self>> {
        let announced = body.size_hint().lower();
        let tap = Box::new(Self { chunks: ChunkCollector::new(), len: 0, limit, announced, held, listener });
        match () {
            () if announced > limit as u64 => tap.end_with(TappedRequest::TooLarge),
            () if body.is_end_stream() => tap.end(),
            () => return Some(tap),
        }
        None
    }

    /// Sees one frame, or the end of the body. Returns the tap if it needs to see more.
    pub(crate) fn see<E>(
        mut self: Box<Self>,
        frame: Option<&Result<Frame<Bytes>, E>>,
        is_end: bool,
    ) -> Option<Box<Self>> {
        if self.listener.is_closed() {
            return None;
        }
        match frame {
            None => {
                self.end();
                return None;
            }
            Some(Err(_)) => {
                self.end_with(TappedRequest::Broken);
                return None;
            }
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref().filter(|data| !data.is_empty()) {
                    if !self.held.add(data.len()) {
                        self.end_with(TappedRequest::OverBudget);
                        return None;
                    }
                    self.len = self.len.saturating_add(data.len());
                    if self.len > self.limit {
                        self.end_with(TappedRequest::TooLarge);
                        return None;
                    }
                    self.chunks.push(data.clone());
                }
            }
        }
        if is_end {
            self.end();
            return None;
        }
        Some(self)
    }

    fn end(self) {
        // An HTTP/2 stream that is reset with NO_ERROR looks like one that ended.
        if (self.len as u64) < self.announced {
            return self.end_with(TappedRequest::Broken);
        }
        let Self { chunks, held, listener, .. } = self;
        let _gone = listener.send(TappedRequest::Whole(chunks.finish().join(), held));
    }

    fn end_with(self, end: TappedRequest) {
        let _gone = self.listener.send(end);
    }
}

/// The end of an observed response body. If the sender is dropped, the client did not take it to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TappedResponse {
    /// It came to its end within the limit.
    Whole,
    /// There is more than the limit.
    TooLarge,
    /// It broke off.
    Broken,
}

/// Counts the body of a response while the client reads it.
pub(crate) struct ResponseTap {
    len: usize,
    limit: usize,
    listener: oneshot::Sender<TappedResponse>,
}

impl ResponseTap {
    /// A tap for this body. `None` if nothing of it needs to be seen.
    pub(crate) fn new<B: Body>(
        body: &B,
        limit: usize,
        listener: oneshot::Sender<TappedResponse>,
    ) -> Option<Box<Self>> {
        let end = match () {
            () if body.size_hint().lower() > limit as u64 => TappedResponse::TooLarge,
            () if body.is_end_stream() => TappedResponse::Whole,
            () => return Some(Box::new(Self { len: 0, limit, listener })),
        };
        let _gone = listener.send(end);
        None
    }

    /// Sees one frame, or the end of the body. Returns the tap if it needs to see more.
    pub(crate) fn see<E>(
        mut self: Box<Self>,
        frame: Option<&Result<Frame<Bytes>, E>>,
        is_end: bool,
    ) -> Option<Box<Self>> {
        let end = match frame {
            None => TappedResponse::Whole,
            Some(Err(_)) => TappedResponse::Broken,
            Some(Ok(frame)) => {
                self.len = self.len.saturating_add(frame.data_ref().map_or(0, Bytes::len));
                match () {
                    () if self.len > self.limit => TappedResponse::TooLarge,
                    () if is_end => TappedResponse::Whole,
                    () => return Some(self),
                }
            }
        };
        let _gone = self.listener.send(end);
        None
    }
}
