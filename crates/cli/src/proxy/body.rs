//! Bodies that notice when nothing moves any more.

use std::future::Future as _;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use oncegate_http::BoxError;
use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep};

/// When something last moved towards the upstream.
#[derive(Clone, Debug)]
pub(super) struct Activity {
    start: Instant,
    /// Milliseconds after `start`.
    last: Arc<AtomicU64>,
}

impl Activity {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), last: Arc::default() }
    }

    fn note(&self) {
        let elapsed = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(elapsed, Ordering::Relaxed);
    }

    pub(super) fn last(&self) -> Instant {
        self.start + Duration::from_millis(self.last.load(Ordering::Relaxed))
    }
}

pin_project! {
    /// A request's body that notes when it moves.
    #[derive(Debug)]
    pub(super) struct NotedBody<B> {
        #[pin]
        body: B,
        activity: Activity,
    }
}

impl<B> NotedBody<B> {
    pub(super) const fn new(body: B, activity: Activity) -> Self {
        Self { body, activity }
    }
}

impl<B: Body> Body for NotedBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let this = self.project();
        let polled = this.body.poll_frame(cx);
        if polled.is_ready() {
            this.activity.note();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

pin_project! {
    /// The body of an answer: the upstream's, which breaks off when nothing comes for too long, or the proxy's own words.
    pub(super) struct ProxyBody {
        #[pin]
        inner: Inner,
    }
}

pin_project! {
    #[project = InnerProj]
    enum Inner {
        Upstream { #[pin] body: Incoming, idle: Option<Duration>, timer: Option<Pin<Box<Sleep>>> },
        Own { body: Option<Bytes> },
    }
}

impl ProxyBody {
    pub(super) const fn upstream(body: Incoming, idle: Option<Duration>) -> Self {
        Self { inner: Inner::Upstream { body, idle, timer: None } }
    }

    pub(super) const fn own(body: Bytes) -> Self {
        Self { inner: Inner::Own { body: Some(body) } }
    }
}

impl Body for ProxyBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.project().inner.project() {
            InnerProj::Own { body } => {
                Poll::Ready(body.take().filter(|b| !b.is_empty()).map(|b| Ok(Frame::data(b))))
            }
            InnerProj::Upstream { body, idle, timer } => {
                if let Poll::Ready(frame) = body.poll_frame(cx) {
                    *timer = None;
                    return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
                }
                // Only a body that keeps its reader waiting needs a timer.
                let Some(idle) = *idle else { return Poll::Pending };
                let timer = timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(idle)));
                timer.as_mut().poll(cx).map(|()| Some(Err("the upstream sent nothing for too long".into())))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            Inner::Upstream { body, .. } => body.is_end_stream(),
            Inner::Own { body } => body.as_ref().is_none_or(Bytes::is_empty),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Inner::Upstream { body, .. } => body.size_hint(),
            Inner::Own { body } => SizeHint::with_exact(body.as_ref().map_or(0, |body| body.len() as u64)),
        }
    }
}
