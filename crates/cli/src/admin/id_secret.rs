//! The mark of the store's id secret: how it is, and putting it back after the store has lost it.

use axum::extract::State;
use axum::response::Response;
use http::HeaderMap;
use oncegate_core::{ErrorChain, ID_SECRET_RECORD, IdMark, ListQuery, StoreErrorKind, limits};
use serde::Deserialize;
use serde_json::json;

use super::AdminState;
use super::keys::{AdminResult, AuditTexts, Body, from_json, searched_key};
use super::listing;
use super::problem::Problem;
use super::view;
use crate::log::OPERATOR;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RestoreRequest {
    reason: String,
    actor: Option<String>,
    /// The name of the secret that the operator means. Another one is refused.
    secret: Option<String>,
    /// A key that was used on this store: if the secret finds a record of it, the records are of the secret.
    key: Option<String>,
    /// Restores without a key that proves it.
    #[serde(default)]
    force: bool,
    #[serde(default)]
    dry_run: bool,
}

/// `GET /v1/id-secret`: the id secret of this sidecar, and the mark of its store.
pub(super) async fn show(State(state): State<AdminState>) -> Result<Response, Problem> {
    let guard = state.engine.id_guard();
    let mark = guard.find_mark().await.map_err(|error| Problem::store_read(&error))?;
    Ok(view::json(&json!({
        "secret": guard.ids().secret().map(|secret| secret.name().to_string()),
        "mark": word(mark),
        "store_secret": other_name(mark),
        "problem": guard.problem().map(|problem| problem.to_string()),
    })))
}

const fn word(mark: IdMark) -> &'static str {
    match mark {
        IdMark::Own => "own",
        IdMark::Trial => "trial",
        IdMark::Other(_) => "other",
        IdMark::Missing { has_records: true } => "missing",
        IdMark::Missing { has_records: false } => "none",
        IdMark::Damaged => "damaged",
        _ => "unknown",
    }
}

fn other_name(mark: IdMark) -> Option<String> {
    match mark {
        IdMark::Other(name) => name.map(|name| name.to_string()),
        _ => None,
    }
}

/// `POST /v1/id-secret/restore`: puts the mark back that a store with records has lost. The audit trail is about records, so the
/// log says who did it and why.
pub(super) async fn restore(State(state): State<AdminState>, headers: HeaderMap, body: Body) -> AdminResult {
    let request: RestoreRequest = from_json(body)?;
    let AuditTexts { actor, reason } = AuditTexts::read(request.actor.as_deref(), &request.reason, &headers)?;
    let guard = state.engine.id_guard();
    let refused = |what: &str| Err(Problem::mark_not_restored(what));
    let Some(name) = guard.ids().secret().map(|secret| secret.name().to_string()) else {
        return refused("This sidecar has no id secret: start it with the one of the store.");
    };
    if let Some(meant) = request.secret.filter(|meant| *meant != name) {
        return refused(&format!("This sidecar has the id secret {name}, not {meant}."));
    }
    let mark = guard.find_mark().await.map_err(|error| Problem::store_read(&error))?;
    match mark {
        IdMark::Own | IdMark::Missing { has_records: true } => {}
        IdMark::Missing { has_records: false } => {
            return refused("The store has no records: it is marked when a sidecar with the secret starts.");
        }
        IdMark::Trial => return refused("The store is on trial. Look again in two minutes."),
        IdMark::Other(store) => {
            let store = store.map_or_else(|| "of another program".to_owned(), |name| name.to_string());
            return refused(&format!("The store has the mark of the id secret {store}."));
        }
        IdMark::Damaged => {
            return refused(&format!(
                "Its record, {ID_SECRET_RECORD}, is damaged, and no command replaces a record that cannot be read. Stop \
                 every program without the id secret: it would execute keys again in the meantime. Then remove this \
                 record (PostgreSQL, Redis), and run this again if no sidecar with the secret has put the mark back by \
                 itself. A directory: restore a backup. docs/reference/sealing.md has the commands."
            ));
        }
        _ => return refused("The mark is in a state that this sidecar does not know."),
    }
    let is_missing = mark != IdMark::Own;
    let found = match (&request.key, request.force) {
        _ if !is_missing => None,
        (Some(key), _) => Some(records_of(&state, key).await?),
        (None, true) => None,
        (None, false) => {
            let what = "key: give a key that was used on this store, which proves that its records are of this secret; or \
                        force, without a proof.";
            return Err(Problem::bad_request(what));
        }
    };
    if found == Some(0) {
        return refused(&format!(
            "The id secret {name} finds no record of this key. Either the key was not used here, or its retention is over, or the \
             records are of another secret, or of none: then all their keys would be new, and retries would execute again."
        ));
    }
    let mut restored = false;
    if is_missing && !request.dry_run {
        restored = guard.restore_mark().await.map_err(|error| match error.kind() {
            StoreErrorKind::Invalid => Problem::mark_not_restored(ErrorChain(&error).to_string()),
            _ => Problem::store(&error),
        })?;
        tracing::warn!(
            target: OPERATOR,
            secret = name,
            proved_by_key = found.is_some(),
            actor,
            reason,
            "an operator put back the mark of the id secret: programs with it execute on the records of this store, and no others"
        );
    }
    Ok(view::json(&json!({
        "secret": name,
        "mark": word(mark),
        "records_of_key": found,
        "restored": restored,
    })))
}

/// The number of records of a key, by the tag that the secret of this sidecar makes of it.
async fn records_of(state: &AdminState, key: &str) -> Result<u64, Problem> {
    let key = searched_key(key).map_err(|error| Problem::bad_request(format!("key: {error}.")))?;
    let mut query = ListQuery::default();
    query.key = Some(state.engine.ids().key_tag(&key));
    query.limit = limits::MAX_PAGE_RECORDS;
    let mut found = 0_u64;
    let is_complete =
        listing::walk(&**state.engine.store(), &query, |page, _| found += page.records.len() as u64).await?;
    if found == 0 && !is_complete {
        return Err(Problem::busy(
            "The store has too many records to look for the key in 5 seconds; nothing was changed. Find the record with `oncegate \
             keys find` and its path and caller: if it is found, force is safe.",
        ));
    }
    Ok(found)
}
