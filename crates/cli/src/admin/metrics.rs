//! The metrics of the sidecar, for Prometheus.
//!
//! Every outcome has a counter from the start, so that the rate of an event that never happened is zero and not absent. No
//! label ever contains a key, a path or a caller. Metrics by route are in `routes`, durations in `durations`.

use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use http::StatusCode;
use oncegate_core::{
    Capabilities, Command, FencingToken, Outcome, RecordId, RecordMap, Sharded, StateName, Store, StoreError,
    StoreErrorKind, StoreFuture, StoreUsage, Timestamp, delegate_store,
};
use oncegate_engine::{BreakerState, Event, EventKind, Observer};
use oncegate_http::{
    Authorization, Condition, Disposition, JwksFetch, JwtVerifier, LimitUsage, RateLimitKind, RateLimits,
    Reconciled, RedactionCounts, RequestEvent, RequestObserver, ShadowVerdict, TraceRef,
};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry, Unit};

use super::cache::CacheCollector;
use super::census::Counts;
use super::durations::{Durations, FamilyWriter, REQUEST_BOUNDS, STORE_BOUNDS, label};
use super::message_counts::MessageCounts;
use super::routes::RouteMetrics;
use super::{AdminState, process};
use crate::activity::{OutcomeCounts, OutcomeGroup};
use crate::otlp::Signal;
use crate::proxy::{ConnectionLimit, RequestLimit};

/// The current guarantees of the store that decides. They change with the configuration of its server.
struct StorePromises {
    store: Box<dyn Fn() -> Capabilities + Send + Sync>,
    has_cache: bool,
}

impl fmt::Debug for StorePromises {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StorePromises").field("store", &(self.store)()).finish_non_exhaustive()
    }
}

/// The stores that belong to one process. Sidecars share all others.
const STORES_OF_ONE_PROCESS: [&str; 2] = ["embedded", "memory"];

impl Collector for StorePromises {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let store = (self.store)();
        let is_own = STORES_OF_ONE_PROCESS.contains(&store.name);
        let promises = [
            ("store", if self.has_cache { "cached" } else { store.name }.to_owned()),
            ("place", if is_own { "process" } else { "server" }.to_owned()),
            ("durability", format!("{:?}", store.durability).to_ascii_lowercase()),
            ("fencing", format!("{:?}", store.fencing).to_ascii_lowercase()),
        ];
        let help = "The store and its guarantees";
        let encoder = encoder.encode_descriptor("store", help, None, MetricType::Info)?;
        Info::new(promises.to_vec()).encode(encoder)
    }
}

/// The metrics. Cheap to clone; all clones share the counts.
#[derive(Clone)]
pub(crate) struct Metrics(Arc<Inner>);

struct Inner {
    registry: Registry,
    /// The metrics of the process, which have no prefix.
    process: Registry,
    requests: RequestCounters,
    routes: RouteMetrics,
    events: [Counter; EVENTS.len()],
    takeovers: Counter,
    replays_after_wait: Counter,
    store_errors: Family<[Label; 2], Counter>,
    store_durations: [Durations; COMMANDS.len()],
    upstream_durations: [Durations; UpstreamResult::ALL.len()],
    reconciled: [Counter; ReconcileResult::ALL.len()],
    shadow: [Counter; SHADOW_VERDICTS],
    rate_limited: [Counter; RateLimitKind::ALL.len()],
    rate_limit_evictions: [Counter; 3],
    published_rules: Counter,
    handshakes_refused: [Counter; RefusedHandshake::ALL.len()],
    key_set_fetches: [Counter; JwksFetch::ALL.len()],
    key_set_age: OptionalGauge,
    key_set_usable: OptionalGauge,
    authorizations: [Counter; AUTHORIZATIONS.len()],
    /// The attempts that execute, with their start.
    running: Sharded<RecordMap<(RecordId, FencingToken), Instant>>,
    attempt_durations: Durations,
    executing: Gauge,
    records_in_flight: Gauge,
    settlements_pending: Gauge,
    store_usage: StoreUsageGauges,
    limits: LimitGauges,
    degraded: Gauge,
    breaker: [Gauge; BreakerState::ALL.len()],
    breaker_openings: Counter,
    draining: Gauge,
    access_lines_dropped: Counter,
    certificate_end: OptionalGauge,
    revocations_end: OptionalGauge,
    reloads: [ReloadMetrics; ReloadSubject::ALL.len()],
    unsettled: UnsettledMetrics,
    messages: MessageGauges,
    spans: [Counter; SpanFate::ALL.len()],
    exports: [[Counter; 2]; Signal::ALL.len()],
    advisories: Family<[Label; 1], Gauge>,
    /// The keys that encrypt stored responses, by id and use.
    seal_keys: Family<[(&'static str, String); 2], Gauge>,
    seal_refused: [Counter; SEAL_REFUSALS.len()],
}

/// The reasons why a sealed part is not opened.
const SEAL_REFUSALS: [&str; 3] = ["key-missing", "not-sealed", "broken"];

type Label = (&'static str, &'static str);

/// The decisions of the service about replays.
const AUTHORIZATIONS: [&str; 3] = ["allowed", "denied", "unavailable"];

/// The reason why the sidecar ended a TLS handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RefusedHandshake {
    /// The client showed no certificate, and the listener asks for one.
    NoCertificate,
    /// The certificate of the client is not accepted.
    Certificate,
    /// Anything else: the client does not trust the sidecar's certificate, does not speak TLS, or has left.
    Other,
}

impl RefusedHandshake {
    const ALL: [Self; 3] = [Self::NoCertificate, Self::Certificate, Self::Other];

    const fn as_str(self) -> &'static str {
        match self {
            Self::NoCertificate => "no-certificate",
            Self::Certificate => "certificate",
            Self::Other => "other",
        }
    }
}

/// The end of a recorded span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpanFate {
    /// The collector took it.
    Exported,
    /// The collector took the message and rejected the span.
    Rejected,
    /// The message was given up: the collector was away for too long, or refused it.
    Failed,
    /// The queue to the collector was full.
    Dropped,
}

