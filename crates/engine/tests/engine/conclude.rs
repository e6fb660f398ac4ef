//! Attempts whose operations complete their records themselves: every state that the record may be in when the operation ends,

//! and changes between the engine's read and its write.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::Events;
use oncegate_core::{
    Command, Complete, Completion, FencingToken, Fingerprint, IdempotencyKey, Label, MemoryStore,
    OnAbandoned, Outcome, RecordId, RecordedResponse, Release, Scope, State, Store, StoreError, StoreFuture,
    StoredResponse,
};
use oncegate_engine::{
    ClaimOutcome, ClaimRequest, Engine, EventKind, OperationReport, Permit, Policy, ReportOutcome,
};
use oncegate_testkit::TokioClock;

const LEASE: Duration = Duration::from_secs(30);
const RETENTION: Duration = Duration::from_secs(3600);

/// The step that the operation's own transaction takes before the next write of the engine reaches the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meanwhile {
    Nothing,
    Commits(Option<&'static str>),
    /// It has called `complete` and is still open.
    Holds,
}

/// A store in which an application's transaction may hold a record.
struct Transactional {
    records: MemoryStore<TokioClock>,
    meanwhile: Mutex<Meanwhile>,
}

impl Store for Transactional {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        let token = match &command {
            Command::Complete(Complete { token, .. }) | Command::Release(Release { token, .. }) => *token,
            _ => return self.records.apply(id, command),
        };
        let meanwhile = *self.meanwhile.lock().unwrap();
        Box::pin(async move {
            match meanwhile {
                Meanwhile::Nothing => {}
                Meanwhile::Holds => return Err(StoreError::locked("a transaction holds the record")),
                Meanwhile::Commits(response) => {
                    *self.meanwhile.lock().unwrap() = Meanwhile::Nothing;
                    self.commit(token, response).await;
                }
            }
            self.records.apply(id, command).await
        })
    }

    oncegate_core::delegate_store!(self, self.records => lookup list purge audit check now capabilities);
}

impl Transactional {
    /// Completes the record as `oncegate.complete` does, in a transaction that commits.
    async fn commit(&self, token: FencingToken, response: Option<&'static str>) {
        let completion = response.map_or(Completion::Awaited, replayable);
        let command = Command::Complete(Complete { token, completion, retention: RETENTION });
        assert_eq!(self.records.apply(id(), command).await.unwrap(), Outcome::Completed);
    }

    async fn state(&self) -> State {
        self.lookup(id()).await.unwrap().unwrap().state
    }

    fn set(&self, meanwhile: Meanwhile) {
        *self.meanwhile.lock().unwrap() = meanwhile;
    }
}

/// The events after the end of the operation.
fn after(events: &Events) -> Vec<EventKind> {
    let all = events.all();
    let at = all.iter().position(|kind| *kind == EventKind::Executed).unwrap();
    all[at + 1..].to_vec()
}

struct World {
    engine: Engine,
    store: Arc<Transactional>,
    events: Events,
}

impl World {
    fn new() -> Self {
        let records = MemoryStore::new(crate::support::clock());
        let store = Arc::new(Transactional { records, meanwhile: Mutex::new(Meanwhile::Nothing) });
        let events = Events::default();
        let engine = Engine::builder(store.clone()).with_observer(events.clone()).build();
        Self { engine, store, events }
    }

    async fn permit(&self) -> Permit {
        match self.engine.claim(request()).await.unwrap() {
            ClaimOutcome::Execute(permit) => permit,
            other => panic!("expected to execute, got {other:?}"),
        }
    }

    /// The outcome that a retry in another process gets.
    async fn claim_in_another_process(&self) -> ClaimOutcome {
        Engine::new(self.store.clone()).claim(request()).await.unwrap()
    }
}

fn id() -> RecordId {
    RecordId::derive(&Scope::single_tenant(), &IdempotencyKey::new(b"k").unwrap())
}

fn request() -> ClaimRequest {
    let policy = Policy::default().with_lease(LEASE).unwrap().with_on_abandoned(OnAbandoned::Reexecute);
    let fingerprint = Fingerprint::of_parts("test", &[b"a"]);
    ClaimRequest { id: id(), fingerprint, label: Label::default(), policy }
}

