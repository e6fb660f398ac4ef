//! A store belongs to one id secret, or to none: two processes with different ids never both execute.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use oncegate_core::{
    Capabilities, Claim, Command, Complete, Completion, Extent, ID_SECRET_RECORD, IdGuard, IdProblem,
    IdSecret, ListQuery, MemoryStore, OnAbandoned, Outcome, Record, RecordId, Release, Renew, Resolution,
    Resolve, StateName, Store, StoreError, StoreErrorKind, StoreFuture, delegate_store, limits,
};
use oncegate_testkit::{
    Fault, Faults, FaultyStore, ManualClock, Operation, block_on, claim, record_id, response,
};

const SECOND: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// A store that several processes share, or not, and that can lose its mark.
struct SharedStore {
    store: FaultyStore,
    is_shared: bool,
    has_lost_mark: Arc<AtomicBool>,
}

impl Store for SharedStore {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        if id == ID_SECRET_RECORD {
            self.has_lost_mark.store(false, Ordering::SeqCst);
        }
        self.store.apply(id, command)
    }

    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        if id == ID_SECRET_RECORD && self.has_lost_mark.load(Ordering::SeqCst) {
            return Box::pin(async { Ok(None) });
        }
        self.store.lookup(id)
    }

    fn try_apply(&self, id: RecordId, command: &Command) -> Option<Result<Outcome, StoreError>> {
        self.store.try_apply(id, command)
    }

    delegate_store!(self, self.store => list purge audit check changed advisories accept_clock now);

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.store.capabilities();
        capabilities.is_shared = self.is_shared;
        capabilities
    }
}

/// A store and its clock, on which processes start.
struct World {
    clock: Arc<ManualClock>,
    store: Arc<dyn Store>,
    faults: Faults,
    has_lost_mark: Arc<AtomicBool>,
}

fn world() -> World {
    world_of(true)
}

fn world_of(is_shared: bool) -> World {
    let clock = Arc::new(ManualClock::at_millis(1_000_000));
    let memory = MemoryStore::new(clock.clone());
    let (store, faults) = FaultyStore::new(memory);
    let has_lost_mark = Arc::<AtomicBool>::default();
    let store = Arc::new(SharedStore { store, is_shared, has_lost_mark: has_lost_mark.clone() });
    World { clock, store, faults, has_lost_mark }
}

fn secret(byte: u8) -> IdSecret {
    IdSecret::from_bytes([byte; 32])
}

impl World {
    fn process(&self, secret: Option<IdSecret>) -> IdGuard {
        IdGuard::with_clock(self.store.clone(), secret.into(), self.clock.clone())
    }

    fn plain(&self) -> IdGuard {
        self.process(None)
    }

    /// A process with this secret that serves.
    fn keyed(&self, byte: u8) -> IdGuard {
        let process = self.process(Some(secret(byte)));
        if block_on(process.verify()).is_err() {
            self.clock.advance(7 * SECOND);
            block_on(process.verify()).unwrap();
        }
        process
    }

    fn mark(&self) -> Option<Record> {
        block_on(self.store.lookup(ID_SECRET_RECORD)).unwrap()
    }
}

fn claims(n: u64) -> Command {
    static ATTEMPTS: AtomicU64 = AtomicU64::new(0);
    Command::Claim(claim(ATTEMPTS.fetch_add(1, Ordering::Relaxed), &n.to_be_bytes()))
}

fn asks(process: &IdGuard, n: u64) -> Result<Outcome, StoreError> {
    let command = claims(n);
    match process.try_apply(record_id(n), &command) {
        Some(reply) => reply,
        None => block_on(process.apply(record_id(n), command)),
    }
}

fn executes(process: &IdGuard, n: u64) -> bool {
    matches!(asks(process, n), Ok(Outcome::Execute(_)))
}

#[track_caller]
fn is_refused(process: &IdGuard, n: u64) -> IdProblem {
    let error = asks(process, n).expect_err("the claim is refused");
    assert!(error.is_unsent(), "{error}");
    let problem = process.problem().expect("there is a problem");
    assert_eq!(error.to_string(), problem.to_string());
    let kind = if problem.is_temporary() { StoreErrorKind::Unavailable } else { StoreErrorKind::Invalid };
    assert_eq!(error.kind(), kind);
    problem
}

