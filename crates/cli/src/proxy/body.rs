//! Bodies that fail if no bytes arrive for too long.

use std::future::Future as _;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use http::Version;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use oncegate_http::BoxError;
use pin_project_lite::pin_project;
use tokio::time::{Instant, Sleep};

use super::coarse_timer::{CoarseSleep, CoarseTimer, TICK};
use super::headers::HeadFields;
use super::pool::StreamingConnection;
use super::request_limit::{RequestLimit, RequestPermit};

/// The progress of a request towards the upstream.
#[derive(Clone, Debug)]
pub(super) struct Activity {
    start: Instant,
    shared: Arc<SharedActivity>,
}

#[derive(Debug, Default)]
struct SharedActivity {
    /// The time at which the last byte moved, in milliseconds after `start`.
    last: AtomicU64,
    /// True if the client's body ended before it was complete.
    is_broken: AtomicBool,
    /// True if no more of the client's body is read.
    is_taken: AtomicBool,
    /// True if the response is complete or was given up.
    is_over: AtomicBool,
    /// Wakes the body of the request when the response is over.
    over: AtomicWaker,
}

impl Activity {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), shared: Arc::default() }
    }

    pub(super) const fn start(&self) -> Instant {
        self.start
    }

    fn note(&self) {
        let elapsed = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.shared.last.store(elapsed, Ordering::Relaxed);
    }

    pub(super) fn last(&self) -> Instant {
        self.start + Duration::from_millis(self.shared.last.load(Ordering::Relaxed))
    }

    /// Returns true if the client's body broke off or was malformed.
    pub(super) fn is_broken(&self) -> bool {
        self.shared.is_broken.load(Ordering::Relaxed)
    }

    /// Returns true if the HTTP library has taken all of the client's body that it will take.
    pub(super) fn is_request_taken(&self) -> bool {
        self.shared.is_taken.load(Ordering::Relaxed)
    }

    /// Returns true if the response is complete or was given up.
    pub(super) fn is_over(&self) -> bool {
        self.shared.is_over.load(Ordering::Acquire)
    }

    /// Notes that the response is over when it is dropped.
    pub(super) fn response(&self) -> RunningResponse {
        RunningResponse(self.clone())
    }
}

/// The response to a request, while it is awaited or delivered.
pub(super) struct RunningResponse(Activity);

impl Drop for RunningResponse {
    fn drop(&mut self) {
        self.0.shared.is_over.store(true, Ordering::Release);
        self.0.shared.over.wake();
    }
}

/// The side of an [`Activity`] that the body of the request has.
#[derive(Debug)]
struct ObservedActivity(Activity);

impl Drop for ObservedActivity {
    fn drop(&mut self) {
        self.0.shared.is_taken.store(true, Ordering::Relaxed);
    }
}

/// A timer for the service that does not count the time for which this process was paused.
///
/// If the process or its machine was paused, the deadline may be long over when it continues, while responses wait in its
/// sockets. They are read first: a response that came in time is not late because this process was paused.
///
/// Most waits end soon. A timer of the runtime is made only for one that lasts nearly until its deadline.
#[derive(Debug)]
pub(super) struct RunningTimer {
    deadline: Instant,
    /// Ends before the deadline.
    coarse: Option<CoarseSleep>,
    /// Made after `coarse` has ended.
    sleep: Option<Pin<Box<Sleep>>>,
    /// True if the sockets were polled once more.
    looked: bool,
    /// The number of times that this has been prolonged.
    pauses: u8,
}

/// A timer that fires this late was paused, together with the whole process.
const PAUSED: Duration = Duration::from_millis(100);

/// The most pauses that one wait does not count. A thread that is busy all the time looks the same, and a service that keeps it
/// busy must not be awaited for ever.
const MAX_PAUSES: u8 = 3;

/// The most time after a pause of this process for reading the waiting bytes of the service and receiving the rest.
const AFTER_PAUSE: Duration = Duration::from_secs(5);

/// The runtime polls sockets before timers, so the shortest sleep gives the sockets one turn.
const LAST_TURN: Duration = Duration::from_millis(1);

impl RunningTimer {
    pub(super) fn until(deadline: Instant, now: Instant, timer: &CoarseTimer) -> Self {
        // A coarse wait ends up to one tick late, or two if the thread is busy.
        let coarse = deadline.checked_sub(TICK * 3).filter(|before| *before > now);
        let coarse = coarse.map(|before| timer.wait_until(before));
        Self { deadline, coarse, sleep: None, looked: false, pauses: 0 }
    }

