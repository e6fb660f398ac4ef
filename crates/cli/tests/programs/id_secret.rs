//! Sidecars with an id secret on one store, Redis or PostgreSQL: only those with the same secret execute, and the store does not
//! confirm a guess.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use axum::Router;
use axum::routing::post;
use oncegate_core::{IdSecret, IdempotencyKey, KeyTag, RecordId, Scope, ServiceName};
use oncegate_engine::Engine;
use oncegate_http::IdempotencyLayer;
use oncegate_redis::{RedisOptions as StoreOptions, RedisStore};
use oncegate_servers::{PostgresServer, RedisOptions, RedisServer};
use oncegate_testkit::until;
use tokio::process::Command;

use crate::support::{FixedService, Message, Service, Sidecar, ask, request, sidecar};

const OK: &str = "HTTP/1.1 201 Created\r\nContent-Length: 7\r\n\r\nreceipt";

/// The record that marks a store.
const MARK: &str = "3a75297e597197ee0ce18fc37dbf727315937c8c01ac214d7c7bbc0a3c333cac";

/// A store that sidecars share.
enum SharedStore {
    Redis(RedisServer),
    Postgres(PostgresServer),
}

impl SharedStore {
    fn redis() -> Self {
        let options = RedisOptions::new().with_appendfsync("always");
        Self::Redis(RedisServer::start(options).unwrap())
    }

    fn postgres() -> Self {
        let server = PostgresServer::start().unwrap();
        let mut apply = std::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
        let applied =
            apply.args(["schema", "apply", "postgres"]).env("ONCEGATE_STORE", server.url()).output();
        assert!(applied.as_ref().is_ok_and(|applied| applied.status.success()), "{applied:?}");
        Self::Postgres(server)
    }

    fn url(&self) -> String {
        match self {
            Self::Redis(server) => format!("{}?timeout=2s", server.url()),
            Self::Postgres(server) => server.url(),
        }
    }

    /// A sidecar with this id secret, or without one.
    async fn sidecar(&self, service: &FixedService, secret: Option<&IdSecret>) -> Sidecar {
        Sidecar::run(&mut self.command(service, secret)).await
    }

    fn command(&self, service: &FixedService, secret: Option<&IdSecret>) -> Command {
        let mut command = sidecar(&format!("http://{}", service.address));
        command.env("ONCEGATE_STORE", self.url()).args(["--store-timeout=2s", "--access-log=text"]);
        if let Some(secret) = secret {
            command.env("ONCEGATE_ID_SECRET", &*secret.to_secret_text());
        }
        command
    }

    /// The names and contents of all records, in hexadecimal digits.
    fn dump(&self) -> String {
        match self {
            Self::Redis(server) => {
                let script = "local all = '' \
                     for _, key in ipairs(redis.call('KEYS', '*')) do \
                       local kind = redis.call('TYPE', key).ok \
                       local value = kind == 'string' and redis.call('GET', key) or '' \
                       local digits = string.gsub(value, '.', function (c) return string.format('%02x', string.byte(c)) end) \
                       all = all .. key .. ' ' .. digits .. '\\n' \
                     end return all";
                server.command(&["EVAL", script, "0"]).unwrap()
            }
            Self::Postgres(server) => server.sql("SELECT records::text FROM oncegate.records").unwrap(),
        }
    }

    /// Removes the mark, as a node of a Cluster that came back empty does.
    fn lose_mark(&self) {
        match self {
            Self::Redis(server) => {
                let script = "return redis.call('DEL', unpack(redis.call('KEYS', '*' .. ARGV[1] .. '*')))";
                server.command(&["EVAL", script, "0", MARK]).unwrap();
            }
            Self::Postgres(server) => {
                server.sql(&format!("DELETE FROM oncegate.records WHERE id = '\\x{MARK}'")).unwrap();
            }
        }
        assert!(!self.dump().contains(MARK));
    }

