//! One execution: runs the handler, classifies its response, and stores the response before the client gets it.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE, HeaderName, HeaderValue, LOCATION};
use http::response::Parts;
use http::{Request, Response, StatusCode, Uri};
use http_body::{Body, Frame};
use oncegate_core::{Completion, ErrorChain, IdempotencyKey, OnAbandoned, StoredResponse};
use oncegate_engine::{ErrorFate, PanicError, Permit, SettleOutcome, StepError, catch_panic};
use tokio::sync::mpsc;
use tower_service::Service;

use crate::body::{
    BoxError, Chunks, RequestBody, ResponseBody, ResponseRead, StreamedBody, next_frame, read_response,
};
use crate::budget::{Budget, BudgetReservation};
use crate::context::{
    CloseDelimited, IdempotencyContext, LeaseExpired, NoUpstreamResponse, StoreDirective, UpstreamResponse,
};
use crate::event::{RequestPhase, Watch};
use crate::in_flight::Slot;
use crate::mcp::{CallOutcome, OtherRequest, RunningCall, ToolCall};
use crate::profile::ServerErrors;
use crate::reconcile::Reconciled;
use crate::refusal::{Condition, Refusal};
use crate::service::{Executed, problem_to_retry, set_status, take_status};
use crate::settings::{CompletedBy, Settings};
use crate::upstream::{instead, report};

/// One execution under a permit.
pub(crate) struct Execution {
    pub(crate) settings: Arc<Settings>,
    pub(crate) permit: Permit,
    pub(crate) key: IdempotencyKey,
    pub(crate) response_budget: Arc<Budget>,
    /// The call in the request, if it is a message of MCP.
    pub(crate) call: Option<ToolCall>,
    /// Keeps the session of the call.
    pub(crate) running: Option<RunningCall>,
    /// The target of the request.
    pub(crate) target: Uri,
    /// Counts the request as in flight, also while the rest of its response is read.
    pub(crate) slot: Slot,
    pub(crate) watch: Watch,
}

/// The end of an execution: the response for the client, who may have left, and the work that remains while it is
/// read.
pub(crate) struct ExecutionEnd<RB, E> {
    pub(crate) result: Result<Executed<RB>, E>,
    pub(crate) rest: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl<RB, E> ExecutionEnd<RB, E> {
    pub(crate) const fn with(response: Executed<RB>) -> Self {
        Self { result: Ok(response), rest: None }
    }
}

/// The treatment of a handler's response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResponseTreatment {
    Replay,
    Release,
    Tombstone,
    Unknown,
    /// The attempt ends half-way: its finished steps decide how the next attempt goes on.
    Stop,
}

impl Execution {
    pub(crate) async fn run<S, B, RB>(
        self,
        inner: S,
        mut request: Request<RequestBody<B>>,
    ) -> ExecutionEnd<RB, S::Error>
    where
        S: Service<Request<RequestBody<B>>, Response = Response<RB>, Future: Send> + Send + 'static,
        B: Send + 'static,
        RB: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
    {
        let context = IdempotencyContext::new(self.key.clone(), self.permit.attempt());
        request.extensions_mut().insert(context.clone());
        if self.call.is_some() {
            // The response has to be read: it tells the outcome of the call, and a replay has another `id`.
            request.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        }
        let asks = self.settings.policy.on_abandoned() == OnAbandoned::Reconcile
            && context.attempt().is_after_abandoned();
        let (execution, request) = if asks {
            // Boxed: this path is rare, and boxing keeps the common future small.
            match Box::pin(self.reconcile(context, request)).await {
                Ok(goes_on) => goes_on,
                Err(response) => return ExecutionEnd::with(response),
            }
        } else {
            (self, request)
        };
        // I4: the process may have been paused for longer than the lease since the claim.
        if execution.permit.attempt().confirm_lease().await.is_err() {
            return ExecutionEnd::with(Box::pin(execution.not_begun()).await);
        }
        match catch_panic(call(inner, request)).await {
            Ok(Ok(response)) => execution.finish(response).await,
            Ok(Err(error)) => {
                match Box::pin(execution.fail::<RB>(None, "the handler returned an error")).await {
                    recorded @ Executed::Recorded(..) => ExecutionEnd::with(recorded),
                    _ => ExecutionEnd { result: Err(error), rest: None },
                }
            }
            Err(PanicError) => ExecutionEnd::with(Box::pin(execution.fail(None, PANICKED)).await),
        }
    }

