//! Leases that have ended: what must not begin then, and what callers get that arrive meanwhile.
//!
//! Time is tokio's paused clock. The store reads it, too, so leases end without real waiting. If a test has to stop a
//! process, an observer blocks its thread, and time is real.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{Events, settle};
use oncegate_core::{
    Command, Completion, Fingerprint, IdempotencyKey, KeyTag, Label, ListQuery, MemoryStore, OnAbandoned,
    RecordId, Resolution, Resolve, Scope, StateName, Store, StoreErrorKind, StoredResponse, SystemClock,
    limits,
};
use oncegate_engine::{
    AuditTextError, ClaimOutcome, ClaimRequest, Engine, Event, EventKind, FunctionError, LeaseError,
    Observer, Permit, Policy, ResolveError, SettleOutcome,
};
use oncegate_testkit::{Fault, Faults, FaultyStore, Latch, Operation};
use tokio::time::{advance, sleep};

const LEASE: Duration = Duration::from_secs(30);

/// One process on a store that others share.
struct Process {
    engine: Engine,
    faults: Faults,
    events: Events,
}

fn shared_store() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new(crate::support::clock()))
}

impl Process {
    fn on(store: &Arc<dyn Store>) -> Self {
        let events = Events::default();
        let (faulty, faults) = FaultyStore::new(store.clone());
        let faulty = crate::support::store_of(module_path!(), faulty);
        let engine = Engine::builder(faulty).with_observer(events.clone()).build();
        Self { engine, faults, events }
    }

    async fn claim(&self, request: ClaimRequest) -> ClaimOutcome {
        self.engine.claim(request).await.unwrap()
    }

    async fn permit(&self, request: ClaimRequest) -> Permit {
        executes(self.claim(request).await)
    }
}

fn executes(outcome: ClaimOutcome) -> Permit {
    match outcome {
        ClaimOutcome::Execute(permit) => permit,
        other => panic!("expected to execute, got {other:?}"),
    }
}

fn id() -> RecordId {
    RecordId::derive(&Scope::single_tenant(), &IdempotencyKey::new(*b"k").unwrap())
}

fn policy() -> Policy {
    Policy::default().with_lease(LEASE).unwrap().with_wait(Duration::ZERO).unwrap()
}

fn request() -> ClaimRequest {
    ClaimRequest {
        id: id(),
        fingerprint: Fingerprint::of_parts("test", &[b"a"]),
        label: Label::default(),
        policy: policy(),
    }
}

fn with(policy: Policy) -> ClaimRequest {
    ClaimRequest { policy, ..request() }
}

fn reexecuting() -> ClaimRequest {
    with(policy().with_on_abandoned(OnAbandoned::Reexecute))
}

fn response(body: &'static str) -> Completion {
    Completion::Replayable(StoredResponse::new(201, &[], &[body.into()], &[]).unwrap())
}

fn replays(outcome: &ClaimOutcome, body: &str) -> bool {
    matches!(outcome, ClaimOutcome::Replay(response) if response.body() == body)
}

fn in_progress(outcome: &ClaimOutcome) -> bool {
    matches!(outcome, ClaimOutcome::InProgress { .. })
}

async fn force_release(store: &Arc<dyn Store>) {
    let command = Resolve {
        resolution: Resolution::Release,
        retention: Duration::from_secs(3600),
        force: true,
        amend: false,
        actor: "operator".to_owned(),
        reason: "it hangs".to_owned(),
    };
    store.apply(id(), Command::Resolve(command)).await.unwrap();
}

