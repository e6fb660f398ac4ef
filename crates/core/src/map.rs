//! Maps by record identifier, for lookups that every request makes.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::id::RecordId;

/// A table in shards by record identifier, so that two threads seldom wait for the same lock. `T` is one shard.
#[derive(Debug)]
pub struct Sharded<T> {
    shards: Box<[Mutex<T>]>,
}

/// A map by record identifier, or by a key that contains one.
pub type RecordMap<K, V> = HashMap<K, V, RecordHashState>;

/// Enough that threads seldom wait for each other, few enough that an empty table is small.
const SHARDS: usize = 64;

impl<T: Default> Default for Sharded<T> {
    fn default() -> Self {
        Self { shards: (0..SHARDS).map(|_| Mutex::default()).collect() }
    }
}

impl<T> Sharded<T> {
    /// The number of shards.
    pub const COUNT: usize = SHARDS;

    /// The shard of this record, locked.
    pub fn of(&self, id: &RecordId) -> MutexGuard<'_, T> {
        let [first, ..] = *id.as_bytes();
        match self.shards.get(usize::from(first) % SHARDS) {
            Some(shard) => lock(shard),
            None => unreachable!("there are {SHARDS} shards"),
        }
    }

    /// All shards, locked one after the other.
    pub fn each(&self) -> impl Iterator<Item = MutexGuard<'_, T>> {
        self.shards.iter().map(lock)
    }
}

/// Locks a mutex of this crate, even after a panic: every change under these locks leaves the data consistent.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Hashes record identifiers. They are digests, so a few of their bytes spread evenly. But callers choose the input of the
/// digest, and could search for identifiers that collide in a table whose hash they know. So each map draws a secret.
#[derive(Clone, Debug)]
pub struct RecordHashState {
    secret: u64,
}

impl Default for RecordHashState {
    fn default() -> Self {
        Self { secret: RandomState::new().hash_one(0) }
    }
}

impl BuildHasher for RecordHashState {
    type Hasher = RecordHasher;

    fn build_hasher(&self) -> RecordHasher {
        RecordHasher(self.secret)
    }
}

/// See [`RecordHashState`].
#[derive(Clone, Debug)]
pub struct RecordHasher(u64);

impl Hasher for RecordHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        // The last bytes, because the first one chose the shard.
        if let Some(last) = bytes.last_chunk() {
            self.write_u64(u64::from_ne_bytes(*last));
        }
    }

    fn write_u64(&mut self, word: u64) {
        // Folding both halves makes every bit of the result depend on every bit of the secret.
        let product = u128::from(self.0 ^ word) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }

    fn write_usize(&mut self, _length_prefix: usize) {}
}
