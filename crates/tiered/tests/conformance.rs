//! The suite that every store is held to, on a front before a back. The front's clock is not the back's: it stands still, or
//! shows the real time while the suite's clock jumps, so that the front holds on to everything for longer than the back.

mod support;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_core::{
    AuditEntry, Capabilities, Clock as _, Command, Durability, ListPage, ListQuery, MemoryStore, Outcome,
    Record, RecordId, Store, StoreFuture, Timestamp,
};
use oncegate_embedded::{EmbeddedOptions, EmbeddedStore};
use oncegate_postgres::{PostgresOptions, PostgresStore, schema};
use oncegate_redis::{RedisOptions, RedisStore};
use oncegate_servers::{PostgresServer, RedisOptions as ServerOptions, RedisServer};
use oncegate_testkit::ManualClock;
use oncegate_testkit::conformance::{Suite, check_concurrent_claims};
use oncegate_tiered::{Front, FrontCounts, TieredOptions, TieredStore};
use sqlx::postgres::PgConnection;
use sqlx::{Connection as _, Executor as _};
use support::Settled;
use tokio::runtime::Runtime;

/// On a busy machine, too.
fn options() -> TieredOptions {
    TieredOptions::new().with_patience(Duration::from_secs(1))
}

type Total = Arc<Mutex<FrontCounts>>;

/// A suite in which the front had nothing to say would prove nothing.
fn took_part(total: &Total) {
    let total = total.lock().unwrap();
    assert!(total.hits > 0 && total.fills > 0, "{total:?}");
}

#[test]
fn a_front_in_memory_before_a_store_in_memory() {
    let (runtime, total) = (Runtime::new().unwrap(), Total::default());
    Suite::new().with_cases(300).check(|| {
        |clock: Arc<ManualClock>| {
            let _runtime = runtime.enter();
            let back = Arc::new(MemoryStore::new(clock));
            let store = TieredStore::new(Front::in_memory(1 << 20), back, options());
            Settled { store, close: Box::new(|| {}), total: total.clone() }
        }
    });
    took_part(&total);
}

#[test]
fn a_memory_store_before_another() {
    let (runtime, total) = (Runtime::new().unwrap(), Total::default());
    Suite::new().with_cases(300).check(|| {
        |clock: Arc<ManualClock>| {
            let _runtime = runtime.enter();
            let front = Front::on(Arc::new(MemoryStore::new(ManualClock::at_millis(1_000))));
            let store = TieredStore::new(front, Arc::new(MemoryStore::new(clock)), options());
            Settled { store, close: Box::new(|| {}), total: total.clone() }
        }
    });
    took_part(&total);
}

#[test]
fn a_front_in_memory_before_a_directory() {
    let (runtime, total) = (Runtime::new().unwrap(), Total::default());
    Suite::new().with_cases(48).check(|| {
        let dir = tempfile::tempdir().unwrap();
        let (runtime, total) = (&runtime, &total);
        move |clock: Arc<ManualClock>| {
            let _runtime = runtime.enter();
            let options = EmbeddedOptions::new(dir.path()).with_clock(clock);
            let back = Arc::new(EmbeddedStore::open(options).unwrap());
            let store = TieredStore::new(Front::in_memory(1 << 20), back.clone(), self::options());
            Settled { store, close: Box::new(move || back.close()), total: total.clone() }
        }
    });
    took_part(&total);
}

const TEST_CLOCK: &str = "
    CREATE TABLE oncegate.test_clock (millis bigint NOT NULL);
    INSERT INTO oncegate.test_clock VALUES (0);
    CREATE OR REPLACE FUNCTION oncegate.now_ms() RETURNS bigint LANGUAGE sql VOLATILE
        AS 'SELECT millis FROM oncegate.test_clock';";

/// A store whose server shows the clock of the suite.
struct Clocked {
    store: PostgresStore,
    clock: Arc<ManualClock>,
    control: Arc<tokio::sync::Mutex<(PgConnection, Timestamp)>>,
}

