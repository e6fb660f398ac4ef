//! SIGHUP, renewed certificates, and the time between "not ready" and "closed".

use std::fs;
use std::io::Write as _;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use oncegate_testkit::until;
use rustix::process::Signal;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::process::Command;

use crate::operations::{admin, series};
use crate::protocols::Authority;
use crate::support::{Message, Service, Sidecar, Wire, ask, request, within};
use crate::{KEY, OK};

const REFUSED: &str = "oncegate_reload_refused{subject=\"configuration\"}";

/// A sidecar with a configuration file that a test can change.
struct World {
    directory: tempfile::TempDir,
    sidecar: Sidecar,
    service: std::net::SocketAddr,
}

impl World {
    async fn start(service: std::net::SocketAddr, settings: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("oncegate.toml");
        fs::write(&path, config(service, settings)).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command.args(["proxy", "--listen=127.0.0.1:0", "--admin=127.0.0.1:0", "--threads=2", "--config"]);
        let sidecar = Sidecar::run(command.arg(&path)).await;
        Self { directory, sidecar, service }
    }

    /// Writes the file, sends the signal, and waits until the sidecar has logged this text once more.
    async fn reload(&mut self, settings: &str, says: &str) {
        let before = self.sidecar.process.error_lines(says).len();
        let path = self.directory.path().join("oncegate.toml");
        fs::write(path, config(self.service, settings)).unwrap();
        self.sidecar.process.signal(Signal::HUP);
        until(format!("it says {says:?}"), async || self.sidecar.process.error_lines(says).len() > before)
            .await;
    }
}

/// The page of `oncegate top`.
async fn top(sidecar: &Sidecar) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(["top", "--once", "--admin", &sidecar.admin.to_string()]);
    let output = within("a summary", command.output()).await.unwrap();
    String::from_utf8(output.stdout).unwrap()
}

fn config(service: std::net::SocketAddr, settings: &str) -> String {
    format!("to = \"http://{service}\"\nstore = \"memory:\"\n{settings}")
}

const RELOADED: &str = "the configuration was reloaded";
const NOT_RELOADED: &str = "the configuration was not reloaded";
const REQUIRED: &str = "[[route]]\npath = \"/orders\"\nrequire-key = true\n";

#[tokio::test]
async fn a_reload_that_makes_keys_new_says_so() {
    let service = Service::new().await.answers(OK);
    let profile = |rest: &str| format!("title = \"Ours\"\n{rest}");
    let settings = "[[route]]\npath = \"/orders/{id}\"\nprofile = \"./ours.toml\"\n";
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ours.toml");
    fs::write(&path, profile("")).unwrap();
    let settings = settings.replace("./ours.toml", path.to_str().unwrap());
    let mut world = World::start(service.address, &settings).await;
    const CHANGED: &str = "the reload changed how requests of one operation are recognised";
    // A longer retention, and the same settings again, change nothing of it.
    world.reload(&format!("retention = \"2d\"\n{settings}"), RELOADED).await;
    world.reload(&settings, RELOADED).await;
    assert!(world.sidecar.process.error_lines(CHANGED).is_empty());
    // The file of the profile alone has changed.
    fs::write(&path, profile("key-scope = \"caller\"\nkey-syntax = \"raw\"\n")).unwrap();
    world.reload(&settings, RELOADED).await;
    let lines = world.sidecar.process.error_lines(CHANGED);
    let routes = ["PATCH /orders/{id}: key-syntax, key-scope", "POST /orders/{id}: key-syntax, key-scope"];
    assert!(
        lines.len() == 2 && routes.iter().all(|route| lines.iter().any(|line| line.contains(route))),
        "{lines:?}"
    );
    // The route is gone, and other values apply to its requests.
    world.reload("scope = \"single-tenant\"\n", RELOADED).await;
    let lines = world.sidecar.process.error_lines(CHANGED);
    assert!(lines.iter().any(|line| line.contains("requests that match no route: scope")), "{lines:?}");
    assert!(lines.iter().any(|line| line.contains("POST /orders/{id}: scope, key-syntax")), "{lines:?}");
}

