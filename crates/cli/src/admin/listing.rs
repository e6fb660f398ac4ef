//! Finds records for operators: the newest ones first, with totals, and one record by the beginning of its identifier.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::response::Response;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use oncegate_core::{ListPage, ListQuery, RecordId, StateName, StateSet, Store, Timestamp, limits};
use serde_json::json;
use tokio::time::Instant;

use super::AdminState;
use super::keys::is_shadow;
use super::problem::Problem;
use super::view::{self, Detail, RecordView};

/// Limits the time for which one request may walk through the store.
pub(super) const WALK_TIMEOUT: Duration = Duration::from_secs(5);

/// The most unreadable records that one response names.
const MAX_UNREADABLE: usize = 100;

/// The prefix of a record in problems.
const RECORD_URN: &str = "urn:oncegate:record:";

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

/// The place of a record in the order of time.
pub(super) type TimePlace = (Timestamp, RecordId);

/// A part of the records in the order of time, and the number of all selected records by state.
#[derive(Debug, Default)]
pub(super) struct TimeListing {
    pub(super) records: Vec<(TimePlace, RecordView)>,
    pub(super) unreadable: Vec<RecordId>,
    pub(super) totals: BTreeMap<&'static str, u64>,
    /// True if more records follow in this order.
    pub(super) has_more: bool,
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

/// The first records in the order of time, after `after`, with the number of records in each state. If the store cannot be read
/// in [`WALK_TIMEOUT`], the listing covers only the part that was read.
pub(super) async fn by_time(
    state: &AdminState,
    mut query: ListQuery,
    period: Period,
    order: TimeOrder,
    after: Option<TimePlace>,
) -> Result<TimeListing, Problem> {
    let most = query.bounded_limit();
    query.limit = limits::MAX_PAGE_RECORDS;
    let store = state.engine.store();
    // Records of requests that were only observed wait for no operator.
    let is_unsettled = query.states == StateSet::UNSETTLED;
    let mut listed: BTreeMap<TimePlace, RecordView> = BTreeMap::new();
    let mut listing = TimeListing { is_complete: true, ..TimeListing::default() };
    let is_before = |one: &TimePlace, other: &TimePlace| match order {
        TimeOrder::NewestFirst => one > other,
        TimeOrder::OldestFirst => one < other,
    };
    let mut totals = [0_u64; StateName::ALL.len()];
    listing.is_complete = walk(&**store, &query, |page, now| {
        listing.now = now;
        for (id, record) in page.records {
            if !period.includes(record.changed_at) || is_unsettled && is_shadow(record.label.operation()) {
                continue;
            }
            let state = record.state_name(now);
            if let Some(total) =
                StateName::ALL.iter().position(|name| *name == state).and_then(|at| totals.get_mut(at))
            {
                *total += 1;
            }
            let place = (record.changed_at, id);
            if after.is_some_and(|after| !is_before(&after, &place)) {
                continue;
            }
            let last = match order {
                TimeOrder::NewestFirst => listed.first_key_value(),
                TimeOrder::OldestFirst => listed.last_key_value(),
            };
            if listed.len() < most || last.is_some_and(|(last, _)| is_before(&place, last)) {
                listed.insert(place, RecordView::new(id, &record, now, Detail::Line));
            } else {
                listing.has_more = true;
            }
            if listed.len() > most {
                listing.has_more = true;
                match order {
                    TimeOrder::NewestFirst => listed.pop_first(),
                    TimeOrder::OldestFirst => listed.pop_last(),
                };
            }
        }
        let left = MAX_UNREADABLE.saturating_sub(listing.unreadable.len());
        listing.unreadable.extend(page.unreadable.iter().take(left));
    })
    .await?;
    let names = StateName::ALL.map(StateName::as_str).into_iter().zip(totals);
    listing.totals = names.filter(|(_, total)| *total > 0).collect();
    listing.records = match order {
        TimeOrder::NewestFirst => listed.into_iter().rev().collect(),
        TimeOrder::OldestFirst => listed.into_iter().collect(),
    };
    Ok(listing)
}

/// The newest records first, as JSON.
pub(super) async fn newest(
    state: &AdminState,
    query: ListQuery,
    period: Period,
) -> Result<Response, Problem> {
    let listing = by_time(state, query, period, TimeOrder::NewestFirst, None).await?;
    Ok(view::json(&json!({
        "records": listing.records.iter().map(|(_, record)| record.json()).collect::<Vec<_>>(),
        "unreadable": listing.unreadable.iter().map(RecordId::to_string).collect::<Vec<_>>(),
        "next": null,
        "total": listing.total(),
        "totals": listing.totals,
        "complete": listing.is_complete,
        "now": view::time(listing.now),
    })))
}

/// The record with this identifier, or the only one whose identifier begins with this text.
pub(super) async fn find(state: &AdminState, text: &str) -> Result<RecordId, Problem> {
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
    let store = state.engine.store();
    let mut found = if store.capabilities().lists_in_order {
        in_order(&**store, &prefix).await
    } else {
        by_walking(&**store, &prefix).await
    }?;
    found.sort_unstable();
    found.dedup();
    match found[..] {
        [id] => Ok(id),
        [] => Err(Problem::no_record_like(text)),
        _ => Err(Problem::ambiguous(text, &found)),
    }
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
