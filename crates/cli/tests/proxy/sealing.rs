//! Stored responses that are encrypted: what a dump shows, wrong and replaced keys, operators, and attackers who can write to the
//! store.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Output;

use oncegate_seal::SealKey;
use oncegate_servers::{PostgresServer, RedisOptions, RedisServer};
use oncegate_testkit::until;
use rustix::process::Signal;
use tokio::process::Command;

use crate::KEY;
use crate::operations::{admin, series};
use crate::support::{FixedService, Message, Service, Sidecar, request, sidecar, within};

/// A part of every response of the service, and of no log.
pub(crate) const SECRET: &str = "4111-secret-1111";
pub(crate) const CARD: &str = "HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 53\r\n\r\n\
    {\"card\":{\"number\":\"4111-secret-1111\",\"holder\":\"Ann\"}}";

fn key(n: u8) -> SealKey {
    SealKey::from_bytes([n; 32])
}

pub(crate) fn id(n: u8) -> String {
    key(n).id().to_string()
}

/// A directory with a file of keys.
pub(crate) struct Keys {
    directory: tempfile::TempDir,
}

impl Keys {
    pub(crate) fn new(keys: &[u8]) -> Self {
        let new = Self { directory: tempfile::tempdir().unwrap() };
        new.set(keys);
        new
    }

    fn file(&self) -> PathBuf {
        self.directory.path().join("seal-keys")
    }

    pub(crate) fn flag(&self) -> String {
        format!("--seal-keys-file={}", self.file().display())
    }

    pub(crate) fn set(&self, keys: &[u8]) {
        let lines: Vec<_> = keys.iter().map(|n| key(*n).to_secret_text().to_string()).collect();
        fs::write(self.file(), lines.join("\n")).unwrap();
        fs::set_permissions(self.file(), fs::Permissions::from_mode(0o600)).unwrap();
    }
}

fn post(path: &str) -> String {
    request("POST", path, &[KEY], "{}")
}

/// The same request of different callers.
pub(crate) fn post_as(caller: &str, path: &str, body: &str) -> String {
    request("POST", path, &[KEY, &format!("Authorization: Bearer {caller}")], body)
}

pub(crate) async fn start(service: &FixedService, store: &str, flags: &[&str]) -> Sidecar {
    let mut command = sidecar(&format!("http://{}", service.address));
    Sidecar::run(command.env("ONCEGATE_STORE", store).args(flags)).await
}

/// Stops the sidecar. Asserts that its log shows neither a response nor a key.
pub(crate) async fn stop(mut sidecar: Sidecar) -> String {
    sidecar.process.signal(Signal::TERM);
    let out = sidecar.process.output().await.join("\n");
    let text = format!("{out}\n{}", sidecar.process.errors().await);
    assert!(!text.contains(SECRET) && !text.contains("ogseal1_d") && !text.contains("ogseal1_b"), "{text}");
    assert!(!text.contains(&"01".repeat(16)) && !text.contains(&"02".repeat(16)), "{text}");
    text
}

pub(crate) async fn oncegate(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    within("the end of a command", command.args(args).env_clear().output()).await.unwrap()
}

/// The output of a command about the records of a sidecar, which must succeed.
pub(crate) async fn keys(sidecar: &Sidecar, args: &[&str]) -> String {
    let admin = format!("--admin={}", sidecar.admin);
    let output = oncegate(&[args, &[&admin]].concat()).await;
    let text = String::from_utf8([&output.stdout[..], &output.stderr].concat()).unwrap();
    assert!(output.status.success(), "{args:?}: {text}");
    text
}

/// The identifier of the only record.
async fn record(sidecar: &Sidecar) -> String {
    let listed = admin(sidecar, "/v1/keys").await.json();
    let records = listed["records"].as_array().unwrap();
    assert_eq!(records.len(), 1, "{listed}");
    records[0]["record"].as_str().unwrap().to_owned()
}

/// Returns true if a file below this directory contains the secret.
pub(crate) fn shows(directory: &Path) -> bool {
    fs::read_dir(directory).unwrap().any(|entry| {
        let path = entry.unwrap().path();
        if path.is_dir() {
            return shows(&path);
        }
        // A socket cannot be read.
        let content = fs::read(&path).unwrap_or_default();
        content.windows(SECRET.len()).any(|part| part == SECRET.as_bytes())
    })
}

