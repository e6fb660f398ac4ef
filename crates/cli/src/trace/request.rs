//! The trace of one request.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};

use http::{HeaderMap, StatusCode};
use oncegate_core::RecordId;
use oncegate_http::{Disposition, RequestEvent, RequestPhase, RequestWatch, TraceRef};

use super::{Recording, SpanContext, SpanId, TraceContext};
use crate::admin::UpstreamResult;

/// Follows one request. The spans are sent when the last holder drops it.
pub(crate) struct RequestTrace {
    /// The identifier of the trace, as logs write it.
    trace_id: Box<str>,
    is_sampled: bool,
    /// The context of the sidecar's own span.
    context: TraceContext,
    /// True if the fields of the request are replaced by the sidecar's context.
    takes_part: bool,
    /// `None` if no spans are recorded.
    recorded: Option<Recorded>,
}

struct Recorded {
    recording: Arc<Recording>,
    /// Taken at the end. Boxed, because it moves to the queue.
    spans: Mutex<Option<Box<RequestSpans>>>,
}

/// The spans of one request. Carries neither key nor credential nor body, and no query, which may hold a key.
#[derive(Clone, Debug)]
pub(crate) struct RequestSpans {
    pub(crate) context: TraceContext,
    /// The span of the client.
    pub(crate) parent: Option<SpanId>,
    /// The same moment twice: the others are measured from it.
    pub(crate) began_at: SystemTime,
    pub(crate) began: Instant,
    /// The head of the response, or the end of the work if the client left.
    pub(crate) ended: Option<Instant>,
    pub(crate) method: &'static str,
    /// The pattern of the route; `None` if no route matches.
    pub(crate) route: Option<Arc<str>>,
    pub(crate) path: Box<str>,
    pub(crate) scheme: &'static str,
    pub(crate) version: &'static str,
    pub(crate) status: Option<StatusCode>,
    pub(crate) disposition: Option<Disposition>,
    pub(crate) record: Option<RecordId>,
    pub(crate) attempt: Option<u32>,
    /// The hash of the caller.
    pub(crate) caller: Option<Box<str>>,
    /// The attempt whose response this request got.
    pub(crate) replayed: Option<SpanContext>,
    pub(crate) claim: Option<Interval>,
    pub(crate) settle: Option<Interval>,
    pub(crate) upstream: Option<UpstreamSpan>,
    /// True if the client left before the response began.
    pub(crate) client_left: bool,
}

/// A part of a request; without an end if it was cut off.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interval {
    pub(crate) began: Instant,
    pub(crate) ended: Option<Instant>,
}

impl Interval {
    fn begin() -> Self {
        Self { began: Instant::now(), ended: None }
    }
}

/// The call to the service.
#[derive(Clone, Debug)]
pub(crate) struct UpstreamSpan {
    pub(crate) span_id: SpanId,
    pub(crate) interval: Interval,
    /// `None` if the call was cut off.
    pub(crate) result: Option<UpstreamResult>,
    pub(crate) status: Option<StatusCode>,
    /// The host and the port of the service.
    pub(crate) server: (Box<str>, u16),
}

impl RequestSpans {
    pub(super) fn new(context: TraceContext) -> Self {
        Self {
            context,
            parent: None,
            began_at: SystemTime::now(),
            began: Instant::now(),
            ended: None,
            method: "",
            route: None,
            path: Box::default(),
            scheme: "",
            version: "",
            status: None,
            disposition: None,
            record: None,
            attempt: None,
            caller: None,
            replayed: None,
            claim: None,
            settle: None,
            upstream: None,
            client_left: false,
        }
    }

    /// The number of spans.
    pub(crate) fn count(&self) -> u64 {
        let parts = [self.claim.is_some(), self.settle.is_some(), self.upstream.is_some()];
        1 + parts.into_iter().map(u64::from).sum::<u64>()
    }
}

impl RequestTrace {
    /// The trace of a client, in which this sidecar does not take part.
    pub(super) fn passed_on(parent: TraceContext) -> Self {
        Self::new(parent, false, None)
    }

    /// A trace of which this sidecar records nothing.
    pub(super) fn unrecorded(context: TraceContext) -> Self {
        Self::new(context, true, None)
    }

    pub(super) fn recorded(spans: RequestSpans, recording: Arc<Recording>) -> Self {
        let context = spans.context.clone();
        let spans = Mutex::new(Some(Box::new(spans)));
        Self::new(context, true, Some(Recorded { recording, spans }))
    }

