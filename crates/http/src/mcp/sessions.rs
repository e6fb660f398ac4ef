//! The sessions whose calls run (revisions before 2026-07-28).
//!
//! A client that gives up a call ends its session, and opens a new one for its retry. If the server ended the call with the
//! session, the outcome of the call would be unknown, and the retry would get no result.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use http::header::HeaderValue;

/// The number of running calls of each session. Copies share it. A layer limits the calls that run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sessions(Arc<Mutex<HashMap<HeaderValue, usize>>>);

impl Sessions {
    /// Counts a call of this session, until the result is dropped.
    pub(crate) fn enter(&self, session: HeaderValue) -> RunningCall {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *running.entry(session.clone()).or_default() += 1;
        RunningCall { sessions: self.clone(), session }
    }

    /// Returns true if a call of this session runs.
    pub(crate) fn has_call(&self, session: &HeaderValue) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains_key(session)
    }
}

/// A call that runs.
#[derive(Debug)]
pub(crate) struct RunningCall {
    sessions: Sessions,
    session: HeaderValue,
}

impl Drop for RunningCall {
    fn drop(&mut self) {
        let mut running = self.sessions.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = running.get_mut(&self.session) {
            *count -= 1;
            if *count == 0 {
                running.remove(&self.session);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_has_calls_until_the_last_one_has_ended() {
        let (sessions, session) = (Sessions::default(), HeaderValue::from_static("s"));
        let first = sessions.enter(session.clone());
        let second = sessions.clone().enter(session.clone());
        drop(first);
        assert!(sessions.has_call(&session) && !sessions.has_call(&HeaderValue::from_static("t")));
        drop(second);
        assert!(!sessions.has_call(&session));
    }
}
