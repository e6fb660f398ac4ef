//! Reads values as people write them: durations and sizes with units, addresses, URLs, names.
//!
//! The error of a reader names the text and the allowed values. The caller adds the source of the text.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use http::header::{HeaderName, HeaderValue};
use http::uri::{Authority, PathAndQuery, Scheme, Uri};
use http::{Method, StatusCode};
use oncegate_core::ServiceName;
use oncegate_core::fingerprint::JsonPointer;
use oncegate_http::{KeyFormat, Profile, Settings, ToolPolicies, ToolPolicy};
use oncegate_postgres::PostgresOptions;

use oncegate_redis::RedisOptions;

use crate::proxy::is_always_removed;
use crate::trace::SampleRatio;

use super::cached::{self, CachedChoice};
use super::problem::{did_you_mean, nearest};
use super::settings::Raw;
pub(crate) use super::store_url::{StoreUrl, safe_url};

type Read<T> = Result<T, String>;

pub(super) const MILLI: Duration = Duration::from_millis(1);
pub(super) const SECOND: Duration = Duration::from_secs(1);
pub(super) const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The kinds of stores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StoreChoice {
    /// In memory: nothing survives a restart.
    Memory,
    /// In this directory.
    Directory(PathBuf),
    /// In this PostgreSQL database.
    Postgres(StoreUrl),
    /// On Redis or Valkey.
    Redis(Box<RedisOptions>),
    /// A cache of responses before a store with the records.
    Cached(Box<CachedChoice>),
}

impl StoreChoice {
    /// Returns true if the store is on a server, which other services may use too.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self.store(), Self::Postgres(_) | Self::Redis(_))
    }

    /// The store that holds the records: the one behind the cache, if there is a cache.
    pub(crate) fn store(&self) -> &Self {
        match self {
            Self::Cached(cached) => &cached.store,
            _ => self,
        }
    }
}

impl fmt::Display for StoreChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory:"),
            Self::Directory(directory) => directory.display().fmt(f),
            Self::Postgres(url) => url.fmt(f),
            Self::Redis(options) => f.write_str(&options.shown()),
            Self::Cached(cached) => cached.fmt(f),
        }
    }
}

/// The service behind the sidecar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Upstream {
    pub(crate) scheme: Scheme,
    pub(crate) authority: Authority,
}

impl Upstream {
    pub(crate) fn host_and_port(&self) -> (&str, u16) {
        let default = if self.scheme == Scheme::HTTPS { 443 } else { 80 };
        (self.authority.host(), self.authority.port_u16().unwrap_or(default))
    }
}

impl fmt::Display for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme, self.authority)
    }
}

/// The protocol of requests to the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UpstreamProtocol {
    /// HTTP/1.1 without TLS; with TLS, the protocol that it negotiates.
    Auto,
    /// HTTP/1.1.
    Http1,
    /// HTTP/2; without TLS with prior knowledge.
    Http2,
}

/// The password of the admin API. It is shown nowhere.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct AdminToken(Box<str>);

impl AdminToken {
    pub(crate) const MIN: usize = 16;

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdminToken")
    }
}

/// Words of examples, of which the random tokens of a generator have none. Compared without regard to case.
const PLACEHOLDERS: [&str; 7] =
    ["REPLACE-WITH", "REPLACE_WITH", "REPLACE-ME", "REPLACE_ME", "CHANGE-ME", "CHANGE_ME", "CHANGEME"];

pub(crate) fn admin_token(text: &str) -> Read<AdminToken> {
    let text = text.trim();
    let length = text.chars().count();
    if length < AdminToken::MIN {
        return Err(format!(
            "the token has {length} characters; at least {} are needed, such as the output of `openssl rand -hex 32`",
            AdminToken::MIN
        ));
    }
    let words = text.to_ascii_uppercase();
    if PLACEHOLDERS.iter().any(|placeholder| words.contains(placeholder)) {
        return Err(
            "the token is a placeholder that was not replaced, and anybody can read it in an example; use the output of \
             `openssl rand -hex 32`"
                .to_owned(),
        );
    }
    if !text.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(
            "the token has a space or a character that is not ASCII, which a header field cannot contain"
                .to_owned(),
        );
    }
    Ok(AdminToken(text.into()))
}

pub(crate) fn boolean(text: &str) -> Read<bool> {
    match text {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(format!("{text:?} is neither true nor false")),
    }
}

/// The units of durations, in milliseconds.
pub(crate) const DURATION_UNITS: &[(&str, u64)] =
    &[("ms", 1), ("s", 1000), ("m", 60 * 1000), ("h", 60 * 60 * 1000), ("d", 24 * 60 * 60 * 1000)];

pub(crate) fn duration(text: &str) -> Read<Duration> {
    const ALLOWED: &str =
        "write a number and a unit (ms, s, m, h, d), such as \"500ms\", \"30s\", \"5m\", \"24h\", \"7d\"";
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let Ok(number) = number.parse::<u64>() else {
        return Err(format!("{text:?} is not a duration; {ALLOWED}"));
    };
    let found = DURATION_UNITS.iter().find(|(name, _)| *name == unit);
    let millis = match (found, unit) {
        (Some((_, of)), _) => number.checked_mul(*of),
        (None, "") if number == 0 => Some(0),
        (None, "") => return Err(format!("{text:?} has no unit; {ALLOWED}")),
        (None, _) => return Err(format!("{text:?} has the unknown unit {unit:?}; {ALLOWED}")),
    };
    millis.map(Duration::from_millis).ok_or_else(|| format!("{text:?} is too long; {ALLOWED}"))
}

/// A duration as [`duration`] reads it, in the largest unit that needs no fraction.
pub(crate) fn duration_text(duration: Duration) -> String {
    let millis = duration.as_millis();
    let units = [("d", 24 * 60 * 60 * 1000), ("h", 60 * 60 * 1000), ("m", 60 * 1000), ("s", 1000)];
    // A day is shown as 24h, the usual form of a retention.
    let found = units
        .into_iter()
        .find(|(unit, of)| millis >= *of && millis.is_multiple_of(*of) && !(*unit == "d" && millis == *of));
    match found {
        Some((unit, of)) => format!("{}{unit}", millis / of),
        None if millis == 0 => "0s".to_owned(),
        None => format!("{millis}ms"),
    }
}

/// A duration in its largest unit, which is exact enough for an operator.
pub(crate) fn rounded_duration_text(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let unit = [24 * 3600, 3600, 60].into_iter().find(|unit| seconds >= 2 * unit).unwrap_or(1);
    duration_text(Duration::from_secs(seconds / unit * unit))
}

