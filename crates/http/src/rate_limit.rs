//! Limits of rates: new keys of one caller, attempts under one key, and new keys of one route.
//!
//! They are decided before the claim and before the body is read, so a request beyond them costs little and changes nothing. The
//! states are in memory: each process has its own.
//!
//! A table of states has a fixed number of places. When it is full, the state that is closest to its full quota is forgotten: its
//! caller gets the full quota a little earlier than it would have. A state that is used up is the last one to be forgotten, so
//! callers with invented names cannot free a caller from its limit.

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::num::NonZeroU32;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use governor::clock::{Clock as _, MonotonicClock};
use governor::middleware::NoOpMiddleware;
use governor::nanos::Nanos;
use governor::state::StateStore;
use governor::{Quota, RateLimiter};
use http::header::{HeaderMap, HeaderName, HeaderValue};
use oncegate_core::{CallerTag, RecordId};
use oncegate_engine::{ConfigError, LogThrottle};

/// The places of a table: 4096 sets of 16, about 2 MiB when all are taken.
const SETS: usize = 4096;
const WAYS: usize = 16;

const WARNING_INTERVAL: Duration = Duration::from_secs(60);
/// One for each limit, so that one limit does not hide another.
static WARNINGS: LazyLock<[LogThrottle; 3]> =
    LazyLock::new(|| [(); 3].map(|()| LogThrottle::new(WARNING_INTERVAL)));

const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// The beginning of the hash that names a caller or a key.
type Name = [u8; 16];

/// A number of requests in a period, and the number that may come at once.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RateQuota {
    count: NonZeroU32,
    period: Duration,
    burst: NonZeroU32,
}

impl RateQuota {
    /// At most this many requests in each period, all of which may come at once.
    ///
    /// # Errors
    /// If the number is 0 or above 1 000 000, or the period is not from one second to one day.
    pub fn new(count: u32, period: Duration) -> Result<Self, ConfigError> {
        let period = ConfigError::check(
            "the period of a rate limit",
            period,
            Duration::from_secs(1)..=Duration::from_secs(24 * 3600),
        )?;
        let count = requests("the number of requests of a rate limit", count)?;
        Ok(Self { count, period, burst: count })
    }

    /// Sets the number of requests that may come at once after a pause.
    ///
    /// # Errors
    /// If it is 0 or above 1 000 000.
    pub fn with_burst(self, burst: u32) -> Result<Self, ConfigError> {
        Ok(Self { burst: requests("the burst of a rate limit", burst)?, ..self })
    }

    /// The time in which one request becomes possible again.
    fn interval(self) -> Duration {
        (self.period / self.count.get()).max(Duration::from_nanos(1))
    }

    /// The seconds in which the whole burst becomes possible again.
    fn window(self) -> u64 {
        ceil(self.interval().saturating_mul(self.burst.get()))
    }

    fn library(self) -> Quota {
        // The interval is never zero.
        Quota::with_period(self.interval()).unwrap_or(Quota::per_second(self.count)).allow_burst(self.burst)
    }
}

fn requests(name: &str, count: u32) -> Result<NonZeroU32, ConfigError> {
    let count = ConfigError::check(name, count, 1..=1_000_000)?;
    Ok(NonZeroU32::new(count).unwrap_or(NonZeroU32::MIN))
}

fn ceil(time: Duration) -> u64 {
    u64::try_from(time.as_nanos().div_ceil(1_000_000_000)).unwrap_or(u64::MAX).max(1)
}

impl fmt::Debug for RateQuota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {:?}, burst {}", self.count, self.period, self.burst)
    }
}

/// The limit that a request exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RateLimitKind {
    /// New keys of one caller.
    Caller,
    /// Attempts under one key.
    Key,
    /// New keys of one route.
    Route,
}

impl RateLimitKind {
    /// Every limit.
    pub const ALL: [Self; 3] = [Self::Caller, Self::Key, Self::Route];

    /// The name in metrics and in `RateLimit`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Caller => "caller",
            Self::Key => "key",
            Self::Route => "route",
        }
    }
}

/// The limits of rates of a route. Copies share their counts; each limit that is set begins to count anew.
///
/// A key counts as new for the limits of callers and routes if this process has not seen it among the last 65 536 keys or so: a
/// retry counts only for the limit of its key.
#[derive(Clone, Default)]
pub struct RateLimits {
    caller: Option<Arc<Limiter>>,
    key: Option<Arc<Limiter>>,
    route: Option<Arc<Limiter>>,
    seen: Option<Arc<SeenKeys>>,
}

