//! Callers that the sidecar tells apart, callers that it does not, and the responses that each gets.

use std::os::unix::fs::PermissionsExt as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use jsonwebtoken::jwk::Jwk;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use oncegate_testkit::until;
use rustix::process::Signal;
use serde_json::json;
use tokio::sync::watch;

use crate::support::{FixedService, Message, Process, Service, Sidecar, Wire, request, sidecar, within};
use crate::{KEY, OK};

const SESSION: &str = "Cookie: sid=ada";

#[tokio::test]
async fn without_a_configured_scope_credentials_are_refused_and_the_log_explains_it() {
    let service = Service::new().await.answers(OK);
    let mut open = Sidecar::start(service.address, &[]).await;
    for cookie in [SESSION, "Cookie: sid=eve"] {
        let refused = open.ask(&request("POST", "/orders", &[KEY, cookie], "{}")).await;
        refused.is_problem(400, "scope-not-set");
    }
    open.ask(&request("POST", "/orders", &[KEY, "X-Api-Key: hunter2"], "{}"))
        .await
        .is_problem(400, "scope-not-set");
    assert_eq!(service.requests(), 0);
    // Requests without any credential share one scope.
    assert!(!open.ask(&request("POST", "/orders", &[KEY], "{}")).await.has_status(200).is_replay());
    assert!(open.ask(&request("POST", "/orders", &[KEY], "{}")).await.has_status(200).is_replay());
    open.process.signal(Signal::TERM);
    let log = open.process.errors().await;
    assert_eq!(log.matches("`scope` is not set").count(), 1, "{log}");
    let warnings: Vec<_> = log.lines().filter(|line| line.contains("are refused, because")).collect();
    let [warning] = warnings[..] else { panic!("not one warning: {log}") };
    for word in [
        "WARN",
        "cookie",
        "`scope` (Settings::with_caller) is not set",
        "required-cookie:NAME",
        "header:authorization",
    ] {
        assert!(warning.contains(word), "no {word} in {warning}");
    }
    assert!(!log.contains("sid=") && !log.contains("hunter2"), "{log}");

    let mut said = Sidecar::start(service.address, &["--scope=header:authorization"]).await;
    assert!(!said.ask(&request("POST", "/orders", &[KEY, SESSION], "{}")).await.has_status(200).is_replay());
    assert!(said.ask(&request("POST", "/orders", &[KEY, "Cookie: sid=eve"], "{}")).await.is_replay());
    said.process.signal(Signal::TERM);
    let log = said.process.errors().await;
    assert!(!log.contains("`scope` is not set") && !log.contains("are refused, because"), "{log}");
}

