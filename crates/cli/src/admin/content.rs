//! The content of records: what `oncegate reseal` and `oncegate forget` change. Each request is about one page of the store,
//! so the load is bounded, and a walk that was stopped can go on or begin again.

use std::collections::BTreeMap;

use axum::extract::{Path, State};
use axum::response::Response;
use http::header::HeaderMap;
use oncegate_core::{
    CallerTag, Command, Forget, ID_SECRET_RECORD, ListPage, ListQuery, Outcome, Record, RecordId,
    RecordedResponse, State as RecordState, StateName, Store, StoreError, StoreErrorKind, limits,
};
use oncegate_seal::{ResealOptions, ResealOutcome, SealError, SealedStore};
use serde::Deserialize;
use serde_json::{Value, json};

use super::keys::{AdminResult, AuditTexts, Body, from_json};
use super::problem::Problem;
use super::{AdminState, listing, seal, view};

/// The most records in one page. Each may cost a write.
const MAX_PAGE: usize = 100;

/// The part of the store that a request is about.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Page {
    cursor: Option<String>,
    limit: Option<usize>,
}

impl Page {
    fn query(&self) -> Result<ListQuery, Problem> {
        let mut query = ListQuery::default();
        query.limit = match self.limit.unwrap_or(MAX_PAGE) {
            limit @ 1..=MAX_PAGE => limit,
            other => {
                return Err(Problem::bad_request(format!("limit: {other} is not from 1 to {MAX_PAGE}.")));
            }
        };
        if let Some(text) = &self.cursor {
            let what = format!("cursor: {text:?} is not a cursor; it has 64 hexadecimal digits.");
            query.after = Some(RecordId::from_hex(text).ok_or_else(|| Problem::bad_request(what))?);
        }
        Ok(query)
    }
}