pub(super) fn bounded(text: &str, min: Duration, max: Duration) -> Read<Duration> {
    let value = duration(text)?;
    if (min..=max).contains(&value) {
        return Ok(value);
    }
    Err(format!(
        "{text:?} is out of bounds; from {} to {} is allowed",
        duration_text(min),
        duration_text(max)
    ))
}

/// The units of sizes, in bytes. Their case does not count.
pub(crate) const SIZE_UNITS: &[(&str, u64)] = &[
    ("B", 1),
    ("KB", 1000),
    ("KiB", 1 << 10),
    ("MB", 1_000_000),
    ("MiB", 1 << 20),
    ("GB", 1_000_000_000),
    ("GiB", 1 << 30),
];

pub(crate) fn size(text: &str) -> Read<usize> {
    const ALLOWED: &str =
        "write a number and a unit (B, KB, KiB, MB, MiB, GB, GiB), such as \"64KiB\", \"2MiB\", \"10MB\"";
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let Ok(number) = number.parse::<usize>() else {
        return Err(format!("{text:?} is not a size; {ALLOWED}"));
    };
    let found = SIZE_UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit));
    let bytes = match (found, unit) {
        (Some((_, of)), _) => usize::try_from(*of).ok().and_then(|of| number.checked_mul(of)),
        (None, "") if number == 0 => Some(0),
        (None, "") => return Err(format!("{text:?} has no unit; {ALLOWED}; \"{text}B\" are {text} bytes")),
        (None, _) => return Err(format!("{text:?} has the unknown unit {unit:?}; {ALLOWED}")),
    };
    bytes.ok_or_else(|| format!("{text:?} is too large; {ALLOWED}"))
}

/// A size as [`size`] reads it, in the largest unit that needs no fraction.
pub(crate) fn size_text(bytes: u64) -> String {
    let units = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match units.into_iter().find(|(_, of)| bytes >= *of && bytes.is_multiple_of(*of)) {
        Some((unit, of)) => format!("{}{unit}", bytes / of),
        None => format!("{bytes} bytes"),
    }
}

/// Reads the share of traces that are recorded.
pub(crate) fn sample_ratio(text: &str) -> Read<SampleRatio> {
    let ratio = text.parse().ok().and_then(SampleRatio::new);
    ratio.ok_or_else(|| {
        format!("{text:?} is not a number from 0 to 1; write a share, such as \"0.05\" for one in twenty")
    })
}

pub(crate) fn address(text: &str) -> Read<SocketAddr> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    if let Some(port) = text.strip_prefix("localhost:").and_then(|port| port.parse().ok()) {
        return Ok(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port));
    }
    let port = text.strip_prefix(':').unwrap_or(text);
    if port.parse::<u16>().is_ok() {
        return Err(format!(
            "{text:?} has no host; write \"127.0.0.1:{port}\" for this machine only, or \"0.0.0.0:{port}\" for all machines that can reach it"
        ));
    }
    if text.trim_matches(['[', ']']).parse::<IpAddr>().is_ok() {
        return Err(format!(
            "{text:?} has no port; write IP:PORT, such as \"127.0.0.1:8080\" or \"[::1]:8080\""
        ));
    }
    Err(format!(
        "{text:?} is not an address to listen on; write IP:PORT, such as \"127.0.0.1:8080\", \"0.0.0.0:8080\" or \"[::1]:8080\""
    ))
}

/// Reads the admin address of a sidecar: an address, or the URL with it that the commands for operators take.
pub(crate) fn admin_address(text: &str) -> Read<SocketAddr> {
    match admin_url(text) {
        None => address(text),
        Some(Ok(address)) => Ok(address),
        Some(Err(why)) => Err(why),
    }
}

/// Returns true for a URL that only commands can use: with a host name, or with TLS, which the admin address does not have. A
/// sidecar cannot listen there.
pub(crate) fn is_admin_elsewhere(text: &str) -> bool {
    let Some((scheme, rest)) = text.split_once("://") else { return false };
    let is_authority = |authority: &Authority| {
        let (host, whole) = (authority.host(), authority.as_str());
        !host.is_empty()
            && !whole.contains('@')
            && (host.len() == whole.len() || authority.port_u16().is_some())
    };
    matches!(scheme, "http" | "https")
        && rest.strip_suffix('/').unwrap_or(rest).parse().is_ok_and(|authority| is_authority(&authority))
        && !matches!(admin_url(text), Some(Ok(_)))
}

/// The address in a URL of the admin address; `None` if the text is no URL.
fn admin_url(text: &str) -> Option<Read<SocketAddr>> {
    let (scheme, rest) = text.split_once("://")?;
    if text.contains('@') {
        // First of all, because the other error repeats the value.
        return Some(Err("the URL has a user name or a password; write only http://IP:PORT".to_owned()));
    }
    let none = || {
        format!(
            "{text:?} is not an address to listen on; write IP:PORT or http://IP:PORT, such as \"127.0.0.1:9090\". The admin address \
             itself has no TLS"
        )
    };
    let authority = rest.strip_suffix('/').unwrap_or(rest);
    // The default port of the scheme, as commands use it.
    let with_port =
        || authority.trim_matches(['[', ']']).parse().ok().map(|ip: IpAddr| SocketAddr::new(ip, 80));
    let address = if scheme == "http" { address(authority).ok().or_else(with_port) } else { None };
    Some(address.ok_or_else(none))
}

pub(crate) fn upstream(text: &str) -> Read<Upstream> {
    // First of all, because the other errors repeat the value.
    if text.contains('@') {
        return Err(
            "the URL has a user name or password; requests keep their own credentials, so write only \
             http://HOST:PORT or https://HOST:PORT"
                .to_owned(),
        );
    }
    let shown = shown_url(text);
    const ALLOWED: &str =
        "write http:// or https://, a host and, if needed, a port, such as \"http://127.0.0.1:3000\"";
    let Some((scheme, rest)) = text.split_once("://") else {
        let error = format!("{shown:?} has no scheme; {ALLOWED}");
        // A number alone is meant as a port and not as a host.
        let meant = match text.strip_prefix(':').unwrap_or(text).parse::<u16>() {
            Ok(port) => format!("http://127.0.0.1:{port}"),
            Err(_) => format!("http://{text}"),
        };
        return Err(match upstream(&meant) {
            Ok(_) => format!("{shown:?} has no scheme; did you mean {meant:?}?"),
            Err(_) => error,
        });
    };
    if !["http", "https"].contains(&scheme.to_ascii_lowercase().as_str()) {
        return Err(format!("{shown:?} has the scheme {scheme:?}; {ALLOWED}"));
    }
    let none = |_| format!("{shown:?} is not a URL; {ALLOWED}");
    let uri: Uri = text.parse().map_err(none)?;
    let (Some(scheme), Some(authority)) = (uri.scheme(), uri.authority()) else {
        return Err(format!("{shown:?} is not a URL; {ALLOWED}"));
    };
    let port = authority.as_str().strip_prefix(authority.host()).unwrap_or_default();
    let is_port_invalid = !port.is_empty() && authority.port_u16().is_none();
    if authority.host().is_empty() || rest.contains('#') || is_port_invalid {
        return Err(format!("{shown:?} is not a URL of a service; {ALLOWED}"));
    }
    if uri.path() != "/" || uri.query().is_some() {
        return Err(format!(
            "{shown:?} has a path or a query; requests keep their own path, so write only {:?}",
            format!("{scheme}://{authority}")
        ));
    }
    Ok(Upstream { scheme: scheme.clone(), authority: authority.clone() })
}