    /// Asks for the outcome of an abandoned attempt. The execution goes on only if the operation did not happen.
    async fn reconcile<B, RB>(
        self,
        context: IdempotencyContext,
        request: Request<RequestBody<B>>,
    ) -> Result<(Self, Request<RequestBody<B>>), Executed<RB>> {
        let (parts, body) = request.into_parts();
        let asked = match &self.settings.reconcile {
            // A panic reveals nothing about the abandoned attempt.
            Some(reconcile) => catch_panic(reconcile.reconcile(&context, &parts)).await,
            None => Err(PanicError),
        };
        match asked.unwrap_or(Reconciled::CannotTell) {
            Reconciled::DidNotHappen => Ok((self, Request::from_parts(parts, body))),
            Reconciled::Happened(stored) => {
                let settled = self.permit.complete(Completion::Replayable(stored.clone())).await;
                Err(Executed::Recorded(stored, status_of(&settled)))
            }
            Reconciled::Unreplayable => {
                self.permit.complete(Completion::Tombstone).await;
                Err(Executed::Refused(Refusal::new(Condition::ReplayUnavailable)))
            }
            Reconciled::CannotTell => {
                self.permit.park("the service could not tell the outcome of an abandoned attempt").await;
                Err(Executed::Refused(Refusal::new(Condition::OutcomeUnknown)))
            }
        }
    }

