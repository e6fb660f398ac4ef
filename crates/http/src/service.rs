//! The Tower service, which handles one request.

use std::fmt;
use std::future::{Future, poll_fn};
use std::mem;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{HeaderMap, HeaderName, HeaderValue, TRAILER};
use http::request::Parts;
use http::{Request, Response};
use http_body::Body;
use oncegate_core::{
    CallerTag, ErrorChain, Extent, Fingerprint, IdScheme, IdempotencyKey, Label, RecordId, Scope, StoreError,
    StoreErrorKind, StoredResponse,
};
use oncegate_engine::{ClaimOutcome, ClaimRequest, Permit, ResponsePermit};
use pin_project_lite::pin_project;
use tower_service::Service;

use crate::body::{BoxError, RequestBody, RequestRead, ResponseBody, read_request};
use crate::budget::{BudgetExhausted, BudgetReservation, TIED_REQUEST, tie};
use crate::canonical::{self, BodyKeyError};
use crate::carrier::key_in_head;
use crate::context::ProxyRefusal;
use crate::event::{Disposition, KeyedEvent, RequestEvent, RequestPhase, Watch};
use crate::execute::{Execution, ExecutionEnd, FENCED, take_directive};
use crate::first_sent::FirstSent;
use crate::grpc::GrpcForm;
use crate::headers::restore;
use crate::in_flight::{Limit, Slot};
use crate::key::KeyHeaderError;
use crate::layer::Shared;
use crate::mcp::{CallError, Message, Protocol, ToolCall, is_end_of_session};
use crate::method;
use crate::missing_response::{Question, QuestionResult, awaited};
use crate::rate_limit::{ExceededRate, RateLimitKind};
use crate::redaction::REDACTED;
use crate::refusal::{Condition, Refusal};
use crate::scope::NoCaller;
use crate::settings::{AuthorityRole, Settings};
use crate::shadow::{self, ResponseWatch};

/// A service whose retries are safe. Made by [`IdempotencyLayer`](crate::IdempotencyLayer).
#[derive(Clone)]
pub struct Idempotency<S> {
    shared: Arc<Shared>,
    inner: S,
}

impl<S> Idempotency<S> {
    pub(crate) const fn new(shared: Arc<Shared>, inner: S) -> Self {
        Self { shared, inner }
    }

    /// The service inside.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The service inside.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// The service inside.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S: fmt::Debug> fmt::Debug for Idempotency<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency").field("inner", &self.inner).finish_non_exhaustive()
    }
}

pin_project! {
    /// The future of a response.
    pub struct ResponseFuture<F, T> {
        #[pin]
        inner: FutureInner<F, T>,
    }
}

pin_project! {
    #[project = FutureProj]
    enum FutureInner<F, T> {
        Passing { #[pin] future: F },
        Observed { #[pin] future: F, watch: Option<Box<ResponseWatch>> },
        KeyedResponse { future: Pin<Box<dyn Future<Output = T> + Send>> },
    }
}

impl<F, RB, E> Future for ResponseFuture<F, Result<Response<ResponseBody<RB>>, E>>
where
    F: Future<Output = Result<Response<RB>, E>>,
    RB: Body,
{
    type Output = Result<Response<ResponseBody<RB>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().inner.project() {
            FutureProj::KeyedResponse { future } => future.as_mut().poll(cx),
            FutureProj::Observed { future, watch } => {
                let response = ready!(future.poll(cx)).inspect_err(|_| {
                    if let Some(watch) = watch.take() {
                        watch.failed();
                    }
                })?;
                let mut response = match watch.take() {
                    Some(watch) => watch.begin(response),
                    None => response.map(ResponseBody::passing),
                };
                take_directive(&mut response);
                take_foreign_status(&mut response);
                Poll::Ready(Ok(response))
            }
            FutureProj::Passing { future } => {
                let mut response = ready!(future.poll(cx))?;
                take_directive(&mut response);
                take_foreign_status(&mut response);
                Poll::Ready(Ok(response.map(ResponseBody::passing)))
            }
        }
    }
}

impl<F, T> fmt::Debug for ResponseFuture<F, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

impl<S, B, RB> Service<Request<B>> for Idempotency<S>
where
    S: Service<Request<RequestBody<B>>, Response = Response<RB>, Error: Send, Future: Send>
        + Clone
        + Send
        + 'static,
    B: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
    RB: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Response<ResponseBody<RB>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let settings = self.shared.settings(request.method(), request.uri().path());
        let has_key = settings.may_have_key(request.headers());
        let ends_calls = settings.profile.protocol == Protocol::Mcp
            && is_end_of_session(request.method(), request.headers())
            && self.shared.sessions.have_call(request.headers());
        let passing = if ends_calls {
            None
        } else if !has_path(request.uri()) && method::has_effect(request.method()) {
            // No route matches a target without a path, so the request is refused.
            None
        } else if !settings.covers(request.method()) {
            let refused = settings.refuses_method(request.method(), request.headers());
            Some(Disposition::NotCovered).filter(|_| !refused)
        } else if !has_key && !settings.profile.require_key {
            Some(Disposition::Unprotected)
        } else {
            None
        };
        if let Some(disposition) = passing {
            let (method, tag) = (request.method(), settings.tag());
            let event = RequestEvent { disposition, status: None, method, tag, trace: None, keyed: None };
            Watch::of(request.extensions()).report(&*self.shared.observer, &event);
            let future = self.inner.call(request.map(RequestBody::passing));
            return ResponseFuture { inner: FutureInner::Passing { future } };
        }
        if settings.is_shadow {
            let (request, watch) = shadow::observe(&self.shared, settings, request);
            let future = self.inner.call(request);
            return ResponseFuture { inner: FutureInner::Observed { future, watch } };
        }
        // `self.inner` is the service that `poll_ready` made ready, so call it and keep the clone for the next request.
        let clone = self.inner.clone();
        let inner = mem::replace(&mut self.inner, clone);
        let mut keyed = KeyedResponse::new(self.shared.clone(), settings.clone(), &request);
        keyed.ends_calls = ends_calls;
        ResponseFuture {
            inner: FutureInner::KeyedResponse { future: Box::pin(keyed.answer(inner, request)) },
        }
    }
}

