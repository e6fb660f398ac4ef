//! Helpers for the tests on real servers.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::time::{Duration, Instant};

use oncegate_core::{
    Claim, Command, Complete, Completion, Extent, FencingToken, Grant, Outcome, Release, Renew, Store as _,
    StoreError, StoreErrorKind,
};
use oncegate_redis::{RedisOptions, RedisStore};
use oncegate_servers::RedisServer;
pub(crate) use oncegate_testkit::{record_id as id, response};

pub(crate) const MINUTE: Duration = Duration::from_secs(60);

pub(crate) fn options(url: &str) -> RedisOptions {
    RedisOptions::from_url(url).unwrap()
}

pub(crate) async fn open(url: &str) -> RedisStore {
    RedisStore::open(options(url)).await.unwrap()
}

pub(crate) fn claim(attempt: u64) -> Claim {
    Claim { lease: MINUTE, retention: MINUTE, ..oncegate_testkit::claim(attempt, b"pay 5") }
}

pub(crate) fn completion(token: FencingToken, n: u64) -> Command {
    let completion = Completion::Replayable(response(n));
    Command::Complete(Complete { token, completion, retention: MINUTE })
}

pub(crate) fn renewal(token: FencingToken) -> Command {
    Command::Renew(Renew { token, lease: MINUTE, retention: MINUTE })
}

pub(crate) fn release(token: FencingToken) -> Command {
    Command::Release(Release { token, retention: MINUTE })
}

pub(crate) async fn try_claim(store: &RedisStore, n: u64, attempt: u64) -> Result<Outcome, StoreError> {
    store.apply(id(n), Command::Claim(claim(attempt))).await
}

pub(crate) async fn granted(store: &RedisStore, n: u64, attempt: u64) -> Grant {
    match try_claim(store, n, attempt).await {
        Ok(Outcome::Execute(grant)) => grant,
        other => panic!("record {n}: {other:?}"),
    }
}

pub(crate) fn unavailable<T: std::fmt::Debug>(result: Result<T, StoreError>) -> String {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    error.to_string()
}

/// Tries again until it succeeds.
pub(crate) async fn until_ok<T, F: Future<Output = Result<T, StoreError>>>(mut act: impl FnMut() -> F) -> T {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        match act().await {
            Ok(value) => return value,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The number of times that a server executed a command.
pub(crate) fn calls_of(server: &RedisServer, command: &str) -> usize {
    let stats = server.command(&["INFO", "commandstats"]).unwrap();
    let calls =
        stats.split_once(&format!("cmdstat_{command}:calls=")).map(|(_, rest)| rest.split(',').next());
    calls.flatten().map_or(0, |calls| calls.parse().unwrap())
}

/// Expects an error of a command that was applied but not confirmed by enough replicas or disks.
pub(crate) fn does_not_count(result: Result<Outcome, StoreError>, extent: Extent) -> String {
    let error = result.unwrap_err();
    assert_eq!((error.kind(), error.extent()), (StoreErrorKind::Unavailable, extent), "{error}");
    assert!(!error.is_unsent(), "it was written: {error}");
    assert!(error.to_string().contains("may be sent again"), "{error}");
    error.to_string()
}

/// A server process that is stopped until this value is dropped.
pub(crate) struct Stopped(u32);

impl Stopped {
    pub(crate) fn new(server: &RedisServer) -> Self {
        let pid = server.pid().unwrap();
        oncegate_servers::freeze(pid).unwrap();
        Self(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // The test may have ended the server.
        let _ = oncegate_servers::thaw(self.0);
    }
}
