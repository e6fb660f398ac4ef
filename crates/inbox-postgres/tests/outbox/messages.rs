//! Sent messages, and their way through the outbox.

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use oncegate_core::{MemoryStore, OnAbandoned};
use oncegate_engine::Engine;
use oncegate_inbox::{
    DeadLetter, DeadLetterSink, HandlerError, Identity, Inbox, MESSAGE_ID, Message, Outgoing, ProcessOutcome,
    PublishFuture, Publisher, PutFuture,
};
use oncegate_inbox_postgres::{Outbox, OutboxDeadLetters};
use oncegate_postgres::sqlx::Connection as _;

use oncegate_testkit::ManualClock;

use crate::broker::Broker;
use crate::database::{Database, Running, message, pool, relay, run, try_run};

/// Keeps all of a message.
#[derive(Clone, Default)]
struct RecordingPublisher(Arc<Mutex<Vec<Outgoing>>>);

impl Publisher for RecordingPublisher {
    fn publish<'a>(&'a self, message: &'a Outgoing) -> PublishFuture<'a> {
        self.0.lock().unwrap().push(message.clone());
        Box::pin(async { Ok(()) })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn committed_messages_are_published_and_rolled_back_ones_are_not() {
    let database = Database::with_schema().await;
    let publisher = RecordingPublisher::default();
    let relay = Running::start(relay(database.pool(), publisher.clone()));
    let mut connection = database.connect().await;

    let mut transaction = connection.begin().await.unwrap();
    let id = Outbox::new().send(&mut transaction, &message(None, "never")).await.unwrap();
    assert_eq!(id, "/never");
    transaction.rollback().await.unwrap();

    let mut all = message(Some("k"), "1");
    all.payload = Bytes::from_static(b"\x00\xff");
    all.order_key = Some(Bytes::from_static(b"\xfe"));
    all.headers = vec![
        ("a".to_owned(), Bytes::from_static(b"\x00\x01")),
        ("b".to_owned(), Bytes::new()),
        ("a".to_owned(), Bytes::from_static(b"twice")),
    ];
    let mut plain = message(None, "");
    plain.id = String::new();
    let mut transaction = connection.begin().await.unwrap();
    assert_eq!(Outbox::new().send(&mut transaction, &all).await.unwrap(), all.id);
    let made = Outbox::new().send(&mut transaction, &plain).await.unwrap();
    transaction.commit().await.unwrap();
    plain.id.clone_from(&made);
    assert_eq!((made.len(), made.as_bytes()[14]), (36, b'7'), "{made}");

    database.is_drained().await;
    relay.stop().await;
    let mut kept = publisher.0.lock().unwrap().clone();
    kept.sort_by_key(|message| message.id == made);
    assert_eq!(kept, [all, plain]);
    let status = database.status().await;
    assert_eq!((status.waiting, status.oldest_ms, status.refused), (0, None, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_sql_can_send() {
    let database = Database::with_schema().await;
    let publisher = RecordingPublisher::default();
    let mut connection = database.connect().await;
    run(
        &mut connection,
        "BEGIN; SELECT oncegate.send_text('orders', '{\"n\":1}', 'k', '{\"x\": \"é\"}', 'one'); \
         SELECT oncegate.send('orders', '\\x01', id => 'two'); COMMIT",
    )
    .await;
    let status = database.status().await;
    assert_eq!((status.waiting, status.failing, status.refused), (2, 0, 0));
    assert!(status.oldest_ms.is_some());
    let relay = Running::start(relay(database.pool(), publisher.clone()));
    database.is_drained().await;
    relay.stop().await;
    let mut kept = publisher.0.lock().unwrap().clone();
    kept.sort_by(|a, b| a.id.cmp(&b.id));
    let mut one = Outgoing::new("one", "orders", "{\"n\":1}");
    one.order_key = Some("k".into());
    one.headers = vec![("x".to_owned(), "é".into())];
    assert_eq!(kept, [one, Outgoing::new("two", "orders", &b"\x01"[..])]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_message_is_refused_at_send() {
    let database = Database::with_schema().await;
    let mut connection = database.connect().await;
    for arguments in [
        "'', '\\x00'",
        "null, '\\x00'",
        "E'a\\nb', '\\x00'",
        "repeat('t', 1025), '\\x00'",
        "'t', null",
        "'t', '\\x00', decode(repeat('00', 1025), 'hex')",
        "'t', '\\x00', id => ''",
        "'t', '\\x00', id => 'é'",
        "'t', '\\x00', id => E'a\\tb'",
        "'t', '\\x00', id => repeat('i', 256)",
        "'t', '\\x00', header_names => ARRAY['a']",
        "'t', '\\x00', header_names => ARRAY['a', 'b'], header_values => ARRAY['\\x00'::bytea]",
        "'t', '\\x00', header_names => ARRAY[null], header_values => ARRAY['\\x00'::bytea]",
        "'t', '\\x00', header_names => ARRAY[''], header_values => ARRAY['\\x00'::bytea]",
        "'t', '\\x00', header_names => ARRAY['a'], header_values => ARRAY[null::bytea]",
        "'t', '\\x00', header_names => ARRAY[['a', 'b']], header_values => ARRAY[['\\x00'::bytea, '\\x00']]",
        "'t', '\\x00', header_names => array_fill('a'::text, ARRAY[1001]), header_values => array_fill('\\x00'::bytea, ARRAY[1001])",
        "'t', '\\x00', header_names => ARRAY['a'], header_values => ARRAY[decode(repeat('00', 1048577), 'hex')]",
    ] {
        let error =
            try_run(&mut connection, &format!("SELECT oncegate.send({arguments})")).await.unwrap_err();
        let code = error.as_database_error().unwrap().code().unwrap().into_owned();
        assert_eq!(code, "22023", "{arguments}: {error}");
    }
    for arguments in ["'t', null", "'t', '', headers => '[]'", "'t', '', headers => '{\"a\": 1}'"] {
        let call = format!("SELECT oncegate.send_text({arguments})");
        assert!(try_run(&mut connection, &call).await.is_err(), "{arguments}");
    }
    assert_eq!(database.status().await.waiting, 0);
    // What is just small enough.
    let most = "repeat('t', 1024), '\\x', decode(repeat('00', 1024), 'hex'), array_fill('a'::text, ARRAY[1000]), \
                array_fill('\\x00'::bytea, ARRAY[1000]), repeat('~', 255)";
    run(&mut connection, &format!("SELECT oncegate.send({most})")).await;
    assert_eq!(database.status().await.waiting, 1);
}

/// A role that may send and nothing else, and one that may relay and nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn each_role_needs_only_its_grants() {
    let database = Database::with_schema().await;
    let mut owner = database.connect().await;
    run(
        &mut owner,
        "CREATE ROLE sender LOGIN PASSWORD 's'; CREATE ROLE relay LOGIN PASSWORD 'r'; GRANT USAGE ON SCHEMA oncegate TO sender, relay; \
         GRANT EXECUTE ON FUNCTION oncegate.send, oncegate.send_text TO sender; \
         GRANT EXECUTE ON FUNCTION oncegate.outbox_take, oncegate.outbox_renew, oncegate.outbox_settle TO relay",
    )
    .await;
    let url = |role: &str, password: &str| {
        let owner = format!("{}:{}@", database.server.user(), database.server.password());
        database.url().replace(&owner, &format!("{role}:{password}@"))
    };
    let sender = pool(&url("sender", "s"));
    let mut sender = sender.acquire().await.unwrap();
    Outbox::new().send(&mut sender, &message(Some("k"), "1")).await.unwrap();
    run(&mut sender, "SELECT oncegate.send_text('orders', 'x', 'k', '{}', 'k/x')").await;
    for forbidden in [
        "TABLE oncegate.outbox",
        "SELECT * FROM oncegate.outbox_take(null, 1, 1, 1, 1)",
        "SELECT nextval('oncegate.outbox_seq')",
    ] {
        assert!(try_run(&mut sender, forbidden).await.is_err(), "{forbidden}");
    }
    let broker = Broker::good();
    let error = relay(pool(&url("sender", "s")), broker.clone()).check().await.unwrap_err().to_string();
    assert!(error.contains("oncegate.outbox_take") && error.contains("outbox.md"), "{error}");
    let relay = relay(pool(&url("relay", "r")), broker.clone());
    relay.check().await.unwrap();
    let relay = Running::start(relay);
    database.is_drained().await;
    relay.stop().await;
    assert_eq!(broker.firsts()[&Some("k".to_owned())], ["1", "x"]);
}

/// Keeps the dead letter that it passes on.
struct Catch(OutboxDeadLetters, Arc<Mutex<Option<DeadLetter>>>);

impl DeadLetterSink for Catch {
    fn put<'a>(&'a self, letter: &'a DeadLetter) -> PutFuture<'a> {
        *self.1.lock().unwrap() = Some(letter.clone());
        self.0.put(letter)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_go_through_the_outbox() {
    let database = Database::with_schema().await;
    let dead = OutboxDeadLetters::new(database.pool(), "dead");
    let caught = Arc::default();
    let inbox = Inbox::new(
        Engine::new(MemoryStore::new(ManualClock::at_millis(1))),
        "billing",
        Identity::message_id(),
        OnAbandoned::Reexecute,
        Catch(dead.clone(), Arc::clone(&caught)),
    )
    .unwrap();
    let poison = Arc::new(Message::new("orders", "?").with_header(MESSAGE_ID, "m1"));
    let handled = inbox.process(&poison, async |_, _| Err(HandlerError::reject("not JSON"))).await;
    assert!(matches!(handled, ProcessOutcome::Dead { .. }), "{handled:?}");
    let letter = caught.lock().unwrap().take().unwrap();

    // In a transaction that is rolled back it never was.
    let mut connection = database.connect().await;
    let mut transaction = connection.begin().await.unwrap();
    dead.put_in(&mut transaction, &letter).await.unwrap();
    transaction.rollback().await.unwrap();
    assert_eq!(database.status().await.waiting, 1);
    dead.put(&letter).await.unwrap();
    assert_eq!(database.status().await.waiting, 2);

    let publisher = RecordingPublisher::default();
    let relay = Running::start(relay(database.pool(), publisher.clone()));
    database.is_drained().await;
    relay.stop().await;
    assert_eq!(publisher.0.lock().unwrap().clone(), [letter.to_outgoing("dead"), letter.to_outgoing("dead")]);
}
