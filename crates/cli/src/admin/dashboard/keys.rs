//! The lists of records, and the search for a key.

use askama::Template;
use axum::extract::{Extension, State};
use axum::response::Response;
use http::StatusCode;
use http::header::HeaderMap;
use oncegate_core::{KeyTag, ListQuery, RecordId, StateName, StateSet, TimePlace, Timestamp};

use super::access::{Access, FormFields};
use super::format::{duration, moment, number, query_text, second};
use super::waiting::{ASKED, WaitNote, redirect_page, still_waiting, with_ticket};
use super::{Frame, PageResult, Section, page, page_with, redirect};
use crate::admin::keys::{FILTERS, Pairs, Selection, pairs};
use crate::admin::listing::{MIN_PREFIX, RECORD_URN, TimeListing, TimeOrder, TimeQuery};
use crate::admin::problem::Problem;
use crate::admin::surveys::{Answer, AsOf, Hits, Search, Ticket};
use crate::admin::view::{self, RecordView};
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
    unreadable: Option<UnreadableNote>,
    is_complete: bool,
    /// True if this is not the first page.
    is_continued: bool,
    first_page: String,
    next_page: Option<String>,
    error: String,
    as_of: Option<AsOfNote>,
    wait: Option<WaitNote>,
    /// True if the page has waited for its records.
    has_waited: bool,
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
    ticket: Option<Ticket>,
    filters: Filters,
}

