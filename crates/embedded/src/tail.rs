//! The batch that is being filled.
//!
//! Callers append entries under the lock of their record's shard, so the order of a record's entries is the order of its
//! decisions. The writer takes the batch as a whole, and the next one fills while it writes.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use oncegate_core::{AuditEntry, Extent, LastWrite, RecordId, StoreError};

use crate::audit::encode_audit;
use crate::format::{ALIGN, EntryHead, HEADER, Kind};
use crate::index::Place;
use crate::shared::closed_error;
use crate::ticket::Ticket;

/// The bytes of a batch beyond which further commands are refused. A single entry may be larger.
const MAX_BATCH_BYTES: usize = 16 * 1024 * 1024;

/// The entries of a batch beyond which further commands are refused.
const MAX_BATCH_ENTRIES: u32 = 16 * 1024;

/// A batch that is being filled, or written.
pub(crate) struct Batch {
    /// Space for the header, and the entries after it.
    pub(crate) bytes: Vec<u8>,
    pub(crate) entries: u32,
    /// The entries that are copies of old ones: the offset in the batch, and the place of the old one.
    pub(crate) copies: Vec<(u32, Place)>,
    pub(crate) flags: u16,
    /// The offset in its segment, once it is on the disk.
    pub(crate) offset: Option<u64>,
    /// The clocks when its last entry was there. Not when it is written, because the entry of a correction of the clock may be
    /// appended between the two: with the time after the correction and without its entry, older records would have expired.
    pub(crate) written: Option<LastWrite>,
    pub(crate) ticket: Arc<Ticket>,
}

impl Batch {
    /// An empty batch in this buffer.
    pub(crate) fn new(mut bytes: Vec<u8>) -> Self {
        bytes.clear();
        bytes.resize(HEADER, 0);
        Self {
            bytes,
            entries: 0,
            copies: Vec::new(),
            flags: 0,
            offset: None,
            written: None,
            ticket: Arc::default(),
        }
    }

    /// Adds an entry, and returns its offset in the batch.
    pub(crate) fn push(&mut self, head: &EntryHead, body: &[u8]) -> u32 {
        let offset = self.bytes.len();
        self.bytes.extend_from_slice(&head.encode());
        self.bytes.extend_from_slice(body);
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGN), 0);
        self.entries += 1;
        offset as u32
    }
}

/// The state of the tail for new entries.
enum TailState {
    Open,
    /// The last batch could not be written. The writer tries again.
    Failing(Arc<str>),
    Closed,
}

struct TailInner {
    batch: Batch,
    state: TailState,
    /// An empty batch is to be written, too.
    wanted: bool,
    /// The number of the next audit entry.
    next_audit: u64,
}

/// The batch that is being filled, and the signal for the writer.
pub(crate) struct Tail {
    inner: Mutex<TailInner>,
    wake: Condvar,
}

/// The next task of the writer.
pub(crate) enum Work {
    Write(Batch),
    /// Nothing came before the deadline: an empty batch.
    Idle(Batch),
    /// The last batch, which is empty.
    Closed(Batch),
}

