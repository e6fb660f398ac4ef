//! The clock of the machine is set while the store is open, and between two processes.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{Outcome, Store as _, Timestamp};
use oncegate_testkit::{ManualClock, block_on};

use super::disk::Disk;
use super::{DAY, claim, complete, id, open, response, token};
use crate::EmbeddedStore;

const HOUR: u64 = 3_600_000;
const START: u64 = 400_000 * HOUR;

fn complete_one(store: &EmbeddedStore, n: u64) {
    let granted = token(&block_on(store.apply(id(n), claim(u128::from(n)))).unwrap());
    block_on(store.apply(id(n), complete(granted, response(n, 10)))).unwrap();
}

fn is_replayed(store: &EmbeddedStore, n: u64) -> bool {
    block_on(store.apply(id(n), claim(77))).unwrap() == Outcome::Replay(response(n, 10))
}

fn skewed(store: &EmbeddedStore) -> bool {
    store.advisories().iter().any(|advisory| advisory.name == "clock")
}

/// A sidecar that is rolled out, and restarted before its first request; or that was idle for an hour.
#[test]
fn a_store_that_nobody_wrote_to_for_a_while_follows_the_clock_after_a_restart() {
    let (disk, clock) = (Disk::with_new_store(), Arc::new(ManualClock::at_millis(START)));
    for round in 0..3 {
        let store = open(&disk, clock.clone()).unwrap();
        assert!(!skewed(&store), "round {round}");
        let now = store.now().since(Timestamp::from_millis(START));
        let passed = Duration::from_millis(round * HOUR + round * 2000);
        assert!(
            now >= passed && now < passed + Duration::from_secs(5),
            "round {round}: {now:?} after {passed:?}"
        );
        if round == 1 {
            complete_one(&store, 1);
        }
        clock.advance(Duration::from_millis(HOUR));
        drop(store);
        clock.advance(Duration::from_secs(2));
    }
}

/// A wrong answer of a time server, for seconds.
#[test]
fn a_clock_that_jumps_ahead_and_comes_back_removes_nothing() {
    let (disk, clock) = (Disk::with_new_store(), Arc::new(ManualClock::at_millis(START)));
    let store = open(&disk, clock.clone()).unwrap();
    complete_one(&store, 1);
    let running = token(&block_on(store.apply(id(2), claim(2))).unwrap());
    clock.set_millis(START + 1000 * HOUR);
    clock.advance(Duration::from_secs(2));
    assert!(is_replayed(&store, 1));
    assert!(matches!(block_on(store.apply(id(2), claim(3))).unwrap(), Outcome::InProgress { .. }));
    assert_eq!(block_on(store.purge(100)).unwrap(), 0);
    assert!(skewed(&store));
    clock.set_millis(START + 4000);
    clock.advance(Duration::from_secs(2));
    assert!(is_replayed(&store, 1));
    assert!(!skewed(&store));
    block_on(store.apply(id(2), complete(running, response(2, 10)))).unwrap();
    clock.advance(DAY + Duration::from_secs(60));
    assert_eq!(block_on(store.purge(100)).unwrap(), 2, "the retention ends when it should");
}

/// The machine has no clock of its own, and gets the time from the network when the store is open already.
#[test]
fn a_start_with_the_clock_behind_does_not_make_the_store_run_ahead_when_it_is_corrected() {
    let (disk, clock) = (Disk::with_new_store(), Arc::new(ManualClock::at_millis(START)));
    let store = open(&disk, clock.clone()).unwrap();
    complete_one(&store, 1);
    drop(store);
    // Off for an hour, and started with the time of the year before.
    let clock = Arc::new(ManualClock::at_millis(START - 8760 * HOUR));
    let store = open(&disk, clock.clone()).unwrap();
    clock.advance(Duration::from_secs(10));
    complete_one(&store, 2);
    assert!(skewed(&store));
    clock.set_millis(START + HOUR + 10_000);
    complete_one(&store, 3);
    let now = store.now().since(Timestamp::from_millis(START));
    assert!(
        now >= Duration::from_millis(HOUR + 10_000) && now < Duration::from_millis(HOUR + 11_000),
        "{now:?}"
    );
    assert!(!skewed(&store));
    clock.advance(Duration::from_millis(22 * HOUR));
    assert!(is_replayed(&store, 1), "23 hours after its completion");
    clock.advance(Duration::from_millis(HOUR + 1000));
    assert!(!is_replayed(&store, 1), "24 hours after it");
    assert!(is_replayed(&store, 2), "23 hours after it");
}

