//! Functions through their public interface: results, errors, panics, callers who leave, and a store that fails.
//!

//! Time is tokio's paused clock. The store reads it, too.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use oncegate_core::{
    Command, FingerprintRules, IdempotencyKey, JsonPointer, KeyError, MemoryStore, OnAbandoned, Resolution,
    Resolve, ServiceName, StateName, Store, StoreErrorKind, StoredResponse, SystemClock, limits,
};
use oncegate_engine::{
    Attempt, Engine, ErrorFate, Function, FunctionError, JsonError, Policy, ReleaseIf, StorageStatus,
};
use oncegate_testkit::{Fault, Faults, FaultyStore, Latch, ManualClock, Operation};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::time::sleep;

const LEASE: Duration = Duration::from_secs(30);

struct World {
    engine: Engine,
    store: Arc<dyn Store>,
    faults: Faults,
}

impl World {
    fn new() -> Self {
        Self::on(Arc::new(MemoryStore::new(crate::support::clock())))
    }

    /// Another engine on the same records, as in another process.
    fn on(store: Arc<dyn Store>) -> Self {
        let (faulty, faults) = FaultyStore::new(store.clone());
        let faulty = crate::support::store_of(module_path!(), faulty);
        Self { engine: Engine::new(faulty), store, faults }
    }

    fn charge(&self) -> Function {
        self.engine.function("charge")
    }

    async fn state(&self, function: &Function<impl Clone>) -> Option<StateName> {
        let id = function.record_id(&key());
        self.store.lookup(id).await.unwrap().map(|record| record.state_name(self.store.now()))
    }

    /// Records the outcome of the charge as an operator does.
    async fn resolve(&self, status: u16, body: &'static str) {
        let response = StoredResponse::new(status, &[], &[body.into()], &[]).unwrap();
        let resolve = Resolve {
            resolution: Resolution::Complete(Some(response)),
            retention: Duration::from_secs(3600),
            force: false,
            amend: false,
            actor: "ada".to_owned(),
            reason: "found in the ledger".to_owned(),
        };
        self.store.apply(self.charge().record_id(&key()), Command::Resolve(resolve)).await.unwrap();
    }
}

fn key() -> IdempotencyKey {
    IdempotencyKey::try_from("k").unwrap()
}

fn reexecuting() -> Policy {
    Policy::default().with_on_abandoned(OnAbandoned::Reexecute)
}

/// Counts the executions of a function.
#[derive(Clone, Default)]
struct ExecutionCount(Arc<AtomicUsize>);

impl ExecutionCount {
    fn add(&self) -> usize {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }

    fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum PayError {
    Declined { code: u16 },
    NotSent,
    TimedOut,
}

/// Calls a function with this result in one process and again in another, and returns what the second caller gets.
async fn twice<T>(value: T) -> T
where
    T: Serialize + DeserializeOwned + Clone + Debug + Send + PartialEq + 'static,
{
    let world = World::new();
    let executions = ExecutionCount::default();
    let mut last = None;
    for engine in [world.engine.clone(), World::on(world.store.clone()).engine] {
        let (executions, value) = (executions.clone(), value.clone());
        let ran = engine
            .function("f")
            .call(key(), &())
            .run_detailed(async move |_| {
                executions.add();
                Ok::<_, String>(value)
            })
            .await
            .unwrap();
        assert_eq!(ran.stored, StorageStatus::Stored);
        assert_eq!(ran.is_replayed(), last.is_some());
        last = Some(ran.value);
    }
    assert_eq!(executions.count(), 1);
    last.unwrap()
}

#[tokio::test(start_paused = true)]
async fn every_result_is_replayed_unchanged_even_if_it_looks_empty() {
    macro_rules! same {
        ($($value:expr),* $(,)?) => {$(
            assert_eq!(twice($value).await, $value);
        )*};
    }
    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    struct Unit;
    same!(
        (),
        Unit,
        false,
        0_u8,
        -0.0_f64,
        String::new(),
        Vec::<u8>::new(),
        None::<String>,
        Some(0_u8),
        BTreeMap::<String, u8>::new(),
        Ok::<(), u8>(()),
        Err::<u8, ()>(()),
        u64::MAX,
        i128::MIN,
        u128::MAX,
        0.1_f64 + 0.2,
        31.245_270_191_439_438_f64,
        121.487_919_511_619_45_f64,
        f64::MAX,
        f64::MIN_POSITIVE,
        5e-324_f64,
        1.1_f32,
        "\u{0}\"\\ é 🦀".to_owned(),
        'x',
        BTreeMap::from([(1_u64, "one".to_owned())]),
        HashMap::from([(true, vec![Some(1.5), None])]),
        (1, "a".to_owned(), [0_u8; 3]),
        PayError::Declined { code: 7 },
        serde_json::json!({"a": [null, {}, 1.0]}),
    );
    assert!(twice(-0.0_f64).await.is_sign_negative());
}

#[tokio::test(start_paused = true)]
async fn a_result_that_json_cannot_represent_is_returned_once_and_never_replayed_or_rerun() {
    async fn not_stored<T>(value: T, why: JsonError)
    where
        T: Serialize + DeserializeOwned + Clone + Debug + Send + 'static,
    {
        let world = World::new();
        let executions = ExecutionCount::default();
        let call = || {
            let (executions, value) = (executions.clone(), value.clone());
            world.charge().with_max_result_bytes(1000).unwrap().call("k", &1).run_detailed(async move |_| {
                executions.add();
                Ok::<_, String>(value)
            })
        };
        assert_eq!(call().await.unwrap().stored, StorageStatus::NotStored(why), "{value:?}");
        assert!(matches!(call().await, Err(FunctionError::Unreplayable)), "{value:?}");
        assert_eq!(executions.count(), 1);
        assert_eq!(world.state(&world.charge()).await, Some(StateName::Tombstone));
    }
    #[derive(Clone, Debug, Serialize, Deserialize)]
    struct SkipsField {
        #[serde(skip_serializing)]
        _needed: u8,
    }
    #[derive(Clone, Debug, Deserialize)]
    struct Panics;
    impl Serialize for Panics {
        fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            panic!("while it is serialized")
        }
    }
    not_stored(f64::NAN, JsonError::NotFinite).await;
    not_stored(vec![Some(f32::INFINITY)], JsonError::NotFinite).await;
    not_stored(Some(None::<u8>), JsonError::SomeOfNull).await;
    not_stored(HashMap::from([((1, 2), 3)]), JsonError::NotSerialized).await;
    not_stored(SkipsField { _needed: 1 }, JsonError::NotReadBack).await;
    not_stored("x".repeat(1000), JsonError::TooLarge).await;
    not_stored(Panics, JsonError::NotSerialized).await;
}

#[tokio::test(start_paused = true)]
async fn a_stored_result_that_cannot_be_read_is_an_error_and_not_a_second_execution() {
    #[derive(Serialize, Deserialize)]
    struct Old {
        id: String,
    }
    #[derive(Debug, Serialize, Deserialize)]
    struct New {
        _id: String,
        _currency: String,
    }
    let world = World::new();
    world.charge().run("k", &1, async |_| Ok::<_, String>(Old { id: "secret".to_owned() })).await.unwrap();
    let result = world.charge().run("k", &1, async |_| -> Result<New, String> { panic!("ran again") }).await;
    let Err(FunctionError::Undecodable { function, reason }) = result else { panic!("{result:?}") };
    assert_eq!(&*function, "charge");
    assert!(reason.starts_with("missing field"), "{reason}");
    assert!(!reason.contains("secret"));
    // A result of another type; and an error, although the type stores no errors.
    let result = world.charge().run("k", &1, async |_| Ok::<_, String>(7)).await;
    assert!(matches!(result, Err(FunctionError::Undecodable { .. })), "{result:?}");
    let failing = world.charge().with_errors(|_: &_| ErrorFate::Keep);
    failing.run("k2", &1, async |_| Err::<(), _>(PayError::NotSent)).await.unwrap_err();
    let result = world.charge().run("k2", &1, async |_| Ok::<_, PayError>(())).await;
    assert!(matches!(result, Err(FunctionError::Undecodable { .. })), "{result:?}");
}

