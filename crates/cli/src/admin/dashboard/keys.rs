//! The lists of records, and the search for a key.

use askama::Template;
use axum::extract::{Extension, State};
use http::StatusCode;
use oncegate_core::{ListQuery, RecordId, StateName, StateSet, Timestamp};

use super::access::{Access, FormFields};
use super::format::{duration, moment, number, query_text};
use super::{Frame, PageResult, Section, page, page_with, redirect};
use crate::admin::keys::{FILTERS, Pairs, Selection, pairs};
use crate::admin::listing::{self, MIN_PREFIX, Period, TimeListing, TimeOrder, TimePlace};
use crate::admin::problem::Problem;
use crate::admin::view::RecordView;
use crate::admin::{AdminState, searched_key};

/// The records of a page.
const PAGE: usize = 50;

/// A row of a list.
pub(super) struct KeyRow {
    pub(super) record: String,
    pub(super) state: &'static str,
    pub(super) operation: String,
    pub(super) caller: String,
    pub(super) age: String,
    pub(super) changed_at: String,
    pub(super) attempts: u32,
    pub(super) response: String,
    pub(super) by_operator: bool,
    /// The time until the end of the retention, and true if it is near.
    pub(super) left: String,
    pub(super) is_urgent: bool,
}

/// The time before the end of the retention of an unsettled record from which it is marked.
const URGENT: u64 = 4 * 3600;

impl KeyRow {
    fn new(view: RecordView) -> Self {
        Self {
            state: view.state,
            age: duration(view.age_seconds),
            changed_at: moment(&view.changed_at),
            attempts: view.attempts,
            response: view.response.map_or_else(String::new, |response| response.status.to_string()),
            by_operator: view.by_operator,
            left: duration(view.expires_in_seconds),
            is_urgent: view.expires_in_seconds < URGENT,
            record: view.record,
            operation: view.operation,
            caller: view.caller,
        }
    }
}

