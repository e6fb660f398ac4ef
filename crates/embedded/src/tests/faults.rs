//! Reads and writes that fail, a full disk, files that are moved.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use oncegate_core::{Command, Extent, Outcome, Renew, Store as _, StoreError, StoreErrorKind};
use oncegate_testkit::{ManualClock, block_on, record_id as id};

use super::sim::{Fault, Operation, SimDisk};
use super::{complete_one, is_replayed, open, until};
use crate::EmbeddedStore;
use crate::tests::script::Script;
use crate::tests::{DAY, claim, complete, response, token};

const EIO: i32 = 5;
pub(super) const ENOSPC: i32 = 28;

fn started() -> (SimDisk, Arc<ManualClock>, EmbeddedStore) {
    let (disk, clock) = (SimDisk::default(), Arc::new(ManualClock::at_millis(1_700_000_000_000)));
    let store = open(&disk, clock.clone()).unwrap();
    (disk, clock, store)
}

fn fault(on: Operation, times: u64, errno: i32) -> Fault {
    Fault { on, after: 0, times, errno }
}

/// After a failed flush, the operating system may show bytes that never reach the disk. So the batch goes to another file.
#[test]
fn a_batch_whose_flush_failed_once_is_written_again_before_it_is_answered() {
    for on in [Operation::Sync, Operation::Write] {
        for after in 0..6 {
            let (disk, clock, store) = started();
            complete_one(&store, 1, 10);
            disk.fail(Fault { after, ..fault(on, 1, EIO) });
            // If the failure met a segment that is prepared ahead, new keys wait until another one is.
            (2..6).for_each(|n| {
                until("new keys are accepted", || match block_on(store.apply(id(n), claim(u128::from(n)))) {
                    Ok(outcome) => {
                        let complete = complete(token(&outcome), response(n, 3000));
                        block_on(store.apply(id(n), complete)).unwrap();
                        true
                    }
                    Err(error) => {
                        assert!(error.is_unsent(), "{error}");
                        false
                    }
                });
            });
            let lost = SimDisk::of(&disk.after_power_loss());
            drop(store);
            let store = open(&lost, clock).unwrap();
            assert!(is_replayed(&store, 1, 10), "{on:?} {after}");
            assert!((2..6).all(|n| is_replayed(&store, n, 3000)), "{on:?} {after}");
        }
    }
}

#[test]
fn while_nothing_can_be_written_recorded_keys_are_answered_and_the_store_recovers_by_itself() {
    for on in [Operation::Sync, Operation::Write] {
        let (disk, clock, store) = started();
        complete_one(&store, 1, 10);
        let running = token(&block_on(store.apply(id(2), claim(2))).unwrap());
        disk.fail(fault(on, u64::MAX, EIO));
        let error = block_on(store.apply(id(3), claim(3))).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
        assert!(!error.is_unsent(), "it may have been applied");
        let refused = block_on(store.apply(id(4), claim(4))).unwrap_err();
        assert!(refused.is_unsent() && refused.extent() == Extent::Writes, "{refused}");
        assert!(is_replayed(&store, 1, 10));
        // It is not known yet if the claim is on the disk.
        assert!(block_on(store.lookup(id(3))).is_err());
        assert!(store.advisories().iter().any(|advisory| advisory.name == "not-writable"));
        disk.heal();
        until("writes are accepted again", || block_on(store.check()).is_ok());
        block_on(store.apply(id(2), complete(running, response(2, 10)))).unwrap();
        // The claim that was sent again is the same claim.
        assert!(matches!(block_on(store.apply(id(3), claim(3))).unwrap(), Outcome::Execute(_)));
        complete_one(&store, 4, 10);
        let lost = SimDisk::of(&disk.after_power_loss());
        drop(store);
        let store = open(&lost, clock).unwrap();
        assert!([1, 2, 4].into_iter().all(|n| is_replayed(&store, n, 10)));
        assert!(matches!(block_on(store.apply(id(3), claim(5))).unwrap(), Outcome::InProgress { .. }));
    }
}

/// The same with random commands: what was answered is there, and what was not is there completely or not at all.
#[test]
fn random_commands_survive_random_failures() {
    for seed in 0..12 {
        let disk = SimDisk::default();
        let mut script = Script::new(seed);
        let store = open(&disk, script.clock.clone()).unwrap();
        let mut failed = 0;
        for step in 0..40 {
            if step % 8 == 7 {
                let on = [Operation::Sync, Operation::Write, Operation::Create][step % 3];
                disk.fail(Fault { on, after: seed % 3, times: [1, 2, 5, 9][step % 4], errno: EIO });
            }
            if script.step(&store).is_err() {
                failed += 1;
                disk.heal();
                until("writes are accepted again", || block_on(store.check()).is_ok());
                script.check(&store);
            }
        }
        disk.heal();
        let mut copy = script.copy();
        let lost = SimDisk::of(&disk.after_power_loss());
        drop(store);
        let store =
            open(&lost, copy.clock.clone()).unwrap_or_else(|error| panic!("{seed}, {failed}: {error}"));
        copy.ahead = store.now().since(oncegate_core::Clock::now(&*copy.clock));
        copy.check(&store);
        copy.claim_all_again(&store);
    }
}

