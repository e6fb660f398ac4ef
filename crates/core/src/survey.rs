//! Counts records for a [`Survey`].

use std::collections::{BTreeSet, HashMap};

use crate::record::{Record, StateName};
use crate::store::{RecordCount, Survey, SurveyQuery, TimePlace};
use crate::{RecordId, Timestamp, limits};

/// The numbers of records for each state, in the order of [`StateName::ALL`].
type Numbers = [u64; StateName::ALL.len()];

/// Makes the survey of records that are added one by one, for stores that read the records themselves and for callers that list
/// them. It keeps numbers and at most [`SurveyQuery::max_places`] places, and no records.
///
/// ```
/// use oncegate_core::{CallerTag, FencingToken, Fingerprint, Label, Record, RecordId, State};
/// use oncegate_core::{SurveyQuery, SurveyTally, Timestamp};
///
/// let mut query = SurveyQuery::default();
/// query.max_places = 1;
/// let label = Label::new(CallerTag::from_bytes([7; 8]), "POST /payments");
/// let begun = Timestamp::from_millis(1000);
/// let fingerprint = Fingerprint::of_parts("example", &[]);
/// let mut record = Record::new(fingerprint, FencingToken::new(1), State::Unknown, label, begun);
/// record.expires_at = Timestamp::from_millis(5000);
/// let mut tally = SurveyTally::new(query);
/// for n in 1..=3 {
///     tally.add(RecordId::from_bytes([n; 32]), &record, Timestamp::from_millis(2000));
/// }
/// let survey = tally.finish();
/// assert_eq!(survey.counts[0].records, 3);
/// assert_eq!(survey.places, [(begun, RecordId::from_bytes([3; 32]))]);
/// ```
#[derive(Clone, Debug)]
pub struct SurveyTally {
    query: SurveyQuery,
    /// The numbers of all operations, if the query does not ask for each.
    numbers: Numbers,
    by_operation: HashMap<String, Numbers>,
    /// The first places in the order of the query, from the earliest time on.
    places: BTreeSet<TimePlace>,
}

impl SurveyTally {
    /// A tally without records.
    #[must_use]
    pub fn new(mut query: SurveyQuery) -> Self {
        query.max_places = query.max_places.min(limits::MAX_PAGE_RECORDS + 1);
        Self { query, numbers: Numbers::default(), by_operation: HashMap::new(), places: BTreeSet::new() }
    }

    /// Adds a record, if it matches the query. The range of the query is left to the caller.
    pub fn add(&mut self, id: RecordId, record: &Record, now: Timestamp) {
        let (query, operation) = (&self.query, record.label.operation());
        let is_left_out = query.except_id == Some(id)
            || query.changed_since.is_some_and(|since| record.changed_at < since)
            || query.changed_before.is_some_and(|before| record.changed_at >= before)
            || query.except_operation.as_deref().is_some_and(|start| operation.starts_with(start));
        if is_left_out || !query.list.matches(record, now) {
            return;
        }
        let numbers = if !query.by_operation {
            &mut self.numbers
        } else if let Some(numbers) = self.by_operation.get_mut(operation) {
            numbers
        } else {
            self.by_operation.entry(operation.to_owned()).or_default()
        };
        let state = record.state_name(now);
        if let Some(number) =
            StateName::ALL.iter().position(|name| *name == state).and_then(|at| numbers.get_mut(at))
        {
            *number += 1;
        }
        self.add_place((record.changed_at, id));
    }

    fn add_place(&mut self, place: TimePlace) {
        let is_oldest_first = self.query.is_oldest_first;
        let is_before =
            |one: &TimePlace, other: &TimePlace| if is_oldest_first { one < other } else { one > other };
        if self.query.beyond.is_some_and(|beyond| !is_before(&beyond, &place)) {
            return;
        }
        let last = if is_oldest_first { self.places.last() } else { self.places.first() };
        let is_full = self.places.len() >= self.query.max_places;
        if is_full && last.is_none_or(|last| !is_before(&place, last)) {
            return;
        }
        self.places.insert(place);
        if self.places.len() > self.query.max_places {
            if is_oldest_first {
                self.places.pop_last()
            } else {
                self.places.pop_first()
            };
        }
    }

    /// The number of operations that are counted separately: the memory of a tally grows with it.
    #[must_use]
    pub fn operations(&self) -> usize {
        self.by_operation.len()
    }

    /// The survey of the records that were added.
    #[must_use]
    pub fn finish(self) -> Survey {
        let named = self.by_operation.into_iter().map(|(operation, numbers)| (Some(operation), numbers));
        let counts = named.chain([(None, self.numbers)]).flat_map(|(operation, numbers)| {
            let numbers = StateName::ALL.into_iter().zip(numbers).filter(|(_, records)| *records > 0);
            numbers.map(move |(state, records)| RecordCount { state, operation: operation.clone(), records })
        });
        let mut survey = Survey { counts: counts.collect(), ..Survey::default() };
        survey.places = self.places.into_iter().collect();
        if !self.query.is_oldest_first {
            survey.places.reverse();
        }
        survey
    }
}