#[tokio::test]
async fn keys_from_the_body_need_a_scope_that_tells_callers_apart() {
    for scope in [None, Some("--scope=header:x-tenant"), Some("--scope=cookie:sid")] {
        let mut command = sidecar("http://127.0.0.1:9");
        command.args(["--store=memory:", "--natural-key=/cart"]).args(scope);
        let mut process = Process::start(&mut command);
        assert_eq!(process.ended().await.code(), Some(1));
        let said = process.errors().await;
        assert!(
            said.contains("would get each other's responses") && said.contains("single-tenant"),
            "{said}"
        );
    }
    let service = Service::new().await.answers(OK);
    for scope in ["--scope=single-tenant", "--scope=required-header:x-tenant"] {
        let sidecar = Sidecar::start(service.address, &["--natural-key=/cart", scope]).await;
        let fields = ["X-Tenant: a", "Content-Type: application/json"];
        sidecar.ask(&request("POST", "/orders", &fields, r#"{"cart":1}"#)).await.has_status(200);
    }
}

/// RFC 9110, 7.6.1 lets a client name header fields that end at the first hop.
#[tokio::test]
async fn a_client_cannot_hide_its_scope_or_key_from_the_service() {
    let service = Service::new().await;
    let sidecar = Sidecar::start(service.address, &["--scope=required-header:x-tenant"]).await;
    let mut client = sidecar.connect().await;
    let fields = ["Connection: X-Tenant, Idempotency-Key, X-Other", "X-Tenant: a", "X-Other: 1", KEY];
    client.send(&request("POST", "/orders", &fields, "{}")).await;
    let mut wire = service.accept().await;
    let seen = wire.message().await;
    assert_eq!((seen.get("x-tenant"), seen.get("idempotency-key")), (Some("a"), Some("intent-1")));
    assert_eq!(seen.get("x-other"), None);
    wire.send(OK).await;
    client.message().await.has_status(200);
}

#[tokio::test]
async fn a_caller_without_the_required_credential_is_asked_for_it() {
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &["--scope=required-header:authorization"]).await;
    for fields in [&[KEY][..], &[KEY, "Authorization:"], &[KEY, "Authorization: Bearer"]] {
        let refused = sidecar.ask(&request("POST", "/orders", fields, "{}")).await;
        refused.is_problem(401, "scope-unavailable");
        assert_eq!(refused.get("www-authenticate"), Some("Bearer"));
    }
    let twice = [KEY, "Authorization: Bearer a", "Authorization: Bearer b"];
    sidecar.ask(&request("POST", "/orders", &twice, "{}")).await.is_problem(400, "scope-unavailable");
    assert_eq!(service.requests(), 0);
    sidecar.ask(&request("POST", "/orders", &[KEY, "Authorization: Bearer a"], "{}")).await.has_status(200);
}

#[tokio::test]
async fn a_tenant_in_the_path_and_the_host_separate_callers() {
    let service = Service::new().await.answers(OK);
    let file = "[[route]]\npath = \"/tenants/{tenant}/orders\"\nscope = [\"path:tenant\", \"host\", \"required-header:x-user\"]\n\
                key-scope = \"caller\"\n";
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("oncegate.toml");
    std::fs::write(&path, file).unwrap();
    let sidecar = Sidecar::start(service.address, &["--config", path.to_str().unwrap()]).await;
    let ask = async |tenant: &str, host: &str, user: &str| {
        let (host, user) = (format!("Host: {host}"), format!("X-User: {user}"));
        let text = request("POST", &format!("/tenants/{tenant}/orders"), &[KEY, &user], "{}");
        let text = text.replacen("Host: orders.test", &host, 1);
        sidecar.ask(&text).await.has_status(200).is_replay()
    };
    assert!(!ask("acme", "a.test", "ada").await);
    assert!(ask("acme", "A.test:80", "ada").await);
    assert!(ask("%61cme", "a.test", "ada").await);
    for (tenant, host, user) in
        [("Acme", "a.test", "ada"), ("acme", "b.test", "ada"), ("acme", "a.test", "eve")]
    {
        assert!(!ask(tenant, host, user).await, "{tenant} {host} {user}");
    }
    assert_eq!(service.requests(), 4);
}

#[tokio::test]
async fn a_scope_of_a_path_parameter_needs_a_route_that_has_it() {
    for (flags, file, expected) in [
        (&["--scope=path:tenant"][..], "", "needs a route whose path has the parameter {tenant}"),
        (&[], "[[route]]\npath = \"/{tenants}\"\nscope = \"path:tenant\"\n", "has no such parameter"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("oncegate.toml");
        std::fs::write(&path, file).unwrap();
        let mut command = sidecar("http://127.0.0.1:9");
        command.args(["--store=memory:", "--config", path.to_str().unwrap()]).args(flags);
        let mut process = Process::start(&mut command);
        assert_eq!(process.ended().await.code(), Some(1));
        let said = process.errors().await;
        assert!(said.contains(expected), "{said}");
    }
}

/// An issuer of tokens, with one key.
struct Issuer(EncodingKey);

impl Issuer {
    fn new() -> Self {
        Self(EncodingKey::from_ec_der(&rcgen::KeyPair::generate().unwrap().serialize_der()))
    }

    fn key_set(&self) -> String {
        json!({ "keys": [Jwk::from_encoding_key(&self.0, Algorithm::ES256).unwrap()] }).to_string()
    }

    /// A service that answers each request with the key set.
    async fn serve(&self) -> (FixedService, String) {
        let keys = self.key_set();
        let response = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{keys}", keys.len());
        let service = Service::new().await.answers(response.leak());
        let url = format!("--jwt-keys=http://{}/keys", service.address);
        (service, url)
    }

    /// A field with a token that expires in this many seconds.
    fn token(&self, subject: &str, seconds: i64) -> String {
        let now = i64::try_from(jsonwebtoken::get_current_timestamp()).unwrap();
        let claims = json!({"sub": subject, "aud": "orders", "exp": now + seconds});
        let token = jsonwebtoken::encode(&Header::new(Algorithm::ES256), &claims, &self.0).unwrap();
        format!("Authorization: Bearer {token}")
    }
}

#[tokio::test]
async fn a_verified_token_names_the_caller_also_when_it_is_renewed() {
    let issuer = Issuer::new();
    let (keys, url) = issuer.serve().await;
    let service = Service::new().await.answers(OK);
    let flags = ["--scope=jwt:sub", &url, "--jwt-audience=orders"];
    let mut sidecar = Sidecar::start(service.address, &flags).await;
    let ask = async |field: &str| sidecar.ask(&request("POST", "/orders", &[KEY, field], "{}")).await;
    // Otherwise the first request may fetch them as well.
    until("the keys are fetched", async || ask_metrics(&sidecar).await.contains("oncegate_key_set_usable 1"))
        .await;
    assert!(!ask(&issuer.token("ada", 60)).await.has_status(200).is_replay());
    assert!(ask(&issuer.token("ada", 600)).await.has_status(200).is_replay());
    assert!(!ask(&issuer.token("eve", 60)).await.has_status(200).is_replay());
    assert_eq!((service.requests(), keys.requests()), (2, 1));
    // Neither a replay nor an execution without a valid token.
    let forged = Issuer::new().token("ada", 60);
    for (field, why) in [
        (issuer.token("ada", -60).as_str(), "has expired"),
        (&forged, "signature that is not right"),
        ("Authorization: Bearer ada", "is not a signed token"),
        ("Authorization: Basic YWRhOg==", "is not a signed token"),
        ("X-Other: 1", "is missing"),
        ("Authorization: Bearer", "is missing"),
    ] {
        let refused = ask(field).await;
        refused.is_problem(401, "scope-unavailable");
        assert!(refused.text().contains(why), "{field}: {}", refused.text());
        let expected = if why == "is missing" { "Bearer" } else { "Bearer error=\"invalid_token\"" };
        assert_eq!(refused.get("www-authenticate"), Some(expected), "{field}");
    }
    assert_eq!(service.requests(), 2);
    let metrics = ask_metrics(&sidecar).await;
    assert!(metrics.contains("oncegate_key_set_fetches_total{result=\"fetched\"} 1"), "{metrics}");
    assert!(metrics.contains("oncegate_key_set_usable 1"), "{metrics}");
    assert!(metrics.contains("oncegate_key_set_age_seconds "), "{metrics}");
    assert_eq!(admin_text(&sidecar, "/readyz").await, "ready\n");
    sidecar.process.signal(Signal::TERM);
    let log = sidecar.process.errors().await;
    assert!(!log.contains("ada") && !log.contains("eyJ"), "{log}");
}

#[tokio::test]
async fn without_keys_no_token_names_a_caller_and_the_log_says_why() {
    let issuer = Issuer::new();
    let away = Service::new().await.answers("HTTP/1.1 503 Away\r\nContent-Length: 0\r\n\r\n");
    let service = Service::new().await.answers(OK);
    let flags =
        ["--scope=jwt:sub", &format!("--jwt-keys=http://{}/keys", away.address), "--jwt-audience=orders"];
    let mut sidecar = Sidecar::start(service.address, &flags).await;
    for _ in 0..20 {
        let refused = sidecar.ask(&request("POST", "/orders", &[KEY, &issuer.token("ada", 60)], "{}")).await;
        refused.is_problem(503, "verification-unavailable");
        assert_eq!((refused.get("retry-after"), refused.get("www-authenticate")), (Some("1"), None));
    }
    assert_eq!(service.requests(), 0);
    assert!(away.requests() < 10, "{}", away.requests());
    let metrics = ask_metrics(&sidecar).await;
    assert!(metrics.contains("oncegate_key_set_fetches_total{result=\"fetched\"} 0"), "{metrics}");
    assert!(!metrics.contains("oncegate_key_set_fetches_total{result=\"failed\"} 0"), "{metrics}");
    assert!(
        metrics.contains("oncegate_key_set_usable 0") && !metrics.contains("oncegate_key_set_age"),
        "{metrics}"
    );
    let ready = admin_text(&sidecar, "/readyz").await;
    assert!(ready.starts_with("ready\n") && ready.contains("note: there are no keys"), "{ready}");
    sidecar.process.signal(Signal::TERM);
    let log = sidecar.process.errors().await;
    assert_eq!(log.matches("no keys that verify tokens were fetched").count(), 1, "{log}");
    assert!(log.contains("the status is 503"), "{log}");
}

#[tokio::test]
async fn mistakes_in_the_settings_of_tokens_are_reported_at_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        format!("--jwt-keys={}", path.display())
    };
    let good = file("good", &Issuer::new().key_set());
    let (empty, other) = (file("empty", "{\"keys\":[]}"), file("other", "PEM"));
    let url = "--jwt-keys=https://issuer.example/keys";
    for (flags, expected) in [
        (vec![], "needs the keys that verify tokens; set jwt-keys"),
        (vec!["--jwt-issuer=a"], "set jwt-keys too"),
        (vec!["--jwt-keys=http://issuer.example/keys"], "is not an https URL"),
        (vec!["--jwt-keys=https://ada:secret@issuer.example/keys"], "has a user name or password"),
        (vec![&empty], "has no key that can verify"),
        (vec![&other], "is not JSON"),
        (vec!["--jwt-keys=/nowhere/keys"], "/nowhere/keys: "),
        (vec![&good, "--jwt-algorithms=none"], "\"none\" is not accepted"),
        (vec![&good, "--jwt-algorithms=ES512"], "is not one of RS256"),
        (vec![&good, "--jwt-algorithms=HS256,ES256"], "both symmetric"),
        (vec![url, "--jwt-algorithms=HS256"], "must come from a file"),
    ] {
        let mut command = sidecar("http://127.0.0.1:9");
        command.args(["--store=memory:", "--scope=jwt:sub"]).args(&flags);
        let mut process = Process::start(&mut command);
        assert_eq!(process.ended().await.code(), Some(1), "{flags:?}");
        let said = process.errors().await;
        assert!(said.contains(expected) && !said.contains("secret@"), "{flags:?}: {said}");
    }
}

