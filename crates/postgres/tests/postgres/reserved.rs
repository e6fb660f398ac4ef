//! The path of `transact` that inserts its record only once, with other callers that claim the same key.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{
    Claim, Command, Completion, Fingerprint, FingerprintInput, FingerprintRules, KeyTag, Outcome, RecordId,
    RecordedResponse, Release, State, Store as _,
};
use oncegate_postgres::{Isolation, PostgresStore, TransactError, TransactOutcome, Transactor};
use sqlx::postgres::{PgConnection, PgPool};
use sqlx::{AssertSqlSafe, Row as _};
use tokio::sync::Notify;

use crate::support::{Database, claim, completes, response, run, sql_id, sqlstate, token, try_run};
use crate::transact::{Charge, LONG, insert, key, pay, scope};

fn record(order: &str) -> RecordId {
    RecordId::derive(&scope(), &key(order))
}

/// The fingerprint of an input, as `transact` computes it.
fn fingerprint(cents: i64) -> Fingerprint {
    let body = serde_json::to_vec(&cents).unwrap();
    let input =
        FingerprintInput { content_type: b"application/json", body: &body, ..FingerprintInput::default() };
    FingerprintRules::new().fingerprint(&input)
}

/// A claim of a sidecar for the payment that `pay` makes.
fn claim_of(attempt: u128, cents: i64) -> Claim {
    Claim { fingerprint: fingerprint(cents), ..claim(attempt) }
}

fn claims_of(attempt: u128, cents: i64) -> Command {
    Command::Claim(claim_of(attempt, cents))
}

async fn world(connections: u32) -> (Database, PgPool, Transactor, PostgresStore) {
    let database = Database::fresh().await;
    let pool = database.payments(connections).await;
    let transactor = Transactor::new(pool.clone()).with_statement_timeout(LONG).unwrap();
    let store = database.store().await;
    (database, pool, transactor, store)
}

/// A call that has written its row and stays open until the test releases it.
struct HeldCall {
    go_on: Arc<Notify>,
    call: tokio::task::JoinHandle<Result<TransactOutcome<Charge>, TransactError>>,
}

