//! The mark: a log whose end is missing is refused, and a sound one never is.

use std::sync::Arc;

use oncegate_core::{Store as _, Timestamp};
use oncegate_testkit::{ManualClock, block_on, record_id as id};

use super::sim::{Fault, Image, MARK, Operation, SimDisk, segments};
use super::{SIZES, complete_one, is_replayed, open, until};
use crate::check::{CheckReport, check_disk};
use crate::format::{BLOCK, Header};
use crate::mark::{Mark, Marker, Marks};
use crate::salvage::salvage_disk;
use crate::tests::DAY;
use crate::tests::damage::varied_store;
use crate::{EmbeddedOpenError, EmbeddedOptions};

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::at_millis(1_700_000_000_000))
}

/// A store with these records, closed or killed.
fn store_with(
    disk: &SimDisk,
    clock: &Arc<ManualClock>,
    records: std::ops::Range<u64>,
    is_closed: bool,
) -> Image {
    let store = open(disk, clock.clone()).unwrap();
    records.for_each(|n| complete_one(&store, n, 100));
    if is_closed {
        store.close();
    }
    disk.after_power_loss()
}

fn damage(image: &Image, clock: &Arc<ManualClock>) -> Option<String> {
    let report = check_disk(&SimDisk::of(image), &mut |_, _| ()).unwrap();
    match open(&SimDisk::of(image), clock.clone()) {
        Ok(_) => {
            assert_eq!(report.damage, None, "the check agrees with the start");
            None
        }
        Err(EmbeddedOpenError::Damaged { damage, file }) => {
            assert_eq!(report.damage, Some(format!("{}: {damage}", file.display())));
            Some(damage)
        }
        Err(error) => panic!("{error}"),
    }
}

fn checked(image: &Image) -> CheckReport {
    check_disk(&SimDisk::of(image), &mut |_, _| ()).unwrap()
}

/// The places of all batches: segment and offset.
fn batches(image: &Image) -> Vec<(u32, usize)> {
    let mut found = Vec::new();
    for number in segments(image) {
        let at = (0..image[&number].len()).step_by(BLOCK as usize);
        let headers = at.filter_map(|at| Some((at, Header::decode(&image[&number][at..]).ok()?.0.sequence)));
        found.extend(headers.map(|(at, sequence)| (sequence, (number, at))));
    }
    found.sort_unstable();
    found.into_iter().map(|(_, place)| place).collect()
}

#[test]
fn zeros_where_the_end_of_a_closed_log_was_are_refused() {
    let (image, clock, _) = varied_store();
    let batches = batches(&image);
    assert!(batches.len() > 60, "{}", batches.len());
    for (first, place) in batches.iter().enumerate().skip(1) {
        let mut cut = image.clone();
        for (number, bytes) in &mut cut {
            // Segments without a batch are as they were prepared.
            if *number != MARK && *number >= place.0 {
                bytes[if *number == place.0 { place.1 } else { 0 }..].fill(0);
            }
        }
        let found = damage(&cut, &clock).unwrap_or_else(|| panic!("{first} batches are left, and opened"));
        // If a sealed segment lost its end, the chain notices it first.
        assert!(
            found.contains("missing")
                || found.contains("does not follow")
                || found.contains("cannot be read"),
            "{found}"
        );
        let copy = EmbeddedOptions::new("copy").with_clock(clock.clone());
        let report = salvage_disk(&SimDisk::of(&cut), Arc::new(SimDisk::default()), copy, SIZES).unwrap();
        assert!(!report.lost.is_empty(), "{first} batches are left");
    }
    let last = batches.last().unwrap();
    let mut cut = image;
    cut.get_mut(&last.0).unwrap()[last.1..].fill(0);
    let found = damage(&cut, &clock).unwrap();
    assert!(found.contains("2023-11-14T") && found.contains("1 batches are missing"), "{found}");
}

#[test]
fn the_mark_of_a_killed_process_knows_the_batches_of_its_start_and_of_full_segments() {
    let (disk, clock) = (SimDisk::default(), clock());
    let before = store_with(&disk, &clock, 0..3, true);
    let store = open(&disk, clock.clone()).unwrap();
    let mark_at_start = disk.after_power_loss()[&MARK].clone();
    let mut n = 10;
    until("a segment is full, and the mark is written", || {
        complete_one(&store, n, 3000);
        n += 1;
        disk.after_power_loss()[&MARK] != mark_at_start
    });
    let killed = disk.after_power_loss();
    assert!(damage(&killed, &clock).is_none());
    let mut older = before;
    older.insert(MARK, killed[&MARK].clone());
    let found = damage(&older, &clock).unwrap();
    assert!(found.contains("batches are missing"), "{found}");
}

