//! Steps, stopped at every point by an attempt that ends there without a report.

use std::collections::{BTreeMap, HashSet};
use std::future::{Future, IntoFuture as _};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use oncegate_core::{Command, MemoryStore, OnAbandoned, Outcome, RecordId, Store, StoreError, StoreFuture};
use oncegate_engine::{
    Attempt, Engine, ErrorFate, Function, FunctionError, Policy, ReleaseIf, StepError, StepFailure,
};
use oncegate_testkit::ManualClock;

type Fate = fn(&StepError<String>) -> ErrorFate;

/// The APIs of other parties, which honour keys, and the point at which the process dies.
#[derive(Default)]
struct World {
    /// For each effect, the keys under which it took place.
    done: Mutex<BTreeMap<&'static str, HashSet<String>>>,
    calls: AtomicUsize,
    /// The number of points passed so far.
    points: AtomicUsize,
    die_at: AtomicUsize,
    ship: Mutex<Option<StepFailure<String>>>,
    refund: Mutex<Option<StepFailure<String>>>,
}

impl World {
    async fn point(&self) {
        if self.points.fetch_add(1, Ordering::SeqCst) == self.die_at.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
    }

    async fn call(&self, what: &'static str, key: String) -> String {
        self.point().await;
        self.calls.fetch_add(1, Ordering::SeqCst);
        self.done.lock().unwrap().entry(what).or_default().insert(key);
        self.point().await;
        format!("{what} done")
    }

    fn effects(&self, what: &str) -> usize {
        self.done.lock().unwrap().get(what).map_or(0, HashSet::len)
    }
}

async fn order(world: Arc<World>, attempt: Attempt) -> Result<Vec<String>, StepError<String>> {
    let (free, refund) = (world.clone(), world.clone());
    let hold = attempt
        .step("reserve", |key| async { Ok::<_, StepFailure<String>>(world.call("reserve", key).await) })
        .compensate(move |key, hold| async move {
            assert_eq!(hold, "reserve done");
            free.call("free", key).await;
            Ok::<_, StepFailure<String>>(())
        })
        .await?;
    let charge = attempt
        .step("charge", |key| async { Ok::<_, StepFailure<String>>(world.call("charge", key).await) })
        .compensate(move |key, charge| async move {
            assert_eq!(charge, "charge done");
            if let Some(failure) = refund.refund.lock().unwrap().take() {
                return Err(failure);
            }
            refund.call("refund", key).await;
            Ok(())
        })
        .await?;
    let ship = attempt
        .step("ship", |key| async {
            world.point().await;
            let failure = world.ship.lock().unwrap().clone();
            match failure {
                Some(failure) => Err(failure),
                None => Ok(world.call("ship", key).await),
            }
        })
        .await?;
    Ok(vec![hold, charge, ship])
}

struct Shop {
    clock: Arc<ManualClock>,
    orders: Function<Fate>,
}

const LEASE: Duration = Duration::from_secs(30);

fn shop() -> Shop {
    let clock = Arc::new(ManualClock::at_millis(1_700_000_000_000));
    shop_on(Arc::new(MemoryStore::new(clock.clone())), clock)
}

/// Two processes on one store.
fn two_shops() -> (Shop, Shop) {
    let clock = Arc::new(ManualClock::at_millis(1_700_000_000_000));
    let store = Arc::new(MemoryStore::new(clock.clone()));
    (shop_on(store.clone(), clock.clone()), shop_on(store, clock))
}

fn shop_on(store: Arc<dyn Store>, clock: Arc<ManualClock>) -> Shop {
    let engine = Engine::new(store);
    let policy = Policy::default().with_lease(LEASE).unwrap().with_on_abandoned(OnAbandoned::Reexecute);
    let orders = engine.function("order").with_policy(policy).with_errors(StepError::fate as fn(&_) -> _);
    Shop { clock, orders }
}

type CallResult = Result<Vec<String>, FunctionError<StepError<String>>>;

impl Shop {
    fn call(&self, world: &Arc<World>) -> impl Future<Output = CallResult> + use<> {
        let world = world.clone();
        self.orders.run_in_place("order-1", "the input", move |attempt| order(world, attempt))
    }

