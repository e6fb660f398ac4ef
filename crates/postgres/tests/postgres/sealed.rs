//! Sealed results: of `transact`, of guards, and of callers that write theirs in SQL.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use oncegate_core::{
    ErrorChain, ListQuery, Outcome, RecordId, RecordedResponse, State, Store as _, StoreError,
    StoreErrorKind, StoredResponse, limits,
};
use oncegate_postgres::{
    Guard, GuardClaim, GuardError, Isolation, TransactError, TransactOutcome, Transactor,
};
use oncegate_seal::{
    KeylessStore, Keyring, ResealOptions, ResealOutcome, SealInfo, SealKey, SealKeys, SealedStore,
};
use oncegate_servers::{Fault, FaultProxy};
use oncegate_testkit::until;
use sqlx::Row as _;
use sqlx::postgres::PgConnection;

use crate::support::{Database, claims, completes, id, response, run, sql_id, token};
use crate::transact::{Charge, LONG, insert, key, pay, scope};

fn ring(keys: &[u8]) -> Keyring {
    Keyring::new(keys.iter().map(|n| SealKey::from_bytes([*n; 32])))
}

fn record(order: &str) -> RecordId {
    RecordId::derive(&scope(), &key(order))
}

/// The stored bytes of all responses, as a dump shows them.
async fn dump(database: &Database) -> String {
    let text =
        "SELECT coalesce(string_agg(encode(response, 'escape'), ' '), '') AS text FROM oncegate.records";
    run_text(&mut database.connect().await, text).await
}

async fn run_text(connection: &mut PgConnection, sql: &'static str) -> String {
    sqlx::query(sql).fetch_one(connection).await.unwrap().get("text")
}

/// The store of a sidecar with these keys.
async fn sealed(database: &Database, keys: Keyring) -> SealedStore {
    SealedStore::new(database.store().await, keys)
}

/// Asserts that a call did not run its closure, and returns the reason.
fn refused<T: std::fmt::Debug>(result: Result<T, TransactError>) -> StoreError {
    match result {
        Err(TransactError::Sealed { source, .. }) => source,
        other => panic!("{other:?}"),
    }
}

