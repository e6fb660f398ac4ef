//! The identity of a caller, within which a key is unique.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use http::StatusCode;
use http::header::{self, HeaderName, HeaderValue};
use http::request::Parts;
use oncegate_core::Scope;
use oncegate_engine::ConfigError;

use crate::canonical;
use crate::client_certificate::{CertificateName, ClientCertificate};
use crate::credential;
#[cfg(feature = "jwt")]
use crate::jwt::{JwtVerifier, TokenFault};
use crate::mcp;
use crate::path::PathPattern;
use crate::refusal::{Condition, Refusal};

/// Tells callers apart, so that one caller's key never meets another's record.
///
/// A caller is identified by one part of the request or by several together ([`and`](Self::and)). The identity is hashed at
/// once; neither it nor the credential it comes from is stored. An empty value counts as absent, and so does an
/// `Authorization` that has a scheme and no credential. A request that has a part twice with different values is refused.
///
/// # The default
/// `CallerScope::default()` uses `Authorization`. Requests without any credential share one scope, the anonymous one.
/// A request that has no `Authorization` and **another** credential is refused with [`Condition::ScopeNotSet`]: two sessions
/// must not get each other's responses. Those credentials are `Cookie`, `X-Api-Key` and the other fields for which
/// [`is_credential`](Self::is_credential) is true, except the field of the key.
///
/// A request that has one of them **in addition to** `Authorization` is refused, too: `Authorization` may be that of a gateway,
/// and the same for all callers. There are exceptions: `Cookie` and `Mcp-Session-Id`, unless the scheme is `Basic`, because
/// browsers, load balancers and clients of MCP add them to everything; and signatures, which are new with each request. A
/// request whose `Authorization` is itself new each time (`Digest`, AWS signatures and the like) is refused, because a retry
/// would look like another caller.
///
/// An explicit scope skips these checks: `CallerScope::header(AUTHORIZATION)` uses `Authorization` whatever other credentials
/// there are, and all callers without the field share the anonymous scope.
#[derive(Clone)]
pub struct CallerScope {
    /// Sorted by kind. A single tenant has none.
    parts: Arc<[Part]>,
    /// False for the default scope.
    chosen: bool,
}

#[derive(Clone)]
struct Part {
    /// Keeps equal values of different parts apart.
    kind: Arc<str>,
    source: Source,
    required: bool,
}

#[derive(Clone)]
enum Source {
    Header(HeaderName),
    Cookie(Arc<str>),
    /// A parameter of the route's pattern.
    Path(Arc<str>),
    Host,
    Certificate(CertificateName),
    /// A claim of a verified token.
    #[cfg(feature = "jwt")]
    Jwt {
        claim: Arc<str>,
        verifier: JwtVerifier,
    },
    Function(Arc<Function>),
}

type Function = dyn Fn(&Parts) -> Option<Vec<u8>> + Send + Sync;