/// The response to one request that has a key, or that lacks the key that it must have.
pub(crate) struct KeyedResponse {
    pub(crate) shared: Arc<Shared>,
    pub(crate) settings: Arc<Settings>,
    method: http::Method,
    watch: Watch,
    /// The key's field as it was received, for the response.
    echo: Option<(HeaderName, HeaderValue)>,
    /// The form of refusals, if the client speaks gRPC.
    grpc: Option<GrpcForm>,
    /// The call in the request, if it is a message of MCP.
    call: Option<ToolCall>,
    /// True if the request would end a session of MCP in which calls run.
    ends_calls: bool,
    pub(crate) begun: Instant,
    /// The operation, as an operator sees it.
    pub(crate) label: Label,
    /// True if the label already has the caller's tag.
    pub(crate) has_caller: bool,
    pub(crate) record: Option<RecordId>,
    pub(crate) attempt: Option<u32>,
    pub(crate) rate_limit: Option<RateLimitKind>,
    /// The time at which the client sent the request first, if the profile demands it.
    pub(crate) first_sent: Option<FirstSent>,
    is_observed: AtomicBool,
    /// The outcome if the client leaves.
    left: Disposition,
}

impl Drop for KeyedResponse {
    fn drop(&mut self) {
        if !*self.is_observed.get_mut() {
            self.observe(self.left, None);
        }
    }
}

impl KeyedResponse {
    fn new<B>(shared: Arc<Shared>, settings: Arc<Settings>, request: &Request<B>) -> Self {
        Self {
            shared,
            settings,
            method: request.method().clone(),
            watch: Watch::of(request.extensions()),
            echo: None,
            grpc: None,
            call: None,
            ends_calls: false,
            begun: Instant::now(),
            label: Label::default(),
            has_caller: false,
            record: None,
            attempt: None,
            rate_limit: None,
            first_sent: None,
            is_observed: AtomicBool::new(false),
            left: Disposition::ClientLeft,
        }
    }

    /// The same for a request that passes and is only observed. Only [`observe_after`](Self::observe_after) reports it.
    pub(crate) fn unreported<B>(shared: Arc<Shared>, settings: Arc<Settings>, request: &Request<B>) -> Self {
        let request = Self::new(shared, settings, request);
        request.is_observed.store(true, Ordering::Relaxed);
        request
    }

    fn observe(&self, disposition: Disposition, status: Option<http::StatusCode>) {
        self.observe_after(disposition, status, self.begun.elapsed());
    }

    /// Reports the outcome of the request, whose response began after this time.
    pub(crate) fn observe_after(
        &self,
        disposition: Disposition,
        status: Option<http::StatusCode>,
        duration: Duration,
    ) {
        self.is_observed.store(true, Ordering::Relaxed);
        let keyed = KeyedEvent {
            operation: self.label.operation(),
            caller: self.has_caller.then(|| self.label.caller()),
            record: self.record,
            attempt: self.attempt,
            rate_limit: self.rate_limit,
            duration,
        };
        self.report(disposition, status, Some(keyed));
    }

    fn report(
        &self,
        disposition: Disposition,
        status: Option<http::StatusCode>,
        keyed: Option<KeyedEvent<'_>>,
    ) {
        let (method, tag) = (&self.method, self.settings.tag());
        let event = RequestEvent { disposition, status, method, tag, trace: None, keyed };
        self.watch.report(&*self.shared.observer, &event);
    }

    /// Notes that the request is passed on without protection.
    fn observe_passing(&self) {
        self.is_observed.store(true, Ordering::Relaxed);
        self.report(Disposition::Unprotected, None, None);
    }

    /// Names the operation of a request that is refused before its record is known. The canonical path has no control
    /// characters, so it is safe on a terminal.
    pub(crate) fn label_early(&mut self, method: &http::Method, path: &str) {
        let path = self.settings.canonical_path(path);
        self.label = Label::new(CallerTag::default(), &format!("{} {path}", method::canonical(method)));
    }