/// A directory that lost its rights is not a full disk.
#[test]
fn the_refusal_of_a_new_key_says_why_there_is_no_next_segment() {
    const EPERM: i32 = 1;
    for (errno, why) in [(ENOSPC, "No space left on device"), (EPERM, "Operation not permitted")] {
        let (disk, _clock, store) = started();
        disk.fail(fault(Operation::Create, u64::MAX, errno));
        let mut next = 0;
        let mut refusal = || {
            next += 1;
            block_on(store.apply(id(next), claim(1))).err()
        };
        until("new keys are refused", || refusal().is_some());
        let error = refusal().unwrap().to_string();
        assert!(error.contains(why) && !error.contains("nearly full"), "{error}");
        let check = block_on(store.check()).unwrap_err().to_string();
        assert!(check.contains(why), "{check}");
    }
}

#[test]
fn a_full_disk_refuses_new_keys_and_completes_what_runs() {
    let (disk, clock, store) = started();
    let running: Vec<_> =
        (0..8).map(|n| token(&block_on(store.apply(id(n), claim(u128::from(n)))).unwrap())).collect();
    disk.fail(fault(Operation::Create, u64::MAX, ENOSPC));
    // The segments that are there take some more claims, until the next one is missing.
    let refusal = |n: u64| -> Option<StoreError> { block_on(store.apply(id(n), claim(1))).err() };
    let mut next = 100;
    until("new keys are refused", || {
        next += 1;
        refusal(next).is_some()
    });
    let error = refusal(next).unwrap();
    assert!(error.is_unsent() && error.extent() == Extent::Writes, "{error}");
    for (n, token) in (0..).zip(running) {
        block_on(store.apply(id(n), complete(token, response(n, 100)))).unwrap();
        assert!(is_replayed(&store, n, 100));
    }
    drop(store);
    // A restart finds the disk as full as it was.
    for image in [disk.after_power_loss(), disk.after_kill()] {
        let full = SimDisk::of(&image);
        full.fail(fault(Operation::Create, u64::MAX, ENOSPC));
        let store = open(&full, clock.clone()).unwrap();
        assert!((0..8).all(|n| is_replayed(&store, n, 100)));
        full.heal();
        until("new keys are accepted", || block_on(store.apply(id(next), claim(1))).is_ok());
    }
}

/// Until the last segment is full to the end.
#[test]
fn a_disk_that_is_full_when_a_segment_ends_does_not_damage_the_log() {
    let (disk, clock, store) = started();
    let owner = token(&block_on(store.apply(id(1), claim(1))).unwrap());
    disk.fail(fault(Operation::Create, u64::MAX, ENOSPC));
    let renew = || {
        let renew = Renew { token: owner, lease: Duration::from_secs(30), retention: DAY };
        block_on(store.apply(id(1), Command::Renew(renew)))
    };
    until("nothing can be written", || renew().is_err());
    drop(store);
    let full = SimDisk::of(&disk.after_power_loss());
    full.fail(fault(Operation::Create, u64::MAX, ENOSPC));
    let store = open(&full, clock).unwrap();
    assert!(block_on(store.lookup(id(1))).unwrap().is_some());
}

#[test]
fn a_nearly_full_disk_refuses_claims_until_it_has_space() {
    let (disk, _, store) = started();
    let running = token(&block_on(store.apply(id(1), claim(1))).unwrap());
    disk.set_low(true);
    let mut next = 100;
    until("new keys are refused", || {
        next += 1;
        block_on(store.apply(id(next), claim(2))).is_err()
    });
    block_on(store.apply(id(1), complete(running, response(1, 10)))).unwrap();
    assert!(is_replayed(&store, 1, 10));
    assert!(store.advisories().iter().any(|advisory| advisory.name == "full"));
    disk.set_low(false);
    until("new keys are accepted", || block_on(store.apply(id(next), claim(2))).is_ok());
}

#[test]
fn nothing_is_answered_while_the_files_are_moved_away() {
    let (disk, _, store) = started();
    complete_one(&store, 1, 10);
    disk.set_moved(true);
    assert!(block_on(store.apply(id(2), claim(2))).is_err());
    assert!(is_replayed(&store, 1, 10));
    disk.set_moved(false);
    until("writes are accepted again", || block_on(store.check()).is_ok());
    assert!(matches!(block_on(store.apply(id(2), claim(2))).unwrap(), Outcome::Execute(_)));
}

#[test]
fn a_failed_read_concerns_only_its_command() {
    let (disk, clock, store) = started();
    (0..3).for_each(|n| complete_one(&store, n, 10));
    drop(store);
    let store = open(&disk, clock).unwrap();
    disk.fail(fault(Operation::Read, 1, EIO));
    let error = block_on(store.apply(id(1), claim(9))).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!((0..3).all(|n| is_replayed(&store, n, 10)));
}

/// No reader sees a change that a crash could take back.
#[test]
fn nothing_is_shown_before_it_is_on_the_disk() {
    let (disk, _, store) = started();
    let token = token(&block_on(store.apply(id(1), claim(1))).unwrap());
    let hold = disk.hold();
    thread::scope(|scope| {
        let completing = scope.spawn(|| block_on(store.apply(id(1), complete(token, response(1, 10)))));
        disk.wait_until_held();
        let replaying = scope.spawn(|| is_replayed(&store, 1, 10));
        let looking = scope.spawn(|| block_on(store.lookup(id(1))).unwrap());
        thread::sleep(Duration::from_millis(100));
        assert!(!completing.is_finished() && !replaying.is_finished() && !looking.is_finished());
        let listed = block_on(store.list(oncegate_core::ListQuery::default())).unwrap();
        let states: Vec<_> =
            listed.records.iter().map(|(_, record)| record.state_name(store.now())).collect();
        assert_eq!(states, [oncegate_core::StateName::InProgress]);
        drop(hold);
        assert_eq!(completing.join().unwrap().unwrap(), Outcome::Completed);
        assert!(replaying.join().unwrap());
        assert!(looking.join().unwrap().is_some());
    });
}
