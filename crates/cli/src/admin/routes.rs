//! Metrics by route. Their labels have bounded values: the configured routes, the known methods, the outcomes. Nothing that a
//! client sends becomes a label.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use http::Method;
use oncegate_http::{RedactionCounts, RedactionOutcome, RequestEvent};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;

use super::durations::{Durations, FamilyWriter, REQUEST_BOUNDS, label};
use super::metrics::{OUTCOMES, outcome_name, outcome_place};
use crate::activity::{OUTCOME_GROUPS, OutcomeGroup};

/// The most routes with series of their own. All further ones share one, so that a file with many routes does not make a
/// page that Prometheus cannot take.
pub(crate) const MAX_ROUTES: usize = 100;

/// The name of the requests that match no route.
pub(crate) const DEFAULT_ROUTE: &str = "default";

/// The name of all routes beyond [`MAX_ROUTES`].
const OTHER_ROUTES: &str = "other";

/// The tag of the route [`OTHER_ROUTES`]. The tag 0 is [`DEFAULT_ROUTE`].
const OTHER_TAG: u32 = MAX_ROUTES as u32 + 1;

/// The methods with a value of their own: those of RFC 9110, and PATCH (RFC 5789).
const METHODS: [Method; 9] = [
    Method::GET,
    Method::HEAD,
    Method::POST,
    Method::PUT,
    Method::DELETE,
    Method::CONNECT,
    Method::OPTIONS,
    Method::TRACE,
    Method::PATCH,
];

/// The name of all other methods, which clients may make up. OpenTelemetry uses the same.
const OTHER_METHODS: &str = "_OTHER";

/// The method as a label or an attribute: one of a few values.
pub(crate) fn method_name(method: &Method) -> &'static str {
    METHODS.get(method_place(method)).map_or(OTHER_METHODS, name_of)
}

const fn name_of(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::DELETE => "DELETE",
        Method::CONNECT => "CONNECT",
        Method::OPTIONS => "OPTIONS",
        Method::TRACE => "TRACE",
        Method::PATCH => "PATCH",
        _ => OTHER_METHODS,
    }
}

/// As the layer does, without regard to case.
fn method_place(method: &Method) -> usize {
    METHODS
        .iter()
        .position(|known| known.as_str().eq_ignore_ascii_case(method.as_str()))
        .unwrap_or(METHODS.len())
}

/// The counts of all routes. A reload adds routes, and removes none: their counts go on if they come back.
#[derive(Clone, Debug)]
pub(super) struct RouteMetrics(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// The names of the tags from 1 on.
    names: RwLock<Vec<Arc<str>>>,
    /// By tag. A route that had no request needs no memory.
    counts: Box<[OnceLock<Box<RouteCounts>>]>,
}

#[derive(Debug)]
struct RouteCounts {
    /// By method and outcome.
    requests: [[AtomicU64; OUTCOMES]; METHODS.len() + 1],
    /// The durations of requests with a key, by [`OutcomeGroup`].
    durations: [Durations; OUTCOME_GROUPS.len()],
    /// Set by a route that redacts responses.
    redactions: OnceLock<Arc<RedactionCounts>>,
}

impl Default for RouteMetrics {
    fn default() -> Self {
        let counts = (0..=OTHER_TAG).map(|_| OnceLock::new()).collect();
        Self(Arc::new(Inner { names: RwLock::default(), counts }))
    }
}

impl RouteMetrics {
    /// The tag of the route with this name. The same name always gets the same tag.
    pub(super) fn tag(&self, name: &str) -> u32 {
        if name == DEFAULT_ROUTE {
            return 0;
        }
        let mut names = self.0.names.write().unwrap_or_else(PoisonError::into_inner);
        let place = names.iter().position(|known| **known == *name).unwrap_or_else(|| {
            if names.len() < MAX_ROUTES {
                names.push(name.into());
                names.len() - 1
            } else {
                MAX_ROUTES
            }
        });
        u32::try_from(place + 1).unwrap_or(OTHER_TAG)
    }

    fn name(&self, tag: usize) -> Arc<str> {
        let names = self.0.names.read().unwrap_or_else(PoisonError::into_inner);
        match tag.checked_sub(1) {
            None => DEFAULT_ROUTE.into(),
            Some(place) => names.get(place).cloned().unwrap_or_else(|| OTHER_ROUTES.into()),
        }
    }

