//! Transactions of the application under an id secret: the same records as other programs with it, and none without it.

use oncegate_core::{
    ID_SECRET_RECORD, IdGuard, IdSecret, KeyTag, ListQuery, RecordId, Store as _, StoreError, StoreErrorKind,
};
use oncegate_postgres::{GuardClaim, GuardError, PostgresOptions, PostgresStore, TransactError, Transactor};

use crate::support::Database;
use crate::transact::{key, pay, scope};

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