    async fn finish<RB, E>(mut self, mut response: Response<RB>) -> ExecutionEnd<RB, E>
    where
        RB: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
    {
        if let Some(NoUpstreamResponse(status)) = response.extensions_mut().remove() {
            return ExecutionEnd::with(Box::pin(self.fail(Some(status), unanswered(status))).await);
        }
        if response.extensions_mut().remove::<LeaseExpired>().is_some() {
            return ExecutionEnd::with(Box::pin(self.not_begun()).await);
        }
        let directive = take_directive(&mut response);
        // The refusal of a call has the status 200. Its body tells if the field is that of a refusal, or was passed on.
        let problem = self.call.as_ref().and_then(|_| problem_to_retry(&response));
        take_status(&mut response);
        let mut fate = self.fate(&response, directive);
        let is_error = response.status().is_client_error() || response.status().is_server_error();
        let is_kept_error = fate == ResponseTreatment::Replay
            && directive.is_none()
            && is_error
            && self.settings.completed_by != CompletedBy::Upstream;
        // If this error were kept as the response, it would end an operation that has finished some of its steps.
        if is_kept_error && self.permit.attempt().is_half_way() {
            fate = ResponseTreatment::Stop;
        }
        // Finished steps are compensated before an error becomes the response.
        else if is_kept_error && let Err(why) = self.permit.attempt().compensate_steps().await {
            return ExecutionEnd::with(Box::pin(self.not_compensated(&why)).await);
        }
        let profile = &self.settings.profile;
        profile.mark_executed(response.headers_mut());
        let is_kept_server_error = fate == ResponseTreatment::Replay && response.status().is_server_error();
        let (mut parts, body) = response.into_parts();
        let call = self.call.take();
        if fate == ResponseTreatment::Replay && call.is_some() && is_encoded(&parts) {
            fate = ResponseTreatment::Tombstone;
        }
        // The head of a stream is sent while the tool runs, so the key is not free yet.
        let is_decided_later =
            fate == ResponseTreatment::Replay || directive == Some(StoreDirective::Release);
        match call {
            Some(call) if is_decided_later && is_event_stream(&parts) && !is_encoded(&parts) => {
                if is_kept_server_error {
                    profile.mark_kept_server_error(&mut parts.headers);
                }
                return self.stream_call((call, directive), parts, body);
            }
            _ => {}
        }
        if fate == ResponseTreatment::Replay && cannot_be_stored(&parts) {
            fate = ResponseTreatment::Tombstone;
        }
        // A status that frees the key says that nothing was decided. The result of the call proves the opposite.
        let may_have_result = fate == ResponseTreatment::Release
            && directive.is_none()
            && call.is_some()
            && is_json(&parts)
            && !is_encoded(&parts);
        let limit = self.settings.max_response_body;
        let mut held = BudgetReservation::nothing(self.response_budget.clone());
        // Only a response that may be replayed has to be read before the client gets it.
        let read = match fate == ResponseTreatment::Replay || may_have_result {
            true => catch_panic(read_response(body, limit, |bytes| held.add_always(bytes))).await,
            false => Ok(ResponseRead::More { chunks: Chunks::NONE, rest: Box::pin(body) }),
        };
        let (chunks, trailers, rest) = match read {
            Ok(ResponseRead::Whole { chunks, trailers }) => (chunks, trailers, None),
            Ok(ResponseRead::More { chunks, rest }) => (chunks, None, Some(rest)),
            // The client got nothing of the response, and its rest is unknown.
            Ok(ResponseRead::Broken(error)) => {
                let record = self.permit.attempt().record_id();
                tracing::warn!(%record, error = %ErrorChain(&*error), "response body broke off");
                let status = parts.extensions.get::<UpstreamResponse>().map(|_| StatusCode::BAD_GATEWAY);
                return ExecutionEnd::with(
                    Box::pin(self.fail(status, "the body of the response broke off")).await,
                );
            }
            Err(PanicError) => return ExecutionEnd::with(Box::pin(self.fail(None, PANICKED)).await),
        };
        let settings = self.settings;
        let outcome = match (&call, &rest) {
            (Some(call), None) => {
                call.outcome_in_body(&chunks.clone().join(), parts.status, problem.as_deref())
            }
            _ => Ok(None),
        };
        // The client does not take it for the response to its call, and a retry must not.
        let is_foreign = match outcome {
            Ok(None) => call.is_some() && rest.is_none() && parts.status.is_success(),
            outcome => outcome == Err(OtherRequest),
        };
        if is_foreign && fate == ResponseTreatment::Replay {
            fate = ResponseTreatment::Tombstone;
        }
        let outcome = outcome.unwrap_or_default();
        if let (Some(outcome), ResponseTreatment::Replay, None) = (outcome, fate, directive) {
            fate = fate_of_call(&settings, outcome);
        }
        if may_have_result && outcome == Some(CallOutcome::Complete) {
            fate = match cannot_be_stored(&parts) {
                true => ResponseTreatment::Tombstone,
                false => ResponseTreatment::Replay,
            };
        }
        if is_kept_server_error && fate != ResponseTreatment::Release {
            settings.profile.mark_kept_server_error(&mut parts.headers);
        }
        let stored = match &rest {
            None if fate == ResponseTreatment::Tombstone => None,
            None => settings.stored_response_off_thread(&parts, chunks.as_slice(), trailers.as_ref()).await,
            Some(_) => None,
        };
        let completion = stored.map_or(Completion::Tombstone, Completion::Replayable);
        let is_success = parts.status.is_success() && outcome.is_none_or(|own| own == CallOutcome::Complete);
        self.watch.begins(RequestPhase::Settle);
        let settled = conclude(&settings, self.permit, fate, completion, is_success).await;
        self.watch.ends(RequestPhase::Settle);
        if let Some(own) = settled.own {
            return ExecutionEnd::with(instead(&settings, parts, &own, held));
        }
        let body = match rest {
            None => ResponseBody::whole(chunks.join(), trailers, held),
            // Without a body, as the handler sent it: a gRPC client reads the status of its call in the head then.
            Some(rest) if chunks.as_slice().is_empty() && rest.is_end_stream() => {
                ResponseBody::own(Bytes::new())
            }
            Some(rest) => {
                return stream(&settings, self.slot, parts, (chunks, held), rest, settled.status);
            }
        };
        ExecutionEnd::with(Executed::Response(marked(parts, body, settled.status)))
    }

    /// Decides the treatment of this response.
    fn fate<RB>(&self, response: &Response<RB>, directive: Option<StoreDirective>) -> ResponseTreatment {
        treatment(&self.settings, &self.target, response, directive)
    }

    /// Ends an attempt whose lease could not be confirmed, so nothing was executed. If another attempt owns the record now, the
    /// client should retry to get its response.
    async fn not_begun<RB>(self) -> Executed<RB> {
        self.watch.begins(RequestPhase::Settle);
        let released = self.permit.release().await;
        self.watch.ends(RequestPhase::Settle);
        let condition = match released {
            SettleOutcome::Fenced => Condition::RequestInProgress,
            _ => Condition::StoreUnavailable,
        };
        Executed::Refused(Refusal::new(condition).with_retry_after(1))
    }

