//! Operations that completed their records without a response, and whose response was lost: a retry asks the handler for it.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use crate::transactional::Transactional;
use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use oncegate_core::{
    Command, Complete, Completion, FencingToken, MemoryStore, Outcome, RecordId, RecordedResponse, State,
    Store, StoredResponse,
};
use oncegate_engine::{Engine, Event, EventKind, Observer, Policy};
use oncegate_http::{
    Idempotency, IdempotencyContext, IdempotencyLayer, NoUpstreamResponse, Reconcile, Reconciled,
    RequestBody, Settings,
};
use oncegate_testkit::{Fault, Faults, FaultyStore, Latch, ManualClock, Operation};
use tower_layer::Layer as _;
use tower_service::Service;

const RETENTION: Duration = Duration::from_secs(60);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

/// Commits, completes its record without a response, and then returns no response.
#[derive(Clone)]
struct Handler {
    store: Arc<Transactional>,
    completion: Completion,
    effects: Arc<AtomicUsize>,
    /// The record and the token of the last attempt.
    last: Arc<Mutex<Option<(RecordId, FencingToken)>>>,
}

impl Service<Request<RequestBody<Full<Bytes>>>> for Handler {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody<Full<Bytes>>>) -> Self::Future {
        let handler = self.clone();
        Box::pin(async move {
            let attempt =
                IdempotencyContext::from_extensions(request.extensions()).unwrap().attempt().clone();
            handler.effects.fetch_add(1, Ordering::SeqCst);
            *handler.last.lock().unwrap() = Some((attempt.record_id(), attempt.token()));
            let done =
                complete(&handler.store, attempt.record_id(), attempt.token(), handler.completion, RETENTION);
            assert_eq!(done.await, Outcome::Completed);
            let mut response = Response::new(Full::default());
            response.extensions_mut().insert(NoUpstreamResponse(StatusCode::GATEWAY_TIMEOUT));
            Ok(response)
        })
    }
}

async fn complete(
    store: &Transactional,
    id: RecordId,
    token: FencingToken,
    completion: Completion,
    retention: Duration,
) -> Outcome {
    store.apply(id, Command::Complete(Complete { token, completion, retention })).await.unwrap()
}

/// The service's report on one question.
#[derive(Clone)]
enum Report {
    Is(Reconciled),
    Panics,
    /// This report, after the latch is opened.
    Waits(Latch, Box<Report>),
}

/// A question: the record, the token and the number of the attempt, and whether that attempt still owned the record.
type Question = (RecordId, FencingToken, u32, bool);

/// The reports in their order; the last one is repeated. Records the questions.
#[derive(Clone, Default)]
struct Reports {
    reports: Arc<Mutex<VecDeque<Report>>>,
    asked: Arc<Mutex<Vec<Question>>>,
}

impl Reconcile for Reports {
    fn reconcile<'a>(
        &'a self,
        context: &'a IdempotencyContext,
        request: &'a Parts,
    ) -> Pin<Box<dyn Future<Output = Reconciled> + Send + 'a>> {
        assert_eq!((request.uri.path(), context.key().as_bytes()), ("/orders", &b"k"[..]));
        let attempt = context.attempt();
        let noted = (attempt.record_id(), attempt.token(), attempt.number(), attempt.is_owner());
        self.asked.lock().unwrap().push(noted);
        Box::pin(async {
            let mut report = {
                let mut reports = self.reports.lock().unwrap();
                if reports.len() > 1 { reports.pop_front() } else { reports.front().cloned() }
            };
            loop {
                match report.unwrap() {
                    Report::Is(reconciled) => return reconciled,
                    Report::Panics => std::panic::resume_unwind(Box::new("as ordered")),
                    Report::Waits(latch, then) => {
                        latch.opened().await;
                        report = Some(*then);
                    }
                }
            }
        })
    }
}

#[derive(Clone, Default)]
struct Events(Arc<Mutex<Vec<EventKind>>>);