impl RateLimits {
    /// Limits the new keys of each caller. All callers without an identity count as one.
    #[must_use]
    pub fn with_caller(mut self, quota: Option<RateQuota>) -> Self {
        self.caller = quota.map(|quota| Limiter::new(quota, SETS));
        self.with_seen_keys()
    }

    /// Limits the attempts under each key: the first request and its retries.
    #[must_use]
    pub fn with_key(mut self, quota: Option<RateQuota>) -> Self {
        self.key = quota.map(|quota| Limiter::new(quota, SETS));
        self
    }

    /// Limits the new keys of all callers together.
    #[must_use]
    pub fn with_route(mut self, quota: Option<RateQuota>) -> Self {
        // It counts all requests under one name.
        self.route = quota.map(|quota| Limiter::new(quota, 1));
        self.with_seen_keys()
    }

    fn with_seen_keys(mut self) -> Self {
        if self.seen.is_none() && (self.caller.is_some() || self.route.is_some()) {
            self.seen = Some(Arc::new(SeenKeys::new()));
        }
        self
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.caller.is_none() && self.key.is_none() && self.route.is_none()
    }

    /// Counts a request of this caller with the key of this record.
    ///
    /// # Errors
    /// If it exceeds a limit.
    pub(crate) fn check(&self, caller: CallerTag, record: RecordId) -> Result<(), ExceededRate> {
        let key = place_of(record.as_bytes());
        let limit = |limiter: &Option<Arc<Limiter>>, kind, name: &Name| match limiter {
            Some(limiter) => {
                limiter.check(name).map_err(|wait| ExceededRate { kind, wait, quota: limiter.quota })
            }
            None => Ok(()),
        };
        let seen = self.seen.as_ref().filter(|_| self.caller.is_some() || self.route.is_some());
        if let Some(seen) = seen
            && !seen.has(&key)
        {
            // The caller's own limit comes first, so that a caller beyond it uses up nothing of the others.
            limit(&self.caller, RateLimitKind::Caller, &place_of(caller.as_bytes()))?;
            limit(&self.route, RateLimitKind::Route, &[0; 16])?;
        }
        limit(&self.key, RateLimitKind::Key, &key)?;
        if let Some(seen) = seen {
            seen.note(&key);
        }
        Ok(())
    }
}

impl fmt::Debug for RateLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quota = |limiter: &Option<Arc<Limiter>>| limiter.as_ref().map(|limiter| limiter.quota);
        f.debug_struct("RateLimits")
            .field("caller", &quota(&self.caller))
            .field("key", &quota(&self.key))
            .field("route", &quota(&self.route))
            .finish()
    }
}

/// The first bytes of a hash.
fn place_of(hash: &[u8]) -> Name {
    let mut place = [0; 16];
    for (to, from) in place.iter_mut().zip(hash) {
        *to = *from;
    }
    place
}

/// A limit that a request exceeded, and the time after which it is within it again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExceededRate {
    pub(crate) kind: RateLimitKind,
    wait: Duration,
    quota: RateQuota,
}

impl ExceededRate {
    pub(crate) fn retry_after(&self) -> u64 {
        ceil(self.wait)
    }

    pub(crate) const fn detail(&self) -> &'static str {
        match self.kind {
            RateLimitKind::Caller => {
                "Nothing was executed for this request: the caller sends more new keys than it may. Send the same request with the same \
                 key later."
            }
            RateLimitKind::Key => {
                "Nothing was executed for this request: it was sent too often with this key. An earlier request with the key may have \
                 taken effect. Send the same request with the same key later to get its response."
            }
            RateLimitKind::Route => {
                "Nothing was executed for this request: all callers together send more new keys than this operation takes. Send the same \
                 request with the same key later."
            }
        }
    }

    /// Writes the fields of draft-ietf-httpapi-ratelimit-headers-10.
    pub(crate) fn write(&self, headers: &mut HeaderMap) {
        let (name, quota) = (self.kind.as_str(), self.quota);
        let policy = format!("\"{name}\";q={};w={}", quota.burst, quota.window());
        let limit = format!("\"{name}\";r=0;t={}", self.retry_after());
        for (field, text) in [(RATE_LIMIT_POLICY, policy), (RATE_LIMIT, limit)] {
            if let Ok(value) = HeaderValue::try_from(text) {
                headers.insert(field, value);
            }
        }
    }

    /// Logs, at most once a minute for each limit, that a request is refused at it.
    pub(crate) fn warn(&self, caller: CallerTag) {
        let Some(suppressed) = WARNINGS.get(self.kind as usize).and_then(LogThrottle::pass) else { return };
        let limit = format!("rate-limit.{}", self.kind.as_str());
        tracing::warn!(limit, %caller, suppressed, "a rate limit is reached; requests beyond it are refused with 429");
    }
}

