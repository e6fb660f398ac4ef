//! What an operator sees of records.

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::header::{self, HeaderValue};
use oncegate_core::{Answer, AuditEntry, Record, RecordId, State, Step, StoredResponse, Timestamp};
use serde_json::{Map, Value};

/// How much of a record is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Detail {
    /// A line in a listing.
    Line,
    /// Everything but the stored body and what came of the steps.
    Whole,
    /// Everything.
    Body,
}

pub(super) fn record(id: RecordId, record: &Record, now: Timestamp, detail: Detail) -> Value {
    let mut view = serde_json::json!({
        "record": id.to_string(),
        "state": record.state_name(now).as_str(),
        "operation": record.label.operation(),
        "caller": record.label.caller().to_string(),
        "key_tag": record.label.key().map(|tag| tag.to_string()),
        "by_operator": record.by_operator,
        "token": record.token.get(),
        "attempts": record.attempts,
        "created_at": time(record.created_at),
        "changed_at": time(record.changed_at),
        "age_seconds": now.since(record.changed_at).as_secs(),
        "expires_at": time(record.expires_at),
    });
    if let Value::Object(members) = &mut view {
        match &record.state {
            State::InProgress { lease_until, after_abandoned, .. } => {
                members.insert("lease_until".to_owned(), time(*lease_until).into());
                members.insert("after_abandoned".to_owned(), (*after_abandoned).into());
            }
            State::Completed(Answer::Replayable(stored)) => {
                members.insert("response".to_owned(), response(stored, detail));
            }
            _ => {}
        }
        if detail >= Detail::Whole && !record.steps.is_empty() {
            let steps = record.steps.as_slice().iter().map(|one| step(one, detail)).collect();
            members.insert("steps".to_owned(), steps);
        }
    }
    view
}

fn step(step: &Step, detail: Detail) -> Value {
    let result = step.result();
    let mut members = Map::new();
    members.insert("name".to_owned(), step.name().into());
    members.insert("result_bytes".to_owned(), result.len().into());
    if detail >= Detail::Body {
        insert_octets(&mut members, "result", result);
    }
    Value::Object(members)
}

/// As text, or in base64 under another name where they are none.
fn insert_octets(members: &mut Map<String, Value>, name: &str, octets: &[u8]) {
    let (name, text) = match std::str::from_utf8(octets) {
        Ok(text) => (name.to_owned(), text.to_owned()),
        Err(_) => (format!("{name}_base64"), STANDARD.encode(octets)),
    };
    members.insert(name, text.into());
}

fn response(stored: &StoredResponse, detail: Detail) -> Value {
    let body = stored.body();
    let mut members = Map::new();
    members.insert("status".to_owned(), stored.status().into());
    members.insert("body_bytes".to_owned(), body.len().into());
    if detail >= Detail::Whole {
        members.insert("headers".to_owned(), fields(stored.headers()));
        if stored.trailers().next().is_some() {
            members.insert("trailers".to_owned(), fields(stored.trailers()));
        }
    }
    if detail >= Detail::Body {
        insert_octets(&mut members, "body", &body);
    }
    Value::Object(members)
}

/// Pairs in their order: a field may be there more than once.
fn fields<'a>(fields: impl Iterator<Item = (&'a str, &'a [u8])>) -> Value {
    fields.map(|(name, value)| serde_json::json!([name, String::from_utf8_lossy(value)])).collect()
}

/// An answer that no cache keeps.
pub(super) fn json(value: &Value) -> Response {
    ([(header::CACHE_CONTROL, HeaderValue::from_static("no-store"))], Json(value)).into_response()
}

pub(super) fn audit_entry(entry: &AuditEntry) -> Value {
    serde_json::json!({
        "number": entry.number,
        "at": time(entry.at),
        "record": entry.id.to_string(),
        "from": entry.from.as_str(),
        "to": entry.to.as_str(),
        "actor": entry.actor,
        "reason": entry.reason,
    })
}

/// The time in the form of RFC 3339, in UTC with milliseconds.
pub(crate) fn time(at: Timestamp) -> String {
    let (seconds, millis) = (at.as_millis() / 1000, at.as_millis() % 1000);
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Days since 0000-03-01, so that a leap day is the last day of its year; 400 years have 146097 days.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute) = (second / 3600, second % 3600 / 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{:02}.{millis:03}Z", second % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (millis, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399_999, "2000-02-28T23:59:59.999Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (951_868_800_000, "2000-03-01T00:00:00.000Z"),
            (1_709_210_096_007, "2024-02-29T12:34:56.007Z"),
            (1_735_689_599_000, "2024-12-31T23:59:59.000Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(time(Timestamp::from_millis(millis)), text);
        }
    }
}
