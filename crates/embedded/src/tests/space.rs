//! Purges, deletion and compaction of segments, and the limits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::{
    Command, Complete, Completion, Extent, Forget, Outcome, Renew, Rewrite, Store as _, StoredResponse,
};
use oncegate_testkit::{ManualClock, block_on, record_id as id};

use super::sim::{Fault, Operation, SimDisk};
use super::{SIZES, complete_one, is_replayed, open, until};
use crate::format::Header;
use crate::inner::Sizes;
use crate::segments::{Spare, SpareSlot};
use crate::tests::{DAY, claim, response, token};
use crate::{EmbeddedOptions, EmbeddedStore};

fn started() -> (SimDisk, Arc<ManualClock>, EmbeddedStore) {
    let (disk, clock) = (SimDisk::default(), Arc::new(ManualClock::at_millis(1_700_000_000_000)));
    let store = open(&disk, clock.clone()).unwrap();
    (disk, clock, store)
}

/// Twice the live bytes, and the segments that are being filled, prepared, compacted and deleted.
fn bound(live: u64) -> u64 {
    2 * live + 4 * SIZES.max_segment
}

#[test]
fn space_is_bounded_by_what_is_alive_whatever_was_written() {
    let (disk, clock, store) = started();
    (0..40).for_each(|n| complete_one(&store, n, 1000));
    let owner = token(&block_on(store.apply(id(99), claim(99))).unwrap());
    // Each renewal writes a block, and makes the one before it useless.
    for _ in 0..400 {
        let renew = Renew { token: owner, lease: Duration::from_secs(30), retention: DAY };
        block_on(store.apply(id(99), Command::Renew(renew))).unwrap();
    }
    until("old segments are freed", || disk.bytes() <= bound(40 * 1300));
    assert!((0..40).all(|n| is_replayed(&store, n, 1000)));
    let (killed, _) = (SimDisk::of(&disk.after_power_loss()), drop(store));
    let store = open(&killed, clock).unwrap();
    assert!((0..40).all(|n| is_replayed(&store, n, 1000)), "copied, and found after a restart");
}

/// A start counts what is alive, and what newer versions have replaced, as the store did that wrote them.
#[test]
fn space_is_bounded_after_a_start_as_well() {
    let (disk, clock) = (SimDisk::default(), Arc::new(ManualClock::at_millis(1_700_000_000_000)));
    let options = EmbeddedOptions::new("disk").with_clock(clock.clone());
    // Nothing is compacted, and the oldest segment has live records.
    let sizes = Sizes { slack: u64::MAX / 4, ..SIZES };
    let store = EmbeddedStore::open_disk(Arc::new(disk.clone()), options, sizes).unwrap();
    (0..40).for_each(|n| complete_one(&store, n, 1000));
    let owner = token(&block_on(store.apply(id(99), claim(99))).unwrap());
    for _ in 0..400 {
        let renew = Renew { token: owner, lease: Duration::from_secs(30), retention: DAY };
        block_on(store.apply(id(99), Command::Renew(renew))).unwrap();
    }
    drop(store);
    assert!(disk.bytes() > 400 * 4096);
    let store = open(&disk, clock.clone()).unwrap();
    until("old segments are freed", || disk.bytes() <= bound(40 * 1300));
    assert!((0..40).all(|n| is_replayed(&store, n, 1000)));
    drop(store);
    let store = open(&disk, clock).unwrap();
    assert!((0..40).all(|n| is_replayed(&store, n, 1000)));
}

#[test]
fn segments_of_expired_records_are_deleted_whole() {
    let (disk, clock, store) = started();
    (0..100).for_each(|n| complete_one(&store, n, 1000));
    assert!(disk.bytes() > 4 * SIZES.max_segment);
    clock.advance(2 * DAY);
    complete_one(&store, 1000, 10);
    let mut purged = 0;
    until("all are purged", || {
        purged += block_on(store.purge(30)).unwrap();
        purged == 100
    });
    until("their segments are deleted", || disk.bytes() <= bound(0));
    assert!(is_replayed(&store, 1000, 10));
    drop(store);
    let store = open(&disk, clock).unwrap();
    assert!(is_replayed(&store, 1000, 10));
    assert_eq!(block_on(store.lookup(id(5))).unwrap(), None);
}

/// A reader that finds a segment deleted looks for its entries where they are now.
#[test]
fn listings_and_lookups_are_complete_while_segments_are_compacted() {
    use oncegate_core::ListQuery;
    let (_disk, _clock, store) = started();
    (0..30).for_each(|n| complete_one(&store, n, 600));
    let owner = token(&block_on(store.apply(id(99), claim(99))).unwrap());
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..1500 {
                let renew = Renew { token: owner, lease: Duration::from_secs(30), retention: DAY };
                block_on(store.apply(id(99), Command::Renew(renew))).unwrap();
            }
            done.store(true, std::sync::atomic::Ordering::SeqCst);
        });
        while !done.load(std::sync::atomic::Ordering::SeqCst) {
            let listed = block_on(store.list(ListQuery::default())).unwrap();
            assert_eq!((listed.records.len(), listed.unreadable.len()), (31, 0));
            assert!((0..30).all(|n| block_on(store.lookup(id(n))).unwrap().is_some()));
        }
    });
}

