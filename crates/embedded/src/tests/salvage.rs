//! Copies of damaged stores: what could execute again is unknown, refused, or in a part that the report calls lost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{
    Command, Complete, Completion, ID_SECRET_RECORD, Outcome, Record, RecordId, Release, Resolution, Resolve,
    State, Store as _, StoreErrorKind, StoredResponse, codec,
};
use oncegate_testkit::{ManualClock, block_on, record_id as id};

use super::damage::varied_store;
use super::sim::{Image, MARK, SimDisk, segments};
use super::{SIZES, complete_one, open};
use crate::format::{BLOCK, ENTRY, EntryHead, HEADER, Header, Kind};
use crate::salvage::{SalvageReport, salvage_disk};
use crate::tests::{DAY, claim, complete, response, token};
use crate::{EmbeddedOpenError, EmbeddedOptions, EmbeddedStore};

fn salvaged(
    image: &Image,
    clock: &Arc<ManualClock>,
) -> Result<(SalvageReport, EmbeddedStore), EmbeddedOpenError> {
    let copy = SimDisk::default();
    let options = EmbeddedOptions::new("copy").with_clock(clock.clone());
    let report = salvage_disk(&SimDisk::of(image), Arc::new(copy.clone()), options, SIZES)?;
    let store = open(&SimDisk::of(&copy.after_power_loss()), clock.clone()).unwrap();
    Ok((report, store))
}

/// Checks a copy against the records that the damaged store had. Returns how many are missing.
fn check(
    (report, store): &(SalvageReport, EmbeddedStore),
    records: &BTreeMap<RecordId, Record>,
    what: &str,
) -> usize {
    let mut missing = 0;
    for (id, record) in records {
        match block_on(store.lookup(*id)) {
            Ok(Some(found)) if report.lost.is_empty() => assert_eq!(&found, record, "{what}"),
            Ok(Some(found)) => {
                let is_newest = found.state == record.state && found.token == record.token;
                let is_unknown = found.state == State::Unknown
                    && (!report.unknown.contains(id) || found.token > record.token);
                assert!(is_newest || is_unknown, "{what}: {found:?} of {record:?}");
            }
            Ok(None) => {
                assert!(!report.lost.is_empty(), "{what}: {record:?}");
                missing += 1;
            }
            Err(error) => {
                assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{what}");
                // The identifier itself may be damaged.
                let is_near = |other: &RecordId| other.as_bytes()[..8] == id.as_bytes()[..8];
                assert!(report.unreadable.iter().any(is_near), "{what}");
            }
        }
    }
    missing
}

#[test]
fn a_copy_of_a_sound_store_is_the_same() {
    let (image, clock, records) = varied_store();
    let copy = salvaged(&image, &clock).unwrap();
    assert_eq!(check(&copy, &records, "unchanged"), 0);
    let (report, store) = copy;
    let expected = SalvageReport { records: 30, audit_entries: 5, ..SalvageReport::default() };
    assert_eq!(report, expected);
    assert_eq!(block_on(store.audit(None, 100)).unwrap().len(), 5);
    complete_one(&store, 1000, 10);
}

#[test]
fn the_time_of_a_copy_continues_that_of_the_store() {
    let (disk, clock) = (SimDisk::default(), Arc::new(ManualClock::at_millis(1_700_000_000_000)));
    let store = open(&disk, clock.clone()).unwrap();
    complete_one(&store, 1, 10);
    clock.set_millis(1_800_000_000_000);
    clock.advance(Duration::from_secs(2));
    complete_one(&store, 2, 10);
    block_on(store.accept_clock()).unwrap().expect("the clock is ahead");
    let records = BTreeMap::from([(id(2), block_on(store.lookup(id(2))).unwrap().unwrap())]);
    let now = store.now();
    drop(store);
    clock.set_millis(1_750_000_000_000);
    let copy = salvaged(&disk.after_kill(), &clock).unwrap();
    assert!(copy.1.now() >= now, "{:?}, {now:?}", copy.1.now());
    // Its times are those of the accepted clock.
    check(&copy, &records, "after a correction");
}

