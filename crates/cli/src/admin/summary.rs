//! `GET /v1/summary`: the state of the sidecar and its store, and the requests of the last hour.

use axum::extract::State;
use axum::response::Response;
use oncegate_core::Advisory;
use serde_json::{Value, json};

use super::census::Counts;
use super::{AdminState, note_on_keys, notes_on_reloads, readiness, view};
use crate::activity::{Minute, OUTCOME_GROUPS, OutcomeCounts};

/// Everything that an operator looks at first.
#[derive(Debug)]
pub(super) struct Summary {
    /// The reason why the sidecar is not ready.
    pub(super) not_ready: Option<String>,
    pub(super) is_draining: bool,
    pub(super) is_degraded: bool,
    pub(super) breaker: &'static str,
    pub(super) store: &'static str,
    pub(super) durability: String,
    pub(super) fencing: String,
    pub(super) advisories: Vec<Advisory>,
    pub(super) started_at: String,
    pub(super) uptime_seconds: u64,
    pub(super) requests_in_flight: usize,
    pub(super) max_in_flight: usize,
    pub(super) executing: usize,
    /// The results that the store has not accepted yet.
    pub(super) settlements_pending: usize,
    pub(super) connections: usize,
    pub(super) max_connections: usize,
    /// `None` before the first walk through the store.
    pub(super) records: Option<Counts>,
    pub(super) oldest_unsettled_seconds: Option<u64>,
    pub(super) first_end_seconds: Option<u64>,
    /// The requests since the start, by outcome.
    pub(super) outcomes: Vec<(&'static str, u64)>,
    /// The same, in groups.
    pub(super) totals: OutcomeCounts,
    pub(super) minutes: Vec<Minute>,
}

impl Summary {
    pub(super) async fn of(state: &AdminState) -> Self {
        let not_ready = readiness(state).await.err();
        let store = state.engine.store();
        let promises = store.capabilities();
        let mut advisories = store.advisories();
        advisories.extend(note_on_keys(state).map(|text| Advisory::new("key-set", text)));
        advisories.extend(notes_on_reloads(state).into_iter().map(|text| Advisory::new("reload", text)));
        let usage = state.live.borrow().layer.limit_usage();
        let (records, now) = (state.metrics.unsettled(), store.now());
        let totals = state.metrics.outcome_counts();
        Self {
            not_ready,
            is_draining: state.draining.is_set(),
            is_degraded: state.is_degraded(),
            breaker: state.breaker.state().as_str(),
            store: promises.name,
            durability: format!("{:?}", promises.durability).to_ascii_lowercase(),
            fencing: format!("{:?}", promises.fencing).to_ascii_lowercase(),
            advisories,
            started_at: view::time(state.activity.started_at()),
            uptime_seconds: state.activity.uptime().as_secs(),
            requests_in_flight: usage.in_flight,
            max_in_flight: usage.max_in_flight,
            executing: state.metrics.executing(),
            settlements_pending: state.engine.pending_settlements(),
            connections: state.connections.used(),
            max_connections: state.connections.max(),
            records,
            oldest_unsettled_seconds: records
                .and_then(|counts| counts.oldest)
                .map(|at| now.since(at).as_secs()),
            first_end_seconds: records.and_then(|counts| counts.first_end).map(|at| at.since(now).as_secs()),
            outcomes: state.metrics.outcomes(),
            totals,
            minutes: state.activity.hour().minutes(totals),
        }
    }
}

pub(super) async fn show(State(state): State<AdminState>) -> Response {
    let summary = Summary::of(&state).await;
    let records = summary.records.map(|counts| {
        json!({
            "in_progress": counts.in_progress,
            "abandoned": counts.abandoned,
            "unknown": counts.unknown,
            "oldest_unsettled_seconds": summary.oldest_unsettled_seconds,
            "unsettled_retention_left_seconds": summary.first_end_seconds,
        })
    });
    let advisories = summary.advisories.iter();
    let advisories = advisories.map(|advisory| json!({"name": advisory.name, "text": advisory.text}));
    let outcomes = summary.outcomes.iter().map(|(name, count)| ((*name).to_owned(), Value::from(*count)));
    let minutes = summary
        .minutes
        .iter()
        .map(|minute| json!({"at": view::time(minute.at), "requests": groups(&minute.counts)}));
    view::json(&json!({
        "version": env!("CARGO_PKG_VERSION"),
        "started_at": summary.started_at,
        "uptime_seconds": summary.uptime_seconds,
        "ready": summary.not_ready.is_none(),
        "not_ready": summary.not_ready,
        "draining": summary.is_draining,
        "store": {
            "name": summary.store,
            "durability": summary.durability,
            "fencing": summary.fencing,
            "breaker": summary.breaker,
            "degraded": summary.is_degraded,
            "advisories": advisories.collect::<Vec<_>>(),
        },
        "in_flight": {
            "requests": summary.requests_in_flight,
            "max_requests": summary.max_in_flight,
            "executing": summary.executing,
            "settlements_pending": summary.settlements_pending,
            "connections": summary.connections,
            "max_connections": summary.max_connections,
        },
        "records": records,
        "requests": { "outcomes": Value::Object(outcomes.collect()), "groups": groups(&summary.totals) },
        "last_hour": minutes.collect::<Vec<_>>(),
    }))
}

/// Numbers of requests, by the names of their groups.
fn groups(counts: &OutcomeCounts) -> Value {
    let pairs = OUTCOME_GROUPS.iter().zip(counts);
    Value::Object(pairs.map(|(group, count)| (group.as_str().to_owned(), (*count).into())).collect())
}
