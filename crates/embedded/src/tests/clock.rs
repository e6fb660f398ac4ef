//! Changes of the machine's clock: while the store is open, and between two processes.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{Outcome, Store as _, Timestamp};
use oncegate_testkit::{ManualClock, block_on};

use super::sim::SimDisk;
use super::{open, until};
use crate::EmbeddedStore;
use crate::format::{HEADER, Header, Kind, entries};
use crate::tests::{DAY, claim, complete, response, token};
use oncegate_testkit::record_id as id;

const HOUR: u64 = 3_600_000;
const START: u64 = 400_000 * HOUR;

fn complete_one(store: &EmbeddedStore, n: u64) {
    let granted = token(&block_on(store.apply(id(n), claim(u128::from(n)))).unwrap());
    block_on(store.apply(id(n), complete(granted, response(n, 10)))).unwrap();
}

fn is_replayed(store: &EmbeddedStore, n: u64) -> bool {
    block_on(store.apply(id(n), claim(77))).unwrap() == Outcome::Replay(response(n, 10))
}

fn reports_skew(store: &EmbeddedStore) -> bool {
    store.advisories().iter().any(|advisory| matches!(advisory.name, "clock" | "clock-behind"))
}

/// For example a sidecar that is restarted before its first request, or after an idle hour.
#[test]
fn an_idle_store_follows_the_clock_after_a_restart() {
    let (disk, clock) = (SimDisk::default(), Arc::new(ManualClock::at_millis(START)));
    for round in 0..3 {
        let store = open(&disk, clock.clone()).unwrap();
        assert!(!reports_skew(&store), "round {round}");
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

/// For example a time server that gives a wrong time for a few seconds.
#[test]
fn a_clock_that_jumps_ahead_and_comes_back_removes_nothing() {
    let (disk, clock) = (SimDisk::default(), Arc::new(ManualClock::at_millis(START)));
    let store = open(&disk, clock.clone()).unwrap();
    complete_one(&store, 1);
    let running = token(&block_on(store.apply(id(2), claim(2))).unwrap());
    clock.set_millis(START + 1000 * HOUR);
    clock.advance(Duration::from_secs(2));
    assert!(is_replayed(&store, 1));
    assert!(matches!(block_on(store.apply(id(2), claim(3))).unwrap(), Outcome::InProgress { .. }));
    assert_eq!(block_on(store.purge(100)).unwrap(), 0);
    assert!(reports_skew(&store));
    clock.set_millis(START + 4000);
    clock.advance(Duration::from_secs(2));
    assert!(is_replayed(&store, 1));
    assert!(!reports_skew(&store));
    block_on(store.apply(id(2), complete(running, response(2, 10)))).unwrap();
    clock.advance(DAY + Duration::from_secs(60));
    assert_eq!(block_on(store.purge(100)).unwrap(), 2, "the retention ends when it should");
}

/// For example a machine without a battery-backed clock, which gets the time from the network after the store was opened.
#[test]
fn a_start_with_the_clock_behind_does_not_make_the_store_run_ahead_when_it_is_corrected() {
    let (disk, clock) = (SimDisk::default(), Arc::new(ManualClock::at_millis(START)));
    let store = open(&disk, clock.clone()).unwrap();
    complete_one(&store, 1);
    drop(store);
    // The machine was off for an hour, and starts with a time of the year before.
    let clock = Arc::new(ManualClock::at_millis(START - 8760 * HOUR));
    let store = open(&disk, clock.clone()).unwrap();
    clock.advance(Duration::from_secs(10));
    complete_one(&store, 2);
    assert!(reports_skew(&store));
    clock.set_millis(START + HOUR + 10_000);
    complete_one(&store, 3);
    let now = store.now().since(Timestamp::from_millis(START));
    assert!(
        now >= Duration::from_millis(HOUR + 10_000) && now < Duration::from_millis(HOUR + 11_000),
        "{now:?}"
    );
    assert!(!reports_skew(&store));
    clock.advance(Duration::from_millis(22 * HOUR));
    assert!(is_replayed(&store, 1), "23 hours after its completion");
    clock.advance(Duration::from_millis(HOUR + 1000));
    assert!(!is_replayed(&store, 1), "24 hours after it");
    assert!(is_replayed(&store, 2), "23 hours after it");
}

/// For example a machine that was off for the weekend: records from just before the correction are minutes old, however
/// large the correction is.
#[test]
fn records_from_before_a_clock_correction_keep_their_retention_and_lease() {
    let (disk, clock) = (SimDisk::default(), Arc::new(ManualClock::at_millis(START)));
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
fn accepting_a_new_time_ages_only_the_records_from_before_the_step() {
    let (disk, clock) = (SimDisk::default(), Arc::new(ManualClock::at_millis(START)));
    let store = open(&disk, clock.clone()).unwrap();
    complete_one(&store, 1);
    assert_eq!(block_on(store.accept_clock()).unwrap(), None);
    clock.advance(Duration::from_secs(1));
    clock.set_millis(START + 60 * HOUR);
    complete_one(&store, 2);
    drop(store);
    // A restart does not accept it either.
    clock.advance(Duration::from_secs(1));
    let store = open(&disk, clock.clone()).unwrap();
    assert!(reports_skew(&store));
    complete_one(&store, 3);
    assert!((1..=3).all(|n| is_replayed(&store, n)));
    let by = block_on(store.accept_clock()).unwrap().unwrap();
    assert!(by > Duration::from_millis(59 * HOUR) && by < Duration::from_millis(60 * HOUR), "{by:?}");
    assert!(!reports_skew(&store));
    assert!(!is_replayed(&store, 1));
    assert!(is_replayed(&store, 2) && is_replayed(&store, 3));
    drop(store);
    let store = open(&disk, clock).unwrap();
    assert!(is_replayed(&store, 2) && is_replayed(&store, 3) && !reports_skew(&store));
}

/// A claim that waits for the disk together with the operator's command is written with the new time.
#[test]
fn a_claim_made_while_a_new_time_is_accepted_keeps_its_lease() {
    use std::task::{Context, Waker};
    let (disk, clock) = (SimDisk::default(), Arc::new(ManualClock::at_millis(START)));
    let store = open(&disk, clock.clone()).unwrap();
    clock.set_millis(START + 1000 * HOUR);
    let mut context = Context::from_waker(Waker::noop());
    std::thread::scope(|scope| {
        let held = disk.hold();
        scope.spawn(|| block_on(store.apply(id(1), claim(1))).unwrap());
        disk.wait_until_held();
        let (mut accepted, mut claimed) = (store.accept_clock(), store.apply(id(2), claim(2)));
        // One poll each puts both in the queue, in this order.
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

/// A completion waits for the disk while the time of day is accepted.
#[test]
fn a_completion_in_flight_while_a_new_time_is_accepted_keeps_its_retention() {
    // By an operator, and by the store itself when the clock was known to be wrong.
    for is_expected in [false, true] {
        let (disk, clock) = (SimDisk::default(), Arc::new(ManualClock::at_millis(START)));
        complete_one(&open(&disk, clock).unwrap(), 9);
        let clock = Arc::new(ManualClock::at_millis(if is_expected { START - 10 * HOUR } else { START }));
        let store = open(&disk, clock.clone()).unwrap();
        if !is_expected {
            jump(&store, &clock);
        }
        let granted = token(&block_on(store.apply(id(1), claim(1))).unwrap());
        let held = disk.hold();
        std::thread::scope(|scope| {
            let completing = scope.spawn(|| block_on(store.apply(id(1), complete(granted, response(1, 10)))));
            disk.wait_until_held();
            if is_expected {
                jump(&store, &clock);
            } else {
                scope.spawn(|| block_on(store.accept_clock()).unwrap());
            }
            until("the time is accepted", || !reports_skew(&store));
            drop(held);
            assert_eq!(completing.join().unwrap().unwrap(), Outcome::Completed);
        });
        assert!(is_replayed(&store, 1), "{is_expected}");
        block_on(store.purge(100)).unwrap();
        assert!(is_replayed(&store, 1), "{is_expected}: a retention of a day, and seconds old");
    }
}

/// Sets the clock ahead by days, and has the store see it.
fn jump(store: &EmbeddedStore, clock: &ManualClock) {
    clock.set_millis(START + 60 * HOUR);
    clock.advance(Duration::from_secs(1));
    store.now();
}

/// Power fails when the batch before the entry of a correction is on the disk, and the entry is not.
#[test]
fn a_batch_before_a_correction_does_not_have_the_time_after_it() {
    for filled in 1..8 {
        let (disk, clock) = (SimDisk::default(), Arc::new(ManualClock::at_millis(START)));
        let store = open(&disk, clock.clone()).unwrap();
        jump(&store, &clock);
        (0..filled).for_each(|n| complete_one(&store, n));
        let granted = token(&block_on(store.apply(id(500), claim(1))).unwrap());
        let held = disk.hold();
        // Sometimes in the next segment, so that more than one write comes before the batch.
        let large = complete(granted, response(500, 7000));
        let before = std::thread::scope(|scope| {
            let completing = scope.spawn(|| block_on(store.apply(id(500), large)));
            disk.wait_until_held();
            let before = disk.after_kill();
            let accepting = scope.spawn(|| block_on(store.accept_clock()));
            until("the time is accepted", || !reports_skew(&store));
            drop(held);
            completing.join().unwrap().unwrap();
            accepting.join().unwrap().unwrap();
            before
        });
        let mut image = disk.after_kill();
        drop(store);
        for (number, bytes) in before {
            // A segment may have been deleted since. And the mark may know what is cut off now.
            if number == super::sim::MARK {
                image.insert(number, bytes);
            } else {
                image.entry(number).or_insert(bytes);
            }
        }
        let mut is_cut = false;
        for bytes in image.values_mut() {
            let mut at = 0;
            while let Some(Ok((header, _))) = bytes.get(at..at + HEADER).map(Header::decode) {
                let payload = &bytes[at + HEADER..at + HEADER + header.payload_len as usize];
                is_cut |= entries(payload).flatten().any(|(_, head, _)| head.kind == Kind::Shift);
                let len = header.batch_len() as usize;
                if is_cut {
                    bytes[at..at + len].fill(0);
                }
                at += len;
            }
        }
        assert!(is_cut);
        let store = open(&SimDisk::of(&image), clock.clone()).unwrap();
        assert!((0..filled).all(|n| is_replayed(&store, n)), "{filled}");
    }
}