#[test]
fn a_changed_byte_makes_nothing_execute_again() {
    let (image, clock, records) = varied_store();
    let (mut lost, mut unknown, mut unreadable, mut missing) = (0, 0, 0, 0);
    for (number, bytes) in &image {
        for offset in (0..bytes.len()).filter(|offset| bytes[*offset] != 0).step_by(29) {
            let mut changed = image.clone();
            changed.get_mut(number).unwrap()[offset] ^= 0x11;
            let what = format!("byte {offset} of segment {number}");
            let copy = salvaged(&changed, &clock).unwrap();
            missing += check(&copy, &records, &what);
            lost += usize::from(!copy.0.lost.is_empty());
            unknown += copy.0.unknown.len();
            unreadable += copy.0.unreadable.len();
        }
    }
    assert!(
        lost > 50 && unknown > 50 && unreadable > 20,
        "{lost} lost, {unknown} unknown, {unreadable} unreadable"
    );
    // The entries of a damaged batch are found but for those whose place in it is not certain.
    assert!(missing * 5 < lost, "{missing} missing of {lost}");
}

#[test]
fn a_missing_segment_is_a_lost_part() {
    let (image, clock, records) = varied_store();
    let mut missing = 0;
    for number in image.keys() {
        let mut changed = image.clone();
        changed.remove(number);
        match salvaged(&changed, &clock) {
            Ok(copy) => missing += check(&copy, &records, &format!("without segment {number}")),
            Err(error) => panic!("{error}"),
        }
    }
    assert!(missing > 5, "{missing}");
    for newest in segments(&image).into_iter().skip(1) {
        let mut changed = image.clone();
        changed.retain(|number, _| *number < newest);
        let copy = salvaged(&changed, &clock).unwrap();
        check(&copy, &records, &format!("without all segments from {newest}"));
    }
}

#[test]
fn an_oldest_segment_without_batches_is_a_lost_part() {
    let (image, clock, records) = varied_store();
    let oldest = segments(&image)[0];
    for len in [0, image[&oldest].len()] {
        let mut changed = image.clone();
        changed.insert(oldest, vec![0; len]);
        let copy = salvaged(&changed, &clock).unwrap();
        assert!(!copy.0.lost.is_empty(), "{len} bytes of zeros");
        check(&copy, &records, "without the oldest segment");
    }
}

#[test]
fn segments_of_two_histories_are_a_loss() {
    let (image, clock, _) = varied_store();
    let history = |from: u64| {
        let disk = SimDisk::of(&image);
        let store = open(&disk, clock.clone()).unwrap();
        (from..from + 60).for_each(|n| complete_one(&store, n, 1000));
        store.close();
        disk.after_power_loss()
    };
    let (one, other) = (history(1000), history(2000));
    let headers = segments(&other).into_iter().flat_map(|number| {
        let bytes = &other[&number];
        (0..bytes.len()).step_by(BLOCK as usize).filter_map(|at| Header::decode(&bytes[at..]).ok())
    });
    let oldest = headers.max_by_key(|(header, _)| header.sequence).unwrap().0.oldest;
    let mut mixed_ones = 0;
    for number in segments(&other) {
        let mut mixed = other.clone();
        // Those that the other one has deleted do not count, even if they are still there.
        let older = one.iter().filter(|(old, _)| (oldest..number).contains(*old));
        mixed.extend(older.map(|(old, bytes)| (*old, bytes.clone())));
        let (report, _) = salvaged(&mixed, &clock).unwrap();
        assert_eq!(report.lost.is_empty(), mixed == other, "those before {number} are of the other one");
        mixed_ones += usize::from(mixed != other);
    }
    assert!(mixed_ones > 0);
}

#[test]
fn a_batch_of_zeros_is_a_lost_part() {
    let (image, clock, records) = varied_store();
    let begins =
        |bytes: &[u8]| (0..bytes.len()).step_by(4096).filter(|at| bytes[*at] != 0).collect::<Vec<_>>();
    let places: Vec<_> = image
        .iter()
        .filter(|(number, _)| **number != MARK)
        .flat_map(|(number, bytes)| begins(bytes).into_iter().map(move |at| (*number, at)))
        .collect();
    for (number, at) in &places {
        let mut changed = image.clone();
        changed.get_mut(number).unwrap()[*at..at + 4096].fill(0);
        let copy = salvaged(&changed, &clock).unwrap();
        assert!(!copy.0.lost.is_empty(), "{at} of {number}");
        check(&copy, &records, &format!("zeros at {at} of {number}"));
    }
}

