//! The Tower layer, which chooses the settings that a request runs under.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::Method;
use http::header::HeaderName;
use http::request::Parts;
use oncegate_core::{IdempotencyKey, RecordId, Scope};
use oncegate_engine::{ConfigError, Engine, LogThrottle};
use tokio::sync::Semaphore;
use tower_layer::Layer;

use crate::budget::Budget;
use crate::canonical;
use crate::credential;
use crate::event::RequestObserver;
use crate::in_flight::InFlight;
use crate::mcp::Sessions;
use crate::method;
use crate::path::PathPattern;
use crate::scope::{CallerDoubt, NoCaller};
use crate::service::Idempotency;
use crate::settings::{AuthorityRole, Settings};
use crate::shadow::ShadowLimits;

/// The default memory for request bodies: 128 bodies of the largest default size, which a small machine can spare.
const REQUEST_BUDGET: usize = 256 * 1024 * 1024;

/// The default memory for response bodies: 256 bodies of the largest size that is stored by default.
const RESPONSE_BUDGET: usize = 256 * 1024 * 1024;

/// The default limit of requests with a key in flight. Each may hold a connection to the service and a response.
const MAX_IN_FLIGHT: usize = 2048;

/// The default limit for one caller: half of all, so that one caller does not keep out all others.
const MAX_IN_FLIGHT_PER_CALLER: usize = 1024;

/// Each refused request is a client that does not work, but one log line per minute is enough to tell an operator why.
const SCOPE_WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// Makes retries safe. See the [crate] for what it does exactly.
#[derive(Clone)]
pub struct IdempotencyLayer {
    shared: Arc<Shared>,
}

#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) engine: Engine,
    pub(crate) observer: Arc<dyn RequestObserver>,
    pub(crate) request_budget: Arc<Budget>,
    pub(crate) response_budget: Arc<Budget>,
    pub(crate) in_flight: Arc<InFlight>,
    /// The sessions of running calls of tools.
    pub(crate) sessions: Sessions,
    /// Limits the comparisons of large bodies that run at the same time to the number of cores, so that small bodies
    /// do not wait.
    pub(crate) comparisons: Arc<Semaphore>,
    scope_warnings: Arc<LogThrottle>,
    default: Arc<Settings>,
    routes: Vec<Route>,
    /// The engine and the limits of requests that are only observed.
    pub(crate) shadow: ShadowLimits,
}

/// The use of a layer's limits at one moment, over all its copies. Made by [`IdempotencyLayer::limit_usage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LimitUsage {
    /// Requests with a key in flight.
    pub in_flight: usize,
    /// Their limit: [`IdempotencyLayer::with_max_in_flight`].
    pub max_in_flight: usize,
    /// Bytes that the bodies of requests with a key hold.
    pub request_bytes: usize,
    /// The limit of these bytes: [`IdempotencyLayer::with_request_budget`].
    pub request_budget: usize,
    /// Bytes that the bodies of responses to requests with a key hold. They may exceed the budget, because the response of
    /// an operation that took place is always sent.
    pub response_bytes: usize,
    /// The budget for them: [`IdempotencyLayer::with_response_budget`].
    pub response_budget: usize,
}

#[derive(Clone)]
struct Route {
    /// `None`: all methods.
    methods: Option<Vec<Method>>,
    pattern: PathPattern,
    settings: Arc<Settings>,
}

