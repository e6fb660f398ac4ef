//! Two sidecars on one store, Redis or PostgreSQL, whose notifications do not arrive, whose clients leave, and whose clocks

//! differ.

use std::time::Duration;

use crate::support::{Message, Service, Sidecar, ask, request, sidecar};
use oncegate_servers::{PostgresServer, RedisOptions, RedisServer};
use oncegate_testkit::until;
use rustix::process::Signal;

const LEASE_MILLIS: u64 = 4000;

/// A store that sidecars share.
enum SharedStore {
    Redis(RedisServer),
    Postgres(PostgresServer),
}

impl SharedStore {
    async fn redis() -> Self {
        Self::redis_for("~* &* +@all").await
    }

    /// With a user that has these rights only.
    async fn redis_for(rules: &'static str) -> Self {
        let options = RedisOptions::new().with_appendfsync("always").with_user("app", "hunter2", rules);
        Self::Redis(blocking(|| RedisServer::start(options).unwrap()).await)
    }

    async fn postgres() -> Self {
        let server = blocking(|| PostgresServer::start().unwrap()).await;
        let mut apply = std::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
        apply.args(["schema", "apply", "postgres"]).env("ONCEGATE_STORE", server.url());
        let applied = blocking(move || apply.output().unwrap()).await;
        assert!(applied.status.success(), "{applied:?}");
        Self::Postgres(server)
    }

    fn url(&self) -> String {
        match self {
            Self::Redis(server) => format!("{}?timeout=20s", server.url()),
            Self::Postgres(server) => server.url(),
        }
    }

    /// A sidecar on this store, in front of this service.
    async fn sidecar(&self, service: &Service, flags: &[&str]) -> Sidecar {
        self.sidecar_at(service, flags, None).await
    }

    /// A sidecar whose clock is off by this time.
    async fn sidecar_at(&self, service: &Service, flags: &[&str], off: Option<&str>) -> Sidecar {
        let mut command = self.command(service, flags);
        if let Some(off) = off {
            // The clock shows another time, but runs at the usual speed.
            command
                .env("LD_PRELOAD", crate::support::faketime())
                .env("FAKETIME", off)
                .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        }
        Sidecar::run(&mut command).await
    }

    /// The command line of a sidecar on this store.
    fn command(&self, service: &Service, flags: &[&str]) -> tokio::process::Command {
        let mut command = sidecar(&format!("http://{}", service.address));
        command.env("ONCEGATE_STORE", self.url()).args(["--upstream-timeout=10m"]).args(flags);
        command
    }

    /// The end of the record's lease by the store's clock.
    fn lease_until(&self, record: &str) -> Option<u64> {
        let text = match self {
            Self::Redis(server) => {
                // Of a record in progress, which is not there before the claim.
                let script = "return struct.unpack('>I8', redis.call('GET', KEYS[1]) or ' ', 36)";
                let key = format!("oncegate:{{{record}}}");
                let reply = server.command(&["EVAL", script, "1", &key]).unwrap_or_default();
                reply.trim_start_matches(':').to_owned()
            }
            Self::Postgres(server) => {
                let query =
                    format!("SELECT lease_until FROM oncegate.records WHERE id = decode('{record}', 'hex')");
                server.sql(&query).unwrap()
            }
        };
        text.trim().parse().ok()
    }

    /// Ends the connections on which sidecars receive notifications, and returns their number.
    fn cut_notifications(&self) -> usize {
        match self {
            Self::Redis(server) => {
                let ended = server.command(&["CLIENT", "KILL", "TYPE", "pubsub"]).unwrap();
                ended.trim().trim_start_matches(':').parse().unwrap()
            }
            Self::Postgres(server) => {
                let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                           WHERE application_name = 'oncegate listener'";
                server.sql(end).unwrap().lines().count()
            }
        }
    }