/// The prefixes of store URLs.
const SERVERS: [&str; 8] = [
    "postgres", "postgresql", "redis", "rediss", "redis-cluster", "rediss-cluster", "redis-sentinel",
    "rediss-sentinel",
];

pub(crate) fn store(text: &str) -> Read<StoreChoice> {
    if text.trim() != text {
        return Err("there is a space at the beginning or the end, which no store has; remove it".to_owned());
    }
    match text {
        "memory:" => Ok(StoreChoice::Memory),
        "" => Err("\"\" is not a directory; write a directory, or \"memory:\"".to_owned()),
        "memory" => {
            Err("\"memory\" could be a directory; write \"memory:\" for a store in memory, or \"./memory\""
                .to_owned())
        }
        "cached" => {
            Err("\"cached\" could be a directory; write \"cached(cache=…,store=…)\", or \"./cached\""
                .to_owned())
        }
        _ if cached::is_one(text) => Ok(StoreChoice::Cached(Box::new(cached::read(text)?))),
        _ if text.starts_with("postgres://") || text.starts_with("postgresql://") => {
            match PostgresOptions::from_url(text) {
                Ok(_) => Ok(StoreChoice::Postgres(StoreUrl::new(text))),
                Err(error) => Err(format!("{:?}: {error}", safe_url(text))),
            }
        }
        _ if RedisOptions::is_url(text) => match RedisOptions::from_url(text) {
            Ok(options) => Ok(StoreChoice::Redis(Box::new(options))),
            Err(error) => Err(error.to_string()),
        },
        // A URL is not meant as a directory. It may contain a password.
        _ if text.contains("://") => {
            let shown = safe_url(text);
            let scheme = text.split("://").next().unwrap_or_default();
            let meant = match nearest(scheme, SERVERS.iter().copied().chain(["memory"])) {
                Some("memory") => "; did you mean \"memory:\"?".to_owned(),
                Some(server) => format!("; did you mean \"{server}://…\"?"),
                None => String::new(),
            };
            Err(format!(
                "{shown:?} is not the URL of a store; the stores are a directory, \"postgres://…\", \"redis://…\", \"cached(…)\", and \"memory:\"{meant}"
            ))
        }
        _ => match looks_like_no_directory(text) {
            Some(what) => Err(what),
            None => Ok(StoreChoice::Directory(text.into())),
        },
    }
}

/// The reason why this text is more likely a mistyped store than a directory. A wrong directory would be an empty store,
/// which executes again every request that the real store has answered. The text after the scheme may be a password, so it
/// is not repeated.
fn looks_like_no_directory(text: &str) -> Option<String> {
    const STORES: &str =
        "the stores are a directory, \"postgres://…\", \"redis://…\", \"cached(…)\", and \"memory:\";";
    const OTHERWISE: &str = "a directory with this name is written with \"./\" in front";
    if is_libpq_string(text) {
        return Some(format!(
            "this is a connection string of words (host=… dbname=…), which may have a password; write it as a URL, \
             \"postgres://USER:PASSWORD@HOST:PORT/DATABASE\"; {OTHERWISE}"
        ));
    }
    let first = text.split('/').next().unwrap_or_default();
    let lower = first.to_ascii_lowercase();
    // `cashed(cache=…,store=DIR)`; a slash may stand in one of its parts.
    if lower.contains('(') && (lower.starts_with("cached") || text.contains('=') || text.ends_with(')')) {
        return Some(format!("this could be a cached store; write \"cached(cache=…,store=…)\"; {OTHERWISE}"));
    }
    if SERVERS.contains(&lower.as_str()) && first == text {
        return Some(format!("\"{text}\" could be a directory; write \"{lower}://…\"; {OTHERWISE}"));
    }
    // A forgotten colon: `redis//localhost`.
    if let Some((scheme, _)) = text.split_once("//")
        && SERVERS.contains(&scheme.to_ascii_lowercase().as_str())
    {
        let meant = scheme.to_ascii_lowercase();
        return Some(format!(
            "\"{meant}//…\" is a server without a colon; did you mean \"{meant}://…\"? {OTHERWISE}"
        ));
    }
    let (scheme, _) = lower.split_once(':')?;
    let is_scheme = |text: &str| {
        text.starts_with(|c: char| c.is_ascii_alphabetic())
            && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
    };
    if !is_scheme(scheme) {
        return None;
    }
    let meant = match nearest(scheme, SERVERS.iter().copied().chain(["memory"])) {
        Some("memory") => "did you mean \"memory:\"?".to_owned(),
        Some(server) => format!("did you mean \"{server}://…\"?"),
        None => STORES.to_owned(),
    };
    let written = first.split(':').next().unwrap_or_default();
    Some(format!("\"{written}:…\" is neither a store nor a directory; {meant} {OTHERWISE}"))
}

/// Returns true for a connection string of libpq in its form of words, such as `host=db dbname=orders`.
fn is_libpq_string(text: &str) -> bool {
    const WORDS: [&str; 13] = [
        "host", "hostaddr", "port", "dbname", "user", "password", "passfile", "service", "sslmode",
        "sslcert", "options", "connect_timeout", "application_name",
    ];
    let names = text.split_whitespace().filter_map(|word| Some(word.split_once('=')?.0.to_ascii_lowercase()));
    names.take(50).any(|name| WORDS.contains(&&*name))
}

/// A store as logs may show it: without the part of a URL before its host.
pub(crate) fn without_login(text: &str) -> String {
    if cached::is_one(text) {
        return cached::shown(text);
    }
    let Some((scheme, rest)) = text.split_once("://") else { return text.to_owned() };
    let (authority, path) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
    match authority.rsplit_once('@') {
        Some((_, hosts)) => format!("{scheme}://…@{hosts}{path}"),
        None => text.to_owned(),
    }
}

