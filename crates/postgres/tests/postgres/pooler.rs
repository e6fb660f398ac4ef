//! A real PgBouncer, which gives each transaction another session.

use std::time::Duration;

use oncegate_core::{Command, Completion, Outcome, Release, Store as _, StoreError};
use oncegate_postgres::{PostgresOptions, PostgresStore, TransactOutcome, Transactor};
use oncegate_servers::PgBouncer;
use oncegate_testkit::conformance::check_concurrent_claims;
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::runtime::Runtime;

use crate::support::{Database, claims, completes, id, renews, response, run, token};
use crate::transact::{LONG, insert, pay, scope};

/// So few sessions that clients share them all the time.
const SESSIONS: u16 = 3;

pub(crate) async fn bouncer(database: &Database, sessions: u16) -> PgBouncer {
    let server = database.server.clone();
    tokio::task::spawn_blocking(move || PgBouncer::start(&server, sessions)).await.unwrap().unwrap()
}

pub(crate) fn options(bouncer: &PgBouncer, database: &Database) -> PostgresOptions {
    let url = format!("{}&pooler=transaction", bouncer.url_of(&database.name));
    let timeout = Duration::from_secs(20);
    let options = PostgresOptions::from_url(&url).unwrap().with_command_timeout(timeout).unwrap();
    options.with_connect_timeout(timeout).unwrap().with_statement_timeout(timeout).unwrap()
}

/// The pool of an application.
async fn application(bouncer: &PgBouncer, database: &Database) -> PgPool {
    drop(database.payments(1).await);
    let url = bouncer.url_of(&database.name);
    let options: sqlx::postgres::PgConnectOptions = url.parse().unwrap();
    let options = options.extra_float_digits(None);
    PgPoolOptions::new().max_connections(20).acquire_timeout(LONG).connect_with(options).await.unwrap()
}

/// Behind a pooler the store cannot set anything when a session starts, so the defaults of the role and the database apply. Above
/// READ COMMITTED, claims of different keys conflict.
#[tokio::test(flavor = "multi_thread")]
async fn a_default_of_serializable_fails_no_command() {
    let database = Database::fresh().await;
    let serializable =
        format!("ALTER DATABASE {} SET default_transaction_isolation = 'serializable'", database.name);
    run(&mut database.connect().await, &serializable).await;
    let bouncer = bouncer(&database, SESSIONS).await;
    let store = std::sync::Arc::new(PostgresStore::open(options(&bouncer, &database)).await.unwrap());
    let tasks: Vec<_> = (0..200_u8)
        .map(|number| {
            let store = store.clone();
            tokio::spawn(async move {
                for round in 0..5 {
                    let owner = token(&store.apply(id(number), claims(round)).await?);
                    assert!(matches!(store.apply(id(number), renews(owner)).await?, Outcome::Renewed { .. }));
                    let release = Command::Release(Release { token: owner, retention: LONG });
                    assert_eq!(store.apply(id(number), release).await?, Outcome::Released);
                }
                Ok::<_, StoreError>(())
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_store_works_and_batches_behind_a_pooler() {
    let database = Database::fresh().await;
    let bouncer = bouncer(&database, SESSIONS).await;
    let store = PostgresStore::open(options(&bouncer, &database)).await.unwrap();
    let store = std::sync::Arc::new(store);
    let tasks: Vec<_> = (0..200_u8)
        .map(|number| {
            let store = store.clone();
            tokio::spawn(async move {
                let owner = token(&store.apply(id(number), claims(1)).await.unwrap());
                let complete = completes(owner, Completion::Replayable(response(b"paid")));
                assert_eq!(store.apply(id(number), complete).await.unwrap(), Outcome::Completed);
                let again = store.apply(id(number), claims(2)).await.unwrap();
                assert_eq!(again, Outcome::Replay(response(b"paid")));
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
}

#[test]
fn exactly_one_of_many_concurrent_claims_executes() {
    let runtime = Runtime::new().unwrap();
    let (_database, _bouncer, store) = runtime.block_on(async {
        let database = Database::fresh().await;
        let bouncer = bouncer(&database, SESSIONS).await;
        let store = PostgresStore::open(options(&bouncer, &database)).await.unwrap();
        (database, bouncer, store)
    });
    check_concurrent_claims(&store, 10, 8);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_concurrent_transactions_of_one_key_make_one_payment() {
    let database = Database::fresh().await;
    let bouncer = bouncer(&database, SESSIONS).await;
    let pool = application(&bouncer, &database).await;
    let transactor = Transactor::new(pool)
        .with_transaction_pooler(true)
        .with_statement_timeout(LONG)
        .unwrap()
        .with_wait(LONG)
        .unwrap();
    let calls: Vec<_> = (0..100)
        .map(|number| {
            let transactor = transactor.clone();
            // Other keys in between, so that sessions change clients.
            let order = if number % 2 == 0 { "order".to_owned() } else { format!("order-{number}") };
            tokio::spawn(async move { pay(&transactor, &order, 500).await.unwrap() })
        })
        .collect();
    let mut executed = 0;
    for call in calls {
        executed += i64::from(!call.await.unwrap().is_replayed());
    }
    assert_eq!((executed, database.paid().await), (51, 51));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_or_dropped_run_leaves_nothing_in_a_shared_session() {
    let database = Database::fresh().await;
    let bouncer = bouncer(&database, 1).await;
    let pool = application(&bouncer, &database).await;
    let transactor = Transactor::new(pool)
        .with_transaction_pooler(true)
        .with_statement_timeout(LONG)
        .unwrap()
        .with_wait(LONG)
        .unwrap();
    let scope = scope();
    let failed = transactor.transact(&scope, "order-1", &1, async |connection| {
        insert(connection, 500).await?;
        Err::<(), _>("no".into())
    });
    assert!(failed.await.is_err());
    let never = transactor.transact(&scope, "order-1", &1, async |connection| {
        insert(connection, 500).await?;
        std::future::pending::<()>().await;
        Ok(())
    });
    assert!(tokio::time::timeout(Duration::from_secs(1), never).await.is_err());
    let done = transactor.transact(&scope, "order-1", &1, async |connection| {
        insert(connection, 700).await?;
        Ok(7)
    });
    assert_eq!(done.await.unwrap(), TransactOutcome::Executed(7));
    assert_eq!(database.paid().await, 1);
}