/// A server with the schema.
pub(crate) async fn postgres() -> PostgresServer {
    let server = tokio::task::spawn_blocking(|| PostgresServer::start().unwrap()).await.unwrap();
    let mut apply = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    apply.args(["schema", "apply", "postgres"]).env("ONCEGATE_STORE", server.url());
    assert!(within("the schema", apply.output()).await.unwrap().status.success());
    server
}

#[track_caller]
fn is_card(response: &Message, is_replay: bool) {
    assert!(response.has_status(201).text().contains(SECRET), "{}", response.text());
    assert_eq!(response.is_replay(), is_replay);
    assert_eq!(response.get("oncegate-sealed"), None);
}

#[tokio::test]
async fn a_dump_of_the_embedded_store_shows_no_response_and_wrong_keys_execute_nothing() {
    let (service, right) = (Service::new().await.answers(CARD), Keys::new(&[1]));
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data").display().to_string();
    let sealing = start(&service, &store, &[&right.flag(), "--access-log=json"]).await;
    is_card(&sealing.ask(&post("/pay")).await, false);
    is_card(&sealing.ask(&post("/pay")).await, true);
    let about = admin(&sealing, "/v1/seal").await.json();
    assert_eq!(about["keys"], serde_json::json!([{"id": id(1), "seals": true}]));
    let seals = format!("oncegate_seal_key{{key=\"{}\",use=\"seals\"}}", id(1));
    assert_eq!(series(&sealing, &seals).await, Some(1.0));
    let record = record(&sealing).await;
    let shown = keys(&sealing, &["keys", "show", &record, "--body"]).await;
    assert!(
        shown.contains(SECRET) && shown.contains(&format!("sealed with     the key {}", id(1))),
        "{shown}"
    );
    let log = stop(sealing).await;
    assert!(log.contains(&format!("sealing: the key {} seals stored responses", id(1))), "{log}");
    assert!(!shows(directory.path()));

    // Another key, and no key.
    let wrong = Keys::new(&[2]);
    for flags in [&[&*wrong.flag()][..], &[]] {
        let check =
            oncegate(&[&["check", "--to=http://127.0.0.1:9", "--store", &store][..], flags].concat()).await;
        let text = String::from_utf8(check.stdout).unwrap();
        let missing = format!("the key {}, which is not among the seal keys, sealed 1 of the records", id(1));
        assert!(!check.status.success() && text.contains(&missing), "{text}");
        let sidecar = start(&service, &store, flags).await;
        // Before any request needs the key.
        let note = format!(
            "1 of 1 records that were looked at are sealed with keys that this process does not have: {}",
            id(1)
        );
        until("the note of the start", async || admin(&sidecar, "/readyz").await.text().contains(&note))
            .await;
        let refusals = "oncegate_seal_refused_total{reason=\"key-missing\"}";
        assert_eq!(series(&sidecar, refusals).await, Some(0.0));
        let refused = sidecar.ask(&post("/pay")).await;
        refused.is_problem(503, "response-sealed");
        assert_eq!(refused.json()["retry"], "same-key");
        let other = request("POST", "/pay", &[KEY], "{\"other\":1}");
        let shown = keys(&sidecar, &["keys", "show", &record, "--body"]).await;
        assert!(shown.contains("not opened      ") && shown.contains("response        sealed, "), "{shown}");
        assert!(!shown.contains("response        500") && !shown.contains(SECRET), "{shown}");
        let usage = keys(&sidecar, &["seal-key", "usage"]).await;
        assert!(
            usage.contains(&format!("{}  1 record; this sidecar does NOT have the key", id(1))),
            "{usage}"
        );
        let ready = admin(&sidecar, "/readyz").await;
        let note = format!("sealed with keys that this process does not have: {}", id(1));
        assert!(ready.has_status(200).text().contains(&note), "{}", ready.text());
        let is_keyless = ready.text().contains("has no seal keys, and stores new responses in clear");
        assert_eq!(is_keyless, flags.is_empty(), "{}", ready.text());
        assert_eq!(series(&sidecar, refusals).await, Some(1.0));
        let advisory = "oncegate_store_advisory{name=\"seal-key-missing\"}";
        assert_eq!(series(&sidecar, advisory).await, Some(1.0));
        let about = admin(&sidecar, "/v1/seal").await.json();
        assert_eq!(
            (&about["missing_keys"][0]["id"], &about["missing_keys"][0]["refused"]),
            (&id(1).into(), &1.into())
        );
        for line in [
            "records are sealed with keys that this sidecar does not have",
            "requests were refused (response-sealed)",
        ] {
            until(format!("the log says: {line}"), async || sidecar.process.error_lines(line).len() == 1)
                .await;
        }
        if flags.is_empty() {
            assert_eq!(admin(&sidecar, "/v1/seal").await.json()["seals"], false);
            sidecar.ask(&other).await.is_problem(422, "key-reused");
        } else {
            // Nothing tells if only the host differs, and a new key would execute again then.
            sidecar.ask(&other).await.is_problem(503, "store-unavailable");
            // The key is added while the sidecar runs: the refusal ends, and so does the note.
            wrong.set(&[2, 1]);
            sidecar.process.signal(Signal::HUP);
            until("the key is there", async || sidecar.ask(&post("/pay")).await.status() == 201).await;
            is_card(&sidecar.ask(&post("/pay")).await, true);
            assert_eq!(admin(&sidecar, "/readyz").await.text(), "ready\n");
            sidecar.ask(&other).await.is_problem(422, "key-reused");
            wrong.set(&[2]);
        }
        stop(sidecar).await;
    }
    assert_eq!(service.requests(), 1);

    // The same search finds what is not sealed.
    let plain = directory.path().join("plain").display().to_string();
    let sidecar = start(&service, &plain, &[]).await;
    is_card(&sidecar.ask(&post("/pay")).await, false);
    stop(sidecar).await;
    assert!(shows(directory.path()));
}

