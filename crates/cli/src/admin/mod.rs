//! The admin API of a running sidecar: health, readiness, metrics, and records.
//!
//! | request | response |
//! |---|---|
//! | `GET /livez` | 200 while the process serves |
//! | `GET /readyz` | 200 while requests are accepted and the store would accept a write, else 503 |
//! | `GET /metrics` | counters, gauges and histograms for Prometheus |
//! | `GET /v1/keys?state=&caller=&key_tag=&operation=&min_age=&limit=&order=&cursor=` | records: the newest, or a page |
//! | `POST /v1/keys/tag` | the tag of a key, for `key_tag` |
//! | `GET /v1/keys/{record}?body=true` | one record; its stored body only if asked for |
//! | `GET /v1/keys/{record}/timeline` | the events of a record in this sidecar, since its start |
//! | `POST /v1/keys/find` | one record by key, method, path and caller; or all records of a key |
//! | `POST /v1/keys/{record}/resolve` | sets the outcome of an operation; with `amend` replaces an operator's response |
//! | `POST /v1/keys/{record}/park` | withdraws an operator's response, or blocks a released key |
//! | `POST /v1/keys/{record}/release` | frees a key; with `force` also one whose owner may be alive |
//! | `POST /v1/clock/accept` | the store accepts the machine's clock, which was set ahead |
//! | `GET /v1/audit?before=&limit=` | the changes by operators, with their reasons, newest first |
//! | `GET /v1/backup` | the files of an embedded store as they are at this moment, as a tar archive |
//! | `GET /v1/seal` | the ids of the keys that encrypt stored responses, and what could not be opened |
//! | `GET /v1/seal/usage?cursor=` | the records of a page of the store, counted by the key that sealed them |
//! | `GET /v1/dead-letters?consumer=&topic=&reason=&before=&limit=` | dead letters of messages, the newest first |
//! | `GET /v1/dead-letters/{number}?payload=true` | one dead letter; its payload only if asked for |
//! | `POST /v1/dead-letters/{number}/requeue`, `…/drop` | publishes it again through the outbox, or deletes it |
//! | `GET /v1/outbox?state=&after=&limit=` | messages of the outbox |
//! | `GET /v1/outbox/{seq}?payload=true` | one of them; its payload only if asked for |
//! | `POST /v1/outbox/{seq}/requeue`, `…/drop` | publishes a refused message again, or deletes it |
//! | `GET /v1/audit/messages?before=&limit=` | the changes of messages by operators, newest first |
//! | `GET /v1/summary` | the state of the sidecar and its store, and the requests of the last hour |
//! | `GET /v1/misuse` | requests that look like mistakes of clients, counted by caller and operation |
//! | `GET`, `PUT`, `DELETE /v1/log-level` | the level of the log; sets it for a time; ends that |
//! | `GET /v1/activity` | a live feed of requests, one JSON object a line |
//! | `GET /` and the pages that it links | the [`dashboard`], for browsers |
//!
//! Refusals are problem details. Every response has the field `Oncegate-Admin`. [`guard`] controls the access.

mod activity;
mod backup;
mod cache;
mod census;
mod connections;
mod content;
mod dashboard;
mod durations;
mod exposition;
mod guard;
mod keys;
mod listing;
mod log_level;
pub(crate) mod messages;
mod metrics;
mod problem;
mod process;
mod routes;
mod seal;
mod summary;
#[cfg(test)]
pub(crate) mod tests;
mod view;

