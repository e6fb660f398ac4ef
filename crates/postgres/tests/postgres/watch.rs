//! Notifications: the database reports changes to callers that wait for a record. No test here polls, so a result proves that a
//! notification arrived.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use oncegate_core::{Command, Completion, Outcome, RecordId, Release, Resolution, Resolve, Store as _};
use oncegate_postgres::{PostgresOptions, PostgresStore};
use sqlx::Row as _;
use sqlx::postgres::{PgConnection, PgListener};

use crate::support::{Database, claims, completes, id, response, run, sql_id, token, try_run};

const NOTIFICATION_TIMEOUT: Duration = Duration::from_secs(60);

/// The number of watched records of this database.
async fn watched(admin: &mut PgConnection) -> i64 {
    let count = "SELECT count(*) AS count FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database \
                 WHERE l.locktype = 'advisory' AND l.mode = 'ShareLock' AND d.datname = current_database()";
    try_run(admin, count).await.unwrap()[0].get("count")
}

async fn until_watched(admin: &mut PgConnection, count: i64) {
    let deadline = Instant::now() + NOTIFICATION_TIMEOUT;
    loop {
        let found = watched(admin).await;
        if found == count {
            return;
        }
        assert!(Instant::now() < deadline, "{found} are watched and not {count}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn notified(changed: impl Future<Output = ()>) {
    tokio::time::timeout(NOTIFICATION_TIMEOUT, changed).await.expect("no notification");
}

fn is_notified(changed: &mut Pin<Box<dyn Future<Output = ()> + Send + '_>>) -> bool {
    changed.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

/// The next notification of this session.
async fn next(listener: &mut PgListener) -> String {
    let notification =
        tokio::time::timeout(NOTIFICATION_TIMEOUT, listener.recv()).await.expect("a notification").unwrap();
    notification.payload().to_owned()
}

fn releases(outcome: &Outcome) -> Command {
    Command::Release(Release { token: token(outcome), retention: Duration::from_secs(3600) })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_is_notified_of_every_end_in_another_process() {
    let database = Database::fresh().await;
    let (owner, other) = (database.store().await, database.store().await);
    let mut admin = database.connect().await;
    let mut granted = Vec::new();
    for number in 1..=5 {
        granted.push(owner.apply(id(number), claims(1)).await.unwrap());
    }
    assert_eq!(watched(&mut admin).await, 0, "a session is watching");
    // Two callers wait for the first record.
    let again = other.changed(id(1));
    let mut waiting: Vec<_> = (1..=5).map(|number| other.changed(id(number))).collect();
    until_watched(&mut admin, 5).await;

    owner.apply(id(1), completes(token(&granted[0]), Completion::Tombstone)).await.unwrap();
    notified(again).await;
    notified(waiting.remove(0)).await;
    owner.apply(id(2), releases(&granted[1])).await.unwrap();
    notified(waiting.remove(0)).await;
    let resolve = Resolve {
        resolution: Resolution::Release,
        retention: Duration::from_secs(3600),
        force: true,
        amend: false,
        actor: "operator".to_owned(),
        reason: "found".to_owned(),
    };
    owner.apply(id(3), Command::Resolve(resolve)).await.unwrap();
    notified(waiting.remove(0)).await;

    // In an application's transaction, at its commit and not before.
    let mut service = database.connect().await;
    run(&mut service, "BEGIN ISOLATION LEVEL REPEATABLE READ").await;
    run(&mut service, &format!("SELECT oncegate.complete({}, {})", sql_id(id(4)), token(&granted[3]).get()))
        .await;
    run(&mut admin, "SELECT 1").await;
    assert!(!is_notified(&mut waiting[0]));
    run(&mut service, "COMMIT").await;
    notified(waiting.remove(0)).await;

    // Many at the same time.
    let many: Vec<_> = (100..160).map(|number| (id(number), other.changed(id(number)))).collect();
    for (id, _) in &many {
        granted.push(owner.apply(*id, claims(2)).await.unwrap());
    }
    until_watched(&mut admin, 61).await;
    let ends = many.iter().zip(&granted[5..]).map(|((id, _), granted)| {
        owner.apply(*id, completes(token(granted), Completion::Replayable(response(b"paid"))))
    });
    for end in ends.collect::<Vec<_>>() {
        end.await.unwrap();
    }
    for (_, changed) in many {
        notified(changed).await;
    }
    assert!(!is_notified(&mut waiting[0]), "nothing happened to this one");
    until_watched(&mut admin, 1).await;
}

/// One statement completes several records. Only the watched ones are notified of, and no lock of the check is left behind.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_completions_notifies_of_its_watched_records_only() {
    let database = Database::fresh().await;
    let store = database.store().await;
    let (mut admin, mut service) = (database.connect().await, database.connect().await);
    let mut listener = PgListener::connect(&database.url()).await.unwrap();
    listener.listen("oncegate_1").await.unwrap();
    let watch = format!("SELECT oncegate.watch(ARRAY[{}, {}])", sql_id(id(2)), sql_id(id(3)));
    run(&mut admin, &watch).await;
    let mut tokens = Vec::new();
    for number in 1..=4 {
        tokens.push(token(&store.apply(id(number), claims(1)).await.unwrap()));
    }
    let batch = format!(
        "BEGIN; SELECT oncegate.complete_many(ARRAY[{}, {}, {}, {}], ARRAY[{}, {}, {}, 1], array_fill('tombstone'::text, ARRAY[4]), \
         array_fill(null::bytea, ARRAY[4]), ARRAY[1000, 1000, 1000, 1000])",
        sql_id(id(1)),
        sql_id(id(2)),
        sql_id(id(3)),
        sql_id(id(4)),
        tokens[0],
        tokens[1],
        tokens[2]
    );
    run(&mut service, &batch).await;
    let locks = "SELECT count(*) AS count FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database \
                 WHERE l.locktype = 'advisory' AND d.datname = current_database()";
    let left = try_run(&mut admin, locks).await.unwrap()[0].get::<i64, _>("count");
    assert_eq!(left, 2, "only the two watches");
    run(&mut service, "COMMIT; NOTIFY oncegate_1, 'last'").await;
    let mut found = [next(&mut listener).await, next(&mut listener).await];
    found.sort();
    assert_eq!(found, [id(2).to_string(), id(3).to_string()]);
    assert_eq!(next(&mut listener).await, "last");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_waiter_and_a_dropped_store_leave_no_subscription() {
    let database = Database::fresh().await;
    let store = database.store().await;
    let mut admin = database.connect().await;
    let (one, two, other) = (store.changed(id(1)), store.changed(id(1)), store.changed(id(2)));
    until_watched(&mut admin, 2).await;
    drop((one, other));
    until_watched(&mut admin, 1).await;
    drop(two);
    until_watched(&mut admin, 0).await;
    let forgotten = Box::leak(Box::new(database.store().await));
    let _still_waits = forgotten.changed(id(3));
    until_watched(&mut admin, 1).await;
    forgotten.close().await;
    until_watched(&mut admin, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_notification_is_sent_without_a_waiter_or_if_it_is_disabled() {
    let database = Database::fresh().await;
    let mut admin = database.connect().await;
    let mut listener = PgListener::connect(&database.url()).await.unwrap();
    listener.listen("oncegate_1").await.unwrap();
    let store = database.store().await;
    let granted = store.apply(id(1), claims(1)).await.unwrap();
    let end = |granted: &Outcome| completes(token(granted), Completion::Tombstone);
    store.apply(id(1), end(&granted)).await.unwrap();
    run(&mut admin, "NOTIFY oncegate_1, 'first'").await;
    assert_eq!(next(&mut listener).await, "first");
    assert_eq!(watched(&mut admin).await, 0);

    // A session watches, as a service in another language would. Transactions that are to be prepared disable notifications.
    run(&mut admin, &format!("SELECT oncegate.watch(ARRAY[{}, {}])", sql_id(id(2)), sql_id(id(3)))).await;
    let granted = store.apply(id(2), claims(1)).await.unwrap();
    let mut service = database.connect().await;
    run(&mut service, "BEGIN; SET LOCAL oncegate.notify = 'off'").await;
    run(&mut service, &format!("SELECT oncegate.complete({}, {})", sql_id(id(2)), token(&granted).get()))
        .await;
    run(&mut service, "COMMIT").await;
    let granted = store.apply(id(3), claims(1)).await.unwrap();
    store.apply(id(3), end(&granted)).await.unwrap();
    assert_eq!(next(&mut listener).await, id(3).to_string());
    run(&mut admin, &format!("SELECT oncegate.unwatch(ARRAY[{}, {}])", sql_id(id(2)), sql_id(id(3)))).await;
    assert_eq!(watched(&mut admin).await, 0);
    // The check for watchers leaves nothing behind.
    let locks = "SELECT count(*) AS count FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database \
                 WHERE l.locktype = 'advisory' AND d.datname = current_database()";
    assert_eq!(try_run(&mut admin, locks).await.unwrap()[0].get::<i64, _>("count"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_session_is_replaced_and_wakes_waiters_for_missed_changes() {
    let database = Database::fresh().await;
    let store = database.store().await;
    let mut admin = database.connect().await;
    let granted = store.apply(id(1), claims(1)).await.unwrap();
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
               WHERE application_name = 'oncegate listener' AND datname = current_database()";
    for _ in 0..3 {
        let changed = store.changed(id(1));
        until_watched(&mut admin, 1).await;
        assert_eq!(try_run(&mut admin, end).await.unwrap().len(), 1, "one session for all");
        notified(changed).await;
        // Otherwise the next round would see the rest of this one.
        until_watched(&mut admin, 0).await;
    }
    // From then on, notifications work as before.
    let changed = store.changed(id(1));
    until_watched(&mut admin, 1).await;
    store.apply(id(1), completes(token(&granted), Completion::Tombstone)).await.unwrap();
    notified(changed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_number_of_watched_records_is_bounded() {
    let database = Database::fresh().await;
    let store = PostgresStore::open(database.options().with_pool_size(1).unwrap()).await.unwrap();
    let mut admin = database.connect().await;
    let waiting: Vec<_> = (0..200).map(|number| store.changed(id(number))).collect();
    until_watched(&mut admin, 64).await;
    drop(waiting);
    until_watched(&mut admin, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_a_transaction_pooler_the_store_does_not_listen() {
    let database = Database::fresh().await;
    let options = PostgresOptions::from_url(&format!("{}?pooler=transaction", database.url())).unwrap();
    let store = PostgresStore::open(options).await.unwrap();
    let granted = store.apply(id(1), claims(1)).await.unwrap();
    let mut changed = store.changed(id(1));
    store.apply(id(1), completes(token(&granted), Completion::Tombstone)).await.unwrap();
    assert!(!is_notified(&mut changed));
    let sessions = "SELECT 1 FROM pg_stat_activity \
                    WHERE application_name LIKE '%listener' AND datname = current_database()";
    assert!(try_run(&mut database.connect().await, sessions).await.unwrap().is_empty());
    assert!(matches!(store.apply(id(1), claims(2)).await.unwrap(), Outcome::Unreplayable));
}

/// A session that ends an attempt checks the lock of the watchers. In rare cases it checks it just when a session begins to
/// watch, and then the new watcher must be woken.
#[tokio::test(flavor = "multi_thread")]
async fn a_watcher_that_begins_during_a_change_is_woken_at_once() {
    let database = Database::fresh().await;
    let store = database.store().await;
    let mut service = database.connect().await;
    let key: i64 = {
        let sql = format!("SELECT oncegate.watch_key({}) AS key", sql_id(RecordId::from_bytes([9; 32])));
        try_run(&mut service, &sql).await.unwrap()[0].get("key")
    };
    run(&mut service, &format!("SELECT pg_advisory_lock({key})")).await;
    notified(store.changed(RecordId::from_bytes([9; 32]))).await;
}
