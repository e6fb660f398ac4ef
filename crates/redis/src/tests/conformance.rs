//! The Redis store, held to the suite that every store is held to, on a real server.
//!
//! The suite's clock starts in 2023 and is moved by hand. The scripts are built with a `now` that is an argument, and the
//! clock is moved ahead by a constant, to the time at which the sequence starts: the server's own expiry then comes ten
//! minutes after what the scripts take for expired, or later, and no sequence takes that long.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use oncegate_core::{Clock, Store as _, Timestamp};
use oncegate_servers::{RedisCluster, RedisOptions as ServerOptions, RedisServer};
use oncegate_testkit::ManualClock;
use oncegate_testkit::conformance::{
    Suite, check_clock_set_back, check_concurrent_claims, check_operators, check_steps,
};
use tokio::runtime::Runtime;

use crate::contract::{Scripts, part};
use crate::{RedisOptions, RedisStore};

const SUITE_START: u64 = 1_700_000_000_000;

struct Ahead {
    clock: Arc<ManualClock>,
    by: Duration,
}

impl Clock for Ahead {
    fn now(&self) -> Timestamp {
        self.clock.now().after(self.by)
    }
}

/// The scripts with the time as their last argument.
pub(super) fn scripts_with_time() -> Scripts {
    Scripts::composed(|name| match name {
        "now" => "local now = tonumber(table.remove(ARGV))\n",
        _ => part(name),
    })
}

fn real_now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap()
}

fn conforms(cases: u32, url: &str, flush: impl Fn()) {
    let runtime = Runtime::new().unwrap();
    let options = RedisOptions::from_url(url).unwrap();
    Suite::new().with_cases(cases).with_own_expiry().with_any_order().check(|| {
        flush();
        let by = real_now() - Duration::from_millis(SUITE_START);
        let (runtime, options) = (&runtime, &options);
        move |clock: Arc<ManualClock>| {
            let store = runtime.block_on(RedisStore::open_with(options.clone(), scripts_with_time()));
            store.unwrap().with_test_clock(Arc::new(Ahead { clock, by }))
        }
    });
}

#[test]
fn the_redis_store_conforms() {
    let server = RedisServer::start(ServerOptions::new().with_appendfsync("always")).unwrap();
    conforms(128, &server.url(), || drop(server.command(&["FLUSHALL"]).unwrap()));
}

/// The records are on several nodes, and an operator's decision takes two steps.
#[test]
fn the_redis_store_conforms_on_a_cluster() {
    let cluster = cluster();
    conforms(64, &cluster.url(), || {
        for server in cluster.primaries() {
            server.command(&["FLUSHALL"]).unwrap();
        }
    });
}

/// Each wait is for the record of its own command.
#[test]
fn the_redis_store_conforms_where_it_waits_for_the_disk() {
    let server = RedisServer::start(ServerOptions::new().recent().with_appendfsync("always")).unwrap();
    let url = format!("{}?wait-aof=local&wait-timeout=30s", server.url());
    conforms(96, &url, || drop(server.command(&["FLUSHALL"]).unwrap()));
}

#[test]
fn the_redis_store_conforms_on_a_cluster_where_it_waits_for_replicas() {
    let cluster = cluster();
    conforms(32, &format!("{}?wait-replicas=1&wait-timeout=30s", cluster.url()), || {
        for server in cluster.primaries() {
            server.command(&["FLUSHALL"]).unwrap();
        }
    });
}

/// A Cluster that declares no node dead because the machine is busy.
fn cluster() -> RedisCluster {
    RedisCluster::start_with(&ServerOptions::new().with("cluster-node-timeout 60000")).unwrap()
}

#[test]
fn one_of_many_claimants_executes() {
    let server = RedisServer::start(ServerOptions::new()).unwrap();
    one_executes(&server.url());
}

#[test]
fn one_of_many_claimants_executes_on_a_cluster() {
    one_executes(&cluster().url());
}

#[test]
fn an_operator_takes_back_what_an_operator_said() {
    let server = RedisServer::start(ServerOptions::new()).unwrap();
    operators(&server.url());
}

#[test]
fn an_operator_takes_back_what_an_operator_said_on_a_cluster() {
    operators(&cluster().url());
}

#[test]
fn a_clock_that_is_set_back_blocks_no_key() {
    let server = RedisServer::start(ServerOptions::new()).unwrap();
    let runtime = Runtime::new().unwrap();
    let clock = Arc::new(ManualClock::at_millis(real_now().as_millis() as u64));
    let options = RedisOptions::from_url(&server.url()).unwrap();
    let store = runtime.block_on(RedisStore::open_with(options, scripts_with_time())).unwrap();
    let ahead = Ahead { clock: clock.clone(), by: Duration::ZERO };
    check_clock_set_back(&store.with_test_clock(Arc::new(ahead)), &clock);
}

fn operators(url: &str) {
    let runtime = Runtime::new().unwrap();
    let store = runtime.block_on(RedisStore::open(RedisOptions::from_url(url).unwrap())).unwrap();
    check_operators(&store);
}

fn one_executes(url: &str) {
    let runtime = Runtime::new().unwrap();
    let store = runtime.block_on(RedisStore::open(RedisOptions::from_url(url).unwrap())).unwrap();
    check_concurrent_claims(&store, 20, 8);
    check_steps(&store);
    let seen = Duration::from_millis(store.now().as_millis());
    assert!(seen.abs_diff(real_now()) < Duration::from_secs(10));
}
