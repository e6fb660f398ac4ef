//! Transactions of an application that stay open, with a completion in them. No other caller waits for them.

use std::time::{Duration, Instant};

use oncegate_core::{
    Command, Completion, Extent, OnAbandoned, Outcome, RecordedResponse, State, Store as _, StoreErrorKind,
};

use crate::support::{
    Database, claim, claims, completes, id, renews, response, run, sql_id, sqlstate, token, try_run,
};

/// Nothing here waits for a transaction. The bound is generous because test machines are slow.
const AT_ONCE: Duration = Duration::from_secs(10);

/// Begins a transaction with an application's row and its completion, and leaves it open.
async fn business(database: &Database, token: u64) -> sqlx::postgres::PgConnection {
    let mut app = database.connect().await;
    run(&mut app, "CREATE TABLE IF NOT EXISTS payments (amount integer)").await;
    run(&mut app, "BEGIN; INSERT INTO payments VALUES (5)").await;
    run(&mut app, &format!("SELECT oncegate.complete({}, {token})", sql_id(id(1)))).await;
    app
}

async fn payments(database: &Database) -> usize {
    try_run(&mut database.connect().await, "SELECT amount FROM payments").await.unwrap().len()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_completion_of_an_application_delays_no_other_caller() {
    let database = Database::fresh().await;
    let store = database.store().await;
    let token = token(&store.apply(id(1), claims(1)).await.unwrap());
    let mut app = business(&database, token.get()).await;

    let start = Instant::now();
    let duplicate = store.apply(id(1), claims(2)).await.unwrap();
    assert!(
        matches!(duplicate, Outcome::InProgress { lease_left } if lease_left > Duration::ZERO),
        "{duplicate:?}"
    );
    for command in [renews(token), completes(token, Completion::Tombstone)] {
        let error = store.apply(id(1), command).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Locked, "{error}");
        assert_eq!(error.extent(), Extent::Record, "the error concerns the record only");
    }
    let purged = store.purge(10).await.unwrap();
    assert_eq!(purged, 0);
    let record = store.lookup(id(1)).await.unwrap().unwrap();
    assert!(matches!(record.state, State::InProgress { .. }));
    // A second completion by an application gives up after a moment, and reports the reason.
    let second = format!("SELECT oncegate.complete({}, {token})", sql_id(id(1)));
    let error = try_run(&mut database.connect().await, &second).await.unwrap_err();
    assert_eq!(sqlstate(&error), "OG002");
    assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());

    run(&mut app, "COMMIT").await;
    // The response may be added later, once. Until then there is nothing to replay.
    assert_eq!(store.apply(id(1), claims(3)).await.unwrap(), Outcome::Unreplayable);
    let paid = Completion::Replayable(response(b"paid"));
    assert_eq!(store.apply(id(1), completes(token, paid)).await.unwrap(), Outcome::Completed);
    assert_eq!(store.apply(id(1), claims(4)).await.unwrap(), Outcome::Replay(response(b"paid")));
    assert_eq!(payments(&database).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollback_leaves_the_owner_of_the_record_unchanged() {
    let database = Database::fresh().await;
    let store = database.store().await;
    let token = token(&store.apply(id(1), claims(1)).await.unwrap());
    let mut app = business(&database, token.get()).await;
    run(&mut app, "ROLLBACK").await;
    assert!(matches!(store.apply(id(1), claims(2)).await.unwrap(), Outcome::InProgress { .. }));
    assert!(matches!(store.apply(id(1), renews(token)).await.unwrap(), Outcome::Renewed { .. }));
    assert_eq!(
        store.apply(id(1), completes(token, Completion::Tombstone)).await.unwrap(),
        Outcome::Completed
    );
    assert_eq!(payments(&database).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_claim_takes_over_a_lease_that_ends_during_an_open_completion() {
    for policy in [OnAbandoned::Park, OnAbandoned::Reexecute, OnAbandoned::Reconcile] {
        let database = Database::fresh().await;
        let store = database.store().await;
        let mut short = claim(1);
        short.lease = Duration::from_millis(1);
        let token = token(&store.apply(id(1), Command::Claim(short)).await.unwrap());
        let mut app = business(&database, token.get()).await;
        let mut other = claim(2);
        other.on_abandoned = policy;
        let outcome = store.apply(id(1), Command::Claim(other.clone())).await.unwrap();
        assert_eq!(outcome, Outcome::InProgress { lease_left: Duration::ZERO });
        run(&mut app, "COMMIT").await;
        assert_eq!(store.apply(id(1), Command::Claim(other)).await.unwrap(), Outcome::Unreplayable);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rows_of_a_stale_owner_are_rolled_back() {
    let database = Database::fresh().await;
    let store = database.store().await;
    let mut short = claim(1);
    short.lease = Duration::from_millis(1);
    let stale = token(&store.apply(id(1), Command::Claim(short)).await.unwrap());
    let mut other = claim(2);
    other.on_abandoned = OnAbandoned::Reexecute;
    let outcome = store.apply(id(1), Command::Claim(other)).await.unwrap();
    assert!(
        matches!(&outcome, Outcome::Execute(grant) if grant.after_abandoned && grant.attempts == 2),
        "{outcome:?}"
    );

    let mut app = database.connect().await;
    run(&mut app, "CREATE TABLE payments (amount integer)").await;
    run(&mut app, "BEGIN; INSERT INTO payments VALUES (5)").await;
    let complete = format!("SELECT oncegate.complete({}, {stale})", sql_id(id(1)));
    let error = try_run(&mut app, &complete).await.unwrap_err();
    assert_eq!(sqlstate(&error), "OG001");
    // A COMMIT in spite of the error commits nothing: the transaction has failed.
    run(&mut app, "COMMIT").await;
    assert_eq!(payments(&database).await, 0);
    assert_eq!(store.apply(id(1), renews(stale)).await.unwrap(), Outcome::Fenced);
    assert_eq!(store.apply(id(1), completes(stale, Completion::Tombstone)).await.unwrap(), Outcome::Fenced);
    assert!(matches!(store.apply(id(1), renews(token(&outcome))).await.unwrap(), Outcome::Renewed { .. }));
}

/// A service runs its transaction again because the reply to its COMMIT was lost, or because an intermediary sent the request
/// twice.
#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_that_runs_several_times_commits_once() {
    let response = ", oncegate.response(201, NULL, NULL, 'paid')";
    for (first, second) in [("", ""), (response, response), ("", response)] {
        let database = Database::fresh().await;
        let store = database.store().await;
        let token = token(&store.apply(id(1), claims(1)).await.unwrap());
        let (mut one, mut other) = (database.connect().await, database.connect().await);
        run(&mut one, "CREATE TABLE payments (amount integer)").await;
        for app in [&mut one, &mut other] {
            run(app, "BEGIN; INSERT INTO payments VALUES (5)").await;
        }
        let complete = |response| format!("SELECT oncegate.complete({}, {token}{response})", sql_id(id(1)));
        run(&mut one, &complete(first)).await;
        run(&mut one, "COMMIT").await;
        let error = try_run(&mut other, &complete(second)).await.unwrap_err();
        assert_eq!(sqlstate(&error), "OG001");
        run(&mut other, "COMMIT").await;
        assert_eq!(payments(&database).await, 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_by_an_application_keeps_the_retention_of_the_claim() {
    let database = Database::fresh().await;
    let store = database.store().await;
    let mut app = database.connect().await;
    for (number, retention_ms, kept) in
        [(1, "", Duration::from_secs(3600)), (2, ", null, 5000", Duration::from_secs(5))]
    {
        let token = token(&store.apply(id(number), claims(number.into())).await.unwrap());
        assert!(matches!(store.apply(id(number), renews(token)).await.unwrap(), Outcome::Renewed { .. }));
        run(&mut app, &format!("SELECT oncegate.complete({}, {token}{retention_ms})", sql_id(id(number))))
            .await;
        let record = store.lookup(id(number)).await.unwrap().unwrap();
        assert_eq!(record.expires_at.since(record.changed_at), kept);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_transaction_of_a_stale_owner_blocks_no_one() {
    let database = Database::fresh().await;
    let store = database.store().await;
    let owner = token(&store.apply(id(1), claims(1)).await.unwrap());
    let mut app = database.connect().await;
    run(&mut app, "BEGIN").await;
    let stale = owner.get() - 1;
    let call = format!(
        "SELECT outcome FROM oncegate.complete_if_owner({}, {stale}, 'tombstone', null, 1000)",
        sql_id(id(1))
    );
    assert_eq!(try_run(&mut app, &call).await.unwrap().len(), 1);
    assert!(matches!(store.apply(id(1), renews(owner)).await.unwrap(), Outcome::Renewed { .. }));
    run(&mut app, "ROLLBACK").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_in_an_open_transaction_delays_no_other_caller() {
    let database = Database::fresh().await;
    let store = database.store().await;
    let mut app = database.connect().await;
    let sql = format!(
        "SELECT * FROM oncegate.claim({}, decode(repeat('01', 16), 'hex'), decode('01' || repeat('02', 32), 'hex'), 30000, 60000)",
        sql_id(id(1))
    );
    run(&mut app, &format!("BEGIN; {sql}")).await;
    let start = Instant::now();
    let outcome = store.apply(id(1), claims(2)).await.unwrap();
    assert_eq!(outcome, Outcome::InProgress { lease_left: Duration::ZERO });
    assert!(
        matches!(store.apply(id(2), claims(2)).await.unwrap(), Outcome::Execute(_)),
        "another record is free"
    );
    assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
    run(&mut app, "ROLLBACK").await;
    assert!(matches!(store.apply(id(1), claims(2)).await.unwrap(), Outcome::Execute(_)));
    // The opposite case: a committed claim is visible.
    run(&mut app, &format!("BEGIN; {}; COMMIT", sql.replace(&sql_id(id(1)), &sql_id(id(3))))).await;
    assert_eq!(store.apply(id(3), claims(2)).await.unwrap(), Outcome::Mismatch);
}

#[tokio::test(flavor = "multi_thread")]
async fn replays_take_no_lock_and_write_nothing() {
    let database = Database::fresh().await;
    let store = database.store().await;
    let token = token(&store.apply(id(1), claims(1)).await.unwrap());
    let paid = Completion::Replayable(response(b"paid"));
    store.apply(id(1), completes(token, paid)).await.unwrap();
    // A transaction that may not write, on a row that another transaction has locked.
    let mut other = database.connect().await;
    run(&mut other, "BEGIN; SELECT FROM oncegate.records FOR UPDATE").await;
    let mut reader = database.connect().await;
    let sql = format!(
        "BEGIN READ ONLY; SELECT outcome FROM oncegate.claim({}, decode(repeat('09', 16), 'hex'), \
         (SELECT fingerprint FROM oncegate.records), 30000, 60000)",
        sql_id(id(1))
    );
    let rows = try_run(&mut reader, &sql).await.unwrap();
    assert_eq!(sqlx::Row::get::<&str, _>(&rows[0], 0), "replay");
    run(&mut other, "ROLLBACK").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_under_a_snapshot_older_than_a_renewal_is_refused() {
    let database = Database::fresh().await;
    let store = database.store().await;
    for (number, level) in [(1, "REPEATABLE READ"), (2, "SERIALIZABLE")] {
        let owner = token(&store.apply(id(number), claims(1)).await.unwrap());
        let mut app = database.connect().await;
        run(&mut app, &format!("BEGIN ISOLATION LEVEL {level}; SELECT 1")).await;
        store.apply(id(number), renews(owner)).await.unwrap();
        let complete = format!("SELECT oncegate.complete({}, {owner})", sql_id(id(number)));
        let error = try_run(&mut app, &complete).await.unwrap_err();
        assert_eq!(sqlstate(&error), "40001", "{level}");
        run(&mut app, "ROLLBACK").await;
        run(&mut app, &format!("BEGIN ISOLATION LEVEL {level}; {complete}; COMMIT")).await;
        let record = store.lookup(id(number)).await.unwrap().unwrap();
        assert_eq!(record.state, State::Completed(RecordedResponse::Awaited));
    }
}
