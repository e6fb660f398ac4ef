//! Reads the records of lists.
//!
//! The store has no way to read a record without its response. A page has fifty records, each may have megabytes, and many tabs
//! may be open. So that pages leave the connection to the store to requests, they share a few turns, and a read takes all of them
//! unless the last records of all pages were small. The breaker does not count these reads.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use oncegate_core::{RecordId, Store, StoreError};
use oncegate_engine::Breaker;
use oncegate_seal::{SealKeys, SealedStore};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use super::listing::WALK_TIMEOUT;
use super::seal::{self, ReadRecord};

/// The records of all lists that are read from the store at the same time.
const READS_AT_ONCE: u32 = 4;

/// The size of a response, in bytes, from which records are read one at a time.
const LARGE: usize = 64 * 1024;

/// The small records in a row after which several are read at the same time. A page of small ones next to one of large ones does
/// not reach it.
const SMALL_IN_A_ROW: u32 = 16;

/// The records of lists. All clones share their turns.
#[derive(Clone)]
pub(crate) struct Rows {
    store: Arc<dyn Store>,
    seal: Option<Arc<SealedStore>>,
    turns: Arc<Semaphore>,
    /// The records read since the last large one. Those next to it in a list mostly are large, too.
    small: Arc<AtomicU32>,
}

impl fmt::Debug for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rows").finish_non_exhaustive()
    }
}

impl Rows {
    /// The records of the store behind this breaker, which are opened with these keys.
    pub(crate) fn new(breaker: &Breaker, keys: Option<SealKeys>) -> Self {
        let store: Arc<dyn Store> = Arc::new(breaker.for_lists());
        let seal = keys.map(|keys| Arc::new(SealedStore::new(store.clone(), keys).without_steps()));
        let turns = Arc::new(Semaphore::new(READS_AT_ONCE as usize));
        Self { store, seal, turns, small: Arc::default() }
    }

    /// Waits for all turns, for a page of the store: it has many records at once.
    pub(super) async fn all_turns(&self) -> Option<SemaphorePermit<'_>> {
        // It is never closed.
        self.turns.acquire_many(READS_AT_ONCE).await.ok()
    }

    /// Waits for a turn, or for all of them if the last records were large.
    async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        loop {
            let turns = self.turns_of_a_read();
            // It is never closed.
            let turn = self.turns.acquire_many(turns).await.ok();
            // A large record may have been read meanwhile.
            if turns >= self.turns_of_a_read() {
                return turn;
            }
        }
    }

    fn turns_of_a_read(&self) -> u32 {
        if self.small.load(Ordering::Relaxed) < SMALL_IN_A_ROW { READS_AT_ONCE } else { 1 }
    }

    /// Reads a record, as far as it can be opened, in its turn.
    pub(super) async fn read(&self, id: RecordId) -> Result<Option<ReadRecord>, StoreError> {
        let _turn = self.turn().await;
        let read = seal::read_from(&*self.store, self.seal.as_deref(), id);
        let found = timeout(WALK_TIMEOUT, read)
            .await
            .unwrap_or_else(|_| Err(StoreError::unavailable("the store did not answer in time")))?;
        let size = found
            .as_ref()
            .and_then(|found| found.record.response())
            .map_or(0, |response| response.body().len());
        if size >= LARGE {
            self.small.store(0, Ordering::Relaxed);
        } else if found.is_some() && self.small.load(Ordering::Relaxed) < SMALL_IN_A_ROW {
            self.small.fetch_add(1, Ordering::Relaxed);
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use oncegate_core::{
        Command, Complete, Completion, MemoryStore, Outcome, Record, StoreFuture, StoredResponse,
        delegate_store, limits,
    };
    use oncegate_testkit::{claim, record_id};

    use super::*;

    /// A store that counts the lookups at the same time.
    #[derive(Default)]
    struct Counting {
        store: MemoryStore,
        running: AtomicUsize,
        most: AtomicUsize,
    }

    struct Shared(Arc<Counting>);

    impl Store for Shared {
        fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
            Box::pin(async move {
                let running = self.0.running.fetch_add(1, Ordering::SeqCst) + 1;
                self.0.most.fetch_max(running, Ordering::SeqCst);
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                let found = self.0.store.lookup(id).await;
                self.0.running.fetch_sub(1, Ordering::SeqCst);
                found
            })
        }

        delegate_store!(self, self.0.store =>
            apply try_apply list purge audit check changed capabilities advisories accept_clock now);
    }

    #[tokio::test]
    async fn large_records_are_read_alone_also_next_to_small_ones() {
        let counting = Arc::<Counting>::default();
        let write = async |n: u64, length: usize| {
            let id = record_id(n);
            let Ok(Outcome::Execute(grant)) = counting.store.apply(id, Command::Claim(claim(n, b""))).await
            else {
                panic!("it executes")
            };
            let response = StoredResponse::new(200, &[], &[vec![b'x'; length].into()], &[]).unwrap();
            let completion = Completion::Replayable(response);
            let complete = Complete { token: grant.token, completion, retention: limits::MAX_RETENTION };
            counting.store.apply(id, Command::Complete(complete)).await.unwrap();
        };
        for n in 0..40 {
            write(n, if n < 20 { 10 } else { LARGE }).await;
        }
        let rows = Rows::new(&Breaker::new(Shared(counting.clone())), None);
        let most_of = async |ids: &[u64]| {
            counting.most.store(0, Ordering::SeqCst);
            let reads = ids.iter().map(|n| rows.read(record_id(*n)));
            for read in futures_util::future::join_all(reads).await {
                assert!(read.unwrap().is_some());
            }
            counting.most.load(Ordering::SeqCst)
        };
        let (small, large): (Vec<_>, Vec<_>) = ((0..20).collect(), (20..40).collect());
        assert_eq!(most_of(&large).await, 1);
        // As two tabs ask in turn.
        assert_eq!(most_of(&small[..8]).await, 1);
        assert_eq!(most_of(&large).await, 1);
        most_of(&small).await;
        assert_eq!(most_of(&small).await, READS_AT_ONCE as usize);
    }
}
