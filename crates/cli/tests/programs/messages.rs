//! `oncegate dead-letters` and `oncegate outbox` on a real database: directly, and through a sidecar whose store is in it.

use std::net::SocketAddr;
use std::process::{Command, Output};

use oncegate_core::RecordId;
use oncegate_seal::{DeadLetterPlace, Keyring, SealKey, seal_dead_letter, seal_dead_letter_error};
use oncegate_servers::PostgresServer;
use oncegate_testkit::until;
use serde_json::{Value, json};

use crate::support::{Service, Sidecar, ask, sidecar};

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// Dead letters of two consumers and a refused message of the outbox; the first one is an hour old.
const MESSAGES: &str = "
    SELECT oncegate.write_dead_letter(oncegate.message_record('billing', 'evt-1', '{header,event-id}'), 'billing',
        'attempts-exhausted', 10, E'no such \\x1b[31maddress', 'orders', null, null, '{event-id}', ARRAY['evt-1'::bytea],
        'secret payload', 604800000);
    SELECT oncegate.write_dead_letter(oncegate.message_record('billing', 'evt-2', '{header,event-id}'), 'billing',
        'outcome-unknown', 1, 'committed by itself', 'orders', null, null, '{event-id}', ARRAY['evt-2'::bytea], 'p', 604800000);
    SELECT oncegate.write_dead_letter(oncegate.message_record('mail', 'evt-3'), 'mail', 'rejected', 1, 'e', 'mails', null, null,
        '{}', '{}', '\\xff', 604800000);
    UPDATE oncegate.dead_letters SET at = at - 3600000;
    SELECT oncegate.send('orders', 'too large', 'key-1', null, null, 'm-1');
    SELECT oncegate.send('orders', 'behind it', 'key-1', null, null, 'm-2');
    UPDATE oncegate.outbox SET refused_at = 1, attempts = 1, error = 'the broker takes 1 MiB' WHERE id = 'm-1'";

struct Setup {
    server: PostgresServer,
    /// The flags and the variable that name the database or the sidecar.
    flags: Vec<String>,
    url: Option<String>,
    _sidecar: Option<Sidecar>,
}

impl Setup {
    async fn new(through_sidecar: bool) -> Self {
        let server = blocking(|| PostgresServer::start().unwrap()).await;
        let url = server.url();
        let mut apply = oncegate(&["schema", "apply", "postgres"]);
        apply.env("ONCEGATE_STORE", &url);
        assert!(blocking(move || apply.output().unwrap()).await.status.success());
        let mut setup = Self { server, flags: Vec::new(), url: Some(url), _sidecar: None };
        setup.sql(MESSAGES);
        if through_sidecar {
            let service = Service::new().await.answers(OK);
            let mut command = sidecar(&format!("http://{}", service.address));
            command.env("ONCEGATE_STORE", setup.server.url());
            let sidecar = Sidecar::run(&mut command).await;
            setup.flags = vec!["--admin".to_owned(), sidecar.admin.to_string()];
            setup.url = None;
            setup._sidecar = Some(sidecar);
        }
        setup
    }

    fn sql(&self, sql: &str) -> String {
        self.server.sql(sql).unwrap()
    }

    async fn run(&self, args: &[&str]) -> Output {
        let mut command = oncegate(args);
        command.args(&self.flags).env("USER", "ada");
        if let Some(url) = &self.url {
            command.env("ONCEGATE_STORE", url);
        }
        let output = blocking(move || command.output().unwrap()).await;
        let text = format!("{}{}", text(&output.stdout), text(&output.stderr));
        assert!(!text.contains(self.server.password()) && !text.contains('\u{1b}'), "{text}");
        output
    }

    /// The output of a command that succeeds.
    async fn done(&self, args: &[&str]) -> String {
        let output = self.run(args).await;
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()), "{args:?}");
        text(&output.stdout)
    }

    /// The error of a command that fails with this code.
    async fn failed(&self, code: i32, args: &[&str]) -> String {
        let output = self.run(args).await;
        assert_eq!(output.status.code(), Some(code), "{args:?}: {output:?}");
        text(&output.stderr)
    }

    async fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.done(&[args, &["--json"]].concat()).await).unwrap()
    }
}

fn oncegate(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(args).env_clear();
    command
}

