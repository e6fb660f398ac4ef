//! A store belongs to one id secret, or to none: two processes with different ids never both execute.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use oncegate_core::{
    Capabilities, Claim, Command, Complete, Completion, Extent, ID_SECRET_RECORD, IdGuard, IdMark, IdProblem,
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
    mark: Arc<MarkFaults>,
    open: Arc<Mutex<Vec<String>>>,
}

type Meanwhile = Mutex<Option<Box<dyn FnOnce() + Send>>>;

/// Faults of the mark, and what happens while a command is on its way.
#[derive(Default)]
struct MarkFaults {
    is_lost: AtomicBool,
    /// True while the node of a cluster that has the mark is away. Those of the other records are not.
    is_away: AtomicBool,
    is_damaged: AtomicBool,
    /// Called once, before the next claim of a request gets to the store.
    before_claim: Meanwhile,
    /// Called once, after the next lookup of the mark, before its reply arrives.
    after_lookup: Meanwhile,
}

/// Calls it in a thread of its own, because this one is in the middle of a command.
fn happens(meanwhile: &Meanwhile) {
    let taken = meanwhile.lock().unwrap().take();
    if let Some(meanwhile) = taken {
        thread::spawn(meanwhile).join().unwrap();
    }
}

impl Store for SharedStore {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        if id == ID_SECRET_RECORD {
            self.mark.is_lost.store(false, Ordering::SeqCst);
        } else if matches!(command, Command::Claim(_)) {
            happens(&self.mark.before_claim);
        }
        self.store.apply(id, command)
    }

    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        if id != ID_SECRET_RECORD {
            return self.store.lookup(id);
        }
        if self.mark.is_away.load(Ordering::SeqCst) {
            return Box::pin(async { Err(StoreError::unavailable("the node is away")) });
        }
        if self.mark.is_damaged.load(Ordering::SeqCst) {
            return Box::pin(async { Err(StoreError::corrupt("its bytes make no sense")) });
        }
        if self.mark.is_lost.load(Ordering::SeqCst) {
            return Box::pin(async { Ok(None) });
        }
        Box::pin(async move {
            let found = self.store.lookup(id).await;
            happens(&self.mark.after_lookup);
            found
        })
    }

    fn try_apply(&self, id: RecordId, command: &Command) -> Option<Result<Outcome, StoreError>> {
        self.store.try_apply(id, command)
    }

    delegate_store!(self, self.store => list purge audit check changed advisories accept_clock now);

    fn open_transactions(&self) -> StoreFuture<'_, Vec<String>> {
        Box::pin(async { Ok(self.open.lock().unwrap().clone()) })
    }

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
    mark_faults: Arc<MarkFaults>,
    /// The transactions that the store shows as open.
    open: Arc<Mutex<Vec<String>>>,
}

fn world() -> World {
    world_of(true)
}

fn world_of(is_shared: bool) -> World {
    let clock = Arc::new(ManualClock::at_millis(1_000_000));
    let memory = MemoryStore::new(clock.clone());
    let (store, faults) = FaultyStore::new(memory);
    let mark = Arc::<MarkFaults>::default();
    let open = Arc::<Mutex<Vec<String>>>::default();
    let store = Arc::new(SharedStore { store, is_shared, mark: mark.clone(), open: open.clone() });
    World { clock, store, faults, mark_faults: mark, open }
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

/// Transactions that began before a check of theirs ended to count may be longer than a trial, and write a record at their end.
#[test]
fn a_trial_waits_for_the_transactions_that_are_open_at_its_end() {
    let own = secret(1).name();
    let waits = |process: &IdGuard, count| {
        assert_eq!(is_refused(process, 1), IdProblem::OpenTransactions { own, count });
        assert!(process.problem().unwrap().next_check().is_some());
    };
    let open = |world: &World, names: &[&str]| {
        *world.open.lock().unwrap() = names.iter().map(|name| (*name).to_owned()).collect();
    };
    for writes in [false, true] {
        let world = world();
        open(&world, &["3/17", "prepared x"]);
        let process = world.process(Some(secret(1)));
        assert!(matches!(is_refused(&process, 1), IdProblem::Trial { .. }));
        world.clock.advance(7 * SECOND);
        waits(&process, 2);
        // Those that began later have seen the mark. The wait may be longer than the life of a mark on trial, which is renewed.
        open(&world, &["3/17", "3/18"]);
        for _ in 0..5 {
            world.clock.advance(60 * SECOND);
            waits(&process, 1);
            assert!(matches!(is_refused(&world.plain(), 2), IdProblem::Missing { .. }));
        }
        // Another process with the secret waits for all that are open at the end of its own trial.
        let other = world.process(Some(secret(1)));
        assert!(matches!(is_refused(&other, 1), IdProblem::Trial { .. }));
        world.clock.advance(7 * SECOND);
        waits(&other, 2);
        // The last one ends, with a record or without.
        if writes {
            assert!(matches!(block_on(world.store.apply(record_id(9), claims(9))), Ok(Outcome::Execute(_))));
        }
        open(&world, &["3/18"]);
        world.clock.advance(2 * SECOND);
        if writes {
            assert_eq!(is_refused(&process, 1), IdProblem::HasRecords { own });
        } else {
            assert!(executes(&process, 1));
            // The trial is over for the other process, too.
            world.clock.advance(2 * SECOND);
            assert!(executes(&other, 2));
        }
    }
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
        assert!(executes(&keyed, n));
    }
    assert_eq!(world.faults.calls(Operation::Lookup), asked, "each claim would wait for a node that is away");
    world.clock.advance(SECOND);
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
        // The mark, the record, and the mark again.
        world.faults.next(3, Operation::Lookup, Fault::Refuse);
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
    world.mark_faults.is_lost.store(true, Ordering::SeqCst);
    world.clock.advance(3 * SECOND);
    assert!(executes(&keyed, 2), "it goes on");
    assert!(world.mark().is_some(), "the mark is not there again");
    // Also if it was idle in between.
    world.mark_faults.is_lost.store(true, Ordering::SeqCst);
    world.clock.advance(3600 * SECOND);
    assert!(executes(&keyed, 3), "it goes on");
    assert!(world.mark().is_some(), "the mark is not there again");
}

