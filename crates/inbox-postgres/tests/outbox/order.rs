//! Order under failures, without gaps.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use oncegate_core::{MemoryStore, OnAbandoned};
use oncegate_engine::Engine;
use oncegate_inbox::{
    DeadLetter, DeadLetterSink, Identity, Inbox, MESSAGE_ID, Message, ProcessOutcome, PutFuture,
};
use oncegate_inbox_postgres::{Outbox, RelayCounts, RelayEventKind};
use oncegate_postgres::sqlx::{self, AssertSqlSafe, Connection as _};
use oncegate_testkit::{Latch, ManualClock, until};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::broker::{Broker, Fault};
use crate::database::{Database, Running, message, relay, run};

/// Has every transient fault: each message at most twice, and its content decides which.
fn faulty() -> Broker {
    Broker::new(|taken, times| {
        let number =
            taken.id.bytes().fold(7_usize, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
        match (number / 7 + times) % 10 {
            _ if times >= 2 => Fault::None,
            0 => Fault::Unconfirmed,
            1 => Fault::Lost,
            2 => Fault::Afterwards(Duration::from_millis(30)),
            3 => Fault::Late(Duration::from_millis(10)),
            4 if number.is_multiple_of(11) => Fault::Hang,
            5 if number.is_multiple_of(11) => Fault::Panic,
            _ => Fault::None,
        }
    })
}

/// A sink that must not be used.
struct None_;

impl DeadLetterSink for None_ {
    fn put<'a>(&'a self, letter: &'a DeadLetter) -> PutFuture<'a> {
        panic!("{letter:?}")
    }
}

/// Three relays, one of which dies now and then in the middle of everything; a broker that loses, doubles, delays and hangs.
#[tokio::test(flavor = "multi_thread")]
async fn order_holds_per_key_and_a_consumer_sees_each_message_once() {
    let database = Database::with_schema().await;
    let broker = faulty();
    let start = |broker: &Broker| {
        let relay = relay(database.pool(), broker.clone()).with_max_run_length(7).unwrap();
        let relay = relay
            .with_lease(Duration::from_secs(1))
            .unwrap()
            .with_publish_timeout(Duration::from_millis(200))
            .unwrap();
        Running::start(relay)
    };
    let (first, second) = (start(&broker), start(&broker));
    let mut mortal = start(&broker);
    let mut expected: BTreeMap<Option<String>, Vec<String>> = BTreeMap::new();
    for number in 0..60 {
        let mut some = Vec::new();
        for key in 0..20 {
            let key = (key > 0).then(|| format!("key-{key}"));
            for part in 0..2 {
                some.push(message(key.as_deref(), format!("{number}.{part}")));
                expected.entry(key.clone()).or_default().push(format!("{number}.{part}"));
            }
        }
        database.send(&some).await;
        if number % 15 == 14 {
            mortal = start(&broker);
        }
    }
    database.is_drained().await;
    first.stop().await;
    second.stop().await;
    mortal.stop().await;

    let mut firsts = broker.firsts();
    for all in [&mut firsts, &mut expected] {
        all.get_mut(&None).unwrap().sort();
    }
    assert_eq!(firsts, expected);
    let log = broker.log();
    assert!(log.len() > 2400, "nothing came twice, so nothing was tried");

    // What is behind it sees each once, and in order.
    let engine = Engine::new(MemoryStore::new(ManualClock::at_millis(1)));
    let inbox = Inbox::new(engine, "billing", Identity::message_id(), OnAbandoned::Reexecute, None_).unwrap();
    let mut seen: BTreeMap<Option<String>, Vec<String>> = BTreeMap::new();
    for taken in log {
        let delivered = Message::new(taken.topic, taken.payload.clone()).with_header(MESSAGE_ID, taken.id);
        let handled = inbox.process(&Arc::new(delivered), async |_, _| Ok(())).await;
        match handled {
            ProcessOutcome::Processed { .. } => seen.entry(taken.key).or_default().push(taken.payload),
            ProcessOutcome::Duplicate => {}
            other => panic!("{other:?}"),
        }
    }
    seen.get_mut(&None).unwrap().sort();
    assert_eq!(seen, expected);
}

/// A smaller seq that is committed later is neither skipped, nor waited for.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_commits_late_is_published_late() {
    let database = Database::with_schema().await;
    let broker = Broker::good();
    let relay = Running::start(relay(database.pool(), broker.clone()));
    let mut slow = database.connect().await;
    let mut transaction = slow.begin().await.unwrap();
    for late in [message(Some("k"), "late"), message(None, "late")] {
        Outbox::new().send(&mut transaction, &late).await.unwrap();
    }
    database.send(&[message(Some("k"), "early"), message(None, "early")]).await;
    broker.holds(2).await;
    // The relay has looked again since, and found nothing.
    database.send(&[message(None, "next")]).await;
    broker.holds(3).await;
    assert!(broker.log().iter().all(|taken| taken.payload != "late"));
    transaction.commit().await.unwrap();
    database.is_drained().await;
    relay.stop().await;
    assert_eq!(broker.firsts()[&Some("k".to_owned())], ["early", "late"]);
    assert_eq!(broker.len(), 5);
}