/// Segments of an older backup next to the mark of today are a loss. So is a store that continued from them.
#[test]
fn segments_of_another_time_are_refused_next_to_a_newer_mark() {
    let (disk, clock) = (SimDisk::default(), clock());
    let old = store_with(&disk, &clock, 0..3, true);
    let today = store_with(&disk, &clock, 3..6, true);
    let with = |image: &Image, mark: &Image| {
        let mut mixed = image.clone();
        mixed.insert(MARK, mark[&MARK].clone());
        mixed
    };
    assert!(damage(&with(&old, &today), &clock).unwrap().contains("batches are missing"));
    // A mark that is older than its segments says nothing against them.
    assert_eq!(damage(&with(&today, &old), &clock), None);
    // Both at once look like the store of that time.
    assert_eq!(damage(&old, &clock), None);
    let continued = store_with(&SimDisk::of(&old), &clock, 10..16, true);
    assert!(damage(&with(&continued, &today), &clock).unwrap().contains("different copies"));
    let other = store_with(&SimDisk::default(), &clock, 0..9, true);
    assert!(damage(&with(&today, &other), &clock).unwrap().contains("another store"));
    let options = || EmbeddedOptions::new("copy").with_clock(clock.clone());
    for mixed in [with(&old, &today), with(&continued, &today), with(&today, &other)] {
        let report =
            salvage_disk(&SimDisk::of(&mixed), Arc::new(SimDisk::default()), options(), SIZES).unwrap();
        assert!(report.lost.len() == 1, "{:?}", report.lost);
    }
}

/// The newest segment says which one is the oldest that counts. Those before it must not be taken for old ones of its store.
#[test]
fn segments_of_two_stores_are_refused() {
    let clock = clock();
    let one = store_with(&SimDisk::default(), &clock, 0..3, true);
    assert!(one.contains_key(&1));
    let disk = SimDisk::default();
    let store = open(&disk, clock.clone()).unwrap();
    // Each round writes the same records again, after they have expired.
    until("the first segment is deleted", || {
        (0..20).for_each(|n| complete_one(&store, n, 1000));
        clock.advance(DAY + DAY);
        block_on(store.purge(1000)).unwrap();
        segments(&disk.after_power_loss())[0] > 1
    });
    store.close();
    let other = disk.after_power_loss();
    for has_mark in [true, false] {
        let mut mixed = other.clone();
        mixed.insert(1, one[&1].clone());
        if !has_mark {
            mixed.remove(&MARK);
        }
        let found = damage(&mixed, &clock).expect("segments of another store are not removed");
        assert!(found.contains("another store"), "{found}");
    }
}

#[test]
fn a_mark_without_segments_is_a_loss_and_not_a_new_store() {
    let (image, clock, _) = varied_store();
    let only = |bytes: Vec<u8>| Image::from([(MARK, bytes)]);
    assert!(
        damage(&only(image[&MARK].clone()), &clock).unwrap().contains("all segments are missing: batch ")
    );
    assert!(damage(&only(vec![0; 8192]), &clock).unwrap().contains("all segments are missing"));
}

#[test]
fn without_a_mark_a_store_opens_with_a_warning_and_has_one_again() {
    let (disk, clock) = (SimDisk::default(), clock());
    let image = store_with(&disk, &clock, 0..3, true);
    assert_eq!(checked(&image).unproved_end, None);
    for bytes in [None, Some(vec![]), Some(vec![0; 8192]), Some(vec![7; 8192]), Some(vec![7; 100])] {
        let mut changed = image.clone();
        match &bytes {
            None => drop(changed.remove(&MARK)),
            Some(bytes) => drop(changed.insert(MARK, bytes.clone())),
        }
        let report = checked(&changed);
        assert!(report.is_sound());
        let reason = if bytes.is_none() { "disk/mark is missing" } else { "disk/mark cannot be read" };
        assert!(report.unproved_end.as_ref().is_some_and(|text| text.starts_with(reason)), "{report:?}");
        let disk = SimDisk::of(&changed);
        let store = open(&disk, clock.clone()).unwrap();
        assert!((0..3).all(|n| is_replayed(&store, n, 100)));
        assert_eq!(checked(&disk.after_power_loss()).unproved_end, None);
    }
    // A process that was killed before it could create the mark of a new store.
    let mut new = SimDisk::default();
    let store = open(&new, clock.clone()).unwrap();
    let mut first = new.after_power_loss();
    drop(store);
    first.remove(&MARK);
    first.get_mut(&1).unwrap()[BLOCK as usize..].fill(0);
    assert_eq!(checked(&first).unproved_end, None);
    new = SimDisk::of(&first);
    drop(open(&new, clock).unwrap());
}