impl SpanFate {
    const ALL: [Self; 4] = [Self::Exported, Self::Rejected, Self::Failed, Self::Dropped];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Exported => "exported",
            Self::Rejected => "rejected",
            Self::Failed => "failed",
            Self::Dropped => "dropped",
        }
    }
}

/// The result of a call to the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UpstreamResult {
    /// Its response began.
    Answered,
    /// It was never reached: nothing was sent.
    Unreached,
    /// It did not answer in time.
    TimedOut,
    /// The connection broke after something was sent.
    Broken,
}

impl UpstreamResult {
    const ALL: [Self; 4] = [Self::Answered, Self::Unreached, Self::TimedOut, Self::Broken];

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Answered => "answered",
            Self::Unreached => "unreached",
            Self::TimedOut => "timed-out",
            Self::Broken => "broken",
        }
    }
}

/// The service's report about an abandoned attempt, or about a response that is missing in its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReconcileResult {
    /// It took place, and its response is replayed.
    Happened,
    /// It took place, and its response cannot be replayed.
    Unreplayable,
    /// It did not take place, and is executed, unless the record is completed.
    DidNotHappen,
    /// No reliable report.
    CannotTell,
}

impl ReconcileResult {
    const ALL: [Self; 4] = [Self::Happened, Self::Unreplayable, Self::DidNotHappen, Self::CannotTell];

    pub(crate) const fn of(found: &Reconciled) -> Self {
        match found {
            Reconciled::Happened(_) => Self::Happened,
            Reconciled::Unreplayable => Self::Unreplayable,
            Reconciled::DidNotHappen => Self::DidNotHappen,
            _ => Self::CannotTell,
        }
    }

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Happened => "happened",
            Self::Unreplayable => "unreplayable",
            Self::DidNotHappen => "did-not-happen",
            Self::CannotTell => "cannot-tell",
        }
    }
}

impl Metrics {
    /// Metrics for a store with these guarantees, and for the cache in front of it, if there is one.
    pub(crate) fn new(
        store: impl Fn() -> Capabilities + Send + Sync + 'static,
        cache: Option<CacheCollector>,
    ) -> Self {
        let mut registry = Registry::with_prefix("oncegate");
        let has_cache = cache.is_some();
        if let Some(cache) = cache {
            registry.register_collector(Box::new(cache));
        }
        let r = &mut registry;
        r.register("build", "The program", Info::new([("version", env!("CARGO_PKG_VERSION"))]));
        r.register_collector(Box::new(StorePromises { store: Box::new(store), has_cache }));
        let requests = add(r, "requests", "Requests by outcome and class of status", Family::default());
        let events: Family<[Label; 1], Counter> =
            add(r, "events", "Events of records, by event", Family::default());
        let help = "Claims that took over the record of an abandoned attempt";
        let takeovers = add(r, "takeovers", help, Counter::default());
        let help = "Responses of the service to questions about the outcome of requests, by result";
        let authorized = "Decisions of the service about replays, by result";
        let authorizations: Family<[Label; 1], Counter> =
            add(r, "authorizations", authorized, Family::default());
        let help_shadow = "Requests on routes that only observe, by the outcome that they would have had";
        let shadow: Family<[Label; 1], Counter> = add(r, "shadow_requests", help_shadow, Family::default());
        let rate_limits = "Requests that were refused because they exceeded this rate limit";
        let rate_limited: Family<[Label; 1], Counter> =
            add(r, "rate_limited", rate_limits, Family::default());
        let help_evictions = "States of rate limits that were forgotten before their time, by table";
        let evictions: Family<[Label; 1], Counter> =
            add(r, "rate_limit_evictions", help_evictions, Family::default());
        let help_rules = "Requests for the published rules, which the sidecar answers";
        let published_rules = add(r, "published_rules_requests", help_rules, Counter::default());
        let help_handshakes = "TLS handshakes of clients that the sidecar ended, by reason";
        let handshakes: Family<[Label; 1], Counter> =
            add(r, "tls_handshakes_refused", help_handshakes, Family::default());
        let fetches = "Fetches of the key set that verifies tokens, by result";
        let key_set_fetches: Family<[Label; 1], Counter> =
            add(r, "key_set_fetches", fetches, Family::default());
        let age = "Time since the key set that verifies tokens was fetched";
        let key_set_age = OptionalGauge::register(r, "key_set_age", age, Some(Unit::Seconds));
        let usable = "1 while there is a key that can verify tokens, 0 while all tokens are refused";
        let key_set_usable = OptionalGauge::register(r, "key_set_usable", usable, None);
        let reconciled: Family<[Label; 1], Counter> = add(r, "reconciled", help, Family::default());
        let help = "Replays that waited for the response of the request in flight";
        let replays_after_wait = add(r, "replays_after_wait", help, Counter::default());
        let help = "Errors of the store, by command and kind";
        let store_errors: Family<[Label; 2], Counter> = add(r, "store_errors", help, Family::default());
        for during in ["claim", "renewal", "settlement"] {
            for kind in ERRORS {
                drop(store_errors.get_or_create(&[("during", during), ("kind", kind)]));
            }
        }
        let routes = RouteMetrics::default();
        r.register_collector(Box::new(routes.clone()));
        let executing = add(r, "executing", "Attempts that are executing", Gauge::default());
        let help = "Records that a request is claiming or executing";
        let records_in_flight = add(r, "records_in_flight", help, Gauge::default());
        let help = "Results that the store has not accepted yet: only this process has them";
        let settlements_pending = add(r, "settlements_pending", help, Gauge::default());
        let store_usage = StoreUsageGauges::register(r);
        let limits = LimitGauges::register(r);
        let help = "1 while the store is out of reach, accepts no writes or no new keys, or belongs to another id secret";
        let degraded = add(r, "degraded", help, Gauge::default());
        let help = "1 for the current state of the circuit breaker of the store";
        let breakers: Family<[Label; 1], Gauge> = add(r, "breaker", help, Family::default());
        let help = "Times that the store went out of reach";
        let breaker_openings = add(r, "breaker_openings", help, Counter::default());
        let draining = add(r, "draining", "1 while the sidecar stops", Gauge::default());
        let help = "Lines of the access log that were dropped because the standard output was not read";
        let access_lines_dropped = add(r, "access_lines_dropped", help, Counter::default());
        let help = "Lines of the log that were dropped because the standard error was not read";
        r.register("log_lines_dropped", help, crate::log::dropped());
        let reloads = ReloadMetrics::register(r);
        let help = "End of the certificate that clients get, in seconds since 1970";
        let certificate_end =
            OptionalGauge::register(r, "tls_certificate_not_after", help, Some(Unit::Seconds));
        let help =
            "End of the list of revoked certificates of clients that ends first, in seconds since 1970";
        let revocations_end =
            OptionalGauge::register(r, "tls_client_crl_next_update", help, Some(Unit::Seconds));
        let unsettled = UnsettledMetrics::register(r);
        let messages = MessageGauges::register(r);
        let help = "Spans of traces, by result";
        let spans: Family<[Label; 1], Counter> = add(r, "trace_spans", help, Family::default());
        let help = "Messages to the collector (otlp-endpoint), by signal and result";
        let exports: Family<[Label; 2], Counter> = add(r, "otlp_exports", help, Family::default());
        let help = "1 while the store reports this condition to operators, by name";
        let advisories = add(r, "store_advisory", help, Family::default());
        let help = "1 for each key that encrypts stored responses: it seals and opens, or only opens";
        let seal_keys = add(r, "seal_key", help, Family::default());
        let help = "Stored responses and steps that were not opened, by reason";
        let seal_refused: Family<[Label; 1], Counter> = add(r, "seal_refused", help, Family::default());
        Self(Arc::new(Inner {
            requests: RequestCounters::new(requests),
            routes,
            events: EVENTS.map(|event| events.get_or_create_owned(&[("event", event)])),
            takeovers,
            replays_after_wait,
            store_errors,
            store_durations: COMMANDS.map(|_| Durations::new(STORE_BOUNDS)),
            upstream_durations: UpstreamResult::ALL.map(|_| Durations::new(REQUEST_BOUNDS)),
            authorizations: AUTHORIZATIONS
                .map(|result| authorizations.get_or_create_owned(&[("result", result)])),
            shadow: shadow_verdicts().map(|verdict| match verdict {
                // A verdict is found before the service responds.
                ShadowVerdict::Refused(condition) if NO_OUTCOMES.contains(&condition) => Counter::default(),
                verdict => shadow.get_or_create_owned(&[("would", verdict.as_str())]),
            }),
            rate_limited: RateLimitKind::ALL
                .map(|limit| rate_limited.get_or_create_owned(&[("limit", limit.as_str())])),
            rate_limit_evictions: RateLimits::evictions()
                .map(|(table, _)| evictions.get_or_create_owned(&[("table", table)])),
            published_rules,
            handshakes_refused: RefusedHandshake::ALL
                .map(|reason| handshakes.get_or_create_owned(&[("reason", reason.as_str())])),
            key_set_age,
            key_set_usable,
            key_set_fetches: JwksFetch::ALL
                .map(|result| key_set_fetches.get_or_create_owned(&[("result", result.as_str())])),
            reconciled: ReconcileResult::ALL
                .map(|result| reconciled.get_or_create_owned(&[("result", result.as_str())])),
            running: Sharded::default(),
            attempt_durations: Durations::new(REQUEST_BOUNDS),
            executing,
            records_in_flight,
            settlements_pending,
            store_usage,
            limits,
            degraded,
            breaker: BreakerState::ALL
                .map(|state| breakers.get_or_create_owned(&[("state", state.as_str())])),
            breaker_openings,
            draining,
            access_lines_dropped,
            certificate_end,
            revocations_end,
            reloads,
            unsettled,
            messages,
            spans: SpanFate::ALL.map(|fate| spans.get_or_create_owned(&[("result", fate.as_str())])),
            exports: Signal::ALL.map(|signal| {
                ["accepted", "failed"].map(|result| {
                    exports.get_or_create_owned(&[("signal", signal.as_str()), ("result", result)])
                })
            }),
            advisories,
            seal_keys,
            seal_refused: SEAL_REFUSALS.map(|reason| seal_refused.get_or_create_owned(&[("reason", reason)])),
            registry,
            process: process::registry(),
        }))
    }

