//! Routes that only observe: each request passes as if there were no layer, and the outcome that it would have had is reported.
//!
//! ```text
//! request ─┬─ passes at once ──────────────────────────────► service
//!          └─ a task of its own: scope, key, body (a tap), fingerprint, claim of a shadow record ─► verdict
//! response ┬─ passes at once ──────────────────────────────► client
//!          └─ its status and its end (a tap) ─► the task ends the shadow record, if its claim was granted
//! ```
//!
//! - Shadow records are in the same store under other identifiers ([`Scope::in_shadow`](oncegate_core::Scope::in_shadow)), so
//!   neither kind ever answers for the other. They hold the status of the response, and neither fields nor body.
//! - Only the first request of a key owns its shadow record. The others execute at the service as well, and change nothing in it.
//! - No shadow record ever needs an operator: an outcome that would be unknown completes the record, with a mark. A record that a
//!   crash leaves in progress is taken over by the next request with its key.
//! - The claims go through an engine of their own. It shares no limit, no single-flight and no observer with requests that are
//!   protected, and tasks and bodies have limits of their own. At a limit, the verdict is that of a request at that limit.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::request::Parts;
use http::{Request, Response, StatusCode, Uri};
use http_body::Body;
use oncegate_core::{Completion, OnAbandoned, StoredResponse};
use oncegate_engine::{ClaimOutcome, ClaimRequest, Engine, Permit};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::body::{RequestBody, ResponseBody};
use crate::budget::{Budget, BudgetReservation};
use crate::canonical;
use crate::context::NoUpstreamResponse;
use crate::event::{Disposition, ShadowVerdict};
use crate::execute::{ResponseTreatment, cannot_be_stored, releases_errors, take_directive, treatment};
use crate::in_flight::{InFlight, Slot};
use crate::layer::Shared;
use crate::refusal::{Condition, Refusal};
use crate::service::{KeyedResponse, refusal_of};
use crate::settings::Settings;
use crate::tap::{RequestTap, ResponseTap, TappedRequest, TappedResponse};

/// The beginning of the operations of shadow records, as operators see them: `(shadow) POST /payments`.
pub const SHADOW_OPERATION: &str = "(shadow) ";

/// The header field of the response in a shadow record that says what the record stands for.
const MARK: &str = "oncegate-shadow";
const REPLAYED: &[u8] = b"replayed";
const UNKNOWN: &[u8] = b"outcome-unknown";
/// The client left before the response was complete. A route that protects would have executed the request to its end.
const CLIENT_LEFT: &[u8] = b"client-left";

/// The status in the shadow record of a request whose client left, as servers log it.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// The engine and the limits of requests that are only observed. Copies share them.
pub(crate) struct ShadowLimits {
    /// Made at the first request.
    engine: Arc<OnceLock<Engine>>,
    pub(crate) in_flight: Arc<InFlight>,
    pub(crate) request_budget: Arc<Budget>,
    /// The layer with these limits instead of its own, made at the first request.
    layer: OnceLock<Arc<Shared>>,
}

impl Clone for ShadowLimits {
    fn clone(&self) -> Self {
        Self {
            engine: self.engine.clone(),
            in_flight: self.in_flight.clone(),
            request_budget: self.request_budget.clone(),
            layer: OnceLock::new(),
        }
    }
}

impl ShadowLimits {
    pub(crate) fn new(request_budget: Arc<Budget>, in_flight: InFlight) -> Self {
        Self {
            engine: Arc::default(),
            in_flight: Arc::new(in_flight),
            request_budget,
            layer: OnceLock::new(),
        }
    }

    /// The same limits, for a copy of the layer that is used on another thread.
    pub(crate) fn apart(&self) -> Self {
        Self {
            in_flight: Arc::new(InFlight::clone(&self.in_flight)),
            request_budget: self.request_budget.apart(),
            ..self.clone()
        }
    }

    /// The layer with these limits, which `make` builds once.
    pub(crate) fn layer(&self, make: impl FnOnce(&Self, &OnceLock<Engine>) -> Shared) -> &Arc<Shared> {
        self.layer.get_or_init(|| Arc::new(make(self, &self.engine)))
    }

