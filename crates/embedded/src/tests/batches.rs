//! Group commit: commands that share a transaction. The tests hold the disk while the commands gather.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use oncegate_core::{Command, Outcome, Store as _, StoreError, StoreErrorKind};
use oncegate_testkit::{ManualClock, block_on};

use super::disk::{Disk, DiskHold};
use super::{DAY, claim, complete, id, open, open_with, response, token};
use crate::{EmbeddedOptions, EmbeddedStore};

type Reply<'a> = Pin<Box<dyn Future<Output = Result<Outcome, StoreError>> + Send + 'a>>;

fn poll_once<T>(future: &mut Pin<Box<dyn Future<Output = T> + Send + '_>>) -> Poll<T> {
    future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// Sends commands without waiting for their replies.
fn send(store: &EmbeddedStore, n: u64, command: Command) -> Reply<'_> {
    let mut reply: Reply<'_> = store.apply(id(n), command);
    assert!(poll_once(&mut reply).is_pending(), "a command is answered before it can be on disk");
    reply
}

fn new_store() -> (Disk, Arc<ManualClock>, EmbeddedStore) {
    let (disk, clock) = (Disk::with_new_store(), Arc::new(ManualClock::at_millis(1_000_000)));
    let store = open(&disk, clock.clone()).unwrap();
    (disk, clock, store)
}

/// Holds the disk while one command waits for it.
fn hold_with_one_command<'a>(disk: &Disk, store: &'a EmbeddedStore) -> (DiskHold, Reply<'a>) {
    let held = disk.hold();
    let first = send(store, 1000, claim(1000));
    disk.wait_until_held();
    (held, first)
}

#[test]
fn a_command_is_neither_answered_nor_visible_before_it_is_on_disk() {
    let (disk, _, store) = new_store();
    let (held, mut reply) = hold_with_one_command(&disk, &store);
    assert!(poll_once(&mut reply).is_pending(), "answered before it is on disk");
    assert_eq!(block_on(store.lookup(id(1000))).unwrap(), None);
    drop(held);
    token(&block_on(reply).unwrap());
    assert!(block_on(store.lookup(id(1000))).unwrap().is_some());
}

#[test]
fn commands_that_gather_share_one_transaction_and_see_each_other() {
    let (disk, _, store) = new_store();
    let (held, first) = hold_with_one_command(&disk, &store);
    let mut replies: Vec<_> = (0..4).map(|n| send(&store, n, claim(u128::from(n)))).collect();
    replies.push(send(&store, 0, claim(77)));
    let before = disk.lock().syncs;
    drop(held);
    block_on(first).unwrap();
    let outcomes: Vec<_> = replies.into_iter().map(|reply| block_on(reply).unwrap()).collect();
    assert!(outcomes[..4].iter().all(|outcome| matches!(outcome, Outcome::Execute(_))), "{outcomes:?}");
    assert!(
        matches!(outcomes[4], Outcome::InProgress { .. }),
        "the second claim of the same record: {outcomes:?}"
    );
    let syncs = disk.lock().syncs - before;
    assert_eq!(syncs, 2 + 2, "the flushes of two commits");
}

#[test]
fn a_batch_that_fails_acknowledges_none_of_its_commands() {
    let (disk, _, store) = new_store();
    let (held, first) = hold_with_one_command(&disk, &store);
    let replies: Vec<_> = (0..4).map(|n| send(&store, n, claim(u128::from(n)))).collect();
    disk.fail(super::disk::Fault { on: super::disk::Operation::Sync, after: 2, times: 1, errno: 5 });
    drop(held);
    block_on(first).unwrap();
    for reply in replies {
        assert_eq!(block_on(reply).unwrap_err().kind(), StoreErrorKind::Unavailable);
    }
}

#[test]
fn a_command_that_arrives_while_the_file_is_reopened_is_refused_at_once() {
    let (disk, _, store) = new_store();
    let granted = token(&block_on(store.apply(id(1), claim(1))).unwrap());
    let (held, first) = hold_with_one_command(&disk, &store);
    let waiting = send(&store, 2, claim(2));
    disk.fail(super::disk::Fault { on: super::disk::Operation::Sync, after: 0, times: 1, errno: 5 });
    // One flush fails. The attempt to open the file again is held.
    disk.release_one();
    assert!(block_on(first).is_err() && block_on(waiting).is_err());
    disk.wait_until_held();
    for _ in 0..100 {
        let mut reply: Reply<'_> = store.apply(id(1), complete(granted, response(1, 10)));
        match poll_once(&mut reply) {
            Poll::Ready(Err(error)) => assert_eq!(error.kind(), StoreErrorKind::Unavailable),
            other => panic!("not refused at once: {other:?}"),
        }
    }
    drop(held);
    while block_on(store.check()).is_err() {
        std::thread::yield_now();
    }
    assert_eq!(block_on(store.apply(id(1), complete(granted, response(1, 10)))).unwrap(), Outcome::Completed);
}

