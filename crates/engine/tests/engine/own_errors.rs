//! Operations in steps that end with an error of their own: finished steps are compensated first.

use std::collections::{BTreeMap, HashSet};
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use oncegate_core::{MemoryStore, OnAbandoned, StateName};
use oncegate_engine::{
    Attempt, Engine, ErrorFate, Function, FunctionError, Policy, ReleaseIf, StepError, StepFailure,
};
use oncegate_testkit::ManualClock;
use serde::{Deserialize, Serialize};

const LEASE: Duration = Duration::from_secs(30);

/// The APIs of other parties, which honour keys, and the point at which the process dies.
#[derive(Default)]
struct World {
    done: Mutex<BTreeMap<&'static str, HashSet<String>>>,
    points: AtomicUsize,
    die_at: AtomicUsize,
    in_stock: AtomicBool,
    refund: Mutex<Option<StepFailure<String>>>,
    ship: Mutex<Option<StepFailure<String>>>,
}

impl World {
    async fn point(&self) {
        if self.points.fetch_add(1, Ordering::SeqCst) == self.die_at.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
    }

    async fn call(&self, what: &'static str, key: String) -> Result<String, StepFailure<String>> {
        self.point().await;
        self.done.lock().unwrap().entry(what).or_default().insert(key);
        self.point().await;
        Ok(format!("{what} done"))
    }

