//! Bytes of the file change under the store. Unreadable data is an error. No record whose completion was acknowledged is
//! executed again, as long as the damage can be detected.

use std::sync::Arc;

use oncegate_core::{Outcome, Store as _, StoreErrorKind};
use oncegate_testkit::{ManualClock, block_on};

use super::disk::Disk;
use super::{Random, claim, complete, id, open, open_with, response, token};
use crate::{EmbeddedOpenError, EmbeddedOptions, EmbeddedStore};

const RECORDS: u64 = 150;

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::at_millis(1_700_000_000_000))
}

/// Two disks with completed records: one stopped cleanly, one killed.
fn completed_records() -> (Disk, Disk) {
    let disk = Disk::with_new_store();
    let store = open(&disk, clock()).unwrap();
    for n in 0..RECORDS {
        let token = token(&block_on(store.apply(id(n), claim(u128::from(n)))).unwrap());
        block_on(store.apply(id(n), complete(token, response(n, 700)))).unwrap();
    }
    let killed = disk.after_kill();
    drop(store);
    (disk, killed)
}

#[derive(Debug, Default)]
struct ClaimCounts {
    refused_to_open: usize,
    opened: usize,
    replays: usize,
    errors: usize,
    executions: usize,
}

impl ClaimCounts {
    fn open_and_claim_all(&mut self, disk: &Disk, options: EmbeddedOptions) {
        match open_with(disk, options.with_clock(clock())) {
            Ok(store) => {
                self.opened += 1;
                self.claim_all(&store);
            }
            Err(EmbeddedOpenError::Damaged { .. }) => self.refused_to_open += 1,
            Err(other) => panic!("refused as {other}"),
        }
    }

    fn claim_all(&mut self, store: &EmbeddedStore) {
        for n in 0..RECORDS {
            match block_on(store.apply(id(n), claim(1 << 64))) {
                Ok(Outcome::Replay(found)) => {
                    assert_eq!(found, response(n, 700), "record {n} changed and was replayed");
                    self.replays += 1;
                }
                Ok(Outcome::Execute(_)) => self.executions += 1,
                Ok(other) => panic!("record {n} answers {other:?}"),
                Err(error) => {
                    let kind = error.kind();
                    assert!(matches!(kind, StoreErrorKind::Corrupt | StoreErrorKind::Unavailable), "{error}");
                    self.errors += 1;
                }
            }
        }
    }
}

fn options() -> EmbeddedOptions {
    EmbeddedOptions::new("not a directory")
}

/// Copies a disk and flips one bit.
fn flipped(disk: &Disk, at: usize, bit: usize) -> Disk {
    let mut bytes = disk.lock().live.clone();
    bytes[at] ^= 1 << bit;
    Disk::of(bytes)
}

/// Offsets all over the file: every byte of the header, and about one in each half of a used page.
fn offsets(disk: &Disk) -> Vec<usize> {
    let bytes = &disk.lock().live;
    let mut random = Random(11);
    let used = bytes.iter().rposition(|byte| *byte != 0).unwrap() + 1;
    (0..320).chain((320..used).step_by(2048).map(|at| (at + random.below(2048)).min(used - 1))).collect()
}

#[test]
fn a_flipped_bit_anywhere_never_leads_to_an_execution() {
    let (stopped, killed) = completed_records();
    for (name, disk) in [("stopped", stopped), ("killed", killed)] {
        let mut found = ClaimCounts::default();
        for at in offsets(&disk) {
            found.open_and_claim_all(&flipped(&disk, at, at % 8), options());
        }
        assert_eq!(found.executions, 0, "{name}: {found:?}");
        assert!(
            found.refused_to_open > 50 && found.opened > 50,
            "{name}: offsets in used and in free pages: {found:?}"
        );
    }
}

/// The documented behaviour of a file that is too large to be verified each time it is opened.
#[test]
fn a_flipped_bit_in_a_record_is_an_error_even_if_the_file_was_not_verified() {
    let (stopped, _) = completed_records();
    let places: Vec<usize> = {
        let bytes = stopped.lock().live.clone();
        let needle: Vec<u8> = 7_u64.to_be_bytes().repeat(20);
        bytes.windows(needle.len()).enumerate().filter(|(_, w)| *w == needle).map(|(at, _)| at).collect()
    };
    assert!(!places.is_empty(), "the body of record 7 is in the file");
    let mut errors = 0;
    for at in places {
        let store =
            open_with(&flipped(&stopped, at, 3), options().with_verify_bytes(0).with_clock(clock())).unwrap();
        match block_on(store.apply(id(7), claim(1 << 64))) {
            // The bit was in an older copy of the page, which is no longer in use.
            Ok(Outcome::Replay(found)) => assert_eq!(found, response(7, 700)),
            Ok(other) => panic!("{other:?}"),
            Err(error) => {
                assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{error}");
                errors += 1;
                let page = block_on(store.list(Default::default())).unwrap();
                assert!(page.unreadable.contains(&id(7)) || page.next.is_some());
                // Other records are answered, but a record that is not found may be hidden.
                let outcome = block_on(store.apply(id(8), claim(1 << 64))).unwrap();
                assert_eq!(outcome, Outcome::Replay(response(8, 700)));
                let refused = block_on(store.apply(id(RECORDS), claim(1))).unwrap_err();
                assert_eq!(refused.kind(), StoreErrorKind::Corrupt, "{refused}");
                assert!(store.advisories().iter().any(|advisory| advisory.name == "damage"));
            }
        }
    }
    assert!(errors > 0);
}