#[tokio::test]
async fn a_dump_of_redis_shows_no_response_and_two_sidecars_may_order_their_keys_differently() {
    for is_sealed in [true, false] {
        let mut server = RedisServer::start(RedisOptions::new().with_appendfsync("always")).unwrap();
        let service = Service::new().await.answers(CARD);
        let (one, two) = (Keys::new(&[1, 2]), Keys::new(&[2, 1]));
        let flags = |keys: &Keys| if is_sealed { vec![keys.flag()] } else { Vec::new() };
        let (one_flags, two_flags) = (flags(&one), flags(&two));
        let first =
            start(&service, &server.url(), &one_flags.iter().map(String::as_str).collect::<Vec<_>>()).await;
        let second =
            start(&service, &server.url(), &two_flags.iter().map(String::as_str).collect::<Vec<_>>()).await;
        for (writer, reader, path) in [(&first, &second, "/a"), (&second, &first, "/b")] {
            is_card(&writer.ask(&post(path)).await, false);
            is_card(&reader.ask(&post(path)).await, true);
        }
        assert_eq!(service.requests(), 2);
        if is_sealed {
            let usage = keys(&first, &["seal-key", "usage"]).await;
            assert!(usage.contains(&format!("{}  1 record; it seals new records", id(1))), "{usage}");
            assert!(
                usage.contains(&format!("{}  1 record; it opens. It may be removed after ", id(2))),
                "{usage}"
            );
        }
        stop(first).await;
        stop(second).await;
        server.kill();
        assert_eq!(shows(server.dir()), !is_sealed, "in the append-only file");
    }
}

/// An operator knows what `seal-required` will refuse before the sidecar starts with it.
#[tokio::test(flavor = "multi_thread")]
async fn a_check_counts_the_responses_in_clear() {
    let (service, keys_file) = (Service::new().await.answers(CARD), Keys::new(&[1]));
    let directory = tempfile::tempdir().unwrap();
    let postgres = postgres().await;
    let redis = RedisServer::start(RedisOptions::new().with_appendfsync("always")).unwrap();
    for store in [directory.path().join("data").display().to_string(), postgres.url(), redis.url()] {
        for (flags, paths) in [(&[][..], &["/a", "/b"][..]), (&[&*keys_file.flag()], &["/c"])] {
            let sidecar = start(&service, &store, flags).await;
            for path in paths {
                is_card(&sidecar.ask(&post(path)).await, false);
            }
            stop(sidecar).await;
        }
        let check = async |flags: &[&str]| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
            command
                .args(["check", "--to=http://127.0.0.1:9", "--service=orders"])
                .args(flags)
                .env_clear()
                .env("ONCEGATE_STORE", &store);
            let output = within("the end of a command", command.output()).await.unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            assert!(!text.contains(SECRET), "{text}");
            (output.status.success(), text)
        };
        let (is_usable, strict) = check(&[&keys_file.flag(), "--seal-required"]).await;
        let line = strict.lines().find(|line| line.contains("2 responses in clear")).expect(&strict);
        let refused =
            "their retries are refused (response-sealed) until the last of their retentions ends, in ";
        assert!(is_usable && line.starts_with("warn ") && line.contains(refused), "{line}");
        assert!(strict.contains(&format!("the key {} sealed 1 of the records", id(1))), "{strict}");
        // A sidecar with that setting refuses those two.
        let sidecar = start(&service, &store, &[&keys_file.flag(), "--seal-required"]).await;
        for (path, is_sealed) in [("/a", false), ("/b", false), ("/c", true)] {
            let replay = sidecar.ask(&post(path)).await;
            match is_sealed {
                true => is_card(&replay, true),
                false => drop(replay.is_problem(503, "response-sealed")),
            }
        }
        stop(sidecar).await;
        let is_local = store.starts_with('/');
        let (_, lenient) = check(&[&keys_file.flag()]).await;
        assert_eq!(
            lenient.contains("2 responses in clear; the last of their retentions ends in"),
            is_local,
            "{lenient}"
        );
        assert!(!check(&[]).await.1.contains("in clear"), "without keys, everything is");
    }
}

