//! The settings of a case, written once and translated for each deployment.

use std::fmt::Write;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use http::{HeaderName, Method, StatusCode};
use oncegate_core::fingerprint::{FingerprintRules, JsonPointer};
use oncegate_core::{NaturalKey, OnAbandoned, Store, StoredResponse};
use oncegate_engine::{Engine, Policy};
use oncegate_http::{
    AuthorityRole, CallerScope, IdempotencyContext, IdempotencyLayer, KeyFormat, KeyScope, KeySyntax,
    PathCase, Profile, RateLimits, RateQuota, Reconcile, Reconciled, ServerErrors, Settings, ToolPolicies,
    ToolPolicy, TrailingSlash,
};
use oncegate_seal::{Keyring, SealKey, SealedStore};
use serde_json::Value;

use crate::backend::{ASKED_AT, AskedDecision, MAY_SEE};
use crate::tokens;

/// The settings of a deployment. `None` is the default of the deployment.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The profile.
    pub profile: &'static str,
    /// The identification of callers.
    pub scope: Callers,
    /// The role of the host.
    pub authority: Option<AuthorityRole>,
    /// Requires a key.
    pub require_key: bool,
    /// The header that carries the key.
    pub key_header: Option<&'static str>,
    /// The members of JSON bodies from which the key is built, separated by commas.
    pub key_json: Option<&'static str>,
    /// The tools whose keys are built from the intent of a call, separated by commas.
    pub intent_tools: Option<&'static str>,
    /// The tools without an effect, separated by commas.
    pub read_only_tools: Option<&'static str>,
    /// The syntax of the key in its header.
    pub key_syntax: Option<KeySyntax>,
    /// The format of keys: `uuid`, `ulid` or `pattern:REGEX`.
    pub key_format: Option<&'static str>,
    /// The scope in which a key is unique, in addition to the caller.
    pub key_scope: Option<KeyScope>,
    /// The header that marks a replay.
    pub replay_marker: Option<&'static str>,
    /// The URL of the documentation of keys.
    pub documentation: Option<&'static str>,
    /// Makes slashes at the end and case of a path count.
    pub exact_paths: bool,
    /// Statuses that free the key.
    pub release_statuses: Option<&'static [u16]>,
    /// The covered methods.
    pub methods: Option<Vec<Method>>,
    /// One more header that is stored.
    pub stored_header: Option<&'static str>,
    /// A header that makes two requests different.
    pub fingerprint_header: Option<&'static str>,
    /// A member of JSON bodies that does not count.
    pub fingerprint_exclude: Option<&'static str>,
    /// The one member of JSON bodies that counts.
    pub fingerprint_include: Option<&'static str>,
    /// Compares bodies byte by byte.
    pub fingerprint_raw: bool,
    /// The lease.
    pub lease: Option<Duration>,
    /// The retention.
    pub retention: Option<Duration>,
    /// The time for which a duplicate waits.
    pub wait: Option<Duration>,
    /// The policy for abandoned attempts.
    pub on_abandoned: Option<OnAbandoned>,
    /// The report on questions about an abandoned attempt.
    pub reconcile: Option<ReconcileReport>,
    /// Asks the service before each replay.
    pub authorize: bool,
    /// The policy for responses from 500 to 599.
    pub server_errors: Option<ServerErrors>,
    /// The largest body of a request.
    pub max_request_body: Option<usize>,
    /// The rate limit of new keys of one caller, per hour.
    pub new_keys_per_hour: Option<u32>,
    /// The rate limit of requests with one key, per hour.
    pub attempts_per_hour: Option<u32>,
    /// The budget for all request bodies together.
    pub request_budget: Option<usize>,
    /// The largest body that is stored.
    pub max_response_body: Option<usize>,
    /// The time for which the sidecar waits for a response.
    pub upstream_timeout: Option<Duration>,
    /// Executes without protection while the store is unavailable.
    pub fail_open: bool,
    /// Seals responses in the store.
    pub seals: bool,
    /// Paths with their own settings. Routes within these plans are ignored.
    pub routes: Vec<Route>,
    /// Gives the settings to the sidecar in a file instead of flags.
    pub by_file: bool,
    /// The failpoint at which the sidecar stops and waits to be killed.
    pub failpoint: Option<&'static str>,
}

