//! The thread for long reads: listings and the audit trail.
//!
//! These reads have their own thread because one page of a listing may take tens of milliseconds. That must not block the
//! caller's executor (the store knows no runtime whose blocking pool it could use) and not the writer. There is only one
//! such thread, so any number of listings at a time occupies one thread at most.

use std::sync::Arc;

use oncegate_core::{AuditEntry, Clock as _, ListPage, ListQuery, RecordId, StoreError, limits};
use redb::{Database, ReadableDatabase as _};

use crate::queue::TakeResult;
use crate::schema::{AUDIT, RECORDS, decode, decode_audit};
use crate::shared::{Scan, StoreInner, closed_error};

/// The most records that one listing call reads.
const MAX_LIST_VISITS: usize = 10_000;

/// The most bytes of records in one page. A single record may be larger.
const MAX_LIST_BYTES: usize = 16 * 1024 * 1024;

/// Runs the thread until the queue is closed and empty.
pub(crate) fn run(inner: &Arc<StoreInner>) {
    let _close_on_drop = CloseOnDrop(inner.clone());
    loop {
        match inner.scans.take(1, usize::MAX, |_| 1, None) {
            TakeResult::Jobs(scans) => scans.into_iter().for_each(|scan| answer(inner, scan)),
            TakeResult::TimedOut => {}
            TakeResult::Closed => return,
        }
    }
}

fn answer(inner: &StoreInner, scan: Scan) {
    // The send fails if the caller has gone away.
    match scan {
        Scan::List { query, reply } => {
            drop(reply.send(inner.read(|database| list(inner, database, &query))));
        }
        Scan::Audit { before, limit, reply } => {
            let read = inner.read(|database| audit(database, before, limit));
            drop(reply.send(read.and_then(|page| page)));
        }
    }
}

fn list(inner: &StoreInner, database: &Database, query: &ListQuery) -> Result<ListPage, redb::Error> {
    let txn = database.begin_read()?;
    let records = txn.open_table(RECORDS)?;
    let now = inner.clock.now();
    let mut page = ListPage::default();
    let mut bytes = 0;
    let from = query.after.map_or([0; 32], |after| *after.as_bytes());
    for (visited, entry) in records.range::<&[u8; 32]>(&from..)?.enumerate() {
        let (id, encoded) = entry?;
        let (id, encoded) = (RecordId::from_bytes(*id.value()), encoded.value());
        if query.after == Some(id) {
            continue;
        }
        match decode(&id, encoded) {
            Ok((_, record)) if query.matches(&record, now) => {
                bytes += encoded.len();
                page.records.push((id, record));
            }
            Ok(_) => {}
            Err(_) => page.unreadable.push(id),
        }
        let full = page.records.len() + page.unreadable.len() >= query.bounded_limit();
        if full || bytes >= MAX_LIST_BYTES || visited + 1 >= MAX_LIST_VISITS {
            page.next = Some(id);
            break;
        }
    }
    Ok(page)
}

fn audit(
    database: &Database,
    before: Option<u64>,
    limit: usize,
) -> Result<Result<Vec<AuditEntry>, StoreError>, redb::Error> {
    let txn = database.begin_read()?;
    let audit = txn.open_table(AUDIT)?;
    let mut entries = Vec::new();
    for entry in audit.range(..before.unwrap_or(u64::MAX))?.rev().take(limit.min(limits::MAX_PAGE_RECORDS)) {
        let (number, encoded) = entry?;
        let number = number.value();
        match decode_audit(number, encoded.value()) {
            Some(entry) => entries.push(entry),
            // A caller can read older entries with `before` set to this number.
            None if entries.is_empty() => {
                return Ok(Err(StoreError::corrupt(format!("audit entry {number} cannot be read"))));
            }
            None => break,
        }
    }
    Ok(Ok(entries))
}

/// Closes the queue and answers waiting callers when the thread ends, also by a panic.
struct CloseOnDrop(Arc<StoreInner>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.scans.close();
        while let TakeResult::Jobs(scans) = self.0.scans.take(usize::MAX, usize::MAX, |_| 1, None) {
            for scan in scans {
                match scan {
                    Scan::List { reply, .. } => drop(reply.send(Err(closed_error()))),
                    Scan::Audit { reply, .. } => drop(reply.send(Err(closed_error()))),
                }
            }
        }
    }
}
