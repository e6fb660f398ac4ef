//! Builds a configuration from the single values, and checks them against each other.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use http::Method;
use oncegate_core::fingerprint::FingerprintRules;
use oncegate_core::{NaturalKey, OnAbandoned, limits};
use oncegate_engine::ConfigError;
use oncegate_http::{
    CallerPart, CompletedBy, JwtVerifier, PathPattern, Profile, ProfileError, Protocol, RateLimits, Settings,
    ToolPolicies, ToolPolicy,
};

use crate::files;
use crate::otlp::OtlpOptions;

use super::advice;
use super::cors::Cors;
use super::file::RouteTable;
use super::id_secret;
use super::problem::{FilePlace, Problem, Source};
use super::rate;
use super::scope;
use super::seal;
use super::settings::{Setting, Sourced, Values};
use super::units::{self, AdminToken, Origin, ProfileChoice, StoreChoice, StoreOutage, Upstream};
use super::{Config, Draft, FixedValues, Route, RouteConfig, TlsFiles, apply};

/// Everything that could be built from the values. `file_is_whole` is false if the file could not be read.
pub(super) fn draft(
    values: &Values,
    tables: &[RouteTable],
    file_is_whole: bool,
    mut problems: Vec<Problem>,
) -> Draft {
    let is_doubtful = |name: &str| {
        !file_is_whole
            || problems.iter().any(|problem| {
                problem.is_error() && Setting::named(name).is_some_and(|setting| problem.is_about(setting))
            })
    };
    let store = Some(given(&values.store)).filter(|_| !is_doubtful("store"));
    let needs_to = !is_doubtful("to");
    let problems = &mut problems;
    let tls = tls(values, problems);
    let mut warnings = advice::on_service(values);
    let file = |given: &Option<Sourced<PathBuf>>| given.as_ref().map(|file| file.value.clone());
    let (token_file, seal_file) = (file(&values.admin_token_file), file(&values.seal_keys_file));
    let metrics_token_file = file(&values.metrics_token_file);
    let id_secret_file = file(&values.id_secret_file);
    let secret_files = [
        ("the admin token", token_file.as_ref()),
        ("the metrics token", metrics_token_file.as_ref()),
        ("the seal keys", seal_file.as_ref()),
        ("the id secret", id_secret_file.as_ref()),
        ("the TLS key", tls.as_ref().map(|files| &files.key)),
    ];
    warnings.extend(advice::on_secrets(secret_files));
    let jwt = scope::jwt_verifier(values, problems);
    if jwt.is_some() {
        warnings.extend(advice::on_token_secret(values));
    }
    let rate_limits = rate::limits(values, &RateLimits::default(), |_| true);
    let mut default = route_config(values, None, (false, jwt.as_ref()), problems);
    default.settings = default.settings.with_rate_limits(rate_limits.clone());
    check_scope_pattern(values, &default.settings, None, problems);
    warnings.extend(advice::on_route(values, &default));
    let mut routes = Vec::new();
    for table in tables {
        if let Some((route, advice)) = route(values, table, (jwt.as_ref(), &rate_limits), problems) {
            warnings.extend(advice);
            warnings.extend(advice::on_order(&routes, &route, &table.source));
            routes.push(route);
        }
    }
    let scopes = std::iter::once(&default).chain(routes.iter().map(|route| &route.config));
    // A scope with an error is not among the scopes of the routes.
    if jwt.is_some() && !has_error_about("scope", problems) {
        warnings.extend(scope::jwt_advice(values, scopes.map(|route| route.settings.caller())));
    }
    warnings.extend(otlp_advice(values));
    if let Some(path) = &values.reconcile_path
        && !std::iter::once(&default).chain(routes.iter().map(|route| &route.config)).any(RouteConfig::asks)
    {
        let what = "set but never used: no route has on-abandoned = reconcile or completion = upstream";
        warnings.push(Problem::warning(path.source.clone(), what));
    }
    check_budgets(
        values,
        std::iter::once(&default).chain(routes.iter().map(|route| &route.config)),
        problems,
    );
    let seal = seal::settings(values, problems);
    let id_secret = id_secret::read(values, problems);
    warnings.extend(seal::advice(
        values,
        std::iter::once(&default).chain(routes.iter().map(|route| &route.config)),
    ));
    let store_must_exist = given(&values.store_must_exist);
    check_store_must_exist(values, problems);
    check_service(values, store.is_some(), problems);
    let admin_token = read_token(&values.admin_token, &values.admin_token_file, problems, &mut warnings);
    let metrics_token =
        read_token(&values.metrics_token, &values.metrics_token_file, problems, &mut warnings);
    check_metrics_token(values, (&admin_token, &metrics_token), problems);
    check_addresses(values, problems);
    check_record_limits(values, problems);
    // A URL that could not be read has been reported already.
    if values.to.is_none() && needs_to {
        let what = "nothing to protect: give --to URL, such as --to http://127.0.0.1:3000";
        problems.push(Problem::error(None, what));
    }
    // A route inherits values with their warnings.
    let mut once: Vec<Problem> = Vec::new();
    for warning in warnings {
        if !once.contains(&warning) {
            once.push(warning);
        }
    }
    let is_valid = !problems.iter().any(Problem::is_error);
    let config = values.to.as_ref().filter(|_| is_valid).map(|to| Config {
        listen: given(&values.listen),
        admin: given(&values.admin),
        admin_token,
        metrics_token,
        to: to.value.clone(),
        upstream_protocol: given(&values.upstream_protocol),
        upstream_connect_timeout: given(&values.upstream_connect_timeout),
        upstream_idle_timeout: given(&values.upstream_idle_timeout),
        drain_timeout: given(&values.drain_timeout),
        shutdown_delay: given(&values.shutdown_delay),
        request_budget: given(&values.request_budget),
        response_budget: given(&values.response_budget),
        max_connections: given(&values.max_connections),
        client_idle_timeout: given(&values.client_idle_timeout),
        write_timeout: given(&values.write_timeout),
        trusted_proxies: given(&values.trusted_proxies),
        max_in_flight: given(&values.max_in_flight),
        max_in_flight_per_caller: given(&values.max_in_flight_per_caller),
        max_in_flight_without_key: values.max_in_flight_without_key.as_ref().map(|given| given.value),
        store_memory: given(&values.store_memory),
        max_records: values.max_records.as_ref().map(|given| given.value),
        max_store_bytes: values.max_store_bytes.as_ref().map(|given| given.value as u64),
        store_timeout: given(&values.store_timeout),
        access_log: given(&values.access_log),
        log_format: given(&values.log_format),
        otlp: otlp(values),
        trace_sample_ratio: given(&values.trace_sample_ratio),
        threads: values.threads.as_ref().map(|threads| threads.value),
        published_rules: None,
        playground: given(&values.playground),
        store: given(&values.store),
        store_must_exist,
        service: values.service.as_ref().map(|service| service.value.clone()),
        tls: tls.clone(),
        seal,
        id_secret,
        jwt,
        jwt_keys: values.jwt_keys.as_ref().map(|keys| keys.value.clone()),
        default,
        routes,
        warnings: once.clone(),
        given: Arc::default(),
        summary: String::new(),
        fixed: FixedValues::default(),
    });
    problems.extend(once);
    problems.sort_by_key(Problem::rank);
    let given = Arc::default();
    Draft { store, store_must_exist, tls, given, problems: std::mem::take(problems), config }
}

