//! Asks the service for the outcome of an abandoned attempt, or for the response that a completed record lacks.
//!
//! Money depends on the report, so nothing is guessed: a response counts only if it names the attempt and the outcome, in
//! fields that only such a response has. Everything else is no report.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{Method, Request, Response, StatusCode, Uri, Version};
use http_body::Body as _;
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use oncegate_core::ErrorChain;
use oncegate_http::{
    BoxError, CallerPart, CompletedBy, IdempotencyContext, Reconcile, Reconciled, Settings, StoreDirective,
};
use tokio::time::{Instant, sleep, timeout_at};

use super::authorize::AuthorizeClient;
use super::body::WholeBody;
use super::forward::take_host;
use super::framing::{has_other_coding, is_unframed};
use super::headers::{ATTEMPT, Peer, RECORD, TOKEN, forward, remove_hop_by_hop, remove_ours, rewrite, via};
use super::tls::{ToService, connector};
use super::{MAX_HEAD, MAX_LIBRARY_HEAD, MAX_LINES, interim};
use crate::admin::{Metrics, ReconcileResult};
use crate::config::{Config, RouteConfig};

/// The header field in which the service reports the outcome.
const OUTCOME: HeaderName = HeaderName::from_static("oncegate-outcome");
/// The method and the target of the request in question.
const METHOD: HeaderName = HeaderName::from_static("oncegate-method");
const TARGET: HeaderName = HeaderName::from_static("oncegate-target");

/// The pauses between questions grow: a service that is back is asked soon, and one that stays away is not asked all the time.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Makes the clients of all routes.
#[derive(Clone)]
pub(super) struct ReconcileClients {
    /// Uses a new connection for each question: questions are rare, and a kept connection may be broken.
    client: Client<ToService, Empty<Bytes>>,
    config: Arc<Config>,
    metrics: Metrics,
}

impl ReconcileClients {
    pub(super) fn new(config: Arc<Config>, metrics: Metrics) -> Result<Self, String> {
        let protocol = config.upstream_protocol;
        let connector = connector(&config.to, protocol, config.upstream_connect_timeout)?;
        let client = Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_max_idle_per_host(0)
            .http1_max_buf_size(MAX_HEAD)
            .http1_max_headers(MAX_LINES)
            .http2_max_header_list_size(MAX_LIBRARY_HEAD)
            .http2_only(protocol == crate::config::UpstreamProtocol::Http2)
            .build(connector);
        Ok(Self { client, config, metrics })
    }

    /// The layer's settings of this route, with a client that asks the service if the route has a path for questions.
    pub(super) fn settings(&self, route: &RouteConfig) -> Settings {
        let tag = self.metrics.route_tag(&route.label);
        let mut settings = route.settings.clone().with_tag(tag);
        if settings.redacts()
            && let Some(counts) = self.metrics.redactions(tag)
        {
            settings = settings.with_redaction_counts(counts);
        }
        if let Some(path) = route.authorize.clone() {
            let (clients, timeout) = (self.clone(), route.authorize_timeout);
            settings = settings.clone().with_authorize(AuthorizeClient { clients, path, timeout, settings });
        }
        let Some(path) = route.reconcile_path.clone() else { return settings };
        let client = ReconcileClient {
            clients: self.clone(),
            path,
            timeout: route.reconcile_timeout,
            settings: settings.clone(),
        };
        settings.with_reconcile(client)
    }

    pub(super) const fn client(&self) -> &Client<ToService, Empty<Bytes>> {
        &self.client
    }

    pub(super) const fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// A question to the service about this request. It names the caller as the request itself does, also by the fields of
    /// trusted proxies and by those of this proxy, because the service must decide for this caller. Fields about the body or
    /// about caches are left out.
    pub(super) fn question(
        &self,
        settings: &Settings,
        request: &Parts,
        method: Method,
        path: &PathAndQuery,
    ) -> Option<Request<Empty<Bytes>>> {
        let mut headers = request.headers.clone();
        remove_hop_by_hop(&mut headers, |name| settings.depends_on_header(name));
        remove_ours(&mut headers);
        let unwanted: Vec<_> = headers.keys().filter(|name| is_unwanted(name, settings)).cloned().collect();
        for name in unwanted {
            headers.remove(name);
        }
        headers.insert(METHOD, HeaderValue::try_from(request.method.as_str().to_ascii_uppercase()).ok()?);
        let target = request.uri.path_and_query().map_or("/", PathAndQuery::as_str);
        headers.insert(TARGET, HeaderValue::try_from(target).ok()?);
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, no-store"));
        if let Some(peer) = request.extensions.get::<Arc<Peer>>() {
            forward(&mut headers, peer);
        }
        headers.append(header::VIA, via(request.version));
        let host = self.config.may_speak_http2().then(|| take_host(&mut headers)).flatten();
        let mut question = Request::new(Empty::new());
        *question.method_mut() = method;
        *question.uri_mut() = rewrite(&self.config.to, &Uri::from(path.clone()), host);
        *question.version_mut() = Version::HTTP_11;
        *question.headers_mut() = headers;
        Some(question)
    }
}

