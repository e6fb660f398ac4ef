//! Sidecars on a Redis server: two of them share records, an outage refuses requests, and no log shows the password.

use std::net::SocketAddr;

use crate::support::{Service, Sidecar, ask, request, sidecar};
use oncegate_servers::{RedisOptions, RedisServer};
use oncegate_testkit::until;
use rustix::process::Signal;
use tokio::process::Command;

const KEY: &str = "Idempotency-Key: \"order-1\"";
const OK: &str = "HTTP/1.1 201 Created\r\nContent-Length: 7\r\n\r\nreceipt";

fn server() -> RedisServer {
    let options = RedisOptions::new().with_appendfsync("always");
    RedisServer::start(options.with_user("app", "hunter2", "~* &* +@all")).unwrap()
}

async fn on(server: &RedisServer, service: SocketAddr) -> Sidecar {
    let to = format!("http://{service}");
    Sidecar::run(sidecar(&to).env("ONCEGATE_STORE", format!("{}?timeout=500ms", server.url()))).await
}

#[tokio::test]
async fn two_sidecars_share_a_server_and_refuse_during_its_outage() {
    let (mut server, service) = (server(), Service::new().await);
    let (mut one, two) = (on(&server, service.address).await, on(&server, service.address).await);
    let ask = request("POST", "/orders", &[KEY], "{}");
    let mut client = one.connect().await;
    client.send(&ask).await;
    let mut wire = service.accept().await;
    wire.message().await;
    // While the request runs, the other sidecar reports it as in progress.
    assert_eq!(two.ask(&ask).await.status(), 409);
    wire.send(OK).await;
    assert_eq!(client.message().await.status(), 201);
    let replay = two.ask(&ask).await;
    assert_eq!((replay.status(), replay.is_replay()), (201, true));
    server.kill();
    assert_eq!(two.ask(&ask).await.status(), 503);
    server.restart().unwrap();
    until("the response is replayed again", async || two.ask(&ask).await.status() == 201).await;
    one.process.signal(Signal::TERM);
    let (out, log) = (one.process.output().await.join("\n"), one.process.errors().await);
    assert!(out.contains(&format!("store redis://127.0.0.1:{}/0", server.port())), "{out}");
    assert!(log.contains("appendfsync always"), "{log}");
    assert!(!out.contains("hunter2") && !log.contains("hunter2"), "{out}\n{log}");
}

#[tokio::test]
async fn the_sidecar_names_a_database_that_the_server_does_not_have() {
    let server = server();
    let url = server.url().trim_end_matches("/0").to_owned() + "/99";
    let command = &mut sidecar("http://127.0.0.1:9");
    let ended = command.env("ONCEGATE_STORE", url).output().await.unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(
        said.contains("the server refuses the database of the URL") && !said.contains("hunter2"),
        "{said}"
    );
}

/// A change of the server's configuration at run time shows in the log, in the metrics, and in the readiness.
#[tokio::test]
async fn the_sidecar_reports_a_change_of_the_servers_configuration() {
    let (server, service) = (server(), Service::new().await.answers(OK));
    let mut sidecar = on(&server, service.address).await;
    let admin = async |path: &str| {
        let message =
            ask(sidecar.admin, &request("GET", path, &[], "").replace("orders.test", "localhost")).await;
        (message.status(), message.text().to_owned())
    };
    let post = |key: &str| request("POST", "/orders", &[&format!("Idempotency-Key: {key}")], "{}");
    assert_eq!(sidecar.ask(&post("order-1")).await.status(), 201);
    let (status, metrics) = admin("/metrics").await;
    assert!(metrics.contains("durability=\"synced\""), "{status} {metrics}");
    // A setting that can lose records is logged.
    server.command(&["CONFIG", "SET", "appendfsync", "everysec"]).unwrap();
    assert_eq!(admin("/readyz").await.0, 200);
    let (_, metrics) = admin("/metrics").await;
    assert!(metrics.contains("durability=\"buffered\"") && !metrics.contains("synced"), "{metrics}");
    // Without an append-only file, a restart of the server loses everything.
    server.command(&["CONFIG", "SET", "appendonly", "no"]).unwrap();
    let (status, notes) = admin("/readyz").await;
    assert!(status == 200 && notes.contains("(unlogged, and synced before)"), "{notes}");
    let (_, metrics) = admin("/metrics").await;
    let has = |text: &str| assert!(metrics.contains(text), "{text} is not in {metrics}");
    has("durability=\"unlogged\"");
    has("oncegate_store_advisory{name=\"less-durable\"} 1");
    server.command(&["CONFIG", "SET", "appendonly", "yes"]).unwrap();
    // A setting that will lose records refuses new keys, and existing ones are replayed.
    server.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).unwrap();
    assert_eq!(admin("/readyz").await.0, 503);
    sidecar.ask(&post("order-2")).await.is_problem(503, "store-unavailable");
    assert!(sidecar.ask(&post("order-1")).await.has_status(201).is_replay());
    server.command(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]).unwrap();
    until("the sidecar is ready again", async || admin("/readyz").await.0 == 200).await;
    until("new keys are executed again", async || sidecar.ask(&post("order-2")).await.status() == 201).await;
    // The same for a right that is taken away.
    server.command(&["ACL", "SETUSER", "app", "-set"]).unwrap();
    sidecar.ask(&post("order-3")).await.is_problem(503, "store-unavailable");
    let (status, why) = admin("/readyz").await;
    assert!(status == 503 && why.contains("does not allow the user SET on oncegate:*"), "{status} {why}");
    until("the sidecar is degraded", async || admin("/metrics").await.1.contains("\noncegate_degraded 1"))
        .await;
    assert!(sidecar.ask(&post("order-1")).await.has_status(201).is_replay());
    server.command(&["ACL", "SETUSER", "app", "+set"]).unwrap();
    until("the sidecar is ready again", async || admin("/readyz").await.0 == 200).await;
    until("new keys are executed again", async || sidecar.ask(&post("order-3")).await.status() == 201).await;
    assert_eq!(service.requests(), 3);
    sidecar.process.signal(Signal::TERM);
    let log = sidecar.process.errors().await;
    for said in ["appendfsync everysec", "maxmemory-policy is allkeys-lru", "new keys are executed again"] {
        assert!(log.contains(said), "{said}: {log}");
    }
}

