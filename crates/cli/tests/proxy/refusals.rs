//! The sidecar's own responses, in the format that clients of the route's profile read.

use oncegate_servers::unused_port;
use serde_json::json;

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
    // A page of any origin may ask, also with its ETag, for which a browser asks before.
    let ask = ["Origin: https://a.example", "Access-Control-Request-Method: GET"];
    let allowed = sidecar.ask(&request("OPTIONS", "/.well-known/idempotency", &ask, "")).await;
    assert_eq!(
        (allowed.status(), allowed.get("access-control-allow-origin")),
        (204, Some("*")),
        "{allowed:?}"
    );
    assert_eq!(allowed.get("access-control-allow-headers"), Some("if-none-match"), "{allowed:?}");
    assert_eq!(published.get("access-control-expose-headers"), Some("etag"));
    assert_eq!(service.requests(), 1);
    let counted = crate::operations::series(&sidecar, "oncegate_published_rules_requests_total").await;
    assert_eq!(counted, Some(2.0));
    sidecar.ask(&request("POST", "/.well-known/idempotency", &[], "")).await.has_status(200);
    let other = ["Origin: https://a.example", "Access-Control-Request-Method: POST"];
    sidecar.ask(&request("OPTIONS", "/.well-known/idempotency", &other, "")).await.has_status(200);
    assert_eq!(service.requests(), 3, "only reading is answered");
}

#[tokio::test]
async fn the_published_refusals_are_those_that_a_route_gives() {
    let service = Service::new().await;
    let flags = [
        "--published-rules",
        "--scope=required-header:authorization",
        "--upstream-timeout=100ms",
        "--authorize=/may-see",
    ];
    let sidecar = Sidecar::start(service.address, &flags).await;
    let rules = sidecar.ask(&request("GET", "/.well-known/idempotency", &[], "")).await.json();
    let mut listed: Vec<_> = rules["operations"][0]["refusals"]
        .as_array()
        .unwrap()
        .iter()
        .map(|refusal| {
            let slug = refusal["type"].as_str().unwrap().strip_prefix("urn:oncegate:problem:").unwrap();
            format!("{} {slug}", refusal["status"])
        })
        .collect();
    listed.sort_unstable();
    let expected = [
        ("400", "key-invalid request-incomplete request-malformed scope-unavailable"),
        ("401", "replay-denied scope-unavailable"),
        ("403", "replay-denied"),
        ("404", "replay-denied"),
        ("409", "request-in-progress"),
        ("413", "request-too-large"),
        ("422", "host-differs key-reused replay-unavailable"),
        ("431", "request-head-too-large"),
        ("500", "authorization-unavailable outcome-unknown record-corrupt"),
        ("501", "request-unsupported"),
        (
            "502",
            "authorization-unavailable outcome-unknown upstream-head-too-large upstream-unanswered upstream-unreachable upstream-unsupported",
        ),
        ("503", "authorization-unavailable overloaded response-sealed store-unavailable"),
        ("504", "authorization-unavailable outcome-unknown upstream-unanswered"),
    ];
    let expected: Vec<_> = expected
        .iter()
        .flat_map(|(status, slugs)| slugs.split(' ').map(move |slug| format!("{status} {slug}")))
        .collect();
    assert_eq!(listed, expected);
    let ada = "Authorization: Bearer ada";
    for (fields, status, slug) in [
        (&["Idempotency-Key: a"][..], 401, "scope-unavailable"),
        (&["Idempotency-Key: a", ada, "Authorization: Bearer eve"], 400, "scope-unavailable"),
        (&["Idempotency-Key: a", "Idempotency-Key: b", ada], 400, "key-invalid"),
        (&["Idempotency-Key: a", ada], 504, "outcome-unknown"),
        (&["Idempotency-Key: a", ada], 500, "outcome-unknown"),
        (&[ada], 504, "upstream-unanswered"),
    ] {
        sidecar.ask(&request("POST", "/orders", fields, "{}")).await.is_problem(status, slug);
        assert!(listed.contains(&format!("{status} {slug}")));
    }
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
        "--request PUT 'https://api.example.com/items/123' \\\n",
        "--header \"Idempotency-Key: ${key:?}\"",
        "## PATCH, POST to all other paths\n",
        "| Unique for | each caller, method and path |\n",
        "has the field Idempotency-Status, with refused; problem=NAME; retry=WORD.",
        // The tests of the programs run those in other languages.
        "directory, err := os.UserConfigDir()\n",
        "case strings.HasPrefix(refusal, \"refused\"):\n\t\t\tagain = strings.Contains(refusal, \"retry=same-key\")",
        "strconv.Atoi(wait[:min(len(wait), 9)])",
        "min(max(pause*time.Second, after), time.Hour)",
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
    assert!(html.contains("&quot;Idempotency-Key&quot;: key,") && html.ends_with("</html>\n"), "{html}");
}

