//! The suite that every store is held to. In its database, and only there, `oncegate.now_ms()` shows the suite's clock.

use std::sync::Arc;

use oncegate_core::{
    AuditEntry, Capabilities, Clock as _, Command, Durability, ListPage, ListQuery, Outcome, Record,
    RecordId, Store, StoreFuture, Timestamp,
};
use oncegate_postgres::PostgresStore;
use oncegate_testkit::ManualClock;
use oncegate_testkit::conformance::{Suite, check_concurrent_claims};
use sqlx::postgres::PgConnection;
use tokio::runtime::Runtime;
use tokio::sync::Mutex;

use crate::support::{Database, run};

const TEST_CLOCK: &str = "
    CREATE TABLE oncegate.test_clock (millis bigint NOT NULL);
    INSERT INTO oncegate.test_clock VALUES (0);
    CREATE OR REPLACE FUNCTION oncegate.now_ms() RETURNS bigint LANGUAGE sql VOLATILE
        AS 'SELECT millis FROM oncegate.test_clock';";

/// A store whose server shows the clock of the suite.
struct Clocked {
    store: PostgresStore,
    clock: Arc<ManualClock>,
    control: Arc<Mutex<(PgConnection, Timestamp)>>,
}

impl Clocked {
    async fn set_clock(&self) {
        let now = self.clock.now();
        let mut control = self.control.lock().await;
        if control.1 != now {
            run(&mut control.0, &format!("UPDATE oncegate.test_clock SET millis = {now}")).await;
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

fn conforms(cases: u32, transaction_pooler: bool) {
    let runtime = Runtime::new().unwrap();
    let (database, control) = runtime.block_on(async {
        let database = Database::fresh().await;
        let mut control = database.connect().await;
        run(&mut control, TEST_CLOCK).await;
        (database, Arc::new(Mutex::new((control, Timestamp::default()))))
    });
    let options = database.options().with_pool_size(2).with_transaction_pooler(transaction_pooler);
    let empty = "TRUNCATE oncegate.records, oncegate.audit RESTART IDENTITY";
    Suite::new().with_cases(cases).check(|| {
        runtime.block_on(async { run(&mut control.lock().await.0, empty).await });
        |clock: Arc<ManualClock>| {
            let store = runtime.block_on(PostgresStore::open(options.clone())).unwrap();
            Clocked { store, clock, control: control.clone() }
        }
    });
}

#[test]
fn the_postgres_store_conforms() {
    conforms(32, false);
}

#[test]
fn it_conforms_behind_a_transaction_pooler() {
    conforms(8, true);
}

#[test]
fn one_of_many_claimants_executes() {
    let runtime = Runtime::new().unwrap();
    let (_database, store) = runtime.block_on(async {
        let database = Database::fresh().await;
        let store = database.store().await;
        (database, store)
    });
    check_concurrent_claims(&store, 20, 8);
}