    /// Ends an attempt whose handler answered with an error, if its finished steps are not compensated yet. The error is not
    /// the response then.
    async fn not_compensated<RB>(self, why: &StepError<Infallible>) -> Executed<RB> {
        let attempt = self.permit.attempt();
        tracing::warn!(record = %attempt.record_id(), %why, "finished steps are not compensated yet");
        self.permit.stop().await;
        let is_stuck =
            why.fate() == ErrorFate::Park || self.settings.policy.on_abandoned() != OnAbandoned::Reexecute;
        Executed::Refused(match is_stuck {
            true => Refusal::new(Condition::OutcomeUnknown),
            false => Refusal::new(Condition::HandlerFailed).with_retry_after(1),
        })
    }

    /// Ends an attempt whose handler ended without a response, so that its effect is unknown. The reason is for the log.
    pub(crate) async fn fail<RB>(self, status: Option<StatusCode>, reason: &'static str) -> Executed<RB> {
        if self.settings.completed_by == CompletedBy::Upstream {
            return self.fail_upstream(status).await;
        }
        self.watch.begins(RequestPhase::Settle);
        let condition = match self.settings.profile.server_errors {
            ServerErrors::Replay => {
                self.permit.park(reason).await;
                Condition::OutcomeUnknown
            }
            ServerErrors::Release => {
                self.permit.release().await;
                Condition::HandlerFailed
            }
        };
        self.watch.ends(RequestPhase::Settle);
        Executed::Refused(Refusal::new(condition).with_status(status))
    }
}

const PANICKED: &str = "the handler panicked";

/// The reason why a proxy has no response, by its status.
const fn unanswered(status: StatusCode) -> &'static str {
    match status {
        StatusCode::GATEWAY_TIMEOUT => "the service did not answer in time",
        _ => "the connection to the service broke off",
    }
}

/// The treatment of this response to a request for this target, by the policy of the route and the directive of the handler.
pub(crate) fn treatment<RB>(
    settings: &Settings,
    target: &Uri,
    response: &Response<RB>,
    directive: Option<StoreDirective>,
) -> ResponseTreatment {
    if directive.is_none() && redirects_to_itself(settings, target, response) {
        return ResponseTreatment::Release;
    }
    fate(settings, response.status(), directive)
}

/// Returns true if the response redirects the client to another spelling of the same path, or to another host.
/// Such a redirect is not the outcome of the operation. If it were kept, the request that follows the redirect
/// would be redirected again, for ever.
///
/// A 301 counts only if the spelling differs: routers that add or remove a slash send it, and a service that has executed
/// something redirects its client with a 302 or 303.
fn redirects_to_itself<RB>(settings: &Settings, target: &Uri, response: &Response<RB>) -> bool {
    let status = response.status();
    let keeps_method = matches!(status, StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT);
    if !keeps_method && status != StatusCode::MOVED_PERMANENTLY {
        return false;
    }
    let location = response.headers().get(LOCATION).map(|location| location.as_bytes());
    let Some(Ok(location)) = location.map(Uri::try_from) else { return false };
    let canonical = |uri: &Uri| settings.canonical_path(uri.path()).into_owned();
    canonical(&location) == canonical(target) && (keeps_method || location.path() != target.path())
}

/// Combines the policy of the route with the directive of the handler.
fn fate(settings: &Settings, status: StatusCode, directive: Option<StoreDirective>) -> ResponseTreatment {
    let releases_errors = releases_errors(settings);
    match directive {
        Some(StoreDirective::Replay) => ResponseTreatment::Replay,
        Some(StoreDirective::Release) => ResponseTreatment::Release,
        Some(StoreDirective::Tombstone) => ResponseTreatment::Tombstone,
        // The record shows if the operation was committed.
        Some(StoreDirective::Unknown) if settings.completed_by == CompletedBy::Upstream => {
            ResponseTreatment::Release
        }
        Some(StoreDirective::Unknown) => ResponseTreatment::Unknown,
        None if settings.profile.frees_key(status) => ResponseTreatment::Release,
        None if status.is_server_error() && releases_errors => ResponseTreatment::Release,
        None => ResponseTreatment::Replay,
    }
}

