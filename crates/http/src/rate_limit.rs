//! Limits of rates: new keys of one caller, attempts under one key, and new keys of one route.
//!
//! They are decided before the claim and before the body is read, so a request beyond them costs little and changes nothing. A
//! request uses quotas only if all limits allow it. The states are in memory: each process has its own.
//!
//! A table of states has a fixed number of places. When it is full, the state that is closest to its full quota is forgotten: its
//! caller gets the full quota a little earlier than it would have. A state that is used up is the last one to be forgotten, so
//! callers with invented names cannot free a caller from its limit.

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};
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

/// The longest time in which a used up burst comes back. The library counts nanoseconds in 64 bits.
const MAX_WINDOW: Duration = Duration::from_secs(3660 * 24 * 3600);

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
    /// If it is 0 or above 1 000 000, or if so many are possible again only after more than ten years.
    pub fn with_burst(self, burst: u32) -> Result<Self, ConfigError> {
        let quota = Self { burst: requests("the burst of a rate limit", burst)?, ..self };
        if quota.interval().saturating_mul(burst) > MAX_WINDOW {
            return Err(ConfigError::new(format!(
                "the burst of a rate limit, {burst}, comes back in more than ten years at this rate; choose a smaller burst or a \
                 higher rate"
            )));
        }
        Ok(quota)
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

/// The evictions from the tables of all limits of a process.
static EVICTIONS: [AtomicU64; EvictedState::ALL.len()] =
    [const { AtomicU64::new(0) }; EvictedState::ALL.len()];

/// The kinds of states that a full table forgets before their time.
#[derive(Clone, Copy)]
enum EvictedState {
    Caller,
    Key,
    SeenKey,
}

impl EvictedState {
    const ALL: [Self; 3] = [Self::Caller, Self::Key, Self::SeenKey];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Caller => RateLimitKind::Caller.as_str(),
            Self::Key => RateLimitKind::Key.as_str(),
            Self::SeenKey => "seen-key",
        }
    }

    fn count(self) {
        if let Some(counter) = EVICTIONS.get(self as usize) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The limits of rates of a route. Copies share their counts; each limit that is set begins to count anew.
///
/// A key counts as new for the limits of callers and routes if this process has not seen it among the last 65 536 keys or so: a
/// retry counts only for the limit of its key. A request that one limit refuses uses nothing of the others.
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
        self.caller = quota.map(|quota| Limiter::new(quota, SETS, Some(EvictedState::Caller)));
        self.with_seen_keys()
    }

    /// Limits the attempts under each key: the first request and its retries.
    #[must_use]
    pub fn with_key(mut self, quota: Option<RateQuota>) -> Self {
        self.key = quota.map(|quota| Limiter::new(quota, SETS, Some(EvictedState::Key)));
        self
    }

    /// Limits the new keys of all callers together.
    #[must_use]
    pub fn with_route(mut self, quota: Option<RateQuota>) -> Self {
        // It counts all requests under one name, which is never evicted.
        self.route = quota.map(|quota| Limiter::new(quota, 1, None));
        self.with_seen_keys()
    }

    fn with_seen_keys(mut self) -> Self {
        if self.seen.is_none() && (self.caller.is_some() || self.route.is_some()) {
            self.seen = Some(Arc::default());
        }
        self
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.caller.is_none() && self.key.is_none() && self.route.is_none()
    }

    /// Continues the counts of earlier limits, as after a reload. Each pair has new limits and those that they replace.
    ///
    /// A limit with another quota than before begins to count anew. The counts of an earlier limit are continued by one limit
    /// only, the first one in the order of the pairs, and by those that share its counts. To be called before the new limits
    /// are in use.
    pub fn continue_counts<'a>(pairs: impl IntoIterator<Item = (&'a Self, &'a Self)>) {
        let mut continued = Vec::new();
        let mut seen_continued = Vec::new();
        for (new, earlier) in pairs {
            for (new, earlier) in
                [(&new.caller, &earlier.caller), (&new.key, &earlier.key), (&new.route, &earlier.route)]
            {
                let (Some(new), Some(earlier)) = (new, earlier) else { continue };
                if new.quota == earlier.quota {
                    continue_once(&new.counts, earlier.counts(), &mut continued);
                }
                // Another pair with the same limit must not set it.
                new.counts();
            }
            if let (Some(new), Some(earlier)) = (&new.seen, &earlier.seen) {
                continue_once(&new.0, earlier.table(), &mut seen_continued);
                new.table();
            }
        }
    }

    /// The number of states that full tables of this process forgot before their time, for callers (`caller`) and keys (`key`)
    /// that did not have their full quota yet, and for keys that counted as seen (`seen-key`).
    #[must_use]
    pub fn evictions() -> [(&'static str, u64); 3] {
        EvictedState::ALL.map(|state| {
            let count = EVICTIONS.get(state as usize).map(|counter| counter.load(Ordering::Relaxed));
            (state.as_str(), count.unwrap_or_default())
        })
    }

    /// Counts a request of this caller with the key of this record.
    ///
    /// # Errors
    /// If it exceeds a limit. Then it uses nothing of any limit.
    pub(crate) fn check(&self, caller: CallerTag, record: RecordId) -> Result<(), ExceededRate> {
        let key = place_of(record.as_bytes());
        let seen = self.seen.as_ref().filter(|_| self.caller.is_some() || self.route.is_some());
        let is_new = seen.is_some_and(|seen| !seen.has(&key));
        let limits = [
            (RateLimitKind::Caller, self.caller.as_deref().filter(|_| is_new), place_of(caller.as_bytes())),
            (RateLimitKind::Route, self.route.as_deref().filter(|_| is_new), [0; 16]),
            (RateLimitKind::Key, self.key.as_deref(), key),
        ];
        let limits = || limits.iter().filter_map(|(kind, limiter, name)| Some((*kind, (*limiter)?, name)));
        let exceeded = |kind, limiter: &Limiter, wait| ExceededRate { kind, wait, quota: limiter.quota };
        // The longest wait decides: the client would come back too early with any other.
        let refusal = limits()
            .filter_map(|(kind, limiter, name)| {
                Some(exceeded(kind, limiter, limiter.check(name, Use::Nothing).err()?))
            })
            .reduce(|one, other| if other.wait > one.wait { other } else { one });
        if let Some(exceeded) = refusal {
            return Err(exceeded);
        }
        for (at, (kind, limiter, name)) in limits().enumerate() {
            // Another request may have used up a quota meanwhile.
            if let Err(wait) = limiter.check(name, Use::One) {
                for (_, limiter, name) in limits().take(at) {
                    limiter.give_back(name);
                }
                return Err(exceeded(kind, limiter, wait));
            }
        }
        if let Some(seen) = seen {
            seen.note(&key);
        }
        Ok(())
    }
}

