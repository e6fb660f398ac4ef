//! Guards in transactions that the application manages itself.

use std::time::Duration;

use oncegate_core::{
    Command, Completion, ErrorChain, OnAbandoned, Outcome, RecordedResponse, State, Store as _,
};
use oncegate_postgres::{Guard, GuardClaim, GuardError, Transactor};

use crate::support::{Database, claim, claims, completes, id, response, token};
use crate::transact::{insert, key, pay, scope};

fn executes(claimed: GuardClaim) -> Guard {
    match claimed {
        GuardClaim::Execute(guard) => guard,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_and_record_commit_together_in_a_transaction_of_the_application() {
    let database = Database::fresh().await;
    let pool = database.payments(3).await;
    let transactor = Transactor::new(pool.clone());
    let ask =
        async |connection: &mut _| transactor.claim(connection, &scope(), &key("order-1"), &500_i64).await;

    // A rollback leaves nothing.
    let mut transaction = pool.begin().await.unwrap();
    let guard = executes(ask(&mut transaction).await.unwrap());
    insert(&mut transaction, 500).await.unwrap();
    guard.complete_json(&mut transaction, &"lost").await.unwrap();
    transaction.rollback().await.unwrap();

    let mut transaction = pool.begin().await.unwrap();
    let guard = executes(ask(&mut transaction).await.unwrap());
    let charge = insert(&mut transaction, 500).await.unwrap();
    // No other caller waits during the transaction.
    let mut other = pool.begin().await.unwrap();
    assert!(matches!(ask(&mut other).await.unwrap(), GuardClaim::InProgress { .. }));
    guard.complete_json(&mut transaction, &charge).await.unwrap();
    transaction.commit().await.unwrap();
    assert!(matches!(ask(&mut other).await.unwrap(), GuardClaim::Replay(_)));
    let mismatch = transactor.claim(&mut other, &scope(), &key("order-1"), &900_i64).await.unwrap();
    assert!(matches!(mismatch, GuardClaim::Mismatch), "{mismatch:?}");
    drop(other);

    // `transact` reads the result that this guard stored.
    let replayed = pay(&transactor, "order-1", 500).await.unwrap();
    assert!(replayed.is_replayed());
    assert_eq!((replayed.into_inner(), database.paid().await), (charge, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_completes_the_claim_of_a_sidecar_with_or_without_a_response() {
    let database = Database::fresh().await;
    let (pool, store) = (database.payments(2).await, database.store().await);
    for (number, with_response) in [(1, true), (2, false)] {
        let owner = token(&store.apply(id(number), claims(1)).await.unwrap());
        let guard = Guard::from_headers(id(number).to_string(), owner.to_string()).unwrap();
        let mut transaction = pool.begin().await.unwrap();
        insert(&mut transaction, 500).await.unwrap();
        if with_response {
            guard.complete(&mut transaction, &response(b"paid")).await.unwrap();
        } else {
            guard.complete_without_response(&mut transaction).await.unwrap();
        }
        transaction.commit().await.unwrap();
        if !with_response {
            let record = store.lookup(id(number)).await.unwrap().unwrap();
            assert_eq!(record.state, State::Completed(RecordedResponse::Awaited));
            let adds = completes(owner, Completion::Replayable(response(b"paid")));
            assert_eq!(store.apply(id(number), adds).await.unwrap(), Outcome::Completed);
        }
        let again = store.apply(id(number), claims(2)).await.unwrap();
        assert_eq!(again, Outcome::Replay(response(b"paid")));
    }
    assert_eq!(database.paid().await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fenced_owner_commits_nothing_even_if_it_ignores_the_error() {
    let database = Database::fresh().await;
    let (pool, store) = (database.payments(2).await, database.store().await);
    let mut short = claim(1);
    short.lease = Duration::from_millis(1);
    let stale = token(&store.apply(id(1), Command::Claim(short)).await.unwrap());
    let mut other = claim(2);
    other.on_abandoned = OnAbandoned::Reexecute;
    assert!(matches!(store.apply(id(1), Command::Claim(other)).await.unwrap(), Outcome::Execute(_)));

    let mut transaction = pool.begin().await.unwrap();
    insert(&mut transaction, 500).await.unwrap();
    let error =
        Guard::of_attempt(id(1), stale).complete(&mut transaction, &response(b"paid")).await.unwrap_err();
    assert!(matches!(error, GuardError::Fenced), "{error:?}");
    // A COMMIT in spite of the error commits nothing.
    transaction.commit().await.unwrap();
    assert_eq!(database.paid().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_transaction_of_the_same_attempt_gets_locked_and_not_fenced() {
    let database = Database::fresh().await;
    let (pool, store) = (database.payments(2).await, database.store().await);
    let owner = token(&store.apply(id(1), claims(1)).await.unwrap());
    let mut first = pool.begin().await.unwrap();
    Guard::of_attempt(id(1), owner).complete_without_response(&mut first).await.unwrap();
    let mut second = pool.begin().await.unwrap();
    let error = Guard::of_attempt(id(1), owner).complete_without_response(&mut second).await.unwrap_err();
    assert!(matches!(error, GuardError::Locked), "{error:?}");
    // After a failed statement that the application ignored, the error names it.
    let error = Guard::of_attempt(id(1), owner).complete_without_response(&mut second).await.unwrap_err();
    let chain = ErrorChain(&error).to_string();
    assert!(chain.contains("its error was ignored"), "{chain}");
}
