//! The rules as data, and the descriptor at `/.well-known/idempotency`.

use std::fmt::Write as _;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method, StatusCode};
use oncegate_core::{OnAbandoned, limits};
use oncegate_http::{
    CallerPart, CallerScope, CompletedBy, Condition, KeySyntax, Profile, RefusalRow, Settings, ToolPolicy,
};
use serde_json::{Value, json};

use super::recipe::KeyRecipe;
use super::refusals;
use crate::config::{Config, RouteConfig};

/// The version of the descriptor's format.
const VERSION: u32 = 1;

/// The rules of all operations.
pub(super) struct Rules {
    pub(super) operations: Vec<Operation>,
}

/// The rules of the operations of one route, or of those without a route.
pub(super) struct Operation {
    /// The pattern of the path; `None` for all other paths.
    pub(super) path: Option<String>,
    /// The methods, sorted.
    pub(super) methods: Vec<String>,
    /// A request to which these rules apply.
    pub(super) example: Example,
    pub(super) carriers: Vec<Carrier>,
    pub(super) is_required: bool,
    pub(super) syntax: KeySyntax,
    pub(super) format: String,
    /// The way to make a key.
    pub(super) recipe: KeyRecipe,
    pub(super) first_sent: Option<FirstSent>,
    pub(super) callers: Vec<CallerRule>,
    /// True if the callers are told apart by `Authorization` only because nothing else is configured.
    pub(super) has_default_callers: bool,
    pub(super) is_per_endpoint: bool,
    /// The header fields whose values are a part of the scope of keys, too.
    pub(super) scope_headers: Vec<String>,
    pub(super) retention: Duration,
    pub(super) wait: Duration,
    pub(super) on_abandoned: OnAbandoned,
    /// True if the service completes records in its own transactions.
    pub(super) completes_itself: bool,
    /// True if requests are executed without protection while the store is out of reach.
    pub(super) fails_open: bool,
    /// True if requests are only observed, and executed without protection.
    pub(super) is_shadow: bool,
    /// The header field that marks a replay, and its value.
    pub(super) replay_marker: (String, String),
    /// The members of responses that replays have as `null`.
    pub(super) redacted: Vec<String>,
    pub(super) keeps_server_errors: bool,
    pub(super) released: Vec<String>,
    pub(super) compares: String,
    /// True if only calls of tools in the Model Context Protocol are operations.
    pub(super) speaks_mcp: bool,
    /// True if a request with a key is refused if its method is not covered.
    pub(super) refuses_other_methods: bool,
    pub(super) refusals: Vec<RefusalRule>,
    /// The media type of refusals.
    pub(super) media_type: String,
    /// The tools without an effect, and those whose keys are built from the intent of a call.
    pub(super) read_only_tools: Vec<String>,
    pub(super) intent_tools: Vec<String>,
    /// The members that may name the run of an agent.
    pub(super) run_members: Vec<String>,
    /// The header field of refusals that says if a retry can succeed.
    pub(super) retryable_header: Option<String>,
    pub(super) documentation: Option<String>,
}

/// A method and a path.
pub(super) struct Example {
    pub(super) method: String,
    pub(super) path: String,
}

/// The header field with the time at which a request was sent first.
pub(super) struct FirstSent {
    pub(super) header: String,
    /// The age from which on a request is refused.
    pub(super) max_age: Duration,
}

