//! The admin address under attack: what clients do that connect, send slowly, or do not read, on one address and on many.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use oncegate_testkit::until;
use rustix::process::Signal;
use serde_json::Value;
use tokio::net::TcpSocket;

use crate::support::{Message, Service, Sidecar, Wire, ask, request, sidecar, within};
use crate::{KEY, OK};

/// More than the admin address has places for.
const ATTACKERS: u32 = 500;

/// A connection from this address of the machine to the admin address, whose client takes little at a time.
async fn connect(from: u32, to: SocketAddr) -> Wire {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    socket.bind(SocketAddr::new(IpAddr::V4(Ipv4Addr::from_bits(from)), 0)).unwrap();
    Wire::new(within("a connection", socket.connect(to)).await.unwrap())
}

const LOOPBACK: u32 = 0x7f00_0001;

/// Every path of the admin address but those that need no token.
const PATHS: [(&str, &str); 31] = [
    ("GET", "/v1/keys"),
    ("GET", "/v1/keys/000000"),
    ("GET", "/v1/keys/000000?body=true"),
    ("GET", "/v1/keys/000000/timeline"),
    ("POST", "/v1/keys/find"),
    ("POST", "/v1/keys/tag"),
    ("POST", "/v1/keys/forget"),
    ("POST", "/v1/keys/000000/resolve"),
    ("POST", "/v1/keys/000000/release"),
    ("GET", "/v1/audit"),
    ("GET", "/v1/seal"),
    ("GET", "/v1/seal/usage"),
    ("POST", "/v1/seal/reseal"),
    ("GET", "/v1/dead-letters"),
    ("GET", "/v1/outbox"),
    ("GET", "/v1/summary"),
    ("GET", "/v1/misuse"),
    ("GET", "/v1/activity"),
    ("GET", "/v1/backup"),
    ("GET", "/v1/clock"),
    ("POST", "/v1/clock/accept"),
    ("POST", "/v1/compact"),
    ("GET", "/v1/id-secret"),
    ("POST", "/v1/id-secret/restore"),
    ("GET", "/v1/log-level"),
    ("PUT", "/v1/log-level"),
    ("POST", "/metrics"),
    ("GET", "/metrics/"),
    ("GET", "/metrics/x"),
    ("GET", "/%6Detrics"),
    ("GET", "//metrics"),
];

/// A token for Prometheus opens the metrics, and nothing that an operator has. A reload replaces it.
#[tokio::test]
async fn the_token_for_metrics_opens_the_metrics_and_nothing_else() {
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("metrics-token");
    std::fs::write(&file, "a-token-for-metrics\n").unwrap();
    let mut command = sidecar(&format!("http://{}", service.address));
    command.args(["--store=memory:", &format!("--metrics-token-file={}", file.display())]);
    let mut sidecar = Sidecar::run(command.env("ONCEGATE_ADMIN_TOKEN", "the-token-of-operators")).await;
    let with = async |token: &str, method: &str, path: &str| {
        let fields = [
            &format!("Authorization: Bearer {token}"),
            "Connection: close",
            "Content-Type: application/json",
        ];
        ask(sidecar.admin, &request(method, path, &fields, if method == "GET" { "" } else { "{}" })).await
    };
    let status = async |token: &str, method: &str, path: &str| with(token, method, path).await.status();
    let metrics = with("a-token-for-metrics", "GET", "/metrics").await;
    assert!(metrics.has_status(200).text().contains("oncegate_build_info"));
    for (method, path) in PATHS {
        assert_eq!(status("a-token-for-metrics", method, path).await, 401, "{method} {path}");
    }
    // Nor does it log in to the dashboard, whose pages need a session or the token of operators.
    for path in ["/", "/keys", "/audit", "/playground"] {
        let page = with("a-token-for-metrics", "GET", path).await;
        assert!(page.status() != 200, "{path}: {}", page.text());
    }
    let origin = format!("Origin: http://{}", sidecar.admin);
    let form = ["Content-Type: application/x-www-form-urlencoded", origin.as_str(), "Connection: close"];
    let login = request("POST", "/login", &form, "token=a-token-for-metrics&next=/");
    let login = ask(sidecar.admin, &login.replace("orders.test", &sidecar.admin.to_string())).await;
    assert!(login.get("set-cookie").is_none() && login.status() != 303, "{login:?}");
    // Operators may read them, too, and strangers may not.
    assert_eq!(status("the-token-of-operators", "GET", "/metrics").await, 200);
    assert_eq!(status("the-token-of-operators", "GET", "/v1/keys").await, 200);
    assert_eq!(status("another-token-that-is", "GET", "/metrics").await, 401);
    assert_eq!(ask(sidecar.admin, &get("/metrics")).await.status(), 401);

    std::fs::write(&file, "another-one-for-metrics\n").unwrap();
    sidecar.process.signal(Signal::HUP);
    sidecar.process.logs("the configuration was reloaded").await;
    let with = async |token: &str| {
        let fields = [format!("Authorization: Bearer {token}"), "Connection: close".to_owned()];
        ask(sidecar.admin, &request("GET", "/metrics", &[&fields[0], &fields[1]], "")).await.status()
    };
    assert_eq!((with("a-token-for-metrics").await, with("another-one-for-metrics").await), (401, 200));
}