    fn new(context: TraceContext, takes_part: bool, recorded: Option<Recorded>) -> Self {
        let (trace_id, is_sampled) = (context.span.trace_id.to_string().into(), context.span.is_sampled());
        Self { trace_id, is_sampled, context, takes_part, recorded }
    }

    /// The identifier of the trace, as logs write it.
    pub(crate) fn trace_id(&self) -> &str {
        &self.trace_id
    }

    /// The identifier of the span, as logs write it: that of the client if this sidecar does not take part.
    pub(crate) fn span_id(&self) -> SpanId {
        self.context.span.span_id
    }

    /// Calls the closure with the spans, if they are recorded.
    fn with(&self, change: impl FnOnce(&mut RequestSpans, &Recording)) {
        if let Some(recorded) = &self.recorded
            && let Some(spans) = recorded.lock().as_mut()
        {
            change(spans, &recorded.recording);
        }
    }

    /// The head of the response is about to be sent.
    pub(crate) fn answered(&self, status: StatusCode) {
        self.with(|spans, _| {
            spans.status = Some(status);
            spans.ended = Some(Instant::now());
        });
    }

    /// The client left before its response began. The work may go on.
    pub(crate) fn client_left(&self) {
        self.with(|spans, _| spans.client_left |= spans.ended.is_none());
    }

    /// The request is about to be sent to the service at this address. Writes the context into its fields.
    pub(crate) fn call_begins(&self, headers: &mut HeaderMap, record: Option<RecordId>, server: (&str, u16)) {
        if !self.takes_part {
            return;
        }
        let mut context = self.context.clone();
        self.with(|spans, recording| {
            context.span = context.span.child(true);
            spans.upstream = Some(UpstreamSpan {
                span_id: context.span.span_id,
                interval: Interval::begin(),
                result: None,
                status: None,
                server: (server.0.into(), server.1),
            });
            if let Some(record) = record {
                recording.attempts.note(record, self.context.span);
            }
        });
        context.write(headers);
    }

    /// The call to the service has ended.
    pub(crate) fn call_ended(&self, result: UpstreamResult, status: Option<StatusCode>) {
        self.with(|spans, _| {
            if let Some(upstream) = &mut spans.upstream {
                upstream.interval.ended = Some(Instant::now());
                (upstream.result, upstream.status) = (Some(result), status);
            }
        });
    }
}

impl Recorded {
    fn lock(&self) -> MutexGuard<'_, Option<Box<RequestSpans>>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RequestWatch for RequestTrace {
    fn begins(&self, phase: RequestPhase) {
        self.with(|spans, _| {
            if let Some(part) = part(spans, phase) {
                *part = Some(Interval::begin());
            }
        });
    }

    fn ends(&self, phase: RequestPhase) {
        self.with(|spans, _| {
            if let Some(Some(interval)) = part(spans, phase) {
                interval.ended = Some(Instant::now());
            }
        });
    }

    fn finished(&self, event: &RequestEvent<'_>) {
        self.with(|spans, recording| {
            spans.disposition = Some(event.disposition);
            if let Some(keyed) = &event.keyed {
                spans.record = keyed.record;
                spans.attempt = keyed.attempt;
                spans.caller = keyed.caller.map(|caller| caller.to_string().into());
            }
            if let (Disposition::Replayed, Some(record)) = (event.disposition, &spans.record) {
                spans.replayed = recording.attempts.of(record);
            }
        });
    }

    fn trace(&self) -> Option<TraceRef<'_>> {
        Some(TraceRef { trace_id: &self.trace_id, is_sampled: self.is_sampled })
    }
}

fn part(spans: &mut RequestSpans, phase: RequestPhase) -> Option<&mut Option<Interval>> {
    match phase {
        RequestPhase::Claim => Some(&mut spans.claim),
        RequestPhase::Settle => Some(&mut spans.settle),
        _ => None,
    }
}

impl Drop for RequestTrace {
    fn drop(&mut self) {
        let Some(Recorded { recording, spans }) = self.recorded.take() else { return };
        let spans = spans.into_inner().unwrap_or_else(PoisonError::into_inner);
        let Some(mut spans) = spans else { return };
        spans.ended.get_or_insert_with(Instant::now);
        if let Err(refused) = recording.queue.try_send(spans) {
            recording.metrics.count_dropped_spans(refused.into_inner().count());
        }
    }
}

impl fmt::Debug for RequestTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestTrace").field("trace_id", &self.trace_id).finish_non_exhaustive()
    }
}
