//! Stops at a named point and waits to be killed. Only in builds with the feature `failpoints`, for tests of crashes and of
//! processes that were stopped.
//!
//! `ONCEGATE_FAILPOINT` names the point: `executing` (the claim is durable, the upstream was not asked yet), `executed` (the
//! upstream's answer is there, nothing of it is written), `completed` (the completion is durable, no response was sent). With
//! `stop:` before it, the whole process is stopped there, once, by a signal, and goes on where it is continued.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use oncegate_engine::{Event, EventKind, Observer};

/// Stops the thread that reaches the point.
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
                // The test that waits for the stop continues it.
                let _sent =
                    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP);
                // Any thread may take the signal, and this one must not go on before it has reached all of them.
                std::thread::sleep(Duration::from_millis(200));
                return;
            }
            loop {
                std::thread::park();
            }
        }
    }
}
