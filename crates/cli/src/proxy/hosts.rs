//! Limits the connections to a service for different hosts.
//!
//! In HTTP/2 the address of a request contains the host that the client asked for, and the library keeps connections by
//! address. So each host has a connection of its own, which stays for `upstream-idle-timeout` after its last request. Clients
//! can invent any number of hosts.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use http::uri::Authority;

/// The hosts that have a connection to the service, of one thread.
pub(super) struct HostLimit {
    max: usize,
    /// The time for which the connection of a host may stay after its last request.
    kept_for: Duration,
    /// The start of the last request to each host.
    hosts: Mutex<HashMap<Authority, Instant>>,
}

impl HostLimit {
    /// The library checks for idle connections once per `idle_timeout`, so one may stay for twice that time.
    pub(super) fn new(max: usize, idle_timeout: Duration) -> Self {
        Self { max, kept_for: idle_timeout.saturating_mul(2), hosts: Mutex::default() }
    }

    /// Returns true if a request to this host may be sent: the host was used recently, or the limit is not reached.
    pub(super) fn admit(&self, host: &Authority, now: Instant) -> bool {
        // Only one thread takes this lock.
        let mut hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = hosts.get_mut(host) {
            *last = now;
            return true;
        }
        if hosts.len() >= self.max {
            hosts.retain(|_, last| now.saturating_duration_since(*last) <= self.kept_for);
        }
        let is_admitted = hosts.len() < self.max;
        if is_admitted {
            hosts.insert(host.clone(), now);
        }
        is_admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_bounded_until_their_connections_end() {
        let limit = HostLimit::new(2, Duration::from_secs(1));
        let host = |name: &'static str| Authority::from_static(name);
        let start = Instant::now();
        let admit = |name, after| limit.admit(&host(name), start + Duration::from_millis(after));
        assert!(admit("a.test", 0) && admit("b.test", 500));
        assert!(!admit("c.test", 1000) && admit("a.test", 1000));
        assert!(!admit("c.test", 2500) && admit("c.test", 2501));
        assert!(!admit("b.test", 2600));
        assert_eq!(limit.hosts.lock().unwrap().len(), 2);
    }
}