    async fn answer<S, B, RB>(
        mut self,
        inner: S,
        request: Request<B>,
    ) -> Result<Response<ResponseBody<RB>>, S::Error>
    where
        S: Service<Request<RequestBody<B>>, Response = Response<RB>, Error: Send, Future: Send>
            + Send
            + 'static,
        B: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
        RB: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
    {
        let (parts, body) = request.into_parts();
        self.grpc = GrpcForm::of(&parts.headers);
        self.settings.caller.prepare(&parts).await;
        let (scope, key) = match self.scope_and_key(&parts) {
            Ok(scope_and_key) => scope_and_key,
            Err(refusal) => {
                self.label_early(&parts.method, parts.uri.path());
                return Ok(self.refuse(refusal));
            }
        };
        if let (Some(key), Ok(scope)) = (&key, &scope)
            && let Err(exceeded) = self.check_rate(scope, &parts, key)
        {
            return Ok(self.refuse_for_now(&exceeded));
        }
        let has_early_key = key.is_some();
        let (data, trailers, held) = match self.read(&parts, body).await {
            Ok(read) => read,
            Err(refusal) => {
                self.label_early(&parts.method, parts.uri.path());
                return Ok(self.refuse(refusal));
            }
        };
        // Before the body is compared. If the body may carry the key, it is not known yet if this request counts.
        let early_slot = match has_early_key {
            true => match self.enter(scope.as_ref().ok()) {
                Some(slot) => Some(slot),
                None => {
                    self.label_early(&parts.method, parts.uri.path());
                    return Ok(self.refuse(overloaded(TOO_MANY)));
                }
            },
            false => None,
        };
        let (method, uri) = (parts.method.clone(), parts.uri.clone());
        let (parts, mut compared) = match self.compare(parts, &data).await {
            Ok(compared) => compared,
            Err(refusal) => {
                self.label_early(&method, uri.path());
                return Ok(self.refuse(refusal));
            }
        };
        self.call = compared.call.take();
        match compared.verdict {
            Verdict::Covered => {}
            Verdict::Passes => {
                drop(early_slot);
                let request = Request::from_parts(parts, RequestBody::whole(data, trailers, held));
                return Box::pin(self.pass(inner, request)).await;
            }
            Verdict::Accepted => return Ok(self.accept()),
            Verdict::Refused(why) => {
                self.label_early(&method, uri.path());
                return Ok(self.refuse(Refusal::new(Condition::RequestMalformed).with_detail(why)));
            }
        }
        // Calls whose intents have no run cannot be told apart, so they are refused even if keys are optional.
        let needs_key = self.settings.profile.require_key
            || matches!(compared.body_key, Some(Err(BodyKeyError::Intent(_))));
        let key = match self.whole_key(key, compared.body_key, &parts) {
            Ok(key) => key,
            Err(refusal) if needs_key || refusal.condition != Condition::KeyMissing => {
                self.label_early(&parts.method, parts.uri.path());
                return Ok(self.refuse(refusal));
            }
            Err(_) => {
                drop(early_slot);
                let request = Request::from_parts(parts, RequestBody::whole(data, trailers, held));
                return Box::pin(self.pass(inner, request)).await;
            }
        };
        // Only a request with a key must identify its caller.
        let scope = match scope.map_or_else(|_| self.scope(&parts), Ok) {
            Ok(scope) => scope,
            Err(refusal) => {
                self.label_early(&parts.method, parts.uri.path());
                return Ok(self.refuse(refusal));
            }
        };
        if !has_early_key && let Err(exceeded) = self.check_rate(&scope, &parts, &key) {
            return Ok(self.refuse_for_now(&exceeded));
        }
        let Some(slot) = early_slot.or_else(|| self.enter(Some(&scope))) else {
            self.label_early(&parts.method, parts.uri.path());
            return Ok(self.refuse(overloaded(TOO_MANY)));
        };
        let ids = self.shared.engine.ids();
        let (id, label) = canonical::locate(&self.settings, ids, &scope, &parts, &key, self.call.as_ref());
        (self.record, self.label, self.has_caller) = (Some(id), label.clone(), true);
        let fingerprint = compared.fingerprint;
        let policy = self.settings.policy.with_response_recovery(self.recovers_responses());
        let claim = ClaimRequest { id, fingerprint, label, policy };
        let request = || Request::from_parts(parts, RequestBody::whole(data, trailers, held));
        self.watch.begins(RequestPhase::Claim);
        let claimed = self.shared.engine.claim(claim).await;
        self.watch.ends(RequestPhase::Claim);
        match claimed {
            Ok(ClaimOutcome::Execute(permit)) => match self.begin(permit).await {
                Ok(permit) => self.execute(inner, (permit, slot), key, request()).await,
                Err(refusal) => Ok(self.refuse(refusal)),
            },
            Ok(ClaimOutcome::Replay(stored)) => {
                // Without the body, which must not hold memory while the service decides.
                let (parts, _) = request().into_parts();
                Ok(self.replay_within_budget(stored, &parts).await)
            }
            Ok(ClaimOutcome::InProgress { lease_left, running_for }) => {
                let refusal = Refusal::new(Condition::RequestInProgress);
                Ok(self.refuse(refusal.with_retry_after(retry_after(lease_left, running_for))))
            }
            Ok(ClaimOutcome::Mismatch) => {
                let refusal = Box::pin(self.mismatch(id, fingerprint)).await;
                Ok(self.refuse(refusal))
            }
            Ok(ClaimOutcome::Unknown) => Ok(self.refuse(Refusal::new(Condition::OutcomeUnknown))),
            Ok(ClaimOutcome::AddResponse(permit)) => {
                Ok(Box::pin(self.recover_response(permit, key, request().into_parts().0)).await)
            }
            Ok(ClaimOutcome::ResponseAwaited) => Ok(self.refuse(awaited())),
            Ok(_) => Ok(self.refuse(Refusal::new(Condition::ReplayUnavailable))),
            Err(error) => {
                if error.is_unsent() {
                    // The log has the outage of the store already.
                    tracing::debug!(record = %id, error = %ErrorChain(&error), "claim failed");
                } else {
                    tracing::warn!(record = %id, error = %ErrorChain(&error), "claim failed");
                }
                match refusal_of(&error, self.settings.fails_open) {
                    Some(refusal) => Ok(self.refuse(refusal)),
                    // Boxed: this path is rare, and boxing keeps the common future small.
                    None => Box::pin(self.fail_open(inner, request())).await,
                }
            }
        }
    }

