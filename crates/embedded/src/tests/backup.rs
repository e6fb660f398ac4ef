//! Copies of a store that is open.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::*;
use crate::{BackupSnapshot, check};

/// Writes a snapshot into a directory, as far as `bytes` reach.
fn write(snapshot: &BackupSnapshot, to: &Path, mut bytes: u64) {
    for file in snapshot.files() {
        let mut content = vec![0xff; file.len().min(bytes) as usize];
        let half = content.len() / 2;
        assert_eq!(file.read(&mut content[..half], 0).unwrap(), half);
        assert_eq!(file.read(&mut content[half..], half as u64).unwrap(), content.len() - half);
        bytes -= content.len() as u64;
        fs::write(to.join(file.name()), content).unwrap();
        if bytes == 0 {
            return;
        }
    }
}

fn len(snapshot: &BackupSnapshot) -> u64 {
    snapshot.files().iter().map(crate::BackupFile::len).sum()
}

/// Opens a copy, on the same kind of disk and with the same sizes as the store.
fn open_copy(directory: &Path, clock: &Arc<ManualClock>) -> Result<EmbeddedStore, EmbeddedOpenError> {
    EmbeddedStore::open(EmbeddedOptions::new(directory).with_clock(clock.clone()))
}

#[test]
fn a_copy_under_load_is_sound_and_has_everything_that_was_acknowledged_before_it() {
    let clock = Arc::new(ManualClock::at_millis(1_000_000));
    let store = open(&SimDisk::default(), clock.clone()).unwrap();
    let (done, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let mut deleted = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut n = 0;
            while !is_over.load(Ordering::Relaxed) {
                n += 1;
                complete_one(&store, n, 1500);
                done.store(n, Ordering::SeqCst);
                // Segments are deleted meanwhile, also those that a snapshot holds.
                if n % 64 == 0 {
                    clock.advance(DAY / 2);
                    block_on(store.purge(1000)).unwrap();
                }
            }
        });
        for _ in 0..60 {
            let before = done.load(Ordering::SeqCst);
            let snapshot = store.snapshot().unwrap();
            let after = done.load(Ordering::SeqCst);
            until("the store has written more", || done.load(Ordering::SeqCst) > after + 40);
            deleted += usize::from(snapshot.files()[1].name() != "00000001.log");
            let directory = tempfile::tempdir().unwrap();
            write(&snapshot, directory.path(), u64::MAX);
            let report = check(&EmbeddedOptions::new(directory.path())).unwrap();
            assert!(report.is_sound() && !report.is_torn && report.unproved_end.is_none(), "{report:?}");
            let copy =
                open_copy(directory.path(), &Arc::new(ManualClock::at_millis(clock.now().as_millis())))
                    .unwrap();
            // The newest one: older ones may be past their retention by now.
            if before > 0 && block_on(store.lookup(id(before))).unwrap().is_some() {
                assert!(is_replayed(&copy, before, 1500), "record {before} is missing in a copy of {after}");
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert!(deleted > 10, "no segment was deleted: {deleted}");
}

#[test]
fn a_copy_that_is_cut_off_anywhere_is_refused() {
    let clock = Arc::new(ManualClock::at_millis(1_000_000));
    let store = open(&SimDisk::default(), clock.clone()).unwrap();
    for n in 1..60 {
        complete_one(&store, n, 1500);
    }
    let snapshot = store.snapshot().unwrap();
    assert!(snapshot.files().len() > 3);
    // Zeros at the end of the last segment say nothing, but the file has a length.
    for cut in (1..len(&snapshot)).step_by(4096).chain([len(&snapshot) - 1]) {
        let directory = tempfile::tempdir().unwrap();
        write(&snapshot, directory.path(), cut);
        let report = check(&EmbeddedOptions::new(directory.path()));
        assert!(!report.is_ok_and(|report| report.is_sound()), "{cut} of {} bytes", len(&snapshot));
    }
    let directory = tempfile::tempdir().unwrap();
    write(&snapshot, directory.path(), u64::MAX);
    let copy = open_copy(directory.path(), &clock).unwrap();
    assert!((1..60).all(|n| is_replayed(&copy, n, 1500)));
}

#[test]
fn a_copy_does_not_know_what_came_after_it() {
    let clock = Arc::new(ManualClock::at_millis(1_000_000));
    let store = open(&SimDisk::default(), clock.clone()).unwrap();
    complete_one(&store, 1, 10);
    let snapshot = store.snapshot().unwrap();
    complete_one(&store, 2, 10);
    store.close();
    assert!(store.snapshot().is_err(), "a closed store has no state to copy");
    let directory = tempfile::tempdir().unwrap();
    write(&snapshot, directory.path(), u64::MAX);
    let copy = open_copy(directory.path(), &clock).unwrap();
    assert!(is_replayed(&copy, 1, 10));
    assert!(matches!(block_on(copy.apply(id(2), claim(9))).unwrap(), Outcome::Execute(_)));
}
