//! Reads the numbers and places of records: from a store that finds them itself ([`Store::survey`]) part by part, and from any
//! other store by listing its records. Each call is short, so a large store is read as far as the time allows, and nothing in it
//! runs for long.

use std::time::Duration;

use oncegate_core::{RecordId, Store, Survey, SurveyQuery, SurveyTally, limits};
use tokio::time::Instant;

use super::listing::{WALK_TIMEOUT, walk};
use super::problem::Problem;

/// The first range, as a part of all identifiers: one 4096th.
const FIRST_WIDTH: u64 = 1 << 52;

/// The time that a call should take. The width of the next range follows from the last one.
const CALL_TIME: Duration = Duration::from_millis(250);

/// The most by which a range is wider than the last one.
const MAX_GROWTH: u64 = 16;

/// The numbers that a call should return at most. There are many if each record has an operation of its own.
const MAX_COUNTS: usize = 20_000;

/// Calls `see` with the survey of each part of the store. Returns false if the store could not be read to its end in
/// [`WALK_TIMEOUT`].
pub(super) async fn survey(
    store: &dyn Store,
    query: &SurveyQuery,
    mut see: impl FnMut(Survey),
) -> Result<bool, Problem> {
    let until = Instant::now() + WALK_TIMEOUT;
    let mut part = query.clone();
    // A store with an order of its own has one range, and ends each call in time by itself.
    let is_in_ranges = store.capabilities().lists_in_order;
    let mut range = Some(Range { first: 0, width: if is_in_ranges { FIRST_WIDTH } else { u64::MAX } });
    while let Some(Range { first, width }) = range {
        let last = first.checked_add(width - 1).filter(|last| *last < u64::MAX).filter(|_| is_in_ranges);
        part.last = last.map(last_with);
        let begun = Instant::now();
        let found = store.survey(part.clone()).await.map_err(|error| Problem::store_read(&error))?;
        let Some(found) = found else { return listed(store, query, see).await };
        let next_width = next_width(width, begun.elapsed(), found.counts.len());
        let next = found.next;
        see(found);
        if next.is_some() {
            part.list.after = next;
        } else {
            part.list.after = part.last;
            range = last.map(|last| Range { first: last + 1, width: next_width });
        }
        if range.is_some() && Instant::now() >= until {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The same from a store without surveys.
async fn listed(
    store: &dyn Store,
    query: &SurveyQuery,
    mut see: impl FnMut(Survey),
) -> Result<bool, Problem> {
    let mut list = query.list.clone();
    list.limit = limits::MAX_PAGE_RECORDS;
    walk(store, &list, |page, now| {
        let mut tally = SurveyTally::new(query.clone());
        for (id, record) in &page.records {
            tally.add(*id, record, now);
        }
        let mut part = tally.finish();
        part.unreadable = page.unreadable;
        see(part);
    })
    .await
}

/// The identifiers whose first eight bytes are `first` and the next `width - 1` numbers. Identifiers are hashes, so ranges of
/// one width have about as many records.
struct Range {
    first: u64,
    width: u64,
}

/// The last identifier that begins with these bytes.
fn last_with(start: u64) -> RecordId {
    let mut bytes = [0xff; 32];
    if let Some(head) = bytes.first_chunk_mut() {
        *head = start.to_be_bytes();
    }
    RecordId::from_bytes(bytes)
}

/// The width of the next range, after a call that took this time and returned so many numbers.
fn next_width(width: u64, took: Duration, counts: usize) -> u64 {
    // In thousandths of the last width.
    let by_time = CALL_TIME.as_micros() * 1000 / took.as_micros().max(1);
    let by_counts = MAX_COUNTS as u128 * 1000 / (counts as u128).max(1);
    let growth = by_time.min(by_counts).min(u128::from(MAX_GROWTH) * 1000);
    let next = u128::from(width) * growth / 1000;
    u64::try_from(next).unwrap_or(u64::MAX).max(FIRST_WIDTH >> 16)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use oncegate_core::{
        Capabilities, Command, MemoryStore, StoreFuture, SystemClock, Timestamp, delegate_store,
    };

    use super::*;

    /// Notes the ranges, and needs a time for each that grows with it.
    struct Ranges {
        memory: MemoryStore,
        noted: Mutex<Vec<(Option<RecordId>, Option<RecordId>)>>,
        /// The time for the whole store.
        time: Duration,
    }

    impl Store for Ranges {
        fn survey(&self, query: SurveyQuery) -> StoreFuture<'_, Option<Survey>> {
            let head = |id: RecordId| id.as_bytes().first_chunk().map_or(0, |head| u64::from_be_bytes(*head));
            let width = query.last.map_or(u64::MAX, head) - query.list.after.map_or(0, head);
            self.noted.lock().unwrap().push((query.list.after, query.last));
            let time = self.time.mul_f64(width as f64 / u64::MAX as f64);
            Box::pin(async move {
                tokio::time::sleep(time).await;
                Ok(Some(Survey::default()))
            })
        }

        delegate_store!(self, self.memory => apply lookup list purge audit check now capabilities);
    }

    async fn ranges(time: Duration) -> (bool, Vec<(Option<RecordId>, Option<RecordId>)>) {
        let store = Ranges { memory: MemoryStore::new(SystemClock::new()), noted: Mutex::default(), time };
        let mut seen = 0;
        let Ok(is_complete) = survey(&store, &SurveyQuery::default(), |_| seen += 1).await else {
            panic!("the store has no errors")
        };
        let noted = store.noted.into_inner().unwrap();
        assert_eq!(seen, noted.len());
        for (one, next) in noted.iter().zip(noted.iter().skip(1)) {
            assert!(one.1.is_some() && one.1 == next.0 && next.1.is_none_or(|last| Some(last) > next.0));
        }
        assert_eq!(noted.first().map(|range| range.0), Some(None));
        (is_complete, noted)
    }

    #[tokio::test(start_paused = true)]
    async fn ranges_cover_the_store_and_get_as_wide_as_the_time_allows() {
        let (is_complete, noted) = ranges(Duration::from_millis(10)).await;
        assert!(is_complete);
        assert!(noted.len() <= 5 && noted.last().is_some_and(|range| range.1.is_none()), "{noted:?}");
        let (is_complete, noted) = ranges(Duration::from_secs(4)).await;
        assert!(is_complete);
        assert!((16..40).contains(&noted.len()), "{noted:?}");
        let begun = Instant::now();
        let (is_complete, noted) = ranges(Duration::from_secs(3600)).await;
        assert!(!is_complete);
        assert!(begun.elapsed() < WALK_TIMEOUT + 2 * CALL_TIME, "{:?} {noted:?}", begun.elapsed());
    }

    /// Has an order of its own, and surveys of three parts.
    struct Parts(MemoryStore);

    impl Store for Parts {
        fn survey(&self, query: SurveyQuery) -> StoreFuture<'_, Option<Survey>> {
            assert_eq!(query.last, None);
            let number = query.list.after.map_or(0, |after| after.as_bytes()[0]);
            let mut part = Survey::default();
            part.places = vec![(Timestamp::from_millis(1), RecordId::from_bytes([number; 32]))];
            part.next = (number < 2).then(|| RecordId::from_bytes([number + 1; 32]));
            Box::pin(std::future::ready(Ok(Some(part))))
        }

        fn capabilities(&self) -> Capabilities {
            let mut capabilities = self.0.capabilities();
            capabilities.lists_in_order = false;
            capabilities
        }

        delegate_store!(self, self.0 => apply lookup list purge audit check now);
    }

    #[tokio::test]
    async fn a_store_with_an_order_of_its_own_says_where_the_next_part_begins() {
        let store = Parts(MemoryStore::new(SystemClock::new()));
        let mut seen = Vec::new();
        let see = |part: Survey| seen.extend(part.places.into_iter().map(|(_, id)| id.as_bytes()[0]));
        assert!(matches!(survey(&store, &SurveyQuery::default(), see).await, Ok(true)));
        assert_eq!(seen, [0, 1, 2]);
    }

    #[tokio::test]
    async fn the_records_of_a_store_without_surveys_are_listed() {
        let store = MemoryStore::new(SystemClock::new());
        for n in 0..3 {
            let claim = oncegate_testkit::claim(n, b"input");
            store.apply(oncegate_testkit::record_id(n), Command::Claim(claim)).await.unwrap();
        }
        let mut query = SurveyQuery::default();
        query.max_places = 2;
        let (mut records, mut places) = (0, 0);
        let is_complete = survey(&store, &query, |part| {
            records += part.counts.iter().map(|count| count.records).sum::<u64>();
            places += part.places.len();
        });
        assert!(matches!(is_complete.await, Ok(true)));
        assert_eq!(records, 3);
        assert!(places >= 2);
    }

    #[tokio::test]
    async fn other_tasks_run_between_the_pages_of_a_store_in_memory() {
        let store = MemoryStore::new(SystemClock::new());
        for n in 0..5000 {
            let claim = oncegate_testkit::claim(n, b"input");
            store.apply(oncegate_testkit::record_id(n), Command::Claim(claim)).await.unwrap();
        }
        let turns = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counted = turns.clone();
        let other = tokio::spawn(async move {
            loop {
                counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                tokio::task::yield_now().await;
            }
        });
        let mut pages = 0;
        assert!(matches!(survey(&store, &SurveyQuery::default(), |_| pages += 1).await, Ok(true)));
        other.abort();
        let turns = turns.load(std::sync::atomic::Ordering::Relaxed);
        assert!(pages >= 5 && turns >= pages - 2, "{turns} turns, {pages} pages");
    }

    #[test]
    fn a_range_with_many_operations_is_not_widened() {
        assert_eq!(next_width(FIRST_WIDTH, Duration::ZERO, 3), FIRST_WIDTH * MAX_GROWTH);
        assert_eq!(next_width(FIRST_WIDTH, Duration::ZERO, MAX_COUNTS * 2), FIRST_WIDTH / 2);
        assert_eq!(next_width(u64::MAX, Duration::ZERO, 0), u64::MAX);
        assert!(next_width(FIRST_WIDTH >> 16, Duration::from_secs(3600), 0) > 0);
    }
}