/// A URL as errors and logs may show it: without its login, and with `?…` instead of its query or fragment.
pub(crate) fn shown_url(text: &str) -> String {
    let (scheme, rest) = text.find("://").map_or(("", text), |at| text.split_at(at + 3));
    let (login, place) = rest.rsplit_once('@').map_or(("", rest), |(_, place)| ("…@", place));
    match place.split_once(['?', '#']) {
        Some((place, _)) => format!("{scheme}{login}{place}?…"),
        None => format!("{scheme}{login}{place}"),
    }
}

/// The value of a setting as anyone may see it: a URL without its login and its parameters. What is left out shows as `…`, with
/// which the value cannot be used.
fn without_secrets(setting: &super::Setting, text: &str) -> String {
    // These are sent to clients as they are.
    let is_public = ["documentation", "problem-base-url"].contains(&setting.name);
    if is_public || !setting.value.contains("URL") || !text.contains("://") {
        return text.to_owned();
    }
    if cached::is_one(text) {
        let shown = cached::shown(text);
        return if shown == text { shown } else { format!("{shown}…") };
    }
    let shown = without_login(&safe_url(text));
    let is_cut = text
        .split_once("://")
        .is_some_and(|(_, rest)| rest.rsplit_once('@').map_or(rest, |(_, place)| place).contains(['?', '#']));
    if is_cut { format!("{shown}?…") } else { shown }
}

/// The value of a setting as anyone may see it: [`without_secrets`]. Of a command only its program and the names in
/// `NAME=value` are shown, because any argument may be a secret.
pub(crate) fn shown_value(setting: &super::Setting, raw: &Raw) -> Raw {
    if setting.name != "seal-keys-command" {
        return match raw {
            Raw::Text(text) => Raw::Text(without_secrets(setting, text)),
            Raw::List(texts) => Raw::List(texts.iter().map(|text| without_secrets(setting, text)).collect()),
        };
    }
    let shown = |(at, word): (usize, &str)| match at {
        0 => shown_program(word),
        _ => shown_argument(word),
    };
    match raw {
        Raw::Text(text) => Raw::Text(text.split(',').enumerate().map(shown).collect::<Vec<_>>().join(",")),
        Raw::List(words) => Raw::List(words.iter().map(String::as_str).enumerate().map(shown).collect()),
    }
}

/// The program of a command as anyone may see it: a path as it is. Of anything else, such as a whole command line in one word,
/// only the name of its first file.
pub(crate) fn shown_program(word: &str) -> String {
    let is_path = |text: &str| {
        let may_be_in_one = |char: char| char.is_alphanumeric() || "/._-+~".contains(char);
        !text.is_empty() && text.chars().all(may_be_in_one)
    };
    if is_path(word) {
        return word.to_owned();
    }
    let first = word.split_whitespace().next().unwrap_or_default();
    match first.rsplit('/').next() {
        Some(name) if first != word && is_path(first) && is_path(name) => format!("{name} {LEFT_OUT}"),
        _ => LEFT_OUT.to_owned(),
    }
}

/// An argument of a command as anyone may see it: `NAME=…` if it sets a variable of the environment. The text before a `=` is a
/// name only if it is written like one: the `=` may also be in a URL, in a script, or at the end of base64.
fn shown_argument(word: &str) -> String {
    let is_name = |name: &str| {
        name.starts_with(|first: char| first.is_ascii_uppercase() || first == '_')
            && name.chars().all(|char| char.is_ascii_uppercase() || char.is_ascii_digit() || char == '_')
    };
    match word.split_once('=') {
        Some((name, value)) if is_name(name) && !value.trim_start_matches('=').is_empty() => {
            format!("{name}={LEFT_OUT}")
        }
        _ => LEFT_OUT.to_owned(),
    }
}

/// An error about a value without the login and the parameters of a URL in it. The value may stand at the wrong setting, whose
/// errors repeat what they get.
pub(crate) fn without_logins(setting: &super::Setting, raw: &Raw, error: String) -> String {
    let texts = match raw {
        Raw::Text(text) => std::slice::from_ref(text),
        Raw::List(texts) => texts,
    };
    let mut error = error;
    for (_, rest) in texts.iter().filter_map(|text| text.split_once("://")) {
        let mut hide = |secret: &str| {
            for written in [secret.to_owned(), secret.escape_debug().to_string()] {
                error = error.replace(&written, LEFT_OUT);
            }
        };
        let (login, place) = rest.rsplit_once('@').unwrap_or(("", rest));
        if !login.is_empty() {
            hide(&format!("{login}@"));
        }
        if let Some((_, parameters)) = place.split_once('?')
            && !setting.value.contains("URL")
            && !parameters.is_empty()
        {
            hide(parameters);
        }
    }
    error
}

/// Stands for what is not shown. A value with it cannot be used.
pub(crate) const LEFT_OUT: &str = "…";

pub(crate) fn path(text: &str) -> Read<PathBuf> {
    if text.is_empty() { Err("\"\" is not a file".to_owned()) } else { Ok(text.into()) }
}

/// A profile: a shipped one, or a file.
#[derive(Clone, Debug)]
pub(crate) enum ProfileChoice {
    Shipped(Box<Profile>),
    File(PathBuf),
}

pub(crate) fn profile(text: &str) -> Read<ProfileChoice> {
    if text.ends_with(".toml") {
        return Ok(ProfileChoice::File(text.into()));
    }
    let shipped = Profile::named(text).map(|profile| ProfileChoice::Shipped(Box::new(profile)));
    shipped.ok_or_else(|| {
        let hint = if text.contains(['/', '.']) { "; the name of a file ends with .toml" } else { "" };
        format!("{}{hint}", not_one_of(text, &Profile::names()))
    })
}

/// The name of a parameter in a query.
pub(crate) fn parameter(text: &str) -> Read<String> {
    if text.is_empty() { Err("\"\" is not the name of a parameter".to_owned()) } else { Ok(text.to_owned()) }
}

/// The name of a tool, or the beginning of one and a star.
pub(crate) fn tool(text: &str) -> Read<String> {
    ToolPolicies::default()
        .with(ToolPolicy::ReadOnly, [text])
        .map(|_| text.to_owned())
        .map_err(|error| error.to_string())
}

pub(crate) fn key_member(text: &str) -> Read<JsonPointer> {
    let pointer = json_pointer(text)?;
    let checked = Settings::default().with_key_members([pointer.clone()]);
    checked.map(|_| pointer).map_err(|error| error.to_string())
}

pub(crate) fn service(text: &str) -> Read<ServiceName> {
    ServiceName::new(text).map_err(|error| format!("{text:?} is not the name of a service: {error}"))
}

