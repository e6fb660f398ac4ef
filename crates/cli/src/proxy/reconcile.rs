//! Asks the service what became of an attempt whose owner is gone, or for the answer of one that it completed without it.
//!
//! Money depends on the answer, so nothing is read into it: only an answer that says what it is about, and what it says,
//! in fields that only it sends, counts. Everything else is not an answer.

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
    BoxError, CompletedBy, IdempotencyContext, Reconcile, Reconciled, Settings, StoreDirective,
};
use tokio::time::{Instant, sleep, timeout_at};

use super::body::WholeBody;
use super::forward::take_host;
use super::framing::{has_other_coding, is_unframed};
use super::headers::{ATTEMPT, RECORD, TOKEN, remove_hop_by_hop, remove_ours, rewrite, via};
use super::tls::{ToService, connector};
use super::{MAX_HEAD, MAX_LIBRARY_HEAD, MAX_LINES};
use crate::admin::{Metrics, ReconcileResult};
use crate::config::{Config, RouteConfig};

/// The header field in which the service reports the outcome.
const OUTCOME: HeaderName = HeaderName::from_static("oncegate-outcome");
/// The method and the target of the request that is asked about.
const METHOD: HeaderName = HeaderName::from_static("oncegate-method");
const TARGET: HeaderName = HeaderName::from_static("oncegate-target");

/// A service that comes back is asked soon, and one that stays away is not asked all the time.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Asks, on all routes.
#[derive(Clone)]
pub(super) struct ReconcileClients {
    /// With a connection for each question: they are rare, and one that is kept could be one that is broken.
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

    /// The layer's settings of this route, with the service to ask if the route has a path for it.
    pub(super) fn settings(&self, route: &RouteConfig) -> Settings {
        let settings = route.settings.clone();
        let Some(path) = route.reconcile_path.clone() else { return settings };
        let asker = ReconcileClient {
            questions: self.clone(),
            path,
            patience: route.reconcile_timeout,
            settings: settings.clone(),
        };
        settings.with_reconcile(asker)
    }
}

/// Asks, on one route.
struct ReconcileClient {
    questions: ReconcileClients,
    path: PathAndQuery,
    patience: Duration,
    /// The settings that define which part of a response is kept.
    settings: Settings,
}

/// The result of one question.
enum Answer {
    Happened(Reconciled),
    DidNotHappen,
    /// None, and why; whether it said before it broke off that the operation took place.
    None(String, bool),
}

fn none(why: impl Into<String>) -> Answer {
    Answer::None(why.into(), false)
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
            self.questions.metrics.observe_reconciled(result);
            let record = context.attempt().record_id();
            let about = self.about();
            tracing::info!(
                %record,
                result = result.as_str(),
                about,
                "asked the service what became of a request"
            );
            found
        })
    }
}

impl ReconcileClient {
    /// Asks until there is an answer, or the time is over.
    async fn find_out(&self, context: &IdempotencyContext, request: &Parts) -> Reconciled {
        let deadline = Instant::now() + self.patience;
        let mut pause = FIRST_PAUSE;
        let mut said_happened = false;
        loop {
            let answer = timeout_at(deadline, self.ask(context, request)).await;
            let why = match answer.unwrap_or_else(|_| none("it did not answer in time")) {
                Answer::Happened(found) => return found,
                // A service that contradicts itself is not believed in what could take effect twice.
                Answer::DidNotHappen if said_happened => {
                    "it said both that it happened and that not".to_owned()
                }
                Answer::DidNotHappen => return Reconciled::DidNotHappen,
                Answer::None(why, said) => {
                    said_happened |= said;
                    why
                }
            };
            let record = context.attempt().record_id();
            let about = self.about();
            tracing::warn!(%record, why, about, "the service does not say what became of a request");
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
            CompletedBy::Upstream => "an answer that its record has not got",
            _ => "an abandoned attempt",
        }
    }

    async fn ask(&self, context: &IdempotencyContext, request: &Parts) -> Answer {
        let Some(question) = self.question(context, request) else { return none("it cannot be asked") };
        let asked = question.headers().clone();
        match self.questions.client.request(question).await {
            Ok(answer) => self.read(&asked, answer).await,
            Err(error) => none(ErrorChain(&error).to_string()),
        }
    }

    /// The question: who asks is told as for the request itself, because the service must not tell one caller of
    /// another's operations. What the body or a cache would be concerned with is not part of it.
    fn question(&self, context: &IdempotencyContext, request: &Parts) -> Option<Request<Empty<Bytes>>> {
        let config = &self.questions.config;
        let mut headers = request.headers.clone();
        remove_hop_by_hop(&mut headers, |name| self.settings.goes_by(name));
        remove_ours(&mut headers);
        let unwanted: Vec<_> = headers.keys().filter(|name| is_unwanted(name)).cloned().collect();
        for name in unwanted {
            headers.remove(name);
        }
        let attempt = context.attempt();
        headers.insert(RECORD, HeaderValue::try_from(attempt.record_id().to_string()).ok()?);
        headers.insert(TOKEN, HeaderValue::from(attempt.token().get()));
        headers.insert(ATTEMPT, HeaderValue::from(attempt.number()));
        headers.insert(METHOD, HeaderValue::try_from(request.method.as_str().to_ascii_uppercase()).ok()?);
        let target = request.uri.path_and_query().map_or("/", PathAndQuery::as_str);
        headers.insert(TARGET, HeaderValue::try_from(target).ok()?);
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        headers.append(header::VIA, via(request.version));
        let host = config.may_speak_http2().then(|| take_host(&mut headers)).flatten();
        let mut question = Request::new(Empty::new());
        *question.method_mut() = Method::GET;
        *question.uri_mut() = rewrite(&config.to, &Uri::from(self.path.clone()), host);
        *question.version_mut() = Version::HTTP_11;
        *question.headers_mut() = headers;
        Some(question)
    }

