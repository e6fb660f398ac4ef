//! The disk fails at every operation of a run, once or for a while. No acknowledged command is lost, callers get no error
//! other than `Unavailable`, and the store recovers on its own when the fault ends.

use std::time::{Duration, Instant};

use oncegate_core::{Clock as _, Extent, Outcome, Store as _, StoreError, StoreErrorKind};
use oncegate_testkit::block_on;

use super::disk::{Disk, Fault, Operation};
use super::script::Script;
use super::{claim, complete, id, open, response, token};
use crate::EmbeddedStore;

const ENOSPC: i32 = 28;
const EIO: i32 = 5;
const STEPS: usize = 25;

fn wait_until_usable(store: &EmbeddedStore) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while let Err(error) = block_on(store.check()) {
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
        assert!(Instant::now() < deadline, "still not usable: {error}");
        std::thread::yield_now();
    }
}

fn run_with(fault: Fault) -> bool {
    let disk = Disk::with_new_store();
    let mut script = Script::new(5);
    let store = open(&disk, script.clock.clone()).unwrap();
    disk.fail(fault);
    let mut failed = false;
    for _ in 0..STEPS {
        if script.step(&store).is_err() {
            failed = true;
            wait_until_usable(&store);
            script.check(&store);
        }
    }
    // The script may not make the file grow: that depends on how its commands share transactions.
    let mut more = Vec::new();
    if fault.on == Operation::SetLen {
        while !failed {
            let n = 1000 + more.len() as u64;
            failed = complete_one(&store, n).is_err();
            more.extend((!failed).then_some(n));
            assert!(more.len() < 1000, "the file never grows");
        }
        wait_until_usable(&store);
    }
    let struck = disk.heal();
    wait_until_usable(&store);
    script.check(&store);
    // A power failure now proves that all of it is on the disk.
    let lost = disk.after_power_loss();
    drop(store);
    let store = open(&lost, script.clock.clone()).unwrap();
    script.ahead = store.now().since(script.clock.now());
    script.check(&store);
    for n in more {
        assert_eq!(block_on(store.apply(id(n), claim(0))).unwrap(), Outcome::Replay(response(n, LARGE)));
    }
    script.claim_all_again(&store);
    assert!(!failed || struck, "no failure without a fault");
    failed
}

const LARGE: usize = 100_000;

/// Completes one more record, with a large response.
fn complete_one(store: &EmbeddedStore, n: u64) -> Result<(), StoreError> {
    let granted = token(&block_on(store.apply(id(n), claim(u128::from(n))))?);
    let outcome = block_on(store.apply(id(n), complete(granted, response(n, LARGE))))?;
    assert_eq!(outcome, Outcome::Completed);
    Ok(())
}

#[test]
fn a_failed_flush_loses_nothing_acknowledged() {
    let failed = (0..40).filter(|after| run_with(fault(Operation::Sync, *after, 1, EIO))).count();
    assert!(failed > 30, "{failed} of 40 faults struck");
}

#[test]
fn a_failed_write_loses_nothing_acknowledged() {
    let failed = (0..60).filter(|n| run_with(fault(Operation::Write, n * 3, 1, ENOSPC))).count();
    assert!(failed > 40, "{failed} of 60 faults struck");
}

#[test]
fn a_file_that_cannot_grow_loses_nothing_acknowledged() {
    for after in 0..3 {
        assert!(run_with(fault(Operation::SetLen, after, 2, ENOSPC)));
    }
}

#[test]
fn the_store_recovers_from_a_fault_that_outlasts_several_attempts_to_reopen() {
    for on in [Operation::Write, Operation::Sync] {
        assert!(run_with(fault(on, 20, 4, EIO)));
    }
}

#[test]
fn a_failed_read_is_unavailable_and_not_an_absent_record() {
    let disk = Disk::with_new_store();
    let mut script = Script::new(6);
    // Without a cache, each read goes to the disk.
    let options = crate::EmbeddedOptions::new("not a directory").with_clock(script.clock.clone());
    let store = super::open_with(&disk, options.with_cache_bytes(0)).unwrap();
    (0..STEPS).for_each(|_| script.step(&store).unwrap());
    for after in 0..12 {
        disk.fail(fault(Operation::Read, after, 1, EIO));
        for n in 0..4 {
            if let Err(error) = block_on(store.lookup(id(n))) {
                assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
                break;
            }
        }
        disk.heal();
        wait_until_usable(&store);
        script.check(&store);
    }
}