/// One sidecar of two lost its keys, or never had them.
#[tokio::test]
async fn a_sidecar_without_keys_next_to_one_with_keys_says_so() {
    let server = RedisServer::start(RedisOptions::new().with_appendfsync("always")).unwrap();
    let (service, keys_file) = (Service::new().await.answers(CARD), Keys::new(&[1]));
    let keyless = start(&service, &server.url(), &[]).await;
    let sealing = start(&service, &server.url(), &[&keys_file.flag(), "--seal-required"]).await;
    assert_eq!(admin(&keyless, "/readyz").await.text(), "ready\n");
    is_card(&sealing.ask(&post("/sealed")).await, false);
    is_card(&keyless.ask(&post("/clear")).await, false);
    // Neither replays what the other one stored, and nothing executes again.
    keyless.ask(&post("/sealed")).await.is_problem(503, "response-sealed");
    sealing.ask(&post("/clear")).await.is_problem(503, "response-sealed");
    let note = admin(&keyless, "/readyz").await;
    let words = format!(
        "requests were refused (1 so far), because their records are sealed with keys that this process does not have: {}",
        id(1)
    );
    assert!(note.has_status(200).text().contains(&words), "{}", note.text());
    assert_eq!(series(&keyless, "oncegate_seal_refused_total{reason=\"key-missing\"}").await, Some(1.0));
    assert_eq!(series(&sealing, "oncegate_seal_refused_total{reason=\"not-sealed\"}").await, Some(1.0));
    // The sidecar with the keys shows what the other one stores, and the metrics show which one has keys.
    let usage = keys(&sealing, &["seal-key", "usage"]).await;
    assert!(usage.contains("in clear          1 record; "), "{usage}");
    let seals = format!("oncegate_seal_key{{key=\"{}\",use=\"seals\"}}", id(1));
    assert_eq!((series(&sealing, &seals).await, series(&keyless, &seals).await), (Some(1.0), None));
    assert_eq!(service.requests(), 2);
    stop(keyless).await;
    stop(sealing).await;
}

/// A service behind the sidecar records steps in SQL, in clear, because PostgreSQL has no key. The sidecar needs no step, so they
/// hold up nothing, although it must find responses sealed.
#[tokio::test(flavor = "multi_thread")]
async fn steps_that_a_service_records_in_sql_hold_up_neither_its_response_nor_its_retry() {
    for completes in [false, true] {
        let server = postgres().await;
        let (service, keys_file) = (Service::new().await, Keys::new(&[1]));
        let mut command = sidecar(&format!("http://{}", service.address));
        let flags = ["--on-abandoned=reexecute", "--seal-required", &keys_file.flag()];
        command.env("ONCEGATE_STORE", server.url()).args(flags);
        if completes {
            command.arg("--completion=upstream");
        }
        let sidecar = Sidecar::run(&mut command).await;
        let receive = async || {
            let mut client = sidecar.connect().await;
            client.send(&post("/pay")).await;
            let mut wire = service.accept().await;
            let asked = wire.message().await;
            let attempt =
                ["oncegate-record", "oncegate-token"].map(|name| asked.get(name).unwrap().to_owned());
            (client, wire, attempt)
        };
        let (mut client, mut wire, [record, token]) = receive().await;
        let step = format!(
            "SELECT outcome FROM oncegate.step('\\x{record}'::bytea, {token}, 0, 'charge', '{SECRET}'::bytea)"
        );
        assert_eq!(server.sql(&step).unwrap(), "recorded");
        // An error that frees the key: the step stays. The next request comes over a connection of its own.
        wire.send("HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\nContent-Length: 0\r\n\r\n").await;
        drop(wire);
        client.message().await.has_status(429);
        let shown = keys(&sidecar, &["keys", "show", &record, "--body"]).await;
        assert!(shown.contains("charge") && shown.contains(SECRET), "{shown}");
        assert!(shown.contains("not opened      ") && shown.contains("is not sealed"), "{shown}");

        let (mut client, mut wire, [again, later]) = receive().await;
        assert_eq!(again, record);
        let names = format!("SELECT step_names FROM oncegate.lookup('\\x{record}'::bytea)");
        assert_eq!(server.sql(&names).unwrap(), "{charge}", "the next attempt continues after it");
        if completes {
            server.sql(&format!("SELECT oncegate.complete('\\x{record}'::bytea, {later})")).unwrap();
        }
        wire.send(CARD).await;
        is_card(&client.message().await, false);
        is_card(&sidecar.ask(&post("/pay")).await, true);
        let dump = server.sql("SELECT encode(response, 'escape') FROM oncegate.records").unwrap();
        assert!(!dump.contains("4111"), "{dump}");
        assert_eq!(series(&sidecar, "oncegate_seal_refused_total{reason=\"not-sealed\"}").await, Some(0.0));
        stop(sidecar).await;
    }
}