/// A part of a request that tells callers apart.
pub(super) struct CallerRule {
    pub(super) kind: CallerKind,
    /// The name of the field, the cookie, the parameter or the claim.
    pub(super) name: String,
    pub(super) is_required: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum CallerKind {
    Header,
    Cookie,
    Path,
    Host,
    Certificate,
    Token,
}

/// A place that carries the key.
pub(super) enum Carrier {
    Header(String),
    Query(String),
    /// A member of the JSON body, by its pointer.
    Member(String),
    /// The members of the JSON body from which the key is built.
    Built(Vec<String>),
}

pub(super) struct RefusalRule {
    /// The type of the problem.
    pub(super) kind: String,
    pub(super) condition: Condition,
    pub(super) status: u16,
    pub(super) code: Option<String>,
}

impl Rules {
    pub(super) fn of(config: &Config) -> Self {
        let routes = config.routes.iter().enumerate().map(|(number, route)| {
            let methods = if route.methods.is_empty() {
                route.config.settings.profile().methods().to_vec()
            } else {
                route.methods.clone()
            };
            let example = example(config, Some(number), &methods);
            Operation::of(Some(route.pattern.as_str()), methods, example, &route.config)
        });
        let methods = config.default.settings.profile().methods().to_vec();
        let example = example(config, None, &methods);
        let others = Operation::of(None, methods, example, &config.default);
        Self { operations: routes.chain([others]).collect() }
    }

    /// The descriptor.
    pub(super) fn json(&self) -> Value {
        json!({ "version": VERSION, "operations": self.operations.iter().map(Operation::json).collect::<Vec<_>>() })
    }
}

/// A request to this route, or to none. If a method can create something, it does: that is when keys matter most.
fn example(config: &Config, route: Option<usize>, methods: &[Method]) -> Example {
    let usual = [Method::POST, Method::PUT, Method::PATCH, Method::DELETE];
    let method = usual.iter().find(|method| methods.contains(method)).or(methods.first());
    let method = method.unwrap_or(&Method::POST);
    let pattern =
        route.and_then(|number| config.routes.get(number)).map_or("/{*rest}", |route| route.pattern.as_str());
    let paths = ["orders", "payments", "items", "123", "a1b2c3"].map(|value| filled(pattern, value));
    // An earlier route may match some values of the parameters.
    let path = paths.iter().find(|path| config.route_number(method, path) == route).or(paths.first());
    Example { method: method.to_string(), path: path.cloned().unwrap_or_default() }
}

/// The path with values instead of its parameters: a number, and `rest` for all that follows.
fn filled(pattern: &str, rest: &str) -> String {
    let mut path = String::new();
    let mut left = pattern;
    while let Some((before, after)) = left.split_once('{') {
        path.push_str(before);
        path.push_str(if after.starts_with('*') { rest } else { "123" });
        left = after.split_once('}').map_or("", |(_, left)| left);
    }
    path + left
}

/// The statuses of responses that free the key; a whole class by its name.
fn released(settings: &Settings) -> Vec<String> {
    let is_upstream = settings.completed_by() == CompletedBy::Upstream;
    let frees = |code: &u16| {
        StatusCode::from_u16(*code).is_ok_and(|status| {
            settings.profile().frees_key(status) || is_upstream && status.is_server_error()
        })
    };
    let mut texts = Vec::new();
    for class in [4_u16, 5] {
        let codes = class * 100..class * 100 + 100;
        let freed: Vec<_> = codes.clone().filter(frees).collect();
        match freed.len() == codes.len() {
            true => texts.push(format!("{class}xx")),
            false => texts.extend(freed.iter().map(u16::to_string)),
        }
    }
    texts
}

fn callers(scope: &CallerScope) -> Vec<CallerRule> {
    let rule = |part: CallerPart<'_>| {
        let (kind, name) = match part {
            CallerPart::Header(name) => (CallerKind::Header, usual_case(name.as_str())),
            CallerPart::Cookie(name) => (CallerKind::Cookie, name.to_owned()),
            CallerPart::Path(name) => (CallerKind::Path, name.to_owned()),
            CallerPart::Host => (CallerKind::Host, String::new()),
            CallerPart::Certificate(name) => (CallerKind::Certificate, name.as_str().to_owned()),
            CallerPart::Jwt(claim) => (CallerKind::Token, claim.to_owned()),
            // The sidecar has no such scope.
            _ => return None,
        };
        Some(CallerRule { kind, name, is_required: scope.requires(part) })
    };
    scope.parts().filter_map(rule).collect()
}

/// The name of a header field as people write it.
fn usual_case(name: &str) -> String {
    let words = name.split('-').map(|word| {
        let (first, rest) = word.split_at(word.len().min(1));
        first.to_ascii_uppercase() + rest
    });
    words.collect::<Vec<_>>().join("-")
}