/// Records that were released, taken again and amended must not come back in an older version.
#[test]
fn no_older_version_comes_back_when_a_newer_one_was_removed() {
    use oncegate_core::{Outcome, Release};
    let (disk, clock, store) = started();
    let first = token(&block_on(store.apply(id(1), claim(1))).unwrap());
    let release = Release { token: first, retention: Duration::from_secs(1) };
    block_on(store.apply(id(1), Command::Release(release))).unwrap();
    clock.advance(Duration::from_secs(5));
    assert_eq!(block_on(store.purge(10)).unwrap(), 1);
    (10..60).for_each(|n| complete_one(&store, n, 3000));
    drop(store);
    let store = open(&disk, clock.clone()).unwrap();
    assert_eq!(block_on(store.lookup(id(1))).unwrap(), None);
    assert!(matches!(block_on(store.apply(id(1), claim(2))).unwrap(), Outcome::Execute(_)));
}

#[test]
fn the_audit_trail_survives_compaction() {
    use oncegate_core::{Resolution, Resolve};
    let (disk, clock, store) = started();
    for n in 0..5 {
        block_on(store.apply(id(n), claim(1))).unwrap();
        let resolution = Resolution::Release;
        let (actor, reason) = ("somebody".to_owned(), format!("reason {n}"));
        let resolve = Resolve { resolution, retention: DAY, force: true, amend: false, actor, reason };
        block_on(store.apply(id(n), Command::Resolve(resolve))).unwrap();
    }
    let owner = token(&block_on(store.apply(id(99), claim(99))).unwrap());
    for _ in 0..400 {
        let renew = Renew { token: owner, lease: Duration::from_secs(30), retention: DAY };
        block_on(store.apply(id(99), Command::Renew(renew))).unwrap();
    }
    until("old segments are freed", || disk.bytes() <= bound(0));
    let reasons = |store: &EmbeddedStore| -> Vec<String> {
        block_on(store.audit(None, 10)).unwrap().into_iter().map(|entry| entry.reason).collect()
    };
    let expected = [4, 3, 2, 1, 0].map(|n| format!("reason {n}"));
    assert_eq!(reasons(&store), expected);
    drop(store);
    let store = open(&disk, clock).unwrap();
    assert_eq!(reasons(&store), expected);
}

/// Without a compaction, a store with little traffic keeps the older versions of its records for as long as the records.
#[test]
fn a_compaction_leaves_no_older_version_of_any_record() {
    let (disk, clock, store) = started();
    let holds = |part: &[u8]| {
        disk.after_kill().values().any(|file| file.windows(part.len()).any(|window| window == part))
    };
    (0..6).for_each(|n| complete_one(&store, n, 1000));
    for n in 0..6 {
        let record = block_on(store.lookup(id(n))).unwrap().unwrap();
        let mut rewrite = Rewrite::of(&record);
        let new = StoredResponse::new(200, &[], &[vec![0xab; 1000].into()], &[]).unwrap();
        rewrite.response.as_mut().unwrap().to = new;
        assert_eq!(block_on(store.apply(id(n), Command::Rewrite(rewrite))).unwrap(), Outcome::Rewritten);
    }
    let forget = Forget { actor: "ann".to_owned(), reason: "asked for".to_owned() };
    block_on(store.apply(id(0), Command::Forget(forget))).unwrap();
    let (old, new) = ([1, 2, 5].map(|n| response(n, 80)), [0xab; 80]);
    // The old versions may be gone already: the log is compacted in the background, too.
    assert!(holds(&new));
    let below = block_on(store.begin_compaction()).unwrap();
    // Another one while it runs would begin a segment, which takes its whole size on the disk.
    let begins = |below: u32| match block_on(store.begin_compaction()) {
        Err(error) => error.to_string().contains("a compaction runs already"),
        // It was that fast.
        Ok(another) => another > below,
    };
    assert!(begins(below));
    until("the old segments are gone", || store.running_compaction().unwrap().is_none());
    assert!(store.is_compacted(below).unwrap());
    assert!(!old.iter().any(|old| holds(old.as_body())), "the old versions are gone from every file");
    assert!(holds(&new));
    let replayed = block_on(store.apply(id(1), claim(9))).unwrap();
    assert!(matches!(replayed, Outcome::Replay(response) if response.as_body() == [0xab; 1000]));
    assert_eq!(block_on(store.audit(None, 10)).unwrap().len(), 1);
    // It ends under load, and can be begun again.
    let again = block_on(store.begin_compaction()).unwrap();
    assert!(again > below);
    until("it ends under load", || {
        complete_one(&store, 100, 3000);
        clock.advance(2 * DAY);
        store.is_compacted(again).unwrap()
    });
    drop(store);
    let store = open(&disk, clock).unwrap();
    assert_eq!(block_on(store.audit(None, 10)).unwrap().len(), 1);
}