/// Makes a claim whose grant arrives `late`; `meanwhile` runs before it arrives.
async fn granted_late(one: &Process, late: Duration, meanwhile: impl AsyncFnOnce()) -> ClaimOutcome {
    let latch = Latch::new();
    one.faults.next(1, Operation::Claim, Fault::StallAfter(latch.clone()));
    let engine = one.engine.clone();
    let claim = tokio::spawn(async move { engine.claim(reexecuting()).await });
    settle().await;
    advance(late).await;
    meanwhile().await;
    latch.open();
    claim.await.unwrap().unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_arrives_after_its_lease_executes_nothing_if_another_process_took_over() {
    let store = shared_store();
    let (one, two) = (Process::on(&store), Process::on(&store));
    let outcome = granted_late(&one, LEASE, async || {
        let permit = two.permit(reexecuting()).await;
        assert!(matches!(permit.complete(response("two")).await, SettleOutcome::Done));
    })
    .await;
    assert!(replays(&outcome, "two"), "{outcome:?}");
    assert_eq!(one.events.count(EventKind::LeaseLost), 1);
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_arrives_after_its_lease_waits_for_the_process_that_took_over() {
    let store = shared_store();
    let (one, two) = (Process::on(&store), Process::on(&store));
    let taken = Mutex::new(None);
    let outcome = granted_late(&one, LEASE, async || {
        *taken.lock().unwrap() = Some(two.permit(reexecuting()).await);
    })
    .await;
    assert!(in_progress(&outcome), "{outcome:?}");
    let permit = taken.lock().unwrap().take().unwrap();
    assert!(matches!(permit.complete(response("two")).await, SettleOutcome::Done));
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_arrives_after_its_lease_is_renewed_if_the_key_is_unclaimed() {
    let store = shared_store();
    let one = Process::on(&store);
    let permit = executes(granted_late(&one, LEASE, async || {}).await);
    assert!(permit.attempt().is_owner());
    assert_eq!(permit.attempt().number(), 1);
    assert_eq!(one.events.count(EventKind::Renewed), 1);
    let two = Process::on(&store);
    assert!(in_progress(&two.claim(reexecuting()).await));
    // A grant that arrives in time is not renewed.
    assert!(matches!(permit.complete(response("one")).await, SettleOutcome::Done));
    assert_eq!(one.events.count(EventKind::Renewed), 1);
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_arrives_after_its_lease_is_taken_back_if_the_store_does_not_renew_it() {
    let store = shared_store();
    let one = Process::on(&store);
    let latch = Latch::new();
    one.faults.next(1, Operation::Claim, Fault::StallAfter(latch.clone()));
    one.faults.always(Operation::Renew, Fault::Refuse);
    let engine = one.engine.clone();
    let claim = tokio::spawn(async move { engine.claim(request()).await.map(drop) });
    settle().await;
    advance(LEASE).await;
    latch.open();
    assert_eq!(claim.await.unwrap().unwrap_err().kind(), StoreErrorKind::Unavailable);
    one.faults.heal();
    sleep(Duration::from_secs(1)).await;
    let record = store.lookup(id()).await.unwrap().unwrap();
    assert_eq!(record.state_name(store.now()), StateName::Released, "no attempt started");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_slower_than_the_lease_grants_nothing() {
    /// Takes twice the lease for each command.
    struct Slow(Arc<dyn Store>);
    impl Store for Slow {
        fn apply(
            &self,
            id: RecordId,
            command: Command,
        ) -> oncegate_core::StoreFuture<'_, oncegate_core::Outcome> {
            Box::pin(async move {
                sleep(limits::MIN_LEASE).await;
                let outcome = self.0.apply(id, command).await;
                sleep(limits::MIN_LEASE).await;
                outcome
            })
        }

        oncegate_core::delegate_store!(self, self.0 => lookup list purge audit check now capabilities);
    }
    let engine = Engine::new(Slow(shared_store()));
    let error = engine.claim(with(policy().with_lease(limits::MIN_LEASE).unwrap())).await.unwrap_err();
    assert!(error.to_string().contains("longer than the lease"), "{error}");
}

#[tokio::test]
async fn a_grant_that_arrives_after_its_lease_is_renewed_before_anything_is_executed() {
    /// The process stops for a whole lease between each claim and its reply.
    struct Stopping(MemoryStore);
    impl Stopping {
        fn stop_after(command: &Command) {
            if matches!(command, Command::Claim(_)) {
                std::thread::sleep(limits::MIN_LEASE);
            }
        }
    }
    impl Store for Stopping {
        fn apply(
            &self,
            id: RecordId,
            command: Command,
        ) -> oncegate_core::StoreFuture<'_, oncegate_core::Outcome> {
            Box::pin(async move {
                let outcome = self.0.apply(id, command.clone()).await;
                Self::stop_after(&command);
                outcome
            })
        }

        fn try_apply(
            &self,
            id: RecordId,
            command: &Command,
        ) -> Option<Result<oncegate_core::Outcome, oncegate_core::StoreError>> {
            let outcome = self.0.try_apply(id, command);
            Self::stop_after(command);
            outcome
        }

        oncegate_core::delegate_store!(self, self.0 => lookup list purge audit check now capabilities);
    }
    let stopping = Arc::new(Stopping(MemoryStore::default()));
    let engine = Engine::new(crate::support::store_of(module_path!(), stopping));
    match engine.claim(with(policy().with_lease(limits::MIN_LEASE).unwrap())).await.unwrap() {
        ClaimOutcome::Execute(permit) => assert!(permit.attempt().is_owner()),
        other => panic!("{other:?}"),
    }
}

/// Stops its process once, after a claim was granted, until another process has executed the same request.
struct StopBeforeStart {
    store: Arc<dyn Store>,
    runs: Arc<AtomicUsize>,
    has_stopped: AtomicUsize,
}

const SHORT_LEASE: Duration = limits::MIN_LEASE;

impl Observer for StopBeforeStart {
    fn observe(&self, event: &Event) {
        if !matches!(event.kind, EventKind::Executing { .. })
            || self.has_stopped.fetch_add(1, Ordering::SeqCst) > 0
        {
            return;
        }
        let (store, runs) = (self.store.clone(), self.runs.clone());
        let other = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let function = Engine::new(store).function("pay").with_policy(
                    policy().with_lease(LEASE).unwrap().with_on_abandoned(OnAbandoned::Reexecute),
                );
                let give_up = std::time::Instant::now() + Duration::from_secs(20);
                loop {
                    let runs = runs.clone();
                    let ran = function
                        .run("k", &(), async move |_| Ok::<_, String>(runs.fetch_add(1, Ordering::SeqCst)));
                    match ran.await {
                        Ok(_) => return,
                        Err(FunctionError::InProgress { .. }) if std::time::Instant::now() < give_up => {
                            sleep(Duration::from_millis(5)).await;
                        }
                        Err(other) => panic!("{other:?}"),
                    }
                }
            });
        });
        other.join().unwrap();
    }
}