    fn freeze(&self, freeze: bool) {
        let pid = match self {
            Self::Redis(server) => server.pid(),
            Self::Postgres(server) => return server.freeze(freeze).unwrap(),
        };
        let act = if freeze { oncegate_servers::freeze } else { oncegate_servers::thaw };
        act(pid.unwrap()).unwrap();
    }
}

async fn blocking<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(act).await.unwrap()
}

async fn stores() -> [SharedStore; 2] {
    [blocking(SharedStore::redis).await, blocking(SharedStore::postgres).await]
}

fn secret(byte: u8) -> IdSecret {
    IdSecret::from_bytes([byte; 32])
}

fn order(key: &str) -> String {
    let fields = [format!("Idempotency-Key: \"{key}\""), "Authorization: Bearer ada".to_owned()];
    request("POST", "/orders", &[&fields[0], &fields[1], "Content-Type: application/json"], "{\"amount\":5}")
}

async fn admin(sidecar: &Sidecar, method: &str, path: &str, body: &str) -> Message {
    let fields: &[&str] = if body.is_empty() { &[] } else { &["Content-Type: application/json"] };
    ask(sidecar.admin, &request(method, path, fields, body).replace("orders.test", "localhost")).await
}

async fn is_ready(sidecar: &Sidecar) -> bool {
    admin(sidecar, "GET", "/readyz", "").await.status() == 200
}

async fn oncegate(sidecar: &Sidecar, args: &[&str]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    let ended = command.args(args).args(["--admin", &sidecar.admin.to_string()]).output().await.unwrap();
    let text = [ended.stdout, ended.stderr].concat();
    (ended.status.success(), String::from_utf8(text).unwrap())
}

/// Asserts that a sidecar refuses requests, and says why.
async fn refuses(sidecar: &mut Sidecar, key: &str, why: &str) {
    let response = sidecar.ask(&order(key)).await;
    assert_eq!(response.status(), 503, "{response:?}");
    assert!(response.text().contains("store-unavailable"), "{}", response.text());
    // A busy store may fail to answer a health check, which is said for a moment.
    until("the health check says why", async || {
        let ready = admin(sidecar, "GET", "/readyz", "").await;
        ready.status() == 503 && ready.text().contains(why)
    })
    .await;
    // The first sidecar on a new store waits for some seconds only.
    let degraded = if why.contains("is new to") { "oncegate_degraded 0\n" } else { "oncegate_degraded 1\n" };
    until("the gauge", async || admin(sidecar, "GET", "/metrics", "").await.text().contains(degraded)).await;
    sidecar.process.logs(why).await;
}

/// Asserts that a sidecar which computes other ids than those in the store does not say that an executed key was never used.
async fn searches_are_refused(sidecar: &Sidecar, why: &str) {
    let exact = "{\"key\":\"order-1\",\"method\":\"POST\",\"path\":\"/orders\",\"caller\":{\"value\":\"Bearer ada\"}}";
    for (path, body) in [("find", "{\"key\":\"order-1\"}"), ("find", exact), ("tag", "{\"key\":\"order-1\"}")]
    {
        let answer = admin(sidecar, "POST", &format!("/v1/keys/{path}"), body).await;
        assert!(answer.status() == 409 && answer.text().contains(why), "{path} {body}: {}", answer.text());
    }
    for args in [&["keys", "find", "--key", "order-1"][..], &["keys", "ls", "--key", "order-1"]] {
        let (succeeded, text) = oncegate(sidecar, args).await;
        assert!(!succeeded && text.contains(why) && !text.contains("never used"), "{args:?}: {text}");
    }
    let overview = admin(sidecar, "GET", "/", "").await.text().to_owned();
    assert!(overview.contains("whatever store-outage says"), "{overview}");
    let form_token = overview.split_once("name=\"form_token\" value=\"").unwrap().1;
    let form_token = form_token.split_once('"').unwrap().0;
    let fields = ["Content-Type: application/x-www-form-urlencoded", "Sec-Fetch-Site: same-origin"];
    let form = format!("q=order-1&form_token={form_token}");
    let search = request("POST", "/keys/search", &fields, &form).replace("orders.test", "localhost");
    let page = ask(sidecar.admin, &search).await;
    assert!(page.status() == 409 && page.text().contains(why), "{}", page.text());
}

