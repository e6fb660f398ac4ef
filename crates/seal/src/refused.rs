//! Counts of the parts that a store refused to open.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use oncegate_core::{Advisory, Record, Timestamp};

use crate::envelope::{SealError, SealInfo};
use crate::key::SealKeyId;
use crate::keyring::Keyring;

/// The most missing keys that are remembered by their ids. More of them are only counted.
const MAX_MISSING: usize = 16;

/// The parts that a [`SealedStore`](crate::SealedStore) or a [`KeylessStore`](crate::KeylessStore) refused to open since it was
/// made. Clones share the counts.
#[derive(Clone, Default)]
pub struct SealRefusals(Arc<Inner>);

#[derive(Default)]
struct Inner {
    key_missing: AtomicU64,
    not_sealed: AtomicU64,
    broken: AtomicU64,
    missing: Mutex<Vec<MissingKey>>,
    sample: Mutex<SealSample>,
}

/// The keys that some records of a store need. Identifiers of records are hashes, so the first ones in their order are a random
/// choice.
#[derive(Clone, Debug, Default)]
pub struct SealSample {
    records: u64,
    keys: Vec<(SealKeyId, u64)>,
}

impl SealSample {
    /// Adds a record, as the store behind a sealing one has it.
    pub fn add(&mut self, record: &Record) {
        self.records += 1;
        let mut keys: Vec<_> = SealInfo::of_record(record).map(|seal| seal.key).collect();
        keys.sort_unstable();
        keys.dedup();
        for key in keys {
            let is_full = self.keys.len() >= MAX_MISSING;
            match self.keys.iter_mut().find(|(known, _)| *known == key) {
                Some((_, count)) => *count += 1,
                None if is_full => {}
                None => self.keys.push((key, 1)),
            }
        }
    }

    /// The number of records.
    #[must_use]
    pub const fn records(&self) -> u64 {
        self.records
    }

    /// The keys that are not among these, at most 16, and the number of records that need each.
    pub fn missing<'a>(&'a self, keys: &'a Keyring) -> impl Iterator<Item = (SealKeyId, u64)> + 'a {
        self.keys.iter().copied().filter(|(key, _)| !keys.has(*key))
    }
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

    /// Replaces the sample. The advisory about missing keys names those that it needs.
    pub fn set_sample(&self, sample: SealSample) {
        *self.sample() = sample;
    }

    fn sample(&self) -> MutexGuard<'_, SealSample> {
        self.0.sample.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The advisory about keys that are not among these and that requests or sampled records need.
    pub(crate) fn advisory(&self, keys: &Keyring) -> Option<Advisory> {
        let refused: Vec<_> = self.missing_keys().into_iter().filter(|key| !keys.has(key.id)).collect();
        let list = |ids: &[SealKeyId]| ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let has_none = keys.ids().next().is_none();
        let advice = if has_none {
            "this process has no seal keys, and stores new responses in clear: give it the keys (seal-keys-file)"
        } else {
            "add these keys"
        };
        let text = if refused.is_empty() {
            let sample = self.sample();
            let missing: Vec<_> = sample.missing(keys).collect();
            if missing.is_empty() {
                return None;
            }
            let ids: Vec<_> = missing.iter().map(|(id, _)| *id).collect();
            let count: u64 = missing.iter().map(|(_, count)| count).sum();
            let of = sample.records;
            format!(
                "retries will be refused: {count} of {of} records that were looked at are sealed with keys that this process does not \
                 have: {}; {advice}",
                list(&ids)
            )
        } else {
            let ids: Vec<_> = refused.iter().map(|key| key.id).collect();
            let count: u64 = refused.iter().map(|key| key.count).sum();
            format!(
                "requests were refused ({count} so far), because their records are sealed with keys that this process does not \
                 have: {}; {advice}",
                list(&ids)
            )
        };
        Some(Advisory::new("seal-key-missing", text))
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