impl IdempotencyLayer {
    /// A layer with the profile `ietf`: covers POST and PATCH, accepts requests without an `Idempotency-Key`, tells callers
    /// apart by `Authorization`, and refuses requests that carry another credential instead (see
    /// [`CallerScope`](crate::CallerScope)). Keys belong to the service of the
    /// [engine](oncegate_engine::EngineBuilder::with_service).
    #[must_use]
    pub fn new(engine: Engine) -> Self {
        let shared = Shared {
            engine,
            observer: Arc::new(()),
            request_budget: Budget::new(REQUEST_BUDGET),
            response_budget: Budget::new(RESPONSE_BUDGET),
            in_flight: Arc::new(InFlight::new(MAX_IN_FLIGHT, MAX_IN_FLIGHT_PER_CALLER)),
            sessions: Sessions::default(),
            comparisons: Arc::new(Semaphore::new(cores())),
            scope_warnings: Arc::new(LogThrottle::new(SCOPE_WARNING_INTERVAL)),
            default: Arc::new(Settings::default()),
            routes: Vec::new(),
            shadow: ShadowLimits::new(
                Budget::new(REQUEST_BUDGET),
                InFlight::new(MAX_IN_FLIGHT, MAX_IN_FLIGHT_PER_CALLER),
            ),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Sets the settings of all routes that have no settings of their own.
    ///
    /// # Errors
    /// If the settings contradict each other, or the store does not support them.
    pub fn with_settings(self, settings: Settings) -> Result<Self, ConfigError> {
        settings.check(&self.shared.engine.store().capabilities())?;
        settings.caller().check_pattern(None)?;
        Ok(self.change(|shared| shared.default = Arc::new(settings)))
    }

    /// Sets the settings of the routes that the pattern matches, such as `/payments/{id}` or `/v1/{*rest}`.
    ///
    /// The first route that matches counts. With `methods`, the route matches only these, and covers them. With `None`,
    /// it matches all, and the settings define the methods that are covered. Methods are compared without regard to
    /// case. Other spellings of a path match, too: see [`Settings::with_trailing_slash`] and [`Settings::with_path_case`].
    ///
    /// # Errors
    /// If the list of methods is empty, the pattern is malformed or lacks a parameter that identifies callers, the settings
    /// contradict each other, or the store does not support them.
    pub fn with_route(
        self,
        methods: Option<Vec<Method>>,
        pattern: &str,
        settings: Settings,
    ) -> Result<Self, ConfigError> {
        let settings = match &methods {
            Some(methods) if methods.is_empty() => {
                return Err(ConfigError::new(format!(
                    "the route {pattern} has an empty list of methods, so no request would match: use None for all methods"
                )));
            }
            Some(methods) => settings.with_methods(methods.clone())?,
            None => settings,
        };
        settings.check(&self.shared.engine.store().capabilities())?;
        let pattern = PathPattern::new(pattern)?.with_spelling(settings.trailing_slash, settings.path_case);
        settings.caller().check_pattern(Some(&pattern))?;
        let settings = Arc::new(settings.at(pattern.clone()));
        let route = Route { methods, pattern, settings };
        Ok(self.change(|shared| shared.routes.push(route)))
    }

    /// The same layer without its routes and with the default settings. It shares the engine, the observer and the budgets
    /// with the layer that it was cloned from. For programs that reload their configuration.
    #[must_use]
    pub fn without_routes(self) -> Self {
        self.change(|shared| {
            shared.routes.clear();
            shared.default = Arc::new(Settings::default());
        })
    }

    /// Sets the observer, which is called with the outcome of each request.
    #[must_use]
    pub fn with_observer(self, observer: impl RequestObserver) -> Self {
        self.change(|shared| shared.observer = Arc::new(observer))
    }

    /// Limits the memory for the bodies of all requests with a key, in bytes.
    ///
    /// The limit covers all routes and all copies of the layer. A body counts from its arrival until the handler has
    /// taken it. A body that does not fit is refused with a 503, and nothing is claimed. The default is 256 MiB. It
    /// should be several times [`Settings::with_max_request_body`]: a body that is larger than the whole budget is
    /// always refused.
    ///
    /// # Errors
    /// If it is 0, because then every request with a body would be refused.
    pub fn with_request_budget(self, bytes: usize) -> Result<Self, ConfigError> {
        check_max("request_budget", bytes)?;
        Ok(self.change(|shared| {
            shared.request_budget = Budget::new(bytes);
            shared.shadow.request_budget = Budget::new(bytes);
        }))
    }

    /// Limits the memory for the bodies of responses to requests with a key, in bytes.
    ///
    /// The limit covers all routes and all copies of the layer. A body counts until the client has taken it. A replay
    /// that does not fit is refused with a 503. The response of an operation that took place is always sent; while
    /// the budget is used up, no other request is executed. The default is 256 MiB.
    #[must_use]
    pub fn with_response_budget(self, bytes: usize) -> Self {
        self.change(|shared| shared.response_budget = Budget::new(bytes))
    }

    /// Limits the requests with a key that are in flight at the same time.
    ///
    /// The limit covers all routes and all copies of the layer. A request counts from before its claim until its
    /// handler has ended, even if the client hangs up. Further requests are refused with a 503, and nothing is
    /// claimed. The default is 2048.
    ///
    /// # Errors
    /// If it is 0, because then every request would be refused.
    pub fn with_max_in_flight(self, max: usize) -> Result<Self, ConfigError> {
        check_max("max_in_flight", max)?;
        Ok(self.change(|shared| {
            for in_flight in [&mut shared.in_flight, &mut shared.shadow.in_flight] {
                *in_flight = Arc::new(InFlight::clone(in_flight).with_max(max));
            }
        }))
    }

    /// Limits the requests with a key of one caller that are in flight at the same time.
    ///
    /// All requests without a credential count as one caller. The limit has no effect if there is [only one
    /// caller](crate::CallerScope::single_tenant). The default is 1024.
    ///
    /// # Errors
    /// If it is 0, because then every request would be refused.
    pub fn with_max_in_flight_per_caller(self, max: usize) -> Result<Self, ConfigError> {
        check_max("max_in_flight_per_caller", max)?;
        Ok(self.change(|shared| {
            for in_flight in [&mut shared.in_flight, &mut shared.shadow.in_flight] {
                *in_flight = Arc::new(InFlight::clone(in_flight).with_max_per_caller(max));
            }
        }))
    }

    /// The settings that a request with this method and path (without a query) runs under.
    #[must_use]
    pub fn settings(&self, method: &Method, path: &str) -> &Settings {
        self.shared.settings(method, path)
    }

    /// The identifier of the record that the layer uses for a request with this head and key. `None` if the request does not
    /// identify its caller.
    #[must_use]
    pub fn record_id(&self, request: &Parts, key: &IdempotencyKey) -> Option<RecordId> {
        let settings = self.settings(&request.method, request.uri.path());
        let scope = self.shared.scope(settings, request).ok()?;
        Some(canonical::locate(settings, self.shared.engine.ids(), &scope, request, key, None).0)
    }

    /// Returns the current use of the limits, over this layer and all its copies. For gauges.
    #[must_use]
    pub fn limit_usage(&self) -> LimitUsage {
        let Shared { in_flight, request_budget, response_budget, .. } = &*self.shared;
        LimitUsage {
            in_flight: in_flight.now(),
            max_in_flight: in_flight.max(),
            request_bytes: request_budget.used(),
            request_budget: request_budget.limit(),
            response_bytes: response_budget.used(),
            response_budget: response_budget.limit(),
        }
    }

    /// A copy that shares the engine, the observer and the limits with this one, but no reference count. For programs with a
    /// runtime per core: there, all cores would contend for that count with every request.
    #[must_use]
    pub fn copy_for_core(&self) -> Self {
        let mut shared = Shared::clone(&self.shared);
        shared.request_budget = shared.request_budget.apart();
        shared.response_budget = shared.response_budget.apart();
        shared.in_flight = Arc::new(InFlight::clone(&shared.in_flight));
        shared.shadow = shared.shadow.apart();
        Self { shared: Arc::new(shared) }
    }

    fn change(self, change: impl FnOnce(&mut Shared)) -> Self {
        let mut shared = Arc::unwrap_or_clone(self.shared);
        change(&mut shared);
        shared.shadow.forget_layer();
        Self { shared: Arc::new(shared) }
    }
}

fn check_max(name: &str, max: usize) -> Result<(), ConfigError> {
    if max == 0 {
        return Err(ConfigError::new(format!(
            "{name} is 0, so every request would be refused; choose at least 1"
        )));
    }
    Ok(())
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get)
}

impl Shared {
    /// The settings of the first route that matches, or the default ones.
    pub(crate) fn settings(&self, method: &Method, path: &str) -> &Arc<Settings> {
        let route = self.routes.iter().find(|route| {
            route.methods.as_ref().is_none_or(|methods| method::contains(methods, method))
                && route.pattern.matches(path)
        });
        route.map_or(&self.default, |route| &route.settings)
    }