/// Sets counts to earlier ones, unless they are set, or others continue the earlier ones.
fn continue_once<T>(new: &OnceLock<Arc<T>>, earlier: &Arc<T>, continued: &mut Vec<Arc<T>>) {
    if continued.iter().all(|taken| !Arc::ptr_eq(taken, earlier)) && new.set(earlier.clone()).is_ok() {
        continued.push(earlier.clone());
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
    sets: usize,
    evicted: Option<EvictedState>,
    /// Made at the first request, because a reload may continue earlier ones.
    counts: OnceLock<Arc<Counts>>,
}

struct Counts {
    table: Arc<Table>,
    limiter: RateLimiter<Attempt, States, MonotonicClock, NoOpMiddleware<Instant>>,
}

/// The table, as the library sees it.
struct States(Arc<Table>);

/// A request, for one limit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Attempt {
    name: Name,
    uses: Use,
}

/// The part of a quota that a check uses if the quota allows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Use {
    Nothing,
    One,
}

impl Limiter {
    fn new(quota: RateQuota, sets: usize, evicted: Option<EvictedState>) -> Arc<Self> {
        Arc::new(Self { quota, sets, evicted, counts: OnceLock::new() })
    }

    fn counts(&self) -> &Arc<Counts> {
        self.counts.get_or_init(|| {
            let interval = Nanos::from(self.quota.interval());
            let table = Arc::new(Table { interval, evicted: self.evicted, ..Table::new(self.sets) });
            let limiter = RateLimiter::new(self.quota.library(), States(table.clone()), MonotonicClock);
            Arc::new(Counts { table, limiter })
        })
    }