#[tokio::test]
async fn only_sidecars_with_the_secret_of_the_store_execute() {
    for store in stores().await {
        let service = Service::new().await.answers(OK);
        let (own, other) = (secret(1), secret(2));
        let mut first = store.sidecar(&service, Some(&own)).await;
        refuses(&mut first, "order-1", "is new to the id secret").await;
        assert_eq!(service.requests(), 0);
        until("the trial ends", async || is_ready(&first).await).await;
        // A busy database may refuse the first claim even so.
        until("it serves", async || first.ask(&order("order-1")).await.status() == 201).await;

        let same = store.sidecar(&service, Some(&own)).await;
        let replay = same.ask(&order("order-1")).await;
        assert_eq!((replay.status(), replay.is_replay()), (201, true));
        assert_eq!(service.requests(), 1);

        let mut without = store.sidecar(&service, None).await;
        let why = format!("the store belongs to the id secret {}, and this process has none", own.name());
        refuses(&mut without, "order-1", &why).await;
        refuses(&mut without, "order-2", &why).await;
        let metrics = admin(&without, "GET", "/metrics", "").await;
        assert!(metrics.text().contains("id-secret"), "no advisory in the metrics");
        searches_are_refused(&without, "this process has none").await;
        let mut wrong = store.sidecar(&service, Some(&other)).await;
        let why = format!(
            "the store belongs to the id secret {}, and this process has {}",
            own.name(),
            other.name()
        );
        refuses(&mut wrong, "order-1", &why).await;
        refuses(&mut wrong, "order-2", &why).await;
        searches_are_refused(&wrong, "and this process has").await;
        assert_eq!(service.requests(), 1);

        // The process is killed, and the secret lost and found.
        first.process.kill().await;
        drop(same);
        let mut lost = store.sidecar(&service, None).await;
        refuses(&mut lost, "order-1", "this process has none").await;
        let found = store.sidecar(&service, Some(&own)).await;
        let replay = found.ask(&order("order-1")).await;
        assert_eq!((replay.status(), replay.is_replay()), (201, true));
        assert_eq!(service.requests(), 1);
    }
}

