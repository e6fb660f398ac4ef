//! Changed bytes: the store refuses to open, or nothing is affected. No acknowledged record is ever missing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::{
    Clock as _, Command, Complete, Completion, Record, RecordId, RecordStep, Release, Resolution, Resolve,
    Step, Store as _, StoreErrorKind,
};
use oncegate_testkit::{ManualClock, block_on, record_id as id};

use super::sim::{Crash, Fault, Image, MARK, Operation, SimDisk, segments};
use super::{SIZES, complete_one, is_replayed, open, open_with};
use crate::format::{BLOCK, HEADER, Header};
use crate::inner::Sizes;
use crate::recover::{Item, scan};
use crate::tests::{DAY, claim, response, token};
use crate::{EmbeddedOpenError, EmbeddedOptions, EmbeddedStore};

/// A store with records in every state, an audit trail and a corrected clock, in several segments; and its records.
pub(super) fn varied_store() -> (Image, Arc<ManualClock>, BTreeMap<RecordId, Record>) {
    let disk = SimDisk::default();
    let clock = Arc::new(ManualClock::at_millis(1_700_000_000_000));
    // Nothing is compacted, so that all versions are there.
    let sizes = Sizes { slack: u64::MAX / 4, ..SIZES };
    let options = EmbeddedOptions::new("disk").with_clock(clock.clone());
    let store = EmbeddedStore::open_disk(Arc::new(disk.clone()), options, sizes).unwrap();
    let apply = |n: u64, command: Command| block_on(store.apply(id(n), command)).unwrap();
    for n in 0..30 {
        clock.advance(Duration::from_millis(5));
        let token = token(&apply(n, claim(u128::from(n))));
        let step = Step::new("charge", vec![7; 50].into()).unwrap();
        match n % 6 {
            0 => {}
            1 => drop(apply(n, Command::Step(RecordStep { token, number: 0, step }))),
            2 => drop(apply(n, Command::Release(Release { token, retention: DAY }))),
            3 => {
                let completion = Completion::Unknown;
                apply(n, Command::Complete(Complete { token, completion, retention: DAY }));
            }
            4 => {
                let completion = Completion::Unknown;
                apply(n, Command::Complete(Complete { token, completion, retention: DAY }));
                apply(
                    n,
                    Command::Resolve(Resolve {
                        resolution: Resolution::Complete(Some(response(n, 30))),
                        retention: DAY,
                        force: true,
                        amend: false,
                        actor: "an operator".to_owned(),
                        reason: "a reason".to_owned(),
                    }),
                );
            }
            _ => {
                let completion = Completion::Replayable(response(n, 20 * n as usize));
                apply(n, Command::Complete(Complete { token, completion, retention: DAY }));
            }
        }
        if n == 15 {
            clock.advance(Duration::from_secs(1));
            clock.set_millis(clock.now().as_millis() + 600_000);
            assert!(block_on(store.accept_clock()).unwrap().is_some());
        }
    }
    let records = (0..30).map(|n| (id(n), block_on(store.lookup(id(n))).unwrap().unwrap())).collect();
    drop(store);
    (disk.after_kill(), clock, records)
}

/// Opens a changed store. Returns false if it is refused; otherwise each record is there, or is reported as unreadable.
fn is_sound(
    image: &Image,
    clock: &Arc<ManualClock>,
    records: &BTreeMap<RecordId, Record>,
    what: &str,
) -> bool {
    let store = match open(&SimDisk::of(image), clock.clone()) {
        Err(EmbeddedOpenError::Damaged { .. }) => return false,
        Err(error) => panic!("{what}: {error}"),
        Ok(store) => store,
    };
    for (id, record) in records {
        match block_on(store.lookup(*id)) {
            Ok(found) => assert_eq!(found.as_ref(), Some(record), "{what}"),
            Err(error) => assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{what}"),
        }
    }
    assert_eq!(block_on(store.audit(None, 100)).unwrap().len(), 5, "{what}");
    true
}