    /// The same store, with metrics of its commands.
    pub(crate) fn measured(&self, store: Arc<dyn Store>) -> Arc<dyn Store> {
        Arc::new(MeasuredStore { store, metrics: self.clone() })
    }

    /// The tag of the requests of this route, by which their outcomes are counted.
    pub(crate) fn route_tag(&self, label: &str) -> u32 {
        self.0.routes.tag(label)
    }

    /// The counts of the redacted responses of the route with this tag.
    pub(crate) fn redactions(&self, tag: u32) -> Option<Arc<RedactionCounts>> {
        self.0.routes.redactions(tag)
    }

    /// Records a call to the service.
    pub(crate) fn observe_upstream(
        &self,
        result: UpstreamResult,
        took: Duration,
        trace: Option<TraceRef<'_>>,
    ) {
        if let Some(durations) = self.0.upstream_durations.get(result as usize) {
            durations.observe(took, trace);
        }
    }

    /// Counts spans that found the queue to the collector full.
    pub(crate) fn count_dropped_spans(&self, count: u64) {
        self.count_spans(SpanFate::Dropped, count);
    }

    /// Counts spans by what became of them.
    pub(crate) fn count_spans(&self, fate: SpanFate, count: u64) {
        if let Some(counter) = self.0.spans.get(fate as usize) {
            counter.inc_by(count);
        }
    }

    /// The spans that did not get to the collector, or that it rejected.
    pub(crate) fn lost_spans(&self) -> u64 {
        let lost = [SpanFate::Rejected, SpanFate::Failed, SpanFate::Dropped];
        lost.iter().filter_map(|fate| self.0.spans.get(*fate as usize)).map(Counter::get).sum()
    }

    /// Counts a message to the collector.
    pub(crate) fn count_export(&self, signal: Signal, is_accepted: bool) {
        if let Some([accepted, failed]) = self.0.exports.get(signal as usize) {
            let counter = if is_accepted { accepted } else { failed };
            counter.inc();
        }
    }

