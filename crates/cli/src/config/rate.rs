//! The settings of rate limits.

use std::time::Duration;

use oncegate_http::{RateLimits, RateQuota};

use super::settings::Values;

/// Reads a rate such as `10/s` or `600/m burst 50`, or `none`.
pub(crate) fn rate(text: &str) -> Result<Option<RateQuota>, String> {
    const ALLOWED: &str = "write a number of requests and a period (s, m, h or d), such as \"10/s\", \"600/m\" or \"10/s burst 50\", or \"none\"";
    let wrong = || format!("{text:?} is not a rate; {ALLOWED}");
    if text == "none" {
        return Ok(None);
    }
    let mut words = text.split_ascii_whitespace();
    let (count, period) = words.next().and_then(|rate| rate.split_once('/')).ok_or_else(wrong)?;
    let seconds = match period {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 24 * 3600,
        _ => return Err(wrong()),
    };
    let burst = match (words.next(), words.next(), words.next()) {
        (None, ..) => None,
        (Some("burst"), Some(burst), None) => Some(burst.parse::<u32>().map_err(|_| wrong())?),
        _ => return Err(wrong()),
    };
    let count = count.parse::<u32>().map_err(|_| wrong())?;
    let quota = RateQuota::new(count, Duration::from_secs(seconds));
    let quota = quota.and_then(|quota| burst.map_or(Ok(quota), |burst| quota.with_burst(burst)));
    quota.map(Some).map_err(|error| format!("{text:?}: {error}"))
}

/// The limits of a route. `inherited` are those of the sidecar: a limit that the route inherits shares its counts, except that
/// each route counts by itself for `rate-limit.route`. `has` tells if the route has a setting of its own.
pub(super) fn limits(values: &Values, inherited: &RateLimits, has: impl Fn(&str) -> bool) -> RateLimits {
    let mut limits = inherited.clone();
    if has("rate-limit.caller") {
        limits = limits.with_caller(values.rate_limit_caller.as_ref().and_then(|given| given.value));
    }
    if has("rate-limit.key") {
        limits = limits.with_key(values.rate_limit_key.as_ref().and_then(|given| given.value));
    }
    limits.with_route(values.rate_limit_route.as_ref().and_then(|given| given.value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_has_a_number_a_period_and_perhaps_a_burst() {
        let quota = |count, seconds| RateQuota::new(count, Duration::from_secs(seconds)).unwrap();
        assert_eq!(rate("10/s"), Ok(Some(quota(10, 1))));
        assert_eq!(rate("600/m burst 50"), Ok(Some(quota(600, 60).with_burst(50).unwrap())));
        assert_eq!(rate("1/d"), Ok(Some(quota(1, 24 * 3600))));
        assert_eq!(rate("none"), Ok(None));
        for wrong in [
            "", "10", "10/", "/s", "10/w", "-1/s", "1.5/s", "10/s burst", "10/s 50", "10/s burst 5 6",
            "10 / s",
        ] {
            assert!(rate(wrong).unwrap_err().contains("is not a rate; write a number"), "{wrong}");
        }
        for beyond in ["0/s", "1000001/s", "10/s burst 0", "10/s burst 1000001"] {
            assert!(rate(beyond).unwrap_err().contains("must be from 1 to 1000000"), "{beyond}");
        }
    }
}
