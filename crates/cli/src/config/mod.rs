//! The configuration of the sidecar, from flags, the environment and a file. Flags win over the environment, and the
//! environment over the file.
//!
//! Every setting is declared once, in [`settings`]. All problems are collected and shown together, each with its source.

mod accepted;
mod advice;
mod assemble;
mod cached;
mod cors;
mod env;
mod file;
mod flags;
mod id_secret;
#[cfg(test)]
mod pages;
mod paths;
mod problem;
mod rate;
mod scope;
mod seal;
mod settings;
mod standard_env;
mod store_url;
#[cfg(test)]
mod tests;
mod trusted;
mod units;

use std::ffi::OsString;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http::Method;
use http::uri::PathAndQuery;
use oncegate_core::{IdSecret, OnAbandoned, ServiceName};
use oncegate_engine::{ConfigError, Engine};
use oncegate_http::{CompletedBy, IdempotencyLayer, JwtVerifier, PathPattern, RateLimits, Settings};

use crate::access_log::AccessLogFormat;
use crate::files;
use crate::log::LogFormat;
use crate::otlp::OtlpOptions;
use crate::rules::PublishedRules;
use crate::trace::SampleRatio;

use self::file::FileContent;
use self::settings::{Sourced, Values};

pub(crate) use self::accepted::{Accepted, text_of_number};
pub(crate) use self::cached::{CacheChoice, CachedChoice};
pub(crate) use self::cors::{Cors, asked_method};
#[cfg(test)]
pub(crate) use self::flags::parse as parse_flags;
pub(crate) use self::flags::{ProxyArgs, add_tip, drop_far_suggestion};
pub(crate) use self::id_secret::id_secret_in;
pub(crate) use self::problem::{Problem, Problems, Source, did_you_mean};
pub(crate) use self::scope::KeySetPlace;
pub(crate) use self::seal::{
    MAX_KEY_TEXT, SealKeySource, SealSettings, parse as parse_seal_keys, seal_keys_in,
};
#[cfg(test)]
pub(crate) use self::settings::Values as SettingValues;
pub(crate) use self::settings::{Fallback, Raw, SETTINGS, SettableIn, Setting, Shape};
use self::trusted::TrustedProxies;
#[cfg(test)]
pub(crate) use self::units::admin_token;
pub(crate) use self::units::store as read_store;
pub(crate) use self::units::{
    AdminToken, StoreChoice, StoreUrl, Upstream, UpstreamProtocol, duration, duration_text,
    rounded_duration_text, shown_program, shown_url, shown_value, size_text, store, without_login,
};
pub(crate) use self::units::{ProfileChoice, profile as read_profile};

/// One setting with its given value.
pub(crate) struct Entry {
    pub(crate) setting: &'static Setting,
    pub(crate) raw: Raw,
    pub(crate) source: Source,
}

/// The permission of the dashboard to send requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Playground {
    /// If the admin address is a loopback address.
    #[default]
    Auto,
    On,
    Off,
}

/// The settings as they were given. They may contain a password, so they are not shown as a whole.
#[derive(Default)]
pub(crate) struct GivenEntries {
    /// Those of the whole sidecar; a later one overrides those before it.
    service: Vec<Entry>,
    /// Those of each route, in the order of the routes of a configuration without errors.
    routes: Vec<Vec<Entry>>,
}

impl GivenEntries {
    /// The entry that applies on this route, or outside of routes.
    pub(crate) fn of(&self, setting: &Setting, route: Option<usize>) -> Option<&Entry> {
        let own = route.and_then(|number| self.routes.get(number)).map_or(&[][..], Vec::as_slice);
        self.service.iter().chain(own).rev().find(|entry| entry.setting.name == setting.name)
    }
}

impl fmt::Debug for GivenEntries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GivenEntries").finish_non_exhaustive()
    }
}