pub(crate) fn header_name(text: &str) -> Read<HeaderName> {
    text.parse().map_err(|_| {
        format!("{text:?} is not the name of a header field; letters, digits and dashes are allowed")
    })
}

/// Reads the name of a field by which requests are told apart, which must not be one that the sidecar removes.
pub(crate) fn seen_header(text: &str) -> Read<HeaderName> {
    let name = header_name(text)?;
    if is_always_removed(&name) {
        return Err(format!(
            "the sidecar removes the header field {name} from every request, because it belongs to one connection or only the \
             sidecar sends it; name another field"
        ));
    }
    Ok(name)
}

pub(crate) fn key_header(text: &str) -> Read<HeaderName> {
    let name = seen_header(text)?;
    Settings::default().with_key_headers([name.clone()]).map_err(|error| error.to_string())?;
    Ok(name)
}

pub(crate) fn stored_header(text: &str) -> Read<HeaderName> {
    let name = header_name(text)?;
    match Settings::default().with_stored_headers([name.clone()]) {
        Ok(_) => Ok(name),
        Err(error) => Err(error.to_string()),
    }
}

pub(crate) fn replay_marker(text: &str) -> Read<HeaderName> {
    let name = header_name(text)?;
    Settings::default().with_replay_marker(name.clone()).map_err(|error| error.to_string())?;
    Ok(name)
}

pub(crate) fn documentation(text: &str) -> Read<String> {
    Settings::default().with_documentation(text).map_err(|error| error.to_string())?;
    Ok(text.to_owned())
}

pub(crate) fn problem_base_url(text: &str) -> Read<String> {
    Settings::default().with_problem_base_url(text).map_err(|error| error.to_string())?;
    Ok(text.to_owned())
}

/// The classes of statuses that stand for all of theirs.
pub(crate) const STATUS_CLASSES: &[&str] = &["4xx", "5xx"];

/// Reads a status that frees the key, or all statuses of a class, as in a profile.
pub(crate) fn release_statuses(text: &str) -> Read<Vec<StatusCode>> {
    let not_one =
        || format!("{text:?} is not a status; write a number from 400 to 599, such as 422, or 4xx or 5xx");
    let codes = match text {
        "4xx" => 400..500,
        "5xx" => 500..600,
        _ => {
            let code: u16 = text.parse().map_err(|_| not_one())?;
            code..code.saturating_add(1)
        }
    };
    let statuses = codes.map(StatusCode::from_u16).collect::<Result<Vec<_>, _>>().map_err(|_| not_one())?;
    Settings::default().with_release_statuses(statuses.clone()).map_err(|error| error.to_string())?;
    Ok(statuses)
}

/// An origin whose pages may read responses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Every origin.
    Any,
    /// This origin, as browsers write it.
    Named(HeaderValue),
}

pub(crate) fn cors_origin(text: &str) -> Read<Origin> {
    if text == "*" {
        return Ok(Origin::Any);
    }
    let error = |why: &str| format!("{text:?} is not an origin such as \"https://shop.example\": {why}");
    let Some((scheme, host)) = text.split_once("://") else {
        return Err(error("it has no scheme"));
    };
    if host.contains(['/', '?', '#']) {
        return Err(error("leave out everything after the host; an origin has no path"));
    }
    if text.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Err(error("browsers send it in lower case"));
    }
    if host.contains('*') {
        return Err(error("name each host, or write \"*\" for all"));
    }
    let port = match scheme {
        "http" => ":80",
        "https" => ":443",
        _ => "",
    };
    if !port.is_empty() && host.ends_with(port) {
        return Err(error("browsers leave out the usual port"));
    }
    let is_one = Scheme::try_from(scheme).is_ok()
        && Authority::try_from(host).is_ok_and(|authority| !authority.as_str().contains('@'));
    match HeaderValue::try_from(text) {
        Ok(origin) if is_one => Ok(Origin::Named(origin)),
        _ => Err(error("write scheme and host, and the port if it is not the usual one")),
    }
}

/// Reads a method that pages may use, also one without an effect.
pub(crate) fn cors_method(text: &str) -> Read<Method> {
    let known = Method::from_bytes(text.as_bytes()).ok().filter(|_| text == text.to_ascii_uppercase());
    known.ok_or_else(|| format!("{text:?} is not a method such as \"POST\""))
}

pub(crate) fn method(text: &str) -> Read<Method> {
    let method = Method::from_bytes(text.as_bytes()).map_err(|_| format!("{text:?} is not a method"))?;
    if method.as_str() != text.to_ascii_uppercase() {
        let upper = text.to_ascii_uppercase();
        return Err(format!("{text:?} is not a method; did you mean {upper:?}?"));
    }
    Settings::default().with_methods(vec![method.clone()]).map_err(|error| error.to_string())?;
    Ok(method)
}

pub(crate) fn json_pointer(text: &str) -> Read<JsonPointer> {
    text.parse()
        .map_err(|error| format!("{text:?} is not a JSON pointer such as \"/meta/timestamp\": {error}"))
}

/// Reads a member to leave out. It must not be the whole body, because then nothing would be compared.
pub(crate) fn excluded(text: &str) -> Read<JsonPointer> {
    match text {
        "" => Err(
            "\"\" is the whole body, so nothing would be compared; name a member such as \"/meta/timestamp\""
                .to_owned(),
        ),
        _ => json_pointer(text),
    }
}

/// Reads a member of responses that is not stored.
pub(crate) fn redacted(text: &str) -> Read<JsonPointer> {
    let pointer = json_pointer(text)?;
    let checked = Settings::default().with_redacted_members(vec![pointer.clone()]);
    checked.map(|_| pointer).map_err(|error| error.to_string())
}

pub(crate) fn key_format(text: &str) -> Read<KeyFormat> {
    match text {
        "any" => Ok(KeyFormat::Any),
        "uuid" => Ok(KeyFormat::Uuid),
        "ulid" => Ok(KeyFormat::Ulid),
        _ => match text.strip_prefix("pattern:") {
            Some("") => Err(format!("{text:?} has no pattern; write \"pattern:REGEX\"")),
            Some(pattern) => KeyFormat::pattern(pattern).map_err(|error| error.to_string()),
            None => Err(not_one_of(text, &["any", "uuid", "ulid", "pattern:REGEX"])),
        },
    }
}