    /// # Errors
    /// The time after which it is allowed.
    fn check(&self, name: &Name, uses: Use) -> Result<(), Duration> {
        let attempt = Attempt { name: *name, uses };
        let checked = self.counts().limiter.check_key(&attempt);
        checked.map_err(|until| until.wait_time_from(MonotonicClock.now()))
    }

    /// Takes back the use of one request.
    fn give_back(&self, name: &Name) {
        self.counts().table.give_back(name);
    }
}

/// A part of a table.
type Set = Vec<(Name, Nanos)>;

/// The states of a limit, by the beginnings of hashes. Full, it forgets the smallest state of a set.
struct Table {
    sets: Box<[Mutex<Set>]>,
    /// Chooses the set, so that no client can choose which states it pushes out.
    random: RandomState,
    /// The amount by which one request increases a state.
    interval: Nanos,
    evicted: Option<EvictedState>,
}

impl Table {
    fn new(sets: usize) -> Self {
        let sets = (0..sets).map(|_| Mutex::default()).collect();
        Self { sets, random: RandomState::new(), interval: Nanos::new(0), evicted: None }
    }

    fn with_set<T>(&self, name: &Name, act: impl FnOnce(&mut Set) -> T) -> T {
        let at =
            usize::try_from(self.random.hash_one(name) % self.sets.len().max(1) as u64).unwrap_or_default();
        match self.sets.get(at) {
            Some(set) => act(&mut set.lock().unwrap_or_else(PoisonError::into_inner)),
            None => act(&mut Vec::new()),
        }
    }

    /// Returns the state that was forgotten for this one.
    fn put(set: &mut Set, name: &Name, state: Nanos) -> Option<Nanos> {
        if let Some(place) = set.iter_mut().find(|(own, _)| own == name) {
            place.1 = state;
        } else if set.len() < WAYS {
            set.push((*name, state));
        } else if let Some(place) = set.iter_mut().min_by_key(|(_, state)| *state) {
            let (_, forgotten) = std::mem::replace(place, (*name, state));
            return Some(forgotten);
        }
        None
    }

    /// Returns true if a state that was forgotten for a new one had not its full quota yet. The new one is one interval from now.
    fn is_loss(&self, forgotten: Nanos, new: Nanos) -> bool {
        forgotten > new.saturating_sub(self.interval)
    }

    fn give_back(&self, name: &Name) {
        self.with_set(name, |set| {
            if let Some((_, state)) = set.iter_mut().find(|(own, _)| own == name) {
                *state = state.saturating_sub(self.interval);
            }
        });
    }
}

impl StateStore for States {
    type Key = Attempt;

    fn measure_and_replace<T, F, E>(&self, attempt: &Attempt, decide: F) -> Result<T, E>
    where
        F: Fn(Option<Nanos>) -> Result<(T, Nanos), E>,
    {
        let (Attempt { name, uses }, table) = (attempt, &*self.0);
        table.with_set(name, |set| {
            let state = set.iter().find(|(own, _)| own == name).map(|(_, state)| *state);
            let (result, state) = decide(state)?;
            if *uses == Use::Nothing {
                return Ok(result);
            }
            if Table::put(set, name, state).is_some_and(|forgotten| table.is_loss(forgotten, state))
                && let Some(evicted) = table.evicted
            {
                evicted.count();
            }
            Ok(result)
        })
    }
}

/// The keys that were seen last, with the time of each. Full, it forgets the one that was not seen for longest.
#[derive(Default)]
struct SeenKeys(OnceLock<Arc<SeenTable>>);

struct SeenTable {
    table: Table,
    start: Instant,
}

impl SeenKeys {
    fn table(&self) -> &Arc<SeenTable> {
        self.0.get_or_init(|| Arc::new(SeenTable { table: Table::new(SETS), start: Instant::now() }))
    }

    fn has(&self, key: &Name) -> bool {
        self.table().table.with_set(key, |set| set.iter().any(|(own, _)| own == key))
    }