/// A part of a request that tells callers apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CallerPart<'a> {
    /// The value of this header field.
    Header(&'a HeaderName),
    /// The value of the cookie with this name.
    Cookie(&'a str),
    /// The value of the parameter with this name in the path of the route.
    Path(&'a str),
    /// The host of the request.
    Host,
    /// This name in the verified certificate of the client.
    Certificate(CertificateName),
    /// The claim with this name of a verified token.
    Jwt(&'a str),
    /// The value that a function derives from the request.
    Function,
}

/// The reason why a request has no scope.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoCaller {
    /// A required part is not there. `Authorization` asks for credentials.
    Missing { part: String, is_authorization: bool },
    /// The token does not name a caller, for this reason.
    #[cfg(feature = "jwt")]
    Token(TokenFault),
    /// A part is there several times.
    Repeated { part: String },
    /// The scope is the default one, and this field makes the identity of the caller doubtful.
    NotSet { credential: HeaderName, doubt: CallerDoubt },
}

/// The reason why `Authorization` alone does not identify the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallerDoubt {
    /// There is another credential, and no `Authorization`.
    NoAuthorization,
    /// There is another credential as well.
    TwoCredentials,
    /// It is new with each request.
    NewEachTime,
}

impl CallerDoubt {
    /// Describes the requests that are refused for this reason, because of this field.
    pub(crate) fn describe(self, credential: &HeaderName) -> String {
        match self {
            Self::NoAuthorization => format!("the header field {credential} and no Authorization"),
            Self::TwoCredentials => format!("the header field {credential} in addition to Authorization"),
            Self::NewEachTime => {
                "an Authorization that is new each time, so that a retry would look like another caller"
                    .to_owned()
            }
        }
    }
}

impl Default for CallerScope {
    /// Uses `Authorization`, with the checks that the [type](Self) describes.
    fn default() -> Self {
        Self { chosen: false, ..Self::header(header::AUTHORIZATION) }
    }
}

impl CallerScope {
    /// Tells callers apart by the value of a header field. All callers without the field share one scope.
    ///
    /// If the field is a credential, a caller whose credential is rotated is another caller: a retry with the new
    /// credential executes again. If the field is set by a trusted hop in front (such as `x-tenant-id`), use
    /// [`required_header`](Self::required_header), so that a request that came around that hop is refused.
    ///
    /// The layer cannot tell who set a field. A hop in front of it must remove fields such as `X-Forwarded-User` from requests
    /// of clients. Otherwise a client can name another caller and get that caller's responses. The sidecar removes them.
    #[must_use]
    pub fn header(name: HeaderName) -> Self {
        Self::of_part(format!("header:{name}"), Source::Header(name), false)
    }

    /// The same, but a request without the field is refused: with a 401 for `Authorization`, with a 400 for others.
    #[must_use]
    pub fn required_header(name: HeaderName) -> Self {
        Self::of_part(format!("header:{name}"), Source::Header(name), true)
    }

    /// Tells callers apart by the value of a cookie, such as that of a session. All callers without it share one scope.
    ///
    /// # Errors
    /// If the name is not the name of a cookie: it is case-sensitive and has no separators.
    pub fn cookie(name: &str) -> Result<Self, ConfigError> {
        Self::of_cookie(name, false)
    }

    /// The same, but a request without the cookie is refused with a 400.
    ///
    /// # Errors
    /// As [`cookie`](Self::cookie).
    pub fn required_cookie(name: &str) -> Result<Self, ConfigError> {
        Self::of_cookie(name, true)
    }

    /// Tells callers apart by the value of a parameter in the pattern of the
    /// [route](crate::IdempotencyLayer::with_route), such as `tenant` in `/tenants/{tenant}/orders`, in the
    /// canonical spelling of the path.
    ///
    /// Each client chooses the path of its request. So combine it with something that identifies the client, unless all clients
    /// of a tenant may share keys and get each other's responses.
    ///
    /// # Errors
    /// If the name is not the name of a parameter: it is not empty, and has no braces, slashes and stars.
    pub fn path_parameter(name: &str) -> Result<Self, ConfigError> {
        if name.is_empty() || name.contains(['{', '}', '/', '*']) {
            return Err(ConfigError::new(format!(
                "{name:?} is not the name of a path parameter; write a name that the route's path has in braces"
            )));
        }
        Ok(Self::of_part(format!("path:{name}"), Source::Path(name.into()), true))
    }

    /// Tells callers apart by the host of the request (`Host`, or the authority of its target), in lower case and without the
    /// ports 80 and 443. Each client chooses the host of its request: see [`path_parameter`](Self::path_parameter).
    #[must_use]
    pub fn host() -> Self {
        Self::of_part("host".to_owned(), Source::Host, true)
    }

    /// Tells callers apart by a name in the certificate that their TLS connection has shown: the [`ClientCertificate`] in the
    /// request's extensions. A request without it, or whose certificate lacks the name, is refused with a 400. A caller whose
    /// certificate is renewed with the same name stays the same caller.
    #[must_use]
    pub fn client_certificate(name: CertificateName) -> Self {
        Self::of_part(format!("mtls:{}", name.as_str()), Source::Certificate(name), true)
    }

    /// Tells callers apart by a claim of the token in `Authorization: Bearer`, such as `sub`, and by the token's issuer. A caller
    /// whose token is renewed stays the same caller.
    ///
    /// The [verifier](JwtVerifier) checks each token. A request whose token does not pass, has expired, or lacks the claim is
    /// refused with a 401, and so is a request without a token.
    ///
    /// # Errors
    /// If the name of the claim is empty.
    #[cfg(feature = "jwt")]
    pub fn jwt(claim: &str, verifier: &JwtVerifier) -> Result<Self, ConfigError> {
        if claim.is_empty() {
            return Err(ConfigError::new(
                "the claim that names the caller is empty; write its name, such as \"sub\"",
            ));
        }
        let source = Source::Jwt { claim: claim.into(), verifier: verifier.clone() };
        Ok(Self::of_part(format!("jwt:{claim}"), source, true))
    }

    /// Lets all callers share one scope. Use it if there is only one caller, or if keys are unique by themselves and no
    /// caller can guess another's.
    #[must_use]
    pub fn single_tenant() -> Self {
        Self { parts: Arc::default(), chosen: true }
    }

    /// Tells callers apart by what the function reads from the request, such as a verified claim that an earlier layer put
    /// into its extensions. `None` refuses the request.
    #[must_use]
    pub fn from_fn(identity: impl Fn(&Parts) -> Option<Vec<u8>> + Send + Sync + 'static) -> Self {
        Self::of_part("function".to_owned(), Source::Function(Arc::new(identity)), true)
    }

    /// Tells callers apart by the parts of both scopes together, such as a tenant and a session, in any order. A part that is
    /// absent and not required is left out. A part that is in both is required if it is required in one.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let mut parts = self.parts.to_vec();
        for part in other.parts.iter() {
            match parts.iter_mut().find(|own| own.is_same(part)) {
                Some(own) => own.required |= part.required,
                None => parts.push(part.clone()),
            }
        }
        parts.sort_by(|a, b| a.kind.cmp(&b.kind));
        Self { parts: parts.into(), chosen: true }
    }

    /// The parts that identify a caller, none for a [single tenant](Self::single_tenant).
    pub fn parts(&self) -> impl Iterator<Item = CallerPart<'_>> {
        self.parts.iter().map(|part| match &part.source {
            Source::Header(name) => CallerPart::Header(name),
            Source::Cookie(name) => CallerPart::Cookie(name),
            Source::Path(name) => CallerPart::Path(name),
            Source::Host => CallerPart::Host,
            Source::Certificate(name) => CallerPart::Certificate(*name),
            #[cfg(feature = "jwt")]
            Source::Jwt { claim, .. } => CallerPart::Jwt(claim),
            Source::Function(_) => CallerPart::Function,
        })
    }

    /// Returns true if it is the default.
    #[must_use]
    pub const fn is_default(&self) -> bool {
        !self.chosen
    }

    /// Returns true if all callers share one scope.
    #[must_use]
    pub fn is_single_tenant(&self) -> bool {
        self.parts.is_empty()
    }

    /// Returns true if requests that do not identify their caller are accepted and share a scope. The path and the host identify
    /// none: each client chooses them.
    #[must_use]
    pub fn allows_anonymous(&self) -> bool {
        let identifies =
            |part: &Part| part.required && !matches!(part.source, Source::Path(_) | Source::Host);
        !self.is_single_tenant() && !self.parts.iter().any(identifies)
    }

    /// Returns true if a header field of this name usually identifies a caller: its name suggests that it carries a
    /// credential, or the caller that a proxy in front identified. `Authorization` is not among them.
    #[must_use]
    pub fn is_credential(name: &HeaderName) -> bool {
        name != header::AUTHORIZATION && credential::is_credential(name.as_str())
    }

    /// Returns true if a request without this part is refused.
    #[must_use]
    pub fn requires(&self, part: CallerPart<'_>) -> bool {
        self.parts().zip(self.parts.iter()).any(|(own, place)| own == part && place.required)
    }

    /// The statuses with which a request that does not identify its caller is refused; `usual` is the one of the condition.
    pub(crate) fn unavailable_statuses(&self, usual: StatusCode) -> Vec<StatusCode> {
        let is_usual = |part| match part {
            // Of a token, everything that is wrong is a 401; the path of a route always has its parameters.
            CallerPart::Jwt(_) | CallerPart::Path(_) => false,
            // A field or a cookie may be there twice.
            CallerPart::Header(_)
            | CallerPart::Cookie(_)
            | CallerPart::Host
            | CallerPart::Certificate(_)
            | CallerPart::Function => true,
        };
        let mut statuses: Vec<_> = self.parts().any(is_usual).then_some(usual).into_iter().collect();
        let asks_for_credentials = |part: &Part| part.required && part.is_authorization();
        if self.parts.iter().any(asks_for_credentials) && usual != StatusCode::UNAUTHORIZED {
            statuses.push(StatusCode::UNAUTHORIZED);
        }
        statuses
    }

    /// Checks that the pattern of the route has the parameters that identify callers; `None` is no route.
    ///
    /// # Errors
    /// If a parameter is not in the pattern, or is in it twice.
    pub fn check_pattern(&self, pattern: Option<&PathPattern>) -> Result<(), ConfigError> {
        let names = self.parts.iter().filter_map(|part| match &part.source {
            Source::Path(name) => Some(&**name),
            _ => None,
        });
        for name in names {
            let Some(pattern) = pattern else {
                return Err(ConfigError::new(format!(
                    "the scope \"path:{name}\" needs a route whose path has the parameter {{{name}}}; set it only in such routes"
                )));
            };
            let times = pattern.parameters().filter(|own| *own == name).count();
            if times != 1 {
                let (text, times) = (pattern.as_str(), if times == 0 { "no" } else { "more than one" });
                return Err(ConfigError::new(format!(
                    "the scope \"path:{name}\" needs one parameter {{{name}}} in the path of the route, and {text:?} has {times} such \
                     parameter"
                )));
            }
        }
        Ok(())
    }

    fn of_part(kind: String, source: Source, required: bool) -> Self {
        Self { parts: Arc::new([Part { kind: kind.into(), source, required }]), chosen: true }
    }

    fn of_cookie(name: &str, required: bool) -> Result<Self, ConfigError> {
        let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
        if name.is_empty() || !name.bytes().all(is_token) {
            return Err(ConfigError::new(format!(
                "{name:?} is not the name of a cookie; letters, digits and characters such as \"-\", \"_\" and \".\" are allowed"
            )));
        }
        Ok(Self::of_part(format!("cookie:{name}"), Source::Cookie(name.into()), required))
    }

    /// Waits for the keys that the request's token needs, if there are tokens.
    pub(crate) async fn prepare(&self, request: &Parts) {
        #[cfg(feature = "jwt")]
        for part in self.parts.iter() {
            if let Source::Jwt { verifier, .. } = &part.source {
                verifier.prepare(request).await;
            }
        }
        #[cfg(not(feature = "jwt"))]
        let _no_keys_are_needed = request;
    }

    /// The caller's scope. `authority` is the host that the request is for, if hosts are tenants. `key_headers` are the fields
    /// of the key, which are no credentials, whatever their names. `pattern` is the one of the route.
    pub(crate) fn of(
        &self,
        request: &Parts,
        authority: Option<&str>,
        key_headers: &[HeaderName],
        pattern: Option<&PathPattern>,
    ) -> Result<Scope<'static>, NoCaller> {
        let mut identities = Vec::with_capacity(self.parts.len() + 2);
        for part in self.parts.iter() {
            match part.identity(request, pattern)? {
                Some(identity) => identities.push((&*part.kind, identity)),
                None if part.required => return Err(part.missing()),
                None => {}
            }
        }
        if !self.chosen {
            doubt_of(request, key_headers, !identities.is_empty())?;
        }
        if identities.is_empty() && !self.is_single_tenant() {
            identities.push((ANONYMOUS, Cow::Borrowed(&[])));
        }
        if let Some(authority) = authority {
            identities.push((AUTHORITY, Cow::Borrowed(authority.as_bytes())));
            identities.sort_by_key(|(kind, _)| *kind);
        }
        let identities: Vec<_> = identities.iter().map(|(kind, identity)| (*kind, &**identity)).collect();
        Ok(Scope::caller_of_parts(&identities))
    }
}