impl Observer for Events {
    fn observe(&self, event: &Event) {
        self.0.lock().unwrap().push(event.kind);
    }
}

impl Events {
    fn count(&self, kind: EventKind) -> usize {
        self.0.lock().unwrap().iter().filter(|other| **other == kind).count()
    }
}

fn found(body: &'static str) -> StoredResponse {
    StoredResponse::new(201, &[("content-type", &b"text/x"[..])], &[body.into()], &[]).unwrap()
}

fn happened(body: &'static str) -> Report {
    Report::Is(Reconciled::Happened(found(body)))
}

struct World {
    service: Idempotency<Handler>,
    store: Arc<Transactional>,
    clock: Arc<ManualClock>,
    faults: Faults,
    events: Events,
    reports: Reports,
    handler: Handler,
}

impl World {
    /// A layer whose first request was committed without a response.
    async fn new(reports: impl IntoIterator<Item = Report>) -> Self {
        Self::with(reports, |settings| settings).await
    }

    async fn with(
        reports: impl IntoIterator<Item = Report>,
        change: impl FnOnce(Settings) -> Settings,
    ) -> Self {
        let mut world = Self::before(reports, Completion::Awaited, change);
        assert_eq!(world.ask().await, problem(504, "response-awaited"), "the first request");
        world
    }

    fn before(
        reports: impl IntoIterator<Item = Report>,
        completion: Completion,
        change: impl FnOnce(Settings) -> Settings,
    ) -> Self {
        let clock = Arc::new(ManualClock::at_millis(1_000_000));
        let store = Arc::new(Transactional(MemoryStore::new(clock.clone())));
        let (faulty, faults) = FaultyStore::new(store.clone());
        let events = Events::default();
        let engine = Engine::builder(faulty).with_observer(events.clone()).build();
        let reports =
            Reports { reports: Arc::new(Mutex::new(reports.into_iter().collect())), ..Reports::default() };
        let policy = Policy::default().with_retention(RETENTION).unwrap();
        let settings = Settings::default()
            .with_policy(policy)
            .with_upstream_completion()
            .with_reconcile(reports.clone());
        let layer = IdempotencyLayer::new(engine).with_settings(change(settings)).unwrap();
        let (effects, last) = Default::default();
        let handler = Handler { store: store.clone(), completion, effects, last };
        Self { service: layer.layer(handler.clone()), store, clock, faults, events, reports, handler }
    }

    async fn ask(&mut self) -> Observed {
        ask(self.service.clone(), "body").await
    }

    /// Sends a request without waiting for its response; returns when the handler was asked.
    async fn begin(&self) -> tokio::task::JoinHandle<Observed> {
        let before = self.asked();
        let asking = tokio::spawn(ask(self.service.clone(), "body"));
        tokio::time::timeout(RESPONSE_TIMEOUT, async {
            while self.asked() == before {
                tokio::task::yield_now().await;
            }
        })
        .await
        .expect("a question");
        asking
    }

    fn asked(&self) -> usize {
        self.reports.asked.lock().unwrap().len()
    }

    fn effects(&self) -> usize {
        self.handler.effects.load(Ordering::SeqCst)
    }

    fn last(&self) -> (RecordId, FencingToken) {
        self.handler.last.lock().unwrap().unwrap()
    }

    async fn state(&self) -> State {
        let (id, token) = self.last();
        let record = self.store.lookup(id).await.unwrap().unwrap();
        assert_eq!(record.token, token, "no other attempt owns the record");
        record.state
    }

    /// Completes the record as another process does: the attempt itself at its end, or another sidecar.
    async fn complete(&self, completion: Completion) {
        let (id, token) = self.last();
        assert_eq!(complete(&self.store, id, token, completion, RETENTION).await, Outcome::Completed);
    }
}

/// The status, the type of a problem or the body, whether the response is marked as a replay, and the reported status.
type Observed = (u16, String, bool, Option<String>);

fn problem(status: u16, slug: &str) -> Observed {
    (status, slug.to_owned(), false, None)
}