/// The configuration of the sidecar.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// The address for requests.
    pub(crate) listen: SocketAddr,
    /// The address for operators.
    pub(crate) admin: SocketAddr,
    /// The token that operators must send.
    pub(crate) admin_token: Option<AdminToken>,
    /// The token that opens `/metrics` alone.
    pub(crate) metrics_token: Option<AdminToken>,
    /// The service to protect.
    pub(crate) to: Upstream,
    pub(crate) upstream_protocol: UpstreamProtocol,
    pub(crate) upstream_connect_timeout: Duration,
    /// The time for which an idle connection to the service is kept.
    pub(crate) upstream_idle_timeout: Duration,
    pub(crate) drain_timeout: Duration,
    /// The time for which requests are still accepted after the sidecar was told to stop.
    pub(crate) shutdown_delay: Duration,
    /// The memory for the bodies of all requests with a key.
    pub(crate) request_budget: usize,
    /// The memory for the bodies of all their responses.
    pub(crate) response_budget: usize,
    /// The limit of requests with a key in flight.
    pub(crate) max_in_flight: usize,
    /// The limit for one caller.
    pub(crate) max_in_flight_per_caller: usize,
    /// The limit of requests without a key in flight; `None` is as many as open files allow.
    pub(crate) max_in_flight_without_key: Option<usize>,
    /// The limit of open client connections.
    pub(crate) max_connections: usize,
    /// The time for which an idle connection of a client is kept.
    pub(crate) client_idle_timeout: Duration,
    /// The longest time for which a client may accept no byte of a response.
    pub(crate) write_timeout: Duration,
    /// The proxies whose information about the origin of a request is passed on.
    trusted_proxies: Vec<TrustedProxies>,
    /// The most memory of the embedded store.
    pub(crate) store_memory: usize,
    /// The most records of a store in this process; `None` is the store's own limit.
    pub(crate) max_records: Option<u64>,
    pub(crate) max_store_bytes: Option<u64>,
    /// The longest time of a store command before the health of the store is checked.
    pub(crate) store_timeout: Duration,
    /// The form of the log.
    pub(crate) log_format: LogFormat,
    /// The settings of the exporter; `None` sends nothing.
    pub(crate) otlp: Option<OtlpOptions>,
    /// The share of new traces that are recorded.
    pub(crate) trace_sample_ratio: SampleRatio,
    /// The form of the access log; `None` is no log.
    pub(crate) access_log: Option<AccessLogFormat>,
    /// The number of serving threads; `None` is one per core.
    pub(crate) threads: Option<usize>,
    /// The rules for keys, if they are published.
    pub(crate) published_rules: Option<PublishedRules>,
    /// The permission of the dashboard to send requests.
    playground: Playground,
    pub(crate) store: StoreChoice,
    /// True if an embedded store must already exist.
    pub(crate) store_must_exist: bool,
    /// The service that keys belong to, if the store may have those of others.
    pub(crate) service: Option<ServiceName>,
    pub(crate) tls: Option<TlsFiles>,
    /// The keys that encrypt stored responses; `None` stores them in clear.
    pub(crate) seal: Option<SealSettings>,
    /// The secret that keys the identities of records.
    pub(crate) id_secret: Option<IdSecret>,
    /// Verifies the tokens that name callers.
    pub(crate) jwt: Option<JwtVerifier>,
    /// The place of its keys.
    jwt_keys: Option<KeySetPlace>,
    /// The configuration of requests that match no route.
    pub(crate) default: RouteConfig,
    /// The routes, in the order in which they are tried.
    pub(crate) routes: Vec<Route>,
    /// The warnings, with which the sidecar starts anyway.
    pub(crate) warnings: Vec<Problem>,
    /// The settings as they were given, for an explanation of the routes.
    pub(crate) given: Arc<GivenEntries>,
    summary: String,
    /// The settings that only a restart can change, as they were written.
    fixed: FixedValues,
}

/// The values of settings as they were written. They may contain a password, so they are shown nowhere.
#[derive(Clone, Default, PartialEq, Eq)]
struct FixedValues(Vec<(&'static str, Option<Raw>)>);

impl fmt::Debug for FixedValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FixedValues").finish_non_exhaustive()
    }
}

/// The files that TLS needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TlsFiles {
    pub(crate) cert: PathBuf,
    pub(crate) key: PathBuf,
    /// The authorities of clients; `None` asks clients for no certificate.
    pub(crate) client_ca: Option<PathBuf>,
    /// The lists of revoked certificates of clients.
    pub(crate) client_crl: Option<PathBuf>,
}