/// The settings that are lists.
const LISTS: [&str; 11] = [
    "methods", "scope", "key-header", "natural-key", "release-statuses", "stored-headers", "intent-tools",
    "read-only-tools", "fingerprint.headers", "fingerprint.exclude", "fingerprint.include",
];

/// A report on a question about an abandoned attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReconcileReport {
    /// It happened, and [`FOUND`] was its response.
    Found,
    /// It did not happen.
    NotFound,
    /// The outcome cannot be determined.
    Unclear,
}

/// The response of an attempt that happened.
pub const FOUND: &str = "found when asked";

impl Reconcile for ReconcileReport {
    fn reconcile<'a>(
        &'a self,
        _: &'a IdempotencyContext,
        _: &'a Parts,
    ) -> Pin<Box<dyn Future<Output = Reconciled> + Send + 'a>> {
        let word = match self {
            Self::Found => {
                let media = ("content-type", &b"text/plain"[..]);
                let response = StoredResponse::new(202, &[media], &[FOUND.into()], &[]);
                Reconciled::Happened(response.expect("a response that can be kept"))
            }
            Self::NotFound => Reconciled::DidNotHappen,
            Self::Unclear => Reconciled::CannotTell,
        };
        Box::pin(std::future::ready(word))
    }
}

/// A path with its own settings.
#[derive(Clone, Debug)]
pub struct Route {
    /// The methods of the route; if empty, all that the settings cover.
    pub methods: Vec<Method>,
    /// The pattern of the path, such as `/payments/{id}`.
    pub path: &'static str,
    /// The settings, on top of the profile only.
    pub plan: Plan,
}

/// Translates one part of the setting `scope`.
fn scope_of(part: &'static str) -> CallerScope {
    let (kind, name) = part.split_once(':').expect("a kind and a name");
    match kind {
        "header" => CallerScope::header(HeaderName::from_static(name)),
        "required-header" => CallerScope::required_header(HeaderName::from_static(name)),
        "cookie" => CallerScope::cookie(name).expect("the name of a cookie"),
        "required-cookie" => CallerScope::required_cookie(name).expect("the name of a cookie"),
        "jwt" => CallerScope::jwt(name, &tokens::verifier()).expect("a claim"),
        other => panic!("no part of a scope: {other}"),
    }
}

/// The identification of callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Callers {
    /// The setting is absent.
    NotSet,
    /// By all of these parts, in the syntax of the flag, such as `cookie:sid`.
    Parts(&'static [&'static str]),
    /// All requests are of one caller.
    SingleTenant,
    /// By this header.
    Header(&'static str),
    /// By this header. A request without it is refused.
    RequiredHeader(&'static str),
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            profile: "ietf",
            scope: Callers::SingleTenant,
            authority: None,
            require_key: false,
            key_header: None,
            key_json: None,
            intent_tools: None,
            read_only_tools: None,
            key_syntax: None,
            key_format: None,
            key_scope: None,
            replay_marker: None,
            documentation: None,
            exact_paths: false,
            release_statuses: None,
            methods: None,
            stored_header: None,
            fingerprint_header: None,
            fingerprint_exclude: None,
            fingerprint_include: None,
            fingerprint_raw: false,
            lease: None,
            retention: None,
            // Most cases check the response while the first request runs.
            wait: Some(Duration::ZERO),
            on_abandoned: None,
            reconcile: None,
            authorize: false,
            server_errors: None,
            max_request_body: None,
            new_keys_per_hour: None,
            attempts_per_hour: None,
            request_budget: None,
            max_response_body: None,
            upstream_timeout: None,
            fail_open: false,
            seals: false,
            routes: Vec::new(),
            by_file: false,
            failpoint: None,
        }
    }
}

impl Plan {
    /// The header that carries the key.
    #[must_use]
    pub fn carrier(&self) -> &str {
        self.key_header.unwrap_or("idempotency-key")
    }