/// An attacker who can write to the database moves, changes and replaces sealed responses. Nothing executes again.
#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_written_into_the_database_no_foreign_response_is_replayed() {
    let server = postgres().await;
    let service = Service::new().await.answers(CARD);
    let keys = Keys::new(&[1]);
    let plain = start(&service, &server.url(), &[]).await;
    is_card(&plain.ask(&post("/plain")).await, false);
    stop(plain).await;
    let sealing = start(&service, &server.url(), &[&keys.flag()]).await;
    is_card(&sealing.ask(&post("/plain")).await, true);
    let attacks = [
        ("moved", "(SELECT response FROM oncegate.records WHERE operation = 'POST /other')"),
        (
            "flipped",
            "set_byte(response, length(response) - 40, get_byte(response, length(response) - 40) # 1)",
        ),
        ("cut", "substring(response FROM 1 FOR length(response) - 1)"),
        (
            "foreign",
            "overlay(response PLACING '\\x1111111111111111'::bytea FROM position('\\x006f677365616c01'::bytea IN response) + 8)",
        ),
        ("downgraded", "(SELECT response FROM oncegate.records WHERE operation = 'POST /plain')"),
    ];
    for path in ["other", "untouched"].into_iter().chain(attacks.map(|(name, _)| name)) {
        is_card(&sealing.ask(&post(&format!("/{path}"))).await, false);
    }
    let dump = server.sql("SELECT string_agg(encode(response, 'escape'), ' ') FROM oncegate.records WHERE operation <> 'POST /plain'");
    assert!(!dump.unwrap().contains("4111"));
    for (name, response) in attacks {
        let changed = format!(
            "UPDATE oncegate.records SET response = {response} WHERE operation = 'POST /{name}' RETURNING 1"
        );
        assert_eq!(server.sql(&changed).unwrap(), "1", "{name}");
    }
    for name in ["moved", "flipped", "cut"] {
        sealing.ask(&post(&format!("/{name}"))).await.is_problem(500, "record-corrupt");
    }
    sealing.ask(&post("/foreign")).await.is_problem(503, "response-sealed");
    // Without seal-required, what is not sealed is replayed.
    is_card(&sealing.ask(&post("/downgraded")).await, true);
    is_card(&sealing.ask(&post("/untouched")).await, true);
    assert_eq!(series(&sealing, "oncegate_seal_refused_total{reason=\"broken\"}").await, Some(3.0));
    stop(sealing).await;
    let strict = start(&service, &server.url(), &[&keys.flag(), "--seal-required"]).await;
    for name in ["downgraded", "plain"] {
        strict.ask(&post(&format!("/{name}"))).await.is_problem(503, "response-sealed");
    }
    is_card(&strict.ask(&post("/untouched")).await, true);
    assert_eq!(series(&strict, "oncegate_seal_refused_total{reason=\"not-sealed\"}").await, Some(2.0));
    stop(strict).await;
    assert_eq!(service.requests(), 8, "each request once");
}