    /// Forgets the layer, because the one that it was built from has changed.
    pub(crate) fn forget_layer(&mut self) {
        self.layer = OnceLock::new();
    }
}

/// The head of a response, as far as an observation needs it.
struct ResponseHead {
    status: StatusCode,
    /// The time since the head of the request.
    after: Duration,
}

/// The end of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResponseEnd {
    Replayable(StatusCode),
    Tombstone,
    Released,
    Unknown,
}

/// Watches the response to a request that is observed.
pub(crate) struct ResponseWatch {
    settings: Arc<Settings>,
    target: Uri,
    begun: std::time::Instant,
    head: oneshot::Sender<ResponseHead>,
    end: oneshot::Sender<ResponseEnd>,
    /// Receives the end of the body; the task that waits for the end of the response has the sender's other half.
    body: oneshot::Sender<TappedResponse>,
}

impl ResponseWatch {
    /// Notes that the service failed without a response.
    pub(crate) fn failed(self) {
        let _gone = self.end.send(no_response(&self.settings));
    }

    /// Notes the head of the response, and watches its body.
    pub(crate) fn begin<RB: Body>(self, mut response: Response<RB>) -> Response<ResponseBody<RB>> {
        let directive = take_directive(&mut response);
        let status = response.status();
        let _gone = self.head.send(ResponseHead { status, after: self.begun.elapsed() });
        let is_missing = response.extensions().get::<NoUpstreamResponse>().is_some();
        let treatment = treatment(&self.settings, &self.target, &response, directive);
        let (parts, body) = response.into_parts();
        let end = match treatment {
            _ if is_missing => no_response(&self.settings),
            ResponseTreatment::Release => ResponseEnd::Released,
            ResponseTreatment::Replay if !cannot_be_stored(&parts) => ResponseEnd::Replayable(status),
            ResponseTreatment::Replay | ResponseTreatment::Tombstone => ResponseEnd::Tombstone,
            ResponseTreatment::Unknown | ResponseTreatment::Stop => ResponseEnd::Unknown,
        };
        let _gone = self.end.send(end);
        let tap = match end {
            // Only such a response is read to its end before a route that protects decides.
            ResponseEnd::Replayable(_) => {
                ResponseTap::new(&body, self.settings.max_response_body(), self.body)
            }
            _ => None,
        };
        Response::from_parts(parts, ResponseBody::observed(body, tap))
    }
}

/// The end of a request without a response.
fn no_response(settings: &Settings) -> ResponseEnd {
    match releases_errors(settings) {
        true => ResponseEnd::Released,
        false => ResponseEnd::Unknown,
    }
}

/// Begins the observation of a request, which passes meanwhile.
pub(crate) fn observe<B: Body>(
    shared: &Arc<Shared>,
    settings: &Arc<Settings>,
    request: Request<B>,
) -> (Request<RequestBody<B>>, Option<Box<ResponseWatch>>) {
    let layer = shared.in_shadow();
    let observed = KeyedResponse::unreported(layer.clone(), settings.clone(), &request);
    let ((parts, body), mut request) = (request.into_parts(), observed);
    request.label_early(&parts.method, parts.uri.path());
    let passing =
        |parts, body| (Request::from_parts(parts, RequestBody::passing(body)), None::<Box<ResponseWatch>>);
    // Without a runtime there is nothing to observe with.
    if Handle::try_current().is_err() {
        request.report_at_once(ShadowVerdict::NotObserved);
        return passing(parts, body);
    }
    // The limit bounds the tasks and what they hold. A route that protects counts a request after its body was read.
    let Ok(slot) = layer.in_flight.enter(None) else {
        request.report_at_once(ShadowVerdict::Refused(Condition::Overloaded));
        return passing(parts, body);
    };
    let held = BudgetReservation::nothing(layer.request_budget.clone());
    let (heard, body_end) = oneshot::channel();
    let tap = RequestTap::new(&body, settings.max_request_body, held, heard);
    let (head, response_head) = oneshot::channel();
    let (end, response_end) = oneshot::channel();
    let (response_body, response_body_end) = oneshot::channel();
    let watch = ResponseWatch {
        settings: settings.clone(),
        target: parts.uri.clone(),
        begun: request.begun,
        head,
        end,
        body: response_body,
    };
    let observation = Observation { request, slot };
    let response = WatchedResponse { head: response_head, end: response_end, body: response_body_end };
    let copy = parts.clone();
    // A stop waits for it: otherwise each of them would leave a record in progress.
    shared.engine.spawn(async move { observation.run(copy, body_end, response).await });
    (Request::from_parts(parts, RequestBody::observed(body, tap)), Some(Box::new(watch)))
}

