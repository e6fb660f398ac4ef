//! The JSON form in which operators see records.

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::header::{self, HeaderValue};
use oncegate_core::{AuditEntry, Record, RecordId, RecordedResponse, State, Step, StoredResponse, Timestamp};
use serde::Serialize;
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

/// A record as operators see it. The API sends it as JSON, and the dashboard renders it as a page.
#[derive(Clone, Debug, Serialize)]
pub(super) struct RecordView {
    pub(super) record: String,
    pub(super) state: &'static str,
    pub(super) operation: String,
    pub(super) caller: String,
    pub(super) key_tag: Option<String>,
    pub(super) by_operator: bool,
    pub(super) token: u64,
    pub(super) attempts: u32,
    pub(super) created_at: String,
    pub(super) changed_at: String,
    pub(super) age_seconds: u64,
    pub(super) expires_at: String,
    pub(super) expires_in_seconds: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) lease_until: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) after_abandoned: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) response: Option<ResponseView>,
    /// The response in the place of `response`, if it cannot be opened.
    #[serde(rename = "response", skip_serializing_if = "Option::is_none")]
    pub(super) sealed: Option<SealedView>,
    /// The key that sealed it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) sealed_with: Option<String>,
    /// The reason why a part of it cannot be opened.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) seal_refused: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) steps: Vec<StepView>,
}

/// A stored response in its sealed form, whose status and header fields are not those of the response.
#[derive(Clone, Debug, Serialize)]
pub(super) struct SealedView {
    pub(super) sealed_bytes: usize,
}

/// A stored response.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ResponseView {
    pub(super) status: u16,
    pub(super) body_bytes: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) headers: Option<Vec<FieldView>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) trailers: Option<Vec<FieldView>>,
    #[serde(flatten)]
    pub(super) body: Option<BodyView>,
}

/// A field, as a pair in the order of the response, because a name may be repeated.
pub(super) type FieldView = (String, String);

/// A stored body: text, or base64 if it is not text.
#[derive(Clone, Debug, Serialize)]
pub(super) enum BodyView {
    #[serde(rename = "body")]
    Text(String),
    #[serde(rename = "body_base64")]
    Base64(String),
}

/// A finished step.
#[derive(Clone, Debug, Serialize)]
pub(super) struct StepView {
    pub(super) name: String,
    pub(super) result_bytes: usize,
    #[serde(flatten)]
    pub(super) result: Option<StepResultView>,
}

/// The result of a step: text, or base64 if it is not text.
#[derive(Clone, Debug, Serialize)]
pub(super) enum StepResultView {
    #[serde(rename = "result")]
    Text(String),
    #[serde(rename = "result_base64")]
    Base64(String),
}

impl RecordView {
    pub(super) fn new(id: RecordId, record: &Record, now: Timestamp, detail: Detail) -> Self {
        let (mut lease, mut abandoned, mut stored, mut sealed) = (None, None, None, None);
        match &record.state {
            State::InProgress { lease_until, after_abandoned, .. } => {
                (lease, abandoned) = (Some(time(*lease_until)), Some(*after_abandoned));
            }
            State::Completed(RecordedResponse::Replayable(response)) if response.is_sealed() => {
                sealed = Some(SealedView { sealed_bytes: response.body().len() });
            }
            State::Completed(RecordedResponse::Replayable(response)) => {
                stored = Some(ResponseView::new(response, detail));
            }
            _ => {}
        }
        let steps = record.steps.as_slice().iter().filter(|_| detail >= Detail::Whole);
        Self {
            record: id.to_string(),
            state: record.state_name(now).as_str(),
            operation: record.label.operation().to_owned(),
            caller: record.label.caller().to_string(),
            key_tag: record.label.key().map(|tag| tag.to_string()),
            by_operator: record.by_operator,
            token: record.token.get(),
            attempts: record.attempts,
            created_at: time(record.created_at),
            changed_at: time(record.changed_at),
            age_seconds: now.since(record.changed_at).as_secs(),
            expires_at: time(record.expires_at),
            expires_in_seconds: record.expires_at.since(now).as_secs(),
            lease_until: lease,
            after_abandoned: abandoned,
            response: stored,
            sealed,
            sealed_with: None,
            seal_refused: None,
            steps: steps.map(|step| StepView::new(step, detail)).collect(),
        }
    }

    /// The JSON form.
    pub(super) fn json(&self) -> Value {
        // The form has no map with other keys than texts, so it cannot fail.
        serde_json::to_value(self).unwrap_or_default()
    }
}

impl StepView {
    fn new(step: &Step, detail: Detail) -> Self {
        let result = step.result();
        let shown = (detail >= Detail::Body).then(|| match std::str::from_utf8(result) {
            Ok(text) => StepResultView::Text(text.to_owned()),
            Err(_) => StepResultView::Base64(STANDARD.encode(result)),
        });
        Self { name: step.name().to_owned(), result_bytes: result.len(), result: shown }
    }
}

/// Inserts bytes as text, or in base64 under another name if they are not text.
pub(super) fn insert_bytes(members: &mut Map<String, Value>, name: &str, bytes: &[u8]) {
    let (name, text) = match std::str::from_utf8(bytes) {
        Ok(text) => (name.to_owned(), text.to_owned()),
        Err(_) => (format!("{name}_base64"), STANDARD.encode(bytes)),
    };
    members.insert(name, text.into());
}

impl ResponseView {
    pub(super) fn new(stored: &StoredResponse, detail: Detail) -> Self {
        let body = stored.body();
        let is_whole = detail >= Detail::Whole;
        let has_trailers = stored.trailers().next().is_some();
        Self {
            status: stored.status(),
            body_bytes: body.len(),
            headers: is_whole.then(|| fields(stored.headers())),
            trailers: (is_whole && has_trailers).then(|| fields(stored.trailers())),
            body: (detail >= Detail::Body).then(|| match std::str::from_utf8(&body) {
                Ok(text) => BodyView::Text(text.to_owned()),
                Err(_) => BodyView::Base64(STANDARD.encode(&body)),
            }),
        }
    }
}

fn fields<'a>(fields: impl Iterator<Item = (&'a str, &'a [u8])>) -> Vec<FieldView> {
    fields.map(|(name, value)| (name.to_owned(), String::from_utf8_lossy(value).into_owned())).collect()
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
    at.to_rfc3339()
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
