//! Compares the surveys of a store with what a listing of all its records gives.
//!
//! For stores that implement [`Store::survey`]. The test fills the store with records of several states, callers and operations,
//! in a way of its own: their times cannot be set through [`Store::apply`]. Then [`compare`] asks for surveys with each filter,
//! and with each pair of filters, and page after page.

use std::collections::BTreeMap;
use std::time::Duration;

use oncegate_core::{
    CallerTag, KeyTag, ListQuery, Record, RecordCount, RecordId, StateName, StateSet, Store, StoreError,
    Survey, SurveyQuery, Timestamp,
};

/// The numbers of records by state and, if the query asks for it, by operation.
pub type Counts = BTreeMap<(StateName, Option<String>), u64>;

/// All records of a store, by their identifiers.
///
/// # Errors
/// Those of the store.
///
/// # Panics
/// If a record cannot be read.
pub async fn all_records(store: &dyn Store) -> Result<BTreeMap<RecordId, Record>, StoreError> {
    let (mut found, mut query) = (BTreeMap::new(), ListQuery::default());
    loop {
        query.limit = 1000;
        let page = store.list(query.clone()).await?;
        assert_eq!(page.unreadable, [], "records cannot be read");
        found.extend(page.records);
        query.after = page.next;
        if page.next.is_none() {
            return Ok(found);
        }
    }
}

/// The counts of a survey.
///
/// # Panics
/// If it has two counts for the same state and operation.
#[must_use]
pub fn counts_of(survey: &Survey) -> Counts {
    let counts = survey.counts.iter().map(|count| ((count.state, count.operation.clone()), count.records));
    let found: Counts = counts.collect();
    assert_eq!(found.len(), survey.counts.len(), "a pair occurs twice");
    found
}

/// A survey to its end, put together from its parts.
///
/// # Errors
/// Those of the store.
///
/// # Panics
/// If the store has no surveys.
pub async fn whole_survey(store: &dyn Store, query: &SurveyQuery) -> Result<Survey, StoreError> {
    let (mut whole, mut query) = (Survey::default(), query.clone());
    loop {
        let part = store.survey(query.clone()).await?.expect("the store has surveys");
        for count in part.counts {
            let is_same =
                |of: &&mut RecordCount| (of.state, &of.operation) == (count.state, &count.operation);
            match whole.counts.iter_mut().find(is_same) {
                Some(of) => of.records += count.records,
                None => whole.counts.push(count),
            }
        }
        whole.places.extend(part.places);
        whole.unreadable.extend(part.unreadable);
        query.list.after = part.next;
        if query.list.after.is_none() {
            break;
        }
    }
    whole.places.sort_unstable();
    if !query.is_oldest_first {
        whole.places.reverse();
    }
    whole.places.truncate(query.max_places);
    Ok(whole)
}

/// The survey of these records by the rules of the query: its counts and its places.
fn expected(
    records: &BTreeMap<RecordId, Record>,
    query: &SurveyQuery,
    now: Timestamp,
) -> (Counts, Vec<(Timestamp, RecordId)>) {
    let is_selected = |id: &RecordId, record: &Record| {
        query.list.matches(record, now)
            && query.list.after.is_none_or(|after| *id > after)
            && query.last.is_none_or(|last| *id <= last)
            && query.changed_since.is_none_or(|since| record.changed_at >= since)
            && query.changed_before.is_none_or(|before| record.changed_at < before)
            && query.except_id != Some(*id)
            && query
                .except_operation
                .as_ref()
                .is_none_or(|start| !record.label.operation().starts_with(start))
    };
    let (mut counts, mut places) = (Counts::new(), Vec::new());
    for (id, record) in records.iter().filter(|(id, record)| is_selected(id, record)) {
        let operation = query.by_operation.then(|| record.label.operation().to_owned());
        *counts.entry((record.state_name(now), operation)).or_default() += 1;
        let place = (record.changed_at, *id);
        let is_beyond = |beyond| if query.is_oldest_first { place > beyond } else { place < beyond };
        if query.beyond.is_none_or(is_beyond) {
            places.push(place);
        }
    }
    places.sort_unstable();
    if !query.is_oldest_first {
        places.reverse();
    }
    places.truncate(query.max_places);
    (counts, places)
}

/// The present time, and two records.
type Arguments = (Timestamp, RecordId, RecordId);

/// Filters and orders of every kind. The last two are for stores that
/// [list in order](oncegate_core::Capabilities::lists_in_order): the others continue after places of their own.
const CHANGES: [fn(&mut SurveyQuery, Arguments); 14] = [
    |query, _| query.max_places = 0,
    |query, _| query.by_operation = true,
    |query, _| query.is_oldest_first = true,
    |query, _| query.list.states = StateSet::UNSETTLED,
    |query, _| query.list.caller = Some(CallerTag::from_bytes(3_u64.to_be_bytes())),
    |query, _| query.list.key = Some(KeyTag::from_bytes(42_u64.to_be_bytes())),
    |query, _| query.list.operation = Some("POST /pay".to_owned()),
    |query, _| query.list.min_age = Duration::from_secs(10_050),
    |query, (now, ..)| query.changed_since = Some(Timestamp::from_millis(now.as_millis() - 10_050_000)),
    |query, (now, ..)| query.changed_before = Some(Timestamp::from_millis(now.as_millis() - 5_050_000)),
    |query, (_, id, _)| query.except_id = Some(id),
    |query, _| query.except_operation = Some("(shadow) ".to_owned()),
    |query, (_, id, _)| query.list.after = Some(id),
    |query, (.., other)| query.last = Some(other),
];

/// The length of a page.
const PAGE: usize = 20;

/// Compares surveys with a listing: with each filter, with each pair of them, and page after page. Returns the records. The
/// filters select something if there are callers from 0 to 4 and keys from 0 to 99 (as numbers of 8 bytes), operations that
/// begin with `POST /pay` and `(shadow) `, and changes at several times of the last five hours. No record may change meanwhile.
///
/// # Panics
/// If a survey differs from the listing, or if the store fails or has no surveys.
pub async fn compare(store: &dyn Store) -> BTreeMap<RecordId, Record> {
    let records = all_records(store).await.unwrap_or_else(|error| panic!("a listing failed: {error}"));
    let ids: Vec<_> = records.keys().copied().collect();
    let place = |part: usize| ids.get(ids.len() / 4 * part).copied().expect("the store has records");
    let arguments = (store.now(), place(1), place(3));
    let all = if store.capabilities().lists_in_order { CHANGES.len() } else { CHANGES.len() - 2 };
    let changes = CHANGES.into_iter().take(all);
    for (number, one) in changes.clone().enumerate() {
        for two in changes.clone().skip(number) {
            let mut query = SurveyQuery::default();
            query.max_places = PAGE;
            one(&mut query, arguments);
            two(&mut query, arguments);
            for page in ["the first page", "the second page"] {
                let found = whole_survey(store, &query).await;
                let found = found.unwrap_or_else(|error| panic!("a survey failed: {error}"));
                let (counts, places) = expected(&records, &query, store.now());
                assert_eq!(counts_of(&found), counts, "{page}: {query:?}");
                assert_eq!(found.places, places, "{page}: {query:?}");
                assert_eq!(found.unreadable, [], "{page}: {query:?}");
                query.beyond = places.last().copied();
            }
        }
    }
    records
}