impl KeyedResponse {
    fn report_at_once(&self, verdict: ShadowVerdict) {
        self.observe_after(Disposition::Shadow(verdict), None, self.begun.elapsed());
    }
}

/// The response to a request that is observed, from the side of its task.
struct WatchedResponse {
    head: oneshot::Receiver<ResponseHead>,
    end: oneshot::Receiver<ResponseEnd>,
    body: oneshot::Receiver<TappedResponse>,
}

impl WatchedResponse {
    /// The end of the response; `None` if the client left before it.
    async fn ended(self, settings: &Settings) -> Option<ResponseEnd> {
        match self.end.await.ok()? {
            ResponseEnd::Replayable(status) => match self.body.await.ok()? {
                TappedResponse::Whole => Some(ResponseEnd::Replayable(status)),
                TappedResponse::TooLarge => Some(ResponseEnd::Tombstone),
                TappedResponse::Broken => Some(no_response(settings)),
            },
            end => Some(end),
        }
    }
}

/// The observation of one request.
struct Observation {
    request: KeyedResponse,
    slot: Slot,
}

/// The verdict on a request, and the permit of its shadow record if its claim was granted.
type Verdict = (ShadowVerdict, Option<Permit>);

impl Observation {
    async fn run(
        mut self,
        parts: Parts,
        body: oneshot::Receiver<TappedRequest>,
        mut response: WatchedResponse,
    ) {
        let (verdict, permit) = match self.judge(parts, body).await {
            Ok(verdict) => verdict,
            Err(refusal) => (ShadowVerdict::Refused(refusal.condition), None),
        };
        let head = (&mut response.head).await.ok();
        let after = head.as_ref().map_or_else(|| self.request.begun.elapsed(), |head| head.after);
        let status = head.map(|head| head.status);
        self.request.observe_after(Disposition::Shadow(verdict), status, after);
        let Some(permit) = permit else { return };
        match response.ended(&self.request.settings).await {
            Some(ResponseEnd::Released) => {
                permit.release().await;
            }
            Some(ResponseEnd::Tombstone) => {
                permit.complete(Completion::Tombstone).await;
            }
            Some(ResponseEnd::Replayable(status)) => complete(permit, status.as_u16(), REPLAYED).await,
            Some(ResponseEnd::Unknown) => complete(permit, 504, UNKNOWN).await,
            None => complete(permit, CLIENT_CLOSED_REQUEST, CLIENT_LEFT).await,
        }
        drop(self.slot);
    }

