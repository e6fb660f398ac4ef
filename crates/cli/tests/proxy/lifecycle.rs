//! Shutdown: running requests finish within a bounded time, and finished results are durable.

use std::time::{Duration, Instant};

use oncegate_testkit::until;
use rustix::process::Signal;
use tempfile::TempDir;
use tokio::net::TcpStream;

use crate::protocols::Authority;
use crate::support::{Message, Service, Sidecar, TIMEOUT, Wire, request, sidecar};
use crate::{KEY, OK};

/// A sidecar with a durable store, and the service that the test plays.
struct World {
    directory: TempDir,
    service: Service,
    sidecar: Sidecar,
}

impl World {
    async fn start(flags: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let service = Service::new().await;
        let sidecar = protect(&directory, &service, flags).await;
        Self { directory, service, sidecar }
    }

    async fn restart(&mut self, flags: &[&str]) {
        self.sidecar = protect(&self.directory, &self.service, flags).await;
    }

    /// Sends a request with a key, and waits until the service has it.
    async fn ask(&self) -> (Wire, Wire) {
        let mut client = self.sidecar.connect().await;
        client.send(keyed_order()).await;
        let mut wire = self.service.accept().await;
        wire.message().await;
        (client, wire)
    }

    async fn retry(&self) -> Message {
        self.sidecar.ask(&keyed_order()).await
    }

    /// Sends SIGTERM, and waits until the sidecar accepts no more connections.
    async fn terminate(&self) {
        self.sidecar.process.signal(Signal::TERM);
        until("the sidecar accepts no more connections", async || {
            TcpStream::connect(self.sidecar.address).await.is_err()
        })
        .await;
    }
}

async fn protect(directory: &TempDir, service: &Service, flags: &[&str]) -> Sidecar {
    let store = format!("--store={}", directory.path().join("store").display());
    Sidecar::start(service.address, &[&[&*store], flags].concat()).await
}

fn keyed_order() -> String {
    request("POST", "/orders", &[KEY], "{}")
}

#[tokio::test]
async fn a_running_request_is_finished_and_durable() {
    for threads in ["--threads=1", "--threads=4"] {
        let mut world = World::start(&[threads]).await;
        let (mut client, mut wire) = world.ask().await;
        world.terminate().await;
        wire.send(OK).await;
        assert_eq!(client.message().await.has_status(200).text(), "ok");
        client.ends().await;
        world.sidecar.process.logs("stopped took=").await;
        assert!(world.sidecar.process.ended().await.success());
        world.restart(&[threads]).await;
        let replay = world.retry().await;
        assert!(replay.has_status(200).is_replay());
        assert_eq!(replay.text(), "ok");
        world.service.is_not_called().await;
    }
}

#[tokio::test]
async fn a_running_request_without_a_key_is_finished_too() {
    let mut world = World::start(&[]).await;
    let mut client = world.sidecar.connect().await;
    client.send(request("GET", "/", &[], "")).await;
    let mut wire = world.service.accept().await;
    wire.message().await;
    wire.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab").await;
    client.head().await;
    world.terminate().await;
    wire.send("cd").await;
    assert_eq!(client.rest().await, b"abcd");
    assert!(world.sidecar.process.ended().await.success());
}

#[tokio::test]
async fn a_client_that_hung_up_gets_the_response_after_the_restart() {
    let mut world = World::start(&[]).await;
    let (client, mut wire) = world.ask().await;
    drop(client);
    world.terminate().await;
    wire.send(OK).await;
    assert!(world.sidecar.process.ended().await.success());
    world.restart(&[]).await;
    assert!(world.retry().await.has_status(200).is_replay());
    world.service.is_not_called().await;
}

#[tokio::test]
async fn a_double_click_gets_one_response_with_default_settings() {
    let service = Service::new().await;
    let to = format!("http://{}", service.address);
    let sidecar = Sidecar::run(sidecar(&to).env_remove("ONCEGATE_WAIT").arg("--store=memory:")).await;
    let ask = request("POST", "/orders", &["Idempotency-Key: click"], "{}");
    let (mut first, mut second) = (sidecar.connect().await, sidecar.connect().await);
    first.send(&ask).await;
    let mut wire = service.accept().await;
    wire.message().await;
    second.send(&ask).await;
    second.stays_silent().await;
    wire.send(OK).await;
    assert!(!first.message().await.has_status(200).is_replay());
    assert!(second.message().await.has_status(200).is_replay());
    // A request that takes longer than the wait: the second click is told to retry, after a pause.
    let ask = request("POST", "/orders", &["Idempotency-Key: slow"], "{}");
    first.send(&ask).await;
    let (mut wire, _) = service.next(wire).await;
    let told = sidecar.ask(&ask).await;
    let seconds: u64 =
        told.is_problem(409, "request-in-progress").get("retry-after").unwrap().parse().unwrap();
    assert!((2..=5).contains(&seconds), "{told:?}");
    wire.send(OK).await;
    first.message().await.has_status(200);
}