    /// The header that marks a replay.
    #[must_use]
    pub fn marker(&self) -> &'static str {
        if let Some(marker) = self.replay_marker {
            return marker;
        }
        if self.profile == "classic" { "x-idempotent-replayed" } else { "idempotent-replayed" }
    }

    /// The settings of the layer.
    #[must_use]
    pub fn settings(&self) -> Settings {
        let name = |name: &'static str| HeaderName::from_static(name);
        let mut settings = Settings::new(Profile::named(self.profile).expect("a profile"));
        settings = match self.scope {
            Callers::NotSet => settings,
            Callers::Parts(parts) => {
                let parts = parts.iter().map(|part| scope_of(part));
                settings.with_caller(parts.reduce(CallerScope::and).expect("a part"))
            }
            Callers::SingleTenant => settings.with_caller(CallerScope::single_tenant()),
            Callers::Header(field) => settings.with_caller(CallerScope::header(name(field))),
            Callers::RequiredHeader(field) => settings.with_caller(CallerScope::required_header(name(field))),
        };
        if let Some(authority) = self.authority {
            settings = settings.with_authority(authority);
        }
        if self.require_key {
            settings = settings.with_required_key(true);
        }
        if let Some(field) = self.key_header {
            settings = settings.with_key_headers([name(field)]).expect("a field for keys");
        }
        if let Some(members) = self.key_json {
            let members =
                members.split(',').map(|member| JsonPointer::parse(member).expect("a JSON pointer"));
            settings = settings.with_natural_key(NaturalKey::new(members.collect()).expect("a few members"));
        }
        let mut tools = ToolPolicies::default();
        for (policy, names) in
            [(ToolPolicy::ByIntent, self.intent_tools), (ToolPolicy::ReadOnly, self.read_only_tools)]
        {
            tools =
                tools.with(policy, names.iter().flat_map(|names| names.split(','))).expect("names of tools");
        }
        settings = settings.with_tools(tools);
        if let Some(syntax) = self.key_syntax {
            settings = settings.with_key_syntax(syntax);
        }
        if let Some(format) = self.key_format {
            settings = settings.with_key_format(match format {
                "uuid" => KeyFormat::Uuid,
                "ulid" => KeyFormat::Ulid,
                other => {
                    let expression = other.strip_prefix("pattern:").expect("a format of keys");
                    KeyFormat::pattern(expression).expect("a regular expression")
                }
            });
        }
        if let Some(scope) = self.key_scope {
            settings = settings.with_key_scope(scope);
        }
        let per_hour = |count| RateQuota::new(count, Duration::from_secs(3600)).expect("a rate");
        settings = settings.with_rate_limits(
            RateLimits::default()
                .with_caller(self.new_keys_per_hour.map(per_hour))
                .with_key(self.attempts_per_hour.map(per_hour)),
        );
        settings = self.surface(settings);
        if let Some(methods) = &self.methods {
            settings = settings.with_methods(methods.clone()).expect("methods that have an effect");
        }
        if let Some(field) = self.stored_header {
            settings = settings.with_stored_headers([name(field)]).expect("a field that may be stored");
        }
        if let Some(field) = self.fingerprint_header {
            settings = settings.with_fingerprint_headers([name(field)]);
        }
        let mut rules = FingerprintRules::new();
        if self.fingerprint_raw {
            rules = rules.with_raw_bodies();
        }
        if let Some(pointer) = self.fingerprint_exclude {
            rules = rules.exclude(JsonPointer::parse(pointer).expect("a JSON pointer"));
        }
        if let Some(pointer) = self.fingerprint_include {
            rules = rules.include(JsonPointer::parse(pointer).expect("a JSON pointer"));
        }
        settings = settings.with_fingerprint(rules);
        if let Some(server_errors) = self.server_errors {
            settings = settings.with_server_errors(server_errors);
        }
        if let Some(bytes) = self.max_request_body {
            settings = settings.with_max_request_body(bytes).expect("a size within bounds");
        }
        if let Some(bytes) = self.max_response_body {
            settings = settings.with_max_response_body(bytes).expect("a size that a record can hold");
        }
        if self.fail_open {
            settings = settings.danger_fail_open();
        }
        if let Some(word) = self.reconcile {
            settings = settings.with_reconcile(word);
        }
        if self.authorize {
            settings = settings.with_authorize(AskedDecision);
        }
        let policy = self.policy(settings.policy());
        settings.with_policy(policy)
    }

    /// Applies the settings that clients see besides keys.
    fn surface(&self, mut settings: Settings) -> Settings {
        if let Some(marker) = self.replay_marker {
            settings =
                settings.with_replay_marker(HeaderName::from_static(marker)).expect("a field for it alone");
        }
        if let Some(url) = self.documentation {
            settings = settings.with_documentation(url).expect("a URL");
        }
        if self.exact_paths {
            settings = settings.with_trailing_slash(TrailingSlash::Exact).with_path_case(PathCase::Exact);
        }
        if let Some(statuses) = self.release_statuses {
            let statuses = statuses.iter().map(|status| StatusCode::from_u16(*status).expect("a status"));
            settings = settings.with_release_statuses(statuses.collect()).expect("errors");
        }
        settings
    }

    fn policy(&self, mut policy: Policy) -> Policy {
        if let Some(lease) = self.lease {
            policy = policy.with_lease(lease).expect("a lease within its bounds");
        }
        if let Some(retention) = self.retention {
            policy = policy.with_retention(retention).expect("a retention within its bounds");
        }
        if let Some(wait) = self.wait {
            policy = policy.with_wait(wait).expect("a wait within its bounds");
        }
        if let Some(on_abandoned) = self.on_abandoned {
            policy = policy.with_on_abandoned(on_abandoned);
        }
        policy
    }

    /// The layer with its routes.
    #[must_use]
    pub fn layer(&self, engine: Engine) -> IdempotencyLayer {
        let mut layer =
            IdempotencyLayer::new(engine).with_settings(self.settings()).expect("settings that fit");
        if let Some(bytes) = self.request_budget {
            layer = layer.with_request_budget(bytes).expect("a budget");
        }
        for route in &self.routes {
            let settings = route.plan.settings();
            let methods = (!route.methods.is_empty()).then(|| route.methods.clone());
            layer = layer.with_route(methods, route.path, settings).expect("a route");
        }
        layer
    }

    /// The flags of the sidecar. A file of settings, and the keys of tokens, are written into `dir`.
    #[must_use]
    pub fn flags(&self, dir: &Path) -> Vec<String> {
        let mut file = String::new();
        let mut flags = Vec::new();
        if self.by_file {
            file.push_str(&self.toml());
        } else {
            let flag = |(name, value): (&str, String)| format!("--{}={value}", name.replace('.', "-"));
            flags.extend(self.options().into_iter().map(flag));
        }
        if let Callers::Parts(parts) = self.scope
            && parts.iter().any(|part| part.starts_with("jwt:"))
        {
            let path = dir.join("keys.json");
            std::fs::write(&path, tokens::key_set()).expect("a file");
            flags.push(format!("--jwt-keys={}", path.display()));
            flags.push(format!("--jwt-algorithms={}", tokens::ALGORITHM.as_str()));
            flags.push(format!("--jwt-audience={}", tokens::AUDIENCE));
        }
        for route in &self.routes {
            writeln!(file, "\n[[route]]\npath = {:?}", route.path).unwrap();
            if !route.methods.is_empty() {
                writeln!(
                    file,
                    "methods = {:?}",
                    route.methods.iter().map(Method::as_str).collect::<Vec<_>>()
                )
                .unwrap();
            }
            file.push_str(&route.plan.toml());
        }
        if !file.is_empty() {
            let path = dir.join("oncegate.toml");
            std::fs::write(&path, file).expect("a file");
            flags.push(format!("--config={}", path.display()));
        }
        flags
    }

    /// The seal keys in their secret form, if responses are sealed.
    pub(crate) fn seal_keys(&self) -> Option<String> {
        self.seals.then(|| SealKey::from_bytes([7; 32]).to_secret_text().to_string())
    }

    /// The store that seals responses, if the settings say so.
    pub(crate) fn sealed(&self, store: Arc<dyn Store>) -> Arc<dyn Store> {
        match self.seal_keys() {
            Some(keys) => Arc::new(SealedStore::new(store, Keyring::parse(&keys).expect("seal keys"))),
            None => store,
        }
    }

    /// The settings of a library, by their names in a file.
    pub(crate) fn named_settings(&self) -> serde_json::Map<String, Value> {
        // Libraries have sizes as numbers of bytes.
        let parse = |text: &str| match text.strip_suffix('B').unwrap_or(text).parse::<u64>() {
            Ok(number) => Value::from(number),
            Err(_) => Value::from(text),
        };
        let value = |name: &str, text: &str| match text {
            "true" => Value::from(true),
            list if LISTS.contains(&name) => list.split(',').map(parse).collect(),
            text => parse(text),
        };
        self.options().into_iter().map(|(name, text)| (name.to_owned(), value(name, &text))).collect()
    }

    fn toml(&self) -> String {
        let line = |(name, value): (&str, String)| match value.as_str() {
            "true" => format!("{name} = true\n"),
            list if LISTS.contains(&name) => {
                format!("{name} = {:?}\n", list.split(',').collect::<Vec<_>>())
            }
            text if text.bytes().all(|b| b.is_ascii_digit()) => format!("{name} = {text}\n"),
            text => format!("{name} = {text:?}\n"),
        };
        self.options().into_iter().map(line).collect()
    }

    /// The settings by their names in a file.
    fn options(&self) -> Vec<(&'static str, String)> {
        let millis = |time: Duration| format!("{}ms", time.as_millis());
        let scope = match self.scope {
            Callers::NotSet => None,
            Callers::Parts(parts) => Some(parts.join(",")),
            Callers::SingleTenant => Some("single-tenant".to_owned()),
            Callers::Header(field) => Some(format!("header:{field}")),
            Callers::RequiredHeader(field) => Some(format!("required-header:{field}")),
        };
        let authority = self.authority.map(|authority| match authority {
            AuthorityRole::Ignored => "ignore".to_owned(),
            AuthorityRole::Scope => "scope".to_owned(),
            _ => "compare".to_owned(),
        });
        let options = [
            ("profile", Some(self.profile.to_owned())),
            ("scope", scope),
            ("authority", authority),
            ("require-key", self.require_key.then(|| "true".to_owned())),
            ("store-outage", self.fail_open.then(|| "open".to_owned())),
            ("key-header", self.key_header.map(str::to_owned)),
            ("natural-key", self.key_json.map(str::to_owned)),
            ("intent-tools", self.intent_tools.map(str::to_owned)),
            ("read-only-tools", self.read_only_tools.map(str::to_owned)),
            ("key-syntax", self.key_syntax.map(|syntax| format!("{syntax:?}").to_lowercase())),
            ("key-format", self.key_format.map(str::to_owned)),
            ("stored-headers", self.stored_header.map(str::to_owned)),
            ("fingerprint.headers", self.fingerprint_header.map(str::to_owned)),
            ("fingerprint.exclude", self.fingerprint_exclude.map(str::to_owned)),
            ("fingerprint.include", self.fingerprint_include.map(str::to_owned)),
            ("fingerprint.body", self.fingerprint_raw.then(|| "raw".to_owned())),
            ("key-scope", self.key_scope.map(|scope| format!("{scope:?}").to_lowercase())),
            (
                "methods",
                self.methods.as_ref().map(|all| all.iter().map(Method::as_str).collect::<Vec<_>>().join(",")),
            ),
            ("replay-marker", self.replay_marker.map(str::to_owned)),
            ("documentation", self.documentation.map(str::to_owned)),
            ("trailing-slash", self.exact_paths.then(|| "exact".to_owned())),
            ("path-case", self.exact_paths.then(|| "exact".to_owned())),
            (
                "release-statuses",
                self.release_statuses.map(|all| all.iter().map(u16::to_string).collect::<Vec<_>>().join(",")),
            ),
            ("lease", self.lease.map(millis)),
            ("retention", self.retention.map(millis)),
            ("wait", self.wait.map(millis)),
            ("on-abandoned", self.on_abandoned.map(|policy| format!("{policy:?}").to_lowercase())),
            ("reconcile-path", self.reconcile.map(|_| ASKED_AT.to_owned())),
            ("reconcile-timeout", self.reconcile.map(|_| "300ms".to_owned())),
            ("authorize", self.authorize.then(|| MAY_SEE.to_owned())),
            ("server-errors", self.server_errors.map(|policy| format!("{policy:?}").to_lowercase())),
            ("rate-limit.caller", self.new_keys_per_hour.map(|count| format!("{count}/h"))),
            ("rate-limit.key", self.attempts_per_hour.map(|count| format!("{count}/h"))),
            ("max-request-body", self.max_request_body.map(|bytes| format!("{bytes}B"))),
            ("request-budget", self.request_budget.map(|bytes| format!("{bytes}B"))),
            ("max-response-body", self.max_response_body.map(|bytes| format!("{bytes}B"))),
            ("upstream-timeout", self.upstream_timeout.map(millis)),
        ];
        options.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
    }
}
