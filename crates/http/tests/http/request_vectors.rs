//! The golden vectors of the middleware, which libraries in other languages use too: `vectors/requests.json` (what a request is:
//! one that passes, one that is refused, or one with a record) and `vectors/outcomes.json` (what becomes of a response). With
//! `ONCEGATE_WRITE_VECTORS=1` the tests write the files from the code.
//!
//! The settings of a vector have the names and values of the sidecar's configuration.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::future::{Ready, ready};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use oncegate_core::fingerprint::{FingerprintRules, JsonPointer};
use oncegate_core::{
    Claim, Command, Completion, MemoryStore, NaturalKey, Outcome, RecordId, Store, StoreError, StoreFuture,
    delegate_store,
};
use oncegate_engine::Engine;
use oncegate_http::{
    AuthorityRole, BodyComparison, CallerScope, Condition, IdempotencyLayer, KeyFormat, KeyScope, KeySyntax,
    PathCase, Profile, RequestBody, ServerErrors, Settings, TrailingSlash,
};
use oncegate_testkit::ManualClock;
use serde_json::{Value, json};
use tower_layer::Layer as _;
use tower_service::Service;

const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/vectors/");

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

/// A body as text if it is text, else as hexadecimal digits.
fn show_body(bytes: &[u8]) -> (&'static str, Value) {
    match std::str::from_utf8(bytes) {
        Ok(text) => ("body", text.into()),
        Err(_) => ("body_hex", hex(bytes).into()),
    }
}

fn show_headers(headers: &HeaderMap) -> Value {
    let mut lines: Vec<_> = headers
        .iter()
        .filter(|(name, _)| *name != http::header::CONTENT_LENGTH)
        .map(|(name, value)| json!([name.as_str(), value.to_str().unwrap()]))
        .collect();
    lines.sort_by_key(Value::to_string);
    lines.into()
}

/// Applies settings by the names of the configuration.
fn settings(of: &Value) -> Settings {
    let name = |value: &Value| HeaderName::from_bytes(value.as_str().unwrap().as_bytes()).unwrap();
    let names = |value: &Value| value.as_array().unwrap().iter().map(name).collect::<Vec<_>>();
    let pointers = |value: &Value| -> Vec<JsonPointer> {
        value.as_array().unwrap().iter().map(|text| text.as_str().unwrap().parse().unwrap()).collect()
    };
    let mut settings = Settings::new(Profile::named(of["profile"].as_str().unwrap_or("ietf")).unwrap());
    let mut rules = FingerprintRules::new();
    for (setting, value) in of.as_object().unwrap() {
        let word = value.as_str().unwrap_or_default();
        settings = match setting.as_str() {
            "profile" => settings,
            "scope" => {
                let parts = value.as_array().unwrap().iter().map(|part| scope(part.as_str().unwrap()));
                settings.with_caller(parts.reduce(CallerScope::and).unwrap())
            }
            "authority" => settings.with_authority(match word {
                "compare" => AuthorityRole::Compared,
                "scope" => AuthorityRole::Scope,
                _ => AuthorityRole::Ignored,
            }),
            "require-key" => settings.with_required_key(value.as_bool().unwrap()),
            "key-header" => settings.with_key_headers(names(value)).unwrap(),
            "natural-key" => settings.with_natural_key(NaturalKey::new(pointers(value)).unwrap()),
            "key-syntax" => settings.with_key_syntax(match word {
                "strict" => KeySyntax::Strict,
                "raw" => KeySyntax::Raw,
                _ => KeySyntax::Lenient,
            }),
            "key-format" => settings.with_key_format(match word {
                "uuid" => KeyFormat::Uuid,
                "ulid" => KeyFormat::Ulid,
                _ => KeyFormat::pattern(word.strip_prefix("pattern:").unwrap()).unwrap(),
            }),
            "key-scope" => settings.with_key_scope(match word {
                "caller" => KeyScope::Caller,
                _ => KeyScope::Endpoint,
            }),
            "trailing-slash" => settings.with_trailing_slash(TrailingSlash::Exact),
            "path-case" => settings.with_path_case(PathCase::Exact),
            "methods" => {
                let methods = value.as_array().unwrap().iter();
                settings
                    .with_methods(methods.map(|m| m.as_str().unwrap().parse().unwrap()).collect())
                    .unwrap()
            }
            "stored-headers" => settings.with_stored_headers(names(value)).unwrap(),
            "replay-marker" => settings.with_replay_marker(name(value)).unwrap(),
            "documentation" => settings.with_documentation(word).unwrap(),
            "problem-base-url" => settings.with_problem_base_url(word).unwrap(),
            "max-request-body" => settings.with_max_request_body(value.as_u64().unwrap() as usize).unwrap(),
            "max-response-body" => settings.with_max_response_body(value.as_u64().unwrap() as usize).unwrap(),
            "server-errors" => settings.with_server_errors(ServerErrors::Release),
            "release-statuses" => {
                let statuses = value.as_array().unwrap().iter();
                let statuses = statuses.map(|s| StatusCode::from_u16(s.as_u64().unwrap() as u16).unwrap());
                settings.with_release_statuses(statuses.collect()).unwrap()
            }
            "fingerprint.headers" => settings.with_fingerprint_headers(names(value)),
            "fingerprint.body" => settings.with_body_comparison(match word {
                "raw" => BodyComparison::Raw,
                _ => BodyComparison::Nothing,
            }),
            "fingerprint.exclude" => {
                rules = pointers(value).into_iter().fold(rules, FingerprintRules::exclude);
                settings.with_fingerprint(rules.clone())
            }
            "fingerprint.include" => {
                rules = pointers(value).into_iter().fold(rules, FingerprintRules::include);
                settings.with_fingerprint(rules.clone())
            }
            other => panic!("{other}"),
        };
    }
    settings
}

