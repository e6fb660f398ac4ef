//! Every setting, declared once: its name, the places in which it may be given, its default, its help, and its reader with
//! the values that it accepts.
//!
//! Flags, environment, file and routes all use this table. To add a setting, add it here and read its field in `assemble.rs`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use http::header::HeaderName;
use http::uri::PathAndQuery;
use http::{Method, StatusCode};
use oncegate_core::fingerprint::JsonPointer;
use oncegate_core::{IdSecret, OnAbandoned, ServiceName, limits};
use oncegate_http::{
    AuthorityRole, BodyComparison, CompletedBy, JwtAlgorithm, KeyFormat, KeyScope, KeySyntax, PathCase,
    RateQuota, ServerErrors, TrailingSlash,
};
use oncegate_seal::Keyring;

use super::Playground;
use super::accepted::{
    Accepted, Algorithm, Boolean, DurationFrom, DurationOrNone, Matching, NumberTo, OneOf, ProfileName,
    Ratio, Reader, Records, ReleaseStatus, Size, WordsOr,
};
use super::id_secret;
use super::problem::Source;
use super::rate;
use super::scope::{self, KeySetPlace, ScopePart};
use super::seal;
use super::trusted::{self, TrustedProxies};
use super::units::{
    self, AdminToken, DAY, MILLI, Origin, ProfileChoice, SECOND, StoreChoice, StoreOutage, Upstream,
    UpstreamProtocol,
};
use crate::access_log::AccessLogFormat;
use crate::log::LogFormat;
use crate::otlp::{self, OtlpEndpoint, OtlpHeaders, Signal};
use crate::trace::SampleRatio;

/// One setting, as flags, environment and file use it.
pub(crate) struct Setting {
    /// The key in the file. The flag and the variable are derived from it.
    pub(crate) name: &'static str,
    /// The placeholder of the value in help texts.
    pub(crate) value: &'static str,
    /// The help text.
    pub(crate) help: &'static str,
    pub(crate) default: Fallback,
    pub(crate) settable_in: SettableIn,
    pub(crate) shape: Shape,
    pub(crate) heading: &'static str,
    /// Parses a value and stores it in its field of [`Values`].
    pub(crate) set: fn(&mut Values, &Raw, &Source) -> Result<(), Vec<String>>,
    /// The texts that each value may be.
    pub(crate) accepted: fn() -> Accepted,
}

/// The places in which a setting may be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SettableIn {
    /// Everywhere, and each route may override it.
    Route,
    /// Everywhere, once for the whole sidecar. Only a restart can change it.
    Service,
    /// Everywhere, once for the whole sidecar. A reload can change it.
    Live,
    /// As a flag or in the environment, because it is about the file itself.
    Start,
    /// In the environment only, because many people can read command lines and configuration files.
    Secret,
}

/// The form of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// One value.
    One,
    /// Several values: an array in the file, commas or repetition elsewhere.
    Many,
    /// Yes or no; the bare flag means yes.
    Switch,
}

/// The value of a setting that is not given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fallback {
    /// This value.
    Value(&'static str),
    /// The value of the profile; the help shows that of `ietf`.
    Profile(&'static str),
    /// No value; the help shows what that means, unless the text is empty.
    Nothing(&'static str),
}

/// A value that is not parsed yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Raw {
    /// One text; several values are separated by commas.
    Text(String),
    /// Several texts.
    List(Vec<String>),
}

/// A parsed value and its source.
#[derive(Clone, Debug)]
pub(crate) struct Sourced<T> {
    pub(crate) value: T,
    pub(crate) source: Source,
}

impl Setting {
    /// The flag without its dashes; `None` if the setting has no flag.
    pub(crate) fn flag(&self) -> Option<String> {
        match self.settable_in {
            SettableIn::Secret => None,
            _ => Some(self.name.replace('.', "-")),
        }
    }

    /// The environment variable.
    pub(crate) fn variable(&self) -> String {
        format!("ONCEGATE_{}", self.name.replace(['-', '.'], "_").to_ascii_uppercase())
    }

    /// True for a program and its arguments: in the file, an array.
    pub(crate) fn is_command(&self) -> bool {
        self.value == "WORD,…"
    }

    /// The setting with this key in the file.
    pub(crate) fn named(name: &str) -> Option<&'static Self> {
        SETTINGS.iter().find(|setting| setting.name == name)
    }
}