#[tokio::test]
async fn a_process_that_was_stopped_between_grant_and_start_executes_nothing() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new(SystemClock::new()));
    let runs = Arc::new(AtomicUsize::new(0));
    let stops =
        StopBeforeStart { store: store.clone(), runs: runs.clone(), has_stopped: AtomicUsize::new(0) };
    let engine = Engine::builder(store).with_observer(stops).build();
    let short = policy().with_lease(SHORT_LEASE).unwrap().with_on_abandoned(OnAbandoned::Reexecute);
    let function = engine.function("pay").with_policy(short);
    for run in [0, 1] {
        let counted = runs.clone();
        let ran =
            function.run("k", &(), async move |_| Ok::<_, String>(counted.fetch_add(1, Ordering::SeqCst)));
        match (run, ran.await) {
            (0, Err(FunctionError::InProgress { .. })) | (1, Ok(0)) => {}
            (_, other) => panic!("{run}: {other:?}"),
        }
    }
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_checks_before_its_effect_is_renewed_or_told_to_stop() {
    let store = shared_store();
    let (one, two) = (Process::on(&store), Process::on(&store));
    let attempt = one.permit(reexecuting()).await;
    let handle = attempt.attempt();
    handle.confirm_lease().await.unwrap();
    assert_eq!(one.events.count(EventKind::Renewed), 0, "a lease that lasts is not renewed");
    one.faults.always(Operation::Renew, Fault::Refuse);
    sleep(LEASE).await;
    assert!(!handle.is_owner());
    assert!(matches!(handle.confirm_lease().await, Err(LeaseError::Store(_))));
    one.faults.heal();
    handle.confirm_lease().await.unwrap();
    assert!(handle.is_owner());
    one.faults.always(Operation::Renew, Fault::Refuse);
    sleep(LEASE).await;
    let permit = two.permit(reexecuting()).await;
    one.faults.heal();
    assert!(matches!(handle.confirm_lease().await, Err(LeaseError::Fenced)));
    assert!(matches!(permit.complete(response("two")).await, SettleOutcome::Done));
    assert!(matches!(attempt.complete(response("one")).await, SettleOutcome::Fenced));
}