    /// Calls until the order dies or ends. If it dies, lets the lease end.
    async fn call_until_dead(&self, world: &Arc<World>, die_at: usize) -> Option<CallResult> {
        world.points.store(0, Ordering::SeqCst);
        world.die_at.store(die_at, Ordering::SeqCst);
        let ended = {
            let mut call = pin!(self.call(world));
            // Nothing here waits for anything but the death of the process.
            let mut polls = 0;
            std::future::poll_fn(|cx| match call.as_mut().poll(cx) {
                Poll::Ready(result) => Poll::Ready(Some(result)),
                Poll::Pending if world.points.load(Ordering::SeqCst) > die_at => Poll::Ready(None),
                Poll::Pending => {
                    polls += 1;
                    assert!(polls < 1000, "the order neither dies nor ends");
                    cx.waker().wake_by_ref();
                    Poll::Pending
                }
            })
            .await
        };
        if ended.is_none() {
            self.clock.advance(LEASE + Duration::from_millis(1));
        }
        ended
    }
}

#[tokio::test]
async fn an_order_that_dies_twice_at_any_point_takes_each_effect_once() {
    let mut deaths = 0;
    for first in 0.. {
        for second in 0.. {
            let (shop, world) = (shop(), Arc::new(World::default()));
            let Some(dead) = shop.call_until_dead(&world, first).await.map_or(Some(true), |result| {
                assert_eq!(result.unwrap(), ["reserve done", "charge done", "ship done"]);
                None
            }) else {
                assert!(second == 0 && first > 5, "the order was stopped at every point");
                assert!(deaths > 20);
                return;
            };
            assert!(dead);
            let ended = shop.call_until_dead(&world, second).await;
            let is_last = ended.is_some();
            let result = match ended {
                Some(result) => result,
                None => shop.call(&world_alive(&world)).await,
            };
            assert_eq!(result.unwrap(), ["reserve done", "charge done", "ship done"]);
            deaths += 1;
            for what in ["reserve", "charge", "ship"] {
                assert_eq!(world.effects(what), 1, "{what}, stopped at {first} and {second}");
            }
            assert_eq!((world.effects("free"), world.effects("refund")), (0, 0));
            let calls = world.calls.load(Ordering::SeqCst);
            assert!(calls <= 5, "only calls that were cut off are repeated: {calls}");
            assert_eq!(shop.call(&world).await.unwrap().len(), 3);
            assert_eq!(world.calls.load(Ordering::SeqCst), calls, "a replay makes no call");
            if is_last {
                break;
            }
        }
    }
}

fn world_alive(world: &Arc<World>) -> Arc<World> {
    world.die_at.store(usize::MAX, Ordering::SeqCst);
    world.clone()
}

#[tokio::test]
async fn an_order_that_fails_for_good_and_dies_anywhere_is_compensated_once() {
    for first in 0.. {
        let mut second = 0;
        loop {
            let (shop, world) = (shop(), Arc::new(World::default()));
            *world.ship.lock().unwrap() = Some(StepFailure::Final("no such street".to_owned()));
            let is_failed = |result: &CallResult| matches!(result, Err(FunctionError::Failed { error: StepError::Failed(why), .. }) if why == "no such street");
            if let Some(result) = shop.call_until_dead(&world, first).await {
                assert!(is_failed(&result), "{result:?}");
                assert!(first > 7, "the order was stopped at every point");
                return;
            }
            let ended = shop.call_until_dead(&world, second).await;
            let is_last = ended.is_some();
            let result = match ended {
                Some(result) => result,
                None => shop.call(&world_alive(&world)).await,
            };
            assert!(is_failed(&result), "{result:?}");
            for what in ["reserve", "charge", "free", "refund"] {
                assert_eq!(world.effects(what), 1, "{what}, stopped at {first} and {second}");
            }
            assert_eq!(world.effects("ship"), 0);
            let calls = world.calls.load(Ordering::SeqCst);
            assert!(calls <= 6, "only calls that were cut off are repeated: {calls}");
            // The same result, whatever becomes possible later.
            *world.ship.lock().unwrap() = None;
            assert!(is_failed(&shop.call(&world).await));
            assert_eq!(world.effects("ship"), 0);
            if is_last {
                break;
            }
            second += 1;
        }
    }
}

