//! Many messages in one transaction.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use oncegate_inbox::{
    Consumer, Delivery, Message, ProcessOutcome, Processor as _, Source, SourceError, SourceInfo,
};
use oncegate_postgres::sqlx;
use oncegate_testkit::until;

use crate::support::{Database, again, effect, inbox_of, new, ordered, process_each, run, word, words};

#[tokio::test(flavor = "multi_thread")]
async fn the_new_messages_of_a_batch_share_one_transaction() {
    let database = Database::fresh().await;
    let inbox = database.inbox(2).await;
    let batch = [new("a"), again("b"), new("c"), new("a"), again("b")];
    let handled = process_each(&inbox, &batch, effect).await;
    assert_eq!(words(&handled), ["processed 1", "processed 1", "processed 1", "duplicate", "duplicate"]);
    // A message that fails has failed once, even if the batch has it several times.
    let handled = process_each(&inbox, &[again("poison"), again("poison")], effect).await;
    assert_eq!(words(&handled), ["failed 1", "in-flight"]);
    let more = [new("d"), new("a"), new("e")];
    assert_eq!(
        words(&process_each(&inbox, &more, effect).await),
        ["processed 1", "duplicate", "processed 1"]
    );
    assert_eq!(words(&process_each(&inbox, &more, effect).await), ["duplicate"; 3]);
    assert_eq!(database.effects().await, ["a", "b", "c", "d", "e"]);
    assert_eq!(database.number("SELECT count(DISTINCT transaction) FROM effects").await, 2);
    assert!(process_each(&inbox, &[], effect).await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_handler_gets_all_new_messages_at_once() {
    let database = Database::fresh().await;
    assert!(database.inbox(1).await.with_max_attempts(0).is_err());
    assert!(database.inbox(1).await.with_max_batch(0).is_err());
    assert!(database.inbox(1).await.with_max_runs(101).is_err());
    assert!(database.inbox(1).await.with_statement_timeout(Duration::ZERO).is_err());
    let inbox = database.inbox(2).await.with_max_attempts(1).unwrap();
    assert_eq!(words(&[inbox.process(&new("b"), effect).await]), ["processed 1"]);
    let calls = Arc::new(AtomicU32::new(0));
    let processor = inbox.batch_processor({
        let calls = calls.clone();
        async move |connection: &mut sqlx::PgConnection, messages: &[&Message]| {
            calls.fetch_add(1, Ordering::SeqCst);
            let all: Vec<_> =
                messages.iter().map(|m| String::from_utf8_lossy(&m.payload).into_owned()).collect();
            sqlx::query("INSERT INTO effects (message) SELECT unnest($1::text[])")
                .bind(all)
                .execute(connection)
                .await?;
            match messages.iter().any(|message| message.payload.starts_with(b"poison")) {
                true => Err(oncegate_inbox::HandlerError::retry("poison")),
                false => Ok(()),
            }
        }
    });
    assert_eq!(processor.max_batch(), 100);
    let handled = processor.process(&[new("a"), new("b"), new("c")]).await;
    assert_eq!(words(&handled), ["processed 1", "duplicate", "processed 1"]);
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    let handled = processor.process(&[new("d"), new("poison"), new("e")]).await;
    assert_eq!(words(&handled), ["processed 1", "dead attempts-exhausted", "processed 1"]);
    assert_eq!(calls.load(Ordering::SeqCst), 5);
    assert_eq!(database.effects().await, ["b", "a", "c", "d", "e"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_message_blocks_only_its_order_key() {
    let database = Database::fresh().await;
    let inbox = database.inbox(2).await.with_max_attempts(3).unwrap().with_max_batch(4).unwrap();
    let batch = [
        ordered("k1", "k"),
        ordered("poison", "k"),
        ordered("l1", "l"),
        ordered("k2", "k"),
        // The next batch.
        new("free"),
        ordered("k3", "k"),
        ordered("l2", "l"),
    ];
    let first = process_each(&inbox, &batch, effect).await;
    let expected =
        ["processed 1", "failed 1", "processed 1", "not begun", "processed 1", "not begun", "processed 1"];
    assert_eq!(words(&first), expected);
    let second = process_each(&inbox, &batch, effect).await;
    let expected = ["duplicate", "failed 2", "duplicate", "not begun", "duplicate", "not begun", "duplicate"];
    assert_eq!(words(&second), expected);
    // Given up, it holds up nothing any more.
    let third = process_each(&inbox, &batch, effect).await;
    assert_eq!(third.iter().filter(|handled| matches!(handled, ProcessOutcome::Processed { .. })).count(), 2);
    assert_eq!(words(&third)[1], "dead attempts-exhausted");
    assert_eq!(database.effects().await, ["k1", "l1", "free", "l2", "k2", "k3"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_in_flight_blocks_only_its_order_key() {
    let database = Database::fresh().await;
    let inbox = database.inbox(2).await;
    let batch = [
        ordered("k1", "k"),
        ordered("k2", "k"),
        ordered("k3", "k"),
        ordered("l1", "l"),
        new("free"),
        new("free"),
    ];
    let mut elsewhere = database.connect().await;
    let id = "oncegate.message_record('billing', 'k2', ARRAY['header', 'event-id'])";
    run(&mut elsewhere, &format!("BEGIN; SELECT * FROM oncegate.receive({id})")).await;
    let handled = process_each(&inbox, &batch, effect).await;
    let expected = ["processed 1", "in-flight", "not begun", "processed 1", "processed 1", "duplicate"];
    assert_eq!(words(&handled), expected);
    // Also if this is known before the transaction.
    let batch: Vec<_> =
        batch.iter().map(|m| Arc::new(Message::clone(m).with_deliveries(Some(2), true))).collect();
    let handled = process_each(&inbox, &batch, effect).await;
    assert_eq!(
        words(&handled),
        ["duplicate", "in-flight", "not begun", "duplicate", "duplicate", "duplicate"]
    );
    run(&mut elsewhere, "COMMIT").await;
    let handled = process_each(&inbox, &batch, effect).await;
    assert_eq!(words(&handled)[1..3], ["duplicate", "processed 1"]);
    assert_eq!(database.effects().await, ["k1", "l1", "free", "k3"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_failed_before_runs_separately() {
    let database = Database::fresh().await;
    let inbox = database.inbox(2).await.with_max_attempts(3).unwrap();
    let batch = [again("a"), again("poison"), again("b")];
    assert_eq!(
        words(&process_each(&inbox, &batch, effect).await),
        ["processed 1", "failed 1", "processed 1"]
    );
    let runs = Arc::new(AtomicU32::new(0));
    let counted = {
        let runs = runs.clone();
        async move |connection: &mut sqlx::PgConnection, message: &Message| {
            runs.fetch_add(1, Ordering::SeqCst);
            effect(connection, message).await
        }
    };
    let batch = [again("c"), again("poison"), again("d"), again("nothing")];
    let handled = process_each(&inbox, &batch, counted.clone()).await;
    assert_eq!(words(&handled), ["processed 1", "failed 2", "processed 1", "processed 1"]);
    assert_eq!(runs.load(Ordering::SeqCst), 4, "each once");
    let handled = process_each(&inbox, &batch, counted).await;
    assert_eq!(words(&handled), ["duplicate", "dead attempts-exhausted", "duplicate", "duplicate"]);
    assert_eq!(runs.load(Ordering::SeqCst), 5);
    // Also if it is the only message that may have been delivered before.
    assert_eq!(word(&inbox.process(&again("poison2"), effect).await), "failed 1");
    let runs = Arc::new(AtomicU32::new(0));
    let counted = {
        let runs = runs.clone();
        async move |connection: &mut sqlx::PgConnection, message: &Message| {
            runs.fetch_add(1, Ordering::SeqCst);
            effect(connection, message).await
        }
    };
    let handled = process_each(&inbox, &[new("x"), again("poison2"), new("y")], counted).await;
    assert_eq!(words(&handled), ["processed 1", "failed 2", "processed 1"]);
    assert_eq!(runs.load(Ordering::SeqCst), 3, "each once");
    // What is without an identity, or has another one's, neither.
    let nameless = Arc::new(Message::new("orders", "who?").with_deliveries(Some(1), false));
    let handled = process_each(&inbox, &[new("e"), nameless, new("f")], effect).await;
    assert_eq!(words(&handled), ["processed 1", "dead no-identity", "processed 1"]);
    let compares = inbox_of(database.pool(2).await, "compares").with_payloads_compared(true);
    let reused = |id: &'static str, text: &'static str| {
        Arc::new(Message::new("orders", text).with_header("event-id", id).with_deliveries(Some(1), false))
    };
    let batch = [reused("1", "g"), reused("1", "other"), reused("1", "g"), reused("2", "h")];
    let handled = process_each(&compares, &batch, effect).await;
    assert_eq!(words(&handled), ["processed 1", "dead identity-reused", "duplicate", "processed 1"]);
    assert_eq!(database.effects().await, ["a", "b", "c", "d", "nothing", "x", "y", "e", "f", "g", "h"]);
}

/// Several consumers with overlapping batches in an order of their own, some of which fail now and then.
#[tokio::test(flavor = "multi_thread")]
async fn overlapping_batches_take_effect_once() {
    const MESSAGES: usize = 400;
    let database = Database::fresh().await;
    let pool = database.pool(8).await;
    let tasks: Vec<_> = (0..8_usize)
        .map(|task| {
            let inbox = crate::support::inbox(pool.clone()).with_max_batch(1 + task * 12).unwrap();
            tokio::spawn(async move {
                let mut open: Vec<_> = (0..MESSAGES)
                    .map(|n| (n * (2 * task + 7) + task * 50) % MESSAGES)
                    .map(|n| if n % 3 == 0 { again(&format!("m{n}")) } else { new(&format!("m{n}")) })
                    .collect();
                let failures = Arc::new(AtomicU32::new(0));
                while !open.is_empty() {
                    let failures = failures.clone();
                    let run = async move |connection: &mut sqlx::PgConnection, message: &Message| {
                        effect(connection, message).await?;
                        match failures.fetch_add(1, Ordering::SeqCst) % 97 {
                            96 => Err(oncegate_inbox::HandlerError::retry("now and then")),
                            _ => Ok(()),
                        }
                    };
                    let handled = process_each(&inbox, &open, run).await;
                    let mut left = Vec::new();
                    for (message, handled) in open.into_iter().zip(handled) {
                        match handled {
                            ProcessOutcome::Processed { .. } | ProcessOutcome::Duplicate => {}
                            ProcessOutcome::InFlight { .. }
                            | ProcessOutcome::Failed { .. }
                            | ProcessOutcome::NotBegun => left.push(message),
                            other => panic!("{other:?}"),
                        }
                    }
                    open = left;
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let mut effects: BTreeMap<String, u32> = BTreeMap::new();
    for effect in database.effects().await {
        *effects.entry(effect).or_default() += 1;
    }
    assert_eq!(effects.len(), MESSAGES);
    assert!(effects.values().all(|count| *count == 1), "{effects:?}");
}

/// A broker of the simplest kind: what is not acknowledged comes again.
struct Queue {
    waiting: tokio::sync::mpsc::UnboundedReceiver<Arc<Message>>,
    back: tokio::sync::mpsc::UnboundedSender<Arc<Message>>,
    acknowledged: Arc<AtomicU32>,
}

struct Taken {
    message: Arc<Message>,
    back: tokio::sync::mpsc::UnboundedSender<Arc<Message>>,
    acknowledged: Arc<AtomicU32>,
}

impl Source for Queue {
    type Delivery = Taken;

    fn info(&self) -> SourceInfo {
        SourceInfo::new(None)
    }

    async fn next(&mut self) -> Result<Taken, SourceError> {
        let message = self.waiting.recv().await.ok_or_else(|| SourceError::fatal("it is over"))?;
        Ok(Taken { message, back: self.back.clone(), acknowledged: self.acknowledged.clone() })
    }

    async fn close(&mut self) -> Result<(), SourceError> {
        Ok(())
    }
}

impl Delivery for Taken {
    const GIVES_BACK: bool = true;

    fn message(&self) -> &Arc<Message> {
        &self.message
    }

    async fn extend(&self) -> Result<(), SourceError> {
        Ok(())
    }

    async fn ack(&self) -> Result<(), SourceError> {
        self.acknowledged.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    async fn give_back(&self, after: Duration) -> Result<(), SourceError> {
        tokio::time::sleep(after).await;
        self.back.send(self.message.clone()).map_err(|_| SourceError::fatal("it is over"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn consumers_of_one_queue_process_each_message_once_and_acknowledge_each_delivery() {
    const MESSAGES: u32 = 2000;
    let database = Database::fresh().await;
    let acknowledged = Arc::new(AtomicU32::new(0));
    let stop = tokio_util::sync::CancellationToken::new();
    let mut tasks = Vec::new();
    for consumer in 0..2 {
        let (back, waiting) = tokio::sync::mpsc::unbounded_channel();
        for n in 0..MESSAGES {
            // Both get all of them; every tenth is poison, every other one has an order.
            let id = if n % 10 == 3 { format!("poison{n}") } else { format!("m{n}") };
            let message = if n % 2 == consumer { again(&id) } else { new(&id) };
            let message = if n % 4 == 0 {
                Message::clone(&message).with_order_key("k")
            } else {
                Message::clone(&message)
            };
            back.send(Arc::new(message)).unwrap();
        }
        let queue = Queue { waiting, back, acknowledged: acknowledged.clone() };
        let inbox = database.inbox(5).await.with_max_attempts(2).unwrap();
        let loops = Consumer::new(queue, inbox.processor(effect)).with_concurrency(4).unwrap();
        let loops = loops.with_backoff(Duration::from_millis(1), Duration::from_millis(5)).unwrap();
        let stop = stop.clone();
        tasks.push(tokio::spawn(async move { loops.run(stop.cancelled_owned()).await }));
    }
    until("all are acknowledged", async || acknowledged.load(Ordering::SeqCst) >= 2 * MESSAGES).await;
    stop.cancel();
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert_eq!(acknowledged.load(Ordering::SeqCst), 2 * MESSAGES);
    let effects = database.effects().await;
    let different: std::collections::BTreeSet<_> = effects.iter().collect();
    assert_eq!((effects.len(), different.len()), (1800, 1800));
    assert_eq!(database.number("SELECT count(*) FROM oncegate.dead_letters").await, 200);
    let ordered: Vec<u32> =
        effects.iter().filter_map(|m| m[1..].parse().ok()).filter(|n| n % 4 == 0).collect();
    assert!(ordered.is_sorted(), "{ordered:?}");
}
