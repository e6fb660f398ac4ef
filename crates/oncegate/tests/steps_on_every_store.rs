//! An order in steps, cut off on one machine and finished on another, on every store.

#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::core::OnAbandoned;
use oncegate::engine::{CompleterOptions, ErrorFate, Resumable, StepError, StepFailure};
use oncegate::postgres::schema;
use oncegate::{
    Attempt, Cache, CacheOptions, CachedStore, EmbeddedOptions, EmbeddedStore, Engine, MemoryStore, Policy,
    PostgresOptions, PostgresStore, RedisOptions, RedisStore, Store, SystemClock,
};
use oncegate_servers::{PostgresServer, RedisCluster, RedisServer};

type Orders = Resumable<String, Vec<String>, StepError<String>, fn(&StepError<String>) -> ErrorFate>;

/// The effects with their keys, and whether the first machine has stopped.
#[derive(Default)]
struct World {
    effects: Mutex<Vec<(String, String)>>,
    has_stopped: AtomicBool,
}

fn orders(store: &Arc<dyn Store>, world: &Arc<World>, stops: bool) -> Orders {
    let policy = Policy::default().with_lease(Duration::from_secs(2)).unwrap();
    let world = world.clone();
    Engine::new(store.clone())
        .function("order")
        .with_policy(policy.with_on_abandoned(OnAbandoned::Reexecute))
        .with_errors(StepError::fate as fn(&_) -> _)
        .resumable(move |attempt, item| order(world.clone(), stops, attempt, item))
        .unwrap()
}

async fn order(
    world: Arc<World>,
    stops: bool,
    attempt: Attempt,
    item: String,
) -> Result<Vec<String>, StepError<String>> {
    let mut done = Vec::new();
    for what in ["reserve", "charge", "ship"] {
        let undone = world.clone();
        let step = attempt
            .step(what, |key| async {
                if stops && what == "charge" {
                    world.has_stopped.store(true, Ordering::SeqCst);
                    std::future::pending::<()>().await;
                }
                if what == "ship" && item == "lamp" {
                    return Err(StepFailure::Final("no lamps".to_owned()));
                }
                world.effects.lock().unwrap().push((what.to_owned(), key));
                Ok(format!("{what} {item}"))
            })
            .compensate(async move |key, value: String| {
                undone.effects.lock().unwrap().push((format!("undo {value}"), key));
                Ok::<_, StepFailure<String>>(())
            });
        done.push(step.await?);
    }
    Ok(done)
}

/// Cuts off the first machine: its engine no longer renews the lease.
async fn cut_off(store: &Arc<dyn Store>, world: &Arc<World>, key: &str, item: &str) {
    let (store, world, key, item) = (store.clone(), world.clone(), key.to_owned(), item.to_owned());
    let seen = world.clone();
    // It has a runtime of its own, which ends in the middle.
    let machine = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let orders = orders(&store, &world, true);
            let call = orders.run(key.as_str(), &item);
            let stopped = async {
                while !world.has_stopped.load(Ordering::SeqCst) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::select! {
                result = call => panic!("it was to stop: {result:?}"),
                () = stopped => {}
            }
        });
        runtime.shutdown_background();
    });
    tokio::task::spawn_blocking(move || machine.join().unwrap()).await.unwrap();
    assert!(seen.has_stopped.load(Ordering::SeqCst));
}

async fn is_finished_elsewhere(store: Arc<dyn Store>) {
    let name = store.capabilities().name;
    let world = Arc::new(World::default());
    cut_off(&store, &world, "order-1", "book").await;
    let elsewhere = orders(&store, &world, false);
    tokio::time::timeout(Duration::from_secs(60), async {
        while elsewhere.complete(CompleterOptions::default()).await.unwrap().executed == 0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await
    .expect("its lease runs out");
    let result = elsewhere.run("order-1", &"book".to_owned()).await.unwrap();
    assert_eq!(result, ["reserve book", "charge book", "ship book"], "{name}");
    let names: Vec<_> = world.effects.lock().unwrap().iter().map(|(what, _)| what.clone()).collect();
    assert_eq!(names, ["reserve", "charge", "ship"], "{name}: each once");

    // This order fails finally after it was cut off.
    let world = Arc::new(World::default());
    cut_off(&store, &world, "order-2", "lamp").await;
    let elsewhere = orders(&store, &world, false);
    let result = tokio::time::timeout(Duration::from_secs(60), async {
        loop {
            match elsewhere.run("order-2", &"lamp".to_owned()).await {
                // The second one only if the machine is so busy that a lease ends.
                Err(
                    oncegate::FunctionError::InProgress { .. }
                    | oncegate::FunctionError::Failed { error: StepError::Fenced, .. },
                ) => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                result => break result,
            }
        }
    })
    .await
    .expect("its lease runs out");
    assert!(
        matches!(&result, Err(oncegate::FunctionError::Failed { error: StepError::Failed(why), .. }) if why == "no lamps"),
        "{name}: {result:?}"
    );
    let effects = world.effects.lock().unwrap().clone();
    let names: Vec<_> = effects.iter().map(|(what, _)| what.as_str()).collect();
    assert_eq!(names, ["reserve", "charge", "undo charge lamp", "undo reserve lamp"], "{name}");
    let mut keys: Vec<_> = effects.iter().map(|(_, key)| key).collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 4, "{name}: each call has a key of its own");
}

#[tokio::test(flavor = "multi_thread")]
async fn on_memory() {
    is_finished_elsewhere(Arc::new(MemoryStore::new(SystemClock::new()))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_the_embedded_store() {
    let dir = tempfile::tempdir().unwrap();
    is_finished_elsewhere(Arc::new(EmbeddedStore::open(EmbeddedOptions::new(dir.path())).unwrap())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_redis_and_behind_a_front() {
    let server = RedisServer::start(oncegate_servers::RedisOptions::new()).unwrap();
    let open = || async { RedisStore::open(RedisOptions::from_url(&server.url()).unwrap()).await.unwrap() };
    is_finished_elsewhere(Arc::new(open().await)).await;
    server.command(&["FLUSHALL"]).unwrap();
    let tiered = CachedStore::new(Cache::in_memory(1 << 20), Arc::new(open().await), CacheOptions::new());
    is_finished_elsewhere(Arc::new(tiered)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_a_cluster() {
    let cluster = RedisCluster::start().unwrap();
    let store = RedisStore::open(RedisOptions::from_url(&cluster.url()).unwrap()).await.unwrap();
    is_finished_elsewhere(Arc::new(store)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn on_postgres() {
    let server = PostgresServer::start().unwrap();
    let options = PostgresOptions::from_url(&server.url()).unwrap();
    schema::apply(&options).await.unwrap();
    is_finished_elsewhere(Arc::new(PostgresStore::open(options).await.unwrap())).await;
}