#[tokio::test]
async fn an_unsure_step_is_retried_and_a_finished_step_is_not() {
    let (shop, world) = (shop(), world_alive(&Arc::default()));
    *world.ship.lock().unwrap() = Some(StepFailure::Unsure("timed out".to_owned()));
    let result = shop.call(&world).await;
    assert!(
        matches!(result, Err(FunctionError::Failed { error: StepError::Unsure(_), replayed: false })),
        "{result:?}"
    );
    assert_eq!(world.effects("refund"), 0, "nothing is compensated while the order may still succeed");
    *world.ship.lock().unwrap() = None;
    assert!(shop.call(&world).await.is_ok(), "at once, because the key is released");
    assert_eq!(world.calls.load(Ordering::SeqCst), 3);

    // The key is not free for another request.
    let (shop, world) = (self::shop(), world_alive(&Arc::default()));
    *world.ship.lock().unwrap() = Some(StepFailure::Unsure("timed out".to_owned()));
    assert!(shop.call(&world).await.is_err());
    let other =
        shop.orders.run_in_place("order-1", "another input", |attempt| order(world.clone(), attempt)).await;
    assert!(matches!(other, Err(FunctionError::KeyReused)), "{other:?}");
}

#[tokio::test]
async fn an_unsure_compensation_is_retried_and_one_that_fails_for_good_is_left_to_an_operator() {
    let (shop, world) = (shop(), world_alive(&Arc::default()));
    *world.ship.lock().unwrap() = Some(StepFailure::Final("no such street".to_owned()));
    *world.refund.lock().unwrap() = Some(StepFailure::Unsure("the bank does not answer".to_owned()));
    let result = shop.call(&world).await;
    let Err(FunctionError::Failed { error: StepError::NotCompensated { step, reason }, .. }) = result else {
        panic!("{result:?}")
    };
    assert_eq!((step.as_str(), reason.as_str()), ("charge", "the bank does not answer"));
    assert_eq!(world.effects("free"), 0, "compensations run in the opposite order");
    let result = shop.call(&world).await;
    assert!(matches!(result, Err(FunctionError::Failed { error: StepError::Failed(_), .. })), "{result:?}");
    assert_eq!((world.effects("refund"), world.effects("free")), (1, 1));

    let (shop, world) = (self::shop(), world_alive(&Arc::default()));
    *world.ship.lock().unwrap() = Some(StepFailure::Final("no such street".to_owned()));
    *world.refund.lock().unwrap() = Some(StepFailure::Final("account closed".to_owned()));
    let result = shop.call(&world).await;
    assert!(
        matches!(result, Err(FunctionError::Failed { error: StepError::Stuck { .. }, .. })),
        "{result:?}"
    );
    assert_eq!(world.effects("free"), 1, "the other compensation runs");
    // Nothing runs again before an operator has decided.
    shop.clock.advance(LEASE * 2);
    let result = shop.call(&world).await;
    assert!(matches!(result, Err(FunctionError::Unknown)), "{result:?}");
    assert_eq!(world.effects("refund"), 0);
}