/// Asks for the health all the time, from the first address, until it is dropped. Each answer must come before the first limit
/// of a blocked connection.
struct Prober {
    is_over: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<u64>,
}

/// The answers that a flood may get while a probe waits: each of its clients has some dozens of turns.
const MOST_BEFORE_A_PROBE: u64 = 3000;

impl Prober {
    /// `flood` counts the answers that others get meanwhile, if they get any.
    fn start(to: SocketAddr, flood: Arc<AtomicU64>) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let stop = is_over.clone();
        let task = tokio::spawn(async move {
            let mut probes = 0;
            while !stop.load(Ordering::SeqCst) {
                for path in ["/livez", "/readyz", "/metrics"] {
                    let (since, before) = (Instant::now(), flood.load(Ordering::SeqCst));
                    let mut wire = connect(LOOPBACK, to).await;
                    wire.send(get(path)).await;
                    wire.message().await.has_status(200);
                    let took = since.elapsed();
                    // A blocked address would answer after ten seconds or more, when its first limit ends a connection. On a
                    // busy machine a flood may take as long, but has few answers then.
                    let others = flood.load(Ordering::SeqCst) - before;
                    let is_in_turn = (1..MOST_BEFORE_A_PROBE).contains(&others);
                    assert!(
                        took < Duration::from_secs(9) || is_in_turn,
                        "{path} took {took:?}, and {others} others came before"
                    );
                    probes += 1;
                }
            }
            probes
        });
        Self { is_over, task }
    }

    async fn end(self, at_least: u64) {
        self.is_over.store(true, Ordering::SeqCst);
        let probes = self.task.await.unwrap();
        assert!(probes >= at_least, "{probes}");
    }
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")
}

/// Has all attackers connect and send this, from one address or from as many as there are attackers, while health is probed.
async fn attack(sidecar: &Sidecar, from_many: bool, sent: &str) -> Vec<Wire> {
    let prober = Prober::start(sidecar.admin, Arc::default());
    let mut wires = Vec::new();
    for number in 0..ATTACKERS {
        let mut wire = connect(LOOPBACK + if from_many { number } else { 0 }, sidecar.admin).await;
        // It may have been closed for another one already.
        let _closed = wire.try_send(sent).await;
        wires.push(wire);
    }
    // They hold on, while more probes are answered.
    tokio::time::sleep(Duration::from_millis(300)).await;
    prober.end(3).await;
    let from = if from_many { LOOPBACK + 9999 } else { LOOPBACK };
    let mut operator = connect(from, sidecar.admin).await;
    operator.send(get("/v1/log-level")).await;
    let answer = operator.message().await;
    assert!([200, 503].contains(&answer.status()), "{answer:?}");
    wires
}