/// Checks that each budget is at least as large as the largest body, which would otherwise always be refused.
fn check_budgets<'a>(
    values: &Values,
    routes: impl Iterator<Item = &'a RouteConfig>,
    problems: &mut Vec<Problem>,
) {
    let (mut request, mut response) = (0, 0);
    for route in routes {
        request = request.max(route.max_request_body);
        response = response.max(route.settings.max_response_body());
    }
    for (budget, largest, what, name) in [
        (&values.request_budget, request, "request bodies", "max-request-body"),
        (&values.response_budget, response, "responses", "max-response-body"),
    ] {
        if given(budget) < largest {
            let what = format!(
                "all {what} together may hold {}, but one alone may have {} ({name})",
                units::size_text(given(budget) as u64),
                units::size_text(largest as u64)
            );
            problems.push(Problem::error(budget.as_ref().map(|given| given.source.clone()), what));
        }
    }
}

/// Refuses limits that do not apply to a store on a server, which has its own.
fn check_record_limits(values: &Values, problems: &mut Vec<Problem>) {
    let store = given(&values.store);
    if matches!(store.store(), StoreChoice::Memory | StoreChoice::Directory(_)) {
        return;
    }
    for name in ["max-records", "max-store-bytes"] {
        if let Some(source) = values.source(name) {
            let what = format!("{name} is for the embedded store or one in memory, and not for {store}");
            problems.push(Problem::error(source.clone(), what));
        }
    }
}

