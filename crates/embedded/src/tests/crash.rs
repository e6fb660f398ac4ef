//! Power fails at every operation of a run, with any part of the unfinished writes on the disk. Every acknowledged command is
//! there, complete.

use oncegate_core::{Clock as _, Store as _};

use super::faults::ENOSPC;
use super::open;
use super::sim::{Crash, Fault, Image, Operation, SimDisk};
use crate::tests::script::Script;

const STEPS: usize = 60;

/// The number of images of the disk after the crash at each operation. Each keeps other parts of the unfinished writes.
fn images() -> u64 {
    std::env::var("ONCEGATE_CRASH_IMAGES").ok().map_or(20, |text| text.parse().expect("a number"))
}

#[test]
fn everything_acknowledged_survives_a_crash_at_every_operation() {
    let (mut at, mut in_doubt, mut kept, mut checked) = (0, 0, 0, 0);
    loop {
        at += 1;
        let disk = SimDisk::default();
        disk.crash_at(Crash { at, images: images(), seed: at * 1_000_000 });
        let mut script = Script::new(at % 16);
        if let Ok(store) = open(&disk, script.clock.clone()) {
            // Runs into the crash and stops there, because nothing is acknowledged after it.
            let _ = (0..STEPS).try_for_each(|_| script.step(&store));
        }
        let Some(images) = disk.after_crash() else { break };
        in_doubt += script.in_doubt.len();
        kept += script.expected.len();
        for (number, image) in images.iter().enumerate() {
            checked += 1;
            check_after_reopening(image, &mut script.copy(), &format!("operation {at}, image {number}"));
        }
    }
    assert!(at > STEPS as u64, "too few operations: {at}");
    assert!(in_doubt > 0 && kept > 0, "the runs prove nothing: {in_doubt} in doubt, {kept} kept");
    println!("{checked} images of {at} crashes");
}

fn check_after_reopening(image: &Image, script: &mut Script, at: &str) {
    let disk = SimDisk::of(image);
    {
        let store = open(&disk, script.clock.clone()).unwrap_or_else(|error| panic!("at {at}: {error}"));
        script.ahead = store.now().since(script.clock.now());
        script.check(&store);
    }
    // What recovery wrote must be read again the same way.
    let store = open(&SimDisk::of(&disk.after_power_loss()), script.clock.clone())
        .unwrap_or_else(|error| panic!("again at {at}: {error}"));
    script.ahead = store.now().since(script.clock.now());
    script.check(&store);
    script.claim_all_again(&store);
}

/// Recovery itself is interrupted, at each of its operations.
#[test]
fn everything_acknowledged_survives_a_crash_during_recovery() {
    let (mut recoveries, mut torn) = (0, 0);
    for at in (7..).step_by(7) {
        let disk = SimDisk::default();
        disk.crash_at(Crash { at, images: 3, seed: at });
        let mut script = Script::new(5);
        if let Ok(store) = open(&disk, script.clock.clone()) {
            let _ = (0..STEPS).try_for_each(|_| script.step(&store));
        }
        let Some(images) = disk.after_crash() else { break };
        for image in images {
            for at in 1.. {
                let disk = SimDisk::of(&image);
                disk.crash_at(Crash { at, images: 2, seed: at });
                // The housekeeping goes on for ever. Only what happens until the store is open counts here.
                drop(open(&disk, script.clock.clone()));
                let Some(images) = disk.after_crash().filter(|_| at < 20) else { break };
                recoveries += 1;
                torn += usize::from(images.first() != images.last());
                for image in images {
                    check_after_reopening(&image, &mut script.copy(), &format!("operation {at} of recovery"));
                }
            }
        }
    }
    assert!(recoveries > 50 && torn > 5, "{recoveries} recoveries, {torn} of them torn");
}

/// A process is killed between a write and its flush, another one opens the store, and then power fails: what the second one has
/// shown is there.
#[test]
fn what_a_new_process_shows_survives_a_later_power_failure() {
    let mut shown = 0;
    for at in 1.. {
        let disk = SimDisk::default();
        disk.crash_at(Crash { at, images: 0, seed: 0 });
        let mut script = Script::new(at % 16);
        if let Ok(store) = open(&disk, script.clock.clone()) {
            let _ = (0..STEPS).try_for_each(|_| script.step(&store));
        }
        if disk.after_crash().is_none() {
            break;
        }
        let disk = disk.for_next_process();
        let store = open(&disk, script.clock.clone()).unwrap();
        script.ahead = store.now().since(script.clock.now());
        shown += script.in_doubt.len();
        script.check(&store);
        // It continues in the segment that the old process has prepared, and prepares none.
        disk.fail(Fault { on: Operation::Create, after: 0, times: u64::MAX, errno: ENOSPC });
        let _ = (0..STEPS).try_for_each(|_| script.step(&store));
        check_after_reopening(&disk.after_power_loss(), &mut script.copy(), &format!("operation {at}"));
    }
    assert!(shown > 20, "{shown}");
}

#[test]
fn a_process_that_is_killed_loses_nothing_acknowledged() {
    let disk = SimDisk::default();
    let mut script = Script::new(2);
    let store = open(&disk, script.clock.clone()).unwrap();
    for step in 0..STEPS {
        script.step(&store).unwrap();
        if step % 7 == 0 {
            let mut copy = script.copy();
            check_after_reopening(&disk.after_kill(), &mut copy, &format!("kill after step {step}"));
        }
    }
}

/// An acknowledged command is on the disk, and not only in the cache of the operating system.
#[test]
fn an_acknowledged_command_needs_no_later_flush() {
    let disk = SimDisk::default();
    let mut script = Script::new(3);
    let store = open(&disk, script.clock.clone()).unwrap();
    for step in 0..STEPS {
        script.step(&store).unwrap();
        let mut copy = script.copy();
        check_after_reopening(&disk.after_power_loss(), &mut copy, &format!("power loss after step {step}"));
    }
}