/// The service completes its record in its own transaction, and the sidecar adds the response, sealed.
#[tokio::test(flavor = "multi_thread")]
async fn a_response_that_the_sidecar_adds_to_a_record_of_the_service_is_sealed() {
    let server = postgres().await;
    let (service, keys) = (Service::new().await, Keys::new(&[1]));
    let mut command = sidecar(&format!("http://{}", service.address));
    command.env("ONCEGATE_STORE", server.url()).args([
        "--completion=upstream",
        "--seal-required",
        &keys.flag(),
    ]);
    let sidecar = Sidecar::run(&mut command).await;
    let mut client = sidecar.connect().await;
    client.send(&post("/pay")).await;
    let mut wire = service.accept().await;
    let asked = wire.message().await;
    let [record, token] =
        ["oncegate-record", "oncegate-token"].map(|name| asked.get(name).unwrap().to_owned());
    let complete = format!("SELECT oncegate.complete('\\x{record}'::bytea, {token})");
    server.sql(&complete).unwrap();
    wire.send(CARD).await;
    is_card(&client.message().await, false);
    is_card(&sidecar.ask(&post("/pay")).await, true);
    stop(sidecar).await;
}

#[tokio::test]
async fn operators_work_on_sealed_records_with_and_without_the_key() {
    let (service, keys_file) = (Service::new().await, Keys::new(&[1]));
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data").display().to_string();
    let to = format!("http://{}", service.address);
    let run = async |flags: &[&str]| {
        let mut command = sidecar(&to);
        Sidecar::run(command.env("ONCEGATE_STORE", &store).arg("--upstream-timeout=200ms").args(flags)).await
    };
    let sealing = run(&[&keys_file.flag()]).await;
    sealing.ask(&post("/pay")).await.is_problem(504, "outcome-unknown");
    let record = record(&sealing).await;
    let body = format!("--body={{\"number\":\"{SECRET}\"}}");
    let why = ["--reason", "in the ledger"];
    keys(&sealing, &[&["keys", "resolve", &record, "--status", "201", &body][..], &why].concat()).await;
    is_card(&sealing.ask(&post("/pay")).await, true);
    keys(&sealing, &[&["keys", "park", &record][..], &why].concat()).await;
    sealing.ask(&post("/pay")).await.is_problem(500, "outcome-unknown");
    keys(&sealing, &[&["keys", "resolve", &record, "--status", "201", &body][..], &why].concat()).await;
    let amended = format!("--body={{\"number\":\"{SECRET}\",\"amended\":true}}");
    keys(
        &sealing,
        &[&["keys", "resolve", &record, "--amend", "--status", "201", &amended][..], &why].concat(),
    )
    .await;
    assert!(sealing.ask(&post("/pay")).await.text().contains("amended"));
    stop(sealing).await;
    assert!(!shows(directory.path()));

    let wrong = Keys::new(&[2]);
    let other = run(&[&wrong.flag()]).await;
    other.ask(&post("/pay")).await.is_problem(503, "response-sealed");
    let parked = keys(&other, &[&["keys", "park", &record][..], &why].concat()).await;
    assert!(parked.contains("unknown"), "{parked}");
    keys(&other, &[&["keys", "resolve", &record, "--status", "201", &body][..], &why].concat()).await;
    is_card(&other.ask(&post("/pay")).await, true);
    stop(other).await;
    assert!(!shows(directory.path()));
}