fn response(body: &'static str) -> StoredResponse {
    StoredResponse::new(201, &[("a", b"1"), ("b", b"2")], &[body.into()], &[]).unwrap()
}

fn replayable(body: &'static str) -> Completion {
    Completion::Replayable(response(body))
}

fn success(body: &'static str) -> OperationReport {
    OperationReport::response(replayable(body), true)
}

fn replays(state: &State, body: &str) -> bool {
    matches!(state, State::Completed(RecordedResponse::Replayable(response)) if response.body() == body)
}

#[tokio::test(start_paused = true)]
async fn a_record_committed_without_a_response_gets_the_response() {
    let world = World::new();
    let permit = world.permit().await;
    world.store.commit(permit.attempt().token(), None).await;
    assert!(matches!(permit.report(success("paid")).await, ReportOutcome::Stored));
    assert!(replays(&world.store.state().await, "paid"));
    assert_eq!(after(&world.events), [EventKind::ResponseAdded, EventKind::Completed]);
}

#[tokio::test(start_paused = true)]
async fn a_response_that_was_committed_stays_and_is_returned() {
    for (report, note) in [
        (success("mine"), EventKind::CompletedUpstream),
        (success("another"), EventKind::ResponseDiffers),
        (OperationReport::response(Completion::Tombstone, true), EventKind::CompletedUpstream),
        (OperationReport::NoResponse, EventKind::CompletedUpstream),
    ] {
        let world = World::new();
        let permit = world.permit().await;
        world.store.commit(permit.attempt().token(), Some("mine")).await;
        match permit.report(report.clone()).await {
            ReportOutcome::Recorded(own) => assert_eq!(own.body(), "mine"),
            ReportOutcome::Stored => {
                assert!(matches!(report, OperationReport::Response { .. }), "{report:?}")
            }
            other => panic!("{report:?}: {other:?}"),
        }
        assert!(replays(&world.store.state().await, "mine"));
        assert_eq!(after(&world.events), [note, EventKind::Completed], "{report:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn responses_that_differ_only_in_header_order_are_equal() {
    let world = World::new();
    let permit = world.permit().await;
    world.store.commit(permit.attempt().token(), Some("mine")).await;
    let turned = StoredResponse::new(201, &[("b", b"2"), ("a", b"1")], &["mine".into()], &[]).unwrap();
    let outcome = permit.report(OperationReport::response(Completion::Replayable(turned), true)).await;
    assert!(matches!(outcome, ReportOutcome::Recorded(own) if own == response("mine")));
    assert_eq!(after(&world.events), [EventKind::CompletedUpstream, EventKind::Completed]);
}

#[tokio::test(start_paused = true)]
async fn a_response_without_a_commit_is_stored_and_a_success_is_reported() {
    for (report, events) in [
        (success("paid"), &[EventKind::CompletionMissing, EventKind::Completed][..]),
        (OperationReport::response(replayable("no"), false), &[EventKind::Completed]),
        (OperationReport::response(Completion::Tombstone, false), &[EventKind::Tombstoned]),
    ] {
        let world = World::new();
        assert!(matches!(world.permit().await.report(report).await, ReportOutcome::Stored));
        assert_eq!(after(&world.events), events);
    }
}

#[tokio::test(start_paused = true)]
async fn no_response_and_no_commit_frees_the_key_and_fences_a_late_commit() {
    let world = World::new();
    let permit = world.permit().await;
    let token = permit.attempt().token();
    assert!(matches!(permit.report(OperationReport::NoResponse).await, ReportOutcome::Released));
    let late = Command::Complete(Complete { token, completion: Completion::Awaited, retention: RETENTION });
    assert_eq!(world.store.apply(id(), late).await.unwrap(), Outcome::Fenced);
    assert!(matches!(world.claim_in_another_process().await, ClaimOutcome::Execute(_)));
    assert_eq!(after(&world.events), [EventKind::Released]);
}

#[tokio::test(start_paused = true)]
async fn no_response_after_a_commit_without_one_leaves_the_record_as_it_is() {
    let world = World::new();
    let permit = world.permit().await;
    world.store.commit(permit.attempt().token(), None).await;
    assert!(matches!(permit.report(OperationReport::NoResponse).await, ReportOutcome::Unreplayable));
    assert_eq!(world.store.state().await, State::Completed(RecordedResponse::Awaited));
    assert_eq!(after(&world.events), [EventKind::CompletedUpstream, EventKind::Tombstoned]);
}

/// The transaction commits after the engine read the record and before it writes.
#[tokio::test(start_paused = true)]
async fn a_commit_between_read_and_write_is_seen() {
    for (report, response) in [
        (OperationReport::NoResponse, None),
        (OperationReport::NoResponse, Some("mine")),
        (success("paid"), Some("mine")),
        (success("paid"), None),
    ] {
        let world = World::new();
        let permit = world.permit().await;
        world.store.set(Meanwhile::Commits(response));
        let outcome = permit.report(report.clone()).await;
        let state = world.store.state().await;
        match (&report, response) {
            (_, Some(_)) => {
                assert!(
                    matches!(outcome, ReportOutcome::Recorded(own) if own.body() == "mine"),
                    "{report:?}"
                );
                assert!(replays(&state, "mine"));
            }
            (OperationReport::NoResponse, None) => {
                assert!(matches!(outcome, ReportOutcome::Unreplayable));
                assert_eq!(state, State::Completed(RecordedResponse::Awaited));
            }
            _ => {
                assert!(matches!(outcome, ReportOutcome::Stored));
                assert!(replays(&state, "paid"));
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_record_that_a_transaction_holds_is_concluded_when_it_is_freed() {
    for (report, commits) in
        [(OperationReport::NoResponse, false), (OperationReport::NoResponse, true), (success("paid"), true)]
    {
        let world = World::new();
        let permit = world.permit().await;
        let token = permit.attempt().token();
        world.store.set(Meanwhile::Holds);
        assert!(matches!(permit.report(report.clone()).await, ReportOutcome::Deferred(_)));
        // A duplicate in this process gets "in progress".
        let duplicate = world.engine.claim(request()).await.unwrap();
        assert!(matches!(duplicate, ClaimOutcome::InProgress { .. }), "{duplicate:?}");
        // The engine keeps trying until the lease ends.
        tokio::time::sleep(LEASE / 3).await;
        world.store.set(Meanwhile::Nothing);
        if commits {
            world.store.commit(token, None).await;
        }
        tokio::time::sleep(LEASE).await;
        let state = world.store.state().await;
        match (&report, commits) {
            (OperationReport::NoResponse, false) => assert_eq!(state, State::Released),
            (OperationReport::NoResponse, true) => {
                assert_eq!(state, State::Completed(RecordedResponse::Awaited))
            }
            _ => assert!(replays(&state, "paid")),
        }
    }
}

/// The transaction holds the record beyond the lease: the next claim decides, and the outcome was never called unknown.
#[tokio::test(start_paused = true)]
async fn a_record_that_is_held_beyond_the_lease_is_left_alone() {
    let world = World::new();
    let permit = world.permit().await;
    world.store.set(Meanwhile::Holds);
    assert!(matches!(permit.report(OperationReport::NoResponse).await, ReportOutcome::Deferred(_)));
    tokio::time::sleep(LEASE * 2).await;
    assert!(matches!(world.store.state().await, State::InProgress { .. }));
    assert_eq!(after(&world.events).last(), Some(&EventKind::SettlementLost));
    assert!(
        matches!(world.claim_in_another_process().await, ClaimOutcome::Execute(permit) if permit.attempt().number() == 2)
    );
}

#[tokio::test(start_paused = true)]
async fn a_stale_owner_changes_nothing() {
    for report in [
        OperationReport::NoResponse,
        success("late"),
        OperationReport::response(Completion::Tombstone, false),
    ] {
        let world = World::new();
        let permit = world.permit().await;
        // An operator may free a key by force, and another process executes under another token.
        let release = Release { token: permit.attempt().token(), retention: RETENTION };
        world.store.apply(id(), Command::Release(release)).await.unwrap();
        let ClaimOutcome::Execute(other) = world.claim_in_another_process().await else {
            panic!("the key is not free")
        };
        assert!(matches!(permit.report(report.clone()).await, ReportOutcome::Fenced));
        assert!(matches!(world.store.state().await, State::InProgress { .. }));
        assert_eq!(after(&world.events), [EventKind::Fenced]);
        other.complete(replayable("other")).await;
    }
}