#[test]
fn a_store_of_one_process_is_marked_at_once_and_the_mark_is_no_record() {
    let world = world_of(false);
    let process = world.process(Some(secret(1)));
    assert!(executes(&process, 1));
    assert!(world.mark().is_some());
    let page = block_on(process.list(ListQuery::default())).unwrap();
    assert_eq!(page.records.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [record_id(1)]);
    // The same secret again, another one, and none.
    assert!(executes(&world.process(Some(secret(1))), 2));
    let own = secret(2).name();
    let store = Some(secret(1).name());
    assert_eq!(is_refused(&world.process(Some(secret(2))), 3), IdProblem::Other { store, own });
    let plain = world.plain();
    assert_eq!(is_refused(&plain, 3), IdProblem::Missing { store });
    assert!(block_on(plain.check()).is_err());
    assert!(plain.advisories().iter().any(|advisory| advisory.name == "id-secret"));
    assert!(block_on(world.store.lookup(record_id(3))).unwrap().is_none(), "the claim was sent");
}

#[test]
fn a_shared_store_is_on_trial_first() {
    let world = world();
    let process = world.process(Some(secret(1)));
    assert!(matches!(is_refused(&process, 1), IdProblem::Trial { .. }));
    world.clock.advance(5 * SECOND);
    assert!(matches!(is_refused(&process, 1), IdProblem::Trial { left, .. } if left == SECOND));
    world.clock.advance(2 * SECOND);
    assert!(executes(&process, 1));
    assert_eq!(process.problem(), None);
    // Another process with the secret need not wait.
    assert!(executes(&world.process(Some(secret(1))), 2));
}

#[test]
fn a_process_without_the_secret_that_found_no_mark_stops_before_one_with_it_executes() {
    let world = world();
    let plain = world.plain();
    assert!(block_on(plain.verify()).is_ok());
    let keyed = world.process(Some(secret(1)));
    assert!(matches!(is_refused(&keyed, 1), IdProblem::Trial { .. }));
    // It may write as long as its check counts. Then the trial fails.
    world.clock.advance(SECOND);
    assert!(executes(&plain, 9));
    world.clock.advance(SECOND);
    for _ in 0..10 {
        world.clock.advance(SECOND);
        assert!(!executes(&plain, 2), "it did not look again");
    }
    assert_eq!(is_refused(&keyed, 1), IdProblem::HasRecords { own: secret(1).name() });
}

#[test]
fn a_record_that_comes_during_the_trial_ends_it_and_the_mark_lapses() {
    let world = world();
    let keyed = world.process(Some(secret(1)));
    assert!(matches!(is_refused(&keyed, 1), IdProblem::Trial { .. }));
    // A program that does not look for the mark.
    block_on(world.store.apply(record_id(9), claims(9))).unwrap();
    world.clock.advance(7 * SECOND);
    assert_eq!(is_refused(&keyed, 1), IdProblem::HasRecords { own: secret(1).name() });
    let plain = world.plain();
    assert!(!executes(&plain, 2));
    world.clock.advance(120 * SECOND);
    assert!(executes(&plain, 2), "the mark has lapsed");
    assert_eq!(is_refused(&keyed, 1), IdProblem::HasRecords { own: secret(1).name() });
}

#[test]
fn a_store_with_records_is_not_switched_on() {
    for is_shared in [false, true] {
        let world = world_of(is_shared);
        assert!(executes(&world.plain(), 1));
        let keyed = world.process(Some(secret(1)));
        let problem = is_refused(&keyed, 2);
        assert_eq!(problem, IdProblem::HasRecords { own: secret(1).name() });
        assert!(problem.to_string().contains("Use an empty store"), "{problem}");
        assert!(world.mark().is_none());
        // When the retention of all records is over, it is empty.
        world.clock.advance(3 * DAY);
        let _trial = asks(&keyed, 2);
        world.clock.advance(7 * SECOND);
        assert!(executes(&keyed, 3));
    }
}

#[test]
fn two_processes_with_two_secrets_never_both_execute() {
    let world = world();
    let (one, two) = (world.process(Some(secret(1))), world.process(Some(secret(2))));
    let _first = (asks(&one, 1), asks(&two, 2));
    for _ in 0..20 {
        world.clock.advance(SECOND);
        assert!(asks(&two, 3).is_err(), "the second one came too late");
        let _serves = asks(&one, 1);
    }
    assert!(executes(&one, 5));
    assert!(
        matches!(is_refused(&two, 3), IdProblem::Other { store: Some(name), .. } if name == secret(1).name())
    );
}

