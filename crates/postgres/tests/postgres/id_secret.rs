//! Transactions of the application under an id secret: the same records as other programs with it, and none without it.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{
    ID_SECRET_RECORD, IdGuard, IdProblem, IdSecret, KeyTag, ListQuery, RecordId, Store as _, StoreError,
    StoreErrorKind,
};
use oncegate_postgres::{
    GuardClaim, GuardError, PostgresOptions, PostgresStore, RunError, TransactError, Transactor,
};
use oncegate_testkit::ManualClock;
use sqlx::postgres::PgConnection;
use tokio::sync::Notify;

use crate::support::{Database, run};
use crate::transact::{LONG, insert, key, pay, scope};

fn secret(byte: u8) -> IdSecret {
    IdSecret::from_bytes([byte; 32])
}

fn is_refused(error: &StoreError, why: &str) {
    assert_eq!(error.kind(), StoreErrorKind::Invalid, "{error:?}");
    assert!(error.is_unsent() && error.to_string().contains(why), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn transactions_with_the_secret_share_records_and_others_are_refused() {
    let database = Database::fresh().await;
    let pool = database.payments(3).await;
    let keyed = Transactor::new(pool.clone()).with_id_secret(secret(1));
    // Nothing runs before the database is known to be that of the secret.
    let early = pay(&keyed, "order-1", 500).await.unwrap_err();
    assert!(
        matches!(&early, TransactError::Store(error) if error.kind() == StoreErrorKind::Unavailable),
        "{early:?}"
    );
    assert_eq!(database.paid().await, 0);
    keyed.verify_ids().await.unwrap();
    assert!(!pay(&keyed, "order-1", 500).await.unwrap().is_replayed());
    let same = Transactor::new(pool.clone()).with_transaction_pooler(true).with_id_secret(secret(1));
    assert!(pay(&same, "order-1", 500).await.unwrap().is_replayed());

    // A program on the store finds the record under the keyed identities, and no plain one.
    let store = PostgresStore::open(PostgresOptions::from_url(&database.url()).unwrap()).await.unwrap();
    let guard = IdGuard::new(store, secret(1).into());
    guard.verify().await.unwrap();
    let id = keyed.ids().record_id(&scope(), &key("order-1"));
    let record = guard.lookup(id).await.unwrap().expect("the record is there");
    assert_eq!(record.label.key(), Some(keyed.ids().key_tag(&key("order-1"))));
    assert_ne!(record.label.key(), Some(KeyTag::of(&key("order-1"))));
    assert_ne!(record.label.caller(), scope().caller_tag());
    assert!(guard.lookup(RecordId::derive(&scope(), &key("order-1"))).await.unwrap().is_none());
    assert_eq!(guard.list(ListQuery::default()).await.unwrap().records.len(), 1);
    assert!(guard.lookup(ID_SECRET_RECORD).await.unwrap().is_some());

    for (wrong, why) in [
        (Transactor::new(pool.clone()), "this process has none"),
        (Transactor::new(pool.clone()).with_id_secret(secret(2)), "and this process has"),
    ] {
        let refused = pay(&wrong, "order-1", 500).await.unwrap_err();
        let TransactError::Store(error) = &refused else { panic!("{refused:?}") };
        is_refused(error, why);
        // The same on a connection of the application, which may be its last one.
        let mut transaction = pool.begin().await.unwrap();
        let refused = wrong.claim(&mut transaction, &scope(), "order-2", &500).await.unwrap_err();
        let GuardError::Store(error) = &refused else { panic!("{refused:?}") };
        is_refused(error, why);
    }
    assert_eq!(database.paid().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_on_the_only_connection_of_the_application_needs_no_other() {
    let database = Database::fresh().await;
    let pool = database.payments(1).await;
    for secret in [None, Some(secret(1))] {
        let transactor = Transactor::new(pool.clone());
        let transactor = match secret {
            Some(secret) => transactor.with_id_secret(secret),
            None => transactor,
        };
        let mut transaction = pool.begin().await.unwrap();
        let claimed = transactor.claim(&mut transaction, &scope(), "order-1", &500).await;
        match transactor.ids().secret() {
            None => assert!(matches!(claimed, Ok(GuardClaim::Execute(_))), "{claimed:?}"),
            // It is not known yet that the database belongs to the secret.
            Some(_) => assert!(matches!(claimed, Err(GuardError::Store(_))), "{claimed:?}"),
        }
        transaction.rollback().await.unwrap();
    }
}

/// A program with a secret, and the clock of its trial.
async fn keyed(database: &Database) -> (IdGuard, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::at_millis(1_000_000));
    let store = database.store().await;
    (IdGuard::with_clock(store, secret(1).into(), clock.clone()), clock)
}

/// Lets the time of the trial pass, and checks again.
async fn after_trial(guard: &IdGuard, clock: &ManualClock) -> Option<IdProblem> {
    clock.advance(Duration::from_secs(7));
    let _refused = guard.verify().await;
    guard.problem()
}

/// Checks until there is no open transaction to wait for any more.
async fn after_open(guard: &IdGuard) -> Option<IdProblem> {
    let ended = async {
        loop {
            let _refused = guard.verify().await;
            match guard.problem() {
                Some(IdProblem::OpenTransactions { .. }) => {
                    tokio::time::sleep(Duration::from_millis(20)).await
                }
                problem => return problem,
            }
        }
    };
    tokio::time::timeout(LONG, ended).await.expect("the transaction has ended")
}

/// A run may be longer than the trial of a database that is switched to a secret meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn the_first_program_with_a_secret_waits_for_transactions_that_began_without_it() {
    for (isolated, commits) in [(false, true), (true, true), (false, false)] {
        let database = Database::fresh().await;
        let pool = database.payments(3).await;
        let plain = Transactor::new(pool.clone());
        let plain = match isolated {
            true => plain.with_isolation(oncegate_postgres::Isolation::RepeatableRead),
            false => plain,
        };
        let (started, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let call = tokio::spawn({
            let (plain, started, go_on) = (plain.clone(), started.clone(), go_on.clone());
            async move {
                let run = async |connection: &mut PgConnection| {
                    let charge = insert(connection, 500).await?;
                    started.notify_one();
                    go_on.notified().await;
                    if commits { Ok(charge) } else { Err(RunError::from("declined")) }
                };
                plain.transact(&scope(), "order-1", &500_i64, run).await.is_ok()
            }
        });
        started.notified().await;
        let (guard, clock) = keyed(&database).await;
        let _begins = guard.verify().await;
        assert!(matches!(guard.problem(), Some(IdProblem::Trial { .. })), "{:?}", guard.problem());
        let problem = after_trial(&guard, &clock).await;
        assert!(matches!(problem, Some(IdProblem::OpenTransactions { count: 1, .. })), "{problem:?}");
        // A transaction that begins now is refused, and is not waited for.
        let mut late = pool.begin().await.unwrap();
        let refused = Transactor::new(pool.clone()).claim(&mut late, &scope(), "order-2", &500_i64).await;
        assert!(matches!(&refused, Err(GuardError::Store(_))), "{refused:?}");
        go_on.notify_one();
        assert_eq!(call.await.unwrap(), commits);
        let problem = after_open(&guard).await;
        match commits {
            // The record without the secret is there, so the database is not switched.
            true => assert!(matches!(problem, Some(IdProblem::HasRecords { .. })), "{problem:?}"),
            false => assert_eq!(problem, None),
        }
        assert_eq!(database.paid().await, i64::from(commits));
        late.rollback().await.unwrap();
    }
}

/// Under its old snapshot, a transaction does not see the mark. It may go on, because the trial waits for it, but what it saw
/// holds for no other one.
#[tokio::test(flavor = "multi_thread")]
async fn a_check_under_an_old_snapshot_counts_for_its_own_transaction() {
    let database = Database::fresh().await;
    let pool = database.payments(3).await;
    let plain = Transactor::new(pool.clone());
    let mut old = pool.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ").await.unwrap();
    run(&mut old, "SELECT count(*) FROM payments").await;
    let (guard, clock) = keyed(&database).await;
    let _begins = guard.verify().await;
    let claimed = plain.claim(&mut old, &scope(), "order-1", &500_i64).await.unwrap();
    let GuardClaim::Execute(attempt) = claimed else { panic!("{claimed:?}") };
    // The same transactor, at once, in another transaction.
    let mut other = pool.begin().await.unwrap();
    let refused = plain.claim(&mut other, &scope(), "order-2", &500_i64).await;
    let Err(GuardError::Store(error)) = &refused else { panic!("{refused:?}") };
    is_refused(error, "this process has none");
    other.rollback().await.unwrap();
    assert!(pay(&plain, "order-3", 500).await.is_err());

    let problem = after_trial(&guard, &clock).await;
    assert!(matches!(problem, Some(IdProblem::OpenTransactions { count: 1, .. })), "{problem:?}");
    insert(&mut old, 500).await.unwrap();
    attempt.complete_json(&mut old, &"paid").await.unwrap();
    old.commit().await.unwrap();
    let problem = after_open(&guard).await;
    assert!(matches!(problem, Some(IdProblem::HasRecords { .. })), "{problem:?}");
    assert_eq!(database.paid().await, 1);
}

/// A call may wait for an hour for another one, which began before the database was switched to a secret.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_waited_is_checked_again_before_it_runs() {
    let database = Database::fresh().await;
    let pool = database.payments(2).await;
    let plain = Transactor::new(pool.clone()).with_wait(LONG).unwrap();
    let mut first = pool.begin().await.unwrap();
    let claimed = plain.claim(&mut first, &scope(), "order-1", &500_i64).await.unwrap();
    assert!(matches!(claimed, GuardClaim::Execute(_)), "{claimed:?}");
    let waits = tokio::spawn({
        let plain = plain.clone();
        async move { pay(&plain, "order-1", 500).await }
    });
    let (guard, clock) = keyed(&database).await;
    let _begins = guard.verify().await;
    let refused = waits.await.unwrap().unwrap_err();
    first.rollback().await.unwrap();
    let TransactError::Store(error) = &refused else { panic!("{refused:?}") };
    is_refused(error, "this process has none");
    assert_eq!((after_trial(&guard, &clock).await, database.paid().await), (None, 0));
}