#[tokio::test(start_paused = true)]
async fn the_policy_decides_whether_an_error_is_stored_frees_the_key_or_is_unknown() {
    let policy = |error: &PayError| match error {
        PayError::Declined { .. } => ErrorFate::Keep,
        PayError::NotSent => ErrorFate::Release,
        PayError::TimedOut => ErrorFate::Unknown,
    };
    let world = World::new();
    let charge = world.charge().with_errors(policy);
    let declined = PayError::Declined { code: 51 };
    for (key, error, runs_in_all) in
        [("a", declined.clone(), 1), ("b", PayError::NotSent, 2), ("c", PayError::TimedOut, 1)]
    {
        let executions = ExecutionCount::default();
        let call = || {
            let (executions, error) = (executions.clone(), error.clone());
            charge.run(key, &5, async move |_| {
                executions.add();
                Err::<u32, _>(error)
            })
        };
        let first = call().await.unwrap_err();
        assert!(
            matches!(&first, FunctionError::Failed { error: e, replayed: false } if *e == error),
            "{first:?}"
        );
        let second = call().await.unwrap_err();
        match error {
            PayError::Declined { .. } => {
                assert!(
                    matches!(&second, FunctionError::Failed { error: e, replayed: true } if *e == declined)
                );
            }
            PayError::NotSent => assert!(matches!(second, FunctionError::Failed { replayed: false, .. })),
            PayError::TimedOut => assert!(matches!(second, FunctionError::Unknown)),
        }
        assert_eq!(executions.count(), runs_in_all, "{key}");
    }
}

#[tokio::test(start_paused = true)]
async fn errors_without_serde_leave_the_outcome_unknown_unless_the_policy_decides_otherwise() {
    struct Opaque(bool);
    let world = World::new();
    let fail = async |_| Err::<(), _>(Opaque(false));
    assert!(matches!(world.charge().run("k", &(), fail).await, Err(FunctionError::Failed { .. })));
    assert!(matches!(world.charge().run("k", &(), fail).await, Err(FunctionError::Unknown)));
    // An operator finds the outcome out.
    world.resolve(201, "").await;
    assert!(world.charge().run("k", &(), fail).await.is_ok());

    let released = world.charge().with_errors(ReleaseIf(|_: &_| true));
    for _ in 0..2 {
        assert!(matches!(released.run("r", &(), fail).await, Err(FunctionError::Failed { .. })));
    }
    let some = world.charge().with_errors(ReleaseIf(|error: &Opaque| error.0));
    for free in [true, true, false] {
        let result = some.run("s", &(), async move |_| Err::<(), _>(Opaque(free))).await;
        assert!(matches!(result, Err(FunctionError::Failed { .. })));
    }
    assert!(matches!(some.run("s", &(), fail).await, Err(FunctionError::Unknown)));
}

#[tokio::test(start_paused = true)]
async fn under_reexecute_an_error_of_unknown_effect_runs_again_after_its_lease() {
    let world = World::new();
    let charge = world.charge().with_policy(reexecuting());
    let fail = || charge.run("k", &(), async |_| Err::<bool, _>("timed out"));
    assert!(matches!(fail().await, Err(FunctionError::Failed { .. })));
    assert!(matches!(fail().await, Err(FunctionError::InProgress { .. })));
    sleep(LEASE).await;
    let call = charge.call("k", &());
    let ran = call.run_detailed(async |attempt| Ok::<_, &str>(attempt.is_after_abandoned())).await.unwrap();
    assert_eq!((ran.value, ran.attempt), (true, Some(2)));
}

