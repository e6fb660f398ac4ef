//! The endpoints for records: list, show, find, resolve, release, park; and the audit trail.

use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, Request, StatusCode};
use oncegate_core::{
    AuditEntry, CallerTag, ID_SECRET_RECORD, IdempotencyKey, KeyError, KeyTag, ListQuery, Outcome, Record,
    RecordId, Resolution, Resolve, Scope, StateName, StateSet, StoredResponse, Timestamp, limits,
};
use oncegate_http::{AuthorityRole, CallerPart, KeyGrammar, KeySyntax, SHADOW_OPERATION, Settings};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::listing::Period;
use super::problem::Problem;
use super::seal::{self, ReadRecord};
use super::view::{self, Detail, RecordView};
use super::{AdminState, listing};
use crate::config::{did_you_mean, duration};
use crate::log::OPERATOR;

pub(super) type AdminResult = Result<Response, Problem>;
pub(super) type Pairs = Result<Query<Vec<(String, String)>>, QueryRejection>;
pub(super) type Body = Result<Bytes, BytesRejection>;

/// The parameters that select records, by their names.
pub(super) const FILTERS: [&str; 8] =
    ["state", "caller", "key_tag", "operation", "min_age", "since", "until", "limit"];

/// A selection of records.
#[derive(Default)]
pub(super) struct Selection {
    pub(super) query: ListQuery,
    pub(super) period: Period,
}

impl Selection {
    /// Reads one of [`FILTERS`].
    pub(super) fn add(&mut self, name: &str, text: &str, now: Timestamp) -> Result<(), Problem> {
        let bad = |what: String| Problem::bad_request(format!("{name}: {text:?} {what}"));
        let filter = &mut self.query;
        match name {
            "state" => {
                filter.states = listing::states(text).map_err(bad)?;
            }
            "caller" => {
                let what =
                    "is not a caller's tag: 16 hexadecimal digits, as in the column CALLER of a listing";
                filter.caller = Some(CallerTag::from_hex(text).ok_or_else(|| bad(what.to_owned()))?);
            }
            "key_tag" => {
                let what = "is not the tag of a key; it has 16 hexadecimal digits, as a listing shows them";
                filter.key = Some(KeyTag::from_hex(text).ok_or_else(|| bad(what.to_owned()))?);
            }
            "operation" => filter.operation = Some(text.to_owned()),
            "min_age" => {
                filter.min_age =
                    duration(text).map_err(|what| Problem::bad_request(format!("{name}: {what}")))?;
            }
            "since" => self.period.since = Some(listing::moment(text, now).map_err(bad)?),
            "until" => self.period.until = Some(listing::moment(text, now).map_err(bad)?),
            _ => filter.limit = limit(name, text)?,
        }
        Ok(())
    }
}

pub(super) async fn list(State(state): State<AdminState>, query: Pairs) -> AdminResult {
    let mut selection = Selection::default();
    let names = [&FILTERS[..], &["order", "cursor"]].concat();
    let mut is_newest_first = false;
    let store = state.engine.store();
    for (name, text) in pairs(query, &names)? {
        let bad = |what: &str| Problem::bad_request(format!("{name}: {text:?} {what}"));
        match name.as_str() {
            "order" => {
                is_newest_first = match text.as_str() {
                    "newest" => true,
                    "record" => false,
                    _ => return Err(bad("is neither newest nor record.")),
                };
            }
            "cursor" => {
                let what = "is not a cursor; it has 64 hexadecimal digits, as a listing shows it.";
                selection.query.after = Some(RecordId::from_hex(&text).ok_or_else(|| bad(what))?);
            }
            _ => selection.add(&name, &text, store.now())?,
        }
    }
    let Selection { query: filter, period } = selection;
    if is_newest_first {
        if filter.after.is_some() {
            return Err(Problem::bad_request("cursor: only the order \"record\" has pages."));
        }
        return listing::newest(&state, filter, period).await;
    }
    let is_unsettled = filter.states == StateSet::UNSETTLED;
    let turns = state.rows.all_turns().await;
    let page = store.list(filter).await.map_err(|error| Problem::store_read(&error))?;
    drop(turns);
    let now = store.now();
    let records = page.records.iter().filter(|(_, record)| {
        period.includes(record.changed_at) && !(is_unsettled && is_shadow(record.label.operation()))
    });
    let records = records.map(|(id, record)| RecordView::new(*id, record, now, Detail::Line).json());
    Ok(view::json(&json!({
        "records": records.collect::<Vec<_>>(),
        "unreadable": page.unreadable.iter().map(RecordId::to_string).collect::<Vec<_>>(),
        "next": page.next.map(|next| next.to_string()),
        "now": view::time(now),
    })))
}