    /// The caller's scope. A refusal because it is not configured is logged.
    pub(crate) fn scope(&self, parts: &Parts) -> Result<Scope<'static>, Refusal> {
        self.shared.scope(&self.settings, parts).map_err(|no_caller| {
            if let (NoCaller::NotSet { credential, doubt }, false) = (&no_caller, self.settings.is_shadow) {
                self.shared.warn_of_missing_scope(credential, *doubt);
            }
            no_caller.refusal()
        })
    }

    /// Returns the caller's scope and the key, unless the body may carry the key. Then the scope may be missing: a request
    /// without a key needs none.
    pub(crate) fn scope_and_key(&mut self, parts: &Parts) -> Result<ScopeAndKey, Refusal> {
        let settings = &self.settings;
        if !has_path(&parts.uri) {
            return Err(Refusal::new(Condition::RequestMalformed).with_detail(NO_PATH));
        }
        if settings.refuses_method(&parts.method, &parts.headers) {
            return Err(Refusal::new(Condition::KeyUnsupported));
        }
        if self.ends_calls {
            // A server may refuse to end a session (revisions 2025-03-26 to 2025-11-25).
            let refusal = Refusal::new(Condition::RequestUnsupported).with_detail(SESSION_RUNS);
            return Err(refusal.with_status(Some(http::StatusCode::METHOD_NOT_ALLOWED)));
        }
        let carried = match settings.natural_key {
            None => key_in_head(&settings.profile, parts),
            Some(_) => None,
        };
        if let Some(Ok(carried)) = &carried
            && settings.profile.echo_key
        {
            self.echo.clone_from(&carried.echo);
        }
        if carried.is_none() && settings.body_has_key() {
            return Ok((self.shared.scope(settings, parts), None));
        }
        let scope = self.scope(parts)?;
        match carried {
            None => Err(Refusal::new(Condition::KeyMissing)),
            Some(Err(problem)) => Err(self.invalid_key(problem)),
            Some(Ok(carried)) => {
                self.check_first_sent(parts)?;
                Ok((Ok(scope), Some(carried.key)))
            }
        }
    }

    /// Checks the time at which the client sent the request first, if the profile demands it, before anything is claimed. The
    /// time is that of the store as it was last seen. [`KeyedResponse::begin`] checks it again.
    fn check_first_sent(&mut self, parts: &Parts) -> Result<(), Refusal> {
        let Some(name) = &self.settings.profile.first_sent_header else { return Ok(()) };
        let first_sent = FirstSent::read(name, &parts.headers)?;
        first_sent.check(self.shared.engine.store().now(), self.settings.policy.retention())?;
        self.first_sent = Some(first_sent);
        Ok(())
    }

    /// Checks the time of the first sending by the time of the claim, if the profile demands it. Only the clock of the store
    /// knows which records are forgotten: the one of this machine may have been set, or differ from those of other machines.
    async fn begin(&self, permit: Permit) -> Result<Permit, Refusal> {
        let Some(first_sent) = &self.first_sent else { return Ok(permit) };
        let Err(refusal) = first_sent.check(permit.claimed_at(), self.settings.policy.retention()) else {
            return Ok(permit);
        };
        // In a task of its own: a client that hangs up must not end it halfway.
        let end = self.shared.engine.spawn(async move {
            if permit.attempt().is_after_abandoned() {
                permit
                    .park("the request was sent first before the retention, and an attempt was abandoned")
                    .await;
            } else {
                permit.release().await;
            }
        });
        // If its runtime ends, so does this one.
        let _ = end.await;
        Err(refusal)
    }

    /// Counts this request for the rate limits of the route.
    pub(crate) fn check_rate(
        &mut self,
        scope: &Scope<'_>,
        parts: &Parts,
        key: &IdempotencyKey,
    ) -> Result<(), ExceededRate> {
        if self.settings.rate_limits.is_empty() {
            return Ok(());
        }
        let ids = self.shared.engine.ids();
        let (id, label) = canonical::locate(&self.settings, ids, scope, parts, key, self.call.as_ref());
        let caller = label.caller();
        self.settings.rate_limits.check(caller, id).inspect_err(|exceeded| {
            if !self.settings.is_shadow {
                exceeded.warn(caller);
            }
            (self.label, self.has_caller) = (label, true);
        })
    }

    fn refuse_for_now<RB>(&mut self, exceeded: &ExceededRate) -> Response<ResponseBody<RB>> {
        self.rate_limit = Some(exceeded.kind);
        let refusal = Refusal::new(Condition::RateLimited).with_detail(exceeded.detail());
        let mut response = self.refuse(refusal.with_retry_after(exceeded.retry_after()));
        exceeded.write(response.headers_mut());
        response
    }

    /// Counts this request as in flight, unless a limit is reached or the budget for responses is used up.
    fn enter(&self, scope: Option<&Scope<'_>>) -> Option<Slot> {
        let caller = scope.filter(|_| !self.settings.caller.is_single_tenant()).map(Scope::caller_tag);
        let entered = match self.shared.in_flight.enter(caller) {
            Ok(_) if !self.shared.response_budget.has_capacity() => Err(Limit::ResponseBudget),
            entered => entered,
        };
        entered.map_err(|limit| limit.warn(caller)).ok()
    }

    /// Computes the fingerprint of a request. A body that is large, or that becomes large when it is decoded, is
    /// handled on another thread, because it would block all other requests on this one.
    pub(crate) async fn compare(
        &self,
        parts: Parts,
        data: &Bytes,
    ) -> Result<(Parts, FingerprintedRequest), Refusal> {
        let held = || BudgetReservation::nothing(self.shared.request_budget.clone());
        let exhausted = |BudgetExhausted| overloaded(REQUEST_BUDGET_USED_UP);
        if data.len() <= COMPARED_HERE {
            let body = canonical::decode(&parts, data, COMPARED_HERE, &mut held());
            let body = body.map_err(exhausted)?;
            if !body.outgrows() {
                let ids = self.shared.engine.ids();
                let compared = FingerprintedRequest::of(&self.settings, ids, &parts, &body);
                drop(body);
                return Ok((parts, compared));
            }
        }
        // The semaphore is never closed.
        let turn = self.shared.comparisons.clone().acquire_owned().await.ok();
        let (settings, ids) = (self.settings.clone(), self.shared.engine.ids().clone());
        let (data, mut held) = (data.clone(), held());
        let compare = move || {
            let body = canonical::decode(&parts, &data, settings.max_request_body, &mut held)?;
            let compared = FingerprintedRequest::of(&settings, &ids, &parts, &body);
            drop((body, turn));
            Ok((parts, compared))
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => runtime.spawn_blocking(compare).await.unwrap_or(Err(BudgetExhausted)),
            Err(_) => compare(),
        }
        .map_err(exhausted)
    }

    fn invalid_key(&self, problem: KeyHeaderError) -> Refusal {
        let detail = self.settings.profile.grammar.explain(problem);
        Refusal::new(Condition::KeyInvalid).with_detail(detail)
    }

    /// The key of the request, in its head or in its body. A service may read either of them, so they must not differ.
    pub(crate) fn whole_key(
        &mut self,
        in_head: Option<IdempotencyKey>,
        in_body: Option<Result<IdempotencyKey, BodyKeyError>>,
        parts: &Parts,
    ) -> Result<IdempotencyKey, Refusal> {
        let Some(key) = in_head else {
            let has_date = self
                .settings
                .profile
                .first_sent_header
                .as_ref()
                .is_some_and(|name| parts.headers.contains_key(name));
            return match self.body_key(in_body) {
                Ok(key) => self.check_first_sent(parts).map(|()| key),
                Err(missing) if has_date && missing.condition == Condition::KeyMissing => {
                    Err(self.invalid_key(KeyHeaderError::Empty))
                }
                Err(refusal) => Err(refusal),
            };
        };
        match in_body {
            // As for other keys that are built from the request, a key that the client chose is ignored.
            Some(Ok(intent)) if self.call.as_ref().is_some_and(|call| call.is_by_intent) => Ok(intent),
            Some(Ok(other)) if other != key => Err(self.invalid_key(KeyHeaderError::Differing)),
            Some(Err(BodyKeyError::Invalid(KeyHeaderError::Unreadable | KeyHeaderError::Misplaced))) => {
                Ok(key)
            }
            Some(Err(BodyKeyError::Invalid(problem))) => Err(self.invalid_key(problem)),
            Some(Err(BodyKeyError::Intent(why))) => Err(self.no_intent(why)),
            _ => Ok(key),
        }
    }

    /// The key that the body carries. If it is built from members, the client gets it in the response, in quotes, which every key
    /// syntax accepts: it helps operators to find the record.
    fn body_key(
        &mut self,
        key: Option<Result<IdempotencyKey, BodyKeyError>>,
    ) -> Result<IdempotencyKey, Refusal> {
        let missing = || Refusal::new(Condition::KeyMissing);
        let key = key.ok_or_else(missing)?.map_err(|why| match (why, &self.settings.natural_key) {
            (BodyKeyError::Natural(why), Some(members)) => {
                let names: Vec<_> = members.members().iter().map(|member| member.as_str()).collect();
                missing().with_detail(format!(
                    "The key of this operation is built from members of its JSON body ({}), and {why}. Nothing was executed.",
                    names.join(", ")
                ))
            }
            (BodyKeyError::Invalid(problem), _) => self.invalid_key(problem),
            (BodyKeyError::Intent(why), _) => self.no_intent(why),
            _ => missing(),
        })?;
        if self.settings.natural_key.is_some()
            && let Some(name) = self.settings.profile.key_headers.first()
        {
            let quoted = HeaderValue::try_from([b"\"", key.as_bytes(), b"\""].concat()).ok();
            self.echo = quoted.map(|value| (name.clone(), value));
        }
        Ok(key)
    }

    /// The refusal of a call whose key cannot be built from its intent.
    fn no_intent(&self, why: CallError) -> Refusal {
        let place = self.settings.profile.run_members.first().map_or("", |member| member.pointer.as_str());
        match why {
            CallError::InvalidRun(problem) => Refusal::new(Condition::RequestMalformed).with_detail(format!(
                "Nothing was executed. The run of the agent ({place}) has the syntax of a key, and {problem}."
            )),
            CallError::Arguments => Refusal::new(Condition::RequestMalformed).with_detail(
                "Nothing was executed. The arguments of the call are not JSON that all programs read alike: they repeat a member, have \
                 half of a surrogate pair, or are nested more than 128 deep.",
            ),
            _ if place.is_empty() => Refusal::new(Condition::KeyMissing).with_detail(
                "Nothing was executed. Calls of this tool are told apart by the session, and the call has none: open one \
                 (Mcp-Session-Id).",
            ),
            _ => Refusal::new(Condition::KeyMissing).with_detail(format!(
                "Nothing was executed. Calls of this tool are told apart by the run of the agent, and the call names none: send its \
                 name in the member {place}, the same in all calls of one run."
            )),
        }
    }

    /// The refusal of a request that differs from the one that the key was used for. If only the host differs, the client may
    /// have sent one request to two addresses of the service: with a new key, it would take effect twice.
    pub(crate) async fn mismatch(&self, id: RecordId, fingerprint: Fingerprint) -> Refusal {
        if self.settings.authority() == AuthorityRole::Compared {
            match self.shared.engine.store().lookup(id).await {
                Ok(Some(record)) if canonical::differs_in_host_only(&record.fingerprint, &fingerprint) => {
                    if !self.settings.is_shadow {
                        self.shared.warn_of_other_host();
                    }
                    return Refusal::new(Condition::HostDiffers);
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(record = %id, error = %ErrorChain(&error), "the record of a mismatch could not be read");
                    return Refusal::new(Condition::StoreUnavailable).with_retry_after(1);
                }
            }
        }
        let refusal = Refusal::new(Condition::KeyReused);
        // If the body is the key, no client can send another key.
        match self.settings.natural_key {
            Some(_) => refusal.with_detail(REUSED_MEMBERS),
            None => refusal,
        }
    }

    /// Accepts a notification, and does nothing.
    fn accept<RB>(&self) -> Response<ResponseBody<RB>> {
        self.observe_passing();
        let mut response = Response::new(ResponseBody::own(Bytes::new()));
        *response.status_mut() = http::StatusCode::ACCEPTED;
        response
    }

    /// Passes on a request whose body has no key, and that needs none.
    async fn pass<S, B, RB>(
        self,
        mut inner: S,
        request: Request<RequestBody<B>>,
    ) -> Result<Response<ResponseBody<RB>>, S::Error>
    where
        S: Service<Request<RequestBody<B>>, Response = Response<RB>>,
    {
        self.observe_passing();
        let mut response = inner.call(request).await?;
        take_directive(&mut response);
        take_foreign_status(&mut response);
        Ok(response.map(ResponseBody::passing))
    }

    /// Reads the whole body, for the fingerprint.
    async fn read<B>(
        &mut self,
        parts: &Parts,
        body: B,
    ) -> Result<(Bytes, Option<HeaderMap>, Option<BudgetReservation>), Refusal>
    where
        B: Body<Error: Into<BoxError>>,
    {
        let limit = self.settings.max_request_body;
        let mut held = BudgetReservation::nothing(self.shared.request_budget.clone());
        let read = {
            let mut reading = pin!(read_request(body, limit, |bytes| held.add(bytes)));
            // Most bodies arrive with their heads and need no timer.
            match poll_fn(|cx| Poll::Ready(reading.as_mut().poll(cx))).await {
                Poll::Ready(read) => read,
                Poll::Pending => {
                    // The client may leave meanwhile.
                    self.label_early(&parts.method, parts.uri.path());
                    tokio::time::timeout(self.settings.body_timeout, reading)
                        .await
                        .unwrap_or_else(|_| RequestRead::Broken("it took too long".into()))
                }
            }
        };
        match read {
            RequestRead::Whole { data, trailers } => {
                let (data, held) = tie(data, held, TIED_REQUEST);
                Ok((data, trailers, held))
            }
            RequestRead::TooLarge => {
                let detail =
                    format!("{} At most {limit} bytes are accepted.", Condition::RequestTooLarge.detail());
                Err(Refusal::new(Condition::RequestTooLarge).with_detail(detail))
            }
            RequestRead::Broken(error) if error.is::<BudgetExhausted>() => {
                Err(overloaded(REQUEST_BUDGET_USED_UP))
            }
            RequestRead::Broken(error) => {
                tracing::debug!(error = %ErrorChain(&*error), "request body broke off");
                Err(Refusal::new(Condition::RequestIncomplete))
            }
        }
    }

    /// Executes as a part of this future. A client that hangs up drops this future, but not the handler.
    async fn execute<S, B, RB>(
        mut self,
        inner: S,
        (permit, slot): (Permit, Slot),
        key: IdempotencyKey,
        request: Request<RequestBody<B>>,
    ) -> Result<Response<ResponseBody<RB>>, S::Error>
    where
        S: Service<Request<RequestBody<B>>, Response = Response<RB>, Error: Send, Future: Send>
            + Send
            + 'static,
        B: Send + 'static,
        RB: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
    {
        self.attempt = Some(permit.attempt().number());
        // If the runtime ends before the handler.
        self.left = Disposition::Executed;
        let response_budget = self.shared.response_budget.clone();
        let (settings, target) = (self.settings.clone(), request.uri().clone());
        let call = self.call.clone();
        let sessions =
            call.as_ref().map(|call| call.sessions.clone()).filter(|sessions| !sessions.is_empty());
        let running = sessions.map(|sessions| self.shared.sessions.enter(sessions));
        let watch = self.watch.clone();
        let execution =
            Execution { settings, permit, key, response_budget, call, running, target, slot, watch };
        let engine = self.shared.engine.clone();
        // Also the observation, so that the outcome counts if the client has left.
        let work = async move {
            let ExecutionEnd { result, rest } = execution.run(inner, request).await;
            (self.executed(result), rest)
        };
        let (response, rest) = engine.shield(work, |(_, rest)| rest).await;
        if let Some(rest) = rest {
            engine.spawn(rest);
        }
        response
    }

    /// The response of an execution.
    fn executed<RB, E>(&mut self, result: Result<Executed<RB>, E>) -> Result<Response<ResponseBody<RB>>, E> {
        match result {
            Ok(Executed::Response(mut response)) => {
                self.as_call_refusal(&mut response);
                // Only the layer marks replays.
                response.headers_mut().remove(self.settings.replay_marker());
                self.observe(disposition_of(&response), Some(response.status()));
                Ok(self.echoed(response))
            }
            Ok(Executed::Recorded(stored, status)) => {
                let held = self.held_always(&stored);
                let mut response = self.replay(stored, held);
                if let Some(status) = status {
                    set_status(&mut response, status);
                }
                Ok(response)
            }
            Ok(Executed::Refused(refusal)) => Ok(self.refuse(refusal)),
            Err(error) => {
                self.observe(Disposition::Executed, None);
                Err(error)
            }
        }
    }

    /// Returns true if there is a service to ask for a response that is missing in its record. A response to a gRPC
    /// call is never kept.
    fn recovers_responses(&self) -> bool {
        self.settings.recovers_responses() && self.grpc.is_none()
    }

    /// Asks in a task of its own: the response is kept even if the client has hung up meanwhile.
    async fn recover_response<RB>(
        self,
        permit: ResponsePermit,
        key: IdempotencyKey,
        parts: Parts,
    ) -> Response<ResponseBody<RB>> {
        let question = Question { settings: self.settings.clone(), permit, key };
        match self.shared.engine.spawn(question.ask(parts)).await {
            Ok(QuestionResult::Response(stored, status)) => {
                let held = self.held_always(&stored);
                let mut response = self.replay(stored, held);
                if let Some(status) = status {
                    set_status(&mut response, status);
                }
                response
            }
            Ok(QuestionResult::Refused(refusal)) => self.refuse(refusal),
            // The task was dropped with its runtime.
            Err(_) => self.refuse(awaited()),
        }
    }

    async fn fail_open<S, B, RB>(
        mut self,
        mut inner: S,
        request: Request<RequestBody<B>>,
    ) -> Result<Response<ResponseBody<RB>>, S::Error>
    where
        S: Service<Request<RequestBody<B>>, Response = Response<RB>>,
    {
        self.left = Disposition::FailedOpen;
        let mut response = inner.call(request).await?;
        take_directive(&mut response);
        take_foreign_status(&mut response);
        set_status(&mut response, Disposition::FailedOpen.as_str());
        self.observe(Disposition::FailedOpen, Some(response.status()));
        Ok(self.echoed(response.map(ResponseBody::passing)))
    }

    /// Replays the stored response if the service allows it, or refuses if the budget is used up: a retry can get the response
    /// later. The response is in memory while the service decides, so its bytes are reserved before.
    async fn replay_within_budget<RB>(
        &self,
        stored: StoredResponse,
        request: &Parts,
    ) -> Response<ResponseBody<RB>> {
        let mut held = BudgetReservation::nothing(self.shared.response_budget.clone());
        if !held.add(stored.as_body().len()) {
            return self.refuse(overloaded(RESPONSE_BUDGET_USED_UP));
        }
        let denial = match &self.settings.authorize {
            Some(service) => service.authorize(request).await.refusal(),
            None => None,
        };
        match denial {
            Some(refusal) => self.refuse(refusal),
            None => self.replay(stored, held),
        }
    }

    /// Reserves memory for a response that is sent even if the budget is used up.
    fn held_always(&self, stored: &StoredResponse) -> BudgetReservation {
        let mut held = BudgetReservation::nothing(self.shared.response_budget.clone());
        held.add_always(stored.as_body().len());
        held
    }

    fn replay<RB>(&self, stored: StoredResponse, held: BudgetReservation) -> Response<ResponseBody<RB>> {
        let Ok(status) = http::StatusCode::from_u16(stored.status()) else {
            return self.refuse(Refusal::new(Condition::RecordCorrupt));
        };
        let trailers = Some(restore(stored.trailers())).filter(|trailers| !trailers.is_empty());
        let mut headers = restore(stored.headers());
        if let Some(trailers) = &trailers {
            for name in trailers.keys() {
                headers.append(TRAILER, HeaderValue::from_name(name.clone()));
            }
        }
        let body = match self.call.as_ref().and_then(|call| call.replayed(stored.as_body())) {
            Some(edited) => Bytes::from(edited),
            None => stored.into_body(),
        };
        let mut response = Response::new(ResponseBody::whole(body, trailers, held));
        *response.status_mut() = self.settings.profile.replay_status(status);
        *response.headers_mut() = headers;
        self.settings.profile.mark_replay(response.headers_mut());
        self.observe(Disposition::Replayed, Some(status));
        self.echoed(response)
    }

    fn refuse<RB>(&self, refusal: Refusal) -> Response<ResponseBody<RB>> {
        let condition = refusal.condition;
        let refusal = match &self.call {
            Some(call) => refusal.with_message_id(call.id.clone()),
            None => refusal,
        };
        let response = refusal.with_record(self.record).into_response(&self.settings, self.grpc);
        self.observe(Disposition::Refused(condition), Some(response.status()));
        self.echoed(response.map(|body: Bytes| ResponseBody::own(body)))
    }

    /// Gives the refusal of a proxy the form of a response to the call, if the request is one.
    fn as_call_refusal<RB>(&self, response: &mut Response<ResponseBody<RB>>) {
        let (Some(call), Some(refusal)) = (&self.call, response.extensions().get::<Refusal>().cloned())
        else {
            return;
        };
        let own = refusal.with_message_id(call.id.clone()).into_response(&self.settings, None);
        let (mut parts, body) = own.map(|body: Bytes| ResponseBody::own(body)).into_parts();
        parts.extensions.extend(std::mem::take(response.extensions_mut()));
        *response = Response::from_parts(parts, body);
    }

    fn echoed<T>(&self, mut response: Response<T>) -> Response<T> {
        if let Some((name, value)) = &self.echo {
            response.headers_mut().insert(name.clone(), value.clone());
        }
        response
    }
}

