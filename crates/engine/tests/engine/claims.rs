//! The engine through its public interface: claims, renewals, duplicates, and a store that fails.
//!

//! Time is tokio's paused clock. The store reads it, too, so leases end without real waiting.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::{Events, settle};
use oncegate_core::{
    AttemptId, Claim, Command, Completion, Extent, Fingerprint, IdempotencyKey, Label, MemoryStore,
    OnAbandoned, RecordId, Scope, StateName, Store, StoreErrorKind, StoredResponse, limits,
};
use oncegate_engine::{
    ClaimOutcome, ClaimRequest, CompleterOptions, Engine, EventKind, Permit, Policy, SettleOutcome,
};
use oncegate_testkit::{Fault, Faults, FaultyStore, Latch, Operation};
use tokio::time::{Instant, sleep};

const LEASE: Duration = Duration::from_secs(30);

struct World {
    engine: Engine,
    store: Arc<dyn Store>,
    faults: Faults,
    events: Events,
}

impl World {
    fn new() -> Self {
        Self::on(Arc::new(MemoryStore::new(crate::support::clock())))
    }

    /// Another engine on the same records, as in another process.
    fn on(store: Arc<dyn Store>) -> Self {
        let events = Events::default();
        let (faulty, faults) = FaultyStore::new(store.clone());
        let faulty = crate::support::store_of(module_path!(), faulty);
        let engine = Engine::builder(faulty).with_observer(events.clone()).build();
        Self { engine, store, faults, events }
    }

    async fn state(&self) -> Option<StateName> {
        self.store.lookup(id()).await.unwrap().map(|record| record.state_name(self.store.now()))
    }

    async fn claim(&self, request: ClaimRequest) -> ClaimOutcome {
        self.engine.claim(request).await.unwrap()
    }

    async fn permit(&self, request: ClaimRequest) -> Permit {
        match self.claim(request).await {
            ClaimOutcome::Execute(permit) => permit,
            other => panic!("expected to execute, got {other:?}"),
        }
    }
}

