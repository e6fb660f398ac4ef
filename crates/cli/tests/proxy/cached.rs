//! Sidecars with a cache of responses in front of their store: either part may be lost.

use std::process::Command;

use oncegate_servers::{PostgresServer, RedisOptions, RedisServer};
use oncegate_testkit::until;
use rustix::process::Signal;

use crate::support::{FixedService, Message, Service, Sidecar, ask, request, sidecar};
use crate::{KEY, OK};

const OTHER: &str = "Idempotency-Key: intent-2";

async fn start(store: &str, service: &FixedService) -> Sidecar {
    let mut command = sidecar(&format!("http://{}", service.address));
    Sidecar::run(command.env("ONCEGATE_STORE", store).env("ONCEGATE_LOG", "info")).await
}

async fn admin(sidecar: &Sidecar, path: &str) -> Message {
    ask(sidecar.admin, &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")).await
}

async fn metric(sidecar: &Sidecar, name: &str) -> f64 {
    let metrics = admin(sidecar, "/metrics").await;
    let line = metrics.text().lines().find_map(|line| line.strip_prefix(name).map(str::to_owned));
    line.unwrap_or_else(|| panic!("no {name} in {}", metrics.text())).trim().parse().unwrap()
}

/// The log of the sidecar, which ends here. Asserts that the log contains no password.
async fn stop_and_read_log(mut sidecar: Sidecar, passwords: &[&str]) -> String {
    sidecar.process.signal(Signal::TERM);
    let out = sidecar.process.output().await.join("\n");
    let text = format!("{out}\n{}", sidecar.process.errors().await);
    for password in passwords {
        assert!(!text.contains(password), "{text}");
    }
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_caches_the_responses_of_postgres() {
    let mut postgres = tokio::task::spawn_blocking(|| PostgresServer::start().unwrap()).await.unwrap();
    let with_login = RedisOptions::new().with_user("app", "hunter2", "~* &* +@all");
    let mut redis = RedisServer::start(with_login.with("maxmemory-policy allkeys-lru")).unwrap();
    let passwords = ["hunter2", postgres.password()];
    let store = format!("cached(cache={},store={},timeout=1s)", redis.url(), postgres.url());
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command.args(args).env_clear().env("ONCEGATE_STORE", &store).env("ONCEGATE_SERVICE", "tests");
        let output = command.output().unwrap();
        let text = String::from_utf8([&output.stdout[..], &output.stderr].concat()).unwrap();
        assert!(passwords.iter().all(|password| !text.contains(password)), "{text}");
        (output.status.success(), text)
    };
    let (ok, text) = run(&["schema", "apply", "postgres"]);
    assert!(ok && text.contains("now has version 1"), "{text}");
    let check = ["check", "--to=http://127.0.0.1:9"];
    let (ok, text) = run(&check);
    assert!(ok && text.contains("ok    cache redis://127.0.0.1:"), "{text}");
    assert!(text.contains("warn  store postgres://…@127.0.0.1:"), "{text}");
    assert!(text.contains("store=cached(cache=redis://"), "{text}");

    let service = Service::new().await.answers(OK);
    let (one, two) = (start(&store, &service).await, start(&store, &service).await);
    let asked = request("POST", "/orders", &[KEY], "{}");
    let new = request("POST", "/orders", &[OTHER], "{}");
    assert!(!one.ask(&asked).await.has_status(200).is_replay());
    // The other sidecar replays from the shared cache.
    until("the other sidecar replays it from the cache", async || {
        assert!(two.ask(&asked).await.has_status(200).is_replay());
        metric(&two, "oncegate_cache_claims_total{result=\"hit\"}").await > 0.0
    })
    .await;
    // One of the two sidecars has put it there.
    until("the cache write is counted", async || {
        let filled = "oncegate_cache_fills_total{result=\"filled\"}";
        metric(&one, filled).await + metric(&two, filled).await == 1.0
    })
    .await;
    two.ask(&request("POST", "/orders", &[KEY], "{\"other\":1}")).await.is_problem(422, "key-reused");

    // The database is away: both sidecars replay finished requests, and execute nothing new.
    postgres.stop_immediately().unwrap();
    assert!(one.ask(&asked).await.has_status(200).is_replay());
    assert!(two.ask(&asked).await.has_status(200).is_replay());
    one.ask(&new).await.is_problem(503, "store-unavailable");
    assert_eq!(metric(&one, "oncegate_degraded").await, 1.0);
    assert!(one.ask(&asked).await.has_status(200).is_replay());
    assert_eq!(
        metric(&one, "oncegate_degraded").await,
        1.0,
        "a replay from the cache does not end the degradation"
    );
    admin(&one, "/readyz").await.has_status(503);
    postgres.start_again().unwrap();
    until("new requests are executed again", async || one.ask(&new).await.status() == 200).await;

    // The cache is away, also from the start of a third sidecar.
    redis.kill();
    assert!(one.ask(&asked).await.has_status(200).is_replay());
    let third = start(&store, &service).await;
    assert!(third.ask(&asked).await.has_status(200).is_replay());
    assert_eq!(metric(&third, "oncegate_cache_out").await, 1.0);
    let page = admin(&third, "/metrics").await.text().to_owned();
    assert!(page.contains("oncegate_store_info{store=\"cached\",place=\"server\","), "{page}");
    let (ok, text) = run(&check);
    assert!(ok && text.contains("warn  cache redis://127.0.0.1:"), "{text}");
    redis.restart().unwrap();
    for sidecar in [&one, &third] {
        until("the cache is used again", async || {
            assert!(sidecar.ask(&asked).await.has_status(200).is_replay());
            metric(sidecar, "oncegate_cache_claims_total{result=\"hit\"}").await > 0.0
                && metric(sidecar, "oncegate_cache_out").await == 0.0
        })
        .await;
    }
    assert_eq!(service.requests(), 2, "one effect for each key");
    assert!(stop_and_read_log(one, &passwords).await.contains("store cached(cache=redis://127.0.0.1:"));
    stop_and_read_log(two, &passwords).await;
    assert!(
        stop_and_read_log(third, &passwords)
            .await
            .contains("starting without the cache, and trying again in the background")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_caches_the_responses_of_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let store = format!("cached(cache=memory:1MiB,store={},keep=10m)", dir.path().join("records").display());
    let service = Service::new().await.answers(OK);
    let asked = request("POST", "/orders", &[KEY], "{}");
    let first = start(&store, &service).await;
    assert!(!first.ask(&asked).await.has_status(200).is_replay());
    until("the cache has the response", async || {
        metric(&first, "oncegate_cache_fills_total{result=\"filled\"}").await == 1.0
    })
    .await;
    assert!(first.ask(&asked).await.has_status(200).is_replay());
    assert_eq!(metric(&first, "oncegate_cache_claims_total{result=\"hit\"}").await, 1.0);
    // No other sidecar has its records, so alerts name it.
    let kept =
        "oncegate_store_info{store=\"cached\",place=\"process\",durability=\"synced\",fencing=\"monotonic\"}";
    assert_eq!(metric(&first, kept).await, 1.0);
    assert!(stop_and_read_log(first, &[]).await.contains(&format!("store {store}")));
    // The directory is free again, and has the record.
    let second = start(&store, &service).await;
    assert!(second.ask(&asked).await.has_status(200).is_replay());
    assert_eq!(metric(&second, "oncegate_cache_claims_total{result=\"miss\"}").await, 1.0);
}
