//! One message is processed once, with any outcome of its attempts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use oncegate_inbox::{ConsumerName, DeadReason, HandlerError, Identity, Message, ProcessOutcome};
use oncegate_inbox_postgres::{DeadLetterTable, Streams, TransactionalInbox};
use oncegate_postgres::Isolation;
use oncegate_postgres::sqlx::{self, Connection as _};
use oncegate_testkit::until;

use tokio::time::{Instant, sleep};

use crate::support::{Database, LONG, again, effect, inbox, inbox_of, new, process_each, run, word};

#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_processed_once_by_each_consumer() {
    let database = Database::fresh().await;
    let pool = database.pool(2).await;
    let (billing, shipping) = (inbox(pool.clone()), inbox_of(pool, "shipping"));
    for message in [new("a"), again("b")] {
        assert_eq!(word(&billing.process(&message, effect).await), "processed 1");
        assert_eq!(word(&billing.process(&message, effect).await), "duplicate");
        assert_eq!(word(&shipping.process(&message, effect).await), "processed 1");
        // Another process.
        assert_eq!(word(&database.inbox(1).await.process(&message, effect).await), "duplicate");
    }
    assert_eq!(database.effects().await, ["a", "a", "b", "b"]);
    assert_eq!(database.receipts().await, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_duplicates_at_once_are_one_effect() {
    for isolation in [Isolation::ReadCommitted, Isolation::RepeatableRead, Isolation::Serializable] {
        let database = Database::fresh().await;
        let inbox = database.inbox(20).await.with_isolation(isolation);
        for message in [new("a"), again("b")] {
            let tasks: Vec<_> = (0..100)
                .map(|_| {
                    let (inbox, message) = (inbox.clone(), message.clone());
                    tokio::spawn(async move {
                        loop {
                            match inbox.process(&message, effect).await {
                                ProcessOutcome::InFlight { .. } => {
                                    tokio::time::sleep(Duration::from_millis(5)).await
                                }
                                handled => break word(&handled),
                            }
                        }
                    })
                })
                .collect();
            let mut outcomes = Vec::new();
            for task in tasks {
                outcomes.push(task.await.unwrap());
            }
            let processed = outcomes.iter().filter(|outcome| outcome.starts_with("processed")).count();
            let duplicates = outcomes.iter().filter(|outcome| *outcome == "duplicate").count();
            assert_eq!((processed, duplicates), (1, 99), "{isolation:?} {outcomes:?}");
        }
        assert_eq!(database.effects().await, ["a", "b"], "{isolation:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_of_another_transaction_is_in_flight_without_waiting() {
    let database = Database::fresh().await;
    let inbox = database.inbox(2).await;
    let id = "oncegate.message_record('billing', 'a', ARRAY['header', 'event-id'])";
    let mut elsewhere = database.connect().await;
    for (message, end) in [(new("a"), "ROLLBACK"), (again("a"), "ROLLBACK"), (again("a"), "COMMIT")] {
        run(&mut elsewhere, &format!("BEGIN; SELECT * FROM oncegate.receive({id})")).await;
        let began = std::time::Instant::now();
        for _ in 0..3 {
            assert_eq!(word(&inbox.process(&message, effect).await), "in-flight");
        }
        assert!(began.elapsed() < Duration::from_secs(15), "a call waited for a lock");
        run(&mut elsewhere, end).await;
    }
    assert_eq!(
        word(&inbox.process(&new("a"), effect).await),
        "duplicate",
        "its receipt is that of plain SQL"
    );
    assert!(database.effects().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_fails_too_often_becomes_one_dead_letter() {
    let database = Database::fresh().await;
    let pool = database.pool(2).await;
    let inbox = inbox(pool.clone()).with_max_attempts(3).unwrap();
    let message = Message::new("orders", "poison\0")
        .with_header("event-id", "p")
        .with_header("trace\0", &b"\x00\xff"[..])
        .with_broker_id("orders/1")
        .with_order_key("k");
    let mut outcomes = Vec::new();
    for _ in 0..4 {
        let handled = inbox.process(&message, async |_, _| Err(HandlerError::retry("no\0 card"))).await;
        outcomes.push(word(&handled));
    }
    let expected = ["failed 1", "failed 2", "dead attempts-exhausted", "dead attempts-exhausted known"];
    assert_eq!(outcomes, expected);
    assert!(database.effects().await.is_empty());

    let letters = DeadLetterTable::new(pool);
    let [kept] = &letters.list(None, None, 10).await.unwrap()[..] else { panic!("not one letter") };
    let letter = &kept.dead_letter;
    assert_eq!(
        (letter.consumer.as_str(), letter.reason, letter.attempts),
        ("billing", DeadReason::AttemptsExhausted, 3)
    );
    assert_eq!(letter.error, "no␀ card");
    assert_eq!(letter.message.payload, "poison\0");
    assert_eq!(letter.message.header("event-id"), Ok(Some(&"p".into())));
    assert_eq!(letter.message.header("trace␀").unwrap().unwrap(), &b"\x00\xff"[..]);
    assert_eq!(letter.message.broker_id.as_deref(), Some("orders/1"));
    assert_eq!(letter.message.order_key.as_deref(), Some(&b"k"[..]));

    // An operator has it processed again, once.
    let failed = letters.take(kept.number, async |_, _| Err::<(), _>(HandlerError::retry("no broker"))).await;
    assert!(failed.is_err());
    assert_eq!(word(&inbox.process(&message, effect).await), "dead attempts-exhausted known");
    let passed_over = letters.take(kept.number, async |connection, _| {
        drop(sqlx::query("SELECT 1 / 0").execute(connection).await);
        Ok(())
    });
    assert!(passed_over.await.is_err(), "its COMMIT rolls back");
    assert_eq!(letters.list(None, None, 10).await.unwrap().len(), 1);
    let again = inbox.clone();
    let sent = letters.take(kept.number, async |connection, message| {
        assert_eq!(message.payload, "poison\0");
        // A copy that comes before the commit is not acknowledged as one that is dead.
        for message in [&*message, &Message::clone(&message).with_deliveries(Some(1), false)] {
            assert_eq!(word(&again.process(message, effect).await), "in-flight");
        }
        sqlx::query("INSERT INTO effects (message) VALUES ('sent')").execute(connection).await?;
        Ok(7)
    });
    assert_eq!(sent.await.unwrap(), Some(7));
    assert_eq!(letters.take(kept.number, async |_, _| Ok(())).await.unwrap(), None);
    let handled = inbox.process(&message, async |connection, _| {
        sqlx::query("INSERT INTO effects (message) VALUES ('mended')").execute(connection).await?;
        Ok(())
    });
    assert_eq!(word(&handled.await), "processed 1");
    assert_eq!(database.effects().await, ["sent", "mended"]);
    assert!(letters.list(None, None, 10).await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_that_is_processed_in_place_leaves_a_receipt() {
    let database = Database::fresh().await;
    let pool = database.pool(2).await;
    let inbox = inbox(pool.clone()).with_payloads_compared(true);
    let letters = DeadLetterTable::new(pool.clone());
    let reject = async |_: &mut _, _: &Message| Err(HandlerError::reject("not yet"));
    let unidentified = Arc::new(Message::new("orders", "unidentified"));
    for (message, died) in [(new("a"), "dead rejected"), (unidentified, "dead no-identity")] {
        assert_eq!(word(&inbox.process(&message, reject).await), died);
        let [kept] = &letters.list(None, None, 10).await.unwrap()[..] else { panic!("not one letter") };
        let others = TransactionalInbox::new(pool.clone(), "others", Identity::header("event-id")).unwrap();
        let error = others.process_dead_letter(kept.number, async |_, _| Ok(())).await.unwrap_err();
        assert!(error.to_string().contains("billing"), "{error}");
        let error = inbox.process_dead_letter(kept.number, async |connection, message| {
            effect(connection, &message).await?;
            Err::<(), _>(HandlerError::retry("not yet"))
        });
        assert_eq!(error.await.unwrap_err().to_string(), "not yet");
        let again = inbox.clone();
        let done = inbox.process_dead_letter(kept.number, async move |connection, message| {
            // A copy that comes before the commit is not acknowledged as one that is dead.
            assert_eq!(word(&again.process(&message, effect).await), "in-flight");
            effect(connection, &message).await.map(|()| 7)
        });
        assert_eq!(done.await.unwrap(), Some(7));
        assert!(letters.list(None, None, 10).await.unwrap().is_empty());
        assert_eq!(inbox.process_dead_letter(kept.number, async |_, _| Ok(())).await.unwrap(), None);
        assert_eq!(word(&inbox.process(&message, effect).await), "duplicate");
    }
    assert_eq!(database.effects().await, ["a", "unidentified"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rejected_and_unidentified_messages_become_dead_letters_at_once() {
    let database = Database::fresh().await;
    let pool = database.pool(2).await;
    let inbox = inbox(pool.clone()).with_payloads_compared(true);
    let twice = async |message: &Message| {
        let run = async |_: &mut _, _: &Message| Err(HandlerError::reject("no such order"));
        [word(&inbox.process(message, run).await), word(&inbox.process(message, run).await)]
    };
    assert_eq!(twice(&again("a")).await, ["dead rejected", "dead rejected known"]);
    let nameless = Message::new("orders", "who?");
    assert_eq!(twice(&nameless).await, ["dead no-identity", "dead no-identity known"]);

    assert_eq!(word(&inbox.process(&new("b"), effect).await), "processed 1");
    for message in [new("b"), again("b")] {
        assert_eq!(word(&inbox.process(&message, effect).await), "duplicate");
    }
    let other = Message::new("orders", "another").with_header("event-id", "b");
    assert_eq!(twice(&other).await, ["dead identity-reused", "dead identity-reused known"]);
    // Of what is dead, too.
    let other = Message::new("orders", "another").with_header("event-id", "a");
    assert_eq!(twice(&other).await, ["dead identity-reused", "dead identity-reused known"]);
    assert_eq!(database.effects().await, ["b"]);

    let letters = DeadLetterTable::new(pool);
    let first = letters.list(Some(inbox.consumer()), None, 2).await.unwrap();
    let rest = letters.list(Some(inbox.consumer()), Some(first[1].number), 10).await.unwrap();
    let reasons: Vec<_> = first.iter().chain(&rest).map(|kept| kept.dead_letter.reason.as_str()).collect();
    assert_eq!(reasons, ["rejected", "no-identity", "identity-reused", "identity-reused"]);
    assert!(letters.delete(first[0].number).await.unwrap());
    assert!(!letters.delete(first[0].number).await.unwrap());
    assert_eq!(word(&inbox.process(&again("a"), effect).await), "dead rejected known");
}

#[tokio::test(flavor = "multi_thread")]
async fn crashed_attempts_are_counted_and_running_ones_are_not() {
    let database = Database::fresh().await;
    let message = again("a");
    for crashes in 0..3 {
        // A process that ends in the middle is one whose inbox is dropped there. The next one has another number.
        let inbox = database.inbox(2).await.with_max_attempts(3).unwrap();
        let (began, begins) = tokio::sync::oneshot::channel();
        let began = Arc::new(std::sync::Mutex::new(Some(began)));
        let task = tokio::spawn({
            let (inbox, message) = (inbox.clone(), message.clone());
            async move {
                let run = async |connection: &mut _, message: &Message| {
                    effect(connection, message).await?;
                    began.lock().unwrap().take().unwrap().send(()).unwrap();
                    std::future::pending::<Result<(), HandlerError>>().await
                };
                inbox.process(&message, run).await
            }
        });
        begins.await.unwrap();
        let other = database.inbox(1).await.with_max_attempts(3).unwrap();
        for _ in 0..5 {
            assert_eq!(word(&other.process(&message, effect).await), "in-flight", "after {crashes} crashes");
        }
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
        // The server received it.
        until("the end of the transaction", async || {
            let locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'";
            database.number(locks).await == 0
        })
        .await;
        // Its own process does not count what was cut off by itself.
        let attempts = "SELECT sum(attempts)::bigint FROM oncegate.receipts";
        assert_eq!(database.number(attempts).await, crashes);
    }
    let inbox = database.inbox(1).await.with_max_attempts(3).unwrap();
    assert_eq!(word(&inbox.process(&message, effect).await), "dead attempts-exhausted");
    assert!(database.effects().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_whose_handler_rolled_back_is_not_acknowledged() {
    let database = Database::fresh().await;
    let inbox = database.inbox(2).await.with_max_attempts(100).unwrap();
    let (a, b) = (again("a"), again("b"));
    let undone = |sql: &'static str| {
        let (inbox, a) = (inbox.clone(), a.clone());
        async move {
            let handled = inbox.process(&a, async move |connection, message| {
                effect(connection, message).await?;
                let _passed_over = sqlx::raw_sql(sql).execute(&mut *connection).await;
                Ok(())
            });
            word(&handled.await)
        }
    };
    assert_eq!(undone("SELECT 1 / 0").await, "failed 1");
    assert_eq!(undone("ROLLBACK").await, "failed 2");
    assert_eq!(undone("ROLLBACK; BEGIN; SELECT txid_current()").await, "failed 3");
    let panics = inbox.process(&a, async |connection, message| {
        effect(connection, message).await?;
        panic!("on purpose")
    });
    assert_eq!(word(&panics.await), "failed 4");
    assert!(database.effects().await.is_empty());
    // What it committed itself is committed with its receipt.
    assert_eq!(undone("COMMIT").await, "duplicate");
    assert_eq!(database.effects().await, ["a"]);
    // A savepoint is its own affair.
    let handled = inbox.process(&b, async |connection, message| {
        let mut savepoint = connection.begin().await?;
        effect(&mut savepoint, message).await?;
        savepoint.rollback().await?;
        effect(connection, message).await
    });
    assert_eq!(word(&handled.await), "processed 1");
    assert_eq!(database.effects().await, ["a", "b"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_commits_a_batch_leads_to_dead_letters_for_all_of_it() {
    let gone = "COMMIT; SELECT pg_terminate_backend(pg_backend_pid())";
    for ends in ["COMMIT; BEGIN", "COMMIT", gone] {
        let database = Database::fresh().await;
        let inbox = database.inbox(2).await;
        let batch: Vec<_> = ["a", "poison", "c"].map(new).into();
        let handle = async || {
            let handled = process_each(&inbox, &batch, async move |connection, message| {
                effect(connection, message).await?;
                match &message.payload[..] {
                    b"a" => drop(sqlx::raw_sql(ends).execute(&mut *connection).await),
                    b"poison" => return Err(HandlerError::reject("never")),
                    _ => {}
                }
                Ok(())
            });
            handled.await.iter().map(word).collect::<Vec<_>>()
        };
        // All receipts are committed, and it is unknown which effects are.
        assert_eq!(handle().await, ["dead outcome-unknown"; 3], "{ends}");
        assert_eq!(database.number("SELECT count(*) FROM oncegate.dead_letters").await, 3);
        assert!(database.effects().await.contains(&"a".to_owned()));
        assert_eq!(handle().await, ["dead outcome-unknown known"; 3], "{ends}");
        // An operator who finds no effect has the message processed.
        let letters = DeadLetterTable::new(database.pool(1).await);
        let kept = letters.list(None, None, 10).await.unwrap();
        let last = kept.iter().find(|kept| kept.dead_letter.message.payload == batch[2].payload).unwrap();
        let sent = letters.take(last.number, async |_, message| Ok(message)).await.unwrap().unwrap();
        assert_eq!(word(&inbox.process(&sent, effect).await), "processed 1", "{ends}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_messages_of_the_doubtful_transaction_are_given_up() {
    let database = Database::fresh().await;
    let mut connection = database.connect().await;
    let ids: Vec<_> = ["a", "b", "failed"].map(|id| vec![id.as_bytes()[0]; 32]).into();
    let receive = sqlx::query_scalar("SELECT at FROM oncegate.receive_many($1, 60000)").bind(&ids[..2]);
    let at: Vec<i64> = receive.fetch_all(&mut connection).await.unwrap();
    assert_eq!(at[0], at[1]);
    run(&mut connection, "SELECT oncegate.fail_message(decode(repeat('66', 32), 'hex'), 60000)").await;
    let mut give_up = async |id: &[u8], at: i64| -> String {
        let dead = "SELECT outcome FROM oncegate.write_dead_letter($1, 'billing', 'outcome-unknown', 0, 'torn', 'orders', null, null, \
             '{}', '{}', '', 60000, null, $2)";
        sqlx::query_scalar(dead).bind(id).bind(at).fetch_one(&mut connection).await.unwrap()
    };
    for (id, at, outcome) in [
        (&ids[0], at[0] - 1, "processed"),
        (&ids[0], at[0] + 1, "processed"),
        (&ids[0], at[0], "written"),
        (&ids[0], at[0], "dead"),
        (&ids[2], at[0], "open"),
        (&vec![b'x'; 32], at[0], "open"),
    ] {
        assert_eq!(give_up(id, at).await, outcome, "{id:?} {at}");
    }
    assert_eq!(database.number("SELECT count(*) FROM oncegate.dead_letters").await, 1);
    assert_eq!(database.receipts().await, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_of_a_committing_handler_wait_for_other_transactions() {
    let database = Arc::new(Database::fresh().await);
    let inbox = database.inbox(2).await;
    let batch: Vec<_> = ["a", "b"].map(new).into();
    let record = Identity::header("event-id").of(&batch[1]).unwrap().record_id(inbox.consumer());
    let shared = database.clone();
    let handled = process_each(&inbox, &batch, async move |connection, message| {
        effect(connection, message).await?;
        if message.payload != "b" {
            return Ok(());
        }
        let mut other = shared.connect().await;
        // It waits for the lock of the message, and has it for a second after the commit.
        tokio::spawn(async move {
            let lock = "SELECT pg_advisory_lock(oncegate.message_lock($1)), pg_sleep(1)";
            sqlx::query(lock).bind(record.as_bytes().to_vec()).execute(&mut other).await.unwrap();
            other.close().await.unwrap();
        });
        let waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted \
             AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
        let deadline = Instant::now() + LONG;
        while shared.number(waits).await == 0 {
            assert!(Instant::now() < deadline, "no session waits");
            sleep(Duration::from_millis(20)).await;
        }
        sqlx::raw_sql("COMMIT").execute(&mut *connection).await?;
        Err(HandlerError::reject("never"))
    });
    let handled: Vec<_> = handled.await.iter().map(word).collect();
    assert_eq!(handled, ["dead outcome-unknown"; 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn conflicts_run_again_and_count_as_one_attempt() {
    let database = Database::fresh().await;
    let inbox = database.inbox(2).await.with_max_runs(3).unwrap();
    let conflict = "DO $$ BEGIN RAISE EXCEPTION 'busy' USING ERRCODE = '40001'; END $$";
    let runs = Arc::new(AtomicU32::new(0));
    let conflicts = |times: u32| {
        let runs = runs.clone();
        runs.store(0, Ordering::SeqCst);
        async move |connection: &mut sqlx::PgConnection, message: &Message| {
            effect(connection, message).await?;
            if runs.fetch_add(1, Ordering::SeqCst) < times {
                sqlx::raw_sql(conflict).execute(&mut *connection).await?;
            }
            Ok(())
        }
    };
    assert_eq!(word(&inbox.process(&new("a"), conflicts(2)).await), "processed 1");
    assert_eq!(runs.load(Ordering::SeqCst), 3);
    assert_eq!(word(&inbox.process(&new("b"), conflicts(100)).await), "failed 1");
    assert_eq!(runs.load(Ordering::SeqCst), 3);
    // A constraint that is checked at COMMIT.
    run(
        &mut database.connect().await,
        "CREATE TABLE parents (id int PRIMARY KEY); \
         CREATE TABLE children (parent int REFERENCES parents DEFERRABLE INITIALLY DEFERRED)",
    )
    .await;
    let message = new("c");
    let handled = inbox.process(&message, async |connection, _| {
        sqlx::query("INSERT INTO children VALUES (1)").execute(connection).await?;
        Ok(())
    });
    assert_eq!(word(&handled.await), "failed 1");
    assert_eq!(database.effects().await, ["a"]);
}

/// A snapshot that is older than another consumer's receipt never lets a message through.
#[tokio::test(flavor = "multi_thread")]
async fn an_old_snapshot_fails_with_a_serialization_error() {
    let database = Database::fresh().await;
    let id = "oncegate.message_record('billing', 'a', ARRAY['header', 'event-id'])";
    for (level, before) in [("REPEATABLE READ", new("a")), ("SERIALIZABLE", new("a"))] {
        run(&mut database.connect().await, "DELETE FROM oncegate.receipts").await;
        let mut old = database.connect().await;
        run(&mut old, &format!("BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM effects")).await;
        assert_eq!(word(&database.inbox(1).await.process(&before, effect).await), "processed 1");
        let received = sqlx::raw_sql(sqlx::AssertSqlSafe(format!("SELECT * FROM oncegate.receive({id})")));
        let error = received.execute(&mut old).await.unwrap_err();
        let code = error.as_database_error().and_then(|error| error.code().map(|code| code.into_owned()));
        assert_eq!(code.as_deref(), Some("40001"), "{level}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_needs_exactly_the_documented_grants() {
    let database = Database::fresh().await;
    let page = include_str!("../../../../docs/reference/messages-postgres.md");
    let grants: String =
        page.split("## Grants").nth(1).unwrap().split("```").nth(1).unwrap().trim_start_matches("sql").into();
    let (consumer, operator) = (format!("c_{}", database.name), format!("o_{}", database.name));
    let grants = grants
        .replace("TO consumer", &format!("TO {consumer}"))
        .replace("TO operator", &format!("TO {operator}"));
    let mut owner = database.connect().await;
    run(&mut owner, &format!("CREATE ROLE {consumer}; CREATE ROLE {operator}")).await;
    run(
        &mut owner,
        &format!(
            "GRANT INSERT ON effects TO {consumer}; GRANT USAGE ON SEQUENCE effects_number_seq TO {consumer}"
        ),
    )
    .await;
    let pool_as = |role: String| {
        let set = Arc::new(format!("SET ROLE {role}"));
        let options =
            sqlx::postgres::PgPoolOptions::new().max_connections(2).acquire_timeout(crate::support::LONG);
        let options = options.after_connect(move |connection, _| {
            let set = set.clone();
            Box::pin(async move {
                run(connection, &set).await;
                Ok(())
            })
        });
        options.connect_lazy(&database.url()).unwrap()
    };
    let pool = pool_as(consumer);
    let inbox = inbox(pool.clone()).with_max_attempts(1).unwrap();
    let missing = inbox.check().await.unwrap_err().to_string();
    assert!(
        missing.contains("oncegate.receive_many") && missing.contains("oncegate.purge_receipts"),
        "{missing}"
    );
    assert!(word(&inbox.process(&again("a"), effect).await).starts_with("unavailable"));
    run(&mut owner, &grants).await;
    inbox.check().await.unwrap();
    let streams = Streams::new(inbox.consumer()).unwrap();
    let handler = async |connection: &mut sqlx::PgConnection, message: &Message| {
        let sequence = u64::from(message.payload.len() as u32);
        let applied =
            streams.apply_or_buffer(&mut *connection, "s", sequence, &message.payload, async |_, _| Ok(()));
        applied.await?.or_retry()?;
        effect(connection, message).await
    };
    for (id, expected) in [
        ("bb", "processed 1"),
        ("a", "processed 1"),
        ("a", "duplicate"),
        ("poison", "dead attempts-exhausted"),
    ] {
        let outcome = word(&inbox.process(&again(id), handler).await);
        let said = "SELECT string_agg(error, '; ') FROM oncegate.dead_letters";
        let said: Option<String> = sqlx::query_scalar(said).fetch_one(&mut owner).await.unwrap();
        assert_eq!(outcome, expected, "{id} {said:?}");
    }
    assert_eq!(inbox.purge().await.unwrap(), 0);
    let letters = DeadLetterTable::new(pool);
    assert!(letters.list(None, None, 1).await.is_err(), "that is for operators");
    let letters = DeadLetterTable::new(pool_as(operator));
    let [kept] = &letters.list(None, None, 10).await.unwrap()[..] else { panic!("not one letter") };
    assert_eq!(letters.take(kept.number, async |_, _| Ok(())).await.unwrap(), Some(()));
    assert!(!letters.delete(kept.number).await.unwrap());
}

/// SQL and Rust compute the same record of a message.
#[tokio::test(flavor = "multi_thread")]
async fn other_languages_share_the_receipts() {
    let database = Database::fresh().await;
    let mut connection = database.connect().await;
    let consumer = ConsumerName::new("billing").unwrap();
    let long = "ü".repeat(200);
    let message = |id: &str| {
        Message::new("orders", format!("{{\"id\":\"{id}\"}}"))
            .with_header("Event-ID", id.to_owned())
            .with_header("webhook-id", id.to_owned())
            .with_header("ce-source", "/shop")
            .with_header("ce-id", id.to_owned())
            .with_broker_id(id)
    };
    for id in ["evt_1", "é\u{1f600}'", &long] {
        let cases = [
            (Identity::header("event-id"), &["header", "event-id"][..], ""),
            (Identity::standard_webhooks(), &["webhook-id"], ""),
            (Identity::cloud_events(), &["cloud-events", "/shop"], ""),
            (Identity::broker(), &["broker"], "orders"),
            (Identity::json("/id".parse().unwrap()), &["json", "/id"], "orders"),
            (
                Identity::with({
                    let id = id.to_owned();
                    move |_| Some(id.clone())
                }),
                &["own"],
                "",
            ),
        ];
        for (identity, kind, topic) in cases {
            let sql = "SELECT oncegate.message_record('billing', $1, $2, $3)";
            let record = sqlx::query_scalar::<_, Vec<u8>>(sql).bind(id).bind(kind).bind(topic);
            let record = record.fetch_one(&mut connection).await.unwrap();
            let expected = identity.of(&message(id)).unwrap().record_id(&consumer);
            assert_eq!(record, expected.as_bytes(), "{identity:?} {id}");
        }
    }
}
