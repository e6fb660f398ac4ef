//! Sends one request to the upstream and returns its response.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::{self, HeaderValue};
use http::uri::Authority;
use http::{Request, Response, StatusCode, Version};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::capture_connection;
use hyper_util::rt::TokioIo;
use oncegate_core::ErrorChain;
use oncegate_engine::{Attempt, LeaseError, LogThrottle};
use oncegate_http::{
    CloseDelimited, Condition, GrpcForm, IdempotencyContext, LeaseExpired, NoUpstreamResponse, ProxyRefusal,
    Refusal, RequestBody, RequestWatch, Settings, StoreDirective, UpstreamResponse, WatchedRequest,
};
use tokio::task::coop::unconstrained;
use tokio::time::Instant;
use tower_service::Service;
use tracing::field::display;

use super::FULL_WARNING_INTERVAL;
use super::admit::is_too_large;
use super::body::{
    Activity, ObservedBody, ProxyBody, RunningResponse, RunningTimer, Silence, Uploads, WholeBody,
};
use super::client::ConnectionState;
use super::coarse_timer::CoarseTimer;
use super::framing::{has_other_coding, is_unframed};
use super::headers::{Peer, prepare, remove_hop_by_hop, remove_ours, rewrite};
use super::hosts::HostLimit;
use super::interim;
use super::pool::{Pool, SendError, StreamingConnection, UpstreamBody};
use super::request_limit::{RequestLimit, RequestPermit};
use super::tls::{ToService, handshake_hint};
use crate::admin::{Metrics, UpstreamResult};
use crate::config::{Config, duration_text};
use crate::trace::RequestTrace;

pub(super) type UpstreamClient = Client<ToService, UpstreamBody>;

/// The state that all connections of one thread share.
pub(super) struct Upstream {
    /// For HTTP/1.1 without TLS, except upgrades.
    pub(super) pool: Option<Arc<Pool>>,
    pub(super) client: UpstreamClient,
    /// For upgrades, which HTTP/2 does not have, if `client` may use HTTP/2.
    pub(super) http1: Option<UpstreamClient>,
    /// The hosts to which `client` has connections.
    pub(super) hosts: Arc<HostLimit>,
    /// Counts the requests without a key, and upgraded connections.
    pub(super) without_key: RequestLimit,
    pub(super) config: Arc<Config>,
    pub(super) uploads: Arc<Uploads>,
    pub(super) metrics: Metrics,
    pub(super) timers: CoarseTimer,
}

/// The connections on which one request is sent.
enum Connections<'a> {
    Pool(&'a Arc<Pool>),
    Client(&'a UpstreamClient),
}

/// Limits for warnings that every request may cause while the service is away, or if clients send invalid requests. Each line
/// reports the number of suppressed lines.
static AWAY: LazyLock<LogThrottle> = LazyLock::new(|| LogThrottle::new(WARNING_INTERVAL));
static WITHOUT_RECORD: LazyLock<LogThrottle> = LazyLock::new(|| LogThrottle::new(WARNING_INTERVAL));
static TOO_MANY: LazyLock<LogThrottle> = LazyLock::new(|| LogThrottle::new(FULL_WARNING_INTERVAL));
const WARNING_INTERVAL: Duration = Duration::from_secs(10);

/// Decides if a warning about one request may be written. It always may if the request has a record, because an
/// operator may have to find it.
fn may_warn(has_record: bool) -> Option<u64> {
    if has_record { Some(0) } else { WITHOUT_RECORD.pass() }
}

/// The service behind the layer: forwards the requests of one connection to the upstream.
#[derive(Clone)]
pub(super) struct Forward {
    upstream: Arc<Upstream>,
    peer: Arc<Peer>,
    connection: Arc<ConnectionState>,
}

impl Forward {
    pub(super) const fn new(
        upstream: Arc<Upstream>,
        peer: Arc<Peer>,
        connection: Arc<ConnectionState>,
    ) -> Self {
        Self { upstream, peer, connection }
    }
}

impl Service<Request<RequestBody<WholeBody>>> for Forward {
    type Response = Response<ProxyBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody<WholeBody>>) -> Self::Future {
        let this = self.clone();
        Box::pin(async move { Ok(this.forward(request).await) })
    }
}

