//! How it ends: what runs is finished, for a bounded time, and what was finished is there afterwards.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;
use tokio::net::TcpStream;

use crate::protocols::Authority;
use crate::support::{Message, PATIENCE, Service, Sidecar, Wire, request, sidecar, until};
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

    /// Sends a request under a key, and waits until the service has it.
    async fn ask(&self) -> (Wire, Wire) {
        let mut client = self.sidecar.connect().await;
        client.send(asked()).await;
        let mut wire = self.service.accept().await;
        wire.message().await;
        (client, wire)
    }

    async fn retry(&self) -> Message {
        self.sidecar.ask(&asked()).await
    }

    /// Asks it to end, and waits until it takes no more connections.
    async fn terminate(&self) {
        self.sidecar.process.signal(Signal::TERM);
        until("no more connections are taken", async || {
            TcpStream::connect(self.sidecar.address).await.is_err()
        })
        .await;
    }
}

async fn protect(directory: &TempDir, service: &Service, flags: &[&str]) -> Sidecar {
    let store = format!("--store={}", directory.path().join("store").display());
    Sidecar::start(service.address, &[&[&*store], flags].concat()).await
}

fn asked() -> String {
    request("POST", "/orders", &[KEY], "{}")
}

#[tokio::test]
async fn what_runs_is_finished_and_durable() {
    for threads in ["--threads=1", "--threads=4"] {
        let mut world = World::start(&[threads]).await;
        let (mut client, mut wire) = world.ask().await;
        world.terminate().await;
        wire.send(OK).await;
        assert_eq!(client.message().await.has_status(200).text(), "ok");
        client.ends().await;
        assert!(world.sidecar.process.ended().await.success());
        world.restart(&[threads]).await;
        let replay = world.retry().await;
        assert!(replay.has_status(200).is_replay());
        assert_eq!(replay.text(), "ok");
        world.service.stays_alone().await;
    }
}

#[tokio::test]
async fn a_request_without_a_key_is_finished_too() {
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
async fn whoever_hung_up_before_gets_the_answer_after_the_restart() {
    let mut world = World::start(&[]).await;
    let (client, mut wire) = world.ask().await;
    drop(client);
    world.terminate().await;
    wire.send(OK).await;
    assert!(world.sidecar.process.ended().await.success());
    world.restart(&[]).await;
    assert!(world.retry().await.has_status(200).is_replay());
    world.service.stays_alone().await;
}

#[tokio::test]
async fn a_double_click_gets_one_answer_where_nothing_is_configured() {
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
    // One that takes longer than a click: the second one is told to come again, and not at once.
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
async fn a_call_goes_on_though_its_client_hung_up() {
    let world = World::start(&[]).await;
    let (client, mut wire) = world.ask().await;
    drop(client);
    world.retry().await.is_problem(409, "request-in-progress");
    wire.send(OK).await;
    let mut answer = Message::default();
    until("the answer is stored", async || {
        answer = world.retry().await;
        answer.status() != 409
    })
    .await;
    assert!(answer.has_status(200).is_replay());
}

#[tokio::test]
async fn a_call_without_a_key_ends_when_its_client_hangs_up() {
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
    // Nothing comes from the service. The time-out is the whole time, whatever there is to wait for.
    assert_eq!(world.sidecar.process.ended().await.code(), Some(0));
    let took = begun.elapsed();
    assert!(took >= Duration::from_secs(6) && took < Duration::from_millis(11_500), "{took:?}");
    assert_eq!(client.rest().await, b"");
    wire.ends().await;
    let errors = world.sidecar.process.errors().await;
    assert_eq!(errors.matches("requests were still running").count(), 1, "{errors}");
    world.restart(&flags).await;
    let mut answer = Message::default();
    until("the lease ends", async || {
        answer = world.retry().await;
        answer.status() != 409
    })
    .await;
    answer.is_problem(500, "outcome-unknown");
    world.service.stays_alone().await;
}

#[tokio::test]
async fn a_second_signal_ends_it_at_once() {
    let mut world = World::start(&["--drain-timeout=10m"]).await;
    let (mut client, _wire) = world.ask().await;
    world.terminate().await;
    // One that comes within a quarter of a second is the same one.
    let begun = Instant::now();
    let ended = loop {
        world.sidecar.process.signal(Signal::TERM);
        let ended = world.sidecar.process.ended();
        if let Ok(ended) = tokio::time::timeout(Duration::from_millis(300), ended).await {
            break ended;
        }
        assert!(begun.elapsed() < PATIENCE, "it goes on");
    };
    assert_eq!(ended.code(), Some(1));
    assert_eq!(client.rest().await, b"");
    assert!(world.sidecar.process.errors().await.contains("second signal"));
}

#[tokio::test]
async fn two_signals_at_the_same_time_are_one() {
    let mut world = World::start(&["--drain-timeout=10m"]).await;
    let (mut client, mut wire) = world.ask().await;
    // As `timeout` does, which signals its child and then the group.
    world.sidecar.process.signal(Signal::TERM);
    world.sidecar.process.signal(Signal::INT);
    world.sidecar.process.says("running requests are finished").await;
    wire.send(OK).await;
    client.message().await.has_status(200);
    drop(client);
    assert_eq!(world.sidecar.process.ended().await.code(), Some(0));
}

#[tokio::test]
async fn idle_connections_and_upgraded_ones_do_not_hold_it_up() {
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
async fn whoever_has_not_asked_yet_does_not_hold_it_up() {
    let authority = Authority::new();
    let (cert, key) = (authority.file("cert.pem"), authority.file("key.pem"));
    let plain = ["", "G", "GET / HT", "PRI * HTTP", "GET / HTTP/1.1\r\nHost: a\r\n"];
    // As much of a handshake as says that one begins.
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
        // Otherwise they would be waited for as long as ever, which is half a minute.
        assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
        world.service.stays_alone().await;
    }
}