pub(super) async fn show(
    State(state): State<AdminState>,
    Path(id): Path<String>,
    query: Pairs,
) -> AdminResult {
    let mut detail = Detail::Whole;
    for (name, text) in pairs(query, &["body"])? {
        detail = match text.as_str() {
            "true" => Detail::Body,
            "false" => Detail::Whole,
            _ => return Err(Problem::bad_request(format!("{name}: {text:?} is neither true nor false"))),
        };
    }
    let id = listing::find(&**state.engine.store(), &id).await?;
    let found = read_existing(&state, id).await?;
    Ok(view::json(&found.view(id, state.engine.store().now(), detail).json()))
}

/// The request whose record is sought, or only its key. Key and credential are in a body and not in a URL, because
/// URLs are written to logs.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Find {
    key: String,
    method: Option<String>,
    path: Option<String>,
    /// The host that the request was for, if hosts have keys of their own.
    host: Option<String>,
    caller: Option<Caller>,
    #[serde(default)]
    body: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Caller {
    Anonymous,
    SingleTenant,
    /// The value of the header field or cookie that tells callers apart.
    Value(String),
    /// All header fields that tell callers apart, as they were sent.
    Fields(std::collections::BTreeMap<String, String>),
}

pub(super) async fn find(State(state): State<AdminState>, body: Body) -> AdminResult {
    let find: Find = from_json(body)?;
    if find.path.is_none() {
        return find_by_key(&state, &find).await;
    }
    let (parts, key) = request_of(&state, &find)?;
    state.ids().await?;
    let id = state.record_id(&parts, &key).ok_or_else(|| {
        let settings = state.settings(&parts.method, parts.uri.path());
        let names: Vec<_> = settings.caller().parts().map(|part| part_name(&part)).collect();
        Problem::no_record_of_such(format!(
            "Requests on this route that do not identify their caller (by the {}) are refused, so no such request has a record.",
            names.join(" and the ")
        ))
    })?;
    let Some(found) = read(&state, id).await? else {
        let hint = spelling_hint(&state.settings(&parts.method, parts.uri.path()), find.caller.as_ref());
        return Err(Problem::no_record_of_such(format!(
            "No request with this key, method, path and caller was seen, or its retention is over.{hint} The key alone finds the \
             records of every caller."
        )));
    };
    let detail = if find.body { Detail::Body } else { Detail::Whole };
    Ok(view::json(&found.view(id, state.engine.store().now(), detail).json()))
}

/// A key and a caller whose tags are asked for. They are in a body, because URLs are written to logs.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TagRequest {
    key: Option<String>,
    /// The parts that identify the caller, each with its kind: `header:x-tenant`, `cookie:sid`.
    caller: Option<Vec<(String, String)>>,
}

/// The tags of a key and of a caller, by which a listing selects. With an id secret, only the sidecar can compute them.
pub(super) async fn tag(State(state): State<AdminState>, body: Body) -> AdminResult {
    let TagRequest { key, caller } = from_json(body)?;
    let key = key.map(|key| searched_key(&key)).transpose();
    let key = key.map_err(|error| Problem::bad_request(format!("key: {error}.")))?;
    let mut parts = caller.unwrap_or_default();
    parts.sort();
    let parts: Vec<_> = parts.iter().map(|(kind, value)| (kind.as_str(), value.as_bytes())).collect();
    let ids = state.ids().await?;
    let caller_tag = (!parts.is_empty()).then(|| ids.caller_tag(&Scope::caller_of_parts(&parts)).to_string());
    let key_tag = key.map(|key| ids.key_tag(&key).to_string());
    Ok(view::json(&json!({"key_tag": key_tag, "caller_tag": caller_tag})))
}