/// Calls again with a closure that must not run.
async fn again(transactor: &Transactor, order: &str) -> Result<TransactOutcome<Charge>, TransactError> {
    let run = async |_: &mut PgConnection| -> Result<Charge, oncegate_postgres::RunError> {
        panic!("the operation was executed again")
    };
    transactor.transact(&scope(), order, &500_i64, run).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_is_sealed_and_every_reader_with_the_key_opens_it() {
    for (isolation, through_pooler) in [
        (None, false),
        (Some(Isolation::ReadCommitted), true),
        (Some(Isolation::RepeatableRead), false),
        (Some(Isolation::Serializable), true),
    ] {
        let database = Database::fresh().await;
        let plain = Transactor::new(database.payments(2).await).with_statement_timeout(LONG).unwrap();
        let plain = plain.with_transaction_pooler(through_pooler);
        let plain = isolation.map_or(plain.clone(), |isolation| plain.with_isolation(isolation));
        let transactor = plain.clone().with_seal_keys(ring(&[1]));
        let paid = pay(&transactor, "order-1", 500).await.unwrap();
        assert_eq!(paid, TransactOutcome::Executed(Charge { id: 1, cents: 500 }));
        let stored = dump(&database).await;
        assert!(!stored.contains("cents") && stored.contains("ogseal"), "{isolation:?}: {stored}");

        // Another program with the key, also among others, gets the result. Another input is refused as before.
        for keys in
            [ring(&[1]), ring(&[2, 1]), ring(&[1]).with_required(true), ring(&[1]).with_opens_only(true)]
        {
            let other = plain.clone().with_seal_keys(keys);
            assert_eq!(
                again(&other, "order-1").await.unwrap(),
                TransactOutcome::Replayed(paid.clone().into_inner())
            );
            assert!(matches!(pay(&other, "order-1", 900).await, Err(TransactError::Mismatch)));
        }
        // A sidecar replays it, and its operators see it.
        let store = sealed(&database, ring(&[1])).await;
        let shown = store.lookup_as_stored(record("order-1")).await.unwrap().unwrap();
        assert_eq!(
            shown.seal.map(|seal| (seal.key, seal.token)),
            Some((SealKey::from_bytes([1; 32]).id(), shown.record.token))
        );
        assert_eq!(
            (shown.refused, shown.record.response().unwrap().as_body()),
            (None, &br#"{"id":1,"cents":500}"#[..])
        );
        assert_eq!(shown.record.attempts, 1);
        // The same search finds what is in clear.
        assert!(!pay(&plain, "order-2", 500).await.unwrap().is_replayed());
        assert!(dump(&database).await.contains("cents"), "{isolation:?}");
        assert_eq!(database.paid().await, 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_key_nothing_is_executed() {
    let database = Database::fresh().await;
    let pool = database.payments(2).await;
    let transactor = Transactor::new(pool.clone()).with_seal_keys(ring(&[1]));
    pay(&transactor, "order-1", 500).await.unwrap();
    let key_id = SealKey::from_bytes([1; 32]).id();
    for (who, other) in [
        ("no keys", Transactor::new(pool.clone())),
        ("another key", Transactor::new(pool.clone()).with_seal_keys(ring(&[2]))),
        (
            "another key that only opens",
            Transactor::new(pool.clone()).with_seal_keys(ring(&[2]).with_opens_only(true)),
        ),
    ] {
        let error = again(&other, "order-1").await.unwrap_err();
        let text = ErrorChain(&error).to_string();
        assert!(
            text.contains(&record("order-1").to_string()) && text.contains(&key_id.to_string()),
            "{who}: {text}"
        );
        assert_eq!(refused::<()>(Err(error)).kind(), StoreErrorKind::Sealed, "{who}");
        // The same in a transaction of the application.
        let mut transaction = pool.begin().await.unwrap();
        let error = other.claim(&mut transaction, &scope(), "order-1", &500_i64).await.unwrap_err();
        assert!(
            matches!(&error, GuardError::Sealed(error) if error.kind() == StoreErrorKind::Sealed),
            "{who}: {error:?}"
        );
        assert!(ErrorChain(&error).to_string().contains(&key_id.to_string()), "{who}: {error:?}");
        // Another input is refused for what it is: that needs no key.
        assert!(matches!(pay(&other, "order-1", 900).await, Err(TransactError::Mismatch)), "{who}");
    }
    // With the key it is there as before.
    assert!(again(&transactor, "order-1").await.unwrap().is_replayed());
    assert_eq!(database.paid().await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_result_that_was_changed_or_moved_is_refused() {
    let database = Database::fresh().await;
    let transactor = Transactor::new(database.payments(2).await).with_seal_keys(ring(&[1]));
    for order in ["order-1", "order-2"] {
        pay(&transactor, order, 500).await.unwrap();
    }
    let mut connection = database.connect().await;
    let is_corrupt = async |what: &str| {
        let error = refused(again(&transactor, "order-2").await);
        assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{what}: {error}");
        let store = sealed(&database, ring(&[1])).await;
        assert_eq!(
            store.lookup(record("order-2")).await.unwrap_err().kind(),
            StoreErrorKind::Corrupt,
            "{what}"
        );
    };
    let (one, two) = (sql_id(record("order-1")), sql_id(record("order-2")));
    run(
        &mut connection,
        &format!("CREATE TABLE public.kept AS SELECT * FROM oncegate.records WHERE id = {two}"),
    )
    .await;
    let from_one = format!("(SELECT o.response FROM oncegate.records AS o WHERE o.id = {one})");
    run(&mut connection, &format!("UPDATE oncegate.records SET response = {from_one} WHERE id = {two}"))
        .await;
    is_corrupt("moved from another record").await;
    let flipped = "(SELECT set_byte(response, octet_length(response) - 1, get_byte(response, octet_length(response) - 1) # 1) FROM public.kept)";
    run(&mut connection, &format!("UPDATE oncegate.records SET response = {flipped} WHERE id = {two}")).await;
    is_corrupt("changed").await;
    // A reader of the whole record also compares the token. A claim returns the response without it, as from a sealed store.
    run(&mut connection, &format!("UPDATE oncegate.records SET response = (SELECT response FROM public.kept), token = token + 1 WHERE id = {two}")).await;
    let store = sealed(&database, ring(&[1])).await;
    assert_eq!(store.lookup(record("order-2")).await.unwrap_err().kind(), StoreErrorKind::Corrupt);
    run(&mut connection, &format!("UPDATE oncegate.records SET token = token - 1 WHERE id = {two}")).await;
    assert!(again(&transactor, "order-2").await.unwrap().is_replayed());
    assert_eq!(database.paid().await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn results_in_clear_are_replayed_unless_they_must_be_sealed() {
    let database = Database::fresh().await;
    let plain = Transactor::new(database.payments(2).await);
    let keys = SealKeys::new(ring(&[1]).with_opens_only(true));
    let transactor = plain.clone().with_seal_keys(keys.clone());
    pay(&plain, "order-1", 500).await.unwrap();
    // Keys that only open seal nothing.
    pay(&transactor, "order-2", 500).await.unwrap();
    assert!(!dump(&database).await.contains("ogseal"));
    keys.replace(ring(&[1]));
    for order in ["order-1", "order-2"] {
        assert!(again(&transactor, order).await.unwrap().is_replayed());
    }
    pay(&transactor, "order-3", 500).await.unwrap();
    keys.replace(ring(&[1]).with_required(true));
    for order in ["order-1", "order-2"] {
        let error = refused(again(&transactor, order).await);
        assert!(
            error.kind() == StoreErrorKind::Sealed && error.to_string().contains("not sealed"),
            "{error}"
        );
    }
    assert!(again(&transactor, "order-3").await.unwrap().is_replayed());
    // A rotation: the new key seals, and the old one opens.
    keys.replace(ring(&[2, 1]));
    pay(&transactor, "order-4", 500).await.unwrap();
    keys.replace(ring(&[2]));
    assert!(again(&transactor, "order-4").await.unwrap().is_replayed());
    assert_eq!(refused(again(&transactor, "order-3").await).kind(), StoreErrorKind::Sealed);
    assert_eq!(database.paid().await, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_run_leaves_nothing_and_the_key_is_free() {
    let database = Database::fresh().await;
    let pool = database.payments(3).await;
    let transactor = Transactor::new(pool.clone()).with_seal_keys(ring(&[1]));
    let records = async || {
        run_text(&mut database.connect().await, "SELECT count(*)::text AS text FROM oncegate.records").await
    };
    let failed = transactor.transact(&scope(), "order-1", &500_i64, async |connection| {
        insert(connection, 500).await?;
        Err::<Charge, _>("declined".into())
    });
    assert!(matches!(failed.await, Err(TransactError::Failed(_))));
    let panics = tokio::spawn({
        let transactor = transactor.clone();
        async move {
            let run = async |connection: &mut PgConnection| -> Result<Charge, oncegate_postgres::RunError> {
                insert(connection, 500).await?;
                panic!("a bug of the application")
            };
            transactor.transact(&scope(), "order-1", &500_i64, run).await
        }
    });
    assert!(panics.await.unwrap_err().is_panic());
    // The pool ends the transaction in the background.
    until("the transaction of the panic has ended", async || {
        let open = "SELECT count(*)::text AS text FROM pg_stat_activity WHERE datname = current_database() \
                    AND backend_type = 'client backend' AND xact_start IS NOT NULL AND pid <> pg_backend_pid()";
        run_text(&mut database.connect().await, open).await == "0"
    })
    .await;
    // The sealed form is 73 bytes and a response longer than the result. A result that only just fits in clear is refused.
    let text = "x".repeat(limits::MAX_RESPONSE_BYTES - 100);
    let large = transactor.transact(&scope(), "order-1", &500_i64, async |connection| {
        insert(connection, 500).await?;
        Ok(text.clone())
    });
    assert!(matches!(large.await, Err(TransactError::TooLarge(_))));
    // The run ended the transaction, and with it the claim.
    let ended = transactor.transact(&scope(), "order-1", &500_i64, async |connection| {
        sqlx::raw_sql("ROLLBACK; BEGIN").execute(&mut *connection).await?;
        Ok(insert(connection, 500).await?)
    });
    assert!(matches!(ended.await, Err(TransactError::Fenced { .. })));
    // A serialization failure runs it again.
    let runs = AtomicU32::new(0);
    let conflicts = transactor.transact(&scope(), "order-1", &500_i64, async |connection| {
        if runs.fetch_add(1, Ordering::SeqCst) == 0 {
            sqlx::raw_sql("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$")
                .execute(&mut *connection)
                .await?;
        }
        Ok(insert(connection, 500).await?)
    });
    assert_eq!(records().await, "0");
    assert!(!conflicts.await.unwrap().is_replayed());
    assert_eq!((runs.into_inner(), database.paid().await, records().await), (2, 1, "1".to_owned()));
    assert!(again(&transactor, "order-1").await.unwrap().is_replayed());
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_calls_make_one_payment_and_get_its_sealed_result() {
    for isolation in [None, Some(Isolation::RepeatableRead), Some(Isolation::Serializable)] {
        let database = Database::fresh().await;
        let transactor = Transactor::new(database.payments(8).await).with_seal_keys(ring(&[1]));
        let transactor = transactor.with_statement_timeout(LONG).unwrap().with_wait(LONG).unwrap();
        let transactor =
            isolation.map_or(transactor.clone(), |isolation| transactor.with_isolation(isolation));
        let calls: Vec<_> = (0..30)
            .map(|_| {
                let transactor = transactor.clone();
                tokio::spawn(async move { pay(&transactor, "order-1", 500).await.unwrap() })
            })
            .collect();
        let mut executed = 0;
        for call in calls {
            let outcome = call.await.unwrap();
            executed += u32::from(!outcome.is_replayed());
            assert_eq!(outcome.into_inner().cents, 500);
        }
        assert_eq!((executed, database.paid().await), (1, 1), "{isolation:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_commit_of_a_sealed_result_is_found_out() {
    for (fault, expected) in [(Fault::After, 1), (Fault::Before, 2)] {
        let database = Database::fresh().await;
        let proxy = FaultProxy::start(database.server.port()).await.unwrap();
        let pool = database.payments_at(proxy.port(), 2).await;
        let transactor =
            Transactor::new(pool).with_statement_timeout(LONG).unwrap().with_seal_keys(ring(&[1]));
        proxy.arm(b"COMMIT", fault);
        let runs = AtomicU32::new(0);
        let done = transactor.transact(&scope(), "order-1", &500_i64, async |connection| {
            runs.fetch_add(1, Ordering::SeqCst);
            Ok(insert(connection, 500).await?)
        });
        assert!(!done.await.unwrap().is_replayed(), "{fault:?}");
        assert_eq!((runs.into_inner(), database.paid().await), (expected, 1), "{fault:?}");
        assert!(again(&transactor, "order-1").await.unwrap().is_replayed());
        assert!(!dump(&database).await.contains("cents"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn guards_seal_with_the_keys_of_their_transactor() {
    let database = Database::fresh().await;
    let pool = database.payments(2).await;
    let transactor = Transactor::new(pool.clone()).with_seal_keys(ring(&[1]));
    let mut transaction = pool.begin().await.unwrap();
    let claimed = transactor.claim(&mut transaction, &scope(), "order-1", &500_i64).await.unwrap();
    let GuardClaim::Execute(guard) = claimed else { panic!("{claimed:?}") };
    let charge = insert(&mut transaction, 500).await.unwrap();
    guard.complete_json(&mut transaction, &charge).await.unwrap();
    transaction.commit().await.unwrap();
    assert!(!dump(&database).await.contains("cents"));
    assert_eq!(again(&transactor, "order-1").await.unwrap(), TransactOutcome::Replayed(charge));
    let mut transaction = pool.begin().await.unwrap();
    let claimed = transactor.claim(&mut transaction, &scope(), "order-1", &500_i64).await.unwrap();
    assert!(
        matches!(&claimed, GuardClaim::Replay(response) if response.as_body() == br#"{"id":1,"cents":500}"#),
        "{claimed:?}"
    );
}

/// A service behind a sidecar that seals, with `completion = "upstream"`.
#[tokio::test(flavor = "multi_thread")]
async fn a_service_seals_the_response_of_the_attempt_of_a_sidecar() {
    let database = Database::fresh().await;
    let pool = database.payments(2).await;
    let store = sealed(&database, ring(&[1])).await;
    for (number, keys) in [(1, Some(ring(&[1]))), (2, Some(ring(&[2]))), (3, None)] {
        let owner = token(&store.apply(id(number), claims(1)).await.unwrap());
        let guard = Guard::from_headers(id(number).to_string(), owner.to_string()).unwrap();
        let guard = match keys.clone() {
            Some(keys) => guard.with_seal_keys(keys),
            None => guard,
        };
        let mut transaction = pool.begin().await.unwrap();
        insert(&mut transaction, 500).await.unwrap();
        guard.complete(&mut transaction, &response(b"paid-in-secret")).await.unwrap();
        transaction.commit().await.unwrap();
        let claimed = store.apply(id(number), claims(2)).await;
        let is_read = matches!(&claimed, Ok(Outcome::Replay(read)) if *read == response(b"paid-in-secret"));
        // The sidecar has the key, or the response is in clear; or it refuses, and executes nothing.
        assert_eq!(is_read, number != 2, "{number}: {claimed:?}");
        assert!(is_read || claimed.unwrap_err().kind() == StoreErrorKind::Sealed);
        assert_eq!(dump(&database).await.contains("paid-in-secret"), number == 3, "{number}");
        // The owner's own response, which the sidecar saw, changes nothing.
        let late = store
            .apply(id(number), completes(owner, oncegate_core::Completion::Replayable(response(b"other"))))
            .await;
        assert_eq!(late.unwrap(), Outcome::Fenced, "{number}");
    }
    // A sidecar without keys refuses it, too.
    let keyless = KeylessStore::new(database.store().await);
    assert_eq!(keyless.apply(id(1), claims(2)).await.unwrap_err().kind(), StoreErrorKind::Sealed);
    // With `seal-required`, the response in clear is refused.
    let strict = sealed(&database, ring(&[1]).with_required(true)).await;
    assert_eq!(strict.apply(id(3), claims(2)).await.unwrap_err().kind(), StoreErrorKind::Sealed);
    assert!(matches!(strict.apply(id(1), claims(2)).await.unwrap(), Outcome::Replay(_)));

    // The service completes without a response, and the sidecar adds its own, sealed.
    let owner = token(&store.apply(id(4), claims(1)).await.unwrap());
    let mut transaction = pool.begin().await.unwrap();
    let guard = Guard::of_attempt(id(4), owner).with_seal_keys(ring(&[1]));
    guard.complete_without_response(&mut transaction).await.unwrap();
    transaction.commit().await.unwrap();
    let adds = completes(owner, oncegate_core::Completion::Replayable(response(b"added")));
    assert_eq!(store.apply(id(4), adds).await.unwrap(), Outcome::Completed);
    assert_eq!(store.apply(id(4), claims(2)).await.unwrap(), Outcome::Replay(response(b"added")));

    // A response that is too large in its sealed form completes nothing, and nothing was sent.
    let owner = token(&store.apply(id(5), claims(1)).await.unwrap());
    let body = Bytes::from(vec![b'x'; limits::MAX_RESPONSE_BYTES - 100]);
    let large = StoredResponse::new(200, &[], &[body], &[]).unwrap();
    let mut transaction = pool.begin().await.unwrap();
    let guard = Guard::of_attempt(id(5), owner).with_seal_keys(ring(&[1]));
    let error = guard.complete(&mut transaction, &large).await.unwrap_err();
    assert!(matches!(error, GuardError::Response(_)), "{error:?}");
    insert(&mut transaction, 500).await.unwrap();
    transaction.rollback().await.unwrap();
    assert!(matches!(store.lookup(id(5)).await.unwrap().unwrap().state, State::InProgress { .. }));
}

/// A handler of a sidecar's request that itself calls `transact`: two records, each bound to its own token.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_inside_of_a_handler_seals_its_own_record() {
    let database = Database::fresh().await;
    let pool = database.payments(3).await;
    let transactor = Transactor::new(pool.clone()).with_seal_keys(ring(&[1]));
    let store = sealed(&database, ring(&[1])).await;
    let owner = token(&store.apply(id(1), claims(1)).await.unwrap());
    let guard = Guard::of_attempt(id(1), owner).with_seal_keys(ring(&[1]));
    let guard = Arc::new(std::sync::Mutex::new(Some(guard)));
    // The handler completes the sidecar's record in the transaction of its own operation.
    let done = transactor.transact(&scope(), "order-1", &500_i64, async |connection| {
        let charge = insert(connection, 500).await?;
        let guard = guard.lock().unwrap().take().expect("it runs once");
        guard.complete_json(connection, &charge).await?;
        Ok(charge)
    });
    let charge = done.await.unwrap().into_inner();
    assert!(!dump(&database).await.contains("cents"));
    let Outcome::Replay(outer) = store.apply(id(1), claims(2)).await.unwrap() else {
        panic!("it is completed")
    };
    assert_eq!(outer.as_body(), serde_json::to_vec(&charge).unwrap());
    assert_eq!(again(&transactor, "order-1").await.unwrap(), TransactOutcome::Replayed(charge));
}

/// The database has no key: what SQL writes by itself is in clear until it is sealed afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn results_that_sql_wrote_are_sealed_afterwards() {
    let database = Database::fresh().await;
    let pool = database.payments(2).await;
    let mut connection = database.connect().await;
    let (plain, keyed) =
        (Transactor::new(pool.clone()), Transactor::new(pool.clone()).with_seal_keys(ring(&[1])));
    // In SQL, by a caller without a library; and by a program without keys.
    let store = sealed(&database, ring(&[1])).await;
    let owner = token(&store.apply(id(1), claims(1)).await.unwrap());
    let complete = format!(
        "SELECT oncegate.complete({}, {owner}, oncegate.response(201, ARRAY['content-type'], ARRAY['text/plain'], 'secret-of-sql'))",
        sql_id(id(1))
    );
    run(&mut connection, &complete).await;
    pay(&plain, "order-1", 500).await.unwrap();
    assert!(dump(&database).await.contains("secret-of-sql") && dump(&database).await.contains("cents"));

    let reseal = async |keys: &[u8]| {
        let store = sealed(&database, ring(keys)).await;
        let page = store.wrapped().list(ListQuery::default()).await.unwrap();
        for (id, record) in page.records {
            let options = ResealOptions { seals_clear: true, ..ResealOptions::default() };
            let done = store.reseal(id, &record, options).await.unwrap();
            assert!(matches!(done, ResealOutcome::Resealed { has_clear: false, .. }), "{done:?}");
        }
    };
    reseal(&[1]).await;
    let stored = dump(&database).await;
    assert!(!stored.contains("secret-of-sql") && !stored.contains("cents"), "{stored}");
    let strict = sealed(&database, ring(&[1]).with_required(true)).await;
    let Outcome::Replay(replayed) = strict.apply(id(1), claims(2)).await.unwrap() else {
        panic!("it is completed")
    };
    assert_eq!(replayed.as_body(), b"secret-of-sql");
    assert_eq!(
        again(&keyed, "order-1").await.unwrap(),
        TransactOutcome::Replayed(Charge { id: 1, cents: 500 })
    );
    assert_eq!(refused(again(&plain, "order-1").await).kind(), StoreErrorKind::Sealed);
    // A rotation reaches the results of transactions, too.
    reseal(&[2, 1]).await;
    assert!(again(&Transactor::new(pool).with_seal_keys(ring(&[2])), "order-1").await.unwrap().is_replayed());
    assert_eq!(refused(again(&keyed, "order-1").await).kind(), StoreErrorKind::Sealed);

    // A caller may also seal before it calls the function: with a library, or as the format says.
    let owner = token(&store.apply(id(2), claims(1)).await.unwrap());
    let form = oncegate_seal::seal_owners_response(id(2), owner, &response(b"sealed-by-caller"), &ring(&[1]))
        .unwrap();
    let complete = sqlx::query("SELECT oncegate.complete($1, $2, $3)");
    let complete = complete.bind(id(2).as_bytes().to_vec()).bind(i64::try_from(owner.get()).unwrap());
    complete.bind(form.as_encoded().to_vec()).execute(&mut connection).await.unwrap();
    assert_eq!(store.apply(id(2), claims(2)).await.unwrap(), Outcome::Replay(response(b"sealed-by-caller")));
    let stored = database.store().await.lookup(id(2)).await.unwrap().unwrap();
    let State::Completed(RecordedResponse::Replayable(form)) = &stored.state else { panic!("{stored:?}") };
    assert_eq!(SealInfo::of_response(form).unwrap().token, owner);
}