/// Asks the service, on one route.
struct ReconcileClient {
    clients: ReconcileClients,
    path: PathAndQuery,
    timeout: Duration,
    /// The settings that define which part of a response is kept.
    settings: Settings,
}

/// The result of one question.
enum Report {
    Happened(Reconciled),
    DidNotHappen,
    /// No report, with the reason; true if the response reported that the operation took place, but broke off.
    None(String, bool),
}

fn none(why: impl Into<String>) -> Report {
    Report::None(why.into(), false)
}

impl Reconcile for ReconcileClient {
    fn reconcile<'a>(
        &'a self,
        context: &'a IdempotencyContext,
        request: &'a Parts,
    ) -> Pin<Box<dyn Future<Output = Reconciled> + Send + 'a>> {
        Box::pin(async move {
            let found = self.find_out(context, request).await;
            let result = ReconcileResult::of(&found);
            self.clients.metrics.observe_reconciled(result);
            let record = context.attempt().record_id();
            let about = self.about();
            tracing::info!(
                %record,
                result = result.as_str(),
                about,
                "the service was asked for the outcome of a request"
            );
            found
        })
    }
}

impl ReconcileClient {
    /// Asks until there is a report, or the time is over.
    async fn find_out(&self, context: &IdempotencyContext, request: &Parts) -> Reconciled {
        let deadline = Instant::now() + self.timeout;
        let mut pause = FIRST_PAUSE;
        let mut reported_happened = false;
        loop {
            let response = timeout_at(deadline, self.ask(context, request)).await;
            let why = match response.unwrap_or_else(|_| none("it did not answer in time")) {
                Report::Happened(found) => return found,
                // If the service contradicts itself, an execution could be the second one.
                Report::DidNotHappen if reported_happened => {
                    "it reported both that it happened and that it did not".to_owned()
                }
                Report::DidNotHappen => return Reconciled::DidNotHappen,
                Report::None(why, happened) => {
                    reported_happened |= happened;
                    why
                }
            };
            let record = context.attempt().record_id();
            let about = self.about();
            tracing::warn!(%record, why, about, "the service did not report the outcome of a request");
            if Instant::now() + pause >= deadline {
                return Reconciled::CannotTell;
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// The subject of the question.
    fn about(&self) -> &'static str {
        match self.settings.completed_by() {
            CompletedBy::Upstream => "the missing response of a completed record",
            _ => "an abandoned attempt",
        }
    }

    async fn ask(&self, context: &IdempotencyContext, request: &Parts) -> Report {
        let Some(question) = self.question(context, request) else { return none("it cannot be asked") };
        let asked = question.headers().clone();
        match interim::send(&self.clients.client, question).await {
            Ok(response) => self.read(&asked, response).await,
            Err(error) => none(ErrorChain(&error).to_string()),
        }
    }

    /// The question, about the attempt.
    fn question(&self, context: &IdempotencyContext, request: &Parts) -> Option<Request<Empty<Bytes>>> {
        let mut question = self.clients.question(&self.settings, request, Method::GET, &self.path)?;
        let (headers, attempt) = (question.headers_mut(), context.attempt());
        self.settings.name_key(context.key(), headers);
        headers.insert(RECORD, HeaderValue::try_from(attempt.record_id().to_string()).ok()?);
        headers.insert(TOKEN, HeaderValue::from(attempt.token().get()));
        headers.insert(ATTEMPT, HeaderValue::from(attempt.number()));
        Some(question)
    }

    async fn read(&self, asked: &HeaderMap, response: Response<Incoming>) -> Report {
        // Half of such a body looks complete.
        let has_no_end = is_unframed(&response) || has_other_coding(&response);
        let (mut head, body) = response.into_parts();
        let status = head.status;
        // The response to another question, from a cache or from a service that mixed them up, does not count.
        for name in [RECORD, TOKEN] {
            if only(&head.headers, &name) != asked.get(&name) {
                return none(format!("{status} without the {name} of the question"));
            }
        }
        let outcome = only(&head.headers, &OUTCOME).map(HeaderValue::as_bytes);
        match outcome {
            Some(b"did-not-happen") if is_plain(status) => return Report::DidNotHappen,
            Some(b"happened") if is_final(status) => {}
            Some(b"did-not-happen" | b"happened") => {
                return none(format!("{status}, which contradicts the outcome that it reports"));
            }
            Some(b"unknown") => return none("it does not know"),
            _ => return none(format!("{status} without a valid {OUTCOME}")),
        }
        match take_store_directive(&mut head.headers) {
            Ok(None | Some(StoreDirective::Replay)) => {}
            Ok(Some(StoreDirective::Tombstone)) => return Report::Happened(Reconciled::Unreplayable),
            _ => {
                return none(
                    "it reports that it happened and that it must not be kept, which is a contradiction",
                );
            }
        }
        if has_no_end {
            return Report::None("a body without a length".to_owned(), true);
        }
        remove_hop_by_hop(&mut head.headers, |_| false);
        match read_whole(WholeBody::new(body, head.version), self.settings.max_response_body()).await {
            Ok(Some((chunks, trailers))) => {
                let stored =
                    self.settings.stored_response_off_thread(&head, &chunks, trailers.as_ref()).await;
                Report::Happened(stored.map_or(Reconciled::Unreplayable, Reconciled::Happened))
            }
            Ok(None) => Report::Happened(Reconciled::Unreplayable),
            Err(error) => Report::None(ErrorChain(&*error).to_string(), true),
        }
    }
}

/// The body and its trailers; `None` if it is larger than the limit.
async fn read_whole(
    mut body: WholeBody,
    limit: usize,
) -> Result<Option<(Vec<Bytes>, Option<HeaderMap>)>, BoxError> {
    let (mut chunks, mut len, mut trailers) = (Vec::new(), 0_usize, None);
    if body.size_hint().lower() > limit as u64 {
        return Ok(None);
    }
    while let Some(frame) = body.frame().await {
        match frame?.into_data() {
            Ok(data) => {
                len = len.saturating_add(data.len());
                if len > limit {
                    return Ok(None);
                }
                chunks.push(data);
            }
            Err(frame) => trailers = frame.into_trailers().ok().or(trailers),
        }
    }
    Ok(Some((chunks, trailers)))
}

/// The value of a field, unless it is repeated.
pub(super) fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a HeaderValue> {
    let mut values = headers.get_all(name).iter();
    values.next().filter(|_| values.next().is_none())
}

/// Statuses with which the service may report that nothing happened.
fn is_plain(status: StatusCode) -> bool {
    matches!(status.as_u16(), 200 | 204 | 404)
}

/// Statuses that a stored response may have. The others mean that nothing was decided or that the service failed, which
/// contradicts an operation that took place; and 304 is about the question itself.
fn is_final(status: StatusCode) -> bool {
    match status.as_u16() {
        304 | 401 | 403 | 407 | 408 | 421 | 425 | 429 => false,
        status => (200..500).contains(&status),
    }
}

/// Takes the directive from the fields. `Err` if it is invalid.
fn take_store_directive(headers: &mut HeaderMap) -> Result<Option<StoreDirective>, ()> {
    const IDEMPOTENCY_STORE: HeaderName = HeaderName::from_static("idempotency-store");
    if !headers.contains_key(IDEMPOTENCY_STORE) {
        return Ok(None);
    }
    let word = only(headers, &IDEMPOTENCY_STORE).map(|word| word.as_bytes().to_ascii_lowercase());
    headers.remove(IDEMPOTENCY_STORE);
    word.and_then(|word| StoreDirective::from_name(&word)).map(Some).ok_or(())
}

/// Fields of the retry that do not belong in the question: those of its body, those that would make the question conditional,
/// and those by which a service would take it for a request to another path or with another method. A field that names the
/// caller always belongs in it.
fn is_unwanted(name: &HeaderName, settings: &Settings) -> bool {
    const PREFIXES: [&str; 2] = ["if-", "x-http-method"];
    const NAMES: [&str; 11] = [
        "content-type", "content-encoding", "expect", "range", "te", "trailer", "x-method-override",
        "x-original-url", "x-original-uri", "x-original-method", "x-rewrite-url",
    ];
    if settings.caller().parts().any(|part| matches!(part, CallerPart::Header(own) if own == name)) {
        return false;
    }
    let spelled = name.as_str().replace('_', "-");
    let is_of_body = spelled.starts_with("content-") || matches!(&*spelled, "digest" | "pragma");
    NAMES.contains(&&*spelled)
        || PREFIXES.iter().any(|prefix| spelled.starts_with(prefix))
        || (is_of_body && !settings.depends_on_header(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_statuses_that_a_report_may_have() {
        for (status, happened, did_not) in [
            (200, true, true),
            (201, true, false),
            (204, true, true),
            (302, true, false),
            (304, false, false),
            (400, true, false),
            (401, false, false),
            (403, false, false),
            (404, true, true),
            (409, true, false),
            (422, true, false),
            (429, false, false),
            (500, false, false),
            (503, false, false),
        ] {
            let code = StatusCode::from_u16(status).unwrap();
            assert_eq!((is_final(code), is_plain(code)), (happened, did_not), "{status}");
        }
    }

    #[test]
    fn a_repeated_field_does_not_count() {
        let mut headers = HeaderMap::new();
        assert_eq!(only(&headers, &OUTCOME), None);
        headers.append(OUTCOME, HeaderValue::from_static("happened"));
        assert_eq!(only(&headers, &OUTCOME).unwrap(), "happened");
        headers.append(OUTCOME, HeaderValue::from_static("happened"));
        assert_eq!(only(&headers, &OUTCOME), None);
    }
}