#[test]
fn nothing_executes_before_the_store_was_asked() {
    for process in [Some(secret(1)), None] {
        let world = world();
        world.faults.always(Operation::Lookup, Fault::Refuse);
        let process = world.process(process);
        for n in 0..3 {
            let error = asks(&process, n).unwrap_err();
            assert!(error.kind().may_pass() && !error.is_unsent(), "{error:?}");
            let record = block_on(world.store.apply(record_id(n), claims(n)));
            assert!(matches!(record, Ok(Outcome::Execute(_))), "the claim was not taken back: {record:?}");
        }
    }
}

#[test]
fn an_outage_of_the_store_changes_nothing_for_those_who_serve() {
    let world = world();
    let keyed = world.keyed(1);
    assert!(executes(&keyed, 1));
    world.faults.always(Operation::Lookup, Fault::Refuse);
    world.clock.advance(3 * SECOND);
    assert!(executes(&keyed, 2), "the last check counts for four seconds");
    // The mark may be on another node of a cluster than the record.
    world.clock.advance(60 * SECOND);
    assert!(executes(&keyed, 3), "it has served this store");
    let asked = world.faults.calls(Operation::Lookup);
    for n in 10..13 {
        world.clock.advance(3 * SECOND);
        assert!(executes(&keyed, n));
    }
    assert_eq!(world.faults.calls(Operation::Lookup), asked, "each claim would wait for a node that is away");
    world.clock.advance(2 * SECOND);
    world.faults.heal();
    assert!(executes(&keyed, 4));
    assert_eq!(world.faults.calls(Operation::Lookup), asked + 1, "it asks again");
    world.clock.advance(5 * SECOND);
    assert!(executes(&keyed, 5));
    assert_eq!(world.faults.calls(Operation::Lookup), asked + 2, "a success ends the time without checks");
}

/// To free the key would forget the abandoned attempt, and its effect would be repeated without a question.
#[test]
fn an_abandoned_attempt_is_not_forgotten_while_the_check_fails() {
    for (process, on_abandoned) in [
        (Some(secret(1)), OnAbandoned::Reconcile),
        (None, OnAbandoned::Reconcile),
        (None, OnAbandoned::Reexecute),
    ] {
        let world = world();
        let first = world.process(process.clone());
        if process.is_some() {
            drop(world.keyed(1));
        }
        let again = |attempt: u64| Command::Claim(Claim { on_abandoned, ..claim(attempt, b"pay") });
        assert!(matches!(block_on(first.apply(record_id(1), again(901))), Ok(Outcome::Execute(_))));
        drop(first);
        world.clock.advance(60 * SECOND);
        let next = world.process(process);
        world.faults.next(2, Operation::Lookup, Fault::Refuse);
        let error = block_on(next.apply(record_id(1), again(902))).unwrap_err();
        assert_eq!(error.extent(), Extent::Record, "one record is no outage of the store");
        let grant = match block_on(next.apply(record_id(1), again(902))) {
            Ok(Outcome::Execute(grant)) => grant,
            other => panic!("{other:?}"),
        };
        assert!(grant.after_abandoned, "the abandoned attempt is forgotten");
    }
}

#[test]
fn what_is_complete_replays_while_the_check_fails() {
    let world = world();
    let keyed = world.keyed(1);
    let Ok(Outcome::Execute(grant)) = asks(&keyed, 1) else { panic!("it executes") };
    let end =
        Complete { token: grant.token, completion: Completion::Replayable(response(1)), retention: DAY };
    block_on(keyed.apply(record_id(1), Command::Complete(end))).unwrap();
    world.faults.always(Operation::Lookup, Fault::Refuse);
    world.clock.advance(60 * SECOND);
    assert!(matches!(asks(&keyed, 1), Ok(Outcome::Replay(_))));
}

