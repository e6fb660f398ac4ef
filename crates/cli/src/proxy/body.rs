//! Bodies that fail if no bytes arrive for too long.

use std::future::Future as _;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::Version;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use oncegate_http::BoxError;
use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep};

use super::headers::HeadFields;
use super::request_limit::RequestPermit;

/// The time at which the last byte moved towards the upstream.
#[derive(Clone, Debug)]
pub(super) struct Activity {
    start: Instant,
    /// Milliseconds after `start`.
    last: Arc<AtomicU64>,
    /// True if the client's body ended before it was complete.
    broken: Arc<AtomicBool>,
}

impl Activity {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), last: Arc::default(), broken: Arc::default() }
    }

    fn note(&self) {
        let elapsed = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(elapsed, Ordering::Relaxed);
    }

    pub(super) fn last(&self) -> Instant {
        self.start + Duration::from_millis(self.last.load(Ordering::Relaxed))
    }

    /// Returns true if the client's body broke off or was malformed.
    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }
}

/// A timer for the service that does not count the time for which this process was paused.
///
/// If the process or its machine was paused, the deadline may be long over when it continues, while responses wait in its
/// sockets. They are read first: a response that came in time is not late because this process was paused.
#[derive(Debug)]
pub(super) struct RunningTimer {
    sleep: Pin<Box<Sleep>>,
    /// True if the sockets were polled once more.
    looked: bool,
}

/// A timer that fires this late was paused, together with the whole process.
const PAUSED: Duration = Duration::from_millis(100);

/// The most time after a pause of this process for reading the waiting bytes of the service and receiving the rest.
const AFTER_PAUSE: Duration = Duration::from_secs(5);

/// The runtime polls sockets before timers, so the shortest sleep gives the sockets one turn.
const LAST_TURN: Duration = Duration::from_millis(1);

impl RunningTimer {
    pub(super) fn until(deadline: Instant) -> Self {
        Self { sleep: Box::pin(tokio::time::sleep_until(deadline)), looked: false }
    }

    /// Ready when the time is over. `timeout` is the full time.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, timeout: Duration) -> Poll<()> {
        loop {
            ready!(self.sleep.as_mut().poll(cx));
            let now = Instant::now();
            if now.saturating_duration_since(self.sleep.deadline()) > PAUSED {
                self.sleep.as_mut().reset(now + timeout.min(AFTER_PAUSE));
                self.looked = false;
            } else if self.looked {
                return Poll::Ready(());
            } else {
                self.sleep.as_mut().reset(now + LAST_TURN);
                self.looked = true;
            }
        }
    }
}

pin_project! {
    /// A body from the network that is complete only if its sender ended it.
    ///
    /// The HTTP library treats an HTTP/2 stream that is reset with `NO_ERROR` as one that has ended. Proxies such as Envoy reset
    /// it in this way when their client leaves in the middle of an upload: half a request would be executed, and half a
    /// response kept.
    #[derive(Debug)]
    pub(super) struct WholeBody {
        #[pin]
        body: Incoming,
        is_http2: bool,
    }
}

impl WholeBody {
    pub(super) fn new(body: Incoming, version: Version) -> Self {
        Self { body, is_http2: version == Version::HTTP_2 }
    }
}

impl Body for WholeBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let mut this = self.project();
        let frame = ready!(this.body.as_mut().poll_frame(cx));
        // A body with its declared length is complete, however it ended.
        let is_cut = frame.is_none()
            && *this.is_http2
            && !this.body.is_end_stream()
            && this.body.size_hint().exact() != Some(0);
        if is_cut {
            *this.is_http2 = false;
            return Poll::Ready(Some(Err("the stream was reset before the end of the body".into())));
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

pin_project! {
    /// A request body that records when its bytes move, and removes trailer fields that belong in the head.
    #[derive(Debug)]
    pub(super) struct ObservedBody<B> {
        #[pin]
        body: B,
        activity: Activity,
        head_fields: Arc<HeadFields>,
    }
}

impl<B> ObservedBody<B> {
    pub(super) const fn new(body: B, activity: Activity, head_fields: Arc<HeadFields>) -> Self {
        Self { body, activity, head_fields }
    }
}

impl<B: Body> Body for ObservedBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let this = self.project();
        let mut frame = ready!(this.body.poll_frame(cx));
        this.activity.note();
        match &mut frame {
            Some(Ok(frame)) => {
                if let Some(trailers) = frame.trailers_mut() {
                    this.head_fields.remove_from(trailers);
                }
            }
            Some(Err(_)) => this.activity.broken.store(true, Ordering::Relaxed),
            None => {}
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

pin_project! {
    /// The body of a response: the upstream's, which fails if no bytes arrive for too long, or that of the proxy itself.
    pub(super) struct ProxyBody {
        #[pin]
        inner: Inner,
    }
}

pin_project! {
    #[project = InnerProj]
    enum Inner {
        Upstream {
            #[pin]
            body: WholeBody,
            idle: Option<Duration>,
            timer: Option<RunningTimer>,
            _permit: Option<RequestPermit>,
        },
        Own { body: Option<Bytes> },
    }
}

impl ProxyBody {
    /// The body of the upstream. The permit is released with it.
    pub(super) const fn upstream(
        body: WholeBody,
        idle: Option<Duration>,
        permit: Option<RequestPermit>,
    ) -> Self {
        Self { inner: Inner::Upstream { body, idle, timer: None, _permit: permit } }
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
            InnerProj::Upstream { body, idle, timer, .. } => {
                if let Poll::Ready(frame) = body.poll_frame(cx) {
                    *timer = None;
                    return Poll::Ready(frame);
                }
                // Only a body that does not arrive at once needs a timer.
                let Some(idle) = *idle else { return Poll::Pending };
                let timer = timer.get_or_insert_with(|| RunningTimer::until(Instant::now() + idle));
                timer.poll(cx, idle).map(|()| Some(Err("the upstream sent nothing for too long".into())))
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
