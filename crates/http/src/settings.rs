//! The settings of one route.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderName, HeaderValue};
use http::{HeaderMap, Method, StatusCode};
use oncegate_core::fingerprint::FingerprintRules;
use oncegate_core::{
    Capabilities, IdempotencyKey, JsonPointer, NaturalKey, OnAbandoned, StoredResponse, limits,
};
use oncegate_engine::{ConfigError, Policy, StoredForm};

use crate::authorize::Authorize;
use crate::carrier::{KeyMember, has_other_spelling};
use crate::execute::cannot_be_stored;
use crate::first_sent;
use crate::headers::{KeptHeaders, is_reserved, kept_trailers};
use crate::key::{KeyFormat, KeyGrammar, KeySyntax, has_other_purpose};
use crate::mcp::{Protocol, ToolPolicies};
use crate::method;
use crate::overrides::is_override;
use crate::path::{self, PathCase, PathPattern, TrailingSlash};
use crate::profile::{BodyComparison, KeyScope, Profile, ServerErrors, UncoveredMethods};
use crate::rate_limit::RateLimits;
use crate::reconcile::Reconcile;
use crate::redaction::{RedactedBody, Redaction, RedactionCounts};
use crate::scope::{CallerPart, CallerScope};

/// The settings of one route. They start from a [`Profile`], and every value can be changed.
#[derive(Clone, Debug)]
pub struct Settings {
    pub(crate) profile: Profile,
    pub(crate) policy: Policy,
    pub(crate) caller: CallerScope,
    pub(crate) authority: AuthorityRole,
    pub(crate) fingerprint_headers: Vec<HeaderName>,
    pub(crate) kept: KeptHeaders,
    /// The parts of responses that records do not keep.
    redaction: Arc<Redaction>,
    redaction_counts: Option<Arc<RedactionCounts>>,
    pub(crate) max_request_body: usize,
    pub(crate) max_response_body: usize,
    /// True if requests with a key are executed without protection while the store cannot be reached.
    pub(crate) fails_open: bool,
    /// True if requests pass without protection, and the layer only observes what it would have done.
    pub(crate) is_shadow: bool,
    pub(crate) stream_timeout: Duration,
    pub(crate) body_timeout: Duration,
    pub(crate) reconcile: Option<Arc<dyn Reconcile>>,
    pub(crate) authorize: Option<Arc<dyn Authorize>>,
    pub(crate) completed_by: CompletedBy,
    /// The members of the body from which the key is built, instead of one that the caller chose.
    pub(crate) natural_key: Option<NaturalKey>,
    /// The policies for calls of tools.
    pub(crate) tools: ToolPolicies,
    pub(crate) trailing_slash: TrailingSlash,
    pub(crate) path_case: PathCase,
    /// The pattern of the route that has these settings.
    pattern: Option<PathPattern>,
    pub(crate) rate_limits: RateLimits,
    /// The value of `Link` in refusals.
    pub(crate) documentation: Option<HeaderValue>,
    tag: u32,
}

/// The effect of a request's host (`Host`, or the authority of its target) on its key.
///
/// Hosts are compared in lower case, with their port unless it is 80 or 443.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum AuthorityRole {
    /// None: a request to another host is the same request. For a service that has several names.
    Ignored,
    /// The same key with another host is another request: a mismatch. No client gets the response of another host.
    #[default]
    Compared,
    /// Each host has keys of its own. For a service that tells tenants apart by their hosts.
    Scope,
}

/// The one that completes the record of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum CompletedBy {
    /// The layer, with the handler's response, after the operation.
    #[default]
    Layer,
    /// The operation, in the transaction that holds its effect, so that both commit or neither does. See
    /// [`Settings::with_upstream_completion`].
    Upstream,
}

impl Default for Settings {
    fn default() -> Self {
        Self::new(Profile::default())
    }
}

impl Settings {
    /// The settings of a profile: request bodies up to 2 MiB, response bodies up to 1 MiB, callers identified by
    /// `Authorization`.
    #[must_use]
    pub fn new(profile: Profile) -> Self {
        let policy = Policy::default();
        Self {
            policy: policy.with_retention(profile.retention).unwrap_or(policy),
            natural_key: None,
            kept: KeptHeaders::default().with_own(profile.stored_headers()),
            redaction: Arc::default(),
            redaction_counts: None,
            fingerprint_headers: profile.fingerprint_headers.clone(),
            profile,
            caller: CallerScope::default(),
            authority: AuthorityRole::default(),
            max_request_body: 2 * 1024 * 1024,
            max_response_body: 1024 * 1024,
            fails_open: false,
            is_shadow: false,
            stream_timeout: Duration::from_secs(60),
            body_timeout: Duration::from_secs(60),
            reconcile: None,
            authorize: None,
            completed_by: CompletedBy::Layer,
            tools: ToolPolicies::default(),
            trailing_slash: TrailingSlash::default(),
            path_case: PathCase::default(),
            pattern: None,
            rate_limits: RateLimits::default(),
            documentation: None,
            tag: 0,
        }
    }

    /// Sets lease, retention, waiting time, and the policy for abandoned attempts.
    #[must_use]
    pub fn with_policy(self, policy: Policy) -> Self {
        Self { policy, ..self }
    }

    /// Lease, retention, waiting time, and the policy for abandoned attempts.
    #[must_use]
    pub const fn policy(&self) -> Policy {
        self.policy
    }

