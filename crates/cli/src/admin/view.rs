//! The JSON form in which operators see records.

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::header::{self, HeaderValue};
use oncegate_core::{AuditEntry, Record, RecordId, RecordedResponse, State, Step, StoredResponse, Timestamp};
use serde_json::{Map, Value};

/// The extent to which a record is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Detail {
    /// A line in a listing.
    Line,
    /// Everything but the stored body and the results of the steps.
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
        "expires_in_seconds": record.expires_at.since(now).as_secs(),
    });
    if let Value::Object(members) = &mut view {
        match &record.state {
            State::InProgress { lease_until, after_abandoned, .. } => {
                members.insert("lease_until".to_owned(), time(*lease_until).into());
                members.insert("after_abandoned".to_owned(), (*after_abandoned).into());
            }
            State::Completed(RecordedResponse::Replayable(stored)) => {
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
        insert_bytes(&mut members, "result", result);
    }
    Value::Object(members)
}

/// Inserts bytes as text, or in base64 under another name if they are not text.
pub(super) fn insert_bytes(members: &mut Map<String, Value>, name: &str, bytes: &[u8]) {
    let (name, text) = match std::str::from_utf8(bytes) {
        Ok(text) => (name.to_owned(), text.to_owned()),
        Err(_) => (format!("{name}_base64"), STANDARD.encode(bytes)),
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
        insert_bytes(&mut members, "body", &body);
    }
    Value::Object(members)
}

/// Fields as pairs in their order, because a name may be repeated.
fn fields<'a>(fields: impl Iterator<Item = (&'a str, &'a [u8])>) -> Value {
    fields.map(|(name, value)| serde_json::json!([name, String::from_utf8_lossy(value)])).collect()
}

/// A JSON response that no cache stores.
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

/// Days from 1970-01-01 to a date of the Gregorian calendar. The year begins in March, so that its last day is the leap day.
pub(crate) const fn days_to(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let month = (month + 9) % 12;
    365 * year + year / 4 - year / 100 + year / 400 + (month * 306 + 5) / 10 + day - 1 - 719_468
}

/// Reads a time in the form of RFC 3339. The time of day, its seconds and the zone may be left out; without a zone it is UTC.
pub(super) fn parse_time(text: &str) -> Option<Timestamp> {
    let (date, time) = text.split_once(['T', 't', ' ']).unwrap_or((text, "00:00"));
    let [year, month, day] = numbers(date, '-')?;
    let time = time.strip_suffix(['Z', 'z']).unwrap_or(time);
    let (time, ahead) = match time.find(['+', '-']) {
        Some(at) => {
            let (time, zone) = time.split_at(at);
            let [hours, minutes] = numbers(zone.get(1..)?, ':')?;
            let minutes = hours * 60 + minutes;
            (time, if zone.starts_with('-') { -minutes } else { minutes })
        }
        None => (time, 0),
    };
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let [hour, minute, second] = match numbers(time, ':') {
        Some(whole) => whole,
        None => {
            let [hour, minute] = numbers(time, ':')?;
            [hour, minute, 0]
        }
    };
    let fits =
        (1..=12).contains(&month) && (1..=31).contains(&day) && hour < 24 && minute < 60 && second < 61;
    if !fits || !fraction.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let millis: i64 = format!("{fraction:0<3}").get(..3)?.parse().ok()?;
    let minutes = days_to(year, month, day) * 1440 + hour * 60 + minute - ahead;
    u64::try_from(minutes * 60_000 + second * 1000 + millis).ok().map(Timestamp::from_millis)
}

/// Reads exactly `N` numbers of one to four digits.
fn numbers<const N: usize>(text: &str, separator: char) -> Option<[i64; N]> {
    let number = |digits: &str| {
        let is_number = (1..=4).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
        if is_number { digits.parse().ok() } else { None }
    };
    let numbers: Option<Vec<i64>> = text.split(separator).map(number).collect();
    numbers?.try_into().ok()
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
            assert_eq!(parse_time(text), Some(Timestamp::from_millis(millis)));
        }
    }

    #[test]
    fn times_are_read_as_people_write_them() {
        for (text, whole) in [
            ("2024-02-29", "2024-02-29T00:00:00.000Z"),
            ("2024-02-29T12:34", "2024-02-29T12:34:00.000Z"),
            ("2024-02-29 12:34:56", "2024-02-29T12:34:56.000Z"),
            ("2024-02-29t12:34:56.5z", "2024-02-29T12:34:56.500Z"),
            ("2024-02-29T00:34:56.123456+01:00", "2024-02-28T23:34:56.123Z"),
            ("2024-02-28T22:00-02:30", "2024-02-29T00:30:00.000Z"),
        ] {
            assert_eq!(parse_time(text).map(time).as_deref(), Some(whole), "{text}");
        }
        for text in [
            "", "12:34", "2024-02", "2024-13-01", "2024-00-01", "2024-01-32", "2024-01-01T24:00",
            "2024-01-01T1", "2024-01-01T12:60", "2024-01-01T12:00:00.x", "2024-01-01T12:00+1",
            "2024-01-01T12:00+", "1969-12-31", "20240-01-01", "yesterday", "2024-01-01T12:00Ü",
        ] {
            assert_eq!(parse_time(text), None, "{text}");
        }
    }
}
