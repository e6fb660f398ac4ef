//! The circuit breaker, tested through its public interface on a paused clock: what opens it, what does not, and how it closes.

use std::sync::Arc;
use std::time::Duration;

use crate::support::{Events, settle};
use oncegate_core::{
    Command, Completion, Fingerprint, Label, ListPage, ListQuery, MemoryStore, Outcome, RecordId, Store,
    StoreError, StoreErrorKind, StoreFuture, StoredResponse, delegate_store,
};
use oncegate_engine::{
    Breaker, BreakerState, ClaimOutcome, ClaimRequest, Engine, EventKind, Policy, SettleOutcome,
};
use oncegate_testkit::{Fault, Faults, FaultyStore, Latch, ManualClock, Operation};
use tokio::time::{Instant, sleep};

const COMMAND_TIMEOUT: Duration = Duration::from_secs(2);

fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new(crate::support::clock()))
}

/// A breaker in front of a memory store that fails on demand.
fn breaker() -> (Breaker, Faults) {
    let (faulty, faults) = FaultyStore::new(memory());
    (Breaker::new(crate::support::store_of(module_path!(), faulty)), faults)
}

fn id(number: u8) -> RecordId {
    RecordId::from_bytes([number; 32])
}

fn claim(number: u8) -> Command {
    Command::Claim(oncegate_testkit::claim(number, b""))
}

fn request(number: u8) -> ClaimRequest {
    ClaimRequest {
        id: id(number),
        fingerprint: Fingerprint::of_parts("test", &[]),
        label: Label::default(),
        policy: Policy::default().with_lease(Duration::from_secs(30)).unwrap(),
    }
}

fn response() -> Completion {
    Completion::Replayable(StoredResponse::new(201, &[], &["done".into()], &[]).unwrap())
}

async fn claims(breaker: &Breaker, number: u8) -> Result<Outcome, StoreError> {
    match breaker.try_apply(id(number), &claim(number)) {
        Some(reply) => reply,
        None => breaker.apply(id(number), claim(number)).await,
    }
}

/// Waits until the breaker is in this state, and returns how long that took.
async fn until(breaker: &Breaker, state: BreakerState) -> Duration {
    let since = Instant::now();
    while breaker.state() != state {
        assert!(since.elapsed() < Duration::from_secs(60), "the breaker stays {:?}", breaker.state());
        sleep(Duration::from_millis(1)).await;
    }
    since.elapsed()
}

#[tokio::test(start_paused = true)]
async fn an_outage_opens_the_breaker_and_sends_one_probe_at_a_time() {
    let (breaker, faults) = breaker();
    faults.outage();
    let error = claims(&breaker, 1).await.unwrap_err();
    assert!(!error.is_unsent(), "the first claim was sent");
    settle().await;
    assert_eq!((breaker.state(), breaker.openings(), breaker.is_degraded()), (BreakerState::Open, 1, true));
    let sent = faults.calls(Operation::Claim);
    let probes = faults.calls(Operation::Check);
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
    let probes = faults.calls(Operation::Check) - probes;
    assert!((60..=130).contains(&probes), "{probes} probes in a minute");
    faults.heal();
    // The next probe comes within a second; then the first command closes the breaker.
    assert!(until(&breaker, BreakerState::HalfOpen).await <= Duration::from_secs(1));
    assert!(claims(&breaker, 2).await.is_ok());
    assert_eq!(
        (breaker.state(), breaker.openings(), breaker.is_degraded()),
        (BreakerState::Closed, 1, false)
    );
}

#[tokio::test(start_paused = true)]
async fn a_breaker_without_traffic_closes_when_the_store_is_back() {
    let (breaker, faults) = breaker();
    faults.outage();
    claims(&breaker, 1).await.unwrap_err();
    until(&breaker, BreakerState::Open).await;
    faults.heal();
    assert!(until(&breaker, BreakerState::Closed).await <= Duration::from_secs(7));
    assert!(!breaker.is_degraded());
    // A closed breaker sends no more probes.
    let probes = faults.calls(Operation::Check);
    sleep(Duration::from_secs(600)).await;
    assert_eq!(faults.calls(Operation::Check), probes);
}

#[tokio::test(start_paused = true)]
async fn errors_that_do_not_concern_availability_do_not_open_the_breaker() {
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
    assert_eq!(faults.calls(Operation::Check), 0, "no probe was needed");
}

