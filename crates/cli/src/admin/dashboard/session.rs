//! Sessions of operators, and the limit of attempts to log in.
//!
//! A session is an entry in the memory of this process, and the cookie holds only its random identifier. So a session ends with
//! the process, with its time, with a logout, and as soon as the admin token is another one.

use std::fmt::{self, Write as _};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use subtle::ConstantTimeEq as _;

use crate::admin::connections::network_of;
use crate::config::AdminToken;

/// The life of a session.
pub(super) const SESSION_LIFE: Duration = Duration::from_secs(8 * 3600);

/// The most sessions. One more ends the oldest.
const MAX_SESSIONS: usize = 64;

/// The tries of one address in [`TRIES_PERIOD`], and of all addresses together.
const MAX_TRIES: u32 = 10;
const MAX_ALL_TRIES: u32 = 200;
const TRIES_PERIOD: Duration = Duration::from_secs(60);

/// 256 random bits in hexadecimal digits; `None` if the system has no random numbers.
pub(super) fn random_text() -> Option<String> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).ok()?;
    Some(bytes.iter().fold(String::with_capacity(64), |mut text, byte| {
        // Writing to a text never fails.
        let _written = write!(text, "{byte:02x}");
        text
    }))
}

/// A session as requests see it.
#[derive(Clone)]
pub(super) struct Session {
    /// The value of the cookie.
    id: String,
    pub(super) form_token: String,
    /// The name of the operator, if they gave one.
    pub(super) actor: Option<String>,
    /// The value of `Host` at the login.
    host: String,
    /// True if the login came over TLS.
    is_secure: bool,
    /// The admin token at the login.
    token: AdminToken,
    ends: Instant,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").finish_non_exhaustive()
    }
}

/// The origin of a request, to which a session is bound.
#[derive(Clone, Copy, Debug)]
pub(super) struct SessionOrigin<'a> {
    pub(super) host: &'a str,
    pub(super) is_secure: bool,
}

#[derive(Debug, Default)]
pub(super) struct Sessions(Mutex<Vec<Session>>);

impl Sessions {
    fn lock(&self) -> MutexGuard<'_, Vec<Session>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a session, and returns the value of its cookie; `None` if the system has no random numbers.
    pub(super) fn begin(
        &self,
        token: &AdminToken,
        origin: SessionOrigin<'_>,
        actor: Option<String>,
        now: Instant,
    ) -> Option<String> {
        let session = Session {
            id: random_text()?,
            form_token: random_text()?,
            actor,
            host: origin.host.to_owned(),
            is_secure: origin.is_secure,
            token: token.clone(),
            ends: now + SESSION_LIFE,
        };
        let id = session.id.clone();
        let mut sessions = self.lock();
        sessions.retain(|session| session.ends > now);
        if sessions.len() == MAX_SESSIONS {
            sessions.remove(0);
        }
        sessions.push(session);
        Some(id)
    }

    /// The session with this cookie, if it is valid for this origin and was begun with the present admin token.
    pub(super) fn find(
        &self,
        cookie: &str,
        origin: SessionOrigin<'_>,
        token: &AdminToken,
        now: Instant,
    ) -> Option<Session> {
        let mut sessions = self.lock();
        sessions.retain(|session| {
            session.ends > now && bool::from(session.token.as_bytes().ct_eq(token.as_bytes()))
        });
        // All are compared, in constant time each, so that the time tells nothing about an identifier.
        let found = sessions.iter().fold(None, |found, session| {
            let is_it: bool = session.id.as_bytes().ct_eq(cookie.as_bytes()).into();
            if is_it { Some(session) } else { found }
        })?;
        let is_here = found.host == origin.host && found.is_secure == origin.is_secure;
        is_here.then(|| found.clone())
    }

    /// Ends a session.
    pub(super) fn end(&self, session: &Session) {
        self.lock().retain(|other| other.id != session.id);
    }
}

/// The failed attempts to log in.
#[derive(Debug, Default)]
pub(super) struct LoginTries(Mutex<Tries>);

#[derive(Debug, Default)]
struct Tries {
    began: Option<Instant>,
    all: u32,
    by_address: Vec<(IpAddr, u32)>,
}

