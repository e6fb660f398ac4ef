//! The reply to a COMMIT was lost: its outcome is found out, and not guessed.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use oncegate_core::{State, Store as _, StoreErrorKind};
use oncegate_postgres::{PostgresOptions, PostgresStore, TransactError, TransactOutcome, Transactor, schema};
use oncegate_servers::{Fault, FaultProxy, PostgresServer};
use sqlx::postgres::PgConnection;

use sqlx::{Connection as _, Row as _};

use crate::support::{Database, claims, id, run, sql_id, sqlstate, token, try_run};
use crate::transact::{Charge, LONG, insert, pay, scope};

async fn world(connections: u32) -> (Database, FaultProxy, Transactor) {
    let database = Database::fresh().await;
    let proxy = FaultProxy::start(database.server.port()).await.unwrap();
    let pool = database.payments_at(proxy.port(), connections).await;
    let transactor = Transactor::new(pool).with_statement_timeout(LONG).unwrap();
    (database, proxy, transactor)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_reached_the_server_is_found() {
    let (database, proxy, transactor) = world(2).await;
    proxy.arm(b"COMMIT", Fault::After);
    let runs = AtomicU32::new(0);
    let done = transactor.transact(&scope(), "order-1", &500_i64, async |connection| {
        runs.fetch_add(1, Ordering::SeqCst);
        Ok(insert(connection, 500).await?)
    });
    assert_eq!(done.await.unwrap(), TransactOutcome::Executed(Charge { id: 1, cents: 500 }));
    assert_eq!((runs.into_inner(), database.paid().await), (1, 1));
    assert!(pay(&transactor, "order-1", 500).await.unwrap().is_replayed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_whose_commit_was_lost_is_run_again() {
    let (database, proxy, transactor) = world(2).await;
    proxy.arm(b"COMMIT", Fault::Before);
    let runs = AtomicU32::new(0);
    let done = transactor.transact(&scope(), "order-1", &500_i64, async |connection| {
        runs.fetch_add(1, Ordering::SeqCst);
        Ok(insert(connection, 500).await?)
    });
    assert!(!done.await.unwrap().is_replayed());
    assert_eq!((runs.into_inner(), database.paid().await), (2, 1));

    // With no run left, nothing was committed, and the caller gets an error.
    proxy.arm(b"COMMIT", Fault::Before);
    let error = pay(&transactor.clone().with_max_attempts(1).unwrap(), "order-2", 500).await.unwrap_err();
    assert!(
        matches!(&error, TransactError::Store(error) if error.kind() == StoreErrorKind::Unavailable),
        "{error:?}"
    );
    assert_eq!(database.paid().await, 1);
    assert!(!pay(&transactor, "order-2", 500).await.unwrap().is_replayed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delayed_commit_is_waited_for() {
    for (how, runs_expected) in [(Fault::Late, 1), (Fault::LateEnd, 2)] {
        let (database, proxy, transactor) = world(2).await;
        proxy.arm(b"COMMIT", how);
        let runs = AtomicU32::new(0);
        let calls = transactor.transact(&scope(), "order-1", &500_i64, async |connection| {
            runs.fetch_add(1, Ordering::SeqCst);
            Ok(insert(connection, 500).await?)
        });
        let release = async {
            proxy.broken().await;
            // Time for a few lookups. The transaction stays open until then.
            tokio::time::sleep(Duration::from_millis(300)).await;
            proxy.go_on();
        };
        let (done, ()) = tokio::join!(calls, release);
        assert!(!done.unwrap().is_replayed(), "{how:?}");
        assert_eq!((runs.into_inner(), database.paid().await), (runs_expected, 1), "{how:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_undecided_commit_is_reported_in_time_and_the_next_call_finds_its_outcome() {
    let (database, proxy, transactor) = world(2).await;
    let hurried = transactor.clone().with_statement_timeout(Duration::from_secs(2)).unwrap();
    proxy.arm(b"COMMIT", Fault::Late);
    let error = pay(&hurried, "order-1", 500).await.unwrap_err();
    assert!(matches!(error, TransactError::CommitUnknown { .. }), "{error:?}");
    proxy.go_on();
    let found = pay(&transactor.with_wait(LONG).unwrap(), "order-1", 500).await.unwrap();
    assert_eq!(found, TransactOutcome::Replayed(Charge { id: 1, cents: 500 }));
    assert_eq!(database.paid().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_wait_for_a_lost_reply_is_bounded() {
    let (database, proxy, transactor) = world(2).await;
    proxy.arm(b"COMMIT", Fault::Silent);
    let done = pay(&transactor.with_statement_timeout(Duration::from_secs(5)).unwrap(), "order-1", 500)
        .await
        .unwrap();
    assert!(!done.is_replayed());
    assert_eq!(database.paid().await, 1);
}

/// The record of the commit has expired by then.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_is_checked_after_the_retention_is_not_run_again() {
    let (database, proxy, transactor) = world(2).await;
    proxy.arm(b"COMMIT", Fault::Silent);
    let transactor = transactor
        .with_statement_timeout(Duration::from_secs(5))
        .unwrap()
        .with_retention(Duration::from_secs(1))
        .unwrap();
    let error = pay(&transactor, "order-1", 500).await.unwrap_err();
    assert!(matches!(error, TransactError::CommitUnknown { .. }), "{error:?}");
    assert_eq!(database.paid().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_dropped_during_begin_leaves_no_transaction_behind() {
    let (database, proxy, transactor) = world(1).await;
    proxy.arm(b"BEGIN", Fault::Slow);
    let call = tokio::spawn({
        let transactor = transactor.clone();
        async move { pay(&transactor, "order-1", 500).await }
    });
    proxy.broken().await;
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
    proxy.go_on();
    // The next statement on the pool's only connection commits on its own.
    let pool = transactor.pool();
    insert(&mut pool.acquire().await.unwrap(), 700).await.unwrap();
    assert_eq!(database.paid().await, 1);
}

/// The documented behaviour of a lost reply to COMMIT, with a COMMIT that waits for a standby.
#[tokio::test(flavor = "multi_thread")]
async fn during_a_commit_a_write_finds_out_its_outcome_and_a_lookup_does_not() {
    let server = tokio::task::spawn_blocking(|| PostgresServer::start().unwrap()).await.unwrap();
    let options = PostgresOptions::from_url(&server.url()).unwrap().with_connect_timeout(LONG).unwrap();
    schema::apply(&options).await.unwrap();
    let store = PostgresStore::open(options).await.unwrap();
    let owner = token(&store.apply(id(1), claims(1)).await.unwrap());
    let mut other = PgConnection::connect(&server.url()).await.unwrap();
    run(&mut other, "CREATE TABLE payments (cents bigint)").await;
    run(&mut other, "ALTER SYSTEM SET synchronous_standby_names = 'missing_standby'").await;
    run(&mut other, "SELECT pg_reload_conf()").await;
    run(&mut other, "SET synchronous_commit = local").await;
    let mut old = PgConnection::connect(&server.url()).await.unwrap();
    run(&mut old, "SET synchronous_commit = on").await;
    let complete = format!("SELECT oncegate.complete({}, {owner})", sql_id(id(1)));
    run(&mut old, &format!("BEGIN; INSERT INTO payments VALUES (500); {complete}")).await;
    let committing = tokio::spawn(async move { try_run(&mut old, "COMMIT").await.map(drop) });
    let waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    let deadline = std::time::Instant::now() + LONG;
    let backend: i32 = loop {
        if let Some(row) = try_run(&mut other, waiting).await.unwrap().first() {
            break row.get(0);
        }
        assert!(std::time::Instant::now() < deadline, "the COMMIT does not wait");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };

    let count = "SELECT count(*) FROM payments";
    let paid = try_run(&mut other, count).await.unwrap()[0].get::<i64, _>(0);
    let record = store.lookup(id(1)).await.unwrap().unwrap();
    assert!(paid == 0 && matches!(record.state, State::InProgress { .. }), "{paid} {record:?}");
    // The result of a lookup may be outdated a moment later. A write is certain.
    let held = try_run(&mut other, &complete).await.unwrap_err();
    assert_eq!(sqlstate(&held), "OG002");
    run(&mut other, &format!("SELECT pg_cancel_backend({backend})")).await;
    committing.await.unwrap().unwrap();
    let over = try_run(&mut other, &complete).await.unwrap_err();
    assert_eq!(sqlstate(&over), "OG001");
    let paid = try_run(&mut other, count).await.unwrap()[0].get::<i64, _>(0);
    let record = store.lookup(id(1)).await.unwrap().unwrap();
    assert!(paid == 1 && matches!(record.state, State::Completed(_)), "{paid} {record:?}");
}
