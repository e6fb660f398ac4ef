//! The conformance suite of all stores. In its database, `oncegate.now_ms()` returns the clock of the suite.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::{
    AuditEntry, Capabilities, Claim, Clock as _, Command, Durability, FencingToken, Grant, ListPage,
    ListQuery, OnAbandoned, Outcome, Record, RecordId, Store, StoreFuture, StoredResponse, Timestamp,
};
use oncegate_postgres::{PostgresStore, schema};
use oncegate_testkit::ManualClock;
use oncegate_testkit::conformance::{
    Suite, check_clock_set_back, check_concurrent_claims, check_operators, check_steps,
};
use sqlx::Row as _;
use sqlx::postgres::PgConnection;
use tokio::runtime::Runtime;
use tokio::sync::Mutex;

use crate::support::{Database, run};
use crate::{pooler, settings};

const TEST_CLOCK: &str = "
    CREATE TABLE oncegate.test_clock (millis bigint NOT NULL);
    INSERT INTO oncegate.test_clock VALUES (0);
    CREATE OR REPLACE FUNCTION oncegate.now_ms() RETURNS bigint LANGUAGE sql VOLATILE
        AS 'SELECT millis FROM oncegate.test_clock';";

/// A store whose server uses the clock of the suite.
struct Clocked {
    store: PostgresStore,
    clock: Arc<ManualClock>,
    control: Arc<Mutex<(PgConnection, Timestamp)>>,
    /// Sends claims with `claim_many`, each after a claim of another record.
    batched: bool,
}

impl Clocked {
    async fn set_clock(&self) {
        let now = self.clock.now();
        let mut control = self.control.lock().await;
        if control.1 != now {
            run(&mut control.0, &format!("UPDATE oncegate.test_clock SET millis = {}", now.as_millis()))
                .await;
            control.1 = now;
        }
    }
}

impl Clocked {
    async fn claim_in_batch(&self, id: RecordId, claim: Claim) -> Outcome {
        let two = |bytes: &[u8]| vec![bytes.to_vec(); 2];
        let policy = match claim.on_abandoned {
            OnAbandoned::Park => "park",
            _ => "reexecute",
        };
        let fingerprint = [&[claim.fingerprint.version()], &claim.fingerprint.digest()[..]].concat();
        let key_tag = claim.label.key().map(|tag| tag.as_bytes().to_vec());
        let rows = sqlx::query("SELECT * FROM oncegate.claim_many($1, $2, $3, $4, $5, $6, $7, $8, $9)")
            .bind(vec![vec![0xee; 32], id.as_bytes().to_vec()])
            .bind(two(&claim.attempt.get().to_be_bytes()))
            .bind(two(&fingerprint))
            .bind(vec![claim.lease.as_millis() as i64; 2])
            .bind(vec![claim.retention.as_millis() as i64; 2])
            .bind(vec![policy; 2])
            .bind(two(claim.label.caller().as_bytes()))
            .bind(vec![claim.label.operation(); 2])
            .bind(vec![key_tag; 2])
            .fetch_all(&mut self.control.lock().await.0)
            .await
            .unwrap();
        run(&mut self.control.lock().await.0, OTHER_IS_GONE).await;
        let [_, row] = rows.as_slice() else { panic!("{} rows", rows.len()) };
        let number = |name: &str| row.get::<i64, _>(name) as u64;
        match row.get::<&str, _>("outcome") {
            "execute" => Outcome::Execute(Grant {
                token: FencingToken::new(number("token")),
                attempts: number("attempts") as u32,
                lease_until: Timestamp::from_millis(number("lease_until")),
                after_abandoned: row.get("after_abandoned"),
            }),
            "replay" => {
                let bytes: Vec<u8> = row.get("response");
                Outcome::Replay(StoredResponse::decode(bytes.into()).unwrap())
            }
            "in-progress" => {
                Outcome::InProgress { lease_left: Duration::from_millis(number("lease_left_ms")) }
            }
            "mismatch" => Outcome::Mismatch,
            "unknown" => Outcome::Unknown,
            "unreplayable" => Outcome::Unreplayable,
            other => panic!("{other}"),
        }
    }
}