macro_rules! settings {
    ($(
        $(#[doc = $help:literal])+
        $name:literal $heading:ident $place:ident $shape:ident $value:literal $default:expr;
        $field:ident: $type:ty = $read:expr;
    )+) => {
        /// Every setting.
        pub(crate) static SETTINGS: &[Setting] = &[$(Setting {
            name: $name,
            value: $value,
            help: concat!($($help),+),
            default: $default,
            settable_in: SettableIn::$place,
            shape: Shape::$shape,
            heading: heading::$heading,
            set: |values, raw, source| {
                let value = settings!(@read $shape)(raw, &$read)?;
                values.$field = Some(Sourced { value, source: source.clone() });
                Ok(())
            },
            accepted: || ($read).accepted(),
        }),+];

        /// The values of the settings that are given.
        #[derive(Clone, Debug, Default)]
        pub(crate) struct Values {
            $(pub(crate) $field: Option<Sourced<settings!(@type $shape $type)>>,)+
        }

        impl Values {
            /// The source of the setting with this name, if it is given.
            pub(crate) fn source(&self, name: &str) -> Option<&Source> {
                match name {
                    $($name => self.$field.as_ref().map(|given| &given.source),)+
                    _ => None,
                }
            }
        }
    };
    (@type Many $type:ty) => { Vec<$type> };
    (@type $shape:ident $type:ty) => { $type };
    (@read Many) => { read_many };
    (@read $shape:ident) => { read_one };
}

mod heading {
    pub(super) const SERVICE: &str = "The sidecar and its service";
    pub(super) const KEYS: &str = "Keys";
    pub(super) const RECORDS: &str = "Records and outcomes";
    pub(super) const SEALING: &str = "Encryption of stored responses";
    pub(super) const IDS: &str = "Keyed identities of records";
    pub(super) const REQUESTS: &str = "Comparison of requests";
    pub(super) const BROWSERS: &str = "Browsers on other origins";
    pub(super) const LIMITS: &str = "Limits and timeouts";
    pub(super) const TELEMETRY: &str = "Logs, traces and metrics";
}

use Fallback::{Nothing, Profile as ByProfile, Value};

/// The largest limit of requests and connections: one process cannot have more files open.
const MAX_OPEN: usize = 1_000_000;

/// The largest limit of memory: more than machines have.
const MAX_MEMORY: usize = 1 << 40;
const MEMORY: &str = "all of it may be in memory at once";

/// The names of header fields, as a schema describes them.
const NAME: &str = "^[!#$%&'*+.^_`|~0-9A-Za-z-]+$";
const METHOD: &str = "^[!#$%&'*+.^_`|~0-9A-Z-]+$";
const POINTER: &str = "^(?:/|$)";
const RATE: &str = r"^\s*\+?[0-9]+/[smhd](?:\s+burst\s+\+?[0-9]+)?\s*$";

settings! {
    /// Reads settings from this TOML file, by their names in docs/reference/configuration.md. A [[route]] table with a path
    /// changes settings for one route. Flags override the environment, and the environment overrides the file.
    "config" SERVICE Start One "FILE" Nothing("");
    config: PathBuf = units::path;

    /// The service to protect: scheme, host and port. Requests keep their path.
    "to" SERVICE Live One "URL" Nothing("");
    to: Upstream = units::upstream;

    /// Listens for requests on this address.
    "listen" SERVICE Service One "ADDR" Value("127.0.0.1:8080");
    listen: SocketAddr = units::address;

    /// Serves /livez, /readyz, /metrics, the admin API and the dashboard on this address, which may also be written as
    /// http://IP:PORT. An address that other machines can reach needs an admin token.
    "admin" SERVICE Service One "ADDR" Value("127.0.0.1:9090");
    admin: SocketAddr = units::admin_address;

    /// Reads the admin token, at least 16 characters, from this file. The environment variable ONCEGATE_ADMIN_TOKEN can
    /// hold the token instead, and overrides a file that the configuration file names.
    "admin-token-file" SERVICE Live One "FILE" Nothing("no token, for loopback addresses only");
    admin_token_file: PathBuf = units::path;

    /// The admin token, at least 16 characters. In the environment only, as ONCEGATE_ADMIN_TOKEN.
    "admin-token" SERVICE Secret One "TOKEN" Nothing("");
    admin_token: AdminToken = units::admin_token;

    /// Reads the metrics token from this file. It opens GET /metrics and nothing else, for Prometheus, next to an admin token,
    /// from which it must differ. The environment variable ONCEGATE_METRICS_TOKEN can hold it instead, as for the admin token.
    "metrics-token-file" SERVICE Live One "FILE" Nothing("none: /metrics needs the admin token");
    metrics_token_file: PathBuf = units::path;

    /// The metrics token, at least 16 characters. In the environment only, as ONCEGATE_METRICS_TOKEN.
    "metrics-token" SERVICE Secret One "TOKEN" Nothing("");
    metrics_token: AdminToken = units::admin_token;

    /// Keeps records in this directory, which one process owns at a time; on a server that several sidecars share, with
    /// `postgres://USER@HOST/DATABASE` or `redis://HOST`; on one of these with a cache of responses before it, with
    /// `cached(cache=STORE,store=STORE)`; or in memory with `memory:`, where nothing survives a restart. A relative path in the
    /// configuration file, also one inside a URL, is relative to the directory of that file. Put a URL with a password into
    /// the environment. docs/reference/configuration.md describes the URLs.
    "store" SERVICE Service One "DIR|URL|memory:" Value("./oncegate-data");
    store: StoreChoice = units::store;

    /// Refuses to start with a new, empty store: an embedded store must already exist. Set it once the first start
    /// has created the store. Then a mistyped or unmounted directory is an error. Without it, the sidecar would start with
    /// an empty store and execute again every request that the real store has answered.
    "store-must-exist" SERVICE Service Switch "BOOL" Value("false");
    store_must_exist: bool = Boolean;

    /// The name of the service that is protected, 1 to 100 ASCII characters without spaces. Sidecars with the same name share
    /// keys. Sidecars with different names on one store never share keys, but operators see the records of all of them. A
    /// store on a server needs a name, because other services may use it too.
    "service" SERVICE Service One "NAME" Nothing("none, for a store that one process owns");
    service: ServiceName = units::service;

    /// The most memory that the embedded store uses: up to 48 bytes for each record, and an eighth of it for recent records.
    /// Beyond that, new keys are refused as with max-records. 512MiB are enough for nine million records. At least 1MiB, at
    /// most 1024GiB.
    "store-memory" SERVICE Service One "SIZE" Value("512MiB");
    store_memory: usize = Size { min: 1 << 20, max: MAX_MEMORY, why: MEMORY };

    /// The most records that the embedded store, or one in memory, holds, including expired records that are not purged yet.
    /// Beyond it, a request with a new key is refused with 503 `store-unavailable`; recorded keys are still answered.
    "max-records" SERVICE Service One "N" Nothing("no limit but the disk; in memory, 10000000");
    max_records: u64 = Records;

    /// The most bytes that the records of the embedded store, or of one in memory, hold together. Beyond it, new keys are refused
    /// as with max-records. The directory takes up to twice as much space, and up to 256MiB more. At least 1MiB.
    "max-store-bytes" SERVICE Service One "SIZE" Nothing("no limit but the disk; in memory, 1GiB");
    max_store_bytes: usize = Size { min: 1 << 20, max: usize::MAX, why: "" };

    /// Serves TLS on the listening address with this certificate chain (PEM). Needs tls-key.
    "tls-cert" SERVICE Live One "FILE" Nothing("no TLS");
    tls_cert: PathBuf = units::path;

    /// The private key of the certificate (PEM).
    "tls-key" SERVICE Live One "FILE" Nothing("");
    tls_key: PathBuf = units::path;

    /// Accepts only clients that show a certificate of one of these authorities (PEM). Its names can be a scope,
    /// `mtls:subject` or `mtls:san`. Needs tls-cert.
    "tls-client-ca" SERVICE Live One "FILE" Nothing("clients need no certificate");
    tls_client_ca: PathBuf = units::path;

    /// Refuses clients whose certificate is in one of these lists of revoked certificates (CRL, in PEM). Each authority in
    /// tls-client-ca, and each between it and a client, needs a list in the file that has not expired.
    "tls-client-crl" SERVICE Live One "FILE" Nothing("revoked certificates are accepted until they end");
    tls_client_crl: PathBuf = units::path;

    /// The protocol of requests to the service: `http1`, `http2` (over http with prior knowledge), or `auto` (HTTP/1.1 over
    /// http; over https, the protocol that TLS negotiates).
    "upstream-protocol" SERVICE Live One "auto|http1|http2" Value("auto");
    upstream_protocol: UpstreamProtocol = OneOf(&[
        ("auto", UpstreamProtocol::Auto), ("http1", UpstreamProtocol::Http1),
        ("http2", UpstreamProtocol::Http2),
    ]);

    /// The proxies in front of the sidecar whose X-Forwarded-*, X-Real-IP, Forwarded, X-Original-URL and similar header fields
    /// are passed on: `loopback` (this machine), `private` (networks that the internet does not route, and this machine), an
    /// address, a network such as `10.0.0.0/8`, `any` or `none`. Give it several times or with commas. These fields are removed
    /// from requests of all other clients.
    "trusted-proxies" SERVICE Service Many "HOP,…" Value("loopback");
    trusted_proxies: TrustedProxies = WordsOr(
        &["loopback", "private", "any", "none"],
        r"^[0-9A-Fa-f:.]+(?:/\+?[0-9]+)?$",
        trusted::trusted_proxies,
    );

    /// Writes a line for each request with a key to the standard output, as `text` or as `json`: time, operation, status,
    /// outcome, duration, attempt, a hash of the caller, and the record. The key is never written.
    "access-log" SERVICE Service One "off|text|json" Value("off");
    access_log: Option<AccessLogFormat> = OneOf(&[
        ("off", None), ("text", Some(AccessLogFormat::Text)), ("json", Some(AccessLogFormat::Json)),
    ]);

    /// Answers GET /.well-known/idempotency with a description of the rules for keys of all routes, for programs: which
    /// operations, where the key stands, how long it is kept, which refusals there are. The service does not get these
    /// requests then.
    "published-rules" SERVICE Live Switch "BOOL" Value("false");
    published_rules: bool = Boolean;

    /// The page of the dashboard that sends requests to the service, to try what happens to retries: `auto` (only if the admin
    /// address is a loopback address), `on`, or `off`.
    "playground" SERVICE Live One "auto|on|off" Value("auto");
    playground: Playground = OneOf(&[("auto", Playground::Auto), ("on", Playground::On), ("off", Playground::Off)]);

    /// The number of threads that serve requests. At most 1024.
    "threads" SERVICE Service One "N" Nothing("one per core");
    threads: usize = NumberTo(1024, "threads");

    /// The dialect of the protocol: `ietf` (draft-ietf-httpapi-idempotency-key-header-07), `stripe`, `stripe-v2`, `acp`,
    /// `paypal`, `adyen`, `square`, `oasis`, `aws`, `webhook`, `classic` (common middleware), `mcp` (tools of agents), or a
    /// file of your own whose name ends with `.toml`, such as `./ours.toml`. A profile sets the defaults that are marked "by
    /// profile", and the form of refusals. Settings that you give override it. docs/reference/profiles.md describes all of
    /// them.
    "profile" KEYS Route One "NAME|FILE" Value("ietf");
    profile: ProfileChoice = ProfileName;

    /// Identifies the caller, so that callers never share keys: `header:NAME` or `cookie:NAME` (hashed; all callers without it
    /// share one scope), `required-header:NAME` or `required-cookie:NAME` (requests without it are refused), several of these
    /// together, such as `required-header:x-tenant,cookie:sid`, or `single-tenant` (there is only one caller). `jwt:CLAIM` is a
    /// claim of the token in Authorization, which is verified with jwt-keys (requests without it are refused), and `mtls:subject`
    /// and `mtls:san` are names in the client's certificate, which needs tls-client-ca. `path:NAME` (a
    /// parameter of the route's path) and `host` separate tenants; a client can choose them, so combine them. An empty value
    /// counts as missing. If the value is a credential, a caller with a rotated credential is another caller. Unless this is
    /// set, requests that carry another credential (a cookie, an API key) instead of Authorization are refused.
    "scope" KEYS Route Many "SCOPE,…" Nothing("`header:authorization`, and other credentials are refused");
    scope: ScopePart = scope::scope;

    /// The keys that verify the tokens of a scope `jwt:CLAIM`: the key set (JWKS) of their issuer, an https URL or a file. It is
    /// fetched again every 5 minutes, and for a token with an unknown key, at most every 10 seconds. If that fails, the last
    /// key set is used for at most 24h; without any, requests are refused.
    "jwt-keys" KEYS Live One "FILE|URL" Nothing("");
    jwt_keys: KeySetPlace = scope::key_set_place;

    /// The algorithms of tokens that are accepted: RS256, RS384, RS512, PS256, PS384, PS512, ES256, ES384, EdDSA; or, alone and
    /// with a key set in a file, HS256, HS384, HS512.
    "jwt-algorithms" KEYS Live Many "ALG,…" Value("RS256,ES256,EdDSA");
    jwt_algorithms: JwtAlgorithm = Algorithm;

    /// The issuer (`iss`) that tokens must have.
    "jwt-issuer" KEYS Live One "TEXT" Nothing("any issuer whose key is in jwt-keys");
    jwt_issuer: String = scope::not_empty;

    /// The audiences of this service: tokens must have one of them in `aud`.
    "jwt-audience" KEYS Live Many "TEXT,…" Nothing("any audience");
    jwt_audience: String = scope::not_empty;

    /// The effect of the request's host on its key: `compare` (the same key with another host is refused), `scope` (each host
    /// has its own keys: hosts are tenants), or `ignore` (clients reach the service under several names or ports, such as
    /// those of several sidecars). Hosts are compared in lower case, without the ports 80 and 443.
    "authority" KEYS Route One "compare|scope|ignore" Value("compare");
    authority: AuthorityRole = OneOf(&[
        ("compare", AuthorityRole::Compared), ("scope", AuthorityRole::Scope),
        ("ignore", AuthorityRole::Ignored),
    ]);

    /// Refuses requests without a key if their method is covered.
    "require-key" KEYS Route Switch "BOOL" ByProfile("false");
    require_key: bool = Boolean;

    /// The header fields that may carry the key. If a request has several of them, their keys must be equal.
    "key-header" KEYS Route Many "NAME,…" ByProfile("Idempotency-Key");
    key_header: HeaderName = Matching(units::key_header, NAME);

    /// The parameters of the query, or of a form in the body, that may carry the key. Their case does not count. Then all
    /// requests with a covered method are read into memory.
    "key-query" KEYS Route Many "NAME,…" Nothing("by profile: two in aws, none in the others");
    key_query: String = units::parameter;

    /// A list of members of JSON bodies, such as `/idempotency_key` (JSON pointers), that may carry the key. Their case does not
    /// count. Then all requests with a covered method are read into memory.
    "key-member" KEYS Route Many "POINTER,…" Nothing("by profile: some in square, aws and mcp, none in the others");
    key_member: JsonPointer = Matching(units::key_member, POINTER);

    /// A list of members of JSON bodies from which the key is built, such as `/customer` (JSON pointers). A key that the caller
    /// chose is ignored: two requests of one caller with the same values are one operation, with any key or without one. A body
    /// that may be JSON and that not every program reads alike is refused. Needs a `scope` that every caller must send, or
    /// `single-tenant`.
    "natural-key" KEYS Route Many "POINTER,…" Nothing("the caller chooses the key");
    natural_key: JsonPointer = Matching(units::json_pointer, POINTER);

    /// The tools without an effect, for `profile = "mcp"`: their calls pass, with a key or without one. Each is a name, or the
    /// beginning of names and a star, such as `get_*`. The longest entry of `read-only-tools` and `intent-tools` that fits
    /// counts.
    "read-only-tools" KEYS Route Many "NAME,…" Nothing("all calls of tools are covered");
    read_only_tools: String = units::tool;

    /// The tools whose keys are built from the intent of a call, for `profile = "mcp"`: the tool, its arguments, and the run of
    /// the agent. A key that the client chose is ignored. Written as `read-only-tools`. Needs a `scope` that every caller must
    /// send, or `single-tenant`.
    "intent-tools" KEYS Route Many "NAME,…" Nothing("clients choose the keys of calls");
    intent_tools: String = units::tool;

    /// The scope within which a caller's key is unique: `endpoint` (method and path; on another endpoint it is another key), or
    /// `caller` (the same key on another endpoint is refused as a mismatch).
    "key-scope" KEYS Route One "endpoint|caller" ByProfile("endpoint");
    key_scope: KeyScope = OneOf(&[("endpoint", KeyScope::Endpoint), ("caller", KeyScope::Caller)]);

    /// The syntax of the key in its header field: `lenient` (bare or in quotes), `strict` (in quotes only, as the draft demands),
    /// or `raw` (the value as it is: quotes, commas and spaces are part of the key).
    "key-syntax" KEYS Route One "lenient|strict|raw" ByProfile("lenient");
    key_syntax: KeySyntax = OneOf(&[
        ("lenient", KeySyntax::Lenient), ("strict", KeySyntax::Strict), ("raw", KeySyntax::Raw),
    ]);

    /// The format of keys: `any` (1 to 255 characters), `uuid`, `ulid`, or `pattern:REGEX`, which the whole key must match, such
    /// as `pattern:.{20,64}` for 20 to 64 characters.
    "key-format" KEYS Route One "FORMAT" ByProfile("any");
    key_format: KeyFormat = WordsOr(&["any", "uuid", "ulid"], "^pattern:", units::key_format);

    /// The header field that marks a replay.
    "replay-marker" KEYS Route One "NAME" ByProfile("Idempotent-Replayed");
    replay_marker: HeaderName = Matching(units::replay_marker, NAME);

    /// The page that documents your rules for keys: a URL such as https://developer.example.com/idempotency, or a path. Refusals
    /// link to it.
    "documentation" KEYS Route One "URL" Nothing("no link");
    documentation: String = units::documentation;

    /// The beginning of the types of problems, so that they are links to your pages: the name of the problem follows, as in
    /// https://developer.example.com/retry.html#key-reused. It ends with a slash or `#`. `oncegate rules` writes the pages.
    "problem-base-url" KEYS Route One "URL" Nothing("`urn:oncegate:problem:`");
    problem_base_url: String = units::problem_base_url;

    /// The methods that are covered. Requests with other methods pass through. In a [[route]], also the methods that the route
    /// matches.
    "methods" KEYS Route Many "METHOD,…" ByProfile("POST,PATCH");
    methods: Method = Matching(units::method, METHOD);

    /// Decides if a slash at the end makes another path: `ignore` (`/orders/` is `/orders`), or `exact`. Affects the choice of
    /// the route and of the record. The service gets the path as it was sent.
    "trailing-slash" KEYS Route One "ignore|exact" Value("ignore");
    trailing_slash: TrailingSlash = OneOf(&[("ignore", TrailingSlash::Ignore), ("exact", TrailingSlash::Exact)]);

    /// Decides if upper and lower case differ in the fixed parts of a route's path: `ignore` (`/Orders/7` is `/orders/7`), or
    /// `exact`. The value of a parameter such as `{id}` keeps its case. Affects the same choices as trailing-slash.
    "path-case" KEYS Route One "ignore|exact" Value("ignore");
    path_case: PathCase = OneOf(&[("ignore", PathCase::Ignore), ("exact", PathCase::Exact)]);

    /// The time for which a request owns its key without renewing it. The sidecar renews it while the request runs. So this is
    /// the time for which a key stays blocked after a crash, and not a limit on the duration of a request. From 100ms to 1h.
    "lease" RECORDS Route One "DURATION" Value("30s");
    lease: Duration = DurationFrom(limits::MIN_LEASE, limits::MAX_LEASE);

    /// The time for which a response is kept and replayed, from its completion. From 1s to 400d.
    "retention" RECORDS Route One "DURATION" ByProfile("24h");
    retention: Duration = DurationFrom(limits::MIN_RETENTION, limits::MAX_RETENTION);

    /// The longest time that a duplicate waits for the response of the request in progress. After it, the duplicate is
    /// refused with 409 and may be sent again. At most 1h.
    "wait" RECORDS Route One "DURATION" Value("2s");
    wait: Duration = DurationFrom(Duration::ZERO, limits::MAX_LEASE);

    /// The policy for a key whose owner crashed: `park` (the outcome is unknown until an operator resolves it: at most one
    /// execution), `reexecute` (the next request with the key executes: at least one execution), or `reconcile` (the sidecar
    /// asks the service; see `reconcile-path`).
    "on-abandoned" RECORDS Route One "park|reexecute|reconcile" Value("park");
    on_abandoned: OnAbandoned = OneOf(&[
        ("park", OnAbandoned::Park), ("reexecute", OnAbandoned::Reexecute),
        ("reconcile", OnAbandoned::Reconcile),
    ]);

    /// The one that completes the record of a request: `sidecar` (with the service's response, after it), or `upstream` (the
    /// service, with `SELECT oncegate.complete(record, token)` in the transaction that holds its effect, so that both commit
    /// or neither does). `upstream` needs a store on PostgreSQL, and executes a request again that was cut off before it
    /// committed.
    "completion" RECORDS Route One "sidecar|upstream" Value("sidecar");
    completion: CompletedBy = OneOf(&[("sidecar", CompletedBy::Layer), ("upstream", CompletedBy::Upstream)]);

    /// The path at which the sidecar asks the service for the outcome of a request whose owner crashed, such as
    /// `/oncegate/outcome`. It gets a GET with the key and the caller's credentials, and must answer as docs/reference/http.md
    /// describes. For on-abandoned = reconcile. With completion = upstream, the sidecar also asks there for the response of a
    /// request that the service completed without one.
    "reconcile-path" RECORDS Route One "PATH" Nothing("");
    reconcile_path: PathAndQuery = Matching(units::reconcile_path, r"^/[^?#{} ]*$");

    /// The time for which the sidecar repeats its question until the service reports the outcome. After it, the outcome is
    /// unknown until an operator resolves it; with completion = upstream, the next retry asks again. From 10ms to 10m.
    "reconcile-timeout" RECORDS Route One "DURATION" Value("10s");
    reconcile_timeout: Duration = DurationFrom(10 * MILLI, 600 * SECOND);

    /// The path at which the service is asked before each replay if the caller may still get the response: a HEAD with the
    /// caller's credentials. 2xx with the field `Oncegate-Authorize: allow` replays. 401 and 403 refuse the retry with this
    /// status, and so does 404 with `Oncegate-Authorize: deny`. Every other response is no decision: there is no replay, and the
    /// retry is refused with 503 or the service's 5xx. Not for a scope of mtls.
    "authorize" RECORDS Route One "PATH" Nothing("replays without a question");
    authorize: PathAndQuery = Matching(units::reconcile_path, r"^/[^?#{} ]*$");

    /// The longest time that the service may take for this decision. From 10ms to 1m.
    "authorize-timeout" RECORDS Route One "DURATION" Value("5s");
    authorize_timeout: Duration = DurationFrom(10 * MILLI, 60 * SECOND);

    /// The policy for responses from 500 to 599: `replay` (they are kept, because the effect may have happened), or `release`
    /// (the key is free again, because the service undoes everything before it responds so).
    "server-errors" RECORDS Route One "replay|release" ByProfile("replay");
    server_errors: ServerErrors = OneOf(&[("replay", ServerErrors::Replay), ("release", ServerErrors::Release)]);

    /// A list of further response statuses that free the key, such as 400 and 422, or 4xx or 5xx for all of a class: the client
    /// can correct a refused request and send it again under its key. The service must have done nothing when it responds so.
    /// From 400 to 599. The statuses 401, 403, 407, 408, 421, 425 and 429 always free the key.
    "release-statuses" RECORDS Route Many "STATUS,…" Nothing("by profile: none in ietf");
    release_statuses: Vec<StatusCode> = ReleaseStatus;

    /// The policy for requests with a key while the store cannot be reached: `closed` (503, nothing is executed), or `open`
    /// (executed WITHOUT protection, marked and counted). A store that can be reached but is full accepts no new keys in either
    /// case.
    "store-outage" RECORDS Route One "closed|open" Value("closed");
    store_outage: StoreOutage = OneOf(&[("closed", StoreOutage::Closed), ("open", StoreOutage::Open)]);

    /// Only observes: every request goes to the service WITHOUT protection, as if the sidecar were not there, also while the
    /// store is away. What would have been done with it is counted (oncegate_shadow_requests_total) and written to the access
    /// log. For a first look at real traffic. Not for `profile = "mcp"`.
    "shadow" RECORDS Route Switch "BOOL" Value("false");
    shadow: bool = Boolean;

    /// A list of further header fields of responses that are stored and replayed. Fields such as Content-Type, Location and ETag
    /// are always stored.
    "stored-headers" RECORDS Route Many "NAME,…" Nothing("");
    stored_headers: HeaderName = Matching(units::stored_header, NAME);

    /// A list of members of JSON responses that are not stored, such as `/card/number` (JSON pointers; a step `*` is every
    /// element or member). The first client gets them; a replay has `null` in their place, and the field
    /// `Idempotency-Redacted`. A response that is not JSON is not stored at all then, and its replay is refused. The
    /// comparison of requests is not affected.
    "redact-response" RECORDS Route Many "POINTER,…" Nothing("");
    redact_response: JsonPointer = Matching(units::redacted, "^/");

    /// A list of header fields of responses that are not stored, although they are by default or because of stored-headers.
    "redact-headers" RECORDS Route Many "NAME,…" Nothing("");
    redact_headers: HeaderName = Matching(units::header_name, NAME);

    /// Encrypts responses and the results of steps before the store gets them, with the keys in this file: one in each line, as
    /// `oncegate seal-key new` prints it. The first key seals, all open. A reload reads the file again. docs/reference/sealing.md
    /// describes how keys are replaced.
    "seal-keys-file" SEALING Live One "FILE" Nothing("responses are stored in clear");
    seal_keys_file: PathBuf = units::path;

    /// The keys themselves, with commas or line ends between them. In the environment only, as ONCEGATE_SEAL_KEYS.
    "seal-keys" SEALING Secret One "KEYS" Nothing("");
    seal_keys: Keyring = seal::keys;

    /// A program that prints the keys, and its arguments, such as one that asks a key management service: an array in the
    /// file. It runs at the start and at each reload, without a shell, for at most 10 seconds. Logs show what it
    /// writes to its standard error, and not its arguments, which may be secrets.
    "seal-keys-command" SEALING Live Many "WORD,…" Nothing("");
    seal_keys_command: String = seal::word;

    /// Refuses stored responses and steps that are not sealed, so that an attacker who can write to the store cannot replace a
    /// sealed response by an invented one. Set it once the longest retention has passed since all sidecars seal.
    "seal-required" SEALING Live Switch "BOOL" Value("false");
    seal_required: bool = Boolean;

    /// Opens sealed responses, and seals nothing: until all sidecars of a store have the keys, and after sealing was switched
    /// off.
    "seal-opens-only" SEALING Live Switch "BOOL" Value("false");
    seal_opens_only: bool = Boolean;

    /// Computes the ids of records, and the marks of callers, keys and requests, with the secret in this file, as
    /// `oncegate id-secret new` prints it: a reader of the store who guesses a key or a caller cannot confirm the guess. Only for
    /// a new, empty store, and for its whole life: all sidecars and programs on the store need the same secret, it cannot be
    /// changed, and a store whose secret is lost is of no use. docs/reference/sealing.md describes it.
    "id-secret-file" IDS Service One "FILE" Nothing("plain hashes");
    id_secret_file: PathBuf = units::path;

    /// The secret itself. In the environment only, as ONCEGATE_ID_SECRET.
    "id-secret" IDS Secret One "SECRET" Nothing("");
    id_secret: IdSecret = id_secret::parse;

    /// A list of members that are ignored when JSON bodies are compared, such as `/meta/timestamp` (JSON pointers). A body that
    /// consists only of ignored members is compared as a whole.
    "fingerprint.exclude" REQUESTS Route Many "POINTER,…" Nothing("");
    fingerprint_exclude: JsonPointer = Matching(units::excluded, "^/");

    /// A list of members of JSON bodies: only these are compared. Names are case-sensitive. A body that has none of these members
    /// is compared as a whole.
    "fingerprint.include" REQUESTS Route Many "POINTER,…" Nothing("all members");
    fingerprint_include: JsonPointer = Matching(units::json_pointer, POINTER);

    /// The comparison of the bodies of two requests with one key: `canonical` (JSON by value, forms and multipart by their
    /// parts), `raw` (byte by byte), or `nothing` (another body is a retry, too, as receivers of webhooks need it).
    "fingerprint.body" REQUESTS Route One "canonical|raw|nothing" ByProfile("canonical");
    fingerprint_body: BodyComparison = OneOf(&[
        ("canonical", BodyComparison::Canonical), ("raw", BodyComparison::Raw), ("nothing", BodyComparison::Nothing),
    ]);

    /// A list of header fields that are compared, too: requests that differ in one of them are different requests.
    "fingerprint.headers" REQUESTS Route Many "NAME,…" Nothing("");
    fingerprint_headers: HeaderName = Matching(units::seen_header, NAME);

    /// A list of origins whose pages may read responses, such as `https://shop.example`, or `*` for every origin. The sidecar
    /// writes the Access-Control-* fields on replays, on refusals, and on responses of the service that have none, and answers
    /// preflight requests of these origins.
    "cors.allowed-origins" BROWSERS Route Many "ORIGIN,…" Nothing("pages of other origins cannot read responses");
    cors_allowed_origins: Origin = units::cors_origin;

    /// A list of further header fields that pages may read, besides those that are always readable and those of Oncegate (the
    /// key, the replay marker, Idempotency-Status, Retry-After, RateLimit, RateLimit-Policy, and those that the profile adds).
    "cors.exposed-headers" BROWSERS Route Many "NAME,…" Nothing("");
    cors_exposed_headers: HeaderName = Matching(units::header_name, NAME);

    /// A list of header fields that pages may send.
    "cors.allowed-headers" BROWSERS Route Many "NAME,…" Nothing("those that the preflight request asks for");
    cors_allowed_headers: HeaderName = Matching(units::header_name, NAME);

    /// A list of methods that pages may use.
    "cors.allowed-methods" BROWSERS Route Many "METHOD,…" Nothing("the one that the preflight request asks for");
    cors_allowed_methods: Method = Matching(units::cors_method, METHOD);

    /// Lets pages send cookies and other credentials of the browser. Cannot be combined with the origin `*`.
    "cors.allow-credentials" BROWSERS Route Switch "BOOL" Value("false");
    cors_allow_credentials: bool = Boolean;

    /// The time for which a browser may remember the response to a preflight request. At most 24h.
    "cors.max-age" BROWSERS Route One "DURATION" Value("1h");
    cors_max_age: Duration = DurationFrom(Duration::ZERO, DAY);

    /// The largest body of a request with a key, such as 64KiB, 2MiB or 10MB. Larger bodies are refused with 413. Bodies of
    /// requests without a key have no limit, unless the query or the body may carry the key. At most 1GiB.
    "max-request-body" LIMITS Route One "SIZE" Value("2MiB");
    max_request_body: usize = Size { min: 0, max: 1 << 30, why: "a request body is held in memory while it is executed" };

    /// The memory for the bodies of all requests with a key together, from their arrival until the service has them. A request
    /// whose body does not fit is refused with 503. At least max-request-body, and at most 1024GiB.
    "request-budget" LIMITS Service One "SIZE" Value("256MiB");
    request_budget: usize = Size { min: 0, max: MAX_MEMORY, why: MEMORY };

    /// The largest body of a response that is stored. A larger response reaches the first client whole and cannot be replayed.
    /// At most 64MiB.
    "max-response-body" LIMITS Route One "SIZE" Value("1MiB");
    max_response_body: usize = Size { min: 0, max: limits::MAX_RESPONSE_BYTES, why: "a record cannot hold more" };

    /// The memory for the bodies of all responses to requests with a key together, until clients have received them. A replay
    /// that does not fit is refused with 503, and no new request is executed while the budget is used up. At least
    /// max-response-body, and at most 1024GiB.
    "response-budget" LIMITS Service One "SIZE" Value("256MiB");
    response_budget: usize = Size { min: 0, max: MAX_MEMORY, why: MEMORY };

    /// The most requests with a key that are in flight at the same time. A request counts until the service has responded, even
    /// if its client hangs up. Further requests are refused with 503, and nothing is executed. At most 65536.
    "max-in-flight" LIMITS Service One "N" Value("2048");
    max_in_flight: usize = NumberTo(limits::MAX_UNSETTLED, "requests");

    /// The most requests with a key of one caller that are in flight at the same time. All callers without a credential count as
    /// one. It has no effect if scope is `single-tenant`. At most 65536.
    "max-in-flight-per-caller" LIMITS Service One "N" Value("1024");
    max_in_flight_per_caller: usize = NumberTo(limits::MAX_UNSETTLED, "requests");

    /// The most requests without a key that are in flight at the same time, until their responses have ended. Upgraded
    /// connections, such as WebSockets, count until they end, and so does the rest of a request that is still sent after its
    /// response. Further requests are refused with 503. At most 1000000.
    "max-in-flight-without-key" LIMITS Service One "N" Nothing("as max-connections, but at least 1024; fewer if the system's limit of open files leaves fewer");
    max_in_flight_without_key: usize = NumberTo(MAX_OPEN, "requests");

    /// The rate of new keys of each caller, such as `10/s`, `600/m` or `10/s burst 50` (without a burst, as many as in the period
    /// may come at once), or `none`. Further ones are refused with 429, and nothing is executed. All callers without a
    /// credential count as one. Each sidecar counts by itself.
    "rate-limit.caller" LIMITS Route One "RATE" Nothing("no limit");
    rate_limit_caller: Option<RateQuota> = WordsOr(&["none"], RATE, rate::rate);

    /// The rate of requests with one key: the first one and its retries, as for a client that repeats its request in a loop.
    /// Written and counted as rate-limit.caller.
    "rate-limit.key" LIMITS Route One "RATE" Nothing("no limit");
    rate_limit_key: Option<RateQuota> = WordsOr(&["none"], RATE, rate::rate);

    /// The rate of new keys of all callers together, of each route by itself. Written and counted as rate-limit.caller.
    "rate-limit.route" LIMITS Route One "RATE" Nothing("no limit");
    rate_limit_route: Option<RateQuota> = WordsOr(&["none"], RATE, rate::rate);

    /// The most client connections that are open at the same time. A further connection waits until another one ends. Those that
    /// have sent no request are closed for it; one that has sent a request stays, also if it is idle. At most 1000000.
    "max-connections" LIMITS Service One "N" Value("10000");
    max_connections: usize = NumberTo(MAX_OPEN, "connections");

    /// The time for which an HTTP/1.1 connection of a client is kept without a request, and the longest time for the head of a
    /// request. It must be longer than the time after which the load balancer before the sidecar closes idle connections
    /// (nginx, AWS and Azure 60 s by default, Google Cloud 600 s). Otherwise the load balancer may send a request on a
    /// connection that the sidecar is just closing. From 1s to 24h.
    "client-idle-timeout" LIMITS Live One "DURATION" Value("75s");
    client_idle_timeout: Duration = DurationFrom(SECOND, DAY);

    /// The longest time that a client may accept no byte of a response that is ready for it. After it, its connection is closed;
    /// with HTTP/2, only that response is given up. From 100ms to 1h.
    "write-timeout" LIMITS Service One "DURATION" Value("60s");
    write_timeout: Duration = DurationFrom(100 * MILLI, 3600 * SECOND);

    /// The longest time that the service may stay silent, before its response begins and within it, or `none`. If the response to
    /// a request with a key does not come in time, its outcome is unknown. From 1ms to 24h.
    "upstream-timeout" LIMITS Route One "DURATION" Value("30s");
    upstream_timeout: Option<Duration> = DurationOrNone(MILLI, DAY);

    /// The longest time that connecting to the service may take, TLS included. After it, nothing was sent and the key is
    /// free. From 1ms to 10m.
    "upstream-connect-timeout" LIMITS Live One "DURATION" Value("5s");
    upstream_connect_timeout: Duration = DurationFrom(MILLI, 600 * SECOND);

    /// The time for which an idle connection to the service is kept; with `0s`, no connection is used twice. It must be less than
    /// the time after which the service closes idle connections (gunicorn 2 s, Node and uvicorn 5 s). Otherwise a request with a
    /// key may be sent on a connection that the service is just closing, and its outcome is unknown. At most 10m.
    "upstream-idle-timeout" LIMITS Live One "DURATION" Value("1s");
    upstream_idle_timeout: Duration = DurationFrom(Duration::ZERO, 600 * SECOND);

    /// The longest time that a command to the store may take before the sidecar checks the health of the store, and the longest
    /// time that this check may take. A store that fails the check counts as unreachable: requests with a key are refused at
    /// once until it answers again. On PostgreSQL, a connection whose command gets no reply in this time is also given up, and
    /// a slow server gets smaller batches of commands, so that they finish in time. From 10ms to 1m.
    "store-timeout" LIMITS Service One "DURATION" Value("2s");
    store_timeout: Duration = DurationFrom(10 * MILLI, 60 * SECOND);

    /// The longest time that running requests may take to finish after SIGTERM. Requests that still run are then cut off, and
    /// their outcome is unknown. At most 24h.
    "drain-timeout" LIMITS Live One "DURATION" Value("30s");
    drain_timeout: Duration = DurationFrom(Duration::ZERO, DAY);

    /// The time for which requests are still accepted after SIGTERM, while /readyz already responds with 503. Set it to the time
    /// that load balancers need to notice and to stop sending requests. The drain-timeout begins after it. At most 10m.
    "shutdown-delay" LIMITS Live One "DURATION" Value("0s");
    shutdown_delay: Duration = DurationFrom(Duration::ZERO, 600 * SECOND);

    /// The form of the log on the standard error: `text`, or `json` with one object a line.
    "log-format" TELEMETRY Service One "text|json" Value("text");
    log_format: LogFormat = OneOf(&[("text", LogFormat::Text), ("json", LogFormat::Json)]);

    /// Sends traces and metrics to the collector at this address, over OTLP (HTTP with Protocol Buffers). The path of each signal
    /// is added: /v1/traces, /v1/metrics.
    "otlp-endpoint" TELEMETRY Service One "URL" Nothing("nothing is sent");
    otlp_endpoint: OtlpEndpoint = otlp::endpoint;

    /// Header fields for the collector, such as `authorization=Bearer%20TOKEN`: NAME=VALUE, several separated by commas, values
    /// in percent-encoding. In the environment only, as ONCEGATE_OTLP_HEADERS.
    "otlp-headers" TELEMETRY Secret One "NAME=VALUE,…" Nothing("");
    otlp_headers: OtlpHeaders = otlp::headers;

    /// The data that is sent to the collector: `traces`, `metrics`, or both.
    "otlp-signals" TELEMETRY Service Many "traces|metrics" Value("traces");
    otlp_signals: Signal = OneOf(&[("traces", Signal::Traces), ("metrics", Signal::Metrics)]);

    /// The interval in which metrics are sent to the collector. From 1s to 1h.
    "otlp-metrics-interval" TELEMETRY Service One "DURATION" Value("60s");
    otlp_metrics_interval: Duration = DurationFrom(SECOND, 3600 * SECOND);

    /// The name of this sidecar in traces and metrics that are sent (`service.name`).
    "otlp-service-name" TELEMETRY Service One "NAME" Nothing("`oncegate`, or with `service` its value and `-oncegate`");
    otlp_service_name: String = scope::not_empty;

    /// Further attributes of this process in traces and metrics that are sent, such as
    /// `deployment.environment.name=production`. Values in percent-encoding.
    "otlp-resource-attributes" TELEMETRY Service Many "NAME=VALUE,…" Nothing("");
    otlp_resource_attributes: (String, String) = otlp::attribute;

    /// The share of new traces that are recorded, from 0 to 1. A request that belongs to a trace already is recorded if its
    /// client recorded it, but only if the client is one of trusted-proxies; for all others this ratio decides.
    "trace-sample-ratio" TELEMETRY Live One "RATIO" Value("1");
    trace_sample_ratio: SampleRatio = Ratio;
}

impl Values {
    /// The values of all settings that have a default.
    pub(crate) fn defaults() -> Self {
        let mut values = Self::default();
        for setting in SETTINGS {
            if let Value(text) = setting.default {
                let set = (setting.set)(&mut values, &Raw::Text(text.to_owned()), &Source::Default);
                debug_assert!(set.is_ok(), "{}: {set:?}", setting.name);
            }
        }
        values
    }
}

fn read_one<R: Reader>(raw: &Raw, reader: &R) -> Result<R::Value, Vec<String>> {
    match raw {
        Raw::Text(text) => reader.read(text).map_err(|error| vec![error]),
        Raw::List(_) => Err(vec!["a list, but one value is expected".to_owned()]),
    }
}

fn read_many<R: Reader>(raw: &Raw, reader: &R) -> Result<Vec<R::Value>, Vec<String>> {
    let mut values = Vec::new();
    let mut errors = Vec::new();
    let mut add = |text: &str| match reader.read(text) {
        Ok(value) => values.push(value),
        Err(error) => errors.push(error),
    };
    match raw {
        Raw::Text(text) => text.split(',').for_each(|text| add(text.trim())),
        Raw::List(texts) => texts.iter().for_each(|text| add(text)),
    }
    if errors.is_empty() { Ok(values) } else { Err(errors) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_default_can_be_read_and_every_name_is_used_once() {
        let values = Values::defaults();
        for (at, setting) in SETTINGS.iter().enumerate() {
            let has_default = matches!(setting.default, Value(_));
            assert_eq!(values.source(setting.name).is_some(), has_default, "{}", setting.name);
            let again = SETTINGS.iter().skip(at + 1).find(|other| {
                other.name == setting.name
                    || other.variable() == setting.variable()
                    || other.flag().is_some() && other.flag() == setting.flag()
            });
            assert!(again.is_none(), "{}", setting.name);
            assert!(
                !setting.help.trim().is_empty() && setting.help.trim().ends_with('.'),
                "{}",
                setting.name
            );
        }
    }

    #[test]
    fn a_list_names_every_value_that_is_wrong() {
        let set = Setting::named("methods").unwrap().set;
        let mut values = Values::default();
        let errors = set(&mut values, &Raw::Text("POST, get,HEAD".to_owned()), &Source::Default).unwrap_err();
        assert_eq!(errors.len(), 2, "{errors:?}");
        set(&mut values, &Raw::Text("POST, PUT".to_owned()), &Source::Default).unwrap();
        assert_eq!(values.methods.unwrap().value, [Method::POST, Method::PUT]);
    }
}
