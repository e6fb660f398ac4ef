//! Random commands from two processes that share a back, with a front each or one together, while everything fails now and
//! then and the clocks of fronts and back go their own ways. Whatever a claim is told, the back's record says so, too.

mod support;

use std::sync::Arc;
use std::time::Duration;

use oncegate_cache::{Cache, CacheOptions, CachedStore};
use oncegate_core::{
    Answer, AttemptId, Claim, Clock, Command, FencingToken, Fingerprint, MemoryStore, OnAbandoned, Outcome,
    Release, State, Store, StoreErrorKind, Timestamp,
};
use oncegate_testkit::{Fault, Faults, FaultyStore, ManualClock, Operation};
use support::*;

/// A small generator, so that a failing seed can be run again.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

/// Moves ahead and back.
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
    back_faults: Vec<Faults>,
    front_faults: Vec<Faults>,
    front_clocks: Vec<Arc<Skewed>>,
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
            back_faults: Vec::new(),
            front_faults: Vec::new(),
            front_clocks: Vec::new(),
            stores: Vec::new(),
            dice: Dice(seed),
            tokens: Vec::new(),
            attempts: 0,
            replays: 0,
        };
        let by = std::sync::atomic::AtomicU64::new(10_000_000);
        let front_clock = Arc::new(Skewed { clock, by });
        let shared: Arc<dyn Store> = Arc::new(MemoryStore::new(front_clock.clone()));
        world.front_clocks.push(front_clock);
        for process in 0..2 {
            let (back, back_faults) = FaultyStore::new(world.truth.clone());
            let front = if seed.is_multiple_of(3) || (seed % 3 == 1 && process == 0) {
                Cache::in_memory(1 << 20)
            } else {
                let (front, front_faults) = FaultyStore::new(shared.clone());
                world.front_faults.push(front_faults);
                Cache::on(Arc::new(front))
            };
            let options = CacheOptions::new().with_timeout(Duration::from_secs(1)).unwrap();
            world.back_faults.push(back_faults);
            world.stores.push(CachedStore::new(front, Arc::new(back), options));
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
                let clock = &self.front_clocks[0];
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
        let back = self.dice.roll(3) == 0;
        let faults = if back { self.back_faults.get(which) } else { self.front_faults.get(which) };
        let Some(faults) = faults.cloned() else { return };
        let operation =
            [Operation::Claim, Operation::Complete, Operation::Lookup][self.dice.roll(3) as usize];
        let fault = [Fault::Refuse, Fault::LoseAnswer, Fault::Corrupt][self.dice.roll(3) as usize].clone();
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
                assert_eq!(state, Some(&State::Completed(Answer::Replayable(response))));
                assert_eq!(truth.map(|record| record.fingerprint), Some(fingerprint));
            }
            Ok(Outcome::Mismatch) => assert_ne!(truth.map(|record| record.fingerprint), Some(fingerprint)),
            Ok(Outcome::InProgress { .. }) => assert!(matches!(state, Some(State::InProgress { .. }))),
            Ok(other) => panic!("{other:?} to a claim of {state:?}"),
            // Nothing that a front does is an error; only what the back says.
            Err(error) => assert!(
                [StoreErrorKind::Unavailable, StoreErrorKind::Corrupt].contains(&error.kind())
                    && self.back_faults[process].calls(Operation::Claim) > 0
            ),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_fails_a_claim_hears_what_the_back_holds() {
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
            fills += counts.fills;
            failed += counts.failed_fills + counts.errors;
            skipped += counts.skipped;
        }
        replays += world.replays;
    }
    eprintln!("{hits} hits of {replays} replays, {fills} fills, {failed} failures, {skipped} skipped");
    assert!(hits > 500 && fills > 500 && failed > 100 && skipped > 100);
}

#[tokio::test]
async fn a_fault_of_the_front_is_no_error_of_the_store() {
    let clock = Arc::new(ManualClock::at_millis(1_000_000));
    for operation in [Operation::Claim, Operation::Complete, Operation::Lookup] {
        for fault in [Fault::Refuse, Fault::LoseAnswer, Fault::Corrupt] {
            let (front, faults) = FaultyStore::new(MemoryStore::new(clock.clone()));
            let back = Arc::new(MemoryStore::new(clock.clone()));
            let store = CachedStore::new(Cache::on(Arc::new(front)), back, CacheOptions::new());
            faults.always(operation, fault);
            for n in 0..3 {
                complete(&store, n, n).await;
                settled(&store).await;
                replays(&store, n, n).await;
            }
            let counts = counts(&store);
            assert!(counts.errors + counts.failed_fills > 0, "{operation:?} {counts:?}");
        }
    }
}