    async fn read(&self, asked: &HeaderMap, answer: Response<Incoming>) -> Answer {
        // Half of such a body looks like the whole.
        let has_no_end = is_unframed(&answer) || has_other_coding(&answer);
        let (mut head, body) = answer.into_parts();
        let status = head.status;
        // An answer to another question, from a cache or a service that mixed them up, is none to this one.
        for name in [RECORD, TOKEN] {
            if only(&head.headers, &name) != asked.get(&name) {
                return none(format!("{status} without the {name} that it was asked with"));
            }
        }
        let outcome = only(&head.headers, &OUTCOME).map(HeaderValue::as_bytes);
        match outcome {
            Some(b"did-not-happen") if is_plain(status) => return Answer::DidNotHappen,
            Some(b"happened") if is_final(status) => {}
            Some(b"did-not-happen" | b"happened") => {
                return none(format!("{status}, which does not go with what it says of the outcome"));
            }
            Some(b"unknown") => return none("it does not know"),
            _ => return none(format!("{status} that says nothing of the outcome")),
        }
        match take_store_directive(&mut head.headers) {
            Ok(None | Some(StoreDirective::Replay)) => {}
            Ok(Some(StoreDirective::Tombstone)) => return Answer::Happened(Reconciled::Unreplayable),
            _ => return none("it happened and is not to be kept, which is a contradiction"),
        }
        if has_no_end {
            return Answer::None("a body without a length".to_owned(), true);
        }
        remove_hop_by_hop(&mut head.headers, |_| false);
        match read_whole(WholeBody::new(body, head.version), self.settings.max_response_body()).await {
            Ok(Some((chunks, trailers))) => {
                let stored = self.settings.stored(&head, &chunks, trailers.as_ref());
                Answer::Happened(stored.map_or(Reconciled::Unreplayable, Reconciled::Happened))
            }
            Ok(None) => Answer::Happened(Reconciled::Unreplayable),
            Err(error) => Answer::None(ErrorChain(&*error).to_string(), true),
        }
    }
}

/// The body and its trailers; `None` where it is larger than the limit.
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

/// The value of a field that is there once.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a HeaderValue> {
    let mut values = headers.get_all(name).iter();
    values.next().filter(|_| values.next().is_none())
}

/// Statuses with which the service may report that nothing happened: no proxy in front of it uses them but
/// that it was asked.
fn is_plain(status: StatusCode) -> bool {
    matches!(status.as_u16(), 200 | 204 | 404)
}

/// Statuses that an answer to keep has. The others say that nothing was decided, or that something is broken, which does
/// not go with an operation that took place; and 304 is about the question.
fn is_final(status: StatusCode) -> bool {
    match status.as_u16() {
        304 | 401 | 403 | 407 | 408 | 421 | 425 | 429 => false,
        status => (200..500).contains(&status),
    }
}

/// `Err` where there is a directive, and it is none.
fn take_store_directive(headers: &mut HeaderMap) -> Result<Option<StoreDirective>, ()> {
    const IDEMPOTENCY_STORE: HeaderName = HeaderName::from_static("idempotency-store");
    if !headers.contains_key(IDEMPOTENCY_STORE) {
        return Ok(None);
    }
    let word = only(headers, &IDEMPOTENCY_STORE).map(|word| word.as_bytes().to_ascii_lowercase());
    headers.remove(IDEMPOTENCY_STORE);
    word.and_then(|word| StoreDirective::from_name(&word)).map(Some).ok_or(())
}

/// Fields of the retry that are none of the question: of its body, those that would make the question conditional, and
/// what only this proxy could say of where it comes from and does not, because it asks for itself.
fn is_unwanted(name: &HeaderName) -> bool {
    const PREFIXES: [&str; 5] = ["content-", "if-", "x-forwarded-", "x-http-method", "x-original-"];
    const NAMES: [&str; 10] = [
        "expect",
        "range",
        "te",
        "trailer",
        "forwarded",
        "x-real-ip",
        "x-method-override",
        "x-rewrite-url",
        "digest",
        "pragma",
    ];
    let name = name.as_str().replace('_', "-");
    NAMES.contains(&&*name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_statuses() {
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
    fn a_field_that_is_there_twice_is_not_there_once() {
        let mut headers = HeaderMap::new();
        assert_eq!(only(&headers, &OUTCOME), None);
        headers.append(OUTCOME, HeaderValue::from_static("happened"));
        assert_eq!(only(&headers, &OUTCOME).unwrap(), "happened");
        headers.append(OUTCOME, HeaderValue::from_static("happened"));
        assert_eq!(only(&headers, &OUTCOME), None);
    }
}