/// Returns true if an operation that failed has done nothing, or has undone it.
pub(crate) fn releases_errors(settings: &Settings) -> bool {
    settings.profile.server_errors == ServerErrors::Release || settings.completed_by == CompletedBy::Upstream
}

/// The treatment of a response to a call whose status does not release the key.
pub(crate) fn fate_of_call(settings: &Settings, outcome: CallOutcome) -> ResponseTreatment {
    match outcome {
        CallOutcome::NotCalled => ResponseTreatment::Release,
        CallOutcome::Failed if releases_errors(settings) => ResponseTreatment::Release,
        CallOutcome::Failed | CallOutcome::Complete => ResponseTreatment::Replay,
    }
}

/// Returns true if the body of a response has a content coding.
fn is_encoded(parts: &Parts) -> bool {
    let coding = parts.headers.get(CONTENT_ENCODING);
    coding.is_some_and(|coding| !coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"identity"))
}

/// The media type of a response, without its parameters.
fn essence(parts: &Parts) -> Option<&str> {
    let content_type = parts.headers.get(CONTENT_TYPE)?.to_str().ok()?;
    Some(content_type.split(';').next().unwrap_or_default().trim())
}

fn is_json(parts: &Parts) -> bool {
    essence(parts).is_some_and(|essence| essence.eq_ignore_ascii_case("application/json"))
}

fn is_event_stream(parts: &Parts) -> bool {
    essence(parts).is_some_and(|essence| essence.eq_ignore_ascii_case("text/event-stream"))
}

/// Returns true if a response has no end, if its end cannot be told from a broken connection, or if it switches to another
/// protocol.
pub(crate) fn cannot_be_stored(parts: &Parts) -> bool {
    if parts.status == StatusCode::SWITCHING_PROTOCOLS || parts.extensions.get::<CloseDelimited>().is_some() {
        return true;
    }
    let Some(essence) = essence(parts) else { return false };
    const GRPC: &str = "application/grpc";
    is_event_stream(parts)
        || essence.eq_ignore_ascii_case("multipart/x-mixed-replace")
        || essence.get(..GRPC.len()).is_some_and(|start| start.eq_ignore_ascii_case(GRPC))
}

/// Takes the handler's directive from the response.
pub(crate) fn take_directive<T>(response: &mut Response<T>) -> Option<StoreDirective> {
    const IDEMPOTENCY_STORE: HeaderName = HeaderName::from_static("idempotency-store");
    let extension = response.extensions_mut().remove::<StoreDirective>();
    let http::header::Entry::Occupied(lines) = response.headers_mut().entry(IDEMPOTENCY_STORE) else {
        return extension;
    };
    let (_, mut lines) = lines.remove_entry_mult();
    let mut read = || {
        lines.next().map(|line| StoreDirective::from_name(line.as_bytes().to_ascii_lowercase().trim_ascii()))
    };
    let first = read().flatten();
    // Directives that contradict each other are ignored.
    let agree = std::iter::from_fn(read).all(|other| other == first);
    extension.or_else(|| first.filter(|_| agree))
}

pub(crate) fn marked<RB>(
    parts: Parts,
    body: ResponseBody<RB>,
    status: Option<&'static str>,
) -> Response<ResponseBody<RB>> {
    let mut response = Response::from_parts(parts, body);
    if let Some(status) = status {
        set_status(&mut response, status);
    }
    response
}

pub(crate) const FENCED: &str = "fenced";
pub(crate) const NOT_STORED: &str = "not-stored";

/// The `Idempotency-Status` of a response that the store did not take.
const fn status_of(settled: &SettleOutcome) -> Option<&'static str> {
    match settled {
        SettleOutcome::Fenced => Some(FENCED),
        SettleOutcome::Deferred(_) => Some(NOT_STORED),
        _ => None,
    }
}

/// The end of a record.
pub(crate) struct Settled {
    /// The response that the operation stored itself. The client gets it instead of the handler's.
    pub(crate) own: Option<StoredResponse>,
    /// The `Idempotency-Status` of the handler's response.
    pub(crate) status: Option<&'static str>,
}

/// Ends the record of an attempt by the treatment of its response.
pub(crate) async fn conclude(
    settings: &Settings,
    permit: Permit,
    fate: ResponseTreatment,
    completion: Completion,
    is_success: bool,
) -> Settled {
    match settings.completed_by {
        CompletedBy::Layer => settle(permit, fate, completion).await,
        CompletedBy::Upstream => Box::pin(report(settings, permit, fate, completion, is_success)).await,
    }
}