/// The configuration of one route.
#[derive(Clone, Debug)]
pub(crate) struct RouteConfig {
    /// The name of the route in metrics and traces: its pattern, or [`DEFAULT_ROUTE`](crate::admin::DEFAULT_ROUTE).
    pub(crate) label: Arc<str>,
    /// The settings of the layer.
    pub(crate) settings: Settings,
    /// The rights of pages of other origins.
    pub(crate) cors: Option<Arc<Cors>>,
    /// The longest time that the service may stay silent; `None` is no limit.
    pub(crate) upstream_timeout: Option<Duration>,
    /// The largest body of a request with a key.
    pub(crate) max_request_body: usize,
    /// The path at which the service is asked for the outcome of an abandoned attempt, or for a response that is
    /// missing in its record.
    pub(crate) reconcile_path: Option<PathAndQuery>,
    /// The path at which the service is asked before a replay if the caller may get it.
    pub(crate) authorize: Option<PathAndQuery>,
    pub(crate) authorize_timeout: Duration,
    /// The longest time for which the question is repeated.
    pub(crate) reconcile_timeout: Duration,
}

impl RouteConfig {
    /// Returns true if the service is asked for outcomes of abandoned attempts, or for responses that are missing in
    /// their records.
    pub(crate) fn asks(&self) -> bool {
        match self.settings.completed_by() {
            CompletedBy::Upstream => self.reconcile_path.is_some(),
            _ => self.settings.policy().on_abandoned() == OnAbandoned::Reconcile,
        }
    }
}

/// A route and its configuration.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    /// The methods that it matches; empty matches all.
    pub(crate) methods: Vec<Method>,
    pub(crate) pattern: PathPattern,
    pub(crate) config: RouteConfig,
}

/// The parts of a configuration that could be read, for callers that also need them if there are errors.
pub(crate) struct Draft {
    /// `None` if an error leaves the store unclear.
    pub(crate) store: Option<StoreChoice>,
    /// True if an embedded store must already exist.
    pub(crate) store_must_exist: bool,
    pub(crate) tls: Option<TlsFiles>,
    /// The settings as they were given.
    pub(crate) given: Arc<GivenEntries>,
    /// Errors and warnings.
    pub(crate) problems: Vec<Problem>,
    /// The configuration, if there is no error.
    pub(crate) config: Option<Config>,
}

impl Config {
    /// Reads flags, environment and file.
    ///
    /// # Errors
    /// All errors, not only the first.
    pub(crate) fn load(args: &ProxyArgs) -> Result<Self, Problems> {
        let Draft { config, problems, .. } = Draft::read(args, std::env::vars_os());
        config.ok_or_else(|| Problems(problems.into_iter().filter(Problem::is_error).collect()))
    }

    /// Builds the configured layer on this engine; the caller adds the observer. `settings` returns the settings of a
    /// route together with its [`Reconcile`](oncegate_http::Reconcile), which a configuration cannot hold.
    ///
    /// # Errors
    /// None for a configuration that was loaded.
    pub(crate) fn layer(
        &self,
        engine: Engine,
        settings: impl Fn(&RouteConfig) -> Settings,
    ) -> Result<IdempotencyLayer, ConfigError> {
        let layer = IdempotencyLayer::new(engine)
            .with_request_budget(self.request_budget)?
            .with_response_budget(self.response_budget)
            .with_max_in_flight(self.max_in_flight)?
            .with_max_in_flight_per_caller(self.max_in_flight_per_caller)?;
        self.routes_on(layer, settings)
    }

    /// Applies the routes to a layer without routes, which keeps its budgets.
    ///
    /// # Errors
    /// As for [`layer`](Self::layer).
    pub(crate) fn routes_on(
        &self,
        layer: IdempotencyLayer,
        settings: impl Fn(&RouteConfig) -> Settings,
    ) -> Result<IdempotencyLayer, ConfigError> {
        let layer = layer.with_settings(settings(&self.default))?;
        self.routes.iter().try_fold(layer, |layer, route| {
            let methods = (!route.methods.is_empty()).then(|| route.methods.clone());
            layer.with_route(methods, route.pattern.as_str(), settings(&route.config))
        })
    }

    /// Returns true if a route has no explicit `scope`.
    pub(crate) fn has_default_scope(&self) -> bool {
        self.route_configs().any(|route| route.settings.caller().is_default())
    }

    /// Returns true if several sidecars may share keys while the host of a request is compared.
    pub(crate) fn compares_hosts_across_sidecars(&self) -> bool {
        let compares =
            |route: &RouteConfig| route.settings.authority() == oncegate_http::AuthorityRole::Compared;
        self.service.is_some() && self.route_configs().any(compares)
    }

    /// The configurations of all routes, and of requests that match no route.
    fn route_configs(&self) -> impl Iterator<Item = &RouteConfig> {
        std::iter::once(&self.default).chain(self.routes.iter().map(|route| &route.config))
    }