    /// Records a request for the published rules.
    pub(crate) fn observe_published_rules(&self) {
        self.0.published_rules.inc();
    }

    /// Records a TLS handshake that the sidecar ended.
    pub(crate) fn observe_refused_handshake(&self, reason: RefusedHandshake) {
        if let Some(counter) = self.0.handshakes_refused.get(reason as usize) {
            counter.inc();
        }
    }

    /// Records a decision of the service about a replay.
    pub(crate) fn observe_authorization(&self, decision: Authorization) {
        let [allowed, denied, unavailable] = &self.0.authorizations;
        match decision {
            Authorization::Allowed => allowed.inc(),
            Authorization::Denied(_) => denied.inc(),
            _ => unavailable.inc(),
        };
    }

    /// Counts the fetches of this verifier.
    pub(crate) fn watch(&self, verifier: &JwtVerifier) {
        let metrics = self.clone();
        verifier.observe_fetches(move |result| {
            let place = JwksFetch::ALL.iter().position(|known| *known == result);
            if let Some(counter) = place.and_then(|place| metrics.0.key_set_fetches.get(place)) {
                counter.inc();
            }
        });
    }

    /// Records a report of the service about a request.
    pub(crate) fn observe_reconciled(&self, result: ReconcileResult) {
        if let Some(counter) = self.0.reconciled.get(result as usize) {
            counter.inc();
        }
    }

    /// Records a request that was refused before the layer.
    pub(crate) fn observe_refused(&self, condition: Condition, status: StatusCode) {
        self.0.requests.with(Disposition::Refused(condition), Some(status), |counter| {
            counter.inc();
        });
    }

    /// Records a reload.
    pub(crate) fn observe_reload(&self, subject: ReloadSubject, is_applied: bool) {
        if let Some(metrics) = self.0.reloads.get(subject as usize) {
            let counter = if is_applied { &metrics.applied } else { &metrics.refused };
            counter.inc();
            metrics.last_refused.set((!is_applied).into());
        }
    }

    /// Sets the end of the certificate in use.
    pub(crate) fn set_certificate_end(&self, not_after: Option<i64>) {
        self.0.certificate_end.set(not_after);
    }

    /// Sets the end of the lists of revoked certificates in use.
    pub(crate) fn set_revocations_end(&self, next_update: Option<i64>) {
        self.0.revocations_end.set(next_update);
    }

    /// The counter of dropped lines of the access log.
    pub(crate) fn access_lines_dropped(&self) -> Counter {
        self.0.access_lines_dropped.clone()
    }

    /// Sets the numbers of unsettled records.
    pub(super) fn set_counts(&self, counts: Counts) {
        let states = [
            (StateName::InProgress, counts.in_progress),
            (StateName::Abandoned, counts.abandoned),
            (StateName::Unknown, counts.unknown),
        ];
        for (state, count) in states {
            let gauge = self.0.unsettled.records.get_or_create_owned(&[("state", state.as_str())]);
            gauge.set(gauged(count));
        }
        *self.0.unsettled.lock() = Some(counts);
    }

    /// Sets the last count of messages; without one there are no such series.
    pub(super) fn set_message_counts(&self, counts: Option<MessageCounts>) {
        self.0.messages.set(counts);
    }

    /// Counts a record that no operator settled before its retention ended.
    pub(super) fn count_expired_unsettled(&self) {
        self.0.unsettled.expired.inc();
    }

    /// All metrics, in the text format of OpenMetrics. Only that format has exemplars, so the text for another one has none.
    pub(crate) fn render(&self, state: &AdminState, has_exemplars: bool) -> Result<String, fmt::Error> {
        let AdminState { engine, breaker, .. } = state;
        self.0.degraded.set(state.is_degraded().into());
        let is = breaker.state();
        for (state, gauge) in BreakerState::ALL.into_iter().zip(&self.0.breaker) {
            gauge.set((state == is).into());
        }
        self.0.breaker_openings.inner().store(breaker.openings(), Ordering::Relaxed);
        for (counter, (_, count)) in self.0.rate_limit_evictions.iter().zip(RateLimits::evictions()) {
            counter.inner().store(count, Ordering::Relaxed);
        }
        self.0.records_in_flight.set(gauged(engine.in_flight()));
        self.0.settlements_pending.set(gauged(engine.pending_settlements()));
        self.0.store_usage.set(engine.store().usage());
        self.0.limits.set(&state.live.borrow().layer.limit_usage(), &state.connections, &state.without_key);
        self.0.draining.set(state.draining.is_set().into());
        let jwt = state.live.borrow().jwt.clone();
        let age = jwt.as_ref().and_then(JwtVerifier::key_set_age);
        self.0.key_set_usable.set(jwt.as_ref().map(|verifier| verifier.has_keys().into()));
        self.0.key_set_age.set(age.and_then(|age| i64::try_from(age.as_secs()).ok()));
        self.0.unsettled.set_times(engine.store().now());
        self.0.advisories.clear();
        for advisory in engine.store().advisories() {
            self.0.advisories.get_or_create(&[("name", advisory.name)]).set(1);
        }
        self.0.seal_keys.clear();
        if let Some(seal) = &state.seal {
            let keys = seal.keys().get();
            for (number, id) in keys.ids().enumerate() {
                let role = if number == 0 && !keys.opens_only() { "seals" } else { "opens" };
                self.0.seal_keys.get_or_create(&[("key", id.to_string()), ("use", role.to_owned())]).set(1);
            }
        }
        let refusals = &state.seal_refusals;
        let counts = [refusals.key_missing(), refusals.not_sealed(), refusals.broken()];
        for (counter, count) in self.0.seal_refused.iter().zip(counts) {
            counter.inner().store(count, Ordering::Relaxed);
        }
        self.0.executing.set(gauged(self.executing()));
        let mut text = String::new();
        encode_registry(&mut text, &self.0.registry)?;
        let mut writer = FamilyWriter { out: &mut text, has_exemplars };
        self.write_durations(&mut writer)?;
        state.surveys.write_durations(&mut writer)?;
        encode_registry(&mut text, &self.0.process)?;
        encode_eof(&mut text)?;
        Ok(text)
    }

