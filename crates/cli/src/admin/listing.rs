//! Finds records for operators: the newest ones first, with totals, and one record by the beginning of its identifier.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use axum::response::Response;
use futures_util::StreamExt as _;
use futures_util::stream::{self, FuturesUnordered};
use oncegate_core::{
    KeyTag, ListPage, ListQuery, RecordId, StateName, StateSet, Store, StoreErrorKind, SurveyQuery,
    TimePlace, Timestamp, limits,
};
use oncegate_http::SHADOW_OPERATION;
use serde_json::json;
use tokio::time::Instant;

use super::AdminState;
use super::problem::Problem;
use super::survey::survey;
use super::surveys::Hits;
use super::view::{self, Detail, RecordView};

/// Limits the time for which one request may walk through the store.
pub(super) const WALK_TIMEOUT: Duration = Duration::from_secs(5);

/// The most unreadable records that one response names.
const MAX_UNREADABLE: usize = 100;

/// The most unreadable records that are counted.
const MAX_COUNTED_UNREADABLE: usize = 100_000;

/// The prefix of a record in problems.
pub(super) const RECORD_URN: &str = "urn:oncegate:record:";

/// The records of one list that are asked for at the same time. Those of all lists have a limit, too.
const READS_AT_ONCE: usize = 4;

/// The fewest digits by which a record may be named.
pub(super) const MIN_PREFIX: usize = 6;

/// The period in which records came into their state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Period {
    pub(super) since: Option<Timestamp>,
    /// Not included.
    pub(super) until: Option<Timestamp>,
}

impl Period {
    pub(super) fn includes(&self, at: Timestamp) -> bool {
        self.since.is_none_or(|since| since <= at) && self.until.is_none_or(|until| at < until)
    }
}

/// Reads a time, or a duration before now.
pub(super) fn moment(text: &str, now: Timestamp) -> Result<Timestamp, String> {
    let ago = || {
        let ago = crate::config::duration(text).ok()?;
        let ago = u64::try_from(ago.as_millis()).ok()?;
        Some(Timestamp::from_millis(now.as_millis().saturating_sub(ago)))
    };
    view::parse_time(text).or_else(ago).ok_or_else(|| {
        format!(
            "is not a time; write one in UTC, such as 2026-02-28T12:34 or 2026-02-28, or the time since then, such as 30m (now \
             it is {})",
            view::time(now)
        )
    })
}

/// The order of a listing by the time at which records came into their state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum TimeOrder {
    #[default]
    NewestFirst,
    OldestFirst,
}

/// A question about the records in the order of time.
#[derive(Clone, Debug, Default)]
pub(super) struct TimeQuery {
    pub(super) list: ListQuery,
    pub(super) period: Period,
    pub(super) order: TimeOrder,
    pub(super) after: Option<TimePlace>,
}

/// The first places in the order of time, and the numbers of all selected records by state.
#[derive(Debug, Default)]
pub(super) struct Places {
    places: Vec<TimePlace>,
    /// The first unreadable records, and the number of all that were found, up to [`MAX_COUNTED_UNREADABLE`].
    unreadable: Vec<RecordId>,
    unreadable_total: u64,
    totals: BTreeMap<&'static str, u64>,
    has_more: bool,
    /// True if the whole store was read.
    pub(super) is_complete: bool,
}

/// A part of the records in the order of time, and the number of all selected records by state.
#[derive(Debug, Default)]
pub(super) struct TimeListing {
    pub(super) records: Vec<(TimePlace, RecordView)>,
    /// The first unreadable records.
    pub(super) unreadable: Vec<RecordId>,
    /// The number of all that were found. There may be more: a survey need not read a record as a whole.
    pub(super) unreadable_total: u64,
    pub(super) totals: BTreeMap<&'static str, u64>,
    /// The place after which more records follow in this order.
    pub(super) next: Option<TimePlace>,
    /// True if the whole store was read.
    pub(super) is_complete: bool,
    pub(super) now: Timestamp,
}

impl TimeListing {
    pub(super) fn total(&self) -> u64 {
        self.totals.values().sum()
    }
}

