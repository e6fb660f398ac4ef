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
//! | `GET /v1/clock` | the disagreement between the machine's clock and the store, and the records that end if it is accepted |
//! | `POST /v1/clock/accept` | the store accepts the machine's clock, which was set ahead |
//! | `GET /v1/id-secret` | the id secret of this sidecar by its name, and the mark of the store |
//! | `POST /v1/id-secret/restore` | puts back the mark that a store with records has lost |
//! | `GET /v1/audit?before=&limit=` | the changes by operators, with their reasons, newest first |
//! | `GET /v1/backup` | the files of an embedded store as they are at this moment, as a tar archive |
//! | `GET /v1/seal` | the ids of the keys that encrypt stored responses, and what could not be opened |
//! | `GET /v1/seal/usage?cursor=` | the records of a page of the store, counted by the key that sealed them |
//! | `GET /v1/seal/messages` | the dead letters and buffered events of the store's database, by the key that sealed them |
//! | `GET /v1/dead-letters?consumer=&topic=&reason=&since=&until=&before=&limit=` | dead letters of messages, the newest first |
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
mod clock;
mod connections;
mod content;
mod dashboard;
mod durations;
mod exposition;
mod guard;
mod id_secret;
mod keys;
mod listing;
mod log_level;
mod message_counts;
pub(crate) mod messages;
mod metrics;
mod problem;
mod process;
mod routes;
mod rows;
mod seal;
mod summary;
mod survey;
mod surveys;
#[cfg(test)]
pub(crate) mod tests;
mod view;

use std::convert::Infallible;
use std::future::Future;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, HttpBody as _};
use axum::extract::{DefaultBodyLimit, Extension, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, StatusCode, Uri};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use oncegate_core::{ErrorChain, IdScheme, IdempotencyKey, RecordId, Store, StoreErrorKind};
use oncegate_engine::{Breaker, BreakerState, Engine};
use oncegate_http::{IdempotencyLayer, JwtVerifier, Settings};
use oncegate_postgres::messages::MessageOperator;
use oncegate_seal::{SealRefusals, SealedStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use self::connections::{
    AdminConnections, AdminStream, Connection, NoPlace, Place, RequestBody, ResponseBody,
};
use self::exposition::Exposition;
use self::problem::Problem;
use crate::activity::Activity;
use crate::config::{AdminToken, Config, duration_text};
use crate::proxy::{ConnectionLimit, RequestLimit};

pub(crate) use self::backup::{BackupStore, TAKEN_FIELD};
pub(crate) use self::cache::CacheCollector;
pub(crate) use self::census::{AbandonedRecords, run as count_records};
pub(crate) use self::connections::MAX_CONNECTIONS;
pub(crate) use self::content::reseal_opened;
pub(crate) use self::dashboard::{Dashboard, PeerAddress};
pub(crate) use self::keys::searched_key;
pub(crate) use self::message_counts::run as count_messages;
pub(crate) use self::metrics::PLAIN as PLAIN_DISPOSITIONS;
pub(crate) use self::metrics::{
    Metrics, ReconcileResult, RefusedHandshake, ReloadSubject, SpanFate, UpstreamResult,
};
pub(crate) use self::routes::{DEFAULT_ROUTE, method_name};
pub(crate) use self::rows::Rows;
pub(crate) use self::surveys::Surveys;
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
    /// The records that this process left without an outcome.
    pub(crate) left: AbandonedRecords,
    pub(crate) live: watch::Receiver<AdminLive>,
    /// The store that can be copied while it works.
    pub(crate) backup: BackupStore,
    /// The store of the engine, if it encrypts stored responses.
    pub(crate) seal: Option<Arc<SealedStore>>,
    /// The stored responses and steps that could not be opened.
    pub(crate) seal_refusals: SealRefusals,
    pub(crate) ready_checks: ReadyChecks,
    /// The records of lists.
    pub(crate) rows: Rows,
    /// The last surveys for the dashboard.
    pub(crate) surveys: Surveys,
    pub(crate) expositions: Expositions,
}

/// The last check of the store for `/readyz`, with the time at which it began. All clones share it.
///
/// There is one check at a time, because anyone may ask. Those that wait for it share the next one, so no response is older than
/// its question.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReadyChecks(Arc<Mutex<Option<ReadyCheck>>>);

/// The last texts of the metrics, each with the time at which it was begun. All clones share them.
///
/// Anyone may ask without a token. Requests that wait for their turns share the next text, so none is older than its request.
/// It is written by the thread of the connections: while a request waits for another thread, its connection may be closed for
/// a new one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Expositions(Arc<std::sync::Mutex<[Option<LastExposition>; 2]>>);

