//! Messages that the broker refuses, and what operators do about them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use oncegate_inbox_postgres::{OnRefused, RelayEvent, RelayEventKind, RelayObserver};
use oncegate_postgres::sqlx::Row as _;
use oncegate_testkit::until;

use crate::broker::{Broker, Fault};
use crate::database::{Database, Running, message, relay, run};

/// Refuses `bad` messages, until the switch is turned.
fn picky() -> (Broker, Arc<AtomicBool>) {
    let takes_all = Arc::new(AtomicBool::new(false));
    let takes = takes_all.clone();
    let broker = Broker::new(move |taken, _| {
        if taken.payload.starts_with("bad") && !takes.load(Ordering::SeqCst) {
            Fault::Refused
        } else {
            Fault::None
        }
    });
    (broker, takes_all)
}

/// Keeps the numbers of what is refused.
#[derive(Clone, Default)]
struct Refusals(Arc<Mutex<Vec<i64>>>);

impl RelayObserver for Refusals {
    fn observe(&self, event: &RelayEvent<'_>) {
        if event.kind == RelayEventKind::Refused {
            assert_eq!(event.topic, "orders");
            self.0.lock().unwrap().push(event.seq.unwrap());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_waits_until_an_operator_has_decided() {
    let database = Database::with_schema().await;
    let (broker, takes_all) = picky();
    let events = Refusals::default();
    let relay = Running::start(relay(database.pool(), broker.clone()).with_observer(events.clone()));
    let keyed = |key| ["1", "bad", "2"].map(|payload| message(Some(key), payload));
    database.send(&[keyed("a"), keyed("b")].concat()).await;
    database.send(&[message(None, "bad"), message(None, "3")]).await;
    let mut operator = database.connect().await;
    until("three messages are refused", async || database.status().await.refused == 3).await;
    broker.holds(3).await;
    assert_eq!(broker.firsts().len(), 3);
    // What is published is there until the relay has noted that it is.
    until("only the two behind those with a key wait", async || {
        let status = database.status().await;
        assert_eq!(status.refused, 3);
        status.waiting == 2
    })
    .await;
    assert_eq!(broker.tried("a/bad"), 1);

    let refused = run(&mut operator, "SELECT * FROM oncegate.outbox_refused()").await;
    let said: Vec<_> = refused
        .iter()
        .map(|row| {
            let error: String = row.get("error");
            assert!(error.contains("it does not take this"), "{error}");
            (row.get::<String, _>("id"), row.get::<i32, _>("attempts"), row.get::<bool, _>("blocks_key"))
        })
        .collect();
    let expected = [("a/bad", true), ("b/bad", true), ("/bad", false)];
    assert_eq!(said, expected.map(|(id, holds_up)| (id.to_owned(), 1, holds_up)));
    let seqs: Vec<i64> = refused.iter().map(|row| row.get("seq")).collect();
    let mut told = events.0.lock().unwrap().clone();
    told.sort_unstable();
    assert_eq!(told, seqs);
    let page = format!("SELECT * FROM oncegate.outbox_refused({}, 1)", seqs[0]);
    assert_eq!(run(&mut operator, &page).await[0].get::<i64, _>("seq"), seqs[1]);

    // One is published again, one is given up, and the one without an order, too.
    takes_all.store(true, Ordering::SeqCst);
    let decide = format!(
        "SELECT oncegate.outbox_requeue({0}) AND NOT oncegate.outbox_requeue({0}) AND oncegate.outbox_drop({1}) \
         AND NOT oncegate.outbox_drop({1}) AND oncegate.outbox_requeue({2})",
        seqs[0], seqs[1], seqs[2]
    );
    assert!(run(&mut operator, &decide).await[0].get::<bool, _>(0));
    database.is_drained().await;
    relay.stop().await;
    let firsts = broker.firsts();
    assert_eq!(firsts[&Some("a".to_owned())], ["1", "bad", "2"]);
    assert_eq!(firsts[&Some("b".to_owned())], ["1", "2"]);
    assert_eq!(firsts[&None].len(), 2);
    assert_eq!(database.status().await.refused, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_continues_behind_a_refused_message_if_allowed() {
    let database = Database::with_schema().await;
    let (broker, takes_all) = picky();
    let relay = Running::start(relay(database.pool(), broker.clone()).with_on_refused(OnRefused::Continue));
    database.send(&["bad", "1", "bad too", "2"].map(|payload| message(Some("a"), payload))).await;
    database.is_drained().await;
    assert_eq!(broker.firsts()[&Some("a".to_owned())], ["1", "2"]);
    assert_eq!(database.status().await.refused, 2);
    takes_all.store(true, Ordering::SeqCst);
    let mut operator = database.connect().await;
    run(&mut operator, "SELECT oncegate.outbox_requeue(seq) FROM oncegate.outbox_refused()").await;
    database.is_drained().await;
    relay.stop().await;
    assert_eq!(broker.firsts()[&Some("a".to_owned())], ["1", "2", "bad", "bad too"]);
}