impl Clocked {
    async fn set_clock(&self) {
        let now = self.clock.now();
        let mut control = self.control.lock().await;
        if control.1 != now {
            let set = sqlx::query("UPDATE oncegate.test_clock SET millis = $1").bind(now.as_millis() as i64);
            control.0.execute(set).await.unwrap();
            control.1 = now;
        }
    }
}

macro_rules! with_clock {
    ($self:ident, $call:expr) => {
        Box::pin(async move {
            $self.set_clock().await;
            $call.await
        })
    };
}

impl Store for Clocked {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        with_clock!(self, self.store.apply(id, command))
    }

    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        with_clock!(self, self.store.lookup(id))
    }

    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage> {
        with_clock!(self, self.store.list(query))
    }

    fn purge(&self, limit: usize) -> StoreFuture<'_, usize> {
        with_clock!(self, self.store.purge(limit))
    }

    fn audit(&self, before: Option<u64>, limit: usize) -> StoreFuture<'_, Vec<AuditEntry>> {
        with_clock!(self, self.store.audit(before, limit))
    }

    fn check(&self) -> StoreFuture<'_, ()> {
        self.store.check()
    }

    fn now(&self) -> Timestamp {
        self.clock.now()
    }

    fn capabilities(&self) -> Capabilities {
        // The server of the tests flushes nothing, and survives being left and entered again all the same.
        Capabilities::new("postgres", Durability::Synced, self.store.capabilities().fencing)
    }
}

#[test]
fn a_redis_before_a_postgres() {
    let (runtime, total) = (Runtime::new().unwrap(), Total::default());
    let redis = RedisServer::start(ServerOptions::new()).unwrap();
    let postgres = PostgresServer::start().unwrap();
    let patience = Duration::from_secs(20);
    let database = PostgresOptions::new(&postgres.url()).unwrap();
    let database = database.with_pool_size(6).with_connect_timeout(patience).with_statement_timeout(patience);
    let (control, front) = runtime.block_on(async {
        schema::apply(&database).await.unwrap();
        let mut control = PgConnection::connect(&postgres.url()).await.unwrap();
        control.execute(TEST_CLOCK).await.unwrap();
        let front = RedisStore::open(RedisOptions::from_url(&redis.url()).unwrap()).await.unwrap();
        (Arc::new(tokio::sync::Mutex::new((control, Timestamp::default()))), Arc::new(front))
    });
    let empty = "TRUNCATE oncegate.records, oncegate.audit RESTART IDENTITY";
    let number = std::cell::Cell::new(0);
    Suite::new().with_cases(32).check(|| {
        runtime.block_on(async { control.lock().await.0.execute(empty).await.unwrap() });
        // Another database, for its front. What the front has of the one before stays where it is.
        number.set(number.get() + 1);
        let options = options().with_namespace(number.get().to_string());
        let (runtime, total, front, control, database) = (&runtime, &total, &front, &control, &database);
        move |clock: Arc<ManualClock>| {
            let _runtime = runtime.enter();
            let store = runtime.block_on(PostgresStore::open(database.clone())).unwrap();
            let back = Arc::new(Clocked { store, clock, control: control.clone() });
            let store = TieredStore::new(Front::on(front.clone()), back, options.clone());
            Settled { store, close: Box::new(|| {}), total: total.clone() }
        }
    });
    took_part(&total);
}

#[test]
fn one_of_many_claimants_executes() {
    let runtime = Runtime::new().unwrap();
    let _runtime = runtime.enter();
    let back = || Arc::new(MemoryStore::new(ManualClock::at_millis(1)));
    check_concurrent_claims(&TieredStore::new(Front::in_memory(1 << 20), back(), options()), 20, 8);
    check_concurrent_claims(&TieredStore::new(Front::on(back()), back(), options()), 20, 8);
}