fn scope(part: &str) -> CallerScope {
    let (kind, name) = part.split_once(':').unwrap_or((part, ""));
    match kind {
        "header" => CallerScope::header(name.parse().unwrap()),
        "required-header" => CallerScope::required_header(name.parse().unwrap()),
        "cookie" => CallerScope::cookie(name).unwrap(),
        "required-cookie" => CallerScope::required_cookie(name).unwrap(),
        "host" => CallerScope::host(),
        "single-tenant" => CallerScope::single_tenant(),
        other => panic!("{other}"),
    }
}

/// The commands of the layer.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<(RecordId, Command)>>>);

/// A store that notes commands.
struct NotingStore(MemoryStore<ManualClock>, Seen);

impl Store for NotingStore {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        self.1.0.lock().unwrap().push((id, command.clone()));
        self.0.apply(id, command)
    }

    fn try_apply(&self, _: RecordId, _: &Command) -> Option<Result<Outcome, StoreError>> {
        None
    }

    delegate_store!(self, self.0 => lookup list purge audit check changed advisories accept_clock now capabilities);
}

/// Gives this response to every request, and counts them.
#[derive(Clone)]
struct Handler {
    answer: Arc<dyn Fn() -> Response<Full<Bytes>> + Send + Sync>,
    requests: Arc<Mutex<usize>>,
}

impl Service<Request<RequestBody<Full<Bytes>>>> for Handler {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<RequestBody<Full<Bytes>>>) -> Self::Future {
        *self.requests.lock().unwrap() += 1;
        ready(Ok((self.answer)()))
    }
}

/// A layer with these settings and its store.
struct World {
    layer: IdempotencyLayer,
    handler: Handler,
    seen: Seen,
}

impl World {
    fn new(settings: Settings, answer: impl Fn() -> Response<Full<Bytes>> + Send + Sync + 'static) -> Self {
        let seen = Seen::default();
        let store = MemoryStore::new(ManualClock::at_millis(1_800_000_000_000));
        let engine = Engine::new(NotingStore(store, seen.clone()));
        let policy = settings.policy().with_wait(Duration::ZERO).unwrap();
        let layer = IdempotencyLayer::new(engine).with_settings(settings.with_policy(policy)).unwrap();
        Self { layer, handler: Handler { answer: Arc::new(answer), requests: Arc::default() }, seen }
    }

    async fn send(&self, request: Request<Full<Bytes>>) -> (StatusCode, HeaderMap, Bytes) {
        let response = self.layer.layer(self.handler.clone()).call(request).await.unwrap();
        let (parts, body) = response.into_parts();
        (parts.status, parts.headers, body.collect().await.unwrap().to_bytes())
    }