#[tokio::test]
async fn the_store_does_not_confirm_a_guess_and_operators_find_what_they_seek() {
    for store in stores().await {
        let service = Service::new().await.answers(OK);
        let keyed = store.sidecar(&service, Some(&secret(1))).await;
        until("the trial ends", async || is_ready(&keyed).await).await;
        assert_eq!(keyed.ask(&order("order-1")).await.status(), 201);

        // What anyone computes who guesses the key, the caller and the request.
        let key = IdempotencyKey::new("order-1").unwrap();
        let scope = Scope::caller("header:authorization", "Bearer ada");
        let in_service = scope.with_service(&ServiceName::new("tests").unwrap());
        let endpoint: [&[u8]; 2] = [b"POST", b"/orders"];
        let plain = RecordId::derive(&in_service.with_operation_parts(&endpoint), &key);
        let guesses = [plain.to_string(), scope.caller_tag().to_string(), KeyTag::of(&key).to_string()];
        let dump = store.dump();
        assert!(dump.contains(MARK), "{dump}");
        for guess in &guesses {
            assert!(!dump.contains(guess), "{guess} is in {dump}");
        }

        let find = async |body: &str| admin(&keyed, "POST", "/v1/keys/find", body).await.json();
        let one = find(
            "{\"key\":\"order-1\",\"method\":\"POST\",\"path\":\"/orders\",\"caller\":{\"value\":\"Bearer ada\"}}",
        )
        .await;
        let record = one["record"].as_str().unwrap_or_else(|| panic!("{one}")).to_owned();
        assert!(dump.contains(&record) && record != guesses[0]);
        let all = find("{\"key\":\"order-1\"}").await;
        assert_eq!(all["records"][0]["record"], *record, "{all}");
        let caller = one["caller"].as_str().unwrap();
        for args in [
            &["keys", "find", "--key", "order-1"][..],
            &["keys", "ls", "--key", "order-1"],
            &["keys", "ls", "--caller", caller],
        ] {
            let (succeeded, text) = oncegate(&keyed, args).await;
            assert!(succeeded && text.contains(&record[..8]), "{args:?}: {text}");
        }
        let (_, text) = oncegate(&keyed, &["keys", "find", "--key", "order-2"]).await;
        assert!(!text.contains(&record[..8]), "{text}");
        let logged = keyed.process.output_lines().join("\n");
        assert!(guesses.iter().all(|guess| !logged.contains(guess)), "{logged}");

        // The mark is no request.
        let (_, listed) = oncegate(&keyed, &["keys", "ls", "--json"]).await;
        assert!(!listed.contains(MARK), "{listed}");
        let (_, unsettled) =
            oncegate(&keyed, &["keys", "ls", "--state", "unsettled,in-progress", "--json"]).await;
        assert!(!unsettled.contains(MARK), "{unsettled}");
        let (_, shown) = oncegate(&keyed, &["keys", "show", MARK]).await;
        assert!(shown.contains("id secret") && shown.contains("(not a request)"), "{shown}");
        let (released, why) =
            oncegate(&keyed, &["keys", "release", MARK, "--force", "--reason", "a slip"]).await;
        assert!(!released && why.contains("marks the store"), "{why}");
        let metrics = admin(&keyed, "GET", "/metrics", "").await.text().to_owned();
        let open: Vec<_> = metrics.lines().filter(|line| line.starts_with("oncegate_records{")).collect();
        assert!(open.iter().all(|line| line.ends_with(" 0")), "{open:?}");
        assert!(is_ready(&keyed).await);
    }
}

#[tokio::test]
async fn a_store_with_records_keeps_its_ids() {
    for store in stores().await {
        let service = Service::new().await.answers(OK);
        let plain = store.sidecar(&service, None).await;
        assert_eq!(plain.ask(&order("order-1")).await.status(), 201);
        let mut keyed = store.sidecar(&service, Some(&secret(1))).await;
        refuses(&mut keyed, "order-1", "the store has records without the id secret").await;
        assert!(!store.dump().contains(MARK));
        // The plain one goes on.
        let replay = plain.ask(&order("order-1")).await;
        assert_eq!((replay.status(), replay.is_replay()), (201, true));
        assert_eq!(plain.ask(&order("order-2")).await.status(), 201);
        assert_eq!(service.requests(), 2);
        let check = keyed_check(&store, &service).await;
        assert!(check.contains("the store has records without the id secret"), "{check}");
        assert!(!check.contains("can be used"), "{check}");
    }
}