#[tokio::test]
async fn a_request_with_a_key_continues_after_its_client_hangs_up() {
    let world = World::start(&[]).await;
    let (client, mut wire) = world.ask().await;
    drop(client);
    world.retry().await.is_problem(409, "request-in-progress");
    wire.send(OK).await;
    let mut response = Message::default();
    until("the response is stored", async || {
        response = world.retry().await;
        response.status() != 409
    })
    .await;
    assert!(response.has_status(200).is_replay());
}

#[tokio::test]
async fn a_request_without_a_key_ends_when_its_client_hangs_up() {
    let world = World::start(&[]).await;
    let mut client = world.sidecar.connect().await;
    client.send(request("POST", "/", &[], "{}")).await;
    let mut wire = world.service.accept().await;
    wire.message().await;
    drop(client);
    wire.ends().await;
}

#[tokio::test]
async fn draining_is_bounded_and_leaves_an_unknown_outcome() {
    let flags = ["--drain-timeout=6s", "--lease=1s", "--threads=2"];
    let mut world = World::start(&flags).await;
    let (mut client, mut wire) = world.ask().await;
    let begun = Instant::now();
    world.terminate().await;
    // The service does not answer. The time-out covers the whole shutdown, whatever it waits for.
    assert_eq!(world.sidecar.process.ended().await.code(), Some(0));
    let took = begun.elapsed();
    assert!(took >= Duration::from_secs(6) && took < Duration::from_millis(11_500), "{took:?}");
    assert_eq!(client.rest().await, b"");
    wire.ends().await;
    let errors = world.sidecar.process.errors().await;
    assert_eq!(errors.matches("requests were still running").count(), 1, "{errors}");
    world.restart(&flags).await;
    let mut response = Message::default();
    until("the lease ends", async || {
        response = world.retry().await;
        response.status() != 409
    })
    .await;
    response.is_problem(500, "outcome-unknown");
    world.service.is_not_called().await;
}

#[tokio::test]
async fn a_second_signal_ends_the_sidecar_at_once() {
    let mut world = World::start(&["--drain-timeout=10m"]).await;
    let (mut client, _wire) = world.ask().await;
    world.terminate().await;
    // A signal within a quarter of a second counts as the same one.
    let begun = Instant::now();
    let ended = loop {
        world.sidecar.process.signal(Signal::TERM);
        let ended = world.sidecar.process.ended();
        if let Ok(ended) = tokio::time::timeout(Duration::from_millis(300), ended).await {
            break ended;
        }
        assert!(begun.elapsed() < TIMEOUT, "the sidecar still runs");
    };
    assert_eq!(ended.code(), Some(1));
    assert_eq!(client.rest().await, b"");
    assert!(world.sidecar.process.errors().await.contains("second signal"));
}

#[tokio::test]
async fn two_signals_at_the_same_time_count_as_one() {
    let mut world = World::start(&["--drain-timeout=10m"]).await;
    let (mut client, mut wire) = world.ask().await;
    // `timeout` signals its child first, and then the group.
    world.sidecar.process.signal(Signal::TERM);
    world.sidecar.process.signal(Signal::INT);
    world.sidecar.process.logs("waiting for running requests").await;
    wire.send(OK).await;
    client.message().await.has_status(200);
    drop(client);
    assert_eq!(world.sidecar.process.ended().await.code(), Some(0));
}

#[tokio::test]
async fn idle_and_upgraded_connections_do_not_delay_the_shutdown() {
    let mut world = World::start(&["--drain-timeout=10m"]).await;
    let mut idle = world.sidecar.connect().await;
    idle.send(request("GET", "/", &[], "")).await;
    let mut wire = world.service.accept().await;
    wire.message().await;
    wire.send(OK).await;
    idle.message().await.has_status(200);
    let mut chat = world.sidecar.connect().await;
    chat.send(request("GET", "/", &["Connection: upgrade", "Upgrade: websocket"], "")).await;
    (wire, _) = world.service.next(wire).await;
    wire.send("HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n").await;
    assert_eq!(chat.head().await.status(), 101);
    world.terminate().await;
    idle.ends().await;
    assert!(world.sidecar.process.ended().await.success());
}

#[tokio::test]
async fn connections_without_a_request_do_not_delay_the_shutdown() {
    let authority = Authority::new();
    let (cert, key) = (authority.file("cert.pem"), authority.file("key.pem"));
    let plain = ["", "G", "GET / HT", "PRI * HTTP", "GET / HTTP/1.1\r\nHost: a\r\n"];
    // The first bytes of a TLS handshake.
    let tls = ["", "\x16\x03\x01"];
    for (beginnings, flags) in
        [(&plain[..], &[][..]), (&tls[..], &["--tls-cert", &cert, "--tls-key", &key][..])]
    {
        let flags = [&["--drain-timeout=10m"][..], flags].concat();
        let mut world = World::start(&flags).await;
        let mut clients = Vec::new();
        for beginning in beginnings {
            let mut client = world.sidecar.connect().await;
            client.send(beginning).await;
            clients.push(client);
        }
        let begun = Instant::now();
        world.terminate().await;
        for client in &mut clients {
            client.rest().await;
        }
        assert!(world.sidecar.process.ended().await.success());
        // Otherwise the sidecar would wait for these connections for half a minute.
        assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
        world.service.is_not_called().await;
    }
}