#[test]
fn reads_and_claims_that_change_nothing_do_not_wait_for_the_writer() {
    let (disk, clock, store) = new_store();
    let granted = token(&block_on(store.apply(id(1), claim(1))).unwrap());
    let (held, first) = hold_with_one_command(&disk, &store);
    let in_progress = block_on(store.apply(id(1), claim(2))).unwrap();
    assert!(matches!(in_progress, Outcome::InProgress { .. }));
    drop(held);
    block_on(first).unwrap();
    block_on(store.apply(id(1), complete(granted, response(7, 50)))).unwrap();

    let held = disk.hold();
    let second = send(&store, 1001, claim(1001));
    disk.wait_until_held();
    assert_eq!(block_on(store.apply(id(1), claim(3))).unwrap(), Outcome::Replay(response(7, 50)));
    let mut other = claim(4);
    if let Command::Claim(claim) = &mut other {
        claim.fingerprint = oncegate_core::Fingerprint::of_parts("test", &[b"other"]);
    }
    assert_eq!(block_on(store.apply(id(1), other)).unwrap(), Outcome::Mismatch);
    assert!(block_on(store.lookup(id(1))).unwrap().is_some());
    assert_eq!(block_on(store.list(Default::default())).unwrap().records.len(), 2);
    drop(held);
    block_on(second).unwrap();
    drop(clock);
}

#[test]
fn a_batch_that_changes_nothing_is_not_committed() {
    let (disk, _, store) = new_store();
    let granted = token(&block_on(store.apply(id(1), claim(1))).unwrap());
    let before = disk.lock().syncs;
    let stale = oncegate_core::FencingToken::new(granted.get() - 1);
    assert_eq!(block_on(store.apply(id(1), complete(stale, response(7, 50)))).unwrap(), Outcome::Fenced);
    assert_eq!(block_on(store.purge(10)).unwrap(), 0);
    block_on(store.check()).unwrap();
    assert_eq!(disk.lock().syncs, before);
}

#[test]
fn a_command_whose_caller_has_gone_away_is_not_applied() {
    let (disk, _, store) = new_store();
    let (held, first) = hold_with_one_command(&disk, &store);
    drop(send(&store, 1, claim(1)));
    let kept = send(&store, 2, claim(2));
    drop(held);
    block_on(first).unwrap();
    block_on(kept).unwrap();
    assert_eq!(block_on(store.lookup(id(1))).unwrap(), None);
}

#[test]
fn too_many_waiting_commands_are_refused() {
    let disk = Disk::with_new_store();
    let store = open_with(
        &disk,
        EmbeddedOptions::new("not a directory").with_max_batch(std::num::NonZeroUsize::new(2).unwrap()),
    )
    .unwrap();
    let (held, first) = hold_with_one_command(&disk, &store);
    let waiting: Vec<_> = (0..32).map(|n| send(&store, n, claim(1))).collect();
    let refused = block_on(store.apply(id(99), claim(1))).unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Unavailable);
    drop(held);
    block_on(first).unwrap();
    waiting.into_iter().for_each(|reply| drop(block_on(reply).unwrap()));
}

#[test]
fn closing_applies_waiting_commands_and_refuses_later_ones() {
    let (disk, clock, store) = new_store();
    let (held, first) = hold_with_one_command(&disk, &store);
    let waiting: Vec<_> = (0..50).map(|n| send(&store, n, claim(1))).collect();
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| store.close());
        drop(held);
        closing.join().unwrap();
    });
    block_on(first).unwrap();
    for reply in waiting {
        token(&block_on(reply).unwrap());
    }
    let refused = block_on(store.apply(id(1), claim(9))).unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Unavailable);
    assert!(block_on(store.lookup(id(1))).is_err() && block_on(store.list(Default::default())).is_err());
    store.close();
    let again = open(&disk, clock).unwrap();
    assert!(block_on(again.lookup(id(49))).unwrap().is_some());
}

#[test]
fn a_purge_continues_over_several_transactions_up_to_its_limit() {
    let (disk, clock, store) = new_store();
    let fill = |from: u64, to: u64| {
        let held = disk.hold();
        let replies: Vec<_> = (from..to).map(|n| send(&store, n, claim(1))).collect();
        drop(held);
        replies.into_iter().for_each(|reply| drop(block_on(reply).unwrap()));
    };
    fill(0, 900);
    clock.advance(DAY + Duration::from_secs(60));
    fill(900, 1000);
    assert_eq!(block_on(store.purge(0)).unwrap(), 0);
    assert_eq!(block_on(store.purge(300)).unwrap(), 300);
    assert_eq!(block_on(store.purge(512)).unwrap(), 512);
    assert_eq!(block_on(store.purge(512)).unwrap(), 88);
    assert_eq!(block_on(store.purge(512)).unwrap(), 0);
    assert!(block_on(store.lookup(id(950))).unwrap().is_some());
}

/// The expiry entry of a record that lives longer than planned is replaced, and the record is purged in the end.
#[test]
fn a_renewed_record_is_purged_after_its_last_expiry() {
    let (_, clock, store) = new_store();
    let granted = token(&block_on(store.apply(id(1), claim(1))).unwrap());
    clock.advance(DAY);
    block_on(store.apply(id(1), complete(granted, response(1, 10)))).unwrap();
    clock.advance(Duration::from_secs(3600));
    assert_eq!(block_on(store.purge(10)).unwrap(), 0);
    assert!(block_on(store.lookup(id(1))).unwrap().is_some());
    clock.advance(DAY);
    assert_eq!(block_on(store.purge(10)).unwrap(), 1);
}
