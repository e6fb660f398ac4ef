//! Attempts whose operations complete their records themselves: every state that the record may be in when the operation ends,
//! and what changes between the look and the write.

#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_core::{
    Answer, Capabilities, Clock, Command, Complete, Completion, FencingToken, Fingerprint, IdempotencyKey,
    Label, ListPage, ListQuery, MemoryStore, OnAbandoned, Outcome, Record, RecordId, Release, Scope, State,
    Store, StoreError, StoreFuture, StoredResponse, Timestamp,
};
use oncegate_engine::{
    ClaimOutcome, ClaimRequest, Concluded, Engine, Event, EventKind, Observer, Permit, Policy, Said,
};
use tokio::time::Instant;

const LEASE: Duration = Duration::from_secs(30);
const RETENTION: Duration = Duration::from_secs(3600);

struct TokioClock(Instant);

impl Clock for TokioClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(1_000_000 + u64::try_from(self.0.elapsed().as_millis()).unwrap())
    }
}

/// What the operation's own transaction does, before the next write of the engine gets to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meanwhile {
    Nothing,
    Commits(Option<&'static str>),
    /// It has called `complete` and is open.
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
                Meanwhile::Commits(answer) => {
                    *self.meanwhile.lock().unwrap() = Meanwhile::Nothing;
                    self.commit(token, answer).await;
                }
            }
            self.records.apply(id, command).await
        })
    }

    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        self.records.lookup(id)
    }

    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage> {
        self.records.list(query)
    }

    fn purge(&self, limit: usize) -> StoreFuture<'_, usize> {
        self.records.purge(limit)
    }

    fn audit(&self, before: Option<u64>, limit: usize) -> StoreFuture<'_, Vec<oncegate_core::AuditEntry>> {
        self.records.audit(before, limit)
    }

    fn check(&self) -> StoreFuture<'_, ()> {
        self.records.check()
    }

    fn now(&self) -> Timestamp {
        self.records.now()
    }

    fn capabilities(&self) -> Capabilities {
        self.records.capabilities()
    }
}