/// A page for an operator must never stop requests with a key.
#[tokio::test(start_paused = true)]
async fn lists_that_fail_or_take_long_do_not_matter_to_the_breaker() {
    let (breaker, faults) = breaker();
    let lists = breaker.for_lists();
    for fault in [Fault::Refuse, Fault::LoseReply, Fault::StallBefore(Latch::new())] {
        faults.always(Operation::List, fault.clone());
        faults.always(Operation::Lookup, fault.clone());
        faults.always(Operation::Audit, fault);
        for _ in 0..10 {
            breaker.list(ListQuery::default()).await.unwrap_err();
            lists.lookup(id(1)).await.unwrap_err();
            breaker.audit(None, 10).await.unwrap_err();
            settle().await;
        }
        faults.heal();
    }
    assert_eq!((breaker.openings(), breaker.is_degraded()), (0, false));
    assert_eq!(faults.calls(Operation::Check), 0, "no probe was needed");

    // Neither do they show that the store works again.
    claims(&breaker, 1).await.unwrap();
    faults.always(Operation::Claim, Fault::Refuse);
    let until_open = async || {
        while breaker.openings() == 0 {
            claims(&breaker, 2).await.unwrap_err();
            let _listed = breaker.list(ListQuery::default()).await;
            sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), until_open()).await.expect("the breaker opens");
    // In the half-open state, a list and its records pass, and take the place of no command.
    until(&breaker, BreakerState::HalfOpen).await;
    lists.lookup(id(1)).await.unwrap();
    assert_eq!(breaker.state(), BreakerState::HalfOpen);
    let latch = Latch::new();
    faults.always(Operation::List, Fault::StallBefore(latch.clone()));
    let slow = tokio::spawn({
        let breaker = breaker.clone();
        async move { breaker.list(ListQuery::default()).await.map(drop) }
    });
    settle().await;
    faults.heal();
    until(&breaker, BreakerState::HalfOpen).await;
    claims(&breaker, 2).await.unwrap();
    assert_eq!(breaker.state(), BreakerState::Closed);
    latch.open();
    slow.await.unwrap().unwrap();
}

/// A store without a connection.
struct Disconnected(Arc<dyn Store>);

impl Store for Disconnected {
    fn list(&self, _: ListQuery) -> StoreFuture<'_, ListPage> {
        let error = StoreError::unavailable("no connection").with_nothing_sent();
        Box::pin(std::future::ready(Err(error)))
    }

    fn check(&self) -> StoreFuture<'_, ()> {
        Box::pin(std::future::ready(Err(StoreError::unavailable("no connection").with_nothing_sent())))
    }

    delegate_store!(self, self.0 => apply lookup purge audit now capabilities);
}