/// The result of an execution.
pub(crate) enum Executed<RB> {
    /// The handler's response.
    Response(Response<ResponseBody<RB>>),
    /// A response from the record or for it, instead of the handler's: that of an earlier attempt that the service reported, or
    /// the one that the operation wrote itself. With its `Idempotency-Status` if the record could not keep it.
    Recorded(StoredResponse, Option<&'static str>),
    /// There is no response from the handler.
    Refused(Refusal),
}

/// Larger bodies are compared on a thread of their own: this many bytes take a tenth of a millisecond.
const COMPARED_HERE: usize = 64 * 1024;

/// The properties of a request whose body was read.
pub(crate) struct FingerprintedRequest {
    verdict: Verdict,
    /// The call in the request, if it is a message of MCP.
    call: Option<ToolCall>,
    pub(crate) fingerprint: Fingerprint,
    /// The key that the body carries, if it may carry one.
    pub(crate) body_key: Option<Result<IdempotencyKey, BodyKeyError>>,
}

impl FingerprintedRequest {
    fn of(settings: &Settings, ids: &IdScheme, parts: &Parts, body: &canonical::DecodedBody<'_>) -> Self {
        if settings.profile.protocol == Protocol::Mcp {
            return Self::of_message(settings, ids, parts, canonical::message(settings, parts, body));
        }
        let body_key = settings.body_has_key().then(|| canonical::body_key(settings, parts, body));
        let fingerprint = canonical::fingerprint(settings, ids, parts, body);
        Self { verdict: Verdict::Covered, call: None, fingerprint, body_key }
    }

