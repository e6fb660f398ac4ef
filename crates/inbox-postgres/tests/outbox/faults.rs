//! Servers that go away, and relays that stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use oncegate_postgres::sqlx::{AssertSqlSafe, Connection as _, PgConnection, query_scalar};
use oncegate_servers::{PgBouncer, PostgresServer};
use oncegate_testkit::until;
use tokio::time::sleep;

use crate::broker::{Broker, Fault};
use crate::database::{Database, Running, apply_schema, message, pool, relay, run};

/// Confirmed messages are settled before a relay ends, so no relay publishes them again.
#[tokio::test(flavor = "multi_thread")]
async fn a_relay_settles_everything_before_it_stops() {
    let database = Database::with_schema().await;
    let broker = Broker::new(|_, _| Fault::Late(Duration::from_millis(5)));
    let many: Vec<_> =
        (0..600).map(|n| message((n % 3 > 0).then(|| format!("k{}", n % 5)).as_deref(), n)).collect();
    database.send(&many).await;
    for so_many in [1, 200, 400] {
        let relay = Running::start(relay(database.pool(), broker.clone()).with_concurrency(16).unwrap());
        broker.holds(so_many).await;
        relay.stop().await;
        let mut connection = database.connect().await;
        let held = run(&mut connection, "SELECT FROM oncegate.outbox WHERE token IS NOT NULL").await.len();
        assert_eq!(held, 0, "what was not begun is free");
    }
    let relay = Running::start(relay(database.pool(), broker.clone()));
    database.is_drained().await;
    relay.stop().await;
    assert_eq!((broker.len(), broker.distinct()), (600, 600));
}

/// A shutdown ends in time, even if the broker hangs; messages confirmed by then count.
#[tokio::test(flavor = "multi_thread")]
async fn a_relay_stops_even_if_the_broker_hangs() {
    let database = Database::with_schema().await;
    let broker = Broker::new(
        |taken, times| if taken.payload == "2" && times == 0 { Fault::Hang } else { Fault::None },
    );
    database.send(&[1, 2, 3].map(|n| message(Some("k"), n))).await;
    let stopping = Running::start(
        relay(database.pool(), broker.clone()).with_shutdown_timeout(Duration::from_millis(50)),
    );
    broker.holds(2).await;
    stopping.stop().await;
    let left = "SELECT string_agg(id, ' ' ORDER BY seq) FROM oncegate.outbox WHERE free_at = 0";
    let left: String = query_scalar(left).fetch_one(&mut database.connect().await).await.unwrap();
    assert_eq!(left, "k/2 k/3");
    let relay = Running::start(relay(database.pool(), broker.clone()));
    database.is_drained().await;
    relay.stop().await;
    assert_eq!(broker.firsts()[&Some("k".to_owned())], ["1", "2", "3"]);
    assert_eq!((broker.tried("k/1"), broker.tried("k/2")), (1, 2));
}

/// A broker that is away: the relay does not try everything that there is, and goes on when it is back.
#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_down_is_not_overloaded() {
    let database = Database::with_schema().await;
    let is_back = Arc::new(AtomicBool::new(false));
    let back = is_back.clone();
    let broker = Broker::new(move |_, _| if back.load(Ordering::SeqCst) { Fault::None } else { Fault::Lost });
    let many: Vec<_> = (0..2000).map(|n| message(None, n)).collect();
    database.send(&many).await;
    let relay = Running::start(relay(database.pool(), broker.clone()).with_concurrency(8).unwrap());
    until("the relay has paused several times", async || database.status().await.failing >= 11).await;
    // What is watched for is that nothing happens: a relay that does not pause tries all of them many times over.
    sleep(Duration::from_secs(2)).await;
    let tries: usize = (0..2000).map(|n| broker.tried(&format!("/{n}"))).sum();
    assert!((11..500).contains(&tries), "{tries} tries in vain");
    is_back.store(true, Ordering::SeqCst);
    database.is_drained().await;
    relay.stop().await;
    assert_eq!((broker.len(), broker.distinct()), (2000, 2000));
}