#[test]
fn limits_refuse_new_keys_and_no_others() {
    let clock = Arc::new(ManualClock::at_millis(1_700_000_000_000));
    for limit in ["records", "bytes", "memory"] {
        let by_records = limit != "bytes";
        let options = EmbeddedOptions::new("disk").with_clock(clock.clone());
        let options = match limit {
            "records" => options.with_max_records(3),
            "bytes" => options.with_max_record_bytes(5000),
            _ => options,
        };
        let sizes = if limit == "memory" { Sizes { memory: 165, ..SIZES } } else { SIZES };
        let store = EmbeddedStore::open_disk(Arc::new(SimDisk::default()), options, sizes).unwrap();
        let len = if by_records { 10 } else { 1800 };
        (0..3).for_each(|n| complete_one(&store, n, len));
        let error = block_on(store.apply(id(7), claim(7))).unwrap_err();
        assert!(error.is_unsent() && error.extent() == Extent::Writes, "{error}");
        let advice = if limit == "memory" { "raise store-memory" } else { "raise the limit" };
        assert!(error.to_string().contains(advice), "{error}");
        assert!((0..3).all(|n| is_replayed(&store, n, len)));
        clock.advance(2 * DAY);
        assert_eq!(block_on(store.purge(10)).unwrap(), 3);
        complete_one(&store, 8, len);
    }
}

/// The segments of the disk, and the oldest that counts.
fn segments(disk: &SimDisk) -> (Vec<u32>, u32) {
    let image = disk.after_kill();
    let headers = image
        .values()
        .flat_map(|bytes| (0..bytes.len()).step_by(4096).filter_map(|at| Header::decode(&bytes[at..]).ok()));
    let newest = headers.map(|(header, _)| header).max_by_key(|header| header.sequence).unwrap();
    (super::sim::segments(&image), newest.oldest)
}

/// Zeros are written ahead in pieces, with pauses unless the log fills up or waits for them.
#[test]
fn a_segment_that_is_prepared_ahead_lets_batches_pass() {
    let spare = SpareSlot::new(Spare::Wanted(2));
    let minute = Duration::from_secs(60);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| spare.take());
        spare.pause(minute);
        spare.set(Spare::Failed(2));
        assert!(writer.join().unwrap().is_none());
    });
    spare.close();
    spare.pause(minute);
    let spare = SpareSlot::new(Spare::Wanted(2));
    spare.pause(Duration::from_millis(30));
    assert!(begun.elapsed() >= Duration::from_millis(30), "it is paused while it is not awaited");
    assert!(begun.elapsed() < minute, "it goes on at once when the writer waits or the store is closed");
}

#[test]
fn a_segment_that_could_not_be_removed_is_removed_later() {
    let (disk, clock, store) = started();
    (0..30).for_each(|n| complete_one(&store, n, 3000));
    clock.advance(2 * DAY);
    let (there, oldest) = segments(&disk);
    disk.fail(Fault { on: Operation::Create, after: 0, times: u64::MAX, errno: 5 });
    block_on(store.purge(1000)).unwrap();
    until("a segment counts no more", || segments(&disk).1 > oldest);
    // The next segment may have been prepared meanwhile.
    let still_there = segments(&disk).0;
    assert!(there.iter().all(|number| still_there.contains(number)), "{there:?}, and then {still_there:?}");
    disk.heal();
    until("it is removed", || segments(&disk).0.iter().all(|number| *number >= segments(&disk).1));
}

/// A record of long retention is in the oldest segment.
#[test]
fn dead_segments_are_freed_when_the_disk_is_nearly_full() {
    let (disk, clock) = (SimDisk::default(), Arc::new(ManualClock::at_millis(1_700_000_000_000)));
    let sizes = Sizes { first_segment: 64 * 1024, ..Sizes::with_memory(8 * 1024 * 1024) };
    let options = EmbeddedOptions::new("x").with_clock(clock.clone());
    let store = EmbeddedStore::open_disk(Arc::new(disk.clone()), options, sizes).unwrap();
    let granted = token(&block_on(store.apply(id(1), claim(1))).unwrap());
    let completion = Completion::Replayable(response(1, 10));
    let complete = Complete { token: granted, completion, retention: 30 * DAY };
    block_on(store.apply(id(1), Command::Complete(complete))).unwrap();
    (2..300).for_each(|n| complete_one(&store, n, 60_000));
    clock.advance(2 * DAY);
    assert!(segments(&disk).0.len() > 3);
    assert_eq!(block_on(store.purge(10_000)).unwrap(), 298);
    disk.set_low(true);
    until("only the segment that is being filled and the next one are left", || segments(&disk).0.len() == 2);
}
