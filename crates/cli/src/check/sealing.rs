//! Reports the keys that encrypt stored responses, and the records that need each key.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use oncegate_core::{Clock as _, Record, RecordId, SystemClock, Timestamp};
use oncegate_seal::{Keyring, SealInfo, SealKeyId};

use super::Report;
use crate::config::{SealKeySource, SealSettings};
use crate::seal;

/// Reports the keys by their ids. A program that prints them runs only online.
pub(super) fn keys(settings: &SealSettings, is_online: bool, report: &mut Report) {
    if let SealKeySource::Command(words) = &settings.source
        && !is_online
    {
        let program = words.first().map_or("", String::as_str);
        return report
            .ok(format!("sealing: the program {program} prints the keys; it runs only with --online"));
    }
    match crate::block_on(seal::load(settings, |line| complain!("{line}"))).flatten() {
        Ok(keys) => report.ok(format!("sealing: {}", seal::describe(&keys))),
        Err(why) => report.error(format!("sealing: {why}")),
    }
}

/// The keys that the records of a store need.
#[derive(Default)]
pub(super) struct SealCount {
    /// The keys and the end of the retention of each record, by its newest version.
    records: HashMap<RecordId, (Vec<SealKeyId>, Timestamp)>,
}

impl SealCount {
    pub(super) fn add(&mut self, id: RecordId, record: &Record) {
        let keys: Vec<_> = SealInfo::of_record(record).map(|seal| seal.key).collect();
        // A later version of a record may have no seal.
        match keys.is_empty() {
            true => drop(self.records.remove(&id)),
            false => drop(self.records.insert(id, (keys, record.expires_at))),
        }
    }

    /// Reports the number of records of each key. `keys` are those of the configuration, if they are known.
    pub(super) fn report(self, dir: &Path, keys: Option<&Keyring>, report: &mut Report) {
        let now = SystemClock::new().now();
        let mut counts: BTreeMap<SealKeyId, u64> = BTreeMap::new();
        for (mut of_record, _) in self.records.into_values().filter(|(_, end)| *end > now) {
            of_record.sort_unstable();
            of_record.dedup();
            of_record.into_iter().for_each(|key| *counts.entry(key).or_default() += 1);
        }
        let shown = dir.display();
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