/// The value of a setting that has a default.
pub(super) fn given<T: Clone>(given: &Option<Sourced<T>>) -> T {
    match given {
        Some(given) => given.value.clone(),
        None => unreachable!("the setting has a default"),
    }
}

/// The settings of the exporter, if there is a collector.
fn otlp(values: &Values) -> Option<OtlpOptions> {
    let endpoint = values.otlp_endpoint.as_ref()?.value.clone();
    let name = values.otlp_service_name.as_ref().map(|name| name.value.clone());
    let service = values.service.as_ref().map(|service| format!("{}-oncegate", service.value));
    Some(OtlpOptions {
        endpoint,
        headers: values.otlp_headers.as_ref().map(|headers| headers.value.clone()).unwrap_or_default(),
        signals: given(&values.otlp_signals),
        service_name: name.or(service).unwrap_or_else(|| "oncegate".to_owned()),
        resource: values.otlp_resource_attributes.iter().flat_map(|given| given.value.clone()).collect(),
        metrics_interval: given(&values.otlp_metrics_interval),
    })
}

/// Warns of settings of the exporter that have no effect. Variables of OpenTelemetry may be meant for other programs.
fn otlp_advice(values: &Values) -> Option<Problem> {
    let names = [
        "otlp-headers",
        "otlp-signals",
        "otlp-metrics-interval",
        "otlp-service-name",
        "otlp-resource-attributes",
    ];
    let is_ours = |source: &&Source| {
        is_given(source) && !matches!(source, Source::Env(name) if name.starts_with("OTEL_"))
    };
    if let (Some(endpoint), Some(headers)) = (&values.otlp_endpoint, &values.otlp_headers)
        && !headers.value.is_empty()
        && !endpoint.value.is_private()
    {
        let what = "its fields are sent to the collector in clear text; use an https URL";
        return Some(Problem::warning(headers.source.clone(), what));
    }
    let source = names.into_iter().find_map(|name| values.source(name).filter(is_ours))?;
    let what = "set but never used: nothing is sent without the address of a collector; set otlp-endpoint";
    values.otlp_endpoint.is_none().then(|| Problem::warning(source.clone(), what))
}

fn tls(values: &Values, problems: &mut Vec<Problem>) -> Option<TlsFiles> {
    let (given, missing) = match (&values.tls_cert, &values.tls_key) {
        (Some(cert), Some(key)) => {
            let file = |given: &Option<Sourced<PathBuf>>| given.as_ref().map(|file| file.value.clone());
            let (client_ca, client_crl) = (file(&values.tls_client_ca), file(&values.tls_client_crl));
            if let (Some(lists), None) = (&values.tls_client_crl, &client_ca) {
                let what = "clients are not asked for certificates, so none is looked up in the lists; set tls-client-ca too";
                problems.push(Problem::error(lists.source.clone(), what));
            }
            return Some(TlsFiles {
                cert: cert.value.clone(),
                key: key.value.clone(),
                client_ca,
                client_crl,
            });
        }
        (None, None) => match values.tls_client_ca.as_ref().or(values.tls_client_crl.as_ref()) {
            Some(file) => (file, "clients show certificates only over TLS; set tls-cert and tls-key too"),
            None => return None,
        },
        (Some(cert), None) => (cert, "a certificate without its key; set tls-key too"),
        (None, Some(key)) => (key, "a key without its certificate; set tls-cert too"),
    };
    problems.push(Problem::error(given.source.clone(), missing));
    None
}

fn route(
    service: &Values,
    table: &RouteTable,
    (jwt, rate_limits): (Option<&JwtVerifier>, &RateLimits),
    problems: &mut Vec<Problem>,
) -> Option<(Route, Vec<Problem>)> {
    let mut values = service.clone();
    apply(&table.entries, &mut values, problems);
    let has = |name: &str| table.entries.iter().any(|entry| entry.setting.name == name);
    let methods = values.methods.as_ref().filter(|_| has("methods")).map(|methods| methods.value.clone());
    let narrows = has("completion") && !has("on-abandoned");
    let mut config = route_config(&values, Some(&table.source), (narrows, jwt), problems);
    config.settings = config.settings.with_rate_limits(rate::limits(&values, rate_limits, has));
    let (path, source) = table.path.as_ref()?;
    let pattern = match PathPattern::new(path) {
        Ok(pattern) => pattern.with_spelling(given(&values.trailing_slash), given(&values.path_case)),
        Err(error) => {
            problems.push(Problem::error(source.clone(), error.to_string()));
            return None;
        }
    };
    check_scope_pattern(&values, &config.settings, Some(&pattern), problems);
    config.label = pattern.as_str().into();
    let advice = advice::on_route(&values, &config);
    Some((Route { methods: methods.unwrap_or_default(), pattern, config }, advice))
}