fn replay(body: &str) -> Observed {
    (201, body.to_owned(), true, None)
}

async fn ask(service: Idempotency<Handler>, body: &'static str) -> Observed {
    send(service, Request::post("/orders").header("Idempotency-Key", "k"), body).await
}

async fn send(
    mut service: Idempotency<Handler>,
    request: http::request::Builder,
    body: &'static str,
) -> Observed {
    let response = service.call(request.body(Full::from(body)).unwrap());
    let response = tokio::time::timeout(RESPONSE_TIMEOUT, response).await.expect("a response").unwrap();
    let status = response.status().as_u16();
    let field = |name: &str| Some(response.headers().get(name)?.to_str().unwrap().to_owned());
    let (replayed, told) = (field("idempotent-replayed").is_some(), field("idempotency-status"));
    // Refusals are told apart by their problems.
    let told = told.filter(|status| !status.starts_with("refused; "));
    if matches!(status, 409 | 503 | 504) {
        assert_eq!(field("retry-after").as_deref(), Some("1"));
    }
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let problem: Option<serde_json::Value> = serde_json::from_slice(&body).ok();
    let slug = problem.as_ref().and_then(|problem| problem["type"].as_str()?.rsplit(':').next());
    (status, slug.map_or_else(|| String::from_utf8_lossy(&body).into_owned(), str::to_owned), replayed, told)
}

const AWAITED: State = State::Completed(RecordedResponse::Awaited);

#[tokio::test]
async fn a_response_is_stored_and_replayed_without_another_question() {
    let mut world = World::new([happened("mine")]).await;
    assert_eq!(world.state().await, AWAITED);
    assert_eq!(world.ask().await, replay("mine"));
    let (id, token) = world.last();
    assert_eq!(*world.reports.asked.lock().unwrap(), [(id, token, 1, false)], "the attempt that committed");
    assert_eq!(world.state().await, State::Completed(RecordedResponse::Replayable(found("mine"))));
    assert_eq!(world.events.count(EventKind::ResponseAdded), 1);
    assert_eq!(world.ask().await, replay("mine"));
    assert_eq!((world.asked(), world.effects()), (1, 1));
}

#[tokio::test]
async fn a_response_that_is_gone_is_not_asked_for_again() {
    let mut world = World::new([Report::Is(Reconciled::Unreplayable)]).await;
    for _ in 0..2 {
        assert_eq!(world.ask().await, problem(422, "replay-unavailable"));
        assert_eq!(world.state().await, State::Completed(RecordedResponse::Tombstone));
    }
    assert_eq!((world.asked(), world.effects()), (1, 1));
}

#[tokio::test]
async fn a_committed_request_is_not_executed_when_the_handler_denies_it() {
    let mut world = World::new([Report::Is(Reconciled::DidNotHappen), happened("mine")]).await;
    assert_eq!(world.ask().await, problem(422, "replay-unavailable"));
    assert_eq!((world.state().await, world.effects()), (AWAITED, 1));
    // The handler may have looked in the wrong place.
    assert_eq!(world.ask().await, replay("mine"));
    assert_eq!((world.asked(), world.effects()), (2, 1));
}

#[tokio::test]
async fn the_response_stays_awaited_while_it_is_unknown() {
    let cannot_tell = || Report::Is(Reconciled::CannotTell);
    let mut world = World::new([cannot_tell(), Report::Panics, cannot_tell(), happened("mine")]).await;
    for asked in 1..=3 {
        assert_eq!(world.ask().await, problem(503, "response-awaited"));
        assert_eq!((world.state().await, world.asked()), (AWAITED, asked));
    }
    assert_eq!(world.ask().await, replay("mine"));
    assert_eq!(world.effects(), 1);
}

