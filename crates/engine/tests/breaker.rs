//! The circuit breaker from outside, on a paused clock: what opens it, what does not, and how it closes.

#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_core::{
    AttemptId, Claim, Clock, Command, Completion, Fingerprint, Label, MemoryStore, OnAbandoned, Outcome,
    RecordId, Store, StoreError, StoreErrorKind, StoredResponse, Timestamp,
};
use oncegate_engine::{
    Breaker, BreakerState, ClaimOutcome, ClaimRequest, Engine, Event, EventKind, Observer, Policy, Settled,
};
use oncegate_testkit::{Fault, Faults, FaultyStore, Latch, Operation};
use tokio::time::{Instant, sleep};

const PATIENCE: Duration = Duration::from_secs(2);

struct TokioClock(Instant);

impl Clock for TokioClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(1_000_000 + u64::try_from(self.0.elapsed().as_millis()).unwrap())
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
    fn count(&self, wanted: EventKind) -> usize {
        self.0.lock().unwrap().iter().filter(|kind| **kind == wanted).count()
    }
}

fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new(TokioClock(Instant::now())))
}

/// A breaker on a store in memory that fails on demand.
fn breaker() -> (Breaker, Faults) {
    let (faulty, faults) = FaultyStore::new(memory());
    (Breaker::new(Arc::new(faulty)), faults)
}

fn id(number: u8) -> RecordId {
    RecordId::from_bytes([number; 32])
}

fn claim(number: u8) -> Command {
    Command::Claim(Claim {
        attempt: AttemptId::new(u128::from(number)),
        fingerprint: Fingerprint::of_parts("test", &[]),
        lease: Duration::from_secs(30),
        retention: Duration::from_secs(3600),
        on_abandoned: OnAbandoned::Park,
        label: Label::default(),
    })
}

fn request(number: u8) -> ClaimRequest {
    ClaimRequest {
        id: id(number),
        fingerprint: Fingerprint::of_parts("test", &[]),
        label: Label::default(),
        policy: Policy::default().with_lease(Duration::from_secs(30)).unwrap(),
    }
}

fn answer() -> Completion {
    Completion::Replayable(StoredResponse::new(201, &[], &["done".into()], &[]).unwrap())
}

async fn claims(breaker: &Breaker, number: u8) -> Result<Outcome, StoreError> {
    breaker.apply(id(number), claim(number)).await
}

/// Lets everything that is ready run, without moving the clock.
async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

/// Waits until the breaker is there, and says how long that took.
async fn until(breaker: &Breaker, state: BreakerState) -> Duration {
    let since = Instant::now();
    while breaker.state() != state {
        assert!(since.elapsed() < Duration::from_secs(60), "it stays {:?}", breaker.state());
        sleep(Duration::from_millis(1)).await;
    }
    since.elapsed()
}