/// Calls `see` with each page of the records that match a query, and with the time of the store, in no order. Returns false if
/// the store could not be read to its end in [`WALK_TIMEOUT`].
///
/// A store that lists in the order of identifiers is read in two halves at the same time: identifiers are hashes, so each half
/// has about as many records.
pub(super) async fn walk(
    store: &dyn Store,
    query: &ListQuery,
    mut see: impl FnMut(ListPage, Timestamp),
) -> Result<bool, Problem> {
    let until = Instant::now() + WALK_TIMEOUT;
    let mut middle = [0xff; 32];
    middle[0] = 0x7f;
    let middle = RecordId::from_bytes(middle);
    let part = |after, last| {
        let mut query = query.clone();
        query.after = after;
        Part { query, last }
    };
    let parts = if store.capabilities().lists_in_order {
        vec![part(None, Some(middle)), part(Some(middle), None)]
    } else {
        vec![part(None, None)]
    };
    let read = |part: Part| async move { (store.list(part.query.clone()).await, part) };
    let mut running: FuturesUnordered<_> = parts.into_iter().map(read).collect();
    let mut is_complete = true;
    while let Some((page, mut part)) = running.next().await {
        let mut page = page.map_err(|error| Problem::store_read(&error))?;
        part.query.after = page.next;
        if let Some(last) = part.last {
            page.records.retain(|(id, _)| *id <= last);
            page.unreadable.retain(|id| *id <= last);
            part.query.after = page.next.filter(|next| *next < last);
        }
        let has_more = part.query.after.is_some();
        // Before the next page is asked for: a store in memory answers at once, and pages must not pile up.
        see(page, store.now());
        if !has_more {
            continue;
        }
        // It does not wait for anything either, and the pages and health checks of the admin address share its thread.
        tokio::task::yield_now().await;
        if Instant::now() >= until {
            is_complete = false;
        } else {
            running.push(read(part));
        }
    }
    Ok(is_complete)
}

/// A part of a store that is read page by page.
struct Part {
    /// The query for the next page.
    query: ListQuery,
    /// The last identifier of the part; `None` for the end of the store.
    last: Option<RecordId>,
}

impl TimeQuery {
    /// Finds the places. If the store cannot be read in [`WALK_TIMEOUT`], they are those of the part that was read.
    pub(super) async fn find(&self, store: &dyn Store) -> Result<Places, Problem> {
        let most = self.list.bounded_limit();
        let mut query = SurveyQuery::default();
        query.list = self.list.clone();
        query.changed_since = self.period.since;
        query.changed_before = self.period.until;
        if self.list.states == StateSet::UNSETTLED {
            // Records of requests that were only observed wait for no operator.
            query.except_operation = Some(SHADOW_OPERATION.to_owned());
        }
        query.is_oldest_first = self.order == TimeOrder::OldestFirst;
        query.beyond = self.after;
        // One more tells that there are more.
        query.max_places = most + 1;
        let mut found = Places::default();
        let mut unreadable = HashSet::new();
        let is_complete = survey(store, &query, |part| {
            for count in part.counts {
                *found.totals.entry(count.state.as_str()).or_default() += count.records;
            }
            // A store with an order of its own may find a record twice.
            for id in part.unreadable {
                if unreadable.len() < MAX_COUNTED_UNREADABLE
                    && unreadable.insert(id)
                    && found.unreadable.len() < MAX_UNREADABLE
                {
                    found.unreadable.push(id);
                }
            }
            let places = &mut found.places;
            places.extend(part.places);
            // A store with an order of its own may find a record twice, before and after a change.
            places.sort_unstable_by_key(|(at, id)| (*id, Reverse(*at)));
            places.dedup_by_key(|(_, id)| *id);
            places.sort_unstable();
            if self.order == TimeOrder::NewestFirst {
                places.reverse();
            }
            places.truncate(most + 1);
        });
        found.is_complete = is_complete.await?;
        found.unreadable_total = unreadable.len() as u64;
        found.has_more = found.places.len() > most;
        found.places.truncate(most);
        Ok(found)
    }