    fn effects(&self) -> Vec<(&'static str, usize)> {
        self.done.lock().unwrap().iter().map(|(what, keys)| (*what, keys.len())).collect()
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum OrderError {
    OutOfStock,
    Step(StepError<String>),
}

impl From<StepError<String>> for OrderError {
    fn from(error: StepError<String>) -> Self {
        Self::Step(error)
    }
}

impl OrderError {
    fn fate(&self) -> ErrorFate {
        match self {
            Self::OutOfStock => ErrorFate::Keep,
            Self::Step(error) => error.fate(),
        }
    }
}

async fn charge(world: &Arc<World>, attempt: &Attempt) -> Result<String, StepError<String>> {
    let (free, refund) = (world.clone(), world.clone());
    attempt
        .step("reserve", |key| world.call("reserve", key))
        .compensate(move |key, _| async move { free.call("free", key).await.map(drop) })
        .await?;
    attempt
        .step("charge", |key| world.call("charge", key))
        .compensate(move |key, receipt| async move {
            assert_eq!(receipt, "charge done");
            let failure = refund.refund.lock().unwrap().clone();
            match failure {
                Some(failure) => Err(failure),
                None => refund.call("refund", key).await.map(drop),
            }
        })
        .await
}

async fn ship(world: &Arc<World>, attempt: &Attempt) -> Result<String, StepError<String>> {
    let failure = world.ship.lock().unwrap().clone();
    let shipped = attempt.step("ship", |key| async {
        match failure {
            Some(failure) => Err(failure),
            None => world.call("ship", key).await,
        }
    });
    shipped.await
}

/// Returns its own error type.
async fn order(world: Arc<World>, attempt: Attempt) -> Result<String, OrderError> {
    charge(&world, &attempt).await?;
    if !world.in_stock.load(Ordering::SeqCst) {
        return Err(OrderError::OutOfStock);
    }
    Ok(ship(&world, &attempt).await?)
}

/// Fails through `Attempt::fail`.
async fn failing(world: Arc<World>, attempt: Attempt) -> Result<String, StepError<String>> {
    charge(&world, &attempt).await?;
    if !world.in_stock.load(Ordering::SeqCst) {
        return Err(attempt.fail("out of stock".to_owned()).await);
    }
    ship(&world, &attempt).await
}

struct Shop {
    clock: Arc<ManualClock>,
    engine: Engine,
}

impl Shop {
    fn new() -> Self {
        let clock = Arc::new(ManualClock::at_millis(1_700_000_000_000));
        Self { engine: Engine::new(MemoryStore::new(clock.clone())), clock }
    }

    fn function<P>(&self, errors: P) -> Function<P> {
        let policy = Policy::default().with_lease(LEASE).unwrap().with_wait(Duration::ZERO).unwrap();
        let policy = policy.with_on_abandoned(OnAbandoned::Reexecute);
        self.engine.function("order").with_policy(policy).with_errors(errors)
    }

    fn order(
        &self,
        world: &Arc<World>,
    ) -> impl Future<Output = Result<String, FunctionError<OrderError>>> + use<> {
        let world = world.clone();
        self.function(OrderError::fate).run_in_place("k", "", move |attempt| order(world, attempt))
    }

    fn failing(
        &self,
        world: &Arc<World>,
    ) -> impl Future<Output = Result<String, FunctionError<StepError<String>>>> + use<> {
        let world = world.clone();
        self.function(StepError::fate).run_in_place("k", "", move |attempt| failing(world, attempt))
    }

    /// Calls until the operation ends, or dies at this point and its lease ends.
    async fn call_until_dead<T>(
        &self,
        world: &Arc<World>,
        die_at: usize,
        call: impl Future<Output = T>,
    ) -> Option<T> {
        world.points.store(0, Ordering::SeqCst);
        world.die_at.store(die_at, Ordering::SeqCst);
        let ended = {
            let mut call = pin!(call);
            let mut polls = 0;
            std::future::poll_fn(|cx| match call.as_mut().poll(cx) {
                Poll::Ready(ended) => Poll::Ready(Some(ended)),
                Poll::Pending if polls > 20 => Poll::Ready(None),
                Poll::Pending => {
                    polls += 1;
                    cx.waker().wake_by_ref();
                    Poll::Pending
                }
            })
            .await
        };
        if ended.is_none() {
            self.clock.advance(LEASE);
        }
        ended
    }

    async fn state(&self) -> StateName {
        let key = oncegate_core::IdempotencyKey::try_from("k").unwrap();
        let id = self.engine.function("order").record_id(&key);
        let record = self.engine.store().lookup(id).await.unwrap().unwrap();
        record.state_name(self.engine.store().now())
    }
}

const COMPENSATED: [(&str, usize); 4] = [("charge", 1), ("free", 1), ("refund", 1), ("reserve", 1)];

/// The operation is stopped at every point, and again at every point of the second call; meanwhile the item is back in stock.
macro_rules! stopped_everywhere {
    ($call:ident, $is_failed:expr) => {
        for first in 0.. {
            let mut second = 0;
            loop {
                let (shop, world) = (Shop::new(), Arc::new(World::default()));
                let is_failed = $is_failed;
                if let Some(ended) = shop.call_until_dead(&world, first, shop.$call(&world)).await {
                    assert!(is_failed(&ended), "{ended:?}");
                    assert_eq!(world.effects(), COMPENSATED);
                    assert!(first > 7, "the operation was stopped at every point");
                    return;
                }
                // Before the error is recorded, another attempt may end differently.
                let is_decided = first >= 4;
                world.in_stock.store(is_decided, Ordering::SeqCst);
                let ended = shop.call_until_dead(&world, second, shop.$call(&world)).await;
                let is_last = ended.is_some();
                let ended = match ended {
                    Some(ended) => ended,
                    None => shop.call_until_dead(&world, usize::MAX, shop.$call(&world)).await.unwrap(),
                };
                assert!(is_failed(&ended), "stopped at {first} and {second}: {ended:?}");
                assert_eq!(world.effects(), COMPENSATED, "stopped at {first} and {second}");
                // The same result, whatever becomes possible later.
                world.in_stock.store(true, Ordering::SeqCst);
                let again = shop.call_until_dead(&world, usize::MAX, shop.$call(&world)).await.unwrap();
                assert!(is_failed(&again), "{again:?}");
                assert_eq!(world.effects(), COMPENSATED);
                assert_eq!(shop.state().await, StateName::Completed);
                if is_last {
                    break;
                }
                second += 1;
            }
        }
    };
}

#[tokio::test]
async fn a_stored_error_of_the_operation_compensates_finished_steps_wherever_it_dies() {
    type Ended = Result<String, FunctionError<OrderError>>;
    stopped_everywhere!(order, |ended: &Ended| matches!(
        ended,
        Err(FunctionError::Failed { error: OrderError::OutOfStock, .. })
    ));
}

#[tokio::test]
async fn a_failed_attempt_compensates_finished_steps_wherever_it_dies() {
    type Ended = Result<String, FunctionError<StepError<String>>>;
    stopped_everywhere!(failing, |ended: &Ended| matches!(
        ended,
        Err(FunctionError::Failed { error: StepError::Failed(why), .. }) if why == "out of stock"
    ));
}

#[tokio::test]
async fn an_error_is_not_the_result_before_all_compensations_are_done() {
    let (shop, world) = (Shop::new(), Arc::new(World::default()));
    world.die_at.store(usize::MAX, Ordering::SeqCst);
    *world.refund.lock().unwrap() = Some(StepFailure::Unsure("the bank does not answer".to_owned()));
    for _ in 0..2 {
        let result = shop.order(&world).await;
        let Err(FunctionError::NotCompensated { error: OrderError::OutOfStock, reason }) = result else {
            panic!("{result:?}")
        };
        assert!(reason.contains("the bank does not answer"), "{reason}");
        assert_eq!(shop.state().await, StateName::Released);
        // By now there would be enough stock; but the operation has failed.
        world.in_stock.store(true, Ordering::SeqCst);
        let result = shop.order(&world).await;
        assert!(
            matches!(
                result,
                Err(FunctionError::Failed { error: OrderError::Step(_), .. }
                    | FunctionError::NotCompensated { .. })
            ),
            "{result:?}"
        );
        assert_eq!(shop.state().await, StateName::Released);
        world.in_stock.store(false, Ordering::SeqCst);
    }
    *world.refund.lock().unwrap() = None;
    for replayed in [false, true] {
        let result = shop.order(&world).await;
        assert!(
            matches!(result, Err(FunctionError::Failed { error: OrderError::OutOfStock, replayed: r }) if r == replayed),
            "{result:?}"
        );
    }
    assert_eq!(world.effects(), COMPENSATED);
}

#[tokio::test]
async fn a_compensation_that_fails_for_good_is_left_to_an_operator() {
    let (shop, world) = (Shop::new(), Arc::new(World::default()));
    world.die_at.store(usize::MAX, Ordering::SeqCst);
    *world.refund.lock().unwrap() = Some(StepFailure::Final("the account is closed".to_owned()));
    let result = shop.order(&world).await;
    assert!(matches!(result, Err(FunctionError::NotCompensated { .. })), "{result:?}");
    assert_eq!(shop.state().await, StateName::Unknown);
    assert!(matches!(shop.order(&world).await, Err(FunctionError::Unknown)));
    assert_eq!(
        world.effects(),
        [("charge", 1), ("free", 1), ("reserve", 1)],
        "the other steps are compensated"
    );
}

/// The function treats the time-out of a step as a decision.
#[tokio::test]
async fn an_error_made_from_an_unsure_step_is_not_the_result() {
    let (shop, world) = (Shop::new(), Arc::new(World::default()));
    world.die_at.store(usize::MAX, Ordering::SeqCst);
    world.in_stock.store(true, Ordering::SeqCst);
    *world.ship.lock().unwrap() = Some(StepFailure::Unsure("timed out".to_owned()));
    let call = || {
        let world = world.clone();
        shop.function(|_: &_| ErrorFate::Keep).run_in_place("k", "", async move |attempt| {
            order(world, attempt).await.map_err(|_| "declined".to_owned())
        })
    };
    let result = call().await;
    assert!(matches!(result, Err(FunctionError::NotCompensated { .. })), "{result:?}");
    *world.ship.lock().unwrap() = None;
    assert_eq!(call().await.unwrap(), "ship done");
    assert_eq!(world.effects(), [("charge", 1), ("reserve", 1), ("ship", 1)]);
}

#[tokio::test]
async fn an_error_that_frees_the_key_compensates_nothing() {
    let (shop, world) = (Shop::new(), Arc::new(World::default()));
    world.die_at.store(usize::MAX, Ordering::SeqCst);
    let call = || {
        let world = world.clone();
        shop.function(ReleaseIf(|_: &_| true)).run_in_place("k", "", move |attempt| order(world, attempt))
    };
    let result = call().await;
    assert!(matches!(result, Err(FunctionError::Failed { error: OrderError::OutOfStock, .. })), "{result:?}");
    world.in_stock.store(true, Ordering::SeqCst);
    assert_eq!(call().await.unwrap(), "ship done");
    assert_eq!(world.effects(), [("charge", 1), ("reserve", 1), ("ship", 1)]);
}

#[tokio::test]
async fn an_error_without_finished_steps_needs_no_compensation_and_ends_the_steps() {
    let shop = Shop::new();
    let result = shop
        .function(StepError::fate)
        .run_in_place("k", "", async |attempt: Attempt| {
            let error = attempt.fail("no".to_owned()).await;
            assert_eq!(error, StepError::Failed("no".to_owned()));
            let late = attempt.step("late", async |_| Ok::<_, StepFailure<String>>(())).await;
            assert!(matches!(late, Err(StepError::Refused { .. })), "{late:?}");
            Err::<(), _>(error)
        })
        .await;
    assert!(
        matches!(result, Err(FunctionError::Failed { error: StepError::Failed(_), replayed: false })),
        "{result:?}"
    );
    assert_eq!(shop.state().await, StateName::Completed);
}
