//! The limits of requests with a key that are in flight at the same time: of all callers, and of one caller.
//!
//! A request counts from before its claim until its handler has ended. Handlers go on when clients hang up, so a limit of
//! connections does not limit them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use oncegate_core::CallerTag;
use oncegate_engine::LogThrottle;

/// The number of maps that hold the counts of callers, so that threads rarely wait for each other.
const SHARDS: usize = 16;

/// A limit at which requests with a key are refused. Its name is that of the setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    MaxInFlight,
    MaxInFlightPerCaller,
    ResponseBudget,
}

const WARNING_INTERVAL: Duration = Duration::from_secs(60);
/// One for each limit, so that one busy caller does not hide that the service is at its limit.
static WARNINGS: LazyLock<[LogThrottle; 3]> =
    LazyLock::new(|| [(); 3].map(|()| LogThrottle::new(WARNING_INTERVAL)));

impl Limit {
    /// Logs, at most once a minute for each limit, that a request is refused at it.
    pub(crate) fn warn(self, caller: Option<CallerTag>) {
        let Some(suppressed) = WARNINGS.get(self as usize).and_then(LogThrottle::pass) else { return };
        let (limit, what) = match self {
            Self::MaxInFlight => ("max-in-flight", "requests with a key are in flight"),
            Self::MaxInFlightPerCaller => {
                ("max-in-flight-per-caller", "requests with a key of one caller are in flight")
            }
            Self::ResponseBudget => ("response-budget", "bytes of responses are in memory"),
        };
        let caller = caller.filter(|_| self == Self::MaxInFlightPerCaller).map(tracing::field::display);
        tracing::warn!(
            limit,
            caller,
            suppressed,
            "a limit is reached: as many {what} as are allowed; further requests with a key are refused with 503"
        );
    }
}

/// The requests in flight. Copies share their counts.
#[derive(Clone)]
pub(crate) struct InFlight {
    max: usize,
    max_per_caller: usize,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    all: AtomicUsize,
    callers: [Mutex<HashMap<CallerTag, usize>>; SHARDS],
}

impl InFlight {
    pub(crate) fn new(max: usize, max_per_caller: usize) -> Self {
        Self { max, max_per_caller, counts: Arc::default() }
    }

    pub(crate) fn with_max(self, max: usize) -> Self {
        Self { max, ..self }
    }

    pub(crate) fn with_max_per_caller(self, max_per_caller: usize) -> Self {
        Self { max_per_caller, ..self }
    }

    pub(crate) const fn max(&self) -> usize {
        self.max
    }

    /// The number of requests in flight now, of all callers.
    pub(crate) fn now(&self) -> usize {
        self.counts.all.load(Ordering::Relaxed)
    }

    pub(crate) const fn max_per_caller(&self) -> usize {
        self.max_per_caller
    }

    /// The most requests in flight of one caller. Reads the counts of all callers, of which there are at most as many as
    /// requests in flight.
    pub(crate) fn most_of_a_caller(&self) -> usize {
        let callers = self.counts.callers.iter();
        let most = callers.map(|callers| {
            let callers = callers.lock().unwrap_or_else(PoisonError::into_inner);
            callers.values().copied().max().unwrap_or(0)
        });
        most.max().unwrap_or(0)
    }

    /// Counts one more request of this caller (`None` if there is only one caller).
    ///
    /// # Errors
    /// The limit that is reached.
    pub(crate) fn enter(self: &Arc<Self>, caller: Option<CallerTag>) -> Result<Slot, Limit> {
        let all = &self.counts.all;
        let entered =
            all.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| (now < self.max).then_some(now + 1));
        entered.map_err(|_| Limit::MaxInFlight)?;
        let mut slot = Slot { in_flight: self.clone(), caller: None };
        if let Some(caller) = caller {
            slot.count_for(caller)?;
        }
        Ok(slot)
    }
}

impl Counts {
    fn callers(&self, caller: CallerTag) -> MutexGuard<'_, HashMap<CallerTag, usize>> {
        let shard = caller.as_bytes().first().map_or(0, |byte| usize::from(*byte)) % SHARDS;
        let [first, ..] = &self.callers;
        self.callers.get(shard).unwrap_or(first).lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts a request as in flight until this is dropped.
pub(crate) struct Slot {
    in_flight: Arc<InFlight>,
    caller: Option<CallerTag>,
}

impl Slot {
    /// Counts this request for its caller, too. Once only.
    ///
    /// # Errors
    /// The limit that is reached.
    pub(crate) fn count_for(&mut self, caller: CallerTag) -> Result<(), Limit> {
        let mut callers = self.in_flight.counts.callers(caller);
        let now = callers.entry(caller).or_insert(0);
        if *now >= self.in_flight.max_per_caller {
            return Err(Limit::MaxInFlightPerCaller);
        }
        *now += 1;
        self.caller = Some(caller);
        Ok(())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let counts = &self.in_flight.counts;
        if let Some(caller) = self.caller
            && let Entry::Occupied(mut entry) = counts.callers(caller).entry(caller)
        {
            match entry.get_mut() {
                // Callers without a request are forgotten, so that the map does not grow for ever.
                0 | 1 => {
                    entry.remove();
                }
                now => *now -= 1,
            }
        }
        counts.all.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remembered(in_flight: &InFlight) -> usize {
        in_flight.counts.callers.iter().map(|callers| callers.lock().unwrap().len()).sum()
    }

    #[test]
    fn is_full_at_either_limit_and_gives_back() {
        let in_flight = Arc::new(InFlight::new(3, 2));
        let (ada, bob) = (Some(CallerTag::from_bytes([1; 8])), Some(CallerTag::from_bytes([2; 8])));
        for _ in 0..3 {
            let mut slots = vec![in_flight.enter(ada).unwrap(), in_flight.enter(ada).unwrap()];
            assert_eq!(in_flight.enter(ada).unwrap_err(), Limit::MaxInFlightPerCaller);
            slots.push(in_flight.enter(bob).unwrap());
            for caller in [bob, None] {
                assert_eq!(in_flight.enter(caller).unwrap_err(), Limit::MaxInFlight);
            }
            assert_eq!(in_flight.most_of_a_caller(), 2);
            slots.remove(0);
            slots.push(in_flight.enter(ada).unwrap());
            drop(slots);
            assert_eq!((in_flight.now(), remembered(&in_flight)), (0, 0));
            assert_eq!(in_flight.most_of_a_caller(), 0);
        }
        let slots: Vec<_> = (0..3).map(|_| in_flight.enter(None).unwrap()).collect();
        assert!(in_flight.enter(None).is_err());
        drop(slots);
    }

    #[test]
    fn a_refused_caller_leaves_nothing_behind() {
        let in_flight = Arc::new(InFlight::new(10, 0));
        assert!(in_flight.enter(Some(CallerTag::from_bytes([1; 8]))).is_err());
        assert_eq!(in_flight.now(), 0);
    }
}
