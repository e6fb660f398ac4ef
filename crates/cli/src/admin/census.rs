//! Counts the records that are not settled, at a cost that does not grow with the store.
//!
//! No store keeps such a count, because that would cost a write with every request. So a task walks through the store, a page
//! at a time, and rests [`REST_FACTOR`] times as long as the page took: a walk through ten million records takes about an
//! hour and one per cent of one core. Between the pages, the task reads the known unsettled records again, and those that this
//! process left without an outcome. So the gauges show within seconds which records this process leaves unsettled and which
//! operators resolve. Records that other processes or a crash left are counted when the walk reaches them.
//!
//! A record whose retention ends is removed even if it waits for an operator, and its key executes again. The log reports it
//! before that and afterwards.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use oncegate_core::{
    ErrorChain, ID_SECRET_RECORD, Label, ListQuery, Record, RecordId, State, StateName, StateSet, Store,
    StoreError, Timestamp, limits,
};
use oncegate_engine::{Event, EventKind, Observer};
use oncegate_http::SHADOW_OPERATION;
use tokio::time::Instant;

use super::Metrics;
use crate::config::rounded_duration_text;

/// The rest after a page of a walk, as a multiple of the time that the page took.
const REST_FACTOR: u32 = 100;

/// The pause between two walks, and between two checks of the known records.
const INTERVAL: Duration = Duration::from_secs(5);

/// The most unsettled records that are remembered one by one. If there are more, only a walk counts them.
const MAX_KNOWN: usize = 10_000;

/// The most known records that are read again at a time.
const MAX_REREAD: usize = 200;

/// The time before the end of its retention at which the log reports an unsettled record; at most a quarter of the
/// retention.
const LAST_CALL: Duration = Duration::from_secs(24 * 3600);

/// The records that this process left without an outcome, with what was [noted](Self::note) about them. All clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct AbandonedRecords(Arc<Mutex<BTreeMap<RecordId, Option<CountedRecord>>>>);

impl AbandonedRecords {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<RecordId, Option<CountedRecord>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, id: RecordId) {
        let mut left = self.lock();
        if left.len() < MAX_KNOWN {
            left.entry(id).or_default();
        }
    }

    /// Reads the unsettled ones that the census has not read yet, so that it reports them if they are gone when it does.
    pub(super) async fn note(&self, store: &dyn Store) {
        let ids: Vec<_> = self.lock().keys().copied().collect();
        for id in ids {
            // After an error, the census reads them, as it would without this.
            let Ok(record) = store.lookup(id).await else { return };
            let counted = record.map(|record| CountedRecord::of(&record, store.now()));
            if let Some(noted) = self.lock().get_mut(&id) {
                *noted = counted.filter(CountedRecord::is_unsettled);
            }
        }
    }
}

impl Observer for AbandonedRecords {
    fn observe(&self, event: &Event) {
        if let EventKind::Parked | EventKind::SettlementLost | EventKind::Abandoned = event.kind {
            self.add(event.id);
        }
    }
}

/// The number of unsettled records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) in_progress: u64,
    pub(crate) abandoned: u64,
    pub(crate) unknown: u64,
    /// The time from which the oldest unsettled record waits for an operator.
    pub(crate) oldest: Option<Timestamp>,
    /// The earliest end of the retention of an unsettled record.
    pub(crate) first_end: Option<Timestamp>,
}

impl Counts {
    fn add(&mut self, record: &CountedRecord) {
        match record.state {
            StateName::InProgress => self.in_progress += 1,
            StateName::Abandoned => self.abandoned += 1,
            StateName::Unknown => self.unknown += 1,
            _ => return,
        }
        if record.is_unsettled() {
            self.oldest = Some(self.oldest.map_or(record.since, |oldest| oldest.min(record.since)));
            self.first_end = Some(self.first_end.map_or(record.end, |end| end.min(record.end)));
        }
    }