#[tokio::test]
async fn changed_code_is_refused_before_anything_runs() {
    let shop = shop();
    let key = "order-2";
    let ran = Arc::new(AtomicUsize::new(0));
    let step = |attempt: Attempt, name: &'static str, result: Result<u8, StepFailure<String>>| {
        let ran = ran.clone();
        async move {
            attempt
                .step(name, |_| async {
                    ran.fetch_add(1, Ordering::SeqCst);
                    result
                })
                .await
        }
    };
    let timed_out = || Err(StepFailure::Unsure("timed out".to_owned()));
    let result = shop
        .orders
        .run_in_place(key, "", async |attempt: Attempt| {
            step(attempt.clone(), "a", Ok(1)).await?;
            step(attempt, "b", timed_out()).await
        })
        .await;
    assert!(matches!(result, Err(FunctionError::Failed { error: StepError::Unsure(_), .. })), "{result:?}");
    assert_eq!(ran.swap(0, Ordering::SeqCst), 2);
    let result =
        shop.orders.run_in_place(key, "", async |attempt: Attempt| step(attempt, "b", Ok(1)).await).await;
    let Err(FunctionError::Failed { error: StepError::Differs { number: 0, recorded }, .. }) = result else {
        panic!("{result:?}")
    };
    assert_eq!(recorded, "a");
    // The value has another type.
    let result = shop
        .orders
        .run_in_place(key, "", async |attempt: Attempt| {
            attempt.step("a", |_| async { Ok::<_, StepFailure<String>>("text".to_owned()) }).await
        })
        .await;
    assert!(
        matches!(result, Err(FunctionError::Failed { error: StepError::Undecodable { .. }, .. })),
        "{result:?}"
    );
    assert_eq!(ran.load(Ordering::SeqCst), 0);
    let result = shop
        .orders
        .run_in_place(key, "", async |attempt: Attempt| {
            step(attempt.clone(), "a", Ok(2)).await?;
            step(attempt, "b", Ok(3)).await
        })
        .await;
    assert_eq!(result.unwrap(), 3, "the old order continues");
    assert_eq!(ran.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_step_is_refused_if_it_shares_a_key_or_follows_a_failed_step() {
    let shop = shop();
    let ok = |_key: String| async { Ok::<_, StepFailure<String>>(1_u8) };
    let refused = |result: Result<u8, StepError<String>>| matches!(result, Err(StepError::Refused { .. }));
    for (key, name) in [("k1", "a"), ("k2", "~a"), ("k3", "")] {
        let result = shop
            .orders
            .run_in_place(key, "", async |attempt: Attempt| {
                attempt.step("a", ok).await?;
                assert!(refused(attempt.step(name, ok).await), "{name:?}");
                assert!(refused(attempt.step("b", ok).await), "no step follows a refused one");
                Ok::<_, StepError<String>>(())
            })
            .await;
        assert!(result.is_ok(), "{result:?}");
    }
    shop.orders
        .run_in_place("k4", "", async |attempt: Attempt| {
            let (one, two) = tokio::join!(
                attempt.step("a", |_| async {
                    tokio::task::yield_now().await;
                    Ok::<_, StepFailure<String>>(1_u8)
                }),
                attempt.step("b", ok)
            );
            assert!(one.is_ok() && refused(two), "the steps run one after the other");
            Ok::<_, StepError<String>>(())
        })
        .await
        .unwrap();
}

/// The first step may have taken place, so its key is not free for another request, although nothing is recorded yet.
#[tokio::test]
async fn an_unsure_first_step_keeps_its_key_from_other_requests() {
    let (shop, world) = (shop(), world_alive(&Arc::default()));
    let timed_out = |_: String| async { Err::<u8, _>(StepFailure::Unsure("timed out".to_owned())) };
    let first = async |attempt: Attempt| attempt.step("reserve", timed_out).await;
    let result = shop.orders.run_in_place("order-1", "the input", first).await;
    assert!(matches!(result, Err(FunctionError::Failed { error: StepError::Unsure(_), .. })), "{result:?}");
    let other =
        shop.orders.run_in_place("order-1", "another input", |attempt| order(world.clone(), attempt)).await;
    assert!(matches!(other, Err(FunctionError::KeyReused)), "{other:?}");
    assert_eq!(world.effects("reserve"), 0);
    // A retry of the same request continues, at once and any number of times.
    let result = shop.orders.run_in_place("order-1", "the input", first).await;
    assert!(matches!(result, Err(FunctionError::Failed { error: StepError::Unsure(_), .. })), "{result:?}");
    assert_eq!(shop.call(&world).await.unwrap(), ["reserve done", "charge done", "ship done"]);
}

/// Before a step runs, the record reserves the space for its compensation.
#[tokio::test]
async fn a_step_whose_compensation_would_not_fit_into_the_record_is_not_run() {
    let shop = shop();
    let undone = Arc::new(AtomicUsize::new(0));
    let step = |attempt: &Attempt, name: String, result: Result<u8, StepFailure<String>>| {
        let undone = undone.clone();
        attempt.step(name, async |_| result).compensate(move |_, _: u8| async move {
            undone.fetch_add(1, Ordering::SeqCst);
            Ok::<_, StepFailure<String>>(())
        })
    };
    let result = shop
        .orders
        .run_in_place("long", "", async |attempt: Attempt| step(&attempt, "n".repeat(250), Ok(1)).await)
        .await;
    assert!(
        matches!(result, Err(FunctionError::Failed { error: StepError::Refused { .. }, .. })),
        "{result:?}"
    );

    // 126 steps with one compensation each, one step that fails, and the record of that failure: 255 of 256 entries.
    let result = shop
        .orders
        .run_in_place("many", "", async |attempt: Attempt| {
            for n in 0..126 {
                step(&attempt, n.to_string(), Ok(1)).await?;
            }
            step(&attempt, "last".to_owned(), Err(StepFailure::Final("no".to_owned()))).await
        })
        .await;
    assert!(matches!(result, Err(FunctionError::Failed { error: StepError::Failed(_), .. })), "{result:?}");
    assert_eq!(undone.swap(0, Ordering::SeqCst), 126);

    let result = shop
        .orders
        .run_in_place("too many", "", async |attempt: Attempt| {
            for n in 0..127 {
                step(&attempt, n.to_string(), Ok(1)).await?;
            }
            step(&attempt, "last".to_owned(), Err(StepFailure::Final("no".to_owned()))).await
        })
        .await;
    assert!(
        matches!(result, Err(FunctionError::Failed { error: StepError::Refused { .. }, .. })),
        "{result:?}"
    );
    assert_eq!(undone.load(Ordering::SeqCst), 0);
}

/// A result must leave space for the compensation that it may need; this result alone would fit.
#[tokio::test]
async fn a_result_that_leaves_no_space_for_compensations_is_not_recorded() {
    let shop = shop();
    let result = shop
        .orders
        .run_in_place("large", "", async |attempt: Attempt| {
            attempt
                .step("a", async |_| Ok::<_, StepFailure<String>>("x".repeat(1024 * 1024 - 15)))
                .compensate(async |_, _: String| Ok::<_, StepFailure<String>>(()))
                .await
        })
        .await;
    assert!(
        matches!(result, Err(FunctionError::Failed { error: StepError::NotRecorded { .. }, .. })),
        "{result:?}"
    );
}

/// A store that records no step.
struct StoreWithoutSteps(MemoryStore<Arc<ManualClock>>);

impl Store for StoreWithoutSteps {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        if matches!(command, Command::Step(_)) {
            return Box::pin(async { Err(StoreError::invalid("no steps here")) });
        }
        self.0.apply(id, command)
    }

    oncegate_core::delegate_store!(self, self.0 => lookup list purge audit check now capabilities);
}