#[tokio::test]
async fn a_reload_changes_routes_for_open_connections_too() {
    let service = Service::new().await.answers(OK);
    let mut world = World::start(service.address, "").await;
    let plain = request("POST", "/orders", &[], "{}");
    let keyed = request("POST", "/orders", &[KEY], "{}");
    let mut open = world.sidecar.connect().await;
    open.send(&plain).await;
    open.message().await.has_status(200);
    world.sidecar.ask(&keyed).await.has_status(200);

    world.reload(REQUIRED, RELOADED).await;
    // The threads apply the configuration one after the other.
    let mut response = Message::default();
    until("the route is in force", async || {
        open.send(&plain).await;
        response = open.message().await;
        response.status() != 200
    })
    .await;
    response.is_problem(400, "key-missing");
    until("the route is in force on all threads", async || {
        let mut statuses = Vec::new();
        for _ in 0..8 {
            statuses.push(world.sidecar.ask(&plain).await.status());
        }
        statuses.iter().all(|status| *status == 400)
    })
    .await;
    assert!(world.sidecar.ask(&keyed).await.has_status(200).is_replay(), "the store stays the same");
    assert_eq!(series(&world.sidecar, REFUSED).await, Some(0.0));

    world.reload("", RELOADED).await;
    until("the route is no longer in force", async || world.sidecar.ask(&plain).await.status() == 200).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hangup_signal_during_the_start_does_not_end_the_sidecar() {
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("oncegate.toml");
    let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(made.success());
    let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(["proxy", "--listen=127.0.0.1:0", "--admin=127.0.0.1:0", "--config"]).arg(&path);
    let mut process = crate::support::Process::start(&mut command);
    let text = config(service.address, "");
    // The test can open the pipe as soon as the sidecar reads its configuration.
    let open = async |path: &std::path::Path| {
        let path = path.to_owned();
        let open = tokio::task::spawn_blocking(move || fs::File::create(path).unwrap());
        crate::support::within("the sidecar to read the configuration", open).await.unwrap()
    };
    let mut file = open(&path).await;
    process.signal(Signal::HUP);
    file.write_all(text.as_bytes()).unwrap();
    drop(file);
    assert!(process.first_line().await.contains("listening on"));
    // The signal counts: the sidecar reads the configuration again.
    open(&path).await.write_all(text.as_bytes()).unwrap();
    process.logs(RELOADED).await;
}

#[tokio::test]
async fn an_invalid_configuration_changes_nothing() {
    let service = Service::new().await.answers(OK);
    let mut world = World::start(service.address, REQUIRED).await;
    let plain = request("POST", "/orders", &[], "{}");
    for (wrong, why) in [
        (
            "[[route]]\npath = \"/orders\"\nrequire-kye = true\n",
            "oncegate.toml:5:1: no such setting `require-kye`",
        ),
        ("store-timeout = \"1s\"\n", "store-timeout: only a restart can change this"),
        ("tls-cert = \"none.pem\"\ntls-key = \"none.pem\"\n", "tls-cert: only a restart can change this"),
    ] {
        world.reload(wrong, NOT_RELOADED).await;
        assert_eq!(world.sidecar.process.error_lines(why).len(), 1, "{why}");
        world.sidecar.ask(&plain).await.is_problem(400, "key-missing");
        assert_eq!(series(&world.sidecar, REFUSED).await, Some(1.0));
        // An operator sees it without the log.
        let ready = admin(&world.sidecar, "/readyz").await.text().to_owned();
        assert!(
            ready.contains("ready\nnote: the configuration was not reloaded") && ready.contains(why),
            "{ready}"
        );
        let page = admin(&world.sidecar, "/").await.text().to_owned();
        let warnings = page.split("Warnings about the configuration").nth(1).unwrap();
        assert!(warnings.contains("was not reloaded") && !warnings.contains("There are none"), "{warnings}");
        let top = top(&world.sidecar).await;
        assert!(top.contains("! the configuration was not reloaded"), "{top}");
    }
    let refused = "oncegate_reloads_total{subject=\"configuration\",result=\"refused\"}";
    assert_eq!(series(&world.sidecar, refused).await, Some(3.0));
    world.reload("", RELOADED).await;
    assert_eq!(series(&world.sidecar, REFUSED).await, Some(0.0));
    assert_eq!(admin(&world.sidecar, "/readyz").await.text(), "ready\n");
    assert!(!top(&world.sidecar).await.contains("not reloaded"));
    until("the new configuration is in force", async || world.sidecar.ask(&plain).await.status() == 200)
        .await;
}

#[tokio::test]
async fn a_running_request_survives_a_reload_and_the_service_may_move() {
    let service = Service::new().await;
    let mut world = World::start(service.address, "").await;
    let asked = request("POST", "/orders", &[KEY], "{}");
    let mut client = world.sidecar.connect().await;
    client.send(&asked).await;
    let mut wire = service.accept().await;
    wire.message().await;
    let moved = Service::new().await.answers(OK);
    world.service = moved.address;
    world.reload("", RELOADED).await;
    wire.send("HTTP/1.1 201 Created\r\nContent-Length: 5\r\n\r\nfirst").await;
    assert_eq!(client.message().await.has_status(201).text(), "first");
    let replay = world.sidecar.ask(&asked).await;
    assert!(replay.has_status(201).is_replay());
    until("the new address is asked", async || {
        let other = format!("Idempotency-Key: intent-{}", moved.requests() + 2);
        let asked = request("POST", "/other", &[&other], "{}");
        // A thread that is late may still send the request to the old service, which never answers.
        let response = tokio::time::timeout(Duration::from_millis(500), world.sidecar.ask(&asked));
        response.await.is_ok_and(|response| response.status() == 200)
    })
    .await;
}

/// At the limit of connections, each thread has accepted one that waits for a place.
#[tokio::test]
async fn a_connection_that_waits_for_a_place_survives_a_reload() {
    const SETTINGS: &str = "max-connections = 4\n";
    let service = Service::new().await.answers(OK);
    let mut world = World::start(service.address, SETTINGS).await;
    let plain = request("GET", "/", &[], "");
    let mut open = Vec::new();
    for _ in 0..4 {
        let mut wire = world.sidecar.connect().await;
        wire.send(&plain).await;
        wire.message().await.has_status(200);
        open.push(wire);
    }
    let mut waiting = Vec::new();
    for _ in 0..4 {
        let mut wire = world.sidecar.connect().await;
        wire.send(&plain).await;
        waiting.push(wire);
    }
    world.sidecar.process.logs("max-connections is reached").await;
    for _ in 0..3 {
        world.reload(SETTINGS, RELOADED).await;
        for wire in &mut waiting {
            wire.stays_silent().await;
        }
    }
    drop(open);
    for wire in &mut waiting {
        wire.message().await.has_status(200);
    }
}

#[tokio::test]
async fn a_reload_changes_the_admin_token() {
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    fs::write(&file, "the-first-token-0").unwrap();
    let flag = format!("--admin-token-file={}", file.display());
    let mut sidecar = Sidecar::start(service.address, &[&flag]).await;
    let ask_with = async |sidecar: &Sidecar, token: &str| {
        let fields = [&*format!("Authorization: Bearer {token}"), "Connection: close"];
        ask(sidecar.admin, &request("GET", "/v1/keys", &fields, "")).await.status()
    };
    assert_eq!(ask_with(&sidecar, "the-first-token-0").await, 200);
    fs::write(&file, "the-second-token-").unwrap();
    sidecar.process.signal(Signal::HUP);
    sidecar.process.logs(RELOADED).await;
    assert_eq!(ask_with(&sidecar, "the-first-token-0").await, 401);
    assert_eq!(ask_with(&sidecar, "the-second-token-").await, 200);
    fs::write(&file, "short").unwrap();
    sidecar.process.signal(Signal::HUP);
    sidecar.process.logs(NOT_RELOADED).await;
    assert_eq!(ask_with(&sidecar, "the-second-token-").await, 200);
}

#[tokio::test]
async fn a_renewed_certificate_is_used() {
    let (before, after) = (Authority::new(), Authority::new());
    let (cert, key) = (before.file("cert.pem"), before.file("key.pem"));
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &["--tls-cert", &cert, "--tls-key", &key]).await;
    let works = async |authority: &Authority| {
        let stream = TcpStream::connect(sidecar.address).await.unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        authority.client(&[]).connect(name, stream).await.ok().map(Wire::new)
    };
    let mut open = works(&before).await.expect("a handshake");
    assert!(works(&after).await.is_none());

    const CERTIFICATE: &str = "oncegate_reload_refused{subject=\"certificate\"}";
    // In the middle of a renewal: the new certificate with the old key.
    fs::copy(after.file("cert.pem"), &cert).unwrap();
    until("the mismatched files are refused", async || series(&sidecar, CERTIFICATE).await == Some(1.0))
        .await;
    until("the refusal is logged", async || {
        sidecar.process.error_lines("the previous certificate stays in use").len() == 1
    })
    .await;
    assert!(works(&before).await.is_some());
    // An orchestrator replaces the file in the same way.
    let swapped = format!("{key}.new");
    fs::copy(after.file("key.pem"), &swapped).unwrap();
    fs::rename(&swapped, &key).unwrap();
    until("the new certificate is served", async || works(&after).await.is_some()).await;
    assert_eq!(series(&sidecar, CERTIFICATE).await, Some(0.0));
    open.send(request("GET", "/", &[], "")).await;
    open.message().await.has_status(200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_is_checked_against_its_dates() {
    const END: &str = "oncegate_tls_certificate_not_after_seconds";
    const REFUSED: &str = "oncegate_reload_refused{subject=\"certificate\"}";
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let today = now();
    let day = |days: i64| today.checked_add_signed(days * 86_400).unwrap();
    let valid = |from, to| Authority::valid(day(from), day(to));
    let check = async |authority: &Authority| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command.args(["check", "--to=http://127.0.0.1:9", "--store=memory:", "--tls-cert"]);
        command.arg(authority.file("cert.pem")).arg("--tls-key").arg(authority.file("key.pem"));
        let said = command.env_clear().output().await.unwrap();
        assert!(said.status.success(), "{said:?}");
        let said = String::from_utf8(said.stdout).unwrap();
        said.lines().find(|line| line.contains("TLS: ")).unwrap().to_owned()
    };
    let (good, old, early) = (valid(-5, 90), valid(-60, -30), valid(2, 90));
    let ending = Authority::valid(day(-80), day(10) - 60);
    assert!(check(&good).await.starts_with("ok    "));
    for (authority, word) in [(&old, "expired at"), (&early, "is not valid before"), (&ending, "renew it")] {
        let line = check(authority).await;
        assert!(line.starts_with("warn  ") && line.contains(word), "{line}");
    }

    let (cert, key) = (ending.file("cert.pem"), ending.file("key.pem"));
    let service = Service::new().await.answers(OK);
    let mut sidecar = Sidecar::start(service.address, &["--tls-cert", &cert, "--tls-key", &key]).await;
    sidecar.process.logs("in less than 10 days: renew it").await;
    let end = |days: i64| Some(day(days) as f64);
    let first_end = Some((day(10) - 60) as f64);
    until("the end of validity is shown", async || series(&sidecar, END).await == first_end).await;
    for (authority, word) in [(&old, "expired at"), (&early, "is not valid before")] {
        let refused = sidecar.process.error_lines("the previous certificate stays in use").len();
        fs::copy(authority.file("cert.pem"), &cert).unwrap();
        fs::copy(authority.file("key.pem"), &key).unwrap();
        until("the certificate is refused", async || {
            let lines = sidecar.process.error_lines("the previous certificate stays in use");
            lines.len() > refused && lines.last().unwrap().contains(word)
        })
        .await;
        assert_eq!(series(&sidecar, REFUSED).await, Some(1.0));
        assert_eq!(series(&sidecar, END).await, first_end);
        sidecar.process.signal(Signal::HUP);
        until("the reload is refused", async || {
            let lines = sidecar.process.error_lines(NOT_RELOADED);
            lines.len() > usize::from(word != "expired at")
        })
        .await;
    }
    fs::copy(good.file("cert.pem"), &cert).unwrap();
    fs::copy(good.file("key.pem"), &key).unwrap();
    until("the renewed certificate is used", async || series(&sidecar, END).await == end(90)).await;
    assert_eq!(series(&sidecar, REFUSED).await, Some(0.0));

    // The certificate is used as soon as it is valid, without another change of the files.
    let soon = Authority::valid(now() + 8, day(80));
    fs::copy(soon.file("cert.pem"), &cert).unwrap();
    fs::copy(soon.file("key.pem"), &key).unwrap();
    until("the certificate is refused", async || series(&sidecar, REFUSED).await == Some(1.0)).await;
    until("the certificate is valid and used", async || series(&sidecar, END).await == end(80)).await;
    assert_eq!(series(&sidecar, REFUSED).await, Some(0.0));

    let plain = Sidecar::start(service.address, &[]).await;
    assert_eq!(series(&plain, END).await, None);
}

#[tokio::test]
async fn the_sidecar_is_not_ready_before_it_closes() {
    let service = Service::new().await.answers(OK);
    let mut sidecar = Sidecar::start(service.address, &["--shutdown-delay=4s"]).await;
    assert_eq!(admin(&sidecar, "/readyz").await.status(), 200);
    let begun = Instant::now();
    sidecar.process.signal(Signal::TERM);
    until("the sidecar is not ready", async || admin(&sidecar, "/readyz").await.status() == 503).await;
    assert_eq!(admin(&sidecar, "/readyz").await.text(), "stopping\n");
    sidecar.ask(&request("POST", "/orders", &[KEY], "{}")).await.has_status(200);
    assert!(begun.elapsed() < Duration::from_secs(4), "a slow machine: {:?}", begun.elapsed());
    until("the sidecar accepts no more connections", async || {
        TcpStream::connect(sidecar.address).await.is_err()
    })
    .await;
    assert!(begun.elapsed() >= Duration::from_secs(4), "{:?}", begun.elapsed());
    assert!(sidecar.process.ended().await.success());
}

#[tokio::test]
async fn a_reload_with_another_service_closes_the_idle_connections_to_the_old_one() {
    const KEPT: &str = "upstream-idle-timeout = \"10m\"\n";
    let (old, new) = (Service::new().await, Service::new().await.answers(OK));
    let mut world = World::start(old.address, KEPT).await;
    let get = request("GET", "/", &[], "");
    let (mut idle, mut busy) = (world.sidecar.connect().await, world.sidecar.connect().await);
    idle.send(&get).await;
    let mut idle_wire = old.accept().await;
    idle_wire.message().await;
    busy.send(&get).await;
    let mut busy_wire = old.accept().await;
    busy_wire.message().await;
    idle_wire.send(OK).await;
    idle.message().await.has_status(200);

    // The same service: its connections are kept.
    world.reload(&format!("retention = \"2d\"\n{KEPT}"), RELOADED).await;
    idle_wire.stays_silent().await;

    world.service = new.address;
    world.reload(KEPT, RELOADED).await;
    idle_wire.ends().await;
    // A request that runs is finished, and its connection is not kept.
    busy_wire.send(OK).await;
    busy.message().await.has_status(200);
    busy_wire.ends().await;
    for client in [&mut idle, &mut busy] {
        client.send(&get).await;
        client.message().await.has_status(200);
    }
    assert_eq!(new.requests(), 2);
}