/// The mark is lost while no process runs. The operator proves by a key that the records are of the secret, and puts it back.
#[tokio::test]
async fn a_lost_mark_is_put_back_if_the_records_are_of_the_secret() {
    for store in stores().await {
        let service = Service::new().await.answers(OK);
        let own = secret(1);
        let first = store.sidecar(&service, Some(&own)).await;
        until("the trial ends", async || is_ready(&first).await).await;
        until("it serves", async || first.ask(&order("order-1")).await.status() == 201).await;
        let reason = ["--reason", "a node came back empty", "--actor", "ada"];
        let restore = async |sidecar: &Sidecar, args: &[&str]| {
            oncegate(sidecar, &[&["id-secret", "restore"], args, &reason].concat()).await
        };
        let (done, text) = restore(&first, &["--key", "order-1"]).await;
        assert!(done && text.contains("nothing to do"), "{text}");
        drop(first);
        store.lose_mark();
        let mut next = store.sidecar(&service, Some(&own)).await;
        refuses(&mut next, "order-1", "the store has records without the id secret").await;
        assert!(admin(&next, "GET", "/v1/id-secret", "").await.json()["mark"] == "missing");

        // Another secret finds no record of the key, and its sidecar puts no mark there.
        let wrong = store.sidecar(&service, Some(&secret(2))).await;
        let (done, text) = restore(&wrong, &["--key", "order-1"]).await;
        assert!(!done && text.contains("finds no record of this key"), "{text}");
        let (done, text) = restore(&next, &["--key", "order-2"]).await;
        assert!(!done && text.contains("finds no record of this key"), "{text}");
        let (done, text) = restore(&next, &[]).await;
        assert!(!done && text.contains("--key"), "{text}");
        let (done, text) = restore(&next, &["--key", "order-1", "--dry-run"]).await;
        assert!(done && text.contains("finds 1 record of the key"), "{text}");
        let (done, text) = restore(&next, &["--force", "--dry-run"]).await;
        assert!(done && text.contains("NOTHING shows"), "{text}");
        assert!(!store.dump().contains(MARK), "a preview changes nothing");
        let plain = store.sidecar(&service, None).await;
        let (done, text) = restore(&plain, &["--force"]).await;
        assert!(!done && text.contains("has no id secret"), "{text}");
        drop(plain);

        let (done, text) = restore(&next, &["--key", "order-1"]).await;
        assert!(done && text.contains("the mark is back"), "{text}");
        next.process.logs("an operator put back the mark").await;
        let logged = next.process.error_lines("an operator put back the mark").join("\n");
        assert!(logged.contains("ada") && logged.contains("a node came back empty"), "{logged}");
        assert!(next.process.error_lines("order-1").is_empty());
        assert!(is_ready(&next).await);
        let replay = next.ask(&order("order-1")).await;
        assert_eq!((replay.status(), replay.is_replay()), (201, true));
        assert_eq!(next.ask(&order("order-2")).await.status(), 201);
        assert_eq!(service.requests(), 2);

        // The mark is that of the secret, for good.
        let (done, text) = restore(&wrong, &["--force"]).await;
        assert!(!done && text.contains(&format!("the mark of the id secret {}", own.name())), "{text}");
        let again = store.sidecar(&service, Some(&own)).await;
        assert!(again.ask(&order("order-2")).await.is_replay());
    }
}

/// A damaged mark is never replaced by itself, and the refusal says how an operator replaces it.
#[tokio::test]
async fn a_damaged_mark_is_removed_by_hand_and_then_put_back() {
    let (store, service, own) =
        (blocking(SharedStore::redis).await, Service::new().await.answers(OK), secret(1));
    let damage = || {
        let SharedStore::Redis(server) = &store else { panic!("a store on Redis") };
        server.command(&["SETRANGE", &format!("oncegate:{{{MARK}}}"), "0", "7"]).unwrap();
    };
    let first = store.sidecar(&service, Some(&own)).await;
    until("the trial ends", async || is_ready(&first).await).await;
    until("it serves", async || first.ask(&order("order-1")).await.status() == 201).await;
    damage();
    // It has served, and goes on.
    assert_eq!(first.ask(&order("order-2")).await.status(), 201);
    let restore = ["id-secret", "restore", "--key", "order-1", "--reason", "a flipped bit"];
    let (done, text) = oncegate(&first, &restore).await;
    assert!(
        !done && text.contains(MARK) && text.contains("Stop every program without the id secret"),
        "{text}"
    );
    assert_eq!(admin(&first, "GET", "/v1/id-secret", "").await.json()["mark"], "damaged");
    drop(first);

    // One that starts claims nothing, with the secret or without it.
    let next = store.sidecar(&service, Some(&own)).await;
    let plain = store.sidecar(&service, None).await;
    for sidecar in [&next, &plain] {
        assert_eq!(sidecar.ask(&order("order-3")).await.status(), 503);
    }
    assert_eq!(service.requests(), 2);
    let (done, text) = oncegate(&next, &restore).await;
    assert!(!done && text.contains("no command replaces a record that cannot be read"), "{text}");
    drop(plain);
    store.lose_mark();
    let (done, text) = oncegate(&next, &restore).await;
    assert!(done && text.contains("the mark is back"), "{text}");
    until("it serves", async || next.ask(&order("order-1")).await.is_replay()).await;
    assert_eq!(next.ask(&order("order-3")).await.status(), 201);
    assert_eq!(service.requests(), 3);
}