impl Forward {
    async fn forward(self, mut request: Request<RequestBody<WholeBody>>) -> Response<ProxyBody> {
        let config = &self.upstream.config;
        let route = config.route(request.method(), request.uri().path());
        let (timeout, settings) = (route.upstream_timeout, &route.settings);
        let context = IdempotencyContext::from_extensions(request.extensions());
        let attempt = context.map(|context| context.attempt().clone());
        let record = attempt.as_ref().map(|attempt| display(attempt.record_id()));
        if attempt.is_some() {
            self.connection.executes();
        }
        let grpc = GrpcForm::of(request.headers());
        let trace = request.extensions_mut().remove::<Arc<RequestTrace>>();
        request.extensions_mut().remove::<WatchedRequest>();
        let upgrade = prepare(&mut request, &self.peer);
        let client_side = upgrade.as_ref().and_then(|_| request.extensions_mut().remove::<OnUpgrade>());
        // The layer counts requests with a key, until their response.
        let permit =
            (attempt.is_none() || client_side.is_some()).then(|| self.upstream.without_key.try_enter());
        let Some(permit) = permit.map_or(Some(None), |permit| permit.map(Some)) else {
            return too_many(settings, grpc, "max-in-flight-without-key");
        };
        let Some(connections) = self.address(&mut request, upgrade.filter(|_| client_side.is_some())) else {
            return too_many(settings, grpc, "connections for different hosts");
        };
        if let Some(trace) = &trace {
            let record = attempt.as_ref().map(Attempt::record_id);
            trace.call_begins(request.headers_mut(), record, config.to.host_and_port());
        }
        let activity = Activity::new();
        let running = activity.response();
        let uploads = self.upstream.uploads.clone();
        let mut request = request.map(|body| ObservedBody::new(body, activity.clone(), uploads));
        let is_connected = AtomicBool::new(false);
        let captured = match &connections {
            Connections::Client(_) => Some(capture_connection(&mut request)),
            Connections::Pool(_) => None,
        };
        let has_connection = || match &captured {
            Some(captured) => captured.connection_metadata().is_some(),
            None => is_connected.load(Ordering::Relaxed),
        };
        let sending = async {
            match connections {
                Connections::Pool(pool) => pool.send(request, &activity, &is_connected).await,
                Connections::Client(client) => {
                    let sent = match captured.clone() {
                        Some(captured) => interim::send_captured(client, request, captured).await,
                        None => interim::send(client, request).await,
                    };
                    sent.map(|response| (response, None)).map_err(SendError::from)
                }
            }
        };
        let sending = async {
            match &attempt {
                Some(attempt) => under_lease(attempt, has_connection, sending).await,
                None => Ok(sending.await),
            }
        };
        let response = tokio::select! {
            // A response that has arrived is not late.
            biased;
            response = sending => Some(response),
            // Unconstrained: a service that sends without a pause uses up the budget of the task, and no timer would end.
            () = unconstrained(silence(&activity, timeout, &self.upstream.timers)) => None,
        };
        let response = match response {
            Some(Ok(response)) => Some(response),
            None => None,
            Some(Err(error)) => {
                if let Some(suppressed) = AWAY.pass() {
                    tracing::warn!(suppressed, error = %ErrorChain(&error), "the request was not sent to the service");
                }
                return not_begun();
            }
        };
        let (result, response) = match response {
            Some(Ok(response)) => {
                let client = (client_side, running, permit);
                self.bring_back(response, client, timeout, (settings, grpc), record)
            }
            // Without a connection, no request was sent.
            None if attempt.is_some() && !has_connection() => {
                if let Some(suppressed) = AWAY.pass() {
                    let timeout = timeout.map(duration_text);
                    tracing::warn!(record, suppressed, to = %config.to, timeout, "no connection to the service within upstream-timeout");
                }
                (UpstreamResult::Unreached, unreachable_upstream(settings, grpc))
            }
            None => {
                if let Some(suppressed) = may_warn(record.is_some()) {
                    let timeout = timeout.map(duration_text);
                    tracing::warn!(
                        record,
                        suppressed,
                        timeout,
                        "the service did not respond within upstream-timeout"
                    );
                }
                (UpstreamResult::TimedOut, unanswered(settings, StatusCode::GATEWAY_TIMEOUT, grpc))
            }
            Some(Err(SendError::Unreached(error))) => {
                if let Some(suppressed) = AWAY.pass() {
                    let error = ErrorChain(&*error).to_string();
                    let hint = handshake_hint(&error);
                    tracing::warn!(record, suppressed, to = %config.to, error, "the service cannot be reached{hint}");
                }
                (UpstreamResult::Unreached, unreachable_upstream(settings, grpc))
            }
            Some(Err(SendError::Unanswered(error))) if is_head_too_large(&*error) => {
                if let Some(suppressed) = may_warn(record.is_some()) {
                    tracing::warn!(record, suppressed, "the head of the upstream's response is too large");
                }
                cannot_be_passed_on(Condition::UpstreamHeadTooLarge, settings, grpc)
            }
            Some(Err(SendError::Unanswered(error))) if activity.is_broken() => {
                tracing::debug!(error = %ErrorChain(&*error), "request body broke off");
                (UpstreamResult::Broken, request_broke_off(settings, grpc))
            }
            Some(Err(SendError::Unanswered(error))) => {
                if let Some(suppressed) = may_warn(record.is_some()) {
                    let what = "the service closed the connection before its response began";
                    tracing::warn!(record, suppressed, error = %ErrorChain(&*error), "{what}");
                }
                (UpstreamResult::Broken, unanswered(settings, StatusCode::BAD_GATEWAY, grpc))
            }
        };
        let context = trace.as_deref().and_then(RequestWatch::trace);
        self.upstream.metrics.observe_upstream(result, activity.start().elapsed(), context);
        if let Some(trace) = &trace {
            let status = (result == UpstreamResult::Answered).then(|| response.status());
            trace.call_ended(result, status);
        }
        response
    }

