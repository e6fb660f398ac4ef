//! Tests of the configuration from flags, environment and file together.

use std::ffi::OsString;
use std::fs;

use oncegate_core::{IdSecret, MemoryStore};
use oncegate_http::CallerPart;
use oncegate_testkit::ManualClock;

use super::settings::{Fallback, Shape};
use super::units::duration;
use super::*;

/// A configuration from flags, variables and the content of a file called `oncegate.toml`.
struct Given<'a> {
    flags: &'a [&'a str],
    env: &'a [(&'a str, &'a str)],
    file: &'a str,
}

const NOTHING: Given<'static> = Given { flags: &[], env: &[], file: "" };

impl Given<'_> {
    fn draft(&self) -> (Draft, tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("oncegate.toml");
        fs::write(&path, self.file).unwrap();
        let path = path.to_str().unwrap();
        let mut flags = vec!["--config", path];
        flags.extend(self.flags);
        let args = flags::parse(&flags).unwrap();
        let env: Vec<(OsString, OsString)> =
            self.env.iter().map(|(name, value)| (name.into(), value.into())).collect();
        (Draft::read(&args, env), dir)
    }

    fn config(&self) -> Config {
        let (draft, _dir) = self.draft();
        let shown = Problems(draft.problems).to_string();
        draft.config.unwrap_or_else(|| panic!("{shown}"))
    }

    /// All problems, without the directory of the file.
    fn problems(&self) -> Vec<String> {
        let (draft, dir) = self.draft();
        let prefix = format!("{}/", dir.path().display());
        draft.problems.iter().map(|problem| problem.to_string().replace(&prefix, "")).collect()
    }
}

const TO: (&str, &str) = ("ONCEGATE_TO", "http://127.0.0.1:3000");

#[test]
fn flags_win_over_the_environment_and_the_environment_over_the_file_and_the_file_over_the_default() {
    let file = "listen = \"127.0.0.1:1\"";
    let env: &[_] = &[TO, ("ONCEGATE_LISTEN", "127.0.0.1:2")];
    let flags: &[_] = &["--listen", "127.0.0.1:3"];
    for (given, port) in [
        (Given { env: &[TO], ..NOTHING }, 8080),
        (Given { env: &[TO], file, ..NOTHING }, 1),
        (Given { env, file, ..NOTHING }, 2),
        (Given { env, file, flags }, 3),
        (Given { env: &[TO], file, flags }, 3),
    ] {
        assert_eq!(given.config().listen.port(), port);
    }
}

#[test]
fn settings_have_defaults() {
    let (draft, dir) = Given { env: &[TO], ..NOTHING }.draft();
    let config = draft.config.unwrap();
    assert_eq!(config.admin, "127.0.0.1:9090".parse().unwrap());
    assert_eq!(config.store, StoreChoice::Directory(dir.path().join("oncegate-data")));
    assert_eq!(config.upstream_protocol, UpstreamProtocol::Auto);
    assert_eq!((config.threads, config.tls, config.admin_token), (None, None, None));
    assert_eq!(config.drain_timeout, Duration::from_secs(30));
    assert_eq!(config.default.upstream_timeout, Some(Duration::from_secs(30)));
    let policy = config.default.settings.policy();
    assert_eq!((policy.lease(), policy.retention()), (Duration::from_secs(30), Duration::from_secs(86_400)));
    assert_eq!(config.warnings, []);
}

/// A key that seals.
const SEAL_KEY: &str =
    "ogseal1_d76b7626affc02af_0101010101010101010101010101010101010101010101010101010101010101";

/// A secret that keys ids.
const ID_SECRET: &str =
    "ogids1_563d21b9ea4fac5f_0101010101010101010101010101010101010101010101010101010101010101";

/// For every setting, a valid value and the part of the configuration that it changes. That part is empty for the settings
/// that have no effect alone: a certificate without its key, and rights of other origins without origins.
const SAMPLES: &[(&str, &str, &str)] = &[
    ("to", "https://api.internal", "to: Upstream { scheme: \"https\", authority: api.internal }"),
    ("listen", "127.0.0.1:1", "listen: 127.0.0.1:1"),
    ("admin", "127.0.0.1:2", "admin: 127.0.0.1:2"),
    ("admin-token-file", "TOKEN", "admin_token: Some(AdminToken)"),
    ("admin-token", "0123456789abcdef", "admin_token: Some(AdminToken)"),
    ("metrics-token-file", "TOKEN", ""),
    ("metrics-token", "fedcba9876543210", ""),
    ("store", "./data", "/data\")"),
    ("store-must-exist", "true", "store_must_exist: true"),
    ("max-records", "1000", "max_records: Some(1000)"),
    ("max-store-bytes", "1GiB", "max_store_bytes: Some(1073741824)"),
    ("service", "orders", "service: Some(ServiceName(\"orders\"))"),
    ("tls-cert", "cert.pem", ""),
    ("tls-key", "key.pem", ""),
    ("tls-client-ca", "ca.pem", ""),
    ("tls-client-crl", "crl.pem", ""),
    ("upstream-protocol", "http2", "upstream_protocol: Http2"),
    ("threads", "3", "threads: Some(3)"),
    ("published-rules", "true", "published_rules: Some"),
    ("playground", "off", "playground: Off"),
    ("access-log", "json", "access_log: Some(Json)"),
    ("log-format", "json", "log_format: Json"),
    (
        "otlp-endpoint",
        "http://127.0.0.1:4318",
        "otlp: Some(OtlpOptions { endpoint: OtlpEndpoint { server: Upstream",
    ),
    ("otlp-headers", "authorization=Bearer%20whisper", ""),
    ("otlp-signals", "metrics", ""),
    ("otlp-metrics-interval", "5s", ""),
    ("otlp-service-name", "shop", ""),
    ("otlp-resource-attributes", "deployment.environment.name=test", ""),
    ("trace-sample-ratio", "0.25", "trace_sample_ratio: SampleRatio(0.25)"),
    ("profile", "stripe", "name: \"stripe\""),
    ("scope", "single-tenant", "caller: single-tenant"),
    ("jwt-keys", "https://issuer.example/jwks.json", "jwt_keys: Some(Url"),
    ("jwt-algorithms", "ES256", ""),
    ("jwt-issuer", "https://issuer.example", ""),
    ("jwt-audience", "orders", ""),
    ("authority", "scope", "authority: Scope"),
    ("require-key", "true", "require_key: true"),
    ("key-header", "X-Key", "key_headers: [\"x-key\"]"),
    ("key-query", "token", "key_query: [\"token\"]"),
    ("key-member", "/key", "key_members: [KeyMember { pointer: JsonPointer(\"/key\")"),
    ("natural-key", "/customer", "natural_key: Some(NaturalKey { members: [JsonPointer(\"/customer\")] })"),
    ("read-only-tools", "get_*", "tools: ToolPolicies { rules: [Rule { name: \"get_\""),
    ("intent-tools", "pay", "tools: ToolPolicies { rules: [Rule { name: \"pay\""),
    ("key-scope", "caller", "key_scope: Caller"),
    ("key-syntax", "strict", "KeyGrammar { syntax: Strict"),
    ("key-format", "uuid", "format: Uuid"),
    ("replay-marker", "X-Repeat", "replay_marker: (\"x-repeat\""),
    (
        "documentation",
        "https://developer.example.com/keys",
        "documentation: Some(\"<https://developer.example.com/keys>; rel=\\\"describedby\\\"\")",
    ),
    ("problem-base-url", "https://a.example/p/", "problem_base: \"https://a.example/p/\""),
    ("methods", "PUT", "methods: [PUT]"),
    ("trailing-slash", "exact", "trailing_slash: Exact"),
    ("path-case", "exact", "path_case: Exact"),
    ("lease", "5s", "lease: 5s"),
    ("retention", "48h", "Policy { lease: 30s, retention: 172800s"),
    ("wait", "1s", "wait: 1s"),
    ("on-abandoned", "reexecute", "on_abandoned: Reexecute"),
    ("completion", "upstream", "completed_by: Upstream"),
    ("reconcile-path", "/outcomes", "reconcile_path: Some(/outcomes)"),
    ("authorize", "/may-see", "authorize: Some(/may-see)"),
    ("authorize-timeout", "3s", "authorize_timeout: 3s"),
    ("reconcile-timeout", "3s", "reconcile_timeout: 3s"),
    ("server-errors", "release", "server_errors: Release"),
    ("release-statuses", "422", "release_statuses: [422], replay"),
    ("store-outage", "open", "fails_open: true"),
    ("shadow", "true", "is_shadow: true"),
    ("stored-headers", "X-Order", "kept: KeptHeaders { more: [\"x-order\"] }"),
    ("redact-response", "/card/number", "members: [JsonPointer(\"/card/number\")]"),
    ("redact-headers", "X-Token", "headers: [\"x-token\"] }"),
    ("seal-keys-file", "SEAL-KEYS", "seal: Some(SealSettings"),
    ("seal-keys", SEAL_KEY, "seal: Some(SealSettings { source: Read(Keyring"),
    ("seal-keys-command", "print-keys", "source: Command([\"print-keys\"])"),
    ("seal-required", "true", ""),
    ("seal-opens-only", "true", ""),
    ("id-secret-file", "ID-SECRET", "id_secret: Some(IdSecret("),
    ("id-secret", ID_SECRET, "id_secret: Some(IdSecret("),
    ("fingerprint.exclude", "/meta", "include: [], exclude: [JsonPointer(\"/meta\")]"),
    ("fingerprint.include", "/order", "include: [JsonPointer(\"/order\")], exclude: []"),
    ("fingerprint.body", "raw", "raw_bodies: true"),
    ("fingerprint.headers", "X-Version", "fingerprint_headers: [\"x-version\"]"),
    ("cors.allowed-origins", "https://shop.example", "origins: Some([\"https://shop.example\"])"),
    ("cors.exposed-headers", "X-Order", ""),
    ("cors.allowed-headers", "X-Version", ""),
    ("cors.allowed-methods", "GET", ""),
    ("cors.allow-credentials", "true", ""),
    ("cors.max-age", "5m", ""),
    ("max-request-body", "64KiB", "max_request_body: 65536"),
    ("request-budget", "64MiB", "request_budget: 67108864"),
    ("response-budget", "64MiB", "response_budget: 67108864"),
    ("max-in-flight", "100", "max_in_flight: 100"),
    ("rate-limit.caller", "10/s burst 50", "caller: Some(10 in 1s, burst 50)"),
    ("rate-limit.key", "5/m", "key: Some(5 in 60s, burst 5)"),
    ("rate-limit.route", "100/h", "route: Some(100 in 3600s, burst 100)"),
    ("max-in-flight-per-caller", "20", "max_in_flight_per_caller: 20"),
    ("max-in-flight-without-key", "30", "max_in_flight_without_key: Some(30)"),
    ("max-connections", "200", "max_connections: 200"),
    ("client-idle-timeout", "10m", "client_idle_timeout: 600s"),
    ("write-timeout", "5s", "write_timeout: 5s"),
    ("trusted-proxies", "10.0.0.0/8", "trusted_proxies: [Network(10.0.0.0, 8)]"),
    ("store-memory", "1GiB", "store_memory: 1073741824"),
    ("max-response-body", "64KiB", "max_response_body: 65536"),
    ("upstream-timeout", "10s", "upstream_timeout: Some(10s)"),
    ("upstream-connect-timeout", "1s", "upstream_connect_timeout: 1s"),
    ("upstream-idle-timeout", "0s", "upstream_idle_timeout: 0ns"),
    ("shutdown-delay", "5s", "shutdown_delay: 5s"),
    ("store-timeout", "3s", "store_timeout: 3s"),
    ("drain-timeout", "60s", "drain_timeout: 60s"),
];