#[tokio::test(start_paused = true)]
async fn a_list_that_finds_no_connection_has_the_store_probed() {
    let breaker = Breaker::new(Arc::new(Disconnected(memory())) as Arc<dyn Store>);
    breaker.list(ListQuery::default()).await.unwrap_err();
    until(&breaker, BreakerState::Open).await;
    assert_eq!(breaker.openings(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_cut_that_fails_a_hundred_commands_does_not_open_the_breaker() {
    let (breaker, faults) = breaker();
    // The cut repeats, and now and then a command gets through.
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
async fn a_store_that_passes_its_check_but_fails_every_command_opens_the_breaker() {
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
    // From then on each probe lets one command pass, and the others are refused: no stampede, and the breaker opens only once.
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

/// Replays and lookups are answered all the time, but no claim is.
#[tokio::test(start_paused = true)]
async fn a_store_that_reads_but_fails_every_write_opens_the_breaker() {
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
    // A lookup that is answered does not close the breaker.
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

/// Single failed writes with only lookups between them do not prove that the store is down.
#[tokio::test(start_paused = true)]
async fn single_failed_writes_do_not_open_the_breaker() {
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
async fn a_half_open_breaker_lets_one_command_of_a_crowd_pass() {
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
    // A probe that succeeds meanwhile does not admit the others before the first command is decided.
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
async fn a_command_that_hangs_is_abandoned_when_the_store_fails_its_probe_too() {
    let (breaker, faults) = breaker();
    let latch = Latch::new();
    for operation in Operation::ALL {
        faults.always(operation, Fault::StallBefore(latch.clone()));
    }
    let since = Instant::now();
    let error = claims(&breaker, 1).await.unwrap_err();
    assert!(!error.is_unsent(), "the command may have arrived");
    assert!(since.elapsed() <= COMMAND_TIMEOUT * 2 + Duration::from_millis(260), "{:?}", since.elapsed());
    assert_eq!(breaker.state(), BreakerState::Open);
    // The readiness probe does not wait for it.
    let since = Instant::now();
    breaker.check().await.unwrap_err();
    assert_eq!(since.elapsed(), Duration::ZERO);
    latch.open();
    faults.heal();
    until(&breaker, BreakerState::Closed).await;
}

#[tokio::test(start_paused = true)]
async fn a_slow_command_on_a_healthy_store_gets_more_time_and_then_ends() {
    let (breaker, faults) = breaker();
    let latch = Latch::new();
    faults.next(1, Operation::Claim, Fault::StallBefore(latch.clone()));
    let slow = tokio::spawn({
        let breaker = breaker.clone();
        async move { claims(&breaker, 1).await }
    });
    sleep(Duration::from_secs(15)).await;
    latch.open();
    assert!(slow.await.unwrap().is_ok(), "the slow command succeeds");
    faults.next(1, Operation::Claim, Fault::StallBefore(Latch::new()));
    let since = Instant::now();
    claims(&breaker, 2).await.unwrap_err();
    assert!(since.elapsed() <= Duration::from_secs(21), "{:?}", since.elapsed());
    assert_eq!(breaker.openings(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_full_store_is_degraded_and_still_answers_commands_that_need_no_space() {
    let (breaker, faults) = breaker();
    let Outcome::Execute(_) = claims(&breaker, 1).await.unwrap() else { panic!() };
    for check in [Some(Fault::Full), None] {
        // One store reports that it is full when it is probed; the other one does not know.
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
async fn during_an_outage_the_engine_takes_back_no_claim_that_was_not_sent() {
    let (breaker, faults) = breaker();
    let events = Events::default();
    let engine = Engine::builder(breaker.clone()).with_observer(events.clone()).build();
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
    // Only the first claim was sent and may have left a record: a few lookups for it, and none for the other hundred.
    assert!(faults.calls(Operation::Lookup) - looked < 15, "{}", faults.calls(Operation::Lookup) - looked);
}

async fn until_open(engine: &Engine, breaker: &Breaker) {
    engine.claim(request(0)).await.unwrap_err();
    until(breaker, BreakerState::Open).await;
}

#[tokio::test(start_paused = true)]
async fn completions_and_renewals_continue_when_the_store_is_back() {
    let (breaker, faults) = breaker();
    let events = Events::default();
    let engine = Engine::builder(breaker.clone()).with_observer(events.clone()).build();
    let ClaimOutcome::Execute(done) = engine.claim(request(1)).await.unwrap() else { panic!() };
    let ClaimOutcome::Execute(runs) = engine.claim(request(2)).await.unwrap() else { panic!() };
    faults.outage();
    assert!(matches!(done.complete(response()).await, SettleOutcome::Deferred(_)));
    until(&breaker, BreakerState::Open).await;
    // Past the time of the first renewal.
    sleep(Duration::from_secs(20)).await;
    let renewed = events.count(EventKind::Renewed);
    faults.heal();
    let healed = Instant::now();
    // The first of both may close it at once.
    while breaker.state() == BreakerState::Open {
        assert!(healed.elapsed() < Duration::from_secs(60), "the breaker stays open");
        sleep(Duration::from_millis(1)).await;
    }
    let since = Instant::now();
    while events.count(EventKind::Completed) == 0 || events.count(EventKind::Renewed) == renewed {
        let seen = events.all();
        assert!(since.elapsed() < Duration::from_millis(600), "{seen:?}");
        sleep(Duration::from_millis(1)).await;
    }
    assert!(runs.attempt().is_owner());
    assert!(matches!(runs.complete(response()).await, SettleOutcome::Done));
    assert!(matches!(engine.claim(request(1)).await.unwrap(), ClaimOutcome::Replay(_)));
}

#[tokio::test(start_paused = true)]
async fn a_breaker_that_starts_open_closes_by_itself() {
    let breaker = Breaker::builder(memory()).opened().build();
    assert_eq!((breaker.state(), breaker.openings(), breaker.is_degraded()), (BreakerState::Open, 1, true));
    assert!(claims(&breaker, 1).await.unwrap_err().is_unsent());
    until(&breaker, BreakerState::Closed).await;
    assert!(claims(&breaker, 1).await.is_ok());
    assert!(!breaker.is_degraded());
}

#[test]
fn probes_continue_after_the_runtime_that_sent_them_is_gone() {
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
fn the_command_timeout_is_bounded() {
    let with = |timeout| Breaker::builder(memory_at_fixed_time()).with_probe_timeout(timeout).is_ok();
    let bit = Duration::from_nanos(1);
    let (min, max) = (Duration::from_millis(10), Duration::from_secs(60));
    assert!(with(min) && with(max) && !with(min - bit) && !with(max + bit));
}

fn memory_at_fixed_time() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new(ManualClock::at_millis(1)))
}