    /// Reads the records at these places, as they are now.
    pub(super) async fn read(&self, state: &AdminState, found: &Places) -> Result<TimeListing, Problem> {
        let mut listing = TimeListing {
            unreadable: found.unreadable.clone(),
            unreadable_total: found.unreadable_total,
            totals: found.totals.clone(),
            next: found.places.last().filter(|_| found.has_more).copied(),
            is_complete: found.is_complete,
            now: state.engine.store().now(),
            ..TimeListing::default()
        };
        let until = Instant::now() + WALK_TIMEOUT;
        let reads = found.places.clone().into_iter();
        let reads = reads.map(|place| async move { (place, state.rows.read(place.1).await) });
        let mut reads = stream::iter(reads).buffered(READS_AT_ONCE);
        while let Some((place, found)) = reads.next().await {
            match found {
                Ok(Some(found)) if self.list.matches(&found.record, listing.now) => {
                    let view = RecordView::new(place.1, &found.record, listing.now, Detail::Line);
                    listing.records.push((place, view));
                }
                // It has changed or ended since.
                Ok(_) => {}
                Err(error) if error.kind() == StoreErrorKind::Corrupt => {
                    // The survey that found this place could read its beginning, so it did not count it.
                    listing.unreadable_total += 1;
                    if listing.unreadable.len() < MAX_UNREADABLE {
                        listing.unreadable.push(place.1);
                    }
                }
                Err(error) => return Err(Problem::store_read(&error)),
            }
            if Instant::now() >= until {
                // The numbers are those of the whole store nevertheless.
                listing.next = Some(place);
                break;
            }
        }
        Ok(listing)
    }

    /// The records in the order of time, from the store as it is now.
    pub(super) async fn list(&self, state: &AdminState) -> Result<TimeListing, Problem> {
        let found = self.find(&**state.engine.store()).await?;
        self.read(state, &found).await
    }
}

/// The newest records first, as JSON.
pub(super) async fn newest(
    state: &AdminState,
    query: ListQuery,
    period: Period,
) -> Result<Response, Problem> {
    let query = TimeQuery { list: query, period, ..TimeQuery::default() };
    let listing = query.list(state).await?;
    Ok(view::json(&json!({
        "records": listing.records.iter().map(|(_, record)| record.json()).collect::<Vec<_>>(),
        "unreadable": listing.unreadable.iter().map(RecordId::to_string).collect::<Vec<_>>(),
        "unreadable_total": listing.unreadable_total,
        "next": null,
        "total": listing.total(),
        "totals": listing.totals,
        "complete": listing.is_complete,
        "now": view::time(listing.now),
    })))
}

/// The record with this identifier, or the only one whose identifier begins with this text.
pub(super) async fn find(store: &dyn Store, text: &str) -> Result<RecordId, Problem> {
    let text = text.trim();
    // Refusals name records to clients in this form.
    let text = text.strip_prefix(RECORD_URN).unwrap_or(text);
    if let Some(id) = RecordId::from_hex(text) {
        return Ok(id);
    }
    let prefix = text.to_ascii_lowercase();
    let digits = prefix.bytes().all(|b| b.is_ascii_hexdigit());
    if !digits || !(MIN_PREFIX..64).contains(&prefix.len()) {
        return Err(Problem::bad_request(format!(
            "{text:?} is not a record; it has 64 hexadecimal digits, as a listing shows them, or the first {MIN_PREFIX} or more of them."
        )));
    }
    let mut found = if store.capabilities().lists_in_order {
        in_order(store, &prefix).await
    } else {
        by_walking(store, &prefix).await
    }?;
    found.sort_unstable();
    found.dedup();
    match found[..] {
        [id] => Ok(id),
        [] => Err(Problem::no_record_like(text)),
        _ => Err(Problem::ambiguous(text, &found)),
    }
}

/// Searches for the records of a key.
pub(super) async fn records_of_key(store: &dyn Store, key: KeyTag) -> Result<Hits, Problem> {
    let mut query = ListQuery::default();
    (query.key, query.limit) = (Some(key), 2);
    let found = TimeQuery { list: query, ..TimeQuery::default() }.find(store).await?;
    Ok(match &found.places[..] {
        [] => Hits::None { is_complete: found.is_complete, unreadable: found.unreadable_total },
        [(_, only)] if found.is_complete => Hits::One(*only),
        _ => Hits::Several,
    })
}

/// The most candidates that are shown for an ambiguous beginning.
const MAX_CANDIDATES: usize = 10;