#[tokio::test]
async fn duplicates_in_this_process_do_not_ask_meanwhile() {
    let latch = Latch::new();
    let mut world = World::new([Report::Waits(latch.clone(), Box::new(happened("mine")))]).await;
    let asking = world.begin().await;
    assert_eq!(world.ask().await, problem(409, "request-in-progress"));
    assert_eq!(ask(world.service.clone(), "other").await, problem(422, "key-reused"));
    latch.open();
    assert_eq!(asking.await.unwrap(), replay("mine"));
    assert_eq!((world.asked(), world.effects()), (1, 1));
}

#[tokio::test]
async fn waiting_duplicates_get_the_response() {
    for (report, heard) in [
        (happened("mine"), replay("mine")),
        (Report::Is(Reconciled::Unreplayable), problem(422, "replay-unavailable")),
        (Report::Is(Reconciled::DidNotHappen), problem(422, "replay-unavailable")),
        (Report::Is(Reconciled::CannotTell), problem(503, "response-awaited")),
        (Report::Panics, problem(503, "response-awaited")),
    ] {
        let latch = Latch::new();
        let world = World::with([Report::Waits(latch.clone(), Box::new(report))], |settings| {
            let policy = settings.policy().with_wait(RESPONSE_TIMEOUT).unwrap();
            settings.with_policy(policy)
        })
        .await;
        let first = world.begin().await;
        let mut others = Vec::new();
        for _ in 0..5 {
            let mut other = Box::pin(ask(world.service.clone(), "body"));
            assert!(poll_fn(|cx| Poll::Ready(other.as_mut().poll(cx).is_pending())).await, "it waits");
            others.push(other);
        }
        latch.open();
        assert_eq!(first.await.unwrap(), heard);
        for other in others {
            assert_eq!(other.await, heard);
        }
        assert_eq!((world.asked(), world.effects()), (1, 1));
    }
}

#[tokio::test]
async fn the_response_is_stored_although_the_client_hangs_up() {
    let latch = Latch::new();
    let mut world = World::new([Report::Waits(latch.clone(), Box::new(happened("mine")))]).await;
    let asking = world.begin().await;
    asking.abort();
    assert!(asking.await.unwrap_err().is_cancelled());
    assert_eq!(world.ask().await, problem(409, "request-in-progress"));
    latch.open();
    let settled = async {
        loop {
            match world.ask().await {
                (409, ..) => tokio::task::yield_now().await,
                heard => return heard,
            }
        }
    };
    assert_eq!(tokio::time::timeout(RESPONSE_TIMEOUT, settled).await.expect("a response"), replay("mine"));
    assert_eq!((world.asked(), world.effects()), (1, 1));
}

#[tokio::test]
async fn the_first_response_wins() {
    let replayable = |body| Completion::Replayable(found(body));
    for (meanwhile, report, heard, differs) in [
        (replayable("mine"), happened("mine"), replay("mine"), 0),
        (replayable("mine"), happened("another"), replay("mine"), 1),
        (replayable("mine"), Report::Is(Reconciled::Unreplayable), replay("mine"), 0),
        (Completion::Tombstone, happened("mine"), problem(422, "replay-unavailable"), 0),
        (Completion::Tombstone, Report::Is(Reconciled::Unreplayable), problem(422, "replay-unavailable"), 0),
    ] {
        let latch = Latch::new();
        let mut world = World::new([Report::Waits(latch.clone(), Box::new(report))]).await;
        let asking = world.begin().await;
        world.complete(meanwhile).await;
        let state = world.state().await;
        latch.open();
        assert_eq!(asking.await.unwrap(), heard);
        assert_eq!(world.state().await, state);
        assert_eq!(world.events.count(EventKind::ResponseDiffers), differs);
        assert_eq!(world.ask().await, heard);
        assert_eq!((world.asked(), world.effects()), (1, 1));
    }
}

/// The retention ends while the handler is asked, and another request takes the key.
#[tokio::test]
async fn two_owners_of_one_key_never_get_each_others_responses() {
    for is_answered in [false, true] {
        the_key_has_another_owner(is_answered).await;
    }
}