    const fn unsettled(&self) -> u64 {
        self.abandoned + self.unknown
    }
}

/// The remembered facts about a record.
#[derive(Clone, Debug)]
struct CountedRecord {
    state: StateName,
    /// The time at which it came into this state.
    since: Timestamp,
    /// The end of its retention.
    end: Timestamp,
    label: Label,
    /// True if the log has reported that its retention ends soon.
    is_last_call_made: bool,
}

impl CountedRecord {
    fn of(record: &Record, now: Timestamp) -> Self {
        let since = match record.state {
            State::InProgress { lease_until, .. } if lease_until <= now => lease_until,
            _ => record.changed_at,
        };
        Self {
            state: record.state_name(now),
            since,
            end: record.expires_at,
            label: record.label.clone(),
            is_last_call_made: false,
        }
    }

    fn is_unsettled(&self) -> bool {
        StateSet::UNSETTLED.contains(self.state)
    }

    /// Returns true for a record of a route that only observes. No operator has to settle it.
    fn is_shadow(&self) -> bool {
        self.label.operation().starts_with(SHADOW_OPERATION)
    }

    fn is_last_call(&self, now: Timestamp) -> bool {
        self.end.since(now) <= LAST_CALL.min(self.end.since(self.since) / 4)
    }
}

/// Logs that no operator settled a record in time. This is the last line about the record, which no longer exists.
fn log_expired(id: RecordId, record: &CountedRecord) {
    tracing::warn!(
        record = %id,
        operation = record.label.operation(),
        state = record.state.as_str(),
        since = super::view::time(record.since),
        "a record was removed at the end of its retention, and no operator had settled it: its outcome stays unknown, and its key executes again"
    );
}

/// Counts until it is dropped.
///
/// `list` is the command for operators in the lines of the log.
pub(crate) async fn run(store: Arc<dyn Store>, left: AbandonedRecords, metrics: Metrics, list: String) {
    let mut census = Census {
        store,
        left,
        metrics,
        list,
        known: BTreeMap::new(),
        reread_after: None,
        is_partial: false,
        in_progress: None,
        reported: 0,
    };
    loop {
        if let Err(error) = census.walk().await {
            tracing::debug!(error = %ErrorChain(&error), "cannot count the unsettled records; trying again");
        }
        tokio::time::sleep(INTERVAL).await;
        census.reread().await;
    }
}

struct Census {
    store: Arc<dyn Store>,
    left: AbandonedRecords,
    metrics: Metrics,
    /// The command that lists the unsettled records.
    list: String,
    /// The unsettled records that are known.
    known: BTreeMap<RecordId, CountedRecord>,
    /// The last known record that was read again.
    reread_after: Option<RecordId>,
    /// True if there are more unsettled records than are remembered.
    is_partial: bool,
    /// The result of the last walk.
    in_progress: Option<u64>,
    /// The number of unsettled records that the log has reported.
    reported: u64,
}

impl Census {
    /// One walk through the store. Between its pages the known records are read again.
    async fn walk(&mut self) -> Result<(), StoreError> {
        let mut query = ListQuery::default();
        query.states = StateSet::OPEN;
        query.limit = limits::MAX_PAGE_RECORDS;
        let (mut found, mut counts, mut is_partial) = (BTreeMap::new(), Counts::default(), false);
        let mut reread_at = Instant::now() + INTERVAL;
        loop {
            let started = Instant::now();
            let page = self.store.list(query.clone()).await?;
            let now = self.store.now();
            for (id, record) in &page.records {
                let counted = CountedRecord::of(record, now);
                if counted.is_shadow() || *id == ID_SECRET_RECORD {
                    continue;
                }
                counts.add(&counted);
                if counted.is_unsettled() {
                    is_partial |= found.len() >= MAX_KNOWN;
                    if !is_partial {
                        found.insert(*id, counted);
                    }
                }
            }
            query.after = page.next;
            if query.after.is_none() {
                break;
            }
            let until = Instant::now() + started.elapsed() * REST_FACTOR;
            while Instant::now() < until {
                tokio::time::sleep_until(until.min(reread_at)).await;
                if reread_at <= Instant::now() {
                    self.reread().await;
                    reread_at = Instant::now() + INTERVAL;
                }
            }
        }
        let earlier = std::mem::replace(&mut self.known, found);
        for (id, record) in earlier {
            match self.known.get_mut(&id) {
                Some(found) => found.is_last_call_made = record.is_last_call_made,
                None => self.report_removed(id, &record),
            }
        }
        self.is_partial = is_partial;
        self.in_progress = Some(counts.in_progress);
        self.metrics.set_counts(counts);
        self.report(counts);
        // For records that this process left after the walk had passed them.
        self.reread().await;
        Ok(())
    }