#[tokio::test]
async fn the_rules_name_the_fields_that_separate_keys() {
    let rules = |flags: &[&str]| {
        let mut rules = std::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
        let output = rules.args(["rules", "--to=http://127.0.0.1:1"]).args(flags).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let stripe = ["--profile=stripe", "--scope=single-tenant"];
    let page = rules(&stripe);
    let row = "| Unique for | each caller, and for the values of Stripe-Account and Stripe-Context. Retry with the same values";
    assert!(page.contains(row), "{page}");
    for (flags, expected) in [
        (&stripe[..], &["Stripe-Account", "Stripe-Context"][..]),
        (&["--profile=aws", "--scope=single-tenant"], &["X-Amz-Target"]),
        (&[], &[]),
    ] {
        let flags = [flags, &["--format=json"]].concat();
        let descriptor: serde_json::Value = serde_json::from_str(&rules(&flags)).unwrap();
        let named = &descriptor["operations"][0]["key"]["scopeHeaders"];
        assert_eq!(*named, serde_json::json!(expected), "{flags:?}");
    }
    // It is what happens: with another value, or without the field, the request is executed again.
    let service = Service::new().await.answers(OK);
    let sidecar = Sidecar::start(service.address, &stripe).await;
    let mut requests = 0;
    for account in ["Stripe-Account: acct_1", "Stripe-Account: acct_2", "X-Other: 1"] {
        requests += 1;
        for _ in 0..2 {
            sidecar.ask(&request("POST", "/v1/charges", &["Idempotency-Key: a", account], "a=1")).await;
            assert_eq!(service.requests(), requests, "{account}");
        }
    }
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
    let own = "openapi: 3.1.0\npaths: {}\ncomponents: {schemas: {IdempotencyProblem: {type: string}}}\n";
    std::fs::write(path("schema.yaml"), own).unwrap();
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
    // The path of the server comes first, and parameters of the path are those of the operation.
    let based = api
        .replace("paths:\n", "servers: [{url: 'https://shop.example/v1'}]\npaths:\n")
        .replace("/v1/orders/{id}:", "/orders/{id}:")
        .replace(
            "  /items:\n",
            "  /items:\n    parameters: [{name: IDEMPOTENCY-KEY, in: header, schema: {type: string}}]\n",
        );
    std::fs::write(path("based.yaml"), based).unwrap();
    let based = openapi(&["--merge", "based.yaml"]);
    let document: serde_json::Value = serde_json::from_slice(&based.stdout).unwrap();
    assert_eq!(document["paths"]["/orders/{id}"]["post"]["parameters"][0]["schema"]["format"], "uuid");
    let change = &document["paths"]["/items"]["patch"];
    assert_eq!(change["parameters"].as_array().unwrap().len(), 1, "{change}");
    let generated = openapi(&[]);
    let own: serde_json::Value = serde_json::from_slice(&generated.stdout).unwrap();
    assert_eq!(own["paths"]["/v1/{rest}"]["parameters"][0]["name"], "rest");
    assert!(own["paths"]["/v1/{rest}"]["post"]["responses"]["400"].is_object(), "{own}");

    for (name, document) in [("merged.json", merged.stdout), ("own.json", generated.stdout)] {
        std::fs::write(path(name), document).unwrap();
        assert_valid(&path(name));
    }
    let text = std::fs::read_to_string(path("merged.json")).unwrap();
    let places: Vec<_> =
        ["openapi", "info", "paths", "/v1/orders/{id}", "parameters", "post", "201", "409", "/items"]
            .iter()
            .map(|name| text.find(&format!("\"{name}\":")).unwrap_or_else(|| panic!("no {name} in {text}")))
            .collect();
    assert!(places.is_sorted(), "members keep their order: {places:?} in {text}");
    for (file, error) in [
        ("old.yaml", "not an OpenAPI 3 document"),
        ("read.yaml", "no operation in it has a method that a key protects"),
        ("bad.yaml", "neither YAML nor JSON"),
        ("schema.yaml", "a schema IdempotencyProblem of its own"),
        ("none.yaml", "No such file"),
    ] {
        let output = openapi(&["--merge", file]);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && text.contains(error) && text.contains(file), "{text}");
    }
}

#[test]
fn a_key_of_the_body_is_described_in_the_schema_of_the_body() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let config = "scope = \"required-header:authorization\"\n[[route]]\npath = \"/v2/{*rest}\"\nprofile = \"square\"\n\
                  [[route]]\npath = \"/deep\"\nkey-member = [\"/meta/key\"]\n\
                  [[route]]\npath = \"/tokens\"\nkey-query = \"Token\"\n";
    std::fs::write(path("oncegate.toml"), config).unwrap();
    let api = r##"