    fn claims(&self) -> Vec<(RecordId, Claim)> {
        let seen = self.seen.0.lock().unwrap();
        let claim = |(id, command): &(RecordId, Command)| match command {
            Command::Claim(claim) => Some((*id, claim.clone())),
            _ => None,
        };
        seen.iter().filter_map(claim).collect()
    }
}

fn request(of: &Value) -> Request<Full<Bytes>> {
    let mut request =
        Request::builder().method(of["method"].as_str().unwrap()).uri(of["target"].as_str().unwrap());
    for line in of["headers"].as_array().unwrap() {
        request = request.header(line[0].as_str().unwrap(), line[1].as_str().unwrap());
    }
    request.body(of["body"].as_str().unwrap_or_default().to_owned().into()).unwrap()
}

/// The layer's treatment of a request.
async fn judge(of: &Value) -> Value {
    let world = World::new(settings(&of["settings"]), || Response::new(Full::from("done")));
    let (status, headers, body) = world.send(request(&of["request"])).await;
    let claims = world.claims();
    if let Some((id, claim)) = claims.first() {
        assert_eq!((claims.len(), status), (1, StatusCode::OK), "{of}");
        return json!({
            "record": id.to_string(),
            "fingerprint": format!("{:02x}{}", claim.fingerprint.version(), hex(claim.fingerprint.digest())),
            "caller": claim.label.caller().to_string(),
            "key_tag": claim.label.key().map(|tag| tag.to_string()),
            "operation": claim.label.operation(),
        });
    }
    if *world.handler.requests.lock().unwrap() == 1 {
        return json!("passes");
    }
    let (name, body) = show_body(&body);
    json!({"refused": {"status": status.as_u16(), "headers": show_headers(&headers), name: body}})
}

