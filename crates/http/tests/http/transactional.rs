//! A store for operations that complete their records themselves.

use std::sync::Arc;

use oncegate_core::{Capabilities, MemoryStore, Store};
use oncegate_testkit::ManualClock;

/// A memory store that reports that a completion can commit together with an effect.
pub(crate) struct Transactional(pub(crate) MemoryStore<Arc<ManualClock>>);

impl Store for Transactional {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.0.capabilities();
        capabilities.atomic_with_effect = true;
        capabilities
    }

    oncegate_core::delegate_store!(self, self.0 => apply lookup list purge audit check now);
}
