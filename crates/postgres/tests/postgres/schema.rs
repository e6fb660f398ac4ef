//! How the contract gets into a database, and who refuses to work on another one.

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
    run(&mut owner, "UPDATE oncegate.contract SET version = 0").await;
    let error = PostgresStore::open(database.options()).await.unwrap_err();
    assert!(matches!(error, OpenError::NoContract { found: Some(0), .. }), "{error}");
    assert!(error.to_string().contains("oncegate schema apply postgres"), "{error}");
    run(&mut owner, "UPDATE oncegate.contract SET version = 2").await;
    let error = PostgresStore::open(database.options()).await.unwrap_err();
    assert!(matches!(error, OpenError::NewerContract { found: 2, known: 1, .. }), "{error}");
    assert!(error.to_string().contains("upgrade"), "{error}");
    assert!(matches!(schema::apply(&database.options()).await, Err(OpenError::NewerContract { .. })));
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
