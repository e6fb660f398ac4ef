//! One transaction: the changes that a batch of commands makes to the tables.
//!
//! A record and its entry in the expiry index point at each other: the entry holds the identifier, and the record's value
//! holds the key of the entry.
//!
//! 1. A new record gets an entry for its expiry.
//! 2. If a later command extends the expiry, the entry stays. [`Batch::purge`] finds it due, sees that the record has not
//!    expired, and replaces it by a later entry. That saves a write for every renewal and completion.
//! 3. If a later command shortens the life of the record by more than [`EXPIRY_SLACK`], the entry is replaced at once.
//! 4. A deletion and a purge remove the record together with its entry.

use std::time::Duration;

use oncegate_core::{
    AuditEntry, Command, ErrorChain, Outcome, Record, RecordId, StoreError, Timestamp, Write, decide, limits,
};
use redb::{ReadableTable as _, ReadableTableMetadata as _, StorageError, Table, WriteTransaction};
use tracing::error;

use crate::schema::{AUDIT, EXPIRY, ExpiryKey, RECORDS, decode, due_step, encode, encode_audit};
use crate::shared::{
    damaged_page_error, disk_low_error, full_error, hidden_record_error, is_damage, unreadable_error,
};

/// The most entries of the expiry index that one transaction reads, so that a purge does not delay other commands.
const MAX_PURGE_VISITS: usize = 256;

/// The time for which a record may outlive its retention before its expiry entry is replaced.
///
/// A completed record often expires a little earlier than its claim stated. Replacing the entry each time would cost one
/// more write for every completion.
const EXPIRY_SLACK: Duration = Duration::from_secs(600);

/// The interval at which a purge retries an unreadable record, which it never removes.
const UNREADABLE_RECHECK_INTERVAL: Duration = Duration::from_secs(24 * 60 * 60);

/// An open transaction, its tables and its running totals.
pub(crate) struct Batch<'txn> {
    txn: &'txn WriteTransaction,
    records: Table<'txn, &'static [u8; 32], &'static [u8]>,
    expiry: Table<'txn, (u64, u64), &'static [u8; 32]>,
    now: Timestamp,
    capacity: Capacity,
    /// The number for the next entry of the expiry index.
    pub(crate) next_number: u64,
    pub(crate) changed: bool,
    /// The total size of all records.
    pub(crate) record_bytes: u64,
}

/// The limits for new records, and the conditions under which claims are refused.
#[derive(Clone, Debug)]
pub(crate) struct Capacity {
    pub(crate) max_records: u64,
    pub(crate) max_record_bytes: u64,
    /// The disk is nearly full. Then all claims are refused, so that running requests can still be completed.
    pub(crate) is_disk_low: bool,
    /// A part of the file is damaged, so a record that is not found may still exist.
    pub(crate) is_damaged: bool,
}

impl<'txn> Batch<'txn> {
    pub(crate) fn new(
        txn: &'txn WriteTransaction,
        now: Timestamp,
        capacity: Capacity,
        (next_number, record_bytes): (u64, u64),
    ) -> Result<Self, redb::Error> {
        let (records, expiry) = (txn.open_table(RECORDS)?, txn.open_table(EXPIRY)?);
        Ok(Self { txn, records, expiry, now, capacity, next_number, changed: false, record_bytes })
    }

    /// Applies one command.
    ///
    /// The inner error concerns only this command, which changed nothing. The outer error fails the whole transaction.
    pub(crate) fn apply(
        &mut self,
        id: RecordId,
        command: &Command,
    ) -> Result<Result<Outcome, StoreError>, redb::Error> {
        let (note, record) = match self.records.get(id.as_bytes()) {
            Ok(None) => (None, None),
            Ok(Some(encoded)) => match decode(&id, encoded.value()) {
                Ok((note, record)) => (Some(note), Some(record)),
                Err(error) => {
                    self.capacity.is_damaged |= is_damage(&error);
                    return Ok(Err(unreadable_error(&id, error)));
                }
            },
            Err(StorageError::Corrupted(damage)) => {
                self.capacity.is_damaged = true;
                return Ok(Err(damaged_page_error(&damage)));
            }
            Err(error) => return Err(error.into()),
        };
        let decision = decide(record.as_ref(), command, self.now);
        match &decision.write {
            Write::Keep => return Ok(Ok(decision.outcome)),
            Write::Put(after) => {
                if matches!(command, Command::Claim(_))
                    && let Some(refusal) = self.capacity_error(record.is_none())?
                {
                    return Ok(Err(refusal));
                }
                let latest = due_step(after.expires_at.after(EXPIRY_SLACK));
                let note = match note.filter(|(due, _)| *due <= latest) {
                    Some(note) => note,
                    None => {
                        note.map(|note| self.expiry.remove(note)).transpose()?;
                        self.add_expiry_entry(after.expires_at, id.as_bytes())?
                    }
                };
                self.put(&id, note, after)?;
                if let (Command::Resolve(resolve), Outcome::Resolved { from }) = (command, &decision.outcome)
                {
                    self.add_audit(AuditEntry {
                        number: 0,
                        at: self.now,
                        id,
                        from: *from,
                        to: after.state_name(self.now),
                        actor: resolve.actor.clone(),
                        reason: resolve.reason.clone(),
                    })?;
                }
            }
        }
        self.changed = true;
        Ok(Ok(decision.outcome))
    }