/// The kinds of identities that are not a part: a caller without any, and the host if hosts are tenants.
const ANONYMOUS: &str = "anonymous";
const AUTHORITY: &str = "authority";

/// Schemes of `Authorization`. A field with a scheme and nothing after it has no credential: a client's variable was empty.
const SCHEMES: [&str; 8] = ["bearer", "basic", "digest", "token", "apikey", "dpop", "hmac", "negotiate"];

/// Refuses a request if it is doubtful that `Authorization` identifies its caller.
fn doubt_of(request: &Parts, key_headers: &[HeaderName], is_authorized: bool) -> Result<(), NoCaller> {
    let authorization = request.headers.get(header::AUTHORIZATION).filter(|_| is_authorized);
    let authorization = authorization.map(|value| value.as_bytes().trim_ascii());
    if authorization.is_some_and(credential::is_new_each_time) {
        let credential = header::AUTHORIZATION;
        return Err(NoCaller::NotSet { credential, doubt: CallerDoubt::NewEachTime });
    }
    let doubt = if is_authorized { CallerDoubt::TwoCredentials } else { CallerDoubt::NoAuthorization };
    // A site behind one shared password: its browsers send the same `Basic` for all users, and a cookie for each.
    let is_shared_password = || {
        let scheme = authorization.and_then(|value| value.first_chunk::<6>());
        scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"basic "))
    };
    let is_in_doubt = |(name, value): &(&HeaderName, &HeaderValue)| {
        !key_headers.contains(name)
            && has_value(value)
            && CallerScope::is_credential(name)
            && (!is_authorized
                || (!credential::changes_each_time(name.as_str())
                    && (![header::COOKIE, mcp::SESSION].contains(name) || is_shared_password())))
    };
    match request.headers.iter().find(is_in_doubt) {
        Some((name, _)) => Err(NoCaller::NotSet { credential: name.clone(), doubt }),
        None => Ok(()),
    }
}