/// A hint for a caller value that begins with the name of its field or cookie.
fn spelling_hint(settings: &Settings, caller: Option<&Caller>) -> String {
    let Some(Caller::Value(text)) = caller else { return String::new() };
    let parts: Vec<_> = settings.caller().parts().collect();
    let (name, separator) = match &parts[..] {
        [CallerPart::Header(name)] => (name.as_str(), ':'),
        [CallerPart::Cookie(name)] => (*name, '='),
        _ => return String::new(),
    };
    match text.split_once(separator) {
        Some((before, _)) if before.trim().eq_ignore_ascii_case(name) => {
            format!(" The value of the caller begins with \"{name}{separator}\": give only what follows it.")
        }
        _ => String::new(),
    }
}

/// All records of a key, of whatever operation and caller, the newest first.
async fn find_by_key(state: &AdminState, find: &Find) -> AdminResult {
    if find.method.is_some() || find.host.is_some() || find.caller.is_some() || find.body {
        return Err(Problem::bad_request(
            "path: add it to find one record, or give the key alone to list all records that have it.",
        ));
    }
    let key = searched_key(&find.key).map_err(|error| Problem::bad_request(format!("key: {error}.")))?;
    let mut filter = ListQuery::default();
    filter.key = Some(state.ids().await?.key_tag(&key));
    filter.limit = limits::MAX_PAGE_RECORDS;
    listing::newest(state, filter, Period::default()).await
}

/// Reads a key that an operator searches for: in the syntax of the header field, or else as a program without header fields
/// would use it.
///
/// # Errors
/// If it is empty or too long.
pub(crate) fn searched_key(text: &str) -> Result<IdempotencyKey, KeyError> {
    let field = KeyGrammar::default().parse(key_field(text).as_bytes());
    field.or_else(|_| IdempotencyKey::new(text))
}

/// The head of a request from which the layer would derive the same record.
fn request_of(state: &AdminState, find: &Find) -> Result<(Parts, IdempotencyKey), Problem> {
    let bad = |what: String| Problem::bad_request(what);
    let Some(method) = &find.method else { return Err(bad("method: it is missing.".to_owned())) };
    let path = find.path.as_deref().unwrap_or_default();
    let method: Method = method.parse().map_err(|_| bad(format!("method: {method:?} is not a method.")))?;
    if !path.starts_with('/') {
        return Err(bad(format!("path: {path:?} does not start with a slash.")));
    }
    let request = Request::builder().method(method).uri(path).body(());
    let (mut parts, ()) = request.map_err(|_| bad(format!("path: {path:?} is not a path.")))?.into_parts();
    let settings = state.settings(&parts.method, parts.uri.path());
    if !settings.covers(&parts.method) {
        let path = parts.uri.path();
        return Err(bad(format!("method: {} {path} is not covered, so its keys are ignored.", parts.method)));
    }
    for (name, value) in caller_fields(&settings, find.caller.as_ref())? {
        parts.headers.insert(name, value);
    }
    let needs_host = settings.authority() == AuthorityRole::Scope
        || settings.caller().parts().any(|part| part == CallerPart::Host);
    match &find.host {
        None if needs_host => {
            return Err(bad(
                "host: each host has keys of its own on this route; name the one that the request was for."
                    .to_owned(),
            ));
        }
        Some(host) => {
            let value = HeaderValue::from_str(host);
            let value = value.map_err(|_| bad(format!("host: {host:?} is not a valid host.")))?;
            parts.headers.insert(header::HOST, value);
        }
        None => {}
    }
    // The grammar of the header field does not apply to a key that is built from the body.
    let any = KeyGrammar::default();
    let grammar = if settings.natural_key().is_some() { &any } else { settings.key_grammar() };
    // With quotes around it, it may be copied from a header field.
    let is_field = find.key.starts_with('"') && grammar.syntax() != KeySyntax::Raw;
    let key = if is_field { grammar.parse(find.key.as_bytes()) } else { grammar.key_of((&*find.key).into()) };
    let key = key.map_err(|problem| bad(format!("key: {problem}.")))?;
    Ok((parts, key))
}