impl Transactional {
    /// As `oncegate.complete` does, in a transaction that commits.
    async fn commit(&self, token: FencingToken, answer: Option<&'static str>) {
        let completion = answer.map_or(Completion::Awaited, replayable);
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

#[derive(Clone, Default)]
struct Events(Arc<Mutex<Vec<EventKind>>>);

impl Observer for Events {
    fn observe(&self, event: &Event) {
        self.0.lock().unwrap().push(event.kind);
    }
}

impl Events {
    /// What followed the end of the operation.
    fn after(&self) -> Vec<EventKind> {
        let all = self.0.lock().unwrap();
        let at = all.iter().position(|kind| *kind == EventKind::Executed).unwrap();
        all[at + 1..].to_vec()
    }
}

struct World {
    engine: Engine,
    store: Arc<Transactional>,
    events: Events,
}

impl World {
    fn new() -> Self {
        let records = MemoryStore::new(TokioClock(Instant::now()));
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

    /// What a retry in another process hears.
    async fn elsewhere(&self) -> ClaimOutcome {
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

fn success(body: &'static str) -> Said {
    Said::answer(replayable(body), true)
}

fn replays(state: &State, body: &str) -> bool {
    matches!(state, State::Completed(Answer::Replayable(response)) if response.body() == body)
}

#[tokio::test(start_paused = true)]
async fn an_answer_is_added_to_what_was_committed_without_one() {
    let world = World::new();
    let permit = world.permit().await;
    world.store.commit(permit.attempt().token(), None).await;
    assert!(matches!(permit.conclude(success("paid")).await, Concluded::Taken));
    assert!(replays(&world.store.state().await, "paid"));
    assert_eq!(world.events.after(), [EventKind::AnswerAdded, EventKind::Completed]);
}

#[tokio::test(start_paused = true)]
async fn what_was_committed_with_an_answer_stays_and_is_given_back() {
    for (said, note) in [
        (success("mine"), EventKind::CompletedUpstream),
        (success("another"), EventKind::AnswerDiffers),
        (Said::answer(Completion::Tombstone, true), EventKind::CompletedUpstream),
        (Said::Nothing, EventKind::CompletedUpstream),
    ] {
        let world = World::new();
        let permit = world.permit().await;
        world.store.commit(permit.attempt().token(), Some("mine")).await;
        match permit.conclude(said.clone()).await {
            Concluded::Recorded(own) => assert_eq!(own.body(), "mine"),
            Concluded::Taken => assert!(matches!(said, Said::Answer { .. }), "{said:?}"),
            other => panic!("{said:?}: {other:?}"),
        }
        assert!(replays(&world.store.state().await, "mine"));
        assert_eq!(world.events.after(), [note, EventKind::Completed], "{said:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_order_of_fields_makes_no_other_answer() {
    let world = World::new();
    let permit = world.permit().await;
    world.store.commit(permit.attempt().token(), Some("mine")).await;
    let turned = StoredResponse::new(201, &[("b", b"2"), ("a", b"1")], &["mine".into()], &[]).unwrap();
    let concluded = permit.conclude(Said::answer(Completion::Replayable(turned), true)).await;
    assert!(matches!(concluded, Concluded::Recorded(own) if own == response("mine")));
    assert_eq!(world.events.after(), [EventKind::CompletedUpstream, EventKind::Completed]);
}

#[tokio::test(start_paused = true)]
async fn an_answer_without_a_commit_is_stored_and_a_success_is_noted() {
    for (said, events) in [
        (success("paid"), &[EventKind::CompletionMissing, EventKind::Completed][..]),
        (Said::answer(replayable("no"), false), &[EventKind::Completed]),
        (Said::answer(Completion::Tombstone, false), &[EventKind::Tombstoned]),
    ] {
        let world = World::new();
        assert!(matches!(world.permit().await.conclude(said).await, Concluded::Taken));
        assert_eq!(world.events.after(), events);
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_without_a_commit_frees_the_key_and_fences_a_late_one() {
    let world = World::new();
    let permit = world.permit().await;
    let token = permit.attempt().token();
    assert!(matches!(permit.conclude(Said::Nothing).await, Concluded::Released));
    let late = Command::Complete(Complete { token, completion: Completion::Awaited, retention: RETENTION });
    assert_eq!(world.store.apply(id(), late).await.unwrap(), Outcome::Fenced);
    assert!(matches!(world.elsewhere().await, ClaimOutcome::Execute(_)));
    assert_eq!(world.events.after(), [EventKind::Released]);
}

#[tokio::test(start_paused = true)]
async fn nothing_after_a_commit_without_an_answer_leaves_it() {
    let world = World::new();
    let permit = world.permit().await;
    world.store.commit(permit.attempt().token(), None).await;
    assert!(matches!(permit.conclude(Said::Nothing).await, Concluded::Unreplayable));
    assert_eq!(world.store.state().await, State::Completed(Answer::Awaited));
    assert_eq!(world.events.after(), [EventKind::CompletedUpstream, EventKind::Tombstoned]);
}

/// The transaction commits after the record was read and before it is written.
#[tokio::test(start_paused = true)]
async fn a_commit_in_between_is_seen() {
    for (said, answer) in [
        (Said::Nothing, None),
        (Said::Nothing, Some("mine")),
        (success("paid"), Some("mine")),
        (success("paid"), None),
    ] {
        let world = World::new();
        let permit = world.permit().await;
        world.store.set(Meanwhile::Commits(answer));
        let concluded = permit.conclude(said.clone()).await;
        let state = world.store.state().await;
        match (&said, answer) {
            (_, Some(_)) => {
                assert!(matches!(concluded, Concluded::Recorded(own) if own.body() == "mine"), "{said:?}");
                assert!(replays(&state, "mine"));
            }
            (Said::Nothing, None) => {
                assert!(matches!(concluded, Concluded::Unreplayable));
                assert_eq!(state, State::Completed(Answer::Awaited));
            }
            _ => {
                assert!(matches!(concluded, Concluded::Taken));
                assert!(replays(&state, "paid"));
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_record_that_is_held_is_concluded_when_it_is_let_go_of() {
    for (said, commits) in [(Said::Nothing, false), (Said::Nothing, true), (success("paid"), true)] {
        let world = World::new();
        let permit = world.permit().await;
        let token = permit.attempt().token();
        world.store.set(Meanwhile::Holds);
        assert!(matches!(permit.conclude(said.clone()).await, Concluded::Deferred(_)));
        // In this process everybody hears that it is in progress.
        let duplicate = world.engine.claim(request()).await.unwrap();
        assert!(matches!(duplicate, ClaimOutcome::InProgress { .. }), "{duplicate:?}");
        // It goes on trying for as long as the lease lasts.
        tokio::time::sleep(LEASE / 3).await;
        world.store.set(Meanwhile::Nothing);
        if commits {
            world.store.commit(token, None).await;
        }
        tokio::time::sleep(LEASE).await;
        let state = world.store.state().await;
        match (&said, commits) {
            (Said::Nothing, false) => assert_eq!(state, State::Released),
            (Said::Nothing, true) => assert_eq!(state, State::Completed(Answer::Awaited)),
            _ => assert!(replays(&state, "paid")),
        }
    }
}

/// It is held beyond the lease: the next claim decides, and nothing was called unknown.
#[tokio::test(start_paused = true)]
async fn a_record_that_is_held_beyond_the_lease_is_left() {
    let world = World::new();
    let permit = world.permit().await;
    world.store.set(Meanwhile::Holds);
    assert!(matches!(permit.conclude(Said::Nothing).await, Concluded::Deferred(_)));
    tokio::time::sleep(LEASE * 2).await;
    assert!(matches!(world.store.state().await, State::InProgress { .. }));
    assert_eq!(world.events.after().last(), Some(&EventKind::SettlementLost));
    assert!(
        matches!(world.elsewhere().await, ClaimOutcome::Execute(permit) if permit.attempt().number() == 2)
    );
}

#[tokio::test(start_paused = true)]
async fn a_stale_owner_changes_nothing() {
    for said in [Said::Nothing, success("late"), Said::answer(Completion::Tombstone, false)] {
        let world = World::new();
        let permit = world.permit().await;
        // Operators may free a key by force, and others execute under another token.
        let release = Release { token: permit.attempt().token(), retention: RETENTION };
        world.store.apply(id(), Command::Release(release)).await.unwrap();
        let ClaimOutcome::Execute(other) = world.elsewhere().await else { panic!("it is free") };
        assert!(matches!(permit.conclude(said.clone()).await, Concluded::Fenced));
        assert!(matches!(world.store.state().await, State::InProgress { .. }));
        assert_eq!(world.events.after(), [EventKind::Fenced]);
        other.complete(replayable("other")).await;
    }
}
