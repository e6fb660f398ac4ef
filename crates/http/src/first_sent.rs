//! The time at which a client sent a request first (OASIS Repeatable Requests 1.0, 3.3).
//!
//! A request that is older than the retention may have been executed under a key that has been forgotten, so it is refused.
//! Records are forgotten by the store's clock. So the date is compared with the same clock, twice: with its time as it was last
//! seen, before anything is claimed, and with the time of the claim.
//!
//! ```text
//! the record of the first execution:  claimed_at ────────────── retention ──────────────▶ forgotten
//! the date in the request:        first_sent ≤ claimed_at + max_ahead
//! a request is executed only if:  first_sent + retention − max_ahead > claimed_at of its own claim
//! ```
//! From the first two lines, a request whose record is forgotten has `first_sent + retention − max_ahead ≤` the present time.

use std::sync::LazyLock;
use std::time::{Duration, UNIX_EPOCH};

use http::header::{HeaderMap, HeaderName};
use oncegate_core::Timestamp;
use oncegate_engine::LogThrottle;

use crate::refusal::{Condition, Refusal};

/// The most that the clock of a client may be ahead of the store's.
const MAX_AHEAD: Duration = Duration::from_secs(5 * 60);

/// The most that the clock of a client may be ahead, for records that are kept for this long.
pub(crate) fn max_ahead(retention: Duration) -> Duration {
    MAX_AHEAD.min(retention / 10)
}

static WARNINGS: LazyLock<LogThrottle> = LazyLock::new(|| LogThrottle::new(Duration::from_secs(60)));

/// The time at which a request was sent first.
pub(crate) struct FirstSent {
    header: HeaderName,
    time: Timestamp,
}

impl FirstSent {
    /// Reads the date in this header field.
    pub(crate) fn read(header: &HeaderName, headers: &HeaderMap) -> Result<Self, Refusal> {
        let mut values = headers.get_all(header).iter();
        let (Some(value), None) = (values.next(), values.next()) else {
            return Err(invalid(
                header,
                "must be sent once, with the time at which the request was sent first",
            ));
        };
        // The preferred format only (RFC 9110, 5.6.7).
        let time = value.to_str().ok().and_then(|text| {
            httpdate::parse_http_date(text).ok().filter(|time| httpdate::fmt_http_date(*time) == text)
        });
        let millis =
            time.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map(|since| since.as_millis());
        let Some(millis) = millis.and_then(|millis| u64::try_from(millis).ok()) else {
            return Err(invalid(header, "is not a date such as Sun, 06 Nov 1994 08:49:37 GMT"));
        };
        Ok(Self { header: header.clone(), time: Timestamp::from_millis(millis) })
    }

    /// Refuses a time that is in the future, or so long ago that the key may have been forgotten. `now` is the store's time.
    pub(crate) fn check(&self, now: Timestamp, retention: Duration) -> Result<(), Refusal> {
        // A date that is ahead looks younger than the record is, so the record must last for as much longer than the date
        // is accepted.
        let max_ahead = max_ahead(retention);
        let refusal = if self.time > now.after(max_ahead) {
            invalid(&self.header, &format!("is in the future: the time of the service is {}", date(now)))
        } else if now.since(self.time) + max_ahead >= retention {
            Refusal::new(Condition::KeyExpired)
        } else {
            return Ok(());
        };
        if let Some(suppressed) = WARNINGS.pass() {
            tracing::warn!(
                suppressed, header = %self.header, first_sent = %date(self.time), store_time = %date(now),
                "a request was refused because of the date of its first sending; if it was right, the clock of the store is not"
            );
        }
        Err(refusal)
    }
}

fn invalid(header: &HeaderName, why: &str) -> Refusal {
    Refusal::new(Condition::KeyInvalid).with_detail(why).about(header.clone())
}

/// The time as an HTTP date. The library panics beyond the year 9999.
fn date(time: Timestamp) -> String {
    const YEAR_9999: u64 = 253_402_300_799;
    let seconds = (time.as_millis() / 1000).min(YEAR_9999);
    httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(seconds))
}