/// One limit, with the states of all that it counts.
struct Limiter {
    quota: RateQuota,
    limiter: RateLimiter<Name, Table, MonotonicClock, NoOpMiddleware<Instant>>,
}

impl Limiter {
    fn new(quota: RateQuota, sets: usize) -> Arc<Self> {
        let limiter = RateLimiter::new(quota.library(), Table::new(sets), MonotonicClock);
        Arc::new(Self { quota, limiter })
    }

    /// # Errors
    /// The time after which it is allowed.
    fn check(&self, name: &Name) -> Result<(), Duration> {
        self.limiter.check_key(name).map_err(|until| until.wait_time_from(MonotonicClock.now()))
    }
}

/// A part of a table.
type Set = Vec<(Name, Nanos)>;

/// The states of a limit, by the beginnings of hashes. Full, it forgets the smallest state of a set.
struct Table {
    sets: Box<[Mutex<Set>]>,
    /// Chooses the set, so that no client can choose which states it pushes out.
    random: RandomState,
}

impl Table {
    fn new(sets: usize) -> Self {
        Self { sets: (0..sets).map(|_| Mutex::default()).collect(), random: RandomState::new() }
    }

    fn with_set<T>(&self, name: &Name, act: impl FnOnce(&mut Set) -> T) -> T {
        let at =
            usize::try_from(self.random.hash_one(name) % self.sets.len().max(1) as u64).unwrap_or_default();
        match self.sets.get(at) {
            Some(set) => act(&mut set.lock().unwrap_or_else(PoisonError::into_inner)),
            None => act(&mut Vec::new()),
        }
    }

    fn put(set: &mut Set, name: &Name, state: Nanos) {
        if let Some(place) = set.iter_mut().find(|(own, _)| own == name) {
            place.1 = state;
        } else if set.len() < WAYS {
            set.push((*name, state));
        } else if let Some(place) = set.iter_mut().min_by_key(|(_, state)| *state) {
            *place = (*name, state);
        }
    }
}

impl StateStore for Table {
    type Key = Name;

    fn measure_and_replace<T, F, E>(&self, name: &Name, decide: F) -> Result<T, E>
    where
        F: Fn(Option<Nanos>) -> Result<(T, Nanos), E>,
    {
        self.with_set(name, |set| {
            let state = set.iter().find(|(own, _)| own == name).map(|(_, state)| *state);
            let (result, state) = decide(state)?;
            Self::put(set, name, state);
            Ok(result)
        })
    }
}

/// The keys that were seen last, with the time of each. Full, it forgets the one that was not seen for longest.
struct SeenKeys {
    table: Table,
    start: Instant,
}

impl SeenKeys {
    fn new() -> Self {
        Self { table: Table::new(SETS), start: Instant::now() }
    }

    fn has(&self, key: &Name) -> bool {
        self.table.with_set(key, |set| set.iter().any(|(own, _)| own == key))
    }

