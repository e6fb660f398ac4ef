//! A rolling restart, and reloads, under load: no request fails.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_servers::{RedisOptions, RedisServer};
use oncegate_testkit::until;
use rustix::process::Signal;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio_rustls::TlsConnector;

use crate::operations::admin;
use crate::protocols::Authority;
use crate::support::{Message, Sidecar, Wire, request, sidecar};

/// A service that counts how often it executed each key, and takes its time.
#[derive(Clone, Default)]
struct Ledger {
    executed: Arc<Mutex<Vec<String>>>,
}

impl Ledger {
    async fn start(&self) -> SocketAddr {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let executed = self.executed.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let executed = executed.clone();
                tokio::spawn(async move {
                    let mut wire = Wire::new(stream);
                    while let Some(head) = wire.try_head().await {
                        let message = wire.body(head).await;
                        let key = message.get("idempotency-key").unwrap_or("none").to_owned();
                        executed.lock().unwrap().push(key);
                        tokio::time::sleep(Duration::from_millis(5)).await;
                        if wire.try_send("HTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok").await.is_err()
                        {
                            return;
                        }
                    }
                });
            }
        });
        address
    }

    fn keys(&self) -> Vec<String> {
        self.executed.lock().unwrap().clone()
    }
}

/// The knowledge of a load balancer about one sidecar. It asks for `/readyz` and, as load balancers do, never sends a request
/// twice.
struct Backend {
    address: SocketAddr,
    admin: SocketAddr,
    is_ready: AtomicBool,
}

/// Clients behind a load balancer, which sends each request to a sidecar that is ready.
struct Balancer {
    backends: Mutex<Vec<Arc<Backend>>>,
    is_over: AtomicBool,
    answered: AtomicUsize,
    failures: Mutex<Vec<String>>,
}