fn has_value(value: &HeaderValue) -> bool {
    !value.as_bytes().trim_ascii().is_empty()
}

impl Part {
    fn is_same(&self, other: &Self) -> bool {
        match (&self.source, &other.source) {
            (Source::Function(own), Source::Function(other)) => Arc::ptr_eq(own, other),
            #[cfg(feature = "jwt")]
            (Source::Jwt { verifier: own, .. }, Source::Jwt { verifier: other, .. })
                if !own.is_same(other) =>
            {
                false
            }
            _ => self.kind == other.kind,
        }
    }

    /// Returns the request's value of this part; `None` if it is empty.
    fn identity<'r>(
        &self,
        request: &'r Parts,
        pattern: Option<&PathPattern>,
    ) -> Result<Option<Cow<'r, [u8]>>, NoCaller> {
        let repeated = || NoCaller::Repeated { part: self.shown() };
        let identity = match &self.source {
            Source::Function(identity) => identity(request).map(Cow::Owned),
            Source::Header(name) => {
                let mut lines = request.headers.get_all(name).iter();
                let value = lines.next().map(|line| line.as_bytes().trim_ascii());
                let is_other_spelling = |(other, value): (&HeaderName, &HeaderValue)| {
                    credential::is_other_spelling(other.as_str(), name.as_str()) && has_value(value)
                };
                // The layer does not know which line the service reads.
                if lines.next().is_some() || request.headers.iter().any(is_other_spelling) {
                    return Err(repeated());
                }
                let is_bare_scheme = |value: &[u8]| {
                    name == header::AUTHORIZATION
                        && SCHEMES.iter().any(|scheme| value.eq_ignore_ascii_case(scheme.as_bytes()))
                };
                value.filter(|value| !is_bare_scheme(value)).map(Cow::Borrowed)
            }
            Source::Cookie(name) => {
                let mut values = cookies(request, name.as_bytes());
                let value = values.next();
                // Browsers send cookies of several paths under one name; the same value twice is one caller.
                if values.any(|other| Some(other) != value) {
                    return Err(repeated());
                }
                value.map(Cow::Borrowed)
            }
            Source::Path(name) => {
                let mut values =
                    pattern.map(|pattern| pattern.values(name, request.uri.path())).unwrap_or_default();
                values.pop().map(|value| Cow::Owned(value.into_bytes()))
            }
            #[cfg(feature = "jwt")]
            Source::Jwt { claim, verifier } => {
                verifier.identity(request, claim).map_err(NoCaller::Token)?.map(Cow::Owned)
            }
            Source::Certificate(name) => {
                let certificate = request.extensions.get::<ClientCertificate>();
                certificate.map(|certificate| Cow::Borrowed(certificate.name(*name)))
            }
            Source::Host => Some(Cow::Owned(canonical::authority(request).into_bytes())),
        };
        Ok(identity.filter(|identity| !identity.is_empty()))
    }

    fn missing(&self) -> NoCaller {
        NoCaller::Missing { part: self.shown(), is_authorization: self.is_authorization() }
    }

    fn is_authorization(&self) -> bool {
        match &self.source {
            Source::Header(name) => name == header::AUTHORIZATION,
            #[cfg(feature = "jwt")]
            Source::Jwt { .. } => true,
            _ => false,
        }
    }

    fn shown(&self) -> String {
        match &self.source {
            Source::Header(name) => format!("The header field {name}"),
            Source::Cookie(name) => format!("The cookie {name}"),
            Source::Path(name) => format!("The path parameter {name}"),
            Source::Host => "The host".to_owned(),
            Source::Certificate(CertificateName::Subject) => "The subject of a client certificate".to_owned(),
            Source::Certificate(_) => "The alternative name of a client certificate".to_owned(),
            #[cfg(feature = "jwt")]
            Source::Jwt { .. } => "The token in Authorization: Bearer".to_owned(),
            Source::Function(_) => "The identity of the caller".to_owned(),
        }
    }
}

