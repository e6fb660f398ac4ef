//! The limits of records and bytes, and the retention of released keys.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{
    Command, Extent, Outcome, RecordStep, Release, Step, Store as _, StoreError, StoreErrorKind,
};
use oncegate_testkit::{ManualClock, block_on};

use super::disk::Disk;
use super::{DAY, claim, complete, id, open, open_with, response, token};
use crate::EmbeddedOptions;

fn is_capacity_error(error: &StoreError) -> bool {
    error.kind() == StoreErrorKind::Unavailable && error.extent() == Extent::Writes && error.is_unsent()
}

#[test]
fn a_record_beyond_the_limit_is_refused_and_the_others_are_answered() {
    let (disk, clock) = (Disk::with_new_store(), Arc::new(ManualClock::at_millis(1_000_000)));
    let options = EmbeddedOptions::new("not a directory").with_clock(clock.clone()).with_max_records(2);
    let store = open_with(&disk, options).unwrap();
    let granted = token(&block_on(store.apply(id(1), claim(1))).unwrap());
    block_on(store.apply(id(2), claim(2))).unwrap();
    let refused = block_on(store.apply(id(3), claim(3))).unwrap_err();
    assert!(is_capacity_error(&refused), "{refused:?}");
    assert_eq!(store.advisories()[0].name, "full");
    block_on(store.apply(id(1), complete(granted, response(1, 10)))).unwrap();
    assert_eq!(block_on(store.apply(id(1), claim(9))).unwrap(), Outcome::Replay(response(1, 10)));
    clock.advance(2 * DAY);
    assert_eq!(block_on(store.purge(10)).unwrap(), 2);
    block_on(store.apply(id(3), claim(3))).unwrap();
    assert!(store.advisories().is_empty());
}

#[test]
fn the_bytes_of_all_records_are_bounded_also_after_a_restart_and_a_crash() {
    let (disk, clock) = (Disk::with_new_store(), Arc::new(ManualClock::at_millis(1_000_000)));
    let options =
        || EmbeddedOptions::new("not a directory").with_clock(clock.clone()).with_max_record_bytes(20_000);
    let store = open_with(&disk, options()).unwrap();
    let granted = token(&block_on(store.apply(id(1), claim(1))).unwrap());
    block_on(store.apply(id(2), claim(2))).unwrap();
    block_on(store.apply(id(1), complete(granted, response(1, 20_000)))).unwrap();
    let killed = disk.after_kill();
    drop(store);
    for disk in [disk, killed] {
        let store = open_with(&disk, options()).unwrap();
        let refused = block_on(store.apply(id(3), claim(3))).unwrap_err();
        assert!(is_capacity_error(&refused), "{refused:?}");
    }
    clock.advance(2 * DAY);
    let store = open_with(&Disk::with_new_store(), options()).unwrap();
    block_on(store.apply(id(3), claim(3))).unwrap();
}

fn release(token: oncegate_core::FencingToken) -> Command {
    Command::Release(Release { token, retention: Duration::from_secs(120) })
}

/// A released key keeps the short retention of its release, not the long one of its claim.
#[test]
fn a_released_key_is_purged_after_minutes_and_not_after_its_retention() {
    let (disk, clock) = (Disk::with_new_store(), Arc::new(ManualClock::at_millis(1_000_000)));
    let store = open(&disk, clock.clone()).unwrap();
    for n in 0..50 {
        let granted = token(&block_on(store.apply(id(n), claim(u128::from(n)))).unwrap());
        assert_eq!(block_on(store.apply(id(n), release(granted))).unwrap(), Outcome::Released);
    }
    clock.advance(Duration::from_secs(125));
    assert_eq!(block_on(store.purge(100)).unwrap(), 50);
    drop(store);
    let database = redb::Builder::new().create_with_backend(disk.backend()).unwrap();
    use redb::{ReadableDatabase as _, ReadableTableMetadata as _};
    let txn = database.begin_read().unwrap();
    assert_eq!(txn.open_table(crate::schema::RECORDS).unwrap().len().unwrap(), 0);
    assert_eq!(
        txn.open_table(crate::schema::EXPIRY).unwrap().len().unwrap(),
        0,
        "the expiry index still has an entry"
    );
}

#[test]
fn finished_steps_of_a_released_key_stay_for_its_retention() {
    let (disk, clock) = (Disk::with_new_store(), Arc::new(ManualClock::at_millis(1_000_000)));
    let store = open(&disk, clock.clone()).unwrap();
    let token = token(&block_on(store.apply(id(1), claim(1))).unwrap());
    let step = Step::new("charge", bytes::Bytes::from_static(b"done")).unwrap();
    let step = Command::Step(RecordStep { token, number: 0, step });
    assert_eq!(block_on(store.apply(id(1), step)).unwrap(), Outcome::StepRecorded);
    block_on(store.apply(id(1), release(token))).unwrap();
    clock.advance(DAY);
    assert_eq!(block_on(store.purge(100)).unwrap(), 0);
    assert_eq!(block_on(store.lookup(id(1))).unwrap().unwrap().steps.as_slice().len(), 1);
}
