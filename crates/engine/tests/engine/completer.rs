//! The completer finishes calls whose owner is gone.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use oncegate_core::{ListPage, ListQuery, MemoryStore, OnAbandoned, Store, StoreFuture};
use oncegate_engine::{
    Attempt, CompleterOptions, Engine, ErrorFate, FunctionError, Policy, Resumable, StepError, StepFailure,
};
use oncegate_testkit::ManualClock;

type Orders = Resumable<Vec<String>, Vec<String>, StepError<String>, fn(&StepError<String>) -> ErrorFate>;

/// Shared by the calls of all machines: which effects took place, and before which item the first machine stops.
#[derive(Default)]
struct World {
    effects: Mutex<Vec<String>>,
    stop_before: Mutex<Option<String>>,
    fail: Mutex<Option<StepFailure<String>>>,
    stopped: AtomicUsize,
}

const LEASE: Duration = Duration::from_secs(30);

struct Machine {
    engine: Engine,
    orders: Orders,
}

fn machine(store: &Arc<MemoryStore<Arc<ManualClock>>>, world: &Arc<World>, stops: bool) -> Machine {
    let engine = Engine::new(store.clone());
    let policy = Policy::default().with_lease(LEASE).unwrap().with_on_abandoned(OnAbandoned::Reexecute);
    let world = world.clone();
    let orders = engine
        .function("order")
        .with_policy(policy)
        .with_errors(StepError::fate as fn(&_) -> _)
        .resumable(move |attempt, items| ship_all(world.clone(), stops, attempt, items))
        .unwrap();
    Machine { engine, orders }
}

async fn ship_all(
    world: Arc<World>,
    stops: bool,
    attempt: Attempt,
    items: Vec<String>,
) -> Result<Vec<String>, StepError<String>> {
    let mut shipped = Vec::new();
    for item in items {
        let step = attempt.step(format!("ship {item}"), |_key| async {
            if stops && *world.stop_before.lock().unwrap() == Some(item.clone()) {
                world.stopped.fetch_add(1, Ordering::SeqCst);
                std::future::pending::<()>().await;
            }
            if let Some(failure) = world.fail.lock().unwrap().clone() {
                return Err(failure);
            }
            world.effects.lock().unwrap().push(item.clone());
            Ok(format!("shipped {item}"))
        });
        shipped.push(step.await?);
    }
    Ok(shipped)
}

struct Scene {
    clock: Arc<ManualClock>,
    store: Arc<MemoryStore<Arc<ManualClock>>>,
    world: Arc<World>,
    first: Machine,
    second: Machine,
}

fn scene() -> Scene {
    let clock = Arc::new(ManualClock::at_millis(1_700_000_000_000));
    let store = Arc::new(MemoryStore::new(clock.clone()));
    let world = Arc::new(World::default());
    let first = machine(&store, &world, true);
    let second = machine(&store, &world, false);
    Scene { clock, store, world, first, second }
}

fn items() -> Vec<String> {
    ["book", "pen", "lamp"].map(str::to_owned).to_vec()
}

impl Scene {
    /// The first machine begins an order and dies before it ships this item.
    async fn stop_before(&self, key: &str, item: &str) {
        *self.world.stop_before.lock().unwrap() = Some(item.to_owned());
        let before = self.world.stopped.load(Ordering::SeqCst);
        let (orders, key) = (self.first.orders.clone(), key.to_owned());
        tokio::spawn(async move { orders.run(key.as_str(), &items()).await });
        tokio::time::timeout(Duration::from_secs(30), async {
            while self.world.stopped.load(Ordering::SeqCst) == before {
                tokio::task::yield_now().await;
            }
        })
        .await
        .expect("the order reaches this item");
    }

    fn effects(&self) -> Vec<String> {
        self.world.effects.lock().unwrap().clone()
    }
}