/// The store of the sidecar, whose records have their sealed forms. Nothing is opened for a walk.
fn stored(state: &AdminState) -> &dyn Store {
    state.seal.as_ref().map_or_else(|| &**state.engine.store(), |seal| &**seal.wrapped())
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct ResealRequest {
    cursor: Option<String>,
    limit: Option<usize>,
    #[serde(default)]
    seal_clear: bool,
    #[serde(default)]
    dry_run: bool,
}

/// `POST /v1/seal/reseal`: seals the records of one page of the store with the key that seals now.
pub(super) async fn reseal(State(state): State<AdminState>, body: Body) -> AdminResult {
    let request: ResealRequest = from_json(body)?;
    let Some(seal) = state.seal.clone() else {
        return Err(Problem::switched_off("This sidecar has no seal keys."));
    };
    // A client that goes away does not stop the page half-way.
    let task = tokio::spawn(async move { reseal_request(&seal, request).await });
    Ok(view::json(&joined(task).await?))
}

/// The same for a store that this process has open: the request and the response are those of the admin API.
///
/// # Errors
/// The detail of the problem.
pub(crate) async fn reseal_opened(seal: &SealedStore, request: Value) -> Result<Value, String> {
    let request = serde_json::from_value(request).map_err(|error| error.to_string())?;
    reseal_request(seal, request).await.map_err(|problem| problem.detail().to_owned())
}

async fn reseal_request(seal: &SealedStore, request: ResealRequest) -> Result<Value, Problem> {
    let ResealRequest { cursor, limit, seal_clear, dry_run } = request;
    let query = Page { cursor, limit }.query()?;
    let keys = seal.keys().get();
    let Some(seals_with) = keys.ids().next().filter(|_| !keys.opens_only()) else {
        return Err(Problem::switched_off(
            "The seal keys of this sidecar only open (`seal-opens-only`): it has no key to seal anew with.",
        ));
    };
    if seal_clear && keys.is_required() {
        return Err(Problem::bad_request(
            "seal_clear: this sidecar refuses what is in clear (`seal-required`), and a seal would make it look genuine.",
        ));
    }
    let options = ResealOptions { seals_clear: seal_clear, is_dry_run: dry_run };
    let page = seal.wrapped().list(query).await.map_err(|error| Problem::store_read(&error))?;
    let mut counts = reseal_page(seal, page, options).await?;
    counts["seals_with"] = seals_with.to_string().into();
    Ok(counts)
}

async fn reseal_page(seal: &SealedStore, page: ListPage, options: ResealOptions) -> Result<Value, Problem> {
    let mut counts: BTreeMap<&str, u64> = [
        "resealed", "up_to_date", "clear", "clear_sealed", "nothing_kept", "expired", "locked", "changed",
        "broken", "too_large",
    ]
    .map(|name| (name, 0))
    .into();
    let mut add = |name| *counts.entry(name).or_default() += 1;
    let mut missing: BTreeMap<String, u64> = BTreeMap::new();
    // The mark of the id secret has no content, and is no record of a request.
    for (id, record) in page.records.iter().filter(|(id, _)| *id != ID_SECRET_RECORD) {
        let mut outcome = seal.reseal(*id, record, options).await;
        if matches!(outcome, Ok(ResealOutcome::Changed)) {
            // A request was faster. Once more with what it left.
            outcome = match seal.wrapped().lookup(*id).await {
                Ok(Some(record)) => seal.reseal(*id, &record, options).await,
                Ok(None) => Ok(ResealOutcome::Gone),
                Err(error) => Err(error),
            };
        }
        match outcome {
            Ok(ResealOutcome::Resealed { was_clear, has_clear }) => {
                add(if was_clear { "clear_sealed" } else { "resealed" });
                if has_clear {
                    add("clear");
                }
            }
            Ok(ResealOutcome::UpToDate { has_clear }) => add(if has_clear { "clear" } else { "up_to_date" }),
            Ok(ResealOutcome::NothingKept) => add("nothing_kept"),
            Ok(ResealOutcome::Gone) => add("expired"),
            Ok(ResealOutcome::Changed) => add("changed"),
            Ok(ResealOutcome::Refused(SealError::KeyMissing(key))) => {
                *missing.entry(key.to_string()).or_default() += 1
            }
            Ok(ResealOutcome::Refused(SealError::Response(_) | SealError::Step(_))) => add("too_large"),
            Ok(ResealOutcome::Refused(_)) => add("broken"),
            Ok(_) => {
                return Err(Problem::internal("The store gave a reply that this program does not know."));
            }
            Err(error) if error.kind() == StoreErrorKind::Locked => add("locked"),
            Err(error) => return Err(changing(&error)),
        }
    }
    let mut counts = json!(counts);
    counts["key_missing"] = json!(missing);
    counts["unreadable"] = page.unreadable.len().into();
    counts["next"] = page.next.map(|next| next.to_string()).into();
    Ok(counts)
}

/// The problem of a page whose first records may be changed already.
fn changing(error: &StoreError) -> Problem {
    Problem::store(error)
}

async fn joined<T>(task: tokio::task::JoinHandle<Result<T, Problem>>) -> Result<T, Problem> {
    task.await.unwrap_or_else(|_| Err(Problem::internal("The request was given up.")))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ForgetRequest {
    caller: String,
    cursor: Option<String>,
    limit: Option<usize>,
    #[serde(default)]
    dry_run: bool,
    reason: String,
    actor: Option<String>,
}

/// `POST /v1/keys/forget`: removes the content of a caller's completed records, those of one page of the store.
pub(super) async fn forget(State(state): State<AdminState>, headers: HeaderMap, body: Body) -> AdminResult {
    let request: ForgetRequest = from_json(body)?;
    let audit = AuditTexts::read(request.actor.as_deref(), &request.reason, &headers)?;
    let mut query = Page { cursor: request.cursor, limit: request.limit }.query()?;
    let what = format!(
        "caller: {:?} is not a caller's tag: 16 hexadecimal digits, as in the column CALLER of a listing",
        request.caller
    );
    query.caller = Some(CallerTag::from_hex(&request.caller).ok_or_else(|| Problem::bad_request(what))?);
    let task = tokio::spawn(async move {
        let page = stored(&state).list(query).await.map_err(|error| Problem::store_read(&error))?;
        forget_page(&state, page, &audit, request.dry_run).await
    });
    Ok(view::json(&joined(task).await?))
}

async fn forget_page(
    state: &AdminState,
    page: ListPage,
    audit: &AuditTexts,
    is_dry_run: bool,
) -> Result<Value, Problem> {
    let (mut forgotten, mut nothing_kept, mut expired) = (0_u64, 0_u64, 0_u64);
    let (mut open, mut locked) = (Vec::new(), Vec::new());
    let now = state.engine.store().now();
    for (id, record) in page.records.iter().filter(|(id, _)| *id != ID_SECRET_RECORD) {
        let outcome = match content(record) {
            Content::Nothing => Ok(ForgetOutcome::NothingKept),
            Content::Open => Ok(ForgetOutcome::Open(record.state_name(now))),
            Content::Removable if is_dry_run => Ok(ForgetOutcome::Forgotten(record.state_name(now))),
            Content::Removable => forget_record(state, *id, audit).await,
        };
        match outcome {
            Ok(ForgetOutcome::Forgotten(_)) => forgotten += 1,
            Ok(ForgetOutcome::NothingKept) => nothing_kept += 1,
            Ok(ForgetOutcome::Gone) => expired += 1,
            Ok(ForgetOutcome::Open(state)) => open.push(json!({
                "record": id.to_string(),
                "state": state.as_str(),
                "operation": record.label.operation(),
                "steps": record.steps.len(),
            })),
            Err(error) if error.kind() == StoreErrorKind::Locked => locked.push(id.to_string()),
            Err(error) => return Err(changing(&error)),
        }
    }
    Ok(json!({
        "forgotten": forgotten,
        "nothing_kept": nothing_kept,
        "expired": expired,
        "open": open,
        "locked": locked,
        "unreadable": page.unreadable.iter().map(RecordId::to_string).collect::<Vec<_>>(),
        "next": page.next.map(|next| next.to_string()),
    }))
}

/// The content of a record, as far as a removal is concerned.
enum Content {
    /// There is none, and none will come.
    Nothing,
    /// It can be removed. The owner of an awaited record may add a response, so it counts, too.
    Removable,
    /// The outcome is open: there may be steps, and a response may come.
    Open,
}

fn content(record: &Record) -> Content {
    match &record.state {
        RecordState::Completed(RecordedResponse::Tombstone) if record.steps.is_empty() => Content::Nothing,
        RecordState::Completed(_) => Content::Removable,
        RecordState::Released if record.steps.is_empty() => Content::Nothing,
        _ => Content::Open,
    }
}

/// The result of a removal.
enum ForgetOutcome {
    /// The content was removed. The state before.
    Forgotten(StateName),
    NothingKept,
    Gone,
    /// The outcome is open.
    Open(StateName),
}

async fn forget_record(
    state: &AdminState,
    id: RecordId,
    audit: &AuditTexts,
) -> Result<ForgetOutcome, StoreError> {
    let AuditTexts { actor, reason } = audit;
    let command = Forget { actor: actor.clone(), reason: reason.clone() };
    match state.engine.store().apply(id, Command::Forget(command)).await? {
        Outcome::Forgotten { from } => {
            tracing::info!(record = %id, %from, actor, reason, "an operator removed the content of a record");
            Ok(ForgetOutcome::Forgotten(from))
        }
        Outcome::NotForgotten { state: None } => Ok(ForgetOutcome::Gone),
        Outcome::NotForgotten { state: Some(StateName::Tombstone) } => Ok(ForgetOutcome::NothingKept),
        Outcome::NotForgotten { state: Some(state) } => Ok(ForgetOutcome::Open(state)),
        other => Err(StoreError::invalid(format!("the store answered {other:?} to a removal"))),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ForgetOne {
    reason: String,
    actor: Option<String>,
}

/// `POST /v1/keys/{record}/forget`: removes the content of one record.
pub(super) async fn forget_one(
    State(state): State<AdminState>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let id = listing::find(&**state.engine.store(), &id).await?;
    let request: ForgetOne = from_json(body)?;
    let audit = AuditTexts::read(request.actor.as_deref(), &request.reason, &headers)?;
    let refused = |what: String| Err(Problem::not_resolvable(id, what));
    match forget_record(&state, id, &audit).await.map_err(|error| Problem::store(&error))? {
        ForgetOutcome::Forgotten(from) => {
            // The record was changed, so an error must not report that nothing was.
            let found = seal::read(&state, id).await.map_err(|error| Problem::store(&error))?;
            let found = found.ok_or_else(|| Problem::no_record(id))?;
            let mut view = found.view(id, state.engine.store().now(), view::Detail::Whole).json();
            view["from"] = from.as_str().into();
            Ok(view::json(&view))
        }
        ForgetOutcome::Gone => Err(Problem::no_record(id)),
        ForgetOutcome::NothingKept => {
            refused("It keeps nothing (any more): it is a tombstone without steps.".to_owned())
        }
        ForgetOutcome::Open(state) => refused(format!(
            "It is {state}: its outcome is open, and its next attempt needs its steps. Wait until it is completed, or resolve it."
        )),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CompactRequest {
    below: Option<u32>,
}

/// `POST /v1/compact`: begins to remove older versions of records from the log of an embedded store, or says how far that is.
/// While a compaction runs, none begins, because each takes a segment of the log.
pub(super) async fn compact(State(state): State<AdminState>, body: Body) -> AdminResult {
    let request: CompactRequest = from_json(body)?;
    let store = state.backup.get().ok_or_else(Problem::no_log)?;
    let running = match request.below {
        Some(_) => None,
        None => store.running_compaction().map_err(|error| Problem::store_read(&error))?,
    };
    let (begun, below) = match request.below.or(running) {
        Some(below) => (false, below),
        None => {
            let below = store.begin_compaction().await.map_err(|error| Problem::store_read(&error))?;
            tracing::info!("older versions of records are removed from the log");
            (true, below)
        }
    };
    let is_done = store.is_compacted(below).map_err(|error| Problem::store_read(&error))?;
    Ok(view::json(&json!({ "below": below, "compacted": is_done, "begun": begun })))
}

const _: () = assert!(MAX_PAGE <= limits::MAX_PAGE_RECORDS);