#[tokio::test]
async fn a_reload_rotates_keys_and_sealing_is_switched_only_by_a_restart() {
    let (service, keys_file) = (Service::new().await.answers(CARD), Keys::new(&[1]));
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("oncegate.toml");
    let write = |rest: &str| {
        let text = format!("to = \"http://{}\"\nstore = \"memory:\"\n{rest}", service.address);
        fs::write(&file, text).unwrap();
    };
    let sealed = format!("seal-keys-file = \"{}\"\n", keys_file.file().display());
    write(&sealed);
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(["proxy", "--listen=127.0.0.1:0", "--admin=127.0.0.1:0", "--config"]).arg(&file);
    let sidecar = Sidecar::run(&mut command).await;
    let reload = async |says: &str| {
        let before = sidecar.process.error_lines(says).len();
        sidecar.process.signal(Signal::HUP);
        until(format!("it says {says:?}"), async || sidecar.process.error_lines(says).len() > before).await;
    };
    const NOT_RELOADED: &str = "the configuration was not reloaded";
    is_card(&sidecar.ask(&post("/one")).await, false);
    for (keys, sealing) in [(&[1, 2][..], 1), (&[2, 1], 2)] {
        keys_file.set(keys);
        reload(&format!("sealing: the key {} seals", id(sealing))).await;
        is_card(&sidecar.ask(&post("/one")).await, true);
        is_card(&sidecar.ask(&post(&format!("/by/{sealing}"))).await, false);
    }
    assert!(sidecar.process.error_lines("the reload removed the seal keys").is_empty());
    // A file with a mistake changes nothing.
    fs::write(keys_file.file(), "hunter2").unwrap();
    reload(NOT_RELOADED).await;
    assert_eq!(sidecar.process.error_lines("line 1 is not a key").len(), 1);
    assert!(sidecar.process.error_lines("hunter2").is_empty());
    is_card(&sidecar.ask(&post("/one")).await, true);
    write("");
    reload(NOT_RELOADED).await;
    assert_eq!(sidecar.process.error_lines("seal-keys-file: only a restart can change this").len(), 1);
    // The old key is removed too early.
    write(&sealed);
    keys_file.set(&[2]);
    reload("the reload removed the seal keys").await;
    sidecar.ask(&post("/one")).await.is_problem(503, "response-sealed");
    is_card(&sidecar.ask(&post("/by/2")).await, true);
    // New responses are stored in clear, and sealed ones are opened.
    write(&format!("{sealed}seal-opens-only = true\n"));
    reload("sealing: seal-opens-only: new responses are stored in clear").await;
    is_card(&sidecar.ask(&post("/clear")).await, false);
    is_card(&sidecar.ask(&post("/by/2")).await, true);
    let usage = keys(&sidecar, &["seal-key", "usage"]).await;
    assert!(usage.contains("in clear          1 record; "), "{usage}");
    write(&format!("{sealed}seal-required = true\n"));
    reload("stored responses that are not sealed are refused").await;
    sidecar.ask(&post("/clear")).await.is_problem(503, "response-sealed");
    assert_eq!(service.requests(), 4);
    stop(sidecar).await;
}

