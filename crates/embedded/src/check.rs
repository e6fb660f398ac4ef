//! The check of a log that no process has open.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use oncegate_core::codec;
use oncegate_core::{
    Clock as _, ClockSkew, ID_SECRET_RECORD, LastWrite, Record, RecordId, State, StateName, StoreClock,
    Timestamp,
};

use crate::audit::decode_audit;
use crate::clock::MachineClock;
use crate::disk::{DirectoryDisk, Disk};
use crate::error::EmbeddedOpenError;
use crate::format::{EntryHead, Kind};
use crate::index::{Place, Slot};
use crate::inner::{Limits, Shift, Sizes};
use crate::mark::Marks;
use crate::options::EmbeddedOptions;
use crate::recover::{Item, scan};
use crate::salvage::unaccepted;

/// The result of [`check`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckReport {
    /// `true` if the disk is nearly full. The store refuses new keys until more of the disk is free.
    pub is_disk_low: bool,
    /// The size of all batches in bytes.
    pub bytes: u64,
    /// The reason why new keys are refused, if a limit of the options is reached.
    pub full: Option<String>,
    /// The size of the records in bytes, without those past their retention. Lengths are rounded up, by an eighth at most.
    pub record_bytes: u64,
    /// The number of records in each state, without those past their retention and without the [mark](Self::has_mark).
    pub records: BTreeMap<StateName, u64>,
    /// True if there is the [mark of an id secret](oncegate_core::ID_SECRET_RECORD), which is no record of a request.
    pub has_mark: bool,
    /// The number of records that are past their retention and wait for a purge.
    pub expired: u64,
    /// The records that exist but cannot be read.
    pub unreadable: Vec<RecordId>,
    /// The number of readable audit entries.
    pub audit_entries: u64,
    /// The numbers of audit entries that exist but cannot be read.
    pub unreadable_audit: Vec<u64>,
    /// The disagreement between the clock of this machine and the time of the store.
    pub clock: Option<ClockSkew>,
    /// The log ends with a write that is not complete. It was torn by a crash and never acknowledged, or the disk was damaged.
    pub is_torn: bool,
    /// The file with the losses of a salvaged copy, if there is one: the store does not open until it is removed.
    pub salvaged: Option<PathBuf>,
    /// The reason why a missing end of the log cannot be noticed: the mark is missing or cannot be read. `None` if it can.
    pub unproved_end: Option<String>,
    /// The damage of the log as a whole. If there is any, further records may be missing without being listed above.
    pub damage: Option<String>,
}

impl CheckReport {
    /// Returns `true` if all records and audit entries can be read and the log as a whole is not damaged.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.damage.is_none() && self.unreadable.is_empty() && self.unreadable_audit.is_empty()
    }
}

/// Reads every record of a log that no process has open, and verifies every batch. Changes nothing.
///
/// # Errors
/// [`EmbeddedOpenError`] if the store is in use, has a newer format, or cannot be read at all.
pub fn check(options: &EmbeddedOptions) -> Result<CheckReport, EmbeddedOpenError> {
    check_each(options, &mut |_, _| ())
}

/// As [`check`], and calls `each` for every readable version of every record, in the order of the log: the last version of a
/// record is the one that counts.
///
/// # Errors
/// As for [`check`].
pub fn check_each(
    options: &EmbeddedOptions,
    each: &mut dyn FnMut(RecordId, &Record),
) -> Result<CheckReport, EmbeddedOpenError> {
    let disk = DirectoryDisk::acquire(&options.dir)?;
    let mut report = check_disk(&disk, each)?;
    report.salvaged = unaccepted(&options.dir);
    let limits = Limits { max_records: options.max_records, max_record_bytes: options.max_record_bytes };
    // A start removes those that are past their retention.
    let records =
        report.records.values().sum::<u64>() + u64::from(report.has_mark) + report.unreadable.len() as u64;
    report.full = limits.reached(Sizes::with_memory(options.memory_bytes), records, || report.record_bytes);
    Ok(report)
}