async fn start_held_call(transactor: &Transactor, order: &'static str, fails: bool) -> HeldCall {
    let (started, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let call = tokio::spawn({
        let (transactor, started, go_on) = (transactor.clone(), started.clone(), go_on.clone());
        async move {
            let run = async |connection: &mut PgConnection| {
                let charge = insert(connection, 500).await?;
                started.notify_one();
                go_on.notified().await;
                if fails { Err("declined".into()) } else { Ok(charge) }
            };
            transactor.transact(&scope(), order, &500_i64, run).await
        }
    });
    started.notified().await;
    HeldCall { go_on, call }
}

/// Claims the record of an open transaction through every entry point: no caller waits, and no caller may execute.
async fn ask_all(database: &Database, transactor: &Transactor, store: &PostgresStore, order: &str) {
    let busy = store.apply(record(order), claims_of(1, 500)).await.unwrap();
    assert_eq!(busy, Outcome::InProgress { lease_left: Duration::ZERO });
    let many = format!(
        "SELECT outcome FROM oncegate.claim_many(ARRAY[{}], ARRAY['\\x{}'::bytea], ARRAY['\\x{}'::bytea], ARRAY[1000], \
         ARRAY[1000], ARRAY['park'], ARRAY['\\x{}'::bytea], ARRAY[''])",
        sql_id(record(order)),
        "01".repeat(16),
        "01".repeat(33),
        "01".repeat(8)
    );
    let rows = try_run(&mut database.connect().await, &many).await.unwrap();
    assert_eq!(rows[0].get::<&str, _>("outcome"), "in-progress");
    let error = pay(transactor, order, 500).await.unwrap_err();
    assert!(matches!(error, TransactError::InProgress { lease_left: Duration::ZERO }), "{error:?}");
    // A lookup finds nothing, because nothing is committed.
    assert_eq!(store.lookup(record(order)).await.unwrap(), None);
    assert_eq!(store.purge(10).await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn callers_get_in_progress_during_the_transaction_and_its_result_afterwards() {
    let (database, _, transactor, store) = world(4).await;
    let failing = start_held_call(&transactor, "order-1", true).await;
    ask_all(&database, &transactor, &store, "order-1").await;
    failing.go_on.notify_one();
    let error = failing.call.await.unwrap().unwrap_err();
    assert!(matches!(error, TransactError::Failed(_)), "{error:?}");
    // A rollback leaves nothing: a claim with another input may have the key, and releases it.
    let owner = token(&store.apply(record("order-1"), claims_of(2, 900)).await.unwrap());
    let release = Command::Release(Release { token: owner, retention: Duration::from_secs(3600) });
    assert_eq!(store.apply(record("order-1"), release).await.unwrap(), Outcome::Released);

    let paying = start_held_call(&transactor, "order-2", false).await;
    ask_all(&database, &transactor, &store, "order-2").await;
    paying.go_on.notify_one();
    let paid = paying.call.await.unwrap().unwrap();
    let Outcome::Replay(response) = store.apply(record("order-2"), claims_of(3, 500)).await.unwrap() else {
        panic!("it is replayed")
    };
    assert_eq!(serde_json::from_slice::<Charge>(&response.body()).unwrap(), paid.into_inner());
    assert_eq!(store.apply(record("order-2"), claims_of(4, 900)).await.unwrap(), Outcome::Mismatch);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_record_equals_that_of_a_claim_and_a_completion_and_is_written_once() {
    let (database, pool, transactor, store) = world(1).await;
    let transactor = transactor.with_retention(Duration::from_secs(7200)).unwrap();
    pay(&transactor, "order-1", 500).await.unwrap();
    let made = store.lookup(record("order-1")).await.unwrap().unwrap();
    assert!(matches!(&made.state, State::Completed(RecordedResponse::Replayable(_))), "{made:?}");
    assert_eq!((made.attempts, made.fingerprint), (1, fingerprint(500)));
    assert_eq!(made.label.operation(), "POST /payments");
    assert_eq!(made.label.caller(), scope().caller_tag());
    assert_eq!(made.label.key(), Some(KeyTag::of(&"order-1".try_into().unwrap())));
    assert_eq!(made.token.get(), made.created_at.as_millis());
    assert_eq!(made.created_at, made.changed_at);
    assert_eq!(made.expires_at, made.changed_at.after(Duration::from_secs(7200)));
    let place = "SELECT ctid::text, purge_at - expires_at FROM oncegate.records";
    let (place, slack): (String, i64) = sqlx::query_as(place).fetch_one(&pool).await.unwrap();
    assert_eq!(place, "(0,1)", "one version of one row");
    assert!((0..2000).contains(&slack), "{slack}");
    assert_eq!(database.paid().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_claimed_by_a_sidecar_and_a_transaction_at_once_has_one_effect() {
    const ORDERS: usize = 60;
    for isolation in [None, Some(Isolation::RepeatableRead)] {
        let (database, _, transactor, store) = world(8).await;
        let transactor = isolation.map_or(transactor.clone(), |level| transactor.with_isolation(level));
        let store = Arc::new(store);
        for round in 0..ORDERS {
            let order = format!("order-{round}");
            let calls = (0..4).map(|_| {
                let (transactor, order) = (transactor.clone(), order.clone());
                tokio::spawn(async move {
                    match pay(&transactor, &order, 500).await {
                        Ok(done) => usize::from(!done.is_replayed()),
                        // The sidecar completed the key, and its response is not a charge.
                        Err(TransactError::InProgress { .. } | TransactError::Undecodable { .. }) => 0,
                        Err(error) => panic!("{error:?}"),
                    }
                })
            });
            let sidecars = (0..4_u32).map(|attempt| {
                let (store, record) = (store.clone(), record(&order));
                tokio::spawn(async move {
                    match store.apply(record, claims_of(attempt.into(), 500)).await.unwrap() {
                        Outcome::Execute(grant) => {
                            let done =
                                completes(grant.token, Completion::Replayable(response(b"paid elsewhere")));
                            assert_eq!(store.apply(record, done).await.unwrap(), Outcome::Completed);
                            1
                        }
                        Outcome::InProgress { .. } | Outcome::Replay(_) => 0,
                        other => panic!("{other:?}"),
                    }
                })
            });
            let mut effects = 0;
            for task in calls.zip(sidecars).flat_map(|(call, sidecar)| [call, sidecar]).collect::<Vec<_>>() {
                effects += task.await.unwrap();
            }
            assert_eq!(effects, 1, "{order}, {isolation:?}");
        }
        let here = database.paid().await;
        let elsewhere =
            "SELECT count(*) FROM oncegate.records WHERE position('elsewhere'::bytea IN response) > 0";
        let elsewhere: i64 =
            sqlx::query_scalar(elsewhere).fetch_one(&mut database.connect().await).await.unwrap();
        assert_eq!(here + elsewhere, ORDERS as i64);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_existing_record_is_treated_as_by_a_claim() {
    let (database, _, transactor, store) = world(2).await;
    // In progress in a sidecar, and then completed there.
    let owner = token(&store.apply(record("order-1"), claims_of(1, 500)).await.unwrap());
    let error = pay(&transactor, "order-1", 500).await.unwrap_err();
    assert!(matches!(error, TransactError::InProgress { lease_left } if lease_left > Duration::ZERO));
    let error = pay(&transactor, "order-1", 900).await.unwrap_err();
    assert!(matches!(error, TransactError::Mismatch), "{error:?}");
    store.apply(record("order-1"), completes(owner, Completion::Tombstone)).await.unwrap();
    let error = pay(&transactor, "order-1", 500).await.unwrap_err();
    assert!(matches!(error, TransactError::Unreplayable { .. }), "{error:?}");
    assert_eq!(database.paid().await, 0);

    // Abandoned there, so the outcome is unknown.
    let short = Claim { lease: Duration::from_millis(1), ..claim_of(1, 500) };
    store.apply(record("order-2"), Command::Claim(short)).await.unwrap();
    let error = loop {
        match pay(&transactor, "order-2", 500).await.unwrap_err() {
            TransactError::InProgress { .. } => {}
            error => break error,
        }
    };
    assert!(matches!(error, TransactError::Unknown { .. }), "{error:?}");
    assert_eq!(database.paid().await, 0);

    // Released, or past its retention: taken over, with a greater token.
    let owner = token(&store.apply(record("order-3"), claims_of(1, 900)).await.unwrap());
    let release = Command::Release(Release { token: owner, retention: Duration::from_secs(3600) });
    store.apply(record("order-3"), release).await.unwrap();
    let past = token(&store.apply(record("order-4"), claims_of(1, 900)).await.unwrap());
    let mut admin = database.connect().await;
    run(
        &mut admin,
        "UPDATE oncegate.records SET expires_at = 1 WHERE attempts = 1 AND state = 'in-progress'",
    )
    .await;
    // Greater tokens, as if the clock had stood still since.
    run(&mut admin, "UPDATE oncegate.records SET token = token + 3600000 WHERE state <> 'unknown'").await;
    for (order, token, attempts) in [("order-3", owner, 2), ("order-4", past, 1)] {
        assert!(!pay(&transactor, order, 500).await.unwrap().is_replayed());
        let record = store.lookup(record(order)).await.unwrap().unwrap();
        assert_eq!((record.token.get(), record.attempts), (token.get() + 3_600_001, attempts), "{order}");
        assert!(pay(&transactor, order, 500).await.unwrap().is_replayed());
    }
    assert_eq!(database.paid().await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_owner_is_fenced_by_a_transaction() {
    let (database, _, transactor, store) = world(2).await;
    let short = Claim { lease: Duration::from_millis(1), ..claim_of(1, 500) };
    let stale = token(&store.apply(record("order-1"), Command::Claim(short)).await.unwrap());
    // The record is purged, and `transact` inserts its own.
    run(&mut database.connect().await, "UPDATE oncegate.records SET expires_at = 1, purge_at = 1").await;
    assert_eq!(store.purge(10).await.unwrap(), 1);
    assert!(!pay(&transactor, "order-1", 500).await.unwrap().is_replayed());
    let late = completes(stale, Completion::Replayable(response(b"late")));
    assert_eq!(store.apply(record("order-1"), late).await.unwrap(), Outcome::Fenced);
    assert!(pay(&transactor, "order-1", 500).await.unwrap().is_replayed());
}

/// A direct call of the contract for this record.
fn complete_reserved(record: RecordId, transaction: i64) -> String {
    format!(
        "SELECT oncegate.complete_reserved({}, {transaction}, '\\x{}', oncegate.response(200, null, null, 'here'), 60000, \
         '\\x{}', 'by hand')",
        sql_id(record),
        "01".repeat(33),
        "01".repeat(8)
    )
}

async fn reserve(connection: &mut PgConnection, record: RecordId) -> Option<i64> {
    let sql = format!(
        "SELECT transaction FROM oncegate.reserve_or_claim({}, '\\x{}', '\\x{}', 60000, 60000)",
        sql_id(record),
        "01".repeat(16),
        "01".repeat(33)
    );
    sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(connection).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_appears_in_between_is_never_overwritten() {
    let (database, _, transactor, store) = world(2).await;
    let mut mine = database.connect().await;
    // A rollback to a savepoint releases the lock. A record that exists by then counts, completed or not.
    for (order, completed) in [("order-1", true), ("order-2", false)] {
        run(&mut mine, "BEGIN; SAVEPOINT before").await;
        let transaction = reserve(&mut mine, record(order)).await.unwrap();
        run(&mut mine, "ROLLBACK TO before; INSERT INTO payments (cents) VALUES (1)").await;
        if completed {
            pay(&transactor, order, 500).await.unwrap();
        } else {
            store.apply(record(order), claims_of(1, 500)).await.unwrap();
        }
        let before = store.lookup(record(order)).await.unwrap();
        let error = try_run(&mut mine, &complete_reserved(record(order), transaction)).await.unwrap_err();
        assert_eq!(sqlstate(&error), "OG001");
        run(&mut mine, "COMMIT").await;
        assert_eq!(store.lookup(record(order)).await.unwrap(), before);
    }
    // Under an old snapshot the record is invisible. It is not overwritten either.
    run(&mut mine, "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM payments").await;
    pay(&transactor, "order-3", 500).await.unwrap();
    let transaction = reserve(&mut mine, record("order-3")).await.unwrap();
    let error = try_run(&mut mine, &complete_reserved(record("order-3"), transaction)).await.unwrap_err();
    assert_eq!(sqlstate(&error), "40001");
    run(&mut mine, "ROLLBACK").await;
    assert!(pay(&transactor, "order-3", 500).await.unwrap().is_replayed());
    assert_eq!(database.paid().await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_commits_on_its_own_leaves_an_unknown_record() {
    let (database, _, transactor, store) = world(1).await;
    for (order, ends) in [("order-1", "COMMIT"), ("order-2", "COMMIT; BEGIN")] {
        let ended = transactor.transact(&scope(), order, &500_i64, async |connection| {
            let charge = insert(&mut *connection, 500).await?;
            run(connection, ends).await;
            Ok(charge)
        });
        let error = ended.await.unwrap_err();
        assert!(matches!(error, TransactError::Fenced { .. }), "{error:?}");
        // Its payment is committed, and no later call repeats it.
        let error = pay(&transactor, order, 500).await.unwrap_err();
        assert!(matches!(error, TransactError::Unknown { .. }), "{error:?}");
        let record = store.lookup(record(order)).await.unwrap().unwrap();
        assert_eq!(record.state, State::Unknown);
    }
    assert_eq!(database.paid().await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reservation_ends_with_its_transaction() {
    let (database, ..) = world(1).await;
    let (mut mine, id) = (database.connect().await, record("order-1"));
    run(&mut mine, "BEGIN").await;
    let transaction = reserve(&mut mine, id).await.unwrap();
    run(&mut mine, "ROLLBACK; BEGIN").await;
    let error = try_run(&mut mine, &complete_reserved(id, transaction)).await.unwrap_err();
    assert_eq!(sqlstate(&error), "OG001");
    run(&mut mine, "ROLLBACK").await;
    // A transaction cannot use the reservation of another one.
    run(&mut mine, "BEGIN").await;
    let transaction = reserve(&mut mine, id).await.unwrap();
    let mut other = database.connect().await;
    assert_eq!(reserve(&mut other, id).await, None);
    let error = try_run(&mut other, &complete_reserved(id, transaction)).await.unwrap_err();
    assert_eq!(sqlstate(&error), "OG001");
    // The right transaction with a wrong argument.
    let call = complete_reserved(id, transaction);
    let operation = "x".repeat(257);
    for (right, wrong) in [
        ("60000", "0"),
        ("60000", "34560000001"),
        (&*"01".repeat(33), "01"),
        (&*format!("'\\x{}', 'by hand'", "01".repeat(8)), "'\\x01', 'by hand'"),
        ("'by hand'", &*format!("'{operation}'")),
        ("'by hand'", "null"),
        ("'by hand'", "'by hand', '\\x01'"),
        ("oncegate.response(200, null, null, 'here')", "null"),
        ("oncegate.response(200, null, null, 'here')", "'\\x02000000000000'"),
    ] {
        run(&mut mine, "SAVEPOINT before").await;
        let wrong = call.replace(right, wrong);
        assert_ne!(wrong, call);
        let error = try_run(&mut mine, &wrong).await.expect_err(&wrong);
        assert_eq!(sqlstate(&error), "22023", "{wrong}");
        run(&mut mine, "ROLLBACK TO before").await;
    }
    run(&mut mine, &complete_reserved(id, transaction)).await;
    let error = try_run(&mut mine, &complete_reserved(id, transaction)).await.unwrap_err();
    assert_eq!(sqlstate(&error), "OG001", "a second completion succeeded");
    for wrong in [
        "SELECT oncegate.reserve_or_claim(null, '\\x01', '\\x01', 60000, 60000)".to_owned(),
        "SELECT oncegate.reserve_or_claim('\\x01', '\\x01', '\\x01', 60000, 60000)".to_owned(),
        complete_reserved(id, 0),
        complete_reserved(id, 1).replace("60000", "0"),
        complete_reserved(id, 1).replace("60000", "null"),
        complete_reserved(id, 1).replace(&"01".repeat(33), "01"),
        complete_reserved(id, 1).replace("oncegate.response(200, null, null, 'here')", "null"),
        complete_reserved(id, 1).replace("oncegate.response(200, null, null, 'here')", "'\\x02000000000000'"),
    ] {
        let error = try_run(&mut database.connect().await, &wrong).await.unwrap_err();
        assert_eq!(sqlstate(&error), "22023", "{wrong}");
        let names = ["id ", "attempt ", "fingerprint ", "retention_ms ", "response ", "transaction "];
        assert!(names.iter().any(|name| error.to_string().contains(&format!("oncegate: {name}"))), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_is_notified_when_the_transaction_commits() {
    let (database, _, transactor, store) = world(2).await;
    let open = start_held_call(&transactor, "order-1", false).await;
    let changed = store.changed(record("order-1"));
    let watched = "SELECT count(*) AS count FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database \
                   WHERE l.locktype = 'advisory' AND l.mode = 'ShareLock' AND d.datname = current_database()";
    let mut admin = database.connect().await;
    let until = tokio::time::Instant::now() + LONG;
    while try_run(&mut admin, watched).await.unwrap()[0].get::<i64, _>("count") == 0 {
        assert!(tokio::time::Instant::now() < until, "no session watches the record");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    open.go_on.notify_one();
    tokio::time::timeout(LONG, changed).await.expect("no notification");
    open.call.await.unwrap().unwrap();
    assert!(matches!(store.apply(record("order-1"), claims_of(1, 500)).await.unwrap(), Outcome::Replay(_)));
}
