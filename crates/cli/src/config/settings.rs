//! Every setting, declared once: its name, its reader, where it may be said, its default and its help.
//!
//! Flags, environment, file and routes are four ways to the same table; none of them knows a setting by itself.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use http::header::HeaderName;
use http::uri::PathAndQuery;
use http::{Method, StatusCode};
use oncegate_core::fingerprint::JsonPointer;
use oncegate_core::{OnAbandoned, ServiceName};
use oncegate_http::{
    AuthorityRole, CallerScope, CompletedBy, KeyFormat, KeyScope, KeySyntax, PathCase, Profile, ServerErrors,
    StoreOutage, TrailingSlash,
};

use super::problem::Source;
use super::trusted::{self, TrustedProxies};
use super::units::{self, AdminToken, Origin, StoreChoice, Upstream, UpstreamProtocol};
use crate::access_log::AccessLogFormat;

/// One setting, as flags, environment and file see it.
pub(crate) struct Setting {
    /// Its key in the file; the flag and the variable are derived from it.
    pub(crate) name: &'static str,
    /// What stands for its value in help texts.
    pub(crate) value: &'static str,
    /// Its help.
    pub(crate) help: &'static str,
    pub(crate) default: Fallback,
    pub(crate) place: Place,
    pub(crate) shape: Shape,
    pub(crate) heading: &'static str,
    /// Reads a value and puts it in its place.
    pub(crate) set: fn(&mut Values, &Raw, &Source) -> Result<(), Vec<String>>,
}

/// Where a setting may be said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Everywhere, and each route may say otherwise.
    Route,
    /// Everywhere, once for the whole sidecar; only a start can change it.
    Service,
    /// Everywhere, once for the whole sidecar; a reload changes it.
    Live,
    /// As flag or in the environment: it is about the file itself.
    Start,
    /// In the environment only: command lines and configuration files are seen by many.
    Secret,
}

/// What a value looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// One value.
    One,
    /// Several values: an array in the file, commas or repetition elsewhere.
    Many,
    /// Yes or no; the bare flag means yes.
    Switch,
}