    fn note(&self, key: &Name) {
        let SeenTable { table, start } = &**self.table();
        let now = Nanos::from(start.elapsed());
        if table.with_set(key, |set| Table::put(set, key, now)).is_some() {
            EvictedState::SeenKey.count();
        }
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

    impl Table {
        fn places(&self) -> usize {
            self.sets.iter().map(|set| set.lock().unwrap().len()).sum()
        }
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
        let slow = RateQuota::new(1, 24 * HOUR).unwrap();
        let error = slow.with_burst(3661).unwrap_err().to_string();
        assert!(error.contains("3661, comes back in more than ten years"), "{error}");
        let longest = RateLimits::default().with_route(Some(slow.with_burst(3660).unwrap()));
        for number in 0..3660 {
            assert_eq!(kind(longest.check(caller(1), record(number))), None);
        }
        assert_eq!(kind(longest.check(caller(1), record(3660))), Some(RateLimitKind::Route));
    }

    #[test]
    fn a_request_that_one_limit_refuses_uses_nothing_of_the_others() {
        let limits = RateLimits::default().with_caller(quota(2)).with_route(quota(3)).with_key(quota(9));
        for number in 0..2 {
            assert_eq!(kind(limits.check(caller(1), record(number))), None);
        }
        for number in 10..20 {
            assert_eq!(kind(limits.check(caller(1), record(number))), Some(RateLimitKind::Caller));
        }
        assert_eq!(kind(limits.check(caller(2), record(2))), None, "the route had one left");
        for number in 20..30 {
            assert_eq!(kind(limits.check(caller(2), record(number))), Some(RateLimitKind::Route));
            assert_eq!(kind(limits.check(caller(number), record(number))), Some(RateLimitKind::Route));
        }
        let without_route = limits.clone().with_route(None);
        assert_eq!(kind(without_route.check(caller(2), record(20))), None, "the caller had one left");
        assert_eq!(kind(without_route.check(caller(2), record(21))), Some(RateLimitKind::Caller));
        let states = limits.caller.as_ref().unwrap().counts().table.places();
        assert_eq!(states, 2, "a refused caller takes no place");
    }

    #[test]
    fn a_request_beyond_several_limits_waits_for_the_last_one() {
        let slow = RateQuota::new(1, 2 * HOUR).unwrap();
        let limits = RateLimits::default().with_caller(quota(1)).with_route(Some(slow));
        assert_eq!(kind(limits.check(caller(1), record(1))), None);
        let exceeded = limits.check(caller(1), record(2)).unwrap_err();
        assert_eq!(exceeded.kind, RateLimitKind::Route);
        assert!((7190..=7200).contains(&exceeded.retry_after()), "{exceeded:?}");
    }

    #[test]
    fn of_requests_at_the_same_time_only_those_that_are_allowed_use_quotas() {
        let limits = RateLimits::default().with_caller(quota(1)).with_route(quota(10));
        let start = std::sync::Barrier::new(8);
        let count = |limits: &RateLimits, from: u64, keys: u64| {
            (from..from + 8)
                .filter(|number| limits.check(caller(*number), record(keys + number)).is_ok())
                .count()
        };
        let allowed: usize = std::thread::scope(|scope| {
            let run = |thread: u64| {
                start.wait();
                count(&limits, 8 * thread, 0)
            };
            let threads: Vec<_> = (0..8).map(|thread| scope.spawn(move || run(thread))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(allowed, 10);
        let without_route = limits.clone().with_route(None);
        let later: usize = (0..8).map(|thread| count(&without_route, 8 * thread, 1000)).sum();
        assert_eq!(later, 64 - 10, "each refused caller has its whole quota");
    }

    #[test]
    fn a_quota_that_is_given_back_can_be_used_again() {
        let limiter = Limiter::new(quota(2).unwrap(), 1, None);
        let name = [1; 16];
        assert!(limiter.check(&name, Use::One).is_ok() && limiter.check(&name, Use::One).is_ok());
        assert!(limiter.check(&name, Use::One).is_err());
        limiter.give_back(&name);
        assert!(limiter.check(&name, Use::Nothing).is_ok() && limiter.check(&name, Use::One).is_ok());
        assert!(limiter.check(&name, Use::One).is_err());
        limiter.give_back(&[2; 16]);
        assert!(limiter.check(&name, Use::Nothing).is_err());
    }

    #[test]
    fn limits_with_the_same_quotas_continue_the_counts_of_earlier_ones() {
        let configure = |caller: u32| {
            let service =
                RateLimits::default().with_caller(quota(caller)).with_key(quota(2)).with_route(quota(9));
            let inherits = service.clone().with_route(quota(1));
            let own = service.clone().with_caller(quota(1)).with_route(None);
            [service, inherits, own]
        };
        let earlier = configure(1);
        for (number, limits) in (0..).zip(&earlier) {
            let expected = if number == 1 { Some(RateLimitKind::Caller) } else { None };
            assert_eq!(kind(limits.check(caller(1), record(number))), expected);
        }
        let same = configure(1);
        RateLimits::continue_counts(same.iter().zip(&earlier));
        for (number, limits) in (0..).zip(&same) {
            assert_eq!(
                kind(limits.check(caller(1), record(10 + number))),
                Some(RateLimitKind::Caller),
                "{number}"
            );
        }
        assert_eq!(kind(same[0].check(caller(1), record(0))), None, "the key was seen");
        assert_eq!(kind(same[0].check(caller(1), record(0))), Some(RateLimitKind::Key));
        let changed = configure(2);
        RateLimits::continue_counts(changed.iter().zip(&same));
        assert_eq!(kind(changed[0].check(caller(1), record(20))), None, "another quota begins anew");
        assert_eq!(kind(changed[1].check(caller(1), record(21))), None, "it shares the new counts");
        assert_eq!(kind(changed[0].check(caller(1), record(22))), Some(RateLimitKind::Caller));
        assert_eq!(kind(changed[2].check(caller(1), record(23))), Some(RateLimitKind::Caller));
    }

    #[test]
    fn counts_of_an_earlier_limit_are_continued_once() {
        let earlier = RateLimits::default().with_caller(quota(1));
        let inherited = earlier.clone();
        let service = RateLimits::default().with_caller(quota(1));
        let own = service.clone().with_caller(quota(1));
        RateLimits::continue_counts([(&service, &earlier), (&own, &inherited)]);
        assert_eq!(kind(service.check(caller(1), record(1))), None);
        assert_eq!(kind(own.check(caller(1), record(2))), None, "it has counts of its own");
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

    #[test]
    fn a_state_that_is_forgotten_with_its_full_quota_is_no_loss() {
        let table = Table { interval: Nanos::new(10), ..Table::new(1) };
        let now = 100;
        let new = Nanos::new(now + 10);
        for (state, expected) in [(0, false), (now, false), (now + 1, true), (now + 10, true)] {
            assert_eq!(table.is_loss(Nanos::new(state), new), expected, "{state}");
        }
    }

    /// Three times as many callers and keys as there are places.
    #[test]
    fn random_callers_neither_fill_the_memory_nor_free_a_caller_from_its_limit() {
        let limits = RateLimits::default().with_caller(quota(2)).with_key(quota(2));
        for number in 0..2 {
            assert_eq!(kind(limits.check(caller(1), record(number))), None);
        }
        assert_eq!(kind(limits.check(caller(1), record(2))), Some(RateLimitKind::Caller));
        let before = RateLimits::evictions();
        for number in 10..(3 * SETS * WAYS) as u64 {
            assert_eq!(kind(limits.check(caller(number), record(number))), None);
        }
        let seen = &limits.seen.as_ref().unwrap().table().table;
        let places: Vec<_> = seen.sets.iter().map(|set| set.lock().unwrap().len()).collect();
        assert_eq!(places.iter().max(), Some(&WAYS));
        assert!(places.iter().sum::<usize>() <= SETS * WAYS);
        for ((kind, before), (_, after)) in before.into_iter().zip(RateLimits::evictions()) {
            assert!(after - before >= (2 * SETS * WAYS) as u64 - 10, "{kind}");
        }
        assert_eq!(kind(limits.check(caller(1), record(2))), Some(RateLimitKind::Caller));
    }
}
