//! Tests on a simulated disk.

mod clock;
mod crash;
mod damage;
mod faults;
mod sim;
mod space;

use std::sync::Arc;

use oncegate_core::{Clock, Outcome, Store as _};
use oncegate_testkit::conformance::{Suite, check_concurrent_claims};
use oncegate_testkit::{ManualClock, block_on, record_id as id};

use super::inner::Sizes;
use crate::tests::{claim, complete, response, token};
use crate::{EmbeddedOpenError, EmbeddedOptions, LogStore};
use sim::SimDisk;

/// Small segments, so that a short run fills many, and a cache that holds next to nothing.
const SIZES: Sizes = Sizes { cache: 1024 * 1024, first_segment: 32 * 1024, max_segment: 64 * 1024 };

fn open(disk: &SimDisk, clock: Arc<dyn Clock>) -> Result<LogStore, EmbeddedOpenError> {
    open_with(disk, EmbeddedOptions::new("not a directory").with_clock(clock))
}

fn open_with(disk: &SimDisk, options: EmbeddedOptions) -> Result<LogStore, EmbeddedOpenError> {
    LogStore::open_disk(Arc::new(disk.clone()), options, SIZES)
}

/// A claim and its completion with a response of this length.
fn complete_one(store: &LogStore, n: u64, len: usize) {
    let granted = token(&block_on(store.apply(id(n), claim(u128::from(n)))).unwrap());
    block_on(store.apply(id(n), complete(granted, response(n, len)))).unwrap();
}

fn is_replayed(store: &LogStore, n: u64, len: usize) -> bool {
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