/// Two services each have an order 1, and share one store.
#[tokio::test]
async fn services_on_one_server_do_not_share_keys() {
    const OTHER: &str = "HTTP/1.1 201 Created\r\nContent-Length: 5\r\n\r\nstock";
    let (server, orders, stock) =
        (server(), Service::new().await.answers(OK), Service::new().await.answers(OTHER));
    let start = async |service: &str, to: std::net::SocketAddr| {
        let mut command = sidecar(&format!("http://{to}"));
        Sidecar::run(command.env("ONCEGATE_STORE", server.url()).env("ONCEGATE_SERVICE", service)).await
    };
    let (one, other) = (start("orders", orders.address).await, start("stock", stock.address).await);
    let ask = request("POST", "/orders", &[KEY], "{}");
    assert_eq!(one.ask(&ask).await.text(), "receipt");
    let response = other.ask(&ask).await;
    assert_eq!((response.text(), response.is_replay()), ("stock", false), "another service's response");
    let again = start("orders", orders.address).await.ask(&ask).await;
    assert_eq!((again.text(), again.is_replay()), ("receipt", true), "the service's own response");

    // Without a name the sidecar does not start, and check prints what to do.
    for subcommand in ["proxy", "check"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command.args([subcommand, "--to", "http://127.0.0.1:9"]).env("ONCEGATE_STORE", server.url());
        let output = command.env_remove("ONCEGATE_SERVICE").output().await.unwrap();
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("this service needs a name: give --service NAME"), "{text}");
    }
}

#[tokio::test]
async fn check_reports_what_the_server_can_lose() {
    let dir = tempfile::tempdir().unwrap();
    let check = async |url: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command
            .args(["check", "--to", "http://127.0.0.1:3000"])
            .env("ONCEGATE_STORE", url)
            .env("ONCEGATE_SERVICE", "tests")
            .current_dir(dir.path());
        let output = command.output().await.unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(!text.contains("hunter2"), "{text}");
        (output.status.code(), text)
    };
    let good = server();
    let (code, text) = check(&good.url()).await;
    assert_eq!(code, Some(0), "{text}");
    assert!(text.lines().all(|line| line.starts_with("ok    ")), "{text}");
    let (code, text) = check(&good.url().replace("hunter2", "hunter22")).await;
    assert!(code == Some(1) && text.contains("does not accept the user and the password"), "{text}");
    good.command(&["ACL", "SETUSER", "app", "-set"]).unwrap();
    let (code, text) = check(&good.url()).await;
    assert!(code == Some(1) && text.contains("does not allow the user SET on oncegate:*"), "{text}");
    let weak = RedisServer::start(RedisOptions::new()).unwrap();
    let (code, text) = check(&format!("{}?wait-replicas=1", weak.url())).await;
    assert!(code == Some(1) && text.contains("wait-replicas is 1, and the server has 0 replicas"), "{text}");
    let (code, text) = check(&weak.url()).await;
    assert!(code == Some(0) && text.contains("appendonly no: a server that stops loses"), "{text}");
    weak.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).unwrap();
    let (code, text) = check(&weak.url()).await;
    assert!(code == Some(1) && text.contains("maxmemory-policy is allkeys-lru"), "{text}");
}