    /// Does what a route that protects does before it executes a request, in the same order.
    async fn judge(
        &mut self,
        parts: Parts,
        body: oneshot::Receiver<TappedRequest>,
    ) -> Result<Verdict, Refusal> {
        let request = &mut self.request;
        let settings = request.settings.clone();
        settings.caller.prepare(&parts).await;
        let (scope, key) = request.scope_and_key(&parts)?;
        let has_early_key = key.is_some();
        if let (Some(key), Ok(scope)) = (&key, &scope) {
            limit_rate(request.check_rate(scope, &parts, key))?;
        }
        let body = tokio::time::timeout(settings.body_timeout, body).await;
        let (data, held) = match body.map_err(|_| Refusal::new(Condition::RequestIncomplete))? {
            Ok(TappedRequest::Whole(data, held)) => (data, held),
            Ok(TappedRequest::TooLarge) => return Err(Refusal::new(Condition::RequestTooLarge)),
            Ok(TappedRequest::Broken) => return Err(Refusal::new(Condition::RequestIncomplete)),
            Ok(TappedRequest::OverBudget) => return Err(Refusal::new(Condition::Overloaded)),
            // The service responded before it had read the request, or the client left.
            Err(_) => return Ok((ShadowVerdict::NotObserved, None)),
        };
        let (parts, compared) = request.compare(parts, &data).await?;
        drop((data, held));
        let key = match request.whole_key(key, compared.body_key, &parts) {
            Err(refusal) if refusal.condition == Condition::KeyMissing && !settings.profile.require_key => {
                return Ok((ShadowVerdict::Unprotected, None));
            }
            key => key?,
        };
        let scope = match scope {
            Ok(scope) => scope,
            Err(_) => request.scope(&parts)?,
        };
        if !has_early_key {
            limit_rate(request.check_rate(&scope, &parts, &key))?;
        }
        let is_over = !settings.caller.is_single_tenant() && self.slot.count_for(scope.caller_tag()).is_err();
        if is_over || !request.shared.response_budget.has_capacity() {
            return Err(Refusal::new(Condition::Overloaded));
        }
        let ids = request.shared.engine.ids();
        let (id, label) = canonical::locate(&settings, ids, &scope.in_shadow(), &parts, &key, None);
        drop(parts);
        let shown = format!("{SHADOW_OPERATION}{}", label.operation());
        let shown = ids.label(&scope, &key, &shown);
        (request.record, request.label, request.has_caller) = (Some(id), label, true);
        let fingerprint = compared.fingerprint;
        let policy = settings.policy.with_on_abandoned(OnAbandoned::Reexecute);
        let claim = ClaimRequest { id, fingerprint, label: shown, policy };
        Ok(match request.shared.engine.claim(claim).await {
            Ok(ClaimOutcome::Execute(permit)) => self.granted(permit).await?,
            Ok(ClaimOutcome::Replay(stored)) => (replayed(&stored), None),
            Ok(ClaimOutcome::InProgress { .. }) => {
                return Err(Refusal::new(Condition::RequestInProgress));
            }
            Ok(ClaimOutcome::Mismatch) => return Err(request.mismatch(id, fingerprint).await),
            Ok(ClaimOutcome::Unknown) => return Err(Refusal::new(Condition::OutcomeUnknown)),
            Ok(_) => return Err(Refusal::new(Condition::ReplayUnavailable)),
            Err(error) => match refusal_of(&error, settings.fails_open) {
                Some(refusal) => return Err(refusal),
                None => (ShadowVerdict::FailedOpen, None),
            },
        })
    }

    /// The verdict on a request whose claim was granted.
    async fn granted(&mut self, permit: Permit) -> Result<Verdict, Refusal> {
        let settings = &self.request.settings;
        if let Some(first_sent) = &self.request.first_sent
            && let Err(refusal) = first_sent.check(permit.claimed_at(), settings.policy.retention())
        {
            permit.release().await;
            return Err(refusal);
        }
        let attempt = permit.attempt();
        match settings.policy.on_abandoned() {
            OnAbandoned::Park if attempt.is_after_abandoned() => {
                complete(permit, 504, UNKNOWN).await;
                Err(Refusal::new(Condition::OutcomeUnknown))
            }
            // The service would have been asked.
            OnAbandoned::Reconcile if attempt.is_after_abandoned() => {
                Ok((ShadowVerdict::NotObserved, Some(permit)))
            }
            _ => {
                self.request.attempt = Some(attempt.number());
                Ok((ShadowVerdict::Executed, Some(permit)))
            }
        }
    }
}

fn limit_rate<E>(checked: Result<(), E>) -> Result<(), Refusal> {
    checked.map_err(|_| Refusal::new(Condition::RateLimited))
}

/// The verdict on a request whose shadow record is complete.
fn replayed(stored: &StoredResponse) -> ShadowVerdict {
    match stored.headers().any(|(name, value)| name == MARK && value == UNKNOWN) {
        true => ShadowVerdict::Refused(Condition::OutcomeUnknown),
        false => ShadowVerdict::Replayed,
    }
}

/// Completes a shadow record with a status and a mark.
async fn complete(permit: Permit, status: u16, mark: &[u8]) {
    let stored = StoredResponse::new(status, &[(MARK, mark)], &[], &[]);
    permit.complete(stored.map_or(Completion::Tombstone, Completion::Replayable)).await;
}

impl fmt::Debug for ResponseWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseWatch").finish_non_exhaustive()
    }
}