use std::convert::Infallible;
use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, StatusCode, Uri};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use oncegate_core::{ErrorChain, IdempotencyKey, RecordId, StoreErrorKind};
use oncegate_engine::{Breaker, BreakerState, Engine};
use oncegate_http::{IdempotencyLayer, JwtVerifier, Settings};
use oncegate_postgres::messages::MessageOperator;
use oncegate_seal::{SealRefusals, SealedStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;

use self::connections::{AdminConnections, AdminStream, Connection, Place, RequestBody, ResponseBody};
use self::exposition::Exposition;
use self::problem::Problem;
use crate::activity::Activity;
use crate::config::{AdminToken, Config, duration_text};
use crate::log::OPERATOR;
use crate::proxy::{ConnectionLimit, RequestLimit};

pub(crate) use self::backup::{BackupStore, TAKEN_FIELD};
pub(crate) use self::cache::CacheCollector;
pub(crate) use self::census::{AbandonedRecords, run as count_records};
pub(crate) use self::connections::MAX_CONNECTIONS;
pub(crate) use self::dashboard::{Dashboard, PeerAddress};
pub(crate) use self::keys::searched_key;
pub(crate) use self::metrics::PLAIN as PLAIN_DISPOSITIONS;
pub(crate) use self::metrics::{
    Metrics, ReconcileResult, RefusedHandshake, ReloadSubject, SpanFate, UpstreamResult,
};
pub(crate) use self::routes::{DEFAULT_ROUTE, method_name};
pub(crate) use self::view::{days_to, time};

/// The state behind the admin API.
#[derive(Clone, Debug)]
pub(crate) struct AdminState {
    /// The engine whose store is shown and resolved.
    pub(crate) engine: Engine,
    /// The circuit breaker of that store.
    pub(crate) breaker: Breaker,
    pub(crate) metrics: Metrics,
    pub(crate) activity: Activity,
    pub(crate) draining: Draining,
    /// Counts the connections of clients.
    pub(crate) connections: ConnectionLimit,
    /// Counts the requests without a key.
    pub(crate) without_key: RequestLimit,
    pub(crate) dashboard: Dashboard,
    /// The messages in the database of the store; `None` if it is not PostgreSQL.
    pub(crate) messages: Option<MessageOperator>,
    pub(crate) live: watch::Receiver<AdminLive>,
    /// The store that can be copied while it works.
    pub(crate) backup: BackupStore,
    /// The store of the engine, if it encrypts stored responses.
    pub(crate) seal: Option<Arc<SealedStore>>,
    /// The stored responses and steps that could not be opened.
    pub(crate) seal_refusals: SealRefusals,
}

/// The part of the state that a reload replaces.
#[derive(Clone, Debug)]
pub(crate) struct AdminLive {
    /// Has the settings as they were given, for an explanation.
    pub(crate) config: Arc<Config>,
    /// Has the settings of each route.
    pub(crate) layer: IdempotencyLayer,
    /// The token that an operator must send; `None` on loopback addresses only.
    pub(crate) token: Option<AdminToken>,
    /// Verifies the tokens that name callers.
    pub(crate) jwt: Option<JwtVerifier>,
}

impl AdminState {
    /// The settings that a request of this method and path runs under now.
    fn settings(&self, method: &Method, path: &str) -> Settings {
        self.live.borrow().layer.settings(method, path).clone()
    }

    /// The identifier of the record of a request with this head and this key.
    fn record_id(&self, request: &Parts, key: &IdempotencyKey) -> Option<RecordId> {
        self.live.borrow().layer.record_id(request, key)
    }
}

/// The flag that the sidecar is stopping. All clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Draining(Arc<AtomicBool>);

impl Draining {
    /// Makes the sidecar report that it is not ready.
    pub(crate) fn begin(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The largest request, which is a resolution with a body.
const MAX_REQUEST: usize = 16 * 1024 * 1024;

/// Limits the time in which the store must report that it is ready. Orchestrators ask every few seconds.
const READY_TIMEOUT: Duration = Duration::from_secs(2);

/// A record that no request has.
const NO_RECORD: RecordId = RecordId::from_bytes([0; 32]);

/// Limits the wait for open connections at the end.
const CLOSING_TIMEOUT: Duration = Duration::from_secs(2);

/// The field of every response of the admin API, and of no other. Its value is the version of the API.
pub(crate) const ADMIN_FIELD: HeaderName = HeaderName::from_static("oncegate-admin");

/// Marks a response, so that a program can tell the admin API from a service that answers at a wrong address. Browsers neither
/// guess its type nor show it to pages of other sites, and no cache keeps it, except for files that say otherwise.
async fn mark(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert(ADMIN_FIELD, HeaderValue::from_static("1"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert("cross-origin-resource-policy", HeaderValue::from_static("same-origin"));
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response
}

/// The admin API.
pub(crate) fn router(state: AdminState) -> Router {
    let guard = axum::middleware::from_fn_with_state(state.live.clone(), guard::guard);
    Router::new()
        .route("/livez", get(async || text("ok\n")))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .route("/v1/keys", get(keys::list))
        .route("/v1/keys/find", post(keys::find))
        .route("/v1/keys/forget", post(content::forget))
        .route("/v1/keys/tag", post(keys::tag))
        .route("/v1/keys/{record}", get(keys::show))
        .route("/v1/keys/{record}/timeline", get(activity::timeline))
        .route("/v1/keys/{record}/resolve", post(keys::resolve))
        .route("/v1/keys/{record}/release", post(keys::release))
        .route("/v1/keys/{record}/park", post(keys::park))
        .route("/v1/keys/{record}/forget", post(content::forget_one))
        .route("/v1/audit", get(keys::audit))
        .route("/v1/seal", get(seal::show))
        .route("/v1/seal/usage", get(seal::usage))
        .route("/v1/seal/reseal", post(content::reseal))
        .route("/v1/audit/messages", get(messages::audit))
        .route("/v1/dead-letters", get(messages::dead_letters))
        .route("/v1/dead-letters/{number}", get(messages::dead_letter))
        .route("/v1/dead-letters/{number}/requeue", post(messages::requeue_letter))
        .route("/v1/dead-letters/{number}/drop", post(messages::drop_letter))
        .route("/v1/outbox", get(messages::outbox))
        .route("/v1/outbox/{seq}", get(messages::outbox_message))
        .route("/v1/outbox/{seq}/requeue", post(messages::requeue_outbox))
        .route("/v1/outbox/{seq}/drop", post(messages::drop_outbox))
        .route("/v1/summary", get(summary::show))
        .route("/v1/misuse", get(activity::misuse))
        .route("/v1/activity", get(activity::feed))
        .route("/v1/backup", get(backup::send))
        .route("/v1/compact", post(content::compact))
        .route("/v1/clock/accept", post(accept_clock))
        .route("/v1/log-level", get(log_level::show).put(log_level::set).delete(log_level::reset))
        .fallback(dashboard::no_such_path)
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            Problem::no_such_method(&method, uri.path())
        })
        .layer(DefaultBodyLimit::max(MAX_REQUEST))
        .layer(guard)
        .merge(dashboard::router(&state))
        .layer(axum::middleware::map_response(mark))
        .with_state(state)
}

/// Serves the admin API until `stop`, and then finishes the requests that run. `workers` executes the requests of operators: some
/// need a lot of computing time, for which health checks must not wait.
pub(crate) async fn serve(
    listener: TcpListener,
    state: AdminState,
    workers: Handle,
    stop: impl Future<Output = ()>,
) {
    let activity = state.activity.clone();
    let router = router(state);
    let graceful = GracefulShutdown::new();
    let connections = AdminConnections::default();
    tokio::pin!(stop);
    loop {
        let (stream, peer) = tokio::select! {
            () = &mut stop => break,
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Most likely no file descriptor is left, so a retry at once would fail, too.
                    tracing::warn!(error = %ErrorChain(&error), "cannot accept an admin connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
        };
        let Some(connection) = connections.admit(peer.ip()) else { continue };
        let router = (router.clone(), workers.clone());
        tokio::spawn(serve_connection(stream, peer.ip(), connection, router, graceful.watcher()));
        // So that this connection reads its request, which may have come already, before the next one may take its place.
        tokio::task::yield_now().await;
    }
    activity.close();
    let _ = tokio::time::timeout(CLOSING_TIMEOUT, graceful.shutdown()).await;
}

/// Serves a connection to its end, or until its time is over.
async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    peer: IpAddr,
    connection: Connection,
    (router, workers): (Router, Handle),
    watcher: Watcher,
) {
    let (own, router) = (connection.clone(), TowerToHyperService::new(router));
    let service = service_fn(move |mut request: http::Request<Incoming>| {
        request.extensions_mut().insert(PeerAddress(peer));
        let place = own.begin(request.uri().path());
        let (own, body_of) = (own.clone(), own.clone());
        let answer = router.call(request.map(|body| RequestBody::new(body, body_of)));
        let workers = workers.clone();
        async move {
            let response = match place {
                None => Err(Problem::busy("Too many requests are running; try again.")),
                Some(Place::Here) => Ok(answer.await?),
                Some(Place::Worker) => {
                    // A set, because its end ends the request.
                    let mut running = JoinSet::new();
                    running.spawn_on(answer, &workers);
                    let ended = running.join_next().await.and_then(Result::ok).and_then(Result::ok);
                    ended.ok_or_else(|| {
                        Problem::internal("The request ended without a response; see the log.")
                    })
                }
            };
            let response = match response {
                Ok(response) => response,
                Err(problem) => mark(problem.into_response()).await,
            };
            Ok::<_, Infallible>(response.map(|body| ResponseBody::new(body, own)))
        }
    });
    // The library's own limit of the time for a head would run while a response is sent.
    let serving = http1::Builder::new()
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(AdminStream::new(stream, connection.clone())), service);
    tokio::select! {
        served = watcher.watch(serving) => if let Err(error) = served {
            tracing::debug!(error = %ErrorChain(&error), "admin connection broke off");
        },
        why = connection.ended() => tracing::debug!("admin connection closed: {why}"),
    }
}

async fn readyz(State(state): State<AdminState>) -> Response {
    match readiness(&state).await {
        Ok(()) => {
            let advisories = state.engine.store().advisories();
            let notes = advisories.into_iter().map(|advisory| advisory.text);
            let lines: String =
                notes.chain(note_on_keys(&state)).map(|note| format!("note: {note}\n")).collect();
            text(format!("ready\n{lines}"))
        }
        Err(why) => not_ready(format!("{why}\n")),
    }
}

/// Checks if requests are accepted and if the store would accept a write.
///
/// # Errors
/// The reason why not, in one line.
async fn readiness(state: &AdminState) -> Result<(), String> {
    if state.draining.is_set() {
        return Err("stopping".to_owned());
    }
    // The breaker logs each change, so this does not log each probe.
    match state.breaker.state() {
        BreakerState::Open => return Err("the store is out of reach".to_owned()),
        BreakerState::Closed => {}
        _ => return Err("the store was out of reach, and is being checked".to_owned()),
    }
    let store = state.engine.store();
    let asked = async {
        store.check().await?;
        // A store may pass its check although its records cannot be read, for example without the right to read them.
        match store.lookup(NO_RECORD).await {
            Err(error) if error.kind() != StoreErrorKind::Corrupt => Err(error),
            _ => Ok(()),
        }
    };
    match tokio::time::timeout(READY_TIMEOUT, asked).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => {
            tracing::debug!(error = %ErrorChain(&error), "not ready");
            let why = ErrorChain(&error).to_string().replace(['\r', '\n'], " ");
            Err(format!("the store would not accept a write: {why}"))
        }
        Err(_) => {
            tracing::debug!(timeout = duration_text(READY_TIMEOUT), "not ready: the store does not answer");
            Err("the store does not answer".to_owned())
        }
    }
}

/// The age from which the key set that verifies tokens is worth a note: several fetches have failed.
const OLD_KEY_SET: Duration = Duration::from_secs(15 * 60);

/// A note if the keys that verify tokens cannot be fetched. The sidecar is ready anyway: other requests pass, and another sidecar
/// would have the same issuer.
fn note_on_keys(state: &AdminState) -> Option<String> {
    let verifier = state.live.borrow().jwt.clone()?;
    match verifier.key_set_age() {
        _ if !verifier.has_keys() => Some(
            "there are no keys that verify tokens: all requests whose caller a token names are refused"
                .to_owned(),
        ),
        Some(age) if age >= OLD_KEY_SET => Some(format!(
            "the keys that verify tokens could not be fetched for {} minutes; when they are 24 hours old, all requests whose caller a \
             token names are refused",
            age.as_secs() / 60
        )),
        _ => None,
    }
}

async fn metrics(State(state): State<AdminState>, headers: HeaderMap) -> Response {
    let form = Exposition::of(&headers);
    match state.metrics.render(&state, form == Exposition::OpenMetrics) {
        Ok(text) => {
            let fields = [
                (header::CONTENT_TYPE, HeaderValue::from_static(form.content_type())),
                (header::VARY, HeaderValue::from_static("accept")),
            ];
            (fields, form.of_open_metrics(text)).into_response()
        }
        Err(_) => Problem::internal("The metrics could not be written.").into_response(),
    }
}

/// Accepts the machine's clock, however far ahead it was set.
async fn accept_clock(State(state): State<AdminState>) -> Result<Response, Problem> {
    let by = state.engine.store().accept_clock().await.map_err(|error| Problem::store(&error))?;
    let by = by.map(|by| by.as_secs());
    if let Some(seconds) = by {
        tracing::warn!(target: OPERATOR, seconds, "an operator accepted the time of this machine's clock");
    }
    Ok(axum::Json(serde_json::json!({ "ahead_seconds": by })).into_response())
}

fn text(words: impl Into<Body>) -> Response {
    ([(header::CACHE_CONTROL, HeaderValue::from_static("no-store"))], words.into()).into_response()
}

fn not_ready(why: impl Into<Body>) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, text(why)).into_response()
}