/// The header fields that identify the caller.
fn caller_fields(
    settings: &Settings,
    caller: Option<&Caller>,
) -> Result<Vec<(HeaderName, HeaderValue)>, Problem> {
    let bad = |what: &str| Problem::bad_request(format!("caller: {what}"));
    let value = |text: &str| {
        HeaderValue::from_str(text)
            .map_err(|_| bad("the value has characters that a header field cannot contain."))
    };
    let scope = settings.caller();
    // The path and the host are members of their own.
    let is_other = |part: &CallerPart<'_>| !matches!(part, CallerPart::Path(_) | CallerPart::Host);
    let parts: Vec<_> = scope.parts().filter(is_other).collect();
    if let Some(part) =
        parts.iter().find(|part| matches!(part, CallerPart::Jwt(_) | CallerPart::Certificate(_)))
    {
        let part = part_name(part);
        let detail = format!(
            "on this route the {part} tells callers apart, which cannot be given here; give the key alone to list all records that have it."
        );
        return Err(Problem::caller_form("key-alone", part, &detail));
    }
    match (caller, &parts[..]) {
        (None, []) => Ok(Vec::new()),
        (Some(Caller::SingleTenant), []) if scope.is_single_tenant() => Ok(Vec::new()),
        (Some(Caller::Anonymous), [_, ..]) => Ok(Vec::new()),
        (Some(Caller::Value(text)), [CallerPart::Header(name)]) => Ok(vec![((*name).clone(), value(text)?)]),
        (Some(Caller::Value(text)), [CallerPart::Cookie(name)]) => {
            Ok(vec![(header::COOKIE, value(&format!("{name}={text}"))?)])
        }
        (Some(Caller::Fields(fields)), [_, ..]) => fields
            .iter()
            .map(|(name, text)| {
                let name =
                    name.parse().map_err(|_| bad(&format!("{name:?} is not the name of a header field.")))?;
                Ok((name, value(text)?))
            })
            .collect(),
        _ => {
            let names = parts.iter().map(part_name).collect::<Vec<_>>().join(" and the ");
            let (form, detail) = match &parts[..] {
                [] if scope.is_single_tenant() => {
                    ("single-tenant", "on this route it must be \"single-tenant\".".to_owned())
                }
                [] => (
                    "nothing",
                    "on this route the path and the host identify the caller; leave this out.".to_owned(),
                ),
                [_] => (
                    "value",
                    format!(
                        "on this route it must be \"anonymous\", or {{\"value\": …}} with the value of the {names} as it was sent."
                    ),
                ),
                _ => (
                    "fields",
                    format!(
                        "on this route it must be \"anonymous\", or {{\"fields\": {{…}}}} with the header fields that have the {names}, as they \
                         were sent."
                    ),
                ),
            };
            Err(Problem::caller_form(form, names, &detail))
        }
    }
}

fn part_name(part: &CallerPart<'_>) -> String {
    match part {
        CallerPart::Header(name) => format!("field {name}"),
        CallerPart::Cookie(name) => format!("cookie {name}"),
        CallerPart::Path(name) => format!("path parameter {name}"),
        CallerPart::Host => "host".to_owned(),
        CallerPart::Certificate(name) => format!("{} of a client certificate", name.as_str()),
        CallerPart::Jwt(claim) => format!("claim {claim} of a token"),
        _ => "identity".to_owned(),
    }
}