/// The values of the cookies with this name (RFC 6265, section 4.2.1). HTTP/2 may spread cookies over several lines.
fn cookies<'r>(request: &'r Parts, name: &[u8]) -> impl Iterator<Item = &'r [u8]> {
    let lines = request.headers.get_all(header::COOKIE).iter();
    let pairs = lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b';'));
    pairs.filter_map(move |pair| {
        let equals = pair.iter().position(|byte| *byte == b'=')?;
        let (own, value) = pair.split_at_checked(equals)?;
        (own.trim_ascii() == name).then(|| value.strip_prefix(b"=").unwrap_or_default().trim_ascii())
    })
}

impl NoCaller {
    /// The refusal of such a request.
    pub(crate) fn refusal(&self) -> Refusal {
        match self {
            Self::Missing { part, is_authorization } => {
                let refusal = Refusal::new(Condition::ScopeUnavailable).with_detail(format!(
                    "{part} is missing or empty, and the service tells callers apart by it. Nothing was executed for this request."
                ));
                if *is_authorization { refusal.with_status(Some(StatusCode::UNAUTHORIZED)) } else { refusal }
            }
            #[cfg(feature = "jwt")]
            Self::Token(TokenFault::NoKeys) => {
                Refusal::new(Condition::VerificationUnavailable).with_retry_after(1)
            }
            #[cfg(feature = "jwt")]
            Self::Token(fault) => Refusal::new(Condition::ScopeUnavailable)
                .with_detail(format!(
                    "The token in Authorization {}. Nothing was executed for this request. Send it again with a valid token of the \
                     same caller.",
                    fault.describe()
                ))
                .with_status(Some(StatusCode::UNAUTHORIZED))
                .with_challenge(fault.challenge()),
            Self::Repeated { part } => Refusal::new(Condition::ScopeUnavailable).with_detail(format!(
                "{part} was sent more than once, or with a `_` instead of a `-` in its name, and the service tells callers apart \
                 by it. Nothing was executed for this request."
            )),
            Self::NotSet { credential, doubt } => Refusal::new(Condition::ScopeNotSet).with_detail(format!(
                "The request has {}, and the service is not configured to tell callers apart by it: the setting `scope` is \
                 missing. Nothing was executed for this request.",
                doubt.describe(credential)
            )),
        }
    }
}