    fn write_durations(&self, writer: &mut FamilyWriter<'_>) -> fmt::Result {
        let inner = &self.0;
        let series = COMMANDS.iter().map(|command| label("command", command)).zip(&inner.store_durations);
        writer.write(("store_duration", "Duration of commands to the store"), false, series)?;
        let help = "Duration of attempts, from their claim to the end of their handler";
        writer.write(("attempt_duration", help), false, [(String::new(), &inner.attempt_durations)])?;
        let help = "Time until the response of the service began, or until the sidecar gave the request up";
        let results = UpstreamResult::ALL.map(|result| label("result", result.as_str()));
        let series = results.into_iter().zip(&inner.upstream_durations);
        writer.write(("upstream_duration", help), false, series)?;
        inner.routes.write(writer)
    }

    /// The requests since the start by group of outcomes.
    pub(crate) fn outcome_counts(&self) -> OutcomeCounts {
        let mut counts = OutcomeCounts::default();
        self.0.requests.each(|disposition, count| {
            if let Some(sum) = counts.get_mut(OutcomeGroup::of(disposition) as usize) {
                *sum += count;
            }
        });
        counts
    }

    /// The requests since the start by outcome, without outcomes that never occurred.
    pub(super) fn outcomes(&self) -> Vec<(&'static str, u64)> {
        let mut outcomes: Vec<(&'static str, u64)> = Vec::new();
        self.0.requests.each(|disposition, count| match outcomes.last_mut() {
            _ if count == 0 => {}
            Some((last, sum)) if *last == disposition.as_str() => *sum += count,
            _ => outcomes.push((disposition.as_str(), count)),
        });
        outcomes
    }

    /// The attempts that are executing.
    pub(super) fn executing(&self) -> usize {
        self.0.running.each().map(|shard| shard.len()).sum()
    }

    /// The last count of unsettled records; `None` before the first walk through the store.
    pub(super) fn unsettled(&self) -> Option<Counts> {
        *self.0.unsettled.lock()
    }

    fn begun(&self, event: &Event) {
        if let Some(token) = event.token {
            self.0.running.of(&event.id).insert((event.id, token), Instant::now());
        }
    }

    /// Records the end of an attempt, also of one that never began because its caller was gone.
    fn ended(&self, event: &Event) {
        if let Some(token) = event.token {
            let begun = self.0.running.of(&event.id).remove(&(event.id, token));
            if let (Some(begun), EventKind::Executed) = (begun, event.kind) {
                self.0.attempt_durations.observe(begun.elapsed(), None);
            }
        }
    }
}

/// Registers a metric, and returns it.
fn add<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register(name, help, metric.clone());
    metric
}

/// Registers a metric in seconds, and returns it.
fn add_seconds<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register_with_unit(name, help, Unit::Seconds, metric.clone());
    metric
}

fn gauged(count: impl TryInto<i64>) -> i64 {
    count.try_into().unwrap_or(i64::MAX)
}

/// The use of each limit: the current value, and the limit as a gauge of its own.
struct LimitGauges([(Gauge, Gauge); 6]);

impl LimitGauges {
    fn register(registry: &mut Registry) -> Self {
        let mut count = |name, help| add(registry, name, help, Gauge::default());
        let requests = (
            count("requests_in_flight", "Requests with a key in flight"),
            count("requests_in_flight_limit", "Limit of requests with a key in flight (max-in-flight)"),
        );
        let help = "Limit of requests with a key of one caller in flight (max-in-flight-per-caller)";
        let caller = (
            count("caller_requests_in_flight", "Most requests with a key in flight of one caller"),
            count("caller_requests_in_flight_limit", help),
        );
        let connections = (
            count("connections_open", "Connections of clients that are open"),
            count("connections_limit", "Limit of connections of clients (max-connections)"),
        );
        let help = "Limit of requests without a key in flight (max-in-flight-without-key)";
        let without_key = (
            count("requests_without_key_in_flight", "Requests without a key in flight"),
            count("requests_without_key_in_flight_limit", help),
        );
        let mut bytes = |name, help| {
            let gauge = Gauge::default();
            registry.register_with_unit(name, help, Unit::Bytes, gauge.clone());
            gauge
        };
        let request_budget = (
            bytes("request_budget_used", "Memory that the bodies of requests with a key hold"),
            bytes(
                "request_budget_limit",
                "Limit of the memory for bodies of requests with a key (request-budget)",
            ),
        );
        let response_budget = (
            bytes("response_budget_used", "Memory that the bodies of responses to requests with a key hold"),
            bytes(
                "response_budget_limit",
                "Limit of the memory for bodies of responses (response-budget), which responses of operations that took place may exceed",
            ),
        );
        Self([requests, caller, connections, without_key, request_budget, response_budget])
    }

    fn set(&self, layer: &LimitUsage, connections: &ConnectionLimit, without_key: &RequestLimit) {
        let values = [
            (layer.in_flight, layer.max_in_flight),
            (layer.in_flight_of_a_caller, layer.max_in_flight_per_caller),
            (connections.used(), connections.max()),
            (without_key.used(), without_key.max()),
            (layer.request_bytes, layer.request_budget),
            (layer.response_bytes, layer.response_budget),
        ];
        for ((used, limit), (used_now, limit_now)) in self.0.iter().zip(values) {
            used.set(gauged(used_now));
            limit.set(gauged(limit_now));
        }
    }
}

/// The use of the limits of a store in this process. The server of another store has limits of its own, so there is no series.
struct StoreUsageGauges {
    records: OptionalGauge,
    max_records: OptionalGauge,
    bytes: OptionalGauge,
    max_bytes: OptionalGauge,
}

