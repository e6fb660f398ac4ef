//! Warnings about a configuration that works.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::Duration;

use http::Method;
use http::header::AUTHORIZATION;
use oncegate_http::{BodyComparison, CallerPart, CompletedBy};

use super::assemble::{given, is_given, is_loopback};
use super::problem::{Problem, Source, did_you_mean};
use super::scope::KeySetPlace;
use super::settings::{Raw, Values};
use super::units::{StoreChoice, StoreOutage, duration_text};
use super::{Entry, Route, RouteConfig};
use crate::check::readable_by_all_users;

/// A pause of the machine (a snapshot, a long collection, a full disk) may last longer than a shorter lease.
const SHORT_LEASE: Duration = Duration::from_secs(2);

/// After a crash, a longer lease blocks a key for longer than clients retry.
const LONG_LEASE: Duration = Duration::from_secs(10 * 60);

/// Warnings about the sidecar as a whole.
pub(super) fn on_service(values: &Values) -> Vec<Problem> {
    let mut advice = Vec::new();
    if given(&values.store) == StoreChoice::Memory {
        let what =
            "records are kept in memory and do not survive a restart: every retry after it executes again";
        advice.push(Problem::warning(source(values, "store"), what));
    }
    let admin = given(&values.admin);
    let has_token = values.admin_token.is_some() || values.admin_token_file.is_some();
    if !is_loopback(admin.ip()) && has_token {
        let what = "other machines can reach the admin address, and the token is sent without encryption; put TLS before it";
        advice.push(Problem::warning(source(values, "admin"), what));
    }
    advice
}

/// Warnings about files with secrets that every user of this machine can read.
pub(super) fn on_secrets<const N: usize>(secrets: [(&str, Option<&PathBuf>); N]) -> Vec<Problem> {
    let warning = |(what, file): (&str, Option<&PathBuf>)| {
        Some(Problem::warning(None, readable_by_all_users(what, file?)?))
    };
    secrets.into_iter().filter_map(warning).collect()
}

/// A warning about a file with the key that signs tokens, which every user can read.
pub(super) fn on_token_secret(values: &Values) -> Option<Problem> {
    let keys = values.jwt_keys.as_ref()?;
    let signs = given(&values.jwt_algorithms).iter().any(|algorithm| algorithm.is_symmetric());
    let KeySetPlace::File(file) = &keys.value else { return None };
    let what = signs.then(|| readable_by_all_users("the key that signs tokens", file))?;
    Some(Problem::warning(keys.source.clone(), what?))
}

/// A warning about a password in a file that every user can read.
pub(super) fn on_readable_password(entry: &Entry) -> Option<Problem> {
    let (Source::File(place), Raw::Text(url)) = (&entry.source, &entry.raw) else { return None };
    if entry.setting.name != "store" || !has_password(url) {
        return None;
    }
    let mode = fs::metadata(&*place.file).ok()?.permissions().mode();
    (mode & 0o004 != 0).then(|| {
        let file = &place.file;
        let what = format!(
            "this URL contains a password, and {file} can be read by every user of this machine; run: chmod o= {file}, or put the \
             URL into {}",
            entry.setting.variable()
        );
        Problem::warning(entry.source.clone(), what)
    })
}

/// Returns true if a URL in this text has a password, before its host or as a parameter.
fn has_password(text: &str) -> bool {
    text.split("://").skip(1).any(|rest| {
        let authority = rest.split(['/', '?', '#', ',']).next().unwrap_or_default();
        let user = authority.rsplit_once('@').map(|(user, _)| user);
        user.is_some_and(|user| user.split_once(':').is_some_and(|(_, password)| !password.is_empty()))
    }) || text.contains("password=")
}