    /// Returns `true` if damage was found, in this transaction or before it.
    pub(crate) const fn is_damaged(&self) -> bool {
        self.capacity.is_damaged
    }

    /// Returns the error for a claim that the protocol grants but the capacity does not allow.
    fn capacity_error(&self, is_new: bool) -> Result<Option<StoreError>, redb::Error> {
        match is_new {
            true if self.is_damaged() => Ok(Some(hidden_record_error())),
            true => self.full(),
            false => Ok(self.capacity.is_disk_low.then(disk_low_error)),
        }
    }

    /// Returns the error for a claim of a new key if the disk or a limit is exhausted.
    pub(crate) fn full(&self) -> Result<Option<StoreError>, redb::Error> {
        let Capacity { max_records, max_record_bytes, is_disk_low, .. } = self.capacity;
        Ok(if is_disk_low {
            Some(disk_low_error())
        } else if self.records.len()? >= max_records {
            Some(full_error(&format!(
                "it has reached its limit of {max_records} records: raise the limit, or wait until records expire"
            )))
        } else if self.record_bytes >= max_record_bytes {
            Some(full_error(&format!(
                "its records have reached their limit of {max_record_bytes} bytes: raise the limit, or wait until records expire"
            )))
        } else {
            None
        })
    }

    fn put(&mut self, id: &RecordId, note: ExpiryKey, record: &Record) -> Result<(), redb::Error> {
        let encoded = encode(id, note, record);
        let before = self.records.insert(id.as_bytes(), encoded.as_slice())?;
        let before = before.map_or(0, |old| old.value().len());
        self.record_bytes = (self.record_bytes + encoded.len() as u64).saturating_sub(before as u64);
        Ok(())
    }

    fn remove(&mut self, id: &[u8; 32]) -> Result<(), redb::Error> {
        let before = self.records.remove(id)?.map_or(0, |old| old.value().len());
        self.record_bytes = self.record_bytes.saturating_sub(before as u64);
        Ok(())
    }

    /// Moves the times of every record that was written since `since` forward by `by`. Reads all records.
    ///
    /// The store's clock is about to move forward by the same amount, so these records keep their age.
    pub(crate) fn shift(&mut self, since: Timestamp, by: Duration) -> Result<usize, redb::Error> {
        let mut later = Vec::new();
        for entry in self.records.iter()? {
            let (id, encoded) = entry?;
            let id = RecordId::from_bytes(*id.value());
            match decode(&id, encoded.value()) {
                Ok((_, record)) if record.changed_at >= since => later.push(id),
                _ => {}
            }
        }
        for id in &later {
            let record = self.records.get(id.as_bytes())?.map(|encoded| decode(id, encoded.value()));
            if let Some(Ok((note, record))) = record {
                self.put(id, note, &record.shifted(by))?;
            }
        }
        self.changed = true;
        Ok(later.len())
    }

    fn add_audit(&self, entry: AuditEntry) -> Result<(), redb::Error> {
        let mut audit = self.txn.open_table(AUDIT)?;
        let number = audit.last()?.map_or(0, |(number, _)| number.value()) + 1;
        audit.insert(number, encode_audit(&entry).as_slice())?;
        while audit.len()? > limits::MAX_AUDIT_ENTRIES {
            audit.pop_first()?;
        }
        Ok(())
    }

    /// Removes at most `limit` expired records, and reads at most [`MAX_PURGE_VISITS`] index entries.
    ///
    /// Returns the number of removed records, and `true` if there may be more.
    pub(crate) fn purge(&mut self, limit: usize) -> Result<(usize, bool), redb::Error> {
        let count = limit.min(MAX_PURGE_VISITS);
        let mut due = Vec::with_capacity(count);
        for entry in self.expiry.range(..=(self.now.as_millis(), u64::MAX))?.take(count) {
            let (key, id) = entry?;
            due.push((key.value(), *id.value()));
        }
        let mut purged = 0;
        for (key, id) in &due {
            self.changed = true;
            self.expiry.remove(key)?;
            let Some(encoded) = self.records.get(id)?.map(|encoded| encoded.value().to_vec()) else {
                continue;
            };
            match decode(&RecordId::from_bytes(*id), &encoded) {
                Ok((_, record)) if self.now >= record.expires_at => {
                    self.remove(id)?;
                    purged += 1;
                }
                Ok((_, record)) => {
                    let note = self.add_expiry_entry(record.expires_at, id)?;
                    self.put(&RecordId::from_bytes(*id), note, &record)?;
                }
                Err(error) => {
                    error!(id = %RecordId::from_bytes(*id), error = %ErrorChain(&error), "a record cannot be read and is kept: run `oncegate check`");
                    self.add_expiry_entry(self.now.after(UNREADABLE_RECHECK_INTERVAL), id)?;
                }
            }
        }
        Ok((purged, due.len() == count && count > 0))
    }

    /// Adds an entry to the expiry index.
    fn add_expiry_entry(&mut self, expires_at: Timestamp, id: &[u8; 32]) -> Result<ExpiryKey, redb::Error> {
        let note = (due_step(expires_at), self.next_number);
        self.expiry.insert(note, id)?;
        self.next_number += 1;
        Ok(note)
    }
}
