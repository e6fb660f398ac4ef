//! The conformance suite of stores, run on a cache before a store. The clock of the cache stands still, or shows the real time

//! while the suite's clock jumps. So the cache keeps its entries longer than the store keeps its records.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{Settled, Total};
use oncegate_cache::{Cache, CacheOptions, CachedStore};
use oncegate_core::{Clock as _, MemoryStore, Store as _};
use oncegate_embedded::{EmbeddedOptions, EmbeddedStore};
use oncegate_postgres::{PostgresOptions, PostgresStore, schema};
use oncegate_redis::{RedisOptions, RedisStore};
use oncegate_servers::{PostgresServer, RedisOptions as ServerOptions, RedisServer};
use oncegate_testkit::ManualClock;
use oncegate_testkit::conformance::{Suite, check_concurrent_claims, check_operators};
use sqlx::postgres::PgConnection;
use sqlx::{Connection as _, Executor as _};
use tokio::runtime::Runtime;

/// Options with a timeout that is long enough for a busy machine.
fn options() -> CacheOptions {
    CacheOptions::new().with_timeout(Duration::from_secs(1)).unwrap()
}

/// Fails if the cache never answered: then the suite proves nothing about it.
fn took_part(total: &Total) {
    let total = total.lock().unwrap();
    assert!(total.hits > 0 && total.populated > 0, "{total:?}");
}

fn before_a_store_in_memory(cache: impl Fn() -> Cache) {
    let (runtime, total) = (Runtime::new().unwrap(), Total::default());
    let _runtime = runtime.enter();
    Suite::new().with_cases(300).check(|| {
        |clock: Arc<ManualClock>| {
            Settled::new(CachedStore::new(cache(), Arc::new(MemoryStore::new(clock)), options()), &total)
        }
    });
    took_part(&total);
}

#[test]
fn a_cache_in_memory_before_a_store_in_memory() {
    before_a_store_in_memory(|| Cache::in_memory(1 << 20));
}

#[test]
fn an_operator_takes_a_resolution_back() {
    let runtime = Runtime::new().unwrap();
    let _runtime = runtime.enter();
    let backing = Arc::new(MemoryStore::new(ManualClock::at_millis(1_000)));
    check_operators(&Settled::new(
        CachedStore::new(Cache::in_memory(1 << 20), backing, options()),
        &Total::default(),
    ));
}

#[test]
fn a_memory_store_before_another() {
    before_a_store_in_memory(|| Cache::on(Arc::new(MemoryStore::new(ManualClock::at_millis(1_000)))));
}

#[test]
fn a_cache_in_memory_before_an_embedded_store() {
    let (runtime, total) = (Runtime::new().unwrap(), Total::default());
    let _runtime = runtime.enter();
    Suite::new().with_cases(120).with_expiry_at_open().check(|| {
        let dir = tempfile::tempdir().unwrap();
        let total = &total;
        move |clock: Arc<ManualClock>| {
            let on_disk = EmbeddedOptions::new(dir.path()).with_clock(clock);
            let backing = Arc::new(EmbeddedStore::open(on_disk).unwrap());
            let store = CachedStore::new(Cache::in_memory(1 << 20), backing.clone(), options());
            let mut settled = Settled::new(store, total);
            settled.close = Box::new(move || backing.close());
            settled
        }
    });
    took_part(&total);
}

/// Makes the server of the store show the clock of the suite. The server of the cache shows the real time.
const TEST_CLOCK: &str = "
    CREATE TABLE oncegate.test_clock (millis bigint NOT NULL);
    INSERT INTO oncegate.test_clock VALUES (0);
    CREATE OR REPLACE FUNCTION oncegate.now_ms() RETURNS bigint LANGUAGE sql VOLATILE
        AS 'SELECT millis FROM oncegate.test_clock';";

#[test]
fn redis_before_postgres() {
    let (runtime, total) = (Runtime::new().unwrap(), Total::default());
    let redis = RedisServer::start(ServerOptions::new()).unwrap();
    let postgres = PostgresServer::start().unwrap();
    let timeout = Duration::from_secs(20);
    let database = PostgresOptions::from_url(&postgres.url()).unwrap();
    let database = database
        .with_pool_size(6)
        .unwrap()
        .with_connect_timeout(timeout)
        .unwrap()
        .with_statement_timeout(timeout)
        .unwrap();
    let (mut control, cache) = runtime.block_on(async {
        schema::apply(&database).await.unwrap();
        let mut control = PgConnection::connect(&postgres.url()).await.unwrap();
        control.execute(TEST_CLOCK).await.unwrap();
        let cache = RedisStore::open(RedisOptions::from_url(&redis.url()).unwrap()).await.unwrap();
        (control, Arc::new(cache))
    });
    let (tell, told) = std::sync::mpsc::channel::<(String, std::sync::mpsc::Sender<()>)>();
    let handle = runtime.handle().clone();
    // Runs the statements of the test one after the other.
    let teller = std::thread::spawn(move || {
        for (statement, done) in told {
            handle.block_on(async { control.execute(sqlx::AssertSqlSafe(statement)).await.unwrap() });
            done.send(()).unwrap();
        }
    });
    let run = move |statement: String| {
        let (done, is_done) = std::sync::mpsc::channel();
        tell.send((statement, done)).unwrap();
        is_done.recv().unwrap();
    };
    let number = std::cell::Cell::new(0);
    let check = || {
        Suite::new().with_cases(32).check(|| {
            run("TRUNCATE oncegate.records, oncegate.audit RESTART IDENTITY; UPDATE oncegate.purge_marks SET place = 0".to_owned());
            // A new namespace: for the cache, each case has another store. The entries of earlier cases stay.
            number.set(number.get() + 1);
            let options = options().with_namespace(number.get().to_string());
            let (runtime, total, cache, database, run) = (&runtime, &total, &cache, &database, &run);
            move |clock: Arc<ManualClock>| {
                let _runtime = runtime.enter();
                let backing = Arc::new(runtime.block_on(PostgresStore::open(database.clone())).unwrap());
                let store =
                    CachedStore::new(Cache::on(cache.clone()), backing.clone(), options.clone());
                let (run, shown, last) = (run.clone(), clock.clone(), Mutex::new(None));
                // The cached store learns of a clock that jumps only from the next reply of the store, so ask for one.
                let tell_time = move || {
                    let now = shown.now();
                    if last.lock().unwrap().replace(now) != Some(now) {
                        run(format!("UPDATE oncegate.test_clock SET millis = {}", now.as_millis()));
                        oncegate_testkit::block_on(backing.check()).unwrap();
                    }
                };
                let mut settled = Settled::new(store, total);
                settled.clock = Some(clock);
                settled.tell_time = Box::new(tell_time);
                settled
            }
        })
    };
    // With so few random cases, the cache may not have answered at all.
    for _ in 0..5 {
        check();
        if total.lock().unwrap().hits > 0 {
            break;
        }
    }
    took_part(&total);
    drop(run);
    teller.join().unwrap();
}

#[test]
fn one_of_many_claimants_executes() {
    let runtime = Runtime::new().unwrap();
    let _runtime = runtime.enter();
    let backing = || Arc::new(MemoryStore::new(ManualClock::at_millis(1)));
    check_concurrent_claims(&CachedStore::new(Cache::in_memory(1 << 20), backing(), options()), 20, 8);
    check_concurrent_claims(&CachedStore::new(Cache::on(backing()), backing(), options()), 20, 8);
}