    /// Counts the outcome of a request.
    pub(super) fn observe(&self, event: &RequestEvent<'_>) {
        let Some(outcome) = outcome_place(event.disposition) else { return };
        let tag = usize::try_from(event.tag.min(OTHER_TAG)).unwrap_or_default();
        let Some(counts) = self.0.counts.get(tag) else { return };
        let counts = counts.get_or_init(Box::default);
        let cell = counts.requests.get(method_place(event.method)).and_then(|outcomes| outcomes.get(outcome));
        if let Some(cell) = cell {
            cell.fetch_add(1, Ordering::Relaxed);
        }
        let group = OutcomeGroup::of(event.disposition) as usize;
        if let (Some(keyed), Some(durations)) = (&event.keyed, counts.durations.get(group)) {
            durations.observe(keyed.duration, event.trace);
        }
    }

    /// The counts of redacted responses of the route with this tag.
    pub(super) fn redactions(&self, tag: u32) -> Option<Arc<RedactionCounts>> {
        let tag = usize::try_from(tag.min(OTHER_TAG)).ok()?;
        let counts = self.0.counts.get(tag)?.get_or_init(Box::default);
        Some(counts.redactions.get_or_init(Arc::default).clone())
    }

    fn each(&self) -> impl Iterator<Item = (Arc<str>, &RouteCounts)> {
        let counts = self.0.counts.iter().enumerate();
        counts.filter_map(|(tag, counts)| Some((self.name(tag), &**counts.get()?)))
    }

    /// Writes the durations.
    pub(super) fn write(&self, writer: &mut FamilyWriter<'_>) -> fmt::Result {
        let help =
            "Duration of requests with a key by route, from the head of the request to that of its response";
        let series = self.each().flat_map(|(route, counts)| {
            OUTCOME_GROUPS.iter().zip(&counts.durations).map(move |(group, durations)| {
                (format!("{},{}", label("route", &route), label("group", group.as_str())), durations)
            })
        });
        writer.write(("request_duration", help), true, series)
    }
}

impl Default for RouteCounts {
    fn default() -> Self {
        Self {
            requests: std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0))),
            durations: std::array::from_fn(|_| Durations::new(REQUEST_BOUNDS)),
            redactions: OnceLock::new(),
        }
    }
}

impl Collector for RouteMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help = "Requests by route, method and outcome.";
        let mut family = encoder.encode_descriptor("route_requests", help, None, MetricType::Counter)?;
        for (route, counts) in self.each() {
            for (place, outcomes) in counts.requests.iter().enumerate() {
                let method = METHODS.get(place).map_or(OTHER_METHODS, name_of);
                for (outcome, cell) in outcomes.iter().enumerate() {
                    let count = cell.load(Ordering::Relaxed);
                    if count > 0 {
                        let labels =
                            [("route", &*route), ("method", method), ("outcome", outcome_name(outcome))];
                        ConstCounter::new(count).encode(family.encode_family(&labels)?)?;
                    }
                }
            }
        }
        let help = "Responses of routes that redact, by route and result.";
        let mut family = encoder.encode_descriptor("redactions", help, None, MetricType::Counter)?;
        for (route, counts) in self.each() {
            let Some(redactions) = counts.redactions.get() else { continue };
            for outcome in RedactionOutcome::ALL {
                let labels = [("route", &*route), ("result", outcome.as_str())];
                ConstCounter::new(redactions.get(outcome)).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_route_keeps_its_tag_and_routes_beyond_the_limit_share_one() {
        let routes = RouteMetrics::default();
        assert_eq!(
            (routes.tag(DEFAULT_ROUTE), routes.tag("/a"), routes.tag("/b"), routes.tag("/a")),
            (0, 1, 2, 1)
        );
        let tags: Vec<_> = (2..MAX_ROUTES + 5).map(|n| routes.tag(&format!("/{n}"))).collect();
        assert_eq!(tags.last(), Some(&OTHER_TAG));
        assert_eq!(tags.iter().filter(|tag| **tag == OTHER_TAG).count(), 5);
        assert_eq!(&*routes.name(OTHER_TAG as usize), OTHER_ROUTES);
        assert_eq!((&*routes.name(0), &*routes.name(2)), (DEFAULT_ROUTE, "/b"));
    }

    #[test]
    fn a_method_that_a_client_made_up_has_no_label_of_its_own() {
        for (method, name) in [("GET", "GET"), ("post", "POST"), ("PATCH", "PATCH"), ("PURGE", "_OTHER")] {
            assert_eq!(method_name(&method.parse().unwrap()), name);
        }
    }

    /// The time that a request pays. It is printed, and checked only against a mistake of a power of ten.
    #[test]
    fn counting_a_request_costs_little() {
        let routes = RouteMetrics::default();
        let durations = Durations::new(REQUEST_BOUNDS);
        let begun = std::time::Instant::now();
        for n in 0..100_000_u32 {
            durations.observe(Duration::from_micros(u64::from(n)), None);
        }
        let each = begun.elapsed() / 100_000;
        println!("a duration: {each:?}, a route: {}", routes.each().count());
        assert!(each < Duration::from_micros(20), "{each:?}");
    }
}
