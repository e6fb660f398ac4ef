//! The store of a process without keys.

use std::fmt;
use std::sync::Arc;

use oncegate_core::{
    Advisory, Command, IntoStore, Outcome, RecordId, Store, StoreError, StoreFuture, delegate_store,
};

use crate::envelope::{SealError, SealInfo};
use crate::keyring::Keyring;
use crate::refused::SealRefusals;

/// A store of a process without seal keys. It counts the sealed responses that it refuses, so that an operator notices keys
/// that were lost.
///
/// - A claim of a record with a sealed response is [`StoreErrorKind::Sealed`](oncegate_core::StoreErrorKind::Sealed), and the
///   error names the key.
/// - Every other command goes to the wrapped store as it is. A record that is read has its sealed forms.
pub struct KeylessStore {
    store: Arc<dyn Store>,
    refusals: SealRefusals,
}

impl KeylessStore {
    /// Counts the sealed responses of a store.
    #[must_use]
    pub fn new(store: impl IntoStore) -> Self {
        Self { store: store.into_store(), refusals: SealRefusals::default() }
    }

    /// The responses that were refused.
    #[must_use]
    pub fn refusals(&self) -> SealRefusals {
        self.refusals.clone()
    }

    /// Refuses a sealed response.
    fn checked(&self, outcome: Outcome) -> Result<Outcome, StoreError> {
        let Outcome::Replay(response) = &outcome else { return Ok(outcome) };
        if !response.is_sealed() {
            return Ok(outcome);
        }
        let seal = SealInfo::of_response(response);
        let error = seal.map_or(SealError::Broken, |seal| SealError::KeyMissing(seal.key));
        self.refusals.count(error, self.store.now());
        Err(error.into())
    }
}

impl Store for KeylessStore {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        // Only a claim gets a response.
        let is_claim = matches!(command, Command::Claim(_));
        let applied = self.store.apply(id, command);
        if !is_claim {
            return applied;
        }
        Box::pin(async move { self.checked(applied.await?) })
    }

    fn try_apply(&self, id: RecordId, command: &Command) -> Option<Result<Outcome, StoreError>> {
        Some(self.store.try_apply(id, command)?.and_then(|outcome| self.checked(outcome)))
    }

    /// Those of the wrapped store, and one about keys that are missing.
    fn advisories(&self) -> Vec<Advisory> {
        let mut advisories = self.store.advisories();
        advisories.extend(self.refusals.advisory(&Keyring::default()));
        advisories
    }

    delegate_store!(
        self, self.store => lookup list survey purge audit check
            changed open_transactions usage clock_skew accept_clock now capabilities
    );
}

impl fmt::Debug for KeylessStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeylessStore").field("refusals", &self.refusals).finish_non_exhaustive()
    }
}
