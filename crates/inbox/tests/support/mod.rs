//! What the tests of all adapters share.

#![allow(dead_code, reason = "each test uses a part of it")]

pub(crate) mod kafka;
pub(crate) mod ledger;
pub(crate) mod process;

use std::fmt;
use std::time::Duration;

use tokio::time::{Instant, sleep};

/// How long anything may take. Test machines are busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until it holds.
pub(crate) async fn until(what: impl fmt::Display, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds().await {
        assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// Waits for something that is to be ready within [`PATIENCE`].
pub(crate) async fn within<T>(what: impl fmt::Display, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: not within {PATIENCE:?}"),
    }
}