    /// Ready when the time is over. `timeout` is the full time.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, timeout: Duration) -> Poll<()> {
        if let Some(coarse) = &mut self.coarse {
            ready!(Pin::new(coarse).poll(cx));
            self.coarse = None;
        }
        let sleep = self.sleep.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(self.deadline)));
        loop {
            ready!(sleep.as_mut().poll(cx));
            let now = Instant::now();
            let is_late = now.saturating_duration_since(sleep.deadline()) > PAUSED;
            if is_late && self.pauses < MAX_PAUSES {
                self.pauses += 1;
                sleep.as_mut().reset(now + timeout.min(AFTER_PAUSE));
                self.looked = false;
            } else if self.looked {
                return Poll::Ready(());
            } else {
                sleep.as_mut().reset(now + LAST_TURN);
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
    ///
    /// Its end may come after the response. Clients that send everything before they read must not be cut off at once, but the
    /// time is limited, and it still counts as a request.
    #[derive(Debug)]
    pub(super) struct ObservedBody<B> {
        #[pin]
        body: B,
        activity: ObservedActivity,
        uploads: Arc<Uploads>,
        late: Option<Box<LateUpload>>,
    }
}

/// The rules for the request bodies of one thread. They are not shared with other threads, because each request takes a
/// reference.
#[derive(Debug)]
pub(super) struct Uploads {
    pub(super) head_fields: HeadFields,
    /// Counts those whose response is over.
    pub(super) limit: RequestLimit,
}

/// The rest of a request whose response is over.
#[derive(Debug)]
struct LateUpload {
    end: Instant,
    timer: Pin<Box<Sleep>>,
    _permit: RequestPermit,
}

/// The time for the rest of a request after its response.
const LATE_TIME: Duration = Duration::from_secs(30);

/// The time without any byte after which such a request ends.
pub(super) const LATE_SILENCE: Duration = Duration::from_secs(5);

impl LateUpload {
    fn begin(permit: RequestPermit) -> Box<Self> {
        let end = Instant::now() + LATE_TIME;
        Box::new(Self { end, timer: Box::pin(tokio::time::sleep_until(end)), _permit: permit })
    }

    /// Ready if its time is over. `last` is the time of its last byte.
    fn poll(&mut self, cx: &mut Context<'_>, last: Instant) -> Poll<()> {
        // The response may have ended a long time after that byte.
        let silent = last.max(self.end - LATE_TIME) + LATE_SILENCE;
        let deadline = silent.min(self.end);
        if self.timer.deadline() != deadline {
            self.timer.as_mut().reset(deadline);
        }
        self.timer.as_mut().poll(cx)
    }
}

impl<B> ObservedBody<B> {
    pub(super) const fn new(body: B, activity: Activity, uploads: Arc<Uploads>) -> Self {
        Self { body, activity: ObservedActivity(activity), uploads, late: None }
    }
}

impl<B: Body<Error = BoxError>> ObservedBody<B> {
    /// Ready if the response is over, and no more of the request is awaited.
    fn poll_late(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        let ObservedActivity(activity) = this.activity;
        if this.late.is_none() {
            activity.shared.over.register(cx.waker());
            if !activity.is_over() {
                return Poll::Pending;
            }
            *this.late = this.uploads.limit.try_enter_late().map(LateUpload::begin);
        }
        match this.late {
            Some(late) => late.poll(cx, activity.last()),
            None => Poll::Ready(()),
        }
    }
}

impl<B: Body<Error = BoxError>> Body for ObservedBody<B> {
    type Data = B::Data;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, BoxError>>> {
        let this = self.as_mut().project();
        let is_too_late = this.late.as_ref().is_some_and(|late| late.end <= Instant::now());
        let mut frame = match this.body.poll_frame(cx) {
            Poll::Ready(frame) if !is_too_late => frame,
            Poll::Pending if !is_too_late => {
                ready!(self.poll_late(cx));
                return Poll::Ready(Some(Err("its response is over".into())));
            }
            _ => return Poll::Ready(Some(Err("its response is over".into()))),
        };
        let ObservedActivity(activity) = this.activity;
        activity.note();
        match &mut frame {
            Some(Ok(frame)) => {
                if let Some(trailers) = frame.trailers_mut() {
                    this.uploads.head_fields.remove_from(trailers);
                }
            }
            Some(Err(_)) => activity.shared.is_broken.store(true, Ordering::Relaxed),
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
            silence: Silence,
            connection: Option<StreamingConnection>,
            _response: RunningResponse,
            _permit: Option<RequestPermit>,
        },
        Own { body: Option<Bytes> },
    }
}

/// The longest time between two frames of a body.
pub(super) struct Silence {
    timeout: Option<Duration>,
    timers: CoarseTimer,
    timer: Option<RunningTimer>,
}

impl Silence {
    pub(super) const fn new(timeout: Option<Duration>, timers: CoarseTimer) -> Self {
        Self { timeout, timers, timer: None }
    }

    /// Ready if the wait for a frame that began with the first poll lasts too long.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(timeout) = self.timeout else { return Poll::Pending };
        let timer = self.timer.get_or_insert_with(|| {
            let now = Instant::now();
            RunningTimer::until(now + timeout, now, &self.timers)
        });
        timer.poll(cx, timeout)
    }

    fn end(&mut self) {
        self.timer = None;
    }
}

impl ProxyBody {
    /// The body of the upstream, which comes from this connection. The response is over and the permit is released when this is
    /// dropped.
    pub(super) fn upstream(
        body: WholeBody,
        connection: Option<StreamingConnection>,
        silence: Silence,
        (response, permit): (RunningResponse, Option<RequestPermit>),
    ) -> Self {
        Self { inner: Inner::Upstream { body, silence, connection, _response: response, _permit: permit } }
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
            InnerProj::Upstream { body, silence, connection, .. } => {
                let frame = match connection {
                    Some(connection) => connection.poll_frame(cx, body),
                    None => body.poll_frame(cx),
                };
                if let Poll::Ready(frame) = frame {
                    silence.end();
                    return Poll::Ready(frame);
                }
                // Only a body that does not arrive at once needs a timer.
                silence.poll(cx).map(|()| Some(Err("the upstream sent nothing for too long".into())))
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