impl fmt::Debug for CallerScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_single_tenant() {
            return f.write_str("single-tenant");
        }
        for (at, part) in self.parts.iter().enumerate() {
            let may_be_optional = matches!(part.source, Source::Header(_) | Source::Cookie(_));
            let required = if part.required && may_be_optional { "required-" } else { "" };
            write!(f, "{}{required}{}", if at > 0 { ", " } else { "" }, part.kind)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use http::header::{AUTHORIZATION, COOKIE};

    use super::*;

    const KEY: HeaderName = HeaderName::from_static("idempotency-key");

    fn request(fields: &[(&str, &str)]) -> Parts {
        let mut request = http::Request::new(());
        for (name, value) in fields {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            request.headers_mut().append(name, HeaderValue::from_str(value).unwrap());
        }
        request.into_parts().0
    }

    fn of(scope: &CallerScope, fields: &[(&str, &str)]) -> Result<Scope<'static>, NoCaller> {
        scope.of(&request(fields), None, &[KEY], None)
    }

    fn tenant() -> CallerScope {
        CallerScope::header(HeaderName::from_static("x-tenant"))
    }

    fn anonymous() -> Scope<'static> {
        Scope::caller(ANONYMOUS, b"")
    }

    #[test]
    fn by_default_another_credential_does_not_share_the_anonymous_scope() {
        let scope = CallerScope::default();
        assert_eq!(of(&scope, &[]), Ok(anonymous()));
        assert_eq!(of(&scope, &[("accept", "*/*"), ("user-agent", "x")]), Ok(anonymous()));
        let caller = Scope::caller("header:authorization", b"Bearer a");
        assert_eq!(of(&scope, &[("authorization", "Bearer a")]), Ok(caller));
        for name in
            ["cookie", "x-api-key", "x_api_key", "x-forwarded-user", "x-shopify-access-token", "signature"]
        {
            let credential = HeaderName::from_static(name);
            let not_set = |doubt| Err(NoCaller::NotSet { credential: credential.clone(), doubt });
            let alone = not_set(CallerDoubt::NoAuthorization);
            assert_eq!(of(&scope, &[(name, "a=1")]), alone, "{name}");
            assert_eq!(of(&scope, &[(name, "a=1"), ("authorization", "")]), alone, "{name}");
            assert_eq!(of(&scope, &[(name, "a=1"), ("authorization", "Bearer")]), alone, "{name}");
            // Empty is absent.
            assert_eq!(of(&scope, &[(name, " ")]), Ok(anonymous()), "{name}");
            assert_eq!(of(&scope, &[(name, " "), ("authorization", "Bearer a")]), Ok(caller), "{name}");
            let two = [(name, "a=1"), ("authorization", "Bearer a")];
            let expected = match name {
                "cookie" | "signature" => Ok(caller),
                _ => not_set(CallerDoubt::TwoCredentials),
            };
            assert_eq!(of(&scope, &two), expected, "{name}");
            // An explicit scope skips these checks.
            let chosen = CallerScope::header(AUTHORIZATION);
            assert_eq!(of(&chosen, &[(name, "a=1")]), Ok(anonymous()), "{name}");
            assert_eq!(of(&chosen, &two), Ok(caller), "{name}");
            assert_eq!(of(&CallerScope::single_tenant(), &[(name, "a=1")]), Ok(Scope::single_tenant()));
        }
        let gate = [("cookie", "sid=1"), ("authorization", "bASIC YTpi")];
        assert!(matches!(
            of(&scope, &gate),
            Err(NoCaller::NotSet { doubt: CallerDoubt::TwoCredentials, .. })
        ));
        let signed = of(&scope, &[("authorization", "AWS4-HMAC-SHA256 Credential=a, Signature=b")]);
        assert!(matches!(signed, Err(NoCaller::NotSet { doubt: CallerDoubt::NewEachTime, .. })));
        assert!(!CallerScope::is_credential(&AUTHORIZATION));
        // The field of the key is not a credential, whatever its name.
        let request = request(&[("x-request-token", "k")]);
        let key = HeaderName::from_static("x-request-token");
        assert_eq!(scope.of(&request, None, std::slice::from_ref(&key), None), Ok(anonymous()));
        assert!(matches!(scope.of(&request, None, &[KEY], None), Err(NoCaller::NotSet { .. })));
    }

    #[test]
    fn only_the_default_is_the_default() {
        assert!(CallerScope::default().is_default());
        let cookie = CallerScope::cookie("sid").unwrap();
        for chosen in [CallerScope::header(AUTHORIZATION), CallerScope::single_tenant(), cookie.clone()] {
            assert!(!chosen.is_default(), "{chosen:?}");
        }
        assert!(!CallerScope::default().and(cookie).is_default());
    }

    #[test]
    fn an_empty_value_is_an_absent_one() {
        for (scope, empty) in [
            (CallerScope::header(AUTHORIZATION), &[("authorization", "")][..]),
            (CallerScope::header(AUTHORIZATION), &[("authorization", " \t")]),
            (CallerScope::header(AUTHORIZATION), &[("authorization", "Bearer")]),
            (CallerScope::header(AUTHORIZATION), &[("authorization", "BASIC ")]),
            (tenant(), &[("x-tenant", "")]),
            (CallerScope::cookie("sid").unwrap(), &[("cookie", "sid=")]),
            (CallerScope::cookie("sid").unwrap(), &[("cookie", "sid; SID=1; xsid=2")]),
            (CallerScope::from_fn(|_| Some(Vec::new())), &[]),
        ] {
            if scope.allows_anonymous() {
                assert_eq!(of(&scope, empty), Ok(anonymous()), "{scope:?} {empty:?}");
            }
            let required = Part { required: true, ..scope.parts[0].clone() };
            let scope = CallerScope { parts: Arc::new([required]), chosen: true };
            assert!(matches!(of(&scope, empty), Err(NoCaller::Missing { .. })), "{scope:?} {empty:?}");
        }
        // Not every service uses schemes: elsewhere these words are values.
        assert_eq!(of(&tenant(), &[("x-tenant", "Bearer")]), Ok(Scope::caller("header:x-tenant", b"Bearer")));
        let key = Scope::caller("header:authorization", b"secret");
        assert_eq!(of(&CallerScope::default(), &[("authorization", "secret")]), Ok(key));
    }

    #[test]
    fn a_cookie_is_found_among_others_on_one_line_or_several() {
        let scope = CallerScope::cookie("sid").unwrap();
        let caller = Ok(Scope::caller("cookie:sid", b"a=b"));
        for fields in [
            &[("cookie", "sid=a=b")][..],
            &[("cookie", "theme=dark;sid=a=b ; lang=de")],
            &[("cookie", "theme=dark"), ("cookie", "sid=a=b")],
            &[("cookie", "sid=a=b; sid=a=b")],
        ] {
            assert_eq!(of(&scope, fields), caller, "{fields:?}");
        }
        let repeated = of(&scope, &[("cookie", "sid=a; sid=b")]);
        assert!(matches!(repeated, Err(NoCaller::Repeated { .. })), "{repeated:?}");
        for name in ["", "a b", "a=b", "a;b", "sid\"", "ü"] {
            assert!(
                CallerScope::cookie(name).is_err() && CallerScope::required_cookie(name).is_err(),
                "{name}"
            );
        }
    }

    #[test]
    fn a_repeated_field_is_refused() {
        for scope in
            [CallerScope::default(), CallerScope::header(AUTHORIZATION), tenant().and(CallerScope::default())]
        {
            let twice = of(&scope, &[("authorization", "a"), ("authorization", "a")]);
            assert!(matches!(twice, Err(NoCaller::Repeated { .. })), "{scope:?} {twice:?}");
        }
    }

    #[test]
    fn parts_identify_a_caller_together() {
        let session = || CallerScope::cookie("sid").unwrap();
        let scope = tenant().and(session());
        let both = [("x-tenant", "t"), ("cookie", "sid=s")];
        let caller = Scope::caller_of_parts(&[("cookie:sid", b"s"), ("header:x-tenant", b"t")]);
        assert_eq!(of(&scope, &both), Ok(caller));
        assert_eq!(of(&session().and(tenant()), &both), Ok(caller), "the order does not count");
        assert_eq!(of(&scope, &both[..1]), Ok(Scope::caller("header:x-tenant", b"t")));
        assert_eq!(of(&scope, &both[1..]), Ok(Scope::caller("cookie:sid", b"s")));
        assert_eq!(of(&scope, &[]), Ok(anonymous()));
        assert!(scope.allows_anonymous());
        // Each client chooses these.
        for chosen in [CallerScope::host(), CallerScope::path_parameter("tenant").unwrap()] {
            assert!(chosen.clone().allows_anonymous() && chosen.and(scope.clone()).allows_anonymous());
        }

        let required = scope.clone().and(CallerScope::required_header(HeaderName::from_static("x-tenant")));
        assert_eq!(format!("{required:?}"), "cookie:sid, required-header:x-tenant");
        assert!(!required.allows_anonymous());
        assert_eq!(of(&required, &both), Ok(caller), "the same caller");
        assert_eq!(of(&required, &both[..1]), Ok(Scope::caller("header:x-tenant", b"t")));
        assert!(matches!(of(&required, &both[1..]), Err(NoCaller::Missing { is_authorization: false, .. })));
        assert_eq!(scope.parts().count(), 2);
        assert_eq!(required.parts().next(), Some(CallerPart::Cookie("sid")));
    }

    #[test]
    fn hosts_may_be_tenants_whatever_the_callers_are() {
        let request = request(&[("x-tenant", "t")]);
        let of = |scope: &CallerScope, authority| scope.of(&request, Some(authority), &[KEY], None).unwrap();
        let (a, b) = (of(&tenant(), "a.test"), of(&tenant(), "b.test"));
        assert_eq!(a, Scope::caller_of_parts(&[(AUTHORITY, b"a.test"), ("header:x-tenant", b"t")]));
        assert_ne!(a, b);
        assert_eq!(of(&CallerScope::single_tenant(), "a.test"), Scope::caller(AUTHORITY, b"a.test"));
        assert_eq!(
            of(&CallerScope::default(), "a.test"),
            Scope::caller_of_parts(&[(ANONYMOUS, b""), (AUTHORITY, b"a.test")])
        );
    }

    #[test]
    fn a_path_parameter_and_the_host_tell_callers_apart() {
        let pattern = PathPattern::new("/tenants/{tenant}/orders/o-{id}").unwrap();
        let path = |name| CallerScope::path_parameter(name).unwrap();
        let of = |scope: &CallerScope, uri: &str, host: &str| {
            let mut request = request(&[("host", host)]);
            request.uri = uri.parse().unwrap();
            scope.of(&request, None, &[KEY], Some(&pattern))
        };
        let acme = Ok(Scope::caller("path:tenant", b"acme"));
        for uri in
            ["/tenants/acme/orders/o-1", "/Tenants//acme/orders/o-2/", "/tenants/%61cme/orders/O-1?a=b"]
        {
            assert_eq!(of(&path("tenant"), uri, "a.test"), acme, "{uri}");
        }
        assert_eq!(
            of(&path("tenant"), "/tenants/Acme/orders/o-1", "a.test"),
            Ok(Scope::caller("path:tenant", b"Acme")),
            "a parameter keeps its case"
        );
        assert_eq!(of(&path("id"), "/tenants/acme/orders/o-7", "a.test"), Ok(Scope::caller("path:id", b"7")));
        let both = path("tenant").and(CallerScope::host());
        let caller = Scope::caller_of_parts(&[("host", b"a.test"), ("path:tenant", b"acme")]);
        assert_eq!(of(&both, "/tenants/acme/orders/o-1", "A.test:443"), Ok(caller));
        let refused = of(&both, "/tenants/acme/orders/o-1", "");
        assert!(matches!(refused, Err(NoCaller::Missing { is_authorization: false, .. })), "{refused:?}");
        assert!(both.allows_anonymous());
        assert_eq!(format!("{both:?}"), "host, path:tenant");
    }

    #[test]
    fn a_path_parameter_must_be_in_the_pattern_once() {
        let check = |name: &str, pattern: Option<&str>| {
            let pattern = pattern.map(|pattern| PathPattern::new(pattern).unwrap());
            CallerScope::path_parameter(name)
                .unwrap()
                .check_pattern(pattern.as_ref())
                .map_err(|error| error.to_string())
        };
        assert_eq!(check("tenant", Some("/{tenant}/orders/{id}")), Ok(()));
        assert_eq!(check("rest", Some("/v1/{*rest}")), Ok(()));
        assert!(check("tenant", None).unwrap_err().contains("needs a route"));
        assert!(check("tenant", Some("/{tenants}")).unwrap_err().contains("has no such parameter"));
        assert!(check("a", Some("/{a}/{a}")).unwrap_err().contains("more than one"));
        for name in ["", "{a}", "a/b", "*a"] {
            assert!(CallerScope::path_parameter(name).is_err(), "{name}");
        }
    }

    #[test]
    fn a_missing_authorization_asks_for_credentials() {
        for (scope, status) in [
            (CallerScope::required_header(AUTHORIZATION), 401),
            (CallerScope::required_header(COOKIE), 400),
            (CallerScope::required_cookie("sid").unwrap(), 400),
            (CallerScope::from_fn(|_| None), 400),
        ] {
            let refusal = of(&scope, &[]).unwrap_err().refusal();
            let response = refusal.into_response(&crate::Settings::default(), None);
            assert_eq!(response.status(), status, "{scope:?}");
            assert_eq!(response.headers().contains_key(header::WWW_AUTHENTICATE), status == 401, "{scope:?}");
        }
    }
}