    /// The profile, with the values that these settings have changed.
    #[must_use]
    pub const fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The header fields that may carry the key.
    #[must_use]
    pub fn key_headers(&self) -> &[HeaderName] {
        &self.profile.key_headers
    }

    /// The header field that marks a replay.
    #[must_use]
    pub const fn replay_marker(&self) -> &HeaderName {
        &self.profile.replay_marker.0
    }

    /// The header fields that the profile adds to responses and refusals.
    pub fn profile_headers(&self) -> impl Iterator<Item = &HeaderName> {
        self.profile.added_headers()
    }

    /// The identification of callers.
    #[must_use]
    pub const fn caller(&self) -> &CallerScope {
        &self.caller
    }

    /// The grammar of keys.
    #[must_use]
    pub const fn key_grammar(&self) -> &KeyGrammar {
        &self.profile.grammar
    }

    /// Sets the identification of callers.
    #[must_use]
    pub fn with_caller(self, caller: CallerScope) -> Self {
        Self { caller, ..self }
    }

    /// Sets the effect of a request's host on its key. By default the same key with another host is a mismatch.
    #[must_use]
    pub fn with_authority(self, authority: AuthorityRole) -> Self {
        Self { authority, ..self }
    }

    /// The effect of a request's host on its key.
    #[must_use]
    pub const fn authority(&self) -> AuthorityRole {
        self.authority
    }

    /// Returns true if a header field of this name identifies the caller, carries the key, or is compared. Such a
    /// field must reach the service as the layer saw it.
    #[must_use]
    pub fn depends_on_header(&self, name: &HeaderName) -> bool {
        let identifies = |part| match part {
            CallerPart::Header(own) => own == name,
            CallerPart::Cookie(_) => name == http::header::COOKIE,
            CallerPart::Host => name == http::header::HOST,
            CallerPart::Jwt(_) => name == http::header::AUTHORIZATION,
            CallerPart::Path(_) | CallerPart::Certificate(_) | CallerPart::Function => false,
        };
        self.profile.key_headers.contains(name)
            || self.profile.key_scope_headers.contains(name)
            || self.profile.first_sent_header.as_ref() == Some(name)
            || self.fingerprint_headers.contains(name)
            || self.caller.parts().any(identifies)
            || is_override(name.as_str())
            || [CONTENT_TYPE, CONTENT_ENCODING].contains(name)
    }

    /// Refuses covered requests that have no key, or accepts them.
    #[must_use]
    pub fn with_required_key(mut self, required: bool) -> Self {
        self.profile.require_key = required;
        self
    }

    /// Sets the header fields that may carry the key. If a request has several of them, their keys must be equal.
    ///
    /// # Errors
    /// If requests use one of them for another purpose, such as `Content-Type`.
    pub fn with_key_headers(
        mut self,
        names: impl IntoIterator<Item = HeaderName>,
    ) -> Result<Self, ConfigError> {
        let names: Vec<_> = names.into_iter().collect();
        if let Some(name) = repeated(&names) {
            return Err(ConfigError::new(format!("the header field {name} is there twice")));
        }
        if let Some(name) = names.iter().find(|name| has_other_purpose(name)) {
            return Err(ConfigError::new(format!(
                "the header field {name} has another purpose, and many requests have the same value there; name a field that \
                 carries only keys"
            )));
        }
        self.profile.key_headers = names;
        Ok(self)
    }

    /// Sets the parameters of the query, or of a form in the body, that may carry the key. If a request has a key in several
    /// places, they must be equal.
    ///
    /// # Errors
    /// If one has no name.
    pub fn with_key_query(
        mut self,
        names: impl IntoIterator<Item = impl Into<String>>,
    ) -> Result<Self, ConfigError> {
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        if names.iter().any(String::is_empty) {
            return Err(ConfigError::new("\"\" is not the name of a parameter that can carry the key"));
        }
        self.profile.key_query = names;
        Ok(self)
    }

    /// Sets the members of JSON bodies that may carry the key. If a request has a key in several places, they must be equal.
    ///
    /// # Errors
    /// If one is the whole body, or goes through a list.
    pub fn with_key_members(
        mut self,
        members: impl IntoIterator<Item = JsonPointer>,
    ) -> Result<Self, ConfigError> {
        let members: Result<_, _> = members.into_iter().map(KeyMember::new).collect();
        self.profile.key_members = members.map_err(ConfigError::new)?;
        Ok(self)
    }

    /// Builds the key from these members of JSON bodies, for all requests, and ignores a key that the caller chose. Two
    /// requests of one caller with the same values are one operation, with any key or without one. A request whose body lacks
    /// a member, or is of another kind, has no key. One whose body may be JSON that not every program reads alike is refused.
    /// See [`NaturalKey`].
    #[must_use]
    pub fn with_natural_key(self, key: NaturalKey) -> Self {
        Self { natural_key: Some(key), ..self }
    }

    /// Makes sure that a question about an operation names its key. A key that the client sent in a header field stays as it is.
    /// Any other key (of the query or the body, or built from members) gets the first header field of the profile, or
    /// `Idempotency-Key` if the profile has none.
    pub fn name_key(&self, key: &IdempotencyKey, headers: &mut HeaderMap) {
        let profile = &self.profile;
        let is_named = profile.key_headers.iter().any(|name| headers.contains_key(name));
        if is_named && self.natural_key.is_none() {
            return;
        }
        for name in &profile.key_headers {
            headers.remove(name);
        }
        let name = profile.key_headers.first().cloned().unwrap_or(HeaderName::from_static("idempotency-key"));
        match profile.grammar.field_of(key) {
            Some(field) => headers.insert(name, field),
            None => headers.remove(name),
        };
    }