#[tokio::test(start_paused = true)]
async fn a_lease_ends_here_before_it_ends_in_a_store_that_rounds_its_time_down() {
    let store = shared_store();
    let (one, two) = (Process::on(&store), Process::on(&store));
    one.faults.always(Operation::Renew, Fault::Refuse);
    // Granted late in a millisecond of the store, the lease is shorter there by almost this millisecond.
    advance(Duration::from_micros(900)).await;
    let attempt = one.permit(reexecuting()).await;
    advance(LEASE - Duration::from_micros(500)).await;
    let permit = two.permit(reexecuting()).await;
    assert!(!attempt.attempt().is_owner(), "another process has taken over");
    one.faults.heal();
    assert!(matches!(attempt.attempt().confirm_lease().await, Err(LeaseError::Fenced)));
    assert!(matches!(permit.complete(response("two")).await, SettleOutcome::Done));
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_lost_its_record_no_longer_blocks_its_key() {
    let store = shared_store();
    let one = Process::on(&store);
    let hanging = one.permit(request()).await;
    force_release(&store).await;
    // Its next renewal finds out that the record is lost.
    sleep(LEASE / 3 + Duration::from_millis(1)).await;
    let permit = one.permit(request()).await;
    assert!(permit.attempt().token() > hanging.attempt().token());
    // The fenced attempt ends; callers that wait for the new attempt do not notice.
    assert!(matches!(hanging.complete(response("late")).await, SettleOutcome::Fenced));
    assert!(in_progress(&one.claim(request()).await));
    assert_eq!(one.engine.in_flight(), 1);
    assert!(matches!(permit.complete(response("new")).await, SettleOutcome::Done));
    assert!(replays(&one.claim(request()).await, "new"));
    assert_eq!(one.engine.in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn waiters_of_a_handler_that_loses_its_record_get_the_response_of_the_new_owner() {
    let store = shared_store();
    let (one, two) = (Process::on(&store), Process::on(&store));
    let fenced = one.permit(reexecuting()).await;
    let waiters: Vec<_> = (0..3)
        .map(|_| {
            let engine = one.engine.clone();
            let policy = reexecuting().policy.with_wait(limits::MAX_LEASE).unwrap();
            tokio::spawn(async move { engine.claim(with(policy)).await.unwrap() })
        })
        .collect();
    settle().await;
    one.faults.always(Operation::Renew, Fault::Refuse);
    sleep(LEASE - Duration::from_millis(1)).await;
    one.faults.always(Operation::Renew, Fault::StallBefore(Latch::new()));
    let took_over = {
        let two = &two;
        async move {
            loop {
                match two.claim(reexecuting()).await {
                    ClaimOutcome::Execute(permit) => return permit,
                    _ => sleep(Duration::from_millis(1)).await,
                }
            }
        }
    };
    let permit = took_over.await;
    one.faults.heal();
    sleep(Duration::from_secs(2)).await;
    assert!(matches!(permit.complete(response("two")).await, SettleOutcome::Done));
    for waiter in waiters {
        let outcome = tokio::time::timeout(Duration::from_secs(2), waiter)
            .await
            .expect("the waiter is notified")
            .unwrap();
        assert!(replays(&outcome, "two"), "{outcome:?}");
    }
    assert!(matches!(fenced.complete(response("one")).await, SettleOutcome::Fenced));
}

#[tokio::test(start_paused = true)]
async fn while_a_handler_lives_its_ended_lease_is_renewed_and_its_key_stays_claimed() {
    for on_abandoned in [OnAbandoned::Park, OnAbandoned::Reexecute] {
        let store = shared_store();
        let one = Process::on(&store);
        let request = || with(policy().with_on_abandoned(on_abandoned));
        let permit = one.permit(request()).await;
        one.faults.always(Operation::Renew, Fault::Refuse);
        sleep(LEASE).await;
        // The store cannot report the owner. The handler lives, so nothing may be executed next to it, whatever a route does
        // while its store is out of reach.
        assert!(in_progress(&one.claim(request()).await));
        one.faults.heal();
        // The first caller asks the store. It does not claim the key, because a claim would park it or execute a second time.
        assert!(in_progress(&one.claim(request()).await));
        assert!(permit.attempt().is_owner());
        assert!(matches!(permit.complete(response("one")).await, SettleOutcome::Done));
        assert!(replays(&one.claim(request()).await, "one"));
    }
}

#[tokio::test(start_paused = true)]
async fn many_claims_after_the_end_of_a_lease_ask_the_store_once() {
    let store = shared_store();
    let one = Process::on(&store);
    let permit = one.permit(request()).await;
    one.faults.always(Operation::Renew, Fault::Refuse);
    sleep(LEASE).await;
    one.faults.heal();
    let latch = Latch::new();
    let before = one.faults.calls(Operation::Renew);
    one.faults.always(Operation::Renew, Fault::StallBefore(latch.clone()));
    let claims: Vec<_> = (0..100)
        .map(|_| {
            let engine = one.engine.clone();
            tokio::spawn(async move { in_progress(&engine.claim(request()).await.unwrap()) })
        })
        .collect();
    settle().await;
    latch.open();
    for claim in claims {
        assert!(claim.await.unwrap());
    }
    // One of the callers asks, and the renewal in the background.
    assert!(one.faults.calls(Operation::Renew) - before <= 2);
    assert!(matches!(permit.complete(response("one")).await, SettleOutcome::Done));
}

#[tokio::test(start_paused = true)]
async fn a_refused_claim_gets_the_running_time_of_the_attempt() {
    let store = shared_store();
    let (one, two) = (Process::on(&store), Process::on(&store));
    let permit = one.permit(request()).await;
    let age = async |process: &Process, wait: Duration| match process
        .claim(with(policy().with_wait(wait).unwrap()))
        .await
    {
        ClaimOutcome::InProgress { running_for, .. } => running_for.as_secs(),
        other => panic!("{other:?}"),
    };
    assert_eq!((age(&one, Duration::ZERO).await, age(&two, Duration::ZERO).await), (0, 0));
    sleep(Duration::from_secs(4)).await;
    assert_eq!((age(&one, Duration::ZERO).await, age(&two, Duration::ZERO).await), (4, 4));
    sleep(Duration::from_secs(7)).await;
    // The lease was renewed after ten seconds: another process counts the time since then, and its own waiting time.
    assert_eq!((age(&one, Duration::ZERO).await, age(&two, Duration::ZERO).await), (11, 1));
    assert_eq!(age(&two, Duration::from_secs(3)).await, 4);
    assert!(matches!(permit.complete(response("one")).await, SettleOutcome::Done));
}

#[tokio::test(start_paused = true)]
async fn a_key_that_an_operator_releases_by_force_in_this_process_is_free_at_once() {
    let store = shared_store();
    let one = Process::on(&store);
    let hanging = one.permit(request()).await;
    let operator = one.engine.operator(" ada ").unwrap();
    let refused = operator.release(id(), "it hangs").await.unwrap_err();
    assert!(matches!(refused, ResolveError::NotResolvable(StateName::InProgress)), "{refused:?}");
    let from = operator.release_by_force(id(), "it hangs").await.unwrap();
    assert_eq!(from, StateName::InProgress);
    tokio::time::timeout(Duration::from_secs(1), hanging.attempt().lost())
        .await
        .expect("the attempt is notified at once");
    let permit = one.permit(request()).await;
    assert!(matches!(hanging.complete(response("late")).await, SettleOutcome::Fenced));
    assert!(matches!(permit.complete(response("new")).await, SettleOutcome::Done));
    let audit = operator.audit(None, 10).await.unwrap();
    assert_eq!((audit.len(), &*audit[0].actor, &*audit[0].reason), (1, "ada", "it hangs"));
}

#[tokio::test(start_paused = true)]
async fn an_operator_corrects_an_earlier_resolution_and_finds_the_record_by_its_key() {
    let store = shared_store();
    let one = Process::on(&store);
    let function = one.engine.function("charge").with_policy(policy());
    let run = async || function.run("Order-7", &(), async |_| Err::<u32, _>("timed out".to_owned())).await;
    assert!(run().await.is_err());
    let operator = one.engine.operator("ada").unwrap();
    let mut query = ListQuery::default();
    query.key = Some(KeyTag::of(&IdempotencyKey::try_from("order-7").unwrap()));
    let found = operator.list(query).await.unwrap().records;
    let [(id, _)] = found.as_slice() else { panic!("{found:?}") };
    let response = |value: u32| function.response(&value).ok();
    operator.complete(*id, response(7), "found in the bank's list").await.unwrap();
    assert_eq!(run().await.unwrap(), 7);
    assert_eq!(operator.park(*id, "the wrong transfer").await.unwrap(), StateName::Completed);
    assert!(matches!(run().await, Err(FunctionError::Unknown)));
    let again = operator.park(*id, "the wrong transfer").await.unwrap_err();
    assert!(matches!(again, ResolveError::NotResolvable(StateName::Unknown)), "{again:?}");
    operator.complete(*id, None, "found in the bank's list").await.unwrap();
    let from = operator.amend(*id, Resolution::Complete(response(8)), "found its number").await.unwrap();
    assert_eq!(from, StateName::Tombstone);
    assert_eq!(run().await.unwrap(), 8);
    let record = operator.look_up(*id).await.unwrap().unwrap();
    assert!(record.by_operator && record.attempts == 1, "{record:?}");
}

#[tokio::test(start_paused = true)]
async fn an_operator_finds_and_resolves_unsettled_records() {
    let store = shared_store();
    let one = Process::on(&store);
    let function = one.engine.function("charge").with_policy(policy());
    let run = async |key: &str| function.run(key, &(), async |_| Err::<u32, _>("timed out".to_owned())).await;
    for key in ["a", "b", "c"] {
        assert!(run(key).await.is_err());
    }
    // One record whose owner is gone, and one that is in neither state.
    let abandoned = one
        .engine
        .function("charge")
        .with_policy(policy())
        .run_in_place("d", &(), async |_| std::future::pending::<Result<u32, String>>().await);
    assert!(tokio::time::timeout(Duration::from_secs(1), abandoned).await.is_err());
    assert!(one.engine.function("other").run("a", &(), async |_| Err::<u32, _>(())).await.is_err());
    sleep(LEASE).await;
    let operator = one.engine.operator("ada").unwrap().with_retention(Duration::from_secs(60)).unwrap();
    let unsettled = operator.unsettled("charge").await.unwrap();
    assert_eq!(unsettled.len(), 4);
    assert!(unsettled.iter().all(|(_, record)| record.label.operation() == "charge"));

    let id_of = |key: &str| function.record_id(&IdempotencyKey::try_from(key).unwrap());
    operator
        .complete(id_of("a"), Some(function.response(&7).unwrap()), "found in the bank's list")
        .await
        .unwrap();
    operator.complete(id_of("b"), None, "found in the bank's list, without its number").await.unwrap();
    assert_eq!(operator.release(id_of("c"), "not in the bank's list").await.unwrap(), StateName::Unknown);
    assert_eq!(operator.release(id_of("d"), "not in the bank's list").await.unwrap(), StateName::Abandoned);
    assert!(operator.unsettled("charge").await.unwrap().is_empty());
    assert_eq!(run("a").await.unwrap(), 7);
    assert!(matches!(run("b").await, Err(FunctionError::Unreplayable)));
    for key in ["c", "d"] {
        assert_eq!(function.run(key, &(), async |_| Ok::<_, String>(8)).await.unwrap(), 8);
    }
    let record = operator.look_up(id_of("a")).await.unwrap().unwrap();
    assert_eq!(record.expires_at.since(record.changed_at), Duration::from_secs(60));

    // An impossible change is refused with its reason.
    let again = operator.release(id_of("a"), "a slip").await.unwrap_err();
    assert!(matches!(again, ResolveError::NeedsAmendment(StateName::Completed)), "{again:?}");
    let nothing = operator.release(id_of("z"), "a slip").await.unwrap_err();
    assert!(matches!(nothing, ResolveError::NoRecord), "{nothing:?}");
    for (reason, why) in [
        ("  ".to_owned(), AuditTextError::Empty),
        ("a\nb".to_owned(), AuditTextError::Control),
        ("ad\u{202e}nimda".to_owned(), AuditTextError::Direction),
        ("ad\u{200f}a".to_owned(), AuditTextError::Direction),
        ("ad\u{200b}a".to_owned(), AuditTextError::Invisible),
        ("ad\u{200d}a".to_owned(), AuditTextError::Invisible),
        ("ad\u{e0041}a".to_owned(), AuditTextError::Invisible),
        ("ad\u{2028}a".to_owned(), AuditTextError::Invisible),
        ("\u{feff}ada".to_owned(), AuditTextError::Invisible),
        ("\u{3164}".to_owned(), AuditTextError::Invisible),
        ("a".repeat(1001), AuditTextError::TooLong { bytes: 1001 }),
    ] {
        let error = operator.release(id_of("z"), &reason).await.unwrap_err();
        assert!(matches!(error, ResolveError::Reason(result) if result == why), "{error:?}");
    }
    assert!(one.engine.operator("").is_err());
    assert!(one.engine.operator(&"a".repeat(1000)).is_ok());
    assert!(one.engine.operator("می\u{200c}خواهم ⚠\u{fe0f}").is_ok());
}