/// Settles the record of an attempt by the treatment of its response.
async fn settle(permit: Permit, fate: ResponseTreatment, completion: Completion) -> Settled {
    let settled = match fate {
        ResponseTreatment::Replay | ResponseTreatment::Tombstone => permit.complete(completion).await,
        // Boxed: these are rare, and boxing keeps the common future small.
        ResponseTreatment::Release => Box::pin(permit.release()).await,
        ResponseTreatment::Unknown => {
            Box::pin(permit.park("the handler reported it (Idempotency-Store: unknown)")).await
        }
        ResponseTreatment::Stop => Box::pin(permit.stop()).await,
    };
    Settled { own: None, status: status_of(&settled) }
}

/// Streams a response whose body was not read to its end: first the chunks that were read, then the rest.
fn stream<RB, E>(
    settings: &Settings,
    slot: Slot,
    parts: Parts,
    (read, held): (Chunks, BudgetReservation),
    rest: Pin<Box<RB>>,
    status: Option<&'static str>,
) -> ExecutionEnd<RB, E>
where
    RB: Body<Data: Send, Error: Into<BoxError>> + Send + 'static,
{
    let mut size = rest.size_hint();
    let ahead: u64 = read.as_slice().iter().map(|chunk| chunk.len() as u64).sum();
    // The upper bound first: it must never be below the lower one.
    if let Some(upper) = size.upper() {
        size.set_upper(upper.saturating_add(ahead));
    }
    size.set_lower(size.lower().saturating_add(ahead));
    let count = read.as_slice().len();
    let (sender, frames) = mpsc::channel(STREAM_FRAMES.max(count));
    let ahead = Some((held, count)).filter(|(_, count)| *count > 0);
    for chunk in read.as_slice() {
        let _fits = sender.try_send(Ok(Frame::data(chunk.clone())));
    }
    let is_cut = Arc::new(AtomicBool::new(false));
    let pumped = StreamedBody { frames, size, is_cut: is_cut.clone(), ahead };
    let response = marked(parts, ResponseBody::pumped(pumped), status);
    let pump = pump(rest, Some(sender), is_cut, settings.stream_timeout);
    let rest = async move {
        pump.await;
        drop(slot);
    };
    ExecutionEnd { result: Ok(Executed::Response(response)), rest: Some(Box::pin(rest)) }
}

/// Sends a handler's body to the client, at the client's pace. A client that leaves, or that takes nothing for `timeout`,
/// does not stop the body: it is read on for `timeout`, so that the handler runs to its end.
pub(crate) async fn pump<RB>(
    mut body: Pin<Box<RB>>,
    mut client: Option<mpsc::Sender<Result<Frame<Bytes>, BoxError>>>,
    is_cut: Arc<AtomicBool>,
    timeout: Duration,
) where
    RB: Body<Error: Into<BoxError>>,
{
    let mut give_up = None;
    loop {
        client.take_if(|client| client.is_closed());
        if client.is_none() && give_up.is_none() {
            give_up = Some(tokio::time::Instant::now() + timeout);
        }
        let frame = tokio::select! {
            frame = next_frame(&mut body) => frame,
            () = closed(client.as_ref()) => continue,
            () = sleep_until(give_up), if give_up.is_some() => return,
        };
        let Some(frame) = frame else { return };
        let is_broken = frame.is_err();
        if let Some(frames) = &client
            && tokio::time::timeout(timeout, frames.send(frame)).await.is_err()
        {
            is_cut.store(true, Ordering::Release);
            client = None;
        }
        if is_broken {
            return;
        }
    }
}

async fn closed(client: Option<&mpsc::Sender<Result<Frame<Bytes>, BoxError>>>) {
    match client {
        Some(client) => client.closed().await,
        None => std::future::pending().await,
    }
}

/// The number of frames by which a client may lag behind the handler's body.
const STREAM_FRAMES: usize = 16;

