//! The front in memory: as many answers as fit, those that were asked for lately before others.

use std::collections::VecDeque;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use oncegate_core::{Fingerprint, RecordId, RecordMap, Sharded, StoredResponse, Timestamp};

/// What an entry takes beside its answer, roughly.
const OVERHEAD: usize = 256;

/// Answers, bounded by their bytes.
pub(crate) struct MemoryCache {
    shards: Sharded<Shard>,
    /// What one shard may hold.
    share: usize,
}

#[derive(Default)]
struct Shard {
    entries: RecordMap<RecordId, Entry>,
    /// Every entry once, in the order in which they are looked at when room is needed. One that was asked for since it was
    /// last looked at stays, and goes to the end.
    order: VecDeque<RecordId>,
    bytes: usize,
}

struct Entry {
    fingerprint: Fingerprint,
    response: StoredResponse,
    /// By the back's clock.
    until: Timestamp,
    /// By this machine's. The back's clock stands still here while the machine sleeps; this one does not.
    wall_until: SystemTime,
    is_wanted: bool,
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
        Self { shards: Sharded::default(), share: bytes / Sharded::<Shard>::COUNT }
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
        entry.is_wanted = true;
        Some(entry.response.clone())
    }

    /// Whether there would be room for it if there were nothing else.
    pub(crate) fn could_hold(&self, response: &StoredResponse) -> bool {
        cost(response) <= self.share
    }

    /// Whether there is room for it, once others made way.
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
        // Its own bytes: it may be a part of a larger piece that would be kept with it.
        let Some(response) = StoredResponse::decode(Bytes::copy_from_slice(response.as_encoded())) else {
            return false;
        };
        let Some(wall_until) = SystemTime::now().checked_add(left) else { return false };
        let entry = Entry { fingerprint, response, until, wall_until, is_wanted: false };
        let mut shard = self.shards.of(&id);
        let shard = &mut *shard;
        match shard.entries.insert(id, entry) {
            Some(before) => shard.bytes -= before.cost(),
            None => shard.order.push_back(id),
        }
        shard.bytes += cost;
        while shard.bytes > self.share {
            let Some(next) = shard.order.pop_front() else { break };
            match shard.entries.get_mut(&next) {
                Some(entry) if entry.is_wanted || next == id => {
                    entry.is_wanted = false;
                    shard.order.push_back(next);
                }
                _ => {
                    let gone = shard.entries.remove(&next);
                    shard.bytes -= gone.map_or(0, |entry| entry.cost());
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

    /// All in one shard.
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
    fn of_more_than_fit_those_that_are_asked_for_stay() {
        let cache = cache(4);
        for n in 0..4 {
            assert!(put(&cache, n, &response(1000)));
        }
        assert!(has(&cache, 0) && has(&cache, 2));
        for n in 4..6 {
            assert!(put(&cache, n, &response(1000)));
        }
        let there: Vec<_> = (0..6).filter(|n| has(&cache, *n)).collect();
        assert_eq!(there, [0, 2, 4, 5]);
        for n in 6..200 {
            assert!(put(&cache, n, &response(1000)));
        }
        let shard = cache.shards.of(&id(0));
        assert_eq!((shard.entries.len(), shard.order.len()), (4, 4));
        assert!(shard.bytes <= cache.share);
    }

    #[test]
    fn the_octets_add_up_and_what_can_never_fit_pushes_nothing_out() {
        let cache = cache(4);
        assert!(put(&cache, 1, &response(1000)));
        assert!(put(&cache, 1, &response(10)), "in place of the other");
        assert_eq!(bytes(&cache), cost(&response(10)));
        let largest = cache.share - cost(&response(0));
        assert!(!put(&cache, 2, &response(largest + 100)));
        assert!(has(&cache, 1));
        assert!(put(&cache, 2, &response(largest - 100)), "it pushes out the rest");
        assert!(has(&cache, 2) && bytes(&cache) <= cache.share);
    }

    #[test]
    fn an_answer_is_given_to_its_request_until_its_end_by_either_clock() {
        let cache = cache(4);
        assert!(put(&cache, 1, &response(1)));
        let other = Fingerprint::of_parts("test", &[b"other"]);
        assert!(cache.get(&id(1), &fingerprint(), Timestamp::from_millis(8_999)).is_some());
        assert_eq!(cache.get(&id(1), &fingerprint(), UNTIL), None);
        assert_eq!(cache.get(&id(1), &other, NOW), None);
        assert!(cache.put(id(1), other, &response(2), UNTIL, Duration::ZERO));
        assert_eq!(cache.get(&id(1), &other, NOW), None, "this machine's clock says that it is over");
        assert_eq!(cache.get(&id(1), &fingerprint(), NOW), None);
    }
}