/// Warnings about one route, or about the requests that match no route.
pub(super) fn on_route(values: &Values, route: &RouteConfig) -> Vec<Problem> {
    let mut advice = Vec::new();
    let mut warn = |source: Option<Source>, what: String| advice.push(Problem::warning(source, what));
    let (lease, wait) = (given(&values.lease), given(&values.wait));
    let retention = route.settings.policy().retention();
    let drain = given(&values.drain_timeout);
    if given(&values.store_outage) == StoreOutage::Open {
        let what = "while the store is out of reach, requests with a key are executed WITHOUT protection, and a retry may take effect twice";
        warn(source(values, "store-outage"), what.to_owned());
    }
    if given(&values.shadow) {
        let what = "requests are only observed: all of them go to the service WITHOUT protection, and a retry takes effect again; \
                    take shadow out when the counts of oncegate_shadow_requests_total are as expected";
        warn(source(values, "shadow"), what.to_owned());
    }
    if lease < SHORT_LEASE {
        let what = format!(
            "a pause of the machine may last longer than a lease of {}, and an owner that is paused for longer counts as dead; the \
             lease is renewed while a request runs, so a longer one costs only the time for which a key is blocked after a crash",
            duration_text(lease)
        );
        warn(source(values, "lease"), what);
    }
    if lease > LONG_LEASE {
        let what = format!(
            "after a crash the keys of running requests are blocked for {}; the lease is renewed while a request runs, so it may be shorter than a request",
            duration_text(lease)
        );
        warn(source(values, "lease"), what);
    }
    match route.upstream_timeout {
        None => {
            let what = "a service that hangs blocks its request and its key for as long as it hangs";
            warn(source(values, "upstream-timeout"), what.to_owned());
        }
        Some(timeout) if timeout > drain => {
            let what = format!(
                "the service may take {}, but a stop waits only for {}; requests that are cut off then have an unknown outcome",
                duration_text(timeout),
                duration_text(drain)
            );
            warn(explicit(values, "upstream-timeout").or(explicit(values, "drain-timeout")), what);
        }
        Some(_) => {}
    }
    let longest = wait.max(lease).max(route.upstream_timeout.unwrap_or_default());
    if retention < longest {
        let what = format!(
            "a response is kept for {}, but a client may wait {} for it; a retry after the retention executes again",
            duration_text(retention),
            duration_text(longest)
        );
        warn(explicit(values, "retention"), what);
    }
    let pointers = values.fingerprint_exclude.as_ref().or(values.fingerprint_include.as_ref());
    let unused = match route.settings.body_comparison() {
        BodyComparison::Raw => "not used: bodies are compared byte by byte (fingerprint.body = \"raw\")",
        BodyComparison::Nothing => "not used: bodies are not compared (fingerprint.body = \"nothing\")",
        _ => "",
    };
    if let Some(pointers) = pointers.filter(|pointers| !unused.is_empty() && !pointers.value.is_empty()) {
        warn(Some(pointers.source.clone()), unused.to_owned());
    }
    if route.settings.redacted_members().next().is_some()
        && route.settings.completed_by() == CompletedBy::Upstream
    {
        let what = "a response that the service itself stores, with oncegate.complete(record, token, response), is not redacted; let the \
                    sidecar add the response: call oncegate.complete(record, token)";
        warn(source(values, "redact-response"), what.to_owned());
    }
    advice.extend(on_chosen_scope(values, route));
    advice.extend(on_credentials_next_to_tokens(values, route));
    advice.extend(on_callers_in_keys(values, route));
    advice.extend(on_unused(values));
    advice.extend(on_methods(values));
    advice.extend(on_cors(values));
    advice
}

/// A warning about a scope of parts that every client chooses.
fn on_chosen_scope(values: &Values, route: &RouteConfig) -> Option<Problem> {
    let mut parts = route.settings.caller().parts().peekable();
    parts.peek()?;
    if !parts.all(|part| matches!(part, CallerPart::Path(_) | CallerPart::Host)) {
        return None;
    }
    let what = "every client chooses the path and the host of its request, so a client that knows a key gets the response of another \
                client; add a part that the service checks, such as \"required-header:authorization\"";
    Some(Problem::warning(source(values, "scope"), what))
}

/// A warning about a scope that takes a credential in addition to the claim of a token, which stays when the token is renewed.
fn on_credentials_next_to_tokens(values: &Values, route: &RouteConfig) -> Option<Problem> {
    let scope = route.settings.caller();
    if !scope.parts().any(|part| matches!(part, CallerPart::Jwt(_))) {
        return None;
    }
    scope.parts().find(|part| *part == CallerPart::Header(&AUTHORIZATION))?;
    let what = "a caller with a renewed token is another caller, because Authorization counts in addition to the claim of its token; \
                leave header:authorization out";
    Some(Problem::warning(source(values, "scope"), what))
}