    /// The scope of a request under these settings, within the service of the engine.
    pub(crate) fn scope(&self, settings: &Settings, request: &Parts) -> Result<Scope<'static>, NoCaller> {
        let authority = (settings.authority() == AuthorityRole::Scope).then(|| canonical::authority(request));
        let (caller, key_headers) = (settings.caller(), &settings.profile.key_headers);
        let scope = caller.of(request, authority.as_deref(), key_headers, settings.pattern())?;
        Ok(self.engine.service_scope(scope))
    }

    /// The same layer with the engine and the limits of requests that are only observed. It has no routes.
    pub(crate) fn in_shadow(&self) -> &Arc<Self> {
        self.shadow.layer(|limits, engine| Self {
            engine: engine.get_or_init(|| self.engine.apart()).clone(),
            request_budget: limits.request_budget.clone(),
            in_flight: limits.in_flight.clone(),
            routes: Vec::new(),
            shadow: limits.apart(),
            ..self.clone()
        })
    }

    /// Logs, at most once a minute, that requests are refused because it is not configured how callers are told apart.
    pub(crate) fn warn_of_missing_scope(&self, credential: &HeaderName, doubt: CallerDoubt) {
        let Some(suppressed) = self.scope_warnings.pass() else { return };
        let meant = match credential.as_str() {
            "authorization" => {
                "required-header:NAME, with a field whose value is the same in a retry".to_owned()
            }
            "cookie" => "required-cookie:NAME, with the name of the session's cookie".to_owned(),
            name if credential::changes_each_time(name) => format!(
                "required-header:NAME, with a field whose value is the same in a retry, which {name} is not"
            ),
            name => format!("required-header:{name}"),
        };
        tracing::warn!(
            suppressed,
            "requests with {} are refused, because `scope` (Settings::with_caller) is not set: set it, for example, to {meant}; \
             or set it to header:authorization if that field alone tells callers apart, and callers without it may get each \
             other's responses",
            doubt.describe(credential)
        );
    }
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = Idempotency<S>;

