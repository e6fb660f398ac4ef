//! The sessions whose calls run (revisions before 2026-07-28).
//!
//! A client that gives up a call ends its session, and opens a new one for its retry. If the server ended the call with the
//! session, the outcome of the call would be unknown, and the retry would get no result.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use http::Method;
use http::header::{HeaderMap, HeaderValue};

use super::call::sessions;
use crate::overrides::overrides;

/// Returns true if a server may take this request for the end of a session. Many frameworks take a method in any case, or from
/// another field.
pub(crate) fn is_end_of_session(method: &Method, headers: &HeaderMap) -> bool {
    let is_delete = |method: &[u8]| method.trim_ascii().eq_ignore_ascii_case(b"DELETE");
    is_delete(method.as_str().as_bytes()) || overrides(headers).any(|(_, method)| is_delete(method))
}

/// The number of running calls of each session. Copies share it. A layer limits the calls that run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sessions(Arc<Mutex<HashMap<HeaderValue, usize>>>);

impl Sessions {
    /// Counts a call of these sessions, until the result is dropped.
    pub(crate) fn enter(&self, sessions: Vec<HeaderValue>) -> RunningCall {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for session in &sessions {
            *running.entry(session.clone()).or_default() += 1;
        }
        RunningCall { sessions: self.clone(), entered: sessions }
    }

    /// Returns true if a call runs in one of the sessions that a request names. A line may be several that a gateway has joined.
    pub(crate) fn have_call(&self, headers: &HeaderMap) -> bool {
        let running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_running = |session: &[u8]| {
            HeaderValue::from_bytes(session.trim_ascii()).is_ok_and(|session| running.contains_key(&session))
        };
        sessions(headers).any(|line| {
            running.contains_key(line) || line.as_bytes().split(|byte| *byte == b',').any(is_running)
        })
    }
}

/// A call that runs.
#[derive(Debug)]
pub(crate) struct RunningCall {
    sessions: Sessions,
    entered: Vec<HeaderValue>,
}

impl Drop for RunningCall {
    fn drop(&mut self) {
        let mut running = self.sessions.0.lock().unwrap_or_else(PoisonError::into_inner);
        for session in &self.entered {
            if let Some(count) = running.get_mut(session) {
                *count -= 1;
                if *count == 0 {
                    running.remove(session);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    const SESSION: &str = "mcp-session-id";

    #[test]
    fn a_session_has_calls_until_the_last_one_has_ended() {
        let (sessions, session) = (Sessions::default(), HeaderValue::from_static("s"));
        let first = sessions.enter(vec![session.clone()]);
        // The same line twice is one call.
        let second = sessions.clone().enter(vec![session.clone(), session]);
        drop(first);
        assert!(sessions.have_call(&headers(&[(SESSION, "s")])));
        assert!(!sessions.have_call(&headers(&[(SESSION, "t")])) && !sessions.have_call(&headers(&[])));
        drop(second);
        assert!(!sessions.have_call(&headers(&[(SESSION, "s")])));
    }

    #[test]
    fn each_session_that_a_request_names_counts() {
        let sessions = Sessions::default();
        let call = sessions.enter(vec![HeaderValue::from_static("s"), HeaderValue::from_static("a,b")]);
        for lines in [
            &[(SESSION, "x"), (SESSION, "s")][..],
            &[(SESSION, "s"), (SESSION, "x")],
            &[(SESSION, "x"), ("mcp_session_id", "s")],
            &[("mcp-session_id", "s")],
            &[(SESSION, "x, s")],
            &[(SESSION, "a,b")],
        ] {
            assert!(sessions.have_call(&headers(lines)), "{lines:?}");
        }
        assert!(!sessions.have_call(&headers(&[("x-mcp-session-id", "s")])));
        drop(call);
        assert!(sessions.0.lock().unwrap().is_empty());
    }

    #[test]
    fn a_server_may_take_these_for_the_end_of_a_session() {
        let ends = |method: &str, headers: &HeaderMap| is_end_of_session(&method.parse().unwrap(), headers);
        assert!(ends("DELETE", &headers(&[])) && ends("delete", &headers(&[])));
        assert!(ends("POST", &headers(&[("x-http-method-override", "delete")])));
        assert!(!ends("POST", &headers(&[("x-http-method-override", "PUT")])));
        assert!(!ends("POST", &headers(&[])));
    }
}
