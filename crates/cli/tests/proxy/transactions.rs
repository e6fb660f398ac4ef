//! Results that programs write in transactions of their own, next to a sidecar that seals: its operators see them, count their
//! keys, and seal anew what is in clear.

use oncegate_core::{ErrorChain, IdempotencyKey, RecordId, Scope, StoredResponse};
use oncegate_postgres::{Guard, RunError, TransactError, Transactor, sqlx::PgPool};
use oncegate_seal::{
    DeadLetterPlace, Keyring, SealKey, StreamEventPlace, seal_dead_letter, seal_dead_letter_error,
    seal_stream_event,
};
use oncegate_servers::PostgresServer;
use oncegate_testkit::until;

use crate::KEY;
use crate::content::{in_json, reload};
use crate::sealing::{CARD, Keys, SECRET, id, keys, postgres, start, stop};
use crate::support::{Service, Sidecar, request, sidecar};

fn ring(keys: &[u8]) -> Keyring {
    Keyring::new(keys.iter().map(|n| SealKey::from_bytes([*n; 32])))
}

fn scope() -> Scope<'static> {
    Scope::caller("customer", "ann").with_operation("POST /payments")
}

fn record(order: &str) -> String {
    RecordId::derive(&scope(), &IdempotencyKey::new(order.as_bytes()).unwrap()).to_string()
}

/// Calls `transact`. `None` if the closure must not run.
async fn pay(
    pool: &PgPool,
    keys: &[u8],
    order: &str,
    result: Option<&'static str>,
) -> Result<String, TransactError> {
    let transactor = Transactor::new(pool.clone()).with_seal_keys(ring(keys));
    let run = async |_: &mut _| -> Result<String, RunError> {
        Ok(result.expect("the operation was executed again").to_owned())
    };
    Ok(transactor.transact(&scope(), order, &1, run).await?.into_inner())
}