/// Builds the configuration of a route. `narrows` is true if the route has its own `completion` and inherits `on-abandoned`.
/// `jwt` verifies the tokens that name callers.
fn route_config(
    values: &Values,
    place: Option<&Source>,
    (narrows, jwt): (bool, Option<&JwtVerifier>),
    problems: &mut Vec<Problem>,
) -> RouteConfig {
    if let Some(methods) = values.methods.as_ref().filter(|methods| methods.value.is_empty()) {
        let what = "the list of methods is empty, so nothing would be protected";
        push_once(problems, Problem::error(methods.source.clone(), what));
    }
    let profile = profile(values, problems);
    check_tools(profile.protocol(), values, problems);
    let settings = settings(values, profile).unwrap_or_else(|error| {
        // Every value was checked when it was read, so these are values that contradict each other.
        push_once(problems, Problem::error(place.cloned(), error.to_string()));
        Settings::default()
    });
    if let Err(error) = settings.check_carriers() {
        let source = ["key-header", "profile"].into_iter().find_map(|name| values.source(name));
        push_once(problems, Problem::error(source.or(place).cloned(), error.to_string()));
    }
    if let Err(error) = settings.check_shadow() {
        let source = values.source("shadow").or(place).cloned();
        push_once(problems, Problem::error(source, error.to_string()));
    }
    if settings.policy().on_abandoned() == OnAbandoned::Reconcile && values.reconcile_path.is_none() {
        let source = values.on_abandoned.as_ref().map(|given| given.source.clone());
        let what =
            "the service cannot be asked without a path; set reconcile-path, such as \"/oncegate/outcome\"";
        push_once(problems, Problem::error(source, what));
    }
    if settings.completed_by() == CompletedBy::Upstream {
        check_upstream_completion(values, narrows, problems);
    }
    let settings = with_scope(settings, values, jwt, problems);
    let cors = cors(values, &settings, problems);
    RouteConfig {
        label: crate::admin::DEFAULT_ROUTE.into(),
        settings,
        cors,
        upstream_timeout: given(&values.upstream_timeout),
        max_request_body: given(&values.max_request_body),
        reconcile_path: values.reconcile_path.as_ref().map(|path| path.value.clone()),
        reconcile_timeout: given(&values.reconcile_timeout),
        authorize: values.authorize.as_ref().map(|path| path.value.clone()),
        authorize_timeout: given(&values.authorize_timeout),
    }
}

/// Checks that settings for calls of tools are given for their protocol only.
fn check_tools(protocol: Protocol, values: &Values, problems: &mut Vec<Problem>) {
    let speaks_mcp = protocol == Protocol::Mcp;
    for name in ["read-only-tools", "intent-tools"] {
        if let (false, Some(source)) = (speaks_mcp, values.source(name)) {
            let what =
                "it is for messages of the Model Context Protocol; set profile = \"mcp\" in the same place";
            push_once(problems, Problem::error(Some(source.clone()), what));
        }
    }
    if let (true, Some(methods)) = (speaks_mcp, &values.methods)
        && !methods.value.contains(&Method::POST)
    {
        let what = "all calls of tools are POST requests, and would not be protected; add \"POST\"";
        push_once(problems, Problem::error(methods.source.clone(), what));
    }
    if let (true, Some(source)) = (speaks_mcp, values.source("natural-key")) {
        let what = "it has no effect on calls of tools; name the tools whose keys are built from their arguments in intent-tools";
        push_once(problems, Problem::error(Some(source.clone()), what));
    }
}