    /// The members from which the key is built, if it is.
    #[must_use]
    pub const fn natural_key(&self) -> Option<&NaturalKey> {
        self.natural_key.as_ref()
    }

    /// Sets the policies for calls of tools. They need a profile of [`Protocol::Mcp`].
    #[must_use]
    pub fn with_tools(self, tools: ToolPolicies) -> Self {
        Self { tools, ..self }
    }

    /// The policies for calls of tools.
    #[must_use]
    pub const fn tools(&self) -> &ToolPolicies {
        &self.tools
    }

    /// Sets the syntax of the key in its header field.
    #[must_use]
    pub fn with_key_syntax(mut self, syntax: KeySyntax) -> Self {
        self.profile.grammar.syntax = syntax;
        self
    }

    /// Sets the format of the key.
    #[must_use]
    pub fn with_key_format(mut self, format: KeyFormat) -> Self {
        self.profile.grammar.format = format;
        self
    }

    /// Sets the scope within which a caller's key is unique.
    #[must_use]
    pub fn with_key_scope(mut self, scope: KeyScope) -> Self {
        self.profile.key_scope = scope;
        self
    }

    /// Sets the meaning of a slash at the end of a path, for the choice of the route and of the record. By default it
    /// makes no difference.
    #[must_use]
    pub fn with_trailing_slash(self, trailing_slash: TrailingSlash) -> Self {
        Self { trailing_slash, ..self }
    }

    /// Sets the meaning of upper and lower case in the fixed parts of a route's pattern, for the choice of the route
    /// and of the record. By default it makes no difference. Parameters keep their case.
    #[must_use]
    pub fn with_path_case(self, path_case: PathCase) -> Self {
        Self { path_case, ..self }
    }

    /// Sets a number that each [`RequestEvent`](crate::RequestEvent) of a request under these settings has. It has no effect
    /// on the request; an observer may tell routes apart by it. The default is 0.
    #[must_use]
    pub fn with_tag(self, tag: u32) -> Self {
        Self { tag, ..self }
    }

    /// The number that [`with_tag`](Self::with_tag) sets.
    #[must_use]
    pub const fn tag(&self) -> u32 {
        self.tag
    }

    /// These settings on the route with this pattern.
    pub(crate) fn at(self, pattern: PathPattern) -> Self {
        Self { pattern: Some(pattern), ..self }
    }

    /// The pattern of the route that has these settings.
    pub(crate) const fn pattern(&self) -> Option<&PathPattern> {
        self.pattern.as_ref()
    }

