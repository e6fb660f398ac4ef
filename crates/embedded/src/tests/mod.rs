//! Tests on a simulated disk.

mod backup;
mod clock;
mod crash;
mod damage;
mod faults;
mod mark;
mod salvage;
mod script;
mod sim;
mod space;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use oncegate_core::{
    Clock, Command, Complete, Completion, FencingToken, Outcome, Store as _, StoredResponse,
};
use oncegate_testkit::conformance::{Suite, check_concurrent_claims};
use oncegate_testkit::{ManualClock, block_on, record_id as id};

use crate::inner::Sizes;
use crate::{EmbeddedOpenError, EmbeddedOptions, EmbeddedStore};
use sim::SimDisk;

/// Small segments, so that a short run fills many, and a cache that holds next to nothing.
const SIZES: Sizes =
    Sizes { memory: 8 * 1024 * 1024, first_segment: 32 * 1024, max_segment: 64 * 1024, slack: 64 * 1024 };

fn open(disk: &SimDisk, clock: Arc<dyn Clock>) -> Result<EmbeddedStore, EmbeddedOpenError> {
    open_with(disk, EmbeddedOptions::new("not a directory").with_clock(clock))
}

fn open_with(disk: &SimDisk, options: EmbeddedOptions) -> Result<EmbeddedStore, EmbeddedOpenError> {
    EmbeddedStore::open_disk(Arc::new(disk.clone()), options, SIZES)
}

/// Waits for a condition of the store.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < deadline, "timed out waiting until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A claim and its completion with a response of this length.
fn complete_one(store: &EmbeddedStore, n: u64, len: usize) {
    let granted = token(&block_on(store.apply(id(n), claim(u128::from(n)))).unwrap());
    block_on(store.apply(id(n), complete(granted, response(n, len)))).unwrap();
}

fn is_replayed(store: &EmbeddedStore, n: u64, len: usize) -> bool {
    block_on(store.apply(id(n), claim(777))).unwrap() == Outcome::Replay(response(n, len))
}

#[test]
fn the_log_conforms_on_a_simulated_disk() {
    Suite::new().with_cases(150).with_expiry_at_open().check(|| {
        let disk = SimDisk::default();
        move |clock: Arc<ManualClock>| open(&disk, clock).unwrap()
    });
}

#[test]
fn exactly_one_of_many_concurrent_claims_executes() {
    let store = open(&SimDisk::default(), Arc::new(ManualClock::at_millis(1))).unwrap();
    check_concurrent_claims(&store, 20, 8);
}

const DAY: Duration = Duration::from_secs(86_400);

fn claim(attempt: u128) -> Command {
    Command::Claim(oncegate_testkit::claim(attempt, b"input"))
}

fn complete(token: FencingToken, response: StoredResponse) -> Command {
    Command::Complete(Complete { token, completion: Completion::Replayable(response), retention: DAY })
}

/// A response whose body repeats its number.
fn response(n: u64, len: usize) -> StoredResponse {
    let body: Vec<u8> = n.to_be_bytes().into_iter().cycle().take(len).collect();
    StoredResponse::new(201, &[("content-type", &b"application/json"[..])], &[Bytes::from(body)], &[])
        .unwrap()
}

fn token(outcome: &Outcome) -> FencingToken {
    match outcome {
        Outcome::Execute(grant) => grant.token,
        other => panic!("not executed: {other:?}"),
    }
}

/// A small random generator. The same seed gives the same run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}