    /// Reads the records that this process left without an outcome, and some of the known records.
    async fn reread(&mut self) {
        let mut ids: BTreeSet<_> = self.left.lock().keys().copied().collect();
        let from = self.reread_after.map_or(Bound::Unbounded, Bound::Excluded);
        let next: Vec<_> =
            self.known.range((from, Bound::Unbounded)).map(|(id, _)| *id).take(MAX_REREAD).collect();
        self.reread_after = next.last().copied().filter(|_| next.len() == MAX_REREAD);
        ids.extend(next);
        for id in ids {
            // After an error, the rest is read the next time.
            let Ok(record) = self.store.lookup(id).await else { return };
            let now = self.store.now();
            let counted = record.as_ref().map(|record| CountedRecord::of(record, now));
            let is_open = counted.as_ref().is_some_and(|record| record.state == StateName::InProgress);
            let noted = if is_open { None } else { self.left.lock().remove(&id).flatten() };
            match (counted.filter(CountedRecord::is_unsettled), self.known.remove(&id).or(noted)) {
                (Some(mut counted), known) => {
                    counted.is_last_call_made = known.is_some_and(|known| known.is_last_call_made);
                    self.known.insert(id, counted);
                }
                (None, Some(known)) if record.is_none() => self.report_removed(id, &known),
                _ => {}
            }
        }
        self.call_last();
        let Some(in_progress) = self.in_progress.filter(|_| !self.is_partial) else { return };
        let mut counts = Counts { in_progress, ..Counts::default() };
        for record in self.known.values() {
            counts.add(record);
        }
        self.metrics.set_counts(counts);
    }

    /// Reports an unsettled record that is gone, if its retention is over. Otherwise an operator settled it.
    fn report_removed(&self, id: RecordId, record: &CountedRecord) {
        if record.end <= self.store.now() {
            self.metrics.count_expired_unsettled();
            log_expired(id, record);
        }
    }

    /// Logs the records that are removed soon. Each is reported once, in one line with all that are found at the same time.
    fn call_last(&mut self) {
        let now = self.store.now();
        let (mut records, mut first) = (0_usize, None);
        for record in self.known.values_mut() {
            if !record.is_last_call_made && record.is_last_call(now) {
                record.is_last_call_made = true;
                records += 1;
                first = first.min(Some(record.end)).or(Some(record.end));
            }
        }
        if let Some(first) = first {
            tracing::warn!(
                records,
                first_in = rounded_duration_text(first.since(now)),
                "records that wait for an operator are removed soon, at the end of their retention, and their keys execute again; see \
                 `{}`",
                self.list
            );
        }
    }

    /// Logs records that other processes left, or that were left before the start.
    fn report(&mut self, counts: Counts) {
        let unsettled = counts.unsettled();
        if unsettled > self.reported {
            let oldest = counts.oldest.map_or(Duration::ZERO, |oldest| self.store.now().since(oldest));
            tracing::warn!(
                unsettled,
                oldest = rounded_duration_text(oldest),
                "records with an unknown outcome wait for an operator: run `{}`",
                self.list
            );
        }
        self.reported = unsettled;
    }
}