fn cors(values: &Values, settings: &Settings, problems: &mut Vec<Problem>) -> Option<Arc<Cors>> {
    let origins = values.cors_allowed_origins.as_ref().filter(|origins| !origins.value.is_empty())?;
    let cors = Cors::new(&origins.value)
        .with_exposed(settings, values.cors_exposed_headers.as_ref().map_or(&[], |names| &names.value))
        .with_headers(values.cors_allowed_headers.as_ref().map_or(&[], |names| &names.value))
        .with_methods(values.cors_allowed_methods.as_ref().map_or(&[], |methods| &methods.value))
        .with_max_age(given(&values.cors_max_age));
    match &values.cors_allow_credentials {
        Some(credentials) if credentials.value && origins.value.contains(&Origin::Any) => {
            let what = "pages of every origin (cors.allowed-origins = \"*\") cannot use the credentials of their visitors; name the origins";
            push_once(problems, Problem::error(credentials.source.clone(), what));
            None
        }
        Some(credentials) if credentials.value => Some(Arc::new(cors.with_credentials())),
        _ => Some(Arc::new(cors)),
    }
}

/// The settings with the callers' scope, if one is set and valid. Checks settings that need a certain scope.
fn with_scope(
    settings: Settings,
    values: &Values,
    jwt: Option<&JwtVerifier>,
    problems: &mut Vec<Problem>,
) -> Settings {
    let settings = match values.scope.as_ref().map(|scope| (scope, scope::whole_scope(&scope.value, jwt))) {
        None => settings,
        Some((_, Ok(scope))) => settings.with_caller(scope),
        // The keys have a problem of their own.
        Some((_, Err(_)))
            if jwt.is_none() && (values.jwt_keys.is_some() || has_error_about("jwt-keys", problems)) =>
        {
            return settings;
        }
        Some((scope, Err(what))) => {
            push_once(problems, Problem::error(scope.source.clone(), what));
            return settings;
        }
    };
    let needs_certificates = settings.caller().parts().any(|part| matches!(part, CallerPart::Certificate(_)));
    if needs_certificates && values.tls_client_ca.is_none() {
        let what =
            "clients are not asked for certificates; set tls-client-ca to the authority that signs them";
        push_once(problems, Problem::error(values.source("scope").cloned(), what));
    }
    if needs_certificates && values.authorize.is_some() {
        let what = "the service cannot decide about a caller whom only a certificate names (scope = \"mtls:…\"), because it does not \
                    get the certificate; leave authorize out, or use a scope that names callers by fields of the request";
        push_once(problems, Problem::error(values.source("authorize").cloned(), what));
    }
    let is_doubtful = has_error_about("scope", problems);
    if settings.natural_key().is_some() && settings.caller().allows_anonymous() && !is_doubtful {
        let source = values.source("scope").or_else(|| values.source("natural-key"));
        let what = "the key is built from members of the body (natural-key), and callers that are not told apart would get each \
                    other's responses; set scope = \"required-header:NAME\" or \"required-cookie:NAME\", or \"single-tenant\" \
                    if there is only one caller";
        push_once(problems, Problem::error(source.cloned(), what));
    }
    if settings.tools().has_intents() && settings.caller().allows_anonymous() && !is_doubtful {
        let source = values.source("scope").or_else(|| values.source("intent-tools"));
        let what = "the keys of calls are built from their intents (intent-tools), and callers that are not told apart would get \
                    each other's results; set scope = \"required-header:NAME\" or \"jwt:sub\", or \"single-tenant\" if there is \
                    only one caller";
        push_once(problems, Problem::error(source.cloned(), what));
    }
    settings
}

/// Checks that the path of a route has the parameters that its `scope` names.
fn check_scope_pattern(
    values: &Values,
    settings: &Settings,
    pattern: Option<&PathPattern>,
    problems: &mut Vec<Problem>,
) {
    if let Err(error) = settings.caller().check_pattern(pattern) {
        push_once(problems, Problem::error(values.source("scope").cloned(), error.to_string()));
    }
}

fn has_error_about(name: &str, problems: &[Problem]) -> bool {
    let is_about = |problem: &Problem| Setting::named(name).is_some_and(|setting| problem.is_about(setting));
    problems.iter().any(|problem| problem.is_error() && is_about(problem))
}

/// Checks that the service has a name if the store may be shared: without names, two services would get each other's responses.
fn check_service(values: &Values, store_is_known: bool, problems: &mut Vec<Problem>) {
    let store = given(&values.store);
    if !store_is_known
        || !store.is_shared()
        || values.service.is_some()
        || has_error_about("service", problems)
    {
        return;
    }
    let what = "a store on a server may contain records of other services, so this service needs a name: give --service NAME, \
                such as --service orders. Sidecars with the same name share keys";
    push_once(problems, Problem::error(values.store.as_ref().map(|store| store.source.clone()), what));
}

