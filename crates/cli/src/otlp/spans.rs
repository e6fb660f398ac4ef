//! Spans as OTLP sends them (`ExportTraceServiceRequest`), with the names of the semantic conventions of OpenTelemetry for HTTP.

use std::time::{Instant, UNIX_EPOCH};

use http::StatusCode;

use super::Resource;
use super::wire::MessageWriter;
use crate::admin::UpstreamResult;
use crate::trace::{Interval, RequestSpans, SpanContext, SpanId, UpstreamSpan};

/// The kinds of spans.
const INTERNAL: u64 = 1;
const SERVER: u64 = 2;
const CLIENT: u64 = 3;

/// The status of a span that failed.
const ERROR: u64 = 2;

/// The flags that the parent is known to be in another process.
const HAS_IS_REMOTE: u32 = 0x100;
const IS_REMOTE: u32 = 0x200;

/// The fields of `Span`.
mod field {
    pub(super) const TRACE_ID: u32 = 1;
    pub(super) const SPAN_ID: u32 = 2;
    pub(super) const TRACE_STATE: u32 = 3;
    pub(super) const PARENT: u32 = 4;
    pub(super) const NAME: u32 = 5;
    pub(super) const KIND: u32 = 6;
    pub(super) const START: u32 = 7;
    pub(super) const END: u32 = 8;
    pub(super) const ATTRIBUTE: u32 = 9;
    pub(super) const LINK: u32 = 13;
    pub(super) const STATUS: u32 = 15;
    pub(super) const FLAGS: u32 = 16;
}

/// The body of a request to the collector with the spans of these requests.
pub(super) fn encode(resource: &Resource, store: &str, requests: &[RequestSpans]) -> Vec<u8> {
    let mut message = MessageWriter::default();
    message.message(1, |spans| {
        spans.message(1, |message| resource.write(message));
        spans.message(2, |scope| {
            scope.message(1, Resource::write_scope);
            for request in requests {
                let writer = RequestWriter { request, store };
                writer.write(scope);
            }
        });
    });
    message.into_bytes()
}

struct RequestWriter<'a> {
    request: &'a RequestSpans,
    store: &'a str,
}