impl Balancer {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            backends: Mutex::default(),
            is_over: AtomicBool::new(false),
            answered: AtomicUsize::new(0),
            failures: Mutex::default(),
        })
    }

    /// Adds a sidecar, and asks for its readiness from now on.
    fn add(self: &Arc<Self>, sidecar: &Sidecar) {
        let (address, admin) = (sidecar.address, sidecar.admin);
        let backend = Arc::new(Backend { address, admin, is_ready: AtomicBool::new(false) });
        self.backends.lock().unwrap().push(backend.clone());
        let this = self.clone();
        tokio::spawn(async move {
            while !this.is_over.load(Ordering::SeqCst) {
                let is_ready = is_ready(backend.admin).await;
                backend.is_ready.store(is_ready, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
    }

    /// The sidecar for the next request.
    fn choose(&self, number: usize) -> Option<SocketAddr> {
        let backends = self.backends.lock().unwrap();
        let ready: Vec<_> = backends.iter().filter(|one| one.is_ready.load(Ordering::SeqCst)).collect();
        ready.get(number % ready.len().max(1)).map(|backend| backend.address)
    }

    /// One client: it sends request after request, and keeps its connections.
    async fn run(self: Arc<Self>, client: usize) {
        let mut connections: Vec<(SocketAddr, Wire)> = Vec::new();
        let mut number = 0;
        while !self.is_over.load(Ordering::SeqCst) {
            number += 1;
            let Some(address) = self.choose(number + client) else {
                self.failures.lock().unwrap().push("no sidecar is ready".to_owned());
                return;
            };
            let kept = connections.iter().position(|(own, _)| *own == address);
            let mut wire = match kept {
                Some(at) => connections.swap_remove(at).1,
                None => match TcpStream::connect(address).await {
                    Ok(stream) => Wire::new(stream),
                    Err(error) => {
                        self.failures.lock().unwrap().push(format!("connect: {error}"));
                        return;
                    }
                },
            };
            let key = format!("Idempotency-Key: {client}-{number}");
            let sent = wire.try_send(request("POST", "/orders", &[&key], "{}")).await;
            let head = wire.try_head().await;
            let (Ok(()), Some(head)) = (sent, head) else {
                self.failures.lock().unwrap().push(format!("no response from {address}, request {number}"));
                return;
            };
            let response: Message = wire.body(head).await;
            if response.status() != 201 {
                self.failures.lock().unwrap().push(format!("{:?} {:?}", response.head, response.body));
                return;
            }
            self.answered.fetch_add(1, Ordering::SeqCst);
            if response.get("connection") != Some("close") {
                connections.push((address, wire));
            }
        }
    }

    fn answered(&self) -> usize {
        self.answered.load(Ordering::SeqCst)
    }

    async fn more(&self, count: usize) {
        let until_then = self.answered() + count;
        until("requests go on", async || {
            self.answered() >= until_then || !self.failures.lock().unwrap().is_empty()
        })
        .await;
    }
}

async fn is_ready(admin: SocketAddr) -> bool {
    let Ok(stream) = TcpStream::connect(admin).await else { return false };
    let mut wire = Wire::new(stream);
    let asked = wire.try_send("GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await;
    asked.is_ok() && wire.try_head().await.is_some_and(|head| head.status() == 200)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_restart_of_two_sidecars_fails_no_request() {
    let server =
        tokio::task::spawn_blocking(|| RedisServer::start(RedisOptions::new()).unwrap()).await.unwrap();
    let ledger = Ledger::default();
    let service = ledger.start().await;
    let start = async || {
        let mut command = sidecar(&format!("http://{service}"));
        command.args(["--authority=ignore", "--shutdown-delay=1s", "--store", &server.url()]);
        Sidecar::run(&mut command).await
    };
    let balancer = Balancer::new();
    let mut sidecars = vec![start().await, start().await];
    for sidecar in &sidecars {
        balancer.add(sidecar);
    }
    until("both are ready", async || {
        balancer.backends.lock().unwrap().iter().all(|backend| backend.is_ready.load(Ordering::SeqCst))
    })
    .await;
    let clients: Vec<_> = (0..8).map(|client| tokio::spawn(balancer.clone().run(client))).collect();
    balancer.more(200).await;
    for _ in 0..2 {
        // The new one first, as a rolling update does.
        let new = start().await;
        balancer.add(&new);
        balancer.more(100).await;
        let mut old = sidecars.remove(0);
        sidecars.push(new);
        old.process.signal(Signal::TERM);
        assert!(old.process.ended().await.success());
        assert!(old.process.error_lines("still running").is_empty());
        balancer.more(100).await;
    }
    balancer.is_over.store(true, Ordering::SeqCst);
    for client in clients {
        client.await.unwrap();
    }
    let failures = balancer.failures.lock().unwrap().clone();
    assert!(failures.is_empty(), "{failures:?} after {} requests", balancer.answered());
    let keys = ledger.keys();
    assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), keys.len(), "a request was executed twice");
    assert_eq!(keys.len(), balancer.answered());
}

#[tokio::test]
async fn a_sidecar_that_stops_asks_clients_to_leave_and_serves_them_until_then() {
    let ledger = Ledger::default();
    let service = ledger.start().await;
    let mut sidecar = Sidecar::start(service, &["--shutdown-delay=3s"]).await;
    let mut wire = sidecar.connect().await;
    let ask = |key: &str| request("POST", "/orders", &[&format!("Idempotency-Key: {key}")], "{}");
    wire.send(ask("1")).await;
    assert_eq!(wire.message().await.has_status(201).get("connection"), None);
    sidecar.process.signal(Signal::TERM);
    until("it is not ready", async || admin(&sidecar, "/readyz").await.status() == 503).await;
    wire.send(ask("2")).await;
    assert_eq!(wire.message().await.has_status(201).get("connection"), Some("close"));
    wire.ends().await;
    // A client that knows of nothing is still served.
    assert_eq!(sidecar.ask(&ask("3")).await.has_status(201).get("connection"), Some("close"));
    assert!(sidecar.process.ended().await.success());
}

/// A sidecar with TLS and a configuration file.
struct Secure {
    directory: tempfile::TempDir,
    sidecar: Sidecar,
    service: SocketAddr,
}

impl Secure {
    fn write(directory: &Path, service: SocketAddr, settings: &str) {
        let text = format!(
            "to = \"http://{service}\"\nstore = \"memory:\"\ntls-cert = \"cert.pem\"\ntls-key = \"key.pem\"\n{settings}"
        );
        fs::write(directory.join("oncegate.toml"), text).unwrap();
    }
}

fn trusting(authorities: &[Authority]) -> TlsConnector {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(CertificateDer::from_pem_file(authority.file("ca.pem")).unwrap()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    TlsConnector::from(Arc::new(config.with_root_certificates(roots).with_no_client_auth()))
}

#[tokio::test(flavor = "multi_thread")]
async fn reloads_of_the_configuration_and_of_the_certificate_under_load_fail_no_request() {
    // Clients trust all of them, as they trust an authority that issues one certificate after the other.
    let authorities = [(); 3].map(|()| Authority::new());
    let ledger = Ledger::default();
    let service = ledger.start().await;
    let directory = tempfile::tempdir().unwrap();
    let renew = |directory: &Path, authority: &Authority| {
        for file in ["cert.pem", "key.pem"] {
            fs::copy(authority.file(file), directory.join(file)).unwrap();
        }
    };
    renew(directory.path(), &authorities[0]);
    Secure::write(directory.path(), service, "");
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(["proxy", "--listen=127.0.0.1:0", "--admin=127.0.0.1:0", "--threads=2", "--config"]);
    command.arg(directory.path().join("oncegate.toml"));
    let sidecar = Sidecar::run(&mut command).await;
    let world = Secure { directory, sidecar, service };

    let (is_over, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let connector = trusting(&authorities);
    let clients: Vec<_> = (0..4)
        .map(|client| {
            let (is_over, answered, connector) = (is_over.clone(), answered.clone(), connector.clone());
            let address = world.sidecar.address;
            tokio::spawn(async move {
                let mut number = 0;
                while !is_over.load(Ordering::SeqCst) {
                    let stream = TcpStream::connect(address).await.unwrap();
                    let name = ServerName::try_from("localhost").unwrap();
                    let mut wire = Wire::new(connector.connect(name, stream).await.unwrap());
                    // Connections of some requests: old ones live over reloads, and new ones begin with them.
                    for _ in 0..20 {
                        number += 1;
                        let key = format!("Idempotency-Key: {client}-{number}");
                        wire.send(request("POST", "/orders", &[&key], "{}")).await;
                        wire.message().await.has_status(201);
                        answered.fetch_add(1, Ordering::SeqCst);
                    }
                }
            })
        })
        .collect();
    let more = async |count: usize| {
        let until_then = answered.load(Ordering::SeqCst) + count;
        until("requests go on", async || {
            answered.load(Ordering::SeqCst) >= until_then || clients.iter().any(|client| client.is_finished())
        })
        .await;
    };
    more(100).await;
    for round in 0..6 {
        let reloads = world.sidecar.process.error_lines("the configuration was reloaded").len();
        Secure::write(world.directory.path(), world.service, &format!("retention = \"{}h\"\n", round + 1));
        world.sidecar.process.signal(Signal::HUP);
        until("it is reloaded", async || {
            world.sidecar.process.error_lines("the configuration was reloaded").len() > reloads
        })
        .await;
        more(60).await;
    }
    for authority in &authorities[1..] {
        let renewals = world.sidecar.process.error_lines("the certificate was replaced").len();
        renew(world.directory.path(), authority);
        until("the new certificate is used", async || {
            world.sidecar.process.error_lines("the certificate was replaced").len() > renewals
        })
        .await;
        more(100).await;
    }
    is_over.store(true, Ordering::SeqCst);
    for client in clients {
        // A request that failed has failed its task.
        client.await.unwrap();
    }
    let keys = ledger.keys();
    assert_eq!(keys.len(), answered.load(Ordering::SeqCst));
    assert_eq!(keys.iter().collect::<BTreeSet<_>>().len(), keys.len());
}