#[tokio::test]
async fn the_completer_finishes_an_order_whose_owner_died() {
    let scene = scene();
    scene.stop_before("order-1", "pen").await;
    let round = scene.second.orders.complete(CompleterOptions::default()).await.unwrap();
    assert_eq!((round.executed, round.left), (0, 0), "the owner may still be alive");
    scene.clock.advance(LEASE + Duration::from_millis(1));
    let round = scene.second.orders.complete(CompleterOptions::default()).await.unwrap();
    assert_eq!((round.executed, round.left), (1, 0));
    assert_eq!(scene.effects(), items(), "the book was shipped once");
    let ran = scene.second.orders.run_detailed("order-1", &items()).await.unwrap();
    assert!(ran.is_replayed());
    assert_eq!(ran.value, ["shipped book", "shipped pen", "shipped lamp"]);
    let round = scene.second.orders.complete(CompleterOptions::default()).await.unwrap();
    assert_eq!(round.executed, 0, "nothing is left to finish");
}

#[tokio::test]
async fn an_order_released_half_way_is_left_to_its_caller_for_a_while() {
    let scene = scene();
    *scene.world.fail.lock().unwrap() = Some(StepFailure::Unsure("timed out".to_owned()));
    let result = scene.second.orders.run("order-1", &items()).await;
    assert!(matches!(result, Err(FunctionError::Failed { error: StepError::Unsure(_), .. })), "{result:?}");
    *scene.world.fail.lock().unwrap() = None;
    let how = CompleterOptions::default().with_first_pause(Duration::from_secs(60));
    scene.clock.advance(Duration::from_secs(59));
    assert_eq!(scene.second.orders.complete(how).await.unwrap().executed, 0);
    scene.clock.advance(Duration::from_secs(1));
    assert_eq!(scene.second.orders.complete(how).await.unwrap().executed, 1);
    assert_eq!(scene.effects(), items());
}

#[tokio::test]
async fn several_completers_finish_an_order_only_once() {
    let scene = scene();
    for n in 0..20 {
        scene.stop_before(&format!("order-{n}"), "lamp").await;
    }
    scene.clock.advance(LEASE + Duration::from_millis(1));
    let third = machine(&scene.store, &scene.world, false);
    let how = CompleterOptions::default();
    let (one, two, three) = tokio::join!(
        scene.second.orders.complete(how),
        third.orders.complete(how),
        third.orders.complete(how)
    );
    let executed = one.unwrap().executed + two.unwrap().executed + three.unwrap().executed;
    assert_eq!(executed, 20);
    let lamps = scene.effects().iter().filter(|item| *item == "lamp").count();
    assert_eq!((lamps, scene.effects().len()), (20, 60));
}

/// Lets time pass with one round every ten seconds, and returns the minutes at which the order was executed.
async fn rounds(scene: &Scene, lasting: Duration) -> Vec<u64> {
    let start = scene.store.now();
    let mut executed_at = Vec::new();
    while scene.store.now().since(start) < lasting {
        scene.clock.advance(Duration::from_secs(10));
        let round = scene.second.orders.complete(CompleterOptions::default()).await.unwrap();
        assert_eq!(round.left, 0);
        if round.executed > 0 {
            executed_at.push(scene.store.now().since(start).as_secs() / 60);
        }
    }
    executed_at
}

#[tokio::test]
async fn the_completer_finishes_an_order_after_an_outage_of_hours() {
    let scene = scene();
    *scene.world.fail.lock().unwrap() = Some(StepFailure::Unsure("no response".to_owned()));
    assert!(scene.second.orders.run("order-1", &items()).await.is_err());
    let executed_at = rounds(&scene, Duration::from_secs(20 * 60 * 60)).await;
    assert_eq!(executed_at[..6], [1, 3, 7, 15, 30, 45], "the pause doubles, up to a quarter of an hour");
    assert!(executed_at.len() > 70, "the completer keeps trying: {executed_at:?}");
    *scene.world.fail.lock().unwrap() = None;
    assert_eq!(rounds(&scene, Duration::from_secs(16 * 60)).await.len(), 1);
    assert_eq!(scene.effects(), items());
}

