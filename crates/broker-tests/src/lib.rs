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

pub use oncegate_testkit::until;

/// The bound on everything that is certain to happen. Test machines are busy.
pub const TIMEOUT: Duration = oncegate_testkit::WAIT_TIMEOUT;

/// Waits for a future that completes within [`TIMEOUT`].
pub async fn within<T>(what: impl fmt::Display, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(TIMEOUT, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: not within {TIMEOUT:?}"),
    }
}

/// Declares one test per line: its name, a function of this crate, the broker, and further arguments.
#[macro_export]
macro_rules! broker_tests {
    ($($name:ident: $check:path, $broker:expr $(, $more:expr)*;)*) => {$(
        #[tokio::test(flavor = "multi_thread")]
        async fn $name() {
            $check($broker.await $(, $more)*).await;
        }
    )*};
}
