//! Business rows, claim and result in one transaction, with `transact` as an application calls it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use oncegate_core::{ErrorChain, IdempotencyKey, Scope, StoreErrorKind};
use oncegate_postgres::{Isolation, RunError, TransactError, TransactOutcome, Transactor};
use serde::{Deserialize, Serialize};
use sqlx::postgres::PgConnection;
use sqlx::{Connection as _, PgPool};
use tokio::sync::{Barrier, Notify};

use crate::support::{Database, run};

/// A time that nothing here exceeds, even on a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) fn key(key: &str) -> IdempotencyKey {
    IdempotencyKey::new(key.as_bytes()).unwrap()
}

pub(crate) fn scope() -> Scope<'static> {
    Scope::caller("customer", "ada").with_operation("POST /payments")
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Charge {
    pub(crate) id: i64,
    pub(crate) cents: i64,
}

pub(crate) async fn insert(connection: &mut PgConnection, cents: i64) -> Result<Charge, sqlx::Error> {
    let id = sqlx::query_scalar("INSERT INTO payments (cents) VALUES ($1) RETURNING id")
        .bind(cents)
        // Not prepared, as a pooler requires.
        .persistent(false)
        .fetch_one(connection)
        .await?;
    Ok(Charge { id, cents })
}

pub(crate) async fn pay(
    transactor: &Transactor,
    order: &str,
    cents: i64,
) -> Result<TransactOutcome<Charge>, TransactError> {
    let paid =
        transactor.transact(&scope(), order, &cents, async |connection| Ok(insert(connection, cents).await?));
    paid.await
}

