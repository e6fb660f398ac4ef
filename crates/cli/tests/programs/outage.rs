//! A store that goes away while requests run. The tests assert what the table of GUARANTEES.md promises for each store, and
//! count and print what it does not promise.
//!
//! Clients make one payment after the other, and retry each until they get a definite result. The service never treats

//! two requests as one: it records every execution.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::{Message, Service, Sidecar, Wire, request, sidecar};
use oncegate_servers::{
    Fault, FaultProxy, PostgresOptions, PostgresServer, PostgresSession, RedisOptions, RedisServer, freeze,
    thaw,
};
use oncegate_testkit::until;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, block_in_place};

const LEASE: Duration = Duration::from_secs(2);
const CLIENTS: usize = 6;

/// The longest time that anything may take on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// The time of each execution, by key.
#[derive(Clone, Default)]
struct Ledger(Arc<Mutex<HashMap<String, Vec<Instant>>>>);

impl Ledger {
    /// A service that records its executions. Its responses differ, even for the same request.
    async fn start() -> (Self, SocketAddr) {
        let (ledger, service) = (Self::default(), Service::new().await);
        let (all, address) = (ledger.clone(), service.address);
        tokio::spawn(async move {
            let listener = service.into_listener();
            let number = Arc::new(AtomicUsize::new(0));
            while let Ok((stream, _)) = listener.accept().await {
                let (all, number) = (all.clone(), number.clone());
                tokio::spawn(async move {
                    let mut wire = Wire::new(stream);
                    while let Some(head) = wire.try_head().await {
                        let key = head.get("idempotency-key").unwrap_or("none").to_owned();
                        wire.body(head).await;
                        let number = number.fetch_add(1, Ordering::SeqCst);
                        all.0.lock().unwrap().entry(key).or_default().push(Instant::now());
                        tokio::time::sleep(Duration::from_millis(number as u64 % 20)).await;
                        let body = format!("receipt {number}");
                        let head = format!("HTTP/1.1 201 Created\r\nContent-Length: {}\r\n\r\n", body.len());
                        if wire.try_send(head + &body).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        (ledger, address)
    }

    fn executions(&self, key: &str) -> Vec<Instant> {
        self.0.lock().unwrap().get(key).cloned().unwrap_or_default()
    }

    /// The number of executions beyond the first of each key.
    fn repeated(&self) -> usize {
        let all = self.0.lock().unwrap();
        // A request without a key is never a retry.
        all.iter().filter(|(key, _)| *key != "none").map(|(_, effects)| effects.len() - 1).sum()
    }
}

/// The final result of a client: a receipt, or an unknown outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Definite {
    Paid(String),
    /// The receipt of the execution itself, marked as not stored: the record may have it, or the outcome is unknown.
    PaidNotStored(String),
    Unknown,
}

impl Definite {
    /// Returns true if a retry may get `again` after this result.
    fn allows(&self, again: &Self) -> bool {
        match self {
            Self::PaidNotStored(receipt) => *again == Self::Unknown || *again == Self::Paid(receipt.clone()),
            first => first == again,
        }
    }
}

/// Clients that pay until the test stops them.
struct Load {
    address: SocketAddr,
    ledger: Ledger,
    stop: Arc<AtomicBool>,
    refused: Arc<AtomicUsize>,
    heard: Arc<Mutex<BTreeMap<String, Definite>>>,
    clients: Vec<JoinHandle<()>>,
}

/// Sends one request, and returns its response, if there is one.
async fn pay(address: SocketAddr, key: &str) -> Option<Message> {
    let ask = request("POST", "/pay", &[&format!("Idempotency-Key: {key}")], "{}");
    let mut wire = Wire::new(TcpStream::connect(address).await.ok()?);
    wire.try_send(&ask).await.ok()?;
    let head = wire.try_head().await?;
    Some(wire.body(head).await)
}

/// The result in a response, if it is definite.
fn definite(response: &Message, refused: &AtomicUsize) -> Option<Definite> {
    match response.status() {
        201 if response.get("idempotency-status") == Some("not-stored") => {
            Some(Definite::PaidNotStored(response.text().to_owned()))
        }
        201 => Some(Definite::Paid(response.text().to_owned())),
        500 => {
            response.is_problem(500, "outcome-unknown");
            Some(Definite::Unknown)
        }
        409 => None,
        _ => {
            response.is_problem(503, "store-unavailable");
            assert!(response.get("retry-after").is_some(), "{response:?}");
            refused.fetch_add(1, Ordering::SeqCst);
            None
        }
    }
}

impl Load {
    fn start(address: SocketAddr, ledger: &Ledger, name: &str) -> Self {
        let load = Self {
            address,
            ledger: ledger.clone(),
            stop: Arc::default(),
            refused: Arc::default(),
            heard: Arc::default(),
            clients: Vec::new(),
        };
        let clients = (0..CLIENTS).map(|client| {
            let (stop, refused, heard) = (load.stop.clone(), load.refused.clone(), load.heard.clone());
            let name = name.to_owned();
            tokio::spawn(async move {
                for number in 0.. {
                    if stop.load(Ordering::SeqCst) {
                        return;
                    }
                    let key = format!("{name}-{client}-{number}");
                    loop {
                        let response = pay(address, &key).await;
                        if let Some(said) = response.and_then(|response| definite(&response, &refused)) {
                            heard.lock().unwrap().insert(key, said);
                            break;
                        }
                        tokio::time::sleep(Duration::from_millis(25)).await;
                    }
                }
            })
        });
        let clients = clients.collect();
        Self { clients, ..load }
    }

    /// Waits for this number of further payments.
    async fn makes_payments(&self, more: usize) {
        let paid = || self.heard.lock().unwrap().len();
        let enough = paid() + more;
        until("more payments are made", async || paid() >= enough).await;
    }

    /// Waits for this number of further refusals: an outage that cost time-outs would give few.
    async fn is_refused(&self, more: usize) {
        let enough = self.refused.load(Ordering::SeqCst) + more;
        until("requests are refused", async || self.refused.load(Ordering::SeqCst) >= enough).await;
    }

    /// The definite result of a retry.
    async fn retry(&self, key: &str) -> Definite {
        let give_up = Instant::now() + LEASE + DEADLINE;
        loop {
            let response = pay(self.address, key).await;
            if let Some(said) = response.and_then(|response| definite(&response, &self.refused)) {
                return said;
            }
            assert!(Instant::now() < give_up, "{key} gets no definite result");
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
    }

    /// After the faults: every client gets a definite result, and all earlier results still hold.
    async fn ends(mut self, what: &str, losses: &[(Instant, Instant)]) {
        self.makes_payments(20).await;
        self.stop.store(true, Ordering::SeqCst);
        for client in std::mem::take(&mut self.clients) {
            let ended = tokio::time::timeout(LEASE + DEADLINE, client).await;
            ended.unwrap_or_else(|_| panic!("{what}: a client never got a definite result")).unwrap();
        }
        let heard = self.heard.lock().unwrap().clone();
        let unknown = heard.values().filter(|said| **said == Definite::Unknown).count();
        let not_stored = heard.values().filter(|said| matches!(said, Definite::PaidNotStored(_))).count();
        let mut changed = 0;
        for (key, said) in &heard {
            let effects = self.ledger.executions(key);
            if losses.is_empty() {
                // Invariants I1 and I2.
                assert!(effects.len() <= 1, "{what}: {} executions of {key}", effects.len());
                if *said != Definite::Unknown {
                    assert_eq!(effects.len(), 1, "{what}: {key}");
                }
            }
            // Invariants I3 and I4: each retry gets the same result, and executes nothing.
            let again = self.retry(key).await;
            if losses.is_empty() {
                assert!(said.allows(&again), "{what}: {key} got {said:?} and then {again:?}");
                assert_eq!(self.ledger.executions(key).len(), effects.len(), "{what}: {key} executed again");
            } else {
                changed += usize::from(!said.allows(&again));
            }
            // A second execution must be explained by a loss between it and the one before.
            for pair in self.ledger.executions(key).windows(2) {
                let is_explained = losses.iter().any(|(from, to)| pair[0] <= *to && *from <= pair[1]);
                assert!(is_explained, "{what}: {key} executed again, and nothing was lost in between");
            }
        }
        println!(
            "{what}: {} keys, {} refusals, {unknown} unknown outcomes, {not_stored} responses not stored; executed again: {}, responses that changed: {changed}, \
             losses: {}",
            heard.len(),
            self.refused.load(Ordering::SeqCst),
            self.ledger.repeated(),
            losses.len(),
        );
    }
}

/// The value of a metric.
async fn series(sidecar: &Sidecar, name: &str) -> f64 {
    let response = crate::support::ask(
        sidecar.admin,
        &request("GET", "/metrics", &[], "").replace("orders.test", "localhost"),
    )
    .await;
    let text = response.has_status(200).text().to_owned();
    let line = text.lines().find(|line| line.split(' ').next() == Some(name));
    line.unwrap_or_else(|| panic!("no {name}: {text}")).rsplit(' ').next().unwrap().parse().unwrap()
}

async fn probe(sidecar: &Sidecar, path: &str) -> u16 {
    crate::support::ask(sidecar.admin, &request("GET", path, &[], "").replace("orders.test", "localhost"))
        .await
        .status()
}

async fn openings(sidecar: &Sidecar) -> f64 {
    series(sidecar, "oncegate_breaker_openings_total").await
}

async fn is_healthy_again(sidecar: &Sidecar) {
    // A server that is starting again may get probes before all its parts work.
    until("the store is healthy again", async || {
        series(sidecar, "oncegate_degraded").await == 0.0
            && series(sidecar, "oncegate_breaker{state=\"closed\"}").await == 1.0
            && probe(sidecar, "/readyz").await == 200
    })
    .await;
}

async fn is_degraded(sidecar: &Sidecar) {
    until("the sidecar is degraded", async || series(sidecar, "oncegate_degraded").await == 1.0).await;
    until("the sidecar is not ready", async || probe(sidecar, "/readyz").await == 503).await;
    assert_eq!(probe(sidecar, "/livez").await, 200);
}

async fn start(to: SocketAddr, store: &str, flags: &[&str]) -> Sidecar {
    let mut command = sidecar(&format!("http://{to}"));
    let lease =
        if flags.iter().any(|flag| flag.starts_with("--lease=")) { &[][..] } else { &["--lease=2s"][..] };
    let timeout = match flags.iter().any(|flag| flag.starts_with("--store-timeout=")) {
        true => &[][..],
        false => &["--store-timeout=500ms"][..],
    };
    command.env("ONCEGATE_STORE", store).args(lease).args(timeout).args(flags);
    Sidecar::run(&mut command).await
}

/// Sleeps for longer than a lease.
async fn sleep_beyond_the_lease() {
    tokio::time::sleep(LEASE + Duration::from_secs(1)).await;
}

fn prepared(options: PostgresOptions) -> PostgresServer {
    let server = PostgresServer::start_with(options).unwrap();
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
    let output =
        command.args(["schema", "apply", "postgres"]).env("ONCEGATE_STORE", server.url()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    server
}

fn session(server: &PostgresServer) -> PostgresSession {
    block_in_place(|| server.session()).unwrap()
}

fn run(session: &mut PostgresSession, sql: &str) -> String {
    block_in_place(|| session.run(sql)).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_that_stops_and_starts_executes_nothing_twice() {
    let mut options = PostgresOptions::default();
    options.fsync = true;
    let mut server = block_in_place(|| prepared(options));
    let (ledger, to) = Ledger::start().await;
    let sidecar = start(to, &server.url(), &["--store-timeout=2s"]).await;
    let load = Load::start(sidecar.address, &ledger, "stop");
    let mut before = 0.0;
    for _ in 0..2 {
        load.makes_payments(30).await;
        block_in_place(|| server.stop_immediately()).unwrap();
        is_degraded(&sidecar).await;
        load.is_refused(100).await;
        assert_eq!(pay_without_a_key(sidecar.address).await, 201, "a request without a key passes");
        block_in_place(|| server.start_again()).unwrap();
        load.makes_payments(30).await;
        is_healthy_again(&sidecar).await;
        // On a busy machine a server that has just started may be so slow that the breaker opens once more.
        let after = openings(&sidecar).await;
        assert!((1.0..=3.0).contains(&(after - before)), "{after} openings after {before}");
        before = after;
    }
    load.ends("PostgreSQL, immediate stop", &[]).await;
}

async fn pay_without_a_key(address: SocketAddr) -> u16 {
    crate::support::ask(address, &request("POST", "/pay", &[], "{}")).await.status()
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_that_hangs_beyond_the_lease_executes_nothing_twice() {
    let server = block_in_place(|| prepared(PostgresOptions::default()));
    let (ledger, to) = Ledger::start().await;
    let sidecar = start(to, &server.url(), &[]).await;
    let load = Load::start(sidecar.address, &ledger, "hang");
    load.makes_payments(30).await;
    server.freeze(true).unwrap();
    is_degraded(&sidecar).await;
    load.is_refused(100).await;
    sleep_beyond_the_lease().await;
    server.freeze(false).unwrap();
    load.makes_payments(30).await;
    is_healthy_again(&sidecar).await;
    // A lock on the whole table, as a migration takes it.
    let mut other = session(&server);
    run(&mut other, "BEGIN; LOCK TABLE oncegate.records;");
    is_degraded(&sidecar).await;
    load.is_refused(100).await;
    sleep_beyond_the_lease().await;
    run(&mut other, "ROLLBACK;");
    load.makes_payments(30).await;
    is_healthy_again(&sidecar).await;
    load.ends("PostgreSQL, frozen and locked", &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_whose_standby_is_away_is_out_of_reach() {
    let server = block_in_place(|| prepared(PostgresOptions::default()));
    let (ledger, to) = Ledger::start().await;
    // The timeouts suit a busy machine: an outage opens the breaker once.
    let sidecar = start(to, &server.url(), &["--store-timeout=2s"]).await;
    let load = Load::start(sidecar.address, &ledger, "standby");
    load.makes_payments(30).await;
    let mut operator = session(&server);
    run(&mut operator, "SET synchronous_commit = local;");
    run(&mut operator, "ALTER SYSTEM SET synchronous_standby_names = 'absent';");
    run(&mut operator, "SELECT pg_reload_conf();");
    is_degraded(&sidecar).await;
    load.is_refused(100).await;
    // The store stays out of reach while nothing commits, and its breaker uses no more sessions of the server.
    let sessions = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep';";
    let waiting = run(&mut operator, sessions);
    for _ in 0..40 {
        assert_eq!(probe(&sidecar, "/readyz").await, 503);
        assert_eq!(series(&sidecar, "oncegate_degraded").await, 1.0);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    sleep_beyond_the_lease().await;
    assert_eq!(run(&mut operator, sessions), waiting);
    assert_eq!(openings(&sidecar).await, 1.0);
    run(&mut operator, "ALTER SYSTEM RESET synchronous_standby_names;");
    run(&mut operator, "SELECT pg_reload_conf();");
    load.makes_payments(30).await;
    is_healthy_again(&sidecar).await;
    load.ends("PostgreSQL, whose standby was away", &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_that_ends_sessions_or_runs_out_of_them_executes_nothing_twice() {
    let mut options = PostgresOptions::default();
    options.settings = vec!["max_connections=20".to_owned()];
    let server = block_in_place(|| prepared(options));
    let (ledger, to) = Ledger::start().await;
    let sidecar = start(to, &server.url(), &[]).await;
    let load = Load::start(sidecar.address, &ledger, "sessions");
    load.makes_payments(30).await;
    let mut other = session(&server);
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'oncegate';";
    for _ in 0..5 {
        run(&mut other, end);
        load.makes_payments(5).await;
    }
    // No connection is left for the sidecar, except those that it gets first.
    let mut others = Vec::new();
    for _ in 0..2 {
        while let Ok(another) = block_in_place(|| server.session()) {
            others.push(another);
        }
        run(&mut other, end);
    }
    assert!(others.len() >= 5, "{} sessions were left", others.len());
    sleep_beyond_the_lease().await;
    drop(others);
    load.makes_payments(30).await;
    is_healthy_again(&sidecar).await;
    load.ends("PostgreSQL, sessions ended and used up", &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_is_stored_after_another_transaction_frees_its_record() {
    let server = block_in_place(|| prepared(PostgresOptions::default()));
    let service = Service::new().await;
    // Slow responses of a busy machine would open the breaker, too: the timeout is long enough for them.
    let sidecar = start(service.address, &server.url(), &["--store-timeout=20s"]).await;
    let pay = request("POST", "/pay", &["Idempotency-Key: held"], "{}");
    let (address, first) = (sidecar.address, pay.clone());
    let first = tokio::spawn(async move { crate::support::ask(address, &first).await });
    let (mut wire, _) = service.next(service.accept().await).await;
    let mut other = session(&server);
    run(&mut other, "BEGIN; SELECT count(*) FROM (SELECT 1 FROM oncegate.records FOR UPDATE) AS held;");
    wire.send("HTTP/1.1 201 Created\r\nContent-Length: 4\r\n\r\npaid").await;
    // The only command is this completion. The store refuses it again and again until the lease ends.
    let first = first.await.unwrap();
    assert_eq!(first.has_status(201).get("idempotency-status"), Some("not-stored"));
    let reasons = sidecar.process.error_lines("out of reach");
    assert_eq!(openings(&sidecar).await, 0.0, "the breaker opened: {reasons:?}");
    run(&mut other, "ROLLBACK;");
    until("the response is stored", async || crate::support::ask(address, &pay).await.status() == 201).await;
}

/// A fault proxy in front of the server, and its URL.
async fn proxy_to(server: &PostgresServer) -> (FaultProxy, String) {
    let proxy = FaultProxy::start(server.port()).await.unwrap();
    let url = server.url().replace(&format!(":{}/", server.port()), &format!(":{}/", proxy.port()));
    (proxy, format!("{url}?sslmode=disable"))
}

/// The commit of a claim waits for a standby that is away, and its connection is cut. Nothing is executed, so the key must be
/// free after the commit, even if the commit takes longer than a lease.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_whose_connection_is_cut_during_its_commit_leaves_no_unknown_outcome() {
    for lease in ["2s", "60s"] {
        let server = block_in_place(|| prepared(PostgresOptions::default()));
        let (proxy, url) = proxy_to(&server).await;
        let (ledger, to) = Ledger::start().await;
        let sidecar = start(to, &url, &[&format!("--lease={lease}")]).await;
        // The driver sends a prepared claim as one message. A busy database may refuse the first one.
        until("a payment", async || {
            pay(sidecar.address, "before").await.is_some_and(|response| response.status() == 201)
        })
        .await;
        let mut other = session(&server);
        run(&mut other, "ALTER SYSTEM SET synchronous_standby_names = 'absent';");
        run(&mut other, "SELECT pg_reload_conf();");
        let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep';";
        let mut probe = None::<JoinHandle<()>>;
        until("commits wait", async || {
            if probe.as_ref().is_none_or(JoinHandle::is_finished) {
                let mut writer = session(&server);
                // It ends when the commits continue.
                probe = Some(tokio::task::spawn_blocking(move || {
                    drop(writer.run("COMMENT ON SCHEMA public IS 'x';"))
                }));
            }
            run(&mut other, waiting).trim() != "0"
        })
        .await;
        proxy.arm(b"POST /pay", Fault::Sent);
        let first = pay(sidecar.address, "cut").await.unwrap();
        assert!([409, 503].contains(&first.status()), "{first:?}");
        if lease == "2s" {
            sleep_beyond_the_lease().await;
        }
        run(&mut other, "ALTER SYSTEM RESET synchronous_standby_names;");
        run(&mut other, "SELECT pg_reload_conf();");
        proxy.go_on();
        let refused = AtomicUsize::new(0);
        until("the response of the payment is stored", async || {
            let response = pay(sidecar.address, "cut").await;
            match response.and_then(|response| definite(&response, &refused)) {
                Some(Definite::Paid(_)) => true,
                // A database that catches up may take the response late.
                None | Some(Definite::PaidNotStored(_)) => false,
                Some(other) => panic!("{lease}: {other:?}"),
            }
        })
        .await;
        assert_eq!(ledger.executions("cut").len(), 1);
    }
}

/// Commits are slow, and connections are cut again and again during them.
#[tokio::test(flavor = "multi_thread")]
async fn postgres_with_connections_cut_during_commits_leaves_no_unknown_outcome() {
    let mut options = PostgresOptions::default();
    options.fsync = true;
    options.settings = vec!["commit_delay=100000".to_owned(), "commit_siblings=0".to_owned()];
    let server = block_in_place(|| prepared(options));
    let (proxy, url) = proxy_to(&server).await;
    let (ledger, to) = Ledger::start().await;
    let sidecar = start(to, &url, &[]).await;
    let load = Load::start(sidecar.address, &ledger, "cuts");
    load.makes_payments(10).await;
    let heard = load.heard.clone();
    for number in 0..60_u64 {
        // The cuts come at varying moments of a commit.
        tokio::time::sleep(Duration::from_millis(250 + number * 7 % 100)).await;
        proxy.cut();
    }
    sleep_beyond_the_lease().await;
    load.ends("PostgreSQL, slow commits and cuts", &[]).await;
    let heard = heard.lock().unwrap();
    let unknown: Vec<_> = heard.iter().filter(|(_, said)| **said == Definite::Unknown).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

/// A firewall forgets the connections: data sent on them gets no reply, and the connections do not end.
#[tokio::test(flavor = "multi_thread")]
async fn postgres_behind_silent_connections_stalls_no_request_for_long() {
    let server = block_in_place(|| prepared(PostgresOptions::default()));
    let (proxy, url) = proxy_to(&server).await;
    let (ledger, to) = Ledger::start().await;
    let sidecar = start(to, &url, &[]).await;
    let load = Load::start(sidecar.address, &ledger, "swallowed");
    for round in 0..5 {
        load.makes_payments(30).await;
        proxy.swallow();
        // A running command waits for twice the timeout at most, plus the delay of a busy machine.
        let begun = Instant::now();
        let mut responses = Vec::new();
        for number in 0..10 {
            let address = sidecar.address;
            responses.push(tokio::spawn(async move { pay(address, &format!("now-{round}-{number}")).await }));
        }
        for response in responses {
            let response = response.await.unwrap().unwrap();
            assert!([201, 503].contains(&response.status()), "{response:?}");
        }
        let took = begun.elapsed();
        assert!(took < Duration::from_millis(500) * 2 + Duration::from_secs(2), "{took:?}");
    }
    is_healthy_again(&sidecar).await;
    load.ends("PostgreSQL, connections that drop everything", &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_that_flushes_every_write_executes_nothing_twice() {
    let mut server = RedisServer::start(RedisOptions::new().with_appendfsync("always")).unwrap();
    let (ledger, to) = Ledger::start().await;
    let sidecar = start(to, &format!("{}?timeout=500ms", server.url()), &[]).await;
    let load = Load::start(sidecar.address, &ledger, "aof");
    load.makes_payments(30).await;
    server.kill();
    is_degraded(&sidecar).await;
    load.is_refused(100).await;
    block_in_place(|| server.restart()).unwrap();
    load.makes_payments(30).await;
    is_healthy_again(&sidecar).await;

    for _ in 0..5 {
        block_in_place(|| server.command(&["SCRIPT", "FLUSH"])).unwrap();
        load.makes_payments(5).await;
    }

    block_in_place(|| server.command(&["CLIENT", "PAUSE", "10000", "ALL"])).unwrap();
    is_degraded(&sidecar).await;
    load.is_refused(50).await;
    load.makes_payments(30).await;
    is_healthy_again(&sidecar).await;

    freeze(server.pid().unwrap()).unwrap();
    is_degraded(&sidecar).await;
    load.is_refused(100).await;
    sleep_beyond_the_lease().await;
    thaw(server.pid().unwrap()).unwrap();
    load.makes_payments(30).await;
    is_healthy_again(&sidecar).await;

    // A full store refuses new keys and replays known ones. It is degraded, but not out of reach.
    let (opened, known) = (openings(&sidecar).await, load.heard.lock().unwrap().clone());
    block_in_place(|| server.command(&["CONFIG", "SET", "maxmemory", "1"])).unwrap();
    is_degraded(&sidecar).await;
    load.is_refused(50).await;
    for (key, said) in known.iter().filter(|(_, said)| matches!(said, Definite::Paid(_))).take(20) {
        let again = pay(sidecar.address, key).await.and_then(|response| definite(&response, &load.refused));
        assert_eq!(again.as_ref(), Some(said), "{key}");
    }
    assert_eq!(openings(&sidecar).await, opened, "the breaker opened for a store that is full");
    block_in_place(|| server.command(&["CONFIG", "SET", "maxmemory", "0"])).unwrap();
    load.makes_payments(30).await;
    is_healthy_again(&sidecar).await;
    load.ends("Redis, appendfsync always", &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn redis_that_loses_records_executes_only_the_lost_requests_again() {
    let mut server = RedisServer::start(RedisOptions::new()).unwrap();
    let (ledger, to) = Ledger::start().await;
    let sidecar = start(to, &format!("{}?timeout=500ms", server.url()), &[]).await;
    let load = Load::start(sidecar.address, &ledger, "loss");
    load.makes_payments(30).await;
    assert_eq!(ledger.repeated(), 0);
    let from = Instant::now();
    block_in_place(|| server.command(&["FLUSHALL"])).unwrap();
    let flushed = (from, Instant::now());
    load.makes_payments(30).await;
    let from = Instant::now();
    server.kill();
    is_degraded(&sidecar).await;
    load.is_refused(100).await;
    block_in_place(|| server.restart()).unwrap();
    let losses = [flushed, (from, Instant::now())];
    load.makes_payments(30).await;
    is_healthy_again(&sidecar).await;
    load.ends("Redis, nothing kept", &losses).await;
    // The losses that this store does not exclude did happen here.
    assert!(ledger.repeated() >= 60, "{}", ledger.repeated());
}

#[tokio::test(flavor = "multi_thread")]
async fn danger_fail_open_executes_without_the_store_and_reports_it() {
    let mut server = RedisServer::start(RedisOptions::new()).unwrap();
    let (ledger, to) = Ledger::start().await;
    let sidecar = start(to, &server.url(), &["--store-outage=open"]).await;
    assert_eq!(pay(sidecar.address, "before").await.unwrap().status(), 201);
    server.kill();
    for number in 0..20 {
        let key = format!("open-{}", number % 2);
        let response = pay(sidecar.address, &key).await.unwrap();
        response.has_status(201);
        assert_eq!(response.get("idempotency-status"), Some("failed-open"), "{response:?}");
    }
    assert_eq!(
        (ledger.executions("open-0").len(), ledger.executions("open-1").len()),
        (10, 10),
        "without protection"
    );
    let counted = series(&sidecar, "oncegate_requests_total{outcome=\"failed-open\",status=\"2xx\"}").await;
    assert_eq!(counted, 20.0);
    assert_eq!(pay_without_a_key(sidecar.address).await, 201);
    is_degraded(&sidecar).await;
    block_in_place(|| server.restart()).unwrap();
    until("the sidecar protects again", async || {
        let response = pay(sidecar.address, "after").await.unwrap();
        response.has_status(201).get("idempotency-status") != Some("failed-open")
    })
    .await;
    is_healthy_again(&sidecar).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sidecar_starts_without_its_store_and_uses_it_when_it_is_available() {
    let mut redis = RedisServer::start(RedisOptions::new()).unwrap();
    let mut postgres = block_in_place(|| prepared(PostgresOptions::default()));
    redis.kill();
    block_in_place(|| postgres.stop_immediately()).unwrap();
    let (ledger, to) = Ledger::start().await;
    let both = [start(to, &redis.url(), &[]).await, start(to, &postgres.url(), &[]).await];
    for sidecar in &both {
        is_degraded(sidecar).await;
        pay(sidecar.address, "early").await.unwrap().is_problem(503, "store-unavailable");
        assert_eq!(pay_without_a_key(sidecar.address).await, 201);
        assert_eq!(openings(sidecar).await, 1.0);
    }
    assert!(ledger.executions("early").is_empty());
    block_in_place(|| redis.restart()).unwrap();
    block_in_place(|| postgres.start_again()).unwrap();
    for (executed, sidecar) in both.iter().enumerate() {
        until("the sidecar uses the store", async || {
            pay(sidecar.address, "early").await.unwrap().status() == 201
        })
        .await;
        assert!(pay(sidecar.address, "early").await.unwrap().has_status(201).is_replay());
        assert_eq!(ledger.executions("early").len(), executed + 1, "once per store");
        is_healthy_again(sidecar).await;
    }
}

/// A proxy to the server that delays each new connection, and nothing after that.
async fn slow_to_connect(port: u16, takes: Duration) -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let proxy = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                tokio::time::sleep(takes).await;
                if let Ok(mut server) = TcpStream::connect(("127.0.0.1", port)).await {
                    let _ended = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                }
            });
        }
    });
    proxy
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_opens_more_slowly_than_it_answers_is_used() {
    let mut postgres = block_in_place(|| prepared(PostgresOptions::default()));
    let proxy = slow_to_connect(postgres.port(), Duration::from_millis(1500)).await;
    let url = postgres.url().replace(&format!(":{}/", postgres.port()), &format!(":{proxy}/"));
    block_in_place(|| postgres.stop_immediately()).unwrap();
    let (ledger, to) = Ledger::start().await;
    let sidecar = start(to, &url, &[]).await;
    is_degraded(&sidecar).await;
    block_in_place(|| postgres.start_again()).unwrap();
    until("the sidecar uses the store", async || {
        pay(sidecar.address, "early").await.unwrap().status() == 201
    })
    .await;
    assert_eq!(ledger.executions("early").len(), 1);
}