#[tokio::test]
async fn an_order_that_kills_its_owner_is_retried_with_growing_pauses() {
    let scene = scene();
    scene.stop_before("order-1", "pen").await;
    for pause in [0, 60, 120, 240] {
        // Another machine executes it each time, and dies with it.
        let machine = machine(&scene.store, &scene.world, true);
        scene.clock.advance(LEASE + Duration::from_millis(1));
        if pause > 0 {
            scene.clock.advance(Duration::from_secs(pause) - Duration::from_millis(2));
            assert_eq!(
                machine.orders.complete(CompleterOptions::default()).await.unwrap().executed,
                0,
                "{pause}"
            );
            scene.clock.advance(Duration::from_millis(1));
        }
        let before = scene.world.stopped.load(Ordering::SeqCst);
        *scene.world.stop_before.lock().unwrap() = Some("pen".to_owned());
        tokio::spawn(async move { machine.orders.complete(CompleterOptions::default()).await });
        tokio::time::timeout(Duration::from_secs(30), async {
            while scene.world.stopped.load(Ordering::SeqCst) == before {
                tokio::task::yield_now().await;
            }
        })
        .await
        .expect("the order is executed again");
    }
}

#[tokio::test]
async fn the_completer_ignores_orders_older_than_its_max_age() {
    let scene = scene();
    scene.stop_before("order-1", "pen").await;
    let day = Duration::from_secs(23 * 60 * 60);
    scene.clock.advance(day - Duration::from_millis(1));
    let younger = CompleterOptions::default().with_max_age(day - Duration::from_millis(1));
    assert_eq!(scene.second.orders.complete(younger).await.unwrap().left, 1);
    assert_eq!(scene.second.orders.complete(CompleterOptions::default()).await.unwrap().executed, 1);
}

#[tokio::test]
async fn the_completer_ignores_records_that_are_not_its_calls() {
    let scene = scene();
    let policy = Policy::default().with_on_abandoned(OnAbandoned::Reexecute);
    // A function whose name begins in the same way.
    let world = Arc::new(World::default());
    *world.fail.lock().unwrap() = Some(StepFailure::Unsure("later".to_owned()));
    let (its, errors) = (world.clone(), StepError::fate as fn(&_) -> _);
    let alike = scene.first.engine.function("order-items").with_policy(policy).with_errors(errors);
    let alike = alike.resumable(move |attempt, items| ship_all(its.clone(), false, attempt, items)).unwrap();
    assert!(alike.run("alike", &items()).await.is_err());
    // And a call of this function without a stored input.
    {
        let name = "order";
        let other =
            scene.first.engine.function(name).with_policy(policy).with_errors(StepError::fate as fn(&_) -> _);
        let result = other
            .run_in_place("other", "", async |attempt: Attempt| {
                attempt.step("a", |_| async { Ok::<_, StepFailure<String>>(()) }).await?;
                attempt.step("b", |_| async { Err::<(), _>(StepFailure::Unsure("later".to_owned())) }).await
            })
            .await;
        assert!(
            matches!(result, Err(FunctionError::Failed { error: StepError::Unsure(_), .. })),
            "{result:?}"
        );
    }
    let how = CompleterOptions::default().with_first_pause(Duration::ZERO);
    let round = scene.second.orders.complete(how).await.unwrap();
    assert_eq!((round.executed, round.left), (0, 0));
    assert!(scene.effects().is_empty());
    *world.fail.lock().unwrap() = None;
    assert_eq!(alike.complete(how).await.unwrap().executed, 1);
}

#[tokio::test]
async fn a_function_that_parks_or_has_a_name_out_of_bounds_is_not_resumable() {
    let engine = scene().first.engine;
    let park = engine.function("order").resumable(|_: Attempt, (): ()| async { Ok::<_, String>(()) });
    assert!(park.unwrap_err().to_string().contains("reexecute"));
    // The completer would never find its records.
    let policy = Policy::default().with_on_abandoned(OnAbandoned::Reexecute);
    for (name, is_fit) in [("n".repeat(256), true), ("n".repeat(257), false), ("n\0".to_owned(), false)] {
        let named = engine.function(&name).with_policy(policy);
        let resumable = named.resumable(|_: Attempt, (): ()| async { Ok::<_, String>(()) });
        assert_eq!(resumable.is_ok(), is_fit, "{} bytes", name.len());
    }
}

