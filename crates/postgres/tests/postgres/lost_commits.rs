//! COMMIT was sent, and its answer never came: what became of it is found out, not guessed.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use oncegate_core::StoreErrorKind;
use oncegate_postgres::{TransactError, Transacted, Transactor};
use oncegate_servers::{Break, Way};

use crate::support::Database;
use crate::transact::{Charge, LONG, insert, key, pay, scope};

async fn world(connections: u32) -> (Database, Way, Transactor) {
    let database = Database::fresh().await;
    let way = Way::to(database.server.port()).await.unwrap();
    let pool = database.payments_at(way.port(), connections).await;
    let transactor = Transactor::new(pool).with_patience(LONG);
    (database, way, transactor)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_the_server_got_is_found() {
    let (database, way, transactor) = world(2).await;
    way.arm(b"COMMIT", Break::After);
    let runs = AtomicU32::new(0);
    let done = transactor.transact(&scope(), &key("order-1"), &500_i64, async |connection| {
        runs.fetch_add(1, Ordering::SeqCst);
        Ok(insert(connection, 500).await?)
    });
    assert_eq!(done.await.unwrap(), Transacted::Executed(Charge { id: 1, cents: 500 }));
    assert_eq!((runs.into_inner(), database.paid().await), (1, 1));
    assert!(pay(&transactor, "order-1", 500).await.unwrap().is_replayed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_the_server_never_got_is_run_again() {
    let (database, way, transactor) = world(2).await;
    way.arm(b"COMMIT", Break::Before);
    let runs = AtomicU32::new(0);
    let done = transactor.transact(&scope(), &key("order-1"), &500_i64, async |connection| {
        runs.fetch_add(1, Ordering::SeqCst);
        Ok(insert(connection, 500).await?)
    });
    assert!(!done.await.unwrap().is_replayed());
    assert_eq!((runs.into_inner(), database.paid().await), (2, 1));

    // Where no run is left, nothing was committed and the caller is told so.
    way.arm(b"COMMIT", Break::Before);
    let error = pay(&transactor.clone().with_runs(1), "order-2", 500).await.unwrap_err();
    assert!(
        matches!(&error, TransactError::Store(error) if error.kind() == StoreErrorKind::Unavailable),
        "{error:?}"
    );
    assert_eq!(database.paid().await, 1);
    assert!(!pay(&transactor, "order-2", 500).await.unwrap().is_replayed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_is_still_on_its_way_is_waited_for() {
    for (how, runs_expected) in [(Break::Late, 1), (Break::LateEnd, 2)] {
        let (database, way, transactor) = world(2).await;
        way.arm(b"COMMIT", how);
        let runs = AtomicU32::new(0);
        let calls = transactor.transact(&scope(), &key("order-1"), &500_i64, async |connection| {
            runs.fetch_add(1, Ordering::SeqCst);
            Ok(insert(connection, 500).await?)
        });
        let release = async {
            way.broken().await;
            // Time to look for it a few times. The transaction is open all the while.
            tokio::time::sleep(Duration::from_millis(300)).await;
            way.go_on();
        };
        let (done, ()) = tokio::join!(calls, release);
        assert!(!done.unwrap().is_replayed(), "{how:?}");
        assert_eq!((runs.into_inner(), database.paid().await), (runs_expected, 1), "{how:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_cannot_be_found_out_in_time_says_so_and_the_next_call_finds_it() {
    let (database, way, transactor) = world(2).await;
    let hurried = transactor.clone().with_patience(Duration::from_secs(2));
    way.arm(b"COMMIT", Break::Late);
    let error = pay(&hurried, "order-1", 500).await.unwrap_err();
    assert!(matches!(error, TransactError::CommitUnknown { .. }), "{error:?}");
    way.go_on();
    let found = pay(&transactor.with_wait(LONG), "order-1", 500).await.unwrap();
    assert_eq!(found, Transacted::Replayed(Charge { id: 1, cents: 500 }));
    assert_eq!(database.paid().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_never_comes_is_not_waited_for_for_ever() {
    let (database, way, transactor) = world(2).await;
    way.arm(b"COMMIT", Break::Silent);
    let done = pay(&transactor.with_patience(Duration::from_secs(5)), "order-1", 500).await.unwrap();
    assert!(!done.is_replayed());
    assert_eq!(database.paid().await, 1);
}

/// The record of a commit that took place is gone by then.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_is_looked_for_after_the_retention_is_not_run_again() {
    let (database, way, transactor) = world(2).await;
    way.arm(b"COMMIT", Break::Silent);
    let transactor = transactor.with_patience(Duration::from_secs(5)).with_retention(Duration::from_secs(1));
    let error = pay(&transactor, "order-1", 500).await.unwrap_err();
    assert!(matches!(error, TransactError::CommitUnknown { .. }), "{error:?}");
    assert_eq!(database.paid().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_dropped_while_it_begins_leaves_no_transaction_behind() {
    let (database, way, transactor) = world(1).await;
    way.arm(b"BEGIN", Break::Slow);
    let call = tokio::spawn({
        let transactor = transactor.clone();
        async move { pay(&transactor, "order-1", 500).await }
    });
    way.broken().await;
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
    way.go_on();
    // The next one on the pool's only place commits by itself.
    let pool = transactor.pool();
    insert(&mut pool.acquire().await.unwrap(), 700).await.unwrap();
    assert_eq!(database.paid().await, 1);
}
