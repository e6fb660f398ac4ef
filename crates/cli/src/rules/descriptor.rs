//! The rules as data, and the descriptor at `/.well-known/idempotency`.

use std::fmt::Write as _;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method};
use oncegate_core::{OnAbandoned, limits};
use oncegate_http::{Condition, Settings};
use serde_json::{Value, json};

use crate::config::Config;

/// The version of the descriptor's format.
const VERSION: u32 = 1;

/// The conditions that clients of an API meet.
const CONDITIONS: [Condition; 11] = [
    Condition::KeyMissing,
    Condition::KeyInvalid,
    Condition::RateLimited,
    Condition::KeyReused,
    Condition::RequestInProgress,
    Condition::ReplayUnavailable,
    Condition::OutcomeUnknown,
    Condition::RequestTooLarge,
    Condition::ScopeUnavailable,
    Condition::StoreUnavailable,
    Condition::Overloaded,
];

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
    pub(super) carriers: Vec<Carrier>,
    pub(super) is_required: bool,
    pub(super) syntax: String,
    pub(super) format: String,
    pub(super) is_per_endpoint: bool,
    pub(super) retention: Duration,
    pub(super) wait: Duration,
    pub(super) on_abandoned: OnAbandoned,
    pub(super) replay_marker: String,
    pub(super) keeps_server_errors: bool,
    pub(super) released: Vec<String>,
    pub(super) compares: String,
    pub(super) refusals: Vec<RefusalRule>,
    /// The media type of refusals.
    pub(super) media_type: String,
    pub(super) documentation: Option<String>,
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
        let routes = config.routes.iter().map(|route| {
            let methods = if route.methods.is_empty() {
                covered(&route.config.settings)
            } else {
                route.methods.clone()
            };
            Operation::of(Some(route.pattern.as_str()), methods, &route.config.settings)
        });
        let others = Operation::of(None, covered(&config.default.settings), &config.default.settings);
        Self { operations: routes.chain([others]).collect() }
    }

    /// The descriptor.
    pub(super) fn json(&self) -> Value {
        json!({ "version": VERSION, "operations": self.operations.iter().map(Operation::json).collect::<Vec<_>>() })
    }
}

/// The methods that a key protects.
fn covered(settings: &Settings) -> Vec<Method> {
    let all = [Method::POST, Method::PUT, Method::PATCH, Method::DELETE];
    all.into_iter().filter(|method| settings.covers(method)).collect()
}

impl Operation {
    fn of(path: Option<&str>, methods: Vec<Method>, settings: &Settings) -> Self {
        let profile = settings.profile();
        let rows = profile.rows();
        let row = |key: &str| {
            rows.iter().find(|(own, _)| *own == key).map_or_else(String::new, |(_, value)| value.clone())
        };
        let list = |key: &str| {
            let row = row(key);
            row.split(", ").filter(|value| !value.is_empty()).map(str::to_owned).collect::<Vec<_>>()
        };
        let carriers = match settings.natural_key() {
            Some(key) => vec![Carrier::Built(key.members().iter().map(ToString::to_string).collect())],
            None => {
                let headers = list("key-header").into_iter().map(Carrier::Header);
                let query = list("key-query").into_iter().map(Carrier::Query);
                headers.chain(query).chain(list("key-member").into_iter().map(Carrier::Member)).collect()
            }
        };
        let mut methods: Vec<_> = methods.iter().map(|method| method.as_str().to_owned()).collect();
        methods.sort_unstable();
        let keeps_server_errors = row("server-errors") == "replay";
        let can_occur = |condition| match condition {
            Condition::KeyExpired => !row("first-sent-header").is_empty(),
            Condition::HandlerFailed => !keeps_server_errors,
            other => CONDITIONS.contains(&other),
        };
        let refusals = profile.refusals().into_iter().filter(|refusal| can_occur(refusal.condition));
        Self {
            path: path.map(str::to_owned),
            methods,
            carriers,
            is_required: row("require-key") == "true",
            syntax: row("key-syntax"),
            format: row("key-format"),
            is_per_endpoint: row("key-scope") == "endpoint",
            retention: settings.policy().retention(),
            wait: settings.policy().wait(),
            on_abandoned: settings.policy().on_abandoned(),
            replay_marker: row("replay-marker"),
            keeps_server_errors,
            released: ["401", "403", "407", "408", "421", "425", "429"]
                .map(str::to_owned)
                .into_iter()
                .chain(list("release-statuses"))
                .collect(),
            compares: row("fingerprint.body"),
            media_type: row("refusal.media-type"),
            refusals: refusals
                .map(|row| RefusalRule {
                    kind: profile.problem_type(row.condition),
                    condition: row.condition,
                    status: row.status.as_u16(),
                    code: row.code,
                })
                .collect(),
            documentation: settings.documentation().map(str::to_owned),
        }
    }

    /// The rules of a request; `None` if a key does not protect it.
    pub(super) fn of_request(config: &Config, method: &Method, path: &str) -> Option<Self> {
        let settings = &config.route(method, path).settings;
        settings.covers(method).then(|| Self::of(Some(path), vec![method.clone()], settings))
    }

    pub(super) fn json(&self) -> Value {
        let carriers: Vec<_> = self.carriers.iter().map(Carrier::json).collect();
        let refusals = self.refusals.iter().map(|refusal| {
            let condition = refusal.condition;
            json!({
                "type": refusal.kind,
                "title": condition.title(),
                "status": refusal.status,
                "retry": condition.retry().as_str(),
                "code": refusal.code,
            })
        });
        json!({
            "path": self.path,
            "methods": self.methods,
            "key": {
                "required": self.is_required,
                "in": carriers,
                "syntax": self.syntax,
                "format": self.format,
                "maxLength": limits::MAX_KEY_BYTES,
                "uniqueWithin": if self.is_per_endpoint { "caller, method and path" } else { "caller" },
            },
            "retentionSeconds": self.retention.as_secs(),
            "waitMilliseconds": u64::try_from(self.wait.as_millis()).unwrap_or(u64::MAX),
            "replayMarker": self.replay_marker,
            "afterCrash": match self.on_abandoned {
                OnAbandoned::Reexecute => "reexecute",
                OnAbandoned::Reconcile => "reconcile",
                _ => "park",
            },
            "serverErrors": if self.keeps_server_errors { "replay" } else { "release" },
            "releasedStatuses": self.released,
            "bodyComparison": self.compares,
            "refusals": refusals.collect::<Vec<_>>(),
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