#[tokio::test(start_paused = true)]
async fn another_input_under_a_key_is_refused_and_another_name_or_caller_has_its_own_keys() {
    let world = World::new();
    let executions = ExecutionCount::default();
    let call = |function: Function, input: &serde_json::Value| {
        let executions = executions.clone();
        function.run("k", input, async move |_| Ok::<_, String>(executions.add()))
    };
    let (five, nine) = (serde_json::json!({"amount": 5, "at": 1}), serde_json::json!({"amount": 9, "at": 1}));
    assert_eq!(call(world.charge(), &five).await.unwrap(), 1);
    assert!(matches!(call(world.charge(), &nine).await, Err(FunctionError::KeyReused)));
    assert_eq!(call(world.charge(), &serde_json::json!({"at": 1.0, "amount": 5})).await.unwrap(), 1);
    assert_eq!(call(world.engine.function("refund"), &nine).await.unwrap(), 2);
    assert_eq!(call(world.charge().with_caller("tenant", "ada"), &nine).await.unwrap(), 3);
    assert_eq!(call(world.charge().with_caller("tenant", b"bob"), &nine).await.unwrap(), 4);
    let error = call(world.charge().with_caller("tenant", ""), &nine).await.unwrap_err();
    assert!(matches!(error, FunctionError::Key(KeyError::EmptyValue)), "{error}");

    let rules = FingerprintRules::new().exclude(JsonPointer::parse("/at").unwrap());
    let timed = |at: u8| {
        let input = serde_json::json!({"amount": 5, "at": at});
        call(world.engine.function("timed").with_fingerprint(rules.clone()), &input)
    };
    assert_eq!(timed(1).await.unwrap(), 5);
    assert_eq!(timed(2).await.unwrap(), 5);
}

#[tokio::test(start_paused = true)]
async fn an_input_that_the_function_changes_is_compared_as_it_was_before() {
    let world = World::new();
    for _ in 0..2 {
        let mut order = vec![3, 1, 2];
        let call = world.charge().call("k", &order);
        let sum = call.run_in_place(async |_| {
            order.sort_unstable();
            order.clear();
            Ok::<_, String>(6)
        });
        assert_eq!(sum.await.unwrap(), 6);
    }
}

#[tokio::test(start_paused = true)]
async fn an_invalid_call_runs_nothing() {
    async fn never(world: &World, key: &str, input: f64) -> FunctionError<String> {
        world.charge().run(key, &input, async |_| -> Result<(), _> { panic!("ran") }).await.unwrap_err()
    }
    let world = World::new();
    assert!(matches!(never(&world, "", 1.0).await, FunctionError::Key(KeyError::Empty)));
    let long = "k".repeat(limits::MAX_KEY_BYTES + 1);
    assert!(matches!(never(&world, &long, 1.0).await, FunctionError::Key(KeyError::TooLong { .. })));
    // As JSON it would equal the input infinity.
    assert!(matches!(never(&world, "k", f64::NAN).await, FunctionError::Input(JsonError::NotFinite)));
    assert_eq!(world.faults.calls(Operation::Claim), 0);
    assert!(world.charge().with_max_result_bytes(limits::MAX_RESPONSE_BYTES).is_ok());
    assert!(world.charge().with_max_result_bytes(limits::MAX_RESPONSE_BYTES + 1).is_err());
}

#[tokio::test(start_paused = true)]
async fn a_panic_leaves_the_outcome_unknown_and_the_process_running() {
    let world = World::new();
    let panics = async |_| -> Result<(), String> { panic!("while it runs") };
    let result = world.charge().run("k", &(), panics).await;
    assert!(matches!(result, Err(FunctionError::Panicked)), "{result:?}");
    assert_eq!(world.state(&world.charge()).await, Some(StateName::Unknown));
    assert!(matches!(world.charge().run("k", &(), panics).await, Err(FunctionError::Unknown)));

    let place = world.engine.function("in place");
    let result = place.run_in_place("k", &(), panics).await;
    assert!(matches!(result, Err(FunctionError::Panicked)), "{result:?}");
    assert!(matches!(place.run_in_place("k", &(), panics).await, Err(FunctionError::Unknown)));

    // A panic before there is a future; and a panic in the error policy, which then decides nothing.
    let early = world.engine.function("early");
    let result = early
        .run_in_place("k", &(), |_| -> std::future::Ready<Result<(), String>> { panic!("before the future") })
        .await;
    assert!(matches!(result, Err(FunctionError::Panicked)), "{result:?}");
    let policy = world.engine.function("policy").with_errors(ReleaseIf(|_: &String| panic!("in the policy")));
    let fail = async |_| Err::<(), _>("no".to_owned());
    assert!(matches!(policy.run("k", &(), fail).await, Err(FunctionError::Failed { .. })));
    assert!(matches!(policy.run("k", &(), fail).await, Err(FunctionError::Unknown)));

    // If abandoned attempts may run again, a panicked one may, too, after its lease.
    let again = world.engine.function("again").with_policy(reexecuting());
    assert!(matches!(again.run("k", &(), panics).await, Err(FunctionError::Panicked)));
    assert!(matches!(again.run("k", &(), panics).await, Err(FunctionError::InProgress { .. })));
    sleep(LEASE).await;
    assert!(again.run("k", &(), async |_| Ok::<_, String>(())).await.is_ok());
}