/// Transactions that lock the row that a key stands for are in order; others write to the same keys, and commit whenever
/// they do.
#[tokio::test(flavor = "multi_thread")]
async fn transactions_that_lock_what_they_change_are_in_order_among_others_that_do_not() {
    let database = Database::with_schema().await;
    run(
        &mut database.connect().await,
        "CREATE TABLE accounts (id int PRIMARY KEY, n int NOT NULL); INSERT INTO accounts SELECT i, 0 FROM generate_series(0, 3) AS i",
    )
    .await;
    let broker = faulty();
    let relays: Vec<_> = (0..3)
        .map(|_| {
            let relay = relay(database.pool(), broker.clone()).with_max_run_length(4).unwrap();
            Running::start(relay.with_publish_timeout(Duration::from_millis(200)).unwrap())
        })
        .collect();
    let mut writers = JoinSet::new();
    for writer in 0..8_usize {
        let mut connection = database.connect().await;
        writers.spawn(async move {
            for round in 0..60_usize {
                let account = (writer + round) % 4;
                let mut transaction = connection.begin().await.unwrap();
                let sent = if writer < 5 {
                    let update = format!("UPDATE accounts SET n = n + 1 WHERE id = {account} RETURNING n");
                    let n: i32 =
                        sqlx::query_scalar(AssertSqlSafe(update)).fetch_one(&mut *transaction).await.unwrap();
                    message(Some(&format!("account-{account}")), n)
                } else {
                    message(Some(&format!("account-{account}")), format!("other {writer} {round}"))
                };
                Outbox::new().send(&mut transaction, &sent).await.unwrap();
                if round % 3 == 0 {
                    sleep(Duration::from_millis((7 * writer as u64 + round as u64) % 40)).await;
                }
                transaction.commit().await.unwrap();
            }
        });
    }
    while let Some(written) = writers.join_next().await {
        written.unwrap();
    }
    database.is_drained().await;
    for relay in relays {
        relay.stop().await;
    }
    assert_eq!(broker.distinct(), 8 * 60);
    for (key, payloads) in broker.firsts() {
        let numbers: Vec<i32> = payloads.iter().filter_map(|payload| payload.parse().ok()).collect();
        assert_eq!(numbers, (1..=75).collect::<Vec<_>>(), "{key:?}");
    }
}

/// While a message is not confirmed, no relay publishes anything behind it; other keys go on.
#[tokio::test(flavor = "multi_thread")]
async fn an_unconfirmed_message_blocks_only_its_key() {
    let database = Database::with_schema().await;
    let heals = Arc::new(AtomicBool::new(false));
    let healed = heals.clone();
    let broker = Broker::new(move |taken, _| {
        let is_ill = taken.payload == "1" && taken.key.as_deref() == Some("ill");
        if is_ill && !healed.load(Ordering::SeqCst) { Fault::Lost } else { Fault::None }
    });
    let relays = [0, 1].map(|_| Running::start(relay(database.pool(), broker.clone())));
    database.send(&["ill", "well"].map(|key| [1, 2, 3].map(|n| message(Some(key), n))).concat()).await;
    until("it was tried several times", async || broker.tried("ill/1") >= 5).await;
    until("nothing waits but what is behind the one that fails", async || {
        let status = database.status().await;
        (status.waiting, status.failing) == (3, 1)
    })
    .await;
    assert_eq!(broker.firsts().keys().flatten().collect::<Vec<_>>(), ["well"]);
    heals.store(true, Ordering::SeqCst);
    database.is_drained().await;
    for relay in relays {
        relay.stop().await;
    }
    assert_eq!(broker.firsts()[&Some("ill".to_owned())], ["1", "2", "3"]);
}

/// A broker that takes longer than the lease: it is renewed, and no other relay publishes the message, too.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_is_renewed_while_the_broker_is_slow() {
    let database = Database::with_schema().await;
    let counts = RelayCounts::default();
    let broker = Broker::new(|_, _| Fault::Late(Duration::from_secs(7)));
    let relays = [0, 1, 2].map(|_| {
        let relay = relay(database.pool(), broker.clone()).with_lease(Duration::from_secs(3)).unwrap();
        Running::start(relay.with_observer(counts.clone()))
    });
    database.send(&[message(Some("k"), 1), message(None, 1)]).await;
    database.is_drained().await;
    for relay in relays {
        relay.stop().await;
    }
    assert_eq!(broker.len(), 2);
    let text = counts.to_prometheus();
    for (event, count) in
        [("confirmed", 2), ("unconfirmed", 0), ("refused", 0), ("lost", 0), ("database-failed", 0)]
    {
        let line = format!("\noncegate_outbox_events_total{{event=\"{event}\"}} {count}\n");
        assert!(text.contains(&line), "{text}");
    }
}

/// A smaller seq that is committed while a run is published is a run of its own, and takes nothing away from the other.
#[tokio::test(flavor = "multi_thread")]
async fn rows_that_commit_in_front_of_a_run_cause_no_copies() {
    let database = Database::with_schema().await;
    let late_is_there = Latch::new();
    let held = late_is_there.clone();
    let broker = Broker::new(move |taken, _| match &*taken.payload {
        "early" => Fault::Held(held.clone()),
        _ => Fault::None,
    });
    let counts = RelayCounts::default();
    let relay = relay(database.pool(), broker.clone()).with_lease(Duration::from_secs(60)).unwrap();
    let relay = Running::start(relay.with_observer(counts.clone()));
    let mut slow = database.connect().await;
    let mut transaction = slow.begin().await.unwrap();
    Outbox::new().send(&mut transaction, &message(Some("k"), "late")).await.unwrap();
    database.send(&[message(Some("k"), "early"), message(Some("k"), "next")]).await;
    broker.holds(1).await;
    transaction.commit().await.unwrap();
    broker.holds(2).await;
    late_is_there.open();
    database.is_drained().await;
    relay.stop().await;
    assert_eq!(broker.firsts()[&Some("k".to_owned())], ["early", "late", "next"]);
    assert_eq!((broker.len(), counts.get(RelayEventKind::Lost)), (3, 0));
}