fn sample(setting: &str) -> (&'static str, &'static str) {
    let sample = SAMPLES.iter().find(|(name, ..)| *name == setting);
    let (_, value, change) = sample.unwrap_or_else(|| panic!("add a valid value of `{setting}` to SAMPLES"));
    (value, change)
}

#[test]
fn every_setting_can_be_given_everywhere_it_is_allowed() {
    for setting in SETTINGS.iter().filter(|setting| setting.name != "config") {
        let (text, _) = sample(setting.name);
        let value = match setting.shape {
            Shape::Switch => text.to_owned(),
            _ if setting.is_command() => format!("[{text:?}]"),
            _ => format!("{text:?}"),
        };
        let in_file = format!("{} = {value}\n", setting.name);
        let in_route = format!("[[route]]\npath = \"/a\"\n{in_file}");
        let flag = setting.flag().map(|flag| format!("--{flag}={text}"));

        // Alone, a value may be incomplete, such as a key without a certificate. So the summary shows if it was accepted.
        let mut problems = Vec::new();
        let mut ways: Vec<(&str, Vec<Entry>)> = Vec::new();
        if let Some(flag) = &flag {
            ways.push(("flag", flags::parse(&[flag]).unwrap().entries().collect()));
        }
        ways.push((
            "env",
            env::read([(setting.variable().into(), text.into())], &mut problems, &mut Vec::new()),
        ));
        if setting.settable_in != SettableIn::Secret {
            ways.push(("file", file::read("f", &in_file, &mut problems).unwrap().entries));
        }
        if setting.settable_in == SettableIn::Route {
            ways.push(("route", file::read("f", &in_route, &mut problems).unwrap().routes.remove(0).entries));
        }
        for (way, entries) in ways {
            let mut values = Values::default();
            apply(&entries, &mut values, &mut problems);
            assert!(values.source(setting.name).is_some(), "{way}: {}", setting.name);
        }
        assert_eq!(problems, [], "{}", setting.name);

        let content = file::read("f", &in_route, &mut problems).unwrap();
        let refused = !problems.is_empty();
        assert_eq!(refused, setting.settable_in != SettableIn::Route, "{}", setting.name);
        assert_eq!(content.routes.len(), 1);
    }
}

#[test]
fn every_problem_is_shown_with_its_place() {
    let file = r#"
listen = "8080"
lease = 30
retentoin = "1h"
max_request_body = "1MiB"
require-key = "yes"
methods = ["POST", "GET", "put"]
path = "/x"
admin-token = "hunter2hunter2hunter2"
config = "other.toml"
fingerprint = ["/a"]

[[route]]
path = "payments"
wait = "5 seconds"
listen = "127.0.0.1:1"

[[route]]
lease = "1ms"
fingerprint = { exlude = ["/a"] }
"#;
    let given = Given {
        flags: &["--store-outage", "opne", "--to", "127.0.0.1:3000"],
        env: &[("ONCEGATE_LEESE", "1s"), ("ONCEGATE_WAIT", "1")],
        file,
    };
    let expected = [
        "oncegate.toml:2:10: listen: \"8080\" has no host; write \"127.0.0.1:8080\" for this machine only, or \"0.0.0.0:8080\" for all machines that can reach it",
        "oncegate.toml:3:9: lease: \"30\" has no unit; write a number and a unit (ms, s, m, h, d), such as \"500ms\", \"30s\", \"5m\", \"24h\", \"7d\"",
        "oncegate.toml:4:1: no such setting `retentoin`; did you mean `retention`?",
        "oncegate.toml:5:1: no such setting `max_request_body`; did you mean `max-request-body`?",
        "oncegate.toml:6:15: require-key: a text instead of true or false without quotes",
        "oncegate.toml:7:11: methods: the method GET cannot be covered: a key protects requests that change something",
        "oncegate.toml:7:11: methods: \"put\" is not a method; did you mean \"PUT\"?",
        "oncegate.toml:8:1: `path` belongs in a [[route]] table",
        "oncegate.toml:9:1: admin-token: a secret does not belong here; put it into ONCEGATE_ADMIN_TOKEN, or name a file with `admin-token-file`",
        "oncegate.toml:10:1: `config` names this file, so it cannot be in it",
        "oncegate.toml:11:15: fingerprint: a list instead of a table, such as fingerprint = { exclude = [\"/meta/timestamp\"] }",
        "oncegate.toml:14:8: path: path pattern \"payments\": it must start with a slash, as every path does",
        "oncegate.toml:15:8: wait: \"5 seconds\" has the unknown unit \" seconds\"; write a number and a unit (ms, s, m, h, d), such as \"500ms\", \"30s\", \"5m\", \"24h\", \"7d\"",
        "oncegate.toml:16:1: `listen` is for the whole sidecar; write it above the first [[route]]",
        "oncegate.toml:18:1: route: a route has a path; write one, such as path = \"/payments/{id}\" or path = \"/v1/{*rest}\"",
        "oncegate.toml:19:9: lease: \"1ms\" is out of bounds; from 100ms to 1h is allowed",
        "oncegate.toml:20:17: no such setting `fingerprint.exlude`; did you mean `exclude`?",
        "ONCEGATE_LEESE: no such setting; did you mean `ONCEGATE_LEASE`?",
        "ONCEGATE_WAIT: \"1\" has no unit; write a number and a unit (ms, s, m, h, d), such as \"500ms\", \"30s\", \"5m\", \"24h\", \"7d\"",
        "--to: \"127.0.0.1:3000\" has no scheme; did you mean \"http://127.0.0.1:3000\"?",
        "--store-outage: \"opne\" is not one of closed, open; did you mean `open`?",
    ];
    let problems = given.problems();
    for (at, expected) in expected.iter().enumerate() {
        assert_eq!(problems.get(at).map(String::as_str), Some(*expected), "{problems:#?}");
    }
    assert_eq!(problems.len(), expected.len(), "{problems:#?}");
    assert!(!problems.concat().contains("hunter2"));
}

#[test]
fn invalid_toml_is_named_by_line_and_column_and_not_used() {
    let problems = Given { file: "lease = \"5s\"\nwait = \nretention = 3h\n", ..NOTHING }.problems();
    assert!(problems[0].starts_with("oncegate.toml:2:"), "{problems:?}");
    assert!(problems.iter().all(|problem| problem.contains("not TOML: ")), "{problems:?}");
    assert!(problems.iter().any(|problem| problem.starts_with("oncegate.toml:3:")), "{problems:?}");
}