/// Runs `oncegate check` with a scope of tokens and these flags. Returns its exit code and its output.
async fn check(flags: &[&str]) -> (Option<i32>, String) {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
    command.args(["check", "--to=http://127.0.0.1:9", "--store=memory:", "--scope=jwt:sub"]).args(flags);
    let output = within("a check", command.output()).await.unwrap();
    (output.status.code(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

#[tokio::test]
async fn a_mistake_in_the_place_of_keys_is_reported_alone() {
    for (flag, expected) in [
        ("--jwt-keys=/nowhere/keys", "/nowhere/keys: "),
        ("--jwt-keys=http://issuer.example/keys", "is not an https URL"),
    ] {
        let (code, said) = check(&[flag]).await;
        assert!(code == Some(1) && said.contains(expected), "{said}");
        assert!(!said.contains("never used") && !said.contains("needs the keys"), "{said}");
    }
}

#[tokio::test]
async fn an_online_check_fetches_the_keys_of_tokens() {
    let (_keys, url) = Issuer::new().serve().await;
    let away = Service::new().await.answers("HTTP/1.1 503 Away\r\nContent-Length: 0\r\n\r\n");
    let service = Service::new().await.answers(OK);
    let to = format!("--to=http://{}", service.address);
    let flags = [&to, "--online", "--jwt-audience=orders"];
    let away = format!("--jwt-keys=http://{}/keys", away.address);
    for (keys, code, expected) in [(&url, 0, "they were fetched"), (&away, 1, "the status is 503")] {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
        command.args(["check", "--store=memory:", "--scope=jwt:sub", keys]).args(flags);
        let output = within("a check", command.output()).await.unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains(expected), "{said}");
    }
}

#[tokio::test]
async fn new_keys_of_a_caller_are_limited_and_its_retries_are_not() {
    let service = Service::new().await.answers(OK);
    let flags = ["--scope=required-header:x-user", "--rate-limit-caller=2/h", "--rate-limit-key=4/h"];
    let mut sidecar = Sidecar::start(service.address, &flags).await;
    let ask = async |user: &str, key: &str| {
        let (user, key) = (format!("X-User: {user}"), format!("Idempotency-Key: {key}"));
        sidecar.ask(&request("POST", "/orders", &[&user, &key], "{}")).await
    };
    ask("ada", "1").await.has_status(200);
    ask("ada", "2").await.has_status(200);
    for _ in 0..2 {
        let refused = ask("ada", "3").await;
        refused.is_problem(429, "rate-limited");
        let seconds: u64 = refused.get("retry-after").unwrap().parse().unwrap();
        assert!((1700..=1800).contains(&seconds), "{seconds}");
        assert_eq!(refused.get("ratelimit-policy"), Some("\"caller\";q=2;w=3600"));
        assert_eq!(refused.get("ratelimit"), Some(&*format!("\"caller\";r=0;t={seconds}")));
        assert_eq!(refused.get("idempotency-key"), Some("3"));
    }
    for _ in 0..3 {
        assert!(ask("ada", "1").await.has_status(200).is_replay());
    }
    let refused = ask("ada", "1").await;
    refused.is_problem(429, "rate-limited");
    assert_eq!(refused.get("ratelimit-policy"), Some("\"key\";q=4;w=3600"));
    ask("eve", "3").await.has_status(200);
    assert_eq!(service.requests(), 3);
    let metrics = ask_metrics(&sidecar).await;
    for line in [
        "oncegate_rate_limited_total{limit=\"caller\"} 2",
        "oncegate_rate_limited_total{limit=\"key\"} 1",
        "oncegate_rate_limited_total{limit=\"route\"} 0",
        "oncegate_rate_limit_evictions_total{table=\"seen-key\"} 0",
        "oncegate_requests_total{outcome=\"rate-limited\",status=\"4xx\"} 3",
    ] {
        assert!(metrics.contains(line), "no {line} in {metrics}");
    }
    sidecar.process.signal(Signal::TERM);
    let log = sidecar.process.errors().await;
    assert_eq!(log.matches("a rate limit is reached").count(), 2, "{log}");
}

async fn ask_metrics(sidecar: &Sidecar) -> String {
    admin_text(sidecar, "/metrics").await
}

async fn admin_text(sidecar: &Sidecar, path: &str) -> String {
    let asked = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    crate::support::ask(sidecar.admin, &asked).await.text().to_owned()
}

#[tokio::test]
async fn each_route_counts_its_new_keys_and_shares_the_limits_that_it_inherits() {
    let service = Service::new().await.answers(OK);
    let file = "scope = \"required-header:x-user\"\nrate-limit.caller = \"2/h\"\nrate-limit.route = \"3/h\"\n\
                [[route]]\npath = \"/a\"\n[[route]]\npath = \"/b\"\nrate-limit.caller = \"none\"\n";
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("oncegate.toml");
    std::fs::write(&path, file).unwrap();
    let sidecar = Sidecar::start(service.address, &["--config", path.to_str().unwrap()]).await;
    let ask = async |path: &str, user: &str, key: &str| {
        let (user, key) = (format!("X-User: {user}"), format!("Idempotency-Key: {key}"));
        let response = sidecar.ask(&request("POST", path, &[&user, &key], "{}")).await;
        response.get("ratelimit").map(|limit| limit.split(';').next().unwrap().to_owned())
    };
    assert_eq!(ask("/a", "ada", "1").await, None);
    assert_eq!(ask("/other", "ada", "2").await, None);
    assert_eq!(ask("/a", "ada", "3").await.as_deref(), Some("\"caller\""));
    for key in ["1", "2", "3"] {
        assert_eq!(ask("/b", "ada", key).await, None);
    }
    assert_eq!(ask("/b", "eve", "4").await.as_deref(), Some("\"route\""));
    assert_eq!(ask("/a", "eve", "4").await, None);
    assert_eq!(service.requests(), 6);
}

#[tokio::test]
async fn a_reload_lifts_no_rate_limit_and_a_refusal_at_one_limit_uses_nothing_of_another() {
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("oncegate.toml");
    let write = |caller: &str, route: &str| {
        let file = format!(
            "scope = \"required-header:x-user\"\nrate-limit.caller = \"{caller}\"\n\
             [[route]]\npath = \"/new-{route}\"\n[[route]]\npath = \"/a\"\nrate-limit.route = \"{route}\"\n"
        );
        std::fs::write(&path, file).unwrap();
    };
    write("2/h", "1/h");
    let sidecar = Sidecar::start(service.address, &["--config", path.to_str().unwrap()]).await;
    let ask = async |sidecar: &Sidecar, path: &str, user: &str, key: &str| {
        let (user, key) = (format!("X-User: {user}"), format!("Idempotency-Key: {key}"));
        let response = sidecar.ask(&request("POST", path, &[&user, &key], "{}")).await;
        response.get("ratelimit").map(|limit| limit.split(';').next().unwrap().to_owned())
    };
    let (caller, route) = (Some("\"caller\"".to_owned()), Some("\"route\"".to_owned()));
    assert_eq!(ask(&sidecar, "/a", "ada", "1").await, None);
    for key in ["2", "3", "4"] {
        assert_eq!(ask(&sidecar, "/a", "eve", key).await, route);
    }
    assert_eq!(ask(&sidecar, "/other", "ada", "5").await, None);
    let log = "the configuration was reloaded";
    for reload in 1..=3 {
        sidecar.process.signal(Signal::HUP);
        until("it is reloaded", async || sidecar.process.error_lines(log).len() == reload).await;
        assert_eq!(ask(&sidecar, "/other", "ada", "6").await, caller, "{reload}");
        assert_eq!(ask(&sidecar, "/a", "eve", "7").await, route, "{reload}");
        assert_eq!(ask(&sidecar, "/a", "ada", "1").await, None, "the key is known still");
    }
    write("2/h", "9/h");
    sidecar.process.signal(Signal::HUP);
    // The threads apply the configuration one after the other.
    until("the new rate is in force", async || ask(&sidecar, "/a", "eve", "8").await.is_none()).await;
    assert_eq!(ask(&sidecar, "/other", "eve", "9").await, None, "the refused requests cost nothing");
    assert_eq!(ask(&sidecar, "/other", "eve", "10").await, caller);
    assert_eq!(ask(&sidecar, "/other", "ada", "11").await, caller);
}

const ALLOWED: &str = "HTTP/1.1 204 No Content\r\nOncegate-Authorize: allow\r\n\r\n";

/// A service that decides about replays with the response that the test sets.
struct Judge {
    decision: watch::Sender<&'static str>,
    questions: Arc<Mutex<Vec<Message>>>,
    executions: Arc<AtomicUsize>,
}

impl Judge {
    fn serve(service: Service) -> Self {
        let (decision, decisions) = watch::channel(ALLOWED);
        let judge = Self { decision, questions: Arc::default(), executions: Arc::default() };
        let (questions, executions) = (judge.questions.clone(), judge.executions.clone());
        tokio::spawn(async move {
            while let Ok((stream, _)) = service.listener().accept().await {
                let (questions, executions, decisions) =
                    (questions.clone(), executions.clone(), decisions.clone());
                tokio::spawn(async move {
                    let mut wire = Wire::new(stream);
                    while let Some(head) = wire.try_head().await {
                        let message = wire.body(head).await;
                        let response = if message.head.line.starts_with("HEAD /may-see ") {
                            questions.lock().unwrap().push(message);
                            *decisions.borrow()
                        } else {
                            executions.fetch_add(1, Ordering::Relaxed);
                            OK
                        };
                        // Silence, as of a service that hangs.
                        if response.is_empty() {
                            std::future::pending::<()>().await;
                        }
                        if wire.try_send(response).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        judge
    }
}

#[tokio::test]
async fn the_service_decides_before_a_replay_if_the_caller_may_still_get_it() {
    let service = Service::new().await;
    let to = service.address;
    let judge = Judge::serve(service);
    let flags =
        ["--scope=required-header:authorization", "--authorize=/may-see", "--authorize-timeout=300ms"];
    let mut sidecar = Sidecar::start(to, &flags).await;
    let ask = async || {
        let fields = [
            KEY,
            "Authorization: Bearer ada",
            "Content-Type: application/json",
            "X-Trace: 1",
            "Oncegate-Method: GET",
        ];
        sidecar.ask(&request("POST", "/orders?a=b", &fields, "{}")).await
    };
    assert!(!ask().await.has_status(200).is_replay());
    assert!(judge.questions.lock().unwrap().is_empty(), "an execution is not asked about");
    assert!(ask().await.has_status(200).is_replay());
    let question = judge.questions.lock().unwrap().pop().unwrap();
    for (name, value) in [
        ("authorization", Some("Bearer ada")),
        ("oncegate-method", Some("POST")),
        ("oncegate-target", Some("/orders?a=b")),
        ("x-trace", Some("1")),
        ("cache-control", Some("no-cache, no-store")),
        ("content-type", None),
        ("content-length", None),
    ] {
        assert_eq!(question.get(name), value, "{name}");
    }
    for (decision, status, name) in [
        ("HTTP/1.1 401 Unauthorized\r\n\r\n", 401, "replay-denied"),
        ("HTTP/1.1 403 Forbidden\r\nContent-Length: 9\r\n\r\n", 403, "replay-denied"),
        ("HTTP/1.1 404 Not Found\r\nOncegate-Authorize: deny\r\n\r\n", 404, "replay-denied"),
        ("HTTP/1.1 404 Not Found\r\n\r\n", 503, "authorization-unavailable"),
        ("HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n", 503, "authorization-unavailable"),
        ("HTTP/1.1 405 Method Not Allowed\r\n\r\n", 503, "authorization-unavailable"),
        ("HTTP/1.1 502 Bad Gateway\r\n\r\n", 502, "authorization-unavailable"),
        ("HTTP/1.1 302 Found\r\nLocation: /login\r\n\r\n", 503, "authorization-unavailable"),
        ("nonsense\r\n\r\n", 503, "authorization-unavailable"),
        ("", 503, "authorization-unavailable"),
    ] {
        judge.decision.send_replace(decision);
        let refused = ask().await;
        refused.is_problem(status, name);
        assert!(!refused.is_replay() && !refused.text().contains("paid"), "{decision}");
    }
    judge.decision.send_replace("HTTP/1.1 200 OK\r\nOncegate-Authorize: allow\r\n\r\n");
    assert!(ask().await.has_status(200).is_replay());
    assert_eq!(judge.executions.load(Ordering::Relaxed), 1);
    let metrics = ask_metrics(&sidecar).await;
    for line in ["{result=\"allowed\"} 2", "{result=\"denied\"} 3", "{result=\"unavailable\"} 7"] {
        assert!(metrics.contains(&format!("oncegate_authorizations_total{line}")), "no {line} in {metrics}");
    }
    sidecar.process.signal(Signal::TERM);
    let log = sidecar.process.errors().await;
    assert_eq!(log.matches("cannot be asked if a caller may get a replay").count(), 1, "{log}");
    assert_eq!(log.matches("it allows a replay with 2xx and Oncegate-Authorize: allow").count(), 1, "{log}");
}

#[tokio::test]
async fn the_service_decides_with_the_fields_that_name_the_caller() {
    let forwarded = ["X-Forwarded-For: 203.0.113.1", "X-Original-URL: /orders", "X-HTTP-Method: DELETE"];
    for (scope, field, flags) in [
        ("x-forwarded-user", "X-Forwarded-User: ada", &["--trusted-proxies=127.0.0.1/32"][..]),
        ("x-real-ip", "X-Real-IP: ada", &["--trusted-proxies=127.0.0.1/32"]),
        ("content-tenant", "Content-Tenant: ada", &["--trusted-proxies=192.0.2.1/32"]),
    ] {
        let service = Service::new().await;
        let to = service.address;
        let judge = Judge::serve(service);
        let scope_flag = format!("--scope=required-header:{scope}");
        let flags = [&[&*scope_flag, "--authorize=/may-see"], flags].concat();
        let sidecar = Sidecar::start(to, &flags).await;
        let fields = [&[KEY, field][..], &forwarded].concat();
        let ask = async || sidecar.ask(&request("POST", "/orders", &fields, "{}")).await;
        assert!(!ask().await.has_status(200).is_replay());
        assert!(ask().await.has_status(200).is_replay());
        let question = judge.questions.lock().unwrap().pop().unwrap();
        assert_eq!(question.get(scope), Some("ada"));
        let addresses = if flags[2].contains("127.0.0.1") { "203.0.113.1, 127.0.0.1" } else { "127.0.0.1" };
        assert_eq!(question.get("x-forwarded-for"), Some(addresses), "{scope}");
        assert_eq!((question.get("x-original-url"), question.get("x-http-method")), (None, None));
    }
}

#[tokio::test]
async fn a_symmetric_key_in_a_file_verifies_tokens_and_others_should_not_read_it() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let keys = json!({"keys": [{"kty": "oct", "k": "BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc"}]});
    std::fs::write(file.path(), keys.to_string()).unwrap();
    std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o644)).unwrap();
    let service = Service::new().await.answers(OK);
    let keys = format!("--jwt-keys={}", file.path().display());
    let flags = ["--scope=jwt:sub", &keys, "--jwt-algorithms=HS256", "--jwt-audience=orders"];
    let mut sidecar = Sidecar::start(service.address, &flags).await;
    let claims = json!({"sub": "ada", "aud": "orders", "exp": jsonwebtoken::get_current_timestamp() + 60});
    let token = |secret: &[u8]| {
        let key = EncodingKey::from_secret(secret);
        let token = jsonwebtoken::encode(&Header::new(Algorithm::HS256), &claims, &key).unwrap();
        request("POST", "/orders", &[KEY, &format!("Authorization: Bearer {token}")], "{}")
    };
    sidecar.ask(&token(&[7; 32])).await.has_status(200);
    sidecar.ask(&token(&[8; 32])).await.is_problem(401, "scope-unavailable");
    assert_eq!(service.requests(), 1);
    sidecar.process.signal(Signal::TERM);
    let log = sidecar.process.errors().await;
    assert!(log.contains("the key that signs tokens") && !log.contains("BwcHBw"), "{log}");
}

#[tokio::test]
async fn a_key_of_the_body_counts_for_rate_limits_too() {
    let service = Service::new().await.answers(OK);
    let flags = ["--scope=required-header:x-user", "--natural-key=/cart", "--rate-limit-caller=1/h"];
    let sidecar = Sidecar::start(service.address, &flags).await;
    let fields = ["X-User: ada", "Content-Type: application/json"];
    let ask = async |body: &str| sidecar.ask(&request("POST", "/orders", &fields, body)).await;
    ask(r#"{"cart":1}"#).await.has_status(200);
    ask(r#"{"cart":2}"#).await.is_problem(429, "rate-limited");
    assert!(ask(r#"{"cart":1}"#).await.has_status(200).is_replay());
    assert_eq!(service.requests(), 1);
}

#[tokio::test]
async fn a_huge_key_set_is_not_read_to_its_end() {
    let response = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{}", 1 << 20, " ".repeat(1 << 20));
    let issuer = Service::new().await.answers(response.leak());
    let service = Service::new().await.answers(OK);
    let keys = format!("--jwt-keys=http://{}/keys", issuer.address);
    let mut sidecar = Sidecar::start(service.address, &["--scope=jwt:sub", &keys]).await;
    let token = Issuer::new().token("ada", 60);
    let refused = sidecar.ask(&request("POST", "/orders", &[KEY, &token], "{}")).await;
    refused.is_problem(503, "verification-unavailable");
    sidecar.process.signal(Signal::TERM);
    let log = sidecar.process.errors().await;
    assert!(log.contains("length limit exceeded") && log.contains("set jwt-audience"), "{log}");
}