/// Checks the settings that exclude completion by the service. The layer checks the store itself once more.
fn check_upstream_completion(values: &Values, narrows: bool, problems: &mut Vec<Problem>) {
    let abandoned = values.on_abandoned.as_ref().filter(|given| given.value != OnAbandoned::Reexecute);
    if let Some(given) = abandoned.filter(|given| is_given(&given.source) && !narrows) {
        let what = "the service completes its record in its own transaction (completion = \"upstream\"), so a request that was \
                    cut off has committed nothing and is executed again; leave this out, or set \"reexecute\"";
        push_once(problems, Problem::error(given.source.clone(), what));
    }
    let without_transactions = match given(&values.store).store() {
        StoreChoice::Memory => "memory:",
        StoreChoice::Directory(_) => "a directory",
        StoreChoice::Redis(_) => "Redis",
        _ => return,
    };
    if has_error_about("store", problems) {
        return;
    }
    let what = format!(
        "the service completes its record in its own transaction, but the store is {without_transactions}, which no \
         transaction of the service reaches; give --store postgres://… or leave completion to the sidecar"
    );
    let source = values.completion.as_ref().map(|given| given.source.clone());
    push_once(problems, Problem::error(source, what));
}

/// The profile, read from its file if it is one. The mistakes in a file are reported as those of the configuration are.
fn profile(values: &Values, problems: &mut Vec<Problem>) -> Profile {
    let (path, source) = match &values.profile {
        Some(Sourced { value: ProfileChoice::File(path), source }) => (path, source),
        Some(Sourced { value: ProfileChoice::Shipped(profile), .. }) => return (**profile).clone(),
        None => return Profile::default(),
    };
    // Relative to the file that names it.
    let path = match source {
        Source::File(place) => Path::new(&*place.file).parent().unwrap_or(Path::new("")).join(path),
        _ => path.clone(),
    };
    let name = path.file_stem().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let file: Arc<str> = path.display().to_string().into();
    let text = match files::read_text(&path, files::MAX_TEXT) {
        Ok(text) => text,
        Err(error) => {
            push_once(problems, Problem::error(source.clone(), format!("{file}: {error}")));
            return Profile::default();
        }
    };
    Profile::parse(&name, &text).unwrap_or_else(|errors| {
        for ProfileError { line, column, key, message, .. } in errors.0 {
            let place = FilePlace { file: file.clone(), line, column, key };
            push_once(problems, Problem::error(Source::File(place), message));
        }
        Profile::default()
    })
}