impl Expositions {
    fn get(
        &self,
        form: Exposition,
        asked_at: Instant,
        render: impl FnOnce() -> Option<String>,
    ) -> Option<Bytes> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let [plain, open_metrics] = &mut *all;
        let last = if form == Exposition::OpenMetrics { open_metrics } else { plain };
        if let Some(LastExposition { begun, text }) = last
            && *begun >= asked_at
        {
            return Some(text.clone());
        }
        let begun = Instant::now();
        let text = Bytes::from(render()?);
        *last = Some(LastExposition { begun, text: text.clone() });
        Some(text)
    }
}

#[derive(Debug)]
pub(crate) struct LastExposition {
    begun: Instant,
    text: Bytes,
}

#[derive(Debug)]
struct ReadyCheck {
    begun: Instant,
    result: Result<(), String>,
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
    /// The token that opens `/metrics` alone, next to that of operators.
    pub(crate) metrics_token: Option<AdminToken>,
    /// Verifies the tokens that name callers.
    pub(crate) jwt: Option<JwtVerifier>,
    /// The reloads that were refused, and that no later one has made good.
    pub(crate) refused_reloads: RefusedReloads,
}

/// The reasons of the last reloads if they were refused.
#[derive(Clone, Debug, Default)]
pub(crate) struct RefusedReloads {
    configuration: Option<String>,
    certificate: Option<String>,
}

/// The longest reason of a refused reload, or of a store out of reach, that is shown, in characters.
/// The log has the whole reason.
const MAX_REASON: usize = 300;

impl RefusedReloads {
    /// Notes the end of a reload. Problems are the reasons of a refusal; without one, the reload was applied.
    pub(crate) fn note(&mut self, subject: ReloadSubject, problems: &[String]) {
        let (place, what) = match subject {
            ReloadSubject::Configuration => (&mut self.configuration, "configuration"),
            ReloadSubject::Certificate => (&mut self.certificate, "certificate"),
        };
        *place = problems.first().map(|first| {
            // One line: the first problem leads to the rest.
            let first = first.replace(['\r', '\n'], " ");
            let mut reason: String = first.chars().take(MAX_REASON).collect();
            if reason.len() < first.len() {
                reason.push('…');
            }
            if let more @ 1.. = problems.len() - 1 {
                reason.push_str(&format!("; and {more} more, see the log"));
            }
            format!("the {what} was not reloaded, and the previous one stays in force: {reason}")
        });
    }

    /// The notes for operators.
    pub(crate) fn notes(&self) -> impl Iterator<Item = &String> {
        self.configuration.iter().chain(&self.certificate)
    }
}

impl AdminState {
    /// The settings that a request of this method and path runs under now.
    fn settings(&self, method: &Method, path: &str) -> Settings {
        self.live.borrow().layer.settings(method, path).clone()
    }

    /// Returns true if the store is out of reach, refuses writes, or belongs to another id secret.
    fn is_degraded(&self) -> bool {
        let problem = self.engine.id_guard().problem();
        self.breaker.is_degraded() || problem.is_some_and(|problem| !problem.is_temporary())
    }