impl StoreUsageGauges {
    fn register(registry: &mut Registry) -> Self {
        let help =
            "Records of the store in this process, with those past their retention until they are removed";
        let records = OptionalGauge::register(registry, "store_records", help, None);
        let help =
            "Limit of the records of the store in this process (max-records, or the memory of store-memory)";
        let max_records = OptionalGauge::register(registry, "store_records_limit", help, None);
        let help = "Size of the records of the store in this process";
        let bytes = OptionalGauge::register(registry, "store_used", help, Some(Unit::Bytes));
        let help = "Limit of the size of the records of the store in this process (max-store-bytes)";
        let max_bytes = OptionalGauge::register(registry, "store_limit", help, Some(Unit::Bytes));
        Self { records, max_records, bytes, max_bytes }
    }

    fn set(&self, usage: Option<StoreUsage>) {
        self.records.set(usage.map(|usage| gauged(usage.records)));
        self.max_records.set(usage.and_then(|usage| usage.max_records).map(gauged));
        self.bytes.set(usage.map(|usage| gauged(usage.bytes)));
        self.max_bytes.set(usage.and_then(|usage| usage.max_bytes).map(gauged));
    }
}

/// The messages in the database of the store that wait for someone. Other stores have no such series.
struct MessageGauges {
    dead_letters: OptionalGauge,
    waiting: OptionalGauge,
    oldest: OptionalGauge,
    failing: OptionalGauge,
    refused: OptionalGauge,
}

impl MessageGauges {
    fn register(registry: &mut Registry) -> Self {
        let help =
            "Dead letters in the database of the store; counted in the background, in at most 100 groups";
        let dead_letters = OptionalGauge::register(registry, "dead_letters", help, None);
        let help = "Messages of the outbox that are not published yet";
        let waiting = OptionalGauge::register(registry, "outbox_waiting", help, None);
        let help = "Age of the oldest of them when they were counted; 0 if there is none";
        let oldest = OptionalGauge::register(registry, "outbox_oldest", help, Some(Unit::Seconds));
        let help = "Messages of the outbox with a failed attempt";
        let failing = OptionalGauge::register(registry, "outbox_failing", help, None);
        let help = "Messages of the outbox that the broker refused for good, and that wait for an operator";
        let refused = OptionalGauge::register(registry, "outbox_refused", help, None);
        Self { dead_letters, waiting, oldest, failing, refused }
    }

    fn set(&self, counts: Option<MessageCounts>) {
        let outbox = counts.map(|counts| counts.outbox);
        self.dead_letters.set(counts.map(|counts| gauged(counts.dead_letters)));
        self.waiting.set(outbox.map(|outbox| gauged(outbox.waiting)));
        self.oldest.set(outbox.map(|outbox| gauged(outbox.oldest.map_or(0, |oldest| oldest.as_secs()))));
        self.failing.set(outbox.map(|outbox| gauged(outbox.failing)));
        self.refused.set(outbox.map(|outbox| gauged(outbox.refused)));
    }
}

/// The parts of the configuration that can be reloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReloadSubject {
    Configuration,
    Certificate,
}

impl ReloadSubject {
    const ALL: [Self; 2] = [Self::Configuration, Self::Certificate];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Configuration => "configuration",
            Self::Certificate => "certificate",
        }
    }
}

/// The reloads of one subject.
struct ReloadMetrics {
    applied: Counter,
    refused: Counter,
    last_refused: Gauge,
}

impl ReloadMetrics {
    fn register(registry: &mut Registry) -> [Self; ReloadSubject::ALL.len()] {
        let help = "Reloads, by subject and result";
        let reloads: Family<[Label; 2], Counter> = add(registry, "reloads", help, Family::default());
        let help =
            "1 while the newest configuration or certificate is invalid and the previous one is in force";
        let refused: Family<[Label; 1], Gauge> = add(registry, "reload_refused", help, Family::default());
        ReloadSubject::ALL.map(|subject| {
            let subject = ("subject", subject.as_str());
            let counter = |result| reloads.get_or_create_owned(&[subject, ("result", result)]);
            Self {
                applied: counter("applied"),
                refused: counter("refused"),
                last_refused: refused.get_or_create_owned(&[subject]),
            }
        })
    }
}

/// The records that wait for an operator.
struct UnsettledMetrics {
    records: Family<[Label; 1], Gauge>,
    /// The last count.
    counts: Mutex<Option<Counts>>,
    oldest: Gauge<f64, AtomicU64>,
    retention_left: Gauge<f64, AtomicU64>,
    expired: Counter,
}

impl UnsettledMetrics {
    fn register(registry: &mut Registry) -> Self {
        let help = "Unsettled records, by state; counted in the background";
        let records = add(registry, "records", help, Family::default());
        let help =
            "Time that the oldest abandoned or unknown record has waited for an operator; 0 if there is none";
        let oldest = add_seconds(registry, "oldest_unsettled", help, Gauge::default());
        let help = "Time until the first abandoned or unknown record is removed at the end of its retention; infinite if there is none";
        let retention_left = add_seconds(registry, "unsettled_retention_left", help, Gauge::default());
        let help = "Abandoned and unknown records that were removed at the end of their retention";
        let expired = add(registry, "unsettled_expired", help, Counter::default());
        Self { records, counts: Mutex::default(), oldest, retention_left, expired }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Counts>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the times for this moment. Before the first count they are not numbers.
    fn set_times(&self, now: Timestamp) {
        let counts = *self.lock();
        let age = |oldest: Option<Timestamp>| oldest.map_or(0.0, |oldest| now.since(oldest).as_secs_f64());
        let left = |end: Option<Timestamp>| end.map_or(f64::INFINITY, |end| end.since(now).as_secs_f64());
        self.oldest.set(counts.map_or(f64::NAN, |counts| age(counts.oldest)));
        self.retention_left.set(counts.map_or(f64::NAN, |counts| left(counts.first_end)));
    }
}

/// A value that there may be none of, such as the end of a file's validity. Without it there is no such series.
#[derive(Clone, Debug)]
struct OptionalGauge {
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    value: Arc<AtomicI64>,
}

const NO_VALUE: i64 = i64::MIN;

impl OptionalGauge {
    fn register(registry: &mut Registry, name: &'static str, help: &'static str, unit: Option<Unit>) -> Self {
        let gauge = Self { name, help, unit, value: Arc::new(AtomicI64::new(NO_VALUE)) };
        registry.register_collector(Box::new(gauge.clone()));
        gauge
    }