impl ListRequest {
    fn read(&mut self, query: Pairs, now: Timestamp) -> Result<(), Problem> {
        let names = FILTERS.into_iter().filter(|name| *name != "limit");
        let names: Vec<_> = names.chain([AFTER, ASKED]).collect();
        let mut result = Ok(());
        for (name, text) in pairs(query, &names)? {
            let text = text.trim().to_owned();
            if name == ASKED {
                self.ticket = Ticket::read(&text);
                continue;
            }
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
    headers: HeaderMap,
    query: Pairs,
) -> PageResult {
    let mut request = ListRequest::default();
    let read = request.read(query, state.engine.store().now());
    let ListRequest { selection: Selection { mut query, period }, after, ticket, filters } = request;
    query.limit = PAGE;
    let address = filters.address("/keys", after);
    let query = TimeQuery { list: query, period, order: TimeOrder::NewestFirst, after };
    let listed = match read {
        Ok(()) => listed(&state, &query, &address, ticket).await,
        Err(problem) => Err(problem),
    };
    let (listed, status, error) = match listed {
        Ok(listed) => (listed, StatusCode::OK, String::new()),
        Err(problem) if problem.status() == StatusCode::BAD_REQUEST => {
            (Listed::default(), problem.status(), problem.detail().to_owned())
        }
        Err(problem) => return Err(problem.into()),
    };
    if let (Some(_), Some(response)) = (&listed.wait, still_waiting(&headers, ticket)) {
        return Ok(response);
    }
    let Listed { listing, as_of, wait } = listed;
    let template = KeysPage {
        frame: Frame::new(&state, &access, Section::Keys, "Keys").waiting(wait.as_ref()),
        total: number(listing.total()),
        totals: totals(&listing),
        unreadable: UnreadableNote::of(&listing),
        is_complete: listing.is_complete,
        is_continued: after.is_some(),
        first_page: filters.address("/keys", None),
        next_page: listing.next.map(|next| filters.address("/keys", Some(next))),
        rows: listing.records.into_iter().map(|(_, view)| KeyRow::new(view)).collect(),
        filters,
        error,
        as_of,
        has_waited: ticket.is_some() && wait.is_none(),
        wait,
    };
    Ok(page_with(status, &template))
}

/// The records of a page.
struct Listed {
    listing: TimeListing,
    /// Set if the numbers and places are not those of this moment.
    as_of: Option<AsOfNote>,
    /// Set if the records are being counted, and there are none to show.
    wait: Option<WaitNote>,
}

impl Default for Listed {
    fn default() -> Self {
        Self { listing: TimeListing { is_complete: true, ..TimeListing::default() }, as_of: None, wait: None }
    }
}

async fn listed(
    state: &AdminState,
    query: &TimeQuery,
    address: &str,
    ticket: Option<Ticket>,
) -> Result<Listed, Problem> {
    match state.surveys.places(address, query, state.engine.store(), ticket).await? {
        Answer::Found(places, as_of) => Ok(Listed {
            listing: query.read(state, &places).await?,
            as_of: as_of.map(|as_of| AsOfNote::new(as_of, address)),
            wait: None,
        }),
        Answer::Running(ticket) => Ok(Listed {
            wait: Some(WaitNote::new("The records are being counted", address, ticket)),
            ..Listed::default()
        }),
    }
}

/// A note that the numbers of a page, and the choice of its records, are those of an earlier time.
pub(super) struct AsOfNote {
    /// The time of day.
    pub(super) time: String,
    pub(super) is_renewing: bool,
    pub(super) is_before_change: bool,
    /// The address of the page.
    pub(super) address: String,
}

impl AsOfNote {
    pub(super) fn new(as_of: AsOf, address: &str) -> Self {
        Self {
            time: second(&view::time(as_of.at)),
            is_renewing: as_of.is_renewing,
            is_before_change: as_of.is_before_change,
            address: address.to_owned(),
        }
    }
}

/// A note that records cannot be read.
struct UnreadableNote {
    /// The subject of the sentence, with the number.
    records: String,
    /// The first of them.
    ids: Vec<String>,
    is_cut: bool,
}

impl UnreadableNote {
    fn of(listing: &TimeListing) -> Option<Self> {
        let total = listing.unreadable_total;
        let records = match total {
            0 => return None,
            1 => "1 record".to_owned(),
            _ => format!("{} records", number(total)),
        };
        let ids: Vec<_> = listing.unreadable.iter().map(RecordId::to_string).collect();
        Some(Self { records, is_cut: (ids.len() as u64) < total, ids })
    }
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
    unreadable: Option<UnreadableNote>,
    as_of: Option<AsOfNote>,
    wait: Option<WaitNote>,
    has_waited: bool,
}

/// The records that wait for an operator, the oldest first.
pub(super) async fn stuck(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    headers: HeaderMap,
    query: Pairs,
) -> PageResult {
    let (mut after, mut ticket) = (None, None);
    for (name, text) in pairs(query, &[AFTER, ASKED])? {
        if name == ASKED {
            ticket = Ticket::read(&text);
        } else {
            after = Some(place(&text)?);
        }
    }
    let mut query = ListQuery::default();
    query.states = StateSet::UNSETTLED;
    query.limit = PAGE;
    let address = Filters::default().address("/stuck", after);
    let query = TimeQuery { list: query, order: TimeOrder::OldestFirst, after, ..TimeQuery::default() };
    let Listed { listing, as_of, wait } = listed(&state, &query, &address, ticket).await?;
    if let (Some(_), Some(response)) = (&wait, still_waiting(&headers, ticket)) {
        return Ok(response);
    }
    let mut frame = Frame::new(&state, &access, Section::Stuck, "Stuck").waiting(wait.as_ref());
    if listing.is_complete && as_of.is_none() && wait.is_none() {
        // Newer than the number that is counted every few seconds.
        frame.stuck = Some(listing.total()).filter(|total| *total > 0);
    }
    Ok(page(&StuckPage {
        frame,
        total: number(listing.total()),
        is_complete: listing.is_complete,
        is_continued: after.is_some(),
        next_page: listing.next.map(|next| Filters::default().address("/stuck", Some(next))),
        as_of,
        unreadable: UnreadableNote::of(&listing),
        rows: listing.records.into_iter().map(|(_, view)| KeyRow::new(view)).collect(),
        has_waited: ticket.is_some() && wait.is_none(),
        wait,
    }))
}

#[derive(Template)]
#[template(path = "not_found.html")]
struct NotFoundPage {
    frame: Frame,
    is_complete: bool,
    unreadable: u64,
    has_waited: bool,
}

#[derive(Template)]
#[template(path = "searching.html")]
struct SearchingPage {
    frame: Frame,
    wait: Option<WaitNote>,
}

/// A page that only says that the store is being searched.
pub(super) fn searching(state: &AdminState, access: &Access, address: &str, ticket: Ticket) -> Response {
    let wait = Some(WaitNote::new("The store is being searched", address, ticket));
    let frame = Frame::new(state, access, Section::Keys, "Search").waiting(wait.as_ref());
    page(&SearchingPage { frame, wait })
}

/// Finds a record by the beginning of its identifier, or all records of a key. The key is in the form and in no address,
/// because addresses are written to logs and histories.
pub(super) async fn search(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    headers: HeaderMap,
    Extension(fields): Extension<FormFields>,
) -> PageResult {
    let text = fields.get("q").trim();
    if text.is_empty() {
        return Ok(redirect("/keys"));
    }
    let mut beginning = looks_like_a_record(text).then(|| text.to_owned());
    if let Some(id) = beginning.as_deref().and_then(whole_record) {
        let is_named = text.starts_with(RECORD_URN);
        if is_named || state.rows.read(id).await.map_err(|error| Problem::store_read(&error))?.is_some() {
            return Ok(redirect(&format!("/keys/{id}")));
        }
        // A key may consist of 64 hexadecimal digits, and must not come into an address.
        beginning = None;
    }
    let store = state.engine.store();
    let key = searched_key(text).map_err(|error| Problem::bad_request(format!("key: {error}.")))?;
    let key = state.ids().await?.key_tag(&key);
    let search = Search { beginning, key: Some(key) };
    match state.surveys.search(search, store, None).await? {
        Answer::Found(hits, _) => Ok(show_hits(&state, &access, &headers, (key, None), *hits)),
        Answer::Running(ticket) => Ok(redirect(&with_ticket(&found_address(key), ticket))),
    }
}

/// The page of a search that takes its time.
fn found_address(key: KeyTag) -> String {
    format!("/keys/found?key_tag={key}")
}

/// The result of a search that took longer than a page may.
pub(super) async fn found(
    State(state): State<AdminState>,
    Extension(access): Extension<Access>,
    headers: HeaderMap,
    query: Pairs,
) -> PageResult {
    let (mut key, mut ticket) = (None, None);
    for (name, text) in pairs(query, &["key_tag", ASKED])? {
        if name == ASKED {
            ticket = Ticket::read(&text);
        } else {
            key = KeyTag::from_hex(&text);
        }
    }
    let gone = || Problem::bad_request("The search is not known any more. Search again.");
    let key = key.ok_or_else(gone)?;
    let Some(ticket) = ticket else {
        // A page that could not be read loads itself again without its ticket. The list of the key's records is its answer then.
        return Ok(redirect_page(&headers, &format!("/keys?key_tag={key}")));
    };
    match state.surveys.searched(key, ticket).await.ok_or_else(gone)?? {
        Answer::Found(hits, _) => Ok(show_hits(&state, &access, &headers, (key, Some(ticket)), *hits)),
        Answer::Running(ticket) => Ok(still_waiting(&headers, Some(ticket))
            .unwrap_or_else(|| searching(&state, &access, &found_address(key), ticket))),
    }
}

/// Leads to the records that a search has found.
fn show_hits(
    state: &AdminState,
    access: &Access,
    headers: &HeaderMap,
    (key, ticket): (KeyTag, Option<Ticket>),
    hits: Hits,
) -> Response {
    match hits {
        Hits::One(id) => redirect_page(headers, &format!("/keys/{id}")),
        Hits::Several => redirect_page(headers, &format!("/keys?key_tag={key}")),
        Hits::None { is_complete, unreadable } => {
            let frame = Frame::new(state, access, Section::Keys, "No such key");
            let has_waited = ticket.is_some();
            page_with(StatusCode::NOT_FOUND, &NotFoundPage { frame, is_complete, unreadable, has_waited })
        }
    }
}

/// The record whose whole identifier this is.
fn whole_record(text: &str) -> Option<RecordId> {
    RecordId::from_hex(text.strip_prefix(RECORD_URN).unwrap_or(text))
}

fn looks_like_a_record(text: &str) -> bool {
    let digits = text.strip_prefix(RECORD_URN).unwrap_or(text);
    (MIN_PREFIX..=64).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}
