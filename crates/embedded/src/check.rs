//! The check of a store that no process has open.

use std::collections::BTreeMap;

use oncegate_core::{Clock as _, ClockSkew, RecordId, StateName, StoreClock};
use redb::{Database, ReadableDatabase as _, ReadableTable as _};

use crate::clock::MachineClock;
use crate::database::{self, FileMedium, Medium as _, UnverifiedFile, catch_panics};
use crate::error::EmbeddedOpenError;
use crate::options::EmbeddedOptions;
use crate::schema::{AUDIT, META, RECORDS, decode, decode_audit};

/// The result of [`check`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckReport {
    /// `true` if the disk is nearly full. The store refuses new keys until more of the disk is free.
    pub is_disk_low: bool,
    /// The size of the file in bytes.
    pub bytes: u64,
    /// The number of records in each state, without those past their retention.
    pub records: BTreeMap<StateName, u64>,
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
    /// The damage of the file as a whole. If there is any, further records may be missing without being listed above.
    pub damage: Option<String>,
}

impl CheckReport {
    /// Returns `true` if all records and audit entries can be read and the file as a whole is not damaged.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.damage.is_none() && self.unreadable.is_empty() && self.unreadable_audit.is_empty()
    }
}

/// Reads every record and verifies every page of a store that no process has open.
///
/// A store that was not stopped cleanly is repaired first, in the same way as when it is opened.
///
/// # Errors
/// [`EmbeddedOpenError`] if the store is in use or cannot be opened at all.
pub fn check(options: &EmbeddedOptions) -> Result<CheckReport, EmbeddedOpenError> {
    let medium = FileMedium::acquire(&options.dir)?;
    let path = medium.path();
    database::check_format(&path, medium.peek_format())?;
    let UnverifiedFile { mut database, bytes, .. } = catch_panics(&path, || {
        let opened = database::open_unverified(&medium, options.cache_bytes)?;
        database::check_format(&path, Some(database::read_format(&path, &opened.database)?))?;
        Ok(opened)
    })?;
    medium.read_ahead()();
    let mut report = CheckReport { bytes, is_disk_low: medium.is_disk_low(), ..CheckReport::default() };
    let read = |report: &mut CheckReport| {
        read_all(&database, report).map_err(|error| database::error_of(&path, error))
    };
    report.damage = damage(catch_panics(&path, || read(&mut report)))?;
    report.damage = damage(catch_panics(&path, || database::verify(&path, &mut database)))?.or(report.damage);
    // Closing a damaged file may panic, too.
    let closed = catch_panics(&path, || {
        drop(database);
        Ok(())
    });
    report.damage = report.damage.or(damage(closed)?);
    Ok(report)
}

/// Extracts the damage from an error. Any other error ends the check.
fn damage(result: Result<(), EmbeddedOpenError>) -> Result<Option<String>, EmbeddedOpenError> {
    match result {
        Ok(()) => Ok(None),
        Err(EmbeddedOpenError::Damaged { damage, .. }) => Ok(Some(damage)),
        Err(error) => Err(error),
    }
}

fn read_all(database: &Database, report: &mut CheckReport) -> Result<(), redb::Error> {
    let txn = database.begin_read()?;
    let clock = MachineClock::default();
    let clock = match database::last_write(&txn.open_table(META)?)? {
        Some(last) => StoreClock::resume(clock, last),
        None => StoreClock::new(clock),
    };
    report.clock = clock.skew();
    let now = clock.now();
    for entry in txn.open_table(RECORDS)?.iter()? {
        let (id, encoded) = entry?;
        let id = RecordId::from_bytes(*id.value());
        match decode(&id, encoded.value()) {
            Ok((_, record)) if record.is_expired(now) => report.expired += 1,
            Ok((_, record)) => *report.records.entry(record.state_name(now)).or_default() += 1,
            Err(_) => report.unreadable.push(id),
        }
    }
    for entry in txn.open_table(AUDIT)?.iter()? {
        let (number, encoded) = entry?;
        match decode_audit(number.value(), encoded.value()) {
            Some(_) => report.audit_entries += 1,
            None => report.unreadable_audit.push(number.value()),
        }
    }
    Ok(())
}