#[test]
fn an_unreadable_file_is_named_with_its_source() {
    let args = ProxyArgs::default();
    let env = [("ONCEGATE_CONFIG".into(), "/nowhere/oncegate.toml".into())];
    let problems = Draft::read(&args, env).problems;
    assert_eq!(problems.len(), 1);
    assert_eq!(
        problems[0].to_string(),
        "ONCEGATE_CONFIG: /nowhere/oncegate.toml: No such file or directory (os error 2)"
    );
}

#[test]
fn single_mistakes_have_single_errors() {
    let to = "to = \"http://127.0.0.1:3000\"\n";
    let table: &[(Given<'_>, &str)] = &[
        (NOTHING, "nothing to protect: give --to URL, such as --to http://127.0.0.1:3000"),
        (
            Given { env: &[TO], flags: &["--admin", "0.0.0.0:9090"], ..NOTHING },
            "--admin: other machines can reach the admin address 0.0.0.0:9090; put a token of at least 16 characters into \
             ONCEGATE_ADMIN_TOKEN or into a file for --admin-token-file, or use a loopback address such as 127.0.0.1:9090",
        ),
        (
            Given {
                env: &[TO, ("ONCEGATE_ADMIN_TOKEN", "short")],
                flags: &["--admin", "0.0.0.0:9090"],
                ..NOTHING
            },
            "ONCEGATE_ADMIN_TOKEN: the token has 5 characters; at least 16 are needed, such as the output of `openssl rand -hex 32`",
        ),
        (
            Given {
                env: &[
                    TO,
                    ("ONCEGATE_ADMIN_TOKEN", "0123456789abcdef"),
                    ("ONCEGATE_ADMIN_TOKEN_FILE", "/nowhere"),
                ],
                ..NOTHING
            },
            "ONCEGATE_ADMIN_TOKEN: ONCEGATE_ADMIN_TOKEN_FILE is set, too; the token must come from one source, so leave one out",
        ),
        (
            Given { env: &[TO], flags: &["--admin-token-file", "/nowhere/token"], ..NOTHING },
            "--admin-token-file: /nowhere/token: No such file or directory (os error 2)",
        ),
        (
            Given { env: &[TO], flags: &["--tls-cert", "c.pem"], ..NOTHING },
            "--tls-cert: a certificate without its key; set tls-key too",
        ),
        (
            Given { env: &[TO], flags: &["--on-abandoned", "reconcile"], ..NOTHING },
            "--on-abandoned: the service cannot be asked without a path; set reconcile-path, such as \"/oncegate/outcome\"",
        ),
        (
            Given { env: &[TO], file: "[[route]]\npath = \"/a\"\non-abandoned = \"reconcile\"\n", ..NOTHING },
            "oncegate.toml:3:16: on-abandoned: the service cannot be asked without a path; set reconcile-path, such as \"/oncegate/outcome\"",
        ),
        (
            Given { env: &[TO], flags: &["--completion", "upstream"], ..NOTHING },
            "--completion: the service completes its record in its own transaction, but the store is a directory, which no \
             transaction of the service reaches; give --store postgres://… or leave completion to the sidecar",
        ),
        (
            Given {
                env: &[TO, SERVICE, ("ONCEGATE_STORE", "redis://cache")],
                file: "[[route]]\npath = \"/a\"\ncompletion = \"upstream\"\n",
                ..NOTHING
            },
            "oncegate.toml:3:14: completion: the service completes its record in its own transaction, but the store is Redis, \
             which no transaction of the service reaches; give --store postgres://… or leave completion to the sidecar",
        ),
        (
            Given {
                env: &[TO, TRANSACTIONS, SERVICE],
                file: "[[route]]\npath = \"/a\"\ncompletion = \"upstream\"\non-abandoned = \"park\"\n",
                ..NOTHING
            },
            "oncegate.toml:4:16: on-abandoned: the service completes its record in its own transaction (completion = \"upstream\"), \
             so a request that was cut off has committed nothing and is executed again; leave this out, or set \"reexecute\"",
        ),
        (
            Given {
                env: &[TO, TRANSACTIONS, SERVICE, ("ONCEGATE_COMPLETION", "upstream")],
                file: "[[route]]\npath = \"/a\"\n\non-abandoned = \"reconcile\"\n",
                ..NOTHING
            },
            "oncegate.toml:4:16: on-abandoned: the service completes its record in its own transaction (completion = \"upstream\"), \
             so a request that was cut off has committed nothing and is executed again; leave this out, or set \"reexecute\"",
        ),
        (
            Given {
                env: &[TO, TRANSACTIONS, SERVICE],
                flags: &["--completion", "upstream", "--on-abandoned", "park"],
                ..NOTHING
            },
            "--on-abandoned: the service completes its record in its own transaction (completion = \"upstream\"), so a request that was cut off has committed nothing and is executed again; leave this out, or set \"reexecute\"",
        ),
        (
            Given { env: &[TO], flags: &["--request-budget", "1MiB"], ..NOTHING },
            "--request-budget: all request bodies together may hold 1MiB, but one alone may have 2MiB (max-request-body)",
        ),
        (
            Given {
                env: &[TO],
                file: "[[route]]\npath = \"/a\"\nmax-request-body = \"300MiB\"\n",
                ..NOTHING
            },
            "all request bodies together may hold 256MiB, but one alone may have 300MiB (max-request-body)",
        ),
        (
            Given { env: &[TO, TRANSACTIONS], ..NOTHING },
            "ONCEGATE_STORE: a store on a server may contain records of other services, so this service needs a name: give \
             --service NAME, such as --service orders. Sidecars with the same name share keys",
        ),
        (
            Given { env: &[TO], flags: &["--store", "cached(cache=memory:,store=redis://cache)"], ..NOTHING },
            "--store: a store on a server may contain records of other services, so this service needs a name: give \
             --service NAME, such as --service orders. Sidecars with the same name share keys",
        ),
        (
            Given { env: &[TO, TRANSACTIONS], flags: &["--service", "my orders"], ..NOTHING },
            "--service: \"my orders\" is not the name of a service: a service name has 1 to 100 ASCII characters and no space",
        ),
        (
            Given { env: &[TO], flags: &["--scope", "cookie:a b"], ..NOTHING },
            "--scope: \"a b\" is not the name of a cookie; letters, digits and characters such as \"-\", \"_\" and \".\" are allowed",
        ),
        (
            Given { env: &[TO], flags: &["--scope", "authorization"], ..NOTHING },
            "--scope: \"authorization\" is not a scope that tells callers apart; write \"header:NAME\", \
             \"required-header:NAME\", \"cookie:NAME\", \"required-cookie:NAME\", \"jwt:CLAIM\", \"mtls:subject\", \"mtls:san\", \"path:NAME\", \"host\" or \"single-tenant\"",
        ),
        (
            Given { env: &[TO], flags: &["--scope", "header:x-tenant,single-tenant"], ..NOTHING },
            "--scope: \"single-tenant\" cannot be combined with other parts, because there is only one caller",
        ),
        (
            Given {
                env: &[TO],
                flags: &["--scope", "header:x-tenant", "--scope", "required-header:X-Tenant"],
                ..NOTHING
            },
            "--scope: \"required-header:x-tenant\" was given twice",
        ),
        (
            Given { file: &format!("{to}scope = []"), ..NOTHING },
            "oncegate.toml:2:9: scope: the list is empty; write \"single-tenant\" if there is only one caller",
        ),
        (
            Given { env: &[TO], flags: &["--natural-key", "/cart"], ..NOTHING },
            "--natural-key: the key is built from members of the body (natural-key), and callers that are not told apart would get each \
             other's responses; set scope = \"required-header:NAME\" or \"required-cookie:NAME\", or \"single-tenant\" if there is only one caller",
        ),
        (
            Given {
                file: &format!(
                    "{to}scope = \"cookie:sid\"\n[[route]]\npath = \"/a\"\nnatural-key = [\"/cart\"]"
                ),
                ..NOTHING
            },
            "oncegate.toml:2:9: scope: the key is built from members of the body (natural-key), and callers that are not told apart would \
             get each other's responses; set scope = \"required-header:NAME\" or \"required-cookie:NAME\", or \"single-tenant\" if there is only one caller",
        ),
        (
            Given {
                file: &format!("{to}scope = [\"host\", \"header:authorization\"]\nnatural-key = [\"/cart\"]"),
                ..NOTHING
            },
            "oncegate.toml:2:9: scope: the key is built from members of the body (natural-key), and callers that are not told apart would \
             get each other's responses; set scope = \"required-header:NAME\" or \"required-cookie:NAME\", or \"single-tenant\" if there is only one caller",
        ),
        (
            Given { env: &[TO], flags: &["--fingerprint-exclude", ""], ..NOTHING },
            "--fingerprint-exclude: \"\" is the whole body, so nothing would be compared; name a member such as \
             \"/meta/timestamp\"",
        ),
        (
            Given { env: &[TO], flags: &["--listen", "0.0.0.0:9090"], ..NOTHING },
            "--listen: the admin address 127.0.0.1:9090 is taken by the address for requests, 0.0.0.0:9090",
        ),
        (
            Given { flags: &["--to", "http://localhost:8080"], ..NOTHING },
            "--to: the service http://localhost:8080 is this sidecar's own address 127.0.0.1:8080, so requests would run in a loop",
        ),
        (
            Given { file: &format!("{to}key-header = []"), ..NOTHING },
            "oncegate.toml:2:14: key-header: nothing carries the key: name a header field, a parameter of the query, or a member of the body",
        ),
        (
            Given {
                file: &format!("{to}replay-marker = \"X-Again\"\nkey-header = [\"X-Again\"]"),
                ..NOTHING
            },
            "oncegate.toml:3:14: key-header: the header field x-again cannot carry the key and mark a replay",
        ),
        (
            Given { file: &format!("{to}methods = []"), ..NOTHING },
            "oncegate.toml:2:11: methods: the list of methods is empty, so nothing would be protected",
        ),
        (
            Given { file: &format!("{to}[route]\npath = \"/a\""), ..NOTHING },
            "oncegate.toml:2:1: route: write [[route]], with two brackets, because there can be several routes",
        ),
        (
            Given {
                file: &format!("{to}[[route]]\npath = \"/a\"\nmethod = \"POST\"\nmethods = [\"POST\"]"),
                ..NOTHING
            },
            "oncegate.toml:4:1: `method` and `methods` in one route; write one of them",
        ),
        (
            Given { file: &format!("{to}[[route]]\npath = 3"), ..NOTHING },
            "oncegate.toml:3:8: path: a number instead of a text such as \"/payments/{id}\"",
        ),
        (
            Given { file: &format!("{to}listen = [\"127.0.0.1:1\"]"), ..NOTHING },
            "oncegate.toml:2:10: listen: a list instead of a text, such as \"…\"",
        ),
        (
            Given { file: &format!("{to}methods = [\"POST\", 3.5]"), ..NOTHING },
            "oncegate.toml:2:11: methods: a fraction in a list of texts or numbers",
        ),
        (
            Given { file: &format!("{to}release-statuses = [400, 200]"), ..NOTHING },
            "oncegate.toml:2:20: release-statuses: the status 200 is not an error; only responses from 400 to 599 can free the key",
        ),
        (
            Given { file: &format!("{to}replay-marker = \"Date\""), ..NOTHING },
            "oncegate.toml:2:17: replay-marker: the header field date has another purpose; it cannot mark a replay",
        ),
        (
            Given { file: &format!("{to}[[route]]\npath = \"/a?b=1\""), ..NOTHING },
            "oncegate.toml:3:8: path: path pattern \"/a?b=1\": it would match nothing, because a path has no query and no fragment; leave out \"?b=1\"",
        ),
        (
            Given {
                file: &format!("{to}[cors]\nallowed-origins = [\"*\"]\nallow-credentials = true"),
                ..NOTHING
            },
            "oncegate.toml:4:21: cors.allow-credentials: pages of every origin (cors.allowed-origins = \"*\") cannot use the credentials of their visitors; name the origins",
        ),
        (
            Given { file: &format!("{to}[cors]\nallowed-origins = [\"https://shop.example/\"]"), ..NOTHING },
            "oncegate.toml:3:19: cors.allowed-origins: \"https://shop.example/\" is not an origin such as \"https://shop.example\": leave out everything after the host; an origin has no path",
        ),
    ];
    for (given, expected) in table {
        assert_eq!(given.problems(), [*expected]);
        assert!(given.draft().0.config.is_none());
    }
}

/// A token for `/metrics` is next to an admin token and another one than that.
#[test]
fn the_token_for_metrics_needs_an_admin_token_that_is_another_one() {
    const ADMIN: (&str, &str) = ("ONCEGATE_ADMIN_TOKEN", "0123456789abcdef");
    const METRICS: (&str, &str) = ("ONCEGATE_METRICS_TOKEN", "fedcba9876543210");
    let config = Given { env: &[TO, ADMIN, METRICS], ..NOTHING }.config();
    assert_eq!(config.metrics_token.as_ref().map(|token| token.as_bytes()), Some(&b"fedcba9876543210"[..]));
    assert!(!format!("{config:?}").contains("fedcba"), "{config:?}");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("token");
    fs::write(&path, "the-token-in-the-file\n").unwrap();
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    let file = format!("metrics-token-file = {:?}", path.display().to_string());
    let (draft, _dir) = Given { env: &[TO, ADMIN], file: &file, ..NOTHING }.draft();
    assert!(draft.config.unwrap().metrics_token.is_some());
    let warning = draft.problems[0].to_string();
    assert!(warning.starts_with("the metrics token in ") && warning.contains("chmod o="), "{warning}");
    for (env, why) in [
        (&[TO, METRICS][..], "ONCEGATE_METRICS_TOKEN: a token for /metrics needs an admin token"),
        (&[TO, ADMIN, ("ONCEGATE_METRICS_TOKEN", ADMIN.1)], "is the admin token"),
        (&[TO, ADMIN, ("ONCEGATE_METRICS_TOKEN", "short")], "the token has 5 characters"),
    ] {
        let problems = Given { env, ..NOTHING }.problems();
        assert!(problems.len() == 1 && problems[0].contains(why), "{problems:?}");
    }
    // An admin token that cannot be read is one problem.
    let env = [TO, METRICS, ("ONCEGATE_ADMIN_TOKEN", "short")];
    assert_eq!(Given { env: &env, ..NOTHING }.problems().len(), 1);
}

/// The same variables serve the commands of operators.
#[test]
fn variables_for_commands_are_fine_for_a_sidecar() {
    const TOKEN: &str = "0123456789abcdef";
    let given = |env: &[(&str, &str)], flags: &[&str], file: &str| {
        let given = Given { env: &[&[TO], env].concat(), flags, file };
        let (draft, _dir) = given.draft();
        let warnings: Vec<_> = draft.problems.iter().map(ToString::to_string).collect();
        let config = draft.config.unwrap_or_else(|| panic!("{warnings:?}"));
        let logged: Vec<_> = config.warnings.iter().map(ToString::to_string).collect();
        assert_eq!(logged, warnings);
        let token = config.admin_token.map(|token| String::from_utf8(token.as_bytes().to_vec()).unwrap());
        (config.admin.to_string(), token, warnings)
    };
    for url in ["http://127.0.0.1:9191", "http://127.0.0.1:9191/", "127.0.0.1:9191"] {
        let (admin, _, warnings) = given(&[("ONCEGATE_ADMIN", url)], &[], "");
        assert_eq!((admin.as_str(), warnings.len()), ("127.0.0.1:9191", 0), "{url}: {warnings:?}");
    }
    let elsewhere = [("ONCEGATE_ADMIN", "https://ops.example")];
    let (admin, _, warnings) = given(&elsewhere, &[], "admin = \"127.0.0.1:9192\"");
    assert_eq!(admin, "127.0.0.1:9192");
    assert!(
        warnings.len() == 1 && warnings[0].starts_with("ONCEGATE_ADMIN: it is the URL that commands use"),
        "{warnings:?}"
    );

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("token");
    fs::write(&path, "the-token-in-the-file\n").unwrap();
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let file = format!("admin-token-file = {:?}", path.display().to_string());
    let flag = format!("--admin-token-file={}", path.display());
    let env = [("ONCEGATE_ADMIN_TOKEN", TOKEN)];
    let (_, token, warnings) = given(&env, &[], &file);
    assert_eq!(token.as_deref(), Some(TOKEN), "the environment wins over the file");
    assert!(
        warnings.len() == 1 && warnings[0].starts_with("ONCEGATE_ADMIN_TOKEN: another token than that in "),
        "{warnings:?}"
    );
    let (_, token, warnings) = given(&env, &[&flag], "");
    assert_eq!(token.as_deref(), Some("the-token-in-the-file"), "a flag wins over the environment");
    assert!(
        warnings.len() == 1
            && warnings[0].contains("than that of --admin-token-file, which wins")
            && !warnings[0].contains(TOKEN),
        "{warnings:?}"
    );
    // The same token is no reason for a warning.
    let env = [("ONCEGATE_ADMIN_TOKEN", "the-token-in-the-file")];
    for (flags, file) in [(&[][..], file.as_str()), (&[flag.as_str()], "")] {
        let (_, token, warnings) = given(&env, flags, file);
        assert_eq!((token.as_deref(), warnings.len()), (Some("the-token-in-the-file"), 0), "{warnings:?}");
    }
}

#[test]
fn risky_settings_are_warnings() {
    let token = ("ONCEGATE_ADMIN_TOKEN", "0123456789abcdef");
    let route = "[[route]]\npath = \"/a\"\nmethod = \"POST\"\n";
    let table: &[(Given<'_>, &str)] = &[
        (
            Given { env: &[TO], flags: &["--store", "memory:"], ..NOTHING },
            "--store: records are kept in memory and do not survive a restart",
        ),
        (
            Given { env: &[TO, token], flags: &["--admin", "0.0.0.0:9090"], ..NOTHING },
            "--admin: other machines can reach the admin address, and the token is sent without encryption",
        ),
        (
            Given { env: &[TO, ("ONCEGATE_STORE_OUTAGE", "open")], ..NOTHING },
            "ONCEGATE_STORE_OUTAGE: while the store",
        ),
        (
            Given { env: &[TO], flags: &["--lease", "1s"], ..NOTHING },
            "--lease: a pause of the machine may last longer than a lease of 1s",
        ),
        (Given { env: &[TO], flags: &["--lease", "1h"], ..NOTHING }, "--lease: after a crash the keys"),
        (
            Given { env: &[TO], flags: &["--upstream-timeout", "none"], ..NOTHING },
            "--upstream-timeout: a service that hangs",
        ),
        (
            Given { env: &[TO], flags: &["--upstream-timeout", "31s"], ..NOTHING },
            "--upstream-timeout: the service may take 31s, but a stop waits only for 30s",
        ),
        (
            Given { env: &[TO], flags: &["--reconcile-path", "/outcome"], ..NOTHING },
            "--reconcile-path: set but never used: no route has on-abandoned = reconcile or completion = upstream",
        ),
        (
            Given { env: &[TO], flags: &["--drain-timeout", "5s"], ..NOTHING },
            "--drain-timeout: the service may take 30s, but a stop waits only for 5s",
        ),
        (
            Given { env: &[TO], flags: &["--retention", "10s"], ..NOTHING },
            "--retention: a response is kept for 10s, but a client may wait 30s",
        ),
        (
            Given { env: &[TO], flags: &["--authorize-timeout", "1s"], ..NOTHING },
            "--authorize-timeout: not used: the service is not asked before a replay; set authorize too",
        ),
        (
            Given {
                env: &[TO],
                flags: &["--natural-key=/cart", "--scope=single-tenant", "--key-query=token"],
                ..NOTHING
            },
            "--key-query: not used: the key is built from members of the body (natural-key)",
        ),
        (
            Given { env: &[TO], flags: &["--scope=header:x-k", "--key-header=X-K"], ..NOTHING },
            "--scope: the header field x-k carries the key, so each key would be a caller of its own",
        ),
        (
            Given {
                env: &[TO],
                flags: &["--fingerprint-body=raw", "--fingerprint-exclude", "/a"],
                ..NOTHING
            },
            "--fingerprint-exclude: not used: bodies are compared byte by byte",
        ),
        (
            Given { env: &[TO], file: &format!("{route}{route}lease = \"60s\"\n"), ..NOTHING },
            "oncegate.toml:4:1: route: never used: the first route that matches counts, and earlier ones match all its requests: /a",
        ),
        (
            Given {
                env: &[TO],
                file: "[[route]]\npath = \"/{*rest}\"\nlease = \"60s\"\n[[route]]\npath = \"/orders/{id}\"\n",
                ..NOTHING
            },
            "oncegate.toml:4:1: route: never used: the first route that matches counts, and earlier ones match all its requests: /{*rest}",
        ),
        (
            Given {
                env: &[TO],
                file: &format!(
                    "{route}[[route]]\npath = \"/{{x}}\"\nmethod = \"PUT\"\n[[route]]\npath = \"/A/\"\nmethods = [\"POST\", \"PUT\"]\n"
                ),
                ..NOTHING
            },
            "oncegate.toml:7:1: route: never used: the first route that matches counts, and earlier ones match all its requests: /a, /{x}",
        ),
        (
            Given { env: &[TO], file: "[[route]]\npath = \"/a\"\nmethods = [\"PSOT\"]\n", ..NOTHING },
            "oncegate.toml:3:11: methods: no registered method is called \"PSOT\"; did you mean `POST`?",
        ),
        (
            Given { env: &[TO], file: "[cors]\nexposed-headers = [\"X-Order\"]\n", ..NOTHING },
            "oncegate.toml:2:19: cors.exposed-headers: not used: no origins are allowed; set cors.allowed-origins too",
        ),
    ];
    for (given, expected) in table {
        let problems = given.problems();
        assert!(problems.len() == 1 && problems[0].starts_with(expected), "{expected}\n{problems:?}");
        assert_eq!(given.config().warnings.len(), 1);
    }
    // A value that several routes inherit has one warning.
    let inherited = Given { env: &[TO], flags: &["--lease", "1s"], file: route };
    assert_eq!(inherited.problems().len(), 1);
}

#[test]
fn settings_override_the_profile_and_routes_override_settings() {
    let file = r#"
profile = "classic"
retention = "48h"
[[route]]
path = "/stripe"
profile = "stripe"
[[route]]
path = "/short"
retention = "2h"
server-errors = "replay"
"#;
    let config = Given { env: &[TO], flags: &["--retention", "72h"], file }.config();
    let of = |path: &str| format!("{:?}", config.route(&Method::POST, path).settings);
    let retention = |path: &str| config.route(&Method::POST, path).settings.policy().retention();
    let hours = |hours: u64| Duration::from_secs(hours * 3600);
    assert_eq!([retention("/"), retention("/stripe"), retention("/short")], [hours(72), hours(72), hours(2)]);
    assert!(of("/").contains("server_errors: Release") && of("/").contains("name: \"classic\""));
    assert!(of("/stripe").contains("server_errors: Replay") && of("/stripe").contains("key_scope: Caller"));
    assert!(of("/short").contains("server_errors: Replay") && of("/short").contains("name: \"classic\""));
}

#[test]
fn a_request_finds_the_same_route_here_and_in_the_layer() {
    let file = r#"
[[route]]
path = "/payments/{id}"
methods = ["POST", "PUT"]
lease = "11s"
upstream-timeout = "1s"
[[route]]
path = "/payments/{id}"
lease = "12s"
upstream-timeout = "2s"
[[route]]
path = "/{*rest}"
method = "DELETE"
lease = "13s"
upstream-timeout = "none"
"#;
    let config = Given { env: &[TO], flags: &["--drain-timeout", "60s"], file }.config();
    let engine = Engine::new(std::sync::Arc::new(MemoryStore::new(ManualClock::at_millis(1))));
    let layer = config.layer(engine, |route| route.settings.clone()).unwrap();
    for (method, path, lease, timeout) in [
        (Method::POST, "/payments/7", "11s", "1s"),
        (Method::PUT, "/payments/7", "11s", "1s"),
        (Method::PATCH, "/payments/7", "12s", "2s"),
        (Method::DELETE, "/payments/7", "12s", "2s"),
        (Method::DELETE, "/orders", "13s", "none"),
        (Method::POST, "/orders", "30s", "30s"),
        (Method::POST, "/payments/", "30s", "30s"),
        (Method::POST, "//Payments/%37/", "11s", "1s"),
    ] {
        let here = config.route(&method, path);
        assert_eq!(here.settings.policy().lease(), duration(lease).unwrap(), "{method} {path}");
        assert_eq!(here.upstream_timeout, duration(timeout).ok(), "{method} {path}");
        assert_eq!(layer.settings(&method, path).policy(), here.settings.policy(), "{method} {path}");
    }
    // A route that names methods covers them; one that names none uses the methods of the settings.
    let covers = |method: Method, path: &str| layer.settings(&method, path).covers(&method);
    assert!(covers(Method::PUT, "/payments/7") && covers(Method::DELETE, "/orders"));
    assert!(!covers(Method::DELETE, "/payments/7"));
}

#[test]
fn routes_take_their_own_callers_and_keys() {
    let file = "scope = \"header:x-user\"\n[[route]]\npath = \"/one\"\nscope = \"single-tenant\"\nkey-format = \"uuid\"\n";
    let config = Given { env: &[TO], file, ..NOTHING }.config();
    let settings = |path: &str| &config.route(&Method::POST, path).settings;
    let user = http::header::HeaderName::from_static("x-user");
    assert_eq!(settings("/").caller().parts().collect::<Vec<_>>(), [CallerPart::Header(&user)]);
    assert!(settings("/one").caller().is_single_tenant());
    assert!(settings("/").key_grammar().parse(b"abc").is_ok());
    assert!(settings("/one").key_grammar().parse(b"abc").is_err());
}

#[test]
fn the_scope_has_a_default_and_a_route_may_set_it() {
    let has_default =
        |flags: &[&str], file: &str| Given { env: &[TO], flags, file }.config().has_default_scope();
    assert!(has_default(&[], ""));
    assert!(has_default(&["--profile", "stripe"], ""));
    assert!(has_default(&[], "[[route]]\npath = \"/a\"\nscope = \"single-tenant\"\n"));
    // A default that is given explicitly counts as given.
    assert!(!has_default(&["--scope", "header:authorization"], ""));
    assert!(!has_default(
        &[],
        "scope = \"header:authorization\"\n[[route]]\npath = \"/a\"\nprofile = \"stripe\"\n"
    ));

    let file = "scope = [\"required-header:x-tenant\", \"cookie:sid\"]\n";
    let config = Given { env: &[TO], file, ..NOTHING }.config();
    assert_eq!(format!("{:?}", config.default.settings.caller()), "cookie:sid, required-header:x-tenant");
    for same in [
        &["--scope", "cookie:sid,required-header:x-tenant"][..],
        &["--scope", "cookie:sid", "--scope=required-header:X-Tenant"],
    ] {
        let other = Given { env: &[TO], flags: same, ..NOTHING }.config();
        assert_eq!(format!("{:?}", other.default), format!("{:?}", config.default));
    }
}

#[test]
fn the_summary_has_the_given_settings_with_their_sources_and_no_secret() {
    let given = Given {
        flags: &["--lease", "20s", "--methods", "POST,PUT"],
        env: &[TO, ("ONCEGATE_ADMIN_TOKEN", "hunter2hunter2hunter2"), ("ONCEGATE_LEASE", "10s")],
        file: "wait = \"1s\"\n[[route]]\npath = \"/a\"\n",
    };
    let (draft, dir) = given.draft();
    let config = draft.config.unwrap();
    let path = dir.path().join("oncegate.toml");
    let path = path.display();
    assert_eq!(
        config.safe_summary(),
        format!(
            "config={path} (--config) to=http://127.0.0.1:3000 (ONCEGATE_TO) methods=POST,PUT (--methods) \
             lease=20s (--lease) wait=1s ({path}:1) routes=1"
        )
    );
    assert!(config.admin_token.is_some());
    assert!(!format!("{config:?}").contains("hunter2"));
}

#[test]
fn the_summary_shows_no_password_of_a_store() {
    let given = Given { env: &[TO, SERVICE, ("ONCEGATE_STORE", "redis://app:hunter2@db:6379/1")], ..NOTHING };
    let config = given.config();
    assert!(
        config.safe_summary().contains("store=redis://…@db:6379/1 (ONCEGATE_STORE)"),
        "{}",
        config.safe_summary()
    );
    assert!(!format!("{config:?}").contains("hunter2"));
}

/// `env NAME=value` is how a program gets what it needs, and any argument may be a secret.
#[test]
fn the_summary_shows_no_argument_of_the_program_for_keys() {
    let file =
        "seal-keys-command = [\"env\", \"VAULT_PW=hunter2\", \"print-keys\", \"--token\", \"hunter3\"]\n";
    let config = Given { env: &[TO], file, ..NOTHING }.config();
    let summary = config.safe_summary();
    assert!(summary.contains("seal-keys-command=env,VAULT_PW=…,…,…,… ("), "{summary}");
    let env = &[TO, ("ONCEGATE_SEAL_KEYS_COMMAND", "env,VAULT_PW=hunter2,print-keys")];
    let config = Given { env, ..NOTHING }.config();
    let summary = config.safe_summary();
    assert!(summary.contains("seal-keys-command=env,VAULT_PW=…,… ("), "{summary}");
    let file = "seal-keys-command = [\"env\", \"VAULT_PW=…\", \"print-keys\"]\n";
    let problems = Given { env: &[TO], file, ..NOTHING }.problems();
    assert!(format!("{problems:?}").contains("an argument that is not shown"), "{problems:?}");
}

#[test]
fn the_defaults_of_the_profile_in_the_help_are_its_own() {
    let by_profile = format!("{:?}", Given { env: &[TO], ..NOTHING }.config().default.settings);
    for setting in SETTINGS {
        let Fallback::Profile(text) = setting.default else { continue };
        let said = [TO, (&setting.variable(), text)];
        let settings = Given { env: &said, ..NOTHING }.config().default.settings;
        assert_eq!(format!("{settings:?}"), by_profile, "{}", setting.name);
    }
}

/// A store that supports all settings.
const TRANSACTIONS: (&str, &str) = ("ONCEGATE_STORE", "postgres://sidecar@db/shop");

/// The setting that a store on a server needs.
const SERVICE: (&str, &str) = ("ONCEGATE_SERVICE", "shop");

/// Each setting of a route reaches the layer and the proxy.
#[test]
fn every_setting_of_a_route_arrives() {
    let default = format!("{:?}", Given { env: &[TO], ..NOTHING }.config().default);
    for setting in SETTINGS.iter().filter(|setting| setting.settable_in == SettableIn::Route) {
        let (name, (text, arrives)) = (setting.name, sample(setting.name));
        if arrives.is_empty() {
            assert!(name.starts_with("cors."), "add what `{name}` changes to SAMPLES");
            continue;
        }
        assert!(!default.contains(arrives), "{name}: {default}");
        let variable = setting.variable();
        // A key that is built from the body needs callers that are told apart, or only one caller.
        let needs_scope = ["natural-key", "intent-tools"].contains(&name);
        let scope = Some(("ONCEGATE_SCOPE", "single-tenant")).filter(|_| needs_scope);
        let profile = Some(("ONCEGATE_PROFILE", "mcp")).filter(|_| name.ends_with("-tools"));
        let said = [TO, TRANSACTIONS, SERVICE, (&variable, text)].into_iter().chain(scope).chain(profile);
        let said: Vec<_> = said.collect();
        let everywhere = format!("{:?}", Given { env: &said, ..NOTHING }.config().default);
        assert!(everywhere.contains(arrives), "{name}: {everywhere}");
        let value = if setting.shape == Shape::Switch { text.to_owned() } else { format!("{text:?}") };
        let scope = scope.map_or("", |_| "scope = \"single-tenant\"\n");
        let profile = profile.map_or("", |_| "profile = \"mcp\"\n");
        let file = format!("[[route]]\npath = \"/a\"\n{scope}{profile}{name} = {value}\n");
        let config = Given { env: &[TO, TRANSACTIONS, SERVICE], file: &file, ..NOTHING }.config();
        // A route matches only its methods.
        let route = format!("{:?}", config.route(&Method::PUT, "/a"));
        assert!(route.contains(arrives), "{name}: {route}");
        assert_eq!(format!("{:?}", config.route(&Method::PUT, "/b")), default, "{name}");
    }
}

#[test]
fn the_cors_settings_arrive() {
    let file = r#"
[cors]
allowed-origins = ["https://shop.example", "http://localhost:5173"]
exposed-headers = ["X-Order"]
allowed-headers = ["Idempotency-Key"]
allowed-methods = ["GET", "POST"]
allow-credentials = true
max-age = "5m"
[[route]]
path = "/open"
cors = { allowed-origins = "*", allow-credentials = false }
[[route]]
path = "/closed"
cors = { allowed-origins = [] }
"#;
    let config = Given { env: &[TO], file, ..NOTHING }.config();
    let of = |path: &str| format!("{:?}", config.route(&Method::POST, path).cors);
    let default = of("/");
    for part in [
        "origins: Some([\"https://shop.example\", \"http://localhost:5173\"])",
        "expose: \"idempotency-key, idempotent-replayed, idempotency-status, retry-after, ratelimit, ratelimit-policy, x-order\"",
        "headers: Some(\"idempotency-key\")",
        "methods: Some(\"GET, POST\")",
        "credentials: true",
        "max_age: \"300\"",
    ] {
        assert!(default.contains(part), "{part}: {default}");
    }
    assert!(of("/open").contains("origins: None") && of("/open").contains("credentials: false"));
    assert_eq!(of("/closed"), "None");
    // There is no warning if a route switches them off.
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
}

/// The global policy for abandoned requests does not apply to a route whose service completes its records.
#[test]
fn a_route_that_leaves_completion_to_the_service_executes_again() {
    let route = "[[route]]\npath = \"/a\"\ncompletion = \"upstream\"\n";
    for (elsewhere, own) in
        [("", ""), ("on-abandoned = \"park\"\n", ""), ("", "on-abandoned = \"reexecute\"\n")]
    {
        let file = format!("{elsewhere}{route}{own}");
        let config = Given { env: &[TO, TRANSACTIONS, SERVICE], file: &file, ..NOTHING }.config();
        assert_eq!(
            config.route(&Method::POST, "/a").settings.policy().on_abandoned(),
            OnAbandoned::Reexecute
        );
        assert_eq!(config.default.settings.policy().on_abandoned(), OnAbandoned::Park);
    }
}

#[test]
fn a_service_that_completes_its_records_is_asked_for_responses_if_there_is_a_reconcile_path() {
    let route = "[[route]]\npath = \"/a\"\ncompletion = \"upstream\"\n";
    for (elsewhere, own, place) in [
        ("", "", None),
        ("", "reconcile-path = \"/outcome\"\n", Some("/outcome")),
        ("reconcile-path = \"/outcome\"\n", "", Some("/outcome")),
        (
            "reconcile-path = \"/outcome\"\non-abandoned = \"reconcile\"\n",
            "reconcile-path = \"/answer\"\n",
            Some("/answer"),
        ),
    ] {
        let file = format!("{elsewhere}{route}{own}");
        let config = Given { env: &[TO, TRANSACTIONS, SERVICE], file: &file, ..NOTHING }.config();
        let route = config.route(&Method::POST, "/a");
        assert_eq!(route.asks(), place.is_some(), "{file}");
        assert_eq!(config.asks_at().iter().any(|path| Some(path.as_str()) == place), place.is_some());
        assert_eq!(route.settings.policy().on_abandoned(), OnAbandoned::Reexecute);
        assert!(config.warnings.is_empty(), "{file}: {:?}", config.warnings);
    }
}

#[test]
fn every_setting_of_the_service_arrives() {
    let token = tempfile::NamedTempFile::new().unwrap();
    fs::write(token.path(), "0123456789abcdef").unwrap();
    let token = token.path().to_str().unwrap();
    let seal_keys = tempfile::NamedTempFile::new().unwrap();
    fs::write(seal_keys.path(), SEAL_KEY).unwrap();
    let seal_keys = seal_keys.path().to_str().unwrap();
    let id_secret = tempfile::NamedTempFile::new().unwrap();
    fs::write(id_secret.path(), format!("# ours\n{ID_SECRET}\n")).unwrap();
    let id_secret = id_secret.path().to_str().unwrap();
    let here = std::env::current_dir().unwrap();
    let default = format!("{:?}", Given { env: &[TO], ..NOTHING }.config());
    let is_of_service =
        |setting: &&Setting| !matches!(setting.settable_in, SettableIn::Route | SettableIn::Start);
    for setting in SETTINGS.iter().filter(is_of_service) {
        let (name, (text, arrives)) = (setting.name, sample(setting.name));
        if arrives.is_empty() {
            assert!(
                ["tls-", "jwt-", "otlp-", "seal-", "metrics-"].iter().any(|group| name.starts_with(group)),
                "add what `{name}` changes to SAMPLES"
            );
            continue;
        }
        let variable = setting.variable();
        let text = match name {
            "admin-token-file" => token,
            "seal-keys-file" => seal_keys,
            "id-secret-file" => id_secret,
            _ => text,
        };
        let said = [TO, (&variable, text)];
        let config = format!("{:?}", Given { env: &said[usize::from(name == "to")..], ..NOTHING }.config());
        assert!(config.contains(arrives), "{name}: {config}");
        assert!(!default.contains(arrives), "{name}: {default}");
    }
    let flags = ["--tls-cert", "c.pem", "--tls-key", "k.pem"];
    let tls = Given { env: &[TO], flags: &flags, ..NOTHING }.config().tls;
    let own =
        TlsFiles { cert: here.join("c.pem"), key: here.join("k.pem"), client_ca: None, client_crl: None };
    assert_eq!(tls, Some(own));
}

#[test]
fn the_settings_of_the_collector_arrive() {
    let env = [
        TO,
        ("ONCEGATE_OTLP_ENDPOINT", "http://c:4318"),
        ("ONCEGATE_OTLP_HEADERS", "authorization=Bearer%20whisper"),
        ("ONCEGATE_OTLP_SIGNALS", "metrics,traces"),
        ("ONCEGATE_OTLP_METRICS_INTERVAL", "5s"),
        ("ONCEGATE_OTLP_RESOURCE_ATTRIBUTES", "a=b,c=d"),
        ("OTEL_SERVICE_NAME", "shop"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://other:4318"),
    ];
    let config = Given { env: &env, ..NOTHING }.config();
    let otlp = format!("{:?}", config.otlp.as_ref().unwrap());
    for part in [
        "authority: c:4318",
        "headers: [\"authorization\"]",
        "signals: [Metrics, Traces]",
        "service_name: \"shop\"",
        "[(\"a\", \"b\"), (\"c\", \"d\")]",
        "metrics_interval: 5s",
    ] {
        assert!(otlp.contains(part), "{part}: {otlp}");
    }
    assert!(!format!("{config:?} {}", config.safe_summary()).contains("whisper"));
    assert!(config.warnings[0].to_string().contains("in clear text"), "{:?}", config.warnings);
    // The file wins over a variable of OpenTelemetry, and the name of the service is the fallback.
    let file = "otlp-endpoint = \"http://f:4318\"\nservice = \"orders\"";
    let otlp = Given { env: &[TO, env[7]], file, ..NOTHING }.config().otlp.unwrap();
    assert_eq!(
        (otlp.endpoint.to_string().as_str(), otlp.service_name.as_str()),
        ("http://f:4318", "orders-oncegate")
    );
    let config = Given { env: &[TO, ("ONCEGATE_OTLP_SIGNALS", "metrics")], ..NOTHING }.config();
    assert!(
        config.otlp.is_none() && config.warnings[0].to_string().contains("set otlp-endpoint"),
        "{:?}",
        config.warnings
    );
    // This variable is often set for all programs of a machine.
    assert_eq!(Given { env: &[TO, ("OTEL_SERVICE_NAME", "shop")], ..NOTHING }.config().warnings, []);
}

#[test]
fn a_relative_path_in_the_file_is_relative_to_the_directory_of_the_file() {
    let here = std::env::current_dir().unwrap();
    let file = "tls-cert = \"tls/cert.pem\"\ntls-key = \"/etc/key.pem\"\ntls-client-ca = \"ca.pem\"\n\
                tls-client-crl = \"crl.pem\"\nstore = \"../data\"";
    let (draft, dir) = Given { env: &[TO], file, ..NOTHING }.draft();
    let tls = TlsFiles {
        cert: dir.path().join("tls/cert.pem"),
        key: "/etc/key.pem".into(),
        client_ca: Some(dir.path().join("ca.pem")),
        client_crl: Some(dir.path().join("crl.pem")),
    };
    assert_eq!(draft.tls, Some(tls));
    assert_eq!(draft.store, Some(StoreChoice::Directory(dir.path().join("../data"))));

    let cached = "store = \"cached(cache=./cache,store=./back)\"";
    let (draft, dir) = Given { env: &[TO], file: cached, ..NOTHING }.draft();
    let shown = draft.store.unwrap().to_string();
    let dir = dir.path().display();
    assert_eq!(shown, format!("cached(cache={dir}/cache,store={dir}/back)"));
    let twice = Given { env: &[TO], file: "store = \"cached(cache=./a,store=a)\"", ..NOTHING };
    assert_eq!(twice.problems(), ["oncegate.toml:1:9: store: cache and store are the same directory"]);

    let said = Given { env: &[TO, ("ONCEGATE_STORE", "data")], file, ..NOTHING }.draft().0.store;
    assert_eq!(said, Some(StoreChoice::Directory(here.join("data"))));
    let said = Given { env: &[TO], flags: &["--store=./data"], file }.config();
    assert_eq!(said.store, StoreChoice::Directory(here.join("data")));
    let shown = format!("store={} (--store)", here.join("data").display());
    assert!(said.safe_summary().contains(&shown), "{}", said.safe_summary());
}

#[test]
fn a_store_in_memory_never_exists_before() {
    let given = Given { env: &[TO], flags: &["--store=memory:", "--store-must-exist", "true"], ..NOTHING };
    let problems = given.problems();
    assert!(problems[0].starts_with("--store-must-exist: a store in memory is new"), "{problems:?}");
}

#[test]
fn the_file_that_the_flag_names_is_read_and_not_that_of_the_environment() {
    let given = Given { env: &[TO, ("ONCEGATE_CONFIG", "/nowhere")], file: "lease = \"7s\"", ..NOTHING };
    assert_eq!(given.config().default.settings.policy().lease(), Duration::from_secs(7));
}

#[test]
fn columns_count_characters() {
    let problems = Given { env: &[TO], file: "fingerprint = { \"é\" = 1, \"ü\" = 2 }", ..NOTHING }.problems();
    assert_eq!(problems[1], "oncegate.toml:1:26: no such setting `fingerprint.ü`");
}

#[test]
fn addresses_that_only_look_alike_are_fine() {
    for flags in [
        &["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"][..],
        &["--admin", "[::ffff:127.0.0.1]:9090"],
        &["--admin", "[::1]:8080"],
        &["--listen", "0.0.0.0:3001", "--to", "http://10.0.0.1:3001"],
        &["--listen", "127.0.0.1:80", "--to", "https://127.0.0.1"],
    ] {
        let given = Given { env: &[TO], flags, ..NOTHING };
        assert_eq!(given.problems(), [""; 0], "{flags:?}");
    }
    for flags in [
        &["--listen", "[::ffff:127.0.0.1]:3000"][..],
        &["--listen", "0.0.0.0:80", "--to", "http://127.0.0.1"],
    ] {
        let problems = Given { env: &[TO], flags, ..NOTHING }.problems();
        assert!(problems.len() == 1 && problems[0].contains("run in a loop"), "{problems:?}");
    }
}

#[test]
fn a_route_without_methods_matches_all_whatever_is_covered() {
    let file = "methods = [\"PUT\"]\n[[route]]\npath = \"/a\"\nlease = \"9s\"\n";
    let config = Given { env: &[TO], file, ..NOTHING }.config();
    let settings = &config.route(&Method::DELETE, "/a").settings;
    assert_eq!(settings.policy().lease(), Duration::from_secs(9));
    assert!(settings.covers(&Method::PUT) && !settings.covers(&Method::DELETE));
}

#[test]
fn the_reference_page_has_a_row_for_every_setting_as_it_is() {
    let page = include_str!("../../../../docs/reference/configuration.md");
    for setting in SETTINGS {
        let mark = if setting.settable_in == SettableIn::Route { " †" } else { "" };
        let default = match setting.default {
            Fallback::Value(text) => format!("`{text}`"),
            Fallback::Profile(text) => format!("by profile, `{text}` in ietf"),
            Fallback::Nothing("") => "–".to_owned(),
            Fallback::Nothing(words) => words.to_owned(),
        };
        let (name, value) = (setting.name, setting.value.replace('|', r"\|"));
        let help = setting.help.split_whitespace().collect::<Vec<_>>().join(" ");
        let row = format!("| `{name}`{mark} | `{value}` | {default} | {help} |\n");
        assert!(page.contains(&row), "docs/reference/configuration.md lacks this row:\n{row}");
    }
    let rows = page.lines().filter(|line| line.starts_with("| `")).count();
    assert_eq!(rows, SETTINGS.len());
}

#[test]
fn the_example_on_the_reference_page_works() {
    let page = include_str!("../../../../docs/reference/configuration.md");
    let example = page.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let given = Given { file: example, ..NOTHING };
    assert_eq!(given.problems(), [""; 0]);
    assert_eq!(given.config().routes.len(), 5);
}

#[test]
fn seal_keys_come_from_one_source_and_mistakes_show_no_key() {
    let with_key = ("ONCEGATE_SEAL_KEYS", SEAL_KEY);
    let slip = format!("{SEAL_KEY},{}", SEAL_KEY.replace("01_", "02_").replace("af_01", "af_02"));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("keys");
    fs::write(&file, "hunter2\n").unwrap();
    fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let file_flag = format!("--seal-keys-file={}", file.display());
    let large = dir.path().join("large");
    fs::write(&large, vec![b'#'; 70_000]).unwrap();
    fs::set_permissions(&large, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let large_flag = format!("--seal-keys-file={}", large.display());
    let file_problem = format!("--seal-keys-file: {}: line 1 is not a key", file.display());
    let large_problem = format!("--seal-keys-file: {}: is too large for a file of keys", large.display());
    let table: &[(Given<'_>, &str)] = &[
        (
            Given { env: &[TO, with_key], flags: &["--seal-keys-command=vault"], ..NOTHING },
            "--seal-keys-command: ONCEGATE_SEAL_KEYS is set, too; the seal keys must come from one source",
        ),
        (
            Given { env: &[TO], flags: &["--seal-required"], ..NOTHING },
            "--seal-required: there are no keys; set seal-keys-file, seal-keys-command or ONCEGATE_SEAL_KEYS, too",
        ),
        (
            Given { env: &[TO], flags: &["--seal-opens-only"], ..NOTHING },
            "--seal-opens-only: there are no keys",
        ),
        (
            Given { env: &[TO, with_key], flags: &["--seal-required", "--seal-opens-only"], ..NOTHING },
            "--seal-opens-only: nothing is sealed (seal-opens-only), and unsealed responses are refused",
        ),
        (
            Given { env: &[TO, ("ONCEGATE_SEAL_KEYS", &slip)], flags: &["--seal-required"], ..NOTHING },
            "ONCEGATE_SEAL_KEYS: line 2 is not a key: the digits of the key do not fit its id",
        ),
        (Given { env: &[TO], flags: &[&file_flag], ..NOTHING }, &file_problem),
        (Given { env: &[TO], flags: &[&large_flag], ..NOTHING }, &large_problem),
        (
            Given { env: &[TO], file: &format!("seal-keys = \"{SEAL_KEY}\""), ..NOTHING },
            "oncegate.toml:1:1: seal-keys: a secret does not belong here; put it into ONCEGATE_SEAL_KEYS, or name a file with \
             `seal-keys-file`",
        ),
    ];
    for (given, expected) in table {
        let problems = given.problems();
        assert!(problems.len() == 1 && problems[0].starts_with(expected), "{problems:#?}\n{expected}");
        assert!(!problems[0].contains("0101") && !problems[0].contains("hunter2"), "{problems:?}");
    }
    let config = Given { env: &[TO, with_key], flags: &["--seal-required"], ..NOTHING }.config();
    let shown = format!("{config:?} {}", config.safe_summary());
    assert!(shown.contains("d76b7626affc02af") && !shown.contains("0101"), "{shown}");
}

#[test]
fn an_id_secret_comes_from_one_source_and_mistakes_show_nothing_of_it() {
    let with_secret = ("ONCEGATE_ID_SECRET", ID_SECRET);
    let slip = ID_SECRET.replace("_0101", "_0102");
    let dir = tempfile::tempdir().unwrap();
    let written = |name: &str, content: &[u8]| {
        let file = dir.path().join(name);
        fs::write(&file, content).unwrap();
        fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        (format!("--id-secret-file={}", file.display()), format!("--id-secret-file: {}: ", file.display()))
    };
    let (wrong, wrong_at) = written("wrong", b"hunter2\n");
    let (none, none_at) = written("none", b"# nothing\n");
    let (two, two_at) = written("two", format!("{ID_SECRET}\n{ID_SECRET}\n").as_bytes());
    let (large, large_at) = written("large", &[b'#'; 5000]);
    let table: &[(Given<'_>, String)] = &[
        (
            Given { env: &[TO, with_secret], flags: &[&wrong], ..NOTHING },
            "--id-secret-file: ONCEGATE_ID_SECRET is set, too; the id secret must come from one source".to_owned(),
        ),
        (
            Given { env: &[TO, ("ONCEGATE_ID_SECRET", &slip)], ..NOTHING },
            "ONCEGATE_ID_SECRET: the digits of the id secret do not fit its name".to_owned(),
        ),
        (Given { env: &[TO], flags: &[&wrong], ..NOTHING }, format!("{wrong_at}an id secret has the form ogids1_")),
        (Given { env: &[TO], flags: &[&none], ..NOTHING }, format!("{none_at}there is no id secret in it")),
        (Given { env: &[TO], flags: &[&two], ..NOTHING }, format!("{two_at}there is more than one line")),
        (Given { env: &[TO], flags: &[&large], ..NOTHING }, format!("{large_at}is too large")),
        (
            Given { env: &[TO], file: &format!("id-secret = \"{ID_SECRET}\""), ..NOTHING },
            "oncegate.toml:1:1: id-secret: a secret does not belong here; put it into ONCEGATE_ID_SECRET, or name a file with \
             `id-secret-file`"
                .to_owned(),
        ),
    ];
    for (given, expected) in table {
        let problems = given.problems();
        assert!(problems.len() == 1 && problems[0].starts_with(expected), "{problems:#?}\n{expected}");
        assert!(!problems[0].contains("0101") && !problems[0].contains("hunter2"), "{problems:?}");
    }
    let config = Given { env: &[TO, with_secret], ..NOTHING }.config();
    let shown = format!("{config:?} {}", config.safe_summary());
    assert!(shown.contains(&ID_SECRET[7..23]) && !shown.contains("0101"), "{shown}");
    // A reload with another secret is refused; the same one from another place is no change.
    let other = IdSecret::from_bytes([2; 32]).to_secret_text();
    let with_other = Given { env: &[TO, ("ONCEGATE_ID_SECRET", &other)], ..NOTHING }.config();
    assert_eq!(config.fixed_changes(&with_other), ["id-secret-file"]);
    assert_eq!(config.fixed_changes(&Given { env: &[TO], ..NOTHING }.config()), ["id-secret-file"]);
    assert_eq!(config.fixed_changes(&Given { env: &[TO, with_secret], ..NOTHING }.config()), [""; 0]);
}

#[test]
fn a_program_for_seal_keys_is_relative_to_the_file_that_names_it_if_it_is_a_path() {
    let source = |word: &str| {
        let file = format!("seal-keys-command = [\"{word}\", \"a,b\"]");
        let (draft, dir) = Given { env: &[TO], file: &file, ..NOTHING }.draft();
        let source = format!("{:?}", draft.config.unwrap().seal.unwrap().source);
        source.replace(&format!("{}/", dir.path().display()), "")
    };
    assert_eq!(source("./bin/keys"), "Command([\"bin/keys\", \"a,b\"])");
    assert_eq!(source("vault"), "Command([\"vault\", \"a,b\"])");
}

#[test]
fn responses_that_the_service_stores_itself_are_warned_about() {
    let file = "seal-required = true\n[[route]]\npath = \"/a\"\ncompletion = \"upstream\"\nredact-response = [\"/card\"]\n";
    let env: &[_] = &[TO, TRANSACTIONS, SERVICE, ("ONCEGATE_SEAL_KEYS", SEAL_KEY)];
    let warnings = format!("{:?}", Given { env, file, ..NOTHING }.config().warnings);
    assert!(warnings.contains("is not sealed, and retries of it are refused"), "{warnings}");
    assert!(warnings.contains("is not redacted; let the sidecar add the response"), "{warnings}");
}