    /// Sets the address of the service in a request, and returns the connections on which it is sent. `None` if the limit of
    /// hosts is reached.
    fn address<B>(&self, request: &mut Request<B>, upgrade: Option<HeaderValue>) -> Option<Connections<'_>> {
        let config = &self.upstream.config;
        *request.version_mut() = Version::HTTP_11;
        let is_upgrade = upgrade.is_some();
        let mut client = &self.upstream.client;
        let mut host = None;
        if let Some(protocol) = upgrade {
            ask_upgrade(request.headers_mut(), protocol);
            client = self.upstream.http1.as_ref().unwrap_or(client);
        } else if config.may_speak_http2() {
            host = take_host(request.headers_mut());
            if host.as_ref().is_some_and(|host| !self.upstream.hosts.admit(host, Instant::now().into())) {
                return None;
            }
        } else if request.headers().contains_key(header::TE) {
            // RFC 9110, 10.1.4. HTTP/2 has no such field.
            request.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("te"));
        }
        if let (Some(pool), false) = (&self.upstream.pool, is_upgrade) {
            return Some(Connections::Pool(pool));
        }
        *request.uri_mut() = rewrite(&config.to, request.uri(), host);
        Some(Connections::Client(client))
    }

    /// Prepares the upstream's response for the client, or replaces it by a refusal.
    fn bring_back(
        &self,
        (mut response, connection): (Response<Incoming>, Option<StreamingConnection>),
        (client_side, running, mut permit): (Option<OnUpgrade>, RunningResponse, Option<RequestPermit>),
        timeout: Option<Duration>,
        (settings, grpc): (&Settings, Option<GrpcForm>),
        record: Option<impl tracing::Value>,
    ) -> (UpstreamResult, Response<ProxyBody>) {
        if is_too_large(response.headers()) {
            if let Some(suppressed) = may_warn(record.is_some()) {
                tracing::warn!(record, suppressed, "the head of the upstream's response is too large");
            }
            return cannot_be_passed_on(Condition::UpstreamHeadTooLarge, settings, grpc);
        }
        if has_other_coding(&response) {
            if let Some(suppressed) = may_warn(record.is_some()) {
                let warning = "the upstream's response has a transfer coding other than chunked";
                tracing::warn!(record, suppressed, "{warning}");
            }
            return cannot_be_passed_on(Condition::UpstreamUnsupported, settings, grpc);
        }
        if is_unframed(&response) {
            tracing::debug!("upstream ends its response by closing the connection");
            response.extensions_mut().insert(CloseDelimited);
        }
        let protocol = remove_hop_by_hop(response.headers_mut(), |_| false);
        keep_one_length(response.headers_mut());
        if record.is_some() {
            // A client would take them for this proxy's own.
            remove_ours(response.headers_mut());
        }
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let (Some(protocol), Some(client_side)) = (protocol, client_side) else {
                if let Some(suppressed) = may_warn(record.is_some()) {
                    let what = "the service sent 101, although the request asked for no upgrade";
                    tracing::warn!(record, suppressed, "{what}");
                }
                return (UpstreamResult::Broken, unanswered(settings, StatusCode::BAD_GATEWAY, grpc));
            };
            ask_upgrade(response.headers_mut(), protocol);
            let upstream_side = hyper::upgrade::on(&mut response);
            tokio::spawn(tunnel(client_side, upstream_side, permit.take()));
        }
        // RFC 9110, 6.2: the version is that of this hop. With HTTP/1.0 the client could not detect a truncated body.
        let version = std::mem::replace(response.version_mut(), Version::HTTP_11);
        response.extensions_mut().insert(UpstreamResponse);
        let silence = Silence::new(timeout, self.upstream.timers.clone());
        let response = response.map(|body| {
            ProxyBody::upstream(WholeBody::new(body, version), connection, silence, (running, permit))
        });
        (UpstreamResult::Answered, response)
    }
}