async fn the_key_has_another_owner(is_answered: bool) {
    let latch = Latch::new();
    let world = World::new([Report::Waits(latch.clone(), Box::new(happened("old")))]).await;
    let (id, token) = world.last();
    let asking = world.begin().await;
    world.clock.advance(RETENTION);
    // The key is taken by another process.
    let mut other = World::before([happened("new")], Completion::Awaited, |settings| settings);
    let engine = Engine::new(world.store.clone());
    let settings = Settings::default().with_upstream_completion().with_reconcile(other.reports.clone());
    let layer = IdempotencyLayer::new(engine).with_settings(settings).unwrap();
    other.service = layer.layer(world.handler.clone());
    assert_eq!(other.ask().await, problem(504, "response-awaited"));
    assert_eq!((world.last().0, world.effects()), (id, 2));
    assert_ne!(world.last().1, token);
    if is_answered {
        assert_eq!(other.ask().await, replay("new"));
    }
    let state = world.state().await;
    latch.open();
    assert_eq!(asking.await.unwrap(), problem(503, "response-awaited"));
    assert_eq!(world.state().await, state);
    assert_eq!(other.ask().await, replay("new"));
}

/// Even if an outage of the store lets requests pass, this one does not: it is known to have taken effect.
#[tokio::test]
async fn a_request_whose_record_cannot_be_read_is_not_executed() {
    let mut world = World::with([happened("mine")], Settings::danger_fail_open).await;
    world.faults.next(1, Operation::Lookup, Fault::Refuse);
    assert_eq!(world.ask().await, problem(503, "response-awaited"));
    world.faults.next(1, Operation::Lookup, Fault::Busy);
    assert_eq!(world.ask().await, problem(503, "response-awaited"));
    world.faults.next(1, Operation::Lookup, Fault::Corrupt);
    assert_eq!(world.ask().await, problem(500, "record-corrupt"));
    assert_eq!((world.asked(), world.effects()), (0, 1));
    assert_eq!(world.ask().await, replay("mine"));
}

#[tokio::test]
async fn a_response_that_cannot_be_stored_is_returned_and_asked_for_again() {
    for (fault, asked) in [(Fault::Refuse, 2), (Fault::Busy, 2), (Fault::LoseReply, 1)] {
        let mut world = World::new([happened("mine")]).await;
        world.faults.next(1, Operation::Complete, fault);
        let not_stored = Some("not-stored".to_owned());
        assert_eq!(world.ask().await, (201, "mine".to_owned(), true, not_stored));
        assert_eq!(world.ask().await, replay("mine"));
        assert_eq!((world.asked(), world.effects()), (asked, 1));
    }
}

#[tokio::test]
async fn an_unreplayable_response_is_not_asked_for() {
    let mut world = World::before([happened("mine")], Completion::Tombstone, |settings| settings);
    for _ in 0..2 {
        assert_eq!(world.ask().await, problem(422, "replay-unavailable"));
    }
    assert_eq!((world.asked(), world.effects()), (0, 1));
}

#[tokio::test]
async fn mismatches_and_grpc_calls_get_their_usual_refusals() {
    let world = World::new([happened("mine")]).await;
    assert_eq!(ask(world.service.clone(), "other").await, problem(422, "key-reused"));
    let call = || {
        let request = Request::post("/orders").header("Idempotency-Key", "call");
        request.header("content-type", "application/grpc")
    };
    for _ in 0..2 {
        let response = world.service.clone().call(call().body(Full::from("body")).unwrap()).await.unwrap();
        assert_eq!(response.headers()["grpc-status"], "2");
        assert!(response.headers()["grpc-message"].to_str().unwrap().contains("replay-unavailable"));
    }
    assert_eq!((world.asked(), world.effects()), (0, 2));
}

#[tokio::test]
async fn after_its_retention_a_request_is_new() {
    let mut world = World::new([happened("mine")]).await;
    world.clock.advance(RETENTION);
    assert_eq!(world.ask().await, problem(504, "response-awaited"));
    assert_eq!((world.asked(), world.effects()), (0, 2));
}
