use std::fmt;
use std::time::Duration;

use tokio::time::{Instant, sleep};

/// The longest wait for a condition. It is far longer than anything takes, so a test that fails has a reason.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(600);

/// Waits until a condition holds.
///
/// # Panics
/// With `what`, if the condition does not hold within [`WAIT_TIMEOUT`].
pub async fn until(what: impl fmt::Display, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    while !holds().await {
        assert!(Instant::now() < deadline, "timed out waiting until {what}");
        sleep(Duration::from_millis(5)).await;
    }
}