#[tokio::test(start_paused = true)]
async fn an_outage_opens_it_and_costs_the_store_one_probe_at_a_time() {
    let (breaker, faults) = breaker();
    faults.outage();
    let error = claims(&breaker, 1).await.unwrap_err();
    assert!(!error.is_unsent(), "the first one was sent");
    settle().await;
    assert_eq!((breaker.state(), breaker.openings(), breaker.is_degraded()), (BreakerState::Open, 1, true));
    let sent = faults.calls(Operation::Claim);
    let asked = faults.calls(Operation::Check);
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(60) {
        let before = Instant::now();
        let error = claims(&breaker, 2).await.unwrap_err();
        assert!(error.is_unsent() && error.kind() == StoreErrorKind::Unavailable, "{error}");
        assert!(breaker.check().await.unwrap_err().is_unsent());
        assert!(breaker.lookup(id(1)).await.unwrap_err().is_unsent());
        assert_eq!(before.elapsed(), Duration::ZERO, "refused at once");
        sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(faults.calls(Operation::Claim), sent, "nothing was sent");
    let asked = faults.calls(Operation::Check) - asked;
    assert!((60..=130).contains(&asked), "{asked} probes in a minute");
    faults.heal();
    // A second at most until it is asked; then the first command closes it.
    assert!(until(&breaker, BreakerState::HalfOpen).await <= Duration::from_secs(1));
    assert!(claims(&breaker, 2).await.is_ok());
    assert_eq!(
        (breaker.state(), breaker.openings(), breaker.is_degraded()),
        (BreakerState::Closed, 1, false)
    );
}

#[tokio::test(start_paused = true)]
async fn a_store_that_nobody_uses_is_closed_again_all_the_same() {
    let (breaker, faults) = breaker();
    faults.outage();
    claims(&breaker, 1).await.unwrap_err();
    until(&breaker, BreakerState::Open).await;
    faults.heal();
    assert!(until(&breaker, BreakerState::Closed).await <= Duration::from_secs(7));
    assert!(!breaker.is_degraded());
    // And is left alone then.
    let asked = faults.calls(Operation::Check);
    sleep(Duration::from_secs(600)).await;
    assert_eq!(faults.calls(Operation::Check), asked);
}

#[tokio::test(start_paused = true)]
async fn what_says_nothing_about_the_store_does_not_open_it() {
    let (breaker, faults) = breaker();
    for fault in [Fault::Busy, Fault::Corrupt] {
        faults.always(Operation::Claim, fault);
        for _ in 0..100 {
            claims(&breaker, 1).await.unwrap_err();
            settle().await;
            sleep(Duration::from_millis(20)).await;
        }
        faults.heal();
    }
    assert_eq!((breaker.openings(), breaker.is_degraded()), (0, false));
    assert_eq!(faults.calls(Operation::Check), 0, "there was nothing to ask for");
}

#[tokio::test(start_paused = true)]
async fn a_cut_that_fails_a_hundred_commands_does_not_open_it() {
    let (breaker, faults) = breaker();
    // Again and again, and now and then a command gets through.
    for _ in 0..10 {
        faults.next(100, Operation::Claim, Fault::Refuse);
        for number in 0..100 {
            claims(&breaker, number).await.unwrap_err();
        }
        sleep(Duration::from_secs(1)).await;
        assert!(claims(&breaker, 100).await.is_ok());
    }
    assert_eq!((breaker.openings(), breaker.is_degraded()), (0, false));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_well_and_fails_every_command_is_found_out() {
    let (breaker, faults) = breaker();
    faults.always(Operation::Claim, Fault::Refuse);
    let since = Instant::now();
    let mut sent = 0;
    while breaker.openings() == 0 && sent <= 10 {
        claims(&breaker, 1).await.unwrap_err();
        sent += 1;
        sleep(Duration::from_millis(500)).await;
    }
    assert!(
        breaker.openings() == 1 && since.elapsed() < Duration::from_secs(10),
        "{sent} {:?}",
        since.elapsed()
    );
    // From then on one command passes for each probe, and the others are refused: no stampede, one opening.
    let before = faults.calls(Operation::Claim);
    for _ in 0..600 {
        for _ in 0..10 {
            claims(&breaker, 1).await.unwrap_err();
        }
        sleep(Duration::from_millis(100)).await;
    }
    let sent = faults.calls(Operation::Claim) - before;
    assert!((30..=130).contains(&sent), "{sent} commands in a minute");
    assert_eq!((breaker.openings(), breaker.is_degraded()), (1, true));
    faults.heal();
    until(&breaker, BreakerState::HalfOpen).await;
    assert!(claims(&breaker, 1).await.is_ok());
    assert_eq!((breaker.state(), breaker.is_degraded()), (BreakerState::Closed, false));
}

/// Replays and questions are answered all the time, and no claim is.
#[tokio::test(start_paused = true)]
async fn a_store_that_reads_and_writes_nothing_is_found_out() {
    let (breaker, faults) = breaker();
    claims(&breaker, 1).await.unwrap();
    faults.always(Operation::Claim, Fault::Refuse);
    faults.always(Operation::Complete, Fault::Refuse);
    let refused = async |seconds: u32| {
        let mut answered = 0;
        for _ in 0..seconds * 10 {
            claims(&breaker, 2).await.unwrap_err();
            answered += u32::from(breaker.lookup(id(1)).await.is_ok());
            sleep(Duration::from_millis(100)).await;
        }
        answered
    };
    assert!(refused(5).await > 0);
    assert_eq!((breaker.openings(), breaker.is_degraded()), (1, true));
    // A question that is answered does not close it.
    refused(60).await;
    assert_eq!((breaker.openings(), breaker.is_degraded()), (1, true));
    assert_ne!(breaker.state(), BreakerState::Closed);
    faults.heal();
    until(&breaker, BreakerState::HalfOpen).await;
    breaker.lookup(id(1)).await.unwrap();
    assert_eq!(breaker.state(), BreakerState::HalfOpen);
    claims(&breaker, 2).await.unwrap();
    assert_eq!((breaker.state(), breaker.is_degraded()), (BreakerState::Closed, false));
}

/// Writes that fail now and then, with nothing between them but questions, say nothing.
#[tokio::test(start_paused = true)]
async fn single_writes_that_fail_do_not_open_it() {
    let (breaker, faults) = breaker();
    for _ in 0..10 {
        faults.next(1, Operation::Claim, Fault::Refuse);
        claims(&breaker, 1).await.unwrap_err();
        sleep(Duration::from_secs(6)).await;
        breaker.lookup(id(1)).await.unwrap();
    }
    assert_eq!((breaker.openings(), breaker.is_degraded()), (0, false));
}

#[tokio::test(start_paused = true)]
async fn of_a_crowd_that_comes_when_it_is_half_open_one_passes() {
    let (breaker, faults) = breaker();
    faults.outage();
    claims(&breaker, 1).await.unwrap_err();
    until(&breaker, BreakerState::Open).await;
    let sent = faults.calls(Operation::Claim);
    faults.heal();
    let latch = Latch::new();
    faults.always(Operation::Claim, Fault::StallBefore(latch.clone()));
    until(&breaker, BreakerState::HalfOpen).await;
    let crowd: Vec<_> = (0..50)
        .map(|number| {
            let breaker = breaker.clone();
            tokio::spawn(async move { claims(&breaker, number).await })
        })
        .collect();
    settle().await;
    assert_eq!(faults.calls(Operation::Claim) - sent, 1);
    // A probe that goes well meanwhile does not let the others in before it is decided.
    sleep(Duration::from_millis(1500)).await;
    assert_eq!(breaker.state(), BreakerState::HalfOpen);
    latch.open();
    let mut passed = 0;
    for one in crowd {
        match one.await.unwrap() {
            Ok(_) => passed += 1,
            Err(error) => assert!(error.is_unsent(), "{error}"),
        }
    }
    assert_eq!((passed, breaker.state()), (1, BreakerState::Closed));
}

#[tokio::test(start_paused = true)]
async fn a_command_that_hangs_is_given_up_when_the_store_does_not_answer_either() {
    let (breaker, faults) = breaker();
    let latch = Latch::new();
    for operation in Operation::ALL {
        faults.always(operation, Fault::StallBefore(latch.clone()));
    }
    let since = Instant::now();
    let error = claims(&breaker, 1).await.unwrap_err();
    assert!(!error.is_unsent(), "it may have arrived");
    assert!(since.elapsed() <= PATIENCE * 2 + Duration::from_millis(260), "{:?}", since.elapsed());
    assert_eq!(breaker.state(), BreakerState::Open);
    // The readiness probe is not kept waiting.
    let since = Instant::now();
    breaker.check().await.unwrap_err();
    assert_eq!(since.elapsed(), Duration::ZERO);
    latch.open();
    faults.heal();
    until(&breaker, BreakerState::Closed).await;
}

#[tokio::test(start_paused = true)]
async fn a_command_that_hangs_on_a_store_that_is_well_has_its_time_and_an_end() {
    let (breaker, faults) = breaker();
    let latch = Latch::new();
    faults.next(1, Operation::Claim, Fault::StallBefore(latch.clone()));
    let slow = tokio::spawn({
        let breaker = breaker.clone();
        async move { claims(&breaker, 1).await }
    });
    sleep(Duration::from_secs(15)).await;
    latch.open();
    assert!(slow.await.unwrap().is_ok(), "slow, but it came");
    faults.next(1, Operation::Claim, Fault::StallBefore(Latch::new()));
    let since = Instant::now();
    claims(&breaker, 2).await.unwrap_err();
    assert!(since.elapsed() <= Duration::from_secs(21), "{:?}", since.elapsed());
    assert_eq!(breaker.openings(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_full_store_is_degraded_and_still_answers_what_needs_no_room() {
    let (breaker, faults) = breaker();
    let Outcome::Execute(_) = claims(&breaker, 1).await.unwrap() else { panic!() };
    for check in [Some(Fault::Full), None] {
        // One says so when it is asked; another does not know.
        if let Some(fault) = check {
            faults.always(Operation::Check, fault);
        }
        faults.always(Operation::Claim, Fault::Full);
        for _ in 0..100 {
            claims(&breaker, 2).await.unwrap_err();
            assert!(breaker.lookup(id(1)).await.unwrap().is_some());
            assert_eq!((breaker.openings(), breaker.is_degraded()), (0, true));
            sleep(Duration::from_millis(100)).await;
        }
        faults.heal();
        sleep(Duration::from_secs(7)).await;
        assert!(!breaker.is_degraded());
    }
}

#[tokio::test(start_paused = true)]
async fn during_an_outage_an_engine_asks_once_and_takes_nothing_back_that_was_not_sent() {
    let (breaker, faults) = breaker();
    let events = Events::default();
    let engine = Engine::builder(Arc::new(breaker.clone())).with_observer(events.clone()).build();
    faults.outage();
    until_open(&engine, &breaker).await;
    let since = Instant::now();
    for number in 1..=100 {
        let error = engine.claim(request(number)).await.unwrap_err();
        assert!(error.is_unsent());
    }
    assert_eq!(since.elapsed(), Duration::ZERO, "not even the pause before a claim is sent again");
    faults.heal();
    until(&breaker, BreakerState::Closed).await;
    let looked = faults.calls(Operation::Lookup);
    sleep(Duration::from_secs(60)).await;
    // Nothing to look for but what the first claim, which was sent, may have left: a few looks, and none for the hundred.
    assert!(faults.calls(Operation::Lookup) - looked < 15, "{}", faults.calls(Operation::Lookup) - looked);
}

async fn until_open(engine: &Engine, breaker: &Breaker) {
    engine.claim(request(0)).await.unwrap_err();
    until(breaker, BreakerState::Open).await;
}

#[tokio::test(start_paused = true)]
async fn completions_and_renewals_go_on_when_the_store_is_back() {
    let (breaker, faults) = breaker();
    let events = Events::default();
    let engine = Engine::builder(Arc::new(breaker.clone())).with_observer(events.clone()).build();
    let ClaimOutcome::Execute(done) = engine.claim(request(1)).await.unwrap() else { panic!() };
    let ClaimOutcome::Execute(runs) = engine.claim(request(2)).await.unwrap() else { panic!() };
    faults.outage();
    assert!(matches!(done.complete(answer()).await, Settled::Deferred(_)));
    until(&breaker, BreakerState::Open).await;
    // Beyond the time of the first renewal.
    sleep(Duration::from_secs(20)).await;
    let renewed = events.count(EventKind::Renewed);
    faults.heal();
    until(&breaker, BreakerState::HalfOpen).await;
    let since = Instant::now();
    while events.count(EventKind::Completed) == 0 || events.count(EventKind::Renewed) == renewed {
        let seen = events.0.lock().unwrap().clone();
        assert!(since.elapsed() < Duration::from_millis(600), "{seen:?}");
        sleep(Duration::from_millis(1)).await;
    }
    assert!(runs.attempt().is_owner());
    assert!(matches!(runs.complete(answer()).await, Settled::Done));
    assert!(matches!(engine.claim(request(1)).await.unwrap(), ClaimOutcome::Replay(_)));
}

#[tokio::test(start_paused = true)]
async fn one_that_begins_open_closes_by_itself() {
    let breaker = Breaker::builder(memory()).opened().build();
    assert_eq!((breaker.state(), breaker.openings(), breaker.is_degraded()), (BreakerState::Open, 1, true));
    assert!(claims(&breaker, 1).await.unwrap_err().is_unsent());
    until(&breaker, BreakerState::Closed).await;
    assert!(claims(&breaker, 1).await.is_ok());
    assert!(!breaker.is_degraded());
}

#[test]
fn it_goes_on_asking_when_the_runtime_that_did_is_gone() {
    let runtime =
        || tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let first = runtime();
    let (breaker, faults) = first.block_on(async { breaker() });
    faults.outage();
    first.block_on(async {
        claims(&breaker, 1).await.unwrap_err();
        until(&breaker, BreakerState::Open).await;
    });
    drop(first);
    faults.heal();
    assert_eq!(breaker.state(), BreakerState::Open);
    runtime().block_on(async {
        assert!(claims(&breaker, 1).await.is_err());
        until(&breaker, BreakerState::Closed).await;
    });
}

#[test]
fn its_patience_is_bounded() {
    let with = |patience| Breaker::builder(memory_now()).with_patience(patience).is_ok();
    let bit = Duration::from_nanos(1);
    let (min, max) = (Duration::from_millis(10), Duration::from_secs(60));
    assert!(with(min) && with(max) && !with(min - bit) && !with(max + bit));
}

fn memory_now() -> Arc<dyn Store> {
    struct Still;
    impl Clock for Still {
        fn now(&self) -> Timestamp {
            Timestamp::from_millis(1)
        }
    }
    Arc::new(MemoryStore::new(Still))
}
