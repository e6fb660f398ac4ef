//! Tools that hold every Oncegate store to the protocol.
//!
//! - [`conformance`]: random command sequences, run against a store and against [`decide`](oncegate_core::decide()) on a
//!   plain map, and compared after each step. A failing sequence is made as short as possible.
//! - [`surveys`]: surveys of records, compared with what a listing of all records gives.
//! - [`ManualClock`]: a clock that moves only by hand. [`TokioClock`]: a clock that follows tokio's time.
//! - [`until`]: waits for a condition.
//! - [`record_id`], [`claim`], [`response`]: identifiers, claims and responses.
//! - [`FaultyStore`]: a store with faults on demand: refused commands, lost replies, damaged records, stalls.
//! - [`NeverAtOnce`]: a store without [`Store::try_apply`](oncegate_core::Store::try_apply).
//! - [`block_on`]: waits for one future without a runtime.
//!
//! One test runs the suite on a store:
//!
//! ```
//! use oncegate_core::MemoryStore;
//! use oncegate_testkit::conformance::Suite;
//!
//! Suite::new().with_cases(20).check(|| MemoryStore::new);
//! ```

mod clock;
mod clock_set_back;
pub mod conformance;
mod faulty;
mod never_at_once;
mod operators;
mod records;
pub mod surveys;
mod wait;

pub use clock::{ManualClock, TokioClock};
pub use faulty::{Fault, Faults, FaultyStore, Latch, Operation};
pub use never_at_once::NeverAtOnce;
pub use records::{claim, record_id, response};
pub use wait::{WAIT_TIMEOUT, until};

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

/// Waits for a future on this thread.
pub fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}
