//! The clocks of the machine that the store runs on.

use std::time::Duration;

use oncegate_core::{Clock, SystemClock, Timestamp};

/// The clocks of this machine.
///
/// On Linux the monotonic clock also counts the time in which the machine was suspended. So the store of a laptop ages
/// while the laptop sleeps, and waking up does not look like a clock that was set.
#[derive(Debug, Default)]
pub(crate) struct MachineClock(SystemClock);

impl Clock for MachineClock {
    fn now(&self) -> Timestamp {
        self.0.now()
    }

    #[cfg(target_os = "linux")]
    fn elapsed(&self) -> Duration {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        Duration::new(time.tv_sec.try_into().unwrap_or_default(), time.tv_nsec.try_into().unwrap_or_default())
    }

    #[cfg(not(target_os = "linux"))]
    fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }
}
