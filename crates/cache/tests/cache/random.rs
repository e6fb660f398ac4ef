//! Random commands from two processes that share a store, each with its own cache or with a shared one. Stores and caches

//! fail now and then, and their clocks differ. The outcome of each claim must agree with the record of the store.

use std::sync::Arc;
use std::time::Duration;

use crate::support::*;
use oncegate_cache::{Cache, CacheOptions, CachedStore};
use oncegate_core::{
    AttemptId, Claim, Clock, Command, FencingToken, Fingerprint, MemoryStore, OnAbandoned, Outcome,
    RecordedResponse, Release, State, Store, StoreErrorKind, Timestamp,
};
use oncegate_testkit::{Fault, Faults, FaultyStore, ManualClock, Operation};

/// A small random generator, so that a failing seed can be run again.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// A clock that lags behind another one.
struct Skewed {
    clock: Arc<ManualClock>,
    by: std::sync::atomic::AtomicU64,
}

impl Clock for Skewed {
    fn now(&self) -> Timestamp {
        let by = self.by.load(std::sync::atomic::Ordering::SeqCst);
        Timestamp::from_millis(self.clock.now().as_millis().saturating_sub(by))
    }
}

struct World {
    clock: Arc<ManualClock>,
    truth: Arc<MemoryStore<Arc<ManualClock>>>,
    backing_faults: Vec<Faults>,
    cache_faults: Vec<Faults>,
    cache_clocks: Vec<Arc<Skewed>>,
    stores: Vec<CachedStore>,
    dice: Dice,
    tokens: Vec<(u64, FencingToken)>,
    attempts: u128,
    replays: u64,
}

const KEYS: u64 = 3;

impl World {
    fn new(seed: u64) -> Self {
        let clock = Arc::new(ManualClock::at_millis(1_700_000_000_000));
        let truth = Arc::new(MemoryStore::new(clock.clone()));
        let mut world = Self {
            clock: clock.clone(),
            truth,
            backing_faults: Vec::new(),
            cache_faults: Vec::new(),
            cache_clocks: Vec::new(),
            stores: Vec::new(),
            dice: Dice(seed),
            tokens: Vec::new(),
            attempts: 0,
            replays: 0,
        };
        let by = std::sync::atomic::AtomicU64::new(10_000_000);
        let cache_clock = Arc::new(Skewed { clock, by });
        let shared: Arc<dyn Store> = Arc::new(MemoryStore::new(cache_clock.clone()));
        world.cache_clocks.push(cache_clock);
        for process in 0..2 {
            let (backing, backing_faults) = FaultyStore::new(world.truth.clone());
            let cache = if seed.is_multiple_of(3) || (seed % 3 == 1 && process == 0) {
                Cache::in_memory(1 << 20)
            } else {
                let (cache, cache_faults) = FaultyStore::new(shared.clone());
                world.cache_faults.push(cache_faults);
                Cache::on(Arc::new(cache))
            };
            let options = CacheOptions::new().with_timeout(Duration::from_secs(1)).unwrap();
            world.backing_faults.push(backing_faults);
            world.stores.push(CachedStore::new(cache, Arc::new(backing), options));
        }
        world
    }

    async fn step(&mut self) {
        let n = self.dice.roll(KEYS);
        let process = self.dice.roll(2) as usize;
        match self.dice.roll(20) {
            0..=8 => self.claim(n, process).await,
            9..=13 => {
                let of: Vec<_> = self.tokens.iter().filter(|(of, _)| *of == n).copied().collect();
                let Some((_, token)) = of.get(self.dice.roll(of.len().max(1) as u64) as usize) else {
                    return;
                };
                let retention = Duration::from_secs([7, 20, 60, 7200][self.dice.roll(4) as usize]);
                let command = if self.dice.roll(8) == 0 {
                    Command::Release(Release { token: *token, retention })
                } else {
                    completion(*token, token.get() * 10 + self.dice.roll(2), retention)
                };
                let _whatever = self.stores[process].apply(id(n), command).await;
            }
            14 | 15 => {
                let by = [1, 2_000, 3_000, 10_000, 61_000, 3_601_000][self.dice.roll(6) as usize];
                self.clock.advance(Duration::from_millis(by));
            }
            16 => {
                let clock = &self.cache_clocks[0];
                clock.by.store(self.dice.roll(20_000_000), std::sync::atomic::Ordering::SeqCst);
            }
            _ => self.fault(),
        }
        if self.dice.roll(4) > 0 {
            for store in &self.stores {
                settled(store).await;
            }
        }
    }