#[test]
fn owners_end_their_attempts_whatever_the_mark_is() {
    let world = world();
    let plain = world.plain();
    let Ok(Outcome::Execute(grant)) = asks(&plain, 1) else { panic!("it executes") };
    // As an operator's mistake: another program writes the mark over a store in use.
    block_on(world.store.apply(ID_SECRET_RECORD, claims(5))).unwrap();
    world.clock.advance(10 * SECOND);
    assert!(!executes(&plain, 2));
    let renew = Renew { token: grant.token, lease: 10 * SECOND, retention: DAY };
    let renewed = block_on(plain.apply(record_id(1), Command::Renew(renew))).unwrap();
    assert!(matches!(renewed, Outcome::Renewed { .. }));
    let release = Release { token: grant.token, retention: DAY };
    assert_eq!(block_on(plain.apply(record_id(1), Command::Release(release))).unwrap(), Outcome::Released);
}

#[test]
fn the_mark_outlives_every_record() {
    let world = world();
    let keyed = world.keyed(1);
    // Four hundred days in steps of half a minute would take long; the renewals matter around the end of the lease.
    for _ in 0..500 {
        world.clock.advance(20 * 60 * SECOND);
        assert!(block_on(keyed.verify()).is_ok());
        let mark = world.mark().expect("the mark is there");
        let left = mark.expires_at.since(world.store.now());
        assert!(left > limits::MAX_RETENTION, "{left:?}");
    }
    // The process is gone. The last record that it can have written ends before the mark.
    let longest =
        Claim { lease: limits::MIN_LEASE, retention: limits::MAX_RETENTION, ..claim(4_u64, b"late") };
    block_on(keyed.apply(record_id(4), Command::Claim(longest))).unwrap();
    drop(keyed);
    world.clock.advance(limits::MAX_RETENTION);
    assert!(!executes(&world.plain(), 1));
    assert!(!executes(&world.process(Some(secret(2))), 1));
    assert!(executes(&world.keyed(1), 1));
}

#[test]
fn a_store_that_lost_everything_is_marked_again_by_those_who_served() {
    let world = world();
    let keyed = world.keyed(1);
    assert!(executes(&keyed, 1));
    // The mark alone is lost: the record of the process stays, as after an eviction.
    world.has_lost_mark.store(true, Ordering::SeqCst);
    world.clock.advance(3 * SECOND);
    assert!(executes(&keyed, 2), "it goes on");
    assert!(world.mark().is_some(), "the mark is not there again");
    // Also if it was idle in between.
    world.has_lost_mark.store(true, Ordering::SeqCst);
    world.clock.advance(3600 * SECOND);
    assert!(executes(&keyed, 3), "it goes on");
    assert!(world.mark().is_some(), "the mark is not there again");
}

#[test]
fn no_command_changes_the_mark() {
    let world = world();
    let keyed = world.keyed(1);
    for resolution in [Resolution::Release, Resolution::Complete(None), Resolution::Park] {
        let resolve = Resolve {
            resolution,
            retention: DAY,
            force: true,
            amend: false,
            actor: "ada".to_owned(),
            reason: "a slip".to_owned(),
        };
        let error = block_on(keyed.apply(ID_SECRET_RECORD, Command::Resolve(resolve))).unwrap_err();
        assert!(error.to_string().contains("marks the id secret"), "{error}");
    }
    assert!(block_on(keyed.apply(ID_SECRET_RECORD, claims(1))).is_err());
    assert!(keyed.try_apply(ID_SECRET_RECORD, &claims(1)).is_none());
    assert_eq!(world.mark().unwrap().state_name(world.store.now()), StateName::InProgress);
}

#[test]
fn a_refusal_does_not_ask_the_store_for_each_request() {
    let world = world();
    let _keyed = world.keyed(1);
    let plain = world.plain();
    assert!(!executes(&plain, 1));
    world.faults.always(Operation::Lookup, Fault::Refuse);
    let error = asks(&plain, 2).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Invalid, "the last refusal counts for a second");
    world.faults.heal();
    world.clock.advance(2 * SECOND);
    assert!(!executes(&plain, 3));
}

#[test]
fn what_waits_on_nothing_answers_at_once_between_two_checks() {
    let world = world_of(false);
    let process = world.plain();
    assert!(process.try_apply(record_id(1), &claims(1)).is_none(), "not checked yet");
    block_on(process.verify()).unwrap();
    assert!(process.try_apply(record_id(1), &claims(1)).is_some());
    world.clock.advance(2 * SECOND);
    assert!(process.try_apply(record_id(2), &claims(2)).is_none(), "another check is due");
}
