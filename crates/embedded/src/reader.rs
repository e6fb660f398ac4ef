//! The thread for long reads: listings and the audit trail.
//!
//! These reads have their own thread because one page may take tens of milliseconds, which must not block the caller's executor.

use std::sync::Arc;

use oncegate_core::codec;
use oncegate_core::{AuditEntry, Clock as _, ListPage, ListQuery, RecordId, StoreError, limits};

use crate::audit::decode_audit;
use crate::format::Kind;
use crate::index::{SHARDS, Slot, prefix, shard_number};
use crate::inner::StoreInner;
use crate::queue::TakeResult;
use crate::shared::{Scan, closed_error};

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
        Scan::List { query, reply } => drop(reply.send(list(inner, &query))),
        Scan::Audit { before, limit, reply } => drop(reply.send(audit(inner, before, limit))),
    }
}

/// Lists records as they are on the disk, in the order of their identifiers: shard by shard, each sorted.
fn list(inner: &StoreInner, query: &ListQuery) -> Result<ListPage, StoreError> {
    let now = inner.clock.now();
    let mut page = ListPage::default();
    let (mut bytes, mut visited) = (0, 0);
    let after = query.after.unwrap_or(RecordId::from_bytes([0; 32]));
    for number in shard_number(prefix(&after))..SHARDS {
        let mut slots: Vec<Slot> = inner.index.shard(number).slots().copied().collect();
        slots.retain(|slot| slot.prefix() >= prefix(&after));
        slots.sort_unstable_by_key(Slot::prefix);
        let mut slots = slots.into_iter().peekable();
        while let Some(first) = slots.next() {
            // Those with the same first bytes are few. They are read together, and sorted by the whole identifier.
            let mut same = vec![first];
            while let Some(next) = slots.next_if(|slot| slot.prefix() == first.prefix()) {
                same.push(next);
            }
            let mut found = Vec::new();
            for slot in same {
                let Some((head, body)) = inner.read_entry(&slot)? else { continue };
                visited += 1;
                match head.filter(|head| head.kind == Kind::Record && prefix(&head.id) == slot.prefix()) {
                    Some(head) => {
                        found.push((head.id, codec::decode(&head.id, &body).ok(), slot, body.len()))
                    }
                    None => found.push((padded(slot.prefix()), None, slot, 0)),
                }
            }
            found.sort_by_key(|(id, ..)| *id);
            for (id, record, slot, len) in found {
                if query.after.is_some_and(|after| id <= after) {
                    continue;
                }
                match record.map(|record| inner.shifted(record, slot.place())) {
                    Some(record) if query.matches(&record, now) => {
                        bytes += len;
                        page.records.push((id, record));
                    }
                    Some(_) => {}
                    None => page.unreadable.push(id),
                }
                let full = page.records.len() + page.unreadable.len() >= query.bounded_limit();
                if full || bytes >= MAX_LIST_BYTES || visited >= MAX_LIST_VISITS {
                    page.next = Some(id);
                    return Ok(page);
                }
            }
        }
    }
    Ok(page)
}

/// The identifier of a record of which only the first bytes can be read.
fn padded(prefix: u64) -> RecordId {
    let mut id = [0; 32];
    if let Some(place) = id.first_chunk_mut() {
        *place = prefix.to_be_bytes();
    }
    RecordId::from_bytes(id)
}

fn audit(inner: &StoreInner, before: Option<u64>, limit: usize) -> Result<Vec<AuditEntry>, StoreError> {
    let before = before.unwrap_or(u64::MAX);
    let limit = limit.min(limits::MAX_PAGE_RECORDS);
    let slots: Vec<(u64, Slot)> =
        inner.audits().iter().rev().filter(|(number, _)| *number < before).take(limit).copied().collect();
    let mut entries = Vec::with_capacity(slots.len());
    for (number, slot) in slots {
        let decoded = inner.read_entry(&slot)?.and_then(|(head, body)| {
            head.filter(|head| head.kind == Kind::Audit)?;
            let (found, body) = body.split_first_chunk()?;
            (u64::from_be_bytes(*found) == number).then(|| decode_audit(number, body))?
        });
        match decoded {
            Some(entry) => entries.push(entry),
            // A caller can read older entries with `before` set to this number.
            None if entries.is_empty() => {
                return Err(StoreError::corrupt(format!("audit entry {number} cannot be read")));
            }
            None => break,
        }
    }
    Ok(entries)
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