    /// The number of records that sidecars watch for a waiting client.
    fn watched(&self) -> usize {
        match self {
            Self::Redis(server) => {
                server.command(&["PUBSUB", "SHARDCHANNELS"]).unwrap().matches("oncegate:{").count()
            }
            Self::Postgres(server) => {
                let held = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'";
                server.sql(held).unwrap().lines().count()
            }
        }
    }
}

async fn blocking<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(act).await.unwrap()
}

fn order(key: &str) -> String {
    request("POST", "/orders", &[&format!("Idempotency-Key: \"{key}\"")], "{\"amount\":5}")
}

fn receipt(text: &str) -> String {
    format!("HTTP/1.1 201 Created\r\nContent-Length: {}\r\n\r\n{text}", text.len())
}

/// The value of this line in a sidecar's metrics.
async fn metric(sidecar: &Sidecar, line: &str) -> f64 {
    let metrics = ask(sidecar.admin, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    let value = metrics.text().lines().find_map(|found| found.strip_prefix(line)?.trim().parse().ok());
    value.unwrap_or(0.0)
}

fn number(message: &Message, field: &str) -> u64 {
    message.get(field).unwrap_or_else(|| panic!("no {field}: {:?}", message.head)).parse().unwrap()
}

/// The second of the day by a sidecar's clock.
async fn second_of_day(sidecar: &Sidecar) -> i64 {
    let response = ask(sidecar.admin, "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    // Sat, 21 Nov 2026 19:20:16 GMT
    let date = response.get("date").unwrap().to_owned();
    let clock = date.split(' ').nth(4).unwrap();
    clock.split(':').fold(0, |seconds, part| seconds * 60 + part.parse::<i64>().unwrap())
}

macro_rules! on_each_store {
    ($($test:ident)+) => {
        mod redis {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test(super::SharedStore::redis().await).await;
            })+
        }
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test(super::SharedStore::postgres().await).await;
            })+
        }
    };
}

on_each_store! {
    a_waiting_client_gets_the_response_without_notifications
    a_client_that_leaves_ends_its_wait
    clocks_an_hour_apart_change_nothing
}

