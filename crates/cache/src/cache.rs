//! The kinds of caches.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use oncegate_core::{IntoStore, Store};

use crate::memory::MemoryCache;

/// A cache for [`CachedStore`](crate::CachedStore).
pub struct Cache(pub(crate) Kind);

pub(crate) enum Kind {
    Memory(MemoryCache),
    Store(Arc<dyn Store>),
    Later(Pin<Box<dyn Future<Output = Arc<dyn Store>> + Send>>),
}

impl Cache {
    /// A cache in the memory of this process, of about `bytes` bytes. When it is full, responses that were not used lately
    /// are evicted. A response of more than a 64th of `bytes` is not kept.
    #[must_use]
    pub fn in_memory(bytes: usize) -> Self {
        Self(Kind::Memory(MemoryCache::new(bytes)))
    }

    /// A cache in another store, which several processes may share. Its entries are records with identifiers that no key
    /// has, and they also end by that store's clock. If it loses, evicts or refuses entries, that only costs time.
    #[must_use]
    pub fn on(store: impl IntoStore) -> Self {
        Self(Kind::Store(store.into_store()))
    }

    /// As [`on`](Self::on), with a store that cannot be opened yet. The future opens it, and runs in the background. Until
    /// it ends, the cache counts as unreachable.
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
