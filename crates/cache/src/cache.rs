//! What may stand in front.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use oncegate_core::{IntoStore, Store};

use crate::memory::MemoryCache;

/// What stands in front of the back.
pub struct Cache(pub(crate) Kind);

pub(crate) enum Kind {
    Memory(MemoryCache),
    Store(Arc<dyn Store>),
    Later(Pin<Box<dyn Future<Output = Arc<dyn Store>> + Send>>),
}

impl Cache {
    /// Answers in the memory of this process, of about so many bytes together. When they are used up, those that were not
    /// asked for lately make room. An answer of more than a 64th of it is not kept.
    #[must_use]
    pub fn in_memory(bytes: usize) -> Self {
        Self(Kind::Memory(MemoryCache::new(bytes)))
    }

    /// Answers in another store, which several processes may share. They stand there as records of their own, with
    /// identifiers that no key has, and end by that store's clock, too. What it loses, evicts or refuses only costs time.
    #[must_use]
    pub fn on(store: impl IntoStore) -> Self {
        Self(Kind::Store(store.into_store()))
    }

    /// As [`on`](Self::on), with a store that may not be there yet: the future ends when it is. It is run in the background,
    /// and until it ends the front counts as out of reach.
    #[must_use]
    pub fn later(store: impl Future<Output = Arc<dyn Store>> + Send + 'static) -> Self {
        Self(Kind::Later(Box::pin(store)))
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match &self.0 {
            Kind::Memory(_) => "in memory",
            Kind::Store(store) => store.capabilities().name,
            Kind::Later(_) => "not open yet",
        };
        f.debug_tuple("Cache").field(&kind).finish()
    }
}