    /// One spelling for all spellings of this path (without a query) that are one path on this route.
    pub(crate) fn canonical_path<'a>(&self, path: &'a str) -> Cow<'a, str> {
        match &self.pattern {
            Some(pattern) => pattern.canonical(path),
            None => path::canonical(path, self.trailing_slash),
        }
    }

    /// Sets the methods that are covered.
    ///
    /// # Errors
    /// If a method is safe (GET, HEAD, OPTIONS, TRACE), because it has no effect to protect, or CONNECT, because it is not a
    /// request to the service.
    pub fn with_methods(mut self, methods: Vec<Method>) -> Result<Self, ConfigError> {
        match methods.iter().find(|method| !method::has_effect(method)) {
            Some(method) => Err(ConfigError::new(format!(
                "the method {method} cannot be covered: a key protects requests that change something"
            ))),
            None => {
                self.profile.methods = methods;
                Ok(self)
            }
        }
    }

    /// Sets the rules by which bodies are compared.
    #[must_use]
    pub fn with_fingerprint(mut self, fingerprint: FingerprintRules) -> Self {
        self.profile.fingerprint = fingerprint;
        self
    }

    /// Sets the comparison of bodies. [`BodyComparison::Raw`] and [`BodyComparison::Nothing`] leave the members of the rules
    /// without effect.
    #[must_use]
    pub fn with_body_comparison(mut self, comparison: BodyComparison) -> Self {
        self.profile.set_body_comparison(comparison);
        self
    }

    /// The comparison of bodies.
    #[must_use]
    pub const fn body_comparison(&self) -> BodyComparison {
        self.profile.body_comparison
    }

    /// Sets header fields that are compared, instead of those of the profile: a different value makes a different request.
    /// Fields that name another method or path (`X-HTTP-Method-Override`, `X-Original-URL` and the like) are always compared.
    #[must_use]
    pub fn with_fingerprint_headers(mut self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        let mut names: Vec<_> = names.into_iter().collect();
        names.sort_unstable_by(|a, b| a.as_str().cmp(b.as_str()));
        names.dedup();
        self.fingerprint_headers = names;
        self
    }

    /// Adds header fields of the response to those that are stored and replayed.
    ///
    /// # Errors
    /// If a field must never be replayed (hop-by-hop, `Set-Cookie`, `Date` and others).
    pub fn with_stored_headers(
        mut self,
        names: impl IntoIterator<Item = HeaderName>,
    ) -> Result<Self, ConfigError> {
        for name in names {
            self.kept.add(name)?;
        }
        Ok(self)
    }

    /// Sets members of JSON responses that records do not keep, such as the number of a card: the first client gets them, and
    /// a replay has `null` in their place and the field `Idempotency-Redacted: true`. A step `*` of a pointer stands for
    /// every element and every member. A response whose body is not JSON is not kept at all, because members cannot be found
    /// in it: its replay is refused.
    ///
    /// A response that the operation stores itself ([`with_upstream_completion`](Self::with_upstream_completion)) or that an
    /// operator writes is not changed.
    ///
    /// # Errors
    /// If a pointer is the whole body.
    pub fn with_redacted_members(mut self, members: Vec<JsonPointer>) -> Result<Self, ConfigError> {
        if members.iter().any(|member| member.as_str().is_empty()) {
            return Err(ConfigError::new(
                "\"\" is the whole body; name a member such as \"/card/number\", or let the service send Idempotency-Store: tombstone, \
                 with which nothing of its response is kept",
            ));
        }
        self.redaction = Arc::new(Redaction::clone(&self.redaction).with_members(members));
        Ok(self)
    }

    /// Sets header and trailer fields of responses that records do not keep, although they would by default or because of
    /// [`with_stored_headers`](Self::with_stored_headers).
    #[must_use]
    pub fn with_redacted_headers(mut self, names: Vec<HeaderName>) -> Self {
        self.redaction = Arc::new(Redaction::clone(&self.redaction).with_headers(names));
        self
    }

    /// Counts responses by the outcome of their redaction, if these settings redact anything.
    #[must_use]
    pub fn with_redaction_counts(self, counts: Arc<RedactionCounts>) -> Self {
        Self { redaction_counts: Some(counts), ..self }
    }

    /// Returns true if records do not keep some members or fields of responses.
    #[must_use]
    pub fn redacts(&self) -> bool {
        !self.redaction.is_empty()
    }

    /// The members of responses that records do not keep.
    pub fn redacted_members(&self) -> impl Iterator<Item = &JsonPointer> {
        self.redaction.members()
    }

    /// Sets the policy for responses from 500 to 599, panics and timeouts.
    #[must_use]
    pub fn with_server_errors(mut self, server_errors: ServerErrors) -> Self {
        self.profile.server_errors = server_errors;
        self
    }

    /// Sets the statuses of responses that free the key, instead of those of the profile: the client may correct the refused
    /// request and send it again under the same key. The service must have done nothing when it sends such a status. 401, 403,
    /// 407, 408, 421, 425 and 429 always free the key.
    ///
    /// # Errors
    /// If one is not an error, from 400 to 599.
    pub fn with_release_statuses(mut self, statuses: Vec<StatusCode>) -> Result<Self, ConfigError> {
        match statuses.iter().find(|status| !status.is_client_error() && !status.is_server_error()) {
            Some(status) => Err(ConfigError::new(format!(
                "the status {} is not an error; only responses from 400 to 599 can free the key",
                status.as_u16()
            ))),
            None => {
                self.profile.release_statuses = statuses;
                Ok(self)
            }
        }
    }

    /// The limits of rates.
    #[must_use]
    pub const fn rate_limits(&self) -> &RateLimits {
        &self.rate_limits
    }

    /// Limits the rates of requests with a key. A request beyond a limit is refused with a 429, and nothing is claimed. There
    /// are no limits by default. Several routes with copies of one value share its counts.
    #[must_use]
    pub fn with_rate_limits(self, rate_limits: RateLimits) -> Self {
        Self { rate_limits, ..self }
    }

    /// Sets the page that documents the rules for keys: an `http` or `https` URL, or a path that starts with a slash.
    /// Refusals link to it (`Link: <…>; rel="describedby"`, draft-ietf-httpapi-idempotency-key-header-07, 2.7).
    ///
    /// # Errors
    /// If it is neither of them.
    pub fn with_documentation(self, url: &str) -> Result<Self, ConfigError> {
        match HeaderValue::try_from(format!("<{url}>; rel=\"describedby\"")) {
            Ok(link) if is_url_or_path(url) => Ok(Self { documentation: Some(link), ..self }),
            _ => Err(ConfigError::new(format!(
                "{url:?} is not a URL; write one such as \"https://developer.example.com/idempotency\", or a path"
            ))),
        }
    }

    /// Sets the beginning of the types of problems, instead of `urn:oncegate:problem:`, so that they are links: the name of the
    /// problem follows it, as in `https://developer.example.com/retry.html#key-reused`.
    ///
    /// # Errors
    /// If it is no `http` or `https` URL and no path, or does not end with a slash or `#`.
    pub fn with_problem_base_url(mut self, url: &str) -> Result<Self, ConfigError> {
        if !is_url_or_path(url) || !url.ends_with(['/', '#']) {
            return Err(ConfigError::new(format!(
                "{url:?} is not a URL to which the name of a problem can be added; write one that ends with a slash or #, such \
                 as \"https://developer.example.com/problems/\""
            )));
        }
        self.profile.problem_base = Cow::Owned(url.to_owned());
        Ok(self)
    }

    /// The page that documents the rules for keys.
    #[must_use]
    pub fn documentation(&self) -> Option<&str> {
        let link = self.documentation.as_ref()?.to_str().ok()?;
        link.strip_prefix('<')?.split_once('>').map(|(url, _)| url)
    }

    /// Sets the header field that marks a replay.
    ///
    /// # Errors
    /// If responses use it for another purpose, such as `Content-Type`.
    pub fn with_replay_marker(mut self, name: HeaderName) -> Result<Self, ConfigError> {
        if is_reserved(&name) {
            return Err(ConfigError::new(format!(
                "the header field {name} has another purpose; it cannot mark a replay"
            )));
        }
        self.profile.replay_marker.0 = name;
        Ok(self)
    }

    /// Limits the body of a request with a key, in bytes, at most to 1 GiB. It is held in memory to be fingerprinted; a
    /// larger one is refused with a 413.
    ///
    /// # Errors
    /// If it is above 1 GiB.
    pub fn with_max_request_body(self, bytes: usize) -> Result<Self, ConfigError> {
        let max_request_body = ConfigError::check("the largest request body, in bytes,", bytes, 0..=1 << 30)?;
        Ok(Self { max_request_body, ..self })
    }

    /// Limits the response body that is stored, in bytes. A larger one goes to the first client whole and leaves a
    /// record that cannot be replayed.
    ///
    /// # Errors
    /// If it is above [`limits::MAX_RESPONSE_BYTES`], which is the most that a record can hold.
    pub fn with_max_response_body(self, bytes: usize) -> Result<Self, ConfigError> {
        if bytes > limits::MAX_RESPONSE_BYTES {
            let max = limits::MAX_RESPONSE_BYTES;
            return Err(ConfigError::new(format!(
                "a response body of {bytes} bytes; at most {max} can be stored"
            )));
        }
        Ok(Self { max_response_body: bytes, ..self })
    }

    /// Limits the time that a client may take to send the body of a request with a key. The body is held in memory
    /// until it is complete. A slower client is refused, and nothing is executed.
    #[must_use]
    pub fn with_body_timeout(self, body_timeout: Duration) -> Self {
        Self { body_timeout, ..self }
    }

    /// Limits the time for which a streamed response is read on after its client left. Then the handler's body is
    /// dropped.
    #[must_use]
    pub fn with_stream_timeout(self, stream_timeout: Duration) -> Self {
        Self { stream_timeout, ..self }
    }

    /// While the store is out of reach, executes requests with a key **without protection**: a retry may take effect
    /// twice. Each is marked with `Idempotency-Status: failed-open` and counted. A store that can be reached and is full, or
    /// cannot serve this record, still refuses them.
    #[must_use]
    pub fn danger_fail_open(self) -> Self {
        Self { fails_open: true, ..self }
    }

    /// Only observes: every request passes **without protection**, as if there were no layer. The outcome that it would have
    /// had is reported to the [observer](crate::RequestObserver) as [`Disposition::Shadow`](crate::Disposition::Shadow). No
    /// request is refused, delayed or answered by the layer, whatever happens to the store.
    ///
    /// The layer keeps records for that in the same store, apart from those of routes that protect. They hold the status of a
    /// response and nothing else of it, and are never replayed, also after the route protects.
    #[must_use]
    pub fn with_shadow(self, is_shadow: bool) -> Self {
        Self { is_shadow, ..self }
    }

    /// Returns true if requests pass without protection, and the layer only observes what it would have done.
    #[must_use]
    pub const fn is_shadow(&self) -> bool {
        self.is_shadow
    }

    /// Sets the service that is asked for outcomes.
    ///
    /// Under [`OnAbandoned::Reconcile`](oncegate_core::OnAbandoned::Reconcile) it is asked for the outcome of an
    /// abandoned attempt. With [`with_upstream_completion`](Self::with_upstream_completion) it is asked for the
    /// response of an operation whose record was completed without one, because every process died before the layer
    /// had added it. Without such a service, a retry of that operation is refused with `replay-unavailable`.
    #[must_use]
    pub fn with_reconcile(self, reconcile: impl Reconcile) -> Self {
        Self { reconcile: Some(Arc::new(reconcile)), ..self }
    }

    /// Sets the service that is asked before each replay if the caller may still get the response. It is not asked about a
    /// response that it has just given itself ([`with_reconcile`](Self::with_reconcile)).
    #[must_use]
    pub fn with_authorize(self, authorize: impl Authorize) -> Self {
        Self { authorize: Some(Arc::new(authorize)), ..self }
    }

    /// Lets the operation complete its record itself, in the transaction that holds its effect: in PostgreSQL by
    /// `SELECT oncegate.complete(record, token)` before its `COMMIT`. If the call passes no response, the layer adds it.
    ///
    /// An attempt whose lease ran out without that has committed nothing, so it is executed again: this sets
    /// [`OnAbandoned::Reexecute`], and a policy that is set later must have the same value. Responses from 500 to 599, panics and
    /// timeouts free the key unless the record is completed, regardless of [`with_server_errors`](Self::with_server_errors).
    ///
    /// A layer refuses this setting with a store that cannot commit a completion together with the effect.
    #[must_use]
    pub fn with_upstream_completion(self) -> Self {
        let policy = self.policy.with_on_abandoned(OnAbandoned::Reexecute);
        Self { completed_by: CompletedBy::Upstream, policy, ..self }
    }

    /// Returns true if there is a service to ask for the response of an operation that completed its record without
    /// it.
    pub(crate) const fn recovers_responses(&self) -> bool {
        matches!(self.completed_by, CompletedBy::Upstream) && self.reconcile.is_some()
    }

    /// The longest time since a request was sent first: an older one is refused with `key-expired`. `None` if the profile has no
    /// field for that time.
    #[must_use]
    pub fn max_request_age(&self) -> Option<Duration> {
        self.profile.first_sent_header.as_ref()?;
        let retention = self.policy.retention();
        Some(retention.saturating_sub(first_sent::max_ahead(retention)))
    }

    /// Returns true if responses from 500 to 599 are kept and replayed.
    #[must_use]
    pub fn keeps_server_errors(&self) -> bool {
        self.profile.server_errors == ServerErrors::Replay && self.completed_by == CompletedBy::Layer
    }

    /// Returns true if requests with a key are executed without protection while the store is out of reach.
    #[must_use]
    pub const fn fails_open(&self) -> bool {
        self.fails_open
    }

    /// The one that completes the record of an operation.
    #[must_use]
    pub const fn completed_by(&self) -> CompletedBy {
        self.completed_by
    }

    /// The largest response body that is stored, in bytes.
    #[must_use]
    pub const fn max_response_body(&self) -> usize {
        self.max_response_body
    }

    /// The part of a response that a record keeps, for a [`Reconcile`] that received the response of an earlier
    /// attempt. `None` if the response cannot be replayed: it has no end, is another protocol, or is too large; or if its
    /// members cannot be redacted.
    ///
    /// Redaction reads the whole body: up to 8 milliseconds for each MiB. In a future, use
    /// [`stored_response_off_thread`](Self::stored_response_off_thread).
    #[must_use]
    pub fn stored_response(
        &self,
        head: &http::response::Parts,
        body: &[Bytes],
        trailers: Option<&HeaderMap>,
    ) -> Option<StoredResponse> {
        if !self.can_store(head, body) {
            return None;
        }
        self.redacted_response(head, body, trailers, self.redaction.body(body))
    }

    /// As [`stored_response`](Self::stored_response), but the members of a large body are sought on one of the runtime's threads
    /// for blocking work. Must run in a Tokio runtime.
    pub async fn stored_response_off_thread(
        &self,
        head: &http::response::Parts,
        body: &[Bytes],
        trailers: Option<&HeaderMap>,
    ) -> Option<StoredResponse> {
        if !self.can_store(head, body) {
            return None;
        }
        let redacted = match self.redaction.is_slow(body) {
            false => self.redaction.body(body),
            // Boxed: this path is rare, and boxing keeps the common future small.
            true => Box::pin(Redaction::body_off_thread(self.redaction.clone(), body.to_vec())).await,
        };
        self.redacted_response(head, body, trailers, redacted)
    }

    fn can_store(&self, head: &http::response::Parts, body: &[Bytes]) -> bool {
        let len: usize = body.iter().map(Bytes::len).sum();
        !cannot_be_stored(head) && len <= self.max_response_body
    }

    fn redacted_response(
        &self,
        head: &http::response::Parts,
        body: &[Bytes],
        trailers: Option<&HeaderMap>,
        redacted: RedactedBody,
    ) -> Option<StoredResponse> {
        let kept = self.kept.of(&head.headers);
        let trailers = kept_trailers(trailers);
        let counts = self.redaction_counts.as_deref();
        self.redaction.response(head.status.as_u16(), (kept, body, trailers), redacted, counts)
    }

    /// The form in which records keep responses, to compare those that an operation stored itself.
    pub(crate) fn stored_form(&self) -> StoredForm {
        if self.redaction.is_empty() {
            return StoredForm::UNCHANGED;
        }
        let redaction = self.redaction.clone();
        StoredForm::new(move |response| redaction.stored(response))
    }

    /// Returns true if requests with this method are protected. Methods are compared without regard to case, because
    /// frameworks turn `patch` into `PATCH` and execute it.
    #[must_use]
    pub fn covers(&self, method: &Method) -> bool {
        method::contains(&self.profile.methods, method)
    }

    /// Returns true if a request with these header fields may have a key. If the query or the body carries the key, every
    /// request may.
    pub(crate) fn may_have_key(&self, headers: &HeaderMap) -> bool {
        let profile = &self.profile;
        self.body_has_key()
            || profile
                .key_headers
                .iter()
                .chain(&profile.first_sent_header)
                .any(|name| headers.contains_key(name))
            || has_other_spelling(profile, headers)
    }

    /// Returns true if the key of a request without one in its head is sought in its body.
    pub(crate) fn body_has_key(&self) -> bool {
        // A form has the same parameters as a query.
        self.natural_key.is_some()
            || !self.profile.key_members.is_empty()
            || !self.profile.key_query.is_empty()
            || self.profile.protocol == Protocol::Mcp
    }

    /// Returns true if requests with this method and a key in a header field are refused, because the key would have no effect.
    #[must_use]
    pub fn refuses_keys_of(&self, method: &Method) -> bool {
        self.profile.uncovered_methods == UncoveredMethods::Refuse
            && method::has_effect(method)
            && !self.covers(method)
            && !self.profile.key_headers.is_empty()
    }

    /// Returns true if requests with this method are refused because they have a key that would have no effect.
    pub(crate) fn refuses_method(&self, method: &Method, headers: &HeaderMap) -> bool {
        self.refuses_keys_of(method)
            && (self.profile.key_headers.iter().any(|name| headers.contains_key(name))
                || has_other_spelling(&self.profile, headers))
    }

    /// Checks the places that may carry the key. A layer checks them, too.
    ///
    /// # Errors
    /// If nothing carries the key, or if the mark of a replay is one of them.
    pub fn check_carriers(&self) -> Result<(), ConfigError> {
        let profile = &self.profile;
        if profile.key_headers.contains(&profile.replay_marker.0) {
            return Err(ConfigError::new(format!(
                "the header field {} cannot carry the key and mark a replay",
                profile.replay_marker.0
            )));
        }
        if let Some(name) = &profile.first_sent_header
            && profile.key_headers.contains(name)
        {
            return Err(ConfigError::new(format!(
                "the header field {name} cannot carry the key and the time at which a request was sent first"
            )));
        }
        if self.natural_key.is_none() && !profile.has_carrier() {
            return Err(ConfigError::new(
                "nothing carries the key: name a header field, a parameter of the query, or a member of the body",
            ));
        }
        Ok(())
    }

    /// Checks these settings against each other and against the guarantees of the store.
    pub(crate) fn check(&self, store: &Capabilities) -> Result<(), ConfigError> {
        if self.completed_by == CompletedBy::Upstream {
            if !store.atomic_with_effect {
                return Err(ConfigError::new(format!(
                    "the operation completes its record in its own transaction (completion = \"upstream\"), but the store \
                     {} cannot commit a completion together with an effect; use PostgreSQL",
                    store.name
                )));
            }
            if self.policy.on_abandoned() != OnAbandoned::Reexecute {
                return Err(ConfigError::new(
                    "the operation completes its record in its own transaction (completion = \"upstream\"), so an abandoned \
                     attempt has committed nothing and is executed again; on_abandoned must be reexecute",
                ));
            }
        }
        self.check_carriers()?;
        if self.natural_key.is_some() && self.caller.allows_anonymous() {
            return Err(ConfigError::new(ANONYMOUS_NATURAL_KEY));
        }
        self.check_tools()?;
        self.check_shadow()?;
        if self.policy.on_abandoned() == OnAbandoned::Reconcile && self.reconcile.is_none() {
            return Err(ConfigError::new(
                "on_abandoned is reconcile, but there is no service to ask: call with_reconcile",
            ));
        }
        Ok(())
    }
}