async fn a_waiting_client_gets_the_response_without_notifications(store: SharedStore) {
    let service = Service::new().await;
    let one = store.sidecar(&service, &[]).await;
    let mut two = store.sidecar(&service, &["--wait=5m"]).await;
    let mut owner = one.connect().await;
    owner.send(order("one")).await;
    let mut wire = service.accept().await;
    wire.message().await;
    let mut waiting = two.connect().await;
    waiting.send(order("one")).await;
    until("the duplicate waits", async || store.watched() == 1).await;
    // From now on every connection for notifications is cut at once.
    let mut cut = 0;
    until("notifications were cut off a few times", async || {
        cut += store.cut_notifications();
        cut >= 3
    })
    .await;
    let response = async {
        wire.send(receipt("receipt 1")).await;
        assert_eq!(owner.message().await.has_status(201).text(), "receipt 1");
        waiting.message().await
    };
    let cutting = async {
        loop {
            store.cut_notifications();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let response = tokio::select! {
        response = response => response,
        () = cutting => unreachable!("the cuts go on without end"),
    };
    assert_eq!((response.has_status(201).text(), response.is_replay()), ("receipt 1", true));
    two.process.signal(Signal::TERM);
    assert!(two.process.errors().await.contains("waiting requests ask from time to time"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_redis_notifications_waiters_poll_and_the_log_warns_once() {
    let store = SharedStore::redis_for("~* resetchannels +@all").await;
    let service = Service::new().await;
    let one = store.sidecar(&service, &[]).await;
    let mut two = store.sidecar(&service, &["--wait=5m"]).await;
    for key in ["one", "two"] {
        let mut owner = one.connect().await;
        owner.send(order(key)).await;
        let mut wire = service.accept().await;
        wire.message().await;
        let mut waiting = two.connect().await;
        waiting.send(order(key)).await;
        until("the duplicate waits", async || metric(&two, "oncegate_records_in_flight ").await > 0.0).await;
        // The service closes the connection, so that the next request comes on a connection of its own.
        wire.send(receipt("receipt").replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n")).await;
        assert_eq!(owner.message().await.status(), 201);
        assert!(waiting.message().await.has_status(201).is_replay());
    }
    two.process.signal(Signal::TERM);
    let log = two.process.errors().await;
    assert_eq!(log.matches("sends no notifications from other processes").count(), 1, "{log}");
    assert!(!log.contains("hunter2"), "{log}");
}

async fn a_client_that_leaves_ends_its_wait(store: SharedStore) {
    let service = Service::new().await;
    let one = store.sidecar(&service, &[]).await;
    let two = store.sidecar(&service, &["--wait=5m"]).await;
    let mut owner = one.connect().await;
    owner.send(order("one")).await;
    let mut wire = service.accept().await;
    wire.message().await;
    // The client disappears as a killed client does: a client that only closes its sending side may still read.
    let stream = tokio::net::TcpStream::connect(two.address).await.unwrap();
    stream.set_zero_linger().unwrap();
    let mut waiting = crate::support::Wire::new(stream);
    waiting.send(order("one")).await;
    until("the duplicate waits", async || store.watched() == 1).await;
    drop(waiting);
    until("no client waits", async || store.watched() == 0).await;
    wire.send(receipt("receipt 1")).await;
    assert_eq!(owner.message().await.status(), 201);
}

fn lease() -> String {
    format!("--lease={LEASE_MILLIS}ms")
}

async fn clocks_an_hour_apart_change_nothing(store: SharedStore) {
    for off in ["+1h", "-1h"] {
        let service = Service::new().await;
        let flags = [&*lease(), "--on-abandoned=reexecute"];
        let mut one = store.sidecar_at(&service, &flags, Some(off)).await;
        let two = store.sidecar(&service, &flags).await;
        let apart = (second_of_day(&one).await - second_of_day(&two).await).rem_euclid(86_400);
        let hour = if off == "+1h" { 3600 } else { 86_400 - 3600 };
        assert!((apart - hour).abs() < 600, "the clocks are {apart} s apart");

        // One sidecar executes for longer than its lease; the other one sees the record in progress.
        let key = format!("slow {off}");
        let mut owner = one.connect().await;
        owner.send(order(&key)).await;
        let mut wire = service.accept().await;
        let executed = wire.message().await;
        let record = executed.get("oncegate-record").unwrap();
        let begun = store.lease_until(record).unwrap();
        two.ask(&order(&key)).await.is_problem(409, "request-in-progress");
        until("the lease was renewed beyond its first end", async || {
            store.lease_until(record).unwrap() > begun + LEASE_MILLIS
        })
        .await;
        two.ask(&order(&key)).await.is_problem(409, "request-in-progress");
        wire.send(receipt("receipt 1")).await;
        assert_eq!(owner.message().await.has_status(201).text(), "receipt 1");
        for sidecar in [&one, &two] {
            let replay = sidecar.ask(&order(&key)).await;
            assert_eq!((replay.has_status(201).text(), replay.is_replay()), ("receipt 1", true));
        }
        service.is_not_called().await;

        // One sidecar dies, and the other one takes over when the lease has ended by the store's clock.
        let key = format!("killed {off}");
        owner.send(order(&key)).await;
        let (_wire, executed) = service.next(wire).await;
        let record = executed.get("oncegate-record").unwrap().to_owned();
        one.process.kill().await;
        let lease_until = store.lease_until(&record).unwrap();
        let address = two.address;
        let retry = tokio::spawn(async move {
            loop {
                let response = ask(address, &order(&key)).await;
                if response.status() != 409 {
                    return response;
                }
            }
        });
        let mut wire = service.accept().await;
        let again = wire.message().await;
        assert_eq!(number(&again, "oncegate-attempt"), 2);
        assert!(
            number(&again, "oncegate-token") >= lease_until,
            "the takeover comes after the end of the lease"
        );
        wire.send(receipt("receipt 2")).await;
        assert_eq!(retry.await.unwrap().has_status(201).text(), "receipt 2");
    }
}