    /// The computation of ids and tags, by which records are searched.
    ///
    /// # Errors
    /// If the store belongs to another id secret, or to one at all: a search would find nothing, and would look as if the key had
    /// never been used.
    async fn ids(&self) -> Result<&IdScheme, Problem> {
        let guard = self.engine.id_guard();
        // If the store does not answer, the search itself fails.
        let _unanswered = guard.admit().await;
        match guard.problem().filter(|problem| !problem.is_temporary()) {
            Some(problem) => Err(Problem::id_secret(&problem)),
            None => Ok(self.engine.ids()),
        }
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

/// The largest body of a request without a response for retries.
const MAX_SMALL_REQUEST: usize = 64 * 1024;

/// The most requests at a time whose bodies may be larger than [`MAX_SMALL_REQUEST`]. With the limit of requests, this bounds the
/// memory for bodies.
const MAX_LARGE_REQUESTS: usize = 4;

/// A response from this size on is a large one: a payload or a stored response, and what its client does not read is in memory.
const LARGE_RESPONSE: u64 = 1024 * 1024;

/// The most large responses at a time.
const MAX_LARGE_RESPONSES: usize = 8;

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

/// Takes a place for a large body, which is free at the end of the request. `None` if the body is small.
///
/// # Errors
/// If all places are taken.
fn place_for_body(state: &AdminState, headers: &HeaderMap) -> Result<Option<OwnedSemaphorePermit>, Problem> {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    // Without a length, it may be large.
    if length.is_some_and(|length: usize| length <= MAX_SMALL_REQUEST) {
        return Ok(None);
    }
    let place = state.dashboard.large_bodies().try_acquire_owned();
    place.map(Some).map_err(|_| Problem::busy("Too many large requests are running; try again."))
}

/// Passes on a request that may have a large body, or refuses it.
async fn large_body(State(state): State<AdminState>, request: Request, next: Next) -> Response {
    match place_for_body(&state, request.headers()) {
        Ok(_place) => next.run(request).await,
        Err(problem) => problem.into_response(),
    }
}

/// A response, with a place until its end if it is a large one; a refusal if all places are taken.
async fn with_place(response: Response, places: &Arc<Semaphore>) -> (Response, Option<OwnedSemaphorePermit>) {
    // Backups and the live feed are written piece by piece, and have no size in advance.
    if response.body().size_hint().lower() < LARGE_RESPONSE {
        return (response, None);
    }
    match places.clone().try_acquire_owned() {
        Ok(place) => (response, Some(place)),
        Err(_) => {
            drop(response);
            let problem = Problem::busy("Too many large responses are being sent; try again.");
            (mark(problem.into_response()).await, None)
        }
    }
}

/// The admin API.
pub(crate) fn router(state: AdminState) -> Router {
    use messages::MessageAction::{Drop, Requeue};
    use messages::MessageKind::{DeadLetter, Outbox};
    use messages::change_endpoint;
    let guard = axum::middleware::from_fn_with_state(state.live.clone(), guard::guard);
    let changes = axum::middleware::from_fn_with_state(state.surveys.clone(), surveys::note_changes);
    let large = axum::middleware::from_fn_with_state(state.clone(), large_body);
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
        .route(
            "/v1/keys/{record}/resolve",
            post(keys::resolve).layer(DefaultBodyLimit::max(MAX_REQUEST)).layer(large),
        )
        .route("/v1/keys/{record}/release", post(keys::release))
        .route("/v1/keys/{record}/park", post(keys::park))
        .route("/v1/keys/{record}/forget", post(content::forget_one))
        .route("/v1/audit", get(keys::audit))
        .route("/v1/seal", get(seal::show))
        .route("/v1/seal/usage", get(seal::usage))
        .route("/v1/seal/messages", get(seal::messages))
        .route("/v1/seal/reseal", post(content::reseal))
        .route("/v1/audit/messages", get(messages::audit))
        .route("/v1/dead-letters", get(messages::dead_letters))
        .route("/v1/dead-letters/{number}", get(messages::dead_letter))
        .route("/v1/dead-letters/{number}/requeue", change_endpoint(DeadLetter, Requeue))
        .route("/v1/dead-letters/{number}/drop", change_endpoint(DeadLetter, Drop))
        .route("/v1/outbox", get(messages::outbox))
        .route("/v1/outbox/{seq}", get(messages::outbox_message))
        .route("/v1/outbox/{seq}/requeue", change_endpoint(Outbox, Requeue))
        .route("/v1/outbox/{seq}/drop", change_endpoint(Outbox, Drop))
        .route("/v1/summary", get(summary::show))
        .route("/v1/misuse", get(activity::misuse))
        .route("/v1/activity", get(activity::feed))
        .route("/v1/backup", get(backup::send))
        .route("/v1/clock", get(clock::show))
        .route("/v1/clock/accept", post(clock::accept))
        .route("/v1/compact", post(content::compact))
        .route("/v1/id-secret", get(id_secret::show))
        .route("/v1/id-secret/restore", post(id_secret::restore))
        .route("/v1/log-level", get(log_level::show).put(log_level::set).delete(log_level::reset))
        .fallback(dashboard::no_such_path)
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            Problem::no_such_method(&method, uri.path())
        })
        .layer(DefaultBodyLimit::max(MAX_SMALL_REQUEST))
        // Inside of the guard: a stranger's request changes nothing.
        .layer(changes)
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
    let large = Arc::new(Semaphore::new(MAX_LARGE_RESPONSES));
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
        let router = (router.clone(), workers.clone(), large.clone());
        tokio::spawn(serve_connection(stream, peer.ip(), connection, router, graceful.watcher()));
        // So that this connection reads its request, which may have come already, before the next one may take its place.
        tokio::task::yield_now().await;
    }
    activity.close();
    let _ = tokio::time::timeout(CLOSING_TIMEOUT, graceful.shutdown()).await;
}