fn settings(values: &Values, profile: Profile) -> Result<Settings, ConfigError> {
    let mut settings = Settings::new(profile);
    let mut policy = settings
        .policy()
        .with_lease(given(&values.lease))?
        .with_wait(given(&values.wait))?
        .with_on_abandoned(given(&values.on_abandoned));
    if let Some(retention) = &values.retention {
        policy = policy.with_retention(retention.value)?;
    }
    settings = settings
        .with_policy(policy)
        .with_authority(given(&values.authority))
        .with_trailing_slash(given(&values.trailing_slash))
        .with_path_case(given(&values.path_case))
        .with_max_request_body(given(&values.max_request_body))?
        .with_max_response_body(given(&values.max_response_body))?;
    if given(&values.completion) == CompletedBy::Upstream {
        settings = settings.with_upstream_completion();
    }
    // These settings override the profile if they are given.
    if let Some(required) = &values.require_key {
        settings = settings.with_required_key(required.value);
    }
    if let Some(names) = &values.key_header {
        settings = settings.with_key_headers(names.value.clone())?;
    }
    if let Some(names) = &values.key_query {
        settings = settings.with_key_query(&names.value)?;
    }
    if let Some(members) = &values.key_member {
        settings = settings.with_key_members(members.value.clone())?;
    }
    if let Some(members) = &values.natural_key {
        let key = NaturalKey::new(members.value.clone()).ok_or_else(|| {
            let most = limits::MAX_KEY_MEMBERS;
            ConfigError::new(format!(
                "a key is built from 1 to {most} members, and there are {}",
                members.value.len()
            ))
        })?;
        settings = settings.with_natural_key(key);
    }
    let mut tools = ToolPolicies::default();
    if let Some(names) = &values.read_only_tools {
        tools = tools.with(ToolPolicy::ReadOnly, &names.value)?;
    }
    if let Some(names) = &values.intent_tools {
        tools = tools.with(ToolPolicy::ByIntent, &names.value)?;
    }
    settings = settings.with_tools(tools);
    if let Some(scope) = &values.key_scope {
        settings = settings.with_key_scope(scope.value);
    }
    if let Some(syntax) = &values.key_syntax {
        settings = settings.with_key_syntax(syntax.value);
    }
    if let Some(format) = &values.key_format {
        settings = settings.with_key_format(format.value.clone());
    }
    if values.fingerprint_include.is_some() || values.fingerprint_exclude.is_some() {
        settings = settings.with_fingerprint(fingerprint_rules(values));
    }
    let comparison = values.fingerprint_body.as_ref().map(|given| given.value);
    let comparison = comparison.unwrap_or(settings.body_comparison());
    settings = settings.with_body_comparison(comparison);
    if let Some(methods) = &values.methods {
        settings = settings.with_methods(methods.value.clone())?;
    }
    if let Some(server_errors) = &values.server_errors {
        settings = settings.with_server_errors(server_errors.value);
    }
    if let Some(statuses) = &values.release_statuses {
        settings = settings.with_release_statuses(statuses.value.concat())?;
    }
    if let Some(name) = &values.replay_marker {
        settings = settings.with_replay_marker(name.value.clone())?;
    }
    if let Some(url) = &values.documentation {
        settings = settings.with_documentation(&url.value)?;
    }
    if let Some(url) = &values.problem_base_url {
        settings = settings.with_problem_base_url(&url.value)?;
    }
    if let Some(names) = &values.fingerprint_headers {
        settings = settings.with_fingerprint_headers(names.value.clone());
    }
    if let Some(names) = &values.stored_headers {
        settings = settings.with_stored_headers(names.value.iter().cloned())?;
    }
    if let Some(members) = &values.redact_response {
        settings = settings.with_redacted_members(members.value.clone())?;
    }
    if let Some(names) = &values.redact_headers {
        settings = settings.with_redacted_headers(names.value.clone());
    }
    if given(&values.store_outage) == StoreOutage::Open {
        settings = settings.danger_fail_open();
    }
    Ok(settings.with_shadow(given(&values.shadow)))
}

fn fingerprint_rules(values: &Values) -> FingerprintRules {
    let mut rules = FingerprintRules::new();
    for pointer in values.fingerprint_include.iter().flat_map(|pointers| pointers.value.iter()) {
        rules = rules.include(pointer.clone());
    }
    for pointer in values.fingerprint_exclude.iter().flat_map(|pointers| pointers.value.iter()) {
        rules = rules.exclude(pointer.clone());
    }
    rules
}

/// Refuses `store-must-exist` for a store in memory, which is new at every start.
fn check_store_must_exist(values: &Values, problems: &mut Vec<Problem>) {
    if given(&values.store_must_exist) && given(&values.store) == StoreChoice::Memory {
        let source = values.store_must_exist.as_ref().map(|given| given.source.clone());
        let what = "a store in memory is new at every start; leave this out, or keep records in a directory";
        problems.push(Problem::error(source, what));
    }
}

/// A token, from the environment or from a file. As everywhere, a flag wins over the environment, and the environment over the
/// file.
fn read_token(
    token: &Option<Sourced<AdminToken>>,
    file: &Option<Sourced<PathBuf>>,
    problems: &mut Vec<Problem>,
    warnings: &mut Vec<Problem>,
) -> Option<AdminToken> {
    let differs = |token: &AdminToken, file: &Path| token_in(file).as_ref() != Ok(token);
    match (token, file) {
        (Some(token), Some(Sourced { source: source @ Source::Env(_), .. })) => {
            let what = format!("{source} is set, too; the token must come from one source, so leave one out");
            problems.push(Problem::error(token.source.clone(), what));
            None
        }
        (Some(token), Some(Sourced { value: file, source: source @ Source::Flag(_) })) => {
            if differs(&token.value, file) {
                let what =
                    format!("another token than that of {source}, which wins; this one is not accepted");
                warnings.push(Problem::warning(token.source.clone(), what));
            }
            token_or_problem(file, source, problems)
        }
        (Some(token), Some(file)) => {
            if differs(&token.value, &file.value) {
                let what = format!(
                    "another token than that in {}, which it overrides; a reload does not change it",
                    file.value.display()
                );
                warnings.push(Problem::warning(token.source.clone(), what));
            }
            Some(token.value.clone())
        }
        (Some(token), None) => Some(token.value.clone()),
        (None, Some(file)) => token_or_problem(&file.value, &file.source, problems),
        (None, None) => None,
    }
}