/// A function that starts and then waits until the test lets it continue.
struct Gate {
    begun: Notify,
    go_on: Notify,
}

impl Gate {
    fn new() -> Arc<Self> {
        Arc::new(Self { begun: Notify::new(), go_on: Notify::new() })
    }

    async fn pass(&self) {
        self.begun.notify_one();
        self.go_on.notified().await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_function_continues_and_its_result_is_stored_when_the_caller_leaves() {
    let world = World::new();
    let gate = Gate::new();
    let call = world.charge().run("k", &(), {
        let gate = gate.clone();
        async move |_| {
            gate.pass().await;
            Ok::<_, String>("paid".to_owned())
        }
    });
    let caller = tokio::spawn(call);
    gate.begun.notified().await;
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    let charge = world.charge().with_policy(Policy::default().with_wait(LEASE).unwrap());
    let waiter =
        tokio::spawn(charge.run("k", &(), async |_| -> Result<String, String> { panic!("ran again") }));
    gate.go_on.notify_one();
    assert_eq!(waiter.await.unwrap().unwrap(), "paid");
    assert_eq!(world.engine.drain(LEASE).await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_call_in_place_that_is_dropped_while_it_runs_never_frees_its_key() {
    // A function cannot ask anybody, so it does not run again under `Reconcile` either.
    let reconciling = Policy::default().with_on_abandoned(OnAbandoned::Reconcile);
    for (policy, runs_again) in [(Policy::default(), false), (reexecuting(), true), (reconciling, false)] {
        let world = World::new();
        let charge = world.charge().with_policy(policy);
        let borrowed = "a borrowed order".to_owned();
        let begun = Notify::new();
        {
            let call = charge.run_in_place("k", &borrowed, async |_| {
                begun.notify_one();
                pending::<()>().await;
                Ok::<_, String>(borrowed.len())
            });
            tokio::select! {
                _ = call => panic!("the call must not finish"),
                () = begun.notified() => {}
            }
        }
        assert_eq!(world.state(&charge).await, Some(StateName::InProgress));
        let call =
            || charge.run("k", &borrowed, async |attempt| Ok::<_, String>(attempt.is_after_abandoned()));
        assert!(
            matches!(call().await, Err(FunctionError::InProgress { lease_left }) if !lease_left.is_zero())
        );
        sleep(LEASE).await;
        if runs_again {
            assert!(call().await.unwrap(), "after an abandoned attempt");
        } else {
            assert!(matches!(call().await, Err(FunctionError::Unknown)));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_result_is_stored_although_the_caller_in_place_leaves_while_the_store_is_slow() {
    let world = World::new();
    let latch = Latch::new();
    world.faults.next(1, Operation::Complete, Fault::StallBefore(latch.clone()));
    let charge = world.charge();
    let call = tokio::spawn(charge.run_in_place("k", &(), async |_| Ok::<_, String>(1)));
    while world.faults.calls(Operation::Complete) == 0 {
        tokio::task::yield_now().await;
    }
    call.abort();
    assert!(call.await.unwrap_err().is_cancelled());
    latch.open();
    assert_eq!(world.engine.drain(LEASE).await, 0);
    assert_eq!(world.charge().run("k", &(), async |_| Ok::<_, String>(2)).await.unwrap(), 1);
}

#[tokio::test(start_paused = true)]
async fn nothing_runs_if_the_store_does_not_answer() {
    let world = World::new();
    world.faults.outage();
    let result = world.charge().run("k", &(), async |_| -> Result<(), String> { panic!("ran") }).await;
    let Err(FunctionError::Store(error)) = result else { panic!("{result:?}") };
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    world.faults.heal();
    sleep(LEASE * 2).await;
    assert!(world.charge().run("k", &(), async |_| Ok::<_, String>(())).await.is_ok());
    world.faults.next(1, Operation::Claim, Fault::Corrupt);
    let result = world.charge().run("k", &(), async |_| -> Result<(), String> { panic!("ran") }).await;
    assert!(matches!(result, Err(FunctionError::Store(error)) if error.kind() == StoreErrorKind::Corrupt));
}

#[tokio::test(start_paused = true)]
async fn a_completion_delayed_beyond_its_lease_is_stored_when_the_store_accepts_it() {
    let world = World::new();
    world.faults.always(Operation::Complete, Fault::Refuse);
    let ran = world.charge().call("k", &()).run_detailed(async |_| Ok::<_, String>(7)).await.unwrap();
    assert_eq!((ran.value, ran.stored), (7, StorageStatus::Deferred));
    sleep(LEASE * 2).await;
    let again = async |_: Attempt| -> Result<u8, String> { panic!("ran again") };
    // This process knows that the function ran, and does not report an unknown outcome.
    let result = world.charge().run("k", &(), again).await;
    assert!(matches!(result, Err(FunctionError::InProgress { .. })), "{result:?}");
    // Another process cannot know.
    let other = World::on(world.store.clone());
    let result = other.charge().run("k", &(), again).await;
    assert!(matches!(result, Err(FunctionError::Unknown)), "{result:?}");
    world.faults.heal();
    assert_eq!(world.charge().run("k", &(), again).await.unwrap(), 7);
    assert_eq!(other.charge().run("k", &(), again).await.unwrap(), 7);
}

#[tokio::test(start_paused = true)]
async fn a_stale_owner_gets_its_value_and_the_notice_that_it_was_fenced() {
    let slow = World::new();
    slow.faults.always(Operation::Renew, Fault::Refuse);
    let gate = Gate::new();
    let charge = slow.charge().with_policy(reexecuting());
    let first = tokio::spawn(charge.call("k", &()).run_detailed({
        let gate = gate.clone();
        async move |_| {
            gate.pass().await;
            Ok::<_, String>(1)
        }
    }));
    gate.begun.notified().await;
    sleep(LEASE + Duration::from_secs(1)).await;
    let other = World::on(slow.store.clone()).charge().with_policy(reexecuting());
    assert_eq!(other.run("k", &(), async |_| Ok::<_, String>(2)).await.unwrap(), 2);
    gate.go_on.notify_one();
    let ran = first.await.unwrap().unwrap();
    assert_eq!((ran.value, ran.stored), (1, StorageStatus::Fenced));
    assert_eq!(charge.run("k", &(), async |_| Ok::<_, String>(3)).await.unwrap(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_two_hundred_callers_in_two_processes_executes() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new(SystemClock::new()));
    let engines = [Engine::new(store.clone()), Engine::new(store)];
    let policy = Policy::default().with_wait(Duration::from_secs(60)).unwrap();
    let executions = ExecutionCount::default();
    let callers: Vec<_> = (0..200)
        .map(|number| {
            let executions = executions.clone();
            let charge = engines[number % 2].function("charge").with_policy(policy);
            tokio::spawn(charge.run("k", &(), async move |_| {
                tokio::task::yield_now().await;
                Ok::<_, String>(executions.add())
            }))
        })
        .collect();
    for caller in callers {
        assert_eq!(caller.await.unwrap().unwrap(), 1);
    }
    assert_eq!(executions.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_does_not_wait_gets_the_remaining_lease_of_the_owner() {
    let world = World::new();
    let gate = Gate::new();
    let charge = world.charge();
    let owner = tokio::spawn(charge.run("k", &(), {
        let gate = gate.clone();
        async move |_| {
            gate.pass().await;
            Ok::<_, String>(())
        }
    }));
    gate.begun.notified().await;
    for engine in [world.engine.clone(), World::on(world.store.clone()).engine] {
        let policy = Policy::default().with_wait(Duration::ZERO).unwrap();
        let charge = engine.function("charge").with_policy(policy);
        let result = charge.run("k", &(), async |_| Ok::<_, String>(())).await;
        let Err(FunctionError::InProgress { lease_left }) = result else { panic!("{result:?}") };
        assert_eq!(lease_left, LEASE);
    }
    gate.go_on.notify_one();
    owner.await.unwrap().unwrap();
}

/// The attempt that died may have taken effect. The outcome of the second attempt does not make the third one the first.
#[tokio::test]
async fn an_error_after_an_abandoned_attempt_does_not_hide_that_attempt() {
    let clock = Arc::new(ManualClock::at_millis(1_700_000_000_000));
    let engine = Engine::new(MemoryStore::new(clock.clone()));
    let lease = Duration::from_secs(30);
    let policy = Policy::default().with_lease(lease).unwrap().with_on_abandoned(OnAbandoned::Reexecute);
    let pay = engine.function("pay").with_policy(policy).with_errors(ReleaseIf(|_: &_| true));
    {
        let dies = pay.run_in_place("k", "the input", async |_: Attempt| {
            std::future::pending::<Result<(), &str>>().await
        });
        let mut dies = std::pin::pin!(dies);
        std::future::poll_fn(|cx| {
            assert!(dies.as_mut().poll(cx).is_pending());
            std::task::Poll::Ready(())
        })
        .await;
    }
    for _ in 0..2 {
        clock.advance(lease);
        let result = pay
            .run_in_place("k", "the input", async |attempt: Attempt| {
                assert!(attempt.is_after_abandoned());
                Err::<(), _>("the bank does not answer")
            })
            .await;
        assert!(matches!(result, Err(FunctionError::Failed { .. })), "{result:?}");
        let other = pay.run_in_place("k", "another input", async |_: Attempt| Ok::<_, &str>(())).await;
        assert!(matches!(other, Err(FunctionError::KeyReused)), "{other:?}");
    }
    clock.advance(lease);
    let result = pay
        .run_in_place("k", "the input", async |attempt: Attempt| Ok::<_, &str>(attempt.is_after_abandoned()))
        .await;
    assert!(result.unwrap());
}

#[tokio::test(start_paused = true)]
async fn services_on_one_store_do_not_share_keys() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new(crate::support::clock()));
    let engine = |service: Option<&str>| {
        let builder = Engine::builder(store.clone());
        match service {
            Some(name) => builder.with_service(ServiceName::new(name).unwrap()).build(),
            None => builder.build(),
        }
    };
    let executions = Arc::new(AtomicUsize::new(0));
    let charge = async |service: Option<&str>, caller: Option<&str>| {
        let mut function = engine(service).function("charge");
        if let Some(caller) = caller {
            function = function.with_caller("customer", caller);
        }
        let call = function.call(key(), &5);
        let executions = executions.clone();
        call.run(async move |_| Ok::<_, String>(executions.fetch_add(1, Ordering::Relaxed) + 1))
            .await
            .unwrap()
    };
    for (service, caller, run) in [
        (None, None, 1),
        (Some("orders"), None, 2),
        (Some("stock"), None, 3),
        (Some("orders"), Some("ada"), 4),
        (Some("stock"), Some("ada"), 5),
        (None, Some("ada"), 6),
    ] {
        assert_eq!(charge(service, caller).await, run, "{service:?} {caller:?}");
        // Another process of the same service uses the same keys.
        assert_eq!(charge(service, caller).await, run, "{service:?} {caller:?}");
    }
}
