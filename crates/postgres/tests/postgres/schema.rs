//! How the contract gets into a database, and who refuses to work on another one.

use oncegate_core::{Command, FencingToken, Outcome, RecordId, RecordStep, Step, Store as _};
use oncegate_postgres::sqlx::Row as _;
use oncegate_postgres::{OpenError, PostgresOptions, PostgresStore, schema};

use crate::support::{Database, run, sqlstate, try_run};

#[tokio::test(flavor = "multi_thread")]
async fn it_is_applied_once_whoever_tries() {
    let database = Database::empty().await;
    assert_eq!(schema::status(&database.options()).await.unwrap().found, None);
    let error = PostgresStore::open(database.options()).await.unwrap_err();
    assert!(matches!(error, OpenError::NoContract { found: None, .. }), "{error}");
    assert!(error.to_string().contains("oncegate schema apply postgres"), "{error}");
    let at_once = (0..4).map(|_| {
        let options = database.options();
        tokio::spawn(async move { schema::apply(&options).await })
    });
    for applied in at_once.collect::<Vec<_>>() {
        applied.await.unwrap().unwrap();
    }
    let status = schema::status(&database.options()).await.unwrap();
    assert_eq!((status.found, status.needed), (Some(schema::VERSION), schema::VERSION));
    PostgresStore::open(database.options()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_printed_can_be_run_by_hand_and_changes_nothing_the_second_time() {
    let database = Database::empty().await;
    let mut owner = database.connect().await;
    run(&mut owner, &schema::print()).await;
    let error = try_run(&mut database.connect().await, &schema::print()).await.unwrap_err();
    assert_eq!(sqlstate(&error), "42P06");
    PostgresStore::open(database.options()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_refuses_an_older_and_a_newer_contract() {
    let database = Database::fresh().await;
    let mut owner = database.connect().await;
    run(&mut owner, "DELETE FROM oncegate.contract WHERE version > 1").await;
    let error = PostgresStore::open(database.options()).await.unwrap_err();
    assert!(matches!(error, OpenError::NoContract { found: Some(1), .. }), "{error}");
    assert!(error.to_string().contains("oncegate schema apply postgres"), "{error}");
    run(&mut owner, &format!("INSERT INTO oncegate.contract (version) VALUES ({})", schema::VERSION + 1))
        .await;
    let error = PostgresStore::open(database.options()).await.unwrap_err();
    let OpenError::NewerContract { found, known, .. } = &error else { panic!("{error}") };
    assert_eq!((*found, *known), (schema::VERSION + 1, schema::VERSION));
    assert!(error.to_string().contains("upgrade"), "{error}");
    assert!(matches!(schema::apply(&database.options()).await, Err(OpenError::NewerContract { .. })));
}

/// A database as the first version left it, with records, and with roles that may do what theirs may.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_of_the_first_version_goes_forward_with_its_records_and_its_rights() {
    let database = Database::empty().await;
    let mut owner = database.connect().await;
    run(&mut owner, concat!("BEGIN;", include_str!("../../sql/0001_contract.sql"), "COMMIT;")).await;
    run(
        &mut owner,
        "CREATE ROLE worker; CREATE ROLE reader; CREATE ROLE payer; GRANT EXECUTE ON FUNCTION oncegate.complete TO payer; CREATE ROLE nobody; \
         GRANT EXECUTE ON FUNCTION oncegate.complete_if_owner TO worker; GRANT EXECUTE ON FUNCTION oncegate.lookup TO reader",
    )
    .await;
    let claimed = |n: u8| {
        format!(
            "SELECT token::text FROM oncegate.claim(decode(repeat('{n:02x}', 32), 'hex'), decode(repeat('{n:02x}', 16), 'hex'), \
             '\\x01'::bytea || decode(repeat('aa', 32), 'hex'), 60000, 60000)"
        )
    };
    let rows = try_run(&mut owner, &claimed(1)).await.unwrap();
    let token = FencingToken::new(rows[0].get::<String, _>(0).parse().unwrap());
    assert_eq!(schema::apply(&database.options()).await.unwrap().found, Some(1));
    assert_eq!(
        schema::apply(&database.options()).await.unwrap().found,
        Some(schema::VERSION),
        "nothing more to do"
    );

    let store = PostgresStore::open(database.options()).await.unwrap();
    let id = RecordId::from_bytes([1; 32]);
    let step = Step::new("charge", "paid".into()).unwrap();
    let command = Command::Step(RecordStep { token, number: 0, step: step.clone() });
    assert_eq!(store.apply(id, command).await.unwrap(), Outcome::StepRecorded, "of an attempt from before");
    assert_eq!(store.lookup(id).await.unwrap().unwrap().steps.as_slice(), [step]);
    let may = "SELECT string_agg(r || ' ' || f, ', ' ORDER BY r, f) FROM unnest(ARRAY['worker', 'reader', 'payer', 'nobody']) AS r, \
               unnest(ARRAY['step', 'steps', 'reserve']) AS f, pg_proc AS p \
               WHERE p.pronamespace = 'oncegate'::regnamespace AND p.proname = f AND has_function_privilege(r, p.oid, 'EXECUTE')";
    let rows = try_run(&mut owner, may).await.unwrap();
    assert_eq!(rows[0].get::<String, _>(0), "payer reserve, reader steps, worker step");
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_hold_no_password() {
    let database = Database::empty().await;
    let password = database.server.password();
    let wrong = database.url().replace(password, "wr0ng-s3cret");
    for url in [wrong, "postgres://app:wr0ng-s3cret@127.0.0.1:1/shop".to_owned()] {
        let options = PostgresOptions::new(&url).unwrap();
        let error = PostgresStore::open(options.clone()).await.unwrap_err();
        let said = format!("{error} {error:?} {options:?} {:?}", schema::apply(&options).await.unwrap_err());
        assert!(!said.contains("s3cret") && said.contains("127.0.0.1"), "{said}");
    }
}