#[tokio::test]
async fn a_program_prints_the_keys_and_its_failures_name_no_key() {
    let (service, keys_file) = (Service::new().await.answers(CARD), Keys::new(&[1]));
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("print-keys");
    let script = |text: &str| {
        fs::write(&program, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
    };
    let cat = format!("echo asking >&2; cat {}", keys_file.file().display());
    script(&cat);
    let flag = format!("--seal-keys-command={}", program.display());
    let check = oncegate(&["check", "--to=http://127.0.0.1:9", "--store=memory:", &flag]).await;
    let text = String::from_utf8(check.stdout).unwrap();
    assert!(text.contains("prints the keys; it runs only with --online") && !text.contains(&id(1)), "{text}");
    let sidecar = start(&service, "memory:", &[&flag]).await;
    is_card(&sidecar.ask(&post("/pay")).await, false);
    assert_eq!(admin(&sidecar, "/v1/seal").await.json()["keys"][0]["id"], id(1));
    assert_eq!(sidecar.process.error_lines(": asking").len(), 1);
    script(&format!("{cat}; cat {} >&2; exit 7", keys_file.file().display()));
    sidecar.process.signal(Signal::HUP);
    until("the reload is refused", async || {
        !sidecar.process.error_lines("failed: exit status: 7").is_empty()
    })
    .await;
    is_card(&sidecar.ask(&post("/pay")).await, true);
    let log = stop(sidecar).await;
    assert!(log.contains("(a line with a key was left out)"), "{log}");
    // A start that fails creates no store.
    let store = directory.path().join("data");
    let mut command = self::sidecar("http://127.0.0.1:9");
    command.env("ONCEGATE_STORE", &store).arg(&flag);
    let ended = within("the end of the start", command.output()).await.unwrap();
    let text = String::from_utf8(ended.stderr).unwrap();
    assert!(!ended.status.success() && text.contains("error: seal-keys-command: "), "{text}");
    assert!(!text.contains("ogseal1_") && !store.exists(), "{text}");
}

#[tokio::test]
async fn a_signal_stops_a_sidecar_whose_program_for_keys_hangs() {
    let directory = tempfile::tempdir().unwrap();
    let begun = directory.path().join("begun");
    let config = directory.path().join("oncegate.toml");
    let script = format!("touch {}; sleep 1000", begun.display());
    fs::write(&config, format!("seal-keys-command = [\"/bin/sh\", \"-c\", {script:?}]\n")).unwrap();
    for signal in [Signal::TERM, Signal::INT] {
        let mut command = self::sidecar("http://127.0.0.1:9");
        command.arg(format!("--config={}", config.display())).env("ONCEGATE_STORE", "memory:");
        let mut process = crate::support::Process::start(&mut command);
        until("the program runs", async || begun.exists()).await;
        process.signal(signal);
        // Not by the error about a program that did not end in time.
        let status = process.ended().await;
        assert!(status.success(), "{status}");
        fs::remove_file(&begun).unwrap();
    }
}

#[tokio::test]
async fn the_program_for_keys_gets_a_small_environment() {
    let (service, keys_file) = (Service::new().await.answers(CARD), Keys::new(&[1]));
    let directory = tempfile::tempdir().unwrap();
    let seen = directory.path().join("environment");
    let mut command = self::sidecar(&format!("http://{}", service.address));
    let script = format!("env > {}; cat {}", seen.display(), keys_file.file().display());
    let config = directory.path().join("oncegate.toml");
    fs::write(&config, format!("seal-keys-command = [\"/bin/sh\", \"-c\", {script:?}]\n")).unwrap();
    command.arg(format!("--config={}", config.display())).env("ONCEGATE_STORE", "memory:");
    let gets = [
        ("HOME", "/home/anna"),
        ("LC_ALL", "C.UTF-8"),
        ("AWS_REGION", "eu-central-1"),
        ("VAULT_ADDR", "https://vault.example"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/key.json"),
        ("https_proxy", "http://proxy.example"),
        ("CREDENTIALS_DIRECTORY", "/run/credentials/oncegate.service"),
    ];
    let secrets = [
        ("ONCEGATE_ADMIN_TOKEN", "hunter2-hunter2-hunter2"),
        ("ONCEGATE_OTLP_HEADERS", "authorization=hunter2"),
        ("PGPASSWORD", "hunter2"),
        ("LD_LIBRARY_PATH", "/hunter2"),
    ];
    let sidecar = Sidecar::run(command.envs(gets).envs(secrets)).await;
    let seen = fs::read_to_string(seen).unwrap();
    for (name, value) in gets {
        assert!(seen.lines().any(|line| line == format!("{name}={value}")), "{name}: {seen}");
    }
    assert!(seen.contains("PATH=") && !seen.contains("hunter2") && !seen.contains("ONCEGATE_"), "{seen}");
    drop(sidecar);
}

#[tokio::test]
async fn the_cache_before_a_store_has_sealed_responses_only() {
    let (service, keys_file) = (Service::new().await.answers(CARD), Keys::new(&[1]));
    let directory = tempfile::tempdir().unwrap();
    let [cache, store] = ["cache", "store"].map(|name| directory.path().join(name).display().to_string());
    let store = format!("cached(cache={cache},store={store})");
    let sidecar = start(&service, &store, &[&keys_file.flag()]).await;
    is_card(&sidecar.ask(&post("/pay")).await, false);
    until("the cache replays it", async || {
        is_card(&sidecar.ask(&post("/pay")).await, true);
        series(&sidecar, "oncegate_cache_claims_total{result=\"hit\"}").await > Some(0.0)
    })
    .await;
    stop(sidecar).await;
    assert!(!shows(directory.path()));
}

#[tokio::test]
async fn new_keys_are_made_and_listed_by_their_ids() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("keys").display().to_string();
    let text = async |args: &[&str]| {
        let output = oncegate(args).await;
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let (one, two) = (text(&["seal-key", "new"]).await, text(&["seal-key", "new"]).await);
    assert!(one.starts_with("ogseal1_") && one != two, "{one}");
    for _ in 0..2 {
        text(&["seal-key", "new", "--append", &file]).await;
    }
    // An empty file, as `touch` or `install` make it, gets its first key.
    let empty = directory.path().join("empty").display().to_string();
    fs::write(&empty, "").unwrap();
    fs::set_permissions(&empty, fs::Permissions::from_mode(0o644)).unwrap();
    let made = oncegate(&["seal-key", "new", "--append", &empty]).await;
    assert!(made.status.success(), "{made:?}");
    assert!(
        String::from_utf8(made.stderr).unwrap().contains("can be read by every user"),
        "it may be a secret no longer"
    );
    assert_eq!(text(&["seal-key", "ls", &empty]).await.lines().count(), 1);
    let listed = text(&["seal-key", "ls", &file]).await;
    assert!(listed.lines().count() == 2 && !listed.contains("ogseal1_"), "{listed}");
    let missing = oncegate(&["seal-key", "ls", "/nowhere/keys"]).await;
    assert_eq!(missing.status.code(), Some(1));
}
