//! A store for operations that complete their records themselves.

use std::sync::Arc;

use oncegate_core::{
    AuditEntry, Capabilities, Command, ListPage, ListQuery, MemoryStore, Outcome, Record, RecordId, Store,
    StoreFuture, Timestamp,
};
use oncegate_testkit::ManualClock;

/// A memory store that reports that a completion can commit together with an effect.
pub(crate) struct Transactional(pub(crate) MemoryStore<Arc<ManualClock>>);

impl Store for Transactional {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        self.0.apply(id, command)
    }

    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        self.0.lookup(id)
    }

    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage> {
        self.0.list(query)
    }

    fn purge(&self, limit: usize) -> StoreFuture<'_, usize> {
        self.0.purge(limit)
    }

    fn audit(&self, before: Option<u64>, limit: usize) -> StoreFuture<'_, Vec<AuditEntry>> {
        self.0.audit(before, limit)
    }

    fn check(&self) -> StoreFuture<'_, ()> {
        self.0.check()
    }

    fn now(&self) -> Timestamp {
        self.0.now()
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.0.capabilities();
        capabilities.atomic_with_effect = true;
        capabilities
    }
}