/// Reads a path of the service. It must not name another server, because the caller's credentials are sent there.
pub(crate) fn reconcile_path(text: &str) -> Read<PathAndQuery> {
    const ALLOWED: &str = "write a path of the service, such as \"/oncegate/outcome\"";
    if text.contains(['{', '}']) {
        return Err(format!(
            "{text:?} has braces, but the path is sent as it is: header fields carry the key and the request; {ALLOWED}"
        ));
    }
    if text.contains("://") {
        return Err(format!("{text:?} is a URL, but only the service itself can be asked; {ALLOWED}"));
    }
    if !text.starts_with('/') || text.starts_with("//") {
        return Err(format!("{text:?} is not a path; {ALLOWED}"));
    }
    if text.contains(['?', '#']) {
        return Err(format!("{text:?} has a query or a fragment; {ALLOWED}"));
    }
    PathAndQuery::try_from(text).map_err(|error| format!("{text:?} is not a path: {error}; {ALLOWED}"))
}

/// The policy for requests with a key while the store cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreOutage {
    /// They are refused with a 503. Nothing is executed.
    Closed,
    /// They are executed without protection.
    Open,
}

/// `"x" is not one of a, b, c`, with a suggestion.
pub(super) fn not_one_of(text: &str, names: &[&str]) -> String {
    format!("{text:?} is not one of {}{}", names.join(", "), did_you_mean(text, names.iter().copied()))
}

#[cfg(test)]
mod tests {
    use super::super::problem::Source;
    use super::super::settings::{Raw, Setting, Values};
    use super::*;

    fn error<T>(read: Read<T>) -> String {
        read.err().expect("this is refused")
    }

    /// The error of the setting with this name for this text; empty if it accepts the text.
    fn refused(name: &str, text: &str) -> String {
        let set = Setting::named(name).unwrap().set;
        let result = set(&mut Values::default(), &Raw::Text(text.to_owned()), &Source::Default);
        result.err().unwrap_or_default().concat()
    }

    #[test]
    fn durations_have_units() {
        for (text, millis) in [
            ("500ms", 500),
            ("30s", 30_000),
            ("5m", 300_000),
            ("24h", 86_400_000),
            ("7d", 604_800_000),
            ("0s", 0),
            ("0", 0),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for (text, why) in [
            ("30", "\"30\" has no unit; write a number and a unit (ms, s, m, h, d), such as \"500ms\""),
            ("30 s", "\"30 s\" has the unknown unit \" s\""),
            ("1.5h", "\"1.5h\" has the unknown unit \".5h\""),
            ("5min", "\"5min\" has the unknown unit \"min\""),
            ("", "\"\" is not a duration"),
            ("s", "\"s\" is not a duration"),
            ("-5s", "\"-5s\" is not a duration"),
            ("99999999999999999999s", "is not a duration"),
            ("18446744073709551615d", "is too long"),
        ] {
            assert!(error(duration(text)).contains(why), "{text}: {}", error(duration(text)));
        }
    }

    #[test]
    fn durations_are_shown_as_they_are_written() {
        for text in ["500ms", "30s", "90s", "5m", "24h", "36h", "7d", "400d", "0s", "1001ms"] {
            assert_eq!(duration_text(duration(text).unwrap()), text);
        }
    }

    #[test]
    fn settings_keep_their_bounds() {
        for (name, least, below, most, above, allowed) in [
            ("lease", "100ms", "99ms", "1h", "3601s", "from 100ms to 1h is allowed"),
            ("retention", "1s", "999ms", "400d", "401d", "from 1s to 400d is allowed"),
            ("wait", "0s", "-1s", "1h", "61m", "from 0s to 1h is allowed"),
            ("reconcile-timeout", "10ms", "9ms", "10m", "601s", "from 10ms to 10m is allowed"),
            ("write-timeout", "100ms", "99ms", "1h", "3601s", "from 100ms to 1h is allowed"),
            (
                "max-response-body",
                "0",
                "-1",
                "64MiB",
                "67108865B",
                "at most 64MiB is allowed: a record cannot",
            ),
            (
                "max-request-body",
                "0",
                "-1",
                "1GiB",
                "1073741825B",
                "at most 1GiB is allowed: a request body is",
            ),
            ("request-budget", "0", "-1", "1024GiB", "1099511627777B", "at most 1024GiB is allowed"),
            ("max-in-flight", "1", "0", "65536", "65537", "from 1 to 65536 is allowed"),
            ("max-in-flight-without-key", "1", "0", "1000000", "1000001", "from 1 to 1000000 is allowed"),
            ("max-connections", "1", "0", "1000000", "1000001", "from 1 to 1000000 is allowed"),
            ("threads", "1", "0", "1024", "1025", "is not a number of threads; from 1 to 1024 is allowed"),
        ] {
            assert_eq!((refused(name, least), refused(name, most)), (String::new(), String::new()), "{name}");
            assert_ne!(refused(name, below), "", "{name}");
            assert!(refused(name, above).contains(allowed), "{name}: {}", refused(name, above));
        }
        assert_eq!(refused("lease", "99ms"), "\"99ms\" is out of bounds; from 100ms to 1h is allowed");
        assert_eq!(refused("upstream-timeout", "none"), "");
        assert_eq!(refused("upstream-timeout", "5s"), "");
        assert_eq!(
            refused("upstream-timeout", "0s"),
            "\"0s\" is out of bounds; from 1ms to 24h is allowed; or \"none\" for no limit"
        );
    }

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("0", 0),
            ("10B", 10),
            ("65536b", 65_536),
            ("64KiB", 65_536),
            ("64kib", 65_536),
            ("10KB", 10_000),
            ("2MiB", 2_097_152),
            ("10MB", 10_000_000),
            ("1GiB", 1 << 30),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for (text, why) in [
            ("64K", "\"64K\" has the unknown unit \"K\"; write a number and a unit (B, KB, KiB"),
            ("65536", "\"65536\" has no unit; write a number and a unit"),
            ("65536", "; \"65536B\" are 65536 bytes"),
            ("two", "\"two\" is not a size"),
            ("-1", "\"-1\" is not a size"),
            ("18446744073709551615GiB", "is too large"),
        ] {
            assert!(error(size(text)).contains(why), "{text}: {}", error(size(text)));
        }
    }

    #[test]
    fn the_memory_of_a_store_holds_some_records() {
        assert_eq!(refused("store-memory", "1MiB"), "");
        for (text, why) in [
            ("1B", "\"1B\" is too little; at least 1MiB is allowed"),
            ("1048575B", "at least 1MiB is allowed"),
            ("1025GiB", "is too much; at most 1024GiB is allowed"),
        ] {
            assert!(refused("store-memory", text).contains(why), "{text}: {}", refused("store-memory", text));
        }
    }

