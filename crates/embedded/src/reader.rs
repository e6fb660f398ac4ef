//! The thread that reads much: listings and the audit trail.
//!
//! A thread of its own, because a page of a listing may take tens of milliseconds of reading, which must hold up neither
//! the caller's executor (the store knows no runtime whose blocking pool it could use) nor the writer; and one only, so
//! that any number of operators slow the machine down by one thread at the most.

use std::sync::Arc;

use oncegate_core::{AuditEntry, Clock as _, ListPage, ListQuery, RecordId, StoreError, limits};
use redb::{Database, ReadableDatabase as _};

use crate::queue::TakeResult;
use crate::schema::{AUDIT, RECORDS, decode, decode_audit};
use crate::shared::{Scan, StoreInner, closed_error};

/// The most records that one call looks at.
const MAX_LIST_VISITS: usize = 10_000;

/// The most octets of records in one page, but for one record that is larger.
const MAX_LIST_BYTES: usize = 16 * 1024 * 1024;

/// Until the queue is closed and empty.
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
    // Nobody may be waiting any more.
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
            // What is older can be read from before it.
            None if entries.is_empty() => {
                return Ok(Err(StoreError::corrupt(format!("audit entry {number} cannot be read"))));
            }
            None => break,
        }
    }
    Ok(Ok(entries))
}

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