    fn of_message(settings: &Settings, ids: &IdScheme, parts: &Parts, message: Message) -> Self {
        let nothing = || Fingerprint::of_parts("mcp", &[]);
        let verdict = |verdict| Self { verdict, call: None, fingerprint: nothing(), body_key: None };
        match message {
            Message::Passes => verdict(Verdict::Passes),
            Message::Cancellation => verdict(Verdict::Accepted),
            Message::Refused(why) => verdict(Verdict::Refused(why)),
            Message::Call(call, key) => Self {
                verdict: Verdict::Covered,
                fingerprint: canonical::call_fingerprint(settings, ids, parts, &call),
                call: Some(call),
                body_key: Some(key.map_err(|why| match why {
                    CallError::NoKey => BodyKeyError::Missing,
                    CallError::Invalid(problem) => BodyKeyError::Invalid(problem),
                    why => BodyKeyError::Intent(why),
                })),
            },
        }
    }
}

/// The treatment of a request, by its body.
pub(crate) enum Verdict {
    /// It has an effect that a key protects.
    Covered,
    /// It has none.
    Passes,
    /// It is a notification that is ignored.
    Accepted,
    /// It may have one, and cannot be protected. The text is for its client.
    Refused(&'static str),
}

/// Returns true if the target of a request is a path. The forms `a.test` and `*` are not (RFC 9112, 3.2.3 and 3.2.4),
/// but some services treat them as `/`.
fn has_path(uri: &http::Uri) -> bool {
    uri.path().starts_with('/')
}

/// The caller's scope, and the key in the head of a request.
pub(crate) type ScopeAndKey = (Result<Scope<'static>, NoCaller>, Option<IdempotencyKey>);

/// The refusal of a request whose claim failed. `None` if it is executed without protection.
pub(crate) fn refusal_of(error: &StoreError, fails_open: bool) -> Option<Refusal> {
    // A full store does not count as an outage: a client that fills it could switch the protection off.
    let is_away = error.kind() == StoreErrorKind::Unavailable && error.extent() == Extent::Store;
    Some(match error.kind() {
        StoreErrorKind::Corrupt => Refusal::new(Condition::RecordCorrupt),
        StoreErrorKind::Sealed => {
            Refusal::new(Condition::ResponseSealed).with_retry_after(SEALED_RETRY_SECONDS)
        }
        _ if fails_open && is_away => return None,
        _ if error.extent() == Extent::Writes && error.is_unsent() => {
            Refusal::new(Condition::StoreUnavailable).with_detail(STORE_FULL).with_retry_after(30)
        }
        _ => Refusal::new(Condition::StoreUnavailable).with_retry_after(1),
    })
}

const SESSION_RUNS: &str = "The session is not ended: it has calls with a key that run, and a retry gets their results in another session.";
const NO_PATH: &str = "Nothing was executed. The target of the request is not a path.";

fn overloaded(detail: &'static str) -> Refusal {
    Refusal::new(Condition::Overloaded).with_detail(detail).with_retry_after(1)
}

const REQUEST_BUDGET_USED_UP: &str = "Nothing was executed: the memory for the bodies of requests is used up. Send the same request \
     with the same key later.";
const RESPONSE_BUDGET_USED_UP: &str = "The first request with this key was processed. The memory for responses is used up at the moment. \
     Send the same request with the same key later to get the response.";
const TOO_MANY: &str = "Nothing was executed: too many requests with a key are in progress, or too many responses wait for their \
     clients. Send the same request with the same key later.";

/// The pause before a retry of a request whose response is sealed: an operator has to add the key first.
const SEALED_RETRY_SECONDS: u64 = 30;

/// The detail of `store-unavailable` if the store was reached and is full, or if the engine has no place for another
/// unsettled attempt.
const STORE_FULL: &str = "The store takes no new keys at the moment: it is full, it cannot write, or too many earlier requests have no recorded end yet. \
     Requests with keys that it already has may still be answered. Nothing was executed. Send the same request with the same key later.";

/// The detail of `key-reused` if the key is built from the body.
const REUSED_MEMBERS: &str = "The key of this operation is built from members of its JSON body. Another request had the same \
     members and differed in other parts. Nothing was executed. A request for another operation must differ in these members.";

/// The seconds after which a client should ask again about a request that is being processed. Nearly every request ends within
/// a second, and one that has been running for some time will most likely run as long again: a client that obeys waits for 1,
/// 1, 2, 4 and then 5 seconds. It need not wait longer than the lease: if the owner died, the record can be decided then.
fn retry_after(lease_left: Duration, running_for: Duration) -> u64 {
    const MAX_SECONDS: u64 = 5;
    let lease_left = lease_left.as_millis().div_ceil(1000).try_into().unwrap_or(u64::MAX);
    running_for.as_secs().min(MAX_SECONDS).min(lease_left).max(1)
}

/// The field in which the layer says how a response differs from the normal case.
pub(crate) const IDEMPOTENCY_STATUS: HeaderName = HeaderName::from_static("idempotency-status");

/// Removes the status field of a service. A refusal of a proxy keeps its own.
fn take_foreign_status<T>(response: &mut Response<T>) {
    if response.extensions().get::<Refusal>().is_none() {
        take_status(response);
    }
}

/// The problem in the status field of a response, if the field is that of the refusal of another layer behind this one, which
/// advises the same request again: nothing was executed there, or it knows the request by its key, too. A service may pass on
/// such a field from an API that it called after an effect, so the field alone is no proof.
pub(crate) fn problem_to_retry<T>(response: &Response<T>) -> Option<Box<str>> {
    let mut fields = response.headers().get_all(IDEMPOTENCY_STATUS).iter();
    let (Some(field), None) = (fields.next(), fields.next()) else { return None };
    let mut parts = field.to_str().ok()?.split(';').map(str::trim);
    if parts.next() != Some("refused") {
        return None;
    }
    let is_advised = parts.clone().any(|part| part == "retry=same-key" || part == "retry=fix-request");
    let problem = parts.find_map(|part| part.strip_prefix("problem="))?;
    Some(problem.into()).filter(|_| is_advised && !problem.is_empty())
}

/// Removes the status field and the mark of a redacted replay, which only the layer and the proxy around the service set.
pub(crate) fn take_status<T>(response: &mut Response<T>) {
    if response.extensions().get::<Refusal>().is_none() {
        response.headers_mut().remove(IDEMPOTENCY_STATUS);
        response.headers_mut().remove(REDACTED);
    }
}

/// The outcome of a request whose response is passed on. The status field is the layer's own: a handler's was removed before.
fn disposition_of<T>(response: &Response<T>) -> Disposition {
    let is_fenced = || response.headers().get(IDEMPOTENCY_STATUS).is_some_and(|status| status == FENCED);
    match response.extensions().get() {
        Some(ProxyRefusal(condition)) => Disposition::Refused(*condition),
        None if is_fenced() => Disposition::Fenced,
        None => Disposition::Executed,
    }
}

/// Marks a response that differs from the normal case.
pub(crate) fn set_status<T>(response: &mut Response<T>, status: &'static str) {
    response.headers_mut().insert(IDEMPOTENCY_STATUS, HeaderValue::from_static(status));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_grows_with_the_age_of_the_attempt() {
        let seconds = Duration::from_secs;
        // A client that obeys asks at these ages.
        for (age, expected) in [(0, 1), (1, 1), (2, 2), (4, 4), (8, 5), (13, 5), (3600, 5)] {
            assert_eq!(retry_after(seconds(30), seconds(age)), expected, "{age} s");
        }
        assert_eq!(retry_after(Duration::from_millis(2001), seconds(8)), 3);
        assert_eq!(retry_after(Duration::ZERO, seconds(8)), 1);
        assert_eq!(retry_after(Duration::MAX, Duration::MAX), 5);
    }
}