    #[test]
    fn addresses_have_host_and_port() {
        assert_eq!(address("localhost:9090"), Ok("127.0.0.1:9090".parse().unwrap()));
        assert_eq!(address("[::1]:8080"), Ok("[::1]:8080".parse().unwrap()));
        for (text, why) in [
            (":8080", "\":8080\" has no host; write \"127.0.0.1:8080\" for this machine only"),
            ("8080", "\"8080\" has no host; write \"127.0.0.1:8080\""),
            ("127.0.0.1", "\"127.0.0.1\" has no port"),
            ("::1", "\"::1\" has no port"),
            ("[::1]", "\"[::1]\" has no port"),
            ("example.com:80", "is not an address to listen on"),
            ("127.0.0.1:99999", "is not an address to listen on"),
        ] {
            assert!(error(address(text)).contains(why), "{text}: {}", error(address(text)));
        }
    }

    #[test]
    fn an_admin_address_may_be_the_url_of_commands() {
        for (text, address) in [
            ("127.0.0.1:9090", "127.0.0.1:9090"),
            ("http://127.0.0.1:9090", "127.0.0.1:9090"),
            ("http://127.0.0.1:9090/", "127.0.0.1:9090"),
            ("http://localhost:9091", "127.0.0.1:9091"),
            ("http://[::1]:9090", "[::1]:9090"),
            ("http://0.0.0.0:9090", "0.0.0.0:9090"),
            ("http://10.0.0.1", "10.0.0.1:80"),
            ("http://[::1]", "[::1]:80"),
        ] {
            assert_eq!(admin_address(text), Ok(address.parse().unwrap()), "{text}");
            assert!(!is_admin_elsewhere(text), "{text}");
        }
        for elsewhere in
            ["https://127.0.0.1:9090", "http://ops.example:9090", "https://ops.example/", "http://ops"]
        {
            assert!(is_admin_elsewhere(elsewhere), "{elsewhere}");
            let why = error(admin_address(elsewhere));
            assert!(why.contains("write IP:PORT or http://IP:PORT"), "{why}");
        }
        for wrong in [
            "ftp://ops.example",
            "http://",
            "http://ops.example/v1",
            "http://ops.example:port",
            "ops.example:9090",
        ] {
            assert!(!is_admin_elsewhere(wrong) && admin_address(wrong).is_err(), "{wrong}");
        }
        let secret = "http://anna:hunter2@127.0.0.1:9090";
        assert!(!is_admin_elsewhere(secret) && !error(admin_address(secret)).contains("hunter2"));
    }

    #[test]
    fn an_upstream_is_a_scheme_and_a_host() {
        for (text, shown) in [
            ("http://127.0.0.1:3000", "http://127.0.0.1:3000"),
            ("http://127.0.0.1:3000/", "http://127.0.0.1:3000"),
            ("https://api.internal", "https://api.internal"),
            ("http://[::1]:3000", "http://[::1]:3000"),
        ] {
            assert_eq!(upstream(text).unwrap().to_string(), shown);
        }
        for (text, why) in [
            ("127.0.0.1:3000", "\"127.0.0.1:3000\" has no scheme; did you mean \"http://127.0.0.1:3000\"?"),
            ("3000", "did you mean \"http://127.0.0.1:3000\"?"),
            (":3000", "did you mean \"http://127.0.0.1:3000\"?"),
            ("ftp://host", "\"ftp://host\" has the scheme \"ftp\"; write http:// or https://"),
            ("http://", "\"http://\" is not a URL"),
            ("http://host:port", "is not a URL"),
            ("http://host:", "is not a URL of a service"),
            (
                "http://host/base",
                "has a path or a query; requests keep their own path, so write only \"http://host\"",
            ),
            ("http://host?x", "has a path or a query"),
            ("http://host/#x", "is not a URL of a service"),
            ("", "\"\" has no scheme; write http:// or https://"),
        ] {
            assert!(error(upstream(text)).contains(why), "{text}: {}", error(upstream(text)));
        }
    }

    #[test]
    fn a_password_in_a_url_is_refused_and_not_repeated() {
        let text = error(upstream("http://user:hunter2@host"));
        assert!(text.contains("user name or password") && !text.contains("hunter2"), "{text}");
    }

    #[test]
    fn words_are_checked_and_the_nearest_is_suggested() {
        for (name, text, expected) in [
            (
                "profile",
                "ietff",
                "\"ietff\" is not one of ietf, stripe, stripe-v2, acp, paypal, adyen, square, oasis, aws, webhook, classic, mcp; did you mean `ietf`?",
            ),
            (
                "on-abandoned",
                "reexecut",
                "\"reexecut\" is not one of park, reexecute, reconcile; did you mean `reexecute`?",
            ),
            ("store-outage", "maybe", "\"maybe\" is not one of closed, open"),
            ("server-errors", "Replay", "\"Replay\" is not one of replay, release; did you mean `replay`?"),
            ("require-key", "yes", "\"yes\" is neither true nor false"),
            (
                "scope",
                "tenant",
                "\"tenant\" is not a scope that tells callers apart; write \"header:NAME\", \"required-header:NAME\", \"cookie:NAME\", \"required-cookie:NAME\", \"jwt:CLAIM\", \"mtls:subject\", \"mtls:san\", \"path:NAME\", \"host\" or \"single-tenant\"",
            ),
            (
                "scope",
                "header:x y",
                "\"x y\" is not the name of a header field; letters, digits and dashes are allowed",
            ),
            (
                "scope",
                "X-Api-Key",
                "\"X-Api-Key\" is not a scope that tells callers apart; write \"header:NAME\", \"required-header:NAME\", \"cookie:NAME\", \"required-cookie:NAME\", \"jwt:CLAIM\", \"mtls:subject\", \"mtls:san\", \"path:NAME\", \"host\" or \"single-tenant\"; did you mean `required-header:X-Api-Key`?",
            ),
            (
                "scope",
                "header:Proxy-Authorization",
                "the sidecar removes the header field proxy-authorization from every request, because it belongs to one connection or only the sidecar sends it; name another field",
            ),
            (
                "key-header",
                "Oncegate-Key",
                "the sidecar removes the header field oncegate-key from every request, because it belongs to one connection or only the sidecar sends it; name another field",
            ),
            ("stored-headers", "Set-Cookie", "the header field set-cookie must not be stored and replayed"),
            ("methods", "post", "\"post\" is not a method; did you mean \"POST\"?"),
            (
                "methods",
                "GET",
                "the method GET cannot be covered: a key protects requests that change something",
            ),
            (
                "key-format",
                "uuid4",
                "\"uuid4\" is not one of any, uuid, ulid, pattern:REGEX; did you mean `uuid`?",
            ),
        ] {
            assert_eq!(refused(name, text), expected);
        }
        assert!(error(key_format("pattern:[")).contains("key format \"[\""));
        assert!(error(json_pointer("meta")).starts_with("\"meta\" is not a JSON pointer"));
    }