/// Until the mark is back, a sidecar without the secret would execute the keys again.
#[tokio::test]
async fn a_sidecar_without_requests_puts_a_lost_mark_back_soon() {
    for store in stores().await {
        let service = Service::new().await.answers(OK);
        let sidecar = store.sidecar(&service, Some(&secret(1))).await;
        until("the trial ends", async || is_ready(&sidecar).await).await;
        until("it serves", async || sidecar.ask(&order("order-1")).await.status() == 201).await;
        store.lose_mark();
        let lost_at = std::time::Instant::now();
        until("the mark is back", async || store.dump().contains(MARK)).await;
        let took = lost_at.elapsed();
        // It is checked every two seconds.
        assert!(took < Duration::from_secs(15), "{took:?}");
        let mut plain = store.sidecar(&service, None).await;
        refuses(&mut plain, "order-1", "this process has none").await;
        assert_eq!(service.requests(), 1);
    }
}

/// Operators count the records of their requests: the mark is none.
#[tokio::test]
async fn the_mark_is_in_no_count() {
    let service = Service::new().await.answers(OK);
    let dir = tempfile::tempdir().unwrap();
    let file = secret_file(&dir, 1);
    let store = dir.path().join("store");
    let start = async |keys: Option<u8>| {
        let mut command = sidecar(&format!("http://{}", service.address));
        command
            .arg(format!("--store={}", store.display()))
            .arg(format!("--id-secret-file={}", file.display()));
        if let Some(byte) = keys {
            command
                .env("ONCEGATE_SEAL_KEYS", &*oncegate_seal::SealKey::from_bytes([byte; 32]).to_secret_text());
        }
        Sidecar::run(&mut command).await
    };
    let mut keyed = start(Some(1)).await;
    assert_eq!(keyed.ask(&order("order-1")).await.status(), 201);
    let (done, text) = oncegate(&keyed, &["reseal"]).await;
    assert!(done && text.contains("1  sealed with it already"), "{text}");
    assert!(!text.contains("without a response"), "{text}");
    let copy = dir.path().join("copy").display().to_string();
    let (done, text) = oncegate(&keyed, &["backup", &copy]).await;
    assert!(done && text.contains(": 1 records as of"), "{text}");
    let (done, text) = oncegate(&keyed, &["keys", "ls", "--json"]).await;
    assert!(done && !text.contains(MARK), "{text}");
    keyed.process.kill().await;
    let without = start(None).await;
    let ready = async || admin(&without, "GET", "/readyz", "").await.text().to_owned();
    until("the sample is read", async || ready().await.contains("1 of 1 records that were looked at")).await;
}

/// The output of `oncegate check` with a secret.
async fn keyed_check(store: &SharedStore, service: &FixedService) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(["check", "--to", &format!("http://{}", service.address)]).env("ONCEGATE_SERVICE", "tests");
    command.env("ONCEGATE_STORE", store.url()).env("ONCEGATE_ID_SECRET", &*secret(1).to_secret_text());
    let ended = command.output().await.unwrap();
    assert!(!ended.status.success(), "{ended:?}");
    String::from_utf8([ended.stdout, ended.stderr].concat()).unwrap()
}

