//! The alerting rules in `deploy/prometheus`, evaluated by a real Prometheus that scrapes real sidecars under real faults.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use oncegate_servers::{RedisOptions, RedisServer, free_port};
use oncegate_testkit::until;
use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::support::{Service, Sidecar, Wire, ask, request, sidecar};

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

fn deployed(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/prometheus").join(name)
}

async fn promtool(arguments: &[&str], directory: &Path) -> String {
    let ended = Command::new("promtool").args(arguments).current_dir(directory).output().await;
    let ended = ended.expect("promtool is not installed (Debian package: prometheus)");
    let said = String::from_utf8_lossy(&ended.stdout).into_owned() + &String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{arguments:?}: {said}");
    said
}

#[tokio::test]
async fn the_rules_pass_their_own_tests() {
    let directory = deployed("");
    promtool(&["check", "rules", "oncegate.rules.yml"], &directory).await;
    promtool(&["check", "config", "--syntax-only", "prometheus.yml"], &directory).await;
    let said = promtool(&["test", "rules", "oncegate.test.yml"], &directory).await;
    assert!(said.contains("SUCCESS"), "{said}");
    // Each alert has a test.
    let (rules, tests) = (
        fs::read_to_string(deployed("oncegate.rules.yml")),
        fs::read_to_string(deployed("oncegate.test.yml")),
    );
    let names = |text: &str, before: &str| -> BTreeSet<String> {
        let names = text.lines().filter_map(|line| line.trim().strip_prefix(before));
        names.map(str::to_owned).collect()
    };
    let (rules, tests) = (rules.unwrap(), tests.unwrap());
    assert_eq!(names(&rules, "- alert: "), names(&tests, "- alertname: "));
}

/// The sources of all crates, one text for each file.
fn sources() -> Vec<String> {
    let mut left = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("..")];
    let mut texts = Vec::new();
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            match path.is_dir() {
                true if name != "tests" && name != "target" => left.push(path),
                false if name.ends_with(".rs") => texts.push(fs::read_to_string(path).unwrap()),
                _ => {}
            }
        }
    }
    texts
}

/// A new advisory is either in an alert or in this list, with the reason.
#[test]
fn each_advisory_has_an_alert_or_a_reason_for_none() {
    let without = [
        ("clock-behind", "nothing can or has to be done about it"),
        ("less-durable", "OncegateStoreLessDurable compares the promises of a week"),
        ("key-set", "OncegateKeySetUnusable and OncegateKeySetOld have metrics of their own"),
        ("reload", "OncegateReloadRefused has a metric of its own"),
    ];
    let mut names = BTreeSet::from(["clock".to_owned(), "clock-behind".to_owned()]);
    for text in sources() {
        let made = text.split("Advisory::new(").skip(1);
        let made = made.filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next());
        names.extend(made.map(str::to_owned));
    }
    assert!(names.len() >= 12 && names.contains("id-secret"), "{names:?}");
    let rules = fs::read_to_string(deployed("oncegate.rules.yml")).unwrap();
    let alerts = rules.split("oncegate_store_advisory{name=").skip(1);
    let alerts: BTreeSet<_> =
        alerts.flat_map(|rest| rest.split('"').nth(1).unwrap_or_default().split('|')).collect();
    for name in &names {
        let reason = without.iter().find(|(known, _)| known == name);
        assert!(alerts.contains(name.as_str()) != reason.is_some(), "{name}: {alerts:?}");
    }
    for (name, _) in without {
        assert!(names.contains(name), "{name} is no advisory any more");
    }
}

#[tokio::test]
async fn the_page_passes_promtool() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &[]).await;
    sidecar.ask(&request("POST", "/", &["Idempotency-Key: a"], "{}")).await.has_status(200);
    let page =
        ask(sidecar.admin, "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await;
    let mut child = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool is not installed (Debian package: prometheus)");
    let mut input = child.stdin.take().unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut input, &page.body).await.unwrap();
    drop(input);
    let ended = child.wait_with_output().await.unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success() && said.is_empty(), "{said}");
}