    fn note(&self, key: &Name) {
        let now = Nanos::from(self.start.elapsed());
        self.table.with_set(key, |set| Table::put(set, key, now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn quota(count: u32) -> Option<RateQuota> {
        Some(RateQuota::new(count, HOUR).unwrap())
    }

    fn caller(number: u64) -> CallerTag {
        CallerTag::from_bytes(number.to_be_bytes())
    }

    fn record(number: u64) -> RecordId {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&number.to_be_bytes());
        RecordId::from_bytes(bytes)
    }

    fn kind(result: Result<(), ExceededRate>) -> Option<RateLimitKind> {
        result.err().map(|exceeded| exceeded.kind)
    }

    #[test]
    fn a_caller_may_send_a_burst_of_new_keys_and_any_number_of_retries() {
        let limits = RateLimits::default().with_caller(quota(3));
        for number in 0..3 {
            assert_eq!(kind(limits.check(caller(1), record(number))), None);
        }
        for _ in 0..10 {
            assert_eq!(
                kind(limits.check(caller(1), record(9))),
                Some(RateLimitKind::Caller),
                "no try counts as seen"
            );
            assert_eq!(kind(limits.check(caller(1), record(0))), None, "a retry is not a new key");
        }
        assert_eq!(kind(limits.check(caller(2), record(10))), None, "another caller");
        let exceeded = limits.check(caller(1), record(9)).unwrap_err();
        assert!((1190..=1200).contains(&exceeded.retry_after()), "{exceeded:?}");
        let mut headers = HeaderMap::new();
        exceeded.write(&mut headers);
        assert_eq!(headers["ratelimit-policy"], "\"caller\";q=3;w=3600");
        assert_eq!(headers["ratelimit"], format!("\"caller\";r=0;t={}", exceeded.retry_after()));
    }

    #[test]
    fn attempts_under_one_key_are_limited_apart_from_other_keys() {
        let limits = RateLimits::default().with_key(quota(2)).with_route(quota(3));
        assert_eq!(kind(limits.check(caller(1), record(1))), None);
        assert_eq!(kind(limits.check(caller(1), record(1))), None);
        assert_eq!(kind(limits.check(caller(1), record(1))), Some(RateLimitKind::Key));
        assert_eq!(kind(limits.check(caller(2), record(2))), None);
        assert_eq!(kind(limits.check(caller(3), record(3))), None);
        assert_eq!(kind(limits.check(caller(4), record(4))), Some(RateLimitKind::Route));
        assert_eq!(kind(limits.check(caller(2), record(2))), None, "a retry is no new key of the route");
    }

    #[test]
    fn the_quota_comes_back_with_time() {
        let fast = RateQuota::new(1000, Duration::from_secs(1)).unwrap().with_burst(1).unwrap();
        let limits = RateLimits::default().with_key(Some(fast));
        let deadline = Instant::now() + Duration::from_secs(10);
        for _ in 0..3 {
            while limits.check(caller(1), record(1)).is_err() {
                assert!(Instant::now() < deadline);
                std::thread::yield_now();
            }
        }
        assert_eq!((fast.window(), fast.interval()), (1, Duration::from_millis(1)));
        assert!(RateQuota::new(0, HOUR).is_err() && RateQuota::new(1_000_001, HOUR).is_err());
        assert!(
            RateQuota::new(1, Duration::from_millis(999)).is_err() && RateQuota::new(1, 25 * HOUR).is_err()
        );
        assert!(fast.with_burst(0).is_err());
    }

    #[test]
    fn copies_share_their_counts_and_a_limit_that_is_set_again_begins_anew() {
        let service = RateLimits::default().with_caller(quota(1));
        let route = service.clone().with_route(quota(5));
        assert_eq!(kind(service.check(caller(1), record(1))), None);
        assert_eq!(kind(route.check(caller(1), record(2))), Some(RateLimitKind::Caller));
        let own = service.clone().with_caller(quota(1));
        assert_eq!(kind(own.check(caller(1), record(3))), None);
        assert!(RateLimits::default().is_empty() && service.clone().with_caller(None).is_empty());
    }

    /// Three times as many callers and keys as there are places.
    #[test]
    fn random_callers_neither_fill_the_memory_nor_free_a_caller_from_its_limit() {
        let limits = RateLimits::default().with_caller(quota(2)).with_key(quota(2));
        for number in 0..2 {
            assert_eq!(kind(limits.check(caller(1), record(number))), None);
        }
        assert_eq!(kind(limits.check(caller(1), record(2))), Some(RateLimitKind::Caller));
        for number in 10..(3 * SETS * WAYS) as u64 {
            assert_eq!(kind(limits.check(caller(number), record(number))), None);
        }
        let seen = &limits.seen.as_ref().unwrap().table;
        let places: Vec<_> = seen.sets.iter().map(|set| set.lock().unwrap().len()).collect();
        assert_eq!(places.iter().max(), Some(&WAYS));
        assert!(places.iter().sum::<usize>() <= SETS * WAYS);
        assert_eq!(kind(limits.check(caller(1), record(2))), Some(RateLimitKind::Caller));
    }
}
