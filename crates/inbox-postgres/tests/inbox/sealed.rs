//! Dead letters whose content is sealed: what a dump shows, missing keys, and attackers who can write to the database.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::StoreErrorKind;
use oncegate_inbox::{HandlerError, Message};
use oncegate_inbox_postgres::{ApplyOutcome, DeadLetterTable, StreamEvent, Streams, TransactionalInbox};
use oncegate_postgres::PostgresOptions;
use oncegate_postgres::messages::{AuditNote, DeadLetterChange, MessageOperator, Obstacle, RequeueTerms};
use oncegate_postgres::sqlx::Row as _;
use oncegate_postgres::sqlx::postgres::PgConnection;
use oncegate_postgres::sqlx::{self, Connection as _};
use oncegate_seal::{Keyring, SealError, SealInfo, SealKey, SealKeys};

use crate::support::{Database, again, effect, run, word};

fn ring(keys: &[u8]) -> Keyring {
    Keyring::new(keys.iter().map(|n| SealKey::from_bytes([*n; 32])))
}

/// A message with secrets in its payload and in a header.
fn secret(id: &str) -> Arc<Message> {
    let message =
        Message::new("orders", format!("payload-secret {id}")).with_header("event-id", id.to_owned());
    Arc::new(message.with_header("authorization", "header-secret").with_deliveries(None, true))
}

async fn reject(_: &mut PgConnection, _: &Message) -> Result<(), HandlerError> {
    Err(HandlerError::reject("error-secret"))
}

/// The handler of a dead letter that must not be opened.
async fn unopened(_: &mut PgConnection, _: Arc<Message>) -> Result<(), HandlerError> {
    panic!("it was not opened")
}

/// Gives up a message, and returns the number of its dead letter.
async fn give_up(database: &Database, inbox: &TransactionalInbox, id: &str) -> u64 {
    assert_eq!(word(&inbox.process(&secret(id), reject).await), "dead rejected");
    database.number("SELECT max(number) FROM oncegate.dead_letters").await.unsigned_abs()
}