/// Two sidecars start at the same time on an empty store, one with a secret and one without. No key executes in both.
#[tokio::test]
async fn two_that_start_at_once_never_both_execute() {
    for store in stores().await {
        let (one, two) = (Service::new().await.answers(OK), Service::new().await.answers(OK));
        let (own, none) = (secret(1), None);
        let (keyed, plain) = tokio::join!(store.sidecar(&one, Some(&own)), store.sidecar(&two, none));
        let until_decided = tokio::time::Instant::now() + Duration::from_secs(15);
        let mut number = 0;
        while tokio::time::Instant::now() < until_decided {
            let key = format!("order-{number}");
            number += 1;
            let request = order(&key);
            let (with, without) = tokio::join!(keyed.ask(&request), plain.ask(&request));
            assert!(!(with.status() == 201 && without.status() == 201), "{key} was executed twice");
        }
        let executed = (one.requests(), two.requests());
        assert!((executed.0 == 0) != (executed.1 == 0), "one of them serves, and only one: {executed:?}");
    }
}

/// Nothing executes before the store was asked, even if it is away at the start.
#[tokio::test]
async fn a_store_that_is_away_at_the_start_is_asked_first() {
    for store in stores().await {
        let service = Service::new().await.answers(OK);
        let first = store.sidecar(&service, Some(&secret(1))).await;
        until("the trial ends", async || is_ready(&first).await).await;
        assert_eq!(first.ask(&order("order-1")).await.status(), 201);
        drop(first);
        store.freeze(true);
        let (own, other) = (secret(1), secret(2));
        let (same, wrong, without) = tokio::join!(
            store.sidecar(&service, Some(&own)),
            store.sidecar(&service, Some(&other)),
            store.sidecar(&service, None),
        );
        for sidecar in [&same, &wrong, &without] {
            assert_eq!(sidecar.ask(&order("order-1")).await.status(), 503);
        }
        store.freeze(false);
        until("the store answers again", async || is_ready(&same).await).await;
        let replay = same.ask(&order("order-1")).await;
        assert_eq!((replay.status(), replay.is_replay()), (201, true));
        assert_eq!(same.ask(&order("order-2")).await.status(), 201);
        let belongs = "the store belongs to the id secret";
        for mut sidecar in [wrong, without] {
            sidecar.process.logs(belongs).await;
            for key in ["order-1", "order-2", "order-3"] {
                assert_eq!(sidecar.ask(&order(key)).await.status(), 503);
            }
        }
        assert_eq!(service.requests(), 2);
    }
}