    /// Returns true if the service may be asked about a request of any route.
    pub(crate) fn may_ask(&self) -> bool {
        self.route_configs().any(|route| route.authorize.is_some() || route.reconcile_path.is_some())
    }

    /// The paths at which the service is asked for outcomes, each once.
    pub(crate) fn asks_at(&self) -> Vec<&PathAndQuery> {
        let mut paths = Vec::new();
        for route in self.route_configs() {
            if let Some(path) =
                route.reconcile_path.as_ref().filter(|path| route.asks() && !paths.contains(path))
            {
                paths.push(path);
            }
        }
        paths
    }

    /// The paths at which the service is asked before replays, each once.
    pub(crate) fn authorizes_at(&self) -> Vec<&PathAndQuery> {
        let mut paths = Vec::new();
        for path in self.route_configs().filter_map(|route| route.authorize.as_ref()) {
            if !paths.contains(&path) {
                paths.push(path);
            }
        }
        paths
    }

    /// Returns true if the dashboard may send requests to the service.
    pub(crate) fn has_playground(&self) -> bool {
        match self.playground {
            Playground::Auto => self.admin.ip().to_canonical().is_loopback(),
            Playground::On => true,
            Playground::Off => false,
        }
    }

    /// The place of the keys that verify tokens.
    pub(crate) const fn jwt_keys(&self) -> Option<&KeySetPlace> {
        self.jwt_keys.as_ref()
    }

    /// Returns true if the proxy with this address may declare the origin of a request.
    pub(crate) fn trusts(&self, address: IpAddr) -> bool {
        self.trusted_proxies.iter().any(|trusted| trusted.contains(address))
    }

    /// Returns true if HTTP/2 may be used towards the service, because TLS may negotiate it.
    pub(crate) fn may_speak_http2(&self) -> bool {
        match self.upstream_protocol {
            UpstreamProtocol::Http1 => false,
            UpstreamProtocol::Http2 => true,
            UpstreamProtocol::Auto => self.to.scheme == http::uri::Scheme::HTTPS,
        }
    }

    /// The configuration of a request with this method and path (without a query). The first route that matches
    /// counts, as in the layer.
    pub(crate) fn route(&self, method: &Method, path: &str) -> &RouteConfig {
        self.route_number(method, path)
            .and_then(|number| self.routes.get(number))
            .map_or(&self.default, |route| &route.config)
    }

    /// The number of the route of a request, from 0; `None` if no route matches.
    pub(crate) fn route_number(&self, method: &Method, path: &str) -> Option<usize> {
        self.routes.iter().position(|route| {
            (route.methods.is_empty() || route.config.settings.covers(method)) && route.pattern.matches(path)
        })
    }

    /// Returns true if a route lets pages of other origins read its responses.
    pub(crate) fn has_cors(&self) -> bool {
        self.default.cors.is_some() || self.routes.iter().any(|route| route.config.cors.is_some())
    }

    /// Keeps the keys that verify tokens from an earlier configuration with the same place of keys, because they may not be
    /// available at the moment.
    pub(crate) fn keep_keys_of(&self, before: &Self) {
        if let (Some(verifier), Some(earlier)) = (&self.jwt, &before.jwt)
            && self.jwt_keys == before.jwt_keys
        {
            verifier.take_keys_of(earlier);
        }
    }

    /// Continues the counts of rate limits from an earlier configuration, so that a reload does not lift the limits. A route is
    /// the one with the same methods and the same path.
    pub(crate) fn keep_counts_of(&self, before: &Self) {
        let routes = self.routes.iter().filter_map(|route| {
            let is_same = |earlier: &&Route| {
                earlier.methods == route.methods && earlier.pattern.as_str() == route.pattern.as_str()
            };
            let earlier = before.routes.iter().find(is_same)?;
            Some((route.config.settings.rate_limits(), earlier.config.settings.rate_limits()))
        });
        let default = (self.default.settings.rate_limits(), before.default.settings.rate_limits());
        RateLimits::continue_counts(std::iter::once(default).chain(routes));
    }

    /// Returns true if the service has the same address and the same settings of connections.
    pub(crate) fn reaches_the_same_upstream(&self, other: &Self) -> bool {
        self.to == other.to
            && self.upstream_protocol == other.upstream_protocol
            && self.upstream_connect_timeout == other.upstream_connect_timeout
            && self.upstream_idle_timeout == other.upstream_idle_timeout
    }