pub(super) fn check_disk(
    disk: &dyn Disk,
    each: &mut dyn FnMut(RecordId, &Record),
) -> Result<CheckReport, EmbeddedOpenError> {
    let mut report = CheckReport { is_disk_low: disk.is_low(), ..CheckReport::default() };
    let list = EmbeddedOpenError::io(format!("list the files in {}", disk.directory().display()));
    let numbers = disk.segments().map_err(list)?;
    let mut seen = Seen::default();
    if numbers.is_empty() {
        let marks = Marks::read(disk)?;
        let file = disk.mark_path();
        report.damage = marks.check_no_segments().err().map(|damage| format!("{}: {damage}", file.display()));
    } else {
        let scanned = scan(disk, &numbers, &mut |item, _| {
            match item {
                Item::Batch { header, .. } => seen.last = Some(header.written),
                Item::Entry { place, head, body } => seen.take(place, &head, body, each),
            }
            Ok(())
        });
        match scanned {
            Ok(scanned) => {
                report.bytes = scanned.segments.iter().map(|segment| segment.used).sum();
                report.is_torn = scanned.is_torn;
                report.unproved_end = scanned.marks.weakness(disk, &scanned.last);
            }
            Err(EmbeddedOpenError::Damaged { damage, file }) => {
                report.damage = Some(format!("{}: {damage}", file.display()));
            }
            Err(error) => return Err(error),
        }
    }
    let clock = match seen.last {
        Some(last) => StoreClock::resume(MachineClock::default(), last),
        None => StoreClock::new(MachineClock::default()),
    };
    report.clock = clock.skew();
    let now = clock.now();
    for (id, record) in seen.records {
        match record {
            Some(record) if now >= record.expires_at => report.expired += 1,
            Some(record) => {
                report.record_bytes += u64::from(record.len);
                if id == ID_SECRET_RECORD {
                    report.has_mark = true;
                    continue;
                }
                *report.records.entry(record.state_name(now)).or_default() += 1;
            }
            None => report.unreadable.push(id),
        }
    }
    report.unreadable.sort_unstable();
    (report.audit_entries, report.unreadable_audit) = (seen.audit_entries, seen.unreadable_audit);
    Ok(report)
}

/// The newest version of each record, as far as the report needs it.
#[derive(Default)]
struct Seen {
    /// `None` for a record that cannot be read.
    records: HashMap<RecordId, Option<Brief>>,
    audit_entries: u64,
    unreadable_audit: Vec<u64>,
    last: Option<LastWrite>,
}

#[derive(Clone, Copy)]
struct Brief {
    /// The state before the end of a lease.
    state: StateName,
    lease_until: Option<Timestamp>,
    changed_at: Timestamp,
    expires_at: Timestamp,
    /// As the index counts it, in bytes.
    len: u32,
}

impl Brief {
    fn state_name(&self, now: Timestamp) -> StateName {
        if self.lease_until.is_some_and(|end| now >= end) { StateName::Abandoned } else { self.state }
    }
}

impl Seen {
    fn take(&mut self, place: Place, head: &EntryHead, body: &[u8], each: &mut dyn FnMut(RecordId, &Record)) {
        match head.kind {
            Kind::Record => {
                let record = codec::decode(&head.id, body).ok();
                if let Some(record) = &record {
                    each(head.id, record);
                }
                let brief = record.map(|record| Brief {
                    state: record.state_name(Timestamp::default()),
                    lease_until: match record.state {
                        State::InProgress { lease_until, .. } => Some(lease_until),
                        _ => None,
                    },
                    changed_at: record.changed_at,
                    expires_at: record.expires_at,
                    len: Slot::new(&head.id, place, head.len() as u64, head.expires).len() as u32,
                });
                match self.records.entry(head.id) {
                    Entry::Occupied(mut known) => drop(known.insert(brief)),
                    Entry::Vacant(new) => drop(new.insert(brief)),
                }
            }
            Kind::Audit => {
                let number = body.first_chunk().map_or(0, |number| u64::from_be_bytes(*number));
                match decode_audit(number, body.get(8..).unwrap_or_default()) {
                    Some(_) => self.audit_entries += 1,
                    None => self.unreadable_audit.push(number),
                }
            }
            Kind::Shift => {
                let Some(Shift { since, by, .. }) = Shift::decode(place, body) else { return };
                for record in self.records.values_mut().flatten().filter(|r| r.changed_at >= since) {
                    record.changed_at = record.changed_at.after(by);
                    record.expires_at = record.expires_at.after(by);
                    record.lease_until = record.lease_until.map(|end| end.after(by));
                }
            }
        }
    }
}
