//! Stops at a named point and waits to be killed. Only in builds with the feature `failpoints`, for tests of crashes.
//!
//! `ONCEGATE_FAILPOINT` names the point: `executing` (the claim is durable, the upstream was not asked yet), `executed` (the
//! upstream's answer is there, nothing of it is written), `completed` (the completion is durable, nobody was answered).

use oncegate_engine::{Event, EventKind, Observer};

/// Stops the thread that reaches the point.
pub(crate) struct Failpoint(Option<String>);

impl Failpoint {
    pub(crate) fn from_env() -> Self {
        Self(std::env::var("ONCEGATE_FAILPOINT").ok())
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
        if self.0.as_deref() == Some(point) {
            eprintln!("failpoint {point}");
            loop {
                std::thread::park();
            }
        }
    }
}
