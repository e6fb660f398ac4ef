//! The clock of the machine, which an operator accepts after it was set ahead: what that would end, and the step itself.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::HeaderMap;
use oncegate_core::{ClockSkew, ListQuery, Store, StoreError, Timestamp, limits};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::AdminState;
use super::keys::{AuditTexts, Body, from_json};
use super::listing::WALK_TIMEOUT;
use super::problem::Problem;
use super::view;
use crate::log::OPERATOR;

/// The records that end if the clock is accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Ending {
    /// The records that were read.
    records: u64,
    /// Those whose retention ends.
    ending: u64,
    /// Those among them that wait for an operator.
    unsettled: u64,
    /// True if the whole store was read in [`WALK_TIMEOUT`].
    is_complete: bool,
}

/// `GET /v1/clock`: the disagreement of the two clocks, and the records that end if that of the machine is accepted.
pub(super) async fn show(State(state): State<AdminState>) -> Result<Response, Problem> {
    let store = state.engine.store();
    let (now, skew) = (store.now(), store.clock_skew());
    let ahead = skew.filter(|skew| skew.is_ahead);
    let found = match &ahead {
        Some(skew) => Some(ending(&**store, skew).await.map_err(|error| Problem::store_read(&error))?),
        None => None,
    };
    let direction = skew.map(|skew| if skew.is_ahead { "ahead" } else { "behind" });
    // All members are always there.
    Ok(view::json(&json!({
        "direction": direction,
        "seconds": skew.map_or(0, |skew| skew.by.as_secs()),
        "store_time": view::time(now),
        "machine_time": skew.map(|skew| view::time(machine_time(now, &skew))),
        "text": skew.map_or_else(
            || "the clock of the machine and the time of the store agree".to_owned(),
            |skew| skew.to_string(),
        ),
        "since": ahead.map(|skew| view::time(skew.since)),
        "records": found.map(|found| found.records),
        "records_ending": found.map(|found| found.ending),
        "unsettled_ending": found.map(|found| found.unsettled),
        "complete": found.map(|found| found.is_complete),
    })))
}

fn machine_time(now: Timestamp, skew: &ClockSkew) -> Timestamp {
    let by = u64::try_from(skew.by.as_millis()).unwrap_or(u64::MAX);
    let now = now.as_millis();
    Timestamp::from_millis(if skew.is_ahead { now.saturating_add(by) } else { now.saturating_sub(by) })
}

/// Counts the records whose retention ends with the step. Those that were written since the clock was set do not become older.
async fn ending(store: &dyn Store, skew: &ClockSkew) -> Result<Ending, StoreError> {
    let until = Instant::now() + WALK_TIMEOUT;
    let mut query = ListQuery::default();
    query.limit = limits::MAX_PAGE_RECORDS;
    let mut found = Ending::default();
    loop {
        let page = store.list(query.clone()).await?;
        let now = store.now();
        for (_, record) in &page.records {
            found.records += 1;
            if record.changed_at < skew.since && record.expires_at <= now.after(skew.by) {
                found.ending += 1;
                let state = record.state_name(now);
                found.unsettled += u64::from(oncegate_core::StateSet::UNSETTLED.contains(state));
            }
        }
        query.after = page.next;
        if query.after.is_none() {
            found.is_complete = true;
            return Ok(found);
        }
        if Instant::now() >= until {
            return Ok(found);
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AcceptRequest {
    reason: String,
    actor: Option<String>,
    /// The step that the operator saw. Another step is refused.
    ahead_seconds: Option<u64>,
}

/// `POST /v1/clock/accept`: accepts the machine's clock, however far ahead it was set. The audit trail is about records, so the
/// log says who did it and why.
pub(super) async fn accept(
    State(state): State<AdminState>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let request: AcceptRequest = from_json(body)?;
    let AuditTexts { actor, reason } = AuditTexts::read(request.actor.as_deref(), &request.reason, &headers)?;
    let store = state.engine.store();
    let skew = store.clock_skew();
    if let (Some(seen), Some(skew)) = (request.ahead_seconds, skew.filter(|skew| skew.is_ahead)) {
        let seconds = skew.by.as_secs();
        if seconds.abs_diff(seen) > limits::MAX_CLOCK_STEP.as_secs() {
            return Err(Problem::bad_request(format!(
                "ahead_seconds: the clock is now {seconds} s ahead, not {seen} s. Look at it again; nothing was accepted."
            )));
        }
    }
    // Those that this process left in the last seconds. If one of them ends by the acceptance, that is reported, too.
    state.left.note(&**store).await;
    let by = store.accept_clock().await.map_err(|error| Problem::store(&error))?;
    let seconds = by.map(|by| by.as_secs());
    if let Some(seconds) = seconds {
        tracing::warn!(
            target: OPERATOR,
            seconds,
            actor,
            reason,
            "an operator accepted the time of this machine's clock: records from before it was set are so much older"
        );
    }
    let behind = skew.filter(|skew| !skew.is_ahead).map(|skew| skew.by.as_secs());
    let accepted: Value = json!({"ahead_seconds": seconds, "behind_seconds": behind});
    Ok(axum::Json(accepted).into_response())
}
