//! The sidecar's own responses, in the format that clients of the route's profile read.

use oncegate_servers::unused_port;

use crate::support::{Message, Service, Sidecar, request};
use crate::{KEY, OK};

const PROFILES: [&str; 2] = ["--profile=stripe", "--profile=classic"];

/// Asserts that this is an error in the format of the profile.
fn is_of_profile(response: &Message, profile: &str, status: u16, should_retry: &str) {
    response.has_status(status);
    assert_eq!(response.get("content-type"), Some("application/json"), "{response:?}");
    assert_eq!(response.get("cache-control"), Some("no-store"), "{response:?}");
    if profile == "--profile=stripe" {
        let error = &response.json()["error"];
        assert!(error["type"].is_string() && error["message"].is_string(), "{response:?}");
        assert_eq!(response.get("stripe-should-retry"), Some(should_retry), "{response:?}");
    } else {
        assert!(
            response.json()["error"].is_string() && response.json()["message"].is_string(),
            "{response:?}"
        );
    }
}

#[tokio::test]
async fn an_unreachable_service_is_reported_in_the_format_of_the_profile() {
    for profile in PROFILES {
        let (_socket, away) = unused_port().unwrap();
        let sidecar = Sidecar::start(away, &[profile]).await;
        for fields in [&[KEY][..], &[]] {
            let response = sidecar.ask(&request("POST", "/orders", fields, "{}")).await;
            is_of_profile(&response, profile, 502, "true");
        }
    }
}

#[tokio::test]
async fn a_service_time_out_is_reported_in_the_format_of_the_profile() {
    for (profile, with_key) in [("--profile=stripe", "false"), ("--profile=classic", "")] {
        let service = Service::new().await;
        let sidecar = Sidecar::start(service.address, &[profile, "--upstream-timeout=50ms"]).await;
        for fields in [&[KEY][..], &[]] {
            let response = sidecar.ask(&request("POST", "/orders", fields, "{}")).await;
            is_of_profile(&response, profile, 504, with_key);
        }
    }
}

#[tokio::test]
async fn a_request_that_cannot_be_forwarded_is_refused_in_the_format_of_its_route() {
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("oncegate.toml");
    std::fs::write(&file, "[[route]]\npath = \"/v1/{*rest}\"\nprofile = \"stripe\"\n").unwrap();
    let config = format!("--config={}", file.display());
    let sidecar = Sidecar::start(service.address, &[&config]).await;
    let twice = |path: &str| request("POST", path, &["Host: other.test", KEY], "{}");
    is_of_profile(&sidecar.ask(&twice("/v1/charges")).await, "--profile=stripe", 400, "false");
    sidecar.ask(&twice("/other")).await.is_problem(400, "request-malformed");
    let coded = request("POST", "/v1/charges", &["Transfer-Encoding: gzip, chunked", KEY], "");
    is_of_profile(&sidecar.ask(&coded).await, "--profile=stripe", 501, "false");
    assert_eq!(service.requests(), 0);
}

#[tokio::test]
async fn a_profile_of_ones_own_is_read_next_to_the_configuration() {
    let page = include_str!("../../../../docs/reference/profiles.md");
    let ours = page.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let (config, profile) = (directory.path().join("oncegate.toml"), directory.path().join("ours.toml"));
    std::fs::write(&config, "scope = \"single-tenant\"\nprofile = \"./ours.toml\"\n").unwrap();
    std::fs::write(&profile, ours).unwrap();
    let flag = format!("--config={}", config.display());
    let sidecar = Sidecar::start(service.address, &[&flag]).await;
    let order = |body: &str| request("POST", "/orders", &["X-Request-Key: a, b"], body);
    sidecar.ask(&order("1")).await.has_status(200);
    let again = sidecar.ask(&order("1")).await;
    assert_eq!((again.status(), again.get("idempotent-replayed")), (200, Some("true")), "{again:?}");
    assert_eq!(again.get("x-request-key"), Some("a, b"), "{again:?}");
    let other = sidecar.ask(&order("2")).await;
    assert_eq!((other.status(), other.get("x-retryable")), (422, Some("false")), "{other:?}");
    assert_eq!(other.json()["fault"]["code"], "key_reused", "{other:?}");
    assert_eq!(service.requests(), 1);

    let check = || {
        let mut check = std::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
        let output =
            check.args(["check", &flag, "--store=memory:", "--to=http://127.0.0.1:1"]).output().unwrap();
        (
            output.status.success(),
            String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned(),
        )
    };
    let (is_right, text) = check();
    assert!(is_right, "{text}");
    for row in [
        "profile ours (Our payments API)",
        " key-header = X-Request-Key, Idempotency-Key\n",
        " retention = 7d\n",
    ] {
        assert!(text.contains(row), "{row}: {text}");
    }
    std::fs::write(&profile, format!("retntion = \"7d\"\n{}", ours.replace("\"stripe\"", "\"strip\"")))
        .unwrap();
    let (is_right, text) = check();
    assert!(!is_right, "{text}");
    for mistake in [
        "ours.toml:1:1: no such key `retntion`; did you mean `retention`?",
        "ours.toml:4:11: extends: there is no profile \"strip\"; did you mean `stripe`?",
    ] {
        assert!(text.contains(mistake), "{text}");
    }
}

