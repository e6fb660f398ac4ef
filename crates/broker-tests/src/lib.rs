//! Tests that every broker adapter runs, and the programs that they kill.
//!
//! [`suite`] has the tests in one process: redelivery, order, poison messages, outages. [`processes`] has the tests with
//! consumers that are processes; [`consumer`] is the body of those programs, the `examples` of the adapters.

pub mod consumer;
pub mod ledger;
pub mod process;
pub mod processes;
pub mod suite;

use std::fmt;
use std::time::Duration;

use tokio::time::{Instant, sleep};

/// The bound on everything that is certain to happen. Test machines are busy.
pub const TIMEOUT: Duration = Duration::from_secs(180);

/// Waits until a condition holds.
pub async fn until(what: impl fmt::Display, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !holds().await {
        assert!(Instant::now() < deadline, "{what}: not within {TIMEOUT:?}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// Waits for a future that completes within [`TIMEOUT`].
pub async fn within<T>(what: impl fmt::Display, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(TIMEOUT, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: not within {TIMEOUT:?}"),
    }
}
