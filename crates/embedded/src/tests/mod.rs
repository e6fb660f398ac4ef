//! Tests on a simulated disk, which can crash, lose parts of writes, fail and be held.

mod batches;
mod clock;
mod crash;
mod damage;
mod disk;
mod faults;
mod limits;
pub(crate) mod script;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use oncegate_core::{Clock, Command, Complete, Completion, FencingToken, Outcome, StoredResponse};
use oncegate_testkit::conformance::{Suite, check_concurrent_claims};
use oncegate_testkit::{ManualClock, record_id as id};

use crate::{EmbeddedOpenError, EmbeddedOptions, EmbeddedStore};
use disk::{Disk, DiskMedium};

#[test]
fn the_store_conforms_on_a_disk_in_memory() {
    Suite::new().with_cases(150).check(|| {
        let disk = Disk::with_new_store();
        move |clock: Arc<ManualClock>| open(&disk, clock).unwrap()
    });
}

#[test]
fn exactly_one_of_many_concurrent_claims_executes() {
    let store = open(&Disk::with_new_store(), Arc::new(ManualClock::at_millis(1))).unwrap();
    check_concurrent_claims(&store, 20, 8);
}

fn open(disk: &Disk, clock: Arc<dyn Clock>) -> Result<EmbeddedStore, EmbeddedOpenError> {
    open_with(disk, EmbeddedOptions::new("not a directory").with_clock(clock))
}

fn open_with(disk: &Disk, options: EmbeddedOptions) -> Result<EmbeddedStore, EmbeddedOpenError> {
    EmbeddedStore::open_medium(Box::new(DiskMedium(disk.clone())), options)
}

pub(crate) const DAY: Duration = Duration::from_secs(86_400);

pub(crate) fn claim(attempt: u128) -> Command {
    Command::Claim(oncegate_testkit::claim(attempt, b"input"))
}

pub(crate) fn complete(token: FencingToken, response: StoredResponse) -> Command {
    Command::Complete(Complete { token, completion: Completion::Replayable(response), retention: DAY })
}

/// A response whose body repeats its number.
pub(crate) fn response(n: u64, len: usize) -> StoredResponse {
    let body: Vec<u8> = n.to_be_bytes().into_iter().cycle().take(len).collect();
    StoredResponse::new(201, &[("content-type", &b"application/json"[..])], &[Bytes::from(body)], &[])
        .unwrap()
}

pub(crate) fn token(outcome: &Outcome) -> FencingToken {
    match outcome {
        Outcome::Execute(grant) => grant.token,
        other => panic!("not executed: {other:?}"),
    }
}

/// A small random generator. The same seed gives the same run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}
