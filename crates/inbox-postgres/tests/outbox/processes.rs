//! Relays that are processes of their own: killed, and suspended.

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use oncegate_inbox_postgres::Relay;
use oncegate_postgres::sqlx::{AssertSqlSafe, query_scalar};
use oncegate_servers::{freeze, thaw};
use oncegate_testkit::until;
use tokio::time::sleep;

use crate::broker::{Broker, Fault, Remote};
use crate::database::{Database, Running, message, pool, relay, run};

/// A relay in a process of its own, killed when it is dropped.
struct Process(Child);

impl Process {
    fn start(database: &Database, broker: SocketAddr, lease: Duration) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "processes::the_relay_of_a_process", "--nocapture"])
            .env("OUTBOX_TEST_DATABASE", database.url())
            .env("OUTBOX_TEST_BROKER", broker.to_string())
            .env("OUTBOX_TEST_LEASE_MS", lease.as_millis().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self(child)
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A process that stands still is killed, too. It may have been already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_relay_of_a_process() {
    // No test by itself: others run it, as a process of its own.
    if std::env::var_os("OUTBOX_TEST_DATABASE").is_none() {
        return;
    }
    let variable = |name| std::env::var(format!("OUTBOX_TEST_{name}")).unwrap();
    let publisher = Remote::new(variable("BROKER").parse().unwrap());
    Relay::new(pool(&variable("DATABASE")), publisher)
        .with_lease(Duration::from_millis(variable("LEASE_MS").parse().unwrap()))
        .unwrap()
        .with_poll(Duration::from_millis(20))
        .unwrap()
        .with_backoff(Duration::from_millis(5), Duration::from_millis(100))
        .unwrap()
        .run(std::future::pending::<()>())
        .await;
}

/// 100 000 messages, a quarter of them without an order, the others of 500 keys, some sent meanwhile, some rolled back; four
/// processes of which one is killed, or stopped for longer than its lease, again and again.
#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_thousand_messages_and_relays_that_are_killed_and_stopped() {
    const MESSAGES: i64 = 100_000;
    let database = Database::with_schema().await;
    let broker = Broker::good();
    let address = broker.listen().await;
    let lease = Duration::from_secs(2);
    let mut processes: Vec<_> = (0..4).map(|_| Process::start(&database, address, lease)).collect();
    let mut connection = database.connect().await;
    let sending = tokio::spawn(async move {
        for first in (0..MESSAGES).step_by(5000) {
            let send = |first: i64| {
                format!(
                    "SELECT count(oncegate.send_text('orders', n::text, CASE WHEN n % 4 > 0 THEN 'k' || n % 500 END, \
                     null, n::text)) \
                     FROM generate_series({first}, {first} + 4999) AS n"
                )
            };
            run(&mut connection, &format!("BEGIN; {}; ROLLBACK", send(first + 1_000_000))).await;
            run(&mut connection, &send(first)).await;
        }
    });
    let mut round = 0;
    while broker.distinct() < MESSAGES as usize {
        let process = &mut processes[round % 4];
        if round % 2 == 0 {
            process.kill();
            *process = Process::start(&database, address, lease);
        } else {
            freeze(process.0.id()).unwrap();
            sleep(lease + Duration::from_secs(1)).await;
            thaw(process.0.id()).unwrap();
        }
        sleep(Duration::from_millis(500)).await;
        round += 1;
        assert!(round < 200, "{} messages after {round} rounds", broker.distinct());
    }
    sending.await.unwrap();
    database.is_drained().await;
    drop(processes);
    assert_eq!(broker.distinct(), MESSAGES as usize, "those that were rolled back are not among them");
    assert!(round >= 2);
    for (key, payloads) in broker.firsts() {
        let numbers: Vec<i64> = payloads.iter().map(|payload| payload.parse().unwrap()).collect();
        assert!(key.is_none() || numbers.is_sorted(), "{key:?}");
    }
}

/// A relay is suspended between two messages, another one takes over, and the first one resumes. Its outcomes do not
/// count.
#[tokio::test(flavor = "multi_thread")]
async fn a_relay_that_resumes_after_its_lease_changes_nothing() {
    let database = Database::with_schema().await;
    // The first attempt at `2` is never answered: by that time the process is stopped.
    let broker = Broker::new(|taken, times| {
        if taken.payload == "2" && times == 0 { Fault::Late(Duration::from_secs(3)) } else { Fault::None }
    });
    let address = broker.listen().await;
    let process = Process::start(&database, address, Duration::from_secs(1));
    database.send(&[1, 2, 3, 4].map(|n| message(Some("k"), n))).await;
    broker.holds(2).await;
    freeze(process.0.id()).unwrap();
    let mut connection = database.connect().await;
    let held = "SELECT count(*) FROM oncegate.outbox WHERE free_at > oncegate.now_ms()";
    until("the lease is over", async || {
        query_scalar::<_, i64>(AssertSqlSafe(held.to_owned())).fetch_one(&mut connection).await.unwrap() == 0
    })
    .await;
    let other = Running::start(relay(database.pool(), broker.clone()));
    broker.holds(4).await;
    database.is_drained().await;
    thaw(process.0.id()).unwrap();
    // It is at work again when it publishes what is sent now, and the other one does not.
    other.stop().await;
    database.send(&[message(Some("k"), 5)]).await;
    broker.holds(5).await;
    database.is_drained().await;
    assert_eq!(broker.firsts()[&Some("k".to_owned())], ["1", "2", "3", "4", "5"]);
    assert_eq!(broker.tried("k/1"), 2, "it was not known whether it was confirmed");
    assert_eq!((broker.tried("k/3"), broker.tried("k/4")), (1, 1), "it knew that its time was over");
}