/// A warning about a field that carries the key and identifies the caller.
fn on_callers_in_keys(values: &Values, route: &RouteConfig) -> Option<Problem> {
    let mut parts = route.settings.caller().parts();
    let name = parts.find_map(|part| match part {
        CallerPart::Header(name) if route.settings.key_headers().contains(name) => Some(name),
        _ => None,
    })?;
    let what = format!(
        "the header field {name} carries the key, so each key would be a caller of its own; name another field"
    );
    Some(Problem::warning(source(values, "scope"), what))
}

/// Warnings about settings that another one leaves without effect.
fn on_unused(values: &Values) -> Vec<Problem> {
    let mut advice = Vec::new();
    if values.authorize.is_none()
        && let Some(place) = explicit(values, "authorize-timeout")
    {
        advice.push(Problem::warning(
            place,
            "not used: the service is not asked before a replay; set authorize too",
        ));
    }
    if values.natural_key.is_some() {
        let places =
            ["key-query", "key-member", "key-format"].into_iter().filter_map(|name| explicit(values, name));
        let what = "not used: the key is built from members of the body (natural-key)";
        advice.extend(places.map(|place| Problem::warning(place, what)));
    }
    advice
}

/// A warning about cross-origin settings without effect.
fn on_cors(values: &Values) -> Option<Problem> {
    // An empty list is no reason: a route uses it to switch off the settings that it inherits.
    if values.cors_allowed_origins.is_some() {
        return None;
    }
    let others = [
        "cors.exposed-headers", "cors.allowed-headers", "cors.allowed-methods", "cors.allow-credentials",
        "cors.max-age",
    ];
    let place = others.into_iter().find_map(|name| explicit(values, name))?;
    Some(Problem::warning(place, "not used: no origins are allowed; set cors.allowed-origins too"))
}

/// A warning about a route that is never used, because earlier ones match all its requests.
pub(super) fn on_order(earlier: &[Route], route: &Route, place: &Source) -> Option<Problem> {
    let before: Vec<_> = earlier.iter().filter(|other| other.pattern.covers(&route.pattern)).collect();
    let hides: Vec<_> = match before.iter().find(|other| other.methods.is_empty()) {
        Some(other) => vec![other.pattern.as_str()],
        None => {
            let taken = |method: &Method| before.iter().any(|other| other.methods.contains(method));
            if route.methods.is_empty() || !route.methods.iter().all(taken) {
                return None;
            }
            before.iter().map(|other| other.pattern.as_str()).collect()
        }
    };
    let what = format!(
        "never used: the first route that matches counts, and earlier ones match all its requests: {}",
        hides.join(", ")
    );
    Some(Problem::warning(place.clone(), what))
}

/// Warnings about methods that no client sends, so that a route with them is never used.
fn on_methods(values: &Values) -> Vec<Problem> {
    let Some(methods) = &values.methods else { return Vec::new() };
    let unknown = methods.value.iter().filter(|method| !METHODS.contains(&method.as_str()));
    unknown
        .map(|method| {
            let hint = did_you_mean(method.as_str(), METHODS.iter().copied());
            let what = format!("no registered method is called {:?}{hint}", method.as_str());
            Problem::warning(methods.source.clone(), what)
        })
        .collect()
}

/// The methods of the HTTP Method Registry that can be covered: they are neither safe nor CONNECT.
const METHODS: &[&str] = &[
    "ACL", "BASELINE-CONTROL", "BIND", "CHECKIN", "CHECKOUT", "COPY", "DELETE", "LABEL", "LINK", "LOCK",
    "MERGE", "MKACTIVITY", "MKCALENDAR", "MKCOL", "MKREDIRECTREF", "MKWORKSPACE", "MOVE", "ORDERPATCH",
    "PATCH", "POST", "PROPPATCH", "PUT", "REBIND", "UNBIND", "UNCHECKOUT", "UNLINK", "UNLOCK", "UPDATE",
    "UPDATEREDIRECTREF", "VERSION-CONTROL",
];

fn source(values: &Values, name: &str) -> Option<Source> {
    values.source(name).cloned()
}

/// The source of a value that was given explicitly.
fn explicit(values: &Values, name: &str) -> Option<Source> {
    source(values, name).filter(is_given)
}