#[tokio::test]
async fn a_step_that_took_place_unrecorded_does_not_free_its_key() {
    for failure in [None, Some(StepFailure::Unsure("timed out".to_owned()))] {
        let clock = Arc::new(ManualClock::at_millis(1_700_000_000_000));
        let shop = shop_on(Arc::new(StoreWithoutSteps(MemoryStore::new(clock.clone()))), clock);
        let world = world_alive(&Arc::default());
        let result = async |attempt: Attempt| {
            let result = failure.clone().map_or(Ok(1_u8), Err);
            attempt.step("reserve", async |_| result).await
        };
        let result = shop.orders.run_in_place("order-1", "the input", result).await;
        assert!(
            matches!(result, Err(FunctionError::Failed { error: StepError::Store { .. }, .. })),
            "{result:?}"
        );
        let other =
            shop.orders.run_in_place("order-1", "another input", |attempt| order(world, attempt)).await;
        assert!(matches!(other, Err(FunctionError::KeyReused)), "{other:?}");
    }
}

/// The key stays claimed, whatever error the function makes of the failed recording.
#[tokio::test]
async fn an_unrecorded_step_does_not_free_its_key_under_another_error() {
    for failure in [None, Some(StepFailure::Unsure("timed out".to_owned()))] {
        let clock = Arc::new(ManualClock::at_millis(1_700_000_000_000));
        let engine = Engine::new(StoreWithoutSteps(MemoryStore::new(clock)));
        let pay = engine.function("pay").with_errors(ReleaseIf(|_: &_| true));
        let result = pay
            .run_in_place("k", "the input", async |attempt: Attempt| {
                let result = failure.clone().map_or(Ok(1_u8), Err);
                let charged = attempt.step("charge", async |_| result).await;
                charged.map_err(|_| "the bank does not answer")
            })
            .await;
        assert!(matches!(result, Err(FunctionError::Failed { .. })), "{result:?}");
        let other = pay.run_in_place("k", "another input", async |_: Attempt| Ok::<_, &str>(())).await;
        assert!(matches!(other, Err(FunctionError::KeyReused)), "{other:?}");
    }
}

