//! Events of a stream: each once, and in order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use oncegate_inbox::{HandlerError, Message, ProcessOutcome};
use oncegate_inbox_postgres::{
    ApplyOutcome, StreamBusy, StreamEvent, StreamGap, Streams, TransactionalInbox,
};
use oncegate_postgres::sqlx::{self, Connection as _, PgConnection};

use crate::support::{Database, again, new, process_each, run, word};

fn streams() -> Streams {
    Streams::new("history").unwrap()
}

async fn project(connection: &mut PgConnection, event: StreamEvent) -> Result<(), HandlerError> {
    let line = format!("{} {}", event.sequence, String::from_utf8_lossy(&event.event));
    sqlx::query("INSERT INTO effects (message) VALUES ($1)").bind(line).execute(connection).await?;
    Ok(())
}

/// In a transaction of its own.
async fn park(database: &Database, streams: &Streams, sequence: u64) -> ApplyOutcome {
    let mut connection = database.connect().await;
    let mut transaction = connection.begin().await.unwrap();
    let applied = streams.apply_or_buffer(&mut transaction, "s", sequence, b"x", project).await.unwrap();
    transaction.commit().await.unwrap();
    applied
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_is_applied_once_and_in_order() {
    for first in [0, 1, 17] {
        let database = Database::fresh().await;
        let streams = streams().with_first(first);
        let mut connection = database.connect().await;
        let mut apply = async |sequence: u64| {
            let mut transaction = connection.begin().await.unwrap();
            let applied = streams.apply(&mut transaction, "s", sequence, b"x", project).await.unwrap();
            transaction.commit().await.unwrap();
            applied
        };
        assert_eq!(apply(first + 1).await, ApplyOutcome::Gap { expected: first });
        assert_eq!(apply(first).await, ApplyOutcome::Applied { events: 1 });
        assert_eq!(apply(first).await, ApplyOutcome::AlreadyApplied);
        assert_eq!(apply(first + 2).await, ApplyOutcome::Gap { expected: first + 1 });
        assert_eq!(apply(first + 1).await, ApplyOutcome::Applied { events: 1 });
        assert_eq!(database.effects().await, [format!("{first} x"), format!("{} x", first + 1)]);
        let again = ApplyOutcome::Gap { expected: 3 }.or_retry().unwrap_err();
        assert_eq!(again.error().downcast_ref::<StreamGap>(), Some(&StreamGap { expected: 3 }));
        if first > 0 {
            let refused = streams.apply(&mut connection, "s", first - 1, b"x", project).await.unwrap_err();
            assert!(matches!(refused, HandlerError::Unsure(_)), "{refused:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_early_event_is_buffered_and_applied_in_order() {
    let database = Database::fresh().await;
    assert!(streams().with_max_buffered(100_001).is_err());
    let streams = streams().with_max_buffered(3).unwrap();
    assert_eq!(park(&database, &streams, 4).await, ApplyOutcome::Buffered { expected: 1 });
    assert_eq!(park(&database, &streams, 2).await, ApplyOutcome::Buffered { expected: 1 });
    assert_eq!(park(&database, &streams, 4).await, ApplyOutcome::Buffered { expected: 1 }, "again");
    assert_eq!(park(&database, &streams, 6).await, ApplyOutcome::Buffered { expected: 1 });
    // No more than so many.
    let mut connection = database.connect().await;
    let full = streams.apply_or_buffer(&mut connection, "s", 7, b"x", project).await.unwrap_err();
    assert_eq!(full.error().downcast_ref::<StreamGap>(), Some(&StreamGap { expected: 1 }));
    // Another stream, and another consumer, are others.
    let other = streams.apply_or_buffer(&mut connection, "t", 1, b"t", project).await.unwrap();
    assert_eq!(other, ApplyOutcome::Applied { events: 1 });
    let gaps = "SELECT concat_ws(' ', stream, expected, first_buffered, buffered) FROM oncegate.list_gaps('history', 10)";
    let said: Vec<String> = sqlx::query_scalar(gaps).fetch_all(&mut connection).await.unwrap();
    assert_eq!(said, ["s 1 2 3"]);

    // What is rolled back moved nothing.
    let mut transaction = connection.begin().await.unwrap();
    let applied = streams.apply_or_buffer(&mut transaction, "s", 1, b"x", project).await.unwrap();
    assert_eq!(applied, ApplyOutcome::Applied { events: 2 });
    transaction.rollback().await.unwrap();
    assert_eq!(park(&database, &streams, 1).await, ApplyOutcome::Applied { events: 2 });
    assert_eq!(park(&database, &streams, 3).await, ApplyOutcome::Applied { events: 2 });
    assert_eq!(park(&database, &streams, 2).await, ApplyOutcome::AlreadyApplied);
    assert_eq!(database.effects().await, ["1 t", "1 x", "2 x", "3 x", "4 x"]);
    // One is lost for good.
    run(&mut connection, "SELECT oncegate.set_stream('history', 's', 6)").await;
    assert_eq!(park(&database, &streams, 5).await, ApplyOutcome::AlreadyApplied);
    assert_eq!(park(&database, &streams, 6).await, ApplyOutcome::Applied { events: 1 });
    assert_eq!(database.number("SELECT count(*) FROM oncegate.buffered_events").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn events_buffered_behind_a_skipped_one_are_applied_with_the_next_event() {
    let database = Database::fresh().await;
    let streams = streams().with_max_buffered(2).unwrap();
    let mut connection = database.connect().await;
    assert_eq!(park(&database, &streams, 2).await, ApplyOutcome::Buffered { expected: 1 });
    run(&mut connection, "SELECT oncegate.set_stream('history', 's', 2)").await;
    // This event is buffered itself, behind another gap.
    assert_eq!(park(&database, &streams, 4).await, ApplyOutcome::Buffered { expected: 3 });
    assert_eq!(database.effects().await, ["2 x"]);
    // The buffer is full, and this event is the next one after it.
    assert_eq!(park(&database, &streams, 5).await, ApplyOutcome::Buffered { expected: 3 });
    run(&mut connection, "SELECT oncegate.set_stream('history', 's', 4)").await;
    assert_eq!(park(&database, &streams, 6).await, ApplyOutcome::Applied { events: 3 });
    // A buffered event comes again.
    assert_eq!(park(&database, &streams, 8).await, ApplyOutcome::Buffered { expected: 7 });
    run(&mut connection, "SELECT oncegate.set_stream('history', 's', 8)").await;
    assert_eq!(park(&database, &streams, 8).await, ApplyOutcome::Applied { events: 1 });
    // It is buffered, and taken at once with those before it.
    assert_eq!(park(&database, &streams, 10).await, ApplyOutcome::Buffered { expected: 9 });
    run(&mut connection, "SELECT oncegate.set_stream('history', 's', 10)").await;
    assert_eq!(park(&database, &streams, 11).await, ApplyOutcome::Applied { events: 2 });
    assert_eq!(database.effects().await, ["2 x", "4 x", "5 x", "6 x", "8 x", "10 x", "11 x"]);
    assert_eq!(database.number("SELECT count(*) FROM oncegate.buffered_events").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_events_are_fetched_and_applied_in_the_same_transaction() {
    let database = Database::fresh().await;
    let streams = streams().with_max_buffered(10).unwrap();
    assert_eq!(park(&database, &streams, 3).await, ApplyOutcome::Buffered { expected: 1 });
    assert_eq!(park(&database, &streams, 6).await, ApplyOutcome::Buffered { expected: 1 });
    let mut connection = database.connect().await;
    let mut fetch = async |sequence: u64, brings: usize| {
        let mut transaction = connection.begin().await.unwrap();
        let fetched =
            streams.apply_or_fetch(&mut transaction, "s", sequence, b"x", project, |missing| async move {
                Ok(missing.take(brings).map(|sequence| Bytes::from(format!("fetched {sequence}"))).collect())
            });
        let fetched = fetched.await;
        match &fetched {
            Ok(_) => transaction.commit().await.unwrap(),
            Err(_) => transaction.rollback().await.unwrap(),
        }
        fetched
    };
    for (sequence, brings, expected) in [(5, 2, 3), (12, 100, 1)] {
        let short = fetch(sequence, brings).await.unwrap_err();
        assert_eq!(short.error().downcast_ref::<StreamGap>(), Some(&StreamGap { expected }));
    }
    assert!(database.effects().await.is_empty());
    assert_eq!(fetch(5, 100).await.unwrap(), ApplyOutcome::Applied { events: 6 });
    assert_eq!(fetch(5, 100).await.unwrap(), ApplyOutcome::AlreadyApplied);
    assert_eq!(fetch(7, 100).await.unwrap(), ApplyOutcome::Applied { events: 1 });
    let expected = ["1 fetched 1", "2 fetched 2", "3 fetched 3", "4 fetched 4", "5 x", "6 x", "7 x"];
    assert_eq!(database.effects().await, expected);
    assert_eq!(database.number("SELECT count(*) FROM oncegate.buffered_events").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_one_transaction_works_on_a_stream_and_others_do_not_wait() {
    let database = Database::fresh().await;
    let streams = streams();
    let inbox = database.inbox(2).await;
    let mut elsewhere = database.connect().await;
    let mut transaction = elsewhere.begin().await.unwrap();
    assert_eq!(
        streams.apply(&mut transaction, "s", 1, b"x", project).await.unwrap(),
        ApplyOutcome::Applied { events: 1 }
    );
    let busy = streams.apply(&mut database.connect().await, "s", 2, b"x", project).await.unwrap_err();
    assert!(busy.error().is::<StreamBusy>(), "{busy}");
    // A message that finds it busy is in flight, and has not failed.
    let handle = async |sequence: u64, id: &str| {
        let streams = streams.clone();
        let message = new(id);
        let handled = inbox.process(&message, async move |connection, message| {
            streams.apply(connection, "s", sequence, &message.payload, project).await?.or_retry()
        });
        word(&handled.await)
    };
    assert_eq!(handle(2, "two").await, "in-flight");
    transaction.commit().await.unwrap();
    assert_eq!(handle(3, "three").await, "failed 1");
    assert_eq!(handle(2, "two").await, "processed 1");
    assert_eq!(handle(3, "three").await, "processed 2");
    assert_eq!(handle(3, "three, sent again under another name").await, "processed 1");
    assert_eq!(database.effects().await, ["1 x", "2 two", "3 three"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_of_a_busy_stream_has_no_failed_attempt() {
    let database = Database::fresh().await;
    let streams = streams();
    let inboxes = [database.inbox(2).await, database.inbox(2).await];
    let mut elsewhere = database.connect().await;
    let mut transaction = elsewhere.begin().await.unwrap();
    let first = streams.apply(&mut transaction, "s", 1, b"x", project).await.unwrap();
    assert_eq!(first, ApplyOutcome::Applied { events: 1 });
    let handle = async |inbox: &TransactionalInbox| {
        let streams = streams.clone();
        let message = again("two");
        let handled = inbox.process(&message, async move |connection, message| {
            streams.apply(connection, "s", 2, &message.payload, project).await?.or_retry()
        });
        word(&handled.await)
    };
    for _ in 0..4 {
        for inbox in &inboxes {
            assert_eq!(handle(inbox).await, "in-flight");
        }
    }
    transaction.commit().await.unwrap();
    assert_eq!(handle(&inboxes[0]).await, "processed 1");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_snapshot_of_a_stream_fails_with_a_serialization_error() {
    let database = Database::fresh().await;
    let streams = streams();
    for (sequence, level) in [(1, "REPEATABLE READ"), (2, "SERIALIZABLE"), (3, "REPEATABLE READ")] {
        let mut old = database.connect().await;
        run(&mut old, &format!("BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM effects")).await;
        assert_eq!(park(&database, &streams, sequence).await, ApplyOutcome::Applied { events: 1 });
        // The next event, which the old snapshot would buffer although it is due; and the same event, which it would
        // apply again.
        let wrong = match sequence {
            3 => streams.apply(&mut old, "s", sequence, b"x", project).await.unwrap_err(),
            _ => streams.apply_or_buffer(&mut old, "s", sequence + 1, b"x", project).await.unwrap_err(),
        };
        let code =
            wrong.error().downcast_ref::<sqlx::Error>().and_then(|error| error.as_database_error()?.code());
        assert_eq!(code.as_deref(), Some("40001"), "{level}");
    }
}

/// Several consumers get all events of several streams, each in an order of its own.
#[tokio::test(flavor = "multi_thread")]
async fn concurrent_consumers_apply_each_event_once_and_in_order() {
    const EVENTS: u64 = 60;
    const STREAMS: u64 = 3;
    let database = Database::fresh().await;
    let pool = database.pool(6).await;
    let streams = streams();
    let failures = Arc::new(AtomicU32::new(0));
    let tasks: Vec<_> = (0..6_u64)
        .map(|task| {
            // Each has a consumer name of its own, so every message goes to all of them.
            let inbox =
                crate::support::inbox_of(pool.clone(), &format!("c{task}")).with_max_batch(7).unwrap();
            let (streams, failures) = (streams.clone(), failures.clone());
            tokio::spawn(async move {
                let total = EVENTS * STREAMS;
                let mut open: Vec<_> = (0..total)
                    .map(|n| (n * (2 * task + 7) + 31 * task) % total)
                    .map(|n| new(&format!("{} {}", n % STREAMS, n / STREAMS + 1)))
                    .collect();
                while !open.is_empty() {
                    let (streams, failures) = (streams.clone(), failures.clone());
                    let run = async move |connection: &mut PgConnection, message: &Message| {
                        let text = std::str::from_utf8(&message.payload)?;
                        let (stream, sequence) = text.split_once(' ').unwrap();
                        let apply = async |connection: &mut PgConnection, event: StreamEvent| {
                            let line = String::from_utf8_lossy(&event.event).into_owned();
                            let insert = sqlx::query("INSERT INTO effects (message) VALUES ($1)").bind(line);
                            insert.execute(connection).await?;
                            Ok(())
                        };
                        let applied = streams.apply_or_buffer(
                            connection,
                            stream,
                            sequence.parse()?,
                            text.as_bytes(),
                            apply,
                        );
                        let _applied = applied.await?;
                        match failures.fetch_add(1, Ordering::SeqCst) % 41 {
                            40 => Err(HandlerError::retry("now and then")),
                            _ => Ok(()),
                        }
                    };
                    let handled = process_each(&inbox, &open, run).await;
                    let pairs = open.into_iter().zip(handled);
                    open = pairs
                        .filter_map(|(message, handled)| match handled {
                            ProcessOutcome::Processed { .. } | ProcessOutcome::Duplicate => None,
                            ProcessOutcome::InFlight { .. } | ProcessOutcome::Failed { .. } => Some(message),
                            other => panic!("{other:?}"),
                        })
                        .collect();
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let effects = database.effects().await;
    assert_eq!(effects.len() as u64, EVENTS * STREAMS);
    for stream in 0..STREAMS {
        let of_stream: Vec<_> =
            effects.iter().filter(|line| line.starts_with(&format!("{stream} "))).cloned().collect();
        let expected: Vec<_> = (1..=EVENTS).map(|sequence| format!("{stream} {sequence}")).collect();
        assert_eq!(of_stream, expected);
    }
}
