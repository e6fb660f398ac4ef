//! The access log: a line for each request with a key, or without the key that it must have, on the standard output.

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use oncegate_core::Timestamp;
use oncegate_http::{KeyedEvent, RequestEvent, RequestObserver, ShadowVerdict};
use serde_json::{Map, Value};

use crate::admin::{Metrics, time};
use crate::line_writer::LineWriter;

/// The form of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AccessLogFormat {
    Text,
    Json,
}

/// Writes the access log. All clones write one log.
#[derive(Clone, Debug)]
pub(crate) struct AccessLog {
    format: AccessLogFormat,
    lines: LineWriter,
}

impl AccessLog {
    /// Starts the thread that writes.
    pub(crate) fn start(format: AccessLogFormat, metrics: &Metrics) -> io::Result<Self> {
        let lines = LineWriter::start("access-log", io::stdout(), metrics.access_lines_dropped())?;
        Ok(Self { format, lines })
    }

    /// Waits, for a bounded time, until every line is written.
    pub(crate) fn close(&self) {
        self.lines.flush();
    }
}

impl RequestObserver for AccessLog {
    fn observe(&self, event: &RequestEvent<'_>) {
        let Some(keyed) = &event.keyed else { return };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = Timestamp::from_millis(u64::try_from(now.as_millis()).unwrap_or(u64::MAX));
        let mut line = match self.format {
            AccessLogFormat::Text => text(now, event, keyed),
            AccessLogFormat::Json => json(now, event, keyed),
        };
        line.push('\n');
        self.lines.write(line.into_bytes());
    }
}

/// `2024-02-29T12:34:56.007Z POST /payments 201 executed 12.345ms attempt=1 caller=… record=…`, with `-` for an unknown value,
/// and `trace_id=…` if the request belongs to a trace. Neither a method nor a path contains a space.
fn text(now: Timestamp, event: &RequestEvent<'_>, keyed: &KeyedEvent<'_>) -> String {
    let status = event.status.map_or_else(|| "-".to_owned(), |status| status.as_u16().to_string());
    let mut line = format!(
        "{} {} {status} {} {:.3}ms",
        time(now),
        keyed.operation,
        event.disposition.as_str(),
        millis(keyed.duration)
    );
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    for (name, value) in [
        ("attempt", keyed.attempt.map(|attempt| attempt.to_string())),
        ("caller", keyed.caller.map(|caller| caller.to_string())),
        ("record", keyed.record.map(|record| record.to_string())),
    ] {
        line.extend([" ", name, "=", &or_dash(value)]);
    }
    if let Some(verdict) = event.disposition.shadow_verdict() {
        line.extend([" would=", verdict.as_str()]);
    }
    if let Some(trace) = event.trace {
        line.extend([" trace_id=", trace.trace_id]);
    }
    line
}

/// The same as a JSON object, without members for unknown values.
fn json(now: Timestamp, event: &RequestEvent<'_>, keyed: &KeyedEvent<'_>) -> String {
    let mut members = Map::new();
    let mut add = |name: &str, value: Value| members.insert(name.to_owned(), value);
    add("time", time(now).into());
    let (method, path) = keyed.operation.split_once(' ').unwrap_or((keyed.operation, ""));
    add("method", method.into());
    add("path", path.into());
    if let Some(status) = event.status {
        add("status", status.as_u16().into());
    }
    add("outcome", event.disposition.as_str().into());
    if let Some(would) = event.disposition.shadow_verdict().map(ShadowVerdict::as_str) {
        add("would", would.into());
    }
    add("duration_ms", millis(keyed.duration).into());
    if let Some(attempt) = keyed.attempt {
        add("attempt", attempt.into());
    }
    if let Some(caller) = keyed.caller {
        add("caller", caller.to_string().into());
    }
    if let Some(record) = keyed.record {
        add("record", record.to_string().into());
    }
    if let Some(trace) = event.trace {
        add("trace_id", trace.trace_id.into());
    }
    Value::Object(members).to_string()
}

/// Milliseconds with three decimals.
pub(crate) fn millis(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}