/// Off for the weekend: what was recorded before the clock was set right is minutes old, whatever the step.
#[test]
fn what_was_recorded_before_a_correction_keeps_its_retention_and_its_lease() {
    let (disk, clock) = (Disk::with_new_store(), Arc::new(ManualClock::at_millis(START)));
    complete_one(&open(&disk, clock).unwrap(), 1);
    let clock = Arc::new(ManualClock::at_millis(START - 10 * HOUR));
    let store = open(&disk, clock.clone()).unwrap();
    complete_one(&store, 2);
    let running = token(&block_on(store.apply(id(3), claim(3))).unwrap());
    clock.set_millis(START + 60 * HOUR);
    block_on(store.check()).unwrap();
    assert!(is_replayed(&store, 2));
    assert!(!is_replayed(&store, 1));
    assert!(matches!(block_on(store.apply(id(3), claim(4))).unwrap(), Outcome::InProgress { .. }));
    assert_eq!(block_on(store.purge(100)).unwrap(), 0, "but for one that executes anew");
    block_on(store.apply(id(3), complete(running, response(3, 10)))).unwrap();
    assert!(is_replayed(&store, 3));
}

#[test]
fn an_operator_accepts_a_new_time_and_only_what_is_older_than_it_ages() {
    let (disk, clock) = (Disk::with_new_store(), Arc::new(ManualClock::at_millis(START)));
    let store = open(&disk, clock.clone()).unwrap();
    complete_one(&store, 1);
    assert_eq!(block_on(store.accept_clock()).unwrap(), None);
    clock.advance(Duration::from_secs(1));
    clock.set_millis(START + 60 * HOUR);
    complete_one(&store, 2);
    drop(store);
    // Nor does a restart accept it.
    clock.advance(Duration::from_secs(1));
    let store = open(&disk, clock.clone()).unwrap();
    assert!(skewed(&store));
    complete_one(&store, 3);
    assert!((1..=3).all(|n| is_replayed(&store, n)));
    let by = block_on(store.accept_clock()).unwrap().unwrap();
    assert!(by > Duration::from_millis(59 * HOUR) && by < Duration::from_millis(60 * HOUR), "{by:?}");
    assert!(!skewed(&store));
    assert!(!is_replayed(&store, 1));
    assert!(is_replayed(&store, 2) && is_replayed(&store, 3));
    drop(store);
    let store = open(&disk, clock).unwrap();
    assert!(is_replayed(&store, 2) && is_replayed(&store, 3) && !skewed(&store));
}

/// A claim that waits for the disk together with the operator's word is written by the new time.
#[test]
fn what_is_claimed_while_a_new_time_is_accepted_keeps_its_lease() {
    use std::task::{Context, Waker};
    let (disk, clock) = (Disk::with_new_store(), Arc::new(ManualClock::at_millis(START)));
    let store = open(&disk, clock.clone()).unwrap();
    clock.set_millis(START + 1000 * HOUR);
    let mut context = Context::from_waker(Waker::noop());
    std::thread::scope(|scope| {
        let held = disk.hold();
        scope.spawn(|| block_on(store.apply(id(1), claim(1))).unwrap());
        disk.wait_until_held();
        let (mut accepted, mut claimed) = (store.accept_clock(), store.apply(id(2), claim(2)));
        // Polled once, each is in the queue, in this order.
        assert!(accepted.as_mut().poll(&mut context).is_pending());
        assert!(claimed.as_mut().poll(&mut context).is_pending());
        drop(held);
        assert!(block_on(accepted).unwrap().is_some());
        block_on(claimed).unwrap();
    });
    for n in [1, 2] {
        let again = block_on(store.apply(id(n), claim(9))).unwrap();
        assert!(matches!(again, Outcome::InProgress { .. }), "{n}: {again:?}");
    }
}
