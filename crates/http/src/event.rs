//! The outcome of each request, for metrics, access logs and traces.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::{Method, StatusCode};
use oncegate_core::{CallerTag, RecordId};

use crate::rate_limit::RateLimitKind;
use crate::refusal::Condition;

/// The outcome of a request. Every request that enters the layer has exactly one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Disposition {
    /// Its method is not covered: passed through.
    NotCovered,
    /// It had no key and needed none: passed through unprotected.
    Unprotected,
    /// It was executed under its key.
    Executed,
    /// It was executed under its key, but another attempt or an operator had taken the record when it ended: there may be a
    /// second effect.
    Fenced,
    /// It got the stored response.
    Replayed,
    /// The layer refused it.
    Refused(Condition),
    /// The store was out of reach, and it was executed without protection because the route allows that.
    FailedOpen,
    /// Its client left before it had an outcome. It executed nothing.
    ClientLeft,
    /// Its route only observes: it was passed on without protection, and this would have been its outcome.
    Shadow(ShadowVerdict),
}

/// The outcome that a request would have had on a route that only observes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ShadowVerdict {
    /// It would have been executed under its key.
    Executed,
    /// It would have got the stored response, and would not have been executed.
    Replayed,
    /// It would have passed without protection: it has no key and needs none.
    Unprotected,
    /// It would have been executed without protection, because the store is out of reach and the route allows that.
    FailedOpen,
    /// It would have been refused.
    Refused(Condition),
    /// It is not known: the service responded, or the client left, before the request was read to its end; or the service
    /// would have been asked.
    NotObserved,
}

impl ShadowVerdict {
    /// The name in metrics. Those of refusals are the names of their problems.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Executed => "executed",
            Self::Replayed => "replayed",
            Self::Unprotected => "unprotected",
            Self::FailedOpen => "failed-open",
            Self::Refused(condition) => condition.slug(),
            Self::NotObserved => "not-observed",
        }
    }
}

impl Disposition {
    /// The name in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NotCovered => "not-covered",
            Self::Unprotected => "unprotected",
            Self::Executed => "executed",
            Self::Fenced => "fenced",
            Self::Replayed => "replayed",
            Self::Refused(condition) => condition.slug(),
            Self::FailedOpen => "failed-open",
            Self::ClientLeft => "client-left",
            Self::Shadow(_) => "shadow",
        }
    }

    /// The outcome that the request would have had, if its route only observes.
    #[must_use]
    pub const fn shadow_verdict(self) -> Option<ShadowVerdict> {
        match self {
            Self::Shadow(verdict) => Some(verdict),
            _ => None,
        }
    }
}

/// A request whose outcome is known. Carries neither key nor credential nor body.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RequestEvent<'a> {
    /// The outcome.
    pub disposition: Disposition,
    /// The status, if the layer answered or the handler did. A request that only passes through has not been answered yet.
    pub status: Option<StatusCode>,
    /// The method, as the client sent it.
    pub method: &'a Method,
    /// The tag of the settings that the request ran under: [`Settings::with_tag`](crate::Settings::with_tag).
    pub tag: u32,
    /// The trace that the request belongs to, if its [`RequestWatch`] knows one.
    pub trace: Option<TraceRef<'a>>,
    /// The details of a request that has a key, or that lacks the key that it must have.
    pub keyed: Option<KeyedEvent<'a>>,
}

/// A request with a key, or without the key that it must have.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct KeyedEvent<'a> {
    /// Method and path, such as `POST /payments`, cut to
    /// [`MAX_OPERATION_BYTES`](oncegate_core::limits::MAX_OPERATION_BYTES) bytes.
    pub operation: &'a str,
    /// The tag of the caller, if the request identifies one.
    pub caller: Option<CallerTag>,
    /// The record of the key, if the request has a key.
    pub record: Option<RecordId>,
    /// The number of the attempt, if this request executed.
    pub attempt: Option<u32>,
    /// The rate limit that the request exceeded, if it was refused for that.
    pub rate_limit: Option<RateLimitKind>,
    /// From the head of the request to the head of its response.
    pub duration: Duration,
}

/// A trace, as W3C Trace Context names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceRef<'a> {
    /// 32 lower-case hexadecimal digits.
    pub trace_id: &'a str,
    /// True if the spans of the trace are recorded.
    pub is_sampled: bool,
}

/// A part of the processing of a request with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RequestPhase {
    /// The claim of the record, with the wait for another owner.
    Claim,
    /// The end of the record: the result is written to the store.
    Settle,
}

/// Follows one request, for traces. Called on the request's path: it must be quick and must not block.
///
/// If the client leaves while its request executes, the rest of the request is followed in a task of its own. The layer drops
/// its reference when the outcome was reported.
pub trait RequestWatch: Send + Sync + 'static {
    /// A phase begins. Each phase occurs at most once in a request.
    fn begins(&self, phase: RequestPhase);

    /// A phase ends. A phase that its client cut off does not end.
    fn ends(&self, phase: RequestPhase);

    /// The outcome is known. Called once, after the [`RequestObserver`] of the layer.
    fn finished(&self, event: &RequestEvent<'_>);

    /// The trace of the request.
    fn trace(&self) -> Option<TraceRef<'_>>;
}

/// A [`RequestWatch`] in the extensions of a request. The layer leaves it there for the service behind it.
#[derive(Clone)]
pub struct WatchedRequest(pub Arc<dyn RequestWatch>);

impl fmt::Debug for WatchedRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WatchedRequest").field(&self.0.trace()).finish()
    }
}

/// The watch of a request, if it has one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watch(Option<WatchedRequest>);

impl Watch {
    pub(crate) fn of(extensions: &http::Extensions) -> Self {
        Self(extensions.get().cloned())
    }

    pub(crate) fn begins(&self, phase: RequestPhase) {
        if let Some(WatchedRequest(watch)) = &self.0 {
            watch.begins(phase);
        }
    }

    pub(crate) fn ends(&self, phase: RequestPhase) {
        if let Some(WatchedRequest(watch)) = &self.0 {
            watch.ends(phase);
        }
    }

    /// Reports an outcome to the observer and to the watch.
    pub(crate) fn report(&self, observer: &dyn RequestObserver, event: &RequestEvent<'_>) {
        let watch = self.0.as_ref().map(|watched| &watched.0);
        let event = RequestEvent { trace: watch.and_then(|watch| watch.trace()), ..*event };
        observer.observe(&event);
        if let Some(watch) = watch {
            watch.finished(&event);
        }
    }
}

/// Receives the outcome of each request. Called on the request's path: it must be quick and must not block.
pub trait RequestObserver: Send + Sync + 'static {
    /// Receives the outcome of one request.
    fn observe(&self, event: &RequestEvent<'_>);
}

/// Ignores everything.
impl RequestObserver for () {
    fn observe(&self, _: &RequestEvent<'_>) {}
}

/// Two observers, one after the other.
impl<A: RequestObserver, B: RequestObserver> RequestObserver for (A, B) {
    fn observe(&self, event: &RequestEvent<'_>) {
        self.0.observe(event);
        self.1.observe(event);
    }
}

/// Calls the closure with each event.
impl<F: Fn(&RequestEvent<'_>) + Send + Sync + 'static> RequestObserver for F {
    fn observe(&self, event: &RequestEvent<'_>) {
        self(event);
    }
}

/// An observer that may be left out.
impl<A: RequestObserver> RequestObserver for Option<A> {
    fn observe(&self, event: &RequestEvent<'_>) {
        if let Some(observer) = self {
            observer.observe(event);
        }
    }
}