    fn set(&self, value: Option<i64>) {
        self.value.store(value.unwrap_or(NO_VALUE), Ordering::Relaxed);
    }
}

impl Collector for OptionalGauge {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let value = self.value.load(Ordering::Relaxed);
        if value == NO_VALUE {
            return Ok(());
        }
        let gauge = encoder.encode_descriptor(self.name, self.help, self.unit.as_ref(), MetricType::Gauge)?;
        ConstGauge::new(value).encode(gauge)
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// A counter for each pair of outcome and class of status, found without a lock.
struct RequestCounters {
    family: Family<[Label; 2], Counter>,
    cells: [[OnceLock<Counter>; CLASSES.len()]; OUTCOMES],
}

const CLASSES: [&str; 6] = ["none", "1xx", "2xx", "3xx", "4xx", "5xx"];

/// The dispositions that are not refusals.
pub(crate) const PLAIN: [Disposition; 8] = [
    Disposition::NotCovered,
    Disposition::Unprotected,
    Disposition::Executed,
    Disposition::Fenced,
    Disposition::Replayed,
    Disposition::FailedOpen,
    Disposition::ClientLeft,
    // For all verdicts, which have a counter of their own.
    Disposition::Shadow(ShadowVerdict::NotObserved),
];

/// The verdicts on requests that are only observed, and their number.
const PLAIN_VERDICTS: [ShadowVerdict; 5] = [
    ShadowVerdict::Executed,
    ShadowVerdict::Replayed,
    ShadowVerdict::Unprotected,
    ShadowVerdict::FailedOpen,
    ShadowVerdict::NotObserved,
];
const SHADOW_VERDICTS: usize = PLAIN_VERDICTS.len() + Condition::ALL.len();

fn shadow_verdicts() -> [ShadowVerdict; SHADOW_VERDICTS] {
    std::array::from_fn(|at| match PLAIN_VERDICTS.get(at) {
        Some(verdict) => *verdict,
        None => ShadowVerdict::Refused(Condition::ALL[at - PLAIN_VERDICTS.len()]),
    })
}

/// Conditions that a client may receive but that no request counts as. With a key, these requests were executed or
/// their outcome is unknown; without one, they were passed on. A series that stays 0 would be an alert that never
/// fires.
const NO_OUTCOMES: [Condition; 3] =
    [Condition::UpstreamUnanswered, Condition::UpstreamHeadTooLarge, Condition::UpstreamUnsupported];
/// The number of outcomes.
pub(super) const OUTCOMES: usize = PLAIN.len() + Condition::ALL.len();

/// The place of an outcome in tables; `None` if it is newer than this program.
pub(super) fn outcome_place(disposition: Disposition) -> Option<usize> {
    match disposition {
        Disposition::Refused(condition) => {
            Condition::ALL.iter().position(|known| *known == condition).map(|place| place + PLAIN.len())
        }
        Disposition::Shadow(_) => PLAIN.iter().position(|known| matches!(known, Disposition::Shadow(_))),
        plain => PLAIN.iter().position(|known| *known == plain),
    }
}

/// The name of the outcome at this place.
pub(super) fn outcome_name(place: usize) -> &'static str {
    let refused = place.checked_sub(PLAIN.len()).and_then(|place| Condition::ALL.get(place));
    let plain = PLAIN.get(place).map(|plain| plain.as_str());
    plain.or(refused.map(|condition| condition.slug())).unwrap_or("other")
}

impl RequestCounters {
    fn new(family: Family<[Label; 2], Counter>) -> Self {
        let counters = Self { family, cells: std::array::from_fn(|_| Default::default()) };
        let refused = Condition::ALL.into_iter().filter(|condition| !NO_OUTCOMES.contains(condition));
        for disposition in PLAIN.into_iter().chain(refused.map(Disposition::Refused)) {
            counters.with(disposition, usual_status(disposition), |_| ());
        }
        // An alert has to see the first one, whatever the service responds.
        for disposition in [Disposition::FailedOpen, Disposition::Fenced] {
            for status in [StatusCode::BAD_REQUEST, StatusCode::INTERNAL_SERVER_ERROR] {
                counters.with(disposition, Some(status), |_| ());
            }
        }
        counters
    }