#[derive(Template)]
#[template(path = "keys.html")]
struct KeysPage {
    frame: Frame,
    filters: Filters,
    rows: Vec<KeyRow>,
    totals: Vec<(&'static str, String)>,
    total: String,
    unreadable: Vec<String>,
    is_complete: bool,
    /// True if this is not the first page.
    is_continued: bool,
    first_page: String,
    next_page: Option<String>,
    error: String,
}

/// The filters as they were given.
#[derive(Default)]
struct Filters(Vec<(String, String)>);

impl Filters {
    fn get(&self, name: &str) -> &str {
        self.0.iter().find(|(own, _)| own == name).map_or("", |(_, value)| value)
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// True if one of the filters is used that the form shows on demand.
    fn has_more(&self) -> bool {
        ["caller", "key_tag", "min_age", "until"].iter().any(|name| !self.get(name).is_empty())
    }

    fn states(&self) -> impl Iterator<Item = (&'static str, bool)> {
        let chosen = self.get("state").to_owned();
        let names = ["unsettled"].into_iter().chain(StateName::ALL.map(StateName::as_str));
        names.map(move |name| (name, name == chosen))
    }

    /// The address of the list with these filters.
    fn address(&self, base: &str, after: Option<TimePlace>) -> String {
        let pairs = self.0.iter().map(|(name, value)| format!("{name}={}", query_text(value)));
        let after = after.map(|(at, id)| format!("{AFTER}={}-{id}", at.as_millis()));
        let query: Vec<_> = pairs.chain(after).collect();
        if query.is_empty() { base.to_owned() } else { format!("{base}?{}", query.join("&")) }
    }
}

/// The parameter with the place of the last record of the previous page.
const AFTER: &str = "after";

fn place(text: &str) -> Result<TimePlace, Problem> {
    let (at, id) = text.split_once('-').unwrap_or_default();
    let place = at.parse().ok().zip(RecordId::from_hex(id));
    let place = place.map(|(at, id)| (Timestamp::from_millis(at), id));
    place.ok_or_else(|| Problem::bad_request(format!("{AFTER}: {text:?} is not the end of a page.")))
}

/// A list that a request asks for.
#[derive(Default)]
struct ListRequest {
    selection: Selection,
    after: Option<TimePlace>,
    filters: Filters,
}

impl ListRequest {
    fn read(&mut self, query: Pairs, now: Timestamp) -> Result<(), Problem> {
        let names: Vec<_> = FILTERS.into_iter().filter(|name| *name != "limit").chain([AFTER]).collect();
        let mut result = Ok(());
        for (name, text) in pairs(query, &names)? {
            let text = text.trim().to_owned();
            let read = if name == AFTER {
                place(&text).map(|place| self.after = Some(place))
            } else {
                self.selection.add(&name, &text, now)
            };
            if name != AFTER {
                self.filters.0.push((name, text));
            }
            result = result.and(read);
        }
        result
    }
}

pub(super) async fn list(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    query: Pairs,
) -> PageResult {
    let mut request = ListRequest::default();
    let read = request.read(query, state.engine.store().now());
    let ListRequest { selection: Selection { mut query, period }, after, filters } = request;
    query.limit = PAGE;
    let listed = match read {
        Ok(()) => listing::by_time(&state, query, period, TimeOrder::NewestFirst, after).await,
        Err(problem) => Err(problem),
    };
    let (listing, status, error) = match listed {
        Ok(listing) => (listing, StatusCode::OK, String::new()),
        Err(problem) if problem.status() == StatusCode::BAD_REQUEST => (
            TimeListing { is_complete: true, ..TimeListing::default() },
            problem.status(),
            problem.detail().to_owned(),
        ),
        Err(problem) => return Err(problem.into()),
    };
    let last = listing.records.last().filter(|_| listing.has_more).map(|(place, _)| *place);
    let template = KeysPage {
        frame: Frame::new(&state, &access, Section::Keys, "Keys"),
        total: number(listing.total()),
        totals: totals(&listing),
        unreadable: listing.unreadable.iter().map(RecordId::to_string).collect(),
        is_complete: listing.is_complete,
        is_continued: after.is_some(),
        first_page: filters.address("/keys", None),
        next_page: last.map(|last| filters.address("/keys", Some(last))),
        rows: listing.records.into_iter().map(|(_, view)| KeyRow::new(view)).collect(),
        filters,
        error,
    };
    Ok(page_with(status, &template))
}

/// The numbers of records in the order of the states.
fn totals(listing: &TimeListing) -> Vec<(&'static str, String)> {
    let states = StateName::ALL.into_iter().map(StateName::as_str);
    states.filter_map(|state| Some((state, number(*listing.totals.get(state)?)))).collect()
}

#[derive(Template)]
#[template(path = "stuck.html")]
struct StuckPage {
    frame: Frame,
    rows: Vec<KeyRow>,
    total: String,
    is_complete: bool,
    is_continued: bool,
    next_page: Option<String>,
    unreadable: Vec<String>,
}

/// The records that wait for an operator, the oldest first.
pub(super) async fn stuck(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    query: Pairs,
) -> PageResult {
    let mut after = None;
    for (_, text) in pairs(query, &[AFTER])? {
        after = Some(place(&text)?);
    }
    let mut query = ListQuery::default();
    query.states = StateSet::UNSETTLED;
    query.limit = PAGE;
    let listing = listing::by_time(&state, query, Period::default(), TimeOrder::OldestFirst, after).await?;
    let last = listing.records.last().filter(|_| listing.has_more).map(|(place, _)| *place);
    let mut frame = Frame::new(&state, &access, Section::Stuck, "Stuck");
    if listing.is_complete {
        // Newer than the number that is counted every few seconds.
        frame.stuck = Some(listing.total()).filter(|total| *total > 0);
    }
    Ok(page(&StuckPage {
        frame,
        total: number(listing.total()),
        is_complete: listing.is_complete,
        is_continued: after.is_some(),
        next_page: last.map(|last| Filters::default().address("/stuck", Some(last))),
        unreadable: listing.unreadable.iter().map(RecordId::to_string).collect(),
        rows: listing.records.into_iter().map(|(_, view)| KeyRow::new(view)).collect(),
    }))
}

#[derive(Template)]
#[template(path = "not_found.html")]
struct NotFoundPage {
    frame: Frame,
    is_complete: bool,
}

/// Finds a record by the beginning of its identifier, or all records of a key. The key is in the form and in no address,
/// because addresses are written to logs and histories.
pub(super) async fn search(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    Extension(fields): Extension<FormFields>,
) -> PageResult {
    let text = fields.get("q").trim();
    if text.is_empty() {
        return Ok(redirect("/keys"));
    }
    if looks_like_a_record(text) {
        match listing::find(&state, text).await {
            Ok(id) => return Ok(redirect(&format!("/keys/{id}"))),
            // A key may consist of hexadecimal digits, too.
            Err(problem) if problem.status() == StatusCode::NOT_FOUND => {}
            Err(problem) => return Err(problem.into()),
        }
    }
    let key = searched_key(text).map_err(|error| Problem::bad_request(format!("key: {error}.")))?;
    let tag = state.engine.ids().key_tag(&key);
    let mut query = ListQuery::default();
    (query.key, query.limit) = (Some(tag), 2);
    let listing = listing::by_time(&state, query, Period::default(), TimeOrder::NewestFirst, None).await?;
    Ok(match &listing.records[..] {
        [] => {
            let frame = Frame::new(&state, &access, Section::Keys, "No such key");
            page_with(StatusCode::NOT_FOUND, &NotFoundPage { frame, is_complete: listing.is_complete })
        }
        [(_, only)] if listing.is_complete => redirect(&format!("/keys/{}", only.record)),
        _ => redirect(&format!("/keys?key_tag={tag}")),
    })
}

fn looks_like_a_record(text: &str) -> bool {
    let digits = text.strip_prefix("urn:oncegate:record:").unwrap_or(text);
    (MIN_PREFIX..=64).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}