/// Removes repeated lengths. The library accepts equal ones and refuses different ones, but a client may not accept both.
fn keep_one_length(headers: &mut http::HeaderMap) {
    if headers.get_all(header::CONTENT_LENGTH).iter().nth(1).is_some()
        && let Some(length) = headers.get(header::CONTENT_LENGTH).cloned()
    {
        headers.insert(header::CONTENT_LENGTH, length);
    }
}

/// Returns true if the library did not read the head of a response because it is too large.
fn is_head_too_large(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut source = Some(error);
    while let Some(error) = source {
        if error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_parse_too_large) {
            return true;
        }
        source = error.source();
    }
    false
}

/// Moves the host from the fields to the address. An empty one stays, because an address cannot have it.
pub(super) fn take_host(headers: &mut http::HeaderMap) -> Option<Authority> {
    let host = Authority::try_from(headers.get(header::HOST)?.as_bytes()).ok()?;
    headers.remove(header::HOST);
    Some(host)
}

fn ask_upgrade(headers: &mut http::HeaderMap, protocol: HeaderValue) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, protocol);
}

/// Copies bytes both ways until both sides are done.
async fn tunnel(client: OnUpgrade, upstream: OnUpgrade, _permit: Option<RequestPermit>) {
    match tokio::try_join!(client, upstream) {
        Ok((client, upstream)) => {
            let (mut client, mut upstream) = (TokioIo::new(client), TokioIo::new(upstream));
            if let Err(error) = tokio::io::copy_bidirectional(&mut client, &mut upstream).await {
                tracing::debug!(error = %ErrorChain(&error), "tunnel closed");
            }
        }
        Err(error) => tracing::debug!(error = %ErrorChain(&error), "upgrade failed"),
    }
}

/// Sends a request unless the lease of its attempt is over. This process may be paused at any moment, also while it connects,
/// so the lease is checked before each step until there is a connection.
async fn under_lease<T>(
    attempt: &Attempt,
    has_connection: impl Fn() -> bool,
    sending: impl Future<Output = T>,
) -> Result<T, LeaseError> {
    let mut sending = pin!(sending);
    loop {
        let sent = poll_fn(|cx| {
            if !has_connection() && !attempt.is_owner() {
                return Poll::Ready(None);
            }
            sending.as_mut().poll(cx).map(Some)
        });
        match sent.await {
            Some(response) => return Ok(response),
            None => attempt.confirm_lease().await?,
        }
    }
}

/// The response if nothing was sent because the lease was over. The layer writes its body.
fn not_begun() -> Response<ProxyBody> {
    let mut response = Response::new(ProxyBody::own(bytes::Bytes::new()));
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    response.extensions_mut().insert(LeaseExpired);
    response
}

/// Ends when no bytes have moved towards the upstream for `timeout`.
async fn silence(activity: &Activity, timeout: Option<Duration>, timers: &CoarseTimer) {
    let Some(timeout) = timeout else { return std::future::pending().await };
    let mut now = activity.start();
    loop {
        let until = activity.last() + timeout;
        let mut timer = RunningTimer::until(until, now, timers);
        poll_fn(|cx| timer.poll(cx, timeout)).await;
        if activity.last() + timeout <= until {
            return;
        }
        now = Instant::now();
    }
}

/// The response if the service's response cannot be passed on. The record becomes a tombstone.
fn cannot_be_passed_on(
    condition: Condition,
    settings: &Settings,
    grpc: Option<GrpcForm>,
) -> (UpstreamResult, Response<ProxyBody>) {
    let refusal = Refusal::new(condition);
    let mut response = refusal.into_response(settings, grpc).map(ProxyBody::own);
    response.extensions_mut().insert(StoreDirective::Tombstone);
    (UpstreamResult::Answered, response)
}

/// The response if the body of a request without a key broke off or was malformed while it was forwarded.
fn request_broke_off(settings: &Settings, grpc: Option<GrpcForm>) -> Response<ProxyBody> {
    let refusal = Refusal::new(Condition::RequestMalformed).with_detail(
        "The body of the request is malformed, or it ended early. A part of it may have reached the service.",
    );
    refusal.into_response(settings, grpc).map(ProxyBody::own)
}