/// Checks that there are no records except those of the suite.
const OTHER_IS_GONE: &str = "DELETE FROM oncegate.records WHERE id = decode(repeat('ee', 32), 'hex')";

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
        Box::pin(async move {
            self.set_clock().await;
            match command {
                Command::Claim(claim) if self.batched => Ok(self.claim_in_batch(id, claim).await),
                command => self.store.apply(id, command).await,
            }
        })
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
        // The test server does not flush, and it survives a restart of the process anyway.
        Capabilities::new("postgres", Durability::Synced, self.store.capabilities().fencing)
    }
}

fn conforms(cases: u32, pooler: bool, batched: bool) {
    let runtime = Runtime::new().unwrap();
    let database = runtime.block_on(Database::fresh());
    conforms_in(&runtime, &database, cases, pooler, batched);
}

fn conforms_in(runtime: &Runtime, database: &Database, cases: u32, pooler: bool, batched: bool) {
    let control = runtime.block_on(async {
        let mut control = database.connect().await;
        run(&mut control, TEST_CLOCK).await;
        Arc::new(Mutex::new((control, Timestamp::default())))
    });
    let bouncer = pooler.then(|| runtime.block_on(pooler::bouncer(database, 2)));
    let options = bouncer.as_ref().map_or_else(|| database.options(), |it| pooler::options(it, database));
    let options = options.with_pool_size(2).unwrap();
    let empty = "TRUNCATE oncegate.records, oncegate.audit RESTART IDENTITY; UPDATE oncegate.purge_marks SET place = 0";
    Suite::new().with_cases(cases).check(|| {
        runtime.block_on(async { run(&mut control.lock().await.0, empty).await });
        |clock: Arc<ManualClock>| {
            let store = runtime.block_on(PostgresStore::open(options.clone())).unwrap();
            Clocked { store, clock, control: control.clone(), batched }
        }
    });
}

#[test]
fn the_postgres_store_conforms() {
    conforms(32, false, false);
}

#[test]
fn the_store_conforms_behind_pgbouncer() {
    conforms(8, true, false);
}

/// Behind a pooler the store sends no settings, so those of the database apply.
#[test]
fn the_store_conforms_under_settings_of_the_database() {
    let runtime = Runtime::new().unwrap();
    let database = runtime.block_on(async {
        let database = Database::empty().await;
        settings::set_all(&database).await;
        schema::apply(&database.options()).await.unwrap();
        // A store that may only read must not accept a write.
        let mut owner = database.connect().await;
        run(&mut owner, "SET default_transaction_read_only = off").await;
        let reset = format!("ALTER DATABASE {} RESET default_transaction_read_only", database.name);
        run(&mut owner, &reset).await;
        database
    });
    conforms_in(&runtime, &database, 8, true, false);
}

#[test]
fn a_clock_that_is_set_back_blocks_no_key() {
    for batched in [false, true] {
        let runtime = Runtime::new().unwrap();
        let clock = Arc::new(ManualClock::at_millis(1_700_000_000_000));
        let (_database, store) = runtime.block_on(async {
            let database = Database::fresh().await;
            let mut control = database.connect().await;
            run(&mut control, TEST_CLOCK).await;
            let control = Arc::new(Mutex::new((control, Timestamp::default())));
            let store = database.store().await;
            (database, Clocked { store, clock: clock.clone(), control, batched })
        });
        check_clock_set_back(&store, &clock);
    }
}

#[test]
fn the_store_conforms_in_batches() {
    conforms(24, false, true);
}

#[test]
fn exactly_one_of_many_concurrent_claims_executes() {
    let runtime = Runtime::new().unwrap();
    let (_database, store) = runtime.block_on(async {
        let database = Database::fresh().await;
        let store = database.store().await;
        (database, store)
    });
    check_concurrent_claims(&store, 20, 8);
    check_steps(&store);
}

#[test]
fn an_operator_can_change_an_earlier_resolution() {
    let runtime = Runtime::new().unwrap();
    let (_database, store) = runtime.block_on(async {
        let database = Database::fresh().await;
        let store = database.store().await;
        (database, store)
    });
    check_operators(&store);
}
