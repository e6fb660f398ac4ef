//! A store that never answers at once.

use oncegate_core::{IntoStore, Store, delegate_store};
use std::sync::Arc;

/// The wrapped store without [`Store::try_apply`]: each command takes a future, as with a store on disk or on a network.
///
/// It tests the path of such stores with one that answers at once.
pub struct NeverAtOnce(Arc<dyn Store>);

impl NeverAtOnce {
    /// Wraps a store.
    #[must_use]
    pub fn new(store: impl IntoStore) -> Self {
        Self(store.into_store())
    }
}

impl Store for NeverAtOnce {
    delegate_store!(
        self, self.0 => apply lookup list survey purge audit check
            changed open_transactions advisories usage clock_skew accept_clock now capabilities
    );
}

impl std::fmt::Debug for NeverAtOnce {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("NeverAtOnce").field(&self.0.capabilities().name).finish()
    }
}