/// The server crashes and comes back, several times, in the middle of everything.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_restart_loses_nothing() {
    let mut server = tokio::task::spawn_blocking(PostgresServer::start).await.unwrap().unwrap();
    apply_schema(&server.url()).await;
    let broker = Broker::new(|_, _| Fault::Late(Duration::from_millis(2)));
    let mut connection = PgConnection::connect(&server.url()).await.unwrap();
    let send = "SELECT count(oncegate.send_text('orders', n::text, CASE WHEN n % 10 > 0 THEN 'k' || n % 10 END, null, n::text)) \
                FROM generate_series(1, 5000) AS n";
    run(&mut connection, send).await;
    let relays = [0, 1].map(|_| {
        Running::start(relay(pool(&server.url()), broker.clone()).with_lease(Duration::from_secs(2)).unwrap())
    });
    for so_many in [500, 1500] {
        broker.holds(so_many).await;
        server = tokio::task::spawn_blocking(move || {
            server.stop_immediately().unwrap();
            server.start_again().unwrap();
            server
        })
        .await
        .unwrap();
    }
    let mut connection = PgConnection::connect(&server.url()).await.unwrap();
    until("the outbox is empty", async || {
        let count = query_scalar::<_, i64>("SELECT count(*) FROM oncegate.outbox");
        count.fetch_one(&mut connection).await.unwrap() == 0
    })
    .await;
    for relay in relays {
        relay.stop().await;
    }
    assert_eq!(broker.distinct(), 5000);
    for (key, payloads) in broker.firsts() {
        let numbers: Vec<u32> = payloads.iter().map(|payload| payload.parse().unwrap()).collect();
        assert!(key.is_none() || numbers.is_sorted(), "{key:?}: {numbers:?}");
    }
}

/// Behind PgBouncer in transaction mode, senders and relays.
#[tokio::test(flavor = "multi_thread")]
async fn a_relay_works_behind_a_transaction_pooler() {
    let database = Database::with_schema().await;
    let server = database.server.clone();
    let pooler = tokio::task::spawn_blocking(move || PgBouncer::start(&server, 2)).await.unwrap().unwrap();
    let url = pooler.url_of(&database.name);
    let outbox = oncegate_inbox_postgres::Outbox::new().with_transaction_pooler(true);
    let broker = Broker::good();
    let relays =
        [0, 1, 2].map(|_| Running::start(relay(pool(&url), broker.clone()).with_transaction_pooler(true)));
    let senders = pool(&url);
    for n in 0..100 {
        let mut transaction = senders.begin().await.unwrap();
        outbox.send(&mut transaction, &message(Some("k"), n)).await.unwrap();
        transaction.commit().await.unwrap();
    }
    database.is_drained().await;
    for relay in relays {
        relay.stop().await;
    }
    let expected: Vec<_> = (0..100).map(|n| n.to_string()).collect();
    assert_eq!(broker.firsts()[&Some("k".to_owned())], expected);
}

/// Connections that are cut while a call is away.
#[tokio::test(flavor = "multi_thread")]
async fn lost_connections_lose_nothing() {
    let database = Database::with_schema().await;
    let broker = Broker::good();
    let relay =
        Running::start(relay(database.pool(), broker.clone()).with_lease(Duration::from_secs(1)).unwrap());
    let mut operator = database.connect().await;
    for round in 0..30 {
        let some: Vec<_> = (0..50).map(|n| message(Some("k"), format!("{round}.{n}"))).collect();
        database.send(&some).await;
        let cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
                   WHERE datname = current_database() AND pid <> pg_backend_pid()";
        query_scalar::<_, i64>(AssertSqlSafe(cut.to_owned())).fetch_one(&mut operator).await.unwrap();
    }
    database.is_drained().await;
    relay.stop().await;
    let expected: Vec<_> = (0..30).flat_map(|round| (0..50).map(move |n| format!("{round}.{n}"))).collect();
    assert_eq!(broker.firsts()[&Some("k".to_owned())], expected);
}