/// Each byte of the batches, or every nth of them, and a few of the zeros around them.
#[test]
fn every_changed_byte_is_refused_or_changes_nothing() {
    let stride = std::env::var("ONCEGATE_DAMAGE_STRIDE").map_or(5, |text| text.parse().expect("a number"));
    let (image, clock, records) = varied_store();
    assert!(image.len() > 2, "one segment only: {:?}", image.keys());
    assert!(is_sound(&image, &clock, &records, "unchanged"));
    let (mut refused, mut sound) = (0, 0);
    for (number, bytes) in &image {
        for (offset, byte) in bytes.iter().enumerate() {
            let is_used = *byte != 0 || offset % 4096 < 88;
            if offset % if is_used { stride } else { 997 } != 0 {
                continue;
            }
            let mut changed = image.clone();
            changed.get_mut(number).unwrap()[offset] ^= 0x11;
            let what = format!("byte {offset} of segment {number}");
            *if is_sound(&changed, &clock, &records, &what) { &mut sound } else { &mut refused } += 1;
        }
    }
    assert!(refused > 100 && sound > 10, "{refused} refused, {sound} sound");
}

/// True if this segment counts no more, or is only prepared for later.
fn is_unused(image: &Image, number: u32) -> bool {
    let mut oldest = 0;
    let scanned = scan(&SimDisk::of(image), &segments(image), &mut |item, _| {
        if let Item::Batch { header, .. } = item {
            oldest = header.oldest;
        }
        Ok(())
    });
    assert!(scanned.is_ok());
    number < oldest || image.get(&number).is_none_or(|bytes| bytes.iter().all(|byte| *byte == 0))
}

#[test]
fn a_missing_segment_is_refused() {
    let (image, clock, records) = varied_store();
    for number in image.keys().copied() {
        let mut changed = image.clone();
        changed.remove(&number);
        let sound = is_sound(&changed, &clock, &records, "a segment is missing");
        assert_eq!(sound, is_unused(&image, number), "{number}");
    }
}

#[test]
fn a_store_that_lost_its_newest_segments_is_refused() {
    let (image, clock, records) = varied_store();
    let used: Vec<u32> = image.keys().copied().filter(|number| !is_unused(&image, *number)).collect();
    for number in used.into_iter().skip(1) {
        let mut changed = image.clone();
        changed.retain(|other, _| *other < number);
        assert!(!is_sound(&changed, &clock, &records, "newest segments are missing"), "{number}");
        let report = crate::check::check_disk(&SimDisk::of(&changed), &mut |_, _| ()).unwrap();
        assert!(!report.is_sound(), "check, {number}");
    }
}

/// For example a segment of a backup between segments that were written later.
#[test]
fn parts_of_two_histories_of_one_store_are_refused() {
    let (image, clock, _) = varied_store();
    let continued = |n: u64| {
        let disk = SimDisk::of(&image);
        let store = open(&disk, clock.clone()).unwrap();
        (n..n + 4).for_each(|n| complete_one(&store, n, 100));
        disk.after_power_loss()
    };
    let (one, other) = (continued(100), continued(200));
    let mut mixed = 0;
    for (number, bytes) in &one {
        let Some(others) = other.get(number) else { continue };
        for at in (0..bytes.len().min(others.len())).step_by(4096) {
            let (ours, theirs) = (&bytes[at..at + 4096], &others[at..at + 4096]);
            // The same place in both, with another batch of the same number.
            if ours == theirs || ours[32..40] != theirs[32..40] || theirs.iter().all(|byte| *byte == 0) {
                continue;
            }
            let mut changed = one.clone();
            changed.get_mut(number).unwrap()[at..at + 4096].copy_from_slice(theirs);
            let opened = open(&SimDisk::of(&changed), clock.clone());
            let is_last = bytes.get(at + 4096).is_none_or(|byte| *byte == 0);
            assert!(matches!(opened, Err(EmbeddedOpenError::Damaged { .. })) || is_last, "{number}, {at}");
            mixed += 1;
        }
    }
    assert!(mixed > 3, "{mixed} places");
}

