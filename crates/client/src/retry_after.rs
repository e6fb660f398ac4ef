//! The header `Retry-After`.

use std::time::{Duration, SystemTime};

use http::HeaderMap;
use http::header::{DATE, HeaderValue, RETRY_AFTER};

/// The pause in the header `Retry-After` (RFC 9110, 10.2.3): seconds, or a date.
///
/// A date counts from the response's own `Date`, because the clocks of service and client may differ, or from `now` without
/// one. `None` if there is no readable header. Of several, the longest counts. A date in the past is zero.
pub(crate) fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let fields = headers.get_all(RETRY_AFTER).iter();
    fields.filter_map(|field| read(field, headers, now)).max()
}

fn read(field: &HeaderValue, headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = field.to_str().ok()?.trim();
    if !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit()) {
        // More digits than a number holds are a long time.
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let date = |text: &str| httpdate::parse_http_date(text).ok();
    let then = date(text)?;
    let theirs = headers.get(DATE).and_then(|field| date(field.to_str().ok()?));
    Some(then.duration_since(theirs.unwrap_or(now)).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_and_dates_are_read_and_nothing_else() {
        let now = httpdate::parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT").unwrap();
        let seconds = |n| Some(Duration::from_secs(n));
        let table: &[(&[&str], Option<&str>, Option<Duration>)] = &[
            (&["0"], None, seconds(0)),
            (&["120"], None, seconds(120)),
            (&[" 7 "], None, seconds(7)),
            (&["99999999999999999999999999"], None, seconds(u64::MAX)),
            (&["Sun, 06 Nov 1994 08:50:07 GMT"], None, seconds(30)),
            (&["Sunday, 06-Nov-94 08:50:07 GMT"], None, seconds(30)),
            (&["Sun Nov  6 08:50:07 1994"], None, seconds(30)),
            // The service's clock is an hour ahead of ours.
            (&["Sun, 06 Nov 1994 09:50:07 GMT"], Some("Sun, 06 Nov 1994 09:49:37 GMT"), seconds(30)),
            (&["Sun, 06 Nov 1994 08:50:07 GMT"], Some("nonsense"), seconds(30)),
            (&["Sun, 06 Nov 1994 08:49:07 GMT"], None, seconds(0)),
            (&["5", "90", "rubbish"], None, seconds(90)),
            (&[], None, None),
            (&[""], None, None),
            (&["-5"], None, None),
            (&["+5"], None, None),
            (&["1.5"], None, None),
            (&["1, 2"], None, None),
            (&["soon"], None, None),
            (&["Sun, 99 Nov 1994 08:49:37 GMT"], None, None),
        ];
        for (fields, date, expected) in table {
            let mut headers = HeaderMap::new();
            for field in *fields {
                headers.append(RETRY_AFTER, HeaderValue::from_str(field).unwrap());
            }
            if let Some(date) = date {
                headers.insert(DATE, HeaderValue::from_str(date).unwrap());
            }
            assert_eq!(retry_after(&headers, now), *expected, "{fields:?}");
        }
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, HeaderValue::from_bytes(b"\xff").unwrap());
        assert_eq!(retry_after(&headers, now), None);
    }
}