impl RequestWriter<'_> {
    /// Nanoseconds since 1970. All moments are measured from the begin of the request, so that spans never overlap wrongly if
    /// the clock is set.
    fn at(&self, moment: Instant) -> u64 {
        let after = moment.saturating_duration_since(self.request.began);
        let began = self.request.began_at.duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from((began + after).as_nanos()).unwrap_or(u64::MAX)
    }

    fn write(&self, scope: &mut MessageWriter) {
        let request = self.request;
        scope.message(2, |span| self.write_server(span));
        if let Some(claim) = &request.claim {
            scope.message(2, |span| self.write_part(span, "claim", claim));
        }
        if let Some(upstream) = &request.upstream {
            scope.message(2, |span| self.write_client(span, upstream));
        }
        if let Some(settle) = &request.settle {
            scope.message(2, |span| self.write_part(span, "settle", settle));
        }
    }

    /// The fields that all spans of the request have.
    fn write_span(
        &self,
        span: &mut MessageWriter,
        id: SpanId,
        (name, kind): (&str, u64),
        interval: &Interval,
    ) {
        let context = &self.request.context;
        span.bytes(field::TRACE_ID, context.span.trace_id.as_bytes());
        span.bytes(field::SPAN_ID, id.as_bytes());
        if let Some(state) = context.state.as_ref().and_then(|state| state.to_str().ok()) {
            span.text(field::TRACE_STATE, state);
        }
        span.text(field::NAME, name);
        span.number(field::KIND, kind);
        span.fixed64(field::START, self.at(interval.began));
        // A part that was cut off ended with the request.
        let ended = interval.ended.or(self.request.ended).unwrap_or(interval.began);
        span.fixed64(field::END, self.at(ended.max(interval.began)));
    }

    fn write_server(&self, span: &mut MessageWriter) {
        let request = self.request;
        let own = request.context.span;
        let name = match (&request.route, request.method) {
            (Some(route), "_OTHER") => format!("HTTP {route}"),
            (Some(route), method) => format!("{method} {route}"),
            (None, "_OTHER") => "HTTP".to_owned(),
            (None, method) => method.to_owned(),
        };
        let interval = Interval { began: request.began, ended: request.ended };
        self.write_span(span, own.span_id, (&name, SERVER), &interval);
        if let Some(parent) = &request.parent {
            span.bytes(field::PARENT, parent.as_bytes());
        }
        let remote = if request.parent.is_some() { HAS_IS_REMOTE | IS_REMOTE } else { HAS_IS_REMOTE };
        span.fixed32(field::FLAGS, u32::from(own.flags()) | remote);
        text(span, "http.request.method", request.method);
        text(span, "url.scheme", request.scheme);
        text(span, "url.path", &request.path);
        text(span, "network.protocol.version", request.version);
        if let Some(route) = &request.route {
            text(span, "http.route", route);
        }
        if let Some(status) = request.status {
            number(span, "http.response.status_code", status.as_u16().into());
        }
        if let Some(disposition) = request.disposition {
            text(span, "oncegate.outcome", disposition.as_str());
        }
        self.write_record(span);
        if let Some(attempt) = request.attempt {
            number(span, "oncegate.attempt", attempt.into());
        }
        if let Some(caller) = &request.caller {
            text(span, "oncegate.caller", caller);
        }
        if request.client_left {
            flag(span, "oncegate.client_left");
        }
        if let Some(replayed) = &request.replayed {
            span.message(field::LINK, |link| write_link(link, replayed));
        }
        // Errors of the client are no errors of the server.
        if let Some(status) = request.status.filter(StatusCode::is_server_error) {
            fail(span, status.as_str());
        }
    }

    fn write_part(&self, span: &mut MessageWriter, name: &str, interval: &Interval) {
        self.write_span(span, SpanId::random(), (name, INTERNAL), interval);
        self.write_local(span);
        self.write_record(span);
        text(span, "oncegate.store", self.store);
    }

    fn write_client(&self, span: &mut MessageWriter, upstream: &UpstreamSpan) {
        let request = self.request;
        let name = if request.method == "_OTHER" { "HTTP" } else { request.method };
        self.write_span(span, upstream.span_id, (name, CLIENT), &upstream.interval);
        self.write_local(span);
        self.write_record(span);
        text(span, "http.request.method", request.method);
        text(span, "server.address", &upstream.server.0);
        number(span, "server.port", upstream.server.1.into());
        if let Some(status) = upstream.status {
            number(span, "http.response.status_code", status.as_u16().into());
        }
        match (upstream.result, upstream.status) {
            (Some(UpstreamResult::Answered), Some(status)) => {
                if status.is_client_error() || status.is_server_error() {
                    fail(span, status.as_str());
                }
            }
            (Some(result), _) => fail(span, result.as_str()),
            (None, _) => fail(span, "cut-off"),
        }
    }

    /// The parent of a part of the request: the span of the request, in this process.
    fn write_local(&self, span: &mut MessageWriter) {
        let own = self.request.context.span;
        span.bytes(field::PARENT, own.span_id.as_bytes());
        span.fixed32(field::FLAGS, u32::from(own.flags()) | HAS_IS_REMOTE);
    }

    fn write_record(&self, span: &mut MessageWriter) {
        if let Some(record) = &self.request.record {
            text(span, "oncegate.record", &record.to_string());
        }
    }
}

fn write_link(link: &mut MessageWriter, to: &SpanContext) {
    link.bytes(1, to.trace_id.as_bytes());
    link.bytes(2, to.span_id.as_bytes());
    link.fixed32(6, u32::from(to.flags()) | HAS_IS_REMOTE);
}

/// Marks a span as failed. The type of an error is one of a few values.
fn fail(span: &mut MessageWriter, kind: &str) {
    text(span, "error.type", kind);
    span.message(field::STATUS, |status| status.number(3, ERROR));
}

fn attribute(span: &mut MessageWriter, key: &str, write: impl FnOnce(&mut MessageWriter)) {
    span.message(field::ATTRIBUTE, |pair| {
        pair.text(1, key);
        pair.message(2, write);
    });
}

fn text(span: &mut MessageWriter, key: &str, value: &str) {
    attribute(span, key, |any| any.text_always(1, value));
}

fn number(span: &mut MessageWriter, key: &str, value: u64) {
    attribute(span, key, |any| any.number_always(3, value));
}

/// An attribute that is true; it is left out if it is false.
fn flag(span: &mut MessageWriter, key: &str) {
    attribute(span, key, |any| any.number_always(2, 1));
}
