//! Reports the keys that encrypt stored responses, and the records that need each key.

use std::collections::{BTreeMap, HashMap};

use oncegate_core::{
    ErrorChain, ListQuery, Record, RecordId, RecordedResponse, State, Store, StoreError, Timestamp, limits,
};
use oncegate_seal::{Keyring, SealInfo, SealKeyId};

use super::Report;
use crate::config::{SealKeySource, SealSettings, rounded_duration_text, shown_program};
use crate::seal;

/// Reports the keys by their ids. A program that prints them runs only online.
pub(super) fn keys(settings: &SealSettings, is_online: bool, report: &mut Report) {
    if let SealKeySource::Command(words) = &settings.source
        && !is_online
    {
        let program = words.first().map_or_else(String::new, |word| shown_program(word));
        return report
            .ok(format!("sealing: the program {program} prints the keys; it runs only with --online"));
    }
    match crate::block_on(seal::load(settings, |line| complain!("{line}"))).flatten() {
        Ok(keys) => report.ok(format!("sealing: {}", seal::describe(&keys))),
        Err(why) => report.error(format!("sealing: {why}")),
    }
}

/// The most records of a shared store that are read, with their responses: a second's work on a common server. Their identifiers
/// are hashes, so they are a random choice.
const MAX_RECORDS: usize = 10_000;

/// The expectations about the seals of records.
#[derive(Clone, Copy, Default)]
pub(super) struct SealRules<'a> {
    /// The keys of the configuration, if they are known.
    pub(super) keys: Option<&'a Keyring>,
    /// True if the configuration has keys, known or not.
    pub(super) seals: bool,
    /// True if parts in clear are refused.
    pub(super) is_required: bool,
}

/// The keys that the records of a store need.
pub(super) struct SealCount {
    /// The keys and the end of the retention of each record, by its newest version. No keys are those of a record in clear.
    records: HashMap<RecordId, (Vec<SealKeyId>, Timestamp)>,
    counts_clear: bool,
}

impl SealCount {
    pub(super) fn new(rules: SealRules<'_>) -> Self {
        Self { records: HashMap::new(), counts_clear: rules.seals }
    }

    pub(super) fn add(&mut self, id: RecordId, record: &Record) {
        let mut keys: Vec<_> = SealInfo::of_record(record).map(|seal| seal.key).collect();
        keys.sort_unstable();
        keys.dedup();
        // A later version of a record may have no seal.
        match keys.is_empty() && !(self.counts_clear && has_response(record)) {
            true => drop(self.records.remove(&id)),
            false => drop(self.records.insert(id, (keys, record.expires_at))),
        }
    }

    /// Reports the number of records of each key, and of those in clear. `shown` names the store, `now` is its time.
    pub(super) fn report(self, shown: &str, rules: SealRules<'_>, now: Timestamp, report: &mut Report) {
        let SealRules { keys, is_required, .. } = rules;
        let mut counts: BTreeMap<SealKeyId, u64> = BTreeMap::new();
        let (mut clear, mut last_end) = (0_u64, Timestamp::default());
        for (of_record, end) in self.records.into_values().filter(|(_, end)| *end > now) {
            if of_record.is_empty() {
                clear += 1;
                last_end = last_end.max(end);
            }
            of_record.into_iter().for_each(|key| *counts.entry(key).or_default() += 1);
        }
        if clear > 0 {
            let end = rounded_duration_text(last_end.since(now));
            let responses = if clear == 1 { "1 response".to_owned() } else { format!("{clear} responses") };
            match is_required {
                true => report.warn(format!(
                    "store {shown}: {responses} in clear: with seal-required, their retries are refused (response-sealed) until the \
                     last of their retentions ends, in {end}"
                )),
                false => report.ok(format!(
                    "store {shown}: {responses} in clear; the last of their retentions ends in {end}"
                )),
            }
        }
        for (key, count) in counts {
            match keys {
                Some(keys) if !keys.has(key) => report.error(format!(
                    "store {shown}: the key {key}, which is not among the seal keys, sealed {count} of the records; their retries are \
                     refused until it is added"
                )),
                _ => report.ok(format!("store {shown}: the key {key} sealed {count} of the records")),
            }
        }
    }
}

/// Counts the records of a shared store, up to [`MAX_RECORDS`] of them.
pub(super) async fn shared(
    store: &dyn Store,
    shown: &str,
    rules: SealRules<'_>,
    report: &mut Report,
) -> Result<(), StoreError> {
    let mut seals = SealCount::new(rules);
    let (mut query, mut read) = (ListQuery::default(), 0);
    query.limit = limits::MAX_PAGE_RECORDS;
    loop {
        let page = store.list(query.clone()).await?;
        read += page.records.len();
        page.records.iter().for_each(|(id, record)| seals.add(*id, record));
        query.after = page.next;
        if query.after.is_none() {
            break;
        }
        if read >= MAX_RECORDS {
            report.ok(format!(
                "store {shown}: only the first {read} records were read for their seals; `oncegate seal-key usage` counts all"
            ));
            break;
        }
    }
    seals.report(shown, rules, store.now(), report);
    Ok(())
}

/// Reports why the records were not counted.
pub(super) fn not_counted(shown: &str, error: &StoreError, report: &mut Report) {
    report.warn(format!("store {shown}: the records were not read for their seals: {}", ErrorChain(error)));
}

/// Returns true if the record has a response that could be sealed.
const fn has_response(record: &Record) -> bool {
    matches!(record.state, State::Completed(RecordedResponse::Replayable(_)))
}