/// Many rounds, because what it looks for needs two threads at the same place.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_simultaneous_claims_one_asks_the_store_and_executes() {
    const CLAIMS: usize = 4;
    let world = World::on(Arc::new(MemoryStore::default()));
    for round in 1..=1_000_usize {
        let together = Arc::new(tokio::sync::Barrier::new(CLAIMS));
        let key = IdempotencyKey::new(round.to_string()).unwrap();
        let request = ClaimRequest { id: RecordId::derive(&Scope::single_tenant(), &key), ..request() };
        let claims: Vec<_> = (0..CLAIMS)
            .map(|_| {
                let (engine, request, together) = (world.engine.clone(), request.clone(), together.clone());
                tokio::spawn(async move {
                    together.wait().await;
                    engine.claim(request).await.unwrap()
                })
            })
            .collect();
        let mut permits = Vec::new();
        for claim in claims {
            match claim.await.unwrap() {
                ClaimOutcome::Execute(permit) => permits.push(permit),
                ClaimOutcome::InProgress { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        // One claim of each round, and one replay of each round before it.
        assert_eq!((permits.len(), world.faults.calls(Operation::Claim)), (1, 2 * round - 1));
        assert_eq!(world.engine.in_flight(), 1);
        for permit in permits {
            permit.complete(Completion::Tombstone).await;
        }
        assert!(matches!(world.claim(request).await, ClaimOutcome::Unreplayable));
        assert_eq!(world.engine.in_flight(), 0);
    }
}

fn id() -> RecordId {
    RecordId::derive(&Scope::single_tenant(), &IdempotencyKey::new(b"k").unwrap())
}

fn request() -> ClaimRequest {
    ClaimRequest {
        id: id(),
        fingerprint: Fingerprint::of_parts("test", &[b"a"]),
        label: Label::default(),
        policy: Policy::default().with_lease(LEASE).unwrap().with_wait(Duration::ZERO).unwrap(),
    }
}

fn waiting(wait: Duration) -> ClaimRequest {
    ClaimRequest { policy: request().policy.with_wait(wait).unwrap(), ..request() }
}

fn reexecuting() -> ClaimRequest {
    ClaimRequest { policy: request().policy.with_on_abandoned(OnAbandoned::Reexecute), ..request() }
}

fn another() -> ClaimRequest {
    ClaimRequest { fingerprint: Fingerprint::of_parts("test", &[b"b"]), ..request() }
}

fn response(body: &'static str) -> Completion {
    Completion::Replayable(StoredResponse::new(201, &[], &[body.into()], &[]).unwrap())
}

fn replays(outcome: &ClaimOutcome, body: &str) -> bool {
    matches!(outcome, ClaimOutcome::Replay(response) if response.body() == body)
}

#[tokio::test(start_paused = true)]
async fn one_of_a_hundred_equal_claims_executes_and_the_others_get_its_response() {
    let world = Arc::new(World::new());
    let mut claims = Vec::new();
    for _ in 0..100 {
        let world = world.clone();
        claims.push(tokio::spawn(async move {
            match world.claim(waiting(LEASE)).await {
                ClaimOutcome::Execute(permit) => {
                    sleep(Duration::from_secs(1)).await;
                    assert!(matches!(permit.complete(response("one")).await, SettleOutcome::Done));
                    true
                }
                outcome => {
                    assert!(replays(&outcome, "one"), "{outcome:?}");
                    false
                }
            }
        }));
    }
    let mut executed = 0;
    for claim in claims {
        executed += usize::from(claim.await.unwrap());
    }
    assert_eq!(executed, 1);
    assert_eq!(world.faults.calls(Operation::Claim), 1, "single-flight: one claim reached the store");
    assert_eq!(world.events.count_if(|kind| matches!(kind, EventKind::Replayed { waited: true })), 99);
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_that_does_not_wait_gets_in_progress() {
    let world = World::new();
    let permit = world.permit(request()).await;
    sleep(Duration::from_secs(5)).await;
    let ClaimOutcome::InProgress { lease_left, .. } = world.claim(request()).await else { panic!() };
    assert_eq!(lease_left, Duration::from_secs(25));
    permit.complete(response("one")).await;
    assert!(replays(&world.claim(request()).await, "one"));
}

#[tokio::test(start_paused = true)]
async fn a_waiter_gives_up_at_its_deadline_and_does_not_disturb_the_owner() {
    let world = World::new();
    let permit = world.permit(request()).await;
    let asked = Instant::now();
    assert!(matches!(world.claim(waiting(Duration::from_secs(5))).await, ClaimOutcome::InProgress { .. }));
    assert_eq!(asked.elapsed(), Duration::from_secs(5));
    assert!(matches!(permit.complete(response("one")).await, SettleOutcome::Done));
}

#[tokio::test(start_paused = true)]
async fn a_waiter_executes_when_the_owner_releases() {
    let world = Arc::new(World::new());
    let permit = world.permit(request()).await;
    let first = permit.attempt().token();
    let waiter = {
        let world = world.clone();
        tokio::spawn(async move { world.permit(waiting(LEASE)).await })
    };
    settle().await;
    permit.release().await;
    let second = waiter.await.unwrap();
    assert!(second.attempt().token() > first);
    assert_eq!(second.attempt().number(), 2);
    second.complete(response("two")).await;
}

#[tokio::test(start_paused = true)]
async fn a_mismatch_is_reported_before_anything_else() {
    let world = World::new();
    let permit = world.permit(request()).await;
    assert!(matches!(world.claim(another()).await, ClaimOutcome::Mismatch), "while in flight");
    let elsewhere = World::on(world.store.clone());
    assert!(
        matches!(elsewhere.claim(another()).await, ClaimOutcome::Mismatch),
        "while in flight in another process"
    );
    permit.complete(response("one")).await;
    assert!(matches!(world.claim(another()).await, ClaimOutcome::Mismatch), "after completion");
    assert!(replays(&world.claim(request()).await, "one"));
}

#[tokio::test(start_paused = true)]
async fn renewals_keep_the_lease_of_a_slow_handler() {
    let world = World::new();
    let elsewhere = World::on(world.store.clone());
    let permit = world.permit(request()).await;
    for _ in 0..20 {
        sleep(LEASE / 2).await;
        assert!(matches!(elsewhere.claim(reexecuting()).await, ClaimOutcome::InProgress { .. }));
        assert!(permit.attempt().is_owner());
    }
    assert!(matches!(permit.complete(response("one")).await, SettleOutcome::Done));
    assert!(world.events.count_if(|kind| *kind == EventKind::Renewed) >= 20);
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_ended_is_not_renewed() {
    let world = World::new();
    world.permit(request()).await.complete(response("one")).await;
    drop(world.permit(ClaimRequest { id: RecordId::from_bytes([1; 32]), ..request() }).await);
    sleep(LEASE * 3).await;
    assert_eq!(world.faults.calls(Operation::Renew), 0);
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_ended_during_an_outage_is_renewed_again() {
    let world = World::new();
    let permit = world.permit(request()).await;
    world.faults.always(Operation::Renew, Fault::Refuse);
    sleep(LEASE * 2).await;
    assert!(!permit.attempt().is_owner());
    assert!(world.events.has(EventKind::RenewalFailed(StoreErrorKind::Unavailable)));
    world.faults.heal();
    sleep(Duration::from_secs(2)).await;
    assert!(permit.attempt().is_owner());
    assert!(matches!(permit.complete(response("one")).await, SettleOutcome::Done));
}

#[tokio::test(start_paused = true)]
async fn a_zombie_learns_that_it_lost_its_lease_and_is_fenced() {
    let zombie = World::new();
    let other = World::on(zombie.store.clone());
    let permit = zombie.permit(request()).await;
    zombie.faults.always(Operation::Renew, Fault::Refuse);
    sleep(LEASE + Duration::from_secs(1)).await;

    let taken = other.permit(reexecuting()).await;
    assert!(taken.attempt().token() > permit.attempt().token());
    assert!(taken.attempt().is_after_abandoned());
    zombie.faults.heal();
    tokio::time::timeout(LEASE, permit.attempt().lost()).await.expect("the zombie learns that it lost");
    assert!(zombie.events.has(EventKind::LeaseLost));

    assert!(matches!(permit.complete(response("zombie")).await, SettleOutcome::Fenced));
    assert!(zombie.events.has(EventKind::Fenced));
    assert!(matches!(taken.complete(response("other")).await, SettleOutcome::Done));
    assert!(replays(&zombie.claim(request()).await, "other"));
}

#[tokio::test(start_paused = true)]
async fn a_dropped_permit_never_frees_the_key() {
    let world = World::new();
    drop(world.permit(request()).await);
    assert!(world.events.has(EventKind::Abandoned));
    assert!(matches!(world.claim(request()).await, ClaimOutcome::InProgress { .. }));
    sleep(LEASE).await;
    assert!(matches!(world.claim(request()).await, ClaimOutcome::Unknown));
    assert_eq!(world.state().await, Some(StateName::Unknown));
    // Parked stays parked, also on a route that would execute again.
    assert!(matches!(world.claim(reexecuting()).await, ClaimOutcome::Unknown));
}

#[tokio::test(start_paused = true)]
async fn a_parked_outcome_becomes_known_when_its_slow_owner_completes() {
    let slow = World::new();
    let other = World::on(slow.store.clone());
    let permit = slow.permit(request()).await;
    slow.faults.always(Operation::Renew, Fault::Refuse);
    sleep(LEASE).await;
    assert!(matches!(other.claim(request()).await, ClaimOutcome::Unknown));
    assert!(matches!(permit.complete(response("late")).await, SettleOutcome::Done));
    assert!(replays(&other.claim(request()).await, "late"));
}

#[tokio::test(start_paused = true)]
async fn a_completion_that_fails_once_is_retried_in_the_background() {
    let world = World::new();
    let permit = world.permit(request()).await;
    world.faults.next(1, Operation::Complete, Fault::Refuse);
    assert!(matches!(permit.complete(response("one")).await, SettleOutcome::Deferred(_)));
    assert!(
        matches!(world.claim(request()).await, ClaimOutcome::InProgress { .. }),
        "the operation does not run again meanwhile"
    );
    sleep(Duration::from_secs(1)).await;
    assert!(replays(&world.claim(request()).await, "one"));
    assert!(world.events.has(EventKind::Completed));
}

#[tokio::test(start_paused = true)]
async fn a_completion_whose_reply_is_lost_succeeds_when_it_is_sent_again() {
    let world = World::new();
    let permit = world.permit(request()).await;
    world.faults.next(1, Operation::Complete, Fault::LoseReply);
    assert!(matches!(permit.complete(response("one")).await, SettleOutcome::Deferred(_)));
    sleep(Duration::from_secs(1)).await;
    assert!(world.events.has(EventKind::Completed) && !world.events.has(EventKind::Fenced));
}

#[tokio::test(start_paused = true)]
async fn a_lost_completion_is_an_unknown_outcome_and_never_a_second_execution() {
    let world = World::new();
    let permit = world.permit(request()).await;
    world.faults.always(Operation::Complete, Fault::Refuse);
    assert!(matches!(permit.complete(response("one")).await, SettleOutcome::Deferred(_)));
    sleep(LEASE + Duration::from_secs(1)).await;
    let other = World::on(world.store.clone());
    assert!(matches!(other.claim(request()).await, ClaimOutcome::Unknown));
    // Until the retention of the record ends, the owner may still report the outcome.
    assert!(!world.events.has(EventKind::SettlementLost));
    sleep(request().policy.retention()).await;
    assert!(world.events.has(EventKind::SettlementLost));
}

#[tokio::test(start_paused = true)]
async fn a_completion_is_written_after_an_outage_that_outlasted_its_lease() {
    for hours in [0, 1, 20] {
        let world = World::new();
        let permit = world.permit(request()).await;
        world.faults.outage();
        assert!(matches!(permit.complete(response("one")).await, SettleOutcome::Deferred(_)));
        sleep(LEASE * 2 + Duration::from_secs(hours * 3600)).await;
        // Another process asks first and parks the record.
        let other = World::on(world.store.clone());
        assert!(matches!(other.claim(request()).await, ClaimOutcome::Unknown));
        world.faults.heal();
        sleep(Duration::from_secs(3)).await;
        assert!(replays(&other.claim(request()).await, "one"), "after {hours} h");
        assert!(!world.events.has(EventKind::SettlementLost));
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_reply_is_lost_is_recognised() {
    let world = World::new();
    world.faults.next(1, Operation::Claim, Fault::LoseReply);
    let permit = world.permit(request()).await;
    assert_eq!(permit.attempt().number(), 1);
    assert!(matches!(permit.complete(response("one")).await, SettleOutcome::Done));
}

#[tokio::test(start_paused = true)]
async fn a_granted_claim_whose_reply_was_lost_is_taken_back() {
    let world = World::new();
    world.faults.next(2, Operation::Claim, Fault::LoseReply);
    let error = world.engine.claim(request()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert_eq!(world.state().await, Some(StateName::InProgress), "the store granted the claim");
    sleep(Duration::from_secs(1)).await;
    assert_eq!(world.state().await, Some(StateName::Released));
    world.permit(request()).await.complete(response("one")).await;
}

#[tokio::test(start_paused = true)]
async fn taking_back_a_claim_that_was_never_granted_makes_no_record() {
    let world = World::new();
    world.faults.outage();
    assert!(world.engine.claim(request()).await.is_err());
    let asked = world.faults.calls(Operation::Claim);
    sleep(Duration::from_secs(1)).await;
    world.faults.heal();
    sleep(LEASE).await;
    assert_eq!(world.faults.calls(Operation::Claim), asked, "no further claim was sent");
    assert_eq!(world.state().await, None, "no record was made");
    assert_eq!(world.permit(request()).await.attempt().number(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_reaches_the_store_late_is_taken_back() {
    // From milliseconds after the store was reported out of reach until the engine hardly looks any more.
    for arrives in [200, 29_000, 290_000] {
        let world = World::new();
        world.faults.next(2, Operation::Claim, Fault::Delay);
        assert!(world.engine.claim(request()).await.is_err());
        sleep(Duration::from_millis(arrives)).await;
        assert_eq!(world.state().await, None);
        world.faults.arrive().await;
        assert_eq!(world.state().await, Some(StateName::InProgress));
        // Before another claim can find the record abandoned.
        sleep(LEASE - Duration::from_millis(1)).await;
        assert_eq!(world.state().await, Some(StateName::Released), "the claim arrived after {arrives} ms");
        assert!(world.events.has(EventKind::ClaimCancelled));
        let looks = world.faults.calls(Operation::Lookup);
        assert!((3..50).contains(&looks), "{looks} looks");
        world.permit(request()).await.complete(response("one")).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_late_claim_is_taken_back_after_another_attempt_has_failed() {
    let world = World::new();
    world.faults.next(2, Operation::Claim, Fault::Delay);
    assert!(world.engine.claim(request()).await.is_err());
    let permit = world.permit(request()).await;
    sleep(Duration::from_secs(1)).await;
    permit.release().await;
    world.faults.arrive().await;
    assert_eq!(world.state().await, Some(StateName::InProgress));
    sleep(LEASE).await;
    assert_eq!(world.state().await, Some(StateName::Released));
}

#[tokio::test(start_paused = true)]
async fn a_late_claim_is_taken_back_although_its_second_try_found_another_owner() {
    let another = ClaimRequest { fingerprint: Fingerprint::of_parts("test", &[b"b"]), ..request() };
    for (owned, is_same) in [(request(), true), (another, false)] {
        let world = World::new();
        let other = World::on(world.store.clone());
        let permit = other.permit(owned).await;
        world.faults.next(1, Operation::Claim, Fault::Delay);
        match world.engine.claim(request()).await.unwrap() {
            ClaimOutcome::InProgress { .. } => assert!(is_same),
            ClaimOutcome::Mismatch => assert!(!is_same),
            outcome => panic!("{outcome:?}"),
        }
        permit.release().await;
        world.faults.arrive().await;
        assert_eq!(
            world.state().await,
            Some(StateName::InProgress),
            "the claim arrived, and no attempt executes under it"
        );
        sleep(LEASE).await;
        assert_eq!(
            world.state().await,
            Some(StateName::Released),
            "the owner's request is the same: {is_same}"
        );
    }
}

/// For example a claim whose commit waits for a standby that is away.
#[tokio::test(start_paused = true)]
async fn a_claim_that_becomes_visible_hours_later_is_taken_back() {
    let world = World::new();
    world.faults.next(2, Operation::Claim, Fault::Delay);
    assert!(world.engine.claim(request()).await.is_err());
    sleep(Duration::from_secs(20 * 3600)).await;
    let looks = world.faults.calls(Operation::Lookup);
    assert!(looks < 2500, "{looks} looks");
    world.faults.arrive().await;
    sleep(Duration::from_secs(40)).await;
    assert_eq!(world.state().await, Some(StateName::Released));
    // Not for ever: by then the retention of a record would have ended.
    let world = World::new();
    world.faults.next(2, Operation::Claim, Fault::Delay);
    assert!(world.engine.claim(request()).await.is_err());
    sleep(LEASE + request().policy.retention() + Duration::from_secs(31)).await;
    let looks = world.faults.calls(Operation::Lookup);
    sleep(Duration::from_secs(3600)).await;
    assert_eq!(world.faults.calls(Operation::Lookup), looks);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_is_lost_for_longer_than_its_lease_parks_nothing() {
    let world = World::new();
    world.faults.next(2, Operation::Claim, Fault::LoseReply);
    world.faults.always(Operation::Lookup, Fault::Refuse);
    assert!(world.engine.claim(request()).await.is_err());
    assert_eq!(world.state().await, Some(StateName::InProgress));
    sleep(LEASE * 2).await;
    assert_eq!(world.state().await, Some(StateName::Abandoned));
    // While the outcome of the first claim is unknown, a second claim is refused, and the record is not parked.
    let error = world.engine.claim(request()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert_eq!(world.state().await, Some(StateName::Abandoned));
    // Of two claims that arrive as soon as the store answers, one executes.
    world.faults.heal();
    world.permit(request()).await.complete(response("one")).await;
    sleep(LEASE * 2).await;
    assert!(replays(&world.claim(request()).await, "one"));
}

/// A commit that waits for a standby returns after the lease, between the lookup of a retry and its claim.
#[tokio::test(start_paused = true)]
async fn a_retry_takes_over_a_claim_that_becomes_visible_after_its_lease() {
    let world = World::new();
    world.faults.next(2, Operation::Claim, Fault::Delay);
    assert!(world.engine.claim(request()).await.is_err());
    sleep(Duration::from_secs(1)).await;
    let latch = Latch::new();
    world.faults.next(1, Operation::Claim, Fault::StallBefore(latch.clone()));
    let engine = world.engine.clone();
    let retry = tokio::spawn(async move { engine.claim(request()).await });
    settle().await;
    world.faults.always(Operation::Lookup, Fault::Refuse);
    world.faults.arrive().await;
    sleep(LEASE * 2).await;
    assert_eq!(world.state().await, Some(StateName::Abandoned));
    latch.open();
    let ClaimOutcome::Execute(permit) = retry.await.unwrap().unwrap() else {
        panic!("the record was parked")
    };
    permit.complete(response("one")).await;
    world.faults.heal();
    assert!(replays(&world.claim(request()).await, "one"));
}

/// A retry that took the doubtful claim over and then fails leaves it to be looked for again.
#[tokio::test(start_paused = true)]
async fn a_doubtful_claim_that_a_failed_retry_took_over_is_looked_for_again() {
    let world = World::new();
    for fault in [Fault::Refuse, Fault::Delay] {
        world.faults.next(2, Operation::Claim, Fault::Delay);
        assert!(world.engine.claim(request()).await.is_err());
        world.faults.next(2, Operation::Claim, fault);
        assert!(world.engine.claim(request()).await.is_err());
        sleep(Duration::from_secs(1)).await;
        world.faults.arrive().await;
        assert_eq!(
            world.state().await,
            Some(StateName::InProgress),
            "the claim arrived, and no attempt executes under it"
        );
        sleep(LEASE - Duration::from_millis(1)).await;
        assert_eq!(world.state().await, Some(StateName::Released));
    }
}

/// Such as one that is refused because a replica is away, each time that it is sent.
#[tokio::test(start_paused = true)]
async fn a_claim_whose_replies_are_all_lost_is_released_by_its_token() {
    let world = World::new();
    world.faults.always(Operation::Claim, Fault::LoseReply);
    assert!(world.engine.claim(request()).await.is_err());
    assert_eq!(world.state().await, Some(StateName::InProgress));
    sleep(LEASE / 2).await;
    assert_eq!(world.state().await, Some(StateName::Released));
    assert!(world.events.has(EventKind::ClaimCancelled));
}

#[tokio::test(start_paused = true)]
async fn a_late_copy_of_a_claim_that_was_granted_and_released_is_taken_back() {
    for cancelled in [false, true] {
        let world = World::new();
        world.faults.next(1, Operation::Claim, Fault::Delay);
        if cancelled {
            let latch = Latch::new();
            world.faults.next(1, Operation::Claim, Fault::StallAfter(latch.clone()));
            let claim = tokio::spawn({
                let engine = world.engine.clone();
                async move { drop(engine.claim(request()).await) }
            });
            sleep(Duration::from_secs(1)).await;
            claim.abort();
            latch.open();
        } else {
            assert!(matches!(world.permit(request()).await.release().await, SettleOutcome::Done));
        }
        sleep(Duration::from_secs(1)).await;
        assert_eq!(world.state().await, Some(StateName::Released));
        world.faults.arrive().await;
        assert_eq!(
            world.state().await,
            Some(StateName::InProgress),
            "the claim arrived, and no attempt executes under it"
        );
        sleep(LEASE - Duration::from_millis(1)).await;
        assert_eq!(world.state().await, Some(StateName::Released), "cancelled: {cancelled}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_search_for_a_lost_claim_ends_with_a_completion_or_with_the_engine() {
    let world = World::new();
    world.faults.next(2, Operation::Claim, Fault::Delay);
    assert!(world.engine.claim(request()).await.is_err());
    world.permit(request()).await.complete(response("one")).await;
    sleep(Duration::from_secs(1)).await;
    let looks = world.faults.calls(Operation::Lookup);
    sleep(LEASE).await;
    assert_eq!(world.faults.calls(Operation::Lookup), looks);

    let world = World::new();
    world.faults.next(2, Operation::Claim, Fault::Delay);
    assert!(world.engine.claim(request()).await.is_err());
    sleep(Duration::from_secs(1)).await;
    world.faults.arrive().await;
    let begun = Instant::now();
    assert_eq!(world.engine.drain(LEASE).await, 0);
    assert_eq!(begun.elapsed(), Duration::ZERO);
    assert_eq!(world.state().await, Some(StateName::Released), "the engine looked a last time");
}

#[tokio::test(start_paused = true)]
async fn during_an_outage_all_duplicates_fail_and_share_their_claims() {
    let world = Arc::new(World::new());
    world.faults.outage();
    let claims: Vec<_> = (0..20)
        .map(|_| {
            let world = world.clone();
            tokio::spawn(async move { world.engine.claim(request()).await.unwrap_err().kind() })
        })
        .collect();
    for claim in claims {
        assert_eq!(claim.await.unwrap(), StoreErrorKind::Unavailable);
    }
    assert_eq!(world.events.count_if(|kind| matches!(kind, EventKind::ClaimFailed(_))), 20);
    assert!(world.faults.calls(Operation::Claim) <= 4, "{}", world.faults.calls(Operation::Claim));
}

#[tokio::test(start_paused = true)]
async fn duplicates_of_a_claim_that_a_full_store_refused_do_not_take_it_for_an_outage() {
    let world = Arc::new(World::new());
    world.faults.always(Operation::Claim, Fault::Full);
    let claims: Vec<_> = (0..20)
        .map(|_| {
            let world = world.clone();
            tokio::spawn(async move { world.engine.claim(request()).await.unwrap_err().extent() })
        })
        .collect();
    for claim in claims {
        assert_eq!(claim.await.unwrap(), Extent::Writes, "an entry point may fail open in an outage");
    }
    assert!(world.faults.calls(Operation::Claim) < 20, "no claim shared the failure of another");
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_leaves_during_its_claim_leaves_no_record_in_progress() {
    let world = World::new();
    let latch = Latch::new();
    world.faults.next(1, Operation::Claim, Fault::StallAfter(latch.clone()));
    let caller = {
        let engine = world.engine.clone();
        tokio::spawn(async move { engine.claim(request()).await.map(drop) })
    };
    settle().await;
    assert_eq!(world.state().await, Some(StateName::InProgress));
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    latch.open();
    settle().await;
    assert_eq!(world.state().await, Some(StateName::Released));
    assert!(world.events.has(EventKind::ClaimCancelled));
}

#[tokio::test(start_paused = true)]
async fn taking_back_a_claim_keeps_the_abandoned_attempt_before_it() {
    let reconciling =
        || ClaimRequest { policy: request().policy.with_on_abandoned(OnAbandoned::Reconcile), ..request() };
    for is_told in [true, false] {
        let world = World::new();
        drop(world.permit(request()).await);
        sleep(LEASE).await;
        if is_told {
            world.faults.next(2, Operation::Claim, Fault::LoseReply);
            assert!(world.engine.claim(reconciling()).await.is_err());
        } else {
            let latch = Latch::new();
            world.faults.next(1, Operation::Claim, Fault::StallAfter(latch.clone()));
            let engine = world.engine.clone();
            let caller = tokio::spawn(async move { engine.claim(reconciling()).await.map(drop) });
            settle().await;
            caller.abort();
            assert!(caller.await.unwrap_err().is_cancelled());
            latch.open();
        }
        // Its own lease has to end first; then the next claim has to find out the outcome of the first attempt.
        sleep(LEASE * 2).await;
        let permit = world.permit(reconciling()).await;
        assert!(permit.attempt().is_after_abandoned());
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_gets_a_completion_of_another_process() {
    let world = World::new();
    let other = World::on(world.store.clone());
    let heard_of = other.events.clone();
    let permit = world.permit(request()).await;
    let waiter = tokio::spawn(async move {
        let outcome = other.claim(waiting(LEASE)).await;
        (outcome, Instant::now())
    });
    sleep(Duration::from_secs(3)).await;
    permit.complete(response("one")).await;
    let completed = Instant::now();
    let (outcome, heard) = waiter.await.unwrap();
    assert!(replays(&outcome, "one"));
    assert!(heard_of.has(EventKind::Replayed { waited: true }));
    assert!(heard - completed <= Duration::from_millis(500));
}

/// A store that learns of completions when the test says so, and counts how many callers wait for one.
struct NotifyingStore {
    inner: Arc<dyn Store>,
    notification: tokio::sync::Notify,
    waiting: AtomicUsize,
    spurious: bool,
}

impl NotifyingStore {
    fn on(inner: Arc<dyn Store>, spurious: bool) -> Arc<Self> {
        let (notification, waiting) = (tokio::sync::Notify::new(), AtomicUsize::new(0));
        Arc::new(Self { inner, notification, waiting, spurious })
    }
}

struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

struct NotifyingStoreHandle(Arc<NotifyingStore>);

impl Store for NotifyingStoreHandle {
    fn changed(&self, _: RecordId) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        self.0.waiting.fetch_add(1, Ordering::SeqCst);
        let waiting = Waiting(&self.0.waiting);
        Box::pin(async move {
            let _waiting = waiting;
            if !self.0.spurious {
                self.0.notification.notified().await;
            }
        })
    }

    oncegate_core::delegate_store!(self, self.0.inner => apply lookup list purge audit check now capabilities);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_is_notified_of_a_completion_does_not_wait_for_its_next_poll() {
    let world = World::new();
    let notifying = NotifyingStore::on(world.store.clone(), false);
    let other = World::on(Arc::new(NotifyingStoreHandle(notifying.clone())));
    // A claim that does not wait does not ask for notifications either.
    let permit = world.permit(request()).await;
    assert!(matches!(other.claim(request()).await, ClaimOutcome::InProgress { .. }));
    assert_eq!(notifying.waiting.load(Ordering::SeqCst), 0);
    let faults = other.faults.clone();
    let waiter = tokio::spawn(async move { other.claim(waiting(LEASE)).await });
    // A long wait, so that the waiter asks seldom.
    sleep(Duration::from_secs(3)).await;
    let asked = faults.calls(Operation::Claim);
    assert_eq!(notifying.waiting.load(Ordering::SeqCst), 1);
    permit.complete(response("one")).await;
    let completed = Instant::now();
    notifying.notification.notify_one();
    assert!(replays(&waiter.await.unwrap(), "one"));
    assert_eq!(completed.elapsed(), Duration::ZERO);
    assert_eq!(faults.calls(Operation::Claim), asked + 1);
    assert_eq!(notifying.waiting.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_leaves_stops_polling_and_the_waiters_next_to_it_wait_on() {
    let world = World::new();
    let notifying = NotifyingStore::on(world.store.clone(), false);
    let other = Arc::new(World::on(Arc::new(NotifyingStoreHandle(notifying.clone()))));
    let permit = world.permit(request()).await;
    let wait = || {
        let other = other.clone();
        tokio::spawn(async move { other.claim(waiting(LEASE)).await })
    };
    let (first, second) = (wait(), wait());
    sleep(Duration::from_secs(3)).await;
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    sleep(Duration::from_secs(1)).await;
    assert_eq!(notifying.waiting.load(Ordering::SeqCst), 1, "one waiter for both claims");
    permit.complete(response("one")).await;
    assert!(replays(&second.await.unwrap(), "one"));

    let permit = world.permit(ClaimRequest { id: RecordId::from_bytes([7; 32]), ..request() }).await;
    let waiter = tokio::spawn({
        let other = other.clone();
        async move { other.claim(ClaimRequest { id: RecordId::from_bytes([7; 32]), ..waiting(LEASE) }).await }
    });
    sleep(Duration::from_secs(3)).await;
    waiter.abort();
    sleep(Duration::from_millis(1)).await;
    assert_eq!((notifying.waiting.load(Ordering::SeqCst), other.engine.in_flight()), (0, 0));
    let asked = other.faults.calls(Operation::Claim);
    sleep(Duration::from_secs(10)).await;
    assert_eq!(other.faults.calls(Operation::Claim), asked, "no waiter asks any more");
    drop(permit);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_notifies_without_end_is_not_polled_without_end() {
    let world = World::new();
    let other = World::on(Arc::new(NotifyingStoreHandle(NotifyingStore::on(world.store.clone(), true))));
    let _permit = world.permit(request()).await;
    let begun = Instant::now();
    let outcome = other.claim(waiting(Duration::from_secs(10))).await;
    assert!(matches!(outcome, ClaimOutcome::InProgress { .. }));
    assert_eq!(begun.elapsed().as_secs(), 10, "the waiter waits as long as the policy allows");
    let asked = other.faults.calls(Operation::Claim);
    assert!(asked <= 10 * 40 + 2, "{asked}");
}

#[tokio::test(start_paused = true)]
async fn a_waiter_without_notifications_polls_seldom_until_its_deadline() {
    let world = World::new();
    let other = World::on(world.store.clone());
    let _permit = world.permit(request()).await;
    let begun = Instant::now();
    let outcome = other.claim(waiting(Duration::from_millis(10_300))).await;
    assert!(matches!(outcome, ClaimOutcome::InProgress { .. }));
    assert_eq!(begun.elapsed(), Duration::from_millis(10_300));
    let asked = other.faults.calls(Operation::Claim);
    assert!((20..30).contains(&asked), "{asked}");
}

#[tokio::test(start_paused = true)]
async fn draining_waits_for_spawned_tasks_and_reports_the_remaining_ones() {
    let world = World::new();
    let permit = world.permit(request()).await;
    world.engine.spawn(async move {
        sleep(Duration::from_secs(5)).await;
        permit.complete(response("one")).await;
    });
    assert_eq!(world.engine.drain(Duration::from_secs(1)).await, 1);
    assert_eq!(world.engine.drain(Duration::from_secs(60)).await, 0);
    assert!(replays(&world.claim(request()).await, "one"));
}

#[tokio::test(start_paused = true)]
async fn expired_records_are_purged_in_the_background() {
    let world = World::new();
    let policy = request().policy.with_retention(Duration::from_secs(10)).unwrap();
    world.permit(ClaimRequest { policy, ..request() }).await.complete(response("one")).await;
    sleep(Duration::from_secs(9)).await;
    assert!(replays(&world.claim(request()).await, "one"), "the record is kept for its retention");
    sleep(LEASE + Duration::from_secs(20)).await;
    assert!(world.faults.calls(Operation::Purge) > 0);
    assert_eq!(world.state().await, None);
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_renewed_when_nothing_else_wakes_the_renewer() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new(crate::support::clock()));
    let engine = Engine::builder(store.clone()).with_purge_interval(None).unwrap().build();
    let world = World { engine, ..World::on(store) };
    world.permit(request()).await.release().await;
    // By now the renewer has nothing to do and sleeps.
    sleep(LEASE).await;
    let permit = world.permit(request()).await;
    sleep(LEASE * 3).await;
    assert_eq!(world.state().await, Some(StateName::InProgress));
    assert!(permit.attempt().is_owner());
}

#[test]
fn leases_are_renewed_on_a_later_runtime_when_an_earlier_one_is_gone() {
    let runtime =
        || tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let first = runtime();
    let world = first.block_on(async {
        let world = World::new();
        world.permit(request()).await.release().await;
        sleep(Duration::from_secs(1)).await;
        world
    });
    drop(first);
    runtime().block_on(async {
        let permit = world.permit(request()).await;
        sleep(LEASE * 3).await;
        assert_eq!(world.state().await, Some(StateName::InProgress));
        assert!(permit.attempt().is_owner());
    });
}

#[tokio::test(start_paused = true)]
async fn purging_keeps_up_with_many_records() {
    const RECORDS: u32 = 100_000;
    let store = Arc::new(MemoryStore::new(crate::support::clock()));
    let world = World::on(store.clone());
    for number in 0..RECORDS {
        let key = IdempotencyKey::new(number.to_be_bytes()).unwrap();
        let claim = Claim {
            attempt: AttemptId::new(number.into()),
            fingerprint: request().fingerprint,
            lease: Duration::from_secs(1),
            retention: Duration::from_secs(10),
            on_abandoned: OnAbandoned::Park,
            label: Label::default(),
        };
        store.apply(RecordId::derive(&Scope::single_tenant(), &key), Command::Claim(claim)).await.unwrap();
    }
    world.permit(request()).await.release().await;
    assert_eq!(store.len(), RECORDS as usize + 1);
    // All records expire together, and the engine purges every second.
    sleep(Duration::from_secs(16)).await;
    assert_eq!(store.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn every_claim_has_exactly_one_outcome() {
    let world = World::new();
    let permit = world.permit(request()).await;
    world.claim(request()).await;
    world.claim(another()).await;
    permit.complete(Completion::Tombstone).await;
    assert!(matches!(world.claim(request()).await, ClaimOutcome::Unreplayable));
    world.faults.outage();
    assert!(world.engine.claim(request()).await.is_err());
    let of_claims = |kind: &EventKind| {
        matches!(
            kind,
            EventKind::Executing { .. }
                | EventKind::Replayed { .. }
                | EventKind::InProgress
                | EventKind::Mismatch
                | EventKind::Unknown
                | EventKind::Unreplayable
                | EventKind::ClaimFailed(_)
        )
    };
    assert_eq!(world.events.count_if(of_claims), 5);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_beyond_the_limit_gets_in_progress_at_once() {
    let world = Arc::new(World::new());
    let permit = world.permit(request()).await;
    let waiters: Vec<_> = (0..limits::MAX_WAITERS)
        .map(|_| {
            let world = world.clone();
            tokio::spawn(async move { replays(&world.claim(waiting(LEASE)).await, "one") })
        })
        .collect();
    settle().await;
    let asked = Instant::now();
    assert!(matches!(world.claim(waiting(LEASE)).await, ClaimOutcome::InProgress { .. }));
    assert_eq!(asked.elapsed(), Duration::ZERO);
    permit.complete(response("one")).await;
    for waiter in waiters {
        assert!(waiter.await.unwrap());
    }
}

/// The claim of a record of its own.
fn numbered(number: usize) -> ClaimRequest {
    let key = IdempotencyKey::new(number.to_string().as_bytes()).unwrap();
    ClaimRequest { id: RecordId::derive(&Scope::single_tenant(), &key), ..request() }
}

#[tokio::test(start_paused = true)]
async fn each_attempt_that_began_keeps_its_end_until_the_store_accepts_it() {
    const COUNT: usize = 4000;
    let world = World::new();
    let mut permits = Vec::new();
    for number in 0..COUNT {
        permits.push(world.permit(numbered(number)).await);
    }
    world.faults.always(Operation::Complete, Fault::Refuse);
    for permit in permits {
        assert!(matches!(permit.complete(response("one")).await, SettleOutcome::Deferred(_)));
    }
    world.faults.heal();
    // The lease lasts, so no other claim can come first.
    tokio::time::sleep(LEASE / 2).await;
    for number in 0..COUNT {
        assert!(replays(&world.claim(numbered(number)).await, "one"), "{number}");
    }
    assert!(!world.events.has(EventKind::SettlementLost));
}

#[tokio::test(start_paused = true)]
async fn an_end_without_memory_for_its_response_is_stored_without_it() {
    let body = bytes::Bytes::from(vec![b'x'; 1024 * 1024]);
    let large =
        || Completion::Replayable(StoredResponse::new(200, &[], std::slice::from_ref(&body), &[]).unwrap());
    let fitting = limits::MAX_DEFERRED_BYTES / (1024 * 1024 + 1024);
    let world = World::new();
    let mut permits = Vec::new();
    for number in 0..=fitting {
        permits.push(world.permit(numbered(number)).await);
    }
    world.faults.always(Operation::Complete, Fault::Refuse);
    for permit in permits {
        assert!(matches!(permit.complete(large()).await, SettleOutcome::Deferred(_)));
    }
    world.faults.heal();
    tokio::time::sleep(LEASE / 2).await;
    let last = world.claim(numbered(fitting)).await;
    assert!(matches!(last, ClaimOutcome::Unreplayable), "{last:?}");
    for number in 0..fitting {
        assert!(matches!(world.claim(numbered(number)).await, ClaimOutcome::Replay(_)), "{number}");
    }
    // The memory is free again.
    let permit = world.permit(numbered(fitting + 1)).await;
    world.faults.always(Operation::Complete, Fault::Refuse);
    permit.complete(large()).await;
    world.faults.heal();
    tokio::time::sleep(LEASE / 2).await;
    assert!(matches!(world.claim(numbered(fitting + 1)).await, ClaimOutcome::Replay(_)));
}

#[test]
fn an_interval_that_would_never_rest_is_refused() {
    let builder = || Engine::builder(MemoryStore::default());
    for interval in [Duration::ZERO, Duration::from_secs(2 * 24 * 60 * 60)] {
        assert!(builder().with_purge_interval(Some(interval)).is_err(), "{interval:?}");
        assert!(CompleterOptions::default().with_interval(interval).is_err(), "{interval:?}");
    }
    assert!(builder().with_purge_interval(Some(Duration::from_millis(1))).is_ok());
    assert!(CompleterOptions::default().with_interval(Duration::from_millis(1)).is_ok());
}