fn vector(
    name: &str,
    settings: Value,
    method: &str,
    target: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Value {
    json!({
        "name": name,
        "settings": settings,
        "request": {"method": method, "target": target, "headers": headers, "body": body},
    })
}

/// A name, the settings of the scope, and header lines.
type Caller<'a> = (&'a str, Value, &'a [(&'a str, &'a str)]);

/// The requests, without their results.
fn requests() -> Vec<Value> {
    const HOST: (&str, &str) = ("host", "shop.test");
    const JSON: (&str, &str) = ("content-type", "application/json");
    const BODY: &str = r#"{"amount":5}"#;
    const UUID: &str = "8E03978E-40d5-43e8-bc93-6894a57f9324";
    let one = || json!({"scope": ["single-tenant"]});
    let with = |more: Value| {
        let mut settings = one();
        settings.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        settings
    };
    let mut all = Vec::new();
    let mut add =
        |name: &str, settings: Value, method: &str, target: &str, headers: &[(&str, &str)], body: &str| {
            all.push(vector(name, settings, method, target, headers, body));
        };
    // Methods and presence.
    for method in ["POST", "PATCH", "PUT", "DELETE", "GET", "HEAD", "OPTIONS", "post", "Patch", "MERGE"] {
        for (what, settings) in [
            ("ietf", one()),
            ("classic", with(json!({"profile": "classic"}))),
            ("stripe", with(json!({"profile": "stripe"}))),
        ] {
            add(
                &format!("method {method}, {what}"),
                settings,
                method,
                "/pay",
                &[HOST, ("idempotency-key", "k")],
                "",
            );
        }
    }
    for profile in ["ietf", "classic", "stripe"] {
        add(
            &format!("no key, {profile}"),
            with(json!({"profile": profile})),
            "POST",
            "/pay",
            &[HOST, JSON],
            BODY,
        );
        add(
            &format!("a key that is required and missing, {profile}"),
            with(json!({"profile": profile, "require-key": true})),
            "POST",
            "/pay",
            &[HOST, JSON],
            BODY,
        );
        add(
            &format!("a key with a comma, {profile}"),
            with(json!({"profile": profile})),
            "POST",
            "/pay",
            &[HOST, ("idempotency-key", "a, b")],
            BODY,
        );
        add(
            &format!("two keys, {profile}"),
            with(json!({"profile": profile})),
            "POST",
            "/pay",
            &[HOST, ("idempotency-key", "a"), ("idempotency-key", "a")],
            BODY,
        );
        add(
            &format!("a body that is too large, {profile}"),
            with(json!({"profile": profile, "max-request-body": 16})),
            "POST",
            "/pay",
            &[HOST, ("idempotency-key", "a")],
            "0123456789abcdefg",
        );
        add(
            &format!("a scope that is missing, {profile}"),
            json!({"profile": profile, "scope": ["required-header:authorization"]}),
            "POST",
            "/pay",
            &[HOST, ("idempotency-key", "a")],
            "",
        );
    }
    add(
        "documentation and links",
        with(
            json!({"require-key": true, "documentation": "https://shop.test/keys", "problem-base-url": "https://shop.test/problems/"}),
        ),
        "POST",
        "/pay",
        &[HOST],
        "",
    );
    // Keys.
    let keys = [
        "abc",
        "\"abc\"",
        "\"abc\";p=1",
        "\"a\\\"b\\\\c\"",
        "\"a, b\"",
        "a,b",
        "\"abc",
        "abc\"",
        "\"abc\"def",
        "\"a\\bc\"",
        "\"",
        "\"abc\";",
        "'foo'",
        "",
        "\"\"",
        "   ",
        "\"   \"",
        "  \"abc\"  ",
        "\t abc \t",
        "a b",
        "a\tb",
        "a;b",
        "k=v",
        "%41",
        "%\"f%c3%bc\"",
        "?1",
        ":YWJj:",
        "42",
        "ABC",
        UUID,
        "01ARZ3NDEKTSV4RRFFQ69G5FAV",
        "01arz3ndektsv4rrffq69g5fav",
        "81ARZ3NDEKTSV4RRFFQ69G5FAV",
        "order-7",
        "~!#$&'()*+-./:<=>?@[]^_`{|}",
    ];
    for key in keys {
        for syntax in ["lenient", "strict", "raw"] {
            add(
                &format!("key {key}, {syntax}"),
                with(json!({"key-syntax": syntax})),
                "POST",
                "/pay",
                &[HOST, ("idempotency-key", key)],
                "",
            );
        }
        for format in ["uuid", "ulid", "pattern:order-[0-9]+"] {
            add(
                &format!("key {key}, {format}"),
                with(json!({"key-format": format})),
                "POST",
                "/pay",
                &[HOST, ("idempotency-key", key)],
                "",
            );
        }
    }
    for (name, length) in [("255", 255), ("256", 256)] {
        let (bare, quoted) = ("k".repeat(length), format!("\"{}\"", "\\\"".repeat(length)));
        for key in [&bare, &quoted] {
            add(
                &format!("a key of {name} bytes"),
                one(),
                "POST",
                "/pay",
                &[HOST, ("idempotency-key", key)],
                "",
            );
        }
    }
    let fields = json!({"key-header": ["X-Key", "Idempotency-Key"]});
    for (name, headers) in [
        ("the first field", &[("x-key", "a")][..]),
        ("the second field", &[("idempotency-key", "a")]),
        ("both fields alike", &[("x-key", "a"), ("idempotency-key", "\"a\"")]),
        ("both fields differ", &[("x-key", "a"), ("idempotency-key", "b")]),
        ("another spelling", &[("x_key", "a")]),
        ("another spelling of the usual field", &[("idempotency_key", "a")]),
    ] {
        let headers: Vec<_> = [HOST].iter().chain(headers).copied().collect();
        add(name, with(fields.clone()), "POST", "/pay", &headers, "");
    }
    add("another spelling, no key needed", one(), "POST", "/pay", &[HOST, ("idempotency_key", "a")], "");
    // Callers.
    let callers: [Caller<'_>; 32] = [
        ("nobody", json!({}), &[]),
        ("a bearer", json!({}), &[("authorization", "Bearer ada")]),
        ("a bearer in another case of the scheme", json!({}), &[("authorization", "bearer ada")]),
        ("a scheme without a credential", json!({}), &[("authorization", "Bearer")]),
        ("basic", json!({}), &[("authorization", "Basic YWRhOg==")]),
        ("two lines", json!({}), &[("authorization", "Bearer a"), ("authorization", "Bearer b")]),
        ("a cookie", json!({}), &[("cookie", "sid=1")]),
        ("a bearer and a cookie", json!({}), &[("authorization", "Bearer ada"), ("cookie", "sid=1")]),
        ("basic and a cookie", json!({}), &[("authorization", "Basic YWRhOg=="), ("cookie", "sid=1")]),
        ("an API key", json!({}), &[("x-api-key", "1")]),
        ("an API key with underscores", json!({}), &[("x_api_key", "1")]),
        ("a bearer and an API key", json!({}), &[("authorization", "Bearer ada"), ("x-api-key", "1")]),
        (
            "a bearer and a signature",
            json!({}),
            &[("authorization", "Bearer ada"), ("signature", "sig1=:YQ==:")],
        ),
        ("digest", json!({}), &[("authorization", "Digest username=ada")]),
        ("an AWS signature", json!({}), &[("authorization", "AWS4-HMAC-SHA256 Credential=a")]),
        ("a CSRF token", json!({}), &[("x-csrf-token", "1")]),
        ("an author", json!({}), &[("x-author", "1")]),
        ("an empty bearer and an API key", json!({}), &[("authorization", ""), ("x-api-key", "1")]),
        ("a tenant", json!({"scope": ["header:x-tenant"]}), &[("x-tenant", "a")]),
        ("no tenant", json!({"scope": ["header:x-tenant"]}), &[("authorization", "Bearer ada")]),
        ("an empty tenant", json!({"scope": ["required-header:x-tenant"]}), &[("x-tenant", " ")]),
        ("a tenant in another spelling", json!({"scope": ["header:x-tenant"]}), &[("x_tenant", "a")]),
        ("two tenants", json!({"scope": ["header:x-tenant"]}), &[("x-tenant", "a"), ("x-tenant", "a")]),
        ("a session", json!({"scope": ["cookie:sid"]}), &[("cookie", "a=1; sid=\"2\"; b=3")]),
        ("no session", json!({"scope": ["required-cookie:sid"]}), &[("cookie", "a=1")]),
        ("two sessions", json!({"scope": ["cookie:sid"]}), &[("cookie", "sid=1; sid=2")]),
        (
            "two equal sessions in two lines",
            json!({"scope": ["cookie:sid"]}),
            &[("cookie", "sid=1"), ("cookie", "sid=1")],
        ),
        (
            "tenant and session",
            json!({"scope": ["required-header:x-tenant", "cookie:sid"]}),
            &[("x-tenant", "a"), ("cookie", "sid=1")],
        ),
        (
            "tenant and no session",
            json!({"scope": ["required-header:x-tenant", "cookie:sid"]}),
            &[("x-tenant", "a")],
        ),
        (
            "session and tenant, in another order",
            json!({"scope": ["cookie:sid", "required-header:x-tenant"]}),
            &[("x-tenant", "a"), ("cookie", "sid=1")],
        ),
        ("host as a caller", json!({"scope": ["host", "header:x-tenant"]}), &[("x-tenant", "a")]),
        (
            "authority as a scope",
            json!({"scope": ["header:x-tenant"], "authority": "scope"}),
            &[("x-tenant", "a")],
        ),
    ];
    for (name, settings, headers) in callers {
        let headers: Vec<_> = [HOST, ("idempotency-key", "k")].iter().chain(headers).copied().collect();
        add(&format!("caller: {name}"), settings, "POST", "/pay", &headers, "");
    }
    for name in [
        "x-auth-token",
        "x-access-token",
        "token",
        "x-gitlab-token",
        "x-vault-token",
        "x-secret",
        "x-session-id",
        "x-user-id",
        "x-username",
        "x-forwarded-user",
        "remote-user",
        "x-jwt",
        "x-credential",
        "password",
        "x-client-cert",
        "x-principal",
        "x-identity",
        "dpop",
        "mcp-session-id",
        "x-functions-key",
        "x-idempotency-token",
        "sec-fetch-user",
        "lock-token",
        "x-xsrf-token",
        "x-authority",
        "user-agent",
        "x-request-id",
        "proxy-authorization",
        "x-oauth-scopes",
        "ocp-apim-subscription-key",
    ] {
        add(
            &format!("a field that may be a credential: {name}"),
            json!({}),
            "POST",
            "/pay",
            &[HOST, ("idempotency-key", "k"), (name, "1")],
            "",
        );
    }
    // Paths, targets and hosts.
    for target in [
        "/pay", "/pay/", "//pay", "/%70ay", "/pay?a=1", "/pay?a=2", "/pay?", "/Pay", "/a/../pay",
        "/a/%2e%2e/pay", "/./pay", "/pay%2f1", "/pay%2F1", "/p%c3%a4y", "/pay;v=1", "/pay%3bv=1", "/",
        "/pay/%7Euser", "/pay//x//", "/..", "/pay/.", "/pay/..",
    ] {
        add(&format!("target {target}"), one(), "POST", target, &[HOST, ("idempotency-key", "k")], "");
    }
    add(
        "target /pay/, exact",
        with(json!({"trailing-slash": "exact"})),
        "POST",
        "/pay/",
        &[HOST, ("idempotency-key", "k")],
        "",
    );
    add(
        "keys of callers",
        with(json!({"key-scope": "caller"})),
        "POST",
        "/pay",
        &[HOST, ("idempotency-key", "k")],
        "",
    );
    add(
        "keys of callers, another path",
        with(json!({"key-scope": "caller"})),
        "POST",
        "/buy",
        &[HOST, ("idempotency-key", "k")],
        "",
    );
    for host in [
        "shop.test", "SHOP.test", "shop.test:80", "shop.test:443", "shop.test:8080", "shop.test:",
        "other.test", "[::1]:80", " shop.test ",
    ] {
        for authority in ["compare", "ignore", "scope"] {
            add(
                &format!("host {host}, {authority}"),
                with(json!({"authority": authority})),
                "POST",
                "/pay",
                &[("host", host), ("idempotency-key", "k")],
                "",
            );
        }
    }
    add("no host", one(), "POST", "/pay", &[("idempotency-key", "k")], "");
    for (name, value) in [
        ("x-http-method-override", "DELETE"),
        ("x-original-url", "/admin"),
        ("x-rewrite-url", "/admin"),
        ("x-forwarded-prefix", "/v1"),
        ("x-method-override", "PUT"),
    ] {
        add(
            &format!("a field that names another method or path: {name}"),
            one(),
            "POST",
            "/pay",
            &[HOST, ("idempotency-key", "k"), (name, value)],
            "",
        );
    }
    for (name, value) in
        [("stripe-account", "acct_1"), ("stripe-context", "ctx_1"), ("stripe_account", "acct_1")]
    {
        add(
            &format!("stripe: {name}"),
            with(json!({"profile": "stripe"})),
            "POST",
            "/v1/charges",
            &[HOST, ("idempotency-key", "k"), (name, value)],
            "",
        );
    }
    // Bodies.
    let bodies: [(&str, &str); 22] = [
        ("application/json", BODY),
        ("application/json", "{ \"amount\": 5.0 }"),
        ("application/json; charset=utf-8", BODY),
        ("application/problem+json", BODY),
        ("text/plain", BODY),
        ("", BODY),
        ("application/json", "{\"a\":1,\"a\":2}"),
        ("application/json", "{\"a\":1,\"A\":2}"),
        ("application/json", "{\"n\":9007199254740993}"),
        ("application/json", "{\"n\":0.1234567890123456789}"),
        ("application/json", "{\"n\":1e400}"),
        ("application/json", "{\"s\":\"\\ud800\"}"),
        ("application/json", "{\"s\":\"\\u00e4\"}"),
        ("application/json", "{\"s\":\"\u{e4}\"}"),
        ("application/json", "[1, 2]"),
        ("application/json", "{broken"),
        ("application/json", ""),
        ("application/x-www-form-urlencoded", "a=1&b=2"),
        ("application/x-www-form-urlencoded", "b=2&a=1"),
        ("application/x-www-form-urlencoded", "a.b=1&a_b=2"),
        ("application/x-www-form-urlencoded", "a=1;b=2"),
        (
            "multipart/form-data; boundary=x",
            "--x\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n1\r\n--x--\r\n",
        ),
    ];
    for (number, (media_type, body)) in bodies.iter().enumerate() {
        add(
            &format!("body {number}: {media_type} {body}"),
            one(),
            "POST",
            "/pay",
            &[HOST, ("idempotency-key", "k"), ("content-type", media_type)],
            body,
        );
    }
    for (name, more) in [
        ("raw", json!({"fingerprint.body": "raw"})),
        ("nothing", json!({"fingerprint.body": "nothing"})),
        ("exclude", json!({"fingerprint.exclude": ["/at"]})),
        ("include", json!({"fingerprint.include": ["/amount"]})),
        ("include what is not there", json!({"fingerprint.include": ["/absent"]})),
        ("headers", json!({"fingerprint.headers": ["x-version"]})),
    ] {
        for body in [r#"{"amount":5,"at":1}"#, r#"{"at":2,"amount":5}"#] {
            add(
                &format!("compare {name}: {body}"),
                with(more.clone()),
                "POST",
                "/pay",
                &[HOST, ("idempotency-key", "k"), JSON, ("x-version", "1")],
                body,
            );
        }
    }
    for body in [
        r#"{"cart":"c1","customer":7}"#,
        r#"{"customer":7.0,"cart":"c1"}"#,
        r#"{"customer":"7","cart":"c1"}"#,
        r#"{"customer":7}"#,
        r#"{"customer":null,"cart":"c1"}"#,
        r#"{"customer":7,"customer":8,"cart":"c"}"#,
        "",
        "a=1",
    ] {
        add(
            &format!("natural key: {body}"),
            with(json!({"natural-key": ["/customer", "/cart"]})),
            "POST",
            "/pay",
            &[HOST, JSON],
            body,
        );
    }
    for coding in ["identity", "br", "gzip"] {
        add(
            &format!("content coding {coding}"),
            one(),
            "POST",
            "/pay",
            &[HOST, ("idempotency-key", "k"), JSON, ("content-encoding", coding)],
            BODY,
        );
    }
    all
}

/// The fate of a response: in the first client's hands, in the record, and for a retry.
async fn outcome(of: &Value) -> Value {
    let answer = of["response"].clone();
    let world = World::new(settings(&of["settings"]), move || {
        let mut response = Response::builder().status(answer["status"].as_u64().unwrap() as u16);
        for line in answer["headers"].as_array().unwrap() {
            response = response
                .header(line[0].as_str().unwrap(), HeaderValue::from_str(line[1].as_str().unwrap()).unwrap());
        }
        response.body(answer["body"].as_str().unwrap().to_owned().into()).unwrap()
    });
    let send = || {
        let request = Request::builder().method(Method::POST).uri("/pay").header("idempotency-key", "k");
        world.send(request.header("host", "shop.test").body(Full::default()).unwrap())
    };
    let (first, retry) = (send().await, send().await);
    let end = world.seen.0.lock().unwrap().iter().find_map(|(_, command)| match command {
        Command::Complete(complete) => Some(match &complete.completion {
            Completion::Replayable(response) => json!({"completed": hex(response.as_encoded())}),
            Completion::Tombstone => json!("tombstone"),
            Completion::Unknown => json!("unknown"),
            other => panic!("{other:?}"),
        }),
        Command::Release(_) => Some(json!("released")),
        _ => None,
    });
    let show = |(status, headers, body): (StatusCode, HeaderMap, Bytes)| {
        let (name, body) = show_body(&body);
        json!({"status": status.as_u16(), "headers": show_headers(&headers), name: body})
    };
    let executions = *world.handler.requests.lock().unwrap();
    json!({"first": show(first), "record": end, "executions": executions, "retry": show(retry)})
}

fn outcomes() -> Vec<Value> {
    let mut all = Vec::new();
    let mut add = |name: String, settings: Value, status: u16, headers: &[(&str, &str)], body: &str| {
        let mut settings = settings;
        settings["scope"] = json!(["single-tenant"]);
        all.push(json!({"name": name, "settings": settings, "response": {"status": status, "headers": headers, "body": body}}));
    };
    for profile in ["ietf", "stripe", "classic"] {
        for status in [
            200, 201, 202, 204, 205, 206, 301, 302, 303, 304, 307, 400, 401, 402, 403, 404, 407, 408, 409,
            410, 412, 421, 422, 423, 425, 428, 429, 451, 500, 501, 502, 503, 504, 511,
        ] {
            let body = if [204, 205, 304].contains(&status) { "" } else { "{}" };
            add(
                format!("{profile} {status}"),
                json!({"profile": profile}),
                status,
                &[("content-type", "application/json")],
                body,
            );
        }
    }
    add("5xx free the key".into(), json!({"server-errors": "release"}), 500, &[], "");
    add("a status that frees the key".into(), json!({"release-statuses": [422]}), 422, &[], "");
    for directive in ["tombstone", "release", "replay", "store", "no-store", "other", "TOMBSTONE"] {
        for status in [200, 500] {
            add(
                format!("Idempotency-Store: {directive}, {status}"),
                json!({}),
                status,
                &[("idempotency-store", directive)],
                "x",
            );
        }
    }
    let fields = [
        ("content-type", "text/plain"),
        ("location", "/orders/1"),
        ("etag", "\"1\""),
        ("x-order", "1"),
        ("set-cookie", "sid=1"),
        ("date", "Tue, 24 Nov 2026 18:00:00 GMT"),
        ("server", "shop"),
        ("vary", "accept"),
        ("link", "</a>; rel=next"),
        ("cache-control", "no-store"),
        ("x-request-id", "r1"),
        ("request-id", "req_1"),
        ("retry-after", "1"),
        ("access-control-allow-origin", "*"),
        ("oncegate-record", "x"),
        ("ratelimit", "a;r=1"),
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        ("www-authenticate", "Bearer"),
        ("content-language", "de"),
        ("idempotency-key", "other"),
        ("idempotent-replayed", "true"),
    ];
    for profile in ["ietf", "stripe", "classic"] {
        add(format!("header fields, {profile}"), json!({"profile": profile}), 201, &fields, "made");
    }
    add("a further header field".into(), json!({"stored-headers": ["x-order"]}), 201, &fields, "made");
    add("another marker".into(), json!({"replay-marker": "x-replay"}), 201, &[], "made");
    add("a body that is too large".into(), json!({"max-response-body": 8}), 201, &[], "0123456789");
    add("a body that just fits".into(), json!({"max-response-body": 8}), 201, &[], "01234567");
    add("events".into(), json!({}), 200, &[("content-type", "text/event-stream")], "data: 1\n\n");
    add(
        "a field that Connection names".into(),
        json!({}),
        200,
        &[("connection", "etag"), ("etag", "\"1\"")],
        "x",
    );
    add("two lines of a field".into(), json!({}), 200, &[("link", "</a>"), ("link", "</b>")], "x");
    all
}

fn compare(name: &str, about: &str, vectors: &[Value]) {
    let lines: Vec<_> = vectors.iter().map(Value::to_string).collect();
    let computed = format!(
        "{{\n \"about\": {},\n \"version\": 1,\n \"cases\": [\n  {}\n ]\n}}\n",
        Value::from(about),
        lines.join(",\n  ")
    );
    let path = format!("{VECTORS}{name}");
    if std::env::var_os("ONCEGATE_WRITE_VECTORS").is_some() {
        std::fs::write(&path, &computed).unwrap();
    }
    let published = std::fs::read_to_string(&path).unwrap();
    for (line, (published, computed)) in published.lines().zip(computed.lines()).enumerate() {
        assert_eq!(published, computed, "{path}:{}", line + 1);
    }
    assert_eq!(published.len(), computed.len());
}

#[tokio::test]
async fn requests_have_the_published_records_and_refusals() {
    let mut vectors = requests();
    for vector in &mut vectors {
        vector["expect"] = judge(vector).await;
    }
    let about = "Golden vectors of a middleware: what it makes of the first request with a key. `settings` \
                 have the names and values of the sidecar's configuration, on top of the profile. `expect` \
                 is \"passes\" (no record), `refused` with the whole response, or the record: its \
                 identifier, the fingerprint (version and digest), the tags of caller and key, the \
                 operation. No service is named.";
    compare("requests.json", about, &vectors);
}

#[tokio::test]
async fn responses_have_the_published_outcomes() {
    let mut vectors = outcomes();
    for vector in &mut vectors {
        vector["expect"] = outcome(vector).await;
    }
    let about = "Golden vectors of a middleware: what becomes of the response of a handler to `POST /pay` \
                 with the key `k`. `record` is the end of the attempt (completed with an encoded response, \
                 tombstone, released), `first` what the client gets, `retry` what the same request gets \
                 then, and `executions` how often the handler ran after both. Header fields are sorted.";
    compare("outcomes.json", about, &vectors);
}

#[test]
fn conditions_are_published() {
    let conditions: Vec<_> = Condition::ALL
        .into_iter()
        .map(|condition| {
            json!({
                "name": condition.slug(),
                "status": condition.status().as_u16(),
                "retry": condition.retry().as_str(),
                "title": condition.title(),
                "detail": condition.detail(),
            })
        })
        .collect();
    let about = "The conditions under which a request is refused, in the order of \
                 docs/reference/problems.md. `status` is that of the profile `ietf`; `{place}` in a detail \
                 stands for the places that may carry the key.";
    compare("conditions.json", about, &conditions);
}