async fn sleep_until(at: Option<tokio::time::Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

async fn call<S: Service<R>, R>(mut inner: S, request: R) -> Result<S::Response, S::Error> {
    inner.call(request).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Profile;

    #[test]
    fn the_treatment_of_each_status() {
        let replay = Settings::default();
        let release = Settings::new(Profile::named("classic").unwrap());
        for (status, in_replay, in_release) in [
            (200, ResponseTreatment::Replay, ResponseTreatment::Replay),
            (201, ResponseTreatment::Replay, ResponseTreatment::Replay),
            (302, ResponseTreatment::Replay, ResponseTreatment::Replay),
            (400, ResponseTreatment::Replay, ResponseTreatment::Replay),
            (401, ResponseTreatment::Release, ResponseTreatment::Release),
            (402, ResponseTreatment::Replay, ResponseTreatment::Replay),
            (403, ResponseTreatment::Release, ResponseTreatment::Release),
            (404, ResponseTreatment::Replay, ResponseTreatment::Replay),
            (407, ResponseTreatment::Release, ResponseTreatment::Release),
            (408, ResponseTreatment::Release, ResponseTreatment::Release),
            (409, ResponseTreatment::Replay, ResponseTreatment::Replay),
            (421, ResponseTreatment::Release, ResponseTreatment::Release),
            (422, ResponseTreatment::Replay, ResponseTreatment::Replay),
            (425, ResponseTreatment::Release, ResponseTreatment::Release),
            (429, ResponseTreatment::Release, ResponseTreatment::Release),
            (500, ResponseTreatment::Replay, ResponseTreatment::Release),
            (503, ResponseTreatment::Replay, ResponseTreatment::Release),
        ] {
            let status = StatusCode::from_u16(status).unwrap();
            assert_eq!(fate(&replay, status, None), in_replay, "{status}");
            assert_eq!(fate(&release, status, None), in_release, "{status}");
        }
    }

    #[test]
    fn statuses_that_free_the_key_can_be_added_and_the_handler_overrides_them() {
        let statuses = vec![StatusCode::BAD_REQUEST, StatusCode::SERVICE_UNAVAILABLE];
        let settings = Settings::default().with_release_statuses(statuses).unwrap();
        assert_eq!(fate(&settings, StatusCode::BAD_REQUEST, None), ResponseTreatment::Release);
        assert_eq!(fate(&settings, StatusCode::SERVICE_UNAVAILABLE, None), ResponseTreatment::Release);
        assert_eq!(fate(&settings, StatusCode::UNPROCESSABLE_ENTITY, None), ResponseTreatment::Replay);
        assert_eq!(
            fate(&settings, StatusCode::BAD_REQUEST, Some(StoreDirective::Replay)),
            ResponseTreatment::Replay
        );
        let stripe = Settings::new(Profile::named("stripe").unwrap());
        assert_eq!(fate(&stripe, StatusCode::BAD_REQUEST, None), ResponseTreatment::Release);
        assert_eq!(fate(&stripe, StatusCode::PAYMENT_REQUIRED, None), ResponseTreatment::Replay);
    }

    #[test]
    fn the_handlers_directive_overrides_the_policy_and_is_removed() {
        let settings = Settings::default();
        for (directive, status, expected) in [
            ("replay", 429, ResponseTreatment::Replay),
            ("release", 200, ResponseTreatment::Release),
            ("Tombstone", 200, ResponseTreatment::Tombstone),
            ("unknown", 200, ResponseTreatment::Unknown),
            ("nonsense", 200, ResponseTreatment::Replay),
        ] {
            let mut response =
                Response::builder().status(status).header("Idempotency-Store", directive).body(()).unwrap();
            let taken = take_directive(&mut response);
            assert_eq!(fate(&settings, response.status(), taken), expected, "{directive}");
            assert!(response.headers().is_empty());
        }
    }

    #[test]
    fn an_outcome_that_the_service_does_not_know_never_frees_the_key() {
        let unknown = Some(StoreDirective::Unknown);
        for name in Profile::names() {
            let settings = Settings::new(Profile::named(name).unwrap());
            for status in [StatusCode::CREATED, StatusCode::BAD_REQUEST, StatusCode::GATEWAY_TIMEOUT] {
                assert_eq!(fate(&settings, status, unknown), ResponseTreatment::Unknown, "{name} {status}");
            }
            let status = StatusCode::GATEWAY_TIMEOUT;
            let upstream = settings.with_upstream_completion();
            assert_eq!(fate(&upstream, status, unknown), ResponseTreatment::Release, "{name}");
        }
    }
}
