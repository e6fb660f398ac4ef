//! Servers that die, sessions that end, pools that are empty.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::{Completion, Extent, Outcome, Store as _, StoreErrorKind};
use oncegate_postgres::{PostgresOptions, PostgresStore, schema};
use oncegate_servers::{FaultProxy, PostgresServer};

use crate::support::{Database, claims, completes, id, response, run, token};

#[tokio::test(flavor = "multi_thread")]
async fn the_store_recovers_from_a_crash_of_the_server_without_a_restart() {
    let mut options = oncegate_servers::PostgresOptions::default();
    options.fsync = true;
    let mut server = PostgresServer::start_with(options).unwrap();
    let options = PostgresOptions::from_url(&server.url())
        .unwrap()
        .with_connect_timeout(Duration::from_secs(2))
        .unwrap();
    schema::apply(&options).await.unwrap();
    let store = Arc::new(PostgresStore::open(options).await.unwrap());
    assert_eq!(store.capabilities().durability, oncegate_core::Durability::Synced);
    // Workers claim and complete all the time, and record the acknowledged commands.
    let workers: Vec<_> = (0..4_u8)
        .map(|worker| {
            let store = store.clone();
            tokio::spawn(async move {
                let mut acknowledged = Vec::new();
                for number in 0.. {
                    let id = id(worker * 60 + number % 60);
                    match store.apply(id, claims(u128::from(number))).await {
                        Ok(Outcome::Execute(grant)) => {
                            let complete = completes(grant.token, Completion::Replayable(response(b"paid")));
                            match store.apply(id, complete).await {
                                Ok(Outcome::Completed) => acknowledged.push(id),
                                Ok(other) => panic!("{other:?}"),
                                Err(error) => {
                                    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
                                    break;
                                }
                            }
                        }
                        Ok(Outcome::Replay(_)) => tokio::time::sleep(Duration::from_millis(1)).await,
                        Ok(other) => panic!("{other:?}"),
                        Err(error) => {
                            assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
                            break;
                        }
                    }
                }
                acknowledged
            })
        })
        .collect();
    // Stops the server in the middle of the work, not before it begins.
    while !matches!(store.lookup(id(3)).await, Ok(Some(_))) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let mut server = tokio::task::spawn_blocking(move || {
        server.stop_immediately().unwrap();
        server
    })
    .await
    .unwrap();
    let mut acknowledged = Vec::new();
    for worker in workers {
        acknowledged.extend(worker.await.unwrap());
    }
    assert!(!acknowledged.is_empty());
    assert_eq!(store.check().await.unwrap_err().kind(), StoreErrorKind::Unavailable);
    // By now there is no connection left on which a command could have been sent.
    let error = store.apply(id(1), claims(1 << 71)).await.unwrap_err();
    assert!(error.is_unsent() && error.extent() == Extent::Store, "{error}");
    let _server = tokio::task::spawn_blocking(move || {
        server.start_again().unwrap();
        server
    })
    .await
    .unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while store.check().await.is_err() {
        assert!(Instant::now() < deadline, "it does not come back");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for id in acknowledged {
        assert_eq!(store.apply(id, claims(1 << 70)).await.unwrap(), Outcome::Replay(response(b"paid")));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_whose_caller_gave_up_is_not_sent_after_the_outage() {
    let server = PostgresServer::start().unwrap();
    // Claims are sent one after the other, and each waits for its connection until the server is back.
    let options = PostgresOptions::from_url(&server.url()).unwrap().with_pool_size(1).unwrap();
    let options = options.with_connect_timeout(Duration::from_secs(120)).unwrap();
    schema::apply(&options).await.unwrap();
    let store = Arc::new(PostgresStore::open(options).await.unwrap());
    let mut server = tokio::task::spawn_blocking(move || {
        let mut server = server;
        server.stop_immediately().unwrap();
        server
    })
    .await
    .unwrap();
    // The only connection is found to be dead. From then on, claims wait for another one.
    while tokio::time::timeout(Duration::from_millis(500), store.apply(id(9), claims(9))).await.is_ok() {}
    let given_up = tokio::time::timeout(Duration::from_millis(500), store.apply(id(1), claims(1))).await;
    assert!(given_up.is_err(), "the server is away");
    let later = tokio::spawn({
        let store = store.clone();
        async move { store.apply(id(2), claims(2)).await }
    });
    let _server = tokio::task::spawn_blocking(move || {
        server.start_again().unwrap();
        server
    })
    .await
    .unwrap();
    assert!(matches!(later.await.unwrap(), Ok(Outcome::Execute(_))));
    assert!(store.lookup(id(1)).await.unwrap().is_none(), "it was claimed, and has no owner");
}

#[tokio::test(flavor = "multi_thread")]
async fn ended_idle_sessions_fail_one_claim_and_no_other_command() {
    let database = Database::fresh().await;
    let store = database.store().await;
    let owner = token(&store.apply(id(1), claims(1)).await.unwrap());
    let mut admin = database.connect().await;
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
               WHERE application_name = 'oncegate' AND datname = current_database()";
    run(&mut admin, end).await;
    // The sender knows that the claim may have been applied, and sends it again.
    let error = store.apply(id(1), claims(2)).await.unwrap_err();
    assert!(error.kind() == StoreErrorKind::Unavailable && !error.is_unsent(), "{error}");
    assert!(matches!(store.apply(id(1), claims(2)).await.unwrap(), Outcome::InProgress { .. }));
    run(&mut admin, end).await;
    assert!(store.lookup(id(1)).await.unwrap().is_some());
    run(&mut admin, end).await;
    assert_eq!(
        store.apply(id(1), completes(owner, Completion::Tombstone)).await.unwrap(),
        Outcome::Completed
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_wait_for_a_server_that_does_not_answer_is_bounded() {
    let database = Database::fresh().await;
    let options =
        database.options().with_pool_size(1).unwrap().with_connect_timeout(Duration::from_secs(3)).unwrap();
    let options = options.with_statement_timeout(Duration::from_millis(300)).unwrap();
    let store = Arc::new(PostgresStore::open(options).await.unwrap());
    let mut admin = database.connect().await;
    // Every statement waits, as during a migration by another program.
    run(&mut admin, "BEGIN; LOCK TABLE oncegate.records").await;
    let start = Instant::now();
    let (first, second) = {
        let (one, other) = (store.clone(), store.clone());
        let one = tokio::spawn(async move { one.apply(id(1), claims(1)).await });
        let other = tokio::spawn(async move { other.apply(id(2), claims(2)).await });
        (one.await.unwrap().unwrap_err(), other.await.unwrap().unwrap_err())
    };
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    assert_eq!([first.kind(), second.kind()], [StoreErrorKind::Unavailable; 2], "{first}; {second}");
    run(&mut admin, "ROLLBACK").await;
    assert!(matches!(store.apply(id(1), claims(1)).await.unwrap(), Outcome::Execute(_)));
}

/// All existing connections lose every packet, as behind a firewall that forgot them. New connections work.
#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_cost_one_command_timeout_each() {
    for pooler in [false, true] {
        let database = Database::fresh().await;
        let proxy = FaultProxy::start(database.server.port()).await.unwrap();
        let url =
            database.url().replace(&format!(":{}/", database.server.port()), &format!(":{}/", proxy.port()));
        let options = PostgresOptions::from_url(&format!("{url}?sslmode=disable")).unwrap();
        let options =
            options.with_command_timeout(Duration::from_secs(1)).unwrap().with_transaction_pooler(pooler);
        let store = Arc::new(
            PostgresStore::open(options.with_connect_timeout(Duration::from_secs(20)).unwrap())
                .await
                .unwrap(),
        );
        let at_once = |from: u8| {
            let store = store.clone();
            async move {
                let begun = Instant::now();
                let all: Vec<_> = (from..from + 8)
                    .map(|number| {
                        let store = store.clone();
                        tokio::spawn(async move { store.lookup(id(number)).await })
                    })
                    .collect();
                let mut failed = 0;
                for one in all {
                    failed += usize::from(one.await.unwrap().is_err());
                }
                (failed, begun.elapsed())
            }
        };
        // Opens as many connections as the pool allows.
        let owner = token(&store.apply(id(1), claims(1)).await.unwrap());
        assert_eq!(at_once(0).await.0, 0);
        proxy.swallow();
        // The command timeout is much shorter than the statement timeout.
        let (error, took) = {
            let begun = Instant::now();
            (store.apply(id(2), claims(2)).await.unwrap_err(), begun.elapsed())
        };
        assert!(!error.is_unsent() && error.kind() == StoreErrorKind::Unavailable, "{error}");
        assert!(took >= Duration::from_secs(1) && took < Duration::from_secs(4), "{took:?}");
        // The idle connections are closed together with the silent one.
        let (failed, took) = at_once(10).await;
        assert_eq!(failed, 0, "after {took:?}");
        let ended = store.apply(id(1), completes(owner, Completion::Tombstone)).await.unwrap();
        assert_eq!(ended, Outcome::Completed);
        // All at the same time: each finds out on its own, and none waits for another.
        proxy.swallow();
        let (_, took) = at_once(20).await;
        assert!(took < Duration::from_secs(4), "{took:?}");
        assert_eq!(at_once(30).await.0, 0);
    }
}

/// The keepalive timers of the server's connections in seconds, as the kernel reports them.
fn keepalives(port: u16) -> Vec<u64> {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let local = format!(":{port:04X}");
    let seconds = |line: &str| {
        let mut fields = line.split_whitespace().skip(1);
        let (local_address, _remote, state) = (fields.next()?, fields.next()?, fields.next()?);
        let (timer, when) = fields.nth(1)?.split_once(':')?;
        let is_ours = local_address.ends_with(&local) && state == "01" && timer == "02";
        is_ours.then(|| u64::from_str_radix(when, 16).unwrap() / 100)
    };
    table.lines().filter_map(seconds).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_sends_keepalives_on_idle_connections() {
    let server = tokio::task::spawn_blocking(PostgresServer::start).await.unwrap().unwrap();
    let options = PostgresOptions::from_url(&server.url()).unwrap();
    schema::apply(&options).await.unwrap();
    let store = PostgresStore::open(options).await.unwrap();
    store.check().await.unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    // The timer starts when the last reply is acknowledged.
    while !keepalives(server.port()).iter().any(|seconds| *seconds <= 30) {
        assert!(Instant::now() < deadline, "{:?}", keepalives(server.port()));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_store_is_unavailable() {
    let database = Database::fresh().await;
    let store = database.store().await;
    store.close().await;
    assert_eq!(store.apply(id(1), claims(1)).await.unwrap_err().kind(), StoreErrorKind::Unavailable);
}

/// A statement that makes commands of the store fail, and one that repairs the database.
const REPAIRS: [(&str, &str, &str); 5] = [
    ("42501", "REVOKE USAGE ON SCHEMA oncegate FROM ROLE", "GRANT USAGE ON SCHEMA oncegate TO ROLE"),
    (
        "42501",
        "REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate FROM ROLE",
        "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate TO ROLE",
    ),
    ("3F000", "ALTER SCHEMA oncegate RENAME TO away", "ALTER SCHEMA away RENAME TO oncegate"),
    // 42P01 if the session has compiled the function, else 42704.
    ("42", "ALTER TABLE oncegate.records RENAME TO away", "ALTER TABLE oncegate.away RENAME TO records"),
    (
        "42883",
        "ALTER FUNCTION oncegate.complete_if_owner RENAME TO away",
        "ALTER FUNCTION oncegate.away RENAME TO complete_if_owner",
    ),
];

#[tokio::test(flavor = "multi_thread")]
async fn an_error_that_an_operator_repairs_while_programs_run_may_pass() {
    let database = Database::fresh().await;
    let mut admin = database.connect().await;
    let role = format!("app_{}", database.name);
    run(
        &mut admin,
        &format!(
            "CREATE ROLE {role} LOGIN PASSWORD 'app'; GRANT USAGE ON SCHEMA oncegate TO {role};
             GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate TO {role}"
        ),
    )
    .await;
    let url = format!(
        "postgres://{role}:app@127.0.0.1:{}/{}?sslmode=disable",
        database.server.port(),
        database.name
    );
    let store = PostgresStore::open(PostgresOptions::from_url(&url).unwrap()).await.unwrap();
    for (number, (code, breaks, repairs)) in (1..).zip(REPAIRS) {
        let owner = token(&store.apply(id(number), claims(1)).await.unwrap());
        let complete = || completes(owner, Completion::Replayable(response(b"paid")));
        run(&mut admin, &breaks.replace("ROLE", &role)).await;
        let error = store.apply(id(number), complete()).await.unwrap_err();
        assert!(error.kind().may_pass() && error.to_string().contains(code), "{breaks}: {error}");
        run(&mut admin, &repairs.replace("ROLE", &role)).await;
        let outcome = store.apply(id(number), complete()).await.unwrap();
        assert!(matches!(outcome, Outcome::Completed), "{breaks}: {outcome:?}");
    }
}
