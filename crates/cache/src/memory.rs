//! The cache in memory: as many responses as fit, and recently used ones before others.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use oncegate_core::{Fingerprint, RecordId, RecordMap, Sharded, StoredResponse, Timestamp};

/// The approximate size of an entry without its response, in bytes.
const OVERHEAD: usize = 256;

/// Responses, bounded by their bytes.
pub(crate) struct MemoryCache {
    shards: Sharded<Shard>,
    max_shard_bytes: usize,
}

#[derive(Default)]
struct Shard {
    entries: RecordMap<RecordId, Entry>,
    /// Each entry once, in the order in which entries are considered for eviction. An entry that was used since it was last
    /// considered stays, and goes to the end.
    order: VecDeque<RecordId>,
    bytes: usize,
}

struct Entry {
    fingerprint: Fingerprint,
    response: StoredResponse,
    /// By the store's clock.
    until: Timestamp,
    /// By this machine's clock, which runs on while the machine sleeps. The store's clock, as it is known here, does not.
    wall_until: SystemTime,
    was_used: bool,
}

impl Entry {
    fn cost(&self) -> usize {
        cost(&self.response)
    }
}

fn cost(response: &StoredResponse) -> usize {
    OVERHEAD + response.as_encoded().len()
}

impl MemoryCache {
    pub(crate) fn new(bytes: usize) -> Self {
        Self { shards: Sharded::default(), max_shard_bytes: bytes / Sharded::<Shard>::COUNT }
    }

    pub(crate) fn get(
        &self,
        id: &RecordId,
        fingerprint: &Fingerprint,
        now: Timestamp,
    ) -> Option<StoredResponse> {
        let mut shard = self.shards.of(id);
        let entry = shard.entries.get_mut(id)?;
        if entry.fingerprint != *fingerprint || now >= entry.until || SystemTime::now() >= entry.wall_until {
            return None;
        }
        entry.was_used = true;
        Some(entry.response.clone())
    }

    /// True if the response fits into an empty cache.
    pub(crate) fn could_hold(&self, response: &StoredResponse) -> bool {
        cost(response) <= self.max_shard_bytes
    }

    /// Removes an entry.
    pub(crate) fn remove(&self, id: &RecordId) {
        let mut shard = self.shards.of(id);
        if let Some(removed) = shard.entries.remove(id) {
            shard.bytes -= removed.cost();
            // Seldom enough for a walk: only a maintenance command removes entries.
            shard.order.retain(|other| other != id);
        }
    }

    /// Stores a response, and evicts others if necessary. Returns false if it does not fit.
    pub(crate) fn put(
        &self,
        id: RecordId,
        fingerprint: Fingerprint,
        response: &StoredResponse,
        until: Timestamp,
        left: Duration,
    ) -> bool {
        if !self.could_hold(response) {
            return false;
        }
        let cost = cost(response);
        // A copy: the bytes may be a slice of a larger buffer, which they would keep in memory.
        let Some(response) = StoredResponse::decode(Bytes::copy_from_slice(response.as_encoded())) else {
            return false;
        };
        let Some(wall_until) = SystemTime::now().checked_add(left) else { return false };
        let entry = Entry { fingerprint, response, until, wall_until, was_used: false };
        let mut shard = self.shards.of(&id);
        let shard = &mut *shard;
        match shard.entries.insert(id, entry) {
            Some(replaced) => shard.bytes -= replaced.cost(),
            None => shard.order.push_back(id),
        }
        shard.bytes += cost;
        while shard.bytes > self.max_shard_bytes {
            let Some(next) = shard.order.pop_front() else { break };
            match shard.entries.get_mut(&next) {
                Some(entry) if entry.was_used || next == id => {
                    entry.was_used = false;
                    shard.order.push_back(next);
                }
                _ => {
                    let evicted = shard.entries.remove(&next);
                    shard.bytes -= evicted.map_or(0, |entry| entry.cost());
                }
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_millis(1_000);
    const UNTIL: Timestamp = Timestamp::from_millis(9_000);
    const HOUR: Duration = Duration::from_secs(3600);

    fn fingerprint() -> Fingerprint {
        Fingerprint::of_parts("test", &[])
    }

    /// All of these are in one shard.
    fn id(n: u8) -> RecordId {
        let mut id = [0; 32];
        id[31] = n;
        RecordId::from_bytes(id)
    }

    fn response(bytes: usize) -> StoredResponse {
        StoredResponse::new(200, &[], &[vec![7; bytes].into()], &[]).unwrap()
    }

    fn cache(entries: usize) -> MemoryCache {
        MemoryCache::new(entries * cost(&response(1000)) * Sharded::<Shard>::COUNT)
    }

    fn put(cache: &MemoryCache, n: u8, response: &StoredResponse) -> bool {
        cache.put(id(n), fingerprint(), response, UNTIL, HOUR)
    }

    fn has(cache: &MemoryCache, n: u8) -> bool {
        cache.get(&id(n), &fingerprint(), NOW).is_some()
    }

    fn bytes(cache: &MemoryCache) -> usize {
        cache.shards.each().map(|shard| shard.bytes).sum()
    }

    #[test]
    fn a_full_cache_keeps_the_entries_that_are_used() {
        let cache = cache(4);
        for n in 0..4 {
            assert!(put(&cache, n, &response(1000)));
        }
        assert!(has(&cache, 0) && has(&cache, 2));
        for n in 4..6 {
            assert!(put(&cache, n, &response(1000)));
        }
        let kept: Vec<_> = (0..6).filter(|n| has(&cache, *n)).collect();
        assert_eq!(kept, [0, 2, 4, 5]);
        for n in 6..200 {
            assert!(put(&cache, n, &response(1000)));
        }
        let shard = cache.shards.of(&id(0));
        assert_eq!((shard.entries.len(), shard.order.len()), (4, 4));
        assert!(shard.bytes <= cache.max_shard_bytes);
    }

    #[test]
    fn a_response_that_is_too_large_evicts_nothing() {
        let cache = cache(4);
        assert!(put(&cache, 1, &response(1000)));
        assert!(put(&cache, 1, &response(10)), "instead of the other");
        assert_eq!(bytes(&cache), cost(&response(10)));
        let largest = cache.max_shard_bytes - cost(&response(0));
        assert!(!put(&cache, 2, &response(largest + 100)));
        assert!(has(&cache, 1));
        assert!(put(&cache, 2, &response(largest - 100)), "it evicts the rest");
        assert!(has(&cache, 2) && bytes(&cache) <= cache.max_shard_bytes);
    }

    #[test]
    fn an_entry_ends_by_either_clock() {
        let cache = cache(4);
        assert!(put(&cache, 1, &response(1)));
        let other = Fingerprint::of_parts("test", &[b"other"]);
        assert!(cache.get(&id(1), &fingerprint(), Timestamp::from_millis(8_999)).is_some());
        assert_eq!(cache.get(&id(1), &fingerprint(), UNTIL), None);
        assert_eq!(cache.get(&id(1), &other, NOW), None);
        assert!(cache.put(id(1), other, &response(2), UNTIL, Duration::ZERO));
        assert_eq!(cache.get(&id(1), &other, NOW), None, "it has ended by this machine's clock");
        assert_eq!(cache.get(&id(1), &fingerprint(), NOW), None);
    }
}