    fn fault(&mut self) {
        let which = self.dice.roll(2) as usize;
        let backing = self.dice.roll(3) == 0;
        let faults = if backing { self.backing_faults.get(which) } else { self.cache_faults.get(which) };
        let Some(faults) = faults.cloned() else { return };
        let operation =
            [Operation::Claim, Operation::Complete, Operation::Lookup][self.dice.roll(3) as usize];
        let fault = [Fault::Refuse, Fault::LoseReply, Fault::Corrupt][self.dice.roll(3) as usize].clone();
        match self.dice.roll(4) {
            0 => faults.heal(),
            1 => faults.always(operation, fault),
            _ => faults.next(2, operation, fault),
        }
    }

    async fn claim(&mut self, n: u64, process: usize) {
        self.attempts += 1;
        let input = [u8::from(self.dice.roll(6) == 0)];
        let claim = Claim {
            attempt: AttemptId::new(self.attempts),
            fingerprint: Fingerprint::of_parts("random", &[&input]),
            on_abandoned: OnAbandoned::Reexecute,
            ..claim_of(0, b"")
        };
        let fingerprint = claim.fingerprint;
        let outcome = self.stores[process].apply(id(n), Command::Claim(claim)).await;
        let truth = self.truth.lookup(id(n)).await.unwrap();
        let state = truth.as_ref().map(|record| &record.state);
        match outcome {
            Ok(Outcome::Execute(grant)) => {
                assert_eq!(truth.as_ref().map(|record| record.token), Some(grant.token));
                self.tokens.push((n, grant.token));
            }
            Ok(Outcome::Replay(response)) => {
                self.replays += 1;
                assert_eq!(state, Some(&State::Completed(RecordedResponse::Replayable(response))));
                assert_eq!(truth.map(|record| record.fingerprint), Some(fingerprint));
            }
            Ok(Outcome::Mismatch) => assert_ne!(truth.map(|record| record.fingerprint), Some(fingerprint)),
            Ok(Outcome::InProgress { .. }) => assert!(matches!(state, Some(State::InProgress { .. }))),
            Ok(other) => panic!("{other:?} to a claim of {state:?}"),
            // Only a fault of the backing store is an error.
            Err(error) => assert!(
                [StoreErrorKind::Unavailable, StoreErrorKind::Corrupt].contains(&error.kind())
                    && self.backing_faults[process].calls(Operation::Claim) > 0
            ),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_gets_what_the_store_holds_whatever_fails() {
    let (mut hits, mut fills, mut failed, mut skipped, mut replays) = (0, 0, 0, 0, 0);
    for seed in 0..600 {
        let mut world = World::new(seed);
        for step in 0..120 {
            let at = (seed, step);
            let mut step = Box::pin(world.step());
            let caught = std::future::poll_fn(|cx| {
                let poll = std::panic::AssertUnwindSafe(|| step.as_mut().poll(cx));
                match std::panic::catch_unwind(poll) {
                    Ok(poll) => poll.map(Ok),
                    Err(panic) => std::task::Poll::Ready(Err(panic)),
                }
            });
            if let Err(panic) = caught.await {
                eprintln!("seed and step {at:?}");
                std::panic::resume_unwind(panic);
            }
        }
        for store in &world.stores {
            let counts = counts(store);
            hits += counts.hits;
            fills += counts.populated;
            failed += counts.failed + counts.errors;
            skipped += counts.skipped;
        }
        replays += world.replays;
    }
    eprintln!("{hits} hits of {replays} replays, {fills} fills, {failed} failures, {skipped} skipped");
    assert!(hits > 500 && fills > 500 && failed > 100 && skipped > 100);
}

#[tokio::test]
async fn a_fault_of_the_cache_is_not_an_error_of_the_store() {
    let clock = Arc::new(ManualClock::at_millis(1_000_000));
    for operation in [Operation::Claim, Operation::Complete, Operation::Lookup] {
        for fault in [Fault::Refuse, Fault::LoseReply, Fault::Corrupt] {
            let (cache, faults) = FaultyStore::new(MemoryStore::new(clock.clone()));
            let backing = Arc::new(MemoryStore::new(clock.clone()));
            let store = CachedStore::new(Cache::on(Arc::new(cache)), backing, CacheOptions::new());
            faults.always(operation, fault);
            for n in 0..3 {
                complete(&store, n, n).await;
                settled(&store).await;
                replays(&store, n, n).await;
            }
            let counts = counts(&store);
            assert!(counts.errors + counts.failed > 0, "{operation:?} {counts:?}");
        }
    }
}