/// By then another attempt may run, or the operation may be done.
#[tokio::test]
async fn no_step_begins_after_its_attempt_has_ended() {
    let engine = Engine::new(MemoryStore::new(ManualClock::at_millis(1)));
    let pay = engine.function("pay").with_errors(ReleaseIf(|_: &_| true));
    for ends in [Ok(()), Err("no")] {
        let mut kept = None;
        let key = if ends.is_ok() { "done" } else { "free" };
        let result = pay
            .run_in_place(key, "the input", async |attempt: Attempt| {
                kept = Some(attempt);
                ends
            })
            .await;
        assert_eq!(result.is_ok(), ends.is_ok());
        let ran = AtomicUsize::new(0);
        let late = kept.unwrap().step("charge", async |_| {
            ran.fetch_add(1, Ordering::SeqCst);
            Ok::<_, StepFailure<String>>(())
        });
        let late = late.await;
        assert!(matches!(late, Err(StepError::Refused { .. })), "{late:?}");
        assert_eq!(ran.load(Ordering::SeqCst), 0);
    }
}

/// A time-out around a step proves nothing about its effect, whatever error the function makes of it.
#[tokio::test(start_paused = true)]
async fn a_step_that_was_cut_off_does_not_free_its_key() {
    let engine = Engine::new(MemoryStore::new(ManualClock::at_millis(1)));
    let pay = engine.function("pay").with_errors(ReleaseIf(|_: &_| true));
    let result = pay
        .run_in_place("k", "the input", async |attempt: Attempt| {
            let step = attempt.step("charge", |_| std::future::pending::<Result<(), StepFailure<String>>>());
            match tokio::time::timeout(Duration::from_secs(1), step.into_future()).await {
                Ok(charged) => charged.map_err(|error| error.to_string()),
                Err(_) => Err("timed out".to_owned()),
            }
        })
        .await;
    assert!(matches!(result, Err(FunctionError::Failed { .. })), "{result:?}");
    let other = pay.run_in_place("k", "another input", async |_: Attempt| Ok::<_, String>(())).await;
    assert!(matches!(other, Err(FunctionError::KeyReused)), "{other:?}");
    let again = pay.run_in_place("k", "the input", async |_: Attempt| Ok::<_, String>(())).await;
    assert!(matches!(again, Err(FunctionError::Unknown)), "{again:?}");
}

/// The same holds for a step that runs on next to the function that began it.
#[tokio::test]
async fn a_step_that_still_runs_does_not_free_its_key() {
    let engine = Engine::new(MemoryStore::new(ManualClock::at_millis(1)));
    let pay = engine.function("pay").with_errors(ReleaseIf(|_: &_| true));
    let begun = Arc::new(tokio::sync::Notify::new());
    let is_begun = begun.clone();
    let result = pay
        .run_in_place("k", "the input", async move |attempt: Attempt| {
            let step = attempt.step("charge", async move |_| {
                begun.notify_one();
                std::future::pending::<Result<(), StepFailure<String>>>().await
            });
            tokio::spawn(step.into_future());
            is_begun.notified().await;
            Err::<(), _>("given up".to_owned())
        })
        .await;
    assert!(matches!(result, Err(FunctionError::Failed { .. })), "{result:?}");
    let other = pay.run_in_place("k", "another input", async |_: Attempt| Ok::<_, String>(())).await;
    assert!(matches!(other, Err(FunctionError::KeyReused)), "{other:?}");
}