    /// The routes under which keys that were used before may be new, with the settings that cause it. A request for each route of
    /// both configurations tells which settings apply.
    pub(crate) fn identity_changes(&self, before: &Self) -> Vec<String> {
        let routes = self.routes.iter().chain(&before.routes).map(|route| route.pattern.as_str());
        let mut changes: Vec<_> = routes
            .flat_map(|pattern| {
                let path = crate::rules::openapi::example(pattern);
                let methods = [Method::POST, Method::PUT, Method::PATCH, Method::DELETE];
                methods.into_iter().filter_map(move |method| {
                    let (now, then) = (self.route(&method, &path), before.route(&method, &path));
                    let is_kept = then.settings.covers(&method);
                    let names = now.settings.identity_changes(&then.settings);
                    (is_kept && !names.is_empty())
                        .then(|| format!("{method} {pattern}: {}", names.join(", ")))
                })
            })
            .collect();
        let names = self.default.settings.identity_changes(&before.default.settings);
        if !names.is_empty() {
            changes.push(format!("requests that match no route: {}", names.join(", ")));
        }
        changes.sort_unstable();
        changes.dedup();
        changes
    }

    /// The settings that differ from those of another configuration and that only a restart can change.
    pub(crate) fn fixed_changes(&self, other: &Self) -> Vec<&'static str> {
        let pairs = self.fixed.0.iter().zip(&other.fixed.0);
        let mut names: Vec<_> =
            pairs.filter(|(one, other)| one != other).map(|((name, _), _)| *name).collect();
        if self.tls.is_some() != other.tls.is_some() {
            names.push("tls-cert");
        }
        if self.seal.is_some() != other.seal.is_some() {
            names.push("seal-keys-file");
        }
        if self.id_secret != other.id_secret && !names.contains(&"id-secret-file") {
            names.push("id-secret-file");
        }
        names
    }

    /// A summary for logs: one line, without secrets, with only the settings that are given.
    pub(crate) fn safe_summary(&self) -> &str {
        &self.summary
    }
}

/// The name under which `oncegate init` writes a configuration. It is read only if it is given.
const USUAL_FILE: &str = "oncegate.toml";

impl Draft {
    /// Reads all settings, and collects all errors and warnings.
    pub(crate) fn read(args: &ProxyArgs, env: impl IntoIterator<Item = (OsString, OsString)>) -> Self {
        let mut problems = Vec::new();
        let variables: Vec<_> = env.into_iter().collect();
        let mut ignored = Vec::new();
        let from_standard = standard_env::read(&variables, &mut ignored);
        let from_env = env::read(variables, &mut problems, &mut ignored);
        let from_flags: Vec<_> = args.entries().collect();
        let path = config_path(&from_env, &from_flags);
        let is_file_unread = path.is_none() && Path::new(USUAL_FILE).is_file();
        let content = match &path {
            None => Some(FileContent::default()),
            Some((path, source)) => read_file(path, source, &mut problems),
        };
        let whole = content.is_some();
        let content = content.unwrap_or_default();
        let mut values = Values::defaults();
        // Each layer overrides the ones before it.
        let layers = [&from_standard[..], &content.entries, &from_env, &from_flags];
        if is_file_unread {
            let is_needed = !layers.iter().copied().flatten().any(|entry| entry.setting.name == "to");
            let what = format!("./{USUAL_FILE} is not read: to use it, give --config {USUAL_FILE}");
            match is_needed {
                true => problems.push(Problem::error(None, what)),
                false => ignored.push(Problem::warning(None, what)),
            }
        }
        for entries in layers {
            apply(entries, &mut values, &mut problems);
        }
        problems.extend(layers.iter().copied().flatten().filter_map(advice::on_readable_password));
        paths::make_absolute(&mut values, path.as_ref().map(|(path, _)| path.as_path()), &mut problems);
        let mut draft = assemble::draft(&values, &content.routes, whole, problems);
        if let Some(config) = &mut draft.config {
            config.warnings.extend(ignored.iter().cloned());
            config.summary = summary(&layers, &values, config.routes.len());
            config.fixed = fixed(&layers);
            if values.published_rules.as_ref().is_some_and(|given| given.value) {
                config.published_rules = Some(PublishedRules::of(config));
            }
        }
        draft.problems.extend(ignored);
        let FileContent { entries, routes } = content;
        draft.given = Arc::new(GivenEntries {
            service: from_standard.into_iter().chain(entries).chain(from_env).chain(from_flags).collect(),
            routes: routes.into_iter().map(|route| route.entries).collect(),
        });
        if let Some(config) = &mut draft.config {
            config.given = draft.given.clone();
        }
        draft
    }
}

