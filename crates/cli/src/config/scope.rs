//! The settings that say how callers are told apart: the parts of a scope, and the tokens that name callers.

use std::fmt;
use std::path::PathBuf;

use http::header::HeaderName;
use http::uri::{PathAndQuery, Scheme, Uri};
use oncegate_engine::ConfigError;
use oncegate_http::{CallerPart, CallerScope, CertificateName, JwtAlgorithm, JwtVerifier};

use super::assemble::{given, is_given};
use super::problem::{Problem, nearest};
use super::settings::Values;
use super::units::{Upstream, not_one_of, seen_header, shown_url};
use crate::proxy::{KeySetSource, read_key_set};

type Read<T> = Result<T, String>;

/// One part of a scope, or a whole one.
#[derive(Clone, Debug)]
pub(crate) enum ScopePart {
    Known(CallerScope),
    /// A claim of a token, which needs the keys that other settings name.
    Jwt(String),
}

/// Reads one part of a scope, or `single-tenant`.
pub(crate) fn scope(text: &str) -> Read<ScopePart> {
    const ALLOWED: &str = "write \"header:NAME\", \"required-header:NAME\", \"cookie:NAME\", \"required-cookie:NAME\", \"jwt:CLAIM\", \
                           \"mtls:subject\", \"mtls:san\", \"path:NAME\", \"host\" or \"single-tenant\"";
    let error = |error: ConfigError| error.to_string();
    let scope = match text.split_once(':') {
        None if text == "single-tenant" => Ok(CallerScope::single_tenant()),
        None if text == "host" => Ok(CallerScope::host()),
        Some(("path", name)) => CallerScope::path_parameter(name).map_err(error),
        Some(("header", name)) => seen_header(name).map(CallerScope::header),
        Some(("required-header", name)) => seen_header(name).map(CallerScope::required_header),
        Some(("cookie", name)) => CallerScope::cookie(name).map_err(error),
        Some(("required-cookie", name)) => CallerScope::required_cookie(name).map_err(error),
        Some(("mtls", "subject")) => Ok(CallerScope::client_certificate(CertificateName::Subject)),
        Some(("mtls", "san")) => Ok(CallerScope::client_certificate(CertificateName::AlternativeNames)),
        Some(("jwt", "")) => Err(format!("{text:?} names no claim; write its name, such as \"jwt:sub\"")),
        Some(("jwt", claim)) => return Ok(ScopePart::Jwt(claim.to_owned())),
        _ => {
            let hint = match nearest(text, ["single-tenant", "host"]) {
                Some(name) => format!("; did you mean `{name}`?"),
                // The name of a field, such as `X-Api-Key`.
                None if text.contains('-') && text.parse::<HeaderName>().is_ok() => {
                    format!("; did you mean `required-header:{text}`?")
                }
                None => String::new(),
            };
            Err(format!("{text:?} is not a scope that tells callers apart; {ALLOWED}{hint}"))
        }
    };
    scope.map(ScopePart::Known)
}

/// Combines all parts of a scope. `None` for the verifier: tokens cannot be verified.
pub(super) fn whole_scope(parts: &[ScopePart], verifier: Option<&JwtVerifier>) -> Read<CallerScope> {
    let one = |part: &ScopePart| match (part, verifier) {
        (ScopePart::Known(scope), _) => Ok(scope.clone()),
        (ScopePart::Jwt(claim), Some(verifier)) => {
            CallerScope::jwt(claim, verifier).map_err(|error| error.to_string())
        }
        (ScopePart::Jwt(claim), None) => Err(format!(
            "\"jwt:{claim}\" needs the keys that verify tokens; set jwt-keys to the key set (JWKS) of the issuer, an https URL or a file"
        )),
    };
    let parts = parts.iter().map(one).collect::<Read<Vec<_>>>()?;
    let Some((first, rest)) = parts.split_first() else {
        return Err("the list is empty; write \"single-tenant\" if there is only one caller".to_owned());
    };
    if !rest.is_empty() && parts.iter().any(CallerScope::is_single_tenant) {
        return Err(
            "\"single-tenant\" cannot be combined with other parts, because there is only one caller"
                .to_owned(),
        );
    }
    rest.iter().try_fold(first.clone(), |scope, part| {
        let is_new = part.parts().all(|new| scope.parts().all(|old| old != new));
        if is_new { Ok(scope.and(part.clone())) } else { Err(format!("\"{part:?}\" was given twice")) }
    })
}

/// The place of the key set that verifies tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum KeySetPlace {
    File(PathBuf),
    Url { server: Upstream, path: PathAndQuery },
}

impl fmt::Display for KeySetPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Url { server, path } => f.write_str(&shown_url(&format!("{server}{path}"))),
        }
    }
}