/// Without verification, and in a file that changes while it is open, a damaged page above the records may hide some of
/// them. That is the worst case: no panic, no wrong reply, and the writer keeps running.
#[test]
fn a_flipped_bit_in_a_running_store_gives_right_replies_or_errors_and_at_worst_hides_a_record() {
    let (stopped, _) = completed_records();
    let mut unverified = ClaimCounts::default();
    let mut live = ClaimCounts::default();
    for at in offsets(&stopped) {
        unverified.open_and_claim_all(&flipped(&stopped, at, at % 8), options().with_verify_bytes(0));
        let disk = stopped.after_kill();
        // Without a cache, each read goes to the disk.
        let store = open_with(&disk, options().with_cache_bytes(0).with_clock(clock())).unwrap();
        disk.lock().live[at] ^= 1 << (at % 8);
        live.claim_all(&store);
    }
    for found in [unverified, live] {
        assert!(found.errors > 0 && found.replays > 0, "{found:?}");
        assert!(found.executions * 100 < found.replays, "hidden records are rare: {found:?}");
    }
}

#[test]
fn a_truncated_file_is_refused() {
    let (stopped, killed) = completed_records();
    for disk in [stopped, killed] {
        let bytes = disk.lock().live.clone();
        for len in [0, 1, 100, 319, 320, 4096, bytes.len() / 2, bytes.len() - 1] {
            let mut found = ClaimCounts::default();
            found.open_and_claim_all(&Disk::of(bytes[..len].to_vec()), options());
            assert_eq!(found.refused_to_open, 1, "cut at {len}: {found:?}");
        }
    }
}

#[test]
fn a_file_that_is_not_a_store_is_refused_and_left_unchanged() {
    for bytes in [b"#!/bin/sh\n".repeat(1000), vec![0; 1 << 16], vec![0xff; 1 << 16]] {
        let disk = Disk::of(bytes.clone());
        let error = open(&disk, clock()).unwrap_err();
        assert!(matches!(error, EmbeddedOpenError::Damaged { .. }), "{error}");
        assert!(error.to_string().contains("oncegate check"), "{error}");
        assert_eq!(disk.lock().live, bytes, "the file was changed");
    }
}

/// A record with a wrong checksum, in one transaction with readable ones.
#[test]
fn an_unreadable_record_fails_only_its_own_command_and_is_never_purged() {
    let (disk, clock) = (Disk::with_new_store(), clock());
    let store = open(&disk, clock.clone()).unwrap();
    for n in 0..3 {
        block_on(store.apply(id(n), claim(1))).unwrap();
    }
    let record = block_on(store.lookup(id(1))).unwrap().unwrap();
    drop(store);
    let of_another = crate::schema::encode(&id(2), (0, 0), &record);
    let database = redb::Builder::new().create_with_backend(disk.backend()).unwrap();
    crate::database::write(&database, |txn| {
        txn.open_table(crate::schema::RECORDS)?.insert(id(1).as_bytes(), of_another.as_slice())?;
        Ok(())
    })
    .unwrap();
    drop(database);

    let store = open(&disk, clock.clone()).unwrap();
    std::thread::scope(|scope| {
        let apply = |n| block_on(store.apply(id(n), complete(record.token, response(n, 10))));
        let replies: Vec<_> = (0..3).map(|n| scope.spawn(move || apply(n))).collect();
        let replies: Vec<_> = replies.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert_eq!(replies[1].as_ref().unwrap_err().kind(), StoreErrorKind::Corrupt);
        assert!(replies[0].is_ok() && replies[2].is_ok(), "{replies:?}");
    });
    assert_eq!(block_on(store.apply(id(1), claim(2))).unwrap_err().kind(), StoreErrorKind::Corrupt);
    assert_eq!(block_on(store.lookup(id(1))).unwrap_err().kind(), StoreErrorKind::Corrupt);
    assert_eq!(block_on(store.list(Default::default())).unwrap().unreadable, [id(1)]);
    clock.advance(30 * super::DAY);
    assert_eq!(block_on(store.purge(100)).unwrap(), 2);
    assert_eq!(block_on(store.apply(id(1), claim(3))).unwrap_err().kind(), StoreErrorKind::Corrupt);
}