#[tokio::test]
async fn the_rules_for_keys_are_published_if_the_operator_wants_it() {
    let service = Service::new().await.answers(OK);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("oncegate.toml");
    let text = "scope = \"single-tenant\"\ndocumentation = \"https://a.example/<b>\"\n[[route]]\npath = \"/v1/{*rest}\"\nprofile = \"square\"\n";
    std::fs::write(&file, text.replace("/<b>", "/b")).unwrap();
    let config = format!("--config={}", file.display());
    let rules = |fields: &[&str]| request("GET", "/.well-known/idempotency", fields, "");
    let silent = Sidecar::start(service.address, &[&config]).await;
    silent.ask(&rules(&[])).await.has_status(200);
    assert_eq!(service.requests(), 1, "the service answers");

    let sidecar = Sidecar::start(service.address, &[&config, "--published-rules"]).await;
    let published = sidecar.ask(&rules(&[])).await;
    assert_eq!((published.status(), service.requests()), (200, 1), "{published:?}");
    assert_eq!(published.get("content-type"), Some("application/json"));
    let rules_now = published.json();
    let [square, others] = &rules_now["operations"].as_array().unwrap()[..] else { panic!("{published:?}") };
    assert_eq!((&square["path"], &others["path"]), (&"/v1/{*rest}".into(), &serde_json::Value::Null));
    assert_eq!(square["key"]["in"], serde_json::json!([{"member": "/idempotency_key"}]));
    assert_eq!((&square["key"]["required"], &others["key"]["required"]), (&true.into(), &false.into()));
    assert_eq!(others["key"]["in"], serde_json::json!([{"header": "Idempotency-Key"}]));
    assert_eq!(
        (&others["methods"], &others["retentionSeconds"]),
        (&serde_json::json!(["PATCH", "POST"]), &86_400.into())
    );
    assert_eq!(others["documentation"], "https://a.example/b");
    let reused = |operation: &serde_json::Value| {
        let refusals = operation["refusals"].as_array().unwrap().clone();
        refusals.into_iter().find(|refusal| refusal["type"] == "urn:oncegate:problem:key-reused").unwrap()
    };
    assert_eq!(
        (&reused(square)["status"], &reused(square)["code"]),
        (&400.into(), &"IDEMPOTENCY_KEY_REUSED".into())
    );
    assert_eq!((&reused(others)["status"], &reused(others)["retry"]), (&422.into(), &"new-key".into()));
    // What the descriptor says is what happens.
    let bare = sidecar.ask(&request("POST", "/v1/payments", &["Content-Type: application/json"], "{}")).await;
    assert_eq!((bare.status(), service.requests()), (400, 1), "{bare:?}");

    let etag = published.get("etag").unwrap();
    let unchanged = sidecar.ask(&rules(&[&format!("If-None-Match: \"x\", {etag}")])).await;
    assert_eq!((unchanged.status(), unchanged.body.len()), (304, 0), "{unchanged:?}");
    sidecar.ask(&request("POST", "/.well-known/idempotency", &[], "")).await.has_status(200);
    assert_eq!(service.requests(), 2, "only reading is answered");
}

#[test]
fn the_page_for_customers_is_made_from_the_configuration() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("oncegate.toml");
    std::fs::write(
        &file,
        "retention = \"3d\"\n[[route]]\nmethods = [\"PUT\"]\npath = \"/items/{id}\"\nrequire-key = true\n",
    )
    .unwrap();
    let page = |format: &str| {
        let mut rules = std::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
        rules.args(["rules", "--to=http://127.0.0.1:1", "--api=A & B", "--format", format]);
        let output = rules.arg(format!("--config={}", file.display())).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let markdown = page("markdown");
    for text in [
        "# How to retry requests to A & B\n",
        "## PUT /items/{id}\n",
        "| Key | the header field Idempotency-Key, required |\n",
        "| Kept for | 3d from the response on |\n",
        "| 422 | Idempotency-Key is already used | This is another request: take a new key. |\n",
        "curl --request PUT --header \"Idempotency-Key: ",
        "## PATCH, POST to all other paths\n",
    ] {
        assert!(markdown.contains(text), "{text}\n{markdown}");
    }
    let html = page("html");
    assert!(
        html.contains("<h3 id=\"key-reused\">key-reused</h3>\n<p>Idempotency-Key is already used. "),
        "{html}"
    );
    let problems = directory.path().join("problems");
    let mut rules = std::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
    rules.args(["rules", "--to=http://127.0.0.1:1", "--problem-pages"]).arg(&problems);
    assert!(rules.status().unwrap().success());
    let reused = std::fs::read_to_string(problems.join("key-reused.html")).unwrap();
    assert!(reused.contains("<h1 id=\"key-reused\">") && reused.contains("take a new key"), "{reused}");
    assert_eq!(std::fs::read_dir(&problems).unwrap().count(), oncegate_http::Condition::ALL.len());
    assert!(
        html.contains("<title>How to retry requests to A &amp; B</title>") && !html.contains("<script"),
        "{html}"
    );
    assert!(html.contains("&quot;Idempotency-Key: ") && html.ends_with("</html>\n"), "{html}");
}