impl Settings {
    /// Checks that requests can be observed: the outcome of a call of a tool is known from its response only, which would have to
    /// be held back.
    ///
    /// # Errors
    /// If the requests are messages of the Model Context Protocol.
    pub fn check_shadow(&self) -> Result<(), ConfigError> {
        if self.is_shadow && self.profile.protocol == Protocol::Mcp {
            return Err(ConfigError::new(
                "shadow only observes requests, and calls of tools (profile = \"mcp\") cannot be observed; leave shadow out on this route",
            ));
        }
        Ok(())
    }

    /// Checks the policies for calls of tools against the protocol, and the protocol against the keys.
    fn check_tools(&self) -> Result<(), ConfigError> {
        let speaks_mcp = self.profile.protocol == Protocol::Mcp;
        if !speaks_mcp && !self.tools.is_empty() {
            return Err(ConfigError::new(
                "read-only-tools and intent-tools are for messages of the Model Context Protocol; set profile = \"mcp\", or leave \
                 them out",
            ));
        }
        if speaks_mcp && self.natural_key.is_some() {
            return Err(ConfigError::new(
                "natural-key has no effect on calls of tools; name the tools whose keys are built from their arguments in \
                 intent-tools",
            ));
        }
        if self.tools.has_intents() && self.caller.allows_anonymous() {
            return Err(ConfigError::new(ANONYMOUS_INTENT));
        }
        Ok(())
    }
}
/// The first name that is in the list before.
pub(crate) fn repeated(names: &[HeaderName]) -> Option<&HeaderName> {
    names
        .iter()
        .enumerate()
        .find(|(at, name)| names.iter().take(*at).any(|own| own == *name))
        .map(|(_, name)| name)
}