/// Recorded keys are answered while nothing can be written: if the disk fills up, and if the program starts on a full disk.
#[test]
fn recorded_keys_are_answered_while_the_disk_is_full() {
    for restarted in [false, true] {
        let disk = Disk::with_new_store();
        let script = Script::new(7);
        let mut store = open(&disk, script.clock.clone()).unwrap();
        complete_one(&store, 1).unwrap();
        if restarted {
            drop(store);
            disk.fail(fault(Operation::Write, 0, u64::MAX, ENOSPC));
            store = open(&disk, script.clock.clone()).unwrap();
        } else {
            disk.fail(fault(Operation::Write, 0, u64::MAX, ENOSPC));
        }
        assert!(block_on(store.apply(id(2), claim(2))).is_err());
        let deadline = Instant::now() + Duration::from_secs(20);
        while block_on(store.lookup(id(1))).is_err() {
            assert!(Instant::now() < deadline, "a recorded key is not answered");
            std::thread::yield_now();
        }
        for _ in 0..3 {
            let replayed = block_on(store.apply(id(1), claim(9))).unwrap();
            assert_eq!(replayed, Outcome::Replay(response(1, LARGE)));
            let refused = block_on(store.apply(id(2), claim(2))).unwrap_err();
            assert_eq!((refused.kind(), refused.extent()), (StoreErrorKind::Unavailable, Extent::Writes));
            assert!(refused.is_unsent(), "the command may have been applied: {refused}");
            assert_eq!(block_on(store.check()).unwrap_err().extent(), Extent::Writes);
            assert_eq!(block_on(store.list(Default::default())).unwrap().records.len(), 1);
        }
        assert_eq!(store.advisories()[0].name, "not-writable");
        disk.heal();
        wait_until_usable(&store);
        complete_one(&store, 2).unwrap();
        assert!(store.advisories().is_empty());
        let lost = disk.after_power_loss();
        drop(store);
        let store = open(&lost, script.clock.clone()).unwrap();
        for n in [1, 2] {
            assert_eq!(block_on(store.apply(id(n), claim(0))).unwrap(), Outcome::Replay(response(n, LARGE)));
        }
    }
}

/// After a failed flush, the data that readers see may not be on the disk, so no caller gets it.
#[test]
fn after_a_failed_flush_nothing_is_answered_until_the_file_is_writable() {
    let disk = Disk::with_new_store();
    let store = open(&disk, Script::new(7).clock).unwrap();
    complete_one(&store, 1).unwrap();
    disk.fail(fault(Operation::Sync, 0, u64::MAX, ENOSPC));
    assert!(block_on(store.apply(id(2), claim(2))).is_err());
    for _ in 0..100 {
        assert!(block_on(store.lookup(id(1))).is_err());
        assert_eq!(block_on(store.check()).unwrap_err().extent(), Extent::Store);
    }
}

#[test]
fn every_call_is_refused_at_once_while_the_disk_fails_and_works_afterwards() {
    let disk = Disk::with_new_store();
    let script = Script::new(7);
    let store = open(&disk, script.clock.clone()).unwrap();
    block_on(store.apply(id(1), claim(1))).unwrap();
    disk.fail(fault(Operation::Write, 0, u64::MAX, EIO));
    let start = Instant::now();
    for _ in 0..3 {
        for refused in [
            block_on(store.apply(id(2), claim(2))).map(drop),
            block_on(store.apply(id(1), claim(3))).map(drop),
            block_on(store.lookup(id(1))).map(drop),
            block_on(store.list(Default::default())).map(drop),
            block_on(store.purge(1)).map(drop),
            block_on(store.audit(None, 1)).map(drop),
            block_on(store.check()),
        ] {
            assert_eq!(refused.unwrap_err().kind(), StoreErrorKind::Unavailable);
        }
    }
    assert!(start.elapsed() < Duration::from_secs(2), "not refused at once");
    disk.heal();
    wait_until_usable(&store);
    assert!(block_on(store.lookup(id(1))).unwrap().is_some());
    block_on(store.apply(id(2), claim(2))).unwrap();
}

#[test]
fn a_store_whose_disk_fails_can_be_closed() {
    let disk = Disk::with_new_store();
    let store = open(&disk, Script::new(8).clock).unwrap();
    disk.fail(fault(Operation::Sync, 0, u64::MAX, EIO));
    assert!(block_on(store.apply(id(1), claim(1))).is_err());
    let start = Instant::now();
    store.close();
    assert!(start.elapsed() < Duration::from_secs(2));
}

const fn fault(on: Operation, after: u64, times: u64, errno: i32) -> Fault {
    Fault { on, after, times, errno }
}