/// A torn write damages one slot. The other one still counts.
#[test]
fn one_damaged_slot_is_a_warning_until_the_next_start() {
    let (disk, clock) = (SimDisk::default(), clock());
    store_with(&disk, &clock, 0..3, true);
    let image = store_with(&disk, &clock, 3..6, true);
    for slot in [0, BLOCK as usize] {
        let mut changed = image.clone();
        changed.get_mut(&MARK).unwrap()[slot + 9] ^= 1;
        let warning = checked(&changed).unproved_end.unwrap_or_default();
        assert!(warning.contains("one of the two slots"), "{warning}");
        assert_eq!(damage(&changed, &clock), None);
        let mended = SimDisk::of(&changed);
        open(&mended, clock.clone()).unwrap().close();
        assert_eq!(checked(&mended.after_power_loss()).unproved_end, None);
        let copy = EmbeddedOptions::new("copy").with_clock(clock.clone());
        let report = salvage_disk(&SimDisk::of(&changed), Arc::new(SimDisk::default()), copy, SIZES).unwrap();
        assert!(!report.is_complete(), "the end of the log may be missing");
        // And still notices that more than the last run is missing.
        let batches = batches(&image);
        let place = batches[3];
        changed.get_mut(&place.0).unwrap()[place.1..].fill(0);
        assert!(damage(&changed, &clock).is_some(), "slot {slot}");
    }
}

#[test]
fn a_mark_that_cannot_be_written_stops_nothing() {
    let (disk, clock) = (SimDisk::default(), clock());
    disk.fail_mark(Some(Operation::Create));
    let store = open(&disk, clock.clone()).unwrap();
    (0..40).for_each(|n| complete_one(&store, n, 3000));
    assert!((0..40).all(|n| is_replayed(&store, n, 3000)));
    assert!(block_on(store.check()).is_ok());
    store.close();
    let image = disk.after_power_loss();
    assert!(!image.contains_key(&MARK));
    assert_eq!(damage(&image, &clock), None);
    let store = open(&disk, clock.clone()).unwrap();
    disk.fail_mark(None);
    // The next one is written when the store is closed, at the latest.
    complete_one(&store, 50, 10);
    store.close();
    assert_eq!(checked(&disk.after_power_loss()).unproved_end, None);
}

#[test]
fn marks_are_written_in_turn_and_when_a_segment_is_full() {
    let disk = SimDisk::default();
    let mark = |sequence: u64| Mark {
        store: [7; 16],
        segment: sequence as u32 / 5,
        sequence,
        wall: Timestamp::from_millis(sequence),
        chain: sequence as u32,
    };
    let on_disk = || Marks::read(&SimDisk::of(&disk.after_power_loss())).unwrap();
    let mut marker = Marker::new(&on_disk());
    for sequence in 1..20 {
        assert_eq!(marker.is_due(&mark(sequence)), sequence == 1 || sequence % 5 == 0, "{sequence}");
        assert!(marker.write(&disk, mark(sequence)).is_none());
        let mut found: Vec<u64> = on_disk().iter().map(|mark| mark.sequence).collect();
        found.sort_unstable();
        assert_eq!(found, if sequence == 1 { vec![1] } else { vec![sequence - 1, sequence] });
        if sequence % 3 == 0 {
            // As a new process does it.
            marker = Marker::new(&on_disk());
        }
    }
    // What is written to a file whose flush failed may never reach the disk.
    disk.fail_mark(Some(Operation::Sync));
    assert!(marker.write(&disk, mark(30)).is_some_and(|failure| !failure.lasts()));
    assert!(!marker.is_due(&mark(31)), "not for each segment while it fails");
    disk.fail_mark(None);
    assert!(marker.write(&disk, mark(32)).is_none());
    assert_eq!(on_disk().newest(), Some(&mark(32)));
}

/// The number in the mark is never ahead of what is durable, also if flushes fail.
#[test]
fn a_mark_never_knows_more_than_is_durable() {
    for after in (0..40).step_by(3) {
        let (disk, clock) = (SimDisk::default(), clock());
        let store = open(&disk, clock.clone()).unwrap();
        disk.fail(Fault { on: Operation::Sync, after, times: 3, errno: 5 });
        let mut n = 0;
        until("some records are there", || {
            n += 1;
            let granted = block_on(store.apply(id(n), super::claim(n.into())));
            assert_eq!(damage(&disk.after_power_loss(), &clock), None, "{after}, record {n}");
            granted.is_ok() && n > 12
        });
        disk.fail(Fault { on: Operation::Sync, after: 0, times: u64::MAX, errno: 5 });
        assert!(block_on(store.apply(id(1000), super::claim(1))).is_err());
        store.close();
        assert_eq!(damage(&disk.after_power_loss(), &clock), None, "{after}, closed while writes fail");
    }
}