/// The second attempt gives up before anything is recorded; that does not free the key of the first.
#[tokio::test]
async fn an_attempt_after_one_that_died_in_its_first_step_keeps_the_key() {
    let (shop, world) = (shop(), Arc::new(World::default()));
    assert!(shop.call_until_dead(&world, 1).await.is_none(), "the attempt dies after the effect");
    assert_eq!(world.effects("reserve"), 1);
    let world = world_alive(&world);
    let result = shop
        .orders
        .run_in_place("order-1", "the input", async |attempt: Attempt| {
            // Refused, because the name of its compensation is too long.
            let step = attempt.step("n".repeat(250), async |_| Ok::<_, StepFailure<String>>(1_u8));
            step.compensate(async |_, _: u8| Ok::<_, StepFailure<String>>(())).await
        })
        .await;
    assert!(result.is_err());
    let other =
        shop.orders.run_in_place("order-1", "another input", |attempt| order(world.clone(), attempt)).await;
    assert!(matches!(other, Err(FunctionError::KeyReused)), "{other:?}");
    assert_eq!(shop.call(&world).await.unwrap().len(), 3);
    assert_eq!(world.effects("reserve"), 1);
}

/// However long the failure text of a compensation is, it is recorded, and the other compensations run.
#[tokio::test]
async fn a_compensation_with_a_long_failure_text_leaves_space_for_the_others() {
    let shop = shop();
    let undone = Arc::new(AtomicUsize::new(0));
    let result = shop
        .orders
        .run_in_place("order-1", "", async |attempt: Attempt| {
            let undone = undone.clone();
            let undo = async move |_: String, _: u8| {
                undone.fetch_add(1, Ordering::SeqCst);
                Ok::<_, StepFailure<String>>(())
            };
            attempt.step("a", async |_| Ok::<_, StepFailure<String>>(1_u8)).compensate(undo).await?;
            let much = async |_: String, _: u8| Err(StepFailure::Final("\u{1}".repeat(2 * 1024 * 1024)));
            attempt.step("b", async |_| Ok::<_, StepFailure<String>>(2_u8)).compensate(much).await?;
            attempt.step("c", async |_| Err::<u8, _>(StepFailure::Final("no".to_owned()))).await
        })
        .await;
    let Err(FunctionError::Failed { error: StepError::Stuck { step, reason }, .. }) = result else {
        panic!("{result:?}")
    };
    assert_eq!((step.as_str(), reason.len()), ("b", 160));
    assert_eq!(undone.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_knows_its_record_is_lost_begins_no_step() {
    let ((one, two), world) = (two_shops(), world_alive(&Arc::default()));
    let ran = AtomicUsize::new(0);
    let result = one
        .orders
        .run_in_place("order-1", "the input", async |attempt: Attempt| {
            one.clock.advance(LEASE + Duration::from_millis(1));
            assert!(two.call(&world).await.is_ok());
            // Its next renewal reports the loss.
            tokio::time::timeout(LEASE, attempt.lost()).await.expect("the attempt is notified");
            let late = attempt.step("late", async |_| {
                ran.fetch_add(1, Ordering::SeqCst);
                Ok::<_, StepFailure<String>>(())
            });
            late.await
        })
        .await;
    assert!(matches!(result, Err(FunctionError::Failed { error: StepError::Fenced, .. })), "{result:?}");
    assert_eq!(ran.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_stale_attempt_does_not_continue_the_steps_of_the_new_owner() {
    let ((one, two), world) = (two_shops(), world_alive(&Arc::default()));
    let unsure = Some(StepFailure::Unsure("timed out".to_owned()));
    *world.ship.lock().unwrap() = unsure.clone();
    assert!(one.call(&world).await.is_err());
    let calls = world.calls.load(Ordering::SeqCst);
    let result = one
        .orders
        .run_in_place("order-1", "the input", async |attempt: Attempt| {
            assert_eq!(attempt.number(), 2);
            one.clock.advance(LEASE + Duration::from_millis(1));
            assert!(two.call(&world).await.is_err(), "the second process does not finish the order either");
            order(world.clone(), attempt).await
        })
        .await;
    assert!(matches!(result, Err(FunctionError::Failed { error: StepError::Fenced, .. })), "{result:?}");
    assert_eq!(world.calls.load(Ordering::SeqCst), calls);
}