    fn with(&self, disposition: Disposition, status: Option<StatusCode>, count: impl FnOnce(&Counter)) {
        let class = status.map_or(0, |status| usize::from(status.as_u16() / 100)).min(CLASSES.len() - 1);
        let place = outcome_place(disposition);
        let labels = [("outcome", disposition.as_str()), ("status", CLASSES[class])];
        match place {
            Some(place) => {
                count(self.cells[place][class].get_or_init(|| self.family.get_or_create_owned(&labels)))
            }
            // An outcome that is newer than this table.
            None => count(&self.family.get_or_create(&labels)),
        }
    }
}

impl RequestCounters {
    /// Calls the closure with the count of each outcome and class of status, without those of outcomes that are newer than the
    /// table. The counts of an outcome follow each other.
    fn each(&self, mut see: impl FnMut(Disposition, u64)) {
        let outcomes = PLAIN.into_iter().chain(Condition::ALL.map(Disposition::Refused));
        for (disposition, classes) in outcomes.zip(&self.cells) {
            classes.iter().filter_map(OnceLock::get).for_each(|counter| see(disposition, counter.get()));
        }
    }
}

/// The usual status of an outcome, so that its counter exists before it is needed.
fn usual_status(disposition: Disposition) -> Option<StatusCode> {
    match disposition {
        Disposition::NotCovered | Disposition::Unprotected | Disposition::ClientLeft => None,
        Disposition::Shadow(_) => Some(StatusCode::OK),
        Disposition::Refused(condition) => Some(condition.status()),
        _ => Some(StatusCode::OK),
    }
}

impl RequestObserver for Metrics {
    fn observe(&self, event: &RequestEvent<'_>) {
        self.0.requests.with(event.disposition, event.status, |counter| {
            counter.inc();
        });
        if let Some(verdict) = event.disposition.shadow_verdict() {
            let place = match verdict {
                ShadowVerdict::Refused(condition) => Condition::ALL
                    .iter()
                    .position(|known| *known == condition)
                    .map(|at| at + PLAIN_VERDICTS.len()),
                plain => PLAIN_VERDICTS.iter().position(|known| *known == plain),
            };
            if let Some(counter) = place.and_then(|place| self.0.shadow.get(place)) {
                counter.inc();
            }
        }
        self.0.routes.observe(event);
        let limit = event.keyed.and_then(|keyed| keyed.rate_limit);
        let place = limit.and_then(|limit| RateLimitKind::ALL.iter().position(|kind| *kind == limit));
        if let Some(counter) = place.and_then(|place| self.0.rate_limited.get(place)) {
            counter.inc();
        }
    }
}

/// A table of labels, and a function that returns the place of a value in it.
macro_rules! labels {
    ($table:ident, $place:ident: $type:ty, { $($pattern:pat => $label:literal,)+ }) => {
        const $table: [&str; [$($label),+].len()] = [$($label),+];

        fn $place(value: $type) -> usize {
            match value { $($pattern => const { place_in(&$table, $label) }),+ }
        }
    };
}

/// The place of a label in a table that has it. Evaluated by the compiler, because several events are counted for each request.
const fn place_in(table: &[&str], label: &str) -> usize {
    let mut place = 0;
    while place < table.len() {
        let (known, label) = (table[place].as_bytes(), label.as_bytes());
        let mut at = 0;
        while known.len() == label.len() && at < known.len() && known[at] == label[at] {
            at += 1;
        }
        if known.len() == label.len() && at == known.len() {
            return place;
        }
        place += 1;
    }
    panic!("each label is in its own table")
}

labels! {
    EVENTS, event_place: EventKind, {
        EventKind::Executing { .. } => "executing",
        EventKind::Replayed { .. } => "replayed",
        EventKind::InProgress => "in-progress",
        EventKind::Mismatch => "mismatch",
        EventKind::Unknown => "unknown",
        EventKind::Unreplayable => "unreplayable",
        EventKind::ClaimFailed(_) => "claim-failed",
        EventKind::ClaimCancelled => "claim-cancelled",
        EventKind::Executed => "executed",
        EventKind::Completed => "completed",
        EventKind::Tombstoned => "tombstoned",
        EventKind::Parked => "parked",
        EventKind::Released => "released",
        EventKind::Fenced => "fenced",
        EventKind::Abandoned => "abandoned",
        EventKind::Renewed => "renewed",
        EventKind::RenewalFailed(_) => "renewal-failed",
        EventKind::LeaseLost => "lease-lost",
        EventKind::SettlementDeferred(_) => "settlement-deferred",
        EventKind::SettlementLost => "settlement-lost",
        EventKind::CompletedUpstream => "completed-upstream",
        EventKind::ResponseAdded => "response-added",
        EventKind::ResponseDiffers => "response-differs",
        EventKind::CompletionMissing => "completion-missing",
        _ => "other",
    }
}

/// The name of an event, as metrics and operators see it.
pub(super) fn event_name(kind: EventKind) -> &'static str {
    EVENTS[event_place(kind)]
}

impl Observer for Metrics {
    fn observe(&self, event: &Event) {
        let inner = &self.0;
        inner.events[event_place(event.kind)].inc();
        let failed = |during, kind| {
            inner.store_errors.get_or_create(&[("during", during), ("kind", error_name(kind))]).inc();
        };
        match event.kind {
            EventKind::Executing { after_abandoned, .. } => {
                self.begun(event);
                if after_abandoned {
                    inner.takeovers.inc();
                }
            }
            EventKind::Executed | EventKind::Abandoned => self.ended(event),
            EventKind::Replayed { waited: true } => {
                inner.replays_after_wait.inc();
            }
            EventKind::ClaimFailed(kind) => failed("claim", kind),
            EventKind::RenewalFailed(kind) => failed("renewal", kind),
            EventKind::SettlementDeferred(kind) => failed("settlement", kind),
            _ => {}
        }
    }
}

/// The kinds of errors of a store.
const ERRORS: [&str; 6] = ["unavailable", "locked", "corrupt", "sealed", "invalid", "other"];

const fn error_name(kind: StoreErrorKind) -> &'static str {
    match kind {
        StoreErrorKind::Unavailable => "unavailable",
        StoreErrorKind::Locked => "locked",
        StoreErrorKind::Corrupt => "corrupt",
        StoreErrorKind::Sealed => "sealed",
        StoreErrorKind::Invalid => "invalid",
        _ => "other",
    }
}

/// A store that measures the time of its commands.
struct MeasuredStore {
    store: Arc<dyn Store>,
    metrics: Metrics,
}

labels! {
    COMMANDS, command_place: Option<&Command>, {
        Some(Command::Claim(_)) => "claim",
        Some(Command::Renew(_)) => "renew",
        Some(Command::Complete(_)) => "complete",
        Some(Command::Release(_)) => "release",
        Some(Command::Resolve(_)) => "resolve",
        None => "purge",
        Some(_) => "other",
    }
}

impl Store for MeasuredStore {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        let place = command_place(Some(&command));
        let started = Instant::now();
        let response = self.store.apply(id, command);
        Box::pin(async move {
            let response = response.await;
            self.metrics.0.store_durations[place].observe(started.elapsed(), None);
            response
        })
    }

    fn try_apply(&self, id: RecordId, command: &Command) -> Option<Result<Outcome, StoreError>> {
        let started = Instant::now();
        let response = self.store.try_apply(id, command)?;
        let place = command_place(Some(command));
        self.metrics.0.store_durations[place].observe(started.elapsed(), None);
        Some(response)
    }

    fn purge(&self, limit: usize) -> StoreFuture<'_, usize> {
        Box::pin(async move {
            let started = Instant::now();
            let response = self.store.purge(limit).await;
            self.metrics.0.store_durations[command_place(None)].observe(started.elapsed(), None);
            response
        })
    }

    delegate_store!(
        self, self.store => lookup list survey audit check changed
            open_transactions advisories usage clock_skew accept_clock now capabilities
    );
}