async fn blocking<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(run).await.unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Alerts need their numbers.
#[tokio::test(flavor = "multi_thread")]
async fn a_sidecar_has_metrics_of_messages_in_the_database_of_its_store() {
    let setup = Setup::new(true).await;
    let sidecar = setup._sidecar.as_ref().unwrap();
    let page = async || {
        let metrics = ask(sidecar.admin, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
        metrics.has_status(200).text().to_owned()
    };
    until("the messages are counted", async || page().await.contains("oncegate_dead_letters ")).await;
    let page = page().await;
    for series in ["dead_letters 3", "outbox_waiting 1", "outbox_failing 0", "outbox_refused 1"] {
        assert!(page.lines().any(|line| line == format!("oncegate_{series}")), "{series}: {page}");
    }
    assert!(page.contains("oncegate_outbox_oldest_seconds "), "{page}");
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_listed_shown_requeued_and_dropped_directly() {
    dead_letters(&Setup::new(false).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_listed_shown_requeued_and_dropped_through_a_sidecar() {
    dead_letters(&Setup::new(true).await).await;
}

async fn dead_letters(setup: &Setup) {
    let listed = setup.done(&["dead-letters", "ls"]).await;
    let rows: Vec<_> = listed.lines().collect();
    assert!(rows[0].starts_with("NUMBER  AGE ") && rows.len() == 4, "{listed}");
    assert!(rows[1].contains(" mail ") && rows[1].contains(" rejected "), "the newest first: {listed}");
    assert!(rows[3].contains("no such \\u{1b}[31maddress") && rows[3].contains(" 1h "), "{listed}");
    assert!(!listed.contains("secret"), "{listed}");
    let page = setup.json(&["dead-letters", "ls", "--consumer", "billing", "--limit", "1"]).await;
    assert_eq!(page["dead_letters"][0]["number"], 2);
    assert_eq!((&page["next"], page["totals"].as_array().unwrap().len()), (&json!(2), 3));
    let page =
        setup.json(&["dead-letters", "ls", "--before", "2", "--with-reason", "attempts-exhausted"]).await;
    assert_eq!(page["dead_letters"][0]["number"], 1);
    let number = |page: &Value| {
        let letters = page["dead_letters"].as_array().unwrap().iter();
        letters.map(|letter| letter["number"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    setup.sql("UPDATE oncegate.dead_letters SET at = at - 7200000 WHERE number = 2");
    let page = setup.json(&["dead-letters", "ls", "--since", "2h"]).await;
    assert_eq!((number(&page), &page["complete"]), (vec![3, 1], &json!(true)), "{page}");
    let page = setup.json(&["dead-letters", "ls", "--until", "2h"]).await;
    assert_eq!(number(&page), [2], "{page}");
    let page = setup.json(&["dead-letters", "ls", "--since", "2h", "--limit", "1"]).await;
    assert_eq!((number(&page), &page["next"]), (vec![3], &json!(3)), "{page}");
    setup.sql("UPDATE oncegate.dead_letters SET at = at + 7200000 WHERE number = 2");
    let words = setup.failed(2, &["dead-letters", "ls", "--since", "soon"]).await;
    assert!(words.contains("--since: \"soon\" is not a time"), "{words}");
    let none = setup.done(&["dead-letters", "ls", "--topic", "nothing"]).await;
    assert!(none.starts_with("no dead letters\n") && none.contains("3 dead letters in all"), "{none}");

    let shown = setup.done(&["dead-letters", "show", "1"]).await;
    assert!(
        shown.contains("identity        header event-id\n") && shown.contains("event-id, 5 bytes"),
        "{shown}"
    );
    assert!(!shown.contains("secret") && !shown.contains("evt-1"), "{shown}");
    assert!(shown.contains("oncegate dead-letters requeue") && shown.contains(" 1 --reason"), "{shown}");
    let shown = setup.done(&["dead-letters", "show", "1", "--payload"]).await;
    assert!(shown.contains("\nsecret payload\n") && shown.contains("event-id: evt-1"), "{shown}");
    let shown = setup.json(&["dead-letters", "show", "3", "--payload"]).await;
    assert_eq!((&shown["payload_base64"], &shown["identity"]), (&json!("/w=="), &Value::Null));
    let recent = setup.done(&["dead-letters", "show", "1", "--broker-window", "2h"]).await;
    assert!(recent.contains("- recent: ") && !recent.contains("dead-letters requeue"), "{recent}");

    // Refusals say what to do, in flags.
    let words = setup.failed(1, &["dead-letters", "requeue", "2", "--reason", "r"]).await;
    assert!(
        words.contains("It may have taken effect") && words.contains("--accept outcome-unknown"),
        "{words}"
    );
    let words =
        setup.failed(1, &["dead-letters", "requeue", "1", "--reason", "r", "--broker-window", "2h"]).await;
    assert!(words.contains("give it in --broker-window"), "{words}");
    let words =
        setup.failed(2, &["dead-letters", "requeue", "2", "--reason", "r", "--accept", "outcome"]).await;
    assert!(
        words.contains("--accept: \"outcome\" is not one of outcome-unknown, new-identity, old"),
        "{words}"
    );
    let words = setup.failed(2, &["dead-letters", "requeue", "1"]).await;
    assert!(words.contains("--reason"), "{words}");
    let words = setup.failed(2, &["dead-letters", "requeue", "1", "--reason", " "]).await;
    assert!(words.contains("--reason: "), "{words}");
    let words = setup.failed(1, &["dead-letters", "show", "99"]).await;
    assert!(words.contains("no dead letter 99"), "{words}");
    assert_eq!(setup.sql("SELECT count(*) FROM oncegate.dead_letters").trim(), "3");

    // One that is refused does not keep the others.
    let output = setup.run(&["dead-letters", "requeue", "2", "1", "--reason", "the address is known"]).await;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(text(&output.stdout).starts_with("1: requeued, as message "), "{output:?}");
    assert!(text(&output.stderr).contains("Dead letter 2: "), "{output:?}");
    let sent = "SELECT topic, convert_from(payload, 'UTF8'), header_names[1] FROM oncegate.outbox WHERE id NOT LIKE 'm-%'";
    let sent = setup.sql(sent);
    assert_eq!(sent.trim(), "orders|secret payload|event-id");
    let receipts = "SELECT count(*) FROM oncegate.receipts \
                    WHERE id = oncegate.message_record('billing', 'evt-1', '{header,event-id}')";
    assert_eq!(setup.sql(receipts).trim(), "0", "its consumer processes it again");

    let accepted = [
        "dead-letters", "requeue", "2", "--accept", "outcome-unknown", "--reason", "not in the ledger",
        "--json",
    ];
    let done: Value = serde_json::from_str(&setup.done(&accepted).await).unwrap();
    assert_eq!((&done["number"], &done["outcome"]), (&json!(2), &json!("requeued")));
    let done = setup.done(&["dead-letters", "drop", "3", "--reason", "test data", "--actor", "grace"]).await;
    assert_eq!(done, "3: dropped\n");
    let words = setup.failed(1, &["dead-letters", "drop", "3", "--reason", "again"]).await;
    assert!(words.contains("no dead letter 3"), "{words}");
    assert_eq!(setup.done(&["dead-letters", "ls"]).await, "no dead letters\n");

    let trail = setup.json(&["dead-letters", "audit"]).await;
    let entries: Vec<_> = trail["entries"].as_array().unwrap().iter().collect();
    let facts: Vec<_> = entries
        .iter()
        .map(|entry| [&entry["message"], &entry["action"], &entry["actor"], &entry["reason"]])
        .collect();
    assert_eq!(
        json!(facts),
        json!([
            [3, "dropped", "grace", "test data"],
            [2, "requeued", "ada", "not in the ledger"],
            [1, "requeued", "ada", "the address is known"]
        ])
    );
    let trail = setup.done(&["outbox", "audit", "--limit", "1"]).await;
    assert!(trail.starts_with("NUMBER  WHEN ") && trail.ends_with("there are more: --before 3\n"), "{trail}");
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_messages_of_the_outbox_are_requeued_and_dropped_directly() {
    outbox(&Setup::new(false).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_messages_of_the_outbox_are_requeued_and_dropped_through_a_sidecar() {
    outbox(&Setup::new(true).await).await;
}

async fn outbox(setup: &Setup) {
    let listed = setup.done(&["outbox", "ls"]).await;
    assert!(listed.contains("refused") && listed.contains("key-1 (blocked)"), "{listed}");
    assert!(listed.contains("the broker takes 1 MiB") && !listed.contains("too large"), "{listed}");
    assert!(listed.ends_with(" 0 of them failing; 1 refused\n"), "{listed}");
    let all = setup.json(&["outbox", "ls", "--state", "all"]).await;
    let states: Vec<_> =
        all["messages"].as_array().unwrap().iter().map(|message| &message["state"]).collect();
    assert_eq!(json!(states), json!(["refused", "waiting"]));
    let seqs: Vec<_> =
        all["messages"].as_array().unwrap().iter().map(|message| message["seq"].to_string()).collect();
    let words = setup.failed(2, &["outbox", "ls", "--state", "stuck"]).await;
    assert!(words.contains("--state: \"stuck\" is not one of waiting, failing, refused, all"), "{words}");
    let shown = setup.done(&["outbox", "show", &seqs[0]]).await;
    assert!(
        shown.contains("wait behind it") && shown.contains("outbox drop") && !shown.contains("too large"),
        "{shown}"
    );
    assert!(setup.done(&["outbox", "show", &seqs[0], "--payload"]).await.contains("\ntoo large\n"));

    let words = setup.failed(1, &["outbox", "drop", &seqs[1], "--reason", "r"]).await;
    assert!(words.contains("is waiting: a relay publishes it"), "{words}");
    let done = setup.done(&["outbox", "requeue", &seqs[0], "--reason", "the broker takes 8 MiB now"]).await;
    assert_eq!(done, format!("{}: requeued\n", seqs[0]));
    let words = setup.failed(1, &["outbox", "requeue", &seqs[0], "--reason", "again"]).await;
    assert!(words.contains("is failing: a relay tries it again"), "{words}");
    setup.sql("UPDATE oncegate.outbox SET refused_at = 1 WHERE id = 'm-1'");
    let done = setup.done(&["outbox", "drop", &seqs[0], "--reason", "too large for ever"]).await;
    assert_eq!(done, format!("{}: dropped\n", seqs[0]));
    assert_eq!(setup.sql("SELECT id FROM oncegate.outbox").trim(), "m-2");
    let trail = setup.json(&["outbox", "audit"]).await;
    assert_eq!(trail["entries"][0]["reason"], "too large for ever");
    assert_eq!(
        (&trail["entries"][1]["action"], &trail["entries"][1]["id"]),
        (&json!("requeued"), &json!("m-1"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_database_or_sidecar_is_reported_with_what_to_do() {
    let setup = Setup::new(false).await;
    let run = async |args: &[&str], variables: &[(&str, &str)]| {
        let mut command = oncegate(args);
        command.envs(variables.iter().copied());
        let output = blocking(move || command.output().unwrap()).await;
        assert!(output.stdout.is_empty(), "{output:?}");
        (output.status.code(), text(&output.stderr))
    };
    let (_socket, unused) = oncegate_servers::unused_port().unwrap();
    let ls = ["dead-letters", "ls"];
    let away = format!("postgres://app:hunter2@{unused}/shop");
    let (code, words) = run(&ls, &[("ONCEGATE_STORE", &away)]).await;
    assert_eq!(code, Some(3), "{words}");
    assert!(
        words.contains("Connection refused") && !words.contains("hunter2") && !words.contains("app@"),
        "{words}"
    );
    let wrong = setup.server.url().replace(setup.server.password(), "hunter2");
    let (code, words) = run(&["dead-letters", "ls", "--url", &wrong], &[]).await;
    assert!(
        code != Some(0) && words.contains("password authentication failed") && !words.contains("hunter2"),
        "{words}"
    );
    let (code, words) = run(&["outbox", "ls", "--url", "redis://cache"], &[]).await;
    assert_eq!(code, Some(2), "{words}");
    assert!(words.contains("--url: dead letters and the outbox are in PostgreSQL"), "{words}");
    setup.sql("CREATE DATABASE empty");
    let empty = setup.server.url_of("empty");
    let (code, words) = run(&["outbox", "ls"], &[("ONCEGATE_STORE", &empty)]).await;
    assert_eq!(code, Some(1), "{words}");
    assert!(words.contains("oncegate schema apply postgres"), "{words}");
    // Without a database, the sidecar on this machine, or the one that is named.
    let admin = unused.to_string();
    let (code, words) = run(&["outbox", "ls", "--admin", &admin], &[("ONCEGATE_STORE", &empty)]).await;
    assert_eq!(code, Some(3), "{words}");
    assert!(words.contains(&format!("cannot reach the sidecar at http://{admin}")), "{words}");
    let (code, words) = run(&["outbox", "ls", "--admin", &admin, "--url", &empty], &[]).await;
    assert_eq!(code, Some(2), "{words}");

    let service = Service::new().await.answers(OK);
    let other = Sidecar::start(service.address, &[]).await;
    let admin = other.admin.to_string();
    let (code, words) = run(&["dead-letters", "ls", "--admin", &admin], &[]).await;
    assert_eq!(code, Some(1), "{words}");
    assert!(words.contains("oncegate dead-letters --url URL"), "{words}");
}

const SEALED: [u8; 32] = [1; 32];

/// A dead letter of `billing`, an hour old, as an inbox with seal keys writes it.
fn sealed_letter(setup: &Setup, message: &str) -> u64 {
    let receipt = format!("oncegate.message_record('billing', '{message}', '{{header,event-id}}')");
    let id = setup.sql(&format!("SELECT encode({receipt}, 'hex')"));
    let place =
        DeadLetterPlace { id: RecordId::from_hex(id.trim()).unwrap(), consumer: "billing", topic: "orders" };
    let keys = Keyring::new([SealKey::from_bytes(SEALED)]);
    let headers = [("event-id", message.as_bytes()), ("oncegate-message-id", b"m-77")];
    let payload = seal_dead_letter(&place, &headers, b"payload-secret", &keys).unwrap().unwrap();
    let payload: String = payload.iter().map(|byte| format!("{byte:02x}")).collect();
    let error = seal_dead_letter_error(&place, "error-secret", &keys).unwrap().unwrap();
    let number = setup.sql(&format!(
        "WITH written AS (SELECT * FROM oncegate.write_dead_letter({receipt}, 'billing', 'rejected', 1, '{error}', 'orders', null, null, \
         '{{event-id,oncegate-message-id}}', '{{\"\",\"\"}}', '\\x{payload}', 604800000)) SELECT number FROM written"
    ));
    setup.sql(&format!("UPDATE oncegate.dead_letters SET at = at - 3600000 WHERE number = {number}"));
    number.trim().parse().unwrap()
}

/// A dead letter whose content is sealed: shown and published again with the key, kept and refused without it.
#[tokio::test(flavor = "multi_thread")]
async fn sealed_dead_letters_are_opened_directly() {
    let mut setup = Setup::new(false).await;
    let directory = tempfile::tempdir().unwrap();
    let file = |n: u8| {
        let path = directory.path().join(n.to_string());
        std::fs::write(&path, &*SealKey::from_bytes([n; 32]).to_secret_text()).unwrap();
        path.display().to_string()
    };
    let (right, wrong) = (file(1), file(2));
    let words = setup.failed(2, &["dead-letters", "ls", "--seal-keys-file", "/nowhere"]).await;
    assert!(words.contains("--seal-keys-file /nowhere: No such file"), "{words}");
    for keys in [&[][..], &["--seal-keys-file", &wrong]] {
        setup.flags = keys.iter().map(|word| (*word).to_owned()).collect();
        locked(&setup, keys.is_empty()).await;
    }
    setup.flags = vec!["--seal-keys-file".to_owned(), right];
    opened(&setup).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sealed_dead_letters_are_opened_by_the_keys_of_a_sidecar() {
    let mut setup = Setup::new(true).await;
    let number = sealed_letter(&setup, "page");
    let page = async |admin: SocketAddr| {
        let head = format!("GET /dead-letters/{number} HTTP/1.1\r\nHost: {admin}\r\nAccept: text/html\r\n");
        let page = ask(admin, &format!("{head}Connection: close\r\n\r\n")).await;
        page.has_status(200).text().to_owned()
    };
    let shown = page(setup._sidecar.as_ref().unwrap().admin).await;
    for text in ["this sidecar cannot open it", "<b>sealed</b>", "yes, and not opened"] {
        assert!(shown.contains(text), "{text} in {shown}");
    }
    assert!(!shown.contains("Show the content"), "{shown}");
    locked(&setup, true).await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("keys");
    std::fs::write(&file, &*SealKey::from_bytes(SEALED).to_secret_text()).unwrap();
    let service = Service::new().await.answers(OK);
    let mut command = sidecar(&format!("http://{}", service.address));
    // Dead letters in clear are shown also if responses must be sealed.
    command.args([&format!("--seal-keys-file={}", file.display()), "--seal-required"]);
    let sidecar = Sidecar::run(command.env("ONCEGATE_STORE", setup.server.url())).await;
    setup.flags = vec!["--admin".to_owned(), sidecar.admin.to_string()];
    let shown = page(sidecar.admin).await;
    for text in ["yes, and opened here", "error-secret", "Show the content"] {
        assert!(shown.contains(text), "{text} in {shown}");
    }
    assert!(!shown.contains("payload-secret"), "{shown}");
    setup.done(&["dead-letters", "drop", &number.to_string(), "--reason", "shown"]).await;
    opened(&setup).await;
}

async fn locked(setup: &Setup, is_keyless: bool) {
    let number = sealed_letter(setup, &format!("locked-{is_keyless}"));
    let id = SealKey::from_bytes(SEALED).id().to_string();
    let number = number.to_string();
    let listed = setup.done(&["dead-letters", "ls", "--consumer", "billing"]).await;
    assert!(listed.contains("no such \\u{1b}[31maddress"), "others are listed: {listed}");
    let shown = setup.done(&["dead-letters", "show", &number, "--payload"]).await;
    assert!(shown.contains("not opened ") && shown.contains("- sealed: "), "{shown}");
    assert!(!shown.contains("secret") && !shown.contains("dead-letters requeue"), "{shown}");
    assert!(shown.contains(&id), "it names the key: {shown}");
    let words = setup.failed(1, &["dead-letters", "requeue", &number, "--reason", "r"]).await;
    assert!(words.contains(&id) && words.contains("was kept"), "{words}");
    let words =
        setup.failed(2, &["dead-letters", "requeue", &number, "--reason", "r", "--accept", "sealed"]).await;
    assert!(words.contains("cannot be accepted"), "{words}");
    assert_eq!(
        setup.sql("SELECT count(*) FROM oncegate.outbox WHERE topic = 'orders' AND id NOT LIKE 'm-%'").trim(),
        "0"
    );
    assert_eq!(
        setup.sql(&format!("SELECT count(*) FROM oncegate.dead_letters WHERE number = {number}")).trim(),
        "1"
    );
    assert_eq!(
        setup.done(&["dead-letters", "drop", &number, "--reason", "r"]).await,
        format!("{number}: dropped\n")
    );
}

async fn opened(setup: &Setup) {
    let number = sealed_letter(setup, "evt-77");
    let number = number.to_string();
    assert!(
        !setup
            .sql("SELECT string_agg(l::text, ' ') FROM oncegate.dead_letters AS l WHERE attempts = 1")
            .contains("error-secret")
    );
    let listed = setup.done(&["dead-letters", "ls"]).await;
    assert!(listed.contains("error-secret") && !listed.contains("payload-secret"), "{listed}");
    assert!(listed.contains("no such \\u{1b}[31maddress"), "those in clear, too: {listed}");
    let shown = setup.json(&["dead-letters", "show", &number, "--payload"]).await;
    assert_eq!(
        [
            &shown["payload"],
            &shown["error"],
            &shown["identity"],
            &shown["sealed"],
            &shown["headers"][0]["value"]
        ],
        [
            &json!("payload-secret"),
            &json!("error-secret"),
            &json!("header event-id"),
            &json!(true),
            &json!("evt-77")
        ]
    );
    assert_eq!((&shown["obstacles"], &shown["payload_bytes"]), (&json!([]), &json!(14)));
    // Obstacles are those of the opened message.
    let early = setup
        .failed(1, &["dead-letters", "requeue", &number, "--reason", "r", "--broker-window", "2h"])
        .await;
    assert!(early.contains("give it in --broker-window"), "{early}");
    let done = setup.done(&["dead-letters", "requeue", &number, "--reason", "the address is known"]).await;
    assert_eq!(done, format!("{number}: requeued, as message m-77 of the outbox\n"));
    let sent = "SELECT topic, convert_from(payload, 'UTF8'), header_names, convert_from(header_values[1], 'UTF8') \
                FROM oncegate.outbox WHERE id = 'm-77'";
    assert_eq!(setup.sql(sent).trim(), "orders|payload-secret|{event-id,oncegate-message-id}|evt-77");
    let receipts = "SELECT count(*) FROM oncegate.receipts \
                    WHERE id = oncegate.message_record('billing', 'evt-77', '{header,event-id}')";
    assert_eq!(setup.sql(receipts).trim(), "0", "its consumer processes it again");
    let words = setup.failed(1, &["dead-letters", "requeue", &number, "--reason", "again"]).await;
    assert!(words.contains(&format!("no dead letter {number}")), "{words}");
    let trail = setup.json(&["dead-letters", "audit"]).await;
    assert_eq!(
        (&trail["entries"][0]["action"], &trail["entries"][0]["actor"]),
        (&json!("requeued"), &json!("ada"))
    );
}