openapi: 3.1.0
info: {title: Shop, version: "1"}
paths:
  /v2/inline:
    post:
      requestBody:
        content:
          application/json:
            schema: {type: object, properties: {z: {type: integer}, a: {type: integer}}, required: [z]}
          text/plain: {schema: {type: string}}
      responses: {200: {description: Done}}
  /v2/named:
    post:
      requestBody: {$ref: "#/components/requestBodies/Pay"}
      responses: {200: {description: Done}}
  /v2/has:
    post:
      requestBody: {required: true, content: {application/json: {schema: {$ref: "#/components/schemas/Keyed"}}}}
      responses: {200: {description: Done}}
  /v2/closed:
    post:
      requestBody: {content: {application/json: {schema: {$ref: "#/components/schemas/Closed"}}}}
      responses: {200: {description: Done}}
  /v2/list:
    post:
      requestBody: {content: {application/json: {schema: {type: array, items: {type: string}}}}}
      responses: {200: {description: Done}}
  /v2/none:
    delete: {responses: {204: {description: Gone}}}
    post: {responses: {200: {description: Done}}}
  /deep:
    post:
      requestBody: {content: {application/vnd.shop+json: {schema: {type: object, properties: {meta: {type: object}}}}}}
      responses: {200: {description: Done}}
  /tokens:
    post: {responses: {200: {description: Done}}}
components:
  requestBodies:
    Pay: {content: {application/json: {schema: {$ref: "#/components/schemas/Pay"}}}}
  schemas:
    Pay: {type: object, properties: {amount: {type: integer}}}
    Base: {type: object, properties: {Idempotency_Key: {type: string, description: ours}}}
    Keyed: {allOf: [{$ref: "#/components/schemas/Base"}, {type: object}]}
    Closed: {type: object, properties: {amount: {type: integer}}, additionalProperties: false}
    Loop: {allOf: [{$ref: "#/components/schemas/Loop"}]}
"##;
    std::fs::write(path("api.yaml"), api).unwrap();
    let mut openapi = std::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
    openapi.args(["openapi", "--to=http://127.0.0.1:1", "--config=oncegate.toml", "--merge=api.yaml"]);
    let merged = openapi.current_dir(directory.path()).output().unwrap();
    let said = String::from_utf8_lossy(&merged.stderr);
    assert!(merged.status.success(), "{said}");
    let warnings: Vec<_> = said.lines().filter(|line| line.contains("forbids the member")).collect();
    assert!(warnings.len() == 1 && warnings[0].contains("post /v2/closed"), "{said}");
    let document: serde_json::Value = serde_json::from_slice(&merged.stdout).unwrap();
    let body = |path: &str| &document["paths"][path]["post"]["requestBody"];
    let schema = |path: &str| &body(path)["content"]["application/json"]["schema"];

    let inline = schema("/v2/inline");
    assert_eq!(inline["properties"]["idempotency_key"]["maxLength"], 255, "{inline}");
    assert_eq!(
        (&inline["required"], &body("/v2/inline")["required"]),
        (&json!(["z", "idempotency_key"]), &json!(true))
    );
    assert_eq!(body("/v2/inline")["content"]["text/plain"]["schema"], json!({"type": "string"}));
    let named = schema("/v2/named");
    assert_eq!(named["allOf"][0]["$ref"], "#/components/schemas/Pay");
    assert_eq!(named["allOf"][1]["required"], json!(["idempotency_key"]));
    assert_eq!(named["allOf"][1]["properties"]["idempotency_key"]["type"], "string");
    assert_eq!(document["components"]["schemas"]["Pay"]["properties"]["idempotency_key"], json!(null));
    for (path, name) in [("/v2/has", "Keyed"), ("/v2/closed", "Closed")] {
        assert_eq!(*schema(path), json!({"$ref": format!("#/components/schemas/{name}")}));
    }
    assert_eq!(schema("/v2/list")["type"], "array");
    assert_eq!(*body("/v2/none"), json!(null));
    let deep = &body("/deep")["content"]["application/vnd.shop+json"]["schema"]["allOf"][1];
    assert_eq!(deep["properties"]["meta"]["properties"]["key"]["type"], "string", "{document:#}");
    assert_eq!((&deep["required"], &body("/deep")["required"]), (&json!(null), &json!(null)));
    let token = &document["paths"]["/tokens"]["post"]["parameters"][1];
    assert_eq!((&token["name"], &token["in"]), (&json!("Token"), &json!("query")));

    let mut openapi = std::process::Command::new(env!("CARGO_BIN_EXE_oncegate"));
    openapi.args(["openapi", "--to=http://127.0.0.1:1", "--config=oncegate.toml"]);
    let generated = openapi.current_dir(directory.path()).output().unwrap();
    let own: serde_json::Value = serde_json::from_slice(&generated.stdout).unwrap();
    let schema = &own["paths"]["/v2/{rest}"]["post"]["requestBody"]["content"]["application/json"]["schema"];
    assert_eq!(schema["required"], json!(["idempotency_key"]), "{own}");
    for (name, document) in [("merged.json", merged.stdout), ("own.json", generated.stdout)] {
        std::fs::write(path(name), document).unwrap();
        assert_valid(&path(name));
    }
}

/// Checks an OpenAPI document with a validator.
fn assert_valid(document: &std::path::Path) {
    let valid = std::process::Command::new("node")
        .args(["validate.mjs".as_ref(), document.as_os_str()])
        .current_dir(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vendors"))
        .output()
        .unwrap();
    assert!(valid.status.success(), "{document:?}: {}", String::from_utf8_lossy(&valid.stderr));
}