impl LoginTries {
    /// Counts a wrong try. After too many it returns the time until the next one.
    ///
    /// # Errors
    /// The time to wait.
    pub(super) fn begin(&self, address: IpAddr, now: Instant) -> Result<(), Duration> {
        let address = network_of(address);
        let mut tries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let began = *tries.began.get_or_insert(now);
        let elapsed = now.saturating_duration_since(began);
        if elapsed >= TRIES_PERIOD {
            *tries = Tries { began: Some(now), ..Tries::default() };
        }
        let wait = TRIES_PERIOD.saturating_sub(elapsed);
        let place = tries.by_address.iter().position(|(other, _)| *other == address);
        let own = place.and_then(|place| tries.by_address.get(place)).map_or(0, |(_, count)| *count);
        if own >= MAX_TRIES || tries.all >= MAX_ALL_TRIES {
            return Err(wait);
        }
        tries.all += 1;
        match place.and_then(|place| tries.by_address.get_mut(place)) {
            Some((_, count)) => *count += 1,
            // The limit of all together also bounds this list.
            None => tries.by_address.push((address, 1)),
        }
        Ok(())
    }

    /// Forgets the tries of an address whose token was right.
    pub(super) fn succeed(&self, address: IpAddr) {
        let address = network_of(address);
        let mut tries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tries.by_address.retain(|(other, _)| *other != address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::admin_token;

    const HERE: SessionOrigin<'_> = SessionOrigin { host: "127.0.0.1:9090", is_secure: false };

    #[test]
    fn a_session_is_bound_to_its_host_its_time_and_the_token() {
        let (sessions, now) = (Sessions::default(), Instant::now());
        let token = admin_token("0123456789abcdef").unwrap();
        let cookie = sessions.begin(&token, HERE, Some("anna".to_owned()), now).unwrap();
        assert_eq!(cookie.len(), 64);
        let find = |cookie: &str, origin, token, now| sessions.find(cookie, origin, token, now);
        let found = find(&cookie, HERE, &token, now).unwrap();
        assert_eq!(found.actor.as_deref(), Some("anna"));
        assert_ne!(found.form_token, cookie);
        for (cookie, origin) in [
            ("", HERE),
            (&cookie[..63], HERE),
            (found.form_token.as_str(), HERE),
            (cookie.as_str(), SessionOrigin { host: "127.0.0.1:8080", ..HERE }),
            (cookie.as_str(), SessionOrigin { is_secure: true, ..HERE }),
        ] {
            assert!(find(cookie, origin, &token, now).is_none(), "{cookie} {origin:?}");
        }
        let almost = now + SESSION_LIFE - Duration::from_secs(1);
        assert!(find(&cookie, HERE, &token, almost).is_some());
        let rotated = admin_token("fedcba9876543210").unwrap();
        assert!(find(&cookie, HERE, &rotated, now).is_none());
        assert!(find(&cookie, HERE, &token, now).is_none(), "a rotated token ends the session for good");
        let cookie = sessions.begin(&token, HERE, None, now).unwrap();
        assert!(find(&cookie, HERE, &token, now + SESSION_LIFE).is_none());
    }

    #[test]
    fn one_session_too_many_ends_the_oldest() {
        let (sessions, now) = (Sessions::default(), Instant::now());
        let token = admin_token("0123456789abcdef").unwrap();
        let cookies: Vec<_> =
            (0..=MAX_SESSIONS).map(|_| sessions.begin(&token, HERE, None, now).unwrap()).collect();
        let is_there = |cookie: &String| sessions.find(cookie, HERE, &token, now).is_some();
        assert!(!is_there(&cookies[0]));
        assert!(cookies[1..].iter().all(is_there));
    }

    #[test]
    fn tries_are_limited_by_address_and_together() {
        let (tries, now) = (LoginTries::default(), Instant::now());
        let address = |last| IpAddr::from([192, 0, 2, last]);
        for _ in 0..MAX_TRIES {
            assert_eq!(tries.begin(address(1), now), Ok(()));
        }
        let later = now + Duration::from_secs(20);
        assert_eq!(tries.begin(address(1), later), Err(Duration::from_secs(40)));
        assert_eq!(tries.begin(address(2), later), Ok(()));
        assert_eq!(tries.begin(address(1), now + TRIES_PERIOD), Ok(()));

        let tries = LoginTries::default();
        for number in 0..MAX_ALL_TRIES {
            assert_eq!(tries.begin(address(u8::try_from(number).unwrap()), now), Ok(()));
        }
        assert!(tries.begin(address(255), now).is_err());

        let tries = LoginTries::default();
        let inside = |last: u16| IpAddr::from([0x2001, 0xdb8, 0, 0, last, 0, 0, 1]);
        for number in 0..MAX_TRIES {
            assert_eq!(tries.begin(inside(u16::try_from(number).unwrap()), now), Ok(()));
        }
        assert!(tries.begin(inside(99), now).is_err(), "a network of 64 bits is one address");
        tries.succeed(inside(98));
        assert_eq!(tries.begin(inside(99), now), Ok(()));
    }
}