#[tokio::test(start_paused = true)]
async fn a_completer_runs_until_the_engine_ends() {
    let scene = scene();
    scene.stop_before("order-1", "pen").await;
    scene.clock.advance(LEASE + Duration::from_millis(1));
    let completer = scene.second.orders.spawn_completer(CompleterOptions::default());
    tokio::time::timeout(Duration::from_secs(30), async {
        while scene.effects().len() < 3 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .expect("the order is finished");
    assert_eq!(scene.second.engine.drain(Duration::from_secs(5)).await, 0);
    completer.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_hanging_order_delays_no_other_order() {
    hanging_orders_delay_no_other(1).await;
}

/// The same with more hanging orders than are executed at a time.
#[tokio::test(start_paused = true)]
async fn many_hanging_orders_delay_no_other_order() {
    hanging_orders_delay_no_other(40).await;
}

async fn hanging_orders_delay_no_other(many: usize) {
    let scene = scene();
    *scene.world.fail.lock().unwrap() = Some(StepFailure::Unsure("timed out".to_owned()));
    for number in 0..many {
        assert!(scene.second.orders.run(format!("hangs-{number}").as_str(), &items()).await.is_err());
    }
    *scene.world.fail.lock().unwrap() = None;
    *scene.world.stop_before.lock().unwrap() = Some("book".to_owned());
    // The order hangs there.
    let third = machine(&scene.store, &scene.world, true);
    let _completer =
        third.orders.spawn_completer(CompleterOptions::default().with_first_pause(Duration::ZERO));
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(scene.world.stopped.load(Ordering::SeqCst), many.min(16));
    let deadline = Duration::from_secs(600);
    let hangs = async {
        while scene.world.stopped.load(Ordering::SeqCst) < many {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(deadline, hangs).await.expect("the orders reach this item");
    *scene.world.stop_before.lock().unwrap() = None;
    *scene.world.fail.lock().unwrap() = Some(StepFailure::Unsure("timed out".to_owned()));
    assert!(scene.second.orders.run("order-2", &items()).await.is_err());
    *scene.world.fail.lock().unwrap() = None;
    let goes_on = async {
        while scene.effects().len() < items().len() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(deadline, goes_on).await.expect("the other order is finished");
}

/// A store whose clock jumps ahead after each list, as if the completer were busy with its other calls meanwhile.
struct SlowList {
    inner: Arc<MemoryStore<Arc<ManualClock>>>,
    clock: Arc<ManualClock>,
    passes: Mutex<Duration>,
}

impl Store for SlowList {
    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage> {
        Box::pin(async move {
            let page = self.inner.list(query).await?;
            if !page.records.is_empty() {
                self.clock.advance(std::mem::take(&mut *self.passes.lock().unwrap()));
            }
            Ok(page)
        })
    }

    oncegate_core::delegate_store!(self, self.inner => apply lookup purge audit check now capabilities);
}

#[tokio::test]
async fn an_order_that_expired_after_it_was_listed_is_not_started_anew() {
    let scene = scene();
    scene.stop_before("order-1", "pen").await;
    scene.clock.advance(LEASE + Duration::from_millis(1));
    let passes = Mutex::new(Policy::default().retention());
    let slow = Arc::new(SlowList { inner: scene.store.clone(), clock: scene.clock.clone(), passes });
    let engine = Engine::new(slow);
    let policy = Policy::default().with_lease(LEASE).unwrap().with_on_abandoned(OnAbandoned::Reexecute);
    let world = scene.world.clone();
    let orders = engine
        .function("order")
        .with_policy(policy)
        .with_errors(StepError::fate as fn(&StepError<String>) -> ErrorFate);
    let orders =
        orders.resumable(move |attempt, items| ship_all(world.clone(), false, attempt, items)).unwrap();
    let round = orders.complete(CompleterOptions::default()).await.unwrap();
    assert_eq!(scene.effects(), ["book"], "only the effect of the first attempt");
    assert_eq!(round.executed, 0);
    // The record is forgotten, so its key is free like any other.
    assert!(!orders.run_detailed("order-1", &items()).await.unwrap().is_replayed());
}