/// A response is chosen by others, and may look like entries.
#[test]
fn bytes_of_a_response_are_never_an_entry() {
    let clock = Arc::new(ManualClock::at_millis(1_700_000_000_000));
    let store = open(&SimDisk::default(), clock.clone()).unwrap();
    complete_one(&store, 1, 10);
    let body = codec::encode(&id(2), &block_on(store.lookup(id(1))).unwrap().unwrap());
    let head = EntryHead { kind: Kind::Record, body_len: body.len() as u32, expires: u32::MAX, id: id(2) };
    let forged = [&head.encode()[..], &body].concat();
    // An image of a store with the forged entry after `pad` bytes of a response; the place of the batch and of the forged entry.
    let image = |pad: usize| {
        let disk = SimDisk::default();
        let store = open(&disk, clock.clone()).unwrap();
        let granted = token(&block_on(store.apply(id(3), claim(3))).unwrap());
        let bytes = [vec![0xff; pad], forged.clone(), vec![0xff; 3 * BLOCK as usize]].concat();
        let response = StoredResponse::new(200, &[] as &[(&str, &[u8])], &[bytes.into()], &[]).unwrap();
        let completion = Completion::Replayable(response);
        let complete = Command::Complete(Complete { token: granted, completion, retention: DAY });
        block_on(store.apply(id(3), complete)).unwrap();
        drop(store);
        let image = disk.after_kill();
        let place = |bytes: &Vec<u8>| bytes.windows(forged.len()).position(|window| window == forged);
        let found = image.iter().find_map(|(number, bytes)| Some((*number, place(bytes)?)));
        (image.clone(), found.unwrap())
    };
    let is_believed = |image: &Image| {
        let (_, store) = salvaged(image, &clock).unwrap();
        !matches!(block_on(store.lookup(id(2))), Ok(None))
    };
    // The forged entry is where an entry begins if the second block of the batch is taken for a first one.
    let block = BLOCK as usize;
    let (_, (_, at)) = image(0);
    let (image, (number, at)) = image((block + HEADER).checked_sub(at % block).unwrap());
    assert_eq!(at % block, HEADER);
    let batch = at - HEADER - block;
    let head = batch + HEADER;
    // A damaged length leads to it.
    let mut longer = image.clone();
    let len = (at - head - ENTRY) as u32;
    longer.get_mut(&number).unwrap()[head + 4..head + 8].copy_from_slice(&len.to_be_bytes());
    assert!(!is_believed(&longer));
    let mut empty = image;
    empty.get_mut(&number).unwrap()[batch..batch + block].fill(0);
    assert!(!is_believed(&empty));
}

/// A request is released, and executed again in a lost part.
#[test]
fn an_uncertain_record_stays_unknown_until_an_operator_resolves_it() {
    let (disk, clock) = (SimDisk::default(), Arc::new(ManualClock::at_millis(1_700_000_000_000)));
    let store = open(&disk, clock.clone()).unwrap();
    let granted = token(&block_on(store.apply(id(1), claim(1))).unwrap());
    let release = Release { token: granted, retention: Duration::from_secs(120) };
    block_on(store.apply(id(1), Command::Release(release))).unwrap();
    let before = disk.after_kill();
    clock.advance(Duration::from_secs(1));
    let second = token(&block_on(store.apply(id(1), claim(2))).unwrap());
    block_on(store.apply(id(1), complete(second, response(1, 10)))).unwrap();
    let after = disk.after_kill();
    complete_one(&store, 2, 10);
    drop(store);
    let mut image = disk.after_kill();
    for (number, bytes) in &mut image {
        let block = |of: &Image, at: usize| {
            of.get(number).and_then(|bytes| bytes.get(at..at + 4096)).map(<[u8]>::to_vec)
        };
        for at in (0..bytes.len()).step_by(4096).filter(|at| block(&before, *at) != block(&after, *at)) {
            bytes[at..at + 4096].fill(0x5a);
        }
    }
    let (report, store) = salvaged(&image, &clock).unwrap();
    assert_eq!(report.unknown, [id(1)]);
    clock.advance(DAY);
    assert_eq!(block_on(store.apply(id(1), claim(3))).unwrap(), Outcome::Unknown);
    let resolve = Resolve {
        resolution: Resolution::Release,
        retention: DAY,
        force: false,
        amend: false,
        actor: "ops".to_owned(),
        reason: "it did not happen".to_owned(),
    };
    block_on(store.apply(id(1), Command::Resolve(resolve))).unwrap();
    let third = token(&block_on(store.apply(id(1), claim(4))).unwrap());
    assert!(third > second, "{third:?} after the lost {second:?}");
    clock.advance(3 * DAY);
    block_on(store.purge(100)).unwrap();
    assert!(token(&block_on(store.apply(id(1), claim(5))).unwrap()) > third);
}