/// Returns true for an `http` or `https` URL, and for a path that starts with a slash.
fn is_url_or_path(url: &str) -> bool {
    let is_reference = ["http://", "https://", "/"]
        .iter()
        .any(|start| url.strip_prefix(start).is_some_and(|rest| !rest.is_empty() && !rest.starts_with('/')));
    // RFC 3986, appendix A: everything else is encoded in a URL.
    is_reference && url.bytes().all(|byte| byte.is_ascii_graphic() && !br#""<>\^`{|}"#.contains(&byte))
}

/// A key that is built from the body need not be guessed: two callers with the same cart have the same key.
const ANONYMOUS_NATURAL_KEY: &str = "the key is built from members of the body (natural-key), and callers that are not told apart \
     would get each other's responses; require a field that identifies them (scope = \"required-header:NAME\" or \
     \"required-cookie:NAME\"), or declare that there is only one caller (scope = \"single-tenant\")";

/// The same for keys of intents: two agents that order the same in runs of the same name have the same key.
const ANONYMOUS_INTENT: &str = "the key of a call is built from its intent (intent-tools), and callers that are not told apart \
     would get each other's results; require a field that identifies them (scope = \"required-header:NAME\" or \"jwt:sub\"), \
     or declare that there is only one caller (scope = \"single-tenant\")";

#[cfg(test)]
mod tests {
    use super::*;
    use oncegate_core::{Durability, Fencing};

    #[test]
    fn safe_methods_cannot_be_covered() {
        for method in [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE, Method::CONNECT] {
            assert!(Settings::default().with_methods(vec![Method::POST, method]).is_err());
        }
        assert!(Settings::default().with_methods(vec![Method::PUT, Method::DELETE]).is_ok());
    }

    #[test]
    fn only_errors_free_the_key() {
        for status in [200, 201, 303, 304, 101, 600] {
            let status = StatusCode::from_u16(status).unwrap();
            assert!(Settings::default().with_release_statuses(vec![status]).is_err(), "{status}");
        }
    }

    #[test]
    fn a_link_to_documentation_is_a_url() {
        for url in ["https://a.example/x?y=1#z", "http://a.example", "/docs"] {
            let settings = Settings::default().with_documentation(url).unwrap();
            let link = settings.documentation.unwrap();
            assert_eq!(link, format!("<{url}>; rel=\"describedby\""));
        }
        for url in
            ["", "/", "https://", "docs", "//a.example", "ftp://a", "https://a>b", "https://a b", "https://ü"]
        {
            assert!(Settings::default().with_documentation(url).is_err(), "{url}");
        }
    }

    #[test]
    fn the_types_of_problems_can_be_links() {
        for url in ["https://a.example/problems/", "http://a.example/retry.html#", "/docs/"] {
            let settings = Settings::default().with_problem_base_url(url).unwrap();
            let condition = crate::refusal::Condition::KeyReused;
            assert_eq!(settings.profile().problem_type(condition), format!("{url}key-reused"));
            let refusal = crate::refusal::Refusal::new(condition).into_response(&settings, None);
            let text = String::from_utf8(refusal.into_body().to_vec()).unwrap();
            assert!(text.starts_with(&format!(r#"{{"type":"{url}key-reused","#)), "{text}");
        }
        for url in ["", "/", "https://a.example", "docs/", "ftp://a/", "https://a>b/", "//a.example/"] {
            assert!(Settings::default().with_problem_base_url(url).is_err(), "{url}");
        }
    }

    #[test]
    fn a_replay_is_marked_by_a_field_of_its_own() {
        let marked = |name| Settings::default().with_replay_marker(HeaderName::from_static(name));
        for name in ["content-type", "location", "date", "set-cookie", "content-length", "link"] {
            assert!(marked(name).is_err(), "{name}");
        }
        assert!(marked("x-replayed").unwrap().check(&promises(false)).is_ok());
        assert!(
            marked("x-replayed")
                .unwrap()
                .with_key_headers([HeaderName::from_static("x-replayed")])
                .unwrap()
                .check(&promises(false))
                .is_err()
        );
    }

    #[test]
    fn a_field_with_another_purpose_carries_no_key() {
        let carried = |name| Settings::default().with_key_headers([HeaderName::from_static(name)]);
        for name in ["content-type", "authorization", "cookie", "host", "if-match", "x-forwarded-for", "te"] {
            assert!(carried(name).is_err(), "{name}");
        }
        for name in ["x-request-token", "idempotency-key", "paypal-request-id", "x-idempotency-key", "if"] {
            assert!(carried(name).is_ok(), "{name}");
        }
    }

    #[test]
    fn the_stored_body_is_bounded_by_what_a_record_holds() {
        assert!(Settings::default().with_max_response_body(limits::MAX_RESPONSE_BYTES).is_ok());
        assert!(Settings::default().with_max_response_body(limits::MAX_RESPONSE_BYTES + 1).is_err());
        assert!(Settings::default().with_max_request_body(1 << 30).is_ok());
        assert!(Settings::default().with_max_request_body((1 << 30) + 1).is_err());
    }

    #[test]
    fn a_key_of_the_body_needs_callers_that_are_told_apart() {
        let key = || NaturalKey::new(vec![JsonPointer::parse("/cart").unwrap()]).unwrap();
        let tenant = || HeaderName::from_static("x-tenant");
        let check = |scope: CallerScope| {
            let settings = Settings::default().with_natural_key(key()).with_caller(scope);
            settings.check(&promises(false)).map_err(|error| error.to_string())
        };
        for anonymous in
            [CallerScope::default(), CallerScope::header(tenant()), CallerScope::cookie("sid").unwrap()]
        {
            assert!(check(anonymous).unwrap_err().contains("scope = \"single-tenant\""));
        }
        for told in [
            CallerScope::single_tenant(),
            CallerScope::required_header(tenant()),
            CallerScope::required_header(tenant()).and(CallerScope::cookie("sid").unwrap()),
            CallerScope::from_fn(|_| None),
        ] {
            assert_eq!(check(told), Ok(()));
        }
        assert!(Settings::default().check(&promises(false)).is_ok());
    }

    #[test]
    fn fields_that_identify_a_request_are_known() {
        let name = HeaderName::from_static;
        let settings = Settings::default()
            .with_caller(CallerScope::header(name("x-tenant")).and(CallerScope::cookie("sid").unwrap()))
            .with_key_headers([name("x-key")])
            .unwrap()
            .with_fingerprint_headers([name("x-version")]);
        for own in
            ["x-tenant", "cookie", "x-key", "x-version", "content-type", "content-encoding", "x-http-method"]
        {
            assert!(settings.depends_on_header(&name(own)), "{own}");
        }
        for other in ["authorization", "idempotency-key", "x-other"] {
            assert!(!settings.depends_on_header(&name(other)), "{other}");
        }
        assert!(Settings::default().depends_on_header(&name("authorization")));
    }

    #[test]
    fn reconcile_needs_a_service_to_ask() {
        let policy = Policy::default().with_on_abandoned(OnAbandoned::Reconcile);
        assert!(Settings::default().with_policy(policy).check(&promises(true)).is_err());
    }

    #[test]
    fn an_operation_that_completes_its_record_needs_a_store_with_transactions_and_is_executed_again() {
        let upstream = Settings::default().with_upstream_completion();
        assert!(upstream.check(&promises(true)).is_ok());
        assert!(upstream.check(&promises(false)).unwrap_err().to_string().contains("the store here"));
        let error = upstream.with_policy(Policy::default()).check(&promises(true)).unwrap_err();
        assert!(error.to_string().contains("must be reexecute"), "{error}");
    }

    fn promises(atomic_with_effect: bool) -> Capabilities {
        let mut promises = Capabilities::new("here", Durability::Synced, Fencing::Monotonic);
        promises.atomic_with_effect = atomic_with_effect;
        promises
    }
}
