//! I14: power fails at every flush of a run, with any part of the unflushed writes on the disk. Every acknowledged
//! command is there, complete.

use std::time::Duration;

use oncegate_core::{Clock as _, Store as _};
use redb::{ReadableDatabase as _, ReadableTable as _};

use super::disk::{Crash, Disk};
use super::script::Script;
use super::{id, open};
use crate::database;
use crate::schema::{EXPIRY, RECORDS};
use crate::tests::disk::DiskMedium;

const STEPS: usize = 40;

/// The number of crashes at each flush. Each crash keeps other parts of the writes.
fn seeds() -> u64 {
    std::env::var("ONCEGATE_CRASH_SEEDS").ok().map_or(4, |text| text.parse().expect("a number"))
}

#[test]
fn everything_acknowledged_survives_a_crash_at_every_flush() {
    let base = Disk::with_new_store();
    {
        let disk = base.after_kill();
        let mut script = Script::new(1);
        let store = open(&disk, script.clock.clone()).unwrap();
        (0..STEPS).for_each(|_| script.step(&store).unwrap());
        assert!(script.acknowledged > STEPS, "the run is too short: {}", script.acknowledged);
    }
    let (mut flushes, mut in_doubt, mut kept) = (0, 0, 0);
    // The number of commands in a transaction differs between runs, and so does the number of flushes. So the loop ends
    // when no run has that many flushes.
    loop {
        let at_sync = flushes + 1;
        let mut crashed = 0;
        for seed in 0..seeds() {
            let disk = base.after_kill();
            disk.crash_at(Crash { at_sync, seed: at_sync * 1000 + seed });
            let mut script = Script::new(1);
            if let Ok(store) = open(&disk, script.clock.clone()) {
                // Runs into the crash and stops there, because nothing is acknowledged after it.
                let _ = (0..STEPS).try_for_each(|_| script.step(&store));
            }
            let Some(disk) = disk.after_crash() else { continue };
            crashed += 1;
            in_doubt += script.in_doubt.len();
            check_after_reopening(&disk, &mut script, &format!("flush {at_sync}, seed {seed}"));
            kept += script.expected.len();
        }
        if crashed == 0 {
            break;
        }
        flushes = at_sync;
    }
    assert!(flushes > STEPS as u64, "too few flushes: {flushes}");
    assert!(in_doubt > 0 && kept > 0, "the runs prove nothing: {in_doubt} in doubt, {kept} kept");
}

fn check_after_reopening(disk: &Disk, script: &mut Script, at: &str) {
    {
        let store = open(disk, script.clock.clone()).unwrap_or_else(|error| panic!("at {at}: {error}"));
        script.ahead = store.now().since(script.clock.now());
        script.check(&store);
        script.claim_all_again(&store);
    }
    let mut opened = database::open_unverified(&DiskMedium(disk.clone()), 1 << 20).unwrap();
    database::verify("disk".as_ref(), &mut opened.database).unwrap();
    check_every_record_has_an_expiry_entry(&opened.database);
}

/// Checks the expiry index: a record without an entry would never be purged.
fn check_every_record_has_an_expiry_entry(database: &redb::Database) {
    let txn = database.begin_read().unwrap();
    let noted: std::collections::BTreeSet<[u8; 32]> =
        txn.open_table(EXPIRY).unwrap().iter().unwrap().map(|entry| *entry.unwrap().1.value()).collect();
    for entry in txn.open_table(RECORDS).unwrap().iter().unwrap() {
        assert!(noted.contains(entry.unwrap().0.value()));
    }
}

#[test]
fn a_process_that_is_killed_loses_nothing_acknowledged() {
    let disk = Disk::with_new_store();
    let mut script = Script::new(2);
    let store = open(&disk, script.clock.clone()).unwrap();
    (0..STEPS).for_each(|_| script.step(&store).unwrap());
    let killed = disk.after_kill();
    drop(store);
    check_after_reopening(&killed, &mut script, "kill");
}

/// An acknowledged command is on the disk, and not only in the cache of the operating system.
#[test]
fn an_acknowledged_command_needs_no_later_flush() {
    let disk = Disk::with_new_store();
    let mut script = Script::new(3);
    let store = open(&disk, script.clock.clone()).unwrap();
    for _ in 0..STEPS {
        script.step(&store).unwrap();
        let lost = disk.after_power_loss();
        let mut copy = Script::new(0);
        copy.expected.clone_from(&script.expected);
        copy.clock.advance(script.clock.now().since(copy.clock.now()));
        let store = open(&lost, copy.clock.clone()).unwrap();
        copy.ahead = store.now().since(copy.clock.now());
        copy.check(&store);
    }
}

#[test]
fn tokens_grow_over_a_restart_with_a_clock_that_is_behind() {
    use oncegate_testkit::{ManualClock, block_on};
    let disk = Disk::with_new_store();
    let at = |millis| std::sync::Arc::new(ManualClock::at_millis(millis));
    let hour = 3_600_000;
    let store = open(&disk, at(100 * hour)).unwrap();
    let first = super::token(&block_on(store.apply(id(1), super::claim(1))).unwrap());
    drop(store);
    // The record is purged in between, so its token cannot come from the old record.
    let clock = at(100 * hour);
    clock.advance(2 * super::DAY);
    let store = open(&disk, clock).unwrap();
    assert_eq!(block_on(store.purge(10)).unwrap(), 1);
    drop(store);
    let store = open(&disk, at(50 * hour)).unwrap();
    assert!(store.now().since(oncegate_core::Timestamp::from_millis(148 * hour)) < Duration::from_secs(10));
    let second = super::token(&block_on(store.apply(id(1), super::claim(2))).unwrap());
    assert!(second > first, "I6: {second} after {first}");
}
