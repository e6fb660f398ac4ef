//! Blocks at a named point until the process is killed. Only in builds with the feature `failpoints`, for tests of crashes
//! and of paused processes.
//!
//! `ONCEGATE_FAILPOINT` names the point: `executing` (the claim is durable, nothing was sent to the upstream yet), `executed`
//! (the upstream has answered, nothing of the response is written), `completed` (the completion is durable, no response was
//! sent). With the prefix `stop:`, the process stops itself there once with a signal, and goes on when it is continued.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use oncegate_engine::{Event, EventKind, Observer};

/// Blocks the thread that reaches the point.
pub(crate) struct Failpoint {
    point: Option<String>,
    stops: AtomicBool,
}

impl Failpoint {
    pub(crate) fn from_env() -> Self {
        let named = std::env::var("ONCEGATE_FAILPOINT").ok();
        let stopped_at = named.as_deref().and_then(|named| named.strip_prefix("stop:")).map(str::to_owned);
        Self { stops: AtomicBool::new(stopped_at.is_some()), point: stopped_at.or(named) }
    }
}

impl Observer for Failpoint {
    fn observe(&self, event: &Event) {
        let point = match event.kind {
            EventKind::Executing { .. } => "executing",
            EventKind::Executed => "executed",
            EventKind::Completed => "completed",
            _ => return,
        };
        if self.point.as_deref() == Some(point) {
            complain!("failpoint {point}");
            if self.stops.swap(false, Ordering::SeqCst) {
                let _sent =
                    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP);
                // This thread must not go on before the signal has stopped all threads.
                std::thread::sleep(Duration::from_millis(200));
                return;
            }
            loop {
                std::thread::park();
            }
        }
    }
}