/// The token for metrics is worth something only next to an admin token that is another one.
fn check_metrics_token(
    values: &Values,
    (admin, metrics): (&Option<AdminToken>, &Option<AdminToken>),
    problems: &mut Vec<Problem>,
) {
    let source = || values.source("metrics-token").or(values.source("metrics-token-file")).cloned();
    let what = match (admin, metrics) {
        (None, Some(_)) if !admin_token_was_tried(values, problems) => {
            "a token for /metrics needs an admin token next to it: without one, every program of this machine may read and change \
             everything on the admin address"
        }
        (Some(admin), Some(metrics)) if admin == metrics => {
            "the token for /metrics is the admin token, with which Prometheus could change records; use another one, such as the output \
             of `openssl rand -hex 32`"
        }
        _ => return,
    };
    problems.push(Problem::error(source(), what));
}

/// Returns true if an admin token was given, though it may be invalid.
fn admin_token_was_tried(values: &Values, problems: &[Problem]) -> bool {
    values.admin_token.is_some()
        || values.admin_token_file.is_some()
        || problems.iter().any(|p| p.source == Some(Source::Env("ONCEGATE_ADMIN_TOKEN".to_owned())))
}

fn token_or_problem(file: &Path, source: &Source, problems: &mut Vec<Problem>) -> Option<AdminToken> {
    let token = token_in(file);
    token
        .map_err(|what| {
            let what = format!("{}: {what}", file.display());
            problems.push(Problem::error(source.clone(), what));
        })
        .ok()
}

fn token_in(path: &Path) -> Result<AdminToken, String> {
    const MAX_FILE: usize = 4096;
    let text = files::read(path, files::MAX_SECRET).map_err(|error| error.to_string())?;
    match String::from_utf8(text) {
        Ok(text) if text.len() <= MAX_FILE => units::admin_token(&text),
        _ => Err("is not a token: one line of at least 16 ASCII characters".to_owned()),
    }
}

fn check_addresses(values: &Values, problems: &mut Vec<Problem>) {
    let (listen, admin) = (given(&values.listen), given(&values.admin));
    let source = |name| values.source(name).cloned();
    if !is_loopback(admin.ip()) && !admin_token_was_tried(values, problems) {
        let what = format!(
            "other machines can reach the admin address {admin}; put a token of at least {} characters into \
             ONCEGATE_ADMIN_TOKEN or into a file for --admin-token-file, or use a loopback address such as \
             127.0.0.1:9090",
            AdminToken::MIN
        );
        problems.push(Problem::error(source("admin"), what));
    }
    if meet(listen, admin) {
        let what = format!("the admin address {admin} is taken by the address for requests, {listen}");
        problems.push(Problem::error(source("admin").filter(is_given).or(source("listen")), what));
    }
    if let Some(to) = &values.to
        && let Some(upstream) = socket_of(&to.value)
        && meet(listen, upstream)
    {
        let what = format!(
            "the service {} is this sidecar's own address {listen}, so requests would run in a loop",
            to.value
        );
        problems.push(Problem::error(to.source.clone(), what));
    }
}

/// Returns true if a value with this source was given, and is not a default.
pub(super) fn is_given(source: &Source) -> bool {
    *source != Source::Default
}

pub(super) fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

/// Returns true if the sidecar cannot listen on both addresses, or one of them reaches the other.
fn meet(a: SocketAddr, b: SocketAddr) -> bool {
    let same = a.ip().to_canonical() == b.ip().to_canonical();
    let reached =
        |all: IpAddr, one: IpAddr| all.is_unspecified() && (is_loopback(one) || one.is_unspecified());
    a.port() == b.port() && a.port() != 0 && (same || reached(a.ip(), b.ip()) || reached(b.ip(), a.ip()))
}

fn socket_of(upstream: &Upstream) -> Option<SocketAddr> {
    let host = upstream.authority.host().trim_matches(['[', ']']);
    let ip = if host.eq_ignore_ascii_case("localhost") { "127.0.0.1".parse() } else { host.parse() };
    let default_port = if upstream.scheme == http::uri::Scheme::HTTPS { 443 } else { 80 };
    Some(SocketAddr::new(ip.ok()?, upstream.authority.port_u16().unwrap_or(default_port)))
}

fn push_once(problems: &mut Vec<Problem>, problem: Problem) {
    if !problems.contains(&problem) {
        problems.push(problem);
    }
}