async fn attack_from_everywhere(sidecar: &Sidecar, sent: &str) {
    for from_many in [false, true] {
        attack(sidecar, from_many, sent).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn health_is_answered_while_hundreds_connect_and_send_nothing_or_little() {
    let service = Service::new().await.answers(OK);
    let mut sidecar = Sidecar::start(service.address, &[]).await;
    for sent in [
        "",
        "GET /v1/key",
        "POST /v1/keys/find HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n{",
        "POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\ntoken",
    ] {
        attack_from_everywhere(&sidecar, sent).await;
    }
    let warning = "the admin address has as many connections as it may have";
    sidecar.process.logs(warning).await;
    let warned = sidecar.process.error_lines(warning);
    assert_eq!(warned.len(), 1, "{warned:?}");
    crate::operations::admin(&sidecar, "/v1/summary").await.has_status(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn health_is_answered_while_hundreds_take_live_feeds() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &[]).await;
    attack_from_everywhere(&sidecar, &get("/v1/activity")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn health_is_answered_while_hundreds_do_not_read_a_large_response() {
    // More than the kernel keeps for a client that does not read.
    let body = "x".repeat(4_000_000);
    let large = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let service = Service::new().await.answers(String::leak(large));
    let sidecar = Sidecar::start(service.address, &["--max-response-body=8MiB"]).await;
    sidecar.ask(&request("POST", "/orders", &[KEY], "{}")).await.has_status(200);
    let records = crate::operations::admin(&sidecar, "/v1/keys").await.has_status(200).json();
    let record = records["records"][0]["record"].as_str().unwrap().to_owned();
    let path = format!("/v1/keys/{record}?body=true");
    let mut reader = connect(LOOPBACK, sidecar.admin).await;
    reader.send(get(&path)).await;
    assert!(reader.message().await.has_status(200).body.len() > 4_000_000);
    attack_from_everywhere(&sidecar, &get(&path)).await;
    // An operator gets the place of a client that does not read.
    let wires = attack(&sidecar, false, &get(&path)).await;
    until("an operator is answered", async || {
        crate::operations::admin(&sidecar, "/v1/summary").await.status() == 200
    })
    .await;
    drop(wires);
}

/// The bytes of a response that goes on, up to its end.
async fn ends(mut wire: Wire) -> Vec<u8> {
    within("the end of a response", wire.raw_rest()).await
}

const FIRST: &str = "the-first-token-0";
const SECOND: &str = "the-second-token-";

async fn with_token(sidecar: &Sidecar, path: &str, token: &str) -> (Wire, Message) {
    let mut wire = Wire::connect(sidecar.admin).await;
    wire.send(format!("GET {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {token}\r\n\r\n")).await;
    let head = wire.head().await;
    (wire, Message::of(head))
}

#[tokio::test]
async fn a_feed_and_a_backup_end_when_their_token_is_replaced() {
    let body = "x".repeat(900_000);
    let large = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let service = Service::new().await.answers(String::leak(large));
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    std::fs::write(&file, FIRST).unwrap();
    let store = format!("--store={}", directory.path().join("store").display());
    let flag = format!("--admin-token-file={}", file.display());
    let sidecar = Sidecar::start(service.address, &[&store, &flag]).await;
    for key in 0..12 {
        let key = format!("Idempotency-Key: {key}");
        sidecar.ask(&request("POST", "/orders", &[&key], "{}")).await.has_status(200);
    }
    let reload = async |says: &str| {
        let before = sidecar.process.error_lines(says).len();
        sidecar.process.signal(Signal::HUP);
        until("it is reloaded", async || sidecar.process.error_lines(says).len() > before).await;
    };
    let (mut feed, head) = with_token(&sidecar, "/v1/activity", FIRST).await;
    head.has_status(200);
    feed.chunk().await;
    let (backup, head) = with_token(&sidecar, "/v1/backup", FIRST).await;
    let length: usize = head.has_status(200).get("content-length").unwrap().parse().unwrap();
    // A reload with the same token ends nothing.
    const RELOADED: &str = "the configuration was reloaded";
    reload(RELOADED).await;
    sidecar.ask(&request("POST", "/orders", &[KEY], "{}")).await.has_status(200);
    let (line, _) = feed.chunk().await;
    assert!(serde_json::from_slice::<Value>(&line).unwrap()["outcome"] == "executed", "{line:?}");

    std::fs::write(&file, SECOND).unwrap();
    reload(RELOADED).await;
    let rest = ends(feed).await;
    assert!(!rest.ends_with(b"0\r\n\r\n"), "a part is not the whole");
    assert!(ends(backup).await.len() < length, "the backup is not whole");
    assert_eq!(with_token(&sidecar, "/v1/activity", FIRST).await.1.status(), 401);
    let (feed, head) = with_token(&sidecar, "/v1/activity", SECOND).await;
    head.has_status(200);
    drop(feed);
}

#[tokio::test]
async fn a_feed_without_a_token_ends_when_there_is_one() {
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let [config, token] = ["oncegate.toml", "token"].map(|name| directory.path().join(name));
    let to = format!("to = \"http://{}\"\nstore = \"memory:\"\n", service.address);
    std::fs::write(&config, &to).unwrap();
    std::fs::write(&token, FIRST).unwrap();
    let mut command = sidecar(&format!("http://{}", service.address));
    let sidecar = Sidecar::run(command.arg(format!("--config={}", config.display()))).await;
    let mut feed = Wire::connect(sidecar.admin).await;
    feed.send(get("/v1/activity")).await;
    assert_eq!(feed.head().await.status(), 200);
    std::fs::write(&config, format!("{to}admin-token-file = {:?}\n", token.display().to_string())).unwrap();
    sidecar.process.signal(Signal::HUP);
    ends(feed).await;
    assert_eq!(ask(sidecar.admin, &get("/v1/summary")).await.status(), 401);
}

#[tokio::test]
async fn the_lines_about_operators_are_logged_at_every_level() {
    let service = Service::new().await;
    let mut command = sidecar(&format!("http://{}", service.address));
    command.args(["--store=memory:", "--upstream-timeout=100ms"]).env("ONCEGATE_LOG", "off");
    let sidecar = Sidecar::run(&mut command).await;
    let problem = sidecar.ask(&request("POST", "/orders", &[KEY], "{}")).await;
    let record = problem.json()["instance"].as_str().unwrap().rsplit(':').next().unwrap().to_owned();
    let send = async |method: &str, path: &str, body: &str| {
        let fields = ["Content-Type: application/json", "Connection: close", "Oncegate-Actor: anna"];
        let text = request(method, path, &fields, body).replace("orders.test", "localhost");
        ask(sidecar.admin, &text).await.has_status(200);
    };
    for level in ["off", "oncegate=off", "oncegate::operator=off", "oncegate::operator=error,off"] {
        send("PUT", "/v1/log-level", &format!("{{\"level\":\"{level}\"}}")).await;
        let before = sidecar.process.error_lines("an operator changed a record").len();
        let resolve = r#"{"outcome":"completed","status":201,"reason":"in the ledger"}"#;
        send("POST", &format!("/v1/keys/{record}/resolve"), resolve).await;
        send("POST", &format!("/v1/keys/{record}/park"), r#"{"reason":"a slip"}"#).await;
        until("both are logged", async || {
            sidecar.process.error_lines("an operator changed a record").len() == before + 2
        })
        .await;
        until("so is the change of the level", async || {
            !sidecar.process.error_lines(&format!("filter=\"{level}\"")).is_empty()
        })
        .await;
    }
    // Nothing else is logged.
    assert_eq!(sidecar.process.error_lines("the outcome of an operation is unknown"), [""; 0]);
}

#[tokio::test]
async fn every_response_is_private_and_of_its_own_type_and_origin() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &[]).await;
    for (path, status) in [
        ("/livez", 200),
        ("/readyz", 200),
        ("/metrics", 200),
        ("/v1/keys", 200),
        ("/v1/keys/000000", 404),
        ("/v1/audit", 200),
        ("/v1/summary", 200),
        ("/v1/misuse", 200),
        ("/v1/log-level", 200),
        ("/v1/seal", 200),
        ("/v1/backup", 501),
        ("/v1/dead-letters", 404),
        ("/v1/none", 404),
        ("/none", 404),
        ("/", 200),
    ] {
        let answer = crate::operations::admin(&sidecar, path).await;
        assert_eq!(answer.status(), status, "{path}");
        assert_eq!(answer.get("x-content-type-options"), Some("nosniff"), "{path}");
        assert_eq!(answer.get("cross-origin-resource-policy"), Some("same-origin"), "{path}");
        assert_eq!(answer.get("cache-control"), Some("no-store"), "{path}");
    }
    // Files of the dashboard have their content in their name, and nothing private in it.
    let page = crate::operations::admin(&sidecar, "/").await;
    let (_, rest) = page.text().split_once("href=\"/assets/").unwrap();
    let name = rest.split('"').next().unwrap();
    let file = crate::operations::admin(&sidecar, &format!("/assets/{name}")).await;
    assert!(file.get("cache-control").unwrap().contains("immutable"), "{:?}", file.get("cache-control"));
    assert_eq!(file.get("x-content-type-options"), Some("nosniff"));
}

/// These requests need no token. Each connection sends them as fast as it can, and reads the responses.
#[tokio::test(flavor = "multi_thread")]
async fn health_is_answered_while_clients_send_health_checks_without_a_pause() {
    // More than one client may have. More of them would only keep this process busy, in which the probes wait, too.
    const CONNECTIONS: u32 = 72;
    let service = Service::new().await.answers(OK);
    for from_many in [false, true] {
        let sidecar = Sidecar::start(service.address, &[]).await;
        let answered = Arc::new(AtomicU64::new(0));
        let mut floods = Vec::new();
        for number in 0..CONNECTIONS {
            let address = LOOPBACK + if from_many { number } else { 0 };
            // A page of metrics costs as much as fifty other answers. Fifty of them for each client would keep the processors
            // busy for seconds, for the probes and for all other tests, and would show no more.
            let (path, at_once) = [("/livez", 50), ("/readyz", 50), ("/metrics", 2)][number as usize % 3];
            let (to, answered) = (sidecar.admin, answered.clone());
            floods.push(tokio::spawn(async move {
                // A connection is closed for another one now and then, and the client connects again.
                loop {
                    let mut wire = connect(address, to).await;
                    while wire.try_send(get(path).repeat(at_once)).await.is_ok() {
                        let mut count = 0;
                        while count < at_once {
                            let Some(head) = wire.try_head().await else { break };
                            let response = wire.body(head).await;
                            assert_eq!(response.status(), 200, "{}", response.text());
                            count += 1;
                            answered.fetch_add(1, Ordering::SeqCst);
                        }
                        if count < at_once {
                            break;
                        }
                    }
                }
            }));
        }
        let prober = Prober::start(sidecar.admin, answered.clone());
        tokio::time::sleep(Duration::from_secs(3)).await;
        prober.end(3).await;
        floods.iter().for_each(tokio::task::JoinHandle::abort);
        assert!(answered.load(Ordering::SeqCst) > 0, "they are answered, too");
    }
}