/// A damaged mark stops all keys of the copy, so the report says so. The mark of a copy with other losses stays what it is.
#[test]
fn a_damaged_mark_of_an_id_secret_is_reported_in_words() {
    let (disk, clock) = (SimDisk::default(), Arc::new(ManualClock::at_millis(1_700_000_000_000)));
    let store = open(&disk, clock.clone()).unwrap();
    block_on(store.apply(ID_SECRET_RECORD, claim(9))).unwrap();
    complete_one(&store, 1, 10);
    complete_one(&store, 2, 10);
    drop(store);
    let image = disk.after_kill();
    let damaged = |record: RecordId| {
        let mut image = image.clone();
        let bytes = image.values_mut().find_map(|bytes| {
            let at = bytes.windows(32).position(|window| window == record.as_bytes())?;
            Some(&mut bytes[at + 40])
        });
        *bytes.unwrap() ^= 1;
        salvaged(&image, &clock).unwrap()
    };
    let (report, _) = damaged(ID_SECRET_RECORD);
    assert_eq!((&*report.unreadable, report.has_mark), (&[ID_SECRET_RECORD][..], false));
    let advice = report.mark_advice().unwrap();
    assert!(advice.contains("mark of the id secret") && advice.contains("Restore a backup"), "{advice}");
    let (report, store) = damaged(id(2));
    assert!(!report.lost.is_empty() && report.has_mark && report.mark_advice().is_none(), "{report:?}");
    let mark = block_on(store.lookup(ID_SECRET_RECORD)).unwrap().unwrap();
    assert!(matches!(mark.state, State::InProgress { .. }) && report.unknown.is_empty(), "{mark:?}");

    let (disk, clock) = (SimDisk::default(), Arc::new(ManualClock::at_millis(1_700_000_000_000)));
    let store = open(&disk, clock.clone()).unwrap();
    complete_one(&store, 1, 10);
    complete_one(&store, 2, 10);
    drop(store);
    let (report, _) = salvaged(&disk.after_kill(), &clock).unwrap();
    assert!(report.mark_advice().is_none(), "nothing is lost: {report:?}");
    let mut image = disk.after_kill();
    let newest = image.values_mut().find_map(|bytes| {
        let at = bytes.windows(32).rposition(|window| window == id(2).as_bytes())?;
        Some(&mut bytes[at + 40])
    });
    *newest.unwrap() ^= 1;
    let (report, _) = salvaged(&image, &clock).unwrap();
    assert!(report.mark_advice().unwrap().contains("no mark of an id secret"), "{report:?}");
}