async fn in_order(store: &dyn Store, prefix: &str) -> Result<Vec<RecordId>, Problem> {
    let mut query = ListQuery::default();
    query.limit = MAX_CANDIDATES;
    query.after = before(prefix);
    let mut found = Vec::new();
    loop {
        let page = store.list(query.clone()).await.map_err(|error| Problem::store_read(&error))?;
        let ids = page.records.iter().map(|(id, _)| *id).chain(page.unreadable);
        let (those, others): (Vec<_>, Vec<_>) = ids.partition(|id| id.to_string().starts_with(prefix));
        found.extend(those);
        let goes_on = |next: &RecordId| {
            let next = next.to_string();
            next.as_str() < prefix || next.starts_with(prefix)
        };
        query.after = page.next.filter(goes_on);
        if query.after.is_none() || !others.is_empty() || found.len() > 1 {
            return Ok(found);
        }
    }
}

async fn by_walking(store: &dyn Store, prefix: &str) -> Result<Vec<RecordId>, Problem> {
    let mut query = ListQuery::default();
    query.limit = limits::MAX_PAGE_RECORDS;
    let until = Instant::now() + WALK_TIMEOUT;
    let mut found = Vec::new();
    loop {
        let page = store.list(query.clone()).await.map_err(|error| Problem::store_read(&error))?;
        let ids = page.records.iter().map(|(id, _)| *id).chain(page.unreadable);
        found.extend(ids.filter(|id| id.to_string().starts_with(prefix)));
        query.after = page.next;
        if query.after.is_none() || found.len() > 1 {
            return Ok(found);
        }
        if Instant::now() >= until {
            return Err(Problem::bad_request(
                "this store has too many records to search by a beginning; give all 64 digits of the record.",
            ));
        }
    }
}

/// The identifier just before all that begin with this prefix; `None` if there is no such identifier.
fn before(prefix: &str) -> Option<RecordId> {
    let mut bytes = *RecordId::from_hex(&format!("{prefix:0<64}"))?.as_bytes();
    for byte in bytes.iter_mut().rev() {
        let (lower, borrows) = byte.overflowing_sub(1);
        *byte = lower;
        if !borrows {
            return Some(RecordId::from_bytes(bytes));
        }
    }
    None
}

/// Reads one state, several with commas, or `unsettled`.
pub(super) fn states(text: &str) -> Result<StateSet, String> {
    const UNSETTLED: &str = "unsettled";
    let mut states = Vec::new();
    for name in text.split(',').map(str::trim) {
        match StateName::from_name(name) {
            Some(state) => states.push(state),
            None if name == UNSETTLED => states.extend(StateSet::UNSETTLED.iter()),
            None => {
                let names: Vec<_> =
                    StateName::ALL.map(StateName::as_str).into_iter().chain([UNSETTLED]).collect();
                let hint = crate::config::did_you_mean(name, names.iter().copied());
                return Err(format!("is not one of {}{hint}", names.join(", ")));
            }
        }
    }
    Ok(states.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_walk_sees_each_record_once_on_both_sides_of_the_middle() {
        use oncegate_core::{Command, MemoryStore, SystemClock};
        let store = MemoryStore::new(SystemClock::new());
        let mut ids: Vec<_> = (0..=u8::MAX).map(|byte| RecordId::from_bytes([byte; 32])).collect();
        let mut edge = [0xff; 32];
        edge[0] = 0x7f;
        ids.push(RecordId::from_bytes(edge));
        let mut edge = [0; 32];
        edge[0] = 0x80;
        ids.push(RecordId::from_bytes(edge));
        for id in &ids {
            store.apply(*id, Command::Claim(oncegate_testkit::claim(1_u32, b"input"))).await.unwrap();
        }
        ids.sort_unstable();
        for limit in [1, 7, 1000] {
            let mut query = ListQuery::default();
            query.limit = limit;
            let mut seen = Vec::new();
            let is_complete = walk(&store, &query, |page, _| {
                assert!(page.records.len() <= limit);
                seen.extend(page.records.into_iter().map(|(id, _)| id));
            });
            assert!(matches!(is_complete.await, Ok(true)));
            seen.sort_unstable();
            assert_eq!(seen, ids, "{limit}");
        }
    }

    #[test]
    fn the_identifier_before_a_beginning_is_just_before_it() {
        let hex = |text: &str| before(text).map(|id| id.to_string());
        assert_eq!(hex("abcd00"), Some(format!("abccff{}", "f".repeat(58))));
        assert_eq!(hex("1"), Some(format!("0{}", "f".repeat(63))));
        assert_eq!(hex("000000"), None);
    }
}