async fn dump(database: &Database) -> String {
    let rows = run(
        &mut database.connect().await,
        "SELECT concat(encode(payload, 'escape'), error, (SELECT string_agg(encode(v, 'escape'), ',') FROM unnest(header_values) AS u (v))) \
         FROM oncegate.dead_letters ORDER BY number",
    )
    .await;
    rows.iter().map(|row| row.get::<String, _>(0)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dump_shows_no_content_and_the_keys_open_it() {
    let database = Database::fresh().await;
    let plain = database.inbox(2).await;
    let inbox = plain.clone().with_seal_keys(ring(&[1]));
    let number = give_up(&database, &inbox, "a").await;
    assert!(!dump(&database).await.contains("secret"), "{}", dump(&database).await);
    let clear = give_up(&database, &plain, "b").await;
    assert!(dump(&database).await.contains("payload-secret b"), "the same search finds what is in clear");

    // Any key of the ring opens, and what is in clear is read, too.
    let table = DeadLetterTable::new(database.pool(2).await);
    let opened = table.clone().with_seal_keys(ring(&[2, 1])).list(None, None, 10).await.unwrap();
    assert_eq!(opened.iter().map(|letter| letter.number).collect::<Vec<_>>(), [number, clear]);
    for (letter, id) in opened.iter().zip(["a", "b"]) {
        let message = &letter.dead_letter.message;
        assert_eq!((&message.payload[..], letter.refused), (format!("payload-secret {id}").as_bytes(), None));
        assert_eq!(message.header("authorization").unwrap().unwrap(), "header-secret");
        assert_eq!(message.header("event-id").unwrap().unwrap(), id);
        assert!(letter.dead_letter.error.contains("error-secret"), "{}", letter.dead_letter.error);
    }

    // Without the key, it is listed without its content, kept, and refused.
    let missing = SealError::KeyMissing(SealKey::from_bytes([1; 32]).id());
    for keys in [Keyring::default(), ring(&[2])] {
        let table = table.clone().with_seal_keys(keys.clone());
        let listed = table.list(None, None, 1).await.unwrap().remove(0);
        assert_eq!((listed.refused, listed.dead_letter.error.as_str()), (Some(missing), ""));
        assert!(SealInfo::of_dead_letter(&listed.dead_letter.message.payload).is_some());
        let taken = table.take(number, unopened).await;
        assert!(taken.unwrap_err().to_error_text().contains("this process does not have"));
        let inbox = plain.clone().with_seal_keys(keys);
        let processed = inbox.process_dead_letter(number, unopened).await;
        assert!(processed.unwrap_err().to_error_text().contains("add it to the seal keys"));
        assert_eq!(word(&inbox.process(&secret("a"), effect).await), "dead rejected known");
    }

    // With the key it is processed, once. The handler gets the message as it was delivered.
    let done = inbox
        .process_dead_letter(number, async |connection, message: Arc<Message>| {
            assert_eq!(message.header("authorization").unwrap().unwrap(), "header-secret");
            effect(connection, &message).await
        })
        .await;
    assert!(done.unwrap().is_some());
    assert_eq!(word(&plain.process(&secret("a"), effect).await), "duplicate");
    assert_eq!(database.effects().await, ["payload-secret a"]);
}

/// The keys are replaced while the inbox is in use, and with `with_required` it opens no dead letter in clear.
#[tokio::test(flavor = "multi_thread")]
async fn keys_rotate_and_may_be_required() {
    let database = Database::fresh().await;
    let keys = SealKeys::new(ring(&[1]));
    let inbox = database.inbox(2).await.with_seal_keys(keys.clone());
    give_up(&database, &inbox, "a").await;
    keys.replace(ring(&[2, 1]));
    give_up(&database, &inbox, "b").await;
    keys.replace(ring(&[2]).with_opens_only(true));
    give_up(&database, &inbox, "c").await;
    let table = DeadLetterTable::new(database.pool(2).await);
    let refused = async |keys: Keyring| {
        let listed = table.clone().with_seal_keys(keys).list(None, None, 10).await.unwrap();
        listed.iter().map(|letter| letter.refused).collect::<Vec<_>>()
    };
    let missing = SealError::KeyMissing(SealKey::from_bytes([1; 32]).id());
    assert_eq!(refused(ring(&[2])).await, [Some(missing), None, None]);
    assert_eq!(refused(ring(&[1, 2]).with_required(true)).await, [None, None, Some(SealError::NotSealed)]);
}

/// The content is bound to the receipt, the consumer, the topic and the names of the headers.
#[tokio::test(flavor = "multi_thread")]
async fn content_that_was_moved_or_changed_is_refused_and_kept() {
    let attacks = [
        "payload = (SELECT payload FROM oncegate.dead_letters WHERE number = $other)",
        "error = (SELECT error FROM oncegate.dead_letters WHERE number = $other)",
        "topic = 'attackers-topic'",
        "consumer = 'mail'",
        "header_names = '{event-id,x-public}'",
        "header_names = '{event-id}', header_values = '{\"\"}'",
        "payload = set_byte(payload, length(payload) - 20, get_byte(payload, length(payload) - 20) # 1)",
        "payload = substring(payload FROM 1 FOR length(payload) - 1)",
        "payload = substring(payload FROM 1 FOR 7)",
        "error = 'ogseal:00'",
        "error = left(error, -1)",
    ];
    let database = Database::fresh().await;
    let inbox = database.inbox(2).await.with_seal_keys(ring(&[1]));
    let other = give_up(&database, &inbox, "other").await;
    let table = DeadLetterTable::new(database.pool(2).await).with_seal_keys(ring(&[1]));
    for (at, attack) in attacks.into_iter().enumerate() {
        let number = give_up(&database, &inbox, &format!("victim-{at}")).await;
        let attack = attack.replace("$other", &other.to_string());
        let update = format!("UPDATE oncegate.dead_letters SET {attack} WHERE number = {number} RETURNING 1");
        assert_eq!(run(&mut database.connect().await, &update).await.len(), 1, "{attack}");
        let listed = table.list(None, Some(number - 1), 1).await.unwrap().remove(0);
        assert_eq!(listed.refused, Some(SealError::Broken), "{attack}");
        assert_eq!(listed.dead_letter.error, "");
        if !attack.starts_with("error") {
            let taken = table.take(number, unopened).await;
            assert!(taken.unwrap_err().to_error_text().contains("was changed, moved or cut"), "{attack}");
        }
    }
    let untouched = table.list(None, None, 1).await.unwrap().remove(0);
    assert_eq!((untouched.number, untouched.refused), (other, None));
    let count = database.number("SELECT count(*) FROM oncegate.dead_letters").await;
    assert_eq!(count.unsigned_abs(), 1 + attacks.len() as u64, "all are kept");
}

/// PostgreSQL has no key, so in SQL alone nothing sealed is published.
#[tokio::test(flavor = "multi_thread")]
async fn sql_alone_publishes_no_sealed_form() {
    const NOTE: AuditNote<'static> = AuditNote { actor: "ada", reason: "the address is known now" };
    let database = Database::fresh().await;
    let inbox = database.inbox(2).await.with_seal_keys(ring(&[1]));
    let number = give_up(&database, &inbox, "a").await;
    let operator = MessageOperator::new(PostgresOptions::from_url(&database.url()).unwrap());
    let terms = RequeueTerms { accepted: Obstacle::ALL.to_vec(), broker_window: Duration::ZERO };
    let refused = operator.requeue_dead_letter(number, &terms, NOTE).await.unwrap();
    assert_eq!(refused, DeadLetterChange::Refused(vec![Obstacle::Sealed]));
    let shown = operator.dead_letter(number, Duration::ZERO).await.unwrap().unwrap();
    assert_eq!((shown.is_sealed, shown.obstacles), (true, vec![Obstacle::Sealed]));
    assert!(shown.line.error.starts_with("[it is sealed"), "{}", shown.line.error);
    // Content of another shape, and content for a dead letter in clear.
    let plain = database.inbox(2).await;
    assert_eq!(word(&plain.process(&again("b"), reject).await), "dead rejected");
    let content = shown.content;
    for (number, headers) in [(number, Vec::new()), (number + 1, content.headers[..1].to_vec())] {
        let other = oncegate_postgres::messages::MessageContent::new(headers, b"invented".to_vec());
        let error = operator.requeue_opened_dead_letter(number, &other, &terms, NOTE).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Invalid, "{error}");
    }
    assert_eq!(database.number("SELECT count(*) FROM oncegate.outbox").await, 0);
    assert_eq!(database.number("SELECT count(*) FROM oncegate.dead_letters").await, 2);
}

async fn project(connection: &mut PgConnection, event: StreamEvent) -> Result<(), HandlerError> {
    let line = format!("{} {}", event.sequence, String::from_utf8_lossy(&event.event));
    sqlx::query("INSERT INTO effects (message) VALUES ($1)").bind(line).execute(connection).await?;
    Ok(())
}

/// Applies or buffers an event of a stream in a transaction of its own.
async fn apply(database: &Database, keys: Option<Keyring>, sequence: u64) -> Result<ApplyOutcome, String> {
    let streams = Streams::new("history").unwrap();
    let streams = match keys {
        Some(keys) => streams.with_seal_keys(keys),
        None => streams,
    };
    let event = format!("event-secret {sequence}");
    let mut connection = database.connect().await;
    let mut transaction = connection.begin().await.unwrap();
    let applied =
        streams.apply_or_buffer(&mut transaction, "order-17", sequence, event.as_bytes(), project).await;
    match applied {
        Ok(applied) => {
            transaction.commit().await.unwrap();
            Ok(applied)
        }
        Err(error) => {
            transaction.rollback().await.unwrap();
            assert!(matches!(error, HandlerError::Retry(_)), "{error:?}");
            Err(error.to_error_text())
        }
    }
}

/// The buffered events, as a dump shows them.
async fn buffered(database: &Database) -> Vec<String> {
    let sql = "SELECT encode(event, 'escape') FROM oncegate.buffered_events ORDER BY sequence";
    let rows = run(&mut database.connect().await, sql).await;
    rows.iter().map(|row| row.get::<String, _>(0)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn buffered_events_are_sealed_and_applied_only_with_their_key() {
    let database = Database::fresh().await;
    let waits = Ok(ApplyOutcome::Buffered { expected: 1 });
    assert_eq!(apply(&database, Some(ring(&[1])), 3).await, waits);
    // By a program that has no keys yet, or only opens.
    assert_eq!(apply(&database, None, 2).await, waits);
    assert_eq!(apply(&database, Some(ring(&[1]).with_opens_only(true)), 4).await, waits);
    let stored = buffered(&database).await;
    assert!(stored[0] == "event-secret 2" && stored[2] == "event-secret 4", "{stored:?}");
    assert!(stored[1].contains("ogseal") && !stored[1].contains("secret"), "{stored:?}");

    // Without the key nothing is applied, and nothing is lost.
    let key = SealKey::from_bytes([1; 32]).id().to_string();
    for keys in [None, Some(ring(&[2]))] {
        let refused = apply(&database, keys, 1).await.unwrap_err();
        assert!(refused.contains(&key), "{refused}");
    }
    let refused = apply(&database, Some(ring(&[1]).with_required(true)), 1).await.unwrap_err();
    assert!(refused.contains("not sealed"), "{refused}");
    assert!(database.effects().await.is_empty());
    assert_eq!(buffered(&database).await, stored);

    // Moved to another place, it is refused.
    let mut connection = database.connect().await;
    let swap = |from: u8, to: u8| {
        format!(
            "UPDATE oncegate.buffered_events SET sequence = {to} WHERE stream = 'order-17' AND sequence = {from}"
        )
    };
    run(&mut connection, &swap(2, 9)).await;
    run(&mut connection, &swap(3, 2)).await;
    let refused = apply(&database, Some(ring(&[1])), 1).await.unwrap_err();
    assert!(refused.contains("moved"), "{refused}");
    run(&mut connection, &swap(2, 3)).await;
    run(&mut connection, &swap(9, 2)).await;

    // With the key, also among others, all are applied in order.
    assert_eq!(apply(&database, Some(ring(&[2, 1])), 1).await, Ok(ApplyOutcome::Applied { events: 4 }));
    let expected: Vec<_> = (1..5).map(|n| format!("{n} event-secret {n}")).collect();
    assert_eq!(database.effects().await, expected);
    assert!(buffered(&database).await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_are_counted_by_the_key_that_sealed_them() {
    let database = Database::fresh().await;
    let operator = MessageOperator::new(PostgresOptions::from_url(&database.url()).unwrap());
    assert!(operator.seal_counts().await.unwrap().is_empty());
    let plain = database.inbox(2).await;
    for (keys, ids) in [(&[1][..], &["a", "b"][..]), (&[2], &["c"]), (&[], &["d"])] {
        let inbox = plain.clone().with_seal_keys(ring(keys));
        for id in ids {
            give_up(&database, &inbox, id).await;
        }
    }
    let _buffered = apply(&database, Some(ring(&[2])), 5).await.unwrap();
    let _buffered = apply(&database, None, 6).await.unwrap();
    let id = |n: u8| Some(*SealKey::from_bytes([n; 32]).id().as_bytes());
    let mut counted: Vec<_> = operator.seal_counts().await.unwrap();
    assert!(counted.iter().all(|count| count.oldest.as_millis() > 0));
    counted.sort_by_key(|count| (count.is_buffered_event, count.key));
    let counted: Vec<_> =
        counted.into_iter().map(|count| (count.is_buffered_event, count.key, count.count)).collect();
    let mut expected =
        vec![(false, None, 1), (false, id(1), 2), (false, id(2), 1), (true, None, 1), (true, id(2), 1)];
    expected.sort();
    assert_eq!(counted, expected);
}