/// Reads the place of a key set.
pub(crate) fn key_set_place(text: &str) -> Read<KeySetPlace> {
    const ALLOWED: &str =
        "write an https URL such as \"https://issuer.example/.well-known/jwks.json\", or a file";
    // First of all, because the other errors repeat the value.
    if text.contains('@') && text.contains("://") {
        return Err(
            "the URL has a user name or password, which are not sent; write a URL without them".to_owned()
        );
    }
    if text.is_empty() {
        return Err(format!("the value is empty; {ALLOWED}"));
    }
    if !text.contains("://") {
        return Ok(KeySetPlace::File(text.into()));
    }
    let shown = shown_url(text);
    let uri: Uri = text.parse().map_err(|_| format!("{shown:?} is not a URL; {ALLOWED}"))?;
    let parts = uri.into_parts();
    let (Some(scheme), Some(authority)) = (parts.scheme, parts.authority) else {
        return Err(format!("{shown:?} is not a URL; {ALLOWED}"));
    };
    let is_here = matches!(authority.host(), "localhost" | "127.0.0.1" | "[::1]");
    if scheme != Scheme::HTTPS && !(scheme == Scheme::HTTP && is_here) {
        return Err(format!(
            "{shown:?} is not an https URL: with keys that were changed on their way, every client could name any caller; {ALLOWED}"
        ));
    }
    let path = parts.path_and_query.unwrap_or_else(|| PathAndQuery::from_static("/"));
    Ok(KeySetPlace::Url { server: Upstream { scheme, authority }, path })
}

pub(crate) fn jwt_algorithm(text: &str) -> Read<JwtAlgorithm> {
    let found = JwtAlgorithm::ALL.into_iter().find(|algorithm| algorithm.as_str() == text);
    found.ok_or_else(|| match text.to_ascii_lowercase().as_str() {
        "none" => "\"none\" is not accepted: every client could write such a token".to_owned(),
        _ => not_one_of(text, &JwtAlgorithm::ALL.map(JwtAlgorithm::as_str)),
    })
}

pub(crate) fn not_empty(text: &str) -> Read<String> {
    if text.trim().is_empty() { Err("the value is empty".to_owned()) } else { Ok(text.to_owned()) }
}

/// The verifier of tokens, if there are keys for it. Reads a key set in a file, to check it.
pub(super) fn jwt_verifier(values: &Values, problems: &mut Vec<Problem>) -> Option<JwtVerifier> {
    let Some(keys) = &values.jwt_keys else {
        let others = ["jwt-algorithms", "jwt-issuer", "jwt-audience"];
        let source =
            others.into_iter().find_map(|name| values.source(name).filter(|source| is_given(source)));
        if let Some(source) = source {
            problems.push(Problem::error(
                source.clone(),
                "tokens cannot be verified without keys; set jwt-keys too",
            ));
        }
        return None;
    };
    let about_algorithms =
        || values.source("jwt-algorithms").filter(|source| is_given(source)).unwrap_or(&keys.source);
    let verifier = JwtVerifier::new(&given(&values.jwt_algorithms), KeySetSource::new(&keys.value));
    let verifier = verifier.map_err(|error| (about_algorithms().clone(), error.to_string()));
    let verifier = verifier.map(|verifier| match &values.jwt_issuer {
        Some(issuer) => verifier.with_issuer(&issuer.value),
        None => verifier,
    });
    let verifier = verifier.and_then(|verifier| match &values.jwt_audience {
        Some(audiences) => verifier
            .with_audiences(&audiences.value)
            .map_err(|error| (audiences.source.clone(), error.to_string())),
        None => Ok(verifier),
    });
    let verifier = verifier.and_then(|verifier| {
        if let KeySetPlace::File(path) = &keys.value {
            let checked = read_key_set(path).map_err(|error| error.to_string());
            let checked = checked.and_then(|json| verifier.check(&json).map_err(|error| error.to_string()));
            checked.map_err(|what| (keys.source.clone(), format!("{}: {what}", path.display())))?;
        }
        Ok(verifier)
    });
    verifier.map_err(|(source, what)| problems.push(Problem::error(source, what))).ok()
}

/// Warnings about tokens: an audience that is not checked, and keys that no route uses.
pub(super) fn jwt_advice<'a>(
    values: &Values,
    mut scopes: impl Iterator<Item = &'a CallerScope>,
) -> Option<Problem> {
    let keys = values.jwt_keys.as_ref()?;
    let uses = scopes.any(|scope| scope.parts().any(|part| matches!(part, CallerPart::Jwt(_))));
    let what = match (uses, &values.jwt_audience) {
        (true, Some(_)) => return None,
        (true, None) => {
            "a token that the issuer made for another service names a caller here, too; set jwt-audience to the audience of this service"
        }
        (false, _) => "set but never used: no scope has a part jwt:CLAIM",
    };
    Some(Problem::warning(keys.source.clone(), what))
}