#[test]
fn a_copy_is_made_only_in_an_empty_directory_outside_of_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    let store = EmbeddedStore::open(&*from).unwrap();
    complete_one(&store, 1, 10);
    drop(store);
    std::fs::create_dir(&to).unwrap();
    std::fs::write(to.join("file"), "").unwrap();
    let options = EmbeddedOptions::new(&from);
    for to in [&to, &from, &from.join("copy")] {
        let error = crate::salvage(&options, to).unwrap_err();
        assert!(matches!(error, EmbeddedOpenError::Io { .. }), "{error}");
    }
    let missing = dir.path().join("missing");
    assert!(crate::salvage(&EmbeddedOptions::new(&missing), &dir.path().join("other")).is_err());
    assert!(!missing.exists(), "a mistyped name is not created");
    assert!(!from.join("copy").exists());
    std::fs::remove_file(to.join("file")).unwrap();
    // As after an attempt that did not end.
    std::fs::create_dir(to.join(".salvage")).unwrap();
    std::fs::write(to.join(".salvage/00000001.log"), "x").unwrap();
    let report = crate::salvage(&options, &to).unwrap();
    assert_eq!((report.records, report.lost), (1, vec![]));
    assert!(!to.join(".salvage").exists());
    assert!(to.join("mark").exists() && !to.join("salvaged").exists(), "nothing is lost");
    assert!(super::is_replayed(&EmbeddedStore::open(&*to).unwrap(), 1, 10));
}

/// The mark of an id secret is no record of a request: no report counts it, and no operator has to resolve it.
#[test]
fn the_mark_of_an_id_secret_is_copied_as_it_is_and_not_counted() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    let store = EmbeddedStore::open(&*from).unwrap();
    block_on(store.apply(ID_SECRET_RECORD, claim(9))).unwrap();
    complete_one(&store, 1, 10);
    let before = std::fs::read(from.join("00000001.log")).unwrap();
    complete_one(&store, 3, 10);
    let mark = block_on(store.lookup(ID_SECRET_RECORD)).unwrap();
    drop(store);
    std::fs::write(from.join("00000001.log"), before).unwrap();
    let report = crate::salvage(&EmbeddedOptions::new(&from), &to).unwrap();
    assert_eq!((report.records, report.unknown, report.lost.len()), (1, vec![], 1));
    let checked = crate::check(&EmbeddedOptions::new(&to)).unwrap();
    assert!(checked.has_mark);
    assert_eq!(checked.records.values().sum::<u64>(), 1, "{:?}", checked.records);
    std::fs::remove_file(to.join("salvaged")).unwrap();
    let store = EmbeddedStore::open(&*to).unwrap();
    assert_eq!(block_on(store.lookup(ID_SECRET_RECORD)).unwrap(), mark);
}

/// The copy of a store that lost its end is opened only when an operator has accepted the loss.
#[test]
fn a_copy_with_losses_waits_for_an_operator() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    let store = EmbeddedStore::open(&*from).unwrap();
    complete_one(&store, 1, 10);
    block_on(store.apply(id(2), claim(2))).unwrap();
    let before = std::fs::read(from.join("00000001.log")).unwrap();
    complete_one(&store, 3, 10);
    drop(store);
    std::fs::write(from.join("00000001.log"), before).unwrap();
    let options = EmbeddedOptions::new(&from);
    let report = crate::salvage(&options, &to).unwrap();
    assert_eq!((report.records, report.unknown, report.lost.len()), (2, vec![id(2)], 1));
    assert!(report.lost[0].starts_with("the end of the log: batches "), "{:?}", report.lost);
    for time in [&report.lost_time, &report.lost[0]] {
        assert!(time.contains("written between 20") || time.contains("written at 20"), "{time}");
    }
    let text = std::fs::read_to_string(to.join("salvaged")).unwrap();
    for said in [&report.lost[0], &report.lost_time, &id(2).to_string(), from.to_str().unwrap()] {
        assert!(text.contains(said), "{said}: {text}");
    }
    for _ in 0..2 {
        let error = EmbeddedStore::open(&*to).unwrap_err();
        assert!(matches!(error, EmbeddedOpenError::Salvaged { .. }), "{error}");
        assert!(error.to_string().contains(to.join("salvaged").to_str().unwrap()), "{error}");
    }
    let checked = crate::check(&EmbeddedOptions::new(&to)).unwrap();
    assert_eq!((checked.salvaged, checked.unproved_end), (Some(to.join("salvaged")), None));
    std::fs::remove_file(to.join("salvaged")).unwrap();
    let store = EmbeddedStore::open(&*to).unwrap();
    assert!(super::is_replayed(&store, 1, 10));
    assert_eq!(block_on(store.apply(id(2), claim(2))).unwrap(), Outcome::Unknown);
}