/// All stored responses, as a dump of the database shows them.
fn dump(server: &PostgresServer) -> String {
    server.ask("SELECT string_agg(encode(response, 'escape'), ' ') FROM oncegate.records").unwrap()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes a sealed dead letter and a sealed event, as an inbox and a stream with this key do, and a dead letter in clear.
fn write_messages(server: &PostgresServer, key: u8) {
    let place = DeadLetterPlace { id: RecordId::from_bytes([9; 32]), consumer: "billing", topic: "orders" };
    let payload = seal_dead_letter(&place, &[], b"payload", &ring(&[key])).unwrap().unwrap();
    let error = seal_dead_letter_error(&place, "error", &ring(&[key])).unwrap().unwrap();
    let write = |id: RecordId, error: &str, payload: &[u8]| {
        let sql = format!(
            "SELECT oncegate.write_dead_letter(decode('{id}', 'hex'), 'billing', 'rejected', 1, '{error}', 'orders', null, null, '{{}}', \
             '{{}}', decode('{}', 'hex'), 604800000)",
            hex(payload)
        );
        server.sql(&sql).unwrap();
    };
    write(place.id, &error, &payload);
    write(RecordId::from_bytes([8; 32]), "error", b"payload");
    let place = StreamEventPlace { consumer: "history", stream: "order-17", sequence: 2 };
    let event = seal_stream_event(&place, b"event", &ring(&[key])).unwrap().unwrap();
    let sql = format!(
        "SELECT oncegate.stream_event('history', 'order-17', 2, 1, decode('{}', 'hex'))",
        hex(&event)
    );
    server.sql(&sql).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_of_a_sidecar_see_and_seal_the_results_of_transactions() {
    let (server, keyring) = (postgres().await, Keys::new(&[1]));
    let service = Service::new().await.answers(CARD);
    let sidecar = start(&service, &server.url(), &[&keyring.flag()]).await;
    let pool = PgPool::connect(&server.url()).await.unwrap();
    assert_eq!(pay(&pool, &[1], "sealed", Some(SECRET)).await.unwrap(), SECRET);
    assert!(!dump(&server).contains(SECRET), "{}", dump(&server));
    let shown = keys(&sidecar, &["keys", "show", &record("sealed"), "--body"]).await;
    assert!(
        shown.contains(SECRET) && shown.contains(&format!("sealed with     the key {}", id(1))),
        "{shown}"
    );

    // In clear: a program without keys, and a caller that completes its claim in SQL. The database has no key.
    assert_eq!(pay(&pool, &[], "clear", Some(SECRET)).await.unwrap(), SECRET);
    let claim = "SELECT token FROM oncegate.claim(decode(repeat('77', 32), 'hex'), decode(repeat('01', 16), 'hex'), \
        decode(repeat('01', 33), 'hex'), 60000, 3600000)";
    let token = server.ask(claim).unwrap();
    let complete = format!(
        "SELECT oncegate.complete(decode(repeat('77', 32), 'hex'), {}, oncegate.response(200, '{{}}', '{{}}', '{SECRET}'))",
        token.trim()
    );
    server.sql(&complete).unwrap();
    assert_eq!(dump(&server).matches(SECRET).count(), 2);
    let usage = keys(&sidecar, &["seal-key", "usage"]).await;
    assert!(usage.contains("in clear          2 records"), "{usage}");
    let done = in_json(&sidecar, &["reseal", "--seal-clear"]).await;
    assert_eq!((&done["clear_sealed"], &done["clear"]), (&2.into(), &0.into()), "{done}");
    assert!(!dump(&server).contains(SECRET), "{}", dump(&server));
    for record in [record("clear"), "77".repeat(32)] {
        let shown = keys(&sidecar, &["keys", "show", &record, "--body"]).await;
        assert!(shown.contains(SECRET) && shown.contains(&id(1)), "{shown}");
    }
    assert_eq!(pay(&pool, &[1], "clear", None).await.unwrap(), SECRET);
    let refused = pay(&pool, &[], "clear", None).await.unwrap_err();
    assert!(ErrorChain(&refused).to_string().contains(&id(1)), "{refused:?}");

    // A rotation reaches all of them, while programs and the sidecar serve.
    keyring.set(&[2, 1]);
    reload(&sidecar, 2).await;
    let done = in_json(&sidecar, &["reseal"]).await;
    assert_eq!(done["resealed"], 3, "{done}");
    keyring.set(&[2]);
    reload(&sidecar, 2).await;
    for order in ["sealed", "clear"] {
        assert_eq!(pay(&pool, &[2], order, None).await.unwrap(), SECRET);
    }
    // A result of a program with another key: the sidecar shows the record, and the id of the key that it needs.
    pay(&pool, &[1], "other", Some(SECRET)).await.unwrap();
    let shown = keys(&sidecar, &["keys", "show", &record("other"), "--body"]).await;
    assert!(!shown.contains(SECRET) && shown.contains("which this process does not have"), "{shown}");
    let usage = keys(&sidecar, &["seal-key", "usage"]).await;
    assert!(usage.contains(&format!("{}  1 record; this sidecar does NOT have the key", id(1))), "{usage}");
    stop(sidecar).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_count_of_each_key_has_the_dead_letters_and_the_buffered_events() {
    let (server, keyring) = (postgres().await, Keys::new(&[1]));
    let service = Service::new().await.answers(CARD);
    let sidecar = start(&service, &server.url(), &[&keyring.flag()]).await;
    let usage = keys(&sidecar, &["seal-key", "usage"]).await;
    assert_eq!(usage, format!("{}  0 records; it seals new records\n", id(1)));
    write_messages(&server, 1);
    let usage = keys(&sidecar, &["seal-key", "usage"]).await;
    let expected = format!(
        "{}  0 records, 1 dead letter and 1 buffered event; it seals new records\nin clear          1 dead letter\n",
        id(1)
    );
    assert_eq!(usage, expected);
    // The key is replaced. No reseal reaches them, so it must stay.
    keyring.set(&[2, 1]);
    reload(&sidecar, 2).await;
    in_json(&sidecar, &["reseal"]).await;
    let usage = keys(&sidecar, &["seal-key", "usage"]).await;
    let line = format!("{}  0 records, 1 dead letter and 1 buffered event; it opens. It must stay", id(1));
    assert!(usage.contains(&line) && usage.contains(&format!("{}  0 records; it seals", id(2))), "{usage}");
    let counted = in_json(&sidecar, &["seal-key", "usage"]).await;
    assert_eq!(
        (&counted["sealed"][id(1)]["dead_letters"], &counted["sealed"][id(1)]["buffered_events"]),
        (&1.into(), &1.into())
    );
    assert_eq!(
        (&counted["clear"]["dead_letters"], &counted["messages_not_counted"]),
        (&1.into(), &serde_json::Value::Null)
    );
    // Without the key.
    keyring.set(&[2]);
    reload(&sidecar, 2).await;
    let usage = keys(&sidecar, &["seal-key", "usage"]).await;
    assert!(
        usage.contains("1 buffered event; this sidecar does NOT have the key, so they cannot be opened"),
        "{usage}"
    );
    // If they cannot be counted, the report says so instead of allowing the removal of a key.
    server.sql("DROP FUNCTION oncegate.message_seal_counts()").unwrap();
    let usage = keys(&sidecar, &["seal-key", "usage"]).await;
    assert!(usage.contains("were NOT counted, so no key may be removed yet: "), "{usage}");
    stop(sidecar).await;

    // A store without messages.
    let directory = tempfile::tempdir().unwrap();
    let embedded =
        start(&service, &directory.path().join("data").display().to_string(), &[&keyring.flag()]).await;
    assert_eq!(
        keys(&embedded, &["seal-key", "usage"]).await,
        format!("{}  0 records; it seals new records\n", id(2))
    );
    stop(embedded).await;
}

/// The service completes the record of the sidecar with a response in its own transaction, and seals it.
#[tokio::test(flavor = "multi_thread")]
async fn a_service_seals_the_response_that_it_completes_with() {
    for (key, status) in [(1, 201), (2, 503)] {
        let server = postgres().await;
        let (service, keyring) = (Service::new().await, Keys::new(&[1]));
        let pool = PgPool::connect(&server.url()).await.unwrap();
        let mut command = sidecar(&format!("http://{}", service.address));
        let flags = ["--completion=upstream", "--seal-required", &keyring.flag()];
        let sidecar = Sidecar::run(command.env("ONCEGATE_STORE", server.url()).args(flags)).await;
        let pay = request("POST", "/pay", &[KEY], "{}");
        let mut client = sidecar.connect().await;
        client.send(&pay).await;
        let mut wire = service.accept().await;
        let asked = wire.message().await;
        let [record, token] =
            ["oncegate-record", "oncegate-token"].map(|name| asked.get(name).unwrap().to_owned());
        let fields = [("content-type", &b"application/json"[..])];
        let body = CARD.split_once("\r\n\r\n").unwrap().1;
        let response = StoredResponse::new(201, &fields, &[body.into()], &[]).unwrap();
        let guard = Guard::from_headers(&record, &token).unwrap().with_seal_keys(ring(&[key]));
        let mut transaction = pool.begin().await.unwrap();
        guard.complete(&mut transaction, &response).await.unwrap();
        transaction.commit().await.unwrap();
        wire.send(CARD).await;
        let first = client.message().await;
        assert!(!dump(&server).contains(SECRET), "{}", dump(&server));
        // With a key that the sidecar does not have, it refuses, and the service is not asked again.
        if status == 201 {
            assert!(first.has_status(201).text().contains(SECRET), "{}", first.text());
            let again = sidecar.ask(&pay).await;
            assert!(again.has_status(201).is_replay() && again.text().contains(SECRET), "{}", again.text());
        } else {
            // For a moment, the sidecar tries to read what it cannot open.
            until("the sidecar has given up", async || sidecar.ask(&pay).await.status() == 503).await;
            sidecar.ask(&pay).await.is_problem(503, "response-sealed");
        }
        let shown = keys(&sidecar, &["keys", "show", &record, "--body"]).await;
        assert_eq!(shown.contains(SECRET), status == 201, "{shown}");
        assert!(shown.contains(&id(key)), "{shown}");
        stop(sidecar).await;
    }
}