impl Tail {
    pub(crate) fn new(next_audit: u64) -> Self {
        let inner =
            TailInner { batch: Batch::new(Vec::new()), state: TailState::Open, wanted: false, next_audit };
        Self { inner: Mutex::new(inner), wake: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, TailInner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends an entry that moves the times of records, and moves the clock. Returns the end of its batch.
    ///
    /// No batch is taken between the two.
    pub(crate) fn append_shift(&self, body: &[u8], accept: impl FnOnce()) -> Result<Arc<Ticket>, StoreError> {
        let mut inner = self.lock();
        inner.accepts()?;
        let id = RecordId::from_bytes([0; 32]);
        inner
            .batch
            .push(&EntryHead { kind: Kind::Shift, body_len: body.len() as u32, expires: u32::MAX, id }, body);
        accept();
        Ok(self.filled(inner))
    }

    /// Appends the entry of a record, and the audit entry of its resolution. Returns the end of its batch.
    ///
    /// # Errors
    /// Nothing was appended.
    pub(crate) fn append(
        &self,
        head: &EntryHead,
        body: &[u8],
        audit: Option<AuditEntry>,
    ) -> Result<Arc<Ticket>, StoreError> {
        let mut inner = self.lock();
        inner.accepts()?;
        inner.batch.push(head, body);
        if let Some(mut audit) = audit {
            audit.number = inner.next_audit;
            inner.next_audit += 1;
            let body = [&audit.number.to_be_bytes(), encode_audit(&audit).as_slice()].concat();
            let head =
                EntryHead { kind: Kind::Audit, body_len: body.len() as u32, expires: u32::MAX, id: audit.id };
            inner.batch.push(&head, &body);
        }
        Ok(self.filled(inner))
    }

    /// Appends a copy of the entry at `old`.
    pub(crate) fn append_copy(
        &self,
        head: &EntryHead,
        body: &[u8],
        old: Place,
    ) -> Result<Arc<Ticket>, StoreError> {
        let mut inner = self.lock();
        inner.accepts()?;
        let offset = inner.batch.push(head, body);
        inner.batch.copies.push((offset, old));
        Ok(self.filled(inner))
    }

    fn filled(&self, inner: MutexGuard<'_, TailInner>) -> Arc<Ticket> {
        let (ticket, first) = (inner.batch.ticket.clone(), inner.batch.entries <= 2);
        drop(inner);
        if first {
            self.wake.notify_one();
        }
        ticket
    }

    /// Has a batch written even if it is empty.
    pub(crate) fn want_batch(&self) -> Result<Arc<Ticket>, StoreError> {
        let mut inner = self.lock();
        inner.writable()?;
        inner.wanted = true;
        let ticket = inner.batch.ticket.clone();
        drop(inner);
        self.wake.notify_one();
        Ok(ticket)
    }

    /// Takes the batch as soon as there is something to write. The next one fills the buffer `spare`.
    pub(crate) fn take(
        &self,
        deadline: Option<Instant>,
        spare: Vec<u8>,
        clocks: impl FnOnce() -> LastWrite,
    ) -> Work {
        let mut inner = self.lock();
        while inner.batch.entries == 0 && !inner.wanted {
            if matches!(inner.state, TailState::Closed) {
                return Work::Closed(Batch { written: Some(clocks()), ..Batch::new(spare) });
            }
            inner = match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                None => self.wake.wait(inner).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => {
                    return Work::Idle(Batch { written: Some(clocks()), ..Batch::new(spare) });
                }
                Some(left) => self.wake.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
        inner.wanted = false;
        let mut batch = std::mem::replace(&mut inner.batch, Batch::new(spare));
        batch.written = Some(clocks());
        Work::Write(batch)
    }

    /// Refuses entries from now on, and ends the batch that is being filled as failed. Returns it if it has entries.
    pub(crate) fn fail(&self, reason: &Arc<str>, clocks: impl FnOnce() -> LastWrite) -> Option<Batch> {
        let mut inner = self.lock();
        if !matches!(inner.state, TailState::Closed) {
            inner.state = TailState::Failing(reason.clone());
        }
        inner.wanted = false;
        let mut batch = std::mem::replace(&mut inner.batch, Batch::new(Vec::new()));
        batch.written = Some(clocks());
        drop(inner);
        batch.ticket.end(Err(reason.clone()));
        (batch.entries > 0).then_some(batch)
    }

    /// Accepts entries again. Returns true if they were refused before.
    pub(crate) fn recover(&self) -> bool {
        let mut inner = self.lock();
        let has_failed = matches!(inner.state, TailState::Failing(_));
        if has_failed {
            inner.state = TailState::Open;
        }
        has_failed
    }

    /// Waits for a time, or until the store is closed. Returns false if it is.
    pub(crate) fn pause(&self, pause: Duration) -> bool {
        let deadline = Instant::now() + pause;
        let mut inner = self.lock();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if matches!(inner.state, TailState::Closed) {
                return false;
            }
            if left.is_zero() {
                return true;
            }
            inner = self.wake.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Refuses entries from now on. What was appended is still written.
    pub(crate) fn close(&self) {
        self.lock().state = TailState::Closed;
        self.wake.notify_all();
    }

    /// Ends the batch that is being filled as failed: the writer has ended.
    pub(crate) fn abandon(&self, reason: &Arc<str>) {
        let mut inner = self.lock();
        inner.state = TailState::Closed;
        let ticket = inner.batch.ticket.clone();
        drop(inner);
        ticket.end(Err(reason.clone()));
    }

    /// # Errors
    /// The reason why writes are refused now.
    pub(crate) fn writable(&self) -> Result<(), StoreError> {
        self.lock().writable()
    }
}

impl TailInner {
    fn writable(&self) -> Result<(), StoreError> {
        match &self.state {
            TailState::Open => Ok(()),
            TailState::Failing(reason) => Err(StoreError::unavailable(format!(
                "the embedded store takes no writes, because its files cannot be written to: {reason}"
            ))
            .with_extent(Extent::Writes)
            .with_nothing_sent()),
            TailState::Closed => Err(closed_error().with_nothing_sent()),
        }
    }

    fn accepts(&self) -> Result<(), StoreError> {
        self.writable()?;
        if self.batch.bytes.len() >= MAX_BATCH_BYTES || self.batch.entries >= MAX_BATCH_ENTRIES {
            return Err(StoreError::unavailable("the embedded store has too many commands waiting")
                .with_extent(Extent::Record)
                .with_nothing_sent());
        }
        Ok(())
    }
}