/// A database, a pool with the given number of connections, and a transactor.
async fn world(connections: u32) -> (Database, PgPool, Transactor) {
    let database = Database::fresh().await;
    let pool = database.payments(connections).await;
    let transactor = Transactor::new(pool.clone()).with_statement_timeout(LONG).unwrap();
    (database, pool, transactor)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_gets_the_first_result_and_another_input_is_refused() {
    let (database, _, transactor) = world(2).await;
    let first = pay(&transactor, "order-1", 500).await.unwrap();
    assert_eq!(first, TransactOutcome::Executed(Charge { id: 1, cents: 500 }));
    let again = pay(&transactor, "order-1", 500).await.unwrap();
    assert_eq!(again, TransactOutcome::Replayed(Charge { id: 1, cents: 500 }));
    let other = pay(&transactor, "order-1", 900).await.unwrap_err();
    assert!(matches!(other, TransactError::Mismatch), "{other:?}");
    let invalid = pay(&transactor, &"x".repeat(256), 500).await.unwrap_err();
    let text = ErrorChain(&invalid).to_string();
    assert_eq!(text, "the key cannot be used: the key has 256 bytes; at most 255 are allowed");
    // The same key of another caller or for another purpose is another key.
    for scope in [Scope::caller("customer", b"eve"), Scope::caller("customer", b"ada")] {
        let other = transactor.transact(&scope, "order-1", &500, async |_| Ok(7)).await.unwrap();
        assert_eq!(other, TransactOutcome::Executed(7));
    }
    assert_eq!(database.paid().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_concurrent_calls_make_one_payment() {
    let isolations = [None, Some(Isolation::RepeatableRead), Some(Isolation::Serializable)];
    for (isolation, calls) in isolations.into_iter().zip([200, 40, 40]) {
        let (database, _, transactor) = world(12).await;
        let transactor = transactor.with_wait(LONG).unwrap();
        let transactor = isolation.map_or(transactor.clone(), |level| transactor.with_isolation(level));
        let calls: Vec<_> = (0..calls)
            .map(|_| {
                let transactor = transactor.clone();
                tokio::spawn(async move { pay(&transactor, "order-1", 500).await.unwrap() })
            })
            .collect();
        let (mut executed, mut replayed) = (0, 0);
        for call in calls {
            match call.await.unwrap() {
                TransactOutcome::Executed(charge) => executed += charge.cents,
                TransactOutcome::Replayed(charge) => replayed += charge.cents,
            }
        }
        assert_eq!((executed, replayed % 500), (500, 0), "{isolation:?}");
        assert_eq!(database.paid().await, 1, "{isolation:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_duplicate_gets_in_progress_at_once_or_waits_for_the_result() {
    let (database, _, transactor) = world(4).await;
    let (started, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let first = tokio::spawn({
        let (transactor, started, go_on) = (transactor.clone(), started.clone(), go_on.clone());
        async move {
            let run = async |connection: &mut PgConnection| {
                let charge = insert(connection, 500).await?;
                started.notify_one();
                go_on.notified().await;
                Ok(charge)
            };
            transactor.transact(&scope(), "order-1", &500_i64, run).await
        }
    });
    started.notified().await;
    let duplicate = pay(&transactor, "order-1", 500).await.unwrap_err();
    assert!(matches!(duplicate, TransactError::InProgress { .. }), "{duplicate:?}");
    let waits = tokio::spawn({
        let transactor = transactor.clone().with_wait(LONG).unwrap();
        async move { pay(&transactor, "order-1", 500).await }
    });
    // Calls with other keys are not delayed.
    assert!(!pay(&transactor, "order-2", 500).await.unwrap().is_replayed());
    go_on.notify_one();
    let first = first.await.unwrap().unwrap();
    assert_eq!(waits.await.unwrap().unwrap(), TransactOutcome::Replayed(first.into_inner()));
    assert_eq!(database.paid().await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_fails_leaves_nothing_and_frees_the_key() {
    #[derive(Debug)]
    struct Declined;
    impl std::fmt::Display for Declined {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("declined")
        }
    }
    impl std::error::Error for Declined {}

    let (database, _, transactor) = world(1).await;
    let failed = transactor.transact(&scope(), "order-1", &500_i64, async |connection| {
        insert(connection, 500).await?;
        Err::<Charge, RunError>(Declined.into())
    });
    let Err(TransactError::Failed(error)) = failed.await else { panic!("it fails") };
    assert!(error.is::<Declined>(), "{error}");
    assert_eq!(database.paid().await, 0);
    // Another input is accepted, too, because nothing was stored.
    assert!(!pay(&transactor, "order-1", 900).await.unwrap().is_replayed());

    // A refusal that the run returns as a value is stored.
    let runs = AtomicU32::new(0);
    for replayed in [false, true] {
        let refused = transactor.transact(&scope(), "order-2", &1, async |_| {
            runs.fetch_add(1, Ordering::SeqCst);
            Ok(Err::<Charge, _>("declined".to_owned()))
        });
        let refused = refused.await.unwrap();
        assert_eq!(refused.is_replayed(), replayed);
        assert_eq!(refused.into_inner(), Err("declined".to_owned()));
    }
    assert_eq!((runs.into_inner(), database.paid().await), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_that_the_run_ignored_commits_nothing() {
    let (database, _, transactor) = world(1).await;
    let failed = transactor.transact(&scope(), "order-1", &1, async |connection| {
        insert(&mut *connection, 500).await?;
        let refused = sqlx::query("INSERT INTO payments (id, cents) VALUES (1, 1)").execute(connection).await;
        assert!(refused.is_err());
        Ok("paid".to_owned())
    });
    let error = failed.await.unwrap_err();
    assert!(matches!(error, TransactError::Failed(_)), "{error:?}");
    assert_eq!(database.paid().await, 0);

    // In its own savepoint, an error may be ignored.
    let done = transactor.transact(&scope(), "order-1", &1, async |connection| {
        insert(&mut *connection, 500).await?;
        let mut savepoint = connection.begin().await?;
        let twice = sqlx::query("INSERT INTO payments (id, cents) SELECT id, 1 FROM payments");
        assert!(twice.execute(&mut *savepoint).await.is_err());
        savepoint.rollback().await?;
        let mut savepoint = connection.begin().await?;
        insert(&mut savepoint, 700).await?;
        savepoint.commit().await?;
        Ok(())
    });
    assert_eq!(done.await.unwrap(), TransactOutcome::Executed(()));
    assert_eq!(database.paid().await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deferred_constraint_that_fails_is_not_a_lost_commit() {
    let (database, pool, transactor) = world(1).await;
    // The server reports an error before it has ended the transaction.
    let transactor = transactor.with_wait(LONG).unwrap();
    let unique = "ALTER TABLE payments ADD UNIQUE (cents) DEFERRABLE INITIALLY DEFERRED";
    run(&mut pool.acquire().await.unwrap(), unique).await;
    pay(&transactor, "order-1", 500).await.unwrap();
    let error = pay(&transactor, "order-2", 500).await.unwrap_err();
    let TransactError::Failed(error) = error else { panic!("{error:?}") };
    assert!(error.to_string().contains("payments_cents_key"), "{error}");
    assert!(!pay(&transactor, "order-2", 700).await.unwrap().is_replayed());
    assert_eq!(database.paid().await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deferred_trigger_that_fails_rolls_back_with_any_sqlstate() {
    let (database, pool, transactor) = world(1).await;
    // The server reports an error before it has ended the transaction.
    let transactor = transactor.with_wait(LONG).unwrap();
    let trigger = "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF NEW.cents = 500 THEN RAISE EXCEPTION 'not so' USING ERRCODE = 'AB001'; END IF;
            RETURN NEW;
         END $$;
         CREATE CONSTRAINT TRIGGER late AFTER INSERT ON payments DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION refuse()";
    run(&mut pool.acquire().await.unwrap(), trigger).await;
    let error = pay(&transactor, "order-1", 500).await.unwrap_err();
    let TransactError::Failed(error) = error else { panic!("{error:?}") };
    assert!(error.to_string().contains("not so"), "{error}");
    assert!(!pay(&transactor, "order-1", 700).await.unwrap().is_replayed());
    assert_eq!(database.paid().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_ends_the_transaction_itself_is_an_error() {
    let (database, _, transactor) = world(1).await;
    let ended = transactor.transact(&scope(), "order-1", &1, async |connection| {
        insert(&mut *connection, 500).await?;
        run(connection, "ROLLBACK").await;
        Ok(())
    });
    let error = ended.await.unwrap_err();
    assert!(matches!(error, TransactError::Fenced { .. }), "{error:?}");
    assert_eq!(database.paid().await, 0);
    assert!(!pay(&transactor, "order-1", 500).await.unwrap().is_replayed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stored_result_of_another_type_is_an_error_and_not_a_second_run() {
    let (_database, _, transactor) = world(1).await;
    pay(&transactor, "order-1", 500).await.unwrap();
    let other = transactor.transact(&scope(), "order-1", &500, async |_| -> Result<String, RunError> {
        panic!("it must not run")
    });
    let error = other.await.unwrap_err();
    assert!(matches!(error, TransactError::Undecodable { .. }), "{error:?}");
    // A stored value may be customer data, so no error text contains it.
    let secret = async |_: &mut sqlx::PgConnection| Ok::<_, RunError>("4111-1111".to_owned());
    transactor.transact(&scope(), "order-3", &1, secret).await.unwrap();
    let other = transactor.transact(&scope(), "order-3", &1, async |_| Ok::<u64, RunError>(1));
    let error = other.await.unwrap_err();
    assert!(!format!("{} {error:?}", ErrorChain(&error)).contains("4111"), "{error:?}");
    // A value that cannot be stored rolls back.
    let map = std::collections::HashMap::from([((1, 2), 3)]);
    let error = transactor.transact(&scope(), "order-2", &map, async |_| Ok(())).await.unwrap_err();
    assert!(matches!(error, TransactError::Unserializable(_)), "{error:?}");
}

/// An error as `thiserror` generates it, with and without `#[error(transparent)]`.
#[derive(Debug)]
enum Wrapped {
    Source(sqlx::Error),
    Transparent(sqlx::Error),
}

impl std::fmt::Display for Wrapped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the database")
    }
}

impl std::error::Error for Wrapped {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Source(error) => Some(error),
            Self::Transparent(error) => error.source(),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrapped_serialization_failure_is_run_again() {
    let (database, pool, transactor) = world(3).await;
    sqlx::query("INSERT INTO payments (cents) VALUES (0)").execute(&pool).await.unwrap();
    let transactor = transactor.with_isolation(Isolation::RepeatableRead);
    let wraps: [fn(sqlx::Error) -> RunError; 3] =
        [RunError::from, |error| Wrapped::Source(error).into(), |error| Wrapped::Transparent(error).into()];
    for (number, wrap) in wraps.into_iter().enumerate() {
        let runs = AtomicU32::new(0);
        let added = transactor.transact(&scope(), format!("order-{number}"), &1, async |connection| {
            let run_number = runs.fetch_add(1, Ordering::SeqCst) + 1;
            let cents: i64 = sqlx::query_scalar("SELECT cents FROM payments WHERE id = 1")
                .fetch_one(&mut *connection)
                .await?;
            if run_number == 1 {
                // Another transaction changes the row after our snapshot.
                sqlx::query("UPDATE payments SET cents = cents + 10 WHERE id = 1").execute(&pool).await?;
            }
            let update = sqlx::query("UPDATE payments SET cents = $1 WHERE id = 1").bind(cents + 1);
            update.execute(connection).await.map_err(wrap)?;
            Ok(cents + 1)
        });
        let expected = 11 * (number as i64 + 1);
        assert_eq!(added.await.unwrap(), TransactOutcome::Executed(expected), "{number}");
        assert_eq!(runs.into_inner(), 2, "{number}");
    }
    // The number of runs is bounded.
    let runs = AtomicU32::new(0);
    let limited = transactor.with_max_attempts(3).unwrap();
    let never = limited.transact(&scope(), "order-9", &1, async |connection| {
        runs.fetch_add(1, Ordering::SeqCst);
        sqlx::query("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$")
            .execute(connection)
            .await?;
        Ok(())
    });
    let error = never.await.unwrap_err();
    assert!(matches!(error, TransactError::Failed(_)), "{error:?}");
    assert_eq!((runs.into_inner(), database.paid().await), (3, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadlock_is_resolved() {
    let (_database, pool, transactor) = world(4).await;
    sqlx::query("INSERT INTO payments (cents) VALUES (0), (0)").execute(&pool).await.unwrap();
    let both = Arc::new(Barrier::new(2));
    let calls = [[1_i64, 2], [2, 1]].map(|order| {
        let (transactor, both) = (transactor.clone(), both.clone());
        tokio::spawn(async move {
            let runs = AtomicU32::new(0);
            let done = transactor.transact(&scope(), format!("{order:?}"), &order, async |connection| {
                let run_number = runs.fetch_add(1, Ordering::SeqCst) + 1;
                for (step, id) in order.into_iter().enumerate() {
                    let update = sqlx::query("UPDATE payments SET cents = cents + 1 WHERE id = $1").bind(id);
                    update.execute(&mut *connection).await?;
                    if (run_number, step) == (1, 0) {
                        both.wait().await;
                    }
                }
                Ok(())
            });
            done.await.unwrap();
            runs.into_inner()
        })
    });
    let mut runs = 0;
    for call in calls {
        runs += call.await.unwrap();
    }
    assert!(runs >= 3, "{runs}");
    let cents: Vec<i64> = sqlx::query_scalar("SELECT cents FROM payments").fetch_all(&pool).await.unwrap();
    assert_eq!(cents, [2, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_and_values_with_special_characters_are_data() {
    let (database, _, transactor) = world(1).await;
    let all: Vec<u8> = (0..=254).collect();
    let hostile: [&[u8]; 5] = [b"'", b"'); DROP TABLE payments; --", b"$1", b"\\x00", &all];
    for bytes in hostile {
        let text = format!("{}\0\u{2028}\"\\", String::from_utf8_lossy(bytes));
        let parts = [bytes, b"\0"];
        let scope = Scope::caller("customer'", bytes).with_operation_parts(&parts);
        let key = IdempotencyKey::new(bytes).unwrap();
        for replayed in [false, true] {
            let done = transactor.transact(&scope, &key, &text, async |_| Ok(text.clone())).await.unwrap();
            assert_eq!((done.is_replayed(), &done.into_inner()), (replayed, &text));
        }
    }
    assert_eq!(database.paid().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_ends_in_the_middle_leaves_nothing() {
    let (database, pool, transactor) = world(2).await;
    let failed = transactor.transact(&scope(), "order-1", &500_i64, async |connection| {
        let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut *connection).await?;
        insert(&mut *connection, 500).await?;
        sqlx::query("SELECT pg_terminate_backend($1)").bind(pid).execute(&pool).await?;
        Ok(insert(connection, 500).await?)
    });
    let error = failed.await.unwrap_err();
    assert!(matches!(error, TransactError::Failed(_)), "{error:?}");
    let done = pay(&transactor.with_wait(LONG).unwrap(), "order-1", 500).await.unwrap();
    assert!(!done.is_replayed());
    assert_eq!(database.paid().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_without_a_free_connection_is_reported_as_such() {
    let (database, pool, _) = world(1).await;
    let short = sqlx::postgres::PgPoolOptions::new()
        .max_connections(1)
        .acquire_timeout(Duration::from_millis(200))
        .connect_lazy_with((*pool.connect_options()).clone());
    let _held = loop {
        // The first connection may take longer than the bound on a busy machine.
        if let Ok(held) = short.acquire().await {
            break held;
        }
    };
    let error = pay(&Transactor::new(short.clone()), "order-1", 500).await.unwrap_err();
    let TransactError::Store(error) = error else { panic!("{error:?}") };
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(error.to_string().contains("no connection to PostgreSQL in time: "), "{error}");
    assert_eq!(database.paid().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_needs_no_more_rights_than_the_documentation_says() {
    let (database, pool, _) = world(1).await;
    let role = format!("shop_{}", database.name);
    let grants = format!(
        "CREATE ROLE {role}; GRANT ALL ON payments, payments_id_seq TO {role}; GRANT USAGE ON SCHEMA oncegate TO {role}; \
         GRANT EXECUTE ON FUNCTION oncegate.reserve_or_claim, oncegate.complete_reserved, oncegate.claim, \
         oncegate.complete, oncegate.lookup TO {role}"
    );
    run(&mut database.connect().await, &grants).await;
    run(&mut pool.acquire().await.unwrap(), &format!("SET ROLE {role}")).await;
    let transactor = Transactor::new(pool);
    for replayed in [false, true] {
        assert_eq!(pay(&transactor, "order-1", 500).await.unwrap().is_replayed(), replayed);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_dropped_or_panics_is_rolled_back() {
    let (database, _, transactor) = world(1).await;
    for panics in [false, true] {
        let started = Arc::new(Notify::new());
        let call = tokio::spawn({
            let (transactor, started) = (transactor.clone(), started.clone());
            async move {
                let run = async |connection: &mut PgConnection| {
                    insert(connection, 500).await?;
                    started.notify_one();
                    assert!(!panics, "on purpose");
                    std::future::pending().await
                };
                transactor.transact::<_, _, (), _>(&scope(), "order-1", &1, run).await
            }
        });
        started.notified().await;
        if !panics {
            call.abort();
        }
        let error = call.await.unwrap_err();
        assert_eq!(error.is_panic(), panics);
    }
    // Uses the pool's only connection.
    assert!(!pay(&transactor.with_wait(LONG).unwrap(), "order-1", 500).await.unwrap().is_replayed());
    assert_eq!(database.paid().await, 1);
}
