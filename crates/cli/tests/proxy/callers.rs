//! Callers that the sidecar tells apart, callers that it does not, and the responses that each gets.

use rustix::process::Signal;

use crate::support::{Process, Service, Sidecar, request, sidecar};
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