/// The time at which the head of a request was read.
#[derive(Clone, Copy, Debug)]
struct AskedAt(Instant);

/// Serves a connection to its end, or until its time is over.
async fn serve_connection(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    peer: IpAddr,
    connection: Connection,
    (router, workers, large): (Router, Handle, Arc<Semaphore>),
    watcher: Watcher,
) {
    let (own, router) = (connection.clone(), TowerToHyperService::new(router));
    let service = service_fn(move |mut request: http::Request<Incoming>| {
        request.extensions_mut().insert(PeerAddress(peer));
        request.extensions_mut().insert(AskedAt(Instant::now()));
        let begun = own.begin(request.uri().path());
        let (own, body_of) = (own.clone(), own.clone());
        let answer = router.call(request.map(|body| RequestBody::new(body, body_of)));
        let (workers, large) = (workers.clone(), large.clone());
        async move {
            // Other connections have their turn first. Without this, one that has sent many requests executes them in a row.
            match begun.map(|begun| begun.pause) {
                Ok(Some(Duration::ZERO)) => tokio::task::yield_now().await,
                Ok(Some(pause)) => tokio::time::sleep(pause).await,
                // A refusal would say something about the sidecar that is not so. The connection ends without a response.
                Err(NoPlace::Closed) => std::future::pending().await,
                Ok(None) | Err(NoPlace::Busy) => {}
            }
            let response = match begun.map(|begun| begun.place) {
                Err(_) => Err(Problem::busy("Too many requests are running; try again.")),
                Ok(Place::Here) => Ok(answer.await?),
                Ok(Place::Worker) => {
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
            let (response, place) = with_place(response, &large).await;
            Ok::<_, Infallible>(response.map(|body| ResponseBody::new(body, own, place)))
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
            let notes = notes.chain(note_on_keys(&state)).chain(notes_on_reloads(&state));
            let lines: String = notes.map(|note| format!("note: {note}\n")).collect();
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
    let breaker = state.breaker.state();
    if breaker != BreakerState::Closed {
        let (is_open, reason) = (breaker == BreakerState::Open, state.breaker.reason().unwrap_or_default());
        let what = if is_open { "is out of reach" } else { "was out of reach, and is being checked" };
        let colon = if reason.is_empty() { "" } else { ": " };
        let mut reason = reason.replace(['\r', '\n'], " ");
        if let Some((end, _)) = reason.char_indices().nth(MAX_REASON) {
            reason.truncate(end);
            reason.push('…');
        }
        return Err(format!("the store {what}{colon}{reason}"));
    }
    let asked_at = Instant::now();
    let mut last = state.ready_checks.0.lock().await;
    if let Some(ReadyCheck { begun, result }) = &*last
        && *begun >= asked_at
    {
        return result.clone();
    }
    let begun = Instant::now();
    let result = check_store(state.engine.store()).await;
    *last = Some(ReadyCheck { begun, result: result.clone() });
    result
}

async fn check_store(store: &Arc<dyn Store>) -> Result<(), String> {
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

/// The notes on refused reloads. The sidecar is ready anyway, with the previous configuration.
fn notes_on_reloads(state: &AdminState) -> Vec<String> {
    state.live.borrow().refused_reloads.notes().cloned().collect()
}

async fn metrics(
    State(state): State<AdminState>,
    headers: HeaderMap,
    asked_at: Option<Extension<AskedAt>>,
) -> Response {
    let form = Exposition::of(&headers);
    let asked_at = asked_at.map_or_else(Instant::now, |Extension(AskedAt(at))| at);
    let render = || {
        let text = state.metrics.render(&state, form == Exposition::OpenMetrics).ok()?;
        Some(form.of_open_metrics(text))
    };
    match state.expositions.get(form, asked_at, render) {
        Some(text) => {
            let fields = [
                (header::CONTENT_TYPE, HeaderValue::from_static(form.content_type())),
                (header::VARY, HeaderValue::from_static("accept")),
            ];
            (fields, text).into_response()
        }
        None => Problem::internal("The metrics could not be written.").into_response(),
    }
}

fn text(words: impl Into<Body>) -> Response {
    ([(header::CACHE_CONTROL, HeaderValue::from_static("no-store"))], words.into()).into_response()
}

fn not_ready(why: impl Into<Body>) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, text(why)).into_response()
}
