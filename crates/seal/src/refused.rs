//! Counts of the parts that a store refused to open.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use oncegate_core::Timestamp;

use crate::envelope::SealError;
use crate::key::SealKeyId;

/// The most missing keys that are remembered by their ids. More of them are only counted.
const MAX_MISSING: usize = 16;

/// The parts that a [`SealedStore`](crate::SealedStore) refused to open since it was made. Clones share the counts.
#[derive(Clone, Default)]
pub struct SealRefusals(Arc<Inner>);

#[derive(Default)]
struct Inner {
    key_missing: AtomicU64,
    not_sealed: AtomicU64,
    broken: AtomicU64,
    missing: Mutex<Vec<MissingKey>>,
}

/// A key that a part needs and the process does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MissingKey {
    /// The id in the sealed form. It is not authentic: an attacker who can write to the store can write any id.
    pub id: SealKeyId,
    /// The number of refusals.
    pub count: u64,
    /// The time of the last refusal, by the clock of the store.
    pub last: Timestamp,
}

impl SealRefusals {
    /// Parts whose key the process does not have.
    #[must_use]
    pub fn key_missing(&self) -> u64 {
        self.0.key_missing.load(Ordering::Relaxed)
    }

    /// Parts that are not sealed although they must be.
    #[must_use]
    pub fn not_sealed(&self) -> u64 {
        self.0.not_sealed.load(Ordering::Relaxed)
    }

    /// Parts that were changed, cut or moved, or that a newer program sealed.
    #[must_use]
    pub fn broken(&self) -> u64 {
        self.0.broken.load(Ordering::Relaxed)
    }

    /// The keys that were missing, at most 16 of them. Some may have been added since.
    #[must_use]
    pub fn missing_keys(&self) -> Vec<MissingKey> {
        self.missing().clone()
    }

    pub(crate) fn count(&self, error: SealError, now: Timestamp) {
        let counter = match error {
            SealError::KeyMissing(_) => &self.0.key_missing,
            SealError::NotSealed => &self.0.not_sealed,
            _ => &self.0.broken,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        let SealError::KeyMissing(id) = error else { return };
        let mut missing = self.missing();
        if let Some(known) = missing.iter_mut().find(|known| known.id == id) {
            known.count += 1;
            known.last = known.last.max(now);
        } else if missing.len() < MAX_MISSING {
            missing.push(MissingKey { id, count: 1, last: now });
        }
    }

    fn missing(&self) -> MutexGuard<'_, Vec<MissingKey>> {
        self.0.missing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for SealRefusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SealRefusals")
            .field("key_missing", &self.key_missing())
            .field("not_sealed", &self.not_sealed())
            .field("broken", &self.broken())
            .finish()
    }
}