/// The effective value, as it was written, of each setting that only a restart can change.
fn fixed(layers: &[&[Entry]; 4]) -> FixedValues {
    let in_force = |setting: &Setting| {
        let mut entries = layers
            .iter()
            .rev()
            .filter_map(|entries| entries.iter().rev().find(|entry| entry.setting.name == setting.name));
        entries.next().map(|entry| entry.raw.clone())
    };
    let fixed = SETTINGS.iter().filter(|setting| setting.settable_in == SettableIn::Service);
    FixedValues(fixed.map(|setting| (setting.name, in_force(setting))).collect())
}

/// The settings that are given and effective, each with its source.
fn summary(layers: &[&[Entry]; 4], values: &Values, routes: usize) -> String {
    let mut words = Vec::new();
    for setting in SETTINGS.iter().filter(|setting| setting.settable_in != SettableIn::Secret) {
        let entries = layers.iter().rev().flat_map(|entries| entries.iter());
        let effective = entries.filter(|entry| entry.setting.name == setting.name).find(|entry| {
            setting.settable_in == SettableIn::Start || values.source(setting.name) == Some(&entry.source)
        });
        if let Some(Entry { raw, source, .. }) = effective {
            let text = match raw {
                // The URL of a store may contain a password. A directory is shown with its whole path.
                Raw::Text(text) if setting.name == "store" => match &values.store {
                    Some(Sourced { value: StoreChoice::Directory(path), .. }) => path.display().to_string(),
                    _ => units::safe_url(text),
                },
                raw => match units::shown_value(setting, raw) {
                    Raw::Text(text) => text,
                    Raw::List(texts) => texts.join(","),
                },
            };
            let text = if setting.name == "store" { units::without_login(&text) } else { text };
            let place = match source {
                Source::File(place) => format!("{}:{}", place.file, place.line),
                other => other.to_string(),
            };
            words.push(format!("{}={text} ({place})", setting.name));
        }
    }
    if routes > 0 {
        words.push(format!("routes={routes}"));
    }
    words.join(" ")
}

fn config_path(env: &[Entry], flags: &[Entry]) -> Option<(PathBuf, Source)> {
    let last = |entries: &[Entry]| {
        let entry = entries.iter().rev().find(|entry| entry.setting.name == "config")?;
        match &entry.raw {
            Raw::Text(path) => Some((path.into(), entry.source.clone())),
            Raw::List(_) => None,
        }
    };
    last(flags).or_else(|| last(env))
}

/// The largest configuration file. A larger file is some other file.
const MAX_FILE: u64 = 1024 * 1024;

fn read_file(path: &Path, source: &Source, problems: &mut Vec<Problem>) -> Option<FileContent> {
    let error = |what: String| Problem::error(source.clone(), format!("{}: {what}", path.display()));
    match files::read(path, MAX_FILE).map_err(|error| error.to_string()).map(String::from_utf8) {
        Ok(Ok(text)) => file::read(&path.display().to_string(), &text, problems),
        Ok(Err(_)) => {
            problems.push(error("is not a UTF-8 text".to_owned()));
            None
        }
        Err(what) => {
            problems.push(error(what));
            None
        }
    }
}

/// The errors in the values of a file, without those in how its settings fit together.
#[cfg(test)]
pub(crate) fn errors_in_values(text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let content = file::read("oncegate.toml", text, &mut problems).unwrap_or_default();
    let routes = content.routes.iter().map(|route| &route.entries);
    for entries in [&content.entries].into_iter().chain(routes) {
        apply(entries, &mut Values::default(), &mut problems);
    }
    problems.iter().map(ToString::to_string).collect()
}

fn apply(entries: &[Entry], values: &mut Values, problems: &mut Vec<Problem>) {
    for entry in entries {
        if let Err(errors) = (entry.setting.set)(values, &entry.raw, &entry.source) {
            let safe = |error| units::without_logins(entry.setting, &entry.raw, error);
            problems
                .extend(errors.into_iter().map(|error| Problem::error(entry.source.clone(), safe(error))));
        }
    }
}