/// An idle store writes an empty batch after the last record. From then on, damage of that record is no torn write.
#[test]
fn the_last_record_of_an_idle_store_is_proved() {
    let disk = SimDisk::default();
    let clock = Arc::new(ManualClock::at_millis(1_700_000_000_000));
    let store = open(&disk, clock.clone()).unwrap();
    complete_one(&store, 1, 40);
    let deadline = Instant::now() + Duration::from_secs(20);
    let last_is_empty = |image: &Image| {
        let mut empty = false;
        let _ = scan(&SimDisk::of(image), &segments(image), &mut |item, _| {
            if let Item::Batch { header, .. } = item {
                empty = header.entries == 0;
            }
            Ok(())
        });
        empty
    };
    while !last_is_empty(&disk.after_power_loss()) {
        assert!(Instant::now() < deadline, "no empty batch follows");
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut image = disk.after_power_loss();
    let bytes = image.get_mut(&1).unwrap();
    let wanted = id(1);
    let at = bytes.windows(32).rposition(|window| window == wanted.as_bytes()).unwrap();
    bytes[at + 40] ^= 1;
    assert!(matches!(open(&SimDisk::of(&image), clock), Err(EmbeddedOpenError::Damaged { .. })));
}

#[test]
fn a_segment_that_is_cut_is_refused() {
    let (image, clock, records) = varied_store();
    let first = image.keys().copied().find(|number| !is_unused(&image, *number)).unwrap();
    for len in (0..image[&first].len()).step_by(512) {
        let mut changed = image.clone();
        changed.get_mut(&first).unwrap().truncate(len);
        assert!(!is_sound(&changed, &clock, &records, "cut") || len > 28 * 1024, "cut at {len}");
    }
}

#[test]
fn a_segment_of_another_store_is_refused() {
    let (image, clock, records) = varied_store();
    let (other, ..) = varied_store();
    for number in image.keys().copied().collect::<Vec<_>>() {
        // Zeros instead of the last segment look like a crash before its first batch.
        let Some(exchanged) = other.get(&number).filter(|bytes| bytes.iter().any(|byte| *byte != 0)) else {
            continue;
        };
        let mut changed = image.clone();
        changed.insert(number, exchanged.clone());
        let sound = is_sound(&changed, &clock, &records, "exchanged");
        assert!(!sound || is_unused(&image, number), "{number}");
    }
}

/// The disk changes bytes while the store is open: the record is refused, all others are served, and nothing ends.
#[test]
fn a_record_that_is_damaged_while_the_store_is_open_is_refused_alone() {
    let disk = SimDisk::default();
    let clock = Arc::new(ManualClock::at_millis(1_700_000_000_000));
    let options = EmbeddedOptions::new("disk").with_clock(clock);
    let store =
        EmbeddedStore::open_disk(Arc::new(disk.clone()), options, Sizes { memory: 48 * 1024, ..SIZES })
            .unwrap();
    (0..5).for_each(|n| complete_one(&store, n, 40));
    let image = disk.after_kill();
    let wanted = id(3);
    let places = image.iter().flat_map(|(number, bytes)| {
        let found = bytes.windows(32).enumerate().filter(|(_, window)| *window == wanted.as_bytes());
        found.map(|(at, _)| (*number, at))
    });
    let (segment, at) = places.last().unwrap();
    for changed in [at + 31, at + 40] {
        disk.flip(segment, changed);
        for error in [
            block_on(store.lookup(id(3))).map(drop).unwrap_err(),
            block_on(store.apply(id(3), claim(9))).map(drop).unwrap_err(),
        ] {
            assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{error}");
        }
        for n in [0, 1, 2, 4] {
            assert!(is_replayed(&store, n, 40), "{n}");
        }
        assert!(store.advisories().iter().any(|advisory| advisory.name == "damage"));
        disk.flip(segment, changed);
        assert!(is_replayed(&store, 3, 40));
    }
}

#[test]
fn records_with_the_same_first_bytes_are_told_apart() {
    let disk = SimDisk::default();
    let clock = Arc::new(ManualClock::at_millis(1_700_000_000_000));
    let alike = |n: u8| {
        let mut bytes = [7; 32];
        bytes[31] = n;
        RecordId::from_bytes(bytes)
    };
    let reopened = || {
        let options = EmbeddedOptions::new("disk").with_clock(clock.clone());
        EmbeddedStore::open_disk(Arc::new(disk.clone()), options, Sizes { memory: 48 * 1024, ..SIZES })
            .unwrap()
    };
    let store = reopened();
    for n in 0..4 {
        let token = token(&block_on(store.apply(alike(n), claim(u128::from(n)))).unwrap());
        let completion = Completion::Replayable(response(n.into(), 10));
        block_on(store.apply(alike(n), Command::Complete(Complete { token, completion, retention: DAY })))
            .unwrap();
    }
    drop(store);
    let store = reopened();
    for n in 0..4 {
        let replayed = block_on(store.apply(alike(n), claim(9))).unwrap();
        assert_eq!(replayed, oncegate_core::Outcome::Replay(response(n.into(), 10)), "{n}");
    }
    assert_eq!(block_on(store.lookup(alike(9))).unwrap(), None);
    let listed = block_on(store.list(oncegate_core::ListQuery::default())).unwrap();
    assert_eq!(listed.records.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [0, 1, 2, 3].map(alike));
}

/// A newer program may add kinds of entries. This one cannot know what they mean.
#[test]
fn a_newer_format_is_refused() {
    let (image, clock, _) = varied_store();
    let mut changed = image.clone();
    let first = changed.get_mut(&segments(&image)[0]).unwrap();
    first[3] = b'2';
    let sum = crc32c::crc32c(&first[..84]).to_be_bytes();
    first[84..88].copy_from_slice(&sum);
    let options = EmbeddedOptions::new("disk").with_clock(clock);
    let error = open_with(&SimDisk::of(&changed), options).unwrap_err();
    assert!(matches!(error, EmbeddedOpenError::NewerFormat { .. }), "{error}");
}

/// A torn batch, whose header says that a segment counts no more, and another crash while the store is opened after it.
#[test]
fn a_segment_that_only_a_torn_batch_calls_dead_is_kept() {
    let (disk, clock) = (SimDisk::default(), Arc::new(ManualClock::at_millis(1_700_000_000_000)));
    let store = open(&disk, clock.clone()).unwrap();
    (0..40).for_each(|n| complete_one(&store, n, 3000));
    drop(store);
    clock.advance(2 * DAY);
    let mut image = disk.after_kill();
    let oldest = segments(&image)[0];
    let (mut last, mut number) = (None, 0);
    let _scanned = scan(&SimDisk::of(&image), &segments(&image), &mut |item, segment| {
        if let Item::Batch { header, offset } = item {
            (last, number) = (Some((*header, offset)), segment.number);
        }
        Ok(())
    });
    let (header, offset) = last.unwrap();
    let (_, previous) = header.encode();
    let sequence = header.sequence + 1;
    let torn = Header {
        sequence,
        previous,
        oldest: oldest + 1,
        payload_len: 5000,
        payload_sum: 7,
        flags: 0,
        ..header
    };
    let at = (offset + header.batch_len()) as usize;
    image.get_mut(&number).unwrap()[at..at + HEADER].copy_from_slice(&torn.encode().0);
    for at in 1.. {
        let disk = SimDisk::of(&image);
        disk.crash_at(Crash { at, images: 6, seed: at });
        drop(open(&disk, clock.clone()));
        let Some(images) = disk.after_crash().filter(|_| at < 14) else { break };
        for image in images {
            let opened = open(&SimDisk::of(&image), clock.clone());
            assert!(opened.is_ok(), "operation {at} of the start: {}", opened.err().unwrap());
        }
    }
}

/// For example a copy to a full disk.
#[test]
fn a_segment_that_was_cut_off_is_refused() {
    let (image, clock, _) = varied_store();
    for (number, bytes) in image.iter().filter(|(number, _)| **number != MARK) {
        for len in [0, 1, BLOCK as usize, bytes.len() / 2, bytes.len() - 1] {
            let mut changed = image.clone();
            changed.get_mut(number).unwrap().truncate(len);
            // One without a batch is only prepared, and needs no more than a block.
            if bytes.iter().all(|byte| *byte == 0) && len >= BLOCK as usize {
                continue;
            }
            let opened = open(&SimDisk::of(&changed), clock.clone());
            assert!(matches!(opened, Err(EmbeddedOpenError::Damaged { .. })), "{len} bytes of {number}");
            let report = crate::check::check_disk(&SimDisk::of(&changed), &mut |_, _| ()).unwrap();
            assert!(!report.is_sound(), "{len} bytes of {number}");
        }
    }
}

/// After a failed flush, the batch is in the next segment once more. If its second copy is damaged, a batch follows that is not.
#[test]
fn damage_after_a_failed_flush_is_no_torn_write() {
    let (disk, clock) = (SimDisk::default(), Arc::new(ManualClock::at_millis(1_700_000_000_000)));
    let store = open(&disk, clock.clone()).unwrap();
    complete_one(&store, 1, 10);
    disk.fail(Fault { on: Operation::Sync, after: 0, times: 1, errno: 5 });
    complete_one(&store, 2, 10);
    let mut image = disk.after_kill();
    let second = image.get_mut(&2).unwrap();
    assert_ne!(second[4096], 0, "the flush did not fail");
    second[50] ^= 0xff;
    match open(&SimDisk::of(&image), clock) {
        Ok(store) => assert!(is_replayed(&store, 2, 10)),
        Err(error) => assert!(matches!(error, EmbeddedOpenError::Damaged { .. })),
    }
}