#[test]
fn an_operator_puts_a_mark_back_that_was_lost_while_no_process_ran() {
    let world = world();
    let keyed = world.keyed(1);
    assert!(executes(&keyed, 1));
    drop(keyed);
    world.mark_faults.is_lost.store(true, Ordering::SeqCst);
    let next = world.process(Some(secret(1)));
    assert!(!executes(&next, 2));
    assert_eq!(next.problem(), Some(IdProblem::HasRecords { own: secret(1).name() }));
    assert_eq!(block_on(next.find_mark()).unwrap(), IdMark::Missing { has_records: true });
    let without = block_on(world.plain().restore_mark()).unwrap_err();
    assert!(without.to_string().contains("has no id secret"), "{without}");
    assert!(block_on(next.restore_mark()).unwrap());
    assert_eq!((next.problem(), block_on(next.find_mark()).unwrap()), (None, IdMark::Own));
    assert!(executes(&next, 2));
    assert!(!block_on(next.restore_mark()).unwrap(), "it is there");
    // The mark is there for good, and keeps others out.
    assert!(executes(&world.process(Some(secret(1))), 3));
    assert!(!executes(&world.plain(), 4));
    let other = world.process(Some(secret(2)));
    let error = block_on(other.restore_mark()).unwrap_err();
    assert!(error.to_string().contains(&secret(1).name().to_string()), "{error}");
    assert!(!executes(&other, 4));
}