impl Operation {
    fn of(path: Option<&str>, methods: Vec<Method>, example: Example, route: &RouteConfig) -> Self {
        let settings = &route.settings;
        let profile = settings.profile();
        let rows = profile.rows();
        let row = |key: &str| {
            rows.iter().find(|(own, _)| *own == key).map_or_else(String::new, |(_, value)| value.clone())
        };
        let names = |key: &str| -> Vec<_> {
            row(key).split(", ").filter(|name| !name.is_empty()).map(str::to_owned).collect()
        };
        let carriers = match settings.natural_key() {
            Some(key) => vec![Carrier::Built(key.members().iter().map(ToString::to_string).collect())],
            None => {
                let headers = profile.key_headers().into_iter().map(Carrier::Header);
                let query = profile.key_query().iter().cloned().map(Carrier::Query);
                let members =
                    profile.key_members().into_iter().map(|pointer| Carrier::Member(pointer.to_string()));
                headers.chain(query).chain(members).collect()
            }
        };
        let mut methods: Vec<_> = methods.iter().map(|method| method.as_str().to_owned()).collect();
        methods.sort_unstable();
        let completes_itself = settings.completed_by() == CompletedBy::Upstream;
        let first_sent = profile.first_sent_header().zip(settings.max_request_age());
        Self {
            path: path.map(str::to_owned),
            methods,
            example,
            is_required: profile.requires_key(),
            syntax: settings.key_grammar().syntax(),
            format: row("key-format"),
            recipe: if settings.natural_key().is_some() {
                KeyRecipe::None
            } else {
                KeyRecipe::of(settings.key_grammar())
            },
            first_sent: first_sent.map(|(header, max_age)| FirstSent { header, max_age }),
            callers: callers(settings.caller()),
            has_default_callers: settings.caller().is_default(),
            is_per_endpoint: row("key-scope") == "endpoint",
            scope_headers: names("key-scope-header"),
            retention: settings.policy().retention(),
            wait: settings.policy().wait(),
            on_abandoned: settings.policy().on_abandoned(),
            completes_itself,
            fails_open: settings.fails_open(),
            is_shadow: settings.is_shadow(),
            replay_marker: profile.replay_marker(),
            redacted: settings.redacted_members().map(|member| member.as_str().to_owned()).collect(),
            keeps_server_errors: settings.keeps_server_errors(),
            released: released(settings),
            compares: row("fingerprint.body"),
            speaks_mcp: row("protocol") == "mcp",
            read_only_tools: settings.tools().patterns(ToolPolicy::ReadOnly).collect(),
            intent_tools: settings.tools().patterns(ToolPolicy::ByIntent).collect(),
            run_members: names("run-member"),
            refuses_other_methods: row("uncovered-methods") == "refuse"
                && carriers.iter().any(|carrier| matches!(carrier, Carrier::Header(_))),
            media_type: row("refusal.media-type"),
            retryable_header: profile.retryable_header(),
            refusals: refusals::of(route)
                .into_iter()
                .map(|refusal| RefusalRule::of(profile, refusal))
                .collect(),
            carriers,
            documentation: settings.documentation().map(str::to_owned),
        }
    }

    /// The rules of a request; `None` if a key does not protect it.
    pub(super) fn of_request(config: &Config, method: &Method, path: &str) -> Option<Self> {
        let route = config.route(method, path);
        let example = || Example { method: method.to_string(), path: path.to_owned() };
        route.settings.covers(method).then(|| Self::of(Some(path), vec![method.clone()], example(), route))
    }