/// What holds where nobody says anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fallback {
    /// This value.
    Value(&'static str),
    /// What the profile says; for the help, what `ietf` says.
    Profile(&'static str),
    /// Nothing; for the help, what that means, where it needs words.
    Nothing(&'static str),
}

/// A value before it is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Raw {
    /// One text; several values have commas between them.
    Text(String),
    /// Several texts.
    List(Vec<String>),
}

/// A value that was read, as it was written, and by whom.
#[derive(Clone, Debug)]
pub(crate) struct Given<T> {
    pub(crate) value: T,
    pub(crate) source: Source,
}

impl Setting {
    /// The flag without its dashes, where there is one. A list's flag takes one value at a time, and is named for it.
    pub(crate) fn flag(&self) -> Option<String> {
        match self.place {
            Place::Secret => None,
            _ if self.name == "stored-headers" => Some("stored-header".to_owned()),
            _ => Some(self.name.replace('.', "-")),
        }
    }

    /// The environment variable.
    pub(crate) fn variable(&self) -> String {
        format!("ONCEGATE_{}", self.name.replace(['-', '.'], "_").to_ascii_uppercase())
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
        $field:ident: $type:ty = $read:path;
    )+) => {
        /// Every setting.
        pub(crate) static SETTINGS: &[Setting] = &[$(Setting {
            name: $name,
            value: $value,
            help: concat!($($help),+),
            default: $default,
            place: Place::$place,
            shape: Shape::$shape,
            heading: heading::$heading,
            set: |values, raw, source| {
                let value = settings!(@read $shape)(raw, $read)?;
                values.$field = Some(Given { value, source: source.clone() });
                Ok(())
            },
        }),+];

        /// The values of all settings, as far as they are said.
        #[derive(Clone, Debug, Default)]
        pub(crate) struct Values {
            $(pub(crate) $field: Option<Given<settings!(@type $shape $type)>>,)+
        }

        impl Values {
            /// Where the setting of this name was said.
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
    pub(super) const SERVICE: &str = "Where it listens and what it protects";
    pub(super) const KEYS: &str = "Keys";
    pub(super) const RECORDS: &str = "Records and outcomes";
    pub(super) const REQUESTS: &str = "What makes two requests the same";
    pub(super) const BROWSERS: &str = "Browsers on other origins";
    pub(super) const LIMITS: &str = "Limits and time-outs";
}

use Fallback::{Nothing, Profile as ByProfile, Value};

settings! {
    /// Reads settings from this TOML file, by their names in docs/reference/configuration.md; [[route]] tables with a
    /// path change them per route. Flags win over the environment, the environment over the file.
    "config" SERVICE Start One "FILE" Nothing("");
    config: PathBuf = units::path;

    /// The service to protect: scheme, host and port. Requests keep their path.
    "to" SERVICE Live One "URL" Nothing("");
    to: Upstream = units::upstream;

    /// Listens for requests on this address.
    "listen" SERVICE Service One "ADDR" Value("127.0.0.1:8080");
    listen: SocketAddr = units::address;

    /// Serves /livez, /readyz, /metrics and the operator's API on this address. An address that others can reach needs
    /// an admin token.
    "admin" SERVICE Service One "ADDR" Value("127.0.0.1:9090");
    admin: SocketAddr = units::address;

    /// Reads the admin token, at least 16 characters, from this file. Or put it into the environment variable
    /// ONCEGATE_ADMIN_TOKEN.
    "admin-token-file" SERVICE Live One "FILE" Nothing("no token, for loopback addresses only");
    admin_token_file: PathBuf = units::path;

    /// The admin token, at least 16 characters: in the environment only, as ONCEGATE_ADMIN_TOKEN.
    "admin-token" SERVICE Secret One "TOKEN" Nothing("");
    admin_token: AdminToken = units::admin_token;

    /// Keeps records in this directory, which one process owns at a time; on a server that any number of sidecars share,
    /// with `postgres://USER@HOST/DATABASE` or `redis://HOST`; on one of these with answers kept in front of it, with
    /// `cached(cache=STORE,store=STORE)`; or in memory with `memory:`, where nothing survives a restart. A relative path in
    /// the configuration file, also one that a URL names, is relative to the directory of that file. A URL with a password
    /// belongs into the environment. How URLs are written: docs/reference/configuration.md.
    "store" SERVICE Service One "DIR|URL|memory:" Value("./oncegate-data");
    store: StoreChoice = units::store;

    /// Does not start with a new, empty store: a store in a directory has to be there already. Set it once the first
    /// start has created the store: a mistyped or unmounted directory is then an error, and does not execute again what
    /// the real store has answered.
    "store-must-exist" SERVICE Service Switch "BOOL" Value("false");
    store_must_exist: bool = units::boolean;

    /// The name of the service that is protected, 1 to 100 ASCII characters without spaces. Sidecars with the same name share
    /// keys; those of sidecars with other names on the same store are other keys, though operators see the records of all. A
    /// store on a server needs a name, because other services may use it as well.
    "service" SERVICE Service One "NAME" Nothing("none, for a store that one process owns");
    service: ServiceName = units::service;

    /// The most memory in which a store in a directory keeps pages of its file. What does not fit is read again: give it
    /// more where there are millions of records. At most 1024GiB.
    "store-cache" SERVICE Service One "SIZE" Value("64MiB");
    store_cache: usize = units::store_cache;

    /// The most records that a store in a directory or in memory holds, those past their retention included until they are
    /// purged. A request with one key more is refused with 503 `store-unavailable`; keys that are recorded are still answered.
    "max-records" SERVICE Service One "N" Nothing("no limit but the disk; in memory, 10000000");
    max_records: u64 = units::max_records;

    /// The most bytes that the records of a store in a directory or in memory have together; beyond it, new keys are refused as
    /// with max-records. The directory takes two to three times as much.
    "max-store-bytes" SERVICE Service One "SIZE" Nothing("no limit but the disk; in memory, 1GiB");
    max_store_bytes: u64 = units::max_store_bytes;

    /// Speaks TLS on the listening address with this certificate chain (PEM). Needs --tls-key.
    "tls-cert" SERVICE Live One "FILE" Nothing("no TLS");
    tls_cert: PathBuf = units::path;

    /// The private key of the certificate (PEM).
    "tls-key" SERVICE Live One "FILE" Nothing("");
    tls_key: PathBuf = units::path;

    /// How the service is spoken to: `http1`, `http2` (over http with prior knowledge), or `auto`: HTTP/1.1 over http,
    /// what TLS agrees on over https.
    "upstream-protocol" SERVICE Live One "auto|http1|http2" Value("auto");
    upstream_protocol: UpstreamProtocol = units::upstream_protocol;

    /// The hops in front whose X-Forwarded-*, X-Real-IP, Forwarded, X-Original-URL and the like are passed on: `loopback` (this
    /// machine), `private` (networks that the internet does not route, and this machine), an address, a network such as
    /// `10.0.0.0/8`, `any` or `none`; give it several times or with commas. Of everybody else these fields are taken off.
    "trusted-proxies" SERVICE Service Many "HOP,…" Value("loopback");
    trusted_proxies: TrustedProxies = trusted::trusted_proxies;

    /// Writes a line for each request with a key to the standard output, as `text` or as `json`: time, operation, status,
    /// outcome, duration, attempt, caller's mark and record, and never the key.
    "access-log" SERVICE Service One "off|text|json" Value("off");
    access_log: Option<AccessLogFormat> = units::access_log;

    /// How many threads serve requests.
    "threads" SERVICE Service One "N" Nothing("one per core");
    threads: usize = units::threads;

    /// How the protocol is spelled to clients: `ietf` (draft-ietf-httpapi-idempotency-key-header-07), `stripe`, or
    /// `seed` (common middleware). A profile sets the values below that are marked so; what you set wins over it.
    "profile" KEYS Route One "NAME" Value("ietf");
    profile: Profile = units::profile;

    /// How callers are told apart, so that one caller's key never meets another's: `header:NAME` or `cookie:NAME` (hashed;
    /// callers without it share one scope), `required-header:NAME` or `required-cookie:NAME` (requests without it are
    /// refused), several of these together, such as `required-header:x-tenant,cookie:sid`, or `single-tenant` (there is one
    /// caller only). An empty value counts as none. Where it is a credential, a rotated credential is another caller. While
    /// this is not set, requests that have another credential (a cookie, an API key) instead of Authorization are refused.
    "scope" KEYS Route Many "SCOPE" Nothing("`header:authorization`, and other credentials are refused");
    scope: CallerScope = units::scope;

    /// What the host that a request is for means for its key: `compare` (the same key with another host is refused),
    /// `scope` (each host has keys of its own: hosts are tenants), or `ignore` (clients reach the service under several
    /// names or ports, such as those of several sidecars). In lower case, without the ports 80 and 443.
    "authority" KEYS Route One "compare|scope|ignore" Value("compare");
    authority: AuthorityRole = units::authority;

    /// Refuses requests of covered methods that have no key.
    "require-key" KEYS Route Switch "BOOL" ByProfile("false");
    require_key: bool = units::boolean;

    /// The header field that carries the key.
    "key-header" KEYS Route One "NAME" ByProfile("Idempotency-Key");
    key_header: HeaderName = units::key_header;

    /// Builds the key of this member of JSON bodies, such as `/customer` (a JSON pointer), and of others that are given, in
    /// place of the header field, which is ignored: two requests of one caller with the same values are one operation,
    /// whatever key they send, or none. Needs a `scope` that each caller has to say, or `single-tenant`. Give it several
    /// times or with commas.
    "key.json" KEYS Route Many "POINTER" Nothing("the header field carries the key");
    key_json: JsonPointer = units::json_pointer;

    /// What a key is unique within, beside the caller: `endpoint` (method and path: elsewhere it is another key), or
    /// `caller` (elsewhere it is a mismatch).
    "key-scope" KEYS Route One "endpoint|caller" ByProfile("endpoint");
    key_scope: KeyScope = units::key_scope;

    /// How the field spells a key: `lenient` (bare or in quotes), or `strict` (in quotes only, as the draft says).
    "key-syntax" KEYS Route One "lenient|strict" ByProfile("lenient");
    key_syntax: KeySyntax = units::key_syntax;

    /// What a key must be: `any`, `uuid`, `ulid`, or `pattern:REGEX`, which the whole key must match.
    "key-format" KEYS Route One "FORMAT" Value("any");
    key_format: KeyFormat = units::key_format;

    /// The shortest key that is taken, in characters. From 1 to 255.
    "min-key-length" KEYS Route One "N" Value("1");
    min_key_length: usize = units::key_length;

    /// The longest key that is taken, in characters. From 1 to 255.
    "max-key-length" KEYS Route One "N" Value("255");
    max_key_length: usize = units::key_length;

    /// The header field that marks a replay.
    "replay-marker" KEYS Route One "NAME" ByProfile("Idempotent-Replayed");
    replay_marker: HeaderName = units::replay_marker;

    /// Where the rules for keys are documented, such as https://developer.example.com/idempotency: refusals link to it.
    "documentation" KEYS Route One "URL" Nothing("no link");
    documentation: String = units::documentation;

    /// The methods that are covered; requests of others pass through. In a [[route]], the methods that it matches.
    "methods" KEYS Route Many "METHOD,…" ByProfile("POST,PATCH");
    methods: Method = units::method;

    /// Whether a slash at the end of a path makes it another path: `ignore` (`/orders/` is `/orders`), or `exact`. Counts for
    /// the choice of the route and of the record; the service gets the path as it was sent.
    "trailing-slash" KEYS Route One "ignore|exact" Value("ignore");
    trailing_slash: TrailingSlash = units::trailing_slash;

    /// Whether upper and lower case make two paths of the fixed parts of a route's path: `ignore` (`/Orders/7` is
    /// `/orders/7`), or `exact`. What a parameter such as `{id}` matches keeps its case. Counts as trailing-slash does.
    "path-case" KEYS Route One "ignore|exact" Value("ignore");
    path_case: PathCase = units::path_case;

    /// How long a request owns its key without a sign of life. It is renewed while the request runs, so this is how
    /// long a key stays blocked after a crash, not how long a request may take. From 100ms to 1h.
    "lease" RECORDS Route One "DURATION" Value("30s");
    lease: Duration = units::lease;

    /// How long an answer is kept and replayed, counted from its completion. From 1s to 400d.
    "retention" RECORDS Route One "DURATION" ByProfile("24h");
    retention: Duration = units::retention;

    /// How long a duplicate waits for the answer of the request that is being processed, before it is told to come
    /// again. At most 1h.
    "wait" RECORDS Route One "DURATION" Value("2s");
    wait: Duration = units::wait;

    /// What happens to a key whose owner crashed: `park` (the outcome is unknown until an operator says: at most one
    /// execution), `reexecute` (the next request with the key executes: at least one), or `reconcile` (the service is
    /// asked; see `reconcile`).
    "on-abandoned" RECORDS Route One "park|reexecute|reconcile" Value("park");
    on_abandoned: OnAbandoned = units::on_abandoned;

    /// Who completes the record of a request: `sidecar` (with the service's answer, after it), or `upstream` (the service
    /// itself, with `SELECT oncegate.complete(record, token)` in the transaction that holds its effect, so that both commit
    /// or neither does). `upstream` needs a store on PostgreSQL, and executes again what was cut off before it committed.
    "completion" RECORDS Route One "sidecar|upstream" Value("sidecar");
    completion: CompletedBy = units::completion;

    /// Where the service is asked what became of a request whose owner crashed, such as `/oncegate/outcome`: a path,
    /// which gets a GET with the key and the caller's credentials, and has to answer as docs/reference/http.md says.
    /// For on-abandoned = reconcile; and for completion = upstream, where it is asked for the answer of a request that it
    /// completed without one.
    "reconcile" RECORDS Route One "PATH" Nothing("");
    reconcile: PathAndQuery = units::reconcile;

    /// For how long the service is asked, again and again, until it says what became of the request. After that the
    /// outcome is unknown until an operator says; under completion = upstream, the next retry asks again. From 10ms to 10m.
    "reconcile-timeout" RECORDS Route One "DURATION" Value("10s");
    reconcile_timeout: Duration = units::reconcile_timeout;

    /// What is done with answers from 500 to 599: `replay` (kept: the effect may have happened), or `release` (the key
    /// is free again: the service undoes everything before it answers so).
    "server-errors" RECORDS Route One "replay|release" ByProfile("replay");
    server_errors: ServerErrors = units::server_errors;

    /// One more status of answers that free the key, such as 400 and 422: a request that was refused can be corrected and
    /// sent again under its key. The service must have done nothing when it answers so. From 400 to 599; 401, 403, 407, 408,
    /// 421, 425 and 429 always free the key. Give it several times or with commas.
    "release-statuses" RECORDS Route Many "STATUS" Nothing("by profile: 400 in stripe, none in the others");
    release_statuses: StatusCode = units::release_status;

    /// What happens to requests with a key while the store is out of reach: `closed` (503, nothing is executed), or
    /// `open` (executed WITHOUT protection, marked and counted). A store that was reached and is full takes no new keys in
    /// either case.
    "store-outage" RECORDS Route One "closed|open" Value("closed");
    store_outage: StoreOutage = units::store_outage;

    /// One more header field of answers that is stored and replayed; give it several times or with commas. Fields such
    /// as Content-Type, Location and ETag always are.
    "stored-headers" RECORDS Route Many "NAME" Nothing("");
    stored_headers: HeaderName = units::stored_header;

    /// Leaves this member out when JSON bodies are compared, such as `/meta/timestamp` (a JSON pointer); give it
    /// several times or with commas. A body of which nothing would be left is compared as a whole.
    "fingerprint.exclude" REQUESTS Route Many "POINTER" Nothing("");
    fingerprint_exclude: JsonPointer = units::excluded;

    /// Compares only this member of JSON bodies, and others that are included; give it several times or with commas. Case
    /// counts. A body that has none of them is compared as a whole.
    "fingerprint.include" REQUESTS Route Many "POINTER" Nothing("all members");
    fingerprint_include: JsonPointer = units::json_pointer;

    /// Compares bodies byte by byte, without reading JSON, forms and multipart.
    "fingerprint.raw" REQUESTS Route Switch "BOOL" Value("false");
    fingerprint_raw: bool = units::boolean;

    /// A header field that makes two requests different; give it several times or with commas.
    "fingerprint.headers" REQUESTS Route Many "NAME" Nothing("");
    fingerprint_headers: HeaderName = units::seen_header;

    /// Lets pages of this origin, such as `https://shop.example`, or of every origin (`*`), read answers: the fields
    /// Access-Control-* are written on replays, on refusals and on answers of the service that have none, and preflight
    /// requests of these origins are answered. Give it several times or with commas.
    "cors.origins" BROWSERS Route Many "ORIGIN" Nothing("browsers of other origins read nothing");
    cors_origins: Origin = units::cors_origin;

    /// One more header field that pages may read, besides those that are always readable and those of Oncegate (the key, the
    /// mark of a replay, Idempotency-Status, Retry-After). Give it several times or with commas.
    "cors.expose" BROWSERS Route Many "NAME" Nothing("");
    cors_expose: HeaderName = units::header_name;

    /// One header field that pages may send. Give it several times or with commas.
    "cors.headers" BROWSERS Route Many "NAME" Nothing("those that they ask for");
    cors_headers: HeaderName = units::header_name;

    /// One method that pages may use. Give it several times or with commas.
    "cors.methods" BROWSERS Route Many "METHOD" Nothing("the one that they ask for");
    cors_methods: Method = units::cors_method;

    /// Lets pages send cookies and other credentials of the browser. Not with the origin `*`.
    "cors.credentials" BROWSERS Route Switch "BOOL" Value("false");
    cors_credentials: bool = units::boolean;

    /// How long a browser may remember the answer to a preflight request. At most 24h.
    "cors.max-age" BROWSERS Route One "DURATION" Value("1h");
    cors_max_age: Duration = units::cors_max_age;

    /// The largest body of a request with a key, such as 64KiB, 2MiB, 10MB or a number of bytes. Larger ones are
    /// refused with 413. Bodies without a key have no limit. At most 1GiB.
    "max-request-body" LIMITS Route One "SIZE" Value("2MiB");
    max_request_body: usize = units::request_body;

    /// How much the bodies of all requests with a key may hold together, from when they come in until the service has
    /// them. A request for whose body there is no room is refused with 503. At least as much as one body may be, and at
    /// most 1024GiB.
    "request-budget" LIMITS Service One "SIZE" Value("256MiB");
    request_budget: usize = units::request_budget;

    /// The largest body of an answer that is stored. A larger one reaches the first client whole and cannot be
    /// replayed. At most 64MiB.
    "max-response-body" LIMITS Route One "SIZE" Value("1MiB");
    max_response_body: usize = units::response_body;

    /// How much the bodies of all answers to requests with a key may hold together, until clients have taken them. A replay for
    /// which there is no room is refused with 503; and while there is none, nothing new is executed. At least as much as
    /// one stored answer may be, and at most 1024GiB.
    "response-budget" LIMITS Service One "SIZE" Value("256MiB");
    response_budget: usize = units::response_budget;

    /// The most requests with a key that are under way at the same time, until the service has answered them, also where
    /// the client has hung up. One more is refused with 503, and nothing is executed.
    "max-in-flight" LIMITS Service One "N" Value("2048");
    max_in_flight: usize = units::max_in_flight;

    /// The most requests with a key of one caller that are under way at the same time. All callers without a credential are
    /// one. It does not count where scope is `single-tenant`.
    "max-in-flight-per-caller" LIMITS Service One "N" Value("1024");
    max_in_flight_per_caller: usize = units::max_in_flight;

    /// The most requests without a key that are under way at the same time, until their answers have ended; and upgraded
    /// connections, such as WebSockets, until they end. One more is refused with 503.
    "max-in-flight-without-key" LIMITS Service One "N" Nothing("as max-connections, but at least 1024; fewer if the system's limit of open files leaves fewer");
    max_in_flight_without_key: usize = units::max_in_flight;

    /// The most connections of clients that are open at the same time. One more waits until another one ends.
    "max-connections" LIMITS Service One "N" Value("10000");
    max_connections: usize = units::max_connections;

    /// How long a client may take nothing of an answer that is there for it. Then its connection is closed, or with HTTP/2 the
    /// answer is given up. From 100ms to 1h.
    "write-timeout" LIMITS Service One "DURATION" Value("60s");
    write_timeout: Duration = units::write_timeout;

    /// How long the service may stay silent, before its answer begins and within it, or `none`. The outcome of a
    /// request with a key whose answer did not come in time is unknown.
    "upstream-timeout" LIMITS Route One "DURATION" Value("30s");
    upstream_timeout: Option<Duration> = units::upstream_timeout;

    /// How long a connection to the service may take to be made, TLS included. Nothing was sent then, and the key is free.
    "connect-timeout" LIMITS Live One "DURATION" Value("5s");
    connect_timeout: Duration = units::connect_timeout;

    /// How long a connection to the service is kept without a request; with `0s` none is used again. It has to be less than the
    /// time after which the service closes such a connection (gunicorn 2 s, Node and uvicorn 5 s). Otherwise a request with a
    /// key may be sent into one that is just being closed, and its outcome is unknown. At most 10m.
    "upstream-idle-timeout" LIMITS Live One "DURATION" Value("1s");
    upstream_idle_timeout: Duration = units::upstream_idle_timeout;

    /// How long the store may take for a command before it is asked whether it is well, and then to say so; on PostgreSQL
    /// also how long a command may go without an answer before its connection is given up. Commands that are sent together are
    /// fewer while PostgreSQL is slow, so that they are done in time. A store that does not say so is out of reach: requests
    /// with a key are refused at once until it answers. From 10ms to 1m.
    "store-patience" LIMITS Service One "DURATION" Value("2s");
    store_patience: Duration = units::store_patience;

    /// How long requests that run may take to end after SIGTERM. What still runs then is cut off, and its outcome is
    /// unknown.
    "drain-timeout" LIMITS Live One "DURATION" Value("30s");
    drain_timeout: Duration = units::drain_timeout;

    /// How long requests are still taken after SIGTERM, while /readyz says 503 already: as long as load balancers need to
    /// learn of it and to send nothing more. The drain-timeout begins after that. At most 10m.
    "shutdown-delay" LIMITS Live One "DURATION" Value("0s");
    shutdown_delay: Duration = units::shutdown_delay;
}

impl Values {
    /// Every setting that has a default, with it.
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

fn read_one<T>(raw: &Raw, read: fn(&str) -> Result<T, String>) -> Result<T, Vec<String>> {
    match raw {
        Raw::Text(text) => read(text).map_err(|error| vec![error]),
        Raw::List(_) => Err(vec!["a list, where one value is meant".to_owned()]),
    }
}

fn read_many<T>(raw: &Raw, read: fn(&str) -> Result<T, String>) -> Result<Vec<T>, Vec<String>> {
    let mut values = Vec::new();
    let mut errors = Vec::new();
    let mut add = |text: &str| match read(text) {
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