/// The key in quotes, as every grammar accepts it, unless it starts with a quote already.
fn key_field(key: &str) -> String {
    if key.starts_with('"') {
        return key.to_owned();
    }
    format!("\"{}\"", key.replace('\\', "\\\\").replace('"', "\\\""))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResolveRequest {
    outcome: OutcomeName,
    status: Option<u16>,
    headers: Option<Fields>,
    body: Option<String>,
    body_base64: Option<String>,
    #[serde(default)]
    tombstone: bool,
    #[serde(default)]
    amend: bool,
    reason: String,
    actor: Option<String>,
}

/// The operator's decision about a record, and the state that it applies to.
#[derive(Clone)]
pub(super) struct Verdict {
    pub(super) resolution: Resolution,
    pub(super) force: bool,
    pub(super) amend: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum OutcomeName {
    Completed,
    Released,
}

/// Header fields, as pairs, or as an object if no name is repeated.
#[derive(Deserialize)]
#[serde(untagged, expecting = "headers: an object of texts, or a list of [name, value]")]
enum Fields {
    Pairs(Vec<(String, String)>),
    Object(std::collections::BTreeMap<String, String>),
}

pub(super) async fn resolve(
    State(state): State<AdminState>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> AdminResult {
    let id = listing::find(&**state.engine.store(), &id).await?;
    let request: ResolveRequest = from_json(body)?;
    let audit = AuditTexts::read(request.actor.as_deref(), &request.reason, &headers)?;
    let amend = request.amend;
    let verdict = Verdict { resolution: request.resolution()?, force: false, amend };
    Ok(settle(&state, id, verdict, audit).await?.response())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReleaseRequest {
    reason: String,
    #[serde(default)]
    force: bool,
    actor: Option<String>,
}

pub(super) async fn release(
    State(state): State<AdminState>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> AdminResult {
    let id = listing::find(&**state.engine.store(), &id).await?;
    let request: ReleaseRequest = from_json(body)?;
    let audit = AuditTexts::read(request.actor.as_deref(), &request.reason, &headers)?;
    let verdict = Verdict { resolution: Resolution::Release, force: request.force, amend: false };
    Ok(settle(&state, id, verdict, audit).await?.response())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ParkRequest {
    reason: String,
    actor: Option<String>,
}

pub(super) async fn park(
    State(state): State<AdminState>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> AdminResult {
    let id = listing::find(&**state.engine.store(), &id).await?;
    let request: ParkRequest = from_json(body)?;
    let audit = AuditTexts::read(request.actor.as_deref(), &request.reason, &headers)?;
    let verdict = Verdict { resolution: Resolution::Park, force: false, amend: false };
    Ok(settle(&state, id, verdict, audit).await?.response())
}

/// A part of the audit trail, the newest entries first.
pub(super) struct AuditPage {
    pub(super) entries: Vec<AuditEntry>,
    /// The value of `before` for the next page; `None` if this is the last one.
    pub(super) next: Option<u64>,
}

/// Reads the part of the audit trail that the parameters `before` and `limit` select.
pub(super) async fn audit_page(state: &AdminState, query: Pairs) -> Result<AuditPage, Problem> {
    let (mut before, mut most) = (None, ListQuery::default().limit);
    for (name, text) in pairs(query, &["before", "limit"])? {
        match name.as_str() {
            "limit" => most = limit(&name, &text)?,
            _ => {
                let number = text.parse::<u64>();
                let what = format!("before: {text:?} is not the number of an entry.");
                before = Some(number.map_err(|_| Problem::bad_request(what))?);
            }
        }
    }
    let entries = state.engine.store().audit(before, most).await;
    let entries = entries.map_err(|error| Problem::store_read(&error))?;
    let next = entries.last().filter(|last| entries.len() == most && last.number > 1);
    let next = next.map(|last| last.number);
    Ok(AuditPage { entries, next })
}

pub(super) async fn audit(State(state): State<AdminState>, query: Pairs) -> AdminResult {
    let AuditPage { entries, next } = audit_page(&state, query).await?;
    Ok(view::json(&json!({
        "entries": entries.iter().map(view::audit_entry).collect::<Vec<_>>(),
        "next": next,
    })))
}

/// Reads a record as far as it can be opened: an operator sees and changes a record also if its response cannot be opened.
async fn read(state: &AdminState, id: RecordId) -> Result<Option<ReadRecord>, Problem> {
    seal::read(state, id).await.map_err(|error| Problem::store_read(&error))
}

/// The same for a record that must exist.
pub(super) async fn read_existing(state: &AdminState, id: RecordId) -> Result<ReadRecord, Problem> {
    read(state, id).await?.ok_or_else(|| Problem::no_record(id))
}

/// The settings of the route that a record's operation belongs to.
pub(super) fn settings_of(state: &AdminState, record: &Record) -> Settings {
    let (method, path) = request_of_operation(record.label.operation());
    state.settings(&method, path)
}

/// The method and the path of an operation.
pub(super) fn request_of_operation(operation: &str) -> (Method, &str) {
    let operation = operation.strip_prefix(SHADOW_OPERATION).unwrap_or(operation);
    let (method, path) = operation.split_once(' ').unwrap_or_default();
    // A call of a tool has the name of the tool after the path.
    let path = path.split_once('#').map_or(path, |(path, _)| path);
    (method.parse().unwrap_or_default(), path)
}

/// Returns true for the record of a request that was only observed. It protects nothing, and never needs an operator.
pub(super) fn is_shadow(operation: &str) -> bool {
    operation.starts_with(SHADOW_OPERATION)
}

/// The result of a change by an operator.
pub(super) struct Settled {
    /// The state before it.
    pub(super) from: StateName,
    pub(super) view: RecordView,
}

impl Settled {
    fn response(&self) -> Response {
        let mut view = self.view.json();
        if let Value::Object(members) = &mut view {
            members.insert("from".to_owned(), self.from.as_str().into());
        }
        view::json(&view)
    }
}

/// Changes a record as an operator decided, and writes the audit trail.
pub(super) async fn settle(
    state: &AdminState,
    id: RecordId,
    verdict: Verdict,
    audit: AuditTexts,
) -> Result<Settled, Problem> {
    let AuditTexts { actor, reason } = audit;
    let record = read_existing(state, id).await?.record;
    if id == ID_SECRET_RECORD {
        return Err(Problem::not_resolvable(
            id,
            "It marks the store as that of one id secret, and is no request: no operator changes it.",
        ));
    }
    if is_shadow(record.label.operation()) {
        return Err(Problem::not_resolvable(
            id,
            "Its route only observes (shadow): it protects nothing, and needs no operator.",
        ));
    }
    // The retention is that of the route.
    let retention = settings_of(state, &record).policy().retention();
    let Verdict { resolution, force, amend } = verdict.clone();
    let command =
        Resolve { resolution, retention, force, amend, actor: actor.clone(), reason: reason.clone() };
    let store = state.engine.store();
    match state.engine.resolve(id, command).await.map_err(|error| Problem::store(&error))? {
        Outcome::Resolved { from } => {
            // The record was changed, so this error must not report that nothing was.
            let found = seal::read(state, id).await.map_err(|error| Problem::store(&error))?;
            let found =
                found.ok_or_else(|| Problem::internal("The record was changed, and has ended since."))?;
            let record = &found.record;
            let to = record.state_name(store.now());
            tracing::info!(
                target: OPERATOR,
                record = %id,
                %from,
                %to,
                amended = amend,
                forced = force,
                actor,
                reason,
                "an operator changed a record"
            );
            Ok(Settled { from, view: found.view(id, store.now(), Detail::Whole) })
        }
        Outcome::NotResolvable { state: None } => Err(Problem::no_record(id)),
        Outcome::NotResolvable { state: Some(found) } => {
            // A response of an operator can be changed, one of the service cannot.
            let by_operator = read_existing(state, id).await?.record.by_operator;
            Err(Problem::not_resolvable(id, why_not(found, by_operator, &verdict)))
        }
        other => Err(Problem::internal(format!("The store answered {other:?} to a resolution."))),
    }
}

/// The reason why a verdict was refused. Members of requests are between backticks: the command line shows its flags instead.
pub(super) fn why_not(state: StateName, by_operator: bool, verdict: &Verdict) -> String {
    let is_park = verdict.resolution == Resolution::Park;
    match state {
        StateName::Completed | StateName::Tombstone if by_operator => format!(
            "An operator resolved it already: it is {state}. To replace that response, which clients may have got, resolve it with \
             `amend`; to withdraw it, park it."
        ),
        StateName::Completed | StateName::Tombstone => format!(
            "It is {state} by its service's own response, which never changes before its retention is over. Only a response of an \
             operator can be amended or parked."
        ),
        StateName::Unknown if is_park => {
            "It is unknown already: nothing executes until it is resolved.".to_owned()
        }
        StateName::Unknown | StateName::Abandoned if verdict.amend => {
            format!("It is {state}: there is no response of an operator to amend. Resolve it without `amend`.")
        }
        StateName::Abandoned => {
            "It is abandoned: its owner's lease is over, and its outcome is unknown. Resolve it.".to_owned()
        }
        StateName::Released if verdict.amend && !by_operator => {
            "Its owner released it: there is no response of an operator to amend. Park it, and then resolve it.".to_owned()
        }
        StateName::Released => {
            "The key is released already: the next request with it executes, or continues after the recorded steps. To block it, \
             park it."
                .to_owned()
        }
        StateName::InProgress if is_park => {
            "Its owner has a lease and may be running. Wait until the request or its lease ends.".to_owned()
        }
        StateName::InProgress => "A request is in progress and has a lease. Wait until the request or its lease ends. Or release it \
             with `force`, if you know that its owner is gone: if it is not, its effect may happen in addition to that of \
             the next request."
            .to_owned(),
        state => format!("It is {state}."),
    }
}

impl ResolveRequest {
    fn resolution(self) -> Result<Resolution, Problem> {
        let has_response = self.status.is_some()
            || self.headers.is_some()
            || self.body.is_some()
            || self.body_base64.is_some();
        match (self.outcome, self.tombstone, has_response) {
            (OutcomeName::Released, false, false) => Ok(Resolution::Release),
            (OutcomeName::Released, ..) => Err(Problem::bad_request(
                "outcome: a released key has no response; leave status, headers, body and tombstone out.",
            )),
            (OutcomeName::Completed, true, false) => Ok(Resolution::Complete(None)),
            (OutcomeName::Completed, true, true) => Err(Problem::bad_request(
                "tombstone: a tombstone has no response; leave status, headers and body out.",
            )),
            (OutcomeName::Completed, false, _) => {
                self.response().map(|response| Resolution::Complete(Some(response)))
            }
        }
    }

    fn response(self) -> Result<StoredResponse, Problem> {
        let Some(status) = self.status else {
            return Err(Problem::bad_request(
                "status: give the response that retries get (status, headers, body), or set tombstone to true if the response is lost.",
            ));
        };
        let body = match (self.body, self.body_base64) {
            (Some(_), Some(_)) => {
                return Err(Problem::bad_request("body: there is body_base64, too; send one of them."));
            }
            (Some(text), None) => Bytes::from(text),
            (None, Some(coded)) => match STANDARD.decode(coded) {
                Ok(bytes) => bytes.into(),
                Err(error) => return Err(Problem::bad_request(format!("body_base64: {error}."))),
            },
            (None, None) => Bytes::new(),
        };
        let headers = match self.headers {
            None => Vec::new(),
            Some(Fields::Pairs(pairs)) => pairs,
            Some(Fields::Object(object)) => object.into_iter().collect(),
        };
        stored_response(status, &headers, body)
    }
}

/// The response that an operator gives to an operation.
pub(super) fn stored_response(
    status: u16,
    headers: &[(String, String)],
    body: Bytes,
) -> Result<StoredResponse, Problem> {
    let status = StatusCode::from_u16(status).ok().filter(|s| (200..=599).contains(&s.as_u16()));
    let status = status.ok_or_else(|| Problem::bad_request("status: it must be from 200 to 599."))?;
    if matches!(status.as_u16(), 204 | 205 | 304) && !body.is_empty() {
        return Err(Problem::bad_request(format!("body: a response with the status {status} has no body.")));
    }
    let headers = headers.iter().map(|(name, value)| field(name, value)).collect::<Result<Vec<_>, _>>()?;
    let headers: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
    StoredResponse::new(status.as_u16(), &headers, &[body], &[])
        .map_err(|error| Problem::too_large(format!("The response cannot be stored: {error}.")))
}

fn field(name: &str, value: &str) -> Result<(HeaderName, HeaderValue), Problem> {
    let bad = |what: &dyn std::fmt::Display| Problem::bad_request(format!("headers: {what}."));
    let header: HeaderName =
        name.parse().map_err(|_| bad(&format!("{name:?} is not the name of a field")))?;
    Settings::default().with_stored_headers([header.clone()]).map_err(|error| bad(&error))?;
    let value = HeaderValue::from_str(value)
        .map_err(|_| bad(&format!("the value of {name} has characters that a field cannot contain")))?;
    Ok((header, value))
}

pub(super) fn limit(name: &str, text: &str) -> Result<usize, Problem> {
    match text.parse() {
        Ok(limit @ 1..=limits::MAX_PAGE_RECORDS) => Ok(limit),
        _ => {
            let most = limits::MAX_PAGE_RECORDS;
            Err(Problem::bad_request(format!("{name}: {text:?} is not a number from 1 to {most}.")))
        }
    }
}

/// The actor and the reason of a change, for the audit trail.
pub(super) struct AuditTexts {
    pub(super) actor: String,
    pub(super) reason: String,
}

impl AuditTexts {
    /// Reads them from a request. Without an actor in its body, the header field counts.
    pub(super) fn read(actor: Option<&str>, reason: &str, headers: &HeaderMap) -> Result<Self, Problem> {
        let field = headers.get("oncegate-actor").map(|value| value.to_str());
        let actor = match (actor, field) {
            (Some(actor), _) => audit_text("actor", actor)?,
            (None, Some(Ok(actor))) => audit_text("Oncegate-Actor", actor)?,
            (None, Some(Err(_))) => {
                return Err(Problem::bad_request(
                    "Oncegate-Actor: it must be ASCII; or put it into the body.",
                ));
            }
            (None, None) => "admin".to_owned(),
        };
        Ok(Self { actor, reason: audit_text("reason", reason)? })
    }
}

/// Checks a text that is written into the audit trail and shown on terminals.
fn audit_text(name: &str, text: &str) -> Result<String, Problem> {
    let text = oncegate_engine::audit_text(text);
    text.map(str::to_owned).map_err(|error| Problem::bad_request(format!("{name}: {error}.")))
}

/// The parameters of a query. Unknown and repeated names are refused.
pub(super) fn pairs(query: Pairs, names: &[&str]) -> Result<Vec<(String, String)>, Problem> {
    let Query(pairs) = query.map_err(|error| Problem::bad_request(error.body_text()))?;
    for (at, (name, _)) in pairs.iter().enumerate() {
        if !names.contains(&name.as_str()) {
            let hint = did_you_mean(name, names.iter().copied());
            return Err(Problem::bad_request(format!("there is no parameter {name:?}{hint}")));
        }
        if pairs.iter().skip(at + 1).any(|(other, _)| other == name) {
            return Err(Problem::bad_request(format!("{name}: it was given twice.")));
        }
    }
    // A form sends empty values for fields that were left out.
    Ok(pairs.into_iter().filter(|(_, text)| !text.is_empty()).collect())
}

pub(super) fn from_json<T: DeserializeOwned>(body: Body) -> Result<T, Problem> {
    let body = body.map_err(|error| match error.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            Problem::too_large("At most 64 KiB are accepted, and 16 MiB to resolve a record.")
        }
        _ => Problem::bad_request(error.body_text()),
    })?;
    serde_json::from_slice(&body).map_err(|error| Problem::bad_request(format!("The body: {error}.")))
}