#[test]
fn the_rules_are_merged_into_an_openapi_document() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    std::fs::write(
        path("oncegate.toml"),
        "[[route]]\npath = \"/v1/{*rest}\"\nprofile = \"stripe\"\nrequire-key = true\nkey-format = \"uuid\"\n",
    )
    .unwrap();
    let api = r#"
openapi: 3.0.3
info: {title: Shop, version: "1"}
paths:
  /v1/orders/{id}:
    parameters:
      - {name: id, in: path, required: true, schema: {type: string}}
    post:
      responses:
        "201": {description: Created}
        "409": {description: Ours}
  /items:
    get: {responses: {"200": {description: Items}}}
    patch:
      parameters: [{name: idempotency-key, in: header, schema: {type: string}}]
      responses: {"200": {description: Changed}}
"#;
    std::fs::write(path("api.yaml"), api).unwrap();
    std::fs::write(path("old.yaml"), "swagger: '2.0'\npaths: {}\n").unwrap();
    std::fs::write(path("read.yaml"), "openapi: 3.1.0\npaths: {/a: {get: {}}}\n").unwrap();
    std::fs::write(path("bad.yaml"), "openapi: [\n").unwrap();
    let openapi = |arguments: &[&str]| {
        let mut openapi = std::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
        openapi.args(["openapi", "--to=http://127.0.0.1:1", "--config=oncegate.toml"]).args(arguments);
        openapi.current_dir(directory.path()).output().unwrap()
    };
    let merged = openapi(&["--merge", "api.yaml"]);
    assert!(merged.status.success(), "{}", String::from_utf8_lossy(&merged.stderr));
    let document: serde_json::Value = serde_json::from_slice(&merged.stdout).unwrap();
    let order = &document["paths"]["/v1/orders/{id}"]["post"];
    assert_eq!(order["parameters"][0]["name"], "Idempotency-Key");
    assert_eq!(
        (&order["parameters"][0]["required"], &order["parameters"][0]["schema"]["format"]),
        (&true.into(), &"uuid".into())
    );
    assert_eq!(order["responses"]["409"]["description"], "Ours");
    assert_eq!(order["responses"]["400"]["content"]["application/json"]["schema"]["type"], "object");
    assert_eq!(order["x-idempotency"]["key"]["uniqueWithin"], "caller");
    let change = &document["paths"]["/items"]["patch"];
    assert_eq!(change["parameters"].as_array().unwrap().len(), 1, "{change}");
    let problem = &change["responses"]["422"]["content"]["application/problem+json"]["schema"]["$ref"];
    assert_eq!(problem, "#/components/schemas/IdempotencyProblem");
    assert!(document["components"]["schemas"]["IdempotencyProblem"]["properties"]["retry"].is_object());
    assert!(document["paths"]["/items"]["get"]["x-idempotency"].is_null());
    let generated = openapi(&[]);
    let own: serde_json::Value = serde_json::from_slice(&generated.stdout).unwrap();
    assert_eq!(own["paths"]["/v1/{rest}"]["parameters"][0]["name"], "rest");
    assert!(own["paths"]["/v1/{rest}"]["post"]["responses"]["400"].is_object(), "{own}");

    for (name, document) in [("merged.json", merged.stdout), ("own.json", generated.stdout)] {
        std::fs::write(path(name), document).unwrap();
        let valid = std::process::Command::new("node")
            .args(["validate.mjs".as_ref(), path(name).as_os_str()])
            .current_dir(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vendors"))
            .output()
            .unwrap();
        assert!(valid.status.success(), "{name}: {}", String::from_utf8_lossy(&valid.stderr));
    }
    for (file, error) in [
        ("old.yaml", "not an OpenAPI 3 document"),
        ("read.yaml", "no operation in it has a method that a key protects"),
        ("bad.yaml", "neither YAML nor JSON"),
        ("none.yaml", "No such file"),
    ] {
        let output = openapi(&["--merge", file]);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && text.contains(error) && text.contains(file), "{text}");
    }
}