    pub(super) fn json(&self) -> Value {
        let carriers: Vec<_> = self.carriers.iter().map(Carrier::json).collect();
        let callers: Vec<_> = self.callers.iter().map(CallerRule::json).collect();
        let refusals: Vec<_> = self.refusals.iter().map(RefusalRule::json).collect();
        json!({
            "path": self.path,
            "methods": self.methods,
            "protocol": if self.speaks_mcp { "mcp" } else { "http" },
            "tools": self.speaks_mcp.then(|| {
                json!({"readOnly": self.read_only_tools, "byIntent": self.intent_tools, "runIn": self.run_members})
            }),
            "key": {
                "required": self.is_required,
                "in": carriers,
                "syntax": match self.syntax {
                    KeySyntax::Strict => "strict",
                    KeySyntax::Raw => "raw",
                    _ => "lenient",
                },
                "format": self.format,
                "maxLength": limits::MAX_KEY_BYTES,
                "firstSent": self.first_sent.as_ref().map(|first| {
                    json!({"header": first.header, "maxAgeSeconds": first.max_age.as_secs()})
                }),
                "scopeHeaders": self.scope_headers,
                "uniqueWithin": if self.is_per_endpoint { "caller, method and path" } else { "caller" },
            },
            "callers": callers,
            "retentionSeconds": self.retention.as_secs(),
            "waitMilliseconds": u64::try_from(self.wait.as_millis()).unwrap_or(u64::MAX),
            "replayMarker": self.replay_marker.0,
            "redactedMembers": self.redacted,
            "afterCrash": match self.on_abandoned {
                OnAbandoned::Reexecute => "reexecute",
                OnAbandoned::Reconcile => "reconcile",
                _ => "park",
            },
            "completion": if self.completes_itself { "upstream" } else { "sidecar" },
            "storeOutage": if self.fails_open { "open" } else { "closed" },
            "shadow": self.is_shadow,
            "otherMethods": if self.refuses_other_methods { "refuse" } else { "pass" },
            "serverErrors": if self.keeps_server_errors { "replay" } else { "release" },
            "releasedStatuses": self.released,
            "bodyComparison": self.compares,
            "refusals": refusals,
            "documentation": self.documentation,
        })
    }
}

impl Carrier {
    fn json(&self) -> Value {
        match self {
            Self::Header(name) => json!({"header": name}),
            Self::Query(name) => json!({"query": name}),
            Self::Member(pointer) => json!({"member": pointer}),
            Self::Built(members) => json!({"builtFrom": members}),
        }
    }
}

impl CallerRule {
    fn json(&self) -> Value {
        let place = match self.kind {
            CallerKind::Header => json!({"header": self.name}),
            CallerKind::Cookie => json!({"cookie": self.name}),
            CallerKind::Path => json!({"path": self.name}),
            CallerKind::Host => json!({"host": true}),
            CallerKind::Certificate => json!({"certificate": self.name}),
            CallerKind::Token => json!({"token": self.name}),
        };
        json!({"by": place, "required": self.is_required})
    }
}

impl RefusalRule {
    fn of(profile: &Profile, row: RefusalRow) -> Self {
        Self {
            kind: profile.problem_type(row.condition),
            condition: row.condition,
            status: row.status.as_u16(),
            code: row.code,
        }
    }

    fn json(&self) -> Value {
        json!({
            "type": self.kind,
            "title": self.condition.title(),
            "status": self.status,
            "retry": self.condition.retry().as_str(),
            "code": self.code,
        })
    }
}

/// The descriptor as it is served.
#[derive(Clone, Debug)]
pub(crate) struct PublishedRules {
    pub(crate) body: Bytes,
    /// A strong validator (RFC 9110, 8.8.3).
    pub(crate) etag: HeaderValue,
}

impl PublishedRules {
    /// The path of the descriptor.
    pub(crate) const PATH: &'static str = "/.well-known/idempotency";

    pub(crate) fn of(config: &Config) -> Self {
        let body = Rules::of(config).json().to_string();
        let digest = oncegate_core::Fingerprint::of_parts("rules", &[body.as_bytes()]);
        let mut etag = String::from("\"");
        for byte in digest.digest().iter().take(12) {
            let _infallible = write!(etag, "{byte:02x}");
        }
        etag.push('"');
        // Hexadecimal digits in quotes.
        let etag = HeaderValue::try_from(etag).unwrap_or_else(|_| HeaderValue::from_static("\"rules\""));
        Self { body: body.into(), etag }
    }
}