    #[test]
    fn the_service_is_asked_at_a_path_of_its_own() {
        assert_eq!(reconcile_path("/oncegate/outcome").unwrap(), "/oncegate/outcome");
        for (text, why) in [
            ("http://elsewhere/outcome", "is a URL, but only the service itself can be asked"),
            ("//elsewhere/outcome", "is not a path"),
            ("outcome", "is not a path; write a path of the service"),
            ("", "is not a path"),
            ("/outcomes/{key}", "has braces, but the path is sent as it is"),
            ("/outcome?a=1", "has a query"),
            ("/out come", "is not a path: "),
        ] {
            assert!(error(reconcile_path(text)).contains(why), "{text}: {}", error(reconcile_path(text)));
        }
    }

    #[test]
    fn a_store_is_a_directory_or_memory_or_a_server() {
        assert_eq!(store("memory:"), Ok(StoreChoice::Memory));
        assert_eq!(store("./data"), Ok(StoreChoice::Directory("./data".into())));
        let url = "postgresql://app:s3cret@db:6432/shop?sslmode=require";
        assert_eq!(store(url), Ok(StoreChoice::Postgres(StoreUrl::new(url))));
        let shown = store(url).map(|choice| format!("{choice:?}"));
        assert_eq!(shown, Ok("Postgres(postgresql://…@db:6432/shop)".to_owned()));
        for wrong in
            ["postgres://a:s3cret@h/d?x=s3cret", "postgres://a:s3cret@[/d", "mysql://a:s3/cret@h/d?p=s3cret"]
        {
            let said = error(store(wrong));
            assert!(said.contains("//…@") && !said.contains("s3") && !said.contains("cret"), "{said}");
        }
        assert!(error(store("memory")).contains("write \"memory:\""));
        for (wrong, why) in [
            ("Memory:", "did you mean \"memory:\"?"),
            ("memory:64MiB", "did you mean \"memory:\"?"),
            ("memroy:", "did you mean \"memory:\"?"),
            ("memory://", "did you mean \"memory:\"?"),
            ("sqlite:shop.db", "\"sqlite:…\" is neither a store nor a directory; the stores are a directory"),
            ("http:hunter2@host", "the stores are a directory"),
            ("postgre://u:hunter2@host/d", "did you mean \"postgres://…\"?"),
            ("redis//u:hunter2@host", "did you mean \"redis://…\"?"),
            ("Postgres//u:hunter2@host/d", "did you mean \"postgres://…\"?"),
            (" memory:", "a space"),
            ("memory: ", "a space"),
            ("./data\n", "a space"),
            ("redis:/host", "\"redis:…\" is neither a store nor a directory; did you mean \"redis://…\"?"),
            ("redis:hunter2@host", "did you mean \"redis://…\"?"),
            ("Postgres:/u:hunter2@host/d", "did you mean \"postgres://…\"?"),
            ("Cached(cache=memory:,store=./b)", "\"cached(cache=…,store=…)\""),
            ("cashed(cache=memory:,store=b)", "\"cached(cache=…,store=…)\""),
            ("fast(front=memory:64MiB,back=/var/lib/b)", "\"cached(cache=…,store=…)\""),
            ("redis", "\"redis\" could be a directory; write \"redis://…\""),
            ("Postgres", "write \"postgres://…\""),
            ("host=127.0.0.1 port=1 password=hunter2 dbname=x", "a connection string of words"),
            ("password=hunter2", "\"postgres://USER:PASSWORD@HOST:PORT/DATABASE\""),
            ("x=1 PASSWORD=hunter2", "a connection string of words"),
        ] {
            let said = error(store(wrong));
            assert!(said.contains(why) && !said.contains("hunter2"), "{wrong}: {said}");
        }
        for right in [
            "./redis:/host", "./redis//host", "redis/host", "data//host", "/var/lib/a:b", "data",
            "data/2024:1", "./Memory:", "./host=a", "/data/host=a", "year=2024",
        ] {
            assert_eq!(store(right), Ok(StoreChoice::Directory(right.into())));
        }
        assert!(matches!(store("redis://host"), Ok(StoreChoice::Redis(_))));
        for url in ["x://u:hunter2@host", "redis://u:hunter2@host:x"] {
            assert!(!error(store(url)).contains("hunter2"));
        }
        assert_eq!(without_login("redis://u:hunter2@h,i/0?x=@"), "redis://…@h,i/0?x=@");
        assert_eq!(without_login("redis://u:hunt@er2@h"), "redis://…@h");
        assert_eq!(without_login("./data@home"), "./data@home");
    }

    #[test]
    fn a_url_is_shown_without_its_login_and_its_query() {
        for (url, shown) in [
            ("http://h:80", "http://h:80"),
            ("http://u:hunter2@h/a", "http://…@h/a"),
            ("http://u:hun@ter2@h/a?k=hunter2", "http://…@h/a?…"),
            ("http://u:hun?ter2@h", "http://…@h"),
            ("https://h/jwks?k=hunter2#x", "https://h/jwks?…"),
            ("h:80?k=hunter2", "h:80?…"),
            ("u:hunter2@h", "…@h"),
        ] {
            assert_eq!(shown_url(url), shown);
        }
        for url in [
            "http://h?k=hunter2", "http://h/?k=hunter2", "h?k=hunter2", "ftp://h?k=hunter2",
            "http://h:x?k=hunter2",
        ] {
            for said in [error(upstream(url)), error(crate::otlp::endpoint(url))] {
                assert!(!said.contains("hunter2"), "{url}: {said}");
            }
            let said = super::super::scope::key_set_place(url);
            assert!(
                !format!("{:?}", said.map(|place| place.to_string())).contains("hunter2")
                    || !url.contains("://"),
                "{url}"
            );
        }
    }

    #[test]
    fn a_token_is_long_and_never_shown() {
        assert!(admin_token("0123456789abcdef\n").is_ok());
        let text = error(admin_token("hunter2"));
        assert!(text.contains("has 7 characters; at least 16 are needed") && !text.contains("hunter2"));
        assert!(error(admin_token("0123456789 abcdef")).contains("a space"));
        for placeholder in ["REPLACE-WITH-A-RANDOM-TOKEN", "please-change-me-soon", "changeme-changeme"] {
            assert!(error(admin_token(placeholder)).contains("a placeholder that was not replaced"));
        }
        assert_eq!(format!("{:?}", admin_token("0123456789abcdef").unwrap()), "AdminToken");
    }
}