/// The rules with all times shortened: what takes minutes takes seconds.
fn shortened(rules: &str) -> String {
    let mut text = String::new();
    for line in rules.lines() {
        let line = match line.trim_start().strip_prefix("for: ") {
            Some(_) => line.split("for: ").next().unwrap_or_default().to_owned() + "for: 1s",
            None => line.to_owned(),
        };
        text.push_str(&line);
        text.push('\n');
    }
    for window in ["[5m]", "[15m]", "[1h]"] {
        text = text.replace(window, "[10s]");
    }
    let shortened = text.replace(") > 600", ") > 1");
    assert!(shortened != text, "the rule for unknown outcomes has another form");
    shortened
}

/// A Prometheus. It is killed when this is dropped.
struct Prometheus {
    _child: Child,
    address: std::net::SocketAddr,
    _directory: TempDir,
}

impl Prometheus {
    /// Scrapes these sidecars every half second. `jobs` are their names, which the alerts have as the label `job`.
    async fn start(sidecars: &[(&str, std::net::SocketAddr)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| directory.path().join(name);
        let rules = fs::read_to_string(deployed("oncegate.rules.yml")).unwrap();
        fs::write(file("rules.yml"), shortened(&rules)).unwrap();
        let mut config = "global:\n  scrape_interval: 500ms\n  scrape_timeout: 400ms\n  evaluation_interval: 500ms\nrule_files: [rules.yml]\nscrape_configs:\n".to_owned();
        for (name, address) in sidecars {
            config.push_str(&format!(
                "  - job_name: oncegate-{name}\n    static_configs:\n      - targets: [\"{address}\"]\n"
            ));
        }
        fs::write(file("prometheus.yml"), config).unwrap();
        promtool(&["check", "config", "prometheus.yml"], directory.path()).await;
        let address = std::net::SocketAddr::from(([127, 0, 0, 1], free_port().unwrap()));
        let log = fs::File::create(file("log")).unwrap();
        let child = Command::new("prometheus")
            .arg("--config.file=prometheus.yml")
            .arg("--storage.tsdb.path=data")
            .arg("--enable-feature=exemplar-storage")
            .arg(format!("--web.listen-address={address}"))
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .expect("prometheus is not installed (Debian package: prometheus)");
        let prometheus = Self { _child: child, address, _directory: directory };
        until("Prometheus is ready", async || prometheus.get("/-/ready").await.is_some()).await;
        prometheus
    }

    async fn get(&self, path: &str) -> Option<Vec<u8>> {
        tokio::net::TcpStream::connect(self.address).await.ok()?;
        let mut wire = Wire::connect(self.address).await;
        wire.try_send(request("GET", path, &["Connection: close"], "")).await.ok()?;
        let head = wire.try_head().await?;
        let message = wire.body(head).await;
        (message.status() == 200).then_some(message.body)
    }

    /// The alerts that fire, each with its job.
    async fn firing(&self) -> BTreeSet<(String, String)> {
        let Some(body) = self.get("/api/v1/alerts").await else { return BTreeSet::new() };
        let answer: serde_json::Value = serde_json::from_slice(&body).unwrap();
        let alerts = answer["data"]["alerts"].as_array().unwrap().clone();
        let label = |alert: &serde_json::Value, name: &str| {
            alert["labels"][name].as_str().unwrap_or_default().to_owned()
        };
        let firing = alerts.iter().filter(|alert| alert["state"] == "firing");
        firing.map(|alert| (label(alert, "alertname"), label(alert, "job"))).collect()
    }

    /// Waits until this alert fires for this sidecar.
    async fn fires(&self, alert: &str, sidecar: &str) {
        let wanted = (alert.to_owned(), format!("oncegate-{sidecar}"));
        until(format!("{alert} fires"), async || self.firing().await.contains(&wanted)).await;
    }

    /// The value of an expression, if there is exactly one.
    async fn value(&self, expression: &str) -> Option<f64> {
        let query =
            expression.replace('{', "%7B").replace('}', "%7D").replace('"', "%22").replace(' ', "%20");
        let body = self.get(&format!("/api/v1/query?query={query}")).await?;
        let answer: serde_json::Value = serde_json::from_slice(&body).ok()?;
        match answer["data"]["result"].as_array()?.as_slice() {
            [one] => one["value"][1].as_str()?.parse().ok(),
            _ => None,
        }
    }
}

/// A certificate that is valid for five days, and its key.
fn ending_certificate(directory: &Path) -> [String; 2] {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut certificate = rcgen::CertificateParams::new(["localhost".to_owned()]).unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let at = |seconds: u64| rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds);
    certificate.not_before = at(now.as_secs() - 60);
    certificate.not_after = at(now.as_secs() + 5 * 86_400);
    let certificate = certificate.self_signed(&key).unwrap();
    let (cert, key_file) = (directory.join("cert.pem"), directory.join("key.pem"));
    fs::write(&cert, certificate.pem()).unwrap();
    fs::write(&key_file, key.serialize_pem()).unwrap();
    [format!("--tls-cert={}", cert.display()), format!("--tls-key={}", key_file.display())]
}