/// The response if the request was sent, at least in part, and there is no response: its effect is unknown. For a request with a
/// key the layer writes the response.
fn unanswered(settings: &Settings, status: StatusCode, grpc: Option<GrpcForm>) -> Response<ProxyBody> {
    let refusal = Refusal::new(Condition::UpstreamUnanswered).with_status(Some(status));
    let mut response = refusal.into_response(settings, grpc).map(ProxyBody::own);
    response.extensions_mut().insert(NoUpstreamResponse(status));
    response
}

/// The response if nothing was sent because this limit is reached.
fn too_many(settings: &Settings, grpc: Option<GrpcForm>, limit: &str) -> Response<ProxyBody> {
    if let Some(suppressed) = TOO_MANY.pass() {
        tracing::warn!(suppressed, limit, "a limit is reached; further requests are refused with 503");
    }
    let refusal = Refusal::new(Condition::Overloaded)
        .with_detail(
            "Nothing was sent to the service: too many requests are in progress. Send the same request later.",
        )
        .with_retry_after(1);
    not_forwarded(refusal, settings, grpc)
}

fn unreachable_upstream(settings: &Settings, grpc: Option<GrpcForm>) -> Response<ProxyBody> {
    not_forwarded(Refusal::new(Condition::UpstreamUnreachable), settings, grpc)
}

/// The response if nothing was sent, so that the key is free again.
fn not_forwarded(refusal: Refusal, settings: &Settings, grpc: Option<GrpcForm>) -> Response<ProxyBody> {
    let condition = refusal.condition;
    let mut response = refusal.into_response(settings, grpc).map(ProxyBody::own);
    response.extensions_mut().insert(StoreDirective::Release);
    response.extensions_mut().insert(ProxyRefusal(condition));
    response
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use oncegate_core::{
        Completion, Fingerprint, IdempotencyKey, Label, MemoryStore, OnAbandoned, RecordId, Scope, Store,
        limits,
    };
    use oncegate_engine::{ClaimOutcome, ClaimRequest, Engine, Permit, Policy};

    use super::*;

    async fn claim(engine: &Engine, lease: Duration) -> Option<Permit> {
        let policy = Policy::default().with_lease(lease).unwrap().with_wait(Duration::ZERO).unwrap();
        let request = ClaimRequest {
            id: RecordId::derive(&Scope::single_tenant(), &IdempotencyKey::new(*b"k").unwrap()),
            fingerprint: Fingerprint::of_parts("test", &[]),
            label: Label::default(),
            policy: policy.with_on_abandoned(OnAbandoned::Reexecute),
        };
        match engine.claim(request).await.unwrap() {
            ClaimOutcome::Execute(permit) => Some(permit),
            _ => None,
        }
    }

    /// Sends a request whose connection takes longer than its lease. Returns true for success, and true if it was sent.
    async fn sent_late(store: &Arc<dyn Store>, meanwhile: impl AsyncFnOnce()) -> (bool, bool) {
        // This engine does not renew leases, as if the process were paused.
        let stopped = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let engine = Engine::builder(store.clone()).with_runtime(stopped.handle().clone()).build();
        let permit = claim(&engine, limits::MIN_LEASE).await.unwrap();
        let (polls, connected) = (AtomicUsize::new(0), tokio::sync::Notify::new());
        let sending = async {
            polls.fetch_add(1, Ordering::SeqCst);
            connected.notified().await;
            polls.fetch_add(1, Ordering::SeqCst);
        };
        let attempt = permit.attempt();
        let connecting = async {
            while attempt.is_owner() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            meanwhile().await;
            connected.notify_one();
        };
        let (result, ()) = tokio::join!(under_lease(&attempt, || false, sending), connecting);
        drop(permit);
        tokio::task::spawn_blocking(move || drop(stopped)).await.unwrap();
        (result.is_ok(), polls.load(Ordering::SeqCst) == 2)
    }

    #[tokio::test]
    async fn a_request_whose_lease_ended_while_connecting_is_not_sent_after_a_takeover() {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
        let other = Engine::new(store.clone());
        let result = sent_late(&store, async || {
            // A lease ends for its owner a little before it ends in the store.
            let permit = loop {
                match claim(&other, limits::MAX_LEASE).await {
                    Some(permit) => break permit,
                    None => tokio::time::sleep(Duration::from_millis(1)).await,
                }
            };
            permit.complete(Completion::Tombstone).await;
        });
        assert_eq!(result.await, (false, false));
    }

    #[tokio::test]
    async fn a_request_whose_lease_ended_while_connecting_is_sent_under_a_new_lease() {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
        assert_eq!(sent_late(&store, async || {}).await, (true, true));
    }
}
