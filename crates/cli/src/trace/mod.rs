//! Traces of requests: the trace context of a request comes in, its spans are recorded, and the service gets the context of
//! the span that called it.
//!
//! | `otlp-endpoint` | the request has a valid `traceparent` | the sidecar |
//! |---|---|---|
//! | not set | no | does nothing |
//! | not set | yes | passes the fields on unchanged, and writes the identifier of the trace into its logs |
//! | set | no | begins a trace if the sample ratio says so; an invalid context is removed |
//! | set | yes | continues the trace, recorded or not |
//!
//! A request that is recorded has these spans, as the semantic conventions of OpenTelemetry for HTTP name them:
//!
//! ```text
//! POST /payments (server)         from the head of the request to that of the response
//! ├── claim                       the claim of the record in the store
//! ├── POST (client)               the call to the service, which continues the trace
//! └── settle                      the result is written to the store
//! ```
//!
//! The spans are sent when the last part of the program that follows the request drops it, so also if its client left.

mod attempts;
mod context;
mod request;

use std::sync::Arc;

use http::Request;
use tokio::sync::mpsc;

pub(crate) use self::context::{SpanContext, SpanId, TraceContext};
pub(crate) use self::request::{Interval, RequestSpans, RequestTrace, UpstreamSpan};

use self::attempts::Attempts;
use crate::admin::{Metrics, method_name};
use crate::config::Config;

/// Begins the traces of requests. All clones share the queue and the known attempts.
#[derive(Clone, Debug)]
pub(crate) struct Tracer {
    /// `None` if no spans are recorded.
    recording: Option<Arc<Recording>>,
}

#[derive(Debug)]
struct Recording {
    queue: mpsc::Sender<Box<RequestSpans>>,
    attempts: Attempts,
    metrics: Metrics,
}

impl Tracer {
    /// A tracer that records nothing. Traces of clients go on, and are in the logs.
    pub(crate) const fn silent() -> Self {
        Self { recording: None }
    }

    /// A tracer that puts the spans of requests into this queue. If the queue is full, they are dropped and counted.
    pub(crate) fn recording(queue: mpsc::Sender<Box<RequestSpans>>, metrics: Metrics) -> Self {
        let attempts = Attempts::default();
        Self { recording: Some(Arc::new(Recording { queue, attempts, metrics })) }
    }

    /// Begins to follow a request that was just received, if it belongs to a trace. Removes a context that is invalid.
    ///
    /// A client that `is_trusted` decides if a trace that it began is recorded. For all others the sample ratio decides: they
    /// could have every request recorded otherwise.
    pub(crate) fn begin<B>(
        &self,
        request: &mut Request<B>,
        is_trusted: bool,
        scheme: &'static str,
        config: &Config,
    ) -> Option<Arc<RequestTrace>> {
        let parent = TraceContext::read(request.headers());
        let Some(recording) = &self.recording else {
            let parent = parent?;
            return Some(Arc::new(RequestTrace::passed_on(parent)));
        };
        if parent.is_none() {
            TraceContext::remove(request.headers_mut());
        }
        let is_sampled = match &parent {
            Some(parent) if is_trusted => parent.span.is_sampled(),
            _ => config.trace_sample_ratio.decides(),
        };
        if !is_sampled {
            let parent = parent?;
            let own = parent.span.child(false);
            let context = TraceContext { span: own, state: parent.state };
            return Some(Arc::new(RequestTrace::unrecorded(context)));
        }
        let (span, parent_id, state) = match parent {
            Some(parent) => (parent.span.child(true), Some(parent.span.span_id), parent.state),
            None => (SpanContext::root(true), None, None),
        };
        let path = request.uri().path();
        let spans = RequestSpans {
            parent: parent_id,
            method: method_name(request.method()),
            route: Some(config.route(request.method(), path).label.clone())
                .filter(|route| route.starts_with('/')),
            path: cut(path, MAX_PATH).into(),
            scheme,
            version: version_name(request.version()),
            ..RequestSpans::new(TraceContext { span, state })
        };
        Some(Arc::new(RequestTrace::recorded(spans, recording.clone())))
    }
}

/// The longest path in a span, in bytes.
const MAX_PATH: usize = 256;

/// The text, cut to at most `max` bytes at the end of a character.
fn cut(text: &str, max: usize) -> &str {
    let end = (0..=max.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    text.get(..end.unwrap_or_default()).unwrap_or_default()
}

const fn version_name(version: http::Version) -> &'static str {
    match version {
        http::Version::HTTP_2 => "2",
        http::Version::HTTP_10 => "1.0",
        _ => "1.1",
    }
}

/// The share of new traces that are recorded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SampleRatio(f64);

impl SampleRatio {
    /// `None` unless the ratio is from 0 to 1.
    pub(crate) fn new(ratio: f64) -> Option<Self> {
        (0.0..=1.0).contains(&ratio).then_some(Self(ratio))
    }

    fn decides(self) -> bool {
        // A random number is less than 1.
        fastrand::f64() < self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_decides_for_its_share() {
        let share = |ratio| (0..10_000).filter(|_| SampleRatio::new(ratio).unwrap().decides()).count();
        assert_eq!((share(0.0), share(1.0)), (0, 10_000));
        assert!((4_000..6_000).contains(&share(0.5)));
        for ratio in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            assert_eq!(SampleRatio::new(ratio), None, "{ratio}");
        }
    }

    #[test]
    fn a_long_path_is_cut_at_the_end_of_a_character() {
        assert_eq!(cut("/a\u{e9}b", 3), "/a");
        assert_eq!(cut("/a\u{e9}b", 4), "/a\u{e9}");
        assert_eq!(cut("/a", 256), "/a");
    }
}