/// A sidecar on a store whose record it cannot replay: it was stored with `before`, and the sidecar runs with `now`.
async fn locked_record(
    service: std::net::SocketAddr,
    store: &Path,
    before: &[&str],
    now: &[&str],
) -> Sidecar {
    let pay = request("POST", "/", &["Idempotency-Key: locked"], "{}");
    let start = async |flags: &[&str]| {
        let mut command = sidecar(&format!("http://{service}"));
        Sidecar::run(command.env("ONCEGATE_STORE", store).args(flags)).await
    };
    let mut first = start(before).await;
    first.ask(&pay).await.has_status(200);
    first.process.signal(rustix::process::Signal::TERM);
    assert!(first.process.ended().await.success());
    start(now).await
}

/// One sidecar for each fault, and one without: its alerts would be false ones.
#[tokio::test(flavor = "multi_thread")]
async fn alerts_fire_under_their_faults_and_not_without() {
    let directory = tempfile::tempdir().unwrap();
    let working = Service::new().await.answers(OK);
    let silent = Service::new().await;
    let away = Service::new().await.address;
    let mut redis = RedisServer::start(RedisOptions::new().with_appendfsync("always")).unwrap();
    let tls = ending_certificate(directory.path());

    let healthy = Sidecar::start(working.address, &[]).await;
    let mut stopped = Sidecar::start(working.address, &[]).await;
    let mut on_redis = sidecar(&format!("http://{}", working.address));
    let on_redis =
        Sidecar::run(on_redis.env("ONCEGATE_STORE", format!("{}?timeout=500ms", redis.url()))).await;
    // Its service answers when the store is gone.
    let slow = Service::new().await;
    let mut waiting = sidecar(&format!("http://{}", slow.address));
    waiting.arg("--drain-timeout=200ms").env("ONCEGATE_STORE", format!("{}?timeout=500ms", redis.url()));
    let mut waiting = Sidecar::run(&mut waiting).await;
    let unknown = Sidecar::start(silent.address, &["--upstream-timeout=200ms"]).await;
    // Its service never answers, so the requests in flight stay until the end of the test.
    let limited = ["--max-in-flight=2", "--max-in-flight-per-caller=2", "--upstream-timeout=1h"];
    let busy = Service::new().await;
    let limited = Sidecar::start(busy.address, &limited).await;
    let unreached = Sidecar::start(away, &[]).await;
    let ending = Sidecar::start(working.address, &[&*tls[0], &*tls[1]]).await;
    let config = directory.path().join("oncegate.toml");
    fs::write(&config, "lease = \"10s\"\n").unwrap();
    let reloaded = Sidecar::start(working.address, &[&*format!("--config={}", config.display())]).await;
    let keys = directory.path().join("seal-keys");
    fs::write(&keys, &*oncegate_seal::SealKey::from_bytes([1; 32]).to_secret_text()).unwrap();
    let sealing = format!("--seal-keys-file={}", keys.display());
    let stores = ["keyless", "strict"].map(|name| directory.path().join(name));
    let keyless = locked_record(working.address, &stores[0], &[&sealing], &[]).await;
    let strict = locked_record(working.address, &stores[1], &[], &[&sealing, "--seal-required"]).await;
    let all = [
        ("keyless", &keyless),
        ("strict", &strict),
        ("healthy", &healthy),
        ("stopped", &stopped),
        ("store", &on_redis),
        ("waiting", &waiting),
        ("unknown", &unknown),
        ("limited", &limited),
        ("unreached", &unreached),
        ("ending", &ending),
        ("reloaded", &reloaded),
    ];
    let prometheus = Prometheus::start(&all.map(|(name, sidecar)| (name, sidecar.admin))).await;
    prometheus.fires("OncegateCertificateEnds", "ending").await;
    for (name, sidecar) in all {
        let value = format!("up{{job=\"oncegate-{name}\"}}");
        until(format!("{name} is scraped"), async || prometheus.value(&value).await == Some(1.0)).await;
        if ["healthy", "store"].contains(&name) {
            sidecar.ask(&request("POST", "/", &["Idempotency-Key: first"], "{}")).await.has_status(200);
        }
    }
    // What is known at the start.
    prometheus.fires("OncegateSealKeyMissing", "keyless").await;
    let known = [("OncegateCertificateEnds", "ending"), ("OncegateSealKeyMissing", "keyless")];
    let known = known.map(|(alert, name)| (alert.to_owned(), format!("oncegate-{name}")));
    assert_eq!(prometheus.firing().await, BTreeSet::from(known));

    let mut client = waiting.connect().await;
    client.send(request("POST", "/", &["Idempotency-Key: waits"], "{}")).await;
    let mut upstream = slow.accept().await;
    upstream.message().await;
    let locked = request("POST", "/", &["Idempotency-Key: locked"], "{}");
    strict.ask(&locked).await.is_problem(503, "response-sealed");
    redis.kill();
    upstream.send(OK).await;
    client.message().await.has_status(200);
    stopped.process.kill().await;
    fs::write(&config, "lease = \"10 parsecs\"\n").unwrap();
    reloaded.process.signal(rustix::process::Signal::HUP);
    unknown
        .ask(&request("POST", "/", &["Idempotency-Key: a"], "{}"))
        .await
        .is_problem(504, "outcome-unknown");
    let mut held = Vec::new();
    for n in 0..2 {
        let mut client = limited.connect().await;
        client.send(request("POST", "/", &[&format!("Idempotency-Key: {n}")], "{}")).await;
        let mut upstream = busy.accept().await;
        upstream.message().await;
        held.push((client, upstream));
    }
    let (unreached_at, limited_at, on_redis_at, healthy_at) =
        (unreached.address, limited.address, on_redis.address, healthy.address);
    let traffic = tokio::spawn(async move {
        for n in 0.. {
            let key = format!("Idempotency-Key: {n}");
            for address in [unreached_at, limited_at, on_redis_at, healthy_at] {
                ask(address, &request("POST", "/", &[&key], "{}")).await;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    for (alert, name) in [
        ("OncegateStoreAway", "store"),
        ("OncegateResultsWaiting", "waiting"),
        ("OncegateDown", "stopped"),
        ("OncegateReloadRefused", "reloaded"),
        ("OncegateOutcomeUnknown", "unknown"),
        ("OncegateLimitNear", "limited"),
        ("OncegateOverloaded", "limited"),
        ("OncegateServiceAway", "unreached"),
        ("OncegateSealRefused", "strict"),
    ] {
        prometheus.fires(alert, name).await;
    }
    let firing = prometheus.firing().await;
    assert!(!firing.iter().any(|(_, job)| job == "oncegate-healthy"), "{firing:?}");
    // The log names what ends with the sidecar.
    waiting.process.signal(rustix::process::Signal::TERM);
    waiting.process.logs("the result of an operation is lost").await;
    waiting.process.logs("stopped took=").await;
    assert_eq!(waiting.process.error_lines("requests were still running"), [""; 0], "none ran");
    // The alert ends with the outage.
    redis.restart().unwrap();
    until("the store is back", async || {
        let away = ("OncegateStoreAway".to_owned(), "oncegate-store".to_owned());
        !prometheus.firing().await.contains(&away)
    })
    .await;
    traffic.abort();
    drop(held);
}

/// The trace of a request is found from the histogram of durations.
#[tokio::test]
async fn prometheus_keeps_exemplars_of_the_page() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &["--otlp-endpoint=http://127.0.0.1:9"]).await;
    sidecar.ask(&request("POST", "/", &["Idempotency-Key: a"], "{}")).await.has_status(200);
    let prometheus = Prometheus::start(&[("exemplars", sidecar.admin)]).await;
    let path =
        "/api/v1/query_exemplars?query=oncegate_request_duration_seconds_bucket&start=0&end=9999999999";
    until("Prometheus has the exemplar", async || {
        let body = prometheus.get(path).await.unwrap_or_default();
        String::from_utf8_lossy(&body).contains("\"trace_id\"")
    })
    .await;
}
