//! Lines of the log as JSON: one object each, whose names do not change.
//!
//! `time`, `level`, `target` and `message` are always there. The fields of the event follow, and those of the spans around it,
//! such as `trace_id` and `span_id`.

use std::fmt;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use super::Log;
use crate::activity::wall_clock;
use crate::admin::time;

/// The names that no field may take.
const OWN: [&str; 4] = ["time", "level", "target", "message"];

/// Writes a line for each event.
#[derive(Clone, Copy, Debug)]
pub(super) struct JsonLines(&'static Log);

impl JsonLines {
    pub(super) const fn new(log: &'static Log) -> Self {
        Self(log)
    }
}

/// The fields of a span, kept with it.
struct SpanFields(Fields);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for JsonLines {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, ctx: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let Some(span) = ctx.span(id) {
            span.extensions_mut().insert(SpanFields(fields));
        }
    }

    fn on_record(&self, id: &Id, record: &Record<'_>, ctx: Context<'_, S>) {
        if let Some(span) = ctx.span(id)
            && let Some(SpanFields(fields)) = span.extensions_mut().get_mut()
        {
            record.record(fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, ctx: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        for span in ctx.event_scope(event).into_iter().flatten() {
            if let Some(SpanFields(around)) = span.extensions().get() {
                // The inner one wins.
                for (name, value) in &around.members {
                    fields.members.entry(name).or_insert_with(|| value.clone());
                }
            }
        }
        let metadata = event.metadata();
        self.0.write(line(metadata.level().as_str(), metadata.target(), fields).into_bytes());
    }
}

fn line(level: &str, target: &str, fields: Fields) -> String {
    let Fields { message, mut members } = fields;
    let own = [
        ("time", time(wall_clock())),
        ("level", level.to_ascii_lowercase()),
        ("target", target.to_owned()),
        ("message", message),
    ];
    members.extend(own.map(|(name, value)| (name.to_owned(), value.into())));
    format!("{}\n", Value::Object(members))
}

/// The line about lines that were dropped.
pub(super) fn dropped_line(missing: u64, what: &str) -> String {
    let mut fields = Fields { message: format!("{missing} {what}"), ..Fields::default() };
    fields.members.insert("dropped".to_owned(), missing.into());
    line("WARN", "oncegate::log", fields)
}

/// The fields of an event or of a span.
#[derive(Debug, Default)]
struct Fields {
    message: String,
    members: Map<String, Value>,
}

impl Fields {
    fn add(&mut self, field: &Field, value: Value) {
        let name = field.name();
        let name = if OWN.contains(&name) { format!("field_{name}") } else { name.to_owned() };
        self.members.insert(name, value);
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        if field.name() == "message" {
            self.message = text;
        } else {
            self.add(field, text.into());
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            value.clone_into(&mut self.message);
        } else {
            self.add(field, value.into());
        }
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value.into());
    }
}