#[test]
fn a_mark_is_not_put_on_a_store_that_has_lost_none() {
    // A new store has its trial, and one on which the trial failed keeps its plain records.
    let world = world();
    let keyed = world.process(Some(secret(1)));
    let error = block_on(keyed.restore_mark()).unwrap_err();
    assert!(error.to_string().contains("no records"), "{error}");
    assert_eq!(world.mark(), None);
    assert!(matches!(block_on(keyed.verify()), Err(error) if error.kind() == StoreErrorKind::Unavailable));
    assert_eq!(block_on(keyed.find_mark()).unwrap(), IdMark::Trial);
    block_on(world.store.apply(record_id(1), claims(1))).unwrap();
    let error = block_on(keyed.restore_mark()).unwrap_err();
    assert!(error.to_string().contains("on trial"), "{error}");
    assert_eq!(error.kind(), StoreErrorKind::Invalid);
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

#[test]
fn a_check_does_not_count_after_the_machine_was_suspended() {
    for failed in [false, true] {
        let world = world();
        let clock = Arc::new(ManualClock::at_millis(1_000_000));
        let plain = IdGuard::with_clock(world.store.clone(), None.into(), clock.clone());
        assert!(block_on(plain.verify()).is_ok());
        if failed {
            // It goes on for ten seconds after a failed check.
            clock.advance(5 * SECOND);
            world.faults.next(1, Operation::Lookup, Fault::Refuse);
            assert!(block_on(plain.verify()).is_err());
        }
        // Its monotonic clock stands still while others switch the store on.
        let _keyed = world.keyed(1);
        assert!(world.mark().is_some());
        clock.set_millis(1_000_000 + 3_600_000);
        assert!(matches!(is_refused(&plain, 1), IdProblem::Missing { .. }));
        assert!(block_on(world.store.lookup(record_id(1))).unwrap().is_none(), "the claim was sent");
    }
}

#[test]
fn a_clock_that_is_set_costs_a_check_and_no_more() {
    let world = world();
    let plain = world.plain();
    for wall in [1_000_000 + 86_400_000, 1_000, 2_000] {
        world.clock.set_millis(wall);
        assert!(executes(&plain, wall), "{wall}");
        let asked = world.faults.calls(Operation::Lookup);
        assert!(executes(&plain, wall + 1), "{wall}");
        assert_eq!(world.faults.calls(Operation::Lookup), asked, "each claim checks: {wall}");
        world.clock.advance(5 * SECOND);
        assert!(executes(&plain, wall + 2), "{wall}");
        assert_eq!(world.faults.calls(Operation::Lookup), asked + 1, "no claim checks: {wall}");
    }
}

/// A claim may wait for a connection of the pool for longer than a trial.
#[test]
fn a_claim_that_is_granted_after_its_check_ended_checks_again() {
    let world = Arc::new(world());
    let plain = world.plain();
    assert!(block_on(plain.verify()).is_ok());
    let meanwhile = world.clone();
    let switches_on = move || drop(meanwhile.keyed(1));
    *world.mark_faults.before_claim.lock().unwrap() = Some(Box::new(switches_on));
    // Not at once, as a store on this machine answers.
    let late = |process: &IdGuard| block_on(process.apply(record_id(1), claims(1)));
    let error = late(&plain).expect_err("it executes next to a process with a secret");
    assert_eq!(error.extent(), Extent::Record, "no outage, for which a route may be open");
    assert!(matches!(plain.problem(), Some(IdProblem::Missing { .. })));
    let record = block_on(world.store.lookup(record_id(1))).unwrap().unwrap();
    assert_eq!(record.state_name(world.store.now()), StateName::Released);
    // A slow claim on a store that stays what it was costs a second check.
    let world = Arc::new(self::world());
    let (keyed, clock) = (world.keyed(1), world.clock.clone());
    *world.mark_faults.before_claim.lock().unwrap() = Some(Box::new(move || clock.advance(20 * SECOND)));
    assert!(matches!(late(&keyed), Ok(Outcome::Execute(_))));
}

#[test]
fn a_slow_check_does_not_undo_a_later_refusal() {
    let world = Arc::new(world());
    let plain = Arc::new(world.plain());
    let (others, again) = (world.clone(), plain.clone());
    // A mark on trial: one for good would be remembered.
    let meanwhile = move || {
        others.clock.advance(SECOND);
        assert!(block_on(others.process(Some(secret(1))).verify()).is_err());
        assert!(block_on(again.verify()).is_err());
    };
    *world.mark_faults.after_lookup.lock().unwrap() = Some(Box::new(meanwhile));
    assert!(block_on(plain.verify()).is_err(), "what it read is no longer so");
    // Otherwise it would go on now, as one that has served.
    world.mark_faults.is_away.store(true, Ordering::SeqCst);
    world.clock.advance(2 * SECOND);
    assert!(!executes(&plain, 1));
}

/// A check of a trial may be slow, and be overtaken by one that ends the trial. If the store then loses the mark, it is still the
/// one that this process serves.
#[test]
fn a_slow_check_of_a_trial_does_not_undo_its_end() {
    for begins_before_the_trial in [true, false] {
        let world = Arc::new(world());
        let keyed = Arc::new(world.process(Some(secret(1))));
        if !begins_before_the_trial {
            assert!(block_on(keyed.verify()).is_err());
        }
        let (others, again) = (world.clone(), keyed.clone());
        let meanwhile = move || {
            let _trial = block_on(again.verify());
            others.clock.advance(7 * SECOND);
            block_on(again.verify()).unwrap();
            assert!(executes(&again, 1));
            // The success no longer counts.
            others.clock.advance(5 * SECOND);
            others.mark_faults.is_lost.store(true, Ordering::SeqCst);
        };
        *world.mark_faults.after_lookup.lock().unwrap() = Some(Box::new(meanwhile));
        let _slow = block_on(keyed.verify());
        world.clock.advance(2 * SECOND);
        assert!(executes(&keyed, 2), "{:?}", keyed.problem());
        assert!(world.mark().is_some(), "the mark is back");
    }
}

/// Each claim counts as an attempt, and a message whose attempts are used up is a dead letter.
#[test]
fn nothing_is_claimed_while_a_new_process_cannot_read_the_mark() {
    for secret in [Some(secret(1)), None] {
        let world = world();
        if secret.is_some() {
            drop(world.keyed(1));
        }
        let served = world.process(secret.clone());
        let Ok(Outcome::Execute(grant)) = asks(&served, 1) else { panic!("it executes") };
        let completion = Completion::Replayable(response(1));
        let end = Complete { token: grant.token, completion, retention: DAY };
        block_on(served.apply(record_id(1), Command::Complete(end))).unwrap();
        assert!(executes(&served, 2));
        let next = world.process(secret);
        world.mark_faults.is_away.store(true, Ordering::SeqCst);
        world.clock.advance(60 * SECOND);
        for n in [2, 3, 3, 3, 3] {
            let error = asks(&next, n).unwrap_err();
            assert_eq!((error.kind(), error.extent()), (StoreErrorKind::Unavailable, Extent::Record));
        }
        assert!(matches!(asks(&next, 1), Ok(Outcome::Replay(_))), "what is completed is replayed");
        assert!(block_on(world.store.lookup(record_id(3))).unwrap().is_none(), "it was claimed");
        world.mark_faults.is_away.store(false, Ordering::SeqCst);
        match asks(&next, 3) {
            Ok(Outcome::Execute(grant)) => assert_eq!(grant.attempts, 1),
            other => panic!("{other:?}"),
        }
    }
}

/// A store that lost its data, for example by a failover, still belongs to the secret of the processes that serve it.
#[test]
fn a_refused_process_does_not_take_a_store_that_lost_its_mark() {
    for other in [None, Some(secret(2))] {
        let world = world();
        let keyed = world.keyed(1);
        let refused = world.process(other.clone());
        assert!(!executes(&refused, 1));
        world.mark_faults.is_lost.store(true, Ordering::SeqCst);
        // A sidecar without requests looks every 30 seconds.
        for n in 0..10 {
            world.clock.advance(3 * SECOND);
            assert!(!executes(&refused, n), "{other:?}");
        }
        assert!(executes(&keyed, 1));
        assert!(
            world.mark().is_some_and(|mark| mark.label.operation().contains(&secret(1).name().to_string()))
        );
        assert!(!executes(&refused, 1));
        // No process puts the mark back. The records may be there.
        drop(keyed);
        world.mark_faults.is_lost.store(true, Ordering::SeqCst);
        for n in 7..10 {
            world.clock.advance(DAY);
            assert!(!executes(&refused, n), "{other:?}");
        }
    }
}

/// A store that is out of reach for a moment may come back empty, and another process may begin.
#[test]
fn a_process_that_could_not_read_the_mark_asks_again_before_another_ends_its_trial() {
    let world = world();
    let plain = world.plain();
    block_on(plain.verify()).unwrap();
    world.clock.advance(60 * SECOND);
    world.mark_faults.is_away.store(true, Ordering::SeqCst);
    assert!(block_on(plain.verify()).is_err());
    world.mark_faults.is_away.store(false, Ordering::SeqCst);
    let keyed = world.keyed(1);
    assert!(executes(&keyed, 1));
    // By the ids of a process without the secret, the same request has another record.
    assert!(!executes(&plain, 2), "it executed next to a process with a secret");
}

/// The mark may be damaged, which is no fault of a request.
#[test]
fn a_damaged_mark_is_no_damaged_record() {
    for secret in [Some(secret(1)), None] {
        let world = world();
        let served = match &secret {
            Some(_) => world.keyed(1),
            None => world.plain(),
        };
        assert!(executes(&served, 1));
        world.mark_faults.is_damaged.store(true, Ordering::SeqCst);
        world.clock.advance(60 * SECOND);
        assert!(executes(&served, 2), "it has served");
        let next = world.process(secret);
        let error = asks(&next, 3).unwrap_err();
        assert_eq!(
            (error.kind(), error.extent()),
            (StoreErrorKind::Unavailable, Extent::Record),
            "{error:?}"
        );
        let error = block_on(next.verify()).unwrap_err();
        assert!(error.to_string().contains(&ID_SECRET_RECORD.to_string()), "{error}");
        assert_eq!(block_on(next.find_mark()).unwrap(), IdMark::Damaged);
        let error = block_on(next.restore_mark()).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Invalid, "{error}");
    }
}