/// An embedded store is marked at its first start, at once, and `oncegate check` compares its mark.
#[tokio::test]
async fn an_embedded_store_has_one_secret_too() {
    let service = Service::new().await.answers(OK);
    let dir = tempfile::tempdir().unwrap();
    let file = secret_file(&dir, 1);
    let store = format!("--store={}", dir.path().join("store").display());
    let to = format!("http://{}", service.address);
    let command = |secret: Option<&PathBuf>| {
        let mut command = sidecar(&to);
        command.arg(&store).args(secret.map(|file| format!("--id-secret-file={}", file.display())));
        command
    };
    let mut keyed = Sidecar::run(&mut command(Some(&file))).await;
    assert_eq!(keyed.ask(&order("order-1")).await.status(), 201);
    keyed.process.kill().await;
    for (secret, why) in
        [(None, "this process has none"), (Some(secret_file(&dir, 2)), "and this process has")]
    {
        let mut wrong = Sidecar::run(&mut command(secret.as_ref())).await;
        refuses(&mut wrong, "order-1", why).await;
        // An operator must not take the request for one that was never executed.
        for command in [
            &["keys", "find", "--key", "order-1"][..],
            &["keys", "find", "--key", "order-1", "--method", "POST", "--path", "/orders", "--anonymous"],
            &["keys", "list", "--key", "order-1"],
        ] {
            let (succeeded, text) = oncegate(&wrong, command).await;
            assert!(!succeeded && text.contains(why), "{command:?}: {text}");
        }
        wrong.process.kill().await;
        let mut check = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        check.args(["check", "--to", &to, &store]);
        check.args(secret.map(|file| format!("--id-secret-file={}", file.display())));
        let ended = check.output().await.unwrap();
        let text = String::from_utf8([ended.stdout, ended.stderr].concat()).unwrap();
        assert!(!ended.status.success() && text.contains(why), "{text}");
        assert!(text.contains("1 completed") && !text.contains("in-progress"), "{text}");
    }
    let keyed = Sidecar::run(&mut command(Some(&file))).await;
    let replay = keyed.ask(&order("order-1")).await;
    assert_eq!((replay.status(), replay.is_replay()), (201, true));
    // A caller is named by the fields, whose tag only the sidecar can compute.
    let fields = dir.path().join("fields");
    std::fs::write(&fields, "Authorization: Bearer ada\n").unwrap();
    let fields = fields.display().to_string();
    let forget =
        ["forget", "--caller-fields", &fields, "--reason", "a request for deletion", "--yes", "--json"];
    let (succeeded, sums) = oncegate(&keyed, &forget).await;
    assert!(succeeded && sums.contains("\"forgotten\":1"), "{sums}");
    assert_eq!(keyed.ask(&order("order-1")).await.status(), 422);
    // The mark of the store is not a record of the only tenant.
    let single = ["forget", "--caller", "0000000000000000", "--reason", "r", "--yes", "--json"];
    let (succeeded, sums) = oncegate(&keyed, &single).await;
    assert!(!succeeded && sums.contains("no record of the caller"), "{sums}");
    assert!(sums.contains("\"open\":[]"), "{sums}");
    assert_eq!(service.requests(), 1);
}

fn secret_file(dir: &tempfile::TempDir, byte: u8) -> PathBuf {
    let file = dir.path().join(format!("secret-{byte}"));
    std::fs::write(&file, format!("{}\n", *secret(byte).to_secret_text())).unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    file
}

/// The layer in a program and the sidecar compute the same identities.
#[tokio::test]
async fn the_layer_and_the_sidecar_agree() {
    let server = blocking(SharedStore::redis).await;
    let service = Service::new().await.answers(OK);
    let keyed = server.sidecar(&service, Some(&secret(1))).await;
    until("the trial ends", async || is_ready(&keyed).await).await;
    assert_eq!(keyed.ask(&order("order-1")).await.status(), 201);

    let SharedStore::Redis(redis) = &server else { unreachable!() };
    let serve = async |secret: Option<IdSecret>| -> SocketAddr {
        let store = RedisStore::open(StoreOptions::from_url(&redis.url()).unwrap()).await.unwrap();
        let builder = Engine::builder(store).with_service(ServiceName::new("tests").unwrap());
        let engine = match secret {
            Some(secret) => builder.with_id_secret(secret),
            None => builder,
        }
        .build();
        let layer = IdempotencyLayer::new(engine);
        let app = Router::new().route("/orders", post(async || "executed in the program")).layer(layer);
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, app).await });
        address
    };
    let program = serve(Some(secret(1))).await;
    let replay = ask(program, &order("order-1")).await;
    assert_eq!((replay.status(), replay.text(), replay.is_replay()), (201, "receipt", true));
    assert_eq!(ask(program, &order("order-2")).await.text(), "executed in the program");
    let replay = keyed.ask(&order("order-2")).await;
    assert_eq!((replay.status(), replay.text(), replay.is_replay()), (200, "executed in the program", true));
    for secret in [None, Some(secret(2))] {
        let wrong = serve(secret).await;
        assert_eq!(ask(wrong, &order("order-1")).await.status(), 503);
        assert_eq!(ask(wrong, &order("order-3")).await.status(), 503);
    }
}