    fn layer(&self, inner: S) -> Idempotency<S> {
        Idempotency::new(self.shared.clone(), inner)
    }
}

impl fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer")
            .field("engine", &self.shared.engine)
            .field("settings", &self.shared.default)
            .field("routes", &self.shared.routes.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use oncegate_core::{MemoryStore, ServiceName};
    use oncegate_testkit::ManualClock;

    use super::*;
    use crate::profile::KeyScope;
    use crate::scope::CallerScope;

    fn engine(service: Option<&str>) -> Engine {
        let builder =
            Engine::builder(MemoryStore::new(ManualClock::at_millis(1))).with_purge_interval(None).unwrap();
        match service {
            Some(name) => builder.with_service(ServiceName::new(name).unwrap()).build(),
            None => builder.build(),
        }
    }

    #[test]
    fn a_record_belongs_to_a_service_a_caller_and_an_endpoint_or_host_if_configured() {
        let id_in = |service, settings: &Settings, target: &str, fields: &[(&str, &str)]| {
            let mut request = http::Request::post(target);
            for (name, value) in fields {
                request = request.header(*name, *value);
            }
            let (parts, ()) = request.body(()).unwrap().into_parts();
            let layer = IdempotencyLayer::new(engine(service)).with_settings(settings.clone()).unwrap();
            layer.record_id(&parts, &IdempotencyKey::new(*b"k").unwrap())
        };
        let id = |settings: &Settings, target: &str, fields: &[(&str, &str)]| {
            id_in(None, settings, target, fields)
        };
        let (u, v) = (&[("authorization", "u")][..], &[("authorization", "v")][..]);
        let (by_endpoint, by_caller) =
            (Settings::default(), Settings::default().with_key_scope(KeyScope::Caller));
        assert_eq!(id(&by_endpoint, "/a?x=1", u), id(&by_endpoint, "/a?x=2", u));
        assert_ne!(id(&by_endpoint, "/a", u), id(&by_endpoint, "/b", u));
        assert_ne!(id(&by_endpoint, "/a", u), id(&by_endpoint, "/a", v));
        assert_ne!(id(&by_endpoint, "/a", u), id(&by_endpoint, "/a", &[]));
        assert_eq!(id(&by_caller, "/a", u), id(&by_caller, "/b", u));
        let required = CallerScope::required_header(HeaderName::from_static("authorization"));
        assert_eq!(id(&Settings::default().with_caller(required), "/a", &[]), None);
        assert_eq!(id(&by_endpoint, "/a", &[("cookie", "sid=1")]), None);

        let host = |host| [("authorization", "u"), ("host", host)];
        let (a, b, a_again) = (host("a.test"), host("b.test"), host("A.TEST:443"));
        assert_eq!(id(&by_endpoint, "/a", &a), id(&by_endpoint, "/a", &b));
        let by_host = Settings::default().with_authority(AuthorityRole::Scope);
        assert_ne!(id(&by_host, "/a", &a), id(&by_host, "/a", &b));
        assert_eq!(id(&by_host, "/a", &a), id(&by_host, "/a", &a_again));

        let services = [None, Some("orders"), Some("stock")].map(|name| id_in(name, &by_endpoint, "/a", u));
        assert!(services[0] != services[1] && services[0] != services[2] && services[1] != services[2]);
    }
}
